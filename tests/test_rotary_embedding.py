"""The tables of cos and sin: which modules are told to compute them, and the kernel against eager, bit for bit."""

import copy
import itertools
import warnings

import numpy
import pytest
import torch
from bits import assert_bits_equal
from kernels import Mode, kernelize, use_kernel_mapping
from places import python_module
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

gpu = pytest.mark.gpu
pytestmark = pytest.mark.filterwarnings("error:lossless-kernels:RuntimeWarning")

CLASSES = (LlamaRotaryEmbedding, MistralRotaryEmbedding, Qwen3RotaryEmbedding)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def tables(kernel):
    return python_module(kernel, "rotary_embedding")


def config(head_dim=64, max_position_embeddings=2048, **parameters):
    parameters = {"rope_type": "default", "rope_theta": 10000.0, **parameters}
    return LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, rope_parameters=parameters, num_hidden_layers=1,
        max_position_embeddings=max_position_embeddings,
        intermediate_size=32, vocab_size=16,
    )  # fmt: skip


def kernelized(kernel, module, device_type):
    kernel.name_layers(module)
    mapping = kernel.kernel_mapping(level="decoder", devices=(device_type,))
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(module, mode=Mode.INFERENCE, device=device_type)
    assert vars(module)["forward"].__func__.__module__ == kernel.layers.__name__
    return module


def test_classes_are_told_apart_by_their_code(tables):
    for layer_class in CLASSES:
        function = tables._function(layer_class.forward)
        assert function.__qualname__ == f"{layer_class.__name__}.forward" and not hasattr(function, "__wrapped__")
    plain = tables._function(LlamaRotaryEmbedding.forward)
    assert tables._function(Gemma3RotaryEmbedding.forward) is None
    assert tables._function(plain) is tables._function(torch.no_grad()(plain)) is None
    for context in (torch.enable_grad(), torch.inference_mode()):
        assert tables._function(context(LlamaRotaryEmbedding.forward.__wrapped__)) is None
    assert tables._function(torch.no_grad()(torch.no_grad()(plain))) is None
    assert tables._function(nn.ReLU().forward) is None


def test_layer_names(kernel):
    model = LlamaForCausalLM(config())
    assert kernel.name_layers(model)["LlamaRotaryEmbedding"] == "LlamaRotaryEmbedding"
    assert "LlamaRotaryEmbedding" not in kernel.kernel_mapping(level="layer")
    assert "LlamaRotaryEmbedding" in kernel.kernel_mapping(level="decoder")


def test_a_buffer_does_not_take_a_name_away(kernel):
    model = LlamaForCausalLM(config())
    model.model.layers[0].register_buffer("steering", torch.zeros(1))
    assert {"LlamaDecoderLayer", "LlamaMLP", "LlamaRotaryEmbedding"} <= set(kernel.name_layers(model))


def test_warmup_leaves_frequencies_alone(kernel):
    """Those that follow the length are computed again for the positions of the warmup, and would be kept."""
    parameters = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
    where = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(config(**parameters, max_position_embeddings=64)).to(where)
    module = kernelized(kernel, model.model.rotary_emb, where)
    x = torch.empty(1, device=where)
    long, short = (torch.arange(length, device=where)[None] for length in (200, 150))
    module(x, long)
    before, buffers = module.inv_freq.clone(), dict(module._buffers)
    report = kernel.warmup(model, rows=[4])
    assert not [text for text in report.skipped if "Rotary" in text]
    assert all(module._buffers[name] is buffer for name, buffer in buffers.items())
    assert module.max_seq_len_cached == 200
    assert_bits_equal(module.inv_freq, before, "frequencies")
    module(x, short)
    assert_bits_equal(module.inv_freq, before, "frequencies of fewer tokens")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's cos and sin are numpy's, a GPU's are eager's")
