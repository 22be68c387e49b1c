"""Proofs of a norm: which formula its forward computes, and whether the kernels return its bits, gradients included."""

import functools
import math
from collections.abc import Iterator
from typing import Optional

import torch

from ...core import proof
from ...core.inspection import functions_of
from ...core.layout import stride_unit, stride_with_gap
from ...core.reduction import ROW_CLASSES, row_class
from . import backward as rms_norm_backward
from . import fused_backward
from .formulas import (
    EAGER,
    EPS_NAMES,
    FUSED,
    FUSED_UNWEIGHTED,
    MAX_HIDDEN_SIZE,
    UNWEIGHTED,
    WEIGHTED,
    RMSNormFormula,
)
from .plan import forward, plan_of

_EPS_NAMES = frozenset(EPS_NAMES.values())
PROOF_EPS = 0.0123


def calls_torch(owner: type) -> bool:
    """Whether the class's forward calls `F.rms_norm`."""
    called = (function.__code__.co_names for function in functions_of(owner) or ())
    return owner in (EAGER[FUSED], EAGER[FUSED_UNWEIGHTED]) or any("rms_norm" in names for names in called)


def stand_in(owner, weight, eps, hidden_size=None, eps_name=None):
    """A layer of this class with another weight, made without its constructor.

    Args:
        eps_name: the attribute that holds eps; the other one then holds another value.
    """
    layer = torch.nn.Module.__new__(owner)
    torch.nn.Module.__init__(layer)
    layer.weight = weight
    for name in _EPS_NAMES:
        setattr(layer, name, eps if eps_name in (None, name) else 3.0 * eps)
    layer.normalized_shape = (hidden_size,) if weight is None else tuple(weight.shape)
    return layer


def variant_of(owner, eps_name, dtype, weight_dtype, device) -> Optional[RMSNormFormula]:
    """The variant whose formula, in torch operations, returns the bits of `owner.forward` and of its gradients.

    Args:
        eps_name: the attribute from which this package's layer reads eps.
    """
    names = {name for function in functions_of(owner) for name in function.__code__.co_names}
    if names & _EPS_NAMES and eps_name not in names:
        return proof.record_refusal(owner.forward, f"the forward does not read eps from {eps_name}")
    case = dtype, weight_dtype, device
    key = ("formula of rms_norm", functions_of(owner), eps_name, *case)
    subject = proof.Subject(owner.forward, device, f"activations {dtype}, weight {weight_dtype}")
    if weight_dtype in (None, dtype) and calls_torch(owner):
        variants = (FUSED_UNWEIGHTED if weight_dtype is None else FUSED,)
    else:
        variants = WEIGHTED if weight_dtype is not None else (UNWEIGHTED,)
    candidates = {variant: functools.partial(_formulas, owner, eps_name, variant, *case) for variant in variants}
    weights = [] if weight_dtype is None else [((MAX_HIDDEN_SIZE,), weight_dtype)]
    compute = functools.partial(_output_of, owner, eps_name)
    refuse = functools.partial(proof.refuse_parts, compute, [(MAX_HIDDEN_SIZE, dtype)], weights)
    return proof.match_formula(key, subject, candidates, refuse=refuse)


def _output_of(owner, eps_name, x, weight=None, eps=PROOF_EPS) -> torch.Tensor:
    return owner.forward(stand_in(owner, weight, eps, x.shape[-1], eps_name), x)


def _formulas(owner, eps_name, variant, dtype, weight_dtype, device):
    # `F.rms_norm` has no intermediate rounding that shows its kernel, so it gets more rows. It takes another kernel for
    # unequal dtypes, so there is no fp32 case, and its output is contiguous.
    calls, rows = calls_torch(owner), 2048 if variant.fused else 512
    for dtypes, eps, (x,), weight, dy, other in formula_cases(device, 1, (dtype, weight_dtype), 1, rows, not calls):
        results = []
        for layer_class, name in ((owner, eps_name), (EAGER[variant], None)):
            leaf, scale = leaves((x.contiguous() if calls else x, weight), (dtypes[0], dtypes[1] or dtype))
            with torch.enable_grad():
                hidden_states = leaf.view_as(leaf)
                out = _output_of(layer_class, name, hidden_states, scale if weight_dtype else None, eps)
                inputs = (leaf, scale) if weight_dtype else (leaf,)
                results.append(output_and_gradients(out, hidden_states, inputs, dy, other))
        for what, expected, found in zip(("the output", "the input's gradient", "the weight's gradient"), *results):
            yield what, found, expected


