"""Whole decoder layers through kernelize, on the CPU with the kernels in Triton's interpreter: what is called, and that nothing
else changes. The norm's kernel sums in CUDA's order there, so the comparison is with the same layers, norms kernelized, apart."""

import collections
import copy
import functools
import inspect
import sys
import weakref
from types import MethodType, SimpleNamespace

import pytest
import torch
from bits import assert_bits_equal
from kernels import Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from places import name_of_cache, python_module
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    modeling_layers,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_decoder_truth.py has these on a GPU"),
    pytest.mark.usefixtures("proof_off"),
]

CACHE = name_of_cache()
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS = {
    "Llama": (LlamaConfig, LlamaForCausalLM),
    "Mistral": (MistralConfig, MistralForCausalLM),
    "Qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Decoder layers of other formulas or with other arguments: config, model, the layer of this package, and sizes.
VARIANTS = {
    "Gemma": (GemmaConfig, GemmaForCausalLM, "LlamaDecoderLayer", {"head_dim": 16}),
    "Mixtral": (MixtralConfig, MixtralForCausalLM, "MixtralDecoderLayer", EXPERTS),
    "Qwen3-MoE": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        "LlamaDecoderLayer",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [0],
            "head_dim": 16,
        },
    ),
    "GPT-OSS": (GptOssConfig, GptOssForCausalLM, "LlamaDecoderLayer", {**EXPERTS, "head_dim": 16}),
    "Granite": (GraniteConfig, GraniteForCausalLM, "LlamaDecoderLayer", {"residual_multiplier": 0.22}),
    "Phi-3": (Phi3Config, Phi3ForCausalLM, "LlamaDecoderLayer", {}),
    "Gemma2": (Gemma2Config, Gemma2ForCausalLM, "MixtralDecoderLayer", {"head_dim": 16}),
    "Gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, "MixtralDecoderLayer", {"head_dim": 16}),
    "GLM-4": (Glm4Config, Glm4ForCausalLM, "LlamaDecoderLayer", {"head_dim": 16}),
    "OLMo 2": (Olmo2Config, Olmo2ForCausalLM, "LlamaDecoderLayer", {}),
    "Cohere": (CohereConfig, CohereForCausalLM, "LlamaDecoderLayer", {}),
}


def make(name, seed, **changes):
    if name in VARIANTS:
        config, model, _, sizes = VARIANTS[name]
        changes = {"attn_implementation": "eager", **sizes, **changes}
    else:
        config, model = MODELS[name] if isinstance(name, str) else name
    torch.manual_seed(seed)
    return model(config(**SIZES, **changes)).eval()


def kernelized(kernel, model, level, mode=Mode.INFERENCE):
    kernel.name_layers(model)
    with use_kernel_mapping(kernel.kernel_mapping(devices=("cpu",), level=level), inherit_mapping=False):
        return kernelize(copy.deepcopy(model), mode=mode, device="cpu")


