"""Quotients by a product and a shift."""

import itertools
import random

import pytest
import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    pytest.skip("needs Triton", allow_module_level=True)

pytestmark = pytest.mark.either

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOST = 2**31 - 1
EDGES = (1, 2, 3, 5, 7, 8, 32, 641, 4095, 4096, 65537, 2**30 - 1, 2**30, 2**30 + 1, MOST - 1, MOST)


@pytest.fixture
def chooser(seed):
    return random.Random(seed)


@pytest.fixture
def divider(module):
    return module("core.layout").divider


def divisors(chooser):
    return [*EDGES, *(chooser.randint(1, 1 << chooser.randint(1, 31)) - 1 or 1 for _ in range(200))]


def numbers(divisor, chooser, count=40):
    """The ends of the range, and at most 3 * count numbers at which the quotient changes, the largest among them."""
    multiples = [MOST // divisor * divisor, *(chooser.randint(0, MOST // divisor) * divisor for _ in range(count - 1))]
    near = (multiple + step for multiple, step in itertools.product(multiples, (-1, 0, 1)))
    return [0, MOST - 1, MOST, *(number for number in near if 0 <= number <= MOST)]


def test_quotients_by_a_multiplier_and_a_shift(divider, chooser):
    for divisor in divisors(chooser):
        both = divider(divisor)
        multiplier, shift = both >> 32 & 0xFFFFFFFF, both & 0xFFFFFFFF
        assert -(2**63) <= both < -(2**31), "Triton's interpreter may take it as a number of 32 bits"
        for number in numbers(divisor, chooser):
            assert number * multiplier >> 31 + shift == number // divisor, (number, divisor)


@pytest.mark.parametrize("rounding", ["down", "up by two"])
def test_another_multiplier_is_caught(divider, chooser, rounding):
    wrong = 0
    for divisor in EDGES:
        both = divider(divisor)
        multiplier, shift = (both >> 32 & 0xFFFFFFFF) + (-1 if rounding == "down" else 1), both & 0xFFFFFFFF
        wrong += any(number * multiplier >> 31 + shift != number // divisor for number in numbers(divisor, chooser))
    assert wrong


def test_kernels_divide(module, divider, chooser):
    quotient = module("kernels_src.indices").quotient

    @triton.jit(do_not_specialize=["by_divisor"])
    def divide(number_ptr, out_ptr, by_divisor: tl.int64, SIZE: tl.constexpr):
        index = tl.arange(0, SIZE)
        tl.store(out_ptr + index, quotient(tl.load(number_ptr + index), by_divisor))
        tl.store(out_ptr + SIZE + tl.program_id(0), quotient(tl.program_id(0), by_divisor))

    # Triton's interpreter finds functions among its module's names, not in a closure.
    getattr(divide, "fn", divide).__globals__["quotient"] = quotient
    for divisor in divisors(chooser)[:60]:
        found = numbers(divisor, chooser)
        few = found + [0] * (128 - len(found))
        for dtype in (torch.int32, torch.int64):
            number = torch.tensor(few, dtype=dtype, device=DEVICE)
            out = torch.full((2, 128), -1, dtype=torch.int64, device=DEVICE)
            divide[(128,)](number, out, divider(divisor), 128)
            expected = torch.stack((number // divisor, torch.arange(128, device=DEVICE) // divisor))
            assert torch.equal(out, expected), (divisor, dtype)
