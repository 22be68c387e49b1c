"""What Triton's interpreter rounds otherwise than a GPU, found by trying: its versions differ.

That of Triton 3.7 rounds an FMA twice, that of 3.9 once. All truncate to bf16.
"""

import functools
from collections.abc import Callable

import aten_model
import numpy
import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _fma(a_ptr, b_ptr, c_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.fma(tl.load(a_ptr + at), tl.load(b_ptr + at), tl.load(c_ptr + at)))


def _rounded_twice(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * b + c


@functools.cache
def the_fma() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The interpreter's `tl.fma` in torch operations."""
    a, b, c = torch.randn(3, 1024, generator=torch.Generator().manual_seed(1)).unbind()
    out = torch.empty_like(a)
    _fma[(1,)](a, b, c, out, SIZE=1024)
    (found,) = [each for each in (aten_model.fused_multiply_add, _rounded_twice) if torch.equal(each(a, b, c), out)]
    return found


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fp32 a * b + c as the interpreter's `tl.fma` rounds it."""
    return the_fma()(*torch.broadcast_tensors(a, b, c))


def numpy_rsqrt(x: Tensor) -> Tensor:
    """The interpreter's reciprocal square root."""
    return torch.from_numpy(numpy.asarray(1 / numpy.sqrt(x.numpy())))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 x in another dtype: the interpreter truncates to bf16."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(dtype) if dtype == torch.bfloat16 else x.to(dtype)
