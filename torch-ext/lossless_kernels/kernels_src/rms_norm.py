"""RMSNorm as the eager LlamaRMSNorm of transformers computes it, one rounding per eager operation."""

import triton
import triton.language as tl

from .summation import row_sum


@triton.jit(do_not_specialize=["rows", "x_row_stride", "store_rstd", "eps"])
def rms_norm_forward(
    x_ptr,
    weight_ptr,
    out_ptr,
    rstd_ptr,
    rows: tl.int64,
    x_row_stride: tl.int64,
    store_rstd: tl.int32,
    eps: tl.float32,
    HIDDEN_SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
):
    """out[row] = weight * (x[row] * rstd[row]).to(x.dtype) with rstd = rsqrt(mean(x[row]**2) + eps) in fp32.

    One program takes ROWS rows and keeps them in registers between the sum and the store. `x_row_stride` counts
    STRIDE_UNIT elements, so that the compiler knows how rows are aligned. `rstd` is stored if `store_rstd` is 1.
    """
    STEPS: tl.constexpr = 1 << LOG2_STEPS
    COLUMNS: tl.constexpr = 4 * WIDTH * HEIGHT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, STEPS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_row = column < HIDDEN_SIZE
    mask = (row < rows)[:, None, None] & in_row[None, :, :]

    x = tl.load(x_ptr + (row * x_row_stride)[:, None, None] * STRIDE_UNIT + column[None, :, :], mask=mask, other=0.0)
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0)
    h = x.to(tl.float32)
    total = row_sum(h * h, ROWS, LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED)

    # ATen multiplies by this quotient of two fp32 numbers; beyond 2**24 elements it is not always fp32(1 / hidden_size).
    mean_factor = tl.div_rn(tl.cast(rows, tl.float32), tl.cast(rows * HIDDEN_SIZE, tl.float32))
    rstd = tl.rsqrt(total * mean_factor + eps)
    tl.store(rstd_ptr + row, rstd, mask=(row < rows) & (store_rstd != 0))

    normalized = (h * rstd[:, None, None]).to(x_ptr.dtype.element_ty)
    out = weight.to(tl.float32)[None, :, :] * normalized.to(tl.float32)
    out_offset = (row * HIDDEN_SIZE)[:, None, None] + column[None, :, :]
    tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=mask)
