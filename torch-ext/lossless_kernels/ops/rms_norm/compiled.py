"""RMSNorm under torch.compile: registered operators that return the bits of the uncompiled layer."""

from operator import index
from typing import Optional

import torch
from torch import is_grad_enabled

from ...core import operators, plans
from ...core.calls import Outside
from ...core.domain import at_trace_time, runs_kernels, under_transform
from ...core.inspection import functions_of
from ...core.layout import rows_in_memory
from ...core.reduction import ROW_CLASSES
from . import backward as rms_norm_backward
from . import fused_backward
from .call import NO_GRADIENTS, call_of, check
from .formulas import BY_NAME, EAGER, EPS_NAME, MAX_FUSED_HIDDEN_SIZE, in_domain
from .plan import rows_of_every_plan
from .proof import calls_torch, gradients_proved, proved, variant_of


def _find(hidden_states, weight, eps, variant):
    formula = BY_NAME[variant]
    return call_of(hidden_states, weight, eps, EAGER[formula], EPS_NAME, NO_GRADIENTS, formula.fused)


def _is_composed(hidden_states, weight, eps, variant) -> bool:
    """Calls of `F.rms_norm` have no `into`: eager computes them where the weight is not at a multiple of four elements."""
    return not BY_NAME[variant].fused


@operators.register("rms_norm", _find, into=_is_composed)
def _rms_norm_op(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float, variant: str) -> torch.Tensor:
    return BY_NAME[variant].eager(hidden_states, weight, eps)


def _find_with_rstd(hidden_states, weight, again, eps, variant):
    formula = BY_NAME[variant]
    needs = (True, formula.scale != "none")
    call = call_of(hidden_states, weight, eps, EAGER[formula], EPS_NAME, needs, formula.fused)
    if call is None:
        return None

    def compute(hidden_states, weight, again=None):
        out, rstd = call.launched(hidden_states, weight)
        return out, rstd.contiguous()

    return compute


def _fake_with_rstd(hidden_states, weight, again, eps, variant):
    rstd = hidden_states.new_empty((*hidden_states.shape[:-1], 1), dtype=torch.float32)
    return BY_NAME[variant].eager(hidden_states, weight, eps), rstd


# `again` is hidden_states a second time if eager sends it two gradients.
@operators.register("rms_norm_with_rstd", _find_with_rstd, _fake_with_rstd)
def _rms_norm_with_rstd_op(
    hidden_states: torch.Tensor, weight: torch.Tensor, again: Optional[torch.Tensor], eps: float, variant: str
) -> tuple[torch.Tensor, torch.Tensor]:
    out, rstd = BY_NAME[variant].with_rstd(hidden_states, weight, eps)
    return out, rstd.contiguous()


def _kernels_of(x, weight, formula, needs) -> Optional[fused_backward.Kernels]:
    """Those of the gradients of `F.rms_norm`; None outside the forward kernel's domain."""
    try:
        check(x, weight, 0.0, EAGER[formula], needs, True)  # Given rstd, gradients do not depend on eps.
    except Outside:
        return None
    rows, row_stride, order = rows_in_memory(x.shape, x.stride())
    if weight.dtype != x.dtype or x.shape[-1] > MAX_FUSED_HIDDEN_SIZE or list(order) != sorted(order):
        return None
    kernels = fused_backward.Kernels(formula, x, weight, rows, row_stride)
    kernels.find(x, weight, *needs)
    return kernels


def _find_gradients(dy, hidden_states, weight, rstd, needs_dx, needs_dweight, variant):
    rows, hidden_size, needs = rstd.numel(), hidden_states.shape[-1], (needs_dx, needs_dweight)
    formula, dtypes = BY_NAME[variant], (hidden_states.dtype, weight.dtype)
    call = None
    if formula.fused:
        kernels = _kernels_of(hidden_states, weight, formula, needs)

        def call(*tensors):
            found = None if kernels is None else kernels.gradients(*tensors, *needs)
            return found or fused_backward.of_aten(formula, *tensors, *needs)

    elif (
        runs_kernels(dy.device)
        and in_domain(*dtypes, hidden_size)
        and rows > 0
        and gradients_proved(formula, EAGER[formula], *dtypes, hidden_size, rows, dy.device, needs)
    ):
        call = rms_norm_backward.call_of(formula, (dy, hidden_states, weight, rstd), *needs)
    return None if call is None else operators.of_tensors(call, dy)


