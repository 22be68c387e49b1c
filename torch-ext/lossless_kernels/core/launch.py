"""Launches compiled kernels.

Triton's own call binds, specialises and looks up arguments on every launch: 14 to 25 us of CPU time, against 7 to 9 us
for an eager operator (H200). The first launch uses Triton's call, later ones the launcher of the compiled kernel.
"""

import contextlib
import ctypes
import functools
import operator
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch

from . import plans, triton_internals
from .reduction import CUDA
from .torch_internals import current_device, current_stream
from .triton_internals import AVAILABLE as AVAILABLE
from .triton_internals import INTERPRETED

# Triton specialises a kernel on pointers that are multiples of 16 bytes.
_ALIGNMENT_MASK = 15
# The limit of CUDA's grid along x.
MAX_PROGRAMS = (1 << 31) - 1
# The time in Triton's own calls, nearly all of it compilation.
seconds_compiling = 0.0
# `found` holds the compilations of this thread's dry run.
_dry_run = threading.local()

_enter_hooks = triton_internals.launch_hooks


def options(num_warps: int, max_registers: Optional[int], overlaps: bool) -> dict:
    """Triton's options. Without fusion `*` and `+` compile to mul.rn and add.rn: each eager operation rounds separately."""
    more = {} if max_registers is None else {"maxnreg": max_registers}
    if overlaps:
        more["launch_pdl"] = True
    return {"num_warps": num_warps, "enable_fp_fusion": False, **more}


@functools.cache
def driver_version() -> int:
    """The version of CUDA that the driver is for, 12030 for 12.3; 0 if there is no driver."""
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        failed = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else version.value


def can_overlap(device: torch.device) -> bool:
    """Whether a kernel can begin before the one before it in its stream has ended: NVIDIA's programmatic dependent launch, from
    compute capability 9.0 on. CUDA graphs can hold such launches since the driver of CUDA 12.3."""
    capability = plans.gpu(device).compute_capability
    return capability is not None and capability >= 9 and driver_version() >= 12030


@dataclass(frozen=True)
class Compilation:
    """The compilation at a kernel's first launch. Any thread may run it before the launch.

    Args:
        dtypes: the tensors' dtypes; the tensors are aligned.
        scalars: values of the scalars' types; kernels are not specialised on values.
    """

    kernel: Any
    constants: tuple
    num_warps: int
    max_registers: Optional[int]
    overlaps: bool
    device: int
    dtypes: tuple
    scalars: tuple = field(compare=False)

    def __call__(self) -> None:
        """Compiles the kernel into Triton's table and its cache on disk."""
        if INTERPRETED:
            return
        with torch.cuda.device(self.device):
            self.kernel.warmup(*self.dtypes, *self.scalars, grid=(1,), **dict(self.constants), **self.options)

    @property
    def options(self) -> dict:
        return options(self.num_warps, self.max_registers, self.overlaps)


@contextlib.contextmanager
def collect_compilations() -> Iterator[dict]:
    """A dry run: collects in the dictionary what this thread's first launches would compile, instead of launching.

    Kernels write no results: callers must not record calls or draw conclusions from their outputs.
    """
    _dry_run.found = {}
    try:
        yield _dry_run.found
    finally:
        del _dry_run.found


def is_collecting() -> bool:
    return hasattr(_dry_run, "found")


