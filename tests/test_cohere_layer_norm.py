"""Cohere's LayerNorm: the kernels in Triton's interpreter against the transcription of eager's operations, and the proof's power.

The interpreter truncates to bf16: `cast` does likewise.
"""

import functools
import math
import random
from types import MethodType

import aten_model
import pytest
import torch
from bits import assert_bits_equal, bits_equal
from interpreter import cast, numpy_rsqrt
from places import modeling
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from wrong_orders import COLUMN_SUMS, in_sequence

pytestmark = [
    pytest.mark.usefixtures("proof_off"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero):RuntimeWarning"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The rest in long runs.
BF16_FIRST = [DTYPES[2], *(pytest.param(each, marks=pytest.mark.long) for each in DTYPES[:2])]
# Few elements, which ATen reads one by one, a whole tile, less than one, and several steps.
SIZES = (64, 68, 124, 128, 132, 256, 260, 512, 768, 1024, 1028, 2048)
ROWS = (1, 2, 3, 5, 8, 15, 16, 18, 40)
EPS = 1e-5


@pytest.fixture
def family(module):
    family = module("ops.cohere_layer_norm")
    family._calls.clear()
    return family


@pytest.fixture
def backward(module):
    return module("ops.cohere_layer_norm_backward")


def launched(family, x, weight):
    """What the kernel writes for rows x: output, mean and rstd."""
    rows, size = x.shape
    out = torch.full_like(x, math.nan)
    mean, rstd = torch.full((2, rows, 1), math.nan).unbind()
    kind = family.Kind(x.dtype, weight.dtype, size, family.row_class(rows))
    kind.launch(rows, weight.numel() // size, CPU, EPS, True)(x, weight, out, mean, rstd)
    return out, mean, rstd


def launched_gradients(backward, dy, x, weight, mean, rstd):
    """What the kernels write for rows x, as the transcription returns it."""
    rows, size = x.shape
    weight_rows = weight.numel() // size
    d_rstd, d_mean = torch.full((2, rows, 1), math.nan).unbind()
    dx = [torch.full_like(x, math.nan) for _ in range(3 if x.dtype == torch.float32 else 1)]
    of_input = backward.OfInput(x.dtype, weight.dtype, size, backward.row_class(rows))
    given = dy, x, weight, mean, rstd, dx[0], *(dx[1:] or (rstd, rstd)), d_rstd, d_mean
    of_input.launch(rows, weight_rows, CPU, True)(*given)
    total = torch.full(weight.shape, math.nan)
    of_weight = backward.OfWeight.of(x.dtype, weight, len(x) * x.shape[1] // weight.numel())
    (dweight,) = of_weight.sum(rows // weight_rows, weight.shape, CPU, True)(dy, x, mean, rstd, total=total)
    return aten_model.CohereGradients(tuple(dx), d_rstd, d_mean, dweight, total)


def random_case(choose, generator):
    size, dtype = choose.choice((choose.choice(SIZES), 4 * choose.randint(16, 160))), choose.choice(DTYPES)
    heads = choose.choice((1, 1, 2, 3))
    # From 64 tokens on threads share a column.
    rows = choose.choice((*ROWS, 70) if size < 200 else ROWS) * heads
    x = torch.randn(rows, size, generator=generator) * choose.choice((0.01, 1.0, 30.0)) + choose.choice(
        (0.0, 1.0, -50.0)
    )
    for row in x:
        value = choose.choice((*(None,) * 12, 0.0, -0.0, 3.0, math.inf, -math.inf, math.nan, 1e4))
        if value is not None:
            row[choose.choice((slice(None), slice(None, None, 2), choose.randrange(size)))] = value
    weight = torch.randn(heads, size, generator=generator).to(choose.choice(DTYPES))
    dy = torch.randn(rows, size, generator=generator)
    dy[:, ::7] = choose.choice((0.0, -0.0, 1.0))
    return x.to(dtype), weight, dy.to(dtype)


@interpreted
@pytest.mark.parametrize("cases", [10, pytest.param(200, marks=pytest.mark.long)])
def test_the_kernels_equal_the_transcription(family, backward, seed, cases):
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(cases):
        x, weight, dy = random_case(choose, generator)
        label = f"case {case}, {list(x.shape)} {x.dtype}, weight {list(weight.shape)} {weight.dtype}"
        expected = aten_model.cohere_layer_norm(x, weight, EPS, numpy_rsqrt, cast)
        for found, wanted, what in zip(launched(family, x, weight), expected, ("output", "mean", "rstd")):
            assert_bits_equal(found, wanted, f"{what} of {label}")
        wanted = aten_model.cohere_layer_norm_backward(dy, x, weight, *expected[1:], cast)
        found = launched_gradients(backward, dy, x, weight, *expected[1:])
        assert_gradients_equal(found, wanted, label)


def assert_gradients_equal(found, wanted, label):
    assert len(found.dx) == len(wanted.dx)
    for number, (mine, term) in enumerate(zip(found.dx, wanted.dx)):
        assert_bits_equal(mine, term, f"term {number} of dx of {label}")
    for name in wanted._fields[1:]:
        assert_bits_equal(getattr(found, name), getattr(wanted, name), f"{name} of {label}")


@interpreted
@pytest.mark.parametrize("tokens, shape", [(300, (132,)), (2100, (64,)), (1100, (2, 64))])
def test_sums_over_many_tokens_equal_the_transcription(backward, seed, tokens, shape):
    """Threads of a block share a column, and from some number of tokens on several blocks."""
    generator, dtype = torch.Generator().manual_seed(seed), random.Random(seed).choice(DTYPES)
    rows = tokens * math.prod(shape[:-1])
    x, dy = torch.randn(2, rows, shape[-1], generator=generator).to(dtype).unbind()
    weight = torch.randn(shape, generator=generator).to(dtype)
    mean, rstd = torch.randn(rows, 1, generator=generator), torch.rand(rows, 1, generator=generator)
    assert (aten_model.column_tree(tokens, math.prod(shape)).ctas > 1) == (tokens > 1000)
    found = launched_gradients(backward, dy, x, weight, mean, rstd)
    wanted = aten_model.cohere_layer_norm_backward(dy, x, weight, mean, rstd, cast)
    assert_gradients_equal(found, wanted, f"{tokens} tokens, {shape} {dtype}")


@interpreted
def test_rows_that_warps_share_equal_the_transcription(family, backward, seed):
    """From 8192 elements on; the weight is loaded after the sums."""
    generator, dtype = torch.Generator().manual_seed(seed), random.Random(seed).choice(DTYPES)
    x, dy = torch.randn(2, 2, 8192, generator=generator).to(dtype).unbind()
    weight = torch.randn(8192, generator=generator)
    expected = aten_model.cohere_layer_norm(x, weight, EPS, numpy_rsqrt, cast)
    for found, wanted, what in zip(launched(family, x, weight), expected, ("output", "mean", "rstd")):
        assert_bits_equal(found, wanted, f"{what}, {dtype}")
    wanted = aten_model.cohere_layer_norm_backward(dy, x, weight, *expected[1:], cast)
    assert_gradients_equal(launched_gradients(backward, dy, x, weight, *expected[1:]), wanted, f"{dtype}")


def test_the_proof_of_the_weights_gradient_runs_the_kernels_of_the_call(backward):
    """Whatever the number of tokens, and the warmup for training meets all kinds."""
    for shape in ((768,), (1024,), (4096,), (8, 128), (64, 128)):
        weight = torch.ones(shape)
        warm = {backward.OfWeight.of(DTYPES[2], weight, n) for n in backward.tokens_of_every_kind(DTYPES[2], weight)}
        for tokens in (1, 5, 16, 63, 64, 300, 1000, 1024, 2000, 4096, 8192, 16000):
            kind = backward.OfWeight.of(DTYPES[2], weight, tokens)
            assert kind in warm, (shape, tokens)
            (call,) = kind.sum(tokens, shape, CPU).parts
            for of_proof in (kind.tokens, 2 * kind.tokens + 3):
                (part,) = kind.sum(of_proof, shape, CPU, True).parts
                assert part.sum_chains._launcher is call.sum_chains._launcher, (shape, tokens, of_proof)
                assert part.sum_blocks._launcher is call.sum_blocks._launcher, (shape, tokens, of_proof)


@interpreted
def test_parts_of_the_tokens_are_added_one_after_the_other(backward, module, monkeypatch, seed):
    """ATen halves products of more than 2 GiB; here of more than 32 KiB."""
    limit = 1 << 15
    monkeypatch.setattr(module("core.reduction"), "_MAX_32_BIT_OFFSET", limit)
    x, dy = torch.randn(2, 300, 64, generator=torch.Generator().manual_seed(seed)).unbind()
    weight, (mean, rstd) = torch.ones(64), torch.rand(2, 300, 1).unbind()
    assert len(backward.OfWeight.of(x.dtype, weight, 300).sum(300, weight.shape, CPU).parts) == 4
    limited = functools.partial(aten_model.column_sum, indexing_limit=limit)
    wanted = aten_model.cohere_layer_norm_backward(dy, x, weight, mean, rstd, column_sum=limited)
    assert_gradients_equal(launched_gradients(backward, dy, x, weight, mean, rstd), wanted, "four parts")


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_rows(family, dtype):
    """Whatever order it is added up in, a row has these values."""
    x = torch.stack([torch.full((256,), value) for value in (0.0, -0.0, 3.0, math.inf, math.nan)]).to(dtype)
    out, mean, rstd = launched(family, x, torch.ones(256))
    assert_bits_equal(mean[:3, 0], torch.tensor([0.0, 0.0, 3.0]))
    assert_bits_equal(rstd[:3], numpy_rsqrt(torch.full((3, 1), EPS)))
    # -0 - +0 is -0.
    assert_bits_equal(out[:3], torch.zeros(3, 256, dtype=dtype).index_fill(0, torch.tensor([1]), -0.0))
    assert out[3:].isnan().all() and rstd[3:].isnan().all()


# Kernels that are wrong


WRONG_SUMS = {
    "of one row": functools.partial(aten_model.row_sum, total_rows=1),
    "neighbours first": functools.partial(aten_model.row_sum, device=aten_model.Device(132, 2048, rocm=True)),
    "in sequence": in_sequence,
    "a CPU's": lambda values: values.sum(-1),
}


def transcribed_norm():
    """A layer that computes the transcription, with gradients by the transcription too."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, eps):
            rows = x.reshape(-1, x.shape[-1])
            out, *ctx.statistics = aten_model.cohere_layer_norm(rows, weight, eps)
            ctx.save_for_backward(rows, weight)
            return out.view(x.shape)

        @staticmethod
        def backward(ctx, dy):
            rows, weight = ctx.saved_tensors
            found = aten_model.cohere_layer_norm_backward(dy.view(rows.shape), rows, weight, *ctx.statistics)
            return functools.reduce(torch.add, found.dx).view(dy.shape), found.dweight, None

    class Layer(torch.nn.Module):
        def forward(self, x):
            return Norm.apply(x, self.weight, self.variance_epsilon)

    return Layer


def in_the_kernels_place(family, backward, patch, seed, row_sum=aten_model.row_sum, gradients=None):
    """The proofs compare the transcription with this sum, or these gradients, in the kernels' place, with the right one in
    eager's."""
    compute = gradients or functools.partial(aten_model.cohere_layer_norm_backward, row_sum=row_sum)

    def forward(kind, rows, weight_rows, device, eps, store_statistics):
        def run(x, weight, *outs):
            found = aten_model.cohere_layer_norm(x.view(-1, x.shape[-1]), weight, eps, row_sum=row_sum)
            for out, value in zip(outs, found):
                out.copy_(value.view(out.shape))

        return run

    def of_input(kind, rows, weight_rows, device, store_sums):
        def run(dy, x, weight, mean, rstd, dx, dx_variance, dx_mean, d_rstd, d_mean):
            rows = [each.view(-1, each.shape[-1]) for each in (dy, x)]
            found = compute(*rows, weight, *(each.view(-1, 1) for each in (mean, rstd)))
            for out, value in zip(
                (dx, dx_variance, dx_mean, d_rstd, d_mean), (*found.dx, *[None] * 2)[:3] + found[1:3]
            ):
                if value is not None:
                    out.copy_(value.view(out.shape))

        return run

    def of_weight(kind, tokens, shape, device, store_sum):
        def run(dy, x, mean, rstd, total):
            rows = [each.view(-1, each.shape[-1]) for each in (dy, x)]
            ones = torch.ones(kind.weight_rows, kind.size, dtype=kind.weight_dtype)
            found = compute(*rows, ones, mean.view(-1, 1), rstd.view(-1, 1))
            total.copy_(found.dweight_sum.view(shape))
            return [found.dweight.view(shape)]

        return run

    def statistics(x, eps):
        found = aten_model.cohere_layer_norm(x.view(-1, x.shape[-1]), torch.ones(x.shape[-1]), eps)[1:]
        return [each.view(*x.shape[:-1], 1) for each in found]

    def formula(dy, x, weight, mean, rstd, needs_dx, needs_dweight, sums):
        given = [each.reshape(-1, each.shape[-1]) for each in (dy, x)]
        found = aten_model.cohere_layer_norm_backward(*given, weight, mean.view(-1, 1), rstd.view(-1, 1))
        sums += [each.view(mean.shape) for each in found[1:3]]

    patch.setattr(family.proof, "generator", lambda device, _: torch.Generator(device).manual_seed(seed))
    patch.setattr(family.Kind, "launch", forward)
    patch.setattr(backward.OfInput, "launch", of_input)
    patch.setattr(backward.OfWeight, "sum", of_weight)
    patch.setattr(family, "statistics", statistics)
    patch.setattr(backward, "statistics", statistics)
    patch.setattr(backward, "formula", formula)
    patch.setattr(
        backward,
        "_weight_sum",
        lambda products, shape: aten_model.column_sum(products.reshape(-1, math.prod(shape))).view(shape),
    )


def tells(comparisons, kind) -> bool:
    return any(not bits_equal(found, expected) for _, found, expected in comparisons(kind, transcribed_norm(), CPU))


@pytest.mark.parametrize("dtype", BF16_FIRST)
@pytest.mark.parametrize("size", [512, pytest.param(1024, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [None, *WRONG_SUMS])
def test_the_proofs_tell_a_wrong_order(family, backward, monkeypatch, seed, name, size, dtype):
    in_the_kernels_place(family, backward, monkeypatch, seed, WRONG_SUMS.get(name, aten_model.row_sum))
    assert tells(family._comparisons, family.Kind(dtype, dtype, size, 16)) == (name is not None)
    assert tells(backward._comparisons_of_dx, backward.OfInput(dtype, dtype, size, 16)) == (name is not None)


@pytest.mark.parametrize("rows", (1, 2))
def test_the_proofs_tell_a_wrong_order_of_few_rows(family, backward, monkeypatch, seed, rows):
    """A row of subnormal numbers, whose sum is exact, must not be the only one."""
    properties = torch.float32, torch.float32, 512, rows
    for name in (None, "in sequence"):
        with monkeypatch.context() as patch:
            in_the_kernels_place(family, backward, patch, seed, WRONG_SUMS.get(name, aten_model.row_sum))
            assert tells(family._comparisons, family.Kind(*properties)) == (name is not None)
            assert tells(backward._comparisons_of_dx, backward.OfInput(*properties)) == (name is not None)


@pytest.mark.parametrize("rows", (2, 16))
@pytest.mark.parametrize("wrong", [False, True])
def test_the_proofs_tell_another_row_of_the_weight(family, backward, monkeypatch, seed, wrong, rows):
    """A kernel that has the weight's first row for all rows."""
    right, properties = aten_model._weight_of_rows, (torch.float16, torch.float32, 256, rows)
    in_the_kernels_place(family, backward, monkeypatch, seed)
    of_kernels = family.Kind.launch, backward.OfInput.launch

    def first_row(launch):
        def of_first(kind, rows, weight_rows, *arguments):
            run = launch(kind, rows, weight_rows, *arguments)

            def compute(*tensors):
                with monkeypatch.context() as patch:
                    repeated = lambda weight, x: right(weight.view(-1, x.shape[1])[:1], x)  # noqa: E731
                    patch.setattr(aten_model, "_weight_of_rows", repeated if wrong else right)
                    run(*tensors)

            return compute

        return of_first

    for each, launch in zip((family.Kind, backward.OfInput), of_kernels):
        monkeypatch.setattr(each, "launch", first_row(launch))
    assert tells(family._comparisons, family.Kind(*properties)) == wrong
    assert tells(backward._comparisons_of_dx, backward.OfInput(*properties)) == wrong


@pytest.mark.parametrize("name", [None, *COLUMN_SUMS])
def test_the_proof_tells_a_wrong_order_of_the_tokens(family, backward, monkeypatch, seed, name):
    """Few tokens in one block, and many in several."""
    dtype, column_sum = random.Random(seed).choice(DTYPES), COLUMN_SUMS.get(name, aten_model.column_sum)
    gradients = functools.partial(aten_model.cohere_layer_norm_backward, column_sum=column_sum)
    in_the_kernels_place(family, backward, monkeypatch, seed, gradients=gradients)
    for weight_rows, tokens in ((1, 64), (1, 1024), (2, 1024)):
        kind = backward.OfWeight(dtype, dtype, 256, weight_rows, tokens, 32)
        is_wrong = name is not None and (tokens > 64 or name != "in one block")
        assert tells(backward._comparisons_of_dweight, kind) == is_wrong


@pytest.mark.long
def test_1000_wrong_orders_are_told(family, backward, monkeypatch, seed):
    """Half of them in the forward pass, half in the backward pass."""
    choose = random.Random(seed)
    for _ in range(1000):
        dtype, size = choose.choice(DTYPES), choose.choice((512, 1024))
        name, forward = choose.choice(list(WRONG_SUMS)), choose.random() < 0.5
        with monkeypatch.context() as patch:
            in_the_kernels_place(family, backward, patch, choose.randrange(1 << 30), WRONG_SUMS[name])
            comparisons = family._comparisons if forward else backward._comparisons_of_dx
            kind = (family.Kind if forward else backward.OfInput)(dtype, dtype, size, 16)
            assert tells(comparisons, kind), (name, forward, dtype, size)


@pytest.mark.parametrize("dtype", BF16_FIRST)
def test_the_proof_tells_other_gradients(family, backward, monkeypatch, seed, dtype):
    """A term of dx that is missing, and one sum of the mean's gradient over both terms."""
    right, kind = aten_model.cohere_layer_norm_backward, backward.OfInput(dtype, dtype, 512, 16)

    def without_mean(dy, x, weight, mean, rstd):
        found, fp32 = (right(*given, weight, mean, rstd) for given in ((dy, x), (dy.float(), x.float())))
        terms = (*fp32.dx[:2], torch.zeros_like(mean).expand(x.shape))
        return found._replace(dx=terms if x.dtype == torch.float32 else (functools.reduce(torch.add, terms).to(dtype),))

    def one_sum(dy, x, weight, mean, rstd):
        found = right(dy, x, weight, mean, rstd)
        terms = right(dy.float(), x.float(), weight, mean, rstd).dx
        return found._replace(d_mean=aten_model.row_sum(-(terms[0] + terms[1]))[:, None])

    for gradients in (None, without_mean, one_sum):
        with monkeypatch.context() as patch:
            in_the_kernels_place(family, backward, patch, seed, gradients=gradients)
            assert tells(backward._comparisons_of_dx, kind) == (gradients is not None)


# What surrounds the kernels


def ours(kernel, layer):
    layer.forward = MethodType(kernel.layers.CohereLayerNorm.forward, layer)
    return layer


def layer_of(shape, dtype):
    layer = CohereLayerNorm(shape).to(dtype)
    torch.nn.init.normal_(layer.weight)
    return layer


def gradients_of(layer, x, dy):
    x = x.detach().requires_grad_()
    out = layer(x)
    return out.detach(), *torch.autograd.grad(out, (x, layer.weight), dy)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64,), (3, 64)])
def test_the_layer_is_what_the_kernels_compute(kernel, family, backward, seed, dtype, shape):
    x, dy = torch.randn(2, 2, 5, 3, 64, generator=torch.Generator().manual_seed(seed)).to(dtype).unbind()
    layer = ours(kernel, layer_of(shape, dtype))
    weight = layer.weight.detach()
    out, mean, rstd = launched(family, x.view(30, 64), weight)
    gradients = launched_gradients(backward, dy.view(30, 64), x.view(30, 64), weight, mean, rstd)
    expected = out.view(x.shape), functools.reduce(torch.add, gradients.dx).view(x.shape), gradients.dweight
    for _ in range(2):  # The second call is recognised.
        with torch.no_grad():
            assert_bits_equal(layer(x), expected[0])
        found = gradients_of(layer, x, dy)
        for mine, wanted in zip(found, expected):
            assert_bits_equal(mine, wanted)
    assert layer(x.clone().requires_grad_()).grad_fn.name() == "CohereLayerNormBackward"
    assert all(call is not None for call in family._calls.resolved.values())


def outside():
    x = torch.randn(4, 6, 64)
    return {
        "float64": (x.double(), (64,)),
        "short rows": (x[..., :32].contiguous(), (32,)),
        "no multiple of four": (torch.randn(4, 66), (66,)),
        "a vector": (x[0, 0], (64,)),
        "rows apart": (torch.cat((x, x), -1)[..., :64], (64,)),
        "transposed": (x.transpose(0, 1), (64,)),
        "another stride in a dimension of length 1": (torch.randn(64, 1).t(), (64,)),
        "no rows": (x[:0], (64,)),
        "an unaligned fp32 input": (torch.randn(257)[1:].view(4, 64), (64,)),
        "a weight that broadcasts otherwise": (x, (1, 64)),
    }


@interpreted
@pytest.mark.parametrize("case", outside())
def test_outside_the_domain_eager_runs(kernel, case):
    x, shape = outside()[case]
    layer = layer_of(shape, x.dtype)
    dy = torch.randn(layer(x).shape, dtype=x.dtype)
    expected = gradients_of(layer, x, dy)
    for found, wanted in zip(gradients_of(ours(kernel, layer), x, dy), expected):
        assert_bits_equal(found, wanted)
        assert found.stride() == wanted.stride()


@interpreted
@pytest.mark.parametrize("shape, stride", (((1, 64), (1, 1)), ((1, 3, 64), (7, 64, 1))))
def test_strides_of_dimensions_of_length_1_are_those_of_eager(kernel, family, seed, shape, stride):
    x = torch.empty_strided(shape, stride).copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    layer = layer_of((64,), torch.float32)
    with torch.no_grad():
        expected = layer(x)
        found = ours(kernel, layer)(x)
    assert found.stride() == expected.stride() and None not in family._calls.resolved.values()


@interpreted
def test_a_gradient_in_another_order_comes_from_the_formula(kernel, family, seed):
    """As from attention, whose heads stand before the tokens."""
    x, dy = torch.randn(2, 2, 5, 3, 64, generator=torch.Generator().manual_seed(seed)).unbind()
    dy = dy.transpose(1, 2).contiguous().transpose(1, 2)
    layer = layer_of((3, 64), torch.float32)
    theirs = gradients_of(layer, x, dy)
    for found, expected in zip(gradients_of(ours(kernel, layer), x, dy), theirs):
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


@interpreted
def test_gradients_can_be_differentiated(kernel, seed):
    x, dy = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(seed)).unbind()
    layer, penalties = layer_of((64,), torch.float32), []
    for of in (layer, ours(kernel, layer)):
        leaves = [x.clone().requires_grad_(), of.weight, dy.clone().requires_grad_()]
        first = torch.autograd.grad(of(leaves[0]), leaves[:2], leaves[2], create_graph=True)
        penalties.append(torch.autograd.grad(sum(each.square().sum() for each in first), leaves))
    for found, expected in zip(*penalties):
        torch.testing.assert_close(found, expected)  # As above.
        assert found.any()


@interpreted
def test_without_proof_eager_runs(kernel, nothing_known, monkeypatch):
    """A CPU adds in another order than CUDA."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    x, layer = torch.randn(16, 260), layer_of((260,), torch.float32)
    with torch.no_grad():
        expected = layer(x)
        with pytest.warns(
            RuntimeWarning, match="CohereLayerNorm.forward on cpu, .*size 260, 16 or more rows, keeps .*differ"
        ):
            assert_bits_equal(ours(kernel, layer)(x), expected)


FILES = ("cohere", "cohere2", "cohere2_moe", "cohere_compass")


def norm_of(folder):
    (found,) = [
        each for name, each in vars(modeling(folder)).items() if name.endswith("LayerNorm") and "Cohere" in name
    ]
    return found


@pytest.mark.parametrize("folder", FILES)
def test_transformers_classes_are_recognised(family, folder):
    assert family.computes_formula(norm_of(folder), torch.float32, torch.float32, CPU)


@pytest.mark.parametrize("folder", [FILES[0], *(pytest.param(folder, marks=pytest.mark.long) for folder in FILES[1:])])
def test_transformers_classes_get_the_layer_name(kernel, folder):
    """With a weight of heads as well."""
    layer_class = norm_of(folder)
    for shape in (64, (2, 64)):
        assert kernel.mapping.missing_name(layer_class(shape)) == "CohereLayerNorm"
    assert kernel.name_layers(torch.nn.Sequential(layer_class(64))) == {layer_class.__name__: "CohereLayerNorm"}


def test_another_formula_is_not(kernel, family, nothing_known):
    class Other(CohereLayerNorm):
        def forward(self, hidden_states):
            h = hidden_states.to(torch.float32)
            mean = h.mean(-1, keepdim=True)
            variance = (h - mean).pow(2).mean(-1, keepdim=True)
            h = (h - mean) / torch.sqrt(variance + self.variance_epsilon)
            return (self.weight.to(torch.float32) * h).to(hidden_states.dtype)

    with pytest.warns(RuntimeWarning, match="keeps its original forward"):
        assert not family.computes_formula(Other, torch.float32, torch.float32, CPU)


@interpreted
@pytest.mark.parametrize("dtype", BF16_FIRST)
def test_the_operators_for_torch_compile(kernel, family, seed, dtype):
    namespace = getattr(torch.ops, family._cohere_layer_norm_op.namespace)
    x, dy = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(seed)).to(dtype).unbind()
    layer = ours(kernel, layer_of((64,), dtype))
    fp32 = dtype == torch.float32

    def by_operator(x):
        again = x if fp32 else None
        return namespace.cohere_layer_norm(x, layer.weight, again, again, EPS)[0]

    by_operator.weight = layer.weight
    for found, expected in zip(gradients_of(by_operator, x, dy), gradients_of(layer, x, dy)):
        assert_bits_equal(found, expected)
    leaf = x.clone().requires_grad_()
    torch.library.opcheck(namespace.cohere_layer_norm.default, (leaf, layer.weight, None, None, EPS))
    weight = layer.weight.detach()
    _, mean, rstd = namespace.cohere_layer_norm(x, weight, None, None, EPS)
    for needs in ((True, True), (False, True)):
        arguments = (dy, x, weight, mean, rstd, EPS, *needs)
        torch.library.opcheck(namespace.cohere_layer_norm_backward.default, arguments)


# On a GPU: eager itself


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))
def test_output_and_gradients_are_those_of_eager(kernel, family, seed, monkeypatch, part):
    """With and without a residual, whose gradient arrives first. Most cases compile kernels of their own, in 1.5 s each."""
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator, choose = torch.Generator("cuda").manual_seed(seed + part), random.Random(seed + part)
    for case in range(15):
        size = choose.choice((choose.choice(SIZES), 4 * choose.randint(16, 4096)))
        heads = choose.choice((1, 8))
        # Blocks share the sum over more than a thousand tokens.
        tokens = min(choose.choice((choose.randint(1, 64), choose.randint(65, 3000))), (1 << 23) // (heads * size))
        shape = (2, tokens, heads, size) if heads > 1 else (2, tokens, size)
        dtype, weight_dtype = choose.choice(DTYPES), choose.choice(DTYPES)
        layer = layer_of((heads, size) if heads > 1 else (size,), weight_dtype).cuda()
        x, dy = torch.randn(2, *shape, generator=generator, device="cuda").to(dtype).unbind()
        residual = choose.random() < 0.5
        label = f"case {case}, {shape} {dtype}, weight {weight_dtype}, residual {residual}"

        def call(layer, x=x, dy=dy, residual=residual):
            leaf = x.clone().requires_grad_()
            h = leaf * 1.0
            out = h + layer(h) if residual else layer(h)
            return out.detach(), *torch.autograd.grad(out, (leaf, layer.weight), dy)

        theirs = call(layer)
        for mine, eagers in zip(call(ours(kernel, layer)), theirs):
            assert_bits_equal(mine, eagers, label)
            assert mine.stride() == eagers.stride(), label
    assert all(call is not None for call in family._calls.resolved.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_transcription_is_what_eager_computes(seed, dtype):
    """Given the reciprocal square roots of the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for size in SIZES:
        x, dy = torch.randn(2, 64, size, generator=generator, device="cuda").to(dtype).unbind()
        layer = layer_of((size,), dtype).cuda()
        theirs = gradients_of(layer, x, dy)
        weight = layer.weight.detach().cpu()
        out, mean, rstd = aten_model.cohere_layer_norm(x.cpu(), weight, EPS, lambda x: torch.rsqrt(x.cuda()).cpu())
        found = aten_model.cohere_layer_norm_backward(dy.cpu(), x.cpu(), weight, mean, rstd)
        for mine, eagers in zip((out, functools.reduce(torch.add, found.dx), found.dweight), theirs):
            assert_bits_equal(mine, eagers.cpu(), f"{size}")


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_uncompiled(kernel, seed, dynamic):
    generator = torch.Generator("cuda").manual_seed(seed)
    torch._dynamo.reset()
    for dtype in DTYPES:
        x, dy = torch.randn(2, 3, 30, 1024, generator=generator, device="cuda").to(dtype).unbind()
        layer = ours(kernel, layer_of((1024,), dtype).cuda())
        compiled = torch.compile(lambda x, layer=layer: layer(x), dynamic=dynamic, fullgraph=True)
        compiled.weight = layer.weight
        for found, expected in zip(gradients_of(compiled, x, dy), gradients_of(layer, x, dy)):
            assert_bits_equal(found, expected, f"{dtype}")
