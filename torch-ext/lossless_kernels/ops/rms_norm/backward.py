"""The gradients of RMSNorm with the bits of eager autograd through transformers' layers."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Callable, NamedTuple, Optional

import torch

from ...core import launch, plans, proof
from ...core.calls import Calls, Failed, Outside
from ...core.domain import allocator, are_dense, are_plain, gradients_apart
from ...core.layout import contiguous_strides, row_levels, rows_in_memory, stand_ins
from ...core.reduction import ColumnReduction, RowReduction, column_reduction, row_class, row_reduction, split_rows
from ...core.torch_internals import dispatch_modes, forward_ad
from .formulas import EAGER, Variant, eager_rstd

if launch.AVAILABLE:
    from ...kernels_src.rms_norm_backward import (
        rms_norm_backward,
        rms_norm_backward_streamed,
        rms_norm_sum_blocks,
        rms_norm_sum_chains,
    )


class Gradients(NamedTuple):
    """What flows back. Eager's fp32 activations receive two gradients, one after the other: `dx` and then `dx_mean`."""

    dx: Optional[torch.Tensor]
    dx_mean: Optional[torch.Tensor]
    dweight: Optional[torch.Tensor]


def formula(
    variant: Variant,
    dy,
    hidden_states,
    weight,
    rstd,
    needs_dx: bool,
    needs_dweight: bool,
    dweight_dtype: Optional[torch.dtype] = None,
) -> Gradients:
    """The gradients in torch operations, one rounding each, as autograd computes them; differentiable in turn.

    Args:
        dy: the gradient of the output, `[..., hidden_size]`.
        rstd: fp32, `[..., 1]`.
        dweight_dtype: that of the weight in the forward pass, if it may have another one now.
    """
    h = hidden_states.to(torch.float32)
    dx = dx_mean = dweight = None
    dy = variant.incoming(dy)
    if needs_dx:
        d_normalized = dy if variant.scale == "none" else dy * variant.factor(weight)
        if variant.scale == "after_cast":
            d_normalized = d_normalized.to(hidden_states.dtype).to(torch.float32)
        d_variance = (-0.5 * (d_normalized * h).sum(-1, keepdim=True)) * rstd.pow(3)
        dx = d_normalized * rstd
        dx_mean = d_variance / h.shape[-1] * (2 * h)
        if hidden_states.dtype != torch.float32:
            dx, dx_mean = (dx + dx_mean).to(hidden_states.dtype), None
    if needs_dweight:
        products = weight_products(variant, dy, h, rstd, hidden_states.dtype)
        dweight = products.sum_to_size(weight.shape).to(dweight_dtype or weight.dtype)
    return Gradients(dx, dx_mean, dweight)


def weight_products(variant: Variant, dy, h, rstd, dtype: torch.dtype) -> torch.Tensor:
    """What eager sums over the rows for the gradient of the weight.

    Args:
        h: hidden_states in fp32.
        dtype: that of hidden_states.
    """
    normalized = h * rstd
    return variant.incoming(dy) * (normalized.to(dtype) if variant.scale == "after_cast" else normalized)


def fused_gradients(
    variant: Variant, dy, hidden_states, weight, rstd, needs_dx: bool, needs_dweight: bool
) -> Gradients:
    """The gradients of `F.rms_norm` from ATen's operator, on CUDA.

    Args:
        rstd: fp32, `[..., 1]`, contiguous, of the bits that ATen's forward pass would have saved.
    """
    weight = None if variant.scale == "none" else weight
    shape, mask = hidden_states.shape[-1:], [needs_dx, needs_dweight]
    dx, dweight = torch.ops.aten._fused_rms_norm_backward(dy, hidden_states, shape, rstd, weight, mask)
    return Gradients(dx, None, dweight)


