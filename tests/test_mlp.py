"""Gated MLPs: which are recognised, that their projections stay the modules they are, and whole models with them.

Without a GPU the product's kernel runs in Triton's interpreter, with proof off: its exponential is not torch's, so outputs are
compared with the product that the package's function returns.
"""

import copy
import functools
import warnings

import pytest
import torch
from bits import assert_bits_equal
from kernels import Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from places import forget_calls, modeling
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

pytestmark = [pytest.mark.either, pytest.mark.filterwarnings(r"ignore:\s*No kernel mapping found")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEVICE_TYPE = "rocm" if torch.version.hip else DEVICE
NAMES = {
    LlamaMLP: "SwiGLUMLP",
    MistralMLP: "LlamaMLP",
    Qwen2MLP: "SwiGLUMLP",
    GemmaMLP: "GeGLUMLP",
    Phi3MLP: "Phi3MLP",
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
}
PACKED = {
    "Phi3": "phi3",
    "Phi4Multimodal": "phi4_multimodal",
    "Glm": "glm",
    "Glm4": "glm4",
    "Glm4vText": "glm4v",
    "GlmOcrText": "glm_ocr",
    "GlmImageText": "glm_image",
    "Dia": "dia",
}
HIDDEN_SIZE, INTERMEDIATE_SIZE = 64, 192
each_act = pytest.mark.parametrize(
    "act, formula",
    [
        (ACT2FN["silu"], "silu"),
        (nn.SiLU(), "silu"),
        (ACT2FN["gelu_pytorch_tanh"], "gelu_tanh"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (ACT2FN["gelu"], "gelu"),
        (nn.GELU(), "gelu"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value),
)


@pytest.fixture(autouse=True)
def policy(monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "on" if DEVICE == "cuda" else "off")


@pytest.fixture(autouse=True)
def named(monkeypatch):
    """The recipe, for the duration of a test."""
    for layer_class, name in NAMES.items():
        name_layer(monkeypatch, layer_class, name)


def name_layer(monkeypatch, layer_class, name="SwiGLUMLP"):
    monkeypatch.setattr(layer_class, "kernel_layer_name", name, raising=False)
    replace_kernel_forward_from_hub(layer_class, name)


@pytest.fixture
def products(module, monkeypatch):
    """The gates of all products that kernels have computed."""
    gates, call = [], module("gated_activation")._Forward.__call__

    def watched(self, gate, up):
        gates.append(gate)
        return call(self, gate, up)

    monkeypatch.setattr(module("gated_activation")._Forward, "__call__", watched)
    forget_calls(module)
    yield gates
    forget_calls(module)


def mlp(seed, layer_class=LlamaMLP, act="silu", dtype=torch.float32):
    config = LlamaConfig(hidden_size=HIDDEN_SIZE, intermediate_size=INTERMEDIATE_SIZE, hidden_act=act)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return layer_class(config).to(DEVICE, dtype)


def kernelized(model, kernel, mode=Mode.TRAINING):
    with use_kernel_mapping(kernel.kernel_mapping(devices=(DEVICE_TYPE,)), inherit_mapping=False):
        return kernelize(copy.deepcopy(model), mode=mode, device=DEVICE_TYPE)


def unbind(act_fn):
    """The activation's own forward again: its kernel has another exponential in the interpreter."""
    vars(act_fn).pop("forward", None)


def activation_of(layer):
    return getattr(layer, "activation_fn", None) or layer.act_fn


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def fused(kernel, layer, x, product=None):
    """What the layer must return: on a GPU what the original does."""
    product = product or kernel.silu_and_mul
    packed = hasattr(layer, "gate_up_proj")
    gate, up = layer.gate_up_proj(x).chunk(2, dim=-1) if packed else (layer.gate_proj(x), layer.up_proj(x))
    return layer.down_proj(product(gate, up))


each_form = pytest.mark.parametrize("layer_class", (LlamaMLP, Phi3MLP), ids=lambda each: each.__name__)


def backward(out, inputs):
    return torch.autograd.grad(out, inputs, torch.cos(out.detach()))


# Recognition


@each_act
def test_formula_and_activation_are_recognised(module, nothing_known, act, formula):
    """In torch operations, on any device."""
    family = module("mlp")
    subject = family.subject_of(act)
    for layer_class in NAMES:
        for dtype in (torch.float32, torch.bfloat16):
            for candidate in module("gated_activation").ACTIVATIONS.values():
                compared = family._formulas(
                    layer_class, module("activation").by_value(subject), candidate, dtype, torch.device(DEVICE)
                )
                equal = all(not module("proof").differing(found, expected) for _, found, expected in compared)
                assert equal == (candidate.name == formula), (layer_class, dtype, candidate.name)


class UpFirst(LlamaMLP):
    """The same output, but gradients reach x in the other order."""

    def forward(self, x):
        return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))


class Sliced(LlamaMLP):
    def forward(self, x):
        if self.config.pretraining_tp > 1:
            return sum(x.chunk(2, -1))
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Dropout(LlamaMLP):
    def forward(self, x):
        product = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(nn.functional.dropout(product, 0.5, self.training))


class Scaled(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2.0)


class WidensTheGate(LlamaMLP):
    """The others' formula in fp32, but not of the 16 bits that its projections return under autocast."""

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj((self.act_fn(gate.float()) * up.float()).to(gate.dtype))


class GateLast(Phi3MLP):
    def forward(self, hidden_states):
        up, gate = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class Interleaved(Phi3MLP):
    def forward(self, hidden_states):
        gate, up = self.gate_up_proj(hidden_states).unflatten(-1, (-1, 2)).unbind(-1)
        return self.down_proj(up * self.activation_fn(gate))


OTHERS = UpFirst, Sliced, Dropout, Scaled, WidensTheGate, GateLast, Interleaved


@pytest.mark.parametrize("layer_class", OTHERS, ids=lambda c: c.__name__)
def test_other_formulas_keep_their_forward(kernel, nothing_known, products, monkeypatch, seed, layer_class):
    name_layer(monkeypatch, layer_class, "Phi3MLP" if issubclass(layer_class, Phi3MLP) else "SwiGLUMLP")
    original = mlp(seed, layer_class).eval()
    original.config.pretraining_tp = 1
    replaced, x = kernelized(original, kernel), normal(seed, 3, HIDDEN_SIZE)
    unbind(activation_of(replaced))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="lossless-kernels")
        for each in (x, x.requires_grad_()):
            assert_bits_equal(replaced(each), original(each))
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                assert_bits_equal(replaced(each), original(each))
    (entry, *_) = kernel.replacement_report(replaced, verbose=False).layers
    assert not products and entry.path == "original" and entry.reasons != ["not called yet"]


