"""The one place that decides whether a kernel may replace a layer's arithmetic.

Two proofs, on synthetic data on the machine at hand, each once a process. The formula proof finds out which of the known
formulas a forward function computes, outputs and gradients, in torch operations. The order proof then lets the kernel return the
bits of that forward function and of the fp32 statistics inside it. Until then, and for ever if it does not, the original
forward runs.

`LOSSLESS_PROOF` sets the policy: `on` (default), `off` (no order proof: for Triton's interpreter, whose CPU tensors eager sums
in another order than CUDA's) or `strict` (raise instead of falling back).
"""

import contextlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, MutableSet
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch
from torch import nn

from . import LAYERS_MODULE, launch
from .domain import as_it_is, is_watched
from .torch_internals import graph_task, no_modes, saved_tensor_hooks_enabled

_POLICIES = ("on", "off", "strict")
_BIT_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Subject:
    """What a proof is about.

    Args:
        original: the forward function that is to be replaced.
        device: where the kernel runs.
        where: dtypes and sizes, for people to read.
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
        chosen: the formula that was recognised.
        seconds: the time it took, without what Triton took to compile.
        bytes: device memory that it held when it compared.
    """

    subject: Subject
    reason: Optional[str]
    chosen: Any = None
    seconds: float = 0.0
    bytes: int = 0

    def __bool__(self):
        return self.reason is None


# The oldest are dropped, and proved again if they are asked for.
_verdicts: dict[Hashable, Verdict] = {}
_MAX_VERDICTS = 4096
# Forward functions whose kernel is proved as another function's.
_relying: MutableMapping[Callable, weakref.WeakSet] = weakref.WeakKeyDictionary()
# Forward functions that met tensors no kernel takes: the reasons, so many of each.
_outside: MutableMapping[Callable, set[str]] = weakref.WeakKeyDictionary()
_MAX_REASONS = 32
_warned: MutableSet[Callable] = weakref.WeakSet()
_lock = threading.RLock()


class LosslessProofError(RuntimeError):
    """Raised under `LOSSLESS_PROOF=strict` where a kernel did not return the bits of the original forward."""


def policy() -> str:
    """The value of `LOSSLESS_PROOF`. Raises ValueError if it is not one of on, off and strict."""
    value = os.environ.get("LOSSLESS_PROOF", "on")
    if value not in _POLICIES:
        raise ValueError(f"LOSSLESS_PROOF: expected one of {', '.join(_POLICIES)}, found {value!r}")
    return value


