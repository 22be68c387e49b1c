"""Kullback-Leibler divergence, total variation distance and the full sum under them: the kernels in Triton's interpreter
against the transcription of ATen's operations, the proof's power, and what surrounds them.

The interpreter has numpy's exponentials and logarithms, for the transcription too, and truncates to bf16: `cast` does likewise.
"""

import math
import random

import aten_model
import numpy
import pytest
import torch
from bits import assert_bits_equal, bits_equal
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from wrong_orders import FULL_SUMS

pytestmark = [
    pytest.mark.usefixtures("proof_off"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero|All-NaN):RuntimeWarning"),
    # Of `F.kl_div` for "mean".
    pytest.mark.filterwarnings("ignore:reduction:UserWarning"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REDUCTIONS = ("none", "batchmean", "sum", "mean")
# Of the sum: no vectors, vectors of 4 and of 8 with single elements after them, one step and more, several blocks.
SIZES = (1, 2, 3, 127, 128, 130, 255, 2047, 2048, 2049, 4096, 4097, 8191, 130816, 130817, 262143, 300001)
SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 1e-40)


def numpy_of(function):
    return lambda x: torch.from_numpy(numpy.asarray(function(x.numpy())))


FUNCTIONS = {"exp": numpy_of(numpy.exp), "log": numpy_of(numpy.log)}


def cast(x, dtype):
    """As the interpreter does."""
    return (x.float().view(torch.int32) >> 16).to(torch.int16).view(dtype) if dtype == torch.bfloat16 else x.to(dtype)


@pytest.fixture(autouse=True)
def no_calls(module):
    module("ops.divergences")._calls.clear()


@pytest.fixture
def family(module):
    return module("ops.divergences")


def forms(family):
    return family._KL, family._KL_LOG_TARGET, family._VARIATION


# The full sum


def test_full_reduction_is_the_models(module, chooser):
    """Of any length, on GPUs of any number of multiprocessors; parts of more than 2 GiB."""
    config = module("reduce_config")
    for case in range(2000):
        device = aten_model.Device(chooser.choice((1, 16, 108, 132, 148)), chooser.choice((1024, 1536, 2048)))
        elements = chooser.choice((chooser.randint(1, 1 << chooser.randint(1, 33)), chooser.choice(SIZES)))
        size = chooser.choice((2, 4))
        parts = config.full_reduction(elements, size, device.sms, device.threads_per_sm)
        assert parts[0].begin == 0 and parts[-1].end == elements
        for part, after in zip(parts, [*parts[1:], None]):
            count = part.end - part.begin
            label = f"case {case}: {part}, {device}"
            assert 1 + (count - 1) * size < 1 << 31 and (after is None or after.begin == part.end), label
            tree = aten_model.full_tree(count, 16 // size, device)
            assert (part.width, part.blocks) == (tree.width, tree.ctas), label
            assert part.vector == (16 // size if count >= 128 else 1), label
            assert tree.height == 1
        if len(parts) > 1:
            assert parts[0].end == elements // 2 or len(parts) > 2


def test_a_reciprocal_is_rounded_twice(module, chooser):
    for _ in range(1000):
        number = chooser.randint(1, 1 << chooser.randint(1, 40))
        expected = torch.ones(()) / torch.tensor(number, dtype=torch.int64).float()
        assert module("reduce_config").reciprocal(number) == expected.item(), number


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_models_full_sum_is_a_row_sum(seed, dtype):
    """Of fp32 without single elements; and it is the sum, whatever the dtype: integers add up exactly."""
    generator = torch.Generator().manual_seed(seed)
    for elements in (128, 2048, 10240, 200000):
        x = torch.randn(elements, generator=generator)
        assert_bits_equal(aten_model.full_sum(x), aten_model.row_sum(x[None])[0])
    for elements in (*SIZES, 1 << 20):
        whole = torch.randint(-3, 4, (elements,), generator=generator)
        assert aten_model.full_sum(whole.to(dtype)) == whole.sum(), elements
        assert aten_model.full_sum(whole.to(dtype), indexing_limit=elements) == whole.sum(), elements


@interpreted
def test_the_last_block_sums_all_blocks(module, seed):
    """More blocks than threads, and with the sum of earlier parts."""
    family, generator = module("ops.full_sum"), torch.Generator().manual_seed(seed)
    for blocks in (1, 2, 511, 512, 513, 1000, 1500):
        for continues in (False, True):
            sums, before = torch.randn(blocks, generator=generator), torch.randn(1, generator=generator)
            expected = aten_model._halving_sum(aten_model._chain_sums(sums, 512, dim=0), dim=0)
            expected = before + expected if continues else expected[None]
            out, total = torch.empty((), dtype=torch.float16), before.clone()
            constants = {"WIDTH": 512, "CONTINUES": continues, "ROUND_SUM": False}
            dtypes = (torch.float32, torch.float32, torch.float16)
            bound = family.launch.bind(family.full_sum_last_block, constants, 4, CPU, dtypes, 1, blocks, 0.3)
            bound(sums, total, out)
            assert_bits_equal(total, expected)
            assert_bits_equal(out, (expected * torch.tensor(0.3)).half()[0])


# The kernels


def operands(form, family, generator, choose, elements, dtypes, special=True):
    first, second = torch.randn(2, elements, generator=generator) * choose.choice((0.5, 2.0)) - choose.choice(
        (0.0, 4.0)
    )
    if form is not family._KL_LOG_TARGET:
        second = second.exp()
        second[:: choose.choice((7, 1000))] = 0.0
    if special and choose.random() < 1 / 3:
        # The interpreter truncates what is subnormal in bf16 in a way of its own.
        values = SPECIAL[:-1] if torch.bfloat16 in dtypes else SPECIAL
        for tensor in (first, second):
            for value in values:
                tensor[choose.randrange(elements)] = value
    return first.to(dtypes[0]), second.to(dtypes[1])


def transcribed(form, family, first, second, counts):
    if form is family._VARIATION:
        return aten_model.total_variation(first, second, counts, cast)
    return aten_model.kl_div(first, second, form is family._KL_LOG_TARGET, **FUNCTIONS, cast=cast)


def transcribed_gradients(form, family, dy, first, second, counts):
    if form is family._VARIATION:
        return aten_model.total_variation_backward(dy, first, second, counts, cast)
    return aten_model.kl_div_backward(dy, first, second, form is family._KL_LOG_TARGET, **FUNCTIONS, cast=cast)


@interpreted
def test_kernels_equal_the_transcription(family, seed):
    """200 cases of every divergence, reduction and dtype: result, sum in fp32, and each path's gradient."""
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(200):
        form, reduction = choose.choice(forms(family)), choose.choice(REDUCTIONS)
        dtypes = choose.choice(((choose.choice(DTYPES),) * 2, (choose.choice(DTYPES), choose.choice(DTYPES))))
        elements = choose.choice(SIZES if case % 10 == 0 else (choose.randint(1, 6000), choose.choice(SIZES[:-4])))
        columns = math.gcd(elements, choose.choice((1, 8, 60)))
        labelled = form is family._VARIATION and choose.random() < 0.5
        label = f"case {case}: {form.name} {reduction} {dtypes} of {elements // columns} x {columns}, labels {labelled}"
        first, second = operands(form, family, generator, choose, elements, dtypes)
        first, second = first.view(-1, columns), second.view(-1, columns)
        rows = len(first)
        labels = torch.randint(3, (rows,), generator=generator) if labelled else None
        counts = None if labels is None else labels != 1
        count = None if labels is None else max(int(counts.sum()), 1)
        call = family._Call(form, first.shape, dtypes, CPU, reduction, labelled)
        total = torch.full((1,), math.nan)
        found = call(first, second, labels, 1, count, total=total)
        terms = transcribed(form, family, first, second, counts)
        divisor = {"batchmean": count or rows, "mean": (count or rows) * columns}.get(reduction)
        if reduction == "none":
            expected = terms
        else:
            expected_total = aten_model.full_sum(terms)
            assert_bits_equal(total[0], expected_total, f"total of {label}")
            by_atens_mean = reduction == "mean" and form is not family._VARIATION
            expected = aten_model.reduced(terms, "mean" if by_atens_mean else "sum", divisor, expected_total, cast)
        assert_bits_equal(found, expected, label)
        dy = torch.randn(found.shape, generator=generator).to(found.dtype)
        wanted = choose.choice(((True, False), (True, True), (False, True)))
        gradients = call.gradients(dy, first, second, labels, 1, count, *wanted)
        of_terms = dy if divisor is None else cast(dy.float() * aten_model.mean_factor(1, divisor), dy.dtype)
        theirs = transcribed_gradients(form, family, of_terms, first, second, counts)
        for number, (mine, other) in enumerate(zip(gradients, theirs)):
            if wanted[number > 0]:
                assert_bits_equal(mine, other, f"gradient {number} of {label}")
            else:
                assert mine is None


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_summed_in_order(family, module, monkeypatch, seed, dtype):
    """A limit of a few KiB in the place of 2 GiB: parts begin anywhere."""
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for _ in range(6):
        limit, elements = choose.randint(3000, 20000), choose.randint(3000, 30000)
        monkeypatch.setattr(module("reduce_config"), "_MAX_32_BIT_OFFSET", limit)
        first, second = operands(family._KL, family, generator, choose, elements, (dtype, dtype), special=False)
        total = torch.empty(1)
        call = family._Call(family._KL, first.shape, (dtype, dtype), CPU, "sum")
        call(first, second, total=total)
        expected = aten_model.full_sum(transcribed(family._KL, family, first, second, None), indexing_limit=limit)
        assert_bits_equal(total[0], expected, f"{elements} elements, {limit} bytes")


# Wrong orders


SAME_IN_ONE_BLOCK = ("fewer blocks",)


def compared(family, patch, form, dtype, width, seed, order):
    """What the proof compares of a kernel with this order and eager, both transcribed; `seed` in its own seed's place."""

    def call(self, first, second, labels=None, ignore_index=-100, count=None, total=None):
        terms = form.eager(first, second, labels, ignore_index, "none", count)
        total.fill_(order(terms))
        return torch.zeros(())

    patch.setattr(family.proof, "generator", lambda device, _: torch.Generator(device).manual_seed(seed))
    patch.setattr(family._Call, "__call__", call)
    patch.setattr(family, "_sum", aten_model.full_sum)
    for what, found, expected in family._comparisons(form, (dtype, dtype), CPU, "sum", width, 1, 0, (False, False)):
        if what == "the sum" and not found.isnan():
            yield found, expected


def tells(*arguments) -> bool:
    return any(not bits_equal(found, expected) for found, expected in compared(*arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 512])
def test_the_proof_tells_a_wrong_order(family, module, monkeypatch, seed, width, dtype):
    """Its sums of up to 2^20 elements suffice. The longer ones take minutes here."""
    monkeypatch.setattr(module("ops.full_sum"), "_MOST_ELEMENTS", 1 << 20)
    arguments = family, monkeypatch, family._KL, dtype, width, seed
    assert not tells(*arguments, aten_model.full_sum)
    # A block of 64 threads has no other blocks beside it, and vectors or not decide which threads it has.
    wrong = {name: order for name, order in FULL_SUMS.items() if width == 512 or name not in SAME_IN_ONE_BLOCK}
    assert not [name for name, order in wrong.items() if not tells(*arguments, order)]


@interpreted
@pytest.mark.parametrize("form", ["target", "log_target", "variation"])
def test_a_proof_is_of_the_kernels_that_will_run(family, module, monkeypatch, form):
    """Of this width, both gradients, and numbers that are none; `_MOST_ELEMENTS` takes too long in the interpreter."""
    monkeypatch.setattr(module("ops.full_sum"), "_MOST_ELEMENTS", 1 << 13)
    monkeypatch.setattr(module("ops.full_sum"), "_PROOF_SUMS", 1)
    form = family._DIVERGENCES[form]
    dtypes = (torch.float32,) * 2
    for width, reduction in ((0, "none"), (1, "sum"), (64, "mean"), (512, "batchmean")):
        for unit, classes in ((1, 0), (8, 0), (2, 0), *[(1, 37), (4, 100), (8, 40)] * (form is family._VARIATION)):
            found = list(family._comparisons(form, dtypes, CPU, reduction, width, unit, classes, (True, True)))
            names = [what for what, *_ in found]
            assert {"the divergence", "the first gradient", "the second gradient"} <= set(names)
            assert ("the sum" in names) == (reduction != "none")
            for what, mine, theirs in found:
                assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride()), what
                # Eager on a CPU adds in another order and has other exponentials: a few roundings of large sums.
                torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-4, atol=1e-4)
            for width_of in family.lengths_of_proof(width, torch.float32, CPU) if width else ():
                assert family.order_of(width_of, torch.float32, CPU).width == width


# What surrounds the kernels


def eager_of(family, form, labels=None, ignore_index=-100, reduction="mean"):
    count = None if labels is None else int((labels != ignore_index).sum())
    return lambda first, second: form.eager(first, second, labels, ignore_index, reduction, count)


def ours_of(kernel, family, form, labels=None, ignore_index=-100, reduction="mean"):
    if form is family._VARIATION:
        return lambda first, second: kernel.tvd(first, second, labels, reduction, ignore_index)
    return lambda first, second: kernel.kl_div(first, second, reduction, form is family._KL_LOG_TARGET)


def gradients_of(function, first, second, wanted=(True, True), dy=0.7):
    leaves = [each.detach().requires_grad_(grad) for each, grad in zip((first, second), wanted)]
    out = function(*leaves)
    if not out.requires_grad:  # Liger's `tvd` without a label that counts.
        return (out,)
    gradients = torch.autograd.grad(out, [each for each in leaves if each.requires_grad], torch.full_like(out, dy))
    return (out.detach(), *gradients)


def example(family, form, *shape, seed=1):
    first, second = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    return (first.exp() if form is family._VARIATION else first), (
        second if form is family._KL_LOG_TARGET else second.exp()
    )


@interpreted
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("form", ["target", "log_target", "variation"])
def test_autograd_gets_what_the_kernels_compute(kernel, family, form, reduction):
    form = family._DIVERGENCES[form]
    first, second = example(family, form, 6, 50)
    labels = torch.tensor([0, 1, 2, 0, 1, 1]) if form is family._VARIATION else None
    arguments = (labels, 0, reduction)
    for wanted in ((True, True), (True, False), (False, True)):
        found = gradients_of(ours_of(kernel, family, form, *arguments), first, second, wanted)
        expected = gradients_of(eager_of(family, form, *arguments), first, second, wanted)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.stride() == theirs.stride()
            # Eager on a CPU adds in another order and has other exponentials: a few roundings, which the defaults allow.
            torch.testing.assert_close(mine, theirs)
    leaf = first.clone().requires_grad_()
    assert ours_of(kernel, family, form, *arguments)(leaf, second).grad_fn.name() == "DivergencesBackward"
    if reduction != "none":
        doubled = 2 * kernel.kl_div(leaf, second, reduction) + (leaf * 0).sum()
        doubled.backward()
        assert leaf.grad.isfinite().all()


@interpreted
def test_a_targets_gradients_arrive_one_by_one(kernel, seed):
    """Autograd adds the paths' gradients to that of a later use of the target, never their sum."""
    generator = torch.Generator().manual_seed(seed)
    first, second, other = torch.randn(3, 40, 30, generator=generator).softmax(-1)
    leaf = second.clone().requires_grad_()
    target = leaf * 1.0
    loss = kernel.kl_div(first.log(), target, "sum") + (target * other).sum()
    (found,) = torch.autograd.grad(loss, leaf)
    dy = torch.ones(())
    _, *paths = aten_model.kl_div_backward(dy, first.log(), second, log_target=False, **FUNCTIONS)
    expected = other
    for path in paths:
        expected = expected + path
    assert_bits_equal(found, expected)
    assert not bits_equal(other + ((paths[0] + paths[1]) + paths[2]), expected)


def outside(family):
    first, second = example(family, family._KL, 4, 30)
    return {
        "float64": (first.double(), second),
        "another shape": (first, second[:1]),
        "no elements": (first[:0], second[:0]),
        "transposed": (first.t().contiguous().t(), second),
        "a subclass": (first.as_subclass(type("Other", (torch.Tensor,), {})), second),
        "one tensor": (second, second),
        "one number": (torch.tensor(-0.5), torch.tensor([0.5])[0].expand(2)),
    }


@pytest.mark.parametrize(
    "case", ["float64", "another shape", "no elements", "transposed", "a subclass", "one tensor", "one number"]
)
def test_outside_the_domain_eager_runs(kernel, family, case):
    first, second = outside(family)[case]
    assert family.replacement(family._KL, first, second, None, -100, "sum") is None
    for reduction in REDUCTIONS:
        found = kernel.kl_div(first, second, reduction)
        expected = functional.kl_div(first, second, reduction=reduction)
        assert_bits_equal(found.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))


