"""Eager attention of transformers' models with softmax from the kernels: `register_attention`."""

import dis
import functools
import inspect
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping
from types import CodeType, FunctionType, SimpleNamespace
from typing import NamedTuple, Optional

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from .core import proof
from .core.domain import is_autocast, runs_kernels
from .core.inspection import Helper, are_current, helpers_of, owns_nothing
from .ops.masked_softmax import eager_masked_softmax, softmax_of_scores
from .ops.softmax_callers import Namespace, calls_torch_softmax, with_our_softmax

NAME = "lossless_eager"
# What transformers' model files call the function that `attn_implementation="eager"` runs.
_EAGER = "eager_attention_forward"


def register_attention() -> str:
    """Registers the attention function "lossless_eager" with transformers: eager attention, softmax from the kernels.

    `model.set_attn_implementation("lossless_eager")` or `from_pretrained(..., attn_implementation="lossless_eager")` selects
    it. If the `eager_attention_forward` of the model's own file computes Llama's formula, scale, mask and softmax are one
    kernel, that of `kernel.masked_softmax`. The other files' functions run operation by operation, and take softmax alone
    from the kernels of `kernel.softmax`. Outputs, gradients and random numbers of dropout are eager's. Masks are those of
    "eager". The backward pass keeps the scores and a copy of the mask, where eager keeps the fp32 softmax.

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
    mask = arguments[3] if len(arguments) > 3 else named.get("attention_mask")
    if not is_dynamo_compiling() and _is_formula(eager, arguments, mask, named.get("scaling")):
        return _attention(_repeat_of(eager), functional.dropout, _softmax, module, *arguments, **named)
    return with_our_softmax(eager)(module, *arguments, **named)


def _softmax(scores, mask, scale):
    """The masked softmax, which keeps a copy of the mask: eager keeps none, and a program may write to it."""
    kept = torch.is_grad_enabled() and scores.requires_grad and isinstance(mask, torch.Tensor)
    return softmax_of_scores(scores, mask.clone() if kept else mask, scale)


def functions_called(model: nn.Module) -> Counter:
    """Each `eager_attention_forward` in whose place "lossless_eager" runs -> how many modules of the model call it."""
    calling = (
        type(module)
        for module in model.modules()
        if getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME
        and _EAGER in getattr(getattr(inspect.unwrap(type(module).forward), "__code__", None), "co_names", ())
    )
    return Counter(map(_eager_of, calling))


def _eager_of(owner: type) -> Callable:
    # A class's forward may call that of the class it is derived from.
    for each in owner.__mro__:
        forward = inspect.unwrap(vars(each).get("forward"))
        for namespace in (getattr(forward, "__globals__", {}), vars(sys.modules.get(each.__module__, object))):
            if _EAGER in namespace:
                return namespace[_EAGER]
    raise ValueError(
        f"attn_implementation: expected {_EAGER} in the file of {owner.__qualname__}, which {NAME!r} runs, found none: "
        'use another implementation, such as "sdpa"'
    )


def _attention(
    repeat_kv, drop, softmax, module, /, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula of Llama's `eager_attention_forward`: the output, and the weights.

    Args:
        repeat_kv: the file's function, None if its attention has as many heads of keys as of queries.
    """
    if repeat_kv is not None:
        key, value = (repeat_kv(states, module.num_key_value_groups) for states in (key, value))
    weights = softmax(torch.matmul(query, key.transpose(2, 3)), attention_mask, scaling)
    weights = drop(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


# Proof


# What the code of such a function names, what it may name, and the names of its arguments, which it must read.
_NAMES = frozenset("torch matmul transpose softmax float32 to dtype dropout training contiguous".split())
_MAY_NAME = {*_NAMES, "repeat_kv", "num_key_value_groups", "nn", "functional", "F", "size"}
_ARGUMENTS = "module", "query", "key", "value", "attention_mask", "scaling", "dropout"
_MODULES = {"torch": torch, "nn": nn, "functional": functional, "F": functional}


_OF_ATTRIBUTES = "LOAD_ATTR", "LOAD_METHOD"


class _Known(NamedTuple):
    """A function's code and globals when it was looked at; by device, whether it computes the formula."""

    code: CodeType
    helpers: tuple[Helper, ...]
    on: dict


_known: MutableMapping[FunctionType, _Known] = weakref.WeakKeyDictionary()


def _is_formula(eager, arguments, mask, scaling) -> bool:
    """Whether `_attention` may stand for this call of the file's function.

    A scaling that is None, states of another number of dimensions or of several dtypes, another dtype of the scores, which
    autocast makes, and a mask of another dtype or number of keys are left to the function, which may convert or cut them.
    """
    states = arguments[:3]
    if type(scaling) is not float or len(states) < 3 or not all(isinstance(each, torch.Tensor) for each in states):
        return False
    query, key, _ = states
    if any((each.dim(), each.dtype) != (4, query.dtype) for each in states):
        return False
    if isinstance(mask, torch.Tensor) and (mask.dtype != query.dtype or mask.shape[-1:] != key.shape[-2:-1]):
        return False
    device = query.device
    if not isinstance(eager, FunctionType) or not runs_kernels(device) or is_autocast(device):
        return False
    known = _known.get(eager)
    if known is None or known.code is not eager.__code__ or not are_current(known.helpers):
        known = _known[eager] = _Known(eager.__code__, helpers_of(eager), {})
    if not calls_torch_softmax() or not _has_torch(eager):
        return False
    if device not in known.on:
        subject = proof.Subject(eager, device, "any dtype")
        key = ("eager attention", eager, known.code, tuple(helper.function for helper in known.helpers), device)
        candidates = {"the formula": functools.partial(_comparisons, eager, device)}
        found = _looks_known(eager, known.helpers) and proof.match_formula(key, subject, candidates)
        if found is None and proof.verdict_on(key) is None:  # The proof could not run.
            return False
        known.on[device] = bool(found)
        if found:
            proof.record_dependency(eager, eager_masked_softmax)
    return known.on[device]


def _repeat_of(function) -> Optional[Callable]:
    """The function by which it repeats the heads of keys and values, None if it repeats none."""
    return function.__globals__.get("repeat_kv") if "repeat_kv" in function.__code__.co_names else None


def _has_torch(function) -> bool:
    """Whether the modules that the function names are torch's own."""
    named = _MODULES.keys() & set(function.__code__.co_names) & function.__globals__.keys()
    return all(function.__globals__[name] is _MODULES[name] for name in named)


def _looks_known(function, helpers) -> bool:
    code, names = function.__code__, frozenset(function.__code__.co_names)
    if not _NAMES <= names <= _MAY_NAME or code.co_varnames[: code.co_argcount] != _ARGUMENTS:
        return False
    if code.co_kwonlyargcount or code.co_flags & inspect.CO_VARARGS or not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    if hasattr(function, "__wrapped__") or function.__defaults__ not in ((0.0,), (None, 0.0)):
        return False
    repeats = "repeat_kv" in names
    if (
        len(helpers) != repeats
        or ("num_key_value_groups" in names) != repeats
        or any(isinstance(each, CodeType) for each in code.co_consts)
    ):
        return False
    read: set[str] = set()
    called = Counter(each.argval for each in dis.get_instructions(code) if each.opname in _OF_ATTRIBUTES)
    if any(called[name] != 1 for name in ("to", "contiguous", "softmax", "dropout")):
        return False
    for instruction in dis.get_instructions(code):
        # A mask or another argument that is cut may have the proof's size, and not that of a call.
        if "SUBSCR" in instruction.opname or "SLICE" in instruction.opname or instruction.argrepr == "[]":
            return False
        # Another number, or another size, may take another branch.
        if instruction.opname in ("COMPARE_OP", "CONTAINS_OP"):
            return False
        if "FAST" in instruction.opname and instruction.opname != "STORE_FAST":
            # From Python 3.13 on one instruction may load or store two variables.
            read.update(instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,))
    others = code.co_varnames[code.co_argcount]
    functions = function, *(helper.function for helper in helpers)
    return read.issuperset(_ARGUMENTS) and others not in read and all(owns_nothing(each) for each in functions)


