"""Proofs of a rotary function: which formula it computes, and whether the kernel returns its bits, gradients included."""

import functools
import math
from typing import Optional

import torch

from ..core import proof
from .rotary_formulas import ONE_EACH
from .rotary_layout import Sizes, launch_plan, place_of, walk_of

_HEAD_DIM, _TOKENS, _Q_HEADS, _K_HEADS = 32, 5, 3, 2


def _numbers(shape, dtype, generator):
    """Random numbers, one in eight a zero of either sign, since position 0 has a sine of zero."""
    numbers = proof.normal(generator, shape)
    zeros = torch.randint(8, shape, device=generator.device, generator=generator) == 0
    return torch.where(zeros, numbers * 0.0, numbers).to(dtype)


def formula_comparisons(function, variant, unsqueeze_dim, dims, cos_dims, dtype, cos_dtype, device):
    """What `proof.match_formula` compares: outputs and gradients of the formula and of the function."""
    make = functools.partial(_numbers, generator=proof.generator(device, 3))
    heads_dim = place_of(unsqueeze_dim, cos_dims) + dims - 1 - cos_dims
    sizes = [2, _TOKENS][4 - dims :]

    def states(heads):
        # Heads are next to head_dim in memory, as in a projection's output.
        return make((*sizes, heads, _HEAD_DIM), dtype).movedim(len(sizes), heads_dim)

    data = states(_Q_HEADS), states(_K_HEADS)
    # A function that rotates a part of the head rotates the whole of it too.
    whole = _HEAD_DIM // 2 if variant.table == ONE_EACH else _HEAD_DIM
    for size in (whole // 2, whole)[1 - variant.partial :]:
        tables = [make((*sizes, size)[dims - 1 - cos_dims :], cos_dtype) for _ in range(2)]
        # The functions of vision towers have no such argument.
        theirs = _results(function, data, tables, *(unsqueeze_dim,) * (_takes(function) != 4))
        ours = _results(variant.eager, data, tables, unsqueeze_dim)
        yield from ((what, one, other) for (what, one), (_, other) in zip(ours, theirs))


def _takes(function) -> Optional[int]:
    """How many arguments the function takes."""
    return getattr(getattr(function, "__code__", None), "co_argcount", None)


def _results(compute, data, tables, *unsqueeze_dim):
    """Outputs, and gradients without and with other consumers of query and key."""
    q, k = (tensor.clone().requires_grad_() for tensor in data)
    with torch.enable_grad():
        earlier = q * 1.0, k * 1.0
        outs = compute(q, k, *tables, *unsqueeze_dim)
        later = q * 1.0, k * 1.0
    generator = proof.generator(q.device, 4)
    dys = [_numbers(out.shape, out.dtype, generator) for out in (*outs, *earlier, *later)]
    found = [("the output", out.detach()) for out in outs]
    for what, some in (("", 2), (" with others'", 6)):
        roots = (*outs, *earlier, *later)[:some]
        grads = torch.autograd.grad(roots, (q, k), dys[:some], retain_graph=True)
        found += [(f"the input's gradient{what}", grad) for grad in grads]
    return found


def kernel_is_proved(variant, dtype, cos_dtype, sizes: Sizes, device, gradients=False) -> bool:
    """Whether the kernel, or that of gradients, has the bits of the formula's eager function on this device."""
    what, comparisons = ("gradient", _gradient_comparisons) if gradients else ("output", _comparisons)
    where = f"{dtype}, cos {cos_dtype}, {sizes}, {what}"
    return proof.kernel_is_proved(
        ("rotary", variant, what, dtype, cos_dtype, sizes, device),
        proof.Subject(variant.eager, device, where, variant.formula),
        functools.partial(comparisons, variant, dtype, cos_dtype, sizes, device),
    )


def _sample(variant, dtype, cos_dtype, sizes, device):
    """q and k with tokens before heads in memory, cos and sin.

    A gap of at least a unit of elements follows each row. The last program of a token's query has one head.
    """
    make = functools.partial(_numbers, generator=proof.generator(device, 5))
    head_dim, rotary_dim, unit = sizes
    heads = launch_plan(head_dim, dtype).heads_per_program + 1
    states = [make((2, 7, each, head_dim + unit), dtype)[..., :head_dim].transpose(1, 2) for each in (heads, 2)]
    size = rotary_dim // 2 if variant.table == ONE_EACH else rotary_dim
    tables = (make((2, 7, size + unit), cos_dtype)[..., :size] for _ in range(2))
    return *states, *tables


def _launch_sample(step, variant, dtypes, sizes, q, k, cos, sin, *outs):
    walk = walk_of(q, k, cos, sin, 1, outs[0].stride(), outs[1].stride(), variant)
    if walk.sizes != sizes:
        raise AssertionError(f"the sample has {walk.sizes}, not {sizes}")
    walk.launch(step, variant, dtypes, q.device)(q, k, cos, sin, *outs)


def _comparisons(variant, dtype, cos_dtype, sizes, device):
    q, k, cos, sin = _sample(variant, dtype, cos_dtype, sizes, device)
    out_dtype = variant.output_dtype(dtype, cos_dtype)
    eagers = variant.eager(q, k, cos, sin, 1)
    # In eager's memory order, which is the query's or, after torch.cat, another.
    outs = [torch.full_like(expected, math.nan, dtype=out_dtype) for expected in eagers]
    _launch_sample("forward", variant, (dtype, cos_dtype, out_dtype), sizes, q, k, cos, sin, *outs)
    for out, expected in zip(outs, eagers):
        yield "the output", out, expected


def _gradient_comparisons(variant, dtype, cos_dtype, sizes, device):
    dy_dtype = variant.output_dtype(dtype, cos_dtype)
    *dys, cos, sin = _sample(variant, dy_dtype, cos_dtype, sizes, device)
    inputs = [torch.zeros(dy.shape, dtype=dtype, device=device, requires_grad=True) for dy in dys]
    others = [_numbers(dy.shape, dtype, proof.generator(device, 6)) for dy in dys]
    found = {}
    one_edge = variant.has_one_edge(dtype)
    for step, paths in (("gradient", 1), ("gradients", 2))[: 2 - one_edge]:
        outs = [torch.full(dy.shape, math.nan, dtype=dtype, device=device) for _ in range(paths) for dy in dys]
        _launch_sample(step, variant, (dy_dtype, cos_dtype, dtype), sizes, *dys, cos, sin, *outs)
        found[step] = outs
    with torch.enable_grad():
        outs = variant.eager(*inputs, cos, sin, 1)
        alone = torch.autograd.grad(outs, inputs, dys, retain_graph=True)
        # Another gradient of x shows how many the function sends, and in which order.
        joined = torch.autograd.grad((*outs, *(x * 1.0 for x in inputs)), inputs, (*dys, *others))
    for index, other in enumerate(others):
        yield "the input's gradient", found["gradient"][index], alone[index]
        if one_edge:
            yield "the input's gradient with another", other + found["gradient"][index], joined[index]
            continue
        rotated, straight = found["gradients"][index::2]
        yield "the input's gradient", rotated + straight, alone[index]
        yield "the input's gradient with another", other + rotated + straight, joined[index]
