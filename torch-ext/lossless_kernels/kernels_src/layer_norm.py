"""LayerNorm's forward pass as ATen's vectorised kernel computes it (ATen/native/cuda/layer_norm_kernel.cu)."""

import triton
import triton.language as tl

from .primitives import divide, mask_if, rsqrt, widened
from .summation import (
    combined,
    combined_equal,
    in_vectors,
    welford_of_block,
    welford_of_equal_halves,
    welford_step,
)


@triton.jit
def _with_vectors(mean, m2, x, step: tl.constexpr, LANES: tl.constexpr):
    """Step `step` of LANES lanes: each adds its vector of four to its mean and M2."""
    values = in_vectors(tl.reshape(widened(x), [LANES * 4]), LANES)
    for position in tl.static_range(4):
        mean, m2 = welford_step(mean, m2, values[position], 1.0 / (4 * step + position + 1))
    return mean, m2


@triton.jit
def _moments(
    tiles, SIZE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, EMPTY: tl.constexpr
):
    """Mean and M2 of each row. A tile is a step of all lanes."""
    lane = tl.arange(0, ROWS * LANES) % LANES
    mean = tl.zeros([ROWS * LANES], tl.float32)
    m2 = tl.zeros([ROWS * LANES], tl.float32)
    for step in tl.static_range(STEPS):
        old_mean, old_m2 = mean, m2
        mean, m2 = _with_vectors(mean, m2, tiles[step], step, ROWS * LANES)
        if (step + 1) * 4 * LANES > SIZE:
            in_row = lane < SIZE // 4 - step * LANES
            mean, m2 = tl.where(in_row, mean, old_mean), tl.where(in_row, m2, old_m2)
    vectors = (SIZE // 4 - lane + LANES - 1) // LANES
    # In rows of a multiple of 128 elements all lanes of a warp have the same number n of elements. The share of one in two lanes
    # is n / 2n, which is 1/2 in fp32 for every n here. Any other n has this share. The compiler sees that STEPS vectors a lane
    # are a constant. (With a constant from the start it would compute the moments of all lanes in each thread.)
    tl.static_assert(STEPS <= 40, "41 * (1 / 82) is not 1/2 in fp32")
    alike = (STEPS * LANES - lane + LANES - 1) // LANES if SIZE % 128 == 0 else vectors
    count, alike = (4 * vectors).to(tl.float32), (4 * alike).to(tl.float32)
    return welford_of_block(mean, m2, count, LANES, alike, BLOCKS=ROWS, EMPTY=EMPTY)


@triton.jit
def _vectors(half: tl.constexpr, HALVES: tl.constexpr, TILES: tl.constexpr):
    """How many vectors each lane of half `half` has: every HALVES-th tile has one."""
    return (TILES - half + HALVES - 1) // HALVES


@triton.jit
def _vectors_of_both(half: tl.constexpr, HALVES: tl.constexpr, TILES: tl.constexpr):
    """Those of two lanes, one of half `half` and one of the next."""
    return _vectors(half, HALVES, TILES) + _vectors(half + 1, HALVES, TILES)


@triton.jit
def _moments_of_half(tiles, half: tl.constexpr, HALVES: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr):
    """Means and M2 [LANES] of the lanes of a half, whose steps are every HALVES-th tile."""
    mean = tl.zeros([LANES], tl.float32)
    m2 = tl.zeros([LANES], tl.float32)
    for tile in tl.static_range(half, TILES, HALVES):
        mean, m2 = _with_vectors(mean, m2, tiles[tile], tile // HALVES, LANES)
    return mean, m2


@triton.jit
def _moments_of_both(tiles, half: tl.constexpr, HALVES: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr):
    """Means and M2 [LANES]: each lane of half `half` with that of the next half, 16 lanes later in its warp."""
    vectors_b = _vectors(half, HALVES, TILES)
    vectors_a = _vectors(half + 1, HALVES, TILES)
    mean_b, m2_b = _moments_of_half(tiles, half, HALVES, LANES, TILES)
    mean_a, m2_a = _moments_of_half(tiles, half + 1, HALVES, LANES, TILES)
    if vectors_b == vectors_a:
        mean, m2 = combined_equal(mean_b, mean_a, m2_a + m2_b, 4 * vectors_b)
    else:
        count_b, count_a = tl.full([LANES], 4 * vectors_b, tl.float32), tl.full([LANES], 4 * vectors_a, tl.float32)
        mean, m2, _, _ = combined(mean_b, m2_b, count_b, mean_a, m2_a, count_a, count_b, count_a)
    return mean, m2


@triton.jit
def _moments_of_halves(
    tiles, ROWS: tl.constexpr, WARPS: tl.constexpr, SETS: tl.constexpr, TILES: tl.constexpr, EMPTY: tl.constexpr
):
    """Mean and M2 of each row. The lanes are SETS sets of WARPS warps each. A tile is a step of half of the lanes of each warp of
    a set: a thread has both lanes of most pairs that are combined first, and all lanes of a tile have as many elements."""
    tl.static_assert(WARPS * TILES <= 40, "41 * (1 / 82) is not 1/2 in fp32")
    HALVES: tl.constexpr = 2 * SETS
    GROUPS: tl.constexpr = ROWS * WARPS
    sets = ()
    for of_set in tl.static_range(SETS):
        sets = sets + (_moments_of_both(tiles, 2 * of_set, HALVES, GROUPS * 16, TILES),)
    # At each level all sets exchange at once.
    for level in tl.static_range(4):
        halved = ()
        for of_set in tl.static_range(SETS):
            mean, m2 = sets[of_set]
            count = (4 << level) * _vectors_of_both(2 * of_set, HALVES, TILES)
            halved = halved + (welford_of_equal_halves(mean, m2, count, GROUPS, 8 >> level),)
        sets = halved
    warps = ()
    for of_set in tl.static_range(SETS):
        mean, m2 = sets[of_set]
        count = tl.full([GROUPS], (4 << 4) * _vectors_of_both(2 * of_set, HALVES, TILES), tl.float32)
        for _ in tl.static_range(EMPTY):
            nothing = tl.zeros([GROUPS], tl.float32)
            mean, m2, count, _ = combined(mean, m2, count, nothing, nothing, nothing, count, nothing)
        warps = warps + ((mean, m2, count),)
    for level in tl.static_range(2):
        if (SETS >> level) > 1:
            of_both = ()
            for i in tl.static_range(SETS >> (level + 1)):
                mean_b, m2_b, count_b = warps[i]
                mean_a, m2_a, count_a = warps[i + (SETS >> (level + 1))]
                mean, m2, count, _ = combined(mean_b, m2_b, count_b, mean_a, m2_a, count_a, count_b, count_a)
                of_both = of_both + ((mean, m2, count),)
            warps = of_both
    mean, m2, _ = warps[0]
    for level in tl.static_range(2):
        if (WARPS >> level) > 1:
            mean, m2 = welford_of_equal_halves(mean, m2, (64 * TILES) << level, ROWS, WARPS >> (level + 1))
    return mean, m2


@triton.jit
def _column(tile: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr):
    """[1, COLUMNS]: the columns of a tile. With HALVES it has 64 of each 128 elements, half of those of each of WARPS warps."""
    position = tl.arange(0, COLUMNS)[None, :]
    if HALVES and WARPS > 1:
        return tile // 2 * (2 * COLUMNS) + tile % 2 * 64 + position // 64 * 128 + position % 64
    else:
        return tile * COLUMNS + position


@triton.jit
def _weight_and_bias(
    weight_ptr, bias_ptr, column, ROWS: tl.constexpr, SIZE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr
):
    """Those of a tile's columns; what there is not is not loaded.

    Loaded for each row, from the L1: a single row would get another layout and pass through shared memory.
    """
    of_rows = tl.broadcast_to(column, [ROWS, column.shape[1]])
    weight = of_rows
    bias = of_rows
    if WEIGHT:
        weight = tl.load(weight_ptr + of_rows, mask=of_rows < SIZE, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + of_rows, mask=of_rows < SIZE, other=0.0)
    return weight, bias


@triton.jit(do_not_specialize=["rows", "x_row_stride", "store_statistics", "eps"])
def layer_norm_forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    rows: tl.int64,
    x_row_stride: tl.int64,
    store_statistics: tl.int32,
    eps: tl.float32,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HALVES: tl.constexpr,
    FEW: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):
    """y[row] = weight * (rstd * (x[row] - mean)) + bias, with the row's mean and rstd = rsqrt(variance + eps) in fp32.

    A program takes ROWS rows of SIZE elements, a multiple of four; y is dense.

    Args:
        x_row_stride: in units of STRIDE_UNIT elements, which show the compiler the alignment.
        store_statistics: mean and rstd are stored if this is 1.
        HALVES: see `_moments_of_halves`; SIZE is a multiple of 64.
        FEW: rows are so few that waiting decides their time: weight and bias of up to eight tiles are loaded with x.
        WEIGHT, BIAS: without them `weight_ptr` and `bias_ptr` are not accessed. A bias needs a weight.
    """
    tl.static_assert(WEIGHT or not BIAS, "without a weight ATen has another arithmetic for one element of four")
    # ATen's block has 128 threads, which read vectors of four elements. Whole warps of lanes without elements are left out.
    EMPTY: tl.constexpr = 2 if SIZE <= 128 else 1 if SIZE <= 256 else 0
    LANES: tl.constexpr = 128 >> EMPTY
    # All warps of a set have the same elements.
    SETS: tl.constexpr = 1 if SIZE % (4 * LANES) == 0 or not HALVES else 2 if SIZE % 256 == 0 else LANES // 32
    WARPS: tl.constexpr = LANES // 32 // SETS
    COLUMNS: tl.constexpr = 64 * WARPS if HALVES else 4 * LANES
    TILES: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    # A load does not pass a store. So a tile's weight and bias are loaded before the tile before is stored: those of the first
    # EARLY tiles before the moments are computed, each of the others AHEAD tiles before its own. Of one or two tiles, many rows
    # load them where they are needed: registers decide there how many programs run at a time.
    WANTED: tl.constexpr = 8 if FEW else 1 if x_ptr.dtype.element_ty == tl.float32 and TILES > 2 else 0
    EARLY: tl.constexpr = WANTED if WANTED < TILES else TILES
    AHEAD: tl.constexpr = EARLY if EARLY > 0 or TILES <= 2 else 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    of_row = row < rows
    x_offset = (row * (x_row_stride * STRIDE_UNIT))[:, None]
    tiles = ()
    for tile in tl.static_range(TILES):
        column = _column(tile, WARPS, COLUMNS, HALVES)
        inside = of_row[:, None] & (column < SIZE)
        tiles = tiles + (tl.load(x_ptr + x_offset + column, mask=inside, other=0.0),)
    affine = ()
    for tile in tl.static_range(EARLY):
        column = _column(tile, WARPS, COLUMNS, HALVES)
        affine = affine + (_weight_and_bias(weight_ptr, bias_ptr, column, ROWS, SIZE, WEIGHT, BIAS),)
    if HALVES:
        mean, m2 = _moments_of_halves(tiles, ROWS, WARPS, SETS, TILES, EMPTY)
    else:
        mean, m2 = _moments(tiles, SIZE, ROWS, LANES, TILES, EMPTY)
    # By a power of two a product has the quotient's bits, subnormal ones too.
    POWER_OF_TWO: tl.constexpr = SIZE & (SIZE - 1) == 0
    variance = m2 * (1.0 / SIZE) if POWER_OF_TWO else divide(m2, tl.full([ROWS], SIZE, tl.float32))
    rstd = rsqrt(variance + eps)
    tl.store(mean_ptr + row, mean, mask=mask_if(of_row, store_statistics))
    tl.store(rstd_ptr + row, rstd, mask=mask_if(of_row, store_statistics))

    for tile in tl.static_range(EARLY, AHEAD):
        column = _column(tile, WARPS, COLUMNS, HALVES)
        affine = affine + (_weight_and_bias(weight_ptr, bias_ptr, column, ROWS, SIZE, WEIGHT, BIAS),)
    for tile in tl.static_range(TILES):
        if tile + AHEAD < TILES:
            column = _column(tile + AHEAD, WARPS, COLUMNS, HALVES)
            affine = affine + (_weight_and_bias(weight_ptr, bias_ptr, column, ROWS, SIZE, WEIGHT, BIAS),)
        column = _column(tile, WARPS, COLUMNS, HALVES)
        inside = of_row[:, None] & (column < SIZE)
        y = rstd[:, None] * (widened(tiles[tile]) - mean[:, None])
        weight, bias = affine[tile]
        if BIAS:
            y = tl.fma(widened(weight), y, widened(bias))
        elif WEIGHT:
            y = widened(weight) * y
        tl.store(y_ptr + (row * SIZE)[:, None] + column, y.to(y_ptr.dtype.element_ty), mask=inside)
