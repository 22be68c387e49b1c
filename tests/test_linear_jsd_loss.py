"""Two linear layers with the Jensen-Shannon divergence of their outputs: eager's bits, and gradients in the logits' memory.

The reference is TRL's formula on the outputs of `F.linear`. A CPU runs the same operations: bits are compared throughout.
"""

import functools
import inspect
import os

import pytest
import torch
from bits import assert_bits_equal
from test_linear_cross_entropy import peak
from test_slices import DTYPES, VOCABULARIES, eager_jsd
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# `LOSSLESS_CASES=300 pytest tests/test_linear_jsd_loss.py -k random` for docs/losses.md.
CASES = int(os.environ.get("LOSSLESS_CASES", 10))
HIDDEN, TEACHERS_HIDDEN = 6, 10


def eager(s, w, t, v, labels=None, student_bias=None, teacher_bias=None, *arguments, **options):
    logits = functional.linear(s, w, student_bias), functional.linear(t, v, teacher_bias)
    return eager_jsd(*logits, labels, *arguments, **options)


@pytest.fixture
def ours(kernel):
    return kernel.linear_jsd_loss


@pytest.fixture(autouse=True)
def written(module, monkeypatch, proof_off):
    """Slices of the fewest rows, no kernels, and whether each gradient was written over the logits. Verification would have
    its own."""
    slices, found = module("ops.slices"), []
    gradient_of = slices._gradient_of

    def spy(tensor, *arguments):
        out = gradient_of(tensor, *arguments)
        found.append(out.data_ptr() == tensor.data_ptr())
        return out

    monkeypatch.setattr(module("ops.jsd"), "replacement", lambda *_: None)
    monkeypatch.setattr(slices, "_SLICE_ELEMENTS", 1)
    monkeypatch.setattr(slices, "_gradient_of", spy)
    return found


def tensors(seed, shape=(2, 13), vocabulary=50, dtype=torch.float32):
    """Hidden states and weight of the student, then of the teacher."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (*shape, HIDDEN), (vocabulary, HIDDEN), (*shape, TEACHERS_HIDDEN), (vocabulary, TEACHERS_HIDDEN)
    return [torch.randn(each, generator=generator).to(dtype) for each in shapes]


def labels_of(hidden):
    return torch.arange(hidden[..., 0].numel()).view(hidden.shape[:-1]) % 5 - 1


def results(function, given, wanted=(True,) * 4, dy=0.7):
    leaves = [each.detach().clone().requires_grad_(grad) for each, grad in zip(given, wanted)]
    out = function(*leaves)
    (out * dy).sum().backward()  # A reentrant checkpoint refuses `torch.autograd.grad`.
    return out.detach(), *(leaf.grad for leaf in leaves)


def assert_same(found, expected, label=""):
    names = "result", "student's hidden states", "student's weight", "teacher's hidden states", "teacher's weight"
    for name, mine, theirs in zip(names, found, expected, strict=True):
        assert (mine is None) is (theirs is None), f"{name} {label}"
        if mine is not None:
            assert_bits_equal(mine, theirs, f"{name} {label}")
            assert mine.stride() == theirs.stride()


def both(ours, call, given, **options):
    found, expected = (results(functools.partial(call, f), given, **options) for f in (ours, eager))
    assert_same(found, expected)


def loss(f, *given):
    return f(*given, labels=labels_of(given[0]), beta=0.3, temperature=0.9)


def test_random_cases_have_the_bits_of_the_composed_formula(ours, monkeypatch, written, seed, chooser):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")  # A failed verification is an error.
    generator, choose = torch.Generator().manual_seed(seed), chooser
    for case in range(CASES):
        shape, vocabulary = choose.choice(((choose.randint(1, 40),), (2, 13), (1, 2, 9))), choose.choice(VOCABULARIES)
        dtype = choose.choice(DTYPES)
        given = tensors(seed + case, shape, vocabulary, dtype)
        bias = torch.randn(vocabulary, generator=generator).to(dtype)
        options = {
            "labels": choose.choice((None, labels_of(given[0]), torch.full(shape, -100))),
            "student_bias": choose.choice((None, bias)),
            "teacher_bias": choose.choice((None, bias)),
            "beta": choose.choice((0, 1, 0.5, 0.1)),
            "temperature": choose.choice((1.0, 0.9, 2)),
            "reduction": choose.choice(("batchmean", "sum", "mean", "none")),
            "num_items_in_batch": choose.choice((None, None, 7, torch.tensor(9))),
        }
        wanted = choose.choice(((True,) * 4, (True, True, False, False), (True, False, False, False)))
        call = functools.partial(lambda f, *given, **options: f(*given, **options), **options)
        found, expected = (results(functools.partial(call, f), given, wanted) for f in (ours, eager))
        assert_same(found, expected, f"of {shape} {vocabulary} {dtype} {options}")
    assert any(written)


def test_gradients_take_the_logits_memory(ours, written, seed):
    both(ours, loss, tensors(seed))
    assert written == [True, True]
    both(ours, loss, tensors(seed), wanted=(True, True, False, False))
    assert written == [True, True, True]


def test_without_gradients(ours, seed):
    given = tensors(seed)
    with torch.no_grad():
        assert_bits_equal(loss(ours, *given), loss(eager, *given))


def test_a_graph_that_is_kept_can_be_walked_twice(ours, written, seed):
    given = tensors(seed)
    expected = results(functools.partial(loss, eager), given)[1:]
    leaves = [each.requires_grad_() for each in given]
    out = loss(ours, *leaves)
    for last in (False, False, True):
        found = torch.autograd.grad(out, leaves, torch.tensor(0.7), retain_graph=not last)
        assert_same((None, *found), (None, *expected))
    assert written == [False] * 4 + [True] * 2


def test_gradients_can_be_differentiated(ours, written, seed):
    def first_and_second(f):
        leaves = [each.requires_grad_() for each in tensors(seed)]
        first = torch.autograd.grad(loss(f, *leaves), leaves, create_graph=True)
        return first, torch.autograd.grad(sum(each.square().sum() for each in first), leaves)

    (first, second), (expected, of_expected) = first_and_second(ours), first_and_second(eager)
    assert_same((None, *(each.detach() for each in first)), (None, *(each.detach() for each in expected)))
    for mine, theirs in zip(second, of_expected):
        # Autograd adds the terms of a second derivative in another order.
        torch.testing.assert_close(mine, theirs)
    assert not written


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_hooks_keep_the_logits(ours, written, seed, reentrant):
    given = tensors(seed)
    both(ours, lambda f, *given: checkpoint(functools.partial(loss, f), *given, use_reentrant=reentrant), given)
    # A reentrant checkpoint computes without hooks.
    assert written == [reentrant] * 2
    with torch.autograd.graph.save_on_cpu():
        both(ours, loss, given)
    assert written == [reentrant] * 2 + [False] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(ours, written, seed, dtype):
    def cast(f, *given):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(f, *given)

    both(ours, cast, tensors(seed, dtype=dtype))
    assert written == [True, True]


@pytest.mark.parametrize("scale", [65536.0, 1 / 3, 0.0, -0.0])
def test_scaled_losses(ours, written, seed, scale):
    """Loss scaling, and DDP's division by the number of processes."""
    both(ours, loss, tensors(seed), dy=scale)
    assert written == [True, True]


