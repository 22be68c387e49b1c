"""The cos and sin tables of rotary embedding, once a forward pass: one kernel instead of ten."""

import functools
import inspect
import itertools
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Callable, Optional

import torch
from torch import nn

from ..core import launch, proof
from ..core.calls import Calls, Outside
from ..core.domain import FLOAT_DTYPES, PLAIN_TYPES, allocator, are_plain, have_strides, runs_kernels
from ..core.inspection import code_of
from ..core.layout import contiguous_strides
from ..core.torch_internals import dispatch_modes, forward_ad, matmul_precision

if launch.AVAILABLE:
    from ..kernels_src.rotary import rotary_tables


# cos and sin, `[batch, tokens, head_dim]` each.
Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class TablesFormula:
    """The formula of a class's forward, by its differences from Llama's in transformers 5.22.

    Args:
        matrix_product: a matrix product for each sequence computes the angles.
        keeps_fp32: the tables are not cast.
    """

    matrix_product: bool = False
    keeps_fp32: bool = False

    @property
    def formula(self) -> str:
        return f"cos, sin of a {'matrix ' * self.matrix_product}product{', fp32' * self.keeps_fp32}"

    def adds_zero(self, position_ids: torch.Tensor) -> bool:
        """Whether the product is added to +0, never -0: cuBLAS does so, except for several sequences of one token."""
        batch, length = position_ids.shape
        return self.matrix_product and (batch == 1 or length > 1)

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The tables' dtype for x of `dtype`."""
        return torch.float32 if self.keeps_fp32 else dtype

    def eager(
        self, x: torch.Tensor, position_ids: torch.Tensor, inv_freq: torch.Tensor, attention_scaling: float
    ) -> Tables:
        """The formula of transformers' `LlamaRotaryEmbedding.forward`.

        With `angle = position_ids[..., None].float() * inv_freq.float()`, twice in a row:
        `cos(angle) * attention_scaling` and `sin(angle) * attention_scaling` in fp32, cast to the dtype of x.

        Args:
            x: gives the tables' dtype.
            position_ids: `[batch, tokens]`, integers.
            inv_freq: `[head_dim / 2]`.
        """
        angle = position_ids[..., None].float() * inv_freq.float()
        if self.adds_zero(position_ids):
            angle = angle + 0.0
        angle = torch.cat((angle, angle), dim=-1)
        dtype = self.dtype(x.dtype)
        return (angle.cos() * attention_scaling).to(dtype), (angle.sin() * attention_scaling).to(dtype)


TABLES = TablesFormula()
_FORMULAS = [TablesFormula(*each) for each in itertools.product((False, True), repeat=2)]


# From a call's tensors to a kernel


_POSITIONS_PER_PROGRAM, _NUM_WARPS = 4, 2


