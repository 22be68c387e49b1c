"""Every private name of torch that this package uses, its purpose, and its replacement where it is missing.

Without a required name the kernels are off: one warning, and the original layers run. An optional name has a slower
replacement, and one warning says which names are missing. An existing name may behave differently in another torch:
`guards_tell` tests guards, not versions.
"""

import functools
import itertools
import os
import sys
import weakref
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple, Optional

import torch

from . import warn


class Internal(NamedTuple):
    """A private name of torch.

    Args:
        path: below `torch`.
        use: its purpose.
        optional: kernels run without it.
        of_gpus: a torch built for CPUs may lack it.
    """

    path: str
    use: str
    optional: bool = False
    of_gpus: bool = False


# Attributes of every module and tensor. Callers write them where they are read: another name would take longer.
ATTRIBUTES = {
    "parameters": Internal("nn.Module()._parameters", "weights, without `__getattr__`"),
    "buffers": Internal("nn.Module()._buffers", "frequencies, without `__getattr__`"),
    "modules": Internal("nn.Module()._modules", "children, without `__getattr__`"),
    "buffers_not_saved": Internal("nn.Module()._non_persistent_buffers_set", "a warmup's stand-in"),
    "hooks": Internal("nn.Module()._forward_hooks", "whether a call is more than its forward"),
    "pre_hooks": Internal("nn.Module()._forward_pre_hooks", "whether a call is more than its forward"),
    "backward_hooks": Internal("nn.Module()._backward_hooks", "whether a call is more than its forward"),
    "backward_pre_hooks": Internal("nn.Module()._backward_pre_hooks", "whether a call is more than its forward"),
    "compiled_call": Internal("nn.Module._compiled_call_impl", "whether a module is compiled"),
    "is_zero": Internal("Tensor._is_zerotensor", "whether a tensor has no memory"),
    "version": Internal("Tensor._version", "whether a product's inputs have changed"),
}
# Names of Inductor, looked up when it first lowers an operator: its import takes seconds.
INDUCTOR = {
    "lowerings": Internal("_inductor.lowering.lowerings", "the code for an operator"),
    "make_fallback": Internal("_inductor.lowering.make_fallback", "the code for an operator"),
    "V": Internal("_inductor.virtualized.V", "the graph for which code is generated"),
    "FallbackKernel": Internal("_inductor.ir.FallbackKernel", "the code for an operator"),
    "ReinterpretView": Internal("_inductor.ir.ReinterpretView", "the arguments of an operator"),
    "convert_shape_to_inductor": Internal("_inductor.ir.convert_shape_to_inductor", "the outputs of an operator"),
    "pass_patterns": Internal("_inductor.fx_passes.post_grad.pass_patterns", "one operator for a sum and a norm"),
}
# Names of TorchDynamo, looked up while it traces: its import takes a second.
DYNAMO = {
    "TracingContext": Internal("_guards.TracingContext", "the guards of what is traced"),
    "copy": Internal("_guards.GuardsContext.copy_graphstate", "guards on names of this package"),
    "restore": Internal("_guards.GuardsContext.restore_graphstate", "guards on names of this package"),
    "config": Internal("_dynamo.config", "whether torch has guards on hooks"),
}
_HOOKS = tuple(f"._{kind}_hooks" for kind in ("forward", "forward_pre", "backward", "backward_pre"))
# torch's own guards on empty dictionaries of hooks, for which it generates no check.
_NO_CODE = "EMPTY_NN_MODULE_HOOKS_DICT"
_ABSENT = object()
# What `_private` was asked for.
_asked: list[Internal] = []


def _look_up(path: str) -> Any:
    found = torch
    for part in path.split("."):
        found = getattr(found, part.removesuffix("()"), _ABSENT)
        found = found() if part.endswith("()") and found is not _ABSENT else found
    return found


def _private(path: str, use: str, without: Any = None, **more) -> Any:
    """A private name of torch, or `without` in its place; with that of a required name eager runs. Others: `Internal`."""
    _asked.append(Internal(path, use, **more))
    found = _look_up(path)
    return without if found is _ABSENT else found


def _watched(*_) -> bool:
    return True


