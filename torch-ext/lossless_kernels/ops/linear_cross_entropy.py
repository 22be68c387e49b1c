"""A linear layer and the cross-entropy of its output, whose gradient takes the memory of the logits."""

import functools
from collections.abc import Iterator
from typing import Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ..core import proof, torch_internals
from ..core.domain import (
    are_as_saved,
    are_plain,
    check_floating,
    gradients_apart,
    is_checkpointed,
    layouts_if_hooked,
)
from .cross_entropy import apply, call_of, check_reduction, cross_entropy, eager, nll_loss


def linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: Optional[int] = None,
) -> torch.Tensor:
    """Cross-entropy of a linear layer's output: bit for bit `F.cross_entropy(F.linear(hidden_states, weight, bias).float(), target)`.

    The logits exist once, in the dtype that `F.linear` returns, and are not returned. The backward pass writes their gradient
    over them. Forward and backward together take the memory of the logits and 20 bytes a token. Eager takes up to seven times as much.

    The products of matrices are eager's own, over all tokens at once. Chunks of tokens would change the order of additions in the
    weight's gradient, and cuBLAS may choose another kernel for fewer rows. `chunk_size` therefore asks for chunks, and gets
    them only if the head is frozen (neither `weight` nor `bias` gets a gradient) and verification has found, on this machine and
    for these shapes, that chunks have the bits of the whole, in logits and in the gradient of `hidden_states`. Otherwise all
    tokens are computed at once. Verification holds the logits of all tokens once; the backward pass of chunks computes the
    logits a second time.

    Args:
        hidden_states: [tokens, hidden], or [..., hidden], any real floating dtype.
        weight: [vocabulary, hidden], in the dtype of the hidden states, or any under autocast.
        target: [tokens] or [...], int64, classes; or probabilities of the logits' shape, which eager computes with.
        bias: [vocabulary], or None.
        ignore_index: rows with this target do not count, and their gradient is zero.
        reduction: "mean" or "sum"; "none" is computed by eager.
        chunk_size: tokens of a chunk, a multiple of 16; None: all.

    Returns:
        The loss, fp32, of no dimension.

    Raises:
        TypeError: `hidden_states` or `weight` is no tensor or not of a real floating dtype.
        ValueError: `reduction` is none of the three, or `chunk_size` no positive multiple of 16. Wrong shapes and targets out of
            range end in eager's errors.

    The logits keep their memory, and the gradient takes new memory, in these cases: the backward pass keeps the graph
    (`retain_graph`), saved tensors go through hooks (checkpointing, offloading), or `F.linear` was replaced. Outside of
    `cross_entropy`'s domain eager's operations run. Chunks need contiguous tensors of one dtype, and no autocast.
    """
    check_floating("hidden_states", hidden_states)
    check_floating("weight", weight)
    check_reduction(reduction)
    if chunk_size is not None:
        if not isinstance(chunk_size, int) or chunk_size < 1 or chunk_size % _UNIT:
            raise ValueError(f"chunk_size: expected a positive multiple of {_UNIT}, found {chunk_size!r}")
        loss = _in_chunks(hidden_states, weight, bias, target, ignore_index, reduction, chunk_size)
        if loss is not None:
            return loss
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


# Chunks of tokens, of a frozen head

# Chunks begin at multiples of 16 bytes, as the first row does, in all tensors: orders of additions depend on it.
_UNIT = 16


