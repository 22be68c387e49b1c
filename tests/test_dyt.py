"""Dynamic tanh: the kernels in Triton's interpreter against the transcription of eager's operations, fp32 and fp16.

The interpreter truncates where a GPU rounds to bf16: bf16 is left to the GPU.
"""

import functools
import math
import os
import random
from typing import Callable, NamedTuple

import aten_model
import numpy
import pytest
import torch
from bits import assert_bits_equal, bits_equal
from interpreter import multiply_add, the_fma
from torch.utils._python_dispatch import TorchDispatchMode
from wrong_orders import COLUMN_SUMS, FULL_SUMS

pytestmark = [
    pytest.mark.usefixtures("proof_off"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero):RuntimeWarning"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16)
SIZES = (16, 18, 33, 64, 100, 510, 768, 1024, 2049, 4096)
WHAT = (
    "the output",
    "dx",
    *(f"{whose} gradient{of}" for whose in ("alpha's", "the weight's", "the bias's") for of in (" in fp32", "")),
)


@pytest.fixture
def family(module):
    family = module("ops.dyt")
    family._calls.clear()
    return family


@pytest.fixture
def backward(module):
    return module("ops.dyt_backward")


@pytest.fixture
def its_fma(monkeypatch):
    """The transcription rounds FMAs as the interpreter does."""
    the_fma()
    monkeypatch.setattr(aten_model, "fused_multiply_add", multiply_add)


def tanh(x):
    return aten_model.tanh(x, exp2=lambda x: torch.from_numpy(numpy.asarray(numpy.exp2(x.numpy()))))


def drawn(choose, generator, sizes=SIZES, dtype=None, special=None):
    """x, alpha, weight, bias and dy; `special` is "x" or "alpha" if some of its numbers are."""
    size, dtype = choose.choice(sizes), dtype or choose.choice(DTYPES)
    # From 64 rows on threads share a column.
    rows = choose.choice((1, 2, 3, 5, 70, choose.randint(64, 300)) if size < 500 else (1, 2, 3, 5))
    x, dy = torch.randn(2, rows, size, generator=generator).unbind()
    x *= choose.choice((0.01, 1.0, 20.0))
    for value in (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-6, 9.0) if special == "x" else ():
        x.view(-1)[choose.randrange(x.numel())] = value
    dy.view(-1)[choose.randrange(dy.numel())] = -0.0
    alpha, weight, bias = (torch.randn(count, generator=generator) for count in (1, size, size))
    if special == "alpha":
        alpha.fill_(choose.choice((math.inf, -math.inf, 0.0, -0.0)))
    return [each.to(dtype) for each in (x, alpha, weight, bias, dy)]


def launched(family, backward, x, alpha, weight, bias, dy, stored=None):
    """What the kernels write: the output, dx, and each sum in fp32 and rounded."""
    rows = len(x)
    out, dx = (torch.full_like(x, math.nan) for _ in range(2))
    family.Kind(x.dtype, x.shape[1]).forward(rows, CPU)(x, alpha, weight, bias, out)
    total, totals = torch.full((1,), math.nan), torch.full((2, x.shape[1]), math.nan)
    kind = backward.OfInput.of(x) if stored is None else backward.OfInput(x.dtype, x.shape[1], stored)
    of_alpha = kind.sum(rows, CPU)(dy, x, alpha, weight, dx, total=total)
    of_weight, of_bias = backward.OfVectors.of(x).sums(rows, CPU, True)(dy, x, alpha, total=totals)
    return out, dx, total, of_alpha, totals[0], of_weight, totals[1], of_bias


def transcribed(x, alpha, weight, bias, dy, tanh=tanh, sums=(aten_model.full_sum, aten_model.column_sum)):
    """The same of the transcription."""
    full_sum, column_sum = sums
    dx, of_alpha, of_weight = aten_model.dyt_terms(dy, x, alpha, weight, tanh)
    totals = full_sum(of_alpha).view(1), *(column_sum(each) for each in (of_weight, dy))
    out = aten_model.dyt(x, alpha, weight, bias, tanh)
    return out, dx, *(each for total in totals for each in (total, total.to(x.dtype)))


def expected_of(backward, x, alpha, weight, bias, dy):
    """`transcribed`, and where alpha's terms are stored torch's own sum of them, which on a GPU is ATen's."""
    found = [*transcribed(x, alpha, weight, bias, dy)]
    if backward.OfInput.of(x).stored:
        products = aten_model.dyt_terms(dy, x, alpha, weight, tanh)[1]
        found[2:4] = products.sum(dtype=torch.float32).view(1), products.flatten().sum_to_size(1)
    return found


@interpreted
@pytest.mark.parametrize("cases", [12, pytest.param(200, marks=pytest.mark.long)])
def test_the_kernels_equal_the_transcription(family, backward, its_fma, seed, cases):
    """Sums of NaN and infinities are the same in every order: every third case has none."""
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(cases):
        tensors = drawn(choose, generator, special=(None, "x", "alpha")[case % 3])
        label = f"of case {case}, {list(tensors[0].shape)} {tensors[0].dtype}"
        for found, expected, what in zip(
            launched(family, backward, *tensors), expected_of(backward, *tensors), WHAT, strict=True
        ):
            assert_bits_equal(found, expected, f"{what} {label}")


@interpreted
@pytest.mark.parametrize("size", (1, 2, 7, 63, 200, 2050))
def test_outputs_of_any_size_equal_the_transcription(family, its_fma, seed, size):
    choose = random.Random(seed)
    for rows in (1, 3, choose.randint(5, 200)):
        x, alpha, weight, bias, _ = drawn(choose, torch.Generator().manual_seed(seed), (size,), special="x")
        x = x.repeat(rows, 1)[:rows].contiguous()
        out = torch.full_like(x, math.nan)
        family.Kind(x.dtype, size).forward(rows, CPU)(x, alpha, weight, bias, out)
        assert_bits_equal(out, aten_model.dyt(x, alpha, weight, bias, tanh), f"{list(x.shape)} {x.dtype}")


@interpreted
@pytest.mark.parametrize("rows, size", [(300, 510), (129, 1024), (33, 4097)])
def test_sums_of_several_blocks_equal_the_transcription(family, backward, its_fma, seed, rows, size):
    generator, dtype = torch.Generator().manual_seed(seed), random.Random(seed).choice(DTYPES)
    x, dy = torch.randn(2, rows, size, generator=generator).to(dtype).unbind()
    tensors = x, *(torch.randn(count, generator=generator).to(dtype) for count in (1, size, size)), dy
    assert not backward.OfInput.of(x).stored
    for found, expected, what in zip(launched(family, backward, *tensors), transcribed(*tensors), WHAT, strict=True):
        assert_bits_equal(found, expected, f"{what}, {dtype}")


@interpreted
def test_parts_are_added_one_after_the_other(family, backward, module, its_fma, monkeypatch, seed):
    """A limit of a few KiB in the place of 2 GiB: parts of the full sum begin anywhere."""
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for size in (64, 33):
        dtype = choose.choice(DTYPES)
        limit = choose.randint(4000, 16000)
        monkeypatch.setattr(module("core.reduction"), "_MAX_32_BIT_OFFSET", limit)
        x, dy = torch.randn(2, choose.randint(100, 150), size, generator=generator).to(dtype).unbind()
        alpha, weight, bias = (torch.randn(count, generator=generator).to(dtype) for count in (1, size, size))
        sums = [functools.partial(each, indexing_limit=limit) for each in (aten_model.full_sum, aten_model.column_sum)]
        expected = transcribed(x, alpha, weight, bias, dy, sums=sums)
        for found, wanted, what in zip(
            launched(family, backward, x, alpha, weight, bias, dy, stored=False), expected, WHAT, strict=True
        ):
            assert_bits_equal(found, wanted, f"{what}, {list(x.shape)}, parts of {limit} bytes")


def test_parts_that_begin_inside_of_vectors_are_left_to_eager(module):
    full_sum = module("ops.full_sum")
    with pytest.raises(module("core.calls").Outside, match="inside of vectors"):
        full_sum.check_parts(262147 * 4099, torch.bfloat16, CPU)
    for elements in (262148 * 4104, 4099):
        full_sum.check_parts(elements, torch.bfloat16, CPU)


def test_parts_of_several_orders_are_left_to_eager(module):
    """ATen sums 255 rows of so many columns with one thread a column, and 256 with 16."""
    column_sum = module("ops.column_sum")
    for rows, columns, itemsize in ((511, 2032169, 4), (2043, 1213585, 4)):
        with pytest.raises(module("core.calls").Outside, match="several orders"):
            column_sum.check_parts(rows, columns, itemsize, CPU)
    for rows, columns, itemsize in ((511, 2032169, 2), (512, 2032169, 4), (1 << 20, 4096, 4), (4, 4096, 2)):
        column_sum.check_parts(rows, columns, itemsize, CPU)


# The proof


def _fp32_product(x, alpha, weight, bias):
    y = aten_model._of_fp32(tanh, aten_model._times(x, alpha))
    return (weight.float() * y.float() + bias.float()).to(x.dtype)


def _fp32_tanh(x, alpha, weight, bias):
    y = tanh(x.float() * alpha.float()).to(x.dtype)
    return (aten_model._times(y, weight).float() + bias.float()).to(x.dtype)


def _fp32_gradient(dy, x, alpha, weight):
    _, *others = aten_model.dyt_terms(dy, x, alpha, weight, tanh)
    y = aten_model._of_fp32(tanh, aten_model._times(x, alpha)).float()
    d_scaled = (aten_model._times(dy, weight).float() * (1.0 - y * y)).to(x.dtype)
    return aten_model._times(d_scaled, alpha), *others


def _terms(dy, x, alpha, weight):
    return aten_model.dyt_terms(dy, x, alpha, weight, tanh)


class Kernels(NamedTuple):
    """What kernels compute; the transcription is right."""

    output: Callable = functools.partial(aten_model.dyt, tanh=tanh)
    terms: Callable = _terms
    full_sum: Callable = aten_model.full_sum
    column_sum: Callable = aten_model.column_sum


WRONG_TERMS = {
    "product": Kernels(output=_fp32_product),
    "tanh": Kernels(output=_fp32_tanh),
    "gradient": Kernels(terms=_fp32_gradient),
}
# Sums of 512 columns by 64 and 1024 rows have one block and several.
WRONG_ORDERS = {f"full, {name}": Kernels(full_sum=order) for name, order in FULL_SUMS.items()}
WRONG_ORDERS |= {f"columns, {name}": Kernels(column_sum=order) for name, order in COLUMN_SUMS.items()}


def in_the_kernels_place(family, backward, patch, kernels: Kernels, seed=None):
    """`seed` replaces the proofs' own."""
    if seed is not None:
        patch.setattr(family.proof, "generator", lambda device, _: torch.Generator(device).manual_seed(seed))

    def forward(kind, rows, device):
        def run(x, alpha, weight, bias, out):
            out.copy_(kernels.output(x, alpha, weight, bias))

        return run

    def of_input(kind, rows, device):
        def stored(dy, x, alpha, weight, dx):
            found, products, _ = kernels.terms(dy, x, alpha, weight)
            dx.copy_(found)
            return products

        def run(*tensors, total=None):
            found = kernels.full_sum(stored(*tensors)).view(1)
            if total is not None:
                total.copy_(found)
            return found.to(kind.dtype)

        run.stored = stored
        return run

    def of_vectors(kind, rows, device, store_sum):
        def run(dy, x, alpha, total):
            for into, values in zip(total, (kernels.terms(dy, x, alpha, torch.ones_like(alpha))[2], dy)):
                into.copy_(kernels.column_sum(values))
            return [each.to(x.dtype) for each in total]

        return run

    patch.setattr(family.Kind, "forward", forward)
    patch.setattr(backward.OfInput, "sum", of_input)
    patch.setattr(backward.OfVectors, "sums", of_vectors)
    patch.setattr(family, "eager", lambda *tensors: Transcribed.apply(*tensors))
    patch.setattr(backward, "terms", _terms)
    patch.setattr(backward, "_full_sum", aten_model.full_sum)
    patch.setattr(backward, "_column_sum", aten_model.column_sum)


class Transcribed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha, weight, bias):
        ctx.save_for_backward(x, alpha, weight)
        return aten_model.dyt(x, alpha, weight, bias, tanh)

    @staticmethod
    def backward(ctx, dy):
        dx, of_alpha, of_weight = _terms(dy, *ctx.saved_tensors)
        columns = [aten_model.column_sum(each).to(dy.dtype) for each in (of_weight, dy)]
        return dx, aten_model.full_sum(of_alpha).to(dy.dtype).view(1), *columns


