"""Kullback-Leibler divergence (ATen/native/Loss.cpp) and total variation distance, elementwise or summed in ATen's order.

Each operation that eager launches rounds to its dtype: OUT, the promoted dtype of both tensors, or that of the second.
"""

import triton
import triton.language as tl

from .primitives import divide, exp, rounded, xlogy
from .summation import singles_of_sum, sum_of_threads, vectors_of_step


@triton.jit
def _term(first, second, FORM: tl.constexpr, OUT: tl.constexpr, SECOND: tl.constexpr):
    """The divergence of fp32 numbers; 0 of two zeros.

    FORM: "log_target": exp(second) * (second - first); "target": second * log(second) - second * first;
        "variation": |first - second| / 2.
    """
    if FORM == "log_target":
        return rounded(rounded(exp(second), SECOND) * rounded(second - first, OUT), OUT)
    elif FORM == "target":
        return rounded(rounded(xlogy(second, second), SECOND) - rounded(second * first, OUT), OUT)
    else:
        tl.static_assert(FORM == "variation")
        return rounded(tl.abs(rounded(first - second, OUT)) * 0.5, OUT)


@triton.jit
def _load(first_ptr, second_ptr, base, offset, mask):
    """Both tensors' elements from `base` on, in fp32."""
    first = tl.load(first_ptr + base + offset, mask=mask, other=0.0)
    second = tl.load(second_ptr + base + offset, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _unless_ignored(x, label_ptr, base, offset, mask, ignore_index, SIZE: tl.constexpr):
    """x, zero in rows of SIZE elements whose label is ignored; without labels SIZE is 0."""
    if SIZE:
        # Of 32 bits where the offsets are.
        row = base // SIZE + (tl.cast(base % SIZE, tl.int32) + offset) // SIZE
        label = tl.load(label_ptr + row, mask=mask, other=0)
        x = tl.where(label != ignore_index, x, 0.0)
    return x


@triton.jit
def _masked_term(
    first_ptr, second_ptr, label_ptr, base, offset, mask, ignore_index, FORM: tl.constexpr, SIZE: tl.constexpr
):
    """The divergences from `base` on; 0 where masked."""
    SECOND: tl.constexpr = second_ptr.dtype.element_ty
    OUT: tl.constexpr = SECOND if first_ptr.dtype.element_ty == SECOND else tl.float32
    first, second = _load(first_ptr, second_ptr, base, offset, mask)
    term = _term(first, second, FORM, OUT, SECOND)
    return _unless_ignored(term, label_ptr, base, offset, mask, ignore_index, SIZE)


@triton.jit(do_not_specialize=["begin", "end", "ignore_index"])
def divergence_blocks(
    first_ptr,
    second_ptr,
    label_ptr,
    block_ptr,
    begin: tl.int64,
    end: tl.int64,
    ignore_index: tl.int64,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The sum of this block's divergences in a full sum over the elements [begin, end).

    Args:
        SIZE: elements of a row that has a label; 0 without labels.
        HEAD, TAIL: elements before the first vector, or after the last, exist.
    """
    first_vector = (begin + VECTOR - 1) // VECTOR
    end_vector = end // VECTOR
    offset = tl.arange(0, WIDTH * VECTOR)
    chains = tl.zeros([WIDTH * VECTOR], tl.float32)
    if HEAD:
        at, mask = singles_of_sum(begin, first_vector * VECTOR - begin, begin % VECTOR, WIDTH, VECTOR)
        chains += _masked_term(first_ptr, second_ptr, label_ptr, 0, at, mask, ignore_index, FORM, SIZE)
    for step in range(tl.cdiv(end_vector - first_vector, tl.num_programs(0) * WIDTH)):
        base, mask = vectors_of_step(step, first_vector, end_vector, WIDTH, VECTOR)
        chains += _masked_term(first_ptr, second_ptr, label_ptr, base, offset, mask, ignore_index, FORM, SIZE)
    if TAIL:
        at, mask = singles_of_sum(end_vector * VECTOR, end % VECTOR, 0, WIDTH, VECTOR)
        chains += _masked_term(first_ptr, second_ptr, label_ptr, 0, at, mask, ignore_index, FORM, SIZE)
    tl.store(block_ptr + tl.program_id(0) + tl.arange(0, 1), sum_of_threads(chains, WIDTH, VECTOR))


@triton.jit(do_not_specialize=["units", "ignore_index"])
def divergence_forward(
    first_ptr,
    second_ptr,
    label_ptr,
    out_ptr,
    units: tl.int64,
    ignore_index: tl.int64,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The divergence of each of units * UNIT elements."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    mask = offset < units * UNIT - base
    out = _masked_term(first_ptr, second_ptr, label_ptr, base, offset, mask, ignore_index, FORM, SIZE)
    tl.store(out_ptr + base + offset, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["units", "ignore_index", "factor"])
def divergence_backward(
    dy_ptr,
    first_ptr,
    second_ptr,
    label_ptr,
    d_first_ptr,
    d_second_0_ptr,
    d_second_1_ptr,
    d_second_2_ptr,
    units: tl.int64,
    ignore_index: tl.int64,
    factor: tl.float32,
    FORM: tl.constexpr,
    SIZE: tl.constexpr,
    REDUCED: tl.constexpr,
    WITH_FIRST: tl.constexpr,
    WITH_SECOND: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradients of both tensors; those of the second, one for each path to the output, in their order of arrival.

    Args:
        factor: multiplies the gradient dy of a sum.
        REDUCED: dy is the gradient of one number, otherwise of each divergence.
    """
    OUT: tl.constexpr = dy_ptr.dtype.element_ty
    FIRST: tl.constexpr = first_ptr.dtype.element_ty
    SECOND: tl.constexpr = second_ptr.dtype.element_ty
    base = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    mask = offset < units * UNIT - base
    if REDUCED:
        dy = rounded(tl.load(dy_ptr).to(tl.float32) * factor, OUT)
    else:
        dy = tl.load(dy_ptr + base + offset, mask=mask, other=0.0).to(tl.float32)
    first, second = _load(first_ptr, second_ptr, base, offset, mask)
    dy = _unless_ignored(tl.broadcast_to(dy, first.shape), label_ptr, base, offset, mask, ignore_index, SIZE)
    if FORM == "variation":
        difference = rounded(first - second, OUT)
        sign = tl.where(difference > 0.0, 1.0, tl.where(difference < 0.0, -1.0, 0.0))  # 0 for NaN
        d_first = rounded(rounded(dy * 0.5, OUT) * sign, OUT)
        if WITH_FIRST:
            tl.store(d_first_ptr + base + offset, d_first.to(FIRST), mask=mask)
        if WITH_SECOND:
            tl.store(d_second_0_ptr + base + offset, (d_first * -1.0).to(SECOND), mask=mask)
    elif FORM == "log_target":
        probability = rounded(exp(second), SECOND)
        product = rounded(dy * probability, OUT)
        if WITH_FIRST:
            tl.store(d_first_ptr + base + offset, (product * -1.0).to(FIRST), mask=mask)
        if WITH_SECOND:
            d_exp = rounded(rounded(dy * rounded(second - first, OUT), OUT), SECOND)
            tl.store(d_second_0_ptr + base + offset, product.to(SECOND), mask=mask)
            tl.store(d_second_1_ptr + base + offset, (d_exp * probability).to(SECOND), mask=mask)
    else:
        tl.static_assert(FORM == "target")
        # Triton's `-x` is 0 - x, which returns +0 for +0.
        minus_dy = dy * -1.0
        if WITH_FIRST:
            tl.store(d_first_ptr + base + offset, rounded(minus_dy * second, OUT).to(FIRST), mask=mask)
        if WITH_SECOND:
            dy = rounded(dy, SECOND)
            # Of x * log(y) for x and for y, both the target.
            d_factor = tl.where(second == 0.0, 0.0, xlogy(dy, second))
            d_log = divide(rounded(dy * second, SECOND), second)
            tl.store(d_second_0_ptr + base + offset, d_factor.to(SECOND), mask=mask)
            tl.store(d_second_1_ptr + base + offset, d_log.to(SECOND), mask=mask)
            tl.store(d_second_2_ptr + base + offset, rounded(minus_dy * first, OUT).to(SECOND), mask=mask)
