"""What is nearly what a kernel knows, and what becomes something else later: the original decides, always.

Under `cpu_arithmetic` launches compute what eager does on a CPU, so that everything is compared bit by bit.
"""

import ast
import contextlib
import copy
import functools
import gc
import importlib
import types
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from bits import assert_bits_equal
from cpu_kernels import cpu_arithmetic
from graphs import GRAPHS, HIDDEN_SIZE, LAYERS, TOKENS, bound, with_ours
from kernels import Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from places import forget_calls
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import activations
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the CPU's tensors stand for CUDA's in Triton's interpreter alone"
    ),
    pytest.mark.filterwarnings("ignore:lossless-kernels:RuntimeWarning"),
]


@pytest.fixture
def launched(kernel, module, proof_off):
    """Launches compute what eager does on a CPU; how often each kernel ran."""
    forget_calls(module)
    with cpu_arithmetic(kernel.__name__) as launched:
        yield launched
    forget_calls(module)


@pytest.fixture
def layers(kernel, launched):
    return kernel.layers


def class_of(base, source, **namespace):
    """A subclass whose methods are written in `source`."""
    names = {"torch": torch, "F": nn.functional, "__name__": __name__, **namespace}
    exec(source, names)
    methods = {
        name: value for name, value in names.items() if isinstance(value, types.FunctionType) and name not in namespace
    }
    return type("Layer", (base,), methods)


# MLPs


ACTIVATIONS = {
    "silu": activations.SiLUActivation,
    "gelu": activations.GELUActivation,
    "gelu_tanh": activations.GELUTanh,
    "torch.silu": nn.SiLU,
    "torch.gelu": nn.GELU,
}
FORMULAS = (
    "self.act_fn(%s)",
    "F.gelu(%s)",
    "F.silu(%s)",
    "torch.sin(%s)",
    "self.act_fn(self.act_fn(%s))",
    "self.act(%s)",
    "%s",
)


def test_an_mlp_computes_what_its_forward_says(layers, launched, chooser):
    """Whatever its act_fn is, and whichever MLP of the same shapes came before."""
    config, mlps = modeling_llama.LlamaConfig(hidden_size=HIDDEN_SIZE, intermediate_size=32), []
    for formula in (FORMULAS[0], *chooser.choices(FORMULAS, k=11)):
        source = f"def forward(self, x): return self.down_proj({formula % 'self.gate_proj(x)'} * self.up_proj(x))\n"
        source += f"def act(self, x): return F.{chooser.choice(('gelu', 'silu'))}(x)"
        mlp = class_of(modeling_llama.LlamaMLP, source)(config)
        mlp.act_fn = ACTIVATIONS[chooser.choice(tuple(ACTIVATIONS))]()
        mlps.append((mlp, copy.deepcopy(mlp)))
    for mlp, _ in mlps:
        bound(layers.LlamaMLP, mlp)
    for mlp, original in chooser.sample(mlps * 4, k=4 * len(mlps)):  # Each four times, in any order.
        x = torch.randn(chooser.choice((1, 3)), HIDDEN_SIZE, requires_grad=True)
        found, expected = mlp(x), original(x)
        assert_bits_equal(found, expected)
        gradients = (
            torch.autograd.grad(out.sin().sum(), (x, m.gate_proj.weight))
            for out, m in ((found, mlp), (expected, original))
        )
        for ours, eagers in zip(*gradients):
            assert_bits_equal(ours, eagers)
    assert "gated_activation_forward" in launched


# Gradients that are differentiated


def test_every_family_is_in_a_graph(kernel):
    """All layers and all functions that have a kernel, but the tables of positions, which have no gradient."""
    homes = {name: getattr(getattr(kernel, name), "__module__", "") for name in kernel.__all__}
    no_kernel = (".ops.composed", ".ops.slices", ".ops.linear_jsd_loss")
    functions = {name for name, home in homes.items() if ".ops." in home and not home.endswith(no_kernel)}
    assert functions > {"softmax", "fused_add_rms_norm"}
    layers = {
        name
        for name, value in vars(kernel.layers).items()
        if isinstance(value, type) and value.__module__ == kernel.layers.__name__ and not name.startswith("_")
    }
    assert {name for _, name in GRAPHS.values()} == (functions | layers) - {
        "LlamaRotaryEmbedding",
        "RotaryPosEmbVision",
        "RotaryEmb",
    }