def replaced(model, name):
    """The forwards of this package's layer `name` in the model."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    return [
        forward
        for forward in forwards
        if getattr(forward, "__qualname__", "") == f"{name}.forward" and "lossless" in forward.__module__
    ]


def tokens(seed, batch=2, length=5):
    return torch.randint(SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [*MODELS, *VARIANTS])
def test_logits_and_gradients(kernel, seed, name, monkeypatch):
    model = make(name, seed)
    layers, decoder = (kernelized(kernel, model, level, Mode.TRAINING) for level in ("layer", "decoder"))
    layer_name = VARIANTS[name][2] if name in VARIANTS else "LlamaDecoderLayer"
    assert len(replaced(decoder, layer_name)) == 2 and not replaced(layers, layer_name)
    family, fused, results = python_module(kernel, "layers"), [], []
    original = family.fused_decoder_forward
    monkeypatch.setattr(family, "fused_decoder_forward", lambda *a: fused.append(a[1]) or original(*a))
    for each in (layers, decoder):
        ids = tokens(seed)
        out = each(ids, labels=ids)
        out.loss.backward()
        results.append([out.logits, *(parameter.grad for parameter in each.parameters())])
        with torch.no_grad():
            assert_bits_equal(each(ids).logits, out.logits)
    assert len(fused) >= 2 and len({*fused}) == 1
    report = kernel.replacement_report(decoder, verbose=False)
    (entry,) = [entry for entry in report.layers if entry.layer.endswith("DecoderLayer")]
    assert (entry.path, entry.formulas) == ("kernel", [fused[0].formula])
    for ours, expected in zip(*reversed(results), strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None:
            assert_bits_equal(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*MODELS, *VARIANTS])
def test_a_layer_and_its_attention_against_transformers(kernel, seed, name, dtype, request, monkeypatch):
    """The formulas, on the model's own modules without kernels: outputs, and gradients with a second use of the input."""
    decoder, attention = (python_module(kernel, each) for each in ("decoder", "attention"))
    model = make(name, seed).to(dtype)
    layer = model.model.layers[1]
    rotate = attention.globals_of(type(layer.self_attn))["apply_rotary_pos_emb"]
    if isinstance(rotate, torch.nn.Module):  # All models share it. With a hook it is called, not its kernel.
        monkeypatch.delitem(vars(rotate), "forward", raising=False)
        request.addfinalizer(rotate.register_forward_hook(lambda *_: None).remove)
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    x, dy, other = (torch.randn(2, 5, SIZES["hidden_size"]).to(dtype) for _ in range(3))
    positions = torch.arange(5)[None]
    rotary = model.model.rotary_emb
    tables = (x, positions, layer.self_attn.layer_type) if name == "Gemma3" else (x, positions)
    mask = torch.full((5, 5), torch.finfo(dtype).min).triu(1)[None, None].to(dtype)
    arguments = {"attention_mask": mask, "position_ids": positions, "position_embeddings": rotary(*tables)}
    formula = decoder.formula_of(type(layer), x)
    variant = attention.formula_of(type(layer.self_attn), x)
    assert formula is not None and (variant is not None) == (name != "Cohere")

    def run(compute):
        inputs = x.clone().requires_grad_(), *layer.parameters()
        gradients = torch.autograd.grad((compute(inputs[0]), inputs[0] * 1.0), inputs, (dy, other), allow_unused=True)
        return compute(inputs[0]).detach(), *gradients

    pairs = [
        (lambda x: layer(x, **arguments), lambda x: decoder.forward(layer, x, arguments, formula)),
        (lambda x: layer.self_attn(x, **arguments)[0], lambda x: attention.attend(layer.self_attn, x, arguments)),
    ]
    for theirs, ours in pairs:
        for expected, found in zip(run(theirs), run(ours), strict=True):
            assert (found is None) == (expected is None)
            if found is not None:
                assert_bits_equal(found, expected)


def test_the_fused_kernel_runs(kernel, seed, monkeypatch):
    family = python_module(kernel, "decoder")
    calls = []
    original = family.add_rms_norm_replacement
    monkeypatch.setattr(family, "add_rms_norm_replacement", lambda *a: calls.append(original(*a)) or calls[-1])
    kernelized(kernel, make("Llama", seed), "decoder")(tokens(seed))
    assert len(calls) == 2 and None not in calls


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(kernel, seed, cache):
    model = make("Llama", seed)
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
    found = [kernelized(kernel, model, level).generate(tokens(seed), **options) for level in ("layer", "decoder")]
    assert torch.equal(*found)


def test_recorded_outputs_and_hooks(kernel, seed):
    model = make("Llama", seed, attn_implementation="eager")
    layers, decoder = (kernelized(kernel, model, level) for level in ("layer", "decoder"))
    outs = [each(tokens(seed), output_hidden_states=True, output_attentions=True) for each in (layers, decoder)]
    for what in ("hidden_states", "attentions"):
        assert len(outs[0][what]) == len(outs[1][what]) > 0
        for ours, expected in zip(outs[1][what], outs[0][what], strict=True):
            assert_bits_equal(ours, expected)
    # A hook on the norm between attention and MLP sees its input, and may change its output.
    seen = []
    for each in (layers, decoder):
        norm = each.model.layers[0].post_attention_layernorm
        norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]) or output * 2)
    assert_bits_equal(decoder(tokens(seed)).logits, layers(tokens(seed)).logits)
    assert len(seen) == 2
    assert_bits_equal(*seen)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(kernel, seed, reentrant):
    results = []
    for level in ("layer", "decoder"):
        model = kernelized(kernel, make("Llama", seed), level, Mode.TRAINING).train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        ids = tokens(seed)
        model(ids, labels=ids).loss.backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for ours, expected in zip(*results, strict=True):
        assert_bits_equal(ours, expected)


