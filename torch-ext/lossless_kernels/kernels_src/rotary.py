"""Rotary position embedding of queries and keys as eager composes it, each product and sum rounded; and its tables."""

import triton
import triton.language as tl

from .indices import quotient
from .primitives import cos, sin


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _pairs(ptr, offset, mask, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, UNIT: tl.constexpr, LAYOUT: tl.constexpr):
    """The first and the second numbers of HALF pairs, in rows that begin at `offset`."""
    column = tl.arange(0, HALF_BLOCK)[None, :]
    if LAYOUT == "neighbours":
        column = tl.arange(0, 2 * HALF_BLOCK)[None, :]
        if HALF != HALF_BLOCK:
            mask = mask & (column // UNIT < 2 * HALF // UNIT)
        both = tl.load(ptr + offset + column, mask=mask, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, [both.shape[0], HALF_BLOCK, 2]))
    else:
        if HALF != HALF_BLOCK:
            mask = mask & (column // UNIT < HALF // UNIT)
        first = tl.load(ptr + offset + column, mask=mask, other=0.0).to(tl.float32)
        if LAYOUT == "first_half":
            second = first
        else:
            second = tl.load(ptr + offset + column + HALF, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(
    ptr,
    offset,
    mask,
    first,
    second,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    dtype = ptr.dtype.element_ty
    if LAYOUT == "neighbours":
        column = tl.arange(0, 2 * HALF_BLOCK)[None, :]
        if HALF != HALF_BLOCK:
            mask = mask & (column // UNIT < 2 * HALF // UNIT)
        both = tl.join(first.to(dtype), second.to(dtype))
        tl.store(ptr + offset + column, tl.reshape(both, [both.shape[0], 2 * HALF_BLOCK]), mask=mask)
    else:
        column = tl.arange(0, HALF_BLOCK)[None, :]
        if HALF != HALF_BLOCK:
            mask = mask & (column // UNIT < HALF // UNIT)
        tl.store(ptr + offset + column, first.to(dtype), mask=mask)
        tl.store(ptr + offset + column + HALF, second.to(dtype), mask=mask)


@triton.jit
def _heads(
    x_ptr,
    out_ptr,
    second_out_ptr,
    x_head_stride,
    out_head_stride,
    heads,
    first_head,
    cos_ptr,
    sin_ptr,
    STEP: tl.constexpr,
    FP32_COMPUTE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PASSED: tl.constexpr,
    PASSED_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    TABLE: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotates HEADS heads of one token, from `first_head` on."""
    head = first_head + tl.arange(0, HEADS)[:, None]
    mask = head < heads
    head = head.to(tl.int64)
    x_offset = head * x_head_stride * UNIT
    first, second = _pairs(x_ptr, x_offset, mask, HALF, HALF_BLOCK, UNIT, LAYOUT)
    # Loaded for each head, from the L1: a single row would get another layout and wait for x in shared memory.
    no_head = tl.zeros_like(head)
    cos_first, cos_second = _pairs(cos_ptr, no_head, mask, HALF, HALF_BLOCK, UNIT, TABLE)
    sin_first, sin_second = _pairs(sin_ptr, no_head, mask, HALF, HALF_BLOCK, UNIT, TABLE)
    out_offset = head * out_head_stride * UNIT
    DTYPE: tl.constexpr = tl.float32 if FP32_COMPUTE else out_ptr.dtype.element_ty
    if STEP == "forward":
        # Triton's `-x` is `0 - x`, whose sign differs if x is zero.
        out_first = _rounded(first * cos_first, DTYPE) - _rounded(second * sin_first, DTYPE)
        out_second = _rounded(second * cos_second, DTYPE) + _rounded(first * sin_second, DTYPE)
        _store_pairs(out_ptr, out_offset, mask, out_first, out_second, HALF, HALF_BLOCK, UNIT, LAYOUT)
    else:
        rotated_first = _rounded(second * sin_second, DTYPE)
        if PADDED:
            # Eager pads the gradient of each half with zeros and adds the two: no gradient is -0.
            rotated_first += 0.0
            rotated_second = 0.0 - _rounded(first * sin_first, DTYPE)
        else:
            rotated_second = _rounded(first * sin_first, DTYPE) * -1.0
        straight_first = _rounded(first * cos_first, DTYPE)
        straight_second = _rounded(second * cos_second, DTYPE)
        if STEP == "gradient":
            rotated_first += straight_first
            rotated_second += straight_second
        else:
            tl.static_assert(STEP == "gradients")
            _store_pairs(
                second_out_ptr,
                out_offset,
                mask,
                straight_first,
                straight_second,
                HALF,
                HALF_BLOCK,
                UNIT,
                LAYOUT,
            )
        _store_pairs(out_ptr, out_offset, mask, rotated_first, rotated_second, HALF, HALF_BLOCK, UNIT, LAYOUT)
    if PASSED > 0:
        tl.static_assert(STEP != "gradients")
        column = tl.arange(0, PASSED_BLOCK)[None, :]
        if PASSED != PASSED_BLOCK:
            mask = mask & (column // UNIT < PASSED // UNIT)
        passed = tl.load(x_ptr + x_offset + 2 * HALF + column, mask=mask, other=0.0).to(out_ptr.dtype.element_ty)
        if STEP == "gradient":
            # As above: eager pads it and adds the gradient of the rotated part.
            passed = (passed.to(tl.float32) + 0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_offset + 2 * HALF + column, passed, mask=mask)


@triton.jit(
    do_not_specialize=[
        "tokens",
        "groups",
        "by_tokens",
        "by_groups",
        "q_groups",
        "q_heads",
        "k_heads",
        "q_batch_stride",
        "q_token_stride",
        "q_head_stride",
        "k_batch_stride",
        "k_token_stride",
        "k_head_stride",
        "q_out_batch_stride",
        "q_out_token_stride",
        "q_out_head_stride",
        "k_out_batch_stride",
        "k_out_token_stride",
        "k_out_head_stride",
        "cos_batch_stride",
        "cos_token_stride",
        "sin_batch_stride",
        "sin_token_stride",
    ]
)
def rotary(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    second_q_out_ptr,
    second_k_out_ptr,
    tokens: tl.int32,
    groups: tl.int32,
    by_tokens: tl.int64,
    by_groups: tl.int64,
    q_groups: tl.int32,
    q_heads: tl.int32,
    k_heads: tl.int32,
    q_batch_stride: tl.int64,
    q_token_stride: tl.int64,
    q_head_stride: tl.int64,
    k_batch_stride: tl.int64,
    k_token_stride: tl.int64,
    k_head_stride: tl.int64,
    q_out_batch_stride: tl.int64,
    q_out_token_stride: tl.int64,
    q_out_head_stride: tl.int64,
    k_out_batch_stride: tl.int64,
    k_out_token_stride: tl.int64,
    k_out_head_stride: tl.int64,
    cos_batch_stride: tl.int64,
    cos_token_stride: tl.int64,
    sin_batch_stride: tl.int64,
    sin_token_stride: tl.int64,
    STEP: tl.constexpr,
    FP32_COMPUTE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PASSED: tl.constexpr,
    PASSED_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    TABLE: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """out = x * cos + (-x2, x1) * sin for x = (x1, x2), the halves of q's and k's heads; or gradients, with x = d_out.

    STEP: "forward"; "gradient": the sum over both paths; "gradients": out for the path through the rotated halves,
    second_out = x * cos. FP32_COMPUTE: only the sum is rounded. LAYOUT: pairs are "halves" or "neighbours"; TABLE: those
    of cos and sin too, or "first_half", which has both numbers of a pair. PADDED: no gradient of a half is -0.
    PASSED elements after 2 * HALF are copied. A program has HEADS heads of q or k of one token. Strides are in UNITs of
    elements; by_tokens and by_groups are the dividers of tokens and groups (`core.layout.divider`).
    """
    program = tl.program_id(0)
    token = quotient(program, by_groups)
    group = program - token * groups
    batch = quotient(token, by_tokens)
    token = (token - batch * tokens).to(tl.int64)
    batch = batch.to(tl.int64)
    token_cos_ptr = cos_ptr + (batch * cos_batch_stride + token * cos_token_stride) * UNIT
    token_sin_ptr = sin_ptr + (batch * sin_batch_stride + token * sin_token_stride) * UNIT
    if group < q_groups:
        out_offset = (batch * q_out_batch_stride + token * q_out_token_stride) * UNIT
        _heads(
            q_ptr + (batch * q_batch_stride + token * q_token_stride) * UNIT,
            q_out_ptr + out_offset,
            second_q_out_ptr + out_offset,
            q_head_stride,
            q_out_head_stride,
            q_heads,
            group * HEADS,
            token_cos_ptr,
            token_sin_ptr,
            STEP,
            FP32_COMPUTE,
            HALF,
            HALF_BLOCK,
            PASSED,
            PASSED_BLOCK,
            LAYOUT,
            TABLE,
            PADDED,
            UNIT,
            HEADS,
        )
    else:
        out_offset = (batch * k_out_batch_stride + token * k_out_token_stride) * UNIT
        _heads(
            k_ptr + (batch * k_batch_stride + token * k_token_stride) * UNIT,
            k_out_ptr + out_offset,
            second_k_out_ptr + out_offset,
            k_head_stride,
            k_out_head_stride,
            k_heads,
            (group - q_groups) * HEADS,
            token_cos_ptr,
            token_sin_ptr,
            STEP,
            FP32_COMPUTE,
            HALF,
            HALF_BLOCK,
            PASSED,
            PASSED_BLOCK,
            LAYOUT,
            TABLE,
            PADDED,
            UNIT,
            HEADS,
        )


@triton.jit(do_not_specialize=["positions", "length", "batch_stride", "position_stride", "scaling"])
def rotary_tables(
    position_ptr,
    inv_freq_ptr,
    cos_ptr,
    sin_ptr,
    positions: tl.int64,
    length: tl.int64,
    batch_stride: tl.int64,
    position_stride: tl.int64,
    scaling: tl.float32,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    ADDS_ZERO: tl.constexpr,
):
    """cos and sin of position * inv_freq, times scaling, two copies in each row: [positions, 2 * HALF], contiguous.

    Sequences have `length` positions and the stride `batch_stride`. ADDS_ZERO: a product of -0 becomes +0.
    """
    index = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    column = tl.arange(0, HALF_BLOCK)
    mask = (index < positions)[:, None] & (column < HALF)[None, :]
    batch = index // length
    offset = batch * batch_stride + (index - batch * length) * position_stride
    position = tl.load(position_ptr + offset, mask=index < positions, other=0).to(tl.float32)
    inv_freq = tl.load(inv_freq_ptr + column, mask=column < HALF, other=0.0).to(tl.float32)
    angle = position[:, None] * inv_freq[None, :]
    if ADDS_ZERO:
        angle = angle + 0.0
    out = index[:, None] * (2 * HALF) + column[None, :]
    dtype = cos_ptr.dtype.element_ty
    cosine = (cos(angle) * scaling).to(dtype)
    tl.store(cos_ptr + out, cosine, mask=mask)
    tl.store(cos_ptr + out + HALF, cosine, mask=mask)
    sine = (sin(angle) * scaling).to(dtype)
    tl.store(sin_ptr + out, sine, mask=mask)
    tl.store(sin_ptr + out + HALF, sine, mask=mask)
