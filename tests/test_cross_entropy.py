"""Cross-entropy: the kernels in Triton's interpreter against the model of CUDA's arithmetic, and what surrounds them.

The interpreter has numpy's exponentials, for the model too, and rounds an FMA twice. It truncates to bf16: gradients are compared
in fp32 and fp16.
"""

import itertools
import math
import random

import aten_model
import numpy
import pytest
import torch
from bits import assert_bits_equal

interpreted = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero|underflow):RuntimeWarning"),
]
pytestmark = [*interpreted, pytest.mark.usefixtures("proof_off")]

IGNORE = -100
# Every kernel of ATen's, both sides of where the next one begins, and vocabularies of language models.
SHORT = (2, 3, 31, 32, 33, 1000, 1024, 1025, 2048, 2049, 4100, 9216, 9217, 9220, 12252, 12253, 12256)
LONG = (32000, 50257, 50304, 128256, 151936, 248320)


def numpy_exp(x):
    return torch.from_numpy(numpy.asarray(numpy.exp(x.numpy())))


def numpy_log(x):
    return torch.from_numpy(numpy.asarray(numpy.log(x.numpy())))


def twice_rounded(a, b, c):
    return a * b + c


def logits_and_targets(generator, rows, vocab, dtype):
    """Rows whose sums of exponentials have many terms that count, some with infinities and NaN, some without a target."""
    x = (torch.randn(rows, vocab, generator=generator) * 2).to(dtype)
    target = torch.randint(vocab, (rows,), generator=generator)
    special = iter(torch.randperm(rows, generator=generator)[: rows - 3].tolist())
    for value in (math.nan, math.inf, -math.inf):
        for whole, ignored in itertools.product((False, True), (False, True)):
            row = next(special, None)
            if row is not None:
                x[row, slice(None) if whole else target[row]] = value
                target[row] = IGNORE if ignored else target[row]
    for row in itertools.islice(special, 2):
        target[row] = IGNORE
    return x, target


def model_of(x, target, misaligned=0):
    """logp of all classes, the sum of the exponentials' logarithm, and the maximum."""
    h = x.float().contiguous()
    maximum, total = aten_model.softmax_statistics(h, misaligned, numpy_exp)
    log_sum = numpy_log(total)
    return maximum, log_sum, (h - maximum[:, None]) - log_sum[:, None]


def check(module, x, target, reduction, d_loss, misaligned=0, label=""):
    """Statistics, loss and gradient of one call against the model."""
    family = module("cross_entropy")
    call = family._Call(x, IGNORE, reduction, family.PLAN)
    loss, maxima, log_sums, count = call(x, target)
    maximum, log_sum, logp = model_of(x, target, misaligned)
    counts = target != IGNORE
    # The maximum of a row with NaN is any number: the logarithm is NaN.
    known = counts & ~torch.isnan(log_sum)
    assert_bits_equal(maxima[known] + 0.0, maximum[known] + 0.0, f"maxima of {label}")
    assert_bits_equal(log_sums[counts], log_sum[counts], f"log sums of {label}")
    assert_bits_equal(log_sums[~counts], log_sum[~counts] * 0.0, f"log sums of ignored rows of {label}")
    number = family._REDUCTIONS[reduction]
    expected, total_weight = torch.ops.aten.nll_loss_forward(logp, target, None, number, IGNORE)
    assert_bits_equal(loss, expected, f"loss of {label}")
    assert_bits_equal(count, total_weight, f"rows that count of {label}")
    gradient = call.gradient(x, target, maxima, log_sums, d_loss, count)
    weight = total_weight if reduction == "mean" else None
    expected = aten_model.cross_entropy_backward(logp, target, IGNORE, d_loss, weight, numpy_exp, twice_rounded)
    assert_bits_equal(gradient, expected.to(x.dtype), f"gradient of {label}")


@pytest.mark.parametrize("vocab", SHORT + LONG)
def test_kernels_equal_the_model(module, seed, vocab):
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    rows, dtypes = (17, (torch.float32, torch.float16)) if vocab in SHORT else (5, (torch.float16,))
    for dtype in dtypes:
        x, target = logits_and_targets(generator, rows, vocab, dtype)
        reduction = choose.choice(("mean", "sum"))
        d_loss = choose.choice((torch.randn((), generator=generator), torch.tensor(0.0), torch.tensor(-0.0)))
        check(module, x, target, reduction, d_loss, label=f"{rows}x{vocab} {dtype} {reduction}")
