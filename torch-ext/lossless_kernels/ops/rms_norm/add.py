"""Fused residual add + RMSNorm in one kernel, with the bits of eager's two operations."""

import functools
import math
import operator
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ...core import launch, operators, plans, proof
from ...core.calls import Calls, Outside
from ...core.domain import NO_STATE, allocator, are_ours, have_strides, runs_kernels, under_transform
from ...core.inspection import are_current, code_of, functions_of
from ...core.layout import Output, contiguous_strides
from ...core.reduction import ROW_CLASSES, row_class, row_reduction
from ...core.torch_internals import apply_of, dispatch_modes, forward_ad
from . import backward as rms_norm_backward
from .call import NO_GRADIENTS
from .formulas import BY_NAME, EAGER, EPS_NAME, LLAMA, RMSNormFormula, eager_rstd, in_domain
from .function import check_arguments
from .plan import launch_plan, rows_of_every_plan
from .proof import (
    PROOF_EPS,
    calls_torch,
    gradients_proved,
    original_output,
    proof_calls,
    random_weight,
    spike,
    subject_of,
    subnormal_row,
    variant_of,
)

if launch.AVAILABLE:
    from ...kernels_src.rms_norm import add_rms_norm_forward


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


def _forward(
    variant, dtype, weight_dtype, hidden_size, rows, device: torch.device, eps, store_rstd, plan=None
) -> launch.Launch:
    """The launch of the kernel, to be called with hidden_states, residual, weight, normed, total and rstd.

    Args:
        plan: overrides the plan for `rows`: a proof runs the kernel of a larger call.
    """
    if plan is None:
        plan = launch_plan(rows, hidden_size, dtype.itemsize, plans.gpu(device), added=True)
    order = row_reduction(row_class(rows), hidden_size, plans.gpu(device).build)
    constants = {
        "SCALE": variant.scale,
        "HIDDEN_SIZE": hidden_size,
        "ROWS": plan.rows_per_program,
        **order.constants,
        "STREAMED": plan.streamed,
        "BY_LANE": plan.by_lane,
        "PROGRAMS_PER_ROW": plan.programs_per_row,
        "AHEAD": plan.ahead(2 * hidden_size * dtype.itemsize),
    }
    dtypes = (dtype, dtype, weight_dtype, variant.output_dtype(dtype, weight_dtype), dtype, torch.float32)
    scalars = rows, int(store_rstd), eps
    return launch.bind(add_rms_norm_forward, constants, plan.num_warps, device, dtypes, plan.programs(rows), *scalars)


@dataclass(eq=False)
class _Inference:
    """A call without gradients, resolved for one eps and the layouts of its tensors."""

    launch: Callable
    out: Output
    empty_total: Callable[[], torch.Tensor]

    def __post_init__(self):
        self.launch = self.launch.call_5
        self.empty = self.out.empty

    def __call__(self, x, residual, weight):
        normed, total = self.empty(), self.empty_total()
        self.launch(x, residual, weight, normed, total)
        return normed, total