@pytest.mark.parametrize("act", ("relu", "gelu_new", "gelu_python"))
def test_other_activations_keep_the_forward(kernel, nothing_known, products, seed, act):
    original = mlp(seed, act=act)
    replaced, x = kernelized(original, kernel), normal(seed, 3, HIDDEN_SIZE)
    unbind(replaced.act_fn)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="lossless-kernels")
        assert_bits_equal(replaced(x), original(x))
    assert not products


# One layer


@each_form
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_product_comes_from_the_kernel(kernel, products, seed, layer_class, dtype):
    layer = kernelized(mlp(seed, layer_class, dtype=dtype), kernel)
    assert layer.forward.__func__ is getattr(kernel.layers, layer_class.__name__).forward
    x = normal(seed, 2, 5, HIDDEN_SIZE, dtype=dtype)
    with torch.no_grad():
        assert_bits_equal(layer(x), fused(kernel, layer, x))
    x.requires_grad_()
    inputs = (x, *layer.parameters())
    before = len(products)
    found, expected = layer(x), fused(kernel, layer, x)
    assert len(products) == before + 2
    assert found.grad_fn.next_functions[0][0] is not None
    for ours, functions in zip(backward(found, inputs), backward(expected, inputs)):
        assert_bits_equal(ours, functions)


