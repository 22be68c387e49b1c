"""Kullback-Leibler divergence and total variation distance with eager's bits, without tensors of their terms."""

import functools
import math
from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ..core import launch, operators, proof
from ..core.calls import Calls, Outside
from ..core.domain import (
    FLOAT_DTYPES,
    allocator,
    are_as_saved,
    are_ours,
    are_plain,
    check_floating,
    gradients_apart,
    is_autocast,
    is_traced_plainly,
    layouts_if_hooked,
    runs_kernels,
)
from ..core.layout import contiguous_strides
from ..core.reduction import reciprocal
from ..core.torch_internals import apply_of, dispatch_modes
from .full_sum import CUDA_ONLY, FullSum, check_parts, lengths_of_proof, order_of, sums_of_proof

if launch.AVAILABLE:
    from ..kernels_src.divergences import divergence_backward, divergence_blocks, divergence_forward

_REDUCTIONS = ("none", "batchmean", "sum", "mean")


def kl_div(
    input: torch.Tensor, target: torch.Tensor, reduction: str = "mean", log_target: bool = False
) -> torch.Tensor:
    """Kullback-Leibler divergence: bit for bit what `F.kl_div(input, target, reduction=..., log_target=...)` returns.

    Elementwise `target * (log(target) - input)`, or `exp(target) * (target - input)` with `log_target`, as ATen rounds
    it; then the sum over everything, or that divided by `input.shape[0]` ("batchmean") or by the number of elements.

    Args:
        input: log-probabilities, any shape, any real floating dtype.
        target: probabilities, with `log_target` their logarithms, of the shape of input.
        reduction: "none", "batchmean", "sum" or "mean".

    Returns:
        The divergence in the promoted dtype of both: of no dimension, or elementwise for "none".

    Raises:
        TypeError: `input` or `target` is no tensor or not of a real floating dtype.
        ValueError: `reduction` is none of the four.
        RuntimeError: the shapes cannot be broadcast to each other.

    The kernels run for fp32, fp16 and bf16 on CUDA if both tensors are contiguous and have one shape. Eager computes
    everything else, and 16 bits under autocast, which computes in fp32.
    """
    check_floating("input", input)
    check_floating("target", target)
    _check_reduction(reduction)
    out = replacement(_KL_LOG_TARGET if log_target else _KL, input, target, None, -100, reduction)
    return functional.kl_div(input, target, reduction=reduction, log_target=log_target) if out is None else out


def tvd(
    p: torch.Tensor,
    q: torch.Tensor,
    labels: Optional[torch.Tensor] = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
) -> torch.Tensor:
    """Total variation distance of distributions: bit for bit what these operations return.

    ```python
    distance = torch.abs(p - q) / 2.0
    count = p.shape[0]
    if labels is not None:
        distance = torch.where(labels.unsqueeze(1) != ignore_index, distance, torch.zeros_like(distance))
        count = (labels != ignore_index).sum().item()
    distance.sum() / count  # "batchmean"; for "mean" count * p.shape[1], for "sum" 1; or distance for "none"
    ```

    Liger's tests compare its `liger_tvd` with this formula. Without a label that counts the result is 0.

    Args:
        p, q: probabilities, [rows, classes], any real floating dtype.
        labels: [rows], int64; rows with the label `ignore_index` do not count.
        reduction: "none", "batchmean", "sum" or "mean".

    Returns:
        The distance in the promoted dtype of both: of no dimension, or [rows, classes] for "none".

    Raises:
        TypeError: `p` or `q` is no tensor or not of a real floating dtype.
        ValueError: `reduction` is none of the four, or `p` has fewer than two dimensions.
        RuntimeError: the shapes cannot be broadcast to each other.

    The kernels run where those of `kl_div` do, for tensors of two dimensions.
    """
    check_floating("p", p)
    check_floating("q", q)
    _check_reduction(reduction)
    if p.dim() < 2:
        raise ValueError(f"p: expected [rows, classes], found shape {list(p.shape)}")
    count = None if labels is None else int((labels != ignore_index).sum())
    if count == 0:
        return torch.zeros((), dtype=torch.get_default_dtype(), device=p.device)
    out = None if p.dim() != 2 else replacement(_VARIATION, p, q, labels, ignore_index, reduction, count)
    return _tvd(p, q, labels, ignore_index, reduction, count) if out is None else out


