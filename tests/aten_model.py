"""The arithmetic of PyTorch's CUDA kernels, and of ROCm's sums, in plain torch ops: every rounding and every order.

CUDA eager adds in an order of its own, and CPU eager in another. This file states CUDA's, so that
a kernel can be held to the same bits where there is no GPU. Only elementwise fp32 `+`, `*`, `/`
and dtype casts are used (and exact fp64 in the one FMA): each is rounded once, to nearest even,
and gives the same bits on a CPU and on a GPU. Sequential sums run step by step, whole tensors wide.

Sources: ATen/native/cuda/Reduce.cuh (in every torch wheel, under torch/include) for the sums,
ATen/TensorIterator.cpp for the halving of very large tensors, ReduceMomentKernel.cu for the mean,
ActivationSiluKernel.cu and ActivationGeluKernel.cu for SiLU and GELU, PowKernel.cu and BinaryMiscBackwardOpsKernels.cu for
parts of GELU as transformers writes it, tools/autograd/derivatives.yaml for the gradients, CUDA's libdevice for tanh and erf.
`rsqrt`, `exp` and `exp2` have no such guarantee: a CPU's differ from a GPU's in the last bit, so they are
arguments, or their results are.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional, Union

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1
# Accumulators of one thread (vt0), the width of a vector load of fp32 and of an output vector.
ACCUMULATORS = 4


@dataclass(frozen=True)
class Device:
    """What ATen asks of a GPU, and whether it was compiled with USE_ROCM."""

    sms: int
    threads_per_sm: int
    warp_size: int = 32
    rocm: bool = False


H200 = Device(sms=132, threads_per_sm=2048)


@dataclass(frozen=True)
class Tree:
    """How one sum is cut up: `width` x `height` threads a block, `ctas` blocks an output.

    `shared` is true where the `height` warps of a block work on the same output.
    """

    width: int
    height: int
    shared: bool
    ctas: int

    @property
    def warps(self) -> int:
        """Warps of one block that share an output."""
        return self.height if self.shared else 1


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _floor_power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def _block_shape(dim0: int, dim1: int, max_threads: int, device: Device) -> tuple[int, int]:
    """`set_block_dimension`: threads along the fastest dimension and along the other one."""
    dim0 = min(_floor_power_of_two(dim0), max_threads)
    dim1 = min(_floor_power_of_two(dim1), max_threads)
    width = min(dim0, device.warp_size)
    height = min(dim1, max_threads // width)
    width = min(dim0, max_threads // height)
    return width, height


def _tree(
    width: int,
    height: int,
    inputs: int,
    lanes_per_input: int,
    outputs: int,
    lanes_per_output: int,
    device: Device,
) -> Tree:
    """The rest of `setReduceConfig`: do warps share an output, do blocks?"""
    if _ceil_div(inputs, lanes_per_input) < min(height * 16, 256):
        return Tree(width, height, shared=False, ctas=1)
    values_per_thread = _ceil_div(inputs, lanes_per_input * height)
    grid = _ceil_div(outputs, lanes_per_output)
    target_grid = device.sms * (device.threads_per_sm // (width * height))
    ctas = 1
    if values_per_thread >= 256 and grid <= target_grid:
        ctas = max(
            min(_ceil_div(target_grid, grid), _ceil_div(values_per_thread, 128 if device.rocm else 16)),
            _ceil_div(values_per_thread, 256),
        )
        if ctas > 1 and device.rocm:
            ctas = max(ctas, 64)
    return Tree(width, height, shared=True, ctas=ctas)


def row_tree(rows: int, hidden_size: int, device: Device = H200) -> Tree:
    """The tree of an fp32 sum over the last dimension of [rows, hidden_size], contiguous."""
    vectorized = hidden_size >= 128
    dim0 = hidden_size // ACCUMULATORS if vectorized else hidden_size
    width, height = _block_shape(dim0, rows, 512, device)
    return _tree(width, height, hidden_size, width, rows, 1, device)


def column_tree(rows: int, hidden_size: int, device: Device = H200) -> Tree:
    """The tree of a sum over the rows of [rows, hidden_size], contiguous, any of the dtypes."""
    vector = math.gcd(hidden_size, 4)
    vectors = hidden_size // vector
    width, height = _block_shape(vectors, rows, 512 // vector, device)
    return _tree(width, height, rows, 1, vectors, width, device)


def _chain_sums(values: Tensor, chains: int, dim: int) -> Tensor:
    """Sums of every `chains`-th value along `dim`, each in sequence from 0, in fp32.

    A chain that has run out adds nothing. (Nothing is not -0: a sum that began at +0 is never -0.)
    """
    size = values.shape[dim]
    shape = list(values.shape)
    shape[dim] = chains
    sums = torch.zeros(shape, dtype=torch.float32, device=values.device)
    for start in range(0, size, chains):
        step = values.narrow(dim, start, min(chains, size - start)).float()
        sums.narrow(dim, 0, step.shape[dim]).add_(step)
    return sums


def _combine_accumulators(values: Tensor, dim: int) -> Tensor:
    a0, a1, a2, a3 = values.unbind(dim)
    return ((a0 + a1) + a2) + a3


def _halving_sum(values: Tensor, dim: int) -> Tensor:
    """Tree over a power of two: the upper half is added to the lower until one is left."""
    while values.shape[dim] > 1:
        half = values.shape[dim] // 2
        values = values.narrow(dim, 0, half) + values.narrow(dim, half, half)
    return values.squeeze(dim)


def _sum_along_x(values: Tensor, device: Device) -> Tensor:
    """`block_x_reduce` of the last dimension: threads of different warps by halves, and those of a warp by halves too.

    ROCm shuffles by 1, 2, 4, ...: lane 0 has the sum of its first 2, 4, 8, ... neighbours.
    """
    while device.rocm and values.shape[-1] > device.warp_size:
        lower, upper = values.chunk(2, -1)
        values = lower + upper
    while device.rocm and values.shape[-1] > 1:
        values = values[..., ::2] + values[..., 1::2]
    return _halving_sum(values, dim=-1)


def _check_matrix(values: Tensor) -> None:
    if values.dim() != 2:
        raise ValueError(f"values must be [rows, hidden_size], got shape {tuple(values.shape)}")


def row_sum(values: Tensor, total_rows: Optional[int] = None, device: Device = H200) -> Tensor:
    """`values.sum(-1)` of a contiguous fp32 [rows, hidden_size] as CUDA adds it: fp32 [rows].

    A row's order depends on how many rows come with it. `total_rows` names that number where
    `values` holds only some of them.
    """
    _check_matrix(values)
    if values.shape[1] == 0 or values.shape[1] % ACCUMULATORS:
        # An unaligned head and tail: another arithmetic.
        raise ValueError(f"hidden_size must be a multiple of 4, got {values.shape[1]}")
    if values.dtype != torch.float32:
        raise TypeError(f"values must be float32, got {values.dtype}")
    rows, hidden_size = values.shape
    if rows == 0:
        return values.new_zeros(0)
    total_rows = rows if total_rows is None else total_rows
    tree = row_tree(total_rows, hidden_size, device)
    if hidden_size >= 131072 and not _fits_32bit_indexing(total_rows, hidden_size, 4, INT32_MAX):
        # The rows are halved first, and with rows this long the blocks per row depend on how many.
        raise NotImplementedError("rows of 131072 values and more, in over 2 GiB")

    lanes = tree.width * tree.warps * tree.ctas
    sums = _chain_sums(values, ACCUMULATORS * lanes, dim=1)
    if hidden_size >= 128:
        # A lane loads vectors of four neighbours and keeps one accumulator per position.
        sums = _combine_accumulators(sums.view(rows, lanes, ACCUMULATORS), dim=2)
    else:
        sums = _combine_accumulators(sums.view(rows, ACCUMULATORS, lanes), dim=1)
    sums = sums.view(rows, tree.ctas, tree.warps, tree.width)
    sums = _halving_sum(_sum_along_x(sums, device), dim=2)
    if tree.ctas == 1:
        return sums.view(rows)
    # The last block to finish sums all blocks' results, now over the warps first.
    sums = _chain_sums(sums, tree.width * tree.height, dim=1)
    sums = sums.view(rows, tree.height, tree.width)
    return _sum_along_x(_halving_sum(sums, dim=1), device)


def _fits_32bit_indexing(rows: int, hidden_size: int, element_size: int, limit: int) -> bool:
    """`TensorIterator::can_use_32bit_indexing`: is the last element's byte offset, plus 1, in range?

    So exactly 2 GiB still fit.
    """
    return 1 + (rows * hidden_size - 1) * element_size <= limit


def _column_sum_of_part(values: Tensor, device: Device) -> Tensor:
    rows, hidden_size = values.shape
    tree = column_tree(rows, hidden_size, device)
    step = tree.warps * tree.ctas
    sums = _chain_sums(values, ACCUMULATORS * step, dim=0)
    sums = _combine_accumulators(sums.view(ACCUMULATORS, step, hidden_size), dim=0)
    sums = _halving_sum(sums.view(tree.ctas, tree.warps, hidden_size), dim=1)
    if tree.ctas > 1:
        sums = _chain_sums(sums, tree.height, dim=0)
        sums = _halving_sum(sums, dim=0)
    return sums.view(hidden_size)


def column_sum(
    values: Tensor,
    device: Device = H200,
    element_size: Optional[int] = None,
    indexing_limit: int = INT32_MAX,
) -> Tensor:
    """`values.sum(0)` of a contiguous [rows, hidden_size] as CUDA adds it: fp32 [hidden_size].

    The result is not yet rounded to the dtype of `values`. `element_size` is the size in bytes of
    the elements ATen reads, where `values` is a widened copy of them. Above `indexing_limit` bytes
    ATen halves the rows, sums each part by itself and adds the parts in order.
    """
    _check_matrix(values)
    if values.shape[1] < 2:
        # A sum over everything: another arithmetic.
        raise ValueError(f"hidden_size must be at least 2, got {values.shape[1]}")
    element_size = values.element_size() if element_size is None else element_size
    rows, hidden_size = values.shape
    if rows == 0:
        return torch.zeros(hidden_size, dtype=torch.float32, device=values.device)

    def parts(part: Tensor):
        if _fits_32bit_indexing(part.shape[0], hidden_size, element_size, indexing_limit):
            yield part
        else:
            half = part.shape[0] // 2
            yield from parts(part[:half])
            yield from parts(part[half:])

    total = None
    for part in parts(values):
        part_sum = _column_sum_of_part(part, device)
        total = part_sum if total is None else total + part_sum
    return total


def full_tree(elements: int, vector: int, device: Device = H200) -> Tree:
    """The tree of a sum over all of a contiguous tensor, which ATen reads in vectors of `vector` elements from 128 on."""
    width, height = _block_shape(elements // vector if elements >= 128 else elements, 1, 512, device)
    return _tree(width, height, elements, width, 1, 1, device)


def _full_sum_of_part(values: Tensor, vector: int, misaligned: int, device: Device) -> Tensor:
    tree = full_tree(len(values), vector, device)
    lanes = tree.width * tree.warps * tree.ctas
    if len(values) < 128:
        sums = _combine_accumulators(_chain_sums(values, ACCUMULATORS * lanes, dim=0).view(ACCUMULATORS, lanes), dim=0)
    else:
        accumulators = torch.zeros(lanes, vector, device=values.device)
        if misaligned:
            # Threads from `misaligned` on take the elements before the first vector.
            accumulators[misaligned:vector, 0] += values[: vector - misaligned].float()
            values = values[vector - misaligned :]
        end = len(values) // vector * vector
        for step in values[:end].float().view(-1, vector).split(lanes):
            accumulators[: len(step)] += step
        # The first threads take the elements after the last vector.
        accumulators[: len(values) - end, 0] += values[end:].float()
        sums = accumulators[:, 0]
        for accumulator in accumulators.unbind(1)[1:]:
            sums = sums + accumulator
    blocks = _sum_along_x(sums.view(tree.ctas, tree.width), device)
    if tree.ctas == 1:
        return blocks.view(())
    return _sum_along_x(_chain_sums(blocks, tree.width, dim=0), device)


def full_sum(
    values: Tensor,
    device: Device = H200,
    element_size: Optional[int] = None,
    indexing_limit: int = INT32_MAX,
) -> Tensor:
    """`values.sum(dtype=torch.float32)` of a contiguous tensor that begins at a multiple of 16 bytes.

    Vectors have 16 bytes. Above `indexing_limit` bytes ATen halves the tensor, and adds the parts' sums in order.
    `element_size` is that of the numbers that ATen reads, where `values` is a widened copy of them.
    """
    values = values.reshape(-1)
    element_size = values.element_size() if element_size is None else element_size
    total, vector = None, 16 // element_size

    def parts(begin: int, end: int):
        if _fits_32bit_indexing(1, end - begin, element_size, indexing_limit):
            yield begin, end
        else:
            half = begin + (end - begin) // 2
            yield from parts(begin, half)
            yield from parts(half, end)

    for begin, end in parts(0, len(values)):
        part = _full_sum_of_part(values[begin:end], vector, begin % vector, device)
        total = part if total is None else total + part
    return total


def mean_factor(rows: int, hidden_size: int) -> Tensor:
    """The fp32 factor that turns a row's sum into its mean: float(rows) / float(rows * hidden_size).

    Both conversions round, so beyond 2^24 elements it need not be fp32(1 / hidden_size).
    """
    outputs = torch.tensor(rows, dtype=torch.int64).float()
    inputs = torch.tensor(rows * hidden_size, dtype=torch.int64).float()
    return outputs / inputs


class RowStatistics(NamedTuple):
    """Of each row of x [..., hidden_size], fp32 [...]."""

    sum: Tensor
    mean: Tensor
    rstd: Tensor


def rms_norm_statistics(
    x: Tensor,
    eps: float,
    total_rows: Optional[int] = None,
    rsqrt: Callable[[Tensor], Tensor] = torch.rsqrt,
    device: Device = H200,
) -> RowStatistics:
    """sum = sum of h*h, mean = h.pow(2).mean(-1), rstd = rsqrt(mean + eps), with h = x.float()."""
    hidden_size = x.shape[-1]
    hidden_states = x.float().reshape(-1, hidden_size)
    total_rows = hidden_states.shape[0] if total_rows is None else total_rows
    sums = row_sum(hidden_states * hidden_states, total_rows, device).view(x.shape[:-1])
    if x.numel() == 0:
        return RowStatistics(sums, sums, sums)
    mean = sums * mean_factor(total_rows, hidden_size).to(x.device)
    eps_fp32 = torch.tensor(eps, dtype=torch.float32, device=x.device)
    return RowStatistics(sums, mean, rsqrt(mean + eps_fp32))


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """`a * b` of any two of fp32, fp16, bf16: an fp32 product, rounded to the promoted dtype."""
    return (a.float() * b.float()).to(torch.promote_types(a.dtype, b.dtype))


def normalize(x: Tensor, rstd: Tensor) -> Tensor:
    """(x.float() * rstd) rounded to the dtype of x; x [..., hidden_size], rstd fp32 [...]."""
    return (x.float() * rstd.unsqueeze(-1)).to(x.dtype)


def scale(normalized: Tensor, weight: Tensor) -> Tensor:
    """weight * normalized, in promote_types(weight.dtype, normalized.dtype)."""
    return _multiply(weight, normalized)


def rms_norm_given_rstd(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """Eager LlamaRMSNorm from the root on: y in promote_types(weight.dtype, x.dtype)."""
    return scale(normalize(x, rstd), weight)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    total_rows: Optional[int] = None,
    rsqrt: Callable[[Tensor], Tensor] = torch.rsqrt,
    device: Device = H200,
) -> Tensor:
    """Eager LlamaRMSNorm: x [..., hidden_size], weight [hidden_size], each fp32, fp16 or bf16."""
    rstd = rms_norm_statistics(x, eps, total_rows, rsqrt, device).rstd
    return rms_norm_given_rstd(x, weight, rstd)


def rms_norm_input_gradient(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    total_rows: Optional[int] = None,
    device: Device = H200,
    two_edges: bool = False,
) -> tuple[Tensor, ...]:
    """What autograd adds to the gradient of x, one tensor for each time that it adds.

    A 16-bit x receives one gradient, rounded once from the fp32 sum of the two terms. For an fp32
    x `x.to(float32)` is x itself, so both terms reach its accumulator, one after the other. So they do with `two_edges`,
    each rounded to the dtype of x: T5LayerNorm multiplies x itself by rstd.
    """
    hidden_size = x.shape[-1]
    hidden_states = x.float()
    rstd = rstd.unsqueeze(-1)
    grad_normalized = _multiply(dy, weight).to(x.dtype).float()
    grad_rstd = row_sum((grad_normalized * hidden_states).reshape(-1, hidden_size), total_rows, device).view(rstd.shape)
    grad_mean = (-0.5 * grad_rstd) * ((rstd * rstd) * rstd)
    # ATen divides by a host scalar by multiplying with its reciprocal.
    reciprocal = torch.ones(()) / torch.tensor(float(hidden_size), dtype=torch.float32)
    grad_squares = grad_mean * reciprocal.to(x.device)
    through_product = grad_normalized * rstd
    through_mean = grad_squares * (2.0 * hidden_states)
    if two_edges or x.dtype == torch.float32:
        return through_product.to(x.dtype), through_mean.to(x.dtype)
    return ((through_product + through_mean).to(x.dtype),)


def _rows_in_memory_order(values: Tensor, strides: tuple[int, ...]) -> Tensor:
    """[..., hidden_size] as [rows, hidden_size], the rows in the order that `strides` lays them."""
    leading = sorted(range(values.dim() - 1), key=lambda dim: -strides[dim])
    return values.permute(*leading, values.dim() - 1).reshape(-1, values.shape[-1])


def rms_norm_weight_gradient(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    device: Device = H200,
    indexing_limit: int = INT32_MAX,
) -> Tensor:
    """sum over the rows of dy * normalized: [hidden_size], in the dtype of weight.

    The product is rounded to promote_types(dy.dtype, x.dtype), and so is the sum.
    """
    normalized = normalize(x, rstd)
    product = _multiply(dy, normalized)
    if product.dim() == 1:
        # The shape is the weight's already, so autograd sums nothing.
        return product.to(weight.dtype)
    # TensorIterator sums in memory order, and the product is laid out like dy before x.
    strides = (dy * normalized).stride()
    sums = column_sum(_rows_in_memory_order(product, strides), device, indexing_limit=indexing_limit)
    return sums.to(product.dtype).to(weight.dtype)


class Gradients(NamedTuple):
    """dx: the one tensor, or the two of an fp32 x and of T5LayerNorm, that autograd adds up. dweight [hidden_size]."""

    dx: tuple[Tensor, ...]
    dweight: Tensor


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, device: Device = H200, two_edges: bool = False
) -> Gradients:
    """Both gradients of eager LlamaRMSNorm, of T5LayerNorm with `two_edges`; dy in promote_types(weight.dtype, x.dtype)."""
    return Gradients(
        rms_norm_input_gradient(dy, x, weight, rstd, device=device, two_edges=two_edges),
        rms_norm_weight_gradient(dy, x, weight, rstd, device=device),
    )


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fp32 a * b + c, rounded once.

    The product is exact in fp64; the sum is rounded there to *odd*, which keeps what the second
    rounding, to fp32, needs to know (Boldo and Melquiond, "Emulation of FMA and correctly rounded
    sums: proved algorithms using rounding to odd", 2008).
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    # Knuth's TwoSum: total + error is the exact sum.
    addend_part = total - product
    error = (product - (total - addend_part)) + (addend - addend_part)
    bits = total.view(torch.int64)
    to_odd = (error != 0) & torch.isfinite(total) & (bits & 1 == 0)
    away_from_zero = (error > 0) == (total > 0)
    neighbour = torch.where(away_from_zero, bits + 1, bits - 1)
    return torch.where(to_odd, neighbour, bits).view(torch.float64).float()


def fused_rms_norm_statistics(
    x: Tensor,
    eps: float,
    rsqrt: Callable[[Tensor], Tensor] = torch.rsqrt,
    multiply_add: Callable[[Tensor, Tensor, Tensor], Tensor] = fused_multiply_add,
    device: Device = H200,
) -> RowStatistics:
    """Those of `F.rms_norm`: sum, mean = sum / hidden_size and rstd = rsqrt(mean + eps), hidden_size a multiple of 4.

    A row has 4 warps of 32 threads, on ROCm 256 threads. Thread t squares the elements 4t .. 4t+3 of every 512 (1024) in
    memory order, each by an FMA onto one accumulator; sums halve over the lanes of a warp and then over the warps
    (layer_norm_kernel.cu). Whether hipcc makes an FMA there is not known.
    """
    hidden_size, count = x.shape[-1], 256 if device.rocm else 128
    rows = torch.nn.functional.pad(x.float().reshape(-1, hidden_size), (0, -hidden_size % (4 * count)))
    threads = torch.zeros(rows.shape[0], count, device=x.device)
    for step in rows.view(rows.shape[0], -1, count, 4).unbind(1):
        for element in step.unbind(-1):
            threads = multiply_add(element, element, threads)
    warps = threads.view(-1, count // device.warp_size, device.warp_size)
    sums = _halving_sum(_halving_sum(warps, 2), 1).view(x.shape[:-1])
    # On the device: a scalar of the CPU would be divided by as a product with its reciprocal.
    mean = sums / torch.tensor(float(hidden_size), dtype=torch.float32, device=x.device)
    return RowStatistics(sums, mean, rsqrt(mean + torch.tensor(eps, dtype=torch.float32, device=x.device)))


def fused_rms_norm_given_rstd(x: Tensor, weight: Optional[Tensor], rstd: Tensor) -> Tensor:
    """`F.rms_norm` from the root on, rounded once: x and weight of one dtype."""
    normalized = x.float() * rstd.unsqueeze(-1)
    return (normalized if weight is None else weight.float() * normalized).to(x.dtype)


class Moments(NamedTuple):
    """Of rows [R, N], fp32 [R]: the mean and the mean of squared differences from it."""

    mean: Tensor
    variance: Tensor


def layer_norm_combine(below, above, fma):
    """`cuWelfordCombine(dataB=below, dataA=above)` of (mean, M2, count); nvcc makes FMAs of the last products."""
    (mean_b, m2_b, count_b), (mean_a, m2_a, count_a) = below, above
    delta, count = mean_b - mean_a, count_a + count_b
    factor = torch.where(count > 0, 1.0 / count.clamp(min=1.0), 0.0)
    n_a, n_b = (count_a * factor).expand_as(mean_a), (count_b * factor).expand_as(mean_b)
    mean = fma(mean_a, n_a, n_b * mean_b)
    m2 = fma(n_b, count_a * (delta * delta), m2_a + m2_b)
    some = count > 0
    return torch.where(some, mean, 0.0), torch.where(some, m2, 0.0), count


def layer_norm_moments(
    x: Tensor,
    fma: Callable[[Tensor, Tensor, Tensor], Tensor] = fused_multiply_add,
    combine: Callable = layer_norm_combine,
    threads: int = 128,
) -> Moments:
    """Of rows [R, N] as `F.layer_norm` finds them, N a multiple of 4 (layer_norm_kernel.cu, `compute_stats`).

    Thread t of 128 takes the elements 4t .. 4t+3 of every 512 in memory order. For each of them (`cuWelfordOnlineSum`) it
    counts, and moves its mean by an FMA with the correctly rounded reciprocal of the count, and M2 by another. Warps combine
    their lanes by halves, lane l with lane l + 16, and the block its 4 warps.
    """
    rows, size = x.shape
    h = x.float()
    mean, m2, count = torch.zeros(rows, threads), torch.zeros(rows, threads), torch.zeros(threads)
    for start in range(0, size, 4 * threads):
        vectors = h[:, start : start + 4 * threads].unflatten(1, (-1, 4))
        active = vectors.shape[1]
        for value in vectors.unbind(2):
            count[:active] += 1
            delta = value - mean[:, :active]
            reciprocal = (1.0 / count[:active]).expand_as(delta)
            mean[:, :active] = fma(delta, reciprocal, mean[:, :active].clone())
            m2[:, :active] = fma(delta, value - mean[:, :active], m2[:, :active].clone())
    moments = [each.view(-1, threads // 32, 32) for each in (mean, m2, count.expand(rows, -1))]
    while moments[0].shape[2] > 1:
        moments = combine(*zip(*(each.chunk(2, 2) for each in moments)), fma)
    moments = [each[..., 0] for each in moments]
    while moments[0].shape[1] > 1:
        moments = combine(*zip(*(each.chunk(2, 1) for each in moments)), fma)
    return Moments(moments[0][:, 0], moments[1][:, 0] / torch.tensor(float(size)))


class LayerNorm(NamedTuple):
    out: Tensor
    mean: Tensor
    rstd: Tensor


def layer_norm(
    x: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    rsqrt: Callable[[Tensor], Tensor] = torch.rsqrt,
    fma: Callable[[Tensor, Tensor, Tensor], Tensor] = fused_multiply_add,
    cast: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to,
    moments: Callable[..., Moments] = layer_norm_moments,
) -> LayerNorm:
    """`native_layer_norm` of rows [R, N] in one dtype, by ATen's vectorised kernel; not with a bias alone."""
    mean, variance = moments(x, fma)
    rstd = rsqrt(variance + torch.tensor(eps, dtype=torch.float32))
    out = rstd[:, None] * (x.float() - mean[:, None])
    if weight is not None:
        factor = weight.float().expand_as(out)
        out = factor * out if bias is None else fma(factor, out, bias.float().expand_as(out))
    return LayerNorm(cast(out, x.dtype), mean[:, None], rstd[:, None])


