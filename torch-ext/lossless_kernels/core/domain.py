"""The domain of all kernels: tensors, devices, modules. Outside it the original forward or the eager formula runs."""

import functools
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Callable, Optional

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from . import LAYERS_MODULE, ROOT_PACKAGE, launch
from .torch_internals import (
    MISSING,
    MODULE_CALL,
    current_device,
    dispatch_modes,
    drop_guards_on,
    empty_strided_cuda,
    forward_ad,
    functorch_level,
    functorch_wrapped,
    global_backward_hooks,
    global_backward_pre_hooks,
    global_hooks,
    global_pre_hooks,
    legacy_batched,
    saved_tensor_hooks,
    tracing_state,
)

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The `__dict__` of a layer whose state plays no part.
NO_STATE: Mapping = {}
# Subclasses may redefine every operation.
PLAIN_TYPES = frozenset((torch.Tensor, Parameter))
_KERNEL_DEVICE = "cpu" if launch.INTERPRETED else "cuda"


def are_plain(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether kernels may read these two tensors' memory.

    They may not read subclasses, lazily negated tensors and zeros without memory. Functorch, forward-mode AD,
    torch.jit.trace and dispatch modes do not see kernels: eager operations run under them.
    """
    return are_plain_under_modes(first, second) and not dispatch_modes()


def are_ours(first: torch.Tensor, second: torch.Tensor, needs_grad: bool) -> bool:
    """Whether this package computes a layer's call: tensors are plain; in a checkpoint dispatch modes are allowed.

    Both computations of a checkpointed block must save the same tensors, and a mode may be active in one alone: a FLOP
    counter's `with` often holds the forward pass only. Our autograd functions run in both; under a mode they compute
    the formula.
    """
    return are_plain_under_modes(first, second) and (not dispatch_modes() or (needs_grad and is_checkpointed()))


def are_plain_under_modes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """`are_plain`, whatever dispatch modes are active."""
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


def have_strides(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether a tensor guard may be called on these: neither is of a subclass or nested."""
    return type(first) in PLAIN_TYPES and type(second) in PLAIN_TYPES and not first.is_nested and not second.is_nested


def gradients_apart(function: Callable, inputs: Sequence, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of `function(*inputs)` with respect to its inputs alone, differentiable if gradients are enabled.

    They are taken at views: hooks on an input expect its final gradient, and one input may depend on another.
    """
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        views = [each.view_as(each) if differentiable else each.detach() for each in inputs]
        views = [each if each.requires_grad else each.requires_grad_() for each in views]
        return torch.autograd.grad(function(*views), views, dy, create_graph=differentiable)


def under_transform() -> bool:
    """Whether functorch or forward-mode AD is active; used at trace time, where tensors do not show it."""
    return functorch_level() is not None or forward_ad._current_level >= 0


def at_trace_time(function: Callable) -> Callable:
    """Decorates a function that TorchDynamo runs once, while it traces; its result is a constant of the compiled code.

    The compiled code then checks no names of this package that were read before. It would check each at every call: some 75
    functions, classes and constants, where decoder layers are replaced.
    """

    @torch.compiler.assume_constant_result
    @functools.wraps(function)
    def decide(*arguments, **named):
        drop_guards_on(ROOT_PACKAGE)
        return function(*arguments, **named)

    return decide


@at_trace_time
def is_traced_plainly(device: torch.device) -> bool:
    """Whether torch.compile may put an operator into its graph: kernels run on this device, no transform is active."""
    return runs_kernels(device) and not under_transform()


def is_watched() -> bool:
    """Whether functorch, forward-mode AD or torch.jit.trace would interfere with a proof."""
    return under_transform() or tracing_state() is not None


def identity_hook(tensor: torch.Tensor) -> torch.Tensor:
    """The saved-tensor hook of proofs; it shields them from outer hooks."""
    return tensor


def is_checkpointed() -> bool:
    """Whether saved-tensor hooks are active, as in a block that the backward pass computes again."""
    hooks = saved_tensor_hooks(True)
    return hooks is not None and hooks[0] is not identity_hook


def layouts_if_hooked(*tensors: Optional[torch.Tensor]) -> Optional[tuple]:
    """The layouts of tensors that autograd is about to save, if a saved-tensor hook may return others for them; else None."""
    return layouts_of(*tensors) if is_checkpointed() else None


def are_as_saved(layouts: Optional[tuple], *tensors: Optional[torch.Tensor]) -> bool:
    """Whether saved tensors have the layouts that `layouts_if_hooked` or `layouts_of` found before."""
    return layouts is None or layouts == layouts_of(*tensors)


def layouts_of(*tensors: Optional[torch.Tensor]) -> tuple:
    return tuple([None if each is None else (each.dtype, each.device, each.shape, each.stride()) for each in tensors])


def has_global_hooks() -> bool:
    """Whether hooks on the calls of all modules exist."""
    return bool(global_hooks or global_pre_hooks or global_backward_hooks or global_backward_pre_hooks)


def is_bare(module: torch.nn.Module, whatever_hooks: bool = False) -> bool:
    """Whether a call of the module runs only its class's forward or this package's: no hooks (`whatever_hooks` ignores
    them), no `compile()`, no other forward of its own."""
    if not whatever_hooks and (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    ):
        return False
    if is_dynamo_compiling():
        forward = module.forward
        function = forward.__func__ if isinstance(forward, MethodType) and forward.__self__ is module else None
        return _is_bare_for_compile(type(module), function, whatever_hooks)
    if (
        not whatever_hooks
        and (global_hooks or global_pre_hooks or global_backward_hooks or global_backward_pre_hooks)
        or module._compiled_call_impl is not None
        or type(module).__call__ is not MODULE_CALL
    ):
        return False
    bound = module.__dict__.get("forward")
    if bound is None:
        return True
    # It may be another module's forward, or a wrapper with the name of what it wraps.
    if not isinstance(bound, MethodType) or bound.__self__ is not module or hasattr(bound.__func__, "__wrapped__"):
        return False
    return _is_ours_or(type(module), bound.__func__)


def _is_ours_or(owner, function) -> bool:
    """Whether it is this package's forward, or the class's own, which `kernelize` binds where it has no kernel."""
    return function.__module__ == LAYERS_MODULE or function is owner.forward


@at_trace_time
def _is_bare_for_compile(owner, function, whatever_hooks) -> bool:
    """The rest of `is_bare` while torch.compile traces, where every name that is read becomes a guard.

    `function` is that of the module's forward; None if this is no method.
    """
    if owner.__call__ is not MODULE_CALL or (not whatever_hooks and has_global_hooks()):
        return False
    return function is not None and _is_ours_or(owner, function)


def keeps_its_saved_tensors(module: torch.nn.Module) -> bool:
    """Whether a call of the module and its kernel save the same tensors.

    A checkpoint requires it: hooks, which FLOP counters put on all modules, have the module called, and may exist in
    only one of a block's two computations. In a checkpoint the module's own forward must therefore be this package's.
    """
    if is_dynamo_compiling() or not is_checkpointed():
        return True
    return getattr(getattr(module.__dict__.get("forward"), "__func__", None), "__module__", None) == LAYERS_MODULE


def runs_kernels(device: torch.device) -> bool:
    """Whether kernels run on this device: CUDA (and ROCm), or the CPU in Triton's interpreter."""
    return launch.AVAILABLE and not MISSING and device.type == _KERNEL_DEVICE


def is_autocast(device: torch.device) -> bool:
    """Whether autocast is on where kernels run. Other devices, such as "meta", may not support autocast."""
    return device.type == _KERNEL_DEVICE and torch.is_autocast_enabled(_KERNEL_DEVICE)


def check_floating(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError unless `tensor` is a real floating point tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, found {type(tensor).__name__}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a real floating point dtype, found {tensor.dtype}")


def allocator(shape, strides, dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that returns a new uninitialised tensor, which a kernel must fill.

    Dispatch modes and profilers do not see it, and `torch.use_deterministic_algorithms` does not fill it.
    """
    shape, strides = tuple(shape), tuple(strides)
    on_any_device = functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
    if device.type != "cuda" or empty_strided_cuda is None:
        return on_any_device
    on_current_device = functools.partial(empty_strided_cuda, shape, strides, dtype)
    if torch.cuda.device_count() == 1:
        return on_current_device
    return lambda: on_current_device() if current_device() == device.index else on_any_device()
