"""Softmax of scaled and masked attention scores, forward and backward, in the orders of `softmax.py`.

Programs take the rows that share a row of the mask one after the other, so that the L2 has it. A tensor's row has an
offset of three levels (`core/layout.row_levels`); `inner` and `middle` are the lengths of two of them, `by_inner` and
`by_middle` the dividers of these lengths.
"""

import triton
import triton.language as tl

from .indices import quotient
from .primitives import divide_by_reciprocal, divide_down_to_zero, exp, exp_add, mask_if, maximum, reciprocal
from .softmax import (
    _LEAST_TERM,
    _elements_before,
    _gradient,
    _in_tile,
    _inside,
    _largest,
    _masked,
    _product,
    _quotients,
    _softmax_of_block,
    _store_softmax,
    _sum_of_tiles,
    _warp_sum,
)
from .summation import blocks_in_sequence, chain_of_vectors, sum_of_block

# fmt: off
_SCALARS = [
    "rows", "size", "inner", "middle", "by_inner", "by_middle", "outer_stride", "middle_stride", "inner_stride",
    "mask_outer_stride", "mask_middle_stride", "mask_inner_stride",
]
# fmt: on


@triton.jit
def _row_offset(row, lengths, strides):
    """The offset of a row.

    Args:
        lengths: those of the inner and the middle index, then the dividers of both (`core.layout.divider`).
        strides: of the outer, the middle and the inner index.
    """
    inner, middle, by_inner, by_middle = lengths
    outer_and_middle = quotient(row, by_inner)
    outer = quotient(outer_and_middle, by_middle)
    return (
        outer * strides[0]
        + (outer_and_middle - outer * middle) * strides[1]
        + (row - outer_and_middle * inner) * strides[2]
    )


@triton.jit
def _softmax(x, statistics):
    """exp(x - max) / sum; `statistics`: these two numbers of a row."""
    largest, total = statistics
    return divide_down_to_zero(exp(x - largest), total, reciprocal(total, NORMAL=True))


@triton.jit
def _number_of(scale, DTYPE: tl.constexpr, NARROW: tl.constexpr):
    """The scale. With NARROW the compiler sees that it is a number of the dtype: one instruction multiplies and rounds."""
    return tl.cast(tl.cast(scale, DTYPE), tl.float32) if NARROW else scale


@triton.jit
def _to_scores(dx, scale, dtype: tl.constexpr):
    """The gradient of the scores from that of the fp32 softmax's input: rounded, multiplied, and rounded again."""
    return (dx.to(dtype).to(tl.float32) * scale).to(dtype)


@triton.jit(do_not_specialize=[*_SCALARS, "scale"])
def masked_softmax_forward(
    scores_ptr,
    out_ptr,
    statistics_ptr,
    mask_ptr,
    rows: tl.int32,
    size: tl.int32,
    inner: tl.int32,
    middle: tl.int32,
    by_inner: tl.int64,
    by_middle: tl.int64,
    outer_stride: tl.int64,
    middle_stride: tl.int64,
    inner_stride: tl.int64,
    mask_outer_stride: tl.int64,
    mask_middle_stride: tl.int64,
    mask_inner_stride: tl.int64,
    scale: tl.float32,
    LOG2_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    NARROW: tl.constexpr,
):
    """softmax(scores * scale + mask) in fp32, rounded to the scores' dtype. Scores and output are dense.

    Args:
        statistics_ptr: gets each row's maximum and sum, in the programs' order.
        mask_ptr: additive, of the scores' dtype; read if MASKED.
        size: elements of a row, in UNITs, as the strides are; more than half of 2**LOG2_SIZE.
        WIDTH, TILE: as in `softmax_forward`.
        NARROW: the scores' dtype has the number `scale`.
    """
    TILES: tl.constexpr = (1 << LOG2_SIZE) // TILE
    scale = _number_of(scale, scores_ptr.dtype.element_ty, NARROW)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    lengths = (inner, middle, by_inner, by_middle)
    offset = _row_offset(row, lengths, (outer_stride, middle_stride, inner_stride)) * UNIT
    of_mask = _row_offset(row, lengths, (mask_outer_stride, mask_middle_stride, mask_inner_stride)) * UNIT
    xs = ()
    for tile in tl.static_range(TILES):
        element, inside = _in_tile(row, rows, size * UNIT, tile, TILE)
        xs = xs + (_masked(scores_ptr + offset, mask_ptr + of_mask, element, inside, scale, MASKED),)
    largest = _largest(xs, TILES)
    terms = ()
    for tile in tl.static_range(TILES):
        terms = terms + (exp(xs[tile] - largest),)
    total = _warp_sum(terms, ROWS, WIDTH, TILES, TILE)[:, None]
    _store_softmax(terms, total, out_ptr + offset, row, rows, size * UNIT, TILES, TILE)
    tl.store(statistics_ptr + 2 * row.to(tl.int64), largest, mask=row < rows)
    tl.store(statistics_ptr + 2 * row.to(tl.int64) + 1, total, mask=row < rows)


