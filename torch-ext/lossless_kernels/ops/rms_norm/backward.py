"""The gradients of RMSNorm, with the bits of eager autograd through transformers' layers."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Callable, NamedTuple, Optional

import torch

from ...core import declarations, launch, plans, proof
from ...core.calls import Calls, Failed, Outside
from ...core.domain import allocator, are_plain, have_strides
from ...core.layout import contiguous_strides, row_levels, rows_in_memory, stand_ins
from ...core.reduction import (
    CUDA,
    ROCM,
    Build,
    ColumnReduction,
    RowReduction,
    column_reduction,
    fewest_rows,
    row_class,
    row_reduction,
    split_rows,
)
from ...core.torch_internals import dispatch_modes, forward_ad
from ..column_sum import bind_sum_blocks
from .formulas import EAGER, RMSNormFormula, eager_rstd

if launch.AVAILABLE:
    from ...kernels_src.rms_norm_backward import (
        rms_norm_backward,
        rms_norm_backward_streamed,
        rms_norm_sum_chains,
    )


class Gradients(NamedTuple):
    """The gradients. Activations that the formula reads twice get two, one after the other: `dx` and then `dx_mean`."""

    dx: Optional[torch.Tensor]
    dx_mean: Optional[torch.Tensor]
    dweight: Optional[torch.Tensor]


def formula(
    variant: RMSNormFormula,
    dy,
    hidden_states,
    weight,
    rstd,
    needs_dx: bool,
    needs_dweight: bool,
    dweight_dtype: Optional[torch.dtype] = None,
) -> Gradients:
    """The gradients in differentiable torch operations, one rounding each, as autograd computes them.

    Args:
        dy: the gradient of the output, `[..., hidden_size]`.
        rstd: fp32, `[..., 1]`.
        dweight_dtype: the weight's dtype in the forward pass; by default its present one.
    """
    h = hidden_states.to(torch.float32)
    dx = dx_mean = dweight = None
    dy = variant.grad_of_product(dy)
    if needs_dx:
        d_normalized = variant.grad_of_normalized(dy, weight, hidden_states.dtype)
        d_variance = (-0.5 * (d_normalized * h).sum(-1, keepdim=True)) * rstd.pow(3)
        dx = d_normalized * rstd
        dx_mean = d_variance / h.shape[-1] * (2 * h)
        if variant.has_two_edges(hidden_states.dtype):
            dx, dx_mean = dx.to(hidden_states.dtype), dx_mean.to(hidden_states.dtype)
        else:
            dx, dx_mean = (dx + dx_mean).to(hidden_states.dtype), None
    if needs_dweight:
        products = weight_products(variant, dy, h, rstd, hidden_states.dtype)
        dweight = products.sum_to_size(weight.shape).to(dweight_dtype or weight.dtype)
    return Gradients(dx, dx_mean, dweight)


def weight_products(variant: RMSNormFormula, dy, h, rstd, dtype: torch.dtype) -> torch.Tensor:
    """The products whose sum over rows is eager's gradient of the weight; h is hidden_states of `dtype`, in fp32."""
    normalized = h * rstd
    return variant.grad_of_product(dy) * (normalized.to(dtype) if variant.scale == "after_cast" else normalized)


# The launch plan


