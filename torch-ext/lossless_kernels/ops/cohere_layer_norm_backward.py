"""The gradients of Cohere's LayerNorm, with the bits of eager autograd through transformers' layers."""

import functools
import math
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

import torch

from ..core import launch, plans, proof
from ..core.domain import allocator
from ..core.inspection import functions_of
from ..core.layout import contiguous_strides
from ..core.reduction import ROW_CLASSES, last_power_of_two, row_class, row_reduction
from .column_sum import ColumnSum, check_parts, kind_of
from .rms_norm.proof import PROOF_EPS, PROOF_ROWS, proof_calls, spike, stand_in, subnormal_row

if launch.AVAILABLE:
    from ..kernels_src.cohere_layer_norm_backward import cohere_layer_norm_backward, cohere_layer_norm_sum_chains


class Gradients(NamedTuple):
    """The gradients. An fp32 x gets three, one after the other; that of 16 bits is `dx`, their rounded sum."""

    dx: Optional[torch.Tensor]
    dx_variance: Optional[torch.Tensor]
    dx_mean: Optional[torch.Tensor]
    dweight: Optional[torch.Tensor]


def statistics(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's mean and `rsqrt(variance + eps)`, fp32, `[..., 1]`."""
    h = x.to(torch.float32)
    mean = h.mean(-1, keepdim=True)
    return mean, torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + eps)


def formula(dy, x, weight, mean, rstd, needs_dx: bool, needs_dweight: bool, sums: Optional[list] = None) -> Gradients:
    """The gradients in differentiable torch operations, one rounding each, as autograd computes them.

    Args:
        sums: gets the fp32 gradients of rstd and of the mean.
    """
    h, size = x.to(torch.float32), x.shape[-1]
    g, centred = dy.to(torch.float32), h - mean
    dx = dx_variance = dx_mean = dweight = None
    if needs_dx:
        d_normalized = g * weight.to(torch.float32)
        d_rstd = (d_normalized * centred).sum(-1, keepdim=True)
        dx = d_normalized * rstd
        dx_variance = (-0.5 * d_rstd) * rstd.pow(3) / size * (2 * centred)
        d_mean = (-dx).sum(-1, keepdim=True) + (-dx_variance).sum(-1, keepdim=True)
        dx_mean = d_mean.expand(x.shape) / size
        if sums is not None:
            sums += d_rstd, d_mean
        if x.dtype != torch.float32:
            dx, dx_variance, dx_mean = ((dx + dx_variance) + dx_mean).to(x.dtype), None, None
    if needs_dweight:
        dweight = _weight_sum(g * (centred * rstd), weight.shape).to(weight.dtype)
    return Gradients(dx, dx_variance, dx_mean, dweight)


def _weight_sum(products, shape) -> torch.Tensor:
    """ATen's sum of the fp32 products over the tokens."""
    return products.sum_to_size(shape)


# Calls


# Warps of a program of dx, by the most elements of a row (H200).
_WARPS = {512: 4, 1024: 1, 7168: 2, 8188: 4, 12288: 8, 16384: 16}
# A program takes several rows of up to so many elements, with so many elements in all.
_SHORT_ROW, _ELEMENTS_OF_SHORT_ROWS = 512, 2048
# Where rows are few a thread has so many elements, up to so many warps.
_FEW_ROWS_ELEMENTS, _MOST_WARPS = 16, 16
# The most steps of a tile.
_MOST_LOG2_STEPS = 2
# Sums over tokens: columns of a program (H200).
_COLUMNS = 128
# The turns whose loads are in flight, by the bytes of an element.
_TURNS = {2: 4, 4: 2}


