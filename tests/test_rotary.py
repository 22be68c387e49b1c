"""The rotary embedding of query and key: the kernel against eager, outputs and gradients, bit for bit.

Without a GPU it runs in Triton's interpreter, in fp32 and fp16: elementwise operations round there as they do on a GPU.
"""

import contextlib
import copy
import functools
import importlib
import itertools
import random
from pathlib import Path

import kernels
import pytest
import torch
import transformers
from bits import assert_bits_equal, bits_equal
from kernels import Mode, kernelize, use_kernel_func_from_hub, use_kernel_mapping
from places import modeling, python_module
from torch.autograd import forward_ad
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.nanochat import modeling_nanochat
from transformers.models.olmo2 import modeling_olmo2

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.float32, torch.float16) + (torch.bfloat16,) * GPU
EACH = 300 if GPU else 8
HEAD_DIMS = (2, 10, 16, 64, 72, 80, 96, 128, 256)
# Of two dtypes, states' and cos'. Each pair, and each head_dim, is a kernel to compile.
PAIRS = tuple(itertools.product(DTYPES, repeat=2))
SOME_PAIRS = ((DTYPES[-1],) * 2, (DTYPES[-1], torch.float32))


def layer_of(function):
    """The module that transformers' decorator makes of a function, if it is not idle with this version of kernels."""
    return function if isinstance(function, torch.nn.Module) else use_kernel_func_from_hub("rotary_pos_emb")(function)


LLAMA = type(layer_of(modeling_llama.apply_rotary_pos_emb)).forward
OLMO2 = type(layer_of(modeling_olmo2.apply_rotary_pos_emb)).forward
# It casts its inputs first, as the rotary functions of vision towers do.
HUNYUAN = type(layer_of(modeling("hunyuan_vl").apply_rotary_pos_emb)).forward
decorated = pytest.mark.skipif(
    not isinstance(modeling_llama.apply_rotary_pos_emb, torch.nn.Module),
    reason="transformers' decorators are idle with this version of kernels: its rotary functions are functions",
)

pytestmark = [
    # numpy, which the interpreter computes with, warns of what overflows in fp16.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning"),
    pytest.mark.filterwarnings("error:lossless-kernels:RuntimeWarning"),
]
# On the CPU most of these run as well.
gpu = pytest.mark.gpu


@pytest.fixture
def rotary(kernel):
    return python_module(kernel, "rotary")


def is_ours(tensor, kernel):
    function = getattr(type(tensor.grad_fn), "_forward_cls", None)
    return function is not None and function.__module__.startswith(kernel.__name__)


def numbers(shape, dtype, generator):
    """A random scale, and in eight one zero of either sign."""
    drawn = torch.randn(shape, generator=generator, device=DEVICE)
    zero = torch.randint(8, shape, generator=generator, device=DEVICE) == 0
    return torch.where(zero, drawn * 0.0, drawn).to(dtype)


def random_call(choose, generator, head_dims=HEAD_DIMS, dtypes=None):
    """(q, k, cos, sin, unsqueeze_dim) in layouts that transformers produces, and in others."""
    dtype, table_dtype = dtypes or (choose.choice(DTYPES), choose.choice(DTYPES))
    batch, tokens, head_dim = choose.choice((1, 1, 2, 3)), choose.choice((1, 2, 5, 17)), choose.choice(head_dims)
    heads = choose.choice((1, 2, 5, 8, 20)), choose.choice((1, 2, 3, 8))
    make = functools.partial(numbers, generator=generator)
    layout = choose.choice(("projection", "projection", "fused", "contiguous", "expanded"))
    if layout == "fused":  # One projection for q, k and v.
        states = make((batch, tokens, sum(heads) + heads[1], head_dim), dtype)
        q, k = states[:, :, : heads[0]], states[:, :, heads[0] : sum(heads)]
    elif layout == "contiguous":
        q, k = (make((batch, count, tokens, head_dim), dtype).transpose(1, 2) for count in heads)
    elif layout == "expanded":  # One head for all.
        q, k = make((batch, tokens, heads[0], head_dim), dtype), make((batch, tokens, 1, head_dim), dtype)
        k = k.expand(batch, tokens, heads[1], head_dim)
    else:
        q, k = (make((batch, tokens, count, head_dim), dtype) for count in heads)
    unsqueeze_dim = choose.choice((1, 1, 2, -2, -3))
    if unsqueeze_dim in (1, -3):
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    tables = []
    for _ in range(2):
        shape = (choose.choice((1, batch)), tokens, head_dim)
        table = make(shape, table_dtype)
        if choose.random() < 0.3:
            table = make((shape[0], 2 * tokens, head_dim + choose.choice((0, 1, 8))), table_dtype)
            table = table[:, ::2, :head_dim]
        tables.append(table)
    return q, k, *tables, unsqueeze_dim