@dataclass(frozen=True)
class BackwardPlan:
    """The launch configuration of the backward kernels.

    With `fused` one kernel walks the rows of a block of ATen's reduction over rows and computes dx too; it prefetches
    the rows of `stages` - 1 iterations. A row stays in registers between its sum and its dx, or is read twice if
    `streamed`. Without `fused` the dx kernel has a program for every `rows_per_program` rows, and a second kernel sums
    the chains, `chain_columns` columns a program, in `chain_stages` stages. The last kernel adds all partial sums.
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


TUNING = {"rms_norm_backward": BackwardPlan, "add_rms_norm_backward": BackwardPlan}
declarations.TUNING.update(TUNING)

# With a larger tile a chain's sums do not fit into registers (H200).
_MAX_FUSED_TILE = 8192
# With a larger tile a row is streamed.
_MAX_UNSTREAMED_TILE = 16384
# A fused program of so many warps takes all registers of an SM. With less useful work two kernels take less time (H200).
_WARPS_OF_A_FULL_SM = 8
_LEAST_USEFUL_WORK = 0.6
# Without fusion the threads of a larger tile take twice as many elements (H200).
_MAX_SHORT_TILE = 4096
# Without the gradient of a residual add, and with it (H200).
_STREAM_WARPS, _STREAM_WARPS_ADDED = 8, 16
_ELEMENTS_PER_THREAD = 32
_MIN_ELEMENTS_PER_PROGRAM = 2048
_MAX_WARPS = 16
# The most shared memory that a program needs beside prefetched rows (NVIDIA).
_EXCHANGED_BYTES = 20 << 10


def launch_plan(
    rows: int,
    hidden_size: int,
    columns: Optional[ColumnReduction],
    element_size: int = 2,
    gpu: plans.Gpu = plans.UNKNOWN,
    dx_mode: str = "single",
) -> BackwardPlan:
    """The tuned plan for `rows` rows if it fits, or `default_plan`.

    Args:
        columns: the reduction order of dweight; None unless both gradients are needed.
        element_size: bytes of an element of the activations.
        dx_mode: see `dx_mode_of`.
    """
    op = "add_rms_norm_backward" if dx_mode == "accumulate" else "rms_norm_backward"
    plan = plans.tuned(BackwardPlan, gpu, op, hidden_size, rows, element_size)
    if plan and (not plan.fused or (columns is not None and plan.rows_per_program <= columns.height)):
        return plan
    return default_plan(rows, hidden_size, columns, gpu.multiprocessors, element_size, dx_mode, gpu.build)


def default_plan(
    rows: int,
    hidden_size: int,
    columns: Optional[ColumnReduction],
    multiprocessors: int,
    element_size: int = 2,
    dx_mode: str = "single",
    build: Build = CUDA,
) -> BackwardPlan:
    """A sound plan for any GPU; the arguments are those of `launch_plan`."""
    order = row_reduction(rows, hidden_size, build)
    tile = order.columns << order.log2_steps
    rows_per_program = min(max(_MIN_ELEMENTS_PER_PROGRAM // tile, 1), row_class(rows))
    if columns is not None and tile <= _MAX_FUSED_TILE:
        # Two rows if they fit: that halves the partial sums, to as much memory as Liger's backward takes.
        most = _MAX_FUSED_TILE * 2 // element_size
        fused_rows = min(max(rows_per_program, 2 if 2 * tile <= most else 1), columns.height)
        # The fp32 sums of chains and threads take registers too.
        each, most_warps = (_ELEMENTS_PER_THREAD, _MAX_WARPS) if element_size == 2 else (_ELEMENTS_PER_THREAD // 2, 8)
        # The same tile spills on RDNA GPUs (compiled for gfx1201, not yet run).
        if build == ROCM[32]:
            each, most_warps = _ELEMENTS_PER_THREAD // 2, _MAX_WARPS
        warps = min(max(fused_rows * tile // (each * 32), 1), most_warps)
        programs = columns.blocks * columns.height // fused_rows
        useful = useful_work(programs, multiprocessors, hidden_size, tile, element_size)
        if programs >= multiprocessors // 2 and (warps < _WARPS_OF_A_FULL_SM or useful >= _LEAST_USEFUL_WORK):
            return BackwardPlan(True, fused_rows, warps)
    elif columns is not None and tile > _MAX_UNSTREAMED_TILE and element_size == 2:
        # Stream only if at least 7/8 of the SMs get a program. ATen splits products over 2 GiB; a half would fill too
        # few SMs. (That is the limit of 16-bit products. fp32 products may be split, which only takes longer.)
        programs = columns.blocks * columns.height
        slots = -(-programs // multiprocessors) * multiprocessors
        if programs >= slots * 7 // 8 and len(split_rows(rows, hidden_size, element_size)) == 1:
            warps = _STREAM_WARPS_ADDED if dx_mode == "accumulate" else _STREAM_WARPS
            return BackwardPlan(True, 1, warps, streamed=True)
    each = _ELEMENTS_PER_THREAD * (2 if element_size == 2 and tile > _MAX_SHORT_TILE else 1)
    return BackwardPlan(False, rows_per_program, min(max(rows_per_program * tile // (each * 32), 1), _MAX_WARPS))


def useful_work(programs: int, multiprocessors: int, hidden_size: int, tile: int, element_size: int) -> float:
    """The part of the SMs' time in which a fused kernel's programs compute gradients, at most 1.

    It is the part of the SMs with a program, as long as the fullest SM has one, times the part of the tile that a row
    fills. Padding takes instructions, but no memory traffic; fp32 has twice the traffic, which hides half a tile.
    """
    slots = -(-programs // multiprocessors) * multiprocessors
    return programs / slots * min(hidden_size / tile * element_size / 2, 1.0)


def _fitting(plan: BackwardPlan, order: RowReduction, element_sizes: list[int], gpu: plans.Gpu) -> BackwardPlan:
    """The plan with its stages limited by shared memory; `element_sizes` are those of the tensors to read."""
    if not plan.fused or plan.streamed:
        return plan
    available_bytes = max(gpu.shared_memory - _EXCHANGED_BYTES, 0)
    stage = plan.rows_per_program * (order.columns << order.log2_steps) * sum(element_sizes)
    return replace(plan, stages=min(plan.stages, 1 + available_bytes // stage))


def proof_class(
    rows: int, hidden_size: int, device: torch.device, both: bool, element_size: int, dx_mode: str
) -> tuple[int, BackwardPlan]:
    """The fewest rows with the same reduction order over rows as `rows` rows, and the plan of `rows` rows.

    Args:
        both: whether both gradients are needed.
    """
    gpu = plans.gpu(device)
    of_gpu = gpu.multiprocessors, gpu.threads, gpu.build
    least = fewest_rows(rows, hidden_size, *of_gpu)
    columns = column_reduction(rows, hidden_size, *of_gpu) if both else None
    return least, launch_plan(rows, hidden_size, columns, element_size, gpu, dx_mode)


def rows_of_same_kernel(rows: int, fewer: int, hidden_size: int, device: torch.device) -> int:
    """`fewer` if the compiled kernels for `rows` rows serve that number as well, otherwise `rows`."""
    gpu = plans.gpu(device)
    of_gpu = gpu.multiprocessors, gpu.threads, gpu.build
    heights = {column_reduction(count, hidden_size, *of_gpu).height for count in (rows, fewer)}
    return fewer if len(heights) == 1 and row_class(rows) == row_class(fewer) else rows


def _bind_backward(shared, dtypes, rows, plan, threads, dx_mode, device, programs, *scalars) -> launch.Launch:
    """The kernel of dx, which sums chains too if the plan is fused.

    Args:
        shared: the constants of all kernels that read rows.
        dtypes: of dy, x and the weight.
        rows: the fewest of their class.
    """
    gpu = plans.gpu(device)
    order = row_reduction(rows, shared["HIDDEN_SIZE"], gpu.build)
    constants = {
        **shared,
        "ROWS": plan.rows_per_program,
        **order.constants,
        "TWO_EDGES": dx_mode == "split",
        "ADD": dx_mode == "accumulate",
        "SUM_CHAINS": plan.fused,
        "THREADS": threads,
        "STAGES": plan.stages if plan.fused else 1,
        # Where a gradient is added it spills (compiled for sm_100). 12.0 has the PTX and one instruction for each half.
        "PACKED": plan.fused and dx_mode != "accumulate" and gpu.compute_capability == 10,
    }
    kernel = rms_norm_backward
    if plan.streamed:
        kernel = rms_norm_backward_streamed
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    # rstd, which is fp32, stands for tensors that are neither read nor written.
    fp32, x = torch.float32, dtypes[1]
    tensors = (*dtypes, fp32, x, x if dx_mode == "split" else fp32, fp32, fp32, x if dx_mode == "accumulate" else fp32)
    return launch.bind(kernel, constants, plan.num_warps, device, tensors, programs, *scalars)


def _bind_sum_chains(shared, dtypes, plan, columns: ColumnReduction, device, *scalars) -> launch.Launch:
    constants = {**shared, "THREADS": columns.height, "COLUMNS": plan.chain_columns, "STAGES": plan.chain_stages}
    programs = columns.blocks * -(-shared["HIDDEN_SIZE"] // plan.chain_columns)
    dtypes = (*dtypes, torch.float32, torch.float32)
    return launch.bind(rms_norm_sum_chains, constants, plan.chain_warps, device, dtypes, programs, *scalars)


# From a call's tensors to launches


def _layout(variant, dy, x, weight):
    """The strides of eager's dx and of its `weight_products`, from stand-ins without data."""
    if dy.stride() == x.stride() == contiguous_strides(x.shape):
        return x.stride(), x.stride()
    with proof.undisturbed(x.device), torch.enable_grad():
        dy, x, weight = stand_ins(dy, x, weight)
        (dx,) = torch.autograd.grad(variant.eager(x.requires_grad_(), weight, 0.0), x, dy)
        h, dy = x.detach().to(torch.float32), variant.grad_of_product(dy)
        # In fp32: the meta device casts 16 bits before it multiplies, and the layout of the cast of an expanded dy
        # would decide that of the product.
        dy = torch.empty_strided(dy.shape, dy.stride(), dtype=torch.float32, device=h.device)
        return dx.stride(), (dy * (h * eager_rstd(h, 0.0))).stride()


