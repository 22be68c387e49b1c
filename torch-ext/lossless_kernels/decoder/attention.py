"""The attention of a decoder layer, without module calls: a formula proof recognises the class's forward.

Only the rotary embedding has a kernel. The rest saves Python's time between operations, which exceeds the operations'
time in a model bound by CPU time.
"""

import builtins
import functools
import itertools
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ..core import inspection, proof
from ..core.domain import is_bare, keeps_its_saved_tensors
from ..core.inspection import CACHE, PAST_KEY_VALUES
from ..core.torch_internals import MODULE_CALL
from ..ops.rotary import replacement as rotary_replacement

# Query and key are normalised head by head, before or after their transposition, or all heads together.
HEADS, TRANSPOSED, ALL_HEADS = (
    "q_norm and k_norm",
    "q_norm and k_norm after transposition",
    "q_norm and k_norm of all heads",
)
# Further arguments of an attention function: its name, the module's attribute, and what it is.
_EXTRAS = {"softcap": ("attn_logit_softcapping", "a softcap"), "s_aux": ("sinks", "sinks")}


@dataclass(frozen=True)
class AttentionFormula:
    """The variant of an attention.

    Args:
        normed: `HEADS`, `TRANSPOSED` or `ALL_HEADS`, "" if neither query nor key is normalised.
        window: the source of the attention function's `sliding_window`: "module", "config", or "" if it gets none.
        extra: the name of a further argument of the attention function, in `_EXTRAS`, "" if there is none.
        packed: one projection, `qkv_proj`, computes query, key and value.
        cache: the argument's name. From transformers 5.24 on it is `CACHE`, and `update` gets the arguments that are left, too.
    """

    normed: str = ""
    window: str = ""
    extra: str = ""
    packed: bool = False
    cache: str = PAST_KEY_VALUES

    @functools.cached_property
    def children(self) -> frozenset[str]:
        """The names of the module's children."""
        projections = ("qkv_proj",) if self.packed else ("q_proj", "k_proj", "v_proj")
        return frozenset((*projections, "o_proj", *(("q_norm", "k_norm") if self.normed else ())))

    @property
    def formula(self) -> str:
        packed = "one projection" * self.packed
        window = "a sliding window" * bool(self.window)
        extra = self.extra and _EXTRAS[self.extra][1]
        return ", ".join(filter(None, ("attention", packed, self.normed, window, extra)))


class Functions(NamedTuple):
    """The globals of an attention's forward: those named in `_GLOBALS`."""

    interfaces: Any
    eager: Callable
    rotate: Callable


def attend(module: nn.Module, hidden_states: torch.Tensor, arguments: dict) -> torch.Tensor:
    """`module(hidden_states=hidden_states, **arguments)[0]`, for the attention of a decoder layer."""
    owner = type(module)
    variant = formula_of(owner, hidden_states) if is_bare(module) else None
    if (
        variant is None
        or not all(name in module._modules for name in variant.children)
        or (variant.cache == CACHE and PAST_KEY_VALUES in arguments)
    ):
        return module(hidden_states=hidden_states, **arguments)[0]
    found = globals_of(owner)
    functions = Functions(
        found["ALL_ATTENTION_FUNCTIONS"], found["eager_attention_forward"], found["apply_rotary_pos_emb"]
    )
    return compute(module, variant, functions, hidden_states, **arguments)


def globals_of(owner: type) -> dict:
    """The globals of an attention's forward, those of `Functions` among them."""
    return inspection.without_wrappers(owner.forward).__globals__


