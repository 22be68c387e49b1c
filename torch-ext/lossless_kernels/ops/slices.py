"""Losses of TRL by its own operations, slice by slice: no slice's temporaries outlive it.

ATen's operations compute the forward and the backward pass of each slice. The backward pass computes a slice again
instead of keeping its tensors, and writes its gradient into one tensor.
"""

import functools
import math
from typing import Callable, Optional, Union

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ..core import proof
from ..core.domain import PLAIN_TYPES, check_floating, gradients_apart, is_watched
from ..core.torch_internals import keeps_graph
from . import jsd
from .jsd import divergence

_REDUCTIONS = ("batchmean", "sum", "mean", "none")
_IGNORED = -100


def generalized_jsd_loss(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: Optional[torch.Tensor] = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Optional[Union[int, float, torch.Tensor]] = None,
) -> torch.Tensor:
    """Generalized Jensen-Shannon divergence: bit for bit what TRL's `GKDTrainer.generalized_jsd_loss` returns.

    With s and t the log-probabilities of student and teacher, and `m = log((1 - beta) * exp(s) + beta * exp(t))`, the sum
    over tokens and vocabulary of `beta * exp(t) * (t - m) + (1 - beta) * exp(s) * (s - m)`; `exp(t) * (t - s)` for beta 0
    and `exp(s) * (s - t)` for beta 1.

    Args:
        student_logits, teacher_logits: [..., vocabulary], any real floating dtype.
        labels: [...]; tokens with the label -100 do not count.
        beta: the teacher's weight in the mixture, from 0 to 1. TRL does not check it, and neither does this function.
        temperature: divides the logits; not checked either.
        reduction: "batchmean" (the mean over the tokens that count, or without labels over the first dimension), "sum",
            "mean" or "none".
        num_items_in_batch: divides the sum, whatever `reduction` says.

    Returns:
        The loss, of no dimension; for "none" the terms, [tokens that count, vocabulary], or without labels the logits'
        shape.

    Raises:
        TypeError: `student_logits` or `teacher_logits` is no tensor or not of a real floating dtype.
        ValueError: `reduction` is none of the four.
        RuntimeError: the logits' shapes do not fit.

    The kernels run for fp32, fp16 and bf16 logits of one shape and dtype and of at least 2049 classes on CUDA. One tensor of
    the terms exists until it is summed; the graph keeps the logits and 24 bytes a row, and the backward pass computes from
    the logits again: do not write to them in between. Elsewhere eager's operations run on some rows at a time, in both
    passes. Eager runs on all rows at once under torch.compile and `torch.func`, for logits of different shapes, and where
    verification finds other bits.
    """
    check_floating("student_logits", student_logits)
    check_floating("teacher_logits", teacher_logits)
    check_reduction(reduction)
    return divergence_loss(
        student_logits, teacher_logits, labels, beta, temperature, reduction, num_items_in_batch, owned=False
    )


def check_reduction(reduction: str) -> None:
    """Raises ValueError unless `reduction` is one of `generalized_jsd_loss`'s."""
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(_REDUCTIONS)}, found {reduction!r}")


