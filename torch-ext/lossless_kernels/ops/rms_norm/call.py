"""From a call's tensors to a launch, and autograd, for `function.py` and the registered operators."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable

import torch
from torch.nn import functional

from ...core import proof
from ...core.calls import Calls, Outside
from ...core.domain import (
    FLOAT_DTYPES,
    NO_STATE,
    allocator,
    are_as_saved,
    are_plain,
    layouts_if_hooked,
    runs_kernels,
)
from ...core.inspection import functions_of
from ...core.launch import BinaryCall, Launch
from ...core.layout import Output, row_number_strides, rows_in_memory
from ...core.torch_internals import apply_of, dispatch_modes
from . import backward as rms_norm_backward
from . import fused_backward
from .formulas import FUSED, MAX_FUSED_HIDDEN_SIZE, RMSNormFormula, eager_rstd, in_domain
from .plan import forward
from .proof import calls_torch, gradients_proved, proved, variant_of


@dataclass(eq=False)
class Inference(BinaryCall):
    """A call without gradients, resolved for one eps too; `out` is for a decoder layer's replay."""

    out: Output


@dataclass(eq=False)
class Training:
    """A call with gradients, which needs the row statistics.

    Args:
        original: the replaced forward, for reports.
        two_edges: x enters autograd twice, see `RMSNormFormula.has_two_edges`.
    """

    variant: RMSNormFormula
    original: Callable
    weight_dtype: torch.dtype
    launch: Launch
    empty: Callable[[], torch.Tensor]
    empty_rstd: Callable[[], torch.Tensor]
    two_edges: bool
    eps: float

    def __call__(self, x, weight):
        return _apply(x, x if self.two_edges else None, weight, self)

    def with_rstd(self, x, weight):
        """The output and rstd, `[..., 1]`."""
        return self.variant.with_rstd(x, weight, self.eps) if dispatch_modes() else self.launched(x, weight)

    def launched(self, x, weight):
        """The same, whatever modes are active: none sees a call from Inductor's code."""
        out = self.empty()
        rstd = self.empty_rstd()
        self.launch.call_4(x, weight, out, rstd)
        return out, rstd


def _read_in_vectors(x, weight) -> bool:
    """Whether `F.rms_norm` reads vectors of four elements; otherwise it computes rstd in another way."""
    return not (x.data_ptr() | weight.data_ptr()) & (4 * x.element_size() - 1)


@dataclass(eq=False)
class _TorchInference(Inference):
    """`Inference` of a layer that calls `F.rms_norm`."""

    variant: RMSNormFormula
    eps: float

    def __call__(self, x, weight):
        if not _read_in_vectors(x, weight):
            return self.variant.eager(x, weight, self.eps)
        out = self.empty()
        self.launch.call_3(x, weight, out)
        return out

    into = None  # `_read_in_vectors` depends on addresses.


@dataclass(eq=False)
class _TorchTraining(Training):
    """`Training` of a layer that calls `F.rms_norm`.

    Args:
        kernels: those of its gradients.
    """

    kernels: fused_backward.Kernels

    def __call__(self, x, weight):
        return _apply_torch(x, weight, self)

    def launched(self, x, weight):
        if not _read_in_vectors(x, weight):
            return self.variant.with_rstd(x, weight, self.eps)
        return super().launched(x, weight)


# The `needs` of a call without gradients of x and of the weight.
NO_GRADIENTS = (False, False)


def call_of(x, weight, eps, owner, eps_name, needs, fused, state: Mapping = NO_STATE):
    """The recorded call for these tensors; None if the original forward runs.

    Args:
        needs: whether the gradients of x and of the weight are needed.
        fused: see `function.replacement`.
        state: the layer's `__dict__`.
    """
    functions = functions_of(owner, state)
    if functions is None:
        return proof.record_unreadable_forward(owner)
    table = torch_calls if fused else calls
    return table.find(owner.forward, (functions, eps_name, needs, eps), (x, weight), eps, owner, eps_name, needs, fused)


# `F.rms_norm` of torch 2.11 counts elements in 32 bits and reads wrong rows beyond.
_MAX_ELEMENTS_OF_TORCH = 1 << 32
_SPREAD_ROWS = "activations' rows are strided or not equally spaced"


def check_weight(x, weight, eps) -> None:
    """Raises Outside if no kernel takes this weight or eps."""
    if not isinstance(eps, (int, float)):
        raise Outside(f"eps has type {type(eps).__name__}")
    hidden_size = x.shape[-1]
    if x.dtype not in FLOAT_DTYPES or weight.dtype not in FLOAT_DTYPES:
        raise Outside(f"activations {x.dtype}, weight {weight.dtype}")
    if not in_domain(x.dtype, weight.dtype, hidden_size):
        raise Outside(f"hidden size {hidden_size}")
    if weight.numel() and (weight.shape, weight.stride()) != ((hidden_size,), (1,)):
        raise Outside("weight is not a contiguous [hidden_size]")