ALL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def tells(family, backward, dtype, size=512) -> list[str]:
    """What differs in the proofs."""
    sample = torch.empty(3, size, dtype=dtype)
    many = torch.empty(1, dtype=dtype).expand(1024, size)
    comparisons = [
        family._comparisons(family.Kind(dtype, size), CPU),
        *(backward._comparisons_of_dx(backward.OfInput.of(each), family.eager, CPU) for each in (sample, many)),
        *(backward._comparisons_of_vectors(backward.OfVectors.of(each), family.eager, CPU) for each in (sample, many)),
    ]
    return [what for each in comparisons for what, found, expected in each if not bits_equal(found, expected)]


@pytest.fixture
def short_sums(module, monkeypatch):
    monkeypatch.setattr(module("ops.full_sum"), "_MOST_ELEMENTS", 1 << 18)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("name", [None, *WRONG_TERMS])
def test_the_proofs_tell_another_arithmetic(family, backward, module, short_sums, monkeypatch, name, dtype):
    if dtype == torch.float32 and name in ("product", "tanh"):
        pytest.skip("nothing is rounded to fp32 a second time")
    monkeypatch.setattr(module("ops.full_sum"), "_PROOF_SUMS", 1)
    in_the_kernels_place(family, backward, monkeypatch, WRONG_TERMS[name] if name else Kernels())
    assert bool(tells(family, backward, dtype)) == (name is not None)