@pytest.mark.parametrize("name", GRAPHS)
def test_first_gradients_with_a_graph_of_their_own(kernel, launched, name, chooser):
    """The layer once or several times in the graph, hooks on its inputs and weights, with and without `create_graph`."""
    make, replacement = GRAPHS[name]
    for _ in range(8):
        original, dtype = make(), chooser.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
        between = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE) if chooser.random() < 0.5 else nn.Identity()
        for parameter in original.parameters():
            nn.init.normal_(parameter, std=0.3)
        original, between = original.to(dtype), between.to(dtype)
        ours = with_ours(kernel, original, replacement)
        times, hooked, create_graph = chooser.randrange(1, 4), chooser.random() < 0.5, chooser.random() < 0.7
        data, results = torch.randn(TOKENS, HIDDEN_SIZE, dtype=dtype), []
        for layer in (original, ours):
            x, calls = data.clone().requires_grad_(), []

            def hook(what, factor, gradient, calls=calls):
                # docs/limits.md: None where another output of a fused operation has a gradient, and eager calls no hook.
                if gradient is not None:
                    calls.append(what)
                    return gradient * factor

            h = x * 1.0
            for _ in range(times):
                if hooked:
                    h.register_hook(functools.partial(hook, "input", 2.0))
                h = layer(between(h))
            for weight in layer.parameters():
                if hooked:
                    weight.register_hook(functools.partial(hook, "weight", 0.5))
            inputs = (x, *layer.parameters())
            gradients = torch.autograd.grad(h.sin().sum(), inputs, create_graph=create_graph, allow_unused=True)
            results.append((h, gradients, calls))
        (out, expected, eagers), (our_out, found, seen) = results
        case = f"{dtype}, {times} times, hooked {hooked}, create_graph {create_graph}"
        assert seen == eagers, case
        assert_bits_equal(our_out, out, case)
        for ours_gradient, eagers_gradient in zip(found, expected, strict=True):
            assert (ours_gradient is None) == (eagers_gradient is None), case
            if ours_gradient is not None:
                assert_bits_equal(ours_gradient, eagers_gradient, case)
    assert launched


# Recognition


def test_calls_of_norms_are_told_apart_by_all_that_decides(layers, module, chooser, launched):
    """Modules of several classes around the same weights, with both attributes that may hold eps, in any order of calls."""
    source = "def forward(self, x):\n    n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.%s)\n    return %s"
    weighted = ("self.weight * n.to(x.dtype)", "(n * (1.0 + self.weight.float())).to(x.dtype)", "2.0 * self.weight * n")
    classes = [
        class_of(nn.Module, source % (eps, formula)) for eps in ("eps", "variance_epsilon") for formula in weighted
    ]
    replacements = {"eps": layers.RMSNormZeroCentered, "variance_epsilon": layers.LlamaRMSNorm}
    weights = [nn.Parameter(torch.rand(HIDDEN_SIZE), requires_grad=grad) for grad in (True, False)]
    decoder, values = module("decoder"), [1e-6, 0.5, float("1e-6")]
    for _ in range(150):
        norm = chooser.choice(classes)()
        norm.weight, norm.eps, norm.variance_epsilon = chooser.choice(weights), *chooser.choices(values, k=2)
        x = torch.randn(chooser.choice(((3, HIDDEN_SIZE), (1, 2, HIDDEN_SIZE))), requires_grad=chooser.random() < 0.5)
        name = chooser.choice(tuple(replacements))
        with torch.set_grad_enabled(chooser.random() < 0.7):
            expected, total = norm(x), norm(x.sin() + x)
            bound(replacements[name], norm)
            assert_bits_equal(norm(x), expected, name)
            type(norm).kernel_layer_name = {"eps": "RMSNormZeroCentered", "variance_epsilon": "RMSNorm"}[name]
            assert_bits_equal(decoder.fused(x, x.sin(), norm)[0], total, f"{name}, of a sum")
    assert {"rms_norm_forward", "add_rms_norm_forward"} <= {*launched}


NORM = """
def forward(self, x):
    return self.weight * self._norm(x.float()).to(x.dtype)

def _norm(self, h):
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
"""
CALLS_A_FUNCTION = """
def forward(self, x):
    return self.weight * normalized(x.float(), self.variance_epsilon).to(x.dtype)
"""


