"""GroupNorm that returns the bits of `F.group_norm`, and of its gradients."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch import is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ..core import launch, norms, operators, plans, proof
from ..core.calls import Calls, Outside
from ..core.declarations import WARMUP, Warmup
from ..core.domain import (
    FLOAT_DTYPES,
    PLAIN_TYPES,
    allocator,
    at_trace_time,
    check_floating,
    layouts_of,
    runs_kernels,
)
from ..core.layout import contiguous_strides
from ..core.reduction import next_power_of_two
from ..core.torch_internals import apply_of, dispatch_modes, forward_ad
from . import group_norm_backward
from .affine_norm import (
    AffineNorm,
    NormFunction,
    Training,
    attribute_of,
    fake_gradients,
    given,
    is_traceable,
    register_gradient,
    through_autograd,
)
from .group_norm_shape import SPLIT_SIZE, Shape, is_channels_last, sizes_of, takes_vectors, vector_of

if launch.AVAILABLE:
    from ..kernels_src.group_norm import group_norm_forward, group_norm_output, group_norm_statistics


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Group normalisation: bit for bit what `torch.nn.functional.group_norm` of the same arguments returns.

    `(input - mean) * rsqrt(variance + eps) * weight + bias`, mean and variance over a sample's channels of one group and
    all their positions, in fp32. Gradients have the bits of ATen's `native_group_norm_backward`.

    Args:
        input: `[samples, channels, *positions]`, any real floating dtype.
        num_groups: divides the channels.
        weight: `[channels]`, of the dtype of input, or None.
        bias: like weight.
        eps: added to the variance, rounded to the dtype of input.

    Returns:
        A tensor of the shape and dtype of input, contiguous on CUDA.

    Raises:
        TypeError: `input`, `weight` or `bias` is no tensor or not of a real floating dtype, `num_groups` is no integer, or
            `eps` is no number.
        ValueError: `input` has fewer than two dimensions or, with a single value in each group, one sample; `num_groups`
            does not divide the channels; or `weight` or `bias` is not `[channels]`.

    The kernel runs for fp32, fp16 and bf16 on CUDA if the input is contiguous, weight and bias have its dtype, and a group
    has up to 2**24 elements. Eager computes everything else: a bias without a weight, and 16 bits under autocast, which
    computes in fp32.
    """
    _check(input, num_groups, weight, bias, eps)
    out = replacement(input, num_groups, weight, bias, eps)
    return functional.group_norm(input, num_groups, weight, bias, eps) if out is None else out


def _check(input, num_groups, weight, bias, eps) -> None:
    """Raises TypeError or ValueError unless these are arguments of `group_norm`."""
    check_floating("input", input)
    if input.dim() < 2:
        raise ValueError(f"input: expected at least two dimensions, found {list(input.shape)}")
    if isinstance(num_groups, bool) or not isinstance(num_groups, (int, torch.SymInt)):
        raise TypeError(f"num_groups: expected an integer, found {type(num_groups).__name__}")
    channels = input.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"num_groups: expected a divisor of the {channels} channels, found {num_groups}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_floating(name, tensor)
            if tuple(tensor.shape) != (channels,):
                raise ValueError(f"{name}: expected shape {[channels]}, found {list(tensor.shape)}")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps: expected a number, found {type(eps).__name__}")


# A layer is replaced if it has this forward and this function is what the forward calls.
_LAYER_FORWARD, _EAGER = nn.GroupNorm.forward, functional.group_norm
proof.record_dependency(_LAYER_FORWARD, _EAGER)


