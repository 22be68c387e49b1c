"""Rotary position embedding as a complex product, with the bits of the functions of Llama 4 and DeepSeek-V2."""

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
    allocator,
    are_ours,
    are_plain,
    at_trace_time,
    check_floating,
    have_strides,
    is_traced_plainly,
    runs_kernels,
)
from ..core.inspection import function_behind, helpers_of
from ..core.layout import Output, contiguous_strides, divider
from ..core.reduction import next_power_of_two
from ..core.torch_internals import apply_of, dispatch_modes, forward_ad

if launch.AVAILABLE:
    from ..kernels_src.complex_rotary import complex_rotary


def apply_rotary_emb(
    xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor, unsqueeze_dim: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of query and key, pairs of neighbours as complex numbers, in fp32.

    `view_as_real(view_as_complex(x.float().reshape(..., -1, 2)) * freqs_cis.unsqueeze(unsqueeze_dim)).flatten(3)`, rounded
    to the dtype of x, for x = xq and x = xk. Bit for bit what `apply_rotary_emb` of transformers' Llama 4 returns, and
    with `unsqueeze_dim=1` that of DeepSeek-V2.

    Args:
        xq: `[batch, tokens, heads, head_dim]`, with `unsqueeze_dim=1` `[batch, heads, tokens, head_dim]`; any strides, any
            real floating dtype.
        xk: as `xq`; the number of heads may differ.
        freqs_cis: `[batch or 1, tokens, head_dim / 2]`, complex64.
        unsqueeze_dim: the heads' dimension: 2 or 1.

    Returns:
        Both embedded, of the shapes, dtypes and strides that eager returns.

    Raises:
        TypeError: `xq` or `xk` is no tensor of a real floating dtype, or `freqs_cis` none of complex64.
        ValueError: tensors on two devices, shapes that do not fit, or another `unsqueeze_dim`.

    The kernel runs for fp32, fp16 and bf16 on CUDA if `head_dim` is at most 1024 and contiguous in every tensor, all strides
    of `xq` and `xk` are even, and `freqs_cis` needs no gradient. Eager computes everything else.
    """
    if not isinstance(freqs_cis, torch.Tensor) or freqs_cis.dtype != torch.complex64:
        found = freqs_cis.dtype if isinstance(freqs_cis, torch.Tensor) else type(freqs_cis).__name__
        raise TypeError(f"freqs_cis: expected a tensor of torch.complex64, found {found}")
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim: expected 1 or 2, found {unsqueeze_dim!r}")
    for name, x in (("xq", xq), ("xk", xk)):
        check_floating(name, x)
        if x.device != freqs_cis.device:
            raise ValueError(f"{name}: expected device {freqs_cis.device} of freqs_cis, found {x.device}")
        if x.dim() != 4 or freqs_cis.dim() != 3 or x.shape[-1] != 2 * freqs_cis.shape[-1]:
            raise ValueError(
                f"{name}: expected four dimensions, the last twice as long as that of freqs_cis {list(freqs_cis.shape)}, "
                f"found {list(x.shape)}"
            )
        batch, tokens = x.shape[0], x.shape[3 - unsqueeze_dim]
        if freqs_cis.shape[0] not in (1, batch) or freqs_cis.shape[1] != tokens:
            raise ValueError(
                f"freqs_cis: expected [{batch} or 1, {tokens}, {x.shape[-1] // 2}] for {name} {list(x.shape)}, found "
                f"{list(freqs_cis.shape)}"
            )
    return rotated(xq, freqs_cis, unsqueeze_dim), rotated(xk, freqs_cis, unsqueeze_dim)


def rotated(x: torch.Tensor, freqs_cis: torch.Tensor, unsqueeze_dim: int) -> torch.Tensor:
    """x with its rotary embedding."""
    out = replacement(x, freqs_cis, unsqueeze_dim)
    return eager(x, freqs_cis, unsqueeze_dim) if out is None else out


def both_replaced(xq, xk, freqs_cis, subject: Callable) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
    """What a function of a model file returns for these tensors, from the kernel; None if that function must run.

    Args:
        subject: the function, or the forward that `kernels` made of it.
    """
    if not all(isinstance(each, torch.Tensor) for each in (xq, xk, freqs_cis)):  # torch.fx traces with proxies.
        return None
    dim = _dim_for_compile(subject) if is_dynamo_compiling() else unsqueeze_dim_of(function_behind(subject))
    if dim is None:
        return None
    out = replacement(xq, freqs_cis, dim)
    also = None if out is None else replacement(xk, freqs_cis, dim)
    return None if also is None else (out, also)


def eager(x, freqs_cis, unsqueeze_dim) -> torch.Tensor:
    """The formula in torch operations."""
    complex_x = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(complex_x * freqs_cis.unsqueeze(unsqueeze_dim)).flatten(3).type_as(x)


def formula(dy, freqs_cis, unsqueeze_dim) -> torch.Tensor:
    """The gradient of x in differentiable torch operations, as autograd computes it: contiguous."""
    return eager(dy.contiguous(), freqs_cis.conj(), unsqueeze_dim)


# Calls


_MAX_HEAD_DIM = 1024
# Elements of a program, and of a thread.
_ELEMENTS, _ELEMENTS_PER_THREAD = 1024, 8


@dataclass(frozen=True)
class Kind:
    """The properties that a kernel is compiled for; units are the elements by which strides are counted.

    Attributes:
        heads: of a program.
    """

    dtype: torch.dtype
    half: int
    unit: int
    freqs_unit: int
    conjugate: bool
    heads: int

    def launch(self, batch, tokens, heads, steps, freqs_steps, device) -> launch.Launch:
        """The launch for x, freqs as real numbers and the output.

        Args:
            steps: strides of x and of the output over batch, tokens and heads.
            freqs_steps: those of freqs, in real numbers, over batch and tokens.
        """
        block = next_power_of_two(self.half)
        constants = {
            "HALF": self.half,
            "HALF_BLOCK": block,
            "UNIT": self.unit,
            "FREQS_UNIT": self.freqs_unit,
            "HEADS": self.heads,
            "CONJUGATE": self.conjugate,
        }
        groups = -(-heads // self.heads)
        warps = max(self.heads * 2 * block // (_ELEMENTS_PER_THREAD * 32), 1)
        in_units = [step // self.unit for step in steps] + [step // self.freqs_unit for step in freqs_steps]
        dtypes = self.dtype, torch.float32, self.dtype
        programs = batch * tokens * groups
        if programs > launch.MAX_PROGRAMS:
            raise Outside("too many heads")
        scalars = tokens, groups, divider(tokens), divider(groups), heads, *in_units
        return launch.bind(complex_rotary, constants, warps, device, dtypes, programs, *scalars)


def heads_of_program(half: int, heads: int) -> int:
    return min(max(_ELEMENTS // (2 * next_power_of_two(half)), 1), next_power_of_two(heads))


def _steps(strides, shape, unsqueeze_dim) -> tuple[int, ...]:
    """Strides over batch, tokens and heads; 0 for dimensions of length 1."""
    batch, *rest = (stride if size != 1 else 0 for stride, size in zip(strides[:3], shape[:3]))
    return (batch, rest[1], rest[0]) if unsqueeze_dim == 1 else (batch, *rest)


def _bind(x, freqs_cis, unsqueeze_dim, out_strides, conjugate, strides) -> launch.Launch:
    """The launch for these tensors, x with these strides. Raises Outside if no kernel takes them."""
    if x.dtype not in FLOAT_DTYPES or not runs_kernels(x.device) or freqs_cis.device != x.device:
        raise Outside(f"{x.dtype} on {x.device}, freqs_cis on {freqs_cis.device}")
    if torch.version.hip is not None:
        raise Outside("ROCm, whose complex product was not looked at")
    if freqs_cis.dtype != torch.complex64 or freqs_cis.is_conj() or x.dim() != 4 or freqs_cis.dim() != 3:
        raise Outside("freqs_cis is not complex64, or other dimensions")
    head_dim, half = x.shape[-1], freqs_cis.shape[-1]
    if head_dim != 2 * half or not 2 <= head_dim <= _MAX_HEAD_DIM or not x.numel():
        raise Outside("empty, or heads of more than 1024 elements")
    if strides[-1] != 1 or out_strides[-1] != 1 or (half > 1 and freqs_cis.stride(-1) != 1):
        raise Outside("heads are not contiguous")
    batch, tokens, heads = x.shape[0], x.shape[3 - unsqueeze_dim], x.shape[unsqueeze_dim]
    if freqs_cis.shape[0] not in (1, batch) or freqs_cis.shape[1] != tokens:
        raise Outside("freqs_cis of other tokens")
    steps = *_steps(strides, x.shape, unsqueeze_dim), *_steps(out_strides, x.shape, unsqueeze_dim)
    freqs_steps = [2 * stride if size != 1 else 0 for stride, size in zip(freqs_cis.stride(), freqs_cis.shape[:2])]
    if any(step % 2 for step in steps):
        raise Outside("odd strides, of which eager makes no complex numbers without a copy")
    units = math.gcd(8, head_dim, *steps), math.gcd(4, head_dim, *freqs_steps)
    kind = Kind(x.dtype, half, *units, conjugate, heads_of_program(half, heads))
    if not _proved(kind, x.device):
        raise Outside("eager has other bits here")
    return kind.launch(batch, tokens, heads, steps, freqs_steps, x.device)


@dataclass(eq=False)
class _Call:
    """A call resolved for its tensors' layouts; of a gradient too, with needs_grad False."""

    launch: launch.Launch
    out: Output
    unsqueeze_dim: int
    needs_grad: bool

    def __call__(self, x, freqs_cis):
        return _apply(self, x, freqs_cis) if self.needs_grad else self.output(x, freqs_cis)

    def output(self, x, freqs_cis):
        if dispatch_modes():
            return eager(x, freqs_cis, self.unsqueeze_dim)
        return self.launched(x, freqs_cis)

    def launched(self, x, freqs_cis):
        """The same, whatever modes are active: none sees a call from Inductor's code."""
        out = self.out.empty()
        self.launch.call_3(x, torch.view_as_real(freqs_cis.detach()), out)
        return out


class _CallOfCopy(_Call):
    """Where x has strided heads: it is copied first."""

    def launched(self, x, freqs_cis):
        return super().launched(x.contiguous(), freqs_cis)


def replacement(x: torch.Tensor, freqs_cis: torch.Tensor, unsqueeze_dim: int) -> Optional[torch.Tensor]:
    """The output from the kernel; None if eager must compute it."""
    if is_dynamo_compiling():
        return _compiled(x, freqs_cis, unsqueeze_dim)
    needs_grad = is_grad_enabled() and x.requires_grad
    facts = unsqueeze_dim, needs_grad
    recent = _calls.recent.get(facts)
    if recent is not None:
        same, compute = recent
        if have_strides(x, freqs_cis) and same(x, freqs_cis) and forward_ad._current_level < 0 and not dispatch_modes():
            return compute(x, freqs_cis)
    if not are_ours(x, freqs_cis, needs_grad):
        return proof.record_refusal(eager, proof.NOT_PLAIN)
    if is_grad_enabled() and (freqs_cis.requires_grad or freqs_cis.is_inference()):
        return proof.record_refusal(eager, "freqs_cis needs a gradient or is an inference tensor")
    return _calls.run(facts, _find_call(x, freqs_cis, *facts), (), (x, freqs_cis))


def _find_call(x, freqs_cis, *facts) -> Optional[_Call]:
    # A conjugate may be a view of the same layout, whose memory has the other sign.
    return _calls.find(eager, (*facts, freqs_cis.is_conj()), (x, freqs_cis), *facts)


def _resolve(x, freqs_cis, unsqueeze_dim, needs_grad) -> _Call:
    out = Output.of(functools.partial(eager, unsqueeze_dim=unsqueeze_dim), x, freqs_cis, dtype=x.dtype)
    return _Call(_bind(x, freqs_cis, unsqueeze_dim, out.strides, False, x.stride()), out, unsqueeze_dim, needs_grad)


_calls = Calls(_resolve)


def gradient(dy, freqs_cis, unsqueeze_dim) -> torch.Tensor:
    """The gradient of x."""
    if not is_grad_enabled() and are_plain(dy, freqs_cis):
        call = _find_gradient_call(dy, freqs_cis, unsqueeze_dim)
        if call is not None:
            return call.output(dy, freqs_cis)
    return formula(dy, freqs_cis, unsqueeze_dim)


def _find_gradient_call(dy, freqs_cis, unsqueeze_dim) -> Optional[_Call]:
    return _gradient_calls.find(eager, (unsqueeze_dim, freqs_cis.is_conj()), (dy, freqs_cis), unsqueeze_dim)


def _resolve_gradient(dy, freqs_cis, unsqueeze_dim) -> _Call:
    strides = contiguous_strides(dy.shape)
    # Eager attention may give the key a gradient with strided heads.
    made = _Call if dy.dim() and dy.stride(-1) == 1 else _CallOfCopy
    bound = _bind(dy, freqs_cis, unsqueeze_dim, strides, True, dy.stride() if made is _Call else strides)
    out = Output(strides, dy.dtype, allocator(dy.shape, strides, dy.dtype, dy.device))
    return made(bound, out, unsqueeze_dim, False)


_gradient_calls = Calls(_resolve_gradient)


class ComplexRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, x, freqs_cis):
        ctx.save_for_backward(freqs_cis)
        ctx.set_materialize_grads(False)
        ctx.unsqueeze_dim = call.unsqueeze_dim
        return call.output(x, freqs_cis)

    @staticmethod
    def backward(ctx, dy):
        if dy is None:  # The output was unused, so its gradient is undefined, which differs from zero.
            return None, None, None
        return None, gradient(dy, *ctx.saved_tensors, ctx.unsqueeze_dim), None