def label(q, k, cos, sin, unsqueeze_dim):
    told = (f"{str(x.dtype)[6:]} {tuple(x.shape)} {x.stride()}" for x in (q, k, cos, sin))
    return ", ".join((*told, f"unsqueeze_dim {unsqueeze_dim}"))


def assert_same(found, expected, text):
    for ours, eagers in zip(found, expected, strict=True):
        assert_bits_equal(ours, eagers, text)
        strides = [pair for size, *pair in zip(ours.shape, ours.stride(), eagers.stride()) if size > 1]
        assert all(one == other for one, other in strides), f"{text}: {ours.stride()}, eager's {eagers.stride()}"


def incoming_gradient(out, choose, generator):
    """Contiguous, or with another fastest dimension, as eager attention's of the key may have, or expanded."""
    layout = choose.choice(("contiguous", "contiguous", "tokens fastest", "heads fastest", "expanded"))
    if layout == "tokens fastest":
        return numbers(out.mT.shape, out.dtype, generator).mT
    if layout == "heads fastest":  # channels_last, if heads come before tokens.
        return numbers(out.movedim(-3, -1).shape, out.dtype, generator).movedim(-1, -3)
    if layout == "expanded":
        return numbers(out.shape[:-1] + (1,), out.dtype, generator).expand(out.shape)
    return numbers(out.shape, out.dtype, generator)


def gradients(function, call, generator_seed, before=False, after=False):
    """Of q and k, with consumers of theirs that were called earlier or later than the function."""
    q, k, *more = call
    q, k = (x.detach().requires_grad_() for x in (q, k))
    earlier = [x * 0.75 for x in (q, k) if before]
    outs = function(q, k, *more)
    later = [x * 1.25 for x in (q, k) if after]
    roots = (*outs, *earlier, *later)
    generator = torch.Generator(DEVICE).manual_seed(generator_seed)
    # Others in each call of a test.
    choose = random.Random(f"{generator_seed} {[(x.shape, x.stride()) for x in (q, k)]}")
    dys = [incoming_gradient(root, choose, generator) for root in roots]
    kept = [dy.clone() for dy in dys]
    found = torch.autograd.grad(roots, (q, k), dys)
    for dy, as_it_was in zip(dys, kept):
        assert_bits_equal(dy, as_it_was, "incoming gradient")
    return found, outs


ORIGINALS = {"llama": LLAMA, "olmo2": OLMO2, "hunyuan_vl": HUNYUAN}


def replaced(rotary, subject, **options):
    def call(*arguments):
        out = rotary.replacement(*arguments, subject, **options)
        assert out is not None, label(*arguments)
        return out

    return call


@pytest.mark.parametrize("original", ORIGINALS)
def test_outputs_are_eagers(rotary, seed, original):
    choose, generator = random.Random(seed), torch.Generator(DEVICE).manual_seed(seed)
    forward = ORIGINALS[original]
    # A few a run, others in the next one.
    head_dims, pairs = choose.sample(HEAD_DIMS, 3), choose.sample(PAIRS, 3)
    for _ in range(EACH):
        call = random_call(choose, generator, head_dims, choose.choice(pairs))
        kept = [x.clone() for x in call[:4]]
        with torch.no_grad():
            assert_same(replaced(rotary, forward)(*call), forward(None, *call), label(*call))
            # Once more, by the call that is remembered.
            assert_same(replaced(rotary, forward)(*call), forward(None, *call), label(*call))
        for tensor, as_it_was in zip(call, kept):
            assert_bits_equal(tensor, as_it_was, "an input")


