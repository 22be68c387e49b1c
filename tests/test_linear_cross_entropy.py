"""The linear layer with its loss: eager's bits, one tensor of the logits' size, and logits that later passes still find."""

import functools
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
    """`most_held` by a loss and its backward pass."""
    return most_held(lambda: loss(*arguments).backward())


def most_held(function) -> int:
    """Bytes that torch's CPU allocator held at most beside what it held before."""
    gc.collect()  # The allocator reports what is freed too.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
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
        # A CPU that multiplies in fp16 (AVX512-FP16) arranges the weight anew for each product.
        with torch.no_grad():
            of_products = max(most_held(lambda: hidden @ weight.t()), most_held(lambda: logits @ weight))  # noqa: B023
        more = of_products if dtype == torch.float16 and of_products > size + few else 0
        assert size <= with_layer <= size + few + more
        logits.grad = None
        eager = peak(lambda x, target: functional.cross_entropy(x.float(), target), logits, target)
        print(f"{dtype}: ours {ours / size:.3f}, eager {eager / size:.3f} times the logits")
        assert eager >= of_eager * size


# Chunks of a frozen head


def by_rows(hidden, weight, bias=None):
    """A linear layer whose rows do not depend on their number, as a CPU's products of matrices may."""
    rows = torch.stack([weight @ row for row in hidden.reshape(-1, weight.shape[1])])
    return (rows if bias is None else rows + bias).view(*hidden.shape[:-1], len(weight))


@pytest.fixture
def linear(module, monkeypatch, nothing_known):
    """The numbers of rows of all linear layers, computed by `by_rows`."""
    found = []

    def spy(hidden, weight, bias=None):
        found.append(hidden.shape[:-1].numel())
        return by_rows(hidden, weight, bias)

    monkeypatch.setattr(functional, "linear", spy)
    monkeypatch.setattr(module("core.torch_internals"), "linear", spy)
    return found


@pytest.fixture
def many(seed):
    return forty_tokens(seed, 66)


