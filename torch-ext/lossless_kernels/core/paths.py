"""Gradients along several paths from an input to an output, computed when autograd adds them.

For `x * cos + rotate_half(x) * sin` eager computes two gradients of x. Autograd adds them one after the other to what other
consumers of x have sent before. If there is such a gradient, the sum of the two, sent as one gradient, would have other bits; if
there is none, it has the same bits, and one kernel can compute it. A function is not told whether there is one, so it sends tensors
without memory: the addition of all of them to each other computes the sum, any other operation the gradients themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch.compiler import is_dynamo_compiling

from .domain import allocator
from .launch import Launch
from .torch_internals import current_stream, torch_function_disabled, wrapper_tensor

# From so many bytes of gradients on, one kernel for the sum saves as much of an H200's time as it costs of the CPU's: 20 us.
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

    Autograd adds on the stream of an input's producer, which waits for the backward function's stream. A result is used on the
    stream that computed it. Only gradients that a hook has read, on the backward function's stream, are used on others too.

    Args:
        sums: computes the sum of each input's gradients, in their order.
        parts: computes each input's gradients.
        reads: the tensors that both read.
    """

    __slots__ = ("_sums", "_parts", "_reads", "_versions", "_stream", "_sums_on", "parts_on")

    def __init__(self, sums: Callable, parts: Callable, reads: tuple[torch.Tensor, ...]):
        self._sums, self._parts, self._reads = sums, parts, reads
        self._versions = self._current_versions()
        self._stream = self._current_stream()
        # Results by stream.
        self._sums_on, self.parts_on = {}, {}

    def _current_versions(self) -> list:
        return [None if tensor.is_inference() else tensor._version for tensor in self._reads]

    def _current_stream(self):
        device = self._reads[0].device
        return current_stream(device.index) if device.type == "cuda" else None

    def keep(self, *tensors: torch.Tensor) -> None:
        """Their memory is not reused before the current stream has finished what is queued now."""
        if self._current_stream() != self._stream:
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def _on_current_stream(self, function: Callable, results: dict):
        stream = self._current_stream()
        if stream not in results:
            if self._current_versions() != self._versions:
                raise RuntimeError(
                    "lossless-kernels: a gradient, kept by a hook on its autograd node, is read after a tensor that it is "
                    "computed from was modified in place: clone it in the hook"
                )
            self.keep(*self._reads)
            results[stream] = list(function(*self._reads))
        return results[stream]

    def part(self, number: int, path: int) -> torch.Tensor:
        """The gradient of the input of this number along a path."""
        seen = self.parts_on.get(self._stream)
        if seen is None:
            return self._on_current_stream(self._parts, self.parts_on)[number][path]
        self.keep(seen[number][path])
        return seen[number][path]

    def sum(self, number: int) -> torch.Tensor:
        """The sum of all gradients of the input of this number: a new tensor, which autograd may add to in place."""
        sums = self._on_current_stream(self._sums, self._sums_on)
        found, sums[number] = sums[number], None
        return found if found is not None else self._sums(*self._reads)[number]


class PathGradient(torch.Tensor):
    """The sum of an input's gradients along the paths `start`, ..., `stop - 1`, not computed yet."""

    @staticmethod
    def __new__(cls, paths: _Paths, number: int, start: int, stop: int, count: int, layout: tuple):
        shape, strides, dtype, device = layout
        self = wrapper_tensor(cls, shape, strides=strides, dtype=dtype, device=device)
        self._paths, self._number, self._start, self._stop, self._count = paths, number, start, stop, count
        self._layout, self._total = layout, None
        return self

    def computed(self) -> torch.Tensor:
        paths, number = self._paths, self._number
        if self._stop == self._start + 1:
            return paths.part(number, self._start)
        if self._total is None:
            self._total = paths.part(number, self._start)
            for path in range(self._start + 1, self._stop):
                self._total = self._total + paths.part(number, path)
        paths.keep(self._total)
        return self._total

    def _joined(self, other: "PathGradient") -> Optional[torch.Tensor]:
        """`self + other` if other is the gradient along the next path, and nobody has used a gradient; else None."""
        paths, number, stop = self._paths, self._number, self._stop
        if other._paths is not paths or other._number != number or paths.parts_on:
            return None
        if self._start != 0 or other._start != stop:
            return None
        if stop + 1 == self._count:
            return paths.sum(number)
        return PathGradient(paths, number, 0, stop + 1, self._count, self._layout)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        if function is _ADD and not named and type(arguments[0]) is cls and type(arguments[1]) is cls:
            found = arguments[0]._joined(arguments[1])
            if found is not None:
                return found
        return function(*_computed(arguments), **_computed(named or {}))

    __torch_function__ = torch_function_disabled

    # A hook on autograd's node may also use what torch does not dispatch.
    @property
    def data(self):
        return self.computed().data

    @data.setter
    def data(self, value):
        self.computed().data = value


def _of_computed(name: str) -> Callable:
    def method(self, *arguments, **named):
        return getattr(self.computed(), name)(*arguments, **named)

    return method


for _name in (
    "__repr__",
    "__deepcopy__",
    "__reduce_ex__",
    "__dlpack__",
    "tolist",
    "numpy",
    "data_ptr",
    "untyped_storage",
):
    setattr(PathGradient, _name, _of_computed(_name))


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
) -> Sequence[tuple[torch.Tensor, ...]]:
    """For each input its gradients along `count` paths, for autograd to add.

    Args:
        layouts: shape, strides, dtype and device of each input's gradient.
        sums: `sums(*reads)` returns the sum of each input's gradients, in their order.
        parts: `parts(*reads)` returns each input's gradients.
    """
    missing = None in (wrapper_tensor, torch_function_disabled) or (reads[0].is_cuda and current_stream is None)
    if missing or is_dynamo_compiling():  # Compiled autograd traces no tensors of ours.
        return parts(*reads)
    paths = _Paths(sums, parts, reads)
    return [
        tuple([PathGradient(paths, number, path, path + 1, count, layout) for path in range(count)])
        for number, layout in enumerate(layouts)
    ]
