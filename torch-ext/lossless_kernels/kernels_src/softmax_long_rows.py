"""Softmax of rows that a program reads several times, in the order of ATen's loop for one block (ATen/native/cuda/SoftMax.cu).

`jsd.py` reads its rows in the same way.
"""

import triton
import triton.language as tl

from .primitives import exp, exp_add, mask_if, maximum, reciprocal, rounded
from .softmax import _divided, _elements_before, _gradient, _product
from .summation import blocks_in_sequence, chain_of_vectors, sum_of_block

# An exponent whose term is more than 2**-100.
_LEAST_EXPONENT = tl.constexpr(-69.0)


@triton.jit
def _begin_of_vectors(
    row,
    length,
    row_stride,
    HEAD: tl.constexpr,
    DENSE: tl.constexpr,
    SHIFT: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """How many elements of a row ATen's block takes before its vectors, and the offset of the first vector.

    The address of the row decides: of eager's dense tensor, which begins SHIFT elements after a multiple of 16 bytes.
    """
    head = 0
    offset = row * row_stride
    if HEAD:
        before = _elements_before(SHIFT + row * length, VECTOR)
        head = tl.where(before > 0, THREADS - before, 0)
        if DENSE:
            # This form shows the compiler a multiple of VECTOR.
            offset = (SHIFT + row * length + head) // VECTOR * VECTOR - SHIFT
        else:
            offset += head
    return head, offset


@triton.jit
def _pieces_of_row(head, length, THREADS: tl.constexpr, VECTOR: tl.constexpr):
    """How a pass that may take elements in any order divides a row: vectors begin after `head % VECTOR` elements.

    Returns how many tiles the vectors fill, and how many vectors there are after them; and the single elements before and after
    the vectors, with their mask.
    """
    TILE: tl.constexpr = THREADS * VECTOR
    first = head % VECTOR
    steps = (length - first) // TILE
    rest = length - first - steps * TILE
    index = tl.arange(0, 2 * VECTOR)
    single = tl.where(index < VECTOR, index, length - rest % VECTOR + index - VECTOR)
    return steps, rest // VECTOR, single, single < tl.where(index < VECTOR, first, length)


@triton.jit
def _extremes_of_row(row_ptr, rest_ptr, head, length, THREADS: tl.constexpr, VECTOR: tl.constexpr, HEAD: tl.constexpr):
    """The largest and the smallest element of a row, in fp32. The arguments are those of `_sum_of_exponentials`.

    The last come first: the sum begins with those that are in the cache.
    """
    TILE: tl.constexpr = THREADS * VECTOR
    element = tl.arange(0, TILE)
    steps, more, single, is_single = _pieces_of_row(head, length, THREADS, VECTOR)
    in_last = element // VECTOR < more
    vectors_ptr = rest_ptr - head // VECTOR * VECTOR
    larger = tl.load(vectors_ptr + steps * TILE + element, mask=in_last, other=float("-inf")).to(tl.float32)
    smaller = tl.where(in_last, larger, float("inf"))
    for index in range(steps):
        x = tl.load(vectors_ptr + (steps - 1 - index) * TILE + element).to(tl.float32)
        larger = maximum(larger, x)
        smaller = tl.minimum(smaller, x)
    largest, smallest = tl.max(larger, axis=0), tl.min(smaller, axis=0)
    if HEAD:
        single_x = tl.load(row_ptr + single, mask=is_single, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, tl.max(single_x, axis=0))
        smallest = tl.minimum(smallest, tl.min(tl.where(is_single, single_x, float("inf")), axis=0))
    return largest, smallest


@triton.jit
def _scaled(x, factor, SCALED: tl.constexpr):
    """x in fp32; with SCALED times the factor, rounded to x's dtype."""
    return rounded(x.to(tl.float32) * factor, x.dtype) if SCALED else x.to(tl.float32)


@triton.jit
def _sum_of_exponentials(
    row_ptr,
    rest_ptr,
    head,
    length,
    largest,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    HEAD: tl.constexpr,
    factor=1.0,
    SCALED: tl.constexpr = False,
    BY_VECTORS: tl.constexpr = False,
):
    """A row's sum of exp(x - largest) in the order of ATen's block.

    Args:
        rest_ptr: the start of its vectors, `head` elements after row_ptr.
        factor: x is the element times the factor, if SCALED.
        BY_VECTORS: threads take the elements after the last whole step by vectors, too.
    """
    TILE: tl.constexpr = THREADS * VECTOR
    NOTHING: tl.constexpr = float("-inf")
    element = tl.arange(0, TILE)
    thread = tl.arange(0, THREADS)
    total = tl.zeros([THREADS], tl.float32)
    if HEAD:
        # Thread t takes element t - k if the row begins k elements after a multiple of 16 bytes.
        of_head = thread - (THREADS - head)
        single_x = tl.load(row_ptr + of_head, mask=mask_if(of_head >= 0, head > 0), other=NOTHING)
        total = exp_add(total, _scaled(single_x, factor, SCALED) - largest)
    steps = (length - head) // TILE
    for step in range(steps):
        x = _scaled(tl.load(rest_ptr + step * TILE + element), factor, SCALED)
        total = chain_of_vectors(total, x - largest, THREADS, EXP=True, VECTOR=VECTOR)
    if BY_VECTORS:
        x = tl.load(rest_ptr + steps * TILE + element, mask=element < length - head - steps * TILE, other=NOTHING)
        total = chain_of_vectors(total, _scaled(x, factor, SCALED) - largest, THREADS, EXP=True, VECTOR=VECTOR)
    else:
        # Read before any of them is needed.
        singles = ()
        for single in tl.static_range(VECTOR):
            at = steps * TILE + single * THREADS + thread
            singles = singles + (tl.load(rest_ptr + at, mask=at < length - head, other=NOTHING),)
        for single in tl.static_range(VECTOR):
            if steps * TILE + single * THREADS < length - head:
                total = exp_add(total, _scaled(singles[single], factor, SCALED) - largest)
    return tl.max(sum_of_block(total, THREADS), axis=0)


@triton.jit
def _quotient(x, largest, total, inverse, SMALL: tl.constexpr):
    """exp(x - largest) / total; the other arguments are those of `_divided`."""
    return _divided(exp(x.to(tl.float32) - largest), total, inverse, SMALL)


@triton.jit
def _store_quotients(
    row_ptr,
    rest_ptr,
    y_row_ptr,
    y_rest_ptr,
    head,
    length,
    largest,
    total,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    HEAD: tl.constexpr,
    SMALL: tl.constexpr,
):
    """Stores exp(x - largest) / total of a row. The other arguments are those of `_sum_of_exponentials` and `_quotient`."""
    TILE: tl.constexpr = THREADS * VECTOR
    dtype = y_row_ptr.dtype.element_ty
    element = tl.arange(0, TILE)
    # Vectors of 8 bytes, of bf16 with fp32 results, lose more in their loops than the last tile gains (H200).
    PARTS: tl.constexpr = 4 if row_ptr.dtype.element_ty.primitive_bitwidth * VECTOR == 128 else 1
    PART: tl.constexpr = TILE // PARTS
    steps, more, single, is_single = _pieces_of_row(head, length, THREADS, VECTOR)
    rest_ptr -= head // VECTOR * VECTOR
    y_rest_ptr -= head // VECTOR * VECTOR
    inverse = reciprocal(total, NORMAL=True)
    for step in range(steps):
        y = _quotient(tl.load(rest_ptr + step * TILE + element), largest, total, inverse, SMALL)
        tl.store(y_rest_ptr + step * TILE + element, y.to(dtype))
    # Read before any of them is needed.
    parts = ()
    for part in tl.static_range(PARTS):
        element = part * PART + tl.arange(0, PART)
        parts = parts + (tl.load(rest_ptr + steps * TILE + element, mask=element // VECTOR < more, other=0.0),)
    for part in tl.static_range(PARTS):
        if part * PART < more * VECTOR:
            element = part * PART + tl.arange(0, PART)
            last_y = _quotient(parts[part], largest, total, inverse, SMALL)
            tl.store(y_rest_ptr + steps * TILE + element, last_y.to(dtype), mask=element // VECTOR < more)
    if HEAD:
        single_x = tl.load(row_ptr + single, mask=is_single, other=0.0)
        tl.store(y_row_ptr + single, _quotient(single_x, largest, total, inverse, SMALL).to(dtype), mask=is_single)


@triton.jit(do_not_specialize=["size", "row_stride"])
def softmax_forward_of_long_rows(
    x_ptr,
    y_ptr,
    size: tl.int32,
    row_stride: tl.int64,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    HEAD: tl.constexpr,
    DENSE: tl.constexpr,
    SHIFT: tl.constexpr,
    UNIT: tl.constexpr,
):
    """`softmax_forward_of_block` of a row of any length, which a program reads three times.

    Args:
        HEAD: rows do not begin at multiples of 16 bytes in eager's tensor; DENSE: nor in x, which has no gaps.
        SHIFT: elements between the last multiple of 16 bytes and eager's first row.
    """
    row = tl.program_id(0).to(tl.int64)
    length = size * UNIT
    head, offset = _begin_of_vectors(row, length, row_stride * UNIT, HEAD, DENSE, SHIFT, THREADS, VECTOR)
    _, y_offset = _begin_of_vectors(row, length, length, HEAD, HEAD, SHIFT, THREADS, VECTOR)
    row_ptr, rest_ptr = x_ptr + row * (row_stride * UNIT), x_ptr + offset
    y_row_ptr, y_rest_ptr = y_ptr + row * length, y_ptr + y_offset
    largest, smallest = _extremes_of_row(row_ptr, rest_ptr, head, length, THREADS, VECTOR, HEAD)
    total = _sum_of_exponentials(row_ptr, rest_ptr, head, length, largest, THREADS, VECTOR, HEAD)
    # `divide_by_reciprocal` takes sums of up to 2**20.
    if (smallest - largest > _LEAST_EXPONENT) & (total <= 1048576.0):
        _store_quotients(
            row_ptr,
            rest_ptr,
            y_row_ptr,
            y_rest_ptr,
            head,
            length,
            largest,
            total,
            THREADS,
            VECTOR,
            HEAD,
            SMALL=False,
        )
    else:
        _store_quotients(
            row_ptr, rest_ptr, y_row_ptr, y_rest_ptr, head, length, largest, total, THREADS, VECTOR, HEAD, SMALL=True
        )


@triton.jit(do_not_specialize=["size", "dy_row_stride"])
def softmax_backward_of_long_rows(
    dy_ptr,
    y_ptr,
    dx_ptr,
    size: tl.int32,
    dy_row_stride: tl.int64,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    HEAD: tl.constexpr,
    DENSE: tl.constexpr,
    SHIFT: tl.constexpr,
    UNIT: tl.constexpr,
):
    """`softmax_backward_of_block` of a row of any length, which a program reads twice.

    ATen's block adds its threads in sequence. The arguments are those of `softmax_forward_of_long_rows`; the tensor
    whose addresses decide is eager's product, and SHIFT is 0.
    """
    TILE: tl.constexpr = THREADS * VECTOR
    row = tl.program_id(0).to(tl.int64)
    length = size * UNIT
    dy_row_ptr = dy_ptr + row * (dy_row_stride * UNIT)
    y_row_ptr = y_ptr + row * length
    head, offset = _begin_of_vectors(row, length, dy_row_stride * UNIT, HEAD, DENSE, SHIFT, THREADS, VECTOR)
    _, y_offset = _begin_of_vectors(row, length, length, HEAD, HEAD, SHIFT, THREADS, VECTOR)
    thread = tl.arange(0, THREADS)
    total = tl.zeros([THREADS], tl.float32)
    if HEAD:
        of_head = thread - (THREADS - head)
        of_row = mask_if(of_head >= 0, head > 0)
        single_dy = tl.load(dy_row_ptr + of_head, mask=of_row, other=0.0)
        total += _product(single_dy, tl.load(y_row_ptr + of_head, mask=of_row, other=0.0))
    element = tl.arange(0, TILE)
    steps = (length - head) // TILE
    for step in range(steps):
        dy = tl.load(dy_ptr + offset + step * TILE + element)
        y = tl.load(y_ptr + y_offset + step * TILE + element)
        total = chain_of_vectors(total, _product(dy, y), THREADS, VECTOR=VECTOR)
    for single in tl.static_range(VECTOR):
        at = steps * TILE + single * THREADS + thread
        of_row = at < length - head
        single_dy = tl.load(dy_ptr + offset + at, mask=of_row, other=0.0)
        total += _product(single_dy, tl.load(y_ptr + y_offset + at, mask=of_row, other=0.0))
    total = tl.max(blocks_in_sequence(total, THREADS // 32), axis=0)

    dtype = dx_ptr.dtype.element_ty
    steps, more, single, is_single = _pieces_of_row(head, length, THREADS, VECTOR)
    in_last = element // VECTOR < more
    offset -= head // VECTOR * VECTOR
    y_offset -= head // VECTOR * VECTOR
    for step in range(steps):
        y = tl.load(y_ptr + y_offset + step * TILE + element)
        dx = _gradient(_product(tl.load(dy_ptr + offset + step * TILE + element), y), y, total)
        tl.store(dx_ptr + y_offset + step * TILE + element, dx.to(dtype))
    last_y = tl.load(y_ptr + y_offset + steps * TILE + element, mask=in_last, other=0.0)
    last_dy = tl.load(dy_ptr + offset + steps * TILE + element, mask=in_last, other=0.0)
    last_dx = _gradient(_product(last_dy, last_y), last_y, total)
    tl.store(dx_ptr + y_offset + steps * TILE + element, last_dx.to(dtype), mask=in_last)
    if HEAD:
        single_y = tl.load(y_row_ptr + single, mask=is_single, other=0.0)
        product = _product(tl.load(dy_row_ptr + single, mask=is_single, other=0.0), single_y)
        tl.store(dx_ptr + row * length + single, _gradient(product, single_y, total).to(dtype), mask=is_single)
