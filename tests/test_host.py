"""What the host decides before a kernel runs: orders, plans, layouts, who computes a call, and what is refused.

All of it runs without a GPU. Without one the kernels that a call reaches run in Triton's interpreter, with proof off.
"""

import functools
import importlib
import itertools
import random
import threading
import warnings

import aten_model
import pytest
import torch
from bits import assert_bits_equal
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

INTERPRETED = not torch.cuda.is_available()
EVERY_HIDDEN_SIZE = range(64, 32768 + 1, 4)


@pytest.fixture
def module(kernel):
    return lambda name: importlib.import_module(f"{kernel.__name__}.{name}")


@pytest.fixture
def chooser(seed):
    return random.Random(seed)


@pytest.fixture
def proof_off(monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "off")


def numbers(choose, most):
    """Mostly small, up to `most`, and often beside a power of two."""
    number = 1 << choose.randrange(most.bit_length())
    return min(max(number + choose.choice((0, 0, -1, 1, choose.randrange(number))), 1), most)


# The orders of the sums


def test_row_reduction_is_the_models(module, chooser):
    row_reduction = module("reduce_config").row_reduction
    for _ in range(20_000):
        rows, hidden_size = numbers(chooser, 1 << 22), chooser.choice(EVERY_HIDDEN_SIZE)
        found, tree = row_reduction(rows, hidden_size), aten_model.row_tree(rows, hidden_size)
        assert (found.width, found.height, 1) == (tree.width, tree.warps, tree.ctas), (rows, hidden_size)
        assert found.vectorized == (hidden_size >= 128)
        assert found.columns == 4 * tree.width * tree.warps
        assert hidden_size <= found.columns << found.log2_steps < 2 * hidden_size + 2 * found.columns


def test_column_reduction_is_the_models(module, chooser):
    column_reduction = module("reduce_config").column_reduction
    for _ in range(20_000):
        rows, hidden_size = numbers(chooser, 1 << 22), chooser.choice(EVERY_HIDDEN_SIZE)
        gpu = chooser.choice((1, 8, 46, 68, 108, 132, 148)), chooser.choice((1024, 1536, 2048))
        found = column_reduction(rows, hidden_size, *gpu)
        tree = aten_model.column_tree(rows, hidden_size, aten_model.Device(*gpu))
        assert (found.height, found.blocks) == (tree.warps, tree.ctas), (rows, hidden_size, gpu)
        assert found.chains == 4 * tree.warps * tree.ctas


def halves(first_row, rows, hidden_size, element_size):
    if 1 + (rows * hidden_size - 1) * element_size < 1 << 31:
        return [(first_row, rows)]
    half = rows // 2
    parts = ((first_row, half), (first_row + half, rows - half))
    return [found for part in parts for found in halves(*part, hidden_size, element_size)]


def test_split_rows_halves_what_needs_more_than_32_bits(module, chooser):
    split_rows = module("reduce_config").split_rows
    for _ in range(2000):
        hidden_size, element_size = chooser.choice(EVERY_HIDDEN_SIZE), chooser.choice((2, 4))
        fit = (1 << 31) // (hidden_size * element_size)
        rows = max(fit * chooser.choice((1, 1, 2, 4, 7)) + chooser.choice((-1, 0, 1, chooser.randrange(fit))), 1)
        assert split_rows(rows, hidden_size, element_size) == halves(0, rows, hidden_size, element_size)


def test_rows_of_a_class_are_summed_alike(module):
    config = module("reduce_config")
    for rows in (*range(1, 40), 63, 64, 255, 256, 511, 512, 513, 1 << 20):
        first = config.row_class(rows)
        assert first in config.ROW_CLASSES and first <= rows
        for hidden_size in EVERY_HIDDEN_SIZE:
            if config.row_reduction(rows, hidden_size) != config.row_reduction(first, hidden_size):
                pytest.fail(f"{rows} rows of {hidden_size} are summed differently from {first}")


# Launch plans


def is_power_of_two(number):
    return number > 0 and number & (number - 1) == 0


# Triton's limits: elements of a tensor, warps of a program.
MOST_ELEMENTS = 1 << 20
MOST_WARPS = 32