# How transformers wraps the forward of each subclass of `GradientCheckpointingLayer` from 5.23 on, in that file's namespace.
# Up to 5.22 `__call__` checkpoints.
WRAP = """
from functools import partial, wraps
def wrap(forward):
    @wraps(forward)
    def forward_with_checkpointing(self, *args, **kwargs):
        outermost = type(self).forward is forward_with_checkpointing
        if self.gradient_checkpointing and self.training and outermost:
            kwargs[CACHE] = None
            return self._gradient_checkpointing_func(partial(forward, self, **kwargs), *args)
        return forward(self, *args, **kwargs)
    return forward_with_checkpointing
"""


def wrapped(owner):
    exec(WRAP, namespace := {**vars(modeling_layers), "CACHE": CACHE})
    forward = namespace["wrap"](owner.forward)
    return type(owner.__name__, (owner,), {"forward": forward, "__call__": torch.nn.Module.__call__})


@pytest.mark.parametrize("reentrant", [False, True])
def test_forwards_that_checkpoint_themselves(kernel, seed, reentrant, monkeypatch):
    """Once more in each class that FSDP2 makes of a layer's."""
    family, results, counted = python_module(kernel, "layers"), [], collections.Counter()
    original = family.fused_decoder_forward
    monkeypatch.setattr(family, "fused_decoder_forward", lambda *a: counted.update(["fused"]) or original(*a))
    model, ids = make("Llama", seed), tokens(seed)
    for layer in model.model.layers:
        layer.__class__ = wrapped(wrapped(type(layer)))

    def cached_tokens(model):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            return model(ids, **{CACHE: cache}).logits, cache.get_seq_length()

    eager = copy.deepcopy(model).train()
    eager.gradient_checkpointing_enable({"use_reentrant": reentrant})
    _, length = cached_tokens(eager)
    for level in ("layer", "decoder"):
        each = kernelized(kernel, model, level, Mode.TRAINING).train()
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for layer in each.model.layers:
            checkpoint = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = lambda *a, f=checkpoint, n=level: counted.update([n]) or f(*a)
        out = each(inputs_embeds=each.get_input_embeddings()(ids), labels=ids)
        out.loss.backward()
        gradients = [parameter.grad for parameter in each.parameters()]
        again, found = cached_tokens(each)
        assert found == length
        results.append([out.logits, again, each.eval()(ids).logits, *gradients])
    # A step computes each of two layers twice, without gradients and in evaluation once. From transformers 5.24 on a
    # layer is checkpointed, and its cache left alone, only where gradients are recorded.
    checkpoints = 2 if length else 4
    assert counted == {"layer": checkpoints, "decoder": checkpoints, "fused": 8}
    for ours, expected in zip(*results, strict=True):
        assert_bits_equal(ours, expected)
    report = kernel.replacement_report(each, verbose=False)
    assert {entry.path for entry in report.layers if "Decoder" in entry.layer} == {"kernel"}


def test_other_decoders_keep_their_forward(kernel, seed):
    """Phi and GPT-2: their children tell already."""
    assert "LlamaDecoderLayer" not in kernel.name_layers(make((PhiConfig, PhiForCausalLM), seed)).values()
    assert not kernel.name_layers(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=8)))


def bodies(owner):
    """Classes whose forwards look like the decoder layer's and are not, with the installed transformers' name of the cache."""
    source = inspect.getsource(_bodies).replace("past_key_values", CACHE)
    exec(source, namespace := {"__name__": __name__})
    return namespace["_bodies"](owner)


