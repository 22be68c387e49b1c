"""LayerNorm, and the gradients of `F.rms_norm`, which are of the same kernels: the kernels in Triton's interpreter against the
transcription of ATen's, the proof's power, and what surrounds it.

The interpreter rounds an FMA as its version does (`interpreter.multiply_add`) and truncates to bf16: `cast` does likewise.
"""

import dataclasses
import functools
import itertools
import math
import random
from types import MethodType, SimpleNamespace

import aten_model
import pytest
import torch
import triton
import triton.language as tl
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
BF16_FIRST = [DTYPES[2], *(pytest.param(each, marks=pytest.mark.long) for each in DTYPES[:2])]
# Less than a step of all threads, whole steps, and both sides of them.
SIZES = (64, 68, 384, 508, 512, 516, 640, 768, 1020, 1024, 1028, 1280, 2048, 2560, 4096)
# Rows whose lanes many rows take by halves, and the next ones.
HALVES = (*range(64, 833, 64), 68, 100, 196, 300, 600, 900, 1100, 1600, 2500, 1024)
EPS = 1e-5


def special_rows(x, choose):
    """Some rows of x become constant, huge or of a huge mean, or hold infinities and NaN."""
    for row in x:
        value = choose.choice((None, None, 0.0, -0.0, 3.0, 6e4, math.inf, -math.inf, math.nan, "mean", "huge"))
        if value == "mean":
            row += 3e4
        elif value == "huge":
            row *= 1e4
        elif value is not None:
            row[choose.choice((slice(None), slice(None, None, 2), choose.randrange(len(row))))] = value
    return x


def rows_of_blocks(x, choose):
    """Some rows of x become blocks of equal numbers: their M2 is that of the combinations. In some a square is infinite."""
    for row in x:
        length = choose.choice((1, 4, 16, 64, 128))
        if length > 1:
            row[:] = row[::length].repeat_interleave(length)[: len(row)]
        if choose.random() < 0.2 and x.dtype != torch.float16:
            row *= choose.choice((1e25, 3e38 / 300))
        elif choose.random() < 0.2 and x.dtype != torch.float16:
            # One warp's lanes or the others'.
            row[choose.choice((slice(128), slice(128, None)))] = 1e25
    return x


def transcribed(x, weight, bias, **how):
    return aten_model.layer_norm(x, weight, bias, EPS, numpy_rsqrt, multiply_add, cast, **how)


def launched(family, x, weight, bias, few=True):
    """The output, mean and rstd of rows x, of the kernel for few rows or for many."""
    rows, size = x.shape
    of_kernel = 1 if few else family._fewest_rows(size)
    kind = family.Kind.of(x.dtype, of_kernel, size, x.stride(0), weight is not None, bias is not None)
    out = torch.full((rows, size), math.nan, dtype=x.dtype)
    mean, rstd = torch.full((2, rows, 1), math.nan).unbind()
    given = x if weight is None else weight, x if bias is None else bias
    kind.launch(rows, x.stride(0), CPU, EPS, True)(x, *given, out, mean, rstd)
    return out, mean, rstd


@interpreted
def test_the_kernel_equals_the_transcription(module, seed):
    family, generator, choose = module("ops.layer_norm"), torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(50):
        size = choose.choice((choose.choice(SIZES), 4 * choose.randint(16, 300)))
        rows, dtype, gap = choose.randint(1, 3), choose.choice(DTYPES), choose.choice((0, 0, 1, 4, 8))
        normal = torch.randn(rows, size + gap, generator=generator) * choose.choice((0.1, 1.0, 30.0))
        x = special_rows(normal + choose.choice((0.0, 1.0, -50.0)), choose).to(dtype)[:, :size]
        weight, bias = torch.randn(2, size, generator=generator).to(dtype).unbind()
        weight, bias = choose.choice(((weight, bias), (weight, bias), (weight, None), (None, None)))
        few = choose.random() < 0.5
        label = f"case {case}, {rows}x{size} {dtype}, gap {gap}, {weight is not None}, {bias is not None}, {few}"
        for found, expected, what in zip(
            launched(family, x, weight, bias, few), transcribed(x, weight, bias), ("output", "mean", "rstd")
        ):
            assert_bits_equal(found, expected, f"{what} of {label}")


@interpreted
@pytest.mark.parametrize("size", HALVES)
def test_the_kernel_for_many_rows_equals_the_transcription(module, seed, size):
    """Of fp32, of which each bit shows, and of a dtype of 16 bits; rows that are no multiple of a program's, with a gap or without.

    Triton 3.9's interpreter, whose FMA rounds once, tells more mistakes in M2 than earlier ones.
    """
    family, generator, choose = module("ops.layer_norm"), torch.Generator().manual_seed(seed), random.Random(seed)
    for case, dtype in enumerate((torch.float32, choose.choice(DTYPES[1:]), torch.float32)):
        rows, gap = choose.choice((17, 19, 27)), choose.choice((0, 4, 8))
        x = torch.randn(rows, size + gap, generator=generator)
        x = x * choose.choice((0.1, 1.0, 30.0)) + choose.choice((0.0, -50.0)) * (case == 0)
        x = (special_rows if case == 0 else rows_of_blocks)(x.to(dtype), choose)[:, :size]
        weight, bias = torch.randn(2, size, generator=generator).to(dtype).unbind()
        weight, bias = choose.choice(((weight, bias), (weight, bias), (weight, None), (None, None)))
        expected = transcribed(x, weight, bias)
        for found, wanted, what in zip(launched(family, x, weight, bias, few=False), expected, expected._fields):
            label = f"{what} of case {case}, {rows}x{size} {dtype}, gap {gap}, {weight is not None}, {bias is not None}"
            assert_bits_equal(found, wanted, label)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_many_where_their_elements_and_programs_are(module, dtype):
    family = module("ops.layer_norm")
    for size in (64, 768, 1024, 4096, 16384):
        fewest = family._fewest_rows(size)
        kinds = [family.Kind.of(dtype, rows, size, size, True, True) for rows in (1, fewest - 1, fewest, 1 << 20)]
        assert [kind.few for kind in kinds] == [True, True, False, False]
        assert fewest == {64: 32768, 768: 2731, 1024: 2048}.get(size, 1024)
        halves = size <= 1024
        assert [kind.by_halves for kind in kinds] == [halves] * 4


NEEDS = [needs for needs in itertools.product((True, False), repeat=3) if any(needs)]
NEEDS_OF_VECTORS = [needs for needs in NEEDS if not needs[0]]


def launched_gradients(module, dy, x, weight, mean, rstd, needs=(True, True, True)):
    """The kernels' gradients of rows x, of `F.rms_norm` without means; None where none is needed."""
    family, (rows, size) = module("ops.layer_norm_backward"), x.shape
    call = family.resolve(x, rows, x.stride(0), (size,), weight, needs, centred=mean is not None)
    return call(dy, x, mean, rstd, weight, None)


def transcribed_gradients(dy, x, weight, mean, rstd, **how):
    return aten_model.layer_norm_backward(dy, x, weight, mean, rstd, multiply_add, cast, **how)


