"""The gradients of LayerNorm, with the bits of ATen's operator `native_layer_norm_backward`."""

import functools
import math
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

import torch
from torch.nn import functional

from ..core import launch, plans, proof
from ..core.domain import allocator
from ..core.layout import contiguous_strides

if launch.AVAILABLE:
    from ..kernels_src.layer_norm_backward import layer_norm_backward, layer_norm_sum_rows, layer_norm_sum_threads

# ATen's operator. It sums in another order if a tensor is not aligned to vectors of four elements.
eager = torch.ops.aten.native_layer_norm_backward

Needs = tuple[bool, bool, bool]


class Gradients(NamedTuple):
    dx: Optional[torch.Tensor]
    dweight: Optional[torch.Tensor]
    dbias: Optional[torch.Tensor]


# ATen's threads that share a column, each with runs of eight rows, by the fewest rows (`LaunchGammaBetaBackwardCUDAKernel`).
_RUN = 8
_THREADS = {0: 1, 64: 8, 128: 16, 256: 32}
# With more rows ATen sums blocks of 32 rows, and the blocks' rounded sums, unless a row fills half of the multiprocessors.
_MOST_ROWS, _COLUMNS_OF_BLOCK = 1 << 16, 32


def threads_of(rows: int, size: int, multiprocessors: int) -> int:
    """ATen's threads that share a column of [rows, size]; 0 where it sums in blocks."""
    if rows > _MOST_ROWS and size // _COLUMNS_OF_BLOCK < multiprocessors // 2:
        return 0
    return next(threads for least, threads in reversed(_THREADS.items()) if rows >= least)


# Fewer rows are summed by one kernel, and each has as many warps as ATen gives it.
_FEW_ROWS = 512
# Warps of a program of dx, by the bytes of an element and the most elements of a row, and its rows (H200). Four warps have a
# vector of each step. Longer rows are read twice: registers do not hold dy and x.
_WARPS = {2: {2048: 1, 4096: 2, 14336: 4}, 4: {1024: 1, 2048: 2, 12288: 4}}
_MOST_WARPS, _STEP = 4, 512
_ROWS = {128: 4, 256: 2, 16384: 1}
# Sums over rows: a program's columns, in elements up to a row's size and beyond it in bytes, and the bytes that it has in
# flight (H200); and the columns of a program with all threads, and of one that adds threads' sums.
_SHORT_ROW, _SHORT_COLUMNS, _COLUMN_BYTES, _BYTES_IN_FLIGHT = 2048, 64, 512, 24 << 10
_COLUMNS_OF_ALL, _COLUMNS_OF_SUMS = 16, 32


