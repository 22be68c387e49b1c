"""The orders in which ATen's CUDA reductions add fp32 numbers (ATen/native/cuda/Reduce.cuh, layer_norm_kernel.cu).

Every addition below has exactly two operands that the program names, so the order belongs to the program and not to the
compiler: `tl.sum` is only ever applied to an axis of length two.
"""

import triton
import triton.language as tl


@triton.jit
def _sum_halves(values, ROWS: tl.constexpr, LENGTH: tl.constexpr, REST: tl.constexpr):
    """[ROWS, LENGTH, REST] -> [ROWS, 1, REST]: lane i takes lane i + LENGTH/2, until one lane is left."""
    for level in tl.static_range(10):
        if (LENGTH >> level) > 1:
            pairs = tl.reshape(values, [ROWS, 2, LENGTH >> (level + 1), REST])
            values = tl.sum(pairs, axis=1)
    return values


@triton.jit
def _sum_in_sequence(
    total,
    values,
    ROWS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SQUARES: tl.constexpr = False,
):
    """total [ROWS, COLUMNS], values [ROWS, STEPS, COLUMNS] -> ((total + step 0) + step 1) + ...

    With SQUARES the steps are squared, and each product and sum is one FMA.
    The steps of one column are brought into one thread and taken apart there: after k splits, element j of `parts` holds
    the steps that are j modulo 2**k.
    """
    parts = (tl.permute(values, [0, 2, 1]),)
    for level in tl.static_range(LOG2_STEPS):
        even = ()
        odd = ()
        for j in tl.static_range(1 << level):
            pairs = tl.reshape(parts[j], [ROWS, COLUMNS, 1 << (LOG2_STEPS - level - 1), 2])
            first, second = tl.split(pairs)
            even = even + (first,)
            odd = odd + (second,)
        parts = even + odd
    for j in tl.static_range(1 << LOG2_STEPS):
        step = tl.reshape(parts[j], [ROWS, COLUMNS])
        if SQUARES:
            total = tl.fma(step, step, total)
        else:
            total = total + step
    return total


