#!/usr/bin/env python3
"""Describe the public interface of a built kernel as data, and compare two of them.

    python scripts/interface.py VARIANT BACKENDS FILE       imports a variant and writes its interface to FILE

`build_kernel.py` runs this in a process of its own and puts FILE into every variant as interface.json. `publish.py` compares
it with the published one. The data hold names, parameters and plain values, but no annotations, addresses or members
inherited from torch. Their bytes are therefore the same on every machine, Python and torch.
"""

import enum
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

# Class attributes of a layer that `kernels` reads. A change from False to True breaks nothing.
_CAPABILITIES = ("can_torch_compile", "has_backward")
_DEPENDENCIES = ("python-depends", "kernel-depends")


# The interface of a build


def load(variant: Path) -> ModuleType:
    """Imports a variant under the name that `_ops.py` gives it, as `kernels` does."""
    name = (variant / "_ops.py").read_text(encoding="utf-8").split('"')[1]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    kernel = importlib.util.module_from_spec(spec)
    sys.modules[name] = kernel
    spec.loader.exec_module(kernel)
    return kernel


def describe(kernel: ModuleType, backends: list[str]) -> dict:
    """The public names of a kernel, and the entries of its mapping for `backends`."""
    if not hasattr(kernel, "__all__"):
        raise ValueError("__init__.py defines no __all__")
    missing = [str(name) for name in kernel.__all__ if not hasattr(kernel, str(name))]
    if missing:
        raise ValueError(f"__all__ names {', '.join(missing)}, which the package does not define")
    return {"names": _describe_module(kernel, kernel.__name__), "mapping": _describe_mapping(kernel, backends)}


def _describe_module(module: ModuleType, package: str) -> dict:
    names = getattr(module, "__all__", None)
    if names is None:
        names = [name for name, value in vars(module).items() if name[0] != "_" and _belongs(value, module, package)]
    return {name: _describe(getattr(module, name), package) for name in sorted(set(names))}


def _belongs(value, module: ModuleType, package: str) -> bool:
    """Whether `value` is public in a module without `__all__`: a function or class of its own, or a layer of the package."""
    origin = getattr(value, "__module__", None) or ""
    if inspect.isclass(value) and any(base.__module__ == "torch.nn.modules.module" for base in value.__mro__):
        return _is_part(origin, package)
    return callable(value) and origin == module.__name__


def _is_part(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _describe(value, package: str):
    if inspect.ismodule(value):
        return _describe_module(value, package) if _is_part(value.__name__, package) else value.__name__
    if inspect.isclass(value):
        return _describe_class(value, package)
    # Parameters of other packages' functions depend on their versions and are left out.
    foreign = inspect.isroutine(value) and not _is_part(value.__module__ or "", package)
    return _parameters(value) if callable(value) and not foreign else _plain(value)


def _describe_class(owner: type, package: str) -> dict:
    """Members that the package defines, in the class or in a base; "class" lists the bases of other packages."""
    members = {}
    for base in reversed(owner.__mro__):
        if _is_part(base.__module__, package):
            members.update((name, member) for name, member in vars(base).items() if name[0] != "_")
            members.update((name, vars(base)[name]) for name in ("__init__", "__call__") if name in vars(base))
    outside = [base for base in owner.__mro__[:-1] if not _is_part(base.__module__, package)]
    found = {"class": sorted(f"{base.__module__}.{base.__qualname__}" for base in outside), "__init__": "inherited"}
    for name, member in sorted(members.items()):
        if isinstance(member, property):
            found[name] = "property"
        elif isinstance(member, (staticmethod, classmethod)):
            found[name] = f"{type(member).__name__}{_parameters(member.__func__)}"
        else:
            found[name] = _describe(member, package)
    return found


def _parameters(function) -> str:
    """The parameters as Python prints them, without annotations."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    bare = [
        each.replace(
            annotation=each.empty, default=each.empty if each.default is each.empty else _Written(each.default)
        )
        for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


class _Written:
    """A default value with a repr that is the same on every machine; signatures print it."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return _plain(self.value)


def _plain(value) -> str:
    """A text of a value that is the same on every machine; for other types the name of the class."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return repr(value)
    if type(value) in (tuple, list):
        return f"{type(value).__name__}({', '.join(map(_plain, value))})"
    if type(value) in (set, frozenset):
        return f"{type(value).__name__}({', '.join(sorted(map(_plain, value)))})"
    if type(value) is dict:
        return f"dict({', '.join(f'{_plain(key)}: {_plain(each)}' for key, each in value.items())})"
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device", "layout", "memory_format"):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _describe_mapping(kernel: ModuleType, backends: list[str]) -> dict:
    """Level -> layer name -> device -> mode -> class, for every level of `kernel_mapping`."""
    if "kernel_mapping" not in kernel.__all__:
        return {}
    make = kernel.kernel_mapping
    return {
        level: {
            name: {
                device: {_mode_name(mode): repository.layer_name for mode, repository in modes.items()}
                for device, modes in devices.items()
            }
            for name, devices in make(level=level, devices=backends).items()
        }
        for level in sys.modules[make.__module__].LEVELS
    }


def _mode_name(mode) -> str:
    # The repr of a flag depends on the version of Python.
    return " | ".join(each.name for each in type(mode) if each.value and each in mode)


# Comparing two interfaces


def breaks(old: dict, new: dict) -> list[str]:
    """What users of the interface `old` lose with `new`, one phrase for each."""
    found = []
    for part in ("backends", "names", "mapping"):
        if not isinstance(old[part], dict):
            raise TypeError(f"{part}: expected an object, found {old[part]!r}")
        found += _lost(old[part], new[part], () if part == "names" else (part,))
    return found


def _lost(old, new, where: tuple) -> Iterator[str]:
    path = ".".join(where)
    if isinstance(old, dict) and isinstance(new, dict):
        for name, value in old.items():
            if name in new:
                yield from _lost(value, new[name], (*where, name))
            else:
                yield f"{'.'.join((*where, name))}: removed"
    elif isinstance(old, list) and isinstance(new, list):
        # A new dependency breaks an installation; in all other lists a missing item breaks a caller.
        needs = where[-1] in _DEPENDENCIES
        more, fewer = (new, old) if needs else (old, new)
        yield from (f"{path}: {each} is {'new' if needs else 'gone'}" for each in more if each not in fewer)
    elif old != new and not (where[-1] in _CAPABILITIES and old == "False"):
        was, now = (each if isinstance(each, str) else "something else" for each in (old, new))
        yield f"{path}: was {was}, is {now}"


def main() -> int:
    variant, backends, file = sys.argv[1:]
    try:
        interface = describe(load(Path(variant)), backends.split(","))
    except BaseException as error:  # The code of the kernel may raise anything.
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    Path(file).write_text(json.dumps(interface), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
