"""Cross-entropy as eager computes it from fp32 logits: log_softmax, its value at the target, and the logits' gradient.

Logits are read in their own dtype and converted to fp32 in registers. The sum of a row's exponentials has the order of
the kernel that ATen runs for an fp32 copy of the logits (`core/softmax.py`).
"""

import triton
import triton.language as tl

from .primitives import divide, exp, exp_add, log, mask_if, maximum
from .summation import _sum_in_sequence, _sum_of_lanes, chain_of_vectors, in_vectors, sum_of_block

# Threads of a block of ATen's kernels, except the kernel for short rows, which gives a row one warp.
_LANES = tl.constexpr(1024)


@triton.jit
def _over_row(
    row_ptr,
    rest_ptr,
    head,
    of_lanes,
    of_vectors,
    largest,
    SUM: tl.constexpr,
    HEAD: tl.constexpr,
    VOCAB: tl.constexpr,
    KIND: tl.constexpr,
    UNROLL: tl.constexpr,
    HELD: tl.constexpr,
):
    """The sums of a row's exponentials in the order of ATen's block of 1024 threads; without SUM its largest elements.

    Args:
        row_ptr: the row.
        rest_ptr: the start of its vectors.
        head: the number of elements before them.
        of_lanes: [1024], initial values.
        of_vectors: [4096], the largest elements of vectors so far; unused with SUM.
        HELD: the first steps, which the caller takes. There is no head then.

    Returns:
        of_lanes, of_vectors
    """
    # A row is read twice, the second time from the L1 or L2 if it is still there.
    EVICT: tl.constexpr = "evict_first" if SUM else "evict_last"
    LANES: tl.constexpr = 1024
    STEP: tl.constexpr = 4 * LANES
    NOTHING: tl.constexpr = float("-inf")
    lane = tl.arange(0, LANES)
    if HEAD:
        # Lane t takes element t - k if the row begins k elements after a multiple of 16 bytes.
        of_head = lane - (LANES - head)
        x = tl.load(row_ptr + of_head, mask=mask_if(of_head >= 0, head > 0), other=NOTHING, eviction_policy=EVICT)
        if SUM:
            of_lanes = exp_add(of_lanes, x.to(tl.float32) - largest)
        else:
            of_lanes = maximum(of_lanes, x)
    if KIND == "registers":
        first_single = 0
        SINGLES: tl.constexpr = (VOCAB + LANES - 1) // LANES
    else:
        rest_ptr += HELD * STEP
        steps = (VOCAB - head) // STEP - HELD
        # All loads precede the computation: they do not wait for each other.
        for chunk in range(steps // UNROLL):
            # The maximum reads chunks from the last to the first: the sum begins with those in the cache.
            at = chunk if SUM else steps // UNROLL - 1 - chunk
            tiles = ()
            for step in tl.static_range(UNROLL):
                element = (at * UNROLL + step) * STEP + tl.arange(0, STEP)
                tiles = tiles + (tl.load(rest_ptr + element, eviction_policy=EVICT),)
            for step in tl.static_range(UNROLL):
                if SUM:
                    of_lanes = chain_of_vectors(of_lanes, tiles[step].to(tl.float32) - largest, LANES, EXP=True)
                else:
                    of_vectors = maximum(of_vectors, tiles[step])
        tiles = ()
        # With a head the largest possible number, without one the exact number.
        REST: tl.constexpr = UNROLL - 1 if HEAD else (VOCAB // STEP - HELD) % UNROLL
        PARTIAL: tl.constexpr = KIND == "shared" and VOCAB % STEP != 0
        for step in tl.static_range(REST + PARTIAL):
            element = (steps // UNROLL * UNROLL + step) * STEP + tl.arange(0, STEP)
            if HEAD:
                in_row = element < steps * STEP
                tiles = tiles + (tl.load(rest_ptr + element, mask=in_row, other=NOTHING, eviction_policy=EVICT),)
            elif step == REST:
                in_row = element < VOCAB - HELD * STEP
                tiles = tiles + (tl.load(rest_ptr + element, mask=in_row, other=NOTHING, eviction_policy=EVICT),)
            else:
                tiles = tiles + (tl.load(rest_ptr + element, eviction_policy=EVICT),)
        for step in tl.static_range(REST + PARTIAL):
            if SUM:
                of_lanes = chain_of_vectors(of_lanes, tiles[step].to(tl.float32) - largest, LANES, EXP=True)
            else:
                of_vectors = maximum(of_vectors, tiles[step])
        first_single = steps * STEP
        if KIND == "shared":
            SINGLES: tl.constexpr = 0
        else:
            tl.static_assert(KIND == "loop")
            SINGLES: tl.constexpr = 4 if HEAD else (VOCAB % STEP + LANES - 1) // LANES
    for single in tl.static_range(SINGLES):
        element = first_single + single * LANES + lane
        in_row = element < VOCAB - HELD * STEP - head
        x = tl.load(rest_ptr + element, mask=in_row, other=NOTHING, eviction_policy=EVICT)
        if SUM:
            of_lanes = exp_add(of_lanes, x.to(tl.float32) - largest)
        else:
            of_lanes = maximum(of_lanes, x)
    return of_lanes, of_vectors


@triton.jit
def _store(
    x_ptr,
    target,
    max_ptr,
    log_sum_ptr,
    logp_ptr,
    checked_ptr,
    row,
    largest,
    log_sum,
    ignored,
    mask,
    VOCAB: tl.constexpr,
):
    """Stores the rows' statistics for loss and gradient; `x_ptr` has the rows' pointers.

    The loss is computed from log-probabilities [rows, 1]: `checked` has class 0 as their target, -100 for ignored rows,
    and 1, out of range, for targets out of range.
    """
    valid = (target >= 0) & (target < VOCAB)
    x = tl.load(x_ptr + tl.where(valid, target, 0), mask=mask, other=0.0).to(tl.float32)
    tl.store(max_ptr + row, largest, mask=mask)
    tl.store(log_sum_ptr + row, log_sum, mask=mask)
    tl.store(logp_ptr + row, tl.where(ignored, 0.0, (x - largest) - log_sum), mask=mask)
    tl.store(checked_ptr + row, tl.where(ignored, -100, tl.where(valid, 0, 1)).to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["rows", "row_stride", "ignore_index"])
def cross_entropy_forward(
    x_ptr,
    target_ptr,
    max_ptr,
    log_sum_ptr,
    logp_ptr,
    checked_ptr,
    rows: tl.int64,
    row_stride: tl.int64,
    ignore_index: tl.int64,
    VOCAB: tl.constexpr,
    KIND: tl.constexpr,
    DENSE: tl.constexpr,
    SHIFT: tl.constexpr,
    UNIT: tl.constexpr,
    UNROLL: tl.constexpr,
    HELD: tl.constexpr,
):
    """Each row's maximum, logarithm of the sum of exponentials, and log-probability of the target.

    If the target is ignored the logarithm is 0, or NaN if log_softmax is NaN.

    Args:
        row_stride: x's, in UNITs of elements.
        KIND: ATen's kernel for rows of more than 2048 elements ("loop", "shared", "registers").
        DENSE: rows follow each other without a gap.
        SHIFT: elements between the last multiple of 16 bytes and eager's first row.
        HELD: the first steps of 4096 elements, which stay in registers between a row's two passes.
    """
    # The address of a row decides where ATen's vectors begin.
    HEAD: tl.constexpr = KIND == "loop" and (VOCAB % 4 != 0 or SHIFT != 0)
    tl.static_assert(HELD == 0 or (KIND == "loop" and not HEAD and HELD <= VOCAB // (4 * _LANES)))
    for index in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)  # The interpreter's loops yield Python integers.
        row_ptr = x_ptr + row * row_stride * UNIT
        rest_ptr = row_ptr
        head = 0
        if HEAD:
            before = ((SHIFT + row * VOCAB) % 4).to(tl.int32)
            head = tl.where(before > 0, _LANES - before, 0)
            if DENSE:
                # This form shows the compiler a multiple of four elements.
                rest_ptr = x_ptr + ((SHIFT + row * VOCAB + head) // 4 * 4 - SHIFT)
            else:
                rest_ptr = row_ptr + head
        target = tl.load(target_ptr + row)
        of_lanes = tl.full([_LANES], float("-inf"), tl.float32).to(x_ptr.dtype.element_ty)
        of_vectors = tl.full([4 * _LANES], float("-inf"), tl.float32).to(x_ptr.dtype.element_ty)
        held = ()
        for step in tl.static_range(HELD):
            element = step * 4 * _LANES + tl.arange(0, 4 * _LANES)
            held = held + (tl.load(row_ptr + element, eviction_policy="evict_first"),)
        of_lanes, of_vectors = _over_row(
            row_ptr, rest_ptr, head, of_lanes, of_vectors, 0.0, False, HEAD, VOCAB, KIND, UNROLL, HELD
        )
        for step in tl.static_range(HELD):
            of_vectors = maximum(of_vectors, held[step])
        first, second, third, fourth = in_vectors(of_vectors, _LANES)
        of_lanes = maximum(of_lanes, maximum(maximum(first, second), maximum(third, fourth))).to(tl.float32)
        largest = tl.max(of_lanes, axis=0)
        ignored = target == ignore_index
        if ignored:
            # NaN if an element is NaN or +inf, or if all are -inf.
            is_nan = tl.max((of_lanes != of_lanes).to(tl.int32), axis=0) > 0
            log_sum = tl.where(is_nan, float("nan"), (largest - largest))
        else:
            total = tl.zeros([_LANES], tl.float32)
            for step in tl.static_range(HELD):
                total = chain_of_vectors(total, held[step].to(tl.float32) - largest, _LANES, EXP=True)
            total, _ = _over_row(row_ptr, rest_ptr, head, total, 0.0, largest, True, HEAD, VOCAB, KIND, UNROLL, HELD)
            log_sum = tl.max(log(sum_of_block(total, _LANES)), axis=0)
        _store(
            row_ptr, target, max_ptr, log_sum_ptr, logp_ptr, checked_ptr, row, largest, log_sum, ignored, True, VOCAB
        )


@triton.jit(do_not_specialize=["rows", "row_stride", "ignore_index"])
def cross_entropy_forward_short(
    x_ptr,
    target_ptr,
    max_ptr,
    log_sum_ptr,
    logp_ptr,
    checked_ptr,
    rows: tl.int64,
    row_stride: tl.int64,
    ignore_index: tl.int64,
    VOCAB: tl.constexpr,
    LOG2_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`cross_entropy_forward` of rows that ATen gives one warp each: WIDTH lanes of 2**LOG2_SIZE / WIDTH elements."""
    SIZE: tl.constexpr = 1 << LOG2_SIZE
    LOG2_STEPS: tl.constexpr = LOG2_SIZE - (WIDTH.bit_length() - 1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < rows
    element = tl.arange(0, SIZE)
    row_ptr = x_ptr + row * row_stride * UNIT
    mask = in_range[:, None] & (element < VOCAB)[None, :]
    x = tl.load(row_ptr[:, None] + element[None, :], mask=mask, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, axis=1)
    terms = tl.reshape(exp(x - largest[:, None]), [ROWS, SIZE // WIDTH, WIDTH])
    lanes = _sum_in_sequence(tl.zeros([ROWS, WIDTH], tl.float32), terms, ROWS, LOG2_STEPS, WIDTH)
    log_sum = log(_sum_of_lanes(lanes, ROWS, WIDTH, 1, EXCHANGE_ONCE=False))
    target = tl.load(target_ptr + row, mask=in_range, other=0)
    ignored = target == ignore_index
    log_sum = tl.where(ignored, log_sum * 0.0, log_sum)
    _store(
        row_ptr, target, max_ptr, log_sum_ptr, logp_ptr, checked_ptr, row, largest, log_sum, ignored, in_range, VOCAB
    )


@triton.jit
def _statistics(target_ptr, max_ptr, log_sum_ptr, row, gradient, ignore_index):
    """A row's target, whether it is ignored, its maximum and log sum, and the sum of its log-probabilities' gradients.

    Only one of these gradients is nonzero: it is their sum in any order. A sum of -0 and zeros is +0.
    """
    target = tl.load(target_ptr + row)
    ignored = target == ignore_index
    of_row = tl.where(ignored, 0.0, gradient + 0.0)
    return target.to(tl.int32), ignored, tl.load(max_ptr + row), tl.load(log_sum_ptr + row), of_row


@triton.jit
def _gradient_of_row(x, largest, log_sum, of_row, gradient):
    """The gradient of the logits of rows that are not ignored, from the log-probabilities'."""
    probability = exp((x.to(tl.float32) - largest) - log_sum)
    # Triton's `-x` is 0 - x, which returns +0 for +0.
    return tl.fma(tl.broadcast_to(of_row * -1.0, x.shape), probability, gradient)


@triton.jit
def _gradient(x, is_target, ignored, largest, log_sum, of_row, gradient):
    """The gradient of logits; for an ignored row zeros, or NaN if log_softmax is NaN."""
    dx = _gradient_of_row(x, largest, log_sum, of_row, tl.where(is_target, gradient, 0.0))
    return tl.where(ignored, log_sum * 0.0, dx)


@triton.jit
def _gradient_across_rows(
    x_ptr,
    target_ptr,
    max_ptr,
    log_sum_ptr,
    dx_ptr,
    first,
    gradient,
    rows,
    ignore_index,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The gradient of BLOCK elements of a dense tensor from `first` on, of one row or of two neighbouring rows."""
    row = first // VOCAB
    begin = (first - row * VOCAB).to(tl.int32)
    rest = VOCAB - begin
    next_row = tl.minimum(row + 1, rows - 1)
    target, ignored, largest, log_sum, of_row = _statistics(
        target_ptr, max_ptr, log_sum_ptr, row, gradient, ignore_index
    )
    next_target, next_ignored, next_largest, next_log_sum, of_next = _statistics(
        target_ptr, max_ptr, log_sum_ptr, next_row, gradient, ignore_index
    )
    element = tl.arange(0, BLOCK)
    is_next = element >= rest
    # Ignored rows are not read.
    wanted = (ignored == 0) | ((next_ignored == 0) & (rest < BLOCK))
    if MASKED:
        in_range = element < rows * VOCAB - first
        x = tl.load(x_ptr + first + element, mask=mask_if(in_range, wanted), other=0.0)
    else:
        x = tl.load(x_ptr + first + element, mask=mask_if(element < BLOCK, wanted), other=0.0)
    dx = _gradient(
        x,
        element == tl.where(is_next, next_target + rest, target - begin),
        tl.where(is_next, next_ignored, ignored),
        tl.where(is_next, next_largest, largest),
        tl.where(is_next, next_log_sum, log_sum),
        tl.where(is_next, of_next, of_row),
        gradient,
    )
    if MASKED:
        tl.store(dx_ptr + first + element, dx.to(dx_ptr.dtype.element_ty), mask=in_range)
    else:
        tl.store(dx_ptr + first + element, dx.to(dx_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["rows", "row_stride", "ignore_index", "blocks_per_row"])
def cross_entropy_backward(
    x_ptr,
    target_ptr,
    max_ptr,
    log_sum_ptr,
    d_loss_ptr,
    count_ptr,
    dx_ptr,
    rows: tl.int64,
    row_stride: tl.int64,
    ignore_index: tl.int64,
    blocks_per_row: tl.int32,
    VOCAB: tl.constexpr,
    MEAN: tl.constexpr,
    ACROSS_ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx, dense, from the rows' statistics, the loss's gradient and, with MEAN, the number of rows not ignored.

    With ACROSS_ROWS x is dense and a program takes BLOCK elements of it, which begin at a multiple of 16 bytes although
    rows do not. A row is not shorter than BLOCK.
    """
    gradient = tl.load(d_loss_ptr)
    if MEAN:
        gradient = divide(gradient, tl.load(count_ptr))
    gradient = gradient * -1.0
    # The last rows first: the forward pass may have left them in the L2.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    if ACROSS_ROWS:
        first = program.to(tl.int64) * BLOCK
        if first + BLOCK <= rows * VOCAB:
            _gradient_across_rows(
                x_ptr,
                target_ptr,
                max_ptr,
                log_sum_ptr,
                dx_ptr,
                first,
                gradient,
                rows,
                ignore_index,
                VOCAB,
                BLOCK,
                False,
            )
        else:
            _gradient_across_rows(
                x_ptr, target_ptr, max_ptr, log_sum_ptr, dx_ptr, first, gradient, rows, ignore_index, VOCAB, BLOCK, True
            )
    else:
        row = program // blocks_per_row
        first = (program - row * blocks_per_row) * BLOCK
        element = first + tl.arange(0, BLOCK)
        row = row.to(tl.int64)
        target, ignored, largest, log_sum, of_row = _statistics(
            target_ptr, max_ptr, log_sum_ptr, row, gradient, ignore_index
        )
        in_row = element < VOCAB
        dx_ptr += row * VOCAB
        if ignored:
            # Ignored rows are not read.
            zeros = tl.full([BLOCK], 0.0, tl.float32) + log_sum * 0.0
            tl.store(dx_ptr + element, zeros.to(dx_ptr.dtype.element_ty), mask=in_row)
        else:
            x = tl.load(x_ptr + row * row_stride * UNIT + element, mask=in_row, other=0.0)
            if (target >= first) & (target < first + BLOCK):
                dx = _gradient_of_row(x, largest, log_sum, of_row, tl.where(element == target, gradient, 0.0))
                tl.store(dx_ptr + element, dx.to(dx_ptr.dtype.element_ty), mask=in_row)
            else:
                dx = _gradient_of_row(x, largest, log_sum, of_row, tl.full([BLOCK], 0.0, tl.float32))
                tl.store(dx_ptr + element, dx.to(dx_ptr.dtype.element_ty), mask=in_row)
