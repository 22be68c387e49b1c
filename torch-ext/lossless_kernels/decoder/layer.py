"""A pre-norm decoder layer: the sum with the first residual and the norm after it from one kernel, the rest called as modules."""

import functools
from collections.abc import Mapping
from typing import Any, Callable, Optional

import torch
from torch.compiler import is_dynamo_compiling

from ..core import LAYERS_MODULE, inspection, proof
from ..core.calls import Outside
from ..core.domain import NO_STATE, is_bare, keeps_its_saved_tensors, runs_kernels
from ..ops.rms_norm import add as add_rms_norm
from ..ops.rms_norm.formulas import EPS_NAMES
from .attention import admitted as admitted_attention
from .attention import attend

# All that the forward of a known decoder layer asks for.
_MODULES = frozenset(("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"))
_FORMULA = "norm, attention, sum and norm, MLP, sum"


def forward(layer, hidden_states: torch.Tensor, arguments: dict) -> torch.Tensor:
    """What transformers' `LlamaDecoderLayer.forward` returns, every module called.

    Args:
        layer: the module, with `input_layernorm`, `self_attn`, `post_attention_layernorm` and `mlp`.
        hidden_states: `[batch, tokens, hidden_size]`.
        arguments: for the attention, in the layer's own names.
    """
    normed = layer.input_layernorm(hidden_states)
    attended, _ = layer.self_attn(hidden_states=normed, **arguments)
    normed, residual = apart(attended, hidden_states, layer.post_attention_layernorm)
    del attended  # As eager does: the MLP is where most memory is in use.
    return residual + layer.mlp(normed)


def fused_forward(layer, hidden_states: torch.Tensor, arguments: dict) -> torch.Tensor:
    """`forward` with the kernels, and without the calls of modules that nobody would notice."""
    modules = layer._modules
    # Somebody may have put a plain function in the place of one.
    if not is_dynamo_compiling() and not _MODULES <= modules.keys():
        return forward(layer, hidden_states, arguments)
    normed = _called(modules["input_layernorm"], hidden_states)
    return after_attention(layer, attend(modules["self_attn"], normed, arguments), hidden_states)


