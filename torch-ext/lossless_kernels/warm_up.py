"""Compiling and proving before the first request rather than in it."""

import contextlib
import copy
import inspect
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from types import MethodType
from typing import Callable, Optional

import torch

from .core import launch, proof
from .core.calls import Outside
from .core.domain import FLOAT_DTYPES, runs_kernels
from .decoder import layer as decoder
from .ops.rms_norm import plan as rms_norm
from .report import replaced


@dataclass(frozen=True)
class WarmupReport:
    """What `warmup` returns; `str()` of it is what `verbose` prints.

    Args:
        compiled: how many kernels were compiled, or read from Triton's cache on the disk.
        proved: what is replaced from now on and was not decided before: forward, device, dtypes and sizes.
        refused: what keeps its original forward, with the reason.
        skipped: layers that could not be called, with the reason.
        seconds_compiling: of `seconds`, those in which kernels were compiled, several at a time.
    """

    compiled: int
    proved: list
    refused: list
    skipped: list
    seconds: float
    seconds_compiling: float

    def __str__(self):
        lines = [
            f"lossless-kernels: {self.compiled} kernels compiled in {self.seconds_compiling:.1f} s, {len(self.proved)} "
            f"proofs passed, {len(self.refused)} refused, {len(self.skipped)} layers skipped, {self.seconds:.1f} s in all"
        ]
        for mark, texts in (("refused", self.refused), ("skipped", self.skipped)):
            lines += [f"    {mark}: {text}" for text in texts]
        return "\n".join(lines)


# What families offer, by the layer whose forward a module carries: the part of the module that is called and its forward, and
# the shapes of its inputs.
_PARTS = {"LlamaDecoderLayer": decoder.warmup_part}
_SHAPES = {
    "LlamaDecoderLayer": rms_norm.warmup_shapes,
    "LlamaRMSNorm": rms_norm.warmup_shapes,
    "RMSNormZeroCentered": rms_norm.warmup_shapes,
    "RMSNormGated": rms_norm.warmup_shapes,
    "TorchRMSNorm": rms_norm.warmup_shapes,
}
# What a gated MLP calls beside its activation; in a warmup nothing.
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def warmup(
    model: torch.nn.Module,
    rows: Optional[Iterable[int]] = None,
    dtypes: Optional[Iterable[torch.dtype]] = None,
    training: bool = False,
    progress: Optional[Callable[[int, int, str], None]] = None,
    verbose: bool = False,
) -> WarmupReport:
    """Compiles and proves what the layers of a kernelized model need, so that the first calls find it done.

    Every layer that carries a forward of this package is called on tensors of ones, with a weight of ones instead of its
    own, outside of hooks, and so are its gradients: an MLP without its projections, and of a decoder layer the residual's
    sum and the norm after it. Kernels are compiled in threads before that. What is proved is what later calls look up;
    another warmup finds everything done.

    Args:
        model: on its device, in its dtype, kernelized.
        rows: how many rows a call has: batch size times tokens, and times heads for a norm over heads. By default one
            number for each way that rows are summed, which are all, and each launch plan: in training from 16 rows on.
        dtypes: of the activations; by default those of each layer's weight, and all of these for layers without one.
        training: whether to warm up gradients too, of weights that require them and of the input.
        progress: called as `progress(done, total, what)`, `what` being "compiled" or "called".
        verbose: print the report to stderr.

    Returns:
        A `WarmupReport`.

    Raises:
        TypeError: `model` is no `torch.nn.Module`, `rows` holds something else than integers, `dtypes` than dtypes, or
            `progress` cannot be called.
        ValueError: `rows` or `dtypes` is empty, a number of rows is not positive, a dtype has no kernel.
        RuntimeError: a CUDA graph is being captured.
        LosslessProofError: a proof failed under `LOSSLESS_PROOF=strict`.

    Where nothing could be warmed up, a RuntimeWarning says why. Not warmed up: gradients whose rows lie in another order
    than the activations' (Qwen3's q_norm) and the rotary embedding of queries and keys, whose kernels are compiled at their
    first call, and what torch.compile makes of the model.
    """
    rows, dtypes = _checked(model, rows, dtypes)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: expected a function of (done, total, what), found {progress!r}")
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("warmup: expected no CUDA graph's capture, found one on the current stream")
    start, before = time.perf_counter(), set(proof._verdicts)
    skipped: dict[str, None] = {}
    calls = list(_calls(model, rows, dtypes, training, skipped))
    if not calls:
        warnings.warn(f"lossless-kernels: nothing to warm up: {'; '.join(skipped)}", RuntimeWarning, stacklevel=2)
    with launch.asking() as found:
        for call in calls:
            with contextlib.suppress(Exception):
                call()
    started = time.perf_counter()
    _compile(list(found), progress)
    seconds_compiling = time.perf_counter() - started
    for done, call in enumerate(calls, 1):
        try:
            call()
        except proof.LosslessProofError:
            raise
        except Exception as error:
            skipped[f"{call.name}: {type(error).__name__}: {error}"] = None
        if progress is not None:
            progress(done, len(calls), "called")
    for device in {call.device for call in calls if call.device.type == "cuda"}:
        torch.cuda.synchronize(device)
    verdicts = [verdict for key, verdict in list(proof._verdicts.items()) if key not in before]
    report = WarmupReport(
        len(found),
        # Which formula it is, is the first half of a proof.
        list(dict.fromkeys(str(v.subject).rstrip(",") for v in verdicts if v and v.subject.formula)),
        [f"{v.subject} {v.reason}" for v in verdicts if not v],
        list(skipped),
        time.perf_counter() - start,
        seconds_compiling,
    )
    if verbose:
        print(report, file=sys.stderr)
    return report


