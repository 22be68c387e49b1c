"""Rotary embeddings that turn a part of the head, neighbours or chunks: the kernel against transformers' functions, bit for bit.

On a CPU the kernel runs in Triton's interpreter, in fp32 and fp16: elementwise operations round there as they do on a GPU.
"""

import copy
import functools
import importlib
import itertools
import os
import random
from pathlib import Path

import pytest
import torch
import transformers
from bits import bits_equal
from kernels import Mode, kernelize, use_kernel_mapping
from places import modeling
from test_rotary import DEVICE, DTYPES, assert_same, gradients, is_ours, label, numbers

gpu = pytest.mark.gpu
pytestmark = [
    # numpy, which the interpreter computes with, warns of what overflows in fp16.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning"),
    pytest.mark.filterwarnings("error:lossless-kernels:RuntimeWarning"),
]
# `LOSSLESS_CASES=200 pytest tests/test_rotary_variants.py -k at_random` for docs/numerics.md.
CASES = int(os.environ.get("LOSSLESS_CASES", 2))

# Formula -> folders of transformers whose functions compute it.
FOLDERS = {
    "partial": ("gpt_neox", "qwen3_next", "glm4_moe", "phi3", "nemotron", "bamba"),
    "partial_neighbours": ("glm", "glm4", "moonshine"),
    "partial_neighbours_whole": ("glm4v", "glm_ocr"),
    "chunked": ("gpt_oss",),
    "neighbours": ("helium",),
    "neighbours_fp32_compute": ("ernie4_5", "ernie4_5_moe"),
    "neighbours_fp32_compute_whole": ("ernie4_5_vl_moe",),
    "neighbours_fp32_whole": ("cohere", "cohere2"),
    "plain": ("stablelm", "persimmon", "gpt_neox_japanese"),
}
EACH = [(name, folder) for name, folders in FOLDERS.items() for folder in folders]


@pytest.fixture
def rotary(module):
    rotary = module("rotary")
    rotary._calls.clear()
    rotary._gradient_calls.clear()
    return rotary


def function_of(folder):
    """transformers' function, without the module that its decorator made of it."""
    function = modeling(folder).apply_rotary_pos_emb
    return functools.partial(type(function).forward, None) if isinstance(function, torch.nn.Module) else function


def random_call(choose, generator, variant, dtypes=None):
    """(q, k, cos, sin, unsqueeze_dim) in layouts that transformers produces, and in others."""
    dtype, table_dtype = dtypes or (choose.choice(DTYPES), choose.choice(DTYPES))
    batch, tokens = choose.choice((1, 1, 2)), choose.choice((1, 2, 5))
    # torch.cat gives chunks of one element another memory order, which the kernel leaves to eager.
    rotary_dim = choose.choice((6, 16, 32, 64) if variant.chunked else (2, 6, 16, 32, 64))
    passed = choose.choice((0, 2, 3, 16, 48, 192)) if variant.partial else 0
    heads, head_dim = (choose.choice((1, 2, 5, 17)), choose.choice((1, 2, 3))), rotary_dim + passed
    make = functools.partial(numbers, generator=generator)
    # A projection's output, one of several, or heads before tokens in memory.
    layout, more = choose.choice("pft"), choose.choice((0, 0, 8))
    q, k = (make((batch, tokens, count + 2 * (layout == "f"), head_dim + more), dtype) for count in heads)
    q, k = q[:, :, : heads[0], :head_dim], k[:, :, : heads[1], :head_dim]
    if layout == "t":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    unsqueeze_dim = choose.choice((1, 1, 2, -2))
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    size = rotary_dim // 2 if variant.table == "one_each" else rotary_dim
    tables = (make((choose.choice((1, batch)), tokens, size + more), table_dtype)[..., :size] for _ in range(2))
    return q, k, *tables, unsqueeze_dim


def specials(call):
    """The call with infinities, NaN, zeros and the largest and smallest numbers in query and key."""
    for x in call[:2]:
        info = torch.finfo(x.dtype)
        values = torch.tensor((0.0, -0.0, torch.inf, -torch.inf, torch.nan, info.max, info.tiny / 4, -info.tiny / 4))
        x.view(-1)[: values.numel()].copy_(values[: x.numel()]) if x.is_contiguous() else x[..., :2].copy_(values[:2])
    return call


def assert_kernels_ran(rotary, variant):
    assert None not in rotary._calls.resolved.values()
    gradients = rotary._gradient_calls.resolved.values()
    # Eager's gradients of chunks may have another memory order.
    assert any(gradients) if variant.chunked else None not in gradients


