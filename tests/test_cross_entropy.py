"""Cross-entropy: the kernels in Triton's interpreter against the model of CUDA's arithmetic, and what surrounds them.

The interpreter has numpy's exponentials, for the model too, and rounds an FMA as its version does. It truncates to bf16: gradients are compared
in fp32 and fp16.
"""

import itertools
import math
import os
import random
from types import SimpleNamespace

import aten_model
import numpy
import pytest
import torch
from bits import assert_bits_equal, bits_equal
from interpreter import multiply_add
from places import forget_calls
from torch.nn import functional

pytestmark = [
    pytest.mark.usefixtures("proof_off", "small_gpu"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero|All-NaN):RuntimeWarning"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")

IGNORE = -100
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Every kernel of ATen's, both sides of where the next one begins, and vocabularies of language models.
SHORT = (2, 3, 31, 32, 33, 1000, 1024, 1025, 2048, 2049, 4100, 9216, 9217, 9220, 12252, 12253, 12256)
LONG = (32000, 50257, 50304, 128256, 151936, 248320)


@pytest.fixture
def small_gpu(module, monkeypatch):
    """In the interpreter one multiprocessor, so that a program takes several long rows."""
    if not torch.cuda.is_available():
        plans = module("plans")
        monkeypatch.setattr(plans, "gpu", lambda device: plans.Gpu(None, 0, multiprocessors=1))


def numpy_exp(x):
    return torch.from_numpy(numpy.asarray(numpy.exp(x.numpy())))


def numpy_log(x):
    return torch.from_numpy(numpy.asarray(numpy.log(x.numpy())))


def logits_and_targets(generator, rows, vocab, dtype):
    """Rows whose sums of exponentials have many terms that count, some with infinities and NaN, some without a target."""
    x = (torch.randn(rows, vocab, generator=generator) * 2).to(dtype)
    target = torch.randint(vocab, (rows,), generator=generator)
    special = torch.randperm(rows, generator=generator)[: rows - 3].tolist()
    cases = [*itertools.product((math.nan, math.inf, -math.inf, None), ("one", "all"), (False, True))]
    for row, at in zip(special, torch.randperm(len(cases), generator=generator).tolist()):
        value, where, ignored = cases[at]
        if value is not None:
            x[row, slice(None) if where == "all" else target[row]] = value
        target[row] = IGNORE if ignored else target[row]
    return x, target


def model_of(x, misaligned=0):
    """The maximum of each row, the logarithm of its sum of exponentials, and its log-probabilities."""
    h = x.float().contiguous()
    maximum, total = aten_model.softmax_statistics(h, misaligned, numpy_exp)
    log_sum = numpy_log(total)
    return maximum, log_sum, (h - maximum[:, None]) - log_sum[:, None]


def check(module, x, target, reduction, d_loss, misaligned=0, label=""):
    """Statistics, loss and gradient of one call against the model."""
    family = module("cross_entropy")
    call = family._LossCall(x, IGNORE, reduction)
    loss, maxima, log_sums, count = call(x, target)
    maximum, log_sum, logp = model_of(x, misaligned)
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
    if x.dtype == torch.bfloat16:
        return
    gradient = call.gradient(x, target, maxima, log_sums, d_loss, count)
    weight = total_weight if reduction == "mean" else None
    expected = aten_model.cross_entropy_backward(logp, target, IGNORE, d_loss, weight, numpy_exp, multiply_add)
    assert_bits_equal(gradient, expected.to(x.dtype), f"gradient of {label}")


# `LOSSLESS_CASES=300 pytest tests/test_cross_entropy.py -k at_random` for docs/numerics.md.
CASES = int(os.environ.get("LOSSLESS_CASES", 6))


@interpreted
@pytest.mark.parametrize("vocab", SHORT + LONG)
def test_kernels_equal_the_model(module, seed, vocab):
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    rows, dtypes = (17 if vocab < 2050 else 9, DTYPES[:2]) if vocab in SHORT else (5, (choose.choice(DTYPES[1:]),))
    for dtype in dtypes:
        x, target = logits_and_targets(generator, rows, vocab, dtype)
        reduction = choose.choice(("mean", "sum"))
        d_loss = choose.choice((torch.randn((), generator=generator), torch.tensor(0.0), torch.tensor(-0.0)))
        check(module, x, target, reduction, d_loss, label=f"{rows}x{vocab} {dtype} {reduction}")


