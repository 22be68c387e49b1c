"""Activation functions with the bits of ATen's eager CUDA kernels."""

import functools
import math
from typing import Callable, Optional

import torch
from torch import empty_like, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from . import launch, proof
from ._ops import add_op_namespace_prefix
from .domain import (
    FLOAT_DTYPES,
    UNSEEN,
    are_plain,
    check_floating,
    dispatch_modes,
    remember,
    runs_kernels,
    same_tensors,
    under_transform,
)
from .layout import Output, is_dense, is_same_order, rows_in_memory

if launch.AVAILABLE:
    from .kernels_src.activation import silu_backward, silu_forward


def silu(input: torch.Tensor) -> torch.Tensor:
    """Sigmoid linear unit, `input / (1 + exp(-input))`: bit for bit what `torch.nn.functional.silu` returns.

    Args:
        input: any shape and strides, any real floating dtype.

    Returns:
        A tensor of the shape, dtype and strides that eager returns.

    Raises:
        TypeError: `input` is no tensor or not of a real floating dtype.

    The kernel runs for fp32, fp16 and bf16 on CUDA if the input is dense in memory or made of equally spaced rows;
    anything else is computed by `torch.nn.functional.silu`.
    """
    check_floating("input", input)
    out = replacement(input, eager_forward)
    return torch.nn.functional.silu(input) if out is None else out


def eager_forward(module, input):
    return torch.nn.functional.silu(input)


_BLOCK = 1024
# Of CUDA's grid, along x.
_MAX_PROGRAMS = (1 << 31) - 1
_NUM_WARPS = 4


@functools.cache
def _launcher(kernel, dtype, unit, device) -> launch.Launcher:
    """The kernel for one class of inputs, their dtype included: a launcher stands for one compiled kernel."""
    return launch.Launcher(kernel, {"UNIT": unit, "BLOCK": _BLOCK}, _NUM_WARPS, device)