@pytest.mark.parametrize("half", [1, 5, 64])
def test_kernel_in_the_interpreter(tables, seed, half):
    """Against numpy, whose cos and sin the interpreter takes: where every number comes from and goes to."""
    torch.manual_seed(seed)
    inv_freq = torch.rand(half)
    for dtype, shape in itertools.product((torch.float32, torch.float16), ((1, 1), (3, 7), (2, 40))):
        for positions in (torch.randint(0, 3000, shape), torch.randint(0, 3000, shape[::-1], dtype=torch.int32).t()):
            found = tables._TablesCall(tables.TABLES, positions, inv_freq, dtype, 0.7)(positions, inv_freq)
            angle = positions[..., None].numpy().astype(numpy.float32) * inv_freq.numpy()
            for what, ours, function in zip(("cos", "sin"), found, (numpy.cos, numpy.sin)):
                expected = (torch.from_numpy(function(numpy.concatenate((angle, angle), -1))) * 0.7).to(dtype)
                assert_bits_equal(ours, expected, f"{what}, {list(shape)}")


@pytest.mark.parametrize("number", range(4))
def test_eager_formula(tables, seed, number):
    torch.manual_seed(seed)
    variant = tables._FORMULAS[number]
    positions, inv_freq = torch.randint(0, 500, (2, 9)), torch.rand(8)
    found = variant.eager(torch.empty(0, dtype=torch.float16), positions, inv_freq, 0.5)
    angle = positions.numpy().astype(numpy.float64)[..., None] * inv_freq.numpy().astype(numpy.float64)
    # Within the rounding of an angle up to 500 in fp32, and of the result.
    tolerance = 500 * 2.0**-24 + (2.0**-23 if variant.keeps_fp32 else 2.0**-11)
    for ours, function in zip(found, (numpy.cos, numpy.sin)):
        expected = torch.from_numpy(0.5 * function(numpy.concatenate((angle, angle), -1)))
        assert ours.shape == (2, 9, 16) and ours.dtype == (torch.float32 if variant.keeps_fp32 else torch.float16)
        assert (ours.double() - expected).abs().max() < tolerance


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])
def test_what_keeps_the_original(kernel, tables, seed, where):
    """In the domain nowhere without a GPU, and there not with frequencies that follow the length."""
    torch.manual_seed(seed)
    parameters = [{"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}]
    if where == "cpu":
        parameters.append({})
    for each in parameters:
        module = LlamaRotaryEmbedding(config(**each)).to(where)
        ours = kernelized(kernel, copy.deepcopy(module), where)
        for length in (5, 4000, 7):
            x, positions = torch.randn(1, length, 8, device=where), torch.arange(length, device=where)[None]
            assert tables.replacement(ours, x, positions, type(ours)) is None
            for what, found, expected in zip("cs", ours(x, positions), module(x, positions)):
                assert_bits_equal(found, expected, f"{what}, {length} tokens")


class Eager:
    """In the place of a call of the kernel."""

    def __init__(self, formula, dtype, scaling):
        self.formula, self.dtype, self.scaling = formula, dtype, scaling

    def __call__(self, position_ids, inv_freq):
        return self.formula(torch.empty(0, dtype=self.dtype), position_ids, inv_freq, self.scaling)


@pytest.fixture
def without_kernel(module, tables, monkeypatch):
    """Everything but the kernel, on the CPU; how often a call was resolved is counted."""
    resolved = []

    def resolve(position_ids, inv_freq, forward, dtype, device, scaling, rope_type, precision):
        resolved.append(forward)
        tables._check(position_ids, inv_freq, dtype, device, rope_type)
        return Eager(tables.TABLES.eager, dtype, scaling)

    monkeypatch.setattr(tables.launch, "INTERPRETED", False)
    monkeypatch.setattr(tables, "runs_kernels", lambda device: device.type == "cpu")
    monkeypatch.setattr(tables, "_resolve", resolve)
    monkeypatch.setattr(module("inspection"), "_codes", {})
    return resolved


def test_calls_that_differ_in_one_thing(tables, without_kernel, seed):
    """The second call of a kind is found at once, and never for another kind: of modules, which share a class, and tensors."""
    torch.manual_seed(seed)
    module = LlamaRotaryEmbedding(config())
    x, positions = torch.empty(1, dtype=torch.float16), torch.randint(0, 4000, (2, 9))

    def other(**attributes):
        changed = copy.deepcopy(module)
        for name, value in attributes.items():
            setattr(changed, name, value)
        return changed

    frequencies = module.inv_freq
    calls = [
        (module, x, positions),
        (other(attention_scaling=1.25), x, positions),
        (other(attention_scaling=2), x, positions),
        (other(inv_freq=frequencies * 0.3), x, positions),
        (other(inv_freq=frequencies.to(torch.bfloat16)), x, positions),
        (other(inv_freq=frequencies[:7].clone()), x, positions),
        (module, x.float(), positions),
        (module, x, positions + 3),
        (module, x, positions.to(torch.int32)),
        (module, x, positions[:1]),
        (module, x, positions.t().contiguous().t()),
    ]
    for one, another in itertools.product(calls, repeat=2):
        for each in (one, one, another, one):
            found, expected = tables.replacement(*each, LlamaRotaryEmbedding), each[0](*each[1:])
            assert type(found) is type(expected) is tuple
            for what, ours, theirs in zip(("cos", "sin"), found, expected):
                assert_bits_equal(ours, theirs, what)
    # Other frequencies and other positions of the same shapes make no other call.
    assert len(without_kernel) == len(calls) - 2


def test_calls_that_are_left_to_the_original(tables, without_kernel, seed):
    """After one that is not, so that the shortest way to a kernel is open."""
    torch.manual_seed(seed)
    module = LlamaRotaryEmbedding(config())
    x, positions = torch.empty(1), torch.arange(9)[None]
    assert tables.replacement(module, x, positions, LlamaRotaryEmbedding) is not None
    for attributes in (
        {"attention_scaling": torch.tensor(1.0)},
        {"attention_scaling": torch.rand(64)},
        {"attention_scaling": 0.0},
        {"attention_scaling": None},
        {"rope_type": "longrope"},
        {"rope_type": {"full_attention": "default"}},
        {"inv_freq": None},
    ):
        changed = copy.deepcopy(module)
        for name, value in attributes.items():
            setattr(changed, name, value)
        assert tables.replacement(changed, x, positions, LlamaRotaryEmbedding) is None, attributes
    nested = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)])
    for arguments in (
        (None, positions),
        (x, None),
        (x, positions[0]),
        (x, positions.float()),
        (x, positions[:, :0]),
        (x, nested),
        (x, positions.to("meta")),
        (x.double(), positions),
    ):
        assert tables.replacement(module, *arguments, LlamaRotaryEmbedding) is None, arguments
    assert tables.replacement(module, x, positions, LlamaRotaryEmbedding) is not None


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=gpu)])
def test_compiled(kernel, seed, where):
    """The operations are traced, in one graph, as those of the original are."""
    torch.manual_seed(seed)
    torch._dynamo.reset()
    module = LlamaRotaryEmbedding(config()).to(where)
    ours = kernelized(kernel, copy.deepcopy(module), where)
    x, positions = torch.randn(2, 3, 8, device=where), torch.arange(9, device=where)[None]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for what, one, other in zip(("cos", "sin"), compiled(x, positions), module(x, positions)):
        assert_bits_equal(one, other, what)


