"""The gradients of transformers' CohereLayerNorm as autograd computes them, one rounding per eager operation."""

import triton
import triton.language as tl

from .cohere_layer_norm import _add_tile, _in_row, _load_tile, _row_of_weight, _store_tile
from .primitives import mask_if, widened
from .rms_norm import _columns
from .rms_norm_backward import _gradient_of_squares
from .summation import block_sum, sum_of_columns, thread_sum


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
    VECTOR: tl.constexpr,
):
    """dx of `cohere_layer_norm_forward`. All tensors are dense; tiles are as there.

    Eager's dx has three terms: through the product with rstd, the variance and the mean. Their sum in this order is
    rounded to 16 bits; of an fp32 x they are three gradients. The first programs take the last rows: the L2 then has the
    first ones for `cohere_layer_norm_sum_chains`.

    Args:
        store_sums: the fp32 gradients of each row's rstd and mean are stored if this is 1.
    """
    COLUMNS: tl.constexpr = (4 if VECTORIZED else 1) * WIDTH * HEIGHT
    TILE: tl.constexpr = COLUMNS << LOG2_STEPS
    TILES: tl.constexpr = (HIDDEN_SIZE + TILE - 1) // TILE
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < rows
    offset = row * HIDDEN_SIZE
    weight_row = weight_ptr + _row_of_weight(row, weight_rows) * HIDDEN_SIZE
    first = _columns(LOG2_STEPS, WIDTH, HEIGHT, VECTORIZED)
    mean = tl.load(mean_ptr + row, mask=in_range, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + row, mask=in_range, other=0.0)[:, None]
    # All loads begin before the first addition.
    dys = ()
    xs = ()
    for i in tl.static_range(TILES):
        dys = dys + (_load_tile(dy_ptr + offset, in_range, first, i * TILE, HIDDEN_SIZE, VECTOR, ""),)
        xs = xs + (_load_tile(x_ptr + offset, in_range, first, i * TILE, HIDDEN_SIZE, VECTOR, ""),)

    # A row's sums start from zero.
    of_rstd = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    through_rstds = ()
    centred = ()
    for i in tl.static_range(TILES):
        weight = _load_tile(weight_row, in_range, first, i * TILE, HIDDEN_SIZE, VECTOR, "evict_last")
        d_normalized = widened(dys[i]) * widened(weight)
        c = widened(xs[i]) - mean
        through_rstd = d_normalized * rstd
        products = _in_row(d_normalized * c, first, i * TILE, HIDDEN_SIZE)
        of_rstd = _add_tile(of_rstd, products, LOG2_STEPS)
        terms = _in_row(through_rstd, first, i * TILE, HIDDEN_SIZE)
        of_mean = _add_tile(of_mean, terms, LOG2_STEPS)
        through_rstds = through_rstds + (through_rstd,)
        centred = centred + (c,)
    d_rstd = sum_of_columns(of_rstd, ROWS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, EXCHANGE_ONCE=True)[:, None]
    # Eager adds the negated terms, from +0 on: their sum is that of the terms, negated, and never -0.
    d_mean = 0.0 - sum_of_columns(of_mean, ROWS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, EXCHANGE_ONCE=True)[:, None]

    d_square = _gradient_of_squares(d_rstd, rstd, HIDDEN_SIZE)
    of_mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(TILES):
        terms = _in_row(d_square * (2.0 * centred[i]), first, i * TILE, HIDDEN_SIZE)
        of_mean = _add_tile(of_mean, terms, LOG2_STEPS)
    of_variance = sum_of_columns(of_mean, ROWS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, EXCHANGE_ONCE=True)
    d_mean = d_mean + (0.0 - of_variance[:, None])
    # As columns: threads would exchange vectors.
    stored = mask_if(in_range, store_sums)[:, None]
    tl.store(d_rstd_ptr + row[:, None], d_rstd, mask=stored)
    tl.store(d_mean_ptr + row[:, None], d_mean, mask=stored)

    # ATen divides by a scalar by multiplying by its reciprocal.
    through_mean = d_mean * tl.div_rn(1.0, tl.cast(HIDDEN_SIZE, tl.float32))
    for i in tl.static_range(TILES):
        through_variance = d_square * (2.0 * centred[i])
        if dx_ptr.dtype.element_ty == tl.float32:
            _store_tile(dx_ptr + offset, through_rstds[i], in_range, first, i * TILE, HIDDEN_SIZE, VECTOR)
            _store_tile(dx_variance_ptr + offset, through_variance, in_range, first, i * TILE, HIDDEN_SIZE, VECTOR)
            means = tl.broadcast_to(through_mean, through_variance.shape)
            _store_tile(dx_mean_ptr + offset, means, in_range, first, i * TILE, HIDDEN_SIZE, VECTOR)
        else:
            dx = (through_rstds[i] + through_variance) + through_mean
            _store_tile(dx_ptr + offset, dx, in_range, first, i * TILE, HIDDEN_SIZE, VECTOR)


@triton.jit(do_not_specialize=["first_token", "tokens", "blocks"])
def cohere_layer_norm_sum_chains(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    block_ptr,
    first_token: tl.int64,
    tokens: tl.int64,
    blocks: tl.int64,
    HIDDEN_SIZE: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    THREADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNS: tl.constexpr,
):
    """The sums of dweight's chains: a program takes a block of ATen's reduction over tokens and COLUMNS columns.

    A token has a row of dy and x for each of the weight's WEIGHT_ROWS rows, and block is [blocks, WEIGHT_ROWS *
    HIDDEN_SIZE] fp32. If the weight has several rows, COLUMNS divides HIDDEN_SIZE. The loads of TURNS turns begin before
    their additions.
    """
    SIZE: tl.constexpr = WEIGHT_ROWS * HIDDEN_SIZE
    PARTS: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0).to(tl.int64)
    block = program // PARTS
    first_column = program % PARTS * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    in_row = column < SIZE
    # Ordered by accumulator, then by thread.
    chain = tl.arange(0, 4 * THREADS)
    chain = chain // THREADS * (blocks * THREADS) + block * THREADS + chain % THREADS
    chains = tl.zeros([4 * THREADS, COLUMNS], dtype=tl.float32)
    turn = 4 * THREADS * blocks
    for start in tl.range(0, tokens, TURNS * turn):
        dys = ()
        xs = ()
        means = ()
        rstds = ()
        for j in tl.static_range(TURNS):
            token = start + j * turn + chain
            in_range = (token < tokens)[:, None]
            mask = in_range & in_row[None, :]
            token = (first_token + token)[:, None]
            offset = token * SIZE + column[None, :]
            row = token * WEIGHT_ROWS + first_column // HIDDEN_SIZE
            dys = dys + (tl.load(dy_ptr + offset, mask=mask, other=0.0, eviction_policy="evict_first"),)
            xs = xs + (tl.load(x_ptr + offset, mask=mask, other=0.0, eviction_policy="evict_first"),)
            means = means + (tl.load(mean_ptr + row, mask=in_range, other=0.0),)
            rstds = rstds + (tl.load(rstd_ptr + row, mask=in_range, other=0.0),)
        for j in tl.static_range(TURNS):
            # A sum that started from +0 is never -0: zeros beyond the last token change nothing.
            chains += widened(dys[j]) * ((widened(xs[j]) - means[j]) * rstds[j])
    threads = thread_sum(tl.reshape(chains, [4, THREADS, COLUMNS]), THREADS, COLUMNS)
    tl.store(block_ptr + block * SIZE + column, block_sum(threads, THREADS, COLUMNS), mask=in_row)
