"""Decoder layers, with a fused residual add + RMSNorm after the attention: a formula proof recognises the class's forward."""

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch.compiler import is_dynamo_compiling

from ..core import LAYERS_MODULE, inspection, proof
from ..core.calls import Outside
from ..core.declarations import WARMUP, Warmup
from ..core.domain import NO_STATE, at_trace_time, is_bare, keeps_its_saved_tensors, runs_kernels
from ..ops.rms_norm.add import replacement as add_rms_norm_replacement
from ..ops.rms_norm.formulas import EPS_NAMES
from ..ops.rms_norm.plan import warmup_shapes
from .attention import Scaled, attend
from .attention import formula_of as attention_formula_of


@dataclass(frozen=True)
class DecoderFormula:
    """The variant of a decoder layer.

    Args:
        before_attention, before_mlp: the names of the norms before the two blocks, "" where there is none.
        after_attention, after_mlp: the names of the norms or dropouts after the two blocks, "" where there is none.
        multiplier: the name of the attribute by which both blocks' outputs are multiplied, "" if there is none.
        pair: the MLP returns a pair; the second, such as a router's scores, is not used.
        parallel: attention and MLP have the same input, and both outputs are added to the layer's.
    """

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    multiplier: str = ""
    pair: bool = False
    parallel: bool = False

    @functools.cached_property
    def children(self) -> frozenset[str]:
        """The names of the layer's children."""
        names = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return frozenset(("self_attn", "mlp", *filter(None, names)))

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """All attributes that the forward reads."""
        return self.children.union(filter(None, (self.multiplier,)))

    @property
    def formula(self) -> str:
        if self.parallel:
            return "norm, attention beside MLP, sums"
        scaled = ", multiplied" * bool(self.multiplier)
        attention = f"{'norm, ' * bool(self.before_attention)}attention{_after(self.after_attention)}{scaled}"
        mlp = f"MLP{' of two outputs' * self.pair}{_after(self.after_mlp)}{scaled}"
        return f"{attention}, sum{' and norm' * bool(self.before_mlp)}, {mlp}, sum"


def _after(name: str) -> str:
    return f", {'dropout' if 'dropout' in name else 'norm'}" if name else ""


