"""Rotary position embedding of query and key in one launch, with the bits of transformers' `apply_rotary_pos_emb`."""

import functools
from dataclasses import dataclass, replace
from typing import Callable, Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ..core import launch, operators, proof
from ..core.calls import Calls, Outside
from ..core.domain import (
    FLOAT_DTYPES,
    are_ours,
    are_plain,
    at_trace_time,
    check_floating,
    have_strides,
    runs_kernels,
    under_transform,
)
from ..core.inspection import are_current, function_behind, helpers_of
from ..core.layout import Output, contiguous_strides, stand_ins
from ..core.paths import Backward
from ..core.torch_internals import apply_of, dispatch_modes, forward_ad
from .rotary_formulas import CHUNKED, FORMULAS, FP32, PARTIAL, PLAIN, RotaryFormula
from .rotary_layout import Sizes, place_of, walk_of
from .rotary_proof import formula_comparisons, kernel_is_proved


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of query and key.

    `x * cos + rotate_half(x) * sin` for x = q and x = k, with `cos` and `sin` unsqueezed at `unsqueeze_dim` and
    `rotate_half(x) = cat((-x2, x1), -1)` of the halves x1, x2 of the last dimension; every operation rounds. Bit for
    bit what `apply_rotary_pos_emb` of transformers' Llama returns. Nothing is written in place.

    Args:
        q: `[batch, heads, tokens, head_dim]`, any strides, any real floating dtype.
        k: as `q`; the number of heads may differ.
        cos: `[batch or 1, tokens, head_dim]`, any real floating dtype.
        sin: as `cos`.
        unsqueeze_dim: the heads' dimension in `q` and `k`: 1, or 2 for `[batch, tokens, heads, head_dim]`.

    Returns:
        `(q_embed, k_embed)` of the shapes, dtypes and strides that eager returns.

    Raises:
        TypeError: an argument is no tensor or not of a real floating dtype, or `unsqueeze_dim` is no int.
        ValueError: tensors on two devices, or shapes that do not broadcast.

    The kernel runs for fp32, fp16 and bf16 on CUDA if `head_dim` is even, up to 1024 and contiguous in every tensor and
    if `cos` and `sin` need no gradient. Eager computes everything else.
    """
    _check_arguments(q, k, cos, sin, unsqueeze_dim)
    out = replacement(q, k, cos, sin, unsqueeze_dim, PLAIN.eager)
    return PLAIN.eager(q, k, cos, sin, unsqueeze_dim) if out is None else out


def _check_arguments(q, k, cos, sin, unsqueeze_dim) -> None:
    """Raises TypeError or ValueError unless these are arguments of `apply_rotary_pos_emb`."""
    for name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check_floating(name, tensor)
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} of q, found {tensor.device}")
        if tensor.dim() == 0:
            raise ValueError(f"{name}: expected at least one dimension, found a 0-dimensional tensor")
    if isinstance(unsqueeze_dim, bool) or not isinstance(unsqueeze_dim, int):
        raise TypeError(f"unsqueeze_dim: expected an int, found {type(unsqueeze_dim).__name__}")
    for name, table in (("cos", cos), ("sin", sin)):
        if not -table.dim() - 1 <= unsqueeze_dim <= table.dim():
            raise ValueError(
                f"unsqueeze_dim: expected {-table.dim() - 1} to {table.dim()} for {name} {list(table.shape)}, "
                f"found {unsqueeze_dim}"
            )
        shape = table.unsqueeze(unsqueeze_dim).shape
        for other, tensor in (("q", q), ("k", k)):
            try:
                torch.broadcast_shapes(shape, tensor.shape)
            except RuntimeError:
                raise ValueError(
                    f"{name}: expected a shape that broadcasts with {other} {list(tensor.shape)} after unsqueezing at "
                    f"{unsqueeze_dim}, found {list(table.shape)}"
                ) from None


def apply_rotary_pos_emb_vision(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of query and key in fp32, as in the vision towers of Qwen2-VL and others.

    `(x.float() * cos.float() + rotate_half(x.float()) * sin.float()).to(x.dtype)` for x = q and x = k, with `cos` and
    `sin` unsqueezed at -2. Bit for bit what the function of this name in transformers returns.

    Args:
        q: `[tokens, heads, head_dim]` or `[batch, tokens, heads, head_dim]`, any strides, any real floating dtype.
        k: as `q`; the number of heads may differ.
        cos: `[tokens, head_dim]` or `[batch or 1, tokens, head_dim]`, any real floating dtype.
        sin: as `cos`.

    Returns:
        `(q_embed, k_embed)` of the shapes, dtypes and strides that eager returns.

    Raises:
        TypeError: an argument is no tensor or not of a real floating dtype.
        ValueError: tensors on two devices, or shapes that do not broadcast.

    The kernel runs where that of `apply_rotary_pos_emb` does. Eager computes everything else.
    """
    _check_arguments(q, k, cos, sin, -2)
    out = replacement(q, k, cos, sin, -2, FP32.eager)
    return FP32.eager(q, k, cos, sin, -2) if out is None else out


