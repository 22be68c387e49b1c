"""TRL's losses slice by slice: the bits of TRL's operations on all rows, and fewer tensors."""

import copy

import pytest
import torch
from bits import assert_bits_equal
from test_linear_cross_entropy import peak
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCABULARIES = [2, 7, 64, 127, 1000, 1025, 2049, 4100]
# Random cases of each function, here and against TRL itself.
CASES = 25

# What TRL computes, by its documentation: on all rows at once but for the loops that decide bits.


def eager_jsd(student, teacher, labels=None, beta=0.5, temperature=1.0, reduction="batchmean", num_items_in_batch=None):
    s, t = ((each / temperature).log_softmax(-1) for each in (student, teacher))

    def divergence(input, target):
        return functional.kl_div(input, target, reduction="none", log_target=True)

    if beta in (0, 1):
        terms = divergence(s, t) if beta == 0 else divergence(t, s)
    else:
        beta = torch.tensor(beta, dtype=s.dtype, device=s.device)
        m = torch.stack([s + (-beta).log1p(), t + beta.log()]).logsumexp(0)
        terms = beta * divergence(m, t) + (1 - beta) * divergence(m, s)
    if labels is not None:
        terms = terms[labels != -100]
    if num_items_in_batch is not None:
        return terms.sum() / num_items_in_batch
    if reduction == "batchmean":
        return terms.sum() / (max(len(terms), 1) if labels is None else (labels != -100).sum().clamp(min=1))
    return {"sum": terms.sum, "mean": terms.mean, "none": lambda: terms}[reduction]()


def eager_selected(logits, index, temperature=1.0, row_mask=None):
    logits = logits / temperature
    several = index if index.dim() == logits.dim() else index[..., None]
    if logits.dtype == torch.float32:
        log_sums = torch.stack([each.logsumexp(-1) for each in logits])
        found = logits.gather(-1, several) - log_sums[..., None]
    else:
        found = torch.stack([each.log_softmax(-1) for each in logits]).gather(-1, several)
    found = found if index.dim() == logits.dim() else found.squeeze(-1)
    return found if row_mask is None else torch.where(row_mask == 0, 0.0, found)


def eager_entropy(logits, chunk_size=128):
    logps = [each.log_softmax(-1) for each in logits.reshape(-1, logits.shape[-1]).split(chunk_size)]
    return torch.cat([-(logp.exp() * logp).sum(-1) for logp in logps]).view(logits.shape[:-1])


class Functions:
    """The three functions of one implementation."""

    def __init__(self, jsd, selected, entropy):
        self.jsd, self.selected, self.entropy = jsd, selected, entropy


EAGER = Functions(eager_jsd, eager_selected, eager_entropy)


@pytest.fixture
def ours(kernel):
    return Functions(kernel.generalized_jsd_loss, kernel.selective_log_softmax, kernel.entropy_from_logits)


@pytest.fixture
def slices(module, monkeypatch):
    """The module, with slices of the fewest rows and no kernels. A failed verification is an error."""
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    monkeypatch.setattr(module("ops.jsd"), "replacement", lambda *_: None)
    monkeypatch.setattr(module("ops.slices"), "_SLICE_ELEMENTS", 1)
    return module("ops.slices")


@pytest.fixture
def sliced(slices, monkeypatch):
    """How often slices were computed."""
    found, apply = [], slices._by_slices

    def spy(*arguments):
        found.append(arguments)
        return apply(*arguments)

    monkeypatch.setattr(slices, "_by_slices", spy)
    return found


def results(function, *logits, dy=None):
    leaves = [each.detach().clone().requires_grad_() for each in logits]
    out = function(*leaves)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype) if dy is None else dy
    return out.detach(), *torch.autograd.grad(out, leaves, dy)


def assert_same(function, ours, eager, *logits, label="", **options):
    found = results(lambda *leaves: function(ours, *leaves), *logits, **options)
    expected = results(lambda *leaves: function(eager, *leaves), *logits, **options)
    for name, mine, theirs in zip(("result", "gradient", "second gradient"), found, expected):
        assert_bits_equal(mine, theirs, f"{name} of {label}")


def random_logits(generator, choose, count, dtype=None):
    """[batch, tokens + 1, vocabulary]; some are infinite. Trainers cut off the last token or the first."""
    dtype, shape = (
        dtype or choose.choice(DTYPES),
        (choose.randint(1, 3), choose.randint(2, 40), choose.choice(VOCABULARIES)),
    )
    logits = [(4 * torch.randn(shape, generator=generator)).to(dtype) for _ in range(count)]
    if choose.random() < 0.3:
        logits[0][0, 0, 0], logits[-1][0, -2, -1] = -torch.inf, torch.inf
    return logits


