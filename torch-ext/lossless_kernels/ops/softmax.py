"""Softmax over the last dimension with eager's bits, for rows that ATen gives one warp each."""

import functools
import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from .._ops import add_op_namespace_prefix
from ..core import launch, proof
from ..core import softmax as aten
from ..core.calls import Calls, Outside
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
from ..core.torch_internals import apply_of, dispatch_modes, forward_ad, softmax_gradient

if launch.AVAILABLE:
    from ..kernels_src.softmax import softmax_backward, softmax_forward


def softmax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Softmax: bit for bit what `torch.nn.functional.softmax(input, dim)` returns.

    `exp(input - max) / sum(exp(input - max))`, maximum and sum over `dim`, in the dtype of input.

    Args:
        input: any shape and strides, any real floating dtype.
        dim: the dimension that sums to 1.

    Returns:
        A tensor of the shape, dtype and strides that eager returns.

    Raises:
        TypeError: `input` is no tensor or not of a real floating dtype.

    The kernels run for fp32, fp16 and bf16 on CUDA if `dim` is the last dimension, has 1 to 1024 elements, and rows are
    contiguous and equally spaced. Eager computes everything else, and 16 bits under autocast, which computes in fp32.
    """
    check_floating("input", input)
    out = replacement(input, dim)
    return functional.softmax(input, dim) if out is None else out


def _formula(dy, y):
    return softmax_gradient(dy, y, -1, y.dtype)


# Calls


# ATen's warp kernel for gradients takes no longer rows.
_MAX_SIZE = 1024
# Elements and warps of a program, by the length of its rows: one warp exchanges nothing through shared memory (H200).
_SHORT_ROW = 256
_PROGRAM, _SHORT_ROWS_PROGRAM = (1024, 1), (2048, 4)
_MAX_ROWS = 128


@dataclass(frozen=True)
class Kind:
    """The properties that a kernel is compiled for.

    Attributes:
        log2_size: the logarithm of the next power of two of a row's length; in ATen's warp it decides the order of additions.
        unit: the number of elements, up to 16 bytes, that one access can read.
    """

    dtype: torch.dtype
    log2_size: int
    unit: int

    @classmethod
    def of(cls, dtype: torch.dtype, size: int, *row_strides: int) -> "Kind":
        log2_size = aten.next_power_of_two(size).bit_length() - 1
        return cls(dtype, log2_size, math.gcd(size, *row_strides, 16 // dtype.itemsize))

    @property
    def program(self) -> tuple[int, int]:
        """Rows and warps of a program."""
        elements, warps = _SHORT_ROWS_PROGRAM if 1 << self.log2_size <= _SHORT_ROW else _PROGRAM
        return min(elements >> self.log2_size, _MAX_ROWS), warps

    def constants(self, order: aten.Softmax) -> dict:
        return {"LOG2_SIZE": self.log2_size, "WIDTH": order.threads, "UNIT": self.unit, "ROWS": self.program[0]}


def _forward(dtype, rows: int, size: int, row_stride: int, device: torch.device) -> launch.Launch:
    """The launch of the forward kernel. Its tensors: input, dense output."""
    kind = Kind.of(dtype, size, row_stride)
    constants, scalars = kind.constants(aten.softmax_forward(size, dtype)), (size, row_stride)
    return _bind(softmax_forward, constants, device, (dtype,) * 2, kind, rows, scalars)


def _backward(dtype, rows: int, size: int, dy_row_stride: int, device: torch.device) -> launch.Launch:
    """The launch of the backward kernel. Its tensors: dy, dense output, the input's gradient."""
    kind = Kind.of(dtype, size, dy_row_stride)
    constants, scalars = kind.constants(aten.softmax_backward(size, dtype)), (size, dy_row_stride)
    return _bind(softmax_backward, constants, device, (dtype,) * 3, kind, rows, scalars)