def _check_reduction(reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(_REDUCTIONS)}, found {reduction!r}")


# Eager: the divergence, and the gradients of both tensors; the second has one for each path to the output


def _kl_div(first, second, labels, ignore_index, reduction, count, log_target):
    # `F.kl_div` without its warning.
    numbers = {"none": 0, "mean": 1, "sum": 2, "batchmean": 2}
    out = torch.kl_div(first, second, numbers[reduction], log_target=log_target)
    return out / first.shape[0] if reduction == "batchmean" and first.dim() else out


def _tvd(p, q, labels, ignore_index, reduction, count):
    distance = torch.abs(p - q) / 2.0
    if labels is not None:
        distance = torch.where(labels.unsqueeze(1) != ignore_index, distance, torch.zeros_like(distance))
    if reduction == "none":
        return distance
    rows = p.shape[0] if count is None else count
    return _divided(distance.sum(), {"sum": None, "batchmean": rows, "mean": rows * p.shape[1]}[reduction])


def _divided(total, divisor):
    return total if divisor is None else total / divisor


def _kl_gradients(dy, first, second, labels, ignore_index):
    minus_dy, dy_second = -dy, dy.to(second.dtype)
    d_factor = torch.xlogy(dy_second, second).masked_fill(second == 0.0, 0.0)
    return minus_dy * second, d_factor, dy_second * second / second, minus_dy * first


def _kl_log_target_gradients(dy, first, second, labels, ignore_index):
    probability = second.exp()
    product = dy * probability
    return -product, product, (dy * (second - first)).to(second.dtype) * probability


def _variation_gradients(dy, p, q, labels, ignore_index):
    if labels is not None:
        dy = torch.where(labels.unsqueeze(1) != ignore_index, dy, 0.0)
    dp = dy / 2.0 * (p - q).sgn()
    return dp, -dp


@dataclass(frozen=True, eq=False)
class Divergence:
    """A divergence of two tensors, as eager computes it.

    Attributes:
        name: the kernels' constant FORM.
        original: the function that reports name.
        eager: `eager(first, second, labels, ignore_index, reduction, count)`; `count` rows have a label that counts.
        gradients: `gradients(dy, first, second, labels, ignore_index)`, of elementwise divergences: that of the first
            tensor, then those of the second in their order of arrival.
        paths: the number of gradients of the second tensor.
        rounds_mean: eager rounds the sum before it divides for the mean.
    """

    name: str
    original: Callable
    eager: Callable
    gradients: Callable
    paths: int
    rounds_mean: bool = False


_KL = Divergence("target", functional.kl_div, functools.partial(_kl_div, log_target=False), _kl_gradients, 3)
_KL_LOG_TARGET = Divergence(
    "log_target", functional.kl_div, functools.partial(_kl_div, log_target=True), _kl_log_target_gradients, 2
)
_VARIATION = Divergence("variation", tvd, _tvd, _variation_gradients, 1, rounds_mean=True)
_DIVERGENCES = {each.name: each for each in (_KL, _KL_LOG_TARGET, _VARIATION)}


# Calls


# Elements and warps of an elementwise program.
_BLOCK = 1024
_NUM_WARPS = 4
# Elements of an access: 16 bytes of 16 bits.
_MOST_UNIT = 8
# Of a row that has a label, as columns have 32 bits.
_MOST_CLASSES = 1 << 30
# Launches that a call keeps.
_MOST_BOUND = 16


def _divisor(form: Divergence, shape, reduction: str, count: Optional[int]) -> Optional[int]:
    """The number by which eager divides the sum; None if it does not."""
    rows = shape[0] if count is None and len(shape) else count
    if reduction == "batchmean":
        return rows
    return (math.prod(shape) if count is None else rows * shape[1]) if reduction == "mean" else None