@each_act
def test_each_activation_module(kernel, module, products, seed, act, formula):
    original = mlp(seed)
    original.act_fn = act
    activation = module("gated_activation").ACTIVATIONS[formula]
    product = functools.partial(
        module("gated_activation").replacement, subject=activation.forward, activation=activation
    )
    x = normal(seed, 5, HIDDEN_SIZE)
    for mode in (Mode.INFERENCE, Mode.TRAINING):
        layer = kernelized(original, kernel, mode)
        assert_bits_equal(layer(x), fused(kernel, layer, x, product))
    assert len(products) == 4


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU eager itself is compared with")
def test_gradients_reach_x_in_eagers_order(kernel, seed):
    """up_proj's first, then gate_proj's, after whatever there was: their own sum would have other bits."""
    layer, x = kernelized(mlp(seed), kernel), normal(seed, 7, HIDDEN_SIZE).requires_grad_()
    other = normal(seed + 1, 7, HIDDEN_SIZE)
    out = layer(x)
    dy = torch.cos(out.detach())
    (found,) = torch.autograd.grad((out, x * 1.0), x, (dy, other))
    gate, up = (each(x.detach()).detach().requires_grad_() for each in (layer.gate_proj, layer.up_proj))
    d_gate, d_up = torch.autograd.grad(layer.down_proj(kernel.silu_and_mul(gate, up)), (gate, up), dy)
    through_up, through_gate = d_up @ layer.up_proj.weight, d_gate @ layer.gate_proj.weight
    assert_bits_equal(found, (other + through_up) + through_gate)