def test_labels_outside_the_domain(kernel, family):
    p, q = example(family, family._VARIATION, 4, 30)
    for labels in (torch.tensor([0, 1, 0, 1], dtype=torch.int32), torch.zeros(8, dtype=torch.int64)[::2]):
        assert family.replacement(family._VARIATION, p, q, labels, 1, "sum", 2) is None
        assert_bits_equal(kernel.tvd(p, q, labels, "sum", 1), family._tvd(p, q, labels, 1, "sum", 2))
    assert kernel.tvd(p, q, torch.zeros(4, dtype=torch.int64), "mean", 0) == 0


def test_what_is_wrong_is_refused(kernel):
    x = torch.rand(2, 3)
    with pytest.raises(TypeError, match=r"input: .* found list"):
        kernel.kl_div([1.0], x)
    with pytest.raises(TypeError, match=r"target: .* found torch.int64"):
        kernel.kl_div(x, torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"q: .* found NoneType"):
        kernel.tvd(x, None)
    for function in (kernel.kl_div, kernel.tvd):
        with pytest.raises(ValueError, match=r"reduction: expected one of none, .* found 'average'"):
            function(x, x, reduction="average")
    with pytest.raises(RuntimeError, match="must match"):
        kernel.kl_div(x, torch.rand(2, 4))
    with pytest.raises(ValueError, match=r"p: expected \[rows, classes\], found shape \[3\]"):
        kernel.tvd(x[0], x[1])


