"""Tables of calls: how a recorded call is recognised, what it resolved to, and why no kernel took it.

An op looks a call up in three steps, each slower than the one before:

1. The op compares the subject's last call, in `Calls.recent`, inline: a shared function would cost 0.2 us of 1.4.
2. `Calls.find` looks the call up by its key: the facts, and dtype, shape, strides and device of each tensor.
3. `Calls.find` resolves a new call: it checks the domain, requests the proofs and binds the launches.

Step 1 must compare every part of the key, as a fact or by its tensor guard.
"""

import operator
import weakref
from typing import Any, Callable, Optional

import torch

from . import launch, proof, warn
from .torch_internals import tensor_guard

# Result of a lookup without an entry. An entry None means that the original forward runs.
UNSEEN = object()
_MAX_CALLS = 4096


class Outside(Exception):
    """No kernel takes these tensors or replaces this forward. Its message, for reports, has no sizes that vary."""


class Failed(Outside):
    """A kernel failed inside its domain or returned other bits. A warning says so once for each kind of call."""


class Calls:
    """The recorded calls of one function.

    Args:
        resolve: `resolve(*tensors, *arguments)` returns the function of all calls with a key. It returns None if a
            kernel is not proved, and raises `Outside` if none exists.

    Attributes:
        recent: the last call of each subject, `(guard, *facts, compute)`. `guard(*tensors)` compares tensors with that
            call's; facts are compared by identity; `compute` is the bound `__call__` of the resolved call.
        resolved: resolved calls by key.
    """

    __slots__ = ("recent", "resolved", "_resolve", "__weakref__")
    every: weakref.WeakSet = weakref.WeakSet()

    def __init__(self, resolve: Callable):
        self.recent: dict = {}
        self.resolved: dict = {}
        self._resolve = resolve
        Calls.every.add(self)

    def find(self, original: Callable, facts: tuple, tensors: tuple[torch.Tensor, ...], *arguments) -> Optional[Any]:
        """The function that computes this call; None if the original must run.

        Args:
            original: the forward that is replaced, for reports.
            facts: what decides beside the tensors' dtypes, shapes, strides and devices.
            arguments: passed on to `resolve`.
        """
        try:
            key = (facts, *[(tensor.dtype, tensor.shape, tensor.stride(), tensor.device) for tensor in tensors])
            found = self.resolved.get(key, UNSEEN)
        except (RuntimeError, TypeError):
            proof.record_refusal(original, "tensors without strides, or an argument without a hash")
            return None
        if found is UNSEEN:
            failure = None
            try:
                found = self._resolve(*tensors, *arguments)
            except Failed as reason:
                proof.record_refusal(original, proof.Failure(reason))
                found, failure = None, reason
            except Outside as reason:
                proof.record_refusal(original, str(reason))
                found = None
            remember(self.resolved, key, found)
            if failure is not None:  # Last: a warnings filter may raise.
                warn(str(failure), stacklevel=4)
        return found

    def recognise(self, subject, call, facts: tuple, tensors: tuple[torch.Tensor, ...]) -> None:
        """Records the call as the subject's last.

        Subjects whose calls resolved alike, such as the norms of a model, share one entry: one place in memory to read,
        and one guard to make for a new sequence length.
        """
        entry = getattr(call, "recent", None)
        if entry is None or not (all(map(operator.is_, entry[1:], facts)) and entry[0](*tensors)):
            guard = tensor_guard(*tensors)
            if guard is None:
                return
            entry = call.recent = (guard, *facts, call.__call__)
        remember(self.recent, subject, entry)

    def run(self, subject, call, facts: tuple, tensors: tuple[torch.Tensor, ...]) -> Any:
        """`call(*tensors)`, recorded as the subject's last; None without a call."""
        if call is None:
            return None
        self.recognise(subject, call, facts, tensors)
        return call(*tensors)

    def clear(self) -> None:
        self.recent.clear()
        self.resolved.clear()


def remember(table: dict, key, found):
    """Stores a resolved call and returns it. Not stored are calls of a dry run, and refusals during a CUDA graph's
    capture, which allows no proof."""
    if launch.is_collecting() or (found is None and proof.is_capturing()):
        return found
    if len(table) >= _MAX_CALLS:
        table.clear()
    table[key] = found
    return found
