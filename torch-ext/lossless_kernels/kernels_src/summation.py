"""The orders in which ATen's CUDA reductions add fp32 numbers (ATen/native/cuda/Reduce.cuh, layer_norm_kernel.cu).

Every addition below has exactly two operands that the program names, so the order belongs to the program and not to the
compiler: `tl.sum` is only ever applied to an axis of length two.
"""

import triton
import triton.language as tl

from .primitives import exp_add


@triton.jit
def _sum_halves(values, ROWS: tl.constexpr, LENGTH: tl.constexpr, REST: tl.constexpr):
    """[ROWS, LENGTH, REST] -> [ROWS, 1, REST]: lane i takes lane i + LENGTH/2, until one lane is left."""
    for level in tl.static_range(10):
        if (LENGTH >> level) > 1:
            pairs = tl.reshape(values, [ROWS, 2, LENGTH >> (level + 1), REST])
            values = tl.sum(pairs, axis=1)
    return values


@triton.jit
def _apart(values, ROWS: tl.constexpr, LENGTH: tl.constexpr, REST: tl.constexpr):
    """[ROWS, LENGTH, REST] -> LENGTH of [ROWS, REST], which lie in one thread: what is elsewhere is brought there.

    After k splits, element j of `parts` holds what is j modulo 2**k.
    """
    parts = (tl.permute(values, [0, 2, 1]),)
    for level in tl.static_range(10):
        if (LENGTH >> level) > 1:
            even = ()
            odd = ()
            for j in tl.static_range(1 << level):
                pairs = tl.reshape(parts[j], [ROWS, REST, LENGTH >> (level + 1), 2])
                first, second = tl.split(pairs)
                even = even + (first,)
                odd = odd + (second,)
            parts = even + odd
    found = ()
    for j in tl.static_range(LENGTH):
        found = found + (tl.reshape(parts[j], [ROWS, REST]),)
    return found


@triton.jit
def _sum_halves_apart(values, ROWS: tl.constexpr, LENGTH: tl.constexpr, REST: tl.constexpr):
    """`_sum_halves` of lanes in different warps, which exchange once for all levels instead of once for each."""
    parts = _apart(values, ROWS, LENGTH, REST)
    for level in tl.static_range(10):
        if (LENGTH >> level) > 1:
            sums = ()
            for j in tl.static_range(LENGTH >> (level + 1)):
                sums = sums + (parts[j] + parts[j + (LENGTH >> (level + 1))],)
            parts = sums
    return tl.reshape(parts[0], [ROWS, 1, REST])


@triton.jit
def _sum_in_sequence(
    total,
    values,
    ROWS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SQUARES: tl.constexpr = False,
    FMA: tl.constexpr = False,
):
    """total [ROWS, COLUMNS], values [ROWS, STEPS, COLUMNS] -> ((total + step 0) + step 1) + ...

    With SQUARES the steps are squared in fp32, with FMA each square and its sum in one rounding.
    """
    steps = _apart(values, ROWS, 1 << LOG2_STEPS, COLUMNS)
    for j in tl.static_range(1 << LOG2_STEPS):
        step = steps[j].to(tl.float32)
        if FMA:
            total = tl.fma(step, step, total)
        elif SQUARES:
            total = total + step * step
        else:
            total = total + step
    return total