def _bind(kernel, constants, device, dtypes, kind, rows, scalars) -> launch.Launch:
    in_units = [scalar // kind.unit for scalar in scalars]
    rows_per_program, warps = kind.program
    return launch.bind(kernel, constants, warps, device, dtypes, -(-rows // rows_per_program), rows, *in_units)


@dataclass(eq=False)
class _Training:
    """A call with gradients."""

    forward: launch.UnaryCall

    def __call__(self, input):
        return _apply(self.forward, input)


def replacement(input: torch.Tensor, dim: int) -> Optional[torch.Tensor]:
    """The softmax from the kernel; None if eager must compute it."""
    if dim != -1 and dim != input.dim() - 1:
        return proof.record_refusal(functional.softmax, "another dimension than the last")
    if is_dynamo_compiling():
        return _compiled(input)
    needs_grad = is_grad_enabled() and input.requires_grad
    recent = _calls.recent.get(needs_grad)
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
    if _autocast_changes(input):
        return proof.record_refusal(functional.softmax, "autocast, which computes in fp32")
    call = _calls.find(functional.softmax, (needs_grad,), (input,), needs_grad)
    return _calls.run(needs_grad, call, (), (input,))


def _autocast_changes(input) -> bool:
    return input.dtype != torch.float32 and is_autocast(input.device)


def _resolve(x, needs_grad):
    rows, size, row_stride = _rows("input", x)
    out = Output.of(functools.partial(functional.softmax, dim=-1), x)
    for of_gradient in (False, True)[: 1 + needs_grad]:
        # The output's gradient will most likely be dense, as the output is.
        kind = Kind.of(x.dtype, size, size if of_gradient else row_stride)
        if not _proved(kind, x.device, of_gradient):
            return None
    forward = launch.UnaryCall(_forward(x.dtype, rows, size, row_stride, x.device), out.empty)
    return _Training(forward) if needs_grad else forward


def _rows(name, tensor) -> tuple[int, int, int]:
    """Rows, elements of a row, and row stride. Eager's results are dense, whatever the layout of its arguments."""
    if tensor.dtype not in FLOAT_DTYPES or not runs_kernels(tensor.device):
        raise Outside(f"{name} {tensor.dtype} on {tensor.device}")
    if torch.version.hip is not None:
        raise Outside(aten.CUDA_ONLY)
    if tensor.dim() == 0 or tensor.numel() == 0:
        raise Outside(f"{name} without dimensions or elements")
    size, dtype = tensor.shape[-1], tensor.dtype
    if {aten.softmax_forward(size, dtype).kind, aten.softmax_backward(size, dtype).kind} != {aten.WARP}:
        raise Outside(f"rows of more than {_MAX_SIZE} elements")
    found = rows_in_memory(tensor.shape, tensor.stride())
    if found is None or list(found[2]) != sorted(found[2]):
        raise Outside(f"{name} that is not made of contiguous rows, equally spaced and in order")
    rows, row_stride, _ = found
    if rows > launch.MAX_PROGRAMS:
        raise Outside(f"{name} of too many rows")
    return rows, size, row_stride


_calls = Calls(_resolve)


def gradient(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The input's gradient from that of the output y."""
    recent = _gradient_calls.recent.get(softmax)
    if recent is not None:
        same, compute = recent
        if have_strides(dy, y) and same(dy, y) and forward_ad._current_level < 0 and not dispatch_modes():
            return compute(dy, y)
    if are_plain(dy, y):
        call = _gradient_calls.find(functional.softmax, (), (dy, y))
        if call is not None:
            return _gradient_calls.run(softmax, call, (), (dy, y))
    return _formula(dy, y)


def _resolve_gradient(dy, y):
    rows, size, dy_row_stride = _rows("the output's gradient", dy)
    if dy.dtype != y.dtype or not y.is_contiguous():
        raise Outside("an output that is not dense, or of another dtype than its gradient")
    if not _proved(Kind.of(y.dtype, size, dy_row_stride), y.device, of_gradient=True):
        return None
    bound = _backward(y.dtype, rows, size, dy_row_stride, y.device)
    return launch.BinaryCall(bound, Output.of(_formula, dy, y).empty)


_gradient_calls = Calls(_resolve_gradient)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, input):
        out = functional.softmax(input, -1) if dispatch_modes() else call(input)
        ctx.save_for_backward(out)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, dy):
        if dy is None:  # The output was unused, so its gradient is undefined.
            return None, None
        (y,) = ctx.saved_tensors
        # With create_graph the gradient is differentiated in turn, through y as well.
        return None, _formula(dy, y) if is_grad_enabled() else gradient(dy, y)


_apply = apply_of(Softmax)


# Proof


def _proved(kind: Kind, device, of_gradient: bool) -> bool:
    """Whether the kernel of this kind is proved: all lengths of a kind have the same order."""
    what = "gradient" if of_gradient else "output"
    comparisons = _gradient_comparisons if of_gradient else _comparisons
    return proof.kernel_is_proved(
        ("softmax", what, kind, device),
        proof.Subject(
            functional.softmax, device, f"{kind.dtype}, rows of up to {1 << kind.log2_size} elements, {what}"
        ),
        functools.partial(comparisons, kind, device),
    )


# In fp32 another order of additions shows in many quotients of a row, in bf16 in one of about 300,000.
_PROOF_ELEMENTS = {torch.float32: 1 << 16, torch.float16: 1 << 19, torch.bfloat16: 1 << 22}
_GRADIENT_ROWS = 256


def _sizes(kind: Kind) -> list[int]:
    """The longest and the shortest row of a kind."""
    longest = 1 << kind.log2_size
    shortest = (longest // 2 // kind.unit + 1) * kind.unit
    return sorted({longest, min(shortest, longest)})


def _spaced(values, kind: Kind):
    """The values in the kind's dtype, with a gap of one unit after each row: no access can read more than a unit."""
    rows, size = values.shape
    return torch.zeros(rows, size + kind.unit, dtype=kind.dtype, device=values.device)[:, :size].copy_(values)


def _comparisons(kind, device):
    source = proof.generator(device, kind.log2_size)
    for size in _sizes(kind):
        rows, row_stride = _PROOF_ELEMENTS[kind.dtype] // size, size + kind.unit
        x = _spaced(torch.randn(rows, size, device=device, generator=source), kind)
        x[0], x[1], x[2], x[3, 0], x[4, -1], x[5, 0] = -math.inf, math.inf, -0.0, math.nan, math.inf, -math.inf
        out = torch.full((rows, size), math.nan, dtype=kind.dtype, device=device)
        _forward(kind.dtype, rows, size, row_stride, device)(x, out)
        yield "the output", out, functional.softmax(x, -1)


def _gradient_comparisons(kind, device):
    """In half of the rows one product is nearly the sum of all, so that the difference shows the sum's last bits.

    No softmax returns such an output; the gradient's formula does not need one that does.
    """
    source = proof.generator(device, kind.log2_size)
    rows = _GRADIENT_ROWS
    for size in _sizes(kind):
        y = torch.rand(rows, size, device=device, generator=source) / size
        dy = torch.randn(rows, size, device=device, generator=source)
        dy[::2] *= size**0.5 / 256
        at = torch.randint(size, (rows // 2, 1), device=device, generator=source)
        y[::2].scatter_(1, at, 1.0)
        dy[::2].scatter_(1, at, 128 + 127 * torch.rand(rows // 2, 1, device=device, generator=source))
        dy[1], dy[3], dy[5, 0], dy[7, -1] = -0.0, 0.0, math.inf, math.nan
        dy, y = _spaced(dy, kind), y.to(kind.dtype)
        dx = torch.full((rows, size), math.nan, dtype=kind.dtype, device=device)
        _backward(kind.dtype, rows, size, size + kind.unit, device)(dy, y, dx)
        yield "the input's gradient", dx, _formula(dy, y)


# torch.compile


@torch.library.custom_op(add_op_namespace_prefix("softmax"), mutates_args=())
def _softmax_op(input: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = replacement(input, -1)
    return functional.softmax(input, -1) if out is None else out


@_softmax_op.register_fake
def _(input):
    return functional.softmax(input, -1)


@torch.library.custom_op(add_op_namespace_prefix("softmax_backward"), mutates_args=())
def _softmax_backward_op(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return gradient(dy, y)


@_softmax_backward_op.register_fake
def _(dy, y):
    return _formula(dy, y)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(output)


def _op_gradient(ctx, dy):
    return _softmax_backward_op(dy, *ctx.saved_tensors)


_softmax_op.register_autograd(_op_gradient, setup_context=_setup_context)


def _compiled(input):
    """`replacement` while torch.compile traces: the registered op, or None to trace the original.

    Proofs wait until the op runs, since a row's length may be symbolic here. Without a proof the op runs ATen's kernel.
    """
    if not input.is_cuda or input.dtype not in FLOAT_DTYPES or _autocast_changes(input):
        return None
    if input.dim() == 0 or input.shape[-1] > _MAX_SIZE or not is_traced_plainly():
        return None
    return _softmax_op(input)
