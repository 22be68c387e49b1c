"""`doctor` and scripts/doctor.py: each thing that keeps kernels from running is named, with its next step."""

import json
import re
import sys
from collections import Counter

import pytest
import torch
from projects import ROOT, SCRIPTS, run
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Qwen3Config,
    T5Config,
)

pytestmark = pytest.mark.either
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def planned(kernel, model):
    return {entry.layer: entry for entry in kernel.doctor(model, verbose=False).layers}


def problems(kernel):
    return [problem.what for problem in kernel.doctor(verbose=False).problems]


def test_facts(kernel, capsys):
    diagnosis = kernel.doctor()
    printed = capsys.readouterr().out
    assert printed == f"{diagnosis}\n" and repr(diagnosis).startswith("<Diagnosis: ") and "\n" not in repr(diagnosis)
    facts = diagnosis.facts
    assert torch.__version__.startswith(facts["torch"]) and facts["decorators"] == "live"
    assert facts["lossless-kernels"].startswith(kernel.__name__)
    assert {"python", "triton", "transformers", "kernels", "GPU", "C compiler", "mapping in force"} <= {*facts}
    for problem in diagnosis.problems:
        assert problem.what in printed and f"    next: {problem.step}" in printed
    if not torch.cuda.is_available():
        assert "built without CUDA" in printed or "sees no GPU" in printed


@pytest.mark.parametrize(
    "variable, value, found",
    [
        ("LOSSLESS_PROOF", "maybe", "LOSSLESS_PROOF: expected one of on, off, strict, found 'maybe'"),
        ("DISABLE_KERNEL_MAPPING", "1", "DISABLE_KERNEL_MAPPING is set"),
    ],
)
def test_the_environment(kernel, monkeypatch, variable, value, found):
    assert not any(found in each for each in problems(kernel))
    monkeypatch.setenv(variable, value)
    assert sum(found in each for each in problems(kernel)) == 1


def test_private_names_of_torch_and_another_mapping(kernel, module, monkeypatch):
    from kernels import use_kernel_mapping

    monkeypatch.setattr(module("report"), "MISSING", ["torch._C.gone"])
    with use_kernel_mapping({"RMSNorm": {}}, inherit_mapping=False):
        diagnosis = kernel.doctor(verbose=False)
    found = [problem.what for problem in diagnosis.problems]
    assert any("has no torch._C.gone" in each for each in found)
    assert any("a mapping is registered with RMSNorm" in each for each in found)
    assert diagnosis.facts["mapping in force"] == "1 layer names, RMSNorm of this package's"


def test_a_model_from_its_configuration(kernel):
    layers = planned(kernel, LlamaConfig(**SIZES))
    assert {name: (entry.count, entry.replacement) for name, entry in layers.items()} == {
        "LlamaDecoderLayer": (2, "LlamaDecoderLayer"),
        "apply_rotary_pos_emb": (2, "RotaryPosEmb"),
        "LlamaMLP": (2, "LlamaMLP"),
        "SiLUActivation": (2, "SiLUActivation"),
        "LlamaRMSNorm": (5, "LlamaRMSNorm"),
        "LlamaRotaryEmbedding": (1, "LlamaRotaryEmbedding"),
    }
    assert planned(kernel, GemmaConfig(**SIZES))["GemmaRMSNorm"].replacement == "RMSNormZeroCentered"
    assert planned(kernel, GPT2Config(n_layer=1, n_embd=64, n_head=2))["NewGELUActivation"].count == 1
    assert planned(kernel, T5Config(d_model=64, num_layers=1))["T5LayerNorm"].count == 7
    without = BertConfig(**SIZES, hidden_act="relu")
    assert "replace_kernel_forward_from_hub(torch.nn.LayerNorm" in str(kernel.doctor(without, verbose=False))


@pytest.mark.parametrize(
    "change, kind", [({"hidden_size": 36}, "no kernel for"), ({"dtype": "float64"}, "no kernel for")]
)
def test_what_no_kernel_takes(kernel, change, kind):
    entry = planned(kernel, LlamaConfig(**{**SIZES, **change}))["LlamaRMSNorm"]
    assert (entry.replacement, entry.reason.kind) == ("", kind) and entry.reason.step