def check(x, weight, eps, owner, needs, fused) -> None:
    """Raises Outside if no kernel takes these tensors or this class."""
    if x.dim() == 0 or x.numel() == 0:
        raise Outside("activations have no rows")
    if not runs_kernels(x.device) or weight.device != x.device:
        raise Outside(f"activations on {x.device}, weight on {weight.device}")
    check_weight(x, weight, eps)
    if rows_in_memory(x.shape, x.stride()) is None:
        raise Outside(_SPREAD_ROWS)
    if calls_torch(owner):
        if not fused:
            raise Outside("the forward calls F.rms_norm, which TorchRMSNorm replaces")
        if x.dim() in (4, 5) and x.stride(1) == 1:  # There F.rms_norm runs several operations.
            raise Outside("activations are channels-last")
        if x.numel() > _MAX_ELEMENTS_OF_TORCH:
            raise Outside(f"more than {_MAX_ELEMENTS_OF_TORCH} elements")
    if needs != NO_GRADIENTS and x.dim() == 1:  # Eager's dweight of a vector is no sum over rows.
        raise Outside("gradients of a vector")


def _resolve(x, weight, eps, owner, eps_name, needs, fused):
    check(x, weight, eps, owner, needs, fused)
    variant = variant_of(owner, eps_name, x.dtype, weight.dtype if weight.numel() else None, x.device)
    if variant is None:
        return None
    hidden_size = x.shape[-1]
    if variant.fused and hidden_size > MAX_FUSED_HIDDEN_SIZE:
        raise Outside(f"hidden size is above {MAX_FUSED_HIDDEN_SIZE}")
    rows, row_stride, order = rows_in_memory(x.shape, x.stride())
    # `F.rms_norm` returns a contiguous tensor, even where it runs the variant's several operations.
    formula = FUSED if calls_torch(owner) and not variant.fused else variant
    out_dtype = variant.output_dtype(x.dtype, weight.dtype)
    out = Output.of(functools.partial(formula.eager, eps=0.0), x, weight, dtype=out_dtype)
    if rows_in_memory(x.shape, out.strides) != (rows, hidden_size, order):
        raise Outside(_SPREAD_ROWS)
    training = needs != NO_GRADIENTS
    of_rows = variant, owner, x.dtype, weight.dtype, hidden_size, rows
    if not proved(*of_rows, row_stride, x.device) or (training and not gradients_proved(*of_rows, x.device, needs)):
        return None
    launch = forward(variant, x.dtype, weight.dtype, hidden_size, rows, row_stride, x.device, eps, training)
    if not training:
        inference = launch, out.empty, out
        return _TorchInference(*inference, variant, eps) if variant.fused else Inference(*inference)
    shape, strides = (*x.shape[:-1], 1), (*row_number_strides(x.shape, order), 1)
    empty_rstd = allocator(shape, strides, torch.float32, x.device)
    call = variant, owner.forward, weight.dtype, launch, out.empty, empty_rstd, variant.has_two_edges(x.dtype), eps
    if not variant.fused:
        return Training(*call)
    kernels = fused_backward.Kernels(variant, x, weight, rows, row_stride)
    kernels.find(x, weight, *needs)
    proof.record_dependency(owner.forward, functional.rms_norm)
    return _TorchTraining(*call, kernels)


# Layers that call `F.rms_norm` have a table of their own.
calls, torch_calls = Calls(_resolve), Calls(_resolve)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, x_again, weight, call):
        out, rstd = call.with_rstd(x, weight)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(x, weight, rstd)
        else:  # Only dx reads the weight's values. As with eager they may change before the backward pass.
            ctx.save_for_backward(x, None, rstd)
            ctx.weight = weight.detach()
        ctx.set_materialize_grads(False)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, dy):
        if dy is None:  # The output was unused, so its gradient is undefined, which differs from zero.
            return None, None, None, None
        x, weight, rstd = ctx.saved_tensors
        needs_dx, _, needs_dweight, _ = ctx.needs_input_grad
        if weight is None:
            weight = ctx.weight
        variant, weight_dtype = ctx.call.variant, ctx.call.weight_dtype
        arguments = (variant, dy, x, weight, rstd, needs_dx, needs_dweight)
        if torch.is_grad_enabled():  # Double backward: rstd must be differentiable.
            arguments = (*arguments[:4], eager_rstd(x.to(torch.float32), ctx.call.eps), *arguments[5:])
        elif weight.dtype is weight_dtype:  # The model may have been cast since the forward pass.
            return *rms_norm_backward.gradients(*arguments, original=ctx.call.original), None
        return *rms_norm_backward.formula(*arguments, weight_dtype), None


_apply = apply_of(RMSNorm)


class TorchRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, call):
        out, rstd = call.with_rstd(x, weight)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.layouts = call, layouts_if_hooked(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return None, None, None
        call, (x, weight, rstd) = ctx.call, ctx.saved_tensors
        arguments, needs = (call.variant, dy, x, weight), ctx.needs_input_grad[:2]
        found, differentiable = None, torch.is_grad_enabled()
        as_saved = are_as_saved(ctx.layouts, x, weight, rstd)
        if as_saved and not differentiable and are_plain(dy, x) and are_plain(weight, rstd):
            found = call.kernels.gradients(*arguments[1:], rstd, *needs)
        if found is None and (differentiable or not dy.is_cuda):
            found = fused_backward.formula(*arguments, call.eps, *needs)
        dx, _, dweight = found or fused_backward.of_aten(*arguments, rstd, *needs)
        return dx, dweight, None


_apply_torch = apply_of(TorchRMSNorm)