class LayerNormGradients(NamedTuple):
    dx: Tensor
    dweight: Tensor
    dbias: Tensor


def layer_norm_row_sums(terms, centred, rstd, fma, threads: int = 128) -> tuple[Tensor, Tensor]:
    """The sums of terms [R, N] and of terms * centred * rstd over each row (`layer_norm_grad_input_kernel_vectorized`).

    Thread t of 128 takes the elements 4t .. 4t+3 of every 512 in sequence; nvcc makes FMAs of the second sum's last product.
    `BlockReduceSum` adds the lanes of a warp by halves, and as many values as a block of 32 warps would have: its 4 warps' and
    zeros.
    """
    rows, size = terms.shape
    a, b = torch.zeros(rows, threads), torch.zeros(rows, threads)
    for start in range(0, size, 4 * threads):
        both = [each[:, start : start + 4 * threads].unflatten(1, (-1, 4)) for each in (terms, terms * centred)]
        active = both[0].shape[1]
        for term, product in zip(*(each.unbind(2) for each in both)):
            a[:, :active] = a[:, :active] + term
            b[:, :active] = fma(rstd.expand_as(product), product, b[:, :active].clone())
    found = []
    for lanes in (a, b):
        lanes = lanes.view(rows, threads // 32, 32)
        while lanes.shape[2] > 1:
            lower, upper = lanes.chunk(2, 2)
            lanes = lower + upper
        warps = torch.cat([lanes[..., 0], torch.zeros(rows, 32 - threads // 32)], 1)
        while warps.shape[1] > 1:
            lower, upper = warps.chunk(2, 1)
            warps = lower + upper
        found.append(warps)
    return found[0], found[1]


def layer_norm_threads(rows: int, size: int, device: Device = H200) -> int:
    """Threads that share a column of its gradients' sums over rows; 0: blocks of 32 rows, whose sums ATen rounds."""
    if rows > 65536 and size // 32 < device.sms // 2:
        return 0
    return 1 if rows < 64 else 8 if rows < 128 else 16 if rows < 256 else 32


def layer_norm_column_sums(dy, centred, rstd, fma, threads: int, run: int = 8) -> tuple[Tensor, Tensor]:
    """The sums of dy * centred * rstd and of dy [R, N] over the rows (`GammaBetaBackwardCUDAKernelTemplate`).

    Thread t takes the rows 8t .. 8t+7 of every 8 * threads in sequence, and zeros for rows that do not exist; nvcc makes FMAs of
    the first sum's last product. A halving tree adds the threads.
    """
    missing = -len(dy) % (run * threads)
    runs = [
        torch.cat([each, torch.zeros(missing, each.shape[1])]).view(-1, threads, run, each.shape[1])
        for each in (dy, dy * centred, rstd)
    ]
    dweight, dbias = torch.zeros(2, threads, dy.shape[1]).unbind()
    for block in zip(*runs):
        for term, product, factor in zip(*(each.unbind(1) for each in block)):
            dbias = dbias + term
            dweight = fma(factor.expand_as(product), product, dweight)
    while len(dweight) > 1:
        dweight, dbias = (lower + upper for lower, upper in (each.chunk(2) for each in (dweight, dbias)))
    return dweight[0], dbias[0]


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Optional[Tensor],
    mean: Optional[Tensor],
    rstd: Tensor,
    fma: Callable[[Tensor, Tensor, Tensor], Tensor] = fused_multiply_add,
    cast: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to,
    row_sums: Callable = layer_norm_row_sums,
    column_sums: Callable = layer_norm_column_sums,
) -> LayerNormGradients:
    """`native_layer_norm_backward` of rows [R, N] in one dtype, all aligned to vectors of four; not of blocks of 32 rows.

    Without means dx and dweight are `_fused_rms_norm_backward`'s.
    """
    g, size = dy.float(), torch.tensor(float(x.shape[1]))
    centred = x.float() if mean is None else x.float() - mean
    factor = torch.ones(x.shape[1]) if weight is None else weight.float()
    a, b = row_sums(g * factor, centred, rstd, fma)
    dx = fma(g, (size * factor).expand_as(g), -((centred * rstd) * b))
    dx = (dx if mean is None else dx - a) * (rstd * (torch.ones(()) / size))
    sums = column_sums(g, centred, rstd, fma, layer_norm_threads(*x.shape))
    return LayerNormGradients(cast(dx, x.dtype), *(cast(each, x.dtype) for each in sums))


class GroupNorm(NamedTuple):
    out: Tensor
    mean: Tensor
    rstd: Tensor


def group_norm_combine(below, above, fma):
    """`WelfordOps::combine(a=below, b=above)` of (mean, M2, count) in SharedReduceOps.h; nvcc makes FMAs of the last products."""
    (mean_a, m2_a, count_a), (mean_b, m2_b, count_b) = below, above
    delta, count = mean_b - mean_a, count_a + count_b
    share = (count_b / count.clamp(min=1.0)).expand_as(mean_a)
    mean = fma(delta, share, mean_a)
    m2 = fma((delta * delta) * count_a, share, m2_a + m2_b)
    mean, m2 = torch.where(count_b == 0, mean_a, mean), torch.where(count_b == 0, m2_a, m2)
    return torch.where(count_a == 0, mean_b, mean), torch.where(count_a == 0, m2_b, m2), count


def in_turns(values: Tensor, threads: int, vector: int) -> Iterator[Tensor]:
    """The elements [..., N] that the threads take one after the other: thread t the vectors t, t + threads, ... in sequence. The
    threads behind the last have none."""
    vectors = values.unflatten(-1, (-1, vector))
    for start in range(0, vectors.shape[-2], threads):
        yield from vectors[..., start : start + threads, :].unbind(-1)


def group_norm_moments(
    x: Tensor,
    fma: Callable[[Tensor, Tensor, Tensor], Tensor] = fused_multiply_add,
    combine: Callable = group_norm_combine,
    threads: Optional[int] = None,
    quotient: Callable[[Tensor, Tensor], Tensor] = torch.div,
    vector: int = 1,
) -> Moments:
    """Of rows [R, N], the groups, as `F.group_norm` finds them (group_norm_kernel.cu, `RowwiseMomentsCUDAKernel`; from torch 2.15
    on `RowwiseMomentsContiguousCUDAKernel`, which has vectors of 16 bytes).

    A row of fewer than 512 elements has 32 threads, a longer one 512; thread t takes the vectors t, t + threads, ... For each
    of them (`WelfordOps::reduce`) it counts, moves its mean by the correctly rounded quotient of the difference and the count,
    and M2 by an FMA. Warps combine their lanes by halves, lane l with lane l + 16, and the block its warps.
    """
    rows, size = x.shape
    threads = threads or (32 if size < 512 else 512)
    h = x.float()
    h = in_turns(h, threads, vector)
    mean, m2, count = torch.zeros(rows, threads), torch.zeros(rows, threads), torch.zeros(threads)
    for value in h:
        active = value.shape[1]
        count[:active] += 1
        delta = value - mean[:, :active]
        mean[:, :active] += quotient(delta, count[:active].expand_as(delta))
        m2[:, :active] = fma(delta, value - mean[:, :active], m2[:, :active].clone())
    moments = [each.view(-1, threads // 32, 32) for each in (mean, m2, count.expand(rows, -1))]
    while moments[0].shape[2] > 1:
        moments = combine(*zip(*(each.chunk(2, 2) for each in moments)), fma)
    moments = [each[..., 0] for each in moments]
    while moments[0].shape[1] > 1:
        moments = combine(*zip(*(each.chunk(2, 1) for each in moments)), fma)
    return Moments(moments[0][:, 0], moments[1][:, 0] / torch.tensor(float(size)))


def group_norm(
    x: Tensor,
    groups: int,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    rounded: bool,
    rsqrt: Callable[[Tensor], Tensor] = torch.rsqrt,
    fma: Callable[[Tensor, Tensor, Tensor], Tensor] = fused_multiply_add,
    cast: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to,
    moments: Callable[..., Moments] = group_norm_moments,
) -> GroupNorm:
    """`native_group_norm` of a contiguous x [N, C, HxW] in one dtype; not with a bias alone.

    `rounded`: the output is computed with the mean and rstd of the dtype, as up to torch 2.11. Both versions return these.
    """
    samples, channels, positions = x.shape
    mean, variance = moments(x.reshape(samples * groups, -1), fma)
    rstd = rsqrt(variance + torch.tensor(eps, dtype=x.dtype).float())
    saved = [cast(each, x.dtype).view(samples, groups) for each in (mean, rstd)]
    if rounded:
        mean, rstd = (each.float().flatten() for each in saved)
    mean, rstd = (
        each.repeat_interleave(channels // groups).view(samples, channels, 1).expand(x.shape) for each in (mean, rstd)
    )
    h = x.float()
    if weight is None or positions == 1:
        out = (h - mean) * rstd
        if weight is not None:
            factor = weight.float()[:, None].expand_as(out)
            out = factor * out if bias is None else fma(out, factor, bias.float()[:, None].expand_as(out))
    else:
        scale = rstd * weight.float()[:, None]
        out = fma(scale, h, (0.0 if bias is None else bias.float()[:, None]) - scale * mean)
    return GroupNorm(cast(out, x.dtype), *saved)


def block_reduce_sum(lanes: Tensor) -> Tensor:
    """[..., threads] -> [...] (`BlockReduceSum`): the lanes of a warp by halves; of several warps as many sums as a block of 32
    warps would have, the missing ones zero, by halves too."""
    warps = lanes.unflatten(-1, (-1, 32))
    while warps.shape[-1] > 1:
        lower, upper = warps.chunk(2, -1)
        warps = lower + upper
    warps = warps[..., 0]
    if warps.shape[-1] == 1:
        return warps[..., 0]
    warps = torch.cat([warps, torch.zeros(*warps.shape[:-1], 32 - warps.shape[-1])], -1)
    while warps.shape[-1] > 1:
        lower, upper = warps.chunk(2, -1)
        warps = lower + upper
    return warps[..., 0]


def group_norm_sums(
    terms: Tensor, factors: Optional[Tensor], fma, threads: Optional[int] = None, vector: int = 1
) -> Tensor:
    """The sums of terms * factors, or of terms, over the last dimension. Below 512 elements a warp takes them, else 512 threads:
    thread t the vectors t, t + threads, ... in sequence."""
    threads = threads or (32 if terms.shape[-1] < 512 else 512)
    lanes = torch.zeros(*terms.shape[:-1], threads)
    turns = in_turns(terms, threads, vector)
    of_factors = itertools.repeat(None) if factors is None else in_turns(factors.expand_as(terms), threads, vector)
    for term, factor in zip(turns, of_factors):
        active = lanes[..., : term.shape[-1]]
        if factor is None:
            active += term
        else:
            active.copy_(fma(factor, term, active.clone()))
    return block_reduce_sum(lanes)


def group_norm_sums_over_samples(ds, db, mean, rstd, fma, threads: Optional[int] = None) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias from sums [N, C] (`GammaBetaBackwardCUDAKernel1` and `2`): of up to 128 samples in
    sequence, of more by 32 threads, which a halving tree adds."""
    threads = threads or (1 if len(ds) <= 128 else 32)
    dweight, dbias = torch.zeros(2, threads, ds.shape[1]).unbind()
    for start in range(0, len(ds), threads):
        rows = slice(start, start + threads)
        active = slice(len(ds[rows]))
        dbias[active] += db[rows]
        term = fma(-db[rows], mean[rows], ds[rows])
        dweight[active] = fma(term, rstd[rows], dweight[active].clone())
    while len(dweight) > 1:
        dweight, dbias = (lower + upper for lower, upper in (each.chunk(2) for each in (dweight, dbias)))
    return dweight[0], dbias[0]


class GroupNormGradients(NamedTuple):
    dx: Tensor
    dweight: Tensor
    dbias: Tensor


def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    groups: int,
    mean: Tensor,
    rstd: Tensor,
    weight: Optional[Tensor],
    fma: Callable[[Tensor, Tensor, Tensor], Tensor] = fused_multiply_add,
    cast: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to,
    sums: Callable = group_norm_sums,
    channel_sums: Callable = group_norm_sums,
    over_samples: Callable = group_norm_sums_over_samples,
) -> GroupNormGradients:
    """`native_group_norm_backward` of contiguous dy and x [N, C, HxW], HxW > 1, and mean and rstd [N, G], in one dtype.

    `sums` adds up positions, `channel_sums` the channels of a group.
    """
    samples, channels, positions = x.shape
    g, h, mean, rstd = dy.float(), x.float(), mean.float(), rstd.float()
    ds, db = sums(g, h, fma), sums(g, None, fma)
    of_groups = [each.view(samples, groups, -1) for each in (ds, db)]
    factor = None if weight is None else weight.float().view(groups, -1)
    a, b = (channel_sums(each, factor, fma) for each in of_groups)
    share = torch.ones(()) / torch.tensor(float(channels // groups * positions))
    c2 = fma(b, mean, -a) * rstd * rstd * rstd * share
    c3 = fma(-c2, mean, -(b * rstd * share))
    c2, c3, mean, rstd = (each.repeat_interleave(channels // groups, 1) for each in (c2, c3, mean, rstd))
    c1 = rstd if weight is None else rstd * weight.float()
    c1, c2, c3 = (each[..., None].expand_as(h) for each in (c1, c2, c3))
    dx = fma(c1, g, c2 * h) + c3
    return GroupNormGradients(*(cast(each, x.dtype) for each in (dx, *over_samples(ds, db, mean, rstd, fma))))


class CohereGradients(NamedTuple):
    """What autograd adds to the gradient of x, one tensor each time; two sums of each row; the weight's gradient and its fp32
    sum."""

    dx: tuple[Tensor, ...]
    d_rstd: Tensor
    d_mean: Tensor
    dweight: Tensor
    dweight_sum: Tensor


def cohere_layer_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    rsqrt: Callable[[Tensor], Tensor] = torch.rsqrt,
    cast: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to,
    row_sum: Callable[[Tensor], Tensor] = row_sum,
) -> LayerNorm:
    """Transformers' CohereLayerNorm of rows [R, N], operation by operation; weight [N] or [W, N], whose rows repeat."""
    h, factor = x.float(), mean_factor(*x.shape)
    mean = (row_sum(h) * factor)[:, None]
    centred = h - mean
    rstd = rsqrt(row_sum(centred * centred)[:, None] * factor + torch.tensor(eps, dtype=torch.float32))
    out = _weight_of_rows(weight, x) * (centred * rstd)
    return LayerNorm(cast(out, x.dtype), mean, rstd)


def _weight_of_rows(weight: Tensor, x: Tensor) -> Tensor:
    return weight.float().view(-1, x.shape[1]).repeat(x.shape[0] // (weight.numel() // x.shape[1]), 1)


def cohere_layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    cast: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to,
    row_sum: Callable[[Tensor], Tensor] = row_sum,
    column_sum: Callable[[Tensor], Tensor] = column_sum,
) -> CohereGradients:
    """Its gradients, dy of the dtype of x. Through rstd, the variance and the mean: an fp32 x gets each of them, one of
    16 bits their sum."""
    g, centred = dy.float(), x.float() - mean
    reciprocal = torch.ones(()) / torch.tensor(float(x.shape[1]))
    d_normalized = g * _weight_of_rows(weight, x)
    d_rstd = row_sum(d_normalized * centred)[:, None]
    through_rstd = d_normalized * rstd
    d_variance = (-0.5 * d_rstd) * ((rstd * rstd) * rstd)
    through_variance = (d_variance * reciprocal) * (2.0 * centred)
    d_mean = (row_sum(-through_rstd) + row_sum(-through_variance))[:, None]
    through_mean = (d_mean * reciprocal).expand_as(centred)
    dx = (through_rstd, through_variance, through_mean)
    if x.dtype != torch.float32:
        dx = (cast((through_rstd + through_variance) + through_mean, x.dtype),)
    total = column_sum((g * (centred * rstd)).view(-1, weight.numel())).view(weight.shape)
    return CohereGradients(dx, d_rstd, d_mean, cast(total, weight.dtype), total)


def silu(x: Tensor, exp: Callable[[Tensor], Tensor] = torch.exp) -> Tensor:
    """x / (1 + exp(-x)) in fp32, rounded to the dtype of x. `exp` is called once, with -x in fp32."""
    x_fp32 = x.float()
    return (x_fp32 / (exp(-x_fp32) + 1.0)).to(x.dtype)


def silu_backward(dy: Tensor, x: Tensor, exp: Callable[[Tensor], Tensor] = torch.exp) -> Tensor:
    """(dy * s) * fma(x, 1 - s, 1) with s = 1 / (1 + exp(-x)), in fp32, in the dtype of x.

    nvcc contracts ATen's `1 + x * (1 - s)` into an FMA; there is no other one.
    """
    x_fp32 = x.float()
    ones = torch.ones_like(x_fp32)
    sigmoid = ones / (exp(-x_fp32) + ones)
    slope = fused_multiply_add(x_fp32, ones - sigmoid, ones)
    return ((dy.float() * sigmoid) * slope).to(x.dtype)


# CUDA's own functions, step by step, and what ATen and compositions of its operations make of them


Function = Callable[[Tensor], Tensor]


def _polynomial(x: Tensor, *coefficients: float) -> Tensor:
    """By Horner's rule in fp32, an FMA a step; the highest coefficient first."""
    total, *rest = (torch.full_like(x, coefficient) for coefficient in coefficients)
    for coefficient in rest:
        total = fused_multiply_add(total, x, coefficient)
    return total


def tanh(x: Tensor, exp2: Function = torch.exp2) -> Tensor:
    """CUDA's `tanhf` of fp32. On a GPU 2**y and 1 / y are the approximations of its special function unit."""
    magnitude, ones = x.abs(), torch.ones_like(x)
    large = fused_multiply_add(ones / (exp2(magnitude * 2.88539) + 1.0), -2.0 * ones, ones)
    large = torch.where(magnitude >= 9.010914, ones, large)
    square = x * x
    small = _polynomial(square, 0.015739683, -0.052303962, 0.13315298, -0.33332768, 0.0)
    return torch.where(magnitude >= 0.6, large.copysign(x), fused_multiply_add(small, x, x))


# The coefficients of CUDA's `erff` for large and small magnitudes, and where the large begin, up to CUDA 13.1 and from 13.2 on.
_ERF = {
    False: (
        (0.000112198715, -0.0013275252, 0.008396535, -0.040246584, 0.15950431, 0.9129177, 0.62906003),
        (8.4834945e-05, -0.00082130916, 0.005213489, -0.026868774, 0.11284005, -0.37612665, 0.12837915),
        1.00296,
    ),
    True: (
        (6.784818e-05, -0.0009299388, 0.006954225, -0.037528004, 0.15668742, 0.9144432, 0.6287219),
        (6.74986e-05, -0.00076476467, 0.005143017, -0.026827244, 0.112828694, -0.37612557, 0.12837917),
        1.0037584,
    ),
}


def erf(x: Tensor, exp2: Function = torch.exp2, cuda_13_2: bool = False) -> Tensor:
    """CUDA's `erff` of fp32, of a toolkit before 13.2 or from it on."""
    of_large, of_small, least = _ERF[cuda_13_2]
    magnitude = x.abs()
    large = _polynomial(magnitude, *of_large)
    large = 1.0 - exp2(fused_multiply_add(large, -magnitude, -magnitude))
    small = _polynomial(x * x, *of_small)
    return torch.where(magnitude >= least, large.copysign(x), fused_multiply_add(small, x, x))


def gelu(x: Tensor, erf: Function = erf) -> Tensor:
    h = x.float()
    return ((h * 0.5) * (erf(h * 0.70710677) + 1.0)).to(x.dtype)


def gelu_backward(dy: Tensor, x: Tensor, erf: Function = erf, exp: Function = torch.exp) -> tuple[Tensor]:
    """dy * fma(1 + erf(x / sqrt(2)), 1 / 2, x * density)."""
    h = x.float()
    density = exp((h * -0.5) * h) * 0.3989423
    slope = fused_multiply_add(erf(h * 0.70710677) + 1.0, torch.full_like(h, 0.5), h * density)
    return ((dy.float() * slope).to(x.dtype),)


def _gelu_tanh(h: Tensor, tanh: Function) -> Tensor:
    return tanh(fused_multiply_add(h * (h * h), torch.full_like(h, 0.044715), h) * 0.7978846)


def gelu_tanh(x: Tensor, tanh: Function = tanh) -> Tensor:
    h = x.float()
    return ((h * 0.5) * (_gelu_tanh(h, tanh) + 1.0)).to(x.dtype)


def gelu_tanh_backward(dy: Tensor, x: Tensor, tanh: Function = tanh) -> tuple[Tensor]:
    h = x.float()
    ones, t = torch.ones_like(h), _gelu_tanh(h, tanh)
    d_inner = fused_multiply_add(h * h, 0.13414499 * ones, ones) * 0.7978846
    right = ((h * 0.5) * fused_multiply_add(-t, t, ones)) * d_inner
    return ((dy.float() * fused_multiply_add(t + 1.0, 0.5 * ones, right)).to(x.dtype),)


def _of_fp32(function: Function, x: Tensor) -> Tensor:
    return function(x.float()).to(x.dtype)


def _times(x: Tensor, y: Union[Tensor, float]) -> Tensor:
    """A product of ATen's: of fp32 numbers, a Python number's among them, rounded to x's dtype."""
    y = y.float() if isinstance(y, Tensor) else torch.tensor(y, dtype=torch.float32)
    return (x.float() * y).to(x.dtype)


def _one_plus(x: Tensor) -> Tensor:
    return (x.float() + 1.0).to(x.dtype)


def _tanh_backward(dy: Tensor, y: Tensor) -> Tensor:
    """dy * (1 - y * y), every operation in the dtype of y: in fp32 nvcc makes an FMA of it."""
    if y.dtype == torch.float32:
        return dy * fused_multiply_add(-y, y, torch.ones_like(y))
    return _times(dy, (1.0 - _times(y, y).float()).to(y.dtype))


def complex_product(a: Tensor, b: Tensor) -> Tensor:
    """a * b of complex64 as ATen's CUDA kernels compute it, real parts and imaginary parts in the last dimension."""
    (ar, ai), (br, bi) = (torch.broadcast_tensors(*parts) for parts in ((a[..., 0], a[..., 1]), (b[..., 0], b[..., 1])))
    (ar, br), (ai, bi) = torch.broadcast_tensors(ar, br), torch.broadcast_tensors(ai, bi)
    return torch.stack((fused_multiply_add(ar, br, -(ai * bi)), fused_multiply_add(ar, bi, ai * br)), -1)


def complex_rotary(x: Tensor, freqs: Tensor, conjugate: bool = False) -> Tensor:
    """Pairs of neighbours of x times complex freqs [..., head_dim / 2], rounded to the dtype of x."""
    factor = torch.view_as_real(freqs).clone()
    if conjugate:
        factor[..., 1] = -factor[..., 1]
    return complex_product(x.float().unflatten(-1, (-1, 2)), factor).flatten(-2).to(x.dtype)


def dyt(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor, tanh: Function = tanh) -> Tensor:
    """weight * tanh(x * alpha) + bias, operation by operation."""
    normalized = _of_fp32(tanh, _times(x, alpha))
    return (_times(normalized, weight).float() + bias.float()).to(x.dtype)


def dyt_terms(dy: Tensor, x: Tensor, alpha: Tensor, weight: Tensor, tanh: Function = tanh) -> tuple[Tensor, ...]:
    """Its dx, and the terms whose sums are the gradients of alpha and of the weight."""
    normalized = _of_fp32(tanh, _times(x, alpha))
    d_scaled = _tanh_backward(_times(dy, weight), normalized)
    return _times(d_scaled, alpha), _times(d_scaled, x), _times(dy, normalized)


def _new_gelu_tanh(x: Tensor, tanh: Function) -> Tensor:
    cube = _times(_times(x, x), x)
    return _of_fp32(tanh, _times(x + _times(cube, 0.044715), 0.7978845608028654))


def new_gelu(x: Tensor, tanh: Function = tanh) -> Tensor:
    return _times(_times(x, 0.5), _one_plus(_new_gelu_tanh(x, tanh)))


def new_gelu_backward(dy: Tensor, x: Tensor, tanh: Function = tanh) -> tuple[Tensor, ...]:
    """The gradients that reach x one after the other: past the cube, through it, and through x / 2."""
    t = _new_gelu_tanh(x, tanh)
    d_half, d_tanh = _times(dy, _one_plus(t)), _times(dy, _times(x, 0.5))
    d_inner = _times(_tanh_backward(d_tanh, t), 0.7978845608028654)
    d_power = _times(_times(d_inner, 0.044715), _times(_times(x, x), 3.0))
    return d_inner, d_power, _times(d_half, 0.5)


def _fast_gelu_terms(x: Tensor, tanh: Function) -> tuple[Tensor, ...]:
    scaled, linear = _times(x, 0.7978845608), _times(x, 0.044715)
    slope = _one_plus(_times(linear, x))
    return scaled, linear, slope, _of_fp32(tanh, _times(scaled, slope))


def fast_gelu(x: Tensor, tanh: Function = tanh) -> Tensor:
    return _times(_times(x, 0.5), _one_plus(_fast_gelu_terms(x, tanh)[-1]))


def fast_gelu_backward(dy: Tensor, x: Tensor, tanh: Function = tanh) -> tuple[Tensor, ...]:
    """The gradients that reach x one after the other: as the last factor, then through linear, scaled and x / 2."""
    scaled, linear, slope, t = _fast_gelu_terms(x, tanh)
    d_half, d_tanh = _times(dy, _one_plus(t)), _times(dy, _times(x, 0.5))
    d_inner = _tanh_backward(d_tanh, t)
    d_scaled, d_slope = _times(d_inner, slope), _times(d_inner, scaled)
    return (
        _times(d_slope, linear),
        _times(_times(d_slope, x), 0.044715),
        _times(d_scaled, 0.7978845608),
        _times(d_half, 0.5),
    )


def _quick_gelu_sigmoid(x: Tensor, exp: Function) -> Tensor:
    return _of_fp32(lambda h: torch.ones_like(h) / (exp(-h) + 1.0), _times(x, 1.702))


def quick_gelu(x: Tensor, exp: Function = torch.exp) -> Tensor:
    return _times(x, _quick_gelu_sigmoid(x, exp))


def quick_gelu_backward(dy: Tensor, x: Tensor, exp: Function = torch.exp) -> tuple[Tensor, ...]:
    """The gradients that reach x one after the other: as a factor, then through the sigmoid."""
    s = _quick_gelu_sigmoid(x, exp)
    d_sigmoid = _times(_times(_times(dy, x), (1.0 - s.float()).to(s.dtype)), s)
    return _times(dy, s), _times(d_sigmoid, 1.702)


# Softmax, and cross-entropy of fp32 logits (SoftMax.cu, PersistentSoftmax.cuh, block_reduce.cuh, Loss.cu). `exp` and `log` are
# arguments.
# Cross-entropy's sums of exponentials fuse `expf`'s last product with the addition, which shows only where that product is subnormal and
# so never in a sum that holds exp(0); here it is rounded on its own.


def softmax_steps(size: int, misaligned: int = 0) -> list[Tensor]:
    """What the threads of a row of log_softmax's forward kernel take, in sequence: for each step an element a thread, or -1.

    Args:
        size: elements of the row.
        misaligned: elements from the last multiple of 16 bytes to the row; -1 for an aligned row of an unaligned tensor.
    """
    threads = torch.arange(min(32, _floor_power_of_two(2 * size - 1)) if size <= 2048 else 1024)
    steps = []
    if size <= 9216:  # softmax_warp_forward up to 2048, then cunn_SoftMaxForwardReg.
        steps = [first + threads for first in range(0, size, len(threads))]
    elif size % 4 == 0 and misaligned == 0 and size < 12256:  # cunn_SoftMaxForwardSmem
        steps = [first + 4 * threads + position for first in range(0, size, 4096) for position in range(4)]
    else:  # cunn_SoftMaxForward
        first, misaligned = 0, max(misaligned, 0)
        if misaligned:
            steps.append(threads - misaligned)
            first = 1024 - misaligned
        while size - first >= 4096:
            steps += [first + 4 * threads + position for position in range(4)]
            first += 4096
        steps += [begin + threads for begin in range(first, size, 1024)]
    return [torch.where((step >= 0) & (step < size), step, -1) for step in steps]


class SoftmaxStatistics(NamedTuple):
    """Of each row, fp32: its maximum, and the sum of exp(x - maximum)."""

    maximum: Tensor
    sum: Tensor


def softmax_statistics(
    x: Tensor, misaligned: int = 0, exp: Callable[[Tensor], Tensor] = torch.exp
) -> SoftmaxStatistics:
    """What log_softmax finds of the rows of a contiguous fp32 [rows, size].

    Args:
        misaligned: elements from the last multiple of 16 bytes to the tensor.
    """
    rows, size = x.shape
    maximum = x.amax(-1)
    terms = torch.nn.functional.pad(exp(x - maximum[:, None]), (0, 1))
    sums = torch.empty(rows)
    for row in range(rows):
        of_row = (misaligned + row * size) % 4
        total = 0.0
        for step in softmax_steps(size, -1 if misaligned and not of_row else of_row):
            total = total + terms[row, step]
        # The lanes of each warp first, then the warps.
        warps = _halving_sum(total.view(-1, min(32, len(total))), dim=1)
        sums[row] = _halving_sum(warps[None], dim=1)[0]
    return SoftmaxStatistics(maximum, sums)


def log_softmax(
    x: Tensor,
    misaligned: int = 0,
    exp: Callable[[Tensor], Tensor] = torch.exp,
    log: Callable[[Tensor], Tensor] = torch.log,
) -> Tensor:
    """`F.log_softmax(x, -1)` of a contiguous fp32 [rows, size]."""
    maximum, total = softmax_statistics(x, misaligned, exp)
    return (x - maximum[:, None]) - log(total)[:, None]


def _warp_sum(terms: Tensor) -> Tensor:
    """Row sums of fp32 [rows, size] in softmax_warp_forward and -_backward: zeros up to a power of two, at most 32 lanes."""
    size = 1 << (terms.shape[1] - 1).bit_length()
    filled = torch.nn.functional.pad(terms, (0, size - terms.shape[1]))
    total = torch.zeros(len(terms), min(size, 32))
    for step in filled.view(len(terms), -1, min(size, 32)).unbind(1):
        total = total + step
    return _halving_sum(total, dim=1)


def _add_vectors(total: Tensor, terms: Tensor, vector: int) -> Tensor:
    """total [rows, threads]: a thread adds every `threads`-th vector, element after element."""
    rows, threads = total.shape
    for vectors in terms.reshape(rows, -1, threads, vector).unbind(1):
        for element in vectors.unbind(-1):
            total = total + element
    return total


def _softmax_vectors(terms: Tensor, threads: int, vector: int) -> Tensor:
    """The threads' sums of rows that begin at multiples of 16 bytes: [rows, threads]."""
    filled = torch.nn.functional.pad(terms, (0, -terms.shape[1] % (threads * vector)))
    return _add_vectors(torch.zeros(len(terms), threads), filled, vector)


def _ilp_reduce(terms: Tensor, threads: int, vector: int, shift: int) -> Tensor:
    """`ilpReduce` of SoftMax.cu for rows that begin `shift` elements after a multiple of 16 bytes: [rows, threads]."""
    total = torch.zeros(len(terms), threads)
    if shift:
        head = terms[:, : threads - shift]
        total[:, shift : shift + head.shape[1]] += head
        terms = terms[:, threads - shift :]
    last = terms.shape[1] % (threads * vector)
    total = _add_vectors(total, terms[:, : terms.shape[1] - last], vector)
    for first in range(terms.shape[1] - last, terms.shape[1], threads):
        step = terms[:, first : first + threads]
        total[:, : step.shape[1]] += step
    return total


def _shifted(terms: Tensor, threads: int, vector: int, misaligned: int) -> Tensor:
    """`_ilp_reduce` of rows without gaps, the first of them `misaligned` elements after a multiple of 16 bytes."""
    rows, size = terms.shape
    total = torch.empty(rows, threads)
    for first in range(min(rows, vector)):
        shift = (misaligned + first * size) % vector
        total[first::vector] = _ilp_reduce(terms[first::vector], threads, vector, shift)
    return total


def _tree_of_block(total: Tensor) -> Tensor:
    """`cuda_utils::BlockReduce`: the lanes of each warp are halved, then the warps."""
    return _halving_sum(_halving_sum(total.view(len(total), -1, 32), dim=2), dim=1)


def _block_in_sequence(total: Tensor) -> Tensor:
    """`blockReduce` of SoftMax.cu: the lanes of each warp in sequence, then the warps."""
    warps = torch.zeros(len(total), total.shape[1] // 32)
    for lane in total.view(len(total), -1, 32).unbind(2):
        warps = warps + lane
    of_row = torch.zeros(len(total))
    for warp in warps.unbind(1):
        of_row = of_row + warp
    return of_row


_SHARED_MEMORY = 49152


def softmax_forward_sum(
    terms: Tensor, itemsize: int, half_to_float: bool = False, misaligned: int = 0, long_warps: bool = False
) -> Tensor:
    """Row sums of exponentials, fp32 [rows, size], in the order of `host_softmax` for elements of `itemsize` bytes.

    Args:
        half_to_float: fp16 elements have fp32 results.
        long_warps: fp16 rows with fp32 results are a warp's up to 2048 elements, as from torch 2.14 on.
        misaligned: elements from the last multiple of 16 bytes to the tensor.
    """
    size, vector = terms.shape[1], 16 // itemsize
    if size <= (1024 if half_to_float and not long_warps else 2048):
        return _warp_sum(terms)
    if size <= 9216 and not half_to_float:
        return _tree_of_block(_softmax_vectors(terms, 1024, 1))
    if size % vector == 0 and not misaligned and size < (_SHARED_MEMORY - 32 * 4) // itemsize:
        return _tree_of_block(_softmax_vectors(terms, 1024, vector))
    return _tree_of_block(_shifted(terms, 1024, vector, misaligned))


def softmax_backward_sum(terms: Tensor, itemsize: int) -> Tensor:
    """Row sums of `dy * y`, fp32 [rows, size], in the order of `host_softmax_backward` for dy of `itemsize` bytes."""
    size, vector = terms.shape[1], 16 // itemsize
    if size <= 1024:
        return _warp_sum(terms)
    threads = 32
    while threads < min(size // vector, 1024) // 2:
        threads *= 2
    if size % vector == 0 and size < (_SHARED_MEMORY - threads // 32 * 4) // itemsize:
        return _tree_of_block(_softmax_vectors(terms, threads, vector))
    return _block_in_sequence(_shifted(terms, threads, vector, 0))


def softmax(
    x: Tensor,
    exp: Callable[[Tensor], Tensor] = torch.exp,
    cast: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to,
    row_sum: Optional[Callable[[Tensor], Tensor]] = None,
    dtype: Optional[torch.dtype] = None,
    misaligned: int = 0,
    long_warps: bool = False,
) -> Tensor:
    """`F.softmax(x, -1, dtype=dtype)` of a dense [rows, size]; dtype is x's or fp32, to which ATen converts bf16 first.

    The warp kernel, up to 2048 elements a row, rounds `expf`'s last product before it adds it. The others make an FMA
    of the two, which shows only where the product is subnormal; here it is rounded on its own.

    Args:
        misaligned: elements from the last multiple of 16 bytes to x.
        long_warps: as in `softmax_forward_sum`.
    """
    dtype = dtype or x.dtype
    if x.dtype == torch.bfloat16 and dtype == torch.float32:
        x, misaligned = x.float(), 0
    h = x.float()
    terms = exp(h - h.amax(-1, keepdim=True))
    if row_sum is None:
        total = softmax_forward_sum(terms, x.element_size(), x.dtype != dtype, misaligned, long_warps)
    else:
        total = row_sum(terms)
    return cast(terms / total[:, None], dtype)


def softmax_backward(
    dy: Tensor,
    y: Tensor,
    fma: Callable[[Tensor, Tensor, Tensor], Tensor] = fused_multiply_add,
    cast: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to,
    row_sum: Optional[Callable[[Tensor], Tensor]] = None,
    dtype: Optional[torch.dtype] = None,
) -> Tensor:
    """The gradient of x, which has this dtype, from that of y = softmax(x).

    `dy * y` is an operation of its own, rounded to the dtype; of the difference after it nvcc makes an FMA.
    """
    product = cast(dy.float() * y.float(), dy.dtype).float()
    total = softmax_backward_sum(product, dy.element_size()) if row_sum is None else row_sum(product)
    return cast(fma(-total[:, None].expand_as(product), y.float(), product), dtype or dy.dtype)


class NllLoss(NamedTuple):
    loss: Tensor
    total_weight: Tensor


def nll_loss(logp: Tensor, target: Tensor, ignore_index: int, reduction: str) -> NllLoss:
    """`nll_loss_forward` of [rows, classes]: one block, a thread takes the rows t, t + threads, ... in sequence."""
    rows = len(target)
    threads = min(max(1 << round(math.log2(max(rows // 16, 1))), 32), 1024)
    counts = target != ignore_index
    terms = torch.where(counts, -logp.gather(1, torch.where(counts, target, 0)[:, None])[:, 0], 0.0)
    total = _halving_sum(_chain_sums(terms, threads, dim=0), dim=0)
    count = counts.sum().float()
    return NllLoss(total / count if reduction == "mean" else total, count)


def cross_entropy_backward(
    logp: Tensor,
    target: Tensor,
    ignore_index: int,
    d_loss: Tensor,
    total_weight: Optional[Tensor],
    exp: Callable[[Tensor], Tensor] = torch.exp,
    fma: Optional[Callable[[Tensor, Tensor, Tensor], Tensor]] = None,
) -> Tensor:
    """The gradient of fp32 logits: that of nll_loss, with `total_weight` of the mean, through that of log_softmax.

    Every row of it is -d_loss at the target and zero elsewhere, whose sum does not depend on the order.
    """
    fma = fma or (lambda a, b, c: (a.double() * b.double() + c.double()).float())
    gradient = -(d_loss if total_weight is None else d_loss / total_weight)
    counts = target != ignore_index
    d_logp = torch.zeros_like(logp)
    d_logp[counts.nonzero()[:, 0], target[counts]] = gradient
    total = torch.where(counts, 0.0 + gradient, 0.0)[:, None]
    return fma(-total.expand_as(logp), exp(logp), d_logp)


# Kullback-Leibler divergence (ATen/native/Loss.cpp) and total variation distance: operations of ATen, one after the other,
# each rounded to its dtype; then a full sum.

Cast = Callable[[Tensor, torch.dtype], Tensor]


def xlogy(x: Tensor, y: Tensor, log: Function = torch.log) -> Tensor:
    """x * log(y) in fp32; 0 where x is zero and y is a number."""
    return torch.where((x == 0) & ~y.isnan(), 0.0, x.float() * log(y.float()))


def kl_div(
    input: Tensor,
    target: Tensor,
    log_target: bool,
    exp: Function = torch.exp,
    log: Function = torch.log,
    cast: Cast = Tensor.to,
) -> Tensor:
    """`F.kl_div(input, target, reduction="none", log_target=log_target)`."""
    out, of_target = torch.promote_types(input.dtype, target.dtype), target.dtype
    x, t = input.float(), target.float()
    if log_target:
        probability, difference = cast(exp(t), of_target), cast(t - x, out)
        return cast(probability.float() * difference.float(), out)
    return cast(cast(xlogy(t, t, log), of_target).float() - cast(t * x, out).float(), out)


def kl_div_backward(
    dy: Tensor,
    input: Tensor,
    target: Tensor,
    log_target: bool,
    exp: Function = torch.exp,
    log: Function = torch.log,
    cast: Cast = Tensor.to,
) -> tuple[Tensor, ...]:
    """The gradient of input, then those of the target in their order of arrival; dy is of every element's divergence."""
    out, of_target = torch.promote_types(input.dtype, target.dtype), target.dtype
    dy, x, t = dy.float().expand(input.shape), input.float(), target.float()
    if log_target:
        probability = cast(exp(t), of_target).float()
        product = cast(dy * probability, out)
        d_exp = cast(cast(dy * cast(t - x, out).float(), out).float(), of_target)
        return (
            cast(-product.float(), input.dtype),
            cast(product.float(), of_target),
            cast(d_exp.float() * probability, of_target),
        )
    dy_target = cast(dy, of_target).float()
    d_factor = torch.where(t == 0, 0.0, xlogy(dy_target, t, log))
    return (
        cast(cast(-dy * t, out).float(), input.dtype),
        cast(d_factor, of_target),
        cast(cast(dy_target * t, of_target).float() / t, of_target),
        cast(cast(-dy * x, out).float(), of_target),
    )


def total_variation(p: Tensor, q: Tensor, counts: Optional[Tensor] = None, cast: Cast = Tensor.to) -> Tensor:
    """`abs(p - q) / 2`, zero in rows that do not count."""
    out = torch.promote_types(p.dtype, q.dtype)
    distance = cast(cast(p.float() - q.float(), out).float().abs() * 0.5, out)
    return distance if counts is None else torch.where(counts[:, None], distance, 0.0)


def total_variation_backward(
    dy: Tensor, p: Tensor, q: Tensor, counts: Optional[Tensor] = None, cast: Cast = Tensor.to
) -> tuple[Tensor, Tensor]:
    """The gradients of p and q; dy is of every element's distance."""
    out = torch.promote_types(p.dtype, q.dtype)
    dy = dy.float().expand(p.shape)
    dy = dy if counts is None else torch.where(counts[:, None], dy, 0.0)
    difference = cast(p.float() - q.float(), out).float()
    # 0 for NaN.
    sign = (difference > 0).float() - (difference < 0).float()
    dp = cast(cast(dy * 0.5, out).float() * sign, out)
    return cast(dp.float(), p.dtype), cast(-dp.float(), q.dtype)


def reduced(terms: Tensor, reduction: str, divisor: Optional[int], total: Tensor, cast: Cast = Tensor.to) -> Tensor:
    """A loss from its full sum in fp32. `divisor` of a mean by ATen's own kernel ("mean"), or of a division after the sum."""
    if reduction != "mean":
        total = cast(total, terms.dtype).float()
    return cast(total if divisor is None else total * mean_factor(1, divisor), terms.dtype)


class JsdWeights(NamedTuple):
    """Numbers that eager rounds to the logits' dtype: beta, 1 - beta, and the logarithms of 1 - beta and of beta."""

    of_teacher: Tensor
    of_student: Tensor
    log_student: Tensor
    log_teacher: Tensor

    @classmethod
    def of(cls, beta: float, dtype: torch.dtype, device: str = "cpu") -> "JsdWeights":
        """The logarithms are those of the device."""
        beta = torch.full((), beta, dtype=dtype, device=device)
        return cls(*(each.cpu() for each in (beta, 1 - beta, torch.log1p(-beta), torch.log(beta))))


def scaled_log_softmax(
    x: Tensor,
    temperature: float,
    exp: Function = torch.exp,
    log: Function = torch.log,
    cast: Cast = Tensor.to,
    row_sum: Optional[Callable[[Tensor], Tensor]] = None,
) -> Tensor:
    """`F.log_softmax(x / temperature, -1)` of [rows, size]."""
    h = divided(x, temperature, cast).float()
    shifted = h - h.amax(-1, keepdim=True)
    terms = exp(shifted)
    total = softmax_forward_sum(terms, x.element_size()) if row_sum is None else row_sum(terms)
    return cast(shifted - log(total)[:, None], x.dtype)


def log_softmax_backward(
    dy: Tensor,
    y: Tensor,
    exp: Function = torch.exp,
    fma: Callable[[Tensor, Tensor, Tensor], Tensor] = fused_multiply_add,
    cast: Cast = Tensor.to,
    row_sum: Optional[Callable[[Tensor], Tensor]] = None,
) -> Tensor:
    """The gradient of x, from that of y = log_softmax(x): `dy - exp(y) * sum(dy)`, of which nvcc makes an FMA."""
    total = softmax_backward_sum(dy.float(), dy.element_size()) if row_sum is None else row_sum(dy.float())
    return cast(fma(-total[:, None].expand_as(dy), exp(y.float()), dy.float()), dy.dtype)


def divided(x: Tensor, temperature: float, cast: Cast = Tensor.to) -> Tensor:
    """`x / temperature`: CUDA multiplies by the reciprocal of a number."""
    return cast(x.float() * (torch.tensor(1.0) / torch.tensor(temperature, dtype=torch.float32)), x.dtype)


def log_sum_of_two(a: Tensor, b: Tensor, exp: Function = torch.exp, log: Function = torch.log, cast: Cast = Tensor.to):
    """`torch.logsumexp(torch.stack([a, b]), 0)`: five operations, of which each rounds."""
    dtype, (a, b) = a.dtype, (a.float(), b.float())
    largest = torch.maximum(a, b)
    finite = torch.where(largest.isinf(), 0.0, largest)
    first, second = (cast(exp(cast(each - finite, dtype).float()), dtype).float() for each in (a, b))
    return cast(cast(log(cast(first + second, dtype).float()), dtype).float() + finite, dtype)


def jsd(
    s: Tensor,
    t: Tensor,
    beta: float,
    exp: Function = torch.exp,
    log: Function = torch.log,
    cast: Cast = Tensor.to,
    device: str = "cpu",
) -> Tensor:
    """TRL's terms of the generalized Jensen-Shannon divergence, from log-probabilities of student and teacher."""
    divergence = functools.partial(kl_div, log_target=True, exp=exp, log=log, cast=cast)
    if beta == 0:
        return divergence(s, t)
    if beta == 1:
        return divergence(t, s)
    weights, dtype = JsdWeights.of(beta, s.dtype, device), s.dtype
    a = cast(s.float() + weights.log_student.float(), dtype)
    b = cast(t.float() + weights.log_teacher.float(), dtype)
    m = log_sum_of_two(a, b, exp, log, cast)
    of_teacher = cast(weights.of_teacher.float() * divergence(m, t).float(), dtype)
    of_student = cast(weights.of_student.float() * divergence(m, s).float(), dtype)
    return cast(of_teacher.float() + of_student.float(), dtype)


def jsd_backward(
    dy: Tensor,
    s: Tensor,
    t: Tensor,
    beta: float,
    exp: Function = torch.exp,
    log: Function = torch.log,
    cast: Cast = Tensor.to,
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:
    """The gradients of s and t: each divergence's target gets its two first, then that from the mixture arrives."""
    dtype = s.dtype

    def plus(x, y):
        return cast(x.float() + y.float(), dtype)

    backward = functools.partial(kl_div_backward, log_target=True, exp=exp, log=log, cast=cast)
    if beta in (0, 1):
        d_input, first, second = backward(dy, s, t) if beta == 0 else backward(dy, t, s)
        return (d_input, plus(first, second)) if beta == 0 else (plus(first, second), d_input)
    weights = JsdWeights.of(beta, dtype, device)
    a = cast(s.float() + weights.log_student.float(), dtype)
    b = cast(t.float() + weights.log_teacher.float(), dtype)
    m = log_sum_of_two(a, b, exp, log, cast)
    found = []
    dm = None
    for weight, target in ((weights.of_student, s), (weights.of_teacher, t)):
        d_input, first, second = backward(cast(dy.float() * weight.float(), dtype), m, target)
        dm = d_input if dm is None else plus(dm, d_input)
        found.append(plus(first, second))
    shares = (cast(exp(cast(each.float() - m.float(), dtype).float()), dtype) for each in (a, b))
    ds, dt = (plus(each, cast(dm.float() * share.float(), dtype)) for each, share in zip(found, shares))
    return ds, dt
