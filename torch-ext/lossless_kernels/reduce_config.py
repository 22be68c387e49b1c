"""How ATen's CUDA reductions divide their work (`setReduceConfig` in ATen/native/cuda/Reduce.cuh), as far as it decides
the order of the additions. `kernels_src/summation.py` carries these orders out."""

from dataclasses import dataclass

_MAX_THREADS = 512
_WARP_SIZE = 32
_VECTOR = 4
# The fewest elements that ATen reads as vectors of four.
_MIN_VECTORIZED = 128
# A row is shared by the warps of a block from min(16 * warps, 256) values per thread.
_MIN_VALUES_PER_THREAD = 16
_MAX_VALUES_PER_THREAD = 256
# Every class of row counts that divides work alike, named by its smallest member: 16 stands for 16 and more.
ROW_CLASSES = (1, 2, 4, 8, 16)


def last_power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)


def row_class(rows: int) -> int:
    """The member of `ROW_CLASSES` to which a reduction of `rows` rows belongs."""
    return min(last_power_of_two(rows), ROW_CLASSES[-1])


@dataclass(frozen=True)
class RowReduction:
    """A sum over the last, contiguous dimension: `width * height` lanes share one row.

    The lanes' sums are halved along `width` first and then along `height`. With `vectorized` loads a lane owns groups of
    four neighbouring elements.
    """

    width: int
    height: int
    vectorized: bool

    @property
    def columns(self) -> int:
        """Elements that one step of all lanes takes: each lane has four accumulators."""
        return _VECTOR * self.width * self.height


def row_reduction(rows: int, hidden_size: int) -> RowReduction:
    """The order in which ATen sums each row of a contiguous fp32 [rows, hidden_size], hidden_size a multiple of 4."""
    vectorized = hidden_size >= _MIN_VECTORIZED
    dim0 = hidden_size // _VECTOR if vectorized else hidden_size
    dim0_pow2 = min(last_power_of_two(dim0), _MAX_THREADS)
    rows_pow2 = min(last_power_of_two(rows), _MAX_THREADS)
    width = min(dim0_pow2, _WARP_SIZE)
    height = min(rows_pow2, _MAX_THREADS // width)
    width = min(dim0_pow2, _MAX_THREADS // height)
    values_per_thread = -(-hidden_size // width)
    shared = values_per_thread >= min(_MIN_VALUES_PER_THREAD * height, _MAX_VALUES_PER_THREAD)
    return RowReduction(width, height if shared else 1, vectorized)
