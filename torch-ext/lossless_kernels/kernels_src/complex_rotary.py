"""Rotary position embedding as a product of complex numbers, in the arithmetic of ATen's complex kernels."""

import triton
import triton.language as tl

from .indices import quotient


@triton.jit
def _pairs(ptr, offset, mask, HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """The first and the second of each pair of neighbours, fp32 [HEADS, HALF_BLOCK]."""
    values = tl.load(ptr + offset, mask=mask, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(values, [HEADS, HALF_BLOCK, 2]))


@triton.jit(
    do_not_specialize=[
        "tokens", "groups", "by_tokens", "by_groups", "heads", "x_batch_stride", "x_token_stride", "x_head_stride",
        "out_batch_stride", "out_token_stride", "out_head_stride", "freqs_batch_stride", "freqs_token_stride",
    ]
)  # fmt: skip
def complex_rotary(
    x_ptr,
    freqs_ptr,
    out_ptr,
    tokens: tl.int32,
    groups: tl.int32,
    by_tokens: tl.int64,
    by_groups: tl.int64,
    heads: tl.int64,
    x_batch_stride: tl.int64,
    x_token_stride: tl.int64,
    x_head_stride: tl.int64,
    out_batch_stride: tl.int64,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    freqs_batch_stride: tl.int64,
    freqs_token_stride: tl.int64,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    FREQS_UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    CONJUGATE: tl.constexpr,
):
    """out = x * freqs of pairs of neighbours as complex numbers, computed in fp32 and rounded once.

    A program takes HEADS heads of a token. Strides are in units of UNIT elements, those of freqs of FREQS_UNIT; freqs is
    a tensor of real numbers, twice as many.

    Args:
        by_tokens, by_groups: `core.layout.divider` of tokens and groups.
        CONJUGATE: the factor is the conjugate of freqs.
    """
    program = tl.program_id(0)
    row = quotient(program, by_groups)
    group = (program - row * groups).to(tl.int64)
    batch = quotient(row, by_tokens)
    token = (row - batch * tokens).to(tl.int64)
    batch = batch.to(tl.int64)
    head = group * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, 2 * HALF_BLOCK)[None, :]
    mask = (head < heads) & (column < 2 * HALF)
    x_row = (batch * x_batch_stride + token * x_token_stride + head * x_head_stride) * UNIT
    a, b = _pairs(x_ptr, x_row + column, mask, HEADS, HALF_BLOCK)
    freqs_row = (batch * freqs_batch_stride + token * freqs_token_stride) * FREQS_UNIT
    # Loaded for each head, from the L1.
    c, d = _pairs(freqs_ptr, tl.zeros_like(head) + freqs_row + column, mask, HEADS, HALF_BLOCK)
    if CONJUGATE:
        d = d * -1.0
    # nvcc made an FMA of the first product of each sum. Triton's `-x` is 0 - x, whose sign differs if x is zero.
    real = tl.fma(a, c, (b * d) * -1.0)
    imaginary = tl.fma(a, d, b * c)
    out = tl.reshape(tl.join(real, imaginary), [HEADS, 2 * HALF_BLOCK])
    out_row = (batch * out_batch_stride + token * out_token_stride + head * out_head_stride) * UNIT
    tl.store(out_ptr + out_row + column, out.to(out_ptr.dtype.element_ty), mask=mask)