@triton.jit(do_not_specialize=[*_SCALARS, "scale"])
def masked_softmax_backward(
    dy_ptr,
    scores_ptr,
    statistics_ptr,
    dx_ptr,
    mask_ptr,
    rows: tl.int32,
    size: tl.int32,
    inner: tl.int32,
    middle: tl.int32,
    by_inner: tl.int64,
    by_middle: tl.int64,
    outer_stride: tl.int64,
    middle_stride: tl.int64,
    inner_stride: tl.int64,
    mask_outer_stride: tl.int64,
    mask_middle_stride: tl.int64,
    mask_inner_stride: tl.int64,
    scale: tl.float32,
    LOG2_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    NARROW: tl.constexpr,
):
    """The gradient of the scores from that of the output, with y, the fp32 softmax, computed again from the statistics.

    dy and dx are dense. The other arguments are those of `masked_softmax_forward`.
    """
    TILES: tl.constexpr = (1 << LOG2_SIZE) // TILE
    scale = _number_of(scale, scores_ptr.dtype.element_ty, NARROW)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    lengths = (inner, middle, by_inner, by_middle)
    offset = _row_offset(row, lengths, (outer_stride, middle_stride, inner_stride)) * UNIT
    of_mask = _row_offset(row, lengths, (mask_outer_stride, mask_middle_stride, mask_inner_stride)) * UNIT
    statistics_ptr += 2 * row.to(tl.int64)
    largest = tl.load(statistics_ptr, mask=row < rows, other=0.0)
    total = tl.load(statistics_ptr + 1, mask=row < rows, other=1.0)
    terms = ()
    dys = ()
    for tile in tl.static_range(TILES):
        element, inside = _in_tile(row, rows, size * UNIT, tile, TILE)
        x = _masked(scores_ptr + offset, mask_ptr + of_mask, element, inside, scale, MASKED)
        terms = terms + (exp(x - largest),)
        # Single elements are loaded early; vectors, which take more registers, when they are needed (H200).
        if UNIT == 1:
            dys = dys + (tl.load(dy_ptr + offset + element, mask=inside, other=0.0),)
    ys = _quotients(terms, total, TILES)
    products = ()
    for tile in tl.static_range(TILES):
        if UNIT == 1:
            dy = dys[tile]
        else:
            element, inside = _in_tile(row, rows, size * UNIT, tile, TILE)
            dy = tl.load(dy_ptr + offset + element, mask=inside, other=0.0)
        products = products + (_product(dy.to(tl.float32), ys[tile]),)
    sums = _warp_sum(products, ROWS, WIDTH, TILES, TILE)[:, None]
    for tile in tl.static_range(TILES):
        element, inside = _in_tile(row, rows, size * UNIT, tile, TILE)
        dx = _to_scores(_gradient(products[tile], ys[tile], sums), scale, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + offset + element, dx, mask=inside)


# Rows of one block


