"""Routers of experts: the class's own forward, with softmax from the kernel. On a CPU launches return the CPU's own bits."""

import contextlib
import copy
import gc
import pickle
import types
import weakref

import pytest
import torch
from bits import assert_bits_equal, bits_equal
from cpu_kernels import cpu_arithmetic
from kernels import Mode, kernelize, use_kernel_mapping
from places import modeling
from sweep import router
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

pytestmark = pytest.mark.either

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUTERS = (Qwen3_5MoeTopKRouter, Qwen3MoeTopKRouter, MixtralTopKRouter)
HIDDEN_SIZE = 256
each_router = pytest.mark.parametrize("owner", ROUTERS)


@pytest.fixture(autouse=True)
def launched(kernel, nothing_known, monkeypatch):
    """Verification decides, and begins anew; on a CPU, how often each kernel ran."""
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    with cpu_arithmetic(kernel) if DEVICE == "cpu" else contextlib.nullcontext() as launched:
        yield launched


def make(owner, seed, dtype=torch.float32):
    made, generator = router(owner).to(DEVICE), torch.Generator(DEVICE).manual_seed(seed)
    for parameter in made.parameters():
        parameter.data.normal_(generator=generator)
    return made.to(dtype)


def bound(kernel, original):
    """A copy with our forward, whatever the class's is."""
    ours = copy.deepcopy(original)
    ours.forward = types.MethodType(kernel.layers.SoftmaxTopKRouter.forward, ours)
    return ours


def replaced(kernel, original):
    ours = copy.deepcopy(original)
    kernel.apply(ours)
    assert ours.forward.__func__ is kernel.layers.SoftmaxTopKRouter.forward
    return ours


def draw(seed, *shape, dtype=torch.float32):
    generator = torch.Generator(DEVICE).manual_seed(seed + 1)
    return torch.randn(*shape, HIDDEN_SIZE, generator=generator, device=DEVICE).to(dtype)


def results(layer, x, grad=True, call=lambda layer, x: layer(x)):
    """The outputs, and the gradients of x and the weight."""
    x = x.clone().requires_grad_(grad)
    outs = call(layer, x)
    if not grad:
        return outs
    of = [out for out in outs if out.requires_grad]
    found = torch.autograd.grad([out.float().sin().sum() for out in of], (x, layer.weight))
    return *(out.detach() for out in outs), *found


def assert_equal(found, expected, label=""):
    for number, pair in enumerate(zip(found, expected, strict=True)):
        assert_bits_equal(*pair, f"result {number} {label}")


def entry_of(kernel, layer):
    (entry,) = kernel.replacement_report(layer, verbose=False).layers
    return entry


@each_router
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_and_gradients_are_eagers(kernel, launched, seed, owner, dtype):
    original = make(owner, seed, dtype)
    ours = replaced(kernel, original)
    for shape in ((7,), (2, 9), (1, 1)):
        for grad in (False, True):
            x = draw(seed, *shape, dtype=dtype)
            with torch.set_grad_enabled(grad):
                assert_equal(results(ours, x, grad), results(original, x, grad), f"{shape}, gradients {grad}")
    entry = entry_of(kernel, ours)
    assert (entry.layer, entry.path, entry.formulas) == (owner.__name__, "kernel", ["softmax"])
    assert launched is None or {*launched} == {"softmax_forward", "softmax_backward"}


@pytest.mark.skipif(DEVICE == "cuda", reason="on the GPU the kernels' arithmetic is their own")
def test_the_kernels_softmax_is_the_one_that_counts(kernel, monkeypatch, seed):
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    original = make(Qwen3MoeTopKRouter, seed)
    x = draw(seed, 5)
    flat = {"softmax_forward": lambda constants, scalars, x, y: y.fill_(1.0 / y.shape[-1])}
    with cpu_arithmetic(kernel, flat):
        logits, scores, _ = replaced(kernel, original)(x)
    expected, others, _ = original(x)
    assert_bits_equal(logits, expected)
    assert not bits_equal(scores, others) and torch.equal(scores, torch.full_like(scores, 1 / scores.shape[-1]))


@pytest.mark.parametrize("mode", [Mode.INFERENCE, Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE], ids=str)
def test_kernelize_replaces_the_class_that_transformers_decorates(kernel, seed, mode):
    original = make(Qwen3_5MoeTopKRouter, seed)
    ours, x = copy.deepcopy(original), draw(seed, 3)
    kernel.name_layers(ours)  # Where the decorators do nothing.
    with use_kernel_mapping(kernel.kernel_mapping(devices=(DEVICE,)), inherit_mapping=False):
        kernelize(ours, mode=mode, device=DEVICE)
    assert ours.forward.__func__ is kernel.layers.SoftmaxTopKRouter.forward
    assert_equal(results(ours, x), results(original, x))


