"""The gradients of LayerNorm and of `F.rms_norm`, with the bits of ATen's operators `native_layer_norm_backward` and
`_fused_rms_norm_backward`, whose kernels are the same but for the mean."""

import functools
import math
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

import torch
from torch.nn import functional

from ..core import launch, norms, proof
from ..core.domain import allocator, are_as_saved, layouts_of
from ..core.layout import contiguous_strides, stride_unit, stride_with_gap
from ..core.torch_internals import fused_rms_norm_backward
from .affine_norm import Gradients, Needs

if launch.AVAILABLE:
    from ..kernels_src.layer_norm_backward import layer_norm_backward, layer_norm_sum_rows, layer_norm_sum_threads


def eager(dy, x, shape: tuple, mean, rstd, weight, bias, needs: Needs) -> Gradients:
    """Those of ATen's operator, of `F.rms_norm` if there is no mean. It sums in another order if a tensor is not aligned to
    vectors of four elements."""
    if mean is None:
        return Gradients(*fused_rms_norm_backward(dy, x, shape, rstd, weight, list(needs[:2])), None)
    return Gradients(*torch.ops.aten.native_layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, list(needs)))


# Fewer rows are summed by one kernel, and have four warps each for dx, as in ATen.
_FEW_ROWS = 512


# Warps of a program of dx, by the bytes of an element and the most elements of a row, and its rows (H200). Four warps have a
# vector of each step. Longer rows are read twice: registers do not hold dy and x.
_WARPS = {2: {2048: 1, 4096: 2, 14336: 4}, 4: {1024: 1, 2048: 2, 12288: 4}}
_MOST_WARPS, _STEP = 4, 512
# Of few rows with at most so many bytes each the weight stays in registers, too, as it does of rows that are read twice (H200).
_MOST_KEPT = 16 << 10
_ROWS = {128: 4, 256: 2, 16384: 1}
# Sums over rows: a program's columns, in elements up to a row's size and beyond it in bytes, and the bytes that it has in
# flight (H200); and the columns of a program with all threads, and of one that adds threads' sums.
_SHORT_ROW, _SHORT_COLUMNS, _COLUMN_BYTES, _BYTES_IN_FLIGHT = 2048, 64, 512, 24 << 10
_COLUMNS_OF_ALL, _COLUMNS_OF_SUMS = 16, 32


