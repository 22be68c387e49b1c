#!/usr/bin/env python3
"""Seconds from import to the first results in this process, as JSON: {stage: seconds}.

TRITON_CACHE_DIR decides whether Triton compiles anew. The shape is 2048x4096, bf16; the stages follow one another, and
the proofs that the first calls carry out are in them. `benchmarks/peers.py` runs this with an empty cache and with a full one.
"""

import json
import sys
import time
from pathlib import Path


class Stages:
    def __init__(self):
        self.seconds = {}
        self.last = time.perf_counter()

    def end(self, name):
        now = time.perf_counter()
        self.seconds[name] = now - self.last
        self.last = now


def main(build):
    stages = Stages()
    import torch

    x = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    stages.end("torch and CUDA")
    from kernels import get_local_kernel

    kernel = get_local_kernel(Path(build).resolve())
    stages.end("kernel loaded")
    with torch.no_grad():
        kernel.rms_norm(x, weight, 1e-5)
        torch.cuda.synchronize()
        stages.end("first RMSNorm")
        stages.seconds["import to first result"] = sum(stages.seconds.values())
        kernel.silu(x)
        torch.cuda.synchronize()
        stages.end("first SiLU")
    out = kernel.rms_norm(x.requires_grad_(), weight.requires_grad_(), 1e-5)
    torch.autograd.grad(out, (x, weight), torch.randn_like(out))
    torch.cuda.synchronize()
    stages.end("first RMSNorm, forward and backward")
    json.dump(stages.seconds, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