dispatch_modes = _private("_C._len_torch_dispatch_stack", "how many dispatch modes watch operations", _watched)
tracing_state = _private("_C._get_tracing_state", "whether torch.jit.trace is active", _watched)
functorch_level = _private("_C._functorch.peek_interpreter_stack", "whether a transform is active", _watched)
legacy_batched = _private("_C._functorch.is_legacy_batchedtensor", "grad(is_grads_batched=True)", _watched)
functorch_wrapped = _private("_C._functorch.is_functorch_wrapped_tensor", "a transform's tensors", _watched)
saved_tensor_hooks = _private("_C._autograd._top_saved_tensors_default_hooks", "checkpoints", lambda _: None)
saved_tensor_hooks_enabled = _private("_C._autograd._saved_tensors_hooks_is_enabled", "proofs", _watched)
graph_task = _private("_C._current_graph_task_id", "whether a backward pass is active", lambda: -1)
keeps_graph = _private(
    "_C._autograd._get_current_graph_task_keep_graph", "a gradient in the logits' memory", _watched, optional=True
)
no_modes = _private("utils._python_dispatch._disable_current_modes", "proofs and shapes without modes")
# Callers read the level as an attribute: it changes.
forward_ad = SimpleNamespace(_current_level=0)
if isinstance(_private("autograd.forward_ad._current_level", "whether forward-mode AD is active"), int):
    forward_ad = torch.autograd.forward_ad
# `__call__` of modules, unless another tool replaced it to see the calls.
MODULE_CALL = _private("nn.Module._wrapped_call_impl", "whether `__call__` of modules is torch's", object())
function_modes = _private("_C._len_torch_function_stack", "a decoder layer's replay", _watched, optional=True)
any_autocast = _private("_C._is_any_autocast_enabled", "a decoder layer's replay", _watched, optional=True)
# It returns a new tensor, which aliases nothing. Without it no decoder layer is replayed.
linear = _private("_C._nn.linear", "a decoder layer's replay", optional=True)
fused_rms_norm = _private("ops.aten._fused_rms_norm", "F.rms_norm with its statistics")
fused_rms_norm_backward = _private("ops.aten._fused_rms_norm_backward", "the gradients of F.rms_norm")
softmax_gradient = _private("ops.aten._softmax_backward_data", "the gradient of softmax")
# torch changes these dictionaries in place.
global_hooks = _private("nn.modules.module._global_forward_hooks", "hooks on all modules", {})
global_pre_hooks = _private("nn.modules.module._global_forward_pre_hooks", "hooks on all modules", {})
global_backward_hooks = _private("nn.modules.module._global_backward_hooks", "hooks on all modules", {})
global_backward_pre_hooks = _private("nn.modules.module._global_backward_pre_hooks", "hooks on all modules", {})
_TensorGuards = _private("_C._dynamo.guards.TensorGuards", "recognising a call in 0.1 us", optional=True)
_key_excluded = _private("_C._dispatch_tls_is_dispatch_key_excluded", "recognising a call in 0.1 us", optional=True)
_negative_key = _private("_C.DispatchKey.Negative", "recognising a call in 0.1 us", optional=True)
_zero_key = _private("_C.DispatchKey.ZeroTensor", "recognising a call in 0.1 us", optional=True)
_HAS_GUARDS = None not in (_TensorGuards, _key_excluded, _negative_key, _zero_key)
# TorchInductor's allocator: on the current GPU, without the dispatcher, in half the time of `empty_like`.
empty_strided_cuda = _private("_C._dynamo.guards._empty_strided_cuda", "faster allocation", optional=True, of_gpus=True)
if torch.version.hip is not None:
    empty_strided_cuda = None
current_device = _private(
    "_C._cuda_getDevice", "launches on one of several GPUs", torch.cuda.current_device, optional=True, of_gpus=True
)
current_stream = _private(
    "_C._cuda_getCurrentRawStream", "launches without Triton's own call", optional=True, of_gpus=True
)
_fp32_precision = _private("_C._get_fp32_precision_getter", "whether TF32 is allowed", optional=True)
_dispatch_dump = _private("_C._dispatch_dump", "ATen operators that other code has replaced", optional=True)
_Mode = _private("utils._python_dispatch.TorchDispatchMode", "the operators of a call", optional=True)
# Without both, gradients along several paths are computed before autograd adds them.
wrapper_tensor = _private("Tensor._make_wrapper_subclass", "gradients that their addition computes", optional=True)
torch_function_disabled = _private(
    "_C._disabled_torch_function_impl", "gradients that their addition computes", optional=True
)
_function_apply = _private("_C._FunctionBase.apply", "calls of autograd functions, 1 us faster", optional=True)