_apply = apply_of(ComplexRotary)


# Proof


def unsqueeze_dim_of(function: Callable) -> Optional[int]:
    """The heads' dimension if the function rotates query and key by the formula, of one of both; proved on the CPU."""
    helpers = tuple(helper.function for helper in helpers_of(function))
    key = "formula of complex rotary", function, helpers
    verdict = proof.verdict_on(key)
    if verdict is not None:
        return verdict.chosen
    subject = proof.Subject(function, torch.device("cpu"), f"bf16 and fp32, in {function.__module__}", "x * freqs_cis")
    candidates = {dim: functools.partial(_formulas, function, dim) for dim in (2, 1)}
    dim = proof.match_formula(key, subject, candidates)
    if dim is not None:
        proof.record_dependency(function, eager)
    return dim


@at_trace_time
def _dim_for_compile(subject) -> Optional[int]:
    return unsqueeze_dim_of(function_behind(subject))


def _formulas(function, unsqueeze_dim):
    """Of two sequences, with other heads for the key, and frequencies of one sequence or of both."""
    generator = proof.generator(torch.device("cpu"), 3)
    for dtype, sequences in ((torch.bfloat16, 1), (torch.float32, 2)):
        data = [proof.normal(generator, 2, 5, heads, 16).to(dtype) for heads in (4, 3)]
        if unsqueeze_dim == 1:
            data = [x.transpose(1, 2) for x in data]
        angle = proof.normal(generator, sequences, 5, 8)
        freqs = torch.polar(1.0 + angle.square(), angle)
        results = []
        for compute in (function, lambda *tensors: [eager(x, tensors[2], unsqueeze_dim) for x in tensors[:2]]):
            leaves = [x.detach().clone().requires_grad_() for x in data]
            with torch.enable_grad():
                outs = compute(*leaves, freqs)
            dys = [x.detach().flip(-1) for x in data]
            results.append([out.detach() for out in outs] + [*torch.autograd.grad([*outs], leaves, dys)])
        names = "the query", "the key", "the query's gradient", "the key's gradient"
        yield from zip(names, *results)