# On a GPU


@gpu
@pytest.mark.parametrize("inv_freq_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables_are_eagers(kernel, tables, seed, dtype, inv_freq_dtype):
    torch.manual_seed(seed)
    for layer_class in CLASSES:
        for head_dim, parameters in (
            (64, {}),
            (128, {"rope_type": "linear", "factor": 3.0}),
            (80, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}),
            (
                128,
                {
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 512, "rope_theta": 500000.0,
                },
            ),
        ):  # fmt: skip
            module = layer_class(config(head_dim, **parameters)).to("cuda", inv_freq_dtype)
            ours = kernelized(kernel, copy.deepcopy(module), "cuda")
            for positions in (
                torch.arange(2048)[None],
                torch.tensor([[117]]),
                torch.randint(0, 1 << 21, (5, 33)),
                torch.arange(4096, 4100).expand(8, -1),
                torch.randint(0, 4096, (2, 50))[:, ::2],
            ):
                positions, x = positions.cuda(), torch.empty(1, 1, 8, dtype=dtype, device="cuda")
                assert tables.replacement(ours, x, positions, layer_class) is not None
                for training in (False, True):
                    with torch.inference_mode(not training):
                        found, expected = ours(x, position_ids=positions), module(x, position_ids=positions)
                    for what, one, other in zip(("cos", "sin"), found, expected):
                        assert one.stride() == other.stride() and one.requires_grad == other.requires_grad
                        assert one.is_inference() == other.is_inference()
                        assert_bits_equal(one, other, f"{what} of {layer_class.__name__}, {parameters}")


