"""Activation functions that return eager's bits, whether eager runs one ATen kernel or several operations."""

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Callable, Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ..core import inspection, launch, operators, plans, proof
from ..core.calls import Calls, Outside
from ..core.declarations import TUNING
from ..core.domain import (
    FLOAT_DTYPES,
    PLAIN_TYPES,
    are_ours,
    are_plain,
    at_trace_time,
    check_floating,
    gradients_apart,
    have_strides,
    is_autocast,
    runs_kernels,
    under_transform,
)
from ..core.layout import Output, is_dense, is_same_order
from ..core.paths import Backward
from ..core.torch_internals import apply_of, dispatch_modes, forward_ad
from .activation_layout import Layout, access_unit

if launch.AVAILABLE:
    from ..kernels_src.activation import activation_backward, activation_forward


def silu(input: torch.Tensor) -> torch.Tensor:
    """Sigmoid linear unit, `input / (1 + exp(-input))`: bit for bit what `torch.nn.functional.silu` returns.

    Args:
        input: any shape and strides, any real floating dtype.

    Returns:
        A tensor of the shape, dtype and strides that eager returns.

    Raises:
        TypeError: `input` is no tensor or not of a real floating dtype.

    The kernel runs for fp32, fp16 and bf16 on CUDA if the input is dense in memory or has equally spaced rows. Eager
    computes everything else.
    """
    return _activate(input, SILU)


def gelu(input: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Gaussian error linear unit: bit for bit what `torch.nn.functional.gelu` returns.

    `0.5 * input * (1 + erf(input / sqrt(2)))`, or with `approximate="tanh"`
    `0.5 * input * (1 + tanh(sqrt(2 / pi) * (input + 0.044715 * input**3)))`.

    Args:
        input: any shape and strides, any real floating dtype.
        approximate: "none" or "tanh".

    Returns:
        A tensor of the shape, dtype and strides that eager returns.

    Raises:
        TypeError: `input` is no tensor or not of a real floating dtype.
        ValueError: `approximate` is neither "none" nor "tanh".

    The kernel runs where that of `silu` does.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate: expected "none" or "tanh", found {approximate!r}')
    return _activate(input, GELU if approximate == "none" else GELU_TANH)


def new_gelu(input: torch.Tensor) -> torch.Tensor:
    """`0.5 * input * (1 + tanh(sqrt(2 / pi) * (input + 0.044715 * input**3)))`, rounded after every operation.

    Bit for bit what transformers' `NewGELUActivation` returns. Input, result, errors and where the kernel runs are
    those of `silu`, but eager computes 16-bit inputs under autocast, which computes the cube in fp32.
    """
    return _activate(input, NEW_GELU)


def fast_gelu(input: torch.Tensor) -> torch.Tensor:
    """`0.5 * input * (1 + tanh(input * sqrt(2 / pi) * (1 + 0.044715 * input * input)))`, rounded after every operation.

    Bit for bit what transformers' `FastGELUActivation` returns. Input, result, errors and where the kernel runs are
    those of `silu`.
    """
    return _activate(input, FAST_GELU)


def quick_gelu(input: torch.Tensor) -> torch.Tensor:
    """`input * sigmoid(1.702 * input)`, rounded after every operation.

    Bit for bit what transformers' `QuickGELUActivation` returns. Input, result, errors and where the kernel runs are
    those of `silu`.
    """
    return _activate(input, QUICK_GELU)


def _activate(input, activation):
    check_floating("input", input)
    out = replacement(input, activation.forward, activation)
    return activation.forward(None, input) if out is None else out


# Eager: the forward of transformers' layers, and the input's gradients, one for each path


@dataclass(frozen=True, eq=False)
class Activation:
    """An activation function, as eager computes it.

    Attributes:
        name: as in the kernels' constant ACTIVATION.
        forward: `forward(module, input)`, the layer's forward.
        gradients: `gradients(dy, input)`, the input's gradients in the order of arrival, one for each path to the
            output. Autograd adds them one by one to the input's other gradients, never their sum.
        paths: the number of these gradients.
    """

    name: str
    forward: Callable
    gradients: Callable
    paths: int = 1


def _silu(module, input):
    return torch.nn.functional.silu(input)


def _silu_gradients(dy, x):
    if is_grad_enabled() and x.requires_grad:  # Double backward: ATen then has another formula.
        return gradients_apart(torch.nn.functional.silu, (x,), dy)
    return (torch.ops.aten.silu_backward(dy, x),)


def _gelu(module, input):
    return torch.nn.functional.gelu(input)


def _gelu_gradients(dy, x, approximate="none"):
    return (torch.ops.aten.gelu_backward(dy, x, approximate=approximate),)


def _gelu_tanh(module, input):
    return torch.nn.functional.gelu(input, approximate="tanh")


_SQRT_2_PI = math.sqrt(2.0 / math.pi)


def _new_gelu(module, input):
    return 0.5 * input * (1.0 + torch.tanh(_SQRT_2_PI * (input + 0.044715 * torch.pow(input, 3.0))))


def _new_gelu_gradients(dy, x):
    # The kernel ran in the forward pass, so that was outside of autocast; the backward pass may be inside.
    with torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False):
        tanh = torch.tanh(_SQRT_2_PI * (x + 0.044715 * torch.pow(x, 3.0)))
    d_half, d_tanh = dy * (1.0 + tanh), dy * (0.5 * x)
    d_inner = torch.ops.aten.tanh_backward(d_tanh, tanh) * _SQRT_2_PI
    return d_inner, (d_inner * 0.044715) * (3.0 * x.pow(2.0)), d_half * 0.5