@triton.jit(do_not_specialize=[*_SCALARS, "scale"])
def masked_softmax_forward_of_block(
    scores_ptr,
    out_ptr,
    statistics_ptr,
    mask_ptr,
    rows: tl.int32,
    size: tl.int32,
    inner: tl.int32,
    middle: tl.int32,
    by_inner: tl.int64,
    by_middle: tl.int64,
    outer_stride: tl.int64,
    middle_stride: tl.int64,
    inner_stride: tl.int64,
    mask_outer_stride: tl.int64,
    mask_middle_stride: tl.int64,
    mask_inner_stride: tl.int64,
    scale: tl.float32,
    STEPS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    MASKED: tl.constexpr,
    NARROW: tl.constexpr,
):
    """`masked_softmax_forward` of a row that a program reads once; STEPS to HEAD: `softmax_forward_of_block`."""
    scale = _number_of(scale, scores_ptr.dtype.element_ty, NARROW)
    TILE: tl.constexpr = THREADS * VECTOR
    # VECTOR is 1 for bf16 and fp32 rows of up to 9216 elements, and fp16 rows with a head. `evict_last` saves 2 to 3.5% at 4096
    # (H200, bf16), and nothing where threads take vectors.
    KEPT: tl.constexpr = VECTOR == 1
    row = tl.program_id(0)
    lengths = (inner, middle, by_inner, by_middle)
    offset = _row_offset(row, lengths, (outer_stride, middle_stride, inner_stride)) * UNIT
    of_mask = _row_offset(row, lengths, (mask_outer_stride, mask_middle_stride, mask_inner_stride)) * UNIT
    before = _elements_before(offset, HEAD) if HEAD else 0
    scores_ptr += offset
    mask_ptr += of_mask
    out_ptr += offset
    length = size * UNIT
    tiles = ()
    for step in tl.static_range(STEPS):
        element = step * TILE + tl.arange(0, TILE)
        inside = _inside(element, before, before + length, HEAD and step == 0)
        x = _masked(scores_ptr - before, mask_ptr - before, element, inside, scale, MASKED, KEPT)
        tiles = tiles + (x,)
    largest, total = _softmax_of_block(
        tiles, scores_ptr, mask_ptr, out_ptr, before, length, scale, STEPS, THREADS, VECTOR, HEAD, MASKED
    )
    tl.store(statistics_ptr + 2 * row.to(tl.int64), largest)
    tl.store(statistics_ptr + 2 * row.to(tl.int64) + 1, total)


@triton.jit(do_not_specialize=[*_SCALARS, "scale"])
def masked_softmax_backward_of_block(
    dy_ptr,
    scores_ptr,
    statistics_ptr,
    dx_ptr,
    mask_ptr,
    rows: tl.int32,
    size: tl.int32,
    inner: tl.int32,
    middle: tl.int32,
    by_inner: tl.int64,
    by_middle: tl.int64,
    outer_stride: tl.int64,
    middle_stride: tl.int64,
    inner_stride: tl.int64,
    mask_outer_stride: tl.int64,
    mask_middle_stride: tl.int64,
    mask_inner_stride: tl.int64,
    scale: tl.float32,
    STEPS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    UNIT: tl.constexpr,
    IN_SEQUENCE: tl.constexpr,
    MASKED: tl.constexpr,
    NARROW: tl.constexpr,
):
    """`masked_softmax_backward` of a row that a program reads once; IN_SEQUENCE: `softmax_backward_of_block`."""
    scale = _number_of(scale, scores_ptr.dtype.element_ty, NARROW)
    TILE: tl.constexpr = THREADS * VECTOR
    row = tl.program_id(0)
    lengths = (inner, middle, by_inner, by_middle)
    offset = _row_offset(row, lengths, (outer_stride, middle_stride, inner_stride)) * UNIT
    of_mask = _row_offset(row, lengths, (mask_outer_stride, mask_middle_stride, mask_inner_stride)) * UNIT
    statistics_ptr += 2 * row.to(tl.int64)
    largest, divisor = tl.load(statistics_ptr), tl.load(statistics_ptr + 1)
    gradients = ()
    terms = ()
    least = tl.full([TILE], 0xFFFFFFFF, tl.uint32)
    for step in tl.static_range(STEPS):
        element = step * TILE + tl.arange(0, TILE)
        inside = element < size * UNIT
        gradients = gradients + (tl.load(dy_ptr + offset + element, mask=inside, other=0.0),)
        term = exp(_masked(scores_ptr + offset, mask_ptr + of_mask, element, inside, scale, MASKED) - largest)
        least = tl.minimum(least, term.to(tl.uint32, bitcast=True) - 1)
        terms = terms + (term,)
    has_small = tl.min(least, axis=0) < _LEAST_TERM
    inverse = reciprocal(divisor, NORMAL=True)
    products = ()
    factors = ()
    for step in tl.static_range(STEPS):
        if has_small:
            y = divide_down_to_zero(terms[step], divisor, inverse)
        else:
            y = divide_by_reciprocal(terms[step], divisor, inverse)
        products = products + (_product(gradients[step].to(tl.float32), y),)
        factors = factors + (y,)
    total = _sum_of_tiles(products, STEPS, THREADS, VECTOR, IN_SEQUENCE)
    for step in tl.static_range(STEPS):
        element = step * TILE + tl.arange(0, TILE)
        dx = _to_scores(_gradient(products[step], factors[step], total), scale, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + offset + element, dx, mask=element < size * UNIT)


