"""RMSNorm with the bits of transformers' eager layers."""

import functools
import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Callable, Optional, Union

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ..._ops import add_op_namespace_prefix
from ...core import launch, plans, proof
from ...core.domain import (
    FLOAT_DTYPES,
    NO_STATE,
    PLAIN_TYPES,
    UNSEEN,
    allocator,
    are_ours,
    check_floating,
    recognition,
    remember,
    runs_kernels,
    under_transform,
)
from ...core.layout import Output, row_number_strides, rows_in_memory
from ...core.reduction import ROW_CLASSES, fused_row_reduction, row_class, row_reduction
from ...core.torch_internals import apply_of, dispatch_modes, forward_ad
from . import backward as rms_norm_backward
from .formulas import BY_NAME, FUSED, FUSED_UNWEIGHTED, LLAMA, UNWEIGHTED, WEIGHTED, Variant, eager_rstd

if launch.AVAILABLE:
    from ...kernels_src.rms_norm import rms_norm_forward

MIN_HIDDEN_SIZE = 64
MAX_HIDDEN_SIZE = 32768
# A row of `F.rms_norm` belongs to 128 lanes at most: beyond, threads do not hold their part in registers (H200).
MAX_FUSED_HIDDEN_SIZE = 8192


def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation over the last dimension.

    `weight * (h * rsqrt(mean(h**2, -1) + eps)).to(hidden_states.dtype)` with `h = hidden_states.to(torch.float32)`: bit
    for bit what `LlamaRMSNorm.forward` of transformers returns on the same device and the same torch.

    Args:
        hidden_states: `[..., hidden_size]`, any real floating dtype.
        weight: `[hidden_size]`, any real floating dtype, on the device of `hidden_states`.
        eps: added to the mean of squares; finite and not negative.

    Returns:
        A tensor of the shape and strides that eager returns, of dtype `torch.promote_types(weight, hidden_states)`.

    Raises:
        TypeError: an argument is no tensor, not of a real floating dtype, or `eps` is no number.
        ValueError: `weight` is not `[hidden_size]` or on another device, or `eps` is negative or not finite.

    The kernel runs for fp32, fp16 and bf16 on CUDA with `hidden_size` a multiple of 4 from 64 to 32768; anything else is
    computed by the formula above.
    """
    check_arguments(hidden_states, weight, eps)
    out = replacement(hidden_states, weight, eps, EAGER[LLAMA])
    return LLAMA.eager(hidden_states, weight, eps) if out is None else out


def check_arguments(hidden_states, weight, eps) -> None:
    """Raises TypeError or ValueError unless these are arguments of `rms_norm`."""
    check_floating("hidden_states", hidden_states)
    check_floating("weight", weight)
    if hidden_states.dim() == 0:
        raise ValueError("hidden_states: expected at least one dimension, found a 0-dimensional tensor")
    if weight.shape != hidden_states.shape[-1:]:
        raise ValueError(
            f"weight: expected shape {list(hidden_states.shape[-1:])}, the last dimension of hidden_states "
            f"{list(hidden_states.shape)}, found {list(weight.shape)}"
        )
    if weight.device != hidden_states.device:
        raise ValueError(f"weight: expected device {hidden_states.device} of hidden_states, found {weight.device}")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps: expected a number, found {type(eps).__name__}")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps: expected a finite number that is not negative, found {eps}")


def _eager_layer(variant: Variant) -> type:
    class Eager(torch.nn.Module):
        def forward(self, hidden_states):
            return variant.eager(hidden_states, self.weight, self.variance_epsilon)

    Eager.__qualname__ = f"RMSNorm, {variant.formula}"
    return Eager


# Layers that compute a variant in torch operations.
EAGER = {variant: _eager_layer(variant) for variant in BY_NAME.values()}


def in_domain(dtype: torch.dtype, weight_dtype: torch.dtype, hidden_size: int) -> bool:
    """Whether there is a kernel for these dtypes and this hidden size."""
    return (
        dtype in FLOAT_DTYPES
        and weight_dtype in FLOAT_DTYPES
        and hidden_size % 4 == 0
        and MIN_HIDDEN_SIZE <= hidden_size <= MAX_HIDDEN_SIZE
    )


# The launch plan


@dataclass(frozen=True)
class Plan:
    """How the forward kernel is launched for one hidden size and one class of row counts.

    Rows that are streamed are read for their sum and once more for the output, instead of waiting in registers. `by_lane`
    they are read for both at once, for the sum in the order of ATen's lanes. Then `programs_per_row` may share a row: each
    reads all of it for the sum, and writes a part. With `prefetch` a program has a later one's rows brought into the L2.
    """

    rows_per_program: int
    num_warps: int
    streamed: bool = False
    prefetch: bool = False
    by_lane: bool = False
    programs_per_row: int = 1

    def programs(self, rows: int) -> int:
        """How many it takes for so many rows."""
        return -(-rows // self.rows_per_program) * self.programs_per_row

    def ahead(self, bytes_per_row: int) -> int:
        """How many programs later those rows are, if a program reads so many bytes for each of its rows; 0 without."""
        return max(_BYTES_AHEAD // (self.rows_per_program * bytes_per_row), 1) if self.prefetch else 0


# Of longer rows a multiprocessor's registers hold too few: they are streamed, and a warp takes so many bytes (H200).
_MAX_KEPT_BYTES = 32 << 10
_STREAMED_BYTES_PER_WARP = 4 << 10
# Elements that a thread keeps in registers, and that a program takes at least (H200).
_ELEMENTS_PER_THREAD = 64
_MIN_ELEMENTS_PER_PROGRAM = 2048
_MAX_WARPS = 16
# The time of a few rows is the wait for what a multiprocessor loads. So programs share a row if that leaves so many columns to
# each, up to so many programs (H200), and if registers hold all that each has under way, with a residual twice as much.
_SHARED_COLUMNS = 1024
_MAX_SHARED_BYTES_ADDED = 64 << 10
_MAX_PROGRAMS_PER_ROW = 8
# What is brought into the L2 lies so far ahead of what is read. From 1 to 4 MB times are alike, of 8192 and 16384 columns best
# at 4; what lies 8 MB ahead is gone again, in part, before it is read (H200, which has an L2 of 60 MB).
_BYTES_AHEAD = 4 << 20


# By whether the rows are those of a residual's sum.
_OPS = {False: "rms_norm", True: "add_rms_norm"}


def launch_plan(
    rows: int, hidden_size: int, element_size: int = 2, gpu: plans.Gpu = plans.UNKNOWN, added: bool = False
) -> Plan:
    """The plan for `rows` rows: the tuned one, or `default_plan` where there is none.

    Args:
        element_size: bytes of an element of the activations.
        added: whether they are rows of the sum with a residual.
    """
    tuned = plans.tuned(gpu, _OPS[added], hidden_size, rows, element_size)
    return default_plan(rows, hidden_size, element_size, added) if tuned is None else Plan(**tuned)


def planned_rows(hidden_size: int, element_size: int, gpu: plans.Gpu) -> tuple[int, ...]:
    """The fewest rows of every `row_class` and plan, those of a residual's sum included: a proof for each is a proof for any
    number of rows."""
    turns = {rows for op in _OPS.values() for rows in plans.turning_points(gpu, op, hidden_size, element_size)}
    return tuple(sorted({*ROW_CLASSES, *turns}))


# Fewer rows than a training step has, and more than one makes another plan for.
_LEAST_TRAINING_ROWS, _MOST_TRAINING_ROWS = 16, 1 << 17


def training_rows(hidden_size: int, dtype: torch.dtype, device: torch.device, both: bool) -> tuple[int, ...]:
    """The fewest rows, from 16 on, of everything that forward and backward kernels of training are proved for apart, those
    that add a residual or its gradient included.

    Args:
        both: whether the weight's gradient is needed as well as the input's.
    """
    gpu, size = plans.gpu(device), dtype.itemsize
    every_edges = rms_norm_backward.edges_of(dtype), "added"
    ops = [*_OPS.values(), *map(rms_norm_backward.op_of, every_edges)]
    turns = {rows for op in ops for rows in plans.turning_points(gpu, op, hidden_size, size)}
    powers = (1 << power for power in range(_MOST_TRAINING_ROWS.bit_length()))
    found = {}
    for rows in sorted({*powers, *turns}):
        if _LEAST_TRAINING_ROWS <= rows <= _MOST_TRAINING_ROWS:
            proofs = (
                rms_norm_backward.proof_class(rows, hidden_size, device, both, size, edges) for edges in every_edges
            )
            forwards = (launch_plan(rows, hidden_size, size, gpu, added) for added in _OPS)
            found.setdefault((*forwards, *proofs), rows)
    return tuple(found.values())


def default_plan(rows: int, hidden_size: int, element_size: int = 2, added: bool = False) -> Plan:
    """A sound plan for any GPU; rows of one `row_class` share it. The arguments are those of `launch_plan`."""
    columns = 1 << (hidden_size - 1).bit_length()
    size = columns * element_size
    few, fit = row_class(rows) < ROW_CLASSES[-1], not added or size <= _MAX_SHARED_BYTES_ADDED
    if few and fit and columns > _SHARED_COLUMNS:
        programs = min(columns // _SHARED_COLUMNS, _MAX_PROGRAMS_PER_ROW)
        return Plan(1, 4 if columns // programs == _SHARED_COLUMNS else 8, by_lane=True, programs_per_row=programs)
    # With residuals so long a row does not stay in a multiprocessor's L1 until it is read again (H200).
    if size > _MAX_KEPT_BYTES and not added:
        return Plan(1, min(size // _STREAMED_BYTES_PER_WARP, _MAX_WARPS), streamed=True)
    order = row_reduction(rows, hidden_size)
    tile = order.columns << order.log2_steps
    rows_per_program = min(max(_MIN_ELEMENTS_PER_PROGRAM // tile, 1), row_class(rows))
    warps = rows_per_program * tile // (_ELEMENTS_PER_THREAD * 32)
    return Plan(rows_per_program, min(max(warps, 1), _MAX_WARPS))


def fused_launch_plan(rows: int, hidden_size: int, dtype: torch.dtype) -> Plan:
    """The plan for the sum of `F.rms_norm`, whose lanes are so few that more threads would have to exchange what they loaded."""
    order = fused_row_reduction(hidden_size)
    tile = order.columns << order.log2_steps
    rows_per_program = min(max(_MIN_ELEMENTS_PER_PROGRAM // tile, 1), row_class(rows))
    threads = rows_per_program * min(tile // _ELEMENTS_PER_THREAD, order.columns * dtype.itemsize // 16)
    return Plan(rows_per_program, max(threads // 32, 1))


def _plan(variant: Variant, dtype: torch.dtype, hidden_size: int, rows: int, device: torch.device) -> Plan:
    if variant.fused:
        return fused_launch_plan(rows, hidden_size, dtype)
    return launch_plan(rows, hidden_size, dtype.itemsize, plans.gpu(device))


def _stride_unit(row_stride: int, dtype: torch.dtype) -> int:
    """The largest power of two that divides the row stride, up to 16 bytes: so many elements can be read at a time."""
    return math.gcd(row_stride, 16 // dtype.itemsize)


def _forward(
    variant, dtype, weight_dtype, hidden_size, rows, row_stride, device: torch.device, eps, store_rstd=False, plan=None
) -> launch.Launch:
    """The launch of the forward kernel, to be called with hidden_states, weight, out and rstd.

    Args:
        plan: another one than that for `rows`: a proof runs the very kernel of a larger call.
    """
    if plan is None:
        plan = _plan(variant, dtype, hidden_size, rows, device)
    unit = _stride_unit(row_stride, dtype)
    # Of all rows of a class, so that one kernel serves them.
    order = fused_row_reduction(hidden_size) if variant.fused else row_reduction(row_class(rows), hidden_size)
    constants = {
        "SCALE": variant.scale,
        "HIDDEN_SIZE": hidden_size,
        "STRIDE_UNIT": unit,
        "ROWS": plan.rows_per_program,
        "LOG2_STEPS": order.log2_steps,
        "WIDTH": order.width,
        "HEIGHT": order.height,
        "VECTORIZED": order.vectorized,
        "FUSED": variant.fused,
        "STREAMED": plan.streamed,
        "BY_LANE": plan.by_lane,
        "PARTS": plan.programs_per_row,
        "AHEAD": plan.ahead(hidden_size * dtype.itemsize),
    }
    dtypes = (dtype, weight_dtype, variant.output_dtype(dtype, weight_dtype), torch.float32)
    scalars = rows, row_stride // unit, int(store_rstd), eps
    return launch.bind(rms_norm_forward, constants, plan.num_warps, device, dtypes, plan.programs(rows), *scalars)


# From a call's tensors to a kernel


class _Inference:
    """All that follows from the shapes, strides, dtypes and device of a call, and from eps."""

    __slots__ = ("launch", "out", "empty", "recent")

    def __init__(self, launch: launch.Launch, out: Output):
        # Methods, here and in `_recent`: to call an object that is no function costs 0.1 us more.
        self.launch = launch.on_three
        self.out = out
        self.empty = out.empty
        self.recent = None

    def __call__(self, x, weight):
        out = self.empty()
        self.launch(x, weight, out)
        return out


class _Training:
    """The same for a call that needs gradients, and so the row statistics."""

    __slots__ = ("variant", "original", "weight_dtype", "launch", "empty", "empty_rstd", "two_edges", "eps", "recent")

    def __init__(
        self,
        variant: Variant,
        original: Callable,
        weight_dtype: torch.dtype,
        launch: launch.Launch,
        out: Output,
        empty_rstd: Callable,
        two_edges,
        eps,
    ):
        self.variant = variant
        self.original = original
        self.weight_dtype = weight_dtype
        self.launch = launch.on_four
        self.empty = out.empty
        self.empty_rstd = empty_rstd
        # Eager's fp32 activations reach the sum by two edges, the product's and the mean's.
        self.two_edges = two_edges
        self.eps = eps
        self.recent = None

    def __call__(self, x, weight):
        return _apply(x, x if self.two_edges else None, weight, self)

    def with_rstd(self, x, weight):
        """The output and rstd, `[..., 1]`."""
        if dispatch_modes():
            return self.variant.with_rstd(x, weight, self.eps)
        out = self.empty()
        rstd = self.empty_rstd()
        self.launch(x, weight, out, rstd)
        return out, rstd


def _read_in_vectors(x, weight) -> bool:
    """Whether `F.rms_norm` reads these by fours; otherwise it computes rstd in another way."""
    return not (x.data_ptr() | weight.data_ptr()) & (4 * x.element_size() - 1)


class _FusedInference(_Inference):
    """`_Inference` of a layer that calls `F.rms_norm`."""

    __slots__ = ("variant", "eps")

    def __init__(self, launch: launch.Launch, out: Output, variant: Variant, eps):
        super().__init__(launch, out)
        self.variant = variant
        self.eps = eps

    def __call__(self, x, weight):
        if not _read_in_vectors(x, weight):
            return self.variant.eager(x, weight, self.eps)
        out = self.empty()
        self.launch(x, weight, out)
        return out


class _FusedTraining(_Training):
    """`_Training` of a layer that calls `F.rms_norm`: the gradients are computed by ATen's operator for them."""

    __slots__ = ()

    def __call__(self, x, weight):
        return _apply_fused(x, weight, self)

    def with_rstd(self, x, weight):
        if not _read_in_vectors(x, weight):
            return self.variant.with_rstd(x, weight, self.eps)
        return super().with_rstd(x, weight)


