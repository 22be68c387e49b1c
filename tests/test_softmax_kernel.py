"""Softmax: the kernels in Triton's interpreter against the transcription of ATen's, the proof's power, and what surrounds them.

The interpreter has numpy's exponentials, for the transcription too, rounds an FMA as its version does
(`interpreter.multiply_add`) and truncates to bf16: `cast` does likewise.
"""

import itertools
import math
import os
import random
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import aten_model
import numpy
import pytest
import torch
from bits import assert_bits_equal, bits_equal
from interpreter import multiply_add
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [
    pytest.mark.usefixtures("proof_off"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero|All-NaN):RuntimeWarning"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Both sides of where a power of two, and with it the order, changes.
SIZES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 200, 511, 512, 513, 1000, 1023, 1024)
# The same of rows of one block: where ATen's kernel, its threads, or the tile of a program change.
BLOCK_SIZES = (1025, 1028, 1031, 1032, 1040, 2047, 2048, 2049, 2052, 2055, 2056, 3072, 4096, 4100, 4128, 8192, 9216)
LONG_SIZES = (9217, 9220, 9224, 12252, 12256, 12268, 12272, 12288, 16384, 24504, 24512, 24536, 24544)
LONG_SIZES += (24576, 32001, 32768, 50257)
SPECIAL = (-math.inf, math.inf, math.nan, -0.0, 0.0, 1e-40, -6e4)


def numpy_exp(x):
    return torch.from_numpy(numpy.asarray(numpy.exp(x.numpy())))


