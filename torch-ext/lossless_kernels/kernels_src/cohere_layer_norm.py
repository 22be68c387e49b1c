"""LayerNorm as transformers' CohereLayerNorm composes it, and its gradients, one rounding per eager operation."""

import triton
import triton.language as tl

from .primitives import mask_if, rsqrt, widened
from .rms_norm import _columns, _mean_factor
from .rms_norm_backward import _gradient_of_squares
from .summation import row_sum


@triton.jit
def _load_weight_rows(weight_ptr, row, weight_rows, column, mask, HIDDEN_SIZE: tl.constexpr):
    """The weights of the rows, fp32: a weight [weight_rows, HIDDEN_SIZE] repeats."""
    # A remainder of 64 bits takes some 70 instructions.
    of_weight = row * 0
    if weight_rows > 1:
        of_weight = row % weight_rows
    offset = (of_weight * HIDDEN_SIZE)[:, None, None] + column[None, :, :]
    return tl.load(weight_ptr + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "weight_rows", "store_statistics", "eps"])
def cohere_layer_norm_forward(
    x_ptr,
    weight_ptr,
    out_ptr,
    mean_ptr,
    rstd_ptr,
    rows: tl.int64,
    weight_rows: tl.int64,
    store_statistics: tl.int32,
    eps: tl.float32,
    HIDDEN_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """out[row] = weight * ((x[row] - mean) * rstd), with c = x[row] - mean and rstd = rsqrt(mean(c**2) + eps) in fp32.

    A program takes ROWS rows of x and out, which are dense. Row r has the weight's row r modulo `weight_rows`.

    Args:
        store_statistics: the mean and rstd of each row are stored if this is 1.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < rows
    column = _columns(LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED)
    in_row = column < HIDDEN_SIZE
    mask = in_range[:, None, None] & in_row[None, :, :]
    offset = (row * HIDDEN_SIZE)[:, None, None] + column[None, :, :]
    x = tl.load(x_ptr + offset, mask=mask, other=0.0)
    # The division runs during the load.
    factor = _mean_factor(rows, HIDDEN_SIZE)
    x = widened(x)
    mean = row_sum(x, ROWS, LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS) * factor
    # A row's sum takes zeros beyond its end.
    centred = tl.where(in_row[None, :, :], x - mean[:, None, None], 0.0)
    squares = row_sum(centred * centred, ROWS, LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS)
    rstd = rsqrt(squares * factor + eps)
    tl.store(mean_ptr + row, mean, mask=mask_if(in_range, store_statistics))
    tl.store(rstd_ptr + row, rstd, mask=mask_if(in_range, store_statistics))
    # The weight is loaded last: where a thread has 128 elements, its registers would not hold them and the weight.
    weight = _load_weight_rows(weight_ptr, row, weight_rows, column, mask, HIDDEN_SIZE)
    out = weight * (centred * rstd[:, None, None])
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "weight_rows", "store_sums"])
def cohere_layer_norm_backward(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dx_variance_ptr,
    dx_mean_ptr,
    product_ptr,
    d_rstd_ptr,
    d_mean_ptr,
    rows: tl.int64,
    weight_rows: tl.int64,
    store_sums: tl.int32,
    HIDDEN_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    DX: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """dx of `cohere_layer_norm_forward`, and the fp32 products whose sum over rows is the weight's gradient.

    All tensors are dense. Eager's dx has three terms: through the product with rstd, the variance and the mean. Their
    sum in this order is rounded to 16 bits; of an fp32 x they are three gradients.

    Args:
        store_sums: the fp32 gradients of each row's rstd and mean are stored if this is 1.
        DX, PRODUCTS: whether dx is computed, and the products.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < rows
    column = _columns(LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED)
    in_row = (column < HIDDEN_SIZE)[None, :, :]
    mask = in_range[:, None, None] & in_row
    offset = (row * HIDDEN_SIZE)[:, None, None] + column[None, :, :]
    dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + row, mask=in_range, other=0.0)
    rstd = tl.load(rstd_ptr + row, mask=in_range, other=0.0)[:, None, None]
    centred = x - mean[:, None, None]
    if PRODUCTS:
        tl.store(product_ptr + offset, dy * (centred * rstd), mask=mask)
    if DX:
        d_normalized = dy * _load_weight_rows(weight_ptr, row, weight_rows, column, mask, HIDDEN_SIZE)
        # A row's sum takes zeros beyond its end.
        terms = tl.where(in_row, d_normalized * centred, 0.0)
        d_rstd = row_sum(terms, ROWS, LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS)
        through_rstd = d_normalized * rstd
        terms = tl.where(in_row, through_rstd * -1.0, 0.0)
        d_mean = row_sum(terms, ROWS, LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS)
        through_variance = _gradient_of_squares(d_rstd[:, None, None], rstd, HIDDEN_SIZE) * (2.0 * centred)
        terms = tl.where(in_row, through_variance * -1.0, 0.0)
        d_mean = d_mean + row_sum(terms, ROWS, LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS)
        tl.store(d_rstd_ptr + row, d_rstd, mask=mask_if(in_range, store_sums))
        tl.store(d_mean_ptr + row, d_mean, mask=mask_if(in_range, store_sums))
        # ATen divides by a scalar by multiplying by its reciprocal.
        reciprocal = tl.div_rn(1.0, tl.cast(HIDDEN_SIZE, tl.float32))
        through_mean = tl.broadcast_to((d_mean * reciprocal)[:, None, None], centred.shape)
        dtype = dx_ptr.dtype.element_ty
        if dtype == tl.float32:
            tl.store(dx_ptr + offset, through_rstd, mask=mask)
            tl.store(dx_variance_ptr + offset, through_variance, mask=mask)
            tl.store(dx_mean_ptr + offset, through_mean, mask=mask)
        else:
            dx = (through_rstd + through_variance) + through_mean
            tl.store(dx_ptr + offset, dx.to(dtype), mask=mask)
