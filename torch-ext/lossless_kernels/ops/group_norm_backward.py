"""The gradients of GroupNorm, with the bits of ATen's operator `native_group_norm_backward`."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

import torch
from torch.nn import functional

from ..core import launch, norms, plans, proof
from ..core.domain import allocator, are_as_saved, layouts_of
from ..core.layout import contiguous_strides
from ..core.reduction import next_power_of_two
from .affine_norm import Gradients, Needs
from .group_norm_shape import Shape, sizes_of, takes_vectors, vector_of

if launch.AVAILABLE:
    from ..kernels_src.group_norm_backward import (
        group_norm_backward,
        group_norm_channel_sums,
        group_norm_input_gradient,
        group_norm_vector_gradients,
    )

# ATen's operator.
eager = torch.ops.aten.native_group_norm_backward

# Warps of a program by the most bytes of a group of dy, and the most elements that a lane reads at once. Where lanes read vectors,
# a thread has about this many elements, and a program of several warps at least this many channels, at a time.
_WARPS = {2 << 10: 1, 40 << 10: 4, 96 << 10: 8}
_MOST_WARPS, _STEPS = 16, 8
_OF_THREAD_IN_VECTORS, _LEAST_CHANNELS_IN_VECTORS = 32, 2
# The L2 of a multiprocessor's share that holds the groups of its programs, the least programs that are launched for a
# multiprocessor, and the most warps.
_L2_BYTES, _LEAST_PROGRAMS, _WARPS_OF_MULTIPROCESSOR = 256 << 10, 2, 64
# From this size on groups that are fewer than the multiprocessors are shared by several programs each.
_SPLIT_SIZE = 1 << 13
# By the threads for samples the channels of a program, the samples that a thread reads at once, and the warps.
_OF_VECTORS = {1: (8, 16, 1), norms.WARP: (4, 16, 4)}
# The most warps of a program of a split group. Where ATen's threads fill a block, each sums a single channel.
_SPLIT_WARPS = 8


@dataclass(frozen=True)
class Kind:
    """The properties that the kernels are compiled for.

    Attributes:
        unit: elements that a vector of 16 bytes and all channels have in common.
        lanes: ATen's threads for a channel's positions.
        channel_lanes: ATen's threads for a group's channels.
        channels: of a tile.
        steps: vectors that a lane reads at once.
        vector: elements of a vector.
        warps: of a program.
        weight: whether there is one.
        needs: which gradients are computed.
        threads: ATen's threads for the samples; 0 without gradients of weight and bias.
        split: whether several programs share a group.
    """

    dtype: torch.dtype
    unit: int
    lanes: int
    channel_lanes: int
    channels: int
    steps: int
    vector: int
    warps: int
    weight: bool
    needs: Needs
    threads: int
    split: bool

    @classmethod
    def of(
        cls, dtype: torch.dtype, shape: Shape, weight: bool, needs: Needs, split: bool, in_vectors: bool = False
    ) -> "Kind":
        """`in_vectors`: as `takes_vectors` returns it."""
        elements, vector = 16 // dtype.itemsize, vector_of(shape.positions, dtype, in_vectors)
        lanes, channel_lanes = norms.block_threads(shape.positions), norms.block_threads(shape.channels)
        bytes_of_group = shape.size * dtype.itemsize
        warps = next((warps for most, warps in _WARPS.items() if bytes_of_group <= most), _MOST_WARPS)
        warps = min(warps, _SPLIT_WARPS) if split else warps
        steps = min(next_power_of_two(-(-shape.positions // (lanes * vector))), max(_STEPS // vector, 1))
        of_thread = _OF_THREAD_IN_VECTORS if vector > 1 else elements * steps
        least = _LEAST_CHANNELS_IN_VECTORS if vector > 1 and warps > 1 else 1
        channels = max(32 * warps * of_thread // (lanes * vector * steps), least)
        channels = min(next_power_of_two(shape.channels), channels)
        threads = norms.sample_threads(shape.samples) if any(needs[1:]) else 0
        unit, of_lane = math.gcd(shape.positions, elements), (steps, vector)
        return cls(dtype, unit, lanes, channel_lanes, channels, *of_lane, warps, weight, needs, threads, split)

    def launches(self, shape: Shape, device: torch.device, most_programs: int = launch.MAX_PROGRAMS) -> "Launches":
        """Those of a call of the kind. At most `most_programs` programs take the groups in turn."""
        units, channels, gpu = shape.positions // self.unit, shape.rows * shape.channels, plans.gpu(device)
        of_lane = {"LANES": self.lanes, "STEPS": self.steps, "VECTOR": self.vector}
        sums = {"UNIT": self.unit, "CHANNELS": self.channels, **of_lane}
        of_input = {**sums, "CHANNEL_LANES": self.channel_lanes, "WEIGHT": self.weight}
        of_inputs = (self.dtype,) * 5
        scalars = shape.rows, shape.groups, shape.channels, units
        both = channel_sums = input_gradient = vectors = None
        if self.needs[0] and not self.split:
            programs = min(_programs(shape, self, gpu), most_programs)
            dtypes = (*of_inputs, torch.float32, self.dtype)
            both = launch.bind(group_norm_backward, of_input, self.warps, device, dtypes, programs, *scalars)
        else:
            dtypes, programs = (self.dtype, self.dtype, torch.float32), -(-channels // self.channels)
            if self.split and self.lanes == norms.BLOCK:
                sums, warps, programs = {**sums, "CHANNELS": 1}, _SPLIT_WARPS, channels
            else:
                warps = self.warps
            of_sums = sums, warps, device, dtypes, programs
            channel_sums = launch.bind(group_norm_channel_sums, *of_sums, channels, units)
        if self.needs[0] and self.split:
            tiles = -(-shape.channels // self.channels) * -(-shape.positions // (self.steps * self.lanes * self.vector))
            parts = min(tiles, -(-_WARPS_OF_MULTIPROCESSOR // self.warps * gpu.multiprocessors // shape.rows))
            dtypes, programs = (*of_inputs, torch.float32, self.dtype), shape.rows * parts
            of_parts = of_input, self.warps, device, dtypes, programs
            input_gradient = launch.bind(group_norm_input_gradient, *of_parts, *scalars, parts)
        if self.threads:
            of_weight, of_bias = self.needs[1:]
            columns, run, warps = _OF_VECTORS[self.threads]
            constants = {
                "THREADS": self.threads,
                "RUN": run,
                "COLUMNS": columns,
                "DWEIGHT": of_weight,
                "DBIAS": of_bias,
            }
            of_sample, two = shape.groups * shape.channels, (self.dtype, self.dtype)
            of_columns = constants, warps, device, (*two, torch.float32, *two), -(-of_sample // columns)
            sizes = shape.samples, of_sample, shape.channels
            vectors = launch.bind(group_norm_vector_gradients, *of_columns, *sizes)
        return Launches(both, channel_sums, input_gradient, vectors)


def _programs(shape: Shape, kind: Kind, gpu: plans.Gpu) -> int:
    """So many that the L2 still has dy and x of a group when they are read for the second time."""
    most = _WARPS_OF_MULTIPROCESSOR // kind.warps
    of_multiprocessor = min(max(_L2_BYTES // (2 * shape.size * kind.dtype.itemsize), _LEAST_PROGRAMS), most)
    return min(shape.rows, of_multiprocessor * gpu.multiprocessors)


class Launches(NamedTuple):
    """The launches of a call, None where there is none.

    Args:
        both: for dy, x, weight, mean, rstd, the sums of channels and dx.
        channel_sums: for dy, x and the sums.
        input_gradient: as `both`, after `channel_sums`.
        vectors: for mean, rstd, the sums, dweight and dbias.
    """

    both: Optional[launch.Launch]
    channel_sums: Optional[launch.Launch]
    input_gradient: Optional[launch.Launch]
    vectors: Optional[launch.Launch]

    def run(self, dy, x, weight, mean, rstd, sums, dx, dweight, dbias) -> None:
        """x stands for a weight that there is not, and for what is not needed."""
        if self.both is not None:
            self.both(dy, x, weight, mean, rstd, sums, dx)
        else:
            self.channel_sums.call_3(dy, x, sums)
        if self.input_gradient is not None:
            self.input_gradient(dy, x, weight, mean, rstd, sums, dx)
        if self.vectors is not None:
            self.vectors.call_5(mean, rstd, sums, dweight, dbias)


@dataclass(eq=False)
class Backward:
    """The gradients of all calls of the same shapes, dtypes and device.

    Args:
        in_vectors: whether ATen reads dy and x in vectors if both begin at multiples of 16 bytes, and else not.
        layouts: of x and the weight.
        empty_dx: for a tensor like x.
        empty_sums: for ds and db of all channels.
        empty_vector: for `[channels]`.
    """

    needs: Needs
    in_vectors: bool
    layouts: tuple
    launches: Launches
    empty_dx: Callable[[], torch.Tensor]
    empty_sums: Callable[[], torch.Tensor]
    empty_vector: Callable[[], torch.Tensor]

    def fits(self, dy, x, weight) -> bool:
        """Whether the tensors are those that the kernels were chosen for. Autograd does not notice if `.to(dtype)` or a new
        `.data` has changed a weight since the forward pass."""
        if self.in_vectors and (dy.data_ptr() | x.data_ptr()) % 16:
            return False
        return dy.dtype == x.dtype and are_as_saved(self.layouts, x, weight)

    def __call__(self, dy, x, mean, rstd, weight, bias=None) -> Gradients:
        """No gradient depends on the bias."""
        of_input, of_weight, of_bias = self.needs
        dx = self.empty_dx() if of_input else x
        dweight, dbias = self.empty_vector() if of_weight else x, self.empty_vector() if of_bias else x
        self.launches.run(dy, x, x if weight is None else weight, mean, rstd, self.empty_sums(), dx, dweight, dbias)
        return Gradients(dx if of_input else None, dweight if of_weight else None, dbias if of_bias else None)


def resolve(x, groups: int, weight, needs: Needs) -> Optional[Backward]:
    """The gradients of a call in the forward kernel's domain; None if ATen's operator must compute them."""
    samples, channels, positions = sizes_of(x)
    shape = Shape(samples, groups, channels // groups, positions)
    if positions == 1 or samples * channels > launch.MAX_PROGRAMS:
        return None
    split = needs[0] and shape.is_split(plans.gpu(x.device), _SPLIT_SIZE)
    in_vectors = takes_vectors(x.device)
    if in_vectors is None:
        return None
    kind = Kind.of(x.dtype, shape, weight is not None, needs, split, in_vectors)
    if not proof_shapes(kind) or not _proved(kind, x.device):
        return None
    return Backward(
        needs,
        kind.vector > 1,
        layouts_of(x, weight),
        kind.launches(shape, x.device),
        allocator(x.shape, contiguous_strides(x.shape), x.dtype, x.device),
        allocator((2, samples, channels), (samples * channels, channels, 1), torch.float32, x.device),
        allocator((channels,), (1,), x.dtype, x.device),
    )


# Proof


def _proved(kind: Kind, device) -> bool:
    names = ("input", "weight", "bias")
    what = " and ".join(name for name, need in zip(names, kind.needs) if need)
    where = f"{kind.dtype}, gradients of {what}, tiles of {kind.channels} channels and {kind.lanes} positions"
    return proof.kernel_is_proved(
        ("group_norm_backward", kind, device),
        proof.Subject(functional.group_norm, device, where, "group_norm"),
        functools.partial(_comparisons, kind, device),
    )


# dx is compared in at least so many elements: of 16 bits one in about 100,000 shows how its last products round. A kind's
# smallest shape and its longer ones have at most so many.
_PROOF_ELEMENTS, _MOST_PROOF_ELEMENTS, _MOST_LONGER_ELEMENTS = 1 << 20, 1 << 25, 1 << 22
_LEAST_GROUPS = 2
_PROOF_EPS = 1e-5


# Channels, and positions in units, of the shapes among which those of a proof are. Around powers of two properties change: a
# kind may have no more than those.
_NUMBERS = sorted(
    {int(1.2**power) for power in range(68)}.union(*(range(2**power - 1, 2**power + 2) for power in range(2, 13)))
)


@functools.cache
def proof_shapes(kind: Kind) -> tuple[Shape, ...]:
    """The smallest shape of the kind; if they are no larger than a proof may be, one of up to four times its size, and one of
    many channels. None if all are too large."""
    samples = max(norms.fewest_samples(kind.threads), 9)

    def of(channels: int, positions: int) -> Kind:
        shape = Shape(samples, _LEAST_GROUPS, channels, positions)
        return Kind.of(kind.dtype, shape, kind.weight, kind.needs, kind.split, kind.vector > 1)

    def is_alike(other: Kind) -> bool:
        return (other.unit, other.lanes, other.steps, other.vector) == (kind.unit, kind.lanes, kind.steps, kind.vector)

    # The number of channels changes none of these. Powers of two are whole steps of all lanes.
    of_positions = {kind.unit * (number | 1) for number in _NUMBERS} | {32, 256, 512, 1024, 4096}
    of_positions = [each for each in of_positions - {1} if is_alike(of(1, each))]
    most = _MOST_PROOF_ELEMENTS // (samples * _LEAST_GROUPS)
    shapes = [
        Shape(samples, _LEAST_GROUPS, channels, positions)
        for positions in of_positions
        for channels in _NUMBERS
        if channels * positions <= most and of(channels, positions) == kind
    ]
    shapes.sort(key=lambda shape: (shape.size, shape.channels))
    longer = [each for each in shapes[1:] if each.rows * each.size <= _MOST_LONGER_ELEMENTS]
    of_size = [each for each in longer if each.size <= 4 * shapes[0].size]
    of_many_channels = sorted(longer, key=lambda shape: shape.channels)
    return (*shapes[:1], *of_size[-1:], *of_many_channels[-1:])


def _comparisons(kind: Kind, device) -> Iterator[proof.Comparison]:
    for shape in proof_shapes(kind):
        groups = max(_PROOF_ELEMENTS // (shape.size * shape.samples), _LEAST_GROUPS)
        shape = Shape(shape.samples, groups, shape.channels, shape.positions)
        # Along an axis of one there is nothing to cancel.
        for axis in (None, 0, *([2] if shape.channels > 1 else []), 3):
            yield from _comparisons_of(kind, shape, device, axis)


def _comparisons_of(kind: Kind, shape: Shape, device, axis: Optional[int]) -> Iterator[proof.Comparison]:
    dy, x, weight = (each.to(kind.dtype) for each in _sample(kind, shape, device, axis))
    sizes = shape.samples, shape.groups * shape.channels, shape.positions
    dy, x, weight = dy.reshape(sizes), x.reshape(sizes), weight.reshape(-1) if kind.weight else None
    _, mean, rstd = torch.native_group_norm(x, weight, None, *sizes, shape.groups, _PROOF_EPS)
    found = [torch.full(size, math.nan, dtype=kind.dtype, device=device) for size in (sizes, sizes[1:2], sizes[1:2])]
    sums = torch.full((2, *sizes[:2]), math.nan, dtype=torch.float32, device=device)
    # A program takes one group or several in turn: here both.
    launches = kind.launches(shape, device, shape.rows - shape.rows // 3)
    launches.run(dy, x, x if weight is None else weight, mean, rstd, sums, *found)
    expected = eager(dy, x, mean, rstd, weight, *sizes, shape.groups, list(kind.needs))
    names = "the input's gradient", "the weight's gradient", "the bias's gradient"
    yield from ((name, *pair) for name, need, *pair in zip(names, kind.needs, found, expected) if need)


def _sample(kind: Kind, shape: Shape, device, axis: Optional[int]):
    """dy and x [samples, groups, channels, positions] and the weight [groups, channels].

    Along `axis` the second half has the numbers of the first elsewhere, and the opposite dy: sums are zero but for rounding
    errors, which are all that remains of them. Where dy is zero, dx consists of a group's sums. Without an axis groups have
    all scales, and some have infinities, NaN and numbers beyond fp16.
    """
    sizes = shape.samples, shape.groups, shape.channels, shape.positions
    source = proof.generator(device, shape.size + (0 if axis is None else axis))
    x, weight = proof.normal(source, *sizes), proof.normal(source, *sizes[1:3])
    if axis is None:
        group = torch.arange(shape.rows, device=device).view(*sizes[:2], 1, 1)
        x = (x + proof.normal(source, *sizes[:2], 1, 1)) * torch.exp2(group % 16 - 8.0)
        dy = proof.normal(source, *sizes)
        rows, of_rows = x.flatten(0, 1), dy.flatten(0, 1)
        of_rows[1], of_rows[2], rows[3], rows[6, 0, 0] = 0.0, -0.0, 3.0, 6e4
        of_rows[4, 0, 0], of_rows[5, 0, 1] = math.inf, math.nan
        return dy, x, weight
    like = torch.empty(sizes, dtype=kind.dtype, device=device)
    dy = proof.random_like(like, source, exponents=proof.WIDE).float()
    # Small numbers have a large rstd: in fp16 dx would be subnormal.
    x, half = x / 256.0, sizes[axis] // 2
    if shape.positions > 3:
        dy[..., 0] = 0.0
    first, second, rest = (
        (*(slice(None),) * axis, each) for each in (slice(half), slice(half, 2 * half), slice(2 * half, None))
    )
    order = torch.randperm(half, generator=source, device=device)
    x[second], dy[second], dy[rest] = x[first].index_select(axis, order), -dy[first].index_select(axis, order), 0.0
    if axis == 2:
        weight[:, half : 2 * half] = weight[:, :half][:, order]
    return dy, x, weight
