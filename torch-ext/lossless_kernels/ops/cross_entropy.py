"""Cross-entropy with the bits of eager's fp32 loss, from logits of any dtype, without an fp32 copy of them."""

import functools
import math
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ..core import launch, plans, proof
from ..core.calls import Calls, Outside
from ..core.domain import (
    FLOAT_DTYPES,
    allocator,
    are_as_saved,
    are_plain,
    check_floating,
    gradients_apart,
    layouts_if_hooked,
    runs_kernels,
)
from ..core.reduction import next_power_of_two
from ..core.softmax import CUDA_ONLY, LOOP, WARP, lanes, softmax_forward
from ..core.torch_internals import apply_of, keeps_graph

if launch.AVAILABLE:
    from ..kernels_src.cross_entropy import cross_entropy_backward, cross_entropy_forward, cross_entropy_forward_short

# As ATen numbers them.
_REDUCTIONS = {"mean": 1, "sum": 2}
_nll_loss = torch.ops.aten.nll_loss_forward.default


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    weight: Optional[torch.Tensor] = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy loss: bit for bit what `F.cross_entropy(logits.float(), target, ...)` returns, in fp32.

    `-sum(log_softmax(logits.float())[i, target[i]])` over the rows i whose target is not `ignore_index`; "mean" divides it
    by their number. For 16-bit logits `F.cross_entropy(logits, target)` differs: it rounds log-probabilities to 16 bits.

    Args:
        logits: [tokens, vocabulary], any real floating dtype.
        target: [tokens], int64, classes.
        ignore_index: rows with this target do not count; their gradient is zero.
        reduction: "mean", "sum" or "none". Eager computes "none".
        weight: [vocabulary], fp32, the weight of each class. Eager computes weighted losses.
        label_smoothing: from 0 to 1. Eager computes smoothed losses.

    Returns:
        The loss, fp32, 0-dimensional; [tokens] if `reduction` is "none".

    Raises:
        TypeError: `logits` is no tensor or not of a real floating dtype.
        ValueError: `reduction` is none of the three.

    Targets that `F.cross_entropy` rejects raise its error; probabilities as targets, [tokens, vocabulary], are eager's.

    The kernels run for fp32, fp16 and bf16 logits of at least 2 classes on CUDA with a contiguous last dimension. Eager
    computes everything else. The backward pass reads the logits again: do not write to them in between.
    """
    check_floating("logits", logits)
    check_reduction(reduction)
    if weight is not None or label_smoothing != 0.0:
        return eager(logits, target, ignore_index, reduction, weight, label_smoothing)
    out = replacement(logits, target, ignore_index, reduction)
    return eager(logits, target, ignore_index, reduction) if out is None else out


def check_reduction(reduction: str) -> None:
    """Raises ValueError unless `reduction` is one of `F.cross_entropy`'s."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction: expected "mean", "sum" or "none", found {reduction!r}')


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: Optional[Union[int, float, torch.Tensor]] = None,
    ignore_index: int = -100,
    shift_labels: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The loss of a causal language model: bit for bit what transformers' `ForCausalLMLoss` returns, in fp32.

    `-log_softmax(logits.float())[target]`, the mean over the targets that count; a token is the target of the position before.

    Args:
        logits: [..., vocab_size], any real floating dtype.
        labels: the tokens, [...], int64. They may be None beside `shift_labels`.
        vocab_size: how many classes the logits have.
        num_items_in_batch: divides the sum of the losses; without it the loss is their mean.
        ignore_index: a label that does not count.
        shift_labels: the targets themselves, used instead of `labels`.
        kwargs: other arguments that a model passes to its loss function; unused, as in transformers.

    Returns:
        The loss, fp32, 0-dimensional.

    Raises:
        TypeError: `logits` is no tensor or not of a real floating dtype, or there are neither `labels` nor `shift_labels`.
        RuntimeError: `vocab_size` does not divide the logits.

    The kernels run where those of `cross_entropy` do.
    """
    if shift_labels is None and not isinstance(labels, torch.Tensor):
        raise TypeError(f"labels: expected a torch.Tensor, found {type(labels).__name__}")
    return _causal_lm_loss(cross_entropy, logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)


def eager_causal_lm_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None):
    """`causal_lm_loss` in torch operations."""
    return _causal_lm_loss(eager, logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)


def _causal_lm_loss(cross_entropy, logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels):
    if shift_labels is None:
        labels = functional.pad(labels, (0, 1), value=ignore_index)
        shift_labels = labels[..., 1:].contiguous()
    target = shift_labels.view(-1).to(logits.device)
    flat = logits.reshape(-1, vocab_size)
    if num_items_in_batch is None:
        return cross_entropy(flat, target, ignore_index, "mean")
    loss = cross_entropy(flat, target, ignore_index, "sum")
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def eager(logits, target, ignore_index, reduction, weight=None, label_smoothing=0.0):
    return functional.cross_entropy(
        logits.float(), target, weight, None, ignore_index, None, reduction, label_smoothing
    )


# Calls


@dataclass(frozen=True)
class CrossEntropyPlan:
    """The launch configuration of the kernels for long rows.

    Attributes:
        num_warps: warps of a forward program, which takes one row at a time.
        unroll: steps of 4096 elements that a forward program loads at once.
        programs_per_multiprocessor: at least so many forward programs for an SM, if there are as many rows. One or two of
            them run at a time, so that rows stay in the L2 cache until the second read. None: one program for each row.
        held: the first steps of a row, which stay in registers between its two passes.
        max_registers: the most registers of a forward program's thread.
        block: elements of a backward program.
        backward_warps: warps of a backward program.
    """

    num_warps: int
    unroll: int = 4
    programs_per_multiprocessor: Optional[int] = None
    held: int = 0
    max_registers: Optional[int] = None
    block: int = 2048
    backward_warps: int = 2


# By the size of an element and the least bytes of a row; measured on an H200 with rows of 64 to 607 KB.
_PLANS = {
    2: {
        512 << 10: CrossEntropyPlan(num_warps=16, programs_per_multiprocessor=8, max_registers=64),
        192 << 10: CrossEntropyPlan(num_warps=16, programs_per_multiprocessor=8, held=7, max_registers=64),
        0: CrossEntropyPlan(num_warps=8),
    },
    4: {
        384 << 10: CrossEntropyPlan(num_warps=32, programs_per_multiprocessor=2),
        64 << 10: CrossEntropyPlan(num_warps=16, programs_per_multiprocessor=8, held=3, max_registers=64),
        0: CrossEntropyPlan(num_warps=8),
    },
}
# Rows of a program. With more, multiprocessors have no work at the end.
_MOST_ROWS = 4


def launch_plan(vocab: int, element_size: int) -> CrossEntropyPlan:
    return next(plan for least_bytes, plan in _PLANS[element_size].items() if vocab * element_size >= least_bytes)


# The forward kernel for short rows: elements and warps of a program.
_SHORT_ELEMENTS = 4096
_SHORT_WARPS = 4


def _alignment(logits) -> int:
    """Elements from a multiple of 16 bytes to the first fp32 row that eager sums: of the logits or of their fp32 copy."""
    return logits.data_ptr() // 4 % 4 if _is_dense(logits) and logits.dtype == torch.float32 else 0


def _forward(logits, ignore_index: int, plan: CrossEntropyPlan) -> launch.Launch:
    """The launch of the forward kernel. Its tensors: logits, target, maxima, log sums, log-probabilities, checked targets."""
    (rows, vocab), (row_stride, _), device = logits.shape, logits.stride(), logits.device
    dense = _is_dense(logits)
    unit = _access_unit(logits)
    shift = _alignment(logits)
    softmax = softmax_forward(vocab, torch.float32, aligned=shift == 0)
    dtypes = (logits.dtype, torch.int64, torch.float32, torch.float32, torch.float32, torch.int64)
    scalars = rows, row_stride // unit, ignore_index
    if softmax.kind == WARP:
        size = next_power_of_two(vocab)
        per_program = min(_SHORT_ELEMENTS // size, 128)
        constants = {
            "VOCAB": vocab,
            "LOG2_SIZE": size.bit_length() - 1,
            "WIDTH": softmax.threads,
            "UNIT": unit,
            "ROWS": per_program,
        }
        programs = -(-rows // per_program)
        return launch.bind(cross_entropy_forward_short, constants, _SHORT_WARPS, device, dtypes, programs, *scalars)
    # Otherwise the steps of a row begin after some of its elements, which takes more registers.
    begins_with_row = softmax.kind == LOOP and vocab % 4 == 0 and shift == 0
    constants = {
        "VOCAB": vocab,
        "KIND": softmax.kind,
        "DENSE": dense,
        "SHIFT": shift if softmax.kind == LOOP else 0,
        "UNIT": unit,
        "UNROLL": plan.unroll,
        "HELD": min(plan.held, vocab // 4096) if begins_with_row else 0,
    }
    programs = rows
    if plan.programs_per_multiprocessor is not None:
        least = plans.gpu(device).multiprocessors * plan.programs_per_multiprocessor
        programs = min(rows, max(least, -(-rows // _MOST_ROWS)))
    return launch.bind(
        cross_entropy_forward,
        constants,
        plan.num_warps,
        device,
        dtypes,
        programs,
        *scalars,
        max_registers=plan.max_registers if begins_with_row or dense else None,
    )


def _backward(logits, ignore_index: int, mean: bool, plan: CrossEntropyPlan) -> launch.Launch:
    """The launch of the backward kernel. Its tensors: logits, target, maxima, log sums, d_loss, number of rows, dx."""
    (rows, vocab), (row_stride, _), device = logits.shape, logits.stride(), logits.device
    unit = _access_unit(logits)
    block = min(plan.block, next_power_of_two(vocab))
    # Rows may begin anywhere; blocks across rows begin at multiples of 16 bytes.
    across_rows = unit * logits.dtype.itemsize < 16 and _is_dense(logits) and vocab >= block
    blocks_per_row = -(-vocab // block)
    constants = {"VOCAB": vocab, "MEAN": mean, "ACROSS_ROWS": across_rows, "UNIT": unit, "BLOCK": block}
    dtypes = (logits.dtype, torch.int64, *(torch.float32,) * 4, logits.dtype)
    scalars = rows, row_stride // unit, ignore_index, blocks_per_row
    warps = max(min(plan.backward_warps, block // 512), 1)
    programs = -(-rows * vocab // block) if across_rows else rows * blocks_per_row
    return launch.bind(cross_entropy_backward, constants, warps, device, dtypes, programs, *scalars)


def _is_dense(logits) -> bool:
    return logits.shape[0] == 1 or logits.stride(0) == logits.shape[1]


def _access_unit(logits) -> int:
    """The number of elements, up to 16 bytes, that one access can read."""
    row_stride = logits.shape[1] if logits.shape[0] == 1 else logits.stride(0)
    return math.gcd(logits.shape[1], row_stride, 16 // logits.dtype.itemsize)


def nll_loss(logp, checked, reduction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the number of rows that count, from the forward kernel's log-probabilities and checked targets.

    ATen's own kernel: its order, which depends on the number of rows alone, differs between versions.
    """
    return _nll_loss(logp[:, None], checked, None, _REDUCTIONS[reduction], -100)


