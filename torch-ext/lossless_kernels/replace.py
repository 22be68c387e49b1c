"""`apply` and `restore`: one call replaces the layers of a model, another puts the originals back."""

import contextlib
import weakref
from collections.abc import Iterator, MutableMapping
from types import MethodType
from typing import Any, Optional

import torch
from torch import nn

from . import loss as losses
from . import mapping, report
from .core import warn
from .core.domain import runs_kernels
from .core.torch_internals import is_compiled
from .decoder import recompute as recomputation

# In the `__dict__` of a module: the attributes that `apply` changed and their values before, None where there was none.
_BEFORE = "_before_lossless_kernels"
# A function that transformers shares between models -> the modules of applied models that call it.
_callers: MutableMapping[nn.Module, weakref.WeakSet] = weakref.WeakKeyDictionary()


def apply(
    model: nn.Module, mode: Optional[Any] = None, level: str = "decoder", loss: Optional[bool] = None
) -> report.ReplacementReport:
    """Replaces every layer of `model` that a kernel of this package may replace, and returns the report.

    `apply` calls `name_layers`, `kernel_mapping`, `kernels.kernelize` and `attach_loss`. It binds the same forwards as they do,
    so a call of the model costs the same CPU time. It changes:

    - `module.forward` of the replaced layers. accelerate's hooks stay around the new forward. A forward that a user put onto a
      module stays.
    - `_loss_function`, if it attaches the loss.
    - A rotary function of transformers, for all models of its file. `restore` puts it back with the last model that `apply`
      changed.

    Parameters, buffers, gradients, hooks and an existing autograd graph stay: `apply` and `restore` may be called in the middle
    of training, between a forward pass and its backward pass too. Classes have their layer names only during the call. After
    `set_use_kernels`, `apply` takes over the layers that have kernels here, and `model.train()` no longer gives them to
    transformers' own mapping.

    The original layers run where the device has no kernels, and where no weight has a dtype of the kernels (float64). In a model
    that is split over a GPU and a CPU the layers on the GPU run kernels and those on the CPU compute their original operations.
    Modules of torch.jit, traced or scripted, stay as they are. If nothing can be replaced, one RuntimeWarning gives the reason and
    the next step. A second call replaces the first, with its own mode and level. If `apply` raises, the original forwards run.

    Args:
        model: a module on its devices; several devices, accelerate's offloading and PEFT's wrappers included.
        mode: a `kernels.Mode`: INFERENCE or TRAINING, with or without TORCH_COMPILE. By default TRAINING if
            `model.training`, else INFERENCE. One kernel serves all modes; the mode decides whether the loss is attached.
        level: "decoder" for whole decoder layers, MLPs and rotary embeddings too, "layer" without them.
        loss: whether to attach the loss (`attach_loss`). By default at level "decoder" in a mode of training, where `model` holds a
            causal language model with transformers' loss.

    Returns:
        What `replacement_report(model)` returns. It is not printed.

    Raises:
        TypeError: `model` is no `torch.nn.Module`, a class of models for example; `mode` is no `kernels.Mode`; or `loss` is no
            bool.
        ValueError: `level` or `mode` is none of the above; a module of `model` is compiled (apply, then compile); some of its
            tensors are on "meta", and no hook of accelerate loads them at a call (load the model, then apply); or `loss=True`
            for a model without such a loss.
        ImportError: `kernels` is not installed.
    """
    mapping.check_model(model)
    mapping.check_level(level)
    if loss is not None and not isinstance(loss, bool):
        raise TypeError(f"loss: expected True, False or None, found {loss!r}")
    mode = mapping.mode_for(model, mode)
    _check_uncompiled(model)
    _check_loaded(model)
    devices = report.devices_of(model)
    _undo(model)
    obstacle = report.obstacle(model)
    try:
        if obstacle is None:
            _bind(model, mode, level, next(filter(runs_kernels, devices)).type)
        if loss is None:
            loss = (
                obstacle is None and level == "decoder" and mapping.is_training(mode) and losses.takes_our_loss(model)
            )
        if loss:
            _attach_loss(model)
    except BaseException:
        _undo(model)
        raise
    made = report.report_of(model)
    if obstacle is not None or not (loss or any(True for _ in report.replaced_modules(model))):
        reason = obstacle or _why_nothing(made)
        warn(f"apply replaced no layer of {type(model).__name__}: {reason}. Next: {reason.step}")
    return made