# Smaller than the mean of squares of small numbers.
_SMALL_EPS = 1e-7


def formula_cases(device, seed, dtypes, inputs, rows, in_fp32=True) -> Iterator[tuple]:
    """The data that formulas of norms are compared on: `(dtypes, eps, inputs, weight, dy, other)`, tensors in fp32.

    Numbers of one size; numbers of all sizes, with another gradient of the first input; with `in_fp32` numbers of one
    size in fp32. There a division by the square root, for one, differs from the product with its reciprocal. In 16 bits
    that shows, as another reduction order does, in one element of about 100,000.

    Args:
        dtypes: of the inputs, then of the weight (None without one).
        inputs: their number.
        rows: the number of rows of 1024 elements if the first input has 16 bits.
    """
    generator = proof.generator(device, seed)
    make = functools.partial(proof.normal, generator)

    def of_one_size(*shape):
        return [make(shape) for _ in range(inputs)], make(shape[-1]), make(shape), None

    yield dtypes, PROOF_EPS, *of_one_size(*((64, 128) if dtypes[0] == torch.float32 else (rows, 1024)))
    sized = [_of_all_sizes(make) for _ in range(inputs)]
    weight = make(128) * torch.logspace(-2, 2, 128, dtype=torch.float32, device=device)
    yield dtypes, _SMALL_EPS, sized, weight, make(sized[0].shape), make(sized[0].shape)
    fp32 = tuple(dtype and torch.float32 for dtype in dtypes)
    if in_fp32 and fp32 != dtypes:
        yield fp32, PROOF_EPS, *of_one_size(64, 128)


def _of_all_sizes(make) -> torch.Tensor:
    """Rows of numbers from 1e-8 to 1e8, of zeros, and with infinities and NaN, which show a clamp.

    `[2, 6, 8, 128]`, with rows not in memory order, which shows a forward that assumes other dimensions or copies them.
    """
    x = make(2, 8, 6, 128)
    rows = x.view(-1, 128)
    rows *= torch.logspace(-8, 8, len(rows), dtype=torch.float32, device=x.device)[:, None]
    rows[0] = 0.0
    rows[1:4, 5] = torch.tensor((math.inf, -math.inf, math.nan), dtype=torch.float32, device=x.device)
    return x.transpose(1, 2)


def leaves(tensors, dtypes) -> list[torch.Tensor]:
    """Copies that need gradients. A forward may write to its inputs, so tensors of the right dtype are copied too."""
    return [tensor.to(dtype, copy=True).requires_grad_() for tensor, dtype in zip(tensors, dtypes)]


def output_and_gradients(out, hidden_states, inputs, dy, other=None) -> tuple[torch.Tensor, ...]:
    """The output and the inputs' gradients; `other`, another gradient of hidden_states, shows the order of arrival."""
    outputs, gradients = ((out,), (dy,)) if other is None else ((out, hidden_states), (dy, other))
    gradients = [gradient.to(output.dtype) for gradient, output in zip(gradients, outputs)]
    return out.detach(), *torch.autograd.grad(outputs, inputs, gradients)


def _kernel_is_proved(case, rows, device, kind, what, comparisons, *arguments) -> bool:
    """The order proof of a kernel.

    Args:
        case: variant, class, dtypes of activations and weight, hidden size.
        rows: the row class.
        kind: what else the kernel depends on.
        what: the same in words.
        comparisons: called with the case and `arguments`.
    """
    variant, owner, dtype, weight_dtype, hidden_size = case
    more = " or more" if rows == ROW_CLASSES[-1] else ""
    where = f"activations {dtype}, weight {weight_dtype}, hidden size {hidden_size}, {rows}{more} rows{what}"
    key = (functions_of(owner), variant, dtype, weight_dtype, hidden_size, rows, device, kind)
    subject = proof.Subject(owner.forward, device, where, variant.formula)
    return proof.kernel_is_proved(key, subject, functools.partial(comparisons, *case, *arguments))


