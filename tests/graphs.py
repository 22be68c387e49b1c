"""A layer of every family beside eager's, as modules of one tensor `[4, HIDDEN_SIZE]`, for graphs of gradients."""

import copy
from types import MethodType

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import activations
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer
from transformers.models.t5.modeling_t5 import T5LayerNorm

TOKENS, HIDDEN_SIZE = 4, 64
SIZES = {"hidden_size": HIDDEN_SIZE, "intermediate_size": 32, "num_attention_heads": 1, "attn_implementation": "eager"}
HEADS = {"head_dim": HIDDEN_SIZE, "num_key_value_heads": 1}


class Around(nn.Module):
    """What takes other arguments, as a layer of tensors: `call(f, *tensors, *weights)`."""

    def __init__(self, f, call=lambda f, h: f(h), *shapes):
        super().__init__()
        self.f, self.call = f, call
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, *tensors):
        return self.call(self.f, *tensors, *self.weights)


def bound(layer, original):
    """The module with our forward, as `kernelize` leaves it."""
    original.forward = MethodType(layer.forward, original)
    return original


def with_ours(kernel, original, name):
    """A copy of the module that runs our layer or function of this name."""
    ours = copy.deepcopy(original)
    if hasattr(kernel.layers, name):
        bound(getattr(kernel.layers, name), ours.f if isinstance(ours, Around) else ours)
    else:
        del ours.f  # A module, or a function.
        ours.f = getattr(kernel, name)
    return ours


def _rms_norm(h, weight, eps):
    x = h.float()
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(h.dtype)


def masked_softmax(scores, mask, scale):
    return F.softmax(scores * scale + mask, dim=-1, dtype=torch.float32).to(scores.dtype)


def add_rms_norm(h, residual, weight, eps):
    total = residual + h
    return _rms_norm(total, weight, eps), total


def _of_sum(used):
    """One or both outputs are used; the residual is h itself or is computed from it."""

    def call(f, h, weight):
        normed, total = f(h, h if used == "of itself" else h.cos(), weight, 1e-6)
        return {"normed": normed, "total": total}.get(used, normed * 0.5 + total)

    return call


def _tables(h):
    angles = torch.linspace(0, 3, TOKENS * HIDDEN_SIZE).view(1, TOKENS, HIDDEN_SIZE)
    return angles.cos().to(h.dtype), angles.sin().to(h.dtype)


def _rotated(used):
    def call(f, h):
        q, k = h, h if used == "of itself" else h.sin()
        q, k = f(*(x.view(1, 1, TOKENS, HIDDEN_SIZE) for x in (q, k)), *_tables(h))
        return {"query": q, "key": k}.get(used, q * 2.0 + k).view(TOKENS, HIDDEN_SIZE)

    return call


def _vision_rotated(f, h):
    q, k = f(*(x.view(TOKENS, 1, HIDDEN_SIZE) for x in (h, h.sin())), *(table[0] for table in _tables(h)))
    return (q * 2.0 + k).view(TOKENS, HIDDEN_SIZE)


