"""Every private name of Triton that this package uses: how a compiled kernel is launched without Triton's own call.

The interface of Triton's own call is observed at a kernel's first launch and not looked up by version. If it cannot be
observed or has an unknown form, Triton's own call launches every time, and one warning says why.
"""

import functools
import importlib
import threading
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional

import torch

from . import warn

try:
    import triton
    import triton.language
except ImportError:  # The package loads without Triton; the eager formulas run.
    triton = None

# Names that importing the device code needs. Other missing names make a compilation fail, which the proof reports.
IMPORTED = (
    "jit",
    "knobs.runtime.interpret",
    "language.constexpr",
    "language.int32",
    "language.int64",
    "language.float32",
)


def _missing() -> list:
    missing = []
    for path in IMPORTED:
        try:
            functools.reduce(getattr, path.split("."), triton)
        except AttributeError:
            missing.append(f"triton.{path}")
    libdevice = ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice")
    if not any(map(_has_module, libdevice)):
        missing.append(libdevice[0])
    return missing


def _has_module(name: str) -> bool:
    try:
        return bool(importlib.import_module(name))
    except ImportError:
        return False


# Required names that this Triton does not have.
MISSING = _missing() if triton is not None else []
AVAILABLE = triton is not None and not MISSING
INTERPRETED = AVAILABLE and bool(triton.knobs.runtime.interpret)
if MISSING:
    warn(
        f"Triton {getattr(triton, '__version__', '')} has no {', '.join(MISSING)}: all layers keep their "
        "original forward"
    )
# Its `calls` are the hooks on launches.
launch_hooks = getattr(triton.knobs.runtime, "launch_enter_hook", None) if AVAILABLE else None


class ShortPath(NamedTuple):
    """The launch of a compiled kernel: `launch(blocks, 1, 1, stream, *fixed, arguments)`.

    Args:
        launch: the C function that Triton's own call ends in.
        fixed: its arguments between the stream and the kernel's arguments.
        one_by_one: whether the kernel's arguments follow one by one (Triton 3.6) instead of in a tuple (since 3.7).
        compiled: Triton's object; since 3.8 its deletion unloads the kernel.
    """

    launch: Callable
    fixed: tuple
    one_by_one: bool
    compiled: Any


class _Unknown(Exception):
    """The short path does not know this Triton's interface; the message says why."""


# The reason why this process has no short path; None if it has one.
_refusal: Optional[str] = None
_lock = threading.Lock()


def step_aside(reason: str) -> None:
    """Makes Triton's own call launch from now on. One warning says why."""
    global _refusal
    if _refusal is None:
        _refusal = reason
        warn(
            f"Triton {triton.__version__} launches kernels in a way that the short launch does not know "
            f"({reason}): results are the same, but each launch takes 14 to 25 us of CPU time"
        )


def has_short_path() -> bool:
    """Whether launches may take the short path. On ROCm they may not: a compiled kernel may need storages below 2 GB."""
    return _refusal is None and torch.version.hip is None


def launch_and_observe(
    kernel, blocks: int, stream: int, arguments: Sequence, constants: dict, options: dict
) -> Optional[ShortPath]:
    """Launches by Triton's own call, once, and returns the short path for later launches; None without one.

    Args:
        kernel: the `@triton.jit` function; its parameters are `arguments`, then `constants`.
        stream: the current stream of the current device.
        options: the compiler's options.
    """
    own_call = functools.partial(kernel[(blocks,)], *arguments, **constants, **options)
    try:
        # Compiles without a launch, so that the launcher exists before the observed launch.
        compiled = kernel.warmup(*arguments, grid=(blocks,), **constants, **options)
        run = compiled.run
        needs_memory = run.global_scratch_size or run.profile_scratch_size
    except Exception as error:
        own_call()  # Raises Triton's own error for a kernel that cannot be compiled.
        step_aside(f"{type(error).__name__}: {error}")
        return None
    if needs_memory:  # Triton's own call allocates it for each launch.
        own_call()
        return None
    with _lock:
        sent = _launch_observed(run, own_call)
    try:
        return _short_path(compiled, sent, (blocks, 1, 1, stream), (*arguments, *constants.values()))
    except Exception as error:  # Another interface may raise anything.
        step_aside(str(error) if isinstance(error, _Unknown) else f"{type(error).__name__}: {error}")
        return None


def _launch_observed(run, own_call: Callable[[], Any]) -> list:
    """Makes Triton's own call, and returns the arguments that this thread sent to the C function."""
    launch, thread, sent = getattr(run, "launch", None), threading.get_ident(), []

    def observed(*arguments, **named):
        if threading.get_ident() == thread:
            sent.append((arguments, named))
        return launch(*arguments, **named)

    try:
        run.launch = observed
    except AttributeError:
        own_call()
        return sent
    try:
        own_call()
    finally:
        run.launch = launch
    return sent


class _Recorder:
    """Stands in for Triton's launcher; launches nothing."""

    def __init__(self, run):
        self._run = run
        self.sent = []

    def __getattr__(self, name):
        return getattr(self._run, name)

    def launch(self, *arguments, **named):
        self.sent.append((arguments, named))


def _short_path(compiled, sent: list, grid_and_stream: tuple, arguments: tuple) -> ShortPath:
    """The short path, read from what Triton's launcher sends for marked arguments.

    Args:
        sent: the calls that Triton's own call made with `grid_and_stream` and `arguments`; they must agree.
    """
    if not hasattr(launch_hooks, "calls"):
        raise _Unknown("no knobs.runtime.launch_enter_hook with calls")
    run, marks, unused = compiled.run, [object() for _ in range(4)], [object() for _ in range(3)]
    recorder = _Recorder(run)
    # Marks stand for grid and stream; unused objects stand for hooks and the metadata that only hooks read.
    type(run).__call__(recorder, *marks, compiled.function, compiled.packed_metadata, *unused, *arguments)
    marked, own = _only(recorder.sent), _only(sent)
    if not _same(marked[:4], tuple(marks)):
        raise _Unknown("grid and stream do not come first")
    one_by_one = not _same(marked[-1:], (arguments,))
    last = len(marked) - (len(arguments) if one_by_one else 1)
    if one_by_one and not _same(marked[last:], arguments):
        raise _Unknown("the kernel's arguments do not come last")
    expected = grid_and_stream + marked[4:]
    is_unused = [any(each is mark for mark in unused) for each in expected]
    if len(own) != len(expected) or not all(skip or _same(*pair) for skip, *pair in zip(is_unused, own, expected)):
        raise _Unknown("Triton's own call sends something else")
    fixed = tuple(None if skip else each for skip, each in zip(is_unused[4:last], marked[4:last]))
    return ShortPath(run.launch, fixed, one_by_one, compiled)


def _only(sent: list) -> tuple:
    if len(sent) != 1 or sent[0][1]:
        raise _Unknown(f"{len(sent)} launches by positional arguments instead of one")
    return sent[0][0]


def _same(one, other) -> bool:
    """Whether both are equal; tensors and lists by identity, tuples by their items."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, (torch.Tensor, list)):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other
