"""What LayerNorm and GroupNorm share: calls with a weight and a bias, or without, their gradients, and their operators.

A norm divides its input: LayerNorm by normalized_shape, GroupNorm by num_groups. Here either is its `division`.
"""

from typing import Callable, NamedTuple, Optional

import torch
from torch import is_grad_enabled

from ..core import operators, proof
from ..core.calls import UNSEEN, Calls, remember
from ..core.domain import (
    FLOAT_DTYPES,
    are_as_saved,
    are_ours,
    are_plain,
    gradients_apart,
    is_autocast,
    is_traced_plainly,
    layouts_if_hooked,
)

# Whether the gradients of input, weight and bias are needed.
Needs = tuple[bool, bool, bool]


class Gradients(NamedTuple):
    dx: Optional[torch.Tensor]
    dweight: Optional[torch.Tensor]
    dbias: Optional[torch.Tensor]


class AffineNorm:
    """A function of torch, `eager(input, division, weight, bias, eps)`, and the calls of its kernels.

    A family compares a call with its last ones itself, as `core/calls.py` says why.

    Args:
        eager: the function.
        calls: the family's.
    """

    def __init__(self, eager: Callable[..., torch.Tensor], calls: Calls):
        self.eager, self.calls = eager, calls

    def compute(self, input, division, weight, bias, eps) -> Optional[torch.Tensor]:
        """The output of a call that was not recognised, which it is from now on; None if eager must compute it."""
        tensors = given(input, weight, bias)
        needs_grad = is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if not all(are_ours(input, tensor, needs_grad) for tensor in tensors):
            return proof.record_refusal(self.eager, proof.NOT_PLAIN)
        if needs_grad and any(tensor.is_inference() for tensor in tensors):
            return proof.record_refusal(self.eager, proof.INFERENCE_TENSORS)
        if _autocast_changes(*tensors):
            return proof.record_refusal(self.eager, "autocast, which computes in fp32")
        call = self._find(input, division, weight, bias, eps, needs_grad)
        if call is None:
            return None
        if needs_grad:
            needs = [each is not None and each.requires_grad for each in (input, weight, bias)]
            call.backward(input, weight, tuple(needs))
        self.calls.recognise((id(weight), bias is None), call, (division, eps, is_grad_enabled()), tensors)
        return call(input, weight, bias)

    def _find(self, input, division, weight, bias, eps, needs_grad: bool):
        facts = (weight is None, bias is None, division, eps, needs_grad)
        return self.calls.find(self.eager, facts, given(input, weight, bias), *facts)

    # For the operators `op(input, division, weight, bias, eps)` -> output, mean and rstd, and
    # `op_backward(dy, input, division, mean, rstd, weight, bias, eps, needs)` -> the gradients.

    def find_outputs(self, input, division, weight, bias, eps) -> Optional[Callable]:
        call = self._find_training(input, division, weight, bias, eps)
        return None if call is None else call.launched

    def find_gradients(self, dy, input, division, mean, rstd, weight, bias, eps, needs) -> Optional[Callable]:
        call = self._find_training(input, division, weight, bias, eps)
        if call is None:
            return None
        call.backward(input, weight, tuple(needs))

        def compute(dy, input, mean, rstd, weight=None, bias=None):
            return call.launched_gradients(dy, input, mean, rstd, weight, bias, tuple(needs))

        return operators.of_tensors(compute, dy)

    def _find_training(self, input, division, weight, bias, eps):
        division = tuple(division) if isinstance(division, list) else division
        return self._find(input, division, weight, bias, eps, True)


class Training:
    """What a call with gradients adds to a family's call, which has `with_statistics` and `launched`.

    Args:
        layouts: of input and weight.

    Attributes:
        saves_bias: whether eager saves it, and refuses one that was written to between the passes.
    """

    saves_bias = True

    def __init__(self, layouts: tuple):
        self.layouts = layouts
        self.backwards: dict[Needs, Optional[Callable]] = {}

    def backward(self, input, weight, needs: Needs) -> Optional[Callable]:
        """The kernels of these gradients; None if ATen's operator computes them. A new call asks for them before its forward
        pass: in the backward pass less memory is free for a proof."""
        found = self.backwards.get(needs, UNSEEN)
        if found is UNSEEN:
            if not are_as_saved(self.layouts, input, weight):
                return None
            found = self.find_backward(input, weight, needs)
            remember(self.backwards, needs, found)
        return found

    def gradients(self, dy, input, mean, rstd, weight, bias, needs: Needs) -> tuple[Optional[torch.Tensor], ...]:
        """Those of input, weight and bias that are needed, from the kernels where they compute what ATen does."""
        if not is_grad_enabled() and are_plain(dy, input) and (weight is None or are_plain(weight, input)):
            return self.launched_gradients(dy, input, mean, rstd, weight, bias, needs)
        return self.eagers_gradients(dy, input, mean, rstd, weight, bias, needs)

    def launched_gradients(self, dy, input, mean, rstd, weight, bias, needs: Needs):
        """The same, whatever modes are active: none sees a call from Inductor's code."""
        backward, dy = self.backward(input, weight, needs), dy.contiguous()
        if backward is not None and backward.fits(dy, input, weight):
            return backward(dy, input, mean, rstd, weight, bias)
        return self.eagers_gradients(dy, input, mean, rstd, weight, bias, needs)

    def find_backward(self, input, weight, needs: Needs) -> Optional[Callable]:
        """The kernels of these gradients, or None."""
        raise NotImplementedError

    def eagers_gradients(self, dy, input, mean, rstd, weight, bias, needs: Needs) -> tuple[Optional[torch.Tensor], ...]:
        """Those that are needed, from ATen's operator; under `create_graph` autograd's."""
        raise NotImplementedError


