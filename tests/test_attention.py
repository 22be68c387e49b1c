"""`register_attention`: eager attention of transformers' models, softmax from the kernels."""

import functools
import importlib
import inspect
import warnings
import weakref

import aten_model
import pytest
import torch
from bits import assert_bits_equal, bits_equal
from interpreter import multiply_add
from test_softmax_kernel import numpy_exp
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertModel, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")
# In Triton's interpreter the proof refuses the kernels, since a CPU adds in another order than CUDA, and says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:lossless-kernels:RuntimeWarning"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs of the proof.
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value):RuntimeWarning"),
]

# Softmax in fp32 and back, in the dtype of the scores, with a softcap, with sinks, with a bias, without `contiguous`.
FILES = ("llama", "bert", "gemma2", "gpt_oss", "t5", "gpt2")
BATCH, HEADS, QUERIES, KEYS, HEAD_DIM = 2, 4, 3, 70, 8
SINGLE_KEY_HEADS = ("bert", "t5", "gpt2")


class Transcribed(torch.autograd.Function):
    """Softmax in CUDA's arithmetic, with the exponential and FMA of Triton's interpreter."""

    @staticmethod
    def forward(ctx, input, dtype):
        out = aten_model.softmax(input.reshape(-1, input.shape[-1]), numpy_exp, dtype=dtype).view(input.shape)
        ctx.save_for_backward(out)
        ctx.dtype = input.dtype
        return out

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        rows = (-1, y.shape[-1])
        return aten_model.softmax_backward(dy.reshape(rows), y.view(rows), multiply_add, dtype=ctx.dtype).view(
            y.shape
        ), None


def transcribed(input, dim=None, _stacklevel=3, dtype=None):
    assert dim == -1
    return Transcribed.apply(input, dtype)


def modeling(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def attention_of(name):
    """A stand-in for an attention of the file, and `eager_attention_forward` of the file."""
    file = modeling(name)
    forwards = (getattr(member, "forward", None) for member in vars(file).values() if inspect.isclass(member))
    unwrapped = {forward: inspect.unwrap(forward) for forward in forwards if inspect.isfunction(forward)}
    forward = next(each for each, it in unwrapped.items() if "eager_attention_forward" in it.__code__.co_names)
    module = type("Attention", (nn.Module,), {"forward": forward, "__module__": file.__name__})()
    module.num_key_value_groups, module.head_dim = 2, HEAD_DIM
    module.sinks = nn.Parameter(torch.linspace(-1.0, 1.0, HEADS))
    return module, file.eager_attention_forward


def results_of(function, name, module, dtype, seed, masked, dropout):
    """Outputs, weights and gradients of one call, of tensors and random numbers from the seed."""
    generator = torch.Generator().manual_seed(seed)
    key_heads = HEADS if name in SINGLE_KEY_HEADS else HEADS // 2
    shapes = (HEADS, QUERIES), (key_heads, KEYS), (key_heads, KEYS)
    leaves = [torch.randn(BATCH, *shape, HEAD_DIM, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    mask = None
    if masked:
        dropped = torch.rand(BATCH, 1, QUERIES, KEYS, generator=generator) < 0.3
        mask = torch.zeros(dropped.shape, dtype=dtype).masked_fill(dropped, torch.finfo(dtype).min)
    named = {"softcap": 20.0} if name == "gemma2" else {}
    if name == "t5":
        named["position_bias"] = torch.randn(1, HEADS, QUERIES, KEYS, generator=generator).to(dtype)
    torch.manual_seed(seed)
    module.train(dropout > 0).to(dtype)
    out, weights = function(module, *leaves, mask, scaling=0.25, dropout=dropout, sliding_window=None, **named)
    dy = torch.randn(out.shape, generator=generator).to(dtype)
    leaves += [module.sinks] if name == "gpt_oss" else []
    return out.detach(), weights.detach(), *torch.autograd.grad(out, leaves, dy)


@interpreted
@pytest.mark.usefixtures("proof_off")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", FILES)
def test_all_but_softmax_is_the_file_s_own_function(module, monkeypatch, seed, name, dtype):
    attention, eager = attention_of(name)
    # Products of fp16 matrices take long on a CPU.
    for masked, dropout in ((False, 0.0), (True, 0.0), (True, 0.4))[2 * (dtype == torch.float16) :]:
        case = name, attention, dtype, seed, masked, dropout
        found = results_of(module("eager_attention").lossless_eager, *case)
        plain = results_of(eager, *case)
        with monkeypatch.context() as patch:
            patch.setattr(functional, "softmax", transcribed)
            expected = results_of(eager, *case)
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_bits_equal(*pair, f"result {number} of {case[0]} {dtype}, mask {masked}, dropout {dropout}")
        assert dtype != torch.float32 or not bits_equal(found[1], plain[1]), "softmax of a CPU has other bits"
        if dropout:
            assert (found[1] == 0).float().mean() > 0.5


MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2, "attention_dropout": 0.3}),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16},
    ),
    "bert": (BertModel, BertConfig, {}),
}


