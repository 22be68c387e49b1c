"""Activation functions as ATen's CUDA kernels compute them, one rounding for each operation that eager launches.

An ATen kernel computes in fp32 and rounds once; nvcc contracted its products and sums to FMAs, which are explicit here.
If eager uses several operations, each rounds to the activations' dtype.
"""

import triton
import triton.language as tl

from .primitives import (
    INTERPRETED,
    PTX,
    approximate_exp2,
    approximate_reciprocal,
    divide,
    erf,
    exp,
    reciprocal,
    rounded,
    tanh,
)

# fp32(sqrt(1 / 2)), fp32(sqrt(2 / pi)) and fp32(1 / sqrt(2 * pi)).
_SQRT_1_2 = tl.constexpr(0.70710677)
_SQRT_2_PI = tl.constexpr(0.7978846)
_DENSITY_AT_0 = tl.constexpr(0.3989423)
_CUBIC = tl.constexpr(0.044715)
_THREE_CUBIC = tl.constexpr(0.13414499)


# -log2(e) minus one unit in the last place; bf16 SiLU has eager's bits from 5 units less to 2 units more (H200).
_MINUS_LOG2_E = tl.constexpr(-1.4426949)


@triton.jit
def _silu(x, DTYPE: tl.constexpr):
    """x / (1 + exp(-x)). In 16 bits an approximate quotient rounds to the same bits for all 65,536 x.

    The correctly rounded division branches for every element: 0.1214 ms instead of 0.1125 at 8192x14336 (bf16, H200).
    """
    if INTERPRETED or not PTX or DTYPE == tl.float32:
        return divide(x, 1.0 + exp(-x))
    elif DTYPE == tl.bfloat16:
        # Scaling by 1/4 avoids a subnormal reciprocal, which would be flushed to zero.
        quarter = tl.fma(approximate_exp2(x * _MINUS_LOG2_E), 0.25, 0.25)
        return (x * 0.25) * approximate_reciprocal(quarter)
    else:
        # Some quotients are too close to the middle between two fp16 numbers and need a Newton step. If the remainder
        # is 0, or NaN from an infinity, the quotient is exact, including the sign of a zero.
        divisor = 1.0 + exp(-x)
        factor = approximate_reciprocal(divisor)
        quotient = x * factor
        remainder = tl.fma(-divisor, quotient, x)
        return tl.where(tl.abs(remainder) > 0.0, tl.fma(remainder, factor, quotient), quotient)


@triton.jit
def _sigmoid(x, DTYPE: tl.constexpr):
    """1 / (1 + exp(-x)), correctly rounded; for x of 16 bits in the steps of CUDA's reciprocal, without its branch.

    Scaling by 1/4 avoids a subnormal reciprocal in between, which would be flushed to zero.
    """
    if INTERPRETED or not PTX or DTYPE == tl.float32:
        return reciprocal(1.0 + exp(-x))
    else:
        quarter = tl.fma(exp(-x), 0.25, 0.25)
        factor = approximate_reciprocal(quarter)
        rounded = tl.fma(factor, tl.fma(-quarter, factor, 1.0), factor)
        # 0, of an infinity, stays 0.
        return tl.where(factor > 0.0, rounded, factor) * 0.25


@triton.jit
def _gelu_tanh(x):
    """The tanh in ATen's approximation of GELU."""
    return tanh(tl.fma(x * (x * x), _CUBIC, x) * _SQRT_2_PI)


@triton.jit
def _new_gelu_tanh(x, DTYPE: tl.constexpr):
    """tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)), each operation rounded; the cube is two operations."""
    cube = rounded(rounded(x * x, DTYPE) * x, DTYPE)
    inner = rounded(x + rounded(cube * _CUBIC, DTYPE), DTYPE)
    return rounded(tanh(rounded(inner * _SQRT_2_PI, DTYPE)), DTYPE)


@triton.jit
def _fast_gelu_terms(x, DTYPE: tl.constexpr):
    """scaled, linear, slope and tanh(scaled * slope) with scaled = x * sqrt(2 / pi) and slope = 1 + linear * x."""
    scaled = rounded(x * _SQRT_2_PI, DTYPE)
    linear = rounded(x * _CUBIC, DTYPE)
    slope = rounded(rounded(linear * x, DTYPE) + 1.0, DTYPE)
    return scaled, linear, slope, rounded(tanh(rounded(scaled * slope, DTYPE)), DTYPE)


