"""Sums over rows in ATen's order, of terms that a family's kernel computes while it sums them."""

import math
from typing import NamedTuple, Optional

import torch

from ..core import launch, plans
from ..core.calls import Outside
from ..core.domain import allocator
from ..core.layout import contiguous_strides
from ..core.reduction import ColumnReduction, column_reduction, fewest_rows, split_rows

if launch.AVAILABLE:
    from ..kernels_src.column_sum import column_sum_blocks

# Columns of a program where more would leave multiprocessors idle, and the most warps of a program.
_FEW_COLUMNS = 32
_MOST_WARPS = 4


def order_of(rows: int, columns: int, device: torch.device) -> ColumnReduction:
    gpu = plans.gpu(device)
    return column_reduction(rows, columns, gpu.multiprocessors, gpu.threads, gpu.build)


def kind_of(
    rows: int, columns: int, itemsize: int, device: torch.device, of_program: int, of_row: int = 0
) -> tuple[int, int]:
    """What a sum's kernels are compiled for: the fewest rows that have its order, and the columns of a program.

    Args:
        itemsize: bytes of a term in eager.
        of_program: columns of a program if they make enough programs.
        of_row: the number of neighbouring columns that a program's columns must divide; 0 for any.
    """
    gpu = plans.gpu(device)
    rows = split_rows(rows, columns, itemsize)[0][1]
    if order_of(rows, columns, device).blocks * (columns // of_program) < gpu.multiprocessors:
        of_program = _FEW_COLUMNS
    least = fewest_rows(rows, columns, gpu.multiprocessors, gpu.threads, gpu.build)
    return least, math.gcd(of_program, of_row) if of_row else of_program


def check_parts(rows: int, columns: int, itemsize: int, device: torch.device) -> None:
    """Raises Outside where the parts of more than 2 GiB need several kernels, while a kind is that of the first part.

    A part has a row more than another; ATen may give it other threads from a million columns on.
    """
    parts = {count for _, count in split_rows(rows, columns, itemsize)}
    if len({order_of(count, columns, device).height for count in parts}) > 1:
        raise Outside("gradients of more than 2 GiB whose parts ATen sums in several orders")


def bind_sum_blocks(
    columns, dtype, partial_sums, threads, device, *scalars, sums=1, of_program=32, log2_steps=4, num_warps=4
) -> launch.Launch:
    """The kernel that adds up blocks: for their sums, the fp32 sums, and an output of `dtype` or two."""
    constants = {
        "SIZE": columns,
        "PARTIAL_SUMS": partial_sums,
        "THREADS": threads,
        "COLUMNS": of_program,
        "LOG2_STEPS": log2_steps,
        "SUMS": sums,
    }
    dtypes = torch.float32, torch.float32, dtype, dtype
    programs = sums * -(-columns // of_program)
    return launch.bind(column_sum_blocks, constants, num_warps, device, dtypes, programs, *scalars)


class Part(NamedTuple):
    """The launches for the rows that ATen sums at once: for the terms' tensors and the sums of blocks, and for these, the fp32
    sums and the outputs."""

    sum_chains: launch.Launch
    sum_blocks: launch.Launch
    blocks: int


class ColumnSum:
    """Sums of the terms that `kernel` computes of its tensors, resolved for their shape, dtypes and device.

    Args:
        kernel: sums the chains of one block, for so many columns as a program has. Its parameters are pointers of tensors, the
            pointer of the blocks' results, the int64 scalars first_row, rows and blocks, `constants`, then THREADS and COLUMNS.
        dtypes: of the tensors.
        rows, columns: the terms' shape.
        of_program: columns of a program.
        itemsize: bytes of a term in eager.
        shape, dtype: of a result, which has `columns` elements.
        sums: the number of results, 1 or 2.
        store_sum: whether the last part's fp32 sums are stored.
    """

    __slots__ = ("parts", "sums", "blocks", "total", "out")

    def __init__(
        self,
        kernel,
        constants: dict,
        dtypes: tuple,
        rows: int,
        columns: int,
        of_program: int,
        itemsize: int,
        shape: tuple,
        dtype: torch.dtype,
        device: torch.device,
        sums: int = 1,
        store_sum: bool = False,
    ):
        ranges = split_rows(rows, columns, itemsize)
        self.sums, self.parts = sums, []
        for index, (first, count) in enumerate(ranges):
            order = order_of(count, columns, device)
            stores = store_sum or index + 1 < len(ranges)
            self.parts.append(
                Part(
                    launch.bind(
                        kernel,
                        {**constants, "THREADS": order.height, "COLUMNS": of_program},
                        # A thread has at least four elements.
                        min(max(4 * order.height * of_program // (4 * 32), 1), _MOST_WARPS),
                        device,
                        (*dtypes, torch.float32),
                        order.blocks * -(-columns // of_program),
                        *(first, count, order.blocks),
                    ),
                    bind_sum_blocks(
                        *(columns, dtype, 1, order.height, device, order.blocks, int(index > 0), int(stores)), sums=sums
                    ),
                    order.blocks,
                )
            )

        def fp32(*shape):
            return allocator(shape, contiguous_strides(shape), torch.float32, device)

        self.blocks = fp32(sums, max(part.blocks for part in self.parts), columns)
        self.total = fp32(sums, columns) if store_sum or len(ranges) > 1 else None
        self.out = allocator(shape, contiguous_strides(shape), dtype, device)

    def __call__(self, *tensors: torch.Tensor, total: Optional[torch.Tensor] = None) -> list[torch.Tensor]:
        """The sums. `total` is written with `store_sum`: [sums, columns] fp32."""
        blocks, out = self.blocks(), [self.out() for _ in range(self.sums)]
        if total is None:
            # That of a single part is neither read nor written.
            total = blocks if self.total is None else self.total()
        for part in self.parts:
            part.sum_chains(*tensors, blocks)
            part.sum_blocks(blocks, total, *out)
        return out