_calls = {}
# What a call needs that needs no gradient of x and none of the weight.
NO_GRADIENTS = (False, False)
# By the identity of a weight its last call, which is found without building the key above.
_recent = {}
_recent_fused = {}


def replacement(
    hidden_states: torch.Tensor,
    weight: Optional[torch.Tensor],
    eps: float,
    owner: type,
    eps_name: str = "variance_epsilon",
    fused: bool = False,
    state: Mapping = NO_STATE,
) -> Optional[torch.Tensor]:
    """What `owner.forward` returns, from the kernel; None where the caller must compute it itself.

    Args:
        weight: None for an RMSNorm without one.
        owner: the class of the layer that is replaced.
        eps_name: the attribute that eps is from.
        fused: whether the caller has looked at what `F.rms_norm` goes by beside these tensors, the shape to normalise and
            autocast. Otherwise no forward is replaced that calls it.
        state: the layer's `__dict__`.
    """
    if is_dynamo_compiling():
        return _compiled(hidden_states, weight, eps, owner, eps_name, fused)
    recently = _recent_fused if fused else _recent
    recent = recently.get(id(weight))
    if recent is not None:
        same, replaced, forward, helpers, read, added, grad, call = recent
        if (
            type(hidden_states) in PLAIN_TYPES
            and not hidden_states.is_nested
            and same(hidden_states, weight)
            and replaced() is owner
            and forward is owner.forward
            and (not helpers or proof.are_current(helpers, owner, state))
            and read is eps_name
            and added is eps
            and grad == is_grad_enabled()
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return call(hidden_states, weight)
    if (
        type(hidden_states) not in PLAIN_TYPES
    ):  # A subclass need not have the operations below; torch.fx traces with no tensor.
        proof.outside(owner.forward, proof.NOT_PLAIN)
        return None
    # Of a sharded weight that nobody gathered nothing is left: not the same as none.
    if weight is None:
        weight = hidden_states.new_empty(0)
    elif not isinstance(weight, torch.Tensor) or weight.numel() == 0:
        proof.outside(owner.forward, "a weight without elements")
        return None
    needs = (hidden_states.requires_grad, weight.requires_grad) if is_grad_enabled() else NO_GRADIENTS
    if not are_ours(hidden_states, weight, needs != NO_GRADIENTS):
        proof.outside(owner.forward, proof.NOT_PLAIN)
        return None
    if needs != NO_GRADIENTS and (hidden_states.is_inference() or weight.is_inference()):
        # Autograd does not save them; eager saves what it makes of them.
        proof.outside(owner.forward, proof.INFERENCE_TENSORS)
        return None
    call = call_of(hidden_states, weight, eps, owner, eps_name, needs, fused, state)
    if call is None:
        return None
    told = (weakref.ref(owner), owner.forward, proof.code_of(owner).helpers, eps_name, eps, is_grad_enabled())
    recent = recognition(call, told, hidden_states, weight)
    if recent is not None and weight.numel():
        remember(recently, id(weight), recent)
    return call(hidden_states, weight)


def call_of(x, weight, eps, owner, eps_name, needs, fused, state=NO_STATE) -> Union[_Inference, _Training, None]:
    """The call for these tensors, looked up; None if the original forward runs.

    Args:
        needs: whether the gradients of x and of the weight are needed.
        state: the layer's `__dict__`.
    """
    functions = proof.functions_of(owner, state)
    if functions is None:
        proof.outside_for_its_code(owner)
        return None
    try:
        key = (
            functions,
            eps_name,
            needs,
            fused,
            eps,
            x.dtype,
            x.shape,
            x.stride(),
            x.device,
            weight.dtype,
            weight.shape,
            weight.stride(),
            weight.device,
        )
        call = _calls.get(key, UNSEEN)
    except (RuntimeError, TypeError):  # Sparse and nested tensors have no strides, some eps no hash.
        return None
    if call is UNSEEN:
        call = remember(_calls, key, _resolve(x, weight, eps, owner, eps_name, needs, fused))
    return call


# `F.rms_norm` of torch 2.11 counts elements in 32 bits, and takes other rows beyond.
_MAX_ELEMENTS_OF_TORCH = 1 << 32
_SPREAD_ROWS = "activations whose rows are strided or not equally spaced"


_EPS_NAMES = frozenset(("variance_epsilon", "eps"))


def _outside(x, weight, eps, owner, needs, fused) -> Optional[str]:
    """Why no kernel takes these tensors or this class, None if one may."""
    if x.dim() == 0 or x.numel() == 0:
        return "there are no rows"
    if not runs_kernels(x.device) or weight.device != x.device:
        return f"activations on {x.device}, weight on {weight.device}"
    if not isinstance(eps, (int, float)):
        return f"eps is of type {type(eps).__name__}"
    hidden_size = x.shape[-1]
    if not in_domain(x.dtype, weight.dtype, hidden_size):
        return f"activations {x.dtype}, weight {weight.dtype}, hidden size {hidden_size}"
    if weight.numel() and (weight.shape, weight.stride()) != ((hidden_size,), (1,)):
        return "a weight that is no contiguous [hidden_size]"
    if rows_in_memory(x.shape, x.stride()) is None:
        return _SPREAD_ROWS
    if calls_torch(owner):
        if not fused:
            return "F.rms_norm, which is replaced by TorchRMSNorm"
        if x.dim() in (4, 5) and x.stride(1) == 1:  # It composes the norm of several operations there.
            return "activations that are channels-last"
        if x.numel() > _MAX_ELEMENTS_OF_TORCH:
            return f"more than {_MAX_ELEMENTS_OF_TORCH} elements"
    if needs != NO_GRADIENTS and x.dim() == 1:  # Of a single row that is no matrix, eager sums no dweight.
        return "gradients of one row that is no matrix"
    return None


def _resolve(x, weight, eps, owner, eps_name, needs, fused) -> Union[_Inference, _Training, None]:
    reason = _outside(x, weight, eps, owner, needs, fused)
    if reason is not None:
        proof.outside(owner.forward, reason)
        return None
    variant = variant_of(owner, eps_name, x.dtype, weight.dtype if weight.numel() else None, x.device)
    if variant is None:
        return None
    hidden_size = x.shape[-1]
    if variant.fused and hidden_size > MAX_FUSED_HIDDEN_SIZE:
        proof.outside(owner.forward, f"hidden size {hidden_size}")
        return None
    rows, row_stride, order = rows_in_memory(x.shape, x.stride())
    with_rstd = needs != NO_GRADIENTS
    # `F.rms_norm` returns a contiguous tensor, also where it composes the variant.
    formula = FUSED if calls_torch(owner) and not variant.fused else variant
    out = Output.of(
        functools.partial(formula.eager, eps=0.0), x, weight, dtype=variant.output_dtype(x.dtype, weight.dtype)
    )
    if rows_in_memory(x.shape, out.strides) != (rows, hidden_size, order):
        proof.outside(owner.forward, _SPREAD_ROWS)
        return None
    if not _proved(variant, owner, x.dtype, weight.dtype, hidden_size, rows, row_stride, x.device):
        return None
    if with_rstd and not gradients_proved(variant, owner, x.dtype, weight.dtype, hidden_size, rows, x.device, needs):
        return None
    launch = _forward(variant, x.dtype, weight.dtype, hidden_size, rows, row_stride, x.device, eps, with_rstd)
    if with_rstd:
        shape, strides = (*x.shape[:-1], 1), (*row_number_strides(x.shape, order), 1)
        empty_rstd = allocator(shape, strides, torch.float32, x.device)
        training = _FusedTraining if variant.fused else _Training
        return training(variant, owner.forward, weight.dtype, launch, out, empty_rstd, x.dtype == torch.float32, eps)
    return _FusedInference(launch, out, variant, eps) if variant.fused else _Inference(launch, out)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, x_again, weight, call):
        out, rstd = call.with_rstd(x, weight)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(x, weight, rstd)
        else:  # Its values are not needed, and as with eager they may change until then.
            ctx.save_for_backward(x, None, rstd)
            ctx.weight = weight.detach()
        ctx.set_materialize_grads(False)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, dy):
        if dy is None:  # Who took the output sent nothing back, which is not the same as zeros.
            return None, None, None, None
        x, weight, rstd = ctx.saved_tensors
        needs_dx, _, needs_dweight, _ = ctx.needs_input_grad
        if weight is None:
            weight = ctx.weight
        variant, weight_dtype = ctx.call.variant, ctx.call.weight_dtype
        arguments = (variant, dy, x, weight, rstd, needs_dx, needs_dweight)
        if torch.is_grad_enabled():  # Somebody differentiates the gradients.
            arguments = (*arguments[:4], eager_rstd(x.to(torch.float32), ctx.call.eps), *arguments[5:])
        elif weight.dtype is weight_dtype:  # Or else the model was given another dtype since.
            return *rms_norm_backward.gradients(*arguments, original=ctx.call.original), None
        return *rms_norm_backward.formula(*arguments, weight_dtype), None