def test_forward_plans_can_be_launched(module):
    rms_norm, config = module("rms_norm"), module("reduce_config")
    for hidden_size, rows in itertools.product(EVERY_HIDDEN_SIZE, config.ROW_CLASSES):
        plan, order = rms_norm.launch_plan(rows, hidden_size), config.row_reduction(rows, hidden_size)
        assert is_power_of_two(plan.rows_per_program) and is_power_of_two(order.columns)
        assert plan.rows_per_program * order.columns << order.log2_steps <= MOST_ELEMENTS
        assert is_power_of_two(plan.num_warps) and plan.num_warps <= MOST_WARPS
        assert plan == rms_norm.launch_plan(2 * rows - 1, hidden_size), "one plan for a class of row counts"


def test_backward_plans_can_be_launched(module, chooser):
    backward, config = module("rms_norm_backward"), module("reduce_config")
    fused = 0
    for hidden_size in EVERY_HIDDEN_SIZE:
        rows, gpu = numbers(chooser, 1 << 20), (chooser.choice((1, 46, 132)), 2048)
        order = config.row_reduction(rows, hidden_size)
        columns = config.column_reduction(rows, hidden_size, *gpu)
        for needed in (columns, None):
            plan = backward.launch_plan(rows, hidden_size, needed, gpu[0])
            assert plan == backward.launch_plan(rows, hidden_size, needed, gpu[0])
            assert is_power_of_two(plan.rows_per_program)
            assert plan.rows_per_program * order.columns << order.log2_steps <= MOST_ELEMENTS
            assert is_power_of_two(plan.num_warps) and plan.num_warps <= MOST_WARPS
            if plan.fused:
                fused += 1
                assert needed is not None and columns.height % plan.rows_per_program == 0
    assert fused


# Layouts


def random_layout(choose, dims, sizes=(1, 1, 2, 3, 4), columns=(4, 8)):
    """Shape and strides of a view of a contiguous tensor: permuted, sliced, expanded, with odd strides at size 1."""
    shape = [choose.choice(sizes) for _ in range(dims)] + [choose.choice(columns)]
    order = list(range(dims))
    if choose.random() < 0.6:
        choose.shuffle(order)
    if choose.random() < 0.15:
        order.append(dims)
        choose.shuffle(order)
    else:
        order.append(dims)
    strides = [0] * (dims + 1)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim] * choose.choice((1, 1, 1, 1, 2))
    for dim in range(dims):
        if choose.random() < 0.1:
            strides[dim] = 0
        elif shape[dim] == 1 and choose.random() < 0.5:
            strides[dim] = choose.randrange(1, 50)
    return tuple(shape), tuple(strides)


def offsets(shape, strides):
    """Of every element, in the order of indices."""
    indices = itertools.product(*map(range, shape))
    return [sum(index * stride for index, stride in zip(place, strides)) for place in indices]


def test_rows_in_memory_finds_every_row(module, chooser):
    layout = module("layout")
    found_none = 0
    for _ in range(5000):
        shape, strides = random_layout(chooser, chooser.randrange(5))
        found = layout.rows_in_memory(shape, strides)
        starts = offsets(shape[:-1], strides[:-1])
        if found is None:
            found_none += 1
            first, second = sorted(starts)[:2] if len(starts) > 1 else (0, 0)
            spaced = sorted(starts) == [number * (second - first) for number in range(len(starts))]
            assert strides[-1] != 1 or not spaced, (shape, strides)
            continue
        rows, row_stride, order = found
        numbers_of_rows = offsets(shape[:-1], layout.row_number_strides(shape, order))
        assert sorted(numbers_of_rows) == list(range(rows)), (shape, strides)
        assert [number * row_stride for number in numbers_of_rows] == starts, (shape, strides)
        assert strides[-1] == 1
    assert 500 < found_none < 4500