@triton.jit
def _quick_gelu_sigmoid(x, DTYPE: tl.constexpr):
    return rounded(reciprocal(1.0 + exp(-rounded(x * 1.702, DTYPE))), DTYPE)


@triton.jit
def _times_half_x(one_plus, x, DTYPE: tl.constexpr):
    return rounded(x * 0.5, DTYPE) * rounded(one_plus + 1.0, DTYPE)


@triton.jit
def _activation(x, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    if ACTIVATION == "silu":
        return _silu(x, DTYPE)
    elif ACTIVATION == "gelu" or ACTIVATION == "gelu_of_cuda_13_2":
        return (x * 0.5) * (erf(x * _SQRT_1_2, ACTIVATION == "gelu_of_cuda_13_2") + 1.0)
    elif ACTIVATION == "gelu_tanh":
        return (x * 0.5) * (_gelu_tanh(x) + 1.0)
    elif ACTIVATION == "new_gelu":
        return _times_half_x(_new_gelu_tanh(x, DTYPE), x, DTYPE)
    elif ACTIVATION == "fast_gelu":
        _, _, _, tanh_ = _fast_gelu_terms(x, DTYPE)
        return _times_half_x(tanh_, x, DTYPE)
    else:
        tl.static_assert(ACTIVATION == "quick_gelu")
        return x * _quick_gelu_sigmoid(x, DTYPE)


@triton.jit
def _tanh_gradient(dy, y, DTYPE: tl.constexpr):
    """ATen's tanh_backward, which computes in the activations' dtype; in fp32 with an FMA."""
    if DTYPE == tl.float32:
        return dy * tl.fma(-y, y, 1.0)
    else:
        return rounded(dy * rounded(1.0 - rounded(y * y, DTYPE), DTYPE), DTYPE)


@triton.jit
def _sigmoid_gradient(dy, y, DTYPE: tl.constexpr):
    """ATen's sigmoid_backward, which computes in the activations' dtype."""
    return rounded(rounded(dy * rounded(1.0 - y, DTYPE), DTYPE) * y, DTYPE)


@triton.jit
def _gradients(dy, x, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Eager's gradients of x, one for each path from x to the output, in their order of arrival."""
    if ACTIVATION == "silu":
        sigmoid = _sigmoid(x, DTYPE)
        return ((dy * sigmoid) * tl.fma(x, 1.0 - sigmoid, 1.0),)
    elif ACTIVATION == "gelu" or ACTIVATION == "gelu_of_cuda_13_2":
        density = exp((x * -0.5) * x) * _DENSITY_AT_0
        cumulative = erf(x * _SQRT_1_2, ACTIVATION == "gelu_of_cuda_13_2") + 1.0
        return (dy * tl.fma(cumulative, 0.5, x * density),)
    elif ACTIVATION == "gelu_tanh":
        tanh_ = _gelu_tanh(x)
        d_inner = tl.fma(x * x, _THREE_CUBIC, 1.0) * _SQRT_2_PI
        return (dy * tl.fma(tanh_ + 1.0, 0.5, ((x * 0.5) * tl.fma(-tanh_, tanh_, 1.0)) * d_inner),)
    elif ACTIVATION == "new_gelu":
        tanh_ = _new_gelu_tanh(x, DTYPE)
        d_half = rounded(dy * rounded(tanh_ + 1.0, DTYPE), DTYPE)
        d_tanh = rounded(dy * rounded(x * 0.5, DTYPE), DTYPE)
        d_inner = rounded(_tanh_gradient(d_tanh, tanh_, DTYPE) * _SQRT_2_PI, DTYPE)
        d_cube = rounded(d_inner * _CUBIC, DTYPE)
        return d_inner, d_cube * rounded(rounded(x * x, DTYPE) * 3.0, DTYPE), d_half * 0.5
    elif ACTIVATION == "fast_gelu":
        scaled, linear, slope, tanh_ = _fast_gelu_terms(x, DTYPE)
        d_half = rounded(dy * rounded(tanh_ + 1.0, DTYPE), DTYPE)
        d_tanh = rounded(dy * rounded(x * 0.5, DTYPE), DTYPE)
        d_inner = _tanh_gradient(d_tanh, tanh_, DTYPE)
        d_slope = rounded(d_inner * scaled, DTYPE)
        d_linear = rounded(d_slope * x, DTYPE)
        d_scaled = rounded(d_inner * slope, DTYPE)
        return d_slope * linear, d_linear * _CUBIC, d_scaled * _SQRT_2_PI, d_half * 0.5
    else:
        tl.static_assert(ACTIVATION == "quick_gelu")
        sigmoid = _quick_gelu_sigmoid(x, DTYPE)
        return dy * sigmoid, _sigmoid_gradient(rounded(dy * x, DTYPE), sigmoid, DTYPE) * 1.702


@triton.jit
def _block_of_row(
    column_units,
    x_row_stride,
    out_row_stride,
    blocks_per_row,
    ONE_ROW: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Offsets into x, with row stride `x_row_stride * UNIT`, into a dense tensor and into out; and their mask."""
    program = tl.program_id(0)
    if ONE_ROW:
        offset = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        return offset, offset, offset, offset // UNIT < column_units
    else:
        row = program // blocks_per_row
        column = (program - row * blocks_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        row = row.to(tl.int64) * UNIT
        mask = column // UNIT < column_units
        return row * x_row_stride + column, row * column_units + column, row * out_row_stride + column, mask


@triton.jit
def _load(ptr, mask, units, DENSE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Loads as fp32. A mask would load an odd number of 16-bit elements one by one: a full block of DENSE rows has none.

    SiLU of 4095x11007 in bf16 takes 0.044 ms instead of 0.176 (H200).
    """
    if DENSE and UNIT * ptr.dtype.element_ty.primitive_bitwidth < 32:
        if (tl.program_id(0).to(tl.int64) + 1) * BLOCK <= units * UNIT:
            x = tl.load(ptr)
        else:
            x = tl.load(ptr, mask=mask, other=0.0)
    else:
        x = tl.load(ptr, mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _store(ptr, x, mask, units, DENSE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Like `_load`."""
    x = x.to(ptr.dtype.element_ty)
    if DENSE and UNIT * ptr.dtype.element_ty.primitive_bitwidth < 32:
        if (tl.program_id(0).to(tl.int64) + 1) * BLOCK <= units * UNIT:
            tl.store(ptr, x)
        else:
            tl.store(ptr, x, mask=mask)
    else:
        tl.store(ptr, x, mask=mask)


@triton.jit(do_not_specialize=["column_units", "x_row_stride", "blocks_per_row"])
def activation_forward(
    x_ptr,
    out_ptr,
    column_units: tl.int64,
    x_row_stride: tl.int64,
    blocks_per_row: tl.int32,
    ACTIVATION: tl.constexpr,
    ONE_ROW: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = ACTIVATION(x).

    x has rows of `column_units * UNIT` elements and the row stride `x_row_stride * UNIT`; out is dense. Units show the
    compiler the alignment. A dense x is one row.
    """
    offset, out_offset, _, mask = _block_of_row(
        column_units, x_row_stride, column_units, blocks_per_row, ONE_ROW, UNIT, BLOCK
    )
    x = _load(x_ptr + offset, mask, column_units, ONE_ROW, UNIT, BLOCK)
    out = _activation(x, ACTIVATION, x_ptr.dtype.element_ty)
    _store(out_ptr + out_offset, out, mask, column_units, ONE_ROW, UNIT, BLOCK)


@triton.jit(do_not_specialize=["units"])
def activation_backward(
    dy_ptr,
    x_ptr,
    dx_ptr,
    second_dx_ptr,
    third_dx_ptr,
    fourth_dx_ptr,
    units: tl.int64,
    ACTIVATION: tl.constexpr,
    SUM: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradients of x, one for each of eager's paths from x to the output; `units * UNIT` elements, all dense.

    SUM: dx is their sum, rounded after every addition. Otherwise they are separate outputs: eager adds each to other
    gradients of x, such as a residual's. Their own sum, added to those, would have other bits.
    """
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset // UNIT < units
    dy = _load(dy_ptr + offset, mask, units, True, UNIT, BLOCK)
    x = _load(x_ptr + offset, mask, units, True, UNIT, BLOCK)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    gradients = _gradients(dy, x, ACTIVATION, DTYPE)
    pointers = (dx_ptr, second_dx_ptr, third_dx_ptr, fourth_dx_ptr)
    if SUM:
        dx = gradients[0]
        for path in tl.static_range(1, len(gradients)):
            dx = rounded(dx, DTYPE) + rounded(gradients[path], DTYPE)
        _store(dx_ptr + offset, dx, mask, units, True, UNIT, BLOCK)
    else:
        for path in tl.static_range(len(gradients)):
            _store(pointers[path] + offset, gradients[path], mask, units, True, UNIT, BLOCK)


@triton.jit(do_not_specialize=["column_units", "row_stride", "blocks_per_row"])
def gated_activation_forward(
    gate_ptr,
    out_ptr,
    up_ptr,
    column_units: tl.int64,
    row_stride: tl.int64,
    blocks_per_row: tl.int32,
    ACTIVATION: tl.constexpr,
    PACKED: tl.constexpr,
    ONE_ROW: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = ACTIVATION(gate) * up, the activation rounded before the product.

    Gate and up have rows of `column_units * UNIT` elements and the row stride `row_stride * UNIT`; out is dense.
    PACKED: up begins where gate's first row ends, and `up_ptr` is not read.
    """
    offset, out_offset, _, mask = _block_of_row(
        column_units, row_stride, column_units, blocks_per_row, ONE_ROW, UNIT, BLOCK
    )
    if PACKED:
        up_ptr = gate_ptr + column_units * UNIT
    gate = _load(gate_ptr + offset, mask, column_units, ONE_ROW, UNIT, BLOCK)
    up = _load(up_ptr + offset, mask, column_units, ONE_ROW, UNIT, BLOCK)
    activated = rounded(_activation(gate, ACTIVATION, gate_ptr.dtype.element_ty), gate_ptr.dtype.element_ty)
    _store(out_ptr + out_offset, activated * up, mask, column_units, ONE_ROW, UNIT, BLOCK)


@triton.jit(do_not_specialize=["column_units", "row_stride", "blocks_per_row"])
def gated_activation_backward(
    dy_ptr,
    gate_ptr,
    d_gate_ptr,
    up_ptr,
    d_up_ptr,
    column_units: tl.int64,
    row_stride: tl.int64,
    blocks_per_row: tl.int32,
    ACTIVATION: tl.constexpr,
    D_UP: tl.constexpr,
    PACKED: tl.constexpr,
    ONE_ROW: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradients of gate and, with D_UP, of up, from dy, the product's gradient; dy and the gradients are dense.

    PACKED: gate and up are the halves of one tensor's rows, and their gradients the halves of a dense tensor's rows.
    Eager pads each half's gradient with zeros and adds the two, which turns -0 into +0.
    """
    offset, dy_offset, gradient_offset, mask = _block_of_row(
        column_units, row_stride, column_units * 2 if PACKED else column_units, blocks_per_row, ONE_ROW, UNIT, BLOCK
    )
    if PACKED:
        up_ptr = gate_ptr + column_units * UNIT
        d_up_ptr = d_gate_ptr + column_units * UNIT
    DTYPE: tl.constexpr = gate_ptr.dtype.element_ty
    dy = _load(dy_ptr + dy_offset, mask, column_units, ONE_ROW, UNIT, BLOCK)
    gate = _load(gate_ptr + offset, mask, column_units, ONE_ROW, UNIT, BLOCK)
    up = _load(up_ptr + offset, mask, column_units, ONE_ROW, UNIT, BLOCK)
    d_gate = rounded(_gradients(rounded(dy * up, DTYPE), gate, ACTIVATION, DTYPE)[0], DTYPE)
    if PACKED:
        d_gate += 0.0
    _store(d_gate_ptr + gradient_offset, d_gate, mask, column_units, ONE_ROW, UNIT, BLOCK)
    if D_UP:
        if ACTIVATION == "silu" and DTYPE == tl.bfloat16 and not INTERPRETED and PTX:
            # In bf16 the product rounds to the quotient's bits for all 65,536 numbers; the sigmoid is there already.
            activated = gate * _sigmoid(gate, DTYPE)
        else:
            activated = _activation(gate, ACTIVATION, DTYPE)
        d_up = rounded(dy * rounded(activated, DTYPE), DTYPE)
        if PACKED:
            d_up += 0.0
        _store(d_up_ptr + gradient_offset, d_up, mask, column_units, ONE_ROW, UNIT, BLOCK)
