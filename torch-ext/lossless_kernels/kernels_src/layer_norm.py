"""LayerNorm's forward pass as ATen's vectorised kernel computes it (ATen/native/cuda/layer_norm_kernel.cu)."""

import triton
import triton.language as tl

from .primitives import divide, mask_if, rsqrt, widened
from .summation import combined, halves, in_vectors, unstack, welford_step


@triton.jit
def _with_vectors(mean, m2, x, step: tl.constexpr, lane, WITH: tl.constexpr, ALL: tl.constexpr):
    """Step `step`: each lane adds its vector of four to its mean and M2. Lanes from WITH on have none; no lane is ALL or more."""
    before, m2_before = mean, m2
    values = in_vectors(tl.reshape(widened(x), [mean.numel * 4]), mean.numel)
    for position in tl.static_range(4):
        mean, m2 = welford_step(mean, m2, values[position], 1.0 / (4 * step + position + 1))
    if WITH < ALL:
        mean, m2 = tl.where(lane < WITH, mean, before), tl.where(lane < WITH, m2, m2_before)
    return mean, m2


@triton.jit
def _share(count: tl.constexpr, of_both: tl.constexpr):
    """What share `count` elements are: count * (1 / of_both), rounded twice to fp32. Of nothing it is zero, as ATen's moments are.

    The compiler computes the reciprocal in fp64 and rounds it to 24 bits (Veltkamp); the product is exact in fp64.
    """
    RECIPROCAL: tl.constexpr = 1.0 / of_both if of_both else 0.0
    SCALED: tl.constexpr = 536870913.0 * RECIPROCAL
    PRODUCT: tl.constexpr = count * (SCALED - (SCALED - RECIPROCAL))
    return tl.full([], PRODUCT, tl.float32)


@triton.jit
def _of_counts(mean_b, mean_a, m2_of_both, COUNT_B: tl.constexpr, COUNT_A: tl.constexpr):
    """`combined` of so many elements."""
    BOTH: tl.constexpr = COUNT_B + COUNT_A
    share_b = tl.full(mean_b.shape, _share(COUNT_B, BOTH), tl.float32)
    share_a = tl.full(mean_b.shape, _share(COUNT_A, BOTH), tl.float32)
    return combined(mean_b, mean_a, m2_of_both, share_b, share_a, tl.full(mean_b.shape, COUNT_A, tl.float32))


@triton.jit
def _of_lanes(mean_b, mean_a, m2_of_both, warp, lane, HALF: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr):
    """`combined` of lane i and lane i + HALF, where each warp has 2 * HALF lanes left.

    Of `SIZE // 4` vectors the first warps have one more in each lane than the last. In one warp, MIXED, the first IN_MIXED lanes
    have one more. A lane that is left has the elements of OF_LANE lanes: LOW of them in the mixed warp, or one vector more, HIGH.
    """
    OF_LANE: tl.constexpr = 16 // HALF
    FEWER: tl.constexpr = SIZE // 4 // LANES * OF_LANE * 4
    MORE: tl.constexpr = FEWER + OF_LANE * 4
    MIXED: tl.constexpr = SIZE // 4 % LANES // 32
    IN_MIXED: tl.constexpr = SIZE // 4 % 32
    LOW: tl.constexpr = FEWER + IN_MIXED // (2 * HALF) * 4
    HIGH: tl.constexpr = LOW + 4
    high_b = lane < IN_MIXED % (2 * HALF)
    high_a = lane + HALF < IN_MIXED % (2 * HALF)
    share_b = tl.where(high_b, _share(HIGH, HIGH + LOW), _share(LOW, LOW + LOW))
    share_b = tl.where(high_a, _share(HIGH, HIGH + HIGH), share_b)
    share_a = tl.where(high_b, _share(LOW, HIGH + LOW), _share(LOW, LOW + LOW))
    share_a = tl.where(high_a, _share(HIGH, HIGH + HIGH), share_a)
    count_a = tl.where(high_a, HIGH, LOW).to(tl.float32)
    # n / 2n is 1/2 in fp32 for lanes of up to 40 vectors each, and of no elements the moments are zero.
    share_b, share_a = tl.where(warp == MIXED, share_b, 0.5), tl.where(warp == MIXED, share_a, 0.5)
    count_a = tl.where(warp == MIXED, count_a, tl.where(warp < MIXED, MORE, FEWER).to(tl.float32))
    return combined(mean_b, mean_a, m2_of_both, share_b, share_a, count_a)


