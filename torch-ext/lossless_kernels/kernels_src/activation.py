"""Activation functions as ATen's CUDA kernels compute them."""

import triton
import triton.language as tl

from .primitives import divide, exp, reciprocal


@triton.jit(do_not_specialize=["column_units", "x_row_stride", "blocks_per_row"])
def silu_forward(
    x_ptr,
    out_ptr,
    column_units: tl.int64,
    x_row_stride: tl.int64,
    blocks_per_row: tl.int64,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = x / (1 + exp(-x)) in fp32, rounded once to x's dtype.

    x has rows of `column_units * UNIT` elements, `x_row_stride * UNIT` apart; out is dense. Counting in units tells the
    compiler what is aligned; a dense x is one row.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks_per_row
    column = (program - row * blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    mask = column // UNIT < column_units
    x = tl.load(x_ptr + row * x_row_stride * UNIT + column, mask=mask, other=0.0).to(tl.float32)
    out = divide(x, 1.0 + exp(-x))
    tl.store(out_ptr + row * column_units * UNIT + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["units"])
def silu_backward(dy_ptr, x_ptr, dx_ptr, units: tl.int64, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """dx = (dy * s) * fma(x, 1 - s, 1) with s = 1 / (1 + exp(-x)), in fp32, rounded once; `units * UNIT` elements.

    The FMA is ATen's: its source has a product and a sum, and nvcc contracts them.
    """
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset // UNIT < units
    dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    sigmoid = reciprocal(1.0 + exp(-x))
    dx = (dy * sigmoid) * tl.fma(x, 1.0 - sigmoid, 1.0)
    tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=mask)
