"""LayerNorm that returns the bits of `F.layer_norm`, and of its gradients."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Optional, Union

import torch
from torch import is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ..core import launch, operators, proof
from ..core.calls import Calls, Outside
from ..core.declarations import WARMUP, Warmup
from ..core.domain import (
    FLOAT_DTYPES,
    PLAIN_TYPES,
    allocator,
    check_floating,
    layouts_of,
    runs_kernels,
)
from ..core.layout import contiguous_strides, rows_in_memory, stride_unit, stride_with_gap
from ..core.torch_internals import apply_of, dispatch_modes, forward_ad
from . import layer_norm_backward
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

if launch.AVAILABLE:
    from ..kernels_src.layer_norm import layer_norm_forward


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Union[int, Sequence[int]],
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Layer normalisation: bit for bit what `torch.nn.functional.layer_norm` of the same arguments returns.

    `weight * ((input - mean) * rsqrt(variance + eps)) + bias`, mean and variance over the last dimensions in fp32. Gradients
    have the bits of ATen's `native_layer_norm_backward`.

    Args:
        input: `[..., *normalized_shape]`, any real floating dtype.
        normalized_shape: the last dimensions, or an integer for one.
        weight: `normalized_shape`, of the dtype of input, or None.
        bias: like weight.
        eps: added to the variance.

    Returns:
        A contiguous tensor of the shape and dtype of input.

    Raises:
        TypeError: `input`, `weight` or `bias` is no tensor or not of a real floating dtype, or `eps` is no number.
        ValueError: `normalized_shape` is not the end of the input's shape, or `weight` or `bias` has another shape.

    Few rows and many have a kernel and a proof each; `warmup` calls both.

    The kernel runs for fp32, fp16 and bf16 on CUDA if weight and bias have that dtype, the normalised dimensions have
    64 to 16384 elements, a multiple of 4, and rows are contiguous and equally spaced. Eager computes everything else: a
    bias without a weight, and 16 bits under autocast, which computes in fp32.
    """
    shape = _checked(input, normalized_shape, weight, bias, eps)
    out = replacement(input, shape, weight, bias, eps)
    return functional.layer_norm(input, shape, weight, bias, eps) if out is None else out


def _checked(input, normalized_shape, weight, bias, eps) -> tuple[int, ...]:
    """normalized_shape as a tuple. Raises TypeError or ValueError unless these are arguments of `layer_norm`."""
    check_floating("input", input)
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"normalized_shape: expected the last dimensions of input {list(input.shape)}, found {list(shape)}"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_floating(name, tensor)
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: expected shape {list(shape)}, normalized_shape, found {list(tensor.shape)}")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps: expected a number, found {type(eps).__name__}")
    return shape


# A layer is replaced if it has this forward and this function is what the forward calls.
_LAYER_FORWARD, _EAGER = nn.LayerNorm.forward, functional.layer_norm
proof.record_dependency(_LAYER_FORWARD, _EAGER)


def layer_replacement(module: nn.Module, input: torch.Tensor) -> Optional[torch.Tensor]:
    """The output of a module with the forward of `torch.nn.LayerNorm`, from the kernel; None if its forward must run."""
    owner, state = type(module), module.__dict__
    if owner.forward is not _LAYER_FORWARD or functional.layer_norm is not _EAGER:
        return proof.record_refusal(owner.forward, "another forward than that of torch.nn.LayerNorm")
    try:
        arguments = [attribute_of(module, owner, state, name) for name in ("weight", "bias", "normalized_shape", "eps")]
    except KeyError as missing:
        return proof.record_refusal(owner.forward, f"the class or a parametrization computes {missing}")
    weight, bias, shape, eps = arguments
    if not isinstance(shape, tuple) or not isinstance(eps, (int, float)) or not isinstance(input, torch.Tensor):
        return proof.record_refusal(owner.forward, "normalized_shape, eps or input of another type")
    return replacement(input, shape, weight, bias, eps)


