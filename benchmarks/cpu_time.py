"""CPU time of a forward and of a backward call of each op, for two builds that take turns. Needs no GPU.

    PYTHONPATH=tests python benchmarks/cpu_time.py build other/build

Launches do nothing: a time covers the call from its tensors to the driver, with the allocation of its outputs, and without
autograd's engine, which calls the backward function. A figure is the least of many rounds. Run it on an idle machine.
"""

import argparse
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Callable

# Set before Triton is imported. Its interpreter accepts CPU tensors.
os.environ.update(TRITON_INTERPRET="1", LOSSLESS_PROOF="off")

import torch
from kernels import get_local_kernel
from places import python_module
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

# Few, so that a round fits between the disturbances of a machine with other work.
CALLS = 300


def calls(kernel: ModuleType) -> dict[str, Callable]:
    """Name -> call without arguments."""

    def module(name):
        return python_module(kernel, name)

    activation, gated, rotary, add = map(module, ("activation", "gated_activation", "rotary", "add_rms_norm"))
    norm, backward, formulas = map(module, ("rms_norm", "rms_norm_backward", "variants"))
    llama, owner, eps = formulas.LLAMA, norm.EAGER[formulas.LLAMA], 1e-6
    x, residual, dy = (torch.randn(1, 4, 64) for _ in range(3))
    weight, rstd = torch.randn(64), torch.randn(1, 4, 1)
    q, k = torch.randn(1, 8, 4, 64), torch.randn(1, 2, 4, 64)
    cos, sin = torch.randn(2, 1, 4, 64)
    parameter = torch.nn.Parameter(weight)
    forward = rotary.PLAIN.eager

    def with_grad(call):
        def run():
            with torch.enable_grad():
                call()

        return run

    x_of_head, positions = torch.randn(1, 4, 64), torch.arange(4)[None]
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=64)
    tables, gated_norm, torch_norm = LlamaRotaryEmbedding(config), module("gated_rms_norm"), torch.nn.RMSNorm
    rotary_tables = module("rotary_embedding")

    def of_torch(weight):
        return norm.replacement(x, weight, eps, torch_norm, "eps", fused=True)

    def times_gate(weight):
        return gated_norm.replacement(x, residual, weight, eps, "silu", Qwen3NextRMSNormGated)

    found = {
        "rms_norm": lambda: norm.replacement(x, weight, eps, owner),
        "rms_norm, with gradients": with_grad(lambda: norm.replacement(x, parameter, eps, owner)),
        "rms_norm backward": lambda: backward.gradients(llama, dy, x, weight, rstd, True, True),
        "add_rms_norm": lambda: add.replacement(x, residual, weight, eps, owner),
        "add_rms_norm, with gradients": with_grad(lambda: add.replacement(x, residual, parameter, eps, owner)),
        "add_rms_norm backward": lambda: backward.gradients(llama, dy, x, weight, rstd, True, True, True, residual),
        "silu": lambda: activation.replacement(x, activation.SILU.forward, activation.SILU),
        "silu backward": lambda: activation.gradients(activation.SILU, dy, x),
        "silu_and_mul": lambda: gated.replacement(x, residual, gated.SILU.forward, gated.SILU),
        "silu_and_mul backward": lambda: gated.gradients(gated.SILU, dy, x, residual, True),
        "silu_and_mul, packed": lambda: gated.packed_replacement(x, gated.SILU),
        "silu_and_mul, packed, backward": lambda: gated.packed_gradient(gated.SILU, dy[..., :32].contiguous(), x),
        "rotary": lambda: rotary.replacement(q, k, cos, sin, 1, forward),
        "rotary backward": lambda: rotary.gradients(rotary.PLAIN, q, k, cos, sin, 1, q.dtype, True),
        "rotary tables": lambda: rotary_tables.replacement(tables, x_of_head, positions, LlamaRotaryEmbedding),
        "TorchRMSNorm": lambda: of_torch(weight),
        "TorchRMSNorm, with gradients": with_grad(lambda: of_torch(parameter)),
        "gated norm": lambda: times_gate(weight),
        "gated norm, with gradients": with_grad(lambda: times_gate(parameter)),
    }
    # Cross-entropy is left out: it reads what its kernel wrote, and is computed once a step.
    if hasattr(kernel, "softmax"):
        softmax = module("ops.softmax")
        found |= {
            "softmax": lambda: softmax.replacement(x, -1),
            "softmax backward": lambda: softmax.gradient(dy, x),
        }
    for name, call in found.items():
        if call() is None and not name.endswith("gradients"):
            raise SystemExit(f"cpu_time: {name}: the original computes it")
    return found


def microseconds(call: Callable) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs=2, type=Path, metavar="BUILD", help="two folders made by `make build`")
    parser.add_argument("--rounds", type=int, default=45, help=f"rounds of {CALLS} calls (default: %(default)s)")
    options = parser.parse_args()
    kernels = [get_local_kernel(build.resolve()) for build in options.builds]
    for kernel in kernels:
        # A launch ends where the driver would be called.
        launch = python_module(kernel, "launch")
        launch.Launch._enqueue = lambda self, pointers, _: True
        # The interpreter's cos and sin are not CUDA's, and rotary tables are refused there.
        launch.INTERPRETED = False
    torch.set_grad_enabled(False)
    each = [calls(kernel) for kernel in kernels]
    print(
        f"torch {torch.__version__}; us a call, least of {options.rounds} rounds, {options.builds[0]} and {options.builds[1]}"
    )
    for name in each[1]:
        if name not in each[0]:
            print(
                f"{name:34}         {min(microseconds(each[1][name]) for _ in range(options.rounds)):7.2f}", flush=True
            )
            continue
        found = [[microseconds(of[name]) for of in each] for _ in range(options.rounds)]
        first, second = (min(times) for times in zip(*found))
        print(f"{name:34} {first:7.2f} {second:7.2f}  {second - first:+.2f}", flush=True)


if __name__ == "__main__":
    main()