class Launcher:
    """One Triton kernel with its constants on one device: one compiled kernel.

    Triton specialises it on nothing else: kernels declare scalars with a width and `do_not_specialize`, and a call with
    a pointer that is not a multiple of 16 uses Triton's own call. On ROCm Triton also specialises it on tensors whose
    storage ends below 2 GB. There Triton's own call launches every time, and tells these two apart.

    Args:
        kernel: the `@triton.jit` function; its parameters are pointers, then scalars, then constants.
        constants: the kernel's constexpr arguments by name, in any order.
        num_warps: warps per program.
        max_registers: the most registers of a thread, of kernels that run on NVIDIA alone; None lets the compiler decide.
        overlaps: see `bind`.
        device: index of the CUDA device.
        dtypes: dtypes of the tensors.
    """

    __slots__ = (
        "kernel",
        "constants",
        "num_warps",
        "max_registers",
        "overlaps",
        "device",
        "dtypes",
        "one_of_several",
        "path",
        "launch",
    )

    def __init__(
        self,
        kernel,
        constants: dict,
        num_warps: int,
        max_registers: Optional[int],
        overlaps: bool,
        device: int,
        dtypes: tuple,
    ):
        self.kernel = kernel
        self.dtypes = dtypes
        # In the order of the parameters, in which the short path sends them.
        self.constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        if len(self.constants) < len(constants):
            raise TypeError(f"{kernel.__name__}: expected constants {kernel.arg_names}, found {list(constants)}")
        self.num_warps = num_warps
        self.max_registers = max_registers
        self.overlaps = overlaps
        self.device = device
        self.one_of_several = torch.cuda.device_count() > 1
        # Without a short path `launch` stays None.
        self.path: Optional[triton_internals.ShortPath] = None
        self.launch = None

    def check(self, tensors) -> None:
        """Raises TypeError unless the tensors have the launcher's dtypes: others need another kernel."""
        found = tuple(tensor.dtype for tensor in tensors)
        if found != self.dtypes[: len(found)]:
            raise TypeError(f"{self.kernel.__name__}: bound for {self.dtypes}, called with {found}")

    def through_triton(self, blocks, tensors, scalars) -> None:
        """Launches by Triton's own call, and keeps the compiled kernel's launcher if its interface is known."""
        self.check(tensors)
        device = tensors[0].device
        left_out = len(self.kernel.arg_names) - len(self.constants) - len(scalars) - len(tensors)
        tensors = [*tensors, *(torch.empty(1, dtype=torch.float32, device=device) for _ in range(left_out))]
        if is_collecting():
            dtypes = tuple(tensor.dtype for tensor in tensors)
            constants = tuple(self.constants.items())
            how = self.num_warps, self.max_registers, self.overlaps
            compilation = Compilation(self.kernel, constants, *how, self.device, dtypes, scalars)
            _dry_run.found[compilation] = compilation
            return
        if INTERPRETED:
            self.kernel[(blocks,)](*tensors, *scalars, **self.constants)
            return
        global seconds_compiling
        start = time.perf_counter()
        how = options(self.num_warps, self.max_registers, self.overlaps)
        aligned = not any(tensor.data_ptr() & _ALIGNMENT_MASK for tensor in tensors)
        with torch.cuda.device(self.device):
            if self.launch is None and aligned and current_stream is not None and triton_internals.has_short_path():
                stream, arguments = current_stream(self.device), (*tensors, *scalars)
                self.path = triton_internals.launch_and_observe(
                    self.kernel, blocks, stream, arguments, self.constants, how
                )
                self.launch = self.path and self.path.launch
            else:
                self.kernel[(blocks,)](*tensors, *scalars, **self.constants, **how)
        seconds_compiling += time.perf_counter() - start


# A launcher takes 5 KB. Triton itself keeps every kernel that it compiled.
@functools.lru_cache(maxsize=1024)
def _launcher(
    kernel,
    constants: tuple,
    num_warps: int,
    max_registers: Optional[int],
    overlaps: bool,
    device: int,
    dtypes: tuple,
) -> Launcher:
    return Launcher(kernel, dict(constants), num_warps, max_registers, overlaps, device, dtypes)


