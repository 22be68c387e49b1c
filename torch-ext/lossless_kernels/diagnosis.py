"""`doctor`: what this machine has, what keeps kernels from running here, and what would be replaced in a model."""

import importlib.metadata
import os
import platform
import shutil
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch

from . import report
from .core import ROOT_PACKAGE, launch, proof
from .core.domain import FLOAT_DTYPES
from .core.torch_internals import MISSING, SLOWER
from .mapping import LAYERS, LEVELS, RECIPES, has_known_formula, mapped_names, missing_name, unnamed_functions
from .ops.rms_norm.formulas import EPS_NAMES, in_domain

_PACKAGES = ("torch", "triton", "transformers", "kernels")
# Variables of the environment that change what runs.
_VARIABLES = ("LOSSLESS_PROOF", "TRITON_INTERPRET", "DISABLE_KERNEL_MAPPING", "USE_HUB_KERNELS", "LOCAL_KERNELS", "CC")


class Problem(NamedTuple):
    """Something that keeps kernels from running, or layers from being replaced.

    Args:
        what: what was found.
        step: what to do about it.
    """

    what: str
    step: str


class PlannedLayer(NamedTuple):
    """A class or function of a model that is not loaded; norms of several sizes are several entries.

    Args:
        layer: its name.
        count: how many modules of the model are of it, or call it.
        replacement: the layer of this package that `apply` binds on a GPU; empty if none.
        reason: why the original forward would run, with a `step`; None with a replacement.
    """

    layer: str
    count: int
    replacement: str
    reason: Optional[report.Reason]


@dataclass(repr=False)
class Diagnosis:
    """What `doctor` returns; `print` shows it, `repr` is one line.

    Args:
        facts: name -> value: versions, GPUs, compiler, environment, build and mapping.
        problems: what keeps kernels from running or layers from being replaced here, each with its next step.
        model: the name of the model that was asked about; empty without one.
        layers: its layers, planned from its configuration.
        replacement: the report of a model that is loaded.
    """

    facts: dict[str, str]
    problems: list[Problem]
    model: str = ""
    layers: list[PlannedLayer] = field(default_factory=list)
    replacement: Optional[report.ReplacementReport] = None

    def __repr__(self):
        found = "; ".join(problem.what for problem in self.problems) or "no problems"
        return f"<Diagnosis: {found}; print it for the rest>"

    def __str__(self):
        width = max(map(len, self.facts))
        lines = [f"{name.ljust(width)}  {value}" for name, value in self.facts.items()]
        for problem in self.problems:
            lines += [f"problem: {problem.what}", f"    next: {problem.step}"]
        if not self.problems:
            lines.append("no problems: kernels run here where verification passes")
        if self.model:
            lines += ["", self.model]
        if self.replacement is not None:
            lines.append(str(self.replacement))
        rows = [(each.layer, str(each.count), each.replacement or "none") for each in self.layers]
        head, *table = report.aligned([("layer", "modules", "kernel"), *rows])
        if self.layers:
            lines.append(head)
        for line, entry in zip(table, self.layers):
            lines.append(line)
            if entry.reason is not None:
                lines.append(f"    {entry.reason.kind}: {entry.reason}; next: {entry.reason.step}")
        if self.model and not self.layers and self.replacement is None:
            lines.append("(no layer that a kernel of this package could replace)")
        return "\n".join(lines)


def doctor(model: Optional[Union[torch.nn.Module, str, Any]] = None, verbose: bool = True) -> Diagnosis:
    """Reports this machine's versions, the problems that keep kernels from running, and the layers that `apply` would replace.

    The report needs no GPU, no `kernels` and no transformers. It names what is missing, each with its next step. It launches no
    kernel. A model that is not loaded is built from its configuration on the meta device, without weights. The formulas of its
    norms are compared on the CPU. Kernels are verified later, at the model's first calls.

    Args:
        model: a module, whose `replacement_report` is added; or a model that is not loaded: a configuration of transformers, or
            the name of one (an id on the Hub, or a folder with config.json).
        verbose: print the diagnosis.

    Raises:
        TypeError: `model` is none of these.
        ValueError: transformers finds no configuration by this name, or cannot build the model without code from the Hub.
        ImportError: transformers is not installed, and `model` is a configuration or a name.
    """
    if isinstance(model, type):
        raise TypeError(f"model: expected a module, a configuration or a name, found type {model.__name__}, a class")
    problems = list(_problems())
    diagnosis = Diagnosis(_facts(), problems)
    if isinstance(model, torch.nn.Module):
        diagnosis.model, diagnosis.replacement = type(model).__name__, report.report_of(model)
    elif model is not None:
        diagnosis.model, built = _built(model)
        diagnosis.layers = list(_planned(built))
    if verbose:
        print(diagnosis)
    return diagnosis


