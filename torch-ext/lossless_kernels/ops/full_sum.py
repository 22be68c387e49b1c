"""The sum over everything in ATen's order, of terms that a family's kernel computes while it sums them."""

from typing import Optional

import torch

from ..core import launch, plans
from ..core.domain import allocator
from ..core.reduction import full_reduction

if launch.AVAILABLE:
    from ..kernels_src.full_sum import full_sum_last_block

# The reason of a refusal on ROCm, before anything is compiled.
CUDA_ONLY = "the reduction order of full sums is CUDA's, and ROCm has another"
# Elements of a step for each warp of a program, and the most warps.
_ELEMENTS_OF_WARP = 512
_MOST_WARPS = 8


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
    ):
        gpu = plans.gpu(device)
        parts = full_reduction(terms, dtype.itemsize, gpu.multiprocessors, gpu.threads)
        self.parts = [
            (
                _first_half(kernel, constants, dtypes, scalars, part, device),
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
        self.out = allocator((), (), dtype, device)

    def __call__(self, *tensors: torch.Tensor, total: Optional[torch.Tensor] = None) -> torch.Tensor:
        """The sum times the factor, of no dimension; `total` gets the sum in fp32."""
        blocks, out = self.blocks(), self.out()
        total = self.total() if total is None else total
        for first_half, last_block in self.parts:
            first_half(*tensors, blocks)
            last_block.call_3(blocks, total, out)
        return out


def _first_half(kernel, constants, dtypes, scalars, part, device) -> launch.Launch:
    vector = part.vector
    constants = {
        **constants,
        "HEAD": part.begin % vector != 0,
        "TAIL": part.end % vector != 0,
        "WIDTH": part.width,
        "VECTOR": vector,
    }
    warps = min(max(part.width * vector // _ELEMENTS_OF_WARP, 1), _MOST_WARPS)
    dtypes = (*dtypes, torch.float32)
    return launch.bind(kernel, constants, warps, device, dtypes, part.blocks, part.begin, part.end, *scalars)
