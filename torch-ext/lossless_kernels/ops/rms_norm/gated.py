"""Gated RMSNorm of linear-attention layers: the kernel computes the norm, torch operations compute the gate."""

import functools
from collections.abc import Mapping
from typing import Optional

import torch
from torch.compiler import is_dynamo_compiling

from ...core import proof
from ...core.calls import Outside
from ...core.domain import NO_STATE, are_ours, has_global_hooks, is_checkpointed, runs_kernels
from ...core.inspection import functions_of
from .formulas import EAGER, EPS_NAME, FP32_OUTPUT, LLAMA, MAX_HIDDEN_SIZE, RMSNormFormula
from .function import replacement as rms_norm_replacement
from .proof import PROOF_EPS, formula_cases, leaves, output_and_gradients, stand_in

_ACTIVATIONS = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}
# The formulas of the norm before the gate.
_VARIANTS = (LLAMA, FP32_OUTPUT)


def _times_gate(scaled, activation, gate, dtype):
    return (scaled * _ACTIVATIONS[activation](gate.to(torch.float32))).to(dtype)


def eager(variant: RMSNormFormula, activation: str, hidden_states, gate, weight, eps) -> torch.Tensor:
    """The formula in torch operations."""
    return _times_gate(variant.eager(hidden_states, weight, eps), activation, gate, hidden_states.dtype)


def replacement(
    hidden_states: torch.Tensor,
    gate: Optional[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    activation: str,
    owner: type,
    state: Mapping = NO_STATE,
) -> Optional[torch.Tensor]:
    """The output of `owner.forward`; None where the caller must compute it.

    Under torch.compile the caller always does, since Inductor's arithmetic for the gate differs.
    """
    if is_dynamo_compiling():
        return None
    # The original calls an activation layer, which global hooks see. In a checkpoint both passes must save the same.
    if has_global_hooks() and not is_checkpointed():
        return None
    try:
        _check(hidden_states, gate, weight, activation)
    except Outside as reason:
        return proof.record_refusal(owner.forward, str(reason))
    functions = functions_of(owner, state)
    if functions is None:
        return proof.record_unreadable_forward(owner)
    dtypes = (hidden_states.dtype, gate.dtype, weight.dtype)
    variant = _variant(owner, functions, activation, dtypes, hidden_states.device)
    if variant is None:
        return None
    # The norm's proof compares the kernel with the variant's formula, which is the owner's.
    scaled = rms_norm_replacement(hidden_states, weight, eps, EAGER[variant])
    return None if scaled is None else _times_gate(scaled, activation, gate, hidden_states.dtype)


def _check(hidden_states, gate, weight, activation) -> None:
    """Raises Outside if no kernel takes these arguments."""
    if not isinstance(gate, torch.Tensor) or not isinstance(weight, torch.Tensor):
        raise Outside("gate or weight is no tensor")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise Outside(f"activation {activation!r}")
    if not runs_kernels(hidden_states.device):
        raise Outside(f"activations on {hidden_states.device}")
    if not are_ours(hidden_states, gate, True):
        raise Outside(proof.NOT_PLAIN)


def _variant(owner, functions, activation, dtypes, device) -> Optional[RMSNormFormula]:
    """The variant whose gated formula returns the bits of `owner.forward` and of its gradients."""
    key = ("formula of gated rms_norm", functions, activation, dtypes, device)
    verdict = proof.verdict_on(key)
    if verdict is not None:
        return verdict.chosen
    where = f"activations {dtypes[0]}, gate {dtypes[1]}, weight {dtypes[2]}, {activation}"
    candidates = {
        variant: functools.partial(_formulas, owner, variant, activation, dtypes, device) for variant in _VARIANTS
    }
    inputs, of_weight = [(MAX_HIDDEN_SIZE, dtype) for dtype in dtypes[:2]], [((MAX_HIDDEN_SIZE,), dtypes[2])]
    refuse = functools.partial(proof.refuse_parts, functools.partial(_output_of, owner, activation), inputs, of_weight)
    variant = proof.match_formula(key, proof.Subject(owner.forward, device, where), candidates, refuse=refuse)
    if variant is not None:
        proof.record_dependency(owner.forward, EAGER[variant].forward)
    return variant


def _output_of(owner, activation, hidden_states, gate, weight, eps=PROOF_EPS) -> torch.Tensor:
    layer = stand_in(owner, weight, eps, eps_name=EPS_NAME)
    layer.activation = activation
    return owner.forward(layer, hidden_states, gate)


def _formulas(owner, variant, activation, dtypes, device):
    names = ("the output", "the input's gradient", "the gate's gradient", "the weight's gradient")
    for of_case, eps, (x, gate), weight, dy, other in formula_cases(device, 2, dtypes, inputs=2, rows=512):
        results = []
        for ours in (False, True):
            inputs = leaf, gates, scale = leaves((x, gate, weight), of_case)
            with torch.enable_grad():
                hidden_states = leaf.view_as(leaf)
                if ours:
                    out = eager(variant, activation, hidden_states, gates, scale, eps)
                else:
                    out = _output_of(owner, activation, hidden_states, gates, scale, eps)
                results.append(output_and_gradients(out, hidden_states, inputs, dy, other))
        for what, expected, found in zip(names, *results):
            yield what, found, expected