def proved(variant, owner, dtype, weight_dtype, hidden_size, rows, row_stride, device, added=False) -> bool:
    """Whether the forward kernel for this row class is proved to return the bits of `owner.forward`.

    Args:
        added: the kernel is the fused add + RMSNorm, which returns those of the add too.
    """
    plan = plan_of(variant, dtype, hidden_size, rows, device, added)
    rows = row_class(rows)
    unit = stride_unit(row_stride, dtype)
    has_gap = stride_unit(hidden_size, dtype) != unit
    row_stride = stride_with_gap(hidden_size, unit, dtype) if has_gap else hidden_size
    case, kind = (variant, owner, dtype, weight_dtype, hidden_size), ("rms_norm", added, unit, plan)
    what = ", after a residual add" if added else ""
    return _kernel_is_proved(case, rows, device, kind, what, _comparisons, rows, row_stride, device, plan, added)


def gradients_proved(variant, owner, dtype, weight_dtype, hidden_size, rows, device, needs, added=False) -> bool:
    """Whether the backward kernels for this row class are proved to return autograd's bits through `owner.forward`.

    For `F.rms_norm` they are ATen's own operator, called with our rstd. The kernels in its place have a proof of their own
    (`fused_backward.kernels`).

    Args:
        added: they follow a residual add, with a gradient of the sum and without.
    """
    case = variant, owner, dtype, weight_dtype, hidden_size
    if variant.fused:
        kind, comparisons = ("gradients", needs), _fused_gradient_comparisons
        return _kernel_is_proved(case, ROW_CLASSES[-1], device, kind, ", in training", comparisons, device, needs)
    dx_modes = [rms_norm_backward.dx_mode_of(variant, dtype), *["accumulate"] * (added and needs[0])]
    return all(_gradients_proved(case, rows, device, needs, dx_mode) for dx_mode in dx_modes)


def _gradients_proved(case, rows, device, needs, dx_mode) -> bool:
    _, _, dtype, _, hidden_size = case
    least, plan = rms_norm_backward.proof_class(rows, hidden_size, device, all(needs), dtype.itemsize, dx_mode)
    kind = "gradients", least, plan, needs, dx_mode
    what = ", in training, added to the residual's gradient" if dx_mode == "accumulate" else ", in training"
    arguments = least, rows, device, needs, dx_mode
    return _kernel_is_proved(case, row_class(rows), device, kind, what, _gradient_comparisons, *arguments)


def _fused_gradient_comparisons(variant, owner, dtype, weight_dtype, hidden_size, device, needs):
    generator = proof.generator(device, seed=hidden_size)
    make = functools.partial(proof.normal, generator)
    x = make(PROOF_ROWS, hidden_size).to(dtype).requires_grad_()
    weight = random_weight(variant, make, hidden_size, weight_dtype).requires_grad_()
    dy = make(PROOF_ROWS, hidden_size).to(dtype)
    with torch.enable_grad():
        out = original_output(variant, owner, weight, PROOF_EPS, x)
        expected = torch.autograd.grad(out, (x, weight), dy, allow_unused=True)
    x, weight = x.detach(), weight.detach()
    shape = (hidden_size, PROOF_ROWS, hidden_size)
    launch = forward(variant, dtype, weight_dtype, *shape, device, PROOF_EPS, store_rstd=True)
    rstd = torch.full((PROOF_ROWS, 1), math.nan, dtype=torch.float32, device=device)
    launch(x, weight, torch.empty_like(x), rstd)
    dx, _, dweight = fused_backward.of_aten(variant, dy, x, weight, rstd, *needs)
    if needs[0]:
        yield "the input's gradient", dx, expected[0]
    if needs[1]:
        yield "the weight's gradient", dweight, expected[1]


