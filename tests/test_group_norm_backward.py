"""GroupNorm's gradients: the kernels in Triton's interpreter against the transcription of ATen's, and the proof's power."""

import contextlib
import functools
import itertools
import math
import os
import random

import aten_model
import pytest
import torch
from bits import assert_bits_equal, bits_equal
from interpreter import cast, multiply_add
from test_group_norm import gradients_of, special_groups
from torch import nn
from torch.nn import functional

pytestmark = [
    pytest.mark.usefixtures("proof_off"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero):RuntimeWarning"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALL = (True, True, True)
CASES = int(os.environ.get("LOSSLESS_CASES", 8))


def launched(family, dy, x, groups, mean, rstd, weight, needs=ALL, split=False, in_vectors=False):
    """The kernels' gradients of x [N, C, HxW]; None for those that are not needed."""
    samples, channels, positions = x.shape
    shape = family.Shape(samples, groups, channels // groups, positions)
    kind = family.Kind.of(x.dtype, shape, weight is not None, needs, split, in_vectors)
    found = [torch.full(size, math.nan, dtype=x.dtype) for size in (x.shape, (channels,), (channels,))]
    sums = torch.full((2, samples, channels), math.nan)
    kind.launches(shape, CPU).run(dy, x, x if weight is None else weight, mean, rstd, sums, *found)
    return [each if need else None for each, need in zip(found, needs)]


def transcribed(dy, x, groups, mean, rstd, weight, in_vectors=False):
    sums = sums_of(x, in_vectors)
    return aten_model.group_norm_backward(dy, x, groups, mean, rstd, weight, multiply_add, cast, sums)


def sums_of(x, in_vectors):
    """Those over positions of ATen's kernel, which takes vectors of 16 bytes or single elements."""
    vector = 16 // x.itemsize
    vector = vector if in_vectors and x.shape[2] % vector == 0 else 1
    return functools.partial(aten_model.group_norm_sums, vector=vector)


def random_call(choose, generator, samples, channels, positions, groups, dtype):
    """dy, x, mean, rstd and weight [groups * channels]; the statistics are no more than plausible."""
    x, dy = torch.randn(2, samples * groups, channels * positions, generator=generator)
    x, dy = (special_groups(each, dtype, choose) if choose.random() < 0.5 else each for each in (x, dy))
    x, dy = (each.to(dtype).view(samples, groups * channels, positions) for each in (x, dy))
    mean, rstd = (
        torch.randn(samples, groups, generator=generator),
        torch.rand(samples, groups, generator=generator) + 0.5,
    )
    return dy, x, mean.to(dtype), rstd.to(dtype), torch.randn(groups * channels, generator=generator).to(dtype)


@interpreted
def test_the_kernels_equal_the_transcription(module, seed):
    family, generator, choose = (
        module("ops.group_norm_backward"),
        torch.Generator().manual_seed(seed),
        random.Random(seed),
    )
    for case in range(CASES):
        dtype, samples, groups = choose.choice(DTYPES), choose.choice((1, 2, 9)), choose.choice((1, 2, 3))
        channels = choose.choice((1, 2, 3, 10, 33))
        positions = choose.choice((2, 7, 16, 49, 130, 511, 512, 513, 2048, 4104, choose.randint(2, 3000)))
        channels = max(min(channels, (1 << 14) // (samples * groups * positions)), 1)
        dy, x, mean, rstd, weight = random_call(choose, generator, samples, channels, positions, groups, dtype)
        needs, split = choose.choice((ALL, ALL, (True, False, True), (False, True, True))), choose.random() < 0.4
        if choose.random() < 0.3:
            weight, needs = None, (True, False, False)
        given, in_vectors = (dy, x, groups, mean, rstd, weight), choose.random() < 0.5
        label = f"case {case}, {list(x.shape)} {dtype}, {groups} groups, {needs}, {weight is not None}, {split=}, {in_vectors=}"
        expected = transcribed(*given, in_vectors)
        found = launched(family, *given, needs, split and needs[0], in_vectors)
        for mine, wanted, need, what in zip(found, expected, needs, ("dx", "dweight", "dbias")):
            if need:
                assert_bits_equal(mine, wanted, f"{what} of {label}")


@interpreted
@pytest.mark.parametrize("samples, channels, positions", [(131, 2, 2), (1, 514, 2), (1, 2, 9000)])
def test_long_sums_equal_the_transcription(module, seed, samples, channels, positions):
    """More than 128 samples, 511 channels of a group, and 40 KB of a group."""
    family, generator, choose = (
        module("ops.group_norm_backward"),
        torch.Generator().manual_seed(seed),
        random.Random(seed),
    )
    dtype, groups = choose.choice(DTYPES), 1 if samples > 128 else 2
    dy, x, mean, rstd, weight = random_call(choose, generator, samples, channels, positions, groups, dtype)
    split, in_vectors = choose.random() < 0.5, choose.random() < 0.5
    given = dy, x, groups, mean, rstd, weight
    found = launched(family, *given, split=split, in_vectors=in_vectors)
    for mine, wanted in zip(found, transcribed(*given, in_vectors)):
        assert_bits_equal(mine, wanted, f"{dtype}, {split=}, {in_vectors=}")


@interpreted
def test_programs_take_several_groups(module, monkeypatch, seed):
    """More groups than programs."""
    family, generator = module("ops.group_norm_backward"), torch.Generator().manual_seed(seed)
    monkeypatch.setattr(family, "_LEAST_PROGRAMS", 1)
    monkeypatch.setattr(family, "_L2_BYTES", 0)
    monkeypatch.setattr(family.plans, "UNKNOWN", family.plans.Gpu(None, 0, multiprocessors=2))
    module("plans").gpu.cache_clear()
    try:
        given = random_call(random.Random(seed), generator, 2, 3, 40, 5, torch.float32)
        for mine, wanted in zip(launched(family, *given[:2], 5, *given[2:]), transcribed(*given[:2], 5, *given[2:])):
            assert_bits_equal(mine, wanted)
    finally:
        module("plans").gpu.cache_clear()


# Orders that a kernel might add in by mistake


def without_fma(a, b, c):
    return a * b + c


def pairs(terms, factors, fma):
    """Lanes that take two neighbouring elements."""
    threads = 32 if terms.shape[-1] < 512 else 512
    lanes = torch.arange(terms.shape[-1]) // 2 % threads
    step = torch.arange(terms.shape[-1]) // 2 // threads * 2 + torch.arange(terms.shape[-1]) % 2
    padded = [torch.zeros(*terms.shape[:-1], int(step.max()) + 1, threads) for _ in range(2)]
    for each, values in zip(padded, (terms, torch.ones(()) if factors is None else factors)):
        each[..., step, lanes] = values.expand_as(terms)
    return aten_model.group_norm_sums(padded[0].flatten(-2), padded[1].flatten(-2), fma, threads)


def in_sequence(terms, factors, fma):
    total = torch.zeros(terms.shape[:-1])
    for each in range(terms.shape[-1]):
        total = total + terms[..., each] * (1.0 if factors is None else factors[..., each])
    return total


def threads(number):
    return lambda terms, factors, fma: aten_model.group_norm_sums(terms, factors, fma, number)


def rounding(function):
    """A sum without FMAs."""
    return lambda *given: function(*given[:-1], without_fma)


# What is wrong, and the kind of a shape that shows it: channels of a group, positions, and samples.
WRONG = {
    "positions by 64 threads": ({"sums": threads(64)}, (3, 200, 2)),
    "positions by 256 threads": ({"sums": threads(256)}, (3, 1100, 2)),
    "products of positions rounded": ({"sums": rounding(aten_model.group_norm_sums)}, (3, 200, 2)),
    "pairs of positions": ({"sums": pairs}, (3, 200, 2)),
    "channels in sequence": ({"channel_sums": in_sequence}, (20, 3, 2)),
    "products of channels rounded": ({"channel_sums": rounding(aten_model.group_norm_sums)}, (40, 3, 2)),
    "few samples by 32 threads": (
        {"over_samples": functools.partial(aten_model.group_norm_sums_over_samples, threads=32)},
        (2, 3, 9),
    ),
    "many samples by 16 threads": (
        {"over_samples": functools.partial(aten_model.group_norm_sums_over_samples, threads=16)},
        (2, 3, 150),
    ),
    "products of samples rounded": (
        {"over_samples": rounding(aten_model.group_norm_sums_over_samples)},
        (2, 3, 9),
    ),
}


def tells(family, patch, kind, seed, expected=None, **how) -> bool:
    """Whether the proof tells the transcription, with such arithmetic, from the transcription with the expected one; `seed`
    replaces its own."""

    class Launches:
        def __init__(self, shape):
            self.shape = shape

        def run(self, dy, x, weight, mean, rstd, sums, *found):
            given = dy, x, self.shape.groups, mean, rstd, weight if kind.weight else None
            for out, value in zip(found, aten_model.group_norm_backward(*given, **how)):
                out.copy_(value)

    def eager(dy, x, mean, rstd, weight, samples, channels, positions, groups, needs):
        return aten_model.group_norm_backward(dy, x, groups, mean, rstd, weight, **(expected or {}))

    patch.setattr(family.proof, "generator", lambda device, salt: torch.Generator(device).manual_seed(seed + salt))
    patch.setattr(family.Kind, "launches", lambda kind, shape, device, most: Launches(shape))
    patch.setattr(family, "eager", eager)
    return any(not bits_equal(found, expected) for _, found, expected in family._comparisons(kind, CPU))


def test_proofs_tell_a_wrong_order(module, monkeypatch, seed):
    """And not the right one."""
    family, choose = module("ops.group_norm_backward"), random.Random(seed)
    monkeypatch.setattr(family, "_PROOF_ELEMENTS", 1)
    for name, (how, (channels, positions, samples)) in WRONG.items():
        # Products of 16-bit numbers are exact.
        dtype = torch.float32 if name == "products of positions rounded" else choose.choice(DTYPES)
        shape = family.Shape(samples, 2, channels, positions)
        kind = family.Kind.of(dtype, shape, True, ALL, False)
        with monkeypatch.context() as patch:
            assert not tells(family, patch, kind, seed), kind
            assert tells(family, patch, kind, seed, **how), (name, kind)


def test_proofs_tell_vectors_from_other_vectors(module, monkeypatch, seed):
    family, choose = module("ops.group_norm_backward"), random.Random(seed)
    monkeypatch.setattr(family, "_PROOF_ELEMENTS", 1)
    for dtype in DTYPES:
        vector, shape = 16 // dtype.itemsize, family.Shape(2, 2, *choose.choice(((3, 200), (2, 1104))))
        kind = family.Kind.of(dtype, shape, True, ALL, False, in_vectors=True)
        right = {"sums": functools.partial(aten_model.group_norm_sums, vector=vector)}
        assert kind.vector == vector
        for wrong in {1, 2, vector // 2}:
            how = {"sums": functools.partial(aten_model.group_norm_sums, vector=wrong)}
            with monkeypatch.context() as patch:
                assert tells(family, patch, kind, seed, expected=how, **right), (wrong, kind)
        with monkeypatch.context() as patch:
            assert not tells(family, patch, kind, seed, expected=right, **right), kind


def test_every_kind_has_shapes_of_its_own(module, seed):
    """Without them a proof would compare nothing."""
    family, choose = module("ops.group_norm_backward"), random.Random(seed)
    for _ in range(300):
        positions = choose.choice((choose.randint(2, 600), 2 ** choose.randint(1, 18), choose.randint(2, 1 << 18)))
        channels = choose.choice((1, 2, 4, 10, choose.randint(1, 600), choose.randint(1, (1 << 20) // positions + 1)))
        if choose.random() < 0.3:  # Few shapes have the kind of so many channels of so few positions.
            channels, positions = choose.randint(512, 560), choose.randint(2, 40)
        shape = family.Shape(choose.choice((1, 128, 129)), choose.choice((1, 32)), channels, positions)
        needs = choose.choice((ALL, (True, False, False), (False, True, False)))
        more = needs[1] or choose.random() < 0.5, needs, choose.random() < 0.3, choose.random() < 0.5
        kind = family.Kind.of(choose.choice(DTYPES), shape, *more)
        shapes = family.proof_shapes(kind)
        if (
            not shapes
        ):  # Long groups of at least 512 channels, more often than ATen adds samples in sequence: left to it.
            assert kind.threads == 32 and kind.channel_lanes == 512 and kind.lanes == 512, (shape, kind)
            continue
        assert all(family.Kind.of(kind.dtype, each, *more) == kind for each in shapes)
        assert max(each.rows * each.size for each in shapes) <= 1 << 25, (shape, shapes)


# What surrounds the kernels


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_training_computes_what_the_kernels_do(kernel, module, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 3, 8, 4, 5, generator=generator).to(dtype).unbind()
    weight, bias = torch.randn(2, 8, generator=generator).to(dtype).unbind()
    for vectors in ((weight, bias), (weight,), ()):
        found = gradients_of(lambda x, *vectors: kernel.group_norm(x, 2, *vectors), [x, *vectors], dy)
        _, mean, rstd = module("ops.group_norm")._norm.find_outputs(
            x, 2, *vectors, *(None,) * (2 - len(vectors)), 1e-5
        )(x, *vectors)
        expected = transcribed(*(each.reshape(3, 8, 20) for each in (dy, x)), 2, mean, rstd, *(*vectors, None)[:1])
        for mine, wanted in zip(found[1:], expected):
            assert_bits_equal(mine, wanted.view(mine.shape), f"{len(vectors)} vectors")


@interpreted
def test_a_changed_weight_gets_eagers_gradients(kernel, module, seed):
    """Autograd does not notice a weight of another dtype or shape."""
    layer = nn.GroupNorm(2, 8)
    x = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    backward = module("ops.group_norm_backward").resolve(x.detach(), 2, layer.weight.detach(), ALL)
    for weight in (layer.weight.detach().half(), torch.ones(16), torch.ones(16)[::2], torch.ones(0)):
        assert not backward.fits(torch.ones_like(x), x.detach(), weight)
    assert backward.fits(torch.ones_like(x), x.detach(), layer.weight.detach())
    assert not backward.fits(torch.ones_like(x).half(), x.detach(), layer.weight.detach())


@interpreted
def test_gradients_between_vectors_are_left_to_eager(module, monkeypatch):
    """Where ATen takes vectors, it takes single elements if dy or x begins elsewhere."""
    family, weight = module("ops.group_norm_backward"), torch.ones(8)
    monkeypatch.setattr(family, "takes_vectors", lambda device: True)
    aligned, elsewhere = torch.ones(3, 8, 20), torch.ones(3 * 8 * 20 + 1)[1:].view(3, 8, 20)
    backward = family.resolve(aligned, 2, weight, ALL)
    assert backward.fits(aligned, aligned, weight)
    assert not backward.fits(elsewhere, aligned, weight) and not backward.fits(aligned, elsewhere, weight)
    # Channels that vectors do not fill are taken element by element, wherever they begin.
    aligned, elsewhere = torch.ones(3, 8, 21), torch.ones(3 * 8 * 21 + 1)[1:].view(3, 8, 21)
    assert family.resolve(aligned, 2, weight, ALL).fits(elsewhere, elsewhere, weight)


@interpreted
def test_a_bias_may_be_written_to_between_the_passes(kernel, module, seed):
    """Eager saves none. It saves the weight, and notices."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 1, 4, 4, 5, generator=generator).unbind()
    weight, bias = torch.randn(2, 4, generator=generator).unbind()
    op = getattr(torch.ops, module("ops.group_norm")._group_norm_op.namespace).group_norm
    ours = kernel.group_norm, lambda x, *rest: op(x, *rest, 1e-5)[0]
    ways = [*itertools.product((functional.group_norm, ours[0]), (False, True)), (ours[1], False)]
    for function, create_graph in ways:
        gradients = []
        for changed in (None, "bias", "weight"):
            leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
            out = function(leaves[0], 2, *leaves[1:])
            with torch.no_grad():
                for leaf in {"bias": leaves[2:], "weight": leaves[1:2]}.get(changed, ()):
                    leaf.add_(1.0)
            with pytest.raises(RuntimeError, match="modified") if changed == "weight" else contextlib.nullcontext():
                gradients.append(torch.autograd.grad(out, leaves, dy, create_graph=create_graph))
        for before, after in zip(*gradients, strict=True):
            assert_bits_equal(before, after)


@interpreted
def test_a_weight_that_was_changed_before_is_not_resolved(module, seed):
    """Where the first backward pass is the first to ask for gradients."""
    x = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(seed))
    for family, given in (
        ("ops.group_norm", (2, torch.ones(8), None, 1e-5)),
        ("ops.layer_norm", ((64,), torch.ones(64), None, 1e-5)),
    ):
        family, x = module(family), x if family == "ops.group_norm" else torch.randn(3, 64)
        weight = given[1].requires_grad_()
        out = family.replacement(x, given[0], weight, *given[2:])
        assert out.grad_fn is not None
        (call,) = (call for call in family._calls.resolved.values() if isinstance(call, family._Training))
        call.backwards.clear()
        for changed in (torch.ones(1), weight.detach().half(), torch.ones(2 * len(weight))[::2]):
            assert call.backward(x, changed, (False, True, False)) is None and not call.backwards
        assert call.backward(x, weight, (False, True, False)) is not None


def test_one_position_is_left_to_eager(module):
    resolve = module("ops.group_norm_backward").resolve
    assert resolve(torch.ones(4, 8, 1), 2, torch.ones(8), ALL) is None
    assert resolve(torch.ones(4, 8), 2, torch.ones(8), ALL) is None


# On a GPU: eager itself


@pytest.mark.gpu
def test_gradients_are_those_of_eager(module, seed, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    family, choose = module("ops.group_norm_backward"), random.Random(seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    for case in range(150):
        most = 1 << choose.randint(8, 23)
        samples, groups = choose.choice((1, 2, 16, 127, 129, 300)), choose.choice((1, 2, 32))
        positions = choose.choice((2, 7, 49, 64, 196, 511, 512, 576, 1024, 3136, 4096, choose.randint(2, 30000)))
        channels = max(min(choose.choice((1, 2, 4, 10, 16, 40, 600)), most // (samples * groups * positions)), 1)
        sizes, dtype = (samples, groups * channels, positions), choose.choice(DTYPES)
        x, dy = torch.randn(2, *sizes, generator=generator, device="cuda").to(dtype).unbind()
        x, dy = x * choose.choice((0.1, 1.0, 30.0)) + choose.choice((0.0, 1.0)), dy * choose.choice((1e-3, 1.0, 30.0))
        vector = torch.randn(sizes[1], generator=generator, device="cuda").to(dtype)
        weight, needs = choose.choice(
            ((vector, ALL), (vector, ALL), (vector, (False, True, True)), (None, (True, False, False)))
        )
        _, mean, rstd = torch.native_group_norm(x, weight, None, *sizes, groups, 1e-5)
        backward = family.resolve(x, groups, weight, needs)
        label = f"case {case}, {sizes} {dtype}, {groups} groups, {needs}, {weight is not None}"
        assert backward is not None, label
        expected = family.eager(dy, x, mean, rstd, weight, *sizes, groups, list(needs))
        for mine, wanted, need in zip(backward(dy, x, mean, rstd, weight), expected, needs):
            if need:
                assert_bits_equal(mine, wanted, label)


@pytest.mark.gpu
def test_zeros_have_eagers_signs(module, seed):
    """Sums of products that underflow are -0, which zeros of lanes without elements must not change. The interpreter's `tl.sum`
    begins with +0, so that it has no such sums."""
    family, generator = module("ops.group_norm_backward"), torch.Generator("cuda").manual_seed(seed)
    for sizes, groups in (
        ((2, 32, 2), 1),
        ((1, 33, 2), 1),
        ((1, 70, 3), 2),
        ((3, 8, 5), 4),
        ((130, 6, 4), 3),
        ((1, 600, 2), 1),
    ):
        for tiny in (1e-20, 1e-30, 1e-38, 1e-44):
            x, dy = torch.randn(2, *sizes, generator=generator, device="cuda").unbind()
            weight = torch.rand(sizes[1], generator=generator, device="cuda") * 1e-30
            mean, rstd = torch.rand(2, sizes[0], groups, generator=generator, device="cuda").unbind()
            x, mean = x.abs(), mean - 0.5
            for small in (dy * tiny, -dy.abs() * tiny):
                backward = family.resolve(x, groups, weight, ALL)
                expected = family.eager(small, x, mean, rstd, weight, *sizes, groups, [True] * 3)
                for mine, wanted in zip(backward(small, x, mean, rstd, weight), expected):
                    assert_bits_equal(mine, wanted, f"{sizes}, {tiny}")


@pytest.mark.gpu
@pytest.mark.usefixtures("refusals")
@pytest.mark.parametrize("shape", [(2, 320, 4096), (1, 128, 1 << 18), (8, 512, 784), (4, 512, 51199), (128, 512, 4096)])
def test_images_have_eagers_gradients(kernel, module, seed, monkeypatch, shape):
    """Those of diffusion models, some of which are split, of audio, and that of the benchmark."""
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator = torch.Generator("cuda").manual_seed(seed)
    groups = 512 if shape[2] == 51199 else 32
    for dtype in DTYPES:
        x, dy = torch.randn(2, *shape, generator=generator, device="cuda").to(dtype).unbind()
        vectors = torch.randn(2, shape[1], generator=generator, device="cuda").to(dtype).unbind()
        ours, theirs = (
            gradients_of(lambda x, *vectors, f=f: f(x, groups, *vectors), [x, *vectors], dy)
            for f in (kernel.group_norm, functional.group_norm)
        )
        for mine, wanted in zip(ours, theirs):
            assert_bits_equal(mine, wanted, f"{dtype}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_transcription_is_what_eager_computes(module, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    in_vectors = module("ops.group_norm_shape").takes_vectors(torch.device("cuda"))
    for sizes in ((2, 12, 7), (3, 12, 1000), (150, 4, 2), (2, 1200, 3), (2, 12, 4104)):
        x, dy = torch.randn(2, *sizes, generator=generator).to(dtype).unbind()
        for weight in (torch.randn(sizes[1], generator=generator).to(dtype), None):
            on_gpu = dy.cuda(), x.cuda(), None if weight is None else weight.cuda()
            _, mean, rstd = torch.native_group_norm(*on_gpu[1:], None, *sizes, 2, 1e-5)
            needs = [True, weight is not None, weight is not None]
            expected = torch.ops.aten.native_group_norm_backward(*on_gpu[:2], mean, rstd, on_gpu[2], *sizes, 2, needs)
            statistics, sums = (mean.cpu(), rstd.cpu()), sums_of(x, in_vectors)
            found = aten_model.group_norm_backward(dy, x, 2, *statistics, weight, sums=sums)
            for mine, wanted, need in zip(found, expected, needs):
                if need:
                    assert_bits_equal(mine, wanted.cpu(), f"{sizes}, {weight is not None}")
