"""RMSNorm as the eager layers of transformers compute it, one rounding per eager operation.

SCALE is the use of the weight: "after_cast" multiplies the normalised values in x's dtype, "fp32" in fp32, "one_plus"
multiplies them in fp32 by 1 + weight, "none" has no weight.
"""

import triton
import triton.language as tl

from .primitives import divide, mask_if, prefetch_bulk, rsqrt
from .summation import fused_sum_of_squares, row_sum, sum_of_columns


@triton.jit
def _factor(weight, SCALE: tl.constexpr):
    """The factor of a normalised value, fp32."""
    factor = weight.to(tl.float32)
    if SCALE == "one_plus":
        factor = 1.0 + factor
    return factor


@triton.jit
def _columns(
    LOG2_STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    PROGRAMS_PER_ROW: tl.constexpr = 1,
):
    """A row's columns as a tile [STEPS, COLUMNS] with `row_sum`'s steps; of a split row this program's [1, PART]."""
    COLUMNS: tl.constexpr = (4 if VECTORIZED else 1) * WIDTH * HEIGHT
    if PROGRAMS_PER_ROW > 1:
        PART: tl.constexpr = (COLUMNS << LOG2_STEPS) // PROGRAMS_PER_ROW
        return (tl.program_id(0) % PROGRAMS_PER_ROW * PART + tl.arange(0, PART))[None, :]
    else:
        return tl.arange(0, 1 << LOG2_STEPS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _load_weight(weight_ptr, column, in_row, SCALE: tl.constexpr, EVICTION: tl.constexpr):
    """The weight at `column`; without a weight any tensor of that shape."""
    weight = column
    if SCALE != "none":
        weight = tl.load(weight_ptr + column, mask=in_row, other=0.0, eviction_policy=EVICTION)
    return weight


@triton.jit
def _mean_factor(rows, HIDDEN_SIZE: tl.constexpr):
    """ATen's factor for a mean, a quotient of fp32 numbers: beyond 2**24 elements not always fp32(1 / HIDDEN_SIZE)."""
    return tl.div_rn(tl.cast(rows, tl.float32), tl.cast(rows * HIDDEN_SIZE, tl.float32))


@triton.jit
def _mean_of_squares(
    x,
    rows,
    HIDDEN_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    FUSED: tl.constexpr,
):
    """Each row's mean of x**2, x [ROWS, STEPS, COLUMNS], in the order of ATen's RMSNorm kernel (FUSED) or reduction."""
    if FUSED:
        total = fused_sum_of_squares(x.to(tl.float32), ROWS, LOG2_STEPS, WIDTH, HEIGHT)
        return divide(total, tl.full([ROWS], HIDDEN_SIZE, tl.float32))
    elif WIDTH > 32 and WIDTH > NEIGHBOURS:
        # At most 15 rows, whose time is latency: the division runs during the load of x, and warps exchange x before
        # its conversion to fp32. The division has a branch; the compiler leaves the load of the weight before it, too.
        factor = _mean_factor(rows, HIDDEN_SIZE)
        return row_sum(x, ROWS, LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, SQUARES=True) * factor
    else:
        h = x.to(tl.float32)
        total = row_sum(h * h, ROWS, LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS)
        return total * _mean_factor(rows, HIDDEN_SIZE)


@triton.jit
def _prefetch_rows(x_ptr, rows, row_stride, HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr):
    """Prefetches the rows of the program that is AHEAD programs later, if it exists, into the L2."""
    BYTES: tl.constexpr = HIDDEN_SIZE * x_ptr.dtype.element_ty.primitive_bitwidth // 8
    first = (tl.program_id(0).to(tl.int64) + AHEAD) * ROWS
    for each in tl.static_range(ROWS):
        prefetch_bulk(x_ptr + (first + each) * row_stride, first + each < rows, BYTES)


@triton.jit
def _load_sum(x_ptr, residual_ptr, offset, mask, EVICTION: tl.constexpr):
    """residual + x, rounded to their dtype."""
    x = tl.load(x_ptr + offset, mask=mask, other=0.0, eviction_policy=EVICTION)
    residual = tl.load(residual_ptr + offset, mask=mask, other=0.0, eviction_policy=EVICTION)
    return (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)


@triton.jit
def _load_steps(
    x_ptr,
    residual_ptr,
    start,
    in_range,
    first,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    ADD: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """COUNT steps from step `first` on, of rows of x, with ADD of residual + x, that begin at `start` [ROWS]."""
    steps = ()
    for step in tl.static_range(COUNT):
        at = (first + step) * COLUMNS + tl.arange(0, COLUMNS)
        mask = in_range[:, None] & (at < HIDDEN_SIZE)[None, :]
        offset = start[:, None] + at[None, :]
        if ADD:
            x = _load_sum(x_ptr, residual_ptr, offset, mask, EVICTION)
        else:
            x = tl.load(x_ptr + offset, mask=mask, other=0.0, eviction_policy=EVICTION)
        steps = steps + (x,)
    return steps


@triton.jit
def _add_squares(total, steps, COUNT: tl.constexpr):
    """((total + (step 0)**2) + (step 1)**2) + ..., in fp32."""
    for step in tl.static_range(COUNT):
        h = steps[step].to(tl.float32)
        total += h * h
    return total


@triton.jit
def _streamed_mean_of_squares(
    x_ptr,
    residual_ptr,
    start,
    in_range,
    rows,
    HIDDEN_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    ADD: tl.constexpr,
):
    """The mean in ATen's reduction order, of rows of x (ADD: residual + x) at `start` [ROWS] that will be read again.

    Loads step by step put the numbers that ATen adds in sequence into one thread, for any number of warps.
    """
    COLUMNS: tl.constexpr = (4 if VECTORIZED else 1) * WIDTH * HEIGHT
    STEPS: tl.constexpr = (HIDDEN_SIZE + COLUMNS - 1) // COLUMNS
    AT_ONCE: tl.constexpr = STEPS if STEPS < 8 else 8
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in tl.range(0, STEPS, AT_ONCE, num_stages=1):
        steps = _load_steps(
            x_ptr, residual_ptr, start, in_range, first, AT_ONCE, COLUMNS, HIDDEN_SIZE, ADD, "evict_last"
        )  # fmt: skip
        total = _add_squares(total, steps, AT_ONCE)
    FEW_STEPS: tl.constexpr = STEPS > 1 and STEPS <= 4
    squares = sum_of_columns(total, ROWS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, EXCHANGE_ONCE=FEW_STEPS)
    return squares * _mean_factor(rows, HIDDEN_SIZE)


@triton.jit
def _mean_of_squares_by_lane(
    x_ptr,
    residual_ptr,
    start,
    in_range,
    rows,
    HIDDEN_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    ADD: tl.constexpr,
):
    """The mean in ATen's reduction order, of rows of x (ADD: residual + x) at `start` [ROWS], loaded for the sum alone.

    The numbers that ATen adds in sequence go into one thread, all steps at once; the division runs during the loads.
    """
    COLUMNS: tl.constexpr = (4 if VECTORIZED else 1) * WIDTH * HEIGHT
    STEPS: tl.constexpr = (HIDDEN_SIZE + COLUMNS - 1) // COLUMNS
    steps = _load_steps(x_ptr, residual_ptr, start, in_range, 0, STEPS, COLUMNS, HIDDEN_SIZE, ADD, "")
    factor = _mean_factor(rows, HIDDEN_SIZE)
    total = _add_squares(tl.zeros([ROWS, COLUMNS], dtype=tl.float32), steps, STEPS)
    # Several separately loaded steps are no row to which the compiler could move the exchange.
    return sum_of_columns(total, ROWS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, EXCHANGE_ONCE=STEPS > 1) * factor


@triton.jit
def _normalize(h, rstd, weight, SCALE: tl.constexpr, input_dtype: tl.constexpr):
    """The output of rows h [ROWS, STEPS, COLUMNS] with rstd [ROWS], in fp32."""
    out = h * rstd[:, None, None]
    if SCALE == "after_cast":
        out = out.to(input_dtype).to(tl.float32)
    if SCALE != "none":
        out = _factor(weight, SCALE)[None, :, :] * out
    return out


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
    SCALE: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    FUSED: tl.constexpr,
    STREAMED: tl.constexpr,
    BY_LANE: tl.constexpr,
    PROGRAMS_PER_ROW: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """out[row] = weight * x[row] * rstd[row], rounded by SCALE, with rstd = rsqrt(mean(x[row]**2) + eps) in fp32.

    A program takes ROWS rows. It keeps them in registers between the sum and the store, except with STREAMED.

    Args:
        x_row_stride: in units of STRIDE_UNIT elements, which show the compiler the alignment.
        store_rstd: rstd is stored if this is 1.
        STREAMED: a program reads its rows twice. Few registers allow many programs with loads in flight; threads
            exchange only their lanes' sums.
        BY_LANE: a program loads its rows for the sum and for the store at once; a few rows wait for memory only once.
        PROGRAMS_PER_ROW: with BY_LANE, the number of programs that share ROWS rows. Each reads all of them for the sum,
            and stores its part, and rstd, which is the same in all.
        AHEAD: if not 0, a program prefetches the rows of the program AHEAD later into the L2.
    """
    tl.static_assert(not (FUSED and (STREAMED or BY_LANE)), "ATen's own kernel adds in another order")
    if AHEAD:
        _prefetch_rows(x_ptr, rows, x_row_stride * STRIDE_UNIT, HIDDEN_SIZE, ROWS, AHEAD)
    row = (tl.program_id(0) // PROGRAMS_PER_ROW).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < rows
    column = _columns(LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED, PROGRAMS_PER_ROW)
    in_row = column < HIDDEN_SIZE
    mask = in_range[:, None, None] & in_row[None, :, :]
    start = row * x_row_stride * STRIDE_UNIT
    x_offset = start[:, None, None] + column[None, :, :]
    out_offset = (row * HIDDEN_SIZE)[:, None, None] + column[None, :, :]

    if STREAMED:
        mean = _streamed_mean_of_squares(
            x_ptr, x_ptr, start, in_range, rows, HIDDEN_SIZE, ROWS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, False
        )  # fmt: skip
    else:
        x = tl.load(x_ptr + x_offset, mask=mask, other=0.0)
        weight = _load_weight(weight_ptr, column, in_row, SCALE, "")
        if BY_LANE:
            mean = _mean_of_squares_by_lane(
                x_ptr, x_ptr, start, in_range, rows, HIDDEN_SIZE, ROWS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, False
            )  # fmt: skip
        else:
            mean = _mean_of_squares(
                x, rows, HIDDEN_SIZE, ROWS, LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, FUSED
            )  # fmt: skip
        h = x.to(tl.float32)
    rstd = rsqrt(mean + eps)
    if STREAMED:
        h = tl.load(x_ptr + x_offset, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        weight = _load_weight(weight_ptr, column, in_row, SCALE, "evict_last")
    tl.store(rstd_ptr + row, rstd, mask=mask_if(in_range, store_rstd))
    out = _normalize(h, rstd, weight, SCALE, x_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "store_rstd", "eps"])
def add_rms_norm_forward(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    rstd_ptr,
    rows: tl.int64,
    store_rstd: tl.int32,
    eps: tl.float32,
    SCALE: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    STREAMED: tl.constexpr,
    BY_LANE: tl.constexpr,
    PROGRAMS_PER_ROW: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """sum = residual + x, rounded to their dtype; out = `rms_norm_forward` of sum; all contiguous [rows, HIDDEN_SIZE].

    STREAMED reads and adds both twice. BY_LANE, PROGRAMS_PER_ROW and AHEAD are those of `rms_norm_forward`.
    """
    if AHEAD:
        _prefetch_rows(x_ptr, rows, HIDDEN_SIZE, HIDDEN_SIZE, ROWS, AHEAD)
        _prefetch_rows(residual_ptr, rows, HIDDEN_SIZE, HIDDEN_SIZE, ROWS, AHEAD)
    row = (tl.program_id(0) // PROGRAMS_PER_ROW).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < rows
    column = _columns(LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED, PROGRAMS_PER_ROW)
    in_row = column < HIDDEN_SIZE
    mask = in_range[:, None, None] & in_row[None, :, :]
    start = row * HIDDEN_SIZE
    offset = start[:, None, None] + column[None, :, :]

    if STREAMED:
        mean = _streamed_mean_of_squares(
            x_ptr, residual_ptr, start, in_range, rows, HIDDEN_SIZE, ROWS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, True
        )  # fmt: skip
    else:
        total = _load_sum(x_ptr, residual_ptr, offset, mask, "")
        if not BY_LANE:
            tl.store(sum_ptr + offset, total, mask=mask)
        h = total.to(tl.float32)
        weight = _load_weight(weight_ptr, column, in_row, SCALE, "")
        if BY_LANE:
            mean = _mean_of_squares_by_lane(
                x_ptr, residual_ptr, start, in_range, rows, HIDDEN_SIZE, ROWS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, True
            )  # fmt: skip
            # Not earlier: the compiler would have to assume that the next loads read it.
            tl.store(sum_ptr + offset, total, mask=mask)
        else:
            mean = _mean_of_squares(
                total, rows, HIDDEN_SIZE, ROWS, LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, False
            )  # fmt: skip
    rstd = rsqrt(mean + eps)
    if STREAMED:
        total = _load_sum(x_ptr, residual_ptr, offset, mask, "evict_first")
        tl.store(sum_ptr + offset, total, mask=mask)
        h = total.to(tl.float32)
        weight = _load_weight(weight_ptr, column, in_row, SCALE, "evict_last")
    tl.store(rstd_ptr + row, rstd, mask=mask_if(in_range, store_rstd))
    out = _normalize(h, rstd, weight, SCALE, x_ptr.dtype.element_ty)
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=mask)