@dataclass(eq=False)
class _Training:
    """A call with gradients, which needs the row statistics."""

    variant: RMSNormFormula
    original: Callable
    weight_dtype: torch.dtype
    launch: Callable
    out: Output
    empty_total: Callable[[], torch.Tensor]
    empty_rstd: Callable[[], torch.Tensor]
    eps: float

    def __post_init__(self):
        self.launch = self.launch.call_6
        self.empty = self.out.empty

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
        self.launch(x, residual, weight, normed, total, rstd)
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
    if not isinstance(eps, (int, float)):
        raise Outside(f"eps has type {type(eps).__name__}")
    if x.dim() < 2 or x.numel() == 0:
        raise Outside("a residual add of no rows or of vectors")
    if not runs_kernels(x.device) or {residual.device, weight.device} != {x.device}:
        raise Outside(f"activations on {x.device}, residual on {residual.device}, weight on {weight.device}")
    if residual.dtype != x.dtype:
        raise Outside(f"activations {x.dtype}, residual {residual.dtype}")
    if residual.shape != x.shape:
        raise Outside("residual and activations differ in shape")
    hidden_size = x.shape[-1]
    if not in_domain(x.dtype, weight.dtype, hidden_size):
        raise Outside(f"activations {x.dtype}, weight {weight.dtype}, hidden size {hidden_size}")
    if weight.shape != (hidden_size,) or not weight.is_contiguous():
        raise Outside("weight is not a contiguous [hidden_size]")
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
    subject = (variant, owner, x.dtype, weight.dtype, hidden_size, rows)
    if not _proved(*subject, x.device) or (training and not _gradients_proved(*subject, x.device, needs)):
        return None
    out_dtype = variant.output_dtype(x.dtype, weight.dtype)
    # Eager's sum of contiguous tensors, whatever their strides in dimensions of length 1, has these, and so has its norm.
    strides = contiguous_strides(x.shape)
    out = Output(strides, out_dtype, allocator(x.shape, strides, out_dtype, x.device))
    launch = _forward(variant, x.dtype, weight.dtype, hidden_size, rows, x.device, eps, training)
    empty_total = allocator(x.shape, strides, x.dtype, x.device)
    if not training:
        return _Inference(launch, out, empty_total)
    shape = (*x.shape[:-1], 1)
    empty_rstd = allocator(shape, contiguous_strides(shape), torch.float32, x.device)
    return _Training(variant, owner.forward, weight.dtype, launch, out, empty_total, empty_rstd, eps)


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
            arguments = (call.variant, d_normed, total, weight, rstd, needs_dx, needs_dweight, d_total)
            dx, dweight = _gradients(*arguments, in_torch, call.weight_dtype, call.original)
        return dx if needs_x else None, dx if needs_residual else None, dweight, None


_apply = apply_of(AddRMSNorm)


def _gradients(
    variant, dy, total, weight, rstd, needs_dx, needs_dweight, d_total, in_torch=False, dtype=None, original=None
):
    """The gradients of the sum and of the weight, the latter in `dtype`."""
    arguments = (variant, dy, total, weight, rstd, needs_dx, needs_dweight, True, d_total)
    if in_torch:
        found = rms_norm_backward.joined_formula(*arguments, dtype)
    else:
        found = rms_norm_backward.gradients(*arguments, original)
    return found.dx, found.dweight


# Proof


def _proved(variant, owner, dtype, weight_dtype, hidden_size, rows, device) -> bool:
    """Whether the kernel for this row class is proved to return the bits of the add and of `owner.forward`."""
    plan = launch_plan(rows, hidden_size, dtype.itemsize, plans.gpu(device), added=True)
    rows = row_class(rows)
    key = ("add_rms_norm", functions_of(owner), variant, dtype, weight_dtype, hidden_size, rows, plan, device)
    subject = subject_of(variant, owner, device, dtype, weight_dtype, hidden_size, rows, ", after a residual add")
    arguments = (variant, owner, dtype, weight_dtype, hidden_size, rows, device, plan)
    return proof.kernel_is_proved(key, subject, functools.partial(_comparisons, *arguments))


def _comparisons(variant, owner, dtype, weight_dtype, hidden_size, rows, device, plan):
    generator = proof.generator(device, seed=hidden_size)
    make = functools.partial(torch.randn, dtype=torch.float32, device=device, generator=generator)
    calls, rows = proof_calls(rows)
    forward = _forward(variant, dtype, weight_dtype, hidden_size, rows, device, PROOF_EPS, True, plan)
    for call in range(calls):
        x, residual = spike(make(rows, hidden_size).to(dtype), call), make(rows, hidden_size).to(dtype)
        if call == calls - 1:
            subnormal_row(x)
            subnormal_row(residual)
        weight = random_weight(variant, make, hidden_size, weight_dtype)
        expected_total = residual + x
        expected = original_output(variant, owner, weight, PROOF_EPS, expected_total)
        normed, total = torch.full_like(expected, math.nan), torch.full_like(x, math.nan)
        rstd = torch.full((rows, 1), math.nan, dtype=torch.float32, device=device)
        forward(x, residual, weight, normed, total, rstd)
        yield "the sum", total, expected_total
        yield "the fp32 rstd", rstd, eager_rstd(expected_total.to(torch.float32), PROOF_EPS)
        yield "the output", normed, expected


