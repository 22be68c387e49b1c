"""The one place that launches a compiled kernel.

Triton's own call binds, specialises and looks up on every launch, which costs 14 to 25 us of host time; an eager operator
costs 7 to 9 (H200). So the first call goes through Triton, and later ones through the launcher of the kernel it compiled.
"""

import contextlib
import functools
import operator
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .torch_internals import current_device, current_stream

try:
    import triton
except ImportError:  # The package loads without Triton; the eager formulas run.
    triton = None

# Older ones have no `knobs`, and are not worth a second way of doing everything.
AVAILABLE = hasattr(triton, "knobs")
INTERPRETED = AVAILABLE and bool(triton.knobs.runtime.interpret)
# How the launcher of a compiled kernel takes its arguments is Triton's own business: known for CUDA and these versions.
_VERSION = ".".join(triton.__version__.split(".")[:2]) if AVAILABLE else ""
_KNOWN_INTERFACE = _VERSION in ("3.6", "3.7") and torch.version.hip is None
# Before 3.7 the kernel's arguments follow one by one, since then in a tuple.
_ONE_BY_ONE = _VERSION == "3.6"

# Triton compiles for pointers that are multiples of 16 bytes where it meets such.
_ALIGNMENT_MASK = 15


# Spent in Triton's own calls, nearly all of it on compiling.
seconds_compiling = 0.0

# What this thread would launch, while it only asks what there is to compile.
_asked = threading.local()

if _KNOWN_INTERFACE:
    _enter_hooks = triton.knobs.runtime.launch_enter_hook


@dataclass(frozen=True)
class Compilation:
    """What a first launch has Triton compile; by itself it can be done in any thread, and before the launch.

    Args:
        dtypes: of the tensors, which are aligned.
        scalars: of their types; kernels are not specialised on the values.
    """

    kernel: Any
    constants: tuple
    num_warps: int
    device: int
    dtypes: tuple
    scalars: tuple = field(compare=False)

    def __call__(self) -> None:
        """Compiles, so that Triton's own call finds the kernel in its tables and, in another process, on the disk."""
        if INTERPRETED:
            return
        options = {"num_warps": self.num_warps, "enable_fp_fusion": False}
        with torch.cuda.device(self.device):
            self.kernel.warmup(*self.dtypes, *self.scalars, grid=(1,), **dict(self.constants), **options)


@contextlib.contextmanager
def asking() -> Iterator[dict]:
    """While it lasts, kernels that this thread would launch for the first time are put into the dictionary instead.

    What they should have written is not: calls must not be remembered and nothing be concluded from their results.
    """
    _asked.found = {}
    try:
        yield _asked.found
    finally:
        del _asked.found


def is_asking() -> bool:
    return hasattr(_asked, "found")


class Launcher:
    """One Triton kernel with its constants, for one device: it stands for one compiled kernel.

    What else Triton would specialise on is fixed: integers and floats are declared with a width and `do_not_specialize` in the
    kernels, and a call with a pointer that is not a multiple of 16 goes to Triton itself.

    Args:
        kernel: the `@triton.jit` function; its parameters are pointers, then scalars, then constants.
        constants: the kernel's constexpr arguments by name, in the order of its parameters.
        num_warps: warps per program.
        device: index of the CUDA device.
        dtypes: of the tensors that it is called with.
    """

    __slots__ = ("kernel", "constants", "num_warps", "device", "dtypes", "one_of_several", "launch", "fixed")

    def __init__(self, kernel, constants: dict, num_warps: int, device: int, dtypes: tuple):
        self.kernel = kernel
        self.dtypes = dtypes
        self.constants = constants
        self.num_warps = num_warps
        self.device = device
        self.one_of_several = torch.cuda.device_count() > 1
        self.launch = None
        self.fixed: tuple = ()

    def check(self, tensors) -> None:
        """Raises TypeError unless the tensors have the dtypes that the launcher stands for: others need another kernel."""
        found = tuple(tensor.dtype for tensor in tensors)
        if found != self.dtypes[: len(found)]:
            raise TypeError(f"{self.kernel.__name__}: bound for {self.dtypes}, called with {found}")

    def through_triton(self, blocks, tensors, scalars) -> None:
        """Launches by Triton's own call, and keeps the kernel that it compiled if that fits every later call."""
        self.check(tensors)
        device = tensors[0].device
        left_out = len(self.kernel.arg_names) - len(self.constants) - len(scalars) - len(tensors)
        tensors = [*tensors, *(torch.empty(1, dtype=torch.float32, device=device) for _ in range(left_out))]
        if is_asking():
            dtypes = tuple(tensor.dtype for tensor in tensors)
            constants = tuple(self.constants.items())
            compilation = Compilation(self.kernel, constants, self.num_warps, self.device, dtypes, scalars)
            _asked.found[compilation] = compilation
            return
        if INTERPRETED:
            self.kernel[(blocks,)](*tensors, *scalars, **self.constants)
            return
        global seconds_compiling
        start = time.perf_counter()
        with torch.cuda.device(self.device):
            # Without fusion plain `*` and `+` stay mul.rn and add.rn: every eager operation rounds on its own.
            compiled = self.kernel[(blocks,)](
                *tensors, *scalars, **self.constants, num_warps=self.num_warps, enable_fp_fusion=False
            )
        seconds_compiling += time.perf_counter() - start
        run = compiled.run
        aligned = not any(tensor.data_ptr() & _ALIGNMENT_MASK for tensor in tensors)
        if aligned and _KNOWN_INTERFACE and current_stream is not None and hasattr(run, "launch"):
            if run.global_scratch_size == 0 and run.profile_scratch_size == 0:
                kernel = compiled.function, run.launch_cooperative_grid, run.launch_pdl
                no_scratch = (None, None)
                no_metadata_no_hooks = (None, None, None)
                if _ONE_BY_ONE:
                    self.fixed = (*kernel, *no_scratch, compiled.packed_metadata, *no_metadata_no_hooks)
                else:
                    kinds = run.arg_annotations, run.kernel_signature
                    self.fixed = (*kernel, compiled.packed_metadata, *no_metadata_no_hooks, *no_scratch, *kinds)
                self.launch = run.launch


