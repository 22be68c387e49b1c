"""The formulas of rotary position embedding in transformers' models, and their gradients."""

from dataclasses import dataclass, field
from typing import Callable

import torch

# Where the two numbers of a pair are, in a head or in cos and sin: elements i and i + half, or 2 i and 2 i + 1. cos and sin may
# have one number for both, in their first half or in the whole of half as many elements.
HALVES, NEIGHBOURS, FIRST_HALF, ONE_EACH = "halves", "neighbours", "first_half", "one_each"


def split(x: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second numbers of all pairs in the last dimension."""
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]) if layout == HALVES else (x[..., ::2], x[..., 1::2])


def _join(first, second, layout):
    if layout == HALVES:
        return torch.cat((first, second), dim=-1)
    return torch.stack((first, second), dim=-1).flatten(-2)


@dataclass(frozen=True, eq=False)
class RotaryFormula:
    """One of the formulas.

    Attributes:
        name: for operators.
        formula: for reports.
        eager: query and key in torch operations, as transformers' function.
        keeps_dtype: the formula computes in fp32 and rounds the output to the dtype of q.
        one_edge: it casts the input first, so that 16 bits get one gradient, computed in fp32.
        layout: of the pairs in a head, `HALVES` or `NEIGHBOURS`.
        table: of the pairs in cos and sin, `FIRST_HALF`, `ONE_EACH` or one of these.
        partial: cos may have fewer elements than a head. The rest of the head is passed on.
        chunked: the function chunks a head. An input of any dtype gets one gradient, of both chunks, without padding.
    """

    name: str
    formula: str
    keeps_dtype: bool = False
    one_edge: bool = False
    layout: str = HALVES
    table: str = HALVES
    partial: bool = False
    chunked: bool = False
    eager: Callable = field(init=False, repr=False)

    def __post_init__(self):
        def eager(q, k, cos, sin, unsqueeze_dim=1):
            cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
            return self.rotate(q, cos, sin), self.rotate(k, cos, sin)

        eager.__qualname__ = "apply_rotary_pos_emb"
        object.__setattr__(self, "eager", eager)

    def rotate(self, x, cos, sin) -> torch.Tensor:
        """x with its rotary embedding, with unsqueezed cos and sin."""
        if self.partial:
            size = cos.shape[-1]
            return torch.cat((self._rotated(x[..., :size], cos, sin), x[..., size:]), dim=-1)
        return self._rotated(x, cos, sin)

    def _rotated(self, x, cos, sin):
        if self.chunked:
            first, second = x.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        dtype = x.dtype
        if self.one_edge:
            x = x.to(torch.float32)
        cos, sin = self._tables(cos, sin)
        straight = x * cos
        first, second = split(x, self.layout)
        out = straight + _join(-second, first, self.layout) * sin
        return out.to(dtype) if self.keeps_dtype else out

    def _tables(self, *tables):
        """cos and sin as the formula multiplies by them, element by element."""
        if self.table == ONE_EACH:
            tables = [torch.cat((table, table), dim=-1) for table in tables]
        elif self.table == FIRST_HALF:
            tables = [table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1) for table in tables]
        return [table.to(torch.float32) for table in tables] if self.keeps_dtype else tables

    def has_one_edge(self, dtype: torch.dtype) -> bool:
        """Whether an input of this dtype gets one gradient; otherwise one for each path."""
        return self.partial or self.chunked or (self.one_edge and dtype != torch.float32)

    def differs_in(self, names: set[str]) -> int:
        """In how many operations the formula differs from a function of its kind that uses these names."""
        operations = {
            "stack": self.layout == NEIGHBOURS,
            "repeat_interleave": self.table == FIRST_HALF,
            "chunk": self.chunked,
            "float": self.keeps_dtype,
        }
        return sum(used != (name in names) for name, used in operations.items())

    def output_dtype(self, dtype: torch.dtype, table_dtype: torch.dtype) -> torch.dtype:
        """The output's dtype for inputs and tables of these."""
        return dtype if self.keeps_dtype else torch.promote_types(dtype, table_dtype)

    def rotary_dim(self, cos) -> int:
        """How many elements of a head are rotated."""
        return cos.shape[-1] * (2 if self.table == ONE_EACH else 1)

    def computes_in_fp32(self, step: str, dtype: torch.dtype) -> bool:
        """Whether a step of the kernel, for inputs of this dtype, rounds its result alone."""
        return self.keeps_dtype if step == "forward" else self.one_edge and dtype != torch.float32

    def gradient(self, dy, cos, sin, dtype) -> torch.Tensor:
        """The sum of `gradients`.

        The gradients of both parts of a head, padded with zeros, are added too.
        """
        size = cos.shape[-1] if self.partial else dy.shape[-1]
        halves, straight = self.gradients(dy[..., :size], cos, sin, torch.float32 if self.one_edge else dtype)
        rotated = (halves + straight).to(dtype)
        return torch.cat((rotated, dy[..., size:].to(dtype)), dim=-1) + 0.0 if self.partial else rotated

    def gradients(self, dy, cos, sin, dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Eager's gradients of an input of this dtype, in the order of arrival: of the halves, then of x * cos.

        The gradients of the halves, padded with zeros, arrive one by one. The order of these sums does not change the
        bits, since adding a zero changes at most the sign of a zero.

        Args:
            dy: the gradient of the output; of its rotated part, if the formula is `partial`.
            cos, sin: unsqueezed.
        """
        if self.keeps_dtype:
            dy = dy.to(torch.float32)
        cos, sin = self._tables(cos, sin)
        rotated = (dy * sin).to(dtype)
        size = rotated.shape[-1]
        if self.chunked:
            first, second = split(rotated, self.layout)
            return torch.cat((second, -first), dim=-1), (dy * cos).to(dtype)
        if self.layout == HALVES:
            places = (slice(size // 2, size, 1), slice(0, size // 2, 1))
        else:
            places = (slice(1, size, 2), slice(0, size, 2))
        first, second = split(rotated, self.layout)
        padded = [
            torch.ops.aten.slice_backward(
                part, input_sizes=rotated.shape, dim=-1, start=at.start, end=at.stop, step=at.step
            )
            for part, at in zip((-first, second), places)
        ]
        return padded[0] + padded[1], (dy * cos).to(dtype)


def _of_neighbours(name: str, formula: str, table: str, **more) -> RotaryFormula:
    return RotaryFormula(name, f"{formula}, of neighbours", layout=NEIGHBOURS, table=table, **more)


_PLAIN, _FP32_COMPUTE = "x * cos + rotate_half(x) * sin", "(x.float() * cos + rotate_half(x).float() * sin).to(dtype)"
_FP32 = "(x.float() * cos + rotate_half(x.float()) * sin).to(dtype)"
_PARTIAL = f"{_PLAIN} of the first part of x"
_CHUNKED = "(x1 * cos - x2 * sin, x2 * cos + x1 * sin), the chunks of x"
PLAIN = RotaryFormula("plain", _PLAIN)
FP32_COMPUTE = RotaryFormula("fp32_compute", _FP32_COMPUTE, keeps_dtype=True)
FP32 = RotaryFormula("fp32", _FP32, keeps_dtype=True, one_edge=True)
PARTIAL = RotaryFormula("partial", _PARTIAL, partial=True)
CHUNKED = RotaryFormula("chunked", _CHUNKED, table=ONE_EACH, chunked=True)
FORMULAS = {
    variant.name: variant
    for variant in (
        PLAIN,
        FP32_COMPUTE,
        FP32,
        PARTIAL,
        CHUNKED,
        _of_neighbours("partial_neighbours", _PARTIAL, FIRST_HALF, partial=True),
        _of_neighbours("partial_neighbours_whole", _PARTIAL, NEIGHBOURS, partial=True),
        _of_neighbours("neighbours", _PLAIN, FIRST_HALF),
        _of_neighbours("neighbours_fp32_compute", _FP32_COMPUTE, FIRST_HALF, keeps_dtype=True),
        _of_neighbours("neighbours_fp32_compute_whole", _FP32_COMPUTE, NEIGHBOURS, keeps_dtype=True),
        _of_neighbours("neighbours_fp32_whole", _FP32, NEIGHBOURS, keeps_dtype=True, one_edge=True),
    )
}
