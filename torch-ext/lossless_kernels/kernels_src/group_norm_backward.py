"""GroupNorm's gradients as ATen computes them where channels have several positions (ATen/native/cuda/group_norm_kernel.cu)."""

import triton
import triton.language as tl

from .primitives import widened
from .summation import block_sum, sum_of_block, sum_of_tile, unstack


@triton.jit
def _load_tile(ptr, channel, position, channels, positions, MASKED: tl.constexpr, EVICTED: tl.constexpr):
    """The elements of these channels [CHANNELS] and positions [LANES]; MASKED: some of the positions may not exist."""
    inside = tl.broadcast_to((channel < channels)[:, None], [channel.shape[0], position.shape[0]])
    if MASKED:
        inside = inside & (position < positions)[None, :]
    offset = channel[:, None] * positions + position[None, :]
    return tl.load(ptr + offset, mask=inside, other=0.0, eviction_policy=EVICTED)


@triton.jit
def _load_vectors(
    ptr, channel, first, channels, vectors, LANES: tl.constexpr, VECTOR: tl.constexpr, MASKED: tl.constexpr
):
    """The elements of the vectors first, first + 1, ... of all lanes: VECTOR tensors [CHANNELS, LANES]."""
    CHANNELS: tl.constexpr = channel.shape[0]
    position = first * VECTOR + tl.arange(0, LANES * VECTOR)
    tile = _load_tile(ptr, channel, position, channels, vectors * VECTOR, MASKED, EVICTED="evict_last")
    if VECTOR == 1:
        return (tile,)
    else:
        elements = unstack(tl.reshape(tile, [CHANNELS * LANES, VECTOR, 1]), CHANNELS * LANES, VECTOR, 1)
        found = ()
        for each in tl.static_range(VECTOR):
            found = found + (tl.reshape(elements[each], [CHANNELS, LANES]),)
        return found


@triton.jit
def _add_steps(
    sums,
    dy_ptr,
    x_ptr,
    channel,
    start,
    channels,
    vectors,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
    MASKED: tl.constexpr,
):
    """STEPS steps of all lanes, read at once: each adds the elements of its vectors to both of its sums."""
    ds, db = sums
    dys = ()
    xs = ()
    for step in tl.static_range(STEPS):
        first = start + step * LANES
        dys = dys + _load_vectors(dy_ptr, channel, first, channels, vectors, LANES, VECTOR, MASKED)
        xs = xs + _load_vectors(x_ptr, channel, first, channels, vectors, LANES, VECTOR, MASKED)
    for each in tl.static_range(STEPS * VECTOR):
        dy = widened(dys[each])
        ds = tl.fma(dy, widened(xs[each]), ds)
        db = db + dy
    return ds, db


