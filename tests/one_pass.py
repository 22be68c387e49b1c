#!/usr/bin/env python3
"""Calls every public function of the kernel once, forward and backward, for tools that watch a process on a GPU.

Shapes leave masked elements and masked rows at the ends of tensors, in fp32 and bf16. The GPU's memory is allocated tensor
by tensor, so that an access past the end of one leaves its allocation.

    compute-sanitizer --tool memcheck python tests/one_pass.py
    ncu --metrics dram__bytes_read.sum,dram__bytes_write.sum python tests/one_pass.py --traffic
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
# Verification calls the kernels, and eager, many times more.
os.environ.setdefault("LOSSLESS_PROOF", "off")

import torch
from kernels import get_local_kernel

BUILD = Path(__file__).resolve().parent.parent / "build"


def every_function(kernel, device):
    """Yields a name after each call of a function and of its gradients."""

    def normal(*shape, dtype=torch.float32):
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    def differentiated(*results):
        torch.autograd.backward(results, [torch.randn_like(result) for result in results])

    for dtype in (torch.float32, torch.bfloat16):
        # Rows: one, few, and many; columns: one program, several kinds of tile, and a row read twice.
        for rows in (1, 5, 700):
            for columns in (64, 1020, 4096, 8192):
                x, residual = normal(rows, columns, dtype=dtype), normal(rows, columns, dtype=dtype)
                weight = normal(columns, dtype=dtype)
                differentiated(kernel.rms_norm(x, weight, 1e-6))
                yield f"rms_norm {rows}x{columns} {dtype}"
                differentiated(*kernel.fused_add_rms_norm(x, residual, weight, 1e-6))
                yield f"fused_add_rms_norm {rows}x{columns} {dtype}"
        for rows, size in ((5, 40), (7, 1000), (300, 1024)):
            differentiated(kernel.softmax(normal(rows, size, dtype=dtype)))
            yield f"softmax {rows}x{size} {dtype}"
        for name in ("silu", "gelu", "new_gelu", "fast_gelu", "quick_gelu"):
            differentiated(getattr(kernel, name)(normal(37, 1001, dtype=dtype)))
            yield f"{name} {dtype}"
        for name in ("silu_and_mul", "gelu_tanh_and_mul"):
            differentiated(getattr(kernel, name)(normal(37, 1001, dtype=dtype), normal(37, 1001, dtype=dtype)))
            differentiated(getattr(kernel, name)(normal(37, 2002, dtype=dtype)))
            yield f"{name} {dtype}"
        q, k = normal(2, 8, 13, 80, dtype=dtype), normal(2, 2, 13, 80, dtype=dtype)
        cos, sin = (normal(2, 13, 80, dtype=dtype).detach() for _ in range(2))
        differentiated(*kernel.apply_rotary_pos_emb(q, k, cos, sin))
        yield f"apply_rotary_pos_emb {dtype}"
        for vocab in (300, 1000, 9220, 32000, 50257, 128256):
            target = torch.randint(vocab, (9,), device=device)
            kernel.cross_entropy(normal(9, vocab, dtype=dtype), target).backward()
            yield f"cross_entropy {vocab} {dtype}"


def traffic(kernel, device):
    """RMSNorm of 8192x4096 bf16 for inference, then for training."""
    x = torch.randn(8192, 4096, device=device, dtype=torch.bfloat16)
    weight = torch.ones(4096, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        kernel.rms_norm(x, weight, 1e-6)
    yield "inference"
    kernel.rms_norm(x.requires_grad_(), weight, 1e-6)
    yield "training"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traffic", action="store_true", help="two forward passes of RMSNorm alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("one_pass: error: expected a GPU, torch finds no CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    kernel = get_local_kernel(BUILD)
    for name in (traffic if options.traffic else every_function)(kernel, torch.device("cuda")):
        torch.cuda.synchronize()
        print(name, flush=True)
    print("every call returned")
    return 0


if __name__ == "__main__":
    sys.exit(main())
