"""The shape of a call of GroupNorm, by which its kernels are chosen."""

from dataclasses import dataclass

from ..core import plans

# From this size on groups that are fewer than the multiprocessors are written by several programs each. Not tuned.
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

    def is_split(self, gpu: plans.Gpu) -> bool:
        """Whether several programs write a group."""
        return self.size >= SPLIT_SIZE and self.rows < gpu.multiprocessors


def power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()
