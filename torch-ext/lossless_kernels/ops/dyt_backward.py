"""The gradients of dynamic tanh, with the bits of eager's autograd."""

import functools
import math
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

import torch
from torch.nn import functional

from ..core import launch, proof
from ..core.domain import allocator
from ..core.layout import contiguous_strides
from . import column_sum, full_sum
from .activation import all_inputs
from .column_sum import ColumnSum, kind_of
from .full_sum import FullSum, lengths_of_proof, order_of, sums_of_proof

if launch.AVAILABLE:
    from ..kernels_src.dyt_backward import dyt_backward, dyt_sum_chains


class Gradients(NamedTuple):
    input: Optional[torch.Tensor]
    alpha: Optional[torch.Tensor]
    weight: Optional[torch.Tensor]
    bias: Optional[torch.Tensor]


def formula(dy, input, alpha, weight, needs) -> Gradients:
    """The gradients in differentiable torch operations, as autograd computes them; `needs`: which, in order."""
    y = torch.tanh(input * alpha)
    d_scaled = torch.ops.aten.tanh_backward(dy * weight, y)
    return Gradients(
        d_scaled * alpha if needs[0] else None,
        (d_scaled * input).sum_to_size(alpha.shape) if needs[1] else None,
        (dy * y).sum_to_size(weight.shape) if needs[2] else None,
        dy.sum_to_size(weight.shape) if needs[3] else None,
    )


