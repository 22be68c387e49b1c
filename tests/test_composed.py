"""Functions without a kernel: sparsemax and PolyNorm against references in float64, and their gradients."""

import pytest
import torch


def by_bisection(row):
    """The projection of one row on the simplex: tau with sum(max(row - tau, 0)) = 1."""
    low, high = row.max() - 1, row.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (row - middle).clamp(min=0).sum() > 1 else (low, middle)
    return (row - low).clamp(min=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_sparsemax_is_the_projection_on_the_simplex(kernel, seed, size, dtype):
    torch.manual_seed(seed)
    for scale in (0.01, 1.0, 30.0):
        x = (torch.randn(5, size) * scale).to(dtype)
        found = kernel.sparsemax(x)
        # A few roundings of numbers up to 4 * scale, in tau and in the bisection's sums.
        tolerance = 64 * torch.finfo(dtype).eps * max(scale, 1.0)
        assert found.dtype == dtype and found.min() >= 0
        torch.testing.assert_close(found.sum(-1), torch.ones(5, dtype=dtype), rtol=0, atol=size * tolerance)
        expected = torch.stack([by_bisection(row) for row in x.double()]).to(dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_sparsemax_of_numbers_known_beforehand(kernel):
    """Both ends: one element takes all, equal elements share; masked elements get nothing."""
    x = torch.tensor([[3.0, 1.0, -2.0], [0.5, 0.5, 0.5], [1.0, 0.5, -1.0], [0.25, 0.25, -torch.inf]])
    expected = torch.tensor([[1.0, 0.0, 0.0], [1 / 3] * 3, [0.75, 0.25, 0.0], [0.5, 0.5, 0.0]])
    # A third is rounded.
    torch.testing.assert_close(kernel.sparsemax(x), expected, rtol=0, atol=1e-7)
    leaf = x[3:].clone().requires_grad_()
    kernel.sparsemax(leaf)[0, 0].backward()
    assert leaf.grad.tolist() == [[0.5, -0.5, 0.0]]


def test_sparsemax_of_other_dimensions(kernel, seed):
    torch.manual_seed(seed)
    x = torch.randn(3, 5, 4)
    for dim in range(-3, 3):
        assert torch.equal(kernel.sparsemax(x, dim), kernel.sparsemax(x.movedim(dim, -1)).movedim(-1, dim))


def test_gradients(kernel, seed):
    torch.manual_seed(seed)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3,), ()))
    assert torch.autograd.gradcheck(kernel.sparsemax, (x,))
    assert torch.autograd.gradcheck(lambda x: kernel.sparsemax(x, 0), (x,))
    assert torch.autograd.gradcheck(kernel.poly_norm, (x, weight, bias))


def test_poly_norm_has_unit_norms(kernel, seed):
    """Each weight alone selects one power, whose mean square is 1."""
    torch.manual_seed(seed)
    x, zero = torch.randn(3, 50, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for weight, power in zip(torch.eye(3, dtype=torch.float64), (3, 2, 1)):
        found = kernel.poly_norm(x, weight, zero, eps=0.0)
        norm = torch.linalg.vector_norm(x**power, dim=-1, keepdim=True)
        # Sums of 50 squares in another order.
        torch.testing.assert_close(found, x**power / norm * 50**0.5, rtol=1e-13, atol=0)
    combined = kernel.poly_norm(x, torch.tensor([2.0, -3.0, 5.0]).double(), zero + 7.0, eps=0.5)
    parts = [x**power / ((x**power).square().mean(-1, keepdim=True) + 0.5).sqrt() for power in (3, 2, 1)]
    torch.testing.assert_close(combined, 2 * parts[0] - 3 * parts[1] + 5 * parts[2] + 7, rtol=1e-12, atol=1e-12)


def test_dtypes(kernel):
    x, weight, bias = torch.randn(2, 8, dtype=torch.bfloat16), torch.rand(3), torch.rand(())
    assert kernel.sparsemax(x).dtype == torch.bfloat16
    # Elements of a weight have no dimension: torch keeps the dtype of the activations.
    assert kernel.poly_norm(x, weight, bias).dtype == torch.bfloat16
    assert kernel.poly_norm(x, weight, bias[None]).dtype == torch.float32


def test_errors(kernel):
    x, weight, bias = torch.randn(2, 4), torch.rand(3), torch.rand(())
    for call, error, words in (
        (lambda: kernel.sparsemax([1.0]), TypeError, "input: expected a torch.Tensor, found list"),
        (lambda: kernel.sparsemax(x.long()), TypeError, "input: expected a real floating point dtype"),
        (lambda: kernel.sparsemax(x, "x"), TypeError, "dim: expected an int, found 'x'"),
        (lambda: kernel.sparsemax(x, 2), ValueError, r"dim: expected a dimension of the shape \(2, 4\), found 2"),
        (lambda: kernel.sparsemax(bias), ValueError, r"dim: expected a dimension of the shape \(\), found -1"),
        (lambda: kernel.poly_norm(bias, weight, bias), ValueError, "input: expected at least one dimension"),
        (lambda: kernel.poly_norm(x, x, bias), ValueError, r"weight: expected the shape \(3,\), found \(2, 4\)"),
        (lambda: kernel.poly_norm(x, weight, weight), ValueError, r"bias: expected the shape \(\) or \(1,\), found"),
        (lambda: kernel.poly_norm(x, weight, 1.0), TypeError, "bias: expected a torch.Tensor, found float"),
    ):
        with pytest.raises(error, match=words):
            call()