@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_the_proofs_tell_a_wrong_order(family, backward, module, monkeypatch, seed, name):
    # Rows of 510 elements leave a rest of a vector; those of 512 have several blocks of columns.
    of_full_sum = name.startswith("full")
    monkeypatch.setattr(module("ops.full_sum"), "_MOST_ELEMENTS", 1 << (18 if of_full_sum else 13))
    monkeypatch.setattr(module("ops.full_sum"), "_PROOF_SUMS", 6)
    in_the_kernels_place(family, backward, monkeypatch, WRONG_ORDERS[name], seed)
    found = tells(
        family, backward, random.Random(seed).choice(ALL_DTYPES[: 2 + (not of_full_sum)]), 510 if of_full_sum else 512
    )
    gradients = {"alpha's gradient"} if of_full_sum else {"the weight's gradient", "the bias's gradient"}
    assert {each.removesuffix(" in fp32") for each in found} <= gradients
    assert [each for each in found if each.endswith("in fp32")]


@pytest.mark.long
def test_1000_proofs_tell_another_arithmetic(family, backward, module, short_sums, monkeypatch, seed):
    """Each with a weight, a bias and gradients of its own; x runs through the same numbers."""
    monkeypatch.setattr(module("ops.full_sum"), "_PROOF_SUMS", 1)
    choose, names = random.Random(seed), [*WRONG_TERMS]
    for _ in range(int(os.environ.get("LOSSLESS_PROOFS", 1000))):
        name = choose.choice(names)
        dtype = choose.choice(ALL_DTYPES[: None if name == "gradient" else 2])
        in_the_kernels_place(family, backward, monkeypatch, WRONG_TERMS[name], choose.randrange(1 << 30))
        assert tells(family, backward, dtype), (name, dtype)


