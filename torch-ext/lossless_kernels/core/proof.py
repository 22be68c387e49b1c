"""Decides by verification whether a kernel may replace a layer's arithmetic.

Two proofs run on synthetic data on the user's machine, each once a process. The formula proof finds the known formula
that a forward function computes: its torch operations return the same outputs and gradients. The order proof compares
the kernel's bits with those of the forward function and of its fp32 statistics. The original runs until both pass.

`LOSSLESS_PROOF` sets the policy: `on` (default), `off` (no order proof, for Triton's interpreter: eager sums CPU
tensors in another order than CUDA tensors) or `strict` (raise instead of falling back).
"""

import contextlib
import functools
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, MutableSet
from dataclasses import dataclass, replace
from typing import Any, Callable, Optional

import torch
from torch import nn

from . import LAYERS_MODULE, launch
from .domain import identity_hook, is_watched
from .inspection import without_wrappers
from .torch_internals import graph_task, no_modes, other_arithmetic, saved_tensor_hooks_enabled

_POLICIES = ("on", "off", "strict")
_BIT_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Subject:
    """The subject of a proof.

    Args:
        original: the forward function to be replaced.
        device: the kernel's device.
        where: dtypes and sizes, in words.
        formula: what the kernel computes.
    """

    original: Callable
    device: torch.device
    where: str
    formula: str = ""

    def __str__(self):
        return f"{self.original.__qualname__} on {self.device}, {self.where},"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a proof.

    Args:
        reason: why the original forward keeps running; None if it is replaced.
        chosen: the recognised formula.
        seconds: the proof's time without Triton's compilations.
        bytes: the most device memory that it held at a comparison.
    """

    subject: Subject
    reason: Optional[str]
    chosen: Any = None
    seconds: float = 0.0
    bytes: int = 0

    def __bool__(self):
        return self.reason is None


# The oldest are dropped, and proved again when needed.
_verdicts: dict[Hashable, Verdict] = {}
_MAX_VERDICTS = 4096
# By forward function, the functions whose verdicts it depends on.
_dependencies: MutableMapping[Callable, weakref.WeakSet] = weakref.WeakKeyDictionary()
# By forward function, reasons why it ran on tensors that no kernel takes.
_refusals: MutableMapping[Callable, set[str]] = weakref.WeakKeyDictionary()
_MAX_REASONS = 32
_warned: MutableSet[Callable] = weakref.WeakSet()
_lock = threading.RLock()


class LosslessProofError(RuntimeError):
    """Raised under `LOSSLESS_PROOF=strict` if a verification fails.

    The kernel returned other bits than the original forward, the forward has none of the known formulas, the kernel did not
    compile, or the memory was full.
    """


def policy() -> str:
    """The value of `LOSSLESS_PROOF`. Raises ValueError if it is not one of on, off and strict."""
    value = os.environ.get("LOSSLESS_PROOF", "on")
    if value not in _POLICIES:
        raise ValueError(f"LOSSLESS_PROOF: expected one of {', '.join(_POLICIES)}, found {value!r}")
    return value


def differing(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The number of elements whose bits differ, as a 0-dimensional tensor; NaNs are equal.

    Tensors of different shape, dtype or strides differ in all elements.
    """
    if not _are_alike(actual, expected):
        return torch.tensor(max(actual.numel(), 1), dtype=torch.int64, device=actual.device)
    bits = _BIT_VIEWS[actual.element_size()]
    same = (actual.view(bits) == expected.view(bits)) | (actual.isnan() & expected.isnan())
    return same.logical_not().sum()


def _are_alike(actual, expected) -> bool:
    return (actual.shape, actual.dtype, actual.stride()) == (expected.shape, expected.dtype, expected.stride())


def is_shortage(error: Exception) -> bool:
    """Whether the GPU's memory was full. Triton and CUDA say so in the message if a kernel does not load."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


_anomaly_lock = threading.Lock()
# The number of running proofs; whether anomaly mode was on, and checked for NaN, when the first of them began.
_anomaly = {"proofs": 0, "before": (False, True)}


@contextlib.contextmanager
def _without_anomaly_mode() -> Iterator[None]:
    """Disables anomaly mode, since proofs have NaN inputs. The process has one mode; proofs in threads may overlap."""
    with _anomaly_lock:
        if _anomaly["proofs"] == 0:
            _anomaly["before"] = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
            torch.set_anomaly_enabled(False)
        _anomaly["proofs"] += 1
    try:
        yield
    finally:
        with _anomaly_lock:
            _anomaly["proofs"] -= 1
            if _anomaly["proofs"] == 0:
                torch.set_anomaly_enabled(*_anomaly["before"])


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Shields a proof from the caller's grad mode, autocast, modes, saved-tensor hooks (checkpoints), anomaly mode."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if saved_tensor_hooks_enabled():
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(identity_hook, identity_hook))
        stack.enter_context(_without_anomaly_mode())
        yield


def generator(device: torch.device, seed: int) -> torch.Generator:
    """A random generator of a proof's own; the global ones stay untouched."""
    return torch.Generator(device).manual_seed(seed)