@triton.jit
def _sum_of_lanes(lanes, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """[ROWS, HEIGHT * WIDTH] -> [ROWS]. Lane t is thread (t % WIDTH, t // WIDTH) of ATen's block, which reduces along x and
    then along y."""
    by_x = tl.permute(tl.reshape(lanes, [ROWS, HEIGHT, WIDTH]), [0, 2, 1])
    by_y = tl.reshape(_sum_halves(by_x, ROWS, WIDTH, HEIGHT), [ROWS, HEIGHT, 1])
    return tl.reshape(_sum_halves(by_y, ROWS, HEIGHT, 1), [ROWS])


@triton.jit
def row_sum(
    values,
    ROWS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
):
    """Sum of each row of a tile as ATen's reduction over the last, contiguous dimension computes it.

    values: [ROWS, STEPS, COLUMNS] fp32, in memory order and zero beyond the row's end. ATen gives each of LANES = WIDTH *
    HEIGHT lanes four accumulators. With vectorised loads lane t's take the elements 4t .. 4t+3 of every step, and COLUMNS is
    4 * LANES; without (fewer than 128 elements) a step is what one accumulator of every lane takes, and COLUMNS is LANES.
    Returns [ROWS] fp32.
    """
    COLUMNS: tl.constexpr = (4 if VECTORIZED else 1) * WIDTH * HEIGHT
    # From an explicit zero, as ATen does: negative zeros sum to +0.
    zero = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    total = _sum_in_sequence(zero, values, ROWS, LOG2_STEPS, COLUMNS)
    return sum_of_columns(total, ROWS, WIDTH, HEIGHT, VECTORIZED)


@triton.jit
def sum_of_columns(total, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr, VECTORIZED: tl.constexpr):
    """The rest of `row_sum`, from the sums of all steps: [ROWS, COLUMNS] -> [ROWS]."""
    if VECTORIZED:
        even, odd = tl.split(tl.reshape(total, [ROWS, WIDTH * HEIGHT, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        total = ((first + second) + third) + fourth
    return _sum_of_lanes(total, ROWS, WIDTH, HEIGHT)


@triton.jit
def fused_sum_of_squares(
    values, ROWS: tl.constexpr, LOG2_STEPS: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr
):
    """Sum of the squares of each row of a tile as ATen's own kernel for RMSNorm computes it (layer_norm_kernel.cu).

    values: [ROWS, STEPS, 4 * LANES] fp32 with LANES = WIDTH * HEIGHT, in memory order and zero beyond the row's end. Lane t
    squares the elements 4t .. 4t+3 of every step one after the other and adds each with an FMA to one accumulator.
    Returns [ROWS] fp32.
    """
    STEPS: tl.constexpr = 1 << LOG2_STEPS
    LANES: tl.constexpr = WIDTH * HEIGHT
    by_lane = tl.permute(tl.reshape(values, [ROWS, STEPS, LANES, 4]), [0, 1, 3, 2])
    zero = tl.zeros([ROWS, LANES], dtype=tl.float32)
    lanes = _sum_in_sequence(
        zero, tl.reshape(by_lane, [ROWS, 4 * STEPS, LANES]), ROWS, LOG2_STEPS + 2, LANES, SQUARES=True
    )
    return _sum_of_lanes(lanes, ROWS, WIDTH, HEIGHT)


@triton.jit
def thread_sum(chains, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr):
    """A thread's sum of its four chains: [4, HEIGHT, COLUMNS] -> [HEIGHT, COLUMNS]."""
    accumulators = tl.permute(tl.reshape(chains, [2, 2, HEIGHT, COLUMNS]), [2, 3, 0, 1])
    even, odd = tl.split(accumulators)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return ((first + second) + third) + fourth


@triton.jit
def halves_sum(threads, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr):
    """A block's sum of its threads: [HEIGHT, COLUMNS] -> [COLUMNS], the upper half added to the lower until one is left."""
    for level in tl.static_range(10):
        if (HEIGHT >> level) > 1:
            pairs = tl.reshape(threads, [2, HEIGHT >> (level + 1), COLUMNS])
            # Taken apart, not `tl.sum`: the halves may lie in different warps, and where the bits of a warp's number belong
            # to rows and columns in turn, Triton 3.6 mixes up what the warps hold.
            lower, upper = tl.split(tl.permute(pairs, [1, 2, 0]))
            threads = lower + upper
    return tl.reshape(threads, [COLUMNS])


@triton.jit
def sum_of_blocks(
    block_ptr,
    blocks,
    column,
    mask,
    HIDDEN_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
):
    """The column sum from its blocks, [blocks, PARTS, HIDDEN_SIZE] fp32 with PARTS threads left in each: [COLUMNS].

    Thread y of the last block takes the sums of the blocks y, y + HEIGHT, ... in sequence, and the block halves over its
    threads again. A sum that starts from +0 is never -0, so that the zeros beyond the last block change nothing.
    """
    STEPS: tl.constexpr = 1 << LOG2_STEPS
    total = tl.zeros([1, HEIGHT * COLUMNS], dtype=tl.float32)
    for first_block in range(0, blocks, STEPS * HEIGHT):
        thread = first_block * PARTS + tl.arange(0, STEPS * HEIGHT * PARTS)
        in_range = (thread < blocks * PARTS)[:, None] & mask[None, :]
        threads = tl.load(block_ptr + thread[:, None] * HIDDEN_SIZE + column[None, :], mask=in_range, other=0.0)
        threads = tl.reshape(threads, [STEPS * HEIGHT, PARTS, COLUMNS])
        values = tl.reshape(_sum_halves(threads, STEPS * HEIGHT, PARTS, COLUMNS), [1, STEPS, HEIGHT * COLUMNS])
        total = _sum_in_sequence(total, values, 1, LOG2_STEPS, HEIGHT * COLUMNS)
    return halves_sum(tl.reshape(total, [HEIGHT, COLUMNS]), HEIGHT, COLUMNS)
