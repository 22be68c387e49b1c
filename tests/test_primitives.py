"""Exponentials and reciprocals of `kernels_src/primitives.py`, of all inputs."""

import pytest
import torch
from bits import assert_bits_equal

try:
    import triton
    import triton.language as tl
except ImportError:
    pytest.skip("needs Triton", allow_module_level=True)

pytestmark = pytest.mark.gpu


@triton.jit
def compute(x_ptr, exp_ptr, sum_ptr, reciprocal_ptr, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + index)
    tl.store(exp_ptr + index, exp(x))  # noqa: F821
    tl.store(sum_ptr + index, exp_add(tl.full([SIZE], 1.5, tl.float32), x))  # noqa: F821
    tl.store(reciprocal_ptr + index, reciprocal(x, NORMAL=True))  # noqa: F821


def test_exponentials_and_reciprocals_of_all_inputs(module):
    """All 2**32 exponentials have eager's bits, and so have the reciprocals of NaN and of magnitudes from 2**-126 to 2**125."""
    primitives, step = module("kernels_src.primitives"), 1 << 27
    for name in ("exp", "exp_add", "reciprocal"):
        compute.fn.__globals__[name] = getattr(primitives, name)
    found = torch.empty(3, step, device="cuda")
    reciprocals = 0
    for start in range(-(1 << 31), 1 << 31, step):
        x = torch.arange(start, start + step, device="cuda").to(torch.int32).view(torch.float32)
        compute[(step // 1024,)](x, *found, SIZE=1024, num_warps=4, enable_fp_fusion=False)
        expected = torch.exp(x)
        assert_bits_equal(found[0], expected, f"exponentials from {start}")
        # The product is exact, or subnormal and too small to change 1.5.
        assert_bits_equal(found[1], 1.5 + expected, f"sums of exponentials from {start}")
        magnitude = x.abs()
        normal = ((magnitude >= 2.0**-126) & (magnitude <= 2.0**125)) | x.isnan()
        assert_bits_equal(found[2][normal], torch.reciprocal(x)[normal], f"reciprocals from {start}")
        reciprocals += int(normal.sum())
    assert reciprocals > 0.98 * 2**32