class _Call:
    """A call, resolved for the tensors' shape, dtypes and device, the reduction and the presence of labels."""

    def __init__(self, form: Divergence, shape, dtypes, device, reduction: str, labels: bool = False):
        self.form, self.shape, self.dtypes, self.device, self.reduction = form, shape, dtypes, device, reduction
        self.dtype = torch.promote_types(*dtypes)
        self.size = shape[1] if labels else 0
        self.out = allocator(shape, contiguous_strides(shape), self.dtype, device)
        # Kernels without labels do not read it.
        self.no_labels = torch.empty(1, dtype=torch.int64, device=device)
        self._bound: dict = {}

    def __call__(self, first, second, labels=None, ignore_index=-100, count=None, total=None):
        """The divergence; `total` gets the sum in fp32."""
        labels = self.no_labels if labels is None else labels
        if self.reduction != "none":
            return self._once(self._sum, ignore_index, self._factor(count))(first, second, labels, total=total)
        out = self.out()
        self._once(self._forward, ignore_index).call_4(first, second, labels, out)
        return out

    def gradients(self, dy, first, second, labels, ignore_index, count, with_first: bool, with_second: bool):
        """The gradient of the first tensor, and those of the second in their order of arrival; None if unwanted."""
        d_first = torch.empty_like(first)
        d_second = [torch.empty_like(second) for _ in range(self.form.paths if with_second else 0)]
        bound = self._once(self._backward, ignore_index, self._factor(count), with_first, with_second)
        bound(dy, first, second, self.no_labels if labels is None else labels, d_first, *d_second)
        return (d_first if with_first else None, *(d_second or (None,) * self.form.paths))

    def _factor(self, count: Optional[int]) -> float:
        divisor = _divisor(self.form, self.shape, self.reduction, count)
        return 1.0 if divisor is None else reciprocal(divisor)

    def _once(self, bind: Callable, *arguments):
        """What `bind` returns. Only the number of labels that count differs from call to call."""
        key = (bind.__name__, *arguments)
        found = self._bound.get(key)
        if found is None:
            if len(self._bound) >= _MOST_BOUND:
                self._bound.clear()
            found = self._bound[key] = bind(*arguments)
        return found

    def _sum(self, ignore_index: int, factor: float) -> FullSum:
        return FullSum(
            divergence_blocks,
            {"FORM": self.form.name, "SIZE": self.size},
            (*self.dtypes, torch.int64),
            (ignore_index,),
            math.prod(self.shape),
            self.dtype,
            self.device,
            factor=factor,
            round_sum=self.reduction != "mean" or self.form.rounds_mean,
        )

    def _forward(self, ignore_index: int) -> launch.Launch:
        constants = {"FORM": self.form.name, "SIZE": self.size}
        return self._elementwise(divergence_forward, constants, (*self.dtypes, torch.int64, self.dtype), ignore_index)

    def _backward(self, ignore_index: int, factor: float, with_first: bool, with_second: bool) -> launch.Launch:
        of_first, of_second = self.dtypes
        constants = {
            "FORM": self.form.name,
            "SIZE": self.size,
            "REDUCED": self.reduction != "none",
            "WITH_FIRST": with_first,
            "WITH_SECOND": with_second,
        }
        dtypes = (self.dtype, of_first, of_second, torch.int64, of_first, *(of_second,) * 3)
        return self._elementwise(divergence_backward, constants, dtypes, ignore_index, factor)

    def _elementwise(self, kernel, constants, dtypes, *scalars) -> launch.Launch:
        elements = math.prod(self.shape)
        unit = math.gcd(elements, _MOST_UNIT)
        constants = {**constants, "UNIT": unit, "BLOCK": _BLOCK}
        programs = -(-elements // _BLOCK)
        return launch.bind(kernel, constants, _NUM_WARPS, self.device, dtypes, programs, elements // unit, *scalars)


def replacement(
    form: Divergence, first, second, labels, ignore_index: int, reduction: str, count: Optional[int] = None
) -> Optional[torch.Tensor]:
    """The divergence from the kernels; None if eager must compute it."""
    if is_dynamo_compiling():
        return _compiled(form, first, second, labels, reduction)
    needs_grad = is_grad_enabled() and (first.requires_grad or second.requires_grad)
    if not are_ours(first, second, needs_grad) or not (labels is None or are_plain(labels, labels)):
        return proof.record_refusal(form.original, proof.NOT_PLAIN)
    if _autocast_changes(form, first, second):
        return proof.record_refusal(form.original, "autocast, which computes in fp32")
    tensors = (first, second) if labels is None else (first, second, labels)
    gradients = needs_grad and first.requires_grad, needs_grad and second.requires_grad
    call = _calls.find(
        form.original, (form.name, reduction, ignore_index, *gradients), tensors, form, reduction, gradients
    )
    # One tensor for both would get its gradients in another order.
    if call is None or first is second:
        return None
    if needs_grad:
        again = (second,) * (form.paths - 1) if second.requires_grad else ()
        return _apply(call, ignore_index, count, labels, first, second, *again)
    return call(first, second, labels, ignore_index, count)


def _autocast_changes(form, first, second) -> bool:
    """Whether autocast widens 16 bits, for ATen's operator, or in sums."""
    return (first.dtype, second.dtype) != (torch.float32,) * 2 and is_autocast(first.device)


def _resolve(first, second, *labels_and_arguments) -> Optional[_Call]:
    *labels, form, reduction, gradients = labels_and_arguments
    for tensor in (first, second):
        if tensor.dtype not in FLOAT_DTYPES or not runs_kernels(tensor.device):
            raise Outside(f"{tensor.dtype} on {tensor.device}")
    if torch.version.hip is not None:
        raise Outside(CUDA_ONLY)
    if first.shape != second.shape or first.device != second.device:
        raise Outside("tensors of different shapes, or on different devices")
    if first.numel() == 0 or first.numel() > launch.MAX_PROGRAMS * _BLOCK:
        raise Outside("tensors without elements, or of too many")
    if not (first.is_contiguous() and second.is_contiguous()):
        raise Outside("tensors that are not contiguous")
    for each in labels:
        if each.dtype != torch.int64 or each.shape != first.shape[:1] or each.device != first.device:
            raise Outside("labels that are no int64, not one for each row, or on another device")
        if not each.is_contiguous() or first.shape[-1] > _MOST_CLASSES:
            raise Outside("labels that are not contiguous, or of more than 2**30 classes")
    dtypes = first.dtype, second.dtype
    if reduction != "none":
        check_parts(first.numel(), torch.promote_types(*dtypes), first.device)
    call = _Call(form, first.shape, dtypes, first.device, reduction, bool(labels))
    classes = first.shape[-1] if labels else 0
    return call if _proved(form, dtypes, first.device, reduction, first.numel(), classes, gradients) else None


_calls = Calls(_resolve)


class Divergences(torch.autograd.Function):
    """`again` repeats the second tensor: autograd adds its gradients one by one."""

    @staticmethod
    def forward(ctx, call, ignore_index, count, labels, first, second, *again):
        if dispatch_modes():
            out = call.form.eager(first, second, labels, ignore_index, call.reduction, count)
        else:
            out = call(first, second, labels, ignore_index, count)
        ctx.save_for_backward(first, second, labels)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.ignore_index, ctx.count, ctx.again = call, ignore_index, count, len(again)
        ctx.layouts = layouts_if_hooked(first, second, labels)
        return out

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return (None,) * (6 + ctx.again)
        call, (first, second, labels) = ctx.call, ctx.saved_tensors
        wants_first, wants_second = ctx.needs_input_grad[4:6]
        if is_grad_enabled():  # Double backward.

            def eager(first, second):
                return call.form.eager(first, second, labels, ctx.ignore_index, call.reduction, ctx.count)

            return (None,) * 4 + gradients_apart(eager, (first, second), dy) + (None,) * ctx.again
        arguments = first, second, labels, ctx.ignore_index
        if are_plain(dy, first) and _fits(call, dy) and are_as_saved(ctx.layouts, first, second, labels):
            found = call.gradients(dy, *arguments, ctx.count, wants_first, wants_second)
        else:
            found = _formula(call.form, dy, *arguments, call.reduction, ctx.count)
        return (None,) * 4 + found[:1] + (found[1:] if wants_second else (None,))


def _formula(form: Divergence, dy, first, second, labels, ignore_index, reduction: str, count: Optional[int]):
    """Eager's gradients of the first tensor and of the second."""
    if reduction != "none":
        dy = _divided(dy, _divisor(form, first.shape, reduction, count)).expand(first.shape)
    return form.gradients(dy, first, second, labels, ignore_index)


def _fits(call: _Call, dy) -> bool:
    """Whether the kernels read this gradient."""
    return call.reduction != "none" or dy.is_contiguous()


_apply = apply_of(Divergences)


# Proof


def _proved(form, dtypes, device, reduction: str, elements: int, classes: int, gradients) -> bool:
    """Whether the kernels are proved: the sum for all tensors whose blocks have as many threads, and what is elementwise.

    Args:
        classes: of a row that has a label; 0 without labels.
    """
    dtype = torch.promote_types(*dtypes)
    width = order_of(elements, dtype, device).width if reduction != "none" else 0
    of = gradients if True in gradients else None
    unit = math.gcd(elements, _MOST_UNIT)
    return proof.kernel_is_proved(
        ("divergence", form.name, dtypes, device, reduction, width, unit, classes, of),
        proof.Subject(
            form.original,
            device,
            f"{' and '.join(map(str, dtypes))}, {form.name}, {reduction}{', labels' if classes else ''}"
            + (f", sums of {width} threads" if width else "")
            + (", gradient" if of else ""),
        ),
        functools.partial(_comparisons, form, dtypes, device, reduction, width, unit, classes, gradients),
    )


_ELEMENTWISE = 5000


def _operands(form, dtypes, elements: int, source, device) -> list[torch.Tensor]:
    """Random distributions of a few classes each; some numbers are zero, infinite or NaN if the sum is not compared."""
    first, second = (proof.normal(source, elements) * 2.0 - 4.0 for _ in range(2))
    if form is not _KL_LOG_TARGET:
        second = second.exp_()
        second[::7] = 0.0
    if form is _VARIATION:
        first = first.exp_()
    return [each.to(dtype) for each, dtype in zip((first, second), dtypes)]


def _length(least: int, unit: int, classes: int) -> int:
    """A number of elements of whole rows, at least so many, that has this unit."""
    rows = unit // math.gcd(classes, unit)
    return classes * rows * (-(-least // (classes * rows)) | 1)


def _lengths(width: int, classes: int, dtype, device) -> list[int]:
    """`lengths_of_proof` in whole rows, of whole vectors and of others."""
    lengths = lengths_of_proof(width, dtype, device) if width else []
    if not classes:
        return lengths
    of_vectors = math.lcm(classes, 16 // dtype.itemsize)
    lengths = {-(-each // rows) * rows for each in lengths for rows in (classes, of_vectors)}
    lengths |= {each + classes for each in lengths}
    return [each for each in sorted(lengths) if order_of(each, dtype, device).width == width]


def _comparisons(form, dtypes, device, reduction, width, unit, classes, gradients):
    source = proof.generator(device, width)
    lengths = _lengths(width, classes, torch.promote_types(*dtypes), device)
    for elements in lengths:
        for repetition in range(sums_of_proof(elements) if reduction != "none" else 1):
            first, second = _operands(form, dtypes, elements, source, device)
            yield from _compared(form, first, second, reduction, classes, gradients, source, device, repetition)
    # Of the elementwise kernels' unit, and of three rows at least.
    elements = _length(max(width, _ELEMENTWISE, 3 * classes), unit, classes or 1)
    first, second = _operands(form, dtypes, elements, source, device)
    specials = torch.tensor(_SPECIAL, dtype=torch.float32, device=device)
    first[: len(_SPECIAL) ** 2] = specials.repeat(len(_SPECIAL))
    second[: len(_SPECIAL) ** 2] = specials.repeat_interleave(len(_SPECIAL))
    yield from _compared(form, first, second, reduction, classes, gradients, source, device, 0)


_SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 1e-40)


def _compared(form, first, second, reduction, classes, gradients, source, device, repetition):
    """The sum in fp32, where 16 bits would hide its last bits, and once for each length the result and the gradients."""
    if form is _VARIATION:
        first, second = first.view(-1, classes or 1), second.view(-1, classes or 1)
    label = torch.randint(3, first.shape[:1], device=device, generator=source) - 1 if classes else None
    if classes:
        label[0] = 1  # One that counts.
    count = int((label >= 0).sum()) if classes else None
    call = _Call(form, first.shape, (first.dtype, second.dtype), device, reduction, classes > 0)
    total = torch.full((1,), math.nan, dtype=torch.float32, device=device)
    found = call(first, second, label, -1, count, total=total)
    if reduction != "none":
        terms = form.eager(first, second, label, -1, "none", count)
        yield "the sum", total[0], _sum(terms)
    if repetition:
        return
    yield "the divergence", found, form.eager(first, second, label, -1, reduction, count)
    if True in gradients:
        yield from _compared_gradients(call, first, second, label, count, gradients, source, found)


def _sum(terms):
    return terms.sum(dtype=torch.float32)


def _compared_gradients(call, first, second, label, count, gradients, source, found):
    dy = proof.normal(source, found.shape).to(found.dtype)
    leaves = [each.detach().requires_grad_(wanted) for each, wanted in zip((first, second), gradients)]
    with torch.enable_grad():
        expected = call.form.eager(*leaves, label, -1, call.reduction, count)
        expected = list(torch.autograd.grad(expected, [each for each in leaves if each.requires_grad], dy))
    d_first, *d_second = call.gradients(dy, first, second, label, -1, count, *gradients)
    if gradients[0]:
        yield "the first gradient", d_first, expected.pop(0)
    if gradients[1]:
        yield "the second gradient", functools.reduce(torch.add, d_second), expected.pop(0)


# torch.compile


def _find(form, first, second, reduction):
    return _call_of(_DIVERGENCES[form], first, second, reduction, (False, False))


def _call_of(form, first, second, reduction, gradients):
    facts = form.name, reduction, -100, *gradients
    return _calls.find(form.original, facts, (first, second), form, reduction, gradients)


@operators.register("divergence", _find)
def _divergence_op(form: str, first: torch.Tensor, second: torch.Tensor, reduction: str) -> torch.Tensor:
    return _DIVERGENCES[form].eager(first, second, None, -100, reduction, None)


def _find_gradient(form, dy, first, second, reduction):
    call = _call_of(_DIVERGENCES[form], first, second, reduction, (True, False))
    if call is None or not _fits(call, dy):
        return None

    def compute(dy, first, second):
        return call.gradients(dy, first, second, None, -100, None, True, False)[0]

    return compute


def _fake_gradient(form, dy, first, second, reduction):
    return torch.empty_like(first)


@operators.register("divergence_backward", _find_gradient, _fake_gradient)
def _divergence_backward_op(
    form: str, dy: torch.Tensor, first: torch.Tensor, second: torch.Tensor, reduction: str
) -> torch.Tensor:
    """The gradient of the first tensor."""
    return _formula(_DIVERGENCES[form], dy, first, second, None, -100, reduction, None)[0].to(first.dtype)


def _setup_context(ctx, inputs, output):
    ctx.form, first, second, ctx.reduction = inputs
    ctx.save_for_backward(first, second)


def _op_gradient(ctx, dy):
    return None, _divergence_backward_op(ctx.form, dy, *ctx.saved_tensors, ctx.reduction), None, None


torch.library.register_autograd(_divergence_op, _op_gradient, setup_context=_setup_context)


def _compiled(form, first, second, labels, reduction):
    """`replacement` while torch.compile traces: the registered op, or None to trace the original."""
    if labels is not None or (is_grad_enabled() and second.requires_grad):
        return None
    if first.dtype not in FLOAT_DTYPES or second.dtype not in FLOAT_DTYPES or first.shape != second.shape:
        return None
    if _autocast_changes(form, first, second) or not is_traced_plainly(first.device):
        return None
    return _divergence_op(form.name, first, second, reduction)
