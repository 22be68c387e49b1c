"""`recompute_products`: the backward pass computes an MLP's product again, with the same bits, and it is not kept until then."""

import copy
import gc

import pytest
import torch
from bits import assert_bits_equal
from cpu_kernels import cpu_arithmetic
from kernels import Mode
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

pytestmark = pytest.mark.either
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, INTERMEDIATE, TOKENS = 32, 64, 48
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": 2, "vocab_size": 64}
MLPS = {LlamaMLP: "silu", GemmaMLP: "gelu_pytorch_tanh", Phi3MLP: "silu"}
each_mlp = pytest.mark.parametrize("layer_class", MLPS, ids=lambda each: each.__name__)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.fixture(autouse=True)
def launched(kernel):
    """How often each kernel ran; on a CPU the CPU's own arithmetic stands in for kernels, and they are proved."""
    if DEVICE == "cuda":
        yield None
        return
    with cpu_arithmetic(kernel) as found:
        yield found


class MLP(nn.Module):
    """One MLP, to be applied to as a model is."""

    def __init__(self, seed, layer_class=LlamaMLP, dtype=torch.float32, bias=False):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.mlp = layer_class(LlamaConfig(**SIZES, hidden_act=MLPS[layer_class], mlp_bias=bias)).to(DEVICE, dtype)

    def forward(self, x):
        return self.mlp(x)


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def applied(kernel, model, recompute=True):
    model = copy.deepcopy(model)
    kernel.apply(model, Mode.TRAINING)
    if recompute:
        assert kernel.recompute_products(model) == len([m for m in model.modules() if type(m) in MLPS])
    return model


def results(model, seed, dtype=torch.float32, shape=(2, TOKENS, HIDDEN)):
    x = normal(seed, *shape, dtype=dtype).requires_grad_()
    out = model(x)
    return [
        out.detach(),
        *torch.autograd.grad(out, [x, *(p for p in model.parameters() if p.requires_grad)], out.cos()),
    ]


def assert_same(found, expected):
    for ours, eagers in zip(found, expected, strict=True):
        assert_bits_equal(ours, eagers)
        assert ours.stride() == eagers.stride()


def kept(model, seed) -> float:
    """What the forward pass leaves for the backward pass, in products of `[tokens, intermediate_size]`."""
    x = normal(seed, TOKENS, HIDDEN).requires_grad_()
    model(x)  # The first call compares formulas.
    gc.collect()  # The allocator reports what is freed too.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = model(x)
    events = profile.profiler.kineto_results.events()
    held = sum(event.nbytes() for event in events if event.name() == "[memory]")
    return (held - out.numel() * out.itemsize) / (TOKENS * INTERMEDIATE * x.itemsize)


@each_mlp
@each_dtype
def test_bits_are_eagers(kernel, launched, seed, layer_class, dtype):
    model = MLP(seed, layer_class, dtype)
    expected = results(model, seed, dtype)
    ours = applied(kernel, model)
    assert_same(results(ours, seed, dtype), expected)
    if launched is not None:
        launched.clear()
        results(ours, seed, dtype)
        assert launched == {"gated_activation_forward": 2, "gated_activation_backward": 1}
    with torch.no_grad():
        x = normal(seed, 3, HIDDEN, dtype=dtype)
        assert_bits_equal(applied(kernel, model)(x), model(x))


@pytest.mark.skipif(DEVICE == "cuda", reason="the CPU's allocator is asked")
def test_two_tensors_of_four_are_kept(kernel, seed):
    model = MLP(seed)
    assert kept(model, seed) == 4
    assert kept(applied(kernel, model, recompute=False), seed) == 3
    assert kept(applied(kernel, model), seed) == 2
    assert kept(applied(kernel, MLP(seed, Phi3MLP)), seed) == 2