def _unit(columns: int, row_stride: int, dtype: torch.dtype) -> int:
    """So many elements, up to 16 bytes, can be read at a time."""
    return math.gcd(columns, row_stride, 16 // dtype.itemsize)


def _silu(dtype, rows, columns, row_stride, device: torch.device) -> launch.Launch:
    """The launch of the forward kernel, to be called with input and out."""
    unit = _unit(columns, row_stride, dtype)
    blocks_per_row = -(-columns // _BLOCK)
    launcher = _launcher(silu_forward, dtype, unit, device.index or 0)
    return launcher.bind(rows * blocks_per_row, columns // unit, row_stride // unit, blocks_per_row)


def _silu_backward(dtype, numel, device: torch.device) -> launch.Launch:
    """The launch of the backward kernel, to be called with dy, input and dx, all dense and alike."""
    unit = _unit(numel, numel, dtype)
    return _launcher(silu_backward, dtype, unit, device.index or 0).bind(-(-numel // _BLOCK), numel // unit)


class _Call:
    """All that follows from the shapes, strides, dtype and device of a call: of `silu` or of its gradient."""

    __slots__ = ("launch", "out", "like_input")

    def __init__(self, launch: Optional[launch.Launch], out: Output):
        self.launch = launch
        self.out = out
        self.like_input = out.like_input

    def __call__(self, input):
        out = empty_like(input) if self.like_input else self.out.empty(input)
        if self.launch is not None:
            self.launch.on_two(input, out)
        return out

    def backward(self, dy, input):
        dx = self.out.empty(dy)
        self.launch.on_three(dy, input, dx)
        return dx


_calls = {}
# By the forward that is replaced its last call, which is found without building the key above.
_recent = {}


def replacement(input: torch.Tensor, original: Callable) -> Optional[torch.Tensor]:
    """What `original(module, input)` returns, from the kernel; None where the caller must compute it itself."""
    if is_dynamo_compiling():
        return _compiled(input, original)
    needs_grad = is_grad_enabled() and input.requires_grad
    recent = _recent.get(original)
    if recent is not None:
        same, then, call = recent
        if same(input) and then == needs_grad and forward_ad._current_level < 0 and not dispatch_modes():
            return _Differentiable.apply(input, call) if needs_grad else call(input)
    if not are_plain(input, input):
        return None
    try:
        key = (original, needs_grad, input.dtype, input.shape, input.stride(), input.get_device())
    except RuntimeError:  # Sparse and nested tensors have no strides.
        return None
    call = _calls.get(key, UNSEEN)
    if call is UNSEEN:
        call = remember(_calls, key, _resolve(input, original, needs_grad))
    if call is None:
        return None
    same = same_tensors(input)
    if same is not None:
        remember(_recent, original, (same, needs_grad, call.__call__))
    return _Differentiable.apply(input, call) if needs_grad else call(input)


def _resolve(x, original, needs_grad) -> Optional[_Call]:
    """The call for this tensor, or None if it lies outside the domain or the kernels are not proved."""
    if x.dtype not in FLOAT_DTYPES or not runs_kernels(x.device):
        return None
    out = Output.of(torch.nn.functional.silu, x)
    shape, strides = x.shape, x.stride()
    if x.numel() == 0:
        return None if needs_grad else _Call(None, out)
    if is_dense(shape, strides):
        rows, columns, row_stride = 1, x.numel(), x.numel()
        same_order = is_same_order(shape, strides, out.strides)
    else:
        matrix = rows_in_memory(shape, strides)
        if matrix is None:
            return None
        rows, row_stride, order = matrix
        columns = shape[-1]
        same_order = rows_in_memory(shape, out.strides) == (rows, columns, order)
    unit = _unit(columns, row_stride, x.dtype)
    if rows * -(-columns // _BLOCK) > _MAX_PROGRAMS:
        return None
    if not same_order or not _proved("silu", _comparisons, original, x.dtype, unit, x.device):
        return None
    if needs_grad and not _proved("silu gradient", _gradient_comparisons, original, x.dtype, unit, x.device):
        return None
    return _Call(_silu(x.dtype, rows, columns, row_stride, x.device), out)


_gradient_calls = {}


def gradient(dy: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """The gradient of `silu`: from the kernel if dy lies in memory as the input does, otherwise from ATen."""
    if are_plain(dy, input):
        key = (input.shape, input.stride(), dy.stride(), input.dtype, dy.dtype, input.get_device())
        call = _gradient_calls.get(key, UNSEEN)
        if call is UNSEEN:
            call = remember(_gradient_calls, key, _resolve_gradient(dy, input))
        if call is not None:
            return call.backward(dy, input)
    return torch.ops.aten.silu_backward(dy, input)


def _resolve_gradient(dy, x) -> Optional[_Call]:
    if not runs_kernels(x.device) or x.dtype not in FLOAT_DTYPES:
        return None
    if dy.stride() != x.stride() or dy.dtype != x.dtype or not is_dense(x.shape, x.stride()) or x.numel() == 0:
        return None
    out = Output.of(torch.ops.aten.silu_backward, dy, x)
    if not is_same_order(x.shape, x.stride(), out.strides):
        return None
    return _Call(_silu_backward(x.dtype, x.numel(), x.device), out)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, call):
        ctx.save_for_backward(input)
        return call(input)

    @staticmethod
    def backward(ctx, dy):
        (input,) = ctx.saved_tensors
        if is_grad_enabled():  # Somebody differentiates the gradient: ATen then has another formula for it.
            (dx,) = torch.autograd.grad(torch.nn.functional.silu(input), input, dy, create_graph=True)
            return dx, None
        return gradient(dy, input), None


# Proof


def _proved(what, comparisons, original, dtype, unit, device) -> bool:
    key = (what, original, dtype, unit, device)
    subject = proof.Subject(original, device, f"{dtype}, {what}", "silu")
    return proof.admits(key, subject, functools.partial(comparisons, original, dtype, unit, device))


def _all_inputs(dtype, device):
    """Every one of the 65,536 inputs of 16 bits; for fp32 as many, in every binade."""
    bits = torch.arange(1 << 16, dtype=torch.int32, device=device)
    if dtype != torch.float32:
        return bits.to(torch.int16).view(dtype)
    low = torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=device, generator=proof.generator(device, 0))
    return ((bits << 16) | low).view(dtype)


def _comparisons(original, dtype, unit, device):
    rows, columns = 256, 256
    padded = torch.zeros(rows, columns + unit, dtype=dtype, device=device)
    x = padded[:, :columns]
    x.copy_(_all_inputs(dtype, device).view(rows, columns))
    out = torch.full((rows, columns), math.nan, dtype=dtype, device=device)
    _silu(dtype, rows, columns, columns + unit, device)(x, out)
    yield "the output", out, original(None, x)


def _gradient_comparisons(original, dtype, unit, device):
    # `unit` elements more than a whole number of blocks.
    x = torch.cat([_all_inputs(dtype, device), torch.ones(unit, dtype=dtype, device=device)]).requires_grad_()
    dy = torch.randn(x.shape, dtype=torch.float32, device=device, generator=proof.generator(device, 1)).to(dtype)
    dx = torch.full(x.shape, math.nan, dtype=dtype, device=device)
    with torch.enable_grad():
        (expected,) = torch.autograd.grad(original(None, x), x, dy)
    _silu_backward(dtype, x.numel(), device)(dy, x.detach(), dx)
    yield "the input's gradient", dx, expected


# torch.compile


@torch.library.custom_op(add_op_namespace_prefix("silu"), mutates_args=())
def _silu_op(input: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = replacement(input, eager_forward)
    return torch.nn.functional.silu(input) if out is None else out


@_silu_op.register_fake
def _(input):
    return torch.nn.functional.silu(input)


@torch.library.custom_op(add_op_namespace_prefix("silu_backward"), mutates_args=())
def _silu_backward_op(dy: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    # Proved with the forward operator, or else this graph would not have it.
    return gradient(dy, input)


@_silu_backward_op.register_fake
def _(dy, input):
    return torch.ops.aten.silu_backward(dy, input)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    return _silu_backward_op(dy, *ctx.saved_tensors)


_silu_op.register_autograd(_backward, setup_context=_setup_context)


@torch.compiler.assume_constant_result
def _proved_for_compile(original, dtype, device_index, training) -> bool:
    device = torch.device("cuda", device_index)
    if under_transform():
        return False
    proofs = [("silu", _comparisons)] + [("silu gradient", _gradient_comparisons)] * training
    return all(
        _proved(*proof_, original, dtype, 1 << power, device)
        for proof_ in proofs
        for power in range(4)
        if dtype.itemsize << power <= 16
    )


def _compiled(input, original):
    """`replacement` while torch.compile traces: the registered op, or None to trace the original forward."""
    if not input.is_cuda or input.dtype not in FLOAT_DTYPES:
        return None
    training = torch.is_grad_enabled() and input.requires_grad
    if not _proved_for_compile(original, input.dtype, input.device.index or 0, training):
        return None
    return _silu_op(input)
