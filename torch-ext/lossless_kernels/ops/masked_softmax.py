"""Softmax of attention scores, scaled and masked, with the bits of eager's operations: outputs and gradients."""

import functools
import math
import struct
from dataclasses import dataclass, replace
from itertools import chain
from typing import Callable, Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ..core import launch, operators, plans, proof
from ..core import softmax as aten
from ..core.calls import Calls, Outside
from ..core.declarations import TUNING
from ..core.domain import (
    FLOAT_DTYPES,
    PLAIN_TYPES,
    allocator,
    are_as_saved,
    are_ours,
    are_plain,
    check_floating,
    gradients_apart,
    is_traced_plainly,
    layouts_if_hooked,
    runs_kernels,
)
from ..core.layout import contiguous_strides, divider, row_levels
from ..core.torch_internals import apply_of, dispatch_modes, forward_ad
from .softmax import LONG_LENGTHS, SoftmaxPlan, has_long_warps, softmax, with_small_terms
from .softmax import Kind as KindOfRows
from .softmax import _formula as eager_gradient

if launch.AVAILABLE:
    from ..kernels_src import masked_softmax as kernels


def masked_softmax(scores: torch.Tensor, mask: Optional[torch.Tensor] = None, scale: float = 1.0) -> torch.Tensor:
    """Softmax of attention scores: bit for bit what transformers' `eager_attention_forward` computes of them.

    `softmax(scores * scale + mask, dim=-1, dtype=torch.float32).to(scores.dtype)`. Product and sum are rounded to the dtype
    of their operands. A scale of 1.0 multiplies nothing, and without a mask nothing is added.

    Args:
        scores: `[batch, heads, queries, keys]`, or any other shape, of a real floating dtype.
        mask: additive, such as `[batch, 1, queries, keys]`, and not boolean; it is broadcast to the scores.
        scale: a number.

    Returns:
        A tensor of the shape and dtype of scores, with the strides that eager returns.

    Raises:
        TypeError: `scores` is no tensor or not of a real floating dtype, `mask` is boolean, or `scale` is no number.
        RuntimeError: the mask cannot be broadcast to the scores.

    The kernels run for contiguous fp32, fp16 and bf16 scores on CUDA. The mask has their dtype, contiguous rows of as many
    keys, and needs no gradient. Two numbers a row, scores and mask are kept for the backward pass, and may not be changed
    before it. Everything else is computed by the operations of the formula, their softmax by `softmax`. Under torch.compile
    autograd refuses to keep a mask that was made in inference mode.
    """
    check_floating("scores", scores)
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
        raise TypeError("mask: expected numbers to add, such as 0 and -inf, found torch.bool")
    if not isinstance(scale, (int, float, torch.Tensor)):
        raise TypeError(f"scale: expected a number, found {scale!r}")
    return softmax_of_scores(scores, mask, scale)


def softmax_of_scores(scores, mask, scale) -> torch.Tensor:
    """`masked_softmax` of what an attention function passes: eager adds a mask of any dtype."""
    out = replacement(scores, mask, scale)
    return eager_masked_softmax(scores, mask, scale, softmax) if out is None else out


def eager_masked_softmax(scores, mask=None, scale=1.0, softmax=functional.softmax) -> torch.Tensor:
    """The formula in torch operations."""
    return softmax(_combined(scores, mask, scale), dim=-1, dtype=torch.float32).to(scores.dtype)


def _combined(scores, mask, scale):
    if not (isinstance(scale, (int, float)) and scale == 1.0):
        scores = scores * scale
    return scores if mask is None else scores + mask


# Calls


TUNING.update(dict.fromkeys(("masked_softmax", "masked_softmax_backward"), SoftmaxPlan))