def test_transforms_see_eagers_operations(ours, written, seed):
    given = tensors(seed)
    gradient, tangent = (
        lambda f: torch.func.grad(functools.partial(loss, f), (0, 1, 2, 3))(*given),
        lambda f: torch.func.jvp(functools.partial(loss, f), tuple(given), tuple(given)),
    )
    for transform in (gradient, tangent):
        for mine, theirs in zip(transform(ours), transform(eager), strict=True):
            assert_bits_equal(mine, theirs)
    assert not written


def test_compiled(ours, seed):
    torch._dynamo.reset()
    compiled = torch.compile(functools.partial(loss, ours), backend="eager")
    assert_same(results(compiled, tensors(seed)), results(functools.partial(loss, eager), tensors(seed)))


def test_a_replaced_linear_function_may_keep_the_logits(ours, monkeypatch, written, seed):
    given, kept, linear = tensors(seed), [], functional.linear
    expected = results(functools.partial(loss, eager), given)
    monkeypatch.setattr(functional, "linear", lambda *given: kept.append(linear(*given)) or kept[-1])
    assert_same(results(functools.partial(loss, ours), given), expected)
    assert written == [False, False]
    assert_bits_equal(kept[0].detach(), linear(given[0], given[1], None))


def test_outside_of_the_domain_eager_runs(ours, written, seed):
    """Logits of other shapes, which broadcast, and fp64."""
    s, w, t, v = tensors(seed)
    both(ours, lambda f, *given: f(*given, beta=0), [s, w, t[:1], v])
    both(ours, lambda f, *given: f(*given), [s[0, :3], w, t[0, :3], v])
    assert not written
    both(ours, loss, [each.double() for each in (s, w, t, v)])


def test_wrong_arguments_are_named(ours, seed):
    s, w, t, v = tensors(seed)
    for name, given in {
        "student_hidden_states": (None, w, t, v),
        "student_weight": (s, w.long(), t, v),
        "teacher_hidden_states": (s, w, [1.0], v),
        "teacher_weight": (s, w, t, v.bool()),
    }.items():
        with pytest.raises(TypeError, match=f"{name}: expected a "):
            ours(*given)
    with pytest.raises(ValueError, match="reduction: expected one of batchmean, sum, mean, none, found 'max'"):
        ours(s, w, t, v, reduction="max")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ours(s, v, t, v)
    with pytest.raises(RuntimeError, match="equal size"):
        ours(s, w, t, v[:7])


def test_its_options_are_those_of_the_loss(kernel):
    ours, loss = (inspect.signature(f).parameters for f in (kernel.linear_jsd_loss, kernel.generalized_jsd_loss))
    shared = [name for name in loss if name not in ("student_logits", "teacher_logits")]
    assert [name for name in ours if name in loss] == shared
    assert all(ours[name] == loss[name] for name in shared)


def test_memory_is_the_logits_and_the_terms(ours, seed):
    """At its peak, forward and backward, in tensors of the student's logits' size; slices have 8 of 128 rows."""
    s, w, t, v = tensors(seed, (128,), 2048)
    s.requires_grad_()
    size = 128 * 2048 * 4
    found = {}
    for name, function in (("ours", ours), ("eager", eager)):
        found[name] = peak(functools.partial(function, s, w, t, v)) / size
        s.grad = None
    print(found)
    assert 3.0 <= found["ours"] < 3.7 and found["eager"] > 12


@pytest.mark.gpu
def test_on_a_gpu(ours, written, seed):
    for vocabulary, dtype in ((32000, torch.bfloat16), (50257, torch.float32), (128256, torch.float16)):
        both(ours, loss, [each.cuda() for each in tensors(seed, (2, 70), vocabulary, dtype)])
    assert written and all(written)
