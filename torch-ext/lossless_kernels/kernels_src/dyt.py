"""Dynamic tanh, `weight * tanh(alpha * x) + bias`, as eager composes it: every operation rounds to the tensors' dtype."""

import triton
import triton.language as tl

from .primitives import rounded, tanh_of_number


@triton.jit
def _normalized(x, alpha, DTYPE: tl.constexpr):
    """tanh(x * alpha) of fp32 numbers; the product and the result are rounded to DTYPE."""
    return rounded(tanh_of_number((x * alpha).to(DTYPE)), DTYPE)


@triton.jit(do_not_specialize=["rows"])
def dyt_forward(
    x_ptr,
    alpha_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows: tl.int64,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = weight * tanh(x * alpha) + bias; x and out are dense rows of SIZE elements, alpha is one.

    A program has BLOCK columns of ROWS rows.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    column = (program % BLOCKS * BLOCK + tl.arange(0, BLOCK))[None, :]
    row = ((program // BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    offset = row * SIZE + column
    mask = (row < rows) & (column < SIZE)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    alpha = tl.load(alpha_ptr).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    y = _normalized(x, alpha, DTYPE)
    tl.store(out_ptr + offset, (rounded(weight * y, DTYPE) + bias).to(DTYPE), mask=mask)