def normalized(h, eps):
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def _replace(norm, what):
    """Gives the norm, its class, or what that calls another formula."""
    owner = type(norm)
    if what == "forward":
        owner.forward = lambda self, x: x + 1.0
    elif what == "a method":
        owner._norm = lambda self, h: 2.0 * h
    elif what == "a method of the base":
        owner.__mro__[1]._norm = lambda self, h: 3.0 * h
    elif what == "an attribute of the module":
        norm._norm = lambda h: 4.0 * h
    elif what == "a function":
        owner.forward.__globals__["normalized"] = lambda h, eps: 5.0 * h
    elif what == "a property":
        owner.variance_epsilon = property(lambda self: 0.5)


@pytest.mark.parametrize(
    "what", ["forward", "a method", "a method of the base", "an attribute of the module", "a function", "a property"]
)
def test_what_a_forward_calls_may_be_replaced(layers, module, what, launched):
    """For shapes that were seen before and for new ones, alone, as the norm of a sum, and with gradients."""
    base = class_of(
        nn.Module,
        CALLS_A_FUNCTION if what == "a function" else NORM,
        **({"normalized": normalized} if what == "a function" else {}),
    )
    norm = type("Norm", (base,), {"kernel_layer_name": "RMSNorm"})()
    norm.weight = nn.Parameter(torch.rand(HIDDEN_SIZE))
    if what != "a property":
        norm.variance_epsilon = 1e-6
    else:
        norm.__dict__["variance_epsilon"] = 1e-6
    seen, new = torch.randn(2, HIDDEN_SIZE), torch.randn(3, HIDDEN_SIZE)
    bound(layers.LlamaRMSNorm, norm)
    fused, original = module("decoder").fused, lambda x: type(norm).forward(norm, x)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert_bits_equal(norm(seen), original(seen))
            assert_bits_equal(fused(seen, seen, norm)[0], original(seen + seen))
    assert {*launched} == {"rms_norm_forward", "add_rms_norm_forward"}
    before = original(seen)
    _replace(norm, what)
    assert not torch.equal(original(seen), before)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for x in (seen, new):
                assert_bits_equal(norm(x), original(x))
                assert_bits_equal(fused(x, x, norm)[0], original(x + x))


def test_what_an_mlp_or_a_rotary_embedding_calls_may_be_replaced(layers, module, launched):
    source = "def forward(self, x): return self.down_proj(self.product(self.gate_proj(x), self.up_proj(x)))\n"
    source += "def product(self, gate, up): return self.act_fn(gate) * up"
    config = modeling_llama.LlamaConfig(hidden_size=HIDDEN_SIZE, intermediate_size=32)
    mlp = bound(layers.LlamaMLP, class_of(modeling_llama.LlamaMLP, source)(config))
    x = torch.randn(3, HIDDEN_SIZE)
    assert_bits_equal(mlp(x), type(mlp).forward(mlp, x))
    assert launched == {"gated_activation_forward": 1}
    mlp.product = lambda gate, up: gate + up
    assert_bits_equal(mlp(x), type(mlp).forward(mlp, x))
    del mlp.product
    type(mlp).product = lambda self, gate, up: gate - up
    assert_bits_equal(mlp(x), type(mlp).forward(mlp, x))

    def rotate_half(x):
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    names = {"rotate_half": rotate_half, "__name__": __name__}
    exec(
        "def apply(q, k, cos, sin, unsqueeze_dim=1):\n    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)\n"
        "    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin",
        names,
    )
    rotary, apply = module("rotary"), names["apply"]
    q, k, cos, sin = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 3, 16), torch.randn(1, 3, 16), torch.randn(1, 3, 16)
    for ours, eagers in zip(rotary.replacement(q, k, cos, sin, 1, apply), apply(q, k, cos, sin)):
        assert_bits_equal(ours, eagers)
    names["rotate_half"] = lambda x: x.flip(-1)
    for _ in range(2):
        assert rotary.replacement(q, k, cos, sin, 1, apply) is None


HELPERS = """
def mean_of_squares(h): return h.pow(2).mean(-1, keepdim=True)
def variance(h): return mean_of_squares(h)
def _scale(self, h): return torch.rsqrt(variance(h) + self.variance_epsilon)
def _norm(self, h): return h * self._scale(h)
def forward(self, x): return self.weight * self._norm(x.float()).to(x.dtype)
"""
MLP_HELPERS = """
def times(gate, up): return gate * up
def _product(self, gate, up): return times(self.act_fn(gate), up)
def forward(self, x): return self.down_proj(self._product(self.gate_proj(x), self.up_proj(x)))
"""