def step(model, implementation, seed):
    """Output and gradients of a training step."""
    model.set_attn_implementation(implementation)
    torch.manual_seed(seed)
    tokens = torch.randint(100, (2, 9), device=model.device)
    padding = torch.ones_like(tokens)
    padding[0, :3] = 0
    out = model(tokens, attention_mask=padding)[0]
    parameters = [each for each in model.parameters() if each.requires_grad]
    gradients = torch.autograd.grad(out, parameters, torch.randn_like(out), allow_unused=True)
    return out.detach(), *(each for each in gradients if each is not None)


def make(name, seed):
    model_class, config, more = MODELS[name]
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = model_class(config(**sizes, vocab_size=100, **more))
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def short_proofs(module, monkeypatch):
    """In the interpreter a proof's rows take half a minute; a CPU, which adds in another order than CUDA, fails it with few."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(module("ops.masked_softmax"), "_ELEMENTS", 1 << 10)


@pytest.mark.either
@pytest.mark.parametrize("name", MODELS)
def test_models_have_eager_s_bits(kernel, module, monkeypatch, seed, name):
    on_gpu = torch.cuda.is_available()
    short_proofs(module, monkeypatch)
    monkeypatch.setenv("LOSSLESS_PROOF", "strict" if on_gpu else "on")
    assert kernel.register_attention() == "lossless_eager"
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if on_gpu else (torch.float32,):
        model = make(name, seed).to(dtype)
        for training in (False, True):
            model.train(training)
            expected = step(model, "eager", seed)
            found = step(model, "lossless_eager", seed)
            if on_gpu and name == "gpt_oss":  # Experts add gradients in any order there.
                found, expected = found[:1], expected[:1]
            for number, pair in enumerate(zip(found, expected, strict=True)):
                assert_bits_equal(*pair, f"result {number} of {name} {dtype}, training {training}")


@interpreted
def test_models_call_it_also_from_whole_decoder_layers(kernel, module, monkeypatch, seed):
    """In eager's own layers and in this package's, where a kernel has taken scale, mask and softmax."""
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    name, calls = kernel.register_attention(), []
    ours = module("ops.masked_softmax").replacement
    monkeypatch.setattr(
        module("ops.masked_softmax"), "replacement", lambda *arguments: calls.append(arguments) or ours(*arguments)
    )
    model = make("llama", seed).eval()
    model.set_attn_implementation(name)
    for _ in range(2):
        model(torch.arange(9)[None])
        assert [scale for _, _, scale in calls] == [0.25]
        calls.clear()
        kernel.apply(model)


@interpreted
def test_the_report_shows_attention(kernel, module, nothing_known, monkeypatch, seed):
    def entries():
        report = kernel.replacement_report(model, verbose=False)
        return [each for each in report.layers if each.layer == "eager_attention_forward"]

    short_proofs(module, monkeypatch)
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    monkeypatch.setattr(module("eager_attention"), "_known", weakref.WeakKeyDictionary())
    model = make("llama", seed).eval()
    assert not entries()
    model.set_attn_implementation(kernel.register_attention())
    assert [(each.count, each.path) for each in entries()] == [(1, "not called yet")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A CPU adds in another order than CUDA.
        model(torch.arange(9)[None])
    (entry,) = entries()
    assert entry.path == "original" and "elements of the output differ" in entry.reasons[0], entry


# Which functions compute Llama's formula

WITH_THE_FORMULA = ("llama", "qwen3", "mistral", "clip", "siglip", "pixtral", "vit", "cohere2", "mixtral")
WITHOUT = ("bert", "gemma2", "gpt_oss", "t5", "gpt2", "llama4", "vjepa2", "idefics2", "modernbert_decoder", "internvl")


def is_formula(module, eager, scaling=0.5, mask=None, states=None):
    return module("eager_attention")._is_formula(eager, states or (torch.randn(1, 2, 3, 4),) * 3, mask, scaling)


@interpreted
@pytest.mark.parametrize("name", WITH_THE_FORMULA + WITHOUT)
def test_files_with_the_formula_are_recognised(module, monkeypatch, name):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")  # A function that looks like Llama's and is another would raise.
    try:
        eager = modeling(name).eager_attention_forward
    except ImportError:
        pytest.skip(f"this transformers has no {name}")
    assert is_formula(module, eager) == (name in WITH_THE_FORMULA)
    if name in WITH_THE_FORMULA:
        assert not is_formula(module, eager, None), "the function knows which scaling None stands for"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not is_formula(module, eager), "there the scores have another dtype than the query"


LLAMA = """
def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    key_states = repeat_kv(key, module.num_key_value_groups)
    value_states = repeat_kv(value, module.num_key_value_groups)
    attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask
    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value_states)
    attn_output = attn_output.transpose(1, 2).contiguous()
    return attn_output, attn_weights
