"""Rotary embedding as a complex product: the kernel in Triton's interpreter against the transcription of ATen's product.

The interpreter truncates where a GPU rounds to bf16: bf16 is left to the GPU.
"""

import functools
import math
import os
import random

import aten_model
import pytest
import torch
from bits import assert_bits_equal, bits_equal
from interpreter import the_fma
from kernels import Mode, kernelize, use_kernel_mapping
from places import modeling

pytestmark = [
    pytest.mark.usefixtures("proof_off"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero):RuntimeWarning"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16)
HEAD_DIMS = (2, 6, 10, 64, 80, 128, 256)


@pytest.fixture
def family(module):
    family = module("ops.complex_rotary")
    family._calls.clear()
    family._gradient_calls.clear()
    return family


@pytest.fixture
def its_fma(monkeypatch):
    """The interpreter's FMA."""
    monkeypatch.setattr(aten_model, "fused_multiply_add", the_fma())


def drawn(choose, generator, device=CPU, dtypes=DTYPES):
    """x as from a projection, fused or transposed, freqs_cis of one sequence or of all, and the heads' dimension."""
    make = functools.partial(torch.randn, generator=generator, device=device)
    batch, tokens, heads, head_dim = (
        choose.choice(each) for each in ((1, 2, 3), (1, 2, 5), (1, 2, 3, 8, 9, 17), HEAD_DIMS)
    )
    unsqueeze_dim, layout, dtype = choose.choice((1, 2)), choose.choice("cptf"), choose.choice(dtypes)
    x = make(batch, tokens, heads + 2 * (layout == "f"), head_dim + 2 * (layout == "p"))
    x.view(-1)[:4] = torch.tensor((-0.0, math.inf, math.nan, 0.0))[: x.numel()]
    x = x.to(dtype)[:, :, :heads, :head_dim]
    if layout == "t":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    if unsqueeze_dim == 1:
        x = x.transpose(1, 2)
    angle = make(choose.choice((1, batch)), tokens, head_dim // 2)
    angle[:, ::2] = 0.0
    return x, torch.polar(torch.ones_like(angle), angle), unsqueeze_dim


def transcribed(x, freqs, unsqueeze_dim, conjugate=False):
    return aten_model.complex_rotary(x, freqs.unsqueeze(unsqueeze_dim), conjugate)


def gradient_of(function, x, dy, *more):
    leaf = x.detach().requires_grad_()
    out = function(leaf, *more)
    return out.detach(), torch.autograd.grad(out, leaf, dy)[0]


def assert_same(found, expected, label):
    assert_bits_equal(found, expected, label)
    strides = [pair for size, *pair in zip(found.shape, found.stride(), expected.stride()) if size > 1]
    assert all(one == other for one, other in strides), f"{label}: {found.stride()}, expected {expected.stride()}"


@interpreted
@pytest.mark.parametrize("cases", [30, pytest.param(200, marks=pytest.mark.long)])
def test_the_kernel_equals_the_transcription(family, its_fma, seed, cases):
    """In eager's layout, for gradients of any layout, strided heads too; the second call is recognised."""
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(cases):
        x, *more = drawn(choose, generator)
        label = f"case {case}, {list(x.shape)} {x.stride()} {x.dtype}, {more[1]}"
        eager_out = family.eager(x, *more)
        strided = torch.empty_like(x.mT, memory_format=torch.contiguous_format).mT
        dy = choose.choice((torch.empty_like(x), torch.empty_like(eager_out), strided))
        dy = dy.copy_(torch.randn(x.shape, generator=generator))
        if choose.random() < 0.1:
            dy = dy[..., :1].expand(x.shape)
        _, eager_dx = gradient_of(family.eager, x, dy, *more)
        for _ in range(2):
            out, dx = gradient_of(family.replacement, x, dy, *more)
            assert_same(out, eager_out.copy_(transcribed(x, *more)), f"the output of {label}")
            assert_same(dx, eager_dx.copy_(transcribed(dy, *more, conjugate=True)), f"dx of {label}")
    assert None not in [*family._calls.resolved.values(), *family._gradient_calls.resolved.values()]


class Transcribed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, freqs, unsqueeze_dim):
        ctx.more = freqs, unsqueeze_dim
        return transcribed(x, freqs, unsqueeze_dim)

    @staticmethod
    def backward(ctx, dy):
        return transcribed(dy, *ctx.more, conjugate=True), None, None


def tells(family, patch, kind, wrong):
    """Whether the proof tells the transcription, with this error, from the transcription."""

    def launch(kind, batch, tokens, heads, steps, freqs_steps, device):
        def run(x, freqs, out):
            factor = freqs.clone().unsqueeze(2)
            if kind.conjugate and wrong != "not conjugated":
                factor[..., 1] *= -1.0
            pairs = x.float().unflatten(-1, (-1, 2))
            if wrong == "no FMA":
                (a, b), (c, d) = pairs.unbind(-1), factor.unbind(-1)
                product = torch.stack((a * c - b * d, a * d + b * c), -1)
            elif wrong == "the other product":
                product = aten_model.complex_product(factor, pairs)
            else:
                product = aten_model.complex_product(pairs, factor)
            out.copy_(product.flatten(-2))

        return run

    patch.setattr(family.Kind, "launch", launch)
    patch.setattr(family, "eager", Transcribed.apply)
    return any(not bits_equal(found, expected) for _, found, expected in family._comparisons(kind, CPU))


WRONG = ("no FMA", "the other product", "not conjugated")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_the_proof_tells_another_product(family, monkeypatch, dtype, conjugate, wrong):
    differs = wrong is not None and (conjugate or wrong != "not conjugated")
    assert tells(family, monkeypatch, family.Kind(dtype, 64, 8, 4, conjugate, 8), wrong) == differs


# So many proofs: `LOSSLESS_PROOFS=1000 pytest tests/test_complex_rotary.py -k power -rP` for docs/numerics.md.
PROOFS = int(os.environ.get("LOSSLESS_PROOFS", 3))


def test_the_power_of_the_proof(family, monkeypatch, seed):
    """Each proof with an error, a dtype, a length and a seed of its own."""
    choose = random.Random(seed)
    for _ in range(PROOFS):
        conjugate, of_proof = choose.random() < 0.5, choose.randrange(1 << 30)
        wrong = choose.choice(WRONG if conjugate else WRONG[:2])
        dtype, half = choose.choice((*DTYPES, torch.bfloat16)), choose.choice((32, 64, 128))
        kind = family.Kind(dtype, half, 8, 4, conjugate, family.heads_of_program(half, choose.choice((1, 4, 32))))
        with monkeypatch.context() as patch:
            patch.setattr(
                family.proof, "generator", lambda device, _, of=of_proof: torch.Generator(device).manual_seed(of)
            )
            assert tells(family, patch, kind, wrong), (wrong, kind, of_proof)


# Transformers' functions


def test_transformers_functions_have_the_formula(family, seed):
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for folder, unsqueeze_dim in (("llama4", 2), ("deepseek_v2", 1)):
        function = modeling(folder).apply_rotary_emb
        for _ in range(10):
            x, freqs, dim = drawn(choose, generator, dtypes=(*DTYPES, torch.bfloat16))
            x = x if dim == unsqueeze_dim else x.transpose(1, 2)
            theirs = gradient_of(lambda x, freqs: function(x, x.detach(), freqs)[0], x, x, freqs)  # noqa: B023
            for found, expected in zip(gradient_of(family.eager, x, x, freqs, unsqueeze_dim), theirs):
                assert_same(found, expected, f"{folder}, {list(x.shape)} {x.dtype}")


ATTENTIONS = {"llama4": ("Llama4TextAttention", 2), "deepseek_v2": ("DeepseekV2Attention", 1)}


@interpreted
@pytest.mark.parametrize("folder", ATTENTIONS)
def test_name_layers_and_apply_reach_the_functions(kernel, family, module, its_fma, seed, folder):
    """A module stands in the function's place, until `put_function_back`; the key has other heads than the query."""
    file, mapping = modeling(folder), module("mapping")
    (name, dim), function = ATTENTIONS[folder], file.apply_rotary_emb
    attention = torch.nn.Module.__new__(getattr(file, name))
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    try:
        made = mapping.name_functions(attention)["apply_rotary_emb"]
        assert file.apply_rotary_emb is made and mapping.functions_called(attention) == [made]
        with use_kernel_mapping(kernel.kernel_mapping(devices=("cpu",)), inherit_mapping=False):
            kernelize(made, mode=Mode.TRAINING, device="cpu")
        for _ in range(5):
            x, freqs, found = drawn(choose, generator)
            x = x if found == dim else x.transpose(1, 2)
            key = x.narrow(dim, 0, 1)
            for _ in range(2):
                out, dx = gradient_of(lambda x: made(x, x.detach(), freqs)[0], x, x)  # noqa: B023
                assert_bits_equal(out, transcribed(x, freqs, dim))
                assert_bits_equal(dx, transcribed(x, freqs, dim, conjugate=True))
                assert_bits_equal(made(x, key, freqs)[1], transcribed(key, freqs, dim))
            double = made(x.double(), key.double(), freqs)  # Outside the domain the file's function runs.
            for mine, expected in zip(double, function(x.double(), key.double(), freqs)):
                assert_same(mine, expected, folder)
        mapping.put_function_back(made)
        assert file.apply_rotary_emb is function
    finally:
        file.apply_rotary_emb = function


def conjugated(xq, xk, freqs_cis):
    return tuple(modeling("llama4").apply_rotary_emb(xq, xk, freqs_cis.conj()))


def only_the_query(xq, xk, freqs_cis):
    return modeling("llama4").apply_rotary_emb(xq, xk, freqs_cis)[0], xk * 1.0


def rounded(xq, xk, freqs_cis):
    """Its frequencies are those of 16 bits."""
    freqs_cis = torch.view_as_complex(torch.view_as_real(freqs_cis).to(xq.dtype).float())
    return modeling("llama4").apply_rotary_emb(xq, xk, freqs_cis)


def detached(xq, xk, freqs_cis):
    q, k = modeling("llama4").apply_rotary_emb(xq, xk, freqs_cis)
    return q, k.detach() + 0.0 * xk


@pytest.mark.filterwarnings("ignore:lossless-kernels:RuntimeWarning")
def test_functions_with_another_formula_are_not_taken(family):
    for function in (conjugated, only_the_query, rounded, detached):
        assert family.unsqueeze_dim_of(function) is None, function.__name__
    for folder, (_, dim) in ATTENTIONS.items():
        assert family.unsqueeze_dim_of(modeling(folder).apply_rotary_emb) == dim


@interpreted
def test_the_public_function(kernel, family, its_fma, seed):
    x, freqs, dim = drawn(random.Random(seed), torch.Generator().manual_seed(seed))
    q, k = kernel.apply_rotary_emb(x, x.narrow(dim, 0, 1), freqs, dim)
    assert_bits_equal(q, transcribed(x, freqs, dim))
    assert_bits_equal(k, transcribed(x.narrow(dim, 0, 1), freqs, dim))
    with pytest.raises(TypeError, match="freqs_cis: expected a tensor of torch.complex64, found torch.float32"):
        kernel.apply_rotary_emb(x, x, freqs.real, dim)
    with pytest.raises(ValueError, match="unsqueeze_dim: expected 1 or 2, found 3"):
        kernel.apply_rotary_emb(x, x, freqs, 3)
    with pytest.raises(ValueError, match="xk: expected four dimensions"):
        kernel.apply_rotary_emb(x, x[0], freqs, dim)
    with pytest.raises(ValueError, match=r"freqs_cis: expected \[.*\] for xq"):
        kernel.apply_rotary_emb(x, x, torch.cat((freqs, freqs), 1), dim)


def outside():
    x, freqs = torch.randn(2, 3, 4, 8), torch.polar(torch.ones(1, 3, 4), torch.randn(1, 3, 4))
    return {
        "float64": (x.double(), freqs),
        "odd strides": (torch.randn(2, 3, 4, 9)[..., :8], freqs),
        "a strided head": (torch.randn(2, 3, 4, 16)[..., ::2], freqs),
        "no tokens": (x[:, :0], freqs[:, :0]),
        "a conjugate": (x, freqs.conj()),
    }


@interpreted
@pytest.mark.parametrize("case", outside())
def test_outside_the_domain_eager_runs(kernel, family, case):
    """Or refuses what it cannot see as complex numbers."""
    x, freqs = outside()[case]
    if case in ("odd strides", "a strided head", "no tokens"):
        messages = []
        for function in (kernel.apply_rotary_emb, modeling("llama4").apply_rotary_emb):
            with pytest.raises(RuntimeError) as raised:
                function(x, x, freqs)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]
        return
    found = gradient_of(lambda x: kernel.apply_rotary_emb(x, x.detach(), freqs)[0], x, x)
    for mine, expected in zip(found, gradient_of(family.eager, x, x, freqs, 2)):
        assert_same(mine, expected, case)


