#!/usr/bin/env python3
"""Seconds of each stage from import to the first results of a fresh process, printed as JSON: {stage: seconds}.

Stages run one after the other, on bf16 activations of 2048x4096. The first call of a layer includes its verification
against the original forward. TRITON_CACHE_DIR names Triton's cache: with an empty one the stages include compilation.
`benchmarks/peers.py --ops first_call` runs this program with an empty and with a full cache.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from types import MethodType


class Stages:
    def __init__(self):
        self.seconds = {}
        self.last = time.perf_counter()

    def end(self, name):
        now = time.perf_counter()
        self.seconds[name] = now - self.last
        self.last = now


def refuse(message):
    print(f"first_call: error: {message}", file=sys.stderr)
    sys.exit(2)


def layers(kernel, device="cuda"):
    """RMSNorm and SiLU as in a Llama model, each with the forward that `kernelize` binds to it."""
    global torch  # The kernels leave a forward alone that reads a variable of an enclosing function.
    import torch

    class RMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(4096))
            self.variance_epsilon = 1e-5

        def forward(self, hidden_states):
            h = hidden_states.to(torch.float32)
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * h.to(hidden_states.dtype)

    class SiLU(torch.nn.Module):
        def forward(self, input):
            return torch.nn.functional.silu(input)

    made = torch.nn.Sequential(RMSNorm(), SiLU()).to(device, torch.bfloat16)
    for layer, replacement in zip(made, (kernel.layers.LlamaRMSNorm, kernel.layers.SiLUActivation)):
        layer.forward = MethodType(replacement.forward, layer)
    return made


def refuse_originals(kernel, model):
    """Ends the program if an original forward ran: its times would be eager's."""
    for layer in kernel.replacement_report(model, verbose=False).layers:
        if layer.path != "kernel":
            refuse(f"expected the kernels of {layer.layer}, found path {layer.path!r}: {'; '.join(layer.reasons)}")


def main(build, warmup=False):
    stages = Stages()
    import torch

    if not torch.cuda.is_available():
        refuse("expected a GPU, torch finds no CUDA device")
    x = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    stages.end("torch and CUDA")
    from kernels import get_local_kernel

    kernel = get_local_kernel(Path(build).resolve())
    norm, silu = model = layers(kernel)
    stages.end("kernel loaded")
    if warmup:
        kernel.warmup(model, training=True)
        stages.end("warmup")
    with torch.no_grad():
        norm(x)
        torch.cuda.synchronize()
        stages.end("first RMSNorm")
        stages.seconds["import to first result"] = sum(stages.seconds.values())
        silu(x)
        torch.cuda.synchronize()
        stages.end("first SiLU")
    out = norm(x.requires_grad_())
    torch.autograd.grad(out, (x, norm.weight), torch.randn_like(out))
    torch.cuda.synchronize()
    stages.end("first RMSNorm, forward and backward")
    refuse_originals(kernel, model)
    json.dump(stages.seconds, sys.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, metavar="BUILD", help="folder with the built kernel, made by `make build`")
    parser.add_argument(
        "--warmup",
        action="store_true",
        help="first call the kernel's warmup(model, training=True), which compiles and verifies the layers ahead",
    )
    options = parser.parse_args()
    if not options.build.is_dir():
        refuse(f"BUILD: expected a folder made by `make build`, found no folder {options.build}")
    main(options.build, options.warmup)
