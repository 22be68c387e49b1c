"""The layers that `kernels.kernelize` swaps into a model.

Their `forward` is bound onto the module it replaces, so `type(self).forward` is the original one: it runs wherever the
kernel cannot, or has not proved to return the same bits. One class serves every `Mode`: what a call needs is decided
by `torch.is_grad_enabled()` and `requires_grad`.
"""

import torch
from torch import nn

from .activation import eager_forward as silu_eager_forward
from .activation import replacement as silu_replacement
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
        out = silu_replacement(input, original)
        if out is not None:
            return out
        return (silu_eager_forward if isinstance(self, SiLUActivation) else original)(self, input)
