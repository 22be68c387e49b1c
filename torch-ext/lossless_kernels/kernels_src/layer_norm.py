"""LayerNorm's forward pass as ATen's vectorised kernel computes it (ATen/native/cuda/layer_norm_kernel.cu)."""

import triton
import triton.language as tl

from .primitives import divide, mask_if, rsqrt
from .summation import in_vectors, welford_of_block, welford_step

# ATen's block has so many threads, whatever the row's length. A thread reads vectors of four elements.
_LANES = tl.constexpr(128)


@triton.jit
def _welford(mean, m2, x, lane, STEP: tl.constexpr, SIZE: tl.constexpr):
    """Step STEP of all lanes: each adds its vector of four to its mean and M2, unless the row has ended before it."""
    values = in_vectors(x.to(tl.float32), _LANES)
    old_mean, old_m2 = mean, m2
    for position in tl.static_range(4):
        mean, m2 = welford_step(mean, m2, values[position], 1.0 / (4 * STEP + position + 1))
    if (STEP + 1) * 4 * _LANES > SIZE:
        in_row = lane < SIZE // 4 - STEP * _LANES
        mean, m2 = tl.where(in_row, mean, old_mean), tl.where(in_row, m2, old_m2)
    return mean, m2


@triton.jit(do_not_specialize=["x_row_stride", "store_statistics", "eps"])
def layer_norm_forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    x_row_stride: tl.int64,
    store_statistics: tl.int32,
    eps: tl.float32,
    SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    STREAMED: tl.constexpr,
):
    """y[row] = weight * (rstd * (x[row] - mean)) + bias, with the row's mean and rstd = rsqrt(variance + eps) in fp32.

    A program takes a row of SIZE elements, a multiple of four; y is dense.

    Args:
        x_row_stride: in units of STRIDE_UNIT elements, which show the compiler the alignment.
        store_statistics: mean and rstd are stored if this is 1.
        WEIGHT, BIAS: without them `weight_ptr` and `bias_ptr` are not accessed. A bias needs a weight.
        STREAMED: the row is read again for y, instead of being kept in registers.
    """
    tl.static_assert(WEIGHT or not BIAS, "without a weight ATen has another arithmetic for one element of four")
    COLUMNS: tl.constexpr = 4 * _LANES
    STEPS: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0).to(tl.int64)
    x_row_ptr = x_ptr + row * (x_row_stride * STRIDE_UNIT)
    lane = tl.arange(0, _LANES)
    mean = tl.zeros([_LANES], tl.float32)
    m2 = tl.zeros([_LANES], tl.float32)
    steps = ()
    for step in tl.static_range(STEPS):
        column = step * COLUMNS + tl.arange(0, COLUMNS)
        x = tl.load(x_row_ptr + column, mask=column < SIZE, other=0.0, eviction_policy="evict_last" if STREAMED else "")
        if STREAMED:
            mean, m2 = _welford(mean, m2, x, lane, step, SIZE)
        else:
            steps = steps + (x,)
    if not STREAMED:
        for step in tl.static_range(STEPS):
            mean, m2 = _welford(mean, m2, steps[step], lane, step, SIZE)
    vectors = (SIZE // 4 - lane + _LANES - 1) // _LANES
    mean, m2 = welford_of_block(mean, m2, (4 * vectors).to(tl.float32), _LANES)
    rstd = rsqrt(divide(m2, tl.full([1], SIZE, tl.float32)) + eps)
    first = tl.arange(0, 1)
    tl.store(mean_ptr + row + first, mean, mask=mask_if(first == 0, store_statistics))
    tl.store(rstd_ptr + row + first, rstd, mask=mask_if(first == 0, store_statistics))

    for step in tl.static_range(STEPS):
        column = step * COLUMNS + tl.arange(0, COLUMNS)
        in_row = column < SIZE
        if STREAMED:
            x = tl.load(x_row_ptr + column, mask=in_row, other=0.0, eviction_policy="evict_first")
        else:
            x = steps[step]
        y = rstd * (x.to(tl.float32) - mean)
        if WEIGHT:
            weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
            if BIAS:
                y = tl.fma(weight, y, tl.load(bias_ptr + column, mask=in_row, other=0.0).to(tl.float32))
            else:
                y = weight * y
        tl.store(y_ptr + row * SIZE + column, y.to(y_ptr.dtype.element_ty), mask=in_row)
