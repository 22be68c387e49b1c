"""Gated MLPs: recognises classes that compute `down_proj(act_fn(gate_proj(x)) * up_proj(x))`, and their activations.

In packed ones one linear layer, `gate_up_proj`, computes gate and up, the two halves of its output.
"""

import functools
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Optional

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ..core import inspection, proof
from ..core.calls import UNSEEN, remember
from ..core.declarations import WARMUP, Warmup
from ..core.domain import FLOAT_DTYPES, NO_STATE, at_trace_time, identity_hook, is_bare, runs_kernels, under_transform
from ..ops.activation import Activation, by_value, forward_of, original_of, reads_only_attributes, with_forward
from ..ops.gated_activation import ACTIVATIONS, product_is_ours, product_of

# Attributes of activation layers that their forward reads.
_ATTRIBUTES = ("act", "approximate", "inplace")
WARMUP.update(dict.fromkeys(("LlamaMLP", "GeGLUMLP"), Warmup(left_out=("gate_proj", "up_proj", "down_proj"))))
# The halves of several rows are not dense.
WARMUP["Phi3MLP"] = Warmup(lambda *_: [(1, 4096), (16, 4096)], left_out=("gate_up_proj", "down_proj"))


def is_function(act) -> bool:
    """Whether an activation layer's `act` is a function of its arguments alone: a proof can call it without the layer.

    Methods (formulas written in Python) and closures, whose contents may change and tables would keep alive, are not.
    """
    if type(act) is functools.partial:
        given = (*act.args, *act.keywords.values())
        return all(type(value) in inspection.CONSTANTS for value in given) and is_function(act.func)
    return type(act) is BuiltinFunctionType or (type(act) is FunctionType and not act.__closure__)


def attributes_of(act_fn: nn.Module) -> list:
    """The values of the activation layer's attributes that decide its formula, None for those that it lacks."""
    return [*map(act_fn.__dict__.get, _ATTRIBUTES)]


def subject_of(act_fn: Optional[nn.Module], whatever_hooks: bool = False):
    """The subject of an activation layer's calls: its forward, or `(forward, name, value)` if that reads an attribute; its
    class stands for the forward while torch.compile traces.

    None if a call does more than that, which a kernel would omit. `whatever_hooks`: ignore hooks.
    """
    if act_fn is None or not is_bare(act_fn, whatever_hooks):
        return None
    # TorchDynamo checks a module in one step while its guards name no attribute of its class.
    forward = type(act_fn) if is_dynamo_compiling() else type(act_fn).forward
    for name, value in zip(_ATTRIBUTES, attributes_of(act_fn)):
        if value is not None:
            if name == "act" and not is_function(value) or name == "inplace" and value:
                return None
            return forward, name, value
    return forward


def activation_of(owner: type, subject, x: torch.Tensor, state: Mapping = NO_STATE) -> Optional[Activation]:
    """The activation with which `owner.forward` computes the formula if the `act_fn` is `subject`; None if it does not.

    `state` is the module's `__dict__`.
    """
    if is_dynamo_compiling():
        name = _activation_for_compile(owner, subject, x.dtype, x.device)
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
    if not isinstance(x, torch.Tensor):  # torch.fx traces with proxies.
        return None
    return _recognize(key, owner, subject, x.dtype, x.device)


@at_trace_time
def _activation_for_compile(owner, subject, dtype, device) -> Optional[str]:
    if not runs_kernels(device) or under_transform():
        return None
    # As `get_device` counts, in the key of calls that are not compiled.
    number = -1 if device.type == "cpu" else device.index or 0
    subject = with_forward(subject)
    activation = _recognize((subject, dtype, number), owner, subject, dtype, device)
    return None if activation is None else activation.name


def _recognize(key, owner, subject, dtype, device) -> Optional[Activation]:
    subject = by_value(subject)
    original = forward_of(subject)
    functions, known = inspection.functions_of(owner), inspection.code_of(owner).memo
    # A subject that depends on more may own a tensor, which tables must not keep alive.
    if functions is None or not reads_only_attributes(subject):
        return proof.record_unreadable_forward(owner)
    if dtype not in FLOAT_DTYPES or not runs_kernels(device):
        proof.record_refusal(owner.forward, f"x {dtype} on {device}")
        return remember(known, key, None)
    verdict_key = ("formula of a gated MLP", functions, subject, dtype, device)
    candidates = {
        activation: functools.partial(_formulas, owner, subject, activation, dtype, device)
        for activation in ACTIVATIONS.values()
    }
    where = f"{dtype}, {original.__qualname__}"
    refuse = functools.partial(_refuse_parts, owner, dtype)
    activation = proof.match_formula(
        verdict_key, proof.Subject(owner.forward, device, where), candidates, refuse=refuse
    )
    if proof.verdict_on(verdict_key) is None:
        return None
    if activation is not None:
        # Reports list it for the activation layer as well, which is not called.
        for forward in (owner.forward, original):
            proof.record_dependency(forward, product_of(original))
    return remember(known, key, activation)