def normal(generator: torch.Generator, *shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of the normal distribution, whatever torch's default dtype is."""
    return torch.randn(*shape, dtype=dtype, device=generator.device, generator=generator)


def uniform(generator: torch.Generator, *shape) -> torch.Tensor:
    """fp32 numbers from 0 to 1, whatever torch's default dtype is."""
    return torch.rand(*shape, dtype=torch.float32, device=generator.device, generator=generator)


# Exponents of numbers whose products with numbers from 1 to 2 fit into fp16.
WIDE = 12


def random_like(tensor: torch.Tensor, generator: torch.Generator, exponents: int = 0) -> torch.Tensor:
    """Numbers in the layout of `tensor`, aligned as it is to 16 bytes: of random sign, from 1 to 2 times a power of two.

    Args:
        exponents: the powers are those of -exponents to exponents. Numbers of one size add up exactly in every order.
    """
    first = tensor.data_ptr() % 16 // tensor.element_size()
    count = max(first + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())), 0)
    powers = torch.randint(-exponents, exponents + 1, (count,), device=tensor.device, generator=generator)
    signs = torch.randint(0, 2, (count,), device=tensor.device, generator=generator) * 2 - 1
    numbers = torch.ldexp((uniform(generator, count) + 1) * signs, powers).to(tensor.dtype)
    return numbers.as_strided(tensor.shape, tensor.stride(), first)