@pytest.mark.parametrize("original", ORIGINALS)
def test_gradients_are_eagers(kernel, module, rotary, seed, monkeypatch, original):
    rotary._gradient_calls.clear()
    choose, generator = random.Random(seed), torch.Generator(DEVICE).manual_seed(seed)
    forward = ORIGINALS[original]
    head_dims, pairs = choose.sample(HEAD_DIMS, 3), choose.sample(PAIRS, 3)
    for number in range(EACH // 3):
        # Computed at once, or, as those of large tensors are, by autograd's additions.
        monkeypatch.setattr(module("core.paths"), "MIN_BYTES", 1 << 40 if number % 2 else 0)
        rotary._gradient_calls.clear()
        call = random_call(choose, generator, head_dims, choose.choice(pairs))
        for before, after in itertools.product((False, True), repeat=2):
            text = f"{label(*call)}, others before {before}, after {after}"
            found, outs = gradients(replaced(rotary, forward), call, seed, before, after)
            expected, eagers = gradients(functools.partial(forward, None), call, seed, before, after)
            assert all(is_ours(out, kernel) for out in outs)
            assert_same(outs, eagers, text)
            assert_same(found, expected, text)
        found, outs = gradients(replaced(rotary, forward, sole_consumer=True), call, seed)
        assert_same(found, gradients(functools.partial(forward, None), call, seed)[0], f"sole, {label(*call)}")
    found = rotary._gradient_calls.resolved.values()
    assert found and None not in found


def test_a_sum_is_another_gradient_where_there_are_others(rotary, seed):
    """Which is why `sole_consumer` has to be promised."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    call = random_call(random.Random(1), generator, head_dims=(128,), dtypes=(torch.float16,) * 2)
    sole, _ = gradients(replaced(rotary, LLAMA, sole_consumer=True), call, seed, after=True)
    expected, _ = gradients(functools.partial(LLAMA, None), call, seed, after=True)
    assert any((one != other).any() for one, other in zip(sole, expected))


def test_query_and_key_may_be_one_tensor(rotary, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = numbers((2, 3, 5, 64), torch.float16, generator)
    tables = [numbers((1, 5, 64), torch.float16, generator) for _ in range(2)]
    results = []
    for function in (replaced(rotary, LLAMA), functools.partial(LLAMA, None)):
        leaf = x.clone().requires_grad_()
        outs = function(leaf, leaf, *tables, 1)
        results.append(torch.autograd.grad(outs, leaf, [out.detach() for out in outs]))
    assert_same(*results, "q is k")


def test_only_one_needs_a_gradient(kernel, rotary, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    call = random_call(random.Random(2), generator)
    for needed in range(2):
        results = []
        for function in (replaced(rotary, LLAMA), functools.partial(LLAMA, None)):
            inputs = [x.detach().requires_grad_(index == needed) for index, x in enumerate(call[:2])]
            outs = function(*inputs, *call[2:])
            assert [out.requires_grad for out in outs] == [x.requires_grad for x in inputs]
            results.append(torch.autograd.grad(outs[needed], inputs[needed], torch.ones_like(outs[needed])))
        assert_same(*results, f"only {needed}")


def test_only_one_output_is_used(rotary, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    call = random_call(random.Random(3), generator)
    for used in range(2):
        results = []
        for function in (replaced(rotary, LLAMA), functools.partial(LLAMA, None)):
            inputs = [x.detach().clone().requires_grad_() for x in call[:2]]
            function(*inputs, *call[2:])[used].square().sum().backward()
            assert inputs[1 - used].grad is None
            results.append((inputs[used].grad,))
        assert_same(*results, f"only {used}")


@pytest.mark.parametrize("original", ORIGINALS)
def test_double_backward(rotary, seed, original):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for dtypes in SOME_PAIRS:
        call = random_call(random.Random(4), generator, dtypes=dtypes)
        results = []
        for function in (replaced(rotary, ORIGINALS[original]), functools.partial(ORIGINALS[original], None)):
            inputs = [x.detach().requires_grad_() for x in call[:2]]
            outs = function(*inputs, *call[2:])
            dys = [out.detach().clone().requires_grad_() for out in outs]
            first = torch.autograd.grad(outs, inputs, dys, create_graph=True)
            results.append((*first, *torch.autograd.grad([d.square().sum() for d in first], dys)))
        assert_same(*results, label(*call))


# Outside the domain: the original function


def a_call(seed, dtype=torch.float32, head_dim=16):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return random_call(random.Random(5), generator, head_dims=(head_dim,), dtypes=(dtype, dtype))


def outside():
    q, k, cos, sin, dim = a_call(1)
    yield "float64", (q.double(), k.double(), cos.double(), sin.double(), dim)
    yield "q and k of two dtypes", (q.half(), k, cos, sin, dim)
    yield "cos and sin of two dtypes", (q, k, cos.half(), sin, dim)
    yield "odd head_dim", (*(x[..., :15] for x in (q, k, cos, sin)), dim)
    yield "strided head_dim", (*(x[..., ::2] for x in (q, k, cos, sin)), dim)
    yield "no rows", (q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0], 1)
    yield "q of batch 1", (torch.ones(1, 2, 3, 16),) * 2 + (torch.ones(2, 3, 16),) * 2 + (1,)
    yield "cos of one value", (q, k, cos[..., :1], sin[..., :1], dim)
    yield "cos with a gradient", (q, k, cos.clone().requires_grad_(), sin, dim)
    one = torch.ones(2, 1, 16)
    yield "keys of other tokens", (torch.ones(2, 3, 5, 16), torch.ones(2, 2, 1, 16), one, one, 1)


OUTSIDE = [name for name, _ in outside()]


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_no_kernel_takes(kernel, rotary, name):
    call = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in dict(outside())[name]]
    assert rotary.replacement(*call, LLAMA) is None
    assert_same(kernel.apply_rotary_pos_emb(*call), LLAMA(None, *call), name)


def test_more_layouts_that_a_kernel_takes(rotary, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    make = functools.partial(numbers, dtype=torch.float32, generator=generator)
    calls = [
        # Without a batch.
        (make((3, 5, 16)), make((2, 5, 16)), make((5, 16)), make((5, 16)), 0),
        (make((5, 3, 16)), make((5, 2, 16)), make((5, 16)), make((5, 16)), 1),
        # One cos for all of the batch.
        (make((2, 5, 3, 16)), make((2, 5, 2, 16)), make((5, 16)), make((5, 16)), 1),
        # Heads first.
        (make((3, 2, 5, 16)), make((4, 2, 5, 16)), make((2, 5, 16)), make((1, 5, 16)), 0),
        # One cos for all tokens.
        (make((2, 3, 5, 16)), make((2, 4, 5, 16)), make((2, 1, 16)), make((2, 5, 16)), 1),
    ]
    for call in calls:
        with torch.no_grad():
            assert_same(replaced(rotary, LLAMA)(*call), LLAMA(None, *call), label(*call))
        found, _ = gradients(replaced(rotary, LLAMA), call, seed)
        assert_same(found, gradients(functools.partial(LLAMA, None), call, seed)[0], label(*call))


def test_transforms_run_the_formula(kernel, rotary, seed):
    q, k, cos, sin, dim = a_call(seed)
    with torch.no_grad():
        batched = torch.vmap(lambda q: kernel.apply_rotary_pos_emb(q, k, cos, sin, dim)[0])(torch.stack([q, q]))
        expected = LLAMA(None, q, k, cos, sin, dim)[0]
        assert_bits_equal(batched, torch.stack([expected, expected]))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, torch.ones_like(q))
            out = kernel.apply_rotary_pos_emb(dual, k, cos, sin, dim)[0]
            assert forward_ad.unpack_dual(out).tangent is not None
    gradient = torch.func.grad(lambda q: kernel.apply_rotary_pos_emb(q, k, cos, sin, dim)[0].sum())(q)
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(LLAMA(None, leaf, k, cos, sin, dim)[0].sum(), leaf)
    assert_bits_equal(gradient, expected)


Q, K, COS = torch.ones(2, 3, 5, 16), torch.ones(2, 1, 5, 16), torch.ones(1, 5, 16)
WRONG = {
    "q a list": (([1.0], K, COS, COS), TypeError, "q: expected a torch.Tensor, found list"),
    "k of integers": ((Q, K.int(), COS, COS), TypeError, "k: expected a real floating point dtype, found torch.int32"),
    "sin missing": ((Q, K, COS, None), TypeError, "sin: expected a torch.Tensor, found NoneType"),
    "cos elsewhere": ((Q, K, COS.to("meta"), COS), ValueError, "cos: expected device cpu of q, found meta"),
    "cos of no dimension": ((Q, K, COS[0, 0, 0], COS), ValueError, "cos: expected at least one dimension"),
    "cos too short": ((Q, K, COS[:, :4], COS), ValueError, r"cos: expected a shape .* q \[2, 3, 5, 16\].*\[1, 4, 16\]"),
    "sin for other heads": ((Q, K, COS, COS[..., :8]), ValueError, r"sin: expected a shape .* found \[1, 5, 8\]"),
    "unsqueeze_dim a string": ((Q, K, COS, COS, "1"), TypeError, "unsqueeze_dim: expected an int, found str"),
    "unsqueeze_dim too large": ((Q, K, COS, COS, 4), ValueError, "unsqueeze_dim: expected -4 to 3 .* found 4"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(kernel, case):
    arguments, error, message = WRONG[case]
    with pytest.raises(error, match=f"^{message}"):
        kernel.apply_rotary_pos_emb(*arguments)


# The layer


def only_rotary(kernel):
    mapping = kernel.kernel_mapping(devices=("cpu", "cuda", "rocm"))
    return use_kernel_mapping({"rotary_pos_emb": mapping["rotary_pos_emb"]}, inherit_mapping=False)


def kernelized(module, kernel, mode=Mode.INFERENCE):
    with only_rotary(kernel):
        device = "rocm" if torch.version.hip else DEVICE
        return kernelize(module, mode=mode, device=device)


# Names of the deprecated classes for functions, and of those for layers that take their place.
FORMS = {
    "LocalFuncRepository": {"func_name": "apply_rotary_pos_emb"},
    "LocalLayerRepository": {"layer_name": "RotaryPosEmb"},
}


def rotate(q, k, cos, sin, unsqueeze_dim=1):
    """transformers' function, without its decorator."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (modeling_llama.rotate_half(q) * sin)
    k_embed = (k * cos) + (modeling_llama.rotate_half(k) * sin)
    return q_embed, k_embed


@pytest.mark.parametrize("decorator", ["use_kernel_func_from_hub", "use_kernel_forward_from_hub"])
@pytest.mark.parametrize("form", FORMS)
def test_as_a_function_and_as_a_layer(build, rotary, seed, proof_off, form, decorator):
    """The kernel's function or layer, at a function of which one of the two decorators has made a module."""
    for name in (form, decorator):
        if not hasattr(kernels, name):
            pytest.skip(f"this version of kernels has no {name}")
    holder = torch.nn.Module()
    holder.rotate = getattr(kernels, decorator)("rotary_pos_emb")(rotate)
    device = "rocm" if torch.version.hip else DEVICE
    mapping = {"rotary_pos_emb": {device: getattr(kernels, form)(build, **FORMS[form])}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(holder, mode=Mode.INFERENCE, device=device)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for dtype in DTYPES:
        q, k = (numbers((1, heads, 5, 64), dtype, generator) for heads in (4, 2))
        cos, sin = (numbers((1, 5, 64), dtype, generator) for _ in range(2))
        rotary._calls.clear()
        assert_same(holder.rotate(q, k, cos, sin), rotate(q, k, cos, sin), form)
        assert rotary._calls.resolved and None not in rotary._calls.resolved.values()


def model_of(name, seed, dtype):
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        # With as many key heads as query heads eager attention gives the key a gradient with strided heads.
        num_key_value_heads=4 if name == "Llama" else 2,
        head_dim=16,
        vocab_size=64,
        # The backward of the fused attention kernels adds in an order that changes from run to run.
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    return getattr(transformers, f"{name}ForCausalLM")(config).to(DEVICE, dtype)


def results(model, tokens, dtype):
    """Logits, generated tokens, and the gradients of a training step, also under autocast."""
    model.eval()
    with torch.no_grad():
        found = {"logits": model(tokens).logits}
        found["tokens"] = model.generate(tokens[:1, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)
    model.train()
    for autocast in (False, True) if GPU and dtype == torch.float32 else (False,):
        with torch.autocast(DEVICE, torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(tokens, labels=tokens, use_cache=False).loss
        model.zero_grad()
        loss.backward()
        found |= {f"{name}, autocast {autocast}": p.grad.clone() for name, p in model.named_parameters()}
    return found


@decorated
@pytest.mark.parametrize("mode", (Mode.INFERENCE, Mode.TRAINING), ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:1] + DTYPES[2:], ids=str)
@pytest.mark.parametrize(
    "name", ("Llama", "Olmo2", *(pytest.param(each, marks=pytest.mark.long) for each in ("Qwen3", "Mistral")))
)
def test_models_are_the_same(kernel, rotary, seed, monkeypatch, name, dtype, mode):
    model = model_of(name, seed, dtype)
    tokens = torch.randint(64, (2, 13), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    expected = results(model, tokens, dtype)
    kernelized(model, kernel, mode)
    proof = python_module(kernel, "proof")
    monkeypatch.setattr(proof, "_refusals", {})
    rotary._calls.clear()
    rotary._gradient_calls.clear()
    found = results(model, tokens, dtype)
    assert found.keys() == expected.keys()
    for key in expected:
        assert_bits_equal(found[key], expected[key], key)
    for calls in (rotary._calls, rotary._gradient_calls):
        assert calls.resolved and None not in calls.resolved.values()
    (entry,) = (e for e in kernel.replacement_report(model, verbose=False).layers if e.layer == "apply_rotary_pos_emb")
    assert (entry.count, entry.path) == (2, "kernel"), entry


@decorated
def test_the_report_tells_what_is_called(kernel):
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=32, vocab_size=8))
    model.to(DEVICE)

    def entry(model):
        entries = kernel.replacement_report(model, verbose=False).layers
        return next(entry for entry in entries if entry.layer == "apply_rotary_pos_emb")

    assert (entry(model).count, entry(model).reasons) == (2, ["not kernelized"])
    kernelized(copy.deepcopy(model), kernel)
    # That was the copy's copy of the function, which nobody calls.
    assert entry(model).reasons == ["not kernelized"]
    twin = copy.deepcopy(model)
    kernelized(model, kernel)
    assert entry(twin).reasons == entry(model).reasons != ["not kernelized"]


@decorated
def test_another_formula_keeps_its_function(kernel, rotary, seed):
    q, k, cos, sin, _ = a_call(seed, torch.float16)
    q, k = (torch.ones(2, heads, 5, 16, dtype=torch.float16, device=DEVICE) * x.mean() for heads, x in ((4, q), (2, k)))
    cos, sin = (numbers((1, 5, 16), torch.float16, torch.Generator(DEVICE).manual_seed(seed)) for _ in range(2))
    function = nanochats_function()
    expected = function(q, k, cos, sin)
    kernelized(function, kernel)
    # At most once a process.
    with (
        pytest.warns(RuntimeWarning, match="nanochat.*none of the known")
        if first_time(kernel, function)
        else no_warning()
    ):
        assert_same(function(q, k, cos, sin), expected, "nanochat")
    assert rotary.replacement(q, k, cos, sin, 1, type(function).forward) is None
    (entry,) = kernel.replacement_report(function, verbose=False).layers
    assert entry.path == "original" and "none of the known formulas" in entry.reasons[0]

    function = modeling_gpt_oss.apply_rotary_pos_emb
    half = cos[..., :8], sin[..., :8]
    expected = function(q, k, *half)
    kernelized(function, kernel)
    assert_same(function(q, k, *half), expected, "gpt_oss")


def nanochats_function():
    """It rotates the other way. transformers 5.24 gives it no layer name any more."""
    function = modeling_nanochat.apply_rotary_pos_emb
    named = isinstance(function, torch.nn.Module)
    return function if named else use_kernel_func_from_hub("rotary_pos_emb")(function)


def first_time(kernel, function):
    function_behind = python_module(kernel, "inspection").function_behind
    return function_behind(type(function).forward) not in python_module(kernel, "proof")._warned


no_warning = contextlib.nullcontext


def test_the_layer_by_itself(kernel, seed):
    call = a_call(seed)
    assert_same(kernel.layers.RotaryPosEmb()(*call), LLAMA(None, *call), "layer")


@decorated
@pytest.mark.parametrize("training", (False, True), ids=("inference", "training"))
def test_compiled_layer_is_the_uncompiled_one(kernel, rotary, seed, training):
    torch.compiler.reset()
    function = kernelized(modeling_llama.apply_rotary_pos_emb, kernel, Mode.TRAINING | Mode.TORCH_COMPILE)
    operators = []

    def backend(graph, inputs):
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("inductor" if GPU else "aot_eager")(graph, inputs)

    compiled = torch.compile(lambda *call: function(*call), backend=backend, fullgraph=True, dynamic=True)
    for tokens in (5, 9, 17):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        q, k = (numbers((2, tokens, heads, 64), DTYPES[-1], generator).transpose(1, 2) for heads in (4, 2))
        cos, sin = (numbers((1, tokens, 64), DTYPES[-1], generator) for _ in range(2))
        call = q, k, cos, sin, 1
        if training:
            found, outs = gradients(compiled, call, seed)
            expected, eagers = gradients(functools.partial(LLAMA, None), call, seed)
            assert_same(found, expected, f"{tokens} tokens")
        else:
            with torch.no_grad():
                outs, eagers = compiled(*call), LLAMA(None, *call)
        assert_same(outs, eagers, f"{tokens} tokens")
    assert any("rotary" in operator for operator in operators), operators


@pytest.mark.parametrize(
    "dtype, table_dtype", [SOME_PAIRS[0], *(pytest.param(*pair, marks=pytest.mark.long) for pair in SOME_PAIRS[1:])]
)
def test_operators_keep_torch_library_rules(kernel, seed, dtype, table_dtype):
    namespace = getattr(torch.ops, python_module(kernel, "_ops")._OPS_NAME)
    q, k, cos, sin, dim = a_call(seed)
    cos, sin = cos.to(table_dtype), sin.to(table_dtype)
    for variant in ("plain", "fp32_compute", "fp32"):
        leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k)]
        torch.library.opcheck(namespace.rotary.default, (*leaves, cos, sin, dim, variant))
        dy = LLAMA(None, q.to(dtype), k.to(dtype), cos, sin, dim)[0]
        dy = dy.to(dtype) if variant != "plain" else dy
        torch.library.opcheck(namespace.rotary_backward.default, (dy, cos, sin, dim, variant, dtype))


