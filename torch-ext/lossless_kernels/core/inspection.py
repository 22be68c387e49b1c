"""What a forward may ask of its module, and which functions it calls: read from its bytecode.

A verdict is about a class's code, shown on a stand-in that was made without the class's constructor. So the forward must read
nothing but attributes that every instance has. The functions that it calls by name are part of the verdict, since
each of them can be replaced.
"""

import dis
import functools
import inspect
import weakref
from collections.abc import Mapping, MutableMapping
from types import FunctionType
from typing import Callable, NamedTuple, Optional

from torch import nn

from . import ROOT_PACKAGE
from .domain import NO_STATE

# What a forward may read beside its arguments without a stand-in showing it, and what a proof has its own way.
_UNSEEN_BY_A_STAND_IN = frozenset(
    "training getattr hasattr vars super __dict__ __class__ __getattr__ __dir__ _parameters _buffers _modules parameters "
    "named_parameters buffers named_buffers modules named_modules children named_children state_dict is_autocast_enabled "
    "get_autocast_dtype get_autocast_gpu_dtype is_grad_enabled is_inference_mode_enabled is_inference".split()
)


_MISSING = object()
# Of such types a default or a fixed argument owns nothing and never changes.
CONSTANTS = (type(None), bool, int, float, str)


def is_shown(function: Callable) -> bool:
    """Whether a stand-in for a module shows all that the function may ask of the module: attributes it must have.

    Such a function owns neither a tensor nor a class, so tables may keep it.
    """
    return _attributes_read(function) is not None


def owns_nothing(function: FunctionType) -> bool:
    """Whether closure and defaults hold constants and functions of that kind alone: tables may keep such a function."""
    if function.__module__.split(".")[0] == ROOT_PACKAGE.split(".")[0]:  # Its own package's formulas.
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
    """What `_find_attributes` finds; the same function is not looked into again."""
    if not isinstance(function, FunctionType):
        return None
    found = _read.get(function, _MISSING)
    if found is _MISSING:
        found = _read[function] = _find_attributes(function)
    return found


def _find_attributes(function: FunctionType) -> Optional[frozenset[str]]:
    """The attributes that the function asks of its first argument, a module; None if it may ask for more than attributes.

    It asks for more if it catches what is raised where there are none, or hands the module on: to `isinstance`, say, to another
    function, or to one that is written inside of this one.
    """
    if hasattr(function, "__wrapped__"):
        return None
    code = function.__code__
    if not owns_nothing(function) or not _UNSEEN_BY_A_STAND_IN.isdisjoint(code.co_names):
        return None
    if not code.co_argcount:  # `*arguments`, the module among them.
        return None
    module = code.co_varnames[0]
    if module in code.co_cellvars or getattr(code, "co_exceptiontable", b""):
        return None
    attributes = set()
    instructions = [*dis.get_instructions(code)]
    for instruction, following in zip(instructions, instructions[1:]):
        if instruction.opname.startswith("SETUP_"):  # How Python 3.10 begins what may catch.
            return None
        # From 3.13 on one instruction may load or store two.
        used = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if "FAST" in instruction.opname and module in used:
            loads_it_last = instruction.opname.endswith(_LOADS) and module not in used[:-1]
            if not loads_it_last or following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                return None
            attributes.add(following.argval)
    return frozenset(attributes)


class Helper(NamedTuple):
    """A function that a forward calls by name: a method of its class or, with `namespace`, a function of its Python module."""

    namespace: Optional[dict]
    name: str
    function: FunctionType


NO_HELPERS: tuple[Helper, ...] = ()


_helpers: MutableMapping[Callable, tuple[Helper, ...]] = weakref.WeakKeyDictionary()


def helpers_of(function: Callable) -> tuple[Helper, ...]:
    """The functions of its own Python module that a function calls by name now, and those that these call."""
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
    """Whether the helpers of a forward are still what it calls.

    Args:
        owner: the class of the forward.
        state: `__dict__` of the module: an attribute of its own comes before a method of its class.
    """
    for namespace, name, function in helpers:
        found = getattr(owner, name, None) if namespace is None else namespace.get(name)
        if found is not function or (namespace is None and name in state):
            return False
    return True


def _nothing() -> None: ...


class Code:
    """The forward of a class and what it calls: what a verdict on the class is about.

    It goes with the class: tables keep neither a class nor what owns one.

    Attributes:
        functions: the forward and its helpers. None where a stand-in of the class need not compute what its instances do:
            the forward asks for more than attributes every instance must have.
        helpers: the methods of the class, and the functions of its Python module, that the forward calls.
        memo: what is known of the class: for as long as it, its forward and its helpers are what they were.
    """

    __slots__ = ("_owner", "_forward", "_absent", "functions", "helpers", "memo")

    def __init__(self, owner: type, forgotten: Callable):
        self._owner = weakref.ref(owner, forgotten)
        try:
            self._forward = weakref.ref(owner.forward)
        except TypeError:  # What is no function: the class is looked at again every time.
            self._forward = _nothing
        self._absent: tuple[str, ...] = ()
        self.functions, self.helpers, self.memo = None, NO_HELPERS, {}
        self._look_at(owner)

    def _look_at(self, owner) -> None:
        # A class that has an answer for attributes its instances lack gives a stand-in another one.
        if any(
            getattr(owner, name, None) is not getattr(nn.Module, name, None)
            for name in ("__getattr__", "__getattribute__")
        ):
            return
        functions, helpers, absent = [owner.forward], [], []
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
        """Whether the class is the one that was looked at, with the same forward and helpers."""
        return (
            self._owner() is owner
            and self._forward() is owner.forward
            and (not self.helpers or are_current(self.helpers, owner))
        )

    def is_complete(self, owner: type) -> bool:
        """Whether the class still has no member in the place of what its forward takes from the module."""
        return not any(hasattr(owner, name) for name in self._absent)


# By the identity of the class, as long as it lives.
_codes: dict[int, Code] = {}


def code_of(owner: type) -> Code:
    """The code of `owner` as it is now.

    By functions and not by class, since FSDP2 makes a class of its own for every one it wraps, and somebody may give a class
    another forward.
    """
    code = _codes.get(id(owner))
    if code is None or not code.is_of(owner):
        code = _codes[id(owner)] = Code(owner, functools.partial(_forget, id(owner)))
    return code


def _forget(number: int, _: weakref.ref) -> None:
    _codes.pop(number, None)


def functions_of(owner: type, state: Mapping = NO_STATE) -> Optional[tuple[Callable, ...]]:
    """`Code.functions` of the class, for keys; None too if a module with this `__dict__` has a helper of its own."""
    code = code_of(owner)
    if not code.is_complete(owner):
        code = _codes[id(owner)] = Code(owner, functools.partial(_forget, id(owner)))
    if state and any(helper.namespace is None and helper.name in state for helper in code.helpers):
        return None
    return code.functions


def function_behind(forward: Callable) -> Callable:
    """The function that `kernels` made a module of, from the forward of that module; any other forward itself."""
    code, closure = getattr(forward, "__code__", None), getattr(forward, "__closure__", None)
    if not closure or code.co_freevars != ("func",) or forward.__module__ != "kernels.layer.layer":
        return forward
    return closure[0].cell_contents