# What surrounds the kernels


def gradients_of(function, tensors, dy):
    leaves = [each.detach().requires_grad_() for each in tensors]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dy)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_function_is_what_the_kernels_compute(kernel, family, backward, seed, dtype):
    *tensors, dy = drawn(random.Random(seed), torch.Generator().manual_seed(seed), (100,), dtype)
    out, dx, *sums = launched(family, backward, *tensors, dy)
    assert all(each.isfinite().all() for each in sums)
    expected = out, dx, *sums[1::2]
    for _ in range(2):  # The second call is recognised.
        with torch.no_grad():
            assert_bits_equal(kernel.dyt(*tensors), out)
        for found, wanted in zip(gradients_of(kernel.dyt, tensors, dy), expected, strict=True):
            assert_bits_equal(found, wanted)
            assert found.shape == wanted.shape
    leaves = [each.requires_grad_(number == 2) for number, each in enumerate(tensors)]
    found = kernel.dyt(*leaves)
    assert found.grad_fn.name() == "DyTBackward"
    assert_bits_equal(torch.autograd.grad(found, leaves[2], dy)[0], expected[3])
    assert None not in family._calls.resolved.values()


@interpreted
def test_a_gradient_that_begins_anywhere_is_summed_as_eager_sums_it(kernel, family, seed):
    """ATen's order of the bias's gradient depends on where dy begins; on a CPU it is torch's own."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in ((100, 64), 1, 64, 64)]
    dy = torch.randn(6401, generator=generator)[1:].view(100, 64)
    assert dy.data_ptr() % 16
    for found, expected in zip(*(gradients_of(each, tensors, dy)[2:] for each in (kernel.dyt, family.eager))):
        torch.testing.assert_close(found, expected)  # The interpreter's tanh has other last bits.
    found = gradients_of(kernel.dyt, tensors, dy)[-1]
    assert_bits_equal(found, dy.sum(0))


@interpreted
def test_the_proofs_run_the_kernels_of_the_call(backward):
    """Whatever the number of rows."""
    for size in (17, 64, 768, 1000, 4096, 16342, 20002):
        for rows in (1, 2, 4, 5, 16, 17, 18, 63, 64, 300, 1000, 2000, 8192):
            input = torch.empty(1, dtype=torch.bfloat16).expand(rows, size)
            kind = backward.OfVectors.of(input)
            (call,) = kind.sums(rows, CPU).parts
            for of_proof in (kind.rows, 2 * kind.rows + 3):
                (part,) = kind.sums(of_proof, CPU, True).parts
                assert part.sum_chains._launcher is call.sum_chains._launcher, (size, rows, of_proof)
                assert part.sum_blocks._launcher is call.sum_blocks._launcher, (size, rows, of_proof)
            kind = backward.OfInput.of(input)
            call, *proofs = (kind.sum(each, CPU) for each in (rows, *backward._row_counts(kind, CPU)))
            call, *proofs = (each._launch if kind.stored else each.parts[0][0] for each in (call, *proofs))
            assert call._launcher in [each._launcher for each in proofs], (size, rows)


def outside():
    x, alpha, weight, bias = torch.randn(4, 6, 64), torch.rand(1), torch.rand(64), torch.rand(64)
    return {
        "float64": [each.double() for each in (x, alpha, weight, bias)],
        "two dtypes": [x.half(), alpha, weight, bias],
        "transposed": [x.transpose(0, 1), alpha, weight, bias],
        "no rows": [x[:0], alpha, weight, bias],
        "a strided weight": [x, alpha, torch.rand(128)[::2], bias],
        "a vector": [x[0, 0], alpha, weight, bias],
        "rows of few elements": [x[..., :15].contiguous(), alpha, weight[:15], bias[:15]],
    }


@interpreted
@pytest.mark.parametrize("case", outside())
def test_outside_the_domain_eager_runs(kernel, family, case):
    tensors = outside()[case]
    dy = torch.randn(family.eager(*tensors).shape).to(family.eager(*tensors).dtype)
    for found, expected in zip(*(gradients_of(each, tensors, dy) for each in (kernel.dyt, family.eager))):
        assert_bits_equal(found, expected)
        assert found.stride() == expected.stride()


@interpreted
@pytest.mark.parametrize("shape, stride", (((1, 64), (1, 1)), ((1, 3, 64), (7, 64, 1))))
def test_strides_of_dimensions_of_length_1_are_those_of_eager(kernel, family, shape, stride):
    x = torch.empty_strided(shape, stride).fill_(0.5)
    tensors = x, torch.rand(1), torch.rand(64), torch.rand(64)
    with torch.no_grad():
        assert kernel.dyt(*tensors).stride() == family.eager(*tensors).stride()


def test_what_does_not_fit_is_refused(kernel):
    x = torch.ones(2, 64)
    with pytest.raises(TypeError, match=r"input: .* found list"):
        kernel.dyt([1.0], x, x, x)
    with pytest.raises(ValueError, match=r"alpha: expected shape \[1\], found \[2, 64\]"):
        kernel.dyt(x, x, x[0], x[0])
    with pytest.raises(ValueError, match=r"bias: expected shape \[64\], found \[2\]"):
        kernel.dyt(x, x[0, :1], x[0], x[:, 0])


@interpreted
def test_gradients_in_modes_and_of_gradients(kernel, family, seed):
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            names.append(str(function))
            return function(*arguments, **(named or {}))

    names = []
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in ((4, 64), 1, 64, 64)]
    dy = torch.randn(4, 64, generator=generator)
    with Watching():
        for found, expected in zip(*(gradients_of(each, tensors, dy) for each in (kernel.dyt, family.eager))):
            assert_bits_equal(found, expected)
    assert names.count("aten.tanh.default") >= 2
    penalties = []
    for function in (kernel.dyt, family.eager):
        leaves = [each.clone().requires_grad_() for each in (*tensors, dy)]
        first = torch.autograd.grad(function(*leaves[:4]), leaves[:4], leaves[4], create_graph=True)
        penalties.append(torch.autograd.grad(sum(each.square().sum() for each in first), leaves[:3]))
    for found, expected in zip(*penalties):
        # The interpreter's tanh has other last bits than a CPU's.
        torch.testing.assert_close(found, expected)


@interpreted
def test_without_proof_eager_runs(kernel, family, nothing_known, monkeypatch):
    """A CPU's tanh has other bits."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    tensors = [torch.randn(shape) for shape in ((2, 96), 1, 96, 96)]
    with pytest.warns(RuntimeWarning, match="eager on cpu, torch.float32, rows of 96 elements, output, keeps .*differ"):
        assert_bits_equal(kernel.dyt(*tensors), family.eager(*tensors))