@interpreted
def test_under_autocast_16_bits_are_eagers(family):
    """A call without autocast that was resolved must not stand for one with it."""
    first, second = example(family, family._KL, 4, 30)
    halves = first.half(), second.half()
    for _ in range(2):
        assert family.replacement(family._KL, *halves, None, -100, "sum") is not None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert family.replacement(family._KL, *halves, None, -100, "sum") is None
            assert family.replacement(family._KL, first, second, None, -100, "sum") is not None


@interpreted
@pytest.mark.parametrize("form", ["target", "log_target", "variation"])
def test_gradients_can_be_differentiated(kernel, family, form):
    form = family._DIVERGENCES[form]
    first, second = example(family, form, 4, 30)
    penalties = []
    for function in (ours_of(kernel, family, form), eager_of(family, form)):
        leaves = [each.clone().requires_grad_() for each in (first, second)]
        weight = torch.tensor(0.7, requires_grad=True)
        gradients = torch.autograd.grad(function(*leaves), leaves, weight, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        penalties.append(torch.autograd.grad(penalty, (*leaves, weight), allow_unused=True, materialize_grads=True))
    for found, expected in zip(*penalties):
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        torch.testing.assert_close(found, expected)
    assert penalties[0][-1].any()


@interpreted
@pytest.mark.parametrize("form", ["target", "log_target", "variation"])
def test_modes_checkpoints_and_hooks_get_eagers_gradients(kernel, family, form):
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            names.append(str(function))
            return function(*arguments, **(named or {}))

    names, form = [], family._DIVERGENCES[form]
    first, second = example(family, form, 4, 30)
    ours, eager = ours_of(kernel, family, form), eager_of(family, form)
    expected = gradients_of(eager, first, second)
    with Watching():
        for mine, theirs in zip(gradients_of(ours, first, second), expected, strict=True):
            assert_bits_equal(mine, theirs)
    assert any("sum" in name or "mean" in name for name in names)
    # Only the backward pass is watched: the formula of its gradients, path by path.
    leaves = [each.clone().requires_grad_() for each in (first, second)]
    out = ours(*leaves)
    names.clear()
    with Watching():
        found = torch.autograd.grad(out, leaves, torch.tensor(0.7))
    assert names
    for mine, theirs in zip(found, expected[1:]):
        assert_bits_equal(mine, theirs)
    transposed = lambda saved: saved.t().contiguous().t() if saved.dim() == 2 else saved  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, transposed):
        found = gradients_of(ours, first, second)
    for mine, theirs in zip(found[1:], expected[1:]):
        assert_bits_equal(mine, theirs)
    checkpointed = gradients_of(
        lambda *each: torch.utils.checkpoint.checkpoint(ours, *each, use_reentrant=False), first, second
    )
    tangent = torch.func.jvp(ours, (first, second), (first, second))[1]
    # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
    torch.testing.assert_close(checkpointed, gradients_of(ours, first, second))
    torch.testing.assert_close(tangent, torch.func.jvp(eager, (first, second), (first, second))[1])


