#!/usr/bin/env python3
"""Calls every public function of the kernel once, forward and backward, for tools that watch a process on a GPU.

Shapes leave masked elements and masked rows at the ends of tensors, in fp32, bf16 and fp16. The GPU's memory is allocated tensor
by tensor, so that an access past the end of one leaves its allocation.

    compute-sanitizer --tool memcheck python tests/one_pass.py
    compute-sanitizer --tool racecheck python tests/one_pass.py --dtype bf16
    ncu --metrics dram__bytes_read.sum,dram__bytes_write.sum python tests/one_pass.py --traffic
"""

import argparse
import os
import sys
from pathlib import Path
from types import MethodType

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
# Verification calls the kernels, and eager, many times more.
os.environ.setdefault("LOSSLESS_PROOF", "off")

import torch
from kernels import get_local_kernel
from transformers.models.cohere import modeling_cohere as layers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BUILD = Path(__file__).resolve().parent.parent / "build"


def every_function(kernel, device, dtypes):
    """Yields a name after each call of a function and of its gradients."""

    def normal(*shape, dtype=torch.float32):
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    def differentiated(*results):
        torch.autograd.backward(results, [torch.randn_like(result) for result in results])

    for dtype in dtypes:
        # Rows: one, few, and many; columns: one program, several kinds of tile, and a row read twice.
        for rows in (1, 5, 700):
            for columns in (64, 1020, 4096, 8192):
                x, residual = normal(rows, columns, dtype=dtype), normal(rows, columns, dtype=dtype)
                weight = normal(columns, dtype=dtype)
                differentiated(kernel.rms_norm(x, weight, 1e-6))
                yield f"rms_norm {rows}x{columns} {dtype}"
                differentiated(*kernel.fused_add_rms_norm(x, residual, weight, 1e-6))
                yield f"fused_add_rms_norm {rows}x{columns} {dtype}"
        for rows, size in (
            (5, 40),
            (77, 128),
            (7, 1000),
            (600, 100),
            (300, 1024),
            (5, 1501),
            (9, 4096),
            (5, 9216),
            (3, 24000),
            (3, 50257),
            (3, 50000),
        ):
            differentiated(kernel.softmax(normal(rows, size, dtype=dtype)))
            yield f"softmax {rows}x{size} {dtype}"
            differentiated(kernel.softmax(normal(rows, size, dtype=dtype), dtype=torch.float32))
            yield f"softmax {rows}x{size} {dtype} in fp32"
        for size in (40, 1000, 1025, 1501, 4096, 9216, 12001, 12288, 32768):
            scores, mask = normal(1, 2, 3, size, dtype=dtype), normal(1, 1, 3, size, dtype=dtype).detach()
            differentiated(kernel.masked_softmax(scores, mask, 0.25))
            yield f"masked_softmax {size} {dtype}"
        for rows, size in ((7, 64), (77, 128), (5, 256), (300, 4096), (5, 1000)):
            x, weight, bias = normal(rows, size, dtype=dtype), normal(size, dtype=dtype), normal(size, dtype=dtype)
            differentiated(kernel.layer_norm(x, (size,), weight, bias, 1e-5))
            yield f"layer_norm {rows}x{size} {dtype}"
            differentiated(kernel.dyt(x, normal(1, dtype=dtype), weight, bias))
            yield f"dyt {rows}x{size} {dtype}"
            norm = layers.CohereLayerNorm(size, eps=1e-5).to(device, dtype)
            norm.forward = MethodType(kernel.layers.CohereLayerNorm.forward, norm)
            differentiated(norm(x))
            yield f"CohereLayerNorm {rows}x{size} {dtype}"
        for shape in ((2, 64, 7, 9), (2, 512, 7, 7), (3, 320, 1000), (2, 320, 4096)):
            channels = shape[1]
            weight, bias = normal(channels, dtype=dtype), normal(channels, dtype=dtype)
            differentiated(kernel.group_norm(normal(*shape, dtype=dtype), 32, weight, bias, 1e-5))
            yield f"group_norm {shape} {dtype}"
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
        frequencies = torch.polar(*torch.rand(2, 2, 13, 40, device=device).unbind())
        differentiated(*kernel.apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), frequencies))
        yield f"apply_rotary_emb {dtype}"
        for vocab in (300, 2050, 32000, 50257):
            logits, target = normal(9, vocab, dtype=dtype), normal(9, vocab, dtype=dtype).detach().softmax(-1)
            kernel.kl_div(logits.log_softmax(-1), target, reduction="batchmean").backward()
            yield f"kl_div {vocab} {dtype}"
            kernel.tvd(logits.softmax(-1), target).backward()
            yield f"tvd {vocab} {dtype}"
            for beta in (0.0, 0.5, 1.0):
                teacher = normal(9, vocab, dtype=dtype).detach()
                kernel.generalized_jsd_loss(logits, teacher, beta=beta, temperature=0.9).backward()
                yield f"generalized_jsd_loss {vocab} {beta} {dtype}"
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
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES, help="of the other calls (default: all)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("one_pass: error: expected a GPU, torch finds no CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    kernel = get_local_kernel(BUILD)
    device = torch.device("cuda")
    dtypes = [DTYPES[each] for each in options.dtype]
    for name in traffic(kernel, device) if options.traffic else every_function(kernel, device, dtypes):
        torch.cuda.synchronize()
        print(name, flush=True)
    print("every call returned")
    return 0


if __name__ == "__main__":
    sys.exit(main())