def cast(x, dtype):
    """As the interpreter does."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(dtype) if dtype == torch.bfloat16 else x.to(dtype)


def rows_at_random(choose, generator, rows, size, dtype, special=True):
    """Of some scale; in one case of three with rows, or an element of each, that are not numbers or on their verge."""
    x = torch.randn(rows, size, generator=generator) * choose.choice((0.1, 1.0, 3.0))
    if special and choose.random() < 1 / 3:
        for row in range(rows):
            value, where = choose.choice(SPECIAL), choose.choice((slice(None), choose.randrange(size)))
            # The interpreter truncates what is subnormal in bf16 in a way of its own.
            x[row, where] = 0.0 if value == 1e-40 and dtype == torch.bfloat16 else value
    return x.to(dtype)


def spaced(x, gap):
    """The same rows with a gap between them."""
    return torch.zeros(x.shape[0], x.shape[1] + gap, dtype=x.dtype)[:, : x.shape[1]].copy_(x)


def forward_of(family, x, dtype=None, shift=0, few=False, long_warps=False):
    (rows, size), dtype = x.shape, dtype or x.dtype
    out = torch.full((rows, size), math.nan, dtype=dtype)
    kind = replace(family.Kind.of(False, x.dtype, dtype, size, x.stride(0), shift, long_warps=long_warps), few=few)
    family._bind(kind, rows, size, x.stride(0), CPU)(x, out)
    return out


def backward_of(family, dy, y, dtype=None, few=False):
    (rows, size), dtype = y.shape, dtype or y.dtype
    dx = torch.full((rows, size), math.nan, dtype=dtype)
    kind = replace(family.Kind.of(True, dtype, y.dtype, size, dy.stride(0)), few=few)
    family._bind(kind, rows, size, dy.stride(0), CPU)(dy, y, dx)
    return dx


@interpreted
def test_kernels_equal_the_transcription(module, seed):
    """120 cases; `_forward` and `_backward` take y as softmax returns it, and as it never does."""
    family, generator, choose = module("ops.softmax"), torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(80):
        size = choose.choice((choose.choice(SIZES), choose.randint(1, 1024)))
        rows, dtype, gap = (
            choose.randint(1, 140 if size < 40 else 9),
            choose.choice(DTYPES),
            choose.choice((0, 0, 1, 8)),
        )
        few = choose.random() < 0.3
        label = f"case {case}, {rows}x{size} {dtype}, gap {gap}, few {few}"
        x = rows_at_random(choose, generator, rows, size, dtype)
        y = forward_of(family, spaced(x, gap), few=few)
        assert_bits_equal(y, aten_model.softmax(x, numpy_exp, cast), f"output of {label}")
        if choose.random() < 0.3:
            y = torch.rand(rows, size, generator=generator).to(dtype)
        dy = rows_at_random(choose, generator, rows, size, dtype)
        dx = backward_of(family, spaced(dy, gap), y, few=few)
        assert_bits_equal(dx, aten_model.softmax_backward(dy, y, multiply_add, cast), f"gradient of {label}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_have_programs_of_their_own(module, monkeypatch, dtype):
    """Whose kernels are proved by themselves. Of longer rows a program has one in any case."""
    family = module("ops.softmax")

    def planned(size, rows, of_gradient=False):
        kind = family.Kind.of(of_gradient, dtype, dtype, size, size)
        with monkeypatch.context() as patch:
            patch.setattr(family.launch, "INTERPRETED", True)
            assert not kind.planned("softmax", dtype, size, rows, CPU).few
            patch.setattr(family.launch, "INTERPRETED", False)
            return kind.planned("softmax", dtype, size, rows, CPU)

    for of_gradient in (False, True):
        few, many = (planned(128, rows, of_gradient) for rows in (512, 513))
        assert few.program == (2, 1) and many.program == (4 if dtype == torch.float32 else 8, 1)
        assert few != many and few == planned(100 if dtype == torch.float32 else 120, 1, of_gradient)
        assert planned(8, 1, of_gradient).program == (8, 1) and planned(300, 1, of_gradient).program == (1, 1)
        assert planned(1000, 1, of_gradient) == planned(1000, 4000, of_gradient)


def test_which_rows_are_loaded_by_lanes(module):
    """Those of up to 256 elements, and shorter ones in gradients, but for gradients of masked scores."""
    kind_of = module("ops.softmax").Kind.of

    def longest(of_gradient, **changes):
        sizes = (1, 8, 64, 65, 128, 129, 256, 257, 1024)
        kinds = [replace(kind_of(of_gradient, torch.bfloat16, torch.float32, size, size), **changes) for size in sizes]
        for kind in kinds:
            constants = kind.constants_of_warp
            assert constants["TILE"] == (constants["WIDTH"] if kind.by_lanes else 1 << constants["LOG2_SIZE"])
        return max(size for size, kind in zip(sizes, kinds) if kind.by_lanes)

    assert longest(False) == longest(False, few=True) == longest(True, written=torch.bfloat16) == 256
    assert (longest(True), longest(True, few=True)) == (64, 128)


@interpreted
@pytest.mark.parametrize("cases", [12, pytest.param(200, marks=pytest.mark.long)])
def test_kernels_for_blocks_equal_the_transcription(module, seed, cases):
    """Rows of every length, also from an address inside 16 bytes, and 16 bits to fp32."""
    family, generator, choose = module("ops.softmax"), torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(cases):
        lengths = choose.choice((BLOCK_SIZES, BLOCK_SIZES, LONG_SIZES))
        size = choose.choice((choose.choice(lengths), choose.randint(lengths[0], lengths[-1])))
        rows, dtype, gap = choose.randint(1, 5), choose.choice(DTYPES), choose.choice((0, 0, 1, 8))
        result = choose.choice((None, None, torch.float32))
        # Eager converts bf16 before, and copies rows with gaps.
        own_address = gap == 0 and not (dtype == torch.bfloat16 and result)
        shift = choose.randrange(16 // dtype.itemsize) if own_address and choose.random() < 0.5 else 0
        label = f"case {case}, {rows}x{size} {dtype} to {result}, gap {gap}, shift {shift}"
        x = rows_at_random(choose, generator, rows, size, dtype)
        y = forward_of(family, spaced(x, gap) if gap else x, result, shift)
        expected = aten_model.softmax(x, numpy_exp, cast, dtype=result, misaligned=shift)
        assert_bits_equal(y, expected, f"output of {label}")
        if choose.random() < 0.3:
            y = torch.rand(rows, size, generator=generator).to(y.dtype)
        # The interpreter truncates what is subnormal in bf16 in a way of its own.
        y = torch.where(y < 1e-30, 0.0, y)
        dy = rows_at_random(choose, generator, rows, size, y.dtype)
        if dtype == torch.bfloat16:
            dy = torch.where(dy.abs() < 1e-30, 0.0, dy)
        dx = backward_of(family, spaced(dy, gap), y, dtype)
        expected = aten_model.softmax_backward(dy, y, multiply_add, cast, dtype=dtype)
        assert_bits_equal(dx, expected, f"gradient of {label}")


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 33, 1024])
def test_special_rows(module, size, dtype):
    """Whatever order it is added up in, a row has these values."""
    family = module("ops.softmax")
    nan, one = torch.full((size,), math.nan), torch.full((size,), 1 / size)
    y = forward_of(family, torch.stack([torch.full((size,), value) for value in SPECIAL]).to(dtype))
    for row, value in zip(y, SPECIAL):
        expected = one if math.isfinite(value) else nan
        assert_bits_equal(row, cast(expected, dtype), f"rows of {value}")
    x = torch.zeros(3, size)
    x[0, -1], x[1, -1], x[2, -1] = -math.inf, math.inf, math.nan
    y = forward_of(family, x.to(dtype))
    assert y[1:].isnan().all()
    assert size == 1 or (y[0, -1] == 0 and not y[0].isnan().any())
    dy = torch.full((1, size), -0.0, dtype=dtype)
    # A sum that starts from +0 is never -0: -(+0) * y + -0 is -0.
    assert_bits_equal(backward_of(family, dy, torch.full((1, size), 0.5, dtype=dtype)), dy)


# Rows of one block with small terms, which programs add and divide by other instructions


LEAST_TERM = 2.0**-100
# Logarithms of terms on both sides of 2**-100, of subnormal ones, of 2**-149, and of zero.
TAILS = (
    -69.0,
    -69.25,
    -69.3125,
    -69.375,
    -69.5,
    -75.0,
    -87.0,
    -87.5,
    -88.0,
    -95.0,
    -103.0,
    -103.5,
    -104.5,
    -1e4,
    -math.inf,
)


def is_added_by_fmas(terms):
    """Which rows have a term between zero and 2**-100, or are NaN."""
    return (((terms > 0) & (terms < LEAST_TERM)) | terms.isnan()).any(-1)


def rows_with_tails(choose, generator, size, dtype):
    """Rows whose largest number is 0: with one small term, or in all of a lane, or in half of the row; and special ones."""
    x = -torch.randn(4 * len(TAILS) + len(SPECIAL), size, generator=generator).abs()
    x[:, choose.randrange(size)] = 0.0
    for row, (tail, where) in enumerate(
        (tail, where) for tail in TAILS for where in ("one", "lane", "half", "but one")
    ):
        lane = choose.randrange(1024)
        places = {"one": [choose.randrange(size)], "lane": slice(lane, None, 1024), "half": slice(None, size // 2)}
        x[row, places.get(where, slice(1, None))] = tail
        if where == "lane":  # Among others in the lane that add nothing.
            x[row, lane + 1024 :: 1024] = choose.choice((tail, tail - 0.5, -math.inf))
        if where == "but one":
            x[row, 0] = 0.0
    for row, value in enumerate(SPECIAL, 4 * len(TAILS)):
        x[row, choose.randrange(size)] = value
    return x.to(dtype)


def terms_of(x):
    return numpy_exp(x.float() - x.float().amax(-1, keepdim=True))


def without_subnormals(y):
    """The interpreter truncates what is subnormal in bf16 in a way of its own."""
    return torch.where(y < 1e-36, 0.0, y) if y.dtype == torch.bfloat16 else y


@interpreted
@pytest.mark.parametrize("cases", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", [None, *(pytest.param(each, marks=pytest.mark.long) for each in DTYPES)])
def test_rows_with_small_terms_are_divided_down_to_zero(module, monkeypatch, seed, dtype, cases):
    """And no others. Each row has the transcription's bits. fp32 or bf16, at random; each dtype in the long runs."""
    family, source = module("ops.softmax"), module("kernels_src.softmax")
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    dtype = dtype or choose.choice(DTYPES[::2])
    # Elements one by one, vectors of one row, and both with fp32 results.
    drawn = [(choose.choice(BLOCK_SIZES[7:-1]), dtype), (choose.choice((9224, 24576)), dtype)]
    drawn += [(2056, torch.float32)]
    # Of fp16 a row with a head.
    for size, result in [*choose.sample(drawn, cases), *([(2049, torch.float32)] if dtype == torch.float16 else [])]:
        x = rows_with_tails(choose, generator, size, dtype)
        expected = aten_model.softmax(x, numpy_exp, cast, dtype=result)
        down_to_zero = is_added_by_fmas(terms_of(x))
        assert 20 < int(down_to_zero.sum()) < len(x) - 15
        found = forward_of(family, x, result)
        assert_bits_equal(without_subnormals(found), without_subnormals(expected), f"{size} to {result}")
        with monkeypatch.context() as patch:
            patch.setattr(source, "divide_by_reciprocal", lambda x, y, reciprocal: x * 0.0 + 2.0)
            assert torch.equal((forward_of(family, x, result) != 2).all(-1), down_to_zero), (size, result)
        with monkeypatch.context() as patch:
            patch.setattr(source, "divide_down_to_zero", lambda x, y, reciprocal: x * 0.0 + 2.0)
            others = ~down_to_zero & ~(terms_of(x).isnan().any(-1))
            assert torch.equal((forward_of(family, x, result) <= 1).all(-1), others), (size, result)