class LowRank(nn.Module):
    """A linear layer with an adapter around it, as LoRA wraps them."""

    def __init__(self, base, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base = base
        for name, shape in (("down", (4, base.in_features)), ("up", (base.out_features, 4))):
            weight = torch.randn(shape, generator=generator).to(base.weight)
            self.register_parameter(name, nn.Parameter(weight))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.base(x) + (x @ self.down.t()) @ self.up.t()


def test_projections_are_called_as_the_modules_they_are(kernel, products, seed):
    original = mlp(seed).requires_grad_(False)
    for index, name in enumerate(("gate_proj", "up_proj", "down_proj")):
        setattr(original, name, LowRank(getattr(original, name), seed + index))
    layer, x = kernelized(original, kernel), normal(seed, 5, HIDDEN_SIZE)
    seen = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(layer, name).register_forward_hook(lambda module, arguments, out, name=name: seen.append(name))
    out = layer(x)
    assert seen == ["gate_proj", "up_proj", "down_proj"] and len(products) == 1
    assert [getattr(layer, name).calls for name in ("gate_proj", "up_proj", "down_proj")] == [1, 1, 1]
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    assert len(parameters) == 6
    for ours, functions in zip(backward(out, parameters), backward(fused(kernel, layer, x), parameters)):
        assert_bits_equal(ours, functions)


@each_form
def test_an_activation_that_somebody_watches_is_called(kernel, products, seed, layer_class):
    layer, x = kernelized(mlp(seed, layer_class), kernel), normal(seed, 5, HIDDEN_SIZE)
    act_fn = activation_of(layer)
    expected = layer(x).detach()
    assert len(products) == 1
    seen = []

    def watch(*arguments):
        seen.append(arguments[0])

    for register in (
        act_fn.register_forward_hook,
        act_fn.register_forward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
    ):
        handle = register(watch)
        assert_bits_equal(layer(x), expected)
        handle.remove()
        assert act_fn in seen and len(products) == 1
        seen.clear()
    handle = act_fn.register_full_backward_hook(watch)
    backward(layer(x.requires_grad_()), x)
    assert seen == [act_fn] and len(products) == 1
    handle.remove()
    bound = act_fn.forward
    act_fn.forward = lambda gate: seen.append(gate) or bound(gate)
    assert_bits_equal(layer(x), expected)
    assert len(seen) == 2 and len(products) == 1


def test_packed_mlps_are_named(kernel):
    for name, folder in PACKED.items():
        file = modeling(folder)
        layer_class = vars(file)[f"{name}MLP"]
        if layer_class not in NAMES:
            config = LlamaConfig(hidden_size=HIDDEN_SIZE, intermediate_size=INTERMEDIATE_SIZE)
            assert kernel.name_layers(layer_class(config))[layer_class.__name__] == "Phi3MLP"


def test_a_packed_gradient_keeps_the_signs_of_zeros(kernel, seed):
    """Each half is its product's gradient, not the sum of it and of zeros for the other half."""
    original = mlp(seed, Phi3MLP)
    original.down_proj = nn.Identity()
    seen = []
    for layer in (original, kernelized(original, kernel)):
        layer.gate_up_proj.register_forward_hook(lambda module, arguments, out: out.register_hook(seen.append) and None)
        out = layer(normal(seed, 5, HIDDEN_SIZE))
        out.backward(torch.full_like(out, -0.0))
    expected, found = seen
    assert_bits_equal(found, expected)
    assert torch.signbit(found).any() and not found.any()


@pytest.mark.parametrize("up", [torch.float32, torch.float64], ids=["same dtype", "another dtype of up"])
def test_a_watched_activation_in_a_checkpoint(kernel, seed, up):
    """Hooks run in eager's order, in both passes, and one that the forward pass alone has changes nothing."""
    original = mlp(seed)
    seen, gradients = {}, {}
    for layer in (original, kernelized(original, kernel)):
        order = seen[layer] = []
        if up != torch.float32:
            layer.up_proj.register_forward_hook(lambda module, arguments, out: out.to(up))
            layer.down_proj.to(up)
        unbind(layer.act_fn)
        for name in ("gate_proj", "up_proj"):
            module = getattr(layer, name)
            module.register_forward_hook(lambda *_, name=name, order=order: order.append(name))
            module.weight.register_hook(lambda _, name=name, order=order: order.append(f"gradient of {name}"))

        def watch(module, arguments, out, order=order):
            order.append("act_fn")
            out.register_hook(lambda _: order.append("gradient of act_fn"))

        handle = layer.act_fn.register_forward_hook(watch)
        out = checkpoint(layer, normal(seed, 5, HIDDEN_SIZE), use_reentrant=False)
        handle.remove()
        gradients[layer] = backward(out, [*layer.parameters()])
    eagers, ours = seen.values()
    assert ours == eagers and len(ours) == 8, (ours, eagers)
    if up != torch.float32:
        for found, expected in zip(*reversed(gradients.values())):
            assert_bits_equal(found, expected)


def test_what_no_kernel_takes_is_the_original(kernel, products, seed):
    original = mlp(seed)
    layer = kernelized(original, kernel)
    x = normal(seed, 5, HIDDEN_SIZE)
    for inputs in (x.double(), x[:0]):
        dtype = inputs.dtype
        assert_bits_equal(layer.to(dtype)(inputs), original.to(dtype)(inputs))
    layer.float(), original.float()
    # The gate of another dtype than up.
    for each in (layer, original):
        each.gate_proj.register_forward_hook(lambda module, arguments, out: out.double())
        each.down_proj.double()
    unbind(layer.act_fn)
    assert_bits_equal(layer(x), original(x))
    assert all(gate.numel() == 0 for gate in products)


@each_form
def test_a_layer_of_its_own(kernel, nothing_known, seed, layer_class):
    layer = type("Ours", (getattr(kernel.layers, layer_class.__name__),), {})()
    source = kernelized(mlp(seed, layer_class), kernel)
    for name, part in source.named_children():
        setattr(layer, name, part)
    x = normal(seed, 5, HIDDEN_SIZE)
    assert_bits_equal(layer(x), source(x))


@each_form
def test_torch_compile_traces_all_of_it(kernel, seed, layer_class):
    """The operator, with the bits of the layer that is not compiled; on a GPU these are the original's."""
    original = mlp(seed, layer_class)
    layer, x = kernelized(original, kernel, Mode.TRAINING | Mode.TORCH_COMPILE), normal(seed, 5, HIDDEN_SIZE)
    unbind(activation_of(layer))
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    inputs = x.requires_grad_(), *layer.parameters()
    uncompiled = original if DEVICE == "cuda" else layer
    expected_inputs = x, *uncompiled.parameters()
    found, expected = compiled(x), uncompiled(x)
    assert_bits_equal(found, expected)
    for ours, eagers in zip(backward(found, inputs), backward(expected, expected_inputs)):
        assert_bits_equal(ours, eagers)


def test_report_tells_of_the_layer_and_of_its_activation(kernel, nothing_known, seed):
    layer = kernelized(mlp(seed), kernel)
    if DEVICE == "cuda":
        layer(normal(seed, 5, HIDDEN_SIZE).requires_grad_())
        found = {entry.layer: entry for entry in kernel.replacement_report(layer, verbose=False).layers}
        for name in ("LlamaMLP", "SiLUActivation"):
            assert found[name].path == "kernel" and "silu(gate) * up" in found[name].formulas, found[name]
    else:
        layer(normal(seed, 5, HIDDEN_SIZE))
        found = {entry.layer: entry for entry in kernel.replacement_report(layer, verbose=False).layers}
        assert found["LlamaMLP"].path == "unproved"


# Whole models


def build(family, seed, dtype):
    config, model = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        built = model(
            config(
                num_hidden_layers=2,
                hidden_size=HIDDEN_SIZE,
                intermediate_size=INTERMEDIATE_SIZE,
                num_attention_heads=4,
                num_key_value_heads=4,
                head_dim=16,
                vocab_size=256,
                max_position_embeddings=256,
                attn_implementation="eager",
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=None,
            )
        )
    return built.to(DEVICE, dtype)


def mlps(model):
    return [module for module in model.modules() if type(module) in NAMES]


@pytest.mark.parametrize("family", FAMILIES)
def test_kernelize_replaces_the_mlps_of_a_model(kernel, seed, family):
    model = kernelized(build(family, seed, torch.float32), kernel)
    assert len(mlps(model)) == 2
    ours = {"gemma": kernel.layers.GeGLUMLP, "phi3": kernel.layers.Phi3MLP}
    for each in mlps(model):
        layer = ours.get(family, kernel.layers.LlamaMLP)
        assert each.forward.__func__ is layer.forward


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:lossless-kernels:RuntimeWarning")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_models_on_gpu(kernel, products, seed, family, dtype):
    original = build(family, seed, dtype)
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    replaced = kernelized(original.eval(), kernel, Mode.INFERENCE)
    with torch.no_grad():
        assert_bits_equal(replaced(tokens).logits, original(tokens).logits)
        generated = [
            model.generate(tokens, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
            for model in (replaced, original)
        ]
        for ours, eagers in zip(generated[0].logits, generated[1].logits, strict=True):
            assert_bits_equal(ours, eagers)
    assert len(products) == 2 * 9
    replaced = kernelized(original.train(), kernel, Mode.TRAINING)
    for model in (replaced, original):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    for (name, one), two in zip(replaced.named_parameters(), original.parameters(), strict=True):
        assert_bits_equal(one.grad, two.grad, name)
    # Forward and, for the checkpoints, once more.
    assert len(products) == 2 * 9 + 2 * 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:lossless-kernels:RuntimeWarning")
def test_training_under_autocast_on_gpu(kernel, products, seed):
    original = build("llama", seed, torch.float32).train()
    replaced = kernelized(original, kernel)
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    for model in (replaced, original):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
    for (name, one), two in zip(replaced.named_parameters(), original.parameters(), strict=True):
        assert_bits_equal(one.grad, two.grad, name)
    assert [gate.dtype for gate in products] == [torch.bfloat16] * 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:lossless-kernels:RuntimeWarning")
@pytest.mark.parametrize("family", ("llama", "gemma"))
def test_torch_compile_of_a_model_on_gpu(kernel, module, seed, family):
    original = build(family, seed, torch.bfloat16).eval()
    replaced = kernelized(original, kernel, Mode.INFERENCE | Mode.TORCH_COMPILE)
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    operators = []

    def backend(graph, inputs):
        operators.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    # Not Inductor: its arithmetic around the layers is not eager's.
    compiled = torch.compile(replaced, backend=backend, fullgraph=True)
    with torch.no_grad():
        assert_bits_equal(compiled(tokens, use_cache=False).logits, original(tokens, use_cache=False).logits)
    assert sum("gated_activation" in operator for operator in operators) == 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:lossless-kernels:RuntimeWarning")
@each_act
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_layer_against_eager_on_gpu(kernel, products, seed, dtype, act, formula):
    """Outputs and gradients, x with another consumer: up_proj's gradient reaches it first."""
    original = mlp(seed, dtype=dtype)
    original.act_fn = copy.deepcopy(act)
    replaced = kernelized(original, kernel)
    x, other = (normal(seed + index, 2, 33, HIDDEN_SIZE, dtype=dtype) for index in range(2))
    results = []
    for layer in (replaced, original):
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        results.append(
            (out, *torch.autograd.grad((out, leaf * 1.0), (leaf, *layer.parameters()), (torch.cos(x), other)))
        )
    assert len(products) == 1
    for ours, eagers in zip(*results, strict=True):
        assert_bits_equal(ours, eagers)
        assert ours.stride() == eagers.stride()
