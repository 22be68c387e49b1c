"""The product of gated MLPs, `activation(gate) * up`, in one kernel with the bits of eager's two operations."""

import functools
import math
import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass
from types import FunctionType
from typing import Callable, Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ..core import launch, operators, proof
from ..core.calls import Calls, Outside
from ..core.domain import (
    FLOAT_DTYPES,
    PLAIN_TYPES,
    allocator,
    are_ours,
    are_plain,
    at_trace_time,
    check_floating,
    have_strides,
    runs_kernels,
    under_transform,
)
from ..core.layout import Output, contiguous_strides, is_dense
from ..core.torch_internals import apply_of, dispatch_modes, forward_ad
from .activation import (
    BLOCK,
    GELU,
    GELU_TANH,
    NUM_WARPS,
    SILU,
    Activation,
    all_inputs,
    by_value,
    constant_of,
    forward_of,
    original_of,
    with_forward,
)
from .activation_layout import NOTHING, Layout

if launch.AVAILABLE:
    from ..kernels_src.activation import gated_activation_backward, gated_activation_forward

# Those with one path from the gate to the output.
ACTIVATIONS = {each.name: each for each in (SILU, GELU, GELU_TANH)}


def silu_and_mul(gate: torch.Tensor, up: Optional[torch.Tensor] = None) -> torch.Tensor:
    """The product of SwiGLU: bit for bit what `torch.nn.functional.silu(gate) * up` returns.

    Args:
        gate: `[..., d]`, any strides, any real floating dtype. Without `up`: `[..., 2 * d]`, gate and up side by side,
            for `torch.nn.functional.silu(gate[..., :d]) * gate[..., d:]`.
        up: `[..., d]` on the device of `gate`, any real floating dtype.

    Returns:
        A tensor of the shape, dtype and strides that eager returns.

    Raises:
        TypeError: an argument is no tensor or not of a real floating dtype.
        ValueError: the shapes cannot be broadcast, the last dimension is not even, or the tensors are on two devices.

    The kernel runs for fp32, fp16 and bf16 on CUDA if both have one shape, dtype and layout, dense or with equally
    spaced rows. Eager computes everything else.
    """
    return _gated(gate, up, SILU)


def gelu_tanh_and_mul(gate: torch.Tensor, up: Optional[torch.Tensor] = None) -> torch.Tensor:
    """The product of GeGLU: bit for bit what `torch.nn.functional.gelu(gate, approximate="tanh") * up` returns.

    Arguments, result, errors and where the kernel runs are those of `silu_and_mul`.
    """
    return _gated(gate, up, GELU_TANH)


def _gated(gate, up, activation):
    check_floating("gate", gate)
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2:
            raise ValueError(f"gate: expected a last dimension of even length, found shape {list(gate.shape)}")
        out = packed_replacement(gate, activation)
        return _packed_eager(activation, gate) if out is None else out
    check_floating("up", up)
    if up.device != gate.device:
        raise ValueError(f"up: expected device {gate.device} of gate, found {up.device}")
    out = replacement(gate, up, activation.forward, activation)
    if out is not None:
        return out
    # A missing dimension is broadcast too.
    if any(ours != theirs and 1 not in (ours, theirs) for ours, theirs in zip(gate.shape[::-1], up.shape[::-1])):
        raise ValueError(
            f"up: expected a shape that can be broadcast with {list(gate.shape)} of gate, found {list(up.shape)}"
        )
    return _eager(activation, gate, up)


# Eager


def _eager(activation, gate, up):
    return activation.forward(None, gate) * up


def _halves(packed):
    columns = packed.shape[-1] // 2
    return packed[..., :columns], packed[..., columns:]


def _packed_eager(activation, packed):
    return _eager(activation, *_halves(packed))


def _eager_gradients(activation, dy, gate, up):
    """Eager's gradients of gate and up."""
    (d_gate,) = activation.gradients(dy * up, gate)
    return d_gate, dy * activation.forward(None, gate)


