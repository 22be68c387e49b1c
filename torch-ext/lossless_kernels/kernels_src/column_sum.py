"""The second half of a sum over rows in the order of ATen's Reduce.cuh: what the last block does with the results of all blocks.

The kernel of the first half is the family's: it computes the terms, so that no tensor of them is written.
"""

import triton
import triton.language as tl

from .primitives import mask_if
from .summation import sum_of_blocks


@triton.jit(do_not_specialize=["blocks", "accumulate", "store_sum"])
def column_sum_blocks(
    block_ptr,
    sum_ptr,
    out_ptr,
    second_out_ptr,
    blocks: tl.int64,
    accumulate: tl.int32,
    store_sum: tl.int32,
    SIZE: tl.constexpr,
    PARTIAL_SUMS: tl.constexpr,
    THREADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """The sums [SIZE] from their blocks' results, [SUMS, blocks, PARTIAL_SUMS, SIZE] fp32.

    ATen sums a tensor too large for 32-bit indexing in parts. `sum` ([SUMS, SIZE] fp32) has the sums of the earlier parts:
    they are added if `accumulate` is 1, and written if `store_sum` is 1.

    Args:
        SUMS: 1, or 2 with a second output.
    """
    PARTS: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    which = tl.program_id(0) // PARTS
    column = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < SIZE
    block_ptr += which * blocks * PARTIAL_SUMS * SIZE
    sum_ptr += which * SIZE
    total = sum_of_blocks(block_ptr, blocks, column, mask, SIZE, PARTIAL_SUMS, THREADS, COLUMNS, LOG2_STEPS)
    # The sum of a part is never -0: adding 0 to it changes nothing.
    total = tl.load(sum_ptr + column, mask=mask_if(mask, accumulate), other=0.0) + total
    tl.store(sum_ptr + column, total, mask=mask_if(mask, store_sum))
    out = total.to(out_ptr.dtype.element_ty)
    if SUMS == 1:
        tl.store(out_ptr + column, out, mask=mask)
    else:
        if which == 0:
            tl.store(out_ptr + column, out, mask=mask)
        else:
            tl.store(second_out_ptr + column, out, mask=mask)
