"""The reduction orders of ATen's kernels for softmax and log_softmax over the last, contiguous dimension
(ATen/native/cuda/SoftMax.cu, PersistentSoftmax.cuh), which `kernels_src/summation.py` implements."""

from dataclasses import dataclass

import torch

from .reduction import next_power_of_two

# The reason of a refusal on ROCm, before anything is compiled.
CUDA_ONLY = "the reduction orders of softmax and cross-entropy are CUDA's, and ROCm has others"

_WARP_SIZE = 32
_BLOCK = 1024
_VECTOR_BYTES = 16
# Bytes of a block, in which ATen's "shared" kernels keep a row.
_SHARED_MEMORY = 48 << 10

WARP, REGISTERS, SHARED, LOOP = "warp", "registers", "shared", "loop"

# The longest rows of a kernel.
_WARP_FORWARD = 2048
_WARP_BACKWARD = 1024
# ATen dispatches fp16 rows with fp32 results separately. Up to torch 2.13 those of a warp are shorter.
_SHORT_WARP_FORWARD = 1024
_REGISTERS = 9216


@dataclass(frozen=True)
class Softmax:
    """The division of one row among `threads` threads, each with one accumulator.

    Attributes:
        kind: WARP and REGISTERS: thread t takes the elements t, t + threads, ...
            SHARED: thread t takes the vectors t, t + threads, ..., the elements of a vector in sequence.
            LOOP: the same for as many elements as fill `threads` vectors, then the rest one by one. If the row begins k
            elements after a multiple of 16 bytes, its first `threads - k` elements come before, one by one.
        threads: threads of a row.
        vector: neighbouring elements that a thread takes at a time.
        in_sequence: sums the threads in sequence, those of a warp first and then the warps; otherwise by halving trees.
    """

    kind: str
    threads: int
    vector: int
    in_sequence: bool = False


def _of_warp(size: int) -> Softmax:
    return Softmax(WARP, min(next_power_of_two(size), _WARP_SIZE), 1)


def softmax_forward(
    size: int, dtype: torch.dtype, fp32_output: bool = False, aligned: bool = True, long_warps: bool = False
) -> Softmax:
    """The kernel for rows of `size` elements.

    Args:
        dtype: the input's dtype.
        fp32_output: a 16-bit input has an fp32 result. ATen has such a kernel for fp16; it converts bf16 to fp32 first.
        aligned: input and output begin at multiples of 16 bytes.
        long_warps: fp16 rows with an fp32 result are a warp's up to 2048 elements, as all others are, and not up to 1024.
    """
    if fp32_output and dtype == torch.bfloat16:
        dtype, fp32_output = torch.float32, False
    vector = _VECTOR_BYTES // dtype.itemsize
    if size <= (_SHORT_WARP_FORWARD if fp32_output and not long_warps else _WARP_FORWARD):
        return _of_warp(size)
    if size <= _REGISTERS and not fp32_output:
        return Softmax(REGISTERS, _BLOCK, 1)
    # The row, and one fp32 number for each warp.
    fits = size * dtype.itemsize < _SHARED_MEMORY - 4 * _BLOCK // _WARP_SIZE
    return Softmax(SHARED if fits and aligned and size % vector == 0 else LOOP, _BLOCK, vector)


def softmax_backward(size: int, dtype: torch.dtype, aligned: bool = True) -> Softmax:
    """The kernel for gradients of rows of `size` elements.

    Args:
        dtype: the dtype of the softmax, its gradient and the result.
        aligned: all three begin at multiples of 16 bytes.
    """
    if size <= _WARP_BACKWARD:
        return _of_warp(size)
    vector = _VECTOR_BYTES // dtype.itemsize
    threads = max(next_power_of_two(min(size // vector, _BLOCK) // 2), _WARP_SIZE)
    fits = size * dtype.itemsize < _SHARED_MEMORY - 4 * threads // _WARP_SIZE
    if fits and aligned and size % vector == 0:
        return Softmax(SHARED, threads, vector)
    return Softmax(LOOP, threads, vector, in_sequence=True)


def lanes(order: Softmax, rows: int, size: int, shift: int, device: torch.device) -> torch.Tensor:
    """The thread of ATen's block that takes each element, int64 [rows, size].

    Args:
        shift: elements from a multiple of 16 bytes to the first row; rows follow each other without a gap.
    """
    element = torch.arange(size, device=device).expand(rows, size)
    if order.kind in (WARP, REGISTERS):
        return element % order.threads
    before = (shift + size * torch.arange(rows, device=device)[:, None]) % order.vector
    first = torch.where(before > 0, order.threads - before, 0)
    step = order.vector * order.threads
    singles = size if order.kind == SHARED else first + (size - first) // step * step
    in_vectors = (element >= first) & (element < singles)
    single = torch.where(element < first, element + before, element - singles)
    return torch.where(in_vectors, (element - first) // order.vector, single) % order.threads