@interpreted
def test_kernels_equal_the_model_for_vocabularies_at_random(module, seed):
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for _ in range(CASES):
        vocab, dtype = choose.randint(2, int(2 ** choose.uniform(2, 16))), choose.choice(DTYPES)
        rows, reduction = choose.randint(1, 12), choose.choice(("mean", "sum"))
        x, target = logits_and_targets(generator, max(rows, 3), vocab, dtype)
        check(
            module, x[:rows], target[:rows], reduction, torch.tensor(0.7), label=f"{rows}x{vocab} {dtype} {reduction}"
        )


@interpreted
def test_steps_that_stay_in_registers(module, seed, monkeypatch):
    """Numbers of steps that are held, of steps at once, and of steps and elements after them."""
    family, generator, choose = module("cross_entropy"), torch.Generator().manual_seed(seed), random.Random(seed)
    for held, unroll in ((1, 4), (2, 1), (3, 2), (3, 4)):
        vocab = 4 * choose.randint(12288 // 4, 12320 // 4) + 4096 * choose.randint(0, 3)
        # Two programs of the small GPU take the rows.
        plan = family.CrossEntropyPlan(num_warps=16, unroll=unroll, programs_per_multiprocessor=1, held=held)
        monkeypatch.setattr(family, "launch_plan", lambda *_, plan=plan: plan)
        x, target = logits_and_targets(generator, 5, vocab, choose.choice(DTYPES))
        check(module, x, target, "mean", torch.tensor(0.7), label=f"5x{vocab} {x.dtype} {plan}")


@interpreted
# The longest take half a minute.
@pytest.mark.parametrize("vocab", [*SHORT, *(pytest.param(size, marks=pytest.mark.long) for size in LONG)])
def test_special_rows_and_their_gradients(module, seed, vocab):
    """NaN, +inf and -inf at the target or everywhere, counted and ignored; then four of these rows, all ignored."""
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    cases = [*itertools.product((math.nan, math.inf, -math.inf), ("one", "all"), (False, True))]
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(len(cases), vocab, generator=generator).to(dtype)
        target = torch.randint(vocab, (len(cases),), generator=generator)
        for row, (value, where, ignored) in enumerate(cases):
            x[row, slice(None) if where == "all" else target[row]] = value
            target[row] = IGNORE if ignored else target[row]
        reduction, d_loss = choose.choice(("mean", "sum")), torch.randn((), generator=generator)
        check(module, x, target, reduction, d_loss, label=f"special rows of {vocab} {dtype} {reduction}")
        all_ignored = torch.full_like(target[:4], IGNORE)
        check(module, x[:4], all_ignored, reduction, d_loss, label=f"ignored rows of {vocab} {dtype} {reduction}")


@interpreted
@pytest.mark.parametrize("vocab", [33, 1025, 4100, 9217])
def test_the_gradient_does_not_depend_on_logits_of_ignored_rows(module, seed, vocab):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, vocab, generator=generator)
    target = torch.randint(vocab, (6,), generator=generator)
    target[torch.randperm(6, generator=generator)[:3]] = IGNORE
    call = module("cross_entropy")._LossCall(x, IGNORE, "mean")
    _, maxima, log_sums, count = call(x, target)
    gradients = []
    for value in (None, math.nan):
        if value is not None:
            x[target == IGNORE] = value
        gradients.append(call.gradient(x, target, maxima, log_sums, torch.tensor(0.7), count))
    assert_bits_equal(gradients[1], gradients[0], "gradient with NaN in ignored rows")
    assert not gradients[0][target == IGNORE].any() and gradients[0][target != IGNORE].any(1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["weight", "smoothing", "both", "probabilities"])