def forty_tokens(seed, vocabulary):
    """Chunks of 16, 16 and 8."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((2, 20, HIDDEN), (vocabulary, HIDDEN), (vocabulary,))
    )
    target = torch.randint(vocabulary, (2, 20), generator=generator)
    target[0, 3], target[1, :9] = IGNORE, IGNORE
    return (hidden, weight, bias), target


def of_hidden_states(function, tensors, dtype=torch.float32):
    hidden, weight, bias = (each.to(dtype) for each in tensors)
    hidden.requires_grad_()
    loss = function(hidden, weight, bias)
    return loss.detach(), *torch.autograd.grad(loss, hidden)


CHUNKS, CHUNKS_TWICE, WHOLE = [16, 16, 8], [16, 16, 8] * 2, [40]


@interpreted
@pytest.mark.parametrize(
    "vocabulary, dtype, reduction",
    [
        (66, torch.float16, "mean"),
        (67, torch.float32, "sum"),
        pytest.param(9217, torch.float32, "mean", marks=pytest.mark.long),
    ],
)
def test_chunks_of_a_frozen_head_have_the_bits_of_the_whole(
    kernel, monkeypatch, seed, linear, vocabulary, dtype, reduction
):
    """Rows of 9217 numbers begin at another distance from a multiple of 16 bytes each, which decides their sums."""
    tensors, target = forty_tokens(seed, vocabulary)
    options = {"reduction": reduction}
    expected = of_hidden_states(ours(kernel, target, **options), tensors, dtype)
    assert linear == WHOLE
    options["chunk_size"] = 16
    for policy in ("off", "strict"):  # With "off" the loss's own kernels are taken, which a CPU's eager does not equal.
        monkeypatch.setenv("LOSSLESS_PROOF", policy)
        linear.clear()
        found = of_hidden_states(ours(kernel, target, **options), tensors, dtype)
        # Verification computes the whole and chunks, of random and of the given hidden states.
        assert linear == (CHUNKS_TWICE if policy == "off" else (WHOLE + CHUNKS) * 2 + CHUNKS_TWICE)
        assert_bits_equal(found[0], expected[0])
        assert_bits_equal(found[1], expected[1])
        assert found[1].stride() == expected[1].stride()
    linear.clear()
    of_hidden_states(ours(kernel, target, **options), tensors, dtype)
    assert linear == CHUNKS_TWICE
    with torch.no_grad():
        monkeypatch.setenv("LOSSLESS_PROOF", "off")
        linear.clear()
        assert_bits_equal(ours(kernel, target, **options)(*(each.to(dtype) for each in tensors)), expected[0])
        assert linear == CHUNKS


@interpreted
def test_chunks_with_other_bits_are_not_taken(kernel, module, monkeypatch, many, linear):
    """A product of fewer rows that rounds otherwise, in the logits or in their gradient alone."""
    tensors, target = many
    expected = of_hidden_states(ours(kernel, target), tensors)
    of_hidden_states(ours(kernel, target, chunk_size=16), tensors)  # The loss's own kernels are found again.
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    family = module("ops.linear_cross_entropy")
    layer = family._layer

    def of_logits(hidden, *arguments):
        leaf, logits = layer(hidden, *arguments)
        with torch.enable_grad():
            return leaf, logits if hidden.dim() == 3 else logits * (1 + 2**-23)

    def of_gradients(hidden, *arguments):
        leaf, logits = layer(hidden, *arguments)
        if hidden.dim() == 2:
            logits.register_hook(lambda gradient: gradient * (1 + 2**-23))
        return leaf, logits

    for wrong, what in ((of_logits, "the logits"), (of_gradients, "the gradient of the hidden states")):
        monkeypatch.setattr(family, "_layer", wrong)
        module("proof")._verdicts.clear()
        module("proof")._warned.clear()
        with pytest.warns(
            RuntimeWarning, match=rf"linear_cross_entropy .* chunks of 16 tokens, keeps .* of {what} differ"
        ):
            found = of_hidden_states(ours(kernel, target, chunk_size=16), tensors)
        linear.clear()
        assert_bits_equal(found[1], expected[1])
        of_hidden_states(ours(kernel, target, chunk_size=16), tensors)
        assert linear == WHOLE


@interpreted
@pytest.mark.parametrize(
    "case", ["weight", "bias", "autocast", "checkpoint", "few tokens", "another dtype", "not dense"]
)
def test_all_tokens_at_once_where_chunks_cannot_be(kernel, many, linear, case):
    (hidden, weight, bias), target = many
    given = [hidden, weight, bias]
    for place, name in ((1, "weight"), (2, "bias")):
        given[place] = given[place].clone().requires_grad_(case == name)
    if case == "another dtype":
        given[0] = hidden.half()
        with pytest.raises(RuntimeError):  # Of eager.
            ours(kernel, target, chunk_size=16)(*given)
        return
    if case == "not dense":
        given[1] = weight.t().contiguous().t()
    function = ours(kernel, target, chunk_size=48 if case == "few tokens" else 16)
    given[0] = hidden.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        loss = checkpoint(function, *given, use_reentrant=False) if case == "checkpoint" else function(*given)
    loss.backward()
    assert set(linear) == {40}
    assert all(each.grad is not None for each in given if each.requires_grad)


@interpreted
def test_chunks_walked_twice_and_differentiated(kernel, many, linear):
    tensors, target = many
    hidden, weight, bias = tensors
    expected = of_hidden_states(ours(kernel, target), tensors)
    leaf = hidden.clone().requires_grad_()
    loss = ours(kernel, target, chunk_size=16)(leaf, weight, bias)
    for last in (False, True):
        assert_bits_equal(torch.autograd.grad(loss, leaf, retain_graph=not last)[0], expected[1])
    second = []
    for options in ({}, {"chunk_size": 16}):
        leaf = hidden.clone().requires_grad_()
        loss = ours(kernel, target, **options)(leaf, weight, bias)
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        second.append((first.detach(), *torch.autograd.grad(first.square().sum(), leaf)))
    for found, expected in zip(*second):
        assert_bits_equal(found, expected)
    with torch.no_grad():
        leaf = hidden.clone().requires_grad_()
    loss = ours(kernel, target, chunk_size=16)(leaf * 1.0, weight, bias)
    weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@interpreted
def test_memory_of_chunks(kernel, module, monkeypatch, seed):
    """One chunk's logits at a time, and the hidden states' gradient."""
    launcher = module("launch").Launcher
    through_triton = launcher.through_triton

    def collecting(self, *arguments):
        through_triton(self, *arguments)
        gc.collect()  # The interpreter leaves cycles, which hold the tensors.

    monkeypatch.setattr(launcher, "through_triton", collecting)
    tokens, vocabulary, size = 64, 4_096, 16
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(vocabulary, (tokens,), generator=generator)
    hidden = torch.randn(tokens, 16, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, 16, generator=generator)
    chunk = size * vocabulary * 4
    found = peak(functools.partial(kernel.linear_cross_entropy, chunk_size=size), hidden, weight, target)
    print(f"{found / chunk:.3f} times a chunk's logits")
    assert chunk <= found <= chunk + 512 * tokens


def test_wrong_chunks_are_named(kernel, given):
    (hidden, weight, _), target = given
    for wrong in (0, -16, 24, 16.0, "16"):
        with pytest.raises(ValueError, match="chunk_size: expected a positive multiple of 16, found"):
            kernel.linear_cross_entropy(hidden, weight, target, chunk_size=wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_on_a_gpu(kernel, monkeypatch, seed, dtype):
    """Equal to the whole, whether verification takes them or not."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    generator = torch.Generator("cuda").manual_seed(seed)
    for tokens, size in ((2048, 1024), (3000, 256), (8192, 2048)):
        tensors = [
            torch.randn(shape, generator=generator, device="cuda")
            for shape in ((tokens, 1024), (32000, 1024), (32000,))
        ]
        target = torch.randint(32000, (tokens,), generator=generator, device="cuda")
        expected = of_hidden_states(ours(kernel, target), tensors, dtype)
        found = of_hidden_states(ours(kernel, target, chunk_size=size), tensors, dtype)
        for mine, theirs in zip(found, expected):
            assert_bits_equal(mine, theirs, f"{tokens} tokens in chunks of {size}")