@interpreted
@pytest.mark.parametrize("size", [96, 250, 1000, 9217, 9232])
def test_short_and_long_rows_with_small_terms_are_divided_down_to_zero(module, monkeypatch, seed, size):
    """All rows of a program with such a term, and of long rows those with a difference of 69 or more."""
    family, source = module("ops.softmax"), module("kernels_src.softmax")
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    x = -torch.rand(24, size, generator=generator)
    # Of short rows in the last elements, which tiles of lanes would miss most easily.
    place = choose.randrange(1, size) if size > 256 else size - 1
    x[:, 0], x[choose.randrange(24), place] = 0.0, choose.choice((-75.0, -100.0))
    dtype = torch.bfloat16 if size == 9232 else torch.float32
    x = x.to(dtype)
    per_program = family.Kind.of(False, dtype, dtype, size, size).program[0]
    small = is_added_by_fmas(terms_of(x)).split(per_program)
    expected = torch.cat([each.any().expand(len(each)) for each in small])
    assert_bits_equal(
        without_subnormals(forward_of(family, x, dtype)), without_subnormals(aten_model.softmax(x, numpy_exp, cast))
    )
    for name, of_rows in (("divide_down_to_zero", expected), ("divide_by_reciprocal", ~expected)):
        with monkeypatch.context() as patch:
            patch.setattr(source, name, lambda x, y, reciprocal: x * 0.0 + 2.0)
            assert torch.equal((forward_of(family, x, dtype) == 2).all(-1), of_rows), name


def test_sums_of_terms_are_those_of_fmas(seed):
    """Where no term is between zero and 2**-100, as the kernel has it; elsewhere the two differ."""
    generator, lanes = torch.Generator().manual_seed(seed), 1 << 16
    total, by_fmas, small = torch.zeros(lanes), torch.zeros(lanes), torch.zeros(lanes, dtype=torch.bool)
    # Zeros by any product, such as the middle between zero and 2**-149.
    scale = torch.randint(-99, 1, (lanes,), generator=generator)
    for _ in range(16):
        power = torch.exp2((scale + torch.randint(-3, 1, (lanes,), generator=generator)).clamp(-99, 0).float())
        product = 0.75 + torch.rand(lanes, generator=generator) / 2
        tiny = torch.exp2(-torch.randint(20, 60, (lanes,), generator=generator).float())
        of_zero = torch.rand(lanes, generator=generator) < 0.3
        power, product = torch.where(of_zero, 2.0**-126, power), torch.where(of_zero, tiny, product)
        term = power * product
        small |= (term > 0) & (term < LEAST_TERM)
        total, by_fmas = total + term, aten_model.fused_multiply_add(power, product, by_fmas)
    assert_bits_equal(total[~small], by_fmas[~small])
    assert int((~small).sum()) > 1000
    # Subnormal products of all sizes.
    total, by_fmas = torch.zeros(lanes), torch.zeros(lanes)
    for _ in range(16):
        product = torch.exp2(-24 * torch.rand(lanes, generator=generator))
        total = total + 2.0**-126 * product
        by_fmas = aten_model.fused_multiply_add(torch.full_like(product, 2.0**-126), product, by_fmas)
    assert not torch.equal(total, by_fmas)


def by_reciprocal(x, y, reciprocal=None):
    """`divide_by_reciprocal` with FMAs that round once, as on a GPU."""
    reciprocal = 1.0 / y if reciprocal is None else reciprocal
    product, fma = x * reciprocal, aten_model.fused_multiply_add
    return fma(fma(product, -y, x), reciprocal, product)


def hardest_quotient(choose):
    """x up to 1 and y from 1 on whose quotient is as near to the middle between two numbers as it can be."""
    while True:
        near_a_power = choose.choice((1 << 23, 1 << 24)) + choose.choice((-1, 1)) * choose.randrange(1, 1 << 10)
        y = choose.choice((near_a_power, (1 << 24) - 1, choose.randrange(1 << 23, 1 << 24))) | 1
        if not 1 << 23 < y < 1 << 24:
            continue
        # 2**shift * x = odd * y + rest, with an odd number of 25 bits.
        shift, rest = choose.choice((24, 25)), choose.choice((-3, -1, 1, 3))
        x = rest * pow(2**shift, -1, y) % y + y * choose.randrange(2)
        if 1 << 23 <= x < 1 << 24 and (x < y) == (shift == 25):
            return x, y


def test_the_reciprocal_of_a_sum_divides_as_exactly_as_a_division(seed):
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pairs = [hardest_quotient(choose) for _ in range(60_000)] + [((1 << 24) - 2, (1 << 24) - 1)]
    x, y = torch.tensor(pairs, dtype=torch.float32).unbind(1)
    middle = (x.double() / y.double()).frexp().mantissa * 2.0**24 % 1.0 - 0.5
    assert (middle.abs() < 2.0**-21)[:-1].all(), "they are near the middle"
    x *= torch.exp2(torch.randint(-76, 1, x.shape, generator=generator) - 24.0)
    y *= torch.exp2(torch.randint(0, 20, y.shape, generator=generator) - 23.0)
    found = by_reciprocal(x, y)
    assert x.min() >= LEAST_TERM and y.min() >= 1
    assert_bits_equal(found, x / y, "the hardest")
    for dividend, divisor, quotient in zip(*(each[-3000:].tolist() for each in (x, y, found))):
        exact, unit = Fraction(dividend) / Fraction(divisor), Fraction(2) ** (math.frexp(quotient)[1] - 24)
        assert abs(Fraction(quotient) - exact) < unit / 2, (dividend, divisor)
    # A reciprocal that is not rounded correctly would not do.
    assert not torch.equal(by_reciprocal(x, y, torch.nextafter(1.0 / y, torch.zeros(()))), x / y)
    x = torch.exp2(-100 * torch.rand(1 << 20, generator=generator))
    x, y = torch.where(torch.rand(x.shape, generator=generator) < 0.1, 0.0, x), 1 + 9215 * torch.rand_like(x)
    y = torch.where(torch.rand(x.shape, generator=generator) < 0.5, 1 + y / 9216, y)
    assert_bits_equal(by_reciprocal(x, y), x / y, "at random")