# So many are kept, of 5 KB each. Triton itself keeps every kernel that it compiled.
@functools.lru_cache(maxsize=1024)
def _launcher(kernel, constants: tuple, num_warps: int, device: int, dtypes: tuple) -> Launcher:
    return Launcher(kernel, dict(constants), num_warps, device, dtypes)


def bind(
    kernel, constants: dict, num_warps: int, device: torch.device, dtypes: tuple, programs: int, *scalars
) -> "Launch":
    """The launch of `programs` programs with these scalars, to be called with tensors of these dtypes.

    Args:
        kernel, constants, num_warps, dtypes: as of `Launcher`; tensors left out at the end of a call need no dtype.
    """
    launcher = _launcher(kernel, tuple(constants.items()), num_warps, device.index or 0, dtypes)
    return Launch(launcher, programs, scalars)


class Launch:
    """A launcher with the number of programs and the scalars fixed."""

    __slots__ = ("_launcher", "_blocks", "_scalars", "_arguments_after", "_kept")

    def __init__(self, launcher: Launcher, blocks: int, scalars: tuple):
        self._launcher = launcher
        self._blocks = blocks
        self._scalars = scalars
        constants = tuple(launcher.constants.values())
        pointers = len(launcher.kernel.arg_names) - len(constants) - len(scalars)
        # By the number of tensors given: null pointers for those left out, scalars, constants.
        self._arguments_after = [(0,) * (pointers - given) + scalars + constants for given in range(pointers + 1)]
        # The last stream and what follows from it, in one piece: another thread may launch on another stream.
        self._kept = (None, None, ())

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launches on the device's current stream.

        Tensors left out at the end stand for fp32 ones that the kernel neither reads nor writes.
        """
        pointers = tuple([tensor.data_ptr() for tensor in tensors])
        if not self._enqueue(pointers, functools.reduce(operator.or_, pointers)):
            self._launcher.through_triton(self._blocks, tensors, self._scalars)

    def on_two(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """`self(first, second)`, sooner: loops over tensors cost a fifth of a launch."""
        pointers = first.data_ptr(), second.data_ptr()
        if not self._enqueue(pointers, pointers[0] | pointers[1]):
            self(first, second)

    def on_three(self, first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> None:
        """`self(first, second, third)`, sooner."""
        pointers = first.data_ptr(), second.data_ptr(), third.data_ptr()
        if not self._enqueue(pointers, pointers[0] | pointers[1] | pointers[2]):
            self(first, second, third)

    def on_four(self, first, second, third, fourth) -> None:
        """`self(first, second, third, fourth)`, sooner."""
        pointers = first.data_ptr(), second.data_ptr(), third.data_ptr(), fourth.data_ptr()
        if not self._enqueue(pointers, pointers[0] | pointers[1] | pointers[2] | pointers[3]):
            self(first, second, third, fourth)

    def on_five(self, first, second, third, fourth, fifth) -> None:
        """`self(first, second, third, fourth, fifth)`, sooner."""
        a, b, c, d, e = first.data_ptr(), second.data_ptr(), third.data_ptr(), fourth.data_ptr(), fifth.data_ptr()
        if not self._enqueue((a, b, c, d, e), a | b | c | d | e):
            self(first, second, third, fourth, fifth)

    def on_six(self, first, second, third, fourth, fifth, sixth) -> None:
        """`self(first, ..., sixth)`, sooner."""
        a, b, c = first.data_ptr(), second.data_ptr(), third.data_ptr()
        d, e, f = fourth.data_ptr(), fifth.data_ptr(), sixth.data_ptr()
        if not self._enqueue((a, b, c, d, e, f), a | b | c | d | e | f):
            self(first, second, third, fourth, fifth, sixth)

    def _enqueue(self, pointers: tuple[int, ...], any_of_them: int) -> bool:
        """Launches; False if Triton's own call must. `any_of_them` is the bitwise or of the pointers."""
        launcher = self._launcher
        if (
            any_of_them & _ALIGNMENT_MASK
            or launcher.launch is None
            # A profiler, say, wants to see launches: Triton's own call tells it.
            or _enter_hooks.calls
            or (launcher.one_of_several and current_device() != launcher.device)
        ):
            return False
        stream = current_stream(launcher.device)
        kept, launch, before = self._kept
        if stream != kept:
            launch, before = launcher.launch, (self._blocks, 1, 1, stream, *launcher.fixed)
            self._kept = (stream, launch, before)
        # Tuples that exist are joined faster than their items are passed one by one.
        arguments = pointers + self._arguments_after[len(pointers)]
        launch(*(before + (arguments if _ONE_BY_ONE else (arguments,))))
        return True
