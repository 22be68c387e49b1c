"""Every class of the installed transformers that carries a layer name of this package."""

import functools
import importlib
import importlib.metadata
import subprocess
import sys
import warnings

import pytest
import sweep
import torch
import training
import transformers
from bits import assert_bits_equal
from kernels import Mode, replace_kernel_forward_from_hub
from places import forget_all, python_module
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

pytestmark = pytest.mark.either

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What may keep its original forward, by class name; each has its reason in docs/replaced.md.
KEPT = {
    # The halves rotate the other way.
    "apply_rotary_pos_emb, nanochat",
    # cos and sin of half the size, of neighbours.
    "apply_rotary_pos_emb, openai_privacy_filter",
    # Sigmoids instead of softmax.
    "LagunaTopKRouter",
}
# Whose forward looks like Llama's, and whose tables have half the size.
REFUSED_ROTARY_EMBEDDINGS = {"GptOssRotaryEmbedding", "OpenAIPrivacyFilterRotaryEmbedding"}
# Names that users or `name_layers` give: transformers gives no class or function one of them.
GIVEN = {"SwiGLUMLP", "LlamaMLP", "GeGLUMLP", "Phi3MLP", "TorchRMSNorm", "TorchLayerNorm", "CohereLayerNorm"} | {
    "TorchGroupNorm",
    "rotary_pos_emb_vision",
    "rotary_emb",
}
# transformers 5.17.0, the oldest version that is tested, gives no class this name, and Jamba had no router of its own.
OLDEST = transformers.__version__ == "5.17.0"
NOT_YET_GIVEN = {"SoftmaxTopKRouter"} if OLDEST else set()
ROUTERS = {"MixtralTopKRouter", "Qwen3MoeTopKRouter", "Qwen3VLMoeTextTopKRouter"}
ROUTERS |= set() if OLDEST else {"JambaTopKRouter"}


@pytest.fixture(scope="module")
def found(kernel):
    return list(sweep.classes(set(kernel.kernel_mapping())))


def test_every_layer_name_is_found(kernel, found):
    names = [layer_name for layer_name, _ in found]
    assert set(names) == set(kernel.kernel_mapping()) - GIVEN - NOT_YET_GIVEN
    assert names.count("RMSNorm") > 100 and names.count("rotary_pos_emb") > 90


def test_every_class_is_kernelized_and_equal(kernel, found, seed, monkeypatch):
    """On a GPU by kernels, in outputs and gradients; on the CPU, without Triton's interpreter, by the original forwards."""
    if DEVICE == "cpu":
        monkeypatch.setattr(python_module(kernel, "domain"), "_KERNEL_DEVICE", "cuda")
    launches = sweep.count_launches(kernel)
    outcomes = [sweep.compare(*entry, kernel, DEVICE, seed, launches) for entry in found]
    kept = {outcome.name: outcome for outcome in outcomes if not outcome.lossless}
    assert set(kept) <= KEPT, "\n".join(map(str, kept.values()))


def test_the_table_says_what_is_replaced_and_why_the_rest_is_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    problem = (
        "bfloat16, weight bfloat16: lossless-kernels: B.forward keeps its original forward: it reads c no kernel ran"
    )
    outcomes = [sweep.Outcome("RMSNorm", "B", "", "", problem, ""), sweep.Outcome("RMSNorm", "A", "", "f", "", "")]
    page = sweep.table(outcomes)
    assert "1 of 2 are replaced" in page and "| RMSNorm | A | `f` | lossless | lossless |" in page
    assert "| RMSNorm | B |  | original | lossless |" in page and page.endswith("\n- B: it reads c\n")


def test_every_rotary_embedding(kernel, found, seed):
    """The classes whose forward is of Llama's kind: which formula it is, and on a GPU the kernel's cos and sin."""
    tables, proof = (python_module(kernel, name) for name in ("rotary_embedding", "proof"))
    modules = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    classes = [
        each
        for module in modules
        for name, each in vars(module).items()
        if name.endswith("RotaryEmbedding") and isinstance(each, type) and each.__module__ == module.__name__
    ]
    known = [each for each in classes if tables._function(each.forward) is not None]
    assert 100 < len(known) < len(classes)
    dtypes = (torch.bfloat16, torch.float32, torch.int64)

    def differing(ours, theirs):
        if DEVICE == "cpu":  # Which zeros its products of matrices leave negative is its own business.
            ours, theirs = ours + 0.0, theirs + 0.0
        return int(proof.differing(ours, theirs))

    refused = set()
    for layer_class in known:
        sample = functools.partial(tables._sample, layer_class.forward, *dtypes, 64, torch.device(DEVICE))
        equal = [
            variant
            for variant in tables._FORMULAS
            if not any(differing(ours, theirs) for _, ours, theirs in tables._formula(sample, variant))
        ]
        if not equal:
            refused.add(layer_class.__name__)
        elif DEVICE == "cuda":
            for what, ours, expected in tables._kernel(sample, equal[0]):
                assert_bits_equal(ours, expected, f"{what} of {layer_class}")
    assert refused <= REFUSED_ROTARY_EMBEDDINGS