def down_to_zero(x, y, compare=True):
    """`divide_down_to_zero`, as on a GPU; without `compare` a subnormal quotient is rounded twice."""
    fma = aten_model.fused_multiply_add
    scaled = x * 2.0**64
    quotient = by_reciprocal(scaled, y)
    multiple = quotient * 2.0**85 + 2.0**23
    bits = multiple.view(torch.int32) - 0x4B000000
    rest = fma(multiple - 2.0**23, -y, scaled * 2.0**85)
    if compare:
        bits = bits + (rest > y / 2).int() - (rest < -y / 2).int()
    return torch.where(quotient < 2.0**-62, bits.view(torch.float32), quotient * 2.0**-64)


def test_quotients_of_all_sizes_down_to_zero_are_rounded_once(seed):
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    # Subnormal quotients near the middle between two numbers: (k + 1/2) y, and a little more or less.
    y, k = (
        torch.randint(low, high, (1 << 18,), generator=generator) for low, high in ((1 << 23, 1 << 24), (0, 1 << 22))
    )
    shift = torch.randint(1, 24, y.shape, generator=generator)
    x = ((2 * k + 1) * y >> shift) + torch.randint(-1, 2, y.shape, generator=generator)
    taken = (x >= 0) & (x < 1 << 23)
    x, y = x.int().view(torch.float32)[taken], (y.double() * 2.0 ** (1.0 - shift)).float()[taken]
    middles = (x >= 0) & (y >= 1) & (y <= 2.0**20)
    x, y = x[middles], y[middles]
    assert len(x) > 1000
    assert_bits_equal(down_to_zero(x, y), x / y, "near the middle")
    assert not torch.equal(down_to_zero(x, y, compare=False), x / y), "rounded twice some are wrong"
    bits = torch.randint(0, 127 << 23, (1 << 20,), generator=generator, dtype=torch.int32)
    bits = torch.where(torch.rand(bits.shape, generator=generator) < 0.5, bits >> choose.randint(1, 8), bits)
    y = torch.exp2(20 * torch.rand(bits.shape, generator=generator))
    assert_bits_equal(down_to_zero(bits.view(torch.float32), y), bits.view(torch.float32) / y, "at random")
    pairs = torch.tensor([hardest_quotient(choose) for _ in range(20_000)], dtype=torch.float32)
    x = pairs[:, 0] * torch.exp2(torch.randint(-150, 1, (len(pairs),), generator=generator) - 24.0)
    y = pairs[:, 1] * torch.exp2(torch.randint(0, 20, (len(pairs),), generator=generator) - 23.0)
    assert_bits_equal(down_to_zero(x, y), x / y, "the hardest")
    # Sums beyond 2**20, of rows of hundreds of millions of elements: the reciprocal alone does not do.
    x, y = torch.tensor([1.091543835670742e-30]), torch.tensor([3 * 2.0**27])
    assert not torch.equal(by_reciprocal(x, y), x / y)
    assert_bits_equal(down_to_zero(x, y), x / y)
    special = torch.tensor([0.0, 1.0, 2.0**-149, 2.0**-126, math.nan, 1.0])
    divisors = torch.tensor([3.0, 1.0, 1.0, 1.0, 2.0, math.nan])
    assert torch.equal(down_to_zero(special, divisors).isnan(), (special / divisors).isnan())
    assert_bits_equal(down_to_zero(special, divisors)[:4], (special / divisors)[:4])


# Orders of a row sum of [rows, size], such as a kernel might have by mistake


def in_lanes(lanes, pairs="far"):
    def order(terms):
        size = 1 << (terms.shape[1] - 1).bit_length()
        width = min(lanes, size)
        total = torch.zeros(len(terms), width)
        for step in functional.pad(terms, (0, size - terms.shape[1])).view(len(terms), -1, width).unbind(1):
            total = total + step
        while total.shape[1] > 1:
            half = total.shape[1] // 2
            first, second = (total[:, :half], total[:, half:]) if pairs == "far" else (total[:, ::2], total[:, 1::2])
            total = first + second
        return total[:, 0]

    return order


def blocks_of_lanes(terms):
    """A lane takes neighbours."""
    size = 1 << (terms.shape[1] - 1).bit_length()
    steps = functional.pad(terms, (0, size - terms.shape[1])).view(len(terms), min(32, size), -1)
    return in_lanes(32)(steps.transpose(1, 2).reshape(len(terms), size))


WRONG_ORDERS = {
    "16 lanes": in_lanes(16),
    "64 lanes": in_lanes(64),
    "neighbouring lanes first": in_lanes(32, "near"),
    "neighbours in a lane": blocks_of_lanes,
    "a tree over the whole row": in_lanes(1024),
}


@interpreted
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("size", [200, 1000])
@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_the_transcription_tells_of_a_wrong_order(module, monkeypatch, seed, name, size, direction):
    """Of 64 fp32 rows, loaded by lanes or not; a kernel with the right order equals the transcription in all."""
    family, generator, rows = module("ops.softmax"), torch.Generator().manual_seed(seed), 64
    x, dy = torch.randn(2, rows, size, generator=generator).unbind()

    def compared():
        if direction == "forward":
            return forward_of(family, x), aten_model.softmax(x, numpy_exp)
        y = aten_model.softmax(x, numpy_exp)
        return backward_of(family, dy, y), aten_model.softmax_backward(dy, y, multiply_add)

    assert_bits_equal(*compared())
    order = WRONG_ORDERS[name]
    source = module("kernels_src.softmax")

    def wrong(tiles, ROWS, WIDTH, TILES, TILE):
        terms = tiles[0]
        sums = order(torch.cat([torch.from_numpy(tile.handle.data) for tile in tiles], dim=1)).numpy()
        return type(terms)(type(terms.handle)(sums, terms.handle.dtype), source.tl.block_type(terms.dtype, [ROWS]))

    monkeypatch.setattr(source, "_warp_sum", wrong)
    found, expected = compared()
    differing = int((found != expected).any(-1).sum())
    print(f"{differing} of {rows} rows differ")
    assert differing  # In a fifth of the rows or more: none of 64 would one time in a million.


