"""Dynamic tanh (DyT) that returns the bits of eager's operations: outputs and all gradients."""

import functools
import math
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ..core import launch, operators, proof
from ..core.calls import Calls, Outside
from ..core.domain import (
    FLOAT_DTYPES,
    PLAIN_TYPES,
    allocator,
    are_as_saved,
    are_ours,
    are_plain,
    check_floating,
    is_traced_plainly,
    layouts_if_hooked,
    layouts_of,
    runs_kernels,
)
from ..core.layout import contiguous_strides
from ..core.torch_internals import apply_of, dispatch_modes, forward_ad
from .activation import all_inputs

if launch.AVAILABLE:
    from ..kernels_src.dyt import dyt_backward, dyt_forward


def dyt(input: torch.Tensor, alpha: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Dynamic tanh: bit for bit what `weight * torch.tanh(input * alpha) + bias` returns, and its gradients.

    Every operation rounds to the dtype of the tensors (Zhu et al., Transformers without Normalization, 2025).

    Args:
        input: `[..., hidden_size]`, any real floating dtype.
        alpha: `[1]`, any real floating dtype.
        weight: `[hidden_size]`, any real floating dtype.
        bias: as `weight`.

    Returns:
        A tensor of the shape of input, in the promoted dtype.

    Raises:
        TypeError: a tensor is none or not of a real floating dtype.
        ValueError: `alpha` is not `[1]`, or `weight` or `bias` not `[hidden_size]`.

    The kernels run for fp32, fp16 and bf16 on CUDA if all tensors have one dtype and are contiguous. ATen adds the
    gradients of alpha, weight and bias up. Eager computes everything else.
    """
    for name, tensor in (("input", input), ("alpha", alpha), ("weight", weight), ("bias", bias)):
        check_floating(name, tensor)
    if input.dim() == 0:
        raise ValueError("input: expected at least one dimension, found none")
    vector = tuple(input.shape[-1:])
    for name, tensor, shape in (("alpha", alpha, (1,)), ("weight", weight, vector), ("bias", bias, vector)):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, found {list(tensor.shape)}")
    out = replacement(input, alpha, weight, bias)
    return eager(input, alpha, weight, bias) if out is None else out


def eager(input, alpha, weight, bias) -> torch.Tensor:
    """The formula in torch operations, as its authors write it."""
    return weight * torch.tanh(input * alpha) + bias


class Gradients(NamedTuple):
    input: Optional[torch.Tensor]
    alpha: Optional[torch.Tensor]
    weight: Optional[torch.Tensor]
    bias: Optional[torch.Tensor]


def formula(dy, input, alpha, weight, needs) -> Gradients:
    """The gradients in differentiable torch operations, as autograd computes them; `needs`: which, in order."""
    y = torch.tanh(input * alpha)
    d_scaled = torch.ops.aten.tanh_backward(dy * weight, y)
    return Gradients(
        d_scaled * alpha if needs[0] else None,
        (d_scaled * input).sum_to_size(alpha.shape) if needs[1] else None,
        (dy * y).sum_to_size(weight.shape) if needs[2] else None,
        dy.sum_to_size(weight.shape) if needs[3] else None,
    )


# Calls


_BLOCK = 2048


@dataclass(frozen=True)
class Kind:
    """The properties that the kernels are compiled for."""

    dtype: torch.dtype
    size: int

    def forward(self, rows: int, device) -> launch.Launch:
        """The launch for input, alpha, weight, bias and output."""
        return self._bind(dyt_forward, {}, 5, rows, device)

    def backward(self, rows: int, device, needs) -> launch.Launch:
        """The launch for dy, input, alpha, weight, the input's gradient and the products for those of alpha and weight."""
        return self._bind(dyt_backward, {"OF_ALPHA": needs[1], "OF_WEIGHT": needs[2]}, 7, rows, device)

    def programs(self, rows: int) -> int:
        return rows * -(-self.size // self._block)

    @property
    def _block(self) -> int:
        return min(1 << (self.size - 1).bit_length(), _BLOCK)

    def _bind(self, kernel, more, tensors, rows, device) -> launch.Launch:
        constants = {"SIZE": self.size, "BLOCK": self._block, **more}
        warps = max(self._block * self.dtype.itemsize // (16 * 32), 1)
        return launch.bind(kernel, constants, warps, device, (self.dtype,) * tensors, self.programs(rows))


@dataclass(eq=False)
class _Call:
    """A call resolved for its tensors' shapes, dtype and device.

    Args:
        backward: None if dx and the products are not needed.
        needs: which gradients are needed.
        layouts: of input, alpha and weight.
    """

    forward: launch.Launch
    backward: Optional[launch.Launch]
    empty: Callable[[], torch.Tensor]
    needs: tuple[bool, ...]
    layouts: tuple

    def __call__(self, input, alpha, weight, bias):
        if any(self.needs):
            return _apply(self, input, alpha, weight, bias)
        return self.output(input, alpha, weight, bias)

    def output(self, input, alpha, weight, bias):
        if dispatch_modes():
            return eager(input, alpha, weight, bias)
        return self.launched(input, alpha, weight, bias)

    def launched(self, input, alpha, weight, bias):
        """The same, whatever modes are active: none sees a call from Inductor's code."""
        out = self.empty()
        self.forward.call_5(input, alpha, weight, bias, out)
        return out

    def gradients(self, dy, input, alpha, weight, bias=None) -> Gradients:
        """The gradients for a contiguous dy of the input's dtype."""
        of_input, of_alpha, of_weight, of_bias = self.needs
        dx = products = normalized = None
        if self.backward is not None:
            dx = self.empty()
            products, normalized = (self.empty() if need else dx for need in (of_alpha, of_weight))
            self.backward(dy, input, alpha, weight, dx, products, normalized)
        return Gradients(
            dx if of_input else None,
            products.sum_to_size(alpha.shape) if of_alpha else None,
            normalized.sum_to_size(weight.shape) if of_weight else None,
            dy.sum_to_size(weight.shape) if of_bias else None,
        )


def replacement(input, alpha, weight, bias) -> Optional[torch.Tensor]:
    """The output from the kernel; None if eager must compute it."""
    if is_dynamo_compiling():
        return _compiled(input, alpha, weight, bias)
    tensors = input, alpha, weight, bias
    grad = is_grad_enabled()
    recent = _calls.recent.get(id(weight))
    if recent is not None:
        same, then, compute = recent
        if (
            all(type(tensor) in PLAIN_TYPES for tensor in tensors)
            and not input.is_nested
            and same(*tensors)
            and then is grad
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return compute(*tensors)
    needs = tuple([grad and tensor.requires_grad for tensor in tensors])
    if not all(are_ours(input, tensor, any(needs)) for tensor in tensors):
        return proof.record_refusal(eager, proof.NOT_PLAIN)
    if any(needs) and any(tensor.is_inference() for tensor in tensors):
        return proof.record_refusal(eager, proof.INFERENCE_TENSORS)
    call = _calls.find(eager, (needs,), tensors, needs)
    return _calls.run(id(weight), call, (grad,), tensors)


def _resolve(input, alpha, weight, bias, needs) -> Optional[_Call]:
    others = alpha, weight, bias
    if input.dtype not in FLOAT_DTYPES or not runs_kernels(input.device):
        raise Outside(f"input {input.dtype} on {input.device}")
    if torch.version.hip is not None:
        raise Outside("ROCm, whose tanh is another")
    if any((each.dtype, each.device) != (input.dtype, input.device) for each in others):
        raise Outside("tensors of several dtypes or devices")
    if not all(each.is_contiguous() for each in (input, *others)) or not input.numel() or not input.dim():
        raise Outside("tensors that are not contiguous, or empty")
    if alpha.shape != (1,) or {each.shape for each in (weight, bias)} != {input.shape[-1:]}:
        raise Outside("alpha is not [1], or weight or bias not [hidden_size]")
    if any(needs) and input.dim() == 1:  # The sums would have nothing to add.
        raise Outside("gradients of a vector")
    kind = Kind(input.dtype, input.shape[-1])
    rows = input.numel() // kind.size
    if kind.programs(rows) > launch.MAX_PROGRAMS:
        raise Outside("too many rows")
    if not all(_proved(kind, input.device, gradients) for gradients in (False, True)[: 1 + any(needs)]):
        return None
    return _Call(
        kind.forward(rows, input.device),
        kind.backward(rows, input.device, needs) if any(needs[:3]) else None,
        allocator(input.shape, contiguous_strides(input.shape), input.dtype, input.device),
        needs,
        layouts_of(input, alpha, weight),
    )


_calls = Calls(_resolve)


class DyT(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, input, alpha, weight, bias):
        ctx.save_for_backward(input, alpha, weight)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.layouts = call, layouts_if_hooked(input, alpha, weight)
        return call.output(input, alpha, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        if dy is None:  # The output was unused, so its gradient is undefined, which differs from zero.
            return None, None, None, None, None
        input, alpha, weight = ctx.saved_tensors
        # With create_graph the gradients are differentiated in turn.
        plain = not is_grad_enabled() and are_plain(dy, input) and are_plain(alpha, weight)
        launched = ctx.call.backward
        # A model's `.to(dtype)`, or a new `.data`, between the passes changes its weights.
        fits = launched is None or launched.takes(dy, input, alpha, weight)
        fits = fits and are_as_saved(ctx.call.layouts, input, alpha, weight)
        if plain and fits and dy.is_contiguous() and are_as_saved(ctx.layouts, input, alpha, weight):
            return None, *ctx.call.gradients(dy, input, alpha, weight)
        return None, *formula(dy, input, alpha, weight, ctx.call.needs)


_apply = apply_of(DyT)


# Proof


def _proved(kind: Kind, device, gradients: bool) -> bool:
    what, comparisons = ("gradients", _gradient_comparisons) if gradients else ("output", _comparisons)
    return proof.kernel_is_proved(
        ("dyt", kind, what, device),
        proof.Subject(eager, device, f"{kind.dtype}, rows of {kind.size} elements, {what}", "dyt"),
        functools.partial(comparisons, kind, device),
    )


# No power of two, whose products are not rounded.
_ALPHA = 0.7


def _sample(kind, device):
    """x, alpha, weight, bias and dy. x: all numbers of 16 bits, of fp32 as many, after a row of ones; the last three at random."""
    values = all_inputs(kind.dtype, device)
    rows = -(-len(values) // kind.size) + 1
    x = torch.ones(rows * kind.size, dtype=kind.dtype, device=device)
    x[-len(values) :] = values
    make = functools.partial(proof.normal, proof.generator(device, kind.size))
    weight, bias = (make(kind.size).to(kind.dtype) for _ in range(2))
    alpha = torch.full((1,), _ALPHA, dtype=kind.dtype, device=device)
    return x.view(rows, kind.size), alpha, weight, bias, make(rows, kind.size).to(kind.dtype)


def _comparisons(kind, device):
    x, alpha, weight, bias, _ = _sample(kind, device)
    # tanh of every number, and of numbers around 1.
    for factor in (torch.ones_like(alpha), alpha):
        out = torch.full_like(x, math.nan)
        kind.forward(len(x), device)(x, factor, weight, bias, out)
        yield "the output", out, eager(x, factor, weight, bias)


def _gradient_comparisons(kind, device):
    """The products before they are added up, which ATen does."""
    x, alpha, weight, bias, dy = _sample(kind, device)
    found = [torch.full_like(x, math.nan) for _ in range(3)]
    kind.backward(len(x), device, (True,) * 4)(dy, x, alpha, weight, *found)
    y = torch.tanh(x * alpha)
    d_scaled = torch.ops.aten.tanh_backward(dy * weight, y)
    yield from zip(
        ("the input's gradient", "alpha's terms", "the weight's terms"), found, (d_scaled * alpha, d_scaled * x, dy * y)
    )
    # Of numbers whose sums are finite: which sums autograd makes of them.
    few = [each.requires_grad_() for each in (dy.clone(), alpha, weight, bias)]
    with torch.enable_grad():
        expected = torch.autograd.grad(eager(*few), few, dy)
    few, found = [each.detach() for each in few], [torch.full_like(x, math.nan) for _ in range(3)]
    kind.backward(len(dy), device, (True,) * 4)(dy, few[0], *few[1:3], *found)
    dx, products, normalized = found
    sums = products.sum_to_size(alpha.shape), normalized.sum_to_size(weight.shape), dy.sum_to_size(weight.shape)
    for what, ours, theirs in zip(("the input's", "alpha's", "the weight's", "the bias's"), (dx, *sums), expected):
        yield f"{what} gradient", ours, theirs


# torch.compile


def _find(input, alpha, weight, bias):
    needs = (False,) * 4
    call = _calls.find(eager, (needs,), (input, alpha, weight, bias), needs)
    return None if call is None else call.launched


@operators.register("dyt", _find)
def _dyt_op(input: torch.Tensor, alpha: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return eager(input, alpha, weight, bias)


def _find_gradients(dy, input, alpha, weight, bias, needs):
    needs, tensors = tuple(needs), (input, alpha, weight, bias)
    call = _calls.find(eager, (needs,), tensors, needs) if dy.is_contiguous() else None
    return None if call is None else operators.of_tensors(call.gradients, dy)


@operators.register("dyt_backward", _find_gradients)
def _dyt_backward_op(
    dy: torch.Tensor,
    input: torch.Tensor,
    alpha: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return operators.without_none(formula(dy, input, alpha, weight, needs), dy)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _op_gradient(ctx, dy):
    needs = list(ctx.needs_input_grad)
    found = _dyt_backward_op(dy, *ctx.saved_tensors, needs)
    return tuple(gradient if need else None for need, gradient in zip(needs, found))


torch.library.register_autograd(_dyt_op, _op_gradient, setup_context=_setup_context)


def _compiled(input, alpha, weight, bias) -> Optional[torch.Tensor]:
    """`replacement` while torch.compile traces: the registered op, or None to trace eager's operations.

    Without a proof the op computes these too.
    """
    dtypes = {tensor.dtype for tensor in (input, alpha, weight, bias)}
    if len(dtypes) > 1 or input.dtype not in FLOAT_DTYPES or input.dim() < 2:
        return None
    return _dyt_op(input, alpha, weight, bias) if is_traced_plainly(input.device) else None
