"""The Jensen-Shannon divergence's kernels in Triton's interpreter against the transcription of ATen's, and what surrounds them.

The interpreter has numpy's exponentials and logarithms, for the transcription too, rounds an FMA as its version does
(`interpreter.multiply_add`) and truncates to bf16: `cast` does likewise.
"""

import functools
import math
import os
import random
from types import SimpleNamespace

import aten_model
import numpy
import pytest
import torch
from bits import assert_bits_equal, bits_equal
from interpreter import cast, multiply_add
from test_linear_jsd_loss import eager as eager_linear
from test_linear_jsd_loss import labels_of, tensors
from test_slices import eager_jsd
from test_softmax_kernel import changes_of, numpy_exp, order_of_block
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

pytestmark = [
    pytest.mark.usefixtures("proof_off"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero|All-NaN):RuntimeWarning"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Where ATen's kernels, their threads, or the tiles of a program change.
VOCABULARIES = (2049, 2050, 2056, 4096, 4100, 8192, 9215, 9216, 9217, 9220, 9224, 12256, 12264, 16384, 24512, 24544)
FORMS = {0: "teacher", 1: "student"}


def numpy_log(x):
    return torch.from_numpy(numpy.asarray(numpy.log(x.numpy())))


FUNCTIONS = {"exp": numpy_exp, "log": numpy_log, "cast": cast}


def model(student, teacher, mask, beta, temperature, dy, wanted=(True, True)):
    """Terms of [..., vocabulary] and gradients, of which unwanted ones are None; dy is that of the terms."""
    flat = [each.reshape(-1, each.shape[-1]) for each in (student, teacher)]
    s, t = (aten_model.scaled_log_softmax(each, temperature, **FUNCTIONS) for each in flat)
    terms = aten_model.jsd(s, t, beta, **FUNCTIONS)
    of_all = dy.reshape(-1, s.shape[1])
    if mask is not None:
        terms, counted = terms[mask.reshape(-1)], of_all
        of_all = torch.zeros_like(s)
        of_all[mask.reshape(-1)] = counted + 0.0
    gradients = aten_model.jsd_backward(of_all, s, t, beta, **FUNCTIONS)
    found = [
        aten_model.divided(
            aten_model.log_softmax_backward(each, y, numpy_exp, multiply_add, cast), temperature, cast
        ).view(student.shape)
        if need
        else None
        for each, y, need in zip(gradients, (s, t), wanted)
    ]
    return terms if mask is not None else terms.view(student.shape), *found


def labels_from(mask):
    return None if mask is None else torch.where(mask, 3, -100)


def results(function, student, teacher, labels, beta, temperature, dy, wanted=(True, True)):
    leaves = [each.detach().requires_grad_(need) for each, need in zip((student, teacher), wanted)]
    terms = function(*leaves, labels, beta, temperature, "none")
    terms.backward(dy)
    return terms.detach(), *(leaf.grad for leaf in leaves)


def assert_same(found, expected, label=""):
    for name, mine, theirs in zip(("terms", "student's gradient", "teacher's gradient"), found, expected, strict=True):
        assert (mine is None) is (theirs is None), f"{name} of {label}"
        if mine is not None:
            assert_bits_equal(mine, theirs, f"{name} of {label}")
    assert found[0] is None or found[0].is_contiguous()


@pytest.fixture
def launched(module, monkeypatch):
    """How often the kernels ran."""
    found, call = [], module("ops.jsd")._Call.__call__

    def spy(self, *arguments):
        found.append(self.kind)
        return call(self, *arguments)

    monkeypatch.setattr(module("ops.jsd")._Call, "__call__", spy)
    return found


def logits_at_random(choose, generator, dtype):
    """Student and teacher, [..., vocabulary]: dense, with gaps, without each sequence's first or last token, transposed."""
    vocabulary = choose.choice((choose.choice(VOCABULARIES), choose.randint(2049, 20000)))
    shape = choose.choice(((choose.randint(1, 4),), (2, 2), (1, 3)))
    layout, found = choose.choice(("dense", "dense", "gaps", "cut", "transposed")), []
    for _ in range(2):
        x = torch.randn(*shape, vocabulary, generator=generator) * choose.choice((0.1, 1.0, 4.0))
        if choose.random() < 0.3:
            value, where = choose.choice((-math.inf, math.inf, math.nan, -0.0, 3e38)), choose.randrange(vocabulary)
            x.view(-1, vocabulary)[choose.randrange(math.prod(shape)), choose.choice((slice(None), where))] = value
        x = x.to(dtype)
        if layout == "gaps":
            x = functional.pad(x, (0, choose.choice((1, 8))))[..., :vocabulary]
        elif layout == "cut" and len(shape) == 2:
            x = functional.pad(x, (0, 0, 1, 1))[:, 1:-1]
        elif layout == "transposed" and len(shape) == 2:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        found.append(x)
    return found


@interpreted
@pytest.mark.parametrize("cases", [12, pytest.param(200, marks=pytest.mark.long)])
def test_kernels_equal_the_transcription(kernel, launched, seed, cases):
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(cases):
        dtype = choose.choice(DTYPES)
        student, teacher = logits_at_random(choose, generator, dtype)
        shape = student.shape
        mask = choose.choice((None, torch.rand(shape[:-1], generator=generator) < 0.6, torch.zeros(shape[:-1]).bool()))
        beta, temperature = choose.choice((0, 1.0, 0.5, 0.1, 0.999)), choose.choice((1.0, 1, 0.9, 3.0))
        of_terms = shape if mask is None else (int(mask.sum()), shape[-1])
        dy = torch.randn(of_terms, generator=generator).to(dtype)
        one = torch.tensor(choose.choice((1.0, -0.0, 0.7)), dtype=dtype).expand(of_terms)
        dy = choose.choice((dy, one))
        wanted = choose.choice(((True, False), (True, True), (False, True)))
        arguments = beta, temperature, dy, wanted
        label = f"case {case}, {tuple(shape)} {student.stride()} {dtype}, beta {beta}, temperature {temperature}"
        found = results(kernel.generalized_jsd_loss, student, teacher, labels_from(mask), *arguments)
        assert_same(found, model(student, teacher, mask, *arguments), label)
        assert len(launched) == case + 1, label


@interpreted
@pytest.mark.parametrize(
    "beta, dtype",
    [
        *zip((0.3, 0, 1), DTYPES),
        *(pytest.param(beta, dtype, marks=pytest.mark.long) for beta in (0, 1, 0.3) for dtype in DTYPES),
    ],
)
def test_special_rows(kernel, launched, seed, dtype, beta):
    """Of infinities, NaNs and equal numbers, alone and among others, counted and not."""
    vocabulary = 2056
    x = torch.randn(2, 24, vocabulary, generator=torch.Generator().manual_seed(seed))
    specials = (math.inf, -math.inf, math.nan, -0.0, 0.0, 3e38, -3e38)
    for index, value in enumerate(specials):
        x[0, index], x[1, index + 7], x[0, index + 14, 5], x[1, index + 14, 6] = value, value, value, value
    x[:, 21], x[0, 22, ::2], x[1, 22, 1::2] = -math.inf, -math.inf, -math.inf
    for each in (x, x.roll(1, 1)):
        student, teacher = each.to(dtype)
        mask = torch.arange(24) % 2 == 0
        dy = torch.full((12, vocabulary), 0.7, dtype=dtype)
        found = results(kernel.generalized_jsd_loss, student, teacher, labels_from(mask), beta, 0.9, dy)
        expected = model(student, teacher, mask, beta, 0.9, dy)
        assert_same(found, expected)
        assert all(each.isnan().any() and each.isfinite().any() for each in expected)
    assert len(launched) == 2


def autograd(dy, s, t, beta):
    """Eager's terms and gradients, of log-probabilities."""
    s, t = (each.detach().requires_grad_() for each in (s, t))

    def divergence(input, target):
        return functional.kl_div(input, target, reduction="none", log_target=True)

    if beta in (0, 1):
        terms = divergence(s, t) if beta == 0 else divergence(t, s)
    else:
        of_beta = torch.tensor(beta, dtype=s.dtype)
        m = torch.stack([s + (-of_beta).log1p(), t + of_beta.log()]).logsumexp(0)
        terms = of_beta * divergence(m, t) + (1 - of_beta) * divergence(m, s)
    return terms.detach(), *torch.autograd.grad(terms, (s, t), dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", [0, 1, 0.5, 0.3, 0.9])
def test_the_transcription_is_autograds(seed, dtype, beta):
    """Terms, and gradients in their order of arrival: elementwise operations round on a CPU as on a GPU."""
    generator = torch.Generator().manual_seed(seed)
    s, t = ((3 * torch.randn(2, 9, 500, generator=generator)).log_softmax(-1)).to(dtype)
    s[0, :3], t[0, 1:4], s[1, 7], t[2] = -math.inf, -math.inf, math.nan, s[2]
    dy = torch.randn(s.shape, generator=generator).to(dtype)
    # A CPU's functions of this dtype.
    exp, log = lambda x: x.to(dtype).exp().float(), lambda x: x.to(dtype).log().float()
    expected = autograd(dy, s, t, beta)
    found = aten_model.jsd(s, t, beta, exp, log), *aten_model.jsd_backward(dy, s, t, beta, exp, log)
    for name, mine, theirs in zip(("terms", "student's gradient", "teacher's gradient"), found, expected):
        assert_bits_equal(mine, theirs, name)


@interpreted
def test_planted_arithmetic_is_told(monkeypatch, seed):
    """What rounds otherwise: gradients that arrive in another order, a quotient, a mixture in fp32, no FMA."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher, dy = torch.randn(3, 4, 2056, generator=generator) * 3

    def changed(dtype, name, function):
        """Which of terms and gradients are others if this function is in place of the one of that name."""
        given = student.to(dtype), teacher.to(dtype), None, 0.3, 0.9, dy.to(dtype)
        right = model(*given)
        with monkeypatch.context() as patch:
            patch.setattr(aten_model, name, function)
            found = model(*given)
        return [not bits_equal(mine, theirs) for mine, theirs in zip(found, right)]

    single, half, mixture, backward = (
        torch.float32,
        torch.float16,
        aten_model.log_sum_of_two,
        aten_model.kl_div_backward,
    )

    def last_first(*arguments, **options):
        """What the exponential adds arrives before the difference's part."""
        d_input, first, second = backward(*arguments, **options)
        return d_input, torch.zeros_like(first), (first.float() + second.float()).to(second.dtype).nextafter(first)

    log_softmax_backward = aten_model.log_softmax_backward
    assert changed(half, "log_sum_of_two", mixture) == [False] * 3
    assert changed(single, "divided", lambda x, temperature, cast: x / temperature) == [True] * 3
    assert changed(half, "log_sum_of_two", lambda a, b, *_: torch.logaddexp(a.float(), b.float()).half()) == [True] * 3
    assert changed(half, "kl_div_backward", last_first) == [False, True, True]
    twice = lambda dy, y, exp, fma, cast: log_softmax_backward(dy, y, exp, lambda a, b, c: a * b + c, cast)  # noqa: E731
    once = lambda dy, y, exp, fma, cast: log_softmax_backward(dy, y, exp, cast=cast)  # noqa: E731
    assert changed(single, "log_softmax_backward", twice) != changed(single, "log_softmax_backward", once)


# Proof


def kind_of(family, form, dtype, vocabulary, labels=False, wanted=(True, True), unit=None, scaled=True):
    unit = unit or math.gcd(vocabulary, 16 // dtype.itemsize)
    return family.Kind(form, dtype, vocabulary, unit, scaled, labels, wanted)


def orders_of(family, kind):
    """The orders of the forward and of the backward kernel, as `order_of_block` takes them."""
    orders = (of(kind.vocabulary, kind.dtype) for of in (family.aten.softmax_forward, family.aten.softmax_backward))
    return [
        SimpleNamespace(order=each, shift=0, head=each.kind == "loop" and kind.vocabulary % each.vector != 0)
        for each in orders
    ]


class Transcribed(torch.autograd.Function):
    """Terms with the arithmetic of CUDA; `sums` has the orders of the forward kernel, then those of the backward kernel."""

    @staticmethod
    def forward(ctx, beta, temperature, sums, student, teacher):
        ctx.logp = [
            aten_model.scaled_log_softmax(x, temperature, row_sum=order)
            for x, order in zip((student, teacher), sums[:2])
        ]
        ctx.beta, ctx.temperature, ctx.sums = beta, temperature, sums[2:]
        return aten_model.jsd(*ctx.logp, beta)

    @staticmethod
    def backward(ctx, dy):
        gradients = aten_model.jsd_backward(dy, *ctx.logp, ctx.beta)
        gradients = map(
            functools.partial(aten_model.log_softmax_backward), gradients, ctx.logp, *[[torch.exp] * 2],
            [aten_model.fused_multiply_add] * 2, [torch.Tensor.to] * 2, ctx.sums,
        )  # fmt: skip
        return None, None, None, *(aten_model.divided(each, ctx.temperature) for each in gradients)


def told(family, patch, kind, seed, places):
    """Whether the proof tells of a kernel with one wrong order: name -> bool, of all orders at `places` of `sums`."""
    forward, backward = orders_of(family, kind)
    right = [order_of_block(each) for each in (forward, forward, backward, backward)]
    wrong = [
        (f"{change}, {place}", [*right[:place], order_of_block(order, change), *right[place + 1 :]])
        for place, order in zip(range(4), (forward, forward, backward, backward))
        if place in places
        for change in changes_of(order)
    ]
    found = {}
    for name, sums in [("none", right), *wrong]:

        class Call:
            """The kernel with these orders."""

            def __init__(self, kind, rows, levels, beta, temperature, device, most_programs):
                self.beta, self.temperature = beta, temperature

            def __call__(self, student, teacher, place, count):
                self.leaves = [each.detach().requires_grad_() for each in (student, teacher)]
                with torch.enable_grad():
                    self.terms = Transcribed.apply(self.beta, self.temperature, sums, *self.leaves)  # noqa: B023
                return self.terms.detach(), None

            def gradients(self, dy, student, teacher, place, statistics, *found):
                for mine, each in zip(found, torch.autograd.grad(self.terms, self.leaves, dy, retain_graph=True)):
                    mine.copy_(each)

        patch.setattr(family, "_Call", Call)
        patch.setattr(family.proof, "generator", lambda device, _: torch.Generator(device).manual_seed(seed))
        patch.setattr(
            family,
            "divergence",
            lambda s, t, mask, beta, temperature: Transcribed.apply(beta, temperature, right, s, t),
        )
        found[name] = any(not bits_equal(mine, theirs) for _, mine, theirs in family._comparisons(kind, CPU))
    return found


# A vocabulary of each pair of ATen's kernels: registers and vectors, vectors and vectors, loops, loops with a head.
POWER = {4096: (0, 2), 9224: (0, 1), 32768: (2, 3), 9225: (0, 3)}


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "form"),
    [
        (9225, torch.bfloat16, "mixture"),
        *(
            pytest.param(vocabulary, dtype, form, marks=pytest.mark.long)
            for vocabulary in POWER
            for dtype in DTYPES
            for form in ("mixture", "teacher", "student")
        ),
    ],
)
def test_the_proof_tells_a_wrong_order(module, monkeypatch, seed, request, vocabulary, dtype, form):
    """Of each sum alone: student's and teacher's, forward and backward."""
    family, is_long = module("ops.jsd"), request.node.get_closest_marker("long") is not None
    if not is_long:  # A third of the rows, which suffices.
        monkeypatch.setattr(family, "_GROUP", family._GROUP // 4)
    places = range(4) if is_long else POWER[vocabulary]
    found = told(family, monkeypatch, kind_of(family, form, dtype, vocabulary), seed, places)
    assert not found.pop("none")
    assert all(found.values()), [name for name, told in found.items() if not told]


@pytest.mark.long
def test_power_of_the_proof(module, monkeypatch, seed):
    """Each proof has a seed of its own: `LOSSLESS_PROOFS=100 pytest tests/test_jsd.py -k power -rP`."""
    family, choose, count, missed = module("ops.jsd"), random.Random(seed), 0, []
    for _ in range(int(os.environ.get("LOSSLESS_PROOFS", 20))):
        dtype, form, vocabulary = (
            choose.choice(DTYPES),
            choose.choice(("mixture", *FORMS.values())),
            choose.choice([*POWER]),
        )
        kind = kind_of(family, form, dtype, vocabulary, scaled=choose.random() < 0.5)
        found = told(family, monkeypatch, kind, choose.randrange(1 << 30), [choose.randrange(4)])
        assert not found.pop("none")
        count += len(found)
        missed += [(vocabulary, dtype, form, name) for name, is_told in found.items() if not is_told]
    print(f"{count - len(missed)} of {count} wrong orders told")
    assert not missed


def in_few_rows(family, patch):
    """A proof with some rows of each group: the interpreter takes a tenth of a second for each."""
    proof_logits, rows = family.proof_logits, [0, 17, 34, 50, 66, -1, -3, -6, -11]
    patch.setattr(family, "_GROUP", 1)
    patch.setattr(family, "proof_logits", lambda *given: [each[rows] for each in proof_logits(*given)])


@interpreted
@pytest.mark.parametrize(
    ("labels", "wanted"), [(True, (True, False)), (False, (True, True)), (True, (False, True)), (False, (False, False))]
)
def test_a_proof_is_of_the_kernels_that_will_run(module, monkeypatch, labels, wanted):
    """Of its kind and its accesses: forward, and backward of one number and of one for each term."""
    family, seen, launch = module("ops.jsd"), [], module("launch")
    in_few_rows(family, monkeypatch)
    call = launch.Launch.__call__

    def spy(self, *tensors):
        seen.append((self._launcher.kernel.__name__, self._launcher.constants))
        return call(self, *tensors)

    monkeypatch.setattr(launch.Launch, "__call__", spy)
    for vocabulary, unit in ((2056, 4), (2056, 1)):
        seen.clear()
        kind = kind_of(family, "mixture", torch.float32, vocabulary, labels, wanted, unit)
        for what, found, expected in family._comparisons(kind, CPU):
            assert found.stride() == expected.stride() and found.isnan().any() and found.isfinite().any(), what
            # A CPU adds in another order, but is near.
            torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-2, msg=what)
        assert {constants["UNIT"] for _, constants in seen} == {unit}
        assert {constants["SCALED"] for _, constants in seen} == {True}
        backward = [constants for name, constants in seen if name == "jsd_backward"]
        assert {constants["DENSE"] for constants in backward} == ({False, True} if any(wanted) else set())
        for constants in backward:
            assert constants["LABELS"] is labels
            assert (constants["WITH_STUDENT"], constants["WITH_TEACHER"]) == wanted


@interpreted
def test_without_proof_the_slices_run(kernel, module, launched, nothing_known, monkeypatch, seed):
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    in_few_rows(module("ops.jsd"), monkeypatch)
    monkeypatch.setattr(module("ops.slices"), "_SLICE_ELEMENTS", 1)
    x = torch.randn(2, 9, 2100, generator=torch.Generator().manual_seed(seed)).unbind()
    # The interpreter's sums are not those of eager on a CPU.
    with pytest.warns(RuntimeWarning, match="generalized_jsd_loss on cpu, .*2100 classes, form mixture.* differ"):
        found = kernel.generalized_jsd_loss(*x)
    launched.clear()
    assert_bits_equal(found, kernel.generalized_jsd_loss(*x))
    assert_bits_equal(found, eager_jsd(*x))
    assert not launched


# What surrounds the kernels


@pytest.fixture
def pair(seed):
    return list(torch.randn(2, 3, 2049, generator=torch.Generator().manual_seed(seed)))


@interpreted
def test_reductions_are_atens_sums_of_the_terms(kernel, launched, pair):
    labels = torch.tensor([3, -100, 5])
    terms = kernel.generalized_jsd_loss(*pair, labels, reduction="none")
    assert terms.shape == (2, 2049)
    for reduction, expected in (("sum", terms.sum()), ("mean", terms.mean()), ("batchmean", terms.sum() / 2)):
        assert_bits_equal(kernel.generalized_jsd_loss(*pair, labels, reduction=reduction), expected)
    assert_bits_equal(kernel.generalized_jsd_loss(*pair, labels, num_items_in_batch=7), terms.sum() / 7)
    assert len(launched) == 5


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_and_device_do_not_matter(kernel, launched, pair, dtype):
    results = []
    for default, device in ((torch.float32, "cpu"), (dtype, "meta")):
        leaves = [each.clone().requires_grad_() for each in pair]
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            with torch.device(device):
                loss = kernel.generalized_jsd_loss(
                    *leaves, beta=0.3, temperature=0.7 if dtype is torch.float64 else 0.9
                )
        finally:
            torch.set_default_dtype(before)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for found, expected in zip(*results):
        assert_bits_equal(found, expected)
    assert len(launched) == 2


@interpreted
@pytest.mark.parametrize("sliced", [False, True])
def test_a_teacher_may_come_from_inference_mode(kernel, module, launched, pair, monkeypatch, sliced):
    """Autograd cannot keep its logits, and eager keeps others."""
    if sliced:
        monkeypatch.setattr(module("ops.slices"), "_SLICE_ELEMENTS", 1)
        pair = [each[:, :500].repeat(4, 1) for each in pair]
    student, results = pair[0].clone().requires_grad_(), []
    with torch.inference_mode():
        teacher = pair[1] * 1.0
    for loss in (kernel.generalized_jsd_loss, eager_jsd):
        found = loss(student, teacher)
        results.append((found.detach(), *torch.autograd.grad(found, student)))
    for found, expected in zip(*results):
        assert_bits_equal(found, expected)
    assert not launched
    with torch.no_grad():  # Nothing is kept.
        kernel.generalized_jsd_loss(student, teacher)
    assert len(launched) == (not sliced)


@interpreted
@pytest.mark.parametrize("scale", [65536.0, 1 / 3, 0.0, -0.0])
def test_scaled_losses(kernel, launched, pair, scale):
    """The gradient of a sum is one number; with labels that of rows that do not count is zero, or NaN."""
    for labels in (None, torch.tensor([3, -100, 5])):
        leaves = [each.clone().requires_grad_() for each in pair]
        (kernel.generalized_jsd_loss(*leaves, labels, 0.3, 0.9, "sum") * scale).backward()
        mask = None if labels is None else labels >= 0
        dy = torch.tensor(scale).expand((3 if mask is None else 2), 2049)
        expected = model(*pair, mask, 0.3, 0.9, dy)
        assert_same((None, *(leaf.grad for leaf in leaves)), (None, *expected[1:]))
    assert len(launched) == 2


@interpreted
def test_gradients_take_the_memory_of_logits_that_nobody_holds(module, kernel, launched, pair, monkeypatch):
    """And not where another backward pass reads them, or somebody holds them."""
    family, slices = module("ops.jsd"), module("ops.slices")
    labels, dy = torch.tensor([3, -100, 5]), torch.tensor(0.7)
    expected = model(*pair, labels >= 0, 0.3, 0.9, dy.expand(2, 2049))[1:]
    written, gradients = [], family._Call.gradients

    def spy(self, dy, student, teacher, place, statistics, *found):
        written.append([mine.data_ptr() == each.data_ptr() for mine, each in zip(found, (student, teacher))])
        gradients(self, dy, student, teacher, place, statistics, *found)

    monkeypatch.setattr(family._Call, "gradients", spy)
    for owned, keeps in ((True, False), (True, True), (False, False)):
        leaves = [each.clone().requires_grad_() for each in pair]
        logits = [each * 1.0 for each in leaves]
        loss = slices.divergence_loss(*logits, labels, 0.3, 0.9, "sum", None, owned)
        for _ in range(1 + keeps):
            found = torch.autograd.grad(loss, leaves, dy, retain_graph=keeps)
            assert_same((None, *found), (None, *expected))
            assert written.pop() == [owned and not keeps] * 2
    assert len(launched) == 3 and not written
    hidden = tensors(7, (5,), 2049)
    leaves = [each.requires_grad_() for each in hidden]
    loss = kernel.linear_jsd_loss(*leaves, labels=labels_of(hidden[0]), beta=0.3)
    grads = torch.autograd.grad(loss, leaves)
    assert written == [[True, True]]
    # Eager on a CPU adds in another order.
    for mine, theirs in zip(grads, torch.autograd.grad(eager_linear(*leaves, labels_of(hidden[0]), beta=0.3), leaves)):
        torch.testing.assert_close(mine, theirs)


@interpreted
def test_one_tensor_for_student_and_teacher(kernel, launched, pair):
    x = pair[0].clone().requires_grad_()
    dy = torch.randn(3, 2049)
    (found,) = torch.autograd.grad(kernel.generalized_jsd_loss(x, x, None, 0.3, 0.9, "none"), x, dy)
    _, ds, dt = model(pair[0], pair[0], None, 0.3, 0.9, dy)
    assert_bits_equal(found, ds + dt)
    assert launched


@interpreted
def test_gradients_can_be_differentiated(kernel, launched, pair):
    def both(function):
        leaves = [each.clone().requires_grad_() for each in pair]
        loss = function(*leaves, torch.tensor([3, -100, 5]), 0.3, 0.9)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return *first, *torch.autograd.grad(sum(each.square().sum() for each in first), leaves)

    for mine, theirs in zip(both(kernel.generalized_jsd_loss), both(eager_jsd)):
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        torch.testing.assert_close(mine, theirs)
        assert mine.any()
    assert launched


@interpreted
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_modes_and_hooks(kernel, launched, pair, reentrant):
    expected = results(kernel.generalized_jsd_loss, *pair, None, 0.3, 0.9, torch.ones(3, 2049))

    def checkpointed(*arguments):
        return checkpoint(kernel.generalized_jsd_loss, *arguments, use_reentrant=reentrant)

    assert_same(results(checkpointed, *pair, None, 0.3, 0.9, torch.ones(3, 2049)), expected)
    with torch.autograd.graph.save_on_cpu():
        assert_same(results(kernel.generalized_jsd_loss, *pair, None, 0.3, 0.9, torch.ones(3, 2049)), expected)
    # Saved logits of another layout: eager's operations, which add in another order on a CPU.
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.t().contiguous().t() if x.dim() == 2 else x):
        for mine, theirs in zip(
            results(kernel.generalized_jsd_loss, *pair, None, 0.3, 0.9, torch.ones(3, 2049)), expected
        ):
            torch.testing.assert_close(mine, theirs)
    leaves = [each.clone().requires_grad_() for each in pair]
    with FlopCounterMode(display=False):  # In one of a checkpoint's two computations.
        loss = checkpointed(*leaves, None, 0.3, 0.9, "none")
    loss.backward(torch.ones(3, 2049))
    assert_same((None, *(each.grad for each in leaves)), (None, *expected[1:]))
    count = len(launched)
    with FlopCounterMode(display=False):
        kernel.generalized_jsd_loss(*pair)
    assert len(launched) == count


