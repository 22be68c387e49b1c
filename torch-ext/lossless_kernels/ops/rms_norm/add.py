"""Fused residual add + RMSNorm in one kernel, with the bits of eager's two operations."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ...core import operators, proof
from ...core.calls import Calls, Outside
from ...core.domain import NO_STATE, allocator, are_ours, have_strides, runs_kernels
from ...core.inspection import are_current, code_of, functions_of
from ...core.layout import Output, contiguous_strides
from ...core.torch_internals import apply_of, dispatch_modes, forward_ad
from . import backward as rms_norm_backward
from .call import NO_GRADIENTS, Inference, Training, check_weight
from .compiled import variant_of_call
from .formulas import BY_NAME, EAGER, EPS_NAME, LLAMA, RMSNormFormula, eager_rstd, in_domain
from .function import check_arguments
from .plan import forward
from .proof import calls_torch, gradients_proved, proved, variant_of


def fused_add_rms_norm(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fused residual add + RMSNorm over the last dimension.

    `total = residual + hidden_states`, rounded to the activations' dtype, and
    `normed = weight * (h * rsqrt(mean(h**2, -1) + eps)).to(total.dtype)` with `h = total.to(torch.float32)`: bit for
    bit what the addition and then `LlamaRMSNorm.forward` of transformers return on the same device and the same torch.
    The gradients have autograd's bits too: those of both outputs are added in autograd's order.

    Args:
        hidden_states: `[..., hidden_size]`, any real floating dtype.
        residual: of the shape, dtype and device of `hidden_states`.
        weight: `[hidden_size]`, any real floating dtype, on the device of `hidden_states`.
        eps: added to the mean of squares; finite and not negative.

    Returns:
        `(normed, total)`, of the shape and strides that eager returns; normed of dtype
        `torch.promote_types(weight, hidden_states)`.

    Raises:
        TypeError: an argument is no tensor, not of a real floating dtype, or `eps` is no number.
        ValueError: `residual` differs from `hidden_states` in shape, dtype or device, `weight` is not `[hidden_size]`
            or on another device, or `eps` is negative or not finite.

    The kernel runs where that of `rms_norm` does, for contiguous activations. Eager computes everything else.
    """
    check_arguments(hidden_states, weight, eps)
    if not isinstance(residual, torch.Tensor):
        raise TypeError(f"residual: expected a torch.Tensor, found {type(residual).__name__}")
    for what in ("shape", "dtype", "device"):
        expected, found = getattr(hidden_states, what), getattr(residual, what)
        if found != expected:
            expected, found = (list(each) if what == "shape" else each for each in (expected, found))
            raise ValueError(f"residual: expected {what} {expected} of hidden_states, found {found}")
    added = replacement(hidden_states, residual, weight, eps, EAGER[LLAMA])
    return _formula(LLAMA, hidden_states, residual, weight, eps) if added is None else added


def _formula(variant: RMSNormFormula, hidden_states, residual, weight, eps) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + hidden_states
    return variant.eager(total, weight, eps), total


# From a call's tensors to a kernel


@dataclass(eq=False)
class _Inference(Inference):
    """A call without gradients."""

    empty_total: Callable[[], torch.Tensor]

    def __call__(self, x, residual, weight):
        normed, total = self.empty(), self.empty_total()
        self.launch.call_5(x, residual, weight, normed, total)
        return normed, total

    @property
    def into(self):
        """`into(x, residual, weight, normed, total)`: the outputs are given."""
        return self.launch.call_5


@dataclass(eq=False)
class _Training(Training):
    """A call with gradients."""

    empty_total: Callable[[], torch.Tensor]

    def __call__(self, x, residual, weight):
        return _apply(x, residual, weight, self)

    def with_rstd(self, x, residual, weight):
        """The outputs and rstd, `[..., 1]`."""
        if dispatch_modes():
            total = residual + x
            normed, rstd = self.variant.with_rstd(total, weight, self.eps)
            return normed, total, rstd
        return self.launched(x, residual, weight)

    def launched(self, x, residual, weight):
        """The same, whatever modes are active: none sees a call from Inductor's code."""
        normed, total, rstd = self.empty(), self.empty_total(), self.empty_rstd()
        self.launch.call_6(x, residual, weight, normed, total, rstd)
        return normed, total, rstd


