"""Which path a model's layers take, why, and what to do about it."""

import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Optional, Union

import torch

from .core import ROOT_PACKAGE, inspection, launch, proof, warn
from .core.domain import FLOAT_DTYPES, MISSING, runs_kernels
from .eager_attention import functions_called as functions_with_our_attention
from .loss import has_our_loss
from .mapping import (
    LEVELS,
    RECIPES,
    check_model,
    class_forward,
    functions_called,
    idle_decorators,
    is_replaceable,
    missing_name,
    unnamed_functions,
)

# Kinds of reasons, and what to do about each. `kernel` is this package, as `get_kernel` returns it.
NO_DEVICE = "no kernels here"
NOT_KERNELIZED = "not kernelized"
NO_NAME = "no layer name"
OWN_FORWARD = "another forward"
OTHER_KERNEL = "another kernel"
NOT_CALLED = "not called yet"
NO_KERNEL = "no kernel for"
OTHER_FORMULA = "another formula"
FAILED = "verification failed"
NOT_VERIFIED = "not verified"
_STEPS = {
    NOT_KERNELIZED: "kernel.apply(model)",
    OWN_FORWARD: "delete the module's own `forward`, then kernel.apply(model), if this layer shall be replaced",
    OTHER_KERNEL: "kernel.apply(model) takes the layer back",
    NOT_CALLED: "call the model once, and ask again; kernel.warmup(model) calls layers, and no functions",
    OTHER_FORMULA: "nothing: the class computes something that no kernel of this package does",
    FAILED: "the original layers run; LOSSLESS_PROOF=strict raises with a traceback, kernel.doctor() lists the versions",
    NOT_VERIFIED: "unset LOSSLESS_PROOF to verify kernels before they run",
}
USE_DTYPES = "use float32, float16 or bfloat16"
# Kind -> words in a reason of that kind, and what to do. The first that is found counts.
_STEPS_BY_WORD = {
    NO_KERNEL: (
        (" on cpu", "move the model and its inputs to a GPU"),
        ("autocast", "nothing: under autocast this layer runs its original forward"),
        (proof.NOT_PLAIN, "call the layer outside of transforms, traces and dispatch modes"),
        (proof.IN_CAPTURE, "kernel.warmup(model), or call the model once, and capture again"),
        (
            proof.HIDDEN_DEPENDENCY,
            "let its forward read attributes and names of its file alone: no closure, getattr or training",
        ),
        ("float64", USE_DTYPES),
        ("gradients torch.", "give the gradients the output's dtype"),
        ("weight torch.", USE_DTYPES),
        ("hidden size is above", "nothing: kernels take F.rms_norm's hidden sizes up to that"),
        ("hidden size", "nothing: kernels take hidden sizes that are multiples of 4, from 64 to 32768"),
        ("strided", "make the tensors contiguous"),
        ("in memory", "make the tensors contiguous"),
        ("contiguous", "make the tensors contiguous"),
    ),
    FAILED: (
        ("memory was full", "kernel.warmup(model) while there is room"),
        ("out of memory", "kernel.warmup(model) while there is room"),
        ("C compiler", "install a C compiler, which Triton needs: apt install gcc, or set CC"),
    ),
}


def _step_by_word(text: str, kind: str) -> Optional[str]:
    return next((step for word, step in _STEPS_BY_WORD.get(kind, ()) if word in text), None)


class Reason(str):
    """Why an original forward runs.

    Attributes:
        kind: one of the kinds above.
        step: what to do about it.
    """

    kind: str
    step: str

    def __new__(cls, text: str, kind: str, step: Optional[str] = None):
        reason = super().__new__(cls, text)
        reason.kind = kind
        step = _step_by_word(text, kind) if step is None else step
        reason.step = _STEPS.get(kind, "nothing: the original forward is right here") if step is None else step
        return reason


@dataclass
class LayerReport:
    """One class of modules of a model, or a function that its modules call.

    Args:
        layer: name of the class or function.
        count: how many modules of the model are of it, or call it.
        path: "kernel", "kernel and original" (it depends on the call), "original", "another kernel", "not called yet"
            (replaced, and not verified before its first call) or, under `LOSSLESS_PROOF=off`, "unproved".
        formulas: what the kernels in use compute.
        proved: device, dtypes and sizes for which verification passed.
        reasons: why the original forward runs, where it does, or why nothing is verified.
    """

    layer: str
    count: int
    path: str
    formulas: list[str] = field(default_factory=list)
    proved: list[str] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)


