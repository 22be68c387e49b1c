"""What GroupNorm's kernels are chosen by: the shape of a call, and whether ATen's threads take vectors."""

import functools
import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch.nn import functional

from ..core import plans, proof

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


def takes_vectors(device: torch.device) -> Optional[bool]:
    """Whether eager's threads take vectors of 16 bytes in turn, as from torch 2.15 on, and not single elements.

    None where that cannot be found out now, as during the capture of a CUDA graph.
    """
    if device.type != "cuda":
        return False
    subject = proof.Subject(functional.group_norm, device, "vectors")
    return proof.find_out(("group_norm's vectors", device), subject, functools.partial(_adds_by_two_threads, device))


def _adds_by_two_threads(device):
    """Of ones and two numbers that cancel: where one thread adds both, the mean is 0.984375, and otherwise 0.9375."""
    x = torch.ones(1, 1, 128, dtype=torch.float32, device=device)
    x[..., 0], x[..., 32] = 2.0**26, -(2.0**26)
    _, mean, _ = torch.native_group_norm(x, None, None, *sizes_of(x), 1, 1e-5)
    return mean < 0.96


def vector_of(elements: int, dtype: torch.dtype, in_vectors: bool) -> int:
    """How many neighbours one of ATen's threads takes at a time. The tensors begin at multiples of 16 bytes.

    Args:
        elements: of a group or channel.
        in_vectors: as `takes_vectors` returns it.
    """
    vector = 16 // dtype.itemsize
    return vector if in_vectors and elements % vector == 0 else 1


def is_channels_last(input: torch.Tensor) -> bool:
    """Whether the strides are those of channels that are last. Those of a contiguous input with one channel or one position are,
    too."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    return input.dim() in layouts and input.is_contiguous(memory_format=layouts[input.dim()])
