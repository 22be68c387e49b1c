"""What families of ops declare about themselves: the rest of the package and its tools name no family.

A family fills these tables where it is defined; importing the package imports all of them.
"""

from dataclasses import dataclass
from typing import Callable, Optional


@dataclass(frozen=True)
class Warmup:
    """How `warmup` calls a layer.

    Args:
        shapes: the shapes of its inputs, `shapes(weight, dtype, device, rows, training)`; `rows` are the user's, or None.
            By default one shape: an activation has one kernel for every size that 16 bytes divide.
        part: the part of the module to call, with its forward; None: the module itself. It raises `Outside` without one.
        left_out: the children that are called as identities.
    """

    shapes: Callable = lambda *_: [(16, 4096)]
    part: Optional[Callable] = None
    left_out: tuple[str, ...] = ()


# Layer -> how `warmup` calls it. A layer that is missing has the defaults.
WARMUP: dict[str, Warmup] = {}
# Op -> class of its launch configurations: the ops that a plan file may tune.
TUNING: dict[str, type] = {}