def _fast_gelu(module, input):
    return 0.5 * input * (1.0 + torch.tanh(input * 0.7978845608 * (1.0 + 0.044715 * input * input)))


def _fast_gelu_gradients(dy, x):
    scaled, linear = x * 0.7978845608, 0.044715 * x
    slope = 1.0 + linear * x
    tanh = torch.tanh(scaled * slope)
    d_half, d_tanh = dy * (1.0 + tanh), dy * (0.5 * x)
    d_inner = torch.ops.aten.tanh_backward(d_tanh, tanh)
    d_scaled, d_slope = d_inner * slope, d_inner * scaled
    d_linear = d_slope * x
    return d_slope * linear, d_linear * 0.044715, d_scaled * 0.7978845608, d_half * 0.5


def _quick_gelu(module, input):
    return input * torch.sigmoid(1.702 * input)


def _quick_gelu_gradients(dy, x):
    sigmoid = torch.sigmoid(1.702 * x)
    return dy * sigmoid, torch.ops.aten.sigmoid_backward(dy * x, sigmoid) * 1.702


SILU = Activation("silu", _silu, _silu_gradients)
GELU = Activation("gelu", _gelu, _gelu_gradients)
GELU_TANH = Activation("gelu_tanh", _gelu_tanh, functools.partial(_gelu_gradients, approximate="tanh"))
NEW_GELU = Activation("new_gelu", _new_gelu, _new_gelu_gradients, paths=3)
FAST_GELU = Activation("fast_gelu", _fast_gelu, _fast_gelu_gradients, paths=4)
QUICK_GELU = Activation("quick_gelu", _quick_gelu, _quick_gelu_gradients, paths=2)
_ACTIVATIONS = {each.name: each for each in (SILU, GELU, GELU_TANH, NEW_GELU, FAST_GELU, QUICK_GELU)}


# An input, and its GELU by the `erff` of CUDA 13.2. Earlier versions' gives -0.11326064, which is six numbers away.
_ERF_INPUT, _GELU_OF_CUDA_13_2 = -1.3984375, -0.11326068639755249


def constant_of(activation: Activation, device: torch.device) -> str:
    """The kernels' constant ACTIVATION: the activation's name, for GELU with the `erff` that eager has on this device.

    Raises Outside where that cannot be found out now, as during the capture of a CUDA graph.
    """
    if activation is not GELU or device.type != "cuda":
        return activation.name
    subject = proof.Subject(torch.nn.functional.gelu, device, "erf")
    found = proof.find_out(("gelu's erf", device), subject, functools.partial(_has_erf_of_cuda_13_2, device))
    if found is None:
        raise Outside("GELU whose erf is not known")
    return "gelu_of_cuda_13_2" if found else GELU.name


def _has_erf_of_cuda_13_2(device):
    x = torch.tensor([_ERF_INPUT], dtype=torch.float32, device=device)
    return torch.nn.functional.gelu(x) == _GELU_OF_CUDA_13_2


def _autocast_changes(activation, input) -> bool:
    """Whether autocast computes a part of the activation in fp32: it does so for powers."""
    return activation is NEW_GELU and input.dtype != torch.float32 and is_autocast(input.device)


# Calls


BLOCK = 1024
NUM_WARPS = 4


@dataclass(frozen=True)
class ActivationPlan:
    """Elements and warps per program."""

    block: int = BLOCK
    num_warps: int = NUM_WARPS


