"""The reduction orders of ATen's CUDA and ROCm kernels for fp32 numbers (ATen/native/cuda/Reduce.cuh,
layer_norm_kernel.cu, group_norm_kernel.cu).

Each addition names its two operands: the program decides the order, not the compiler. `tl.sum` is only applied to axes
of length two. NEIGHBOURS is `RowReduction.neighbours`: ROCm's warps of so many lanes sum neighbours first; 1 on CUDA.
"""

import triton
import triton.language as tl

from .primitives import divide, divide_by_reciprocal, exp_add


@triton.jit
def _tree_sum(values, ROWS: tl.constexpr, LENGTH: tl.constexpr, REST: tl.constexpr, NEIGHBOURS: tl.constexpr = 1):
    """[ROWS, LENGTH, REST] -> [ROWS, 1, REST]: lane i adds lane i + LENGTH/2, until NEIGHBOURS lanes remain; of these
    lane 2i adds lane 2i + 1, until one lane remains."""
    for level in tl.static_range(10):
        if (LENGTH >> level) > 1:
            if (LENGTH >> level) > NEIGHBOURS:
                pairs = tl.reshape(values, [ROWS, 2, LENGTH >> (level + 1), REST])
                values = tl.sum(pairs, axis=1)
            else:
                pairs = tl.reshape(values, [ROWS, LENGTH >> (level + 1), 2, REST])
                values = tl.sum(pairs, axis=2)
    return values


