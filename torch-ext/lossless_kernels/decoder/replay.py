"""Replays a decoder layer's inference call as a flat list of operations.

In a model bound by CPU time, a layer's time is Python's between operations: module calls, and checks of tensors before
each kernel. A replay checks once that weights, modules, forwards, hooks and modes are those of the recorded call, and
then runs the operations that the layer's ordinary path found and proved. If anything differs, the ordinary path runs.
"""

import weakref
from collections import deque
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Optional

import torch
from torch import is_grad_enabled, nn
from torch.nn import Linear, functional

from ..core import LAYERS_MODULE, inspection, launch
from ..core.domain import allocator, are_plain, has_global_hooks, have_strides, is_bare
from ..core.inspection import CACHE, PAST_KEY_VALUES
from ..core.layout import contiguous_strides
from ..core.torch_internals import any_autocast, dispatch_modes, forward_ad, function_modes, linear, tensor_guard
from ..ops import gated_activation, rotary
from ..ops.rms_norm import add as add_rms_norm
from ..ops.rms_norm.call import NO_GRADIENTS
from ..ops.rms_norm.call import call_of as norm_call_of
from ..ops.rms_norm.formulas import EPS_NAMES
from . import attention, mlp
from . import layer as decoder

# Parts of a module's `_modules`.
_PARTS = itemgetter("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_PROJECTIONS = itemgetter("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = itemgetter("q_norm", "k_norm")
_PARTS_OF_MLP = itemgetter("gate_proj", "up_proj", "down_proj", "act_fn")
_FORWARD_AND_CALL = attrgetter("forward", "__call__")
# The attentions, and the MLP layers of this package, that a replay supports.
_VARIANTS = [
    attention.AttentionFormula(normed, window, cache=cache)
    for normed in ("", attention.HEADS)
    for window in ("", "module", "config")
    for cache in (PAST_KEY_VALUES, CACHE)
]
_MLPS = frozenset(("LlamaMLP", "GeGLUMLP"))


class _Unsupported(Exception):
    """The operations here may differ from the layer's call."""


def _is_watched() -> bool:
    """Whether gradients are needed, or modes or hooks would see or change the operations."""
    return bool(
        is_grad_enabled()
        or forward_ad._current_level >= 0
        or dispatch_modes()
        or function_modes()
        or any_autocast()
        or functional.linear is not linear
        or has_global_hooks()
    )


def _layer_of_ours(module: nn.Module) -> Optional[str]:
    """The name of the layer of this package whose forward the module has; None if it has another."""
    function = _own_forward(module)
    return function.__qualname__.split(".")[0] if getattr(function, "__module__", None) == LAYERS_MODULE else None


def _own_forward(module: nn.Module):
    return getattr(module.__dict__.get("forward"), "__func__", None)


class Call:
    """The recorded call of equal decoder layers, for one shape.

    Args:
        layer: one of the layers.
        hidden_states: `[batch, tokens, hidden_size]`.
        cos, sin: the rotary embedding's tables.

    Raises:
        _Unsupported: the operations may differ from the layer's call; KeyError, AttributeError: it lacks some part.
    """

    def __init__(self, layer: nn.Module, hidden_states, cos, sin):
        if decoder.formula_of(type(layer), hidden_states, layer.__dict__) is not decoder.PRE_NORM:
            raise _Unsupported
        first_norm, self_attn, second_norm, gated = _PARTS(layer._modules)
        *of_mlp, act_fn = _PARTS_OF_MLP(gated._modules)
        linears = (*_PROJECTIONS(self_attn._modules), *of_mlp)
        self.variant = attention.formula_of(type(self_attn), hidden_states)
        self.activation = mlp.attributes_of(act_fn)
        subject = mlp.subject_of(act_fn)
        activation = mlp.activation_of(type(gated), subject, hidden_states, gated.__dict__)
        if self.variant is None or self.variant.cache != inspection.name_of_cache(type(layer)):
            raise _Unsupported
        if self.variant not in _VARIANTS or subject is None or activation is None or _layer_of_ours(gated) not in _MLPS:
            raise _Unsupported
        head_norms = _HEAD_NORMS(self_attn._modules) if self.variant.normed else ()
        norms = first_norm, second_norm, *head_norms
        self.globals = attention.globals_of(type(self_attn))
        others = (*norms, self_attn, gated, act_fn, self.globals["apply_rotary_pos_emb"])
        if not all(map(is_bare, (*linears, *others))) or attention.LINEAR_FORWARD is not Linear.forward:
            raise _Unsupported
        # `matches` compares these with every call's.
        self.owner = type(layer)
        self.kinds = [*map(type, others)]
        self.own_forwards = [*map(_own_forward, others)]
        self.classes = [*dict.fromkeys((self.owner, Linear, *self.kinds))]
        self.forwards = [*map(_FORWARD_AND_CALL, self.classes)]
        # Functions that these forwards call, each of which can be replaced.
        self.helpers = [inspection.code_of(kind).helpers for kind in self.kinds]
        self.of_layer = (
            *inspection.code_of(self.owner).helpers,
            *inspection.helpers_of(inspection.function_behind(type(others[-1]).forward)),
        )
        self.eps_names = [EPS_NAMES[_layer_of_ours(norm)] for norm in norms]
        self.eps = [norm.__dict__[name] for norm, name in zip(norms, self.eps_names)]
        self.head_dim = self_attn.__dict__["head_dim"]
        weights = [each for module in (*norms, *linears) for each in module._parameters.values() if each is not None]
        # The guard below compares tensors with these; it does not check that they are plain.
        if not all(are_plain(weight, weight) for weight in weights):
            raise _Unsupported
        self.given = 3 + len(weights)
        self.same = tensor_guard(hidden_states, cos, sin, *weights)
        if (
            self.same is None
            or not hidden_states.is_contiguous()
            or {w.dtype for w in weights} != {hidden_states.dtype}
        ):
            raise _Unsupported
        # The operations take rows: a linear layer flattens more than two dimensions, which takes as long as a view.
        self.shape = batch, tokens, hidden_size = tuple(hidden_states.shape)
        self.rows = batch * tokens
        rows = hidden_states.view(self.rows, hidden_size)

        def like_output(projection, *shape):
            return rows.new_empty(self.rows, projection.weight.shape[0]).view(*shape)

        def norm_call(number, x):
            weight, owner = norms[number]._parameters["weight"], type(norms[number])
            state = norms[number].__dict__
            return norm_call_of(x, weight, self.eps[number], owner, self.eps_names[number], NO_GRADIENTS, False, state)

        query, key, value = (like_output(projection, batch, tokens, -1, self.head_dim) for projection in linears[:3])
        gate = like_output(linears[4], self.rows, -1)
        self.heads = tuple(query.shape), tuple(key.shape)
        self.head_norms = (norm_call(2, query), norm_call(3, key)) if self.variant.normed else ()
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        rotate = rotary.call_of(query, key, cos, sin, 1, type(others[-1]).forward, NO_GRADIENTS)
        first = norm_call(0, rows)
        of_second = norms[1]._parameters["weight"], self.eps[1], type(norms[1]), self.eps_names[1]
        second = add_rms_norm.call_of(rows, rows, *of_second, NO_GRADIENTS, norms[1].__dict__)
        product = gated_activation.call_of(gate, gate, subject, activation, False)
        if None in (first, second, rotate, product, *self.head_norms):
            raise _Unsupported
        outs = first.out, second.out, rotate.q_out, rotate.k_out, product.out
        if {out.dtype for out in outs} != {hidden_states.dtype}:
            raise _Unsupported
        # The sum's norm and the product overwrite existing tensors.
        if (second.out.strides, product.out.strides) != (rows.stride(), gate.stride()):
            raise _Unsupported
        self.normalize, self.rotate = first.launch.call_3, rotate.launch.call_6
        self.add_and_normalize, self.multiply = second.launch.call_5, product.launch.call_3
        self.of_value = tuple(value.shape), value.stride()
        self.empty_rows, self.empty_residual = (
            allocator(shape, contiguous_strides(shape), rows.dtype, rows.device) for shape in (rows.shape, self.shape)
        )
        self.empty_query, self.empty_key = rotate.empty_q, rotate.empty_k

    def matches(self, layer: nn.Module, hidden_states, cos, sin) -> Optional[tuple]:
        """The attention, the norms' weights, and the linear layers' weights and biases; None if the call differs."""
        if (
            _is_watched()
            or type(layer) is not self.owner
            or not (have_strides(hidden_states, cos) and have_strides(cos, sin))
        ):
            return None
        weights, weights_and_biases = [], []
        try:
            first, self_attn, second, gated = _PARTS(layer.__dict__["_modules"])
            inside = self_attn.__dict__["_modules"]
            gate_proj, up_proj, down_proj, act_fn = _PARTS_OF_MLP(gated.__dict__["_modules"])
            rotate = self.globals["apply_rotary_pos_emb"]
            norms = (first, second, *_HEAD_NORMS(inside)) if self.variant.normed else (first, second)
            # Each module's `__dict__` is read once and inline: most of the time is its fetch from memory. Backward
            # hooks do not run without gradients. Linear layers, half of all modules, have a shorter loop: one loop for
            # all takes a fifth longer.
            for module in (*_PROJECTIONS(inside), gate_proj, up_proj, down_proj):
                state = module.__dict__
                if (
                    type(module) is not Linear
                    or state["_forward_hooks"]
                    or state["_forward_pre_hooks"]
                    or "forward" in state
                    or "_compiled_call_impl" in state
                ):
                    return None
                parameters = state["_parameters"]
                weights_and_biases.append((parameters["weight"], parameters["bias"]))
            others = (*norms, self_attn, gated, act_fn, rotate)
            for module, kind, own_forward, helpers in zip(others, self.kinds, self.own_forwards, self.helpers):
                state = module.__dict__
                if (
                    type(module) is not kind
                    or state["_forward_hooks"]
                    or state["_forward_pre_hooks"]
                    or "_compiled_call_impl" in state
                    or (helpers and not inspection.are_current(helpers, kind, state))
                ):
                    return None
                bound = state.get("forward")
                if bound is None:
                    if own_forward is not None:
                        return None
                elif bound.__func__ is not own_forward or bound.__self__ is not module:
                    return None
            for norm, name, eps in zip(norms, self.eps_names, self.eps):
                state = norm.__dict__
                if state[name] != eps:
                    return None
                weights.append(state["_parameters"]["weight"])
            if (
                [*map(_FORWARD_AND_CALL, self.classes)] != self.forwards
                or mlp.attributes_of(act_fn) != self.activation
                or self_attn.__dict__["head_dim"] != self.head_dim
                or not inspection.are_current(self.of_layer, self.owner, layer.__dict__)
            ):
                return None
        except (KeyError, AttributeError):
            return None
        given = [each for each in chain(weights, *weights_and_biases) if each is not None]
        if 3 + len(given) != self.given or not self.same(hidden_states, cos, sin, *given):
            return None
        return self_attn, weights, weights_and_biases

    def __call__(self, layer: nn.Module, hidden_states, cos, sin, attention_mask, past_key_values, arguments: dict):
        """The layer's output; None, before any operation, if the call differs.

        The last three are the attention's; its cache is put into the last, and taken out.
        """
        found = self.matches(layer, hidden_states, cos, sin)
        if found is None:
            return None
        arguments.setdefault(self.variant.cache, past_key_values)
        self_attn, weights, (q_proj, k_proj, v_proj, *_) = found
        normed = self.empty_rows()
        self.normalize(hidden_states, weights[0], normed)
        query, key = linear(normed, *q_proj), linear(normed, *k_proj)
        value = linear(normed, *v_proj).as_strided(*self.of_value)
        if self.head_norms:
            normalize_query, normalize_key = self.head_norms
            query = normalize_query(query.view(*self.heads[0]), weights[2])
            key = normalize_key(key.view(*self.heads[1]), weights[3])
        rotated_query, rotated_key = self.empty_query(), self.empty_key()
        self.rotate(query, key, cos, sin, rotated_query, rotated_key)
        query, key = rotated_query, rotated_key
        del rotated_query, rotated_key
        mixed, function = attention.mixed(
            self_attn,
            self.variant,
            self.globals["ALL_ATTENTION_FUNCTIONS"],
            self.globals["eager_attention_forward"],
            query,
            key,
            value,
            attention_mask,
            arguments,
        )
        # As soon as eager does: the MLP needs the most memory.
        del query, key, value
        if not getattr(function, "__module__", "").startswith("transformers."):
            # A user's attention function may change the modules that follow.
            found = self.matches(layer, hidden_states, cos, sin)
        if found is None or type(mixed) is not torch.Tensor:
            del normed
            mixed = mixed.reshape(*self.shape[:-1], -1).contiguous()
            return decoder.after_attention(layer, self_attn.o_proj(mixed), hidden_states)
        _, weights, (*_, o_proj, gate_proj, up_proj, down_proj) = found
        attended = linear(mixed.reshape(self.rows, -1).contiguous(), *o_proj)
        del mixed
        residual = self.empty_residual()
        # Results overwrite tensors that are no longer needed: an allocation costs as much as one or two views.
        self.add_and_normalize(attended, hidden_states, weights[1], normed, residual)
        del attended
        gate, up = linear(normed, *gate_proj), linear(normed, *up_proj)
        self.multiply(gate, gate, up)
        del up
        out = linear(gate, *down_proj)
        # A single sequence needs no view: its rows broadcast.
        return residual.add_(out if self.shape[0] == 1 else out.view(*self.shape))


class _Recording:
    """A layer's recorded call, the shape of its last calls, and how many of them took the ordinary path."""

    __slots__ = ("layer", "shape", "calls", "call")

    def __init__(self, layer: nn.Module, shape):
        number = id(layer)
        self.layer = weakref.ref(layer, lambda _: _recordings.pop(number, None))
        self.shape = shape
        self.calls = 0
        self.call: Optional[Call] = None


# By the identity of a layer, while it lives.
_recordings: dict[int, _Recording] = {}
# The newest calls, while a layer holds them: equal layers of a model share one.
_shared: deque = deque(maxlen=16)


def replay(layer: nn.Module, hidden_states, position_embeddings, attention_mask, past_key_values, arguments: dict):
    """The layer's output by its recorded call; None if the ordinary path must run."""
    recording = _recordings.get(id(layer))
    if recording is None or recording.call is None or recording.layer() is not layer:
        return None
    if type(position_embeddings) is not tuple or len(position_embeddings) != 2:
        return None
    return recording.call(layer, hidden_states, *position_embeddings, attention_mask, past_key_values, arguments)


def record(layer: nn.Module, hidden_states: torch.Tensor, position_embeddings) -> None:
    """Records the call that the ordinary path has just computed, from a shape's second call in a row on.

    Recording takes as long as a few calls. After a failure the next attempt comes after twice as many calls.
    """
    if (
        launch.is_collecting()
        or _is_watched()
        or type(position_embeddings) is not tuple
        or len(position_embeddings) != 2
    ):
        return
    cos, sin = position_embeddings
    if not (are_plain(hidden_states, cos) and are_plain(cos, sin)):
        return
    recording = _recordings.get(id(layer))
    if recording is None or recording.shape != hidden_states.shape or recording.layer() is not layer:
        _recordings[id(layer)] = _Recording(layer, hidden_states.shape)
        return
    recording.call = None
    recording.calls += 1
    if recording.calls & (recording.calls - 1) == 0:
        try:
            recording.call = _matching_or_new(layer, hidden_states, cos, sin)
        except Exception:  # Full memory, for example: the ordinary path still runs.
            return


def _matching_or_new(layer, hidden_states, cos, sin) -> Call:
    for made in tuple(_shared):
        call = made()
        if call is not None and call.matches(layer, hidden_states, cos, sin) is not None:
            return call
    call = Call(layer, hidden_states, cos, sin)
    if call.matches(layer, hidden_states, cos, sin) is None:
        raise _Unsupported
    _shared.appendleft(weakref.ref(call))
    return call
