"""The layers that `kernels.kernelize` swaps into a model.

Their `forward` is bound onto the module it replaces, so `type(self).forward` is the original one: it runs wherever the
kernel cannot, or has not proved to return the same bits. One class serves every `Mode`: what a call needs is decided
by `torch.is_grad_enabled()` and `requires_grad`.
"""

import functools
from types import BuiltinFunctionType, FunctionType

import torch
from torch import nn

from .activation import FAST_GELU, GELU, GELU_TANH, NEW_GELU, QUICK_GELU, SILU
from .activation import replacement as activation_replacement
from .rms_norm import eager_forward as rms_norm_eager_forward
from .rms_norm import replacement as rms_norm_replacement


class LlamaRMSNorm(nn.Module):
    """`weight * (h * rsqrt(mean(h**2, -1) + variance_epsilon)).to(hidden_states.dtype)`, h = hidden_states in fp32.

    Replaces transformers' `LlamaRMSNorm` and the classes that compute the same; hidden_states: `[..., hidden_size]`.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        original = type(self).forward
        # `self.weight` costs 0.2 us: nn.Module looks for parameters last.
        weight = self._parameters.get("weight")
        if weight is None:
            weight = self.weight
        out = rms_norm_replacement(hidden_states, weight, self.variance_epsilon, original)
        if out is not None:
            return out
        # Somebody may have made a module of this class itself.
        return (rms_norm_eager_forward if isinstance(self, LlamaRMSNorm) else original)(self, hidden_states)


class SiLUActivation(nn.Module):
    """`input / (1 + exp(-input))`, any shape. Replaces transformers' `SiLUActivation`."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        original = type(self).forward
        out = activation_replacement(input, original, SILU)
        if out is not None:
            return out
        return (SILU.forward if isinstance(self, SiLUActivation) else original)(self, input)


# What the `act` of a layer may be: a function, which a proof can call without the module it comes from. A method of the
# module, as for formulas written in Python, is left to the original forward.
_FUNCTIONS = frozenset((type(None), FunctionType, BuiltinFunctionType, functools.partial))


class GELUActivation(nn.Module):
    """`0.5 * input * (1 + erf(input / sqrt(2)))`, any shape. Replaces transformers' `GELUActivation` around `F.gelu`."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        original = type(self).forward
        act = getattr(self, "act", None)
        if type(act) in _FUNCTIONS:
            out = activation_replacement(input, (original, act), GELU)
            if out is not None:
                return out
        return (GELU.forward if isinstance(self, GELUActivation) else original)(self, input)


class GELUTanh(nn.Module):
    """`F.gelu(input, approximate="tanh")`, any shape. Replaces transformers' `GELUTanh` around that function."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        original = type(self).forward
        act = getattr(self, "act", None)
        if type(act) in _FUNCTIONS:
            out = activation_replacement(input, (original, act), GELU_TANH)
            if out is not None:
                return out
        return (GELU_TANH.forward if isinstance(self, GELUTanh) else original)(self, input)


class NewGELUActivation(nn.Module):
    """`0.5 * input * (1 + tanh(sqrt(2 / pi) * (input + 0.044715 * input**3)))`, operation by operation, any shape.

    Replaces transformers' `NewGELUActivation`.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        original = type(self).forward
        out = activation_replacement(input, original, NEW_GELU)
        if out is not None:
            return out
        return (NEW_GELU.forward if isinstance(self, NewGELUActivation) else original)(self, input)


class FastGELUActivation(nn.Module):
    """`0.5 * input * (1 + tanh(0.7978845608 * input * (1 + 0.044715 * input * input)))`, operation by operation.

    Any shape. Replaces transformers' `FastGELUActivation`.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        original = type(self).forward
        out = activation_replacement(input, original, FAST_GELU)
        if out is not None:
            return out
        return (FAST_GELU.forward if isinstance(self, FastGELUActivation) else original)(self, input)


class QuickGELUActivation(nn.Module):
    """`input * sigmoid(1.702 * input)`, operation by operation, any shape. Replaces transformers' `QuickGELUActivation`."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        original = type(self).forward
        out = activation_replacement(input, original, QUICK_GELU)
        if out is not None:
            return out
        return (QUICK_GELU.forward if isinstance(self, QuickGELUActivation) else original)(self, input)