@dataclass(frozen=True)
class OfInput:
    """The properties that the kernel of dx is compiled for.

    Attributes:
        size: elements of a row.
        unit: the number of elements, up to 16 bytes, by which row strides of x are counted.
        weight: whether there is one.
        few: whether rows are few.
        centred: whether a row's mean is subtracted, as in LayerNorm.
    """

    dtype: torch.dtype
    size: int
    unit: int
    weight: bool
    few: bool
    centred: bool = True
    overlaps: bool = False

    def launch(self, rows: int, row_stride: int, device: torch.device) -> launch.Launch:
        """The launch for dy, x, weight, mean, rstd and dx; x stands for a weight that there is not, and rstd for means."""
        of_program = next(rows for most, rows in _ROWS.items() if self.size <= most)
        warps = next((warps for most, warps in _WARPS[self.dtype.itemsize].items() if self.size <= most), None)
        again = warps is None
        constants = {
            "SIZE": self.size,
            "ROWS": of_program,
            "STRIDE_UNIT": self.unit,
            "WEIGHT": self.weight,
            "CENTRED": self.centred,
            "AGAIN": again,
            "OVERLAPS": self.overlaps,
            "KEPT": again or (self.few and self.size * self.dtype.itemsize <= _MOST_KEPT),
        }
        if again or (self.few and self.size >= _STEP):
            warps = _MOST_WARPS
        dtypes = (*(self.dtype,) * 3, torch.float32, torch.float32, self.dtype)
        scalars = rows, row_stride // self.unit
        programs = -(-rows // of_program)
        return launch.bind(
            layer_norm_backward, constants, warps, device, dtypes, programs, *scalars, overlaps=self.overlaps
        )


class Tile(NamedTuple):
    """A program of the sums over rows: ATen's threads and the columns that it takes."""

    threads: int
    columns: int
    stages: int


@dataclass(frozen=True)
class OfVectors:
    """The properties that the kernels of dweight and dbias are compiled for.

    Attributes:
        size, unit, few, centred, overlaps: as in `OfInput`.
        threads: those of `norms.column_threads`; at least one.
        dweight, dbias: which of them are needed.
    """

    dtype: torch.dtype
    size: int
    unit: int
    few: bool
    threads: int
    dweight: bool
    dbias: bool
    centred: bool = True
    overlaps: bool = False

    def sum_rows(self, rows: int, row_stride: int, device: torch.device) -> launch.Launch:
        """The launch for dy, x, mean, rstd, and dweight and dbias or the threads' sums."""
        tile = self.tile
        constants = {
            "SIZE": self.size,
            "STRIDE_UNIT": self.unit,
            "THREADS": self.threads,
            "TAKEN": tile.threads,
            "COLUMNS": tile.columns,
            "DWEIGHT": self.dweight,
            "DBIAS": self.dbias,
            "CENTRED": self.centred,
            "STAGES": tile.stages,
            "OVERLAPS": self.overlaps,
        }
        sums = self._dtypes if tile.threads == self.threads else (torch.float32, torch.float32)
        dtypes = (self.dtype, self.dtype, torch.float32, torch.float32, *sums)
        programs = -(-self.size // tile.columns) * (self.threads // tile.threads)
        scalars = rows, row_stride // self.unit
        warps = 1 if tile.threads == 1 else 4
        return launch.bind(layer_norm_sum_rows, constants, warps, device, dtypes, programs, *scalars)

    def sum_threads(self, device: torch.device) -> Optional[launch.Launch]:
        """The launch for both sums of the threads, dweight and dbias; None if `sum_rows` adds them."""
        if self.tile.threads == self.threads:
            return None
        constants = {
            "SIZE": self.size,
            "THREADS": self.threads,
            "COLUMNS": _COLUMNS_OF_SUMS,
            "DWEIGHT": self.dweight,
            "DBIAS": self.dbias,
        }
        dtypes = (torch.float32, torch.float32, *self._dtypes)
        return launch.bind(layer_norm_sum_threads, constants, 4, device, dtypes, -(-self.size // _COLUMNS_OF_SUMS))

    @property
    def tile(self) -> Tile:
        """Few rows are summed by one kernel, others by two."""
        if self.few and self.threads > 1:
            return Tile(self.threads, _COLUMNS_OF_ALL, 1)
        columns = _SHORT_COLUMNS if self.size <= _SHORT_ROW else _COLUMN_BYTES // self.dtype.itemsize
        return Tile(1, columns, max(_BYTES_IN_FLIGHT // (2 * norms.RUN_OF_ROWS * columns * self.dtype.itemsize), 2))

    @property
    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Those of dweight and dbias. fp32 numbers stand for one that is not needed."""
        return tuple(self.dtype if need else torch.float32 for need in (self.dweight, self.dbias))


@dataclass(eq=False)
class Backward:
    """The gradients of all calls of the same shapes, strides, dtypes and device.

    Args:
        layouts: of x and the weight.
        dx, sum_rows, sum_threads: None if not needed. Without `sum_rows` ATen's operator computes those of dweight and dbias
            that are needed.
        empty_dx: for `[..., *shape]`.
        empty_sum: for the sums of ATen's threads.
        empty_vector: for `shape`, normalized_shape.
        overlaps: dx runs beside `sum_rows`, which is launched first.
    """

    needs: Needs
    shape: tuple
    layouts: tuple
    dx: Optional[launch.Launch]
    sum_rows: Optional[launch.Launch]
    sum_threads: Optional[launch.Launch]
    empty_dx: Callable[[], torch.Tensor]
    empty_sum: Callable[[], torch.Tensor]
    empty_vector: Callable[[], torch.Tensor]
    alignment_mask: int
    overlaps: bool

    def fits(self, dy, x, weight) -> bool:
        """Whether ATen's vectorised kernel takes a contiguous dy and these tensors, and with it the arithmetic of this one.

        Autograd does not notice if `.to(dtype)` or a new `.data` has changed a weight since the forward pass.
        """
        addresses = dy.data_ptr() | x.data_ptr() | (0 if weight is None else weight.data_ptr())
        return not addresses & self.alignment_mask and dy.dtype == x.dtype and are_as_saved(self.layouts, x, weight)

    def __call__(self, dy, x, mean, rstd, weight, bias) -> Gradients:
        """mean is None for `F.rms_norm`."""
        dweight = dbias = None
        _, of_weight, of_bias = self.needs
        means = rstd if mean is None else mean
        dx = None if self.dx is None else self.empty_dx()
        of_dx = dy, x, x if weight is None else weight, means, rstd, dx
        if dx is not None and not self.overlaps:
            self.dx.call_6(*of_dx)
        if self.sum_rows is not None:
            # rstd, which is fp32, stands for tensors that are not written.
            sums = found = [self.empty_vector() if need else rstd for need in (of_weight, of_bias)]
            if self.sum_threads is not None:
                sums = [self.empty_sum() if need else rstd for need in (of_weight, of_bias)]
            self.sum_rows.call_6(dy, x, means, rstd, *sums)
            if self.overlaps:
                self.dx.call_6(*of_dx)
            if self.sum_threads is not None:
                self.sum_threads.call_4(*sums, *found)
            dweight, dbias = (each if need else None for each, need in zip(found, (of_weight, of_bias)))
        elif of_weight or of_bias:
            _, dweight, dbias = eager(dy, x, self.shape, mean, rstd, weight, bias, (False, of_weight, of_bias))
        return Gradients(dx, dweight, dbias)


def resolve(
    x, rows: int, row_stride: int, shape: tuple, weight, needs: Needs, centred: bool = True
) -> Optional[Backward]:
    """The gradients of a call in the forward kernel's domain; None if a kernel is not proved.

    Args:
        row_stride: of x.
        shape: normalized_shape.
        centred: those of LayerNorm, otherwise of `F.rms_norm`.
    """
    device, size, few = x.device, math.prod(shape), rows < _FEW_ROWS
    unit = stride_unit(row_stride, x.dtype)
    threads = norms.column_threads(rows) if any(needs[1:]) else 0
    overlaps = needs[0] and threads > 0 and _overlap(few, size * x.dtype.itemsize) and launch.can_overlap(device)
    of_input = OfInput(x.dtype, size, unit, weight is not None, few, centred, overlaps)
    of_vectors = OfVectors(x.dtype, size, unit, few, threads, *needs[1:], centred, overlaps)
    what = f"gradient of the input{', beside sums over rows' * overlaps}"
    if needs[0] and not _proved(of_input, what, _comparisons_of_dx, device):
        return None
    if threads and not _proved(of_vectors, _what(of_vectors), _comparisons_of_vectors, device):
        return None
    return Backward(
        needs,
        shape,
        layouts_of(x, weight),
        of_input.launch(rows, row_stride, device) if needs[0] else None,
        of_vectors.sum_rows(rows, row_stride, device) if threads else None,
        of_vectors.sum_threads(device) if threads else None,
        allocator(x.shape, contiguous_strides(x.shape), x.dtype, device),
        allocator((threads, size), (size, 1), torch.float32, device),
        allocator(shape, contiguous_strides(shape), x.dtype, device),
        4 * x.dtype.itemsize - 1,
        overlaps,
    )


def _overlap(few: bool, row_bytes: int) -> bool:
    """Whether dx and the sums over rows take less time at once than one after the other (H200)."""
    return few or row_bytes <= 4 << 10


def rows_of_every_kind() -> list[int]:
    """The fewest rows of every kernel and proof."""
    return [*norms.rows_of_every_order(), _FEW_ROWS]


# Proof


def _what(kind: OfVectors) -> str:
    of = [name for name, need in (("weight", kind.dweight), ("bias", kind.dbias)) if need]
    least = norms.fewest_rows(kind.threads) if kind.few else _FEW_ROWS
    return f"gradients of {' and '.join(of)}, {least} or more rows"


def _proved(kind, what: str, comparisons: Callable, device) -> bool:
    original, formula = functional.layer_norm, "layer_norm"
    if not kind.centred:
        weighted = isinstance(kind, OfVectors) or kind.weight
        original, formula = functional.rms_norm, "F.rms_norm" if weighted else "F.rms_norm without weight"
    where = f"{kind.dtype}, rows of {kind.size} elements, {what}"
    return proof.kernel_is_proved(
        ("layer_norm gradients", kind, device),
        proof.Subject(original, device, where, formula),
        functools.partial(comparisons, kind, device),
    )


_PROOF_EPS = 1e-5
# dx is compared in so many rows and elements: of 16 bits one in about 100,000 shows how its last products round.
_PROOF_ROWS, _PROOF_ELEMENTS = 128, 1 << 20
# Sums over rows are compared in so many columns that differ: all columns of a long row would take half a gigabyte.
_PROOF_COLUMNS = 512


def _comparisons_of_dx(kind: OfInput, device):
    rows = max(_PROOF_ROWS, _PROOF_ELEMENTS // kind.size)
    for sample in (_sample, _cancelling_sample):
        dy, x, weight, mean, rstd = _in_layout(kind, kind.weight, sample(kind, rows, kind.size, device))
        dx = torch.full_like(dy, math.nan)
        means = rstd if mean is None else mean
        if kind.overlaps:
            _launch_sums_before(kind, rows, dy, x, means, rstd)
        kind.launch(rows, x.stride(0), device)(dy, x, x if weight is None else weight, means, rstd, dx)
        yield "the input's gradient", dx, eager(dy, x, (kind.size,), mean, rstd, weight, None, (True, False, False)).dx


def _launch_sums_before(kind: OfInput, rows: int, dy, x, means, rstd) -> None:
    """Launches the kernel that dx of this kind overlaps, as a call does."""
    properties = kind.dtype, kind.size, kind.unit, kind.few, norms.column_threads(rows)
    of_vectors = OfVectors(*properties, True, False, kind.centred, overlaps=True)
    shape, dtype = (kind.size,), kind.dtype
    if of_vectors.sum_threads(x.device) is not None:
        shape, dtype = (of_vectors.threads, kind.size), torch.float32
    sums = torch.empty(shape, dtype=dtype, device=x.device)
    of_vectors.sum_rows(rows, x.stride(0), x.device)(dy, x, means, rstd, sums, rstd)


def _comparisons_of_vectors(kind: OfVectors, device):
    rows, needs = proof_rows(kind), (kind.dweight, kind.dbias)
    for sample in (_sample, _cancelling_sample):
        numbers = sample(kind, rows, min(kind.size, _PROOF_COLUMNS), device)
        dy, x, weight, mean, rstd = _in_layout(kind, True, numbers)
        found = [torch.full((kind.size,), math.nan, dtype=kind.dtype, device=device) for _ in needs]
        sums = outs = [out if need else rstd for out, need in zip(found, needs)]
        sum_threads = kind.sum_threads(device)
        if sum_threads is not None:
            sums = torch.full((2, kind.threads, kind.size), math.nan, dtype=torch.float32, device=device).unbind()
        kind.sum_rows(rows, x.stride(0), device)(dy, x, rstd if mean is None else mean, rstd, *sums)
        if sum_threads is not None:
            sum_threads(*sums, *outs)
        bias = weight if kind.dbias else None
        _, *expected = eager(dy, x, (kind.size,), mean, rstd, weight, bias, (False, *needs))
        names = "the weight's gradient", "the bias's gradient"
        yield from ((name, *pair) for name, need, *pair in zip(names, needs, found, expected) if need)


def proof_rows(kind: OfVectors) -> int:
    """As few or as many rows, with as many threads: no whole number of blocks, and more of them than are in flight."""
    run = norms.RUN_OF_ROWS
    if kind.few:
        return norms.fewest_rows(kind.threads) + 5 * run - 3
    return run * kind.threads * (kind.tile.stages + 2) - 5 * run - 3


def _sample(kind, rows: int, columns: int, device):
    """dy, x and weight: rows of all scales, with means; some have infinities, NaN and numbers beyond fp16."""
    normal = functools.partial(proof.normal, proof.generator(device, kind.size))
    scales = torch.exp2(torch.arange(rows, device=device) % 16 - 8.0)[:, None]
    x, dy = (normal(rows, columns) + normal(rows, 1)) * scales, normal(rows, columns)
    x[0], x[1], dy[2], dy[3] = 0.0, 3.0, 0.0, -0.0
    # In one column each, so that the sums of others stay finite.
    dy[4, 1], dy[5, 2], x[6, 3] = math.inf, math.nan, 6e4
    return dy, x, normal(columns)


def _cancelling_sample(kind, rows: int, columns: int, device):
    """dy, x and weight whose sums over a row, and over all rows, are zero but for rounding errors: these are all that remains.

    The second half of the columns has the numbers of the first elsewhere, and the opposite dy. So has the second half of the
    rows. Where dy is zero, dx consists of the row's sums.
    """
    source = proof.generator(device, kind.size + 1)
    half, half_rows = (columns - 2) // 2, rows // 2
    column, row = (torch.randperm(count, generator=source, device=device) for count in (half, half_rows))
    like = torch.empty(rows, columns, dtype=kind.dtype, device=device)
    dy = proof.random_like(like, source, exponents=proof.WIDE)
    x, weight = proof.normal(source, rows, columns), proof.normal(source, columns)
    dy[:, 2 * half :], dy[2 * half_rows :] = 0.0, 0.0
    dy[:, half : 2 * half] = -dy[:, :half][:, column]
    for each in (x, weight):
        each[..., half : 2 * half] = each[..., :half][..., column]
    second = slice(half_rows, 2 * half_rows)
    x[second], dy[second] = x[:half_rows][row], -dy[:half_rows][row]
    return dy, x, weight


def _in_layout(kind, has_weight: bool, numbers):
    """dy, x with gaps between its rows, the weight, and the statistics of rows filled with the columns."""
    dy, x, weight = (each.to(kind.dtype) for each in numbers)
    dy, x, weight = (each.tile(-(-kind.size // each.shape[-1]))[..., : kind.size] for each in (dy, x, weight))
    row_stride = stride_with_gap(kind.size, kind.unit, kind.dtype)
    rows = torch.zeros(len(x), row_stride, dtype=kind.dtype, device=x.device)[:, : kind.size].copy_(x)
    weight = weight.contiguous() if has_weight else None
    dy = dy.contiguous()
    if not kind.centred:
        return dy, rows, weight, None, torch.rsqrt(rows.float().square().mean(1, keepdim=True) + _PROOF_EPS)
    _, mean, rstd = torch.native_layer_norm(rows, (kind.size,), weight, None, _PROOF_EPS)
    return dy, rows, weight, mean.float(), rstd.float()
