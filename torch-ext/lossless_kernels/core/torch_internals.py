"""Every private name of torch that this package uses, its purpose, and its replacement where it is missing.

Without a required name the kernels are off: one warning, and the original layers run. An optional name has a slower
replacement, and one warning says which names are missing. An existing name may behave differently in another torch:
`guards_tell` tests guards, not versions.
"""

import functools
import os
import sys
import warnings
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple, Optional

import torch


class Internal(NamedTuple):
    """A private name of torch.

    Args:
        path: below `torch`.
        use: its purpose.
        without: its replacement. With that of a required name, eager runs.
        optional: kernels run without it.
        of_gpus: a torch built for CPUs may lack it.
    """

    path: str
    use: str
    without: Any = None
    optional: bool = False
    of_gpus: bool = False


def _watched(*_) -> bool:
    return True


INTERNALS = {
    "dispatch_modes": Internal("_C._len_torch_dispatch_stack", "how many dispatch modes watch operations", _watched),
    "tracing_state": Internal("_C._get_tracing_state", "whether torch.jit.trace is active", _watched),
    "functorch_level": Internal("_C._functorch.peek_interpreter_stack", "whether a transform is active", _watched),
    "legacy_batched": Internal("_C._functorch.is_legacy_batchedtensor", "grad(is_grads_batched=True)", _watched),
    "functorch_wrapped": Internal("_C._functorch.is_functorch_wrapped_tensor", "a transform's tensors", _watched),
    "saved_tensor_hooks": Internal("_C._autograd._top_saved_tensors_default_hooks", "checkpoints", lambda _: None),
    "saved_tensor_hooks_enabled": Internal("_C._autograd._saved_tensors_hooks_is_enabled", "proofs", _watched),
    "graph_task": Internal("_C._current_graph_task_id", "whether a backward pass is active", lambda: -1),
    "keeps_graph": Internal(
        "_C._autograd._get_current_graph_task_keep_graph", "a gradient in the logits' memory", _watched, True
    ),
    "no_modes": Internal("utils._python_dispatch._disable_current_modes", "proofs and shapes without modes"),
    "forward_level": Internal("autograd.forward_ad._current_level", "whether forward-mode AD is active", 0),
    "module_call": Internal("nn.Module._wrapped_call_impl", "whether `__call__` of modules is torch's"),
    "function_modes": Internal("_C._len_torch_function_stack", "a decoder layer's replay", _watched, True),
    "any_autocast": Internal("_C._is_any_autocast_enabled", "a decoder layer's replay", _watched, True),
    "linear": Internal("_C._nn.linear", "a decoder layer's replay", None, True),
    "fused_rms_norm": Internal("ops.aten._fused_rms_norm", "F.rms_norm with its statistics"),
    "fused_rms_norm_backward": Internal("ops.aten._fused_rms_norm_backward", "the gradients of F.rms_norm"),
    "softmax_gradient": Internal("ops.aten._softmax_backward_data", "the gradient of softmax"),
    "global_hooks": Internal("nn.modules.module._global_forward_hooks", "hooks on all modules", {}),
    "global_pre_hooks": Internal("nn.modules.module._global_forward_pre_hooks", "hooks on all modules", {}),
    "global_backward_hooks": Internal("nn.modules.module._global_backward_hooks", "hooks on all modules", {}),
    "global_backward_pre_hooks": Internal("nn.modules.module._global_backward_pre_hooks", "hooks on all modules", {}),
    "TensorGuards": Internal("_C._dynamo.guards.TensorGuards", "recognising a call in 0.1 us", None, True),
    "key_excluded": Internal("_C._dispatch_tls_is_dispatch_key_excluded", "recognising a call in 0.1 us", None, True),
    "negative_key": Internal("_C.DispatchKey.Negative", "recognising a call in 0.1 us", None, True),
    "zero_key": Internal("_C.DispatchKey.ZeroTensor", "recognising a call in 0.1 us", None, True),
    "empty_strided_cuda": Internal("_C._dynamo.guards._empty_strided_cuda", "faster allocation", None, True, True),
    "current_device": Internal("_C._cuda_getDevice", "launches on one of several GPUs", None, True, True),
    "current_stream": Internal("_C._cuda_getCurrentRawStream", "launches without Triton's own call", None, True, True),
    "fp32_precision": Internal("_C._get_fp32_precision_getter", "whether TF32 is allowed", None, True),
    "dispatch_dump": Internal("_C._dispatch_dump", "ATen operators that other code has replaced", None, True),
    "TorchDispatchMode": Internal("utils._python_dispatch.TorchDispatchMode", "the operators of a call", None, True),
    "function_apply": Internal("_C._FunctionBase.apply", "calls of autograd functions, 1 us faster", None, True),
}
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
    "lowerings": Internal("_inductor.lowering.lowerings", "the code for an operator", None, True),
    "make_fallback": Internal("_inductor.lowering.make_fallback", "the code for an operator", None, True),
    "V": Internal("_inductor.virtualized.V", "the graph for which code is generated", None, True),
    "FallbackKernel": Internal("_inductor.ir.FallbackKernel", "the code for an operator", None, True),
}
_ABSENT = object()


