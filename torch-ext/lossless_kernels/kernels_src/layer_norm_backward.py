"""The gradients of LayerNorm and of `F.rms_norm` as ATen's vectorised kernels compute them
(ATen/native/cuda/layer_norm_kernel.cu)."""

import triton
import triton.language as tl

from .primitives import let_next_kernel_begin, wait_for_previous_kernel, widened
from .summation import block_sum, in_vectors, sum_of_tile, unstack

# A thread of ATen's sums over rows takes so many rows at a time, one after the other.
_RUN = tl.constexpr(8)


@triton.jit
def _centred(x, mean, CENTRED: tl.constexpr):
    """x in fp32, less its row's mean if CENTRED."""
    x = widened(x)
    if CENTRED:
        x = x - mean
    return x


@triton.jit
def _load_step(row_ptr, of_row, step: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    """A step of rows that begin at row_ptr [ROWS, 1]: [ROWS, COLUMNS], zeros behind a row's end."""
    column = step * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return tl.load(row_ptr + column, mask=of_row[:, None] & (column < SIZE), other=0.0)


@triton.jit
def _load_weight(
    weight_ptr, ROWS: tl.constexpr, step: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, WEIGHT: tl.constexpr
):
    """The weight of a step's columns, [ROWS, COLUMNS]; without a weight any tensor of that shape.

    Loaded for each row, from the L1: a single row would get another layout and pass through shared memory.
    """
    weight = tl.broadcast_to(step * COLUMNS + tl.arange(0, COLUMNS)[None, :], [ROWS, COLUMNS])
    if WEIGHT:
        weight = tl.load(weight_ptr + weight, mask=weight < SIZE, other=0.0)
    return weight


@triton.jit
def _weighted(dy, weight, WEIGHT: tl.constexpr):
    """dy times the weight, in fp32."""
    dy = widened(dy)
    if WEIGHT:
        dy = dy * widened(weight)
    return dy


@triton.jit
def _add_vectors(sums, terms, centred, rstd, LANES: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr):
    """A step of all lanes: each adds its vector of four to its sums, to that of terms only if CENTRED. Behind the row's end
    these are zeros, which change no sum but the sign of a zero: no total is -0."""
    of_terms, of_products = sums
    products = in_vectors(tl.reshape(terms * centred, [ROWS * LANES * 4]), ROWS * LANES)
    terms = in_vectors(tl.reshape(terms, [ROWS * LANES * 4]), ROWS * LANES)
    for position in tl.static_range(4):
        if CENTRED:
            of_terms = of_terms + terms[position]
        of_products = tl.fma(rstd, products[position], of_products)
    return of_terms, of_products


@triton.jit(do_not_specialize=["rows", "x_row_stride"])
def layer_norm_backward(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    rows: tl.int64,
    x_row_stride: tl.int64,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WEIGHT: tl.constexpr,
    CENTRED: tl.constexpr,
    AGAIN: tl.constexpr,
    KEPT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """dx of `layer_norm_forward`: dx[row] = (rstd / SIZE) * ((SIZE * weight) * dy - ((x - mean) * rstd) * b - a), where
    a = sum(dy * weight) and b = sum(dy * weight * (x - mean) * rstd) of the row. Without CENTRED that of `F.rms_norm`, which
    has neither mean nor a.

    A program takes ROWS rows of SIZE elements, a multiple of four; dy and dx are dense. The other arguments are those of
    `layer_norm_forward`.

    Args:
        mean_ptr: not read without CENTRED.
        AGAIN: dy and x are read again for dx, instead of being kept in registers.
        KEPT: the weight is kept in registers, instead of being read again for dx.
        OVERLAPS: this kernel runs beside `layer_norm_sum_rows`, which was launched just before, and what follows waits for both.
            Without, that kernel follows; the first programs take the last rows, and the L2 then has the first ones for it.
    """
    # ATen's block has 128 threads, which read vectors of four elements. Whole warps of lanes without elements are left out.
    EMPTY: tl.constexpr = 2 if SIZE <= 128 else 1 if SIZE <= 256 else 0
    LANES: tl.constexpr = 128 >> EMPTY
    COLUMNS: tl.constexpr = 4 * LANES
    STEPS: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    last = tl.num_programs(0) - 1
    row = (program if OVERLAPS else last - program).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    of_row = row < rows
    offset = (row * SIZE)[:, None]
    dy_rows = dy_ptr + offset
    x_rows = x_ptr + (row * (x_row_stride * STRIDE_UNIT))[:, None]
    dys = ()
    xs = ()
    weights = ()
    for step in tl.static_range(STEPS):
        if not AGAIN:
            dys = dys + (_load_step(dy_rows, of_row, step, COLUMNS, SIZE),)
            xs = xs + (_load_step(x_rows, of_row, step, COLUMNS, SIZE),)
        if KEPT:
            weights = weights + (_load_weight(weight_ptr, ROWS, step, COLUMNS, SIZE, WEIGHT),)
    mean = tl.load(mean_ptr + row, mask=of_row, other=0.0)[:, None] if CENTRED else 0.0
    rstd = tl.load(rstd_ptr + row, mask=of_row, other=0.0)[:, None]
    of_lanes = tl.reshape(tl.broadcast_to(rstd, [ROWS, LANES]), [ROWS * LANES])
    sums = tl.zeros([ROWS * LANES], tl.float32), tl.zeros([ROWS * LANES], tl.float32)
    for step in tl.static_range(STEPS):
        dy = _load_step(dy_rows, of_row, step, COLUMNS, SIZE) if AGAIN else dys[step]
        x = _load_step(x_rows, of_row, step, COLUMNS, SIZE) if AGAIN else xs[step]
        weight = weights[step] if KEPT else _load_weight(weight_ptr, ROWS, step, COLUMNS, SIZE, WEIGHT)
        terms = _weighted(dy, weight, WEIGHT)
        sums = _add_vectors(sums, terms, _centred(x, mean, CENTRED), of_lanes, LANES, ROWS, CENTRED)
    a = sum_of_tile(sums[0], ROWS, LANES)[:, None] if CENTRED else 0.0
    b = sum_of_tile(sums[1], ROWS, LANES)[:, None]

    size = tl.full([ROWS, COLUMNS], SIZE, tl.float32)
    factor = tl.div_rn(1.0, tl.cast(SIZE, tl.float32)) * rstd
    if AGAIN:
        dys = dys + (_load_step(dy_rows, of_row, 0, COLUMNS, SIZE),)
        xs = xs + (_load_step(x_rows, of_row, 0, COLUMNS, SIZE),)
    for step in tl.static_range(STEPS):
        # Before the store, which loads do not pass. Of the first two steps the compiler has these numbers already.
        if AGAIN and step + 1 < STEPS:
            dys = dys + (_load_step(dy_rows, of_row, step + 1, COLUMNS, SIZE),)
            xs = xs + (_load_step(x_rows, of_row, step + 1, COLUMNS, SIZE),)
        through_variance = (_centred(xs[step], mean, CENTRED) * rstd) * b
        weight = weights[step] if KEPT else _load_weight(weight_ptr, ROWS, step, COLUMNS, SIZE, WEIGHT)
        # Triton computes -x as 0 - x, which is +0 for x = +0.
        dx = tl.fma(widened(dys[step]), _weighted(size, weight, WEIGHT), through_variance * -1.0)
        if CENTRED:
            dx = dx - a
        column = step * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = of_row[:, None] & (column < SIZE)
        tl.store(dx_ptr + offset + column, (dx * factor).to(dx_ptr.dtype.element_ty), mask=inside)
    if OVERLAPS:
        if program == last:
            wait_for_previous_kernel()


@triton.jit
def _of_rows(pointers, of_row, TAKEN: tl.constexpr):
    """One number for each of the run's rows, [TAKEN, 1]."""
    return unstack(tl.reshape(tl.load(pointers, mask=of_row, other=0.0), [TAKEN, _RUN, 1]), TAKEN, _RUN, 1)


@triton.jit
def _add_run(
    sums,
    pointers,
    start,
    x_stride,
    row,
    rows,
    in_row,
    SIZE: tl.constexpr,
    TAKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr,
    CENTRED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Each thread adds its run of rows from row `start` on, one after the other; MASKED: some of them may not exist."""
    dy_ptrs, x_ptrs, mean_ptrs, rstd_ptrs = pointers
    dweight, dbias = sums
    of_row = tl.full(row.shape, True, tl.int1)
    if MASKED:
        of_row = start + row < rows
    inside = of_row[:, :, None] & in_row[None, None, :]
    dys = unstack(tl.load(dy_ptrs + start * SIZE, mask=inside, other=0.0), TAKEN, _RUN, COLUMNS)
    if DWEIGHT:
        xs = unstack(tl.load(x_ptrs + start * x_stride, mask=inside, other=0.0), TAKEN, _RUN, COLUMNS)
        if CENTRED:
            means = _of_rows(mean_ptrs + start, of_row, TAKEN)
        rstds = _of_rows(rstd_ptrs + start, of_row, TAKEN)
    for each in tl.static_range(_RUN):
        dy = widened(dys[each])
        if DBIAS:
            dbias = dbias + dy
        if DWEIGHT:
            centred = widened(xs[each])
            if CENTRED:
                centred = centred - means[each]
            dweight = tl.fma(tl.broadcast_to(rstds[each], dy.shape), dy * centred, dweight)
    return dweight, dbias


@triton.jit
def _store_sum(ptr, threads, column, in_row, THREADS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of all threads [THREADS, COLUMNS] by a halving tree."""
    tl.store(ptr + column, block_sum(threads, THREADS, COLUMNS).to(ptr.dtype.element_ty), mask=in_row)


@triton.jit(do_not_specialize=["rows", "x_row_stride"])
def layer_norm_sum_rows(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    dweight_ptr,
    dbias_ptr,
    rows: tl.int64,
    x_row_stride: tl.int64,
    SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    THREADS: tl.constexpr,
    TAKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr,
    CENTRED: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """dweight = sum(dy * (x - mean) * rstd) and dbias = sum(dy) over rows, or the sums of ATen's threads.

    Without CENTRED dweight is that of `F.rms_norm`, which has no mean: sum(dy * x * rstd).

    THREADS of ATen's threads share a column. Thread t adds the rows 8 * t to 8 * t + 7 of every 8 * THREADS. A program takes
    TAKEN of the threads, and COLUMNS columns. With all threads it adds their sums. With fewer, dweight and dbias are the
    threads' sums, [THREADS, SIZE] fp32.

    Args:
        DWEIGHT, DBIAS: which of them are needed.
        STAGES: from sm_80 on the rows of STAGES - 1 steps are in flight through shared memory.
        OVERLAPS: `layer_norm_backward` runs beside this kernel.
    """
    if OVERLAPS:
        let_next_kernel_begin()
    COLUMN_BLOCKS: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    BLOCK: tl.constexpr = _RUN * THREADS
    program = tl.program_id(0)
    column = (program % COLUMN_BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = column < SIZE
    thread = program // COLUMN_BLOCKS * TAKEN + tl.arange(0, TAKEN)
    row = (thread * _RUN)[:, None] + tl.arange(0, _RUN)[None, :]
    x_stride = x_row_stride * STRIDE_UNIT
    ptrs = (
        dy_ptr + (row * SIZE)[:, :, None] + column[None, None, :],
        x_ptr + (row * x_stride)[:, :, None] + column[None, None, :],
        mean_ptr + row,
        rstd_ptr + row,
    )
    sums = tl.zeros([TAKEN, COLUMNS], tl.float32), tl.zeros([TAKEN, COLUMNS], tl.float32)
    whole = rows // BLOCK * BLOCK
    for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
        sums = _add_run(
            sums, ptrs, start, x_stride, row, rows, in_row, SIZE, TAKEN, COLUMNS, DWEIGHT, DBIAS, CENTRED, MASKED=False
        )
    if whole < rows:
        sums = _add_run(
            sums, ptrs, whole, x_stride, row, rows, in_row, SIZE, TAKEN, COLUMNS, DWEIGHT, DBIAS, CENTRED, MASKED=True
        )
    dweight, dbias = sums
    if TAKEN == THREADS:
        if DWEIGHT:
            _store_sum(dweight_ptr, dweight, column, in_row, THREADS, COLUMNS)
        if DBIAS:
            _store_sum(dbias_ptr, dbias, column, in_row, THREADS, COLUMNS)
    else:
        offset = (thread * SIZE)[:, None] + column[None, :]
        if DWEIGHT:
            tl.store(dweight_ptr + offset, dweight, mask=in_row[None, :])
        if DBIAS:
            tl.store(dbias_ptr + offset, dbias, mask=in_row[None, :])


@triton.jit
def layer_norm_sum_threads(
    dweight_sums_ptr,
    dbias_sums_ptr,
    dweight_ptr,
    dbias_ptr,
    SIZE: tl.constexpr,
    THREADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr,
):
    """dweight and dbias from the sums of ATen's threads, [THREADS, SIZE] fp32."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = column < SIZE
    offset = (tl.arange(0, THREADS) * SIZE)[:, None] + column[None, :]
    if DWEIGHT:
        threads = tl.load(dweight_sums_ptr + offset, mask=in_row[None, :], other=0.0)
        _store_sum(dweight_ptr, threads, column, in_row, THREADS, COLUMNS)
    if DBIAS:
        threads = tl.load(dbias_sums_ptr + offset, mask=in_row[None, :], other=0.0)
        _store_sum(dbias_ptr, threads, column, in_row, THREADS, COLUMNS)