@interpreted
def test_planted_arithmetic_is_told(monkeypatch, seed):
    """What rounds otherwise: a product that is not rounded to 16 bits, a difference without FMA, a product with a reciprocal."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 64, 200, generator=generator).unbind()
    y = aten_model.softmax(x, numpy_exp)
    terms = numpy_exp(x - x.amax(-1, keepdim=True))
    assert not bits_equal(terms * (1.0 / aten_model._warp_sum(terms)[:, None]), y)
    assert not bits_equal(
        aten_model.softmax_backward(dy, y, lambda a, b, c: a * b + c), aten_model.softmax_backward(dy, y)
    )
    halves = dy.half(), y.half()
    unrounded = aten_model.softmax_backward(*(each.float() for each in halves)).half()
    assert not bits_equal(unrounded, aten_model.softmax_backward(*halves))


# Proof


def orders_of(log2_size):
    """The wrong orders that differ at this length: up to 64 elements a longer tree is the same additions."""
    short = {"neighbouring lanes first": 1, "16 lanes": 6, "neighbours in a lane": 6, "64 lanes": 7}
    return {name: order for name, order in WRONG_ORDERS.items() if log2_size >= short.get(name, 7)}


def compared(family, patch, kind, seed, order):
    """What the proof compares of a kernel with this order and eager, both transcribed; `seed` in its own seed's place."""

    def softmax(x, order=None):
        return aten_model.softmax(x, row_sum=order, dtype=kind.result, misaligned=kind.shift)

    def gradient(dy, y, order=None):
        return aten_model.softmax_backward(dy, y, row_sum=order, dtype=kind.dtype)

    patch.setattr(family.proof, "generator", lambda device, _: torch.Generator(device).manual_seed(seed))
    patch.setattr(family, "functional", SimpleNamespace(softmax=lambda x, dim, dtype: softmax(x)))
    patch.setattr(family, "_formula", lambda dy, y, dtype: gradient(dy, y))
    compute = gradient if kind.of_gradient else softmax
    patch.setattr(family, "_bind", lambda *_: lambda *tensors: tensors[-1].copy_(compute(*tensors[:-1], order)))
    return (family._gradient_comparisons if kind.of_gradient else family._comparisons)(kind, CPU)


def tells(*arguments) -> bool:
    return any(not bits_equal(found, expected) for _, found, expected in compared(*arguments))


def of_warp(family, of_gradient, dtype, log2_size, unit=1):
    return family.Kind(of_gradient, dtype, dtype, family.aten.softmax_forward(1 << log2_size, dtype), log2_size, unit)


@pytest.mark.parametrize("log2_size", [2, 3, 5, 6, 8, 10])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_gradient", [False, True])
def test_the_proof_tells_a_wrong_order(module, monkeypatch, seed, of_gradient, dtype, log2_size):
    family = module("ops.softmax")
    kind = of_warp(family, of_gradient, dtype, log2_size)
    assert not tells(family, monkeypatch, kind, seed, aten_model._warp_sum)
    missed = [name for name, order in orders_of(log2_size).items() if not tells(family, monkeypatch, kind, seed, order)]
    assert not missed


def order_of_block(kind, change=None):
    """The order of a kind's rows; `change` is one that a kernel might have by mistake."""
    order, trees = kind.order, [aten_model._tree_of_block, aten_model._block_in_sequence]
    threads = order.threads // (2 if change == "half the threads" else 1)
    vector = 1 if change == "no vectors" else order.vector
    sum_of_block = trees[order.in_sequence != (change == "the other tree")]
    shift = kind.shift + (change == "vectors that begin elsewhere")

    def of_threads(terms):
        if order.kind == "loop":
            return aten_model._shifted(terms, threads, vector, shift)
        return aten_model._softmax_vectors(terms, threads, vector)

    def row_sum(terms):
        if change != "two accumulators":
            return sum_of_block(of_threads(terms))
        # A row shorter than all threads' vectors is added element by element.
        one_by_one = vector == 1 or (order.kind == "loop" and terms.shape[1] < threads * vector)
        is_even = torch.arange(terms.shape[1]) // (threads if one_by_one else 1) % 2 == 0
        return sum_of_block(of_threads(terms * is_even) + of_threads(terms * ~is_even))

    return row_sum


def orders_of_block(kind, change):
    """That order in every row. Where a forward program keeps a row, in the rows with a small term alone, and in the others
    alone: the kernel adds and divides each of the two by instructions of its own."""
    wrong, right = order_of_block(kind, change), order_of_block(kind)
    if kind.of_gradient or not kind.steps:
        return [wrong]

    def in_some(with_small_term):
        return lambda terms: torch.where(is_added_by_fmas(terms) == with_small_term, wrong(terms), right(terms))

    return [in_some(False), in_some(True)]


def changes_of(kind):
    """The changes that make a difference."""
    changes = ["the other tree", "half the threads", "two accumulators"]
    changes += ["no vectors"] * (kind.order.vector > 1)
    return changes + ["vectors that begin elsewhere"] * kind.head


# A row of each kind of block: elements, its stride, and elements to its address.
BLOCKS = {"registers": (4096, 4096, 0), "shared": (9224, 9224, 0), "loop": (32776, 32776, 0)}
# Loops whose rows stay in registers: of fp32 and of 16 bits.
BLOCKS |= {"whole steps": (16384, 16384, 0), "more whole steps": (24576, 24576, 0)}
BLOCKS |= {"head": (9225, 9225, 0), "head, gaps": (9225, 9233, 0), "address": (9224, 9224, 1)}


@pytest.mark.parametrize("of_gradient", [False, True])
@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.long) for dtype in DTYPES[1:])])
@pytest.mark.parametrize(
    "block", ["registers", *(pytest.param(each, marks=pytest.mark.long) for each in [*BLOCKS][1:])]
)
def test_the_proof_tells_a_wrong_order_of_blocks(module, monkeypatch, seed, block, dtype, of_gradient):
    family = module("ops.softmax")
    for result in {dtype, torch.float32}:
        kind = of_block(family, of_gradient, dtype, result, block)
        assert not tells(family, monkeypatch, kind, seed, order_of_block(kind))
        missed = [
            change
            for change in changes_of(kind)
            for order in orders_of_block(kind, change)
            if not tells(family, monkeypatch, kind, seed, order)
        ]
        assert not missed, kind


def of_block(family, of_gradient, dtype, result, block):
    size, row_stride, shift = BLOCKS[block]
    # ATen's softmax of bf16 to fp32 reads a dense copy in fp32.
    is_copied = dtype == torch.bfloat16 and result == torch.float32
    return family.Kind.of(of_gradient, dtype, result, size, row_stride, 0 if of_gradient or is_copied else shift)


@pytest.mark.long
def test_1000_wrong_orders_are_told(module, monkeypatch, seed):
    """Each with a proof of its own: of a warp's rows, and of a block's."""
    family, choose = module("ops.softmax"), random.Random(seed)
    for _ in range(int(os.environ.get("LOSSLESS_PROOFS", 1000))):
        of_gradient, dtype = choose.random() < 0.5, choose.choice(DTYPES)
        if choose.random() < 0.25:
            log2_size = choose.randint(2, 10)
            kind = of_warp(family, of_gradient, dtype, log2_size)
            name, order = choose.choice([*orders_of(log2_size).items()])
        else:
            kind = of_block(family, of_gradient, dtype, choose.choice((dtype, torch.float32)), choose.choice([*BLOCKS]))
            name = choose.choice(changes_of(kind))
            order = choose.choice(orders_of_block(kind, name))
        assert tells(family, monkeypatch, kind, choose.randrange(1 << 30), order), (name, kind)