def _checked(model, rows, dtypes):
    """`rows` and `dtypes` as tuples, or None."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    for name, values in (("rows", rows), ("dtypes", dtypes)):
        if values is not None and (isinstance(values, str) or not isinstance(values, Iterable)):
            raise TypeError(f"{name}: expected a sequence, found {values!r}")
    rows = None if rows is None else tuple(rows)
    dtypes = None if dtypes is None else tuple(dtypes)
    if rows == () or dtypes == ():
        raise ValueError(f"{'rows' if rows == () else 'dtypes'}: expected at least one, found none")
    for count in rows or ():
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"rows: expected integers, found {count!r}")
        if count < 1:
            raise ValueError(f"rows: expected numbers from 1 on, found {count}")
    for dtype in dtypes or ():
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtypes: expected torch dtypes, found {dtype!r}")
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtypes: expected float32, float16 or bfloat16, found {dtype}")
    return rows, dtypes


class _Call:
    """A call of one layer, with ones for everything, and of its gradients if it is of training."""

    def __init__(self, module, forward, device, dtype, shape, training):
        self.module, self.forward, self.device = module, forward, device
        self.dtype, self.shape, self.training = dtype, shape, training
        self.name = type(module).__name__

    def __call__(self):
        with (
            proof.undisturbed(self.device),
            # Whether kernels are only asked for is of this thread. Inside, for leaving inference mode allows threads again.
            torch.autograd.set_multithreading_enabled(False),
            torch.set_grad_enabled(self.training),
        ):
            layer = self._stand_in()
            # The tensors that the layer takes are all of one shape.
            _, *names = inspect.signature(self.forward).parameters
            dtypes = [torch.int64 if name == "position_ids" else self.dtype for name in names]
            inputs = [torch.ones(self.shape, dtype=dtype, device=self.device) for dtype in dtypes]
            if not self.training:
                self.forward(layer, *inputs)
                return
            inputs = [each.requires_grad_(each.is_floating_point()) for each in inputs]
            out = self.forward(layer, *inputs)
            # The tables of a rotary embedding have no gradient.
            outs = [each for each in (out if isinstance(out, tuple) else (out,)) if each.requires_grad]
            leaves = [
                each for each in (*inputs, *layer._parameters.values()) if each is not None and each.requires_grad
            ]
            if outs:
                torch.autograd.grad(outs, leaves, [torch.ones_like(each) for each in outs], allow_unused=True)

    def _stand_in(self):
        """The module with parameters of ones: its own may be sharded, and hooks may hang on them."""
        layer = type(self.module).__new__(type(self.module))
        layer.__dict__.update(vars(self.module))
        bound = vars(self.module).get("forward")
        if isinstance(bound, MethodType) and bound.__self__ is self.module:
            layer.__dict__["forward"] = MethodType(bound.__func__, layer)
        # A forward may put other buffers there, as one whose frequencies follow the length does.
        for name in ("_buffers", "_non_persistent_buffers_set"):
            layer.__dict__[name] = copy.copy(layer.__dict__[name])
        layer.__dict__["_parameters"] = {
            name: parameter
            if parameter is None
            else torch.nn.Parameter(
                torch.ones(parameter.shape, dtype=parameter.dtype, device=self.device), parameter.requires_grad
            )
            for name, parameter in self.module._parameters.items()
        }
        layer.__dict__["_modules"] = {
            name: torch.nn.Identity() if name in _PROJECTIONS else child for name, child in self.module._modules.items()
        }
        return layer


def _calls(model, rows, dtypes, training, skipped) -> Iterator[_Call]:
    """What the model's layers need; why layers were left out goes into `skipped`."""
    layers = [(module, replaced(module)) for module in model.modules() if replaced(module) is not None]
    if not layers:
        skipped[
            "all: no layer carries a forward of this package: kernelize the model first, on the device of its kernels"
        ] = None
    weights = [weight for module, _ in layers for weight in module._parameters.values() if weight is not None]
    # Those without a weight are where the others are.
    example = next(iter(weights), next(model.parameters(), None))
    usual = tuple(dict.fromkeys(weight.dtype for weight in weights)) or (
        (example.dtype,) if example is not None else ()
    )
    seen = set()
    for module, forward in layers:
        layer, kind = forward.__qualname__.split(".")[0], forward
        try:
            if layer in _PARTS:
                module, forward = _PARTS[layer](module)
                kind = forward.args
            weight = next((weight for weight in module._parameters.values() if weight is not None), None)
            tensor = example if weight is None else weight
            if tensor is None or not runs_kernels(tensor.device):
                where = "a model without parameters" if tensor is None else f"on {tensor.device}"
                raise Outside(f"no kernel runs there, {where}")
            for dtype in dtypes or ((weight.dtype,) if weight is not None else usual):
                if dtype not in FLOAT_DTYPES:
                    skipped[f"{type(module).__name__}: {dtype} has no kernel"] = None
                    continue
                key = (type(module), kind, dtype, *_told_apart(module), tensor.device)
                if key in seen:
                    continue
                seen.add(key)
                for of_training in (False, True)[: 1 + training]:
                    for shape in _SHAPES.get(layer, _any_shape)(weight, dtype, tensor.device, rows, of_training):
                        yield _Call(module, forward, tensor.device, dtype, shape, of_training)
        except Outside as reason:
            skipped[f"{type(module).__name__}: {reason}"] = None


