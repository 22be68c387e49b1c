"""Training with the kernels and without, on one GPU: the same bits, in less time and memory.

What runs instead of a kernel has the same bits as well, so every test also shows that the kernel ran.
"""

import copy
import functools
import gc
import statistics
import sys
import time
from contextlib import nullcontext
from types import MethodType

import pytest
import torch
from bits import assert_bits_equal
from kernels import Mode
from places import python_module
from torch.utils.flop_counter import FlopCounterMode
from training import (
    DEVICE,
    TOKENS,
    assert_same,
    forward_and_backward,
    from_kernel,
    kernelized,
    kernels_at_work,
    language_model_loss,
    llama,
    plain_step,
    random_batches,
    train,
)
from transformers.activations import GELUTanh, NewGELUActivation, SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error:lossless-kernels:RuntimeWarning")]

STEPS = 20
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def rms_norm(hidden_size, dtype=FP32):
    norm = LlamaRMSNorm(hidden_size)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm.to(DEVICE, dtype)


class TorchRMSNorm(torch.nn.RMSNorm):
    """As `replace_kernel_forward_from_hub(torch.nn.RMSNorm, "TorchRMSNorm")` makes of its base, but for this file alone."""

    kernel_layer_name = "TorchRMSNorm"


def torch_rms_norm(hidden_size, dtype=FP32):
    norm = TorchRMSNorm(hidden_size)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm.to(DEVICE, dtype)


def silu(hidden_size, dtype=FP32):
    return SiLUActivation()


def gelu_tanh(hidden_size, dtype=FP32):
    return GELUTanh()


def new_gelu(hidden_size, dtype=FP32):
    return NewGELUActivation()


def normal(*shape, dtype=FP32):
    return torch.randn(shape, device=DEVICE).to(dtype)


LAYERS = rms_norm, torch_rms_norm, silu, gelu_tanh, new_gelu
each_layer = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
each_dtype = pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)


# Twenty steps of AdamW


def autocast_step(model, tokens):
    with torch.autocast(DEVICE, BF16):
        loss = language_model_loss(model, tokens)
    loss.backward()
    return loss.detach()


def checkpointed_step(model, tokens, use_reentrant):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert model.is_gradient_checkpointing
    return plain_step(model, tokens)


def accumulating_step(model, tokens):
    losses = []
    for micro_batch in tokens.chunk(4):
        loss = language_model_loss(model, micro_batch) / 4
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def functional_step(model, tokens):
    values = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    arguments = {"labels": tokens, "use_cache": False}
    loss = torch.func.functional_call(model, values, (tokens,), arguments).loss
    gradients = torch.autograd.grad(loss, tuple(values.values()))
    for parameter, gradient in zip(model.parameters(), gradients):
        parameter.grad = gradient
    return loss.detach()


CASES = {
    "bf16": (BF16, plain_step),
    "fp32": (FP32, plain_step),
    "fp16": (FP16, plain_step),
    "checkpointing, reentrant": (BF16, functools.partial(checkpointed_step, use_reentrant=True)),
    "checkpointing": (BF16, functools.partial(checkpointed_step, use_reentrant=False)),
    "autocast": (FP32, autocast_step),
    "accumulation": (BF16, accumulating_step),
    "functional_call": (BF16, functional_step),
}


def train_and_compare(model, kernel, batches, **options):
    """The unkernelized and the kernelized model, both trained."""
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    replaced = kernelized(model, kernel)
    eager = train(first, batches, **options)
    assert_same(train(second, batches, **options), eager, "eager once more")
    with kernels_at_work(replaced, kernel):
        ours = train(replaced, batches, **options)
    assert_same(ours, eager, "kernelized")
    return first, replaced


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same(kernel, seed, case):
    dtype, step = CASES[case]
    # fp16 loses the squares of gradients, and AdamW's usual eps: what it divides by would be 0.
    options = {"eps": 1e-3} if dtype == FP16 else {}
    steps = 6 if dtype == FP16 else STEPS
    train_and_compare(llama(seed, dtype), kernel, random_batches(seed, steps, batch=4), step=step, **options)