@interpreted
def test_long_warps_of_fp16_equal_the_transcription(module, seed):
    """fp16 rows of up to 2048 elements with fp32 results, as torch 2.14 and later add them up; longer ones as before."""
    family, generator, choose = module("ops.softmax"), torch.Generator().manual_seed(seed), random.Random(seed)
    for size in (1000, 1025, 1032, choose.randint(1026, 2047), 2048, 2049):
        x = rows_at_random(choose, generator, 5, size, torch.float16)
        found = forward_of(family, x, torch.float32, few=choose.random() < 0.5, long_warps=True)
        expected = aten_model.softmax(x, numpy_exp, cast, dtype=torch.float32, long_warps=True)
        assert_bits_equal(found, expected, f"{size}")


def test_long_warps_are_found_out(module, monkeypatch):
    """Which order eager has is told by one quotient."""
    family = module("ops.softmax")
    for long_warps in (False, True):

        def softmax(x, dim, dtype, long_warps=long_warps):
            return aten_model.softmax(x, dtype=dtype, long_warps=long_warps)

        monkeypatch.setattr(family, "functional", SimpleNamespace(softmax=softmax))
        assert family._adds_by_a_warp(CPU).tolist() == [long_warps]
    assert family.has_long_warps(torch.float16, CPU) is False


@pytest.mark.parametrize("long_warps", [False, True])
@pytest.mark.parametrize("of_gradient", [False, True])
def test_a_proof_has_rows_of_its_kind(module, chooser, of_gradient, long_warps):
    """Also the shortest and the longest; every length leads to a kind that has rows."""
    family, kinds, more = module("ops.softmax"), {}, {"long_warps": long_warps}
    few = chooser.sample((*BLOCK_SIZES, *LONG_SIZES, 128256), 8)
    for dtype in DTYPES:
        for result in {dtype, torch.float32}:
            for size in few:
                for gap, shift in ((0, 0), (1, 0), (8, 0), (0, 1)):
                    if shift and (of_gradient or size <= 9216 or (result != dtype and dtype == torch.bfloat16)):
                        continue
                    kind = family.Kind.of(of_gradient, dtype, result, size, size + gap, shift, **more)
                    kinds.setdefault(kind, []).append(size)
    for kind, sizes in kinds.items():
        found = family._sizes(kind, long_warps)
        for size in found:
            of_rows = kind.dtype, kind.result, size, family._row_stride(kind, size), kind.shift
            assert family.Kind.of(of_gradient, *of_rows, **more) == kind
        if kind.order.kind != "warp":
            assert found[0] <= min(sizes), kind
            assert not kind.steps or found[-1] >= max(sizes), kind


