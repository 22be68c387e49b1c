"""Softmax over the last dimension with eager's bits, for rows of any length."""

import functools
import math
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ..core import launch, operators, plans, proof
from ..core import softmax as aten
from ..core.calls import UNSEEN, Calls, Outside, remember
from ..core.declarations import TUNING
from ..core.domain import (
    FLOAT_DTYPES,
    PLAIN_TYPES,
    are_ours,
    are_plain,
    check_floating,
    have_strides,
    is_autocast,
    is_traced_plainly,
    runs_kernels,
)
from ..core.layout import Output, rows_in_memory
from ..core.reduction import next_power_of_two
from ..core.torch_internals import apply_of, dispatch_modes, forward_ad, softmax_gradient

if launch.AVAILABLE:
    from ..kernels_src import softmax as kernels
    from ..kernels_src import softmax_long_rows as kernels_for_long_rows


def softmax(input: torch.Tensor, dim: int = -1, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """Softmax: bit for bit what `torch.nn.functional.softmax(input, dim, dtype=dtype)` returns.

    `exp(input - max) / sum(exp(input - max))`, maximum and sum over `dim`.

    Args:
        input: any shape and strides, any real floating dtype.
        dim: the dimension that sums to 1.
        dtype: that of the result; input is converted to it first. Without it the result has input's dtype.

    Returns:
        A tensor of the shape and strides that eager returns.

    Raises:
        TypeError: `input` is no tensor or not of a real floating dtype.
        IndexError: input has no dimension `dim`.

    The kernels run for fp32, fp16 and bf16 on CUDA if `dim` is the last dimension, rows are contiguous and equally
    spaced, and `dtype` is None, input's own or fp32. Eager computes everything else, and 16 bits under autocast, which
    computes in fp32, unless `dtype` is fp32.
    """
    check_floating("input", input)
    out = replacement(input, dim, dtype)
    return functional.softmax(input, dim, dtype=dtype) if out is None else out


def _formula(dy, y, dtype):
    """The gradient of an input of this dtype. ATen's kernel converts fp32 to fp16; an operation of its own to bf16."""
    if dtype == y.dtype or (dtype == torch.float16 and y.is_cuda):
        return softmax_gradient(dy, y, -1, dtype)
    return softmax_gradient(dy, y, -1, y.dtype).to(dtype)


# Calls


# Warps of a program for rows of one of ATen's warps, by the most elements of a row. One warp exchanges nothing through shared
# memory (H200).
_WARPS_OF_WARP = {1024: 1, 2048: 2}
# The elements of such a program, those of one that reads vectors of four or eight 16-bit elements, and the most rows.
_ELEMENTS, _ELEMENTS_OF_VECTORS, _MAX_ROWS = 512, 1024, 128
# The longest rows of which a thread loads the elements of its own lanes. Memory limits gradients of softmax itself: theirs are
# shorter, of many rows and of few (H200).
_LONGEST_BY_LANES, _LONGEST_IN_GRADIENTS, _LONGEST_IN_GRADIENTS_OF_FEW = 256, 64, 128
# So many rows are few: a program takes one, so that more multiprocessors have a program. By lanes it takes as many as give a
# warp so many elements at a time.
_FEW_ROWS, _ELEMENTS_OF_FEW_ROWS = 512, 64
# Warps of a program that keeps a row in registers, by the most elements of the row; if rows are not read by vectors, which
# takes more registers; and of gradients with 16 and 32 bits.
_WARPS, _WARPS_WITHOUT_VECTORS = {4096: 2, 1 << 14: 4, 1 << 15: 8}, {4096: 2, 9216: 4, 1 << 15: 8}
_GRADIENT_WARPS = {2: {4096: 4, 1 << 14: 8, 1 << 15: 16}, 4: {4096: 4, 9216: 8, 1 << 15: 16}}
# From fp16 to fp32, where a thread writes twice as many bytes as it reads (H100).
_WARPS_OF_FP16_TO_FP32 = {1 << 13: 4, 1 << 15: 8}
# Those of a program that does not, and of one for aligned rows of 16 bits: fewer rows share the L2 then. Gradients have as
# many as ATen's block.
_LOOP_WARPS, _LOOP_WARPS_OF_16_BITS = 16, 32
# The longest rows of LOOP that a program keeps in registers, and those from fp16 to fp32.
_LONGEST_IN_REGISTERS, _LONGEST_WIDENED = 1 << 15, 1 << 14
_MAX_SIZE = 1 << 30


@dataclass(frozen=True)
class SoftmaxPlan:
    """The launch configuration of a kernel that keeps a row in registers: the warps of its program."""

    num_warps: int


TUNING.update(dict.fromkeys(("softmax", "softmax_backward"), SoftmaxPlan))


@dataclass(frozen=True)
class Kind:
    """The properties that a kernel is compiled for.

    Attributes:
        dtype: the input's dtype.
        result: the softmax's dtype.
        order: ATen's division of a row among threads.
        steps: WARP: the logarithm of the next power of two of a row's length, which decides the order of additions.
            Otherwise: how often all threads take a vector, or a single element of a row with a head, if a program keeps the
            row in registers. 0 if it does not: the rows of LOOP that are longer, are not read by vectors, or have vectors and
            elements that are taken one by one.
        unit: the number of elements, up to 16 bytes, that one access can read.
        head: eager's rows do not begin at multiples of 16 bytes, which shifts the vectors, or single elements, of LOOP.
        dense: rows with such a head follow each other without a gap.
        shift: elements from the last multiple of 16 bytes to the first of them.
        plan: the tuned launch configuration; None: the default.
        few: rows of one of ATen's warps are few. A program takes fewer of them, and loads longer ones by lanes in gradients.
        written: the dtype to which a kernel rounds the softmax; None: it does not.
    """

    of_gradient: bool
    dtype: torch.dtype
    result: torch.dtype
    order: aten.Softmax
    steps: int
    unit: int
    head: bool = False
    dense: bool = False
    shift: int = 0
    plan: Optional[SoftmaxPlan] = None
    few: bool = False
    written: Optional[torch.dtype] = None

    @classmethod
    def of(
        cls,
        of_gradient: bool,
        dtype: torch.dtype,
        result: torch.dtype,
        size: int,
        row_stride: int,
        shift: int = 0,
        written: Optional[torch.dtype] = None,
        long_warps: bool = False,
    ) -> "Kind":
        """The kind for rows of `size` elements.

        Args:
            row_stride: the input's or that of the output's gradient.
            long_warps: as `has_long_warps` returns it. The kind keeps it only in `order`.
        """
        if of_gradient:
            order, itemsize = aten.softmax_backward(size, result), result.itemsize
        else:
            order, itemsize = aten.softmax_forward(size, dtype, result != dtype, shift == 0, long_warps), dtype.itemsize
        unit = math.gcd(size, row_stride, 16 // itemsize)
        kind = cls(of_gradient, dtype, result, order, 0, unit, written=written)
        if order.kind == aten.WARP:
            return replace(kind, steps=next_power_of_two(size).bit_length() - 1)
        if order.kind == aten.LOOP and not of_gradient and size < order.threads * order.vector:
            steps = -(-(size + order.vector - 1) // order.threads)
            return replace(kind, steps=steps, head=True, dense=row_stride == size, shift=shift)
        steps, rest = divmod(size, kind.tile)
        longest = _LONGEST_WIDENED if kind.widens and not of_gradient else _LONGEST_IN_REGISTERS
        if order.kind != aten.LOOP or (rest == shift == 0 and kind.unit > 1 and size <= longest):
            return replace(kind, steps=steps + (rest > 0))
        if size % order.vector == 0 and shift == 0:
            return kind
        return replace(kind, head=True, dense=row_stride == size, shift=shift)

    @property
    def widens(self) -> bool:
        """Whether threads read vectors of fp16 and write fp32. (ATen converts bf16 first, and reads fewer at a time.)"""
        return self.dtype == torch.float16 and (self.written or self.result) == torch.float32

    @property
    def longest(self) -> int:
        """The most elements of a row."""
        if self.order.kind == aten.WARP:
            return 1 << self.steps
        if self.before:
            return min(self.steps * self.tile - self.before, self.order.threads * self.order.vector - 1)
        return self.steps * self.tile or _MAX_SIZE

    @property
    def tile(self) -> int:
        """The elements that all threads of ATen's block take at a time; single ones if a program keeps a row with a head."""
        return self.order.threads * (1 if self.before else self.order.vector)

    @property
    def before(self) -> int:
        """The most elements before a row that a program keeps with its head."""
        return self.order.vector - 1 if self.head and self.steps else 0

    def planned(self, op: str, dtype: torch.dtype, size: int, rows: int, device: torch.device) -> "Kind":
        """The kind with the launch configuration that is tuned on this GPU for tensors of this dtype and shape.

        `op` has one if the kernel keeps a row in registers; a gradient has one of its own.
        """
        if self.order.kind == aten.WARP:
            of_few_rows = replace(self, few=True)
            # The interpreter takes programs one after the other.
            fewer = rows <= _FEW_ROWS and not launch.INTERPRETED and of_few_rows.program != self.program
            return of_few_rows if fewer else self
        if not self.steps:
            return self
        op = f"{op}_backward" if self.of_gradient else op
        return replace(self, plan=plans.tuned(SoftmaxPlan, plans.gpu(device), op, size, rows, dtype.itemsize))

    @property
    def by_lanes(self) -> bool:
        """WARP: whether a thread loads the elements of its own lanes. Otherwise it loads any, and threads exchange them."""
        if self.of_gradient and self.written is None:
            return self.longest <= (_LONGEST_IN_GRADIENTS_OF_FEW if self.few else _LONGEST_IN_GRADIENTS)
        return self.longest <= _LONGEST_BY_LANES

    @property
    def constants_of_warp(self) -> dict[str, int]:
        """WARP: the constants of its kernels."""
        tile = self.order.threads if self.by_lanes else self.longest
        constants = {"LOG2_SIZE": self.steps, "WIDTH": self.order.threads, "TILE": tile, "UNIT": self.unit}
        return constants | {"ROWS": self.program[0]}

    @property
    def program(self) -> tuple[int, int]:
        """Rows and warps of a program."""
        if self.plan is not None:
            return 1, self.plan.num_warps
        if self.order.kind == aten.WARP:
            warps = next(warps for most, warps in _WARPS_OF_WARP.items() if self.longest <= most)
            if self.few:
                return (_ELEMENTS_OF_FEW_ROWS // self.order.threads if self.by_lanes else 1), warps
            itemsize = max(self.dtype.itemsize, (self.written or self.result).itemsize)
            elements = _ELEMENTS_OF_VECTORS if itemsize == 2 and self.unit >= 4 else _ELEMENTS
            return max(min(elements >> self.steps, _MAX_ROWS), 1), warps
        if not self.steps:
            warps = _LOOP_WARPS if self.head or self.dtype == torch.float32 else _LOOP_WARPS_OF_16_BITS
            return 1, max(self.order.threads // 32, 4) if self.of_gradient else warps
        of_length = _WARPS if self.unit > 1 else _WARPS_WITHOUT_VECTORS
        if self.widens and self.unit > 1:
            of_length = _WARPS_OF_FP16_TO_FP32
        if self.of_gradient:
            of_length = _GRADIENT_WARPS[self.result.itemsize]
        return 1, next(warps for most, warps in of_length.items() if self.longest <= most)


def _bind(kind: Kind, rows: int, size: int, row_stride: int, device: torch.device) -> launch.Launch:
    """The launch of a kernel.

    Its tensors: input, dense output; or the output's gradient, dense output, the input's gradient. `row_stride` is that
    of the first.
    """
    order, unit, (rows_per_program, warps) = kind.order, kind.unit, kind.program
    source, scalars = kernels, (size // unit, row_stride // unit)
    if order.kind == aten.WARP:
        names, scalars = ("softmax_forward", "softmax_backward"), (rows, *scalars)
        constants = kind.constants_of_warp
    elif kind.steps:
        names = ("softmax_forward_of_block", "softmax_backward_of_block")
        constants = {"STEPS": kind.steps, "THREADS": order.threads, "VECTOR": kind.tile // order.threads, "UNIT": unit}
        if kind.of_gradient:
            constants |= {"IN_SEQUENCE": order.in_sequence}
        else:
            constants |= {"HEAD": order.vector if kind.head else 0, "SHIFT": kind.shift}
    else:
        source, names = kernels_for_long_rows, ("softmax_forward_of_long_rows", "softmax_backward_of_long_rows")
        constants = {"THREADS": order.threads, "VECTOR": order.vector}
        constants |= {"HEAD": kind.head, "DENSE": kind.dense, "SHIFT": kind.shift, "UNIT": unit}
    dtypes = (kind.result, kind.result, kind.dtype) if kind.of_gradient else (kind.dtype, kind.result)
    kernel = getattr(source, names[kind.of_gradient])
    return launch.bind(kernel, constants, warps, device, dtypes, -(-rows // rows_per_program), *scalars)


class _ByAddress:
    """A call of long dense rows: their address decides where ATen's vectors begin."""

    def __init__(self, resolve, dtype: Optional[torch.dtype]):
        self.resolve = resolve
        self.dtype = dtype
        self.calls: dict = {}

    def at(self, input) -> Optional[launch.UnaryCall]:
        shift = input.data_ptr() % 16 // input.element_size()
        call = self.calls.get(shift, UNSEEN)
        return remember(self.calls, shift, self.resolve(shift)) if call is UNSEEN else call

    def __call__(self, input):
        call = self.at(input)
        return functional.softmax(input, -1, dtype=self.dtype) if call is None else call(input)


class _GradientOfBlock(launch.BinaryCall):
    """Of rows of one block: an output that does not begin at a multiple of 16 bytes has another kernel of ATen's."""

    def __call__(self, dy, y):
        return self.formula(dy, y) if y.data_ptr() % 16 else super().__call__(dy, y)


@dataclass(eq=False)
class _Training:
    """A call with gradients."""

    forward: launch.UnaryCall
    dtype: Optional[torch.dtype]

    def __call__(self, input):
        return _apply(self.forward, input, self.dtype)


def replacement(input: torch.Tensor, dim: int, dtype: Optional[torch.dtype] = None) -> Optional[torch.Tensor]:
    """The softmax from the kernel; None if eager must compute it."""
    if dim != -1 and dim != input.dim() - 1:
        return proof.record_refusal(functional.softmax, "another dimension than the last")
    if is_dynamo_compiling():
        return _compiled(input, dtype)
    needs_grad = is_grad_enabled() and input.requires_grad
    recent = _calls.recent.get((needs_grad, dtype))
    if recent is not None:
        same, compute = recent
        if (
            type(input) in PLAIN_TYPES
            and not input.is_nested
            and same(input)
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return compute(input)
    if not are_ours(input, input, needs_grad):
        return proof.record_refusal(functional.softmax, proof.NOT_PLAIN)
    if _autocast_changes(input, dtype):
        return proof.record_refusal(functional.softmax, "autocast, which computes in fp32")
    call = _calls.find(functional.softmax, (needs_grad, dtype), (input,), needs_grad, dtype)
    return _calls.run((needs_grad, dtype), call, (), (input,))


def _autocast_changes(input, dtype) -> bool:
    return input.dtype != torch.float32 and dtype != torch.float32 and is_autocast(input.device)


def _is_known(dtype, of_result) -> bool:
    return of_result is None or of_result == dtype or (of_result == torch.float32 and dtype in FLOAT_DTYPES)


def _resolve(x, needs_grad, dtype):
    if not _is_known(x.dtype, dtype):
        raise Outside(f"input {x.dtype} and result {dtype}")
    rows, size, row_stride = _rows("input", x)
    result, device = dtype or x.dtype, x.device
    out = Output.of(functools.partial(functional.softmax, dim=-1, dtype=dtype), x, dtype=result)
    # The output's gradient will most likely be dense, as the output is.
    if needs_grad:
        kind = Kind.of(True, x.dtype, result, size, size).planned("softmax", result, size, rows, device)
        if not _proved(kind, device):
            return None

    def at(shift):
        kind = Kind.of(False, x_dtype, result, size, row_stride, shift, long_warps=long_warps)
        kind = kind.planned("softmax", x_dtype, size, rows, device)
        return (
            launch.UnaryCall(_bind(kind, rows, size, row_stride, device), out.empty) if _proved(kind, device) else None
        )

    x_dtype, long_warps = x.dtype, result == torch.float32 and has_long_warps(x.dtype, device)
    aligned = Kind.of(False, x.dtype, result, size, row_stride, long_warps=long_warps)
    # Eager copies rows with gaps; ATen converts bf16 by an operation of its own.
    is_copied = row_stride != size or (x.dtype == torch.bfloat16 and result == torch.float32)
    if is_copied or aligned.order.kind in (aten.WARP, aten.REGISTERS):
        forward = at(0)
    else:
        forward = _ByAddress(at, dtype)
        forward = forward if forward.at(x) is not None else None
    return _Training(forward, dtype) if needs_grad and forward is not None else forward


def _rows(name, tensor) -> tuple[int, int, int]:
    """Rows, elements of a row, and row stride. Eager's results are dense, whatever the layout of its arguments."""
    if tensor.dtype not in FLOAT_DTYPES or not runs_kernels(tensor.device):
        raise Outside(f"{name} {tensor.dtype} on {tensor.device}")
    if torch.version.hip is not None:
        raise Outside(aten.CUDA_ONLY)
    if tensor.dim() == 0 or tensor.numel() == 0:
        raise Outside(f"{name} without dimensions or elements")
    found = rows_in_memory(tensor.shape, tensor.stride())
    if found is None or list(found[2]) != sorted(found[2]):
        raise Outside(f"{name} that is not made of contiguous rows, equally spaced and in order")
    rows, row_stride, _ = found
    if rows > launch.MAX_PROGRAMS or tensor.shape[-1] > _MAX_SIZE:
        raise Outside(f"{name} of too many rows or too long ones")
    return rows, tensor.shape[-1], row_stride


_calls = Calls(_resolve)


def gradient(dy: torch.Tensor, y: torch.Tensor, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """The input's gradient from that of the output y; `dtype` is the input's, without it y's."""
    dtype = dtype or y.dtype
    recent = _gradient_calls.recent.get(dtype)
    if recent is not None:
        same, compute = recent
        if have_strides(dy, y) and same(dy, y) and forward_ad._current_level < 0 and not dispatch_modes():
            return compute(dy, y)
    if are_plain(dy, y):
        call = _gradient_calls.find(functional.softmax, (dtype,), (dy, y), dtype)
        if call is not None:
            return _gradient_calls.run(dtype, call, (), (dy, y))
    return _formula(dy, y, dtype)


def _resolve_gradient(dy, y, dtype):
    rows, size, dy_row_stride = _rows("the output's gradient", dy)
    if dy.dtype != y.dtype or not y.is_contiguous() or y.shape != dy.shape or not _is_known(dtype, y.dtype):
        raise Outside("an output that is not dense, or of another dtype than its gradient")
    kind = Kind.of(True, dtype, y.dtype, size, dy_row_stride).planned("softmax", y.dtype, size, rows, y.device)
    if not _proved(kind, y.device):
        return None
    formula = functools.partial(_formula, dtype=dtype)
    bound, empty = _bind(kind, rows, size, dy_row_stride, y.device), Output.of(formula, dy, y, dtype=dtype).empty
    if kind.order.kind == aten.WARP:
        return launch.BinaryCall(bound, empty)
    call = _GradientOfBlock(bound, empty)
    call.formula = formula
    return call


_gradient_calls = Calls(_resolve_gradient)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, input, dtype):
        out = functional.softmax(input, -1, dtype=dtype) if dispatch_modes() else call(input)
        ctx.save_for_backward(out)
        ctx.dtype = input.dtype
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, dy):
        if dy is None:  # The output was unused, so its gradient is undefined.
            return None, None, None
        (y,) = ctx.saved_tensors
        # With create_graph the gradient is differentiated in turn, through y as well.
        return None, _formula(dy, y, ctx.dtype) if is_grad_enabled() else gradient(dy, y, ctx.dtype), None


_apply = apply_of(Softmax)


# Proof


def _proved(kind: Kind, device) -> bool:
    """Whether the kernel of this kind is proved: all lengths of a kind have the same order."""
    what = "gradient" if kind.of_gradient else "output"
    dtypes = str(kind.dtype) if kind.dtype == kind.result else f"{kind.dtype} to {kind.result}"
    length = f"up to {kind.longest}" if kind.steps or kind.order.kind == aten.WARP else "many"
    return proof.kernel_is_proved(
        ("softmax", kind, device),
        proof.Subject(functional.softmax, device, f"{dtypes}, rows of {length} elements, {what}", "softmax"),
        functools.partial(_gradient_comparisons if kind.of_gradient else _comparisons, kind, device),
    )


def has_long_warps(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether eager computes fp16 rows of up to 2048 elements with fp32 results by one of ATen's warps.

    ATen does so from torch 2.14 on; before, only up to 1024 elements. Raises Outside where that cannot be found out now.
    """
    if dtype != torch.float16 or device.type != "cuda":
        return False
    subject = proof.Subject(functional.softmax, device, "fp16 to fp32")
    key = "softmax's rows of fp16 with fp32 results", device
    found = proof.find_out(key, subject, functools.partial(_adds_by_a_warp, device))
    if found is None:
        raise Outside("fp16 with an fp32 result, whose order is not known")
    return found


def _adds_by_a_warp(device):
    """One term is 1, the other 2047 are 2**-24.5. Those that its thread adds to 1 one by one are lost: 63 in a warp, seven in a
    block. The first quotient shows the sum of all others: it is 8.21e-5 or 8.45e-5 below 1."""
    x = torch.full((1, 2048), -17.0, dtype=torch.float16, device=device)
    x[0, 0] = 0.0
    return functional.softmax(x, -1, dtype=torch.float32)[0, :1] > 1.0 - 8.33e-5


# In fp32 another order of additions shows in many quotients of a row, in bf16 in one of about 300,000.
_PROOF_ELEMENTS = {torch.float32: 1 << 16, torch.float16: 1 << 19, torch.bfloat16: 1 << 22}
# The least rows of one block in a proof, and the factor between its terms and those of one thread in half of the rows:
# what a sum over 1024 threads adds up inside a thread hardly shows. The smallest quotients of fp16 have few bits.
_BLOCK_ROWS = 64
_APART = {torch.float32: 40.0, torch.float16: 6.0, torch.bfloat16: 40.0}
_MORE_OF_BLOCKS = {torch.float32: 1, torch.float16: 4, torch.bfloat16: 1}
# How far one element of some rows is below the largest: kernels divide such rows by other instructions, and those that keep
# a row of a block add them by others, too. The latter's rows are drawn twice as often.
_SMALL, _SUBNORMAL = 80.0, 96.0
# How often a block's rows are drawn. Equal numbers of a row, of which 16 bits have many, show a difference together or not
# at all: drawn once, rows of bf16 hid half the threads one time in eight.
_TIMES_OF_BLOCKS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 12}
_GRADIENT_ROWS = 256
_GRADIENT_ELEMENTS = 1 << 22
# Within these lengths are rows of every kind of block, and both ends of those that are bounded.
_SHORTEST_OF_BLOCKS, _LONGEST_OF_BLOCKS = 1025, 24600
# Lengths of long rows: these few have all alignments.
LONG_LENGTHS = range(40000, 40064)


def _sizes(kind: Kind, long_warps: bool = False) -> list[int]:
    """The longest and the shortest row of a kind; of one without a longest, a long one. `long_warps`: as in `Kind.of`."""
    if kind.order.kind == aten.WARP:
        shortest = (kind.longest // 2 // kind.unit + 1) * kind.unit
        return sorted({kind.longest, min(shortest, kind.longest)})

    def fits(size):
        row_stride = size if kind.dense else size + kind.unit
        dtypes = kind.dtype, kind.result
        found = Kind.of(kind.of_gradient, *dtypes, size, row_stride, kind.shift, long_warps=long_warps)
        return found == replace(kind, plan=None, few=False)

    first = max(_SHORTEST_OF_BLOCKS, (kind.steps - 1) * kind.tile - kind.before + 1)
    shortest = next(filter(fits, count(-(-first // kind.unit) * kind.unit, kind.unit)))
    longest = kind.longest if kind.steps else _LONGEST_OF_BLOCKS
    in_bounds = range(longest // kind.unit * kind.unit, shortest, -kind.unit)
    in_loops = LONG_LENGTHS[:: kind.unit] if not kind.steps else ()
    return sorted({shortest, next(filter(fits, chain(in_loops, in_bounds)), shortest)})


def _placed(values, kind: Kind):
    """The values in the dtype and at the places that the kind's accesses are for: no access can read more than a unit."""
    (rows, size), gap = values.shape, 0 if kind.dense else kind.unit
    dtype = kind.result if kind.of_gradient else kind.dtype
    there = torch.zeros(kind.shift + rows * (size + gap), dtype=dtype, device=values.device)[kind.shift :]
    return there.view(rows, size + gap)[:, :size].copy_(values)


def _row_stride(kind: Kind, size: int) -> int:
    return size if kind.dense else size + kind.unit


def with_small_terms(x, rows, result):
    """Gives these rows a term of about 2**-115, each at another place; of fp32 results some one whose quotient is subnormal."""
    if x.shape[1] > 1:
        row = torch.arange(len(x), device=x.device)
        below = torch.where((row % 8 == 3) & (result == torch.float32), _SUBNORMAL, _SMALL)
        # A prime step: rows of programs of a power of two of rows have them in all tiles.
        place = (row * 37 % x.shape[1])[:, None]
        x.scatter_(1, place, torch.where(rows, x.amax(-1) - below, x.gather(1, place)[:, 0])[:, None])


def _comparisons(kind, device):
    source, is_block = proof.generator(device, kind.steps), kind.order.kind != aten.WARP
    times = _TIMES_OF_BLOCKS[kind.result] * (2 if kind.steps else 1) if is_block else 1
    for size in _sizes(kind, has_long_warps(kind.dtype, device)) * times:
        rows = _PROOF_ELEMENTS[kind.result] // size
        if is_block:
            rows = max(rows * _MORE_OF_BLOCKS[kind.result], _BLOCK_ROWS)
        x = proof.normal(source, rows, size)
        if is_block:
            lane = aten.lanes(kind.order, rows // 2, size, kind.shift, device)
            # Up, and not the other terms down: 16 bits have few numbers around -40, and as few quotients.
            x[: rows // 2].add_(torch.where(lane == lane[:, size // 2, None], _APART[kind.result], 0.0))
        # Of blocks every other pair of rows; of warps the first programs, which have up to 128 rows.
        row = torch.arange(rows, device=device)
        with_small_terms(x, row % 4 > 1 if is_block else row < rows // 4, kind.result)
        x[-1], x[-2], x[-3], x[-4, 0], x[-5, -1], x[-6, 0] = -math.inf, math.inf, -0.0, math.nan, math.inf, -math.inf
        x = _placed(x, kind)
        out = torch.full((rows, size), math.nan, dtype=kind.result, device=device)
        _bind(kind, rows, size, _row_stride(kind, size), device)(x, out)
        yield "the output", out, functional.softmax(x, -1, dtype=kind.result)


def _gradient_comparisons(kind, device):
    """In half of the rows one product is nearly the sum of all, so that the difference shows the sum's last bits.

    No softmax returns such an output; the gradient's formula does not need one that does.
    """
    source = proof.generator(device, kind.steps)
    for size in _sizes(kind):
        rows = min(_GRADIENT_ROWS, _GRADIENT_ELEMENTS // size // 2 * 2)
        y = proof.uniform(source, rows, size) / size
        dy = proof.normal(source, rows, size)
        dy[::2] *= size**0.5 / 256
        at = torch.randint(size, (rows // 2, 1), device=device, generator=source)
        y[::2].scatter_(1, at, 1.0)
        dy[::2].scatter_(1, at, 128 + 127 * proof.uniform(source, rows // 2, 1))
        dy[1], dy[3], dy[5, 0], dy[7, -1] = -0.0, 0.0, math.inf, math.nan
        dy, y = _placed(dy, kind), y.to(kind.result)
        dx = torch.full((rows, size), math.nan, dtype=kind.dtype, device=device)
        _bind(kind, rows, size, _row_stride(kind, size), device)(dy, y, dx)
        yield "the input's gradient", dx, _formula(dy, y, kind.dtype)


# torch.compile


def _find(input, dtype):
    return _calls.find(functional.softmax, (False, dtype), (input,), False, dtype)


@operators.register("softmax", _find)
def _softmax_op(input: torch.Tensor, dtype: Optional[torch.dtype]) -> torch.Tensor:
    return functional.softmax(input, -1, dtype=dtype)


def _find_gradient(dy, y, dtype):
    return _gradient_calls.find(functional.softmax, (dtype,), (dy, y), dtype)


@operators.register("softmax_backward", _find_gradient)
def _softmax_backward_op(dy: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _formula(dy, y, dtype)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.dtype = inputs[0].dtype


def _op_gradient(ctx, dy):
    return _softmax_backward_op(dy, *ctx.saved_tensors, ctx.dtype), None


torch.library.register_autograd(_softmax_op, _op_gradient, setup_context=_setup_context)


def _compiled(input, dtype):
    """`replacement` while torch.compile traces: the registered op, or None to trace the original.

    Proofs wait until the op runs, since a row's length may be symbolic here. Without a proof the op runs ATen's kernel.
    """
    if input.dtype not in FLOAT_DTYPES or _autocast_changes(input, dtype):
        return None
    if not _is_known(input.dtype, dtype) or input.dim() == 0 or not is_traced_plainly(input.device):
        return None
    return _softmax_op(input, dtype)
