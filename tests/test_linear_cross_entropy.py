"""The linear layer with its loss: eager's bits, one tensor of the logits' size, and logits that later passes still find."""

import gc

import pytest
import torch
from bits import assert_bits_equal
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("proof_off")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")

IGNORE = -100
TOKENS, HIDDEN, VOCABULARY = 6, 8, 2060


@pytest.fixture
def given(seed):
    generator = torch.Generator().manual_seed(seed)
    leaves = [
        torch.randn(*shape, generator=generator) for shape in ((TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    ]
    target = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    target[1] = IGNORE
    return leaves, target


def gradients(function, leaves, dtype=torch.float32):
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    loss = function(*leaves)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def ours(kernel, target, **options):
    return lambda hidden, weight, bias: kernel.linear_cross_entropy(hidden, weight, target, bias, **options)


def apart(loss, target, **options):
    return lambda hidden, weight, bias: loss(functional.linear(hidden, weight, bias), target, **options)


def assert_same(found, expected):
    for name, ours, theirs in zip(("loss", "hidden states", "weight", "bias"), found, expected, strict=True):
        assert_bits_equal(ours, theirs, name)


@pytest.fixture
def written(module, monkeypatch):
    """Whether each gradient of logits was written over them."""
    call, found = module("cross_entropy")._LossCall, []
    gradient = call.gradient

    def spy(self, logits, *arguments):
        out = gradient(self, logits, *arguments)
        found.append(out.data_ptr() == logits.data_ptr())
        return out

    monkeypatch.setattr(call, "gradient", spy)
    return found


@interpreted
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bits_are_those_of_the_layer_and_the_loss(kernel, given, written, dtype, reduction):
    leaves, target = given
    found = gradients(ours(kernel, target, reduction=reduction), leaves, dtype)
    assert written == [True]
    assert_same(found, gradients(apart(kernel.cross_entropy, target, reduction=reduction), leaves, dtype))
    assert written == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_kernels_eager_runs(kernel, module, monkeypatch, given, dtype):
    monkeypatch.setattr(module("cross_entropy"), "runs_kernels", lambda device: False)
    module("cross_entropy")._calls.clear()
    leaves, target = given
    eager = apart(lambda logits, target: functional.cross_entropy(logits.float(), target), target)
    assert_same(gradients(ours(kernel, target), leaves, dtype), gradients(eager, leaves, dtype))
    probabilities = torch.rand(TOKENS, VOCABULARY).softmax(-1)
    eager = apart(lambda logits, target: functional.cross_entropy(logits.float(), target), probabilities)
    assert_same(gradients(ours(kernel, probabilities), leaves), gradients(eager, leaves))
    module("cross_entropy")._calls.clear()


@interpreted
def test_sequences_are_flattened(kernel, given, written):
    (hidden, weight, bias), target = given
    found = gradients(ours(kernel, target.view(2, 3)), (hidden.view(2, 3, HIDDEN), weight, bias))
    expected = gradients(ours(kernel, target), (hidden, weight, bias))
    assert_same((found[0], found[1].view(TOKENS, HIDDEN), *found[2:]), expected)
    assert written == [True, True]


@interpreted
def test_a_graph_that_is_kept_can_be_walked_twice(kernel, given, written):
    leaves, target = given
    expected = gradients(apart(kernel.cross_entropy, target), leaves)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    loss = ours(kernel, target)(*leaves)
    written.clear()
    for last in (False, False, True):
        assert_same((loss.detach(), *torch.autograd.grad(loss, leaves, retain_graph=not last)), expected)
    assert written == [False, False, True]


@interpreted
def test_gradients_can_be_differentiated(kernel, given):
    leaves, target = given

    def second(function):
        given = [leaf.double().float().requires_grad_() for leaf in leaves]
        loss = function(*given)
        first = torch.autograd.grad(loss, given, create_graph=True)
        return *[each.detach() for each in first], *torch.autograd.grad(
            sum(each.square().sum() for each in first), given
        )

    for found, expected in zip(second(ours(kernel, target)), second(apart(kernel.cross_entropy, target)), strict=True):
        assert_bits_equal(found, expected)


@interpreted
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_and_hooks_keep_the_logits(kernel, given, written, reentrant):
    leaves, target = given
    expected = gradients(apart(kernel.cross_entropy, target), leaves)
    written.clear()
    function = ours(kernel, target)
    given = [leaf.detach().requires_grad_() for leaf in leaves]
    loss = checkpoint(function, *given, use_reentrant=reentrant)
    loss.backward()
    assert_same((loss.detach(), *(leaf.grad for leaf in given)), expected)
    with torch.autograd.graph.save_on_cpu():
        assert_same(gradients(function, leaves), expected)
    # A reentrant checkpoint computes without hooks.
    assert written == [reentrant, False]


@interpreted
def test_a_replaced_linear_function_may_keep_the_logits(kernel, given, monkeypatch, written):
    leaves, target = given
    expected, kept, linear = gradients(ours(kernel, target), leaves), [], functional.linear
    monkeypatch.setattr(functional, "linear", lambda *given: kept.append(linear(*given)) or kept[0])
    function = ours(kernel, target)
    assert_same(gradients(function, leaves), expected)
    assert written == [True, False]
    assert_bits_equal(kept[0].detach(), linear(*leaves).detach())


@interpreted
def test_frozen_heads_and_no_gradients(kernel, given):
    (hidden, weight, bias), target = given
    expected = gradients(apart(kernel.cross_entropy, target), (hidden, weight, bias))
    leaf = hidden.clone().requires_grad_()
    loss = kernel.linear_cross_entropy(leaf, weight.detach(), target, bias.detach())
    (found,) = torch.autograd.grad(loss, leaf)
    assert_bits_equal(loss.detach(), expected[0])
    assert_bits_equal(found, expected[1])
    with torch.no_grad():
        assert_bits_equal(kernel.linear_cross_entropy(hidden, weight, target, bias), expected[0])


def test_wrong_arguments_are_named(kernel, given):
    (hidden, weight, _), target = given
    with pytest.raises(TypeError, match="hidden_states: expected a real floating point dtype, found torch.int64"):
        kernel.linear_cross_entropy(hidden.long(), weight, target)
    with pytest.raises(TypeError, match="weight: expected a torch.Tensor, found list"):
        kernel.linear_cross_entropy(hidden, [1.0], target)
    with pytest.raises(ValueError, match='reduction: expected "mean", "sum" or "none", found \'max\''):
        kernel.linear_cross_entropy(hidden, weight, target, reduction="max")
    with pytest.raises(ValueError, match="batch_size"):
        kernel.linear_cross_entropy(hidden, weight, target[:3])


def peak(loss, *arguments) -> int:
    """Bytes that torch's CPU allocator held at most beside what it held before."""
    gc.collect()  # The allocator reports what is freed too.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss(*arguments).backward()
    held = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@interpreted
def test_memory_is_the_gradient_of_the_logits(kernel, seed):
    """Triton's interpreter allocates through numpy, so these are the tensors that the kernels' launches are given."""
    tokens, vocabulary = 8, 9_300
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(vocabulary, (tokens,), generator=generator)
    for dtype, of_eager in ((torch.float32, 2), (torch.float16, 4)):
        logits = torch.randn(tokens, vocabulary, generator=generator).to(dtype).requires_grad_()
        hidden = torch.randn(tokens, 16, generator=generator).to(dtype).requires_grad_()
        weight = torch.randn(vocabulary, 16, generator=generator).to(dtype)
        size, few = logits.numel() * logits.element_size(), 512 * tokens
        ours = peak(kernel.cross_entropy, logits, target)
        assert size <= ours <= size + few
        with_layer = peak(kernel.linear_cross_entropy, hidden, weight, target)
        assert size <= with_layer <= size + few
        logits.grad = None
        eager = peak(lambda x, target: functional.cross_entropy(x.float(), target), logits, target)
        print(f"{dtype}: ours {ours / size:.3f}, eager {eager / size:.3f} times the logits")
        assert eager >= of_eager * size