_apply = apply_of(RMSNorm)


class TorchRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, call):
        out, rstd = call.with_rstd(x, weight)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return None, None, None
        x, weight, rstd = ctx.saved_tensors
        arguments, needs = (ctx.call.variant, dy, x, weight), ctx.needs_input_grad[:2]
        if torch.is_grad_enabled() or not dy.is_cuda:
            dx, _, dweight = rms_norm_backward.fused_formula(*arguments, ctx.call.eps, *needs)
        else:
            dx, _, dweight = rms_norm_backward.fused_gradients(*arguments, rstd, *needs)
        return dx, dweight, None


_apply_fused = apply_of(TorchRMSNorm)


# Proof


def calls_torch(owner: type) -> bool:
    """Whether the class's forward calls `F.rms_norm`."""
    called = (function.__code__.co_names for function in proof.functions_of(owner) or ())
    return owner in (EAGER[FUSED], EAGER[FUSED_UNWEIGHTED]) or any("rms_norm" in names for names in called)


def stand_in(owner, weight, eps, hidden_size=None, eps_name=None):
    """A layer of this class with another weight, made without its constructor.

    Args:
        eps_name: the attribute that holds this eps, any other that may be meant then holds another one.
    """
    layer = torch.nn.Module.__new__(owner)
    torch.nn.Module.__init__(layer)
    layer.weight = weight
    for name in _EPS_NAMES:
        setattr(layer, name, eps if eps_name in (None, name) else 3.0 * eps)
    layer.normalized_shape = (hidden_size,) if weight is None else tuple(weight.shape)
    return layer


