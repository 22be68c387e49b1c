"""Cross-entropy's gradient computed with the loss: for the loss's gradient that is expected, and again for another one."""

import math

import pytest
import torch
from bits import assert_bits_equal
from test_cross_entropy import IGNORE, check, logits_and_targets, small_gpu  # noqa: F401
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

on_gpu = torch.cuda.is_available()
pytestmark = [
    pytest.mark.usefixtures("proof_off", "small_gpu"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero|All-NaN):RuntimeWarning"),
]
interpreted = pytest.mark.skipif(on_gpu, reason="the kernels run on the GPU here, not interpreted")
VOCABULARY = 4104


@pytest.fixture
def early(module, monkeypatch):
    """Also few logits get their gradient with the loss; collects whether each backward pass found it."""
    family, found = module("cross_entropy"), []
    monkeypatch.setattr(family, "_LEAST_BYTES_OF_AN_EARLY_GRADIENT", 0)
    monkeypatch.setattr(family, "_last_d_loss", {})
    gradient, make = family._LossCall.gradient, family._early

    def late(self, *arguments):
        found.append(False)
        return gradient(self, *arguments)

    def launches(*arguments):
        with_loss, corrected = make(*arguments)

        def watched(*tensors):
            found.append(True)
            return corrected(*tensors)

        return with_loss, watched

    monkeypatch.setattr(family._LossCall, "gradient", late)
    monkeypatch.setattr(family, "_early", launches)
    family._calls.clear()
    yield found
    family._calls.clear()


@interpreted
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("vocab", [2056, 4104, 9216, 9224, 12256, 32000])
def test_bits_are_those_of_the_model(module, seed, vocab, reduction):
    """The model's, by way of the separate kernels: for the expected gradient, for others, and for rows with infinities."""
    family, generator = module("cross_entropy"), torch.Generator().manual_seed(seed)
    for dtype in (torch.float32, torch.float16):
        x, target = logits_and_targets(generator, 11 if vocab < 9000 else 6, vocab, dtype)
        d_loss = torch.randn((), generator=generator)
        check(module, x, target, reduction, d_loss, label=f"{vocab} {dtype}")
        call = family._LossCall(x, IGNORE, reduction, early=True)
        loss, maxima, log_sums, count = call(x, target)
        expected = call.gradient(x, target, maxima, log_sums, d_loss, count)
        for guess in (d_loss, -d_loss, torch.tensor(math.nan), torch.tensor(0.0)):
            dx = torch.full(x.shape, 7.0, dtype=dtype)
            found = call(x, target, guess.clone(), dx)
            for what, one, other in zip(
                ("loss", "maxima", "log sums", "count"), found, (loss, maxima, log_sums, count)
            ):
                assert_bits_equal(one, other, what)
            if guess is d_loss:
                assert_bits_equal(dx, expected, "expected")
            call.early[1](x, target, maxima, log_sums, d_loss, count, guess.clone(), dx)
            assert_bits_equal(dx, expected, f"expected {guess}")


@interpreted
def test_a_gradient_that_was_expected_is_not_computed_again(module, seed):
    family, generator = module("cross_entropy"), torch.Generator().manual_seed(seed)
    x, target = logits_and_targets(generator, 5, VOCABULARY, torch.float32)
    call = family._LossCall(x, IGNORE, "mean", early=True)
    d_loss, dx = torch.tensor(0.5), torch.empty_like(x)
    _, maxima, log_sums, count = call(x, target, d_loss, dx)
    dx.fill_(3.0)
    call.early[1](x, target, maxima, log_sums, d_loss, count, d_loss.clone(), dx)
    assert dx.eq(3.0).all()


def test_which_logits(module):
    """Many bytes, in rows that ATen gives a block and whose accesses have 16 bytes."""
    family = module("cross_entropy")
    for shape, dtype, expected in (
        ((4096, 128256), torch.bfloat16, True),
        ((4096, 32000), torch.bfloat16, True),
        ((1024, 32000), torch.bfloat16, False),
        ((4096, 50257), torch.bfloat16, False),
        ((4096, 50260), torch.float32, True),
        ((1 << 20, 1000), torch.bfloat16, False),
        ((1 << 24, 4096), torch.bfloat16, False),
    ):
        assert family._has_early_gradient(torch.empty(shape, dtype=dtype, device="meta")) is expected, (shape, dtype)


def of_kernel(kernel, x, target, scale=1.0, divisor=None, retain=False):
    """The loss and the gradient, through the language models' loss if there is a divisor."""
    leaf = x.detach().clone().requires_grad_()
    if divisor is None:
        loss = kernel.cross_entropy(leaf, target)
    else:
        loss = kernel.causal_lm_loss(leaf, None, x.shape[1], num_items_in_batch=divisor, shift_labels=target)
    (loss * scale).backward(retain_graph=retain)
    return loss.detach(), leaf.grad


