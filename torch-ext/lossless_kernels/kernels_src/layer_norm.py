"""LayerNorm's forward pass as ATen's vectorised kernel computes it (ATen/native/cuda/layer_norm_kernel.cu)."""

import triton
import triton.language as tl

from .primitives import divide, mask_if, rsqrt, widened
from .summation import in_vectors, welford_of_block, welford_step

# ATen's block has so many threads, whatever the row's length. A thread reads vectors of four elements.
_LANES = tl.constexpr(128)


@triton.jit
def _welford(mean, m2, x, lane, STEP: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Step STEP of all lanes: each adds its vector of four to its mean and M2, unless the row has ended before it."""
    values = in_vectors(tl.reshape(widened(x), [ROWS * LANES * 4]), ROWS * LANES)
    old_mean, old_m2 = mean, m2
    for position in tl.static_range(4):
        mean, m2 = welford_step(mean, m2, values[position], 1.0 / (4 * STEP + position + 1))
    if (STEP + 1) * 4 * LANES > SIZE:
        in_row = lane < SIZE // 4 - STEP * LANES
        mean, m2 = tl.where(in_row, mean, old_mean), tl.where(in_row, m2, old_m2)
    return mean, m2


@triton.jit(do_not_specialize=["rows", "x_row_stride", "store_statistics", "eps"])
def layer_norm_forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    rows: tl.int64,
    x_row_stride: tl.int64,
    store_statistics: tl.int32,
    eps: tl.float32,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):
    """y[row] = weight * (rstd * (x[row] - mean)) + bias, with the row's mean and rstd = rsqrt(variance + eps) in fp32.

    A program takes ROWS rows of SIZE elements, a multiple of four; y is dense.

    Args:
        x_row_stride: in units of STRIDE_UNIT elements, which show the compiler the alignment.
        store_statistics: mean and rstd are stored if this is 1.
        WEIGHT, BIAS: without them `weight_ptr` and `bias_ptr` are not accessed. A bias needs a weight.
    """
    tl.static_assert(WEIGHT or not BIAS, "without a weight ATen has another arithmetic for one element of four")
    # Whole warps of lanes without elements are left out.
    EMPTY: tl.constexpr = 2 if SIZE <= 128 else 1 if SIZE <= 256 else 0
    LANES: tl.constexpr = _LANES >> EMPTY
    COLUMNS: tl.constexpr = 4 * LANES
    STEPS: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    of_row = row < rows
    x_offset = (row * (x_row_stride * STRIDE_UNIT))[:, None]
    lane = tl.arange(0, ROWS * LANES) % LANES
    mean = tl.zeros([ROWS * LANES], tl.float32)
    m2 = tl.zeros([ROWS * LANES], tl.float32)
    steps = ()
    for step in tl.static_range(STEPS):
        column = step * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = of_row[:, None] & (column < SIZE)
        steps = steps + (tl.load(x_ptr + x_offset + column, mask=inside, other=0.0),)
    for step in tl.static_range(STEPS):
        mean, m2 = _welford(mean, m2, steps[step], lane, step, SIZE, LANES, ROWS)
    vectors = (SIZE // 4 - lane + LANES - 1) // LANES
    # In rows of a multiple of 128 elements all lanes of a warp have the same number n of elements. The share of one in two lanes
    # is n / 2n, which is 1/2 in fp32 for every n here. Any other n has this share. The compiler sees that STEPS vectors a lane
    # are a constant. (With a constant from the start it would compute the moments of all lanes in each thread.)
    tl.static_assert(STEPS <= 40, "41 * (1 / 82) is not 1/2 in fp32")
    alike = (STEPS * LANES - lane + LANES - 1) // LANES if SIZE % 128 == 0 else vectors
    count, alike = (4 * vectors).to(tl.float32), (4 * alike).to(tl.float32)
    mean, m2 = welford_of_block(mean, m2, count, LANES, alike, BLOCKS=ROWS, EMPTY=EMPTY)
    # By a power of two a product has the quotient's bits, subnormal ones too.
    POWER_OF_TWO: tl.constexpr = SIZE & (SIZE - 1) == 0
    variance = m2 * (1.0 / SIZE) if POWER_OF_TWO else divide(m2, tl.full([ROWS], SIZE, tl.float32))
    rstd = rsqrt(variance + eps)
    tl.store(mean_ptr + row, mean, mask=mask_if(of_row, store_statistics))
    tl.store(rstd_ptr + row, rstd, mask=mask_if(of_row, store_statistics))

    for step in tl.static_range(STEPS):
        column = step * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = of_row[:, None] & (column < SIZE)
        y = rstd[:, None] * (widened(steps[step]) - mean[:, None])
        if WEIGHT:
            # Loaded for each row, from the L1: a single row would get another layout and pass through shared memory.
            of_rows = tl.broadcast_to(column, y.shape)
            weight = widened(tl.load(weight_ptr + of_rows, mask=of_rows < SIZE, other=0.0))
            if BIAS:
                y = tl.fma(weight, y, widened(tl.load(bias_ptr + of_rows, mask=of_rows < SIZE, other=0.0)))
            else:
                y = weight * y
        tl.store(y_ptr + (row * SIZE)[:, None] + column, y.to(y_ptr.dtype.element_ty), mask=inside)