def test_a_forward_without_softmax_is_the_original(kernel, seed):
    """transformers gives Laguna's router of sigmoids the same layer name."""
    original = make(modeling("laguna").LagunaTopKRouter, seed)
    ours, x = bound(kernel, original), draw(seed, 3)
    assert_equal(results(ours, x), results(original, x))
    entry = entry_of(kernel, ours)
    assert entry.path == "original" and "calls no torch.nn.functional.softmax" in entry.reasons[0]


# Which classes are named


MODELS = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"num_experts": 4, "moe_intermediate_size": 32}),
}


@pytest.mark.parametrize("name", MODELS)
def test_routers_of_models(kernel, launched, seed, name):
    """Under their own names, and with the logits that transformers' hooks collect."""
    model_class, config, more = MODELS[name]
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    torch.manual_seed(seed)
    model = model_class(config(**sizes, **heads, **more, output_router_logits=True)).to(DEVICE).eval()
    ids = torch.randint(64, (2, 7), device=DEVICE)
    with torch.no_grad():
        expected = model(ids)
        report = kernel.apply(model)
        found = model(ids)
    assert {entry.layer for entry in report.layers} > {f"{config.__name__.removesuffix('Config')}TopKRouter"}
    assert_equal((found.logits, *found.router_logits), (expected.logits, *expected.router_logits))
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    assert len(routers) == 2 and entry_of(kernel, routers[0]).path == "kernel"
    kernel.restore(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert kernel.name_layers(model)[type(routers[0]).__name__] == "SoftmaxTopKRouter"


BODY = """
def forward(self, hidden_states):
    logits = F.linear(hidden_states, self.weight)
    scores = F.softmax(logits, dim=-1, dtype=torch.float)
    values, indices = torch.topk(scores, self.top_k, dim=-1)
    return logits, values, indices
"""
WAYS = {
    "functional": BODY,
    "nn.functional": BODY.replace("F.softmax", "nn.functional.softmax"),
    "torch.nn.functional": BODY.replace("F.softmax", "torch.nn.functional.softmax"),
    "in a nested function": BODY.replace("F.softmax(", "(lambda x, **named: nn.functional.softmax(x, **named))("),
    "after many names": BODY.replace(
        "    ", f"    if self.top_k < 0: {'; '.join(f'name_{n}' for n in range(300))}\n    ", 1
    ),
}
OTHERS = {
    "torch.softmax": BODY.replace("F.softmax", "torch.softmax"),
    "a method": BODY.replace("F.softmax(logits, ", "logits.softmax("),
    "an attribute's": BODY.replace("F.softmax", "self.F.softmax"),
    "of the largest": BODY.replace("scores = ", "indices = torch.topk(logits, self.top_k)\n    scores = "),
    "without the largest": BODY.replace("torch.topk(scores, self.top_k, dim=-1)", "scores.max(-1)"),
    "another argument": BODY.replace("hidden_states):", "hidden_states, mask=None):"),
    "writes a global": BODY.replace("    logits", "    global last\n    last = hidden_states\n    logits", 1),
    "imports": BODY.replace("    logits", "    from torch.nn import functional as F\n    logits", 1),
    "another F": BODY,
}


class Router(nn.Module):
    F = functional

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.top_k = config.num_experts_per_tok


def class_of(source, base=Router, **namespace):
    names = {"torch": torch, "nn": nn, "F": functional, "__name__": __name__, **namespace}
    exec(source, names)
    return type("Written", (base,), {"forward": names["forward"]})


@each_router
def test_names_do_not_need_the_decorators(kernel, seed, monkeypatch, owner):
    monkeypatch.delattr(owner, "kernel_layer_name", raising=False)
    assert kernel.name_layers(make(owner, seed)) == {owner.__name__: "SoftmaxTopKRouter"}


@pytest.mark.parametrize("written", WAYS)
def test_every_way_to_write_it(kernel, launched, seed, written):
    original = make(class_of(WAYS[written]), seed)
    ours, x = bound(kernel, original), draw(seed, 3)
    assert_equal(results(ours, x), results(original, x))
    assert entry_of(kernel, ours).path == "kernel"
    assert kernel.name_layers(original) == ({} if "nested" in written else {"Written": "SoftmaxTopKRouter"})


@pytest.mark.parametrize("written", OTHERS)
@pytest.mark.filterwarnings("ignore:lossless-kernels.*replaced no layer:RuntimeWarning")
def test_what_is_written_otherwise_has_no_name(kernel, seed, written):
    """And where a user gives the name all the same, it computes the same."""
    more = {"F": types.SimpleNamespace(linear=functional.linear, softmax=functional.softmax)}
    owner = class_of(OTHERS[written], **(more if written == "another F" else {}))
    original = make(owner, seed)
    kernel.apply(original)
    assert "forward" not in vars(original) and not hasattr(owner, "kernel_layer_name")
    ours = bound(kernel, original)
    if written != "another argument":
        for found, expected in zip(ours(draw(seed, 3)), original(draw(seed, 3)), strict=True):
            assert_bits_equal(found, expected)


def test_a_forward_that_owns_a_tensor_is_the_original(kernel, seed):
    scale = torch.ones(16, device=DEVICE)

    def forward(self, hidden_states):
        scores = functional.softmax(functional.linear(hidden_states, self.weight) * scale, dim=-1)
        return scores, *torch.topk(scores, self.top_k, dim=-1)

    original = make(type("Owner", (Router,), {"forward": forward}), seed)
    ours, x = bound(kernel, original), draw(seed, 3)
    assert_equal(results(ours, x), results(original, x))
    assert not kernel.name_layers(original)


# What users do with modules


def test_what_the_forward_finds_may_be_replaced(kernel, launched, seed, monkeypatch):
    """The forward of the class, of a subclass, softmax, and what the forward's file calls `F`."""
    owner = class_of(BODY)
    original, x = make(type("Derived", (owner,), {}), seed), draw(seed, 3)
    ours = replaced(kernel, original)
    before = results(original, x)
    assert_equal(results(ours, x), before)
    names = owner.forward.__globals__
    others = types.SimpleNamespace(linear=functional.linear, softmax=lambda x, **_: x.float().sigmoid())

    def unlike_before():
        expected = results(original, x)
        assert not bits_equal(expected[1], before[1])
        assert_equal(results(ours, x), expected)

    for target, name, value in (
        (names, "F", others),
        (owner, "forward", class_of(BODY.replace("return logits, values", "return logits, -values")).forward),
        (type(original), "forward", class_of(BODY.replace("self.weight", "-self.weight")).forward),
        (functional, "softmax", lambda x, dim, stacklevel=3, dtype=None: torch.softmax(x, dim, dtype) * 2.0),
    ):
        with monkeypatch.context() as patch:
            if target is names:
                patch.setitem(target, name, value)
            else:
                patch.setattr(target, name, value)
            unlike_before()
        assert_equal(results(ours, x), before)


def test_a_global_may_come_later(kernel, seed):
    """Also one whose value is None."""
    owner = class_of(BODY.replace("    return logits", "    late = last if self.late else 1\n    return late, logits"))
    original, x = make(owner, seed), draw(seed, 3)
    original.late = False
    ours = bound(kernel, original)
    assert ours(x)[0] == 1
    for value in (None, 2):
        ours.late, owner.forward.__globals__["last"] = True, value
        assert ours(x)[0] == value


@each_router
def test_hooks_copies_and_checkpoints(kernel, launched, seed, owner):
    original, x = make(owner, seed), draw(seed, 3)
    ours = replaced(kernel, original)
    expected = results(original, x)
    again = results(ours, x, call=lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    assert_equal(again, expected)
    assert_equal(results(copy.deepcopy(ours), x), expected)
    restored = copy.deepcopy(ours)
    kernel.restore(restored)
    assert_equal(results(pickle.loads(pickle.dumps(restored)), x), expected)
    seen = []
    for layer in (original, ours):
        layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2.0,))
        layer.register_forward_hook(lambda module, inputs, outs: seen.append(outs[1].detach()) or outs)
    assert_equal(results(ours, x), results(original, x))
    assert len(seen) == 2 and bits_equal(*seen) and not bits_equal(seen[0], expected[1])