@interpreted
@pytest.mark.parametrize("divisor", [None, 7, 3.5, torch.tensor(5), torch.tensor(0.3)], ids=str)
def test_bits_do_not_depend_on_what_was_expected(kernel, module, monkeypatch, early, seed, divisor):
    """The next gradient is expected to be the last one: constant scales are right from the second step on."""
    generator = torch.Generator().manual_seed(seed)
    x, target = logits_and_targets(generator, 7, VOCABULARY, torch.float32)
    x.nan_to_num_(0.0, 1.0, -1.0)
    family, found = module("cross_entropy"), []
    scales = (1.0, 8.0, 8.0, 0.1, 1.0)
    for scale in scales:
        found.append(of_kernel(kernel, x, target, scale, divisor))
    assert early == [True] * len(scales)
    monkeypatch.setattr(family, "_LEAST_BYTES_OF_AN_EARLY_GRADIENT", 1 << 40)
    family._calls.clear()
    for scale, (loss, gradient) in zip(scales, found):
        expected = of_kernel(kernel, x, target, scale, divisor)
        assert_bits_equal(loss, expected[0], f"loss {scale}")
        assert_bits_equal(gradient, expected[1], f"gradient {scale}")
    assert early == [True] * len(scales) + [False] * len(scales)
    assert family._last_d_loss[x.device] == scales[-1]


@interpreted
def test_another_backward_pass_computes_again(kernel, early, seed):
    """Autograd may add to the tensor that it got."""
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(4, VOCABULARY, generator=generator), torch.tensor([3, IGNORE, 0, 9])
    leaf = x.clone().requires_grad_()
    loss = kernel.cross_entropy(leaf, target)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    copy = first.clone()
    first.fill_(5.0)
    (second,) = torch.autograd.grad(loss, leaf)
    assert_bits_equal(second, copy)
    assert early == [True, False]


@interpreted
def test_where_it_is_not_computed_with_the_loss(kernel, early, seed):
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(4, VOCABULARY, generator=generator), torch.tensor([3, IGNORE, 0, 9])
    expected = of_kernel(kernel, x, target)
    # The gradient takes the logits' memory.
    weight, hidden = torch.eye(VOCABULARY)[:, :8].clone().requires_grad_(), torch.randn(4, 8, generator=generator)
    kernel.linear_cross_entropy(hidden, weight, target).backward()
    # A checkpoint throws away what its first computation kept.
    leaf = x.clone().requires_grad_()
    checkpoint(lambda x: kernel.cross_entropy(x, target), leaf, use_reentrant=False).backward()
    assert_bits_equal(leaf.grad, expected[1])
    assert early == [True, False, False]
    with torch.no_grad():
        assert_bits_equal(kernel.cross_entropy(x, target), expected[0])
    # Double backward differentiates eager's formula.
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(kernel.cross_entropy(leaf, target), leaf, create_graph=True)
    gradient.square().sum().backward()
    assert leaf.grad.any() and early == [True, False, False]


@interpreted
def test_a_divisor_that_is_differentiated(kernel, early, seed):
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(4, VOCABULARY, generator=generator), torch.tensor([3, IGNORE, 0, 9])
    gradients = []
    for loss_of in (
        lambda x, n: kernel.causal_lm_loss(x, None, VOCABULARY, num_items_in_batch=n, shift_labels=target),
        lambda x, n: kernel.cross_entropy(x, target, reduction="sum") / n,
    ):
        leaf, divisor = x.clone().requires_grad_(), torch.tensor(4.0, requires_grad=True)
        loss_of(leaf, divisor).backward()
        gradients.append((leaf.grad, divisor.grad))
    for one, other in zip(*gradients):
        assert_bits_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [4104, 9224, 32000, 128256, 151936])
def test_bits_are_those_of_eager(kernel, early, seed, vocab, dtype):
    generator = torch.Generator("cuda").manual_seed(seed)
    for rows in (3, 700):
        x = (torch.randn(rows, vocab, device="cuda", generator=generator) * 3).to(dtype)
        target = torch.randint(vocab, (rows,), device="cuda", generator=generator)
        target[1] = IGNORE
        for scale, divisor in (
            (1.0, None),
            (1.0, None),
            (0.3, None),
            (1.0, 513),
            (64.0, torch.tensor(77, device="cuda")),
        ):
            loss, gradient = of_kernel(kernel, x, target, scale, divisor)
            leaf = x.clone().requires_grad_()
            if divisor is None:
                expected = functional.cross_entropy(leaf.float(), target)
            else:
                expected = functional.cross_entropy(leaf.float(), target, reduction="sum") / divisor
            (expected * scale).backward()
            assert_bits_equal(loss, expected.detach(), f"loss, {scale}, {divisor}")
            assert_bits_equal(gradient, leaf.grad, f"gradient, {scale}, {divisor}")
    assert set(early) == {True}