@dataclass(repr=False)
class ReplacementReport:
    """What `replacement_report` and `apply` return; `print` shows it, `repr` is one line.

    Args:
        layers: one entry for each class and path.
        proofs: how many proofs the process has made.
        seconds: the time of all, Triton's compilation apart; `longest` that of one.
        bytes: the most device memory that one of them held.
    """

    layers: list[LayerReport]
    proofs: int
    seconds: float
    longest: float
    bytes: int

    def __repr__(self):
        counts = Counter()
        for entry in self.layers:
            counts[entry.path] += entry.count
        paths = ", ".join(f"{path} {count}" for path, count in counts.items()) or "no layers"
        return f"<ReplacementReport: {paths}; print it for the reasons>"

    def __str__(self):
        rows = [("layer", "modules", "path", "formula")]
        rows += [(r.layer, str(r.count), r.path, "; ".join(r.formulas)) for r in self.layers]
        head, *table = aligned(rows)
        lines, steps = [head], {}
        for line, entry in zip(table, self.layers):
            lines.append(line)
            lines += [f"    proved: {text}" for text in entry.proved]
            for reason in entry.reasons:
                if reason != entry.path:
                    lines.append(f"    {reason.kind}: {reason}" if reason.kind != reason else f"    {reason}")
                steps.setdefault(reason.step, {})[entry.layer] = None
        if not self.layers:
            lines.append("(no layer that a kernel of this package could replace)")
        lines += [f"next: {step} ({', '.join(layers)})" for step, layers in steps.items()]
        lines.append(
            f"{self.proofs} proofs in this process: {self.seconds * 1e3:.0f} ms without compilation, the longest "
            f"{self.longest * 1e3:.0f} ms, at most {self.bytes / 2**20:.1f} MiB held"
        )
        return "\n".join(lines)


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """The rows of a table as lines, with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def replacement_report(model: torch.nn.Module, verbose: bool = True) -> ReplacementReport:
    """Tells for every class of layers in `model` whether a kernel of this package runs, which, and if not, why and what to do.

    Nothing is verified before the first call with tensors of a kind: call the model before. Verdicts are the process's: they
    hold for all models in it. The report has an entry for modules that carry a layer name of this package, whose forward came from
    a kernel, or whose class could get a layer name; and for functions with such a name, or that could get one. A function's
    kernel is the process's too: `kernelize` of one model replaces it for every other of the same model file.

    Args:
        model: the module to look through.
        verbose: print the report.

    Raises:
        TypeError: `model` is no `torch.nn.Module`.

    A RuntimeWarning says if transformers does not take the installed `kernels`. Another names each layer that runs a kernel of
    another package: transformers registers a mapping of its own anew whenever a model with `use_kernels` changes between
    training and evaluation.
    """
    check_model(model)
    report = report_of(model)
    may_replace = obstacle(model) is None and next(iter(replaced_modules(model)), None) is None
    reason = idle_decorators() if may_replace else None
    if reason is not None:
        warn(reason)
    for entry in report.layers:
        if entry.path == OTHER_KERNEL:
            warn(f"{entry.layer} runs another kernel, {entry.reasons[0]}")
    if verbose:
        print(report)
    return report


def report_of(model: torch.nn.Module) -> ReplacementReport:
    """The report, without a print and a warning."""
    found = obstacle(model) or disabled()
    counts = Counter()
    for module in model.modules():
        for each in (module, *functions_of(module)):
            source = _source(each)
            if _name(each) in LEVELS["decoder"] or source:
                counts[type(each), source, _has_own_forward(each), ""] += 1
            elif (name := RECIPES.get(type(each)) or missing_name(each)) is not None:
                counts[type(each), "", _has_own_forward(each), name] += 1
        for function, name in unnamed_functions(module).items():
            counts[function, "", False, name] += 1
    layers = [_layer_report(*key, count, found) for key, count in counts.items()]
    for function, count in functions_with_our_attention(model).items():
        layers.append(_with_verdicts(LayerReport(function.__name__, count, "original"), function))
    losses = sum(map(has_our_loss, model.modules()))
    if losses:
        entry = LayerReport("loss_function", losses, "original")
        layers.append(_with_verdicts(entry, torch.nn.functional.cross_entropy))
    verdicts = list(proof._verdicts.values())
    return ReplacementReport(
        layers,
        len(verdicts),
        sum(verdict.seconds for verdict in verdicts),
        max((verdict.seconds for verdict in verdicts), default=0.0),
        max((verdict.bytes for verdict in verdicts), default=0),
    )


def devices_of(model: torch.nn.Module) -> set[torch.device]:
    """The devices on which the model computes: of its parameters and buffers, and those of accelerate's hooks.

    For a model without a tensor it is the current GPU, or the CPU without one.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    devices = {tensor.device for tensor in tensors}
    for module in model.modules():
        hook = vars(module).get("_hf_hook")
        for each in getattr(hook, "hooks", (hook,)):
            device = getattr(each, "execution_device", None)
            if device is not None:
                devices.add(torch.device(device))
    return devices or {torch.device("cuda" if torch.cuda.is_available() else "cpu")}


