"""Softmax: the kernels in Triton's interpreter against the transcription of ATen's, the proof's power, and what surrounds them.

The interpreter has numpy's exponentials, for the transcription too, rounds an FMA as its version does
(`interpreter.multiply_add`) and truncates to bf16: `cast` does likewise.
"""

import math
import random
from types import SimpleNamespace

import aten_model
import numpy
import pytest
import torch
from bits import assert_bits_equal, bits_equal
from interpreter import multiply_add
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [
    pytest.mark.usefixtures("proof_off"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero|All-NaN):RuntimeWarning"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Both sides of where a power of two, and with it the order, changes.
SIZES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 200, 511, 512, 513, 1000, 1023, 1024)
SPECIAL = (-math.inf, math.inf, math.nan, -0.0, 0.0, 1e-40, -6e4)


def numpy_exp(x):
    return torch.from_numpy(numpy.asarray(numpy.exp(x.numpy())))


def cast(x, dtype):
    """As the interpreter does."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(dtype) if dtype == torch.bfloat16 else x.to(dtype)


def rows_at_random(choose, generator, rows, size, dtype, special=True):
    """Of some scale; in one case of three with rows, or an element of each, that are not numbers or on their verge."""
    x = torch.randn(rows, size, generator=generator) * choose.choice((0.1, 1.0, 3.0))
    if special and choose.random() < 1 / 3:
        for row in range(rows):
            value, where = choose.choice(SPECIAL), choose.choice((slice(None), choose.randrange(size)))
            # The interpreter truncates what is subnormal in bf16 in a way of its own.
            x[row, where] = 0.0 if value == 1e-40 and dtype == torch.bfloat16 else value
    return x.to(dtype)


def spaced(x, gap):
    """The same rows with a gap between them."""
    return torch.zeros(x.shape[0], x.shape[1] + gap, dtype=x.dtype)[:, : x.shape[1]].copy_(x)


def forward_of(family, x):
    rows, size = x.shape
    out = torch.full((rows, size), math.nan, dtype=x.dtype)
    family._forward(x.dtype, rows, size, x.stride(0), CPU)(x, out)
    return out


def backward_of(family, dy, y):
    rows, size = y.shape
    dx = torch.full((rows, size), math.nan, dtype=y.dtype)
    family._backward(y.dtype, rows, size, dy.stride(0), CPU)(dy, y, dx)
    return dx


@interpreted
def test_kernels_equal_the_transcription(module, seed):
    """200 cases; `_forward` and `_backward` take y as softmax returns it, and as it never does."""
    family, generator, choose = module("ops.softmax"), torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(200):
        size = choose.choice((choose.choice(SIZES), choose.randint(1, 1024)))
        rows, dtype, gap = (
            choose.randint(1, 140 if size < 40 else 9),
            choose.choice(DTYPES),
            choose.choice((0, 0, 1, 8)),
        )
        label = f"case {case}, {rows}x{size} {dtype}, gap {gap}"
        x = rows_at_random(choose, generator, rows, size, dtype)
        y = forward_of(family, spaced(x, gap))
        assert_bits_equal(y, aten_model.softmax(x, numpy_exp, cast), f"output of {label}")
        if choose.random() < 0.3:
            y = torch.rand(rows, size, generator=generator).to(dtype)
        dy = rows_at_random(choose, generator, rows, size, dtype)
        dx = backward_of(family, spaced(dy, gap), y)
        assert_bits_equal(dx, aten_model.softmax_backward(dy, y, multiply_add, cast), f"gradient of {label}")


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 33, 1024])
def test_special_rows(module, size, dtype):
    """Whatever order it is added up in, a row has these values."""
    family = module("ops.softmax")
    nan, one = torch.full((size,), math.nan), torch.full((size,), 1 / size)
    y = forward_of(family, torch.stack([torch.full((size,), value) for value in SPECIAL]).to(dtype))
    for row, value in zip(y, SPECIAL):
        expected = one if math.isfinite(value) else nan
        assert_bits_equal(row, cast(expected, dtype), f"rows of {value}")
    x = torch.zeros(3, size)
    x[0, -1], x[1, -1], x[2, -1] = -math.inf, math.inf, math.nan
    y = forward_of(family, x.to(dtype))
    assert y[1:].isnan().all()
    assert size == 1 or (y[0, -1] == 0 and not y[0].isnan().any())
    dy = torch.full((1, size), -0.0, dtype=dtype)
    # A sum that starts from +0 is never -0: -(+0) * y + -0 is -0.
    assert_bits_equal(backward_of(family, dy, torch.full((1, size), 0.5, dtype=dtype)), dy)


# Orders of a row sum of [rows, size], such as a kernel might have by mistake


def in_lanes(lanes, pairs="far"):
    def order(terms):
        size = 1 << (terms.shape[1] - 1).bit_length()
        width = min(lanes, size)
        total = torch.zeros(len(terms), width)
        for step in functional.pad(terms, (0, size - terms.shape[1])).view(len(terms), -1, width).unbind(1):
            total = total + step
        while total.shape[1] > 1:
            half = total.shape[1] // 2
            first, second = (total[:, :half], total[:, half:]) if pairs == "far" else (total[:, ::2], total[:, 1::2])
            total = first + second
        return total[:, 0]

    return order


def blocks_of_lanes(terms):
    """A lane takes neighbours."""
    size = 1 << (terms.shape[1] - 1).bit_length()
    steps = functional.pad(terms, (0, size - terms.shape[1])).view(len(terms), min(32, size), -1)
    return in_lanes(32)(steps.transpose(1, 2).reshape(len(terms), size))


WRONG_ORDERS = {
    "16 lanes": in_lanes(16),
    "64 lanes": in_lanes(64),
    "neighbouring lanes first": in_lanes(32, "near"),
    "neighbours in a lane": blocks_of_lanes,
    "a tree over the whole row": in_lanes(1024),
}


@interpreted
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_the_transcription_tells_of_a_wrong_order(module, monkeypatch, seed, name, direction):
    """Of 64 fp32 rows of 1000 elements; a kernel with the right order equals the transcription in all."""
    family, generator, rows = module("ops.softmax"), torch.Generator().manual_seed(seed), 64
    x, dy = torch.randn(2, rows, 1000, generator=generator).unbind()

    def compared():
        if direction == "forward":
            return forward_of(family, x), aten_model.softmax(x, numpy_exp)
        y = aten_model.softmax(x, numpy_exp)
        return backward_of(family, dy, y), aten_model.softmax_backward(dy, y, multiply_add)

    assert_bits_equal(*compared())
    order = WRONG_ORDERS[name]
    source = module("kernels_src.softmax")

    def wrong(terms, ROWS, LOG2_SIZE, WIDTH):
        sums = order(torch.from_numpy(terms.handle.data)).numpy()
        return type(terms)(type(terms.handle)(sums, terms.handle.dtype), source.tl.block_type(terms.dtype, [ROWS]))

    monkeypatch.setattr(source, "_warp_sum", wrong)
    found, expected = compared()
    differing = int((found != expected).any(-1).sum())
    print(f"{differing} of {rows} rows differ")
    assert differing  # In a fifth of the rows or more: none of 64 would one time in a million.


@interpreted
def test_planted_arithmetic_is_told(monkeypatch, seed):
    """What rounds otherwise: a product that is not rounded to 16 bits, a difference without FMA, a product with a reciprocal."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 64, 200, generator=generator).unbind()
    y = aten_model.softmax(x, numpy_exp)
    terms = numpy_exp(x - x.amax(-1, keepdim=True))
    assert not bits_equal(terms * (1.0 / aten_model._warp_sum(terms)[:, None]), y)
    assert not bits_equal(
        aten_model.softmax_backward(dy, y, lambda a, b, c: a * b + c), aten_model.softmax_backward(dy, y)
    )
    halves = dy.half(), y.half()
    unrounded = aten_model.softmax_backward(*(each.float() for each in halves)).half()
    assert not bits_equal(unrounded, aten_model.softmax_backward(*halves))