@interpreted
def test_logits_must_not_change_before_the_backward_pass(kernel, launched, pair):
    given = pair[0].requires_grad_() * 1.0
    loss = kernel.generalized_jsd_loss(given, pair[1])
    given.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert launched


@interpreted
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda f, s, t: f(s[:, :2048], t[:, :2048]), "less than 2049 classes"),
        (lambda f, s, t: f(s[0], t[0], reduction="sum"), "one dimension"),
        (lambda f, s, t: f(s, t[:1], beta=0), "different shapes"),
        (lambda f, s, t: f(s[:0], t[:0]), "no rows"),
        (lambda f, s, t: f(s, t.half()), "torch.float16"),
        (lambda f, s, t: f(s.double(), t.double()), "torch.float64"),
        (lambda f, s, t: f(s, t, temperature=-1.0), "out of range"),
        (lambda f, s, t: f(s, t, temperature=torch.tensor(2.0)), "no number"),
        (lambda f, s, t: f(s.t().contiguous().t(), t), "not contiguous"),
        (lambda f, s, t: f(s.view(3, 1, 2049), t.view(3, 1, 2049), torch.tensor([3, -100, 5])), "labels that are not"),
    ],
)
def test_outside_the_domain_eager_runs(kernel, module, launched, pair, call, reason):
    module("ops.jsd")._calls.clear()
    module("proof")._refusals.clear()
    assert_bits_equal(call(kernel.generalized_jsd_loss, *pair), call(eager_jsd, *pair))
    assert not launched
    (refused,) = module("proof").verdicts_about(kernel.generalized_jsd_loss)[1]
    assert reason in refused


