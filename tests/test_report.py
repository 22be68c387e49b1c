"""What `replacement_report` tells about a model's layers."""

import sys
from types import FunctionType, MethodType, SimpleNamespace

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from places import python_module
from transformers import LlamaConfig
from transformers.activations import SiLUActivation
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

pytestmark = pytest.mark.either

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def fresh(kernel, nothing_known):
    """The kernel, with no verdicts yet."""
    return kernel


def model(kernel=None):
    layers = torch.nn.Sequential(LlamaRMSNorm(64), LlamaRMSNorm(64), Olmo2RMSNorm(64), SiLUActivation()).to(DEVICE)
    if kernel is not None:
        with use_kernel_mapping(kernel.kernel_mapping(devices=(DEVICE,)), inherit_mapping=False):
            kernelize(layers, mode=Mode.INFERENCE, device=DEVICE)
    return layers


def entries(kernel, layers):
    return {entry.layer: entry for entry in kernel.replacement_report(layers, verbose=False).layers}


def test_nothing_replaced(fresh, capsys):
    report = fresh.replacement_report(model())
    assert {(entry.layer, entry.count, entry.path) for entry in report.layers} == {
        ("LlamaRMSNorm", 2, "original"),
        ("Olmo2RMSNorm", 1, "original"),
        ("SiLUActivation", 1, "original"),
    }
    assert all(entry.reasons == ["not kernelized"] for entry in report.layers)
    assert capsys.readouterr().out == f"{report}\n" and "not kernelized" in str(report)


