"""Dynamic tanh: the kernels in Triton's interpreter against the transcription of eager's operations, fp32 and fp16.

The interpreter truncates where a GPU rounds to bf16: bf16 is left to the GPU.
"""

import functools
import itertools
import math
import os
import random

import aten_model
import numpy
import pytest
import torch
from bits import assert_bits_equal, bits_equal
from interpreter import multiply_add, the_fma
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [
    pytest.mark.usefixtures("proof_off"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero):RuntimeWarning"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16)
SIZES = (1, 7, 64, 100, 768, 1024, 2048, 2049, 4096)
WHAT = ("the output", "dx", "alpha's terms", "the weight's terms")


@pytest.fixture
def family(module):
    family = module("ops.dyt")
    family._calls.clear()
    return family


@pytest.fixture
def its_fma(monkeypatch):
    """The transcription rounds FMAs as the interpreter does."""
    the_fma()
    monkeypatch.setattr(aten_model, "fused_multiply_add", multiply_add)


def tanh(x):
    return aten_model.tanh(x, exp2=lambda x: torch.from_numpy(numpy.asarray(numpy.exp2(x.numpy()))))


def drawn(choose, generator, sizes=SIZES, dtype=None):
    """x, alpha, weight, bias and dy; some numbers are special."""
    rows, size, dtype = choose.randint(2, 4), choose.choice(sizes), dtype or choose.choice(DTYPES)
    x, dy = torch.randn(2, rows, size, generator=generator).unbind()
    x *= choose.choice((0.01, 1.0, 20.0))
    for value in (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-6, 9.0):
        x.view(-1)[choose.randrange(x.numel())] = value
    dy.view(-1)[choose.randrange(dy.numel())] = -0.0
    alpha, weight, bias = (torch.randn(count, generator=generator) for count in (1, size, size))
    return [each.to(dtype) for each in (x, alpha, weight, bias, dy)]


def launched(family, x, alpha, weight, bias, dy):
    kind = family.Kind(x.dtype, x.shape[1])
    out, *terms = (torch.full_like(x, math.nan) for _ in range(4))
    kind.forward(len(x), CPU)(x, alpha, weight, bias, out)
    kind.backward(len(x), CPU, (True,) * 4)(dy, x, alpha, weight, *terms)
    return out, *terms


def transcribed(x, alpha, weight, bias, dy, tanh=tanh):
    return aten_model.dyt(x, alpha, weight, bias, tanh), *aten_model.dyt_terms(dy, x, alpha, weight, tanh)


@interpreted
@pytest.mark.parametrize("cases", [20, pytest.param(200, marks=pytest.mark.long)])
def test_the_kernels_equal_the_transcription(family, its_fma, seed, cases):
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(cases):
        tensors = drawn(choose, generator)
        label = f"of case {case}, {list(tensors[0].shape)} {tensors[0].dtype}"
        for found, expected, what in zip(launched(family, *tensors), transcribed(*tensors), WHAT):
            assert_bits_equal(found, expected, f"{what} {label}")


# The proof


def wrong_kernels():
    """Arithmetic that a kernel might have by mistake: the terms that it changes."""

    def rounded(value, like):
        return value.to(like.dtype)

    def no_rounding_of_the_product(x, alpha, weight, bias, dy):
        out, *terms = transcribed(x, alpha, weight, bias, dy)
        y = aten_model._of_fp32(tanh, aten_model._times(x, alpha))
        return rounded(weight.float() * y.float() + bias.float(), x), *terms

    def tanh_of_fp32(x, alpha, weight, bias, dy):
        y = rounded(tanh(x.float() * alpha.float()), x)
        return rounded(aten_model._times(y, weight).float() + bias.float(), x), *transcribed(
            x, alpha, weight, bias, dy
        )[1:]

    def gradient_in_fp32(x, alpha, weight, bias, dy):
        found = transcribed(x, alpha, weight, bias, dy)
        y = aten_model._of_fp32(tanh, aten_model._times(x, alpha)).float()
        slope = 1.0 - y * y
        d_scaled = rounded(aten_model._times(dy, weight).float() * slope, x)
        return found[0], aten_model._times(d_scaled, alpha), *found[2:]

    return {"product": no_rounding_of_the_product, "tanh": tanh_of_fp32, "gradient": gradient_in_fp32}


def in_the_kernels_place(family, patch, compute, seed=None):
    """`seed` replaces the proof's own."""
    if seed is not None:
        patch.setattr(family.proof, "generator", lambda device, _: torch.Generator(device).manual_seed(seed))

    def forward(kind, rows, device):
        def run(x, alpha, weight, bias, out):
            out.copy_(compute(x, alpha, weight, bias, x)[0])

        return run

    def backward(kind, rows, device, needs):
        def run(dy, x, alpha, weight, *terms):
            for into, values in zip(terms, compute(x, alpha, weight, weight, dy)[1:]):
                into.copy_(values)

        return run

    def eager(x, alpha, weight, bias):
        return Transcribed.apply(x, alpha, weight, bias)

    patch.setattr(family.Kind, "forward", forward)
    patch.setattr(family.Kind, "backward", backward)
    patch.setattr(family, "eager", eager)
    patch.setattr(family.torch, "tanh", lambda x: aten_model._of_fp32(tanh, x))
    patch.setattr(family.torch.ops.aten, "tanh_backward", aten_model._tanh_backward, raising=False)


class Transcribed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha, weight, bias):
        ctx.save_for_backward(x, alpha, weight)
        return transcribed(x, alpha, weight, bias, x)[0]

    @staticmethod
    def backward(ctx, dy):
        x, alpha, weight = ctx.saved_tensors
        dx, of_alpha, of_weight = aten_model.dyt_terms(dy, x, alpha, weight, tanh)
        return dx, of_alpha.sum_to_size(alpha.shape), of_weight.sum_to_size(weight.shape), dy.sum_to_size(weight.shape)