# Proof


def orders_of(log2_size):
    """The wrong orders that differ at this length: up to 64 elements a longer tree is the same additions."""
    short = {"neighbouring lanes first": 1, "16 lanes": 6, "neighbours in a lane": 6, "64 lanes": 7}
    return {name: order for name, order in WRONG_ORDERS.items() if log2_size >= short.get(name, 7)}


def compared(family, patch, kind, of_gradient, seed, order):
    """What the proof compares of a kernel with this order and eager, both transcribed; `seed` in its own seed's place."""
    wrong = {"row_sum": order}
    patch.setattr(family.proof, "generator", lambda device, _: torch.Generator(device).manual_seed(seed))
    patch.setattr(family, "functional", SimpleNamespace(softmax=lambda x, dim: aten_model.softmax(x)))
    patch.setattr(family, "_formula", aten_model.softmax_backward)
    patch.setattr(family, "_forward", lambda *_: lambda x, out: out.copy_(aten_model.softmax(x, **wrong)))
    patch.setattr(
        family, "_backward", lambda *_: lambda dy, y, dx: dx.copy_(aten_model.softmax_backward(dy, y, **wrong))
    )
    return (family._gradient_comparisons if of_gradient else family._comparisons)(kind, CPU)


def tells(*arguments) -> bool:
    return any(not bits_equal(found, expected) for _, found, expected in compared(*arguments))


