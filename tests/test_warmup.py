"""Compiling and proving ahead: what `warmup` does is what later calls find done."""

import io
import json
import re
import sys
import threading
import warnings
from types import MethodType

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def fresh(kernel, nothing_known):
    """The kernel, with no verdicts and no calls yet."""
    return kernel


def model(kernel, hidden_size=64, dtype=torch.float32):
    norms = (LlamaRMSNorm(hidden_size, eps) for eps in (1e-6, 1e-6, 1e-5))
    layers = torch.nn.Sequential(*norms, Qwen3NextRMSNormGated(hidden_size), SiLUActivation()).to(DEVICE, dtype)
    with use_kernel_mapping(kernel.kernel_mapping(devices=(DEVICE,)), inherit_mapping=False):
        return kernelize(layers, mode=Mode.TRAINING, device=DEVICE)


def call(layers, rows, hidden_size, dtype, training):
    x = torch.randn(rows, hidden_size, device=DEVICE).to(dtype).requires_grad_(training)
    with torch.set_grad_enabled(training):
        outs = [layer(x, x) if isinstance(layer, Qwen3NextRMSNormGated) else layer(x) for layer in layers]
        if training:
            torch.autograd.grad(outs, (x, *layers.parameters()), [torch.ones_like(out) for out in outs])


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter takes the CPU's tensors")
@pytest.mark.parametrize("training", [False, True])
def test_in_the_interpreter(fresh, module, monkeypatch, training):
    """CPU eager adds in another order, so the order proofs of the norms fail, each of them once and in here."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    layers, steps = model(fresh), []
    gradients = [parameter.grad for parameter in layers.parameters()]
    state = torch.random.get_rng_state()
    with pytest.warns(RuntimeWarning, match="keeps its original forward"):
        report = fresh.warmup(layers, training=training, progress=lambda *step: steps.append(step))
    assert torch.equal(state, torch.random.get_rng_state())
    assert [parameter.grad for parameter in layers.parameters()] == gradients
    assert report.compiled == sum(what == "compiled" for *_, what in steps) and not report.skipped
    calls = [(done, total) for done, total, what in steps if what == "called"]
    assert calls == [(number, len(calls)) for number in range(1, len(calls) + 1)]
    assert any("fp32 rstd" in text for text in report.failed)
    assert f" {len(report.failed)} failed, " in str(report) and f"\n    failed: {report.failed[0]}" in str(report)
    before = set(module("proof")._verdicts)
    for rows in (1, 3, 7, 8, 20, 700):
        call(layers, rows, 64, torch.float32, training=False)
    assert set(module("proof")._verdicts) == before
    again = fresh.warmup(layers, training=training)
    assert again.proved == again.failed == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter takes the CPU's tensors")
def test_a_layer_that_no_kernel_takes_is_named(fresh, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    norm = LlamaRMSNorm(40)
    norm.forward = MethodType(fresh.layers.LlamaRMSNorm.forward, norm)
    with pytest.warns(RuntimeWarning, match=r"nothing could be warmed up: LlamaRMSNorm\.forward: hidden size 40"):
        report = fresh.warmup(norm, rows=[16])
    assert (report.compiled, report.skipped) == (0, ["LlamaRMSNorm.forward: hidden size 40"])
    # Another warmup has nothing new to tell, and one of a layer besides that kernels take does not warn.
    assert not fresh.warmup(norm, rows=[16]).skipped
    other = LlamaRMSNorm(64)
    other.forward = MethodType(fresh.layers.LlamaRMSNorm.forward, other)
    layers = torch.nn.ModuleList([other, norm, LlamaRMSNorm(64).double()])
    layers[2].forward = MethodType(fresh.layers.LlamaRMSNorm.forward, layers[2])
    with warnings.catch_warnings(action="error"):
        for _ in range(2):
            assert fresh.warmup(layers, rows=[16]).skipped == ["LlamaRMSNorm: torch.float64 has no kernel"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter takes the CPU's tensors")
@pytest.mark.parametrize("training", [False, True])
def test_whole_decoder_layers(fresh, module, monkeypatch, training):
    """Of which the attention and the MLP's projections are not called, nor what hangs on them."""
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=96, vocab_size=16)).to(torch.bfloat16)
    fresh.name_layers(llama)
    with use_kernel_mapping(fresh.kernel_mapping(level="decoder", devices=("cpu",)), inherit_mapping=False):
        kernelize(llama, mode=Mode.TRAINING, device="cpu")
    for name, each in llama.named_modules():
        if name.endswith(("_proj", "self_attn", "mlp", "layers.0", "layers.1.post_attention_layernorm")):
            each.register_forward_hook(lambda *_: 1 / 0)
    launched, threads, launch = set(), set(), module("launch").Launcher
    through_triton = launch.through_triton

    def record(self, *arguments):
        if module("launch").is_collecting():
            threads.add(torch._C._is_multithreading_enabled())
        else:
            launched.add((self.kernel.__name__, self.constants.get("ADD")))
        return through_triton(self, *arguments)

    monkeypatch.setattr(launch, "through_triton", record)
    report = fresh.warmup(llama, rows=[16], training=training)
    assert not report.failed and all("of Triton's interpreter differ from CUDA's" in each for each in report.skipped)
    assert threads == {False}, "a GPU's gradients would be computed in another thread, which does not only ask"
    expected = {"rms_norm_forward", "add_rms_norm_forward", "activation_forward", "gated_activation_forward"}
    if training:
        expected |= {"activation_backward", "gated_activation_backward", "rms_norm_sum_chains", "column_sum_blocks"}
        assert {("rms_norm_backward", added) for added in (False, True)} <= launched
        expected.add("rms_norm_backward")
    assert {name for name, _ in launched} == expected