def _double(owner, name, modules, where):
    """Replaces a helper by one that returns twice as much."""
    if where == "the file":
        names, original = owner.forward.__globals__, owner.forward.__globals__[name]
        names[name] = lambda *given: 2.0 * original(*given)
        return
    original = getattr(owner, name)
    if where == "the module":
        for module in modules:
            setattr(module, name, lambda *given, module=module: 2.0 * original(module, *given))
    else:
        setattr(
            owner.__mro__[1] if where == "the base" else owner, name, lambda self, *given: 2.0 * original(self, *given)
        )


def test_helpers_replaced_at_random(kernel, launched, chooser):
    """A method or function at any depth below a forward, replaced in any place, at every level, for seen and new lengths."""
    config = modeling_llama.LlamaConfig(
        hidden_size=HIDDEN_SIZE, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, vocab_size=31
    )
    for _ in range(14):
        level, seen = chooser.choice(("layer", "mlp", "decoder")), chooser.sample(range(2, 7), 2)
        original = transformers.LlamaForCausalLM(config).eval()
        norm = type("Norm", (class_of(modeling_llama.LlamaRMSNorm, HELPERS),), {"kernel_layer_name": "RMSNorm"})
        mlp = type("MLP", (class_of(modeling_llama.LlamaMLP, MLP_HELPERS),), {"kernel_layer_name": "SwiGLUMLP"})
        layer = original.model.layers[0]
        layer.input_layernorm.__class__ = layer.post_attention_layernorm.__class__ = norm
        layer.mlp.__class__ = mlp
        ours = copy.deepcopy(original)
        mapping = kernel.kernel_mapping(devices=("cpu",), level="decoder" if level == "decoder" else "layer")
        if level == "layer":
            del mapping["SwiGLUMLP"]
        elif level == "decoder":
            kernel.name_layers(ours)
        with use_kernel_mapping(mapping, inherit_mapping=False):
            kernelize(ours, mode=Mode.TRAINING, device="cpu")

        def same(lengths, what):
            for length in lengths:
                ids = torch.randint(31, (1, length))
                with torch.set_grad_enabled(chooser.random() < 0.5):
                    found, expected = (m(ids, use_cache=False).logits for m in (ours, original))  # noqa: B023
                assert_bits_equal(found, expected, f"level {level}, {what}, {length} tokens")  # noqa: B023

        same(seen * 2, "before")
        owner, names = chooser.choice(
            ((norm, ("_scale", "_norm", "variance", "mean_of_squares")), (mlp, ("_product", "times")))
        )
        name = chooser.choice(names)
        where = chooser.choice(("the class", "the base", "the module")) if name.startswith("_") else "the file"
        modules = [m for model in (ours, original) for m in model.modules() if type(m) is owner]
        before = original(torch.arange(3)[None], use_cache=False).logits
        _double(owner, name, modules, where)
        assert not torch.equal(original(torch.arange(3)[None], use_cache=False).logits, before)
        same(seen + [7, 8], f"{name} of {where}")
    assert {"rms_norm_forward", "gated_activation_forward"} <= {*launched}


# Checkpoints