class _Saved(torch.autograd.Function):
    """Saves tensors as a function of `gate` and `up`; its output is not used."""

    @staticmethod
    def forward(ctx, gate, up, *tensors):
        ctx.save_for_backward(*tensors)
        return gate.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        return (None,) * len(ctx.needs_input_grad)


def hooked_product(act_fn: nn.Module, gate: torch.Tensor, project_up, subject, activation) -> torch.Tensor:
    """`act_fn(gate) * project_up()` in a checkpoint, with the hooks on the module's call.

    Hooks may exist in only one of the block's two computations, and both must save the same tensors. The checkpoint
    gets the tensors that the kernel saves (those of `act_fn` if no kernel takes `up`), not the ones saved here.
    """
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    # Hooks on act_fn run before up is computed, as in eager.
    with torch.autograd.graph.saved_tensors_hooks(keep, identity_hook):
        activated = act_fn(gate)
    up = project_up()
    if not product_is_ours(gate, up, subject, activation):
        _Saved.apply(gate, up, *saved)
        return activated * up
    with torch.autograd.graph.saved_tensors_hooks(identity_hook, identity_hook):
        product = activated * up
    _Saved.apply(gate, up, gate, up)
    return product


def is_packed(owner: type) -> bool:
    """Whether `owner.forward` reads `gate_up_proj`, one linear layer for gate and up."""
    functions = inspection.functions_of(owner)
    return bool(functions) and "gate_up_proj" in functions[0].__code__.co_names


def _formula(x, gate_proj, up_proj, down_proj, act_fn):
    return down_proj(act_fn(gate_proj(x)) * up_proj(x))


def packed_formula(x, gate_up_proj, down_proj, act_fn):
    gate, up = gate_up_proj(x).chunk(2, dim=-1)
    return down_proj(up * act_fn(gate))


def _projections(owner, hidden_size: int, intermediate_size: int) -> dict[str, tuple[int, int]]:
    """Shapes of the weights of an MLP, in the order of the formula's arguments."""
    if is_packed(owner):
        inner = {"gate_up_proj": (2 * intermediate_size, hidden_size)}
    else:
        inner = dict.fromkeys(("gate_proj", "up_proj"), (intermediate_size, hidden_size))
    return {**inner, "down_proj": (hidden_size, intermediate_size)}


def _refuse_parts(owner, dtype) -> None:
    """Parts of an MLP may change the output's bits, too: a product of fewer tokens may take another kernel."""
    hidden_size = 1 << 14
    shapes = _projections(owner, hidden_size, 1 << 16)
    compute = functools.partial(_output_of, owner, torch.sin, dtype, [*shapes])
    proof.refuse_parts(compute, [(hidden_size, dtype)], [(shape, dtype) for shape in shapes.values()])


def _formulas(owner, subject, activation, dtype, device):
    generator = proof.generator(device, seed=5)
    formula = packed_formula if is_packed(owner) else _formula
    rows, hidden_size, intermediate_size = 64, 16, 24
    shapes = {"x": (rows, hidden_size), **_projections(owner, hidden_size, intermediate_size)}
    data = {name: proof.normal(generator, shape).to(dtype) for name, shape in shapes.items()}
    gradients = [proof.normal(generator, rows, hidden_size).to(dtype) for _ in range(2)]
    # Under autocast the projections return another dtype than x's.
    for projected in dict.fromkeys((dtype, torch.float16, torch.bfloat16)):
        # `sin`, which no class has as its activation, shows that the forward calls the module's `act_fn`.
        for original, ours in (
            (original_of(subject), functools.partial(activation.forward, None)),
            (torch.sin, torch.sin),
        ):
            results = [
                _run(compute, act_fn, data, projected, *gradients)
                for compute, act_fn in ((owner, original), (formula, ours))
            ]
            names = ("the output", *(f"the gradient of {name}" for name in data))
            for what, expected, found in zip(names, *results):
                yield what, found, expected


def _run(compute, act_fn, data, projected, dy, other):
    """The output of a class's forward, or of a formula, and its gradients; projections return the dtype `projected`."""
    x, *weights = leaves = [tensor.clone().requires_grad_() for tensor in data.values()]
    with torch.enable_grad():
        out = _output_of(compute, act_fn, projected, [*data][1:], x, *weights)
        # The gradient of a second output, which reaches x first, shows the order of the others.
        return out.detach(), *torch.autograd.grad((out, x * 1.0), leaves, (dy.to(out.dtype), other))


def _output_of(compute, act_fn, projected, names, x, *weights) -> torch.Tensor:
    """The output of `_run`; `names`: of the projections."""

    def projection(weight):
        return lambda x: nn.functional.linear(x.to(weight.dtype), weight).to(projected)

    linears = dict(zip(names, map(projection, weights)))
    if not isinstance(compute, type):
        return compute(x, *linears.values(), act_fn)
    layer = nn.Module.__new__(compute)
    nn.Module.__init__(layer)
    # Packed MLPs call the activation `activation_fn`.
    for name, each in {**linears, "act_fn": act_fn, "activation_fn": act_fn}.items():
        setattr(layer, name, each)
    return compute.forward(layer, x)