"""
# Changes of Llama's function, each of which makes another of it.
OTHERS = {
    "the mask before the scale": ("* scaling\n", "\n", "+ attention_mask", "* 1.0 + attention_mask"),
    "a scale of its own": ("* scaling", "* (scaling + 0.0 * dropout) * 2.0"),
    "scaled queries": ("torch.matmul(query,", "torch.matmul(query * 0.5,"),
    "no fp32": ("dtype=torch.float32).to(query.dtype)", "dtype=query.dtype).to(torch.float32).to(query.dtype)"),
    "softmax over queries": ("dim=-1", "dim=-2"),
    "dropout before softmax": (
        "    attn_weights = nn.functional.softmax",
        "    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)\n"
        "    attn_weights = nn.functional.softmax",
    ),
    "dropout always": ("training=module.training", "training=module.training or True"),
    "the mask twice": ("+ attention_mask", "+ attention_mask + attention_mask"),
    "a softcap": ("* scaling\n", "* scaling\n    attn_weights = torch.tanh(attn_weights)\n"),
    "other arguments": ("* scaling\n", "* scaling\n    attn_weights = attn_weights + len(kwargs)\n"),
    "a kwarg's value": ("* scaling\n", "* scaling\n    attn_weights = attn_weights + (kwargs and 0.0)\n"),
    "weights that are not returned": ("return attn_output, attn_weights", "return attn_output, None"),
    "no contiguous": (".contiguous()\n", "\n    attn_output.contiguous()\n"),
    "a detached part": (
        "torch.matmul(attn_weights, value_states)",
        "torch.matmul(attn_weights.detach(), value_states)",
    ),
    "a mask that is cut": ("+ attention_mask", "+ attention_mask[:, :, :, : key.size(-2)]"),
    "another argument": ("dropout=0.0,", "dropout=0.0, softcap=None,"),
    "a mask that is converted": ("+ attention_mask", "+ attention_mask.to(attn_weights.dtype)"),
    "weights in the values' dtype": ("dropout(attn_weights,", "dropout(attn_weights.to(value.dtype),"),
    "values that are converted": ("value_states)", "value_states.to(query.dtype))"),
    "contiguous keys": ("transpose(2, 3)", "transpose(2, 3).contiguous()"),
    "heads repeated by a number": ("(key, module.num_key_value_groups)", "(key, 2)"),
    "no heads repeated by the module's number": ("module.num_key_value_groups", "2"),
    "another scale of long heads": ("* scaling", "* (scaling * 0.5 if query.size(-1) > 64 else scaling)"),
    "a scale with the heads' size": ("* scaling", "* (scaling * query.size(-1) / 8)"),
    "the mask of several queries": (
        "if attention_mask is not None",
        "if attention_mask is not None and query.size(2) - 1",
    ),
    "a least dropout": ("p=dropout", "p=dropout or 0.25"),
    "a largest dropout": ("p=dropout", "p=dropout if dropout < 0.3 else 0.3"),
}


def function_of(source):
    namespace = {"torch": torch, "nn": nn, "repeat_kv": modeling("llama").repeat_kv, "__name__": "a_file"}
    exec(source, namespace)
    return namespace["eager_attention_forward"]


@interpreted
@pytest.mark.parametrize("name", ["none", *OTHERS])
def test_a_function_with_another_formula_is_told(module, name):
    source = LLAMA
    changes = OTHERS.get(name, ())
    for old, new in zip(changes[::2], changes[1::2]):
        assert old in source
        source = source.replace(old, new)
    assert is_formula(module, function_of(source)) == (name == "none")


@interpreted
def test_masks_that_a_function_may_convert_or_cut_are_left_to_it(module):
    eager = function_of(LLAMA)
    assert is_formula(module, eager) and is_formula(module, eager, mask=torch.zeros(1, 1, 3, 3))
    assert not is_formula(module, eager, mask=torch.zeros(1, 1, 3, 3).double())
    assert not is_formula(module, eager, mask=torch.zeros(1, 1, 3, 5))


@interpreted
def test_states_of_another_kind_are_left_to_the_function(module):
    eager, states = function_of(LLAMA), torch.randn(1, 2, 3, 4)
    for others in (
        (states, states, states.double()),
        (states.double(), states, states),
        (states[0],) * 3,
        (states[None],) * 3,
        (states, states),
        (states, states, None),
    ):
        assert not is_formula(module, eager, states=others)


@pytest.mark.usefixtures("proof_off")
def test_a_mask_may_change_before_the_backward_pass(module, seed):
    """Eager keeps none, so that a program may use its memory again."""
    attention, _ = attention_of("llama")
    found = []
    for change in (False, True):
        generator = torch.Generator().manual_seed(seed)
        states = [torch.randn(2, 4, 3, HEAD_DIM, generator=generator).requires_grad_() for _ in range(3)]
        attention.num_key_value_groups, mask = 1, torch.randn(2, 1, 3, 3, generator=generator)
        out, _ = module("eager_attention").lossless_eager(attention, *states, mask, scaling=0.5)
        mask.zero_() if change else None
        found.append(torch.autograd.grad(out.sum(), states))
    for one, other in zip(*found, strict=True):
        assert_bits_equal(one, other)


@interpreted
def test_a_function_is_looked_at_again_when_it_changes(module):
    eager = function_of(LLAMA)
    assert is_formula(module, eager)
    before, namespace = eager.__code__, eager.__globals__
    eager.__code__ = function_of(LLAMA.replace("* scaling", "* (scaling * 2.0)")).__code__
    assert not is_formula(module, eager)
    eager.__code__ = before
    assert is_formula(module, eager)
    namespace["nn"] = type("Nn", (), {"functional": functional})
    assert not is_formula(module, eager)
    namespace["nn"] = nn
    namespace["repeat_kv"] = functools.partial(namespace["repeat_kv"])
    assert not is_formula(module, eager)


@interpreted
def test_the_proof_of_the_formula_draws_no_random_numbers(module):
    query, before = torch.randn(1, 2, 3, 4), torch.get_rng_state()
    assert module("eager_attention")._is_formula(function_of(LLAMA), (query,) * 3, None, 0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_attention_that_calls_its_base_class(module):
    """In a user's own file, which has no `eager_attention_forward`."""

    class Own(modeling("llama").LlamaAttention):
        def forward(self, *arguments, **named):
            return super().forward(*arguments, **named)

    assert module("eager_attention")._eager_of(Own) is modeling("llama").eager_attention_forward