@interpreted
def test_a_conjugate_after_a_plain_tensor_of_its_layout(kernel, family):
    """It is not taken for it: eager runs."""
    x, freqs = torch.randn(2, 3, 4, 8), torch.polar(torch.ones(1, 3, 4), torch.randn(1, 3, 4))
    expected = gradient_of(family.eager, x, x, freqs.conj(), 2)

    def of_query(x, freqs):
        return kernel.apply_rotary_emb(x, x.detach(), freqs)[0]

    gradient_of(of_query, x, x, freqs)
    for mine, theirs in zip(gradient_of(of_query, x, x, freqs.conj()), expected):
        assert_same(mine, theirs, "conjugate")
    namespace = getattr(torch.ops, family._complex_rotary_op.namespace)
    # The function that Inductor's code calls.
    site = namespace.complex_rotary.default.sites["a test's"]
    site(x, freqs, 2)
    assert_same(site(x, freqs.conj(), 2), expected[0], "conjugate in a site")
    assert any(family._calls.resolved.values())


@interpreted
def test_gradients_of_gradients_and_of_freqs(kernel, family, seed):
    x, freqs, dim = drawn(random.Random(seed), torch.Generator().manual_seed(seed), dtypes=(torch.float32,))
    x = x.nan_to_num(1.0, 1.0)
    results = []
    for function in (family.rotated, family.eager):
        leaf, dy = x.detach().clone().requires_grad_(), x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(function(leaf, freqs, dim), leaf, dy, create_graph=True)
        results.append((dx.detach(), torch.autograd.grad(dx.square().sum(), dy)[0]))
    for mine, expected in zip(*results):
        assert_bits_equal(mine, expected)
    factor = freqs.clone().requires_grad_()
    assert torch.autograd.grad(family.rotated(x, factor, dim).sum(), factor)[0].any()