def variant_of(owner, eps_name, dtype, weight_dtype, device) -> Optional[Variant]:
    """The variant whose formula, in torch operations, has the bits of `owner.forward`, and its gradients.

    Args:
        eps_name: the attribute from which the layer in the place of the class takes eps.
    """
    names = {name for function in proof.functions_of(owner) for name in function.__code__.co_names}
    if names & _EPS_NAMES and eps_name not in names:
        proof.outside(owner.forward, f"the forward does not take its eps from {eps_name}")
        return None
    key = ("formula of rms_norm", proof.functions_of(owner), eps_name, dtype, weight_dtype, device)
    subject = proof.Subject(owner.forward, device, f"activations {dtype}, weight {weight_dtype}")
    if weight_dtype in (None, dtype) and calls_torch(owner):
        variants = (FUSED_UNWEIGHTED if weight_dtype is None else FUSED,)
    else:
        variants = WEIGHTED if weight_dtype is not None else (UNWEIGHTED,)
    return proof.recognize(
        key,
        subject,
        {
            variant: functools.partial(_formulas, owner, eps_name, variant, dtype, weight_dtype, device)
            for variant in variants
        },
    )


def _formulas(owner, eps_name, variant, dtype, weight_dtype, device):
    # No rounding in between tells the fused kernel. What F.rms_norm computes depends on whether the dtypes are one, and is
    # contiguous.
    calls, rows = calls_torch(owner), 2048 if variant.fused else 512
    for dtypes, eps, (x,), weight, dy, other in formula_cases(device, 1, (dtype, weight_dtype), 1, rows, not calls):
        results = []
        for layer_class, name in ((owner, eps_name), (EAGER[variant], None)):
            leaf, scale = leaves((x.contiguous() if calls else x, weight), (dtypes[0], dtypes[1] or dtype))
            with torch.enable_grad():
                hidden_states = leaf.view_as(leaf)
                layer = stand_in(layer_class, scale if weight_dtype else None, eps, len(scale), name)
                out = layer_class.forward(layer, hidden_states)
                inputs = (leaf, scale) if weight_dtype else (leaf,)
                results.append(output_and_gradients(out, hidden_states, inputs, dy, other))
        for what, expected, found in zip(("the output", "the input's gradient", "the weight's gradient"), *results):
            yield what, found, expected