def _look_up(path: str) -> Any:
    found = torch
    for part in path.split("."):
        found = getattr(found, part.removesuffix("()"), _ABSENT)
        found = found() if part.endswith("()") and found is not _ABSENT else found
    return found


def _find(name: str) -> Any:
    found = _look_up(INTERNALS[name].path)
    return INTERNALS[name].without if found is _ABSENT else found


_OF_GPUS = torch.version.cuda is not None or torch.version.hip is not None
_EVERY = (*INTERNALS.values(), *ATTRIBUTES.values())
_GONE = [each for each in _EVERY if (_OF_GPUS or not each.of_gpus) and _look_up(each.path) is _ABSENT]
# Required and optional names that this torch does not have.
MISSING = [f"torch.{each.path}" for each in _GONE if not each.optional]
SLOWER = [f"torch.{each.path} ({each.use})" for each in _GONE if each.optional]

dispatch_modes = _find("dispatch_modes")
tracing_state = _find("tracing_state")
functorch_level = _find("functorch_level")
legacy_batched = _find("legacy_batched")
functorch_wrapped = _find("functorch_wrapped")
saved_tensor_hooks = _find("saved_tensor_hooks")
saved_tensor_hooks_enabled = _find("saved_tensor_hooks_enabled")
graph_task = _find("graph_task")
keeps_graph = _find("keeps_graph")
no_modes = _find("no_modes")
# Callers read the level as an attribute: it changes.
forward_ad = SimpleNamespace(_current_level=0)
if isinstance(_find("forward_level"), int) and not any("forward_ad" in name for name in MISSING):
    forward_ad = torch.autograd.forward_ad
# `__call__` of modules, unless another tool replaced it to see the calls.
MODULE_CALL = _find("module_call") or object()
function_modes = _find("function_modes")
any_autocast = _find("any_autocast")
# It returns a new tensor, which aliases nothing. Without it no decoder layer is replayed.
linear = _find("linear")
current_device = _find("current_device") or torch.cuda.current_device
current_stream = _find("current_stream")
_TensorGuards = _find("TensorGuards")
_key_excluded, _negative_key, _zero_key = _find("key_excluded"), _find("negative_key"), _find("zero_key")
_HAS_GUARDS = None not in (_TensorGuards, _key_excluded, _negative_key, _zero_key)
_fp32_precision = _find("fp32_precision")
fused_rms_norm, fused_rms_norm_backward = _find("fused_rms_norm"), _find("fused_rms_norm_backward")
softmax_gradient = _find("softmax_gradient")
# torch changes these dictionaries in place.
global_hooks, global_pre_hooks = _find("global_hooks"), _find("global_pre_hooks")
global_backward_hooks, global_backward_pre_hooks = _find("global_backward_hooks"), _find("global_backward_pre_hooks")


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
    return function.apply if _find("function_apply") is None else super(torch.autograd.Function, function).apply