def _complex_rotated(f, h):
    angles = torch.linspace(0, 3, TOKENS * HIDDEN_SIZE // 2).view(1, TOKENS, HIDDEN_SIZE // 2)
    q, k = (x.view(1, TOKENS, 1, HIDDEN_SIZE) for x in (h, h.sin()))
    q, k = f(q, k, torch.polar(torch.ones_like(angles), angles))
    return (q * 2.0 + k).view(TOKENS, HIDDEN_SIZE)


def _loss(call):
    """The loss, and the tensor that it is of: a graph may go on from there."""
    target = torch.tensor([3, -100, 0, 11])
    return lambda f, h, *weights: h.cos() + call(f, h, target, *weights)


def cross_entropy(h, target, reduction="mean"):
    return F.cross_entropy(h.float(), target, reduction=reduction)


def linear_cross_entropy(h, weight, target, bias):
    return F.cross_entropy(F.linear(h, weight, bias).float(), target)


def _gelu_tanh_and_mul(x):
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def _decoded(f, h):
    return f(h.view(1, TOKENS, HIDDEN_SIZE), position_embeddings=_tables(h)).view(TOKENS, HIDDEN_SIZE)


LAYERS = {
    "nn.RMSNorm": (lambda: nn.RMSNorm(HIDDEN_SIZE, eps=1e-6), "TorchRMSNorm"),
    "nn.RMSNorm without weight": (lambda: nn.RMSNorm(HIDDEN_SIZE, elementwise_affine=False), "TorchRMSNorm"),
    "nn.LayerNorm": (lambda: nn.LayerNorm(HIDDEN_SIZE), "TorchLayerNorm"),
    "nn.LayerNorm without weight": (lambda: nn.LayerNorm(HIDDEN_SIZE, elementwise_affine=False), "TorchLayerNorm"),
    "nn.GroupNorm": (lambda: nn.GroupNorm(4, HIDDEN_SIZE), "TorchGroupNorm"),
    "nn.GroupNorm without weight": (lambda: nn.GroupNorm(4, HIDDEN_SIZE, affine=False), "TorchGroupNorm"),
    "CohereLayerNorm": (lambda: CohereLayerNorm(HIDDEN_SIZE), "CohereLayerNorm"),
    "LlamaRMSNorm": (lambda: llama.LlamaRMSNorm(HIDDEN_SIZE), "LlamaRMSNorm"),
    "SiLU": (activations.SiLUActivation, "SiLUActivation"),
    "GELU": (activations.GELUActivation, "GELUActivation"),
    "GELUTanh": (activations.GELUTanh, "GELUTanh"),
    "NewGELU": (activations.NewGELUActivation, "NewGELUActivation"),
    "FastGELU": (activations.FastGELUActivation, "FastGELUActivation"),
    "QuickGELU": (activations.QuickGELUActivation, "QuickGELUActivation"),
    "LlamaMLP": (lambda: llama.LlamaMLP(transformers.LlamaConfig(**SIZES)), "LlamaMLP"),
}  # fmt: skip
# The rest: other layers, and functions by their public names.
GRAPHS = {
    **LAYERS,
    "T5LayerNorm": (lambda: T5LayerNorm(HIDDEN_SIZE), "LlamaRMSNorm"),
    "Qwen3_5RMSNorm": (lambda: Qwen3_5RMSNorm(HIDDEN_SIZE), "RMSNormZeroCentered"),
    "GemmaRMSNorm": (lambda: GemmaRMSNorm(HIDDEN_SIZE), "RMSNormZeroCentered"),
    "CohereLayerNorm of heads": (
        lambda: Around(CohereLayerNorm((2, HIDDEN_SIZE)), lambda f, h: f(h.view(2, 2, HIDDEN_SIZE)).view(h.shape)),
        "CohereLayerNorm",
    ),
    "RMSNormGated": (lambda: Around(Qwen3NextRMSNormGated(HIDDEN_SIZE), lambda f, h: f(h, h.sin())), "RMSNormGated"),
    "RMSNormGated of itself": (lambda: Around(Qwen3NextRMSNormGated(HIDDEN_SIZE), lambda f, h: f(h, h)), "RMSNormGated"),
    "Qwen3_5MoeTopKRouter": (
        lambda: Around(
            Qwen3_5MoeTopKRouter(transformers.Qwen3_5MoeTextConfig(num_experts=8, num_experts_per_tok=2, **SIZES)),
            lambda f, h: h * sum(each.sum(-1, keepdim=True) for each in f(h)[:2]),
        ),
        "SoftmaxTopKRouter",
    ),
    "GemmaMLP": (lambda: GemmaMLP(transformers.GemmaConfig(**SIZES)), "GeGLUMLP"),
    # Whole vectors in each row: a CPU's SiLU has other bits for the rest of a row.
    "Phi3MLP": (lambda: Phi3MLP(transformers.LlamaConfig(**{**SIZES, "intermediate_size": 64})), "Phi3MLP"),
    "LlamaDecoderLayer": (
        lambda: Around(llama.LlamaDecoderLayer(transformers.LlamaConfig(**SIZES), 0), _decoded), "LlamaDecoderLayer"
    ),
    "Gemma2DecoderLayer": (
        lambda: Around(Gemma2DecoderLayer(transformers.Gemma2Config(**HEADS, **SIZES), 0), _decoded), "MixtralDecoderLayer"
    ),
    "Qwen3VLTextDecoderLayer": (
        lambda: Around(Qwen3VLTextDecoderLayer(transformers.Qwen3VLTextConfig(**HEADS, **SIZES), 0), _decoded),
        "Qwen3VLTextDecoderLayer",
    ),
    **{
        f"fused_add_rms_norm, {used}": (
            lambda used=used: Around(add_rms_norm, _of_sum(used), HIDDEN_SIZE), "fused_add_rms_norm"
        )
        for used in ("normed", "total", "both", "of itself")
    },
    **{
        f"apply_rotary_pos_emb, {used}": (lambda used=used: Around(llama.apply_rotary_pos_emb, _rotated(used)), name)
        for used, name in {
            "query": "apply_rotary_pos_emb", "key": "apply_rotary_pos_emb", "both": "RotaryPosEmb",
            "of itself": "apply_rotary_pos_emb",
        }.items()
    },
    "softmax": (lambda: Around(F.softmax, lambda f, h: f(h, dim=-1) * h), "softmax"),
    "masked_softmax": (
        lambda: Around(masked_softmax, lambda f, h: f(h, torch.ones_like(h.detach()), 0.7) * h), "masked_softmax"
    ),
    "cross_entropy": (
        lambda: Around(cross_entropy, _loss(lambda f, h, target: f(h, target, reduction="sum"))), "cross_entropy"
    ),
    "linear_cross_entropy": (
        lambda: Around(
            linear_cross_entropy, _loss(lambda f, h, target, w, b: f(h, w, target, b)), (48, HIDDEN_SIZE), 48
        ),
        "linear_cross_entropy",
    ),
    "causal_lm_loss": (
        lambda: Around(ForCausalLMLoss, _loss(lambda f, h, target: f(h[None], target[None], HIDDEN_SIZE))),
        "causal_lm_loss",
    ),
    "silu_and_mul": (lambda: Around(lambda gate, up: F.silu(gate) * up, lambda f, h: f(h, h.sin())), "silu_and_mul"),
    "silu_and_mul of itself": (lambda: Around(lambda gate, up: F.silu(gate) * up, lambda f, h: f(h, h)), "silu_and_mul"),
    "gelu_tanh_and_mul": (
        lambda: Around(_gelu_tanh_and_mul, lambda f, h: torch.cat((f(h), h[..., ::2]), -1)), "gelu_tanh_and_mul"
    ),
    # Elementwise: the CPU adds up in another order.
    "kl_div": (lambda: Around(F.kl_div, lambda f, h: f(h, h.sigmoid(), reduction="none")), "kl_div"),
    "tvd": (
        lambda: Around(lambda p, q, reduction: torch.abs(p - q) / 2.0, lambda f, h: f(h, h.sigmoid(), reduction="none")),
        "tvd",
    ),
    "rms_norm": (lambda: Around(_rms_norm, lambda f, h, weight: f(h, weight, 1e-6), HIDDEN_SIZE), "rms_norm"),
    "layer_norm": (
        lambda: Around(F.layer_norm, lambda f, h, *vectors: f(h, (HIDDEN_SIZE,), *vectors), HIDDEN_SIZE, HIDDEN_SIZE),
        "layer_norm",
    ),
    "layer_norm without bias": (
        lambda: Around(F.layer_norm, lambda f, h, weight: f(h, (HIDDEN_SIZE,), weight), HIDDEN_SIZE), "layer_norm"
    ),
    "group_norm of images": (
        lambda: Around(
            F.group_norm, lambda f, h, *vectors: f(h.view(1, TOKENS, -1, 4), 1, *vectors).view(h.shape), TOKENS, TOKENS
        ),
        "group_norm",
    ),
    "dyt": (
        lambda: Around(
            lambda x, alpha, weight, bias: weight * torch.tanh(x * alpha) + bias, lambda f, h, *vectors: f(h, *vectors),
            1, HIDDEN_SIZE, HIDDEN_SIZE,
        ),
        "dyt",
    ),
    "apply_rotary_pos_emb_vision": (
        lambda: Around(qwen2_vl.apply_rotary_pos_emb_vision, _vision_rotated), "apply_rotary_pos_emb_vision"
    ),
    "apply_rotary_emb": (lambda: Around(llama4.apply_rotary_emb, _complex_rotated), "apply_rotary_emb"),
    "silu": (lambda: Around(F.silu), "silu"),
    "gelu": (lambda: Around(F.gelu), "gelu"),
    "new_gelu": (lambda: Around(activations.NewGELUActivation()), "new_gelu"),
    "fast_gelu": (lambda: Around(activations.FastGELUActivation()), "fast_gelu"),
    "quick_gelu": (lambda: Around(activations.QuickGELUActivation()), "quick_gelu"),
}  # fmt: skip