def differing(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Number of elements, as a 0-dimensional tensor, whose bits differ; a NaN equals any NaN.

    Tensors of different shape, dtype or strides differ everywhere.
    """
    if not _are_alike(actual, expected):
        return torch.tensor(max(actual.numel(), 1), device=actual.device)
    bits = _BIT_VIEWS[actual.element_size()]
    same = (actual.view(bits) == expected.view(bits)) | (actual.isnan() & expected.isnan())
    return same.logical_not().sum()


def _are_alike(actual, expected) -> bool:
    return (actual.shape, actual.dtype, actual.stride()) == (expected.shape, expected.dtype, expected.stride())


def is_shortage(error: Exception) -> bool:
    """Whether the GPU's memory was full. Triton and CUDA, which load a kernel at its first launch, say so in words alone."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


_anomaly_lock = threading.Lock()
# Proofs under way, and whether anomaly mode was on, and checked for NaN, when the first of them began.
_anomaly = {"proofs": 0, "before": (False, True)}


@contextlib.contextmanager
def _without_anomaly_mode() -> Iterator[None]:
    """NaNs are among the inputs of proofs. The mode is the process's, and proofs of several threads may overlap."""
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
    """Neither the caller's grad mode, autocast, modes, saved-tensor hooks (checkpointing) nor anomaly mode reach into a proof."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if saved_tensor_hooks_enabled():
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is))
        stack.enter_context(_without_anomaly_mode())
        yield


def generator(device: torch.device, seed: int) -> torch.Generator:
    """A source of random numbers apart from the global ones, which a proof leaves as they are."""
    return torch.Generator(device).manual_seed(seed)


# Of a forward that a stand-in cannot show.
UNSHOWN = "a forward that asks for more than every instance must have"
NOT_PLAIN = "tensors of a subclass or without memory, or under a transform, a trace or a dispatch mode"
INFERENCE_TENSORS = "gradients of what an inference tensor has a part in"


class Part(nn.Module):
    """A module inside of a stand-in: whoever has hooks on the calls of all modules is not told of its calls."""

    def __call__(self, *arguments, **named):
        return self.forward(*arguments, **named)


Comparison = tuple[str, torch.Tensor, torch.Tensor]
Comparisons = Callable[[], Iterable[Comparison]]


def admits(key: Hashable, subject: Subject, comparisons: Comparisons) -> bool:
    """The order proof: whether the kernel behind `key` has proved equal, proving it at the first call.

    Args:
        key: what the verdict is for; one verdict a process.
        subject: what reports and the warning name.
        comparisons: yields `(what, kernel's tensor, eager's tensor)`, every one of which must be equal bit for bit. They may
            be compared after all have been yielded, so none is written to again.

    A verdict needs synchronisation, so inside a CUDA graph's capture an unproved kernel is refused for this call only, and so
    it is where a transform or a trace would reach into the proof.
    """
    verdict = _verdicts.get(key)
    if verdict is None:
        if policy() == "off" or launch.is_asking():
            return True
        verdict = _judge(key, subject, {subject.formula: comparisons})
    return bool(verdict)


def recognize(key: Hashable, subject: Subject, candidates: Mapping[Any, Comparisons]) -> Optional[Any]:
    """The formula proof: the first of the candidates whose comparisons are all equal, None if there is none.

    The rules of `admits`, but that it takes place under every policy: which formula it is has to be known.
    """
    verdict = _verdicts.get(key)
    if verdict is None:
        verdict = _judge(key, subject, candidates)
    return verdict.chosen if verdict else None


def recognized(key: Hashable) -> Optional[Verdict]:
    """The verdict of an earlier `recognize`."""
    return _verdicts.get(key)


def is_settled(key: Hashable) -> bool:
    """Whether an earlier `recognize` came to a verdict. Inside a CUDA graph's capture, for one, it does not."""
    return key in _verdicts


def is_capturing() -> bool:
    """Whether the current stream is captured into a CUDA graph. In a forked process CUDA, asked, raises."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def relies(original: Callable, other: Callable) -> None:
    """Remembers for reports that part of `original` is computed by what is proved for `other`."""
    _relying.setdefault(original, weakref.WeakSet()).add(other)


def known(original: Callable) -> tuple[list[Verdict], list[str]]:
    """The verdicts on a forward function and on what it relies on, and why it ran where no kernel could."""
    originals = {original, *_relying.get(original, ())}
    verdicts = [verdict for verdict in list(_verdicts.values()) if verdict.subject.original in originals]
    return verdicts, sorted({reason for each in originals for reason in tuple(_outside.get(each, ()))})


def outside(original: Callable, reason: str) -> None:
    """Remembers for reports that `original` ran because no kernel takes such tensors.

    Args:
        reason: without what differs from call to call, such as a sequence's length: every reason is kept once.
    """
    reasons = _outside.setdefault(original, set())
    if len(reasons) < _MAX_REASONS:
        reasons.add(reason)


def outside_for_its_code(owner: type) -> None:
    """Remembers for reports that `owner.forward` ran because `functions_of` the class is None."""
    ours = getattr(owner.forward, "__module__", None) == LAYERS_MODULE
    outside(owner.forward, "a layer of this package used by itself" if ours else UNSHOWN)


def _judge(key, subject, candidates) -> Optional[Verdict]:
    if is_watched() or (subject.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    # Other threads wait for the proof, but not in a backward pass: the proof may need the thread that this one is.
    waits = graph_task() == -1
    locked = _lock.acquire(blocking=waits)
    try:
        if key in _verdicts:
            return _verdicts[key]
        start, compiling, held = time.perf_counter(), launch.seconds_compiling, []
        chosen, reason = _first_equal(subject.device, candidates, held)
        seconds = time.perf_counter() - start - (launch.seconds_compiling - compiling)
        message = f"lossless-kernels: {subject} keeps its original forward: {reason}"
        if reason is not None and policy() == "strict":
            raise LosslessProofError(message)
        # Before the warning, which may have been made an error.
        if len(_verdicts) >= _MAX_VERDICTS:
            _verdicts.pop(next(iter(_verdicts)))
        verdict = _verdicts.setdefault(key, Verdict(subject, reason, chosen, seconds, max(held, default=0)))
        if reason is not None and subject.original not in _warned:
            _warned.add(subject.original)
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        return verdict
    finally:
        if locked:
            _lock.release()


def _first_equal(device, candidates, held) -> tuple[Any, Optional[str]]:
    """The first candidate without a disproof, or None and the reason."""
    reasons = []
    for candidate, comparisons in candidates.items():
        reason = _disproof(device, comparisons, held)
        if reason is None:
            return candidate, None
        reasons.append(reason)
    return None, reasons[0] if len(reasons) == 1 else f"none of the known formulas: {reasons[0]}"


# Elements of a tensor that is compared together with others: alone it would take longer than what is proved.
_FEW_ELEMENTS = 1 << 16


def _disproof(device, comparisons, held) -> Optional[str]:
    """Why the kernel may not replace the original, or None if it may; `held` takes the bytes in use at each comparison."""
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
            # Once for all that are small: to ask takes as long as ten operations, and they are still here.
            held.append(memory(device) - before)
            for (what, _), pairs in small.items():
                found[what].append(differing(*map(torch.cat, zip(*pairs))))
            wrong = {what: sum(int(count) for count in counts) for what, counts in found.items()}
    except Exception as error:  # No C compiler, out of resources, another assembler: whatever it is, eager still works.
        if is_shortage(error):
            return "the GPU's memory was full when it was verified; call warmup() while there is room"
        return f"{type(error).__name__}: {error}".strip()
    wrong = {what: count for what, count in wrong.items() if count}
    return ", ".join(f"{count} elements of {what} differ" for what, count in wrong.items()) or None