def test_replaced_but_not_called(fresh, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    assert entries(fresh, model(fresh))["LlamaRMSNorm"].reasons == ["not called yet"]


def test_failed_or_proved(fresh, monkeypatch):
    """In the interpreter the order proof fails, since CPU eager adds in another order."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    layers, x = model(fresh), torch.randn(16, 64, device=DEVICE)
    with torch.no_grad(), pytest.warns(RuntimeWarning) if DEVICE == "cpu" else torch.no_grad():
        for _ in range(2):
            layers[0](x), layers[2](x)
    found = entries(fresh, layers)
    if DEVICE == "cpu":
        assert found["LlamaRMSNorm"].path == "original"
        assert "elements of the fp32 rstd differ" in found["LlamaRMSNorm"].reasons[0]
    else:
        assert found["LlamaRMSNorm"].path == found["Olmo2RMSNorm"].path == "kernel"
        assert found["LlamaRMSNorm"].proved and not found["LlamaRMSNorm"].reasons


def test_tensors_that_no_kernel_takes(fresh, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    layers = model(fresh).double()
    with torch.no_grad():
        layers[0](torch.randn(2, 64, dtype=torch.float64, device=DEVICE))
    assert entries(fresh, layers)["LlamaRMSNorm"].reasons == ["activations torch.float64, weight torch.float64"]


def test_a_call_after_a_capture_is_verified(fresh, monkeypatch):
    """What could not be verified in a CUDA graph's capture is told until it is verified."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    proof, layers = python_module(fresh, "proof"), model(fresh)
    proof.record_refusal(LlamaRMSNorm.forward, proof.IN_CAPTURE)
    assert entries(fresh, layers)["LlamaRMSNorm"].reasons == [proof.IN_CAPTURE]
    subject = proof.Subject(LlamaRMSNorm.forward, torch.device(DEVICE), "16 rows", "n")
    assert proof.kernel_is_proved("key", subject, lambda: [("the output", torch.ones(2), torch.ones(2))])
    assert entries(fresh, layers)["LlamaRMSNorm"].path == "kernel"


def test_without_proof(fresh, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    layers = model(fresh)
    with torch.no_grad():
        layers[0](torch.randn(2, 64, device=DEVICE))
    assert entries(fresh, layers)["LlamaRMSNorm"].path in ("unproved", "kernel")


def test_somebody_elses_kernel_is_warned_of(fresh, monkeypatch):
    class Theirs(torch.nn.Module):
        def forward(self, hidden_states):
            return hidden_states

    Theirs.forward.__module__ = "_liger_kernels_cuda_1234567.layers"
    monkeypatch.setitem(
        sys.modules, "_liger_kernels_cuda_1234567", SimpleNamespace(layers=SimpleNamespace(Theirs=Theirs))
    )
    layers = model(fresh)
    layers[0].forward = MethodType(Theirs.forward, layers[0])
    with pytest.warns(RuntimeWarning, match="LlamaRMSNorm runs another kernel, _liger_kernels_cuda_1234567.layers"):
        found = fresh.replacement_report(layers, verbose=False).layers
    (entry,) = [entry for entry in found if entry.path == "another kernel"]
    assert (entry.layer, entry.count) == ("LlamaRMSNorm", 1)
    (reason,) = entry.reasons
    assert (reason.kind, reason.step) == ("another kernel", "kernel.apply(model) takes the layer back")
    # The step does what it says.
    fresh.apply(layers)
    assert layers[0].forward.__func__ is fresh.layers.LlamaRMSNorm.forward


def test_a_repl_does_not_print_it_twice(fresh, capsys):
    report = fresh.replacement_report(model())
    assert capsys.readouterr().out.count("LlamaRMSNorm") >= 1
    assert repr(report) == "<ReplacementReport: original 4; print it for the reasons>"
    assert repr(fresh.replacement_report(torch.nn.Linear(2, 2))).startswith("<ReplacementReport: no layers; ")


def test_reasons_are_told_apart_and_have_a_step(fresh, monkeypatch):
    """Each kind once: what was found, and what to do."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    proof, layers = python_module(fresh, "proof"), model(fresh)
    kinds = {}

    def reason():
        (found,) = entries(fresh, layers)["LlamaRMSNorm"].reasons
        assert found.step and f"next: {found.step} (" in str(fresh.replacement_report(layers, verbose=False))
        kinds[found.kind] = found.step
        return found.kind, str(found)

    assert reason() == ("not called yet", "not called yet") and "warmup" in kinds["not called yet"]
    call = "activations torch.bfloat16, weight torch.bfloat16, hidden size 4096, 16 or more rows"
    subject = proof.Subject(LlamaRMSNorm.forward, torch.device(DEVICE), call, "n")
    for key, text, words in (
        ("one", "3 elements of the output differ", "strict"),
        ("two", "RuntimeError: Failed to find C compiler.", "install a C compiler"),
        ("three", "the GPU's memory was full when it was verified; call warmup() while there is room", "warmup"),
    ):
        proof._verdicts[key] = proof.Verdict(subject, text)
        assert reason() == ("verification failed", f"{call}: {text}") and words in kinds["verification failed"]
        del proof._verdicts[key]
    unlike = proof.Subject(LlamaRMSNorm.forward, torch.device(DEVICE), "16 rows")
    for text, kind in (
        ("9 elements of the output differ", "another formula"),
        ("AttributeError: no eps", "another formula"),
        ("the GPU's memory was full during verification; call warmup() while memory is free", "verification failed"),
        ("RuntimeError: Failed to find C compiler.", "verification failed"),
    ):
        proof._verdicts["formula"] = proof.Verdict(unlike, text)
        assert reason()[0] == kind
    del proof._verdicts["formula"]
    proof.record_refusal(LlamaRMSNorm.forward, proof.Failure("gradients come from torch: Failed to find C compiler"))
    assert reason()[0] == "verification failed" and "install a C compiler" in kinds["verification failed"]
    for text, words in (
        ("activations torch.float64, weight torch.float64", "float32, float16 or bfloat16"),
        ("activations torch.bfloat16, weight torch.float8_e4m3fn", "float32, float16 or bfloat16"),
        ("hidden size 66", "multiples of 4"),
        ("hidden size is above 8192", "up to that"),
        (proof.HIDDEN_DEPENDENCY, "no closure"),
        (proof.IN_CAPTURE, "capture again"),
        ("gradients torch.float32 of activations torch.bfloat16 and weight torch.bfloat16", "output's dtype"),
        ("activations whose rows are strided or not equally spaced", "contiguous"),
        ("autocast, which computes powers in fp32", "autocast"),
        (proof.NOT_PLAIN, "transforms"),
        ("activations on cpu, weight on cpu", "to a GPU"),
    ):
        proof._refusals.clear()
        proof.record_refusal(LlamaRMSNorm.forward, text)
        assert reason() == ("no kernel for", text) and words in kinds["no kernel for"]
    proof._refusals.clear()
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    assert reason()[0] == "not verified"
    fresh.restore(layers)
    assert reason() == ("not kernelized", "not kernelized") and kinds["not kernelized"] == "kernel.apply(model)"
    layers[0].forward = layers[1].forward = lambda hidden_states: hidden_states
    assert reason()[0] == "another forward"
    for norm in layers[:2]:
        norm.forward = MethodType(lambda self, hidden_states: hidden_states, norm)
    assert reason()[0] == "another forward", "`apply` leaves a method alone that no kernelize has bound"
    monkeypatch.setattr(python_module(fresh, "domain"), "_KERNEL_DEVICE", "elsewhere")
    del layers[0].forward, layers[1].forward
    assert reason() == ("no kernels here", f"the model is on {DEVICE}")
    assert len(kinds) == 8


def test_layers_that_could_have_a_name(fresh):
    layers = torch.nn.Sequential(GemmaRMSNorm(64), torch.nn.GELU(), LlamaMLP(LlamaConfig(hidden_size=64))).to(DEVICE)
    found = entries(fresh, layers)
    for name, layer_name in (("GemmaRMSNorm", "RMSNormZeroCentered"), ("GELU", "GeLU"), ("LlamaMLP", "SwiGLUMLP")):
        assert found[name].reasons == [f"{layer_name} would fit"] and found[name].path == "original"
    assert 'replace_kernel_forward_from_hub(torch.nn.GELU, "GeLU")' in found["GELU"].reasons[0].step
    assert "kernel.apply(model)" in found["LlamaMLP"].reasons[0].step
    fresh.apply(layers)
    assert entries(fresh, layers)["GELU"].reasons and entries(fresh, layers)["GemmaRMSNorm"].path == "not called yet"


def test_a_norm_of_another_family_is_not_said_to_be_unknown(fresh, monkeypatch):
    """Before Cohere's LayerNorm gets its name, its forward is compared with the formulas of RMSNorm."""
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    layers, x = torch.nn.Sequential(CohereLayerNorm(64)).to(DEVICE), torch.randn(2, 64, device=DEVICE)
    fresh.apply(layers)
    with torch.no_grad():
        layers(x)
    (entry,) = fresh.replacement_report(layers, verbose=False).layers
    assert layers[0].forward.__func__ is fresh.layers.CohereLayerNorm.forward
    assert entry.path in ("unproved", "kernel") and "another formula" not in [each.kind for each in entry.reasons]


def test_a_model_without_such_layers(fresh, capsys):
    assert fresh.replacement_report(torch.nn.Linear(2, 2)).layers == []
    assert "no layer" in capsys.readouterr().out


def test_bad_input(fresh):
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, found str"):
        fresh.replacement_report("model")


def test_every_class_that_keeps_its_original_has_its_reason(fresh):
    """Two of them, called with tensors of the same kinds."""

    def forward(self, hidden_states):
        return LlamaRMSNorm.forward(self, hidden_states)

    classes = [
        type(name, (LlamaRMSNorm,), {"forward": FunctionType(forward.__code__, globals())}) for name in ("A", "B")
    ]
    layers = torch.nn.Sequential(*(owner(64) for owner in classes)).to(DEVICE)
    with use_kernel_mapping(fresh.kernel_mapping(devices=(DEVICE,)), inherit_mapping=False):
        kernelize(layers, mode=Mode.INFERENCE, device=DEVICE)
    with torch.no_grad():
        layers(torch.randn(16, 64, device=DEVICE))
    found = entries(fresh, layers)
    assert all("more than its module's attributes" in " ".join(found[name].reasons) for name in ("A", "B")), found


def test_activations_and_norms_that_keep_the_original_say_where(fresh):
    silu, norm = torch.nn.SiLU(inplace=True), torch.nn.RMSNorm((4, 64), device=DEVICE)
    silu.forward = MethodType(fresh.layers.SiLUActivation.forward, silu)
    norm.forward = MethodType(fresh.layers.TorchRMSNorm.forward, norm)
    with torch.no_grad():
        silu(norm(torch.randn(2, 4, 64, device=DEVICE)))
    proof = python_module(fresh, "proof")
    assert "inplace is set" in proof.verdicts_about(torch.nn.SiLU.forward)[1]
    assert any(
        "normalized_shape is not the last dimension" in reason
        for reason in proof.verdicts_about(torch.nn.RMSNorm.forward)[1]
    )