class NormFunction(torch.autograd.Function):
    """A call with gradients, as a node of autograd."""

    @staticmethod
    def forward(ctx, call: Training, input, weight, bias):
        out, mean, rstd = call.with_statistics(input, weight, bias)
        ctx.save_for_backward(input, weight, bias if call.saves_bias else None, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.layouts, ctx.has_bias = call, layouts_if_hooked(input, weight, mean, rstd), bias is not None
        return out

    @staticmethod
    def backward(ctx, dy):
        if dy is None:  # The output was unused, so its gradient is undefined, which differs from zero.
            return None, None, None, None
        call, (input, weight, bias, mean, rstd) = ctx.call, ctx.saved_tensors
        if ctx.has_bias and not call.saves_bias:  # Any numbers of its dtype and shape.
            bias = weight.detach()
        tensors, needs = (dy, input, mean, rstd, weight, bias), ctx.needs_input_grad[1:]
        if are_as_saved(ctx.layouts, input, weight, mean, rstd):
            return None, *call.gradients(*tensors, needs)
        return None, *call.eagers_gradients(*tensors, needs)


def given(input, weight, bias) -> tuple[torch.Tensor, ...]:
    """The tensors of a call."""
    if weight is None:
        return (input,) if bias is None else (input, bias)
    return (input, weight) if bias is None else (input, weight, bias)


def through_autograd(eager, dy, input, division, weight, bias, eps, needs: Needs) -> tuple[Optional[torch.Tensor], ...]:
    """The gradients that are needed, which can be differentiated."""

    def out(*needed):
        found = iter(needed)
        arguments = [next(found) if need else each for each, need in zip((input, weight, bias), needs)]
        return eager(arguments[0], division, *arguments[1:], eps)

    needed = [each for each, need in zip((input, weight, bias), needs) if need]
    found = iter(gradients_apart(out, needed, dy))
    return tuple(next(found) if need else None for need in needs)


def is_traceable(input, weight, bias) -> bool:
    """Whether torch.compile may trace an operator for these tensors. Without a proof the operator runs ATen's kernel."""
    tensors = given(input, weight, bias)
    if any(tensor.device != input.device for tensor in tensors) or _autocast_changes(*tensors):
        return False
    if not is_traced_plainly(input.device) or (weight is None and bias is not None):
        return False
    return input.dtype in FLOAT_DTYPES and all(tensor.dtype == input.dtype for tensor in tensors)


def fake_gradients(dy, input, division, mean, rstd, weight, bias, eps, needs):
    found = (each.new_empty(each.shape) if need else None for each, need in zip((input, weight, bias), needs))
    return operators.without_none(found, dy)


def register_gradient(op, backward, saves_bias: bool = True) -> None:
    """The gradient of an operator by that of its gradients.

    Args:
        saves_bias: as in `Training`. The weight stands for a bias that is not saved.
    """

    def setup_context(ctx, inputs, output):
        input, ctx.division, weight, bias, ctx.eps = inputs
        bias = weight if bias is not None and not saves_bias else bias
        ctx.save_for_backward(input, weight, bias, *output[1:])
        ctx.set_materialize_grads(False)

    def gradient(ctx, dy, d_mean, d_rstd):
        if dy is None:
            return None, None, None, None, None
        input, weight, bias, mean, rstd = ctx.saved_tensors
        needs = [ctx.needs_input_grad[each] for each in (0, 2, 3)]
        found = backward(dy, input, ctx.division, mean, rstd, weight, bias, ctx.eps, needs)
        dx, dweight, dbias = (each if need else None for each, need in zip(found, needs))
        return dx, None, dweight, dbias, None

    torch.library.register_autograd(op, gradient, setup_context=setup_context)


def attribute_of(module, owner, state, name):
    """An attribute as the module holds it. Raises KeyError if its class, or a parametrization, computes it."""
    if hasattr(owner, name):
        raise KeyError(name)
    if name in state:
        return state[name]
    return state["_parameters"][name] if name in state["_parameters"] else state["_buffers"][name]


def _autocast_changes(*tensors) -> bool:
    return any(tensor.dtype != torch.float32 for tensor in tensors) and is_autocast(tensors[0].device)