# Rows that a proof compares: a wrong reduction order shows in the rstd of two of five rows or more (`spike`). A smaller
# row class has another order and fewer rows, so its proof makes several calls: 32 single rows miss it once in 10**7.
PROOF_ROWS = 128
_PROOF_CALLS = 32
# Gradients take several times as long, and the forward proof covers the reduction order within their rows.
_GRADIENT_CALLS = 16


def proof_calls(rows: int) -> tuple[int, int]:
    """The number of calls of a forward proof for a row class, and the rows of each."""
    return (1, PROOF_ROWS) if rows == ROW_CLASSES[-1] else (min(PROOF_ROWS // rows, _PROOF_CALLS), rows)


def spike(x: torch.Tensor, call: int) -> torch.Tensor:
    """x `[rows, hidden_size]` with a large element in each row; its column differs by row and call. rows <= hidden_size.

    Its square outweighs the row's other squares. All additions to it round at the size of the sum, where another
    reduction order shows three times as often as with numbers of one size.
    """
    rows, hidden_size = x.shape
    first = 37 * call % max(hidden_size - rows, 1)
    x[:, first:].diagonal().fill_(4.0 * math.sqrt(hidden_size))
    return x


def subnormal_row(x: torch.Tensor) -> torch.Tensor:
    """x `[rows, hidden_size]` with a last row of subnormal numbers: an instruction that flushes them would return zeros.

    Some GPUs have instructions of their own for 16-bit numbers, such as the sums of fp32 and bf16 of Blackwell.
    """
    x[-1] *= torch.finfo(x.dtype).tiny / 8
    return x


def _comparisons(variant, owner, dtype, weight_dtype, hidden_size, rows, row_stride, device, plan=None, added=False):
    generator = proof.generator(device, seed=hidden_size)
    make = functools.partial(proof.normal, generator)
    calls, rows = proof_calls(rows)
    eps = PROOF_EPS
    where = (hidden_size, rows, row_stride, device)
    launch = forward(variant, dtype, weight_dtype, *where, eps, True, plan, added)
    for call in range(calls):
        x = spike(make(rows, row_stride).to(dtype)[:, :hidden_size], call)
        residual = make(rows, hidden_size).to(dtype) if added else None
        if call == calls - 1:
            subnormal_row(x)
            if added:
                subnormal_row(residual)
        weight = random_weight(variant, make, hidden_size, weight_dtype)
        normalized = residual + x if added else x
        expected = original_output(variant, owner, weight, eps, normalized)
        out = torch.full_like(expected, math.nan)
        rstd = torch.full((rows, 1), math.nan, dtype=torch.float32, device=device)
        if added:
            total = torch.full_like(x, math.nan)
            launch(x, residual, weight, out, total, rstd)
            yield "the sum", total, normalized
        else:
            launch(x, weight, out, rstd)
        yield "the fp32 rstd", rstd, variant.rstd(normalized, weight, eps)
        yield "the output", out, expected


def _gradient_comparisons(variant, owner, dtype, weight_dtype, hidden_size, rows, like_rows, device, needs, dx_mode):
    few = min(rows, rms_norm_backward.rows_of_same_kernel(rows, PROOF_ROWS, hidden_size, device))
    generator = proof.generator(device, seed=hidden_size)
    make = functools.partial(proof.normal, generator)
    arguments = (variant, make, dtype, weight_dtype, hidden_size)
    calls = min(-(-PROOF_ROWS // few), _GRADIENT_CALLS)
    for call in range(calls):
        yield from _comparisons_with_autograd(
            call, call == calls - 1, owner, *arguments, few, like_rows, needs, dx_mode
        )
    if few < rows and needs[1]:
        yield from _comparisons_of_many_rows(*arguments, rows, like_rows, needs, dx_mode)


def _comparisons_with_autograd(
    call, is_last, owner, variant, make, dtype, weight_dtype, hidden_size, rows, like_rows, needs, dx_mode
):
    leaf = spike(make(rows, hidden_size).to(dtype), call)
    if is_last:
        subnormal_row(leaf)
    leaf.requires_grad_()
    weight = random_weight(variant, make, hidden_size, weight_dtype).requires_grad_()
    dy = make(rows, hidden_size).to(variant.output_dtype(dtype, weight_dtype))
    d_sum = make(rows, hidden_size).to(dtype) if dx_mode == "accumulate" else None
    with torch.enable_grad():
        x = leaf.view_as(leaf)
        expected = original_output(variant, owner, weight, PROOF_EPS, x)
        outputs, gradients = ((expected,), (dy,)) if d_sum is None else ((expected, x), (dy, d_sum))
        dx, dweight = torch.autograd.grad(outputs, (leaf, weight), gradients, allow_unused=True)
    x, weight = leaf.detach(), weight.detach()
    rstd, ours, d_rstd, dweight_sum = _our_gradients(variant, dy, x, weight, needs, like_rows, dx_mode, d_sum)
    needs_dx, needs_dweight = needs
    if needs_dx:
        d_normalized = variant.grad_of_normalized(variant.grad_of_product(dy), weight, dtype)
        yield "the fp32 gradient of rstd", d_rstd, (d_normalized * x.to(torch.float32)).sum(-1, keepdim=True)
        yield "the input's gradient", ours.dx if ours.dx_mean is None else ours.dx + ours.dx_mean, dx
    if needs_dweight:
        product = rms_norm_backward.weight_products(variant, dy, x.to(torch.float32), rstd, dtype)
        yield "the fp32 weight gradient", dweight_sum, product.sum(0, dtype=torch.float32)
        yield "the weight's gradient", ours.dweight, dweight


def _comparisons_of_many_rows(variant, make, dtype, weight_dtype, hidden_size, rows, like_rows, needs, dx_mode):
    """Compares the order in which several blocks share the rows. dy is x, to keep few tensors of this size."""
    x = make(rows, hidden_size, dtype=dtype)
    weight = random_weight(variant, make, hidden_size, weight_dtype)
    dy = x.to(variant.output_dtype(dtype, weight_dtype))
    d_sum = x if dx_mode == "accumulate" else None
    rstd, ours, _, dweight_sum = _our_gradients(variant, dy, x, weight, needs, like_rows, dx_mode, d_sum)
    dweight = ours.dweight
    del ours
    product = torch.empty_like(x, dtype=dy.dtype if variant.scale == "after_cast" else torch.float32)
    for first in range(0, rows, PROOF_ROWS):
        at = slice(first, first + PROOF_ROWS)
        product[at] = rms_norm_backward.weight_products(variant, dy[at], x[at].to(torch.float32), rstd[at], dtype)
    # ATen's sum allocates twice the memory of an fp32 product.
    del x, dy, rstd, d_sum
    yield "the fp32 weight gradient", dweight_sum, product.sum(0, dtype=torch.float32)
    yield "the weight's gradient", dweight, product.sum(0).to(weight_dtype)


def _our_gradients(variant, dy, x, weight, needs, like_rows, dx_mode, d_sum):
    """rstd, the gradients, and their fp32 statistics."""
    # The formula computes rstd, since the forward kernel has its own proof; few rows at a time limit the memory.
    rstd = torch.cat([variant.rstd(few, weight, PROOF_EPS) for few in x.split(PROOF_ROWS)])
    # Separate allocations are aligned as in a real call; other pointers would take another compiled kernel.
    d_rstd = torch.full_like(rstd, math.nan)
    dweight_sum = torch.full((x.shape[-1],), math.nan, dtype=torch.float32, device=x.device)
    backward = rms_norm_backward.resolve(variant, dy, x, weight, rstd, *needs, dx_mode, like_rows, statistics=True)
    return rstd, backward(dy, x, weight, rstd, d_sum, d_rstd, dweight_sum), d_rstd, dweight_sum


def random_weight(variant, make, hidden_size, dtype):
    return make(0 if variant.scale == "none" else hidden_size).to(dtype)


def original_output(variant, owner, weight, eps, x):
    return owner.forward(stand_in(owner, None if variant.scale == "none" else weight, eps, x.shape[-1]), x)