def missing_parts() -> Optional[Reason]:
    """What torch or Triton lacks that every kernel needs; None if nothing."""
    if MISSING:
        return Reason(
            f"torch {torch.__version__} has no {', '.join(MISSING)}",
            NO_DEVICE,
            "install a version of torch that README.md names",
        )
    if not launch.AVAILABLE:
        return Reason(
            "no Triton with `triton.knobs`", NO_DEVICE, "install the version of Triton that this torch asks for"
        )
    return None


def obstacle(model: torch.nn.Module) -> Optional[Reason]:
    """Why no kernel runs on the devices of the model or takes its weights, None if one may."""
    missing = missing_parts()
    if missing is not None:
        return missing
    devices = devices_of(model)
    if any(map(runs_kernels, devices)):
        return _obstacle_of_dtypes(model)
    types = sorted({device.type for device in devices})
    step = "move the model to a GPU, then kernel.apply(model)"
    if types == ["meta"]:
        step = "load the model onto a GPU, then kernel.apply(model)"
    elif not torch.cuda.is_available():
        step = f"run on a machine with a CUDA or ROCm GPU (torch {torch.__version__} sees none)"
    return Reason(f"the model is on {', '.join(types)}", NO_DEVICE, step)


def _obstacle_of_dtypes(model) -> Optional[Reason]:
    dtypes = {each.dtype for each in model.parameters() if each.is_floating_point() or each.is_complex()}
    if not dtypes or not dtypes.isdisjoint(FLOAT_DTYPES):
        return None
    return Reason(f"the model's weights are {', '.join(sorted(map(str, dtypes)))}", NO_KERNEL, USE_DTYPES)


def disabled() -> Optional[Reason]:
    """Why `kernelize` binds nothing in this process, None if it does."""
    if os.environ.get("DISABLE_KERNEL_MAPPING", "0") == "0":
        return None
    return Reason("DISABLE_KERNEL_MAPPING is set", NOT_KERNELIZED, "unset it, and start Python anew")


def _name(module) -> Optional[str]:
    return getattr(type(module), "kernel_layer_name", None)


def functions_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The functions that kernels has made modules of and attached to this one, as its code calls them.

    A deep copy of a model has copies attached, which its code does not call.
    """
    attached = vars(module).get("_kernel_funcs", {}).values()
    namespace = vars(sys.modules.get(type(module).__module__, object)).values() if attached else ()
    found = [next((each for each in namespace if type(each) is type(function)), function) for function in attached]
    return found + [function for function in functions_called(module) if function not in found]


def own_forward(module: torch.nn.Module) -> Optional[Callable]:
    """The forward in the `__dict__` of the module, inside of accelerate's hooks; None if it has none."""
    state = vars(module)
    return state.get("_old_forward", state.get("forward"))


def _bound(module) -> Optional[Callable]:
    """The forward, as a function, that `kernelize` bound onto this very module; None if it is the class's or a user's own."""
    forward = own_forward(module)
    function = getattr(forward, "__func__", None)
    # Where there is no kernel, kernelize binds the class's.
    return function if is_replaceable(module, forward) and function is not class_forward(module) else None


