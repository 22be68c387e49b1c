"""The forward kernel's launch configuration, and the launch."""

from dataclasses import dataclass

import torch

from ...core import declarations, launch, plans
from ...core.calls import Outside
from ...core.declarations import WARMUP, Warmup
from ...core.layout import stride_unit
from ...core.reduction import CUDA, ROW_CLASSES, Build, fused_row_reduction, row_class, row_reduction
from .. import layer_norm_backward
from . import backward as rms_norm_backward
from .formulas import RMSNormFormula, in_domain

if launch.AVAILABLE:
    from ...kernels_src.rms_norm import add_rms_norm_forward, rms_norm_forward


@dataclass(frozen=True)
class Plan:
    """The launch configuration of the forward kernel for one hidden size and one class of row counts.

    Args:
        streamed: a row is read for its sum and again for the output, instead of being kept in registers.
        prefetch: a program brings the rows of a later one into the L2.
        by_lane: a row is read once, in the order of ATen's lanes, for the sum and the output.
        programs_per_row: with `by_lane`, programs that share a row: each reads all of it for the sum, writes a part.
    """

    rows_per_program: int
    num_warps: int
    streamed: bool = False
    prefetch: bool = False
    by_lane: bool = False
    programs_per_row: int = 1

    def programs(self, rows: int) -> int:
        """The number of programs for `rows` rows."""
        return -(-rows // self.rows_per_program) * self.programs_per_row

    def ahead(self, bytes_per_row: int) -> int:
        """The distance, in programs, of the rows to prefetch; 0 without."""
        return max(_BYTES_AHEAD // (self.rows_per_program * bytes_per_row), 1) if self.prefetch else 0


# A multiprocessor's registers hold too few longer rows, which are streamed (H200).
_MAX_KEPT_BYTES = 32 << 10
_STREAMED_BYTES_PER_WARP = 4 << 10
# Elements that a thread keeps in registers, and the fewest of a program (H200).
_ELEMENTS_PER_THREAD = 64
_MIN_ELEMENTS_PER_PROGRAM = 2048
_MAX_WARPS = 16
# With few rows a call waits for each multiprocessor's loads. Programs then share a row if each gets this many columns
# (H200), and if registers hold its loads, which a residual doubles.
_SHARED_COLUMNS = 1024
_MAX_SHARED_BYTES_ADDED = 64 << 10
_MAX_PROGRAMS_PER_ROW = 8
# Where prefetching paid (H200): 16 bits, so many rows, and hidden sizes without and with a residual add. GPUs before
# compute capability 9.0 have no such request; on later ones it has not run.
_LEAST_PREFETCHING, _LEAST_PREFETCHED_ROWS = 9, 8192
_PREFETCHED, _PREFETCHED_ADDED = range(1024, 8192 + 1), range(1024, 5120 + 1)
# Prefetch distance. Times are equal from 1 to 4 MB, and best at 4 for 8192 and 16384 columns. At 8 MB a part is evicted
# before it is read (H200, L2 of 60 MB).
_BYTES_AHEAD = 4 << 20
# Of a thread of 32 warps, so that two programs fit a multiprocessor. Triton 3.9 would use 38. With rows, weights or outputs of
# fp32 there is no limit: they would spill.
_MAX_REGISTERS = 32


TUNING = {"rms_norm": Plan, "add_rms_norm": Plan}
declarations.TUNING.update(TUNING)


def launch_plan(
    rows: int, hidden_size: int, element_size: int = 2, gpu: plans.Gpu = plans.UNKNOWN, added: bool = False
) -> Plan:
    """The tuned plan for `rows` rows, or `default_plan`.

    Args:
        element_size: bytes of an element of the activations.
        added: whether the kernel is the fused add + RMSNorm.
    """
    tuned = plans.tuned(Plan, gpu, "add_rms_norm" if added else "rms_norm", hidden_size, rows, element_size)
    return tuned or default_plan(rows, hidden_size, element_size, added, gpu)


def rows_of_every_plan(hidden_size: int, element_size: int, gpu: plans.Gpu) -> tuple[int, ...]:
    """The fewest rows of every `row_class` and plan, fused add + RMSNorm too: their proofs cover all row counts."""
    boundaries = {rows for op in TUNING for rows in plans.plan_boundaries(gpu, op, hidden_size, element_size)}
    if any(_is_prefetched(_LEAST_PREFETCHED_ROWS, hidden_size, element_size, added, gpu) for added in (False, True)):
        boundaries.add(_LEAST_PREFETCHED_ROWS)
    return tuple(sorted({*ROW_CLASSES, *boundaries}))


# A training step has more rows, and no plan changes beyond.
_LEAST_TRAINING_ROWS, _MOST_TRAINING_ROWS = 16, 1 << 17


def rows_of_every_training_plan(
    hidden_size: int, dtype: torch.dtype, device: torch.device, both: bool
) -> tuple[int, ...]:
    """The fewest rows, from 16 on, of every training proof, forward and backward, residual add included.

    Args:
        both: whether the gradients of both the weight and the input are needed.
    """
    gpu, size = plans.gpu(device), dtype.itemsize
    # "single" and "split" have the same plans.
    dx_modes = "single", "accumulate"
    ops = *TUNING, *rms_norm_backward.TUNING
    boundaries = {rows for op in ops for rows in plans.plan_boundaries(gpu, op, hidden_size, size)}
    powers = (1 << power for power in range(_MOST_TRAINING_ROWS.bit_length()))
    found = {}
    for rows in sorted({*powers, *boundaries}):
        if _LEAST_TRAINING_ROWS <= rows <= _MOST_TRAINING_ROWS:
            proofs = (
                rms_norm_backward.proof_class(rows, hidden_size, device, both, size, dx_mode) for dx_mode in dx_modes
            )
            forwards = (launch_plan(rows, hidden_size, size, gpu, added) for added in (False, True))
            found.setdefault((*forwards, *proofs), rows)
    return tuple(found.values())


# The largest call of a warmup, which shares the memory with a model.
_MAX_WARMUP_ELEMENTS = 1 << 28


def warmup_shapes(weight, dtype: torch.dtype, device: torch.device, rows, training: bool) -> list[tuple[int, int]]:
    """The inputs that `warmup` calls a norm with: with the given `rows`, or one for each kernel and proof."""
    if weight is None:
        raise Outside("a norm without a weight has no hidden size")
    hidden_size = weight.shape[-1]
    if rows is None and in_domain(dtype, weight.dtype, hidden_size):
        if training:
            rows = rows_of_every_training_plan(hidden_size, dtype, device, weight.requires_grad)
        else:
            rows = rows_of_every_plan(hidden_size, dtype.itemsize, plans.gpu(device))
        rows = [count for count in rows if count * hidden_size <= _MAX_WARMUP_ELEMENTS]
    return [(count, hidden_size) for count in rows or (1,)]


def warmup_shapes_of_torch(
    weight, dtype: torch.dtype, device: torch.device, rows, training: bool
) -> list[tuple[int, int]]:
    """The same for `F.rms_norm`, the kernels of whose gradients are LayerNorm's."""
    found = warmup_shapes(weight, dtype, device, rows, training)
    if rows is None and training:
        found += [(count, weight.shape[-1]) for count in layer_norm_backward.rows_of_every_kind()]
    return sorted(set(found))


WARMUP.update(dict.fromkeys(("LlamaRMSNorm", "RMSNormZeroCentered", "RMSNormGated"), Warmup(warmup_shapes)))
WARMUP["TorchRMSNorm"] = Warmup(warmup_shapes_of_torch)


def _is_prefetched(rows: int, hidden_size: int, element_size: int, added: bool, gpu: plans.Gpu) -> bool:
    return (
        gpu.compute_capability is not None
        and gpu.compute_capability >= _LEAST_PREFETCHING
        and element_size == 2
        and rows >= _LEAST_PREFETCHED_ROWS
        and hidden_size in (_PREFETCHED_ADDED if added else _PREFETCHED)
    )


def default_plan(
    rows: int, hidden_size: int, element_size: int = 2, added: bool = False, gpu: plans.Gpu = plans.UNKNOWN
) -> Plan:
    """A sound plan for any GPU; rows of one `row_class` share it, but for prefetching. The arguments are those of
    `launch_plan`."""
    columns = 1 << (hidden_size - 1).bit_length()
    size = columns * element_size
    few, fit = row_class(rows) < ROW_CLASSES[-1], not added or size <= _MAX_SHARED_BYTES_ADDED
    if few and fit and columns > _SHARED_COLUMNS:
        programs = min(columns // _SHARED_COLUMNS, _MAX_PROGRAMS_PER_ROW)
        return Plan(1, 4 if columns // programs == _SHARED_COLUMNS else 8, by_lane=True, programs_per_row=programs)
    # With a residual so long a row is evicted from the L1 before it is read again (H200).
    if size > _MAX_KEPT_BYTES and not added:
        return Plan(1, min(size // _STREAMED_BYTES_PER_WARP, _MAX_WARPS), streamed=True)
    order = row_reduction(rows, hidden_size, gpu.build)
    tile = order.columns << order.log2_steps
    rows_per_program = min(max(_MIN_ELEMENTS_PER_PROGRAM // tile, 1), row_class(rows))
    warps = rows_per_program * tile // (_ELEMENTS_PER_THREAD * 32)
    prefetch = _is_prefetched(rows, hidden_size, element_size, added, gpu)
    return Plan(rows_per_program, min(max(warps, 1), _MAX_WARPS), prefetch=prefetch)


def fused_launch_plan(rows: int, hidden_size: int, dtype: torch.dtype, build: Build = CUDA) -> Plan:
    """The plan for `F.rms_norm`, whose reduction has few lanes: more threads would have to exchange their loads."""
    order = fused_row_reduction(hidden_size, build)
    tile = order.columns << order.log2_steps
    rows_per_program = min(max(_MIN_ELEMENTS_PER_PROGRAM // tile, 1), row_class(rows))
    threads = rows_per_program * min(tile // _ELEMENTS_PER_THREAD, order.columns * dtype.itemsize // 16)
    return Plan(rows_per_program, max(threads // 32, 1))


def plan_of(
    variant: RMSNormFormula, dtype: torch.dtype, hidden_size: int, rows: int, device: torch.device, added: bool = False
) -> Plan:
    gpu = plans.gpu(device)
    if variant.fused:
        return fused_launch_plan(rows, hidden_size, dtype, gpu.build)
    return launch_plan(rows, hidden_size, dtype.itemsize, gpu, added)


def forward(
    variant, dtype, weight_dtype, hidden_size, rows, row_stride, device, eps, store_rstd=False, plan=None, added=False
) -> launch.Launch:
    """The launch of the forward kernel.

    It is called with hidden_states, weight, out and rstd, or with hidden_states, residual, weight, out, their sum and rstd.

    Args:
        plan: overrides the plan for `rows`: a proof runs the kernel of a larger call.
        added: whether the kernel is the fused add + RMSNorm, whose rows have no gaps.
    """
    if plan is None:
        plan = plan_of(variant, dtype, hidden_size, rows, device, added)
    unit = stride_unit(row_stride, dtype)
    # One kernel serves all rows of a class.
    build = plans.gpu(device).build
    if variant.fused:
        order = fused_row_reduction(hidden_size, build)
    else:
        order = row_reduction(row_class(rows), hidden_size, build)
    constants = {
        "SCALE": variant.scale,
        "HIDDEN_SIZE": hidden_size,
        "STRIDE_UNIT": unit,
        "ROWS": plan.rows_per_program,
        **order.constants,
        "FUSED": variant.fused,
        "STREAMED": plan.streamed,
        "BY_LANE": plan.by_lane,
        "PROGRAMS_PER_ROW": plan.programs_per_row,
        "AHEAD": plan.ahead((1 + added) * hidden_size * dtype.itemsize),
    }
    kernel, stride = (add_rms_norm_forward, ()) if added else (rms_norm_forward, (row_stride // unit,))
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    inputs, sums = (dtype,) * (1 + added), (dtype,) * added
    dtypes = *inputs, weight_dtype, variant.output_dtype(dtype, weight_dtype), *sums, torch.float32
    programs, scalars = plan.programs(rows), (rows, *stride, int(store_rstd), eps)
    in_16_bits = all(each.itemsize == 2 for each in dtypes[:-1])
    limited = in_16_bits and plan.num_warps == 32 and plans.gpu(device).compute_capability
    most = _MAX_REGISTERS if limited else None
    return launch.bind(kernel, constants, plan.num_warps, device, dtypes, programs, *scalars, max_registers=most)