def after_attention(layer, attended: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """The rest of `fused_forward`."""
    modules = layer._modules
    normed, residual = fused(attended, hidden_states, modules["post_attention_layernorm"])
    del attended
    return residual + _called(modules["mlp"], normed)


def _called(module, hidden_states):
    return module.forward(hidden_states) if is_bare(module) else module(hidden_states)


def apart(hidden_states: torch.Tensor, residual: torch.Tensor, norm: torch.nn.Module):
    """`norm(residual + hidden_states)` and the sum, in the operations of the original layer."""
    residual = residual + hidden_states
    return norm(residual), residual


def fused(hidden_states: torch.Tensor, residual: torch.Tensor, norm: torch.nn.Module):
    """The same from one kernel, where the norm is one that it knows."""
    owner = type(norm)
    name = EPS_NAMES.get(getattr(owner, "kernel_layer_name", None))
    if name is not None and is_bare(norm) and keeps_its_saved_tensors(norm):
        eps = norm.__dict__.get(name)
        weight = norm._parameters.get("weight")
        added = add_rms_norm.replacement(hidden_states, residual, weight, eps, owner, name, norm.__dict__)
        if added is not None:
            return added
    return apart(hidden_states, residual, norm)


def warmup_part(layer) -> tuple[torch.nn.Module, Callable]:
    """The norm after the layer's attention, whose weight the layer's own kernel takes, and that kernel as the norm's forward."""
    self_attn, norm = map(layer._modules.get, ("self_attn", "post_attention_layernorm"))
    if self_attn is None or norm is None:
        raise Outside("no self_attn or no post_attention_layernorm")
    return norm, functools.partial(_sum_and_norm, type(layer), type(self_attn))


def _sum_and_norm(layer_class, attention_class, norm, hidden_states, residual):
    admitted_attention(attention_class, hidden_states)
    if not admits(layer_class, hidden_states) or not is_bare(norm):
        return hidden_states  # The sum is computed apart.
    return fused(hidden_states, residual, norm)


# Proof


def admits(owner: type, hidden_states: Any, state: Mapping = NO_STATE) -> bool:
    """Whether `forward` has proved to do what `owner.forward` does, on the device of `hidden_states`.

    Args:
        state: the layer's `__dict__`.
    """
    if not isinstance(hidden_states, torch.Tensor) or not runs_kernels(hidden_states.device):
        return False
    if is_dynamo_compiling():
        return hidden_states.is_cuda and _admits_for_compile(owner, hidden_states.device.index or 0)
    code = inspection.code_of(owner)
    if code.helpers and not inspection.are_current(code.helpers, owner, state):
        return False
    key = ("decoder", hidden_states.get_device())
    admitted = code.memo.get(key)
    if admitted is None:
        admitted = _recognized(owner, hidden_states.device)
        if admitted is not None:
            inspection.code_of(owner).memo[key] = admitted
    return bool(admitted)


@torch.compiler.assume_constant_result
def _admits_for_compile(owner, device_index) -> bool:
    return bool(_recognized(owner, torch.device("cuda", device_index)))


def _recognized(owner, device) -> Optional[bool]:
    """None where no verdict is possible now, as inside a CUDA graph's capture."""
    functions = inspection.functions_of(owner)
    # A layer of this package used by itself; a forward that asks for more than its modules.
    if owner.__module__ == LAYERS_MODULE or functions is None:
        proof.outside_for_its_code(owner)
        return False
    if not _MODULES.issuperset(functions[0].__code__.co_names):
        proof.outside(owner.forward, "a forward that has more parts than a norm, attention, a norm and an MLP")
        return False
    key = ("decoder", functions, device)
    subject = proof.Subject(owner.forward, device, "any dtype", _FORMULA)
    admitted = proof.recognize(key, subject, {True: functools.partial(_comparisons, owner, device)})
    return bool(admitted) if proof.is_settled(key) else None


class _Scaled(proof.Part):
    """In the place of a norm and of the MLP."""

    def __init__(self, weight, returns_tuple=False):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.returns_tuple = returns_tuple

    def forward(self, hidden_states):
        out = torch.sin(hidden_states * self.weight)
        return (out,) if self.returns_tuple else out


class _Attention(proof.Part):
    """Remembers what it was called with."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.calls: list = []

    def forward(self, *arguments, **named):
        self.calls.append((arguments, dict(named, hidden_states=None)))
        return torch.cos(named["hidden_states"] * self.weight), None


def _comparisons(owner, device):
    # Whatever these are, the layer hands them on to its attention.
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
        layer.input_layernorm, layer.post_attention_layernorm = _Scaled(weights[0]), _Scaled(weights[1])
        layer.mlp, layer.self_attn = _Scaled(weights[2], returns_tuple), _Attention(weights[3])
        hidden_states = data.clone().requires_grad_()
        with torch.enable_grad():
            out = compute(layer, hidden_states, **arguments)
            inputs = (hidden_states, *layer.parameters())
            gradients = torch.autograd.grad((out, hidden_states * 1.0), inputs, (dy, other))
        return (out.detach(), *gradients), layer.self_attn.calls

    expected, calls = run(owner.forward)
    found, our_calls = run(lambda layer, hidden_states, **arguments: forward(layer, hidden_states, arguments))
    if calls != our_calls:
        raise ValueError("the attention is called in another way")
    for number, (ours, theirs) in enumerate(zip(found, expected)):
        yield f"gradient {number}" if number else "the output", ours, theirs
    try:
        run(owner.forward, returns_tuple=True)
    except TypeError:
        return
    raise ValueError("an MLP may return a tuple")