def unwritten(count: int, shape, device: torch.device, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Tensors full of NaN for a kernel to write, each in memory of its own, as those of a call are: Triton compiles another
    kernel for pointers that are no multiples of 16, and the rows of one tensor may be such."""
    return [torch.full(shape, math.nan, dtype=dtype, device=device) for _ in range(count)]


class Failure(str):
    """The reason of a refusal after a kernel has failed, or returned other bits, inside its domain."""


# Reasons of refusals.
IN_CAPTURE = "not verified before a CUDA graph's capture, and nothing can be verified within one"
HIDDEN_DEPENDENCY = "its forward depends on more than its module's attributes"
NOT_PLAIN = "tensors of a subclass or without memory, or under a transform, a trace or a dispatch mode"
INFERENCE_TENSORS = "gradients of a computation with an inference tensor"


class Part(nn.Module):
    """A module inside a stand-in. Its calls run no hooks, those on all modules included."""

    def __call__(self, *arguments, **named):
        return self.forward(*arguments, **named)


Comparison = tuple[str, torch.Tensor, torch.Tensor]
Comparisons = Callable[[], Iterable[Comparison]]


def kernel_is_proved(key: Hashable, subject: Subject, comparisons: Comparisons) -> bool:
    """The order proof: whether the kernel's bits equal eager's. The first call runs the proof.

    Args:
        key: identifies the kernel; it gets one verdict a process.
        subject: named in reports and the warning.
        comparisons: yields `(what, kernel's tensor, eager's tensor)`, which must be equal bit for bit. Tensors may be
            compared after the last was yielded: none may be written to again.

    A proof synchronises. Inside a CUDA graph's capture, a transform or a trace it does not run, and the original forward does.
    """
    verdict = _verdicts.get(key)
    if verdict is None:
        if policy() == "off" or launch.is_collecting():
            return True
        verdict = _judge(key, subject, {subject.formula: comparisons})
    return bool(verdict)


def match_formula(
    key: Hashable,
    subject: Subject,
    candidates: Mapping[Any, Comparisons],
    described: Optional[Callable[[Any], str]] = None,
    refuse: Optional[Callable[[], None]] = None,
) -> Optional[Any]:
    """The formula proof: the first candidate whose comparisons are all equal, or None.

    It follows the rules of `kernel_is_proved`, but runs under every policy, since a formula must be chosen.

    Args:
        described: a candidate's formula in words, for reports, where no proof of a kernel follows.
        refuse: raises `Difference` if the original, which passed a candidate's comparisons, is another function.
    """
    verdict = _verdicts.get(key)
    if verdict is None:
        verdict = _judge(key, subject, candidates, described, refuse)
    return verdict.chosen if verdict else None


def find_out(key: Hashable, subject: Subject, is_so: Callable[[], torch.Tensor]) -> Optional[bool]:
    """Which of two arithmetics eager has on the subject's device: what `is_so()` says, a bool of one element.

    None where nothing can be computed now, as during the capture of a CUDA graph. It follows the rules of `match_formula`.
    """

    def compared(expected):
        found = is_so()
        yield "the answer", found.float(), torch.full_like(found, expected, dtype=torch.float32)

    return match_formula(key, subject, {each: functools.partial(compared, each) for each in (False, True)})


class Difference(Exception):
    """The original is another function, though compared tensors are equal; the message says why, for reports."""


# Leading dimensions of tensors with many rows. The first number is small, for classes that take rows one by one.
_LONG = (lambda rows: (rows,)), (lambda rows: (2, rows)), (lambda rows: (rows, 2))
_FEW, _MANY = 2, (1 << 10, 1 << 20)


def refuse_parts(compute: Callable, inputs: Iterable[tuple], weights: Iterable[tuple]) -> None:
    """Raises Difference if a class computes many rows in parts, whose gradients autograd adds up.

    A comparison has few rows, which may be one part. Here many rows are computed, in tensors without memory.

    Args:
        compute: `compute(*inputs, *weights)` returns the class's output.
        inputs: length of a row, and dtype, of each input.
        weights: shape and dtype of each weight.
    """

    def paths(leading):
        given = [((*leading, length), dtype) for length, dtype in inputs] + [*weights]
        leaves = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape, dtype in given]
        with torch.enable_grad():
            out = compute(*leaves)
        return [_paths(out, leaf) for leaf in leaves]

    failures = []
    for leading in _LONG:
        try:
            expected = paths(leading(_FEW))
        except Difference:
            raise
        except Exception as error:  # A class may take tensors of some dimensions only.
            failures.append(f"{type(error).__name__}: {error}")
            continue
        for rows in _MANY:
            if paths(leading(rows)) != expected:
                raise Difference(f"it computes {list(leading(rows))} rows in parts, whose gradients autograd adds up")
    if len(failures) == len(_LONG):
        raise Difference(f"it does not run in tensors without memory: {failures[-1]}")


def _paths(out: torch.Tensor, leaf: torch.Tensor) -> int:
    """How many paths of autograd's graph lead from `out` to a leaf. More of them add up gradients in another order.

    Raises:
        Difference: the graph has a node of a `torch.autograd.Function`, which does not show what it adds.
    """
    with torch.enable_grad():
        end = leaf.view_as(leaf).grad_fn.next_functions[0][0]
    counts, open_nodes = {None: 0, end: 1}, [out.grad_fn]
    while open_nodes:
        node = open_nodes[-1]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise Difference("its gradients come from a torch.autograd.Function, which may add them up in parts")
        following = [] if node is None else [each for each, _ in node.next_functions]
        unseen = [each for each in following if each not in counts]
        open_nodes += unseen
        if not unseen:
            counts.setdefault(node, sum(counts[each] for each in following))
            open_nodes.pop()
    return counts[out.grad_fn]


def verdict_on(key: Hashable) -> Optional[Verdict]:
    """The verdict of an earlier `match_formula`; None without one, as inside a CUDA graph's capture."""
    return _verdicts.get(key)


def is_capturing() -> bool:
    """Whether the current stream is captured into a CUDA graph. Without the first check a forked process raises."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def record_dependency(original: Callable, other: Callable) -> None:
    """Records for reports that `original` depends on the verdicts about `other`."""
    _dependencies.setdefault(original, weakref.WeakSet()).add(other)


def verdicts_about(original: Callable) -> tuple[list[Verdict], list[str]]:
    """The verdicts about a forward function and its dependencies, and the reasons of refusals."""
    original = without_wrappers(original)
    originals = {original, *_dependencies.get(original, ())}
    verdicts = [verdict for verdict in list(_verdicts.values()) if verdict.subject.original in originals]
    return verdicts, sorted({reason for each in originals for reason in tuple(_refusals.get(each, ()))})


def refusals() -> set[tuple[Callable, str]]:
    """The forwards that ran where no kernel did, each with a reason."""
    return {(original, reason) for original, reasons in list(_refusals.items()) for reason in tuple(reasons)}


def record_refusal(original: Callable, reason: str) -> None:
    """Records for reports why `original` ran. Each reason is kept once: it must not have sizes that differ by call."""
    reasons = _refusals.setdefault(original, set())
    if len(reasons) < _MAX_REASONS:
        reasons.add(reason)


def forget_capture(original: Callable) -> None:
    """Removes the reason that a CUDA graph's capture gave: what was not verified within it has been verified since."""
    _refusals.get(original, set()).discard(IN_CAPTURE)


def record_unreadable_forward(owner: type) -> None:
    """Records for reports that `owner.forward` ran because `functions_of(owner)` is None."""
    ours = getattr(owner.forward, "__module__", None) == LAYERS_MODULE
    record_refusal(
        without_wrappers(owner.forward),
        "a layer of this package used by itself" if ours else HIDDEN_DEPENDENCY,
    )


def _judge(key, subject, candidates, described=None, refuse=None) -> Optional[Verdict]:
    if is_watched():
        return None
    if subject.device.type == "cuda" and is_capturing():
        return record_refusal(subject.original, IN_CAPTURE)
    # A thread in a backward pass does not wait for another thread's proof, which may need this very thread.
    locked = _lock.acquire(blocking=graph_task() == -1)
    try:
        if key in _verdicts:
            return _verdicts[key]
        start, compiling, held = time.perf_counter(), launch.seconds_compiling, []
        chosen, reason = _first_equal(subject.device, candidates, held, refuse)
        seconds = time.perf_counter() - start - (launch.seconds_compiling - compiling)
        message = f"lossless-kernels: {subject} keeps its original forward: {reason}"
        if reason is not None and policy() == "strict":
            raise LosslessProofError(message)
        if reason is None and described is not None:
            subject = replace(subject, formula=described(chosen))
        # Before the warning: a warnings filter may raise.
        if len(_verdicts) >= _MAX_VERDICTS:
            _verdicts.pop(next(iter(_verdicts)))
        verdict = _verdicts.setdefault(key, Verdict(subject, reason, chosen, seconds, max(held, default=0)))
        forget_capture(subject.original)
        if reason is not None and subject.original not in _warned:
            _warned.add(subject.original)
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        return verdict
    finally:
        if locked:
            _lock.release()


def _first_equal(device, candidates, held, refuse) -> tuple[Any, Optional[str]]:
    """The first candidate that passes and None, or None and the reason."""
    reasons = []
    for candidate, comparisons in candidates.items():
        reason = _disproof(device, comparisons, held)
        if (
            reason is None
            and refuse is not None
            and (reason := _disproof(device, lambda: refuse() or (), held, needed=False))
        ):
            return None, reason
        if reason is None:
            return candidate, None
        reasons.append(reason)
    return None, reasons[0] if len(reasons) == 1 else f"none of the known formulas: {reasons[0]}"


# Tensors up to this size are compared together: separate comparisons would take longer than the kernels.
_FEW_ELEMENTS = 1 << 16


def _disproof(device, comparisons, held, needed=True) -> Optional[str]:
    """Why the kernel may not replace the original; None if it may. `held` gets the bytes in use at each comparison.

    Args:
        needed: whether something must be compared.
    """
    memory = torch.cuda.memory_allocated if device.type == "cuda" else lambda _: 0
    try:
        with undisturbed(device):
            before = memory(device)
            found, small = {}, {}
            for what, actual, expected in comparisons():
                counts = found.setdefault(what, [])
                if actual.numel() <= _FEW_ELEMENTS and _are_alike(actual, expected):
                    small.setdefault((what, actual.dtype), []).append((actual.flatten(), expected.flatten()))
                else:
                    held.append(memory(device) - before)
                    counts.append(differing(actual, expected))
            # One query for all small tensors, which are still alive: it takes as long as ten operations.
            held.append(memory(device) - before)
            for (what, _), pairs in small.items():
                found[what].append(differing(*map(torch.cat, zip(*pairs))))
            wrong = {what: sum(int(count) for count in counts) for what, counts in found.items()}
    except Difference as difference:
        return str(difference)
    except Exception as error:  # No C compiler, out of resources, another assembler: eager still works.
        if is_shortage(error):
            return "the GPU's memory was full during verification; call warmup() while memory is free"
        return f"{type(error).__name__}: {error}".strip()
    if needed and not wrong:
        return "nothing was compared"
    wrong = {what: count for what, count in wrong.items() if count}
    if wrong and (found := _other_arithmetic(device, comparisons)):
        return f"eager itself has other arithmetic here: {', '.join(found)}"
    return ", ".join(f"{count} elements of {what} differ" for what, count in wrong.items()) or None


def _other_arithmetic(device, comparisons) -> list[str]:
    """What has given eager another arithmetic than ATen's."""
    with undisturbed(device):
        return other_arithmetic(device, lambda: [None for _ in comparisons()])