@interpreted
def test_without_proof_eager_runs(module, kernel, family, nothing_known, monkeypatch):
    """A CPU adds in another order than CUDA."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    monkeypatch.setattr(module("ops.full_sum"), "_MOST_ELEMENTS", 1 << 14)
    first, second = example(family, family._KL, 40, 77)
    with pytest.warns(RuntimeWarning, match="kl_div on cpu, .* target, sum, sums of 512 threads, keeps .*differ"):
        found = kernel.kl_div(first, second, "sum")
    assert_bits_equal(found, functional.kl_div(first, second, reduction="sum"))


@interpreted
def test_the_operators_for_torch_compile(kernel, family):
    namespace = getattr(torch.ops, family._divergence_op.namespace)
    first, second = example(family, family._KL, 4, 30)
    for reduction in ("none", "mean"):
        arguments = ("target", first.clone().requires_grad_(), second, reduction)
        torch.library.opcheck(namespace.divergence.default, arguments)
        ours = ours_of(kernel, family, family._KL, reduction=reduction)
        compiled = lambda i, t: namespace.divergence("target", i, t, reduction)  # noqa: E731, B023
        for mine, theirs in zip(
            gradients_of(compiled, first, second, (True, False)), gradients_of(ours, first, second, (True, False))
        ):
            assert_bits_equal(mine, theirs)


# On a GPU: eager itself


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["target", "log_target", "variation"])
def test_result_and_gradients_are_those_of_eager(kernel, family, seed, monkeypatch, form):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    form = family._DIVERGENCES[form]
    generator, choose = torch.Generator("cuda").manual_seed(seed), random.Random(seed)
    for case in range(100):
        columns = choose.choice((1, 30, 1000, 32000, choose.randint(1, 5000)))
        shape = (choose.randint(1, max(2, (1 << 22) // columns)), columns)
        reduction = choose.choice(REDUCTIONS)
        dtypes = choose.choice(((choose.choice(DTYPES),) * 2, (choose.choice(DTYPES), choose.choice(DTYPES))))
        first, second = torch.randn(2, *shape, generator=generator, device="cuda").log_softmax(-1)
        first = first.exp() if form is family._VARIATION else first
        second = second if form is family._KL_LOG_TARGET else second.exp()
        first, second = first.to(dtypes[0]), second.to(dtypes[1])
        labels = torch.randint(3, shape[:1], generator=generator, device="cuda") if form is family._VARIATION else None
        arguments = (labels, 2, reduction)
        assert family.replacement(form, first, second, labels, 2, reduction, None if labels is None else 1) is not None
        found = gradients_of(ours_of(kernel, family, form, *arguments), first, second)
        expected = gradients_of(eager_of(family, form, *arguments), first, second)
        for mine, theirs in zip(found, expected, strict=True):
            assert_bits_equal(mine, theirs, f"case {case}: {shape} {dtypes} {reduction}")
            assert mine.stride() == theirs.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_full_sum_is_what_eager_computes(seed, dtype):
    generator = torch.Generator("cuda").manual_seed(seed)
    properties = torch.cuda.get_device_properties(0)
    device = aten_model.Device(properties.multi_processor_count, properties.max_threads_per_multi_processor)
    for elements in (*SIZES, 5_000_001):
        x = torch.randn(elements, generator=generator, device="cuda").to(dtype)
        assert_bits_equal(aten_model.full_sum(x, device), x.sum(dtype=torch.float32), str(elements))


@pytest.mark.gpu
def test_compiled_divergences_are_the_uncompiled_ones(kernel, family):
    first, second = (each.cuda() for each in example(family, family._KL, 40, 1000))
    torch._dynamo.reset()
    for reduction in REDUCTIONS:
        ours = ours_of(kernel, family, family._KL, reduction=reduction)
        compiled = torch.compile(ours, fullgraph=True)
        for mine, theirs in zip(
            gradients_of(compiled, first, second, (True, False)), gradients_of(ours, first, second, (True, False))
        ):
            assert_bits_equal(mine, theirs)