def _version_of(package) -> Optional[str]:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compiler() -> Optional[str]:
    """The C compiler that Triton takes."""
    return os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")


def _gpus() -> list[str]:
    names = []
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        kind = (
            getattr(found, "gcnArchName", "")
            if torch.version.hip
            else f"compute capability {found.major}.{found.minor}"
        )
        names.append(f"{found.name}, {kind}, {found.total_memory >> 30} GiB")
    return names


def _facts() -> dict[str, str]:
    build = ROOT_PACKAGE.split(".")[0]
    names = mapped_names()
    ours = [name for name in names if name in LEVELS["decoder"]]
    facts = {
        "lossless-kernels": f"{build}, {Path(__file__).parent}",
        "python": platform.python_version(),
        **{package: _version_of(package) or "not installed" for package in _PACKAGES},
        "GPU": "; ".join(_gpus()) or "none that torch sees",
        "C compiler": _compiler() or "none",
        "decorators": {True: "live", False: "without effect", None: "unknown"}[_decorators_are_live()],
        "mapping in force": f"{len(names)} layer names, {', '.join(ours) or 'none'} of this package's"
        if names
        else "none",
        "private names of torch": f"missing: {', '.join(MISSING + SLOWER)}" if MISSING + SLOWER else "all there",
        "LOSSLESS_PROOF": os.environ.get("LOSSLESS_PROOF", "on (default)"),
    }
    others = {name: os.environ[name] for name in _VARIABLES[1:] if name in os.environ}
    return {**facts, "environment": ", ".join(f"{name}={value}" for name, value in others.items()) or "nothing set"}


def _decorators_are_live() -> Optional[bool]:
    """Whether transformers' decorators have given its classes layer names; None without transformers."""
    try:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
    except ImportError:
        return None
    return hasattr(LlamaRMSNorm, "kernel_layer_name")


def _problems() -> Iterator[Problem]:
    missing = report.missing_parts()
    if missing is not None:
        yield Problem(f"{missing}: all layers keep their original forward", missing.step)
    if not torch.cuda.is_available():
        why = "is built without CUDA" if torch.version.cuda is None and torch.version.hip is None else "sees no GPU"
        extra = "; Triton's interpreter is on, for correctness alone" if launch.INTERPRETED else ""
        yield Problem(
            f"torch {torch.__version__} {why}{extra}",
            "install a torch for CUDA or ROCm"
            if "built" in why
            else "check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES",
        )
    elif launch.INTERPRETED:
        yield Problem("TRITON_INTERPRET is set: kernels run in Triton's interpreter", "unset it, and start Python anew")
    if launch.AVAILABLE and not launch.INTERPRETED and torch.cuda.is_available():
        if _compiler() is None:
            yield Problem("no C compiler, which Triton needs", "install gcc, or set CC")
        if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
            yield Problem("no Python.h, which Triton's launcher is compiled with", "install python3-dev")
    if _version_of("kernels") is None:
        yield Problem("kernels is not installed", "pip install kernels")
    try:
        policy = proof.policy()
    except ValueError as error:
        yield Problem(str(error), "unset LOSSLESS_PROOF")
    else:
        if policy == "off" and not launch.INTERPRETED:
            yield Problem("LOSSLESS_PROOF=off: kernels run without verification", "unset LOSSLESS_PROOF")
    if os.environ.get("DISABLE_KERNEL_MAPPING", "0") != "0":
        yield Problem("DISABLE_KERNEL_MAPPING is set: kernelize replaces nothing", "unset it, and start Python anew")
    if _decorators_are_live() is False:
        yield _of_decorators()
    foreign = [name for name in mapped_names() if name in LAYERS]
    if foreign:
        yield Problem(
            f"a mapping is registered with {', '.join(foreign)}: kernelize without inherit_mapping=False takes its kernels too",
            "kernel.apply(model), which takes no other mapping's kernels",
        )


