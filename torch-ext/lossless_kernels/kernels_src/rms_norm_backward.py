"""The gradients of RMSNorm as autograd computes them through transformers' eager layers, one rounding per operation."""

import triton
import triton.language as tl

from .primitives import mask_if, prefetch, product, sum_of_two
from .rms_norm import _columns, _factor, _load_weight
from .summation import block_sum, row_sum, sum_of_columns, thread_sum


@triton.jit
def _row_offset(row, inner, middle, strides, LEVELS: tl.constexpr):
    """The offset of a row. Rows in another order than the tensor's have an index of three levels."""
    outer_stride, middle_stride, inner_stride = strides
    if LEVELS == 1:
        return row * outer_stride
    else:
        outer_and_middle = row // inner
        outer = outer_and_middle // middle
        return (
            outer * outer_stride
            + (outer_and_middle - outer * middle) * middle_stride
            + (row - outer_and_middle * inner) * inner_stride
        )


# fmt: off
_ROW_STRIDES = [
    "inner", "middle",
    "dy_outer_stride", "dy_middle_stride", "dy_inner_stride",
    "x_outer_stride", "x_middle_stride", "x_inner_stride",
    "rstd_outer_stride", "rstd_middle_stride", "rstd_inner_stride",
]
_DX_STRIDES = ["dx_outer_stride", "dx_middle_stride", "dx_inner_stride"]
# fmt: on


@triton.jit
def _load_rows(pointers, row, in_range, column, in_row, walk, STRIDE_UNIT: tl.constexpr, LEVELS: tl.constexpr):
    """dy and x [ROWS, *column.shape] and rstd [ROWS] of the rows; zeros outside."""
    dy_ptr, x_ptr, rstd_ptr = pointers
    inner, middle, dy_strides, x_strides, rstd_strides = walk
    mask = in_range[:, None, None] & in_row[None, :, :]
    dy_row = _row_offset(row, inner, middle, dy_strides, LEVELS)
    x_row = _row_offset(row, inner, middle, x_strides, LEVELS)
    rstd_row = _row_offset(row, inner, middle, rstd_strides, LEVELS)
    dy = tl.load(dy_ptr + dy_row[:, None, None] * STRIDE_UNIT + column[None, :, :], mask=mask, other=0.0)
    x = tl.load(x_ptr + x_row[:, None, None] * STRIDE_UNIT + column[None, :, :], mask=mask, other=0.0)
    return dy, x, tl.load(rstd_ptr + rstd_row, mask=in_range, other=0.0)


@triton.jit
def _row_of_turn(lane, turn, length, stride, rows):
    """The row of a thread of ATen's reduction in this turn, chain by chain, and whether it exists."""
    row = lane + turn // length * stride + turn % length * (4 * stride)
    return row, row < rows


@triton.jit
def _weight_gradient(dy, normalized, SCALE: tl.constexpr, input_dtype: tl.constexpr, output_dtype: tl.constexpr):
    """A row's term in the sum for the weight's gradient."""
    if SCALE == "after_cast":
        return (dy * normalized.to(input_dtype).to(tl.float32)).to(output_dtype).to(tl.float32)
    else:
        return dy * normalized


@triton.jit
def _grad_of_normalized(dy, weight, SCALE: tl.constexpr, input_dtype: tl.constexpr, output_dtype: tl.constexpr):
    """The gradient of the normalised values, fp32."""
    if SCALE != "none":
        dy = dy * _factor(weight, SCALE)
    if SCALE == "after_cast":
        dy = dy.to(output_dtype).to(input_dtype).to(tl.float32)
    return dy


@triton.jit
def _gradient_of_squares(d_rstd, rstd, HIDDEN_SIZE: tl.constexpr):
    """The gradient of the square of each element of a row, through the mean."""
    # ATen divides by a scalar by multiplying by its reciprocal.
    reciprocal = tl.div_rn(1.0, tl.cast(HIDDEN_SIZE, tl.float32))
    return ((-0.5 * d_rstd) * ((rstd * rstd) * rstd)) * reciprocal


