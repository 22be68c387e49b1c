"""Functions of the suite that have no kernel: eager's formula, composed of torch operations."""

import torch

from ..core.domain import check_floating


def sparsemax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sparsemax, composed of torch operations: there is no kernel.

    `max(input - tau, 0)`, the projection on the probability simplex (Martins and Astudillo, 2016). With the elements
    z_1 >= z_2 >= ... along `dim` in descending order, k is the number of those with
    `1 + j * z_j > z_1 + ... + z_j`, and `tau = (z_1 + ... + z_k - 1) / k`.

    Args:
        input: at least one dimension, any real floating dtype. -inf gets a probability of 0.
        dim: the dimension that sums to 1.

    Returns:
        A tensor of the shape and dtype of input.

    Raises:
        TypeError: `input` is no tensor or not of a real floating dtype, or `dim` is no int.
        ValueError: input has no such dimension.

    Every operation rounds to the dtype of input: convert 16 bits to fp32 first. Autograd computes the gradients.
    """
    check_floating("input", input)
    if not isinstance(dim, int):
        raise TypeError(f"dim: expected an int, found {dim!r}")
    if not -input.dim() <= dim < input.dim():
        raise ValueError(f"dim: expected a dimension of the shape {tuple(input.shape)}, found {dim}")
    ordered = input.movedim(dim, -1).sort(-1, descending=True).values
    counts = torch.arange(1, ordered.shape[-1] + 1, dtype=input.dtype, device=input.device)
    outside = 1 + counts * ordered <= ordered.cumsum(-1)
    size = (~outside).sum(-1, keepdim=True).clamp(min=1)
    tau = (ordered.masked_fill(outside, 0).sum(-1, keepdim=True) - 1) / size
    return (input - tau.movedim(-1, dim)).clamp(min=0)


def poly_norm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """PolyNorm, composed of torch operations: there is no kernel.

    `weight[0] * norm(input**3) + weight[1] * norm(input**2) + weight[2] * norm(input) + bias` with
    `norm(u) = u / sqrt(mean(u**2) + eps)`, the mean over the last dimension (PolyCom's activation).

    Args:
        input: at least one dimension, any real floating dtype.
        weight: `[3]`, any real floating dtype.
        bias: one element, any real floating dtype.
        eps: added to each mean of squares.

    Returns:
        A tensor of the shape of input, in the promoted dtype.

    Raises:
        TypeError: a tensor is none or not of a real floating dtype.
        ValueError: input has no dimension, or `weight` or `bias` has another shape.

    Every operation rounds to its dtype. Autograd computes the gradients.
    """
    for name, tensor in (("input", input), ("weight", weight), ("bias", bias)):
        check_floating(name, tensor)
    if not input.dim():
        raise ValueError("input: expected at least one dimension, found none")
    if tuple(weight.shape) != (3,):
        raise ValueError(f"weight: expected the shape (3,), found {tuple(weight.shape)}")
    if tuple(bias.shape) not in ((), (1,)):
        raise ValueError(f"bias: expected the shape () or (1,), found {tuple(bias.shape)}")
    cubic, square, linear = (_norm(input**power, eps) for power in (3, 2, 1))
    return weight[0] * cubic + weight[1] * square + weight[2] * linear + bias


def _norm(u: torch.Tensor, eps: float) -> torch.Tensor:
    return u / (u.pow(2).mean(-1, keepdim=True) + eps).sqrt()
