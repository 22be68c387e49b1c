"""The gradients of dynamic tanh as autograd computes them: every operation rounds to the tensors' dtype."""

import triton
import triton.language as tl

from .activation import _tanh_gradient
from .dyt import _normalized
from .primitives import rounded, widened
from .summation import block_sum, singles_of_sum, sum_of_threads, thread_sum, vectors_of_step


@triton.jit
def _load(dy_ptr, x_ptr, offset, mask, POLICY: tl.constexpr):
    """dy and x; 0 and 1 where masked. The terms of these are zeros, even if alpha is infinite."""
    dy = tl.load(dy_ptr + offset, mask=mask, other=0.0, eviction_policy=POLICY)
    return dy, tl.load(x_ptr + offset, mask=mask, other=1.0, eviction_policy=POLICY)


@triton.jit
def _alphas_terms(dy_ptr, x_ptr, alpha, weight_ptr, dx_ptr, terms_ptr, column, offset, mask, STORED: tl.constexpr):
    """Stores dx, and returns the terms of alpha's gradient in fp32; 0 where masked. With STORED it stores them, too."""
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    # `dyt_sum_chains` reads dy and x again.
    dy, x = _load(dy_ptr, x_ptr, offset, mask, "evict_last")
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    d_normalized = rounded(dy.to(tl.float32) * weight, DTYPE)
    d_scaled = _tanh_gradient(d_normalized, _normalized(x, alpha, DTYPE), DTYPE)
    tl.store(dx_ptr + offset, (d_scaled * alpha).to(DTYPE), mask=mask)
    terms = (d_scaled * x).to(DTYPE)
    if STORED:
        tl.store(terms_ptr + offset, terms, mask=mask)
    return widened(terms)


@triton.jit(do_not_specialize=["begin", "end"])
def dyt_backward(
    dy_ptr,
    x_ptr,
    alpha_ptr,
    weight_ptr,
    dx_ptr,
    sum_ptr,
    begin: tl.int64,
    end: tl.int64,
    SIZE: tl.constexpr,
    STORED: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """dx of `dyt_forward`, and the sum of this block's terms in the full sum over [begin, end) that is alpha's gradient.

    All tensors are dense, in rows of SIZE elements.

    Args:
        sum_ptr: the blocks' sums in fp32, or with STORED the terms.
        HEAD, TAIL: elements before the first vector, or after the last, exist.
    """
    first_vector = (begin + VECTOR - 1) // VECTOR
    end_vector = end // VECTOR
    offset = tl.arange(0, WIDTH * VECTOR)
    alpha = tl.load(alpha_ptr).to(tl.float32)
    chains = tl.zeros([WIDTH * VECTOR], tl.float32)
    if HEAD:
        at, mask = singles_of_sum(begin, first_vector * VECTOR - begin, begin % VECTOR, WIDTH, VECTOR)
        chains += _alphas_terms(dy_ptr, x_ptr, alpha, weight_ptr, dx_ptr, sum_ptr, at % SIZE, at, mask, STORED)
    for step in range(tl.cdiv(end_vector - first_vector, tl.num_programs(0) * WIDTH)):
        base, mask = vectors_of_step(step, first_vector, end_vector, WIDTH, VECTOR)
        # Of 32 bits where the offsets are.
        column = (tl.cast(base % SIZE, tl.int32) + offset) % SIZE
        if SIZE % VECTOR == 0:
            # The compiler does not see that a vector stays in its row.
            column = tl.max_contiguous(tl.multiple_of(column, VECTOR), VECTOR)
        tensors = dy_ptr + base, x_ptr + base, alpha, weight_ptr, dx_ptr + base, sum_ptr + base
        chains += _alphas_terms(*tensors, column, offset, mask, STORED)
    if TAIL:
        at, mask = singles_of_sum(end_vector * VECTOR, end % VECTOR, 0, WIDTH, VECTOR)
        chains += _alphas_terms(dy_ptr, x_ptr, alpha, weight_ptr, dx_ptr, sum_ptr, at % SIZE, at, mask, STORED)
    if not STORED:
        tl.store(sum_ptr + tl.program_id(0) + tl.arange(0, 1), sum_of_threads(chains, WIDTH, VECTOR))


@triton.jit(do_not_specialize=["first_row", "rows", "blocks"])
def dyt_sum_chains(
    dy_ptr,
    x_ptr,
    alpha_ptr,
    block_ptr,
    first_row: tl.int64,
    rows: tl.int64,
    blocks: tl.int64,
    SIZE: tl.constexpr,
    THREADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The sums of the chains of the weight's and of the bias's gradient, of one block and COLUMNS columns.

    A row of dy and x has SIZE elements; block is [2, blocks, SIZE] fp32.
    """
    DTYPE: tl.constexpr = dy_ptr.dtype.element_ty
    PARTS: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0).to(tl.int64)
    block = program // PARTS
    column = program % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    in_row = column < SIZE
    alpha = tl.load(alpha_ptr).to(tl.float32)
    # Ordered by accumulator, then by thread.
    chain = tl.arange(0, 4 * THREADS)
    chain = chain // THREADS * (blocks * THREADS) + block * THREADS + chain % THREADS
    of_weight = tl.zeros([4 * THREADS, COLUMNS], tl.float32)
    of_bias = tl.zeros([4 * THREADS, COLUMNS], tl.float32)
    for start in tl.range(0, rows, 4 * THREADS * blocks):
        row = start + chain
        mask = (row < rows)[:, None] & in_row[None, :]
        offset = (first_row + row)[:, None] * SIZE + column[None, :]
        # A sum that started from +0 is never -0: zeros beyond the last row change nothing.
        dy, x = _load(dy_ptr, x_ptr, offset, mask, "evict_first")
        of_weight += widened((dy.to(tl.float32) * _normalized(x.to(tl.float32), alpha, DTYPE)).to(DTYPE))
        of_bias += widened(dy)
    block_ptr += block * SIZE
    threads = thread_sum(tl.reshape(of_weight, [4, THREADS, COLUMNS]), THREADS, COLUMNS)
    tl.store(block_ptr + column, block_sum(threads, THREADS, COLUMNS), mask=in_row)
    threads = thread_sum(tl.reshape(of_bias, [4, THREADS, COLUMNS]), THREADS, COLUMNS)
    tl.store(block_ptr + blocks * SIZE + column, block_sum(threads, THREADS, COLUMNS), mask=in_row)