class _TablesCall:
    """A call, resolved for the shapes, strides, dtypes and device of its tensors and for one scaling."""

    def __init__(self, variant: TablesFormula, position_ids, inv_freq, dtype, scaling):
        batch, length = position_ids.shape
        half, device, dtype = inv_freq.numel(), position_ids.device, variant.dtype(dtype)
        constants = {
            "HALF": half,
            "HALF_BLOCK": 1 << (half - 1).bit_length(),
            "POSITIONS": _POSITIONS_PER_PROGRAM,
            "ADDS_ZERO": variant.adds_zero(position_ids),
        }
        dtypes = position_ids.dtype, inv_freq.dtype, dtype, dtype
        programs = -(-batch * length // _POSITIONS_PER_PROGRAM)
        scalars = batch * length, length, *position_ids.stride(), scaling
        self.launch = launch.bind(rotary_tables, constants, _NUM_WARPS, device, dtypes, programs, *scalars).call_4
        shape = (batch, length, 2 * half)
        self.empty = allocator(shape, contiguous_strides(shape), dtype, device)

    def __call__(self, position_ids, inv_freq) -> Tables:
        cos, sin = self.empty(), self.empty()
        self.launch(position_ids, inv_freq, cos, sin)
        return cos, sin


def replacement(module: nn.Module, x: torch.Tensor, position_ids: torch.Tensor, owner: type) -> Optional[Tables]:
    """`owner.forward(module, x, position_ids)` from the kernel; None where that forward must run.

    It runs if frequencies change as sequences grow.
    """
    state = module.__dict__
    inv_freq = state["_buffers"].get("inv_freq")
    scaling, rope_type = state.get("attention_scaling"), state.get("rope_type")
    # Other types cannot be compared. Equality does not distinguish 0 from -0, so the scaling must be positive.
    if not have_strides(position_ids, inv_freq) or type(x) not in PLAIN_TYPES or type(rope_type) is not str:
        return None
    if type(scaling) not in (float, int) or not scaling > 0:
        return None
    # transformers from 5.24 on computes a gradient of frequencies.
    if inv_freq.requires_grad and torch.is_grad_enabled():
        return None
    # `matmul_precision` decides whether an fp32 matrix product may round its factors first (TF32).
    facts = (x.dtype, x.device, scaling, rope_type, matmul_precision())
    # The class owns its calls: its forward is a closure, which no other table keeps.
    memo = code_of(owner).memo
    calls = memo.get(Calls)
    if calls is None:
        calls = memo[Calls] = Calls(_resolve)
    recent = calls.recent.get(None)
    if recent is not None:
        same, then, compute = recent
        if same(position_ids, inv_freq) and then == facts and forward_ad._current_level < 0 and not dispatch_modes():
            return compute(position_ids, inv_freq)
    if not are_plain(position_ids, inv_freq) or not are_plain(x, x):
        return None
    tensors = position_ids, inv_freq
    call = calls.find(owner.forward, facts, tensors, owner.forward, *facts)
    return calls.run(None, call, (facts,), tensors)


def _resolve(position_ids, inv_freq, forward, dtype, device, scaling, rope_type, precision) -> Optional[_TablesCall]:
    _check(position_ids, inv_freq, dtype, device, rope_type)
    function = _function(forward)
    if function is None:
        raise Outside("the forward reads more than frequencies, their scaling and positions")
    half = inv_freq.numel()
    where = f"{dtype}, inv_freq {inv_freq.dtype}, heads of {2 * half}"
    sample = functools.partial(_sample, forward, dtype, inv_freq.dtype, position_ids.dtype, half, device)
    key = (function, dtype, inv_freq.dtype, position_ids.dtype, half, device, precision)
    # Proofs run outside of autocast. Inside it a matrix product is the same only if the function disables autocast.
    safe = "maybe_autocast" in function.__code__.co_names
    candidates = {
        variant: functools.partial(_formula, sample, variant)
        for variant in _FORMULAS
        if safe or not variant.matrix_product
    }
    variant = proof.match_formula(("formula of rotary tables", *key), proof.Subject(forward, device, where), candidates)
    if variant is None:
        return None
    subject = proof.Subject(forward, device, where, variant.formula)
    if not proof.kernel_is_proved(("rotary tables", *key), subject, functools.partial(_kernel, sample, variant)):
        return None
    return _TablesCall(variant, position_ids, inv_freq, dtype, scaling)


def _check(position_ids, inv_freq, dtype, device, rope_type) -> None:
    """Raises Outside if no kernel takes these arguments."""
    if dtype not in FLOAT_DTYPES or inv_freq.dtype not in FLOAT_DTYPES:
        raise Outside(f"x {dtype}, inv_freq {inv_freq.dtype}")
    if launch.INTERPRETED:
        raise Outside("cos and sin of Triton's interpreter differ from CUDA's")
    if not runs_kernels(device) or {position_ids.device, inv_freq.device} != {device}:
        raise Outside(f"x on {device}, position_ids on {position_ids.device}, inv_freq on {inv_freq.device}")
    if "dynamic" in rope_type or rope_type == "longrope":
        raise Outside(f"rope_type {rope_type!r}")
    if position_ids.dtype not in (torch.int64, torch.int32) or position_ids.dim() != 2 or not position_ids.numel():
        empty = "" if position_ids.numel() else ", empty"
        raise Outside(f"position_ids {position_ids.dtype} of {position_ids.dim()} dimensions{empty}")
    if inv_freq.dim() != 1 or not 2 <= inv_freq.numel() <= 512 or inv_freq.stride() != (1,):
        raise Outside(f"inv_freq of {inv_freq.dim()} dimensions and {inv_freq.numel()} elements, or not contiguous")


# Proof


# All names that a known forward uses.
_NAMES = frozenset(
    "inv_freq expand shape to torch float device type isinstance str maybe_autocast transpose cat cos sin "
    "attention_scaling dtype".split()
)


def _function(forward: Callable) -> Optional[Callable]:
    """The function inside transformers' `dynamic_rope_update`, and `torch.no_grad` before 5.24; None if `forward` is another
    one."""
    update = forward
    if _is_decorated(forward, torch.no_grad()):
        # Decorators of other contexts have the same code, so the context is checked.
        context = inspect.getclosurevars(forward).nonlocals.get("ctx_factory")
        if not isinstance(getattr(context, "__self__", None), torch.no_grad):
            return None
        update = forward.__wrapped__
    function = getattr(update, "__wrapped__", None)
    if not isinstance(function, FunctionType):
        return None
    code = function.__code__
    # A nested function would have its own names.
    if function.__closure__ or not set(code.co_names) <= _NAMES or any(isinstance(c, CodeType) for c in code.co_consts):
        return None
    decorate = function.__globals__.get("dynamic_rope_update")
    known = getattr(decorate, "__module__", None) == "transformers.modeling_rope_utils"
    return function if known and _is_decorated(update, decorate) else None


def _is_decorated(function: Any, decorate: Callable) -> bool:
    """Whether a decorator with the code of `decorate` returned `function`."""
    if not isinstance(function, FunctionType) or not hasattr(function, "__wrapped__"):
        return False
    # torch 2.15 makes a code object for each function, with the name of the context.
    found, expected = function.__code__, decorate(function.__wrapped__).__code__
    return found == expected and found.co_filename == expected.co_filename


def _sample(forward, dtype, inv_freq_dtype, position_dtype, half, device):
    """Positions, frequencies and the tables that `forward` computes from them."""
    generator = proof.generator(device, seed=6)
    module = nn.Module()
    # Half of a model's frequencies, then random ones, a negative one and a zero.
    inv_freq = 10000.0 ** -(torch.arange(half, dtype=torch.float32, device=device) / half)
    drawn = proof.normal(generator, half - half // 2)
    inv_freq[half // 2 :] *= drawn.exp2()
    inv_freq[-1] = 0.0
    inv_freq[half // 2] *= -1.0
    module.register_buffer("inv_freq", inv_freq.to(inv_freq_dtype))
    module.attention_scaling, module.rope_type = 0.8414709848, "default"
    near = torch.arange(-1, 1023, device=device).view(1, -1)
    far = torch.randint(0, 1 << 20, (3, 64), device=device, generator=generator)
    # fp32 rounds these positions.
    far[:, 0] = torch.tensor([(1 << 24) + 1, (1 << 30) + 87, -(1 << 26) - 5], dtype=torch.int64, device=device)
    x = torch.empty(0, dtype=dtype, device=device)
    # cuBLAS has one kernel for one token, one sequence and several sequences each. Every case has products of -0.
    for positions in (near, far, far[:, :1], near[:, :1], far.t().contiguous().t()):
        positions = positions.to(position_dtype)
        yield x, positions, module.inv_freq, module.attention_scaling, forward(module, x, positions)


def _formula(sample, variant):
    for *arguments, expected in sample():
        yield from zip(("cos", "sin"), variant.eager(*arguments), expected)


def _kernel(sample, variant):
    for x, positions, inv_freq, scaling, expected in sample():
        call = _TablesCall(variant, positions, inv_freq, x.dtype, scaling)
        yield from zip(("cos", "sin"), call(positions, inv_freq), expected)
