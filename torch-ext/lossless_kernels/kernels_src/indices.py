"""Indices that programs compute before they load anything.

The instructions of a division, some 40, wait for each other. Programs that move a few KB spend a tenth of their time with it.
"""

import triton
import triton.language as tl


@triton.jit
def quotient(number, divider):
    """number // divisor, for numbers from 0 to 2**31 - 1, as int32: a product and a shift.

    Args:
        number: an integer, or a tensor of integers.
        divider: `core.layout.divider(divisor)`.
    """
    high = tl.umulhi(tl.cast(number, tl.uint32) << 1, tl.cast(divider >> 32, tl.uint32))
    return tl.cast(high >> tl.cast(divider, tl.uint32), tl.int32)
