"""Softmax over the last dimension, and of masked attention scores."""

import math

from cases import AS_FASTEST, AS_TORCH, EAGER, Op, Target


def _draw_scores(case, op, random):
    """Attention scores [batch, heads, queries, keys] and the mask of a causal model, [batch, 1, queries, keys]."""
    import torch

    batch, _, queries, keys = case.shape
    scores = random.normal(case.shape).requires_grad_(op.backward)
    mask = scores.new_full((batch, 1, queries, keys), torch.finfo(scores.dtype).min).triu(1 + keys - queries)
    return (scores, mask), random.normal(case.shape) if op.backward else None


def _moved_widened(shape, item_size):
    """An element is read, and one of fp32 written."""
    return math.prod(shape) * (item_size + 4)


def _moved_with_mask(shape, item_size):
    """Scores, probabilities, and the mask, which all heads share."""
    return item_size * (2 * math.prod(shape) + math.prod(shape) // shape[1])


# Logits of a router over 128 experts; attention scores over 1024 and 4096 keys, of 2 and of 32 heads; and logits of GPT-2's
# vocabulary, whose rows begin anywhere.
_CASES = dict.fromkeys(((65536, 128), (65536, 1024), (8192, 4096), (1, 32, 4096, 4096)), AS_TORCH)
_CASES |= {(4096, 50257): (Target(1.0, EAGER),)}
_MASKED = {(1, 32, 4096, 4096): AS_FASTEST}

OPS = {
    "softmax": Op("Softmax forward", _CASES, tensors=2),
    # Reads y and dy, writes dx.
    "softmax_backward": Op("Softmax backward", _CASES, tensors=3, backward=True),
    "softmax_fp32": Op("Softmax in fp32", {}, moved=_moved_widened),
    # Adds the mask, computes softmax in fp32 and rounds it to the scores' dtype.
    "masked_softmax": Op("Softmax of masked attention scores", _MASKED, moved=_moved_with_mask, draw=_draw_scores),
    "masked_softmax_backward": Op(
        "Softmax of masked attention scores, backward", _MASKED, tensors=3, backward=True, draw=_draw_scores
    ),
}


def eager():
    import torch
    from torch.nn import functional

    def masked_softmax(scores, mask):
        return functional.softmax(scores + mask, dim=-1, dtype=torch.float32).to(scores.dtype)

    return {
        "softmax": lambda x: functional.softmax(x, -1),
        "softmax_fp32": lambda x: functional.softmax(x, -1, dtype=torch.float32),
        "masked_softmax": masked_softmax,
    }


def ours(kernel):
    import torch

    return {
        "softmax": kernel.softmax,
        "softmax_fp32": lambda x: kernel.softmax(x, dtype=torch.float32),
        "masked_softmax": kernel.masked_softmax,
    }


def liger():
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return {"softmax": LigerSoftmaxFunction.apply}


def quack():
    from quack.softmax import softmax

    return {"softmax": lambda x: softmax(x.view(-1, x.shape[-1])).view(x.shape)}