def _packed_eager_gradient(activation, dy, packed):
    """The sum of eager's two gradients of the packed tensor, each with zeros in the other's half.

    Adding the sum to another gradient has the same bits as adding both one after the other.
    """
    shape, columns = packed.shape, packed.shape[-1] // 2
    d_gate, d_up = _eager_gradients(activation, dy, *_halves(packed))
    expand = torch.ops.aten.slice_backward
    return expand(d_up, shape, -1, columns, 2 * columns, 1) + expand(d_gate, shape, -1, 0, columns, 1)


# Calls


def _forward_block(activation) -> int:
    # 8192x14336, bf16, H200: more elements per thread bring GELU from 0.1700 to 0.1645 ms, and SiLU nothing.
    return BLOCK if activation is SILU else 2 * BLOCK


# At most: dy, gate, up and two gradients.
_TENSORS = 5


def _forward(activation, dtype, layout: Layout, device) -> launch.Launch:
    """The launch of the forward kernel, to be called with gate, out and up, or with the packed tensor and out."""
    name = constant_of(activation, device)
    constants = {"ACTIVATION": name, **layout.kind(dtype), "BLOCK": _forward_block(activation)}
    return layout.launch(gated_activation_forward, constants, NUM_WARPS, (dtype,) * _TENSORS, device)


def _backward(activation, dtype, layout: Layout, device, with_up: bool) -> launch.Launch:
    """The launch of the backward kernel: to be called with dy, gate, d_gate, up and, if `with_up`, d_up.

    A packed one is called with dy, the packed tensor and its gradient.
    """
    name = constant_of(activation, device)
    constants = {"ACTIVATION": name, "D_UP": with_up, **layout.kind(dtype), "BLOCK": BLOCK}
    return layout.launch(gated_activation_backward, constants, NUM_WARPS, (dtype,) * _TENSORS, device)


@dataclass(eq=False)
class _Forward(launch.UnaryCall):
    """A call without gradients; `out` is for a decoder layer's replay."""

    out: Output

    def __call__(self, gate, up):
        out = self.empty()
        if self.launch is not None:
            self.launch.call_3(gate, out, up)
        return out


@dataclass(eq=False)
class _OfUpAndGate:
    """The same in the operator's order."""

    call: _Forward

    def __call__(self, up, gate):
        return self.call(gate, up)

    @property
    def into(self) -> Optional[Callable[..., None]]:
        launch = self.call.launch
        return launch and (lambda up, gate, out: launch.call_3(gate, out, up))


@dataclass(eq=False)
class _Training:
    """A call with gradients."""

    activation: Activation
    forward: _Forward

    def __call__(self, gate, up):
        return _apply(self, up, gate)


class _PackedTraining(_Training):
    def __call__(self, packed):
        return _apply_packed(self, packed)


@dataclass(eq=False)
class _Backward:
    """The gradients of a call; up's only if `empty_up` is given."""

    launch: launch.Launch
    empty_gate: Callable[[], torch.Tensor]
    empty_up: Optional[Callable[[], torch.Tensor]]

    def __call__(self, dy, gate, up):
        d_gate = self.empty_gate()
        if self.empty_up is None:
            self.launch.call_4(dy, gate, d_gate, up)
            return d_gate, None
        d_up = self.empty_up()
        self.launch.call_5(dy, gate, d_gate, up, d_up)
        return d_gate, d_up

    def of_up_and_gate(self, dy, up, gate):
        d_gate, d_up = self(dy, gate, up)
        return d_up, d_gate


# What a proof verifies.
_OUTPUT, _BOTH, _GATES = "output", "gradients", "gate's gradient"


