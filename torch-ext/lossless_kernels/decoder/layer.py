"""A pre-norm decoder layer, with a fused residual add + RMSNorm after the attention."""

import functools
from collections.abc import Mapping
from typing import Any, Callable, Optional

import torch
from torch.compiler import is_dynamo_compiling

from ..core import LAYERS_MODULE, inspection, proof
from ..core.calls import Outside
from ..core.declarations import WARMUP, Warmup
from ..core.domain import NO_STATE, is_bare, keeps_its_saved_tensors, runs_kernels
from ..ops.rms_norm import add as add_rms_norm
from ..ops.rms_norm.formulas import EPS_NAMES
from ..ops.rms_norm.plan import warmup_shapes
from .attention import Scaled, attend
from .attention import formula_of as attention_formula_of

# All attributes that the forward of a known decoder layer reads.
_MODULES = frozenset(("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"))
_FORMULA = "norm, attention, sum and norm, MLP, sum"


def forward(layer, hidden_states: torch.Tensor, arguments: dict) -> torch.Tensor:
    """transformers' `LlamaDecoderLayer.forward`, with module calls.

    Args:
        layer: the module, with `input_layernorm`, `self_attn`, `post_attention_layernorm` and `mlp`.
        hidden_states: `[batch, tokens, hidden_size]`.
        arguments: the attention's, by the layer's names.
    """
    normed = layer.input_layernorm(hidden_states)
    attended, _ = layer.self_attn(hidden_states=normed, **arguments)
    normed, residual = unfused(attended, hidden_states, layer.post_attention_layernorm)
    del attended  # As in eager: the MLP needs the most memory.
    return residual + layer.mlp(normed)


def fused_forward(layer, hidden_states: torch.Tensor, arguments: dict) -> torch.Tensor:
    """`forward` with the kernels, and without module calls that run only a forward."""
    modules = layer._modules
    # A plain function may replace a module.
    if not is_dynamo_compiling() and not _MODULES <= modules.keys():
        return forward(layer, hidden_states, arguments)
    normed = _called(modules["input_layernorm"], hidden_states)
    return after_attention(layer, attend(modules["self_attn"], normed, arguments), hidden_states)


