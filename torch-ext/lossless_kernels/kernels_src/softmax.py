"""Softmax, forward and backward, in the orders of ATen's kernels for rows of one warp (PersistentSoftmax.cuh) and of one
block (SoftMax.cu, both in ATen/native/cuda)."""

import triton
import triton.language as tl

from .primitives import (
    divide_by_reciprocal,
    divide_down_to_zero,
    exp,
    maximum,
    reciprocal,
    rounded_sum,
    widened,
)
from .summation import _sum_in_sequence, _sum_of_lanes, blocks_in_sequence, chain_of_vectors, sum_of_block

# The bits of 2**-100, less one: of zero they are the largest number.
_LEAST_TERM = tl.constexpr(((127 - 100) << 23) - 1)


@triton.jit
def _warp_sum(tiles, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr):
    """TILES tiles [ROWS, TILE] fp32 -> [ROWS]: lane t adds t, t + WIDTH, ... in sequence from +0; a tree sums the lanes."""
    STEPS: tl.constexpr = TILE // WIDTH
    lanes = tl.zeros([ROWS, WIDTH], tl.float32)
    for tile in tl.static_range(TILES):
        steps = tl.reshape(tiles[tile], [ROWS, STEPS, WIDTH])
        lanes = _sum_in_sequence(lanes, steps, ROWS, STEPS.bit_length() - 1, WIDTH)
    return _sum_of_lanes(lanes, ROWS, WIDTH, 1, EXCHANGE_ONCE=False)


@triton.jit
def _largest(tiles, TILES: tl.constexpr):
    """TILES tiles [ROWS, TILE] -> [ROWS, 1]: the largest number of each row."""
    largest = tiles[0]
    for tile in tl.static_range(1, TILES):
        largest = tl.maximum(largest, tiles[tile])
    return tl.max(largest, axis=1)[:, None]


@triton.jit
def _has_small(tiles, TILES: tl.constexpr):
    """Whether one of the program's terms is between 0 and 2**-100."""
    least = tiles[0].to(tl.uint32, bitcast=True) - 1
    for tile in tl.static_range(1, TILES):
        least = tl.minimum(least, tiles[tile].to(tl.uint32, bitcast=True) - 1)
    return tl.min(least) < _LEAST_TERM


@triton.jit
def _divided(terms, total, inverse, SMALL: tl.constexpr):
    """terms / total, correctly rounded; SMALL: terms may be less than 2**-100. Without, a quotient takes three instructions."""
    return divide_down_to_zero(terms, total, inverse) if SMALL else divide_by_reciprocal(terms, total, inverse)


@triton.jit
def _divided_tiles(tiles, total, inverse, TILES: tl.constexpr, SMALL: tl.constexpr):
    """`_divided` of each tile."""
    found = ()
    for tile in tl.static_range(TILES):
        found = found + (_divided(tiles[tile], total, inverse, SMALL),)
    return found


@triton.jit
def _quotients(tiles, total, TILES: tl.constexpr):
    """terms / total of TILES tiles [ROWS, TILE], correctly rounded; total [ROWS, 1] is NaN or from 1 to SIZE."""
    inverse = reciprocal(total, NORMAL=True)
    if _has_small(tiles, TILES):
        y = _divided_tiles(tiles, total, inverse, TILES, SMALL=True)
    else:
        y = _divided_tiles(tiles, total, inverse, TILES, SMALL=False)
    return y


@triton.jit
def _in_tile(row, rows, length, tile: tl.constexpr, TILE: tl.constexpr):
    """The elements of a tile, [1, TILE], and their mask: whether a row has them, [ROWS, TILE]."""
    element = tile * TILE + tl.arange(0, TILE)[None, :]
    return element, (row < rows) & (element < length)


