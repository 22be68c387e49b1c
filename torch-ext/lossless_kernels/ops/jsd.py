"""The terms of the generalized Jensen-Shannon divergence with eager's bits: one kernel a pass, no tensor beside the terms.

`ops/slices.py` has the public function, and computes by eager's operations what no kernel takes.
"""

import functools
import math
from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from ..core import launch, plans, proof
from ..core import softmax as aten
from ..core.calls import Calls, Outside
from ..core.domain import (
    FLOAT_DTYPES,
    are_as_saved,
    are_ours,
    are_plain,
    gradients_apart,
    is_autocast,
    layouts_if_hooked,
    runs_kernels,
)
from ..core.layout import row_levels
from ..core.torch_internals import apply_of, keeps_graph

if launch.AVAILABLE:
    from ..kernels_src.jsd import jsd_backward, jsd_forward


def divergence(student, teacher, mask, beta: float, temperature: float):
    """The terms of the loss, of the rows in `mask`, in eager's operations."""
    student = functional.log_softmax(student / temperature, -1)
    teacher = functional.log_softmax(teacher / temperature, -1)
    kl_div = functools.partial(functional.kl_div, reduction="none", log_target=True)
    if beta == 0:
        terms = kl_div(student, teacher)
    elif beta == 1:
        terms = kl_div(teacher, student)
    else:
        beta, rest, log_beta, log_rest = _weights(beta, student.dtype, student.device)
        mixture = torch.logsumexp(torch.stack([student + log_rest, teacher + log_beta]), 0)
        terms = beta * kl_div(mixture, teacher) + rest * kl_div(mixture, student)
    return terms if mask is None else terms[mask]


def _weights(beta: float, dtype, device) -> tuple[torch.Tensor, ...]:
    """beta, 1 - beta, and the logarithms of both, each rounded."""
    beta = torch.full((), beta, dtype=dtype, device=device)
    return beta, 1 - beta, torch.log(beta), torch.log1p(-beta)


# Calls


# The fewest classes: ATen gives shorter rows a warp each.
_LEAST_VOCABULARY = 2049
_MAX_VOCABULARY = 1 << 30
_FORWARD_WARPS = 16
# Elements of a thread in what has no order.
_PER_THREAD = 8
# Programs of a backward pass on an SM: as many rows of scratch memory exist.
_PROGRAMS_PER_MULTIPROCESSOR = 2


@dataclass(frozen=True)
class Kind:
    """The properties that the kernels are compiled for.

    Attributes:
        form: "mixture", "teacher" or "student" (`jsd_forward`).
        unit: the number of elements, up to 16 bytes, that one access can read.
        scaled: the temperature is not 1.
        labels: the terms are those of the rows that count.
        wanted: whether student and teacher require gradients.
    """

    form: str
    dtype: torch.dtype
    vocabulary: int
    unit: int
    scaled: bool
    labels: bool
    wanted: tuple[bool, bool]

    def constants(self, order: aten.Softmax, warps: int) -> dict:
        """Eager's tensors are dense and begin at multiples of 16 bytes, whatever the logits' layout."""
        return {
            "FORM": self.form,
            "THREADS": order.threads,
            "VECTOR": order.vector,
            "HEAD": order.kind == aten.LOOP and self.vocabulary % order.vector != 0,
            "BY_VECTORS": order.kind == aten.SHARED,
            "SCALED": self.scaled,
            "UNIT": self.unit,
            "BLOCK": _PER_THREAD * 32 * warps,
        }


