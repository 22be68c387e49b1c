"""How the forward kernel is launched: for how many rows a program, with how many warps, and the launch itself."""

import math
from dataclasses import dataclass

import torch

from ...core import launch, plans
from ...core.calls import Outside
from ...core.reduction import ROW_CLASSES, fused_row_reduction, row_class, row_reduction
from . import backward as rms_norm_backward
from .formulas import Variant, in_domain

if launch.AVAILABLE:
    from ...kernels_src.rms_norm import rms_norm_forward


@dataclass(frozen=True)
class Plan:
    """How the forward kernel is launched for one hidden size and one class of row counts.

    Rows that are streamed are read for their sum and once more for the output, instead of waiting in registers. `by_lane`
    they are read for both at once, for the sum in the order of ATen's lanes. Then `programs_per_row` may share a row: each
    reads all of it for the sum, and writes a part. With `prefetch` a program has a later one's rows brought into the L2.
    """

    rows_per_program: int
    num_warps: int
    streamed: bool = False
    prefetch: bool = False
    by_lane: bool = False
    programs_per_row: int = 1

    def programs(self, rows: int) -> int:
        """How many it takes for so many rows."""
        return -(-rows // self.rows_per_program) * self.programs_per_row

    def ahead(self, bytes_per_row: int) -> int:
        """How many programs later those rows are, if a program reads so many bytes for each of its rows; 0 without."""
        return max(_BYTES_AHEAD // (self.rows_per_program * bytes_per_row), 1) if self.prefetch else 0


# Of longer rows a multiprocessor's registers hold too few: they are streamed, and a warp takes so many bytes (H200).
_MAX_KEPT_BYTES = 32 << 10
_STREAMED_BYTES_PER_WARP = 4 << 10
# Elements that a thread keeps in registers, and that a program takes at least (H200).
_ELEMENTS_PER_THREAD = 64
_MIN_ELEMENTS_PER_PROGRAM = 2048
_MAX_WARPS = 16
# The time of a few rows is the wait for what a multiprocessor loads. So programs share a row if that leaves so many columns to
# each, up to so many programs (H200), and if registers hold all that each has under way, with a residual twice as much.
_SHARED_COLUMNS = 1024
_MAX_SHARED_BYTES_ADDED = 64 << 10
_MAX_PROGRAMS_PER_ROW = 8
# What is brought into the L2 lies so far ahead of what is read. From 1 to 4 MB times are alike, of 8192 and 16384 columns best
# at 4; what lies 8 MB ahead is gone again, in part, before it is read (H200, which has an L2 of 60 MB).
_BYTES_AHEAD = 4 << 20


# The ops whose plans may come from a file.
TUNING = {"rms_norm": Plan, "add_rms_norm": Plan}


def launch_plan(
    rows: int, hidden_size: int, element_size: int = 2, gpu: plans.Gpu = plans.UNKNOWN, added: bool = False
) -> Plan:
    """The plan for `rows` rows: the tuned one, or `default_plan` where there is none.

    Args:
        element_size: bytes of an element of the activations.
        added: whether they are rows of the sum with a residual.
    """
    tuned = plans.tuned(Plan, gpu, "add_rms_norm" if added else "rms_norm", hidden_size, rows, element_size)
    return tuned or default_plan(rows, hidden_size, element_size, added)


def planned_rows(hidden_size: int, element_size: int, gpu: plans.Gpu) -> tuple[int, ...]:
    """The fewest rows of every `row_class` and plan, those of a residual's sum included: a proof for each is a proof for any
    number of rows."""
    turns = {rows for op in TUNING for rows in plans.turning_points(gpu, op, hidden_size, element_size)}
    return tuple(sorted({*ROW_CLASSES, *turns}))


# Fewer rows than a training step has, and more than one makes another plan for.
_LEAST_TRAINING_ROWS, _MOST_TRAINING_ROWS = 16, 1 << 17


def training_rows(hidden_size: int, dtype: torch.dtype, device: torch.device, both: bool) -> tuple[int, ...]:
    """The fewest rows, from 16 on, of everything that forward and backward kernels of training are proved for apart, those
    that add a residual or its gradient included.

    Args:
        both: whether the weight's gradient is needed as well as the input's.
    """
    gpu, size = plans.gpu(device), dtype.itemsize
    every_edges = rms_norm_backward.edges_of(dtype), "added"
    ops = *TUNING, *rms_norm_backward.TUNING
    turns = {rows for op in ops for rows in plans.turning_points(gpu, op, hidden_size, size)}
    powers = (1 << power for power in range(_MOST_TRAINING_ROWS.bit_length()))
    found = {}
    for rows in sorted({*powers, *turns}):
        if _LEAST_TRAINING_ROWS <= rows <= _MOST_TRAINING_ROWS:
            proofs = (
                rms_norm_backward.proof_class(rows, hidden_size, device, both, size, edges) for edges in every_edges
            )
            forwards = (launch_plan(rows, hidden_size, size, gpu, added) for added in (False, True))
            found.setdefault((*forwards, *proofs), rows)
    return tuple(found.values())


# Stays away from what a model has in memory: no call of a warmup is larger.
_MAX_WARMUP_ELEMENTS = 1 << 28


def warmup_shapes(weight, dtype: torch.dtype, device: torch.device, rows, training: bool) -> list[tuple[int, int]]:
    """The inputs of a norm that `warmup` calls: with so many `rows`, or of all that is compiled and proved apart."""
    if weight is None:
        raise Outside("a norm without a weight does not tell its hidden size")
    hidden_size = weight.shape[-1]
    if rows is None and in_domain(dtype, weight.dtype, hidden_size):
        if training:
            rows = training_rows(hidden_size, dtype, device, weight.requires_grad)
        else:
            rows = planned_rows(hidden_size, dtype.itemsize, plans.gpu(device))
        rows = [count for count in rows if count * hidden_size <= _MAX_WARMUP_ELEMENTS]
    return [(count, hidden_size) for count in rows or (1,)]


def default_plan(rows: int, hidden_size: int, element_size: int = 2, added: bool = False) -> Plan:
    """A sound plan for any GPU; rows of one `row_class` share it. The arguments are those of `launch_plan`."""
    columns = 1 << (hidden_size - 1).bit_length()
    size = columns * element_size
    few, fit = row_class(rows) < ROW_CLASSES[-1], not added or size <= _MAX_SHARED_BYTES_ADDED
    if few and fit and columns > _SHARED_COLUMNS:
        programs = min(columns // _SHARED_COLUMNS, _MAX_PROGRAMS_PER_ROW)
        return Plan(1, 4 if columns // programs == _SHARED_COLUMNS else 8, by_lane=True, programs_per_row=programs)
    # With residuals so long a row does not stay in a multiprocessor's L1 until it is read again (H200).
    if size > _MAX_KEPT_BYTES and not added:
        return Plan(1, min(size // _STREAMED_BYTES_PER_WARP, _MAX_WARPS), streamed=True)
    order = row_reduction(rows, hidden_size)
    tile = order.columns << order.log2_steps
    rows_per_program = min(max(_MIN_ELEMENTS_PER_PROGRAM // tile, 1), row_class(rows))
    warps = rows_per_program * tile // (_ELEMENTS_PER_THREAD * 32)
    return Plan(rows_per_program, min(max(warps, 1), _MAX_WARPS))


def fused_launch_plan(rows: int, hidden_size: int, dtype: torch.dtype) -> Plan:
    """The plan for the sum of `F.rms_norm`, whose lanes are so few that more threads would have to exchange what they loaded."""
    order = fused_row_reduction(hidden_size)
    tile = order.columns << order.log2_steps
    rows_per_program = min(max(_MIN_ELEMENTS_PER_PROGRAM // tile, 1), row_class(rows))
    threads = rows_per_program * min(tile // _ELEMENTS_PER_THREAD, order.columns * dtype.itemsize // 16)
    return Plan(rows_per_program, max(threads // 32, 1))


def plan_of(variant: Variant, dtype: torch.dtype, hidden_size: int, rows: int, device: torch.device) -> Plan:
    if variant.fused:
        return fused_launch_plan(rows, hidden_size, dtype)
    return launch_plan(rows, hidden_size, dtype.itemsize, plans.gpu(device))


def stride_unit(row_stride: int, dtype: torch.dtype) -> int:
    """The largest power of two that divides the row stride, up to 16 bytes: so many elements can be read at a time."""
    return math.gcd(row_stride, 16 // dtype.itemsize)


def forward(
    variant, dtype, weight_dtype, hidden_size, rows, row_stride, device: torch.device, eps, store_rstd=False, plan=None
) -> launch.Launch:
    """The launch of the forward kernel, to be called with hidden_states, weight, out and rstd.

    Args:
        plan: another one than that for `rows`: a proof runs the very kernel of a larger call.
    """
    if plan is None:
        plan = plan_of(variant, dtype, hidden_size, rows, device)
    unit = stride_unit(row_stride, dtype)
    # Of all rows of a class, so that one kernel serves them.
    order = fused_row_reduction(hidden_size) if variant.fused else row_reduction(row_class(rows), hidden_size)
    constants = {
        "SCALE": variant.scale,
        "HIDDEN_SIZE": hidden_size,
        "STRIDE_UNIT": unit,
        "ROWS": plan.rows_per_program,
        "LOG2_STEPS": order.log2_steps,
        "WIDTH": order.width,
        "HEIGHT": order.height,
        "VECTORIZED": order.vectorized,
        "FUSED": variant.fused,
        "STREAMED": plan.streamed,
        "BY_LANE": plan.by_lane,
        "PARTS": plan.programs_per_row,
        "AHEAD": plan.ahead(hidden_size * dtype.itemsize),
    }
    dtypes = (dtype, weight_dtype, variant.output_dtype(dtype, weight_dtype), torch.float32)
    scalars = rows, row_stride // unit, int(store_rstd), eps
    return launch.bind(rms_norm_forward, constants, plan.num_warps, device, dtypes, plan.programs(rows), *scalars)
