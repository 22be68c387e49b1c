"""LayerNorm that returns the bits of transformers' CohereLayerNorm, which composes it of operations, and its gradients."""

import functools
import math
import operator
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ..core import launch, operators, proof
from ..core.calls import Calls, Outside
from ..core.declarations import WARMUP, Warmup
from ..core.domain import (
    FLOAT_DTYPES,
    NO_STATE,
    PLAIN_TYPES,
    allocator,
    are_as_saved,
    are_ours,
    are_plain,
    at_trace_time,
    layouts_if_hooked,
    layouts_of,
    runs_kernels,
    under_transform,
)
from ..core.inspection import are_current, code_of, functions_of
from ..core.layout import Output, contiguous_strides
from ..core.reduction import ROW_CLASSES, row_class
from ..core.torch_internals import apply_of, dispatch_modes, forward_ad
from .cohere_layer_norm_backward import Backward, OfRows, calls_of_proof, formula, statistics, tokens_of_every_kind
from .cohere_layer_norm_backward import resolve as resolve_backward
from .rms_norm.formulas import EPS_NAME
from .rms_norm.proof import (
    PROOF_EPS,
    formula_cases,
    leaves,
    output_and_gradients,
    spike,
    stand_in,
    subnormal_row,
)

if launch.AVAILABLE:
    from ..kernels_src.cohere_layer_norm import cohere_layer_norm_forward