def test_row_levels_find_every_row_in_every_tensor(module, chooser):
    layout = module("layout")
    found_none = 0
    for _ in range(5000):
        dims = chooser.randrange(1, 6)
        shape, _ = random_layout(chooser, dims)
        tensors = []
        for _ in range(3):
            order = chooser.sample(range(dims), dims) if chooser.random() < 0.5 else range(dims)
            strides, step = [0] * dims, 1
            for dim in reversed(order):
                strides[dim], step = step, step * shape[dim] * chooser.choice((1, 1, 1, 2))
            tensors.append(strides)
        order = tuple(dim for dim in chooser.sample(range(dims), dims) if shape[dim] != 1)
        found = layout.row_levels(shape, order, *tensors)
        rows = [index[::-1] for index in itertools.product(*(range(shape[dim]) for dim in order))]
        if found is None:
            found_none += 1
            together = sum(
                all(tensor[slow] == tensor[fast] * shape[fast] for tensor in tensors)
                for slow, fast in itertools.pairwise(order)
            )
            assert len(order) - together > 3
            continue
        levels, inner, middle, steps = found
        for tensor, (outer_step, middle_step, inner_step) in zip(tensors, steps):
            for row, index in enumerate(itertools.product(*(range(shape[dim]) for dim in order))):
                expected = sum(place * tensor[dim] for place, dim in zip(index, order))
                if levels == 1:
                    assert row * outer_step == expected
                else:
                    outer_and_middle, at_inner = divmod(row, inner)
                    at_outer, at_middle = divmod(outer_and_middle, middle)
                    assert at_outer * outer_step + at_middle * middle_step + at_inner * inner_step == expected
        del rows
    assert 100 < found_none < 4000


def test_is_dense_means_no_gap_and_no_overlap(module, chooser):
    is_dense = module("layout").is_dense
    found = []
    for _ in range(5000):
        shape, strides = random_layout(chooser, chooser.randrange(4))
        found.append(is_dense(shape, strides))
        assert found[-1] == (sorted(offsets(shape, strides)) == list(range(len(offsets(shape, strides)))))
    assert 500 < sum(found) < 4500


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def test_output_is_laid_out_as_eagers(module, chooser):
    """Up to the strides of dimensions of size 1, which lead nowhere."""
    rms_norm, output = module("rms_norm"), module("layout").Output
    for _ in range(1500):
        shape, strides = random_layout(chooser, chooser.randrange(5), sizes=(0, 1, 2, 3, 3))
        x = torch.empty_strided(shape, strides, dtype=chooser.choice(DTYPES))
        weight = torch.empty(shape[-1], dtype=chooser.choice(DTYPES))
        norm = functools.partial(rms_norm.eager, eps=1e-6)
        for formula, inputs in ((norm, (x, weight)), (torch.nn.functional.silu, (x,))):
            expected, found = formula(*inputs), output.of(formula, *inputs)
            for made in (found.empty(x), torch.empty_strided(found.shape, found.strides, dtype=found.dtype)):
                assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
                for size, ours, eagers in zip(shape, made.stride(), expected.stride()):
                    assert size < 2 or ours == eagers, f"{made.stride()}, eager {expected.stride()} of {shape}, {strides}"


@pytest.mark.xfail(reason="on the meta device elementwise operators keep the strides of size 1, elsewhere they do not")
def test_output_has_eagers_strides_of_size_1(module):
    x = torch.empty(2, 3, 1, 64).transpose(1, 2)
    assert module("layout").Output.of(torch.nn.functional.silu, x).strides == torch.nn.functional.silu(x).stride()


# Wrong arguments


X, WEIGHT = torch.ones(2, 64), torch.ones(64)
WRONG = {
    "weight too short": (X, WEIGHT[:60], 1e-6, ValueError, "weight: expected shape [64]", "found [60]"),
    "weight of two dimensions": (X, WEIGHT[None], 1e-6, ValueError, "weight: expected shape [64]", "found [1, 64]"),
    "weight on another device": (X, WEIGHT.to("meta"), 1e-6, ValueError, "weight: expected device cpu", "found meta"),
    "x of no dimension": (X[0, 0], WEIGHT, 1e-6, ValueError, "hidden_states: expected at least one", "0-dimensional"),
    "x of integers": (X.int(), WEIGHT, 1e-6, TypeError, "hidden_states: expected a real floating", "torch.int32"),
    "x of complex": (X.cfloat(), WEIGHT, 1e-6, TypeError, "hidden_states: expected a real", "torch.complex64"),
    "x a list": ([1.0], WEIGHT, 1e-6, TypeError, "hidden_states: expected a torch.Tensor", "found list"),
    "weight of integers": (X, WEIGHT.long(), 1e-6, TypeError, "weight: expected a real floating", "torch.int64"),
    "weight missing": (X, None, 1e-6, TypeError, "weight: expected a torch.Tensor", "found NoneType"),
    "eps negative": (X, WEIGHT, -1e-6, ValueError, "eps: expected a finite number", "found -1e-06"),
    "eps nan": (X, WEIGHT, float("nan"), ValueError, "eps: expected a finite number", "found nan"),
    "eps infinite": (X, WEIGHT, float("inf"), ValueError, "eps: expected a finite number", "found inf"),
    "eps a bool": (X, WEIGHT, True, TypeError, "eps: expected a number", "found bool"),
    "eps a string": (X, WEIGHT, "1e-6", TypeError, "eps: expected a number", "found str"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rms_norm_names_the_wrong_argument(kernel, case):
    *arguments, error, expected, found = WRONG[case]
    with pytest.raises(error) as raised:
        kernel.rms_norm(*arguments)
    assert expected in str(raised.value) and found in str(raised.value)


@pytest.mark.parametrize("input, found", [(X.int(), "torch.int32"), (X.cfloat(), "torch.complex64"), (None, "NoneType")])
def test_silu_names_the_wrong_argument(kernel, input, found):
    with pytest.raises(TypeError, match=f"^input: expected .* found {found}$"):
        kernel.silu(input)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"repo_id": "a/b", "local_path": "/c"}, "repo_id, local_path: .* found 'a/b' and '/c'"),
        ({"repo_id": "a/b", "version": 1, "revision": "main"}, "version, revision: .* found 1 and 'main'"),
        ({"version": 1}, "repo_id: .* found None"),
        ({"revision": "main"}, "repo_id: .* found None"),
        ({"devices": "cuda"}, "devices: .* found the string 'cuda'"),
    ],
)
def test_kernel_mapping_names_the_wrong_argument(kernel, arguments, named):
    with pytest.raises(ValueError, match=f"^{named}$"):
        kernel.kernel_mapping(**arguments)


