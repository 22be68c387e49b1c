"""The kernels in Triton's interpreter against the model of CUDA's arithmetic: fp32 and fp16, bit for bit.

The interpreter truncates where a GPU rounds to bf16 and knows no libdevice: bf16 and the last bit of exponentials belong to
the tests on a GPU, and so do FMAs, which interpreters round once or twice. CPU eager sums in another order than CUDA's, so proof
would rightly refuse and is off.
"""

import dataclasses
import functools
import importlib
import itertools
import math
import random
from types import MethodType

import aten_model
import numpy
import pytest
import torch
from bits import assert_bits_equal
from interpreter import cast, multiply_add, the_fma
from places import forget_calls

pytestmark = [
    pytest.mark.usefixtures("proof_off"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"),
]

DTYPES = (torch.float32, torch.float16)
# Every class of row counts; hidden sizes with one lane group, several steps, remainders and shared rows.
ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 40)
HIDDEN_SIZES = (64, 100, 128, 132, 260, 1000, 1024, 2048, 4100, 8192, 12288)


def numpy_rsqrt(x):
    """The interpreter's: numpy's square root and division, each rounded on its own."""
    return torch.from_numpy(1.0 / numpy.sqrt(x.numpy()))


def numpy_exp(x):
    return torch.from_numpy(numpy.asarray(numpy.exp(x.numpy())))


def random_cases(seed, count, most_elements=1 << 20):
    choose = random.Random(seed)
    sizes = [(rows, size) for rows, size in itertools.product(ROWS, HIDDEN_SIZES) if rows * size <= most_elements]
    for _ in range(count):
        yield *choose.choice(sizes), choose.choice(DTYPES), choose.choice(DTYPES)


def test_rms_norm_equals_the_model(kernel, seed):
    generator = torch.Generator().manual_seed(seed)
    for rows, hidden_size, dtype, weight_dtype in [*random_cases(seed, 16), (3, 32768, torch.float16, torch.float16)]:
        x = torch.randn(rows, hidden_size, generator=generator).to(dtype)
        weight = torch.randn(hidden_size, generator=generator).to(weight_dtype)
        expected = aten_model.rms_norm(x, weight, 1e-5, rsqrt=numpy_rsqrt)
        label = f"{rows}x{hidden_size} {dtype} {weight_dtype}"
        assert_bits_equal(kernel.rms_norm(x, weight, 1e-5), expected, label)


