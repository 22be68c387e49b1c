"""RMSNorm that returns the bits of transformers' eager layers."""

import math
import weakref
from collections.abc import Mapping
from typing import Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ...core import proof
from ...core.domain import NO_STATE, PLAIN_TYPES, are_ours, check_floating
from ...core.inspection import are_current, code_of
from ...core.torch_internals import dispatch_modes, forward_ad
from .call import NO_GRADIENTS, call_of, calls, torch_calls
from .compiled import replacement as compiled_replacement
from .formulas import EAGER, EPS_NAME, LLAMA


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

    The kernel runs for fp32, fp16 and bf16 on CUDA if `hidden_size` is a multiple of 4 from 64 to 32768. Eager computes
    everything else.
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


def replacement(
    hidden_states: torch.Tensor,
    weight: Optional[torch.Tensor],
    eps: float,
    owner: type,
    eps_name: str = EPS_NAME,
    fused: bool = False,
    state: Mapping = NO_STATE,
) -> Optional[torch.Tensor]:
    """The output of `owner.forward` from the kernel; None where the caller must compute it.

    Args:
        weight: None for an RMSNorm without one.
        owner: the class of the replaced layer.
        eps_name: the attribute that holds eps.
        fused: whether the caller has checked the other inputs of `F.rms_norm`, normalized_shape and autocast. Otherwise
            classes that call it keep their forward.
        state: the layer's `__dict__`.
    """
    if is_dynamo_compiling():
        return compiled_replacement(hidden_states, weight, eps, owner, eps_name, fused)
    table = torch_calls if fused else calls
    # The id may belong to another weight by now: everything that decides is compared.
    recent = table.recent.get(id(weight))
    if recent is not None:
        same, replaced, forward, helpers, read, added, grad, compute = recent
        if (
            type(hidden_states) in PLAIN_TYPES
            and not hidden_states.is_nested
            and same(hidden_states, weight)
            and replaced() is owner
            and forward is owner.forward
            and (not helpers or are_current(helpers, owner, state))
            and read is eps_name
            and added is eps
            and grad is is_grad_enabled()
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return compute(hidden_states, weight)
    original = owner.forward
    # A subclass may lack the operations below, and torch.fx traces with a proxy.
    if type(hidden_states) not in PLAIN_TYPES:
        return proof.record_refusal(original, proof.NOT_PLAIN)
    # A sharded weight that is not gathered is empty. It differs from no weight.
    if weight is None:
        weight = hidden_states.new_empty(0)
    elif not isinstance(weight, torch.Tensor) or weight.numel() == 0:
        return proof.record_refusal(original, "weight has no elements")
    needs = (hidden_states.requires_grad, weight.requires_grad) if is_grad_enabled() else NO_GRADIENTS
    if not are_ours(hidden_states, weight, needs != NO_GRADIENTS):
        return proof.record_refusal(original, proof.NOT_PLAIN)
    if needs != NO_GRADIENTS and (hidden_states.is_inference() or weight.is_inference()):
        # Autograd cannot save inference tensors; eager saves its own intermediate results.
        return proof.record_refusal(original, proof.INFERENCE_TENSORS)
    call = call_of(hidden_states, weight, eps, owner, eps_name, needs, fused, state)
    if call is None:
        return None
    if weight.numel():
        facts = weakref.ref(owner), original, code_of(owner).helpers, eps_name, eps, is_grad_enabled()
        table.recognise(id(weight), call, facts, (hidden_states, weight))
    return call(hidden_states, weight)