def _gradients_proved(variant, owner, dtype, weight_dtype, hidden_size, rows, device, needs) -> bool:
    """Whether the gradients are proved, with a gradient of the sum and without."""
    subject = (variant, owner, dtype, weight_dtype, hidden_size, rows, device, needs)
    return gradients_proved(*subject) and (not needs[0] or gradients_proved(*subject, dx_mode="accumulate"))


# torch.compile


def _find(hidden_states, residual, weight, eps, variant):
    return call_of(hidden_states, residual, weight, eps, EAGER[BY_NAME[variant]], EPS_NAME, NO_GRADIENTS)


@operators.register("add_rms_norm", _find)
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


def _find_gradients(d_normed, total, weight, rstd, d_total, needs_dx, needs_dweight, variant):
    formula, needs = BY_NAME[variant], (needs_dx, needs_dweight)
    subject = (formula, EAGER[formula], total.dtype, weight.dtype, total.shape[-1])
    if not (runs_kernels(total.device) and in_domain(*subject[2:]) and rstd.numel() > 0):
        return None
    if not _gradients_proved(*subject, rstd.numel(), total.device, needs):
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
    arguments = (BY_NAME[variant], d_normed, total, weight, rstd, needs_dx, needs_dweight)
    return operators.without_none(_gradients(*arguments, d_total, True), d_normed)


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


_add_rms_norm_with_rstd_op.register_autograd(_backward, setup_context=_setup_context)


@torch.compiler.assume_constant_result
def _variant_for_compile(owner, eps_name, dtype, weight_dtype, hidden_size, device, training) -> Optional[str]:
    """The name of the variant that is proved for all row counts; None if the two operations are traced."""
    if not runs_kernels(device) or under_transform() or functions_of(owner) is None or calls_torch(owner):
        return None
    variant = variant_of(owner, eps_name, dtype, weight_dtype, device)
    if variant is None or variant.two_edges:
        return None
    subject = (variant, owner, dtype, weight_dtype, hidden_size)
    all_rows = rows_of_every_plan(hidden_size, dtype.itemsize, plans.gpu(device))
    proved = all(_proved(*subject, rows, device) for rows in all_rows)
    if proved and training:
        proved = _gradients_proved(*subject, ROW_CLASSES[-1], device, (True, True))
    return variant.name if proved else None


def _compiled(hidden_states, residual, weight, eps, owner, eps_name) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
    """`replacement` while torch.compile traces: the registered op, or None to trace the two operations."""
    if hidden_states.dim() < 2 or not isinstance(eps, (int, float)):
        return None
    tensors = (hidden_states, residual, weight)
    if any(t.device != hidden_states.device or not t.is_contiguous() for t in tensors) or weight.dim() != 1:
        return None
    if residual.dtype != hidden_states.dtype or residual.shape != hidden_states.shape:
        return None
    hidden_size = operator.index(weight.shape[0])
    if hidden_states.shape[-1] != hidden_size or not in_domain(hidden_states.dtype, weight.dtype, hidden_size):
        return None
    training = is_grad_enabled() and any(t.requires_grad for t in tensors)
    variant = _variant_for_compile(
        owner, eps_name, hidden_states.dtype, weight.dtype, hidden_size, hidden_states.device, training
    )
    if variant is None:
        return None
    if training:
        return _add_rms_norm_with_rstd_op(*tensors, eps, variant)[:2]
    return _add_rms_norm_op(*tensors, eps, variant)
