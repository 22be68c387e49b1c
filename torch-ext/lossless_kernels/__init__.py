"""Fused GPU kernels that change nothing but the time: the bits of eager PyTorch, in outputs and gradients."""

from . import layers
from .core.proof import LosslessProofError
from .loss import attach_loss
from .mapping import kernel_mapping, name_layers
from .ops.activation import fast_gelu, gelu, new_gelu, quick_gelu, silu
from .ops.cross_entropy import causal_lm_loss, cross_entropy
from .ops.gated_activation import gelu_tanh_and_mul, silu_and_mul
from .ops.rms_norm.add import fused_add_rms_norm
from .ops.rms_norm.function import rms_norm
from .ops.rotary import apply_rotary_pos_emb
from .ops.softmax import softmax
from .report import replacement_report
from .warm_up import warmup

__all__ = [
    "LosslessProofError",
    "apply_rotary_pos_emb",
    "attach_loss",
    "causal_lm_loss",
    "cross_entropy",
    "fast_gelu",
    "fused_add_rms_norm",
    "gelu",
    "gelu_tanh_and_mul",
    "kernel_mapping",
    "layers",
    "name_layers",
    "new_gelu",
    "quick_gelu",
    "replacement_report",
    "rms_norm",
    "silu",
    "silu_and_mul",
    "softmax",
    "warmup",
]