def compare_at_random(seed, choose, ours, eager):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(CASES):
        student, teacher = random_logits(generator, choose, 2)
        shape = student.shape[:2]
        labels = torch.where(torch.rand(shape, generator=generator) < 0.4, -100, 3)
        labels = choose.choice((None, labels, torch.full(shape, -100)))
        cut, options = choose.choice((slice(None), slice(-1))), {
            "beta": choose.choice((0, 0.0, 1, 1.0, 0.5, 0.1)),
            "temperature": choose.choice((1.0, 0.9, 2)),
            "reduction": choose.choice(("batchmean", "sum", "mean", "none")),
            "num_items_in_batch": choose.choice((None, None, 7, torch.tensor(9))),
        }  # fmt: skip
        assert_same(
            lambda f, s, t: f.jsd(s[:, cut], t[:, cut], None if labels is None else labels[:, cut], **options),  # noqa: B023
            ours, eager, student, teacher, label=f"jsd {tuple(student.shape)} {student.dtype} {options}",
        )  # fmt: skip
        index = torch.randint(student.shape[-1], choose.choice((shape, (*shape, 2))), generator=generator)
        mask = choose.choice((None, torch.rand(index.shape, generator=generator) < 0.5))
        temperature, size = choose.choice((1.0, 0.7)), choose.choice((5, 16, 128))
        assert_same(
            lambda f, x: f.selected(x[:, cut], index[:, cut], temperature, None if mask is None else mask[:, cut]),  # noqa: B023
            ours, eager, student, label=f"log-probabilities {tuple(student.shape)} {student.dtype} {temperature}",
        )  # fmt: skip
        assert_same(
            lambda f, x: f.entropy(x[:, cut], size),  # noqa: B023
            ours, eager, student, label=f"entropy {tuple(student.shape)} {size}",
        )  # fmt: skip


def test_results_and_gradients_are_those_of_all_rows(ours, sliced, seed, chooser):
    compare_at_random(seed, chooser, ours, EAGER)
    assert len(sliced) > CASES


def test_trl_computes_the_same(ours, slices, seed, chooser):
    utils = pytest.importorskip("trl.trainer.utils", reason="TRL is not installed (examples/requirements-trl.txt)")
    trainer = pytest.importorskip("trl.experimental.gkd.gkd_trainer", reason="this TRL has it elsewhere").GKDTrainer
    trl = Functions(trainer.generalized_jsd_loss, utils.selective_log_softmax, utils.entropy_from_logits)
    compare_at_random(seed, chooser, ours, trl)


def jsd(f, s, t):
    return f.jsd(s, t, labels(s), 0.3, 0.9)


def selected(f, x, *_):
    return f.selected(x, labels(x).clamp(min=0), 0.7)


def entropy(f, x, *_):
    return f.entropy(x, 8)


def labels(logits):
    return torch.arange(logits[..., 0].numel()).view(logits.shape[:-1]) % 5 - 1


FUNCTIONS = [jsd, selected, entropy]
every_function = pytest.mark.parametrize("function", FUNCTIONS)


@pytest.fixture
def pair(seed):
    return list(torch.randn(2, 2, 13, 50, generator=torch.Generator().manual_seed(seed)))


@every_function
def test_without_gradients(ours, sliced, pair, function):
    with torch.no_grad():
        found = function(ours, *pair)
    # A function may be tried once more, to verify.
    assert len(sliced) >= 1
    assert_bits_equal(found, function(EAGER, *pair))


@every_function
@pytest.mark.parametrize("scale", [65536.0, 1 / 3, 0.0, -0.0])
def test_scaled_losses(ours, sliced, pair, function, scale):
    """Loss scaling, and DDP's division by the number of processes."""
    assert_same(lambda f, *leaves: function(f, *leaves).sum() * scale, ours, EAGER, *pair[: 1 + (function is jsd)])
    assert sliced