# Less than the mean of squares of small numbers.
_SMALL_EPS = 1e-7


def formula_cases(device, seed, dtypes, inputs, rows, in_fp32=True) -> Iterator[tuple]:
    """`(dtypes, eps, inputs, weight, dy, other)`, all in fp32: what formulas of norms are compared with.

    Numbers of one size; of all sizes, with another gradient for the first input; and with `in_fp32` those of one size in fp32, where
    a division by the square root, say, is not the product with its reciprocal. 16 bits hide it in all but one element of
    100,000 or so, and so does another sum.

    Args:
        dtypes: of the inputs, and last of the weight, None without one.
        inputs: how many there are.
        rows: so many of 1024 elements where the first input has 16 bits.
    """
    generator = proof.generator(device, seed)
    make = functools.partial(torch.randn, dtype=torch.float32, device=device, generator=generator)

    def of_one_size(*shape):
        return [make(shape) for _ in range(inputs)], make(shape[-1]), make(shape), None

    yield dtypes, PROOF_EPS, *of_one_size(*((64, 128) if dtypes[0] == torch.float32 else (rows, 1024)))
    sized = [_of_all_sizes(make) for _ in range(inputs)]
    weight = make(128) * torch.logspace(-2, 2, 128, device=device)
    yield dtypes, _SMALL_EPS, sized, weight, make(sized[0].shape), make(sized[0].shape)
    fp32 = tuple(dtype and torch.float32 for dtype in dtypes)
    if in_fp32 and fp32 != dtypes:
        yield fp32, PROOF_EPS, *of_one_size(64, 128)


def _of_all_sizes(make) -> torch.Tensor:
    """Rows of numbers from 1e-8 to 1e8, of zeros and with what is not finite: where a clamp shows that others never reach.

    `[2, 6, 8, 128]`, the rows not in the order of memory: who takes them for another number of dimensions, or makes them
    contiguous, shows as well.
    """
    x = make(2, 8, 6, 128)
    rows = x.view(-1, 128)
    rows *= torch.logspace(-8, 8, len(rows), device=x.device)[:, None]
    rows[0] = 0.0
    rows[1:4, 5] = torch.tensor((math.inf, -math.inf, math.nan), device=x.device)
    return x.transpose(1, 2)


def leaves(tensors, dtypes) -> list[torch.Tensor]:
    """Copies that need gradients, even of what has the dtype already: a forward may write to them."""
    return [tensor.to(dtype, copy=True).requires_grad_() for tensor, dtype in zip(tensors, dtypes)]