def fused_formula(variant: Variant, dy, hidden_states, weight, eps, needs_dx: bool, needs_dweight: bool) -> Gradients:
    """The same from autograd, which has other formulas for gradients that are differentiated in turn."""

    def out(*needed):
        given = iter(needed)
        x = next(given) if needs_dx else hidden_states
        return variant.eager(x, next(given) if needs_dweight else weight, eps)

    needed = [tensor for tensor, need in ((hidden_states, needs_dx), (weight, needs_dweight)) if need]
    gradients = iter(gradients_apart(out, needed, dy))
    return Gradients(next(gradients) if needs_dx else None, None, next(gradients) if needs_dweight else None)


# The launch plan


@dataclass(frozen=True)
class Plan:
    """How the backward kernels are launched.

    Fused, one kernel walks the rows of a block of ATen's reduction over rows and computes dx on the way, with rows of up to
    `stages` - 1 of its turns on their way. Registers hold a row from its sum to its dx, unless it is `streamed` twice.
    Otherwise dx has a program for every `rows_per_program` rows, and a kernel of its own sums the chains, `chain_columns`
    columns a program and `chain_stages` steps of its loop under way. The last kernel sums what is left over.
    """

    fused: bool
    rows_per_program: int
    num_warps: int
    streamed: bool = False
    stages: int = 3
    chain_columns: int = 64
    chain_stages: int = 1
    chain_warps: int = 4
    sum_columns: int = 32
    sum_log2_steps: int = 4
    sum_warps: int = 4


# The ops whose plans may come from a file.
TUNING = {"rms_norm_backward": Plan, "add_rms_norm_backward": Plan}

# Beyond this tile the sums of a chain leave the registers (H200).
_MAX_FUSED_TILE = 8192
# Beyond this one a row is streamed.
_MAX_UNSTREAMED_TILE = 16384
# Without a residual's gradient and with one (H200).
_STREAM_WARPS, _STREAM_WARPS_ADDED = 8, 16
_ELEMENTS_PER_THREAD = 32
_MIN_ELEMENTS_PER_PROGRAM = 2048
_MAX_WARPS = 16
# Shared memory that a program needs beside the rows on their way, at most (NVIDIA).
_EXCHANGED_BYTES = 20 << 10


def launch_plan(
    rows: int,
    hidden_size: int,
    columns: Optional[ColumnReduction],
    element_size: int = 2,
    gpu: plans.Gpu = plans.UNKNOWN,
    edges: str = "one",
) -> Plan:
    """The plan for `rows` rows: the tuned one, or `default_plan` where there is none that fits.

    Args:
        columns: the order of dweight's sum, None if not both gradients are needed.
        element_size: bytes of an element of the activations.
        edges: one of `edges_of`.
    """
    op = "add_rms_norm_backward" if edges == "added" else "rms_norm_backward"
    plan = plans.tuned(Plan, gpu, op, hidden_size, rows, element_size)
    if plan and (not plan.fused or (columns is not None and plan.rows_per_program <= columns.height)):
        return plan
    return default_plan(rows, hidden_size, columns, gpu.multiprocessors, element_size, edges)