Empty = Callable[[], torch.Tensor]


class _Part(NamedTuple):
    """The launches for the rows that ATen sums at once; None for those not needed."""

    dx: Optional[launch.Launch]
    sum_chains: Optional[launch.Launch]
    sum_blocks: Optional[launch.Launch]


@dataclass(eq=False)
class Backward:
    """The gradients of all calls of the same shapes, strides, dtypes and device.

    Args:
        empty_dx, empty_dweight: None if that gradient is not needed.
        empty_sums: for the most partial sums that a part leaves to `sum_blocks`.
        empty_dweight_sum: fp32, the running sum over several parts.
        empty_dy: memory for a copy of dy; None if dy can be read in place.
    """

    parts: list[_Part]
    dx_mode: str
    empty_dx: Optional[Empty] = None
    empty_dweight: Optional[Empty] = None
    empty_sums: Optional[Empty] = None
    empty_dweight_sum: Optional[Empty] = None
    empty_dy: Optional[Empty] = None

    def __call__(self, dy, x, weight, rstd, d_sum=None, d_rstd=None, dweight_sum=None) -> Gradients:
        """Launches all parts.

        Args:
            d_sum: the gradient to add to, with dx_mode "accumulate".
            d_rstd, dweight_sum: fp32, written if the launches were resolved with `statistics`.
        """
        if self.empty_dy is not None:
            dy = self.empty_dy().copy_(dy)
        dx = dweight = None
        # rstd, which is fp32, stands for tensors that are neither read nor written.
        dx_mean = blocks = rstd
        if self.empty_dx is not None:
            dx = self.empty_dx()
            if self.dx_mode == "split":
                dx_mean = self.empty_dx()
        if self.empty_dweight is not None:
            blocks, dweight = self.empty_sums(), self.empty_dweight()
            if dweight_sum is None:
                dweight_sum = rstd if self.empty_dweight_sum is None else self.empty_dweight_sum()
        if d_rstd is None:
            d_rstd = rstd
        if d_sum is None:
            d_sum = rstd
        for part in self.parts:
            if part.dx is not None:
                part.dx(dy, x, weight, rstd, dx, dx_mean, d_rstd, blocks, d_sum)
            if part.sum_chains is not None:
                part.sum_chains.call_4(dy, x, rstd, blocks)
            if part.sum_blocks is not None:
                part.sum_blocks.call_3(blocks, dweight_sum, dweight)
        return Gradients(dx, None if dx_mean is rstd else dx_mean, dweight)