def test_weights_smoothing_and_probabilities_are_eager_s(module, seed, dtype, reduction, kind):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 17, generator=generator).to(dtype)
    target = torch.randint(17, (5,), generator=generator)
    target[1] = IGNORE
    if kind == "probabilities":
        target = torch.rand(5, 17, generator=generator).softmax(1)
    arguments = {}
    if kind in ("weight", "both"):
        arguments["weight"] = torch.rand(17, generator=generator)
    if kind in ("smoothing", "both"):
        arguments["label_smoothing"] = 0.1
    results = []
    for compute in (
        module("cross_entropy").cross_entropy,
        lambda x, *a, **k: functional.cross_entropy(x.float(), *a, **k),
    ):
        leaf = logits.clone().requires_grad_()
        loss = compute(leaf, target, ignore_index=IGNORE, reduction=reduction, **arguments)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), leaf)))
    assert_bits_equal(results[0][0], results[1][0], "loss")
    assert_bits_equal(results[0][1], results[1][1], "gradient")


@pytest.mark.parametrize(
    "arguments",
    [
        {"target": torch.zeros(4, dtype=torch.int64)},
        {"target": torch.zeros(5, dtype=torch.int32)},
        {"target": torch.zeros(5, dtype=torch.int16)},
        {"target": torch.zeros(5, 16)},
        {"target": torch.zeros(5, dtype=torch.int64), "weight": torch.ones(16)},
        {"target": torch.zeros(5, dtype=torch.int64), "label_smoothing": 1.5},
    ],
    ids=["length", "int32", "int16", "probabilities", "weight", "smoothing"],
)
def test_bad_input_raises_eager_s_error(module, arguments):
    logits = torch.zeros(5, 17)
    with pytest.raises((RuntimeError, ValueError, IndexError)) as expected:
        functional.cross_entropy(logits, **arguments)
    with pytest.raises(expected.type) as found:
        module("cross_entropy").cross_entropy(logits, **arguments)
    assert str(found.value) == str(expected.value)


@interpreted
@pytest.mark.parametrize("vocab", [100, 9217, 9220, 12256])
def test_fp32_rows_are_added_up_by_where_they_lie(module, seed, vocab):
    """Eager reads them in place if they are dense, and a copy otherwise; of 16 bits it always makes one."""
    generator = torch.Generator().manual_seed(seed)
    x, target = logits_and_targets(generator, 6, vocab, torch.float32)
    for misaligned in (1, 2, 3):
        there = torch.empty(x.numel() + 3)[misaligned : misaligned + x.numel()].view(x.shape).copy_(x)
        assert there.data_ptr() // 4 % 4 == misaligned
        check(module, there, target, "mean", torch.tensor(1.0), misaligned, f"{vocab} at {misaligned}")
    apart = torch.empty(6, vocab + misaligned)[:, :vocab].copy_(x)
    check(module, apart, target, "mean", torch.tensor(1.0), 0, f"{vocab} with rows apart")
    there = torch.empty(x.numel() + 3, dtype=torch.float16)[1 : 1 + x.numel()].view(x.shape).copy_(x)
    check(module, there, target, "mean", torch.tensor(1.0), 0, f"{vocab} of 16 bits")


def flat_tree(lanes, LANES):
    """Halves over all lanes at once, in the place of warps first and then lanes of a warp."""
    values = lanes.handle.data
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    lanes.handle.data = numpy.resize(values, lanes.handle.data.shape)
    return lanes