def terms(dy, input, alpha, weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The input's gradient, and the terms whose sums are those of alpha and of the weight."""
    y = torch.tanh(input * alpha)
    d_scaled = torch.ops.aten.tanh_backward(dy * weight, y)
    return d_scaled * alpha, d_scaled * input, dy * y


# Calls


# Bytes of a full sum's step for each warp of a program, and columns of a program of the column sums (H200).
_BYTES_OF_WARP = 2048
_COLUMNS = 64


def _in_one_block(*of_sum) -> bool:
    return order_of(*of_sum).blocks == 1


@dataclass(frozen=True)
class OfInput:
    """The properties that the kernels of dx and of alpha's gradient are compiled for.

    Attributes:
        size: elements of a row.
        stored: alpha's terms are stored, and ATen adds them up. Its sum has a single block: one multiprocessor would compute all.
    """

    dtype: torch.dtype
    size: int
    stored: bool

    @classmethod
    def of(cls, input: torch.Tensor) -> "OfInput":
        return cls(input.dtype, input.shape[-1], _in_one_block(input.numel(), input.dtype, input.device))

    def sum(self, rows: int, device: torch.device) -> Callable[..., torch.Tensor]:
        """alpha's gradient from dy, input, alpha, weight and dx, which is written; `total` gets it in fp32."""
        constants = {"SIZE": self.size, "STORED": self.stored}
        if self.stored:
            return _SumOfStored(self.dtype, constants, rows * self.size, device)
        return FullSum(
            dyt_backward,
            constants,
            (self.dtype,) * 5,
            (),
            rows * self.size,
            self.dtype,
            device,
            shape=(1,),
            of_warp=_BYTES_OF_WARP // self.dtype.itemsize,
        )


class _SumOfStored:
    """alpha's gradient from terms that the kernel stores and torch adds up; called like `FullSum`."""

    def __init__(self, dtype, constants: dict, elements: int, device):
        vector = 16 // dtype.itemsize
        constants = constants | {"HEAD": False, "TAIL": elements % vector != 0, "WIDTH": 32, "VECTOR": vector}
        programs = -(-elements // (32 * vector))
        self._launch = launch.bind(dyt_backward, constants, 1, device, (dtype,) * 6, programs, 0, elements)
        self._terms = allocator((elements,), (1,), dtype, device)

    def stored(self, *tensors: torch.Tensor) -> torch.Tensor:
        products = self._terms()
        self._launch(*tensors, products)
        return products

    def __call__(self, *tensors: torch.Tensor, total: Optional[torch.Tensor] = None) -> torch.Tensor:
        products = self.stored(*tensors)
        if total is not None:
            total.copy_(_full_sum(products))
        return products.sum_to_size((1,))


@dataclass(frozen=True)
class OfVectors:
    """The properties that the kernels of the weight's and the bias's gradients are compiled for.

    Attributes:
        size: elements of a row.
        rows: the fewest whose sum has this order.
        of_program: columns of a program.
    """

    dtype: torch.dtype
    size: int
    rows: int
    of_program: int

    @classmethod
    def of(cls, input: torch.Tensor) -> "OfVectors":
        size = input.shape[-1]
        rows = input.numel() // size
        return cls(input.dtype, size, *kind_of(rows, size, input.dtype.itemsize, input.device, _COLUMNS))

    def sums(self, rows: int, device: torch.device, store_sum: bool = False) -> ColumnSum:
        """Both gradients from dy, input and alpha; `store_sum` as in `ColumnSum`."""
        return ColumnSum(
            dyt_sum_chains,
            {"SIZE": self.size},
            (self.dtype,) * 3,
            rows,
            self.size,
            self.of_program,
            self.dtype.itemsize,
            (self.size,),
            self.dtype,
            device,
            sums=2,
            store_sum=store_sum,
        )


@dataclass(eq=False)
class Backward:
    """The gradients of all calls of the same shapes, dtype and device, whose tensors are dense.

    Args:
        of_input: None if neither the input's nor alpha's gradient is needed.
        of_vectors: None if neither the weight's nor the bias's is.
        empty: makes a tensor for dx.
        needs: which gradients are needed.
    """

    of_input: Optional[Callable[..., torch.Tensor]]
    of_vectors: Optional[ColumnSum]
    empty: Callable[[], torch.Tensor]
    needs: tuple[bool, ...]

    def __call__(self, dy, input, alpha, weight, bias=None) -> Gradients:
        """The gradients for a dense dy of the input's dtype."""
        if self.needs[3] and dy.data_ptr() % 16:  # ATen adds it up in another order.
            return formula(dy, input, alpha, weight, self.needs)
        found = [None] * 4
        if self.of_input is not None:
            found[0] = self.empty()
            found[1] = self.of_input(dy, input, alpha, weight, found[0])
        if self.of_vectors is not None:
            found[2:] = self.of_vectors(dy, input, alpha)
        return Gradients(*(gradient if need else None for need, gradient in zip(self.needs, found)))


# By `OfInput.stored`.
_BLOCKS = "sums of several blocks", "sums of one block"


def resolve(input: torch.Tensor, eager: Callable, needs: tuple[bool, ...]) -> Optional[Backward]:
    """The gradients of a call in the forward kernel's domain; None if a kernel is not proved.

    Args:
        eager: the forward pass in torch operations.
        needs: which gradients are needed.
    """
    device, rows = input.device, input.numel() // input.shape[-1]
    of_input, of_vectors = OfInput.of(input), OfVectors.of(input)
    of_input = of_input if needs[0] or needs[1] else None
    if of_input:
        full_sum.check_parts(input.numel(), input.dtype, device)
    of_vectors = of_vectors if needs[2] or needs[3] else None
    if of_vectors:
        column_sum.check_parts(rows, of_vectors.size, input.dtype.itemsize, device)
    if of_input and not _proved(of_input, _BLOCKS[of_input.stored], _comparisons_of_dx, eager, device):
        return None
    if of_vectors and not _proved(
        of_vectors, f"{of_vectors.rows} or more rows", _comparisons_of_vectors, eager, device
    ):
        return None
    return Backward(
        of_input and of_input.sum(rows, device),
        of_vectors and of_vectors.sums(rows, device),
        allocator(input.shape, contiguous_strides(input.shape), input.dtype, device),
        needs,
    )


# Proof


# No power of two, whose products are not rounded.
ALPHA = 0.7
# Threads of a block, where a full sum has several blocks.
_THREADS = 512


def sample(dtype: torch.dtype, size: int, device) -> tuple[torch.Tensor, ...]:
    """x, alpha, weight, bias and dy. x: all numbers of 16 bits, of fp32 as many, after a row of ones; the last three at random."""
    values = all_inputs(dtype, device)
    rows = -(-len(values) // size) + 1
    x = torch.ones(rows * size, dtype=dtype, device=device)
    x[-len(values) :] = values
    make = functools.partial(proof.normal, proof.generator(device, size))
    weight, bias = (make(size).to(dtype) for _ in range(2))
    alpha = torch.full((1,), ALPHA, dtype=dtype, device=device)
    return x.view(rows, size), alpha, weight, bias, make(rows, size).to(dtype)


def _proved(kind, what: str, comparisons: Callable, eager: Callable, device) -> bool:
    where = f"{kind.dtype}, rows of {kind.size} elements, {what}, gradients"
    return proof.kernel_is_proved(
        ("gradients of dyt", kind, device),
        proof.Subject(eager, device, where, "dyt"),
        functools.partial(comparisons, kind, eager, device),
    )


def _drawn(source: torch.Generator, kind, rows: int, device) -> tuple[torch.Tensor, ...]:
    """dy, x, alpha, weight and bias, finite. Numbers of 16 bits that are all of one size add up exactly in many orders."""
    dy = proof.random_like(torch.empty(rows, kind.size, dtype=kind.dtype, device=device), source, proof.WIDE)
    x, weight, bias = (
        proof.normal(source, *shape).to(kind.dtype) for shape in ((rows, kind.size), (kind.size,), (kind.size,))
    )
    return dy, x, torch.full((1,), ALPHA, dtype=kind.dtype, device=device), weight, bias


def _row_counts(kind: OfInput, device) -> list[int]:
    """Numbers of rows of the kind: of each order, with and without a rest of a vector."""
    vector = 16 // kind.dtype.itemsize
    lengths = lengths_of_proof(_THREADS, kind.dtype, device)
    counts = {-(-elements // kind.size) for elements in lengths}
    counts |= {each for count in counts for each in (count | 1, -(-count // vector) * vector)}
    # The fewest with and without a rest.
    counts |= {1, vector // math.gcd(kind.size, vector)}
    return sorted(each for each in counts if _in_one_block(each * kind.size, kind.dtype, device) == kind.stored)


def _full_sum(terms) -> torch.Tensor:
    return terms.sum(dtype=torch.float32)


def _column_sum(terms) -> torch.Tensor:
    return terms.sum(0, dtype=torch.float32)


def _through_autograd(eager, dy, *tensors) -> tuple[torch.Tensor, ...]:
    leaves = [each.requires_grad_() for each in tensors]
    with torch.enable_grad():
        found = torch.autograd.grad(eager(*leaves), leaves, dy)
    for each in tensors:
        each.requires_grad_(False)
    return found


def _comparisons_of_dx(kind: OfInput, eager, device):
    """dx of all numbers of 16 bits, and alpha's gradient of finite ones in fp32, where another order of additions shows."""
    x, alpha, weight, _, dy = sample(kind.dtype, kind.size, device)
    dx = torch.full_like(x, math.nan)
    found, expected = kind.sum(len(x), device), terms(dy, x, alpha, weight)
    if kind.stored:
        yield "alpha's terms", found.stored(dy, x, alpha, weight, dx).view(x.shape), expected[1]
    else:
        found(dy, x, alpha, weight, dx)
    yield "the input's gradient", dx, expected[0]

    source = proof.generator(device, kind.size)
    for rows in _row_counts(kind, device):
        for _ in range(1 if kind.stored else sums_of_proof(rows * kind.size)):
            dy, x, alpha, weight, bias = _drawn(source, kind, rows, device)
            dx, total = torch.full_like(x, math.nan), torch.full_like(alpha, math.nan, dtype=torch.float32)
            found = kind.sum(rows, device)(dy, x, alpha, weight, dx, total=total)
            yield "alpha's gradient in fp32", total[0], _full_sum(terms(dy, x, alpha, weight)[1])
        expected = _through_autograd(eager, dy, x, alpha, weight, bias)
        yield "the input's gradient", dx, expected[0]
        yield "alpha's gradient", found, expected[1]


def _comparisons_of_vectors(kind: OfVectors, eager, device):
    """Both gradients in fp32, where another order of additions and another term show, and through autograd.

    The last number of rows has more turns, and ends within one.
    """
    source = proof.generator(device, kind.size)
    least, most = kind.rows, 2 * kind.rows + 3

    def in_fp32(dy, x, alpha):
        total = torch.full((2, kind.size), math.nan, dtype=torch.float32, device=device)
        found = kind.sums(len(x), device, store_sum=True)(dy, x, alpha, total=total)
        for what, ours, theirs in zip(("weight", "bias"), total, (terms(dy, x, alpha, alpha)[2], dy)):
            yield f"the {what}'s gradient in fp32", ours, _column_sum(theirs)
        return found

    # All numbers of 16 bits. Those of a column are neighbours: the terms are of one size, so that none hides another.
    x, alpha, _, _, dy = sample(kind.dtype, kind.size, device)
    rest = -len(x) % most
    x = functional.pad(x.view(kind.size, -1).t(), (0, 0, 0, rest), value=1.0)
    dy = functional.pad(dy, (0, 0, 0, rest))
    for first in range(0, len(x), most):
        # As all gradients' do, copies begin at a multiple of 16 bytes.
        yield from in_fp32(
            *(each[first : first + most].clone(memory_format=torch.contiguous_format) for each in (dy, x)), alpha
        )
    for rows in sorted({least, most}):
        dy, x, alpha, weight, bias = _drawn(source, kind, rows, device)
        found = yield from in_fp32(dy, x, alpha)
        expected = _through_autograd(eager, dy, x, alpha, weight, bias)[2:]
        yield from zip(("the weight's gradient", "the bias's gradient"), found, expected)
