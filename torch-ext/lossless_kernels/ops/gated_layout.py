"""The memory layout of gate and up, and how one launch covers it."""

from dataclasses import dataclass
from typing import Optional

from ..core.layout import is_dense, is_same_order, rows_in_memory
from .activation import access_unit


@dataclass(frozen=True)
class Layout:
    """The layout of gate and up: rows at a distance of `row_stride`, or one row if they are dense.

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

    def kind(self, dtype) -> dict:
        """The constants that a kernel is compiled for."""
        return {"PACKED": self.packed, "ONE_ROW": self.order is None, "UNIT": self.unit(dtype)}


# The layout of empty tensors.
NOTHING = Layout(0, 0, 0)