class _LossCall:
    """A call, resolved for the logits' layout, dtype and device, and for `ignore_index` and `reduction`."""

    __slots__ = ("forward", "backward", "reduction", "ignore_index", "statistics", "targets", "dx")

    def __init__(self, logits, ignore_index: int, reduction: str, plan: Optional[CrossEntropyPlan] = None):
        plan = plan or launch_plan(logits.shape[1], logits.element_size())
        self.reduction = reduction
        self.ignore_index = ignore_index
        rows, vocab = logits.shape
        self.statistics = allocator((rows,), (1,), torch.float32, logits.device)
        self.targets = allocator((rows,), (1,), torch.int64, logits.device)
        self.dx = allocator((rows, vocab), (vocab, 1), logits.dtype, logits.device)
        self.forward = _forward(logits, ignore_index, plan)
        self.backward = _backward(logits, ignore_index, reduction == "mean", plan)

    def __call__(self, logits, target):
        """The loss, and for the gradient maxima, log sums and the number of rows that count."""
        maxima, log_sums, logp, checked = self.statistics(), self.statistics(), self.statistics(), self.targets()
        self.forward.call_6(logits, target, maxima, log_sums, logp, checked)
        loss, count = nll_loss(logp, checked, self.reduction)
        return loss, maxima, log_sums, count

    def gradient(self, logits, target, maxima, log_sums, d_loss, count, dx=None):
        """The gradient of the logits, [tokens, vocabulary], written to `dx`: new memory or the logits' own."""
        dx = self.dx() if dx is None else dx
        self.backward(logits, target, maxima, log_sums, d_loss, count, dx)
        return dx


