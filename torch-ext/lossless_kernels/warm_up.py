"""`warmup`: compilation and verification ahead of the first request."""

import contextlib
import copy
import inspect
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from types import MethodType
from typing import Callable, Optional, Union

import torch

from .core import launch, proof, warn
from .core.calls import Outside
from .core.declarations import WARMUP, Warmup
from .core.domain import FLOAT_DTYPES, runs_kernels
from .mapping import check_model
from .report import obstacle, replaced


@dataclass(frozen=True)
class WarmupReport:
    """What `warmup` returns; `str()` of it is what `verbose` prints.

    Args:
        compiled: how many kernels were compiled, or read from Triton's cache on the disk.
        proved: for what verification has passed now: forward, device, dtypes and sizes.
        failed: for what verification has failed now, with the reason: the original forward runs there.
        skipped: layers that could not be called, and those found now that no kernel takes, with the reason.
        seconds: the time of all.
        seconds_compiling: the part of `seconds` in which kernels were compiled, several at a time.
    """

    compiled: int
    proved: list[str]
    failed: list[str]
    skipped: list[str]
    seconds: float
    seconds_compiling: float

    def __str__(self):
        lines = [
            f"lossless-kernels: {self.compiled} kernels compiled in {self.seconds_compiling:.1f} s, {len(self.proved)} "
            f"proofs passed, {len(self.failed)} failed, {len(self.skipped)} layers skipped, {self.seconds:.1f} s in all"
        ]
        for mark, texts in (("failed", self.failed), ("skipped", self.skipped)):
            lines += [f"    {mark}: {text}" for text in texts]
        return "\n".join(lines)


def warmup(
    model: torch.nn.Module,
    rows: Optional[Iterable[int]] = None,
    dtypes: Optional[Iterable[torch.dtype]] = None,
    training: bool = False,
    progress: Optional[Union[Callable[[int, int, str], None], bool]] = None,
    verbose: bool = False,
) -> WarmupReport:
    """Compiles and verifies the kernels of a model's layers ahead of its first call.

    Calls every layer that carries a forward of this package, and its gradients, on tensors of ones, with a weight of ones in
    place of its own and without its hooks: an MLP without its projections, a decoder layer's fused residual add + RMSNorm.
    Kernels are compiled in threads before that. Later calls find the verdicts; another warmup finds everything done. On a
    device without kernels, such as a CPU, there is nothing to warm up.

    Args:
        model: on its device, in its dtype, after `apply` or `kernelize`.
        rows: how many rows a call has: batch size times tokens, and times heads for a norm over heads. By default one
            number for each reduction order of rows and each launch configuration; in training from 16 rows on.
        dtypes: of the activations; by default those of each layer's weight, and all of these for layers without one.
        training: whether to warm up gradients too, of weights that require them and of the input.
        progress: called as `progress(done, total, what)`, with `what` "compiled" or "called". By default (or True) a bar on
            stderr where that is a terminal; False for none.
        verbose: print the report to stderr.

    Returns:
        A `WarmupReport`.

    Raises:
        TypeError: `model` is no `torch.nn.Module`, `rows` holds something else than integers, `dtypes` than dtypes, or
            `progress` is neither a bool nor a function.
        ValueError: `rows` or `dtypes` is empty, a number of rows is not positive, a dtype has no kernel.
        RuntimeError: a CUDA graph is being captured.
        LosslessProofError: verification failed under `LOSSLESS_PROOF=strict`.

    A RuntimeWarning says why nothing could be warmed up. These kernels still wait for their first call: those of functions (the
    loss, the rotary embedding of queries and keys, the softmax of `lossless_eager`, what a program calls itself), of gradients whose
    rows lie in another order than the activations' (Qwen3's q_norm), and of models under torch.compile.
    """
    rows, dtypes = _checked(model, rows, dtypes)
    if progress is None or progress is True:
        progress = _bar if sys.stderr.isatty() else None
    elif progress is False:
        progress = None
    elif not callable(progress):
        raise TypeError(f"progress: expected a function of (done, total, what), found {progress!r}")
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("warmup: expected no CUDA graph's capture, found one on the current stream")
    start, before, refused = time.perf_counter(), set(proof._verdicts), proof.refusals()
    skipped: dict[str, None] = {}
    calls = list(_calls(model, rows, dtypes, training, skipped))
    if not calls:
        warn(f"nothing to warm up: {'; '.join(skipped)}")
    with launch.collect_compilations() as found:
        for call in calls:
            with contextlib.suppress(Exception):
                call()
    started = time.perf_counter()
    compiled = _compile(list(found), progress)
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
    new = proof.refusals() - refused
    skipped |= dict.fromkeys(sorted(f"{original.__qualname__}: {reason}" for original, reason in new))
    verdicts = [verdict for key, verdict in list(proof._verdicts.items()) if key not in before]
    if calls and skipped and not found and not proof._verdicts:
        warn(f"nothing could be warmed up: {'; '.join(skipped)}")
    report = WarmupReport(
        compiled,
        # The verdict on the formula is the first half of a proof.
        list(dict.fromkeys(str(v.subject).rstrip(",") for v in verdicts if v and v.subject.formula)),
        [f"{v.subject} {v.reason}" for v in verdicts if not v],
        list(skipped),
        time.perf_counter() - start,
        seconds_compiling,
    )
    if verbose:
        print(report, file=sys.stderr)
    return report


