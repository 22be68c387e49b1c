"""Activation functions with the bits of ATen's eager CUDA kernels."""

import functools
import math
from typing import Callable, Optional

import torch

from . import launch, proof
from ._ops import add_op_namespace_prefix
from .domain import FLOAT_DTYPES, UNSEEN, check_floating, is_plain, remember, runs_kernels, transformed
from .layout import Output, is_dense, rows_in_memory

if launch.AVAILABLE:
    from .kernels_src.activation import silu_forward


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
    out = replacement(input, _eager_forward)
    return torch.nn.functional.silu(input) if out is None else out


def _eager_forward(module, input):
    return torch.nn.functional.silu(input)


_BLOCK = 2048
_NUM_WARPS = 8


@functools.lru_cache(maxsize=None)
def _silu_launcher(dtype, unit, device) -> launch.Launcher:
    """The kernel for one class of inputs, their dtype included: a launcher stands for one compiled kernel."""
    return launch.Launcher(silu_forward, {"UNIT": unit, "BLOCK": _BLOCK}, _NUM_WARPS, device)


def _unit(columns: int, row_stride: int, dtype: torch.dtype) -> int:
    """So many elements, up to 16 bytes, can be read at a time."""
    return math.gcd(columns, row_stride, 16 // dtype.itemsize)


def _silu(dtype, rows, columns, row_stride, device: torch.device) -> launch.Launch:
    """The launch of the kernel, to be called with input and out."""
    unit = _unit(columns, row_stride, dtype)
    blocks_per_row = -(-columns // _BLOCK)
    launcher = _silu_launcher(dtype, unit, device.index or 0)
    return launcher.bind(rows * blocks_per_row, columns // unit, row_stride // unit, blocks_per_row)


class _Call:
    """All that follows from the shape, strides, dtype and device of a call."""

    __slots__ = ("launch", "out", "like_input")

    def __init__(self, launch: Optional[launch.Launch], out: Output):
        self.launch = launch
        self.out = out
        self.like_input = out.like_input

    def __call__(self, x):
        out = torch.empty_like(x) if self.like_input else self.out.empty(x)
        if self.launch is not None:
            self.launch(x, out)
        return out


_calls = {}


def replacement(input: torch.Tensor, original: Callable) -> Optional[torch.Tensor]:
    """What `original(module, input)` returns, from the kernel; None where the caller must compute it itself."""
    if torch.compiler.is_compiling():
        return _compiled(input, original)
    if not is_plain(input) or transformed() or (torch.is_grad_enabled() and input.requires_grad):
        return None
    try:
        key = (original, input.dtype, input.shape, input.stride(), input.get_device())
    except RuntimeError:  # Sparse and nested tensors have no strides.
        return None
    call = _calls.get(key, UNSEEN)
    if call is UNSEEN:
        call = remember(_calls, key, _resolve(input, original))
    return None if call is None else call(input)


def _resolve(x, original) -> Optional[_Call]:
    """The call for this tensor, or None if it lies outside the domain or the kernel is not proved."""
    if x.dtype not in FLOAT_DTYPES or not runs_kernels(x.device):
        return None
    out = Output.of(torch.nn.functional.silu, x)
    shape, strides = x.shape, x.stride()
    if x.numel() == 0:
        return _Call(None, out)
    if is_dense(shape, strides):
        rows, columns, row_stride = 1, x.numel(), x.numel()
        same_order = all(size == 1 or ours == eagers for size, ours, eagers in zip(shape, strides, out.strides))
    else:
        matrix = rows_in_memory(shape, strides)
        if matrix is None:
            return None
        rows, row_stride, order = matrix
        columns = shape[-1]
        same_order = rows_in_memory(shape, out.strides) == (rows, columns, order)
    if not same_order or not _proved(original, x.dtype, _unit(columns, row_stride, x.dtype), x.device):
        return None
    return _Call(_silu(x.dtype, rows, columns, row_stride, x.device), out)


def _proved(original, dtype, unit, device) -> bool:
    key = ("silu", original, dtype, unit, device)
    subject = f"{original.__qualname__} on {device}, {dtype},"
    return proof.admits(key, subject, device, functools.partial(_comparisons, original, dtype, unit, device))


def _comparisons(original, dtype, unit, device):
    # Every one of the 65,536 inputs of 16 bits; for fp32 as many, in every binade.
    bits = torch.arange(1 << 16, dtype=torch.int32, device=device)
    if dtype == torch.float32:
        low = torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=device, generator=proof.generator(device, 0))
        x = ((bits << 16) | low).view(dtype)
    else:
        x = bits.to(torch.int16).view(dtype)
    rows, columns = 256, 256
    padded = torch.zeros(rows, columns + unit, dtype=dtype, device=device)
    padded[:, :columns] = x.view(rows, columns)
    x = padded[:, :columns]
    out = torch.full((rows, columns), math.nan, dtype=dtype, device=device)
    _silu(dtype, rows, columns, columns + unit, device)(x, out)
    yield "the output", out, original(None, x)


# torch.compile


@torch.library.custom_op(add_op_namespace_prefix("silu"), mutates_args=())
def _silu_op(input: torch.Tensor) -> torch.Tensor:
    out = replacement(input, _eager_forward)
    return torch.nn.functional.silu(input) if out is None else out


@_silu_op.register_fake
def _(input):
    return torch.nn.functional.silu(input)


@torch.compiler.assume_constant_result
def _proved_for_compile(original, dtype, device_index) -> bool:
    device = torch.device("cuda", device_index)
    return all(_proved(original, dtype, 1 << power, device) for power in range(4) if dtype.itemsize << power <= 16)


def _compiled(input, original):
    """`replacement` while torch.compile traces: the registered op, or None to trace the original forward."""
    if not input.is_cuda or input.dtype not in FLOAT_DTYPES or (torch.is_grad_enabled() and input.requires_grad):
        return None
    if not _proved_for_compile(original, input.dtype, input.device.index or 0):
        return None
    return _silu_op(input)