def replacement(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    owner: type,
    eps_name: str = EPS_NAME,
    state: Mapping = NO_STATE,
) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
    """`owner.forward(residual + hidden_states)` and the sum, from the kernel; None where the caller must compute them.

    Args:
        owner: the class of the replaced norm.
        eps_name: the attribute that holds eps.
        state: the norm's `__dict__`.
    """
    if is_dynamo_compiling():
        return _compiled(hidden_states, residual, weight, eps, owner, eps_name)
    recent = _calls.recent.get(id(weight))
    if recent is not None:
        same, replaced, forward, helpers, read, added, grad, compute = recent
        if (
            have_strides(hidden_states, residual)
            and same(hidden_states, residual, weight)
            and replaced() is owner
            and forward is owner.forward
            and (not helpers or are_current(helpers, owner, state))
            and read is eps_name
            and added is eps
            and grad is is_grad_enabled()
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return compute(hidden_states, residual, weight)
    original, tensors = owner.forward, (hidden_states, residual, weight)
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors) or weight.numel() == 0:
        return proof.record_refusal(original, "a residual add before a norm without a weight")
    needs = NO_GRADIENTS
    if is_grad_enabled():
        needs = (hidden_states.requires_grad or residual.requires_grad, weight.requires_grad)
    with_grad = needs != NO_GRADIENTS
    if not (are_ours(hidden_states, residual, with_grad) and are_ours(weight, weight, with_grad)):
        return proof.record_refusal(original, proof.NOT_PLAIN)
    if with_grad and any(tensor.is_inference() for tensor in tensors):
        return proof.record_refusal(original, proof.INFERENCE_TENSORS)
    call = call_of(*tensors, eps, owner, eps_name, needs, state)
    facts = weakref.ref(owner), original, code_of(owner).helpers, eps_name, eps, is_grad_enabled()
    return _calls.run(id(weight), call, facts, tensors)


def call_of(x, residual, weight, eps, owner, eps_name, needs, state: Mapping = NO_STATE):
    """The recorded call for these tensors, or None if the original forward runs; arguments as in `call.call_of`."""
    functions = functions_of(owner, state)
    if functions is None:
        return proof.record_unreadable_forward(owner)
    arguments = eps, owner, eps_name, needs
    return _calls.find(owner.forward, (functions, eps, eps_name, needs), (x, residual, weight), *arguments)


def _check(x, residual, weight, eps, owner) -> None:
    """Raises Outside if no kernel takes these tensors or this class."""
    if calls_torch(owner):
        raise Outside("a residual add before F.rms_norm")
    if x.dim() < 2 or x.numel() == 0:
        raise Outside("a residual add of no rows or of vectors")
    if not runs_kernels(x.device) or {residual.device, weight.device} != {x.device}:
        raise Outside(f"activations on {x.device}, residual on {residual.device}, weight on {weight.device}")
    if residual.dtype != x.dtype:
        raise Outside(f"activations {x.dtype}, residual {residual.dtype}")
    if residual.shape != x.shape:
        raise Outside("residual and activations differ in shape")
    check_weight(x, weight, eps)
    if not (x.is_contiguous() and residual.is_contiguous()):
        raise Outside("activations or residual are not contiguous")