@dataclass(frozen=True)
class OfRows:
    """The properties that a kernel which takes rows is compiled for.

    Attributes:
        size: elements of a row.
        rows: the fewest of their class, whose sums have one order.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    size: int
    rows: int

    def bind(self, kernel, warps: dict, dtypes, rows: int, device, *scalars) -> launch.Launch:
        """The launch of a kernel whose programs take rows in the steps of ATen's reduction.

        Args:
            warps: of a program, by the most elements of a row, where rows are not few.
        """
        order = row_reduction(self.rows, self.size, plans.gpu(device).build)
        steps, rows_per_program = -(-self.size // order.columns), 1
        num_warps = next(each for most, each in warps.items() if self.size <= most)
        if self.rows < ROW_CLASSES[-1]:
            num_warps = min(last_power_of_two(max(self.size // (_FEW_ROWS_ELEMENTS * 32), 1)), _MOST_WARPS)
        elif self.size <= _SHORT_ROW:
            rows_per_program = min(_ELEMENTS_OF_SHORT_ROWS // (order.columns << order.log2_steps), self.rows)
        # Many memory operations take long to compile. Where one of ATen's warps has a row, a tile is several steps, of which a
        # thread has the same columns: as many as leave at most an eighth of all steps empty.
        log2_steps = vector = 0
        if rows_per_program == 1 and order.height == 1:
            vector = order.columns // (32 * num_warps)
            log2_steps = next(each for each in range(_MOST_LOG2_STEPS, -1, -1) if 8 * (-steps % (1 << each)) <= steps)
        constants = {"HIDDEN_SIZE": self.size, "ROWS": rows_per_program, **order.constants}
        constants |= {"LOG2_STEPS": log2_steps, "VECTOR": vector}
        return launch.bind(kernel, constants, num_warps, device, dtypes, -(-rows // rows_per_program), rows, *scalars)


class OfInput(OfRows):
    """The kernel of dx."""

    def launch(self, rows: int, weight_rows: int, device: torch.device, store_sums: bool = False) -> launch.Launch:
        """The launch for dy, x, weight, mean, rstd, the three terms of dx and both sums of each row."""
        fp32 = torch.float32
        dtypes = (self.dtype, self.dtype, self.weight_dtype, fp32, fp32, self.dtype, *(fp32,) * 4)
        return self.bind(cohere_layer_norm_backward, _WARPS, dtypes, rows, device, weight_rows, int(store_sums))


@dataclass(frozen=True)
class OfWeight:
    """The properties that the kernels of dweight are compiled for.

    Attributes:
        size: elements of a row.
        weight_rows: rows of the weight, as many as a token has.
        tokens: the fewest whose sum has this order.
        of_program: columns of a program.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    size: int
    weight_rows: int
    tokens: int
    of_program: int

    @classmethod
    def of(cls, dtype: torch.dtype, weight: torch.Tensor, tokens: int) -> "OfWeight":
        size, columns = weight.shape[-1], weight.numel()
        # The columns of a program have one row of the weight.
        of_row = size if columns > size else 0
        return cls(
            dtype,
            weight.dtype,
            size,
            columns // size,
            *kind_of(tokens, columns, torch.float32.itemsize, weight.device, _COLUMNS, of_row),
        )

    @property
    def columns(self) -> int:
        return self.size * self.weight_rows

    def sum(self, tokens: int, shape: tuple, device: torch.device, store_sum: bool = False) -> ColumnSum:
        """dweight, of the shape given, from dy, x, mean and rstd; `store_sum` as in `ColumnSum`."""
        fp32 = torch.float32
        return ColumnSum(
            cohere_layer_norm_sum_chains,
            {"HIDDEN_SIZE": self.size, "WEIGHT_ROWS": self.weight_rows, "TURNS": _TURNS[self.dtype.itemsize]},
            (self.dtype, self.dtype, fp32, fp32),
            tokens,
            self.columns,
            self.of_program,
            fp32.itemsize,
            shape,
            self.weight_dtype,
            device,
            store_sum=store_sum,
        )


@dataclass(eq=False)
class Backward:
    """The gradients of all calls of the same shapes, dtypes and device, whose tensors are dense.

    Args:
        of_input: None if dx is not needed.
        of_weight: None if dweight is not needed.
    """

    of_input: Optional[launch.Launch]
    of_weight: Optional[ColumnSum]
    empty_dx: Callable[[], torch.Tensor]

    def __call__(self, dy, x, weight, mean, rstd) -> Gradients:
        dx = dx_variance = dx_mean = dweight = None
        if self.of_input is not None:
            # rstd, which is fp32, stands for tensors that are not written.
            dx, others = self.empty_dx(), (rstd, rstd)
            if x.dtype == torch.float32:
                others = dx_variance, dx_mean = self.empty_dx(), self.empty_dx()
            self.of_input(dy, x, weight, mean, rstd, dx, *others)
        if self.of_weight is not None:
            (dweight,) = self.of_weight(dy, x, mean, rstd)
        return Gradients(dx, dx_variance, dx_mean, dweight)