def _has_own_forward(module) -> bool:
    return not is_replaceable(module, own_forward(module))


def _source(module) -> str:
    """The Python module of the bound forward; empty if there is none."""
    return getattr(_bound(module), "__module__", "")


def replaced(module: torch.nn.Module) -> Optional[Callable]:
    """The forward of this package that is bound onto the module; None if there is none."""
    return _bound(module) if _is_ours(_source(module)) else None


def replaced_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules and functions of the model that carry a forward of this package."""
    for module in model.modules():
        yield from (each for each in (module, *functions_of(module)) if replaced(each) is not None)


def _is_ours(source) -> bool:
    return source.split(".")[0] == ROOT_PACKAGE.split(".")[0]


def name_of(layer: Union[type, FunctionType]) -> str:
    """The name of a class or function; of a class that kernels made of a function, the function's."""
    if not isinstance(layer, type):
        return layer.__name__
    original = inspection.function_behind(layer.forward)
    return layer.__name__ if original is layer.forward else original.__name__


def recipe(layer: type, name: str) -> Reason:
    """How to have a class of torch replaced."""
    step = f'kernels.replace_kernel_forward_from_hub(torch.nn.{layer.__name__}, "{name}"), then kernel.apply(model)'
    return Reason(f"{name} would fit", NO_NAME, step)


def _layer_report(layer, source, own, missing, count, found) -> LayerReport:
    entry = LayerReport(name_of(layer), count, "original")
    if source and not _is_ours(source):
        entry.path = OTHER_KERNEL
        entry.reasons.append(Reason(source, OTHER_KERNEL))
    elif source:
        return _with_verdicts(entry, inspection.function_behind(layer.forward))
    elif found is not None:
        entry.reasons.append(found)
    elif own:
        entry.reasons.append(Reason("the module has a forward of its own", OWN_FORWARD))
    elif layer in RECIPES:
        entry.reasons.append(recipe(layer, missing))
    elif missing:
        step = "kernel.apply(model), or kernel.name_layers(model) before kernelize"
        entry.reasons.append(Reason(f"{missing} would fit", NO_NAME, step))
    else:
        entry.reasons.append(Reason(NOT_KERNELIZED, NOT_KERNELIZED))
    return entry


def _is_of_a_formula(verdict) -> bool:
    """Whether the verdict is on the formula of a forward, and not on a kernel."""
    return not verdict.subject.formula and verdict.subject.original is not torch.nn.functional.cross_entropy


def _case(verdict) -> tuple:
    return verdict.subject.original, verdict.subject.device, verdict.subject.where


def _with_verdicts(entry: LayerReport, original: Callable) -> LayerReport:
    """The entry with what is known of the forward function that its layer replaces."""
    verdicts, outside = proof.verdicts_about(original)
    proved = [verdict.subject for verdict in verdicts if verdict and not _is_of_a_formula(verdict)]
    known = {_case(verdict) for verdict in verdicts if verdict and _is_of_a_formula(verdict)}
    entry.formulas = sorted({subject.formula for subject in proved} - {""})
    # One class of row counts may have several launch configurations, each verified.
    entry.proved = list(dict.fromkeys(f"{subject.device}, {subject.where}" for subject in proved))
    for verdict in verdicts:
        # A class that has another op's formula: it was compared with the formulas of RMSNorm too.
        if not verdict and not (_is_of_a_formula(verdict) and _case(verdict) in known):
            kind = OTHER_FORMULA if _is_of_a_formula(verdict) and not _step_by_word(verdict.reason, FAILED) else FAILED
            entry.reasons.append(Reason(f"{verdict.subject.where}: {verdict.reason}", kind))
    entry.reasons += [Reason(each, FAILED if isinstance(each, proof.Failure) else NO_KERNEL) for each in outside]
    if proved:
        entry.path = "kernel and original" if entry.reasons else "kernel"
    elif proof.policy() == "off" and not entry.reasons:
        entry.path = "unproved"
        entry.reasons.append(Reason("LOSSLESS_PROOF=off", NOT_VERIFIED))
    elif not entry.reasons:
        entry.path = NOT_CALLED
        entry.reasons.append(Reason(NOT_CALLED, NOT_CALLED))
    return entry