# Vision towers


# A part of the head stays as it is.
OTHER_VISION = ["minimax_m3_vl", "inkling2"]


def vision_functions():
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if "def apply_rotary_pos_emb_vision" in path.read_text():
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            yield path.parent.name, module.apply_rotary_pos_emb_vision


def vision_call(generator, dtypes, head_dim=32, batch=()):
    make = functools.partial(numbers, generator=generator)
    q, k = make((2, *batch, 5, 3, head_dim), dtypes[0]).unbind()
    return q, k[..., :2, :], *make((2, *batch, 5, head_dim), dtypes[1]).unbind()


def test_vision_towers_have_the_formula(rotary, seed):
    """Every function of this name, but one."""
    formula, equal = functools.partial(rotary.FP32.eager, unsqueeze_dim=-2), {}
    for folder, function in vision_functions():
        found = []
        for dtypes in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32,) * 2):
            call = vision_call(torch.Generator(DEVICE).manual_seed(seed), dtypes)
            with contextlib.suppress(RuntimeError):
                ours, theirs = (gradients(each, call, seed, before=True) for each in (formula, function))
                found.append(all(map(bits_equal, (*ours[0], *ours[1]), (*theirs[0], *theirs[1]))))
        equal[folder] = found == [True] * 3
    assert len(equal) >= 24 and {folder for folder in equal if not equal[folder]} <= {*OTHER_VISION}