@interpreted
@pytest.mark.parametrize(
    "vocab, wrong",
    [
        (1000, {"threads": 16}),
        (9000, {"kind": "loop"}),
        (9220, {"kind": "loop"}),
        (9220, {"kind": "registers"}),
        (12252, {"kind": "loop"}),
        (12256, {"kind": "shared"}),
        (16396, {"kind": "shared"}),
        (9225, {"shift": 1}),
        (9221, {"shift": 2}),
        (12256, {"tree": flat_tree}),
    ],
)
def test_the_model_tells_of_a_wrong_order(module, monkeypatch, seed, vocab, wrong):
    """It shows in more than half of the rows: none of 16 would one time in 65,536."""
    family, softmax = module("cross_entropy"), module("softmax")
    generator, rows = torch.Generator().manual_seed(seed), 16
    x = torch.randn(rows, vocab, generator=generator)
    # Of a sum in [1, 1.5) the logarithm shows every bit.
    x[:, 7] = x.logsumexp(1) + 1.2
    right = model_of(x)[1]
    target = torch.zeros(rows, dtype=torch.int64)

    def log_sums():
        return family._LossCall(x, IGNORE, "mean")(x, target)[2]

    assert_bits_equal(log_sums(), right)
    if "tree" in wrong:
        monkeypatch.setattr(module("kernels_src.cross_entropy"), "sum_of_block", wrong["tree"])
    elif "shift" in wrong:
        find = family._forward

        def shifted(logits, *arguments):
            launch = find(logits, *arguments)
            launch._launcher.constants["SHIFT"] = wrong["shift"]
            return launch

        monkeypatch.setattr(family, "_forward", shifted)
    else:
        found = {"kind": softmax.softmax_forward(vocab, torch.float32).kind, "threads": 1024, **wrong}
        monkeypatch.setattr(
            family, "softmax_forward", lambda *_, **__: softmax.Softmax(found["kind"], found["threads"], 4)
        )
    differing = int((log_sums() != right).sum())
    family.launch._launcher.cache_clear()  # Its constants are no longer those that it is found by.
    print(f"{differing} of {rows} rows differ")
    assert differing


# What surrounds the kernels


@pytest.fixture
def eager(module, monkeypatch):
    """Without kernels: what remains is eager's, on a CPU too."""
    monkeypatch.setattr(module("cross_entropy"), "runs_kernels", lambda device: False)
    module("cross_entropy")._calls.clear()
    yield
    module("cross_entropy")._calls.clear()


def gradients_of(function, logits):
    leaf = logits.detach().clone().requires_grad_()
    loss = function(leaf)
    loss.backward()
    return loss.detach(), leaf.grad


@interpreted
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_autograd_gets_what_the_kernels_compute(kernel, module, seed, dtype, reduction):
    family, generator = module("cross_entropy"), torch.Generator().manual_seed(seed)
    x, target = logits_and_targets(generator, 12, 2050, dtype)
    call = family._LossCall(x, IGNORE, reduction)
    expected, maxima, log_sums, count = call(x, target)
    weight = torch.tensor(0.3)
    loss, gradient = gradients_of(lambda x: kernel.cross_entropy(x, target, reduction=reduction) * weight, x)
    assert_bits_equal(loss, expected * weight)
    assert_bits_equal(gradient, call.gradient(x, target, maxima, log_sums, weight, count))
    with torch.no_grad():
        assert_bits_equal(kernel.cross_entropy(x, target, reduction=reduction), expected)
    leaf = x.clone().requires_grad_()
    assert kernel.cross_entropy(leaf, target, reduction=reduction).grad_fn.name() == "CrossEntropyBackward"


@interpreted
@pytest.mark.parametrize("ignore_index", [-100, 0, 7])
def test_a_target_that_is_ignored_may_be_a_class(kernel, seed, ignore_index):
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(9, 40, generator=generator), torch.arange(9) - 1
    target[0] = ignore_index
    loss, gradient = gradients_of(lambda x: kernel.cross_entropy(x, target, ignore_index), x)
    expected, theirs = gradients_of(lambda x: functional.cross_entropy(x, target, ignore_index=ignore_index), x)
    # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, theirs)
    ignored = target == ignore_index
    assert torch.equal(gradient.view(torch.int32).any(-1), ~ignored)


@interpreted
def test_of_ignored_rows_alone(kernel):
    x, target = torch.randn(5, 3000), torch.full((5,), IGNORE)
    x[1, 5], x[2] = math.nan, -math.inf
    for reduction, expected in (("mean", math.nan), ("sum", 0.0)):
        loss, gradient = gradients_of(lambda x: kernel.cross_entropy(x, target, reduction=reduction), x)  # noqa: B023
        assert bits_equal(loss, torch.tensor(expected))
        assert gradient[[0, 3, 4]].view(torch.int32).eq(0).all() and gradient[[1, 2]].isnan().all()


@interpreted
def test_a_target_out_of_range_is_refused_as_by_eager(kernel):
    for wrong in (40, -1, -101, 1 << 40):
        with pytest.raises(IndexError, match="out of bounds"):
            kernel.cross_entropy(torch.randn(3, 40), torch.tensor([1, wrong, 2]))