def _any_shape(*_) -> list[tuple[int, int]]:
    """Of layers without a weight: an activation's kernel is the same for every size that 16 bytes divide."""
    return [(16, 4096)]


def _told_apart(module):
    """What beside its class tells a layer from another: its parameters, and attributes such as eps and the activation."""
    parameters = ((name, p.shape, p.dtype, p.requires_grad) for name, p in module._parameters.items() if p is not None)
    plain = (float, int, bool, str)
    return (*parameters, *((name, value) for name, value in vars(module).items() if isinstance(value, plain)))


def _compile(compilations, progress) -> None:
    """Compiles several kernels at a time.

    In threads, for they share the tables that the launches look into, where processes would only leave files: Triton's
    passes, LLVM and ptxas run without the interpreter's lock, four fifths of the time a kernel takes, and Triton
    itself compiles in an executor of threads where `triton.AsyncCompileMode` is asked for. What fails fails again in the
    proof, which tells why.
    """
    # Two threads would each make the tables of a kernel, of which one is lost.
    for compilation in compilations:
        tables = getattr(compilation.kernel, "device_caches", None)
        if tables is not None:
            with torch.cuda.device(compilation.device):
                tables[compilation.device]
    with ThreadPoolExecutor(max(min(len(compilations), _cores()), 1)) as pool:
        for done, future in enumerate(as_completed([pool.submit(each) for each in compilations]), 1):
            future.exception()
            if progress is not None:
                progress(done, len(compilations), "compiled")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
