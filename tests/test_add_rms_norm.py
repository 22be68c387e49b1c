"""The fused sum and RMSNorm in Triton's interpreter: against the sum in torch and the norm's own kernel, which
tests/test_kernels.py compares with the model of CUDA's arithmetic."""

import itertools

import pytest
import torch
from bits import assert_bits_equal
from places import python_module

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted"),
    pytest.mark.usefixtures("proof_off"),
]

SHAPES = [(1, 64), (3, 128), (2, 17, 260), (40, 1024), (5, 4100), (2, 8192)]
DTYPES = list(itertools.product((torch.float32, torch.float16), repeat=2))
EPS = 1e-6


def make(seed, shape, dtype, weight_dtype):
    generator = torch.Generator().manual_seed(seed)
    x, residual, d_total = torch.randn(3, *shape, generator=generator).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(weight_dtype)
    return x, residual, weight, d_total, torch.randn(shape, generator=generator)


def unfused(kernel, x, residual, weight, eps):
    total = residual + x
    return kernel.rms_norm(total, weight, eps), total


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inference(kernel, seed, shape, dtypes):
    x, residual, weight, *_ = make(seed, shape, *dtypes)
    for ours, expected in zip(
        kernel.fused_add_rms_norm(x, residual, weight, EPS), unfused(kernel, x, residual, weight, EPS), strict=True
    ):
        assert_bits_equal(ours, expected)


@pytest.mark.parametrize(
    "used", ["both", *(pytest.param(used, marks=pytest.mark.long) for used in ("normed", "total"))]
)
@pytest.mark.parametrize("choices", [DTYPES[:2], DTYPES[2:]], ids=str)
def test_gradients(kernel, seed, chooser, choices, used):
    """With another consumer of the sum before the norm's gradient comes, and of the inputs. Shape and dtypes are drawn."""
    shape, dtypes = chooser.choice(SHAPES[2:5]), chooser.choice(choices)
    x, residual, weight, d_total, d_normed = make(seed, shape, *dtypes)
    found = []
    for call in (kernel.fused_add_rms_norm, lambda *arguments: unfused(kernel, *arguments)):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, residual, weight)]
        normed, total = call(*leaves, EPS)
        outputs = {"both": (normed, total * 1.5, leaves[1] * 3.0), "normed": (normed,), "total": (total,)}[used]
        gradients = [d_normed.to(normed.dtype), d_total, d_total][: len(outputs)]
        if used == "total":
            gradients = [d_total]
        found.append(torch.autograd.grad(outputs, leaves, gradients, allow_unused=True))
    for ours, expected in zip(*found, strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None:
            assert_bits_equal(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("which", ["normed", "total"])
def test_gradients_lie_as_the_two_operations_leave_them(kernel, seed, dtype, which):
    """How a gradient lies decides the order in which the next sum over its rows adds."""
    x, residual, weight, d_total, d_normed = make(seed, (3, 5, 64), dtype, dtype)
    gradients = {"normed": d_normed.to(dtype), "total": d_total}
    gradients[which] = gradients[which].transpose(0, 1).contiguous().transpose(0, 1)
    found = []
    for call in (kernel.fused_add_rms_norm, lambda *arguments: unfused(kernel, *arguments)):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, residual, weight)]
        outs = call(leaves[0] * 1.0, leaves[1] * 1.0, leaves[2], EPS)
        found.append(torch.autograd.grad(outs, leaves, tuple(gradients.values())))
    for ours, expected in zip(*found, strict=True):
        assert ours.stride() == expected.stride()
        # torch computes these here, and a CPU adds in another order than CUDA: the defaults allow ten units in the last place
        # of fp32, one of fp16, and a wrong gradient would be off by as much as the values.
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (3, 1, 64), (1, 1, 64)])
def test_outputs_have_eagers_strides_in_dimensions_of_length_1(kernel, chooser, shape, grad):
    """The strides that the addends have there are no one's: eager's sum has those of new memory."""
    formula = python_module(kernel, "variants").LLAMA.eager
    for _ in range(8):
        makes = lambda: torch.randn(shape, requires_grad=grad)  # noqa: E731
        strides = [
            tuple(chooser.choice((1, 64, 7)) if n == 1 else s for n, s in zip(shape, makes().stride()))
            for _ in range(2)
        ]
        x, residual = (makes().as_strided(shape, each) for each in strides)
        normed, total = kernel.fused_add_rms_norm(x, residual, torch.rand(64), EPS)
        expected = residual + x
        assert (total.stride(), normed.stride()) == (expected.stride(), formula(expected, torch.rand(64), EPS).stride())