def _proved(kind: Kind, device) -> bool:
    what = "gradient" if kind.conjugate else "output"
    return proof.kernel_is_proved(
        ("complex rotary", kind, device),
        proof.Subject(eager, device, f"{kind.dtype}, heads of {2 * kind.half}, {what}", "x * freqs_cis"),
        functools.partial(_comparisons, kind, device),
    )


_PROOF_TOKENS = 64


def _comparisons(kind, device):
    """Of a program's heads and of one more, which another program takes; a gap of a unit follows each row.

    In half of the tokens pairs of equal numbers, or of opposite ones, are turned by nearly 45 degrees. Two products cancel to
    the rounding of one, which 16 bits show too.
    """
    generator, dim = proof.generator(device, kind.half), 2 * kind.half
    for heads in (kind.heads, kind.heads + 1):
        x = proof.normal(generator, 2, _PROOF_TOKENS, heads, dim + kind.unit)
        x[:, ::4, :, 1:dim:2], x[:, 2::4, :, 1:dim:2] = x[:, ::4, :, 0:dim:2], -x[:, 2::4, :, 0:dim:2]
        x[0, 0, 0, 0], x[0, 1, 0, 0], x[0, 2, 0, 1], x[0, 3] = math.inf, math.nan, -0.0, 0.0
        x = x.to(kind.dtype)[..., :dim]
        angle = proof.normal(generator, 2, _PROOF_TOKENS, kind.half + kind.freqs_unit // 2)
        angle[:, ::2] = math.pi / 4 + angle[:, ::2] * 1e-6
        angle[:, 5] = 0.0
        freqs = torch.polar(torch.ones_like(angle), angle)[..., : kind.half]
        strides = contiguous_strides(x.shape)
        out = torch.empty_strided(x.shape, strides, dtype=kind.dtype, device=device).fill_(math.nan)
        steps = *_steps(x.stride(), x.shape, 2), *_steps(strides, x.shape, 2)
        freqs_steps = [2 * stride for stride in freqs.stride()[:2]]
        kind.launch(2, _PROOF_TOKENS, heads, steps, freqs_steps, device)(x, torch.view_as_real(freqs), out)
        if not kind.conjugate:
            yield "the output", out, eager(x, freqs, 2).contiguous()
            continue
        leaf = torch.zeros(x.shape, dtype=kind.dtype, device=device, requires_grad=True)
        with torch.enable_grad():
            (expected,) = torch.autograd.grad(eager(leaf, freqs, 2), leaf, x)
        yield "the input's gradient", out, expected


# torch.compile


def _find(x, freqs_cis, unsqueeze_dim):
    call = _find_call(x, freqs_cis, unsqueeze_dim, False)
    return None if call is None else call.launched


@operators.register("complex_rotary", _find)
def _complex_rotary_op(x: torch.Tensor, freqs_cis: torch.Tensor, unsqueeze_dim: int) -> torch.Tensor:
    return eager(x, freqs_cis, unsqueeze_dim)


def _find_gradient(dy, freqs_cis, unsqueeze_dim):
    call = _find_gradient_call(dy, freqs_cis, unsqueeze_dim)
    return None if call is None else call.launched


def _fake_gradient(dy, freqs_cis, unsqueeze_dim):
    return dy.new_empty(dy.shape)


@operators.register("complex_rotary_backward", _find_gradient, _fake_gradient)
def _complex_rotary_backward_op(dy: torch.Tensor, freqs_cis: torch.Tensor, unsqueeze_dim: int) -> torch.Tensor:
    return formula(dy, freqs_cis, unsqueeze_dim)


def _setup_context(ctx, inputs, output):
    _, freqs_cis, ctx.unsqueeze_dim = inputs
    ctx.save_for_backward(freqs_cis)


def _op_gradient(ctx, dy):
    return _complex_rotary_backward_op(dy, *ctx.saved_tensors, ctx.unsqueeze_dim), None, None


torch.library.register_autograd(_complex_rotary_op, _op_gradient, setup_context=_setup_context)


def _compiled(x, freqs_cis, unsqueeze_dim) -> Optional[torch.Tensor]:
    """`replacement` while torch.compile traces: the registered op, or None to trace eager's operations.

    Without a proof the op computes these too.
    """
    if x.dtype not in FLOAT_DTYPES or (is_grad_enabled() and freqs_cis.requires_grad):
        return None
    return _complex_rotary_op(x, freqs_cis, unsqueeze_dim) if is_traced_plainly(x.device) else None