def matmul_precision():
    """The setting that allows a product of fp32 matrices on CUDA to round its factors first."""
    if _fp32_precision is None:
        return torch.backends.cuda.matmul.allow_tf32
    return _fp32_precision("cuda", "matmul")


# torch 2.14 replaces sums along contiguous rows on every GPU for which it finds CuTeDSL, and calls ATen's unless this is set.
# Later versions replace them only if it is. Means, the row statistic of norms, are ATen's in all of them.
_OTHER_SUMS = "PYTORCH_SUM_INNER_TREE"


def other_arithmetic(device: torch.device, call: Callable[[], Any]) -> list[str]:
    """The operators in `call` that other code has replaced on this device, and that code. torch itself does so from 2.13
    on, in `torch/_native`."""
    dump, mode = _find("dispatch_dump"), _find("TorchDispatchMode")
    if dump is None or mode is None:
        return []
    names, found = set(), []

    class Operators(mode):
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
        for line in dump(name).splitlines():
            key, _, place = line.partition(": registered at ")
            unused = sums_are_atens and name.startswith("aten::sum.") and "/_native/" in place
            if key == device.type.upper() and "/ATen/" not in place and not unused:
                found.append(f"{name} by {place.split(' :: ')[0]}")
    return found


def inductor_is_loaded() -> bool:
    return "torch._inductor.lowering" in sys.modules


@functools.cache
def inductor() -> Optional[SimpleNamespace]:
    """The names in `INDUCTOR`, once Inductor is loaded. None if one is missing; one warning then says so."""
    found = SimpleNamespace(**{name: _look_up(each.path) for name, each in INDUCTOR.items()})
    missing = [f"torch.{each.path}" for name, each in INDUCTOR.items() if getattr(found, name) is _ABSENT]
    if missing:
        warnings.warn(
            f"lossless-kernels: torch {torch.__version__} has no {', '.join(missing)}: results are the same, but "
            "Inductor's code calls our operators through torch's dispatcher, which takes 10 us more for each",
            RuntimeWarning,
            stacklevel=2,
        )
    return None if missing else found


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
        warnings.warn(
            f"lossless-kernels: the tensor guards of torch {torch.__version__} are not used ({reason}): results are the "
            "same, but recognising an earlier call takes about 1 us more",
            RuntimeWarning,
            stacklevel=2,
        )
    return not reason


def _what_guards_miss() -> str:
    """Why guards cannot replace a comparison in Python; empty if they can."""
    x = torch.zeros(2, 3)
    others = {
        "sizes": torch.zeros(3, 2),
        "dtypes": torch.zeros(2, 3, dtype=torch.float16),
        "strides": torch.zeros(3, 2).t(),
        "requires_grad": torch.zeros(2, 3, requires_grad=True),
        "classes": torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False),
        "negative views": torch._neg_view(torch.zeros(2, 3)),
        "zero tensors": torch._efficientzerotensor((2, 3)),
        "devices": torch.zeros(2, 3, device="meta"),
    }
    try:
        with torch.no_grad():
            same = _guard(x, x)
            if not same(x, torch.ones(2, 3)):
                return "they do not recognise an equal layout"
            alike = [name for name, other in others.items() if same(x, other) or same(other, x)]
    except Exception as error:  # Another interface may raise anything. Calls are then looked up by their key.
        return f"{type(error).__name__}: {error}"
    return f"they do not distinguish {', '.join(alike)}" if alike else ""


# TorchInductor's allocator: on the current GPU, without the dispatcher, in half the time of `empty_like`.
empty_strided_cuda = _find("empty_strided_cuda") if torch.version.hip is None else None

if MISSING:
    warnings.warn(
        f"lossless-kernels: torch {torch.__version__} has no {', '.join(MISSING)}: all layers keep their original forward",
        RuntimeWarning,
        stacklevel=2,
    )
elif SLOWER:
    warnings.warn(
        f"lossless-kernels: torch {torch.__version__} has no {', '.join(SLOWER)}: results are the same, by slower ways",
        RuntimeWarning,
        stacklevel=2,
    )