def replacement(logits, target, ignore_index: int, reduction: str) -> Optional[torch.Tensor]:
    """The loss from the kernels; None if eager must compute it."""
    if is_dynamo_compiling() or not isinstance(target, torch.Tensor):
        return None
    if not are_plain(logits, target):
        return proof.record_refusal(functional.cross_entropy, proof.NOT_PLAIN)
    call = call_of(logits, target, ignore_index, reduction)
    if call is None:
        return None
    return apply(call, logits, target, False) if is_grad_enabled() and logits.requires_grad else call(logits, target)[0]


def call_of(logits, target, ignore_index: int, reduction: str) -> Optional["_LossCall"]:
    """The recorded call for these plain tensors; None if eager must run."""
    arguments = ignore_index, reduction, is_grad_enabled() and logits.requires_grad
    # The address decides where ATen's vectors begin.
    facts = logits.data_ptr() % 16, *arguments
    return _calls.find(functional.cross_entropy, facts, (logits, target), *arguments)


# The most programs of CUDA's grid along x.
_MAX_VOCABULARY = 1 << 24
# The first compute capability with a maximum of two 16-bit numbers that returns NaN.
_LEAST_CAPABILITY_OF_16_BITS = 8


def _resolve(logits, target, ignore_index, reduction, needs_grad) -> Optional[_LossCall]:
    if logits.dtype not in FLOAT_DTYPES or not runs_kernels(logits.device):
        raise Outside(f"logits {logits.dtype} on {logits.device}")
    if torch.version.hip is not None:
        raise Outside(CUDA_ONLY)
    capability = plans.gpu(logits.device).compute_capability
    if capability is not None and capability < _LEAST_CAPABILITY_OF_16_BITS and logits.element_size() == 2:
        raise Outside(f"logits {logits.dtype} on a GPU before compute capability {_LEAST_CAPABILITY_OF_16_BITS}.0")
    if reduction not in _REDUCTIONS:
        raise Outside("no reduction")
    if logits.dim() != 2 or target.dim() != 1 or target.shape[0] != logits.shape[0]:
        raise Outside("logits that are not [tokens, vocabulary], or targets that are not [tokens]")
    if target.dtype != torch.int64 or target.device != logits.device or not target.is_contiguous():
        raise Outside("targets that are no int64, not contiguous or on another device")
    rows, vocab = logits.shape
    if rows == 0 or not 2 <= vocab <= _MAX_VOCABULARY or not -(1 << 63) <= ignore_index < 1 << 63:
        raise Outside("no tokens, a vocabulary of one or too large, or an ignored index beyond int64")
    if logits.stride(1) != 1 or (rows > 1 and logits.stride(0) < vocab):
        raise Outside("logits whose last dimension is not contiguous, or whose rows overlap")
    if rows * -(-vocab // launch_plan(vocab, logits.element_size()).block) > launch.MAX_PROGRAMS:
        raise Outside("too many tokens")
    if not _proved(logits) or (needs_grad and not _proved(logits, reduction)):
        return None
    return _LossCall(logits, ignore_index, reduction)


_calls = Calls(_resolve)


class CrossEntropy(torch.autograd.Function):
    """With `owned` no other code holds the logits: the gradient overwrites them."""

    @staticmethod
    def forward(ctx, call, logits, target, owned):
        loss, *statistics = call(logits, target)
        kept = logits, target, *statistics
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.owned, ctx.layouts = call, owned, layouts_if_hooked(*kept)
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        if d_loss is None:
            return None, None, None, None
        kept = logits, target, maxima, log_sums, count = ctx.saved_tensors
        call = ctx.call
        # Double backward, a dispatch mode, or a saved-tensor hook that returned something else.
        if is_grad_enabled() or not are_plain(d_loss, logits) or not are_as_saved(ctx.layouts, *kept):
            formula = functools.partial(eager, target=target, ignore_index=call.ignore_index, reduction=call.reduction)
            return None, *gradients_apart(formula, (logits,), d_loss), None, None
        # Another backward pass would read the logits again.
        dx = logits.detach() if ctx.owned and logits.is_contiguous() and not keeps_graph() else None
        return None, call.gradient(logits, target, maxima, log_sums, d_loss, count, dx), None, None


apply = apply_of(CrossEntropy)


# Proof


def _proved(logits, reduction: Optional[str] = None) -> bool:
    """Whether the kernels for this vocabulary and memory layout are proved; with `reduction` for loss and gradient."""
    dense, unit, shift, vocab = _is_dense(logits), _access_unit(logits), _alignment(logits), logits.shape[1]
    what = "log-probabilities" if reduction is None else f"{reduction} and gradient"
    return proof.kernel_is_proved(
        ("cross entropy", reduction, logits.dtype, vocab, dense, unit, shift, logits.device),
        proof.Subject(functional.cross_entropy, logits.device, f"{logits.dtype}, {vocab} classes, {what}"),
        functools.partial(_comparisons, logits.dtype, vocab, dense, unit, shift, logits.device, reduction),
    )


_PROOF_ROWS = 64
_PROOF_ELEMENTS = 1 << 26


def proof_rows(rows: int, vocab: int, shift: int, source: torch.Generator, device: torch.device):
    """Random fp32 rows, [rows, vocab], whose log-probabilities show the order of additions; and targets.

    In the first half of the rows one lane of ATen's block has all large terms: a sum over a thousand lanes would hide
    the order inside a lane. Each row has a peak at its target that puts its sum into [2, 4), where the logarithm
    resolves the sum's last bits.

    Args:
        shift: elements from a multiple of 16 bytes to the first row.
    """
    x = proof.normal(source, rows, vocab)
    target = torch.randint(vocab, (rows,), device=device, generator=source)
    order = softmax_forward(vocab, torch.float32, aligned=shift == 0)
    lane = lanes(order, rows // 2, vocab, shift, device)
    x[: rows // 2].sub_(torch.where(lane == lane.gather(1, target[: rows // 2, None]), 0.0, 40.0))
    peaks = x.logsumexp(1) - 1.1 * proof.uniform(source, rows)
    return x.scatter_(1, target[:, None], peaks[:, None]), target


def _comparisons(dtype, vocab, dense, unit, shift, device, reduction):
    """Compares rows of every alignment, rows without log-probabilities and ignored rows."""
    rows, source = max(min(_PROOF_ROWS, _PROOF_ELEMENTS // vocab), 16), proof.generator(device, vocab)
    row_stride = vocab if dense else vocab + unit
    there = torch.zeros(shift + rows * row_stride, dtype=dtype, device=device)
    logits = there[shift:].view(rows, row_stride)[:, :vocab]
    x, target = proof_rows(rows, vocab, shift, source, device)
    logits.copy_(x)
    del x
    logits[-1, 0], logits[-2, vocab - 1], logits[-3], logits[-4] = math.nan, math.inf, -math.inf, -math.inf
    # The loss would be NaN with them.
    target[-6:], target[rows // 4] = -100, -100
    call = _LossCall(logits, -100, reduction or "mean")
    if reduction is None:
        _, maxima, log_sums, _ = call(logits, torch.where(target < 0, 0, target))
        h = logits.float()
        found = (h - maxima[:, None]) - log_sums[:, None]
        # The maximum may be either zero.
        yield "the log-probabilities", found + 0.0, functional.log_softmax(h, -1) + 0.0
        return
    logits.requires_grad_()
    loss, maxima, log_sums, count = call(logits.detach(), target)
    with torch.enable_grad():
        expected = eager(logits, target, -100, reduction)
        d_loss = torch.full((), 0.7, dtype=torch.float32, device=device)
        (gradient,) = torch.autograd.grad(expected, logits, d_loss)
    yield "the loss", loss, expected.detach()
    yield "the gradient", call.gradient(logits.detach(), target, maxima, log_sums, d_loss, count), gradient
