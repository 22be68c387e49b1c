"""GroupNorm's forward pass as ATen computes it (ATen/native/cuda/group_norm_kernel.cu)."""

import triton
import triton.language as tl

from .primitives import approximate_reciprocal, divide, mask_if, rounded, rsqrt
from .summation import unstack, welford_of_block, welford_step_by_division

# The bits of the smallest normal number, doubled, less one: of zero, whose sign is shifted out, they are the largest.
_SMALLEST_NORMAL = tl.constexpr((0x00800000 << 1) - 1)


@triton.jit
def _step(mean, m2, least, x, number, DIVIDED: tl.constexpr):
    """Step `number` of all lanes, from 0 on: each adds its element to its mean and M2. `least`: as `_lanes` returns it."""
    count = tl.full(mean.shape, 1.0, tl.float32) + tl.cast(number, tl.float32)
    mean, m2, added = welford_step_by_division(
        mean, m2, x.to(tl.float32), count, approximate_reciprocal(count), DIVIDED
    )
    if not DIVIDED:
        least = tl.minimum(least, (added.to(tl.uint32, bitcast=True) << 1) - 1)
    return mean, m2, least


@triton.jit
def _load_vectors(x_ptr, first, vectors, LANES: tl.constexpr, VECTOR: tl.constexpr, MASKED: tl.constexpr):
    """The elements of the vectors first, first + 1, ... of all lanes: VECTOR tensors [LANES]."""
    element = first * VECTOR + tl.arange(0, LANES * VECTOR)
    if MASKED:
        inside = element < vectors * VECTOR
        values = tl.load(x_ptr + element, mask=inside, other=0.0, eviction_policy="evict_last")
    else:
        values = tl.load(x_ptr + element, eviction_policy="evict_last")
    if VECTOR == 1:
        return (values,)
    else:
        elements = unstack(tl.reshape(values, [LANES, VECTOR, 1]), LANES, VECTOR, 1)
        found = ()
        for each in tl.static_range(VECTOR):
            found = found + (tl.reshape(elements[each], [LANES]),)
        return found