def test_every_router(kernel, seed, monkeypatch):
    """Those that transformers gives no layer name, named by their forward."""
    if DEVICE == "cpu":
        monkeypatch.setattr(python_module(kernel, "domain"), "_KERNEL_DEVICE", "cuda")
    known = list(sweep.routers(kernel))
    names = {each.__name__ for each in known}
    assert names > ROUTERS
    assert not names & {"GptOssTopKRouter", "GraniteMoeTopKRouter", "DeepseekV2TopkRouter", "LagunaTopKRouter"}
    launches = sweep.count_launches(kernel)
    for each in known:
        monkeypatch.setattr(each, "kernel_layer_name", None, raising=False)
        monkeypatch.setattr(each, "kernel_condition", None, raising=False)
        replace_kernel_forward_from_hub(each, sweep.ROUTER)
        outcome = sweep.compare(sweep.ROUTER, each, kernel, DEVICE, seed, launches)
        assert outcome.lossless, outcome


def test_every_decoder_layer(kernel, monkeypatch):
    """By their formulas, in torch operations; docs/decoders.md lists them."""
    if DEVICE == "cpu":  # What runs kernels is asked of gated MLPs.
        monkeypatch.setattr(python_module(kernel, "domain"), "_KERNEL_DEVICE", "cpu")
    rows, kept = sweep.decoder_layers(kernel, torch.device(DEVICE))
    models = {name: cells for name, *cells in rows}
    assert models["llama"] == ["LlamaDecoderLayer", "LlamaAttention: attention", "LlamaMLP"]
    assert models["mistral"][1] == "MistralAttention: attention, a sliding window"
    assert models["qwen3"][1] == "Qwen3Attention: attention, q_norm and k_norm, a sliding window"
    assert models["mixtral"] == ["MixtralDecoderLayer", "MixtralAttention: attention, a sliding window", ""]
    assert len(models) > 80 and not models.keys() & {"cohere2", "phi"}
    reasons = {name: reason for _, name, reason in kept}
    assert reasons["PhiDecoderLayer"].startswith("its forward uses resid_dropout") and "" not in reasons.values()
    listed = (sweep.ROOT / "docs" / "decoders.md").read_text()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "kernels"))
    if versions in listed:
        assert sweep.decoder_table(rows, kept) == listed


@pytest.mark.parametrize("path", ["/nowhere/x.md", "/tmp"])
def test_where_a_table_cannot_be_written_is_said_first(path):
    done = subprocess.run([sys.executable, sweep.__file__, "--decoders", path], capture_output=True, text=True)
    message = f"sweep: error: --decoders: expected a file in a folder that is there, found {path}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


# Classes that nobody decorated: the README tells how to replace them.
RECIPES = [
    (torch.nn.SiLU, "SiLU", "silu"),
    (torch.nn.GELU, "GeLU", "gelu"),
    (functools.partial(torch.nn.GELU, approximate="tanh"), "GeLU", "gelu_tanh"),
    (GemmaRMSNorm, "RMSNormZeroCentered", "((1 + weight) * n).to(dtype)"),
    (Gemma2RMSNorm, "RMSNormZeroCentered", "((1 + weight) * n).to(dtype)"),
    (Gemma3RMSNorm, "RMSNormZeroCentered", "((1 + weight) * n).to(dtype)"),
    (torch.nn.RMSNorm, "TorchRMSNorm", "F.rms_norm"),
    (functools.partial(torch.nn.RMSNorm, eps=1e-6), "TorchRMSNorm", "F.rms_norm"),
    (functools.partial(torch.nn.RMSNorm, elementwise_affine=False), "TorchRMSNorm", "F.rms_norm without weight"),
]


