"""Elementwise operations whose last bit is the one eager PyTorch returns on CUDA."""

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra import libdevice
except ImportError:
    from triton.language.extra.cuda import libdevice

# Triton's interpreter knows neither libdevice nor inline assembly. What runs there instead differs from the GPU in the
# last bit of the exponential; nothing else does.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# AMD's assembler takes no PTX, and ends the process rather than raise.
PTX = tl.constexpr(torch.version.hip is None)


@triton.jit
def exp(x):
    """e**x in fp32, as CUDA's `expf` (libdevice) rounds it; `tl.exp` is an approximation."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def divide(x, y):
    """x / y in fp32, correctly rounded, subnormal results kept; Triton's `div_rn` flushes them to zero."""
    if INTERPRETED:
        return x / y
    elif PTX:
        return tl.inline_asm_elementwise(
            "div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(x, y)


@triton.jit
def reciprocal(x):
    """1 / x in fp32, correctly rounded, subnormal results kept."""
    if INTERPRETED:
        return 1.0 / x
    elif PTX:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def rsqrt(x):
    """CUDA's `rsqrtf` in fp32; `tl.rsqrt` is the same instruction but takes subnormal inputs for zero."""
    if INTERPRETED:
        return tl.rsqrt(x)
    elif PTX:
        return tl.inline_asm_elementwise(
            "rsqrt.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.rsqrt(x)
