"""GroupNorm, as in diffusion models."""

from cases import AS_FASTEST, EPS, Op

_GROUPS = 32


def _draw(case, op, random):
    """x, and weight and bias of the channels."""
    found = len(case.shape) == 3 and case.shape[1] % _GROUPS == 0
    case.expect(f"[samples, channels, positions] with a multiple of {_GROUPS} channels", found)
    channels = case.shape[1]
    arguments = random.normal(case.shape), 1 + 0.5 * random.normal(channels), random.normal(channels)
    dy = random.normal(case.shape) if op.backward else None
    return tuple(each.requires_grad_(op.backward) for each in arguments), dy


_SHAPE = (128, 512, 4096)

OPS = {
    "group_norm": Op("GroupNorm forward", {_SHAPE: AS_FASTEST}, tensors=2, draw=_draw),
    "group_norm_backward": Op(
        "GroupNorm backward (dx, dweight and dbias)", {_SHAPE: AS_FASTEST}, tensors=3, backward=True, draw=_draw
    ),
}


def _of(group_norm):
    return {"group_norm": lambda x, weight, bias: group_norm(x, _GROUPS, weight, bias, EPS)}


def eager():
    from torch.nn import functional

    return _of(functional.group_norm)


def ours(kernel):
    return _of(kernel.group_norm)


def liger():
    from liger_kernel.ops.group_norm import LigerGroupNormFunction as GroupNorm

    return {"group_norm": lambda x, weight, bias: GroupNorm.apply(x, weight, bias, x.shape[1], _GROUPS, EPS)}
