"""RMSNorm times an activation of a gate, as linear-attention layers end: the norm from the kernel, the gate in torch operations."""

import functools
from typing import Optional

import torch
from torch.compiler import is_dynamo_compiling

from . import proof, rms_norm
from .domain import are_ours, runs_kernels
from .variants import FP32_OUTPUT, LLAMA, Variant

_ACTIVATIONS = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}
# The norm's output before the gate.
_VARIANTS = (LLAMA, FP32_OUTPUT)


def _times_gate(scaled, activation, gate, dtype):
    return (scaled * _ACTIVATIONS[activation](gate.to(torch.float32))).to(dtype)


def eager(variant: Variant, activation: str, hidden_states, gate, weight, eps) -> torch.Tensor:
    """The formula in torch operations."""
    return _times_gate(variant.eager(hidden_states, weight, eps), activation, gate, hidden_states.dtype)


def replacement(
    hidden_states: torch.Tensor,
    gate: Optional[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    activation: str,
    owner: type,
) -> Optional[torch.Tensor]:
    """What `owner.forward` returns; None where the caller must compute it itself.

    Which is everywhere under torch.compile: Inductor has an arithmetic of its own for the gate.
    """
    if is_dynamo_compiling() or not isinstance(gate, torch.Tensor) or activation not in _ACTIVATIONS:
        return None
    if not isinstance(weight, torch.Tensor) or not are_ours(hidden_states, gate, True):
        return None
    if not runs_kernels(hidden_states.device) or proof.code(owner) is None:
        return None
    dtypes = (hidden_states.dtype, gate.dtype, weight.dtype)
    variant = _variant(owner, activation, dtypes, hidden_states.device)
    if variant is None:
        return None
    # The norm's own proof compares it with the variant's formula, which was just found to be the owner's.
    scaled = rms_norm.replacement(hidden_states, weight, eps, rms_norm.EAGER[variant])
    return None if scaled is None else _times_gate(scaled, activation, gate, hidden_states.dtype)


_found: dict = {}


def _variant(owner, activation, dtypes, device) -> Optional[Variant]:
    """The variant whose gated formula has the bits of `owner.forward`, and its gradients."""
    key = ("formula of gated rms_norm", proof.code(owner), activation, dtypes, device)
    if key in _found:
        return _found[key]
    where = f"activations {dtypes[0]}, gate {dtypes[1]}, weight {dtypes[2]}, {activation}"
    candidates = {
        variant: functools.partial(_formulas, owner, variant, activation, dtypes, device) for variant in _VARIANTS
    }
    variant = proof.recognize(key, proof.Subject(owner.forward, device, where), candidates)
    if proof.is_settled(key):
        _found[key] = variant
    if variant is not None:
        proof.relies(owner.forward, rms_norm.EAGER[variant].forward)
    return variant


def _formulas(owner, variant, activation, dtypes, device):
    names = ("the output", "the input's gradient", "the gate's gradient", "the weight's gradient")
    for of_case, eps, (x, gate), weight, dy, other in rms_norm.formula_cases(device, 2, dtypes, inputs=2, rows=512):
        results = []
        for ours in (False, True):
            inputs = leaf, gates, scale = rms_norm.leaves((x, gate, weight), of_case)
            with torch.enable_grad():
                hidden_states = leaf.view_as(leaf)
                if ours:
                    out = eager(variant, activation, hidden_states, gates, scale, eps)
                else:
                    layer = rms_norm.stand_in(owner, scale, eps, eps_name="variance_epsilon")
                    layer.activation = activation
                    out = owner.forward(layer, hidden_states, gates)
                results.append(rms_norm.output_and_gradients(out, hidden_states, inputs, dy, other))
        for what, expected, found in zip(names, *results):
            yield what, found, expected