# Rows that a block reads several times


@triton.jit
def _single_elements(offset, HEAD: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr):
    """How many elements ATen's block takes before its vectors: eager's fp32 rows are dense and begin at `offset`."""
    if HEAD:
        before = _elements_before(offset, VECTOR)
        return tl.where(before > 0, THREADS - before, 0)
    else:
        return 0


@triton.jit(do_not_specialize=[*_SCALARS, "scale"])
def masked_softmax_forward_of_long_rows(
    scores_ptr,
    out_ptr,
    statistics_ptr,
    mask_ptr,
    rows: tl.int32,
    size: tl.int32,
    inner: tl.int32,
    middle: tl.int32,
    by_inner: tl.int64,
    by_middle: tl.int64,
    outer_stride: tl.int64,
    middle_stride: tl.int64,
    inner_stride: tl.int64,
    mask_outer_stride: tl.int64,
    mask_middle_stride: tl.int64,
    mask_inner_stride: tl.int64,
    scale: tl.float32,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    HEAD: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
    NARROW: tl.constexpr,
):
    """`masked_softmax_forward` of a row of any length, which a program reads three times.

    Args:
        HEAD: rows do not begin at multiples of 16 bytes in eager's tensor.
    """
    scale = _number_of(scale, scores_ptr.dtype.element_ty, NARROW)
    TILE: tl.constexpr = THREADS * VECTOR
    row = tl.program_id(0)
    length = size * UNIT
    lengths = (inner, middle, by_inner, by_middle)
    offset = _row_offset(row, lengths, (outer_stride, middle_stride, inner_stride)) * UNIT
    of_mask = _row_offset(row, lengths, (mask_outer_stride, mask_middle_stride, mask_inner_stride)) * UNIT
    scores_ptr += offset
    mask_ptr += of_mask
    in_tile = tl.arange(0, TILE)
    of_tile = tl.full([TILE], float("-inf"), tl.float32)
    for first in range(0, length, TILE):
        element = first + in_tile
        of_tile = maximum(of_tile, _masked(scores_ptr, mask_ptr, element, element < length, scale, MASKED))
    largest = tl.max(of_tile, axis=0)

    thread = tl.arange(0, THREADS)
    total = tl.zeros([THREADS], tl.float32)
    head = _single_elements(offset, HEAD, THREADS, VECTOR)
    if HEAD:
        of_head = thread - (THREADS - head)
        single_x = _masked(scores_ptr, mask_ptr, of_head, mask_if(of_head >= 0, head > 0), scale, MASKED)
        total = exp_add(total, single_x - largest)
    end = head + (length - head) // TILE * TILE
    for first in range(head, end, TILE):
        element = first + in_tile
        x = _masked(scores_ptr, mask_ptr, element, element < length, scale, MASKED)
        total = chain_of_vectors(total, x - largest, THREADS, EXP=True, VECTOR=VECTOR)
    for single in tl.static_range(VECTOR):
        at = end + single * THREADS + thread
        single_x = _masked(scores_ptr, mask_ptr, at, at < length, scale, MASKED)
        total = exp_add(total, single_x - largest)
    statistics = (largest, tl.max(sum_of_block(total, THREADS), axis=0))

    for first in range(0, length, TILE):
        element = first + in_tile
        x = _masked(scores_ptr, mask_ptr, element, element < length, scale, MASKED)
        y = _softmax(x, statistics).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offset + element, y, mask=element < length)
    tl.store(statistics_ptr + 2 * row.to(tl.int64), statistics[0])
    tl.store(statistics_ptr + 2 * row.to(tl.int64) + 1, statistics[1])


