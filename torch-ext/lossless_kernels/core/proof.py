"""The one place that decides whether a kernel may replace a layer's arithmetic.

Two proofs, on synthetic data on the machine at hand, each once a process. The formula proof finds out which of the known
formulas a forward function computes, outputs and gradients, in torch operations. The order proof then lets the kernel return the
bits of that forward function and of the fp32 statistics inside it. Until then, and for ever if it does not, the original
forward runs.

`LOSSLESS_PROOF` sets the policy: `on` (default), `off` (no order proof: for Triton's interpreter, whose CPU tensors eager sums
in another order than CUDA's) or `strict` (raise instead of falling back).
"""

import contextlib
import dis
import functools
import inspect
import os
import threading
import time
import warnings
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, MutableSet
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import nn

from . import LAYERS_MODULE, ROOT_PACKAGE, launch
from .domain import NO_STATE, as_it_is, is_watched, proofs, stays_refused
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
# Devices whose memory was full, and until when nothing is proved there: each try has the allocator give up what it keeps.
_full_until: dict[torch.device, float] = {}
_PAUSE_SECONDS = 10.0
_lock = threading.RLock()


class Outside(Exception):
    """No kernel takes these tensors: the message says why, for reports."""


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


# What a forward may read beside its arguments without a stand-in showing it, and what a proof has its own way.
_UNSEEN_BY_A_STAND_IN = frozenset(
    "training getattr hasattr vars super __dict__ __class__ __getattr__ __dir__ _parameters _buffers _modules parameters "
    "named_parameters buffers named_buffers modules named_modules children named_children state_dict is_autocast_enabled "
    "get_autocast_dtype get_autocast_gpu_dtype is_grad_enabled is_inference_mode_enabled is_inference".split()
)


_MISSING = object()
# Of such types a default or a fixed argument owns nothing and never changes.
CONSTANTS = (type(None), bool, int, float, str)


def is_shown(function: Callable) -> bool:
    """Whether a stand-in for a module shows all that the function may ask of the module: attributes it must have.

    Such a function owns neither a tensor nor a class, so tables may keep it.
    """
    return _attributes_read(function) is not None


def owns_nothing(function: FunctionType) -> bool:
    """Whether closure and defaults hold constants and functions of that kind alone: tables may keep such a function."""
    if function.__module__.split(".")[0] == ROOT_PACKAGE.split(".")[0]:  # Its own package's formulas.
        return True
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return all(
        type(each) in CONSTANTS or (isinstance(each, FunctionType) and each is not function and owns_nothing(each))
        for each in held
    )


_LOADS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK")


_read: MutableMapping[Callable, Optional[frozenset[str]]] = weakref.WeakKeyDictionary()


def _attributes_read(function: Callable) -> Optional[frozenset[str]]:
    """What `_find_attributes` finds; the same function is not looked into again."""
    if not isinstance(function, FunctionType):
        return None
    found = _read.get(function, _MISSING)
    if found is _MISSING:
        found = _read[function] = _find_attributes(function)
    return found


def _find_attributes(function: FunctionType) -> Optional[frozenset[str]]:
    """The attributes that the function asks of its first argument, a module; None if it may ask for more than attributes.

    It asks for more if it catches what is raised where there are none, or hands the module on: to `isinstance`, say, to another
    function, or to one that is written inside of this one.
    """
    if hasattr(function, "__wrapped__"):
        return None
    code = function.__code__
    if not owns_nothing(function) or not _UNSEEN_BY_A_STAND_IN.isdisjoint(code.co_names):
        return None
    if not code.co_argcount:  # `*arguments`, the module among them.
        return None
    module = code.co_varnames[0]
    if module in code.co_cellvars or getattr(code, "co_exceptiontable", b""):
        return None
    attributes = set()
    instructions = [*dis.get_instructions(code)]
    for instruction, following in zip(instructions, instructions[1:]):
        if instruction.opname.startswith("SETUP_"):  # How Python 3.10 begins what may catch.
            return None
        # From 3.13 on one instruction may load or store two.
        used = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if "FAST" in instruction.opname and module in used:
            loads_it_last = instruction.opname.endswith(_LOADS) and module not in used[:-1]
            if not loads_it_last or following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                return None
            attributes.add(following.argval)
    return frozenset(attributes)


# Of a forward that a stand-in cannot show.
UNSHOWN = "a forward that asks for more than every instance must have"
NOT_PLAIN = "tensors of a subclass or without memory, or under a transform, a trace or a dispatch mode"
INFERENCE_TENSORS = "gradients of what an inference tensor has a part in"


class Helper(NamedTuple):
    """A function that a forward calls by name: a method of its class or, with `namespace`, a function of its Python module."""

    namespace: Optional[dict]
    name: str
    function: FunctionType


NO_HELPERS: tuple[Helper, ...] = ()


_helpers: MutableMapping[Callable, tuple[Helper, ...]] = weakref.WeakKeyDictionary()


def helpers_of(function: Callable) -> tuple[Helper, ...]:
    """The functions of its own Python module that a function calls by name now, and those that these call."""
    helpers = _helpers.get(function)
    if helpers is None or not are_current(helpers):
        helpers = _helpers[function] = _find_helpers(function)
    return helpers


def _find_helpers(function) -> tuple[Helper, ...]:
    found, seen = [], [function]
    for each in seen:
        if not isinstance(each, FunctionType) or each.__globals__ is not function.__globals__:
            continue
        names = {i.argval for i in dis.get_instructions(each.__code__) if i.opname == "LOAD_GLOBAL"}
        for name in sorted(names):
            called = each.__globals__.get(name)
            if isinstance(called, FunctionType) and called not in seen:
                seen.append(called)
                found.append(Helper(each.__globals__, name, called))
    return tuple(found)


