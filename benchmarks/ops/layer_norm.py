"""LayerNorm."""

from cases import AS_FASTEST, EPS, Op


def _draw(case, op, random):
    """x, weight and bias."""
    case.expect("[..., hidden size]", len(case.shape) > 1)
    arguments = random.normal(case.shape), 1 + 0.5 * random.normal(case.shape[-1]), random.normal(case.shape[-1])
    dy = random.normal(case.shape) if op.backward else None
    return tuple(each.requires_grad_(op.backward) for each in arguments), dy


# Hidden sizes of large and small models, and heads.
_CASES = dict.fromkeys(((8192, 4096), (32768, 1024), (32768, 768), (131072, 128)), AS_FASTEST)

OPS = {
    "layer_norm": Op("LayerNorm forward", _CASES, tensors=2, vectors=2, draw=_draw),
    "layer_norm_backward": Op(
        "LayerNorm backward (dx, dweight and dbias)", _CASES, tensors=3, vectors=3, backward=True, draw=_draw
    ),
}


def _of(layer_norm):
    return {"layer_norm": lambda x, weight, bias: layer_norm(x, weight.shape, weight, bias, EPS)}


def eager():
    from torch.nn import functional

    return _of(functional.layer_norm)


def ours(kernel):
    return _of(kernel.layer_norm)


def liger():
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction as LayerNorm

    return {"layer_norm": lambda x, weight, bias: LayerNorm.apply(x, weight, bias, EPS)}