TUNING.update({name + direction: ActivationPlan for name in _ACTIVATIONS for direction in ("", "_backward")})


def launch_plan(op: str, element_size: int, gpu: plans.Gpu = plans.UNKNOWN) -> ActivationPlan:
    """The tuned plan for an activation or its "_backward", or the default one."""
    return plans.tuned(ActivationPlan, gpu, op, None, 1, element_size) or ActivationPlan()


def _forward(activation, dtype, layout: Layout, device: torch.device) -> launch.Launch:
    """The launch of the forward kernel, to be called with input and out."""
    plan = launch_plan(activation.name, dtype.itemsize, plans.gpu(device))
    one_row, unit = layout.order is None, layout.unit(dtype)
    name = constant_of(activation, device)
    constants = {"ACTIVATION": name, "ONE_ROW": one_row, "UNIT": unit, "BLOCK": plan.block}
    return layout.launch(activation_forward, constants, plan.num_warps, (dtype,) * 2, device)


def _backward(activation, dtype, numel, device: torch.device, total: bool = True) -> launch.Launch:
    """The launch of the backward kernel, to be called with dy, input and its gradients: dense, with equal strides.

    Args:
        total: of the gradients' sum, instead of one for each path.
    """
    unit = access_unit(numel, numel, dtype)
    plan = launch_plan(f"{activation.name}_backward", dtype.itemsize, plans.gpu(device))
    name = constant_of(activation, device)
    constants = {"ACTIVATION": name, "SUM": total, "UNIT": unit, "BLOCK": plan.block}
    dtypes, programs = (dtype,) * (2 + activation.paths), -(-numel // plan.block)
    return launch.bind(activation_backward, constants, plan.num_warps, device, dtypes, programs, numel // unit)


@dataclass(eq=False)
class _Training:
    """A call with gradients."""

    activation: Activation
    forward: launch.UnaryCall

    def __call__(self, input):
        return _apply(self, *(input,) * self.activation.paths)


class _Backward(Backward):
    """The gradients of a call, one for each path."""

    def __call__(self, dy, input):
        return (self.total(dy, input),) if self.launch_paths is None else self.gradients(dy, input)[0]

    def total(self, dy, input) -> torch.Tensor:
        """The sum of the gradients, in their order."""
        dx = self.empty[0]()
        self.launch_sums.call_3(dy, input, dx)
        return dx

    def sums(self, dy, input):
        return (self.total(dy, input),)

    def along_paths(self, dy, input):
        dxs = tuple([self.empty[0]() for _ in range(self.paths)])
        self.launch_paths(dy, input, *dxs)
        return (dxs,)


def replacement(input: torch.Tensor, subject, activation: Activation) -> Optional[torch.Tensor]:
    """The layer's output from the kernel; None where the caller must compute it.

    Args:
        subject: the layer's original forward, or `(forward, name, value)` if that reads an attribute of the module.
        activation: the formula that the layer is expected to compute; the proof verifies it.
    """
    if is_dynamo_compiling():
        return _compiled(input, subject, activation)
    needs_grad = is_grad_enabled() and input.requires_grad
    recent = _calls.recent.get(subject)
    if recent is not None:
        same, computed, grad, compute = recent
        if (
            type(input) in PLAIN_TYPES
            and not input.is_nested
            and same(input)
            and computed is activation
            and grad is needs_grad
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return compute(input)
    original = forward_of(subject)
    if not are_ours(input, input, needs_grad):
        return proof.record_refusal(original, proof.NOT_PLAIN)
    if _autocast_changes(activation, input):
        return proof.record_refusal(original, "autocast, which computes powers in fp32")
    if not reads_only_attributes(subject):
        return proof.record_refusal(original, proof.HIDDEN_DEPENDENCY)
    value, facts = by_value(subject), (activation, needs_grad)
    call = _calls.find(original, (value, *facts), (input,), value, *facts)
    return _calls.run(subject, call, facts, (input,))


def with_forward(subject):
    """The subject with the forward of the class that stands for it while torch.compile traces."""
    if isinstance(subject, tuple):
        return with_forward(subject[0]), *subject[1:]
    return subject.forward if isinstance(subject, type) else subject


def by_value(subject):
    """The subject with a `functools.partial`, of which every module has its own, replaced by what it holds."""
    if not isinstance(subject, tuple):
        return subject
    forward, name, value = subject
    if isinstance(value, functools.partial):
        value = (value.func, value.args, tuple(sorted(value.keywords.items())))
    return forward, name, value


def forward_of(subject):
    return subject[0] if isinstance(subject, tuple) else subject


def original_of(subject):
    """A subject, returned by `by_value`, as a function of the input: the forward on a stand-in for the module."""
    if not isinstance(subject, tuple):
        return functools.partial(subject, None)
    forward, name, value = subject
    if isinstance(value, tuple):
        function, arguments, keywords = value
        value = functools.partial(function, *arguments, **dict(keywords))
    return functools.partial(forward, SimpleNamespace(**{name: value}))


def reads_only_attributes(subject) -> bool:
    """Whether the forward reads only the subject's attributes and calls no function that may be replaced."""
    forward = forward_of(subject)
    return inspection.reads_only_attributes(forward) and not inspection.helpers_of(forward)


def _resolve(x, subject, activation, needs_grad):
    if x.dtype not in FLOAT_DTYPES or not runs_kernels(x.device):
        raise Outside(f"input {x.dtype} on {x.device}")
    out = Output.of(functools.partial(activation.forward, None), x)
    if x.numel() == 0:
        if needs_grad:
            raise Outside("gradients of an empty tensor")
        return launch.UnaryCall(None, out.empty)
    layout = Layout.of(x, x)
    if layout is None:
        raise Outside("input is neither dense nor has equally spaced rows")
    kind = layout.order is None, layout.unit(x.dtype)
    block = launch_plan(activation.name, x.dtype.itemsize, plans.gpu(x.device)).block
    if layout.programs(block) > launch.MAX_PROGRAMS or not layout.fits(x.shape, out.strides, x.stride()):
        raise Outside("input is too large, or eager's output has another memory order")
    for of_gradients in (False, True)[: 1 + needs_grad]:
        if not _proved(subject, activation, x.dtype, kind, x.device, of_gradients):
            return None
    forward = launch.UnaryCall(_forward(activation, x.dtype, layout, x.device), out.empty)
    return _Training(activation, forward) if needs_grad else forward


_calls = Calls(_resolve)


def gradients(activation: Activation, dy: torch.Tensor, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`activation.gradients(dy, input)`: from the kernel if dy and input have the same strides."""
    recent = _gradient_calls.recent.get(activation)
    if recent is not None:
        same, compute = recent
        if have_strides(dy, input) and same(dy, input) and forward_ad._current_level < 0 and not dispatch_modes():
            return compute(dy, input)
    if are_plain(dy, input) and not _autocast_changes(activation, input):
        call = _gradient_calls.find(activation.forward, (activation,), (dy, input), activation)
        if call is not None:
            return _gradient_calls.run(activation, call, (), (dy, input))
    return activation.gradients(dy, input)


def _resolve_gradients(dy, x, activation):
    if not runs_kernels(x.device) or x.dtype not in FLOAT_DTYPES:
        raise Outside(f"input {x.dtype} on {x.device}")
    if dy.stride() != x.stride() or dy.dtype != x.dtype or not is_dense(x.shape, x.stride()) or x.numel() == 0:
        raise Outside("gradient and input do not have the same dense layout")
    out = Output.of(lambda dy, x: activation.gradients(dy, x)[0], dy, x)
    if not is_same_order(x.shape, x.stride(), out.strides):
        raise Outside("eager's gradient has another memory order than the input")
    count, layout = activation.paths, (x.shape, out.strides, x.dtype, x.device)
    launches = [
        _backward(activation, x.dtype, x.numel(), x.device, total) for total in (True, False)[: 1 + (count > 1)]
    ]
    return _Backward(launches[0], launches[1] if count > 1 else None, count, (layout,))


_gradient_calls = Calls(_resolve_gradients)


class Activate(torch.autograd.Function):
    """The input enters once for each of eager's paths from it."""

    @staticmethod
    def forward(ctx, call, input, *again):
        ctx.save_for_backward(input)
        ctx.set_materialize_grads(False)
        ctx.activation = call.activation
        return call.activation.forward(None, input) if dispatch_modes() else call.forward(input)

    @staticmethod
    def backward(ctx, dy):
        if dy is None:  # The output was unused, so its gradient is undefined, which differs from zero.
            return None, *(None,) * ctx.activation.paths
        (input,) = ctx.saved_tensors
        if is_grad_enabled():  # Double backward: the gradients must be differentiable.
            return None, *ctx.activation.gradients(dy, input)
        return None, *gradients(ctx.activation, dy, input)


_apply = apply_of(Activate)


# Proof


def _proved(subject, activation, dtype, kind, device, gradients=False) -> bool:
    """Whether the kernel of a kind is proved: `(one_row, unit)`, with accesses of `unit` elements."""
    what, comparisons = ("gradient", _gradient_comparisons) if gradients else ("output", _comparisons)
    if gradients:  # The backward kernel takes dense tensors only.
        _, kind = kind
    return proof.kernel_is_proved(
        ("activation", activation, what, subject, dtype, kind, device),
        proof.Subject(forward_of(subject), device, f"{dtype}, {what}", activation.name),
        functools.partial(comparisons, subject, activation, dtype, kind, device),
    )


def all_inputs(dtype, device):
    """All 65,536 inputs of 16 bits; for fp32 as many, in every binade."""
    bits = torch.arange(1 << 16, dtype=torch.int32, device=device)
    if dtype != torch.float32:
        return bits.to(torch.int16).view(dtype)
    low = torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=device, generator=proof.generator(device, 0))
    return ((bits << 16) | low).view(dtype)


def _comparisons(subject, activation, dtype, kind, device):
    one_row, unit = kind
    rows, columns = 256, 256
    padded = torch.zeros(rows, columns + unit, dtype=dtype, device=device)
    x = padded[:, :columns]
    x.copy_(all_inputs(dtype, device).view(rows, columns))
    if one_row:  # A whole number of blocks and `unit` elements more.
        x = torch.cat([x.flatten(), padded.new_ones(unit)])[None]
    expected = original_of(subject)(x)
    out = torch.full(x.shape, math.nan, dtype=dtype, device=device)
    _forward(activation, dtype, Layout.of(x, x), device)(x, out)
    yield "the output", out, expected


def _gradient_comparisons(subject, activation, dtype, unit, device):
    # A whole number of blocks and `unit` elements more.
    x = torch.cat([all_inputs(dtype, device), torch.ones(unit, dtype=dtype, device=device)]).requires_grad_()
    make = functools.partial(proof.normal, proof.generator(device, 1), x.shape)
    dy, other = make().to(dtype), make().to(dtype)
    total, *dxs = (torch.full(x.shape, math.nan, dtype=dtype, device=device) for _ in range(1 + activation.paths))
    _backward(activation, dtype, x.numel(), device)(dy, x.detach(), total)
    if activation.paths > 1:
        _backward(activation, dtype, x.numel(), device, total=False)(dy, x.detach(), *dxs)
    else:
        dxs = [total]
    with torch.enable_grad():
        original = original_of(subject)
        (alone,) = torch.autograd.grad(original(x), x, dy)
        # Another gradient of x shows how many the function sends, and in which order.
        (joined,) = torch.autograd.grad((original(x), x * 1.0), x, (dy, other))
    yield "the input's gradient", total, alone
    yield "the input's gradient with another", functools.reduce(torch.add, dxs, other), joined


# torch.compile


def _find(name, input):
    activation = _ACTIVATIONS[name]
    forward = activation.forward
    return _calls.find(forward, (forward, activation, False), (input,), forward, activation, False)


@operators.register("activation", _find, into=operators.always)
def _activation_op(name: str, input: torch.Tensor) -> torch.Tensor:
    return _ACTIVATIONS[name].forward(None, input)


def _find_gradient(name, dy, input):
    activation = _ACTIVATIONS[name]
    call = _gradient_calls.find(activation.forward, (activation,), (dy, input), activation)
    return None if call is None else call.total


# The operator adds the paths up: Inductor would add 16-bit gradients without rounding in between.
@operators.register("activation_backward", _find_gradient)
def _activation_backward_op(name: str, dy: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    # A graph has this operator only if the proof passed with the forward operator.
    return functools.reduce(torch.add, _ACTIVATIONS[name].gradients(dy, input))


operators.differentiate(_activation_op, _activation_backward_op)


@at_trace_time
def _proved_for_compile(subject, activation_name, dtype, device, training) -> bool:
    if not runs_kernels(device) or under_transform() or not reads_only_attributes(subject):
        return False
    return all(
        _proved(by_value(subject), _ACTIVATIONS[activation_name], dtype, (one_row, 1 << power), device, of_gradients)
        for of_gradients in (False, True)[: 1 + training]
        for one_row in (False, True)
        for power in range(4)
        if dtype.itemsize << power <= 16
    )


def _compiled(input, subject, activation):
    """`replacement` while torch.compile traces: the registered op, or None to trace the original forward."""
    if input.dtype not in FLOAT_DTYPES or _autocast_changes(activation, input):
        return None
    training = torch.is_grad_enabled() and input.requires_grad
    if not _proved_for_compile(subject, activation.name, input.dtype, input.device, training):
        return None
    return _activation_op(activation.name, input)