def doubled(module, query, key, value, *_, **__):
    return 2.0 * query + key.sum() + value.sum(), query


@pytest.mark.usefixtures("proof_off")
def test_what_the_file_s_function_calls_may_be_replaced(module, monkeypatch, seed):
    """Its functions, its code, and softmax itself."""
    attention, eager = attention_of("llama")
    ours, case = module("eager_attention").lossless_eager, ("llama", attention, torch.float32, seed, False, 0.0)
    before = results_of(ours, *case)
    file = modeling("llama")
    with monkeypatch.context() as patch:
        patch.setattr(file, "repeat_kv", lambda states, groups: states.repeat(1, groups, 1, 1))
        assert not bits_equal(results_of(ours, *case)[0], before[0])
    with monkeypatch.context() as patch:
        patch.setattr(file, "eager_attention_forward", doubled)
        assert_bits_equal(results_of(ours, *case)[2], results_of(file.eager_attention_forward, *case)[2])
    with monkeypatch.context() as patch:
        patch.setattr(functional, "softmax", lambda input, dim, stacklevel=3, dtype=None: input.to(dtype) * 2.0)
        assert_bits_equal(results_of(ours, *case)[0], results_of(eager, *case)[0])
    for found, expected in zip(results_of(ours, *case), before, strict=True):
        assert_bits_equal(found, expected)


def test_an_attention_without_eager_s_function_is_an_error(module):
    class Attention(nn.Module):
        def forward(self):
            pass

    with pytest.raises(ValueError, match="expected eager_attention_forward in the file of .*Attention"):
        module("eager_attention").lossless_eager(Attention(), None, None, None, None)


def test_torch_compile_traces_eager_s_operations(module, seed):
    """A CPU's softmax in the compiled function, none from the interpreter."""
    attention, eager = attention_of("llama")
    inputs = torch.randn(3, 1, HEADS, QUERIES, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).unbind()
    attention.num_key_value_groups = 1
    torch._dynamo.reset()
    compiled = torch.compile(module("eager_attention").lossless_eager, backend="eager", fullgraph=True)
    found, expected = (function(attention, *inputs, None, scaling=0.25) for function in (compiled, eager))
    torch._dynamo.reset()
    assert_bits_equal(found[0], expected[0])