class Counts(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def watch(model, what):
    """Something that watches the model's calls for a while, as a context."""
    hooked = {
        "hook on the activation": "layers.0.mlp.act_fn",
        "hook on the MLP": "layers.0.mlp",
        "hook on a projection": "layers.0.mlp.gate_proj",
        "hook on the attention": "layers.0.self_attn",
        "hook on the first norm": "layers.0.input_layernorm",
        "hook on the second norm": "layers.0.post_attention_layernorm",
        "hook on the layer": "layers.0",
    }
    stack = contextlib.ExitStack()
    if what in hooked:
        handle = model.model.get_submodule(hooked[what]).register_forward_hook(lambda *_: None)
        stack.callback(handle.remove)
    elif what == "hook on all modules":
        stack.callback(nn.modules.module.register_module_forward_hook(lambda *_: None).remove)
    elif what == "FLOP counter":
        stack.enter_context(FlopCounterMode(display=False))
    elif what == "dispatch mode":
        stack.enter_context(Counts())
    return stack


WATCHERS = (
    "nothing", "FLOP counter", "dispatch mode", "hook on all modules", "hook on the activation", "hook on the MLP",
    "hook on a projection", "hook on the attention", "hook on the first norm", "hook on the second norm", "hook on the layer",
)  # fmt: skip


@pytest.mark.parametrize("level", ["layer", "mlp", "decoder"])
def test_both_computations_of_a_checkpoint_save_the_same(kernel, layers, launched, level, chooser):
    """Whatever watches one of them, and whichever layers are replaced: gradients are as without kernels."""
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN_SIZE, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=31
    )  # fmt: skip
    original = transformers.LlamaForCausalLM(config).train()
    original.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(31, (1, 3))
    pairs = [("nothing", each) for each in WATCHERS] + [(each, "nothing") for each in WATCHERS]
    for forward, backward in chooser.sample(pairs, 8) + [("FLOP counter", "nothing"), ("nothing", "FLOP counter")]:
        ours = copy.deepcopy(original)
        if level != "layer":
            kernel.name_layers(ours)
        mapping = kernel.kernel_mapping(devices=("cpu",), level="decoder" if level == "decoder" else "layer")
        left_out = chooser.sample(sorted(mapping), chooser.choice((0, 0, 3)))
        with use_kernel_mapping({n: each for n, each in mapping.items() if n not in left_out}, inherit_mapping=False):
            kernelize(ours, mode=Mode.TRAINING, device="cpu")
        results = []
        for model in (original, ours):
            model.zero_grad()
            with watch(model, forward):
                loss = model(ids, use_cache=False).logits.square().mean()
            with watch(model, backward):
                loss.backward()
            results.append([loss, *(parameter.grad for parameter in model.parameters())])
        for found, expected in zip(*results):
            assert_bits_equal(found, expected, f"{forward}, then {backward}, without {left_out}")
    assert "rms_norm_forward" in launched


# Saved tensors


def _in_another_order(saved):
    """The same numbers, with the first and the last dimension the other way round in memory."""
    return saved.transpose(0, -1).contiguous().transpose(0, -1) if saved.dim() > 1 else saved


def _in_fp64(saved):
    return saved.double() if saved.is_floating_point() else saved


@pytest.mark.parametrize("returned", [_in_another_order, _in_fp64])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_saved_tensor_hook_may_return_another_layout_or_dtype(kernel, launched, name, returned, seed):
    make, replacement = GRAPHS[name]
    torch.manual_seed(seed)
    original = make()
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.3)
    data, results = torch.randn(TOKENS, HIDDEN_SIZE), []
    ours = with_ours(kernel, original, replacement)
    for layer, unpack in ((original, returned), (ours, returned), (ours, lambda saved: saved)):
        h = data.clone().requires_grad_()
        inputs = h, *layer.parameters()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            out = layer(h)
        try:
            results.append(torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True))
        except RuntimeError as error:  # Two operands of different dtypes.
            results.append(error)
    expected, found, plain = results
    if isinstance(expected, RuntimeError) or isinstance(found, RuntimeError):
        assert returned is _in_fp64, (expected, found)
        return
    for a, b in zip(found, plain, strict=True):
        # Eager's operations on other dtypes and layouts round and add otherwise, a few times.
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-5)), name


@pytest.mark.parametrize("name", GRAPHS)
def test_a_model_may_change_its_dtype_between_the_passes(kernel, launched, name, seed):
    """Autograd does not notice it, and a kernel must not read a weight of another dtype."""
    make, replacement = GRAPHS[name]
    torch.manual_seed(seed)
    original, results = make(), []
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.3)
    data, ours = torch.randn(TOKENS, HIDDEN_SIZE), with_ours(kernel, original, replacement)
    for layer in (original, ours):
        h = data.clone().requires_grad_()
        out = layer(h)
        layer.half()
        try:
            results.append(torch.autograd.grad(out, h, torch.ones_like(out))[0])
        except RuntimeError as error:  # Two operands of different dtypes.
            results.append(error)
    expected, found = results
    if not isinstance(expected, RuntimeError):
        # Weights are rounded to fp16, in eager only where it did not keep a copy.
        assert torch.allclose(found, expected, rtol=1e-2, atol=1e-2), name


# What eager can do


def _zero_gradient(layer):
    x = torch.randn(2, HIDDEN_SIZE, requires_grad=True)
    out = layer(x * 1.0)
    return torch.autograd.grad(out, x, torch._efficientzerotensor(out.shape))[0]