@pytest.mark.parametrize("log2_size", [2, 3, 5, 6, 8, 10])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_gradient", [False, True])
def test_the_proof_tells_a_wrong_order(module, monkeypatch, seed, of_gradient, dtype, log2_size):
    family = module("ops.softmax")
    kind = family.Kind(dtype, log2_size, 1)
    assert not tells(family, monkeypatch, kind, of_gradient, seed, aten_model._warp_sum)
    missed = [
        name
        for name, order in orders_of(log2_size).items()
        if not tells(family, monkeypatch, kind, of_gradient, seed, order)
    ]
    assert not missed


@interpreted
@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.long) for dtype in DTYPES[1:])])
def test_a_proof_is_of_the_kernel_that_will_run(module, monkeypatch, dtype):
    """Of its kind, of rows on both ends of it, and of what is not a number."""
    family, seen = module("ops.softmax"), []
    monkeypatch.setattr(family, "_PROOF_ELEMENTS", dict.fromkeys(DTYPES, 8192))
    bind = family._bind

    def spy(kernel, constants, device, dtypes, kind, rows, scalars):
        seen.append((kernel.__name__, kind, scalars[0]))
        return bind(kernel, constants, device, dtypes, kind, rows, scalars)

    monkeypatch.setattr(family, "_bind", spy)
    for log2_size in (0, 1, 3, 5, 10):
        for unit in (1 << power for power in range(4)):
            if unit > min(1 << log2_size, 16 // dtype.itemsize):
                continue
            kind = family.Kind(dtype, log2_size, unit)
            seen.clear()
            for comparisons in (family._comparisons, family._gradient_comparisons):
                for what, found, expected in comparisons(kind, CPU):
                    assert found.stride() == expected.stride() and found.isnan().any() and found.isfinite().any(), what
            sizes = (
                {(1 << log2_size) // 2 + unit if log2_size else 1, 1 << log2_size} if unit < 1 << log2_size else {unit}
            )
            expected = {(f"softmax_{way}", kind, size) for way in ("forward", "backward") for size in sizes}
            assert set(seen) == expected


# What surrounds the kernels


def gradients_of(function, x, dy):
    leaf = x.detach().requires_grad_()
    out = function(leaf)
    (gradient,) = torch.autograd.grad(out, leaf, dy)
    return out.detach(), gradient


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_autograd_gets_what_the_kernels_compute(kernel, module, seed, dtype):
    family, generator = module("ops.softmax"), torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 3, 5, 40, generator=generator).to(dtype).unbind()
    expected = forward_of(family, x.view(15, 40)).view(x.shape)
    theirs = backward_of(family, dy.view(15, 40), expected.view(15, 40)).view(x.shape)
    for _ in range(2):  # The second call is recognised.
        for dim in (-1, 2):
            out, gradient = gradients_of(lambda x: kernel.softmax(x, dim), x, dy)  # noqa: B023
            assert_bits_equal(out, expected)
            assert_bits_equal(gradient, theirs)
            assert_bits_equal(kernel.softmax(x, dim), expected)
    leaf = x.clone().requires_grad_()
    assert kernel.softmax(leaf).grad_fn.name() == "SoftmaxBackward"
    assert torch.autograd.grad(kernel.softmax(leaf), leaf, None if x.numel() == 1 else dy * 0)[0].shape == x.shape


LAYOUTS = {
    "rows apart": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every other row": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "one row for all": lambda x: x[:1, :1].expand_as(x),
    "matrices apart": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "columns first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}
WITH_KERNEL = ("rows apart", "every other row", "one row for all")


@interpreted
@pytest.mark.parametrize("of", ["input", "gradient"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_dense_whatever_the_layout(kernel, module, seed, layout, of):
    family, generator = module("ops.softmax"), torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 4, 6, 40, generator=generator).unbind()
    arranged = LAYOUTS[layout](x if of == "input" else dy)
    arguments = (arranged, dy) if of == "input" else (x, arranged)
    results = gradients_of(kernel.softmax, *arguments)
    for found, theirs in zip(results, gradients_of(lambda x: functional.softmax(x, -1), *arguments)):
        assert found.stride() == theirs.stride() == x.stride()
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        torch.testing.assert_close(found, theirs)
    calls = family._calls if of == "input" else family._gradient_calls
    (found,) = [found for key, found in calls.resolved.items() if arranged.stride() in [part[2] for part in key[1:]]][
        :1
    ]
    assert (found is not None) == (layout in WITH_KERNEL)


@pytest.fixture(autouse=True)
def no_calls(module):
    for calls in (module("ops.softmax")._calls, module("ops.softmax")._gradient_calls):
        calls.clear()


def outside():
    x = torch.randn(3, 4, 40)
    return {
        "float64": (x.double(), -1),
        "long rows": (torch.randn(2, 1025), -1),
        "another dimension": (x, 1),
        "no dimension": (x[0, 0, 0], -1),
        "no rows": (x[:0], -1),
        "no elements": (x[..., :0], -1),
        "a subclass": (x.as_subclass(type("Other", (torch.Tensor,), {})), -1),
        "a dimension by its number": (x, -3),
    }


@pytest.mark.parametrize("case", outside())
def test_outside_the_domain_eager_runs(kernel, module, case):
    x, dim = outside()[case]
    assert module("ops.softmax").replacement(x, dim) is None
    assert_bits_equal(
        kernel.softmax(x, dim).as_subclass(torch.Tensor),
        functional.softmax(x, dim, _stacklevel=4).as_subclass(torch.Tensor),
    )


def test_what_eager_refuses_is_refused(kernel):
    with pytest.raises(IndexError, match="Dimension out of range"):
        kernel.softmax(torch.ones(2, 3), 2)
    with pytest.raises(TypeError, match=r"input: .* found list"):
        kernel.softmax([1.0])
    with pytest.raises(TypeError, match=r"input: .* found torch.int64"):
        kernel.softmax(torch.ones(2, dtype=torch.int64))


@interpreted
def test_under_autocast_16_bits_are_eagers(kernel, module):
    """CUDA's computes in fp32. A call without autocast that is recognised must not stand for one with it."""
    x = torch.randn(4, 40).half()
    for _ in range(2):
        kernel.softmax(x)
        assert len(module("ops.softmax")._calls.recent) == 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for tensor in (x, x.bfloat16()):
                assert module("ops.softmax").replacement(tensor, -1) is None
                assert_bits_equal(kernel.softmax(tensor), functional.softmax(tensor, -1))
            assert module("ops.softmax").replacement(x.float(), -1) is not None
        assert module("ops.softmax").replacement(x, -1) is not None


@interpreted
def test_gradients_can_be_differentiated(kernel, seed):
    generator = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 4, 50, generator=generator).unbind()
    penalties = []
    for function in (kernel.softmax, lambda x: functional.softmax(x, -1)):
        leaf, weight = x.clone().requires_grad_(), dy.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf, weight, create_graph=True)
        penalties.append(torch.autograd.grad(gradient.square().sum(), (leaf, weight)))
    for found, expected in zip(*penalties):
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        torch.testing.assert_close(found, expected)
        assert found.any()


@interpreted
def test_an_output_must_not_change_before_the_backward_pass(kernel):
    leaf = torch.randn(3, 40, requires_grad=True)
    out = kernel.softmax(leaf)
    out.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@interpreted
def test_modes_checkpoints_and_hooks_get_eagers_gradients(kernel, seed):
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            names.append(str(function))
            return function(*arguments, **(named or {}))

    names, generator = [], torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 4, 50, generator=generator).unbind()
    _, expected = gradients_of(lambda x: functional.softmax(x, -1), x, dy)
    with Watching():
        assert_bits_equal(gradients_of(kernel.softmax, x, dy)[1], expected)
    assert "aten._softmax.default" in names and "aten._softmax_backward_data.default" in names

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(kernel.softmax, x, use_reentrant=False)

    # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
    torch.testing.assert_close(gradients_of(checkpointed, x, dy)[1], expected)
    names.clear()
    with Watching():  # Both computations of a checkpoint save the same tensors, whether a mode watches or not.
        assert_bits_equal(gradients_of(checkpointed, x, dy)[1], expected)
    assert names.count("aten._softmax.default") == 2
    transposed = lambda saved: saved.t().contiguous().t()  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, transposed):
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        torch.testing.assert_close(gradients_of(kernel.softmax, x, dy)[1], expected)
    # Under vmap and jvp other operations of eager's compute the formula, up to a few roundings.
    batched = torch.vmap(kernel.softmax)(x[None])
    torch.testing.assert_close(batched[0], functional.softmax(x, -1))
    tangent = torch.func.jvp(kernel.softmax, (x,), (dy,))[1]
    torch.testing.assert_close(tangent, torch.func.jvp(lambda x: functional.softmax(x, -1), (x,), (dy,))[1])