@triton.jit
def _lanes(x_ptr, size, LANES: tl.constexpr, STEPS: tl.constexpr, VECTOR: tl.constexpr, DIVIDED: tl.constexpr):
    """The mean and M2 of each lane, which takes the vectors lane, lane + LANES, ... of VECTOR elements in sequence.

    STEPS of them are read at once. Without DIVIDED, `least` below `_SMALLEST_NORMAL` or an M2 of NaN says that a quotient may
    have been none of those that `divide_by_reciprocal` rounds correctly.
    """
    lane = tl.arange(0, LANES)
    mean = tl.zeros([LANES], tl.float32)
    m2 = tl.zeros([LANES], tl.float32)
    least = tl.full([LANES], 0xFFFFFFFF, tl.uint32)
    vectors = size // VECTOR
    whole = vectors // (STEPS * LANES) * STEPS
    for first in range(0, whole, STEPS):
        steps = ()
        for step in tl.static_range(STEPS):
            steps = steps + _load_vectors(x_ptr, (first + step) * LANES, vectors, LANES, VECTOR, MASKED=False)
        for each in tl.static_range(STEPS * VECTOR):
            mean, m2, least = _step(mean, m2, least, steps[each], first * VECTOR + each, DIVIDED)
    # The rest, read at once too.
    for first in range(whole, (vectors + LANES - 1) // LANES, STEPS):
        rest = ()
        for step in tl.static_range(STEPS):
            rest = rest + _load_vectors(x_ptr, (first + step) * LANES, vectors, LANES, VECTOR, MASKED=True)
        for each in tl.static_range(STEPS * VECTOR):
            in_group = (first + each // VECTOR) * LANES + lane < vectors
            new_mean, new_m2, new_least = _step(mean, m2, least, rest[each], first * VECTOR + each, DIVIDED)
            mean, m2 = tl.where(in_group, new_mean, mean), tl.where(in_group, new_m2, m2)
            least = tl.where(in_group, new_least, least)
    return mean, m2, least


@triton.jit
def _statistics(x_ptr, size, eps, LANES: tl.constexpr, STEPS: tl.constexpr, VECTOR: tl.constexpr):
    """The mean of a group and rstd = rsqrt(variance + eps), fp32 [1]."""
    mean, m2, least = _lanes(x_ptr, size, LANES, STEPS, VECTOR, DIVIDED=False)
    uncertain = (least < _SMALLEST_NORMAL) | (m2 != m2)
    if tl.max(uncertain.to(tl.int32), axis=0) != 0:
        mean, m2, least = _lanes(x_ptr, size, LANES, 1, VECTOR, DIVIDED=True)
    elements = (size // VECTOR - tl.arange(0, LANES) + LANES - 1) // LANES * VECTOR
    mean, m2 = welford_of_block(mean, m2, elements.to(tl.float32), LANES)
    variance = divide(m2, tl.full([1], 1.0, tl.float32) * tl.cast(size, tl.float32))
    return mean, rsqrt(variance + eps)


@triton.jit
def _store_statistics(mean_ptr, rstd_ptr, group, mean, rstd, wanted):
    first = tl.arange(0, 1)
    mask = mask_if(first == 0, wanted)
    tl.store(mean_ptr + group + first, mean.to(mean_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + group + first, rstd.to(rstd_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tiles(channels, positions, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr):
    """The number of tiles of a group."""
    return (channels + CHANNELS - 1) // CHANNELS * ((positions + POSITIONS - 1) // POSITIONS)


@triton.jit
def _write_tile(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean,
    rstd,
    tile,
    channels,
    positions,
    CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """A tile [CHANNELS, POSITIONS] of a group's output; the pointers are the group's."""
    across = (positions + POSITIONS - 1) // POSITIONS
    channel = tile // across * CHANNELS + tl.arange(0, CHANNELS)
    position = tile % across * POSITIONS + tl.arange(0, POSITIONS)
    inside = (channel < channels)[:, None] & (position < positions)[None, :]
    offset = channel[:, None] * positions + position[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if not WEIGHT or SINGLE:
        y = (x - mean) * rstd
        if WEIGHT:
            weight = tl.load(weight_ptr + position, mask=position < positions, other=0.0).to(tl.float32)[None, :]
            if BIAS:
                bias = tl.load(bias_ptr + position, mask=position < positions, other=0.0).to(tl.float32)[None, :]
                y = tl.fma(y, tl.broadcast_to(weight, y.shape), tl.broadcast_to(bias, y.shape))
            else:
                y = y * weight
    else:
        scale = rstd * tl.load(weight_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
        shift = tl.zeros([CHANNELS], tl.float32)
        if BIAS:
            shift = tl.load(bias_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
        shift = shift - scale * mean
        y = tl.fma(tl.broadcast_to(scale[:, None], x.shape), x, tl.broadcast_to(shift[:, None], x.shape))
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["groups", "groups_of_sample", "channels", "units", "store_statistics", "eps"],
)
def group_norm_forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    groups: tl.int32,
    groups_of_sample: tl.int32,
    channels: tl.int32,
    units: tl.int32,
    store_statistics: tl.int32,
    eps: tl.float32,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    SINGLE: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """y = a * x + b with a = rstd * weight and b = bias - a * mean of each channel, mean and rstd those of its group.

    A program takes whole groups, reads each twice, the second time from its end, where the L2 still has it, and writes it.

    Args:
        groups: of all samples.
        channels: of a group; 1 if its elements need no distinction.
        units: a channel's positions, in units of UNIT elements, which show the compiler the alignment.
        store_statistics: mean and rstd are stored if this is 1.
        LANES: ATen's threads for a group: 32 below 512 elements, else 512.
        STEPS: vectors that a lane reads at once.
        VECTOR: elements of a vector, of which a group's size is a multiple: 1, or as ATen reads from torch 2.15 on.
        CHANNELS, POSITIONS: the tile of the output.
        WEIGHT, BIAS: without them `weight_ptr` and `bias_ptr` are not accessed. A bias needs a weight.
        SINGLE: a channel has one position, and y = ((x - mean) * rstd) * weight + bias. The positions are the channels.
        ROUNDED: y is computed with the mean and rstd of the dtype of x, as ATen does up to torch 2.11.
    """
    positions = units * UNIT
    # The compiler sees that groups begin at vectors.
    size = channels * positions // VECTOR * VECTOR
    tiles = _tiles(channels, positions, CHANNELS, POSITIONS)
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        start = tl.cast(group, tl.int64) * size
        first = group % groups_of_sample * (positions if SINGLE else channels)
        mean, rstd = _statistics(x_ptr + start, size, eps, LANES, STEPS, VECTOR)
        _store_statistics(mean_ptr, rstd_ptr, group, mean, rstd, store_statistics)
        if ROUNDED:
            mean, rstd = rounded(mean, x_ptr.dtype.element_ty), rounded(rstd, x_ptr.dtype.element_ty)
        for tile in range(tiles):
            _write_tile(
                x_ptr + start,
                weight_ptr + first,
                bias_ptr + first,
                y_ptr + start,
                mean,
                rstd,
                tiles - 1 - tile,
                channels,
                positions,
                CHANNELS,
                POSITIONS,
                WEIGHT,
                BIAS,
                SINGLE,
            )


@triton.jit(do_not_specialize=["units", "eps"])
def group_norm_statistics(
    x_ptr,
    statistics_ptr,
    units: tl.int32,
    eps: tl.float32,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
    UNIT: tl.constexpr,
):
    """The means of all groups and then their rstd, fp32: a program takes a group of `units` UNITs of elements."""
    group, groups = tl.program_id(0), tl.num_programs(0)
    size = units * UNIT // VECTOR * VECTOR
    mean, rstd = _statistics(x_ptr + tl.cast(group, tl.int64) * size, size, eps, LANES, STEPS, VECTOR)
    _store_statistics(statistics_ptr, statistics_ptr + groups, group, mean, rstd, 1)


@triton.jit(
    do_not_specialize=["groups", "groups_of_sample", "channels", "units", "parts", "store_statistics"],
)
def group_norm_output(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    statistics_ptr,
    groups: tl.int32,
    groups_of_sample: tl.int32,
    channels: tl.int32,
    units: tl.int32,
    parts: tl.int32,
    store_statistics: tl.int32,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """y as in `group_norm_forward`, from the mean and rstd of `group_norm_statistics`; `parts` programs share a group."""
    positions = units * UNIT
    group, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    start = tl.cast(group, tl.int64) * (channels * positions)
    first = group % groups_of_sample * channels
    sole = tl.arange(0, 1)
    mean, rstd = tl.load(statistics_ptr + group + sole), tl.load(statistics_ptr + groups + group + sole)
    _store_statistics(mean_ptr, rstd_ptr, group, mean, rstd, (part == 0).to(tl.int32) * store_statistics)
    if ROUNDED:
        mean, rstd = rounded(mean, x_ptr.dtype.element_ty), rounded(rstd, x_ptr.dtype.element_ty)
    for tile in range(part, _tiles(channels, positions, CHANNELS, POSITIONS), parts):
        _write_tile(
            x_ptr + start,
            weight_ptr + first,
            bias_ptr + first,
            y_ptr + start,
            mean,
            rstd,
            tile,
            channels,
            positions,
            CHANNELS,
            POSITIONS,
            WEIGHT,
            BIAS,
            SINGLE=False,
        )