def output_and_gradients(out, hidden_states, inputs, dy, other=None) -> tuple[torch.Tensor, ...]:
    """With `other`, a gradient of hidden_states besides, which shows in which order theirs arrive."""
    outputs, gradients = ((out,), (dy,)) if other is None else ((out, hidden_states), (dy, other))
    gradients = [gradient.to(output.dtype) for gradient, output in zip(gradients, outputs)]
    return out.detach(), *torch.autograd.grad(outputs, inputs, gradients)


def subject_of(variant, owner, device, dtype, weight_dtype, hidden_size, rows, what=""):
    more = " or more" if rows == ROW_CLASSES[-1] else ""
    where = f"activations {dtype}, weight {weight_dtype}, hidden size {hidden_size}, {rows}{more} rows{what}"
    return proof.Subject(owner.forward, device, where, variant.formula)


def _proved(variant, owner, dtype, weight_dtype, hidden_size, rows, row_stride, device) -> bool:
    """Whether the forward kernel for such rows has proved to return the bits of `owner.forward`."""
    plan = _plan(variant, dtype, hidden_size, rows, device)
    rows = row_class(rows)
    unit = _stride_unit(row_stride, dtype)
    key = ("rms_norm", proof.functions_of(owner), variant, dtype, weight_dtype, hidden_size, rows, unit, plan, device)
    subject = subject_of(variant, owner, device, dtype, weight_dtype, hidden_size, rows)
    # Rows of the same alignment, with elements in between that must not count.
    row_stride = hidden_size if _stride_unit(hidden_size, dtype) == unit else hidden_size + unit
    arguments = (variant, owner, dtype, weight_dtype, hidden_size, rows, row_stride, device, plan)
    return proof.admits(key, subject, functools.partial(_comparisons, *arguments))


def gradients_proved(variant, owner, dtype, weight_dtype, hidden_size, rows, device, needs, edges=None) -> bool:
    """Whether the backward kernels for such rows have proved to return the bits of autograd through `owner.forward`.

    Args:
        edges: one of `rms_norm_backward.edges_of`; by default that of the layer alone.
    """
    if variant.fused:
        return _fused_gradients_proved(variant, owner, dtype, weight_dtype, hidden_size, device, needs)
    edges = edges or rms_norm_backward.edges_of(dtype)
    least, plan = rms_norm_backward.proof_class(rows, hidden_size, device, all(needs), dtype.itemsize, edges)
    shared = row_class(rows)
    key = (
        "rms_norm gradients",
        proof.functions_of(owner),
        variant,
        dtype,
        weight_dtype,
        hidden_size,
        shared,
        least,
        plan,
        device,
        needs,
        edges,
    )
    what = ", in training, joined with the residual's gradient" if edges == "added" else ", in training"
    subject = subject_of(variant, owner, device, dtype, weight_dtype, hidden_size, shared, what)
    arguments = (variant, owner, dtype, weight_dtype, hidden_size, least, rows, device, needs, edges)
    return proof.admits(key, subject, functools.partial(_gradient_comparisons, *arguments))


def _fused_gradients_proved(variant, owner, dtype, weight_dtype, hidden_size, device, needs) -> bool:
    """Whether ATen's operator for the gradients of `F.rms_norm`, called with our rstd, computes what autograd does."""
    key = ("rms_norm gradients", proof.functions_of(owner), variant, dtype, weight_dtype, hidden_size, device, needs)
    subject = subject_of(variant, owner, device, dtype, weight_dtype, hidden_size, ROW_CLASSES[-1], ", in training")
    arguments = (variant, owner, dtype, weight_dtype, hidden_size, device, needs)
    return proof.admits(key, subject, functools.partial(_fused_gradient_comparisons, *arguments))


def _fused_gradient_comparisons(variant, owner, dtype, weight_dtype, hidden_size, device, needs):
    generator = proof.generator(device, seed=hidden_size)
    make = functools.partial(torch.randn, device=device, generator=generator)
    x = make(PROOF_ROWS, hidden_size).to(dtype).requires_grad_()
    weight = random_weight(variant, make, hidden_size, weight_dtype).requires_grad_()
    dy = make(PROOF_ROWS, hidden_size).to(dtype)
    with torch.enable_grad():
        out = original_output(variant, owner, weight, PROOF_EPS, x)
        expected = torch.autograd.grad(out, (x, weight), dy, allow_unused=True)
    x, weight = x.detach(), weight.detach()
    shape = (hidden_size, PROOF_ROWS, hidden_size)
    forward = _forward(variant, dtype, weight_dtype, *shape, device, PROOF_EPS, store_rstd=True)
    rstd = torch.full((PROOF_ROWS, 1), math.nan, dtype=torch.float32, device=device)
    forward(x, weight, torch.empty_like(x), rstd)
    dx, _, dweight = rms_norm_backward.fused_gradients(variant, dy, x, weight, rstd, *needs)
    if needs[0]:
        yield "the input's gradient", dx, expected[0]
    if needs[1]:
        yield "the weight's gradient", dweight, expected[1]


# Rows that a proof compares: a wrong order shows in two of five rows' rstd or more (`spike`). Rows of a smaller class are summed in
# another order, and a call has no more of them: of single rows there are so many calls, which it passes once in 10**7.
PROOF_ROWS = 128
_PROOF_CALLS = 32
# Gradients take several times as long, and their rows are summed in an order that the forward pass has proved.
_GRADIENT_CALLS = 16
PROOF_EPS = 0.0123


