"""Elementwise operations whose last bit is the one eager PyTorch returns on CUDA."""

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra import libdevice
except ImportError:
    from triton.language.extra.cuda import libdevice

# Triton's interpreter has neither libdevice nor inline assembly. Its replacements differ from the GPU only in the last
# bit of exponentials and in FMAs, which they round twice.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# AMD's assembler does not accept PTX: it ends the process instead of raising.
PTX = tl.constexpr(torch.version.hip is None)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """x, rounded to DTYPE, in fp32."""
    return x.to(DTYPE).to(tl.float32)


# The exponential of $1 is t * e: t is 2**k, made from its exponent bits, and e is 2**f with |f| <= 1/2.
_EXP = tl.constexpr(
    "{ .reg .f32 t, k, f, e; .reg .b32 i;"
    " fma.rn.sat.f32 t, $1, 0f3BBB989D, 0f3F000000;"
    " fma.rm.f32 t, t, 0f437C0000, 0f4B400001;"
    " sub.rn.f32 k, 0f4B40007F, t;"
    " fma.rn.f32 f, $1, 0f3FB8AA3B, k;"
    " fma.rn.f32 f, $1, 0f32A57060, f;"
    " mov.b32 i, t; shl.b32 i, i, 23; mov.b32 t, i;"
    " ex2.approx.ftz.f32 e, f; "
)