def _bodies(owner):

    class Scaled(owner):
        def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
                    position_embeddings=None, **kwargs):  # fmt: skip
            return 0.5 * owner.forward(self, hidden_states, attention_mask, position_ids, past_key_values, use_cache,
                                       position_embeddings, **kwargs)  # fmt: skip

    class WithoutMask(owner):
        def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
                    position_embeddings=None, **kwargs):  # fmt: skip
            residual = hidden_states
            hidden_states, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), attention_mask=None,
                position_ids=position_ids, past_key_values=past_key_values, use_cache=use_cache,
                position_embeddings=position_embeddings, **kwargs)  # fmt: skip
            residual = residual + hidden_states
            return residual + self.mlp(self.post_attention_layernorm(residual))

    class OtherOrder(owner):
        """The same numbers forwards; backwards the residual's gradient reaches the input after the norm's."""

        def forward(
            self,
            hidden_states,
            attention_mask=None,
            position_ids=None,
            past_key_values=None,
            use_cache=False,
            position_embeddings=None,
            **kwargs,
        ):
            residual = hidden_states * 1.0
            hidden_states, _ = self.self_attn(
                hidden_states=self.input_layernorm(hidden_states),
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **kwargs,
            )
            residual = residual + hidden_states
            return residual + self.mlp(self.post_attention_layernorm(residual))

    class Training(owner):
        def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
                    position_embeddings=None, **kwargs):  # fmt: skip
            scale = 2.0 if self.training else 1.0
            return scale * owner.forward(self, hidden_states, attention_mask, position_ids, past_key_values, use_cache,
                                         position_embeddings, **kwargs)  # fmt: skip

    class WideResidual(owner):
        """The same in fp32."""

        def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
                    position_embeddings=None, **kwargs):  # fmt: skip
            residual = hidden_states.float()
            hidden_states, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), attention_mask=attention_mask,
                position_ids=position_ids, past_key_values=past_key_values, use_cache=use_cache,
                position_embeddings=position_embeddings, **kwargs)  # fmt: skip
            residual = (residual + hidden_states).to(hidden_states.dtype)
            return residual + self.mlp(self.post_attention_layernorm(residual))

    class AsksForTheCache(owner):
        def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
                    position_embeddings=None, **kwargs):  # fmt: skip
            residual = hidden_states
            hidden_states, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), attention_mask=attention_mask,
                position_ids=position_ids, past_key_values=past_key_values, use_cache=use_cache,
                position_embeddings=position_embeddings, **kwargs)  # fmt: skip
            if past_key_values is None:
                hidden_states = 0.5 * hidden_states
            residual = residual + hidden_states
            return residual + self.mlp(self.post_attention_layernorm(residual))

    return Scaled, WithoutMask, OtherOrder, Training, WideResidual, AsksForTheCache


@pytest.mark.parametrize(
    "number", range(6), ids=["scaled", "without mask", "other order", "training", "wide residual", "asks for the cache"]
)
@pytest.mark.filterwarnings("ignore:lossless-kernels:RuntimeWarning")
def test_a_layer_that_looks_alike_keeps_its_forward(kernel, seed, number):
    model = make("Llama", seed, use_cache=False).half()
    owner = type(model.model.layers[0])
    layer_class = bodies(owner)[number]
    for layer in model.model.layers:
        layer.__class__ = layer_class
    expected = model(tokens(seed)).logits
    kernel.name_layers(model)
    mapping = kernel.kernel_mapping(devices=("cpu",), level="decoder")
    with use_kernel_mapping({"LlamaDecoderLayer": mapping["LlamaDecoderLayer"]}, inherit_mapping=False):
        found = kernelize(copy.deepcopy(model), mode=Mode.INFERENCE, device="cpu")
    assert len(replaced(found, "LlamaDecoderLayer")) == 2
    assert_bits_equal(found(tokens(seed)).logits, expected)