def restore(model: nn.Module) -> None:
    """Puts the original forwards and the loss of `model` back.

    After `apply`, the forwards, `_loss_function` and the `__dict__` of every module are those from before. After `kernelize`
    alone, every module runs the forward of its class again. Two things stay replaced: a rotary function that `apply` changed
    for another model too, and a forward of another package that wraps one of this package.

    Args:
        model: a module that `apply` or `kernelize` changed, one that holds it, or a part or a deep copy of it.

    Raises:
        TypeError: `model` is no `torch.nn.Module`.
    """
    mapping.check_model(model)
    _undo(model)
    for module in report.replaced_modules(model):
        if not _callers.get(module):
            _put_back(module, None)
    for module in model.modules():
        recomputation.mark(module, False)
        if losses.has_our_loss(module):
            del vars(module)["_loss_function"]


# The layers of this package with a product of two projections.
_GATED_MLPS = frozenset(("LlamaMLP", "GeGLUMLP", "Phi3MLP"))


def recompute_products(model: nn.Module, recompute: bool = True) -> int:
    """Saves memory in training: gated MLPs compute their product again in the backward pass instead of keeping it.

    Eager keeps four tensors `[tokens, intermediate_size]` for each MLP: gate, its activation, up and the product. The layers of
    this package keep three, and two after this call. Each backward pass runs one more kernel, the one that computed the
    product. The bits are the same, and the matrix products are eager's. (Tiles of tokens would save this memory too, but they
    add the weights' gradients in another order.)

    Nothing changes in a checkpoint, which keeps nothing of the MLP, with other saved-tensor hooks, which see the product, under
    torch.compile, and where no kernel computes the product.

    Args:
        model: a model after `apply` or `kernelize`.
        recompute: False to keep the products again, as `restore` does too.

    Returns:
        The number of MLPs.

    Raises:
        TypeError: `model` is no `torch.nn.Module`, or `recompute` no bool.
        ValueError: no MLP of the model carries a forward of this package.
    """
    mapping.check_model(model)
    if not isinstance(recompute, bool):
        raise TypeError(f"recompute: expected True or False, found {recompute!r}")
    layers = [(module, report.replaced(module)) for module in model.modules()]
    found = [each for each, ours in layers if ours is not None and ours.__qualname__.split(".")[0] in _GATED_MLPS]
    if not found:
        raise ValueError(
            "model: expected gated MLPs with a forward of this package, found none: apply(model) first, at level "
            '"decoder", or kernelize it'
        )
    for module in found:
        recomputation.mark(module, recompute)
    return len(found)


def _check_uncompiled(model) -> None:
    for name, module in model.named_modules():
        if is_compiled(module):
            where = f"the module {name!r}" if name else "one that is"
            raise ValueError(
                f"model: expected a model that is not compiled, found {where} compiled: apply, then compile"
            )


def _check_loaded(model) -> None:
    """Raises if tensors are on "meta" that no hook of accelerate loads at a call."""
    offloaded, names = set(), []
    for path, module in model.named_modules():
        if path.rpartition(".")[0] in offloaded or "_hf_hook" in vars(module):
            offloaded.add(path)
            continue
        for name, tensor in (*module.named_parameters(path, False), *module.named_buffers(path, False)):
            names += [name] * (tensor.device.type == "meta")
    if names:
        raise ValueError(
            f"model: expected tensors on a device, found {len(names)} on meta, {names[0]} first: load the model, then apply"
        )


def _why_nothing(made: report.ReplacementReport) -> report.Reason:
    """Why `kernelize` bound nothing onto a model whose device has kernels."""
    reasons = {(reason.kind, str(reason), reason.step) for entry in made.layers for reason in entry.reasons}
    if report.disabled() is not None:
        return report.disabled()
    if len(reasons) == 1:
        ((kind, text, step),) = reasons
        return report.Reason(f"{kind} ({text})", kind, step)
    if reasons:
        step = "print(kernel.replacement_report(model)) lists the reasons and what to do about each"
        return report.Reason("its layers have several reasons", report.NO_NAME, step)
    step = "nothing: kernel.kernel_mapping(level='decoder') has the names of the layers with kernels"
    return report.Reason("it has no layer that a kernel of this package takes", report.NO_NAME, step)


