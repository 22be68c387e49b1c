"""What the kernels may be called on at all. Everything else is computed by the original forward or the eager formula."""

import functools
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Callable

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.nn.modules import module as torch_module

from . import LAYERS_MODULE, launch
from .torch_internals import (
    MISSING,
    MODULE_CALL,
    current_device,
    dispatch_modes,
    empty_strided_cuda,
    forward_ad,
    functorch_level,
    functorch_wrapped,
    legacy_batched,
    saved_tensor_hooks,
    tracing_state,
)

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of a layer that is not asked for its `__dict__`.
NO_STATE: Mapping = {}
# A subclass may mean something else by every operation on it.
PLAIN_TYPES = frozenset((torch.Tensor, Parameter))
_KERNEL_DEVICE = "cpu" if launch.INTERPRETED else "cuda"


def are_plain(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether kernels may be called on what these two tensors' memory holds.

    Not on subclasses, lazily negated tensors or zeros without memory, and not while somebody watches or rewrites every operation: functorch,
    forward-mode AD, torch.jit.trace and dispatch modes do not see a kernel, so the operations they know must run.
    """
    return _are_plain(first, second) and not dispatch_modes()


def are_ours(first: torch.Tensor, second: torch.Tensor, needs_grad: bool) -> bool:
    """Whether a layer's call on these tensors is for us to compute: plain ones, and in a checkpoint also if modes watch.

    The mode may watch one of both computations of a checkpointed block alone (in a FLOP counter's `with` there is often the
    forward pass and not the backward pass, which computes the block again), and both must save the same tensors. So our
    autograd functions run, and compute the formula under a mode.
    """
    return _are_plain(first, second) and (not dispatch_modes() or (needs_grad and is_checkpointed()))


def _are_plain(first, second) -> bool:
    return (
        type(first) in PLAIN_TYPES
        and type(second) in PLAIN_TYPES
        and not first.is_neg()
        and not second.is_neg()
        and not first._is_zerotensor()
        and not second._is_zerotensor()
        and not legacy_batched(first)
        and not legacy_batched(second)
        and not functorch_wrapped(first)
        and not functorch_wrapped(second)
        and functorch_level() is None
        and forward_ad._current_level < 0
        and tracing_state() is None
    )


def are_dense(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether these are tensors of no subclass and not nested: those that the function of `same_tensors` may be asked about."""
    return type(first) in PLAIN_TYPES and type(second) in PLAIN_TYPES and not first.is_nested and not second.is_nested


def gradients_apart(function: Callable, inputs: Sequence, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What autograd sends into the inputs of `function(*inputs)`, and into nothing else that they are made of.

    By new names of the inputs: hooks on them are for the gradients that arrive in the end, and one may be made of another. Where
    gradients are enabled, these can be differentiated in turn.
    """
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        names = [each.view_as(each) if differentiable else each.detach() for each in inputs]
        names = [each if each.requires_grad else each.requires_grad_() for each in names]
        return torch.autograd.grad(function(*names), names, dy, create_graph=differentiable)


def under_transform() -> bool:
    """Whether functorch or forward-mode AD is at work: asked at trace time, where tensors do not tell."""
    return functorch_level() is not None or forward_ad._current_level >= 0


def is_watched() -> bool:
    """Whether functorch, forward-mode AD or torch.jit.trace would take part in a proof made now: no time for a verdict."""
    return under_transform() or tracing_state() is not None


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """The saved-tensor hook of proofs, which no hook outside is to reach into."""
    return tensor


def is_checkpointed() -> bool:
    """Whether autograd hands what it saves to hooks, as in a block that is computed again in the backward pass."""
    hooks = saved_tensor_hooks(True)
    return hooks is not None and hooks[0] is not as_it_is


def has_global_hooks() -> bool:
    """Whether somebody has hooks on the calls of all modules."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def is_bare(module: torch.nn.Module, whatever_hooks: bool = False) -> bool:
    """Whether calling the module is calling its class's forward, or that of this package in its place, and nothing else.

    Not with hooks, not if it is compiled by itself, and not if somebody else put a forward of his own there.

    Args:
        whatever_hooks: leave hooks out of account.
    """
    state = module.__dict__
    if (
        not whatever_hooks
        and (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or torch_module._global_forward_hooks
            or torch_module._global_forward_pre_hooks
            or torch_module._global_backward_hooks
            or torch_module._global_backward_pre_hooks
        )
        or module._compiled_call_impl is not None
        or type(module).__call__ is not MODULE_CALL
    ):
        return False
    bound = state.get("forward")
    if bound is None:
        return True
    if not isinstance(bound, MethodType):
        return False
    function = bound.__func__
    # Somebody may have put another module's there, or one that says it is what it wraps.
    if not is_dynamo_compiling() and (bound.__self__ is not module or hasattr(function, "__wrapped__")):
        return False
    # `kernelize` binds the class's own where it has no kernel. In this way TorchDynamo of torch 2.11 can tell, too.
    return function.__module__ == LAYERS_MODULE or function is type(module).forward


def keeps_its_saved_tensors(module: torch.nn.Module) -> bool:
    """Whether autograd saves the same tensors when the module is called as when its kernel is called in its place.

    In a checkpoint it must: hooks, of which FLOP counters put some on all modules, may be there in one of both computations
    of a block only, and have the module called. So there the module's own forward must be this package's.
    """
    if is_dynamo_compiling() or not is_checkpointed():
        return True
    return getattr(getattr(module.__dict__.get("forward"), "__func__", None), "__module__", None) == LAYERS_MODULE


def runs_kernels(device: torch.device) -> bool:
    """Whether kernels run on this device: CUDA (and ROCm), or the CPU in Triton's interpreter."""
    return launch.AVAILABLE and not MISSING and device.type == _KERNEL_DEVICE


def is_autocast(device: torch.device) -> bool:
    """Whether autocast is on where kernels run. Other devices, "meta" for one, need not know of autocast."""
    return device.type == _KERNEL_DEVICE and torch.is_autocast_enabled(_KERNEL_DEVICE)


def check_floating(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError unless `tensor` is a real floating point tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, found {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a real floating point dtype, found {tensor.dtype}")


def allocator(shape, strides, dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that returns a new tensor like this, with whatever its memory held before, and a kernel writes to all of it.

    For calls that no dispatch mode watches: neither one nor a profiler sees it, and nothing is filled by
    `torch.use_deterministic_algorithms`.
    """
    shape, strides = tuple(shape), tuple(strides)
    anywhere = functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
    if device.type != "cuda" or empty_strided_cuda is None:
        return anywhere
    here = functools.partial(empty_strided_cuda, shape, strides, dtype)
    if torch.cuda.device_count() == 1:
        return here
    return lambda: here() if current_device() == device.index else anywhere()
