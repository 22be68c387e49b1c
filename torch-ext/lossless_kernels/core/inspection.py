"""Reads from a forward's bytecode which attributes of its module it depends on and which functions it calls.

A proof runs a class's forward on a stand-in, made without the class's constructor. Its verdict holds for all instances
if the forward depends only on attributes that every instance has. The functions that the forward calls by name are part
of the verdict, since each can be replaced.
"""

import dis
import inspect
import weakref
from collections.abc import Mapping, MutableMapping
from types import CellType, FunctionType
from typing import Callable, NamedTuple, Optional

import torch
from torch import nn

from . import ROOT_PACKAGE
from .domain import NO_STATE

# Names by which a forward depends on more than a stand-in's attributes, or on modes that a proof sets itself.
_HIDDEN_NAMES = frozenset(
    "training getattr hasattr vars super __dict__ __class__ __getattr__ __dir__ _parameters _buffers _modules parameters "
    "named_parameters buffers named_buffers modules named_modules children named_children state_dict is_autocast_enabled "
    "get_autocast_dtype get_autocast_gpu_dtype is_grad_enabled is_inference_mode_enabled is_inference".split()
)
_MISSING = object()
# Types of defaults and bound arguments that own nothing and never change.
CONSTANTS = (type(None), bool, int, float, str)
# The name of the cache among the arguments of decoder layers and attentions: transformers up to 5.23, and from 5.24 on.
PAST_KEY_VALUES, CACHE = "past_key_values", "cache"


def reads_only_attributes(function: Callable) -> bool:
    """Whether the function depends only on its module's attributes. Tables may keep it: it owns no tensor or class."""
    return _attributes_read(function) is not None


def owns_nothing(function: FunctionType) -> bool:
    """Whether closure and defaults hold only constants and functions of this kind: tables may keep such a function."""
    if function.__module__.split(".")[0] == ROOT_PACKAGE.split(".")[0]:
        return True
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return all(
        type(each) in CONSTANTS or (isinstance(each, FunctionType) and each is not function and owns_nothing(each))
        for each in held
    )


_LOADS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK")
_read: MutableMapping[Callable, Optional[frozenset[str]]] = weakref.WeakKeyDictionary()


def _attributes_read(function: Callable) -> Optional[frozenset[str]]:
    """`_find_attributes(function)`, cached."""
    if not isinstance(function, FunctionType):
        return None
    found = _read.get(function, _MISSING)
    if found is _MISSING:
        found = _read[function] = _find_attributes(function)
    return found


def _find_attributes(function: FunctionType) -> Optional[frozenset[str]]:
    """The attributes that the function reads of its first argument, a module; None if it may depend on more.

    It does if it catches exceptions, which a missing attribute raises, or passes the module on: to `isinstance`, to
    another function, or to a nested function.
    """
    if hasattr(function, "__wrapped__"):
        return None
    code = function.__code__
    if not owns_nothing(function) or not _HIDDEN_NAMES.isdisjoint(code.co_names):
        return None
    if not code.co_argcount:  # `*arguments` hold the module.
        return None
    module = code.co_varnames[0]
    if module in code.co_cellvars or getattr(code, "co_exceptiontable", b""):
        return None
    attributes = set()
    instructions = [*dis.get_instructions(code)]
    for instruction, following in zip(instructions, instructions[1:]):
        if instruction.opname.startswith("SETUP_"):  # Python 3.10's `try` and `with`.
            return None
        # From Python 3.13 on one instruction may load or store two variables.
        used = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if "FAST" in instruction.opname and module in used:
            loads_it_last = instruction.opname.endswith(_LOADS) and module not in used[:-1]
            if not loads_it_last or following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                return None
            attributes.add(following.argval)
    return frozenset(attributes)


class Helper(NamedTuple):
    """A function that a forward calls by name: a method of its class, or a global in `namespace`."""

    namespace: Optional[dict]
    name: str
    function: FunctionType


_helpers: MutableMapping[Callable, tuple[Helper, ...]] = weakref.WeakKeyDictionary()


def helpers_of(function: Callable) -> tuple[Helper, ...]:
    """The functions of its Python module that a function calls by name at present, directly or through one another."""
    helpers = _helpers.get(function)
    if helpers is None or not are_current(helpers):
        helpers = _helpers[function] = _find_helpers(function)
    return helpers


def _find_helpers(function) -> tuple[Helper, ...]:
    found, seen = [], [function]
    for each in seen:
        if not isinstance(each, FunctionType) or each.__globals__ is not function.__globals__:
            continue
        names = {i.argval for i in dis.get_instructions(each.__code__) if i.opname == "LOAD_GLOBAL"}
        for name in sorted(names):
            called = each.__globals__.get(name)
            if isinstance(called, FunctionType) and called not in seen:
                seen.append(called)
                found.append(Helper(each.__globals__, name, called))
    return tuple(found)


def are_current(helpers: tuple[Helper, ...], owner: Optional[type] = None, state: Mapping = NO_STATE) -> bool:
    """Whether `owner`'s forward still calls these helpers. `state` is the module's `__dict__`, which hides methods."""
    for namespace, name, function in helpers:
        found = getattr(owner, name, None) if namespace is None else namespace.get(name)
        if found is not function or (namespace is None and name in state):
            return False
    return True