def bind(
    kernel,
    constants: dict,
    num_warps: int,
    device: torch.device,
    dtypes: tuple,
    programs: int,
    *scalars,
    max_registers: Optional[int] = None,
    overlaps: bool = False,
) -> "Launch":
    """The launch of `programs` programs with these scalars. The other arguments are `Launcher`'s; tensors omitted at
    the end of a call need no dtype.

    Args:
        num_warps: a program's threads / 32, for every GPU. Where a warp has 64 threads, half as many warps are launched.
        overlaps: on a device that `can_overlap`, the kernel may begin when all programs of the kernel before it in the stream
            have called `let_next_kernel_begin`. It must read nothing that this one writes, and one of its programs must call
            `wait_for_previous_kernel`: otherwise the kernels that follow would not wait for the one before.
    """
    num_warps = max(num_warps * CUDA.warp_size // plans.gpu(device).build.warp_size, 1)
    fixed = num_warps, max_registers, overlaps, device.index or 0
    launcher = _launcher(kernel, tuple(constants.items()), *fixed, dtypes)
    return Launch(launcher, programs, scalars)


class Launch:
    """A launcher with a fixed number of programs and fixed scalars.

    `call_2` to `call_6` are the same call for so many tensors. They avoid a loop over tensors: 0.1 us each.
    """

    __slots__ = ("_launcher", "_blocks", "_scalars", "_arguments_after", "_last")

    def __init__(self, launcher: Launcher, blocks: int, scalars: tuple):
        self._launcher = launcher
        self._blocks = blocks
        self._scalars = scalars
        constants = tuple(launcher.constants.values())
        pointers = len(launcher.kernel.arg_names) - len(constants) - len(scalars)
        # By the number of tensors passed: null pointers for omitted ones, scalars, constants.
        self._arguments_after = [(0,) * (pointers - given) + scalars + constants for given in range(pointers + 1)]
        # The last stream, the launcher and its first arguments. One tuple: another thread may launch on another stream.
        self._last = (None, None, (), False)

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launches on the device's current stream. Tensors omitted at the end count as fp32 and are never accessed."""
        pointers = tuple([tensor.data_ptr() for tensor in tensors])
        if not self._enqueue(pointers, functools.reduce(operator.or_, pointers)):
            self._launcher.through_triton(self._blocks, tensors, self._scalars)

    def takes(self, *tensors: torch.Tensor) -> bool:
        """Whether the first tensors have the dtypes that the launch is bound for. A launch does not check them."""
        return tuple([tensor.dtype for tensor in tensors]) == self._launcher.dtypes[: len(tensors)]

    def call_2(self, first: torch.Tensor, second: torch.Tensor) -> None:
        pointers = first.data_ptr(), second.data_ptr()
        if not self._enqueue(pointers, pointers[0] | pointers[1]):
            self(first, second)

    def call_3(self, first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> None:
        pointers = first.data_ptr(), second.data_ptr(), third.data_ptr()
        if not self._enqueue(pointers, pointers[0] | pointers[1] | pointers[2]):
            self(first, second, third)

    def call_4(self, first, second, third, fourth) -> None:
        pointers = first.data_ptr(), second.data_ptr(), third.data_ptr(), fourth.data_ptr()
        if not self._enqueue(pointers, pointers[0] | pointers[1] | pointers[2] | pointers[3]):
            self(first, second, third, fourth)

    def call_5(self, first, second, third, fourth, fifth) -> None:
        a, b, c, d, e = first.data_ptr(), second.data_ptr(), third.data_ptr(), fourth.data_ptr(), fifth.data_ptr()
        if not self._enqueue((a, b, c, d, e), a | b | c | d | e):
            self(first, second, third, fourth, fifth)

    def call_6(self, first, second, third, fourth, fifth, sixth) -> None:
        a, b, c = first.data_ptr(), second.data_ptr(), third.data_ptr()
        d, e, f = fourth.data_ptr(), fifth.data_ptr(), sixth.data_ptr()
        if not self._enqueue((a, b, c, d, e, f), a | b | c | d | e | f):
            self(first, second, third, fourth, fifth, sixth)

    def _enqueue(self, pointers: tuple[int, ...], any_of_them: int) -> bool:
        """Launches; False if Triton's own call must launch. `any_of_them` is the bitwise or of the pointers."""
        launcher = self._launcher
        if (
            any_of_them & _ALIGNMENT_MASK
            or launcher.launch is None
            # Hooks, a profiler's for example: Triton's own call runs them.
            or _enter_hooks.calls
            or (launcher.one_of_several and current_device() != launcher.device)
        ):
            return False
        stream = current_stream(launcher.device)
        last_stream, launch, before, one_by_one = self._last
        if stream != last_stream:
            launch, fixed, one_by_one, _ = launcher.path
            before = (self._blocks, 1, 1, stream, *fixed)
            self._last = (stream, launch, before, one_by_one)
        # Joining tuples is faster than passing their items.
        arguments = pointers + self._arguments_after[len(pointers)]
        try:
            launch(*(before + (arguments if one_by_one else (arguments,))))
        except TypeError as error:  # A later Triton's may take no addresses for tensors; nothing has been launched.
            launcher.launch = None
            triton_internals.step_aside(str(error))
            return False
        return True


@dataclass(eq=False)
class UnaryCall:
    """A call of one tensor, resolved for its layout: it allocates the output and launches.

    Args:
        launch: None for tensors without elements.
    """

    launch: Optional[Launch]
    empty: Callable[[], torch.Tensor]

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        out = self.empty()
        if self.launch is not None:
            self.launch.call_2(input, out)
        return out

    @property
    def into(self) -> Optional[Callable[..., None]]:
        """`into(input, out)` writes the given output, which has the layout of those that the call allocates."""
        return self.launch and self.launch.call_2


class BinaryCall(UnaryCall):
    """The same of two tensors, which have elements."""

    @property
    def into(self) -> Callable[..., None]:
        return self.launch.call_3

    def __call__(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        out = self.empty()
        self.launch.call_3(first, second, out)
        return out
