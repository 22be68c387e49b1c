"""Functions of other packages that call softmax, with softmax from the kernels and everything else their own."""

import dis
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple, Optional

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ..core import proof
from ..core.declarations import WARMUP, Warmup
from ..core.inspection import owns_nothing
from .softmax import replacement

_torch_softmax = functional.softmax
_ABSENT = object()


class Namespace:
    """A module of torch with other values for some names."""

    def __init__(self, module: ModuleType, **others):
        vars(self).update(others, source=module)

    def __getattr__(self, name):
        return getattr(self.source, name)


def calls_torch_softmax() -> bool:
    """Whether `torch.nn.functional.softmax` is torch's own."""
    return functional.softmax is _torch_softmax


def _softmax(input, dim=None, _stacklevel=3, dtype=None):
    """`torch.nn.functional.softmax`, from the kernel where one takes it."""
    out = replacement(input, dim, dtype) if dim is not None and calls_torch_softmax() else None
    return functional.softmax(input, dim, _stacklevel, dtype) if out is None else out


_functional = Namespace(functional, softmax=_softmax)
_nn = Namespace(torch.nn, functional=_functional)
_NAMESPACES = {id(functional): _functional, id(torch.nn): _nn, id(torch): Namespace(torch, nn=_nn)}


class _Copy(NamedTuple):
    """A copy of a function, None if it calls no softmax, and the values that the globals had which it names."""

    function: Optional[FunctionType]
    code: CodeType
    values: dict


_copies: MutableMapping[FunctionType, _Copy] = weakref.WeakKeyDictionary()


def with_our_softmax(function: Callable) -> Callable:
    """A copy of the function for which `torch.nn.functional.softmax` is `_softmax`.

    It is the function itself under torch.compile, which traces it with its own softmax, and where its code calls none.
    """
    if is_dynamo_compiling() or not isinstance(function, FunctionType):
        return function
    known = _copies.get(function)
    if known is None or not _is_current(known, function):
        known = _copies[function] = _copied(function)
        if known.function is None:
            proof.record_refusal(function, "its code calls no torch.nn.functional.softmax that can be replaced")
        else:
            proof.record_dependency(function, functional.softmax)
    return known.function or function


def _is_current(known: _Copy, function: FunctionType) -> bool:
    find = function.__globals__.get
    return known.code is function.__code__ and all(find(name, _ABSENT) is each for name, each in known.values.items())


def _copied(function: FunctionType) -> _Copy:
    namespace, code = function.__globals__, function.__code__
    values = {name: namespace.get(name, _ABSENT) for each in _codes(code) for name in each.co_names}
    found = _ways_to_softmax(code, values)
    if not found or hasattr(function, "__wrapped__") or not owns_nothing(function):
        return _Copy(None, code, values)
    ours = {name: value for name, value in {**values, **found}.items() if value is not _ABSENT}
    ours["__builtins__"] = namespace["__builtins__"]
    copy = FunctionType(code, ours, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return _Copy(copy, code, values)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _ways_to_softmax(code: CodeType, values: dict) -> dict[str, Namespace]:
    """The globals by which the code finds softmax, such as `F`; none if a copy of its globals would not do."""
    found = {}
    for each in _codes(code):
        path: list[str] = []
        for instruction in dis.get_instructions(each):
            operation = instruction.opname
            if operation in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"):
                return {}
            if operation == "LOAD_GLOBAL":
                path = [instruction.argval]
            elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
                path = path and [*path, instruction.argval]
            elif operation != "EXTENDED_ARG":
                path = []
            module = values.get(path[0]) if path else None
            if id(module) in _NAMESPACES and ".".join((module.__name__, *path[1:])) == "torch.nn.functional.softmax":
                found[path[0]] = _NAMESPACES[id(module)]
    return found


def router(hidden_states: torch.Tensor, weight: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    """The formula of transformers' `Qwen3_5MoeTopKRouter`: logits, the scores of `top_k` experts, and which they are."""
    logits = functional.linear(hidden_states.reshape(-1, weight.shape[1]), weight)
    values, indices = torch.topk(functional.softmax(logits, dim=-1, dtype=torch.float32), top_k, dim=-1)
    return logits, (values / values.sum(dim=-1, keepdim=True)).to(logits.dtype), indices


WARMUP["SoftmaxTopKRouter"] = Warmup(lambda weight, *_: [(16, weight.shape[-1])])
