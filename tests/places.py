"""Where the package's Python modules are, by the names that tests call them."""

import importlib
import inspect
from types import ModuleType
from typing import Callable, Union

import pytest

PLACES = {
    **{name: f"core.{name}" for name in ("calls", "domain", "inspection", "launch", "layout", "plans", "proof")},
    "reduce_config": "core.reduction",
    **{name: f"ops.{name}" for name in ("activation", "gated_activation", "rotary")},
    "cross_entropy": "ops.cross_entropy",
    "softmax": "core.softmax",
    "softmax_callers": "ops.softmax_callers",
    "rotary_formulas": "ops.rotary_formulas",
    "rotary_embedding": "ops.rotary_tables",
    "variants": "ops.rms_norm.formulas",
    "rms_norm": "ops.rms_norm.function",
    **{
        f"rms_norm_{name}": f"ops.rms_norm.{name}"
        for name in ("backward", "call", "compiled", "fused_backward", "plan", "proof")
    },
    "add_rms_norm": "ops.rms_norm.add",
    "gated_rms_norm": "ops.rms_norm.gated",
    "decoder": "decoder.layer",
    "replay": "decoder.replay",
    "attention": "decoder.attention",
    "mlp": "decoder.mlp",
    "recompute": "decoder.recompute",
    "warmup": "warm_up",
}


def forget_calls(module: Callable[[str], ModuleType]) -> None:
    """Empties all tables of calls.

    Args:
        module: the fixture of this name.
    """
    for calls in module("calls").Calls.every:
        calls.clear()


# What the package learns while it runs, beside its calls.
_LEARNT = {
    "proof": ("_verdicts", "_refusals", "_warned", "_dependencies"),
    "inspection": ("_codes",),
    "softmax_callers": ("_copies",),
}


def forget_all(module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of a test the package knows no verdicts, classes and callers, and has warned of nothing.

    Args:
        module, monkeypatch: the fixtures of these names.
    """
    for owner, tables in _LEARNT.items():
        for table in tables:
            monkeypatch.setattr(module(owner), table, type(getattr(module(owner), table))())
    forget_calls(module)


def resolved(module: Callable[[str], ModuleType], name: str) -> list:
    """What the calls of an op resolved to, backward calls included."""
    tables = [value for value in vars(module(name)).values() if isinstance(value, module("calls").Calls)]
    return [found for calls in tables for found in calls.resolved.values()]


def python_module(kernel: Union[ModuleType, str], name: str) -> ModuleType:
    """A Python module of a kernel, which may be given by its name."""
    package = kernel if isinstance(kernel, str) else kernel.__name__
    return importlib.import_module(f"{package}.{PLACES.get(name, name)}")


def modeling(folder: str) -> ModuleType:
    """The Python module of transformers with the models of this folder."""
    return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")


def name_of_cache() -> str:
    """The name of the cache among the arguments of transformers' models: "cache" from 5.24 on, "past_key_values" before."""
    taken = {*inspect.signature(modeling("llama").LlamaModel.forward).parameters}
    return taken.intersection(("past_key_values", "cache")).pop()
