"""The sum over everything in ATen's order, of terms that a family's kernel computes while it sums them."""

from typing import Optional

import torch

from ..core import launch, plans
from ..core.calls import Outside
from ..core.domain import allocator
from ..core.reduction import FullReduction, full_reduction

if launch.AVAILABLE:
    from ..kernels_src.full_sum import full_sum_last_block

# The reason of a refusal on ROCm, before anything is compiled.
CUDA_ONLY = "the reduction order of full sums is CUDA's, and ROCm has another"
# Elements of the longest sum of a proof: of more than 512 blocks if the GPU has as many.
_MOST_ELEMENTS = 1 << 23


# Sums of each length up to _MOST_REPEATED. One sum exposes a wrong reduction order with a probability of about 1/3, and
# too few blocks with 1/6 or more.
_PROOF_SUMS = 24
_MOST_REPEATED = 1 << 20


def order_of(elements: int, dtype: torch.dtype, device: torch.device) -> FullReduction:
    """The order of the first part."""
    gpu = plans.gpu(device)
    return full_reduction(elements, dtype.itemsize, gpu.multiprocessors, gpu.threads)[0]


def lengths_of_proof(width: int, dtype: torch.dtype, device: torch.device) -> list[int]:
    """Lengths of sums of blocks of `width` threads: of one block and of several, with and without single elements."""
    step = width * 16 // dtype.itemsize
    found = (width, 2 * width - 1, step, 2 * step - 1, 45 * step + 3, 150 * step, 300 * step + 1, 1500 * step)
    of_width = [each for each in (*found, _MOST_ELEMENTS - 1) if order_of(each, dtype, device).width == width]
    return [elements for elements in of_width if elements < _MOST_ELEMENTS]


def sums_of_proof(elements: int) -> int:
    """How many sums of this length a proof compares."""
    return _PROOF_SUMS if elements <= _MOST_REPEATED else 1


def check_parts(elements: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises Outside where a part of more than 2 GiB begins inside a vector: proofs have no such sums."""
    gpu = plans.gpu(device)
    parts = full_reduction(elements, dtype.itemsize, gpu.multiprocessors, gpu.threads)
    if any(part.begin % part.vector for part in parts):
        raise Outside("a sum of more than 2 GiB whose parts begin inside of vectors")


class FullSum:
    """A sum of the terms that `kernel` computes of its tensors, resolved for their number, dtype and device.

    Args:
        kernel: sums the terms of one block. Its parameters are `tensors` pointers, the pointer of the blocks' results, the
            int64 scalars begin and end, `scalars`, `constants`, then HEAD, TAIL, WIDTH and VECTOR, as in `divergence_blocks`.
        dtypes: dtypes of the tensors.
        terms: the number of terms.
        dtype: that of the terms in eager, and of the result.
        factor: multiplies the sum; `core.reduction.reciprocal` of the number that eager divides by.
        round_sum: whether eager rounds the sum to `dtype` before it divides, as an operation of its own.
        shape: of the result, which has one element.
        of_warp: elements of a step for each warp of a program.
    """

    __slots__ = ("parts", "blocks", "total", "out")

    def __init__(
        self,
        kernel,
        constants: dict,
        dtypes: tuple,
        scalars: tuple,
        terms: int,
        dtype: torch.dtype,
        device: torch.device,
        factor: float = 1.0,
        round_sum: bool = True,
        shape: tuple = (),
        of_warp: int = 512,
    ):
        gpu = plans.gpu(device)
        parts = full_reduction(terms, dtype.itemsize, gpu.multiprocessors, gpu.threads)
        self.parts = [
            (
                _first_half(kernel, constants, dtypes, scalars, part, of_warp, device),
                launch.bind(
                    full_sum_last_block,
                    {"WIDTH": part.width, "CONTINUES": part.begin > 0, "ROUND_SUM": round_sum},
                    max(part.width // 128, 1),
                    device,
                    (torch.float32, torch.float32, dtype),
                    1,
                    part.blocks,
                    factor,
                ),
            )
            for part in parts
        ]
        self.blocks = allocator((max(part.blocks for part in parts),), (1,), torch.float32, device)
        self.total = allocator((1,), (1,), torch.float32, device)
        self.out = allocator(shape, (1,) * len(shape), dtype, device)

    def __call__(self, *tensors: torch.Tensor, total: Optional[torch.Tensor] = None) -> torch.Tensor:
        """The sum times the factor; `total` gets the sum in fp32."""
        blocks, out = self.blocks(), self.out()
        total = self.total() if total is None else total
        for first_half, last_block in self.parts:
            first_half(*tensors, blocks)
            last_block.call_3(blocks, total, out)
        return out


def _first_half(kernel, constants, dtypes, scalars, part, of_warp, device) -> launch.Launch:
    vector = part.vector
    constants = {
        **constants,
        "HEAD": part.begin % vector != 0,
        "TAIL": part.end % vector != 0,
        "WIDTH": part.width,
        "VECTOR": vector,
    }
    warps = max(part.width * vector // of_warp, 1)
    dtypes = (*dtypes, torch.float32)
    return launch.bind(kernel, constants, warps, device, dtypes, part.blocks, part.begin, part.end, *scalars)