@triton.jit
def exp(x):
    """e**x in fp32, as CUDA's `expf` rounds it, subnormal results kept; `tl.exp` is an approximation.

    libdevice's returns the same, but takes two instructions for the first FMA, whose result is limited to 0 and 1.
    """
    if INTERPRETED:
        return tl.exp(x)
    elif PTX:
        return tl.inline_asm_elementwise(
            _EXP + "mul.rn.f32 $0, t, e; }", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return libdevice.exp(x)


@triton.jit
def exp_add(total, x):
    """total + e**x in fp32, as nvcc contracts sums of `expf`: one rounding for the last product and the sum."""
    if INTERPRETED or not PTX:
        return total + exp(x)
    else:
        return tl.inline_asm_elementwise(
            _EXP + "fma.rn.f32 $0, t, e, $2; }", "=f,f,f", [x, total], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def log(x, NORMAL: tl.constexpr = False):
    """The natural logarithm, in the steps of CUDA's `logf`; `tl.log` is an approximation.

    libdevice's has the same steps, but Triton builds it to flush subnormals to zero. NORMAL: x is a positive normal
    number; for others the result is any number.
    """
    if INTERPRETED:
        return tl.log(x)
    elif PTX:
        offset = 0.0
        scaled = x
        if not NORMAL:
            subnormal = x < 1.1754943508222875e-38
            offset = tl.where(subnormal, -23.0, 0.0)
            scaled = tl.where(subnormal, x * 8388608.0, x)
        bits = scaled.to(tl.int32, bitcast=True)
        exponent = (bits - 0x3F2AAAAB) & -0x800000
        f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
        polynomial = tl.fma(f, -0.13018857, 0.14084610)
        polynomial = tl.fma(polynomial, f, -0.12148628)
        polynomial = tl.fma(polynomial, f, 0.13980611)
        polynomial = tl.fma(polynomial, f, -0.16684236)
        polynomial = tl.fma(polynomial, f, 0.20012300)
        polynomial = tl.fma(polynomial, f, -0.24999669)
        polynomial = tl.fma(polynomial, f, 0.33333182)
        polynomial = tl.fma(polynomial, f, -0.5)
        of_f = tl.fma(f, f * polynomial, f)
        result = tl.fma(tl.fma(exponent.to(tl.float32), 1.1920928955078125e-07, offset), 0.69314718, of_f)
        if not NORMAL:
            # Infinity and NaN return themselves; negative numbers return NaN.
            result = tl.where(x < float("inf"), result, x)
            result = tl.where(x < 0.0, float("nan"), result)
            result = tl.where(x == 0.0, float("-inf"), result)
        return result
    else:
        return libdevice.log(x)


@triton.jit
def xlogy(x, y):
    """x * log(y) in fp32; 0 if x is zero and y a number."""
    return tl.where((x == 0.0) & (y == y), 0.0, x * log(y))


@triton.jit
def approximate_exp2(x):
    """2**x in fp32 within two units in the last place, subnormal results flushed."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def approximate_reciprocal(x):
    """1 / x in fp32 within a unit in the last place, subnormal numbers flushed."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _with_sign(magnitude, x):
    """A positive `magnitude` with the sign of x, which is not zero: one instruction instead of three."""
    if INTERPRETED:
        return tl.where(x < 0.0, -magnitude, magnitude)
    else:
        return tl.inline_asm_elementwise(
            "copysign.f32 $0, $2, $1;", "=f,f,f", [magnitude, x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def tanh(x):
    """The steps of CUDA's `tanhf`. libdevice's has the same steps, but Triton builds it to flush subnormals to zero."""
    if PTX:
        magnitude = tl.abs(x)
        large = tl.fma(approximate_reciprocal(approximate_exp2(magnitude * 2.88539) + 1.0), -2.0, 1.0)
        large = tl.where(magnitude >= 9.010914, 1.0, large)
        square = x * x
        small = tl.fma(square, 0.015739683, -0.052303962)
        small = tl.fma(small, square, 0.13315298)
        small = tl.fma(small, square, -0.33332768)
        # Adding zero sets the sign of a zero product.
        small = tl.fma(tl.fma(small, square, 0.0), x, x)
        # `large` is at least 0.53 from a magnitude of 0.6 on. NaN is `small`.
        return tl.where(magnitude >= 0.6, _with_sign(large, x), small)
    else:
        return libdevice.tanh(x)


@triton.jit
def tanh_of_number(x):
    """tanh of numbers of a 16-bit dtype or of fp32, in fp32; rounded to that dtype it has the bits of CUDA's `tanhf`.

    Of a bf16 number fewer instructions are enough: from 0.1 on no result is closer than 2**-18 to the middle between two bf16
    numbers, and the approximations are within 2**-21; below all numbers were compared.
    """
    if PTX and x.dtype == tl.bfloat16:
        x = widened(x)
        large = tl.fma(approximate_reciprocal(approximate_exp2(x * 2.88539) + 1.0), -2.0, 1.0)
        # Adding zero sets the sign of a zero product.
        small = tl.fma(tl.fma(x * x, -0.33333334, 0.0), x, x)
        # NaN is `small`.
        return tl.where(tl.abs(x) >= 0.1, large, small)
    else:
        return tanh(x.to(tl.float32))


@triton.jit
def _polynomial(x, c6, c5, c4, c3, c2, c1, c0):
    """c6 * x**6 + ... + c0, by FMAs."""
    total = tl.fma(x, c6, c5)
    total = tl.fma(total, x, c4)
    total = tl.fma(total, x, c3)
    total = tl.fma(total, x, c2)
    total = tl.fma(total, x, c1)
    return tl.fma(total, x, c0)


@triton.jit
def erf(x, CUDA_13_2: tl.constexpr):
    """The steps of CUDA's `erff`, whose constants are others from CUDA 13.2 on.

    libdevice's has the steps of one of the two, but Triton builds it to flush subnormals to zero.
    """
    if PTX:
        magnitude, square = tl.abs(x), x * x
        if CUDA_13_2:
            large = _polynomial(
                magnitude, 6.784818e-05, -0.0009299388, 0.006954225, -0.037528004, 0.15668742, 0.9144432, 0.6287219
            )
            small = _polynomial(
                square, 6.74986e-05, -0.00076476467, 0.005143017, -0.026827244, 0.112828694, -0.37612557, 0.12837917
            )
            is_large = magnitude >= 1.0037584
        else:
            large = _polynomial(
                magnitude, 0.000112198715, -0.0013275252, 0.008396535, -0.040246584, 0.15950431, 0.9129177, 0.62906003
            )
            small = _polynomial(
                square, 8.4834945e-05, -0.00082130916, 0.005213489, -0.026868774, 0.11284005, -0.37612665, 0.12837915
            )
            is_large = magnitude >= 1.00296
        large = 1.0 - approximate_exp2(tl.fma(large, -magnitude, -magnitude))
        # `large` is at least 0.84 where it is taken.
        return tl.where(is_large, _with_sign(large, x), tl.fma(small, x, x))
    else:
        return libdevice.erf(x)


@triton.jit
def divide(x, y):
    """x / y in fp32, correctly rounded, subnormal results kept; Triton's `div_rn` flushes them to zero."""
    if INTERPRETED:
        return x / y
    elif PTX:
        return tl.inline_asm_elementwise(
            "div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(x, y)


@triton.jit
def divide_by_reciprocal(x, y, reciprocal):
    """x / y in fp32 by three instructions, correctly rounded in two cases. Let u be the unit in the last place of x / y.

    y is a whole number up to 2**20, `reciprocal` is within a unit in the last place of 1 / y, and x / y is zero or a normal
    number. The product is at most 3 u from x / y, and the remainder is exact. The last FMA rounds a number that is less
    than 2**-21 u from x / y. A normal quotient by such a count is at least u / (2 * y) from the middle between two numbers:
    both round alike. Subnormal quotients can be in the middle, and of an infinite x the remainder is NaN: `divide` has
    these (`tests/test_group_norm.py` tries the hardest numbers).

    y is from 1 to 2**20, `reciprocal` is correctly rounded, and x is zero or from 2**-100 to 1. The remainder is a multiple
    of 2**-149 then, and everything else is zero or normal. Let b be y's significand, and c that of x, or twice that if it
    is less than b. `reciprocal` is off by up to 2**-25 * b of it, the product by up to (1/2 + c/4) u, and the number that
    the last FMA rounds by up to 2.5 * 2**-24 u, a rounding of the remainder included. The quotient is at least 2**-24 / b u
    from a middle. If it is so near that both could round apart, the product is 1/2 u or 3/2 u off, up to that. If 1/2 u,
    the remainder is exact, and the last FMA rounds a number that is 2**-26 * b u off, up to 2**-49 u: less than
    2**-24 / b u, as b is at most 2 - 2**-23. If 3/2 u, c is at least 4 - 10 * 2**-24: x and y have the two largest
    significands, and their quotient is near no middle (`tests/test_softmax_kernel.py` tries the hardest numbers).
    """
    if INTERPRETED:
        return x / y
    else:
        product = x * reciprocal
        return tl.fma(tl.fma(product, -1.0 * y, x), reciprocal, product)


@triton.jit
def divide_down_to_zero(x, y, reciprocal):
    """x / y in fp32, correctly rounded, subnormal results kept: x is from 0 to 1, y from 1 to 2**30, or either is NaN.

    No branch: `div.rn` takes a subroutine for each small x. `reciprocal` is correctly rounded. The quotient of 2**64 * x is
    rounded by `divide_by_reciprocal`, far from subnormal numbers. If x / y is subnormal, it is rounded again, to a multiple
    of 2**-149. Only if the first rounding made it the middle of two such multiples can the second be wrong, which the
    remainder tells.
    """
    if INTERPRETED:
        return x / y
    else:
        scaled = x * 18446744073709551616.0
        quotient = divide_by_reciprocal(scaled, y, reciprocal)
        # In multiples of 2**-149. Sums with 2**23 are rounded to whole numbers, which are their last bits.
        multiple = quotient * 38685626227668133590597632.0 + 8388608.0
        bits = multiple.to(tl.int32, bitcast=True) - 0x4B000000
        rest = tl.fma(multiple - 8388608.0, -1.0 * y, scaled * 38685626227668133590597632.0)
        half = y * 0.5
        bits = bits + (rest > half).to(tl.int32) - (rest < -1.0 * half).to(tl.int32)
        # 2**-62 is 2**64 times the smallest normal number.
        subnormal = quotient < 2.168404344971009e-19
        return tl.where(subnormal, bits.to(tl.float32, bitcast=True), quotient * 5.421010862427522e-20)


@triton.jit
def reciprocal(x, NORMAL: tl.constexpr = False):
    """1 / x in fp32, correctly rounded, subnormal results kept.

    NORMAL: x is from 2**-126 to 2**125, or NaN. `rcp.rn` takes the same steps for these, and branches for others.
    """
    if INTERPRETED:
        return 1.0 / x
    elif PTX and NORMAL:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 y, r, e; neg.f32 y, $1; rcp.approx.ftz.f32 r, $1;"
            " fma.rn.f32 e, y, r, 0f3F800000; fma.rn.f32 $0, r, e, r; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    elif PTX:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def maximum(x, y):
    """The larger of two numbers of one dtype, NaN if either is NaN; for 16 bits one instruction returns two results."""
    if INTERPRETED or not PTX or x.dtype == tl.float32:
        # In fp32: the interpreter of Triton 3.9 compares the bits of bf16 numbers.
        larger = tl.maximum(x.to(tl.float32), y.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        return larger.to(x.dtype)
    elif x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def widened(x):
    """x in fp32. Two bf16 numbers take two instructions; the compiler makes three."""
    if INTERPRETED or not PTX or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=&r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )


@triton.jit
def rounded_sum(x, y):
    """x + y of one dtype, rounded to it. Two bf16 numbers may be added by one instruction, which rounds once.

    Eager adds in fp32 and rounds again, which is the same: fp32 has more than twice the digits, and two more.
    """
    if INTERPRETED or not PTX or x.dtype != tl.bfloat16:
        return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
    else:
        return x + y


@triton.jit
def _packed(OPERATION: tl.constexpr, x, y):
    """Two results by one fp32 instruction, which compute capability 10.0 has; each is rounded as alone."""
    x, y = tl.broadcast(x, y)
    return tl.inline_asm_elementwise(
        "{ .reg .b64 x, y; mov.b64 x, {$2, $3}; mov.b64 y, {$4, $5}; "
        + OPERATION
        + ".rn.f32x2 x, x, y; mov.b64 {$0, $1}, x; }",
        "=f,=f,f,f,f,f",
        [x, y],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def product(x, y, PACKED: tl.constexpr):
    """x * y in fp32; PACKED: two products by one instruction."""
    return _packed("mul", x, y) if PACKED else x * y


@triton.jit
def sum_of_two(x, y, PACKED: tl.constexpr):
    """x + y in fp32; PACKED: two sums by one instruction."""
    return _packed("add", x, y) if PACKED else x + y


@triton.jit
def mask_if(mask, condition):
    """`mask` where the scalar `condition` is not 0, and no element otherwise.

    The interpreter of Triton 3.9 wants boolean masks, and makes 32-bit integers of a scalar's comparison that it broadcasts.
    """
    if INTERPRETED:
        return mask & (tl.broadcast_to(tl.cast(condition, tl.int32), mask.shape) != 0)
    else:
        return mask & (condition != 0)


@triton.jit
def prefetch(pointers):
    """Prefetches the lines with these addresses into the L2."""
    if PTX and not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def let_next_kernel_begin():
    """Once all programs have called it, the stream's next kernel may begin, if it was launched to overlap (`launch.bind`)."""
    if PTX and not INTERPRETED:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, $1;",
            "=r,r",
            [tl.program_id(0)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def wait_for_previous_kernel():
    """Waits until the kernel that this one overlaps has ended and its results are visible."""
    if PTX and not INTERPRETED:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def prefetch_bulk(pointer, wanted, BYTES: tl.constexpr):
    """Prefetches BYTES from `pointer` on into the L2, by one request of the program, if `wanted`.

    It needs compute capability 9.0 or later. Such requests take multiples of 16: address and size are rounded down.
    """
    if PTX and not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 t; .reg .u64 a; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.ne.and.s32 p, $2, 0, p;"
            " and.b64 a, $1, -16; @p cp.async.bulk.prefetch.L2.global [a], $3; mov.u32 $0, 0; }",
            "=r,l,r,r",
            [pointer, wanted.to(tl.int32), tl.cast(BYTES // 16 * 16, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def rsqrt(x):
    """CUDA's or ROCm's `rsqrtf` in fp32; `tl.rsqrt` is the same instruction but treats subnormal inputs as zero."""
    if INTERPRETED:
        return tl.rsqrt(x)
    elif PTX:
        return tl.inline_asm_elementwise(
            "rsqrt.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return libdevice.rsqrt(x)


@triton.jit
def cos(x):
    """CUDA's `cosf` in fp32; `tl.cos` is an approximation."""
    if INTERPRETED:
        return tl.cos(x)
    else:
        return libdevice.cos(x)


@triton.jit
def sin(x):
    """CUDA's `sinf` in fp32; `tl.sin` is an approximation."""
    if INTERPRETED:
        return tl.sin(x)
    else:
        # Triton builds libdevice's to flush subnormals to zero; CUDA's returns them unchanged.
        return tl.where(tl.abs(x) < 1.1754943508222875e-38, x, libdevice.sin(x))
