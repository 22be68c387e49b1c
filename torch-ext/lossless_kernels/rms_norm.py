"""RMSNorm with the bits of transformers' eager `LlamaRMSNorm`."""

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Callable, Optional, Union

import torch
from torch import empty_like, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from . import launch, proof, rms_norm_backward
from ._ops import add_op_namespace_prefix
from .domain import (
    FLOAT_DTYPES,
    UNSEEN,
    are_plain,
    check_floating,
    dispatch_modes,
    remember,
    runs_kernels,
    same_tensors,
    under_transform,
)
from .layout import Output, row_number_strides, rows_in_memory
from .reduce_config import ROW_CLASSES, row_class, row_reduction

if launch.AVAILABLE:
    from .kernels_src.rms_norm import rms_norm_forward

MIN_HIDDEN_SIZE = 64
MAX_HIDDEN_SIZE = 32768


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
    out = replacement(hidden_states, weight, eps, eager_forward)
    return eager(hidden_states, weight, eps) if out is None else out


def eager(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula of `rms_norm` in torch operations, one rounding each."""
    h = hidden_states.to(torch.float32)
    return weight * (h * _eager_rstd(h, eps)).to(hidden_states.dtype)


def _eager_rstd(h, eps):
    return torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def eager_forward(module, hidden_states):
    return eager(hidden_states, module.weight, module.variance_epsilon)


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
    """How the forward kernel is launched for one hidden size and one class of row counts."""

    rows_per_program: int
    num_warps: int


# Elements that a thread keeps in registers, and that a program takes at least (H200).
_ELEMENTS_PER_THREAD = 64
_MIN_ELEMENTS_PER_PROGRAM = 2048
_MAX_WARPS = 16


def launch_plan(rows: int, hidden_size: int) -> Plan:
    """The plan for `rows` rows; rows of one `row_class` share it."""
    order = row_reduction(rows, hidden_size)
    tile = order.columns << order.log2_steps
    rows_per_program = min(max(_MIN_ELEMENTS_PER_PROGRAM // tile, 1), row_class(rows))
    warps = rows_per_program * tile // (_ELEMENTS_PER_THREAD * 32)
    return Plan(rows_per_program, min(max(warps, 1), _MAX_WARPS))


@functools.cache
def _forward_launcher(dtype, weight_dtype, hidden_size, rows, stride_unit, device) -> launch.Launcher:
    """The forward kernel for one class of inputs, dtypes included: a launcher stands for one compiled kernel."""
    plan = launch_plan(rows, hidden_size)
    order = row_reduction(rows, hidden_size)
    constants = {
        "HIDDEN_SIZE": hidden_size,
        "STRIDE_UNIT": stride_unit,
        "ROWS": plan.rows_per_program,
        "LOG2_STEPS": order.log2_steps,
        "WIDTH": order.width,
        "HEIGHT": order.height,
        "VECTORIZED": order.vectorized,
    }
    return launch.Launcher(rms_norm_forward, constants, plan.num_warps, device)


def _stride_unit(row_stride: int, dtype: torch.dtype) -> int:
    """The largest power of two that divides the row stride, up to 16 bytes: so many elements can be read at a time."""
    return math.gcd(row_stride, 16 // dtype.itemsize)


def _forward(
    dtype, weight_dtype, hidden_size, rows, row_stride, device: torch.device, eps, store_rstd=False
) -> launch.Launch:
    """The launch of the forward kernel, to be called with hidden_states, weight, out and rstd."""
    unit = _stride_unit(row_stride, dtype)
    launcher = _forward_launcher(dtype, weight_dtype, hidden_size, row_class(rows), unit, device.index or 0)
    blocks = -(-rows // launcher.constants["ROWS"])
    return launcher.bind(blocks, rows, row_stride // unit, int(store_rstd), eps)


# From a call's tensors to a kernel


class _Inference:
    """All that follows from the shapes, strides, dtypes and device of a call, and from eps."""

    __slots__ = ("launch", "out", "like_input")

    def __init__(self, launch: launch.Launch, out: Output):
        # Methods, here and in `_recent`: to call an object that is no function costs 0.1 us more.
        self.launch = launch.on_three
        self.out = out
        self.like_input = out.like_input

    def __call__(self, x, weight):
        out = empty_like(x) if self.like_input else self.out.empty(x)
        self.launch(x, weight, out)
        return out


class _Training:
    """The same for a call that needs gradients, and so the row statistics."""

    __slots__ = ("launch", "out", "rstd_strides", "eps")

    def __init__(self, launch: launch.Launch, out: Output, rstd_strides, eps):
        self.launch = launch
        self.out = out
        self.rstd_strides = rstd_strides
        self.eps = eps

    def __call__(self, x, weight):
        # Eager's fp32 activations reach the sum by two edges, the product's and the mean's.
        return _Differentiable.apply(x, x if x.dtype == torch.float32 else None, weight, self)

    def with_rstd(self, x, weight):
        """The output and rstd, `[..., 1]`."""
        out = self.out.empty(x)
        rstd = torch.empty_strided((*x.shape[:-1], 1), self.rstd_strides, dtype=torch.float32, device=x.device)
        self.launch(x, weight, out, rstd)
        return out, rstd


_calls = {}
# What a call needs that needs no gradient of x and none of the weight.
NO_GRADIENTS = (False, False)
# By the identity of a weight its last call, which is found without building the key above.
_recent = {}


def replacement(
    hidden_states: torch.Tensor, weight: torch.Tensor, eps: float, original: Callable
) -> Optional[torch.Tensor]:
    """What `original(module, hidden_states)` returns, from the kernel; None where the caller must compute it itself.

    Args:
        original: the forward that is replaced. Reads `weight` and `variance_epsilon` of the module it gets.
    """
    if is_dynamo_compiling():
        return _compiled(hidden_states, weight, eps, original)
    recent = _recent.get(id(weight))
    if recent is not None:
        same, replaced, added, grad, call = recent
        if (
            same(hidden_states, weight)
            and replaced is original
            and added == eps
            and grad == is_grad_enabled()
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return call(hidden_states, weight)
    if not are_plain(hidden_states, weight):
        return None
    needs = (hidden_states.requires_grad, weight.requires_grad) if is_grad_enabled() else NO_GRADIENTS
    call = _call(hidden_states, weight, eps, original, needs)
    if call is None:
        return None
    same = same_tensors(hidden_states, weight)
    if same is not None:
        remember(_recent, id(weight), (same, original, eps, is_grad_enabled(), call.__call__))
    return call(hidden_states, weight)


def _call(x, weight, eps, original, needs) -> Union[_Inference, _Training, None]:
    """The call for these tensors, looked up; None if the original forward runs.

    Args:
        needs: whether the gradients of x and of the weight are needed.
    """
    try:
        key = (
            original,
            needs,
            eps,
            x.dtype,
            x.shape,
            x.stride(),
            x.get_device(),
            weight.dtype,
            weight.shape,
            weight.stride(),
            weight.get_device(),
        )
    except RuntimeError:  # Sparse and nested tensors have no strides.
        return None
    call = _calls.get(key, UNSEEN)
    if call is UNSEEN:
        call = remember(_calls, key, _resolve(x, weight, eps, original, needs))
    return call


def _resolve(x, weight, eps, original, needs) -> Union[_Inference, _Training, None]:
    if x.dim() == 0 or not runs_kernels(x.device) or weight.device != x.device or not isinstance(eps, (int, float)):
        return None
    hidden_size = x.shape[-1]
    if not in_domain(x.dtype, weight.dtype, hidden_size) or (weight.shape, weight.stride()) != ((hidden_size,), (1,)):
        return None
    matrix = rows_in_memory(x.shape, x.stride())
    if matrix is None:
        return None
    with_rstd = needs != NO_GRADIENTS
    rows, row_stride, order = matrix
    out = Output.of(functools.partial(eager, eps=0.0), x, weight)
    if rows_in_memory(x.shape, out.strides) != (rows, hidden_size, order):
        return None
    if rows == 0 or (with_rstd and x.dim() == 1):  # Of a single row that is no matrix, eager sums no dweight.
        return None
    if not _proved(original, x.dtype, weight.dtype, hidden_size, rows, row_stride, x.device):
        return None
    if with_rstd and not _gradients_proved(original, x.dtype, weight.dtype, hidden_size, rows, x.device, needs):
        return None
    launch = _forward(x.dtype, weight.dtype, hidden_size, rows, row_stride, x.device, eps, with_rstd)
    if with_rstd:
        return _Training(launch, out, (*row_number_strides(x.shape, order), 1), eps)
    return _Inference(launch, out)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, x_again, weight, call):
        out, rstd = call.with_rstd(x, weight)
        ctx.save_for_backward(x, weight, rstd)
        ctx.eps = call.eps
        return out

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        needs_dx, _, needs_dweight, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # Somebody differentiates the gradients.
            rstd = _eager_rstd(x.to(torch.float32), ctx.eps)
            return *rms_norm_backward.formula(dy, x, weight, rstd, needs_dx, needs_dweight), None
        return *rms_norm_backward.gradients(dy, x, weight, rstd, needs_dx, needs_dweight), None


# Proof


def _subject(original, device, dtype, weight_dtype, hidden_size, rows):
    more = " or more" if rows == ROW_CLASSES[-1] else ""
    return (
        f"{original.__qualname__} on {device}, activations {dtype}, weight {weight_dtype}, hidden size {hidden_size}, "
        f"{rows}{more} rows,"
    )


def _proved(original, dtype, weight_dtype, hidden_size, rows, row_stride, device) -> bool:
    """Whether the forward kernel for such rows has proved to return the bits of `original`."""
    rows = row_class(rows)
    unit = _stride_unit(row_stride, dtype)
    key = ("rms_norm", original, dtype, weight_dtype, hidden_size, rows, unit, device)
    subject = _subject(original, device, dtype, weight_dtype, hidden_size, rows)
    # Rows of the same alignment, with elements in between that must not count.
    row_stride = hidden_size if _stride_unit(hidden_size, dtype) == unit else hidden_size + unit
    comparisons = functools.partial(_comparisons, original, dtype, weight_dtype, hidden_size, rows, row_stride, device)
    return proof.admits(key, subject, device, comparisons)


def _gradients_proved(original, dtype, weight_dtype, hidden_size, rows, device, needs) -> bool:
    """Whether the backward kernels for such rows have proved to return the bits of autograd through `original`."""
    least, plan = rms_norm_backward.proof_class(rows, hidden_size, device, all(needs))
    key = (
        "rms_norm gradients",
        original,
        dtype,
        weight_dtype,
        hidden_size,
        row_class(rows),
        least,
        plan,
        device,
        needs,
    )
    subject = _subject(original, device, dtype, weight_dtype, hidden_size, row_class(rows)) + " in training,"
    comparisons = functools.partial(
        _gradient_comparisons, original, dtype, weight_dtype, hidden_size, least, rows, device, needs
    )
    return proof.admits(key, subject, device, comparisons)


# Rows that a proof compares: a wrong order shows in every fifth row's rstd or more, so it passes once in 10**12.
_PROOF_ROWS = 128


def _comparisons(original, dtype, weight_dtype, hidden_size, rows, row_stride, device):
    generator = proof.generator(device, seed=hidden_size)
    make = functools.partial(torch.randn, dtype=torch.float32, device=device, generator=generator)
    calls, rows = (1, _PROOF_ROWS) if rows == ROW_CLASSES[-1] else (-(-_PROOF_ROWS // rows), rows)
    eps = 0.0123
    forward = _forward(dtype, weight_dtype, hidden_size, rows, row_stride, device, eps, store_rstd=True)
    for _ in range(calls):
        x = make(rows, row_stride).to(dtype)[:, :hidden_size]
        weight = make(hidden_size).to(weight_dtype)
        expected = original(SimpleNamespace(weight=weight, variance_epsilon=eps), x)
        out = torch.full_like(expected, math.nan)
        rstd = torch.full((rows, 1), math.nan, dtype=torch.float32, device=device)
        forward(x, weight, out, rstd)
        yield "the fp32 rstd", rstd, _eager_rstd(x.to(torch.float32), eps)
        yield "the output", out, expected


def _gradient_comparisons(original, dtype, weight_dtype, hidden_size, rows, like_rows, device, needs):
    generator = proof.generator(device, seed=hidden_size)
    make = functools.partial(torch.randn, dtype=torch.float32, device=device, generator=generator)
    eps = 0.0123
    forward = _forward(dtype, weight_dtype, hidden_size, rows, hidden_size, device, eps, store_rstd=True)
    for _ in range(-(-_PROOF_ROWS // rows)):
        x = make(rows, hidden_size).to(dtype).requires_grad_()
        weight = make(hidden_size).to(weight_dtype).requires_grad_()
        dy = make(rows, hidden_size).to(torch.promote_types(weight_dtype, dtype))
        with torch.enable_grad():
            expected = original(SimpleNamespace(weight=weight, variance_epsilon=eps), x)
            dx, dweight = torch.autograd.grad(expected, (x, weight), dy)
        x, weight = x.detach(), weight.detach()
        rstd = torch.full((rows, 1), math.nan, dtype=torch.float32, device=device)
        forward(x, weight, torch.empty_like(expected), rstd)
        backward = rms_norm_backward.resolve(dy, x, weight, rstd, *needs, like_rows, statistics=True)
        d_rstd = torch.full((rows, 1), math.nan, dtype=torch.float32, device=device)
        dweight_sum = torch.full((hidden_size,), math.nan, dtype=torch.float32, device=device)
        ours = backward(dy, x, weight, rstd, d_rstd, dweight_sum)
        needs_dx, needs_dweight = needs
        h = x.to(torch.float32)
        if needs_dx:
            d_normalized = (dy * weight).to(dtype).to(torch.float32)
            yield "the fp32 gradient of rstd", d_rstd, (d_normalized * h).sum(-1, keepdim=True)
            yield "the input's gradient", ours.dx if ours.dx_mean is None else ours.dx + ours.dx_mean, dx
        if needs_dweight:
            yield "the fp32 weight gradient", dweight_sum, (dy * (h * rstd).to(dtype)).sum(0, dtype=torch.float32)
            yield "the weight's gradient", ours.dweight, dweight


# torch.compile


@torch.library.custom_op(add_op_namespace_prefix("rms_norm"), mutates_args=())
def _rms_norm_op(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    call = _call(hidden_states, weight, eps, eager_forward, NO_GRADIENTS)
    return eager(hidden_states, weight, eps) if call is None else call(hidden_states, weight)


@_rms_norm_op.register_fake
def _(hidden_states, weight, eps):
    return eager(hidden_states, weight, eps)


# `again` is hidden_states once more where eager has two edges to it.
@torch.library.custom_op(add_op_namespace_prefix("rms_norm_with_rstd"), mutates_args=())
def _rms_norm_with_rstd_op(
    hidden_states: torch.Tensor, again: Optional[torch.Tensor], weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(hidden_states, weight, eps, eager_forward, (True, True))
    if call is None:
        out, rstd = eager(hidden_states, weight, eps), _eager_rstd(hidden_states.to(torch.float32), eps)
    else:
        out, rstd = call.with_rstd(hidden_states, weight)
    return out, rstd.contiguous()


@_rms_norm_with_rstd_op.register_fake
def _(hidden_states, again, weight, eps):
    rstd = hidden_states.new_empty((*hidden_states.shape[:-1], 1), dtype=torch.float32)
    return eager(hidden_states, weight, eps), rstd


def _present(gradients, like):
    """An operator returns tensors only: an empty one stands for a gradient that nobody needs."""
    return tuple(like.new_empty(0) if gradient is None else gradient for gradient in gradients)


@torch.library.custom_op(add_op_namespace_prefix("rms_norm_backward"), mutates_args=())
def _rms_norm_backward_op(
    dy: torch.Tensor,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    needs_dx: bool,
    needs_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, hidden_size, needs = rstd.numel(), weight.shape[0], (needs_dx, needs_dweight)
    proved = (
        runs_kernels(dy.device)
        and in_domain(hidden_states.dtype, weight.dtype, hidden_size)
        and rows > 0
        and _gradients_proved(eager_forward, hidden_states.dtype, weight.dtype, hidden_size, rows, dy.device, needs)
    )
    compute = rms_norm_backward.gradients if proved else rms_norm_backward.formula
    return _present(compute(dy, hidden_states, weight, rstd, needs_dx, needs_dweight), dy)


@_rms_norm_backward_op.register_fake
def _(dy, hidden_states, weight, rstd, needs_dx, needs_dweight):
    return _present(rms_norm_backward.formula(dy, hidden_states, weight, rstd, needs_dx, needs_dweight), dy)


def _setup_context(ctx, inputs, output):
    hidden_states, _, weight, _ = inputs
    ctx.save_for_backward(hidden_states, weight, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, d_rstd):
    if dy is None:
        return None, None, None, None
    needs_dx, needs_again, needs_dweight, _ = ctx.needs_input_grad
    dx, dx_mean, dweight = _rms_norm_backward_op(dy, *ctx.saved_tensors, needs_dx, needs_dweight)
    return dx if needs_dx else None, dx_mean if needs_again else None, dweight if needs_dweight else None, None


_rms_norm_with_rstd_op.register_autograd(_backward, setup_context=_setup_context)


@torch.compiler.assume_constant_result
def _proved_for_compile(original, dtype, weight_dtype, hidden_size, device_index, training) -> bool:
    """Taken at trace time, for all classes of row counts, since a graph with dynamic shapes meets them all.

    In training the operators prove more at their first call, as eager does, and compute the formula where that fails.
    """
    device = torch.device("cuda", device_index)
    if under_transform():
        return False
    return all(
        _proved(original, dtype, weight_dtype, hidden_size, rows, hidden_size, device) for rows in ROW_CLASSES
    ) and (
        not training
        or _gradients_proved(original, dtype, weight_dtype, hidden_size, ROW_CLASSES[-1], device, (True, True))
    )


def _compiled(hidden_states, weight, eps, original):
    """`replacement` while torch.compile traces: the registered op, or None to trace the original forward."""
    if (
        not hidden_states.is_cuda
        or weight.device != hidden_states.device
        or hidden_states.dim() < 2
        or weight.dim() != 1
    ):
        return None
    # A constant in the graph, even where every other size is symbolic.
    hidden_size = int(weight.shape[0])
    if hidden_states.shape[-1] != hidden_size or not in_domain(hidden_states.dtype, weight.dtype, hidden_size):
        return None
    training = is_grad_enabled() and (hidden_states.requires_grad or weight.requires_grad)
    device_index = hidden_states.device.index or 0
    if not _proved_for_compile(original, hidden_states.dtype, weight.dtype, hidden_size, device_index, training):
        return None
    if not training:
        return _rms_norm_op(hidden_states, weight, eps)
    again = hidden_states if hidden_states.dtype == torch.float32 else None
    return _rms_norm_with_rstd_op(hidden_states, again, weight, eps)[0]