def ascending_sum(squares, tree):
    """ATen's sum of each row but for the lanes, neighbours of which are added first."""
    lanes = tree.width * tree.warps
    steps = torch.nn.functional.pad(squares, (0, -squares.shape[1] % (4 * lanes))).view(len(squares), -1, 4 * lanes)
    chains = functools.reduce(torch.add, steps.unbind(1))
    chains = chains.view(-1, lanes, 4) if squares.shape[1] >= 128 else chains.view(-1, 4, lanes).transpose(1, 2)
    sums = functools.reduce(torch.add, chains.unbind(2))
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums[:, 0]


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("hidden_size", [64, 128, 1024, 4096, 5120, 32768])
def test_a_row_of_a_proof_shows_a_wrong_order_in_two_cases_of_five(module, seed, rows, hidden_size):
    """By the model of ATen's sums; of numbers of one size it would be one case of eight."""
    spike, generator = module("rms_norm_proof").spike, torch.Generator().manual_seed(seed)
    x = [spike(torch.randn(rows, hidden_size, generator=generator), call) for call in range(1024 // rows)]
    squares, tree = torch.cat(x).square(), aten_model.row_tree(rows, hidden_size)

    def rstd(sums):
        return (sums / hidden_size + 0.0123).double().rsqrt().float()

    right = rstd(aten_model.row_sum(squares, total_rows=rows))
    wrong = {"plain": squares.cumsum(-1)[:, -1], "ascending": ascending_sum(squares, tree)}
    other = 1 if rows == 16 else 16
    if aten_model.row_tree(other, hidden_size) != tree and hidden_size > 128:
        wrong[f"of {other} rows"] = aten_model.row_sum(squares, total_rows=other)
    shares = {name: (rstd(sums) != right).float().mean().item() for name, sums in wrong.items()}
    print(shares)
    # 0.4 within five standard deviations of 1,024 rows.
    assert min(shares.values()) > 0.4 - 5 * 0.0155, shares


@pytest.mark.parametrize("hidden_size", [64, 68, 132])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_proof_runs_the_kernel_for_aligned_tensors(module, monkeypatch, hidden_size, rows):
    """As calls with tensors of their own do: Triton compiles another for pointers that are no multiples of 16."""
    family, launcher = module("rms_norm_proof"), module("launch").Launcher
    llama, through_triton, pointers = module("variants").LLAMA, launcher.through_triton, []

    def recorded(self, blocks, tensors, scalars):
        pointers.extend(tensor.data_ptr() for tensor in tensors)
        return through_triton(self, blocks, tensors, scalars)

    monkeypatch.setattr(launcher, "through_triton", recorded)
    monkeypatch.setattr(family, "_PROOF_CALLS", 2)
    monkeypatch.setattr(family, "_GRADIENT_CALLS", 2)
    cpu, subject = torch.device("cpu"), (llama, family.EAGER[llama], torch.float16, torch.float16, hidden_size)
    list(family._comparisons(*subject, rows, hidden_size, cpu))
    list(family._comparisons(*subject, rows, hidden_size, cpu, added=True))
    list(family._gradient_comparisons(*subject, rows, rows, cpu, (True, True), "added"))
    assert pointers and not any(pointer % 16 for pointer in pointers)


def test_a_proof_has_the_access_unit_of_the_call(module, monkeypatch):
    family, unit, strides = module("rms_norm_proof"), module("layout").stride_unit, []
    llama, dtype = module("variants").LLAMA, torch.float16

    def recorded(case, rows, device, kind, what, comparisons, of_sample, row_stride, *rest):
        strides.append(row_stride)

    monkeypatch.setattr(family, "_kernel_is_proved", recorded)
    for hidden_size, row_stride in itertools.product((64, 68, 100, 132, 136), (201, 202, 204, 208)):
        family.proved(llama, family.EAGER[llama], dtype, dtype, hidden_size, 4, row_stride, torch.device("cpu"))
        assert unit(strides.pop(), dtype) == unit(row_stride, dtype), (hidden_size, row_stride)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_proof_shows_a_kernel_that_flushes_subnormals(module, dtype, rows):
    """Its comparisons have subnormal results: of the norm and of the sum with a residual."""
    family, llama = module("rms_norm_proof"), module("variants").LLAMA
    cpu, subject = torch.device("cpu"), (llama, family.EAGER[llama], dtype, dtype, 128)
    found = [*family._comparisons(*subject, rows, 128, cpu), *family._comparisons(*subject, rows, 128, cpu, added=True)]
    flushed = set()
    for what, _, expected in found:
        if ((expected != 0) & (expected.abs() < torch.finfo(expected.dtype).tiny)).any():
            flushed.add(what)
    assert flushed == {"the output", "the sum"}


@pytest.mark.parametrize("dx_mode", ["single", "accumulate"])
def test_a_proof_of_gradients_runs_no_forward_kernel(module, monkeypatch, dx_mode):
    """Which it would have to compile, and which one depends on the call's rows: verdicts are kept for more than those."""
    family, launcher = module("rms_norm_proof"), module("launch").Launcher
    llama, through_triton, launched = module("variants").LLAMA, launcher.through_triton, set()

    def recorded(self, *arguments):
        launched.add(self.kernel.__name__)
        return through_triton(self, *arguments)

    monkeypatch.setattr(launcher, "through_triton", recorded)
    subject = llama, family.EAGER[llama], torch.float16, torch.float16, 64
    list(family._gradient_comparisons(*subject, 16, 40, torch.device("cpu"), (True, True), dx_mode))
    assert launched == {"rms_norm_backward", "rms_norm_sum_chains", "column_sum_blocks"}


@pytest.mark.parametrize(
    "way", ["streamed", pytest.param("by_lane", marks=pytest.mark.long), pytest.param("shared", marks=pytest.mark.long)]
)
def test_rows_that_are_read_twice_have_the_same_output(module, seed, way):
    """Of every length of a step and number of steps, alone and as a sum with a residual; by lane of few rows, too."""
    family, generator = module("rms_norm_plan"), torch.Generator().manual_seed(seed)
    variants = module("variants")
    # The interpreter takes as long for each program that shares a row as for a row.
    cases = [(18 if way != "shared" or size < 1024 else 2, size) for size in (64, 100, 260, 8192, 20_000, 32_768)]
    if way != "streamed":
        # So often that another order shows, of which a single row has one chance in two.
        cases += (2 if way == "shared" else 4) * list(itertools.product((1, 3, 5, 9), (100, 1028, 5120)))
    for call, ((rows, hidden_size), dtype) in enumerate(itertools.product(cases, DTYPES)):
        plan = family.Plan(4 if rows > 4 else 1, 4, **{"by_lane" if way != "streamed" else way: True})
        if way == "shared":
            plan = dataclasses.replace(
                plan, rows_per_program=1, programs_per_row=(2, 4)[call % 2] if rows > 2 else (8, 16)[call % 2]
            )
        row_stride = hidden_size + 4
        x = module("rms_norm_proof").spike(
            torch.randn(rows, row_stride, generator=generator).to(dtype)[:, :hidden_size], call
        )
        residual = torch.randn(rows, hidden_size, generator=generator).to(dtype)
        weight, total = torch.randn(hidden_size, generator=generator).to(dtype), residual + x
        for variant in (variants.LLAMA, variants.BY_NAME["one_plus_weight"]):
            shape = (dtype, dtype, hidden_size, rows)
            alone = family.forward(variant, *shape, row_stride, x.device, 1e-5, store_rstd=True, plan=plan)
            of_sum = family.forward(variant, *shape, hidden_size, x.device, 1e-5, True, plan, added=True)
            for launch, given_x, inputs in ((alone, x, [x]), (of_sum, total, [x.contiguous(), residual])):
                outs = [torch.full_like(total, math.nan) for _ in inputs]
                rstd = torch.full((rows, 1), math.nan)
                launch(*inputs, weight, *outs, rstd)
                label = f"{len(inputs)} of {rows}x{hidden_size} {dtype} {variant.scale}"
                statistics = aten_model.rms_norm_statistics(given_x, 1e-5, rsqrt=numpy_rsqrt)
                assert_bits_equal(rstd[:, 0], statistics.rstd, f"rstd of {label}")
                factor = weight if variant is variants.LLAMA else 1.0 + weight.float()
                of_model = given_x if variant is variants.LLAMA else given_x.float()
                expected = aten_model.rms_norm_given_rstd(of_model, factor, statistics.rstd).to(dtype)
                assert_bits_equal(outs[0], expected, f"output of {label}")
                for found in outs[1:]:
                    assert_bits_equal(found, total, f"sum of {label}")


def test_every_later_row_is_requested_once(module, monkeypatch, seed):
    """A program asks for all rows of the one that comes so many programs later, and for nothing beyond the last row."""
    family = module("rms_norm_plan")
    requests = []

    def record(pointer, wanted, BYTES):
        (address,), (is_wanted,) = pointer.handle.data, wanted.handle.data
        if is_wanted:
            requests.append((int(address), getattr(BYTES, "value", BYTES)))

    monkeypatch.setattr(module("kernels_src.rms_norm"), "prefetch_bulk", record)
    generator, llama = torch.Generator().manual_seed(seed), module("variants").LLAMA
    rows, hidden_size = 23, 100
    for dtype, rows_per_program, (ahead, padding) in itertools.product(DTYPES, (1, 2, 4), ((1, 4), (3, 0), (30, 4))):
        bytes_per_row = hidden_size * dtype.itemsize
        plan = family.Plan(rows_per_program, 4, prefetch=True)
        shape, row_stride = (dtype, dtype, hidden_size, rows), hidden_size + padding
        x = torch.randn(rows, row_stride, generator=generator).to(dtype)[:, :hidden_size]
        residual, weight = x.clone(), x[0].clone()
        # Twice as many bytes are read of a sum, and so half as many programs are ahead.
        monkeypatch.setattr(family, "_BYTES_AHEAD", ahead * rows_per_program * bytes_per_row)
        alone = family.forward(llama, *shape, row_stride, x.device, 1e-5, plan=plan)
        monkeypatch.setattr(family, "_BYTES_AHEAD", 2 * ahead * rows_per_program * bytes_per_row)
        of_sum = family.forward(llama, *shape, hidden_size, x.device, 1e-5, plan=plan, added=True)
        for launch, inputs in ((alone, [x]), (of_sum, [x.contiguous(), residual])):
            outs = [torch.empty_like(residual) for _ in inputs]
            requests.clear()
            launch(*inputs, weight, *outs)
            later = range(ahead * rows_per_program, rows)
            expected = [(tensor[row].data_ptr(), bytes_per_row) for tensor in inputs for row in later]
            assert sorted(requests) == sorted(expected), (dtype, rows_per_program, ahead, len(inputs))


def given(generator, shape, dtype, weight_dtype):
    """x, weight, dy and rstd [...] of a call; contiguous."""
    x = torch.randn(shape, generator=generator).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(weight_dtype)
    dy = torch.randn(shape, generator=generator).to(torch.promote_types(dtype, weight_dtype))
    return x, weight, dy, aten_model.rms_norm_statistics(x, 1e-5).rstd


def llama(rms_norm):
    return importlib.import_module(f"{rms_norm.__package__}.formulas").LLAMA


def assert_gradients(found, expected, label):
    assert_bits_equal(found.dx, expected.dx[0], f"dx of {label}")
    if len(expected.dx) == 2:
        assert_bits_equal(found.dx_mean, expected.dx[1], f"dx through the mean of {label}")
    else:
        assert found.dx_mean is None
    assert_bits_equal(found.dweight, expected.dweight, f"dweight of {label}")


def assert_gradients_equal_the_model(rms_norm, x, weight, dy, rstd, device=aten_model.H200, label=""):
    backward = rms_norm.resolve(llama(rms_norm), dy, x, weight, rstd[..., None], True, True)
    expected = aten_model.rms_norm_backward(dy, x, weight, rstd, device)
    found = backward(dy, x, weight, rstd[..., None])
    assert_gradients(found, expected, f"{list(x.shape)} {x.dtype} {weight.dtype} {label}")
    return found


def test_rms_norm_gradients_equal_the_model(module, seed):
    generator = torch.Generator().manual_seed(seed)
    cases = [*random_cases(seed, 8, most_elements=40_000), (300, 128, *DTYPES), (2100, 64, *DTYPES)]
    for rows, hidden_size, dtype, weight_dtype in cases:
        inputs = given(generator, (rows, hidden_size), dtype, weight_dtype)
        assert_gradients_equal_the_model(module("rms_norm_backward"), *inputs)


def test_t5s_gradients_equal_the_model(module, seed):
    """T5LayerNorm multiplies x itself by rstd: 16-bit activations get two gradients, each rounded."""
    backward, generator, in_one_edge = module("rms_norm_backward"), torch.Generator().manual_seed(seed), []
    cases = [*random_cases(seed, 7, most_elements=40_000), (300, 128, *DTYPES), (2100, 64, *DTYPES)]
    for rows, hidden_size, dtype, _ in cases:
        x, weight, dy, rstd = given(generator, (rows, hidden_size), dtype, dtype)
        call = backward.resolve(module("variants").T5, dy, x, weight, rstd[:, None], True, True)
        expected = aten_model.rms_norm_backward(dy, x, weight, rstd, two_edges=True)
        assert len(expected.dx) == 2
        assert_gradients(call(dy, x, weight, rstd[:, None]), expected, f"{rows}x{hidden_size} {dtype}")
        if dtype != torch.float32:
            in_one_edge.append(torch.equal(sum(expected.dx), *aten_model.rms_norm_backward(dy, x, weight, rstd).dx))
    assert in_one_edge and not all(in_one_edge)


@pytest.mark.parametrize("name", ["fp32_product", "one_plus_weight", "fp32_output", "unweighted"])
def test_other_variants_equal_the_model(module, seed, name):
    """They round nothing between the fp32 norm and the product, so the model's arithmetic of fp32 tensors is theirs."""
    variant, family = module("variants").BY_NAME[name], module("rms_norm")
    generator = torch.Generator().manual_seed(seed)
    for rows, hidden_size, dtype, weight_dtype in [*random_cases(seed, 4, most_elements=20_000), (300, 128, *DTYPES)]:
        x, weight, dy, _ = given(generator, (rows, hidden_size), dtype, weight_dtype)
        dy = dy.to(variant.output_dtype(dtype, weight_dtype))
        factor = {"one_plus_weight": 1.0 + weight.float(), "unweighted": torch.ones(hidden_size)}.get(
            name, weight.float()
        )
        rstd = aten_model.rms_norm_statistics(x, 1e-5, rsqrt=numpy_rsqrt).rstd
        label = f"{rows}x{hidden_size} {dtype} {weight_dtype}"
        weights = () if name == "unweighted" else (weight.requires_grad_(),)
        x.requires_grad_()
        out = family.replacement(x, weights[0] if weights else None, 1e-5, family.EAGER[variant])
        found = torch.autograd.grad(out, (x, *weights), dy)
        x.requires_grad_(False)
        expected = aten_model.rms_norm_given_rstd(x.float(), factor, rstd).to(dy.dtype)
        assert_bits_equal(out.detach(), expected, f"output of {label}")
        with torch.no_grad():
            again = family.replacement(x, weights[0] if weights else None, 1e-5, family.EAGER[variant])
        assert_bits_equal(again, expected, f"output without gradients of {label}")
        gradients = aten_model.rms_norm_backward(dy.float(), x.float(), factor, rstd)
        assert_bits_equal(found[0], sum(gradients.dx[1:], gradients.dx[0]).to(dtype), f"dx of {label}")
        for dweight in found[1:]:
            assert_bits_equal(dweight, gradients.dweight.to(weight_dtype), f"dweight of {label}")


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unweighted"])
def test_torch_rms_norm_equals_the_model(module, seed, weighted):
    family, generator = module("rms_norm"), torch.Generator().manual_seed(seed)
    for rows, hidden_size, dtype, _ in [*random_cases(seed, 6, most_elements=1 << 16), (40, 64, *DTYPES)]:
        hidden_size = min(hidden_size, module("variants").MAX_FUSED_HIDDEN_SIZE)
        x, weight, dy, _ = given(generator, (rows, hidden_size), dtype, dtype)
        parameter = weight.clone().requires_grad_() if weighted else None
        # The rows of the last are further apart, and so copied by ATen.
        spaced = torch.cat([x, torch.full((rows, 4), float("nan"), dtype=dtype)], -1)[:, :hidden_size]
        statistics = aten_model.fused_rms_norm_statistics(x, 1e-5, numpy_rsqrt, multiply_add)
        expected = aten_model.fused_rms_norm_given_rstd(x, weight if weighted else None, statistics.rstd)
        given_weight = weight if weighted else None
        dx, dweight, _ = aten_model.layer_norm_backward(
            dy, x, given_weight, None, statistics.rstd[:, None], multiply_add, cast
        )
        for given_x in (x, spaced):
            label = f"{rows}x{hidden_size} {dtype} {given_x.stride()}"
            with torch.no_grad():
                found = family.replacement(given_x, parameter, 1e-5, torch.nn.RMSNorm, "eps", fused=True)
            assert_bits_equal(found, expected, label)
            assert found.is_contiguous()
            leaves = (given_x.detach().requires_grad_(), *([parameter] if weighted else []))
            out = family.replacement(leaves[0], parameter, 1e-5, torch.nn.RMSNorm, "eps", fused=True)
            assert_bits_equal(out.detach(), expected, f"{label}, with gradients")
            for ours, transcribed in zip(torch.autograd.grad(out, leaves, dy), (dx, dweight)):
                assert_bits_equal(ours, transcribed, f"gradient of {label}")


def test_the_operator_for_gradients_of_torch_rms_norm(module, seed):
    """Those of the kernels, wherever the forward kernel takes such tensors."""
    family, generator = module("rms_norm_compiled"), torch.Generator().manual_seed(seed)
    (dy, x), weight = torch.randn(2, 70, 64, generator=generator), torch.randn(64, generator=generator)
    rstd = aten_model.fused_rms_norm_statistics(x, 1e-5).rstd[:, None]
    for needs in ((True, True), (True, False), (False, True)):
        dx, _, dweight = family._rms_norm_backward_op(dy, x, weight, rstd, *needs, "fused")
        expected = aten_model.layer_norm_backward(dy, x, weight, None, rstd, multiply_add)
        for ours, transcribed, need in zip((dx, dweight), expected, needs):
            assert_bits_equal(ours, transcribed if need else ours.new_empty(0), f"{needs}")
    variants = module("variants")
    for outside in (x.half(), x.transpose(0, 1), torch.randn(2, 8196), torch.randn(64)):
        other = torch.randn(outside.shape[-1])
        assert family._kernels_of(outside, other, variants.FUSED, (True, True)) is None
    assert family._kernels_of(x, x.new_empty(0), variants.FUSED_UNWEIGHTED, (True, False)).known[True, False]


def test_a_proof_that_a_capture_forbids_is_made_later(module, monkeypatch):
    """But not with a weight that was changed by then."""
    x, weight = torch.randn(3, 64), torch.randn(64)
    kernels = module("rms_norm_fused_backward").Kernels(module("variants").FUSED, x, weight, 3, 64)
    with monkeypatch.context() as patch:
        patch.setattr(module("proof"), "is_capturing", lambda: True)
        patch.setattr(module("ops.layer_norm_backward"), "_proved", lambda *_: False)
        assert kernels.find(x, weight, True, True) is None
    for changed in (weight.half(), torch.randn(1), torch.randn(128)[::2]):
        assert kernels.find(x, changed, True, True) is None and not kernels.known
    assert kernels.find(x, weight, True, True) is not None


def test_a_capture_before_gradients_of_another_order_were_compared_has_a_reason(module, monkeypatch, seed):
    """Rows lie in another order than the activations': the formula runs in the capture, and the kernel after it."""
    family, proof = module("rms_norm_backward"), module("proof")
    variants, generator = module("variants"), torch.Generator().manual_seed(seed)
    dy = torch.randn(3, 2, 64, generator=generator).transpose(0, 1)
    x, weight = torch.randn(2, 3, 64, generator=generator), torch.randn(64, generator=generator)
    rstd = torch.rand(2, 3, 1, generator=generator)
    tensors = variants.LLAMA, dy, x, weight, rstd, True, True
    monkeypatch.setattr(proof, "_refusals", {})
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    # On a CPU the formula's sums have another order.
    monkeypatch.setattr(family, "_compare", lambda *_: None)
    family._calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(proof, "is_capturing", lambda: True)
        found = family.gradients(*tensors)
    for ours, formulas in zip(found, family.formula(*tensors)):
        assert_bits_equal(ours, formulas)
    assert list(proof._refusals.values()) == [{proof.IN_CAPTURE}] and not family._calls.resolved
    family.gradients(*tensors)
    assert None not in family._calls.resolved.values() and family._calls.resolved
    assert list(proof._refusals.values()) == [set()]


def test_torch_rms_norm_of_other_tensors_is_left_to_torch(module, monkeypatch):
    family, launches = module("rms_norm"), []
    monkeypatch.setattr(module("launch").Launch, "__call__", lambda *arguments: launches.append(arguments))

    def replaced(x, weight):
        with torch.no_grad():
            return family.replacement(x, weight, 1e-5, torch.nn.RMSNorm, "eps", fused=True)

    x, weight = torch.randn(4, 2, 64), torch.randn(64)
    assert replaced(x.transpose(0, 1), weight) is None, "eager returns rows in another order than they come"
    channels_last = torch.randn(4, 1, 6, 64).as_strided((4, 1, 6, 64), (384, 1, 64, 1))
    assert replaced(channels_last, weight) is None
    assert replaced(x.transpose(0, 1), weight.half()) is None
    assert family.replacement(x, weight, 1e-5, torch.nn.RMSNorm, "eps") is None, "nobody looked at autocast"
    assert not launches
    # ATen reads these one by one and computes the statistics by Welford's recurrence.
    for unaligned in ((torch.randn(513)[1:].view(2, 4, 64), weight), (x, torch.randn(65)[1:])):
        expected = torch.nn.functional.rms_norm(unaligned[0], (64,), unaligned[1], 1e-5)
        assert_bits_equal(replaced(*unaligned), expected)
    assert not launches


def test_torch_rms_norm_of_two_dtypes_is_the_composition(module):
    family, variants = module("rms_norm_proof"), module("variants")
    device = torch.device("cpu")
    for dtype, weight_dtype in itertools.permutations((torch.float32, torch.float16, torch.bfloat16), 2):
        # Of fp32 activations both have the same bits.
        same = (variants.FP32_PRODUCT, *[variants.LLAMA] * (dtype == torch.float32))
        assert family.variant_of(torch.nn.RMSNorm, "eps", dtype, weight_dtype, device) in same
        assert family.variant_of(torch.nn.RMSNorm, "eps", dtype, dtype, device) is variants.FUSED
        assert family.variant_of(torch.nn.RMSNorm, "eps", dtype, None, device) is variants.FUSED_UNWEIGHTED


# Layouts


def permuted(tensor, order):
    """The same values, with the leading dimensions in this order in memory."""
    *leading, last = range(tensor.dim())
    back = [order.index(dim) for dim in leading]
    return tensor.permute(*order, last).contiguous().permute(*back, last)


def assert_strides(found, expected, shape):
    """Those of dimensions of size 1 lead nowhere."""
    for size, ours, eagers in zip(shape, found.stride(), expected.stride()):
        assert size == 1 or ours == eagers, f"strides {found.stride()} instead of {expected.stride()}"


def test_rms_norm_of_permuted_and_spaced_rows(kernel, module, seed):
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for order in itertools.permutations(range(3)):
        hidden_size, dtype = choose.choice((64, 100, 132)), choose.choice(DTYPES)
        x, weight, _, _ = given(generator, (2, 3, 4, hidden_size), dtype, choose.choice(DTYPES))
        weight = torch.cat([weight[:1], weight])[1:]
        # NaN in between, where a kernel must not look.
        spaced = torch.cat([x, torch.full((2, 3, 4, choose.choice((1, 2, 4, 8))), float("nan"), dtype=dtype)], -1)
        expected = aten_model.rms_norm(x, weight, 1e-5, rsqrt=numpy_rsqrt)
        for layout in (permuted(x, order), permuted(spaced, order)[..., :hidden_size]):
            found = kernel.rms_norm(layout, weight, 1e-5)
            assert_bits_equal(found.contiguous(), expected, f"{order} {list(x.shape)} {dtype}")
            assert_strides(found, module("variants").LLAMA.eager(layout, weight, 1e-5), x.shape)


def test_gradients_of_other_layouts(module, seed):
    """The sum over rows runs through memory as eager's product lies there, which dy and x decide together."""
    rms_norm, eager = module("rms_norm_backward"), module("variants").LLAMA.eager
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    orders = list(itertools.permutations(range(3)))
    transposed = (0, 2, 1)
    cases = [((0, 1, 2), transposed), *((choose.choice(orders), choose.choice(orders)) for _ in range(6))]
    for x_order, dy_order in cases:
        shape = (2, choose.choice((3, 5)), choose.choice((2, 4)), choose.choice((64, 100)))
        x, weight, dy, rstd = given(generator, shape, choose.choice(DTYPES), choose.choice(DTYPES))
        x, dy = permuted(x, x_order), permuted(dy, dy_order)
        found = assert_gradients_equal_the_model(rms_norm, x, weight, dy, rstd, label=f"{x_order} {dy_order}")
        x.requires_grad_()
        (expected,) = torch.autograd.grad(eager(x, weight, 1e-5), x, dy)
        assert_strides(found.dx, expected, shape)


def test_transposed_gradient_is_walked_in_three_levels(module):
    rms_norm, levels = module("rms_norm_backward"), []
    x, weight, dy, rstd = given(torch.Generator(), (2, 5, 4, 64), *DTYPES)
    backward = rms_norm.resolve(llama(rms_norm), permuted(dy, (0, 2, 1)), x, weight, rstd[..., None], True, True)
    for part in backward.parts:
        levels += [launch._launcher.constants["LEVELS"] for launch in (part.dx, part.sum_chains) if launch is not None]
    assert set(levels) == {3} and backward.empty_dy is None


def test_expanded_gradients(module, seed):
    """As a sum leaves them, over everything or over the rows."""
    x, weight, dy, rstd = given(torch.Generator().manual_seed(seed), (3, 5, 100), torch.float32, torch.float16)
    for expanded in (dy[0, 0, 0].expand(3, 5, 100), dy[0, 0].expand(3, 5, 100), dy[:, :1].expand(3, 5, 100)):
        assert_gradients_equal_the_model(module("rms_norm_backward"), x, weight, expanded, rstd)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [4, 300])
def test_random_numbers_show_the_order_of_the_rows(module, seed, rows, dtype):
    """A caller's may not: sums of small fp16 products are exact in every order. The first call of a layout compares others."""
    backward, proof, llama = module("rms_norm_backward"), module("proof"), module("variants").LLAMA
    x, dy = torch.randn(rows, 2, 64).to(dtype).transpose(0, 1), torch.tensor(2e-3).to(dtype).expand(2, rows, 64)
    rstd = aten_model.rms_norm_statistics(x, 1e-5).rstd[..., None]

    def hidden(dy, x, rstd):
        products = backward.weight_products(llama, dy, x.to(torch.float32), rstd, dtype)
        as_numbered, as_in_memory = products.reshape(-1, 64), products.transpose(0, 1).reshape(-1, 64)
        return torch.equal(aten_model.column_sum(as_numbered), aten_model.column_sum(as_in_memory))

    if dtype is torch.float16:
        assert hidden(dy, x, rstd)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(100):
        random = functools.partial(proof.random_like, generator=generator)
        assert not hidden(random(dy), random(x, exponents=proof.WIDE), random(rstd))


def test_random_numbers_lie_as_the_tensor_does(module):
    random_like, generator = module("proof").random_like, torch.Generator().manual_seed(0)
    whole = torch.zeros(4, 3, 65, dtype=torch.float16)
    for view in (
        whole,
        whole[..., 1:],
        whole.transpose(0, 1)[1:, ::2, 3:],
        whole[0, 0, 5].expand(7, 64),
        whole[:0],
        whole[0, 0, 0],
    ):
        made = random_like(view, generator)
        assert (made.shape, made.stride(), made.dtype) == (view.shape, view.stride(), view.dtype)
        assert made.data_ptr() % 16 == view.data_ptr() % 16
        assert bool(((made.abs() >= 1) & (made.abs() <= 2)).all())


# Plans


@pytest.mark.parametrize(
    "rows, hidden_size, rows_per_program", [(5, 128, 1), (70, 128, 2), (300, 64, 8), (130, 260, 4)]
)
def test_every_fused_plan_has_the_same_bits(module, monkeypatch, seed, rows, hidden_size, rows_per_program):
    rms_norm = module("rms_norm_backward")
    inputs = given(torch.Generator().manual_seed(seed), (rows, hidden_size), *DTYPES)
    for fused in (True, False):
        monkeypatch.setattr(
            rms_norm, "launch_plan", lambda *_, fused=fused: rms_norm.BackwardPlan(fused, rows_per_program, 4)
        )
        assert_gradients_equal_the_model(rms_norm, *inputs, label=f"fused {fused}")


@pytest.mark.parametrize(
    "rows, hidden_size",
    [
        (5, 128),
        pytest.param(140, 128, marks=pytest.mark.long),
        pytest.param(40, 640, marks=pytest.mark.long),
        (12, 2052),
    ],
)
def test_streamed_rows_have_the_same_gradients(module, monkeypatch, seed, rows, hidden_size):
    rms_norm, choose = module("rms_norm_backward"), random.Random(seed)
    inputs = given(
        torch.Generator().manual_seed(seed), (rows, hidden_size), choose.choice(DTYPES), choose.choice(DTYPES)
    )
    for streamed in (False, True):
        monkeypatch.setattr(rms_norm, "launch_plan", lambda *_, each=streamed: rms_norm.BackwardPlan(True, 1, 4, each))
        assert_gradients_equal_the_model(rms_norm, *inputs, label=f"streamed {streamed}")
        # With a gradient that came before, a residual's.
        d_sum = torch.randn(rows, hidden_size).to(inputs[0].dtype)
        x, weight, dy, rstd = inputs
        found = rms_norm.gradients(llama(rms_norm), dy, x, weight, rstd[:, None], True, True, True, d_sum)
        expected = rms_norm.joined_formula(llama(rms_norm), dy, x, weight, rstd[:, None], True, False, True, d_sum)
        model = aten_model.rms_norm_backward(dy, x, weight, rstd)
        assert_bits_equal(found.dx, functools.reduce(torch.add, model.dx, d_sum), f"streamed {streamed}")
        assert expected.dx.stride() == found.dx.stride()
        forget_calls(module)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weights_gradient_alone_has_the_plan_it_is_proved_with(module, monkeypatch, seed, dtype):
    """Whatever gradient a residual has: with it only what x needs too is proved."""
    rms_norm, asked = module("rms_norm_backward"), []
    launch_plan = rms_norm.launch_plan
    monkeypatch.setattr(rms_norm, "launch_plan", lambda *given: (asked.append(given[-1]), launch_plan(*given))[1])
    x, weight, dy, rstd = given(torch.Generator().manual_seed(seed), (70, 128), dtype, dtype)
    d_sum = torch.randn(70, 128).to(dtype)
    for needs_dx in (False, True):
        forget_calls(module)
        asked.clear()
        found = rms_norm.gradients(llama(rms_norm), dy, x, weight, rstd[:, None], needs_dx, True, True, d_sum)
        assert set(asked) == {"accumulate" if needs_dx else rms_norm.dx_mode_of(llama(rms_norm), dtype)}
        assert (found.dx is not None) is needs_dx
        assert_bits_equal(found.dweight, aten_model.rms_norm_backward(dy, x, weight, rstd).dweight, "dweight")


@pytest.mark.parametrize("multiprocessors", [1, 3])
def test_several_blocks_share_a_column(module, monkeypatch, seed, multiprocessors):
    """Fewer on a small GPU than on a large one."""
    rms_norm, gpu = module("rms_norm_backward"), aten_model.Device(multiprocessors, 512)
    plans = module("plans")
    monkeypatch.setattr(plans, "gpu", lambda device: plans.Gpu(None, 0, gpu.sms, gpu.threads_per_sm))
    inputs = given(torch.Generator().manual_seed(seed), (2100, 64), *DTYPES)
    assert 1 < aten_model.column_tree(2100, 64, gpu).ctas < aten_model.column_tree(2100, 64).ctas
    assert_gradients_equal_the_model(rms_norm, *inputs, gpu)


ROCM_GPUS = {64: aten_model.Device(304, 2048, 64, rocm=True), 32: aten_model.Device(96, 2048, 32, rocm=True)}


@pytest.fixture(params=ROCM_GPUS, ids=["wave64", "wave32"])
def rocm_gpu(module, monkeypatch, request):
    """Kernels have the reduction orders of torch's build for ROCm."""
    plans, device = module("plans"), ROCM_GPUS[request.param]
    gpu = plans.Gpu(None, 0, device.sms, device.threads_per_sm, module("reduce_config").ROCM[device.warp_size])
    monkeypatch.setattr(plans, "gpu", lambda _: gpu)
    return device


def test_rocms_norms_equal_the_model(module, rocm_gpu, seed):
    """Every way of a forward kernel; norms with a residual, and `F.rms_norm`."""
    family, llama = module("rms_norm_plan"), module("variants").LLAMA
    spike, generator, on_cuda = module("rms_norm_proof").spike, torch.Generator().manual_seed(seed), 0
    for rows, hidden_size in ((1, 896), (3, 4096), (8, 132), (17, 64), (20, 1024), (16, 2880)):
        x = spike(torch.randn(rows, hidden_size, generator=generator), 1)
        residual, weight = torch.randn(rows, hidden_size, generator=generator), torch.randn(hidden_size)
        shape = (torch.float32, torch.float32, hidden_size, rows)
        ways = [family.plan_of(llama, torch.float32, hidden_size, rows, x.device), family.Plan(1, 4, streamed=True)]
        ways += [family.Plan(1, 4, by_lane=True)] if rows < 16 else []
        for plan in ways:
            alone = family.forward(llama, *shape, hidden_size, x.device, 1e-5, store_rstd=True, plan=plan)
            of_sum = family.forward(llama, *shape, hidden_size, x.device, 1e-5, True, plan, added=True)
            for launch, inputs, total in ((alone, [x], x), (of_sum, [x, residual], residual + x)):
                outs, rstd = [torch.full_like(x, math.nan) for _ in inputs], torch.full((rows, 1), math.nan)
                launch(*inputs, weight, *outs, rstd)
                statistics = aten_model.rms_norm_statistics(total, 1e-5, None, numpy_rsqrt, rocm_gpu)
                label = f"{len(inputs)} of {rows}x{hidden_size} {plan}"
                assert_bits_equal(rstd[:, 0], statistics.rstd, f"rstd of {label}")
                expected = aten_model.rms_norm_given_rstd(total, weight, statistics.rstd)
                assert_bits_equal(outs[0], expected, f"output of {label}")
                of_cuda = aten_model.rms_norm_statistics(total, 1e-5, rsqrt=numpy_rsqrt)
                on_cuda += int((of_cuda.rstd != statistics.rstd).sum())
        fused = module("variants").FUSED
        launch = family.forward(fused, *shape, hidden_size, x.device, 1e-5, store_rstd=True)
        rstd = torch.full((rows, 1), math.nan)
        launch(x, weight, torch.empty_like(x), rstd)
        expected = aten_model.fused_rms_norm_statistics(x, 1e-5, numpy_rsqrt, multiply_add, rocm_gpu).rstd
        assert_bits_equal(rstd[:, 0], expected, f"rstd of F.rms_norm, {rows}x{hidden_size}")
    assert on_cuda > 20, "rows show another order"


def test_rocms_gradients_equal_the_model(module, monkeypatch, rocm_gpu, seed):
    """With one block a column and with 64, fused, streamed and not fused."""
    rms_norm, generator = module("rms_norm_backward"), torch.Generator().manual_seed(seed)
    assert aten_model.column_tree(2100, 64, rocm_gpu).ctas == 64
    for rows, hidden_size in ((3, 896), (40, 260), (2100, 64)):
        inputs = given(generator, (rows, hidden_size), *DTYPES)
        assert_gradients_equal_the_model(rms_norm, *inputs, rocm_gpu)
    inputs = given(generator, (5, 2052), *DTYPES)
    monkeypatch.setattr(rms_norm, "launch_plan", lambda *_: rms_norm.BackwardPlan(True, 1, 4, streamed=True))
    assert_gradients_equal_the_model(rms_norm, *inputs, rocm_gpu, "streamed")


def test_gradients_too_large_for_32_bit_indexing_are_summed_in_parts(module, monkeypatch, seed):
    rms_norm, limit = module("rms_norm_backward"), 11 * 100 * 4
    monkeypatch.setattr(module("reduce_config"), "_MAX_32_BIT_OFFSET", limit)
    for dtype in DTYPES:
        x, weight, dy, rstd = given(torch.Generator().manual_seed(seed), (67, 100), dtype, dtype)
        backward = rms_norm.resolve(llama(rms_norm), dy, x, weight, rstd[:, None], True, True)
        assert len(backward.parts) == (8 if dtype == torch.float32 else 4)
        dx = aten_model.rms_norm_input_gradient(dy, x, weight, rstd)
        dweight = aten_model.rms_norm_weight_gradient(dy, x, weight, rstd, indexing_limit=limit)
        assert not torch.equal(dweight, aten_model.rms_norm_weight_gradient(dy, x, weight, rstd)) or dtype == DTYPES[1]
        assert_gradients(backward(dy, x, weight, rstd[:, None]), aten_model.Gradients(dx, dweight), f"parts {dtype}")


# Values


def test_special_values(kernel, module, seed):
    """Rows of both zeros, subnormals, numbers whose squares overflow, vanish or are subnormal, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    for dtype in DTYPES:
        x, weight, dy, _ = given(generator, (13, 64), dtype, dtype)
        tiny, most = torch.finfo(dtype).tiny, torch.finfo(dtype).max
        for row, value in enumerate((0.0, -0.0, tiny / 2, tiny, -most)):
            x[row] = value
        x[5, 3], x[6, 60], x[7, 0], x[8, ::2] = float("inf"), float("-inf"), float("nan"), -0.0
        weight[:4] = torch.tensor([0.0, -0.0, most, tiny])
        x[12] = tiny**0.5 / 8
        dy[9], dy[10, 5], dy[11] = -0.0, float("inf"), float("nan")
        for eps in (1e-5, 0.0):
            statistics = aten_model.rms_norm_statistics(x, eps, rsqrt=numpy_rsqrt)
            assert_bits_equal(
                kernel.rms_norm(x, weight, eps), aten_model.rms_norm_given_rstd(x, weight, statistics.rstd)
            )
            assert_gradients_equal_the_model(module("rms_norm_backward"), x, weight, dy, statistics.rstd)
            finite = [row for row in range(13) if row not in (5, 6, 7, 10, 11)]
            inputs = x[finite], weight, dy[finite], statistics.rstd[finite]
            assert_gradients_equal_the_model(module("rms_norm_backward"), *inputs)


def test_only_what_is_needed_is_computed_and_nothing_given_is_written(module, seed):
    rms_norm = module("rms_norm_backward")
    for dtype in DTYPES:
        x, weight, dy, rstd = given(torch.Generator().manual_seed(seed), (70, 64), dtype, torch.float32)
        inputs = dy, x, weight, rstd[:, None]
        before = [tensor.clone() for tensor in inputs]
        both, only_dx, only_dweight = (
            rms_norm.gradients(llama(rms_norm), *inputs, *needs)
            for needs in ((True, True), (True, False), (False, True))
        )
        assert only_dx.dweight is None and only_dweight.dx is only_dweight.dx_mean is None
        assert_bits_equal(only_dx.dx, both.dx)
        assert_bits_equal(only_dweight.dweight, both.dweight)
        assert (only_dx.dx_mean is None) == (both.dx_mean is None) == (dtype != torch.float32)
        if both.dx_mean is not None:
            assert_bits_equal(only_dx.dx_mean, both.dx_mean)
        for tensor, clone in zip(inputs, before):
            assert_bits_equal(tensor, clone)


# The layer


class LlamaRMSNorm(torch.nn.Module):
    """transformers' layer, as far as it decides bits."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.variance_epsilon = 1e-5

    def forward(self, hidden_states):
        # A proof's stand-in may run it. (What pytest makes of an assertion asks for more than a stand-in shows.)
        if isinstance(self.weight, torch.nn.Parameter):
            pytest.fail("the original forward runs")
        h = hidden_states.float()
        normalized = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normalized.to(hidden_states.dtype)


class T5LayerNorm(LlamaRMSNorm):
    """transformers' layer, as far as it decides bits."""

    def forward(self, hidden_states):
        if isinstance(self.weight, torch.nn.Parameter):
            pytest.fail("the original forward runs")
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(self.weight.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer_class", [LlamaRMSNorm, T5LayerNorm])
def test_layer_in_a_residual_block(kernel, seed, layer_class, dtype):
    """x + norm(x): x receives dy and two gradients of the norm, one after the other, which one sum of theirs would not equal."""
    two_edges = layer_class is T5LayerNorm
    x, weight, dy, _ = given(torch.Generator().manual_seed(seed), (2, 9, 128), dtype, dtype)
    norm = layer_class(weight)
    norm.forward = MethodType(kernel.layers.LlamaRMSNorm.forward, norm)
    rstd = aten_model.rms_norm_statistics(x, 1e-5, rsqrt=numpy_rsqrt).rstd
    normed = aten_model.rms_norm_given_rstd(x, weight, rstd)
    expected = aten_model.rms_norm_backward(dy, x, weight, rstd, two_edges=two_edges)
    with torch.no_grad():
        assert_bits_equal(norm(x), normed)
    x.requires_grad_()
    out = x + norm(x)
    assert_bits_equal(out, x + normed)
    handed_over = dy.clone()
    for _ in range(2):
        dx, dweight = torch.autograd.grad(out, (x, norm.weight), handed_over, retain_graph=True)
        total = dy
        for gradient in expected.dx:
            total = total + gradient
        assert_bits_equal(dx, total)
        assert_bits_equal(dweight, expected.dweight)
    assert_bits_equal(handed_over, dy)
    if two_edges or dtype == torch.float32:
        assert not torch.equal(dx, dy + sum(expected.dx))


# Activations


def numpy_exp2(x):
    return torch.from_numpy(numpy.asarray(numpy.exp2(x.numpy())))


TANH = {"tanh": functools.partial(aten_model.tanh, exp2=numpy_exp2)}
ERF, EXP = {"erf": functools.partial(aten_model.erf, exp2=numpy_exp2)}, {"exp": numpy_exp}
# By name the model's forward and backward, each with the functions it is made of as the interpreter computes them.
MODELS = {
    "silu": (functools.partial(aten_model.silu, **EXP), lambda dy, x: (aten_model.silu_backward(dy, x, **EXP),)),
    "gelu": (functools.partial(aten_model.gelu, **ERF), functools.partial(aten_model.gelu_backward, **ERF, **EXP)),
    "gelu_tanh": (
        functools.partial(aten_model.gelu_tanh, **TANH),
        functools.partial(aten_model.gelu_tanh_backward, **TANH),
    ),
    "new_gelu": (
        functools.partial(aten_model.new_gelu, **TANH),
        functools.partial(aten_model.new_gelu_backward, **TANH),
    ),
    "fast_gelu": (
        functools.partial(aten_model.fast_gelu, **TANH),
        functools.partial(aten_model.fast_gelu_backward, **TANH),
    ),
    "quick_gelu": (
        functools.partial(aten_model.quick_gelu, **EXP),
        functools.partial(aten_model.quick_gelu_backward, **EXP),
    ),
}
each_activation = pytest.mark.parametrize("name", MODELS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def its_fma(monkeypatch):
    """The interpreter's FMA."""
    monkeypatch.setattr(aten_model, "fused_multiply_add", the_fma())


def function(kernel, name):
    return functools.partial(kernel.gelu, approximate="tanh") if name == "gelu_tanh" else getattr(kernel, name)


def activation_inputs(generator, dtype):
    """Dense ones, permuted too, of an even and an odd number of elements, and rows with something in between."""
    x = 8 * torch.randn(4, 3, 40, generator=generator)
    special = [
        0.0,
        -0.0,
        float("inf"),
        float("-inf"),
        float("nan"),
        -88.0,
        -104.0,
        1e-40,
        70000.0,
        0.6,
        -0.6,
        1e-8,
        9.1,
    ]
    x.view(-1)[: len(special)] = torch.tensor(special)
    x = x.to(dtype)
    return (
        x,
        x.view(-1)[:479],
        x.transpose(0, 2),
        x[1, 1, 3],
        torch.randn(2500, generator=generator).to(dtype),
        x[..., :36],
    )


@each_dtype
@each_activation
def test_activation_equals_the_model(kernel, module, its_fma, seed, name, dtype):
    model, eager = MODELS[name][0], module("activation")._ACTIVATIONS[name].forward
    for x in activation_inputs(torch.Generator().manual_seed(seed), dtype):
        found = function(kernel, name)(x)
        assert_bits_equal(found, model(x), f"{list(x.shape)} {x.stride()}")
        assert_strides(found, eager(None, x), x.shape)


@each_dtype
@each_activation
def test_activation_gradients_equal_the_model(kernel, module, its_fma, seed, name, dtype):
    """One by one, and added up by autograd to another gradient that reaches the input first."""
    generator = torch.Generator().manual_seed(seed)
    *dense, _ = activation_inputs(generator, dtype)
    for x in dense:
        dy, other = (torch.empty_like(x).copy_(torch.randn(x.shape, generator=generator)) for _ in range(2))
        label = f"{list(x.shape)} {x.stride()}"
        expected = MODELS[name][1](dy, x)
        activation = module("activation")
        found = activation.gradients(activation._ACTIVATIONS[name], dy, x)
        assert len(found) == len(expected)
        for path, (ours, models) in enumerate(zip(found, expected)):
            assert_bits_equal(ours, models, f"path {path} of {label}")
        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad((function(kernel, name)(x), x * 1.0), x, (dy, other))
        assert_bits_equal(dx, functools.reduce(torch.add, expected, other), label)


@each_dtype
@pytest.mark.parametrize("gated", [False, True])
def test_gelu_of_cuda_13_2_equals_the_model(kernel, module, its_fma, seed, monkeypatch, dtype, gated):
    """With the other `erff`, which the bits of one input tell."""
    name = "gelu_of_cuda_13_2"
    for family in ("ops.activation", "ops.gated_activation"):
        monkeypatch.setattr(module(family), "constant_of", lambda activation, device: name)
    erf = functools.partial(aten_model.erf, exp2=numpy_exp2, cuda_13_2=True)
    model, gradients = (functools.partial(each, erf=erf) for each in (aten_model.gelu, aten_model.gelu_backward))
    generator, activation = torch.Generator().manual_seed(seed), module("ops.activation")
    for x in (activation_inputs(generator, dtype)[0], torch.randn(7, 480, generator=generator).to(dtype)):
        dy, up = (torch.empty_like(x).copy_(torch.randn(x.shape, generator=generator)) for _ in range(2))
        kind, of_gradients = (x.dtype, activation.Layout.of(x, x), x.device), (x.dtype, x.numel(), x.device)
        out, dx, d_up = (torch.full_like(x, float("nan")) for _ in range(3))
        if gated:
            of_gate = module("ops.gated_activation")
            layout = of_gate.Layout.of(x, up)
            of_gate._forward(of_gate.GELU, x.dtype, layout, x.device)(x, out, up)
            of_gate._backward(of_gate.GELU, x.dtype, layout, x.device, True)(dy, x, dx, up, d_up)
            half = (lambda each: each) if dtype == torch.float32 else (lambda each: each.to(dtype).float())
            assert_bits_equal(d_up, (dy.float() * half(model(x).float())).to(dtype))
            of_product = half(dy.float() * up.float()).to(dtype)
            assert_bits_equal(dx, gradients(of_product, x, exp=numpy_exp)[0], "gradient of the gate")
            assert_bits_equal(
                out, (model(x).float() * up.float()).to(dtype) if dtype != torch.float32 else model(x) * up
            )
            continue
        activation._forward(activation.GELU, *kind)(x, out)
        assert_bits_equal(out, model(x), f"{list(x.shape)}")
        activation._backward(activation.GELU, *of_gradients)(dy, x, dx)
        assert_bits_equal(dx, gradients(dy, x, exp=numpy_exp)[0], f"gradient of {list(x.shape)}")


def test_the_erf_of_eager_is_found_out(module, monkeypatch):
    """Which of CUDA's two `erff` eager's GELU has is told by one input, whose GELU needs no approximate instruction."""
    activation = module("ops.activation")
    for cuda_13_2 in (False, True):
        erf = functools.partial(aten_model.erf, cuda_13_2=cuda_13_2)
        monkeypatch.setattr(torch.nn.functional, "gelu", functools.partial(aten_model.gelu, erf=erf))
        assert activation._has_erf_of_cuda_13_2(torch.device("cpu")).tolist() == [cuda_13_2]
    assert activation.constant_of(activation.GELU, torch.device("cpu")) == "gelu"


# Gated activations


GATED = ("silu", "gelu_tanh", "gelu")
each_gated = pytest.mark.parametrize("name", GATED)


def gated_inputs(generator, dtype):
    """(gate, up): dense ones, permuted too, of an even and an odd number of elements, and the halves of rows."""
    for gate in activation_inputs(generator, dtype)[:-1]:
        up = torch.empty_like(gate).copy_(torch.randn(gate.shape, generator=generator))
        yield gate, up
    for shape in ((3, 5, 72), (2, 2 * 1100)):
        packed = torch.randn(shape, generator=generator).to(dtype)
        yield packed.chunk(2, -1)


def product(gated, gate, up, activation):
    out = gated.replacement(gate, up, activation.forward, activation)
    assert out is not None
    return out


def model_gradients(name, dy, gate, up):
    (d_gate,) = as_tuple(MODELS[name][1](dy * up, gate))
    return d_gate, dy * MODELS[name][0](gate)


def as_tuple(gradients):
    return (gradients,) if isinstance(gradients, torch.Tensor) else gradients


@each_dtype
@each_gated
def test_gated_activation_equals_the_model(module, its_fma, seed, name, dtype):
    gated = module("gated_activation")
    activation = gated.ACTIVATIONS[name]
    for gate, up in gated_inputs(torch.Generator().manual_seed(seed), dtype):
        found, label = product(gated, gate, up, activation), f"{list(gate.shape)} {gate.stride()}"
        assert_bits_equal(found, MODELS[name][0](gate) * up, label)
        assert_strides(found, activation.forward(None, gate) * up, gate.shape)


@each_dtype
@each_gated
def test_gated_activation_gradients_equal_the_model(module, its_fma, seed, name, dtype):
    generator = torch.Generator().manual_seed(seed)
    gated = module("gated_activation")
    activation = gated.ACTIVATIONS[name]
    for gate, up in gated_inputs(generator, dtype):
        label = f"{list(gate.shape)} {gate.stride()}"
        dy = torch.empty_like(activation.forward(None, gate)).copy_(torch.randn(gate.shape, generator=generator))
        before = [tensor.clone() for tensor in (dy, gate, up)]
        expected = model_gradients(name, dy, gate, up)
        assert gated._resolve_gradients(dy, gate, up, activation, True) is not None, label
        for with_up in (True, False):
            found = gated.gradients(activation, dy, gate, up, with_up)
            assert_bits_equal(found[0], expected[0], f"gate's of {label}")
            if with_up:
                assert_bits_equal(found[1], expected[1], f"up's of {label}")
            assert with_up or found[1] is None
        leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
        for found, gradient in zip(torch.autograd.grad(product(gated, *leaves, activation), leaves, dy), expected):
            assert_bits_equal(found, gradient, label)
        for tensor, clone in zip((dy, gate, up), before):
            assert_bits_equal(tensor, clone)


@each_dtype
@each_gated
def test_packed_gated_activation_equals_the_model(module, its_fma, seed, name, dtype):
    """Gradients that are -0 arrive as +0, as the sum with the other half's zeros is."""
    generator = torch.Generator().manual_seed(seed)
    gated = module("gated_activation")
    activation = gated.ACTIVATIONS[name]
    both = torch.randn(4, 6, 80, generator=generator).to(dtype)
    cases = both, both[..., :72], both.transpose(0, 1), both[0, 0], both.repeat(1, 1, 28)
    for index, packed in enumerate(cases):
        gate, up = packed.chunk(2, -1)
        found = gated.packed_replacement(packed, activation)
        assert_bits_equal(found, MODELS[name][0](gate) * up)
        assert_strides(found, gated._packed_eager(activation, packed), gate.shape)
        dy = torch.empty_like(found).copy_(torch.randn(gate.shape, generator=generator))
        dy[..., :3] = torch.tensor((-0.0, 0.0, -1e-30))
        if index == 2:  # Eager's gradient is contiguous, so its rows lie in another order.
            with pytest.raises(module("calls").Outside, match="do not have the layout of gate and up"):
                gated._resolve_packed_gradient(dy, packed, activation)
            continue
        other = torch.randn(packed.shape, generator=generator).to(dtype)
        gradient = torch.cat(model_gradients(name, dy, gate, up), -1) + 0.0
        assert_bits_equal(gated.packed_gradient(activation, dy, packed), gradient)
        leaf = packed.detach().requires_grad_()
        inputs = gated.packed_replacement(leaf, activation), leaf * 1.0
        assert_bits_equal(torch.autograd.grad(inputs, leaf, (dy, other))[0], other + gradient)