@pytest.mark.parametrize("make, layer_name, formula", RECIPES)
def test_recipes(kernel, seed, monkeypatch, make, layer_name, formula):
    layer_class = getattr(make, "func", make)
    if DEVICE == "cpu":
        monkeypatch.setattr(python_module(kernel, "domain"), "_KERNEL_DEVICE", "cuda")
    # Undecorated again afterwards.
    for given in ("kernel_layer_name", "kernel_condition"):
        monkeypatch.setattr(layer_class, given, None, raising=False)
    monkeypatch.setattr(sweep, "make", lambda layer_class, name, device: make(*[256] * ("Norm" in name)).to(device))
    replace_kernel_forward_from_hub(layer_class, layer_name)
    launches = sweep.count_launches(kernel)
    outcome = sweep.compare(layer_name, layer_class, kernel, DEVICE, seed, launches)
    problems = outcome.inference_problem + outcome.training_problem
    assert "bits differ" not in problems
    if DEVICE == "cuda":
        # torch.nn.GELU is one function for both its values of `approximate`.
        assert formula in outcome.formula.split("; ") and not problems, problems


def test_every_class_is_recognised_by_its_formula(kernel, found):
    """Which needs no GPU: formulas in torch operations are compared with each other."""
    family = python_module(kernel, "rms_norm_proof")
    dtypes = torch.bfloat16, torch.bfloat16
    eps = {"RMSNorm": "variance_epsilon", "RMSNormZeroCentered": "eps"}
    names = {
        layer_class.__name__: family.variant_of(layer_class, eps[layer_name], *dtypes, torch.device("cpu")).name
        for layer_name, layer_class in found
        if layer_name in eps
    }
    inspection = python_module(kernel, "inspection")
    assert all(inspection.functions_of(layer_class) for layer_name, layer_class in found if "RMSNorm" in layer_name)
    assert names["LlamaRMSNorm"] == names["Qwen3RMSNorm"] == "llama"
    assert names["GptOssRMSNorm"] == names["Olmo2RMSNorm"] == "fp32_product"
    assert names["Qwen3_5RMSNorm"] == "one_plus_weight"


def test_every_function_is_recognised_by_its_formula(kernel, found):
    rotary, inspection = (python_module(kernel, name) for name in ("rotary", "inspection"))
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for layer_name, layer in found:
            if layer_name == sweep.ROTARY:
                function = inspection.function_behind(type(layer).forward)
                assert function.__module__.startswith("transformers.models.")
                variant = rotary._variant(function, 1, 4, 3, torch.float16, torch.float32, torch.device("cpu"))
                names[sweep.name_of(layer)] = variant and variant.name
    assert {name for name, variant in names.items() if variant is None} <= KEPT
    assert names["apply_rotary_pos_emb, llama"] == names["apply_rotary_pos_emb, qwen3"] == "plain"
    assert names["apply_rotary_pos_emb, olmo2"] == names["apply_rotary_pos_emb, esm"] == "fp32_compute"


@pytest.mark.skipif(DEVICE == "cpu", reason="on a CPU no kernel is proved")
def test_a_broken_order_keeps_every_original(kernel, found, seed, monkeypatch):
    """A wrong tree, as a new PyTorch or another GPU may have: all layers fall back, warn once, and stay bit-equal."""
    module = lambda name: python_module(kernel, name)  # noqa: E731
    right = module("reduce_config").row_reduction

    def wrong(rows, hidden_size, build):
        # As a GPU would whose blocks were half as wide.
        order = right(rows, hidden_size, build)
        return type(order)(order.hidden_size, order.width // 2, order.height * 2, order.vectorized)

    for family in ("rms_norm_plan", "rms_norm_backward"):
        monkeypatch.setattr(module(family), "row_reduction", wrong)
    forget_all(module, monkeypatch)
    monkeypatch.setattr(sweep, "DTYPES", sweep.DTYPES[:1])
    norms = {layer_class.forward: entry for entry in found for layer_class in entry[1:] if "RMSNorm" in entry[0]}
    for layer_name, layer_class in list(norms.values())[:20]:
        outcome = sweep.compare(layer_name, layer_class, kernel, DEVICE, seed, lambda: 0)
        assert (
            "keeps its original forward" in outcome.inference_problem and "bits differ" not in outcome.training_problem
        )
        layer = sweep.replaced(sweep.make(layer_class, layer_name, DEVICE), kernel, DEVICE, Mode.INFERENCE)
        (entry,) = kernel.replacement_report(layer, verbose=False).layers
        assert entry.path == "original" and "the fp32 rstd differ" in " ".join(entry.reasons)
    original = training.llama(seed, torch.bfloat16)
    replaced = training.kernelized(original, kernel, Mode.INFERENCE)
    tokens = torch.arange(20, device=DEVICE)[None]
    with torch.no_grad():
        assert_bits_equal(replaced(tokens).logits, original(tokens).logits)