@pytest.mark.parametrize("device, other", [("cpu", "meta"), ("meta", "cpu")])
def test_a_target_on_another_device_is_refused_as_by_eager(kernel, device, other):
    logits, target = torch.empty(3, 40, device=device), torch.zeros(3, dtype=torch.int64, device=other)
    messages = []
    for function in (functional.cross_entropy, kernel.cross_entropy):
        with pytest.raises(RuntimeError, match="is not on the expected device") as error:
            function(logits, target)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@interpreted
def test_logits_must_not_change_before_the_backward_pass(kernel):
    leaf = torch.randn(3, 40, requires_grad=True)
    logits = leaf * 1.0
    loss = kernel.cross_entropy(logits, torch.tensor([1, 0, 2]))
    logits.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@interpreted
def test_hooks_may_give_saved_logits_back_with_other_strides(kernel, seed):
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(4, 60, generator=generator), torch.tensor([1, IGNORE, 2, 49])
    gradients = []
    for unpack in (lambda saved: saved, lambda saved: saved.contiguous()):
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            gradients.append(gradients_of(lambda x: kernel.cross_entropy(x[:, :50], target), x)[1])
    # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
    torch.testing.assert_close(*gradients)


@interpreted
def test_gradients_can_be_differentiated(kernel, seed):
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(4, 50, generator=generator), torch.tensor([1, IGNORE, 2, 49])
    penalties = []
    for function in (kernel.cross_entropy, functional.cross_entropy):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf, target), leaf, create_graph=True)
        gradient.square().sum().backward()
        penalties.append(leaf.grad)
    # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
    torch.testing.assert_close(*penalties)
    assert penalties[0].any()


def outside():
    x, target = torch.randn(6, 40), torch.arange(6)
    return {
        "float64": ((x.double(), target), {}),
        "one class": ((x[:, :1], target * 0), {}),
        "columns first": ((x.t().contiguous().t(), target), {}),
        "no reduction": ((x, target), {"reduction": "none"}),
        "probabilities": ((x, x.softmax(-1)), {}),
        "more dimensions": ((x.view(2, 3, 40).transpose(1, 2), target.view(2, 3)), {}),
        "no dimension": ((x[0], target[1]), {}),
        "no rows": ((x[:0], target[:0]), {"reduction": "sum"}),
        "targets apart": ((x[:3], target[::2]), {}),
        "a subclass": ((x.as_subclass(type("Other", (torch.Tensor,), {})), target), {}),
    }


@pytest.mark.parametrize("case", outside())
def test_outside_the_domain_eager_runs(kernel, module, case):
    (logits, target), options = outside()[case]
    arguments = {"ignore_index": IGNORE, "reduction": "mean", **options}
    if case != "targets apart":
        assert module("cross_entropy").replacement(logits, target, **arguments) is None
    loss = kernel.cross_entropy(logits, target, **arguments)
    expected = functional.cross_entropy(logits.float(), target, **arguments)
    assert bits_equal(loss.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))


def test_16_bits_before_compute_capability_8_are_eagers(module, monkeypatch):
    """A maximum of two 16-bit numbers that returns NaN is an instruction of sm_80: nothing must be compiled."""
    plans, family = module("plans"), module("cross_entropy")
    target = torch.arange(6)
    for capability, dtypes in ((7, (torch.float32,)), (8, (torch.float32, torch.float16, torch.bfloat16))):
        monkeypatch.setattr(plans, "gpu", lambda device, capability=capability: plans.Gpu(capability, 0))
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            forget_calls(module)
            call = family.call_of(torch.randn(6, 40).to(dtype), target, IGNORE, "mean")
            assert (call is not None) is (dtype in dtypes), (capability, dtype)
    forget_calls(module)


