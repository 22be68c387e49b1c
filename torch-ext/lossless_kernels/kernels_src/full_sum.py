"""The second half of a full sum in the order of ATen's Reduce.cuh: what the last block does with the results of all blocks.

The kernel of the first half is the family's: it computes the terms, so that no tensor of them is written.
"""

import triton
import triton.language as tl

from .primitives import rounded
from .summation import _sum_of_lanes


@triton.jit(do_not_specialize=["blocks", "factor"])
def full_sum_last_block(
    block_ptr,
    total_ptr,
    out_ptr,
    blocks: tl.int32,
    factor: tl.float32,
    WIDTH: tl.constexpr,
    CONTINUES: tl.constexpr,
    ROUND_SUM: tl.constexpr,
):
    """out = factor times the sum of the blocks' results; `total` is that sum in fp32.

    Args:
        CONTINUES: `total` has the sum of the parts before, to which this part is added.
        ROUND_SUM: the sum is rounded to the dtype of out before it is multiplied.
    """
    thread = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, blocks, WIDTH):
        total += tl.load(block_ptr + first + thread, mask=first + thread < blocks, other=0.0)
    total = _sum_of_lanes(tl.reshape(total, [1, WIDTH]), 1, WIDTH, 1, EXCHANGE_ONCE=False)
    at = tl.arange(0, 1)
    if CONTINUES:
        total = tl.load(total_ptr + at) + total
    tl.store(total_ptr + at, total)
    if ROUND_SUM:
        total = rounded(total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, (total * factor).to(out_ptr.dtype.element_ty))
