"""Which tensors a row kernel can walk, and the strides of what eager would have returned for them."""

import functools
from dataclasses import dataclass
from typing import Callable, Optional

import torch

from .domain import allocator
from .torch_internals import no_modes


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


def row_number_strides(shape, order):
    """Strides over the leading dimensions that number the rows in `order`, from the slowest dimension to the fastest."""
    strides = [1] * (len(shape) - 1)
    rows = 1
    for dim in reversed(order):
        strides[dim] = rows
        rows *= shape[dim]
    return tuple(strides)


_MAX_LEVELS = 3


def row_levels(shape, order, *strides):
    """How to find row r, counted in `order`, in several tensors whose own orders may differ.

    Args:
        shape: of all tensors, the row itself last.
        order: the leading dimensions longer than 1, from the slowest to the fastest.
        strides: for each tensor, those of the leading dimensions at least.

    Returns:
        `(levels, inner, middle, offsets)`: r falls into an outer, a middle and an inner index, `inner` and `middle` long;
        `offsets` has the three strides of each tensor. With one level only the outer one counts. None where three levels
        do not do.
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
    if len(merged) <= 1:
        (_, outer), middle, inner = (merged or [nothing])[0], nothing, nothing
        levels = 1
    else:
        (_, outer), *rest = merged
        middle, inner = rest if len(rest) == 2 else (nothing, *rest)
        levels = _MAX_LEVELS
    offsets = tuple(zip(outer, middle[1], inner[1]))
    return levels, inner[0], middle[0], offsets


def is_dense(shape, strides) -> bool:
    """Whether the elements fill a contiguous piece of memory, in whatever order of dimensions."""
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def is_same_order(shape, strides, others) -> bool:
    """Whether two dense layouts put the elements into the same order."""
    return all(size == 1 or ours == other for size, ours, other in zip(shape, strides, others))


# Of a tensor with dimensions of length 1 whose strides the CPU is asked for.
_FEW_ELEMENTS = 1 << 18


def stand_ins(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of these dtypes, shapes and strides, by which the strides of eager's results are found out.

    They are on the meta device, where it costs nothing. But PyTorch's meta kernels keep strides of dimensions of length 1 that
    those of the CPU and of CUDA do not: with such dimensions the tensors are on the CPU, unless they are large.
    """
    on_cpu = any(1 in tensor.shape for tensor in tensors) and max(each.numel() for each in tensors) <= _FEW_ELEMENTS
    device = "cpu" if on_cpu else "meta"
    return [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device) for each in tensors]


@dataclass(frozen=True)
class Output:
    """Strides and dtype of what eager returns for a call's arguments, and memory for it."""

    strides: tuple[int, ...]
    dtype: torch.dtype
    # A new one, on the first argument's device.
    empty: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, formula: Callable, *arguments: torch.Tensor, dtype: Optional[torch.dtype] = None) -> "Output":
        """The output of `formula(*arguments)`, whose shape is the first argument's, found out without data or device.

        Args:
            dtype: the output's; by default that to which the arguments' are promoted.
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