@interpreted
@pytest.mark.parametrize("overlaps", [False, True])
def test_the_gradients_equal_the_transcription(module, monkeypatch, seed, overlaps):
    monkeypatch.setattr(module("launch"), "can_overlap", lambda device: overlaps)
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    # Rows of which 1, 8, 16 and 32 of ATen's threads share a column, on both sides of whole blocks; dx of a few rows.
    counts = (63, 64, 65, 100, 127, 128, 200, 255, 256, 257, 511, 512, 520)
    for case in range(16):
        few = case % 4 > 0
        size = (
            choose.choice((choose.choice(SIZES[:8]), 4 * choose.randint(16, 160))) if few else choose.choice((64, 68))
        )
        rows, dtype, gap = (
            choose.randint(1, 9) if few else choose.choice(counts),
            choose.choice(DTYPES),
            choose.choice((0, 1, 8)),
        )
        x, dy = torch.randn(2, rows, size + gap, generator=generator)
        x = (
            special_rows(x * choose.choice((0.1, 1.0, 30.0)) + choose.choice((0.0, 1.0)), choose)
            if case % 3 == 0
            else x
        )
        x, dy = x.to(dtype)[:, :size], special_rows(dy, choose)[:, :size].to(dtype).contiguous()
        weight = choose.choice((torch.randn(size, generator=generator).to(dtype), None))
        _, mean, rstd = transcribed(x, None, None)
        mean = choose.choice((mean, None))
        weight = weight if few else torch.ones(size, dtype=dtype)
        of_vectors = weight is not None, weight is not None and mean is not None
        possible = NEEDS if few else NEEDS_OF_VECTORS
        needs = choose.choice([needs for needs in possible if needs[1] <= of_vectors[0] and needs[2] <= of_vectors[1]])
        label = f"case {case}, {rows}x{size} {dtype}, gap {gap}, {mean is not None}, {weight is not None}, {needs}"
        found = launched_gradients(module, dy, x, weight, mean, rstd, needs)
        for mine, expected, need, what in zip(
            found, transcribed_gradients(dy, x, weight, mean, rstd), needs, ("dx", "dweight", "dbias")
        ):
            assert (mine is not None) == need
            if need:
                assert_bits_equal(mine, expected, f"{what} of {label}")


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_dx_is_launched_behind_the_sums_that_it_overlaps(module, monkeypatch, dtype):
    """And before what follows them, in the proof too. Where one of both is not needed, or rows are many and long, nothing overlaps."""
    family, launched = module("ops.layer_norm_backward"), []

    def bind(kernel, *_, overlaps=False):
        def run(*tensors):
            launched.append((kernel.__name__.removeprefix("layer_norm_"), overlaps))

        return SimpleNamespace(__call__=run, call_6=run, call_4=run)

    def of(rows, size, needs=(True, True, True)):
        launched.clear()
        x, weight = torch.zeros(rows, size, dtype=dtype), torch.zeros(size, dtype=dtype)
        rstd = torch.zeros(rows, 1)
        family.resolve(x, rows, size, (size,), weight, needs)(x, x, rstd, rstd, weight, weight)
        return [*launched]

    monkeypatch.setattr(family.launch, "bind", bind)
    monkeypatch.setattr(family.launch, "can_overlap", lambda device: True)
    dx, sums, threads = ("backward", True), ("sum_rows", False), ("sum_threads", False)
    alone = "backward", False
    assert of(4, 64) == of(500, 4096) == [sums, dx]
    assert of(600, 64) == of(600, 4096 // dtype.itemsize) == [sums, dx, threads]
    assert of(600, 4096 // dtype.itemsize + 4) == [alone, sums, threads]
    assert of(600, 64, (True, False, False)) == [alone]
    assert of(600, 64, (False, True, True)) == [sums, threads]
    monkeypatch.setattr(family.launch, "can_overlap", lambda device: False)
    assert of(600, 64) == [alone, sums, threads] and of(4, 64) == [alone, sums]


@interpreted
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("centred", [True, False])
def test_the_proof_of_dx_that_overlaps(module, monkeypatch, seed, few, centred):
    """It launches the sums before, and passes."""
    family, launched = module("ops.layer_norm_backward"), []
    bind = family.launch.bind
    monkeypatch.setattr(
        family.launch, "bind", lambda kernel, *more, **named: launched.append(kernel) or bind(kernel, *more, **named)
    )
    monkeypatch.setattr(family, "_PROOF_ROWS", 600)
    monkeypatch.setattr(family, "_PROOF_ELEMENTS", 1)
    backward = functools.partial(aten_model.layer_norm_backward, fma=multiply_add, cast=cast)
    monkeypatch.setattr(
        family, "eager", lambda dy, x, shape, mean, rstd, weight, bias, needs: backward(dy, x, weight, mean, rstd)
    )
    if few:
        monkeypatch.setattr(family, "_PROOF_ROWS", 100)
    kind = family.OfInput(torch.float32, 64, 4, True, few, centred, overlaps=True)
    for what, found, expected in family._comparisons_of_dx(kind, CPU):
        assert_bits_equal(found, expected, what)
    assert [kernel.__name__ for kernel in launched if "threads" not in kernel.__name__] == 2 * [
        "layer_norm_sum_rows",
        "layer_norm_backward",
    ]


@interpreted
@pytest.mark.parametrize("size", [2056, 8192 + 516, 16384])
def test_gradients_of_long_rows(module, seed, size):
    generator, dtype = torch.Generator().manual_seed(seed), random.Random(seed).choice((torch.float32, torch.float16))
    (x, dy), weight = torch.randn(2, 3, size + 8, generator=generator).to(dtype), torch.randn(size).to(dtype)
    x, dy = x[:, :size], dy[:, :size].contiguous()
    _, mean, rstd = transcribed(x, None, None)
    for means, needs in ((mean, (True, True, True)), (None, (True, True, False))):
        tensors = dy, x, weight, means, rstd
        found, expected = launched_gradients(module, *tensors, needs), transcribed_gradients(*tensors)
        for mine, wanted, need in zip(found, expected, needs):
            if need:
                assert_bits_equal(mine, wanted)


def test_threads_are_atens(module):
    """Of both sides of each limit; beyond ATen's sums of blocks, which depend on the GPU, its operator runs."""
    threads = module("core.norms").column_threads
    for rows, size in itertools.product(range(1, 65537), (64, 4096)):
        if rows < 1000 or rows % 4096 < 2:
            assert threads(rows) == aten_model.layer_norm_threads(rows, size), (rows, size)
    assert [threads(rows) for rows in (65537, 1 << 20)] == [0, 0]


def test_each_of_two_equal_counts_has_half_of_both():
    """`layer_norm_forward` relies on it for warps whose lanes have as many elements: up to 33 vectors of four each."""
    vectors = torch.arange(1, 42, dtype=torch.float32)
    for lanes in (1, 2, 4, 8, 16):
        count = 4 * vectors * lanes
        is_half = count * (1 / (count + count)) == 0.5
        assert is_half[:40].all() and not is_half[40]


@pytest.mark.parametrize("layer", ["TorchLayerNorm", "TorchRMSNorm"])
def test_warmup_in_training_has_rows_of_every_kind(module, layer):
    family, shapes = module("ops.layer_norm_backward"), module("core.declarations").WARMUP[layer].shapes

    def kinds(rows):
        return {(module("core.norms").column_threads(count), count < family._FEW_ROWS) for count in rows}

    warmed = shapes(torch.ones(768), torch.float32, CPU, None, True)
    assert kinds(rows for rows, _ in warmed) == kinds(range(1, 65537))
    assert layer != "TorchLayerNorm" or (2731, 768) in warmed
    inferred = shapes(torch.ones(768), torch.float32, CPU, None, False)
    assert (
        inferred == [(1, 768), (2731, 768)]
        if layer == "TorchLayerNorm"
        else kinds(rows for rows, _ in inferred) < kinds((1, 64, 600))
    )


@pytest.mark.parametrize("shape", [(0,), (60,), (66,), (16388,), (64, 64, 64)])
def test_warmup_of_what_no_kernel_takes_is_of_few_rows(module, shape):
    shapes = module("core.declarations").WARMUP["TorchLayerNorm"].shapes
    assert shapes(torch.ones(shape), torch.float32, CPU, None, False) == [(1, *shape)]
    assert max(rows for rows, *_ in shapes(torch.ones(shape), torch.float32, CPU, None, True)) == 512


def test_few_rows_and_many_are_proved_apart(module, nothing_known, monkeypatch):
    """And named apart."""
    family, proved = module("ops.layer_norm"), []

    def proves(key, subject, comparisons):
        proved.append((key, subject.where))
        return True

    monkeypatch.setattr(family.proof, "kernel_is_proved", proves)
    for rows in (1, 2730, 2731, 5000):
        family._proved(family.Kind.of(torch.float32, rows, 768, 768, True, True), CPU)
    few, last, first, many = proved
    assert few == last and first == many and few[0] != first[0]
    assert few[1] == "torch.float32, up to 2730 rows of 768 elements"
    assert first[1] == "torch.float32, 2731 or more rows of 768 elements"


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_dx_keeps_the_weight(module, monkeypatch, dtype):
    """Of few rows up to 16 KB, and of those that are read twice."""
    family, kept = module("ops.layer_norm_backward"), []
    monkeypatch.setattr(family.launch, "bind", lambda kernel, constants, *_, **__: kept.append(constants["KEPT"]))
    longest = (16 << 10) // dtype.itemsize
    for size, few in (
        (768, True),
        (longest, True),
        (longest + 4, True),
        (768, False),
        (longest, False),
        (16384, False),
    ):
        family.OfInput(dtype, size, 16 // dtype.itemsize, True, few).launch(100, size, CPU)
    assert kept == [True, True, False, False, False, True]


@interpreted
@pytest.mark.parametrize("size", [8192 + 516, 16384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_long_rows(module, seed, size, dtype):
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = torch.randn(3, 1, size, generator=generator).to(dtype).unbind()
    few = random.Random(seed).random() < 0.5
    found = launched(module("ops.layer_norm"), x, weight[0], bias[0], few)
    for mine, expected in zip(found, transcribed(x, weight, bias)):
        assert_bits_equal(mine, expected, f"{few}")


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("few", [True, False])
def test_special_rows(module, dtype, few):
    """Whatever order it is added up in, a row has these values."""
    x = torch.stack([torch.full((512,), value) for value in (0.0, -0.0, 3.0, math.inf, math.nan)]).to(dtype)
    out, mean, rstd = launched(module("ops.layer_norm"), x, None, None, few)
    assert_bits_equal(mean[:3, 0], torch.tensor([0.0, 0.0, 3.0]))
    # Every lane has 4 elements: their reciprocals are powers of two, and a constant row has no variance.
    assert_bits_equal(rstd[:3], numpy_rsqrt(torch.full((3, 1), EPS)))
    # x - mean of -0 is -0 - +0, which is -0.
    assert_bits_equal(out[:3], torch.zeros(3, 512, dtype=dtype).index_fill(0, torch.tensor([1]), -0.0))
    assert out[3:].isnan().all() and rstd[3:].isnan().all()


# Moments that a kernel might compute by mistake


def combined(mean, m2):
    """Another way to combine two means, or two M2."""

    def combine(below, above, fma):
        (mean_b, m2_b, count_b), (mean_a, m2_a, count_a) = below, above
        stated = aten_model.layer_norm_combine(below, above, fma)
        factor = torch.where(stated[2] > 0, 1.0 / stated[2].clamp(min=1.0), 0.0)
        n_a, n_b, delta = count_a * factor, count_b * factor, mean_b - mean_a
        found = [stated[0], stated[1], stated[2]]
        if mean == "other FMA":
            found[0] = fma(mean_b, n_b.expand_as(mean_b), n_a * mean_a)
        elif mean == "by delta":
            found[0] = fma(delta, n_b.expand_as(delta), mean_a)
        if m2 == "M2 last":
            found[1] = m2_a + fma(n_b, count_a * (delta * delta), m2_b)
        return tuple(found)

    return functools.partial(aten_model.layer_norm_moments, combine=combine)


def without_fma(x, fma):
    return aten_model.layer_norm_moments(x, lambda a, b, c: a * b + c)


def two_passes(x, fma):
    h = x.float()
    mean = aten_model.row_sum(h) / torch.tensor(float(h.shape[1]))
    centred = h - mean[:, None]
    return aten_model.Moments(mean, aten_model.row_sum(centred * centred) / torch.tensor(float(h.shape[1])))


WRONG = {
    "256 threads": functools.partial(aten_model.layer_norm_moments, threads=256),
    "64 threads": functools.partial(aten_model.layer_norm_moments, threads=64),
    "no FMA": without_fma,
    "two passes": two_passes,
    "M2 last": combined("", "M2 last"),
    "means by another FMA": combined("other FMA", ""),
    "means by their difference": combined("by delta", ""),
}
# With lanes of one count, a power of two, these are the same numbers.
ONLY_UNEVEN = ("means by another FMA",)


def in_the_kernels_place(family, patch, seed, **how):
    """The proof compares the transcription with such moments instead of the kernel with eager; `seed` replaces its own."""

    def launch(kind, rows, row_stride, device, eps, store_statistics):
        def run(x, weight, bias, *outs):
            given = weight if kind.weight else None, bias if kind.bias else None
            for out, value in zip(outs, aten_model.layer_norm(x, *given, eps, **how)):
                out.copy_(value)

        return run

    def eager(x, shape, weight, bias, eps):
        return aten_model.layer_norm(x, weight, bias, eps)

    patch.setattr(family.proof, "generator", lambda device, _: torch.Generator(device).manual_seed(seed))
    patch.setattr(family.Kind, "launch", launch)
    patch.setattr(family.torch, "native_layer_norm", eager)


def tells(family, kind) -> bool:
    return any(not bits_equal(found, expected) for _, found, expected in family._comparisons(kind, CPU))


@pytest.mark.parametrize("size", [64, 768, 1024, 1280])
@pytest.mark.parametrize("name", [None, *WRONG])
def test_the_proof_tells_a_wrong_order(module, monkeypatch, seed, name, size):
    """In one dtype at random."""
    family, dtype = module("ops.layer_norm"), random.Random(seed).choice(DTYPES)
    kind = family.Kind(dtype, size, 16 // dtype.itemsize, True, True, False)
    if name is None:
        in_the_kernels_place(family, monkeypatch, seed)
        assert not tells(family, kind)
        return
    if size % 512 == 0 and name in ONLY_UNEVEN:
        pytest.skip("lanes of one count have the same bits")
    if size == 64 and name in (*ONLY_UNEVEN, "256 threads", "64 threads", "means by their difference"):
        pytest.skip("16 lanes of four elements have the same bits")
    in_the_kernels_place(family, monkeypatch, seed, moments=WRONG[name])
    assert tells(family, kind)


@pytest.mark.long
def test_1000_wrong_orders_are_told(module, monkeypatch, seed):
    """Each with a proof of its own, in lanes of unequal counts, where every one of them has other bits."""
    family, choose = module("ops.layer_norm"), random.Random(seed)
    for _ in range(1000):
        name, dtype, size = choose.choice([*WRONG]), choose.choice(DTYPES), choose.choice((768, 1280))
        with monkeypatch.context() as patch:
            in_the_kernels_place(family, patch, choose.randrange(1 << 30), moments=WRONG[name])
            assert tells(family, family.Kind(dtype, size, 16 // dtype.itemsize, True, True, False)), (name, dtype, size)


@pytest.mark.parametrize("size", [64, pytest.param(1024, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_proof_tells_another_output(module, monkeypatch, seed, dtype, size):
    """The last product and sum without FMA, and a weight that is multiplied first."""
    family = module("ops.layer_norm")
    kind = family.Kind(dtype, size, 16 // dtype.itemsize, True, True, False)

    def weight_first(x, weight, bias, eps):
        _, mean, rstd = aten_model.layer_norm(x, weight, bias, eps)
        out = aten_model.fused_multiply_add((weight.float() * rstd), x.float() - mean, bias.float().expand(x.shape))
        return aten_model.LayerNorm(out.to(x.dtype), mean, rstd)

    def no_fma(x, weight, bias, eps):
        _, mean, rstd = aten_model.layer_norm(x, weight, bias, eps)
        out = weight.float() * (rstd * (x.float() - mean)) + bias.float()
        return aten_model.LayerNorm(out.to(x.dtype), mean, rstd)

    for other in (weight_first, no_fma):

        def eager(x, shape, weight, bias, eps, other=other):
            return (aten_model.layer_norm if bias is None else other)(x, weight, bias, eps)

        in_the_kernels_place(family, monkeypatch, seed)
        assert not tells(family, kind)
        monkeypatch.setattr(family.torch, "native_layer_norm", eager)
        assert tells(family, kind)


# Gradients that the kernels might compute by mistake: for each the gradients, of input, weight and bias, that differ


def rstd_last(terms, centred, rstd, fma):
    a, b = aten_model.layer_norm_row_sums(terms, centred, torch.ones_like(rstd), fma)
    return a, b * rstd


def column_sums(share=1, run=8, contract=True):
    def sums(dy, centred, rstd, fma, threads):
        fma = fma if contract else _no_fma
        return aten_model.layer_norm_column_sums(dy, centred, rstd, fma, threads // share, run=run)

    return sums


def product_first(dy, centred, rstd, fma, threads):
    """(x - mean) * rstd is rounded before it is multiplied."""
    _, dbias = aten_model.layer_norm_column_sums(dy, centred, rstd, fma, threads)
    return aten_model.layer_norm_column_sums(dy, centred * rstd, torch.ones_like(rstd), fma, threads)[0], dbias


def of_row_sums(**how):
    return {"row_sums": functools.partial(aten_model.layer_norm_row_sums, **how)}


def _no_fma(a, b, c):
    return a * b + c


def in_other_steps(name):
    """dx from the sums in other steps."""

    def backward(dy, x, weight, mean, rstd):
        found = aten_model.layer_norm_backward(dy, x, weight, mean, rstd)
        g, size = dy.float(), torch.tensor(float(x.shape[1]))
        centred = x.float() if mean is None else x.float() - mean
        factor, fma = weight.float(), aten_model.fused_multiply_add
        a, b = aten_model.layer_norm_row_sums(g * factor, centred, rstd, fma)
        a = torch.zeros_like(a) if mean is None else a
        through_variance, scale = (centred * rstd) * b, (size * factor).expand_as(g)
        dx = fma(g, scale, -through_variance) - a
        if name == "no FMA":
            dx = (g * scale - through_variance) - a
        elif name == "another FMA":
            dx = fma(-(centred * rstd), b.expand_as(g), g * scale) - a
        elif name == "the weight first":
            dx = fma(g * factor, size.expand_as(g), -through_variance) - a
        elif name == "the mean first":
            dx = fma(g, scale, -a.expand_as(g)) - through_variance
        dx = dx / size * rstd if name == "divided" else dx * (rstd * (torch.ones(()) / size))
        return found._replace(dx=dx.to(x.dtype))

    return backward


WRONG_SUMS = {
    "256 threads": (of_row_sums(threads=256), "dx"),
    "64 threads": (of_row_sums(threads=64), "dx"),
    "rows without FMA": ({"row_sums": lambda *given: aten_model.layer_norm_row_sums(*given[:3], _no_fma)}, "dx"),
    "rstd last": ({"row_sums": rstd_last}, "dx"),
    "half the threads": ({"column_sums": column_sums(share=2)}, "dweight dbias"),
    "runs of four": ({"column_sums": column_sums(run=4)}, "dweight dbias"),
    "runs of 16": ({"column_sums": column_sums(run=16)}, "dweight dbias"),
    "columns without FMA": ({"column_sums": column_sums(contract=False)}, "dweight"),
    "products first": ({"column_sums": product_first}, "dweight"),
}
STEPS = ("no FMA", "another FMA", "the weight first", "the mean first", "divided")


def in_the_gradients_place(family, patch, backward, rows=None):
    """The proofs compare `backward` instead of the kernels with the transcription instead of eager."""

    def of_input(kind, rows, row_stride, device):
        def run(dy, x, weight, mean, rstd, dx):
            mean = mean if kind.centred else None
            dx.copy_(backward(dy, x, weight if kind.weight else None, mean, rstd).dx)

        return run

    def sum_rows(kind, rows, row_stride, device):
        def run(dy, x, mean, rstd, dweight, dbias):
            found = backward(dy, x, torch.ones(kind.size).to(x.dtype), mean if kind.centred else None, rstd)
            for out, value, need in zip((dweight, dbias), found[1:], (kind.dweight, kind.dbias)):
                if need:
                    out.copy_(value)

        return run

    def eager(dy, x, shape, mean, rstd, weight, bias, needs):
        found = aten_model.layer_norm_backward(dy, x, weight, mean, rstd)
        return family.Gradients(*[each if need else None for each, need in zip(found, needs)])

    patch.setattr(family.OfInput, "launch", of_input)
    patch.setattr(family.OfVectors, "sum_rows", sum_rows)
    patch.setattr(family.OfVectors, "sum_threads", lambda kind, device: None)
    patch.setattr(family, "eager", eager)
    if rows is not None:
        patch.setattr(family, "proof_rows", lambda kind: rows)


def gradients_told(*comparisons) -> set[str]:
    """Which gradients the proofs find to differ."""
    return {what for what, found, expected in itertools.chain(*comparisons) if not bits_equal(found, expected)}


NAMES = {"dx": "the input's gradient", "dweight": "the weight's gradient", "dbias": "the bias's gradient"}


@pytest.mark.parametrize("size", [64, 768])
@pytest.mark.parametrize("name", [None, *WRONG_SUMS])
def test_the_proof_tells_wrong_sums_in_gradients(module, monkeypatch, seed, name, size):
    """In one dtype at random."""
    family, dtype = module("ops.layer_norm_backward"), random.Random(seed).choice(DTYPES)
    # Fewer rows than on a GPU: every row tells.
    monkeypatch.setattr(family, "_PROOF_ELEMENTS", 1)
    how, which = WRONG_SUMS[name] if name else ({}, "")
    if size == 64 and name in ("256 threads", "64 threads"):
        pytest.skip("16 lanes of four elements have the same bits")
    in_the_gradients_place(family, monkeypatch, functools.partial(aten_model.layer_norm_backward, **how), 700)
    of_input = family.OfInput(dtype, size, 16 // dtype.itemsize, True, False)
    of_vectors = family.OfVectors(dtype, size, 16 // dtype.itemsize, False, 32, True, True)
    told = gradients_told(family._comparisons_of_dx(of_input, CPU), family._comparisons_of_vectors(of_vectors, CPU))
    assert told == {NAMES[each] for each in which.split()}


def test_the_proof_tells_wrong_gradients_of_rms_norm(module, monkeypatch, seed):
    """All wrong sums and steps that have no mean in them, each in one dtype at random."""
    family, choose = module("ops.layer_norm_backward"), random.Random(seed)
    monkeypatch.setattr(family, "_PROOF_ELEMENTS", 1)
    sums = {
        name: (functools.partial(aten_model.layer_norm_backward, **how), which)
        for name, (how, which) in WRONG_SUMS.items()
    }
    steps = {name: (in_other_steps(name), "dx") for name in STEPS if name != "the mean first"}
    for name, (backward, which) in {"": (aten_model.layer_norm_backward, ""), **sums, **steps}.items():
        # Products of two bf16 numbers, and of three, are exact.
        dtype = torch.float32 if name in ("no FMA", "the weight first") else choose.choice(DTYPES)
        in_the_gradients_place(family, monkeypatch, backward, 700)
        of_input = family.OfInput(dtype, 772, 4, True, False, centred=False)
        of_vectors = family.OfVectors(dtype, 772, 4, False, 32, True, False, centred=False)
        told = gradients_told(family._comparisons_of_dx(of_input, CPU), family._comparisons_of_vectors(of_vectors, CPU))
        assert told == {NAMES[each] for each in which.split() if each != "dbias"}, (name, dtype)


@pytest.mark.parametrize("threads", [1, 8, 16, 32])
def test_the_proof_tells_wrong_sums_of_few_rows(module, monkeypatch, threads):
    family = module("ops.layer_norm_backward")
    kind = family.OfVectors(torch.bfloat16, 128, 8, True, threads, True, True)
    assert module("core.norms").column_threads(family.proof_rows(kind)) == threads
    assert family.proof_rows(kind) < 512 <= family.proof_rows(dataclasses.replace(kind, threads=32, few=False))
    for name in (None, "half the threads", "runs of four", "runs of 16", "columns without FMA"):
        how, which = WRONG_SUMS[name] if name else ({}, "")
        if threads == 1 and name != "columns without FMA":  # One thread adds all rows in sequence, whatever its runs.
            continue
        in_the_gradients_place(family, monkeypatch, functools.partial(aten_model.layer_norm_backward, **how))
        told = gradients_told(family._comparisons_of_vectors(kind, CPU))
        assert told == {NAMES[each] for each in which.split()}, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STEPS)
def test_the_proof_tells_other_steps_of_a_gradient(module, monkeypatch, name, dtype):
    family = module("ops.layer_norm_backward")
    if (name == "no FMA" and dtype == torch.bfloat16) or (name == "the weight first" and dtype != torch.float32):
        pytest.skip("772 times a weight, or times both of two bf16 numbers, is exact")
    in_the_gradients_place(family, monkeypatch, in_other_steps(name))
    kind = family.OfInput(dtype, 772, 4, True, False)
    assert gradients_told(family._comparisons_of_dx(kind, CPU)) == {NAMES["dx"]}


@interpreted
def test_proofs_pass_where_a_row_is_no_whole_number_of_units(module, monkeypatch):
    """132 elements of 16 bits, in rows that begin at multiples of 16 bytes."""
    family, gradients = module("ops.layer_norm"), module("ops.layer_norm_backward")
    size, unit = 132, 8
    backward = functools.partial(aten_model.layer_norm_backward, fma=multiply_add, cast=cast)

    def eager(dy, x, shape, mean, rstd, weight, bias, needs):
        return [each if need else None for each, need in zip(backward(dy, x, weight, mean, rstd), needs)]

    for each in (family, gradients):
        monkeypatch.setattr(each, "_PROOF_ELEMENTS", 1)
    monkeypatch.setattr(gradients, "_PROOF_ROWS", 16)
    monkeypatch.setattr(gradients, "eager", lambda *given: gradients.Gradients(*eager(*given)))
    monkeypatch.setattr(family.torch, "native_layer_norm", lambda x, shape, *given: transcribed(x, *given[:2]))
    proofs = [(family._comparisons(family.Kind(torch.float16, size, unit, True, True, True), CPU), {"the output"})]
    for centred in (True, False):
        of_input = gradients.OfInput(torch.float16, size, unit, True, True, centred)
        of_vectors = gradients.OfVectors(torch.float16, size, unit, True, 1, True, centred, centred)
        proofs.append((gradients._comparisons_of_dx(of_input, CPU), {NAMES["dx"]}))
        of_both = {NAMES["dweight"], NAMES["dbias"]} if centred else {NAMES["dweight"]}
        proofs.append((gradients._comparisons_of_vectors(of_vectors, CPU), of_both))
    for compared, names in proofs:
        compared = [*compared]
        assert names <= {what for what, _, _ in compared}
        for what, found, expected in compared:
            assert_bits_equal(found, expected, what)


@interpreted
def test_a_proof_is_of_the_kernel_that_will_run(module, monkeypatch):
    """Of its kind, and of what is not a number."""
    family, seen = module("ops.layer_norm"), []
    bind = family.launch.bind

    def spy(kernel, constants, warps, device, dtypes, rows, *scalars):
        seen.append(constants)
        return bind(kernel, constants, warps, device, dtypes, rows, *scalars)

    monkeypatch.setattr(family, "_PROOF_ROWS", 80)
    monkeypatch.setattr(family, "_PROOF_ELEMENTS", 0)
    monkeypatch.setattr(family.launch, "bind", spy)
    kinds = family.Kind(torch.float32, 64, 1, True, False, True), family.Kind(torch.float16, 768, 8, True, True, False)
    for kind in kinds:
        seen.clear()
        for what, found, _ in itertools.islice(family._comparisons(kind, CPU), 3):
            assert found.isnan().any() and found.isfinite().any(), what
        (constants,) = seen
        expected = {"SIZE": kind.size, "STRIDE_UNIT": kind.unit, "WEIGHT": kind.weight, "BIAS": kind.bias}
        expected |= {"FEW": kind.few, "HALVES": kind.by_halves, "ROWS": kind.rows}
        assert constants == expected and kind.by_halves and kind.rows == 2


# What surrounds the kernel


@pytest.fixture(autouse=True)
def no_calls(module):
    module("ops.layer_norm")._calls.clear()


def gradients_of(function, leaves, dy):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dy)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_function_and_layer_are_what_the_kernel_computes(kernel, module, seed, dtype):
    family, generator = module("ops.layer_norm"), torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 3, 5, 64, generator=generator).to(dtype).unbind()
    layer = nn.LayerNorm(64).to(dtype)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    rows, weight = x.view(15, 64), layer.weight.detach()
    expected, mean, rstd = launched(family, rows, weight, layer.bias.detach())
    expected, theirs = expected.view(x.shape), transcribed_gradients(dy.view(15, 64), rows, weight, mean, rstd)
    layer.forward = MethodType(kernel.layers.TorchLayerNorm.forward, layer)
    for _ in range(2):  # The second call is recognised.
        assert_bits_equal(layer(x).detach(), expected)
        assert_bits_equal(kernel.layer_norm(x, 64, layer.weight, layer.bias).detach(), expected)
        with torch.no_grad():
            assert_bits_equal(layer(x), expected)
        leaves = [each.requires_grad_() for each in (x.clone(), layer.weight, layer.bias)]
        out = layer(leaves[0])
        assert_bits_equal(out.detach(), expected)
        for found, wanted in zip(torch.autograd.grad(out, leaves, dy), theirs):
            assert_bits_equal(found.view(wanted.shape), wanted)
    assert layer(x.clone().requires_grad_()).grad_fn.name() == "LayerNormBackward"
    assert len([call for call in family._calls.resolved.values() if call is not None]) >= 2


@interpreted
@pytest.mark.parametrize("create_graph", (False, True))
@pytest.mark.parametrize("bias", (True, False))
def test_a_weight_whose_dtype_changed_between_the_passes_is_refused_as_by_eager(kernel, seed, bias, create_graph):
    for function in (functional.layer_norm, kernel.layer_norm):
        for first, second in itertools.permutations(DTYPES, 2):
            torch.manual_seed(seed)
            layer = nn.LayerNorm(64, bias=bias).to(first)
            x = torch.randn(5, 64, dtype=first, requires_grad=True)
            out = function(x, (64,), layer.weight, layer.bias)
            assert function is functional.layer_norm or out.grad_fn.name() == "LayerNormBackward"
            layer.to(second)
            with pytest.raises(RuntimeError, match="expected scalar type"):
                torch.autograd.grad(out.sum(), [x, layer.weight], create_graph=create_graph)


LAYOUTS = {
    "rows apart": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every other row": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "one row for all": lambda x: x[:1, :1].expand_as(x),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "columns first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}


@interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_contiguous_whatever_the_layout(kernel, module, seed, layout):
    x, dy = torch.randn(2, 4, 6, 64, generator=torch.Generator().manual_seed(seed)).unbind()
    x, weight, bias = LAYOUTS[layout](x), torch.rand(64) + 0.5, torch.rand(64)
    ours = gradients_of(lambda *given: kernel.layer_norm(given[0], 64, *given[1:]), [x, weight, bias], dy)
    theirs = gradients_of(lambda *given: functional.layer_norm(given[0], (64,), *given[1:]), [x, weight, bias], dy)
    for found, expected in zip(ours, theirs):
        assert found.stride() == expected.stride()
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        torch.testing.assert_close(found, expected)
    (call,) = module("ops.layer_norm")._calls.resolved.values()
    assert (call is not None) == (layout not in ("transposed", "columns first"))


@interpreted
def test_several_dimensions_are_one_row(kernel, module, seed):
    x, weight = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(seed)), torch.rand(4, 16)
    found = kernel.layer_norm(x, (4, 16), weight)
    expected, _, _ = launched(module("ops.layer_norm"), x.view(3, 64), weight.view(64), None)
    assert_bits_equal(found, expected.view(x.shape))
    leaves = [each.clone().requires_grad_() for each in (x, weight)]
    gradients = torch.autograd.grad(kernel.layer_norm(leaves[0], (4, 16), leaves[1]), leaves, x)
    _, *statistics = transcribed(x.view(3, 64), None, None)
    for found, expected in zip(
        gradients, transcribed_gradients(x.view(3, 64), x.view(3, 64), weight.view(64), *statistics)
    ):
        assert_bits_equal(found.flatten(), expected.flatten())


@interpreted
def test_which_gradients_are_the_kernels(kernel, module, monkeypatch, seed):
    """Of an expanded dy, but not of an unaligned one, nor of a weight whose data was replaced between the passes."""
    family, calls = module("ops.layer_norm_backward"), []
    eager = family.eager
    monkeypatch.setattr(family, "eager", lambda *arguments: calls.append(arguments) or eager(*arguments))

    def count(dy, change=lambda weight: None):
        x, weight = torch.ones(4, 64).cumsum(1).requires_grad_(), nn.Parameter(torch.rand(64) + 0.5)
        out = kernel.layer_norm(x, 64, weight)
        change(weight)
        calls.clear()
        found = torch.autograd.grad(out, (x, weight), dy)
        assert all(each.isfinite().all() for each in found)
        return len(calls)

    def another_data(weight):
        weight.data = torch.stack([weight.data, weight.data], 1)[:, 0]

    def released(weight):
        weight.data = torch.empty(0)

    assert count(torch.ones(4, 64)) == 0
    assert count(torch.ones(()).expand(4, 64)) == 0
    assert count(torch.ones(257)[1:].view(4, 64)) == 1
    assert count(torch.ones(4, 64), another_data) == 1
    with pytest.raises(RuntimeError):  # As eager does.
        count(torch.ones(4, 64), released)


@interpreted
def test_rows_that_aten_sums_in_blocks(kernel, module, monkeypatch):
    """dx is the kernel's, and dweight and dbias its operator's."""
    family, needs = module("ops.layer_norm_backward"), []
    eager = family.eager
    monkeypatch.setattr(module("core.norms"), "_MOST_ROWS", 3)
    monkeypatch.setattr(family, "eager", lambda *arguments: needs.append(arguments[-1]) or eager(*arguments))
    monkeypatch.setattr(module("launch"), "bind", lambda *_, **__: lambda *tensors: None)
    x, weight = torch.rand(4, 64), torch.rand(64)
    _, mean, rstd = torch.native_layer_norm(x, (64,), weight, weight, EPS)
    call = family.resolve(x, 4, 64, (64,), weight, (True, True, True))
    call.dx = None
    dx, dweight, dbias = call(x, x, mean, rstd, weight, weight)
    assert needs == [(False, True, True)] and dx is None
    for found, expected in zip((dweight, dbias), eager(x, x, (64,), mean, rstd, weight, weight, [True] * 3)[1:]):
        assert_bits_equal(found, expected)


def outside():
    x, weight = torch.randn(3, 4, 64), torch.rand(64)
    return {
        "float64": (x.double(), 64, weight.double()),
        "a weight of another dtype": (x.bfloat16(), 64, weight),
        "short rows": (x[..., :32], 32),
        "long rows": (torch.randn(1, 16388), 16388),
        "no multiple of four": (torch.randn(2, 66), 66),
        "a bias alone": (x, 64, None, weight),
        "no rows": (x[:0], 64, weight),
        "a subclass": (x.as_subclass(type("Other", (torch.Tensor,), {})), 64),
        "an unaligned input": (torch.randn(257)[1:].view(4, 64), 64, weight),
        "an unaligned weight": (x, 64, torch.rand(65)[1:]),
    }


@interpreted
@pytest.mark.parametrize("case", outside())
def test_outside_the_domain_eager_runs(kernel, case):
    x, size, *vectors = outside()[case]
    found, expected = kernel.layer_norm(x, size, *vectors), functional.layer_norm(x, (size,), *vectors)
    assert_bits_equal(found.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))


def test_what_eager_refuses_is_refused(kernel):
    x = torch.ones(2, 64)
    with pytest.raises(TypeError, match=r"input: .* found list"):
        kernel.layer_norm([1.0], 1)
    with pytest.raises(TypeError, match=r"weight: .* found torch.int64"):
        kernel.layer_norm(x, 64, torch.ones(64, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"normalized_shape: expected .*\[2, 64\], found \[32\]"):
        kernel.layer_norm(x, 32)
    with pytest.raises(ValueError, match=r"bias: expected shape \[64\], .* found \[2\]"):
        kernel.layer_norm(x, 64, torch.ones(64), torch.ones(2))
    with pytest.raises(TypeError, match="eps: expected a number, found bool"):
        kernel.layer_norm(x, 64, eps=True)


def layers_of_their_own():
    class Subclass(nn.LayerNorm):
        def forward(self, input):
            return super().forward(input) + 1.0

    class Computed(nn.LayerNorm):
        @property
        def eps(self):
            return 0.5

        @eps.setter
        def eps(self, value):
            pass

    parametrized = nn.LayerNorm(64)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Tanh())
    attribute = nn.LayerNorm(64)
    del attribute.weight
    attribute.weight = torch.full((64,), 3.0)
    list_shape = nn.LayerNorm(64)
    list_shape.normalized_shape = [64]
    return {
        "another forward": Subclass(64),
        "a property": Computed(64),
        "a parametrization": parametrized,
        "an attribute": attribute,
        "a list": list_shape,
        "no weight": nn.LayerNorm(64, elementwise_affine=False),
        "no bias": nn.LayerNorm(64, bias=False),
    }


@interpreted
@pytest.mark.parametrize("name", layers_of_their_own())
def test_layers_of_their_own(kernel, module, seed, name):
    """What the layer returns is what its class does, up to a CPU's other order of additions."""
    layer = layers_of_their_own()[name]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
    expected = layer(x)
    layer.forward = MethodType(kernel.layers.TorchLayerNorm.forward, layer)
    # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
    torch.testing.assert_close(layer(x), expected)
    calls = [call for call in module("ops.layer_norm")._calls.resolved.values() if call is not None]
    assert bool(calls) == (name in ("an attribute", "no weight", "no bias"))


@interpreted
def test_a_replaced_function_runs(kernel, monkeypatch):
    layer, x = nn.LayerNorm(64), torch.ones(2, 64)
    layer.forward = MethodType(kernel.layers.TorchLayerNorm.forward, layer)
    monkeypatch.setattr(functional, "layer_norm", lambda *arguments: torch.full((2, 64), 7.0))
    assert_bits_equal(layer(x), torch.full((2, 64), 7.0))


@interpreted
def test_under_autocast_16_bits_are_eagers(kernel, module):
    """CUDA's computes in fp32. A call without autocast that is recognised must not stand for one with it."""
    family, x, shape = module("ops.layer_norm"), torch.randn(4, 64).half(), (64,)
    for _ in range(2):
        assert family.replacement(x, shape, None, None, EPS) is not None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert family.replacement(x, shape, None, None, EPS) is None
            assert_bits_equal(kernel.layer_norm(x, 64), functional.layer_norm(x, (64,)))
            assert family.replacement(x.float(), shape, None, None, EPS) is not None


@interpreted
def test_gradients_can_be_differentiated(kernel, seed):
    x, dy = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(seed)).unbind()
    penalties = []
    for function in (kernel.layer_norm, functional.layer_norm):
        leaves = [each.clone().requires_grad_() for each in (x, torch.linspace(0.5, 1.5, 64), dy)]
        out = function(leaves[0], (64,), leaves[1])
        first = torch.autograd.grad(out, leaves[:2], leaves[2], create_graph=True)
        penalties.append(torch.autograd.grad(sum(each.square().sum() for each in first), leaves))
    for found, expected in zip(*penalties):
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        torch.testing.assert_close(found, expected)
        assert found.any()


@interpreted
def test_modes_checkpoints_and_transforms_get_eagers_results(kernel, seed):
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            names.append(str(function))
            return function(*arguments, **(named or {}))

    names = []
    x, dy = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(seed)).unbind()
    ours, theirs = (lambda x, f=f: f(x, (64,)) for f in (kernel.layer_norm, functional.layer_norm))
    expected = gradients_of(theirs, [x], dy)
    with Watching():
        for found, wanted in zip(gradients_of(ours, [x], dy), expected):
            assert_bits_equal(found, wanted)
    assert "aten.native_layer_norm.default" in names and "aten.native_layer_norm_backward.default" in names

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(ours, x, use_reentrant=False)

    # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
    torch.testing.assert_close(gradients_of(checkpointed, [x], dy), expected)
    names.clear()
    with Watching():  # Both computations of a checkpoint save the same tensors, whether a mode watches or not.
        assert_bits_equal(gradients_of(checkpointed, [x], dy)[1], expected[1])
    assert names.count("aten.native_layer_norm.default") >= 2
    # Under vmap and jvp other operations of eager's compute the formula, up to a few roundings.
    torch.testing.assert_close(torch.vmap(ours)(x[None])[0], theirs(x))
    tangents = (torch.func.jvp(function, (x,), (dy,))[1] for function in (ours, theirs))
    torch.testing.assert_close(*tangents)


@interpreted
def test_without_proof_eager_runs(kernel, module, nothing_known, monkeypatch):
    """A CPU adds in another order than CUDA."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    monkeypatch.setattr(module("ops.layer_norm"), "_PROOF_ELEMENTS", 1)
    monkeypatch.setattr(module("ops.layer_norm"), "_PROOF_ROWS", 16)
    x = torch.randn(6, 772)
    with pytest.warns(
        RuntimeWarning, match="layer_norm on cpu, torch.float32, up to 2716 rows of 772 elements, keeps .*differ"
    ):
        assert_bits_equal(kernel.layer_norm(x, 772), functional.layer_norm(x, (772,)))


@interpreted
@pytest.mark.parametrize("dtype", BF16_FIRST)
def test_the_operators_for_torch_compile(kernel, module, monkeypatch, seed, dtype):
    family, generator = module("ops.layer_norm"), torch.Generator().manual_seed(seed)
    namespace = getattr(torch.ops, family._layer_norm_op.namespace)
    x, dy = torch.randn(2, 3, 5, 64, generator=generator).to(dtype).unbind()
    weight, bias = torch.randn(2, 64, generator=generator).to(dtype).unbind()
    for vectors in ((weight, bias), (weight, None), (None, None)):
        leaves = [each.clone().requires_grad_() if each is not None else None for each in vectors]
        with monkeypatch.context() as patch:
            # Under the check's modes a CPU's operator computes the gradients, in another order: both times, then.
            patch.setattr(family.layer_norm_backward, "resolve", lambda *arguments: None)
            torch.library.opcheck(namespace.layer_norm.default, (x.clone().requires_grad_(), [64], *leaves, EPS))
        family._calls.clear()
        given = [each for each in (x, *vectors) if each is not None]
        rest = (None,) * (3 - len(given))
        functions = (
            lambda x, *more: namespace.layer_norm(x, [64], *more, *rest, EPS)[0],  # noqa: B023
            lambda x, *more: kernel.layer_norm(x, 64, *more, *rest, EPS),  # noqa: B023
        )
        for found, expected in zip(*(gradients_of(function, given, dy) for function in functions)):
            assert_bits_equal(found, expected)
    _, mean, rstd = namespace.layer_norm(x, [64], weight, bias, EPS)
    for needs in ([True, True, True], [True, False, False]):
        arguments = (dy, x, [64], mean, rstd, weight, bias, EPS, needs)
        torch.library.opcheck(namespace.layer_norm_backward.default, arguments)


# On a GPU: eager itself


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradients_are_those_of_eager(kernel, module, seed, monkeypatch, dtype):
    """Each case compiles a kernel, for seconds if rows are long."""
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator, choose = torch.Generator("cuda").manual_seed(seed), random.Random(seed)
    for case in range(30):
        size = choose.choice((choose.choice(SIZES), 4 * choose.randint(16, choose.choice((128, 512, 4096)))))
        shape = (choose.randint(1, 5), choose.randint(1, max(1, (1 << 20) // size)), size)
        gap = choose.choice((0, 0, 1, 2, 4, 8))
        label = f"case {case}, {shape} {dtype}, gap {gap}"
        x, dy = torch.randn(2, *shape[:-1], size + gap, generator=generator, device="cuda").to(dtype)[..., :size]
        special_rows(x.mul_(choose.choice((0.1, 1.0, 10.0))).flatten(0, 1), choose)
        assert x.stride(-2) == size + gap
        vectors = [*torch.randn(2, size, generator=generator, device="cuda").to(dtype)][: choose.randint(0, 2)]
        assert module("ops.layer_norm").replacement(x, (size,), *(*vectors, None, None)[:2], EPS) is not None, label
        ours = gradients_of(lambda *given: kernel.layer_norm(given[0], size, *given[1:]), [x, *vectors], dy)  # noqa: B023
        theirs = gradients_of(
            lambda *given: functional.layer_norm(given[0], (size,), *given[1:]),  # noqa: B023
            [x, *vectors],
            dy,
        )
        for mine, eagers in zip(ours, theirs):
            assert_bits_equal(mine, eagers, label)
            assert mine.stride() == eagers.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("size", HALVES)
def test_many_rows_are_those_of_eager(kernel, module, seed, monkeypatch, size):
    """As many as have a kernel of their own, in rows with a gap and without, and one more than a program's."""
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator, choose = torch.Generator("cuda").manual_seed(seed), random.Random(seed)
    rows = module("ops.layer_norm")._fewest_rows(size) + choose.choice((0, 1, 5))
    for dtype, gap in itertools.product(DTYPES, (0, choose.choice((4, 8)))):
        x = torch.randn(rows, size + gap, generator=generator, device="cuda")
        x = special_rows(x, choose).to(dtype)[:, :size]
        weight, bias = torch.randn(2, size, generator=generator, device="cuda").to(dtype)
        with torch.no_grad():
            found = module("ops.layer_norm").replacement(x, (size,), weight, bias, EPS)
        assert_bits_equal(found, functional.layer_norm(x, (size,), weight, bias, EPS), f"{x.shape} {dtype}, gap {gap}")


@pytest.mark.gpu
@pytest.mark.parametrize("rows, size", [(4096, 768), (300, 768), (33, 4096), (4096, 4096)])
def test_gradients_in_a_graph_are_complete_before_what_follows(kernel, module, seed, monkeypatch, rows, size):
    """dx and the sums over rows overlap; the next kernel reads all of them at once, in 200 replays with other numbers."""
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator = torch.Generator("cuda").manual_seed(seed)
    x, dy = torch.randn(2, rows, size, generator=generator, device="cuda").bfloat16().unbind()
    weight, bias = torch.randn(2, size, generator=generator, device="cuda").bfloat16().unbind()
    leaves = [each.requires_grad_() for each in (x.clone(), weight, bias)]

    def gradients(function):
        out = function(leaves[0], (size,), *leaves[1:])
        dx, *vectors = torch.autograd.grad(out, leaves, dy)
        return torch.cat([dx.flatten(), *vectors])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients(kernel.layer_norm)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(kernel.layer_norm)
    (call,) = [call for call in module("ops.layer_norm")._calls.resolved.values() if call is not None]
    (backward,) = call.backwards.values()
    is_new = torch.cuda.get_device_capability()[0] >= 9 and module("launch").driver_version() >= 12030
    assert module("launch").driver_version() >= 1000 * int(torch.version.cuda.split(".")[0])
    assert backward.overlaps == (is_new and (rows, size) != (4096, 4096))
    for replay in range(200):
        dy.normal_(generator=generator)
        graph.replay()
        ours = found.clone()
        assert_bits_equal(ours, gradients(functional.layer_norm), f"replay {replay}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_eager(kernel, module, seed, monkeypatch, dtype):
    """Of both sides of each number of rows from which more of ATen's threads share a column, with and without cancelling sums."""
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    family, choose = module("ops.layer_norm_backward"), random.Random(seed)
    counts = (7, 9, 63, 64, 127, 128, 255, 256, 257, 511, 512, 5000, 8191)
    for case in range(24):
        size = choose.choice((choose.choice(SIZES), 4 * choose.randint(16, choose.choice((128, 512, 2048)))))
        rows, weight = choose.choice(counts), choose.random() < 0.8
        if case < 4:  # Read twice, on both sides of ATen's sums of blocks, and wide rows beyond.
            rows, size = ((300, 16384), (65536, 64), (65537, 64), (65537, 2112))[case]
        needs = choose.choice([needs for needs in NEEDS if weight or not (needs[1] or needs[2])])
        kind, device = family.OfInput(dtype, size, 16 // dtype.itemsize, weight, rows < 512), torch.device("cuda")
        for sample in (family._sample, family._cancelling_sample):
            with monkeypatch.context() as patch:
                generator = torch.Generator(device).manual_seed(seed + case)
                patch.setattr(family.proof, "generator", lambda *_, generator=generator: generator)
                numbers = family._in_layout(kind, weight, sample(kind, rows, size, device))
            dy, x, factor, *_ = numbers
            vectors = [] if factor is None else [factor, torch.randn_like(factor)]
            label = f"case {case}, {tuple(x.shape)} {dtype}, {needs}"
            results, errors = [], []
            for function in (functional.layer_norm, kernel.layer_norm):
                leaves = [each.detach().requires_grad_(need) for each, need in zip([x, *vectors], needs)]
                out = function(leaves[0], (size,), *leaves[1:])
                try:
                    results.append(torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], dy))
                except RuntimeError as error:
                    # Where ATen sums blocks of rows, the bias's gradient alone has the wrong length.
                    assert "invalid gradient at index" in str(error) and case == 2 and needs[1:] == (False, True), label
                    errors.append(error)
            assert len(errors) in (0, 2), label
            for eagers, mine in zip(*results or ((), ())):
                assert_bits_equal(mine, eagers, label)
            (call,) = [call for call in module("ops.layer_norm")._calls.resolved.values() if call is not None]
            assert [backward is not None for backward in call.backwards.values()] == [True], label
            module("ops.layer_norm")._calls.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_rms_norm_are_those_of_eager(module, seed, monkeypatch, dtype):
    """The same of `F.rms_norm`."""
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    family, norm, choose = module("ops.layer_norm_backward"), module("rms_norm"), random.Random(seed)
    calls, device = module("rms_norm_call").torch_calls, torch.device("cuda")
    counts = (7, 9, 63, 64, 127, 128, 255, 256, 257, 511, 512, 5000, 8191)
    for case in range(16):
        size = choose.choice((choose.choice(SIZES), 4 * choose.randint(16, choose.choice((128, 512, 2048)))))
        rows, weight = choose.choice(counts), choose.random() < 0.8
        if case < 4:  # Long rows, and both sides of ATen's sums of blocks, and wide rows beyond.
            rows, size = ((300, 8192), (65536, 64), (65537, 64), (65537, 2112))[case]
        needs = choose.choice(((True, True), (True, False), (False, True)) if weight else ((True,),))
        kind = family.OfInput(dtype, size, 16 // dtype.itemsize, weight, rows < 512, centred=False)
        for sample in (family._sample, family._cancelling_sample):
            with monkeypatch.context() as patch:
                generator = torch.Generator(device).manual_seed(seed + case)
                patch.setattr(family.proof, "generator", lambda *_, generator=generator: generator)
                dy, *tensors, _, _ = family._in_layout(kind, weight, sample(kind, rows, size, device))
            results, label = [], f"case {case}, {rows}x{size} {dtype}, {needs}"
            for ours in (True, False):
                leaves = [each.detach().requires_grad_(need) for each, need in zip(tensors, needs)]
                x, factor = *leaves, *[None] * (2 - len(leaves))
                if ours:
                    out = norm.replacement(x, factor, EPS, nn.RMSNorm, "eps", fused=True)
                else:
                    out = functional.rms_norm(x, (size,), factor, EPS)
                with monkeypatch.context() as patch:
                    patch.setattr(module("rms_norm_fused_backward"), "of_aten", None)
                    results.append(torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], dy))
            for mine, eagers in zip(*results):
                assert_bits_equal(mine, eagers, label)
            calls.clear()


@pytest.mark.gpu
def test_no_sum_of_a_row_is_negative_zero(module):
    """An FMA that underflows leaves -0 in a lane; ATen adds zeros for the warps that a block does not have. The interpreter's sums
    are never -0."""
    sum_of_tile = module("kernels_src.summation").sum_of_tile

    @triton.jit
    def total(out_ptr, LANES: tl.constexpr):
        lanes = tl.full([2 * LANES], -0.0, tl.float32)
        tl.store(out_ptr + tl.arange(0, 2), sum_of_tile(lanes, 2, LANES))

    total.fn.__globals__["sum_of_tile"] = sum_of_tile
    for lanes in (32, 128):
        out = torch.full((2,), math.nan, device="cuda")
        total[(1,)](out, LANES=lanes)
        assert_bits_equal(out.cpu(), torch.zeros(2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_transcription_of_gradients_is_what_eager_computes(module, seed, dtype):
    generator = torch.Generator("cuda").manual_seed(seed)
    for rows, size in itertools.product((9, 100, 200, 300), (64, 68, 768, 1280)):
        x, dy = torch.randn(2, rows, size, generator=generator, device="cuda").to(dtype).unbind()
        weight = torch.randn(size, generator=generator, device="cuda").to(dtype)
        _, mean, rstd = torch.native_layer_norm(x, (size,), weight, weight, EPS)
        expected = torch.ops.aten.native_layer_norm_backward(dy, x, (size,), mean, rstd, weight, weight, [True] * 3)
        found = aten_model.layer_norm_backward(*(each.cpu() for each in (dy, x, weight, mean, rstd)))
        for mine, eagers, what in zip(found, expected, ("dx", "dweight", "dbias")):
            assert_bits_equal(mine, eagers.cpu(), f"{what} of {rows}x{size}")
        expected = module("ops.layer_norm_backward").eager(
            dy, x, (size,), None, rstd, weight, None, (True, True, False)
        )
        found = aten_model.layer_norm_backward(*(each.cpu() for each in (dy, x, weight)), None, rstd.cpu())
        for mine, eagers, what in zip(found[:2], expected, ("dx", "dweight")):
            assert_bits_equal(mine, eagers.cpu(), f"F.rms_norm's {what} of {rows}x{size}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_transcription_is_what_eager_computes(seed, dtype):
    """Given the reciprocal square roots of the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for size in SIZES:
        x = torch.randn(64, size, generator=generator, device="cuda").to(dtype) + 1.0
        weight, bias = torch.randn(2, size, generator=generator, device="cuda").to(dtype).unbind()
        expected = torch.native_layer_norm(x, (size,), weight, bias, EPS)
        found = aten_model.layer_norm(
            x.cpu(), weight.cpu(), bias.cpu(), EPS, rsqrt=lambda x: torch.rsqrt(x.cuda()).cpu()
        )
        for mine, eagers, what in zip(found, expected, ("output", "mean", "rstd")):
            assert_bits_equal(mine, eagers.cpu(), f"{what} of {size}")


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_layer_norm_is_the_uncompiled_one(kernel, seed, dynamic):
    generator = torch.Generator("cuda").manual_seed(seed)
    torch._dynamo.reset()

    def ours(x, weight, bias):
        return kernel.layer_norm(x, weight.shape, weight, bias)

    compiled = torch.compile(ours, dynamic=dynamic, fullgraph=True)
    for dtype in DTYPES:
        for size in (64, 1024):
            x, dy = torch.randn(2, 30, size, generator=generator, device="cuda").to(dtype)
            vectors = torch.randn(2, size, generator=generator, device="cuda").to(dtype).unbind()
            for found, expected in zip(*(gradients_of(each, [x, *vectors], dy) for each in (compiled, ours))):
                assert_bits_equal(found, expected, f"{dtype} {size}")