def compute(
    module,
    variant: AttentionFormula,
    functions: Functions,
    hidden_states: torch.Tensor,
    /,
    position_embeddings=None,
    attention_mask=None,
    **arguments,
) -> torch.Tensor:
    """The output of transformers' `LlamaAttention.forward`, or of the variant's."""
    modules, normed = module._modules, variant.normed
    leading = hidden_states.shape[:-1]
    heads = (*leading, -1, module.head_dim)

    def of_heads(states, norm):
        if normed == ALL_HEADS:
            states = modules[norm](states)
        states = states.view(heads)
        if normed == HEADS:
            states = modules[norm](states)
        return states.transpose(1, 2)

    if variant.packed:
        # Slices, as in the original: their gradients are added, those of a split would be concatenated.
        states = project(modules["qkv_proj"], hidden_states)
        key_start = module.config.num_attention_heads * module.head_dim
        value_start = key_start + module.num_key_value_heads * module.head_dim
        query, key, value = states[..., :key_start], states[..., key_start:value_start], states[..., value_start:]
        del states
    else:
        query = project(modules["q_proj"], hidden_states)
    query = of_heads(query, "q_norm")
    if not variant.packed:
        key = project(modules["k_proj"], hidden_states)
    key = of_heads(key, "k_norm")
    if not variant.packed:
        value = project(modules["v_proj"], hidden_states)
    value = value.view(heads).transpose(1, 2)
    if normed == TRANSPOSED:
        query, key = modules["q_norm"](query), modules["k_norm"](key)
    cos, sin = position_embeddings
    query, key = _rotated(functions.rotate, query, key, cos, sin)
    of_functions = functions.interfaces, functions.eager
    out, _ = mixed(module, variant, *of_functions, query, key, value, attention_mask, arguments)
    return project(modules["o_proj"], out.reshape(*leading, -1).contiguous())


def mixed(
    module,
    variant: AttentionFormula,
    interfaces,
    eager: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask,
    arguments: dict,
) -> tuple[torch.Tensor, Callable]:
    """The output `[batch, tokens, heads, head_dim]` of the module's attention function, and the function.

    `arguments` hold the cache and what the function gets besides.
    """
    cache = arguments.pop(variant.cache, None)
    if cache is not None:
        # It may change them.
        others = {"kwargs": arguments} if variant.cache == CACHE else {}
        key, value = cache.update(key, value, module.layer_idx, **others)
    config = module.config
    interface = interfaces.get_interface(config._attn_implementation, eager)
    if variant.window:
        window = module.sliding_window if variant.window == "module" else getattr(config, "sliding_window", None)
        arguments["sliding_window"] = window
    if variant.extra:
        arguments[variant.extra] = getattr(module, _EXTRAS[variant.extra][0])
    dropout = module.attention_dropout if module.training else 0.0
    out, _ = interface(module, query, key, value, attention_mask, dropout=dropout, scaling=module.scaling, **arguments)
    return out, interface


def _rotated(rotate, query, key, cos, sin):
    """`rotate(query, key, cos, sin)`; query and key have no other use."""
    # `kernels` wraps a function that has a layer name in a module.
    if isinstance(rotate, nn.Module) and is_bare(rotate) and keeps_its_saved_tensors(rotate):
        out = rotary_replacement(query, key, cos, sin, 1, type(rotate).forward, True)
        if out is not None:
            return out
    return rotate(query, key, cos, sin)


# torch's own; None if it was replaced before this import.
LINEAR_FORWARD = nn.Linear.forward
if LINEAR_FORWARD.__module__ != nn.Linear.__module__ or hasattr(LINEAR_FORWARD, "__wrapped__"):
    LINEAR_FORWARD = None