def _resolve(x, residual, weight, eps, owner, eps_name, needs):
    _check(x, residual, weight, eps, owner)
    variant = variant_of(owner, eps_name, x.dtype, weight.dtype, x.device)
    if variant is None:
        return None
    if variant.two_edges:
        raise Outside("a residual add before a norm that sends 16-bit activations two gradients")
    hidden_size = x.shape[-1]
    rows, training = x.numel() // hidden_size, needs != NO_GRADIENTS
    case, device = (variant, owner, x.dtype, weight.dtype, hidden_size, rows), x.device
    if not proved(*case, hidden_size, device, added=True):
        return None
    if training and not gradients_proved(*case, device, needs, added=True):
        return None
    out_dtype = variant.output_dtype(x.dtype, weight.dtype)
    # Eager's sum of contiguous tensors, whatever their strides in dimensions of length 1, has these, and so has its norm.
    strides = contiguous_strides(x.shape)
    out = Output(strides, out_dtype, allocator(x.shape, strides, out_dtype, device))
    launch = forward(
        variant, x.dtype, weight.dtype, hidden_size, rows, hidden_size, device, eps, store_rstd=training, added=True
    )
    empty_total = allocator(x.shape, strides, x.dtype, device)
    if not training:
        return _Inference(launch, out.empty, out, empty_total)
    shape = (*x.shape[:-1], 1)
    empty_rstd = allocator(shape, contiguous_strides(shape), torch.float32, device)
    return _Training(variant, owner.forward, weight.dtype, launch, out.empty, empty_rstd, False, eps, empty_total)


_calls = Calls(_resolve)


class AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, call):
        normed, total, rstd = call.with_rstd(x, residual, weight)
        if x.requires_grad or residual.requires_grad:
            ctx.save_for_backward(total, weight, rstd)
        else:
            ctx.mark_non_differentiable(total)
            # Only dx reads the weight's values. As with eager they may change before the backward pass.
            ctx.save_for_backward(total, None, rstd)
            ctx.weight = weight.detach()
        ctx.set_materialize_grads(False)
        ctx.call = call
        return normed, total

    @staticmethod
    def backward(ctx, d_normed, d_total):
        needs_x, needs_residual, needs_dweight, _ = ctx.needs_input_grad
        needs_dx = needs_x or needs_residual
        dx, dweight = d_total, None
        if d_normed is not None:
            total, weight, rstd = ctx.saved_tensors
            if weight is None:
                weight = ctx.weight
            in_torch, call = torch.is_grad_enabled(), ctx.call
            if in_torch:  # Double backward: rstd must be differentiable.
                rstd = eager_rstd(total.to(torch.float32), call.eps)
            elif weight.dtype is not call.weight_dtype:  # The model may have been cast since the forward pass.
                in_torch = True
            arguments = (call.variant, d_normed, total, weight, rstd, needs_dx, needs_dweight, True, d_total)
            if in_torch:
                dx, _, dweight = rms_norm_backward.joined_formula(*arguments, call.weight_dtype)
            else:
                dx, _, dweight = rms_norm_backward.gradients(*arguments, call.original)
        return dx if needs_x else None, dx if needs_residual else None, dweight, None


_apply = apply_of(AddRMSNorm)


# torch.compile


def _find(hidden_states, residual, weight, eps, variant):
    return call_of(hidden_states, residual, weight, eps, EAGER[BY_NAME[variant]], EPS_NAME, NO_GRADIENTS)