def test_the_gradient_of_the_sum_is_that_of_its_other_consumers(kernel, seed):
    """docs/limits.md: the part through the norm goes straight to the inputs."""
    x, residual, weight, d_total, d_normed = make(seed, (3, 64), torch.float32, torch.float32)
    leaves = [tensor.requires_grad_() for tensor in (x, residual, weight)]
    normed, total = kernel.fused_add_rms_norm(*leaves, EPS)
    of_total, of_x, of_residual = torch.autograd.grad((normed, total * 1.0), (total, x, residual), (d_normed, d_total))
    assert_bits_equal(of_total, d_total)
    assert_bits_equal(of_x, of_residual)
    assert not torch.equal(of_x, d_total)


def test_what_needs_no_gradient_gets_none(kernel, seed):
    x, residual, weight, _, d_normed = make(seed, (4, 128), torch.float32, torch.float32)
    for needs in itertools.product((False, True), repeat=3):
        leaves = [t.clone().requires_grad_(need) for t, need in zip((x, residual, weight), needs, strict=True)]
        normed, total = kernel.fused_add_rms_norm(*leaves, EPS)
        assert (normed.requires_grad, total.requires_grad) == (any(needs), any(needs[:2]))
        if any(needs):
            normed.backward(d_normed)
        assert [leaf.grad is not None for leaf in leaves] == list(needs)


def test_second_derivatives(kernel, seed):
    x, residual, weight, _, d_normed = make(seed, (3, 64), torch.float32, torch.float32)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]

    def first(call):
        normed, total = call(*leaves, EPS)
        return torch.autograd.grad((normed * d_normed).sum() + (total**3).sum(), leaves, create_graph=True)

    def second(call):
        return torch.autograd.grad(sum((gradient**2).sum() for gradient in first(call)), leaves)

    for ours, expected in zip(second(kernel.fused_add_rms_norm), second(lambda *a: unfused(kernel, *a)), strict=True):
        # The terms are added up in another order than by the layer alone, and there are a few hundred of them.
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


def test_outside_the_domain_the_two_operations_run(kernel, seed):
    for dtype, shape in ((torch.float64, (3, 64)), (torch.float32, (3, 30)), (torch.float32, (64,))):
        x, residual, weight, *_ = make(seed, shape, dtype, dtype)
        normed, total = kernel.fused_add_rms_norm(x, residual, weight, EPS)
        assert_bits_equal(total, residual + x)
        # Not `kernel.rms_norm`, which has a kernel for a single row: in the interpreter that does not sum as the CPU does.
        assert_bits_equal(normed, python_module(kernel, "variants").LLAMA.eager(total, weight, EPS))
    strided, residual, weight, *_ = make(seed, (64, 128), torch.float32, torch.float32)
    strided = strided.T.contiguous().T
    assert_bits_equal(kernel.fused_add_rms_norm(strided, residual, weight, EPS)[1], residual + strided)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"residual": None}, TypeError, "residual: expected a torch.Tensor, found NoneType"),
        (
            {"residual": torch.zeros(3, 64)},
            ValueError,
            "residual: expected shape [2, 64] of hidden_states, found [3, 64]",
        ),
        ({"residual": torch.zeros(2, 64).half()}, ValueError, "residual: expected dtype torch.float32"),
        ({"weight": torch.zeros(32)}, ValueError, "weight: expected shape [64]"),
        ({"hidden_states": torch.zeros(2, 64).int()}, TypeError, "hidden_states: expected a real floating point dtype"),
        ({"eps": -1.0}, ValueError, "eps: expected a finite number"),
    ],
    ids=["residual", "shape", "dtype", "weight", "integers", "eps"],
)
def test_bad_input(kernel, change, error, message):
    arguments = {
        "hidden_states": torch.zeros(2, 64),
        "residual": torch.zeros(2, 64),
        "weight": torch.ones(64),
        "eps": EPS,
    }
    with pytest.raises(error) as caught:
        kernel.fused_add_rms_norm(**(arguments | change))
    assert message in str(caught.value)
