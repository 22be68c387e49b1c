"""Dynamic tanh, `weight * tanh(alpha * x) + bias`, as eager composes it: every operation rounds to the tensors' dtype."""

import triton
import triton.language as tl

from .activation import _tanh_gradient
from .primitives import rounded, tanh


@triton.jit
def _block(ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """This program's columns of its row, the mask of those inside, and the offset of the row."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    column = program % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    return column, column < SIZE, (program // BLOCKS).to(tl.int64) * SIZE


@triton.jit
def dyt_forward(x_ptr, alpha_ptr, weight_ptr, bias_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """out = weight * tanh(x * alpha) + bias; x and out are dense rows of SIZE elements, alpha is one."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    column, mask, row = _block(x_ptr, SIZE, BLOCK)
    x = tl.load(x_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
    alpha = tl.load(alpha_ptr).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    y = rounded(tanh(rounded(x * alpha, DTYPE)), DTYPE)
    tl.store(out_ptr + row + column, (rounded(weight * y, DTYPE) + bias).to(DTYPE), mask=mask)


@triton.jit
def dyt_backward(
    dy_ptr,
    x_ptr,
    alpha_ptr,
    weight_ptr,
    dx_ptr,
    of_alpha_ptr,
    of_weight_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OF_ALPHA: tl.constexpr,
    OF_WEIGHT: tl.constexpr,
):
    """dx of `dyt_forward`, and the products whose sums are the gradients of alpha and of the weight; all dense.

    Args:
        OF_ALPHA, OF_WEIGHT: whether these products are stored.
    """
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    column, mask, row = _block(x_ptr, SIZE, BLOCK)
    dy = tl.load(dy_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
    alpha = tl.load(alpha_ptr).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    y = rounded(tanh(rounded(x * alpha, DTYPE)), DTYPE)
    d_scaled = _tanh_gradient(rounded(dy * weight, DTYPE), y, DTYPE)
    tl.store(dx_ptr + row + column, (d_scaled * alpha).to(DTYPE), mask=mask)
    if OF_ALPHA:
        tl.store(of_alpha_ptr + row + column, (d_scaled * x).to(DTYPE), mask=mask)
    if OF_WEIGHT:
        tl.store(of_weight_ptr + row + column, (dy * y).to(DTYPE), mask=mask)