def _jagged(layer):
    rows = [torch.ones(2, HIDDEN_SIZE), torch.ones(3, HIDDEN_SIZE)]
    return layer(torch.nested.nested_tensor(rows, layout=torch.jagged)).values()


def _in_torchscript(layer):
    return torch.jit.script(layer)(torch.ones(2, HIDDEN_SIZE))


def _within_torchscript(layer):
    return torch.jit.script(nn.Sequential(layer, nn.Identity()))(torch.ones(2, HIDDEN_SIZE))


@pytest.mark.filterwarnings("ignore:.*jit.script.*:DeprecationWarning", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "LlamaMLP"])
@pytest.mark.parametrize(
    "call",
    [lambda layer: layer(torch._efficientzerotensor((2, HIDDEN_SIZE))), _zero_gradient, _jagged, _in_torchscript, _within_torchscript],
    ids=["zeros without memory", "as gradient", "jagged", "torch.jit.script", "torch.jit.script of its model"],
)  # fmt: skip
def test_what_eager_can_do(layers, name, call, seed):
    make, replacement = LAYERS[name]
    if call is _zero_gradient and replacement == "TorchGroupNorm":
        pytest.skip("ATen's operator for its gradients reads memory that such a tensor does not have")
    original, results = make(), []
    # TorchScript keeps one type for all modules of a class that are scripted by themselves: the original's comes first.
    for layer in (original, bound(getattr(layers, replacement), copy.deepcopy(original))):
        torch.manual_seed(seed)
        try:
            results.append(call(layer))
        except Exception as error:
            results.append(error)
    expected, found = results
    if call is _in_torchscript and name in (
        "GELU",
        "GELUTanh",
    ):  # TorchScript keeps no function that Python could call.
        assert "script the model around the layer" in str(found)
        return
    assert type(found) is type(expected), results
    if isinstance(expected, torch.Tensor):
        assert_bits_equal(found, expected)


def test_a_layer_of_a_class_that_was_never_scripted(layers):
    norm = bound(layers.LlamaRMSNorm, class_of(nn.Module, NORM)())
    norm.weight, norm.variance_epsilon = nn.Parameter(torch.rand(HIDDEN_SIZE)), 1e-6
    x = torch.randn(2, HIDDEN_SIZE)
    assert_bits_equal(torch.jit.script(norm)(x), type(norm).forward(norm, x))


class Noisy(nn.Module):
    """Another weight each time it is asked for."""

    def forward(self, weight):
        return weight * torch.rand(())


@pytest.mark.parametrize("name", ["nn.RMSNorm", "LlamaRMSNorm"])
def test_a_weight_that_is_computed_is_asked_for_once(layers, name, seed):
    make, replacement = LAYERS[name]
    original, results = make(), []
    nn.utils.parametrize.register_parametrization(original, "weight", Noisy())
    for layer in (original, bound(getattr(layers, replacement), copy.deepcopy(original))):
        torch.manual_seed(seed)
        results.append(layer(torch.ones(2, HIDDEN_SIZE)))
    assert_bits_equal(*results)


# Memory


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2.0


def _parametrized():
    norm = modeling_llama.LlamaRMSNorm(HIDDEN_SIZE)
    nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())
    return norm, "LlamaRMSNorm", norm.parametrizations.weight.original