@gpu
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (257, 1), (1, 7), (5, 2)], ids=str)
def test_products_of_minus_zero(kernel, tables, seed, shape):
    """A product of matrices keeps them for several sequences of one token only."""
    torch.manual_seed(seed)
    module = LlamaRotaryEmbedding(config()).cuda()
    module.inv_freq[::3] = 0.0
    module.inv_freq[1::3] *= -1.0
    ours = kernelized(kernel, copy.deepcopy(module), "cuda")
    x, positions = torch.empty(1, device="cuda"), torch.randint(-3, 4, shape, device="cuda")
    positions[0, 0] = -3
    assert tables.replacement(ours, x, positions, LlamaRotaryEmbedding) is not None
    products = positions[..., None] * module.inv_freq
    assert (products.signbit() & (products == 0)).any()
    for what, found, expected in zip(("cos", "sin"), ours(x, positions), module(x, positions)):
        assert_bits_equal(found, expected, what)


@gpu
def test_every_angle(tables):
    """cos and sin of all fp32 numbers but NaNs and infinities: a sign and a power of two times every number in [1, 2)."""
    powers = torch.tensor([[sign << power for power in range(63) for sign in (1, -1)]], device="cuda")
    mantissas = torch.arange(1 << 23, dtype=torch.int32, device="cuda")
    call = tables._TablesCall(tables.TABLES, powers, mantissas[:512].float(), torch.float32, 1.0)
    # 2**-126, up to 2**127; from 0 on the subnormal numbers, of which powers of two make others again.
    for least in (1, 64, 127, 190, 192, 0):
        for start in range(0, 1 << 23, 512):
            inv_freq = ((least << 23) | mantissas[start : start + 512]).view(torch.float32)
            angle, found = powers[..., None].float() * inv_freq, call(powers, inv_freq)
            for what, ours, theirs in (
                ("cos", found[0][..., :512], angle.cos()),
                ("sin", found[1][..., 512:], angle.sin()),
            ):
                if not torch.equal(ours.view(torch.int32), theirs.view(torch.int32)):
                    nan = ours.isnan() & theirs.isnan()
                    assert_bits_equal(
                        ours.masked_fill(nan, 0), theirs.masked_fill(nan, 0), f"{what}, from {inv_freq[0]}"
                    )


@gpu
def test_reduced_precision_of_matrix_products(kernel, tables, seed):
    """transformers 5.17 makes a matrix product of the angle: as TF32 it is another."""
    torch.manual_seed(seed)
    module = LlamaRotaryEmbedding(config()).cuda()
    ours = kernelized(kernel, copy.deepcopy(module), "cuda")
    x, positions = torch.randn(1, 8, device="cuda"), torch.randint(0, 100000, (4, 640), device="cuda")
    # Not by monkeypatch: the module has no such attribute of its own, and would be left without one.
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of a matrix product the kernel is refused.
            found = ours(x, positions)
        for what, one, other in zip(("cos", "sin"), found, module(x, positions)):
            assert_bits_equal(one, other, what)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@gpu
def test_capture(kernel, tables, seed):
    torch.manual_seed(seed)
    module = LlamaRotaryEmbedding(config()).cuda()
    ours = kernelized(kernel, copy.deepcopy(module), "cuda")
    x, positions = torch.empty(1, dtype=torch.bfloat16, device="cuda"), torch.arange(100, device="cuda")[None]
    assert tables.replacement(ours, x, positions, LlamaRotaryEmbedding) is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ours(x, positions)
        assert tables.replacement(ours, x, positions, LlamaRotaryEmbedding) is not None
    positions += 12345
    graph.replay()
    for one, other in zip(found, module(x, positions)):
        assert_bits_equal(one, other, "replayed")


@gpu
def test_report(kernel, seed):
    """Of a class that no other test here runs outside of the domain: what is told of it holds for the process."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, intermediate_size=32, vocab_size=16)).cuda()
    kernel.name_layers(model)
    with use_kernel_mapping(kernel.kernel_mapping(level="decoder"), inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device="cuda")
    with torch.inference_mode():
        model(torch.randint(16, (1, 9), device="cuda"))
    report = kernel.replacement_report(model, verbose=False)
    (entry,) = [entry for entry in report.layers if entry.layer == "Qwen2RotaryEmbedding"]
    assert entry.path == "kernel" and entry.formulas and "heads of 32" in entry.proved[0]