@interpreted
def test_without_proof_eager_runs(kernel, module, monkeypatch):
    """A CPU adds in another order than CUDA."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    module("ops.softmax")._calls.clear()
    x = torch.randn(6, 777)
    with pytest.warns(
        RuntimeWarning, match="softmax on cpu, torch.float32, rows of up to 1024 elements, output, keeps"
    ):
        assert_bits_equal(kernel.softmax(x), functional.softmax(x, -1))


@interpreted
def test_the_operators_for_torch_compile(kernel, module, seed):
    family, generator = module("ops.softmax"), torch.Generator().manual_seed(seed)
    namespace = getattr(torch.ops, family._softmax_op._qualname.split("::")[0])
    x, dy = torch.randn(2, 3, 5, 40, generator=generator).unbind()
    y = kernel.softmax(x)
    torch.library.opcheck(namespace.softmax.default, (x.clone().requires_grad_(),))
    torch.library.opcheck(namespace.softmax_backward.default, (dy, y))
    for found, expected in zip(gradients_of(namespace.softmax, x, dy), gradients_of(kernel.softmax, x, dy)):
        assert_bits_equal(found, expected)


# On a GPU: eager itself


@pytest.mark.gpu
def test_output_and_gradient_are_those_of_eager(kernel, module, seed, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator, choose = torch.Generator("cuda").manual_seed(seed), random.Random(seed)
    for case in range(200):
        size = choose.choice((choose.choice(SIZES), choose.randint(1, 1024)))
        shape = (choose.randint(1, 5), choose.randint(1, max(1, (1 << 20) // size)), size)
        dtype, gap = choose.choice(DTYPES), choose.choice((0, 0, 1, 8))
        label = f"case {case}, {shape} {dtype}, gap {gap}"
        x, dy = torch.randn(2, *shape[:-1], size + gap, generator=generator, device="cuda").to(dtype)[..., :size]
        x = x * choose.choice((0.1, 1.0, 10.0))
        x[0, 0, choose.randrange(size)], dy[0, -1, 0] = choose.choice(SPECIAL), choose.choice(SPECIAL)
        x[-1, -1] = choose.choice(SPECIAL)
        assert module("ops.softmax").replacement(x, -1) is not None, label
        found = gradients_of(kernel.softmax, x, dy)
        for mine, theirs in zip(found, gradients_of(lambda x: functional.softmax(x, -1), x, dy)):
            assert_bits_equal(mine, theirs, label)
            assert mine.stride() == theirs.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_transcription_is_what_eager_computes(seed, dtype):
    """Given the exponentials of the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for size in SIZES:
        x, dy = torch.randn(2, 64, size, generator=generator, device="cuda").to(dtype)
        y, dx = gradients_of(lambda x: functional.softmax(x, -1), x, dy)
        of_model = aten_model.softmax(x.cpu(), exp=lambda x: torch.exp(x.cuda()).cpu())
        assert_bits_equal(of_model, y.cpu(), f"output of {size}")
        assert_bits_equal(aten_model.softmax_backward(dy.cpu(), y.cpu()), dx.cpu(), f"gradient of {size}")


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_softmax_is_the_uncompiled_one(kernel, seed, dynamic):
    generator = torch.Generator("cuda").manual_seed(seed)
    torch._dynamo.reset()
    compiled = torch.compile(kernel.softmax, dynamic=dynamic, fullgraph=True)
    for dtype in DTYPES:
        for size in (40, 1000):
            x, dy = torch.randn(2, 30, size, generator=generator, device="cuda").to(dtype)
            for found, expected in zip(gradients_of(compiled, x, dy), gradients_of(kernel.softmax, x, dy)):
                assert_bits_equal(found, expected, f"{dtype} {size}")