@triton.jit
def unstack(values, ROWS: tl.constexpr, LENGTH: tl.constexpr, REST: tl.constexpr):
    """[ROWS, LENGTH, REST] -> LENGTH tensors [ROWS, REST] whose corresponding elements are in one thread.

    After k splits, `parts[j]` has the indices that are j modulo 2**k.
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
def _tree_sum_in_thread(values, ROWS: tl.constexpr, LENGTH: tl.constexpr, REST: tl.constexpr):
    """`_tree_sum` of lanes in different warps, with one exchange for all levels instead of one for each."""
    parts = unstack(values, ROWS, LENGTH, REST)
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

    SQUARES: the steps are squared in fp32. FMA: each square and its addition have one rounding.
    """
    steps = unstack(values, ROWS, 1 << LOG2_STEPS, COLUMNS)
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
def _sum_of_lanes(
    lanes,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    EXCHANGE_ONCE: tl.constexpr,
    NEIGHBOURS: tl.constexpr = 1,
):
    """[ROWS, HEIGHT * WIDTH] -> [ROWS]. Lane t is thread (t % WIDTH, t // WIDTH) of ATen's block, which reduces along x
    and then along y."""
    by_x = tl.permute(tl.reshape(lanes, [ROWS, HEIGHT, WIDTH]), [0, 2, 1])
    if EXCHANGE_ONCE:
        WARP: tl.constexpr = NEIGHBOURS if NEIGHBOURS > 32 else 32
        IN_WARP: tl.constexpr = WIDTH if WIDTH < WARP else WARP
        warps = tl.reshape(by_x, [ROWS, WIDTH // IN_WARP, IN_WARP * HEIGHT])
        warp = tl.reshape(_tree_sum_in_thread(warps, ROWS, WIDTH // IN_WARP, IN_WARP * HEIGHT), [ROWS, IN_WARP, HEIGHT])
        by_y = tl.reshape(_tree_sum(warp, ROWS, IN_WARP, HEIGHT, NEIGHBOURS), [ROWS, HEIGHT, 1])
        return tl.reshape(_tree_sum_in_thread(by_y, ROWS, HEIGHT, 1), [ROWS])
    else:
        by_y = tl.reshape(_tree_sum(by_x, ROWS, WIDTH, HEIGHT, NEIGHBOURS), [ROWS, HEIGHT, 1])
        return tl.reshape(_tree_sum(by_y, ROWS, HEIGHT, 1), [ROWS])


@triton.jit
def row_sum(
    values,
    ROWS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    SQUARES: tl.constexpr = False,
):
    """The sum of each row of a tile, in the order of ATen's reduction over the last, contiguous dimension: [ROWS] fp32.

    values: [ROWS, STEPS, COLUMNS], in memory order and zero beyond the row's end: fp32, or with SQUARES numbers to be
    squared in fp32. Each of ATen's LANES = WIDTH * HEIGHT lanes has four accumulators. With vectorised loads those of
    lane t take the elements 4t .. 4t+3 of every step, and COLUMNS is 4 * LANES. Without (fewer than 128 elements) a
    step has one element for one accumulator of every lane, and COLUMNS is LANES.
    """
    COLUMNS: tl.constexpr = (4 if VECTORIZED else 1) * WIDTH * HEIGHT
    # Like ATen it starts from zero: negative zeros sum to +0.
    if LOG2_STEPS == 1 and not VECTORIZED:
        # A split would make Triton 3.9 exchange steps and lanes through shared memory.
        steps = values.to(tl.float32)
        total = tl.sum(steps * steps if SQUARES else steps, axis=1) + 0.0
    else:
        zero = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        total = _sum_in_sequence(zero, values, ROWS, LOG2_STEPS, COLUMNS, SQUARES)
    FEW_STEPS: tl.constexpr = LOG2_STEPS == 1 or LOG2_STEPS == 2
    return sum_of_columns(total, ROWS, WIDTH, HEIGHT, VECTORIZED, NEIGHBOURS, EXCHANGE_ONCE=FEW_STEPS)


@triton.jit
def sum_of_columns(
    total,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    EXCHANGE_ONCE: tl.constexpr,
):
    """The last part of `row_sum`, from the sums over all steps: [ROWS, COLUMNS] -> [ROWS].

    With EXCHANGE_ONCE warps exchange lanes once for all levels of a dimension, which takes fewer barriers, otherwise
    once for each level. If a column has one step or more than four, the compiler moves the single exchange to the row's
    own elements, which costs more than it saves (H200).
    """
    if VECTORIZED:
        even, odd = tl.split(tl.reshape(total, [ROWS, WIDTH * HEIGHT, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        total = ((first + second) + third) + fourth
    return _sum_of_lanes(total, ROWS, WIDTH, HEIGHT, EXCHANGE_ONCE, NEIGHBOURS)


@triton.jit
def fused_sum_of_squares(
    values, ROWS: tl.constexpr, LOG2_STEPS: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr
):
    """Each row's sum of squares [ROWS] fp32, in the order of ATen's RMSNorm kernel (layer_norm_kernel.cu).

    values: [ROWS, STEPS, 4 * LANES] fp32 with LANES = WIDTH * HEIGHT, in memory order and zero beyond the row's end.
    Lane t adds the squares of the elements 4t .. 4t+3 of every step in sequence to one accumulator, each by an FMA.
    Warps sum their lanes by halves, on ROCm too.
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
    """The sum of each thread's four chains: [4, HEIGHT, COLUMNS] -> [HEIGHT, COLUMNS]."""
    accumulators = tl.permute(tl.reshape(chains, [2, 2, HEIGHT, COLUMNS]), [2, 3, 0, 1])
    even, odd = tl.split(accumulators)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return ((first + second) + third) + fourth


@triton.jit
def block_sum(threads, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of a block's threads by a halving tree, lower half + upper half: [HEIGHT, COLUMNS] -> [COLUMNS]."""
    for level in tl.static_range(10):
        if (HEIGHT >> level) > 1:
            pairs = tl.reshape(threads, [2, HEIGHT >> (level + 1), COLUMNS])
            # `tl.split` instead of `tl.sum`: the halves may be in different warps. If the bits of the warp index belong
            # alternately to rows and columns, Triton 3.6's `tl.sum` adds elements of the wrong warps.
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
    PARTIAL_SUMS: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOG2_STEPS: tl.constexpr,
):
    """The column sums [COLUMNS] from the blocks' PARTIAL_SUMS threads: [blocks, PARTIAL_SUMS, HIDDEN_SIZE] fp32.

    Thread y of ATen's last block adds the sums of the blocks y, y + HEIGHT, ... in sequence. A halving tree then sums
    its threads. A sum that starts from +0 is never -0: zeros beyond the last block change nothing.
    """
    STEPS: tl.constexpr = 1 << LOG2_STEPS
    total = tl.zeros([1, HEIGHT * COLUMNS], dtype=tl.float32)
    for first_block in range(0, blocks, STEPS * HEIGHT):
        thread = first_block * PARTIAL_SUMS + tl.arange(0, STEPS * HEIGHT * PARTIAL_SUMS)
        in_range = (thread < blocks * PARTIAL_SUMS)[:, None] & mask[None, :]
        threads = tl.load(block_ptr + thread[:, None] * HIDDEN_SIZE + column[None, :], mask=in_range, other=0.0)
        threads = tl.reshape(threads, [STEPS * HEIGHT, PARTIAL_SUMS, COLUMNS])
        values = tl.reshape(_tree_sum(threads, STEPS * HEIGHT, PARTIAL_SUMS, COLUMNS), [1, STEPS, HEIGHT * COLUMNS])
        total = _sum_in_sequence(total, values, 1, LOG2_STEPS, HEIGHT * COLUMNS)
    return block_sum(tl.reshape(total, [HEIGHT, COLUMNS]), HEIGHT, COLUMNS)


@triton.jit
def in_vectors(values, LANES: tl.constexpr):
    """[4 * LANES] -> four tensors [LANES]: the first, second, third and fourth elements of the lanes' vectors."""
    even, odd = tl.split(tl.reshape(values, [LANES, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def chain_of_vectors(total, values, LANES: tl.constexpr, EXP: tl.constexpr = False, VECTOR: tl.constexpr = 4):
    """total [LANES], values [VECTOR * LANES] -> each lane's total plus its vector's elements in sequence.

    EXP: adds their exponentials, by `exp_add`.
    """
    if VECTOR == 1:
        vector = (values,)
    elif VECTOR == 4:
        vector = in_vectors(values, LANES)
    else:
        by_position = tl.permute(tl.reshape(values, [1, LANES, VECTOR]), [0, 2, 1])
        vector = unstack(by_position, 1, VECTOR, LANES)
    for position in tl.static_range(VECTOR):
        element = tl.reshape(vector[position], [LANES])
        if EXP:
            total = exp_add(total, element)
        else:
            total = total + element
    return total


@triton.jit
def blocks_in_sequence(lanes, WARPS: tl.constexpr):
    """[WARPS * 32] -> [1]: the lanes of each warp in sequence from +0, then the warps (`blockReduce` in SoftMax.cu)."""
    LOG2_WARPS: tl.constexpr = WARPS.bit_length() - 1
    by_warp = tl.permute(tl.reshape(lanes, [1, WARPS, 32]), [0, 2, 1])
    warps = _sum_in_sequence(tl.zeros([1, WARPS], tl.float32), by_warp, 1, 5, WARPS)
    # Without a reduction in between the compiler would sum the lanes of all warps in each thread, as it does the warps. The sum
    # of a number's bits and zero are these bits.
    bits = warps.to(tl.int32, bitcast=True)
    warps = tl.sum(tl.join(bits, tl.zeros_like(bits)), axis=2).to(tl.float32, bitcast=True)
    total = _sum_in_sequence(tl.zeros([1, 1], tl.float32), tl.reshape(warps, [1, WARPS, 1]), 1, LOG2_WARPS, 1)
    return tl.reshape(total, [1])


@triton.jit
def sum_of_block(lanes, LANES: tl.constexpr):
    """[LANES] -> [1]: halving trees over each warp's lanes, then over the warps (`BlockReduce`, block_reduce.cuh)."""
    WIDTH: tl.constexpr = LANES if LANES < 32 else 32
    return _sum_of_lanes(tl.reshape(lanes, [1, LANES]), 1, WIDTH, LANES // WIDTH, EXCHANGE_ONCE=False)


@triton.jit
def sum_of_tile(lanes, BLOCKS: tl.constexpr, LANES: tl.constexpr, EXCHANGE_ONCE: tl.constexpr = False):
    """[BLOCKS * LANES] -> [BLOCKS]: the same for several blocks of whole warps. Like eager's it is never -0: eager adds zeros
    for the warps that a block of 32 would have. EXCHANGE_ONCE is that of `sum_of_columns`."""
    total = _sum_of_lanes(tl.reshape(lanes, [BLOCKS, LANES]), BLOCKS, 32, LANES // 32, EXCHANGE_ONCE)
    return total + 0.0


@triton.jit
def vectors_of_step(step, first_vector, end_vector, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """The vectors of this block in a step of a full sum: their first element, and the mask [WIDTH * VECTOR] of elements.

    A block is a program. It takes WIDTH neighbouring vectors, one for each thread; the other blocks take those after them.
    """
    blocks_before = tl.cast(step, tl.int64) * tl.num_programs(0) + tl.program_id(0)
    first = first_vector + blocks_before * WIDTH
    # In this form the compiler sees that a vector is masked as a whole.
    return first * VECTOR, tl.arange(0, WIDTH * VECTOR) // VECTOR < end_vector - first


@triton.jit
def singles_of_sum(first, count, first_thread, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """The elements of a full sum before or after its vectors: their indices and mask, [WIDTH * VECTOR].

    The first block's threads from `first_thread` on take one each, into their first accumulators.
    """
    accumulator = tl.arange(0, WIDTH * VECTOR)
    index = accumulator // VECTOR - first_thread
    taken = (accumulator % VECTOR == 0) & (index >= 0) & (index < tl.where(tl.program_id(0) == 0, count, 0))
    return first + index, taken


@triton.jit
def sum_of_threads(chains, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """[WIDTH * VECTOR] -> [1]: each thread's VECTOR accumulators in sequence, then a halving tree over the threads."""
    LOG2_VECTOR: tl.constexpr = VECTOR.bit_length() - 1
    by_accumulator = tl.permute(tl.reshape(chains, [1, WIDTH, VECTOR]), [0, 2, 1])
    # An accumulator that started from +0 is never -0.
    threads = _sum_in_sequence(tl.zeros([1, WIDTH], tl.float32), by_accumulator, 1, LOG2_VECTOR, WIDTH)
    return _sum_of_lanes(threads, 1, WIDTH, 1, EXCHANGE_ONCE=False)


# Welford's algorithm: a mean and the sum M2 of squared differences from it, element by element


@triton.jit
def welford_step(mean, m2, value, FACTOR: tl.constexpr):
    """The mean and M2 with another value, FACTOR the reciprocal of how many there are then (`cuWelfordOnlineSum`)."""
    delta = value - mean
    mean = tl.fma(delta, tl.full(delta.shape, FACTOR, tl.float32), mean)
    return mean, tl.fma(delta, value - mean, m2)


@triton.jit
def welford_step_by_division(mean, m2, value, count, reciprocal, DIVIDED: tl.constexpr):
    """The mean and M2 with another value, the `count`-th, and what was added to the mean (`WelfordOps::reduce`,
    SharedReduceOps.h). Eager divides; without DIVIDED `divide_by_reciprocal` does it, by a reciprocal of the count."""
    delta = value - mean
    added = divide(delta, count) if DIVIDED else divide_by_reciprocal(delta, count, reciprocal)
    mean = mean + added
    return mean, tl.fma(delta, value - mean, m2), added


@triton.jit
def combined(mean_b, mean_a, m2_of_both, share_b, share_a, count_a):
    """The moments of both (`cuWelfordCombine`). `m2_of_both` is the sum of their M2; the shares are each one's of the count of both."""
    delta = mean_b - mean_a
    mean = tl.fma(mean_a, share_a, share_b * mean_b)
    return mean, tl.fma(share_b, count_a * (delta * delta), m2_of_both)


@triton.jit
def _combined_by_division(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    """The moments of both; a lane without elements leaves the other as it is (`WelfordOps::combine`, SharedReduceOps.h)."""
    delta = mean_b - mean_a
    count = count_a + count_b
    share = divide(count_b, count)
    mean = tl.fma(delta, share, mean_a)
    m2 = tl.fma((delta * delta) * count_a, share, m2_a + m2_b)
    mean, m2 = tl.where(count_b == 0.0, mean_a, mean), tl.where(count_b == 0.0, m2_a, m2)
    return tl.where(count_a == 0.0, mean_b, mean), tl.where(count_a == 0.0, m2_b, m2), count


@triton.jit
def _half(values, GROUPS: tl.constexpr, HALF: tl.constexpr, UPPER: tl.constexpr):
    """[GROUPS * 2 * HALF] -> the lower or the upper half of each group: [GROUPS * HALF]. Threads exchange it: of `tl.split` the
    compiler may make a computation of all lanes in each thread. The sum of a number's bits and zero are these bits."""
    pairs = tl.reshape(values.to(tl.int32, bitcast=True), [GROUPS, 2, HALF])
    wanted = tl.reshape(tl.arange(0, 2), [1, 2, 1]) == UPPER
    bits = tl.sum(tl.where(tl.broadcast_to(wanted, pairs.shape), pairs, 0), axis=1)
    return tl.reshape(bits, [GROUPS * HALF]).to(tl.float32, bitcast=True)


@triton.jit
def halves(mean, m2, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """[GROUPS * 2 * HALF] -> lane i of each group and lane i + HALF: both means and the sum of their M2, [GROUPS * HALF] each."""
    m2_of_both = tl.sum(tl.reshape(m2, [GROUPS, 2, HALF]), axis=1)
    return _half(mean, GROUPS, HALF, 0), _half(mean, GROUPS, HALF, 1), tl.reshape(m2_of_both, [GROUPS * HALF])


@triton.jit
def _halves_by_division(mean, m2, count, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """Lane i of each group combines its moments with those of lane i + HALF."""
    mean_l, mean_u = _half(mean, GROUPS, HALF, 0), _half(mean, GROUPS, HALF, 1)
    m2_l, m2_u = _half(m2, GROUPS, HALF, 0), _half(m2, GROUPS, HALF, 1)
    count_l, count_u = _half(count, GROUPS, HALF, 0), _half(count, GROUPS, HALF, 1)
    return _combined_by_division(mean_l, m2_l, count_l, mean_u, m2_u, count_u)


@triton.jit
def welford_of_block(mean, m2, count, LANES: tl.constexpr):
    """Each lane's mean, M2 and count [LANES] -> mean and M2 [1] of all, by halving trees over each warp's lanes, then over the
    warps."""
    WARPS: tl.constexpr = LANES // 32
    for level in tl.static_range(5):
        mean, m2, count = _halves_by_division(mean, m2, count, WARPS, 16 >> level)
    for level in tl.static_range(5):
        if (WARPS >> level) > 1:
            mean, m2, count = _halves_by_division(mean, m2, count, 1, WARPS >> (level + 1))
    return mean, m2
