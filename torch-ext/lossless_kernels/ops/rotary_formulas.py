"""The formulas of rotary position embedding in transformers' models, and their gradients."""

import functools
from dataclasses import dataclass
from typing import Callable

import torch


def _rotate(x, cos, sin):
    straight = x * cos
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return straight + torch.cat((-second, first), dim=-1) * sin


def _rotate_in_fp32(x, cos, sin):
    return _rotate(x, cos.to(torch.float32), sin.to(torch.float32)).to(x.dtype)


def _rotate_fp32(x, cos, sin):
    return _rotate_in_fp32(x.to(torch.float32), cos, sin).to(x.dtype)


def _eager_function(rotate):
    def eager(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    eager.__qualname__ = "apply_rotary_pos_emb"
    return eager


@dataclass(frozen=True)
class RotaryFormula:
    """One of the formulas.

    Attributes:
        name: for operators.
        formula: for reports.
        rotate: `rotate(x, cos, sin)` in torch operations, with unsqueezed cos and sin.
        eager: query and key, as transformers' function.
        keeps_dtype: the formula computes in fp32 and rounds the output to the dtype of q.
        one_edge: it casts the input first, so that 16 bits get one gradient, computed in fp32.
    """

    name: str
    formula: str
    rotate: Callable
    eager: Callable
    keeps_dtype: bool
    one_edge: bool = False

    @classmethod
    def of(cls, name, formula, rotate, keeps_dtype, one_edge=False):
        return cls(name, formula, rotate, _eager_function(rotate), keeps_dtype, one_edge)

    def has_one_edge(self, dtype: torch.dtype) -> bool:
        """Whether an input of this dtype gets one gradient; otherwise one for each path."""
        return self.one_edge and dtype != torch.float32

    def computes_in_fp32(self, step: str, dtype: torch.dtype) -> bool:
        """Whether a step of the kernel, for inputs of this dtype, rounds its result alone."""
        return self.keeps_dtype if step == "forward" else self.has_one_edge(dtype)

    def gradient(self, dy, cos, sin, dtype) -> torch.Tensor:
        """The sum of `gradients`."""
        halves, straight = self.gradients(dy, cos, sin, torch.float32 if self.one_edge else dtype)
        return (halves + straight).to(dtype)

    def gradients(self, dy, cos, sin, dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Eager's gradients of an input of this dtype, in the order of arrival: of the halves, then of x * cos.

        The gradients of the halves, padded with zeros, arrive one by one. The order of these sums does not change the
        bits, since adding a zero changes at most the sign of a zero.

        Args:
            dy: the gradient of the output.
            cos, sin: unsqueezed.
        """
        if self.keeps_dtype:
            dy, cos, sin = (tensor.to(torch.float32) for tensor in (dy, cos, sin))
        halves = (dy * sin).to(dtype)
        size = halves.shape[-1]
        pad = functools.partial(torch.ops.aten.slice_backward, input_sizes=halves.shape, dim=-1, step=1)
        second = pad(-halves[..., : size // 2], start=size // 2, end=size)
        first = pad(halves[..., size // 2 :], start=0, end=size // 2)
        return second + first, (dy * cos).to(dtype)


PLAIN = RotaryFormula.of("plain", "x * cos + rotate_half(x) * sin", _rotate, keeps_dtype=False)
FP32_COMPUTE = RotaryFormula.of(
    "fp32_compute", "(x.float() * cos + rotate_half(x).float() * sin).to(dtype)", _rotate_in_fp32, keeps_dtype=True
)
FP32 = RotaryFormula.of(
    "fp32", "(x.float() * cos + rotate_half(x.float()) * sin).to(dtype)", _rotate_fp32, keeps_dtype=True, one_edge=True
)
FORMULAS = {variant.name: variant for variant in (PLAIN, FP32_COMPUTE, FP32)}