@triton.jit
def _sum_of_lanes(lanes, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr, EXCHANGE_ONCE: tl.constexpr):
    """[ROWS, HEIGHT * WIDTH] -> [ROWS]. Lane t is thread (t % WIDTH, t // WIDTH) of ATen's block, which reduces along x and
    then along y."""
    by_x = tl.permute(tl.reshape(lanes, [ROWS, HEIGHT, WIDTH]), [0, 2, 1])
    if EXCHANGE_ONCE:
        IN_WARP: tl.constexpr = WIDTH if WIDTH < 32 else 32
        warps = tl.reshape(by_x, [ROWS, WIDTH // IN_WARP, IN_WARP * HEIGHT])
        warp = tl.reshape(_sum_halves_apart(warps, ROWS, WIDTH // IN_WARP, IN_WARP * HEIGHT), [ROWS, IN_WARP, HEIGHT])
        by_y = tl.reshape(_sum_halves(warp, ROWS, IN_WARP, HEIGHT), [ROWS, HEIGHT, 1])
        return tl.reshape(_sum_halves_apart(by_y, ROWS, HEIGHT, 1), [ROWS])
    else:
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
    SQUARES: tl.constexpr = False,
):
    """Sum of each row of a tile as ATen's reduction over the last, contiguous dimension computes it.

    values: [ROWS, STEPS, COLUMNS], in memory order and zero beyond the row's end: fp32, or with SQUARES what is squared in
    fp32. ATen gives each of LANES = WIDTH * HEIGHT lanes four accumulators. With vectorised loads lane t's take the elements
    4t .. 4t+3 of every step, and COLUMNS is 4 * LANES; without (fewer than 128 elements) a step is what one accumulator of
    every lane takes, and COLUMNS is LANES. Returns [ROWS] fp32.
    """
    COLUMNS: tl.constexpr = (4 if VECTORIZED else 1) * WIDTH * HEIGHT
    # From an explicit zero, as ATen does: negative zeros sum to +0.
    zero = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    total = _sum_in_sequence(zero, values, ROWS, LOG2_STEPS, COLUMNS, SQUARES)
    FEW_STEPS: tl.constexpr = LOG2_STEPS == 1 or LOG2_STEPS == 2
    return sum_of_columns(total, ROWS, WIDTH, HEIGHT, VECTORIZED, EXCHANGE_ONCE=FEW_STEPS)


@triton.jit
def sum_of_columns(
    total,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    EXCHANGE_ONCE: tl.constexpr,
):
    """The rest of `row_sum`, from the sums of all steps: [ROWS, COLUMNS] -> [ROWS].

    With EXCHANGE_ONCE warps exchange lanes once for all levels of a dimension, otherwise once for each: the former takes
    fewer barriers. Where a column has one step or more than four, the compiler takes that exchange back into the row itself,
    which costs more than it saves (H200).
    """
    if VECTORIZED:
        even, odd = tl.split(tl.reshape(total, [ROWS, WIDTH * HEIGHT, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        total = ((first + second) + third) + fourth
    return _sum_of_lanes(total, ROWS, WIDTH, HEIGHT, EXCHANGE_ONCE)


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
        zero, tl.reshape(by_lane, [ROWS, 4 * STEPS, LANES]), ROWS, LOG2_STEPS + 2, LANES, SQUARES=True, FMA=True
    )
    return _sum_of_lanes(lanes, ROWS, WIDTH, HEIGHT, EXCHANGE_ONCE=False)


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


@triton.jit
def in_vectors(values, LANES: tl.constexpr):
    """[4 * LANES] -> four of [LANES]: what each lane has of a vector of four neighbours, by position."""
    even, odd = tl.split(tl.reshape(values, [LANES, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def chain_of_vectors(total, values, LANES: tl.constexpr, EXP: tl.constexpr = False):
    """total [LANES], values [4 * LANES] -> each lane's total with its four neighbours, one after the other.

    With EXP their exponentials are added, each with its last product and the sum in one rounding.
    """
    vector = in_vectors(values, LANES)
    for position in tl.static_range(4):
        if EXP:
            total = exp_add(total, vector[position])
        else:
            total = total + vector[position]
    return total


@triton.jit
def blocks_in_sequence(lanes, WARPS: tl.constexpr):
    """[WARPS * 32] -> [1]: the lanes of each warp in sequence from +0, then the warps (`blockReduce` in SoftMax.cu)."""
    LOG2_WARPS: tl.constexpr = WARPS.bit_length() - 1
    by_warp = tl.permute(tl.reshape(lanes, [1, WARPS, 32]), [0, 2, 1])
    warps = _sum_in_sequence(tl.zeros([1, WARPS], tl.float32), by_warp, 1, 5, WARPS)
    total = _sum_in_sequence(tl.zeros([1, 1], tl.float32), tl.reshape(warps, [1, WARPS, 1]), 1, LOG2_WARPS, 1)
    return tl.reshape(total, [1])


@triton.jit
def sum_of_block(lanes, LANES: tl.constexpr):
    """[LANES] -> [1]: halving trees over the lanes of each warp and then over the warps (`BlockReduce`, block_reduce.cuh)."""
    WIDTH: tl.constexpr = LANES if LANES < 32 else 32
    return _sum_of_lanes(tl.reshape(lanes, [1, LANES]), 1, WIDTH, LANES // WIDTH, EXCHANGE_ONCE=False)
