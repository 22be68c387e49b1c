"""Gradients along several paths from an input to an output, computed when autograd adds them.

Of `x * cos + rotate_half(x) * sin` eager computes two gradients of x. Autograd adds them one after the other to what other
consumers of x have sent before: their sum, sent as one gradient, would have other bits. It adds them to nothing if there is no
earlier gradient, and their sum from one kernel has the same bits then. A function is not told which of the two holds, so it sends
tensors without memory. The addition of all of them computes the sum, any other operation the gradients themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Optional

import torch

from .domain import allocator
from .launch import Launch
from .torch_internals import current_stream, torch_function_disabled, wrapper_tensor

# From so many bytes of gradients on, a sum saves as much of an H200's time as it takes of the CPU's: 20 us.
MIN_BYTES = 1 << 24
_ADD = torch.ops.aten.add.Tensor


@dataclass(eq=False)
class Backward:
    """The gradients of a call's inputs, each along the same number of paths. A subclass has the two methods that launch.

    Args:
        launch_sums: the launch of `sums`.
        launch_paths: the launch of `along_paths`; None if the sums are wanted.
        paths: their number.
        layouts: shape, strides, dtype and device of each input's gradient.
    """

    launch_sums: Launch
    launch_paths: Optional[Launch]
    paths: int
    layouts: tuple[tuple, ...]

    def __post_init__(self):
        self.empty = [allocator(*layout) for layout in self.layouts]
        size = sum(shape.numel() * dtype.itemsize for shape, _, dtype, _ in self.layouts)
        self._deferred = size >= MIN_BYTES

    def sums(self, *reads: torch.Tensor) -> Sequence[torch.Tensor]:
        """The sum of each input's gradients, in their order, with the bits of autograd's additions."""
        raise NotImplementedError

    def along_paths(self, *reads: torch.Tensor) -> Sequence[tuple[torch.Tensor, ...]]:
        """Each input's gradients, in their order."""
        raise NotImplementedError

    def gradients(self, *reads: torch.Tensor) -> Sequence[tuple[torch.Tensor, ...]]:
        """Each input's gradients, for autograd to add."""
        if not self._deferred:
            return self.along_paths(*reads)
        return deferred(self.paths, self.layouts, self.sums, self.along_paths, reads)


class _Paths:
    """The gradients of several inputs of one call, each along the same number of paths.

    Autograd adds on the stream of an input's producer, and lets it wait for the stream of the backward function. Whatever is
    computed on one producer's stream is therefore not for another's.

    Args:
        sums: computes the sum of each input's gradients, in their order.
        parts: computes each input's gradients.
        reads: the tensors that both read.
    """

    __slots__ = ("_sums", "_parts", "_reads", "_stream", "_sums_on", "_parts_on")

    def __init__(self, sums: Callable, parts: Callable, reads: tuple[torch.Tensor, ...]):
        self._sums, self._parts, self._reads = sums, parts, reads
        self._stream = self._current_stream()
        # By the stream.
        self._sums_on, self._parts_on = {}, {}

    def _current_stream(self):
        device = self._reads[0].device
        return current_stream(device.index) if device.type == "cuda" else None

    def _keep(self, tensors) -> None:
        """Their memory, which is of the backward function's stream, is not used again before the current stream is here."""
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def _on_current_stream(self, function: Callable, computed: dict):
        stream = self._current_stream()
        if stream not in computed:
            if stream != self._stream:
                self._keep(self._reads)
            computed[stream] = list(function(*self._reads))
        return computed[stream]

    def part(self, input: int, path: int) -> torch.Tensor:
        """An input's gradient along a path; the one that hooks have seen, if there are any."""
        seen = self._parts_on.get(self._stream)
        if seen is None:
            return self._on_current_stream(self._parts, self._parts_on)[input][path]
        if self._current_stream() != self._stream:
            self._keep((seen[input][path],))
        return seen[input][path]

    def added(self, input: int, stop: int) -> torch.Tensor:
        """The sum of an input's gradients along the paths from 0 to `stop`."""
        found = self.part(input, 0)
        for path in range(1, stop):
            found = found + self.part(input, path)
        return found

    def sum(self, input: int, count: int) -> torch.Tensor:
        """The sum of all `count` gradients of an input."""
        if self._parts_on:  # Hooks may have changed them.
            return self.added(input, count)
        sums = self._on_current_stream(self._sums, self._sums_on)
        # Only the caller has it, so that autograd may add to it in place.
        found, sums[input] = sums[input], None
        return found if found is not None else self._sums(*self._reads)[input]


class PathGradient(torch.Tensor):
    """The sum of an input's gradients along the paths from 0 to `stop`, or that along the path `start`: not computed yet."""

    @staticmethod
    def __new__(cls, paths: _Paths, input: int, start: int, stop: int, count: int, layout: tuple):
        shape, strides, dtype, device = layout
        self = wrapper_tensor(cls, shape, strides=strides, dtype=dtype, device=device)
        self._of = paths, input, start, stop, count, layout
        self._total = None
        return self

    def computed(self) -> torch.Tensor:
        paths, input, start, stop, _, _ = self._of
        if stop == start + 1:
            return paths.part(input, start)
        if self._total is None:
            self._total = paths.added(input, stop)
        return self._total

    def _joined(self, other: "PathGradient"):
        """`self + other`, if other is the gradient along the next path; else None."""
        paths, input, start, stop, count, layout = self._of
        if other._of[0] is not paths or other._of[1] != input or start != 0 or other._of[2:4] != (stop, stop + 1):
            return None
        if stop + 1 == count:
            return paths.sum(input, count)
        return PathGradient(paths, input, 0, stop + 1, count, layout)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        if function is _ADD and not named and type(arguments[0]) is cls and type(arguments[1]) is cls:
            found = arguments[0]._joined(arguments[1])
            if found is not None:
                return found
        return function(*_computed(arguments), **_computed(named or {}))

    __torch_function__ = torch_function_disabled

    # What hooks on autograd's node may call, and torch does not dispatch.
    def __repr__(self, **how):
        return self.computed().__repr__(**how)

    def tolist(self):
        return self.computed().tolist()

    def numpy(self, **how):
        return self.computed().numpy(**how)

    def data_ptr(self):
        return self.computed().data_ptr()


def _computed(arguments):
    """The arguments with computed gradients."""
    if isinstance(arguments, PathGradient):
        return arguments.computed()
    if isinstance(arguments, dict):
        return {name: _computed(each) for name, each in arguments.items()}
    if isinstance(arguments, (list, tuple)):
        return type(arguments)([_computed(each) for each in arguments])
    return arguments


def deferred(
    count: int, layouts: Sequence[tuple], sums: Callable, parts: Callable, reads: tuple[torch.Tensor, ...]
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """For each input its gradients along `count` paths, for autograd to add.

    Args:
        layouts, sums, parts: see `Backward`, whose `along_paths` the parts are.
        reads: what both are called with.
    """
    if None in (wrapper_tensor, torch_function_disabled) or (reads[0].is_cuda and current_stream is None):
        return parts(*reads)
    paths = _Paths(sums, parts, reads)
    return tuple(
        [
            tuple([PathGradient(paths, input, path, path + 1, count, layout) for path in range(count)])
            for input, layout in enumerate(layouts)
        ]
    )