@pytest.mark.usefixtures("proof_off")
@pytest.mark.parametrize("name", FOLDERS)
def test_calls_at_random(kernel, rotary, module, seed, name):
    """Outputs and gradients, with other consumers of query and key before and after the function, and without."""
    choose, generator = random.Random(seed), torch.Generator(DEVICE).manual_seed(seed)
    variant = module("rotary_formulas").FORMULAS[name]
    for case in range(10 * CASES):
        # Eager's gradients of chunks may have another memory order in all of a few cases.
        if case >= CASES and (not variant.chunked or any(rotary._gradient_calls.resolved.values())):
            break
        call = specials(random_call(choose, generator, variant))
        theirs = function_of(choose.choice(FOLDERS[name]))
        ours = functools.partial(rotary.replacement, subject=variant.eager)
        text = f"case {case} of seed {seed}, {label(*call)}"
        before, after = choose.choice((False, True)), choose.choice((False, True))
        found, outs = gradients(ours, call, seed, before, after)
        expected, eagers = gradients(theirs, call, seed, before, after)
        assert all(is_ours(out, kernel) for out in outs), text
        assert_same(outs, eagers, text)
        assert_same(found, expected, text)
        with torch.no_grad():
            assert_same(ours(*call), eagers, text)
    assert_kernels_ran(rotary, variant)


@pytest.mark.parametrize("name, folder", EACH)
def test_functions_are_recognised(rotary, module, name, folder):
    """By their formula, and as no other one."""
    subject, device = modeling(folder).apply_rotary_pos_emb, torch.device(DEVICE)
    function = module("inspection").function_behind(getattr(type(subject), "forward", subject))
    function = function if isinstance(subject, torch.nn.Module) else subject
    for dtypes in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
        found = rotary._variant(function, 1, 4, 3, *dtypes, device)
        # Where everything is fp32, several formulas have the same bits.
        assert found is module("rotary_formulas").FORMULAS[name] or (dtypes[0] == torch.float32 and found is not None)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_formula_has_the_gradient_of_autograd(module, seed, name):
    """Where no kernel runs, and where gradients are differentiated in turn."""
    variant, choose = module("rotary_formulas").FORMULAS[name], random.Random(seed)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for dtype, table_dtype in itertools.product((torch.float32, torch.float16, torch.bfloat16), repeat=2):
        q, k, cos, sin, dim = random_call(choose, generator, variant, (dtype, table_dtype))
        leaf = q.detach().requires_grad_()
        out, _ = variant.eager(leaf, k, cos, sin, dim)
        dy = numbers(out.shape, out.dtype, generator)
        (expected,) = torch.autograd.grad(out, leaf, dy)
        tables = cos.unsqueeze(dim), sin.unsqueeze(dim)
        found = variant.gradient(dy, *tables, dtype)
        assert_same((found,), (expected,), f"{name}, {dtype}, {table_dtype}, seed {seed}")


@pytest.mark.parametrize("name", FOLDERS)
def test_the_proof_passes_every_formula(module, name):
    """Through the launches, in eager's strides too: torch.cat has others than its inputs."""
    variant, is_proved = module("rotary_formulas").FORMULAS[name], module("ops.rotary_proof").kernel_is_proved
    sizes = (
        module("ops.rotary_layout").Sizes(48, 32, 8)
        if variant.partial
        else module("ops.rotary_layout").Sizes(16, 16, 8)
    )
    for dtypes, gradients_too in itertools.product(itertools.product(DTYPES, repeat=2), (False, True)):
        assert is_proved(variant, *dtypes, sizes, torch.device(DEVICE), gradients_too), (dtypes, gradients_too)


PARTIAL = ("partial", "partial_neighbours", "partial_neighbours_whole")
PLANTED = ("unpadded", "passed without a zero", "sine of the other half", "products not rounded")