def _fake_gradients(dy, hidden_states, weight, rstd, needs_dx, needs_dweight, variant):
    if BY_NAME[variant].fused:
        dx = hidden_states.new_empty(hidden_states.shape) if needs_dx else None
        return operators.without_none((dx, None, weight.new_empty(weight.shape) if needs_dweight else None), dy)
    arguments = (dy, hidden_states, weight, rstd, needs_dx, needs_dweight)
    return operators.without_none(rms_norm_backward.formula(BY_NAME[variant], *arguments), dy)


@operators.register("rms_norm_backward", _find_gradients, _fake_gradients)
def _rms_norm_backward_op(
    dy: torch.Tensor,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    needs_dx: bool,
    needs_dweight: bool,
    variant: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    formula = BY_NAME[variant]
    compute = fused_backward.of_aten if formula.fused else rms_norm_backward.formula
    return operators.without_none(compute(formula, dy, hidden_states, weight, rstd, needs_dx, needs_dweight), dy)


def _setup_context(ctx, inputs, output):
    hidden_states, weight, _, _, ctx.variant = inputs
    ctx.save_for_backward(hidden_states, weight, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, d_rstd):
    if dy is None:
        return None, None, None, None, None
    needs_dx, needs_dweight, needs_again, *_ = ctx.needs_input_grad
    gradients = _rms_norm_backward_op(dy, *ctx.saved_tensors, needs_dx, needs_dweight, ctx.variant)
    dx, dx_again, dweight = gradients
    needed = (needs_dx, dx), (needs_dweight, dweight), (needs_again, dx_again)
    return *(gradient if need else None for need, gradient in needed), None, None


torch.library.register_autograd(_rms_norm_with_rstd_op, _backward, setup_context=_setup_context)


@at_trace_time
def _variant_for_compile(
    owner, eps_name, dtype, weight_dtype, hidden_size, device, training, fused=False, added=False
) -> Optional[str]:
    """The name of the proved variant; None if the original forward is traced, or an add before it.

    It is verified at trace time for all row classes and plans, since a graph with dynamic shapes meets them all. In
    training the operators verify more at their first call, like uncompiled calls, and fall back to the formula.
    """
    if not in_domain(dtype, weight_dtype or dtype, hidden_size) or not runs_kernels(device):
        return None
    if under_transform() or functions_of(owner) is None:
        return None
    if calls_torch(owner) and not fused:
        return None
    variant = variant_of(owner, eps_name, dtype, weight_dtype, device)
    if variant is None or (variant.fused and hidden_size > MAX_FUSED_HIDDEN_SIZE) or (variant.two_edges and added):
        return None
    case = (variant, owner, dtype, weight_dtype or dtype, hidden_size)
    needs = (True, weight_dtype is not None)
    all_rows = rows_of_every_plan(hidden_size, dtype.itemsize, plans.gpu(device))
    if not all(proved(*case, rows, hidden_size, device, added) for rows in all_rows):
        return None
    if training and not gradients_proved(*case, ROW_CLASSES[-1], device, needs, added):
        return None
    return variant.name


def variant_of_call(hidden_states, weight, eps, owner, eps_name, training, fused=False, added=False) -> Optional[str]:
    """The name of the proved variant for these arguments; None if the original forward is traced, or an add before it."""
    if hidden_states.dim() < 2 or not isinstance(eps, (int, float)):
        return None
    if weight is None:
        hidden_size, weight_dtype = index(hidden_states.shape[-1]), None
    elif weight.device != hidden_states.device or weight.dim() != 1:
        return None
    else:
        # A constant in the graph, even if every other size is symbolic; `int` would stay symbolic.
        hidden_size, weight_dtype = index(weight.shape[0]), weight.dtype
    dtype, device = hidden_states.dtype, hidden_states.device
    if hidden_states.shape[-1] != hidden_size:
        return None
    return _variant_for_compile(owner, eps_name, dtype, weight_dtype, hidden_size, device, training, fused, added)


def replacement(hidden_states, weight, eps, owner, eps_name, fused):
    """`function.replacement` while torch.compile traces: the registered op, or None to trace the original forward."""
    training = is_grad_enabled() and (hidden_states.requires_grad or (weight is not None and weight.requires_grad))
    variant = variant_of_call(hidden_states, weight, eps, owner, eps_name, training, fused)
    if variant is None:
        return None
    if weight is None:
        weight = hidden_states.new_empty(0)
    if not training:
        return _rms_norm_op(hidden_states, weight, eps, variant)
    again = hidden_states if BY_NAME[variant].has_two_edges(hidden_states.dtype) else None
    return _rms_norm_with_rstd_op(hidden_states, weight, again, eps, variant)[0]