def replacement(gate: torch.Tensor, up: torch.Tensor, subject, activation: Activation) -> Optional[torch.Tensor]:
    """The product of an activation layer's output and `up`, from the kernel; None where the caller must compute it.

    Args:
        gate: the activation layer's input.
        subject: the activation layer's original forward, or `(forward, name, value)` if that reads an attribute.
        activation: the layer's formula.
    """
    if is_dynamo_compiling():
        return _compiled(gate, up, subject, activation)
    needs_grad = is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    recent = _calls.recent.get(subject)
    if recent is not None:
        same, computed, grad, compute = recent
        if (
            have_strides(gate, up)
            and same(gate, up)
            and computed is activation
            and grad is needs_grad
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return compute(gate, up)
    if not are_ours(gate, up, needs_grad):
        return proof.record_refusal(product_of(forward_of(subject)), proof.NOT_PLAIN)
    call = call_of(gate, up, subject, activation, needs_grad)
    return _calls.run(subject, call, (activation, needs_grad), (gate, up))


def call_of(gate, up, subject, activation: Activation, needs_grad: bool):
    """The recorded call for these tensors; None if the caller must compute the product."""
    value = by_value(subject)
    needs = needs_grad and gate.requires_grad, needs_grad and up.requires_grad
    original = product_of(forward_of(subject))
    return _calls.find(original, (value, activation, needs), (gate, up), value, activation, needs)


def product_is_ours(gate: torch.Tensor, up: torch.Tensor, subject, activation: Activation) -> bool:
    """Whether `replacement` would compute this product."""
    needs_grad = is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    return are_ours(gate, up, needs_grad) and call_of(gate, up, subject, activation, needs_grad) is not None


def product(gate: torch.Tensor, up: torch.Tensor, subject, activation: Activation) -> torch.Tensor:
    """`replacement`, or eager's product where no kernel computes it."""
    out = replacement(gate, up, subject, activation)
    return _eager(activation, gate, up) if out is None else out


def packed_replacement(packed: torch.Tensor, activation: Activation) -> Optional[torch.Tensor]:
    """`replacement` of both halves of a packed tensor, for the activation's own function."""
    if is_dynamo_compiling():
        return _compiled(*_halves(packed), activation.forward, activation)
    needs_grad = is_grad_enabled() and packed.requires_grad
    recent = _packed_calls.recent.get(activation)
    if recent is not None:
        same, grad, compute = recent
        if (
            type(packed) in PLAIN_TYPES
            and not packed.is_nested
            and same(packed)
            and grad is needs_grad
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return compute(packed)
    original = product_of(activation.forward)
    if not are_ours(packed, packed, needs_grad):
        return proof.record_refusal(original, proof.NOT_PLAIN)
    call = _packed_calls.find(original, (activation, needs_grad), (packed,), activation, needs_grad)
    return _packed_calls.run(activation, call, (needs_grad,), (packed,))


def _check(gate, up) -> None:
    """Raises Outside if no kernel takes such tensors."""
    if gate.dtype not in FLOAT_DTYPES or not runs_kernels(gate.device):
        raise Outside(f"gate {gate.dtype} on {gate.device}")
    if (up.dtype, up.shape, up.device) != (gate.dtype, gate.shape, gate.device):
        shape = ", of another shape" if up.shape != gate.shape else ""
        raise Outside(f"up {up.dtype} on {up.device}, gate {gate.dtype}{shape}")


def _resolve(gate, up, subject, activation, needs):
    _check(gate, up)
    if needs == (False, True):  # Eager does not save the gate then.
        raise Outside("only up needs a gradient")
    gradients = {(False, False): None, (True, False): _GATES, (True, True): _BOTH}[needs]
    # An empty tensor needs no layout.
    layout = Layout.of(gate, up) if gate.numel() else NOTHING
    return _resolved(subject, activation, gate, up, layout, gradients)


def _resolve_packed(packed, activation, needs_grad):
    gate, up = _halves(packed)
    _check(gate, up)
    layout = Layout.of_packed(packed) if gate.numel() else NOTHING
    gradients = _BOTH if needs_grad else None
    return _resolved(activation.forward, activation, gate, up, layout, gradients, packed=True)


def _resolved(subject, activation, gate, up, layout, gradients, packed=False):
    def forward(bound):
        return launch.UnaryCall(bound, out.empty) if packed else _Forward(bound, out.empty, out)

    out = Output.of(functools.partial(_eager, activation), gate, up)
    if layout is NOTHING:
        if gradients:
            raise Outside("gradients of an empty tensor")
        return forward(None)
    if layout is None:
        raise Outside("gate and up do not have the same layout, dense or with equally spaced rows")
    if not layout.fits(gate.shape, out.strides, gate.stride()) or layout.programs(BLOCK) > launch.MAX_PROGRAMS:
        raise Outside("gate and up are too large, or eager's product has another memory order")
    kind = tuple(layout.kind(gate.dtype).values())
    for what in (_OUTPUT, gradients):
        if what and not _proved(subject, activation, gate.dtype, kind, gate.device, what):
            return None
    call = forward(_forward(activation, gate.dtype, layout, gate.device))
    training = _PackedTraining if packed else _Training
    return training(activation, call) if gradients else call


_calls, _packed_calls = Calls(_resolve), Calls(_resolve_packed)


def gradients(
    activation: Activation, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, with_up: bool
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Eager's gradients of gate and, if `with_up`, of up: from the kernel if dy has their layout."""
    recent = _gradient_calls.recent.get(activation)
    if recent is not None:
        same, both, compute = recent
        if (
            have_strides(dy, gate)
            and have_strides(up, up)
            and same(dy, gate, up)
            and both is with_up
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return compute(dy, gate, up)
    if are_plain(dy, gate) and are_plain(up, up):
        facts, tensors = (activation, with_up), (dy, gate, up)
        call = _gradient_calls.find(product_of(activation.forward), facts, tensors, *facts)
        if call is not None:
            return _gradient_calls.run(activation, call, (with_up,), tensors)
    return _eager_gradients(activation, dy, gate, up)


def _resolve_gradients(dy, gate, up, activation, with_up):
    _check(gate, up)
    layout = Layout.of(gate, up) if gate.numel() else None
    _check_gradients(layout, dy, gate)
    formula = functools.partial(_eager_gradients, activation)
    outputs = [Output.of(lambda *tensors, which=which: formula(*tensors)[which], dy, gate, up) for which in range(2)]
    _check_gradients(layout, dy, gate, *[out.strides for out in outputs])
    empty_gate, empty_up = (out.empty for out in outputs)
    launch = _backward(activation, gate.dtype, layout, gate.device, with_up)
    return _Backward(launch, empty_gate, empty_up if with_up else None)


def _check_gradients(layout: Optional[Layout], dy, gate, *strides) -> None:
    """Raises Outside unless dy, and gradients with these strides, have the layout of gate and up."""
    if layout is None or dy.dtype != gate.dtype or not is_dense(dy.shape, dy.stride()):
        raise Outside("gradients do not have the layout of gate and up")
    if not all(layout.fits(dy.shape, each, gate.stride()) for each in (dy.stride(), *strides)):
        raise Outside("gradients do not have the layout of gate and up")


def packed_gradient(activation: Activation, dy: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Eager's gradient of a packed tensor: from the kernel if dy's rows have the tensor's memory order."""
    recent = _packed_gradient_calls.recent.get(activation)
    if recent is not None:
        same, compute = recent
        if have_strides(dy, packed) and same(dy, packed) and forward_ad._current_level < 0 and not dispatch_modes():
            return compute(dy, packed)
    if are_plain(dy, packed):
        call = _packed_gradient_calls.find(product_of(activation.forward), (activation,), (dy, packed), activation)
        if call is not None:
            return _packed_gradient_calls.run(activation, call, (), (dy, packed))
    return _packed_eager_gradient(activation, dy, packed)


def _resolve_packed_gradient(dy, packed, activation):
    _check(*_halves(packed))
    layout = Layout.of_packed(packed) if packed.numel() else None
    # Eager adds to contiguous zeros of the whole shape, so the rows must follow the order of dimensions.
    _check_gradients(layout, dy, packed, contiguous_strides(dy.shape))
    bound = _backward(activation, packed.dtype, layout, packed.device, with_up=True)
    empty = allocator(packed.shape, contiguous_strides(packed.shape), packed.dtype, packed.device)
    return launch.BinaryCall(bound, empty)


_gradient_calls, _packed_gradient_calls = Calls(_resolve_gradients), Calls(_resolve_packed_gradient)


class GatedActivation(torch.autograd.Function):
    """`up` comes first, since eager's graph reaches it first; one tensor may be the source of both."""

    @staticmethod
    def forward(ctx, call, up, gate):
        ctx.save_for_backward(gate, up)
        ctx.set_materialize_grads(False)
        ctx.activation = call.activation
        return _eager(call.activation, gate, up) if dispatch_modes() else call.forward(gate, up)

    @staticmethod
    def backward(ctx, dy):
        if dy is None:  # The output was unused, so its gradient is undefined, which differs from zero.
            return None, None, None
        gate, up = ctx.saved_tensors
        if is_grad_enabled():  # Double backward: the gradients must be differentiable.
            d_gate, d_up = _eager_gradients(ctx.activation, dy, gate, up)
        else:
            d_gate, d_up = gradients(ctx.activation, dy, gate, up, ctx.needs_input_grad[1])
        return None, d_up, d_gate


_apply = apply_of(GatedActivation)


class PackedGatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, packed):
        ctx.save_for_backward(packed)
        ctx.set_materialize_grads(False)
        ctx.activation = call.activation
        return _packed_eager(call.activation, packed) if dispatch_modes() else call.forward(packed)

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return None, None
        (packed,) = ctx.saved_tensors
        function = _packed_eager_gradient if is_grad_enabled() else packed_gradient
        return None, function(ctx.activation, dy, packed)


_apply_packed = apply_of(PackedGatedActivation)


# Proof


_products: MutableMapping[Callable, FunctionType] = weakref.WeakKeyDictionary()


def product_of(forward: Callable) -> FunctionType:
    """A function that stands for `forward(gate) * up` in reports and warnings. It is never called."""
    product = _products.get(forward)
    if product is None:

        def product(gate, up): ...

        product.__qualname__ = f"{forward.__qualname__}(gate) * up"
        _products[forward] = product
    return product


def _proved(subject, activation, dtype, kind, device, what) -> bool:
    comparisons = _comparisons if what == _OUTPUT else functools.partial(_gradient_comparisons, with_up=what == _BOTH)
    packed, *_ = kind
    return proof.kernel_is_proved(
        ("gated activation", activation, what, subject, dtype, kind, device),
        proof.Subject(
            product_of(forward_of(subject)),
            device,
            f"{dtype}, {what}{', packed' * packed}",
            f"{activation.name}(gate) * up",
        ),
        functools.partial(comparisons, subject, activation, dtype, kind, device),
    )


# Rows end within a block. Together they hold every 16-bit number.
_ROWS, _COLUMNS = 32, 2048


def _proof_inputs(dtype, kind, device):
    """`(layout, packed, gate, up)`; the gates have every 16-bit pattern."""
    packed, one_row, unit = kind
    rows, columns = (1, _ROWS * _COLUMNS) if one_row else (_ROWS, _COLUMNS)
    numbers = all_inputs(dtype, device)
    shuffled = numbers[torch.randperm(len(numbers), device=device, generator=proof.generator(device, 3))]
    # Rows are `unit` elements longer, so that no larger access divides them.
    both = torch.ones(rows, 2 * (columns + unit), dtype=dtype, device=device)
    gate, up = _halves(both)
    gate[:, :columns], up[:, :columns] = numbers.view(rows, columns), shuffled.view(rows, columns)
    if one_row:
        gate, up = gate.contiguous(), up.clone()
        return Layout(1, gate.numel(), gate.numel()), both, gate, up
    if not packed:  # As the gate does, it begins at a multiple of 16 bytes.
        up = torch.ones_like(both)[:, : columns + unit].copy_(up)
    return Layout(rows, columns + unit, 2 * (columns + unit), (0,), packed), both, gate, up


def _comparisons(subject, activation, dtype, kind, device):
    layout, both, gate, up = _proof_inputs(dtype, kind, device)
    original = original_of(subject)
    # With up = 1 the output is the activation itself.
    for _ in range(2):
        out = torch.full(gate.shape, math.nan, dtype=dtype, device=device)
        tensors = (both, out) if layout.packed else (gate, out, up)
        _forward(activation, dtype, layout, device)(*tensors)
        yield "the output", out, original(gate) * up
        up.fill_(1.0)


def _gradient_comparisons(subject, activation, dtype, kind, device, with_up):
    layout, both, gate, up = _proof_inputs(dtype, kind, device)
    make = functools.partial(proof.normal, proof.generator(device, 4), gate.shape)
    launch = _backward(activation, dtype, layout, device, with_up)
    original = original_of(subject)
    for _ in range(2):
        dy = make().to(dtype)
        inputs = [
            tensor.clone().requires_grad_() for tensor in ((both,) if layout.packed else (gate, up)[: 1 + with_up])
        ]
        found = [torch.full(tensor.shape, math.nan, dtype=dtype, device=device) for tensor in inputs]
        with torch.enable_grad():
            gates, ups = _halves(*inputs) if layout.packed else (*inputs, up)[:2]
            expected = torch.autograd.grad(original(gates) * ups, inputs, dy)
        if layout.packed:
            launch(dy, both, *found)
        else:
            launch(dy, gate, found[0], up, *found[1:])
        names = ("the packed gradient",) if layout.packed else ("the gate's gradient", "up's gradient")
        yield from zip(names, found, expected)
        up.copy_(make())


# torch.compile


def _find(name, up, gate):
    activation = ACTIVATIONS[name]
    call = call_of(gate, up, activation.forward, activation, False)
    return None if call is None else _OfUpAndGate(call)


@operators.register("gated_activation", _find, into=operators.always)
def _gated_activation_op(name: str, up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return _eager(ACTIVATIONS[name], gate, up)


def _find_gradients(name, dy, up, gate):
    activation = ACTIVATIONS[name]
    facts = activation, True
    call = _gradient_calls.find(product_of(activation.forward), facts, (dy, gate, up), *facts)
    return None if call is None else call.of_up_and_gate


@operators.register("gated_activation_backward", _find_gradients)
def _gated_activation_backward_op(
    name: str, dy: torch.Tensor, up: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # A graph has this operator only if the proof passed with the forward operator.
    d_gate, d_up = _eager_gradients(ACTIVATIONS[name], dy, gate, up)
    return d_up, d_gate


operators.differentiate(_gated_activation_op, _gated_activation_backward_op)


@at_trace_time
def _proved_for_compile(subject, activation_name, dtype, device, training) -> bool:
    if dtype not in FLOAT_DTYPES or not runs_kernels(device) or under_transform():
        return False
    units = [1 << power for power in range(4) if dtype.itemsize << power <= 16]
    return all(
        _proved(
            by_value(with_forward(subject)), ACTIVATIONS[activation_name], dtype, (False, one_row, unit), device, what
        )
        for what in (_OUTPUT, _BOTH)[: 1 + training]
        for one_row in (False, True)
        for unit in units
    )


def _compiled(gate, up, subject, activation):
    """`replacement` while torch.compile traces: the registered op, or None to trace the original formula."""
    if type(gate) is not torch.Tensor or type(up) is not torch.Tensor:
        return None
    if up.dtype != gate.dtype or up.shape != gate.shape:
        return None
    training = is_grad_enabled() and (gate.requires_grad or up.requires_grad)
    if not _proved_for_compile(subject, activation.name, gate.dtype, gate.device, training):
        return None
    return _gated_activation_op(activation.name, up, gate)
