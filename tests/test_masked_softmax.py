"""Softmax of attention scores, scaled and masked: the kernels in Triton's interpreter against the transcription of eager's
operations, the proof's power, and what surrounds them. Orders and arithmetic of softmax: `test_softmax_kernel.py`.

Numpy's exponentials, FMAs and the truncation to bf16 are the interpreter's, in the transcription too.
"""

import itertools
import math
import os
import random
from types import SimpleNamespace

import aten_model
import pytest
import torch
from bits import assert_bits_equal, bits_equal
from interpreter import multiply_add
from places import forget_calls
from test_softmax_kernel import (
    BLOCK_SIZES,
    CPU,
    DTYPES,
    LONG_SIZES,
    SIZES,
    WRONG_ORDERS,
    cast,
    changes_of,
    is_added_by_fmas,
    numpy_exp,
    order_of_block,
    orders_of,
    orders_of_block,
    rows_with_tails,
    terms_of,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [
    pytest.mark.usefixtures("proof_off"),
    # numpy, which the interpreter computes with, warns of the infinities and NaNs that some tests are about.
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero|All-NaN):RuntimeWarning"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")
SPECIAL = (-math.inf, math.inf, math.nan, -0.0, 0.0)


@pytest.fixture
def family(module):
    forget_calls(module)
    return module("ops.masked_softmax")


# The transcription


def combined(scores, mask, scale, cast=cast):
    """Product and sum, each rounded to the dtype."""
    x = cast(scores.float() * torch.tensor(scale, dtype=torch.float32), scores.dtype)
    return x if mask is None else cast(x.float() + mask.float(), scores.dtype)


def transcribed(scores, mask, scale, row_sum=None):
    """The fp32 softmax, and the output."""
    rows = combined(scores, mask, scale).reshape(-1, scores.shape[-1])
    y = aten_model.softmax(rows, numpy_exp, dtype=torch.float32, row_sum=row_sum).view(scores.shape)
    return y, cast(y, scores.dtype)


def gradient(dy, y, scale, fma=multiply_add):
    """The scores' gradient: of softmax in fp32, rounded, times scale, rounded."""
    rows = (-1, y.shape[-1])
    dx = aten_model.softmax_backward(dy.float().reshape(rows), y.reshape(rows), fma, cast, dtype=dy.dtype).view(y.shape)
    return cast(dx.float() * torch.tensor(scale, dtype=torch.float32), dy.dtype)


# Shapes of masks by those of scores; the keys are the last dimension.
MASKS = {
    "none": lambda batch, heads, queries: None,
    "shared by heads": lambda batch, heads, queries: (batch, 1, queries),
    "shared by batches and heads": lambda batch, heads, queries: (1, 1, queries),
    "of keys": lambda batch, heads, queries: (batch, 1, 1),
    "for all": lambda batch, heads, queries: (1, 1, 1),
    "of heads": lambda batch, heads, queries: (1, heads, 1),
    "of every row": lambda batch, heads, queries: (batch, heads, queries),
    "a matrix": lambda batch, heads, queries: (queries,),
    "a row": lambda batch, heads, queries: (),
}


def mask_at_random(choose, generator, leading, keys, dtype):
    """A mask as transformers makes them, or of random numbers; a slice of a longer one in half of the cases."""
    shape = MASKS[choose.choice([*MASKS])](*leading)
    if shape is None:
        return None
    size = (*shape, keys + choose.choice((0, 0, 1, 8)))
    mask = torch.zeros(size).masked_fill(torch.rand(size, generator=generator) < 0.3, torch.finfo(dtype).min)
    if choose.random() < 0.5:
        mask = torch.randn(size, generator=generator)
    mask[torch.rand(size, generator=generator) < choose.choice((0.0, 0.01))] = -math.inf
    return mask.to(dtype)[..., :keys]


def case_at_random(choose, generator, keys, most_rows):
    """Scores, mask, scale and the output's gradient; in one case of three with what is no number."""
    leading, dtype = [choose.randint(1, 3), choose.randint(1, 3), choose.randint(1, most_rows)], choose.choice(DTYPES)
    scores = torch.randn(*leading, keys, generator=generator) * choose.choice((0.1, 1.0, 3.0))
    dy = torch.randn(*leading, keys, generator=generator) * choose.choice((0.1, 1.0, 3.0))
    if choose.random() < 1 / 3:
        for row in range(leading[2]):
            for tensor in (scores, dy):
                tensor[0, 0, row, choose.choice((slice(None), choose.randrange(keys)))] = choose.choice(SPECIAL)
    scale = choose.choice((1.0, 0.125, 0.7, -0.3, 88**-0.5))
    mask = mask_at_random(choose, generator, leading, keys, dtype)
    if mask is None and scale == 1.0:
        scale = 0.5
    return scores.to(dtype), mask, scale, dy.to(dtype)


def results_of(function, scores, mask, scale, dy):
    """Output and gradient."""
    leaf = scores.detach().requires_grad_()
    out = function(leaf, mask, scale)
    (dx,) = torch.autograd.grad(out, leaf, dy)
    return out.detach(), dx


def without_subnormals(dx, dtype):
    """The interpreter truncates what is subnormal in bf16 in a way of its own."""
    return torch.where(dx.abs() < 1e-36, 0.0, dx) if dtype == torch.bfloat16 else dx


def check(family, case, label):
    scores, mask, scale, dy = case
    label = f"{label}, {tuple(scores.shape)} {scores.dtype}, mask {mask is not None and mask.stride()}, scale {scale}"
    assert family.replacement(scores, mask, scale) is not None, label
    out, dx = results_of(family.replacement, *case)
    y, expected = transcribed(*case[:3])
    assert_bits_equal(*(without_subnormals(each, out.dtype) for each in (out, expected)), f"output of {label}")
    found = gradient(dy, y, scale)
    assert_bits_equal(*(without_subnormals(each, out.dtype) for each in (dx, found)), f"gradient of {label}")


