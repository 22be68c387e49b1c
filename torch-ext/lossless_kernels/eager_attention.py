"""Eager attention of transformers' models with softmax from the kernels: `register_attention`."""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from .core.inspection import owns_nothing
from .ops.softmax import replacement

NAME = "lossless_eager"
# What transformers' model files call the function that `attn_implementation="eager"` runs.
_EAGER = "eager_attention_forward"
_torch_softmax = functional.softmax


def register_attention() -> str:
    """Registers the attention function "lossless_eager" with transformers: eager attention, softmax from the kernels.

    `model.set_attn_implementation("lossless_eager")` or `from_pretrained(..., attn_implementation="lossless_eager")` selects
    it. It runs the `eager_attention_forward` of the model's own file, operation by operation, and takes softmax alone from the
    kernels of `kernel.softmax`, where they are verified: outputs, gradients and random numbers of dropout are eager's. Masks are
    those of "eager". The memory is eager's too.

    Returns:
        The name, "lossless_eager".

    Raises:
        ImportError: transformers is not installed, or too old to register attention functions.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, lossless_eager)
    AttentionMaskInterface.register(NAME, eager_mask)
    return NAME


def lossless_eager(module: torch.nn.Module, *arguments, **named) -> tuple:
    """The attention function: `eager_attention_forward(module, ...)` of the file that has the module's forward.

    Under torch.compile it is traced with its own softmax.
    """
    eager = _eager_of(type(module))
    if not is_dynamo_compiling():
        eager = _with_our_softmax(eager)
    return eager(module, *arguments, **named)


def _eager_of(owner: type) -> Callable:
    forward = inspect.unwrap(owner.forward)
    for namespace in (getattr(forward, "__globals__", {}), vars(sys.modules[owner.__module__])):
        if _EAGER in namespace:
            return namespace[_EAGER]
    raise ValueError(
        f"attn_implementation: expected {_EAGER} in the file of {owner.__qualname__}, which {NAME!r} runs, found none: "
        'use another implementation, such as "sdpa"'
    )


class _Namespace:
    """A module of torch with other values for some names."""

    def __init__(self, module: ModuleType, **others):
        vars(self).update(others, source=module)

    def __getattr__(self, name):
        return getattr(self.source, name)


def _softmax(input, dim=None, _stacklevel=3, dtype=None):
    """`torch.nn.functional.softmax`, from the kernel where one takes it."""
    ours = dim is not None and functional.softmax is _torch_softmax
    out = replacement(input, dim, dtype) if ours else None
    return functional.softmax(input, dim, _stacklevel, dtype) if out is None else out


_functional = _Namespace(functional, softmax=_softmax)
_NAMESPACES = {id(functional): _functional, id(torch.nn): _Namespace(torch.nn, functional=_functional)}


class _Copy(NamedTuple):
    """A copy of a function, and the values that the function's globals had."""

    function: FunctionType
    code: CodeType
    values: dict


_copies: MutableMapping[FunctionType, _Copy] = weakref.WeakKeyDictionary()


def _with_our_softmax(function: Callable) -> Callable:
    """A copy of the function for which softmax in `torch.nn.functional` is `_softmax`; the function itself if it is none."""
    if not isinstance(function, FunctionType):
        return function
    known = _copies.get(function)
    if known is None or not _is_current(known, function):
        if hasattr(function, "__wrapped__") or not owns_nothing(function):
            return function
        known = _copies[function] = _copied(function)
    return known.function


def _is_current(known: _Copy, function: FunctionType) -> bool:
    namespace = function.__globals__
    return known.code is function.__code__ and all(namespace.get(name) is value for name, value in known.values.items())


def _copied(function: FunctionType) -> _Copy:
    namespace, code = function.__globals__, function.__code__
    values = {name: namespace[name] for name in _names(code) if name in namespace}
    ours = {name: _NAMESPACES.get(id(value), value) for name, value in values.items()}
    ours["__builtins__"] = namespace["__builtins__"]
    copy = FunctionType(code, ours, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return _Copy(copy, code, values)


def _names(code: CodeType) -> Iterator[str]:
    """The names that the code and the functions in it may look up among the globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