def test_nothing_that_was_only_asked_for_is_remembered(fresh, module, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    launch = module("launch")
    layers, x = model(fresh), torch.randn(5, 64, device=DEVICE)
    with launch.collect_compilations() as found, torch.no_grad():
        layers[0](x), layers[-1](x)
    if DEVICE == "cpu":
        assert {compilation.kernel.__name__ for compilation in found} == {"rms_norm_forward", "activation_forward"}
    assert not launch.is_collecting()
    assert not any(calls.resolved or calls.recent for calls in module("calls").Calls.every)
    with torch.no_grad():
        expected = LlamaRMSNorm.forward(layers[0], x)
        assert torch.allclose(layers[0](x), expected, rtol=1e-5), "a sum of 64 in another order"


def test_what_cannot_be_warmed_up_is_told(fresh, monkeypatch, capsys):
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    with pytest.warns(RuntimeWarning, match="nothing to warm up: .* kernelize the model first"):
        report = fresh.warmup(torch.nn.Linear(2, 2), verbose=True)
    assert "none carries a forward of this package" in report.skipped[0]
    assert capsys.readouterr().err == f"{report}\n"
    layers = model(fresh).to("meta")
    with pytest.warns(
        RuntimeWarning, match="nothing to warm up: all layers: the model is on meta; next: load the model"
    ):
        fresh.warmup(layers)
    layers = model(fresh)
    monkeypatch.setattr(type(layers[0]), "forward", lambda self, x: 1 / 0)
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        assert any("ZeroDivisionError" in text for text in fresh.warmup(layers, rows=[4]).skipped)


def test_a_cpu_has_nothing_to_warm_up(fresh, module, monkeypatch):
    monkeypatch.setattr(module("domain"), "_KERNEL_DEVICE", "cuda")
    layers = model(fresh).cpu()
    with pytest.warns(
        RuntimeWarning, match="nothing to warm up: all layers: the model is on cpu; next: .* GPU"
    ) as warned:
        report = fresh.warmup(layers, training=True)
    assert len(warned) == 1 and not report.compiled and len(report.skipped) == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("progress, shown", [(None, True), (True, True), (False, False)])
def test_a_terminal_sees_a_bar(fresh, monkeypatch, progress, shown):
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    layers, stderr = model(fresh), Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    report = fresh.warmup(layers, rows=[4], progress=progress)
    lines = stderr.getvalue().replace("\033[K", "").split("\r")
    if not shown:
        assert lines == [""]
        return
    assert not report.compiled or any("compiled [" in line for line in lines)
    assert any(re.fullmatch(r"lossless-kernels: called   \[#{30}\] (\d+)/\1", line) for line in lines)
    assert lines[-1] == "", "the line is empty in the end"
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    fresh.warmup(layers, rows=[4], progress=progress)
    assert not sys.stderr.getvalue(), "no terminal, no bar"


def test_what_families_offer_is_for_layers_that_there_are(kernel, module):
    declared = module("core.declarations").WARMUP
    for name in declared:
        assert "forward" in vars(getattr(kernel.layers, name))
    norms = {
        name for name in vars(kernel.layers) if "RMSNorm" in name and isinstance(getattr(kernel.layers, name), type)
    }
    assert norms < {*declared}


def test_a_norm_without_a_weight_is_skipped(fresh, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    layers = model(fresh)
    layers[0].weight = None
    report = fresh.warmup(layers, rows=[4])
    assert report.skipped == ["LlamaRMSNorm: a norm without a weight has no hidden size"]


@pytest.mark.parametrize(
    "error, arguments, message",
    [
        (TypeError, {"model": "llama"}, "model: expected a torch.nn.Module, found str"),
        (TypeError, {"rows": 16}, "rows: expected a sequence, found 16"),
        (TypeError, {"rows": [1.5]}, "rows: expected integers, found 1.5"),
        (TypeError, {"rows": [True]}, "rows: expected integers, found True"),
        (ValueError, {"rows": [0]}, "rows: expected numbers from 1 on, found 0"),
        (ValueError, {"rows": []}, "rows: expected at least one, found none"),
        (TypeError, {"progress": 3}, "progress: expected a function of .*, found 3"),
        (TypeError, {"dtypes": "bfloat16"}, "dtypes: expected a sequence, found 'bfloat16'"),
        (TypeError, {"dtypes": ["bfloat16"]}, "dtypes: expected torch dtypes, found 'bfloat16'"),
        (ValueError, {"dtypes": [torch.float64]}, "dtypes: expected float32, float16 or bfloat16, found torch.float64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_named(kernel, error, arguments, message):
    with pytest.raises(error, match=message):
        kernel.warmup(**{"model": torch.nn.Linear(2, 2), **arguments})


COMPILED_AHEAD = """
    import contextlib, importlib, json, sys
    from pathlib import Path
    sys.stdout, report = sys.stderr, sys.stdout
    import torch, triton.compiler
    from places import python_module
    from kernels import get_local_kernel
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Hopper:
        get_current_target = lambda self: GPUTarget("cuda", 90, 32)
        get_current_device = lambda self: 0
        get_current_stream = lambda self, device: 0

    driver.set_active(Hopper())
    torch.cuda.device = lambda device: contextlib.nullcontext()
    kernel = get_local_kernel(Path("build"))
    module = lambda name: python_module(kernel, name)
    launch = module("launch")
    module("domain")._KERNEL_DEVICE = "cpu"
    made = []
    compile = triton.compiler.compile
    triton.compiler.compile = lambda *arguments, **options: (made.append(1), compile(*arguments, **options))[1]

    def first_launch(self, blocks, tensors, scalars):
        before = len(made)
        left_out = len(self.kernel.arg_names) - len(self.constants) - len(scalars) - len(tensors)
        tensors = [*tensors, *[torch.empty(1)] * left_out]
        options = launch.options(self.num_warps, self.max_registers, self.overlaps)
        self.kernel.run(*tensors, *scalars, grid=(blocks,), warmup=True, **self.constants, **options)
        launched.append(len(made) - before)

    def everything():
        for rows in (1, 16, 300):
            x, weight = torch.ones(rows, 512, dtype=torch.bfloat16), torch.ones(512, dtype=torch.bfloat16)
            kernel.rms_norm(x, weight, 1e-5)
            out = kernel.rms_norm(x.requires_grad_(), weight.requires_grad_(), 1e-5)
            torch.autograd.grad(out, (x, weight), torch.ones_like(out))
            torch.autograd.grad(kernel.silu(x), x, torch.ones_like(x))

    launched = []
    with launch.collect_compilations() as found:
        everything()
    module("warmup")._compile(list(found), None)
    ahead = len(made)
    launch.Launcher.through_triton = first_launch
    everything()
    json.dump({"found": len(found), "ahead": ahead, "launched": len(launched), "later": sum(launched)}, report)
"""


def test_what_is_compiled_in_threads_is_what_triton_launches(build, run_python, tmp_path):
    """Not in the interpreter: Triton compiles for sm_90 and its own call finds what it would otherwise compile."""
    done = run_python(COMPILED_AHEAD, TRITON_INTERPRET=0, LOSSLESS_PROOF="off", TRITON_CACHE_DIR=tmp_path)
    counts = json.loads(done.stdout)
    assert counts["found"] == counts["ahead"] >= 6 and counts["launched"] >= counts["found"]
    assert counts["later"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden_size", [128, 4096])
def test_after_a_warmup_no_call_compiles_or_proves(fresh, module, monkeypatch, hidden_size, dtype):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    layers, launch, proof = model(fresh, hidden_size, dtype), module("launch"), module("proof")
    report = fresh.warmup(layers, training=True)
    print(report)
    assert report.proved and not report.failed and not report.skipped
    assert all(parameter.grad is None for parameter in layers.parameters())
    before, compiling = set(proof._verdicts), launch.seconds_compiling
    for rows in (1, 3, 16, 118, 1000, 8192, 20_000):
        call(layers, rows, hidden_size, dtype, training=False)
    for rows in (16, 118, 1000, 8192, 20_000):
        call(layers, rows, hidden_size, dtype, training=True)
    torch.cuda.synchronize()
    assert set(proof._verdicts) == before
    assert launch.seconds_compiling == compiling


@pytest.mark.gpu
def test_everything_is_compiled_in_threads(fresh, module, monkeypatch):
    """A hidden size that no other test has, so that this process has none of its kernels yet."""
    import triton

    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    layers, compiled = model(fresh, 1216, torch.bfloat16), []

    def listen(*, src, **_):
        compiled.append((src.name, threading.current_thread().name.split("-")[0]))

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    fresh.warmup(layers, rows=[16], training=True)
    norm = {"rms_norm_forward", "rms_norm_backward", "column_sum_blocks"}
    assert norm <= {name for name, _ in compiled}
    assert {thread for _, thread in compiled} == {"ThreadPoolExecutor"}
