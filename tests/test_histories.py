"""A few hundred random histories (`make test-histories` runs 10,000), and that they find what is planted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the unkernelized model on the CPU is the reference")
SCRIPT = Path(__file__).parent / "histories.py"
# What the CPU's arithmetic stands for in histories of models of this size.
KERNELS = {"rms_norm_forward", "add_rms_norm_forward", "rms_norm_backward", "rms_norm_sum_chains", "column_sum_blocks",
           "layer_norm_forward", "layer_norm_backward", "layer_norm_sum_rows", "group_norm_forward", "group_norm_backward", "group_norm_vector_gradients", "cohere_layer_norm_forward", "cohere_layer_norm_backward", "rotary", "activation_forward", "activation_backward", "gated_activation_forward", "gated_activation_backward",
           "softmax_forward", "softmax_backward", "cross_entropy_forward_short", "cross_entropy_backward"}  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [["--histories", "240"], ["--histories", "10", "--arithmetic", "triton", "--subject", "silu", "LlamaMLP", "Tied"]],
    ids=["cpu", "triton"],
)
def test_histories(build, seed, arguments):
    """In a process of their own: what is proved with these kernels holds for no others."""
    command = [sys.executable, str(SCRIPT), "--seed", str(seed), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "histories, 0 failed" in done.stdout, f"{done.stdout}\n{done.stderr}"
    if "triton" not in arguments:
        # Few histories launch these: where a GroupNorm's input needs no gradient, where the weight of Cohere's norm needs one.
        rare = {"group_norm_channel_sums", "cohere_layer_norm_sum_chains"}
        launched = set(re.findall(r"\d+ x (\w+)", done.stdout)) - rare
        assert launched == KERNELS, launched ^ KERNELS


PLANTED = r"""
    import functools, logging, sys, warnings
    from pathlib import Path
    import cpu_kernels, histories, places, torch
    from kernels import get_local_kernel

    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    kernel = get_local_kernel(Path(sys.argv[1]))
    seed = int(sys.argv[2])
    kernels = cpu_kernels.cpu_kernels(kernel.__name__)
    module = functools.partial(places.python_module, kernel)
    runner, hoard = histories.Runner(kernel), []

    def other_eps(constants, scalars, *tensors):
        kernels["rms_norm_forward"](constants, (*scalars[:-1], scalars[-1] + 1e-3), *tensors)

    def other_rounding(constants, scalars, dy, gate, d_gate, *rest):
        kernels["gated_activation_backward"](constants, scalars, dy, gate, d_gate, *rest)
        d_gate.flatten()[0].mul_(1.0 + 2.0**-20)

    def hook_twice(original, layer, name, x):
        if layer._modules[name]._forward_hooks or layer._modules[name]._forward_pre_hooks:
            original(layer, name, x)
        return original(layer, name, x)

    def leaking(original, x, weight, *given, **named):
        hoard.append(weight)
        return original(x, weight, *given, **named)

    def raising(original, x, *given, **named):
        if isinstance(x, torch.Tensor) and x.dim() == 1:
            raise ValueError("one row")
        return original(x, *given, **named)

    def stale(original, x, weight, *given, kept={}, **named):
        if weight is not None:
            weight = kept.setdefault((weight.shape, weight.dtype), weight.detach())
        return original(x, weight, *given, **named)

    def plant(name, function, change):
        original = getattr(module(name), function)
        if function == "_KERNELS":
            changed = original._replace(call=functools.partial(change, original.call))
        else:
            changed = functools.partial(change, original)
        setattr(module(name), function, changed)
        return lambda: setattr(module(name), function, original)

    norm = "layers", "rms_norm_replacement"
    for what, changes, at, subject in [
        ("another eps", {"rms_norm_forward": other_eps}, (), "LlamaRMSNorm"),
        ("another gradient", {"gated_activation_backward": other_rounding}, (), "LlamaMLP"),
        ("a hook called twice", {}, ("decoder", "_KERNELS", hook_twice), "Llama"),
        ("a leak", {}, (*norm, leaking), "LlamaRMSNorm"),
        ("an exception", {}, (*norm, raising), "LlamaRMSNorm"),
        ("a stale weight", {}, (*norm, stale), "LlamaRMSNorm"),
    ]:
        with cpu_kernels.cpu_arithmetic(kernel.__name__, changes):
            undo = plant(*at) if at else lambda: None
            found = (histories.History.random(seed + number, [subject], ["decoder"]) for number in range(200))
            if subject == "Llama":  # There are many modules to have hooks.
                found = (found.replaced([("add_hook", seed + n, ()), ("forward", n, ())]) for n, found in enumerate(found))
            reports = map(runner.report, found)
            print(f"== {what}", next(filter(None, reports), ""), sep="\n")
            undo()
        hoard.clear()
"""


def test_what_is_planted_is_found(interpreted, build, seed):
    """With the proof off, which would refuse such kernels."""
    done = interpreted(PLANTED, arguments=[build, seed], LOSSLESS_PROOF="off")
    found = dict(part.split("\n", 1) for part in done.stdout.split("== ")[1:])
    expected = {
        "another eps": "elements differ",
        "another gradient": "elements differ",
        "a stale weight": ", result[",
        "a hook called twice": "seen by hooks",
        "a leak": "alive afterwards: {'Parameter'",
        "an exception": "ValueError: one row",
    }
    for what, text in expected.items():
        assert text in found[what] and "--repeat" in found[what], f"{what}: {found[what]}"
        # Shrunk: two operations, and where the weights begin.
        assert found[what].count("\n    ") <= 5, found[what]