@each_router
def test_torch_compile_traces_the_forward(kernel, seed, owner):
    """As eager's own module: its softmax, no break, and no new graph for the same shapes."""
    original, x = make(owner, seed), draw(seed, 3)
    ours, graphs = replaced(kernel, original), []

    def backend(graph, inputs):
        graphs.append([node.name for node in graph.graph.nodes if "softmax" in str(node.target)])
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    for _ in range(2):
        assert_equal(results(compiled, x), results(original, x))
    torch._dynamo.reset()
    assert [len(each) for each in graphs] == [1]


def test_a_layer_of_its_own(kernel, seed):
    source = make(Qwen3_5MoeTopKRouter, seed, torch.bfloat16)
    layer, x = type("Ours", (kernel.layers.SoftmaxTopKRouter,), {})(), draw(seed, 2, 5, dtype=torch.bfloat16)
    layer.weight, layer.top_k = source.weight, source.top_k
    assert_equal(results(layer, x), results(source, x))


def test_warmup_verifies_it(kernel, launched, seed):
    ours = replaced(kernel, make(Qwen3MoeTopKRouter, seed, torch.bfloat16))
    report = kernel.warmup(ours, training=True)
    assert not report.skipped and not report.failed and len(report.proved) == 2, report
    assert entry_of(kernel, ours).path == "kernel"


def test_nothing_of_a_class_outlives_it(kernel, module, seed):
    owned = []
    for _ in range(3):
        layer = bound(kernel, make(class_of(BODY), seed))
        assert module("mapping").missing_name(layer) == "SoftmaxTopKRouter"
        results(layer, draw(seed, 3))
        owned += [
            weakref.ref(layer),
            weakref.ref(type(layer)),
            weakref.ref(type(layer).forward),
            weakref.ref(layer.weight),
        ]
        del layer
    gc.collect()
    gc.collect()
    assert [each() for each in owned] == [None] * len(owned)