def replacement(
    input: torch.Tensor, shape: tuple, weight: Optional[torch.Tensor], bias: Optional[torch.Tensor], eps: float
) -> Optional[torch.Tensor]:
    """The output from the kernel; None if eager must compute it."""
    if is_dynamo_compiling():
        return _compiled(input, shape, weight, bias, eps)
    recent = _calls.recent.get((id(weight), bias is None))
    if recent is not None:
        same, normalized, added, grad, compute = recent
        if (
            type(input) in PLAIN_TYPES
            and not input.is_nested
            and same(*given(input, weight, bias))
            and normalized is shape
            and added is eps
            and grad is is_grad_enabled()
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return compute(input, weight, bias)
    return _norm.compute(input, shape, weight, bias, eps)


# Calls


_MIN_SIZE, _MAX_SIZE = 64, 16384
# ATen reads vectors of so many elements; without their alignment, another kernel of its own runs.
_VECTOR = 4
# The kernels of torch 2.11 count elements in 32 bits.
_MAX_ELEMENTS = 1 << 32
# Rows of a program by the most bytes of a row, of many rows and of few, and its warps by the most bytes of many rows and the most
# elements of few (H200, with Triton 3.6 and 3.9).
_ROWS = {160: 16, 256: 8, 768: 4, 2047: 2, 64 << 10: 1}
_ROWS_OF_FEW = {256: 2, 64 << 10: 1}
_WARPS = {4095: 1, 5119: 2, 64 << 10: 4}
_WARPS_OF_FEW = {1023: 1, 2047: 2, 1 << 14: 4}
# Fewer rows or elements are few (H200).
_FEW_ROWS, _FEW_ELEMENTS = 1024, 1 << 21


@dataclass(frozen=True)
class Kind:
    """The properties that a kernel is compiled for.

    Attributes:
        size: elements of a row.
        unit: the number of elements, up to 16 bytes, by which row strides are counted.
        weight, bias: whether there is one.
        few: whether rows are so few that a program's waiting decides their time, and not the memory's speed.
    """

    dtype: torch.dtype
    size: int
    unit: int
    weight: bool
    bias: bool
    few: bool

    @classmethod
    def of(cls, dtype: torch.dtype, rows: int, size: int, row_stride: int, weight: bool, bias: bool) -> "Kind":
        return cls(dtype, size, stride_unit(row_stride, dtype), weight, bias, rows < _fewest_rows(size))

    def launch(self, rows: int, row_stride: int, device, eps: float, store_statistics: bool) -> launch.Launch:
        """The launch. Its tensors: input, weight, bias, dense output and, if they are stored, mean and rstd; any tensor of
        the input's dtype stands for a weight or bias that there is not."""
        constants = {
            "SIZE": self.size,
            "ROWS": self.rows,
            "HALVES": self.by_halves,
            "FEW": self.few,
            "STRIDE_UNIT": self.unit,
            "WEIGHT": self.weight,
            "BIAS": self.bias,
        }
        dtypes = (*(self.dtype,) * 4, torch.float32, torch.float32)
        scalars = rows, row_stride // self.unit, int(store_statistics), eps
        return launch.bind(layer_norm_forward, constants, self.warps, device, dtypes, -(-rows // self.rows), *scalars)

    @property
    def by_halves(self) -> bool:
        """Whether a program's tiles are of halves of its lanes: with four warps a thread would have two elements of a tile."""
        return self.warps < 4

    @property
    def warps(self) -> int:
        """Warps of a program."""
        if self.few:
            return _first(_WARPS_OF_FEW, self.size)
        return _first(_WARPS, self.size * self.dtype.itemsize)

    @property
    def rows(self) -> int:
        """Rows of a program."""
        return _first(_ROWS_OF_FEW if self.few else _ROWS, self.size * self.dtype.itemsize)


def _first(table: dict[int, int], number: int) -> int:
    """The value of a table's first limit that the number does not exceed."""
    return next(value for most, value in table.items() if number <= most)


def _fewest_rows(size: int) -> int:
    """The fewest that are not few."""
    return max(_FEW_ROWS, -(-_FEW_ELEMENTS // size))


def _has_kernel(size: int) -> bool:
    """Whether there is a kernel for rows of so many elements."""
    return size % _VECTOR == 0 and _MIN_SIZE <= size <= _MAX_SIZE


@dataclass(eq=False)
class _Call:
    """A call resolved for its tensors' shapes, strides, dtype and device."""

    launch: launch.Launch
    empty: Callable[[], torch.Tensor]
    empty_statistics: Callable[[], torch.Tensor]
    shape: tuple
    eps: float
    alignment_mask: int

    def is_aligned(self, input, weight, bias) -> bool:
        """Whether ATen's vectorised kernel takes these tensors, and with it the arithmetic of this one."""
        addresses = input.data_ptr()
        if weight is not None:
            addresses |= weight.data_ptr()
        if bias is not None:
            addresses |= bias.data_ptr()
        return not addresses & self.alignment_mask

    def __call__(self, input, weight, bias):
        if not self.is_aligned(input, weight, bias):
            return functional.layer_norm(input, self.shape, weight, bias, self.eps)
        out = self.empty()
        self.launch.call_4(input, input if weight is None else weight, input if bias is None else bias, out)
        return out

    def with_statistics(self, input, weight, bias):
        """The output, mean and rstd."""
        if dispatch_modes():
            return _eager_with_statistics(input, self.shape, weight, bias, self.eps)
        return self.launched(input, weight, bias)

    def launched(self, input, weight=None, bias=None):
        """The same, whatever modes are active: none sees a call from Inductor's code."""
        if not self.is_aligned(input, weight, bias):
            return _eager_with_statistics(input, self.shape, weight, bias, self.eps)
        out, mean, rstd = self.empty(), self.empty_statistics(), self.empty_statistics()
        weight, bias = input if weight is None else weight, input if bias is None else bias
        self.launch.call_6(input, weight, bias, out, mean, rstd)
        return out, mean, rstd


class _Training(_Call, Training):
    """A call with gradients."""

    def __init__(self, layouts: tuple, rows: int, row_stride: int, *call):
        _Call.__init__(self, *call)
        Training.__init__(self, layouts)
        self.rows_and_stride = rows, row_stride

    def __call__(self, input, weight, bias):
        return _apply(self, input, weight, bias)

    def find_backward(self, input, weight, needs):
        return layer_norm_backward.resolve(input, *self.rows_and_stride, self.shape, weight, needs)

    def eagers_gradients(self, dy, input, mean, rstd, weight, bias, needs):
        return gradients(dy, input, self.shape, mean, rstd, weight, bias, self.eps, needs)


def _eager_with_statistics(input, shape, weight, bias, eps):
    out, mean, rstd = torch.native_layer_norm(input, shape, weight, bias, eps)
    # A CPU's statistics may have the input's dtype.
    return out, mean.float(), rstd.float()


def _resolve(x, *more):
    *vectors, no_weight, no_bias, shape, eps, needs_grad = more
    rows, size, row_stride = _rows(x, vectors, shape)
    if no_weight and not no_bias:
        raise Outside("a bias without a weight")
    kind = Kind.of(x.dtype, rows, size, row_stride, not no_weight, not no_bias)
    if not _proved(kind, x.device):
        return None
    # ATen computes with contiguous copies.
    empty = allocator(x.shape, contiguous_strides(x.shape), x.dtype, x.device)
    of_rows = (*x.shape[: x.dim() - len(shape)], *(1,) * len(shape))
    empty_statistics = allocator(of_rows, contiguous_strides(of_rows), torch.float32, x.device)
    bound = kind.launch(rows, row_stride, x.device, eps, needs_grad)
    call = bound, empty, empty_statistics, shape, eps, _VECTOR * x.dtype.itemsize - 1
    if not needs_grad:
        return _Call(*call)
    layouts = layouts_of(x, None if no_weight else vectors[0])
    return _Training(layouts, rows, row_stride, *call)


def _rows(x, vectors, shape) -> tuple[int, int, int]:
    """Rows, elements of a row, and row stride. Raises Outside if no kernel takes these tensors."""
    if x.dtype not in FLOAT_DTYPES or not runs_kernels(x.device):
        raise Outside(f"input {x.dtype} on {x.device}")
    if torch.version.hip is not None:
        raise Outside("ROCm, whose order of additions is another")
    if not shape or x.shape[-len(shape) :] != shape:
        raise Outside("normalized_shape that is not the end of the input's shape")
    for vector in vectors:
        if vector.dtype != x.dtype or vector.device != x.device:
            raise Outside(f"input {x.dtype} on {x.device}, weight or bias {vector.dtype} on {vector.device}")
        if vector.shape != shape or not vector.is_contiguous():
            raise Outside("weight or bias is not contiguous, or not of normalized_shape")
    size = math.prod(shape)
    if x.numel() == 0 or not _has_kernel(size):
        raise Outside("an empty input, or rows that are not of 64 to 16384 elements, a multiple of 4")
    if x.numel() > _MAX_ELEMENTS or x.numel() // size > launch.MAX_PROGRAMS:
        raise Outside("too many elements or rows")
    if x.is_contiguous():
        return x.numel() // size, size, size
    found = rows_in_memory(x.shape, x.stride()) if len(shape) == 1 else None
    if found is None or list(found[2]) != sorted(found[2]):
        raise Outside("input that is not made of contiguous rows, equally spaced and in order")
    rows, row_stride, _ = found
    return rows, size, row_stride


_calls = Calls(_resolve)
_norm = AffineNorm(_EAGER, _calls)


def gradients(dy, input, shape, mean, rstd, weight, bias, eps, needs) -> tuple[Optional[torch.Tensor], ...]:
    """Those of input, weight and bias, as far as `needs` says, from ATen's operator; under `create_graph` autograd's.

    Args:
        mean, rstd: fp32, with the bits that ATen's forward pass saves.

    Raises:
        RuntimeError: ATen's, if `.to(dtype)` has changed the weight since the forward pass.
    """
    if not is_grad_enabled() or (weight is not None and weight.dtype != input.dtype):
        if not dy.is_cuda:  # A CPU's operator wants statistics of the input's dtype.
            _, mean, rstd = torch.native_layer_norm(input, shape, None, None, eps)
        return tuple(layer_norm_backward.eager(dy, input, shape, mean, rstd, weight, bias, needs))

    return through_autograd(_EAGER, dy, input, shape, weight, bias, eps, needs)


class LayerNorm(NormFunction):
    """The name that the node of autograd has."""


_apply = apply_of(LayerNorm)


# Proof


def _proved(kind: Kind, device) -> bool:
    least = _fewest_rows(kind.size)
    rows = f"up to {least - 1} rows" if kind.few else f"{least} or more rows"
    return proof.kernel_is_proved(
        ("layer_norm", kind, device),
        proof.Subject(_EAGER, device, f"{kind.dtype}, {rows} of {kind.size} elements", "layer_norm"),
        functools.partial(_comparisons, kind, device),
    )


# The statistics are compared in fp32, where another order of additions shows in many rows; least in short ones.
_PROOF_ROWS, _PROOF_ELEMENTS = 128, 1 << 17
_PROOF_EPS = 1e-5
# Of 16 bits so many show whether the last product and sum round once: one of about 100 tells.
_CANCELLED_ELEMENTS = 4096


def _comparisons(kind, device):
    source, rows = proof.generator(device, kind.size), max(_PROOF_ROWS, _PROOF_ELEMENTS // kind.size)
    shape, row_stride = (rows, kind.size), stride_with_gap(kind.size, kind.unit, kind.dtype)
    normal, spread = (proof.normal(source, *each) for each in (shape, (rows, 1)))
    # Rows of all scales, and with means of up to 64 times the deviation.
    scales = torch.exp2(torch.arange(rows, device=device) % 16 - 8.0)[:, None]
    values = (normal + 8.0 * spread * spread.abs()) * scales
    values[0], values[1], values[2], values[3, 0], values[4, -1] = 0.0, -0.0, 3.0, math.nan, math.inf
    values[5, ::2], values[6], values[7, 0] = 6e4, -math.inf, 6e4
    # Lanes that differ in their means alone, and a square that is infinite when a warp is combined with one without elements.
    blocks = proof.normal(source, 4, -(-kind.size // 64)).repeat_interleave(64, dim=1)
    values[-4:], values[8] = blocks[:, : kind.size], blocks[0, : kind.size]
    values[9, :128], values[10, 128:] = 1e25, 1e25
    x = torch.zeros(rows, row_stride, dtype=kind.dtype, device=device)[:, : kind.size].copy_(values)
    weight = proof.normal(source, kind.size).to(kind.dtype) if kind.weight else None
    for part, bias in _biases(kind, x, weight, source):
        out = torch.full(part.shape, math.nan, dtype=kind.dtype, device=device)
        mean, rstd = proof.unwritten(2, (len(part), 1), device)
        launched = kind.launch(len(part), row_stride, device, _PROOF_EPS, True)
        launched(part, part if weight is None else weight, part if bias is None else bias, out, mean, rstd)
        expected = _eager_with_statistics(part, (kind.size,), weight, bias, _PROOF_EPS)
        yield from zip(("the output", "the mean", "rstd"), (out, mean, rstd), expected)


def _biases(kind, x, weight, source):
    """All rows with no bias or one at random, and single rows with biases that cancel their products: such sums show how
    products round."""
    if not kind.bias:
        yield x, None
        return
    yield x, proof.normal(source, kind.size).to(kind.dtype)
    # The first rows have infinities and NaN. A copy is aligned; of a row that is not, ATen's bits would be another kernel's.
    for row in x[11 : 12 + _CANCELLED_ELEMENTS // kind.size].split(1):
        part = row.clone()
        yield part, -torch.native_layer_norm(part, (kind.size,), weight, None, _PROOF_EPS)[0][0]


def warmup_shapes(weight, dtype: torch.dtype, device: torch.device, rows, training: bool) -> list[tuple[int, ...]]:
    """The inputs that `warmup` calls a layer with: with the given `rows`, or one for each kernel and proof."""
    if weight is None:
        raise Outside("a norm without a weight has no normalized_shape")
    if not rows:
        of_training = layer_norm_backward.rows_of_every_kind() if training else []
        of_many = [_fewest_rows(weight.numel())] if _has_kernel(weight.numel()) else []
        rows = sorted({1, *of_training, *of_many})
    return [(count, *weight.shape) for count in rows]


WARMUP["TorchLayerNorm"] = Warmup(warmup_shapes)


# torch.compile


def _fake(input, shape, weight, bias, eps):
    of_rows = (*input.shape[: input.dim() - len(shape)], *(1,) * len(shape))
    out = input.new_empty(input.shape)
    return out, *(input.new_empty(of_rows, dtype=torch.float32) for _ in range(2))


@operators.register("layer_norm", _norm.find_outputs, _fake)
def _layer_norm_op(
    input: torch.Tensor, shape: list[int], weight: Optional[torch.Tensor], bias: Optional[torch.Tensor], eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _eager_with_statistics(input, shape, weight, bias, eps)


@operators.register("layer_norm_backward", _norm.find_gradients, fake_gradients)
def _layer_norm_backward_op(
    dy: torch.Tensor,
    input: torch.Tensor,
    shape: list[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    eps: float,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return operators.without_none(gradients(dy, input, shape, mean, rstd, weight, bias, eps, needs), dy)


register_gradient(_layer_norm_op, _layer_norm_backward_op)


def _compiled(input, shape, weight, bias, eps):
    """`replacement` while torch.compile traces: the registered op, or None to trace the original."""
    if not is_traceable(input, weight, bias) or not shape or input.shape[-len(shape) :] != shape:
        return None
    return _layer_norm_op(input, list(shape), weight, bias, float(eps))[0]
