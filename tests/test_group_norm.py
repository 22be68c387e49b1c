"""GroupNorm: the kernels in Triton's interpreter against the transcription of ATen's, the proof's power, and what surrounds them.

The interpreter rounds an FMA as its version does (`interpreter.multiply_add`) and truncates to bf16: `cast` does likewise. It
divides where the kernels multiply by a reciprocal and correct the product, which has tests of its own here.
"""

import functools
import itertools
import math
import os
import random
import re
from types import MethodType, SimpleNamespace

import aten_model
import pytest
import torch
from bits import assert_bits_equal, bits_equal
from interpreter import cast, multiply_add, numpy_rsqrt
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [
    pytest.mark.usefixtures("proof_off"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero):RuntimeWarning"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-5
CASES = int(os.environ.get("LOSSLESS_CASES", 12))


def special_groups(x, dtype, choose):
    """Some rows of x become constant, huge, subnormal or of a huge mean, or hold infinities and NaN."""
    # The interpreter converts subnormal numbers of bf16 to others.
    small = () if dtype == torch.bfloat16 else (1e-44, "small")
    for row in x:
        value = choose.choice((None, None, 0.0, -0.0, 3.0, 6e4, math.inf, -math.inf, math.nan, "mean", *small))
        if value == "mean":
            row += 3e4
        elif value == "small":
            row *= 1e-39
        elif value is not None:
            row[choose.choice((slice(None), slice(None, None, 2), choose.randrange(len(row)), -1))] = value
    return x


def launched(family, x, groups, weight, bias, eps=EPS, rounded=False, split=False, in_vectors=False):
    """The kernels' output, mean and rstd of x [N, C, HxW]."""
    samples, channels, positions = x.shape
    shape = family.Shape(samples, groups, channels // groups, positions)
    kind = family.Kind.of(x.dtype, shape, weight is not None, bias is not None, rounded, split, in_vectors)
    out, mean, rstd = torch.full_like(x, math.nan), *torch.full((2, samples, groups), math.nan).to(x.dtype)
    given = x if weight is None else weight, x if bias is None else bias
    kind.launch(shape, CPU, eps, True)(x, *given, out, mean, rstd)
    return out, mean, rstd


def transcribed(x, groups, weight, bias, eps=EPS, rounded=False, in_vectors=False):
    moments = moments_of(x.dtype, in_vectors)
    return aten_model.group_norm(x, groups, weight, bias, eps, rounded, numpy_rsqrt, multiply_add, cast, moments)


def moments_of(dtype, in_vectors):
    """Those of ATen's kernel, which takes vectors of 16 bytes or single elements."""

    def moments(x, fma, **how):
        vector = 16 // dtype.itemsize
        vector = vector if in_vectors and x.shape[1] % vector == 0 else 1
        return aten_model.group_norm_moments(x, fma, vector=vector, **how)

    return moments


def random_call(choose, generator, most=1 << 13):
    """x, the number of groups, weight and bias, at random."""
    dtype, samples, groups = choose.choice(DTYPES), choose.randint(1, 2), choose.choice((1, 2, 3))
    channels = choose.choice((1, 1, 2, 3, 8, 10, 33))
    positions = choose.choice((1, 2, 7, 16, 49, 64, 130, 512, 513, 1024, 2048, 4104, choose.randint(1, 3000)))
    channels = max(min(channels, most // (samples * groups * positions)), 1) * groups
    normal = torch.randn(samples * groups, channels // groups * positions, generator=generator)
    x = normal * choose.choice((0.1, 1.0, 30.0)) + choose.choice((0.0, 1.0, -50.0))
    x = special_groups(x, dtype, choose).to(dtype).view(samples, channels, positions)
    vectors = torch.randn(2, channels, generator=generator).to(dtype).unbind()
    return x, groups, *choose.choice((vectors, vectors, (vectors[0], None), (None, None)))


@interpreted
def test_the_kernels_equal_the_transcription(module, seed):
    family, generator, choose = module("ops.group_norm"), torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(CASES):
        x, groups, weight, bias = random_call(choose, generator)
        eps, rounded = choose.choice((EPS, 0.3, -1.0)), x.dtype != torch.float32 and choose.random() < 0.5
        split, in_vectors = choose.random() < 0.3, choose.random() < 0.5
        label = f"case {case}, {list(x.shape)} {x.dtype}, {groups} groups, {weight is not None} {bias is not None}"
        for found, expected, what in zip(
            launched(family, x, groups, weight, bias, eps, rounded, split, in_vectors),
            transcribed(x, groups, weight, bias, eps, rounded, in_vectors),
            ("output", "mean", "rstd"),
        ):
            assert_bits_equal(found, expected, f"{what} of {label}, eps {eps}, {rounded=}, {split=}, {in_vectors=}")


@interpreted
@pytest.mark.parametrize("in_vectors", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_groups_equal_the_transcription(module, seed, dtype, in_vectors):
    """Groups of more than 40 KB have more warps, and lanes that read more at once."""
    family, generator = module("ops.group_norm"), torch.Generator().manual_seed(seed)
    shape = (2, 5, 4104 if dtype == torch.float32 else 8208)
    x, vectors = torch.randn(shape, generator=generator).to(dtype), torch.randn(2, 5, generator=generator).to(dtype)
    long, short = (
        family.Kind.of(dtype, family.Shape(2, 1, 5, size), True, True, False, False, in_vectors)
        for size in (shape[2], 400)
    )
    assert (long.warps, short.warps) == (8, 4) and long.steps > short.steps
    assert long.vector == (16 // dtype.itemsize if in_vectors else 1)
    ours = launched(family, x, 1, *vectors, in_vectors=in_vectors)
    for found, expected in zip(ours, transcribed(x, 1, *vectors, in_vectors=in_vectors)):
        assert_bits_equal(found, expected)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_position_of_many_channels(module, seed, dtype):
    """Each element has a weight of its own, which the kernels of a split group do not have: such a group is not split."""
    family, generator = module("ops.group_norm"), torch.Generator().manual_seed(seed)
    channels = 2 * family.SPLIT_SIZE
    x, vectors = (
        torch.randn(1, channels, 1, generator=generator).to(dtype),
        torch.randn(2, channels, generator=generator),
    )
    vectors = vectors.to(dtype).unbind()
    for found, expected in zip(launched(family, x, 2, *vectors, split=True), transcribed(x, 2, *vectors)):
        assert_bits_equal(found, expected)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_groups(module, dtype):
    """Whatever order it is added up in, a group has these values."""
    x = torch.stack([torch.full((2, 300), value) for value in (0.0, -0.0, 3.0, math.inf, math.nan)]).to(dtype)
    out, mean, rstd = launched(module("ops.group_norm"), x, 1, None, None)
    assert_bits_equal(mean[:3, 0], torch.tensor([0.0, 0.0, 3.0], dtype=dtype))
    rounded = torch.full((3, 1), EPS, dtype=dtype).float()
    assert_bits_equal(rstd[:3], cast(numpy_rsqrt(rounded), dtype))
    assert not out[:3].any() and out[3:].isnan().all() and rstd[3:].isnan().all()


@pytest.fixture
def in_vectors(module, monkeypatch):
    """Eager's threads take vectors here, as from torch 2.15 on."""
    for name in ("ops.group_norm", "ops.group_norm_backward"):
        monkeypatch.setattr(module(name), "takes_vectors", lambda device: True)
    module("ops.group_norm")._calls.clear()
    yield
    module("ops.group_norm")._calls.clear()


@interpreted
@pytest.mark.parametrize("needs_grad", [False, True])
def test_an_input_between_vectors_is_left_to_eager(module, monkeypatch, seed, in_vectors, needs_grad):
    """A recorded call has tensors of any address, and ATen takes single elements of those that begin elsewhere."""
    family, launches, generator = module("ops.group_norm"), [], torch.Generator().manual_seed(seed)
    launch = family.Kind.launch

    def spy(*arguments):
        found = launch(*arguments)
        return SimpleNamespace(call_6=lambda *tensors: (launches.append(tensors[0].data_ptr()), found.call_6(*tensors)))

    monkeypatch.setattr(family.Kind, "launch", spy)
    for shift in (0, 1, 2, 4, 0):
        x = torch.randn(2 * 8 * 16 + shift, generator=generator)[shift:].view(2, 8, 16).requires_grad_(needs_grad)
        launches.clear()
        out = family.replacement(x, 2, None, None, EPS)
        assert launches == ([x.data_ptr()] if shift % 4 == 0 else []), shift
        if shift % 4:
            assert_bits_equal(out, functional.group_norm(x, 2))


@interpreted
def test_images_that_may_be_channels_last_are_left_to_eager(module, in_vectors):
    """torch 2.15 computes those with one channel or one position by its kernels for channels that are last."""
    family = module("ops.group_norm")
    for shape, groups in (((2, 8, 1, 1), 2), ((2, 1, 4, 4), 1), ((2, 8, 1, 1, 1), 2)):
        assert family.replacement(torch.randn(shape), groups, None, None, EPS) is None, shape
    for shape in ((2, 8, 4, 4), (2, 8, 1), (2, 8)):
        assert family.replacement(torch.randn(shape), 2, None, None, EPS) is not None, shape


@interpreted
def test_compiled_images_of_any_layout(kernel, module, monkeypatch, seed):
    """The operator is traced, but for channels that are last, where eager may have kernels for these."""
    family, calls, (x,) = (
        module("ops.group_norm"),
        [],
        torch.randn(1, 3, 8, 4, 5, generator=torch.Generator().manual_seed(seed)),
    )
    operator = family._group_norm_op
    monkeypatch.setattr(family, "_group_norm_op", lambda *given: (calls.append(given), operator(*given))[1])
    layouts = x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3)
    for vectors, taken in ((False, (1, 1, 1)), (True, (1, 0, 1))):
        monkeypatch.setattr(family, "takes_vectors", lambda device, vectors=vectors: vectors)
        for each, count in zip(layouts, taken):
            torch._dynamo.reset()
            calls.clear()
            family._calls.clear()
            torch.compile(lambda x: kernel.group_norm(x, 2), backend="eager", fullgraph=True)(each)
            assert len(calls) == count, (vectors, each.stride())


@interpreted
def test_programs_take_several_groups(module, monkeypatch):
    """More groups than programs."""
    family = module("ops.group_norm")
    monkeypatch.setattr(family.plans, "UNKNOWN", family.plans.Gpu(None, 0, multiprocessors=1))
    module("plans").gpu.cache_clear()
    try:
        x, vectors = torch.randn(3, 24, 200), torch.randn(2, 24)
        assert family._programs(family.Shape(3, 8, 3, 200), 4, family.plans.gpu(CPU)) == 16
        for found, expected in zip(launched(family, x, 8, *vectors), transcribed(x, 8, *vectors)):
            assert_bits_equal(found, expected)
    finally:
        module("plans").gpu.cache_clear()


# Division by a count


def corrected(x, count, reciprocal):
    """`divide_by_reciprocal` with FMAs that round once, as on a GPU."""
    product = x * reciprocal
    return aten_model.fused_multiply_add(aten_model.fused_multiply_add(product, -count, x), reciprocal, product)


def reciprocals(count):
    """1 / count, and those a unit in the last place below and above."""
    exact = 1.0 / count
    return exact, torch.nextafter(exact, torch.zeros(())), torch.nextafter(exact, torch.ones(()))


def assert_divides(x, count, label):
    expected = x / count
    for reciprocal in reciprocals(count):
        assert_bits_equal(corrected(x, count, reciprocal), expected, label)


def hardest(choose):
    """x and a count up to 2**20 whose quotient is as near to the middle between two numbers as it can be."""
    count = 2 * choose.randrange(1 << 19) + 1
    shift = count.bit_length() - choose.randrange(2)
    # 2**(shift + 1) * x = odd * count + rest: x / count is rest / (2 * count) from the middle.
    residue = choose.choice((-3, -1, 1, 3)) * pow(2 ** (shift + 1), -1, count) % count
    x = residue + count * choose.randrange(-(-((1 << 23) - residue) // count), ((1 << 24) - 1 - residue) // count + 1)
    return x * choose.choice((-1, 1)), count << choose.randrange(21 - count.bit_length())


def test_counts_divide_as_exactly_as_a_division(seed):
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    x, count = torch.tensor([hardest(choose) for _ in range(30_000)], dtype=torch.float32).unbind(1)
    middle = (x.double() / count.double()).frexp().mantissa.abs() * 2.0**24 % 1.0 - 0.5
    assert (middle.abs() * count.double() < 4).double().mean() > 0.4, "they are near the middle"
    assert_divides(x, count, "the hardest")
    # Up to 2^123: the largest normal number of so many is below 16, and infinities are divided, not multiplied.
    x = torch.randn(1 << 18, generator=generator) * torch.exp2(torch.randint(-90, 124, (1 << 18,), generator=generator))
    count = torch.randint(1, (1 << 20) + 1, (1 << 18,), generator=generator).float()
    assert_divides(x, torch.where(torch.arange(1 << 18) % 2 == 0, count, (count / 128).ceil()), "at random")


@pytest.mark.long
def test_every_number_divides_as_exactly(seed):
    x = torch.arange(1 << 23, 1 << 24).float()
    choose = random.Random(seed)
    for count in (3, 7, 2047, (1 << 20) - 1, choose.randint(5, 4096), choose.randint(5, 1 << 20)):
        assert_divides(x, torch.full((), float(count)).expand_as(x), f"by {count}")


def moments_by_counts(x, fma, quotients):
    """`_lanes` without DIVIDED, and a second time by division where its result is uncertain. `quotients`: which of the two."""
    least = torch.full((), 0xFFFFFFFF, dtype=torch.int64)

    def quotient(delta, count):
        nonlocal least
        found = corrected(delta, count, choose_reciprocal(count))
        bits = found.contiguous().view(torch.int32).long() * 2 & 0xFFFFFFFF
        least = torch.minimum(least, ((bits - 1) & 0xFFFFFFFF).min())
        return found

    def choose_reciprocal(count):
        return reciprocals(count)[int(count.flatten()[0]) % 3]

    found = aten_model.group_norm_moments(x, fma, quotient=quotient)
    if least < (0x00800000 << 1) - 1 or bool(found.variance.isnan().any()):
        quotients.append("division")
        return aten_model.group_norm_moments(x, fma)
    quotients.append("reciprocal")
    return found


def test_moments_by_counts_are_those_by_division(seed):
    """Special values included: what a product with a reciprocal does not divide is divided again."""
    generator, choose, quotients = torch.Generator().manual_seed(seed), random.Random(seed), []
    for case in range(200):
        dtype, size = choose.choice(DTYPES), choose.choice((5, 40, 500, 700, 3000))
        x = torch.randn(1, size, generator=generator) * 2.0 ** choose.choice((0, 0, -120, -126, -130, -145, 100, 126))
        x = special_groups(x + choose.choice((0.0, 1.0)) * x[:, :1], torch.float32, choose).to(dtype)
        found = moments_by_counts(x, aten_model.fused_multiply_add, quotients)
        for ours, theirs in zip(found, aten_model.group_norm_moments(x)):
            assert_bits_equal(ours, theirs, f"case {case}, {size} {dtype}")
    assert 30 < quotients.count("division") < 270


# Moments that a kernel might compute by mistake


def combined(mean_fma, m2_fma):
    """Another way to combine two means, or two M2: their last products rounded."""

    def combine(below, above, fma):
        def rounded(a, b, c):
            return a * b + c

        def in_turn(*arguments):
            return (fma if next(wanted) else rounded)(*arguments)

        wanted = iter((mean_fma, m2_fma))
        return aten_model.group_norm_combine(below, above, in_turn)

    return functools.partial(aten_model.group_norm_moments, combine=combine)


def without_fma(x, fma):
    return aten_model.group_norm_moments(x, lambda a, b, c: a * b + c)


def by_reciprocal(x, fma):
    return aten_model.group_norm_moments(x, fma, quotient=lambda delta, count: delta * (1.0 / count))


def two_passes(x, fma):
    h, size = x.float(), torch.tensor(float(x.shape[1]))
    mean = h.sum(1) / size
    return aten_model.Moments(mean, (h - mean[:, None]).square().sum(1) / size)


def neighbours(x, fma):
    """Lanes that take neighbouring elements, as vectors of four would have it."""
    threads = 32 if x.shape[1] < 512 else 512
    padded = functional.pad(x, (0, -x.shape[1] % (4 * threads)), value=math.nan).view(len(x), -1, threads, 4)
    in_turn = padded.transpose(2, 3).reshape(len(x), -1)
    order = torch.arange(padded[0].numel()).view(padded.shape[1:]).transpose(1, 2).reshape(-1)
    return aten_model.group_norm_moments(in_turn[:, order < x.shape[1]], fma)


WRONG = {
    "half the threads": lambda x, fma: aten_model.group_norm_moments(x, fma, threads=32 if len(x[0]) >= 512 else 64),
    "256 threads": functools.partial(aten_model.group_norm_moments, threads=256),
    "1024 threads": functools.partial(aten_model.group_norm_moments, threads=1024),
    "no FMA": without_fma,
    "by a reciprocal": by_reciprocal,
    "two passes": two_passes,
    "means without FMA": combined(False, True),
    "vectors of four": neighbours,
}
# Its last bit is rounded away in most groups: not always told.
SELDOM_SEEN = {"M2 combined without FMA": combined(True, False)}


def in_the_kernels_place(family, patch, seed, expected=None, **how):
    """The proof compares the transcription with such arithmetic instead of the kernel with eager; `seed` replaces its own."""

    def launch(kind, shape, device, eps, store_statistics, most_programs):
        def run(x, weight, bias, *outs):
            given = weight if kind.weight else None, bias if kind.bias else None
            for out, value in zip(outs, aten_model.group_norm(x, shape.groups, *given, eps, kind.rounded, **how)):
                out.copy_(value)

        return run

    def eager(x, groups, weight, bias, eps):
        return (expected or aten_model.group_norm)(x, groups, weight, bias, eps, False if expected else rounded[0])

    rounded = [False]
    patch.setattr(family.proof, "generator", lambda device, _: torch.Generator(device).manual_seed(seed))
    patch.setattr(family.Kind, "launch", launch)
    patch.setattr(family, "_eager_with_statistics", eager)
    return rounded


def kind_of(family, dtype, channels, positions, rounded=False, weight=True, bias=True, in_vectors=False):
    shape = family.Shape(2, 4, channels, positions)
    return family.Kind.of(dtype, shape, weight, bias, rounded and dtype != torch.float32, False, in_vectors)


def tells(family, kind) -> bool:
    return any(not bits_equal(found, expected) for _, found, expected in family._comparisons(kind, CPU))


# Channels of a group and their positions: for a warp, and for a block. Where each lane has one element, all orders are alike.
PROVED = ((3, 40), (18, 64), (2, 700))


def test_proofs_tell_a_wrong_order(module, monkeypatch, seed):
    """And not the right one."""
    family, choose = module("ops.group_norm"), random.Random(seed)
    monkeypatch.setattr(family, "_PROOF_ELEMENTS", dict.fromkeys(DTYPES, 1))
    kind = kind_of(family, choose.choice(DTYPES), *choose.choice(PROVED), choose.random() < 0.5)
    for name in (None, *WRONG):
        with monkeypatch.context() as patch:
            how = {} if name is None else {"moments": WRONG[name]}
            in_the_kernels_place(family, patch, seed, **how)[0] = kind.rounded
            assert tells(family, kind) == (name is not None), (name, kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_proofs_tell_vectors_from_other_vectors(module, monkeypatch, seed, dtype):
    family, vector = module("ops.group_norm"), 16 // dtype.itemsize
    monkeypatch.setattr(family, "_PROOF_ELEMENTS", dict.fromkeys(DTYPES, 1))
    kind = kind_of(family, dtype, *random.Random(seed).choice(((18, 64), (8, 49), (2, 4096))), in_vectors=True)
    assert kind.vector == vector

    def eager(x, groups, weight, bias, eps, rounded):
        return aten_model.group_norm(x, groups, weight, bias, eps, rounded, moments=moments_of(dtype, True))

    for each in {1, 2, vector // 2, vector}:
        with monkeypatch.context() as patch:
            moments = functools.partial(aten_model.group_norm_moments, vector=each)
            in_the_kernels_place(family, patch, seed, expected=eager, moments=moments)
            assert tells(family, kind) == (each != vector), (each, kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_proof_tells_that_the_probe_was_wrong(module, monkeypatch, seed, dtype):
    """Single elements are compared in groups of whole vectors, which eager would read in vectors; whatever the kind's unit."""
    family = module("ops.group_norm")
    monkeypatch.setattr(family, "_PROOF_ELEMENTS", dict.fromkeys(DTYPES, 1))
    kind = kind_of(family, dtype, *random.Random(seed).choice(((8, 49), (10, 500), (20, 196), (2, 4096))))
    assert kind.vector == 1

    def eager(x, groups, weight, bias, eps, rounded):
        return aten_model.group_norm(x, groups, weight, bias, eps, rounded, moments=moments_of(dtype, True))

    with monkeypatch.context() as patch:
        in_the_kernels_place(family, patch, seed, expected=eager)
        assert tells(family, kind), kind


@interpreted
def test_without_an_answer_eager_runs(module, monkeypatch):
    """As during the capture of a CUDA graph."""
    family, backward = module("ops.group_norm"), module("ops.group_norm_backward")
    x = torch.randn(2, 8, 16)
    assert family.replacement(x, 2, None, None, EPS) is not None
    assert backward.resolve(x, 2, None, (True, False, False)) is not None
    for each in (family, backward):
        monkeypatch.setattr(each, "takes_vectors", lambda device: None)
    family._calls.clear()
    assert family.replacement(x, 2, None, None, EPS) is None
    assert backward.resolve(x, 2, None, (True, False, False)) is None


def test_vectors_are_found_out(module, monkeypatch):
    """Which order eager has is told by one mean."""
    family = module("ops.group_norm_shape")
    for in_vectors in (False, True):

        def native_group_norm(x, weight, bias, samples, channels, positions, groups, eps, in_vectors=in_vectors):
            moments = moments_of(x.dtype, in_vectors)
            return aten_model.group_norm(x, groups, weight, bias, eps, False, moments=moments)

        monkeypatch.setattr(torch, "native_group_norm", native_group_norm)
        assert family._adds_by_two_threads(CPU).flatten().tolist() == [in_vectors]
        key, proof = ("a test's question", in_vectors), module("proof")
        subject = proof.Subject(functional.group_norm, CPU, "vectors")
        try:
            assert proof.find_out(key, subject, lambda: family._adds_by_two_threads(CPU)) is in_vectors
        finally:
            del proof._verdicts[key]
    assert family.takes_vectors(CPU) is False


def test_an_m2_combined_without_fma_is_seen_in_some_groups(seed):
    # One group in 75 shows it. All of 1,500 hide it once in 10^8 runs.
    x = torch.randn(1500, 700, generator=torch.Generator().manual_seed(seed))
    found, expected = (
        each(x, aten_model.fused_multiply_add) for each in (*SELDOM_SEEN.values(), aten_model.group_norm_moments)
    )
    assert_bits_equal(found.mean, expected.mean)
    assert (found.variance != expected.variance).any()


@pytest.mark.long
def test_1000_wrong_orders_are_told(module, monkeypatch, seed):
    """Each with a proof of its own, of mean and rstd in the tensors' dtype alone where these are rounded."""
    family, choose = module("ops.group_norm"), random.Random(seed)
    for _ in range(int(os.environ.get("LOSSLESS_CASES", 1000))):
        name, dtype, shape = choose.choice([*WRONG]), choose.choice(DTYPES), choose.choice(PROVED)
        kind = kind_of(family, dtype, *shape, choose.random() < 0.5)
        with monkeypatch.context() as patch:
            in_the_kernels_place(family, patch, choose.randrange(1 << 30), moments=WRONG[name])[0] = kind.rounded
            assert tells(family, kind), (name, kind)


# Outputs that a kernel might compute by mistake


def other_output(how):
    """`aten_model.group_norm` with its last steps done otherwise."""

    def group_norm(x, groups, weight, bias, eps, rounded):
        found = aten_model.group_norm(x, groups, weight, bias, eps, rounded)
        mean, variance = aten_model.group_norm_moments(x.reshape(len(x) * groups, -1))
        # Of fp32, or eps as it is; the saved values stay.
        of_dtype = torch.tensor(eps) if how == "eps is not rounded" else torch.tensor(eps, dtype=x.dtype).float()
        rstd = torch.rsqrt(variance + of_dtype)
        repeats = x.shape[1] // groups
        mean, rstd = (each.repeat_interleave(repeats).view(len(x), -1, 1).expand(x.shape) for each in (mean, rstd))
        if how == "the other rounding of mean and rstd":
            mean, rstd = (each.to(x.dtype).float() for each in (mean, rstd))
        scale = rstd * weight.float()[:, None]
        if how == "b by an FMA":
            shift = aten_model.fused_multiply_add(-scale, mean, bias.float()[:, None].expand(x.shape))
        else:
            shift = bias.float()[:, None] - scale * mean
        h = x.float()
        out = scale * h + shift if how == "no FMA" else aten_model.fused_multiply_add(scale, h, shift)
        if how == "as for one position":
            out = aten_model.fused_multiply_add(
                (h - mean) * rstd, weight.float()[:, None].expand(x.shape), bias.float()[:, None].expand(x.shape)
            )
        return aten_model.GroupNorm(out.to(x.dtype), *found[1:])

    return group_norm


OUTPUTS = ("no FMA", "b by an FMA", "as for one position", "the other rounding of mean and rstd", "eps is not rounded")


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_proof_tells_another_output(module, monkeypatch, seed, dtype):
    """With as many elements as on a GPU."""
    family = module("ops.group_norm")
    kind = kind_of(family, dtype, 8, 64)
    in_the_kernels_place(family, monkeypatch, seed)
    assert not tells(family, kind)
    for how in OUTPUTS[: 3 if dtype == torch.float32 else None]:
        with monkeypatch.context() as patch:
            in_the_kernels_place(family, patch, seed, expected=other_output(how))
            assert tells(family, kind), how


@interpreted
def test_a_proof_is_of_the_kernels_that_will_run(module, monkeypatch, chooser):
    """Every kind has shapes of its own, of which no value is left out; some are not numbers."""
    family = module("ops.group_norm")
    for _ in range(100):
        dtype, weight = chooser.choice(DTYPES), chooser.random() < 0.8
        channels = chooser.choice((1, 2, 3, 5, 10, 33, 100, 4096, chooser.randint(1, 300)))
        positions = chooser.choice((1, 2, 7, 49, 64, 100, 1000, 4096, 9000, 1 << 17, chooser.randint(1, 10_000)))
        shape = family.Shape(2, 4, channels, positions)
        if 1 < shape.size <= family._MAX_SIZE:
            split = shape.size >= family.SPLIT_SIZE and chooser.random() < 0.5
            more = weight, weight, False, split, chooser.random() < 0.5
            kind = family.Kind.of(dtype, shape, *more)
            found = family._proof_shapes(kind, more[-1])
            assert found, (kind, shape)
            for each in found:
                assert family.Kind.of(dtype, family.Shape(1, 1, *each), *more) == kind
    monkeypatch.setattr(family, "_PROOF_ELEMENTS", dict.fromkeys(DTYPES, 1))
    for what, found, _ in family._comparisons(kind_of(family, torch.float32, 3, 5), CPU):
        assert found.isnan().any() and found.isfinite().any(), what


def test_the_rounding_of_mean_and_rstd_is_found_out(module, monkeypatch):
    """It is eager's own, and there are two."""
    family = module("ops.group_norm")
    for rounded in (False, True):

        def group_norm(x, groups, weight=None, bias=None, eps=EPS, rounded=rounded):
            return aten_model.group_norm(x, groups, weight, bias, eps, rounded).out

        monkeypatch.setattr(family.functional, "group_norm", group_norm)
        for dtype in DTYPES[1:]:
            module("proof")._verdicts.pop(("group_norm's mean and rstd", dtype, CPU), None)
            assert family._rounds_statistics(dtype, CPU) is rounded
            del module("proof")._verdicts["group_norm's mean and rstd", dtype, CPU]
    assert family._rounds_statistics(torch.float32, CPU) is False


# What surrounds the kernels


@pytest.fixture(autouse=True)
def no_calls(module):
    module("ops.group_norm")._calls.clear()


def gradients_of(function, leaves, dy):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dy)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_function_and_layer_are_what_the_kernel_computes(kernel, module, seed, dtype):
    family, generator = module("ops.group_norm"), torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 3, 8, 4, 5, generator=generator).to(dtype).unbind()
    layer = nn.GroupNorm(2, 8).to(dtype)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    rounded = family._rounds_statistics(dtype, CPU)
    vectors = layer.weight.detach(), layer.bias.detach()
    expected = launched(family, x.flatten(2), 2, *vectors, rounded=rounded)[0].view(x.shape)
    layer.forward = MethodType(kernel.layers.TorchGroupNorm.forward, layer)
    for _ in range(2):  # The second call is recognised.
        assert_bits_equal(layer(x).detach(), expected)
        assert_bits_equal(kernel.group_norm(x, 2, layer.weight, layer.bias).detach(), expected)
        with torch.no_grad():
            assert_bits_equal(layer(x), expected)
        assert_bits_equal(gradients_of(layer, [x], dy)[0], expected)
    assert layer(x.clone().requires_grad_()).grad_fn.name() == "GroupNormBackward"
    assert len([call for call in family._calls.resolved.values() if call is not None]) >= 2


@interpreted
@pytest.mark.parametrize("bias", (True, False))
def test_a_weight_whose_dtype_changed_between_the_passes_is_refused_as_by_eager(kernel, seed, bias):
    for function in (functional.group_norm, kernel.group_norm):
        for first, second in itertools.permutations(DTYPES, 2):
            torch.manual_seed(seed)
            layer = nn.GroupNorm(4, 16).to(first)
            x = torch.randn(2, 16, 8, dtype=first, requires_grad=True)
            out = function(x, 4, layer.weight, layer.bias if bias else None, 1e-5)
            assert function is functional.group_norm or out.grad_fn.name() == "GroupNormBackward"
            layer.to(second)
            with pytest.raises(RuntimeError, match="expected scalar type"):
                torch.autograd.grad(out.sum(), [x, layer.weight])


@interpreted
def test_a_group_of_a_recognised_call_is_not_another(kernel, seed):
    """The same tensors with another number of groups, another eps, or gradients of other tensors."""
    x = torch.randn(2, 8, 9, generator=torch.Generator().manual_seed(seed))
    weight = torch.rand(8) + 0.5
    for groups, eps in ((2, EPS), (4, EPS), (4, 0.5), (2, EPS), (8, 1)):
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        expected = functional.group_norm(x, groups, weight, None, eps)
        torch.testing.assert_close(kernel.group_norm(x, groups, weight, None, eps), expected)
        leaf = x.clone().requires_grad_()
        assert kernel.group_norm(leaf, groups, weight, None, eps).requires_grad


LAYOUTS = {
    "images": lambda x: x.view(4, 8, 6, 5),
    "channels last": lambda x: x.view(4, 8, 6, 5).contiguous(memory_format=torch.channels_last),
    "a slice": lambda x: torch.cat([x, x], 1)[:, 1:9],
    "one sample for all": lambda x: x[:1].expand_as(x),
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "vectors": lambda x: x[..., 0].contiguous(),
}


@interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_contiguous_inputs_are_taken(kernel, module, seed, layout):
    x = LAYOUTS[layout](torch.randn(4, 8, 30, generator=torch.Generator().manual_seed(seed)))
    weight, bias, dy = torch.rand(8) + 0.5, torch.rand(8), torch.randn(x.shape)
    ours = gradients_of(lambda *given: kernel.group_norm(given[0], 4, *given[1:]), [x, weight, bias], dy)
    theirs = gradients_of(lambda *given: functional.group_norm(given[0], 4, *given[1:]), [x, weight, bias], dy)
    for found, expected in zip(ours, theirs):
        assert found.stride() == expected.stride()
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        torch.testing.assert_close(found, expected)
    (call,) = module("ops.group_norm")._calls.resolved.values()
    assert (call is not None) == (layout in ("images", "vectors"))


@interpreted
def test_gradients_of_any_layout(kernel, seed):
    """dy as attention or a permutation leaves it, expanded, and of some inputs alone."""
    x, dy = torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(seed)).unbind()
    weight, bias = torch.rand(8) + 0.5, torch.rand(8)
    for gradient in (dy.transpose(1, 2).contiguous().transpose(1, 2), dy[:1].expand_as(dy)):
        all_of_them = gradients_of(
            lambda x, *more: kernel.group_norm(x, 2, *more), [x, weight, bias], gradient.clone()
        )[1:]
        for needs in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
            found = []
            for function in (kernel.group_norm, functional.group_norm):
                leaves = [each.clone().requires_grad_(need) for each, need in zip((x, weight, bias), needs)]
                out = function(leaves[0], 2, *leaves[1:])
                found.append(torch.autograd.grad(out, [each for each in leaves if each.requires_grad], gradient))
            expected = [each for each, need in zip(all_of_them, needs) if need]
            for ours, theirs, ours_of_contiguous in zip(*found, expected):
                assert_bits_equal(ours, ours_of_contiguous)
                # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
                torch.testing.assert_close(ours, theirs)


def outside():
    x, weight = torch.randn(3, 8, 7), torch.rand(8)
    return {
        "float64": (x.double(), 2, weight.double()),
        "a weight of another dtype": (x.bfloat16(), 2, weight),
        "a bias alone": (x, 2, None, weight),
        "no samples": (x[:0], 2, weight),
        "no positions": (x[..., :0], 2, weight),
        "a subclass": (x.as_subclass(type("Other", (torch.Tensor,), {})), 2),
        "a strided weight": (x, 2, torch.rand(16)[::2]),
    }


@interpreted
@pytest.mark.parametrize("case", outside())
def test_outside_the_domain_eager_runs(kernel, module, case):
    arguments = outside()[case]
    try:
        expected = functional.group_norm(*arguments)
    except RuntimeError as error:  # torch 2.15 refuses tensors without positions.
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            kernel.group_norm(*arguments)
        return
    found = kernel.group_norm(*arguments)
    assert_bits_equal(found.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))
    assert not any(module("ops.group_norm")._calls.resolved.values())


def test_what_eager_refuses_is_refused(kernel):
    x = torch.ones(2, 6, 4)
    with pytest.raises(TypeError, match=r"input: .* found list"):
        kernel.group_norm([1.0], 1)
    with pytest.raises(ValueError, match=r"input: expected at least two dimensions, found \[6\]"):
        kernel.group_norm(torch.ones(6), 1)
    with pytest.raises(TypeError, match="num_groups: expected an integer, found float"):
        kernel.group_norm(x, 2.0)
    for groups in (0, 4, -2):
        with pytest.raises(ValueError, match=f"num_groups: expected a divisor of the 6 channels, found {groups}"):
            kernel.group_norm(x, groups)
    with pytest.raises(TypeError, match=r"weight: .* found torch.int64"):
        kernel.group_norm(x, 2, torch.ones(6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"bias: expected shape \[6\], found \[2\]"):
        kernel.group_norm(x, 2, torch.ones(6), torch.ones(2))
    with pytest.raises(TypeError, match="eps: expected a number, found bool"):
        kernel.group_norm(x, 2, eps=True)
    with pytest.raises(ValueError, match="more than 1 value"):
        kernel.group_norm(torch.ones(1, 6), 6)


def layers_of_their_own():
    class Subclass(nn.GroupNorm):
        def forward(self, input):
            return super().forward(input) + 1.0

    class Computed(nn.GroupNorm):
        @property
        def eps(self):
            return 0.5

        @eps.setter
        def eps(self, value):
            pass

    parametrized = nn.GroupNorm(2, 8)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Tanh())
    attribute = nn.GroupNorm(2, 8)
    del attribute.weight
    attribute.weight = torch.full((8,), 3.0)
    no_bias = nn.GroupNorm(2, 8)
    no_bias.bias = None
    return {
        "another forward": Subclass(2, 8),
        "a property": Computed(2, 8),
        "a parametrization": parametrized,
        "an attribute": attribute,
        "no weight": nn.GroupNorm(2, 8, affine=False),
        "no bias": no_bias,
    }


@interpreted
@pytest.mark.parametrize("name", layers_of_their_own())
def test_layers_of_their_own(kernel, module, seed, name):
    """What the layer returns is what its class does, up to a CPU's other order of additions."""
    layer = layers_of_their_own()[name]
    x = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(seed))
    expected = layer(x)
    layer.forward = MethodType(kernel.layers.TorchGroupNorm.forward, layer)
    # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
    torch.testing.assert_close(layer(x), expected)
    calls = [call for call in module("ops.group_norm")._calls.resolved.values() if call is not None]
    assert bool(calls) == (name in ("an attribute", "no weight", "no bias"))


@interpreted
def test_a_replaced_function_runs(kernel, monkeypatch):
    layer, x = nn.GroupNorm(2, 8), torch.ones(2, 8, 3)
    layer.forward = MethodType(kernel.layers.TorchGroupNorm.forward, layer)
    monkeypatch.setattr(functional, "group_norm", lambda *arguments: torch.full((2, 8), 7.0))
    assert_bits_equal(layer(x), torch.full((2, 8), 7.0))


@interpreted
def test_under_autocast_16_bits_are_eagers(kernel, module):
    """CUDA's computes in fp32. A call without autocast that is recognised must not stand for one with it."""
    family, x = module("ops.group_norm"), torch.randn(4, 8, 6).half()
    for _ in range(2):
        assert family.replacement(x, 2, None, None, EPS) is not None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert family.replacement(x, 2, None, None, EPS) is None
            assert_bits_equal(kernel.group_norm(x, 2), functional.group_norm(x, 2))
            assert family.replacement(x.float(), 2, None, None, EPS) is not None


@interpreted
def test_gradients_can_be_differentiated(kernel, seed):
    x, dy = torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(seed)).unbind()
    penalties = []
    for function in (kernel.group_norm, functional.group_norm):
        leaves = [each.clone().requires_grad_() for each in (x, torch.linspace(0.5, 1.5, 8), dy)]
        out = function(leaves[0], 2, leaves[1])
        first = torch.autograd.grad(out, leaves[:2], leaves[2], create_graph=True)
        penalties.append(torch.autograd.grad(sum(each.square().sum() for each in first), leaves))
    for found, expected in zip(*penalties):
        # Eager on a CPU adds in another order than the kernels: a few roundings.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert found.any()


@interpreted
def test_modes_checkpoints_and_transforms_get_eagers_results(kernel, seed):
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            names.append(str(function))
            return function(*arguments, **(named or {}))

    names = []
    x, dy = torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(seed)).unbind()
    ours, theirs = (lambda x, f=f: f(x, 2) for f in (kernel.group_norm, functional.group_norm))
    expected = gradients_of(theirs, [x], dy)
    with Watching():
        for found, wanted in zip(gradients_of(ours, [x], dy), expected):
            assert_bits_equal(found, wanted)
    assert "aten.native_group_norm.default" in names and "aten.native_group_norm_backward.default" in names

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(ours, x, use_reentrant=False)

    # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
    torch.testing.assert_close(gradients_of(checkpointed, [x], dy), expected)
    names.clear()
    with Watching():  # Both computations of a checkpoint save the same tensors, whether a mode watches or not.
        assert_bits_equal(gradients_of(checkpointed, [x], dy)[1], expected[1])
    assert names.count("aten.native_group_norm.default") >= 2
    # Under vmap and jvp other operations of eager's compute the formula, up to a few roundings.
    torch.testing.assert_close(torch.vmap(ours)(x[None])[0], theirs(x))
    tangents = (torch.func.jvp(function, (x,), (dy,))[1] for function in (ours, theirs))
    torch.testing.assert_close(*tangents)


@interpreted
def test_without_proof_eager_runs(kernel, module, nothing_known, monkeypatch):
    """A CPU adds in another order than CUDA."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    monkeypatch.setattr(module("ops.group_norm"), "_PROOF_ELEMENTS", dict.fromkeys(DTYPES, 1))
    monkeypatch.setattr(module("ops.group_norm"), "_PROOF_EPS", (1e-5,))
    monkeypatch.setattr(module("ops.group_norm"), "_LEAST_ROWS", 12)
    x = torch.randn(2, 6, 96)
    with pytest.warns(RuntimeWarning, match="group_norm on cpu, torch.float32, 32 lanes, .* keeps .*differ"):
        assert_bits_equal(kernel.group_norm(x, 2), functional.group_norm(x, 2))


@interpreted
def test_the_operators_for_torch_compile(kernel, module, seed):
    family, generator = module("ops.group_norm"), torch.Generator().manual_seed(seed)
    dtype = random.Random(seed).choice(DTYPES)
    namespace = getattr(torch.ops, family._group_norm_op.namespace)
    x, dy = torch.randn(2, 3, 8, 5, generator=generator).to(dtype).unbind()
    weight, bias = torch.randn(2, 8, generator=generator).to(dtype).unbind()
    for vectors in ((weight, bias), (weight, None), (None, None)):
        leaves = [each.clone().requires_grad_() if each is not None else None for each in vectors]
        torch.library.opcheck(namespace.group_norm.default, (x.clone().requires_grad_(), 2, *leaves, EPS))
        given = [each for each in (x, *vectors) if each is not None]
        rest = (None,) * (3 - len(given))
        functions = (
            lambda x, *more: namespace.group_norm(x, 2, *more, *rest, EPS)[0],  # noqa: B023
            lambda x, *more: kernel.group_norm(x, 2, *more, *rest, EPS),  # noqa: B023
        )
        for found, expected in zip(*(gradients_of(function, given, dy) for function in functions)):
            assert_bits_equal(found, expected)
    _, mean, rstd = namespace.group_norm(x, 2, weight, bias, EPS)
    for needs in ([True, True, True], [True, False, False]):
        arguments = (dy, x, 2, mean, rstd, weight, bias, EPS, needs)
        torch.library.opcheck(namespace.group_norm_backward.default, arguments)


# On a GPU: eager itself


@pytest.mark.gpu
def test_output_and_gradients_are_those_of_eager(kernel, module, seed, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(80):
        x, groups, *vectors = random_call(choose, generator, most=1 << choose.randint(8, 22))
        if x.numel() == groups:
            continue
        x, vectors = x.cuda(), [each.cuda() for each in vectors if each is not None]
        label = f"case {case}, {list(x.shape)} {x.dtype}, {groups} groups, {len(vectors)} vectors"
        assert module("ops.group_norm").replacement(x, groups, *(*vectors, None, None)[:2], EPS) is not None, label
        if case % 4:  # A kernel of its own for each: the gradients of few.
            with torch.no_grad():
                found, expected = (
                    function(x, groups, *vectors) for function in (kernel.group_norm, functional.group_norm)
                )
            assert_bits_equal(found, expected, label)
            continue
        dy = torch.randn_like(x)
        ours = gradients_of(lambda *given: kernel.group_norm(given[0], groups, *given[1:]), [x, *vectors], dy)  # noqa: B023
        theirs = gradients_of(
            lambda *given: functional.group_norm(given[0], groups, *given[1:]),  # noqa: B023
            [x, *vectors],
            dy,
        )
        for mine, eagers in zip(ours, theirs):
            assert_bits_equal(mine, eagers, label)
            assert mine.stride() == eagers.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 320, 4096), (1, 128, 1 << 18), (3, 64, 35), (2, 4096, 1), (128, 512, 4096)])
def test_images_have_eagers_bits(kernel, module, seed, monkeypatch, shape):
    """Those of diffusion models, some of which are split, and that of the benchmark."""
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator = torch.Generator("cuda").manual_seed(seed)
    for dtype in DTYPES:
        x = torch.randn(shape, generator=generator, device="cuda").to(dtype)
        weight, bias = torch.randn(2, shape[1], generator=generator, device="cuda").to(dtype)
        for eps in (EPS, 1e-6):
            found = module("ops.group_norm").replacement(x, 32, weight, bias, eps)
            assert_bits_equal(found, functional.group_norm(x, 32, weight, bias, eps), f"{dtype}, {eps}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_transcription_is_what_eager_computes(module, seed, dtype):
    """Given the reciprocal square roots of the GPU."""
    generator = torch.Generator().manual_seed(seed)
    family, device = module("ops.group_norm"), torch.device("cuda")
    rounded, moments = family._rounds_statistics(dtype, device), moments_of(dtype, family.takes_vectors(device))
    for shape in ((2, 12, 7), (2, 12, 64), (2, 12, 1000), (2, 2048, 1)):
        for vectors in (2, 1, 0):
            x = torch.randn(shape, generator=generator).to(dtype) + 1.0
            given = *torch.randn(2, shape[1], generator=generator).to(dtype)[:vectors], *(None,) * (2 - vectors)
            on_gpu = (each if each is None else each.cuda() for each in given)
            expected = torch.native_group_norm(x.cuda(), *on_gpu, *shape, 4, EPS)
            rsqrt = {"rsqrt": lambda x: torch.rsqrt(x.cuda()).cpu()}
            found = aten_model.group_norm(x, 4, *given, EPS, rounded, moments=moments, **rsqrt)
            for mine, eagers, what in zip(found, expected, ("output", "mean", "rstd")):
                assert_bits_equal(mine, eagers.cpu(), f"{what} of {shape}, {vectors} vectors")


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_group_norm_is_the_uncompiled_one(kernel, seed, dynamic):
    generator = torch.Generator("cuda").manual_seed(seed)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, *vectors: kernel.group_norm(x, 4, *vectors), dynamic=dynamic, fullgraph=True)
    for dtype in DTYPES:
        for positions in (30, 1024):
            x, dy = torch.randn(2, 3, 64, positions, generator=generator, device="cuda").to(dtype)
            vectors = torch.randn(2, 64, generator=generator, device="cuda").to(dtype).unbind()
            functions = compiled, lambda x, *more: kernel.group_norm(x, 4, *more)
            for found, expected in zip(*(gradients_of(each, [x, *vectors], dy) for each in functions)):
                assert_bits_equal(found, expected, f"{dtype} {positions}")