def divergence_loss(
    student_logits, teacher_logits, labels, beta, temperature, reduction, num_items_in_batch, owned: bool
) -> torch.Tensor:
    """`generalized_jsd_loss` of checked arguments. With `owned` no other code holds the logits: gradients overwrite them."""
    mask = None if labels is None else labels != _IGNORED
    terms = jsd.replacement(generalized_jsd_loss, student_logits, teacher_logits, mask, beta, temperature, owned)
    compute = functools.partial(divergence, beta=beta, temperature=temperature)
    if terms is not None:
        terms = terms if mask is not None else terms.view(student_logits.shape)
    elif _slices_divergence(student_logits, teacher_logits, mask, beta):
        size, rows = _rows_of_slice(student_logits), math.prod(student_logits.shape[:-1])
        count = rows if mask is None else int(mask.sum())
        terms = _by_slices(compute, student_logits.dim() - 1, size, count, owned, student_logits, teacher_logits, mask)
        terms = terms if mask is not None else terms.view(student_logits.shape)
    else:
        terms = compute(student_logits, teacher_logits, mask)
    if num_items_in_batch is not None:
        total = terms.sum()
        return total / (
            num_items_in_batch.to(total.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch
        )
    if reduction == "batchmean":
        return terms.sum() / (max(terms.shape[0], 1) if mask is None else mask.sum().clamp_min(1))
    return terms if reduction == "none" else getattr(terms, reduction)()


def selective_log_softmax(
    logits: torch.Tensor,
    index: torch.Tensor,
    temperature: float = 1.0,
    row_mask: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Log-probabilities of tokens: bit for bit what the operations of TRL's `selective_log_softmax` return.

    `log_softmax(logits / temperature)` at `index`. fp32 and fp64 logits get `logits[index] - logsumexp(logits)`; 16-bit
    logits get log_softmax in 16 bits. Each sequence (element of the first dimension) is computed for itself.

    Args:
        logits: [..., vocabulary], any real floating dtype.
        index: int64, [...], or [..., number of tokens].
        temperature: divides the logits.
        row_mask: [...] as index; where it is zero the result is 0.

    Returns:
        A tensor of the shape of index and the dtype of logits.

    Raises:
        TypeError: `logits` is no tensor or not of a real floating dtype.
        ValueError: `temperature` is not positive, or `index` has another number of sequences than 16-bit logits.
        RuntimeError: the shapes do not fit otherwise.

    There is no kernel. Nothing but the logits is kept for the backward pass, which computes each sequence again and writes
    its gradient into one tensor. TRL 1.16 calls a Triton kernel instead of its operations on a GPU: that has other bits.
    """
    check_floating("logits", logits)
    if temperature <= 0:
        raise ValueError(f"temperature: expected a positive number, found {temperature!r}")
    compute = functools.partial(_selected, temperature=temperature)
    if (
        logits.dim() > 1
        and logits.dim() - index.dim() in (0, 1)
        and index.shape[0] == logits.shape[0] > 1
        and _sees_all(logits, index)
    ):
        found = _by_slices(compute, 1, 1, logits.shape[0], False, logits, index)
    else:
        found = compute(logits, index)
    return found if row_mask is None else found.masked_fill(row_mask == 0, 0.0)


def entropy_from_logits(logits: torch.Tensor, chunk_size: int = 128) -> torch.Tensor:
    """Entropy of each token's distribution: bit for bit what the operations of TRL's `entropy_from_logits` return.

    `-sum(exp(logp) * logp)` over the vocabulary, with `logp = log_softmax(logits)`, in chunks of rows.

    Args:
        logits: [..., vocabulary], any real floating dtype.
        chunk_size: rows computed at once, from 1 on. It can decide the bits: ATen's order of additions depends on the number
            of rows.

    Returns:
        [...], in the dtype of logits.

    Raises:
        TypeError: `logits` is no tensor or not of a real floating dtype.
        RuntimeError: `chunk_size` is not positive.

    There is no kernel. Nothing but the logits is kept for the backward pass, which computes each chunk again and writes its
    gradient into one tensor. TRL 1.16 calls a Triton kernel instead of its operations on a GPU: that has other bits.
    """
    check_floating("logits", logits)
    rows = math.prod(logits.shape[:-1])
    if logits.dim() > 1 and rows > chunk_size > 0 and _sees_all(logits):
        return _by_slices(_entropy, logits.dim() - 1, chunk_size, rows, False, logits).view(logits.shape[:-1])
    chunks = logits.reshape(-1, logits.shape[-1]).split(chunk_size)
    return torch.cat([_entropy(chunk) for chunk in chunks]).reshape(logits.shape[:-1])


# Eager


def _selected(logits, index, temperature: float):
    if temperature != 1.0:
        logits = logits / temperature
    is_single = index.dim() == logits.dim() - 1
    index = index.unsqueeze(-1) if is_single else index
    if logits.dtype in (torch.float32, torch.float64):
        log_sums = torch.stack([torch.logsumexp(each, -1) for each in logits])
        found = logits.gather(-1, index) - log_sums.unsqueeze(-1)
    else:
        if len(logits) != len(index):
            raise ValueError(f"index: expected {len(logits)} sequences as in logits, found {len(index)}")
        found = torch.stack([functional.log_softmax(each, -1).gather(-1, at) for each, at in zip(logits, index)])
    return found.squeeze(-1) if is_single else found


def _entropy(logits):
    logp = functional.log_softmax(logits, -1)
    return -(torch.exp(logp) * logp).sum(-1)


# Slices


class Slices(torch.autograd.Function):
    """`compute` of slices along the first `dims` dimensions of `tensors`, flattened; the slices' results are joined.

    Args:
        size: rows of a slice.
        rows: rows of the result.
        owned: no other code holds the tensors that require gradients; the gradients overwrite them.
    """

    @staticmethod
    def forward(ctx, compute, dims, size, rows, owned, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.compute, ctx.dims, ctx.size, ctx.owned = compute, dims, size, owned
        device = tensors[0].device.type
        ctx.autocast = {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
        }
        out, done = None, 0
        for first in range(0, math.prod(tensors[0].shape[:dims]), size):
            found = compute(*(_slice(each, dims, first, size) for each in tensors))
            out = found.new_empty(rows, *found.shape[1:]) if out is None else out
            out[done : done + len(found)] = found
            done += len(found)
        return out

    @staticmethod
    def backward(ctx, dy):
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[5:]
        if dy is None:
            return (None,) * (5 + len(tensors))
        places = [place for place, each in enumerate(wanted) if each]
        if is_grad_enabled():  # Double backward.
            found = gradients_apart(functools.partial(_joined, ctx, tensors, places), [tensors[p] for p in places], dy)
        else:
            # Another backward pass would read the tensors again.
            overwrites = ctx.owned and not keeps_graph()
            found = [_gradient_of(tensors[p], overwrites) for p in places]
            _write_gradients(ctx, tensors, places, dy, found)
        of_place = dict(zip(places, found))
        return (None,) * 5 + tuple(of_place.get(place) for place in range(len(tensors)))


def _gradient_of(tensor, overwrites: bool):
    """Contiguous memory for the gradient: the tensor's own, or new."""
    if overwrites and tensor.is_contiguous():
        return tensor.detach()
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _write_gradients(ctx, tensors, places, dy, gradients) -> None:
    done = 0
    for first in range(0, math.prod(tensors[0].shape[: ctx.dims]), ctx.size):
        slices = [_slice(each, ctx.dims, first, ctx.size) for each in tensors]
        for place in places:
            slices[place] = slices[place].detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            found = ctx.compute(*slices)
        of_slice = torch.autograd.grad(found, [slices[place] for place in places], dy[done : done + len(found)])
        done += len(found)
        for gradient, each in zip(gradients, of_slice):
            gradient.flatten(0, ctx.dims - 1)[first : first + ctx.size] = each
        del found, of_slice, slices


def _joined(ctx, tensors, places, *leaves):
    """All slices, in operations that autograd records."""
    of_place = dict(zip(places, leaves))
    tensors = [of_place.get(place, each) for place, each in enumerate(tensors)]
    count = -(-math.prod(tensors[0].shape[: ctx.dims]) // ctx.size)
    split = [(None,) * count if each is None else each.flatten(0, ctx.dims - 1).split(ctx.size) for each in tensors]
    with torch.autocast(**ctx.autocast):
        return torch.cat([ctx.compute(*slices) for slices in zip(*split)])


def _slice(tensor, dims: int, first: int, size: int):
    """Rows of the tensor whose first `dims` dimensions are flattened: a view, or a copy of these rows alone."""
    if tensor is None or dims == 1:
        return tensor if tensor is None else tensor[first : first + size]
    shape = tensor.shape[:dims]
    try:
        return tensor.view(-1, *tensor.shape[dims:])[first : first + size]
    except RuntimeError:  # The rows are not equally spaced.
        rows = torch.arange(first, min(first + size, math.prod(shape)), device=tensor.device)
        return tensor[torch.unravel_index(rows, shape)]


_by_slices: Callable = Slices.apply


def _sees_all(*tensors) -> bool:
    """Whether these are plain tensors that autograd may save, and no transform or trace needs the operations' gradients."""
    if is_dynamo_compiling() or is_watched() or not all(type(each) in PLAIN_TYPES for each in tensors):
        return False
    keeps = is_grad_enabled() and any(each.requires_grad for each in tensors)
    return not (keeps and any(each.is_inference() for each in tensors))


# Elements of a slice: its temporaries stay small beside the logits. Not measured on a GPU.
_SLICE_ELEMENTS = 1 << 23
# So many rows begin at a multiple of 16 bytes, as the first row does; ATen's order of additions depends on it.
_ALIGNED_ROWS = 8


def _rows_of_slice(logits) -> int:
    return max(_SLICE_ELEMENTS // max(logits.shape[-1:].numel(), 1) // _ALIGNED_ROWS, 1) * _ALIGNED_ROWS


def _slices_divergence(student, teacher, mask, beta: float) -> bool:
    if (
        math.prod(student.shape[:-1]) <= _rows_of_slice(student)
        or student.shape != teacher.shape
        or student.device != teacher.device
        or not (mask is None or mask.shape == student.shape[:-1])
        or not _sees_all(student, teacher)
    ):
        return False
    kind = beta if beta in (0, 1) else 0.5
    vocabulary, dtypes = student.shape[-1], (student.dtype, teacher.dtype)
    if torch.is_autocast_enabled(student.device.type):  # log_softmax computes in fp32.
        dtypes = (torch.float32,) * 2
    return proof.kernel_is_proved(
        ("generalized_jsd_loss", kind, vocabulary, dtypes, student.device),
        proof.Subject(
            generalized_jsd_loss,
            student.device,
            f"{dtypes[0]} and {dtypes[1]}, {vocabulary} classes, beta {kind}, rows in slices",
        ),
        functools.partial(_comparisons, vocabulary, dtypes, student.device, kind),
    )


def _comparisons(vocabulary, dtypes, device, beta):
    """Three slices of the fewest rows against all rows at once: the terms and the gradients."""
    rows, source = 3 * _ALIGNED_ROWS - 3, proof.generator(device, vocabulary)
    logits = [proof.normal(source, rows, vocabulary).mul_(3.0).to(dtype) for dtype in dtypes]
    logits[0][0, 0], logits[1][_ALIGNED_ROWS, -1] = -math.inf, math.inf
    mask = torch.arange(rows, device=device) % 5 > 0
    compute = functools.partial(divergence, beta=beta, temperature=0.9)
    results = []
    for function in (
        lambda s, t: _by_slices(compute, 1, _ALIGNED_ROWS, int(mask.sum()), False, s, t, mask),
        lambda s, t: compute(s, t, mask),
    ):
        leaves = [each.clone().requires_grad_() for each in logits]
        with torch.enable_grad():
            terms = function(*leaves)
            gradients = torch.autograd.grad(terms.sum(), leaves)
        results.append((terms.detach(), *gradients))
    yield from zip(("the terms", "the student's gradient", "the teacher's gradient"), *results)