def are_current(helpers: tuple[Helper, ...], owner: Optional[type] = None, state: Mapping = NO_STATE) -> bool:
    """Whether the helpers of a forward are still what it calls.

    Args:
        owner: the class of the forward.
        state: `__dict__` of the module: an attribute of its own comes before a method of its class.
    """
    for namespace, name, function in helpers:
        found = getattr(owner, name, None) if namespace is None else namespace.get(name)
        if found is not function or (namespace is None and name in state):
            return False
    return True


def _nothing() -> None: ...


class Code:
    """The forward of a class and what it calls: what a verdict on the class is about.

    It goes with the class: tables keep neither a class nor what owns one.

    Attributes:
        functions: the forward and its helpers. None where a stand-in of the class need not compute what its instances do:
            the forward asks for more than attributes every instance must have.
        helpers: the methods of the class, and the functions of its Python module, that the forward calls.
        memo: what is known of the class: for as long as it, its forward and its helpers are what they were.
    """

    __slots__ = ("_owner", "_forward", "_absent", "functions", "helpers", "memo")

    def __init__(self, owner: type, forgotten: Callable):
        self._owner = weakref.ref(owner, forgotten)
        try:
            self._forward = weakref.ref(owner.forward)
        except TypeError:  # What is no function: the class is looked at again every time.
            self._forward = _nothing
        self._absent: tuple[str, ...] = ()
        self.functions, self.helpers, self.memo = None, NO_HELPERS, {}
        self._look_at(owner)

    def _look_at(self, owner) -> None:
        # A class that has an answer for attributes its instances lack gives a stand-in another one.
        if any(
            getattr(owner, name, None) is not getattr(nn.Module, name, None)
            for name in ("__getattr__", "__getattribute__")
        ):
            return
        functions, helpers, absent = [owner.forward], [], []
        for function in functions:
            attributes = _attributes_read(function)
            if attributes is None:
                return
            for name in sorted(attributes):
                member = inspect.getattr_static(owner, name, _MISSING)
                if member is _MISSING:
                    absent.append(name)
                elif member is not inspect.getattr_static(nn.Module, name, _MISSING):
                    if not isinstance(member, FunctionType):
                        return
                    if member not in functions:
                        functions.append(member)
                        helpers.append(Helper(None, name, member))
        for function in tuple(functions):
            helpers += [helper for helper in helpers_of(function) if helper not in helpers]
        self.functions = tuple(dict.fromkeys((*functions, *(helper.function for helper in helpers))))
        self.helpers, self._absent = tuple(helpers), tuple(absent)

    def is_of(self, owner: type) -> bool:
        """Whether the class is the one that was looked at, with the same forward and helpers."""
        return (
            self._owner() is owner
            and self._forward() is owner.forward
            and (not self.helpers or are_current(self.helpers, owner))
        )

    def is_complete(self, owner: type) -> bool:
        """Whether the class still has no member in the place of what its forward takes from the module."""
        return not any(hasattr(owner, name) for name in self._absent)


# By the identity of the class, as long as it lives.
_codes: dict[int, Code] = {}


def code_of(owner: type) -> Code:
    """The code of `owner` as it is now.

    By functions and not by class, since FSDP2 makes a class of its own for every one it wraps, and somebody may give a class
    another forward.
    """
    code = _codes.get(id(owner))
    if code is None or not code.is_of(owner):
        code = _codes[id(owner)] = Code(owner, functools.partial(_forget, id(owner)))
    return code


def _forget(number: int, _: weakref.ref) -> None:
    _codes.pop(number, None)


def functions_of(owner: type, state: Mapping = NO_STATE) -> Optional[tuple[Callable, ...]]:
    """`Code.functions` of the class, for keys; None too if a module with this `__dict__` has a helper of its own."""
    code = code_of(owner)
    if not code.is_complete(owner):
        code = _codes[id(owner)] = Code(owner, functools.partial(_forget, id(owner)))
    if state and any(helper.namespace is None and helper.name in state for helper in code.helpers):
        return None
    return code.functions


class Part(nn.Module):
    """A module inside of a stand-in: whoever has hooks on the calls of all modules is not told of its calls."""

    def __call__(self, *arguments, **named):
        return self.forward(*arguments, **named)


def function_behind(forward: Callable) -> Callable:
    """The function that `kernels` made a module of, from the forward of that module; any other forward itself."""
    code, closure = getattr(forward, "__code__", None), getattr(forward, "__closure__", None)
    if not closure or code.co_freevars != ("func",) or forward.__module__ != "kernels.layer.layer":
        return forward
    return closure[0].cell_contents


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
    """Whether what an earlier `recognize` returned holds for later calls too, and may be kept.

    Inside a CUDA graph's capture, say, it was no verdict. For want of memory there was none either, but a checkpoint relies on it.
    """
    return key in _verdicts or stays_refused()


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
        if time.monotonic() < _full_until.get(subject.device, 0.0):
            proofs.no_memory_until = time.monotonic() + _PAUSE_SECONDS
            return None
        start, compiling, held = time.perf_counter(), launch.seconds_compiling, []
        try:
            chosen, reason = _first_equal(subject.device, candidates, held)
        except Exception as error:
            if not is_shortage(error):
                raise
            # It may pass: a later call tries again.
            proofs.no_memory_until = _full_until[subject.device] = time.monotonic() + _PAUSE_SECONDS
            return None
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
            raise
        return f"{type(error).__name__}: {error}".strip()
    wrong = {what: count for what, count in wrong.items() if count}
    return ", ".join(f"{count} elements of {what} differ" for what, count in wrong.items()) or None