def _of_decorators() -> Problem:
    from transformers.utils import import_utils

    rotary = "kernel.apply(model) names layers itself; for rotary functions "
    if os.environ.get("USE_HUB_KERNELS", "YES").upper() not in ("1", "ON", "YES", "TRUE"):
        return Problem(
            "USE_HUB_KERNELS turns transformers' decorators off: its classes have no layer names",
            rotary + "unset it, and start Python anew",
        )
    least, below = (getattr(import_utils, f"KERNELS_{each}_VERSION", "?") for each in ("MIN", "MAX"))
    return Problem(
        f"transformers {_version_of('transformers')} takes kernels from {least} to below {below}, found {_version_of('kernels')}: "
        "its classes have no layer names",
        rotary + f'pip install "kernels>={least},<{below}"',
    )


def _built(model) -> tuple[str, torch.nn.Module]:
    """A model that is not loaded, on the meta device, and its name."""
    is_name = isinstance(model, (str, Path))
    if not is_name and not hasattr(model, "model_type"):
        raise TypeError(f"model: expected a module, a configuration or a name, found {type(model).__name__}")
    import transformers

    if is_name:
        try:
            config = transformers.AutoConfig.from_pretrained(model)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"model: expected the name of a model, found {str(model)!r}: {reason}") from None
    else:
        config = model
    named = [getattr(transformers, each, None) for each in getattr(config, "architectures", None) or ()]
    makers = [each._from_config for each in named if each is not None]
    makers += [each.from_config for each in (transformers.AutoModelForCausalLM, transformers.AutoModel)]
    errors = []
    for make in makers:
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                built = make(config)
            break
        except Exception as error:  # Another class may take it.
            errors.append(" ".join(f"{type(error).__name__}: {error}".split()))
    else:
        raise ValueError(
            f"model: expected a configuration that transformers can build, found {config.model_type}: {errors[0]}"
        )
    name = f"{type(built).__name__} of {model}" if is_name else type(built).__name__
    return f"{name}, planned from its configuration", built


def _planned(model) -> Iterator[PlannedLayer]:
    counts, examples = Counter(), {}
    for module in model.modules():
        for each in (module, *report.functions_of(module)):
            layer, weight = type(each), each._parameters.get("weight")
            name = getattr(layer, "kernel_layer_name", None) or missing_name(each) or RECIPES.get(layer)
            if name in LEVELS["decoder"]:
                key = layer, name, None if weight is None else (weight.shape, weight.dtype)
                counts[key] += 1
                examples.setdefault(key, each)
        for function, name in unnamed_functions(module).items():
            counts[function, name, None] += 1
            examples.setdefault((function, name, None), module)
    for key, count in counts.items():
        layer, name, _ = key
        reason = _obstacle_of(examples[key], name, next(model.parameters()).dtype)
        yield PlannedLayer(report.name_of(layer), count, "" if reason else LEVELS["decoder"][name], reason)


def _obstacle_of(module, name, dtype) -> Optional[report.Reason]:
    """Why no kernel would take the layer, as far as that is known before a call."""
    layer = type(module)
    if layer in RECIPES:
        return report.recipe(layer, name)
    weight = module._parameters.get("weight")
    if weight is not None:
        dtype = weight.dtype
    if dtype not in FLOAT_DTYPES:
        return report.Reason(str(dtype), report.NO_KERNEL, report.USE_DTYPES)
    if name in EPS_NAMES and weight is not None:
        if not in_domain(dtype, dtype, weight.numel()):
            return report.Reason(f"hidden size {weight.numel()}", report.NO_KERNEL)
        if not has_known_formula(layer, EPS_NAMES[name]):
            return report.Reason("none of the known formulas", report.OTHER_FORMULA)
    return None
