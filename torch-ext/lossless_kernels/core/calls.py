"""The one table of calls: what a call resolved to, how the next one like it is recognised, and why no kernel took it.

An op looks a call up in three steps, each slower than the one before:

1. `Calls.recent` has the last call of the same subject. The op compares it where it stands, since a shared function would cost
   0.2 us of 1.4.
2. `Calls.find` looks the call up by its key: the facts, and dtype, shape, strides and device of each tensor.
3. `Calls.find` resolves a call that no table has: it checks the domain, asks for the proofs and binds the launches.

The rule of all tables: every part of a key is among the facts that step 1 compares, or its tensor guard sees it.
"""

import operator
import warnings
import weakref
from typing import Any, Callable, Optional

import torch

from . import launch, proof
from .torch_internals import tensor_guard

# Calls that are not in a table yet; a None there means that the original forward runs.
UNSEEN = object()
_MAX_CALLS = 4096


class Outside(Exception):
    """No kernel takes these tensors, or replaces this forward.

    The message is for reports. It holds nothing that differs from call to call, such as a sequence's length.
    """


class Failed(Outside):
    """A kernel of the domain failed, or returned other bits: a warning says so, once for every kind of calls."""


class Calls:
    """What the calls of one function resolved to.

    Args:
        resolve: `resolve(*tensors, *arguments)` returns what computes all calls of a key. It returns None if a kernel is not
            proved, and raises `Outside` where there is none.

    Attributes:
        recent: by subject its last call, `(guard, *facts, compute)`. `guard(*tensors)` tells whether tensors are like those of
            that call; facts are compared by identity; `compute` is the bound `__call__` of what the call resolved to.
        resolved: by key.
    """

    __slots__ = ("recent", "resolved", "_resolve", "__weakref__")
    every: weakref.WeakSet = weakref.WeakSet()

    def __init__(self, resolve: Callable):
        self.recent: dict = {}
        self.resolved: dict = {}
        self._resolve = resolve
        Calls.every.add(self)

    def find(self, original: Callable, facts: tuple, tensors: tuple[torch.Tensor, ...], *arguments) -> Optional[Any]:
        """What computes this call; None where the original must run.

        Args:
            original: the forward that is replaced, for reports.
            facts: all that decides beside the tensors' dtypes, shapes, strides and devices.
            arguments: for `resolve`.
        """
        try:
            key = (facts, *[(tensor.dtype, tensor.shape, tensor.stride(), tensor.device) for tensor in tensors])
            found = self.resolved.get(key, UNSEEN)
        except (RuntimeError, TypeError):
            proof.outside(original, "tensors without strides, or an argument without a hash")
            return None
        if found is UNSEEN:
            failure = None
            try:
                found = self._resolve(*tensors, *arguments)
            except Outside as reason:
                proof.outside(original, str(reason))
                found, failure = None, reason if isinstance(reason, Failed) else None
            remember(self.resolved, key, found)
            if failure is not None:  # Last, for the warning may have been made an error.
                warnings.warn(f"lossless-kernels: {failure}", RuntimeWarning, stacklevel=4)
        return found

    def recognise(self, subject, call, facts: tuple, tensors: tuple[torch.Tensor, ...]) -> None:
        """Keeps what the subject's next call is recognised by.

        Calls of several subjects that resolved to the same share one entry, the norms of a model for example: one place in
        memory that all of them read, and one guard to make when a sequence has another length.
        """
        entry = getattr(call, "recent", None)
        if entry is None or not (all(map(operator.is_, entry[1:], facts)) and entry[0](*tensors)):
            guard = tensor_guard(*tensors)
            if guard is None:
                return
            entry = call.recent = (guard, *facts, call.__call__)
        remember(self.recent, subject, entry)

    def clear(self) -> None:
        self.recent.clear()
        self.resolved.clear()


def remember(table: dict, key, found):
    """Puts what a call resolved to into a table, and returns it.

    Nothing is kept in a dry run. A refusal is not kept if it came up while a CUDA graph was captured: no proof could run.
    """
    if launch.is_asking() or (found is None and proof.is_capturing()):
        return found
    if len(table) >= _MAX_CALLS:
        table.clear()
    table[key] = found
    return found
