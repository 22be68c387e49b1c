"""Every private name of torch that this package uses: what it is for, and what becomes of the package without it.

A name that is missing turns the kernels off, with one warning: the original layers run. Optional names have a slower way beside
them. A name that is there may behave otherwise in another torch: what calls are recognised by is tried out, not looked up by version.
"""

import functools
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch


class Internal(NamedTuple):
    """A private name of torch.

    Args:
        path: below `torch`.
        use: what the package asks it for.
        without: what stands in its place: with it every tensor looks as if something watched it, so that eager runs.
        optional: the kernels run without it.
    """

    path: str
    use: str
    without: Any = None
    optional: bool = False


def _watched(*_) -> bool:
    return True


INTERNALS = {
    "dispatch_modes": Internal("_C._len_torch_dispatch_stack", "how many dispatch modes watch operations", _watched),
    "tracing_state": Internal("_C._get_tracing_state", "whether torch.jit.trace is at work", _watched),
    "functorch_level": Internal("_C._functorch.peek_interpreter_stack", "whether a functorch transform is", _watched),
    "legacy_batched": Internal("_C._functorch.is_legacy_batchedtensor", "grad(is_grads_batched=True)", _watched),
    "functorch_wrapped": Internal(
        "_C._functorch.is_functorch_wrapped_tensor", "what a transform leaves behind", _watched
    ),
    "saved_tensor_hooks": Internal("_C._autograd._top_saved_tensors_default_hooks", "checkpoints", lambda _: None),
    "saved_tensor_hooks_enabled": Internal("_C._autograd._saved_tensors_hooks_is_enabled", "proofs", _watched),
    "graph_task": Internal("_C._current_graph_task_id", "whether a backward pass is at work", lambda: -1),
    "no_modes": Internal("utils._python_dispatch._disable_current_modes", "proofs and shapes without modes"),
    "forward_level": Internal("autograd.forward_ad._current_level", "whether forward-mode AD is at work", 0),
    "module_call": Internal("nn.Module._wrapped_call_impl", "whether modules are called as torch calls them"),
    "function_modes": Internal("_C._len_torch_function_stack", "a decoder layer's replay", _watched, True),
    "any_autocast": Internal("_C._is_any_autocast_enabled", "a decoder layer's replay", _watched, True),
    "linear": Internal("_C._nn.linear", "a decoder layer's replay", None, True),
    "TensorGuards": Internal("_C._dynamo.guards.TensorGuards", "recognising a call in 0.1 us", None, True),
    "empty_strided_cuda": Internal(
        "_C._dynamo.guards._empty_strided_cuda", "memory, without the dispatcher", None, True
    ),
    "current_device": Internal("_C._cuda_getDevice", "the short launch", None, True),
    "current_stream": Internal("_C._cuda_getCurrentRawStream", "the short launch", None, True),
    "fp32_precision": Internal(
        "_C._get_fp32_precision_getter", "whether products of matrices may be rounded", None, True
    ),
    "function_apply": Internal("_C._FunctionBase.apply", "an autograd function's call, 1 us sooner", None, True),
}
# Names that this torch does not have, and that the kernels do not run without.
MISSING: list = []


def _find(name: str) -> Any:
    internal, found = INTERNALS[name], torch
    for part in internal.path.split("."):
        if not hasattr(found, part):
            if not internal.optional:
                MISSING.append(f"torch.{internal.path}")
            return internal.without
        found = getattr(found, part)
    return found


dispatch_modes = _find("dispatch_modes")
tracing_state = _find("tracing_state")
functorch_level = _find("functorch_level")
legacy_batched = _find("legacy_batched")
functorch_wrapped = _find("functorch_wrapped")
saved_tensor_hooks = _find("saved_tensor_hooks")
saved_tensor_hooks_enabled = _find("saved_tensor_hooks_enabled")
graph_task = _find("graph_task")
no_modes = _find("no_modes")
# Its level is an attribute, which changes.
forward_ad = SimpleNamespace(_current_level=0)
if isinstance(_find("forward_level"), int) and not any("forward_ad" in name for name in MISSING):
    forward_ad = torch.autograd.forward_ad
# What `__call__` of a module is, unless somebody has put another one there, who wants to see the calls.
MODULE_CALL = _find("module_call") or object()
function_modes = _find("function_modes")
any_autocast = _find("any_autocast")
# What it returns is new and nobody else's. None: no decoder layer is replayed.
linear = _find("linear")
current_device = _find("current_device")
current_stream = _find("current_stream")
_TensorGuards = _find("TensorGuards")


def apply_of(function: type):
    """`function.apply` of an autograd function, sooner: for tensors that are plain, and that is known of.

    What Python does before the engine's own method asks for functorch's transforms and unwraps what they left behind, which
    takes a third of an empty function's time.
    """
    return function.apply if _find("function_apply") is None else super(torch.autograd.Function, function).apply


def matmul_precision():
    """What decides whether a product of fp32 matrices on CUDA may round its factors first."""
    getter = _find("fp32_precision")
    return torch.backends.cuda.matmul.allow_tf32 if getter is None else getter("cuda", "matmul")


def tensor_guard(*tensors: torch.Tensor):
    """TorchDynamo's guard of tensors: compares type, dispatch keys, dtype, device, sizes, strides and requires_grad in one step of
    0.1 us, against 1 us for the same in Python. None where this torch has none, or one that does not tell these apart."""
    return _guard(*tensors) if guards_tell() else None


def _guard(*tensors):
    return _TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check


@functools.cache
def guards_tell() -> bool:
    """Whether TorchDynamo's guards tell apart what calls are recognised by: tried on tensors that differ in one thing each."""
    if _TensorGuards is None:
        return False
    x = torch.zeros(2, 3)
    others = (
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.float16),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3, requires_grad=True),
        torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False),
        torch._neg_view(torch.zeros(2, 3)),
        torch._efficientzerotensor((2, 3)),
        torch.zeros(2, 3, device="meta"),
    )
    try:
        with torch.no_grad():
            same = _guard(x, x)
            return same(x, torch.ones(2, 3)) and not any(same(x, other) or same(other, x) for other in others)
    except Exception:  # Whatever another interface raises: calls are then looked up by their key.
        return False


# What TorchInductor's code has memory from: on the current GPU, without the dispatcher, in half the time of `empty_like`.
empty_strided_cuda = _find("empty_strided_cuda") if torch.version.hip is None else None

if MISSING:
    warnings.warn(
        f"lossless-kernels: torch {torch.__version__} has no {', '.join(MISSING)}: all layers keep their original forward",
        RuntimeWarning,
        stacklevel=2,
    )
