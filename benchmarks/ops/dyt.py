"""Dynamic tanh."""

from cases import AS_FASTEST, Op


def _draw(case, op, random):
    """Rows, and alpha, weight and bias."""
    vectors = 0.5 + 0.1 * random.normal(1), 1 + 0.5 * random.normal(case.hidden_size), random.normal(case.hidden_size)
    arguments = tuple(each.requires_grad_(op.backward) for each in (random.normal(case.shape), *vectors))
    return arguments, random.normal(case.shape) if op.backward else None


_CASES = {(8192, 4096): AS_FASTEST}

# Vectors: weight and bias; and the gradient of each, without the bias itself.
OPS = {
    "dyt": Op("Dynamic tanh forward", _CASES, tensors=2, vectors=2, draw=_draw),
    "dyt_backward": Op(
        "Dynamic tanh backward (all gradients)", _CASES, tensors=3, vectors=3, backward=True, draw=_draw
    ),
}


def eager():
    import torch

    return {"dyt": lambda x, alpha, weight, bias: weight * torch.tanh(x * alpha) + bias}


def ours(kernel):
    return {"dyt": kernel.dyt}


def liger():
    from liger_kernel.ops.dyt import LigerDyTFunction

    return {"dyt": LigerDyTFunction.apply}