def test_gradients_of_gradients(kernel, seed):
    """Those of the layer that keeps its product, whose terms are not added in eager's order (docs/limits.md)."""
    model, penalties = MLP(seed), []
    for each in (applied(kernel, model), applied(kernel, model, recompute=False)):
        x = normal(seed, TOKENS, HIDDEN).requires_grad_()
        (gradient,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        penalties.append(torch.autograd.grad(gradient.square().sum(), [x, *each.parameters()]))
    assert_same(*penalties)


def test_a_graph_that_is_kept_is_used_again(kernel, seed):
    model = applied(kernel, MLP(seed))
    out = model(normal(seed, TOKENS, HIDDEN).requires_grad_())
    first, second = (torch.autograd.grad(out.sum(), model.mlp.down_proj.weight, retain_graph=True) for _ in range(2))
    assert_same(first, second)


class LowRank(nn.Module):
    """A frozen linear layer with an adapter, as LoRA wraps it. Both read the product."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(*shape, bias=False).to(base.weight) for shape in ((INTERMEDIATE, 4), (4, HIDDEN))
        )

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Writes(nn.Module):
    """Changes its input, and saves what it then is."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x.mul_(0.5))


class Saves(nn.Module):
    """Saves its own result, the same memory in other shapes and dtypes, and something else."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        halves = x.view(-1, 2, INTERMEDIATE // 2).transpose(0, 1) * 1.5
        return torch.tanh(self.base(x * x)) + halves.sum() * x.sum().sin()


@pytest.mark.parametrize("wrapper", [LowRank, Writes, Saves])
def test_any_last_projection(kernel, seed, wrapper):
    model = MLP(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.mlp.down_proj = wrapper(model.mlp.down_proj).to(DEVICE)
    ours = applied(kernel, model)
    assert_same(results(ours, seed), results(model, seed))


def test_a_bias_and_a_batch_without_rows(kernel, seed):
    model = MLP(seed, bias=True)
    for shape in ((TOKENS, HIDDEN), (0, HIDDEN), (HIDDEN,), (1, 1, HIDDEN)):
        assert_same(results(applied(kernel, model), seed, shape=shape), results(model, seed, shape=shape))


def test_later_writes_are_errors_as_in_eager(kernel, seed):
    for original in (True, False):
        for name in ("down_proj", "up_proj"):
            model, seen = MLP(seed), []
            model = model if original else applied(kernel, model)
            model.mlp.up_proj.register_forward_hook(lambda module, arguments, out, seen=seen: seen.append(out))
            out = model(normal(seed, TOKENS, HIDDEN).requires_grad_())
            with torch.no_grad():
                (seen[0] if name == "up_proj" else model.mlp.down_proj.weight).mul_(2.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(out.sum(), [model.mlp.down_proj.weight, model.mlp.gate_proj.weight])
    # The weight's gradient alone reads the product, which is computed from up.
    model, seen = applied(kernel, MLP(seed)), []
    model.mlp.up_proj.register_forward_hook(lambda module, arguments, out: seen.append(out))
    out = model(normal(seed, TOKENS, HIDDEN))
    with torch.no_grad():
        seen[0].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), model.mlp.down_proj.weight)


def test_other_saved_tensor_hooks_see_the_product(kernel, launched, seed):
    """A checkpoint counts what both of its computations save, and a user's hooks may move everything to another place."""
    model = MLP(seed)
    ours, seen = applied(kernel, model), {True: [], False: []}
    for mine in (True, False):
        each = ours if mine else applied(kernel, model, recompute=False)
        with saved_tensors_hooks(lambda t, mine=mine: seen[mine].append(t.shape) or t.clone(), lambda t: t):
            assert_same(results(each, seed), results(model, seed))
    assert seen[True] == seen[False] and seen[True]
    with save_on_cpu():
        assert_same(results(ours, seed), results(model, seed))

    def checkpointed(model):
        return lambda x: checkpoint(model, x, use_reentrant=False)

    x = [normal(seed, TOKENS, HIDDEN).requires_grad_() for _ in range(2)]
    for one, each in zip(x, (ours, model)):
        checkpointed(each)(one).square().sum().backward()
    assert_bits_equal(x[0].grad, x[1].grad)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        assert_same(results(ours, seed), results(model, seed))


def test_autocast_and_compile(kernel, seed):
    model = MLP(seed)
    ours = applied(kernel, model)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_same(results(ours, seed), results(model, seed))
    torch._dynamo.reset()
    x = normal(seed, TOKENS, HIDDEN)
    assert_bits_equal(torch.compile(ours, backend="aot_eager", fullgraph=True)(x), ours(x))


def test_a_model_on_and_off(kernel, module, seed):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=2)).to(DEVICE).train()
    tokens = torch.randint(64, (2, 9), device=DEVICE)

    def step(model):
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    expected, states = step(model), [dict(vars(each)) for each in model.modules()]
    kernel.apply(model)
    is_marked = module("recompute").is_marked
    assert kernel.recompute_products(model) == 2 == sum(map(is_marked, model.modules()))
    assert_same(step(model), expected)
    assert kernel.recompute_products(model, False) == 2
    assert not any(map(is_marked, model.modules()))
    kernel.recompute_products(copy.deepcopy(model).model.layers[0])
    kernel.recompute_products(model)
    kernel.restore(model)
    assert [dict(vars(each)).keys() for each in model.modules()] == [state.keys() for state in states]
    assert_same(step(model), expected)


def test_bad_input(kernel, seed):
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, found"):
        kernel.recompute_products(LlamaMLP)
    with pytest.raises(ValueError, match=r"model: expected gated MLPs .*: apply\(model\) first"):
        kernel.recompute_products(MLP(seed))
    with pytest.raises(TypeError, match="recompute: expected True or False, found 'yes'"):
        kernel.recompute_products(applied(kernel, MLP(seed)), "yes")