@operators.register("add_rms_norm", _find, into=operators.always)
def _add_rms_norm_op(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variant: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return _formula(BY_NAME[variant], hidden_states, residual, weight, eps)


def _find_with_rstd(hidden_states, residual, weight, eps, variant):
    call = call_of(hidden_states, residual, weight, eps, EAGER[BY_NAME[variant]], EPS_NAME, (True, True))
    return None if call is None else call.launched


def _fake_with_rstd(hidden_states, residual, weight, eps, variant):
    rstd = hidden_states.new_empty((*hidden_states.shape[:-1], 1), dtype=torch.float32)
    return (*_formula(BY_NAME[variant], hidden_states, residual, weight, eps), rstd)


@operators.register("add_rms_norm_with_rstd", _find_with_rstd, _fake_with_rstd)
def _add_rms_norm_with_rstd_op(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variant: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normed, total = _formula(BY_NAME[variant], hidden_states, residual, weight, eps)
    return normed, total, eager_rstd(total.to(torch.float32), eps)


def _in_place_of_two(weight, eps, variant) -> Optional[tuple]:
    """The arguments behind the two tensors that are added, given those of the norm; None if it takes no sum."""
    is_fused = BY_NAME[variant].fused or BY_NAME[variant].two_edges or weight.meta["val"].numel() == 0
    return None if is_fused else (weight, eps, variant)


def _in_place_of_two_in_training(weight, again, eps, variant) -> Optional[tuple]:
    return _in_place_of_two(weight, eps, variant) if again is None else None


operators.compute_sums("rms_norm", "add_rms_norm", _in_place_of_two)
operators.compute_sums("rms_norm_with_rstd", "add_rms_norm_with_rstd", _in_place_of_two_in_training)


def _find_gradients(d_normed, total, weight, rstd, d_total, needs_dx, needs_dweight, variant):
    formula, needs = BY_NAME[variant], (needs_dx, needs_dweight)
    subject = (formula, EAGER[formula], total.dtype, weight.dtype, total.shape[-1])
    if not (runs_kernels(total.device) and in_domain(*subject[2:]) and rstd.numel() > 0):
        return None
    if not gradients_proved(*subject, rstd.numel(), total.device, needs, added=True):
        return None
    tensors = d_normed, total, weight, rstd
    # The gradient of the sum counts only where activations need one.
    added = (d_total,) if d_total is not None and needs_dx else ()
    call = rms_norm_backward.call_of(formula, (*tensors, *added), *needs)
    if call is None:
        return None
    count = len(tensors) + len(added)

    def of_sum(*tensors):
        dx, _, dweight = call(*tensors[:count])
        return dx, dweight

    return operators.of_tensors(of_sum, d_normed)


@operators.register("add_rms_norm_backward", _find_gradients)
def _add_rms_norm_backward_op(
    d_normed: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    d_total: Optional[torch.Tensor],
    needs_dx: bool,
    needs_dweight: bool,
    variant: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = (BY_NAME[variant], d_normed, total, weight, rstd, needs_dx, needs_dweight, True, d_total)
    dx, _, dweight = rms_norm_backward.joined_formula(*arguments)
    return operators.without_none((dx, dweight), d_normed)


def _setup_context(ctx, inputs, output):
    _, _, weight, _, ctx.variant = inputs
    ctx.save_for_backward(output[1], weight, output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, d_normed, d_total, d_rstd):
    needs_x, needs_residual, needs_dweight, *_ = ctx.needs_input_grad
    needs_dx = needs_x or needs_residual
    dx, dweight = d_total, None
    if d_normed is not None:
        saved = ctx.saved_tensors
        found = _add_rms_norm_backward_op(d_normed, *saved, d_total, needs_dx, needs_dweight, ctx.variant)
        dx, dweight = (gradient if need else None for need, gradient in zip((needs_dx, needs_dweight), found))
    return dx if needs_x else None, dx if needs_residual else None, dweight, None, None


torch.library.register_autograd(_add_rms_norm_with_rstd_op, _backward, setup_context=_setup_context)


def _compiled(hidden_states, residual, weight, eps, owner, eps_name) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
    """`replacement` while torch.compile traces: the registered op, or None to trace the two operations."""
    tensors = (hidden_states, residual, weight)
    if weight is None or residual.device != hidden_states.device or not all(each.is_contiguous() for each in tensors):
        return None
    if residual.dtype != hidden_states.dtype or residual.shape != hidden_states.shape:
        return None
    training = is_grad_enabled() and any(each.requires_grad for each in tensors)
    variant = variant_of_call(hidden_states, weight, eps, owner, eps_name, training, added=True)
    if variant is None:
        return None
    if training:
        return _add_rms_norm_with_rstd_op(*tensors, eps, variant)[:2]
    return _add_rms_norm_op(*tensors, eps, variant)