def test_wrong_arguments_are_named(kernel):
    with pytest.raises(TypeError, match=r"logits: .* found list"):
        kernel.cross_entropy([1.0], torch.tensor([0]))
    with pytest.raises(TypeError, match=r"logits: .* found torch.int64"):
        kernel.cross_entropy(torch.ones(1, 2, dtype=torch.int64), torch.tensor([0]))
    with pytest.raises(ValueError, match="reduction: .* found 'max'"):
        kernel.cross_entropy(torch.ones(1, 2), torch.tensor([0]), reduction="max")
    with pytest.raises(TypeError, match="labels: expected a torch.Tensor, found NoneType"):
        kernel.causal_lm_loss(torch.ones(1, 2, 3), None, 3)
    loss = kernel.causal_lm_loss(torch.ones(1, 1, 3), None, 3, shift_labels=torch.tensor([[2]]))
    assert_bits_equal(loss, functional.cross_entropy(torch.ones(1, 3), torch.tensor([2])))


@pytest.mark.parametrize("shift_labels", [False, True])
@pytest.mark.parametrize("items", [None, 17, torch.tensor(23), torch.tensor(5.5)], ids=str)
def test_causal_lm_loss_is_that_of_transformers(kernel, eager, seed, items, shift_labels):
    """All but the kernels, which are eager here."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    generator = torch.Generator().manual_seed(seed)
    for dtype, ignore_index in itertools.product((torch.float32, torch.bfloat16), (-100, 3)):
        logits = torch.randn(2, 5, 40, generator=generator).to(dtype)
        labels = torch.randint(40, (2, 5), generator=generator)
        labels[0, :2] = ignore_index
        arguments = {"ignore_index": ignore_index, "num_items_in_batch": items, "unused": None}
        if shift_labels:
            arguments["shift_labels"] = labels.roll(1)
        for view in (slice(None), slice(1, 4)):
            if view != slice(None) and (shift_labels or dtype == torch.float32):
                continue  # Of fp32 logits with a gap between sequences transformers itself makes no rows.

            def loss_by(function):
                return lambda x: function(x[:, view], labels[:, view], 40, **arguments)  # noqa: B023

            expected, theirs = gradients_of(loss_by(ForCausalLMLoss), logits)
            loss, gradient = gradients_of(loss_by(kernel.causal_lm_loss), logits)
            assert_bits_equal(loss, expected)
            assert_bits_equal(gradient, theirs)
            assert gradient.stride() == theirs.stride()


@interpreted
@pytest.mark.parametrize("items", [None, 17], ids=str)
def test_causal_lm_loss_runs_the_kernels(kernel, seed, items):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 5, 2050, generator=generator)
    labels = torch.randint(2050, (2, 5), generator=generator)
    loss, gradient = gradients_of(lambda x: kernel.causal_lm_loss(x, labels, 2050, items), logits)
    target = torch.nn.functional.pad(labels, (0, 1), value=IGNORE)[..., 1:].flatten()
    flat = logits.view(-1, 2050)
    reduction = "mean" if items is None else "sum"
    expected, theirs = gradients_of(lambda x: kernel.cross_entropy(x, target, reduction=reduction) / (items or 1), flat)
    assert_bits_equal(loss, expected)
    assert_bits_equal(gradient.view(-1, 2050), theirs)


def test_a_model_takes_the_function_as_its_loss(kernel):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=200, **sizes))
    tokens = torch.randint(200, (2, 6))
    expected = model(input_ids=tokens, labels=tokens).loss
    model.loss_function = kernel.causal_lm_loss
    loss = model(input_ids=tokens, labels=tokens).loss
    # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
    torch.testing.assert_close(loss, expected)
    assert loss.grad_fn.name() == ("NllLossBackward0" if torch.cuda.is_available() else "CrossEntropyBackward")
    loss.backward()


@interpreted
@pytest.mark.parametrize("dtype", DTYPES[::2])
def test_the_proof_compares_with_eager_and_tells_of_a_wrong_order(module, monkeypatch, dtype):
    family, cpu = module("cross_entropy"), torch.device("cpu")

    def of_model(h, dim):
        return aten_model.log_softmax(h, h.data_ptr() // 4 % 4 if dtype == torch.float32 else 0, numpy_exp, numpy_log)

    monkeypatch.setattr(family, "_PROOF_ROWS", 16)
    monkeypatch.setattr(family, "functional", SimpleNamespace(log_softmax=of_model))
    layouts = [(2050, True, 2, 0), (9221, False, 1, 0)] + [(9220, True, 4, 3)] * (dtype == torch.float32)
    for layout in layouts:
        ((what, found, expected),) = family._comparisons(dtype, *layout, cpu, None)
        assert_bits_equal(found, expected, f"{what} {layout}")
        assert found[:-4].isfinite().all() and found[-4:].isnan().all()
    monkeypatch.setattr(family, "functional", functional)
    # CPU eager adds in another order, and so would refuse.
    ((_, found, expected),) = family._comparisons(dtype, *layouts[0], cpu, None)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert not bits_equal(found, expected)


@interpreted
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_proof_of_gradients_compares_loss_and_gradient(module, monkeypatch, reduction):
    monkeypatch.setattr(module("cross_entropy"), "_PROOF_ROWS", 16)
    pairs = list(module("cross_entropy")._comparisons(torch.float32, 2050, True, 2, 0, torch.device("cpu"), reduction))
    assert [what for what, _, _ in pairs] == ["the loss", "the gradient"]
    for _, found, expected in pairs:
        assert expected.isfinite().any() and found.stride() == expected.stride()
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        torch.testing.assert_close(found, expected, equal_nan=True)


@interpreted
def test_without_proof_eager_runs(kernel, module, nothing_known, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    monkeypatch.setattr(module("cross_entropy"), "_PROOF_ROWS", 16)
    x, target = torch.randn(3, 2111), torch.tensor([1, 2, 3])
    with pytest.warns(
        RuntimeWarning, match="cross_entropy on cpu, torch.float32, 2111 classes, log-probabilities.*differ"
    ):
        loss, gradient = gradients_of(lambda x: kernel.cross_entropy(x, target), x)
    expected, theirs = gradients_of(lambda x: functional.cross_entropy(x, target), x)
    assert_bits_equal(loss, expected)
    assert_bits_equal(gradient, theirs)


# On a GPU: eager itself


@pytest.mark.gpu
def test_loss_and_gradient_are_those_of_eager(kernel, module, seed):
    generator, choose = torch.Generator("cuda").manual_seed(seed), random.Random(seed)
    for _ in range(40):
        vocab, dtype = choose.choice(SHORT + LONG), choose.choice((torch.float32, torch.float16, torch.bfloat16))
        rows = choose.randint(3, max(3, min(3000, (1 << 27) // vocab)))
        x = torch.randn(rows, vocab, generator=generator, device="cuda") * 2
        x[: rows // 2, 0] = x[: rows // 2].logsumexp(1) + 1.2
        x[choose.randrange(rows), choose.randrange(vocab)] = choose.choice((math.nan, math.inf, -math.inf, 0.0))
        x, target = x.to(dtype), torch.randint(vocab, (rows,), generator=generator, device="cuda")
        target[torch.rand(rows, generator=generator, device="cuda") < choose.choice((0.0, 0.5))] = IGNORE
        reduction, label = choose.choice(("mean", "sum")), f"{rows}x{vocab} {dtype}"
        assert module("cross_entropy").replacement(x, target, IGNORE, reduction) is not None, label
        loss, gradient = gradients_of(lambda x: kernel.cross_entropy(x, target, reduction=reduction), x)  # noqa: B023
        expected, theirs = gradients_of(
            lambda x: functional.cross_entropy(x.float(), target, reduction=reduction),  # noqa: B023
            x,
        )
        assert_bits_equal(loss, expected, f"loss of {label}")
        assert_bits_equal(gradient, theirs, f"gradient of {label}")


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", SHORT + LONG)
def test_the_model_is_what_eager_computes(seed, vocab):
    """Given the exponentials and logarithms of the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(16, vocab, generator=generator, device="cuda")
    x[:, 1] = x.logsumexp(1) + 1.2
    target = torch.randint(vocab, (16,), generator=generator, device="cuda")
    target[3] = IGNORE
    of_gpu = {"exp": lambda x: torch.exp(x.cuda()).cpu(), "log": lambda x: torch.log(x.cuda()).cpu()}
    logp = aten_model.log_softmax(x.cpu(), **of_gpu)
    eager = functional.log_softmax(x, -1)
    assert_bits_equal(logp, eager.cpu(), "log_softmax")
    leaf = x.requires_grad_()
    for reduction in ("mean", "sum"):
        loss = functional.cross_entropy(leaf, target, reduction=reduction)
        found = aten_model.nll_loss(logp, target.cpu(), IGNORE, reduction)
        assert_bits_equal(found.loss, loss.detach().cpu(), f"loss, {reduction}")
        (gradient,) = torch.autograd.grad(loss, leaf)
        weight = found.total_weight if reduction == "mean" else None
        one = torch.tensor(1.0)
        expected = aten_model.cross_entropy_backward(logp, target.cpu(), IGNORE, one, weight, of_gpu["exp"])
        assert_bits_equal(expected, gradient.cpu(), f"gradient, {reduction}")