@triton.jit
def _store_dx(
    dx_ptr,
    dx_mean_ptr,
    offset,
    mask,
    d_normalized,
    h,
    rstd,
    d_square,
    d_sum,
    TWO_EDGES: tl.constexpr,
    ADD: tl.constexpr,
    PACKED: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Stores dx by the options of `rms_norm_backward`; `d_sum` is used with ADD only."""
    dtype = dx_ptr.dtype.element_ty
    dx = product(d_normalized, rstd, PACKED)
    dx_mean = product(d_square, product(tl.full(h.shape, 2.0, tl.float32), h, PACKED), PACKED)
    if TWO_EDGES:
        tl.store(dx_mean_ptr + offset, dx_mean.to(dtype), mask=mask, eviction_policy=EVICTION)
    elif ADD:
        d_sum = d_sum.to(tl.float32)
        if dtype == tl.float32:
            # fp32 gradients reach the sum one by one.
            dx = (d_sum + dx) + dx_mean
        else:
            dx = d_sum + (dx + dx_mean).to(dtype).to(tl.float32)
    else:
        dx = sum_of_two(dx, dx_mean, PACKED)
    tl.store(dx_ptr + offset, dx.to(dtype), mask=mask, eviction_policy=EVICTION)


@triton.jit(do_not_specialize=["store_d_rstd", "first_row", "rows", "blocks", *_ROW_STRIDES, *_DX_STRIDES])
def rms_norm_backward(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dx_mean_ptr,
    d_rstd_ptr,
    block_ptr,
    d_sum_ptr,
    store_d_rstd: tl.int32,
    first_row: tl.int64,
    rows: tl.int64,
    blocks: tl.int64,
    inner: tl.int64,
    middle: tl.int64,
    dy_outer_stride: tl.int64,
    dy_middle_stride: tl.int64,
    dy_inner_stride: tl.int64,
    x_outer_stride: tl.int64,
    x_middle_stride: tl.int64,
    x_inner_stride: tl.int64,
    rstd_outer_stride: tl.int64,
    rstd_middle_stride: tl.int64,
    rstd_inner_stride: tl.int64,
    dx_outer_stride: tl.int64,
    dx_middle_stride: tl.int64,
    dx_inner_stride: tl.int64,
    SCALE: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    TWO_EDGES: tl.constexpr,
    ADD: tl.constexpr,
    SUM_CHAINS: tl.constexpr,
    THREADS: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
):
    """dx of `rms_norm_forward` and, with SUM_CHAINS, the sums of dweight's chains.

    Rows are numbered in the memory order of eager's dy * normalized. Without SUM_CHAINS a program takes ROWS rows.

    Args:
        store_d_rstd: the fp32 gradient of rstd is stored if this is 1.
        TWO_EDGES: the two terms of dx, through the product and through the mean, are stored separately.
        ADD: the terms are added to d_sum, which reached x before and has dx's layout.
        SUM_CHAINS: ATen's reduction over rows has blocks of THREADS threads. A program takes all rows of ROWS of a
            block's threads and computes their sums: block [blocks, THREADS // ROWS, HIDDEN_SIZE] fp32.
        STAGES: from sm_80 on the rows of STAGES - 1 turns are in flight through shared memory, if they are aligned to
            4 bytes. Loads into registers would share a warp's few wait counters with everything else it waits for.
        PACKED: instructions of compute capability 10.0 compute products and sums of two elements.
    """
    STEPS: tl.constexpr = 1 << LOG2_STEPS
    COLUMNS: tl.constexpr = (4 if VECTORIZED else 1) * WIDTH * HEIGHT
    PARTIAL_SUMS: tl.constexpr = THREADS // ROWS
    column = _columns(LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED)
    in_row = column < HIDDEN_SIZE
    input_dtype = x_ptr.dtype.element_ty
    output_dtype = dy_ptr.dtype.element_ty
    weight = _load_weight(weight_ptr, column, in_row, SCALE, "")[None, :, :]
    pointers = (dy_ptr, x_ptr, rstd_ptr)
    dy_strides = (dy_outer_stride, dy_middle_stride, dy_inner_stride)
    x_strides = (x_outer_stride, x_middle_stride, x_inner_stride)
    rstd_strides = (rstd_outer_stride, rstd_middle_stride, rstd_inner_stride)
    dx_strides = (dx_outer_stride, dx_middle_stride, dx_inner_stride)
    walk = (inner, middle, dy_strides, x_strides, rstd_strides)

    program = tl.program_id(0).to(tl.int64)
    if SUM_CHAINS:
        # The threads that the first levels of the halving tree add; each takes its four chains in sequence.
        stride = blocks * THREADS
        lane = program // PARTIAL_SUMS * THREADS + program % PARTIAL_SUMS + tl.arange(0, ROWS) * PARTIAL_SUMS
        length = tl.cast((rows + 4 * stride - 1) // (4 * stride), tl.int32)
        chain = tl.zeros([ROWS, STEPS, COLUMNS], dtype=tl.float32)
        threads = tl.zeros([ROWS, STEPS, COLUMNS], dtype=tl.float32)
    else:
        stride = rows
        lane = program * ROWS + tl.arange(0, ROWS)
        length = 1
    for turn in tl.range(4 * length if SUM_CHAINS else 1, num_stages=STAGES):
        row, in_range = lane, lane < rows
        if SUM_CHAINS:
            row, in_range = _row_of_turn(lane, turn, length, stride, rows)
        row = first_row + row
        dy, x, rstd = _load_rows(pointers, row, in_range, column, in_row, walk, STRIDE_UNIT, LEVELS)
        rstd = rstd[:, None, None]
        mask = in_range[:, None, None] & in_row[None, :, :]
        dx_row = _row_offset(row, inner, middle, dx_strides, LEVELS)
        offset = dx_row[:, None, None] * STRIDE_UNIT + column[None, :, :]
        dy = dy.to(tl.float32)
        h = x.to(tl.float32)
        d_normalized = _grad_of_normalized(dy, weight, SCALE, input_dtype, output_dtype)
        if SUM_CHAINS:
            normalized = product(h, rstd, PACKED)
            chain = sum_of_two(chain, _weight_gradient(dy, normalized, SCALE, input_dtype, output_dtype), PACKED)
            if (turn + 1) % length == 0:
                # The chains are added from the first on: 0 + a0 is a0, which is never -0.
                threads += chain
                chain = tl.zeros([ROWS, STEPS, COLUMNS], dtype=tl.float32)
        products = product(d_normalized, h, PACKED)
        d_rstd = row_sum(products, ROWS, LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS)
        tl.store(d_rstd_ptr + row, d_rstd, mask=mask_if(in_range, store_d_rstd))
        d_square = _gradient_of_squares(d_rstd[:, None, None], rstd, HIDDEN_SIZE)
        d_sum = dy
        if ADD:
            d_sum = tl.load(d_sum_ptr + offset, mask=mask, other=0.0)
        _store_dx(dx_ptr, dx_mean_ptr, offset, mask, d_normalized, h, rstd, d_square, d_sum, TWO_EDGES, ADD, PACKED, "")
    if SUM_CHAINS:
        part = block_sum(tl.reshape(threads, [ROWS, STEPS * COLUMNS]), ROWS, STEPS * COLUMNS)
        flat = tl.arange(0, STEPS * COLUMNS)
        tl.store(block_ptr + program * HIDDEN_SIZE + flat, part, mask=flat < HIDDEN_SIZE)


@triton.jit(do_not_specialize=["store_d_rstd", "first_row", "rows", "blocks", *_ROW_STRIDES, *_DX_STRIDES])
def rms_norm_backward_streamed(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dx_mean_ptr,
    d_rstd_ptr,
    block_ptr,
    d_sum_ptr,
    store_d_rstd: tl.int32,
    first_row: tl.int64,
    rows: tl.int64,
    blocks: tl.int64,
    inner: tl.int64,
    middle: tl.int64,
    dy_outer_stride: tl.int64,
    dy_middle_stride: tl.int64,
    dy_inner_stride: tl.int64,
    x_outer_stride: tl.int64,
    x_middle_stride: tl.int64,
    x_inner_stride: tl.int64,
    rstd_outer_stride: tl.int64,
    rstd_middle_stride: tl.int64,
    rstd_inner_stride: tl.int64,
    dx_outer_stride: tl.int64,
    dx_middle_stride: tl.int64,
    dx_inner_stride: tl.int64,
    SCALE: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    LEVELS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    TWO_EDGES: tl.constexpr,
    ADD: tl.constexpr,
    THREADS: tl.constexpr,
):
    """`rms_norm_backward` with SUM_CHAINS, one row at a time, for rows too long for the registers.

    Registers hold a chain. The row is read twice, for its sum and for dx: the second time from the L2. A row has at
    least 128 elements, which ATen reads as vectors. The other kernel's steps beyond the row's end are omitted: they
    would add zeros to sums that are never -0.
    """
    COLUMNS: tl.constexpr = 4 * WIDTH * HEIGHT
    STEPS: tl.constexpr = (HIDDEN_SIZE + COLUMNS - 1) // COLUMNS
    LINE: tl.constexpr = 128 * 8 // x_ptr.dtype.element_ty.primitive_bitwidth
    input_dtype = x_ptr.dtype.element_ty
    output_dtype = dy_ptr.dtype.element_ty
    dy_strides = (dy_outer_stride, dy_middle_stride, dy_inner_stride)
    x_strides = (x_outer_stride, x_middle_stride, x_inner_stride)
    rstd_strides = (rstd_outer_stride, rstd_middle_stride, rstd_inner_stride)
    dx_strides = (dx_outer_stride, dx_middle_stride, dx_inner_stride)
    column = tl.arange(0, COLUMNS)
    line = tl.minimum(tl.arange(0, (COLUMNS << LOG2_STEPS) // LINE) * LINE, HIDDEN_SIZE - 1)
    half_line = tl.arange(0, (COLUMNS << LOG2_STEPS) // (2 * LINE)) * LINE

    program = tl.program_id(0).to(tl.int64)
    stride = blocks * THREADS
    for accumulator in range(4):
        chain = ()
        for _ in tl.static_range(STEPS):
            chain = chain + (tl.zeros([COLUMNS], dtype=tl.float32),)
        for row in range(program + accumulator * stride, rows, 4 * stride):
            this_row = first_row + row
            dy_row = dy_ptr + _row_offset(this_row, inner, middle, dy_strides, LEVELS) * STRIDE_UNIT
            x_row = x_ptr + _row_offset(this_row, inner, middle, x_strides, LEVELS) * STRIDE_UNIT
            dx_row = _row_offset(this_row, inner, middle, dx_strides, LEVELS) * STRIDE_UNIT
            rstd = tl.load(rstd_ptr + _row_offset(this_row, inner, middle, rstd_strides, LEVELS))
            total = tl.zeros([COLUMNS], dtype=tl.float32)
            for step in tl.static_range(STEPS):
                offset = step * COLUMNS + column
                mask = offset < HIDDEN_SIZE
                dy = tl.load(dy_row + offset, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
                h = tl.load(x_row + offset, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
                weight = _load_weight(weight_ptr, offset, mask, SCALE, "evict_last")
                total += _grad_of_normalized(dy, weight, SCALE, input_dtype, output_dtype) * h
                if ADD and step == STEPS // 2:
                    # Not at the start, where it would delay the loads that the sum waits for.
                    prefetch(d_sum_ptr + dx_row + line)
            d_rstd = sum_of_columns(
                tl.reshape(total, [1, COLUMNS]), 1, WIDTH, HEIGHT, True, NEIGHBOURS, EXCHANGE_ONCE=False
            )  # fmt: skip
            tl.store(d_rstd_ptr + this_row + tl.arange(0, 1), d_rstd, mask=tl.arange(0, 1) < store_d_rstd)
            d_square = _gradient_of_squares(d_rstd, rstd, HIDDEN_SIZE)
            longer = ()
            if not ADD:
                # Half of the next row, which fits into the L2 beside this one; every other line of an fp32 dy.
                if row + 4 * stride < rows:
                    next_row = this_row + 4 * stride
                    dy_ahead = dy_ptr + _row_offset(next_row, inner, middle, dy_strides, LEVELS) * STRIDE_UNIT
                    x_ahead = x_ptr + _row_offset(next_row, inner, middle, x_strides, LEVELS) * STRIDE_UNIT
                    prefetch(dy_ahead + half_line)
                    prefetch(x_ahead + half_line)
            for step in tl.static_range(STEPS):
                offset = step * COLUMNS + column
                mask = offset < HIDDEN_SIZE
                dy = tl.load(dy_row + offset, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
                h = tl.load(x_row + offset, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
                weight = _load_weight(weight_ptr, offset, mask, SCALE, "evict_last")
                d_sum = dy
                if ADD:
                    d_sum = tl.load(d_sum_ptr + dx_row + offset, mask=mask, other=0.0, eviction_policy="evict_first")
                d_normalized = _grad_of_normalized(dy, weight, SCALE, input_dtype, output_dtype)
                _store_dx(
                    dx_ptr, dx_mean_ptr, dx_row + offset, mask, d_normalized, h, rstd, d_square, d_sum,
                    TWO_EDGES, ADD, False, "evict_first",
                )  # fmt: skip
                longer = longer + (chain[step] + _weight_gradient(dy, h * rstd, SCALE, input_dtype, output_dtype),)
            chain = longer
        # A thread's four accumulators are added in memory, from the first on.
        for step in tl.static_range(STEPS):
            offset = step * COLUMNS + column
            block = block_ptr + program * HIDDEN_SIZE + offset
            before = tl.load(block, mask=mask_if(offset < HIDDEN_SIZE, accumulator > 0), other=0.0)
            tl.store(block, before + chain[step], mask=offset < HIDDEN_SIZE)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["first_row", "rows", "blocks", *_ROW_STRIDES])
def rms_norm_sum_chains(
    dy_ptr,
    x_ptr,
    rstd_ptr,
    block_ptr,
    first_row: tl.int64,
    rows: tl.int64,
    blocks: tl.int64,
    inner: tl.int64,
    middle: tl.int64,
    dy_outer_stride: tl.int64,
    dy_middle_stride: tl.int64,
    dy_inner_stride: tl.int64,
    x_outer_stride: tl.int64,
    x_middle_stride: tl.int64,
    x_inner_stride: tl.int64,
    rstd_outer_stride: tl.int64,
    rstd_middle_stride: tl.int64,
    rstd_inner_stride: tl.int64,
    SCALE: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    LEVELS: tl.constexpr,
    THREADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The sums of dweight's chains alone. A program takes a block of ATen's reduction over rows and COLUMNS columns.

    block: [blocks, HIDDEN_SIZE] fp32. The rows of STAGES steps are in flight at a time.
    """
    column_blocks: tl.constexpr = (HIDDEN_SIZE + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0).to(tl.int64)
    block = program // column_blocks
    column = (program % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = column < HIDDEN_SIZE
    # Ordered by accumulator, then by thread.
    chain = tl.arange(0, 4 * THREADS)
    chain = chain // THREADS * (blocks * THREADS) + block * THREADS + chain % THREADS
    input_dtype = x_ptr.dtype.element_ty
    output_dtype = dy_ptr.dtype.element_ty
    pointers = (dy_ptr, x_ptr, rstd_ptr)
    dy_strides = (dy_outer_stride, dy_middle_stride, dy_inner_stride)
    x_strides = (x_outer_stride, x_middle_stride, x_inner_stride)
    rstd_strides = (rstd_outer_stride, rstd_middle_stride, rstd_inner_stride)
    walk = (inner, middle, dy_strides, x_strides, rstd_strides)
    chains = tl.zeros([4 * THREADS, 1, COLUMNS], dtype=tl.float32)
    for start in tl.range(0, rows, 4 * THREADS * blocks, num_stages=STAGES):
        row = start + chain
        dy, x, rstd = _load_rows(
            pointers, first_row + row, row < rows, column[None, :], in_row[None, :], walk, STRIDE_UNIT, LEVELS
        )
        normalized = x.to(tl.float32) * rstd[:, None, None]
        chains += _weight_gradient(dy.to(tl.float32), normalized, SCALE, input_dtype, output_dtype)
    threads = thread_sum(tl.reshape(chains, [4, THREADS, COLUMNS]), THREADS, COLUMNS)
    tl.store(block_ptr + block * HIDDEN_SIZE + column, block_sum(threads, THREADS, COLUMNS), mask=in_row)