def verdicts_on(planted, family, patch, variant, sizes, dtype=torch.float16):
    """Whether the proofs of output and gradients pass for this arithmetic in the launch's place."""

    def launch(step, formula, dtypes, sizes, q, k, cos, sin, *outs):
        size = sizes.rotary_dim
        tables = [each.unsqueeze(1) for each in (cos, sin)]
        for x, out in zip((q, k), outs):
            if step == "forward":
                result = formula.rotate(x, *tables)
                if planted == "sine of the other half":
                    result = formula.rotate(x, tables[0], tables[1].roll(size // 2, -1))
                if planted == "products not rounded":
                    wide = formula.rotate(x.double(), *(each.double() for each in tables))
                    result = wide.to(result.dtype)
            else:
                result = formula.gradient(x, *tables, dtypes[2])
                if planted == "sine of the other half":
                    result = formula.gradient(x, tables[0], tables[1].roll(size // 2, -1), dtypes[2])
                if planted == "products not rounded":
                    result = formula.gradient(x.double(), *(each.double() for each in tables), torch.float64)
                    result = result.to(dtypes[2])
                if planted == "unpadded":
                    result = torch.where(result == 0, -result.abs(), result)
                if planted == "passed without a zero":
                    result[..., size:] = x[..., size:]
            out.copy_(result)

    patch.setattr(family, "_launch_sample", launch)
    return [
        all(
            bits_equal(ours, eagers)
            for _, ours, eagers in comparisons(variant, dtype, dtype, sizes, torch.device("cpu"))
        )
        for comparisons in (family._comparisons, family._gradient_comparisons)
    ]


@pytest.mark.parametrize("name", ("partial", "partial_neighbours"))
@pytest.mark.parametrize("planted", (None, *PLANTED))
def test_the_proof_tells_wrong_arithmetic(module, monkeypatch, name, planted):
    """In a launch's place, through the inputs of the proof; and the right arithmetic passes."""
    variant, sizes = module("rotary_formulas").FORMULAS[name], module("ops.rotary_layout").Sizes(48, 32, 8)
    forward, backward = verdicts_on(planted, module("ops.rotary_proof"), monkeypatch, variant, sizes)
    told = {None: (True, True), "unpadded": (True, False), "passed without a zero": (True, False)}
    if planted == "sine of the other half" and name == "partial_neighbours":
        # Both halves of its tables stand for the first.
        assert not forward and not backward
        return
    assert (forward, backward) == told.get(planted, (False, False)), planted


# So many proofs: `LOSSLESS_PROOFS=1000 pytest tests/test_rotary_variants.py -k power -rP` for docs/numerics.md.
PROOFS = int(os.environ.get("LOSSLESS_PROOFS", 3))


def test_the_power_of_the_proof(module, monkeypatch, seed):
    """Each proof with a formula of a part of the head, an error, a size and a seed of its own."""
    choose, formulas = random.Random(seed), module("rotary_formulas").FORMULAS
    family = module("ops.rotary_proof")
    for _ in range(PROOFS):
        name, planted, of_proof = choose.choice(PARTIAL), choose.choice(PLANTED), choose.randrange(1 << 30)
        sizes = module("ops.rotary_layout").Sizes(*choose.choice(((48, 32, 8), (128, 64, 8), (80, 32, 8))))
        with monkeypatch.context() as patch:
            patch.setattr(
                family.proof, "generator", lambda device, _, of=of_proof: torch.Generator(device).manual_seed(of)
            )
            assert not all(verdicts_on(planted, family, patch, formulas[name], sizes)), (name, planted, sizes, of_proof)


def test_the_public_function_keeps_its_formula(kernel):
    """cos of a part of the head is an error, as in eager."""
    q, cos = torch.ones(1, 2, 3, 16), torch.ones(1, 3, 8)
    with pytest.raises(ValueError, match="cos: expected a shape that broadcasts"):
        kernel.apply_rotary_pos_emb(q, q, cos, cos)


def test_cos_of_another_size_runs_the_original(rotary, module):
    """A plain function, given cos of a part of the head or of half of it, raises as it does without a kernel."""
    q = torch.ones(1, 2, 3, 16, device=DEVICE)
    for size in (8, 4):
        cos = torch.ones(1, 3, size, device=DEVICE)
        assert rotary.replacement(q, q, cos, cos, 1, module("rotary_formulas").PLAIN.eager) is None


# The way to functions that transformers gives no layer name


# Other arguments, other formulas, and one that may get no keys.
UNKNOWN = """blt clvp codegen deepseek_v4 diffusion_gemma dinov3_vit eomt_dinov3 gemma3n gemma4 gemma4_unified glmasr gptj
    minimax_m3_vl-vision nemotron3_5_transcribe nemotron3_diarization pe_audio pe_audio_video pe_video qwen4_exp sapiens2""".split()


def unnamed_functions(module):
    """Of every file of transformers the functions that kernels may replace and that its decorators leave as they are."""
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text()
        for name, layer_name in module("mapping")._NAMES_BY_FUNCTION.items():
            if f"\ndef {name}(" in text:
                namespace = vars(importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"))
                if not isinstance(namespace[name], torch.nn.Module):
                    yield path.parent.name + "-vision" * name.endswith("vision"), namespace[name], layer_name, namespace


@pytest.mark.long
@pytest.mark.skipif(transformers.__version__ != "5.22.2", reason="the list is of transformers 5.22.2")
def test_the_sweep_finds_every_function(module):
    found = {
        label: module("mapping")._is_rotary(function, name, namespace)
        for label, function, name, namespace in unnamed_functions(module)
    }
    assert sorted(label for label, known in found.items() if not known) == sorted(UNKNOWN)
    assert sum(found.values()) == 71


def tiny(name, **more):
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=32,
        attn_implementation="eager", bos_token_id=None, eos_token_id=None, pad_token_id=None, **more,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config).to(DEVICE).eval()


@pytest.mark.usefixtures("proof_off")
@pytest.mark.parametrize("name, folder", (("GPTNeoX", "gpt_neox"), ("StableLm", "stablelm")))
def test_apply_replaces_the_function_of_a_file(kernel, rotary, seed, name, folder):
    """Until the last model is restored."""
    torch.manual_seed(seed)
    file, model = modeling(folder), tiny(name, **{"num_key_value_heads": 4} if name == "StableLm" else {})
    function, twin = file.apply_rotary_pos_emb, copy.deepcopy(model)
    tokens = torch.randint(32, (2, 5), device=DEVICE)
    # The interpreter's exp, tanh and erf are numpy's: the rotation alone has eager's bits there.
    make = functools.partial(numbers, dtype=torch.float16, generator=torch.Generator(DEVICE).manual_seed(seed))
    call = make((2, 4, 5, 16)), make((2, 2, 5, 16)), make((1, 5, 16)), make((1, 5, 16))
    with torch.no_grad():
        try:
            report = kernel.apply(model)
            assert isinstance(file.apply_rotary_pos_emb, torch.nn.Module)
            model(tokens)
            assert_same(file.apply_rotary_pos_emb(*call), function(*call), name)
            assert rotary._calls.resolved and None not in rotary._calls.resolved.values()
            (entry,) = (each for each in report.layers if each.layer == "apply_rotary_pos_emb")
            assert entry.count == 2
            kernel.apply(twin)
            kernel.restore(model)
            assert isinstance(file.apply_rotary_pos_emb, torch.nn.Module)
        finally:
            kernel.restore(model)
            kernel.restore(twin)
        assert file.apply_rotary_pos_emb is function
        assert not any("_kernel_funcs" in vars(each) for each in model.modules())


def test_name_layers_names_the_function_for_good(kernel, module):
    file = modeling("persimmon")
    function = file.apply_rotary_pos_emb
    model = tiny(
        "Persimmon", rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    )
    try:
        assert kernel.name_layers(model)["apply_rotary_pos_emb"] == "rotary_pos_emb"
        made = file.apply_rotary_pos_emb
        assert type(made).kernel_layer_name == "rotary_pos_emb"
        assert vars(model.model.layers[0].self_attn)["_kernel_funcs"] == {"apply_rotary_pos_emb": made}
        kernel.restore(model)
        assert file.apply_rotary_pos_emb is made
    finally:
        file.apply_rotary_pos_emb = function


@pytest.mark.usefixtures("proof_off")
def test_the_function_of_a_vision_tower(kernel, rotary, module, seed):
    file = modeling("qwen2_vl")
    function = file.apply_rotary_pos_emb_vision
    mapping, attention = module("mapping"), torch.nn.Module.__new__(file.VisionAttention)
    try:
        made = mapping.name_functions(attention)["apply_rotary_pos_emb_vision"]
        assert file.apply_rotary_pos_emb_vision is made and mapping.functions_called(attention) == [made]
        device = "rocm" if torch.version.hip else DEVICE
        with use_kernel_mapping(kernel.kernel_mapping(devices=(device,)), inherit_mapping=False):
            kernelize(made, mode=Mode.INFERENCE, device=device)
        make = functools.partial(numbers, dtype=torch.float16, generator=torch.Generator(DEVICE).manual_seed(seed))
        call = make((5, 4, 16)), make((5, 2, 16)), make((5, 16)), make((5, 16))
        found, outs = gradients(made, call, seed, True)
        expected, eagers = gradients(function, call, seed, True)
        assert all(is_ours(out, kernel) for out in outs)
        assert_same((*found, *outs), (*expected, *eagers), "vision")
        mapping.put_function_back(made)
        assert file.apply_rotary_pos_emb_vision is function
    finally:
        file.apply_rotary_pos_emb_vision = function


# On a GPU


@gpu
@pytest.mark.parametrize("name, folder", EACH)
def test_functions_on_a_gpu(kernel, rotary, module, seed, name, folder):
    """Every dtype, verified by the proof."""
    choose, generator = random.Random(seed), torch.Generator(DEVICE).manual_seed(seed)
    variant, theirs = module("rotary_formulas").FORMULAS[name], function_of(folder)
    for dtypes in itertools.product((torch.bfloat16, torch.float16, torch.float32), repeat=2):
        for case in range(6):
            call = specials(random_call(choose, generator, variant, dtypes))
            text = f"{folder}, case {case} of seed {seed}, {label(*call)}"
            found, outs = gradients(
                functools.partial(rotary.replacement, subject=variant.eager), call, seed, True, True
            )
            expected, eagers = gradients(theirs, call, seed, True, True)
            assert_same(outs, eagers, text)
            assert_same(found, expected, text)
    assert_kernels_ran(rotary, variant)