# The proof's power, on its own kind of rows, in the model of CUDA's arithmetic

# So many proofs of each order: `LOSSLESS_PROOFS=1000 pytest tests/test_cross_entropy.py -k power -rP` for docs/numerics.md.
PROOFS = int(os.environ.get("LOSSLESS_PROOFS", 3))


def wrong_orders(vocab):
    """By name the steps of each thread, and whether the tree takes warps first."""
    right = aten_model.softmax_steps(vocab)
    threads = len(right[0])
    by_thread = [
        first + threads * 0 + torch.arange(threads) * -(-vocab // threads) for first in range(-(-vocab // threads))
    ]
    orders = {
        "one after the other": None,
        "another number of threads": (
            [first + torch.arange(threads // 2) for first in range(0, vocab, threads // 2)],
            True,
        ),
        "a thread's elements beside each other": (by_thread, True),
    }
    if vocab > 2048:
        orders["the other tree"] = (right, False)
    if vocab > 9216:
        plain = [first + torch.arange(1024) for first in range(0, vocab, 1024)]
        wide = [first + 8 * torch.arange(1024) + position for first in range(0, vocab, 8192) for position in range(8)]
        orders |= {"vectors of 1": (plain, True), "vectors of 8": (wide, True)}
    if len(right) % 4 and vocab > 12255:
        tail = vocab // 4096 * 4
        orders["the tail first"] = (right[tail:] + right[:tail], True)
    return right, orders


def plain_sums(terms):
    return torch.from_numpy(numpy.cumsum(terms.numpy(), axis=1, dtype=numpy.float32)[:, -1].copy())


def row_sums(terms, steps, warps_first):
    total = 0.0
    for step in steps:
        total = total + terms[:, torch.where((step >= 0) & (step < terms.shape[1] - 1), step, -1)]
    if warps_first:
        total = aten_model._halving_sum(total.view(len(total), -1, min(32, total.shape[1])), dim=2)
    return aten_model._halving_sum(total, dim=1)


@interpreted
@pytest.mark.parametrize(
    "vocab", [1000, 9000, *(pytest.param(vocab, marks=pytest.mark.long) for vocab in (9220, 12252, 13256))]
)
def test_power_of_the_proof(module, seed, vocab):
    """How many proofs of 64 rows find each wrong order by log-probabilities that differ."""
    right, orders = wrong_orders(vocab)
    generator, rows = torch.Generator().manual_seed(seed), module("cross_entropy")._PROOF_ROWS
    caught, shown = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0)
    for _ in range(PROOFS):
        x, _ = module("cross_entropy").proof_rows(rows, vocab, 0, generator, torch.device("cpu"))
        maximum = x.amax(-1)
        terms = functional.pad(numpy_exp(x - maximum[:, None]), (0, 1))

        # A row's largest element has this as its log-probability, but for the sign.
        expected = numpy_log(row_sums(terms, right, True))
        for name, order in orders.items():
            found = plain_sums(terms) if order is None else row_sums(terms, *order)
            wrong = (numpy_log(found) != expected).sum()
            caught[name] += bool(wrong)
            shown[name] += int(wrong)
    print(f"{vocab}: of {PROOFS * rows} rows {shown}")
    print(f"{vocab}: {caught} of {PROOFS}")
    assert set(caught.values()) == {PROOFS}