@triton.jit
def _product_and_softmax(pointers, element, inside, scale, statistics, MASKED: tl.constexpr):
    """dy * y and y of a row's elements; the product is 0 outside."""
    dy_ptr, scores_ptr, mask_ptr = pointers
    y = _softmax(_masked(scores_ptr, mask_ptr, element, inside, scale, MASKED), statistics)
    return _product(tl.load(dy_ptr + element, mask=inside, other=0.0).to(tl.float32), y), y


@triton.jit(do_not_specialize=[*_SCALARS, "scale"])
def masked_softmax_backward_of_long_rows(
    dy_ptr,
    scores_ptr,
    statistics_ptr,
    dx_ptr,
    mask_ptr,
    rows: tl.int32,
    size: tl.int32,
    inner: tl.int32,
    middle: tl.int32,
    by_inner: tl.int64,
    by_middle: tl.int64,
    outer_stride: tl.int64,
    middle_stride: tl.int64,
    inner_stride: tl.int64,
    mask_outer_stride: tl.int64,
    mask_middle_stride: tl.int64,
    mask_inner_stride: tl.int64,
    scale: tl.float32,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    HEAD: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
    NARROW: tl.constexpr,
):
    """`masked_softmax_backward` of a row of any length, which a program reads twice; ATen adds its threads in sequence."""
    scale = _number_of(scale, scores_ptr.dtype.element_ty, NARROW)
    TILE: tl.constexpr = THREADS * VECTOR
    row = tl.program_id(0)
    length = size * UNIT
    lengths = (inner, middle, by_inner, by_middle)
    offset = _row_offset(row, lengths, (outer_stride, middle_stride, inner_stride)) * UNIT
    of_mask = _row_offset(row, lengths, (mask_outer_stride, mask_middle_stride, mask_inner_stride)) * UNIT
    statistics_ptr += 2 * row.to(tl.int64)
    statistics = (tl.load(statistics_ptr), tl.load(statistics_ptr + 1))
    pointers = (dy_ptr + offset, scores_ptr + offset, mask_ptr + of_mask)
    in_tile = tl.arange(0, TILE)
    thread = tl.arange(0, THREADS)
    total = tl.zeros([THREADS], tl.float32)
    head = _single_elements(offset, HEAD, THREADS, VECTOR)
    if HEAD:
        of_head = thread - (THREADS - head)
        of_row = mask_if(of_head >= 0, head > 0)
        total += _product_and_softmax(pointers, of_head, of_row, scale, statistics, MASKED)[0]
    end = head + (length - head) // TILE * TILE
    for first in range(head, end, TILE):
        element = first + in_tile
        product, _ = _product_and_softmax(pointers, element, element < length, scale, statistics, MASKED)
        total = chain_of_vectors(total, product, THREADS, VECTOR=VECTOR)
    for single in tl.static_range(VECTOR):
        at = end + single * THREADS + thread
        total += _product_and_softmax(pointers, at, at < length, scale, statistics, MASKED)[0]
    total = tl.max(blocks_in_sequence(total, THREADS // 32), axis=0)

    for first in range(0, length, TILE):
        element = first + in_tile
        product, y = _product_and_softmax(pointers, element, element < length, scale, statistics, MASKED)
        dx = _to_scores(_gradient(product, y, total), scale, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + offset + element, dx, mask=element < length)
