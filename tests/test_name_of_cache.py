"""The cache's name among a decoder layer's arguments: "cache" from transformers 5.24 on, "past_key_values" before.

With an older transformers its classes are written as 5.24 has them: renamed, with its own wrapper that takes the old name.
"""

import copy
import inspect
import sys
import textwrap
import warnings

import pytest
import torch
from bits import assert_bits_equal
from cpu_kernels import cpu_arithmetic
from places import name_of_cache, python_module
from test_decoder import SIZES, kernelized, make, replaced
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.deprecation import deprecate_kwarg

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_decoder_truth.py has decoder layers on a GPU"),
    pytest.mark.usefixtures("proof_off"),
]


@pytest.fixture(autouse=True)
def arithmetic(kernel):
    """Names have nothing to do with what computes."""
    with cpu_arithmetic(kernel):
        yield


def with_new_name(owner):
    """The class as transformers 5.24 has it."""
    if name_of_cache() == "cache":
        return owner
    source = textwrap.dedent(inspect.getsource(owner.forward)).replace("past_key_values", "cache")
    source = source.replace("self.layer_idx)", "self.layer_idx, kwargs=kwargs)")
    exec(source, vars(sys.modules[owner.__module__]), written := {})
    forward = deprecate_kwarg("past_key_values", "99.0", new_name="cache")(written["forward"])
    return type(owner.__name__, (owner,), {"forward": forward})


@pytest.fixture(params=["Llama", "Qwen3", "Phi-3", "Mixtral"])
def models(request, kernel, seed):
    """A model, and the same with this package's decoder layers."""
    model = make(request.param, seed)
    for module in model.modules():
        if type(module).__name__.endswith(("DecoderLayer", "Attention")):
            module.__class__ = with_new_name(type(module))
    ours = kernelized(kernel, model, "decoder")
    layer = "MixtralDecoderLayer" if request.param == "Mixtral" else "LlamaDecoderLayer"
    assert len(replaced(ours, layer)) == SIZES["num_hidden_layers"]
    return model, ours


def decode(model, cache, steps=5, name="cache", **arguments):
    """What the layers return for a prompt of four tokens and then one token a step."""
    generator = torch.Generator().manual_seed(1)
    outs, start = [], 0
    for length in (4, *[1] * steps):
        hidden_states = torch.randn(2, length, SIZES["hidden_size"], generator=generator)
        positions = torch.arange(start, start + length)[None]
        tables = model.model.rotary_emb(hidden_states, positions)
        with torch.no_grad():
            for layer in model.model.layers:
                hidden_states = layer(hidden_states, position_embeddings=tables, **{name: cache}, **arguments)
        outs.append(hidden_states)
        start += length
    return outs


def counted(kernel, monkeypatch, calls):
    replay = python_module(kernel, "replay")
    original = replay.Call.__call__
    monkeypatch.setattr(replay.Call, "__call__", lambda *a: calls.append(original(*a)) or calls[-1])


def test_a_prompt_and_tokens(kernel, models, monkeypatch):
    model, ours = models
    counted(kernel, monkeypatch, replays := [])
    caches = [DynamicCache(config=model.config) for _ in models]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # The old name warns.
        expected, found = (decode(each, cache) for each, cache in zip(models, caches))
    for our_step, their_step in zip(found, expected, strict=True):
        assert_bits_equal(our_step, their_step)
    for our_layer, their_layer in zip(*[cache.layers for cache in reversed(caches)], strict=True):
        assert our_layer.get_seq_length() == 9
        assert_bits_equal(our_layer.keys, their_layer.keys)
        assert_bits_equal(our_layer.values, their_layer.values)
    # Phi-3's and Mixtral's layers have parts that no replay supports.
    assert None not in replays and len(replays) == (6 if model.config.model_type in ("llama", "qwen3") else 0)