def resolve(
    variant: RMSNormFormula,
    dy,
    x,
    weight,
    rstd,
    needs_dx: bool,
    needs_dweight: bool,
    dx_mode: Optional[str] = None,
    like_rows: Optional[int] = None,
    statistics=False,
) -> Backward:
    """The launches for these tensors.

    Args:
        rstd: fp32, `[..., 1]`, with the strides from the forward pass.
        dx_mode: see `dx_mode_of`; by default that of the layer alone.
        like_rows: take the plan for this number of rows: a proof runs the kernels of a larger call.
        statistics: whether the fp32 gradient of rstd and the fp32 dweight are written too.

    Raises:
        Outside: `formula` must run.
    """
    hidden_size = x.shape[-1]
    dx_mode = dx_mode or dx_mode_of(variant, x.dtype)
    if x.dim() < 2 or x.numel() == 0 or x.stride(-1) != 1:
        raise Outside("gradients of strided rows, of no rows or of a vector")
    if dy.dtype != variant.output_dtype(x.dtype, weight.dtype):
        raise Outside(f"gradients {dy.dtype} of activations {x.dtype} and weight {weight.dtype}")
    dx_strides, product_strides = _layout(variant, dy, x, weight)
    matrix = rows_in_memory(x.shape, product_strides)
    if matrix is None or dx_strides[-1] != 1:
        raise Outside("gradients' rows are strided or not equally spaced")
    rows, _, order = matrix
    copies_dy = dy.stride(-1) != 1 or rows_in_memory(x.shape, dy.stride()) is None
    dy_strides = product_strides if copies_dy else dy.stride()
    found = row_levels(x.shape, order, dy_strides, x.stride(), rstd.stride(), dx_strides)
    if found is None:
        raise Outside("the memory orders of gradients and activations differ too much")
    levels, inner, middle, (dy_offsets, x_offsets, rstd_offsets, dx_offsets) = found
    unit = math.gcd(*dy_offsets, *x_offsets, *dx_offsets, 16 // max(dy.element_size(), x.element_size()))

    def in_units(offsets):
        return tuple(offset // unit for offset in offsets)

    shared = {"SCALE": variant.scale, "HIDDEN_SIZE": hidden_size, "STRIDE_UNIT": unit, "LEVELS": levels}
    walk = (inner, middle, *in_units(dy_offsets), *in_units(x_offsets), *rstd_offsets)
    gpu = plans.gpu(x.device)
    dtypes = (dy.dtype, x.dtype, weight.dtype)
    # All parts take the plan that the whole has been proved with.
    planned_rows = rows if like_rows is None else like_rows
    planned = None
    if needs_dx and needs_dweight:
        planned = column_reduction(planned_rows, hidden_size, gpu.multiprocessors, gpu.threads, gpu.build)
    plan = launch_plan(planned_rows, hidden_size, planned, x.dtype.itemsize, gpu, dx_mode)
    element_sizes = [dy.element_size(), x.element_size(), *[x.element_size()] * (dx_mode == "accumulate")]
    plan = _fitting(plan, row_reduction(rows, hidden_size, gpu.build), element_sizes, gpu)
    parts = []
    most_sums = 0
    product_size = dy.element_size() if variant.scale == "after_cast" else torch.float32.itemsize
    ranges = split_rows(rows, hidden_size, product_size)
    for index, (first_row, count) in enumerate(ranges):
        columns = column_reduction(count, hidden_size, gpu.multiprocessors, gpu.threads, gpu.build)
        dx = sum_chains = sum_blocks = None
        left = columns.height // plan.rows_per_program if plan.fused else 1
        if needs_dx:
            height = columns.height if plan.fused else plan.rows_per_program
            programs = columns.blocks * left if plan.fused else -(-count // plan.rows_per_program)
            scalars = int(statistics), first_row, count, columns.blocks, *walk, *in_units(dx_offsets)
            dx = _bind_backward(shared, dtypes, row_class(rows), plan, height, dx_mode, x.device, programs, *scalars)
        if needs_dweight:
            most_sums = max(most_sums, columns.blocks * left)
            if not plan.fused:
                scalars = first_row, count, columns.blocks, *walk
                sum_chains = _bind_sum_chains(shared, dtypes[:2], plan, columns, x.device, *scalars)
            scalars = columns.blocks, int(index > 0), int(statistics or index + 1 < len(ranges))
            sum_blocks = bind_sum_blocks(
                *(hidden_size, weight.dtype, left, columns.height, x.device, *scalars),
                of_program=plan.sum_columns,
                log2_steps=plan.sum_log2_steps,
                num_warps=plan.sum_warps,
            )
        parts.append(_Part(dx, sum_chains, sum_blocks))

    def fp32(*shape) -> Empty:
        return allocator(shape, contiguous_strides(shape), torch.float32, x.device)

    backward = Backward(parts, dx_mode)
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


def dx_mode_of(variant: RMSNormFormula, dtype: torch.dtype, d_sum: Optional[torch.Tensor] = None) -> str:
    """The form of the kernel's dx.

    "single": one gradient. "split": two, of activations that are read twice. "accumulate": added to the earlier d_sum.
    """
    if d_sum is not None:
        return "accumulate"
    return "split" if variant.has_two_edges(dtype) else "single"


def _summed(found: Gradients, d_sum: Optional[torch.Tensor]) -> Gradients:
    """The gradients with all those of x summed in `dx`, d_sum first."""
    if found.dx is None or (d_sum is None and found.dx_mean is None):
        return found
    terms = [each for each in (d_sum, found.dx, found.dx_mean) if each is not None]
    return Gradients(functools.reduce(torch.add, terms), None, found.dweight)


def gradients(
    variant: RMSNormFormula,
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
    """The gradients for `dy` from the kernels, or from `formula` where no kernel fits.

    Args:
        joined: x has no other consumer, so its gradients are summed in `dx`.
        d_sum: with `joined`, the earlier gradient of x.
        original: the replaced forward, for reports.
    """
    needs, tensors = (needs_dx, needs_dweight), (dy, x, weight, rstd)
    added = d_sum is not None and needs_dx
    if added:
        tensors = (*tensors, d_sum)
    table = _added_calls if added else _calls
    # The id may belong to another weight by now: everything that decides is compared.
    subject = id(weight) if weight.numel() else id(variant)
    recent = table.recent.get(subject)
    if recent is not None:
        same, known, of_dx, of_dweight, compute = recent
        if (
            have_strides(dy, x)
            and have_strides(weight, rstd)
            and (not added or have_strides(d_sum, d_sum))
            and same(*tensors)
            and known is variant
            and of_dx is needs_dx
            and of_dweight is needs_dweight
            and forward_ad._current_level < 0
            and not dispatch_modes()
        ):
            found = compute(*tensors)
            return _summed(found, None) if joined else found
    call = None
    if are_plain(dy, x) and are_plain(weight, rstd) and (not added or are_plain(d_sum, d_sum)):
        call = call_of(variant, tensors, *needs, original)
    if call is None:
        return joined_formula(variant, dy, x, weight, rstd, needs_dx, needs_dweight, joined, d_sum)
    table.recognise(subject, call, (variant, *needs), tensors)
    found = call(*tensors)
    return _summed(found, None) if joined else found


def call_of(variant, tensors, needs_dx: bool, needs_dweight: bool, original=None) -> Optional["Backward"]:
    """The recorded call for `(dy, x, weight, rstd)` and, where dx is added to it, `d_sum`; None if the formula must run."""
    dy, x, _, _, *d_sum = tensors
    if d_sum and not d_sum[0].stride() == dy.stride() == x.stride():  # Eager's sum decides the result's strides.
        return None
    facts = (variant, needs_dx, needs_dweight)
    original = original or EAGER[variant].forward
    return (_added_calls if d_sum else _calls).find(original, facts, tensors, *facts, original)


def joined_formula(
    variant: RMSNormFormula, dy, x, weight, rstd, needs_dx: bool, needs_dweight: bool, joined, d_sum, dweight_dtype=None
) -> Gradients:
    """`formula`, with the arguments of `gradients`."""
    found = formula(variant, dy, x, weight, rstd, needs_dx, needs_dweight, dweight_dtype)
    return _summed(found, d_sum) if joined else found


def _resolve_call(dy, x, weight, rstd, *more) -> Backward:
    """The launches for these tensors.

    They run once here, since they may have to be compiled. A proof runs contiguous tensors. Another layout may take
    another compiled kernel and another reduction order, so there the gradients are compared with the formula's.

    Raises:
        Outside: `formula` must run, as in a CUDA graph's capture that comes before the comparison; `Failed` if the
            launches fail or their bits differ.
    """
    *d_sum, variant, needs_dx, needs_dweight, original = more
    arguments = variant, dy, x, weight, rstd, needs_dx, needs_dweight
    dx_mode = dx_mode_of(variant, x.dtype, *d_sum)
    ordinary = dy.stride() == x.stride() == contiguous_strides(x.shape)
    compares = not ordinary and proof.policy() != "off" and not launch.is_collecting()
    if compares and proof.is_capturing():
        raise Outside(proof.IN_CAPTURE)
    try:
        backward = resolve(*arguments, dx_mode)
        if compares:
            _compare(arguments, dx_mode, *d_sum)
            proof.forget_capture(original)
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


def _compare(arguments, dx_mode, d_sum=None) -> None:
    """Raises LosslessProofError if the kernels' gradients differ from the formula's; `arguments` as in `resolve`.

    Random numbers stand for the tensors: sums of small enough 16-bit products are exact in every order. The weight's
    gradient is also compared in fp32, since 16 bits hide another order of the rows.
    """
    variant, dy, x, weight, rstd, needs_dx, needs_dweight = arguments
    with proof.undisturbed(x.device):
        random = functools.partial(proof.random_like, generator=proof.generator(x.device, seed=x.shape[-1]))
        dy, x, weight, rstd = random(dy), random(x, exponents=proof.WIDE), random(weight), random(rstd)
        d_sum = d_sum if d_sum is None else random(d_sum)
        arguments = variant, dy, x, weight, rstd, needs_dx, needs_dweight
        dweight_sum = torch.full(weight.shape, math.nan, dtype=torch.float32, device=x.device)
        found = resolve(*arguments, dx_mode, statistics=True)(
            dy, x, weight, rstd, d_sum, torch.empty_like(rstd), dweight_sum
        )
        expected = joined_formula(*arguments, d_sum is not None, d_sum)
        pairs = [(a, b) for a, b in zip(found, expected) if a is not None]
        if needs_dweight:
            product = weight_products(variant, dy, x.to(torch.float32), rstd, x.dtype)
            pairs.append((dweight_sum, product.sum(tuple(range(x.dim() - 1)), dtype=torch.float32)))
        wrong = sum(int(proof.differing(a.flatten(), b.flatten())) for a, b in pairs)
    if wrong:
        raise proof.LosslessProofError(f"{wrong} elements differ")