def project(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """`module(hidden_states)`, without a module call if the module is a plain `nn.Linear`."""
    if is_dynamo_compiling():  # It has fewer guards for a module's call, and no call is left.
        return module(hidden_states)
    linear = type(module)
    if linear is nn.Linear and linear.forward is LINEAR_FORWARD and linear.__call__ is MODULE_CALL:
        state = module.__dict__
        if not (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
            or "forward" in state
            or "_compiled_call_impl" in state
        ):
            parameters = state["_parameters"]
            weight = parameters.get("weight")
            if weight is not None and "bias" in parameters:
                return functional.linear(hidden_states, weight, parameters["bias"])
    return module(hidden_states)


# Proof


# All names that the forward of a known attention uses. A forward that uses others is not tried.
_NAMES = frozenset(
    "shape head_dim q_proj view transpose k_proj v_proj apply_rotary_pos_emb update layer_idx ALL_ATTENTION_FUNCTIONS "
    "get_interface config _attn_implementation eager_attention_forward training attention_dropout scaling reshape "
    "contiguous o_proj q_norm k_norm sliding_window getattr attn_logit_softcapping sinks qkv_proj num_attention_heads "
    "num_key_value_heads".split()
)
_GLOBALS = ("ALL_ATTENTION_FUNCTIONS", "eager_attention_forward", "apply_rotary_pos_emb")


def formula_of(owner: type, hidden_states: torch.Tensor) -> Optional[AttentionFormula]:
    """The variant that `owner.forward` computes, proved on the device of `hidden_states`; None if it is none."""
    known, key = inspection.code_of(owner).memo, ("attention", hidden_states.get_device())
    if key in known:
        return known[key]
    variant, final = _match_formula(
        inspection.without_wrappers(owner.forward), inspection.name_of_cache(owner), hidden_states.device
    )
    if final:
        known[key] = variant
    return variant


def _match_formula(forward, cache, device) -> tuple[Optional[AttentionFormula], bool]:
    """The variant, and whether the result is final."""
    if not _looks_known(forward):
        proof.record_refusal(forward, "its forward uses names that no known attention uses")
        return None, True
    subject = proof.Subject(forward, device, "any dtype")
    candidates = {
        variant: functools.partial(_comparisons, forward, variant, device) for variant in _candidates(forward, cache)
    }
    key = ("attention", forward, device)
    variant = proof.match_formula(key, subject, candidates)
    return variant, proof.verdict_on(key) is not None


def _looks_known(forward) -> bool:
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__") or forward.__closure__:
        return False
    names = frozenset(forward.__code__.co_names)
    return names <= _NAMES and names.issuperset(_GLOBALS) and forward.__globals__.keys() >= {*_GLOBALS}


def _candidates(forward, cache) -> list[AttentionFormula]:
    """The variants with such names. A wrong one costs as much time as the right one."""
    names = forward.__code__.co_names
    if "sliding_window" in names:
        windows = ("module", "config")
    else:
        windows = ("config", "") if "getattr" in names else ("",)
    norms = (HEADS, TRANSPOSED, ALL_HEADS) if "q_norm" in names else ("",)
    extra = next((name for name, (attribute, _) in _EXTRAS.items() if attribute in names), "")
    packed = "qkv_proj" in names
    return [
        AttentionFormula(normed, window, extra, packed, cache) for normed, window in itertools.product(norms, windows)
    ]


class Scaled(proof.Part):
    """sin(weight * hidden_states): a stand-in's projection, norm or MLP."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, hidden_states):
        return torch.sin(hidden_states * self.weight)


class _PackedProjection(Scaled):
    """A stand-in for `qkv_proj`: as many heads of queries as hidden_states has, one of keys and one of values."""

    def forward(self, hidden_states):
        return super().forward(hidden_states.repeat(1, 1, 2)[..., : self.weight.numel()])


class _Norm(Scaled):
    """A stand-in that records the layout of its input."""

    def __init__(self, weight, calls):
        super().__init__(weight)
        self.calls = calls

    def forward(self, hidden_states):
        self.calls.append(("norm", (hidden_states.shape, hidden_states.stride())))
        return super().forward(hidden_states)


class _Recorder:
    """A stand-in for transformers' table of attention functions, one of the functions, and a cache."""

    def __init__(self):
        self.calls: list = []

    def get_interface(self, *arguments):
        self.calls.append(("get_interface", arguments))
        return self.interface

    def interface(self, module, query, key, value, *arguments, **named):
        self.calls.append(("interface", (type(module), *arguments, named)))
        # [batch, tokens, heads, head_dim], not contiguous.
        return (query * key + value).transpose(1, 2), None

    def update(self, key, value, *arguments, **named):
        others = named.get("kwargs", {})
        self.calls.append(("update", (*arguments, [*named], {**others})))
        others["added by the cache"] = True
        return key * 3.0, value * 0.5


def _rotate(query, key, cos, sin):
    return query * cos + query.flip(-1) * sin, key * sin - key.flip(-1) * cos


_HEADS, _HEAD_DIM = 3, 4


def _needs_position_embeddings(forward, module, hidden_states, arguments) -> None:
    """Raises ValueError if `forward` accepts `position_embeddings=None`."""
    try:
        forward(module, hidden_states=hidden_states, position_embeddings=None, **arguments)
    except TypeError:
        return
    raise ValueError("it also runs without a rotary embedding")


def _comparisons(forward, variant, device):
    generator = proof.generator(device, seed=4)
    make = functools.partial(proof.normal, generator)

    hidden_size = _HEADS * _HEAD_DIM
    data, dy, other = (make(2, 5, hidden_size) for _ in range(3))
    cos, sin = make(2, 1, 5, _HEAD_DIM), make(2, 1, 5, _HEAD_DIM)
    weights = {name: make(hidden_size) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    of_norm = hidden_size if variant.normed == ALL_HEADS else _HEAD_DIM
    weights.update({name: make(of_norm) for name in ("q_norm", "k_norm")})
    if variant.packed:
        weights["qkv_proj"] = make(hidden_size + 2 * _HEAD_DIM)
    mask, window, implementation = object(), object(), object()
    extras = {attribute: object() for attribute, _ in _EXTRAS.values()}
    named = {"position_ids": object(), "use_cache": object(), "another": object()}

    def run(ours, training, cached, window_in_config, absent, with_gradients):
        recorder = _Recorder()
        config = SimpleNamespace(_attn_implementation=implementation, num_attention_heads=_HEADS)
        module = nn.Module()
        module.num_key_value_heads = 1
        norm = functools.partial(_Norm, calls=recorder.calls)
        parts = {"qkv_proj": _PackedProjection, "q_norm": norm, "k_norm": norm}
        for name, weight in weights.items():
            setattr(module, name, parts.get(name, Scaled)(weight))
        for name, value in extras.items():
            setattr(module, name, value)
        module.head_dim, module.layer_idx, module.scaling = _HEAD_DIM, 7, 0.3
        module.attention_dropout, module.config = 0.25, config
        module.sliding_window = None if absent else (window, "module")
        if window_in_config:
            config.sliding_window = None if absent else (window, "config")
        module.train(training)
        hidden_states = data.clone().requires_grad_()
        arguments = {"attention_mask": None if absent else mask, **(dict.fromkeys(named) if absent else named)}
        arguments[variant.cache] = recorder if cached else None
        functions = Functions(recorder, _rotate, _rotate)
        with torch.enable_grad():
            if ours:
                out = compute(module, variant, functions, hidden_states, (cos, sin), **arguments)
            else:
                namespace = {**dict(zip(_GLOBALS, functions)), "__builtins__": builtins}
                copied = FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__)
                copied.__kwdefaults__ = forward.__kwdefaults__
                out = copied(module, hidden_states=hidden_states, position_embeddings=(cos, sin), **arguments)[0]
            calls, results = [*recorder.calls], [out.detach()]
            if not (ours or training or cached or window_in_config):
                _needs_position_embeddings(copied, module, hidden_states, arguments)
            if with_gradients:
                inputs = (hidden_states, *module.parameters())
                roots = ((out, hidden_states * 1.0), inputs, (dy, other))
                gradients = torch.autograd.grad(*roots, allow_unused=True)
                # The weights' gradients in one tensor: a comparison takes as long as several of the operations here.
                of_weights = [
                    torch.zeros(1, dtype=torch.float32, device=device) if g is None else g.flatten()
                    for g in gradients[1:]
                ]
                results += [gradients[0], torch.cat(of_weights)]
        return calls, results

    for training, cached, window_in_config in itertools.product((False, True), repeat=3):
        # Optional arguments are absent in half of all pairs of cases. The window, no tensor, does not affect gradients.
        case = training, cached, window_in_config, training ^ cached ^ window_in_config, not window_in_config
        (calls, found), (their_calls, expected) = (run(ours, *case) for ours in (True, False))
        if calls != their_calls:
            raise ValueError("the attention function or the cache gets other arguments")
        yield from zip(("the output", "the input's gradient", "the weights' gradients"), found, expected)
