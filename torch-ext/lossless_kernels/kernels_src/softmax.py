"""Softmax, forward and backward, of rows that ATen gives one warp each (ATen/native/cuda/PersistentSoftmax.cuh)."""

import triton
import triton.language as tl

from .primitives import divide, exp
from .summation import _sum_in_sequence, _sum_of_lanes


@triton.jit
def _warp_sum(terms, ROWS: tl.constexpr, LOG2_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, 2**LOG2_SIZE] fp32 -> [ROWS]: lane t adds t, t + WIDTH, ... in sequence from +0; a tree sums the lanes."""
    LOG2_STEPS: tl.constexpr = LOG2_SIZE - (WIDTH.bit_length() - 1)
    steps = tl.reshape(terms, [ROWS, 1 << LOG2_STEPS, WIDTH])
    lanes = _sum_in_sequence(tl.zeros([ROWS, WIDTH], tl.float32), steps, ROWS, LOG2_STEPS, WIDTH)
    return _sum_of_lanes(lanes, ROWS, WIDTH, 1, EXCHANGE_ONCE=False)


@triton.jit
def _tile(rows, size, ROWS: tl.constexpr, LOG2_SIZE: tl.constexpr):
    """This program's rows [ROWS, 1], the elements [1, 2**LOG2_SIZE], and their mask."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    element = tl.arange(0, 1 << LOG2_SIZE)[None, :]
    return row, element, (row < rows) & (element < size)


@triton.jit(do_not_specialize=["rows", "size", "row_stride"])
def softmax_forward(
    x_ptr,
    y_ptr,
    rows: tl.int64,
    size: tl.int32,
    row_stride: tl.int64,
    LOG2_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """y = exp(x - max) / sum, dense.

    Args:
        size: elements of a row, in UNITs; more than half of 2**LOG2_SIZE.
        row_stride: x's, in UNITs of elements.
        WIDTH: lanes of ATen's warp that share a row.
    """
    row, element, mask = _tile(rows, size * UNIT, ROWS, LOG2_SIZE)
    x = tl.load(x_ptr + row * (row_stride * UNIT) + element, mask=mask, other=float("-inf")).to(tl.float32)
    terms = exp(x - tl.max(x, axis=1)[:, None])
    y = divide(terms, _warp_sum(terms, ROWS, LOG2_SIZE, WIDTH)[:, None])
    tl.store(y_ptr + row * (size * UNIT) + element, y.to(y_ptr.dtype.element_ty), mask=mask)


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
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dx = dy * y - sum(dy * y) * y; y and dx are dense. The arguments are those of `softmax_forward`."""
    row, element, mask = _tile(rows, size * UNIT, ROWS, LOG2_SIZE)
    dy = tl.load(dy_ptr + row * (dy_row_stride * UNIT) + element, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * (size * UNIT) + element, mask=mask, other=0.0).to(tl.float32)
    # Eager multiplies in a separate kernel, which rounds to the dtype.
    product = (dy * y).to(dy_ptr.dtype.element_ty).to(tl.float32)
    total = _warp_sum(product, ROWS, LOG2_SIZE, WIDTH)
    # Triton's `-x` is 0 - x, which returns +0 for +0. The FMA is nvcc's.
    dx = tl.fma(tl.broadcast_to(total[:, None] * -1.0, y.shape), y, product)
    tl.store(dx_ptr + row * (size * UNIT) + element, dx.to(dx_ptr.dtype.element_ty), mask=mask)