ALL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("name", [None, "product", "tanh", "gradient"])
def test_the_proof_tells_another_arithmetic(family, monkeypatch, name, dtype):
    if dtype == torch.float32 and name in ("product", "tanh"):
        pytest.skip("nothing is rounded to fp32 a second time")
    in_the_kernels_place(family, monkeypatch, wrong_kernels()[name] if name else transcribed)
    assert tells(family, dtype) == (name is not None)


def tells(family, dtype) -> bool:
    kind = family.Kind(dtype, 512)
    pairs = itertools.chain(family._comparisons(kind, CPU), family._gradient_comparisons(kind, CPU))
    return any(not bits_equal(found, expected) for _, found, expected in pairs)


@pytest.mark.long
def test_1000_proofs_tell_another_arithmetic(family, monkeypatch, seed):
    """Each with a weight, a bias and a gradient of its own; x runs through the same numbers."""
    choose, names = random.Random(seed), [*wrong_kernels()]
    for _ in range(int(os.environ.get("LOSSLESS_PROOFS", 1000))):
        name = choose.choice(names)
        dtype = choose.choice(ALL_DTYPES[: None if name == "gradient" else 2])
        in_the_kernels_place(family, monkeypatch, wrong_kernels()[name], choose.randrange(1 << 30))
        assert tells(family, dtype), (name, dtype)


# What surrounds the kernels


def gradients_of(function, tensors, dy):
    leaves = [each.detach().requires_grad_() for each in tensors]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dy)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_function_is_what_the_kernels_compute(kernel, family, seed, dtype):
    *tensors, dy = drawn(random.Random(seed), torch.Generator().manual_seed(seed), (100,), dtype)
    out, dx, of_alpha, of_weight = launched(family, *tensors, dy)
    vector = tensors[2].shape
    expected = out, dx, of_alpha.sum_to_size(1), of_weight.sum_to_size(vector), dy.sum_to_size(vector)
    for _ in range(2):  # The second call is recognised.
        with torch.no_grad():
            assert_bits_equal(kernel.dyt(*tensors), out)
        for found, wanted in zip(gradients_of(kernel.dyt, tensors, dy), expected):
            assert_bits_equal(found, wanted)
    leaves = [each.requires_grad_(number == 2) for number, each in enumerate(tensors)]
    found = kernel.dyt(*leaves)
    assert found.grad_fn.name() == "DyTBackward"
    assert_bits_equal(torch.autograd.grad(found, leaves[2], dy)[0], expected[3])
    assert None not in family._calls.resolved.values()


def outside():
    x, alpha, weight, bias = torch.randn(4, 6, 64), torch.rand(1), torch.rand(64), torch.rand(64)
    return {
        "float64": [each.double() for each in (x, alpha, weight, bias)],
        "two dtypes": [x.half(), alpha, weight, bias],
        "transposed": [x.transpose(0, 1), alpha, weight, bias],
        "no rows": [x[:0], alpha, weight, bias],
        "a strided weight": [x, alpha, torch.rand(128)[::2], bias],
        "a vector": [x[0, 0], alpha, weight, bias],
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
    tensors = [each.nan_to_num(1.0, 1.0, 1.0) for each in tensors]
    torch.library.opcheck(namespace.dyt.default, tuple(each.clone().requires_grad_() for each in tensors))
    torch.library.opcheck(namespace.dyt_backward.default, (dy, *tensors, [True, True, False, True]))


# On a GPU: eager itself


@pytest.mark.gpu
def test_output_and_gradients_are_those_of_eager(kernel, family, seed, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator, choose = torch.Generator("cuda").manual_seed(seed), random.Random(seed)
    for case in range(200):
        size, dtype = choose.choice((*SIZES, choose.randint(1, 8192))), choose.choice((*DTYPES, torch.bfloat16))
        shape = (choose.randint(1, 4), choose.randint(1, 300), size)
        make = functools.partial(torch.randn, generator=generator, device="cuda")
        tensors = [make(each).to(dtype) for each in (shape, 1, size, size)]
        dy = make(shape).to(dtype)
        for found, expected in zip(*(gradients_of(each, tensors, dy) for each in (kernel.dyt, family.eager))):
            assert_bits_equal(found, expected, f"case {case}, {shape} {dtype}")
            assert found.stride() == expected.stride()
    assert None not in family._calls.resolved.values()


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_uncompiled(kernel, seed, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *tensors: kernel.dyt(*tensors), dynamic=dynamic, fullgraph=True)
    for dtype in (*DTYPES, torch.bfloat16):
        tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in ((3, 20, 1024), 1, 1024, 1024)]
        for found, expected in zip(*(gradients_of(each, tensors, tensors[0]) for each in (compiled, kernel.dyt))):
            assert_bits_equal(found, expected, f"{dtype}")