@interpreted
def test_the_operators_for_torch_compile(family, seed):
    namespace = getattr(torch.ops, family._complex_rotary_op.namespace)
    x, freqs, dim = drawn(random.Random(seed), torch.Generator().manual_seed(seed), dtypes=(torch.float32,))
    x = x.nan_to_num(1.0, 1.0)
    torch.library.opcheck(namespace.complex_rotary.default, (x.clone().requires_grad_(), freqs, dim))
    torch.library.opcheck(namespace.complex_rotary_backward.default, (x, freqs, dim))


# On a GPU: eager itself


@pytest.mark.gpu
def test_output_and_gradient_are_those_of_eager(family, seed, monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator, choose = torch.Generator("cuda").manual_seed(seed), random.Random(seed)
    for case in range(300):
        x, freqs, dim = drawn(choose, generator, "cuda", (*DTYPES, torch.bfloat16))
        dy = torch.randn(x.shape, generator=generator, device="cuda").to(x.dtype)
        if case % 3 == 0:
            dy = dy.mT.contiguous().mT
        label = f"case {case}, {list(x.shape)} {x.stride()} {x.dtype}, dy {dy.stride()}"
        ours, theirs = (gradient_of(each, x, dy, freqs, dim) for each in (family.rotated, family.eager))
        for mine, eagers in zip(ours, theirs):
            assert_same(mine, eagers, label)
    assert None not in [*family._calls.resolved.values(), *family._gradient_calls.resolved.values()]


@pytest.mark.gpu
def test_compiled_is_uncompiled(kernel, family):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, freqs: kernel.apply_rotary_emb(x, x, freqs)[0], fullgraph=True)
    freqs = torch.polar(torch.ones(1, 9, 64), torch.randn(1, 9, 64)).cuda()
    for dtype in (*DTYPES, torch.bfloat16):
        x = torch.randn(2, 9, 4, 128, device="cuda").to(dtype)
        for found, expected in zip(gradient_of(compiled, x, x, freqs), gradient_of(family.eager, x, x, freqs, 2)):
            assert_bits_equal(found, expected, str(dtype))