def _drop(input, p=0.5, training=True, inplace=False):
    """A dropout's stand-in, without random numbers."""
    return input * (1.0 + p) if training else input


# Batch, heads, how many of them share keys, queries, keys, elements of a head, scaling, dropout.
_SIZES = (2, 4, 2, 5, 5, 8, 0.3, 0.25), (1, 3, 3, 1, 7, 80, 0.7, 0.0)


def _comparisons(function, device):
    """What the function and the formula return, with a stand-in for dropout: masked or not, with dropout or without, of two
    sizes."""
    of_functional = Namespace(functional, dropout=_drop)
    of_nn = Namespace(nn, functional=of_functional)
    others = {id(functional): of_functional, id(nn): of_nn, id(torch): Namespace(torch, nn=of_nn)}
    namespace = {name: others.get(id(value), value) for name, value in function.__globals__.items()}
    theirs = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)
    repeat_kv = _repeat_of(function)
    ours = functools.partial(_attention, repeat_kv, _drop, eager_masked_softmax)
    normal = functools.partial(proof.normal, proof.generator(device, 1))
    cases = itertools.product((torch.float32, torch.bfloat16), (False, True), (False, True), _SIZES)
    for dtype, masked, training, (batch, heads, groups, queries, keys, size, scaling, dropout) in cases:
        groups = 1 if repeat_kv is None else groups
        module = SimpleNamespace(num_key_value_groups=groups, training=training)
        query = normal(batch, heads, queries, size).to(dtype)
        leaves = [query, *(normal(batch, heads // groups, keys, size).to(dtype) for _ in range(2))]
        mask = normal(batch, 1, queries, keys).to(dtype) if masked else None
        dy = normal(batch, queries, heads, size).to(dtype)
        results = []
        for attention in (ours, theirs):
            inputs = [leaf.clone().requires_grad_() for leaf in leaves]
            with torch.enable_grad():
                out, weights = attention(module, *inputs, mask, scaling=scaling, dropout=dropout, another=module)
                results.append((out.detach(), weights.detach(), *torch.autograd.grad(out, inputs, dy)))
        names = "the output", "the weights", "the query's gradient", "the keys' gradient", "the values' gradient"
        yield from zip(names, *results)