@interpreted
def test_transforms_autocast_and_traces_are_eagers(kernel, launched, pair):
    for transform in (
        lambda f: torch.func.grad(lambda s, t: f(s, t), (0, 1))(*pair),
        lambda f: torch.func.jvp(f, tuple(pair), tuple(pair)),
    ):
        for found, expected in zip(transform(kernel.generalized_jsd_loss), transform(eager_jsd)):
            assert_bits_equal(found, expected)
    halves = [each.bfloat16() for each in pair]
    with torch.autocast("cpu", torch.bfloat16):
        assert_bits_equal(kernel.generalized_jsd_loss(*halves), eager_jsd(*halves))
        assert not launched
        kernel.generalized_jsd_loss(*pair)  # fp32 stays fp32.
    assert launched


@interpreted
def test_masked_rows_are_not_computed_without_gradients(kernel, launched, pair):
    """Rows that do not count may hold anything, and have no terms."""
    labels = torch.tensor([3, -100, 5])
    expected = kernel.generalized_jsd_loss(*pair, labels, reduction="none")
    pair[0][1], pair[1][1] = math.nan, math.inf
    assert_bits_equal(kernel.generalized_jsd_loss(*pair, labels, reduction="none"), expected)
    assert kernel.generalized_jsd_loss(*pair, torch.full((3,), -100), reduction="none").shape == (0, 2049)