def test_a_call_from_python_sees_the_same_signature(kernel):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    ours, theirs = (
        inspect.signature(each.forward).parameters for each in (kernel.layers.LlamaDecoderLayer, LlamaDecoderLayer)
    )
    assert [(p.name.replace("past_key_values", CACHE), p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_bad_input(kernel):
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, found str"):
        kernel.name_layers("model")
    with pytest.raises(ValueError, match="level: expected one of layer, decoder, found 'all'"):
        kernel.kernel_mapping(level="all")


def test_attentions_that_depend_on_what_may_be_absent(kernel, nothing_known):
    """Cohere2's layers without a window have no rotary embedding; GraniteMoeHybrid's have none if none is given."""
    from transformers.models.cohere2.modeling_cohere2 import Cohere2Attention
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridAttention
    from transformers.models.llama.modeling_llama import LlamaAttention
    from transformers.models.mistral.modeling_mistral import MistralAttention

    attention, x = python_module(kernel, "attention"), torch.zeros(1)
    assert attention.formula_of(LlamaAttention, x).window == "" and attention.formula_of(MistralAttention, x).window
    with pytest.warns(RuntimeWarning, match="lossless-kernels: .* none of the known formulas"):
        assert attention.formula_of(Cohere2Attention, x) is None
    with pytest.warns(RuntimeWarning, match="lossless-kernels: .* without a rotary embedding"):
        assert attention.formula_of(GraniteMoeHybridAttention, x) is None


def test_children_that_are_no_modules(kernel, seed):
    """Somebody took a projection away and put a function there, or made a plain tensor of its bias."""
    model = make("Llama", seed)

    def change(model):
        attention = model.model.layers[0].self_attn
        weight = attention.q_proj.weight
        del attention.q_proj
        attention.q_proj = lambda x: torch.nn.functional.linear(x, weight)
        linear = model.model.layers[1].self_attn.o_proj
        del linear.bias
        linear.register_buffer("bias", torch.ones(SIZES["hidden_size"]))
        return model

    layers, decoder = (change(kernelized(kernel, model, level)) for level in ("layer", "decoder"))
    assert_bits_equal(decoder(tokens(seed)).logits, layers(tokens(seed)).logits)


def test_functions_in_the_place_of_modules(kernel, seed):
    """Of the layer's own children."""
    model = make("Llama", seed)

    def change(model):
        for index, name in enumerate(("mlp", "post_attention_layernorm")):
            layer = model.model.layers[index]
            child = getattr(layer, name)
            delattr(layer, name)
            setattr(layer, name, lambda x, child=child: child(x))
        return model

    layers, decoder = (change(kernelized(kernel, model, level)) for level in ("layer", "decoder"))
    assert_bits_equal(decoder(tokens(seed)).logits, layers(tokens(seed)).logits)


@pytest.mark.parametrize("name", ["post_attention_layernorm", "self_attn", "mlp", "mlp.act_fn"])
@pytest.mark.parametrize("how", ["another's", "wrapped"])
def test_a_forward_put_into_a_kernelized_module_is_called(kernel, seed, name, how):
    """One bound to another module of the class, and one that says it is what it wraps."""
    model = make("Llama", seed)
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.post_attention_layernorm.weight, 0.5, 1.5)

    def change(model):
        first, second = (layer.get_submodule(name) for layer in model.model.layers)
        original = second.forward
        if how == "another's":
            second.forward = first.forward
            return model

        @functools.wraps(original)
        def wrapped(self, *arguments, **named):
            out = original(*arguments, **named)
            return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

        second.forward = MethodType(wrapped, second)
        return model

    with torch.no_grad():
        before = kernelized(kernel, model, "decoder")(tokens(seed)).logits
        layers, decoder = (change(kernelized(kernel, model, level)) for level in ("layer", "decoder"))
        expected, found = layers(tokens(seed)).logits, decoder(tokens(seed)).logits
        # The reference calls its modules.
        assert_bits_equal(found, expected)
        if (how, name) != ("another's", "mlp.act_fn"):  # Any is like any other.
            assert not torch.equal(found, before)


def test_an_attention_function_may_have_arguments_of_any_name(kernel, seed):
    seen = []

    def recorded(module, query, key, value, mask, variant=None, functions=None, **others):
        seen.append((variant, functions))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **others)

    ALL_ATTENTION_FUNCTIONS.register("recorded", recorded)
    try:
        model = kernelized(kernel, make("Llama", seed), "decoder")
        model.set_attn_implementation("recorded")
        model(tokens(seed), variant="one", functions="two")
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop("recorded")
    assert seen == [("one", "two")] * 2


@pytest.mark.parametrize("level", ["layer", "decoder"])
def test_no_more_is_alive_in_the_mlps_last_projection_than_with_eager(kernel, seed, level):
    model, alive = make("Llama", seed), {}

    class Kept(torch.nn.Module):
        """A projection that remembers its output, or looks at who is still alive."""

        def __init__(self, linear, name, outputs):
            super().__init__()
            self.linear, self.name, self.outputs = linear, name, outputs

        def forward(self, x):
            if self.name == "down_proj":
                alive.setdefault(id(self.outputs), []).append([out() is not None for out in self.outputs])
                self.outputs.clear()
            out = self.linear(x)
            self.outputs.append(weakref.ref(out))
            return out

    def change(model):
        outputs = []
        for layer in model.model.layers:
            for name in ("o_proj", "gate_proj", "up_proj", "down_proj"):
                parent = layer.self_attn if name == "o_proj" else layer.mlp
                setattr(parent, name, Kept(getattr(parent, name), name, outputs))
        return model

    with torch.no_grad():
        for changed in (change(copy.deepcopy(model)), change(kernelized(kernel, model, level))):
            changed(tokens(seed), use_cache=False)
    theirs, ours = alive.values()
    assert theirs == ours


