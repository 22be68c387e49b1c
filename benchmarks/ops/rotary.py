"""Rotary embedding of queries and keys: Llama's, that of other files of transformers, and Llama 4's by complex frequencies."""

import functools
import importlib
import math
from types import MethodType

from cases import AS_FASTEST, AS_TORCH, ROOFLINE, Op, Target


def _states(case, op, random, *transposed):
    """q and k, a fifth of the heads for k, and the gradients of their rotations."""
    found = len(case.shape) == 4 and case.shape[2] % 5 == 0
    case.expect("[batch, tokens, heads, head_dim] with a multiple of 5 heads", found)
    batch, tokens, heads, head_dim = case.shape
    states = [random.normal((batch, tokens, count, head_dim)) for count in (heads * 4 // 5, heads // 5)]
    states = [(x.transpose(*transposed) if transposed else x).requires_grad_(op.backward) for x in states]
    return states, tuple(random.normal(x.shape) for x in states) if op.backward else None


def _draw(case, op, random, covered):
    """q, k, cos and sin; q and k are views [batch, heads, tokens, head_dim] of projections, as in attention."""
    states, dys = _states(case, op, random, 1, 2)
    return (*states, *(random.normal((1, case.shape[1], int(case.hidden_size * covered))) for _ in range(2))), dys


def _draw_complex(case, op, random):
    """q and k, [batch, tokens, heads, head_dim], and complex frequencies."""
    import torch

    states, dys = _states(case, op, random)
    angle = random.normal((1, case.shape[1], case.hidden_size // 2)).float()
    return (*states, torch.polar(torch.ones_like(angle), angle)), dys


def _covering(part):
    """A row of cos or sin covers this part of a head. The backward pass reads dy and writes dx, without q and k."""

    def moved(shape, item_size):
        return item_size * (2 * math.prod(shape) + 2 * shape[1] * int(shape[-1] * part))

    return {"moved": moved, "draw": functools.partial(_draw, covered=part)}


def _moved_complex(shape, item_size):
    """Frequencies are 8 bytes for two elements of a head."""
    return item_size * 2 * math.prod(shape) + 4 * shape[1] * shape[-1]


_Op = functools.partial(Op, axes="batch x tokens x heads x head_dim")
_SHAPE = (8, 2048, 40, 128)
_TARGETS = (Target(1.15, ROOFLINE), *AS_FASTEST)

OPS = {
    "rotary": _Op("Rotary embedding of queries and keys", {_SHAPE: _TARGETS}, **_covering(1.0)),
    "rotary_backward": _Op("Rotary embedding backward", {_SHAPE: AS_TORCH}, backward=True, **_covering(1.0)),
}
for _name, _title, _shape, _how in (
    ("rotary_partial", "of half of the head", _SHAPE, _covering(0.5)),
    ("rotary_neighbours", "of neighbours in fp32", _SHAPE, _covering(1.0)),
    ("rotary_chunked", "of chunks", _SHAPE, _covering(0.5)),
    ("rotary_complex", "complex", _SHAPE, {"moved": _moved_complex, "draw": _draw_complex}),
    ("rotary_vision", "of vision towers", (1, 16384, 20, 80), _covering(1.0)),
):
    OPS[_name] = _Op(f"Rotary embedding, {_title}", {_shape: AS_TORCH}, **_how)
    OPS[f"{_name}_backward"] = _Op(f"Rotary embedding backward, {_title}", {_shape: AS_TORCH}, backward=True, **_how)


def _of_file(folder, name="apply_rotary_pos_emb"):
    """A function of transformers, even after `kernelize` has bound another forward to its module."""
    from torch import nn

    function = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    return functools.partial(type(function).forward, None) if isinstance(function, nn.Module) else function


def _variants():
    files = {"partial": "gpt_neox", "neighbours": "cohere", "chunked": "gpt_oss"}
    return {f"rotary_{variant}": _of_file(folder) for variant, folder in files.items()}


def _as_in_towers(function):
    """The function, of `[tokens, heads, head_dim]`, called with one sequence of `[batch, heads, tokens, head_dim]`."""

    def rotary_vision(q, k, cos, sin):
        # The gradient of an index would be a copy; that of `squeeze` is a view.
        out = function(q.squeeze(0).transpose(0, 1), k.squeeze(0).transpose(0, 1), cos[0], sin[0])
        return tuple(x.transpose(0, 1)[None] for x in out)

    return rotary_vision


def eager():
    return {
        "rotary": _of_file("llama"),
        **_variants(),
        "rotary_complex": _of_file("llama4", "apply_rotary_emb"),
        "rotary_vision": _as_in_towers(_of_file("qwen2_vl", "apply_rotary_pos_emb_vision")),
    }


def compiled():
    import torch

    def rotary(q, k, cos, sin):
        def rotate(x):
            first, second = x.chunk(2, dim=-1)
            return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

        return rotate(q), rotate(k)

    return {**eager(), "rotary": rotary}


def ours(kernel):
    return {
        "rotary": kernel.apply_rotary_pos_emb,
        **{name: _in_place_of(function, kernel.layers.RotaryPosEmb) for name, function in _variants().items()},
        "rotary_complex": kernel.apply_rotary_emb,
        "rotary_vision": _as_in_towers(kernel.apply_rotary_pos_emb_vision),
    }


def _in_place_of(function, layer):
    """The module that `kernels` makes of a function, with the layer's forward, as `kernelize` binds it."""
    from kernels import use_kernel_forward_from_hub

    def rotary(*arguments, **named):
        return function(*arguments, **named)

    made = use_kernel_forward_from_hub("rotary_pos_emb")(
        rotary if isinstance(function, functools.partial) else function
    )
    made.forward = MethodType(layer.forward, made)
    return made


def liger():
    from liger_kernel.ops.llama4_rope import LigerLlama4RopeFunction
    from liger_kernel.ops.rope import LigerRopeFunction

    rotary, rotary_complex = map(functools.partial, (LigerRopeFunction.apply, LigerLlama4RopeFunction.apply))
    # Timed calls overwrite their inputs; the comparison of bits passes copies.
    rotary.in_place = rotary_complex.in_place = True
    return {"rotary": rotary, "rotary_complex": rotary_complex}