@interpreted
def test_the_operators_for_torch_compile(kernel, family, seed):
    namespace = getattr(torch.ops, family._dyt_op.namespace)
    *tensors, dy = drawn(random.Random(seed), torch.Generator().manual_seed(seed), (64,), torch.float32)
    for found, expected in zip(*(gradients_of(each, tensors, dy) for each in (namespace.dyt, kernel.dyt))):
        assert_bits_equal(found, expected)
    leaves = [each.clone().requires_grad_() for each in tensors]
    out = namespace.dyt(*leaves)
    with torch.no_grad():
        leaves[3].add_(1.0)  # As in eager nothing reads the bias in the backward pass.
    for found, expected in zip(torch.autograd.grad(out, leaves, dy), gradients_of(kernel.dyt, tensors, dy)[1:]):
        assert_bits_equal(found, expected)
    tensors = [each.nan_to_num(1.0, 1.0, 1.0) for each in tensors]
    torch.library.opcheck(namespace.dyt.default, tuple(each.clone().requires_grad_() for each in tensors))
    torch.library.opcheck(namespace.dyt_backward.default, (dy, *tensors, [True, True, False, True]))


# On a GPU: eager itself


@pytest.mark.gpu
def test_output_and_gradients_are_those_of_eager(kernel, family, seed, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator, choose = torch.Generator("cuda").manual_seed(seed), random.Random(seed)
    for case in range(100):
        size, dtype = choose.choice((*SIZES, 1, choose.randint(1, 8192))), choose.choice((*DTYPES, torch.bfloat16))
        shape = (choose.randint(1, 4), choose.randint(1, 300), size)
        make = functools.partial(torch.randn, generator=generator, device="cuda")
        # Some tensors do not begin at a multiple of 16 bytes.
        x, alpha, weight, bias, dy = (
            torch.cat([make(first).to(dtype), make(count).to(dtype)])[first:]
            for count in (math.prod(shape), 1, size, size, math.prod(shape))
            for first in [choose.choice((0, 0, 0, 1, 4))]
        )
        tensors, dy = [x.view(shape), alpha, weight, bias], dy.view(shape)
        for found, expected in zip(*(gradients_of(each, tensors, dy) for each in (kernel.dyt, family.eager))):
            assert_bits_equal(found, expected, f"case {case}, {shape} {dtype}")
            assert found.stride() == expected.stride()
    # Gradients of rows of few elements are eager's.
    assert None not in [call for (_, (_, shape, *_), *_), call in family._calls.resolved.items() if shape[-1] > 15]


@pytest.mark.gpu
def test_sums_of_more_than_2_gib_are_those_of_eager(kernel, family, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    make = functools.partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
    tensors, dy = [make(262148, 4104), make(1), make(4104), make(4104)], make(262148, 4104)
    found = gradients_of(kernel.dyt, tensors, dy)
    (call,) = family._calls.resolved.values()
    assert len(call.backward.of_input.parts) == len(call.backward.of_vectors.parts) == 2
    for each, expected in zip(found, gradients_of(family.eager, tensors, dy), strict=True):
        assert_bits_equal(each, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_uncompiled(kernel, seed, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *tensors: kernel.dyt(*tensors), dynamic=dynamic, fullgraph=True)
    for dtype in (*DTYPES, torch.bfloat16):
        tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in ((3, 20, 1024), 1, 1024, 1024)]
        for found, expected in zip(*(gradients_of(each, tensors, tensors[0]) for each in (compiled, kernel.dyt))):
            assert_bits_equal(found, expected, f"{dtype}")
