"""The kernels in Triton's interpreter against the model of CUDA's arithmetic: fp32 and fp16, bit for bit.

The interpreter truncates where a GPU rounds to bf16 and knows no libdevice: bf16 and the last bit of the exponential belong
to the tests on a GPU. CPU eager sums in another order than CUDA's, so proof would rightly refuse and is off.
"""

import importlib
import random

import aten_model
import numpy
import pytest
import torch
from bits import assert_bits_equal

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")

DTYPES = (torch.float32, torch.float16)
# Every class of row counts; hidden sizes with one lane group, several steps, remainders and shared rows.
ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 40)
HIDDEN_SIZES = (64, 100, 128, 132, 260, 1000, 1024, 2048, 4100, 8192, 12288)


@pytest.fixture(autouse=True)
def proof_off(monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "off")


@pytest.fixture
def module(kernel):
    return lambda name: importlib.import_module(f"{kernel.__name__}.{name}")


def numpy_rsqrt(x):
    """The interpreter's: numpy's square root and division, each rounded on its own."""
    return torch.from_numpy(1.0 / numpy.sqrt(x.numpy()))


def random_cases(seed, count):
    choose = random.Random(seed)
    for _ in range(count):
        yield choose.choice(ROWS), choose.choice(HIDDEN_SIZES), choose.choice(DTYPES), choose.choice(DTYPES)


def test_rms_norm_equals_the_model(kernel, seed):
    generator = torch.Generator().manual_seed(seed)
    for rows, hidden_size, dtype, weight_dtype in random_cases(seed, 24):
        x = torch.randn(rows, hidden_size, generator=generator).to(dtype)
        weight = torch.randn(hidden_size, generator=generator).to(weight_dtype)
        expected = aten_model.rms_norm(x, weight, 1e-5, rsqrt=numpy_rsqrt)
        label = f"{rows}x{hidden_size} {dtype} {weight_dtype}"
        assert_bits_equal(kernel.rms_norm(x, weight, 1e-5), expected, label)


def test_rms_norm_gradients_equal_the_model(module, seed):
    rms_norm = module("rms_norm_backward")
    generator = torch.Generator().manual_seed(seed)
    for rows, hidden_size, dtype, weight_dtype in [*random_cases(seed, 12), (300, 128, *DTYPES), (2100, 64, *DTYPES)]:
        x = torch.randn(rows, hidden_size, generator=generator).to(dtype)
        weight = torch.randn(hidden_size, generator=generator).to(weight_dtype)
        dy = torch.randn(rows, hidden_size, generator=generator).to(torch.promote_types(dtype, weight_dtype))
        rstd = aten_model.rms_norm_statistics(x, 1e-5).rstd
        expected = aten_model.rms_norm_backward(dy, x, weight, rstd)
        backward = rms_norm.resolve(dy, x, weight, rstd[:, None], True, True)
        found = backward(dy, x, weight, rstd[:, None])
        label = f"{rows}x{hidden_size} {dtype} {weight_dtype}"
        assert_bits_equal(found.dx, expected.dx[0], f"dx of {label}")
        if dtype == torch.float32:
            assert_bits_equal(found.dx_mean, expected.dx[1], f"dx through the mean of {label}")
        assert_bits_equal(found.dweight, expected.dweight, f"dweight of {label}")