def after_attention(layer, attended: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """The part of `fused_forward` after the attention."""
    modules = layer._modules
    normed, residual = fused(attended, hidden_states, modules["post_attention_layernorm"])
    del attended
    return residual + _called(modules["mlp"], normed)


def _called(module, hidden_states):
    return module.forward(hidden_states) if is_bare(module) else module(hidden_states)


def unfused(hidden_states: torch.Tensor, residual: torch.Tensor, norm: torch.nn.Module):
    """`norm(residual + hidden_states)` and the sum, by the operations of the original layer."""
    residual = residual + hidden_states
    return norm(residual), residual


def fused(hidden_states: torch.Tensor, residual: torch.Tensor, norm: torch.nn.Module):
    """The same by one kernel, if it supports the norm."""
    owner = type(norm)
    name = EPS_NAMES.get(getattr(owner, "kernel_layer_name", None))
    if name is not None and is_bare(norm) and keeps_its_saved_tensors(norm):
        eps = norm.__dict__.get(name)
        weight = norm._parameters.get("weight")
        added = add_rms_norm.replacement(hidden_states, residual, weight, eps, owner, name, norm.__dict__)
        if added is not None:
            return added
    return unfused(hidden_states, residual, norm)


def _warmup_part(layer) -> tuple[torch.nn.Module, Callable]:
    """The norm after the layer's attention, and the fused residual add + RMSNorm as that norm's forward."""
    self_attn, norm = map(layer._modules.get, ("self_attn", "post_attention_layernorm"))
    if self_attn is None or norm is None:
        raise Outside("no self_attn or no post_attention_layernorm")
    return norm, functools.partial(_sum_and_norm, type(layer), type(self_attn))


def _sum_and_norm(layer_class, attention_class, norm, hidden_states, residual):
    attention_formula_of(attention_class, hidden_states)
    if not is_proved(layer_class, hidden_states) or not is_bare(norm):
        return hidden_states  # The layer does not use the fused kernel.
    return fused(hidden_states, residual, norm)


WARMUP["LlamaDecoderLayer"] = Warmup(warmup_shapes, _warmup_part)


# Proof


def is_proved(owner: type, hidden_states: Any, state: Mapping = NO_STATE) -> bool:
    """Whether `owner.forward` is proved to compute `forward` on this device. `state` is the layer's `__dict__`."""
    if not isinstance(hidden_states, torch.Tensor) or not runs_kernels(hidden_states.device):
        return False
    if is_dynamo_compiling():
        return hidden_states.is_cuda and _is_proved_for_compile(owner, hidden_states.device.index or 0)
    code = inspection.code_of(owner)
    if code.helpers and not inspection.are_current(code.helpers, owner, state):
        return False
    key = ("decoder", hidden_states.get_device())
    proved = code.memo.get(key)
    if proved is None:
        proved = _verdict(owner, hidden_states.device)
        if proved is not None:
            inspection.code_of(owner).memo[key] = proved
    return bool(proved)


@torch.compiler.assume_constant_result
def _is_proved_for_compile(owner, device_index) -> bool:
    return bool(_verdict(owner, torch.device("cuda", device_index)))


def _verdict(owner, device) -> Optional[bool]:
    """None if no verdict is possible at present, as inside a CUDA graph's capture."""
    functions = inspection.functions_of(owner)
    if owner.__module__ == LAYERS_MODULE or functions is None:
        proof.record_unreadable_forward(owner)
        return False
    if not _MODULES.issuperset(functions[0].__code__.co_names):
        proof.record_refusal(owner.forward, "its forward uses more than two norms, an attention and an MLP")
        return False
    key = ("decoder", functions, device)
    subject = proof.Subject(owner.forward, device, "any dtype", _FORMULA)
    proved = proof.match_formula(key, subject, {True: functools.partial(_comparisons, owner, device)})
    return bool(proved) if proof.is_final(key) else None


class _ScaledTuple(Scaled):
    def forward(self, hidden_states):
        return (super().forward(hidden_states),)


class _Attention(Scaled):
    """A stand-in that records its arguments."""

    def __init__(self, weight):
        super().__init__(weight)
        self.calls: list = []

    def forward(self, *arguments, **named):
        self.calls.append((arguments, dict(named, hidden_states=None)))
        return torch.cos(named["hidden_states"] * self.weight), None


def _comparisons(owner, device):
    # The layer passes these on to its attention, whatever their values.
    names = ("attention_mask", "position_ids", "past_key_values", "position_embeddings", "another")
    yield from _of_arguments(owner, device, torch.float32, {"use_cache": True, **{name: object() for name in names}})
    yield from _of_arguments(owner, device, torch.bfloat16, {"use_cache": False, **dict.fromkeys(names)})


def _of_arguments(owner, device, dtype, arguments):
    generator = proof.generator(device, seed=3)

    def make():
        return torch.randn(2, 3, 8, device=device, generator=generator).to(dtype)

    data, weights, dy, other = make(), [make() for _ in range(4)], make(), make()

    def run(compute, returns_tuple=False):
        layer = torch.nn.Module.__new__(owner)
        torch.nn.Module.__init__(layer)
        layer.input_layernorm, layer.post_attention_layernorm = Scaled(weights[0]), Scaled(weights[1])
        layer.mlp = (_ScaledTuple if returns_tuple else Scaled)(weights[2])
        layer.self_attn = _Attention(weights[3])
        hidden_states = data.clone().requires_grad_()
        with torch.enable_grad():
            out = compute(layer, hidden_states, **arguments)
            inputs = (hidden_states, *layer.parameters())
            gradients = torch.autograd.grad((out, hidden_states * 1.0), inputs, (dy, other))
        return (out.detach(), *gradients), layer.self_attn.calls

    expected, calls = run(owner.forward)
    found, our_calls = run(lambda layer, hidden_states, **arguments: forward(layer, hidden_states, arguments))
    if calls != our_calls:
        raise ValueError("the attention gets other arguments")
    for number, (ours, theirs) in enumerate(zip(found, expected)):
        yield f"gradient {number}" if number else "the output", ours, theirs
    try:
        run(owner.forward, returns_tuple=True)
    except TypeError:
        return
    raise ValueError("it accepts an MLP that returns a tuple")
