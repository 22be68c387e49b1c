"""Rotary position embedding with the bits of transformers' `apply_rotary_pos_emb`, query and key in one launch."""

import functools
import math
from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from .._ops import add_op_namespace_prefix
from ..core import launch, proof
from ..core.domain import (
    FLOAT_DTYPES,
    UNSEEN,
    are_dense,
    are_ours,
    are_plain,
    check_floating,
    remember,
    runs_kernels,
    same_tensors,
    under_transform,
)
from ..core.layout import Output, contiguous_strides
from ..core.torch_internals import apply_of, dispatch_modes, forward_ad

if launch.AVAILABLE:
    from ..kernels_src.rotary import rotary


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of query and key.

    `x * cos + rotate_half(x) * sin` for x = q and x = k, with `cos` and `sin` unsqueezed at `unsqueeze_dim` and
    `rotate_half(x) = cat((-x2, x1), -1)` of the halves x1, x2 of the last dimension; every operation rounds. Bit for bit
    what `apply_rotary_pos_emb` of transformers' Llama returns. Nothing is written in place.

    Args:
        q: `[batch, heads, tokens, head_dim]`, any strides, any real floating dtype.
        k: as `q`, with a number of heads of its own.
        cos: `[batch or 1, tokens, head_dim]`, any real floating dtype.
        sin: as `cos`.
        unsqueeze_dim: where `q` and `k` have their heads: 1, or 2 for `[batch, tokens, heads, head_dim]`.

    Returns:
        `(q_embed, k_embed)` of the shapes, dtypes and strides that eager returns.

    Raises:
        TypeError: an argument is no tensor or not of a real floating dtype, or `unsqueeze_dim` is no int.
        ValueError: tensors on two devices, or shapes that do not broadcast.

    The kernel runs for fp32, fp16 and bf16 on CUDA if `head_dim` is even, up to 1024 and contiguous in every tensor and if
    `cos` and `sin` need no gradient; anything else is computed by the formula above.
    """
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
    out = replacement(q, k, cos, sin, unsqueeze_dim, PLAIN.eager)
    return PLAIN.eager(q, k, cos, sin, unsqueeze_dim) if out is None else out


# Eager


def _rotate(x, cos, sin):
    straight = x * cos
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return straight + torch.cat((-second, first), dim=-1) * sin


def _rotate_widened(x, cos, sin):
    return _rotate(x, cos.to(torch.float32), sin.to(torch.float32)).to(x.dtype)


def _eager_function(rotate):
    def eager(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    eager.__qualname__ = "apply_rotary_pos_emb"
    return eager


@dataclass(frozen=True)
class Variant:
    """One of the formulas.

    Attributes:
        name: for operators.
        formula: for people.
        rotate: one tensor in torch operations, by cos and sin that are unsqueezed.
        eager: both.
        keeps_dtype: computed in fp32, the output is rounded to the dtype of q.
    """

    name: str
    formula: str
    rotate: Callable
    eager: Callable
    keeps_dtype: bool

    @classmethod
    def of(cls, name, formula, rotate, keeps_dtype):
        return cls(name, formula, rotate, _eager_function(rotate), keeps_dtype)

    def gradients(self, dy, cos, sin, dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """What eager sends into an input of this dtype, in the order of arrival: through the halves, and x * cos.

        The gradients of the halves, padded with zeros, arrive one by one. No other order of these sums has other bits:
        a sum with zeros has no sign but that of its other terms, or plus.

        Args:
            dy: the gradient of the output.
            cos: unsqueezed, as is sin.
        """
        if self.keeps_dtype:
            dy, cos, sin = (tensor.to(torch.float32) for tensor in (dy, cos, sin))
        halves = (dy * sin).to(dtype)
        size = halves.shape[-1]
        pad = functools.partial(torch.ops.aten.slice_backward, input_sizes=halves.shape, dim=-1, step=1)
        second = pad(-halves[..., : size // 2], start=size // 2, end=size)
        first = pad(halves[..., size // 2 :], start=0, end=size // 2)
        return second + first, (dy * cos).to(dtype)


PLAIN = Variant.of("plain", "x * cos + rotate_half(x) * sin", _rotate, keeps_dtype=False)
WIDENED = Variant.of(
    "widened", "(x.float() * cos + rotate_half(x).float() * sin).to(dtype)", _rotate_widened, keeps_dtype=True
)
_VARIANTS = {variant.name: variant for variant in (PLAIN, WIDENED)}


# The launch


# Bytes of a half of its heads that a program's warp reads: 16 for each thread, twice (H200).
_BYTES_PER_WARP = 1024
_MIN_HEADS_PER_PROGRAM = 8
_MAX_HEADS_PER_PROGRAM = 16
_MAX_HEAD_DIM = 1024
# Of CUDA's grid, along x.
_MAX_PROGRAMS = (1 << 31) - 1


@dataclass(frozen=True)
class Plan:
    """How many heads of one token a program has, and its warps."""

    heads_per_program: int
    num_warps: int


def launch_plan(head_dim: int, dtype: torch.dtype) -> Plan:
    """The plan for heads of this size; `dtype` is that of what is read."""
    half = 1 << (head_dim // 2 - 1).bit_length()
    heads = _BYTES_PER_WARP // (half * dtype.itemsize)
    heads = min(max(heads, _MIN_HEADS_PER_PROGRAM), _MAX_HEADS_PER_PROGRAM)
    return Plan(heads, min(max(heads * half * dtype.itemsize // _BYTES_PER_WARP, 1), 8))


def _place(unsqueeze_dim: int, dims: int) -> int:
    """Where the new dimension of a tensor of so many is, counted from the first."""
    return unsqueeze_dim if unsqueeze_dim >= 0 else unsqueeze_dim + dims + 1


def _steps(shape, strides, heads_dim) -> tuple[int, int, int]:
    """The strides over batch, tokens and heads of `[batch, tokens, heads, head_dim]` in whatever order; 0 over one only."""
    steps = [stride if size != 1 else 0 for size, stride in zip(shape, strides)][:-1]
    head_step = steps.pop(heads_dim)
    return (*(0,) * (2 - len(steps)), *steps, head_step)


@dataclass(frozen=True)
class Walk:
    """Where a call's tensors have their heads; the strides over batch, tokens and heads count elements."""

    batch: int
    tokens: int
    q_heads: int
    k_heads: int
    head_dim: int
    q: tuple[int, int, int]
    k: tuple[int, int, int]
    q_out: tuple[int, int, int]
    k_out: tuple[int, int, int]
    cos: tuple[int, int, int]
    sin: tuple[int, int, int]

    @property
    def unit(self) -> int:
        """So many elements, up to 16 bytes of 16 bits each, can be read at a time."""
        return math.gcd(8, self.head_dim // 2, *self.q, *self.k, *self.q_out, *self.k_out, *self.cos, *self.sin)

    def launch(self, step: str, keeps_dtype: bool, dtypes, device: torch.device) -> Optional[launch.Launch]:
        """The launch, to be called with q, k, cos, sin and the outputs; None if these are too many programs.

        Args:
            dtypes: of what is read, of cos and of what is written.
        """
        read, table, written = dtypes
        plan = launch_plan(self.head_dim, read)
        constants = {
            "STEP": step,
            "WIDENED": keeps_dtype and step == "forward",
            "HALF": self.head_dim // 2,
            "HALF_BLOCK": 1 << (self.head_dim // 2 - 1).bit_length(),
            "UNIT": self.unit,
            "HEADS": plan.heads_per_program,
        }
        q_groups, k_groups = (-(-heads // plan.heads_per_program) for heads in (self.q_heads, self.k_heads))
        programs = self.batch * self.tokens * (q_groups + k_groups)
        if programs > _MAX_PROGRAMS:
            return None
        steps = (*self.q, *self.k, *self.q_out, *self.k_out, *self.cos[:2], *self.sin[:2])
        steps = tuple([step // self.unit for step in steps])
        scalars = (self.tokens, q_groups + k_groups, q_groups, self.q_heads, self.k_heads, *steps)
        dtypes = (read, read, table, table, *(written,) * 4)
        return launch.bind(rotary, constants, plan.num_warps, device, dtypes, programs, *scalars)


def _walk(q, k, cos, sin, unsqueeze_dim, q_out_strides, k_out_strides) -> Optional[Walk]:
    """How the kernel goes through these tensors; None if it cannot."""
    dims, cos_dims = q.dim(), cos.dim()
    if k.dim() != dims or dims not in (3, 4) or not 2 <= cos_dims < dims or sin.dim() != cos_dims:
        return None
    place = _place(unsqueeze_dim, cos_dims)
    if not 0 <= place < cos_dims:
        return None
    heads_dim = place + dims - 1 - cos_dims
    head_dim = q.shape[-1]
    others = [[size for dim, size in enumerate(x.shape) if dim != heads_dim] for x in (q, k)]
    if others[0] != others[1] or head_dim % 2 or not 2 <= head_dim <= _MAX_HEAD_DIM or not q.numel() or not k.numel():
        return None
    tables = []
    for table in (cos, sin):
        table = table.unsqueeze(unsqueeze_dim)
        if table.shape[-1] != head_dim or torch.broadcast_shapes(table.shape, q.shape) != q.shape:
            return None
        table = table.expand(q.shape)
        steps = _steps(table.shape, table.stride(), heads_dim)
        if steps[2] or table.stride(-1) != 1:
            return None
        tables.append(steps)
    if q.stride(-1) != 1 or k.stride(-1) != 1 or q_out_strides[-1] != 1 or k_out_strides[-1] != 1:
        return None
    *leading, tokens = [size for dim, size in enumerate(q.shape[:-1]) if dim != heads_dim]
    return Walk(
        math.prod(leading),
        tokens,
        q.shape[heads_dim],
        k.shape[heads_dim],
        head_dim,
        _steps(q.shape, q.stride(), heads_dim),
        _steps(k.shape, k.stride(), heads_dim),
        _steps(q.shape, q_out_strides, heads_dim),
        _steps(k.shape, k_out_strides, heads_dim),
        *tables,
    )


# From a call's tensors to a kernel


class _Call:
    """All that follows from the shapes, strides, dtypes and device of a call."""

    __slots__ = ("variant", "unsqueeze_dim", "launch", "q_out", "k_out", "empty_q", "empty_k", "needs")

    def __init__(self, variant, unsqueeze_dim, launch: launch.Launch, q_out: Output, k_out: Output, needs):
        self.variant = variant
        self.unsqueeze_dim = unsqueeze_dim
        self.launch = launch.on_six
        self.q_out = q_out
        self.k_out = k_out
        self.empty_q, self.empty_k = q_out.empty, k_out.empty
        # Whether gradients of q and of k are.
        self.needs = needs

    def __call__(self, q, k, cos, sin):
        q_embed, k_embed = self.empty_q(), self.empty_k()
        self.launch(q, k, cos, sin, q_embed, k_embed)
        return q_embed, k_embed

    def differentiable(self, q, k, cos, sin):
        return _apply(self, k, k, q, q, cos, sin)

    def sole_consumer(self, q, k, cos, sin):
        return _apply(self, k, None, q, None, cos, sin)


_calls = {}
# By the function that is replaced its last call, which is found without building the key above.
_recent = {}


def replacement(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int,
    subject: Callable,
    sole_consumer: bool = False,
) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
    """What the original function returns, from the kernel; None where the caller must compute it itself.

    Args:
        subject: that function, or the forward that `kernels` made of it.
        sole_consumer: nothing else ever uses `q` and `k`. Each then gets one gradient, the sum, instead of one for each
            path, which autograd adds one by one to those of others. With other consumers the sum has other bits.
    """
    if is_dynamo_compiling():
        return _compiled(q, k, cos, sin, unsqueeze_dim, subject)
    recent = _recent.get(subject)
    if recent is not None:
        same, helpers, then, sole, grad, call = recent
        if (
            are_dense(q, k)
            and are_dense(cos, sin)
            and same(q, k, cos, sin)
            and (not helpers or proof.are_current(helpers))
            and then == unsqueeze_dim
            and sole == sole_consumer
            and grad == is_grad_enabled()
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            return call(q, k, cos, sin)
    if not all(isinstance(tensor, torch.Tensor) for tensor in (q, k, cos, sin)):  # torch.fx traces with something else.
        return None
    grad = is_grad_enabled()
    needs = (grad and q.requires_grad, grad and k.requires_grad)
    if not (are_ours(q, k, any(needs)) and are_ours(cos, sin, any(needs))):
        proof.outside(proof.function_behind(subject), proof.NOT_PLAIN)
        return None
    if grad and (cos.requires_grad or sin.requires_grad or cos.is_inference() or sin.is_inference()):
        proof.outside(proof.function_behind(subject), "cos or sin that need a gradient, or are inference tensors")
        return None
    call = call_of(q, k, cos, sin, unsqueeze_dim, subject, needs)
    if call is None:
        return None
    if needs == (False, False):
        call = call.__call__
    else:
        call = call.sole_consumer if sole_consumer else call.differentiable
    same = same_tensors(q, k, cos, sin)
    if same is not None:
        helpers = proof.helpers_of(proof.function_behind(subject))
        remember(_recent, subject, (same, helpers, unsqueeze_dim, sole_consumer, grad, call))
    return call(q, k, cos, sin)


def call_of(q, k, cos, sin, unsqueeze_dim: int, subject: Callable, needs) -> Optional[_Call]:
    """The call for these tensors, looked up; None if the original function runs.

    Args:
        needs: whether the gradients of q and of k are needed.
    """
    try:
        key = (subject, _called_by(subject), unsqueeze_dim, needs, *map(_told, (q, k, cos, sin)))
        call = _calls.get(key, UNSEEN)
    except (RuntimeError, TypeError):  # Sparse and nested tensors have no strides.
        return None
    if call is UNSEEN:
        call = remember(_calls, key, _resolve(q, k, cos, sin, unsqueeze_dim, proof.function_behind(subject), needs))
    return call


def _called_by(function) -> tuple[Callable, ...]:
    """The functions that the original one calls, `rotate_half` for one: somebody may replace them."""
    return tuple([helper.function for helper in proof.helpers_of(proof.function_behind(function))])


def _told(tensor):
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _outside(q, k, cos, sin) -> Optional[str]:
    """Why no kernel takes these tensors, None if one may."""
    if not runs_kernels(q.device) or any(tensor.device != q.device for tensor in (k, cos, sin)):
        return f"query {q.dtype} on {q.device}, key on {k.device}, cos on {cos.device}, sin on {sin.device}"
    if q.dtype not in FLOAT_DTYPES or cos.dtype not in FLOAT_DTYPES:
        return f"query {q.dtype}, cos {cos.dtype}"
    if k.dtype != q.dtype or sin.dtype != cos.dtype:
        return f"query {q.dtype}, key {k.dtype}, cos {cos.dtype}, sin {sin.dtype}"
    return None


def _resolve(q, k, cos, sin, unsqueeze_dim, function, needs) -> Optional[_Call]:
    """The call for these tensors, or None if they lie outside the domain or the kernels are not proved."""
    reason = _outside(q, k, cos, sin)
    if reason is not None:
        proof.outside(function, reason)
        return None
    if not isinstance(unsqueeze_dim, int) or _walk(q, k, cos, sin, unsqueeze_dim, q.stride(), k.stride()) is None:
        shapes = f"query and key of {q.dim()} dimensions, heads of {list(q.shape[-1:])}, cos of {cos.dim()} dimensions"
        proof.outside(function, f"{shapes}, unsqueeze_dim {unsqueeze_dim}: in a layout that no kernel takes")
        return None
    variant = _variant(function, unsqueeze_dim, q.dim(), cos.dim(), q.dtype, cos.dtype, q.device)
    if variant is None:
        return None
    outs = [_output(variant, x, cos, sin, unsqueeze_dim) for x in (q, k)]
    walk = _walk(q, k, cos, sin, unsqueeze_dim, *(out.strides for out in outs))
    if walk is None:
        proof.outside(function, "query and key of which eager's outputs lie in memory in another order")
        return None
    if not _proved(variant, q.dtype, cos.dtype, walk.head_dim, walk.unit, q.device):
        return None
    if any(needs) and not _proved(variant, q.dtype, cos.dtype, walk.head_dim, walk.unit, q.device, gradients=True):
        return None
    launch = walk.launch("forward", variant.keeps_dtype, (q.dtype, cos.dtype, outs[0].dtype), q.device)
    if launch is None:
        proof.outside(function, "more heads than a launch has programs for")
        return None
    return _Call(variant, unsqueeze_dim, launch, *outs, needs)


def _output_dtype(variant, dtype, cos_dtype) -> torch.dtype:
    return dtype if variant.keeps_dtype else torch.promote_types(dtype, cos_dtype)


def _output(variant, x, cos, sin, unsqueeze_dim) -> Output:
    def formula(x, cos, sin):
        return variant.rotate(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))

    return Output.of(formula, x, cos, sin, dtype=_output_dtype(variant, x.dtype, cos.dtype))


class Rotary(torch.autograd.Function):
    """q and k enter once for each of eager's paths from them, k first, as eager's gradients arrive; or once each."""

    @staticmethod
    def forward(ctx, call, k, k_again, q, q_again, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.call, ctx.dtype, ctx.paths = call, q.dtype, 1 if q_again is None else 2
        ctx.set_materialize_grads(False)
        if dispatch_modes():
            q_embed, k_embed = call.variant.eager(q, k, cos, sin, call.unsqueeze_dim)
        else:
            q_embed, k_embed = call(q, k, cos, sin)
        unneeded = [out for out, needed in zip((q_embed, k_embed), call.needs) if not needed]
        ctx.mark_non_differentiable(*unneeded)
        return q_embed, k_embed

    @staticmethod
    def backward(ctx, dq_embed, dk_embed):
        cos, sin = ctx.saved_tensors
        call = ctx.call
        dq, dk = gradients(
            call.variant, dq_embed, dk_embed, cos, sin, call.unsqueeze_dim, ctx.dtype, apart=ctx.paths == 2
        )
        return None, *dk, *dq, None, None


_apply = apply_of(Rotary)


# Gradients


_gradient_calls = {}
_NOTHING = (None, None)


def gradients(variant, dq_embed, dk_embed, cos, sin, unsqueeze_dim: int, dtype: torch.dtype, apart: bool) -> tuple:
    """The gradients of q and of k, of dtype `dtype`: each a pair, one for each of eager's paths.

    Args:
        dq_embed: the gradient of q's output; None if there is none, as for dk_embed.
        apart: otherwise the first of a pair is the sum, the second None.
    """
    if dq_embed is None and dk_embed is None:
        return _NOTHING, _NOTHING
    first, second = dq_embed, dk_embed
    if first is None or second is None:
        first = second = dk_embed if first is None else first
    if not is_grad_enabled() and are_plain(first, second) and are_plain(cos, sin):
        one = dq_embed is None or dk_embed is None
        key = (variant, one, unsqueeze_dim, dtype, apart, *map(_told, (first, second, cos, sin)))
        call = _gradient_calls.get(key, UNSEEN)
        if call is UNSEEN:
            call = remember(_gradient_calls, key, _resolve_gradients(*key[:5], first, second, cos, sin))
        if call is not None:
            found = call(first, second, cos, sin)
            return _NOTHING if dq_embed is None else found[0], _NOTHING if dk_embed is None else found[-1]
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def eager(dy):
        if dy is None:
            return _NOTHING
        paths = variant.gradients(dy, cos, sin, dtype)
        return paths if apart else (paths[0] + paths[1], None)

    return eager(dq_embed), eager(dk_embed)


class _Gradients:
    """All that follows from the shapes, strides, dtypes and device of a call's incoming gradients."""

    __slots__ = ("launch", "dtype", "apart", "one")

    def __init__(self, launch: launch.Launch, dtype: torch.dtype, apart: bool, one: bool):
        self.launch = launch
        self.dtype = dtype
        self.apart = apart
        self.one = one

    def __call__(self, dq_embed, dk_embed, cos, sin):
        # Eager's gradients are contiguous whatever q and k are: they are made of zeros.
        new = functools.partial(torch.empty, dtype=self.dtype, device=dq_embed.device)
        dq = new(dq_embed.shape)
        dk = dq if self.one else new(dk_embed.shape)
        if not self.apart:
            self.launch.on_six(dq_embed, dk_embed, cos, sin, dq, dk)
            return (dq, None), (dk, None)
        dq_straight = new(dq_embed.shape)
        dk_straight = dq_straight if self.one else new(dk_embed.shape)
        self.launch(dq_embed, dk_embed, cos, sin, dq, dk, dq_straight, dk_straight)
        return (dq, dq_straight), (dk, dk_straight)


def _resolve_gradients(variant, one, unsqueeze_dim, dtype, apart, dq_embed, dk_embed, cos, sin) -> Optional[_Gradients]:
    if _outside(dq_embed, dk_embed, cos, sin) is not None:
        return None
    if dq_embed.dtype != _output_dtype(variant, dtype, cos.dtype):
        return None
    strides = (contiguous_strides(dy.shape) for dy in (dq_embed, dk_embed))
    walk = _walk(dq_embed, dk_embed, cos, sin, unsqueeze_dim, *strides)
    if walk is None or not _proved(variant, dtype, cos.dtype, walk.head_dim, walk.unit, cos.device, gradients=True):
        return None
    if one:
        walk = Walk(**{**vars(walk), "k_heads": 0})
    step, dtypes = "gradients" if apart else "gradient", (dq_embed.dtype, cos.dtype, dtype)
    launch = walk.launch(step, variant.keeps_dtype, dtypes, cos.device)
    return None if launch is None else _Gradients(launch, dtype, apart, one)


# Proof


def _variant(function, unsqueeze_dim, dims, cos_dims, dtype, cos_dtype, device) -> Optional[Variant]:
    """The formula that has the bits of the function, and of its gradients."""
    for variant in _VARIANTS.values():
        if function is variant.eager:
            return variant
    case = (unsqueeze_dim, dims, cos_dims, dtype, cos_dtype, device)
    key = ("formula of rotary", function, _called_by(function), *case)
    verdict = proof.recognized(key)
    if verdict is not None:
        return verdict.chosen
    where = f"query {dtype}, cos {cos_dtype}, unsqueeze_dim {unsqueeze_dim}, in {function.__module__}"
    candidates = {variant: functools.partial(_formulas, function, variant, *case) for variant in _VARIANTS.values()}
    variant = proof.recognize(key, proof.Subject(function, device, where), candidates)
    if variant is not None:
        proof.relies(function, variant.eager)
    return variant


_HEAD_DIM, _TOKENS, _Q_HEADS, _K_HEADS = 32, 5, 3, 2


def _numbers(shape, dtype, generator):
    """Random numbers, one in eight of them a zero, of either sign: position 0 has a sine of zero."""
    numbers = torch.randn(shape, device=generator.device, generator=generator)
    zeros = torch.randint(8, shape, device=generator.device, generator=generator) == 0
    return torch.where(zeros, numbers * 0.0, numbers).to(dtype)


def _formulas(function, variant, unsqueeze_dim, dims, cos_dims, dtype, cos_dtype, device):
    make = functools.partial(_numbers, generator=proof.generator(device, 3))
    heads_dim = _place(unsqueeze_dim, cos_dims) + dims - 1 - cos_dims
    sizes = [2, _TOKENS][4 - dims :]

    def states(heads):
        # As from a projection: heads next to head_dim in memory.
        return make((*sizes, heads, _HEAD_DIM), dtype).movedim(len(sizes), heads_dim)

    data = states(_Q_HEADS), states(_K_HEADS)
    tables = [make((*sizes, _HEAD_DIM)[dims - 1 - cos_dims :], cos_dtype) for _ in range(2)]
    results = []
    for compute in (variant.eager, function):
        q, k = (tensor.clone().requires_grad_() for tensor in data)
        with torch.enable_grad():
            earlier = q * 1.0, k * 1.0
            outs = compute(q, k, *tables, unsqueeze_dim)
            later = q * 1.0, k * 1.0
        generator = proof.generator(device, 4)
        dys = [_numbers(out.shape, out.dtype, generator) for out in (*outs, *earlier, *later)]
        found = [("the output", out.detach()) for out in outs]
        for what, some in (("", 2), (" with others'", 6)):
            roots = (*outs, *earlier, *later)[:some]
            grads = torch.autograd.grad(roots, (q, k), dys[:some], retain_graph=True)
            found += [(f"the input's gradient{what}", grad) for grad in grads]
        results.append(found)
    yield from ((what, ours, theirs) for (what, ours), (_, theirs) in zip(*results))


def _proved(variant, dtype, cos_dtype, head_dim, unit, device, gradients=False) -> bool:
    what, comparisons = ("gradient", _gradient_comparisons) if gradients else ("output", _comparisons)
    return proof.admits(
        ("rotary", variant, what, dtype, cos_dtype, head_dim, unit, device),
        proof.Subject(variant.eager, device, f"{dtype}, cos {cos_dtype}, heads of {head_dim}, {what}", variant.formula),
        functools.partial(comparisons, variant, dtype, cos_dtype, head_dim, unit, device),
    )


def _sample(dtype, cos_dtype, head_dim, unit, device, contiguous_outs=False):
    """States as from one projection of q and k, cos and sin; how to walk them; tensors for the outputs, all NaN.

    All rows lie `unit` elements further apart than they are long, or more, and the last program of a token has one head.
    """
    make = functools.partial(_numbers, generator=proof.generator(device, 5))
    heads = launch_plan(head_dim, dtype).heads_per_program + 1
    states = make((2, 7, heads + 2, head_dim + unit), dtype)[..., :head_dim].transpose(1, 2)
    tables = (make((2, 7, head_dim + unit), cos_dtype)[..., :head_dim] for _ in range(2))
    q, k = states[:, :heads], states[:, heads:]
    return q, k, *tables


def _nan_like(x, dtype, contiguous):
    layout = torch.contiguous_format if contiguous else torch.preserve_format
    return torch.empty_like(x, dtype=dtype, memory_format=layout).fill_(math.nan)


def _launch_sample(step, variant, dtypes, unit, q, k, cos, sin, *outs):
    walk = _walk(q, k, cos, sin, 1, outs[0].stride(), outs[1].stride())
    if walk.unit != unit:
        raise AssertionError(f"the sample's unit is {walk.unit}, not {unit}")
    walk.launch(step, variant.keeps_dtype, dtypes, q.device)(q, k, cos, sin, *outs)


def _comparisons(variant, dtype, cos_dtype, head_dim, unit, device):
    q, k, cos, sin = _sample(dtype, cos_dtype, head_dim, unit, device)
    out_dtype = _output_dtype(variant, dtype, cos_dtype)
    outs = [_nan_like(x, out_dtype, contiguous=False) for x in (q, k)]
    _launch_sample("forward", variant, (dtype, cos_dtype, out_dtype), unit, q, k, cos, sin, *outs)
    for out, expected in zip(outs, variant.eager(q, k, cos, sin, 1)):
        yield "the output", out, expected


def _gradient_comparisons(variant, dtype, cos_dtype, head_dim, unit, device):
    dy_dtype = _output_dtype(variant, dtype, cos_dtype)
    *dys, cos, sin = _sample(dy_dtype, cos_dtype, head_dim, unit, device)
    inputs = [torch.zeros(dy.shape, dtype=dtype, device=device, requires_grad=True) for dy in dys]
    others = [_numbers(dy.shape, dtype, proof.generator(device, 6)) for dy in dys]
    found = {}
    for step, paths in (("gradient", 1), ("gradients", 2)):
        outs = [_nan_like(dy, dtype, contiguous=True) for _ in range(paths) for dy in dys]
        _launch_sample(step, variant, (dy_dtype, cos_dtype, dtype), unit, *dys, cos, sin, *outs)
        found[step] = outs
    with torch.enable_grad():
        outs = variant.eager(*inputs, cos, sin, 1)
        alone = torch.autograd.grad(outs, inputs, dys, retain_graph=True)
        # A gradient that is there already shows how many reach x, and in which order.
        joined = torch.autograd.grad((*outs, *(x * 1.0 for x in inputs)), inputs, (*dys, *others))
    for index, other in enumerate(others):
        rotated, straight = found["gradients"][index::2]
        yield "the input's gradient", found["gradient"][index], alone[index]
        yield "the input's gradient", rotated + straight, alone[index]
        yield "the input's gradient with another", other + rotated + straight, joined[index]


# torch.compile


@torch.library.custom_op(add_op_namespace_prefix("rotary"), mutates_args=())
def _rotary_op(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int, variant: str
) -> tuple[torch.Tensor, torch.Tensor]:
    eager = _VARIANTS[variant].eager
    with torch.no_grad():
        out = replacement(q, k, cos, sin, unsqueeze_dim, eager)
    return eager(q, k, cos, sin, unsqueeze_dim) if out is None else out


@_rotary_op.register_fake
def _(q, k, cos, sin, unsqueeze_dim, variant):
    return _VARIANTS[variant].eager(q, k, cos, sin, unsqueeze_dim)


# The paths are added up in here: Inductor would add 16-bit gradients without rounding in between.
@torch.library.custom_op(add_op_namespace_prefix("rotary_backward"), mutates_args=())
def _rotary_backward_op(
    dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int, variant: str, dtype: torch.dtype
) -> torch.Tensor:
    with torch.no_grad():
        (dx, _), _ = gradients(_VARIANTS[variant], dy, None, cos, sin, unsqueeze_dim, dtype, apart=False)
    return dx


@_rotary_backward_op.register_fake
def _(dy, cos, sin, unsqueeze_dim, variant, dtype):
    return torch.empty(dy.shape, dtype=dtype, device=dy.device)


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


_rotary_op.register_autograd(_op_gradient, setup_context=_setup_context)


# Sizes may be symbolic where torch.compile traces. For those of a call the operator decides, and computes eager's formula
# where the kernel is not proved; for one size the proof shows that it is worth an operator.
_USUAL_HEAD_DIM = 128


@torch.compiler.assume_constant_result
def _proved_for_compile(
    subject, unsqueeze_dim, dims, cos_dims, dtype, cos_dtype, device_type, device_index, training
) -> Optional[str]:
    """The name of the variant that the function is, None if no kernel is proved for it."""
    device = torch.device(device_type, device_index)
    if under_transform():
        return None
    variant = _variant(proof.function_behind(subject), unsqueeze_dim, dims, cos_dims, dtype, cos_dtype, device)
    if variant is None or not all(
        _proved(variant, dtype, cos_dtype, _USUAL_HEAD_DIM, 8, device, of_gradients)
        for of_gradients in (False, True)[: 1 + training]
    ):
        return None
    return variant.name


def _compiled(q, k, cos, sin, unsqueeze_dim, subject):
    """`replacement` while torch.compile traces: the registered op, or None to trace the original function."""
    if not runs_kernels(q.device) or q.dtype not in FLOAT_DTYPES or cos.dtype not in FLOAT_DTYPES:
        return None
    if k.dtype != q.dtype or sin.dtype != cos.dtype or q.dim() not in (3, 4) or k.dim() != q.dim():
        return None
    if cos.dim() >= q.dim() or cos.dim() < 2 or sin.dim() != cos.dim():
        return None
    for dim in (1, 2, 0, -2, -3, -4):
        if unsqueeze_dim == dim:
            unsqueeze_dim = dim  # A constant in the graph, even if every int is symbolic.
            break
    else:
        return None
    if not 0 <= _place(unsqueeze_dim, cos.dim()) < cos.dim():
        return None
    training = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return None
    index = 0 if q.device.index is None else q.device.index
    name = _proved_for_compile(
        subject, unsqueeze_dim, q.dim(), cos.dim(), q.dtype, cos.dtype, q.device.type, index, training
    )
    return None if name is None else _rotary_op(q, k, cos, sin, unsqueeze_dim, name)
