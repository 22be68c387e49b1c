"""The losses beside eager's, bit for bit, under what training puts around them: autocast, checkpoints, scaled losses, DDP,
`torch.func` and torch.compile.

The CPU's arithmetic stands in for the kernels (`cpu_kernels.py`), so that eager's bits are the reference.
"""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from bits import assert_bits_equal
from cpu_kernels import cpu_arithmetic
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.usefixtures("proof_off"),
    # Of `F.kl_div` for "mean".
    pytest.mark.filterwarnings("ignore:reduction:UserWarning"),
]

# Powers of two: a quotient is then the product with the reciprocal, by which the kernels multiply.
ROWS, CLASSES, HIDDEN = 8, 64, 16
IGNORE = -100
TARGET = torch.tensor([3, IGNORE, 0, 63, 7, 7, IGNORE, 20])
LABELS = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])  # Four of eight count.


def cross_entropy(logits, target, ignore_index=IGNORE, reduction="mean"):
    return functional.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction=reduction)


def linear_cross_entropy(hidden, weight, target, bias):
    return functional.cross_entropy(functional.linear(hidden, weight, bias).float(), target)


def kl_div(input, target, reduction, log_target=False):
    return functional.kl_div(input, target, reduction=reduction, log_target=log_target)


def tvd(p, q, labels, reduction, ignore_index):
    distance, count = torch.abs(p - q) / 2.0, len(p)
    if labels is not None:
        distance = torch.where(labels.unsqueeze(1) != ignore_index, distance, torch.zeros_like(distance))
        count = int((labels != ignore_index).sum())
    if reduction == "none":
        return distance
    total = distance.sum()
    return total if reduction == "sum" else total / (count * (p.shape[1] if reduction == "mean" else 1))


EAGER = SimpleNamespace(cross_entropy=cross_entropy, linear_cross_entropy=linear_cross_entropy, kl_div=kl_div, tvd=tvd)
# By name a call of the functions in `f`, and what it is called with: logits or hidden states, then further leaves.
LOGITS = (ROWS, CLASSES), (ROWS, CLASSES)


def _of_logits(call):
    """Of the distributions of two tensors of logits, as log-probabilities and probabilities."""
    return lambda f, x, y: call(f, x.log_softmax(-1), y.softmax(-1))