def _bind(model, mode, level, device_type) -> None:
    """`kernelize`, which leaves alone everything that it has no kernel of this package for."""
    modules = list(model.modules())
    for module in modules:
        mapping.name_functions(module)
    attached = [each for module in modules for each in vars(module).get("_kernel_funcs", {}).values()]
    called = {id(each): each for module in modules for each in report.functions_of(module)}
    functions = [each for each in called.values() if each not in attached]
    before = {id(each): (each, vars(each).get("forward")) for each in (*modules, *attached, *functions)}
    if device_type == "cuda" and torch.version.hip is not None:
        device_type = "rocm"
    with _without_hooks(modules, before):
        try:
            mapping.kernelize(model, functions, mode, level, device_type)
        except BaseException:
            for each, forward in before.values():
                _set(each, "forward", forward)
            raise
        for each, forward in before.values():
            if report.replaced(each) is None or not mapping.is_replaceable(each, forward):
                _set(each, "forward", forward)
            else:
                _remember(each, "forward", forward)
    for module in modules:
        for function in report.functions_of(module):
            if report.replaced(function) is not None:
                _callers.setdefault(function, weakref.WeakSet()).add(module)
        # Else transformers would kernelize the model under its own mapping at the next `train()` or `eval()`.
        if vars(module).get("_use_kernels"):
            _remember(module, "_use_kernels", True)
            vars(module)["_use_kernels"] = False


@contextlib.contextmanager
def _without_hooks(modules, before) -> Iterator[None]:
    """While it lasts, modules have the forwards inside of accelerate's hooks; afterwards the hooks are around the new ones."""
    hooked = [module for module in modules if "_old_forward" in vars(module) and "_hf_hook" in vars(module)]
    kept = [(vars(module), vars(module).pop("_hf_hook"), vars(module)["forward"]) for module in hooked]
    for module in hooked:
        inside = vars(module)["_old_forward"]
        before[id(module)] = module, inside
        vars(module)["forward"] = inside
        del vars(module)["_old_forward"]
    try:
        yield
    finally:
        for state, hook, wrapper in kept:
            state.update(_hf_hook=hook, _old_forward=state["forward"], forward=wrapper)


def _attach_loss(model) -> None:
    before = {module: vars(module).get("_loss_function") for module in model.modules()}
    losses.attach_loss(model)
    for module, function in before.items():
        if losses.has_our_loss(module) and function is not losses.causal_lm_loss:
            _remember(module, "_loss_function", function)


def _remember(module, name, value) -> None:
    vars(module).setdefault(_BEFORE, {}).setdefault(name, value)


def _set(module, name, value) -> None:
    if value is not None:
        vars(module)[name] = value
    else:
        vars(module).pop(name, None)


def _undo(model) -> None:
    """Takes back `apply`, as far as nothing else has changed since."""
    for module in model.modules():
        for function in report.functions_of(module):
            callers = _callers.get(function)
            if callers is not None:
                callers.discard(module)
            if not callers:
                _callers.pop(function, None)
                _undo_one(function)
                mapping.put_function_back(function)
        for copied in vars(module).get("_kernel_funcs", {}).values():
            if copied not in _callers:
                _undo_one(copied)
        _undo_one(module)


def _undo_one(module) -> None:
    before = vars(module).pop(_BEFORE, {})
    if "forward" in before and report.replaced(module) is not None:
        _put_back(module, before["forward"])
    if "_loss_function" in before and losses.has_our_loss(module):
        _set(module, "_loss_function", before["_loss_function"])
    if "_use_kernels" in before:
        vars(module)["_use_kernels"] = True


def _put_back(module, forward) -> None:
    """Binds another forward, inside of accelerate's hooks if there are any. None: that of the class."""
    if "_old_forward" in vars(module):
        vars(module)["_old_forward"] = MethodType(type(module).forward, module) if forward is None else forward
    else:
        _set(module, "forward", forward)
