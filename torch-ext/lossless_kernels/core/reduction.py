"""The reduction orders of ATen's reductions on CUDA and ROCm (`setReduceConfig` in ATen/native/cuda/Reduce.cuh), which
`kernels_src/summation.py` implements."""

import math
import struct
from dataclasses import dataclass

_MAX_THREADS = 512
_VECTOR = 4
# The fewest elements that ATen reads as vectors of four.
_MIN_VECTORIZED = 128
# The warps of a block share a row from min(16 * warps, 256) values per thread.
_MIN_VALUES_PER_WARP = 16
_MAX_VALUES_PER_THREAD = 256
# Row counts of a class have one reduction order. A class is named by its smallest member; 16 stands for 16 and more.
ROW_CLASSES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Build:
    """The constants of ATen's reductions whose values depend on what torch was built for.

    Args:
        warp_size: lanes of a warp. AMD calls it a wave.
        neighbours_first: lanes of a warp are summed by offsets 1, 2, 4, ... instead of by halves.
        min_values_per_thread: the fewest for which several blocks share a column.
        min_blocks: the fewest blocks that share a column, if several do.
        fused_threads: threads of a block of the kernel for `F.rms_norm`; a block has one row.
    """

    warp_size: int = 32
    neighbours_first: bool = False
    min_values_per_thread: int = 16
    min_blocks: int = 1
    fused_threads: int = 128


CUDA = Build()
# By warp size: CDNA GPUs have 64 lanes, RDNA GPUs 32.
ROCM = {warp_size: Build(warp_size, True, 128, 64, 256) for warp_size in (32, 64)}


def last_power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def row_class(rows: int) -> int:
    """The member of `ROW_CLASSES` to which a reduction of `rows` rows belongs."""
    return min(last_power_of_two(rows), ROW_CLASSES[-1])