@triton.jit
def _of_two(moments, b: tl.constexpr, a: tl.constexpr, COUNT_B: tl.constexpr, COUNT_A: tl.constexpr):
    """`combined` of the moments b and a."""
    mean_b, m2_b = moments[b]
    mean_a, m2_a = moments[a]
    return _of_counts(mean_b, mean_a, m2_a + m2_b, COUNT_B, COUNT_A)


@triton.jit
def _by_warp(mean, m2, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """[ROWS * WARPS] -> the moments [ROWS] of each warp, which all threads have then."""
    means = unstack(tl.reshape(mean, [ROWS, WARPS, 1]), ROWS, WARPS, 1)
    m2s = unstack(tl.reshape(m2, [ROWS, WARPS, 1]), ROWS, WARPS, 1)
    warps = ()
    for warp in tl.static_range(WARPS):
        warps = warps + ((tl.reshape(means[warp], [ROWS]), tl.reshape(m2s[warp], [ROWS])),)
    return warps


@triton.jit
def _of_warps(sets, SIZE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Mean and M2 of each row from those of its warps, in sets."""
    EACH: tl.constexpr = SIZE // 4 // LANES * 32
    REST: tl.constexpr = SIZE // 4 % LANES
    COUNT_0: tl.constexpr = 4 * (EACH + (REST if REST < 32 else 32))
    COUNT_1: tl.constexpr = 4 * (EACH + (0 if REST < 32 else REST - 32 if REST < 64 else 32))
    COUNT_2: tl.constexpr = 4 * (EACH + (0 if REST < 64 else REST - 64 if REST < 96 else 32))
    COUNT_3: tl.constexpr = 4 * (EACH + (0 if REST < 96 else REST - 96))
    if LANES == 128:
        if len(sets) == 2:
            mean, m2 = _of_two(sets, 0, 1, COUNT_0, COUNT_2)
            halves_of_row = _by_warp(mean, m2, ROWS, 2)
        else:
            if len(sets) == 1:
                mean, m2 = sets[0]
                warps = _by_warp(mean, m2, ROWS, 4)
            else:
                warps = sets
            halves_of_row = (_of_two(warps, 0, 2, COUNT_0, COUNT_2), _of_two(warps, 1, 3, COUNT_1, COUNT_3))
        return _of_two(halves_of_row, 0, 1, COUNT_0 + COUNT_2, COUNT_1 + COUNT_3)
    else:
        # ATen's block has 128 threads: the moments of each warp are combined with those of a warp without elements. The share is
        # 1; an infinite square times no elements is NaN. Of one warp ATen does so twice, which changes nothing.
        if len(sets) == 1 and LANES == 64:
            mean, m2 = sets[0]
            warps = _by_warp(mean, m2, ROWS, 2)
        else:
            warps = sets
        mean, m2 = warps[0]
        nothing = tl.zeros([ROWS], tl.float32)
        first = _of_counts(mean, nothing, m2, COUNT_0, 0)
        if LANES == 64:
            mean, m2 = warps[1]
            return _of_two((first, _of_counts(mean, nothing, m2, COUNT_1, 0)), 0, 1, COUNT_0, COUNT_1)
        else:
            return first


@triton.jit
def _moments(
    tiles,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    SETS: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Mean and M2 of each row. The lanes are SETS sets of whole warps. A tile is a step of a part of the lanes of each warp of a
    set: with two PARTS a thread has both lanes of most pairs that are combined first."""
    STEP: tl.constexpr = SETS * PARTS
    WARPS: tl.constexpr = LANES // 32 // SETS
    OF_WARP: tl.constexpr = 32 // PARTS
    position = tl.arange(0, ROWS * WARPS * OF_WARP)
    warp, lane = position // OF_WARP % WARPS, position % OF_WARP
    sets = ()
    for of_set in tl.static_range(SETS):
        parts = ()
        for part in tl.static_range(PARTS):
            mean = tl.zeros([ROWS * WARPS * OF_WARP], tl.float32)
            m2 = tl.zeros([ROWS * WARPS * OF_WARP], tl.float32)
            for tile in tl.static_range(of_set * PARTS + part, TILES, STEP):
                mean, m2 = _with_vectors(
                    mean,
                    m2,
                    tiles[tile],
                    tile // STEP,
                    32 * warp + lane,
                    # Vectors of this step from the part's first lane on.
                    SIZE // 4 - tile // STEP * LANES - of_set * WARPS * 32 - part * OF_WARP,
                    32 * (WARPS - 1) + OF_WARP,
                )
            parts = parts + ((mean, m2),)
        sets = sets + (parts,)
    for level in tl.static_range(5):
        # At each level all sets exchange at once.
        halved = ()
        for of_set in tl.static_range(SETS):
            halved = halved + (_halved(sets[of_set], of_set * WARPS, 16 >> level, SIZE, ROWS, LANES, WARPS),)
        sets = halved
    moments = ()
    for of_set in tl.static_range(SETS):
        moments = moments + (sets[of_set][0],)
    return _of_warps(moments, SIZE, ROWS, LANES)


@triton.jit
def _halved(
    parts,
    FIRST: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Lanes i and i + HALF combined, in WARPS warps from FIRST on. Two parts hold one of the lanes each, one part holds both. The
    result is one part."""
    if len(parts) == 2:
        mean_b, m2_b = parts[0]
        mean_a, m2_a = parts[1]
        m2_of_both = m2_a + m2_b
    else:
        mean, m2 = parts[0]
        mean_b, mean_a, m2_of_both = halves(mean, m2, ROWS * WARPS, HALF)
    position = tl.arange(0, ROWS * WARPS * HALF)
    warp, lane = FIRST + position // HALF % WARPS, position % HALF
    return (_of_lanes(mean_b, mean_a, m2_of_both, warp, lane, HALF, SIZE, LANES),)


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
        HALVES: a tile has half of the lanes of each of its warps, see `_moments`.
        FEW: rows are so few that waiting decides their time: weight and bias of up to eight tiles are loaded with x.
        WEIGHT, BIAS: without them `weight_ptr` and `bias_ptr` are not accessed. A bias needs a weight.
    """
    tl.static_assert(WEIGHT or not BIAS, "without a weight ATen has another arithmetic for one element of four")
    # ATen's block has 128 threads, which read vectors of four elements. Whole warps of lanes without elements are left out.
    LANES: tl.constexpr = 32 if SIZE <= 128 else 64 if SIZE <= 256 else 128
    PARTS: tl.constexpr = 2 if HALVES else 1
    # Several sets, where this makes all lanes of a tile have elements. Of few rows a program takes one: tiles of a single warp
    # would leave two elements to a thread.
    ONE_SET: tl.constexpr = not HALVES or SIZE % 512 == 0 or SIZE % 64 != 0 or SIZE > 1024
    SETS: tl.constexpr = 1 if ONE_SET else 2 if SIZE % 256 == 0 else 1 if FEW else LANES // 32
    WARPS: tl.constexpr = LANES // 32 // SETS
    COLUMNS: tl.constexpr = 4 * LANES // SETS // PARTS
    # After the steps of all lanes the first REST lanes have one more vector. Their tiles are those of whole sets, and of the next
    # set those parts that begin among these lanes.
    REST: tl.constexpr = SIZE // 4 % LANES
    IN_SET: tl.constexpr = (REST % (LANES // SETS) + 32 // PARTS - 1) // (32 // PARTS)
    OF_REST: tl.constexpr = REST // (LANES // SETS) * PARTS + (IN_SET if IN_SET < PARTS else PARTS)
    TILES: tl.constexpr = SIZE // 4 // LANES * SETS * PARTS + OF_REST
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
    mean, m2 = _moments(tiles, SIZE, ROWS, LANES, SETS, PARTS, TILES)
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
