"""Which tensors a row kernel can walk, and the strides of what eager would have returned for them."""

import functools
from dataclasses import dataclass
from typing import Callable, Tuple

import torch


def contiguous_strides(shape):
    """The strides that a freshly allocated contiguous tensor of this shape has."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def rows_in_memory(shape, strides):
    """How a strided tensor looks as a matrix [rows, shape[-1]] in memory order.

    Returns `(rows, row_stride, order)`, where `order` names the leading dimensions longer than 1 from the slowest to the
    fastest in memory, or None if the last dimension is not contiguous or the leading ones do not share one row stride.
    """
    *leading, columns = zip(shape, strides)
    if columns[1] != 1 and columns[0] != 1:
        return None
    order = sorted((dim for dim, (size, _) in enumerate(leading) if size != 1), key=lambda dim: -strides[dim])
    rows, row_stride = 1, shape[-1]
    for dim in reversed(order):
        if rows == 1:
            row_stride = strides[dim]
        elif strides[dim] != rows * row_stride:
            return None
        rows *= shape[dim]
    return rows, row_stride, tuple(order)


def is_dense(shape, strides) -> bool:
    """Whether the elements fill a contiguous piece of memory, in whatever order of dimensions."""
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


@dataclass(frozen=True)
class Output:
    """Shape, strides and dtype of what eager returns for a call's arguments."""

    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    dtype: torch.dtype
    # Strides and dtype are the first argument's: a shorter call allocates it.
    like_input: bool

    @classmethod
    def of(cls, formula: Callable, *arguments: torch.Tensor) -> "Output":
        """The output of `formula(*arguments)`, whose shape is the first argument's, found out without data or device."""
        first = arguments[0]
        if first.stride() == contiguous_strides(first.shape):
            strides = first.stride()
            dtype = functools.reduce(torch.promote_types, (argument.dtype for argument in arguments))
        else:
            with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                out = formula(
                    *(torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") for a in arguments)
                )
            strides, dtype = out.stride(), out.dtype
        return cls(first.shape, strides, dtype, (strides, dtype) == (first.stride(), first.dtype))

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """A new tensor on the device of `like`, the call's first argument."""
        if self.like_input:
            return torch.empty_like(like)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=like.device)