@triton.jit
def _channel_sums(
    dy_ptr,
    x_ptr,
    channel,
    channels,
    positions,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """ds = sum(dy * x) and db = sum(dy) over the positions of each channel: [CHANNELS] each.

    Lane l adds the vectors l, l + LANES, ... in sequence. Zeros behind the last position change no sum but the sign of a
    zero, and what follows adds each sum to +0.
    """
    sums = tl.zeros([CHANNELS, LANES], tl.float32), tl.zeros([CHANNELS, LANES], tl.float32)
    vectors = positions // VECTOR
    whole = vectors // (STEPS * LANES) * (STEPS * LANES)
    for start in range(0, whole, STEPS * LANES):
        sums = _add_steps(sums, dy_ptr, x_ptr, channel, start, channels, vectors, LANES, STEPS, VECTOR, MASKED=False)
    if whole < vectors:
        sums = _add_steps(sums, dy_ptr, x_ptr, channel, whole, channels, vectors, LANES, STEPS, VECTOR, MASKED=True)
    ds, db = sums
    # With eight channels or more an exchange at each level takes less time (H200).
    ONCE: tl.constexpr = CHANNELS <= 4
    ds = sum_of_tile(tl.reshape(ds, [CHANNELS * LANES]), CHANNELS, LANES, EXCHANGE_ONCE=ONCE)
    return ds, sum_of_tile(tl.reshape(db, [CHANNELS * LANES]), CHANNELS, LANES, EXCHANGE_ONCE=ONCE)


@triton.jit
def _coefficients(
    ds_ptr, db_ptr, weight_ptr, mean, rstd, channels, positions, WEIGHT: tl.constexpr, LANES: tl.constexpr
):
    """c2 and c3 of a group [1], from the sums of its channels: dx = (rstd * weight) * dy + c2 * x + c3.

    Lane l of LANES adds the channels l, l + LANES, ... in sequence.
    """
    of_products = tl.zeros([LANES], tl.float32)
    of_terms = tl.zeros([LANES], tl.float32)
    for first in range(0, channels, LANES):
        channel = first + tl.arange(0, LANES)
        ds = tl.load(ds_ptr + channel, mask=channel < channels, other=0.0)
        db = tl.load(db_ptr + channel, mask=channel < channels, other=0.0)
        if WEIGHT:
            weight = tl.load(weight_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
            # A lane without a channel keeps its sum: adding zero would turn an underflow's -0 into +0.
            of_products = tl.where(channel < channels, tl.fma(weight, ds, of_products), of_products)
            of_terms = tl.where(channel < channels, tl.fma(weight, db, of_terms), of_terms)
        else:
            of_products = of_products + ds
            of_terms = of_terms + db
    if LANES == 32:  # Eager adds no zeros to the sum of a single warp, which may be -0.
        of_products, of_terms = sum_of_block(of_products, LANES), sum_of_block(of_terms, LANES)
    else:
        of_products, of_terms = sum_of_tile(of_products, 1, LANES), sum_of_tile(of_terms, 1, LANES)
    share = tl.div_rn(1.0, tl.cast(channels * positions, tl.float32))
    # Triton computes -x as 0 - x, which is +0 for x = +0.
    c2 = ((tl.fma(of_terms, mean, of_products * -1.0) * rstd) * rstd) * rstd * share
    return c2, tl.fma(c2 * -1.0, mean, ((of_terms * rstd) * share) * -1.0)


@triton.jit
def _store_dx(
    dy_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    rstd,
    c2,
    c3,
    channel,
    start,
    channels,
    positions,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """STEPS tiles [CHANNELS, WIDTH] of dx, from position `start` on; the pointers are the group's."""
    dys = ()
    xs = ()
    for step in tl.static_range(STEPS):
        position = start + step * WIDTH + tl.arange(0, WIDTH)
        dys = dys + (_load_tile(dy_ptr, channel, position, channels, positions, MASKED=True, EVICTED="evict_first"),)
        xs = xs + (_load_tile(x_ptr, channel, position, channels, positions, MASKED=True, EVICTED="evict_first"),)
    c1 = tl.broadcast_to(rstd, channel.shape)
    if WEIGHT:
        c1 = rstd * tl.load(weight_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    for step in tl.static_range(STEPS):
        position = start + step * WIDTH + tl.arange(0, WIDTH)
        dy, x = widened(dys[step]), widened(xs[step])
        dx = tl.fma(tl.broadcast_to(c1[:, None], dy.shape), dy, c2[:, None] * x) + c3[:, None]
        inside = (channel < channels)[:, None] & (position < positions)[None, :]
        tl.store(dx_ptr + channel[:, None] * positions + position[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_statistics(mean_ptr, rstd_ptr, group):
    """The mean and rstd of a group, fp32 [1]."""
    sole = group + tl.arange(0, 1)
    return tl.load(mean_ptr + sole).to(tl.float32), tl.load(rstd_ptr + sole).to(tl.float32)


@triton.jit(do_not_specialize=["groups", "groups_of_sample", "channels", "units"])
def group_norm_backward(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    dx_ptr,
    groups: tl.int32,
    groups_of_sample: tl.int32,
    channels: tl.int32,
    units: tl.int32,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
    CHANNEL_LANES: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """dx = (rstd * weight) * dy + c2 * x + c3, and the sums ds = sum(dy * x) and db = sum(dy) of each channel.

    With a = sum(weight * ds) and b = sum(weight * db) over a group's channels, c2 = (b * mean - a) * rstd**3 / size and
    c3 = -c2 * mean - b * rstd / size; size is a group's number of elements.

    A program takes whole groups, and reads each twice, the second time from its end, where the L2 still has it.

    Args:
        sums_ptr: ds and then db of all channels, fp32.
        groups: of all samples.
        channels: of a group.
        units: a channel's positions, in units of UNIT elements, which show the compiler the alignment.
        CHANNELS: that a program takes at once.
        LANES: ATen's threads for a channel's positions: 32 below 512, else 512.
        STEPS: vectors that a lane reads at once.
        VECTOR: elements of a vector: 1, or as ATen reads from torch 2.15 on.
        CHANNEL_LANES: ATen's threads for a group's channels: 32 below 512, else 512.
        WEIGHT: without it `weight_ptr` is not accessed.
    """
    positions = units * UNIT
    db_ptr = sums_ptr + tl.cast(groups, tl.int64) * channels
    tiles = (channels + CHANNELS - 1) // CHANNELS
    WIDTH: tl.constexpr = LANES * VECTOR
    parts = (positions + STEPS * WIDTH - 1) // (STEPS * WIDTH)
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        first = tl.cast(group, tl.int64) * channels
        start = first * positions
        mean, rstd = _load_statistics(mean_ptr, rstd_ptr, group)
        for tile in range(tiles):
            channel = tile * CHANNELS + tl.arange(0, CHANNELS)
            ds, db = _channel_sums(
                dy_ptr + start, x_ptr + start, channel, channels, positions, CHANNELS, LANES, STEPS, VECTOR
            )
            tl.store(sums_ptr + first + channel, ds, mask=channel < channels)
            tl.store(db_ptr + first + channel, db, mask=channel < channels)
        # Other threads read the sums.
        tl.debug_barrier()
        weight_of_group = weight_ptr + group % groups_of_sample * channels
        c2, c3 = _coefficients(
            sums_ptr + first, db_ptr + first, weight_of_group, mean, rstd, channels, positions, WEIGHT, CHANNEL_LANES
        )
        for tile in range(tiles):
            channel = (tiles - 1 - tile) * CHANNELS + tl.arange(0, CHANNELS)
            for part in range(parts):
                _store_dx(
                    dy_ptr + start,
                    x_ptr + start,
                    weight_of_group,
                    dx_ptr + start,
                    rstd,
                    c2,
                    c3,
                    channel,
                    (parts - 1 - part) * (STEPS * WIDTH),
                    channels,
                    positions,
                    WIDTH,
                    STEPS,
                    WEIGHT,
                )


@triton.jit(do_not_specialize=["channels", "units"])
def group_norm_channel_sums(
    dy_ptr,
    x_ptr,
    sums_ptr,
    channels: tl.int64,
    units: tl.int32,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The sums of `group_norm_backward` alone; a program takes CHANNELS of the `channels` of all samples."""
    positions = units * UNIT
    first = tl.program_id(0).to(tl.int64) * CHANNELS
    start = first * positions
    channel = tl.arange(0, CHANNELS)
    ds, db = _channel_sums(
        dy_ptr + start, x_ptr + start, channel, channels - first, positions, CHANNELS, LANES, STEPS, VECTOR
    )
    tl.store(sums_ptr + first + channel, ds, mask=first + channel < channels)
    tl.store(sums_ptr + channels + first + channel, db, mask=first + channel < channels)


@triton.jit(do_not_specialize=["groups", "groups_of_sample", "channels", "units", "parts"])
def group_norm_input_gradient(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    dx_ptr,
    groups: tl.int32,
    groups_of_sample: tl.int32,
    channels: tl.int32,
    units: tl.int32,
    parts: tl.int32,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    VECTOR: tl.constexpr,
    CHANNEL_LANES: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """dx as in `group_norm_backward`, from the sums of `group_norm_channel_sums`; `parts` programs share a group."""
    positions = units * UNIT
    group, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    first = tl.cast(group, tl.int64) * channels
    start = first * positions
    db_ptr = sums_ptr + tl.cast(groups, tl.int64) * channels
    mean, rstd = _load_statistics(mean_ptr, rstd_ptr, group)
    weight_of_group = weight_ptr + group % groups_of_sample * channels
    c2, c3 = _coefficients(
        sums_ptr + first, db_ptr + first, weight_of_group, mean, rstd, channels, positions, WEIGHT, CHANNEL_LANES
    )
    WIDTH: tl.constexpr = LANES * VECTOR
    across = (positions + STEPS * WIDTH - 1) // (STEPS * WIDTH)
    for tile in range(part, (channels + CHANNELS - 1) // CHANNELS * across, parts):
        _store_dx(
            dy_ptr + start,
            x_ptr + start,
            weight_of_group,
            dx_ptr + start,
            rstd,
            c2,
            c3,
            tile // across * CHANNELS + tl.arange(0, CHANNELS),
            tile % across * (STEPS * WIDTH),
            channels,
            positions,
            WIDTH,
            STEPS,
            WEIGHT,
        )


@triton.jit(do_not_specialize=["samples", "channels", "channels_of_group"])
def group_norm_vector_gradients(
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    dweight_ptr,
    dbias_ptr,
    samples: tl.int32,
    channels: tl.int32,
    channels_of_group: tl.int32,
    THREADS: tl.constexpr,
    RUN: tl.constexpr,
    COLUMNS: tl.constexpr,
    DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr,
):
    """dweight = sum((ds - db * mean) * rstd) and dbias = sum(db) over samples, ds and db the sums of `group_norm_backward`.

    THREADS of ATen's threads share a channel: 1 for up to 128 samples, else 32. Thread t adds the samples t, t + THREADS, ...
    in sequence, and a halving tree the threads. A program takes COLUMNS channels.

    Args:
        channels: of a sample.
        RUN: samples that a thread reads at once.
        DWEIGHT, DBIAS: which of them are needed.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    group = column // channels_of_group
    groups = channels // channels_of_group
    db_ptr = sums_ptr + tl.cast(samples, tl.int64) * channels
    dweight = tl.zeros([THREADS, COLUMNS], tl.float32)
    dbias = tl.zeros([THREADS, COLUMNS], tl.float32)
    thread = tl.arange(0, THREADS)[:, None]
    for start in range(0, samples, RUN * THREADS):
        found = ()
        for each in tl.static_range(RUN):
            sample = start + each * THREADS + thread
            inside = (sample < samples) & (column < channels)[None, :]
            offset = tl.cast(sample, tl.int64) * channels + column[None, :]
            db = tl.load(db_ptr + offset, mask=inside, other=0.0)
            if DWEIGHT:
                of_group = tl.cast(sample, tl.int64) * groups + group[None, :]
                ds = tl.load(sums_ptr + offset, mask=inside, other=0.0)
                mean = tl.load(mean_ptr + of_group, mask=inside, other=0.0)
                found = found + ((db, ds, mean, tl.load(rstd_ptr + of_group, mask=inside, other=0.0)),)
            else:
                found = found + ((db,),)
        for each in tl.static_range(RUN):
            db = found[each][0]
            dbias = dbias + db
            if DWEIGHT:
                term = tl.fma(db * -1.0, found[each][2].to(tl.float32), found[each][1])
                total = tl.fma(term, found[each][3].to(tl.float32), dweight)
                # As in `_coefficients`.
                dweight = tl.where(start + each * THREADS + thread < samples, total, dweight)
    if DWEIGHT:
        total = block_sum(dweight, THREADS, COLUMNS).to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + column, total, mask=column < channels)
    if DBIAS:
        total = block_sum(dbias, THREADS, COLUMNS).to(dbias_ptr.dtype.element_ty)
        tl.store(dbias_ptr + column, total, mask=column < channels)