@interpreted
@pytest.mark.parametrize("cases", [20, pytest.param(200, marks=pytest.mark.long)])
def test_kernels_equal_the_transcription(family, seed, cases):
    """Rows of one warp."""
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(cases):
        keys = choose.choice((choose.choice(SIZES), choose.randint(1, 1024)))
        check(family, case_at_random(choose, generator, keys, 20 if keys < 40 else 3), f"case {case}")


@interpreted
@pytest.mark.parametrize("cases", [6, pytest.param(200, marks=pytest.mark.long)])
def test_kernels_for_blocks_equal_the_transcription(family, seed, cases):
    """Rows of every length."""
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for case in range(cases):
        lengths = choose.choice((BLOCK_SIZES, BLOCK_SIZES, LONG_SIZES[:-1]))
        keys = choose.choice((choose.choice(lengths), choose.randint(lengths[0], lengths[-1])))
        check(family, case_at_random(choose, generator, keys, 2), f"case {case}")


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 1024, 1100, 4096])
def test_special_rows(family, size, dtype):
    """Whatever order a row is added up in, it has these values; a row that is masked as a whole is NaN, as eager's."""
    scores = torch.stack([torch.full((size,), value) for value in SPECIAL]).to(dtype)[None, None]
    mask = torch.zeros(1, 1, len(SPECIAL), size, dtype=dtype)
    mask[0, 0, -1] = -math.inf
    out, dx = results_of(family.replacement, scores, mask, 0.5, torch.ones_like(scores))
    for row, (value, of_row, of_gradient) in enumerate(zip(SPECIAL, out[0, 0], dx[0, 0])):
        if math.isfinite(value) and row != len(SPECIAL) - 1:
            assert_bits_equal(of_row, cast(torch.full((size,), 1 / size), dtype), f"rows of {value}")
            assert of_gradient.isfinite().all()
        else:
            assert of_row.isnan().all() and of_gradient.isnan().all(), value
    # NaN reaches also what the mask makes zero.
    mask[0, 0, 3:, 1:] = torch.finfo(dtype).min
    scores[0, 0, 3:, 0] = math.nan
    out, dx = results_of(family.replacement, scores, mask, 0.5, torch.ones_like(scores))
    assert out[0, 0, 3:].isnan().all() and dx[0, 0, 3:].isnan().all()
    # Scores that are masked with the least number have the value 0, and so has their gradient.
    mask = torch.zeros(1, 1, 1, size + 1, dtype=dtype)
    mask[..., -1] = torch.finfo(dtype).min
    scores = torch.zeros(1, 2, 1, size + 1, dtype=dtype)
    out, dx = results_of(family.replacement, scores, mask, 0.5, torch.randn(1, 2, 1, size + 1).to(dtype))
    assert not out[..., -1].any() and not dx[..., -1].any() and out[..., 0].all()


def scores_with_tails(choose, generator, size, dtype):
    """Twice the rows of `rows_with_tails`, and a mask with the least number, of every row."""
    rows = rows_with_tails(choose, generator, size, dtype)
    mask = torch.zeros(1, 1, len(rows), size).masked_fill(
        (torch.rand(len(rows), size, generator=generator) < 0.3) & (rows != 0), torch.finfo(dtype).min
    )
    return (2 * rows)[None, None], mask.to(dtype)


