"""How ATen's own kernels for norms divide their sums among threads on CUDA: LayerNorm's and `F.rms_norm`'s sums over rows
(ATen/native/cuda/layer_norm_kernel.cu), and GroupNorm's (group_norm_kernel.cu, block_reduce.cuh).

`reduction.py` has the sum of a row of `F.rms_norm`.
"""

# Sums over rows: the threads that share a column, by the fewest rows (`LaunchGammaBetaBackwardCUDAKernel`).
_COLUMN_THREADS = {1: 1, 64: 8, 128: 16, 256: 32}
# A thread takes so many rows at a time, one after the other: those of every `RUN_OF_ROWS * threads`.
RUN_OF_ROWS = 8
# With more rows ATen may sum blocks of 32 rows, and the blocks' rounded sums.
_MOST_ROWS = 1 << 16

# A block has so many threads, or is a single warp.
WARP, BLOCK = 32, 512
# Up to so many samples are added one after the other, and more by a warp's threads.
_SAMPLES_IN_SEQUENCE = 128


def column_threads(rows: int) -> int:
    """ATen's threads that share a column of so many rows; 0 where they depend on the GPU, and no kernel of ours sums them."""
    return 0 if rows > _MOST_ROWS else next(each for least, each in reversed(_COLUMN_THREADS.items()) if rows >= least)


def fewest_rows(threads: int) -> int:
    """The fewest rows whose columns so many threads share; the inverse of `column_threads`."""
    return next(rows for rows, each in _COLUMN_THREADS.items() if each == threads)


def rows_of_every_order() -> list[int]:
    """The fewest rows of every number of threads that share a column."""
    return list(_COLUMN_THREADS)


def block_threads(elements: int) -> int:
    """ATen's threads that sum the elements of a group, the positions of a channel, or the channels of a group."""
    return WARP if elements < BLOCK else BLOCK


def sample_threads(samples: int) -> int:
    """ATen's threads that sum a channel's samples."""
    return 1 if samples <= _SAMPLES_IN_SEQUENCE else WARP


def fewest_samples(threads: int) -> int:
    """The fewest samples that so many threads sum, the inverse of `sample_threads`; 1 for none."""
    return _SAMPLES_IN_SEQUENCE + 1 if threads == WARP else 1
