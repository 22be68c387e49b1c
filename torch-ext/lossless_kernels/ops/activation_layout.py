"""The memory layout of an activation's input, or of gate and up, and how one launch covers it."""

import math
from dataclasses import dataclass
from typing import Optional

import torch

from ..core import launch
from ..core.layout import is_dense, is_same_order, rows_in_memory


def access_unit(columns: int, row_stride: int, dtype: torch.dtype) -> int:
    """The number of elements per access, up to 16 bytes."""
    return math.gcd(columns, row_stride, 16 // dtype.itemsize)


@dataclass(frozen=True)
class Layout:
    """Rows at a distance of `row_stride`, or one row if they are dense.

    Args:
        order: the third result of `rows_in_memory`; None for one row.
        packed: up's rows begin where gate's end.
    """

    rows: int
    columns: int
    row_stride: int
    order: Optional[tuple[int, ...]] = None
    packed: bool = False

    @classmethod
    def of(cls, gate, up) -> Optional["Layout"]:
        """The layout that both have; None if they differ or no kernel takes it."""
        shape, strides = gate.shape, gate.stride()
        if is_dense(shape, strides):
            return cls(1, gate.numel(), gate.numel()) if is_same_order(shape, strides, up.stride()) else None
        rows = rows_in_memory(shape, strides)
        if rows is None or rows_in_memory(shape, up.stride()) != rows:
            return None
        return cls(rows[0], shape[-1], rows[1], rows[2])

    @classmethod
    def of_packed(cls, packed) -> Optional["Layout"]:
        rows = rows_in_memory(packed.shape, packed.stride())
        return rows and cls(rows[0], packed.shape[-1] // 2, rows[1], rows[2], packed=True)

    def fits(self, shape, strides, gate_strides) -> bool:
        """Whether dense memory with these strides has gate's order of elements."""
        if self.order is None:
            return is_same_order(shape, strides, gate_strides)
        return rows_in_memory(shape, strides) == (self.rows, shape[-1], self.order)

    def programs(self, block):
        return self.rows * -(-self.columns // block)

    def unit(self, dtype):
        return access_unit(self.columns, self.row_stride, dtype)

    def launch(self, kernel, constants: dict, num_warps: int, dtypes: tuple, device) -> launch.Launch:
        """The launch of a kernel for this layout; UNIT and BLOCK are among its constants."""
        unit, programs = constants["UNIT"], self.programs(constants["BLOCK"])
        scalars = self.columns // unit, self.row_stride // unit, programs // self.rows
        return launch.bind(kernel, constants, num_warps, device, dtypes, programs, *scalars)

    def kind(self, dtype) -> dict:
        """The constants that a kernel is compiled for."""
        return {"PACKED": self.packed, "ONE_ROW": self.order is None, "UNIT": self.unit(dtype)}


# The layout of empty tensors.
NOTHING = Layout(0, 0, 0)