def _of_a_class_of_its_own():
    class Norm(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            return modeling_llama.LlamaRMSNorm.forward(self, hidden_states)

    norm = Norm(HIDDEN_SIZE)
    return norm, "LlamaRMSNorm", norm.weight


def _of_a_class_that_owns_a_tensor():
    scale = torch.ones(HIDDEN_SIZE)

    class Activation(nn.Module):
        def forward(self, input):
            return nn.functional.silu(input) * scale

    return Activation(), "SiLUActivation", scale


def _mlp_of_a_class_of_its_own():
    class MLP(modeling_llama.LlamaMLP):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    mlp = MLP(modeling_llama.LlamaConfig(hidden_size=HIDDEN_SIZE, intermediate_size=32))
    return mlp, "LlamaMLP", mlp.gate_proj.weight


@pytest.mark.parametrize(
    "make", [_parametrized, _of_a_class_of_its_own, _of_a_class_that_owns_a_tensor, _mlp_of_a_class_of_its_own]
)
def test_nothing_of_a_model_outlives_it(layers, make):
    owned = []
    for _ in range(5):
        layer, replacement, tensor = make()
        bound(getattr(layers, replacement), layer)
        for rows in (1, 2):
            layer(torch.randn(rows, HIDDEN_SIZE))
            layer(torch.randn(rows, HIDDEN_SIZE, requires_grad=True)).sum().backward()
        owned += [weakref.ref(layer), weakref.ref(type(layer)), weakref.ref(tensor)]
        del layer, tensor
    gc.collect()
    gc.collect()
    assert [each() for each in owned] == [None] * len(owned)


def test_reasons_and_verdicts_do_not_grow(layers, module, monkeypatch):
    """One reason for a kind of call, however long sequences are; of verdicts the oldest go."""
    proof = module("proof")
    monkeypatch.setattr(proof, "_refusals", weakref.WeakKeyDictionary())
    monkeypatch.setattr(proof, "_verdicts", {})
    monkeypatch.setattr(proof, "_MAX_VERDICTS", 3)
    norm = bound(layers.LlamaRMSNorm, modeling_llama.LlamaRMSNorm(HIDDEN_SIZE))
    tables = module("rotary_embedding")
    config = modeling_llama.LlamaConfig(hidden_size=HIDDEN_SIZE, num_attention_heads=1)
    rotary = modeling_llama.LlamaRotaryEmbedding(config)
    for length in range(1, 70):
        norm(torch.randn(HIDDEN_SIZE, length).t()[:, None, :1].expand(length, 2, HIDDEN_SIZE))
        positions = torch.zeros(3, 1, length, dtype=torch.int64)
        tables.replacement(rotary, torch.randn(1), positions, type(rotary))
    monkeypatch.setattr(tables.launch, "INTERPRETED", False)
    for length in range(1, 70):
        tables.replacement(rotary, torch.randn(1), torch.zeros(3, 1, length, dtype=torch.int64), type(rotary))
    assert sum(map(len, proof._refusals.values())) <= 4, dict(proof._refusals)
    for number in range(100):
        proof.record_refusal(nn.Identity.forward, f"reason {number}")
    assert len(proof._refusals[nn.Identity.forward]) == proof._MAX_REASONS
    subject = proof.Subject(nn.Identity.forward, torch.device("cpu"), "here")
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    for key in range(7):
        assert proof.kernel_is_proved(key, subject, lambda: iter([("the output", torch.ones(2), torch.ones(2))]))
    assert [*proof._verdicts] == [4, 5, 6]


def test_launchers_are_bounded(kernel, module, monkeypatch):
    """As docs/limits.md says: the oldest go."""
    launch = module("launch")
    most = launch._launcher.cache_info().maxsize
    page = Path(__file__).parent.parent / "docs/limits.md"
    assert f"the last {most} launchers" in " ".join(page.read_text(encoding="utf-8").split())
    monkeypatch.setattr(launch, "_launcher", functools.lru_cache(most)(launch._launcher.__wrapped__))
    function = type("Kernel", (), {"arg_names": ["x_ptr", "SIZE"], "__name__": "kernel"})()
    owned = []
    for size in range(most + 50):
        bound_launch = launch.bind(function, {"SIZE": size}, 4, torch.device("cpu"), (torch.float32,), 1)
        owned.append(bound_launch._launcher.constants["SIZE"])
    assert launch._launcher.cache_info().currsize == most and len({*owned}) == most + 50


# Silence


def _rows(*shape):
    return torch.randn(*shape, HIDDEN_SIZE)


def test_every_refusal_has_a_reason(layers, module, monkeypatch):
    """The report can tell of each why the original ran."""
    proof, add, norm_class = module("proof"), module("add_rms_norm"), modeling_llama.LlamaRMSNorm
    gated, rotary, activation = module("gated_activation"), module("rotary"), module("activation")
    weight, silu = torch.rand(HIDDEN_SIZE), activations.SiLUActivation.forward
    product = gated.product_of(silu)
    wide = _rows(3).requires_grad_()

    def added(x, residual, weight=weight, owner=norm_class, eps=1e-6):
        return add.replacement(x, residual, weight, eps, owner)

    def rotated(cos, **changes):
        return rotary.replacement(
            torch.randn(1, 2, 3, 16), torch.randn(1, 1, 3, 16), cos, torch.randn(1, 3, 16), 1, plain
        )

    def plain(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + modeling_llama.rotate_half(q) * sin, k * cos + modeling_llama.rotate_half(k) * sin

    class Torchs(nn.RMSNorm):
        pass

    cases = {
        "a sum before F.rms_norm": (Torchs.forward, lambda: added(_rows(3), _rows(3), owner=Torchs)),
        "an eps that is no number": (norm_class.forward, lambda: added(_rows(3), _rows(3), eps=torch.ones(()))),
        "a row that is no matrix": (norm_class.forward, lambda: added(_rows(), _rows())),
        "another dtype": (norm_class.forward, lambda: added(_rows(3), _rows(3).half())),
        "another shape": (norm_class.forward, lambda: added(_rows(3), _rows(1))),
        "an odd hidden size": (norm_class.forward, lambda: added(torch.ones(3, 63), torch.ones(3, 63), torch.ones(63))),
        "a long weight": (norm_class.forward, lambda: added(_rows(3), _rows(3), torch.ones(128)[::2])),
        "rows apart": (norm_class.forward, lambda: added(_rows(4)[::2], _rows(4)[::2])),
        "no weight": (norm_class.forward, lambda: added(_rows(3), _rows(3), torch.ones(0))),
        "a subclass": (norm_class.forward, lambda: module("rms_norm").replacement(_rows(3).as_subclass(type("T", (torch.Tensor,), {})), weight, 1e-6, norm_class)),
        "nothing, with gradients": (silu, lambda: activation.replacement(torch.ones(0, requires_grad=True), silu, activation.SILU)),
        "gates that need none": (product, lambda: gated.replacement(_rows(3), wide, silu, activation.SILU)),
        "no gate, with gradients": (product, lambda: gated.replacement(*[torch.ones(0, requires_grad=True)] * 2, silu, activation.SILU)),
        "cos that needs a gradient": (plain, lambda: rotated(torch.randn(1, 3, 16, requires_grad=True))),
    }  # fmt: skip
    for what, (original, call) in cases.items():
        monkeypatch.setattr(proof, "_refusals", weakref.WeakKeyDictionary())
        assert call() is None, what
        assert proof._refusals.get(original), what


def test_gradients_that_no_kernel_takes_have_a_reason(layers, module, monkeypatch):
    proof = module("proof")
    monkeypatch.setattr(proof, "_refusals", weakref.WeakKeyDictionary())
    forget_calls(module)
    x, norm = torch.randn(2, 3, 2, 5, 4, HIDDEN_SIZE, requires_grad=True), modeling_llama.LlamaRMSNorm(HIDDEN_SIZE)
    out = bound(layers.LlamaRMSNorm, norm)(x)
    dy = torch.randn(4, 5, 3, 2, 2, HIDDEN_SIZE).permute(3, 2, 4, 1, 0, 5)
    expected = modeling_llama.LlamaRMSNorm.forward(norm, x)
    for ours, eagers in zip(
        torch.autograd.grad(out, (x, norm.weight), dy), torch.autograd.grad(expected, (x, norm.weight), dy)
    ):
        assert_bits_equal(ours, eagers)
    assert any("gradients" in reason for reason in proof._refusals[modeling_llama.LlamaRMSNorm.forward])


def test_a_mapping_of_decoders_that_no_class_has_the_names_of_warns(kernel, module, monkeypatch):
    mapping = module("mapping")
    monkeypatch.setattr(
        mapping, "LEVELS", {**mapping.LEVELS, "decoder": {**mapping.LAYERS, "Nowhere": "LlamaDecoderLayer"}}
    )
    with pytest.warns(RuntimeWarning, match="Nowhere.*name_layers"):
        kernel.kernel_mapping(level="decoder")

    class Named(nn.Module):
        pass

    replace_kernel_forward_from_hub(Named, "Nowhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.kernel_mapping(level="decoder"), kernel.kernel_mapping()


def test_no_module_is_imported_by_a_public_functions_name(kernel, module, layers):
    """The package's functions stand where modules of their name did: `from . import rms_norm` would give one or the other."""
    package = Path(kernel.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level and node.module is None:
                names = {alias.name for alias in node.names if callable(getattr(kernel, alias.name, None))}
                assert not names, (path.name, names)
    # What is imported again finds modules, not functions.
    for name in ("gated_rms_norm", "replay"):
        importlib.reload(module(name))
    norm = bound(layers.RMSNormGated, Qwen3NextRMSNormGated(HIDDEN_SIZE))
    x, gate = torch.randn(2, 4, HIDDEN_SIZE)
    assert_bits_equal(norm(x, gate), type(norm).forward(norm, x, gate))
