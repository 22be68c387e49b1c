"""The memory layout of query and key, and how one launch covers it."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch

from ..core import launch
from ..core.calls import Outside
from ..core.layout import divider
from .rotary_formulas import FIRST_HALF, ONE_EACH, RotaryFormula

if launch.AVAILABLE:
    from ..kernels_src.rotary import rotary

# Bytes that a warp reads of a half of its heads: two accesses of 16 bytes per thread (H200), and one where some threads have
# none, since a half is no power of two (H100, 16 bits).
_BYTES_PER_WARP, _BYTES_OF_PADDED = 1024, 512
_MIN_HEADS_PER_PROGRAM = 8
_MAX_HEADS_PER_PROGRAM = 16
_MAX_HEAD_DIM = 1024


@dataclass(frozen=True)
class RotaryPlan:
    """Heads of one token per program, and warps per program."""

    heads_per_program: int
    num_warps: int


def launch_plan(head_dim: int, dtype: torch.dtype) -> RotaryPlan:
    """The plan for heads of this size; `dtype` is that of the inputs."""
    half = 1 << (head_dim // 2 - 1).bit_length()
    heads = _BYTES_PER_WARP // (half * dtype.itemsize)
    heads = min(max(heads, _MIN_HEADS_PER_PROGRAM), _MAX_HEADS_PER_PROGRAM)
    padded = head_dim != 2 * half and head_dim % 16 == 0 and dtype.itemsize == 2
    per_warp = _BYTES_OF_PADDED if padded else _BYTES_PER_WARP
    return RotaryPlan(heads, min(max(heads * half * dtype.itemsize // per_warp, 1), 8))


def place_of(unsqueeze_dim: int, dims: int) -> int:
    """The index, from 0, of the new dimension when a tensor of `dims` dimensions is unsqueezed."""
    return unsqueeze_dim if unsqueeze_dim >= 0 else unsqueeze_dim + dims + 1


def _steps(shape, strides, heads_dim) -> tuple[int, int, int]:
    """The strides over batch, tokens and heads (dimension `heads_dim`); 0 for dimensions of length 1."""
    steps = [stride if size != 1 else 0 for size, stride in zip(shape, strides)][:-1]
    head_step = steps.pop(heads_dim)
    return (*(0,) * (2 - len(steps)), *steps, head_step)


class Sizes(NamedTuple):
    """What a kernel is compiled for, besides dtypes: elements of a head, those that are rotated, and those per access."""

    head_dim: int
    rotary_dim: int
    unit: int

    def __str__(self):
        rotated = f", {self.rotary_dim} of them rotated" * (self.rotary_dim != self.head_dim)
        return f"heads of {self.head_dim}{rotated}"


@dataclass(frozen=True)
class Walk:
    """The layout of a call's tensors: strides over batch, tokens and heads, in elements."""

    batch: int
    tokens: int
    q_heads: int
    k_heads: int
    head_dim: int
    rotary_dim: int
    q: tuple[int, int, int]
    k: tuple[int, int, int]
    q_out: tuple[int, int, int]
    k_out: tuple[int, int, int]
    cos: tuple[int, int, int]
    sin: tuple[int, int, int]

    @property
    def unit(self) -> int:
        """The number of elements per access, up to eight."""
        half, passed = self.rotary_dim // 2, self.head_dim - self.rotary_dim
        return math.gcd(8, half, passed, *self.q, *self.k, *self.q_out, *self.k_out, *self.cos, *self.sin)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.head_dim, self.rotary_dim, self.unit)

    def launch(self, step: str, variant: RotaryFormula, dtypes, device: torch.device) -> launch.Launch:
        """The launch, to be called with q, k, cos, sin and the outputs. Raises Outside if it takes too many programs.

        Args:
            dtypes: of the inputs, of cos and of the outputs.
        """
        read, table, written = dtypes
        plan = launch_plan(self.head_dim, read)
        half, passed = self.rotary_dim // 2, self.head_dim - self.rotary_dim
        constants = {
            "STEP": step,
            "FP32_COMPUTE": variant.computes_in_fp32(step, read if step == "forward" else written),
            "HALF": half,
            "HALF_BLOCK": 1 << (half - 1).bit_length(),
            "PASSED": passed,
            "PASSED_BLOCK": 1 << (passed - 1).bit_length() if passed else 0,
            "LAYOUT": variant.layout,
            "TABLE": FIRST_HALF if variant.table == ONE_EACH else variant.table,
            "PADDED": not variant.chunked,
            "UNIT": self.unit,
            "HEADS": plan.heads_per_program,
        }
        q_groups, k_groups = (-(-heads // plan.heads_per_program) for heads in (self.q_heads, self.k_heads))
        programs = self.batch * self.tokens * (q_groups + k_groups)
        if programs > launch.MAX_PROGRAMS:
            raise Outside("more heads than a launch has programs for")
        steps = (*self.q, *self.k, *self.q_out, *self.k_out, *self.cos[:2], *self.sin[:2])
        steps = tuple([step // self.unit for step in steps])
        groups = q_groups + k_groups
        dividers = divider(self.tokens), divider(groups)
        scalars = (self.tokens, groups, *dividers, q_groups, self.q_heads, self.k_heads, *steps)
        dtypes = (read, read, table, table, *(written,) * 4)
        return launch.bind(rotary, constants, plan.num_warps, device, dtypes, programs, *scalars)


def walk_of(q, k, cos, sin, unsqueeze_dim, q_out_strides, k_out_strides, variant: RotaryFormula) -> Optional[Walk]:
    """The walk of these tensors; None if no kernel takes their layout."""
    dims, cos_dims = q.dim(), cos.dim()
    if k.dim() != dims or dims not in (3, 4) or not 2 <= cos_dims < dims or sin.dim() != cos_dims:
        return None
    place = place_of(unsqueeze_dim, cos_dims)
    if not 0 <= place < cos_dims:
        return None
    heads_dim = place + dims - 1 - cos_dims
    head_dim, rotary_dim = q.shape[-1], variant.rotary_dim(cos)
    others = [[size for dim, size in enumerate(x.shape) if dim != heads_dim] for x in (q, k)]
    if others[0] != others[1] or rotary_dim % 2 or not 2 <= rotary_dim <= head_dim <= _MAX_HEAD_DIM:
        return None
    if not q.numel() or not k.numel() or (rotary_dim != head_dim and not variant.partial):
        return None
    tables, rotated = [], torch.Size((*q.shape[:-1], cos.shape[-1]))
    for table in (cos, sin):
        table = table.unsqueeze(unsqueeze_dim)
        if table.shape[-1] != cos.shape[-1] or torch.broadcast_shapes(table.shape, rotated) != rotated:
            return None
        table = table.expand(rotated)
        steps = _steps(table.shape, table.stride(), heads_dim)
        if steps[2] or table.stride(-1) != 1:
            return None
        tables.append(steps)
    if q.stride(-1) != 1 or k.stride(-1) != 1 or q_out_strides[-1] != 1 or k_out_strides[-1] != 1:
        return None
    *leading, tokens = [size for dim, size in enumerate(q.shape[:-1]) if dim != heads_dim]
    return Walk(
        math.prod(leading),
        tokens,
        q.shape[heads_dim],
        k.shape[heads_dim],
        head_dim,
        rotary_dim,
        _steps(q.shape, q.stride(), heads_dim),
        _steps(k.shape, k.stride(), heads_dim),
        _steps(q.shape, q_out_strides, heads_dim),
        _steps(k.shape, k_out_strides, heads_dim),
        *tables,
    )