@pytest.mark.parametrize(
    "config",
    [Qwen3Config(**SIZES, head_dim=64), Phi3Config(**SIZES, pad_token_id=0), Glm4Config(**SIZES, pad_token_id=0)],
    ids=lambda config: config.model_type,
)
def test_the_plan_is_what_apply_does(kernel, module, config):
    """Name for name and module for module, rotary functions that transformers has not named included. The report of the model
    has them too, as layers that could be named."""
    expected = {name: entry.count for name, entry in planned(kernel, config).items() if entry.replacement}
    assert expected["apply_rotary_pos_emb"] == 2
    model = AutoModelForCausalLM.from_config(config).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    found = {entry.layer: entry for entry in kernel.replacement_report(model, verbose=False).layers}
    assert {name: entry.count for name, entry in found.items()} == expected
    for entry in found.values():
        assert {reason.kind for reason in entry.reasons} <= {"not kernelized", "no layer name"}, entry
    kernel.apply(model)
    report = module("report")
    assert Counter(report.name_of(type(each)) for each in report.replaced_modules(model)) == expected
    kernel.restore(model)


def test_norms_of_two_sizes(kernel):
    """Qwen3's norms over heads of 32 have no kernel, its others have one."""
    diagnosis = kernel.doctor(Qwen3Config(**SIZES, head_dim=32), verbose=False)
    found = [(entry.count, entry.replacement) for entry in diagnosis.layers if entry.layer == "Qwen3RMSNorm"]
    assert sorted(found) == [(4, ""), (5, "LlamaRMSNorm")]
    assert "no kernel for: hidden size 32; next: nothing: kernels take hidden sizes" in str(diagnosis)


def test_a_loaded_model(kernel):
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to("cuda" if torch.cuda.is_available() else "cpu")
    diagnosis = kernel.doctor(model, verbose=False)
    assert "not kernelized" in str(diagnosis) and "next: kernel.apply(model)" in str(diagnosis)
    assert {entry.layer for entry in diagnosis.replacement.layers} >= {"LlamaRMSNorm", "LlamaDecoderLayer"}


@pytest.mark.parametrize(
    "error, model, message",
    [
        (TypeError, 7, "model: expected a module, a configuration or a name, found int"),
        (
            TypeError,
            LlamaConfig,
            "model: expected a module, a configuration or a name, found type LlamaConfig, a class",
        ),
        (ValueError, "/nowhere/at/all", "model: expected the name of a model, found '/nowhere/at/all': "),
    ],
)
def test_wrong_arguments_are_named(kernel, error, model, message):
    with pytest.raises(error, match=re.escape(message)):
        kernel.doctor(model)


def test_without_decorators_and_without_kernels(interpreted):
    code = """
        import sys
        from pathlib import Path
        from kernels import get_local_kernel

        kernel = get_local_kernel(Path("build").absolute())
        diagnosis = kernel.doctor(verbose=False)
        print(diagnosis.facts["decorators"])
        print([each for each in diagnosis.problems if "USE_HUB_KERNELS" in each.what])
    """
    live, found = interpreted(code, USE_HUB_KERNELS="0").stdout.splitlines()
    assert live == "without effect" and "kernel.apply(model) names layers itself" in found


def doctor(*arguments, **environment):
    environment = {"HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0", **environment}
    return run([sys.executable, SCRIPTS / "doctor.py", *arguments], ROOT, **environment)


def test_the_command(build, tmp_path):
    """A folder with config.json, in colour on a terminal alone."""
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    done = doctor(tmp_path)
    assert done.returncode == (not torch.cuda.is_available()), done.stderr
    lines = done.stdout.splitlines()
    assert f"LlamaForCausalLM of {tmp_path}, planned from its configuration" in lines and "\x1b" not in done.stdout
    assert any(re.fullmatch(r"LlamaRMSNorm +5 +LlamaRMSNorm", line) for line in lines)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 64


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--kernel", "/nowhere"],
            "doctor: error: --kernel: expected a build or ORG/NAME, found /nowhere: no such folder",
        ),
        (["--version", "2"], "doctor: error: --version: expected none with a build, found 2"),
    ],
    ids=["kernel", "version"],
)
def test_wrong_arguments_of_the_command(build, arguments, message):
    done = doctor(*arguments)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(message), done.stderr


def test_help():
    done = doctor("--help")
    assert done.returncode == 0 and "examples:" in done.stdout and "--kernel" in done.stdout
