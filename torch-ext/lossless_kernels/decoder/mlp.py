"""Gated MLPs: which classes compute `down_proj(act_fn(gate_proj(x)) * up_proj(x))`, and with which activation."""

import functools
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Optional

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ..core import inspection, proof
from ..core.calls import UNSEEN, remember
from ..core.domain import FLOAT_DTYPES, NO_STATE, as_it_is, is_bare, runs_kernels, under_transform
from ..ops.activation import Activation, by_value, forward_of, is_shown, original_of
from ..ops.gated_activation import ACTIVATIONS, product_is_ours, product_of

# Attributes of activation layers that their forward reads.
_ATTRIBUTES = ("act", "approximate", "inplace")


def is_function(act) -> bool:
    """Whether the `act` of an activation layer is a function of its arguments alone, which a proof can call without the layer.

    A method, as for formulas written in Python, is left to the original forward. What a closure holds may change, and tables
    would keep it.
    """
    if type(act) is functools.partial:
        given = (*act.args, *act.keywords.values())
        return all(type(value) in inspection.CONSTANTS for value in given) and is_function(act.func)
    return type(act) is BuiltinFunctionType or (type(act) is FunctionType and not act.__closure__)


def attributes_of(act_fn: nn.Module) -> list:
    """What an activation layer has of the attributes that decide what it computes."""
    return [*map(act_fn.__dict__.get, _ATTRIBUTES)]


def subject_of(act_fn: Optional[nn.Module], whatever_hooks: bool = False):
    """What a call of this module comes to: its class's forward, or `(forward, name, value)` if that reads an attribute.

    None if the call comes to more, which a kernel would leave out.

    Args:
        whatever_hooks: leave hooks out of account.
    """
    if act_fn is None or not is_bare(act_fn, whatever_hooks):
        return None
    owner = type(act_fn)
    for name, value in zip(_ATTRIBUTES, attributes_of(act_fn)):
        if value is not None:
            if name == "act" and not is_function(value) or name == "inplace" and value:
                return None
            return owner.forward, name, value
    return owner.forward


def activation_of(owner: type, subject, x: torch.Tensor, state: Mapping = NO_STATE) -> Optional[Activation]:
    """The activation with which `owner.forward` computes the formula, for a module whose `act_fn` is `subject`; or None.

    Args:
        state: the module's `__dict__`.
    """
    if is_dynamo_compiling():
        name = _activation_for_compile(owner, subject, x.dtype, x.device.index or 0) if x.is_cuda else None
        return None if name is None else ACTIVATIONS[name]
    code = inspection.code_of(owner)
    if code.helpers and not inspection.are_current(code.helpers, owner, state):
        return None
    try:
        key = (subject, x.dtype, x.get_device())
        activation = code.memo.get(key, UNSEEN)
    except (RuntimeError, TypeError):
        return None
    if activation is not UNSEEN:
        return activation
    if not isinstance(x, torch.Tensor):  # torch.fx traces with something else.
        return None
    return _recognize(key, owner, subject, x.dtype, x.device)


@torch.compiler.assume_constant_result
def _activation_for_compile(owner, subject, dtype, device_index) -> Optional[str]:
    if under_transform():
        return None
    device = torch.device("cuda", device_index)
    activation = _recognize((subject, dtype, device_index), owner, subject, dtype, device)
    return None if activation is None else activation.name


def _recognize(key, owner, subject, dtype, device) -> Optional[Activation]:
    subject = by_value(subject)
    original = forward_of(subject)
    functions, known = inspection.functions_of(owner), inspection.code_of(owner).memo
    if functions is None or not is_shown(subject):  # What owns the subject may own a tensor too: it is not kept.
        proof.outside_for_its_code(owner)
        return None
    if dtype not in FLOAT_DTYPES or not runs_kernels(device):
        proof.outside(owner.forward, f"x {dtype} on {device}")
        return remember(known, key, None)
    verdict_key = ("formula of a gated MLP", functions, subject, dtype, device)
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
    return remember(known, key, activation)


class _Saved(torch.autograd.Function):
    """Saves tensors, and is used for nothing. Autograd saves what a function of `gate` and `up` does."""

    @staticmethod
    def forward(ctx, gate, up, *tensors):
        ctx.save_for_backward(*tensors)
        return gate.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        return (None,) * len(ctx.needs_input_grad)


def hooked_product(act_fn: nn.Module, gate: torch.Tensor, project_up, subject, activation) -> torch.Tensor:
    """`act_fn(gate) * project_up()` in a checkpoint, with the hooks on the module's call.

    There may be none when the block is computed again, or there were none before, and both computations must save the same
    tensors. So what is saved here stays out of the checkpoint, which is given what the kernel would have saved, or, where
    no kernel takes `up`, what `act_fn` did.
    """
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    # Hooks on act_fn run before up is computed, as in eager.
    with torch.autograd.graph.saved_tensors_hooks(keep, as_it_is):
        activated = act_fn(gate)
    up = project_up()
    if not product_is_ours(gate, up, subject, activation):
        _Saved.apply(gate, up, *saved)
        return activated * up
    with torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is):
        product = activated * up
    _Saved.apply(gate, up, gate, up)
    return product


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
        # What no class has in place of its activation shows that the forward calls the one it was given.
        for original, ours in (
            (original_of(subject), functools.partial(activation.forward, None)),
            (torch.sin, torch.sin),
        ):
            results = [
                _run(layer_class, act_fn, data.values(), projected, *gradients)
                for layer_class, act_fn in ((owner, original), (None, ours))
            ]
            names = ("the output", *(f"the gradient of {name}" for name in data))
            for what, expected, found in zip(names, *results):
                yield what, found, expected


def _run(owner, act_fn, data, projected, dy, other):
    """The output of `owner.forward`, or of the formula, and its gradients, with projections that return the dtype `projected`."""
    x, *weights = leaves = [tensor.clone().requires_grad_() for tensor in data]

    def projection(weight):
        return lambda x: nn.functional.linear(x.to(weight.dtype), weight).to(projected)

    linears = [projection(weight) for weight in weights]
    with torch.enable_grad():
        if owner is None:
            out = _formula(x, *linears, act_fn)
        else:
            layer = nn.Module.__new__(owner)
            nn.Module.__init__(layer)
            layer.gate_proj, layer.up_proj, layer.down_proj = linears
            layer.act_fn = act_fn
            out = owner.forward(layer, x)
        # A gradient that is there already shows in which order the others reach x.
        return out.detach(), *torch.autograd.grad((out, x * 1.0), leaves, (dy.to(out.dtype), other))