def _in_chunks(hidden_states, weight, bias, target, ignore_index, reduction, size: int) -> Optional[torch.Tensor]:
    """The loss, if chunks have proved to have the bits of the whole; None if all tokens must be computed at once."""
    of_layer = [hidden_states, weight, *([] if bias is None else [bias])]
    needs_grad = is_grad_enabled() and hidden_states.requires_grad
    if (
        is_visible(hidden_states, weight)
        or is_visible(target, of_layer[-1])
        or (is_grad_enabled() and any(each.requires_grad for each in of_layer[1:]))
        or torch.is_autocast_enabled(hidden_states.device.type)
        or {(each.dtype, each.device) for each in of_layer} != {(weight.dtype, target.device)}
        or not all(each.is_contiguous() and each.data_ptr() % _UNIT == 0 for each in of_layer)
        or weight.dim() != 2
        or hidden_states.shape[-1:] != weight.shape[1:]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        return None
    tokens, vocabulary = hidden_states.shape[:-1].numel(), weight.shape[0]
    target = target.reshape(-1)
    if tokens <= size or len(target) != tokens:
        return None
    calls = {}
    for rows in (size, tokens % size or size):
        logits = torch.empty(rows, vocabulary, dtype=weight.dtype, device=weight.device, requires_grad=needs_grad)
        calls[rows] = call_of(logits, target[:rows], ignore_index, reduction)
        if calls[rows] is None:
            return None
        del logits
    if not _are_proved(hidden_states, weight, bias, size, needs_grad):
        return None
    arguments = calls, size, hidden_states, weight, bias, target
    return ChunkedCrossEntropy.apply(*arguments) if needs_grad else _loss(*arguments)[0]


@torch.no_grad()
def _loss(calls, size, hidden_states, weight, bias, target):
    """The loss, and of all tokens maxima, log sums and the number of those that count."""
    maxima, log_sums, logp = (torch.empty(len(target), dtype=torch.float32, device=target.device) for _ in range(3))
    statistics = maxima, log_sums, logp, torch.empty_like(target)
    for hidden, *of_tokens in _split(size, hidden_states.view(-1, weight.shape[1]), target, *statistics):
        call = calls[len(hidden)]
        call.forward.call_6(functional.linear(hidden, weight, bias), *of_tokens)
    loss, count = nll_loss(logp, statistics[-1], call.reduction)
    return loss, maxima, log_sums, count


def _split(size: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(each.split(size) for each in tensors))


class ChunkedCrossEntropy(torch.autograd.Function):
    """The loss of logits of which one chunk exists at a time. The backward pass computes them again."""

    @staticmethod
    def forward(ctx, calls, size, hidden_states, weight, bias, target):
        loss, *statistics = _loss(calls, size, hidden_states, weight, bias, target)
        kept = hidden_states, weight, bias, target, *statistics
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.calls, ctx.size, ctx.layouts = calls, size, layouts_if_hooked(*kept)
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        if d_loss is None:
            return (None,) * 6
        kept = hidden_states, weight, bias, target, maxima, log_sums, count = ctx.saved_tensors
        call = ctx.calls[ctx.size]
        if is_grad_enabled() or not are_plain(d_loss, hidden_states) or not are_as_saved(ctx.layouts, *kept):

            def formula(hidden_states):
                logits = functional.linear(hidden_states, weight, bias).reshape(-1, weight.shape[0])
                return eager(logits, target, call.ignore_index, call.reduction)

            return None, None, *gradients_apart(formula, (hidden_states,), d_loss), None, None, None
        dx = torch.empty_like(hidden_states)
        rows = (each.view(-1, weight.shape[1]) for each in (dx, hidden_states))
        for into, hidden, *of_tokens in _split(ctx.size, *rows, target, maxima, log_sums):
            leaf, logits = _layer(hidden, weight, bias)
            d_logits = logits.detach()
            ctx.calls[len(hidden)].gradient(d_logits, *of_tokens, d_loss, count, d_logits)
            into.copy_(*torch.autograd.grad(logits, leaf, d_logits))
            del logits, d_logits  # Before the next chunk's.
        return None, None, dx, None, None, None


def _layer(hidden_states, weight, bias):
    """The input as a leaf, and the linear layer's output with its graph."""
    with torch.enable_grad():
        leaf = hidden_states.detach().requires_grad_()
        return leaf, functional.linear(leaf, weight.detach(), None if bias is None else bias.detach())


def _are_proved(hidden_states, weight, bias, size: int, needs_grad: bool) -> bool:
    """Whether chunks have the bits of the whole for these shapes, and with torch's settings of products of matrices."""
    matmul, shapes = torch.backends.cuda.matmul, (tuple(hidden_states.shape), tuple(weight.shape))
    settings = (
        torch_internals.matmul_precision(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.preferred_blas_library(),
        torch.are_deterministic_algorithms_enabled(),
    )
    of_kind = weight.dtype, weight.device, bias is not None, size, needs_grad
    return proof.kernel_is_proved(
        ("linear_cross_entropy", shapes, of_kind, settings),
        proof.Subject(
            linear_cross_entropy,
            weight.device,
            f"{weight.dtype}, hidden states {shapes[0]}, weight {shapes[1]}, chunks of {size} tokens",
        ),
        functools.partial(_comparisons, hidden_states.detach(), weight, bias, size, needs_grad),
    )


def _comparisons(hidden_states, weight, bias, size, needs_grad):
    source = proof.generator(weight.device, size)
    random = proof.normal(source, hidden_states.shape).to(weight.dtype)
    for given in (random, hidden_states):
        yield from _compared(given, weight, bias, size, needs_grad)


def _compared(hidden_states, weight, bias, size, needs_grad):
    """The logits, and the gradient of the hidden states if the logits were their own gradient."""
    leaf, logits = _layer(hidden_states, weight, bias)
    rows = [hidden_states.view(-1, weight.shape[1]), logits.detach().view(-1, weight.shape[0])]
    if needs_grad:
        rows.append(torch.autograd.grad(logits, leaf, logits.detach())[0].reshape(-1, weight.shape[1]))
    for hidden, expected, *gradient in _split(size, *rows):
        leaf, found = _layer(hidden, weight, bias)
        yield "the logits", found.detach(), expected
        if needs_grad:
            yield "the gradient of the hidden states", *torch.autograd.grad(found, leaf, expected), *gradient
