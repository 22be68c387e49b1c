"""The layers that `kernels.kernelize` swaps into a model.

Their `forward` is bound onto the module it replaces, so `type(self).forward` is the original one: it runs wherever the
kernel cannot, or has not proved to return the same bits. One class serves every `Mode`: what a call needs is decided
by `torch.is_grad_enabled()` and `requires_grad`.
"""

from typing import Optional

import torch
from torch import nn

from .activation import eager_forward as silu_eager_forward
from .activation import replacement as silu_replacement
from .gated_rms_norm import eager as gated_eager
from .gated_rms_norm import replacement as gated_replacement
from .rms_norm import EAGER
from .rms_norm import replacement as rms_norm_replacement
from .variants import LLAMA, ONE_PLUS_WEIGHT


class LlamaRMSNorm(nn.Module):
    """RMSNorm with `weight` and `variance_epsilon`; hidden_states: `[..., hidden_size]`.

    With `h = hidden_states.to(float32)` and `n = h * rsqrt(mean(h**2, -1) + variance_epsilon)` it replaces transformers' `LlamaRMSNorm`,
    `weight * n.to(dtype)`, and the classes that compute `(weight * n).to(dtype)`, as Olmo2's and NemotronH's do.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        owner = type(self)
        # `self.weight` costs 0.2 us: nn.Module looks for parameters last.
        weight = self._parameters.get("weight")
        if weight is None:
            weight = self.weight
        out = rms_norm_replacement(hidden_states, weight, self.variance_epsilon, owner)
        if out is not None:
            return out
        # Somebody may have made a module of this class itself.
        return (EAGER[LLAMA] if isinstance(self, LlamaRMSNorm) else owner).forward(self, hidden_states)


class RMSNormZeroCentered(nn.Module):
    """RMSNorm with `weight` around zero and `eps`: `((1 + weight.float()) * n).to(dtype)`, n as in `LlamaRMSNorm`.

    Replaces transformers' `Qwen3_5RMSNorm` and, asked to, Gemma's. A layer without a weight (`weight` None or missing) is
    replaced where it returns `n.to(dtype)`.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        owner = type(self)
        out = rms_norm_replacement(x, getattr(self, "weight", None), self.eps, owner)
        if out is not None:
            return out
        if isinstance(self, RMSNormZeroCentered):
            return ONE_PLUS_WEIGHT.eager(x, self.weight, self.eps)
        return owner.forward(self, x)


class RMSNormGated(nn.Module):
    """RMSNorm with `weight` and `variance_epsilon`, times `activation(gate)` in fp32, rounded to the dtype of hidden_states.

    Replaces transformers' `Qwen3NextRMSNormGated` and `KimiLinearRMSNormGated` and those that compute the same; both
    tensors are `[..., hidden_size]`.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor, gate: Optional[torch.Tensor] = None) -> torch.Tensor:
        owner = type(self)
        out = gated_replacement(hidden_states, gate, self.weight, self.variance_epsilon, self.activation, owner)
        if out is not None:
            return out
        if isinstance(self, RMSNormGated):
            return gated_eager(LLAMA, self.activation, hidden_states, gate, self.weight, self.variance_epsilon)
        return owner.forward(self, hidden_states, gate)


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