class _Call:
    """A call, resolved for the logits' layout, dtype and device, beta, temperature, and which gradients are wanted.

    Args:
        levels: rows of a group, then for student and teacher the strides of groups and of rows, all in units.
        most_programs: of the backward pass, which take rows in turn.
    """

    def __init__(
        self,
        kind: Kind,
        rows: int,
        levels: tuple,
        beta: float,
        temperature: float,
        device: torch.device,
        most_programs: int = launch.MAX_PROGRAMS,
    ):
        self.kind, self.rows, self.device, self.shape = kind, rows, device, (rows, kind.vocabulary)
        self.weights = torch.stack(_weights(beta, kind.dtype, device)).float()
        if device.type == "cuda":  # Calls on other streams read them, too.
            torch.cuda.current_stream(device).synchronize()
        # As ATen divides by a number.
        factor = float(1.0 / torch.tensor(temperature, dtype=torch.float32, device="cpu"))
        self.scalars = kind.vocabulary // kind.unit, *levels, factor
        self.programs = min(rows, plans.gpu(device).multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR, most_programs)
        self.scratch = self.programs, sum(kind.wanted), -(-kind.vocabulary // 16) * 16
        constants = kind.constants(aten.softmax_forward(kind.vocabulary, kind.dtype), _FORWARD_WARPS)
        constants["STATISTICS"] = True in kind.wanted
        dtypes = (kind.dtype, kind.dtype, torch.int64, torch.float32, torch.float32, kind.dtype)
        self.forward = launch.bind(jsd_forward, constants, _FORWARD_WARPS, device, dtypes, rows, *self.scalars)
        self.backward = {dense: self._backward(dense) for dense in (False, True)} if True in kind.wanted else {}

    def _backward(self, dense: bool) -> launch.Launch:
        kind, order = self.kind, aten.softmax_backward(self.kind.vocabulary, self.kind.dtype)
        # As many as ATen has, or the sum in sequence takes all registers.
        warps = max(order.threads // 32, 4)
        constants = kind.constants(order, warps) | {
            "DENSE": dense,
            "LABELS": kind.labels,
            "WITH_STUDENT": kind.wanted[0],
            "WITH_TEACHER": kind.wanted[1],
        }
        of_rows = (torch.int64, torch.float32, torch.float32)
        dtypes = (*(kind.dtype,) * 3, *of_rows, *(kind.dtype,) * 3)
        return launch.bind(jsd_backward, constants, warps, self.device, dtypes, self.programs, self.rows, *self.scalars)

    def __call__(self, student, teacher, place, count: int):
        """The terms, and for the gradients each row's maxima and log sums."""
        terms = torch.empty(count, self.kind.vocabulary, dtype=self.kind.dtype, device=self.device)
        rows = self.rows if True in self.kind.wanted else 1
        statistics = torch.empty(rows, 4, dtype=torch.float32, device=self.device)
        self.forward.call_6(student, teacher, place, self.weights, statistics, terms)
        return terms, statistics

    def gradients(self, dy, student, teacher, place, statistics, d_student, d_teacher) -> None:
        """Writes the gradients that are wanted to dense tensors, which may be the logits."""
        dense = any(stride for stride, size in zip(dy.stride(), dy.shape) if size > 1)
        if dense or not dy.numel():
            dy = dy.contiguous() if dy.numel() else dy.new_zeros(1)
        scratch = torch.empty(self.scratch, dtype=self.kind.dtype, device=self.device)
        arguments = dy, student, teacher, place, self.weights, statistics, scratch, d_student, d_teacher
        self.backward[dense](*arguments)


def replacement(
    original: Callable, student, teacher, mask, beta: float, temperature: float, owned: bool
) -> Optional[torch.Tensor]:
    """The terms of the rows in `mask` from the kernel, [rows, vocabulary]; None if eager must compute them.

    Args:
        original: the function that reports name.
        owned: no other code holds the logits: gradients overwrite them.
    """
    if is_dynamo_compiling():
        return None
    wanted = tuple(is_grad_enabled() and each.requires_grad for each in (student, teacher))
    if not are_ours(student, teacher, True in wanted) or not (mask is None or are_plain(mask, mask)):
        return proof.record_refusal(original, proof.NOT_PLAIN)
    if True in wanted and (student.is_inference() or teacher.is_inference()):
        return proof.record_refusal(original, proof.INFERENCE_TENSORS)
    if student.dtype != torch.float32 and is_autocast(student.device):
        return proof.record_refusal(original, "autocast, which computes in fp32")
    numbers = int, float
    if not isinstance(beta, numbers) or not isinstance(temperature, numbers):
        return proof.record_refusal(original, "beta or a temperature that is no number")
    tensors = (student, teacher) if mask is None else (student, teacher, mask)
    arguments = original, beta, temperature, wanted
    call = _calls.find(original, (beta, temperature, *wanted), tensors, *arguments)
    if call is None:
        return None
    if mask is None:
        count, place = call.rows, torch.arange(call.rows, device=student.device)
    else:
        flat = mask.reshape(-1)
        count, place = int(flat.sum()), torch.where(flat, flat.cumsum(0) - 1, -1)
    if True in wanted:
        compute = functools.partial(divergence, mask=mask, beta=beta, temperature=temperature)
        return _apply(call, compute, owned, place, count, student, teacher)
    return call(student, teacher, place, count)[0]


def _resolve(student, teacher, *mask_and_arguments) -> Optional[_Call]:
    *mask, original, beta, temperature, wanted = mask_and_arguments
    dtype, device, shape = student.dtype, student.device, student.shape
    if dtype not in FLOAT_DTYPES or teacher.dtype != dtype or not runs_kernels(device):
        raise Outside(f"logits {dtype} and {teacher.dtype} on {device}")
    if torch.version.hip is not None:
        raise Outside(aten.CUDA_ONLY)
    if teacher.shape != shape or teacher.device != device or student.dim() < 2:
        raise Outside("logits of different shapes, of one dimension or on different devices")
    if any(each.shape != shape[:-1] or each.device != device for each in mask):
        raise Outside("labels that are not one for each row, or on another device")
    vocabulary, rows = shape[-1], math.prod(shape[:-1])
    if not rows or rows > launch.MAX_PROGRAMS or not _LEAST_VOCABULARY <= vocabulary <= _MAX_VOCABULARY:
        raise Outside(f"no rows, or less than {_LEAST_VOCABULARY} classes or too many")
    if not 0 <= beta <= 1 or not 0 < temperature < math.inf:
        raise Outside("beta or a temperature out of range")
    if student.stride(-1) != 1 or teacher.stride(-1) != 1:
        raise Outside("logits whose last dimension is not contiguous")
    order = [dim for dim, size in enumerate(shape[:-1]) if size != 1]
    found = row_levels(shape, order, student.stride(), teacher.stride())
    if found is None or found[2] != 1:
        raise Outside("logits whose rows are not equally spaced, nor in groups")
    _, inner, _, (of_student, of_teacher) = found
    strides = of_student[0], of_student[2], of_teacher[0], of_teacher[2]
    unit = math.gcd(vocabulary, *strides, 16 // dtype.itemsize)
    form = {0: "teacher", 1: "student"}.get(beta, "mixture")
    kind = Kind(form, dtype, vocabulary, unit, temperature != 1, bool(mask), wanted)
    # What a call keeps is no part of a CUDA graph.
    if not _proved(original, kind, device) or proof.is_capturing():
        return None
    return _Call(kind, rows, (inner, *(stride // unit for stride in strides)), beta, temperature, device)


_calls = Calls(_resolve)


class JSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, compute, owned, place, count, student, teacher):
        terms, statistics = call(student, teacher, place, count)
        kept = student, teacher, place, statistics
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.compute, ctx.owned, ctx.layouts = call, compute, owned, layouts_if_hooked(*kept)
        return terms

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 7
        kept = *logits, place, statistics = ctx.saved_tensors
        call, wanted = ctx.call, ctx.needs_input_grad[5:]
        # Double backward, a dispatch mode, or a saved-tensor hook that returned something else.
        plain = all(are_plain(dy, each) for each in kept)
        if is_grad_enabled() or not plain or not are_as_saved(ctx.layouts, *kept):
            return (None,) * 5 + _formula(ctx.compute, logits, wanted, dy)
        # Another backward pass would read the logits again.
        overwrites = ctx.owned and not keeps_graph()
        found = [
            each.detach()
            if not need or (overwrites and each.is_contiguous())
            else torch.empty_like(each, memory_format=torch.contiguous_format)
            for each, need in zip(logits, wanted)
        ]
        call.gradients(dy, *(each.detach() for each in logits), place, statistics, *found)
        return (None,) * 5 + tuple(each if need else None for each, need in zip(found, wanted))


def _formula(compute, logits, wanted, dy) -> tuple:
    """The wanted gradients by eager's operations, of all rows at once."""
    places = [place for place, need in enumerate(wanted) if need]

    def of_wanted(*leaves):
        given = list(logits)
        for place, leaf in zip(places, leaves):
            given[place] = leaf
        return compute(*given).reshape(dy.shape)

    found = dict(zip(places, gradients_apart(of_wanted, [logits[place] for place in places], dy)))
    return tuple(found.get(place) for place in range(2))


_apply = apply_of(JSD)


# Proof


def _proved(original, kind: Kind, device) -> bool:
    gradients = " and ".join(name for name, need in zip(("student", "teacher"), kind.wanted) if need)
    return proof.kernel_is_proved(
        ("jsd", kind, device),
        proof.Subject(
            original,
            device,
            f"{kind.dtype}, {kind.vocabulary} classes, form {kind.form}"
            + (", labels" if kind.labels else "")
            + (f", gradients of {gradients}" if gradients else ""),
        ),
        functools.partial(_comparisons, kind, device),
    )


# Elements of a group of rows, of which there are five. It has from 16 to 256 rows, a multiple of 8: vectors begin at every
# place. A thread of short rows has few elements, which show the order inside it in one row of four or less.
_GROUP = 1 << 20
# Terms of a peaked row beside its peak, and the range of their logarithms: they add up to less than 2**-15.
_FEW, _LEAST, _MOST = 64, -17.5, -14.0
_FAR = -100.0
_GRADIENT = 300.0


def proof_logits(kind: Kind, temperature: float, source: torch.Generator, device):
    """Logits [rows, vocabulary] of student and teacher whose terms and gradients show the order of additions.

    A peaked row is one large term and a few near 2**-22: its sum is from 1 to 1 + 2**-15, and the log-probability of the
    peak is minus the few bits by which another order differs, in 16 bits too. So is the gradient at the peak, which
    cancels but for them. In every other row the few terms are in the peak's thread of the forward kernel, or of the
    backward kernel: of a thousand threads one sum would hide the order inside a thread. The other tensor's row is one
    peak at the same place, or random; the last groups are random, and special values.
    """
    vocabulary = kind.vocabulary
    rows = min(max(_GROUP // vocabulary // 8 * 8, 16), 256)
    forward = aten.softmax_forward(vocabulary, kind.dtype)
    backward = aten.softmax_backward(vocabulary, kind.dtype)

    def far():
        return torch.full((rows, vocabulary), _FAR, dtype=torch.float32, device=device)

    def peaked():
        x = far()
        peak = torch.randint(vocabulary, (rows, 1), device=device, generator=source)
        few = proof.uniform(source, rows, vocabulary) * (_MOST - _LEAST) + _LEAST
        chosen = proof.uniform(source, rows, vocabulary) < _FEW / vocabulary
        for first, order in ((1, forward), (3, backward)):
            lane = aten.lanes(order, rows, vocabulary, 0, device)
            chosen[first::4] = (lane == lane.gather(1, peak))[first::4]
        return torch.where(chosen, few, x).scatter_(1, peak, 0.0), peak

    def only(peak):
        return far().scatter_(1, peak, 0.0)

    def drawn():
        return proof.normal(source, rows, vocabulary) * 3.0

    (a, at_a), (b, at_b) = peaked(), peaked()
    groups = [(a, only(at_a)), (only(at_b), b), (peaked()[0], drawn()), (drawn(), peaked()[0]), (drawn(), drawn())]
    student, teacher = (torch.cat(each) for each in zip(*groups))
    special = (math.inf, -math.inf, math.nan, -0.0, 3e38)
    for row, value in enumerate(special):
        student[-1 - row, row], teacher[-6 - row, row] = value, value
    student[-11], teacher[-12], student[-13], teacher[-13] = -math.inf, -math.inf, 0.0, -0.0
    return student * temperature, teacher * temperature


def _placed(values, kind: Kind):
    """The values at places that the kind's accesses are for: no access can read more than a unit."""
    rows, vocabulary = values.shape
    gap = kind.unit if math.gcd(vocabulary, 16 // kind.dtype.itemsize) != kind.unit else 0
    there = torch.zeros(rows, vocabulary + gap, dtype=kind.dtype, device=values.device)
    return there[:, :vocabulary].copy_(values)


def _comparisons(kind: Kind, device):
    """Terms and gradients, the terms' gradients one number and one for each."""
    source = proof.generator(device, kind.vocabulary)
    temperature = 0.9 if kind.scaled else 1.0
    for beta in {"teacher": (0.0,), "student": (1.0,)}.get(kind.form, (0.5, 0.3)):
        student, teacher = (_placed(each, kind) for each in proof_logits(kind, temperature, source, device))
        rows, stride = len(student), student.stride(0) // kind.unit
        # Programs take several rows, as those of large calls do, one after the other in the same scratch memory.
        call = _Call(kind, rows, (1, stride, 0, stride, 0), beta, temperature, device, most_programs=max(rows // 3, 1))
        mask = proof.uniform(source, rows) < 0.9 if kind.labels else None
        place, count = torch.arange(rows, device=device), rows
        if kind.labels:
            place, count = torch.where(mask, mask.cumsum(0) - 1, -1), int(mask.sum())
        terms, statistics = call(student, teacher, place, count)
        logits = [each.detach().requires_grad_(need) for each, need in zip((student, teacher), kind.wanted)]
        with torch.enable_grad():
            expected = divergence(*logits, mask, beta, temperature)
        yield "the terms", terms, expected.detach()
        if True not in kind.wanted:
            continue
        dense = (proof.uniform(source, terms.shape) + 1.0) * _GRADIENT
        for dy in (
            dense.to(kind.dtype),
            torch.full((), _GRADIENT, dtype=kind.dtype, device=device).expand(terms.shape),
        ):
            found = [torch.empty(rows, kind.vocabulary, dtype=kind.dtype, device=device) for _ in range(2)]
            call.gradients(dy, student, teacher, place, statistics, *found)
            gradients = torch.autograd.grad(expected, [each for each in logits if each.requires_grad], dy, True)
            wanted = [each for each, need in zip(zip(("student", "teacher"), found), kind.wanted) if need]
            for (name, gradient), theirs in zip(wanted, gradients):
                yield f"the {name}'s gradient", gradient, theirs
