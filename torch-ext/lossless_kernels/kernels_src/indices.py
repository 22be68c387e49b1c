"""Indices that a program computes before it loads anything."""

import triton
import triton.language as tl


@triton.jit
def quotient(number, divider):
    """number // divisor, for numbers from 0 to 2**31 - 1, as int32: a product and a shift.

    The instructions of a division wait for each other. Without two divisions programs that move a few KB take up to 15%
    less time (H200). Other kernels divide: there the same change gained little or lost (docs/log/softmax.md).

    Args:
        number: an integer, or a tensor of integers.
        divider: `core.layout.divider(divisor)`.
    """
    high = tl.umulhi(tl.cast(number, tl.uint32) << 1, tl.cast(divider >> 32, tl.uint32))
    return tl.cast(high >> tl.cast(divider, tl.uint32), tl.int32)