def test_the_vision_function_is_transformers(kernel, rotary, seed):
    rotary._calls.clear()
    theirs = modeling("qwen2_vl").apply_rotary_pos_emb_vision
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for dtypes in PAIRS:
        call = vision_call(generator, dtypes, 80)
        for before in (False, True):
            found, outs = gradients(kernel.apply_rotary_pos_emb_vision, call, seed, before)
            expected, eagers = gradients(theirs, call, seed, before)
            assert all(is_ours(out, kernel) for out in outs)
            assert_same((*found, *outs), (*expected, *eagers), f"vision, {dtypes}, others before {before}")
        call = vision_call(generator, dtypes, batch=(2,))
        with torch.no_grad():
            assert_same(kernel.apply_rotary_pos_emb_vision(*call), theirs(*call), f"vision, batch, {dtypes}")
    assert None not in rotary._calls.resolved.values()
    with pytest.raises(ValueError, match=r"cos: expected a shape that broadcasts"):
        kernel.apply_rotary_pos_emb_vision(*call[:2], call[2][:, :3], call[3])


# On a GPU only


@gpu
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_special_values(rotary, seed, dtype):
    """Every number of 16 bits, infinities, NaNs and subnormal ones among them, in every place."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    every = torch.arange(1 << 16, device=DEVICE).to(torch.int16).view(dtype)

    def make(*shape):
        count = functools.reduce(int.__mul__, shape)
        return every[torch.randint(1 << 16, (count,), generator=generator, device=DEVICE)].view(shape)

    for table_dtype in (dtype, torch.float32):
        q, k = make(2, 512, 8, 128).transpose(1, 2), make(2, 512, 4, 128).transpose(1, 2)
        cos, sin = (make(2, 512, 128).to(table_dtype) for _ in range(2))
        for forward in ORIGINALS.values():
            with torch.no_grad():
                assert_same(replaced(rotary, forward)(q, k, cos, sin, 1), forward(None, q, k, cos, sin, 1), "special")
            leaves = [x.detach().requires_grad_() for x in (q, k)]
            found = []
            for function in (replaced(rotary, forward), functools.partial(forward, None)):
                outs = function(*leaves, cos, sin, 1)
                dys = [x.detach().to(out.dtype) for x, out in zip(leaves, outs)]
                found.append(torch.autograd.grad(outs, leaves, dys))
            assert_same(*found, "gradients of special values")


@pytest.mark.alone(gib=90)
@gpu
def test_beyond_two_to_the_31_elements(rotary):
    q = torch.empty(1, 70_000, 32, 1024, dtype=torch.bfloat16, device=DEVICE).normal_().transpose(1, 2)
    k = q[:, :1]
    cos, sin = (torch.randn(1, 70_000, 1024, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    assert q.numel() > 1 << 31
    with torch.no_grad():
        found, _ = replaced(rotary, LLAMA)(q, k, cos, sin, 1)
        for start in range(0, 70_000, 10_000):
            part = slice(start, start + 10_000)
            expected, _ = LLAMA(None, q[:, :, part], k[:, :, part], cos[:, part], sin[:, part])
            assert_bits_equal(found[:, :, part], expected, f"tokens from {start}")


@gpu
def test_a_large_call_and_a_replayed_graph(rotary, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    make = functools.partial(numbers, dtype=torch.bfloat16, generator=generator)
    q, k = make((8, 2048, 32, 128)).transpose(1, 2), make((8, 2048, 8, 128)).transpose(1, 2)
    call = q, k, make((1, 2048, 128)), make((1, 2048, 128)), 1
    with torch.no_grad():
        assert_same(replaced(rotary, LLAMA)(*call), LLAMA(None, *call), "large")
    found, _ = gradients(replaced(rotary, LLAMA), call, seed)
    assert_same(found, gradients(functools.partial(LLAMA, None), call, seed)[0], "large")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        outs = replaced(rotary, LLAMA)(*call)
    q.normal_()
    graph.replay()
    with torch.no_grad():
        assert_same(outs, LLAMA(None, *call), "replayed")