# From a call's tensors to a kernel


@dataclass(eq=False)
class _Forward:
    """A call without gradients, resolved for the shapes, strides, dtypes and device of its tensors."""

    launch: launch.Launch
    q_out: Output
    k_out: Output

    def __post_init__(self):
        self.empty_q, self.empty_k = self.q_out.empty, self.k_out.empty

    def __call__(self, q, k, cos, sin):
        q_embed, k_embed = self.empty_q(), self.empty_k()
        self.launch.call_6(q, k, cos, sin, q_embed, k_embed)
        return q_embed, k_embed

    @property
    def into(self):
        """`into(q, k, cos, sin, q_embed, k_embed)`: the outputs are given."""
        return self.launch.call_6


@dataclass(eq=False)
class _Training:
    """A call with gradients.

    Args:
        needs: whether gradients of q and of k are needed.
        sole_consumer: see `replacement`.
    """

    variant: RotaryFormula
    unsqueeze_dim: int
    needs: tuple[bool, bool]
    sole_consumer: bool
    forward: _Forward

    def __call__(self, q, k, cos, sin):
        if self.sole_consumer or self.variant.has_one_edge(q.dtype):
            return _apply(self, k, None, q, None, cos, sin)
        return _apply(self, k, k, q, q, cos, sin)


class _Backward(Backward):
    """The gradients of q and of k, each a pair: see `gradients`.

    They are contiguous, as eager's are: eager adds to new zeros.
    """

    def __call__(self, dq_embed, dk_embed, cos, sin):
        if self.launch_paths is None:
            found = self.sums(dq_embed, dk_embed, cos, sin)
            return (found[0], None), (found[-1], None)
        found = self.gradients(dq_embed, dk_embed, cos, sin)
        return found[0], found[-1]

    def sums(self, dq_embed, dk_embed, cos, sin):
        found = [empty() for empty in self.empty]
        self.launch_sums.call_6(dq_embed, dk_embed, cos, sin, found[0], found[-1])
        return found

    def along_paths(self, dq_embed, dk_embed, cos, sin):
        rotated, straight = [empty() for empty in self.empty], [empty() for empty in self.empty]
        outs = rotated[0], rotated[-1], straight[0], straight[-1]
        self.launch_paths(dq_embed, dk_embed, cos, sin, *outs)
        return (outs[0], outs[2]), (outs[1], outs[3])

    def of_one(self, dy, cos, sin) -> torch.Tensor:
        """The gradient of q alone, the sum of both paths."""
        return self.sums(dy, dy, cos, sin)[0]


class _BackwardOfCopies(_Backward):
    """Where an incoming gradient has strided heads, as eager attention may give to the key: it is copied first."""

    def __call__(self, dq_embed, dk_embed, cos, sin):
        first = _with_whole_heads(dq_embed)
        return super().__call__(first, first if dk_embed is dq_embed else _with_whole_heads(dk_embed), cos, sin)

    def of_one(self, dy, cos, sin) -> torch.Tensor:
        return super().of_one(_with_whole_heads(dy), cos, sin)