def test_another_call_of_linear_layers_is_called(kernel, seed, monkeypatch):
    model = kernelized(kernel, make("Llama", seed), "decoder")
    model(tokens(seed))
    called, call = [], torch.nn.Linear.__call__
    monkeypatch.setattr(torch.nn.Linear, "__call__", lambda self, *a: called.append(self) or call(self, *a))
    model(tokens(seed))
    assert len(called) == 2 * 7 + 1


def test_linear_layers_changed_before_the_kernel_is_loaded_are_called(interpreted, build):
    done = interpreted(
        """
        import importlib, sys
        import torch
        from kernels import get_local_kernel
        from pathlib import Path
        from places import python_module

        called, forward = [], torch.nn.Linear.forward
        torch.nn.Linear.forward = lambda self, x: called.append(self) or forward(self, x)
        kernel = get_local_kernel(Path(sys.argv[1]))
        attention = python_module(kernel, "attention")
        attention.project(torch.nn.Linear(4, 4), torch.ones(4))
        print(len(called))
        """,
        arguments=(str(build),),
    )
    assert done.stdout.split() == ["1"]


class AnotherKernel(torch.nn.Module):
    def forward(self, x):
        return x


def test_hooks_on_all_modules_see_none_of_a_proof(kernel, nothing_known, seed):
    ours, called = kernelized(kernel, make("Llama", seed), "decoder"), []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module))
    attention = python_module(kernel, "attention")
    try:
        ours(tokens(seed))
        assert attention.formula_of(type(ours.model.layers[0].self_attn), torch.ones(1)) is not None
    finally:
        handle.remove()
    assert called and {*called} <= {*ours.modules()} | {each for each in called if type(each).__name__ == "Func"}


def test_another_call_of_all_modules_is_called(kernel, seed, monkeypatch):
    ours, called = kernelized(kernel, make("Llama", seed), "decoder"), []
    original = torch.nn.Module.__call__
    monkeypatch.setattr(
        torch.nn.Module, "__call__", lambda self, *a, **k: called.append(type(self).__name__) or original(self, *a, **k)
    )
    ours(tokens(seed))
    layers = ours.config.num_hidden_layers
    for name in ("LlamaAttention", "LlamaMLP", "SiLUActivation"):
        assert called.count(name) == layers
    assert called.count("LlamaRMSNorm") == 2 * layers + 1


def test_named_layers_keep_forwards_and_hooks_of_their_own(kernel, seed, monkeypatch):
    """`name_layers` names classes; what is not simply of that class `kernelize` must leave alone."""
    if "condition" not in inspect.signature(replace_kernel_forward_from_hub).parameters:
        pytest.skip("kernels 0.16 asks for no condition")
    from transformers.models.llama.modeling_llama import LlamaMLP

    class Louder(LlamaMLP):
        def forward(self, x, factor):
            return factor * super().forward(x)

    model = make("Llama", seed)
    kernel.name_layers(model)
    model.louder = Louder(model.config)
    mine, hooked = model.model.layers
    mine.mlp.forward = lambda x: 0.0 * x
    # As `kernelize` binds what another repository, or another version of this one, has: a package with `layers`.
    monkeypatch.setitem(sys.modules, "_another_kernel_0", SimpleNamespace(layers=AnotherKernel))
    monkeypatch.setattr(AnotherKernel.forward, "__module__", "_another_kernel_0.layers")
    hooked.mlp.forward = MethodType(AnotherKernel.forward, hooked.mlp)
    hooked._hf_hook, original = object(), hooked.forward
    hooked.forward = lambda *a, **k: original(*a, **k)
    with use_kernel_mapping(kernel.kernel_mapping(devices=("cpu",), level="decoder"), inherit_mapping=False):
        found = kernelize(model, mode=Mode.INFERENCE, device="cpu")
    assert "forward" not in vars(found.louder) and mine.mlp.forward(torch.ones(2)).sum() == 0
    assert len(replaced(found, "LlamaMLP")) == 1
    assert len(replaced(found, "LlamaDecoderLayer")) == 1 and vars(hooked)["forward"].__name__ == "<lambda>"
    # Once more, in another mode, and back.
    with use_kernel_mapping(kernel.kernel_mapping(devices=("cpu",), level="decoder"), inherit_mapping=False):
        assert len(replaced(kernelize(model, mode=Mode.TRAINING, device="cpu"), "LlamaDecoderLayer")) == 1
    with use_kernel_mapping({}, inherit_mapping=False):
        assert not replaced(kernelize(model, mode=Mode.INFERENCE, device="cpu"), "LlamaDecoderLayer")