# GPU


GPU_VOCABULARIES = (2049, 4096, 9224, 12256, 24600, 32000, 50257, 128256, 151936)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_terms_and_gradients_are_those_of_eager(kernel, launched, seed, monkeypatch, dtype):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator, choose = torch.Generator("cuda").manual_seed(seed), random.Random(seed)
    for vocabulary in (*GPU_VOCABULARIES, *(choose.randint(2049, 40000) for _ in range(3))):
        # Each form has kernels of its own, which take seconds to compile.
        beta, temperature = choose.choice(((0, 1.0), (1, 0.9), (0.5, 1.0), (0.1, 2.0)))
        shape = choose.choice(((37,), (2, 19)))
        pair = torch.randn(2, *shape, vocabulary, generator=generator, device="cuda") * choose.choice((1.0, 5.0))
        pair.view(2, -1, vocabulary)[0, 0, 3], pair.view(2, -1, vocabulary)[1, 5, 7] = -math.inf, -math.inf
        student, teacher = (each[..., : shape[-1] - 1, :] for each in pair.to(dtype))
        mask = choose.choice((None, torch.rand(student.shape[:-1], generator=generator, device="cuda") < 0.7))
        of_terms = student.shape if mask is None else (int(mask.sum()), vocabulary)
        dy = torch.randn(of_terms, generator=generator, device="cuda").to(dtype)
        dy = choose.choice((dy, torch.full((), 0.7, dtype=dtype, device="cuda").expand(of_terms)))
        wanted = choose.choice(((True, False), (True, True), (False, True)))
        given = student, teacher, labels_from(mask), beta, temperature, dy, wanted
        count = len(launched)
        found, expected = (results(f, *given) for f in (kernel.generalized_jsd_loss, eager_jsd))
        assert_same(found, [None if each is None else each.contiguous() for each in expected], f"{vocabulary} {beta}")
        assert len(launched) > count