@interpreted
@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.long) for dtype in DTYPES[1:])])
def test_a_proof_is_of_the_kernel_that_will_run(module, monkeypatch, dtype):
    """Of its kind, of rows on both ends of it, and of what is not a number."""
    family, seen = module("ops.softmax"), []
    monkeypatch.setattr(family, "_PROOF_ELEMENTS", dict.fromkeys(DTYPES, 8192))
    monkeypatch.setattr(family, "_BLOCK_ROWS", 6)
    monkeypatch.setattr(family, "_GRADIENT_ROWS", 32)
    bind = family._bind

    def spy(kind, rows, size, row_stride, device):
        seen.append((kind, size))
        return bind(kind, rows, size, row_stride, device)

    def proved(kind):
        seen.clear()
        comparisons = family._gradient_comparisons if kind.of_gradient else family._comparisons
        for what, found, expected in comparisons(kind, CPU):
            assert found.stride() == expected.stride() and found.isnan().any() and found.isfinite().any(), what
        assert {kind for kind, _ in seen} == {kind}
        return {size for _, size in seen}

    monkeypatch.setattr(family, "_bind", spy)
    for of_gradient in (False, True):
        for log2_size in (0, 1, 3, 5, 10):
            for unit in (1, 2, 4, 8):
                if unit > min(1 << log2_size, 16 // dtype.itemsize):
                    continue
                sizes = (
                    {(1 << log2_size) // 2 + unit if log2_size else 1, 1 << log2_size}
                    if unit < 1 << log2_size
                    else {unit}
                )
                assert proved(of_warp(family, of_gradient, dtype, log2_size, unit)) == sizes
    assert proved(family.Kind.of(False, dtype, dtype, 9225, 9225, 1)) == {9217, 40001}
    assert proved(family.Kind.of(True, dtype, torch.float32, 1028, 1028)) == {1028}


# What surrounds the kernels


def gradients_of(function, x, dy):
    leaf = x.detach().requires_grad_()
    out = function(leaf)
    (gradient,) = torch.autograd.grad(out, leaf, dy)
    return out.detach(), gradient


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_autograd_gets_what_the_kernels_compute(kernel, module, seed, dtype):
    family, generator = module("ops.softmax"), torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 3, 5, 40, generator=generator).to(dtype).unbind()
    expected = forward_of(family, x.view(15, 40)).view(x.shape)
    theirs = backward_of(family, dy.view(15, 40), expected.view(15, 40)).view(x.shape)
    for _ in range(2):  # The second call is recognised.
        for dim in (-1, 2):
            out, gradient = gradients_of(lambda x: kernel.softmax(x, dim), x, dy)  # noqa: B023
            assert_bits_equal(out, expected)
            assert_bits_equal(gradient, theirs)
            assert_bits_equal(kernel.softmax(x, dim), expected)
    leaf = x.clone().requires_grad_()
    assert kernel.softmax(leaf).grad_fn.name() == "SoftmaxBackward"
    assert torch.autograd.grad(kernel.softmax(leaf), leaf, None if x.numel() == 1 else dy * 0)[0].shape == x.shape


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_of_the_result(kernel, module, seed, dtype):
    """16 bits to fp32 in one pass; the gradient returns in the input's dtype. Other dtypes are eager's."""
    family, generator = module("ops.softmax"), torch.Generator().manual_seed(seed)
    for size in (40, 1100):
        x, dy = torch.randn(2, 3, size, generator=generator).unbind()
        x = x.to(dtype)
        for _ in range(2):  # The second call is recognised.
            out, gradient = gradients_of(lambda x: kernel.softmax(x, -1, torch.float32), x, dy)
            assert out.dtype == torch.float32 and gradient.dtype == dtype
            assert_bits_equal(out, forward_of(family, x, torch.float32))
            assert_bits_equal(gradient, backward_of(family, dy, out, dtype))
            same, of_same = gradients_of(lambda x: kernel.softmax(x, -1, x.dtype), x, dy.to(dtype))
            assert_bits_equal(same, forward_of(family, x))
            assert_bits_equal(of_same, backward_of(family, dy.to(dtype), same))
        for other in (torch.float64, torch.float16, torch.bfloat16):
            if other != dtype:
                assert family.replacement(x, -1, other) is None
                assert_bits_equal(kernel.softmax(x, -1, other), functional.softmax(x, -1, dtype=other))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert family.replacement(x, -1, torch.float32) is not None


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_at_any_address(kernel, module, seed, dtype):
    """ATen's vectors begin at multiples of 16 bytes. A recognised call must not stand for one at another address."""
    family, size = module("ops.softmax"), 9224
    there = torch.randn(2 * size + 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
    expected = {}
    for first in (0, 1, 3, 0, 1):
        x = there[first : first + 2 * size].view(2, size)
        assert x.data_ptr() % 16 == first * dtype.itemsize % 16
        expected[first] = aten_model.softmax(x, numpy_exp, cast, misaligned=first % (16 // dtype.itemsize))
        assert_bits_equal(kernel.softmax(x), expected[first], f"{first} elements on")
    moved = torch.empty(2 * size + 1, dtype=dtype)[1:].view(2, size).copy_(expected[0])
    dy = there[: 2 * size].view(2, size)
    family.gradient(dy, expected[0])
    assert_bits_equal(family.gradient(dy, moved), family._formula(dy, moved, dtype))


LAYOUTS = {
    "rows apart": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every other row": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "one row for all": lambda x: x[:1, :1].expand_as(x),
    "matrices apart": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "columns first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}
WITH_KERNEL = ("rows apart", "every other row", "one row for all")


@interpreted
@pytest.mark.parametrize("of", ["input", "gradient"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_dense_whatever_the_layout(kernel, module, seed, layout, of):
    family, generator = module("ops.softmax"), torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 4, 6, 40, generator=generator).unbind()
    arranged = LAYOUTS[layout](x if of == "input" else dy)
    arguments = (arranged, dy) if of == "input" else (x, arranged)
    results = gradients_of(kernel.softmax, *arguments)
    for found, theirs in zip(results, gradients_of(lambda x: functional.softmax(x, -1), *arguments)):
        assert found.stride() == theirs.stride() == x.stride()
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        torch.testing.assert_close(found, theirs)
    calls = family._calls if of == "input" else family._gradient_calls
    (found,) = [found for key, found in calls.resolved.items() if arranged.stride() in [part[2] for part in key[1:]]][
        :1
    ]
    assert (found is not None) == (layout in WITH_KERNEL)


@pytest.fixture(autouse=True)
def no_calls(module):
    for calls in (module("ops.softmax")._calls, module("ops.softmax")._gradient_calls):
        calls.clear()


def outside():
    x = torch.randn(3, 4, 40)
    return {
        "float64": (x.double(), -1),
        "another dimension": (x, 1),
        "no dimension": (x[0, 0, 0], -1),
        "no rows": (x[:0], -1),
        "no elements": (x[..., :0], -1),
        "a subclass": (x.as_subclass(type("Other", (torch.Tensor,), {})), -1),
        "a dimension by its number": (x, -3),
    }


@pytest.mark.parametrize("case", outside())
def test_outside_the_domain_eager_runs(kernel, module, case):
    x, dim = outside()[case]
    assert module("ops.softmax").replacement(x, dim) is None
    assert_bits_equal(
        kernel.softmax(x, dim).as_subclass(torch.Tensor),
        functional.softmax(x, dim, _stacklevel=4).as_subclass(torch.Tensor),
    )


def test_what_eager_refuses_is_refused(kernel):
    with pytest.raises(IndexError, match="Dimension out of range"):
        kernel.softmax(torch.ones(2, 3), 2)
    with pytest.raises(TypeError, match=r"input: .* found list"):
        kernel.softmax([1.0])
    with pytest.raises(TypeError, match=r"input: .* found torch.int64"):
        kernel.softmax(torch.ones(2, dtype=torch.int64))


@interpreted
def test_under_autocast_16_bits_are_eagers(kernel, module):
    """CUDA's computes in fp32. A call without autocast that is recognised must not stand for one with it."""
    x = torch.randn(4, 40).half()
    for _ in range(2):
        kernel.softmax(x)
        assert len(module("ops.softmax")._calls.recent) == 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for tensor in (x, x.bfloat16()):
                assert module("ops.softmax").replacement(tensor, -1) is None
                assert_bits_equal(kernel.softmax(tensor), functional.softmax(tensor, -1))
            assert module("ops.softmax").replacement(x.float(), -1) is not None
        assert module("ops.softmax").replacement(x, -1) is not None


@interpreted
def test_gradients_can_be_differentiated(kernel, seed):
    generator = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 4, 50, generator=generator).unbind()
    penalties = []
    for function in (kernel.softmax, lambda x: functional.softmax(x, -1)):
        leaf, weight = x.clone().requires_grad_(), dy.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf, weight, create_graph=True)
        penalties.append(torch.autograd.grad(gradient.square().sum(), (leaf, weight)))
    for found, expected in zip(*penalties):
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        torch.testing.assert_close(found, expected)
        assert found.any()


@interpreted
def test_an_output_must_not_change_before_the_backward_pass(kernel):
    leaf = torch.randn(3, 40, requires_grad=True)
    out = kernel.softmax(leaf)
    out.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@interpreted
def test_modes_checkpoints_and_hooks_get_eagers_gradients(kernel, seed):
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            names.append(str(function))
            return function(*arguments, **(named or {}))

    names, generator = [], torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 4, 50, generator=generator).unbind()
    _, expected = gradients_of(lambda x: functional.softmax(x, -1), x, dy)
    with Watching():
        assert_bits_equal(gradients_of(kernel.softmax, x, dy)[1], expected)
    assert "aten._softmax.default" in names and "aten._softmax_backward_data.default" in names

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(kernel.softmax, x, use_reentrant=False)

    # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
    torch.testing.assert_close(gradients_of(checkpointed, x, dy)[1], expected)
    names.clear()
    with Watching():  # Both computations of a checkpoint save the same tensors, whether a mode watches or not.
        assert_bits_equal(gradients_of(checkpointed, x, dy)[1], expected)
    assert names.count("aten._softmax.default") == 2
    transposed = lambda saved: saved.t().contiguous().t()  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, transposed):
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        torch.testing.assert_close(gradients_of(kernel.softmax, x, dy)[1], expected)
    # Under vmap and jvp other operations of eager's compute the formula, up to a few roundings.
    batched = torch.vmap(kernel.softmax)(x[None])
    torch.testing.assert_close(batched[0], functional.softmax(x, -1))
    tangent = torch.func.jvp(kernel.softmax, (x,), (dy,))[1]
    torch.testing.assert_close(tangent, torch.func.jvp(lambda x: functional.softmax(x, -1), (x,), (dy,))[1])


@interpreted
def test_without_proof_eager_runs(kernel, nothing_known, monkeypatch):
    """A CPU adds in another order than CUDA."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    x = torch.randn(6, 777)
    with pytest.warns(
        RuntimeWarning, match="softmax on cpu, torch.float32, rows of up to 1024 elements, output, keeps .*differ"
    ):
        assert_bits_equal(kernel.softmax(x), functional.softmax(x, -1))


@interpreted
def test_the_operators_for_torch_compile(kernel, module, seed):
    family, generator = module("ops.softmax"), torch.Generator().manual_seed(seed)
    namespace = getattr(torch.ops, family._softmax_op.namespace)
    x, dy = torch.randn(2, 3, 5, 40, generator=generator).unbind()
    y = kernel.softmax(x)
    torch.library.opcheck(namespace.softmax.default, (x.clone().requires_grad_(), None))
    torch.library.opcheck(namespace.softmax_backward.default, (dy, y, y.dtype))
    for found, expected in zip(
        gradients_of(lambda x: namespace.softmax(x, None), x, dy), gradients_of(kernel.softmax, x, dy)
    ):
        assert_bits_equal(found, expected)


# On a GPU: eager itself


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["warp", "block", "long"])
def test_output_and_gradient_are_those_of_eager(kernel, module, seed, monkeypatch, lengths):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    family, generator, choose = module("ops.softmax"), torch.Generator("cuda").manual_seed(seed), random.Random(seed)
    sizes = {"warp": SIZES, "block": BLOCK_SIZES, "long": LONG_SIZES}[lengths]
    for case in range(200 if lengths == "warp" else 60):
        size = choose.choice((choose.choice(sizes), choose.randint(sizes[0], sizes[-1])))
        shape = (choose.randint(1, 5), choose.randint(1, max(1, (1 << 20) // size)), size)
        dtype, gap = choose.choice(DTYPES), choose.choice((0, 0, 1, 8))
        result, shift = choose.choice((None, None, torch.float32)), choose.choice((0, 0, 1, 2)) * (gap == 0)
        label = f"case {case}, {shape} {dtype} to {result}, gap {gap}, shift {shift}"
        there = torch.randn(shift + 5 * shape[1] * (size + gap), generator=generator, device="cuda").to(dtype)
        there *= choose.choice((0.1, 1.0, 10.0))
        there = there[shift : shift + shape[0] * shape[1] * (size + gap)]
        x = there.view(*shape[:-1], size + gap)[..., :size]
        dy = torch.randn(*shape[:-1], size + gap, generator=generator, device="cuda").to(result or dtype)[..., :size]
        x[0, 0, choose.randrange(size)], dy[0, -1, 0] = choose.choice(SPECIAL), choose.choice(SPECIAL)
        x[-1, -1] = choose.choice(SPECIAL)
        assert family.replacement(x, -1, result) is not None, label
        found = gradients_of(lambda x: kernel.softmax(x, -1, result), x, dy)  # noqa: B023
        expected = gradients_of(lambda x: functional.softmax(x, -1, dtype=result), x, dy)  # noqa: B023
        for mine, theirs in zip(found, expected):
            assert_bits_equal(mine, theirs, label)
            assert mine.stride() == theirs.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_terms_are_those_of_eager(kernel, module, seed, monkeypatch, dtype):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for size in (40, 128, 1000, 1024, 2048, 2049, 4096, 9216, 9217, 9224, 16384, 20480, 24576, 32768, 50001):
        x = rows_with_tails(choose, generator, size, dtype).cuda()
        for result in {dtype, torch.float32}:
            assert module("ops.softmax").replacement(x, -1, result) is not None
            expected = functional.softmax(x, -1, dtype=result)
            assert_bits_equal(kernel.softmax(x, -1, result), expected, f"{size} to {result}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_transcription_is_what_eager_computes(module, seed, dtype):
    """Given the exponentials of the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    more = {"long_warps": module("ops.softmax").has_long_warps(dtype, torch.device("cuda"))}
    for size in SIZES + BLOCK_SIZES + LONG_SIZES:
        for result, shift in itertools.product({dtype, torch.float32}, (0, 1) if size > 9216 else (0,)):
            if shift and dtype == torch.bfloat16 and result == torch.float32:  # Eager's copy begins at a multiple.
                continue
            x = torch.randn(32 * size + shift, generator=generator, device="cuda").to(dtype)[shift:].view(32, size)
            dy = torch.randn(32, size, generator=generator, device="cuda").to(result)
            y, dx = gradients_of(lambda x: functional.softmax(x, -1, dtype=result), x, dy)  # noqa: B023
            exp = lambda x: torch.exp(x.cuda()).cpu()  # noqa: E731
            of_model = aten_model.softmax(x.cpu(), exp, dtype=result, misaligned=shift, **more)
            assert_bits_equal(of_model, y.cpu(), f"output of {size} to {result}, shift {shift}")
            of_model = aten_model.softmax_backward(dy.cpu(), y.cpu(), dtype=dtype)
            assert_bits_equal(of_model, dx.cpu(), f"gradient of {size} from {result}")


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_softmax_is_the_uncompiled_one(kernel, seed, dynamic):
    generator = torch.Generator("cuda").manual_seed(seed)
    for size in (40, 1000, 4096, 9224, 32001):
        # Each dtype and length is a recompilation; TorchDynamo stops after eight.
        torch._dynamo.reset()
        compiled = torch.compile(kernel.softmax, dynamic=dynamic, fullgraph=True)
        for dtype in DTYPES:
            for result in (None, torch.float32):
                x = torch.randn(30, size, generator=generator, device="cuda").to(dtype)
                dy = torch.randn(30, size, generator=generator, device="cuda").to(result or dtype)
                found = gradients_of(lambda x: compiled(x, -1, result), x, dy)  # noqa: B023
                for each, expected in zip(found, gradients_of(lambda x: kernel.softmax(x, -1, result), x, dy)):  # noqa: B023
                    assert_bits_equal(each, expected, f"{dtype} to {result}, {size}")