def eager(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`(weight.float() * ((h - mean) * rsqrt(mean((h - mean)**2) + eps))).to(x.dtype)` with `h = x.float()`.

    In torch operations, one rounding each; mean and variance over the last dimension.
    """
    h = x.to(torch.float32)
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    normalized = (h - mean) * torch.rsqrt(variance + eps)
    return (weight.to(torch.float32) * normalized).to(x.dtype)


class Eager(torch.nn.Module):
    """A layer that computes the formula in torch operations."""

    def forward(self, hidden_states):
        return eager(hidden_states, self.weight, self.variance_epsilon)


# Calls


_MIN_SIZE, _MAX_SIZE = 64, 16384
# Warps of a program, by the bytes of an element and the most elements of a row (H200).
_WARPS = {
    2: {512: 4, 4096: 1, 7168: 2, 8192: 4, _MAX_SIZE: 8},
    4: {512: 4, 2048: 1, 7168: 2, 8192: 4, _MAX_SIZE: 8},
}


class Kind(OfRows):
    """The forward kernel."""

    def launch(self, rows: int, weight_rows: int, device, eps: float, store_statistics: bool) -> launch.Launch:
        """The launch for x, weight, output and, if they are stored, mean and rstd."""
        dtypes = self.dtype, self.weight_dtype, self.dtype, torch.float32, torch.float32
        scalars = weight_rows, int(store_statistics), eps
        warps = _WARPS[self.dtype.itemsize]
        return self.bind(cohere_layer_norm_forward, warps, dtypes, rows, device, *scalars)


@dataclass(eq=False)
class _Call:
    """A call resolved for its tensors' shapes, dtypes and device.

    Args:
        backward: None without gradients.
        needs: whether the gradients of x and of the weight are needed.
        layouts: of x and the weight.
    """

    launch: launch.Launch
    backward: Optional[Backward]
    empty: Callable[[], torch.Tensor]
    empty_statistics: Callable[[], torch.Tensor]
    eps: float
    needs: tuple[bool, bool]
    layouts: tuple
    alignment_mask: int

    def __call__(self, x, weight):
        # Eager sums an fp32 x itself, whose vectors of 16 bytes begin at their multiples.
        if x.data_ptr() & self.alignment_mask:
            return eager(x, weight, self.eps)
        if self.backward is None:
            out = self.empty()
            self.launch.call_3(x, weight, out)
            return out
        again = x if x.dtype == torch.float32 else None
        return _apply(self, x, again, again, weight)

    def with_statistics(self, x, weight):
        """The output, mean and rstd."""
        if dispatch_modes():
            return (eager(x, weight, self.eps), *statistics(x, self.eps))
        return self.launched(x, weight)

    def launched(self, x, weight, *again):
        """The same, whatever modes are active: none sees a call from Inductor's code."""
        if x.data_ptr() & self.alignment_mask:
            return (eager(x, weight, self.eps), *statistics(x, self.eps))
        out, mean, rstd = self.empty(), self.empty_statistics(), self.empty_statistics()
        self.launch.call_5(x, weight, out, mean, rstd)
        return out, mean, rstd

    def takes(self, dy, x, weight) -> bool:
        """Whether the kernels compute the gradients for this dy: a model's `.to(dtype)`, or a new `.data`, between the
        passes changes its weights."""
        aligned = dy.is_contiguous() and not dy.data_ptr() & 15
        return aligned and dy.dtype == x.dtype and are_as_saved(self.layouts, x, weight)


def replacement(
    x: torch.Tensor, weight: torch.Tensor, eps: float, owner: type, state: Mapping = NO_STATE
) -> Optional[torch.Tensor]:
    """The output of `owner.forward` from the kernel; None where the caller must compute it.

    Args:
        owner: the class of the replaced layer.
        state: the layer's `__dict__`.
    """
    if is_dynamo_compiling():
        return _compiled(x, weight, eps, owner)
    # The id may belong to another weight by now: everything that decides is compared.
    recent = _calls.recent.get(id(weight))
    if recent is not None:
        same, replaced, forward, helpers, added, grad, compute = recent
        if (
            type(x) in PLAIN_TYPES
            and not x.is_nested
            and same(x, weight)
            and replaced() is owner
            and forward is owner.forward
            and (not helpers or are_current(helpers, owner, state))
            and added is eps
            and grad is is_grad_enabled()
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return compute(x, weight)
    original = owner.forward
    if type(x) not in PLAIN_TYPES or not isinstance(weight, torch.Tensor):
        return proof.record_refusal(original, proof.NOT_PLAIN)
    needs = (x.requires_grad, weight.requires_grad) if is_grad_enabled() else (False, False)
    if not are_ours(x, weight, any(needs)):
        return proof.record_refusal(original, proof.NOT_PLAIN)
    if any(needs) and (x.is_inference() or weight.is_inference()):
        return proof.record_refusal(original, proof.INFERENCE_TENSORS)
    call = _call_of(x, weight, eps, owner, needs, state)
    if call is None:
        return None
    facts = weakref.ref(owner), original, code_of(owner).helpers, eps, is_grad_enabled()
    return _calls.run(id(weight), call, facts, (x, weight))


def _call_of(x, weight, eps, owner, needs, state: Mapping = NO_STATE) -> Optional[_Call]:
    functions = functions_of(owner, state)
    if functions is None:
        return proof.record_unreadable_forward(owner)
    return _calls.find(owner.forward, (functions, needs, eps), (x, weight), eps, owner, needs)


def _check(x, weight, eps) -> None:
    """Raises Outside if no kernel takes these arguments."""
    if not runs_kernels(x.device) or weight.device != x.device or torch.version.hip is not None:
        raise Outside(f"activations on {x.device}, weight on {weight.device}; there are kernels for CUDA")
    if x.dtype not in FLOAT_DTYPES or weight.dtype not in FLOAT_DTYPES:
        raise Outside(f"activations {x.dtype}, weight {weight.dtype}")
    if not isinstance(eps, (int, float)):
        raise Outside(f"eps has type {type(eps).__name__}")
    if not 0 < weight.dim() < x.dim() or x.shape[-weight.dim() :] != weight.shape:
        raise Outside("weight has not the last dimensions of activations that have more")
    if not x.is_contiguous() or not weight.is_contiguous() or not x.numel():
        raise Outside("activations or weight are not contiguous, or empty")
    if x.shape[-1] % 4 or not _MIN_SIZE <= x.shape[-1] <= _MAX_SIZE:
        raise Outside("rows that are not of 64 to 16384 elements, a multiple of 4")
    if x.numel() // x.shape[-1] > launch.MAX_PROGRAMS:
        raise Outside("too many rows")


def _resolve(x, weight, eps, owner, needs) -> Optional[_Call]:
    _check(x, weight, eps)
    if not computes_formula(owner, x.dtype, weight.dtype, x.device):
        return None
    strides = contiguous_strides(x.shape)
    if any(needs) and x.stride() != strides:
        raise Outside("gradients of activations with other strides in dimensions of length 1")
    size = x.shape[-1]
    rows, weight_rows = x.numel() // size, weight.numel() // size
    kind = Kind(x.dtype, weight.dtype, size, row_class(rows))
    if not _proved(kind, owner, x.device):
        return None
    backward = None
    if any(needs):
        backward = resolve_backward(x, weight, owner, needs)
        if backward is None:
            return None
    of_rows = (*x.shape[:-1], 1)
    return _Call(
        kind.launch(rows, weight_rows, x.device, eps, any(needs)),
        backward,
        Output.of(functools.partial(eager, eps=0.0), x, weight, dtype=x.dtype).empty,
        allocator(of_rows, contiguous_strides(of_rows), torch.float32, x.device),
        eps,
        needs,
        layouts_of(x, weight),
        15 if x.dtype == torch.float32 else 0,
    )


_calls = Calls(_resolve)


class CohereLayerNorm(torch.autograd.Function):
    """x enters once, or three times if it is fp32: once for each of eager's gradients."""

    @staticmethod
    def forward(ctx, call, x, x_again, x_third, weight):
        out, mean, rstd = call.with_statistics(x, weight)
        kept = x, weight, mean, rstd
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.layouts = call, layouts_if_hooked(*kept)
        return out

    @staticmethod
    def backward(ctx, dy):
        if dy is None:  # The output was unused, so its gradient is undefined, which differs from zero.
            return None, None, None, None, None
        kept = x, weight, mean, rstd = ctx.saved_tensors
        call, plain = ctx.call, are_plain(dy, x) and are_plain(weight, mean)
        if is_grad_enabled():  # Double backward: the statistics must be differentiable.
            return None, *formula(dy, x, weight, *statistics(x, call.eps), *call.needs)
        if plain and call.takes(dy, x, weight) and are_as_saved(ctx.layouts, *kept):
            return None, *call.backward(dy, x, weight, mean, rstd)
        return None, *formula(dy, x, weight, mean, rstd, *call.needs)


_apply = apply_of(CohereLayerNorm)


# Proof


def computes_formula(owner: type, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `owner.forward` returns the bits of `eager`, and its gradients too."""
    if owner is Eager:
        return True
    functions = functions_of(owner)
    if EPS_NAME not in {name for function in functions for name in function.__code__.co_names}:
        proof.record_refusal(owner.forward, f"the forward does not read {EPS_NAME}")
        return False
    subject = proof.Subject(owner.forward, device, f"activations {dtype}, weight {weight_dtype}")
    candidates = {Eager: functools.partial(_formula_comparisons, owner, (dtype, weight_dtype), device)}
    key = ("formula of Cohere's LayerNorm", functions, dtype, weight_dtype, device)
    shapes = [(_MAX_SIZE, dtype)], [((_MAX_SIZE,), weight_dtype)]
    refuse = functools.partial(proof.refuse_parts, functools.partial(_output_of, owner), *shapes)
    return proof.match_formula(key, subject, candidates, refuse=refuse) is not None


def _output_of(owner, x, weight, eps=PROOF_EPS) -> torch.Tensor:
    return owner.forward(stand_in(owner, weight, eps, eps_name=EPS_NAME), x)


def _formula_comparisons(owner, dtypes, device):
    for of_case, eps, (x,), weight, dy, other in formula_cases(device, 1, dtypes, 1, 512):
        # Rows with a mean, which another formula may leave.
        x = x + 0.7 * x.abs().mean(-1, keepdim=True)
        for of_heads in (False, True):
            shape = (2, x.shape[-1]) if of_heads else x.shape[-1:]
            if of_heads and x.shape[-2] % 2:
                continue
            results = []
            for layer_class in (owner, Eager):
                scale = (
                    weight.expand(shape) * torch.linspace(1, 2, shape[0], dtype=torch.float32, device=device)[:, None]
                    if of_heads
                    else weight
                )
                leaf, scale = leaves((x.unflatten(-2, (-1, 2)) if of_heads else x, scale.contiguous()), of_case)
                with torch.enable_grad():
                    states = leaf.view_as(leaf)
                    out = _output_of(layer_class, states, scale, eps)
                    gradients = [each if each is None else each.view_as(states) for each in (dy, other)]
                    results.append(output_and_gradients(out, states, (leaf, scale), *gradients))
            for what, expected, found in zip(("the output", "the input's gradient", "the weight's gradient"), *results):
                yield what, found, expected


def _proved(kind: Kind, owner: type, device) -> bool:
    more = " or more" if kind.rows == ROW_CLASSES[-1] else ""
    where = f"activations {kind.dtype}, weight {kind.weight_dtype}, hidden size {kind.size}, {kind.rows}{more} rows"
    subject = proof.Subject(owner.forward, device, where, "weight.float() * (x - mean) * rsqrt(variance + eps)")
    key = ("Cohere's LayerNorm", functions_of(owner), kind, device)
    return proof.kernel_is_proved(key, subject, functools.partial(_comparisons, kind, owner, device))


def _comparisons(kind, owner, device):
    """The output, and the statistics in fp32, where another order of additions shows."""
    make = functools.partial(proof.normal, proof.generator(device, kind.size))
    for call, rows, weight_rows, is_last in calls_of_proof(kind.rows):
        x = spike(make(rows, kind.size) + make(rows, 1), call).to(kind.dtype)
        if is_last:  # Sums of subnormal numbers are exact in every order.
            subnormal_row(x)
        weight = make(weight_rows, kind.size).to(kind.weight_dtype)
        if weight_rows > 1:
            x = x.view(-1, weight_rows, kind.size)
        else:
            (weight,) = weight
        mean, rstd = proof.unwritten(2, (*x.shape[:-1], 1), device)
        ours = torch.full_like(x, math.nan)
        kind.launch(rows, weight_rows, device, PROOF_EPS, True)(x, weight, ours, mean, rstd)
        yield from zip(("the fp32 mean", "the fp32 rstd"), (mean, rstd), statistics(x, PROOF_EPS))
        yield "the output", ours, owner.forward(stand_in(owner, weight, PROOF_EPS), x)


def warmup_shapes(weight, dtype: torch.dtype, device: torch.device, rows, training: bool) -> list[tuple[int, ...]]:
    """The inputs that `warmup` calls a layer with: with the given `rows`, or one for each order of additions."""
    if weight is None:
        raise Outside("a norm without a weight has no hidden size")
    counts = {*ROW_CLASSES, *(tokens_of_every_kind(dtype, weight) if training else ())}
    return [(count, *weight.shape) for count in rows or sorted(counts)]


WARMUP["CohereLayerNorm"] = Warmup(warmup_shapes)


# torch.compile


def _find(hidden_states, weight, again, third, eps):
    call = _call_of(hidden_states, weight, eps, Eager, (True, True))
    return None if call is None else call.launched


# `again` and `third` are hidden_states twice more if eager sends them three gradients.
@operators.register("cohere_layer_norm", _find)
def _cohere_layer_norm_op(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    again: Optional[torch.Tensor],
    third: Optional[torch.Tensor],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (eager(hidden_states, weight, eps), *statistics(hidden_states, eps))


def _find_gradients(dy, hidden_states, weight, mean, rstd, eps, needs_dx, needs_dweight):
    needs = needs_dx, needs_dweight
    call = _call_of(hidden_states, weight, eps, Eager, needs) if dy.is_contiguous() else None
    return None if call is None else operators.of_tensors(call.backward, dy)


@operators.register("cohere_layer_norm_backward", _find_gradients)
def _cohere_layer_norm_backward_op(
    dy: torch.Tensor,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    needs_dx: bool,
    needs_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    found = formula(dy, hidden_states, weight, mean, rstd, needs_dx, needs_dweight)
    return operators.without_none(found, dy)


def _setup_context(ctx, inputs, output):
    hidden_states, weight, _, _, ctx.eps = inputs
    ctx.save_for_backward(hidden_states, weight, *output[1:])
    ctx.set_materialize_grads(False)


def _op_gradient(ctx, dy, d_mean, d_rstd):
    if dy is None:
        return None, None, None, None, None
    needs_dx, needs_dweight, needs_again, needs_third, _ = ctx.needs_input_grad
    found = _cohere_layer_norm_backward_op(dy, *ctx.saved_tensors, ctx.eps, needs_dx, needs_dweight)
    dx, dx_again, dx_third, dweight = found
    needed = (needs_dx, dx), (needs_dweight, dweight), (needs_again, dx_again), (needs_third, dx_third)
    return *(gradient if need else None for need, gradient in needed), None


torch.library.register_autograd(_cohere_layer_norm_op, _op_gradient, setup_context=_setup_context)


@at_trace_time
def _is_proved_for_compile(owner, dtype, weight_dtype, size, device) -> bool:
    """Whether the forward is proved for all row classes: a graph with dynamic shapes meets them all."""
    if not runs_kernels(device) or under_transform() or functions_of(owner) is None:
        return False
    if not computes_formula(owner, dtype, weight_dtype, device):
        return False
    kinds = (Kind(dtype, weight_dtype, size, rows) for rows in ROW_CLASSES)
    return all(_proved(kind, owner, device) for kind in kinds)


def _compiled(x, weight, eps, owner) -> Optional[torch.Tensor]:
    """`replacement` while torch.compile traces: the registered op, or None to trace the original forward.

    The operators verify more at their first call, like uncompiled calls, and fall back to the formula.
    """
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, (int, float)):
        return None
    if not 0 < weight.dim() < x.dim() or x.shape[-weight.dim() :] != weight.shape or torch.version.hip is not None:
        return None
    size = operator.index(weight.shape[-1])
    if size % 4 or not _MIN_SIZE <= size <= _MAX_SIZE or not {x.dtype, weight.dtype} <= set(FLOAT_DTYPES):
        return None
    if not _is_proved_for_compile(owner, x.dtype, weight.dtype, size, x.device):
        return None
    again = x if x.dtype == torch.float32 and is_grad_enabled() else None
    return _cohere_layer_norm_op(x, weight, again, again, eps)[0]