def _bar(done: int, total: int, what: str) -> None:
    """Progress on one line of a terminal, which the next thing printed finds empty."""
    filled = 30 * done // total
    end = "\r\033[K" if done == total else ""
    line = f"\r\033[Klossless-kernels: {what:8} [{'#' * filled}{'.' * (30 - filled)}] {done}/{total}{end}"
    print(line, end="", file=sys.stderr, flush=True)


def _checked(model, rows, dtypes):
    """`rows` and `dtypes` as tuples, or None."""
    check_model(model)
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


class _WarmupCall:
    """A call of one layer on tensors of ones and, in training, of its gradients."""

    def __init__(self, module, forward, left_out, device, dtype, shape, training):
        self.module, self.forward, self.left_out, self.device = module, forward, left_out, device
        self.dtype, self.shape, self.training = dtype, shape, training
        self.name = type(module).__name__

    def __call__(self):
        with (
            proof.undisturbed(self.device),
            # A dry run is one thread's. This comes after `undisturbed`: leaving inference mode allows threads again.
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
            name: torch.nn.Identity() if name in self.left_out else child
            for name, child in self.module._modules.items()
        }
        return layer


def _calls(model, rows, dtypes, training, skipped) -> Iterator[_WarmupCall]:
    """The calls that warm up the model's layers; the reasons why layers are left out go into `skipped`."""
    layers = [(module, replaced(module)) for module in model.modules() if replaced(module) is not None]
    found = obstacle(model)
    if found is not None:
        skipped[f"all layers: {found}; next: {found.step}"] = None
        return
    if not layers:
        skipped[
            "all layers: none carries a forward of this package: kernelize the model first, by kernel.apply(model)"
        ] = None
    weights = [weight for module, _ in layers for weight in module._parameters.values() if weight is not None]
    # A layer without a weight is on the device of the others.
    example = next(iter(weights), next(model.parameters(), None))
    usual = tuple(dict.fromkeys(weight.dtype for weight in weights)) or (
        (example.dtype,) if example is not None else ()
    )
    seen = set()
    for module, forward in layers:
        declared, kind = WARMUP.get(forward.__qualname__.split(".")[0], Warmup()), forward
        try:
            if declared.part is not None:
                module, forward = declared.part(module)
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
                key = (type(module), kind, dtype, *identity_of(module), tensor.device)
                if key in seen:
                    continue
                seen.add(key)
                for of_training in (False, True)[: 1 + training]:
                    for shape in declared.shapes(weight, dtype, tensor.device, rows, of_training):
                        yield _WarmupCall(module, forward, declared.left_out, tensor.device, dtype, shape, of_training)
        except Outside as reason:
            skipped[f"{type(module).__name__}: {reason}"] = None


def identity_of(module):
    """Parameters and attributes, such as eps and the activation, by which layers of one class differ."""
    parameters = ((name, p.shape, p.dtype, p.requires_grad) for name, p in module._parameters.items() if p is not None)
    plain = (float, int, bool, str)
    return (*parameters, *((name, value) for name, value in vars(module).items() if isinstance(value, plain)))


def _compile(compilations, progress) -> int:
    """Compiles several kernels at a time. Returns how many it compiled.

    In threads, which share the tables that launches look into; processes would only leave files. Triton's passes, LLVM and ptxas
    run without the interpreter's lock, four fifths of the time a kernel takes. `triton.AsyncCompileMode` compiles in an
    executor of threads too. A compilation that fails here fails again in the verification, which tells why.
    """
    compiled = 0
    # Two threads would each make the tables of a kernel, and one would be lost.
    for compilation in compilations:
        tables = getattr(compilation.kernel, "device_caches", None)
        if tables is not None:
            with torch.cuda.device(compilation.device):
                tables[compilation.device]
    with ThreadPoolExecutor(max(min(len(compilations), _cores()), 1)) as pool:
        for done, future in enumerate(as_completed([pool.submit(each) for each in compilations]), 1):
            compiled += future.exception() is None
            if progress is not None:
                progress(done, len(compilations), "compiled")
    return compiled


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