def _with_whole_heads(dy: torch.Tensor) -> torch.Tensor:
    return dy if dy.stride(-1) == 1 else dy.contiguous()


def replacement(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int,
    subject: Callable,
    sole_consumer: bool = False,
) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
    """The original function's outputs from the kernel; None where the caller must compute them.

    Args:
        subject: that function, or the forward that `kernels` made of it.
        sole_consumer: `q` and `k` have no other consumer, ever. Each then gets one gradient, the sum, instead of one
            for each path. With other consumers autograd adds the paths one by one, and the sum would have other bits.
    """
    if is_dynamo_compiling():
        return _compiled(q, k, cos, sin, unsqueeze_dim, subject)
    recent = _calls.recent.get(subject)
    if recent is not None:
        same, helpers, then, sole, grad, compute = recent
        if (
            have_strides(q, k)
            and have_strides(cos, sin)
            and same(q, k, cos, sin)
            and (not helpers or are_current(helpers))
            and then is unsqueeze_dim
            and sole is sole_consumer
            and grad is is_grad_enabled()
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return compute(q, k, cos, sin)
    if not all(isinstance(tensor, torch.Tensor) for tensor in (q, k, cos, sin)):  # torch.fx traces with proxies.
        return None
    grad, function = is_grad_enabled(), function_behind(subject)
    needs = (grad and q.requires_grad, grad and k.requires_grad)
    if not (are_ours(q, k, any(needs)) and are_ours(cos, sin, any(needs))):
        return proof.record_refusal(function, proof.NOT_PLAIN)
    if grad and (cos.requires_grad or sin.requires_grad or cos.is_inference() or sin.is_inference()):
        return proof.record_refusal(function, "cos or sin needs a gradient or is an inference tensor")
    call = call_of(q, k, cos, sin, unsqueeze_dim, subject, needs, sole_consumer)
    return _calls.run(subject, call, (helpers_of(function), unsqueeze_dim, sole_consumer, grad), (q, k, cos, sin))


def call_of(q, k, cos, sin, unsqueeze_dim: int, subject: Callable, needs, sole_consumer=False):
    """The recorded call for these tensors; None if the original function runs. `needs`: see `_Training`."""
    function = function_behind(subject)
    arguments = unsqueeze_dim, needs, sole_consumer
    facts = function, _called_by(function), *arguments
    return _calls.find(function, facts, (q, k, cos, sin), function, *arguments)


def _called_by(function) -> tuple[Callable, ...]:
    """The functions that the original one calls, such as `rotate_half`, each of which may be replaced."""
    return tuple([helper.function for helper in helpers_of(function)])


def _check(q, k, cos, sin) -> None:
    """Raises Outside if no kernel takes such tensors."""
    if not runs_kernels(q.device) or any(tensor.device != q.device for tensor in (k, cos, sin)):
        raise Outside(f"query {q.dtype} on {q.device}, key on {k.device}, cos on {cos.device}, sin on {sin.device}")
    if q.dtype not in FLOAT_DTYPES or cos.dtype not in FLOAT_DTYPES or k.dtype != q.dtype or sin.dtype != cos.dtype:
        raise Outside(f"query {q.dtype}, key {k.dtype}, cos {cos.dtype}, sin {sin.dtype}")


def _resolve(q, k, cos, sin, function, unsqueeze_dim, needs, sole_consumer):
    _check(q, k, cos, sin)
    strides = q.stride(), k.stride()
    if not isinstance(unsqueeze_dim, int) or not any(
        walk_of(q, k, cos, sin, unsqueeze_dim, *strides, each) for each in (PARTIAL, CHUNKED)
    ):
        shapes = f"query and key of {q.dim()} dimensions, heads of {list(q.shape[-1:])}, cos of {cos.dim()} dimensions"
        raise Outside(f"{shapes}, unsqueeze_dim {unsqueeze_dim}: no kernel takes this layout")
    variant = _variant(function, unsqueeze_dim, q.dim(), cos.dim(), q.dtype, cos.dtype, q.device)
    if variant is None:
        return None
    if walk_of(q, k, cos, sin, unsqueeze_dim, *strides, variant) is None:
        raise Outside("cos of another size than the heads")
    outs = [_output(variant, x, cos, sin, unsqueeze_dim) for x in (q, k)]
    walk = walk_of(q, k, cos, sin, unsqueeze_dim, *(out.strides for out in outs), variant)
    if walk is None:
        raise Outside("eager's outputs have another memory order than query and key")
    for of_gradients in (False, True)[: 1 + any(needs)]:
        if not kernel_is_proved(variant, q.dtype, cos.dtype, walk.sizes, q.device, of_gradients):
            return None
    launch = walk.launch("forward", variant, (q.dtype, cos.dtype, outs[0].dtype), q.device)
    forward = _Forward(launch, *outs)
    return _Training(variant, unsqueeze_dim, needs, sole_consumer, forward) if any(needs) else forward


_calls = Calls(_resolve)


def _output(variant, x, cos, sin, unsqueeze_dim) -> Output:
    def formula(x, cos, sin):
        return variant.rotate(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))

    return Output.of(formula, x, cos, sin, dtype=variant.output_dtype(x.dtype, cos.dtype))


