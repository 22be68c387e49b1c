"""What `replacement_report` tells about a model's layers."""

import functools
from types import FunctionType, MethodType

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from places import forget_calls, python_module
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

pytestmark = pytest.mark.either

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def fresh(kernel, monkeypatch):
    """The kernel, with no verdicts yet."""
    proof = python_module(kernel, "proof")
    for table in ("_verdicts", "_outside", "_warned"):
        monkeypatch.setattr(proof, table, type(getattr(proof, table))())
    forget_calls(functools.partial(python_module, kernel))
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
    assert all(entry.reasons == ["not kernelized, or no kernel for its device"] for entry in report.layers)
    assert capsys.readouterr().out == f"{report}\n" and "not kernelized" in str(report)


def test_replaced_but_not_called(fresh, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    assert entries(fresh, model(fresh))["LlamaRMSNorm"].reasons == ["no proof yet: no call that a kernel takes"]


def test_refused_or_proved(fresh, monkeypatch):
    """In the interpreter the order proof refuses, since CPU eager adds in another order."""
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
    assert entries(fresh, layers)["LlamaRMSNorm"].reasons == [
        "activations torch.float64, weight torch.float64, hidden size 64"
    ]


def test_without_proof(fresh, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    layers = model(fresh)
    with torch.no_grad():
        layers[0](torch.randn(2, 64, device=DEVICE))
    assert entries(fresh, layers)["LlamaRMSNorm"].path in ("unproved", "kernel")


def test_somebody_elses_kernel_is_warned_of(fresh):
    def theirs(self, hidden_states):
        return hidden_states

    theirs.__module__ = "_liger_kernels_cuda_1234567.layers"
    layers = model(fresh)
    layers[0].forward = MethodType(theirs, layers[0])
    with pytest.warns(RuntimeWarning, match="LlamaRMSNorm runs another kernel, _liger_kernels_cuda_1234567.layers"):
        found = fresh.replacement_report(layers, verbose=False).layers
    assert {(entry.layer, entry.count, entry.path) for entry in found if entry.layer == "LlamaRMSNorm"} >= {
        ("LlamaRMSNorm", 1, "another kernel")
    }


def test_a_model_without_such_layers(fresh, capsys):
    assert fresh.replacement_report(torch.nn.Linear(2, 2)).layers == []
    assert "no layer" in capsys.readouterr().out


def test_bad_input(fresh):
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, found str"):
        fresh.replacement_report("model")


def test_every_refused_class_has_its_reason(fresh):
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
    assert all("more than every instance" in " ".join(found[name].reasons) for name in ("A", "B")), found


def test_activations_and_norms_that_keep_the_original_say_where(fresh):
    silu, norm = torch.nn.SiLU(inplace=True), torch.nn.RMSNorm((4, 64), device=DEVICE)
    silu.forward = MethodType(fresh.layers.SiLUActivation.forward, silu)
    norm.forward = MethodType(fresh.layers.TorchRMSNorm.forward, norm)
    with torch.no_grad():
        silu(norm(torch.randn(2, 4, 64, device=DEVICE)))
    proof = python_module(fresh, "proof")
    assert "inplace is set" in proof.known(torch.nn.SiLU.forward)[1]
    assert any("shape to normalise" in reason for reason in proof.known(torch.nn.RMSNorm.forward)[1])