@interpreted
@pytest.mark.parametrize("cases", [1, pytest.param(6, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", [None, *(pytest.param(each, marks=pytest.mark.long) for each in DTYPES)])
def test_rows_with_small_terms_are_divided_down_to_zero(family, module, monkeypatch, seed, dtype, cases):
    """And no others. Each row has the transcription's bits. fp32 or bf16, at random; each dtype in the long runs."""
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    dtype = dtype or choose.choice(DTYPES[::2])
    source = module("kernels_src.softmax")
    # Of fp16 a row with a head, too.
    for size in (
        *choose.sample((2056, 3072, 4096, 4104, 8192, 9224), cases),
        *([1501] if dtype == torch.float16 else []),
    ):
        scores, mask = scores_with_tails(choose, generator, size, dtype)
        mask = choose.choice((mask, None))
        check(family, (scores, mask, 0.5, torch.randn(scores.shape, generator=generator).to(dtype)), size)
        down_to_zero = is_added_by_fmas(terms_of(combined(scores, mask, 0.5)[0, 0]))
        assert 20 < int(down_to_zero.sum()) < len(down_to_zero) - 15
        with monkeypatch.context() as patch:
            patch.setattr(source, "divide_by_reciprocal", lambda x, y, reciprocal: x * 0.0 + 2.0)
            out = family.replacement(scores, mask, 0.5)
        assert torch.equal((out[0, 0] != 2).all(-1), down_to_zero), (size, mask is None)


@interpreted
@pytest.mark.parametrize("size", [200, 1000])
@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_the_transcription_tells_of_a_wrong_order(family, module, monkeypatch, seed, name, size):
    """Of 64 fp32 rows, loaded by lanes or not; a kernel with the right order equals the transcription in all."""
    generator = torch.Generator().manual_seed(seed)
    scores, dy = torch.randn(2, 1, 8, 8, size, generator=generator).unbind()
    mask = torch.randn(1, 1, 8, size, generator=generator)
    leaf = scores.detach().requires_grad_()
    out = family.replacement(leaf, mask, 0.7)
    y, expected = transcribed(scores, mask, 0.7)
    assert_bits_equal(out.detach(), expected)
    if name == "16 lanes":
        assert_bits_equal(torch.autograd.grad(out, leaf, dy, retain_graph=True)[0], gradient(dy, y, 0.7))
    order, source = WRONG_ORDERS[name], module("kernels_src.masked_softmax")

    def wrong(tiles, ROWS, WIDTH, TILES, TILE):
        terms = tiles[0]
        sums = order(torch.cat([torch.from_numpy(tile.handle.data) for tile in tiles], dim=1)).numpy()
        return type(terms)(type(terms.handle)(sums, terms.handle.dtype), source.tl.block_type(terms.dtype, [ROWS]))

    monkeypatch.setattr(source, "_warp_sum", wrong)
    found = family.replacement(scores, mask, 0.7), torch.autograd.grad(out, leaf, dy)[0]
    for each, right in zip(found, (expected, gradient(dy, y, 0.7))):
        differing = int((each != right).any(-1).sum())
        print(f"{differing} of 64 rows differ")
        assert differing  # In a fifth of the rows or more: none of 64 would one time in a million.


# Roundings that a kernel might leave out, of the product, of the sum, and of the gradient before its product.
UNROUNDED = {
    "product": lambda s, m, scale, cast: cast(s.float() * scale + m.float(), s.dtype),
    "sum": lambda s, m, scale, cast: cast(s.float() * scale, s.dtype).float() + m.float(),
    "the other order": lambda s, m, scale, cast: cast(cast(s.float() + m.float(), s.dtype).float() * scale, s.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_planted_arithmetic_is_told(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    scores, mask, dy = torch.randn(3, 8, 200, generator=generator).to(dtype).unbind()
    y, _ = transcribed(scores, mask, 0.7)
    for name, wrong in UNROUNDED.items():
        rows = wrong(scores, mask, 0.7, cast).float()
        assert not bits_equal(aten_model.softmax(rows, numpy_exp), y), name
    right = gradient(dy, y, 0.7)
    unrounded = aten_model.softmax_backward(dy.float(), y, multiply_add, cast, dtype=torch.float32)
    assert not bits_equal(cast(unrounded * 0.7, dtype), right)
    # A y that was rounded to the dtype, as the output is.
    assert not bits_equal(gradient(dy, cast(y, dtype).float(), 0.7), right)


@interpreted
def test_a_kernel_with_another_rounding_is_told(family, module, monkeypatch, seed):
    """The same errors in the kernel."""
    case = case_at_random(random.Random(seed), torch.Generator().manual_seed(seed), 300, 3)
    scores, dy = torch.randn(2, 2, 2, 3, 300, generator=torch.Generator().manual_seed(seed)).half().unbind()
    case = scores, torch.randn(2, 1, 3, 300, generator=torch.Generator().manual_seed(seed + 1)).half(), 0.7, dy
    source, tl = module("kernels_src.masked_softmax"), module("kernels_src.masked_softmax").tl
    check(family, case, "the right kernel")

    def masked(scores_ptr, mask_ptr, element, inside, scale, MASKED):
        x = tl.load(scores_ptr + element, mask=inside, other=0.0).to(tl.float32) * scale
        x = x + tl.load(mask_ptr + element, mask=inside, other=-math.inf).to(tl.float32)
        return x.to(tl.float16).to(tl.float32)

    errors = {"_masked": masked, "_to_scores": lambda dx, scale, dtype: (dx * scale).to(dtype)}
    for name, error in errors.items():
        with monkeypatch.context() as patch:
            patch.setattr(source, name, error)
            with pytest.raises(AssertionError, match="output of" if name == "_masked" else "gradient of"):
                check(family, case, "a planted error")


# Programs


@pytest.mark.parametrize("name", MASKS)
def test_programs_find_every_row_and_neighbours_share_the_mask(family, chooser, name):
    leading, keys = [chooser.randint(1, 4) for _ in range(3)], chooser.randint(2, 9)
    shape, strides = MASKS[name](*leading), (0, 0, 0, 0)
    if shape is not None:
        strides = torch.empty(*shape, keys + 3)[..., :keys].expand(*leading, keys).stride()
    walk = family._Walk.of((*leading, keys), strides)
    inner, middle = walk.levels
    found = []
    for row in range(walk.rows):
        index = row // (inner * middle), row // inner % middle, row % inner
        found.append([sum(map(math.prod, zip(index, of))) for of in (walk.of_scores, walk.of_mask)])
    expected = {}
    for number in range(math.prod(leading)):
        batch, rest = divmod(number, leading[1] * leading[2])
        index = batch, *divmod(rest, leading[2])
        expected[number * keys] = sum(map(math.prod, zip(index, strides)))
    assert len(found) == len(expected) and dict(found) == expected
    # Each of the mask's rows is read by programs that follow each other.
    rows = [of_mask for _, of_mask in found]
    assert sum(first != second for first, second in zip(rows, rows[1:])) == len(set(rows)) - 1


def test_scales_of_the_scores_dtype(family):
    """Products by these are rounded once in 16 bits; no number of fp32 is among them."""
    numbers = {0.125: True, 1.0: True, -0.0625: True, 0.1: False, 88**-0.5: False, 1e-50: False, 1e50: False, 257.0: 1}
    for scale, is_narrow in numbers.items():
        for dtype in DTYPES:
            kind = family.Kind.of(False, dtype, 64, 64, True, scale)
            expected = is_narrow and dtype != torch.float32 and (scale != 257 or dtype == torch.float16)
            assert kind.narrow == expected, (scale, dtype)


def test_a_new_call_runs_no_operation_that_a_mode_sees(family):
    """A checkpoint that records operations would miss them when it computes the forward pass again."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), named=None):
            seen.append(str(operator))
            return operator(*arguments, **(named or {}))

    seen = []
    for scale in (0.5, 0.7):
        for dtype in DTYPES:
            with Seen():
                family.Kind.of(False, dtype, 64, 64, True, scale)
    assert not seen


def test_a_new_length_compiles_nothing(family):
    """In generation the keys are one more with each token: what is compiled for 1000 of them, of 16-bit numbers."""
    for dtype in (torch.float16, torch.bfloat16):
        for first, most in ((513, 2), (1100, 5), (2100, 2), (4200, 2)):
            lengths = range(first, first + 500)
            kinds = {family.Kind.of(False, dtype, size, size, True, 0.7) for size in lengths}
            assert len(kinds) <= most, (dtype, first, kinds)


# Proof


def kind_of(family, of_gradient, dtype, size, masked=True, multiple=None, narrow=False, long_warps=False):
    of_rows = size if multiple is None else multiple, masked, family._SCALES[narrow], long_warps
    return family.Kind.of(of_gradient, dtype, size, *of_rows)


class Transcribed:
    """In the place of a kernel: the transcription, with an order of additions."""

    def __init__(self, kind, order, scale):
        self.of_gradient, self.order, self.scale = kind.rows.of_gradient, order, scale
        self.call_3 = self.call_4 = self.call_5 = self

    def __call__(self, first, second, statistics, *others):
        *dx, mask = others if len(others) == 1 + self.of_gradient else (*others, None)
        scores = second if self.of_gradient else first
        x = combined(scores, mask, self.scale, torch.Tensor.to).float()
        batch, heads, queries, size = x.shape
        of_rows = statistics.view(batch, queries, heads, 2).transpose(1, 2) if mask is not None else statistics
        of_rows = of_rows.reshape(batch, heads, queries, 2)
        if self.of_gradient:
            y = torch.exp(x - of_rows[..., :1]) / of_rows[..., 1:]
            dx[0].copy_(gradient_of(first.float(), y, first.dtype, self.order) * self.scale)
            return
        largest = x.amax(-1, keepdim=True)
        terms = torch.exp(x - largest)
        total = self.order(terms.view(-1, size)).view(batch, heads, queries, 1)
        second.copy_(terms / total)
        found = torch.cat([largest, total], -1)
        statistics.copy_((found.transpose(1, 2) if mask is not None else found).reshape(-1, 2))


def gradient_of(dy, y, dtype, order=None):
    rows = (-1, y.shape[-1])
    found = aten_model.softmax_backward(dy.reshape(rows), y.reshape(rows), row_sum=order, dtype=dtype)
    return found.view(y.shape)


def softmax_of(x, dim, dtype):
    return aten_model.softmax(x.view(-1, x.shape[-1]), dtype=dtype).view(x.shape)


def tells(family, patch, kind, seed, order) -> bool:
    """Whether the proof tells a kernel with this order from eager, both transcribed; `seed` in its own seed's place."""

    def right(terms):
        itemsize = kind.rows.dtype.itemsize if kind.rows.dtype == torch.float16 else 4
        return aten_model.softmax_forward_sum(terms, itemsize, itemsize == 2)

    def bind(walk, of, scale, device):
        return Transcribed(of, order if of.rows.of_gradient == kind.rows.of_gradient else right, scale)

    def of_formula(dy, scores, mask, scale):
        y = softmax_of(combined(scores, mask, scale, torch.Tensor.to), -1, torch.float32)
        return gradient_of(dy.float(), y, scores.dtype) * scale

    patch.setattr(family.proof, "generator", lambda device, _: torch.Generator(device).manual_seed(seed))
    patch.setattr(family, "functional", SimpleNamespace(softmax=softmax_of))
    patch.setattr(family, "_formula_gradient", of_formula)
    patch.setattr(family, "eager_gradient", gradient_of)
    patch.setattr(family._Walk, "bind", bind)
    comparisons = family._gradient_comparisons if kind.rows.of_gradient else family._comparisons
    return any(not bits_equal(found, expected) for _, found, expected in comparisons(kind, CPU))


@pytest.mark.parametrize("log2_size", [2, 3, 5, 6, 8, 10])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_gradient", [False, True])
def test_the_proof_tells_a_wrong_order(family, monkeypatch, seed, of_gradient, dtype, log2_size):
    kind = kind_of(family, of_gradient, dtype, 1 << log2_size, multiple=1)
    assert not tells(family, monkeypatch, kind, seed, aten_model._warp_sum)
    missed = [name for name, order in orders_of(log2_size).items() if not tells(family, monkeypatch, kind, seed, order)]
    assert not missed


# Rows of each kind of block, where a dtype has it.
BLOCKS = (4096, 4095, 9225, 9224, 32768, 32776)


@pytest.mark.parametrize("of_gradient", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [4096, *(pytest.param(each, marks=pytest.mark.long) for each in BLOCKS[1:])])
def test_the_proof_tells_a_wrong_order_of_blocks(family, monkeypatch, seed, size, dtype, of_gradient):
    kind = kind_of(family, of_gradient, dtype, size)
    assert not tells(family, monkeypatch, kind, seed, order_of_block(kind.rows))
    changes = changes_of(kind.rows)
    missed = [
        change
        for change in changes
        for order in orders_of_block(kind.rows, change)
        if not tells(family, monkeypatch, kind, seed, order)
    ]
    assert not missed, kind


@pytest.mark.long
def test_1000_wrong_orders_are_told(family, monkeypatch, seed):
    """Each with a proof of its own: of a warp's rows, and of a block's."""
    choose = random.Random(seed)
    for _ in range(int(os.environ.get("LOSSLESS_PROOFS", 1000))):
        of_gradient, masked, narrow = (choose.random() < 0.5 for _ in range(3))
        dtype = choose.choice(DTYPES)
        if choose.random() < 0.5:
            log2_size = choose.randint(2, 10)
            kind = kind_of(family, of_gradient, dtype, 1 << log2_size, masked, narrow=narrow)
            name, order = choose.choice([*orders_of(log2_size).items()])
        else:
            kind = kind_of(family, of_gradient, dtype, choose.choice(BLOCKS), masked, narrow=narrow)
            name = choose.choice(changes_of(kind.rows))
            order = choose.choice(orders_of_block(kind.rows, name))
        assert tells(family, monkeypatch, kind, choose.randrange(1 << 30), order), (name, kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_proof_tells_a_missing_rounding(family, monkeypatch, seed, dtype):
    for of_gradient, narrow in itertools.product((False, True), repeat=2):
        kind = kind_of(family, of_gradient, dtype, 64, narrow=narrow)
        for name, wrong in UNROUNDED.items():
            with monkeypatch.context() as patch:
                patch.setattr(
                    Transcribed,
                    "__call__",
                    with_arithmetic(
                        Transcribed.__call__, lambda s, m, scale, cast, wrong=wrong: wrong(s, m, scale, cast)
                    ),
                )
                assert tells(family, patch, kind, seed, aten_model._warp_sum), (name, of_gradient, narrow)


def with_arithmetic(call, arithmetic):
    """`Transcribed.__call__` with another sum of scores and mask."""

    def run(*arguments):
        right = globals()["combined"]
        globals()["combined"] = arithmetic
        try:
            call(*arguments)
        finally:
            globals()["combined"] = right

    return run


@pytest.mark.parametrize("long_warps", [False, True])
def test_a_proof_has_rows_of_its_kind(family, chooser, long_warps):
    """Also the shortest and the longest; every length leads to a kind that has rows."""
    kinds = {}
    for size in (*SIZES, *BLOCK_SIZES, *chooser.sample(LONG_SIZES, 6)):
        for of_gradient, dtype, masked, gap in (
            (a, b, c, d) for a in (0, 1) for b in DTYPES for c in (0, 1) for d in (0, 1)
        ):
            multiple = math.gcd(size, size + gap * masked)
            more = bool(masked), multiple, chooser.random() < 0.5, long_warps
            kinds.setdefault(kind_of(family, bool(of_gradient), dtype, size, *more), []).append(size)
    for kind, sizes in kinds.items():
        found = family._sizes(kind, long_warps)
        assert found[0] <= min(sizes), kind
        assert kind.rows.order.kind == "loop" and not kind.rows.steps or found[-1] >= max(sizes), kind
        for size in found:
            rows = kind.rows
            multiple = family._multiple(kind, size)
            more = kind.masked, multiple, kind.narrow, long_warps
            assert kind_of(family, rows.of_gradient, rows.dtype, size, *more) == kind


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_proof_is_of_the_kernel_that_will_run(family, monkeypatch, dtype):
    """Of its kind, of rows on both ends of it, with the accesses of that kind, and of what is not a number."""
    seen, bind = [], family._Walk.bind
    monkeypatch.setattr(family, "_ELEMENTS", 4096)
    monkeypatch.setattr(family, "_ROWS_OF_BLOCKS", 6)
    monkeypatch.setattr(family, "_GRADIENT_ROWS", 12)

    def spy(walk, kind, scale, device):
        seen.append((kind, walk.size))
        assert kind == family.Kind.of(kind.rows.of_gradient, dtype, walk.size, walk.multiple, kind.masked, scale)
        return bind(walk, kind, scale, device)

    monkeypatch.setattr(family._Walk, "bind", spy)
    for size, sizes in ((40, {33, 64}), (64, {40, 64} if dtype.itemsize == 2 else {36, 64}), (1, {1})):
        for masked, of_gradient, narrow in itertools.product((False, True), repeat=3):
            seen.clear()
            kind = kind_of(family, of_gradient, dtype, size, masked, None if size == 64 else 1, narrow)
            comparisons = family._gradient_comparisons if of_gradient else family._comparisons
            for what, found, expected in comparisons(kind, CPU):
                assert found.stride() == expected.stride() and found.isnan().any() and found.isfinite().any(), what
            assert kind in {kind for kind, _ in seen}
            if masked or size == 64 or size == 1:
                assert {size for found, size in seen if found == kind} == sizes


# What surrounds the kernels


@interpreted
def test_autograd_gets_what_the_kernels_compute(kernel, family, seed):
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(6):
        case = case_at_random(choose, generator, 40, 3)
        for _ in range(2):  # The second call is recognised.
            out, dx = results_of(kernel.masked_softmax, *case)
            y, expected = transcribed(*case[:3])
            assert_bits_equal(out, expected)
            assert_bits_equal(dx, gradient(case[3], y, case[2]))
            assert_bits_equal(kernel.masked_softmax(*case[:3]), expected)
    leaf = case[0].clone().requires_grad_()
    assert kernel.masked_softmax(leaf, *case[1:3]).grad_fn.name() == "MaskedSoftmaxBackward"


@interpreted
def test_a_recognised_call_is_the_same_call(family, seed):
    """Another mask, scale or layout is another call; None and a mask alternate."""
    generator = torch.Generator().manual_seed(seed)
    scores, masks = torch.randn(2, 2, 3, 40, generator=generator), torch.randn(2, 2, 3, 48, generator=generator)
    given = [masks[:, :1, :, :40], None, masks[:, :1, :1, :40], masks[..., :40], masks[:1, :1, :, :40]]
    for mask in given * 2:
        for scale in (0.5, 0.25):
            assert_bits_equal(family.replacement(scores, mask, scale), transcribed(scores, mask, scale)[1])


LAYOUTS = {
    "expanded": lambda dy: dy.sum((0, 1, 2, 3), keepdim=True).expand_as(dy),
    "rows apart": lambda dy: torch.cat([dy, dy], -1)[..., : dy.shape[-1]],
    "transposed": lambda dy: dy.transpose(1, 2).contiguous().transpose(1, 2),
}


@interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_dense_whatever_the_layout(kernel, family, seed, layout):
    generator = torch.Generator().manual_seed(seed)
    scores, dy = torch.randn(2, 2, 3, 4, 40, generator=generator).unbind()
    arranged = LAYOUTS[layout](dy)
    case = scores, torch.randn(2, 1, 4, 40, generator=generator), 0.7, arranged
    (out, dx), theirs = results_of(kernel.masked_softmax, *case), results_of(family.eager_masked_softmax, *case)
    assert [each.stride() for each in (out, dx)] == [each.stride() for each in theirs]
    assert_bits_equal(dx, gradient(arranged, transcribed(*case[:3])[0], 0.7))


def outside():
    scores, mask = torch.randn(2, 2, 3, 40), torch.randn(2, 1, 3, 40)
    leaf = mask.clone().requires_grad_()
    return {
        "neither mask nor scale": (scores, None, 1.0),
        "float64": (scores.double(), mask.double(), 0.5),
        "another dtype of the mask": (scores.half(), mask, 0.5),
        "a mask of integers": (scores, (mask > 0).long(), 0.5),
        "a mask that needs a gradient": (scores, leaf, 0.5),
        "a mask for all keys": (scores, mask[..., :1], 0.5),
        "a mask of columns": (scores, mask.transpose(2, 3).contiguous().transpose(2, 3), 0.5),
        "a mask that broadcasts the scores": (scores[:1], mask, 0.5),
        "a mask with more dimensions": (scores, mask[None], 0.5),
        "a number for a mask": (scores, 0.5, 0.5),
        "scores in another order": (scores.transpose(1, 2), mask.transpose(1, 2), 0.5),
        "no rows": (scores[:0], mask[:0], 0.5),
        "no dimension": (scores[0, 0, 0, 0], None, 0.5),
        "a whole number": (scores, mask, 2),
        "a tensor's scale": (scores, mask, torch.tensor(0.5)),
        "an infinite scale": (scores, mask, math.inf),
        "a subclass": (scores.as_subclass(type("Other", (torch.Tensor,), {})), mask, 0.5),
    }


@pytest.mark.parametrize("case", outside())
def test_outside_the_domain_the_formula_runs(kernel, family, case):
    scores, mask, scale = outside()[case]
    assert family.replacement(scores, mask, scale) is None
    plain = torch.Tensor
    found = kernel.masked_softmax(scores, mask, scale).as_subclass(plain)
    expected = functional.softmax(scores if scale == 1.0 else scores * scale, -1, dtype=torch.float32)
    if mask is not None:
        expected = functional.softmax(scores * scale + mask, -1, _stacklevel=5, dtype=torch.float32)
    # Softmax is of the kernels, where they take it: a CPU's has another order, within a few roundings.
    torch.testing.assert_close(found, expected.to(scores.dtype).as_subclass(plain), equal_nan=True)
    assert found.dtype == scores.dtype


def test_what_eager_refuses_is_refused(kernel):
    with pytest.raises(RuntimeError, match="must match the size"):
        kernel.masked_softmax(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(TypeError, match=r"scores: .* found list"):
        kernel.masked_softmax([1.0])
    with pytest.raises(TypeError, match=r"scores: .* found torch.int64"):
        kernel.masked_softmax(torch.ones(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"scale: expected a number, found '2'"):
        kernel.masked_softmax(torch.ones(2, 3), None, "2")


def test_a_boolean_mask_is_refused_but_where_eager_adds_it(kernel, family):
    """Eager attention adds True as 1; whoever calls the function means something else."""
    scores, mask = torch.zeros(1, 2), torch.tensor([[True, False]])
    with pytest.raises(TypeError, match="mask: expected numbers to add, such as 0 and -inf, found torch.bool"):
        kernel.masked_softmax(scores, mask)
    expected = family.eager_masked_softmax(scores, mask, softmax=kernel.softmax)
    assert_bits_equal(family.softmax_of_scores(scores, mask, 1.0), expected)


@interpreted
def test_refusals_have_reasons(family):
    scores, mask = torch.randn(2, 2, 3, 40), torch.randn(2, 1, 3, 40)
    for arguments in ((scores, mask.half(), 0.5), (scores, mask.requires_grad_(), 0.5), (scores, None, 2)):
        family.replacement(*arguments)
    reasons = family.proof.verdicts_about(family.eager_masked_softmax)[1]
    for expected in ("a mask of another dtype", "a mask that needs a gradient", "a scale that is no float"):
        assert any(expected in reason for reason in reasons)


@interpreted
def test_under_autocast_it_is_the_same(family):
    """Softmax has a dtype there, which autocast leaves alone; product and sum are no operations of it."""
    scores, mask = torch.randn(2, 2, 3, 40).half(), torch.randn(2, 1, 3, 40).half()
    for _ in range(2):
        expected = family.replacement(scores, mask, 0.7)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_bits_equal(family.replacement(scores, mask, 0.7), expected)
            assert family.eager_masked_softmax(scores, mask, 0.7).dtype == torch.float16


@interpreted
def test_gradients_can_be_differentiated(kernel, family, seed):
    generator = torch.Generator().manual_seed(seed)
    scores, dy = torch.randn(2, 1, 2, 4, 50, generator=generator).unbind()
    mask, penalties = torch.randn(1, 1, 4, 50, generator=generator), []
    for function in (kernel.masked_softmax, family.eager_masked_softmax):
        leaf, weight = scores.clone().requires_grad_(), dy.clone().requires_grad_()
        (dx,) = torch.autograd.grad(function(leaf, mask, 0.7), leaf, weight, create_graph=True)
        penalties.append(torch.autograd.grad(dx.square().sum(), (leaf, weight)))
    for found, expected in zip(*penalties):
        # Eager on a CPU adds in another order than the kernels: a few roundings, which the defaults allow.
        torch.testing.assert_close(found, expected)
        assert found.any()


@interpreted
@pytest.mark.parametrize("which", [0, 1])
def test_what_is_kept_must_not_change_before_the_backward_pass(kernel, which):
    tensors = torch.randn(2, 3, 40).requires_grad_() * 1.0, torch.randn(3, 40)
    out = kernel.masked_softmax(*tensors, 0.5)
    tensors[which].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@interpreted
def test_little_is_kept(kernel):
    """Scores, mask and two numbers a row; nothing of fp32 in the scores' size."""
    kept = []
    scores, mask = torch.randn(2, 2, 3, 40).bfloat16().requires_grad_(), torch.zeros(2, 1, 3, 40).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        kernel.masked_softmax(scores, mask, 0.5).sum().backward()
    assert sorted((tuple(each.shape), each.dtype) for each in kept) == [
        ((2, 1, 3, 40), torch.bfloat16),
        ((2, 2, 3, 40), torch.bfloat16),
        ((12, 2), torch.float32),
    ]


@interpreted
def test_a_hook_may_return_another_layout(kernel, seed):
    """As `save_on_cpu` does with a mask that is a slice of another."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randn(2, 1, 3, 80, generator=generator)[..., :40]
    scores, dy, found = *torch.randn(2, 2, 4, 3, 40, generator=generator).unbind(), []
    for pack in (lambda saved: saved, torch.clone):
        leaf = scores.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            out = kernel.masked_softmax(leaf, mask, 0.5)
        found.append(torch.autograd.grad(out, leaf, dy)[0])
    # The other layout gets eager's operations, whose sums a CPU adds in another order.
    assert (found[0] - found[1]).abs().max() < 1e-6 < found[0].abs().max()


@interpreted
def test_modes_checkpoints_and_hooks_get_eagers_gradients(kernel, family, seed):
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            names.append(str(function))
            return function(*arguments, **(named or {}))

    names, generator = [], torch.Generator().manual_seed(seed)
    scores, dy = torch.randn(2, 1, 2, 4, 50, generator=generator).unbind()
    case = scores, torch.randn(1, 1, 4, 50, generator=generator), 0.7, dy
    _, expected = results_of(family.eager_masked_softmax, *case)
    with Watching():
        assert_bits_equal(results_of(family.eager_masked_softmax, *case)[1], expected)
        assert_bits_equal(results_of(kernel.masked_softmax, *case)[1], expected)
    assert names.count("aten._softmax.default") >= 2 and "aten._softmax_backward_data.default" in names

    def checkpointed(*arguments):
        return torch.utils.checkpoint.checkpoint(kernel.masked_softmax, *arguments, use_reentrant=False)

    ours = gradient(dy, transcribed(*case[:3])[0], 0.7)
    assert_bits_equal(results_of(checkpointed, *case)[1], ours)
    # A mode in one of a checkpoint's two computations alone: both save the same.
    leaf = scores.clone().requires_grad_()
    out = checkpointed(leaf, *case[1:3])
    with Watching():
        assert_bits_equal(torch.autograd.grad(out, leaf, dy)[0], expected)
    with Watching():
        out = checkpointed(leaf, *case[1:3])
    assert_bits_equal(torch.autograd.grad(out, leaf, dy)[0], ours)
    # Under vmap and jvp other operations of eager's compute the formula, up to a few roundings.
    batched = torch.vmap(lambda scores: kernel.masked_softmax(scores, case[1][0], 0.7))(scores)
    torch.testing.assert_close(batched, family.eager_masked_softmax(*case[:3]))


@interpreted
def test_without_proof_eager_runs(kernel, family, module, nothing_known, monkeypatch):
    """A CPU adds in another order than CUDA."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    monkeypatch.setattr(family, "_ELEMENTS", 4096)
    monkeypatch.setattr(module("ops.softmax"), "_PROOF_ELEMENTS", dict.fromkeys(DTYPES, 8192))
    scores, mask = torch.randn(6, 777), torch.randn(777)
    with pytest.warns(
        RuntimeWarning,
        match="eager_masked_softmax on cpu, torch.float32, a mask, rows of up to 1024 elements, output, keeps .*differ",
    ):
        assert family.replacement(scores, mask, 0.5) is None
    assert_bits_equal(kernel.masked_softmax(scores, mask, 0.5), family.eager_masked_softmax(scores, mask, 0.5))


@interpreted
def test_the_operators_for_torch_compile(kernel, family, seed):
    generator = torch.Generator().manual_seed(seed)
    namespace = getattr(torch.ops, family._masked_softmax_op.namespace)
    scores, dy = torch.randn(2, 3, 2, 5, 40, generator=generator).unbind()
    for mask in (torch.randn(3, 1, 5, 40, generator=generator), None):
        torch.library.opcheck(namespace.masked_softmax.default, (scores.clone().requires_grad_(), mask, 0.7))
        torch.library.opcheck(namespace.masked_softmax_backward.default, (dy, scores, mask, 0.7))
        case = scores, mask, 0.7, dy
        for found, expected in zip(
            results_of(namespace.masked_softmax, *case), results_of(kernel.masked_softmax, *case)
        ):
            assert_bits_equal(found, expected)


@interpreted
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_traces_the_operator(kernel, family, seed, dynamic):
    generator, graphs = torch.Generator().manual_seed(seed), []

    def backend(graph, example):
        graphs.append([str(node.target) for node in graph.graph.nodes if "softmax" in str(node.target)])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(kernel.masked_softmax, dynamic=dynamic, fullgraph=True, backend=backend)
    for size in (40, 41):
        scores, mask = torch.randn(2, 2, 3, size, generator=generator), torch.randn(2, 1, 3, size, generator=generator)
        assert_bits_equal(compiled(scores, mask, 0.5), kernel.masked_softmax(scores, mask, 0.5))
    # A mask that needs a gradient gets it from the formula's operations.
    torch._dynamo.reset()
    compiled(scores, mask.requires_grad_(), 0.5)
    torch._dynamo.reset()
    assert all("masked_softmax" in name for (name,) in graphs[:-1]) and len(graphs) > 1
    (name,) = graphs[-1]
    assert "softmax" in name and "masked" not in name


@interpreted
def test_torch_compile_traces_the_formula_where_the_operator_is_another(kernel, seed):
    """A mask that broadcasts the scores: eager adds up their gradients before it scales them."""
    generator = torch.Generator().manual_seed(seed)
    scores, dy = torch.randn(1, 2, 3, 40, generator=generator), torch.randn(4, 2, 3, 40, generator=generator)
    case = scores, torch.randn(4, 1, 3, 40, generator=generator), 0.3, dy
    torch._dynamo.reset()
    compiled = torch.compile(kernel.masked_softmax, fullgraph=True, backend="aot_eager")
    for found, expected in zip(results_of(compiled, *case), results_of(kernel.masked_softmax, *case)):
        assert_bits_equal(found, expected)
    torch._dynamo.reset()


@interpreted
def test_zero_scales_keep_their_sign(kernel, family):
    scores, dy = torch.randn(2, 40), torch.randn(2, 40)
    for scale in (0.0, -0.0):
        found, expected = (
            results_of(function, scores, None, scale, dy)
            for function in (kernel.masked_softmax, family.eager_masked_softmax)
        )
        assert_bits_equal(found[1], expected[1])


@interpreted
@pytest.mark.parametrize("of_gradient", [False, True])
def test_proofs_are_the_same_under_another_default_dtype(family, of_gradient):
    kind, results = kind_of(family, of_gradient, torch.float16, 40), []
    comparisons = family._gradient_comparisons if of_gradient else family._comparisons
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            results.append(list(comparisons(kind, CPU)))
        finally:
            torch.set_default_dtype(torch.float32)
    for (what, *ours), (_, *others) in zip(*results, strict=True):
        for one, other in zip(ours, others):
            assert_bits_equal(one, other, what)


@interpreted
def test_the_operators_without_a_kernel_compute_the_formula(family, monkeypatch, seed):
    """The backward operator's gradient is autograd's of the formula."""
    monkeypatch.setattr(family, "_proved", lambda *_: False)
    generator = torch.Generator().manual_seed(seed)
    scores, dy = torch.randn(2, 3, 2, 5, 40, generator=generator).unbind()
    for mask, scale in ((torch.randn(3, 1, 5, 40, generator=generator), 1.0), (None, 0.7)):
        case = scores, mask, scale, dy
        for found, expected in zip(
            results_of(family._masked_softmax_op, *case), results_of(family.eager_masked_softmax, *case)
        ):
            assert_bits_equal(found, expected)


# On a GPU: eager itself


def on_gpu(tensor):
    """A copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda").copy_(tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["warp", "block", "long"])
def test_output_and_gradient_are_those_of_eager(kernel, family, seed, monkeypatch, lengths):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    sizes = {"warp": SIZES, "block": BLOCK_SIZES, "long": LONG_SIZES}[lengths]
    for case in range(60):
        keys = choose.choice((choose.choice(sizes), choose.randint(sizes[0], sizes[-1])))
        given = case_at_random(choose, generator, keys, 40)
        scores, mask, scale, dy = (on_gpu(each) if isinstance(each, torch.Tensor) else each for each in given)
        label = f"case {case}, {tuple(scores.shape)} {scores.dtype}, mask {mask is not None and mask.stride()}, {scale}"
        assert family.replacement(scores, mask, scale) is not None, label
        found = results_of(kernel.masked_softmax, scores, mask, scale, dy)
        expected = results_of(family.eager_masked_softmax, scores, mask, scale, dy)
        for mine, theirs in zip(found, expected):
            assert_bits_equal(mine, theirs, label)
            assert mine.stride() == theirs.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_terms_are_those_of_eager(kernel, family, seed, monkeypatch, dtype):
    monkeypatch.setenv("LOSSLESS_PROOF", "strict")
    generator, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    for size in (40, 1000, 1024, 2049, 4096, 9216, 9224, 10001, 12288, 16384):
        scores, mask = (each.cuda() for each in scores_with_tails(choose, generator, size, dtype))
        dy = torch.randn(scores.shape, generator=generator).to(dtype).cuda()
        for each in (mask, None):
            assert family.replacement(scores, each, 0.5) is not None
            found = results_of(kernel.masked_softmax, scores, each, 0.5, dy)
            for mine, theirs in zip(found, results_of(family.eager_masked_softmax, scores, each, 0.5, dy)):
                assert_bits_equal(mine, theirs, f"{size}, {each is not None}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_transcription_is_what_eager_computes(family, seed, dtype):
    """Given the exponentials of the GPU."""
    generator = torch.Generator().manual_seed(seed)
    more = {"long_warps": family.has_long_warps(dtype, torch.device("cuda"))}
    for size in SIZES + BLOCK_SIZES + LONG_SIZES:
        scores, dy = torch.randn(2, 2, 2, 4, size, generator=generator).to(dtype).unbind()
        mask = torch.randn(2, 1, 4, size, generator=generator).to(dtype)
        out, dx = results_of(family.eager_masked_softmax, scores.cuda(), mask.cuda(), 0.7, dy.cuda())
        rows = combined(scores, mask, 0.7, torch.Tensor.to).view(-1, size)
        y = aten_model.softmax(rows, lambda x: torch.exp(x.cuda()).cpu(), dtype=torch.float32, **more)
        y = y.view(scores.shape)
        assert_bits_equal(y.to(dtype), out.cpu(), f"output of {size}")
        assert_bits_equal(gradient_of(dy.float(), y, dtype) * 0.7, dx.cpu(), f"gradient of {size}")


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_compiled_function_is_the_uncompiled_one(kernel, seed, dynamic):
    generator = torch.Generator("cuda").manual_seed(seed)
    for size in (40, 1000, 4096, 4095, 9224):
        # Each dtype and length is a recompilation; TorchDynamo stops after eight.
        torch._dynamo.reset()
        compiled = torch.compile(kernel.masked_softmax, dynamic=dynamic, fullgraph=True)
        for dtype in DTYPES:
            scores, dy = torch.randn(2, 2, 4, 6, size, generator=generator, device="cuda").to(dtype).unbind()
            case = scores, torch.randn(2, 1, 6, size, generator=generator, device="cuda").to(dtype), 0.125, dy
            found, expected = results_of(compiled, *case), results_of(kernel.masked_softmax, *case)
            for each, other in zip(found, expected):
                assert_bits_equal(each, other, f"{dtype}, {size}")