@triton.jit
def _store_divided(
    tiles,
    total,
    inverse,
    y_ptr,
    row,
    rows,
    length,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    SMALL: tl.constexpr,
):
    """Stores `_divided` of each tile."""
    for tile in tl.static_range(TILES):
        element, inside = _in_tile(row, rows, length, tile, TILE)
        y = _divided(tiles[tile], total, inverse, SMALL)
        tl.store(y_ptr + element, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store_softmax(tiles, total, y_ptr, row, rows, length, TILES: tl.constexpr, TILE: tl.constexpr):
    """Stores terms / total. Both branches store: tiles that leave a branch take more registers (H200)."""
    inverse = reciprocal(total, NORMAL=True)
    if _has_small(tiles, TILES):
        _store_divided(tiles, total, inverse, y_ptr, row, rows, length, TILES, TILE, SMALL=True)
    else:
        _store_divided(tiles, total, inverse, y_ptr, row, rows, length, TILES, TILE, SMALL=False)


@triton.jit
def _product(dy, y):
    """dy * y, which eager computes in a separate kernel: rounded to the dtype, in fp32."""
    return (dy.to(tl.float32) * y.to(tl.float32)).to(dy.dtype).to(tl.float32)


@triton.jit
def _gradient(product, y, total):
    """product - total * y by an FMA, which is nvcc's. Triton's `-x` is 0 - x, which returns +0 for +0."""
    return tl.fma(tl.broadcast_to(total * -1.0, y.shape), y.to(tl.float32), product)


@triton.jit(do_not_specialize=["rows", "size", "row_stride"])
def softmax_forward(
    x_ptr,
    y_ptr,
    rows: tl.int64,
    size: tl.int32,
    row_stride: tl.int64,
    LOG2_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """y = exp(x - max) / sum, dense.

    Args:
        size: elements of a row, in UNITs; more than half of 2**LOG2_SIZE.
        row_stride: x's, in UNITs of elements.
        WIDTH: lanes of ATen's warp that share a row.
        TILE: elements of a row that are loaded at a time: WIDTH, so that a thread has all elements of its lanes, or the row.
    """
    TILES: tl.constexpr = (1 << LOG2_SIZE) // TILE
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    x_ptr += row * (row_stride * UNIT)
    y_ptr += row * (size * UNIT)
    xs = ()
    for tile in tl.static_range(TILES):
        element, inside = _in_tile(row, rows, size * UNIT, tile, TILE)
        xs = xs + (widened(tl.load(x_ptr + element, mask=inside, other=float("-inf"))),)
    largest = _largest(xs, TILES)
    terms = ()
    for tile in tl.static_range(TILES):
        terms = terms + (exp(xs[tile] - largest),)
    total = _warp_sum(terms, ROWS, WIDTH, TILES, TILE)[:, None]
    _store_softmax(terms, total, y_ptr, row, rows, size * UNIT, TILES, TILE)


@triton.jit(do_not_specialize=["rows", "size", "dy_row_stride"])
def softmax_backward(
    dy_ptr,
    y_ptr,
    dx_ptr,
    rows: tl.int64,
    size: tl.int32,
    dy_row_stride: tl.int64,
    LOG2_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dx = dy * y - sum(dy * y) * y; y and dx are dense. The arguments are those of `softmax_forward`."""
    TILES: tl.constexpr = (1 << LOG2_SIZE) // TILE
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    dy_ptr += row * (dy_row_stride * UNIT)
    y_ptr += row * (size * UNIT)
    dx_ptr += row * (size * UNIT)
    products = ()
    ys = ()
    for tile in tl.static_range(TILES):
        element, inside = _in_tile(row, rows, size * UNIT, tile, TILE)
        dy = tl.load(dy_ptr + element, mask=inside, other=0.0)
        y = tl.load(y_ptr + element, mask=inside, other=0.0)
        products = products + (_product(dy, y),)
        ys = ys + (y,)
    total = _warp_sum(products, ROWS, WIDTH, TILES, TILE)[:, None]
    for tile in tl.static_range(TILES):
        element, inside = _in_tile(row, rows, size * UNIT, tile, TILE)
        dx = _gradient(products[tile], ys[tile], total)
        tl.store(dx_ptr + element, dx.to(dx_ptr.dtype.element_ty), mask=inside)


# Rows of one block


@triton.jit
def _masked(scores_ptr, mask_ptr, element, inside, scale, MASKED: tl.constexpr, KEPT: tl.constexpr = False):
    """scores * scale + mask of a row's elements, each operation rounded to the scores' dtype, in fp32; -inf outside.

    Args:
        KEPT: the caches evict scores last.
    """
    POLICY: tl.constexpr = "evict_last" if KEPT else ""
    scores = tl.load(scores_ptr + element, mask=inside, other=0.0, eviction_policy=POLICY)
    scaled = (scores.to(tl.float32) * scale).to(scores.dtype)
    if MASKED:
        return widened(rounded_sum(scaled, tl.load(mask_ptr + element, mask=inside, other=float("-inf"))))
    else:
        return tl.where(inside, scaled.to(tl.float32), float("-inf"))


@triton.jit
def _terms_of_block(tiles, STEPS: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr):
    """A row's maximum, the tiles of its exp(x - max), and their sum; NaN in its place if a term is between 0 and 2**-100.

    Eager's FMA adds the product of a power of two and an fp32 number before it is rounded to a term. The product is exact
    unless it is subnormal. If no term is between 0 and 2**-100, such a product is at most 2**-150, and neither 0 nor a sum
    of 2**-100 or more changes by it: sums of the terms are those of the FMAs.
    """
    of_tile = tiles[0]
    for step in tl.static_range(1, STEPS):
        of_tile = maximum(of_tile, tiles[step])
    largest = tl.max(of_tile, axis=0)
    total = tl.zeros([THREADS], tl.float32)
    least = tl.full([THREADS * VECTOR], 0xFFFFFFFF, tl.uint32)
    terms = ()
    for step in tl.static_range(STEPS):
        term = exp(tiles[step] - largest)
        total = chain_of_vectors(total, term, THREADS, VECTOR=VECTOR)
        least = tl.minimum(least, term.to(tl.uint32, bitcast=True) - 1)
        terms = terms + (term,)
    if VECTOR > 1:
        least = tl.min(tl.reshape(least, [THREADS, VECTOR]), axis=1)
    # The lanes' sum tells all threads.
    total = tl.where(least < _LEAST_TERM, float("nan"), total)
    return largest, terms, tl.max(sum_of_block(total, THREADS), axis=0)


@triton.jit
def _elements_before(offset, VECTOR: tl.constexpr):
    """The elements between the last multiple of VECTOR and a row that has this offset in eager's tensor."""
    return (offset % VECTOR).to(tl.int32)


@triton.jit
def _inside(element, first, end, HEAD: tl.constexpr):
    """Which elements are a row's, from `first` on and before `end`; `first` is 0 without HEAD."""
    return (element >= first) & (element < end) if HEAD else element < end


@triton.jit
def _softmax_of_block(
    tiles,
    scores_ptr,
    mask_ptr,
    out_ptr,
    first,
    length,
    scale,
    STEPS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    HEAD: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stores exp(x - max) / sum of a row's tiles; returns the maximum and the sum.

    Terms that `_terms_of_block` does not add, or NaN, are computed again, in loops, with eager's instructions.

    Args:
        first: how many elements of the first tile come before the row. The pointers point to the row.
    """
    TILE: tl.constexpr = THREADS * VECTOR
    # Of a tile of 16 bits and its fp32 results a thread would have too many registers.
    WIDER: tl.constexpr = out_ptr.dtype.element_ty.primitive_bitwidth > scores_ptr.dtype.element_ty.primitive_bitwidth
    PART: tl.constexpr = THREADS if WIDER else TILE
    in_tile = tl.arange(0, TILE)
    end = first + length
    scores_ptr -= first
    mask_ptr -= first
    out_ptr -= first
    largest, terms, total = _terms_of_block(tiles, STEPS, THREADS, VECTOR)
    if total == total:
        inverse = reciprocal(total, NORMAL=True)
        for tile in tl.static_range(STEPS):
            y = divide_by_reciprocal(terms[tile], total, inverse)
            inside = _inside(in_tile, first - tile * TILE, end - tile * TILE, HEAD and tile == 0)
            tl.store(out_ptr + tile * TILE + in_tile, y.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        lanes = tl.zeros([THREADS], tl.float32)
        for step in range(STEPS):
            element = step * TILE + in_tile
            x = _masked(scores_ptr, mask_ptr, element, _inside(element, first, end, HEAD), scale, MASKED)
            lanes = chain_of_vectors(lanes, x - largest, THREADS, EXP=True, VECTOR=VECTOR)
        total = tl.max(sum_of_block(lanes, THREADS), axis=0)
        inverse = reciprocal(total, NORMAL=True)
        for part in range(STEPS * TILE // PART):
            element = part * PART + tl.arange(0, PART)
            inside = _inside(element, first, end, HEAD)
            x = _masked(scores_ptr, mask_ptr, element, inside, scale, MASKED)
            y = divide_down_to_zero(exp(x - largest), total, inverse)
            tl.store(out_ptr + element, y.to(out_ptr.dtype.element_ty), mask=inside)
    return largest, total


@triton.jit
def _sum_of_tiles(tiles, STEPS: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr, IN_SEQUENCE: tl.constexpr):
    """The sum of a row, whose threads are added by trees or in sequence."""
    total = tl.zeros([THREADS], tl.float32)
    for step in tl.static_range(STEPS):
        total = chain_of_vectors(total, tiles[step], THREADS, VECTOR=VECTOR)
    if IN_SEQUENCE:
        total = blocks_in_sequence(total, THREADS // 32)
    else:
        total = sum_of_block(total, THREADS)
    return tl.max(total, axis=0)


@triton.jit(do_not_specialize=["size", "row_stride"])
def softmax_forward_of_block(
    x_ptr,
    y_ptr,
    size: tl.int32,
    row_stride: tl.int64,
    STEPS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    UNIT: tl.constexpr,
    HEAD: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """y = exp(x - max) / sum, dense, of a row that a program reads once.

    Args:
        size: elements of a row, in UNITs; at most STEPS * THREADS * VECTOR, less HEAD - 1 if there is a HEAD.
        row_stride: x's, in UNITs of elements.
        THREADS: threads of ATen's block. Thread t takes the vectors t, t + THREADS, ... of VECTOR elements.
        HEAD: 0, or the elements of ATen's vectors if the row is too short for them. Thread 0 then begins at the last multiple
            of HEAD elements before the row.
        SHIFT: elements between the last multiple of 16 bytes and eager's first row.
    """
    TILE: tl.constexpr = THREADS * VECTOR
    row = tl.program_id(0).to(tl.int64)
    length = size * UNIT
    before = _elements_before(SHIFT + row * length, HEAD) if HEAD else 0
    tiles = ()
    for step in tl.static_range(STEPS):
        element = step * TILE + tl.arange(0, TILE)
        inside = _inside(element, before, before + length, HEAD and step == 0)
        x = tl.load(x_ptr + row * (row_stride * UNIT) - before + element, mask=inside, other=float("-inf"))
        tiles = tiles + (widened(x),)
    x_ptr += row * (row_stride * UNIT)
    y_ptr += row * length
    _softmax_of_block(tiles, x_ptr, x_ptr, y_ptr, before, length, 1.0, STEPS, THREADS, VECTOR, HEAD, MASKED=False)


@triton.jit(do_not_specialize=["size", "dy_row_stride"])
def softmax_backward_of_block(
    dy_ptr,
    y_ptr,
    dx_ptr,
    size: tl.int32,
    dy_row_stride: tl.int64,
    STEPS: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr,
    UNIT: tl.constexpr,
    IN_SEQUENCE: tl.constexpr,
):
    """`softmax_backward` of a row that a program reads once. The other arguments are those of `softmax_forward_of_block`.

    Args:
        IN_SEQUENCE: ATen's block adds its threads in sequence, and not by trees.
    """
    TILE: tl.constexpr = THREADS * VECTOR
    row = tl.program_id(0).to(tl.int64)
    products = ()
    factors = ()
    for step in tl.static_range(STEPS):
        element = step * TILE + tl.arange(0, TILE)
        mask = element < size * UNIT
        dy = tl.load(dy_ptr + row * (dy_row_stride * UNIT) + element, mask=mask, other=0.0)
        y = tl.load(y_ptr + row * (size * UNIT) + element, mask=mask, other=0.0)
        products = products + (_product(dy, y),)
        factors = factors + (y,)
    total = _sum_of_tiles(products, STEPS, THREADS, VECTOR, IN_SEQUENCE)
    for step in tl.static_range(STEPS):
        element = step * TILE + tl.arange(0, TILE)
        dx = _gradient(products[step], factors[step], total)
        tl.store(dx_ptr + row * (size * UNIT) + element, dx.to(dx_ptr.dtype.element_ty), mask=element < size * UNIT)