# Outside the domain: the formula runs, whoever ran before


class Subclass(torch.Tensor):
    pass


def eager_rms_norm(x, weight, eps=1e-5):
    h = x.to(torch.float32)
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


eager_silu = torch.nn.functional.silu


@pytest.fixture
def functions(kernel, proof_off, monkeypatch, module):
    """Pairs of a function as ours and as eager's, after a call of ours that a kernel answered; a kernel now fails."""
    x, weight = torch.randn(6, 64), torch.randn(64)
    ours = functools.partial(kernel.rms_norm, weight=weight, eps=1e-5), kernel.silu
    for function in ours:
        function(x)
        function(x.clone().requires_grad_())

    def launched(*arguments):
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(module("launch").Launch, "__call__", launched)
    return tuple(zip(ours, (functools.partial(eager_rms_norm, weight=weight), eager_silu)))


def assert_same(found, expected):
    """Tensors, or tuples of them, of the same bits, types and strides."""
    if isinstance(expected, torch.Tensor):
        assert type(found) is type(expected) and found.stride() == expected.stride()
        assert_bits_equal(found, expected)
    else:
        assert len(found) == len(expected)
        for ours, eagers in zip(found, expected):
            assert_same(ours, eagers)


def forward_dual(function, x, tangent):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))))


TRANSFORMS = {
    "vmap": lambda function, x: torch.vmap(function)(x),
    "vmap over columns": lambda function, x: torch.vmap(function, in_dims=1, out_dims=1)(x[:, None, :].expand(6, 3, 64)),
    "func.grad": lambda function, x: torch.func.grad(lambda x: function(x).sum())(x),
    "func.jvp": lambda function, x: torch.func.jvp(function, (x,), (x.cos(),)),
    "func.vjp": lambda function, x: torch.func.vjp(function, x)[1](x.cos()),
    "func.hessian": lambda function, x: torch.func.hessian(lambda x: function(x).sum())(x[0]),
    "functionalize": lambda function, x: torch.func.functionalize(function)(x),
    "forward_ad": lambda function, x: forward_dual(function, x, x.cos()),
    "jit.trace": lambda function, x: torch.jit.trace(function, x, check_trace=False)(x + 1),
    "make_fx": lambda function, x: make_fx(function)(x)(x + 1),
    "subclass": lambda function, x: function(x.as_subclass(Subclass)),
    "float64": lambda function, x: function(x.double()),
    "negated lazily": lambda function, x: function(torch._neg_view(x)),
    "strided last dimension": lambda function, x: function(x.repeat_interleave(2, -1)[:, ::2]),
}


@pytest.mark.filterwarnings("ignore:.*TracerWarning|Converting a tensor|`torch.jit.trace`")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_formula_runs_where_a_kernel_cannot(functions, transform):
    transform = TRANSFORMS[transform]
    x = torch.randn(6, 64)
    for ours, eagers in functions:
        assert_same(transform(ours, x), transform(eagers, x))
