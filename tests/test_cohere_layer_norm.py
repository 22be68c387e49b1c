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


def launched(family, x, weight, dy=None, needs=(True, True)):
    """What the kernels write for rows x: output, mean and rstd; with dy the terms of dx, the products and the rows' sums."""
    rows, size = x.shape
    kind = family.Kind(x.dtype, weight.dtype, size, family.row_class(rows))
    out = torch.full_like(x, math.nan)
    mean, rstd, d_rstd, d_mean = torch.full((4, rows, 1), math.nan).unbind()
    kind.forward(rows, weight.numel() // size, CPU, EPS, True)(x, weight, out, mean, rstd)
    if dy is None:
        return out, mean, rstd
    fp32 = x.dtype == torch.float32
    parts = [torch.full_like(x, math.nan) for _ in range(3 if fp32 else 1)]
    products = torch.full_like(x, math.nan, dtype=torch.float32)
    given = (*parts, *(() if fp32 else (rstd, rstd)), products, d_rstd, d_mean)
    kind.backward(rows, weight.numel() // size, CPU, needs, True)(dy, x, weight, mean, rstd, *given)
    return parts, products, d_rstd, d_mean


def random_case(choose, generator):
    size, dtype = choose.choice((choose.choice(SIZES), 4 * choose.randint(16, 160))), choose.choice(DTYPES)
    heads = choose.choice((1, 1, 2, 3))
    rows = choose.choice(ROWS) * heads
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
def test_the_kernels_equal_the_transcription(family, seed, cases):
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(cases):
        x, weight, dy = random_case(choose, generator)
        label = f"case {case}, {list(x.shape)} {x.dtype}, weight {list(weight.shape)} {weight.dtype}"
        expected = aten_model.cohere_layer_norm(x, weight, EPS, numpy_rsqrt, cast)
        for found, wanted, what in zip(launched(family, x, weight), expected, ("output", "mean", "rstd")):
            assert_bits_equal(found, wanted, f"{what} of {label}")
        wanted = aten_model.cohere_layer_norm_backward(dy, x, weight, *expected[1:], cast)
        parts, products, d_rstd, d_mean = launched(family, x, weight, dy)
        assert len(parts) == len(wanted.dx)
        for number, (found, term) in enumerate(zip(parts, wanted.dx)):
            assert_bits_equal(found, term, f"term {number} of dx of {label}")
        assert_bits_equal(d_rstd, wanted.d_rstd, f"the gradient of rstd of {label}")
        assert_bits_equal(d_mean, wanted.d_mean, f"the gradient of the mean of {label}")
        normalized = (x.float() - expected.mean) * expected.rstd
        assert_bits_equal(products, dy.float() * normalized, f"products of {label}")


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


def _in_sequence(values):
    total = torch.zeros(len(values))
    for column in values.unbind(1):
        total = total + column
    return total


WRONG_SUMS = {
    "of one row": functools.partial(aten_model.row_sum, total_rows=1),
    "neighbours first": functools.partial(aten_model.row_sum, device=aten_model.Device(132, 2048, rocm=True)),
    "in sequence": _in_sequence,
    "a CPU's": lambda values: values.sum(-1),
}


def transcribed_norm():
    """A layer that computes the transcription, with gradients by the transcription too."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, eps):
            out, *ctx.statistics = aten_model.cohere_layer_norm(x, weight, eps)
            ctx.save_for_backward(x, weight)
            return out

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            found = aten_model.cohere_layer_norm_backward(dy, x, weight, *ctx.statistics)
            return functools.reduce(torch.add, found.dx), found.dweight, None

    class Layer(torch.nn.Module):
        def forward(self, x):
            return Norm.apply(x, self.weight, self.variance_epsilon)

    return Layer


def in_the_kernels_place(family, patch, seed, row_sum=aten_model.row_sum, backward=None):
    """The proof compares the transcription with this sum in the kernels' place, with the right one in eager's."""

    def forward(kind, rows, weight_rows, device, eps, store_statistics):
        def run(x, weight, *outs):
            for out, value in zip(outs, aten_model.cohere_layer_norm(x, weight, eps, row_sum=row_sum)):
                out.copy_(value)

        return run

    def launch_backward(kind, rows, weight_rows, device, needs, store_sums):
        def run(dy, x, weight, mean, rstd, dx, dx_variance, dx_mean, products, d_rstd, d_mean):
            compute = backward or aten_model.cohere_layer_norm_backward
            found = compute(dy, x, weight, mean, rstd, row_sum=row_sum)
            for out, value in zip((dx, dx_variance, dx_mean), found.dx):
                out.copy_(value)
            products.copy_(dy.float() * ((x.float() - mean) * rstd))
            d_rstd.copy_(found.d_rstd)
            d_mean.copy_(found.d_mean)

        return run

    def formula(dy, x, weight, mean, rstd, needs_dx, needs_dweight, sums=None):
        sums += aten_model.cohere_layer_norm_backward(dy, x, weight, mean, rstd)[2:]

    patch.setattr(family.proof, "generator", lambda device, _: torch.Generator(device).manual_seed(seed))
    patch.setattr(family.Kind, "forward", forward)
    patch.setattr(family.Kind, "backward", launch_backward)
    patch.setattr(family, "statistics", lambda x, eps: aten_model.cohere_layer_norm(x, torch.ones(x.shape[1]), eps)[1:])
    patch.setattr(family, "formula", formula)
    patch.setattr(
        family, "_weight_gradient", lambda products, w: aten_model.column_sum(products).view(w.shape).to(w.dtype)
    )


def tells(family, kind, needs) -> bool:
    compared = family._comparisons(kind, transcribed_norm(), CPU, needs)
    return any(not bits_equal(found, expected) for _, found, expected in compared)


@pytest.mark.parametrize("dtype", BF16_FIRST)
@pytest.mark.parametrize("size", [512, pytest.param(1024, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [None, *WRONG_SUMS])
def test_the_proof_tells_a_wrong_order(family, monkeypatch, seed, name, size, dtype):
    kind = family.Kind(dtype, dtype, size, 16)
    in_the_kernels_place(family, monkeypatch, seed, WRONG_SUMS.get(name, aten_model.row_sum))
    for needs in ((False, False), (True, True)):
        assert tells(family, kind, needs) == (name is not None)


@pytest.mark.parametrize("rows", (1, 2))
def test_the_proof_tells_a_wrong_order_of_few_rows(family, monkeypatch, seed, rows):
    """A row of subnormal numbers, whose sum is exact, must not be the only one."""
    kind = family.Kind(torch.float32, torch.float32, 512, rows)
    for name in (None, "in sequence"):
        with monkeypatch.context() as patch:
            in_the_kernels_place(family, patch, seed, WRONG_SUMS.get(name, aten_model.row_sum))
            for needs in ((False, False), (True, True)):
                assert tells(family, kind, needs) == (name is not None)


@pytest.mark.long
def test_1000_wrong_orders_are_told(family, monkeypatch, seed):
    """Half of them in the forward pass, half in the backward pass alone."""
    choose = random.Random(seed)
    for _ in range(1000):
        dtype, size = choose.choice(DTYPES), choose.choice((512, 1024))
        name, forward = choose.choice(list(WRONG_SUMS)), choose.random() < 0.5
        with monkeypatch.context() as patch:
            of_proof = choose.randrange(1 << 30)
            if forward:
                in_the_kernels_place(family, patch, of_proof, WRONG_SUMS[name])
            else:

                def backward(*given, row_sum, name=name):
                    return aten_model.cohere_layer_norm_backward(*given, row_sum=WRONG_SUMS[name])

                in_the_kernels_place(family, patch, of_proof, backward=backward)
            needs = (False, False) if forward else (True, True)
            assert tells(family, family.Kind(dtype, dtype, size, 16), needs), (name, forward, dtype, size)


@pytest.mark.parametrize("dtype", BF16_FIRST)
def test_the_proof_tells_other_gradients(family, monkeypatch, seed, dtype):
    """A term of dx that is missing, and one sum of the mean's gradient over both terms."""
    right, kind = aten_model.cohere_layer_norm_backward, family.Kind(dtype, dtype, 512, 16)

    def without_mean(dy, x, weight, mean, rstd, row_sum):
        found, fp32 = (
            right(*given, weight, mean, rstd, row_sum=row_sum) for given in ((dy, x), (dy.float(), x.float()))
        )
        terms = (*fp32.dx[:2], torch.zeros_like(mean).expand(x.shape))
        return found._replace(dx=terms if x.dtype == torch.float32 else (functools.reduce(torch.add, terms).to(dtype),))

    def one_sum(dy, x, weight, mean, rstd, row_sum):
        found = right(dy, x, weight, mean, rstd, row_sum=row_sum)
        terms = right(dy.float(), x.float(), weight, mean, rstd).dx
        return found._replace(d_mean=row_sum(-(terms[0] + terms[1]))[:, None])

    for backward in (None, without_mean, one_sum):
        with monkeypatch.context() as patch:
            in_the_kernels_place(family, patch, seed, backward=backward)
            assert tells(family, kind, (True, True)) == (backward is not None)


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
def test_the_layer_is_what_the_kernels_compute(kernel, family, seed, dtype, shape):
    x, dy = torch.randn(2, 2, 5, 3, 64, generator=torch.Generator().manual_seed(seed)).to(dtype).unbind()
    layer = ours(kernel, layer_of(shape, dtype))
    weight = layer.weight.detach()
    out, _, _ = launched(family, x.view(30, 64), weight)
    parts, products, _, _ = launched(family, x.view(30, 64), weight, dy.view(30, 64))
    expected = out.view(x.shape), functools.reduce(torch.add, parts).view(x.shape), products.view(x.shape)
    for _ in range(2):  # The second call is recognised.
        with torch.no_grad():
            assert_bits_equal(layer(x), expected[0])
        found = gradients_of(layer, x, dy)
        for mine, wanted in zip(found, expected[:2]):
            assert_bits_equal(mine, wanted)
        assert_bits_equal(found[2], expected[2].sum_to_size(shape).to(dtype))
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
def test_output_and_gradients_are_those_of_eager(kernel, family, seed, monkeypatch):
    """With and without a residual, whose gradient arrives first. Most cases compile kernels of their own, in 1.5 s each."""
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator, choose = torch.Generator("cuda").manual_seed(seed), random.Random(seed)
    for case in range(60):
        size = choose.choice((choose.choice(SIZES), 4 * choose.randint(16, 4096)))
        tokens, heads = choose.randint(1, 64), choose.choice((1, 8))
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