@dataclass(frozen=True)
class Kind:
    """The properties that a kernel is compiled for.

    Attributes:
        rows: the kind of the fp32 softmax of the same rows. Its unit is 16 bytes of scores and mask, or 1.
        masked: there is a mask.
        narrow: the scale is a number of the scores' 16-bit dtype.
    """

    rows: KindOfRows
    masked: bool
    narrow: bool

    @classmethod
    def of(
        cls,
        of_gradient: bool,
        dtype: torch.dtype,
        size: int,
        multiple: int,
        masked: bool,
        scale: float,
        long_warps: bool = False,
    ) -> "Kind":
        """The kind for rows of `size` elements; all strides, and the size, are multiples of `multiple`.

        Args:
            long_warps: as `has_long_warps` returns it.
        """
        rows = KindOfRows.of(of_gradient, dtype, torch.float32, size, size, written=dtype, long_warps=long_warps)
        unit = 16 // dtype.itemsize
        unit = 1 if multiple % unit else unit
        if rows.order.kind == aten.LOOP and unit == 1 and not rows.head:  # Rows without vectors take more registers.
            rows = replace(rows, steps=0)
        return cls(replace(rows, unit=unit), masked, _is_number_of(scale, dtype))

    def planned(self, size: int, rows: int, device: torch.device) -> "Kind":
        """The kind with the launch configuration that is tuned for it on this GPU."""
        return replace(self, rows=self.rows.planned("masked_softmax", self.rows.dtype, size, rows, device))


def _is_number_of(scale: float, dtype: torch.dtype) -> bool:
    """Whether the scale is a number of this dtype, and the dtype has 16 bits. Dispatch modes would see torch's operations."""
    try:
        if dtype == torch.float16:
            return struct.unpack("<e", struct.pack("<e", scale))[0] == scale
        bits = struct.pack("<f", scale)
        return dtype == torch.bfloat16 and bits[:2] == b"\0\0" and struct.unpack("<f", bits)[0] == scale
    except OverflowError:
        return False


def _max_registers(warps, longest, device) -> Optional[int]:
    """The most registers of a thread for gradients of 16 bits. Of 16 warps longer rows, and older GPUs, would spill more."""
    if warps == 16:
        return 64 if longest <= 1 << 14 and (plans.gpu(device).compute_capability or 9) >= 9 else None
    return 80 if warps == 8 else None