def resolve(x, weight, owner: type, needs: tuple[bool, bool]) -> Optional[Backward]:
    """The gradients of a call in the forward kernel's domain; None if a kernel is not proved.

    Args:
        owner: the class of the replaced layer.
        needs: whether the gradients of x and of the weight are needed.
    """
    device, size = x.device, x.shape[-1]
    rows, weight_rows = x.numel() // size, weight.numel() // size
    of_input = OfInput(x.dtype, weight.dtype, size, row_class(rows))
    of_weight = OfWeight.of(x.dtype, weight, rows // weight_rows)
    if needs[1]:
        check_parts(rows // weight_rows, weight.numel(), torch.float32.itemsize, device)
    if needs[0] and not _proved(of_input, f"{of_input.rows} rows", _comparisons_of_dx, owner, device):
        return None
    if needs[1] and not _proved(
        of_weight, f"{of_weight.tokens} or more tokens", _comparisons_of_dweight, owner, device
    ):
        return None
    return Backward(
        of_input.launch(rows, weight_rows, device) if needs[0] else None,
        of_weight.sum(rows // weight_rows, weight.shape, device) if needs[1] else None,
        allocator(x.shape, contiguous_strides(x.shape), x.dtype, device),
    )


def tokens_of_every_kind(dtype: torch.dtype, weight: torch.Tensor) -> list[int]:
    """The fewest tokens of every kernel and proof of the weight's gradient, up to 16384."""
    kinds: dict[OfWeight, int] = {}
    for log2_tokens in range(15):
        kinds.setdefault(OfWeight.of(dtype, weight, 1 << log2_tokens), 1 << log2_tokens)
    return list(kinds.values())


# Proof


def _proved(kind, what: str, comparisons: Callable, owner: type, device) -> bool:
    where = f"activations {kind.dtype}, weight {kind.weight_dtype}, hidden size {kind.size}, {what}, in training"
    subject = proof.Subject(owner.forward, device, where, "weight.float() * (x - mean) * rsqrt(variance + eps)")
    key = ("gradients of Cohere's LayerNorm", functions_of(owner), kind, device)
    return proof.kernel_is_proved(key, subject, functools.partial(comparisons, kind, owner, device))


def _through_autograd(owner, x, weight, dy) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager's gradients of x and of the weight."""
    leaf, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.enable_grad():
        out = owner.forward(stand_in(owner, weight, PROOF_EPS), leaf.view_as(leaf))
        return torch.autograd.grad(out, (leaf, weight), dy)


def calls_of_proof(kind_rows: int) -> list[tuple[int, int, int, bool]]:
    """Of a proof for a row class: the number of each call, its rows, those of the weight, and whether it is the last of its kind.

    The first call is repeated with a weight of two rows, where there are two.
    """
    calls, rows = proof_calls(kind_rows)
    return [(0, rows, 2, False)][: rows > 1] + [(call, rows, 1, call == calls - 1) for call in range(calls)]


def _comparisons_of_dx(kind: OfInput, owner, device):
    """dx, and the row sums in it, in fp32, where another order of additions shows."""
    make = functools.partial(proof.normal, proof.generator(device, kind.size))
    for call, rows, weight_rows, is_last in calls_of_proof(kind.rows):
        x = spike(make(rows, kind.size) + make(rows, 1), call).to(kind.dtype)
        if is_last:  # Sums of subnormal numbers are exact in every order.
            subnormal_row(x)
        weight = make(weight_rows, kind.size).to(kind.weight_dtype)
        dy = spike(make(rows, kind.size), call + 1).to(kind.dtype)
        if weight_rows > 1:
            x, dy = (each.view(-1, weight_rows, kind.size) for each in (x, dy))
        else:
            (weight,) = weight
        mean, rstd = statistics(x, PROOF_EPS)
        terms = [torch.full_like(x, math.nan) for _ in range(3 if x.dtype == torch.float32 else 1)]
        d_rstd, d_mean = proof.unwritten(2, rstd.shape, device)
        others = terms[1:] or (rstd, rstd)
        kind.launch(rows, weight_rows, device, True)(dy, x, weight, mean, rstd, terms[0], *others, d_rstd, d_mean)
        sums = []
        formula(dy, x, weight, mean, rstd, True, False, sums)
        yield from zip(("the fp32 gradient of rstd", "the fp32 gradient of the mean"), (d_rstd, d_mean), sums)
        yield "the input's gradient", functools.reduce(torch.add, terms), _through_autograd(owner, x, weight, dy)[0]


def _comparisons_of_dweight(kind: OfWeight, owner, device):
    """dweight through autograd for few tokens, and the fp32 sum of all, where another order of additions shows.

    The last number of tokens has more turns, and ends within one.
    """
    make = functools.partial(proof.normal, proof.generator(device, kind.columns))
    shape = (kind.weight_rows, kind.size) if kind.weight_rows > 1 else (kind.size,)
    for tokens in sorted({min(kind.tokens, PROOF_ROWS), kind.tokens, 2 * kind.tokens + 3}):
        x, dy = ((make(tokens, *shape) + make(*(1,) * len(shape), 1)).to(kind.dtype) for _ in range(2))
        weight = make(*shape).to(kind.weight_dtype)
        mean, rstd = statistics(x, PROOF_EPS)
        total = torch.full(shape, math.nan, dtype=torch.float32, device=device)
        (found,) = kind.sum(tokens, shape, device, store_sum=True)(dy, x, mean, rstd, total=total)
        if tokens <= PROOF_ROWS:
            yield "the weight's gradient", found, _through_autograd(owner, x, weight, dy)[1]
        products = dy.to(torch.float32) * ((x.to(torch.float32) - mean) * rstd)
        expected = _weight_sum(products, shape)
        yield "the fp32 weight gradient", total, expected
        yield "the weight's gradient", found, expected.to(kind.weight_dtype)
