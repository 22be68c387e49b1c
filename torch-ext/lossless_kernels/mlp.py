"""Gated MLPs: which classes compute `down_proj(act_fn(gate_proj(x)) * up_proj(x))`, and with which activation."""

import functools
from types import BuiltinFunctionType, FunctionType
from typing import Optional

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from . import proof
from .activation import UNSHOWN, Activation, by_value, forward_of, is_shown, original_of
from .domain import FLOAT_DTYPES, UNSEEN, is_bare, remember, runs_kernels, under_transform
from .gated_activation import ACTIVATIONS, product_of

# What the `act` of an activation layer may be: a function, which a proof can call without the module it comes from. A method
# of the module, as for formulas written in Python, is left to the original forward.
_FUNCTIONS = frozenset((FunctionType, BuiltinFunctionType, functools.partial))
# Attributes of activation layers that their forward reads.
_ATTRIBUTES = ("act", "approximate", "inplace")


def is_function(act) -> bool:
    """Whether `act` is a function of its arguments alone: what a closure holds may change, and would be kept for ever."""
    return type(act) in _FUNCTIONS and not getattr(getattr(act, "func", act), "__closure__", None)


def attributes_of(act_fn: nn.Module) -> list:
    """What an activation layer has of the attributes that decide what it computes."""
    return [*map(act_fn.__dict__.get, _ATTRIBUTES)]


def subject_of(act_fn: Optional[nn.Module]):
    """What a call of this module comes to: its class's forward, or `(forward, name, value)` if that reads an attribute.

    None if the call comes to more, which a kernel would leave out.
    """
    if act_fn is None or not is_bare(act_fn):
        return None
    owner = type(act_fn)
    for name, value in zip(_ATTRIBUTES, attributes_of(act_fn)):
        if value is not None:
            if name == "act" and not is_function(value) or name == "inplace" and value:
                return None
            return owner.forward, name, value
    return owner.forward


_activations = {}


def activation_of(owner: type, subject, x: torch.Tensor) -> Optional[Activation]:
    """The activation with which `owner.forward` computes the formula, for a module whose `act_fn` is `subject`; or None."""
    if is_dynamo_compiling():
        name = _activation_for_compile(owner, subject, x.dtype, x.device.index or 0) if x.is_cuda else None
        return None if name is None else ACTIVATIONS[name]
    try:
        key = (owner, owner.forward, subject, x.dtype, x.get_device())
        activation = _activations.get(key, UNSEEN)
    except (RuntimeError, TypeError):
        return None
    if activation is not UNSEEN:
        return activation
    if not isinstance(x, torch.Tensor):  # torch.fx traces with something else.
        return None
    return _recognize(key, owner, subject, x.dtype, x.device)


@torch.compiler.assume_constant_result
def _activation_for_compile(owner, subject, dtype, device_index) -> Optional[str]:
    device = torch.device("cuda", device_index)
    activation = (
        None
        if under_transform()
        else _recognize((owner, owner.forward, subject, dtype, device_index), owner, subject, dtype, device)
    )
    return None if activation is None else activation.name


def _recognize(key, owner, subject, dtype, device) -> Optional[Activation]:
    subject = by_value(subject)
    original = forward_of(subject)
    if dtype not in FLOAT_DTYPES or not runs_kernels(device):
        proof.outside(owner.forward, f"x {dtype} on {device}")
        return remember(_activations, key, None)
    code = proof.code(owner)
    if code is None or not is_shown(subject):
        proof.outside(owner.forward, UNSHOWN)
        return remember(_activations, key, None)
    verdict_key = ("formula of a gated MLP", code, subject, dtype, device)
    candidates = {
        activation: functools.partial(_formulas, owner, subject, activation, dtype, device)
        for activation in ACTIVATIONS.values()
    }
    where = f"{dtype}, {original.__qualname__}"
    activation = proof.recognize(verdict_key, proof.Subject(owner.forward, device, where), candidates)
    if not proof.is_settled(verdict_key):
        return None  # No verdict was possible at this time.
    if activation is not None:
        # Who looks for the activation layer, which is not called, finds it there too.
        for forward in (owner.forward, original):
            proof.relies(forward, product_of(original))
    return remember(_activations, key, activation)


def _formula(x, gate_proj, up_proj, down_proj, act_fn):
    return down_proj(act_fn(gate_proj(x)) * up_proj(x))


def _formulas(owner, subject, activation, dtype, device):
    generator = proof.generator(device, seed=5)
    rows, hidden_size, intermediate_size = 64, 16, 24
    shapes = {
        "x": (rows, hidden_size),
        "gate_proj": (intermediate_size, hidden_size),
        "up_proj": (intermediate_size, hidden_size),
        "down_proj": (hidden_size, intermediate_size),
    }
    data = {name: torch.randn(shape, device=device, generator=generator).to(dtype) for name, shape in shapes.items()}
    gradients = [torch.randn(rows, hidden_size, device=device, generator=generator).to(dtype) for _ in range(2)]
    # Under autocast the projections return another dtype than that of x.
    for projected in dict.fromkeys((dtype, torch.float16, torch.bfloat16)):
        results = [
            _run(owner, subject, activation, data.values(), projected, *gradients, ours) for ours in (False, True)
        ]
        names = ("the output", *(f"the gradient of {name}" for name in data))
        for what, expected, found in zip(names, *results):
            yield what, found, expected


def _run(owner, subject, activation, data, projected, dy, other, ours):
    """The output of one or the other formula, and its gradients, with projections that return the dtype `projected`."""
    x, *weights = leaves = [tensor.clone().requires_grad_() for tensor in data]

    def projection(weight):
        return lambda x: nn.functional.linear(x.to(weight.dtype), weight).to(projected)

    linears = [projection(weight) for weight in weights]
    with torch.enable_grad():
        if ours:
            out = _formula(x, *linears, functools.partial(activation.forward, None))
        else:
            layer = nn.Module.__new__(owner)
            nn.Module.__init__(layer)
            layer.gate_proj, layer.up_proj, layer.down_proj = linears
            layer.act_fn = original_of(subject)
            out = owner.forward(layer, x)
        # A gradient that is there already shows in which order the others reach x.
        return out.detach(), *torch.autograd.grad((out, x * 1.0), leaves, (dy.to(out.dtype), other))