def layer_replacement(module: nn.Module, input: torch.Tensor) -> Optional[torch.Tensor]:
    """The output of a module with the forward of `torch.nn.GroupNorm`, from the kernel; None if its forward must run."""
    owner, state = type(module), module.__dict__
    if owner.forward is not _LAYER_FORWARD or functional.group_norm is not _EAGER:
        return proof.record_refusal(owner.forward, "another forward than that of torch.nn.GroupNorm")
    try:
        arguments = [attribute_of(module, owner, state, name) for name in ("weight", "bias", "num_groups", "eps")]
    except KeyError as missing:
        return proof.record_refusal(owner.forward, f"the class or a parametrization computes {missing}")
    weight, bias, num_groups, eps = arguments
    if type(num_groups) is not int or not isinstance(eps, (int, float)) or not isinstance(input, torch.Tensor):
        return proof.record_refusal(owner.forward, "num_groups, eps or input of another type")
    return replacement(input, num_groups, weight, bias, eps)


def replacement(
    input: torch.Tensor, num_groups: int, weight: Optional[torch.Tensor], bias: Optional[torch.Tensor], eps: float
) -> Optional[torch.Tensor]:
    """The output from the kernel; None if eager must compute it."""
    if is_dynamo_compiling():
        return _compiled(input, num_groups, weight, bias, eps)
    recent = _calls.recent.get((id(weight), bias is None))
    if recent is not None:
        same, groups, added, grad, compute = recent
        if (
            type(input) in PLAIN_TYPES
            and not input.is_nested
            and same(*given(input, weight, bias))
            and groups is num_groups
            and added is eps
            and grad is is_grad_enabled()
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return compute(input, weight, bias)
    return _norm.compute(input, num_groups, weight, bias, eps)


# Calls


# Counts of elements are exact in fp32.
_MAX_SIZE = 1 << 24
_MAX_ELEMENTS, _MAX_GROUPS = 1 << 40, 1 << 28
# The bytes of a tile that are a thread's.
_THREAD_BYTES = 64
# For groups of up to so many bytes the warps of a program, and the most elements that a lane reads at once.
_SHORT_BYTES, _SHORT_WARPS, _SHORT_STEPS = 40 << 10, 4, 4
# For longer ones the warps, and the bytes that a lane reads at once.
_LONG_WARPS, _LANE_BYTES = 8, 32
# The most registers of a thread: 16 warps run on a multiprocessor at a time. Of groups that a lane reads in one or two steps
# 32 do, which wait for the exchange between lanes most of the time.
_MAX_REGISTERS, _MAX_REGISTERS_OF_FEW_STEPS = 128, 64
# The L2 of a multiprocessor's share that holds the groups of its programs: H100s and A100s have 388 KB.
_L2_BYTES = 256 << 10
# The least programs that are launched for a multiprocessor, as fewer would wait for memory, and the most warps.
_LEAST_PROGRAMS, _MOST_WARPS = 2, 64


@dataclass(frozen=True)
class Kind:
    """The properties that the kernels are compiled for.

    Args:
        warps: of a program.
        steps: vectors that a lane reads at once.
        vector: elements of a vector.
        unit: elements that a vector of 16 bytes and all channels have in common.
        channels: of a tile of the output.
        positions: of a tile of the output.
        single: whether a channel has one position.
        rounded: whether the output is computed with the mean and rstd of the dtype.
        split: whether several programs write a group; never if `single`.
    """

    dtype: torch.dtype
    lanes: int
    warps: int
    steps: int
    vector: int
    unit: int
    channels: int
    positions: int
    weight: bool
    bias: bool
    single: bool
    rounded: bool
    split: bool

    @classmethod
    def of(
        cls, dtype, shape: Shape, weight: bool, bias: bool, rounded: bool, split: bool, in_vectors: bool = False
    ) -> "Kind":
        """`in_vectors`: as `takes_vectors` returns it."""
        channels, positions = _rows_of_group(shape, weight)
        lanes, vector = norms.block_threads(shape.size), vector_of(shape.size, dtype, in_vectors)
        warps = _warps(shape.size, dtype.itemsize)
        most_steps = _SHORT_STEPS if warps == _SHORT_WARPS else _LANE_BYTES // dtype.itemsize
        steps = min(next_power_of_two(-(-shape.size // (lanes * vector))), max(most_steps // vector, 1))
        tile = 32 * warps * _THREAD_BYTES // dtype.itemsize
        of_positions = min(next_power_of_two(positions), tile)
        of_channels = min(next_power_of_two(channels), tile // of_positions)
        unit = math.gcd(positions, 16 // dtype.itemsize)
        single = weight and shape.positions == 1
        properties = weight, bias, single, rounded, split and not single
        return cls(dtype, lanes, warps, steps, vector, unit, of_channels, of_positions, *properties)

    @property
    def max_registers(self) -> Optional[int]:
        """The most registers of a thread that computes both, the statistics and the output."""
        if self.lanes < norms.BLOCK:
            return None
        return _MAX_REGISTERS if self.steps * self.vector > 2 else _MAX_REGISTERS_OF_FEW_STEPS

    def launch(
        self, shape: Shape, device, eps: float, store_statistics: bool, most_programs: int = launch.MAX_PROGRAMS
    ) -> Callable[..., None]:
        """The launch for input, weight, bias, output, mean and rstd. A tensor of the input's dtype stands for a weight or
        bias that there is not, and for mean and rstd that are not stored."""
        channels, positions = _rows_of_group(shape, self.weight)
        units, eps, stored = positions // self.unit, _rounded(eps, self.dtype), int(store_statistics)
        moments = {"LANES": self.lanes, "STEPS": self.steps, "VECTOR": self.vector, "UNIT": self.unit}
        tile = {"CHANNELS": self.channels, "POSITIONS": self.positions, "WEIGHT": self.weight, "BIAS": self.bias}
        dtypes, warps, gpu = (self.dtype,) * 6, self.warps, plans.gpu(device)
        if not self.split:
            constants = {**moments, **tile, "SINGLE": self.single, "ROUNDED": self.rounded}
            scalars = shape.rows, shape.groups, channels, units, stored, eps
            programs = min(_programs(shape, self.dtype.itemsize, gpu), most_programs)
            fixed, most = (constants, warps, device, dtypes, programs), self.max_registers
            return launch.bind(group_norm_forward, *fixed, *scalars, max_registers=most)
        scalars = channels * units, eps
        fp32 = torch.float32
        first = launch.bind(group_norm_statistics, moments, warps, device, (self.dtype, fp32), shape.rows, *scalars)
        tiles = -(-channels // self.channels) * -(-positions // self.positions)
        parts = min(tiles, -(-_MOST_WARPS // warps * gpu.multiprocessors // shape.rows))
        constants = {"UNIT": self.unit, **tile, "ROUNDED": self.rounded}
        scalars = shape.rows, shape.groups, channels, units, parts, stored
        programs = shape.rows * parts
        second = launch.bind(group_norm_output, constants, warps, device, (*dtypes, fp32), programs, *scalars)
        return _Split(first, second, allocator((2, shape.rows), (shape.rows, 1), fp32, device))


def _rows_of_group(shape: Shape, weight: bool) -> tuple[int, int]:
    """The channels of a group that its kernel tells apart, and the elements of each."""
    return (shape.channels, shape.positions) if weight and shape.positions > 1 else (1, shape.size)


def _warps(size: int, itemsize: int) -> int:
    if size < norms.BLOCK:
        return 1
    return _SHORT_WARPS if size * itemsize <= _SHORT_BYTES else _LONG_WARPS


def _rounded(eps, dtype: torch.dtype) -> float:
    """eps as ATen passes it to its kernel, in the dtype."""
    return float(torch.tensor(eps, dtype=dtype, device="cpu"))


def _programs(shape: Shape, itemsize: int, gpu: plans.Gpu) -> int:
    """So many that the L2 still has a group when it is read for the second time. A group of a warp stays in the L1."""
    if shape.size < norms.BLOCK:
        return shape.rows
    most = _MOST_WARPS // _warps(shape.size, itemsize)
    of_multiprocessor = min(max(_L2_BYTES // (shape.size * itemsize), _LEAST_PROGRAMS), most)
    return min(shape.rows, of_multiprocessor * gpu.multiprocessors)


@dataclass(eq=False)
class _Split:
    """Two launches: of the statistics, and of the output."""

    statistics: launch.Launch
    output: launch.Launch
    empty: Callable[[], torch.Tensor]

    def __call__(self, input, weight, bias, out, mean, rstd) -> None:
        moments = self.empty()
        self.statistics.call_2(input, moments)
        self.output(input, weight, bias, out, mean, rstd, moments)

    call_6 = __call__


@dataclass(eq=False)
class _Call:
    """A call resolved for its tensors' shapes, dtype and device.

    Args:
        in_vectors: whether ATen reads an input that begins at a multiple of 16 bytes in vectors. Eager computes all others.
    """

    launch: Callable[..., None]
    empty: Callable[[], torch.Tensor]
    empty_statistics: Callable[[], torch.Tensor]
    groups: int
    eps: float
    in_vectors: bool

    def __call__(self, input, weight, bias):
        if self.in_vectors and input.data_ptr() % 16:
            return _EAGER(input, self.groups, weight, bias, self.eps)
        out = self.empty()
        self.launch.call_6(input, input if weight is None else weight, input if bias is None else bias, out, out, out)
        return out

    def with_statistics(self, input, weight, bias):
        """The output, mean and rstd."""
        if dispatch_modes():
            return _eager_with_statistics(input, self.groups, weight, bias, self.eps)
        return self.launched(input, weight, bias)

    def launched(self, input, weight=None, bias=None):
        """The same, whatever modes are active: none sees a call from Inductor's code."""
        if self.in_vectors and input.data_ptr() % 16:
            return _eager_with_statistics(input, self.groups, weight, bias, self.eps)
        out, mean, rstd = self.empty(), self.empty_statistics(), self.empty_statistics()
        weight, bias = input if weight is None else weight, input if bias is None else bias
        self.launch.call_6(input, weight, bias, out, mean, rstd)
        return out, mean, rstd


class _Training(_Call, Training):
    """A call with gradients."""

    # As with eager it may be written to between the passes. No gradient depends on its values.
    saves_bias = False

    def __init__(self, layouts: tuple, *call):
        _Call.__init__(self, *call)
        Training.__init__(self, layouts)

    def __call__(self, input, weight, bias):
        return _apply(self, input, weight, bias)

    def find_backward(self, input, weight, needs):
        return group_norm_backward.resolve(input, self.groups, weight, needs)

    def eagers_gradients(self, dy, input, mean, rstd, weight, bias, needs):
        return gradients(dy, input, self.groups, mean, rstd, weight, bias, self.eps, needs)


def _eager_with_statistics(input, groups, weight, bias, eps):
    return torch.native_group_norm(input.contiguous(), weight, bias, *sizes_of(input), groups, eps)


def _resolve(x, *more):
    *vectors, no_weight, no_bias, groups, eps, needs_grad = more
    shape = _shape(x, vectors, groups)
    if no_weight and not no_bias:
        raise Outside("a bias without a weight")
    rounded = _rounds_statistics(x.dtype, x.device)
    if rounded is None:
        return None
    in_vectors, split = takes_vectors(x.device), shape.is_split(plans.gpu(x.device))
    if in_vectors is None:
        return None
    if in_vectors and is_channels_last(x):
        raise Outside("images in which channels may be last, for which this torch has a kernel of its own")
    kind = Kind.of(x.dtype, shape, not no_weight, not no_bias, rounded, split, in_vectors)
    if not _proved(kind, x.device):
        return None
    empty = allocator(x.shape, contiguous_strides(x.shape), x.dtype, x.device)
    of_groups = shape.samples, shape.groups
    empty_statistics = allocator(of_groups, contiguous_strides(of_groups), x.dtype, x.device)
    layouts = layouts_of(x, None if no_weight else vectors[0])
    make = functools.partial(_Training, layouts) if needs_grad else _Call
    of_kind = kind.launch(shape, x.device, eps, needs_grad)
    return make(of_kind, empty, empty_statistics, groups, eps, kind.vector > 1)


def _shape(x, vectors, groups) -> Shape:
    """The call's shape. Raises Outside if no kernel takes these tensors."""
    if x.dtype not in FLOAT_DTYPES or not runs_kernels(x.device):
        raise Outside(f"input {x.dtype} on {x.device}")
    if torch.version.hip is not None:
        raise Outside("ROCm, whose order of additions is another")
    if x.dim() < 2 or x.numel() == 0 or groups < 1 or x.shape[1] % groups:
        raise Outside("an empty input, less than two dimensions, or channels that the groups do not divide")
    if x.numel() == groups:
        raise Outside("one sample with a single value in each group, which eager refuses")
    if not x.is_contiguous():
        raise Outside("input that is not contiguous")
    for vector in vectors:
        if vector.dtype != x.dtype or vector.device != x.device:
            raise Outside(f"input {x.dtype} on {x.device}, weight or bias {vector.dtype} on {vector.device}")
        if vector.shape != x.shape[1:2] or not vector.is_contiguous():
            raise Outside("weight or bias is not contiguous, or not of the channels")
    samples, channels, positions = sizes_of(x)
    shape = Shape(samples, groups, channels // groups, positions)
    if shape.size > _MAX_SIZE or x.numel() > _MAX_ELEMENTS or shape.rows > _MAX_GROUPS:
        raise Outside("groups of more than 2**24 elements, or too many elements or groups")
    return shape


_calls = Calls(_resolve)
_norm = AffineNorm(_EAGER, _calls)


def gradients(dy, input, groups, mean, rstd, weight, bias, eps, needs) -> tuple[Optional[torch.Tensor], ...]:
    """Those of input, weight and bias, as far as `needs` says, from ATen's operator; under `create_graph` autograd's.

    Args:
        mean, rstd: in the dtype of the input, with the bits that ATen's forward pass saves.
    """
    if not is_grad_enabled():
        input = input.contiguous()
        if not dy.is_cuda:  # A CPU's operator wants statistics of the input's dtype.
            _, mean, rstd = _eager_with_statistics(input, groups, None, None, eps)
        sizes = sizes_of(input)
        return tuple(group_norm_backward.eager(dy.contiguous(), input, mean, rstd, weight, *sizes, groups, list(needs)))

    return through_autograd(_EAGER, dy, input, groups, weight, bias, eps, needs)


class GroupNorm(NormFunction):
    """The name that the node of autograd has."""


_apply = apply_of(GroupNorm)


# Proof


def _rounds_statistics(dtype: torch.dtype, device: torch.device) -> Optional[bool]:
    """Whether eager rounds mean and rstd to the dtype before it computes the output, as ATen does up to torch 2.11.

    None where that cannot be found out now.
    """
    if dtype == torch.float32:
        return False
    subject = proof.Subject(_EAGER, device, f"{dtype}, mean and rstd")
    key = "group_norm's mean and rstd", dtype, device
    return proof.find_out(key, subject, functools.partial(_has_a_zero, dtype, device))


def _has_a_zero(dtype, device):
    """Of two neighbours, whose mean lies between them: rounded, it is one of them, and that one's output is zero."""
    x = torch.tensor([1.0, 1.0 + torch.finfo(dtype).eps], dtype=dtype, device=device)
    return functional.group_norm(x.view(1, 1, 2), 1).count_nonzero() < 2


def _proved(kind: Kind, device) -> bool:
    lanes = f"{kind.lanes} lanes{f' of vectors of {kind.vector}' if kind.vector > 1 else ''}"
    where = f"{kind.dtype}, {lanes}, tiles of {kind.channels} channels and {kind.positions} positions"
    return proof.kernel_is_proved(
        ("group_norm", kind, device),
        proof.Subject(_EAGER, device, where, "group_norm"),
        functools.partial(_comparisons, kind, device),
    )


# Of 16 bits so many show whether a product and a sum round once.
_PROOF_ELEMENTS = {torch.float32: 1 << 18, torch.float16: 1 << 19, torch.bfloat16: 1 << 20}
_LEAST_ROWS = 48
# -1 cancels the variance of a group of ones and minus ones: what rounding made of it is left. 0.3 is no number of 16 bits.
_PROOF_EPS = (1e-5, -1.0, 0.3)


def _proof_shapes(kind: Kind, in_vectors: bool = False) -> list[tuple[int, int]]:
    """Channels of a group and their positions: of the shortest groups of the kind, and of longer ones.

    Single elements are compared in groups that whole vectors fill, too, if eager takes no vectors: that is thereby proved.

    Args:
        in_vectors: as `takes_vectors` returns it.
    """
    of_steps = kind.lanes * kind.steps * kind.vector // 2 + 1 if kind.steps > 1 else 1
    of_warps = {1: 1, _SHORT_WARPS: norms.BLOCK, _LONG_WARPS: _SHORT_BYTES // kind.dtype.itemsize + 1}
    least = max(of_steps, of_warps[kind.warps], SPLIT_SIZE * kind.split)

    def numbers(tile, others, step):
        """From more than half a tile on; with so many others they make a group of the kind."""
        first, last = -(-max(tile // 2 + 1, -(-least // others)) // step) * step, tile // step * step
        return {first, first + step, 3 * first, last, max(last - step, step)} - {0}

    # Multiples of so many channels fill whole vectors.
    vector = 16 // kind.dtype.itemsize
    pairs = set()
    for step in {1, vector // kind.unit} if kind.vector == 1 else {vector // kind.unit}:
        of_channels, of_positions = numbers(kind.channels, least, step), numbers(kind.positions, least, kind.unit)
        pairs |= {(c, p) for c in of_channels for p in numbers(kind.positions, c, kind.unit)}
        pairs |= {(c, p) for p in of_positions for c in numbers(kind.channels, p, step)}
    shapes = [Shape(1, 1, *((p, 1) if kind.single else (c, p))) for c, p in pairs if c == 1 or kind.weight]
    found = sorted(
        (shape.size, shape.channels, shape.positions) for shape in shapes if shape.size >= least and _is_of(kind, shape)
    )
    whole, others = [each for each in found if not each[0] % vector], [each for each in found if each[0] % vector]
    if in_vectors:  # The other groups are of another kind.
        found = whole if kind.vector > 1 else others
    longer = [each for each in found if each[0] <= 8 * found[0][0]]
    picked = {*found[:1], *longer[1:][-1:]}
    if not in_vectors:
        picked |= {*whole[:1], *others[:1]}
    return [each[1:] for each in sorted(picked)]


def _is_of(kind: Kind, shape: Shape) -> bool:
    properties = kind.weight, kind.bias, kind.rounded, kind.split
    return Kind.of(kind.dtype, shape, *properties, kind.vector > 1) == kind


def _samples_of(kind: Kind, shape: Shape, device, source) -> torch.Tensor:
    """Groups of all scales, constant ones, some with infinities and NaN, and such that cancel: their mean or variance is what
    rounding leaves."""
    rows, size = shape.rows, shape.size
    make = functools.partial(proof.normal, source)
    row = torch.arange(rows, device=device)[:, None]
    spread = make(rows, 1)
    x = (make(rows, size) + 8.0 * spread * spread.abs()) * torch.exp2(row % 16 - 8.0)
    # Numbers and their negatives, anywhere in the group: the sum shows every rounding, even in 16 bits.
    half, anywhere = size // 2, torch.randperm(size, device=device, generator=source)
    # Of many scales: differences of 16-bit numbers then have all bits of fp32.
    scales = torch.exp2(-12.0 * proof.uniform(source, half))
    numbers, opposite = (make(rows, half) * scales).to(kind.dtype).float(), torch.zeros_like(x)
    opposite[:, anywhere[:half]], opposite[:, anywhere[half : 2 * half]] = numbers, -numbers
    # In fp16 a sum of smaller ones would be subnormal.
    x = torch.where(row % 4 == 1, opposite * 8192.0, x)
    x = torch.where(row % 4 == 2, opposite.sign(), x)
    # Lanes without variance: that of the group is the difference of their means.
    lane = torch.arange(size, device=device) // kind.vector % kind.lanes
    x = torch.where(row % 4 == 3, x[:, lane % size], x)
    x[0], x[1], x[2], x[3, 0], x[4, -1], x[5], x[6, ::2] = 0.0, -0.0, 3.0, math.nan, math.inf, -math.inf, 6e4
    # Subnormal quotients, and one infinity that stays alone in its lane.
    x[7], x[8], x[9], x[9, -1] = x[7] * 1e-38, opposite[8] * 1e-38, 0.0, 1e-44
    x[10], x[10, -1] = 0.0, math.inf
    return x.to(kind.dtype).view(shape.samples, shape.groups * shape.channels, shape.positions)


def _comparisons(kind, device) -> Iterator[proof.Comparison]:
    for channels, positions in _proof_shapes(kind, bool(takes_vectors(device))):
        groups = max(_PROOF_ELEMENTS[kind.dtype] // (2 * channels * positions), _LEAST_ROWS // 2)
        shape = Shape(2, groups, channels, positions)
        source = proof.generator(device, shape.size)
        x = _samples_of(kind, shape, device, source)
        weight, bias = (
            proof.normal(source, groups * channels).to(kind.dtype) if there else None
            for there in (kind.weight, kind.bias)
        )
        for eps in _PROOF_EPS:
            out, (mean, rstd) = torch.full_like(x, math.nan), proof.unwritten(2, (2, groups), device, x.dtype)
            # A program takes one group or several in turn: here both.
            kind.launch(shape, device, eps, True, shape.rows - shape.rows // 3)(
                x, x if weight is None else weight, x if bias is None else bias, out, mean, rstd
            )
            expected = _eager_with_statistics(x, groups, weight, bias, eps)
            yield from zip(("the output", "the mean", "rstd"), (out, mean, rstd), expected)


def warmup_shapes(weight, dtype: torch.dtype, device: torch.device, rows, training: bool) -> list[tuple[int, ...]]:
    """The inputs that `warmup` calls a layer with."""
    raise Outside("a GroupNorm's kernel depends on the size of its images, which no layer knows")


WARMUP["TorchGroupNorm"] = Warmup(warmup_shapes)


# torch.compile


def _fake(input, num_groups, weight, bias, eps):
    statistics = (input.new_empty((input.shape[0], num_groups)) for _ in range(2))
    return input.new_empty(input.shape), *statistics


@operators.register("group_norm", _norm.find_outputs, _fake)
def _group_norm_op(
    input: torch.Tensor, num_groups: int, weight: Optional[torch.Tensor], bias: Optional[torch.Tensor], eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _eager_with_statistics(input, num_groups, weight, bias, eps)


@operators.register("group_norm_backward", _norm.find_gradients, fake_gradients)
def _group_norm_backward_op(
    dy: torch.Tensor,
    input: torch.Tensor,
    num_groups: int,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    eps: float,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return operators.without_none(gradients(dy, input, num_groups, mean, rstd, weight, bias, eps, needs), dy)


register_gradient(_group_norm_op, _group_norm_backward_op, saves_bias=False)


@at_trace_time
def _has_kernels_for_channels_last(device) -> bool:
    """Whether eager may have kernels for channels that are last, where the operator would compute a copy."""
    return takes_vectors(device) is not False


def _compiled(input, num_groups, weight, bias, eps):
    """`replacement` while torch.compile traces: the registered op, or None to trace the original."""
    if not is_traceable(input, weight, bias) or input.dim() < 2 or input.shape[1] % num_groups:
        return None
    if not input.is_contiguous() and is_channels_last(input) and _has_kernels_for_channels_last(input.device):
        return None
    vectors = given(input, weight, bias)[1:]
    if any(vector.shape != input.shape[1:2] for vector in vectors) or input.numel() <= num_groups:
        return None
    return _group_norm_op(input, num_groups, weight, bias, float(eps))[0]
