"""Cohere's LayerNorm."""

from types import MethodType, SimpleNamespace

from cases import AS_FASTEST, EPS, Op

_CASES = {(8192, 4096): AS_FASTEST}

OPS = {
    "cohere_layer_norm": Op("Cohere's LayerNorm forward", _CASES, tensors=2, vectors=1),
    "cohere_layer_norm_backward": Op(
        "Cohere's LayerNorm backward (dx and dweight)", _CASES, tensors=3, vectors=2, backward=True
    ),
}


def eager():
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm

    norm = CohereLayerNorm.forward
    return {"cohere_layer_norm": lambda x, weight: norm(SimpleNamespace(weight=weight, variance_epsilon=EPS), x)}


def compiled():
    import torch

    def cohere_layer_norm(x, weight):
        h = x.to(torch.float32)
        mean = h.mean(-1, keepdim=True)
        variance = (h - mean).pow(2).mean(-1, keepdim=True)
        return (weight.to(torch.float32) * ((h - mean) * torch.rsqrt(variance + EPS))).to(x.dtype)

    return {"cohere_layer_norm": cohere_layer_norm}


def ours(kernel):
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm

    norm = CohereLayerNorm(1, eps=EPS)
    del norm.weight
    norm.forward = MethodType(kernel.layers.CohereLayerNorm.forward, norm)

    def cohere_layer_norm(x, weight):
        norm.weight = weight
        return norm(x)

    return {"cohere_layer_norm": cohere_layer_norm}