class Code:
    """The forward of a class and the functions it calls: the subject of a verdict on the class.

    Tables do not keep the class alive.

    Attributes:
        functions: the forward and its helpers; None if the forward depends on more than its module's attributes.
        helpers: the methods of the class, and the functions of its Python module, that the forward calls.
        memo: results about the class, valid while its forward and helpers stay the same.
    """

    __slots__ = ("_owner", "_forward", "_absent", "functions", "helpers", "memo")

    def __init__(self, owner: type):
        number = id(owner)
        self._owner = weakref.ref(owner, lambda _: _codes.pop(number, None))
        try:
            self._forward = weakref.ref(owner.forward)
        except TypeError:  # It is no function: every call inspects the class anew.
            self._forward = lambda: None
        self._absent: tuple[str, ...] = ()
        self.helpers: tuple[Helper, ...] = ()
        self.functions, self.memo = None, {}
        self._inspect(owner)

    def _inspect(self, owner) -> None:
        # A stand-in may get other values from these methods than an instance.
        if any(
            getattr(owner, name, None) is not getattr(nn.Module, name, None)
            for name in ("__getattr__", "__getattribute__")
        ):
            return
        functions, helpers, absent = [without_wrappers(owner.forward)], [], []
        for function in functions:
            attributes = _attributes_read(function)
            if attributes is None:
                return
            for name in sorted(attributes):
                member = inspect.getattr_static(owner, name, _MISSING)
                if member is _MISSING:
                    absent.append(name)
                elif member is not inspect.getattr_static(nn.Module, name, _MISSING):
                    if not isinstance(member, FunctionType):
                        return
                    if member not in functions:
                        functions.append(member)
                        helpers.append(Helper(None, name, member))
        for function in tuple(functions):
            helpers += [helper for helper in helpers_of(function) if helper not in helpers]
        self.functions = tuple(dict.fromkeys((*functions, *(helper.function for helper in helpers))))
        self.helpers, self._absent = tuple(helpers), tuple(absent)

    def is_of(self, owner: type) -> bool:
        """Whether `owner` is the inspected class, with the same forward and helpers."""
        return (
            self._owner() is owner
            and self._forward() is owner.forward
            and (not self.helpers or are_current(self.helpers, owner))
        )

    def is_complete(self, owner: type) -> bool:
        """Whether the class still has no member with the name of an instance attribute that its forward reads."""
        return not any(hasattr(owner, name) for name in self._absent)


# By the identity of the class, while it lives.
_codes: dict[int, Code] = {}


def code_of(owner: type) -> Code:
    """The present code of `owner`, whose forward can be replaced at any time."""
    code = _codes.get(id(owner))
    return code if code is not None and code.is_of(owner) else _inspected(owner)


def _inspected(owner) -> Code:
    code = _codes[id(owner)] = Code(owner)
    return code


def functions_of(owner: type, state: Mapping = NO_STATE) -> Optional[tuple[Callable, ...]]:
    """`Code.functions` of the class; None if a module with this `__dict__` has its own attribute in a helper's place.

    Verdicts have functions as keys, not the class: FSDP2 makes a new class for each class that it wraps.
    """
    code = code_of(owner)
    if not code.is_complete(owner):
        code = _inspected(owner)
    if state and any(helper.namespace is None and helper.name in state for helper in code.helpers):
        return None
    return code.functions


@torch.compiler.assume_constant_result
def is_checkpoint_wrapper(forward: Callable) -> bool:
    """Whether this is the wrapper by which transformers' `GradientCheckpointingLayer` checkpoints a forward, from 5.23 on."""
    code = getattr(forward, "__code__", None)
    named = code is not None and code.co_freevars == ("forward", "forward_with_checkpointing")
    return named and forward.__globals__["__name__"] == "transformers.modeling_layers"


def _renames_cache(forward: Callable) -> bool:
    """Whether this is the wrapper by which transformers, from 5.24 on, gives `PAST_KEY_VALUES` its new name, `CACHE`."""
    code = getattr(forward, "__code__", None)
    if (
        code is None
        or code.co_name != "wrapped_func"
        or forward.__globals__["__name__"] != "transformers.utils.deprecation"
    ):
        return False
    return [_in_closure(forward, name) for name in ("old_name", "new_name")] == [PAST_KEY_VALUES, CACHE]


def _in_closure(function, name: str):
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def without_wrappers(forward: Callable) -> Callable:
    """The forward inside transformers' wrappers that a call without gradient checkpointing and with today's names of
    arguments passes through unchanged; any other forward itself."""
    while True:
        if is_checkpoint_wrapper(forward):
            forward = _in_closure(forward, "forward")
        elif _renames_cache(forward):
            forward = _in_closure(forward, "func")
        else:
            return forward


@torch.compiler.assume_constant_result
def name_of_cache(owner: type) -> str:
    """The name that the cache has among the arguments of the class's forward."""
    memo = code_of(owner).memo
    name = memo.get(CACHE)
    if name is None:
        code = getattr(without_wrappers(owner.forward), "__code__", None)
        taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code is not None else ()
        name = memo[CACHE] = CACHE if CACHE in taken else PAST_KEY_VALUES
    return name


def checkpoint_wrapper(wrapper: FunctionType, forward: Callable) -> FunctionType:
    """The same wrapper around another forward."""
    closure = CellType(forward), wrapper.__closure__[1]
    return FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, closure)


def function_behind(forward: Callable) -> Callable:
    """The function that `kernels` wrapped in a module, given that module's forward; any other forward itself."""
    code, closure = getattr(forward, "__code__", None), getattr(forward, "__closure__", None)
    if not closure or code.co_freevars != ("func",) or forward.__module__ != "kernels.layer.layer":
        return forward
    return closure[0].cell_contents
