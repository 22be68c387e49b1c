"""The orders in which ATen's CUDA reductions add fp32 numbers (ATen/native/cuda/Reduce.cuh).

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
def _sum_in_sequence(values, ROWS: tl.constexpr, LOG2_STEPS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, STEPS, COLUMNS] -> [ROWS, COLUMNS]: ((0 + step 0) + step 1) + ...

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
    # From an explicit zero, as ATen does: a column of negative zeros sums to +0.
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for j in tl.static_range(1 << LOG2_STEPS):
        total = total + tl.reshape(parts[j], [ROWS, COLUMNS])
    return total


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

    values: [ROWS, STEPS, 4 * LANES] fp32 with LANES = WIDTH * HEIGHT, in memory order and zero beyond the row's end. ATen
    gives every lane four accumulators. With vectorised loads lane t's accumulators take the elements 4t .. 4t+3 of every
    step; without (fewer than 128 elements) accumulator i takes element i * LANES + t. Returns [ROWS] fp32.
    """
    LANES: tl.constexpr = WIDTH * HEIGHT
    total = _sum_in_sequence(values, ROWS, LOG2_STEPS, 4 * LANES)
    if VECTORIZED:
        accumulators = tl.reshape(total, [ROWS, LANES, 2, 2])
    else:
        accumulators = tl.permute(tl.reshape(total, [ROWS, 2, 2, LANES]), [0, 3, 1, 2])
    even, odd = tl.split(accumulators)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    lanes = ((first + second) + third) + fourth
    # Lane t is thread (t % WIDTH, t // WIDTH) of ATen's block, which reduces along x and then along y.
    by_x = tl.permute(tl.reshape(lanes, [ROWS, HEIGHT, WIDTH]), [0, 2, 1])
    by_y = tl.reshape(_sum_halves(by_x, ROWS, WIDTH, HEIGHT), [ROWS, HEIGHT, 1])
    return tl.reshape(_sum_halves(by_y, ROWS, HEIGHT, 1), [ROWS])


@triton.jit
def column_sum(
    partial_ptr, blocks, column, mask, HIDDEN_SIZE: tl.constexpr, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr
):
    """The sum of a column's chains as ATen's reduction over rows combines them.

    partial: [4, blocks, HEIGHT, HIDDEN_SIZE] fp32, the sums of the chains: accumulator, block and thread of the block. A
    thread adds its accumulators up, a block halves over its threads; with several blocks, thread y of the last one takes
    the sums of the blocks y, y + HEIGHT, ... in sequence and the halving is done again. Returns [COLUMNS] fp32.
    """
    lane = tl.arange(0, HEIGHT)
    accumulator_stride = blocks * HEIGHT * HIDDEN_SIZE
    total = tl.zeros([1, HEIGHT, COLUMNS], dtype=tl.float32)
    for first_block in range(0, blocks, HEIGHT):
        block = first_block + lane
        offset = (block[:, None, None] * HEIGHT + lane[None, :, None]) * HIDDEN_SIZE + column[None, None, :]
        in_range = (block < blocks)[:, None, None] & mask[None, None, :]
        chains = partial_ptr + offset
        thread = tl.load(chains, mask=in_range, other=0.0)
        for accumulator in tl.static_range(1, 4):
            thread = thread + tl.load(chains + accumulator * accumulator_stride, mask=in_range, other=0.0)
        total = total + tl.reshape(_sum_halves(thread, HEIGHT, HEIGHT, COLUMNS), [1, HEIGHT, COLUMNS])
    return tl.reshape(_sum_halves(total, 1, HEIGHT, COLUMNS), [COLUMNS])
