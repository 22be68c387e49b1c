"""A linear layer and the cross-entropy of its output, whose gradient takes the memory of the logits."""

from typing import Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ..core import torch_internals
from ..core.domain import are_plain, check_floating, is_checkpointed
from .cross_entropy import apply, call_of, check_reduction, cross_entropy, eager


def linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross-entropy of a linear layer's output: bit for bit `F.cross_entropy(F.linear(hidden_states, weight, bias).float(), target)`.

    The logits exist once, in the dtype that `F.linear` returns, and are not returned. The backward pass writes their gradient
    over them. Forward and backward together take the memory of the logits and 20 bytes a token. Eager takes up to seven times as much.

    The products of matrices are eager's own, over all tokens at once. Chunks of tokens would change the order of additions in the
    weight's gradient, and cuBLAS may choose another kernel for fewer rows.

    Args:
        hidden_states: [tokens, hidden], or [..., hidden].
        weight: [vocabulary, hidden].
        target: [tokens] or [...], int64, classes; or probabilities of the logits' shape, which eager computes with.
        bias: [vocabulary], or None.
        ignore_index: rows with this target do not count, and their gradient is zero.
        reduction: "mean" or "sum"; "none" is computed by eager.

    Returns:
        The loss, fp32, of no dimension.

    Raises:
        TypeError: `hidden_states` or `weight` is no tensor or not of a real floating dtype.
        ValueError: `reduction` is none of the three. Wrong shapes and targets out of range end in eager's errors.

    The logits keep their memory, and the gradient takes new memory, in these cases: the backward pass keeps the graph
    (`retain_graph`), saved tensors go through hooks (checkpointing, offloading), or `F.linear` was replaced. Outside of
    `cross_entropy`'s domain eager's operations run.
    """
    check_floating("hidden_states", hidden_states)
    check_floating("weight", weight)
    check_reduction(reduction)
    logits = functional.linear(hidden_states, weight, bias).reshape(-1, weight.shape[0])
    target = target.reshape(logits.shape if target.is_floating_point() else -1)
    if not (is_grad_enabled() and logits.requires_grad) or is_visible(logits, target):
        return cross_entropy(logits, target, ignore_index, reduction)
    call = call_of(logits, target, ignore_index, reduction)
    if call is None:
        return eager(logits, target, ignore_index, reduction)
    return apply(call, logits, target, True)


def is_visible(logits: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether other code may hold the logits that `F.linear` returned, or see their memory change."""
    return (
        is_dynamo_compiling()
        or not are_plain(logits, other)
        or torch_internals.function_modes() > 0
        or functional.linear is not torch_internals.linear
        or is_checkpointed()
    )