def _block_dimensions(dim0: int, dim1: int, max_threads: int, build: Build) -> tuple[int, int]:
    """ATen's `set_block_dimension`: the threads of a block along the faster and the slower dimension in memory."""
    dim0_pow2, dim1_pow2 = (min(last_power_of_two(dim), max_threads) for dim in (dim0, dim1))
    height = min(dim1_pow2, max_threads // min(dim0_pow2, build.warp_size))
    return min(dim0_pow2, max_threads // height), height


@dataclass(frozen=True)
class RowReduction:
    """A sum over the last, contiguous dimension: `width * height` lanes share one row.

    Halving trees sum the lanes along `width` first and then along `height`. The last `neighbours` lanes along `width`
    are summed by neighbours instead, if they are more than one. A lane has four accumulators. With `vectorized` loads
    they take four neighbouring elements in one step; otherwise each takes one in a separate step.
    """

    hidden_size: int
    width: int
    height: int
    vectorized: bool
    neighbours: int = 1

    @property
    def columns(self) -> int:
        """The number of elements in one step of all lanes."""
        return (_VECTOR if self.vectorized else 1) * self.width * self.height

    @property
    def log2_steps(self) -> int:
        """The logarithm of the number of steps that cover a row, rounded up."""
        return (-(-self.hidden_size // self.columns) - 1).bit_length()

    @property
    def constants(self) -> dict:
        """The constants of a kernel that sums rows in this order."""
        return {
            "LOG2_STEPS": self.log2_steps,
            "WIDTH": self.width,
            "HEIGHT": self.height,
            "VECTORIZED": self.vectorized,
            "NEIGHBOURS": self.neighbours,
        }


def row_reduction(rows: int, hidden_size: int, build: Build = CUDA) -> RowReduction:
    """ATen's reduction order for each row of a contiguous fp32 [rows, hidden_size], hidden_size a multiple of 4."""
    vectorized = hidden_size >= _MIN_VECTORIZED
    dim0 = hidden_size // _VECTOR if vectorized else hidden_size
    width, height = _block_dimensions(dim0, rows, _MAX_THREADS, build)
    values_per_thread = -(-hidden_size // width)
    shared = values_per_thread >= min(_MIN_VALUES_PER_WARP * height, _MAX_VALUES_PER_THREAD)
    neighbours = build.warp_size if build.neighbours_first else 1
    return RowReduction(hidden_size, width, height if shared else 1, vectorized, neighbours)


def fused_row_reduction(hidden_size: int, build: Build = CUDA) -> RowReduction:
    """The reduction order of `F.rms_norm` for each row, for any number of rows (ATen/native/cuda/layer_norm_kernel.cu).

    Each lane has one accumulator. Threads beyond the row's end add zeros to sums of squares and are omitted here.
    """
    lanes = min(2 * last_power_of_two(hidden_size // _VECTOR - 1), build.fused_threads)
    width = min(lanes, build.warp_size)
    return RowReduction(hidden_size, width, lanes // width, vectorized=True)


@dataclass(frozen=True)
class ColumnReduction:
    """A sum over the rows of a dense [rows, hidden_size]: `height * blocks` threads share one column.

    Each has four accumulators, which makes `4 * height * blocks` chains: row r belongs to chain r modulo their number.
    A chain is summed in sequence.
    """

    height: int
    blocks: int


def column_reduction(
    rows: int, hidden_size: int, multiprocessors: int, threads_per_multiprocessor: int, build: Build = CUDA
) -> ColumnReduction:
    """ATen's order for a sum over the rows of a dense [rows, hidden_size], hidden_size more than 1.

    A thread has up to four neighbouring columns: as many as divide hidden_size.
    """
    vector = math.gcd(hidden_size, _VECTOR)
    columns = hidden_size // vector
    width, height = _block_dimensions(columns, rows, _MAX_THREADS // vector, build)
    if rows < min(_MIN_VALUES_PER_WARP * height, _MAX_VALUES_PER_THREAD):
        return ColumnReduction(1, 1)
    values_per_thread = -(-rows // height)
    grid = -(-columns // width)
    target_grid = multiprocessors * (threads_per_multiprocessor // (width * height))
    blocks = 1
    if values_per_thread >= _MAX_VALUES_PER_THREAD and grid <= target_grid:
        blocks = _shared_by(-(-target_grid // grid), values_per_thread, build)
        if blocks > 1:
            blocks = max(blocks, build.min_blocks)
    return ColumnReduction(height, blocks)


def fewest_rows(rows: int, hidden_size: int, *of_gpu) -> int:
    """The fewest rows, up to a factor of two, that have the order of `rows` rows but for the number of blocks.

    Args:
        of_gpu: as in `column_reduction`.
    """

    def order(rows):
        found = column_reduction(rows, hidden_size, *of_gpu)
        return found.height, found.blocks > 1

    least = row_class(rows)
    while least < rows and order(least) != order(rows):
        least *= 2
    return least


def _shared_by(at_once: int, values_per_thread: int, build: Build) -> int:
    """How many blocks share a sum if `at_once` run at once."""
    at_most = -(-values_per_thread // build.min_values_per_thread)
    return max(min(at_once, at_most), -(-values_per_thread // _MAX_VALUES_PER_THREAD))


# ATen indexes a tensor with 32 bits if its last element starts below this many bytes.
_MAX_32_BIT_OFFSET = (1 << 31) - 1


def split_rows(rows: int, hidden_size: int, element_size: int) -> list[tuple[int, int]]:
    """The parts `(first_row, rows)` that ATen sums in sequence: it halves a tensor until 32 bits index each part."""
    if rows == 1 or rows * hidden_size * element_size - element_size + 1 <= _MAX_32_BIT_OFFSET:
        return [(0, rows)]
    half = rows // 2
    second = split_rows(rows - half, hidden_size, element_size)
    return split_rows(half, hidden_size, element_size) + [(half + first, count) for first, count in second]


# Bytes of a vector that ATen loads. The row and column sums above are of fp32 numbers or of four elements at a time.
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class FullReduction:
    """A sum over the elements `[begin, end)` of a contiguous tensor.

    Each of `blocks` blocks has `width` threads, and a thread has `vector` accumulators, one for each element of an aligned
    vector: block b's thread t takes the vectors b * width + t + k * width * blocks for k = 0, 1, ... Threads of the first
    block add the elements before the first vector and after the last one to their first accumulators. Halving trees sum
    a block's threads. Of several blocks the last one sums their results: its thread t those of the blocks t, t + width, ...

    Attributes:
        vector: elements of a vector; 1 below 128 elements, where a thread has at most two elements.
    """

    begin: int
    end: int
    vector: int
    width: int
    blocks: int


def full_reduction(
    elements: int, element_size: int, multiprocessors: int, threads_per_multiprocessor: int
) -> list[FullReduction]:
    """CUDA's reduction order for the sum of a contiguous tensor that begins at a multiple of 16 bytes.

    Parts of at most 2 GiB are summed one after the other: each adds its sum to that of the parts before it.
    """
    return [
        _full_reduction(first, first + count, element_size, multiprocessors, threads_per_multiprocessor)
        for first, count in split_rows(elements, 1, element_size)
    ]


def _full_reduction(begin, end, element_size, multiprocessors, threads_per_multiprocessor) -> FullReduction:
    elements = end - begin
    vector = _VECTOR_BYTES // element_size if elements >= _MIN_VECTORIZED else 1
    width = min(last_power_of_two(elements // vector), _MAX_THREADS)
    values_per_thread = -(-elements // width)
    blocks = 1
    if values_per_thread >= _MAX_VALUES_PER_THREAD:
        blocks = _shared_by(multiprocessors * (threads_per_multiprocessor // width), values_per_thread, CUDA)
    return FullReduction(begin, end, vector, width, blocks)


def reciprocal(number: int) -> float:
    """fp32(1) / fp32(number), by which ATen multiplies where a tensor is divided by a number."""
    (divisor,) = struct.unpack("f", struct.pack("f", number))
    (quotient,) = struct.unpack("f", struct.pack("f", 1.0 / divisor))
    return quotient