PRE_NORM = DecoderFormula()
_FORMULAS = [
    PRE_NORM,
    DecoderFormula(pair=True),
    DecoderFormula(multiplier="residual_multiplier"),
    DecoderFormula(after_attention="resid_attn_dropout", after_mlp="resid_mlp_dropout"),
    DecoderFormula(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    DecoderFormula(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    DecoderFormula(
        before_attention="",
        after_attention="post_attention_layernorm",
        before_mlp="",
        after_mlp="post_feedforward_layernorm",
    ),
    DecoderFormula(before_mlp="", parallel=True),
]
CHILDREN = frozenset(formula.children for formula in _FORMULAS)


class _Operations(NamedTuple):
    """The ways to compute a layer's parts: a child's call, the attention's output, and a sum with its norm."""

    call: Callable
    attend: Callable
    add_and_normalize: Callable


def forward(layer, hidden_states: torch.Tensor, arguments: dict, formula: DecoderFormula = PRE_NORM) -> torch.Tensor:
    """The forward of transformers' `LlamaDecoderLayer`, or of the variant's decoder layer, with module calls.

    Args:
        layer: the module.
        hidden_states: `[batch, tokens, hidden_size]`.
        arguments: the attention's, by the layer's names.
    """
    return _computed(_MODULE_CALLS, layer, formula, hidden_states, arguments)


def fused_forward(layer, formula: DecoderFormula, hidden_states: torch.Tensor, arguments: dict) -> torch.Tensor:
    """`forward` with the kernels, and without module calls that run only a forward, unless TorchDynamo traces."""
    if is_dynamo_compiling():
        return _computed(_COMPILED, layer, formula, hidden_states, arguments)
    # A plain function may replace a module.
    if not formula.children <= layer._modules.keys():
        return forward(layer, hidden_states, arguments, formula)
    return _computed(_KERNELS, layer, formula, hidden_states, arguments)


def _computed(operations, layer, formula, hidden_states, arguments):
    normed = formula.before_attention
    normed = operations.call(layer, normed, hidden_states) if normed else hidden_states
    if formula.parallel:
        return hidden_states + operations.attend(layer, normed, arguments) + operations.call(layer, "mlp", normed)
    return _after_attention(operations, layer, formula, operations.attend(layer, normed, arguments), hidden_states)


def _after_attention(operations, layer, formula, attended, hidden_states):
    if formula.after_attention:
        attended = operations.call(layer, formula.after_attention, attended)
    if formula.multiplier:
        attended = attended * getattr(layer, formula.multiplier)
    if formula.before_mlp:
        normed, residual = operations.add_and_normalize(attended, hidden_states, layer, formula.before_mlp)
    else:
        normed = residual = hidden_states + attended
    del attended  # As in eager: the MLP needs the most memory.
    out = operations.call(layer, "mlp", normed)
    if formula.pair:
        out, _ = out
    if formula.after_mlp:
        out = operations.call(layer, formula.after_mlp, out)
    if formula.multiplier:
        out = out * getattr(layer, formula.multiplier)
    return residual + out


def after_attention(layer, attended: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """The part of `PRE_NORM`'s `fused_forward` after the attention."""
    return _after_attention(_KERNELS, layer, PRE_NORM, attended, hidden_states)


def _called_as_module(layer, name, hidden_states):
    return getattr(layer, name)(hidden_states)


def _called_or_inlined(layer, name, hidden_states):
    """While TorchDynamo traces: of a forward it checks less at every call than of a module's call.

    It would trace the same forward in the call of a module that is compiled by itself.
    """
    module = getattr(layer, name)
    inlined = isinstance(module, torch.nn.Module) and is_bare(module)
    return module.forward(hidden_states) if inlined else module(hidden_states)


def _called_by_name(layer, name, hidden_states):
    module = layer._modules[name]
    return module.forward(hidden_states) if is_bare(module) else module(hidden_states)


def _attended_by_module(layer, hidden_states, arguments):
    attended, _ = layer.self_attn(hidden_states=hidden_states, **arguments)
    return attended


def _attended(layer, hidden_states, arguments):
    return attend(layer._modules["self_attn"], hidden_states, arguments)


def unfused(hidden_states: torch.Tensor, residual: torch.Tensor, norm: torch.nn.Module):
    """`norm(residual + hidden_states)` and the sum, by the operations of the original layer."""
    residual = residual + hidden_states
    return norm(residual), residual


# TorchDynamo checks a module in one step while its guards name no attribute of its class.
@torch.compiler.assume_constant_result
def _eps_name(owner: type) -> Optional[str]:
    return EPS_NAMES.get(getattr(owner, "kernel_layer_name", None))


def fused(hidden_states: torch.Tensor, residual: torch.Tensor, norm: torch.nn.Module):
    """The same by one kernel, if it supports the norm."""
    owner = type(norm)
    name = _eps_name(owner)
    if name is not None and is_bare(norm) and keeps_its_saved_tensors(norm):
        eps = getattr(norm, name, None)
        weight = norm._parameters.get("weight")
        added = add_rms_norm_replacement(hidden_states, residual, weight, eps, owner, name, norm.__dict__)
        if added is not None:
            return added
    return unfused(hidden_states, residual, norm)


def _unfused_module(hidden_states, residual, layer, name):
    return unfused(hidden_states, residual, getattr(layer, name))


def _fused_module(hidden_states, residual, layer, name):
    return fused(hidden_states, residual, getattr(layer, name))


def _fused_by_name(hidden_states, residual, layer, name):
    return fused(hidden_states, residual, layer._modules[name])


_MODULE_CALLS = _Operations(_called_as_module, _attended_by_module, _unfused_module)
_COMPILED = _Operations(_called_or_inlined, _attended_by_module, _fused_module)
_KERNELS = _Operations(_called_by_name, _attended, _fused_by_name)


def _warmup_part(layer) -> tuple[torch.nn.Module, Callable]:
    """The norm after the layer's first sum, and the fused residual add + RMSNorm as that norm's forward."""
    names = [formula.before_mlp for formula in _candidates(type(layer)) if formula.before_mlp]
    self_attn, norm = layer._modules.get("self_attn"), layer._modules.get(names[0]) if names else None
    if self_attn is None or norm is None:
        raise Outside("no self_attn, or no norm after the first sum")
    return norm, functools.partial(_sum_and_norm, type(layer), type(self_attn))


def _sum_and_norm(layer_class, attention_class, norm, hidden_states, residual):
    attention_formula_of(attention_class, hidden_states)
    if formula_of(layer_class, hidden_states) is None or not is_bare(norm):
        return hidden_states  # The layer does not use the fused kernel.
    return fused(hidden_states, residual, norm)


WARMUP.update(
    dict.fromkeys(
        ("LlamaDecoderLayer", "MixtralDecoderLayer", "Qwen3VLTextDecoderLayer"), Warmup(warmup_shapes, _warmup_part)
    )
)


# Proof


def formula_of(owner: type, hidden_states: Any, state: Mapping = NO_STATE) -> Optional[DecoderFormula]:
    """The variant that `owner.forward` is proved to compute on this device; None if it is none.

    `state` is the layer's `__dict__`.
    """
    if is_dynamo_compiling():
        return _formula_for_compile(owner, hidden_states.device)
    if not isinstance(hidden_states, torch.Tensor) or not runs_kernels(hidden_states.device):
        return None
    code = inspection.code_of(owner)
    if code.helpers and not inspection.are_current(code.helpers, owner, state):
        return None
    key = ("decoder", hidden_states.get_device())
    if key in code.memo:
        return code.memo[key]
    formula, final = _match_formula(owner, hidden_states.device)
    if final:
        inspection.code_of(owner).memo[key] = formula
    return formula


@at_trace_time
def _formula_for_compile(owner, device) -> Optional[DecoderFormula]:
    """TorchDynamo has no guards for the fields of a constant dataclass, and cannot read its properties."""
    return _match_formula(owner, device)[0] if runs_kernels(device) else None


def _candidates(owner) -> list[DecoderFormula]:
    """The variants whose names the forward reads."""
    functions = inspection.functions_of(owner)
    names = frozenset(functions[0].__code__.co_names) if functions else None
    return [formula for formula in _FORMULAS if formula.names == names]


def _match_formula(owner, device) -> tuple[Optional[DecoderFormula], bool]:
    """The variant, and whether the result is final: inside a CUDA graph's capture, for example, no verdict is possible."""
    functions = inspection.functions_of(owner)
    if owner.__module__ == LAYERS_MODULE or functions is None:
        proof.record_unreadable_forward(owner)
        return None, True
    candidates = _candidates(owner)
    if not candidates:
        known = frozenset().union(*(formula.names for formula in _FORMULAS))
        others = ", ".join(sorted({*functions[0].__code__.co_names} - known))
        what = (
            f"uses {others}, which no known decoder layer does"
            if others
            else "combines its parts as no known decoder layer does"
        )
        proof.record_refusal(functions[0], f"its forward {what}")
        return None, True
    key = ("decoder", functions, device)
    subject = proof.Subject(functions[0], device, "any dtype")
    comparisons = {formula: functools.partial(_comparisons, owner, formula, device) for formula in candidates}
    formula = proof.match_formula(key, subject, comparisons, operator.attrgetter("formula"))
    return formula, proof.verdict_on(key) is not None


class _Mlp(Scaled):
    """A stand-in that returns its output as the first of `outputs`; without a tuple if that is 0."""

    def __init__(self, weight, outputs):
        super().__init__(weight)
        self.outputs = outputs

    def forward(self, hidden_states):
        out = super().forward(hidden_states)
        return (out, *[None] * (self.outputs - 1)) if self.outputs else out


class _Attention(Scaled):
    """A stand-in that records its arguments."""

    def __init__(self, weight):
        super().__init__(weight)
        self.calls: list = []

    def forward(self, *arguments, **named):
        self.calls.append((arguments, dict(named, hidden_states=None)))
        return torch.cos(named["hidden_states"] * self.weight), None


def _comparisons(owner, formula, device):
    # The layer passes these on to its attention, whatever their values.
    cache = inspection.name_of_cache(owner)
    names = ("attention_mask", "position_ids", cache, "position_embeddings", "another")
    given = {"use_cache": True, **{name: object() for name in names}}
    yield from _of_arguments(owner, formula, device, torch.float32, given)
    yield from _of_arguments(owner, formula, device, torch.bfloat16, {"use_cache": False, **dict.fromkeys(names)})


def _of_arguments(owner, formula, device, dtype, arguments):
    generator = proof.generator(device, seed=3)

    def make():
        return proof.normal(generator, 2, 3, 8).to(dtype)

    data, dy, other = make(), make(), make()
    weights = {name: make() for name in sorted(formula.children)}

    def run(compute, outputs_of_mlp=2 * formula.pair):
        layer = torch.nn.Module.__new__(owner)
        torch.nn.Module.__init__(layer)
        for name, weight in weights.items():
            part = {"mlp": functools.partial(_Mlp, outputs=outputs_of_mlp), "self_attn": _Attention}.get(name, Scaled)
            setattr(layer, name, part(weight))
        if formula.multiplier:
            setattr(layer, formula.multiplier, 0.37)
        hidden_states = data.clone().requires_grad_()
        with torch.enable_grad():
            out = compute(layer, hidden_states, **arguments)
            inputs = (hidden_states, *layer.parameters())
            gradients = torch.autograd.grad((out, hidden_states * 1.0), inputs, (dy, other))
        return (out.detach(), *gradients), layer.self_attn.calls

    expected, calls = run(owner.forward)
    found, our_calls = run(lambda layer, hidden_states, **arguments: forward(layer, hidden_states, arguments, formula))
    if calls != our_calls:
        raise ValueError("the attention gets other arguments")
    for number, (ours, theirs) in enumerate(zip(found, expected)):
        yield f"gradient {number}" if number else "the output", ours, theirs
    try:
        run(owner.forward, outputs_of_mlp=1)
    except (TypeError, ValueError):
        return
    raise ValueError("it accepts an MLP that returns a tuple of one")