@every_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(ours, sliced, pair, function, dtype):
    def cast(f, *leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return function(f, *leaves)

    assert_same(cast, ours, EAGER, *[each.to(dtype) for each in pair[: 1 + (function is jsd)]], label=f"{dtype}")
    assert sliced


@every_function
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_hooks(ours, sliced, pair, function, reentrant):
    pair = pair[: 1 + (function is jsd)]

    def checkpointed(f, *leaves):
        return checkpoint(lambda *given: function(f, *given), *leaves, use_reentrant=reentrant)

    def gradients(f, call):
        leaves = [each.clone().requires_grad_() for each in pair]
        out = call(f, *leaves)
        out.sum().backward()  # A reentrant checkpoint refuses `torch.autograd.grad`.
        return out.detach(), *(leaf.grad for leaf in leaves)

    for found, expected in zip(gradients(ours, checkpointed), gradients(EAGER, function)):
        assert_bits_equal(found, expected)
    with torch.autograd.graph.save_on_cpu():
        for found, expected in zip(gradients(ours, function), gradients(EAGER, function)):
            assert_bits_equal(found, expected)
    assert sliced


@every_function
def test_gradients_can_be_differentiated(ours, sliced, pair, function):
    def both(f):
        leaves = [each.clone().requires_grad_() for each in pair[: 1 + (function is jsd)]]
        first = torch.autograd.grad(function(f, *leaves).sum(), leaves, create_graph=True)
        return *[each.detach() for each in first], *torch.autograd.grad(
            sum(each.square().sum() for each in first), leaves
        )

    found, expected = both(ours), both(EAGER)
    for mine, theirs in zip(found[: len(found) // 2], expected):
        assert_bits_equal(mine, theirs)
    for mine, theirs in zip(found[len(found) // 2 :], expected[len(found) // 2 :]):
        # Autograd adds the terms of a second derivative in another order.
        torch.testing.assert_close(mine, theirs)
    assert sliced


@every_function
def test_transforms_and_modes(ours, pair, function):
    """`torch.func` sees eager's operations; FLOP counters and the like see them in slices too."""
    pair = pair[: 1 + (function is jsd)]
    for transform in (
        lambda f: torch.func.grad(lambda *leaves: function(f, *leaves).sum(), tuple(range(len(pair))))(*pair),
        lambda f: torch.func.jvp(lambda *leaves: function(f, *leaves), tuple(pair), tuple(pair)),
    ):
        for found, expected in zip(transform(ours), transform(EAGER)):
            assert_bits_equal(found, expected)
    if function is entropy:  # The others index with data or loop over sequences.
        given = torch.stack((pair[0], -pair[0]))
        found, expected = (torch.func.vmap(lambda x: function(f, x))(given) for f in (ours, EAGER))  # noqa: B023
        assert_bits_equal(found, expected)


@every_function
def test_compiled(ours, pair, function):
    torch._dynamo.reset()
    pair = pair[: 1 + (function is jsd)]
    compiled = torch.compile(lambda *leaves: function(ours, *leaves), backend="eager")
    for found, expected in zip(results(compiled, *pair), results(lambda *leaves: function(EAGER, *leaves), *pair)):
        assert_bits_equal(found, expected)


def test_one_tensor_for_student_and_teacher(ours, sliced, pair):
    assert_same(lambda f, x: f.jsd(x, x, beta=0.3), ours, EAGER, pair[0])
    assert sliced


def test_a_teacher_without_a_gradient(ours, sliced, pair):
    assert_same(lambda f, s: f.jsd(s, pair[1], labels(s)), ours, EAGER, pair[0])
    assert sliced


def test_logits_must_not_change_before_the_backward_pass(ours, slices, pair):
    for function in FUNCTIONS:
        logits = pair[0].clone().requires_grad_()
        given = logits * 1.0
        out = function(ours, given, pair[1])
        given.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_verification_tells_rows_that_depend_on_their_slice(ours, slices, nothing_known, monkeypatch, pair):
    """An ATen that adds otherwise in a tensor of fewer rows."""
    divergence = slices.divergence

    def another(student, teacher, mask, **options):
        terms = divergence(student, teacher, mask, **options)
        step = terms.detach().nextafter(torch.tensor(torch.inf)) - terms.detach()
        return terms if len(student) > 8 else terms + step

    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    monkeypatch.setattr(slices, "divergence", another)
    with pytest.warns(RuntimeWarning, match="generalized_jsd_loss .*rows in slices, keeps .*the terms differ"):
        found = ours.jsd(*pair)
    assert_bits_equal(found, slices.divergence(*pair, None, beta=0.5, temperature=1.0).sum() / 2)


def test_memory_is_the_gradient(ours, slices, monkeypatch, seed):
    """At its peak, forward and backward, in tensors of the logits' size."""
    monkeypatch.setattr(slices, "_SLICE_ELEMENTS", 8 * 2048)
    generator = torch.Generator().manual_seed(seed)
    bounds = {jsd: (1.3, 11.9), selected: (1.3, 3.0), entropy: (1.2, 2.0)}
    for function, (most, least_of_eager) in bounds.items():
        student, teacher = torch.randn(2, 32, 16, 2048, generator=generator)
        student.requires_grad_()
        size = student.numel() * student.element_size()
        found = {}
        for name, functions in (("ours", ours), ("eager", EAGER)):
            function(functions, student, teacher)  # Verification has its own tensors.
            found[name] = peak(lambda *given: function(functions, *given).sum(), student, teacher) / size  # noqa: B023
            student.grad = None
        print(f"{function.__name__}: {found}")
        assert 1.0 <= found["ours"] < most and found["eager"] > least_of_eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_sequences(ours, seed, dtype):
    """One sequence takes what eager takes."""
    for sequences, most in ((1, 1.0), (8, 0.6)):
        logits = torch.randn(sequences, 64, 2048, generator=torch.Generator().manual_seed(seed)).to(dtype)
        logits.requires_grad_()
        found = []
        for functions in (ours, EAGER):
            logits.grad = None
            found.append(peak(lambda x: selected(functions, x).sum(), logits) / logits.nbytes)  # noqa: B023
        print(f"{sequences} sequences, {dtype}: ours, eager {found}")
        assert 1.0 <= found[0] <= most * found[1]


def test_what_is_wrong_is_refused(ours, pair):
    logits, other = pair
    with pytest.raises(TypeError, match="student_logits: expected a torch.Tensor, found list"):
        ours.jsd([1.0], other)
    with pytest.raises(TypeError, match="teacher_logits: expected a real floating point dtype, found torch.int64"):
        ours.jsd(logits, other.long())
    with pytest.raises(ValueError, match="reduction: expected one of batchmean, sum, mean, none, found 'max'"):
        ours.jsd(logits, other, reduction="max")
    with pytest.raises(ValueError, match="index: expected 2 sequences as in logits, found 1"):
        ours.selected(logits.bfloat16(), labels(logits)[:1])
    with pytest.raises(ValueError, match="temperature: expected a positive number, found 0"):
        ours.selected(logits, labels(logits), 0)
    for function in (ours.selected, ours.entropy):
        with pytest.raises(TypeError, match="logits: expected a real floating point dtype, found torch.int64"):
            function(logits.long(), labels(logits))


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: f.jsd(x, x[:, :1]),  # The teacher is broadcast.
        lambda f, x: f.jsd(x, x.double()),
        lambda f, x: f.jsd(x[0, 0], x[1, 0], reduction="sum"),
        lambda f, x: f.jsd(x[:, :0], x[:, :0]),
        lambda f, x: f.jsd(x, x, labels(x)[:, :3]),
        lambda f, x: f.jsd(x, x, torch.tensor([3, -100])),  # Of whole sequences.
        lambda f, x: f.jsd(x, x[..., :7]),
        lambda f, x: f.selected(x[0], labels(x)[0]),
        lambda f, x: f.selected(x, labels(x)[:1].clamp(min=0)),
        lambda f, x: f.selected(x, labels(x) + 1000),
        lambda f, x: f.selected(x.double().float(), labels(x).clamp(min=0).float()),
        lambda f, x: f.entropy(x[0, 0]),
        lambda f, x: f.entropy(x, 0),
        lambda f, x: f.entropy(x.double()),
    ],
)  # fmt: skip
def test_outside_the_domain_eager_runs(ours, slices, pair, call):
    """Eager's result, or an error where it has one."""

    def outcome(functions):
        try:
            return call(functions, copy.deepcopy(pair[0]))
        except (RuntimeError, IndexError, ValueError) as error:
            return type(error)

    found, expected = outcome(ours), outcome(EAGER)
    if isinstance(expected, torch.Tensor):
        assert_bits_equal(found, expected)
    else:
        assert found is expected


@pytest.mark.gpu
def test_on_a_gpu(ours, sliced, seed, chooser):
    generator = torch.Generator("cuda").manual_seed(seed)
    for vocabulary in (32000, 50257, 128256, 151936):
        for dtype in DTYPES:
            pair = [torch.randn(2, 70, vocabulary, device="cuda", generator=generator).to(dtype) for _ in range(2)]
            label = torch.randint(vocabulary, (2, 70), device="cuda", generator=generator)
            for call in (
                lambda f, s, t: f.jsd(s, t, label.masked_fill(label % 3 == 0, -100)),  # noqa: B023
                lambda f, s, t: f.selected(s, label).sum() + t.sum() * 0,  # noqa: B023
                lambda f, s, t: f.entropy(s, 128).sum() + t.sum() * 0,
            ):
                dy = torch.tensor(0.7, device="cuda")
                assert_same(call, ours, EAGER, *pair, label=f"{vocabulary} {dtype}", dy=dy)
    assert sliced
