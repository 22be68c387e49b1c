"""Dynamic tanh (DyT) that returns the bits of eager's operations: outputs and all gradients."""

import functools
import math
from dataclasses import dataclass
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
from . import dyt_backward

if launch.AVAILABLE:
    from ..kernels_src.dyt import dyt_forward


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

    The kernels run for fp32, fp16 and bf16 on CUDA if all tensors have one dtype and are contiguous, with gradients if the
    input has at least two dimensions and `hidden_size` is at least 16. Eager computes everything else.
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


# Calls


# The most columns of a program, and the fewest elements (H200).
_BLOCK, _FEWEST = 2048, 512
# In shorter rows up to 256 of ATen's threads share a column, and a thread of ours would have up to 1,024 elements. Columns of longer
# ones need more than 32 bits.
_FEWEST_COLUMNS, _MOST_COLUMNS = 16, 1 << 30


@dataclass(frozen=True)
class Kind:
    """The properties that the kernels are compiled for."""

    dtype: torch.dtype
    size: int

    def forward(self, rows: int, device) -> launch.Launch:
        """The launch for input, alpha, weight, bias and output."""
        constants = {"SIZE": self.size, "ROWS": self._rows, "BLOCK": self._block}
        warps = self._rows * self._block * self.dtype.itemsize // (16 * 32)
        return launch.bind(dyt_forward, constants, warps, device, (self.dtype,) * 5, self.programs(rows), rows)

    def programs(self, rows: int) -> int:
        return -(-rows // self._rows) * -(-self.size // self._block)

    @property
    def _block(self) -> int:
        return min(1 << (self.size - 1).bit_length(), _BLOCK)

    @property
    def _rows(self) -> int:
        return max(_FEWEST // self._block, 1)


@dataclass(eq=False)
class _Call:
    """A call resolved for its tensors' shapes, dtype and device.

    Args:
        backward: None if no gradient is needed.
        layouts: of input, alpha and weight.
    """

    forward: launch.Launch
    backward: Optional[dyt_backward.Backward]
    empty: Callable[[], torch.Tensor]
    layouts: tuple

    def __call__(self, input, alpha, weight, bias):
        if self.backward is not None:
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
    if any(needs) and (input.dim() == 1 or input.shape[-1] < _FEWEST_COLUMNS):
        raise Outside("gradients of a vector, or of rows of few elements")
    if any(needs) and input.shape[-1] > _MOST_COLUMNS:
        raise Outside("gradients of rows of more than 2**30 elements")
    kind = Kind(input.dtype, input.shape[-1])
    rows = input.numel() // kind.size
    if kind.programs(rows) > launch.MAX_PROGRAMS:
        raise Outside("too many rows")
    if not _proved(kind, input.device):
        return None
    backward = dyt_backward.resolve(input, eager, needs) if any(needs) else None
    if any(needs) and backward is None:
        return None
    return _Call(
        kind.forward(rows, input.device),
        backward,
        allocator(input.shape, contiguous_strides(input.shape), input.dtype, input.device),
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
        # A model's `.to(dtype)`, or a new `.data`, between the passes changes its weights.
        fits = dy.dtype is input.dtype and are_as_saved(ctx.call.layouts, input, alpha, weight)
        if plain and fits and dy.is_contiguous() and are_as_saved(ctx.layouts, input, alpha, weight):
            return None, *ctx.call.backward(dy, input, alpha, weight)
        return None, *dyt_backward.formula(dy, input, alpha, weight, ctx.call.backward.needs)


_apply = apply_of(DyT)


# Proof


def _proved(kind: Kind, device) -> bool:
    return proof.kernel_is_proved(
        ("dyt", kind, device),
        proof.Subject(eager, device, f"{kind.dtype}, rows of {kind.size} elements, output", "dyt"),
        functools.partial(_comparisons, kind, device),
    )


def _comparisons(kind, device):
    x, alpha, weight, bias, _ = dyt_backward.sample(kind.dtype, kind.size, device)
    # tanh of every number, and of numbers around 1.
    for factor in (torch.ones_like(alpha), alpha):
        out = torch.full_like(x, math.nan)
        kind.forward(len(x), device)(x, factor, weight, bias, out)
        yield "the output", out, eager(x, factor, weight, bias)


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
    return None if call is None or call.backward is None else operators.of_tensors(call.backward, dy)


@operators.register("dyt_backward", _find_gradients)
def _dyt_backward_op(
    dy: torch.Tensor,
    input: torch.Tensor,
    alpha: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return operators.without_none(dyt_backward.formula(dy, input, alpha, weight, needs), dy)


def _setup_context(ctx, inputs, output):
    # As with eager the bias may be written to between the passes. No gradient depends on its values: the weight stands for it.
    input, alpha, weight, _ = inputs
    ctx.save_for_backward(input, alpha, weight, weight)


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