def proof_calls(rows: int) -> tuple[int, int]:
    """How many calls a forward proof for a class of row counts makes, and of how many rows."""
    return (1, PROOF_ROWS) if rows == ROW_CLASSES[-1] else (min(PROOF_ROWS // rows, _PROOF_CALLS), rows)


def spike(x: torch.Tensor, call: int) -> torch.Tensor:
    """x `[rows, hidden_size]` with a large element in each row, in another column in each (no more rows than these) and each call.

    Its square outweighs the row's others. So all that are added to it are rounded at the size of the sum, where another
    order shows three times as often as with numbers of one size.
    """
    rows, hidden_size = x.shape
    first = 37 * call % max(hidden_size - rows, 1)
    x[:, first:].diagonal().fill_(4.0 * math.sqrt(hidden_size))
    return x


def _comparisons(variant, owner, dtype, weight_dtype, hidden_size, rows, row_stride, device, plan=None):
    generator = proof.generator(device, seed=hidden_size)
    make = functools.partial(torch.randn, dtype=torch.float32, device=device, generator=generator)
    calls, rows = proof_calls(rows)
    eps = PROOF_EPS
    where = (hidden_size, rows, row_stride, device)
    forward = _forward(variant, dtype, weight_dtype, *where, eps, store_rstd=True, plan=plan)
    for call in range(calls):
        x = spike(make(rows, row_stride).to(dtype)[:, :hidden_size], call)
        weight = random_weight(variant, make, hidden_size, weight_dtype)
        expected = original_output(variant, owner, weight, eps, x)
        out = torch.full_like(expected, math.nan)
        rstd = torch.full((rows, 1), math.nan, dtype=torch.float32, device=device)
        forward(x, weight, out, rstd)
        yield "the fp32 rstd", rstd, variant.rstd(x, weight, eps)
        yield "the output", out, expected


def _gradient_comparisons(variant, owner, dtype, weight_dtype, hidden_size, rows, like_rows, device, needs, edges):
    few = min(rows, rms_norm_backward.rows_of_same_kernel(rows, PROOF_ROWS, hidden_size, device))
    generator = proof.generator(device, seed=hidden_size)
    make = functools.partial(torch.randn, device=device, generator=generator)
    arguments = (variant, make, dtype, weight_dtype, hidden_size)
    for call in range(min(-(-PROOF_ROWS // few), _GRADIENT_CALLS)):
        yield from _comparisons_with_autograd(call, owner, *arguments, few, like_rows, needs, edges)
    if few < rows and needs[1]:
        yield from _comparisons_of_many_rows(*arguments, rows, like_rows, needs, edges)


def _comparisons_with_autograd(
    call, owner, variant, make, dtype, weight_dtype, hidden_size, rows, like_rows, needs, edges
):
    leaf = spike(make(rows, hidden_size).to(dtype), call).requires_grad_()
    weight = random_weight(variant, make, hidden_size, weight_dtype).requires_grad_()
    dy = make(rows, hidden_size).to(variant.output_dtype(dtype, weight_dtype))
    d_sum = make(rows, hidden_size).to(dtype) if edges == "added" else None
    with torch.enable_grad():
        x = leaf.view_as(leaf)
        expected = original_output(variant, owner, weight, PROOF_EPS, x)
        outputs, gradients = ((expected,), (dy,)) if d_sum is None else ((expected, x), (dy, d_sum))
        dx, dweight = torch.autograd.grad(outputs, (leaf, weight), gradients, allow_unused=True)
    x, weight = leaf.detach(), weight.detach()
    rstd, ours, d_rstd, dweight_sum = _our_gradients(variant, dy, x, weight, needs, like_rows, edges, d_sum)
    needs_dx, needs_dweight = needs
    if needs_dx:
        d_normalized = variant.incoming(dy)
        if variant is not UNWEIGHTED:
            d_normalized = d_normalized * variant.factor(weight)
        if variant.scale == "after_cast":
            d_normalized = d_normalized.to(dtype).to(torch.float32)
        yield "the fp32 gradient of rstd", d_rstd, (d_normalized * x.to(torch.float32)).sum(-1, keepdim=True)
        yield "the input's gradient", ours.dx if ours.dx_mean is None else ours.dx + ours.dx_mean, dx
    if needs_dweight:
        product = rms_norm_backward.weight_products(variant, dy, x.to(torch.float32), rstd, dtype)
        yield "the fp32 weight gradient", dweight_sum, product.sum(0, dtype=torch.float32)
        yield "the weight's gradient", ours.dweight, dweight


def _comparisons_of_many_rows(variant, make, dtype, weight_dtype, hidden_size, rows, like_rows, needs, edges):
    """The order in which several blocks share the rows. As few tensors of this size as it takes: dy is x."""
    x = make(rows, hidden_size, dtype=dtype)
    weight = random_weight(variant, make, hidden_size, weight_dtype)
    dy = x.to(variant.output_dtype(dtype, weight_dtype))
    d_sum = x if edges == "added" else None
    rstd, ours, _, dweight_sum = _our_gradients(variant, dy, x, weight, needs, like_rows, edges, d_sum)
    dweight = ours.dweight
    del ours
    product = torch.empty_like(x, dtype=dy.dtype if variant.scale == "after_cast" else torch.float32)
    for first in range(0, rows, PROOF_ROWS):
        at = slice(first, first + PROOF_ROWS)
        product[at] = rms_norm_backward.weight_products(variant, dy[at], x[at].to(torch.float32), rstd[at], dtype)
    # ATen's sum takes twice the memory of an fp32 product for itself.
    del x, dy, rstd, d_sum
    yield "the fp32 weight gradient", dweight_sum, product.sum(0, dtype=torch.float32)
    yield "the weight's gradient", dweight, product.sum(0).to(weight_dtype)


def _our_gradients(variant, dy, x, weight, needs, like_rows, edges, d_sum):
    """rstd, the gradients, and the fp32 statistics in them."""
    # The formula's, in few rows at a time for the memory: the forward kernel has a proof of its own.
    rstd = torch.cat([variant.rstd(few, weight, PROOF_EPS) for few in x.split(PROOF_ROWS)])
    # Each in memory of its own, which is aligned as in a real call: the kernel is compiled apart for other pointers.
    d_rstd = torch.full_like(rstd, math.nan)
    dweight_sum = torch.full((x.shape[-1],), math.nan, dtype=torch.float32, device=x.device)
    backward = rms_norm_backward.resolve(variant, dy, x, weight, rstd, *needs, edges, like_rows, statistics=True)
    return rstd, backward(dy, x, weight, rstd, d_sum, d_rstd, dweight_sum), d_rstd, dweight_sum


def random_weight(variant, make, hidden_size, dtype):
    return make(0 if variant.scale == "none" else hidden_size).to(dtype)


def original_output(variant, owner, weight, eps, x):
    return owner.forward(stand_in(owner, None if variant.scale == "none" else weight, eps, x.shape[-1]), x)


# torch.compile


@torch.library.custom_op(add_op_namespace_prefix("rms_norm"), mutates_args=())
def _rms_norm_op(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float, variant: str) -> torch.Tensor:
    formula = BY_NAME[variant]
    call = call_of(hidden_states, weight, eps, EAGER[formula], "variance_epsilon", NO_GRADIENTS, formula.fused)
    return formula.eager(hidden_states, weight, eps) if call is None else call(hidden_states, weight)


@_rms_norm_op.register_fake
def _(hidden_states, weight, eps, variant):
    return BY_NAME[variant].eager(hidden_states, weight, eps)


# `again` is hidden_states once more where eager has two edges to it.
@torch.library.custom_op(add_op_namespace_prefix("rms_norm_with_rstd"), mutates_args=())
def _rms_norm_with_rstd_op(
    hidden_states: torch.Tensor, again: Optional[torch.Tensor], weight: torch.Tensor, eps: float, variant: str
) -> tuple[torch.Tensor, torch.Tensor]:
    formula = BY_NAME[variant]
    needs = (True, formula.scale != "none")
    call = call_of(hidden_states, weight, eps, EAGER[formula], "variance_epsilon", needs, formula.fused)
    if call is None:
        out, rstd = formula.with_rstd(hidden_states, weight, eps)
    else:
        out, rstd = call.with_rstd(hidden_states, weight)
    return out, rstd.contiguous()


@_rms_norm_with_rstd_op.register_fake
def _(hidden_states, again, weight, eps, variant):
    rstd = hidden_states.new_empty((*hidden_states.shape[:-1], 1), dtype=torch.float32)
    return BY_NAME[variant].eager(hidden_states, weight, eps), rstd


@torch.library.custom_op(add_op_namespace_prefix("rms_norm_backward"), mutates_args=())
def _rms_norm_backward_op(
    dy: torch.Tensor,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    needs_dx: bool,
    needs_dweight: bool,
    variant: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, hidden_size, needs = rstd.numel(), hidden_states.shape[-1], (needs_dx, needs_dweight)
    formula, dtypes = BY_NAME[variant], (hidden_states.dtype, weight.dtype)
    if formula.fused:
        return rms_norm_backward.present(
            rms_norm_backward.fused_gradients(formula, dy, hidden_states, weight, rstd, *needs), dy
        )
    proved = (
        runs_kernels(dy.device)
        and in_domain(*dtypes, hidden_size)
        and rows > 0
        and gradients_proved(formula, EAGER[formula], *dtypes, hidden_size, rows, dy.device, needs)
    )
    compute = rms_norm_backward.gradients if proved else rms_norm_backward.formula
    return rms_norm_backward.present(compute(formula, dy, hidden_states, weight, rstd, *needs), dy)


@_rms_norm_backward_op.register_fake
def _(dy, hidden_states, weight, rstd, needs_dx, needs_dweight, variant):
    if BY_NAME[variant].fused:
        dx = hidden_states.new_empty(hidden_states.shape) if needs_dx else None
        return rms_norm_backward.present((dx, None, weight.new_empty(weight.shape) if needs_dweight else None), dy)
    arguments = (dy, hidden_states, weight, rstd, needs_dx, needs_dweight)
    return rms_norm_backward.present(rms_norm_backward.formula(BY_NAME[variant], *arguments), dy)


def _setup_context(ctx, inputs, output):
    hidden_states, _, weight, _, ctx.variant = inputs
    ctx.save_for_backward(hidden_states, weight, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, d_rstd):
    if dy is None:
        return None, None, None, None, None
    needs_dx, needs_again, needs_dweight, *_ = ctx.needs_input_grad
    gradients = _rms_norm_backward_op(dy, *ctx.saved_tensors, needs_dx, needs_dweight, ctx.variant)
    needed = zip((needs_dx, needs_again, needs_dweight), gradients)
    return *(gradient if need else None for need, gradient in needed), None, None


_rms_norm_with_rstd_op.register_autograd(_backward, setup_context=_setup_context)


@torch.compiler.assume_constant_result
def _variant_for_compile(
    owner, eps_name, dtype, weight_dtype, hidden_size, device_index, training, fused
) -> Optional[str]:
    """The name of the proved variant; None if the original forward is traced.

    Taken at trace time, for all classes of row counts and plans, since a graph with dynamic shapes meets them all. In training the
    operators prove more at their first call, as eager does, and compute the formula where that fails.
    """
    device = torch.device("cuda", device_index)
    if under_transform() or proof.functions_of(owner) is None or (calls_torch(owner) and not fused):
        return None
    variant = variant_of(owner, eps_name, dtype, weight_dtype, device)
    if variant is None or (variant.fused and hidden_size > MAX_FUSED_HIDDEN_SIZE):
        return None
    subject = (variant, owner, dtype, weight_dtype or dtype, hidden_size)
    needs = (True, weight_dtype is not None)
    all_rows = planned_rows(hidden_size, dtype.itemsize, plans.gpu(device))
    proved = all(_proved(*subject, rows, hidden_size, device) for rows in all_rows) and (
        not training or gradients_proved(*subject, ROW_CLASSES[-1], device, needs)
    )
    return variant.name if proved else None


def _compiled(hidden_states, weight, eps, owner, eps_name, fused):
    """`replacement` while torch.compile traces: the registered op, or None to trace the original forward."""
    if not hidden_states.is_cuda or hidden_states.dim() < 2 or not isinstance(eps, (int, float)):
        return None
    if weight is None:
        hidden_size, weight_dtype = int(hidden_states.shape[-1]), None
        weight = hidden_states.new_empty(0)
    elif weight.device != hidden_states.device or weight.dim() != 1:
        return None
    else:
        # A constant in the graph, even where every other size is symbolic.
        hidden_size, weight_dtype = int(weight.shape[0]), weight.dtype
    if hidden_states.shape[-1] != hidden_size or not in_domain(hidden_states.dtype, weight.dtype, hidden_size):
        return None
    training = is_grad_enabled() and (hidden_states.requires_grad or weight.requires_grad)
    device_index = hidden_states.device.index or 0
    subject = (owner, eps_name, hidden_states.dtype, weight_dtype, hidden_size, device_index)
    variant = _variant_for_compile(*subject, training, fused)
    if variant is None:
        return None
    if not training:
        return _rms_norm_op(hidden_states, weight, eps, variant)
    two_edges = hidden_states.dtype == torch.float32 and not BY_NAME[variant].fused
    again = hidden_states if two_edges else None
    return _rms_norm_with_rstd_op(hidden_states, again, weight, eps, variant)[0]