_OF_GPUS = torch.version.cuda is not None or torch.version.hip is not None
_GONE = [
    each
    for each in (*_asked, *ATTRIBUTES.values())
    if (_OF_GPUS or not each.of_gpus) and _look_up(each.path) is _ABSENT
]
# Required and optional names that this torch does not have.
MISSING = [f"torch.{each.path}" for each in _GONE if not each.optional]
SLOWER = [f"torch.{each.path} ({each.use})" for each in _GONE if each.optional]


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether the module is compiled, by `torch.compile(module)` or `module.compile()`."""
    wraps = type(module).__module__.startswith("torch._dynamo") and "_orig_mod" in module._modules
    return wraps or getattr(module, "_compiled_call_impl", None) is not None


def class_before_script(module: torch.nn.Module) -> type:
    """The class that a scripted module had before."""
    return module._concrete_type.py_class


def apply_of(function: type):
    """`function.apply` of an autograd function, for tensors known to be plain.

    It skips torch's Python code, which checks for functorch's transforms and unwraps their tensors: a third of an empty
    function's time.
    """
    return function.apply if _function_apply is None else super(torch.autograd.Function, function).apply


def matmul_precision():
    """The setting that allows a product of fp32 matrices on CUDA to round its factors first."""
    if _fp32_precision is None:
        return torch.backends.cuda.matmul.allow_tf32
    return _fp32_precision("cuda", "matmul")


# torch 2.14 replaces sums along contiguous rows on every GPU for which it finds CuTeDSL, and calls ATen's unless this is set.
# Later versions replace them only if it is. Means, the row statistic of norms, are ATen's in all of them.
_OTHER_SUMS = "PYTORCH_SUM_INNER_TREE"


def writes(target: Any) -> bool:
    """Whether what a node of a graph calls writes to an argument."""
    return getattr(getattr(target, "_schema", None), "is_mutable", False)


def other_arithmetic(device: torch.device, call: Callable[[], Any]) -> list[str]:
    """The operators in `call` that other code has replaced on this device, and that code. torch itself does so from 2.13
    on, in `torch/_native`."""
    if _dispatch_dump is None or _Mode is None:
        return []
    names, found = set(), []

    class Operators(_Mode):
        def __torch_dispatch__(self, operator, types, arguments=(), named=None):
            name, overload = operator._schema.name, operator._schema.overload_name
            names.add(f"{name}.{overload}" if overload else name)
            return operator(*arguments, **(named or {}))

    try:
        with Operators():
            call()
    except Exception:  # The call fails by itself or under a mode.
        pass
    sums_are_atens = os.environ.get(_OTHER_SUMS, "") in ("", "0")
    for name in sorted(names):
        for line in _dispatch_dump(name).splitlines():
            key, _, place = line.partition(": registered at ")
            unused = sums_are_atens and name.startswith("aten::sum.") and "/_native/" in place
            if key == device.type.upper() and "/ATen/" not in place and not unused:
                found.append(f"{name} by {place.split(' :: ')[0]}")
    return found


def inductor_is_loaded() -> bool:
    return "torch._inductor.fx_passes.post_grad" in sys.modules


@functools.cache
def inductor() -> Optional[SimpleNamespace]:
    """The names in `INDUCTOR`, once Inductor is loaded. None if one is missing; one warning then says so."""
    return _names_of(
        INDUCTOR, "Inductor's code calls our operators through torch's dispatcher, which takes 10 us more for each"
    )


@functools.cache
def _dynamo() -> Optional[SimpleNamespace]:
    return _names_of(DYNAMO, "compiled code checks names of this package at every call, which takes some 5 us more")


def _names_of(table: dict[str, Internal], otherwise: str) -> Optional[SimpleNamespace]:
    found = SimpleNamespace(**{name: _look_up(each.path) for name, each in table.items()})
    missing = [f"torch.{each.path}" for name, each in table.items() if getattr(found, name) is _ABSENT]
    if missing:
        warn(f"torch {torch.__version__} has no {', '.join(missing)}: results are the same, but {otherwise}")
    return None if missing else found


class _Seen:
    """How many guards of what is traced were looked at, and those of them that may go."""

    def __init__(self):
        self.count = 0
        self.dropped: list = []


_seen: MutableMapping[Any, _Seen] = weakref.WeakKeyDictionary()


def drop_guards_on(package: str) -> None:
    """Removes from what TorchDynamo traces the guards on names in this package's Python modules, which never change.

    Also those on hooks of modules, if `torch._dynamo.config.skip_nnmodule_hook_guards` is set, as it is by default: then
    torch does not check hooks either. A removal copies all guards. It waits until more than one in a hundred may go, so
    that fewer are left.

    TorchDynamo reads a Python module under a name of its own: `__import_` and the module's, with `_dot_` in place of dots.
    """
    found = _dynamo()
    tracing = found and found.TracingContext.try_get()
    if tracing is None:
        return
    package = f"G['__import_{package.replace('.', '_dot_')}"
    ours, hooks = (f"{package}_dot_", f"{package}'"), _HOOKS if found.config.skip_nnmodule_hook_guards else ()
    context = tracing.guards_context
    guards, seen = context.dynamo_guards, _seen.setdefault(context, _Seen())
    for guard in itertools.islice(guards, seen.count, None):
        if guard.name.startswith(ours) or (guard.name.endswith(hooks) and guard.create_fn_name() != _NO_CODE):
            seen.dropped.append(guard)
    seen.count = len(guards)
    if 100 * len(seen.dropped) > len(guards):
        state = found.copy(context)
        state.dynamo_guards.difference_update(seen.dropped)
        seen.count, seen.dropped = len(state.dynamo_guards), []
        found.restore(context, state)


def tensor_guard(*tensors: torch.Tensor):
    """TorchDynamo's guard of tensors. It compares type, dispatch keys, dtype, device, sizes, strides and requires_grad
    in 0.1 us; Python takes 1 us.

    None if this torch has none that distinguishes all of these. None also where PyTorch hides dispatch keys from guards, as it
    does while it runs the operators of a model that is compiled with aot_eager.
    """
    return _guard(*tensors) if _HAS_GUARDS and _sees_all_keys() and guards_tell() else None


def _sees_all_keys() -> bool:
    return not (_key_excluded(_negative_key) or _key_excluded(_zero_key) or functorch_level() is not None)


def _guard(*tensors):
    return _TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check


@functools.cache
def guards_tell() -> bool:
    """Whether TorchDynamo's guards distinguish tensors that differ in one property each. If not, one warning says why."""
    if not _HAS_GUARDS or no_modes is None:  # The warning about missing names says so.
        return False
    with no_modes():
        reason = _what_guards_miss()
    if reason:
        warn(
            f"the tensor guards of torch {torch.__version__} are not used ({reason}): results are the "
            "same, but recognising an earlier call takes about 1 us more"
        )
    return not reason


