"""Gradients along several paths from an input to an output, computed when autograd adds them.

Of `x * cos + rotate_half(x) * sin` eager computes two gradients of x. Autograd adds them one after the other to what other
consumers of x have sent before: their sum, sent as one gradient, would have other bits. It adds them to nothing if there is no
earlier gradient, and their sum from one kernel has the same bits then. A function is not told which of the two holds, so it sends
tensors without memory. The addition of all of them computes the sum, any other operation the gradients themselves.
"""

from collections.abc import Sequence
from typing import Callable

import torch

from .torch_internals import current_stream, torch_function_disabled, wrapper_tensor

_ADD = torch.ops.aten.add.Tensor


class _Paths:
    """The gradients of several inputs of one call, each along the same number of paths.

    Args:
        sums: computes the sum of each input's gradients, in their order.
        parts: computes each input's gradients.
        reads: the tensors that both read.
    """

    __slots__ = ("_sums", "_parts", "_reads", "_stream", "_computed_sums", "_computed_parts")

    def __init__(self, sums: Callable, parts: Callable, reads: tuple[torch.Tensor, ...]):
        self._sums, self._parts, self._reads = sums, parts, reads
        self._stream = self._current_stream()
        self._computed_sums = self._computed_parts = None

    def _current_stream(self):
        device = self._reads[0].device
        return current_stream(device.index) if device.type == "cuda" else None

    def _compute(self, function):
        if (
            self._current_stream() != self._stream
        ):  # Autograd adds on the stream of the input's producer, after an event.
            for tensor in self._reads:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return function(*self._reads)

    def part(self, input: int, path: int) -> torch.Tensor:
        if self._computed_parts is None:
            self._computed_parts = self._compute(self._parts)
        return self._computed_parts[input][path]

    def sum(self, input: int) -> torch.Tensor:
        """The sum of an input's gradients; a new tensor, that only the caller has."""
        if self._computed_parts is not None:  # A hook may have changed them.
            first, *others = self._computed_parts[input]
            for other in others:
                first = first + other
            return first
        if self._computed_sums is None or self._computed_sums[input] is None:
            self._computed_sums = list(self._compute(self._sums))
        found, self._computed_sums[input] = self._computed_sums[input], None
        return found


class PathGradient(torch.Tensor):
    """The sum of an input's gradients along the paths from `start` to `stop`, not computed yet."""

    @staticmethod
    def __new__(cls, paths: _Paths, input: int, start: int, stop: int, count: int, layout: tuple):
        shape, strides, dtype, device = layout
        self = wrapper_tensor(cls, shape, strides=strides, dtype=dtype, device=device)
        self._of = paths, input, start, stop, count, layout
        return self

    def computed(self) -> torch.Tensor:
        paths, input, start, stop, _, _ = self._of
        found = paths.part(input, start)
        for path in range(start + 1, stop):
            found = found + paths.part(input, path)
        return found

    def _joined(self, other: "PathGradient"):
        """`self + other`, if other is the gradient along the next path; else None."""
        paths, input, start, stop, count, layout = self._of
        if other._of[0] is not paths or other._of[1] != input or start != 0 or other._of[2:4] != (stop, stop + 1):
            return None
        return paths.sum(input) if stop + 1 == count else PathGradient(paths, input, 0, stop + 1, count, layout)

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


def along_paths(
    count: int, layouts: Sequence[tuple], sums: Callable, parts: Callable, reads: tuple[torch.Tensor, ...]
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """For each input its gradients along `count` paths, for autograd to add.

    Args:
        layouts: shape, strides, dtype and device of each input's gradient.
        sums: `sums(*reads)` returns the sum of each input's gradients, in their order, with the bits of autograd's additions.
        parts: `parts(*reads)` returns each input's gradients.
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
