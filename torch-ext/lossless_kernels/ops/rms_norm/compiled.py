"""RMSNorm under torch.compile: registered operators that return the bits of the uncompiled layer."""

from typing import Optional

import torch
from torch import is_grad_enabled

from ..._ops import add_op_namespace_prefix
from ...core import plans
from ...core.domain import runs_kernels, under_transform
from ...core.inspection import functions_of
from ...core.reduction import ROW_CLASSES
from . import backward as rms_norm_backward
from .call import NO_GRADIENTS, call_of
from .formulas import BY_NAME, EAGER, EPS_NAME, MAX_FUSED_HIDDEN_SIZE, in_domain
from .plan import rows_of_every_plan
from .proof import calls_torch, gradients_proved, proved, variant_of


@torch.library.custom_op(add_op_namespace_prefix("rms_norm"), mutates_args=())
def _rms_norm_op(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float, variant: str) -> torch.Tensor:
    formula = BY_NAME[variant]
    call = call_of(hidden_states, weight, eps, EAGER[formula], EPS_NAME, NO_GRADIENTS, formula.fused)
    return formula.eager(hidden_states, weight, eps) if call is None else call(hidden_states, weight)


@_rms_norm_op.register_fake
def _(hidden_states, weight, eps, variant):
    return BY_NAME[variant].eager(hidden_states, weight, eps)


# `again` is hidden_states a second time if eager sends it two gradients.
@torch.library.custom_op(add_op_namespace_prefix("rms_norm_with_rstd"), mutates_args=())
def _rms_norm_with_rstd_op(
    hidden_states: torch.Tensor, again: Optional[torch.Tensor], weight: torch.Tensor, eps: float, variant: str
) -> tuple[torch.Tensor, torch.Tensor]:
    formula = BY_NAME[variant]
    needs = (True, formula.scale != "none")
    call = call_of(hidden_states, weight, eps, EAGER[formula], EPS_NAME, needs, formula.fused)
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
    compute = rms_norm_backward.formula
    if formula.fused:
        compute = rms_norm_backward.fused_gradients
    elif (
        runs_kernels(dy.device)
        and in_domain(*dtypes, hidden_size)
        and rows > 0
        and gradients_proved(formula, EAGER[formula], *dtypes, hidden_size, rows, dy.device, needs)
    ):
        compute = rms_norm_backward.gradients
    return rms_norm_backward.without_none(compute(formula, dy, hidden_states, weight, rstd, *needs), dy)


@_rms_norm_backward_op.register_fake
def _(dy, hidden_states, weight, rstd, needs_dx, needs_dweight, variant):
    if BY_NAME[variant].fused:
        dx = hidden_states.new_empty(hidden_states.shape) if needs_dx else None
        return rms_norm_backward.without_none((dx, None, weight.new_empty(weight.shape) if needs_dweight else None), dy)
    arguments = (dy, hidden_states, weight, rstd, needs_dx, needs_dweight)
    return rms_norm_backward.without_none(rms_norm_backward.formula(BY_NAME[variant], *arguments), dy)


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

    It is verified at trace time for all row classes and plans, since a graph with dynamic shapes meets them all. In
    training the operators verify more at their first call, like uncompiled calls, and fall back to the formula.
    """
    device = torch.device("cuda", device_index)
    if under_transform() or functions_of(owner) is None or (calls_torch(owner) and not fused):
        return None
    variant = variant_of(owner, eps_name, dtype, weight_dtype, device)
    if variant is None or (variant.fused and hidden_size > MAX_FUSED_HIDDEN_SIZE):
        return None
    subject = (variant, owner, dtype, weight_dtype or dtype, hidden_size)
    needs = (True, weight_dtype is not None)
    all_rows = rows_of_every_plan(hidden_size, dtype.itemsize, plans.gpu(device))
    is_proved = all(proved(*subject, rows, hidden_size, device) for rows in all_rows) and (
        not training or gradients_proved(*subject, ROW_CLASSES[-1], device, needs)
    )
    return variant.name if is_proved else None


def replacement(hidden_states, weight, eps, owner, eps_name, fused):
    """`function.replacement` while torch.compile traces: the registered op, or None to trace the original forward."""
    if not hidden_states.is_cuda or hidden_states.dim() < 2 or not isinstance(eps, (int, float)):
        return None
    if weight is None:
        hidden_size, weight_dtype = int(hidden_states.shape[-1]), None
        weight = hidden_states.new_empty(0)
    elif weight.device != hidden_states.device or weight.dim() != 1:
        return None
    else:
        # A constant in the graph, even if every other size is symbolic.
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
    again = hidden_states if BY_NAME[variant].has_two_edges(hidden_states.dtype) else None
    return _rms_norm_with_rstd_op(hidden_states, again, weight, eps, variant)[0]