def default_plan(
    rows: int,
    hidden_size: int,
    columns: Optional[ColumnReduction],
    multiprocessors: int,
    element_size: int = 2,
    edges: str = "one",
) -> Plan:
    """A sound plan for any GPU; the arguments are those of `launch_plan`."""
    order = row_reduction(rows, hidden_size)
    tile = order.columns << order.log2_steps
    rows_per_program = min(max(_MIN_ELEMENTS_PER_PROGRAM // tile, 1), row_class(rows))
    fused = False
    if columns is not None and tile <= _MAX_FUSED_TILE:
        # Two rows where they fit: half as many sums are left over, as much memory as Liger's backward takes.
        most = _MAX_FUSED_TILE * 2 // element_size
        fused_rows = min(max(rows_per_program, 2 if 2 * tile <= most else 1), columns.height)
        fused = columns.blocks * columns.height // fused_rows >= multiprocessors // 2
        rows_per_program = fused_rows if fused else rows_per_program
    elif columns is not None and tile > _MAX_UNSTREAMED_TILE and element_size == 2:
        # A program has a multiprocessor to itself, and few may be idle; a part of what ATen sums in parts leaves half of them so.
        # (Of 16-bit products. Where products are fp32 there may be parts; it takes longer then.)
        programs = columns.blocks * columns.height
        room = -(-programs // multiprocessors) * multiprocessors
        if programs >= room * 7 // 8 and len(split_rows(rows, hidden_size, element_size)) == 1:
            return Plan(True, 1, _STREAM_WARPS_ADDED if edges == "added" else _STREAM_WARPS, streamed=True)
    each, most_warps = _ELEMENTS_PER_THREAD, _MAX_WARPS
    if fused and element_size == 4:
        # A chain's and a thread's sums take registers too.
        each, most_warps = each // 2, most_warps // 2
    warps = min(max(rows_per_program * tile // (each * 32), 1), most_warps)
    return Plan(fused, rows_per_program, warps)


def _fitting(plan: Plan, order: RowReduction, element_sizes: list[int], gpu: plans.Gpu) -> Plan:
    """The plan with no more stages than fit into the GPU's shared memory.

    Args:
        element_sizes: bytes of an element of each tensor whose rows are read.
    """
    if not plan.fused or plan.streamed:
        return plan
    room = max(gpu.shared_memory - _EXCHANGED_BYTES, 0)
    stage = plan.rows_per_program * (order.columns << order.log2_steps) * sum(element_sizes)
    return replace(plan, stages=min(plan.stages, 1 + room // stage))


def proof_class(
    rows: int, hidden_size: int, device: torch.device, both: bool, element_size: int, edges: str
) -> tuple[int, Plan]:
    """The fewest rows whose chains are shared and combined as those of `rows` rows are, and the plan of `rows` rows.

    Args:
        both: whether both gradients are needed.
    """
    gpu = plans.gpu(device)
    columns = column_reduction(rows, hidden_size, gpu.multiprocessors, gpu.threads)
    least = row_class(rows)
    while True:
        found = column_reduction(least, hidden_size, gpu.multiprocessors, gpu.threads)
        if (found.height, found.blocks > 1) == (columns.height, columns.blocks > 1) or least >= rows:
            planned = columns if both else None
            return least, launch_plan(rows, hidden_size, planned, element_size, gpu, edges)
        least *= 2


def rows_of_same_kernel(rows: int, fewer: int, hidden_size: int, device: torch.device) -> int:
    """`fewer` if the compiled kernels of `rows` rows take so few as well, otherwise `rows`."""
    gpu = plans.gpu(device)
    heights = {column_reduction(count, hidden_size, gpu.multiprocessors, gpu.threads).height for count in (rows, fewer)}
    return fewer if len(heights) == 1 and row_class(rows) == row_class(fewer) else rows


def _bind_backward(
    scale, dtypes, hidden_size, rows, unit, levels, plan: Plan, threads, edges, device, programs, *scalars
) -> launch.Launch:
    """Of dx, and with a fused plan of the chains' sums.

    Args:
        dtypes: of dy, x and the weight.
        rows: the fewest of their class.
    """
    order = row_reduction(rows, hidden_size)
    constants = {
        "SCALE": scale,
        "HIDDEN_SIZE": hidden_size,
        "STRIDE_UNIT": unit,
        "LEVELS": levels,
        "ROWS": plan.rows_per_program,
        "LOG2_STEPS": order.log2_steps,
        "WIDTH": order.width,
        "HEIGHT": order.height,
        "VECTORIZED": order.vectorized,
        "TWO_EDGES": edges == "two",
        "ADD": edges == "added",
        "SUM_CHAINS": plan.fused,
        "THREADS": threads,
        "STAGES": plan.stages if plan.fused else 1,
    }
    kernel = rms_norm_backward
    if plan.streamed:
        kernel = rms_norm_backward_streamed
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    # What is neither read nor written is fp32, as rstd, which stands for it.
    fp32, x = torch.float32, dtypes[1]
    tensors = (*dtypes, fp32, x, x if edges == "two" else fp32, fp32, fp32, x if edges == "added" else fp32)
    return launch.bind(kernel, constants, plan.num_warps, device, tensors, programs, *scalars)


def _bind_sum_chains(
    scale, dtypes, hidden_size, unit, levels, plan: Plan, threads, device, programs, *scalars
) -> launch.Launch:
    constants = {
        "SCALE": scale,
        "HIDDEN_SIZE": hidden_size,
        "STRIDE_UNIT": unit,
        "LEVELS": levels,
        "THREADS": threads,
        "COLUMNS": plan.chain_columns,
        "STAGES": plan.chain_stages,
    }
    dtypes = (*dtypes, torch.float32, torch.float32)
    return launch.bind(rms_norm_sum_chains, constants, plan.chain_warps, device, dtypes, programs, *scalars)


def _bind_sum_blocks(
    weight_dtype, hidden_size, parts, plan: Plan, threads, device, programs, *scalars
) -> launch.Launch:
    constants = {
        "HIDDEN_SIZE": hidden_size,
        "PARTS": parts,
        "THREADS": threads,
        "COLUMNS": plan.sum_columns,
        "LOG2_STEPS": plan.sum_log2_steps,
    }
    dtypes = torch.float32, torch.float32, weight_dtype
    return launch.bind(rms_norm_sum_blocks, constants, plan.sum_warps, device, dtypes, programs, *scalars)


# From a call's tensors to launches


def _layout(variant, dy, x, weight):
    """Strides of eager's dx and of its `weight_products`, found out without data or device."""
    if dy.stride() == x.stride() == contiguous_strides(x.shape):
        return x.stride(), x.stride()
    with proof.undisturbed(x.device), torch.enable_grad():
        dy, x, weight = stand_ins(dy, x, weight)
        (dx,) = torch.autograd.grad(variant.eager(x.requires_grad_(), weight, 0.0), x, dy)
        h, dy = x.detach().to(torch.float32), variant.incoming(dy)
        # In fp32: the meta device widens 16 bits before it multiplies, and lays out an expanded dy by that, which then decides
        # how the product lies.
        dy = torch.empty_strided(dy.shape, dy.stride(), dtype=torch.float32, device=h.device)
        return dx.stride(), (dy * (h * eager_rstd(h, 0.0))).stride()


Empty = Callable[[], torch.Tensor]


class _Part(NamedTuple):
    """The launches for the rows that ATen sums at once; None for what is not needed."""

    dx: Optional[launch.Launch]
    sum_chains: Optional[launch.Launch]
    sum_blocks: Optional[launch.Launch]


@dataclass(eq=False)
class Backward:
    """The gradients of all calls of the same shapes, strides, dtypes and device.

    Args:
        empty_dx: None if that gradient is not needed, as for `empty_dweight`.
        empty_sums: for the most sums of threads or blocks that a part leaves to `sum_blocks`.
        empty_dweight_sum: fp32. What ATen sums in several parts adds up there.
        empty_dy: to copy dy to first, unless it can be read as it is.
    """

    parts: list[_Part]
    edges: str
    empty_dx: Optional[Empty] = None
    empty_dweight: Optional[Empty] = None
    empty_sums: Optional[Empty] = None
    empty_dweight_sum: Optional[Empty] = None
    empty_dy: Optional[Empty] = None

    def __call__(self, dy, x, weight, rstd, d_sum=None, d_rstd=None, dweight_sum=None) -> Gradients:
        """Args:
        d_sum: the gradient to add to, with edges "added".
        d_rstd, dweight_sum: fp32, written if the launches were resolved with `statistics`.
        """
        if self.empty_dy is not None:
            dy = self.empty_dy().copy_(dy)
        dx = dx_mean = dweight = blocks = None
        if self.empty_dx is not None:
            dx = self.empty_dx()
            if self.edges == "two":
                dx_mean = self.empty_dx()
        if self.empty_dweight is not None:
            blocks, dweight = self.empty_sums(), self.empty_dweight()
            if self.empty_dweight_sum is not None and dweight_sum is None:
                dweight_sum = self.empty_dweight_sum()
        # What is neither read nor written is passed as rstd, which is fp32 as well.
        unused = rstd
        for part in self.parts:
            if part.dx is not None:
                part.dx(
                    dy,
                    x,
                    weight,
                    rstd,
                    dx,
                    unused if dx_mean is None else dx_mean,
                    unused if d_rstd is None else d_rstd,
                    unused if blocks is None else blocks,
                    unused if d_sum is None else d_sum,
                )
            if part.sum_chains is not None:
                part.sum_chains.on_four(dy, x, rstd, blocks)
            if part.sum_blocks is not None:
                part.sum_blocks.on_three(blocks, unused if dweight_sum is None else dweight_sum, dweight)
        return Gradients(dx, dx_mean, dweight)


def resolve(
    variant: Variant,
    dy,
    x,
    weight,
    rstd,
    needs_dx: bool,
    needs_dweight: bool,
    edges: Optional[str] = None,
    like_rows: Optional[int] = None,
    statistics=False,
) -> Backward:
    """The launches for these tensors.

    Args:
        rstd: fp32, `[..., 1]`, with the strides that the forward gave it.
        edges: one of `edges_of`; by default that of the layer alone.
        like_rows: use the plan for so many rows: a proof runs the very kernels of a larger call.
        statistics: whether the fp32 gradient of rstd and the fp32 dweight are written too.

    Raises:
        Outside: `formula` must run.
    """
    hidden_size = x.shape[-1]
    edges = edges or edges_of(x.dtype)
    if x.dim() < 2 or x.numel() == 0 or x.stride(-1) != 1:
        raise Outside("gradients of rows that are strided, of no rows or of one that is no matrix")
    if dy.dtype != variant.output_dtype(x.dtype, weight.dtype):
        raise Outside(f"gradients {dy.dtype} of activations {x.dtype} and weight {weight.dtype}")
    dx_strides, product_strides = _layout(variant, dy, x, weight)
    matrix = rows_in_memory(x.shape, product_strides)
    if matrix is None or dx_strides[-1] != 1:
        raise Outside("gradients whose rows are strided or not equally spaced")
    rows, _, order = matrix
    copies_dy = dy.stride(-1) != 1 or rows_in_memory(x.shape, dy.stride()) is None
    dy_strides = product_strides if copies_dy else dy.stride()
    found = row_levels(x.shape, order, dy_strides, x.stride(), rstd.stride(), dx_strides)
    if found is None:
        raise Outside("gradients whose rows lie in memory in too many orders")
    levels, inner, middle, (dy_offsets, x_offsets, rstd_offsets, dx_offsets) = found
    unit = math.gcd(*dy_offsets, *x_offsets, *dx_offsets, 16 // max(dy.element_size(), x.element_size()))

    def in_units(offsets):
        return tuple(offset // unit for offset in offsets)

    walk = (inner, middle, *in_units(dy_offsets), *in_units(x_offsets), *rstd_offsets)
    gpu = plans.gpu(x.device)
    dtypes = (dy.dtype, x.dtype, weight.dtype)
    # Of all parts the plan that the whole has been proved with.
    planned_rows = rows if like_rows is None else like_rows
    planned = None
    if needs_dx and needs_dweight:
        planned = column_reduction(planned_rows, hidden_size, gpu.multiprocessors, gpu.threads)
    plan = launch_plan(planned_rows, hidden_size, planned, x.dtype.itemsize, gpu, edges)
    element_sizes = [dy.element_size(), x.element_size(), *[x.element_size()] * (edges == "added")]
    plan = _fitting(plan, row_reduction(rows, hidden_size), element_sizes, gpu)
    parts = []
    most_sums = 0
    product_size = dy.element_size() if variant.scale == "after_cast" else torch.float32.itemsize
    ranges = split_rows(rows, hidden_size, product_size)
    for index, (first_row, count) in enumerate(ranges):
        columns = column_reduction(count, hidden_size, gpu.multiprocessors, gpu.threads)
        dx = sum_chains = sum_blocks = None
        left = columns.height // plan.rows_per_program if plan.fused else 1
        if needs_dx:
            height = columns.height if plan.fused else plan.rows_per_program
            programs = columns.blocks * left if plan.fused else -(-count // plan.rows_per_program)
            shared = (hidden_size, row_class(rows), unit, levels, plan, height, edges, x.device)
            scalars = int(statistics), first_row, count, columns.blocks, *walk, *in_units(dx_offsets)
            dx = _bind_backward(variant.scale, dtypes, *shared, programs, *scalars)
        if needs_dweight:
            most_sums = max(most_sums, columns.blocks * left)
            if not plan.fused:
                shared = (hidden_size, unit, levels, plan, columns.height, x.device)
                programs = columns.blocks * -(-hidden_size // plan.chain_columns)
                of_chains = dtypes[:2]
                sum_chains = _bind_sum_chains(
                    variant.scale, of_chains, *shared, programs, first_row, count, columns.blocks, *walk
                )
            store_sum = statistics or index + 1 < len(ranges)
            shared = (weight.dtype, hidden_size, left, plan, columns.height, x.device)
            programs = -(-hidden_size // plan.sum_columns)
            sum_blocks = _bind_sum_blocks(*shared, programs, columns.blocks, int(index > 0), int(store_sum))
        parts.append(_Part(dx, sum_chains, sum_blocks))

    def fp32(*shape) -> Empty:
        return allocator(shape, contiguous_strides(shape), torch.float32, x.device)

    backward = Backward(parts, edges)
    if needs_dx:
        backward.empty_dx = allocator(x.shape, dx_strides, x.dtype, x.device)
    if needs_dweight:
        backward.empty_dweight = allocator((hidden_size,), (1,), weight.dtype, x.device)
        backward.empty_sums = fp32(most_sums, hidden_size)
        if len(parts) > 1:
            backward.empty_dweight_sum = fp32(hidden_size)
    if copies_dy:
        backward.empty_dy = allocator(x.shape, dy_strides, dy.dtype, x.device)
    return backward


def edges_of(dtype: torch.dtype, d_sum: Optional[torch.Tensor] = None) -> str:
    """How dx comes out of the kernel.

    "one": a gradient. "two": eager's fp32 activations enter by two edges, each with a gradient of its own. "added": added to
    d_sum, which came before.
    """
    if d_sum is not None:
        return "added"
    return "two" if dtype == torch.float32 else "one"


def _joined(found: Gradients, d_sum: Optional[torch.Tensor]) -> Gradients:
    """The gradients with all that reaches x in one, d_sum first."""
    if found.dx is None or (d_sum is None and found.dx_mean is None):
        return found
    terms = [each for each in (d_sum, found.dx, found.dx_mean) if each is not None]
    return Gradients(functools.reduce(torch.add, terms), None, found.dweight)


def gradients(
    variant: Variant,
    dy,
    x,
    weight,
    rstd,
    needs_dx: bool,
    needs_dweight: bool,
    joined=False,
    d_sum=None,
    original: Optional[Callable] = None,
) -> Gradients:
    """The gradients for `dy` from the kernels, or from `formula` where they cannot go.

    Args:
        joined: x has no other consumer, so that all that reaches it is one gradient, `dx`.
        d_sum: with `joined`, what reaches x before.
        original: the forward that is replaced, for reports.
    """
    needs, tensors = (needs_dx, needs_dweight), (dy, x, weight, rstd)
    added = d_sum is not None and needs_dx
    if added:
        tensors = (*tensors, d_sum)
    table = _added_calls if added else _calls
    # Any weight that is alike may be found under this identity: everything is compared.
    subject = id(weight) if weight.numel() else id(variant)
    recent = table.recent.get(subject)
    if recent is not None:
        same, known, of_dx, of_dweight, compute = recent
        if (
            are_dense(dy, x)
            and are_dense(weight, rstd)
            and (not added or are_dense(d_sum, d_sum))
            and same(*tensors)
            and known is variant
            and of_dx is needs_dx
            and of_dweight is needs_dweight
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            found = compute(*tensors)
            return _joined(found, None) if joined else found
    call = None
    if are_plain(dy, x) and are_plain(weight, rstd) and (not added or _lies_alike(d_sum, dy, x)):
        facts = (variant, *needs)
        call = table.find(original or EAGER[variant].forward, facts, tensors, *facts)
    if call is None:
        return joined_formula(variant, dy, x, weight, rstd, needs_dx, needs_dweight, joined, d_sum)
    table.recognise(subject, call, facts, tensors)
    found = call(*tensors)
    return _joined(found, None) if joined else found


def _lies_alike(d_sum, dy, x) -> bool:
    """Whether d_sum is plain and lies in memory as dy and x do: otherwise eager's sum of the gradients decides how that lies."""
    return are_plain(d_sum, d_sum) and d_sum.stride() == dy.stride() == x.stride()


def joined_formula(
    variant: Variant, dy, x, weight, rstd, needs_dx: bool, needs_dweight: bool, joined, d_sum, dweight_dtype=None
) -> Gradients:
    """`formula`, with the arguments of `gradients`."""
    found = formula(variant, dy, x, weight, rstd, needs_dx, needs_dweight, dweight_dtype)
    return _joined(found, d_sum) if joined else found


def present(gradients, like):
    """An operator returns tensors only: an empty one stands for a gradient that nobody needs."""
    return tuple(like.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _resolve_call(dy, x, weight, rstd, *more) -> Optional[Backward]:
    """The launches of one kind of calls; None where `formula` must run, whatever fails.

    They are tried at once, since they may have to be compiled. A proof runs contiguous tensors. Where rows lie otherwise another
    compiled kernel reads them, and eager may sum them in another order, so the gradients are compared with the formula's.
    """
    *d_sum, variant, needs_dx, needs_dweight = more
    arguments = variant, dy, x, weight, rstd, needs_dx, needs_dweight
    edges = edges_of(x.dtype, *d_sum)
    ordinary = dy.stride() == x.stride() == contiguous_strides(x.shape)
    compares = not ordinary and proof.policy() != "off" and not launch.is_asking()
    if compares and proof.is_capturing():
        return None
    try:
        backward = resolve(*arguments, edges)
        if compares:
            _compare(arguments, edges, *d_sum)
        else:
            backward(dy, x, weight, rstd, *d_sum)
        return backward
    except Outside:
        raise
    except Exception as error:
        failure = f"RMSNorm's gradients come from torch: {error}"
        if proof.policy() == "strict":
            raise proof.LosslessProofError(f"lossless-kernels: {failure}") from error
        raise Failed(failure) from error


_calls, _added_calls = Calls(_resolve_call), Calls(_resolve_call)


def _compare(arguments, edges, d_sum=None) -> None:
    """Raises LosslessProofError if the kernels' gradients are not the formula's.

    The weight's are compared before they are rounded too: 16 bits hide another order of the rows.

    Args:
        arguments: of `resolve`.
    """
    variant, dy, x, weight, rstd, _, needs_dweight = arguments
    dweight_sum = torch.full(weight.shape, math.nan, dtype=torch.float32, device=x.device)
    found = resolve(*arguments, edges, statistics=True)(dy, x, weight, rstd, d_sum, torch.empty_like(rstd), dweight_sum)
    expected = joined_formula(*arguments, d_sum is not None, d_sum)
    pairs = [(a, b) for a, b in zip(found, expected) if a is not None]
    if needs_dweight:
        product = weight_products(variant, dy, x.to(torch.float32), rstd, x.dtype)
        pairs.append((dweight_sum, product.sum(tuple(range(x.dim() - 1)), dtype=torch.float32)))
    wrong = sum(int(proof.differing(a.flatten(), b.flatten())) for a, b in pairs)
    if wrong:
        raise proof.LosslessProofError(f"{wrong} elements differ")
