"""Which kernel ATen runs for softmax and log_softmax over the last, contiguous dimension (ATen/native/cuda/SoftMax.cu,
PersistentSoftmax.cuh), as far as it decides the order of the additions. `kernels_src/summation.py` carries these orders out."""

from dataclasses import dataclass

import torch

_WARP_SIZE = 32
_BLOCK = 1024
_VECTOR_BYTES = 16
# Of a block, which ATen's "shared" kernels keep a row in.
_SHARED_MEMORY = 48 << 10

WARP, REGISTERS, SHARED, LOOP = "warp", "registers", "shared", "loop"

# The longest rows of a kernel.
_WARP_FORWARD = 2048
_WARP_BACKWARD = 1024
# fp16 rows with fp32 results have their own dispatch.
_WARP_WIDENED = 1024
_REGISTERS = 9216


@dataclass(frozen=True)
class Softmax:
    """How one row is divided among `threads`, each of which has one accumulator.

    Attributes:
        kind: WARP and REGISTERS: thread t takes the elements t, t + threads, ...
            SHARED: thread t takes the vector t, t + threads, ..., the elements of a vector in sequence.
            LOOP: the same for as many elements as fill `threads` vectors, and the rest of the row one by one. Where the row does not
            begin at a multiple of 16 bytes, `threads` elements less so many as lie between the last such multiple and the row come
            first, one by one.
        threads: of a row.
        vector: neighbouring elements that a thread takes at a time.
        in_sequence: threads are added up in sequence, first those of a warp and then the warps; otherwise by halving trees.
    """

    kind: str
    threads: int
    vector: int
    in_sequence: bool = False


def _of_warp(size: int) -> Softmax:
    return Softmax(WARP, min(next_power_of_two(size), _WARP_SIZE), 1)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def softmax_forward(size: int, dtype: torch.dtype, widened: bool = False, aligned: bool = True) -> Softmax:
    """The kernel for rows of `size` elements.

    Args:
        dtype: of the input.
        widened: the result is fp32 while the input has 16 bits. ATen does so in one kernel for fp16 alone: bf16 is converted
            first, and the softmax is one of fp32.
        aligned: input and output begin at multiples of 16 bytes.
    """
    if widened and dtype == torch.bfloat16:
        dtype, widened = torch.float32, False
    vector = _VECTOR_BYTES // dtype.itemsize
    if size <= (_WARP_WIDENED if widened else _WARP_FORWARD):
        return _of_warp(size)
    if size <= _REGISTERS and not widened:
        return Softmax(REGISTERS, _BLOCK, 1)
    # The row, and a number of fp32 for each warp.
    fits = size * dtype.itemsize < _SHARED_MEMORY - 4 * _BLOCK // _WARP_SIZE
    return Softmax(SHARED if fits and aligned and size % vector == 0 else LOOP, _BLOCK, vector)


def softmax_backward(size: int, dtype: torch.dtype, aligned: bool = True) -> Softmax:
    """The kernel for gradients of rows of `size` elements.

    Args:
        dtype: of the softmax, its gradient and the result.
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
