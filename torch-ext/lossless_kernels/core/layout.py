"""Layouts of rows in memory, and the strides of eager's outputs."""

import functools
import math
from dataclasses import dataclass
from typing import Callable, Optional

import torch

from .domain import allocator
from .torch_internals import no_modes


def contiguous_strides(shape):
    """The strides of a new contiguous tensor of this shape."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def rows_in_memory(shape, strides):
    """A strided tensor as a matrix [rows, shape[-1]] in memory order: `(rows, row_stride, order)`.

    `order` has the leading dimensions longer than 1, from the slowest to the fastest in memory. None if the last
    dimension is not contiguous or the leading ones do not share one row stride.
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


def stride_unit(row_stride: int, dtype: torch.dtype) -> int:
    """The number of elements per access: the largest power of two that divides the row stride, up to 16 bytes."""
    return math.gcd(row_stride, 16 // dtype.itemsize)


def stride_with_gap(size: int, unit: int, dtype: torch.dtype) -> int:
    """The least stride of rows of `size` elements that has this `stride_unit`, with unused elements between the rows."""
    strides = range(size + 1, size + 2 * unit + 1)
    return next(stride for stride in strides if stride_unit(stride, dtype) == unit)


def row_number_strides(shape, order):
    """Strides over the leading dimensions that number the rows in `order`, slowest dimension first."""
    strides = [1] * (len(shape) - 1)
    rows = 1
    for dim in reversed(order):
        strides[dim] = rows
        rows *= shape[dim]
    return tuple(strides)


_MAX_LEVELS = 3


def row_levels(shape, order, *strides):
    """Index levels by which a kernel finds row r, counted in `order`, in tensors whose memory orders differ.

    Args:
        shape: the tensors' shape; rows are the last dimension.
        order: the leading dimensions longer than 1, from the slowest to the fastest.
        strides: for each tensor, at least the strides of the leading dimensions.

    Returns:
        `(levels, inner, middle, offsets)`: r splits into an outer, a middle and an inner index; `inner` and `middle`
        are the lengths of the last two, and `offsets` has each tensor's three strides. One level has the outer index
        only. None if three levels do not suffice.
    """
    merged = []
    for dim in order:
        steps = tuple(tensor[dim] for tensor in strides)
        if merged:
            _, slower = merged[-1]
            if slower == tuple(step * shape[dim] for step in steps):
                merged[-1] = (merged[-1][0] * shape[dim], steps)
                continue
        merged.append((shape[dim], steps))
    if len(merged) > _MAX_LEVELS:
        return None
    nothing = (1, (0,) * len(strides))
    (_, outer), *rest = merged or [nothing]
    middle, inner = [nothing, nothing, *rest][-2:]
    offsets = tuple(zip(outer, middle[1], inner[1]))
    return _MAX_LEVELS if rest else 1, inner[0], middle[0], offsets


def divider(divisor: int) -> int:
    """The int64 by which kernels divide numbers below 2**31 (`kernels_src/indices.py`).

    The quotient is `number * multiplier >> 31 + shift`. The upper half of the int64 is the multiplier, the lower half the
    shift. The multiplier is 2**(31 + shift) / divisor, rounded up by less than 1. The rounding adds less than 2**-shift to
    the quotient, which is at most 1 / divisor. The exact quotient is at least 1 / divisor below the next integer, so the sum
    does not reach it.

    The multiplier is at least 2**31. The int64 is therefore less than -2**31, and Triton's interpreter takes it as 64 bits.

    Args:
        divisor: from 1 to 2**31.
    """
    shift = (divisor - 1).bit_length()
    multiplier = -(-(1 << 31 + shift) // divisor)
    return (multiplier - (1 << 32)) << 32 | shift


def is_dense(shape, strides) -> bool:
    """Whether the elements fill a contiguous piece of memory, in any order of dimensions."""
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def is_same_order(shape, strides, others) -> bool:
    """Whether two dense layouts have the same memory order."""
    return all(size == 1 or ours == other for size, ours, other in zip(shape, strides, others))


# The largest tensors for which `stand_ins` uses the CPU.
_FEW_ELEMENTS = 1 << 18


def stand_ins(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of these dtypes, shapes and strides, whose results have eager's strides.

    They are on the meta device, where operations cost nothing, or on the CPU if they are small and have dimensions of
    length 1: PyTorch's meta kernels keep strides of such dimensions that CPU and CUDA kernels do not.
    """
    on_cpu = any(1 in tensor.shape for tensor in tensors) and max(each.numel() for each in tensors) <= _FEW_ELEMENTS
    device = "cpu" if on_cpu else "meta"
    return [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device) for each in tensors]


@dataclass(frozen=True)
class Output:
    """Strides and dtype of eager's output for a call; `empty()` allocates one on the first argument's device."""

    strides: tuple[int, ...]
    dtype: torch.dtype
    empty: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, formula: Callable, *arguments: torch.Tensor, dtype: Optional[torch.dtype] = None) -> "Output":
        """The output of `formula(*arguments)`, in the first argument's shape, found without computing on data.

        The default dtype is the arguments' promoted dtype.
        """
        first = arguments[0]
        if dtype is None:
            dtype = functools.reduce(torch.promote_types, (argument.dtype for argument in arguments))
        if first.stride() == contiguous_strides(first.shape):
            strides = first.stride()
        else:
            with no_modes(), torch.no_grad():
                out = formula(*stand_ins(*arguments))
            strides = out.stride()
        return cls(strides, dtype, allocator(first.shape, strides, dtype, first.device))
