"""The one place that decides whether a kernel may replace a layer's arithmetic.

A kernel is admitted once it has returned the bits of the original forward, and of the fp32 statistics inside it, on
synthetic data on the machine at hand. Until then, and for ever if it does not, the original forward runs.

`LOSSLESS_PROOF` sets the policy: `on` (default), `off` (admit without proof: for Triton's interpreter, whose CPU tensors
eager sums in another order than CUDA's) or `strict` (raise instead of falling back).
"""

import contextlib
import os
import threading
import warnings
from collections.abc import Hashable, Iterable, Iterator
from typing import Callable

import torch

_POLICIES = ("on", "off", "strict")
_BIT_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_verdicts = {}
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
    if (actual.shape, actual.dtype, actual.stride()) != (expected.shape, expected.dtype, expected.stride()):
        return torch.tensor(max(actual.numel(), 1), device=actual.device)
    bits = _BIT_VIEWS[actual.element_size()]
    same = (actual.view(bits) == expected.view(bits)) | (actual.isnan() & expected.isnan())
    return same.logical_not().sum()


def no_saved_tensor_hooks():
    """A context in which autograd saves tensors as they are, whatever hooks are set outside."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Neither the caller's grad mode, autocast, modes nor saved-tensor hooks (checkpointing) reach into a proof."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(no_saved_tensor_hooks())
        yield


def generator(device: torch.device, seed: int) -> torch.Generator:
    """A source of random numbers apart from the global ones, which a proof leaves as they are."""
    return torch.Generator(device).manual_seed(seed)


Comparison = tuple[str, torch.Tensor, torch.Tensor]


def admits(key: Hashable, subject: str, device: torch.device, comparisons: Callable[[], Iterable[Comparison]]) -> bool:
    """Whether the kernel behind `key` has proved equal, proving it at the first call.

    Args:
        key: what the verdict is for; one verdict a process.
        subject: names function, kernel and device in the warning.
        device: where the proof runs.
        comparisons: yields `(what, kernel's tensor, eager's tensor)`, every one of which must be equal bit for bit.

    A verdict needs synchronisation, so inside a CUDA graph's capture an unproved kernel is refused for this call only.
    """
    verdict = _verdicts.get(key)
    if verdict is not None:
        return verdict
    mode = policy()
    if mode == "off":
        return True
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    with _lock:
        if key not in _verdicts:
            try:
                reason = _disproof(device, comparisons)
            except torch.OutOfMemoryError:  # It may pass: the next call tries again.
                return False
            _verdicts[key] = reason is None
            if reason is not None:
                message = f"lossless-kernels: {subject} keeps its original forward: {reason}"
                if mode == "strict":
                    del _verdicts[key]
                    raise LosslessProofError(message)
                warnings.warn(message, RuntimeWarning, stacklevel=3)
        return _verdicts[key]


def _disproof(device, comparisons):
    """Why the kernel may not replace the original, or None if it may."""
    try:
        with _undisturbed(device):
            counts = {}
            for what, actual, expected in comparisons():
                counts[what] = counts.get(what, 0) + differing(actual, expected)
            wrong = {what: int(count) for what, count in counts.items()}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # No C compiler, out of resources, another assembler: whatever it is, eager still works.
        return f"{type(error).__name__}: {error}".strip()
    wrong = {what: count for what, count in wrong.items() if count}
    return ", ".join(f"{count} elements of {what} differ" for what, count in wrong.items()) or None