@dataclass(frozen=True)
class Kind:
    """The properties that the kernels are compiled for.

    Attributes:
        size: elements of a row.
        unit: the number of elements, up to 16 bytes, by which row strides of x are counted.
        weight: whether there is one.
        threads: see `threads_of`.
        few: whether rows are few.
        needs: whether the gradients of x, weight and bias are needed.
    """

    dtype: torch.dtype
    size: int
    unit: int
    weight: bool
    threads: int
    few: bool
    needs: Needs

    def dx(self, rows: int, row_stride: int, device: torch.device) -> launch.Launch:
        """The launch for dy, x, weight, mean, rstd and dx; x stands for a weight that there is not."""
        of_program = next(rows for most, rows in _ROWS.items() if self.size <= most)
        known = (warps for most, warps in _WARPS[self.dtype.itemsize].items() if self.size <= most)
        kept = next(known, None)
        constants = {
            "SIZE": self.size,
            "ROWS": of_program,
            "STRIDE_UNIT": self.unit,
            "WEIGHT": self.weight,
            "AGAIN": kept is None,
        }
        warps = _MOST_WARPS if kept is None or (self.few and self.size >= _STEP) else kept
        dtypes = (*(self.dtype,) * 3, torch.float32, torch.float32, self.dtype)
        scalars = rows, row_stride // self.unit
        return launch.bind(layer_norm_backward, constants, warps, device, dtypes, -(-rows // of_program), *scalars)

    def sum_rows(self, rows: int, row_stride: int, device: torch.device) -> launch.Launch:
        """The launch for dy, x, mean, rstd, and dweight and dbias or the threads' sums."""
        taken, columns, stages = self.tile
        constants = {
            "SIZE": self.size,
            "STRIDE_UNIT": self.unit,
            "THREADS": self.threads,
            "TAKEN": taken,
            "COLUMNS": columns,
            **self._needed,
            "STAGES": stages,
        }
        warps = 1 if taken == 1 else 4
        sums = self._dtypes_of_sums if taken == self.threads else (torch.float32, torch.float32)
        dtypes = (self.dtype, self.dtype, torch.float32, torch.float32, *sums)
        programs = -(-self.size // columns) * (self.threads // taken)
        scalars = rows, row_stride // self.unit
        return launch.bind(layer_norm_sum_rows, constants, warps, device, dtypes, programs, *scalars)

    def sum_threads(self, device: torch.device) -> Optional[launch.Launch]:
        """The launch for both sums of the threads, dweight and dbias; None if `sum_rows` adds them."""
        if self.tile[0] == self.threads:
            return None
        constants = {"SIZE": self.size, "THREADS": self.threads, "COLUMNS": _COLUMNS_OF_SUMS, **self._needed}
        dtypes = (torch.float32, torch.float32, *self._dtypes_of_sums)
        return launch.bind(layer_norm_sum_threads, constants, 4, device, dtypes, -(-self.size // _COLUMNS_OF_SUMS))

    @property
    def tile(self) -> tuple[int, int, int]:
        """A program of `sum_rows`: its threads, columns and stages. Few rows are summed by one kernel, others by two."""
        if self.few and self.threads > 1:
            return self.threads, _COLUMNS_OF_ALL, 1
        columns = _SHORT_COLUMNS if self.size <= _SHORT_ROW else _COLUMN_BYTES // self.dtype.itemsize
        return 1, columns, max(_BYTES_IN_FLIGHT // (2 * _RUN * columns * self.dtype.itemsize), 2)

    @property
    def _needed(self) -> dict:
        return {"DWEIGHT": self.needs[1], "DBIAS": self.needs[2]}

    @property
    def _dtypes_of_sums(self) -> tuple:
        """fp32 numbers stand for a gradient that is not needed."""
        return tuple(self.dtype if need else torch.float32 for need in self.needs[1:])


@dataclass(eq=False)
class Backward:
    """The gradients of all calls of the same shapes, strides, dtypes and device.

    Args:
        dx, sum_rows, sum_threads: None if not needed. Without `sum_rows`, ATen's operator computes a dweight and dbias that are.
        empty_dx: for `[..., *shape]`.
        empty_sum: for the sums of ATen's threads.
        empty_vector: for `shape`, normalized_shape.
    """

    needs: Needs
    shape: tuple
    dx: Optional[launch.Launch]
    sum_rows: Optional[launch.Launch]
    sum_threads: Optional[launch.Launch]
    empty_dx: Callable[[], torch.Tensor]
    empty_sum: Callable[[], torch.Tensor]
    empty_vector: Callable[[], torch.Tensor]
    alignment_mask: int

    def fits(self, dy, x, weight) -> bool:
        """Whether ATen's vectorised kernel takes these tensors, and with it the arithmetic of this one."""
        addresses = dy.data_ptr() | x.data_ptr()
        if weight is not None:
            addresses |= weight.data_ptr()
            if weight.dtype != x.dtype:  # A model's `.to(dtype)` between the passes changes its weights.
                return False
        return dy.dtype == x.dtype and dy.is_contiguous() and not addresses & self.alignment_mask

    def __call__(self, dy, x, mean, rstd, weight, bias) -> Gradients:
        dx = dweight = dbias = None
        _, of_weight, of_bias = self.needs
        if self.dx is not None:
            dx = self.empty_dx()
            self.dx.call_6(dy, x, x if weight is None else weight, mean, rstd, dx)
        if self.sum_rows is not None:
            # mean, which is fp32, stands for tensors that are not written.
            found = [self.empty_vector() if need else mean for need in (of_weight, of_bias)]
            if self.sum_threads is None:
                self.sum_rows.call_6(dy, x, mean, rstd, *found)
            else:
                sums = [self.empty_sum() if need else mean for need in (of_weight, of_bias)]
                self.sum_rows.call_6(dy, x, mean, rstd, *sums)
                self.sum_threads.call_4(*sums, *found)
            dweight, dbias = (each if need else None for each, need in zip(found, (of_weight, of_bias)))
        elif of_weight or of_bias:
            _, dweight, dbias = eager(dy, x, self.shape, mean, rstd, weight, bias, [False, of_weight, of_bias])
        return Gradients(dx, dweight, dbias)


def resolve(x, rows: int, row_stride: int, unit: int, shape: tuple, weight, needs: Needs) -> Optional[Backward]:
    """The gradients of a call in the forward kernel's domain; None if the kernels are not proved.

    Args:
        unit: the number of elements, up to 16 bytes, by which row strides of x are counted.
        shape: normalized_shape.
    """
    device, size = x.device, math.prod(shape)
    threads = threads_of(rows, size, plans.gpu(device).multiprocessors)
    kind = Kind(x.dtype, size, unit, weight is not None, threads, rows < _FEW_ROWS, needs)
    if not _proved(kind, device):
        return None
    sums = threads > 0 and any(needs[1:])
    return Backward(
        needs,
        shape,
        kind.dx(rows, row_stride, device) if needs[0] else None,
        kind.sum_rows(rows, row_stride, device) if sums else None,
        kind.sum_threads(device) if sums else None,
        allocator(x.shape, contiguous_strides(x.shape), x.dtype, device),
        allocator((threads, size), (size, 1), torch.float32, device),
        allocator(shape, contiguous_strides(shape), x.dtype, device),
        4 * x.dtype.itemsize - 1,
    )


def rows_of_every_kind(size: int, device: torch.device) -> list[int]:
    """The fewest rows of every `Kind` of rows of `size` elements."""
    found, beyond = sorted({1, *filter(None, _THREADS), _FEW_ROWS}), _MOST_ROWS + 1
    return found + [beyond] * (threads_of(beyond, size, plans.gpu(device).multiprocessors) == 0)


# Proof


def _proved(kind: Kind, device) -> bool:
    needed = [name for name, need in zip(("input", "weight", "bias"), kind.needs) if need]
    where = f"{kind.dtype}, rows of {kind.size} elements, gradients of {', '.join(needed)}"
    return proof.kernel_is_proved(
        ("layer_norm gradients", kind, device),
        proof.Subject(functional.layer_norm, device, where, "layer_norm"),
        functools.partial(_comparisons, kind, device),
    )


_PROOF_EPS = 1e-5
# dx is compared in so many rows and elements: of 16 bits one in about 100,000 shows how its last products round.
_PROOF_ROWS, _PROOF_ELEMENTS = 128, 1 << 20


def _comparisons(kind: Kind, device):
    if kind.needs[0]:
        for dy, x, weight, mean, rstd in _samples(kind, max(_PROOF_ROWS, _PROOF_ELEMENTS // kind.size), device):
            dx = torch.full_like(dy, math.nan)
            launched = kind.dx(len(x), x.stride(0), device)
            launched(dy, x, x if weight is None else weight, mean, rstd, dx)
            yield (
                "the input's gradient",
                dx,
                eager(dy, x, (kind.size,), mean, rstd, weight, None, [True, False, False])[0],
            )
    if kind.threads and any(kind.needs[1:]):
        for dy, x, weight, mean, rstd in _samples(kind, proof_rows(kind), device):
            needs = kind.needs[1:]
            found = [torch.full((kind.size,), math.nan, dtype=kind.dtype, device=device) for _ in needs]
            sums = outs = [out if need else mean for out, need in zip(found, needs)]
            sum_threads = kind.sum_threads(device)
            if sum_threads is not None:
                sums = torch.full((2, kind.threads, kind.size), math.nan, dtype=torch.float32, device=device).unbind()
            kind.sum_rows(len(x), x.stride(0), device)(dy, x, mean, rstd, *sums)
            if sum_threads is not None:
                sum_threads(*sums, *outs)
            bias = dy[0] if needs[1] else None
            _, *expected = eager(dy, x, (kind.size,), mean, rstd, weight, bias, [False, *needs])
            names = "the weight's gradient", "the bias's gradient"
            yield from ((name, *pair) for name, need, *pair in zip(names, needs, found, expected) if need)


def proof_rows(kind: Kind) -> int:
    """As few or as many rows, with as many threads: no whole number of blocks, and more of them than are in flight."""
    if kind.few:
        return next(least for least, threads in _THREADS.items() if threads == kind.threads) + 5 * _RUN - 3
    return _RUN * kind.threads * (kind.tile[2] + 2) - 5 * _RUN - 3


def _samples(kind: Kind, rows: int, device):
    yield _sample(kind, rows, device)
    yield _cancelling_sample(kind, rows & ~1, device)


def _sample(kind: Kind, rows: int, device):
    """dy, x, weight, mean and rstd: rows of all scales, with means; some have infinities, NaN and numbers beyond fp16."""
    source = proof.generator(device, kind.size)
    normal = functools.partial(proof.normal, source)
    scales = torch.exp2(torch.arange(rows, device=device) % 16 - 8.0)[:, None]
    x, dy = (normal(rows, kind.size) + normal(rows, 1)) * scales, normal(rows, kind.size)
    x[0], x[1], dy[2], dy[3] = 0.0, 3.0, 0.0, -0.0
    # In one column each, so that the sums of others stay finite.
    dy[4, 1], dy[5, 2], x[6, 3] = math.inf, math.nan, 6e4
    return _in_layout(kind, dy, x, normal(kind.size))


def _cancelling_sample(kind: Kind, rows: int, device):
    """Numbers whose sums over a row, and over all rows, are zero but for rounding errors, which are then all that remains.

    The second half of the columns has the numbers of the first elsewhere, and the opposite dy. So has the second half of the
    rows. Where dy is zero, dx consists of the row's sums.
    """
    source = proof.generator(device, kind.size + 1)
    half, half_rows = (kind.size - 2) // 2, rows // 2
    columns, order = (torch.randperm(count, generator=source, device=device) for count in (half, half_rows))
    like = torch.empty(rows, kind.size, dtype=kind.dtype, device=device)
    dy = proof.random_like(like, source, exponents=proof.WIDE)
    x, weight = proof.normal(source, rows, kind.size), proof.normal(source, kind.size)
    dy[:, 2 * half :] = 0.0
    dy[:, half : 2 * half] = -dy[:, :half][:, columns]
    for each in (x, weight):
        each[..., half : 2 * half] = each[..., :half][..., columns]
    x[half_rows:], dy[half_rows:] = x[:half_rows][order], -dy[:half_rows][order]
    return _in_layout(kind, dy, x, weight)


def _in_layout(kind: Kind, dy, x, weight):
    """dy, x with its rows one unit apart, the weight, and the statistics of the forward pass."""
    rows = torch.zeros(len(x), kind.size + kind.unit, dtype=kind.dtype, device=x.device)[:, : kind.size].copy_(x)
    weight = weight.to(kind.dtype) if kind.weight else None
    _, mean, rstd = torch.native_layer_norm(rows, (kind.size,), weight, None, _PROOF_EPS)
    return dy.to(kind.dtype), rows, weight, mean.float(), rstd.float()
