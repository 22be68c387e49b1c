"""Fused GPU kernels that change nothing but the time: the bits of eager PyTorch, in outputs and gradients."""

from . import layers
from .core.proof import LosslessProofError
from .decoding import decoding_graph
from .diagnosis import doctor
from .eager_attention import register_attention
from .loss import attach_loss
from .mapping import kernel_mapping, name_layers
from .ops.activation import fast_gelu, gelu, new_gelu, quick_gelu, silu
from .ops.complex_rotary import apply_rotary_emb
from .ops.composed import poly_norm, sparsemax
from .ops.cross_entropy import causal_lm_loss, cross_entropy
from .ops.divergences import kl_div, tvd
from .ops.dyt import dyt
from .ops.gated_activation import gelu_tanh_and_mul, silu_and_mul
from .ops.group_norm import group_norm
from .ops.layer_norm import layer_norm
from .ops.linear_cross_entropy import linear_cross_entropy
from .ops.linear_jsd_loss import linear_jsd_loss
from .ops.masked_softmax import masked_softmax
from .ops.rms_norm.add import fused_add_rms_norm
from .ops.rms_norm.function import rms_norm
from .ops.rotary import apply_rotary_pos_emb, apply_rotary_pos_emb_vision
from .ops.slices import entropy_from_logits, generalized_jsd_loss, selective_log_softmax
from .ops.softmax import softmax
from .replace import apply, recompute_products, restore
from .report import replacement_report
from .warm_up import warmup

# The version of build.toml: the branch of the Hub that this build belongs to.
__version__ = "1"

__all__ = [
    "LosslessProofError",
    "apply",
    "apply_rotary_emb",
    "apply_rotary_pos_emb",
    "apply_rotary_pos_emb_vision",
    "attach_loss",
    "causal_lm_loss",
    "cross_entropy",
    "decoding_graph",
    "doctor",
    "dyt",
    "entropy_from_logits",
    "fast_gelu",
    "fused_add_rms_norm",
    "gelu",
    "gelu_tanh_and_mul",
    "generalized_jsd_loss",
    "group_norm",
    "kernel_mapping",
    "kl_div",
    "layer_norm",
    "layers",
    "linear_cross_entropy",
    "linear_jsd_loss",
    "masked_softmax",
    "name_layers",
    "new_gelu",
    "poly_norm",
    "quick_gelu",
    "recompute_products",
    "register_attention",
    "replacement_report",
    "restore",
    "rms_norm",
    "selective_log_softmax",
    "silu",
    "silu_and_mul",
    "softmax",
    "sparsemax",
    "tvd",
    "warmup",
]
