"""The generalized Jensen-Shannon divergence of two tensors of logits, forward and backward, as eager composes it.

Every operation that eager launches rounds to the logits' dtype: quotients by the temperature, log_softmax, the mixture
of both distributions (`logsumexp` of two), two divergences (`kl_div` with `log_target`) and their weighted sum. Sums over
a row have the order of ATen's log_softmax (`core/softmax.py`).
"""

import triton
import triton.language as tl

from .primitives import exp, log, mask_if, maximum, rounded
from .softmax_long_rows import _begin_of_vectors, _extremes_of_row, _scaled, _sum_of_exponentials
from .summation import blocks_in_sequence, chain_of_vectors, sum_of_block


@triton.jit
def _statistics(
    row_ptr,
    row,
    length,
    factor,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    HEAD: tl.constexpr,
    BY_VECTORS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """A row's maximum and the logarithm of its sum of exponentials. A positive factor does not change what is largest."""
    DTYPE: tl.constexpr = row_ptr.dtype.element_ty
    head, _ = _begin_of_vectors(row, length, length, HEAD, False, 0, THREADS, VECTOR)
    largest, _ = _extremes_of_row(row_ptr, row_ptr + head, head, length, THREADS, VECTOR, HEAD)
    if SCALED:
        largest = rounded(largest * factor, DTYPE)
    total = _sum_of_exponentials(
        row_ptr, row_ptr + head, head, length, largest, THREADS, VECTOR, HEAD, factor, SCALED, BY_VECTORS
    )
    return largest, log(total)


@triton.jit
def _log_probability(row_ptr, at, mask, factor, largest, log_sum, SCALED: tl.constexpr, MASKED: tl.constexpr = True):
    """log_softmax of these elements of a row."""
    x = tl.load(row_ptr + at, mask=mask, other=0.0) if MASKED else tl.load(row_ptr + at)
    return rounded((_scaled(x, factor, SCALED) - largest) - log_sum, row_ptr.dtype.element_ty)


@triton.jit
def _mixture(s, t, log_rest, log_beta, DTYPE: tl.constexpr):
    """log((1 - beta) * exp(s) + beta * exp(t)), by `logsumexp`, and both terms' logarithms.

    The larger term less the maximum is 0 and its exponential 1. That of the smaller one is at most 1, so that the sum is
    from 1 to 2. If both are -inf eager replaces the maximum by 0 and returns -inf. A NaN is the maximum.
    """
    a = rounded(s + log_rest, DTYPE)
    b = rounded(t + log_beta, DTYPE)
    largest = maximum(a, b)
    total = rounded(rounded(exp(tl.abs(rounded(a - b, DTYPE)) * -1.0), DTYPE) + 1.0, DTYPE)
    m = rounded(rounded(log(total, NORMAL=True), DTYPE) + largest, DTYPE)
    return tl.where(largest == float("-inf"), largest, m), a, b


@triton.jit
def _divergence(input, target, probability, DTYPE: tl.constexpr):
    """`kl_div` with `log_target`; the probability is the target's, rounded."""
    return rounded(probability * rounded(target - input, DTYPE), DTYPE)


@triton.jit
def _weights(weight_ptr):
    """beta, 1 - beta and the logarithms of both, as eager rounds them."""
    return tl.load(weight_ptr), tl.load(weight_ptr + 1), tl.load(weight_ptr + 2), tl.load(weight_ptr + 3)


@triton.jit
def _row_offset(row, inner, outer_stride, inner_stride, UNIT: tl.constexpr):
    """Where a row begins: rows are equally spaced in groups of `inner`, and so are the groups."""
    group = row // inner
    return group * (outer_stride * UNIT) + (row - group * inner) * (inner_stride * UNIT)


@triton.jit(do_not_specialize=["size", "inner", "s_outer", "s_inner", "t_outer", "t_inner", "factor"])
def jsd_forward(
    student_ptr,
    teacher_ptr,
    place_ptr,
    weight_ptr,
    statistic_ptr,
    term_ptr,
    size: tl.int32,
    inner: tl.int64,
    s_outer: tl.int64,
    s_inner: tl.int64,
    t_outer: tl.int64,
    t_inner: tl.int64,
    factor: tl.float32,
    FORM: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    HEAD: tl.constexpr,
    BY_VECTORS: tl.constexpr,
    SCALED: tl.constexpr,
    STATISTICS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's terms, dense, and with STATISTICS the maxima and log sums of student and teacher. A program has a row.

    Args:
        place_ptr: the number of the row among those that count; -1 if it does not.
        size: elements of a row, in UNITs, as are the strides of rows.
        factor: what multiplies the logits, if SCALED.
        FORM: "mixture"; "teacher", kl_div of the student to the teacher, for beta 0; "student" for beta 1.
        THREADS, VECTOR, HEAD, BY_VECTORS: as in `_sum_of_exponentials`.
    """
    DTYPE: tl.constexpr = term_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    length = size * UNIT
    s_ptr = student_ptr + _row_offset(row, inner, s_outer, s_inner, UNIT)
    t_ptr = teacher_ptr + _row_offset(row, inner, t_outer, t_inner, UNIT)
    place = tl.load(place_ptr + row)
    if place >= (-1 if STATISTICS else 0):
        s_max, s_log = _statistics(s_ptr, row, length, factor, THREADS, VECTOR, HEAD, BY_VECTORS, SCALED)
        t_max, t_log = _statistics(t_ptr, row, length, factor, THREADS, VECTOR, HEAD, BY_VECTORS, SCALED)
        if STATISTICS:
            tl.store(statistic_ptr + row * 4, s_max)
            tl.store(statistic_ptr + row * 4 + 1, s_log)
            tl.store(statistic_ptr + row * 4 + 2, t_max)
            tl.store(statistic_ptr + row * 4 + 3, t_log)
        if place >= 0:
            beta, rest, log_beta, log_rest = _weights(weight_ptr)
            tiles = tl.cdiv(length, BLOCK)
            for index in range(tiles):
                # The last were read last.
                at = (tiles - 1 - index) * BLOCK + tl.arange(0, BLOCK)
                mask = at < length
                s = _log_probability(s_ptr, at, mask, factor, s_max, s_log, SCALED)
                t = _log_probability(t_ptr, at, mask, factor, t_max, t_log, SCALED)
                if FORM == "teacher":
                    term = _divergence(s, t, rounded(exp(t), DTYPE), DTYPE)
                elif FORM == "student":
                    term = _divergence(t, s, rounded(exp(s), DTYPE), DTYPE)
                else:
                    tl.static_assert(FORM == "mixture")
                    m, _, _ = _mixture(s, t, log_rest, log_beta, DTYPE)
                    of_teacher = rounded(beta * _divergence(m, t, rounded(exp(t), DTYPE), DTYPE), DTYPE)
                    of_student = rounded(rest * _divergence(m, s, rounded(exp(s), DTYPE), DTYPE), DTYPE)
                    term = of_teacher + of_student
                tl.store(term_ptr + place * length + at, term.to(DTYPE), mask=mask)


@triton.jit
def _target_gradient(dy, input, target, probability, DTYPE: tl.constexpr):
    """The gradient of `kl_div`'s target: that of the difference, then that of the exponential."""
    of_exp = rounded(dy * rounded(target - input, DTYPE), DTYPE)
    return rounded(rounded(dy * probability, DTYPE) + rounded(of_exp * probability, DTYPE), DTYPE)


@triton.jit
def _gradients(dy, s, t, weights, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """The gradients of both log-probabilities, each step rounded, added up in autograd's order of arrival."""
    if FORM == "teacher":
        probability = rounded(exp(t), DTYPE)
        # Triton's `-x` is 0 - x, which returns +0 for +0.
        return rounded(dy * probability, DTYPE) * -1.0, _target_gradient(dy, s, t, probability, DTYPE)
    elif FORM == "student":
        probability = rounded(exp(s), DTYPE)
        return _target_gradient(dy, t, s, probability, DTYPE), rounded(dy * probability, DTYPE) * -1.0
    else:
        tl.static_assert(FORM == "mixture")
        beta, rest, log_beta, log_rest = weights
        m, a, b = _mixture(s, t, log_rest, log_beta, DTYPE)
        p, q = rounded(exp(s), DTYPE), rounded(exp(t), DTYPE)
        of_student, of_teacher = rounded(dy * rest, DTYPE), rounded(dy * beta, DTYPE)
        dm = rounded(rounded(of_student * p, DTYPE) * -1.0 - rounded(of_teacher * q, DTYPE), DTYPE)
        da = rounded(dm * rounded(exp(rounded(a - m, DTYPE)), DTYPE), DTYPE)
        db = rounded(dm * rounded(exp(rounded(b - m, DTYPE)), DTYPE), DTYPE)
        ds = rounded(_target_gradient(of_student, m, s, p, DTYPE) + da, DTYPE)
        return ds, rounded(_target_gradient(of_teacher, m, t, q, DTYPE) + db, DTYPE)


@triton.jit
def _add_gradients(
    of_student,
    of_teacher,
    pointers,
    dy,
    counts,
    weights,
    of_row,
    factor,
    at,
    mask,
    FORM: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    MASKED: tl.constexpr,
    SCALED: tl.constexpr,
    DENSE: tl.constexpr,
    LABELS: tl.constexpr,
    WITH_STUDENT: tl.constexpr,
    WITH_TEACHER: tl.constexpr,
):
    """Stores the gradients of the log-probabilities of these elements of a row; each thread adds its own to its totals."""
    dy_ptr, s_ptr, t_ptr, s_scratch_ptr, t_scratch_ptr = pointers
    s_max, s_log, t_max, t_log = of_row
    DTYPE: tl.constexpr = s_ptr.dtype.element_ty
    s = _log_probability(s_ptr, at, mask, factor, s_max, s_log, SCALED, MASKED)
    t = _log_probability(t_ptr, at, mask, factor, t_max, t_log, SCALED, MASKED)
    if DENSE:
        dy = tl.load(dy_ptr + at, mask=mask_if(mask, counts), other=0.0).to(tl.float32)
    if LABELS:
        # The gradient of terms that were taken by a mask is added to zeros.
        dy = dy + 0.0
    ds, dt = _gradients(dy, s, t, weights, FORM, DTYPE)
    if MASKED:
        ds, dt = tl.where(mask, ds, 0.0), tl.where(mask, dt, 0.0)
    if WITH_STUDENT:
        tl.store(s_scratch_ptr + at, ds.to(DTYPE), mask=mask)
        of_student = chain_of_vectors(of_student, ds, THREADS, VECTOR=VECTOR)
    if WITH_TEACHER:
        tl.store(t_scratch_ptr + at, dt.to(DTYPE), mask=mask)
        of_teacher = chain_of_vectors(of_teacher, dt, THREADS, VECTOR=VECTOR)
    return of_student, of_teacher


@triton.jit
def _row_total(total, THREADS: tl.constexpr, BY_VECTORS: tl.constexpr):
    """The sum of ATen's threads, whose kernel for vectors has a tree."""
    if BY_VECTORS:
        return tl.max(sum_of_block(total, THREADS), axis=0)
    else:
        return tl.max(blocks_in_sequence(total, THREADS // 32), axis=0)


@triton.jit
def _write_gradient(
    x_ptr, scratch_ptr, dx_ptr, largest, log_sum, total, factor, length, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    """log_softmax's gradient dy - sum(dy) * exp(log_softmax(x)) of a row, by an FMA, and then that of the quotient.

    An element is read before it is written: dx may be x.
    """
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    tiles = tl.cdiv(length, BLOCK)
    for index in range(tiles):
        at = (tiles - 1 - index) * BLOCK + tl.arange(0, BLOCK)
        mask = at < length
        s = _log_probability(x_ptr, at, mask, factor, largest, log_sum, SCALED)
        dy = tl.load(scratch_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dx = rounded(tl.fma(tl.broadcast_to(total * -1.0, s.shape), exp(s), dy), DTYPE)
        if SCALED:
            dx = dx * factor
        tl.store(dx_ptr + at, dx.to(DTYPE), mask=mask)


@triton.jit(do_not_specialize=["rows", "size", "inner", "s_outer", "s_inner", "t_outer", "t_inner", "factor"])
def jsd_backward(
    dy_ptr,
    student_ptr,
    teacher_ptr,
    place_ptr,
    weight_ptr,
    statistic_ptr,
    scratch_ptr,
    d_student_ptr,
    d_teacher_ptr,
    rows: tl.int64,
    size: tl.int32,
    inner: tl.int64,
    s_outer: tl.int64,
    s_inner: tl.int64,
    t_outer: tl.int64,
    t_inner: tl.int64,
    factor: tl.float32,
    FORM: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    HEAD: tl.constexpr,
    BY_VECTORS: tl.constexpr,
    SCALED: tl.constexpr,
    DENSE: tl.constexpr,
    LABELS: tl.constexpr,
    WITH_STUDENT: tl.constexpr,
    WITH_TEACHER: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradients of student and teacher, dense; each may be written over its logits.

    A program takes a row at a time. It first computes the gradients of the row's log-probabilities, keeps them in its
    part of the scratch memory and adds them up, then computes those of the logits.

    Args:
        dy_ptr: the gradient of the terms: one number for all, with DENSE one for each.
        scratch_ptr: [programs, gradients that are wanted, length rounded up to a multiple of 16].
        LABELS: the terms are those of the rows that count.
        THREADS, VECTOR, HEAD, BY_VECTORS: as in `_sum_of_exponentials`, of ATen's kernel for the gradient.
    """
    TILE: tl.constexpr = THREADS * VECTOR
    length = size * UNIT
    of_row_in_scratch = tl.cdiv(length, 16) * 16
    TENSORS: tl.constexpr = 2 if WITH_STUDENT and WITH_TEACHER else 1
    s_scratch_ptr = scratch_ptr + tl.program_id(0).to(tl.int64) * TENSORS * of_row_in_scratch
    t_scratch_ptr = s_scratch_ptr + (of_row_in_scratch if WITH_STUDENT else 0)
    element = tl.arange(0, TILE)
    thread = tl.arange(0, THREADS)
    weights = _weights(weight_ptr)
    for index in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)  # The interpreter's loops yield Python integers.
        s_ptr = student_ptr + _row_offset(row, inner, s_outer, s_inner, UNIT)
        t_ptr = teacher_ptr + _row_offset(row, inner, t_outer, t_inner, UNIT)
        place = tl.load(place_ptr + row)
        counts = place >= 0
        pointers = (dy_ptr + place * length if DENSE else dy_ptr, s_ptr, t_ptr, s_scratch_ptr, t_scratch_ptr)
        dy = 0.0 if DENSE else tl.where(counts, tl.load(dy_ptr).to(tl.float32), 0.0)
        first = statistic_ptr + row * 4
        of_row = (tl.load(first), tl.load(first + 1), tl.load(first + 2), tl.load(first + 3))
        head, _ = _begin_of_vectors(row, length, length, HEAD, False, 0, THREADS, VECTOR)
        of_student = tl.zeros([THREADS], tl.float32)
        of_teacher = tl.zeros([THREADS], tl.float32)
        if HEAD:
            before = thread - (THREADS - head)
            of_student, of_teacher = _add_gradients(
                of_student,
                of_teacher,
                pointers,
                dy,
                counts,
                weights,
                of_row,
                factor,
                before,
                mask_if(before >= 0, head > 0),
                FORM,
                THREADS,
                1,
                True,
                SCALED,
                DENSE,
                LABELS,
                WITH_STUDENT,
                WITH_TEACHER,
            )
        steps = (length - head) // TILE
        # The last step by vectors has fewer.
        for step in range(tl.cdiv(length - head, TILE) if BY_VECTORS else steps):
            at = head + step * TILE + element
            of_student, of_teacher = _add_gradients(
                of_student,
                of_teacher,
                pointers,
                dy,
                counts,
                weights,
                of_row,
                factor,
                at,
                at < length,
                FORM,
                THREADS,
                VECTOR,
                BY_VECTORS,
                SCALED,
                DENSE,
                LABELS,
                WITH_STUDENT,
                WITH_TEACHER,
            )
        if not BY_VECTORS:
            rest = head + steps * TILE
            for step in range(tl.cdiv(length - rest, THREADS)):
                single = rest + step * THREADS + thread
                of_student, of_teacher = _add_gradients(
                    of_student,
                    of_teacher,
                    pointers,
                    dy,
                    counts,
                    weights,
                    of_row,
                    factor,
                    single,
                    single < length,
                    FORM,
                    THREADS,
                    1,
                    True,
                    SCALED,
                    DENSE,
                    LABELS,
                    WITH_STUDENT,
                    WITH_TEACHER,
                )
        # All threads' gradients are in the scratch memory before any thread reads them.
        tl.debug_barrier()
        if WITH_STUDENT:
            dx_ptr = d_student_ptr + row * length
            total = _row_total(of_student, THREADS, BY_VECTORS)
            _write_gradient(s_ptr, s_scratch_ptr, dx_ptr, of_row[0], of_row[1], total, factor, length, SCALED, BLOCK)
        if WITH_TEACHER:
            dx_ptr = d_teacher_ptr + row * length
            total = _row_total(of_teacher, THREADS, BY_VECTORS)
            _write_gradient(t_ptr, t_scratch_ptr, dx_ptr, of_row[2], of_row[3], total, factor, length, SCALED, BLOCK)
        # And all have read them before the next row's are stored.
        tl.debug_barrier()
