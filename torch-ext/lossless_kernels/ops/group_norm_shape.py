"""The shape of a call of GroupNorm, by which its kernels are chosen."""

import math
from dataclasses import dataclass

import torch

from ..core import plans

# From this size on groups that are fewer than the multiprocessors are written by several programs each, in the forward pass. Not
# tuned.
SPLIT_SIZE = 1 << 17


@dataclass(frozen=True)
class Shape:
    """The shape of a call.

    Args:
        samples: their number.
        groups: of a sample.
        channels: of a group.
        positions: of a channel.
    """

    samples: int
    groups: int
    channels: int
    positions: int

    @property
    def size(self) -> int:
        """The elements of a group."""
        return self.channels * self.positions

    @property
    def rows(self) -> int:
        """The groups of all samples."""
        return self.samples * self.groups

    def is_split(self, gpu: plans.Gpu, least_size: int = SPLIT_SIZE) -> bool:
        """Whether several programs write a group."""
        return self.size >= least_size and self.rows < gpu.multiprocessors


def sizes_of(input: torch.Tensor) -> tuple[int, int, int]:
    """Samples, channels, and positions of a channel."""
    return input.shape[0], input.shape[1], math.prod(input.shape[2:])


def vector_of(elements: int, dtype: torch.dtype, in_vectors: bool) -> int:
    """The neighbours among so many elements that one of ATen's threads takes at a time, if its tensors begin at multiples of
    16 bytes.

    Args:
        in_vectors: whether ATen's threads take vectors.
    """
    vector = 16 // dtype.itemsize
    return vector if in_vectors and elements % vector == 0 else 1
