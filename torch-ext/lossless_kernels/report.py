"""Which path a model's layers take, and why."""

import sys
import textwrap
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch

from .core import inspection, proof
from .loss import has_our_loss
from .mapping import LEVELS

_PACKAGE = __package__


@dataclass
class LayerReport:
    """One class of modules of a model, or a function that its modules call.

    Args:
        layer: name of the class or function.
        count: how many modules of the model are of it, or call it.
        path: "kernel", "kernel and original" (it depends on the call), "original", "another kernel" or, under
            `LOSSLESS_PROOF=off`, "unproved".
        formulas: what the kernels in use compute.
        proved: device, dtypes and sizes that have proved equal.
        reasons: why the original forward runs, where it does, or why nothing is proved.
    """

    layer: str
    count: int
    path: str
    formulas: list = field(default_factory=list)
    proved: list = field(default_factory=list)
    reasons: list = field(default_factory=list)


@dataclass
class ReplacementReport:
    """What `replacement_report` returns; `str()` of it is what is printed.

    Args:
        layers: one entry for each class and path.
        proofs: how many proofs the process has made.
        seconds: the time of all, Triton's compilation apart; `longest` that of one.
        bytes: the most device memory that one of them held.
    """

    layers: list
    proofs: int
    seconds: float
    longest: float
    bytes: int

    def __str__(self):
        rows = [("layer", "modules", "path", "formula")]
        rows += [(r.layer, str(r.count), r.path, "; ".join(r.formulas)) for r in self.layers]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = []
        for row, entry in zip(rows, [None, *self.layers]):
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
            if entry is None:
                continue
            why = "because" if entry.path == "unproved" else "original where"
            for mark, texts in (("proved", entry.proved), (why, entry.reasons)):
                lines += [textwrap.indent(f"{mark}: {text}", "    ") for text in texts]
        if not self.layers:
            lines.append("(no layer that a kernel of this package could replace)")
        lines.append(
            f"{self.proofs} proofs in this process: {self.seconds * 1e3:.0f} ms without compilation, the longest "
            f"{self.longest * 1e3:.0f} ms, at most {self.bytes / 2**20:.1f} MiB held"
        )
        return "\n".join(lines)


def replacement_report(model: torch.nn.Module, verbose: bool = True) -> ReplacementReport:
    """Tells for every class of layers in `model` whether a kernel of this package runs, which, and if not, why.

    Nothing is proved before the first call with tensors of a kind, so call the model before. Proofs are the process's: what
    is told of a class holds for all models in it. Modules are looked at that carry a layer name this package has a kernel
    for, or whose forward came from a kernel, and at functions with such a name. A function's kernel is the process's too:
    `kernelize` of one model replaces it for every other of the same model file.

    Args:
        model: the module to look through.
        verbose: print the report.

    Raises:
        TypeError: `model` is no `torch.nn.Module`.

    A layer of ours that runs somebody else's kernel is warned of (RuntimeWarning): transformers registers a mapping of its own
    anew whenever a model with `use_kernels` changes between training and evaluation.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    candidates = [each for module in model.modules() for each in (module, *_functions(module))]
    counts = Counter(
        (type(module), _source(module))
        for module in candidates
        if _name(module) in LEVELS["decoder"] or _source(module)
    )
    layers = [_layer_report(layer, source, count) for (layer, source), count in counts.items()]
    losses = sum(map(has_our_loss, model.modules()))
    if losses:
        entry = LayerReport("loss_function", losses, "original")
        layers.append(_with_verdicts(entry, torch.nn.functional.cross_entropy))
    for entry in layers:
        if entry.path == "another kernel":
            warnings.warn(
                f"lossless-kernels: {entry.layer} runs another kernel, {entry.reasons[0]}", RuntimeWarning, stacklevel=2
            )
    verdicts = list(proof._verdicts.values())
    report = ReplacementReport(
        layers,
        len(verdicts),
        sum(verdict.seconds for verdict in verdicts),
        max((verdict.seconds for verdict in verdicts), default=0.0),
        max((verdict.bytes for verdict in verdicts), default=0),
    )
    if verbose:
        print(report)
    return report


def _name(module):
    return getattr(type(module), "kernel_layer_name", None)


def _functions(module) -> list:
    """The functions that kernels has made modules of and attached to this one, as its code calls them.

    A deep copy of a model has copies attached, which nobody calls.
    """
    namespace = vars(sys.modules.get(type(module).__module__, object)).values()
    attached = vars(module).get("_kernel_funcs", {}).values()
    return [next((each for each in namespace if type(each) is type(function)), function) for function in attached]


def _bound(module) -> Optional[Callable]:
    """The forward, as a function, that is bound onto this very module; None if it is its class's own."""
    # accelerate's hooks wrap the forward that was there.
    forward = vars(module).get("_old_forward", vars(module).get("forward"))
    function = getattr(forward, "__func__", None)
    # Where there is no kernel, kernelize binds the class's.
    return None if function is type(module).forward else function


def _source(module) -> str:
    """The Python module of the bound forward; empty if there is none."""
    return getattr(_bound(module), "__module__", "")


def replaced(module) -> Optional[Callable]:
    """The forward of this package that is bound onto the module; None if there is none."""
    return _bound(module) if _source(module).split(".")[0] == _PACKAGE.split(".")[0] else None


def _layer_report(layer, source, count) -> LayerReport:
    original = inspection.function_behind(layer.forward)
    entry = LayerReport(layer.__name__ if original is layer.forward else original.__name__, count, "original")
    if not source:
        entry.reasons.append("not kernelized, or no kernel for its device")
        return entry
    if source.split(".")[0] != _PACKAGE.split(".")[0]:
        entry.path = "another kernel"
        entry.reasons.append(source)
        return entry
    return _with_verdicts(entry, original)


def _with_verdicts(entry: LayerReport, original: Callable) -> LayerReport:
    """The entry with what is known of the forward function that its layer replaces."""
    verdicts, outside = proof.known(original)
    admitted = [verdict.subject for verdict in verdicts if verdict and verdict.subject.formula]
    entry.formulas = sorted({subject.formula for subject in admitted})
    # Of one class of row counts there may be several plans, each proved.
    entry.proved = list(dict.fromkeys(f"{subject.device}, {subject.where}" for subject in admitted))
    entry.reasons = [f"{verdict.subject.where}: {verdict.reason}" for verdict in verdicts if not verdict]
    entry.reasons += outside
    if admitted:
        entry.path = "kernel and original" if entry.reasons else "kernel"
    elif proof.policy() == "off" and not entry.reasons:
        entry.path = "unproved"
        entry.reasons.append("LOSSLESS_PROOF=off")
    elif not entry.reasons:
        entry.reasons.append("no proof yet: no call that a kernel takes")
    return entry