def _what_guards_miss() -> str:
    """Why guards cannot replace a comparison in Python; empty if they can."""
    x = torch.zeros(2, 3, dtype=torch.float32, device="cpu")
    others = {
        "sizes": x.t().contiguous(),
        "dtypes": x.half(),
        "strides": x.t().contiguous().t(),
        "requires_grad": x.clone().requires_grad_(),
        "classes": torch.nn.Parameter(x.clone(), requires_grad=False),
        "negative views": torch._neg_view(x.clone()),
        "zero tensors": torch._efficientzerotensor((2, 3), dtype=torch.float32, device="cpu"),
        "devices": x.to("meta"),
    }
    try:
        with torch.no_grad():
            same = _guard(x, x)
            if not same(x, torch.ones_like(x)):
                return "they do not recognise an equal layout"
            alike = [name for name, other in others.items() if same(x, other) or same(other, x)]
    except Exception as error:  # Another interface may raise anything. Calls are then looked up by their key.
        return f"{type(error).__name__}: {error}"
    return f"they do not distinguish {', '.join(alike)}" if alike else ""


if MISSING:
    warn(f"torch {torch.__version__} has no {', '.join(MISSING)}: all layers keep their original forward")
elif SLOWER:
    warn(f"torch {torch.__version__} has no {', '.join(SLOWER)}: results are the same, by slower ways")
