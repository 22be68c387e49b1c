"""LayerNorm as transformers' CohereLayerNorm composes it, one rounding per eager operation."""

import triton
import triton.language as tl

from .primitives import mask_if, rsqrt, widened
from .rms_norm import _columns, _mean_factor
from .summation import _sum_in_sequence, sum_of_columns


@triton.jit
def _row_of_weight(row, weight_rows):
    """The row of the weight, whose `weight_rows` rows repeat."""
    # A remainder of 64 bits takes some 70 instructions.
    of_weight = row * 0
    if weight_rows > 1:
        of_weight = row % weight_rows
    return of_weight


# A tile is [ROWS, COLUMNS], a step of several rows, or [STEPS, COLUMNS], several steps of one row.


@triton.jit
def _tile_of(row_ptr, first, START: tl.constexpr, VECTOR: tl.constexpr):
    """The columns of a tile, which begin at START, and the pointers to its elements.

    A thread moves VECTOR columns at a time, unless that is 0. It then has these columns of every step: sums over the steps
    need no exchange.
    """
    column = START + first
    pointers = row_ptr[:, None] + column
    if VECTOR > 0:
        pointers = tl.max_contiguous(pointers, [1, VECTOR])
    return column, pointers


@triton.jit
def _load_tile(
    row_ptr, in_range, first, START: tl.constexpr, SIZE: tl.constexpr, VECTOR: tl.constexpr, EVICTION: tl.constexpr
):
    """A tile of rows of SIZE columns; zeros outside of them."""
    column, pointers = _tile_of(row_ptr, first, START, VECTOR)
    if in_range.shape[0] > 1 or START + first.shape[0] * first.shape[1] > SIZE:
        mask = in_range[:, None] & (column < SIZE)
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICTION)
    else:
        return tl.load(pointers, eviction_policy=EVICTION)


@triton.jit
def _store_tile(row_ptr, values, in_range, first, START: tl.constexpr, SIZE: tl.constexpr, VECTOR: tl.constexpr):
    column, pointers = _tile_of(row_ptr, first, START, VECTOR)
    values = values.to(row_ptr.dtype.element_ty)
    if in_range.shape[0] > 1 or START + first.shape[0] * first.shape[1] > SIZE:
        tl.store(pointers, values, mask=in_range[:, None] & (column < SIZE))
    else:
        tl.store(pointers, values)


@triton.jit
def _in_row(values, first, START: tl.constexpr, SIZE: tl.constexpr):
    """A tile's values, and zeros beyond the row's end, which a row's sum takes."""
    if START + first.shape[0] * first.shape[1] > SIZE:
        return tl.where(START + first < SIZE, values, 0.0)
    else:
        return values


@triton.jit
def _add_tile(total, tile, LOG2_STEPS: tl.constexpr):
    """total [ROWS, COLUMNS] plus a tile, its steps in sequence."""
    if LOG2_STEPS == 0:
        return total + tile
    else:
        COLUMNS: tl.constexpr = tile.shape[1]
        return _sum_in_sequence(total, tl.reshape(tile, [1, 1 << LOG2_STEPS, COLUMNS]), 1, LOG2_STEPS, COLUMNS)


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
    VECTOR: tl.constexpr,
):
    """out[row] = weight * ((x[row] - mean) * rstd), with c = x[row] - mean and rstd = rsqrt(mean(c**2) + eps) in fp32.

    A program takes ROWS rows of x and out, which are dense, in tiles of 2**LOG2_STEPS of `row_sum`'s steps; of several rows
    a tile is one step. Row r has the weight's row r modulo `weight_rows`.

    Args:
        store_statistics: the mean and rstd of each row are stored if this is 1.
        VECTOR: see `_tile_of`.
    """
    COLUMNS: tl.constexpr = (4 if VECTORIZED else 1) * WIDTH * HEIGHT
    TILE: tl.constexpr = COLUMNS << LOG2_STEPS
    TILES: tl.constexpr = (HIDDEN_SIZE + TILE - 1) // TILE
    # Rows that ATen's warps share leave no registers for the weight during their sums.
    WEIGHT_FIRST: tl.constexpr = HEIGHT == 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < rows
    offset = row * HIDDEN_SIZE
    weight_row = weight_ptr + _row_of_weight(row, weight_rows) * HIDDEN_SIZE
    first = _columns(LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED)
    # All loads begin before the first addition.
    xs = ()
    weights = ()
    for i in tl.static_range(TILES):
        xs = xs + (_load_tile(x_ptr + offset, in_range, first, i * TILE, HIDDEN_SIZE, VECTOR, ""),)
    for i in tl.static_range(TILES if WEIGHT_FIRST else 0):
        weight = _load_tile(weight_row, in_range, first, i * TILE, HIDDEN_SIZE, VECTOR, "evict_last")
        weights = weights + (weight,)
    # The division runs during the loads.
    factor = _mean_factor(rows, HIDDEN_SIZE)
    # A row's sums start from zero.
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(TILES):
        total = _add_tile(total, widened(xs[i]), LOG2_STEPS)
    mean = sum_of_columns(total, ROWS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, EXCHANGE_ONCE=True)[:, None] * factor
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    centred = ()
    for i in tl.static_range(TILES):
        c = _in_row(widened(xs[i]) - mean, first, i * TILE, HIDDEN_SIZE)
        centred = centred + (c,)
        total = _add_tile(total, c * c, LOG2_STEPS)
    squares = sum_of_columns(total, ROWS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, EXCHANGE_ONCE=True)[:, None]
    rstd = rsqrt(squares * factor + eps)
    # As columns: threads would exchange vectors.
    stored = mask_if(in_range, store_statistics)[:, None]
    tl.store(mean_ptr + row[:, None], mean, mask=stored)
    tl.store(rstd_ptr + row[:, None], rstd, mask=stored)
    for i in tl.static_range(TILES):
        if WEIGHT_FIRST:
            weight = weights[i]
        else:
            weight = _load_tile(weight_row, in_range, first, i * TILE, HIDDEN_SIZE, VECTOR, "evict_last")
        out = widened(weight) * (centred[i] * rstd)
        _store_tile(out_ptr + offset, out, in_range, first, i * TILE, HIDDEN_SIZE, VECTOR)
