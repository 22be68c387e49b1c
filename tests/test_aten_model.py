"""The model of CUDA's arithmetic: against eager on a real GPU, and against ATen's loops in Python.

The golden files hold what eager computed on a GPU (tests/golden/record.py). The simulation below
is a second route to the same sums, thread by thread as in ATen/native/cuda/Reduce.cuh.
"""

import functools
import glob
import json
import os
from fractions import Fraction

import aten_model
import numpy as np
import pytest
import torch
from aten_model import H200, Device, column_sum, column_tree, row_sum, row_tree
from bits import (
    assert_bits_equal,
    bits_equal,
    fresh_seed,
    hashed_int64,
    hashed_normal,
    same_layout,
)
from golden.record import (
    case_from_json,
    case_inputs,
    llama_rms_norm,
    modelled,
    sample,
    stored_rows,
)
from safetensors import safe_open

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GOLDEN = sorted(glob.glob(os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden", "*.safetensors")))


# --- Golden vectors -------------------------------------------------------------------------------


@functools.cache
def _golden(path):
    with safe_open(path, "pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}


def _golden_cases():
    for path in GOLDEN:
        for fields in json.loads(_golden(path)[0]["cases"]):
            case = case_from_json(fields)
            label = os.path.splitext(os.path.basename(path))[0]
            yield pytest.param(path, case, id=f"{label}-{case.name}")


def test_golden_vectors_are_recorded():
    assert GOLDEN, (
        "no tests/golden/*.safetensors: run `python tests/golden/record.py` on a machine with an "
        "NVIDIA GPU and keep the file that it writes"
    )


@pytest.mark.parametrize("path, case", list(_golden_cases()))
def test_model_equals_eager_on_a_gpu(path, case):
    metadata, tensors = _golden(path)
    device = Device(int(metadata["sms"]), int(metadata["threads_per_sm"]))
    prefix = f"{case.name}/"
    recorded = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if case.kind == "row_sum":
        model = modelled(case, case_inputs(case, stored_rows(case)), recorded, device)
    else:
        model = sample(case, modelled(case, case_inputs(case), recorded, device))
    compared = [name for name in model if name in recorded]
    assert compared
    for name in compared:
        assert_bits_equal(model[name], recorded[name], name)


# --- ATen's loops, one thread after the other -----------------------------------------------------


class SimulatedReduction:
    """`setReduceConfig` and `ReduceOp::run` of Reduce.cuh for an fp32 sum of a [rows, n] matrix.

    `over_rows` sums the rows into [n], otherwise each row into [rows]. Values that a thread never
    set are NaN, so that one that leaks into a result shows.
    """

    VT0 = 4

    def __init__(self, matrix, over_rows, device):
        self.data = matrix.reshape(-1)
        rows, n = matrix.shape
        self.num_outputs, self.num_inputs = (n, rows) if over_rows else (rows, n)
        self.output_stride, self.input_stride = (1, n) if over_rows else (n, 1)
        self.block_x_reduce = not over_rows
        self.vectorize_input = not over_rows and n >= 128
        self.output_vec_size = 4 if over_rows else 1

        dim0, dim1 = (n, rows)
        if self.vectorize_input or over_rows:
            dim0 //= 4
        max_threads = 512 // self.output_vec_size
        dim0_pow2 = self.last_pow2(dim0) if dim0 < max_threads else max_threads
        dim1_pow2 = self.last_pow2(dim1) if dim1 < max_threads else max_threads
        self.warp_size, self.rocm = device.warp_size, device.rocm
        self.width = min(dim0_pow2, self.warp_size)
        self.height = min(dim1_pow2, max_threads // self.width)
        self.width = min(dim0_pow2, max_threads // self.height)

        step_input, step_output = 1, 1
        self.input_mult, self.output_mult = [0, 0, 0], [0, 0]
        if self.block_x_reduce:
            self.input_mult[0], step_input = step_input, step_input * self.width
        else:
            self.output_mult[0], step_output = step_output, step_output * self.width
        if -(-self.num_inputs // step_input) >= min(self.height * 16, 256):
            self.input_mult[1], step_input = step_input, step_input * self.height
        else:
            self.output_mult[1], step_output = step_output, step_output * self.height
        blocks_per_sm = device.threads_per_sm // (self.width * self.height)
        target = device.sms * blocks_per_sm
        self.grid = -(-(self.num_outputs // self.output_vec_size) // step_output)
        values_per_thread = -(-self.num_inputs // step_input)
        self.ctas = 1
        if self.input_mult[1] and values_per_thread >= 256 and self.grid <= target:
            by_target = -(-target // self.grid)
            by_minimum = -(-values_per_thread // (128 if self.rocm else 16))
            by_maximum = -(-values_per_thread // 256)
            self.ctas = max(min(by_target, by_minimum), by_maximum)
            if self.ctas > 1:
                if self.rocm:
                    self.ctas = max(self.ctas, 64)
                self.input_mult[2], step_input = step_input, step_input * self.ctas
        self.step_input, self.step_output = step_input, step_output

    @staticmethod
    def last_pow2(n):
        power = 1
        while power * 2 <= n:
            power *= 2
        return power

    def load(self, output, index):
        start = output * self.output_stride + index * self.input_stride
        return self.data[start : start + self.output_vec_size]

    def input_vectorized_thread_reduce(self, output, index):
        values = [np.zeros(1, np.float32) for _ in range(4)]
        while index * 4 + 3 < self.num_inputs:
            for i in range(4):
                values[i] = values[i] + self.load(output, index * 4 + i)
            index += self.step_input
        for i in range(1, 4):
            values[0] = values[0] + values[i]
        return values[0]

    def thread_reduce(self, output, index):
        end, stride, vt0 = self.num_inputs, self.step_input, self.VT0
        values = [np.zeros(self.output_vec_size, np.float32) for _ in range(vt0)]
        while index + (vt0 - 1) * stride < end:
            for i in range(vt0):
                values[i] = values[i] + self.load(output, index + i * stride)
            index += stride * vt0
        for i in range(vt0):
            if index >= end:
                break
            values[i] = values[i] + self.load(output, index)
            index += stride
        for i in range(1, vt0):
            values[0] = values[0] + values[i]
        return values[0]

    def reduce_x(self, block):
        """`block_x_reduce`: through shared memory down to a warp, then shuffles within the warp."""
        dim_x = self.width
        while dim_x > self.warp_size:
            offset = dim_x // 2
            for y in range(self.height):
                for x in range(offset):
                    block[y][x] = block[y][x] + block[y][x + offset]
            dim_x = offset
        offsets = [1 << power for power in range(dim_x.bit_length() - 1)]
        for offset in offsets if self.rocm else reversed(offsets):
            flat = [value for line in block for value in line]
            shuffled = []
            for thread in range(len(flat)):
                source = thread + offset
                same_warp = source // self.warp_size == thread // self.warp_size and source < len(flat)
                shuffled.append(flat[thread] + flat[source if same_warp else thread])
            for thread, value in enumerate(shuffled):
                block[thread // self.width][thread % self.width] = value

    def reduce_y(self, block):
        offset = self.height // 2
        while offset > 0:
            for y in range(offset):
                for x in range(self.width):
                    block[y][x] = block[y][x] + block[y + offset][x]
            offset //= 2

    def run(self, grid=None):
        """The sums, or only those of the first `grid` blocks and NaN for the others."""
        unset = np.full(self.output_vec_size, np.nan, np.float32)
        result = np.full(self.num_outputs, np.nan, np.float32)
        with np.errstate(all="ignore"):
            for block_x in range(grid or self.grid):
                outputs, staging = {}, []
                for block_y in range(self.ctas):
                    block = [[unset] * self.width for _ in range(self.height)]
                    for y in range(self.height):
                        for x in range(self.width):
                            output = self.output_vec_size * (
                                x * self.output_mult[0] + y * self.output_mult[1] + block_x * self.step_output
                            )
                            index = x * self.input_mult[0] + y * self.input_mult[1] + block_y * self.input_mult[2]
                            outputs[y, x] = output
                            if output < self.num_outputs and index < self.num_inputs:
                                reduce = (
                                    self.input_vectorized_thread_reduce if self.vectorize_input else self.thread_reduce
                                )
                                block[y][x] = reduce(output, index)
                    if self.block_x_reduce:
                        self.reduce_x(block)
                    if self.input_mult[1]:
                        self.reduce_y(block)
                    staging.append(block)
                if self.ctas > 1:
                    block = self.global_reduce(staging)
                for (y, x), output in outputs.items():
                    stores = (
                        output < self.num_outputs and not (self.block_x_reduce and x) and not (self.input_mult[1] and y)
                    )
                    if stores:
                        result[output : output + self.output_vec_size] = block[y][x]
        return result

    def global_reduce(self, staging):
        """What the last block of an output does with every block's result."""
        block = []
        for y in range(self.height):
            block.append([])
            for x in range(self.width):
                value = np.zeros(self.output_vec_size, np.float32)
                if self.block_x_reduce:
                    for cta in range(x + y * self.width, self.ctas, self.width * self.height):
                        value = value + staging[cta][0][0]
                else:
                    for cta in range(y, self.ctas, self.height):
                        value = value + staging[cta][0][x]
                block[y].append(value)
        self.reduce_y(block)
        if self.block_x_reduce:
            self.reduce_x(block)
        return block


SMALL_GPU = Device(sms=3, threads_per_sm=1536)
# MI300X, whose waves have 64 lanes, and RX 7900 XTX, whose waves have 32.
ROCM_GPUS = [Device(304, 2048, 64, rocm=True), Device(96, 2048, 32, rocm=True)]


def _check_rows(rows, hidden_size, seed, device=H200):
    values = hashed_normal((rows, hidden_size), seed)
    simulation = SimulatedReduction(values.numpy(), over_rows=False, device=device)
    tree = row_tree(rows, hidden_size, device)
    assert (tree.width, tree.height, tree.ctas) == (
        simulation.width,
        simulation.height,
        simulation.ctas,
    )
    label = f"row_sum [{rows}, {hidden_size}] seed {seed} {tree}"
    assert_bits_equal(row_sum(values, device=device), torch.from_numpy(simulation.run()), label)


def _check_columns(rows, hidden_size, seed, device=H200):
    values = hashed_normal((rows, hidden_size), seed)
    simulation = SimulatedReduction(values.numpy(), over_rows=True, device=device)
    tree = column_tree(rows, hidden_size, device)
    assert (tree.width, tree.height, tree.ctas) == (
        simulation.width,
        simulation.height,
        simulation.ctas,
    )
    label = f"column_sum [{rows}, {hidden_size}] seed {seed} {tree}"
    assert_bits_equal(column_sum(values, device), torch.from_numpy(simulation.run()), label)


@pytest.mark.parametrize(
    "rows, hidden_size",
    [
        (1, 4), (1, 64), (1, 124), (2, 124), (3, 100), (8, 124), (17, 96), (40, 8), (33, 4),
        (1, 128), (1, 2048), (1, 4100), (2, 132), (2, 4096), (3, 1000), (5, 8192), (8, 2048),
        (9, 16384), (15, 1024), (16, 128), (16, 8188), (16, 8192), (17, 132), (40, 512), (21, 8196),
        (1, 131072), (2, 131076),
    ],
)  # fmt: skip
def test_row_sum_equals_the_simulation(rows, hidden_size):
    _check_rows(rows, hidden_size, seed=rows * hidden_size)


@pytest.mark.parametrize(
    "rows, hidden_size",
    [
        (1, 4), (1, 1024), (2, 100), (3, 64), (5, 516), (15, 128), (63, 128), (64, 128), (65, 132),
        (127, 100), (128, 100), (255, 4), (256, 4), (257, 8), (512, 16), (1020, 128), (1024, 128),
        (1021, 132), (3000, 16), (8192, 16), (9000, 8), (20000, 4),
    ],
)  # fmt: skip
def test_column_sum_equals_the_simulation(rows, hidden_size):
    _check_columns(rows, hidden_size, seed=rows * hidden_size)


def test_sums_on_a_small_gpu_equal_the_simulation():
    _check_rows(1, 262144, seed=1, device=SMALL_GPU)
    _check_rows(2, 131072, seed=2, device=Device(sms=1, threads_per_sm=512))
    _check_columns(5000, 32, seed=3, device=SMALL_GPU)
    tree = column_tree(5000, 32, SMALL_GPU)
    assert tree.ctas > 1
    # More blocks of outputs than the grid that ATen aims at: no output is shared among blocks.
    assert column_tree(1100, 1280, Device(sms=1, threads_per_sm=1024)).ctas == 1
    _check_columns(1100, 1280, seed=4, device=Device(sms=1, threads_per_sm=1024))
    assert column_tree(1100, 1024, Device(sms=1, threads_per_sm=1024)).ctas == 2
    _check_columns(1100, 1024, seed=5, device=Device(sms=1, threads_per_sm=1024))


@pytest.mark.parametrize("device", ROCM_GPUS, ids=["wave64", "wave32"])
def test_sums_on_rocm_equal_the_simulation(device):
    """Reduce.cuh under USE_ROCM, thread by thread."""
    shapes = (1, 64), (2, 124), (3, 100), (1, 128), (1, 2048), (4, 896), (9, 4096), (16, 132), (17, 2880)
    for rows, hidden_size in shapes:
        _check_rows(rows, hidden_size, rows * hidden_size, device)
    for rows, hidden_size in ((1, 4), (5, 516), (65, 132), (257, 8), (1021, 132), (9000, 8), (70_000, 4)):
        _check_columns(rows, hidden_size, rows * hidden_size, device)
    assert column_tree(70_000, 4, device).ctas == 64 > column_tree(70_000, 4).ctas > 1
    values = hashed_normal((64, 4096), seed=1)
    assert not torch.equal(row_sum(values, device=device), row_sum(values))


def test_row_sum_of_more_blocks_than_a_warp_has_lanes():
    # Only then do the warps of the last block, which come before its lanes, have something to add.
    values = hashed_normal((16, 278528), seed=6)
    assert row_tree(16, 278528) == aten_model.Tree(width=32, height=16, shared=True, ctas=33)
    simulation = SimulatedReduction(values.numpy(), over_rows=False, device=H200)
    first_rows = torch.from_numpy(simulation.run(grid=3))[:3]
    assert_bits_equal(row_sum(values[:3], total_rows=16), first_rows)


def test_sums_of_random_shapes_equal_the_simulation():
    seed = fresh_seed()
    random = np.random.default_rng(seed)
    for number in range(30):
        device = H200 if random.integers(2) else SMALL_GPU
        rows = int(2 ** random.uniform(0, 6))
        hidden_size = 4 * int(2 ** random.uniform(0, 9))
        _check_rows(rows, hidden_size, seed + number, device)
        rows = int(2 ** random.uniform(0, 11))
        hidden_size = 4 * int(2 ** random.uniform(0, 6))
        _check_columns(rows, hidden_size, seed + number, device)


@pytest.mark.parametrize("limit", [4 * 64 * 1000, 255_997, 255_996, 120_000, 50_000, 30_001])
def test_column_sum_halves_what_32_bits_cannot_index(limit):
    rows, hidden_size = 1000, 64
    values = hashed_normal((rows, hidden_size), seed=limit)
    # `SplitUntil32Bit`: the last of the waiting parts is cut until it fits, its first half on top.
    waiting, total, parts = [(0, rows)], None, 0
    while waiting:
        start, size = waiting.pop()
        largest_offset = 1 + (size - 1) * hidden_size * 4 + (hidden_size - 1) * 4
        if largest_offset > limit:
            waiting.append((start + size // 2, size - size // 2))
            waiting.append((start, size // 2))
            continue
        part = values[start : start + size].numpy()
        part_sum = SimulatedReduction(part, over_rows=True, device=H200).run()
        total = part_sum if total is None else total + part_sum
        parts += 1
    assert (parts > 1) == (limit < 255_997)
    assert_bits_equal(column_sum(values, indexing_limit=limit), torch.from_numpy(total))


def test_two_gib_still_fit_32_bit_indexing():
    for element_size, rows in ((4, 131072), (2, 262144)):
        assert aten_model._fits_32bit_indexing(rows, 4096, element_size, 2**31 - 1)
        assert not aten_model._fits_32bit_indexing(rows + 1, 4096, element_size, 2**31 - 1)


def test_some_rows_are_summed_as_among_all():
    for rows, hidden_size in ((3, 512), (40, 512), (40, 8192), (7, 100)):
        values = hashed_normal((rows, hidden_size), seed=11)
        some = torch.tensor([0, rows // 2, rows - 1])
        assert_bits_equal(row_sum(values[some], total_rows=rows), row_sum(values)[some])
        assert_bits_equal(hashed_normal((rows, hidden_size), seed=11, rows=some), values[some], "rows=")


def test_sixteen_bit_columns_are_widened_first():
    values = hashed_normal((700, 128), seed=5, dtype=torch.bfloat16)
    assert_bits_equal(column_sum(values), column_sum(values.float(), element_size=2))


def test_sums_of_nothing_and_of_minus_zero():
    assert_bits_equal(row_sum(torch.zeros(0, 128)), torch.zeros(0))
    assert_bits_equal(column_sum(torch.zeros(0, 128)), torch.zeros(128))
    assert_bits_equal(row_sum(torch.full((2, 128), -0.0)), torch.zeros(2))
    assert_bits_equal(column_sum(torch.full((2, 128), -0.0)), torch.zeros(128))


def test_what_the_model_does_not_cover_is_refused():
    with pytest.raises(ValueError, match="multiple of 4"):
        row_sum(torch.zeros(2, 130))
    with pytest.raises(ValueError, match="at least 2"):
        column_sum(torch.zeros(2, 1))
    with pytest.raises(ValueError, match="rows, hidden_size"):
        row_sum(torch.zeros(128))
    with pytest.raises(TypeError, match="float32"):
        row_sum(torch.zeros(2, 128, dtype=torch.float16))


def test_mean_factor_is_formed_in_fp32():
    for rows in (1, 3, 300):
        assert aten_model.mean_factor(rows, 512).item() == 1 / 512
    # Rounding rows * hidden_size to fp32 moves the factor: a case of the golden vectors.
    factor = aten_model.mean_factor(16429, 4100)
    assert factor.item() != np.float32(1) / np.float32(4100)
    assert factor.item() == np.float32(16429) / np.float32(16429 * 4100)
    statistics = aten_model.rms_norm_statistics(hashed_normal((3, 4100), seed=1), 1e-6, total_rows=16429)
    assert_bits_equal(statistics.mean, statistics.sum * factor)
    assert not bits_equal(statistics.mean, statistics.sum / 4100)


# --- Formulas: where every sum is exact, order does not matter and CPU eager is a reference --------


def _small_integers(shape, seed, dtype, largest=3):
    span = 2 * largest + 1
    count = int(np.prod(shape))
    numbers = (hashed_int64(torch.arange(count), seed) >> 33).remainder(span) - largest
    return numbers.view(shape).to(dtype)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_formulas_equal_eager_where_sums_are_exact(dtype, weight_dtype):
    x = _small_integers((2, 5, 64), 1, dtype).requires_grad_()
    # Nine bits after the point: rounding the gradient to 16 bits matters, and sums stay exact.
    weight = _small_integers((64,), 2, torch.float32) + _small_integers((64,), 5, torch.float32, 255) / 512
    weight = weight.to(weight_dtype).requires_grad_()
    y = llama_rms_norm(x, weight, 1e-6)
    dy = _small_integers((2, 5, 64), 3, y.dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    statistics = aten_model.rms_norm_statistics(x.detach(), 1e-6)
    assert_bits_equal(statistics.mean, x.detach().float().pow(2).mean(-1), "mean")
    edges = aten_model.rms_norm_input_gradient(dy, x.detach(), weight.detach(), statistics.rstd)
    assert len(edges) == (2 if dtype == torch.float32 else 1)
    assert_bits_equal(aten_model.rms_norm(x.detach(), weight.detach(), 1e-6), y.detach(), "y")
    assert_bits_equal(functools.reduce(torch.add, edges), dx, "dx")

    # All of a row +-2^k and eps 0: rstd is 2^-k and the normalized values are +-1.
    sign = torch.where(_small_integers((2, 5, 64), 4, torch.float32) > 0, 1.0, -1.0)
    x = (sign * torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0]).view(5, 1)).to(dtype)
    rstd = aten_model.rms_norm_statistics(x, 0.0).rstd
    y = llama_rms_norm(x, weight, 0.0)
    (dweight,) = torch.autograd.grad(y, weight, dy)
    gradients = aten_model.rms_norm_backward(dy, x, weight.detach(), rstd)
    assert_bits_equal(gradients.dweight, dweight, "dweight")


def test_weight_gradient_sums_in_the_memory_order_of_the_product():
    x = hashed_normal((2, 40, 8, 64), seed=1)
    weight = hashed_normal((64,), seed=2)
    rstd = aten_model.rms_norm_statistics(x, 1e-6).rstd
    contiguous = hashed_normal((2, 40, 8, 64), seed=3)
    transposed = contiguous.transpose(1, 2).contiguous().transpose(1, 2)
    product = contiguous * aten_model.normalize(x, rstd)
    in_x_order = aten_model.rms_norm_weight_gradient(contiguous, x, weight, rstd)
    in_dy_order = aten_model.rms_norm_weight_gradient(transposed, x, weight, rstd)
    assert_bits_equal(in_x_order, column_sum(product.reshape(-1, 64)))
    assert_bits_equal(in_dy_order, column_sum(product.transpose(1, 2).reshape(-1, 64)))
    assert not bits_equal(in_x_order, in_dy_order)
    # A gradient without an order of its own (that of a sum) leaves it to x.
    expanded = torch.ones(()).expand(2, 8, 40, 64)
    by_x = aten_model.rms_norm_weight_gradient(expanded, x.transpose(1, 2), weight, rstd.transpose(1, 2))
    assert_bits_equal(by_x, column_sum(aten_model.normalize(x, rstd).reshape(-1, 64)))


def test_weight_gradient_of_a_single_row():
    x, dy = hashed_normal((64,), seed=1), torch.full((64,), -0.0)
    weight = torch.ones(64)
    rstd = aten_model.rms_norm_statistics(x, 1e-6).rstd
    product = dy * aten_model.normalize(x, rstd)
    # [64] is the weight's shape and is not summed; [1, 64] is, which turns -0 into 0.
    assert_bits_equal(aten_model.rms_norm_weight_gradient(dy, x, weight, rstd), product)
    summed = aten_model.rms_norm_weight_gradient(dy[None], x[None], weight, rstd[None])
    assert_bits_equal(summed, product + 0.0)
    assert not bits_equal(summed, product)


# --- The exact FMA --------------------------------------------------------------------------------


def _nearest_float32(exact):
    """The fp32 number nearest to a Fraction within fp32's range, ties to even."""
    guess = np.float32(float(exact))
    candidates = [
        guess,
        np.nextafter(guess, np.float32(np.inf)),
        np.nextafter(guess, np.float32(-np.inf)),
    ]

    def distance_then_odd(candidate):
        return abs(Fraction(float(candidate)) - exact), int(candidate.view(np.int32)) & 1

    return min(candidates, key=distance_then_odd)


def _near_ties(count, seed):
    """a, b, c with a * b + c a little off the middle between two fp32 numbers.

    a * b = odd * 2^-24 * (1 - 4^-k): where fp64 rounds onto the middle, rounding that to fp32 goes
    the wrong way half the time.
    """
    random = np.random.default_rng(seed)
    k = random.integers(14, 18, count)
    odd = (2 * random.integers(0, 32, count) + 1).astype(np.float64)
    sign = random.choice([-1.0, 1.0], count)
    a = (sign * odd * 2.0**-24 * (1 + 2.0**-k)).astype(np.float32)
    b = (1 - 2.0**-k).astype(np.float32)
    c = random.choice([1.0, -1.0, 1 + 2.0**-23, 4096.0, 1.5], count).astype(np.float32)
    return a, b, c


def test_fused_multiply_add_rounds_once():
    seed = fresh_seed()
    random = np.random.default_rng(seed)
    count = 4000
    wide = [
        (random.standard_normal(count) * 2.0 ** random.uniform(-70, 60, count)).astype(np.float32) for _ in range(3)
    ]
    cancelling = [random.standard_normal(count).astype(np.float32) for _ in range(2)]
    cancelling.append(-(cancelling[0] * cancelling[1]))
    subnormal = [
        (random.standard_normal(count) * 2.0 ** random.uniform(-80, -60, count)).astype(np.float32) for _ in range(2)
    ]
    subnormal.append((random.standard_normal(count) * 2.0**-140).astype(np.float32))
    hard = _near_ties(count, seed)
    twice_rounded = 0
    for a, b, c in (wide, cancelling, subnormal, hard):
        expected = np.array(
            [_nearest_float32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c)]
        )
        a, b, c = (torch.from_numpy(np.ascontiguousarray(v)) for v in (a, b, c))
        actual = aten_model.fused_multiply_add(a, b, c)
        # An exact 0 has a sign that a Fraction does not know.
        assert_bits_equal(actual + 0.0, torch.from_numpy(expected) + 0.0)
        naive = (a.double() * b.double() + c.double()).float()
        twice_rounded += int((naive != actual).sum())
    assert twice_rounded > 100, "the hard cases are not hard"


def test_fused_multiply_add_where_rounding_twice_fails():
    # 1 + 3 * 2^-24 is the middle of two fp32 numbers. This is 3 * 2^-56 less; fp64 cannot tell.
    a, b = torch.tensor([3 * 2.0**-24 * (1 + 2.0**-16)]), torch.tensor([1 - 2.0**-16])
    one = torch.ones(1)
    naive = (a.double() * b.double() + 1.0).float()
    assert aten_model.fused_multiply_add(a, b, one).item() == 1 + 2.0**-23
    assert naive.item() == 1 + 2.0**-22


def test_fused_multiply_add_outside_the_finite():
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([inf, inf, 2.0**127, -(2.0**127), nan, 1.0, -1.0, -0.0])
    b = torch.tensor([1.0, 0.0, 4.0, 4.0, 1.0, 1.0, 1.0, 1.0])
    c = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -inf, 1.0, -0.0])
    expected = torch.tensor([inf, nan, inf, -inf, nan, -inf, 0.0, -0.0])
    assert_bits_equal(aten_model.fused_multiply_add(a, b, c), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_takes_its_exponential_from_the_caller(dtype):
    x = hashed_normal((1000,), seed=1, dtype=dtype, scale=4.0)
    dy = hashed_normal((1000,), seed=2, dtype=dtype)
    exponential = torch.exp(-x.double()).float()
    y = aten_model.silu(x, exp=lambda negated: exponential)
    dx = aten_model.silu_backward(dy, x, exp=lambda negated: exponential)
    assert_bits_equal(y, (x.float() / (1 + exponential)).to(dtype))
    sigmoid = torch.sigmoid(x.double())
    slope = sigmoid * (1 + x.double() * (1 - sigmoid))
    # Six fp32 roundings of relative size 2^-24 and one of the dtype; where 1 + x * (1 - s) nearly
    # cancels, its error is absolute.
    error = (dx.double() - dy.double() * slope).abs()
    bound = (dy.double() * slope).abs() * torch.finfo(dtype).eps + dy.double().abs() * 2.0**-19
    assert bool((error <= bound).all())


# --- Inputs and comparisons -----------------------------------------------------------------------


def _splitmix64(index, seed):
    """`hashed_int64` in Python's integers."""
    mask = (1 << 64) - 1
    bits = (index + seed * 0xD1342543DE82EF95) * 0x9E3779B97F4A7C15 & mask
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
    return bits ^ bits >> 31


def test_hash_is_splitmix64():
    for seed in (0, 1, 12345, 2**40 + 7):
        hashes = hashed_int64(torch.arange(1000), seed).tolist()
        assert [value % 2**64 for value in hashes] == [_splitmix64(i, seed) for i in range(1000)]


@pytest.mark.parametrize(
    "dtype, expected",
    [
        (torch.float32, ("be0ba587", "3fd6b24d", "401ba565", "3f67f5a1", "be8d6998", "3fc25bc1")),
        (torch.float16, ("b05d", "3eb6", "40dd", "3b40", "b46b", "3e13")),
        (torch.bfloat16, ("be0c", "3fd7", "401c", "3f68", "be8d", "3fc2")),
    ],
    ids=str,
)
def test_inputs_never_change(dtype, expected):
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    digits = 8 if dtype == torch.float32 else 4
    values = hashed_normal((1 << 18,), seed=42, dtype=dtype, scale=1.5)
    patterns = values[[0, 1, 2, 1000, 70000, -1]].view(integer).tolist()
    assert tuple(f"{p % 16**digits:0{digits}x}" for p in patterns) == expected


def test_inputs_are_nearly_normal():
    values = hashed_normal((1000, 1000), seed=3, scale=2.0)
    # A million numbers, always the same: the standard error of their mean is 0.002, of the others less.
    assert abs(values.mean().item()) < 0.02
    assert abs(values.std().item() - 2.0) < 0.01
    assert abs((values.abs() < 2.0).float().mean().item() - 0.683) < 0.02
    assert not bits_equal(values, hashed_normal((1000, 1000), seed=4, scale=2.0))


def test_bits_equal():
    a = torch.tensor([1.0, 0.0, float("nan")])
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert bits_equal(a, torch.cat([a[:2], other_nan]))
    assert not bits_equal(a, torch.tensor([1.0, -0.0, float("nan")]))
    assert not bits_equal(a, torch.tensor([1.0, 0.0, 0.0]))
    assert not bits_equal(a, a.half())
    assert not bits_equal(a, a[None])
    assert bits_equal(a[::2], a[::2].clone())
    assert bits_equal(torch.tensor([1, 2]), torch.tensor([1, 2]))
    assert same_layout(torch.zeros(2, 3), torch.ones(2, 3))
    assert not same_layout(torch.zeros(2, 3), torch.zeros(3, 2).t())


def test_a_difference_is_described():
    a = torch.zeros(2, 3)
    b = a.clone()
    b[1, 2] = 1e-45
    b[1, 1] = float("nan")
    with pytest.raises(AssertionError) as caught:
        assert_bits_equal(b, a, "dx")
    message = str(caught.value)
    assert message.startswith("dx: 2 of 6 elements differ; first at (1, 1): nan (0x7fc00000)")
    assert "instead of 0.0 (0x00000000)" in message
    assert "at most 1 ulp apart; NaN on one side only 1 times" in message
    with pytest.raises(AssertionError, match="dtype"):
        assert_bits_equal(a, a.half())
    with pytest.raises(AssertionError, match="shape"):
        assert_bits_equal(a, a[:1])
    assert_bits_equal(a, a.clone())


def test_seed_can_be_repeated(monkeypatch, capsys):
    monkeypatch.setenv("LOSSLESS_SEED", "0x10")
    assert fresh_seed() == 16
    assert "LOSSLESS_SEED=16" in capsys.readouterr().out