class Rotary(torch.autograd.Function):
    """q and k enter once for each of eager's two paths, k first, in the order of eager's gradients; or once each."""

    @staticmethod
    def forward(ctx, call, k, k_again, q, q_again, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.call, ctx.dtype, ctx.paths = call, q.dtype, 1 if q_again is None else 2
        ctx.set_materialize_grads(False)
        if dispatch_modes():
            q_embed, k_embed = call.variant.eager(q, k, cos, sin, call.unsqueeze_dim)
        else:
            q_embed, k_embed = call.forward(q, k, cos, sin)
        unneeded = [out for out, needed in zip((q_embed, k_embed), call.needs) if not needed]
        ctx.mark_non_differentiable(*unneeded)
        return q_embed, k_embed

    @staticmethod
    def backward(ctx, dq_embed, dk_embed):
        cos, sin = ctx.saved_tensors
        call = ctx.call
        dq, dk = gradients(
            call.variant, dq_embed, dk_embed, cos, sin, call.unsqueeze_dim, ctx.dtype, per_path=ctx.paths == 2
        )
        return None, *dk, *dq, None, None


_apply = apply_of(Rotary)


# Gradients


_UNUSED = (None, None)


def gradients(variant, dq_embed, dk_embed, cos, sin, unsqueeze_dim: int, dtype: torch.dtype, per_path: bool) -> tuple:
    """The gradients of q and of k, of dtype `dtype`: each a pair, one for each of eager's paths.

    Args:
        dq_embed, dk_embed: the gradients of the outputs; None if undefined.
        per_path: whether each path has its own gradient; otherwise a pair is their sum and None.
    """
    if dq_embed is None and dk_embed is None:
        return _UNUSED, _UNUSED
    one = dq_embed is None or dk_embed is None
    # The kernel rotates a tensor once if it is passed as both.
    first = dk_embed if dq_embed is None else dq_embed
    second = dq_embed if dk_embed is None else dk_embed
    tensors, facts = (first, second, cos, sin), (one, unsqueeze_dim, dtype, per_path)
    call = None
    if not is_grad_enabled():
        recent = _gradient_calls.recent.get(variant)
        if (
            recent is not None
            and recent[1:-1] == facts
            and have_strides(first, second)
            and have_strides(cos, sin)
            and recent[0](*tensors)
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            call = recent[-1]
        elif are_plain(first, second) and are_plain(cos, sin):
            call = _gradient_calls.find(variant.eager, (variant, *facts), tensors, variant, *facts)
            if call is not None:
                _gradient_calls.recognise(variant, call, facts, tensors)
    if call is not None:
        dq, dk = call(*tensors)
        return _UNUSED if dq_embed is None else dq, _UNUSED if dk_embed is None else dk
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def eager(dy):
        if dy is None:
            return _UNUSED
        return variant.gradients(dy, cos, sin, dtype) if per_path else (variant.gradient(dy, cos, sin, dtype), None)

    return eager(dq_embed), eager(dk_embed)


def _resolve_gradients(dq_embed, dk_embed, cos, sin, variant, one, unsqueeze_dim, dtype, per_path):
    def formula(dy, cos, sin):
        return variant.gradient(dy, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), dtype)

    _check(dq_embed, dk_embed, cos, sin)
    if dq_embed.dtype != variant.output_dtype(dtype, cos.dtype):
        raise Outside(f"gradients {dq_embed.dtype} of query and key {dtype}, cos {cos.dtype}")
    strides = [contiguous_strides(dy.shape) for dy in (dq_embed, dk_embed)]
    as_read = [dy if dy.dim() and dy.stride(-1) == 1 else stand_ins(dy)[0].contiguous() for dy in (dq_embed, dk_embed)]
    walk = walk_of(*as_read, cos, sin, unsqueeze_dim, *strides, variant)
    if walk is None:
        raise Outside("no kernel takes the gradients' layout")
    made = _Backward
    if as_read[0] is not dq_embed or as_read[1] is not dk_embed:
        made = _BackwardOfCopies
        for dy, of_kernel in zip((dq_embed, dk_embed), strides):
            # In the formula of chunks torch.cat returns channels_last for chunks of that order.
            eagers = Output.of(formula, dy, cos, sin, dtype=dtype).strides
            if any(size > 1 and theirs != ours for size, theirs, ours in zip(dy.shape, eagers, of_kernel)):
                raise Outside("eager's gradients have another memory order")
    if not kernel_is_proved(variant, dtype, cos.dtype, walk.sizes, cos.device, gradients=True):
        return None
    if one:
        walk = replace(walk, k_heads=0)
    dtypes = dq_embed.dtype, cos.dtype, dtype
    launches = [walk.launch(step, variant, dtypes, cos.device) for step in ("gradient", "gradients")[: 1 + per_path]]
    layouts = [(dy.shape, steps, dtype, cos.device) for dy, steps in zip((dq_embed, dk_embed), strides)]
    return made(launches[0], launches[1] if per_path else None, 2, tuple(layouts[: 2 - one]))


_gradient_calls = Calls(_resolve_gradients)


# The formula


def _variant(function, unsqueeze_dim, dims, cos_dims, dtype, cos_dtype, device) -> Optional[RotaryFormula]:
    """The formula that returns the bits of the function and of its gradients."""
    for variant in FORMULAS.values():
        if function is variant.eager:
            return variant
    case = (unsqueeze_dim, dims, cos_dims, dtype, cos_dtype, device)
    key = ("formula of rotary", function, _called_by(function), *case)
    verdict = proof.verdict_on(key)
    if verdict is not None:
        return verdict.chosen
    where = f"query {dtype}, cos {cos_dtype}, unsqueeze_dim {unsqueeze_dim}, in {function.__module__}"
    codes = (getattr(each, "__code__", None) for each in (function, *_called_by(function)))
    names = {name for code in codes if code is not None for name in code.co_names}
    likely = sorted(FORMULAS.values(), key=lambda variant: variant.differs_in(names))
    candidates = {variant: functools.partial(formula_comparisons, function, variant, *case) for variant in likely}
    variant = proof.match_formula(key, proof.Subject(function, device, where), candidates)
    if variant is not None:
        proof.record_dependency(function, variant.eager)
    return variant


def formula_on_cpu(function: Callable, vision: bool) -> Optional[RotaryFormula]:
    """The formula of a function that rotates query and key, or of one of vision towers; it is proved on the CPU."""
    where = (-2, 3, 2) if vision else (1, 4, 3)
    return _variant(function, *where, torch.bfloat16, torch.bfloat16, torch.device("cpu"))


# torch.compile


def _find(q, k, cos, sin, unsqueeze_dim, variant):
    return call_of(q, k, cos, sin, unsqueeze_dim, FORMULAS[variant].eager, (False, False))


@operators.register("rotary", _find, into=operators.always)
def _rotary_op(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int, variant: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return FORMULAS[variant].eager(q, k, cos, sin, unsqueeze_dim)


def _find_gradient(dy, cos, sin, unsqueeze_dim, variant, dtype):
    formula, facts = FORMULAS[variant], (True, unsqueeze_dim, dtype, False)
    call = _gradient_calls.find(formula.eager, (formula, *facts), (dy, dy, cos, sin), formula, *facts)
    return None if call is None else call.of_one


def _fake_gradient(dy, cos, sin, unsqueeze_dim, variant, dtype):
    return torch.empty(dy.shape, dtype=dtype, device=dy.device)


# The operator adds the paths up: Inductor would add 16-bit gradients without rounding in between.
@operators.register("rotary_backward", _find_gradient, _fake_gradient)
def _rotary_backward_op(
    dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int, variant: str, dtype: torch.dtype
) -> torch.Tensor:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return FORMULAS[variant].gradient(dy, cos, sin, dtype).contiguous()


def _setup_context(ctx, inputs, output):
    q, _, cos, sin, ctx.unsqueeze_dim, ctx.variant = inputs
    ctx.dtype = q.dtype
    ctx.save_for_backward(cos, sin)


def _op_gradient(ctx, *dys):
    more = (*ctx.saved_tensors, ctx.unsqueeze_dim, ctx.variant, ctx.dtype)
    dxs = [
        _rotary_backward_op(dy, *more) if needed and dy is not None else None
        for dy, needed in zip(dys, ctx.needs_input_grad)
    ]
    return *dxs, None, None, None, None


torch.library.register_autograd(_rotary_op, _op_gradient, setup_context=_setup_context)


# Sizes may be symbolic while torch.compile traces, so a proof for one size decides whether the graph gets the operator.
# At run time the operator computes eager's formula if the kernel for the actual size is not proved.
_USUAL = Sizes(128, 128, 8)


@at_trace_time
def _proved_for_compile(subject, unsqueeze_dim, dims, cos_dims, dtype, cos_dtype, device, training) -> Optional[str]:
    """The name of the function's variant; None if no kernel is proved for it."""
    if not {dtype, cos_dtype} <= {*FLOAT_DTYPES} or not runs_kernels(device) or under_transform():
        return None
    variant = _variant(function_behind(subject), unsqueeze_dim, dims, cos_dims, dtype, cos_dtype, device)
    if variant is None or not all(
        kernel_is_proved(variant, dtype, cos_dtype, _USUAL, device, of_gradients)
        for of_gradients in (False, True)[: 1 + training]
    ):
        return None
    return variant.name


def _compiled(q, k, cos, sin, unsqueeze_dim, subject):
    """`replacement` while torch.compile traces: the registered op, or None to trace the original function."""
    if k.dtype != q.dtype or sin.dtype != cos.dtype or q.dim() not in (3, 4) or k.dim() != q.dim():
        return None
    if cos.dim() >= q.dim() or cos.dim() < 2 or sin.dim() != cos.dim():
        return None
    for dim in (1, 2, 0, -2, -3, -4):
        if unsqueeze_dim == dim:
            unsqueeze_dim = dim  # A constant in the graph, even if ints are symbolic.
            break
    else:
        return None
    if not 0 <= place_of(unsqueeze_dim, cos.dim()) < cos.dim():
        return None
    if is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return None
    training = is_grad_enabled() and (q.requires_grad or k.requires_grad)
    kind = unsqueeze_dim, q.dim(), cos.dim(), q.dtype, cos.dtype, q.device, training
    name = _proved_for_compile(subject, *kind)
    return None if name is None else _rotary_op(q, k, cos, sin, unsqueeze_dim, name)