@pytest.mark.alone
def test_training_70m_is_the_same_and_faster(kernel, seed):
    model = llama(seed, BF16, hidden_size=1024, intermediate_size=4096, heads=16)
    batches = random_batches(seed, STEPS, batch=8)
    eager, ours = train_and_compare(model, kernel, batches)
    runs = {"eager": eager, "kernelized": ours}
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in runs.items()}
    times = {name: [] for name in runs}
    # In turns, so that clocks, heat and other tenants reach both alike.
    for tokens in [*batches, *batches]:
        for name, model in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            optimizers[name].zero_grad()
            plain_step(model, tokens)
            optimizers[name].step()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    medians = {name: statistics.median(values[3:]) for name, values in times.items()}
    print(f"a step of 8 x {TOKENS} tokens: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in medians.items()))
    assert medians["kernelized"] < medians["eager"]


# Residual streams


class Block(torch.nn.Module):
    """A residual block that norms what goes into its linear layer, or as Olmo 2 and GLM 4 do, what comes out."""

    def __init__(self, hidden_size, norm_last):
        super().__init__()
        self.norm = rms_norm(hidden_size)
        self.linear = torch.nn.Linear(hidden_size, hidden_size, bias=False)
        self.norm_last = norm_last

    def forward(self, h):
        if self.norm_last:
            return h + self.norm(self.linear(h.to(self.linear.weight.dtype)))
        return h + self.linear(self.norm(h).to(self.linear.weight.dtype))


@pytest.mark.parametrize(
    "dtypes", ((BF16, BF16), (FP32, FP32), (BF16, FP32)), ids="activations {0[0]}, norms {0[1]}".format
)
@pytest.mark.parametrize("norm_last", (False, True), ids=("pre-norm", "post-norm"))
def test_gradients_of_residual_blocks(kernel, seed, norm_last, dtypes):
    torch.manual_seed(seed)
    dtype, norm_dtype = dtypes
    original = torch.nn.Sequential(*(Block(512, norm_last) for _ in range(3))).to(DEVICE, dtype)
    for block in original:
        block.norm.to(norm_dtype)
    replaced = kernelized(original, kernel)
    x = normal(4, TOKENS, 512, dtype=dtype)
    dy = normal(*x.shape, dtype=original(x).dtype)
    incoming = []

    def keep_incoming_gradient(module, arguments, output):
        output.register_hook(lambda gradient: incoming.append((gradient, gradient.clone())))

    for block in replaced:
        block.norm.register_forward_hook(keep_incoming_gradient)
    with kernels_at_work(replaced, kernel):
        ours = forward_and_backward(replaced, x, dy)
    assert_same(ours, forward_and_backward(original, x, dy), "kernelized")
    assert len(incoming) == len(replaced)
    # After the norm it is the residual's gradient too.
    for gradient, as_it_came in incoming:
        assert_bits_equal(gradient, as_it_came, "incoming gradient")


# Without gradients


@each_dtype
@each_layer
def test_no_grad_keeps_no_statistics(kernel, seed, layer, dtype):
    torch.manual_seed(seed)
    original = layer(1024, dtype)
    replaced = kernelized(original, kernel)
    x = normal(64, 1024, dtype=dtype).requires_grad_()
    assert from_kernel(replaced(x), kernel)
    for without_grad in (torch.no_grad, torch.inference_mode):
        with without_grad():
            expected = original(x)
            assert_bits_equal(replaced(x), expected)
            before = torch.cuda.memory_stats()
            out = replaced(x)
            after = torch.cuda.memory_stats()
        allocations, requested = (
            after[key] - before[key] for key in ("allocation.all.allocated", "requested_bytes.all.allocated")
        )
        assert (allocations, requested) == (1, out.nbytes)


def test_model_kernelized_for_training_infers_the_same(kernel, seed):
    original = llama(seed, BF16)
    replaced = kernelized(original, kernel)
    (tokens,) = random_batches(seed, 1, batch=4)
    with torch.no_grad():
        assert_bits_equal(replaced(tokens).logits, original(tokens).logits)


# torch.compile and CUDA graphs. Inductor fuses and so rounds the rest of a model in its own way: layers are compared.


def operators(kernel):
    """The namespace of the operators that the kernel registers, and their names."""
    namespace = python_module(kernel, "_ops")._OPS_NAME
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    return namespace, {name for owner, name in names if owner == namespace}


@pytest.mark.parametrize(
    "options, rows",
    [({"dynamic": True}, (5, 118, 16, 1000, 3)), ({"mode": "reduce-overhead"}, (118,) * 5)],
    ids=("dynamic", "reduce-overhead"),
)
@each_dtype
@each_layer
def test_compiled_layer_is_the_uncompiled_one(kernel, seed, layer, dtype, options, rows):
    torch.manual_seed(seed)
    torch.compiler.reset()
    original = layer(1024, dtype)
    uncompiled = kernelized(original, kernel, Mode.TRAINING | Mode.TORCH_COMPILE)
    compiled = torch.compile(uncompiled, fullgraph=True, **options)
    directly = [0] * len(rows)

    def count(frame, event, _):
        of_site = frame.f_code.co_name == "call" and frame.f_code.co_filename.endswith("core/operators.py")
        directly[index] += event == "call" and of_site

    for index, number in enumerate(rows):
        x, dy = normal(number, 1024, dtype=dtype), normal(number, 1024, dtype=dtype)
        torch.compiler.cudagraph_mark_step_begin()
        # The backward pass runs in another thread, which is not watched.
        sys.setprofile(count)
        try:
            with torch._dynamo.config.patch(error_on_recompile=True):
                actual = forward_and_backward(compiled, x, dy)
        finally:
            sys.setprofile(None)
        label = f"call {index}, {number} rows"
        assert_same(actual, forward_and_backward(uncompiled, x, dy), f"{label}, uncompiled")
        assert_same(actual, forward_and_backward(original, x, dy), f"{label}, original")
    norms = ("rms_norm_with_rstd", "rms_norm_backward")
    names = norms if layer in (rms_norm, torch_rms_norm) else ("activation", "activation_backward")
    direct = python_module(kernel, "core.operators").DIRECT
    assert {each._opname for each in direct if each.sites} >= set(names)
    # A CUDA graph that is replayed calls no operators.
    assert directly[0] and bool(directly[-1]) == ("mode" not in options)


class Parts(torch.nn.Module):
    """Two norms, with a graph break or work of the CPU in between."""

    def __init__(self, of_the_cpu: bool):
        super().__init__()
        self.first, self.second = rms_norm(1024, BF16), rms_norm(1024, BF16)
        self.of_the_cpu = of_the_cpu

    def forward(self, x):
        x = self.first(x)
        if self.of_the_cpu:
            x = x.cpu().to(self.second.weight.device)
        else:
            torch._dynamo.graph_break()
        return self.second(x)


@pytest.mark.parametrize("of_the_cpu", [False, True], ids=("graph break", "work of the CPU"))
def test_cuda_graphs_of_parts_of_a_model(kernel, seed, of_the_cpu):
    """A part's operators get what another part's CUDA graph wrote."""
    torch.manual_seed(seed)
    torch.compiler.reset()
    original = Parts(of_the_cpu)
    uncompiled = kernelized(original, kernel, Mode.TRAINING | Mode.TORCH_COMPILE)
    compiled = torch.compile(uncompiled, mode="reduce-overhead")
    for index in range(6):
        x, dy = normal(118, 1024, dtype=BF16), normal(118, 1024, dtype=BF16)
        torch.compiler.cudagraph_mark_step_begin()
        expected = forward_and_backward(original, x, dy)
        assert_same(forward_and_backward(compiled, x, dy), expected, f"call {index}")


def capture(function, warm_up):
    """A CUDA graph of a call of `function`, and what the call returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            warm_up()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def assert_replays_as_eager(graph, result, original, x, dy):
    for _ in range(3):
        with torch.no_grad():
            x.normal_()
            dy.normal_()
        graph.replay()
        expected = forward_and_backward(original, x, dy)
        for actual, (name, tensor) in zip(result, expected.items(), strict=True):
            assert_bits_equal(actual, tensor, name)


def forward_and_gradients(layer, x, dy):
    def call():
        out = layer(x)
        return out, *torch.autograd.grad(out, (x, *layer.parameters()), dy)

    return call


@each_dtype
@each_layer
def test_cuda_graph_of_forward_and_backward(kernel, seed, layer, dtype):
    torch.manual_seed(seed)
    original = layer(1024, dtype)
    replaced = kernelized(original, kernel)
    x, dy = normal(TOKENS, 1024, dtype=dtype).requires_grad_(), normal(TOKENS, 1024, dtype=dtype)
    call = forward_and_gradients(replaced, x, dy)
    with kernels_at_work(replaced, kernel):
        graph, result = capture(call, warm_up=call)
    assert from_kernel(result[0], kernel)
    assert_replays_as_eager(graph, result, original, x, dy)


def test_cuda_graph_of_an_unproved_layer_has_its_original_forward(kernel, seed):
    class Unproved(LlamaRMSNorm):
        # A function of its own, which no proof has met.
        def forward(self, hidden_states):
            h = hidden_states.to(FP32)
            normalized = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * normalized.to(hidden_states.dtype)

    torch.manual_seed(seed)
    original = Unproved(1024).to(DEVICE, BF16)
    torch.nn.init.uniform_(original.weight, 0.5, 1.5)
    replaced = kernelized(original, kernel)
    x, dy = normal(TOKENS, 1024, dtype=BF16).requires_grad_(), normal(TOKENS, 1024, dtype=BF16)
    call, warm_up = forward_and_gradients(replaced, x, dy), forward_and_gradients(original, x, dy)
    graph, result = capture(call, warm_up)
    assert not from_kernel(result[0], kernel)
    assert_replays_as_eager(graph, result, original, x, dy)
    assert from_kernel(replaced(x), kernel), "the refusal outlived the capture"


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "new_gelu", "fast_gelu", "quick_gelu")
GATED = ("silu", "gelu", "gelu_tanh")


@each_dtype
def test_operators_keep_torch_library_rules(kernel, seed, dtype):
    torch.manual_seed(seed)
    x, dy, weight = normal(TOKENS, 256, dtype=dtype), normal(TOKENS, 256, dtype=dtype), normal(256, dtype=dtype)
    rstd = torch.rand(TOKENS, 1, device=DEVICE)
    leaf, weight_leaf = x.clone().requires_grad_(), weight.clone().requires_grad_()
    up = normal(TOKENS, 256, dtype=dtype).requires_grad_()
    samples = {
        "rms_norm": [(x, weight, 1e-6, "llama"), (x, weight, 1e-6, "fused")],
        "rms_norm_with_rstd": [
            (leaf, weight_leaf, leaf if dtype == FP32 else None, 1e-6, "llama"),
            (leaf, weight_leaf, None, 1e-6, "fused"),
        ],
        "rms_norm_backward": [
            (dy, x, weight, rstd, *needs, name)
            for needs in ((True, True), (True, False), (False, True))
            for name in ("llama", "fused")
        ],
        "activation": [(name, leaf) for name in ACTIVATIONS],
        "activation_backward": [(name, dy, x) for name in ACTIVATIONS],
        "gated_activation": [(name, up, leaf) for name in GATED],
        "gated_activation_backward": [(name, dy, up.detach(), x) for name in GATED],
        "add_rms_norm": [(x, dy, weight, 1e-6, "llama")],
        "add_rms_norm_with_rstd": [(leaf, up, weight_leaf, 1e-6, "llama")],
        "add_rms_norm_backward": [
            (dy, x, weight, rstd, d_total, *needs, "llama")
            for needs in ((True, True), (True, False), (False, True))
            for d_total in (None, up.detach())
        ],
    }
    y = leaf.softmax(-1)
    samples |= {"softmax": [(leaf, None)], "softmax_backward": [(dy, y.detach(), dtype)]}
    # tests/test_cohere_layer_norm.py has these.
    samples |= {"cohere_layer_norm": [], "cohere_layer_norm_backward": []}
    # tests/test_layer_norm.py has these.
    samples |= {"layer_norm": [], "layer_norm_backward": []}
    # tests/test_group_norm.py has these.
    samples |= {"group_norm": [], "group_norm_backward": []}
    # tests/test_divergences.py has these.
    samples |= {"divergence": [], "divergence_backward": []}
    # tests/test_dyt.py and tests/test_complex_rotary.py have these.
    samples |= {"dyt": [], "dyt_backward": [], "complex_rotary": [], "complex_rotary_backward": []}
    # tests/test_masked_softmax.py has these.
    samples |= {"masked_softmax": [], "masked_softmax_backward": []}
    # tests/test_rotary.py has these.
    samples |= {"rotary": [], "rotary_backward": []}
    namespace, names = operators(kernel)
    assert set(samples) == {name for name in names if not name.endswith("_into")}
    for name, calls in samples.items():
        for arguments in calls:
            overload = getattr(getattr(torch.ops, namespace), name).default
            torch.library.opcheck(overload, arguments)
            if f"{name}_into" in names:
                given = [each.detach() if isinstance(each, torch.Tensor) else each for each in arguments]
                outs = overload(*given)
                outs = (outs,) if isinstance(outs, torch.Tensor) else outs
                torch.library.opcheck(getattr(getattr(torch.ops, namespace), f"{name}_into").default, (*given, *outs))


# Second order, and functorch


def first_and_second_order(layer, x, dy, v, q):
    """The gradients under create_graph, and those of <v, input's gradient> + <q, weight's gradient>."""
    x, dy = x.clone().requires_grad_(), dy.clone().requires_grad_()
    parameters = tuple(layer.parameters())
    first = torch.autograd.grad(layer(x), (x, *parameters), dy, create_graph=True)
    return first, torch.autograd.grad(first, (x, dy, *parameters), (v, q)[: len(first)])


def test_double_backward_of_rms_norm(kernel, seed):
    torch.manual_seed(seed)
    rows, hidden_size = 20, 64
    original = rms_norm(hidden_size)
    replaced = kernelized(original, kernel)
    x, dy, v = (normal(rows, hidden_size) for _ in range(3))
    q = normal(hidden_size)
    assert from_kernel(replaced(x), kernel)
    first, second = first_and_second_order(replaced, x, dy, v, q)
    expected_first, expected_second = first_and_second_order(original, x, dy, v, q)
    for name, actual, expected in zip(("input", "weight"), first, expected_first, strict=True):
        assert_bits_equal(actual, expected, f"gradient of the {name}")

    # With g = w dy and <a, b> = sum(ab) / n, the first order is dx = r g - r^3 x <x, g> and dw = sum over rows of r x dy.
    # What differentiates both once more is a sum of products, here with the absolute value of each. Whoever evaluates
    # them in fp32, in whatever order, is within m u of the sum of these, u = 2^-24, if no product meets more than m
    # roundings: 2.5 (n + 10) in r^5 (r is the root of a sum of n squares, to 3 u), 2 n in two inner products, one a row in
    # the sum for w, and fewer than 50 in products and the other sums. Two evaluations are twice as far apart.
    w, x, dy, v, q = (t.detach().double().abs() for t in (original.weight, x, dy, v, q))
    g = w * dy
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True))

    def inner(a, b):
        return (a * b).mean(-1, keepdim=True)

    of_gradient = r * v + r**3 * x * inner(v, x)
    magnitudes = {
        "input": r**3 * (x * inner(v, g) + v * inner(x, g) + g * inner(v, x))
        + 3 * r**5 * x * inner(v, x) * inner(x, g)
        + r * q * dy
        + r**3 * x * inner(q * dy, x),
        "incoming gradient": w * of_gradient + r * q * x,
        "weight": (dy * of_gradient).sum(0),
    }
    roundings = 2.5 * (hidden_size + 10) + 2 * hidden_size + rows + 50
    for (name, magnitude), actual, expected in zip(magnitudes.items(), second, expected_second, strict=True):
        excess = ((actual.double() - expected.double()).abs() / (2 * roundings * 2**-24 * magnitude)).max().item()
        print(f"second order, {name}: {excess:.2g} of what is allowed")
        assert excess <= 1


@each_dtype
@each_layer
def test_first_order_under_create_graph(kernel, seed, layer, dtype):
    torch.manual_seed(seed)
    original = layer(256, dtype)
    replaced = kernelized(original, kernel)
    x, dy, v = (normal(TOKENS, 256, dtype=dtype) for _ in range(3))
    q = normal(256, dtype=dtype)
    assert from_kernel(replaced(x.requires_grad_()), kernel)
    first, second = first_and_second_order(replaced, x, dy, v, q)
    expected_first, expected_second = first_and_second_order(original, x, dy, v, q)
    for actual, expected in zip(first, expected_first, strict=True):
        assert_bits_equal(actual, expected)
    if layer in (silu, gelu_tanh):
        # Eager differentiates the same elementwise operations one by one, in one order.
        for actual, expected in zip(second, expected_second, strict=True):
            assert_bits_equal(actual, expected)


TRANSFORMS = {
    "grad": lambda layer, x, v: torch.func.grad(lambda x: (layer(x) * v).sum())(x),
    "vmap": lambda layer, x, v: torch.func.vmap(layer)(x),
    "vmap of grad": lambda layer, x, v: torch.func.vmap(torch.func.grad(lambda x, v: (layer(x) * v).sum()))(x, v),
    "jvp": lambda layer, x, v: torch.func.jvp(layer, (x,), (v,)),
    "jacrev": lambda layer, x, v: torch.func.jacrev(layer)(x[0, :2]),
    "grad by the parameters": lambda layer, x, v: torch.func.grad(
        lambda parameters: (torch.func.functional_call(layer, parameters, x) * v).sum()
    )({name: parameter.detach() for name, parameter in layer.named_parameters()}),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@each_dtype
@each_layer
def test_functorch(kernel, seed, layer, dtype, transform):
    torch.manual_seed(seed)
    original = layer(256, dtype)
    replaced = kernelized(original, kernel)
    x, v = normal(3, 17, 256, dtype=dtype), normal(3, 17, 256, dtype=dtype)
    assert from_kernel(replaced(x.clone().requires_grad_()), kernel)
    actual, expected = (
        torch.utils._pytree.tree_leaves(TRANSFORMS[transform](module, x, v)) for module in (replaced, original)
    )
    for ours, eager in zip(actual, expected, strict=True):
        assert_bits_equal(ours, eager)


# Memory


def peak_of_forward_and_backward(function, x, weight, dy):
    """The most bytes at once on top of the arguments; the output is kept, as a model keeps it."""

    def run():
        out = function(x)
        return out, *torch.autograd.grad(out, (x, weight), dy)

    # What was asked for: the allocator may hand out a little more, depending on what it has at hand. Counted from before the
    # first run: right after one an output's 128 MiB have been seen to be still held, on a machine with work for every core.
    gc.collect()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    run()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@pytest.fixture
def large(kernel, seed):
    torch.manual_seed(seed)
    rows, hidden_size = 16384, 4096
    original = rms_norm(hidden_size, BF16)
    x, dy = normal(rows, hidden_size, dtype=BF16).requires_grad_(), normal(rows, hidden_size, dtype=BF16)
    replaced = kernelized(original, kernel)
    with kernels_at_work(replaced, kernel):
        ours = peak_of_forward_and_backward(replaced, x, replaced.weight, dy)
    return original, x, dy, ours


def test_peak_memory_is_far_below_eagers(large):
    original, x, dy, ours = large
    eager = peak_of_forward_and_backward(original, x, original.weight, dy)
    print(
        f"peak of forward and backward of {list(x.shape)}: eager {eager / 2**20:.1f} MiB, ours {ours / 2**20:.1f} MiB"
    )
    # When eager's forward returns it holds two fp32 copies of the input, itself and normalized: 8 bytes an element.
    assert ours <= eager - 8 * x.numel() / 2


def test_peak_memory_is_not_above_ligers(kernel, large):
    reason = "liger_kernel is not installed, there is nothing to compare with"
    liger = pytest.importorskip("liger_kernel.ops.rms_norm", reason=reason).LigerRMSNormFunction
    original, x, dy, ours = large

    def out_of_place(x):
        return liger.apply(x, original.weight, original.variance_epsilon, 0.0, "llama", False, None)

    theirs = peak_of_forward_and_backward(out_of_place, x, original.weight, dy)
    print(
        f"peak of forward and backward of {list(x.shape)}: Liger {theirs / 2**20:.2f} MiB, ours {ours / 2**20:.2f} MiB"
    )
    assert ours <= theirs


@pytest.mark.parametrize("watched", ["forward", "backward"])
def test_a_flop_counter_may_watch_half_of_a_checkpointed_step(kernel, seed, watched):
    model = llama(seed, BF16)
    ours = kernelized(model, kernel)
    (tokens,) = random_batches(seed, 1, batch=2)
    found = []
    for each in (ours, model):
        each.gradient_checkpointing_enable({"use_reentrant": False})
        each.train()
        modes = [
            FlopCounterMode(display=False) if watched == part else nullcontext() for part in ("forward", "backward")
        ]
        with modes[0]:
            loss = language_model_loss(each, tokens)
        with modes[1]:
            loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in each.parameters())])
    for ours, expected in zip(*found, strict=True):
        assert_bits_equal(ours, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_first_call_may_be_inside_a_checkpoint(kernel, seed, reentrant):
    """The proof's own autograd must not reach the checkpoint's hooks."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(seed)
    results = []
    # A size that no other test has proved.
    norm = LlamaRMSNorm(388).to(DEVICE, torch.bfloat16)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x, dy = (torch.randn(40, 388, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    for forward in (norm.forward, MethodType(kernel.layers.LlamaRMSNorm.forward, norm)):
        norm.forward, norm.weight.grad = forward, None
        inputs = x.clone().requires_grad_()
        checkpoint(norm, inputs, use_reentrant=reentrant).backward(dy)
        results.append((inputs.grad, norm.weight.grad))
    for ours, eagers in zip(*results, strict=True):
        assert_bits_equal(ours, eagers)


def test_batched_gradients_run_the_formula(kernel, seed):
    """`is_grads_batched` is older than functorch and looks like plain tensors."""
    torch.manual_seed(seed)
    weight = torch.rand(256, device=DEVICE, requires_grad=True)
    x = torch.randn(8, 256, device=DEVICE, requires_grad=True)
    directions = torch.randn(3, 8, 256, device=DEVICE)
    for function, inputs in ((lambda: kernel.rms_norm(x, weight, 1e-6), (x, weight)), (lambda: kernel.silu(x), (x,))):
        batched = torch.autograd.grad(function(), inputs, directions, is_grads_batched=True)
        single = [torch.autograd.grad(function(), inputs, direction) for direction in directions]
        for index, found in enumerate(batched):
            # A batch of three sums is another reduction than three sums, of at most 256 and 8 terms near 1.
            expected = torch.stack([gradients[index] for gradients in single])
            assert (found - expected).abs().max() <= 256 * torch.finfo(torch.float32).eps * expected.abs().max()