LOSSES = {
    "cross_entropy": (lambda f, x: f.cross_entropy(x * 1.0, TARGET), LOGITS[:1]),
    "cross_entropy, sum": (lambda f, x: f.cross_entropy(x * 1.0, TARGET.clamp(min=0), 7, "sum"), LOGITS[:1]),
    "linear_cross_entropy": (
        lambda f, h, weight, bias: f.linear_cross_entropy(h, weight, TARGET, bias),
        ((ROWS, HIDDEN), (CLASSES, HIDDEN), (CLASSES,)),
    ),
    **{
        f"kl_div, {reduction}": (_of_logits(lambda f, x, y, r=reduction: f.kl_div(x, y, r)), LOGITS)
        for reduction in ("none", "sum", "mean", "batchmean")
    },
    "kl_div of logarithms": (lambda f, x, y: f.kl_div(x.log_softmax(-1), y.log_softmax(-1), "batchmean", True), LOGITS),
    "tvd": (lambda f, x, y: f.tvd(x.softmax(-1), y.softmax(-1), None, "batchmean", IGNORE), LOGITS),
    "tvd, labels": (lambda f, x, y: f.tvd(x.softmax(-1), y.softmax(-1), LABELS, "batchmean", 0), LOGITS),
    "tvd, none": (lambda f, x, y: f.tvd(x.softmax(-1), y.softmax(-1), LABELS, "none", 0), LOGITS),
}  # fmt: skip
DIVERGENCES = tuple(name for name in LOSSES if name.startswith(("kl_div", "tvd")))
every_loss = pytest.mark.parametrize("name", LOSSES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def launched(kernel, module):
    """How often each kernel ran; those of sums with the CPU's order."""
    for name in ("cross_entropy", "ops.divergences"):
        module(name)._calls.clear()
    family, terms = module("ops.divergences"), []

    def form_of(constants, labels):
        return family._DIVERGENCES[constants["FORM"]], labels if constants["SIZE"] else None

    def divergence_blocks(constants, scalars, first, second, labels, blocks):
        form, labels = form_of(constants, labels)
        terms[:] = [form.eager(first, second, labels, scalars[2], "none", None)]

    def full_sum_last_block(constants, scalars, blocks, total, out):
        out.copy_(terms.pop().sum() * scalars[-1])

    def divergence_backward(constants, scalars, dy, first, second, labels, d_first, *d_second):
        form, labels = form_of(constants, labels)
        if constants["REDUCED"]:
            dy = (dy * scalars[-1]).expand(first.shape)
        gradients = form.gradients(dy, first, second, labels, scalars[1])
        wanted = [constants["WITH_FIRST"]] + [constants["WITH_SECOND"]] * form.paths
        for into, values, want in zip((d_first, *d_second), gradients, wanted):
            if want:
                into.copy_(values)

    with cpu_arithmetic(kernel, {each.__name__: each for each in (divergence_blocks, full_sum_last_block, divergence_backward)}) as found:  # fmt: skip
        yield found
    for name in ("cross_entropy", "ops.divergences"):
        module(name)._calls.clear()


def given(name, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in LOSSES[name][1]]


def results(function, tensors, backward=lambda loss: loss.sum().backward()):
    leaves = [each.detach().clone().requires_grad_() for each in tensors]
    loss = function(*leaves)
    backward(loss)
    return loss.detach(), *(leaf.grad for leaf in leaves)


def assert_same(found, expected):
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_bits_equal(mine, theirs, f"gradient {number}" if number else "loss")


def compare(kernel, name, tensors, around=lambda call: call, **options):
    """The loss with what `around` puts around it; both ways."""
    found, expected = (
        results(around(functools.partial(LOSSES[name][0], f)), tensors, **options) for f in (kernel, EAGER)
    )
    assert_same(found, expected)


@every_loss
@every_dtype
def test_losses_have_eagers_bits(kernel, launched, seed, name, dtype):
    """What the other tests rest on: the kernels run, with the CPU's arithmetic."""
    weights = torch.randn(LOGITS[0] if "none" in name else (), generator=torch.Generator().manual_seed(seed))
    compare(kernel, name, given(name, seed, dtype), backward=lambda loss: (loss * weights).sum().backward())
    forward, backward = ([each for each in launched if ("backward" in each) is wanted] for wanted in (False, True))
    assert all(launched[each] == 1 for each in launched) and len(forward) >= 1 == len(backward)


@every_loss
@every_dtype
def test_under_autocast(kernel, launched, seed, name, dtype):
    """Divergences of 16 bits are eager's, since autocast computes them in fp32; all other losses are the kernels'."""

    def cast(call):
        def under_autocast(*tensors):
            with torch.autocast("cpu", torch.bfloat16):
                return call(*tensors)

        return under_autocast

    compare(kernel, name, given(name, seed, dtype), cast)
    assert bool(launched) is (dtype == torch.float32 or name not in DIVERGENCES)


@every_loss
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_hooks(kernel, launched, seed, name, reentrant):
    tensors = given(name, seed)
    compare(kernel, name, tensors, lambda call: functools.partial(checkpoint, call, use_reentrant=reentrant))
    forward = [count for each, count in launched.items() if "backward" not in each]
    assert min(forward) == max(forward) == 2  # The block is computed again.
    with torch.autograd.graph.save_on_cpu():
        compare(kernel, name, tensors)


@every_loss
@pytest.mark.parametrize("scale", [65536.0, 1 / 3, 0.0, -0.0])
def test_scaled_losses(kernel, launched, seed, name, scale):
    """Loss scaling, and DDP's division by the number of processes."""
    for dtype in (torch.float32, torch.bfloat16):
        compare(kernel, name, given(name, seed, dtype), backward=lambda loss: (loss.sum() * scale).backward())
    assert launched


@every_loss
def test_a_gradient_scaler(kernel, launched, seed, name):
    """Three steps of fp32 weights; the second loss is infinite, so that the scale is halved."""

    def trained(f):
        weights = [nn.Parameter(each) for each in given(name, seed)]
        optimizer, scaler = torch.optim.SGD(weights, 0.1), torch.amp.GradScaler("cpu", init_scale=65536.0)
        for step in range(3):
            loss = LOSSES[name][0](f, *weights).sum() * (torch.inf if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 32768.0
        return loss.detach(), *(weight.detach() for weight in weights)

    assert_same(trained(kernel), trained(EAGER))
    assert launched


@pytest.fixture(scope="module")
def one_process():
    """The only process of a group: DDP divides by 1, and copies gradients into its buckets and back."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@every_loss
def test_data_parallel(kernel, launched, one_process, seed, name):
    """The loss inside a module that DDP wraps, twice before each step; views of buckets as gradients."""

    class Loss(nn.Module):
        def __init__(self, f):
            super().__init__()
            self.f = f
            self.weights = nn.ParameterList(given(name, seed))

        def forward(self):
            return LOSSES[name][0](self.f, *self.weights)

    def trained(f):
        model = DistributedDataParallel(Loss(f), gradient_as_bucket_view=True)
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
        for _ in range(3):
            with model.no_sync():
                (model().sum() / 2).backward()
            losses.append(model().sum() / 2)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return *(loss.detach() for loss in losses), *(weight.detach() for weight in model.parameters())

    assert_same(trained(kernel), trained(EAGER))
    assert launched


@every_loss
def test_transforms_see_eagers_operations(kernel, launched, seed, name):
    call, tensors = LOSSES[name][0], tuple(given(name, seed))
    tangents = tuple(given(name, seed + 1))

    def summed(f):
        return lambda *leaves: call(f, *leaves).sum()

    def jacobian(f):
        return torch.func.vjp(lambda *leaves: call(f, *leaves), *tensors)

    def per_sample(f):
        """Gradients of a batch of two."""
        stacked = tuple(torch.stack((each, -each)) for each in tensors)
        return torch.func.vmap(torch.func.grad(summed(f)))(*stacked)

    for transform in (
        lambda f: torch.func.grad(summed(f), tuple(range(len(tensors))))(*tensors),
        lambda f: torch.func.jvp(lambda *leaves: call(f, *leaves), tensors, tangents),
        lambda f: (jacobian(f)[0], *jacobian(f)[1](jacobian(f)[0])),
        per_sample,
    ):
        found, expected = transform(kernel), transform(EAGER)
        for mine, theirs in zip(*((each,) if isinstance(each, torch.Tensor) else each for each in (found, expected))):
            assert_bits_equal(mine.detach(), theirs.detach())
    assert not launched


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy", "kl_div, mean", "tvd, none"])
def test_compiled(kernel, launched, seed, name):
    """On a CPU eager's operations are traced."""
    torch._dynamo.reset()
    compiled = torch.compile(functools.partial(LOSSES[name][0], kernel), backend="eager")
    tensors = given(name, seed)
    assert_same(results(compiled, tensors), results(functools.partial(LOSSES[name][0], EAGER), tensors))
    assert not launched