@dataclass(frozen=True)
class _Walk:
    """How programs find rows in scores and mask, whose shared rows are neighbours; see `row_levels`."""

    rows: int
    size: int
    levels: tuple[int, ...]
    of_scores: tuple[int, ...]
    of_mask: tuple[int, ...]

    @classmethod
    def of(cls, shape, mask_strides) -> Optional["_Walk"]:
        """The walk for scores of this shape; the mask is expanded to it."""
        longer = [dim for dim, size in enumerate(shape[:-1]) if size != 1]
        order = sorted(longer, key=lambda dim: mask_strides[dim] == 0)
        found = row_levels(shape, order, contiguous_strides(shape), mask_strides)
        if found is None:
            return None
        _, inner, middle, offsets = found
        return cls(math.prod(shape[:-1]), shape[-1], (inner, middle), *offsets)

    @property
    def multiple(self) -> int:
        return math.gcd(self.size, *self.of_scores, *self.of_mask)

    def bind(self, kind: Kind, scale: float, device: torch.device) -> launch.Launch:
        """The launch for scores, output, statistics; or dy, scores, statistics, dx; and the mask, if there is one."""
        of_rows, (rows_per_program, warps) = kind.rows, kind.rows.program
        order, unit = of_rows.order, of_rows.unit
        names = ["masked_softmax", "backward" if of_rows.of_gradient else "forward"]
        max_registers = None
        if order.kind == aten.WARP:
            constants = of_rows.constants_of_warp
        elif of_rows.steps:
            names.append("of_block")
            if of_rows.of_gradient and of_rows.dtype.itemsize == 2 and unit > 1:
                # One more program runs at a time then (H200). Rows that are not read by vectors would spill more.
                max_registers = _max_registers(warps, of_rows.longest, device)
            vector, head = of_rows.tile // order.threads, order.vector if of_rows.head else 0
            constants = {"STEPS": of_rows.steps, "THREADS": order.threads, "VECTOR": vector, "UNIT": unit}
            constants |= {"IN_SEQUENCE": order.in_sequence} if of_rows.of_gradient else {"HEAD": head}
        else:
            names.append("of_long_rows")
            warps = max(order.threads // 64, 4) if of_rows.of_gradient else _LOOP_WARPS
            constants = {"THREADS": order.threads, "VECTOR": order.vector, "HEAD": of_rows.head, "UNIT": unit}
        kernel = getattr(kernels, "_".join(names))
        dtype = of_rows.dtype
        dtypes = (dtype, dtype, torch.float32, dtype)[: 3 + of_rows.of_gradient] + (dtype,) * kind.masked
        strides = [stride // unit for stride in (*self.of_scores, *self.of_mask)]
        scalars = self.rows, self.size // unit, *self.levels, *map(divider, self.levels), *strides, scale
        programs = -(-self.rows // rows_per_program)
        return launch.bind(
            kernel,
            {**constants, "MASKED": kind.masked, "NARROW": kind.narrow},
            warps,
            device,
            dtypes,
            programs,
            *scalars,
            max_registers=max_registers,
        )


@dataclass(eq=False)
class _Call:
    """A call resolved for its tensors' layouts: scores and, if there is one, mask.

    Args:
        backward: None without gradients.
        empty: allocates output or gradient.
        statistics: allocates each row's maximum and sum.
    """

    forward: launch.Launch
    backward: Optional[launch.Launch]
    scale: float
    empty: Callable[[], torch.Tensor]
    statistics: Callable[[], torch.Tensor]

    def __call__(self, *tensors):
        return self.launched(*tensors)[0] if self.backward is None else _apply(self, *tensors)

    def launched(self, scores, *mask) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the statistics."""
        out, statistics = self.empty(), self.statistics()
        (self.forward.call_4 if mask else self.forward.call_3)(scores, out, statistics, *mask)
        return out, statistics

    def gradient(self, dy, scores, statistics, *mask) -> torch.Tensor:
        dx = self.empty()
        (self.backward.call_5 if mask else self.backward.call_4)(dy.contiguous(), scores, statistics, dx, *mask)
        return dx

    def gradient_alone(self, dy, scores, *mask) -> torch.Tensor:
        """The gradient without statistics from the forward pass."""
        return self.gradient(dy, scores, self.launched(scores, *mask)[1], *mask)


def replacement(scores, mask=None, scale=1.0) -> Optional[torch.Tensor]:
    """The output from the kernel; None if other operations must compute it."""
    if is_dynamo_compiling():
        return _compiled(scores, mask, scale)
    if type(scale) is not float or not (mask is None or type(mask) in PLAIN_TYPES):
        return proof.record_refusal(eager_masked_softmax, "a mask that is no plain tensor, or a scale that is no float")
    tensors = (scores,) if mask is None else (scores, mask)
    grad = is_grad_enabled()
    subject = (grad, scale, len(tensors))
    recent = _calls.recent.get(subject)
    if recent is not None:
        same, compute = recent
        if (
            type(scores) in PLAIN_TYPES
            and not scores.is_nested
            and not (mask is not None and mask.is_nested)
            and same(*tensors)
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return compute(*tensors)
    needs_grad = grad and scores.requires_grad
    if not are_ours(scores, tensors[-1], needs_grad):
        return proof.record_refusal(eager_masked_softmax, proof.NOT_PLAIN)
    if mask is not None and (grad and mask.requires_grad):
        return proof.record_refusal(eager_masked_softmax, "a mask that needs a gradient")
    if needs_grad and any(tensor.is_inference() for tensor in tensors):
        return proof.record_refusal(eager_masked_softmax, proof.INFERENCE_TENSORS)
    call = _calls.find(eager_masked_softmax, (needs_grad, scale), tensors, needs_grad, scale)
    return _calls.run(subject, call, (), tensors)


def _resolve(scores, *others) -> Optional[_Call]:
    *mask, needs_grad, scale = others
    dtype, device, shape = scores.dtype, scores.device, scores.shape
    if dtype not in FLOAT_DTYPES or not runs_kernels(device):
        raise Outside(f"scores {dtype} on {device}")
    if torch.version.hip is not None:
        raise Outside(aten.CUDA_ONLY)
    if not scores.numel() or not scores.dim() or scores.stride() != contiguous_strides(shape):
        raise Outside("scores that are not contiguous, or empty")
    # A call is found again by its scale, and 0.0 equals -0.0.
    if not math.isfinite(scale) or scale == 0.0 or (scale == 1.0 and not mask):
        raise Outside("neither a mask nor a scale, or one that is zero or not finite")
    mask_strides = (0,) * scores.dim()
    for each in mask:
        if (each.dtype, each.device) != (dtype, device) or each.shape[-1:] != shape[-1:]:
            raise Outside("a mask of another dtype, device or number of keys")
        if each.stride(-1) != 1 and shape[-1] != 1:
            raise Outside("a mask whose rows are not contiguous")
        if each.dim() > len(shape) or any(size not in (1, of) for size, of in zip(each.shape[::-1], shape[::-1])):
            raise Outside("a mask that is not broadcast to the scores")
        mask_strides = each.expand(shape).stride()
    walk = _Walk.of(shape, mask_strides)
    if walk is None:
        raise Outside("a mask in another memory order")
    if walk.rows > _MAX_ROWS or walk.size > _MAX_SIZE:
        raise Outside("too many rows, or too long ones")
    of_call = walk.size, walk.multiple, bool(mask), scale, has_long_warps(dtype, device)
    kinds = [Kind.of(each, dtype, *of_call).planned(walk.size, walk.rows, device) for each in (False, True)]
    if not all(_proved(kind, device) for kind in kinds[: 1 + needs_grad]):
        return None
    return _Call(
        walk.bind(kinds[0], scale, device),
        walk.bind(kinds[1], scale, device) if needs_grad else None,
        scale,
        allocator(shape, contiguous_strides(shape), dtype, device),
        allocator((walk.rows, 2), (2, 1), torch.float32, device),
    )


# Warps of a program that reads a row of scores three times. A gradient's has half as many as ATen's block (H200).
_LOOP_WARPS = 8
# The number of the last program's last row is an int32.
_MAX_ROWS = _MAX_SIZE = 1 << 30
_calls = Calls(_resolve)


def _formula_gradient(dy, scores, mask, scale) -> torch.Tensor:
    """The scores' gradient by autograd, differentiable if gradients are enabled."""
    return gradients_apart(lambda scores: eager_masked_softmax(scores, mask, scale), (scores,), dy)[0]


class MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *tensors):
        out, statistics = call.launched(*tensors)
        if dispatch_modes():  # A mode sees the operations; what is saved is the same.
            out = eager_masked_softmax(*tensors, scale=call.scale)
        kept = statistics, *tensors
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.layouts = call, layouts_if_hooked(*kept)
        return out

    @staticmethod
    def backward(ctx, dy):
        kept = statistics, scores, *mask = ctx.saved_tensors
        dx = None
        if dy is not None:  # If the output was unused, its gradient is undefined.
            # With create_graph the gradient is differentiated in turn.
            plain = all(are_plain(dy, each) for each in kept)
            if not is_grad_enabled() and plain and are_as_saved(ctx.layouts, *kept):
                dx = ctx.call.gradient(dy, scores, statistics, *mask)
            else:
                dx = _formula_gradient(dy, scores, mask[0] if mask else None, ctx.call.scale)
        return None, dx, *[None for _ in mask]


_apply = apply_of(MaskedSoftmax)


# Proof


def _proved(kind: Kind, device) -> bool:
    """Whether the kernel of this kind is proved: all lengths of a kind have the same order."""
    rows, mask = kind.rows, "a mask" if kind.masked else "no mask"
    what = "gradient" if rows.of_gradient else "output"
    mask += ", a scale of this dtype" if kind.narrow else ""
    length = f"up to {rows.longest}" if rows.steps or rows.order.kind == aten.WARP else "many"
    return proof.kernel_is_proved(
        ("masked softmax", kind, device),
        proof.Subject(
            eager_masked_softmax,
            device,
            f"{rows.dtype}, {mask}, rows of {length} elements, {what}",
            "masked_softmax",
        ),
        functools.partial(_gradient_comparisons if rows.of_gradient else _comparisons, kind, device),
    )


# Scales by which products are rounded. The second is a number of both 16-bit dtypes.
_SCALES = (0.7, 179 / 256)
# Of the fp32 softmax, in which another order of additions shows in many quotients of a row.
_ELEMENTS, _ROWS_OF_BLOCKS = 1 << 16, 128
# What a sum over 1024 threads adds up inside a thread hardly shows: in half of a block's rows the terms of one thread
# are so far above the others.
_APART = 12.0
_GRADIENT_ELEMENTS, _GRADIENT_ROWS = 1 << 22, 252
_SMALL_TERM = 2.0**-115
# Rows of loops: the shortest, and the longest of those with fewer threads.
_SHORTEST_LOOP, _FEW_THREADS = 1025, 2055


def _sizes(kind: Kind, long_warps: bool = False) -> list[int]:
    """The shortest and the longest row of a kind; of one without a longest, a long one. `long_warps`: as in `Kind.of`."""
    rows = kind.rows
    if rows.order.kind == aten.WARP:
        first, last = (rows.longest // 2 + 1 if rows.steps else 1), [range(rows.longest, 0, -1)]
    elif rows.steps:
        first = max((rows.steps - 1) * rows.tile - rows.before, _SHORTEST_LOOP)
        last = [range(rows.longest, 0, -1)]
    else:
        first, last = _SHORTEST_LOOP, [LONG_LENGTHS, range(_FEW_THREADS, _SHORTEST_LOOP - 1, -1)]

    def fits(size):
        if size % rows.unit:
            return False
        multiple, scale = _multiple(kind, size), _SCALES[kind.narrow]
        of_rows = size, multiple, kind.masked, scale, long_warps
        found = Kind.of(rows.of_gradient, rows.dtype, *of_rows)
        return found == replace(kind, rows=replace(rows, plan=None, few=False))

    shortest = next(filter(fits, range(first, LONG_LENGTHS.start)))
    return sorted({shortest, next(filter(fits, chain(*last)), shortest)})


def _multiple(kind, size):
    """What a proof's rows are multiples of. Between those of a mask there are gaps of a unit."""
    return math.gcd(size, kind.rows.unit) if kind.masked else size


def _small(is_block, rows, device):
    """Which of a sample's rows have a small term: of blocks every other pair, of warps those of the first programs."""
    row, queries = torch.arange(rows, device=device), rows // 6
    return row % 4 > 1 if is_block else (row < rows // 2) & (row % queries < queries // 2)


def _sample(kind, device, source, values, zero=None):
    """Scores [2, 3, queries, size] and a mask for the three, whose sum is `values`; and how programs walk.

    Args:
        zero: of each row the element for which the mask is 0.
    """
    (count, size), dtype = values.shape, kind.rows.dtype
    values, mask = values.view(2, 3, count // 6, size), []
    if kind.masked:
        # No access can read more than a unit.
        there = proof.normal(source, 2, 1, count // 6, size + kind.rows.unit)
        mask = [there.to(dtype)[..., :size]]
        if zero is not None:
            mask[0].scatter_(3, zero.view(2, 3, -1).transpose(1, 2)[:, None], 0.0)
        values = values - mask[0].float()
        mask[0][:, :, 0, size // 2] = torch.finfo(dtype).min
    scores = (values / _SCALES[kind.narrow]).to(dtype)
    return scores, mask, _Walk.of(scores.shape, mask[0].expand(scores.shape).stride() if mask else (0,) * 4)


def _comparisons(kind, device):
    """The output, and the fp32 softmax that the statistics lead to."""
    source, is_block = proof.generator(device, kind.rows.steps), kind.rows.order.kind != aten.WARP
    scale = _SCALES[kind.narrow]
    for size in _sizes(kind, has_long_warps(kind.rows.dtype, device)):
        rows = max(_ELEMENTS // size, _ROWS_OF_BLOCKS if is_block else 0) // 6 * 6 + 6
        values = proof.normal(source, rows, size)
        if is_block:
            lane = aten.lanes(kind.rows.order, rows, size, 0, device)[::2]
            values[::2].add_(torch.where(lane == lane[:, size // 2, None], _APART, 0.0))
        with_small_terms(values, _small(is_block, rows, device), kind.rows.dtype)
        values[-1], values[-2], values[-3], values[-4, 0] = -math.inf, math.inf, -0.0, math.nan
        values[-5, -1], values[-6, 0] = math.inf, -math.inf
        scores, mask, walk = _sample(kind, device, source, values)
        out, statistics = (
            torch.full_like(scores, math.nan),
            torch.full((rows, 2), math.nan, dtype=torch.float32, device=device),
        )
        walk.bind(kind, scale, device)(scores, out, statistics, *mask)
        x = _combined(scores, *mask or (None,), scale)
        expected = functional.softmax(x, dim=-1, dtype=torch.float32)
        yield "the output", out, expected.to(out.dtype)
        # Programs take the three rows of a mask's row one after the other.
        largest, total = (
            each.view(2, -1, 3, 1).transpose(1, 2) if mask else each.view(2, 3, -1, 1) for each in statistics.t()
        )
        yield "the fp32 softmax", torch.exp(x.float() - largest) / total, expected


def _gradient_comparisons(kind, device):
    """With statistics that make any numbers of the softmax, and with those of the forward pass.

    In half of the rows one product is nearly the sum of all, so that the difference shows the sum's last bits. No
    softmax returns such an output; the gradient's formula does not need one that does.
    """
    source, dtype, masked = proof.generator(device, kind.rows.steps), kind.rows.dtype, kind.masked
    scale = _SCALES[kind.narrow]
    for size in _sizes(kind, has_long_warps(kind.rows.dtype, device)):
        rows = max(min(_GRADIENT_ROWS, _GRADIENT_ELEMENTS // size) // 6, 2) * 6
        y = proof.uniform(source, rows, size) / size
        dy = proof.normal(source, rows, size)
        dy[::2] *= size**0.5 / 256
        at = torch.randint(size, (rows, 1), device=device, generator=source)
        small, after = _small(kind.rows.order.kind != aten.WARP, rows, device)[:, None], (at + 1) % size
        y.scatter_(1, after, torch.where(small, _SMALL_TERM, y.gather(1, after)))
        y.scatter_(1, at, 1.0)
        dy[::2].scatter_(1, at[::2], 128 + 127 * proof.uniform(source, rows // 2, 1))
        dy[1], dy[3], dy[5, 0], dy[7, -1] = -0.0, 0.0, math.inf, math.nan
        scores, mask, walk = _sample(kind, device, source, y.log(), at)
        dy, x = dy.view_as(scores).to(dtype), _combined(scores, *mask or (None,), scale)
        of_call = size, walk.multiple, masked, scale, has_long_warps(dtype, device)
        kinds = (Kind.of(False, dtype, *of_call), kind)
        empty = functools.partial(torch.full_like, scores, math.nan)
        statistics = torch.tensor([0.0, 1.0], dtype=torch.float32, device=device).repeat(rows, 1)
        call = _Call(*(walk.bind(each, scale, device) for each in kinds), scale, empty, statistics.clone)
        expected = eager_gradient(dy.float(), torch.exp(x.float()), dtype) * scale
        yield "the scores' gradient", call.gradient(dy, scores, statistics, *mask), expected
        expected = _formula_gradient(dy, scores, *mask or (None,), scale)
        yield "the scores' gradient", call.gradient_alone(dy, scores, *mask), expected


# torch.compile


def _find(scores, mask, scale, needs_grad=False):
    tensors = (scores,) if mask is None else (scores, mask)
    return _calls.find(eager_masked_softmax, (needs_grad, scale), tensors, needs_grad, scale)


@operators.register("masked_softmax", _find)
def _masked_softmax_op(scores: torch.Tensor, mask: Optional[torch.Tensor], scale: float) -> torch.Tensor:
    return eager_masked_softmax(scores, mask, scale)


def _find_gradient(dy, scores, mask, scale):
    call = _find(scores, mask, scale, True)
    return None if call is None else call.gradient_alone


@operators.register("masked_softmax_backward", _find_gradient)
def _masked_softmax_backward_op(
    dy: torch.Tensor, scores: torch.Tensor, mask: Optional[torch.Tensor], scale: float
) -> torch.Tensor:
    y = functional.softmax(_combined(scores, mask, scale), dim=-1, dtype=torch.float32)
    dx = eager_gradient(dy.float(), y, scores.dtype)
    return dx if scale == 1.0 else dx * scale


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _op_gradient(ctx, dy):
    return _masked_softmax_backward_op(dy, *ctx.saved_tensors, ctx.scale), None, None


torch.library.register_autograd(_masked_softmax_op, _op_gradient, setup_context=_setup_context)


def _compiled(scores, mask, scale) -> Optional[torch.Tensor]:
    """`replacement` while torch.compile traces: the registered op, or None to trace the formula's operations.

    Proofs wait until the op runs, since a row's length may be symbolic here. Without a proof the op computes the formula.
    The backward pass computes the rows' statistics again: an op without a kernel has none.
    """
    if scores.dtype not in FLOAT_DTYPES or type(scale) is not float or scores.dim() == 0:
        return None
    if mask is not None:
        if mask.dtype != scores.dtype or (is_grad_enabled() and mask.requires_grad):
            return None
        # Eager adds up the gradients of scores that the mask broadcasts before it scales them.
        if mask.dim() > scores.dim() or any(
            size not in (1, of) for size, of in zip(mask.shape[::-1], scores.shape[::-1])
        ):
            return None
    return _masked_softmax_op(scores, mask, scale) if is_traced_plainly(scores.device) else None