@pytest.mark.gpu
def test_linear_layers_and_losses_are_those_of_eager(kernel, launched, seed, monkeypatch):
    """Gradients over the logits, sums by ATen, large tensors."""
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    for vocabulary, dtype in ((32000, torch.bfloat16), (50257, torch.float32), (128256, torch.float16)):
        given = [each.cuda() for each in tensors(seed, (2, 300), vocabulary, dtype)]
        for beta in (0, 0.3, 1):
            found = []
            for function in (kernel.linear_jsd_loss, eager_linear):
                leaves = [each.clone().requires_grad_() for each in given]
                loss = function(*leaves, labels_of(given[0]).cuda(), beta=beta, temperature=0.9)
                found.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
            for mine, theirs in zip(*found, strict=True):
                assert_bits_equal(mine, theirs, f"{vocabulary} {dtype} {beta}")
    assert launched


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_transcription_is_what_eager_computes(seed, dtype):
    """Given the exponentials and logarithms of the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    functions = {"exp": lambda x: x.cuda().exp().cpu(), "log": lambda x: x.cuda().log().cpu()}
    for vocabulary in (*VOCABULARIES, 32001):
        for beta in (0, 1, 0.3):
            x = torch.randn(2, 16, vocabulary, generator=generator, device="cuda").to(dtype)
            dy = torch.randn(16, vocabulary, generator=generator, device="cuda").to(dtype)
            expected = results(eager_jsd, *x, None, beta, 0.9, dy)
            s, t = (aten_model.scaled_log_softmax(each.cpu(), 0.9, **functions) for each in x)
            gradients = aten_model.jsd_backward(dy.cpu(), s, t, beta, **functions, device="cuda")
            gradients = [
                aten_model.divided(aten_model.log_softmax_backward(each, y, functions["exp"]), 0.9)
                for each, y in zip(gradients, (s, t))
            ]
            for mine, theirs in zip((aten_model.jsd(s, t, beta, **functions, device="cuda"), *gradients), expected):
                assert_bits_equal(mine, theirs.cpu(), f"{vocabulary}, beta {beta}")