def test_without_a_cache(models):
    for found, expected in zip(*[decode(each, None) for each in reversed(models)], strict=True):
        assert_bits_equal(found, expected)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_the_old_name(kernel, models, monkeypatch):
    """transformers warns of it; the layers here take either."""
    counted(kernel, monkeypatch, replays := [])
    caches = [DynamicCache(config=model.config) for model in models]
    expected, found = (decode(*each, name="past_key_values") for each in zip(models, caches))
    assert caches[1].get_seq_length() == 9 and None not in replays
    for ours, theirs in zip(found, expected, strict=True):
        assert_bits_equal(ours, theirs)


def test_by_position(models):
    results = []
    for model in models:
        layer, cache = model.model.layers[0], DynamicCache(config=model.config)
        hidden_states = torch.randn(2, 4, SIZES["hidden_size"], generator=torch.Generator().manual_seed(3))
        positions = torch.arange(4)[None]
        tables = model.model.rotary_emb(hidden_states, positions)
        given = {"position_embeddings": tables, "attention_mask": None, "position_ids": positions, "cache": cache}
        names = [name for name in inspect.signature(type(layer).forward).parameters if name in given]
        leading = [given.pop(name) for name in names[: names.index("cache") + 1]]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            results.append(layer(hidden_states, *leading, **given))
        assert cache.get_seq_length() == 4
    assert_bits_equal(*results)


class Paged(DynamicCache):
    """A cache that replaces arguments of the attention function, as that of continuous batching does."""

    def update(self, key_states, value_states, layer_idx, kwargs):
        kwargs["block_table"] = kwargs["block_table"][layer_idx]
        kwargs["given"] = sorted(kwargs)
        return super().update(key_states, value_states, layer_idx)


def test_a_cache_that_changes_the_other_arguments(kernel, models, monkeypatch):
    called, original = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(module, query, key, value, mask, block_table=None, given=None, **named):
        called.append((block_table, given, sorted(named)))
        return original(module, query, key, value, mask, **named)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "paged", attention)
    results = []
    for model in models:
        model.config._attn_implementation = "paged"
        called.clear()
        outs = decode(model, Paged(config=model.config), block_table=("first", "second"))
        results.append((outs, [*called]))
    (expected, their_calls), (found, our_calls) = results
    assert our_calls == their_calls and [table for table, *_ in our_calls[:2]] == ["first", "second"]
    for ours, theirs in zip(found, expected, strict=True):
        assert_bits_equal(ours, theirs)


def test_gradients_and_checkpoints(models):
    results = []
    for model in models:
        model = copy.deepcopy(model).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        hidden_states = torch.randn(2, 5, SIZES["hidden_size"], generator=torch.Generator().manual_seed(2))
        hidden_states.requires_grad_()
        tables = model.model.rotary_emb(hidden_states, torch.arange(5)[None])
        out = hidden_states
        for layer in model.model.layers:
            out = layer(out, position_embeddings=tables, cache=None)
        out.square().sum().backward()
        results.append([out, hidden_states.grad, *(each.grad for each in model.model.layers.parameters())])
    for theirs, ours in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_bits_equal(ours, theirs)


def test_which_name_a_class_has(kernel, models):
    inspection, attention = (python_module(kernel, name) for name in ("inspection", "attention"))
    layer = models[0].model.layers[0]
    for owner in (type(layer), type(layer.self_attn)):
        assert inspection.name_of_cache(owner) == "cache"
        assert inspection.without_wrappers(owner.forward).__code__.co_name == "forward"
    variant = attention.formula_of(type(layer.self_attn), torch.zeros(1))
    assert variant is not None and variant.cache == "cache"


@pytest.mark.parametrize("names", [("past_key_values", "other"), ("other", "cache")])
def test_other_renamed_arguments_keep_a_forward(kernel, names):
    """A layer of this package would not know the old name."""
    old, new = names

    class Other(torch.nn.Module):
        @deprecate_kwarg(old, "99.0", new_name=new)
        def forward(self, x, cache=None, other=None):
            return x

    inspection = python_module(kernel, "inspection")
    assert inspection.without_wrappers(Other.forward) is Other.forward and inspection.functions_of(Other) is None
