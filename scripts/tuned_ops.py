"""The ops that `tune.py` tunes, one class a family: what is measured, which launch configurations are tried, how kernels are called."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Callable, Optional

from cases import DTYPES, EPS, OPS

# Backward passes are tuned from this many rows on.
TRAINING_ROWS = 512
# Bounds on the elements measured in the last range: short rows are measured with more rows, long rows with fewer.
LEAST_ELEMENTS, MOST_ELEMENTS = 1 << 23, 1 << 28
ACTIVATION_SHAPE = (8192, 14336)
# Most bytes of dweight's partial sums over bytes of the input in a fused backward kernel, unless the default exceeds it.
MOST_SUMS = 1 / 50
# Most elements of a fused backward program that keeps its rows.
FUSED_TILE = 1 << 13
# Fused backward kernels stream rows from this length on.
STREAMED_TILE = 1 << 14
# Forward kernels may stream rows from this length on: a step of a shorter row is too small to be loaded alone.
LEAST_STREAMED_FORWARD = 1 << 13
# Row lengths for by_lane. Below FEW_BY_LANE rows there is no upper limit; from ROWS_BY_LANE rows on it is not tried,
# because it needs more load requests.
LEAST_BY_LANE = 1 << 10
MOST_BY_LANE = 1 << 13
FEW_BY_LANE = 512
ROWS_BY_LANE = 8192
# Several programs share a row while there are at most this many programs, one for each SM, and within these elements that a
# thread writes and reads.
MOST_SHARING = 128
WRITTEN_A_THREAD = range(4, 33)
MOST_READ_A_THREAD = 128
# Prefetching into the L2 cache is tried from this many rows on, since fewer rows are all in flight at once, and with few rows
# per program, since each row is one request.
PREFETCHING_ROWS = 512
MOST_PREFETCHED = 2
# Softmax: elements that are measured, and heads that share a mask.
SOFTMAX_ELEMENTS, HEADS = 1 << 26, 32

Fields = dict[str, Any]


@dataclass
class Given:
    """The tensors of a call; None where an op has none."""

    x: Any
    weight: Any = None
    dy: Any = None
    rstd: Any = None
    d_sum: Any = None
    residual: Any = None
    mask: Any = None
    y: Any = None
    statistics: Any = None


class TunedOp:
    """One tuned op.

    Attributes:
        chooses: what its launch configurations choose, for --help.
        has_size: its launch configurations are for one hidden size or length of rows, and a range of rows, each.
        sources: the files in `kernels_src` with its kernels.
    """

    chooses: str
    has_size = False
    sources: tuple[str, ...]

    def __init__(self, op: str):
        self.op = op

    def shapes(self, hidden_sizes, ranges) -> Iterator[tuple]:
        """`(shape, least rows, most rows)` of each case; `ranges` holds `(least, most, measured)`."""
        raise NotImplementedError

    def covers(self, package, point) -> bool:
        """Whether a launch configuration has an effect on this case."""
        return True

    def candidates(self, point, default: Fields, threads) -> list[list[Fields]]:
        """Changes of the default's fields to try, by stage."""
        raise NotImplementedError

    def default(self, package, point, device):
        """The default launch configuration, a Plan of the package."""
        raise NotImplementedError

    def threads(self, package, point, device) -> Optional[tuple[int, int]]:
        """What `candidates` must know of ATen's order of sums."""

    def call(self, package, sets: list) -> Callable[[int], Any]:
        """A call of the kernels with the launch configuration that the package uses now, a function of the index of its inputs."""
        raise NotImplementedError

    def given(self, package, inputs) -> Given:
        """The tensors that the kernels take, of a benchmark's inputs."""
        raise NotImplementedError

    def unfilled(self, shape: tuple, dtype, device) -> Given:
        """The same without values, for compiling."""
        raise NotImplementedError

    def eager(self, package) -> Callable:
        """The function whose results, or gradients, are expected."""
        raise NotImplementedError

    def expected(self, found: tuple) -> tuple:
        """Of what eager returns the part that the kernels return."""
        return found

    def results(self, found) -> list:
        """The tensors that a call returns, as eager returns them."""
        return list(found)

    def skips(self, changes: list[Fields], best: Fields) -> bool:
        """Whether a stage is pointless after this result."""
        return False


def powers_of_two(least: int, most: int) -> list[int]:
    return [1 << power for power in range(20) if least <= 1 << power <= most]


def programs(tile: int, most_rows: int, most_elements: int, a_thread: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """(rows, warps) of a program for which each thread has between `a_thread[0]` and `a_thread[1]` elements."""
    for rows, warps in itertools.product(powers_of_two(1, min(most_rows, 64)), powers_of_two(1, 32)):
        elements = rows * tile
        if (rows == 1 or 512 <= elements <= most_elements) and a_thread[0] <= elements // (32 * warps) <= a_thread[1]:
            yield rows, warps


def tile_of(hidden_size: int) -> int:
    return 1 << (hidden_size - 1).bit_length()


class Norm(TunedOp):
    """RMSNorm, alone and with a residual add."""

    chooses = """\
rows and warps per program; whether a row is kept in registers (default), read a second time (streamed)
or read in two layouts at once (by_lane); programs per row; prefetching of later rows into the L2 cache"""
    has_size = True
    sources = ("rms_norm", "rms_norm_backward")
    least_rows = 1

    @property
    def adds(self) -> bool:
        """Whether the op adds a residual, or the residual's gradient."""
        return OPS[self.op].outputs == 2

    def shapes(self, hidden_sizes, ranges):
        for (least, most, measured), hidden_size in itertools.product(ranges, hidden_sizes):
            if least < self.least_rows and len(ranges) > 1:
                continue
            if most is None:
                measured = min(max(measured, LEAST_ELEMENTS // hidden_size), MOST_ELEMENTS // hidden_size)
            if measured >= least:
                yield (measured, hidden_size), least, most

    def candidates(self, point, default, _):
        tile, few = tile_of(point.case.hidden_size), point.case.rows < FEW_BY_LANE
        kept = {"streamed": False, "by_lane": False, "programs_per_row": 1}
        ways = [kept]
        if point.case.hidden_size >= LEAST_STREAMED_FORWARD:
            ways.append({**kept, "streamed": True})
        if LEAST_BY_LANE <= tile and (
            few or (tile <= MOST_BY_LANE and point.least_rows < ROWS_BY_LANE and not self.adds)
        ):
            ways.append({**kept, "by_lane": True})
        first = [
            {"rows_per_program": rows, "num_warps": warps, "prefetch": prefetch, **way}
            for way in ways
            for rows, warps in programs(tile, 1 if few and way["by_lane"] else point.least_rows, 1 << 14, (4, 128))
            for prefetch in (False, True)
            if not prefetch or (point.least_rows >= PREFETCHING_ROWS and rows <= MOST_PREFETCHED)
        ]
        shared = {**kept, "rows_per_program": 1, "prefetch": False, "by_lane": True}
        first += [
            {**shared, "num_warps": warps, "programs_per_row": sharing}
            for sharing, warps in itertools.product(powers_of_two(2, 16), powers_of_two(2, 16))
            if LEAST_BY_LANE <= tile <= MOST_READ_A_THREAD * 32 * warps
            and point.most_rows is not None
            and sharing * point.most_rows <= MOST_SHARING
            and tile // (sharing * 32 * warps) in WRITTEN_A_THREAD
        ]
        return [first]

    def default(self, package, point, device):
        plan, gpu = package.module("ops.rms_norm.plan"), package.plans.gpu(device)
        return plan.default_plan(*point.case.shape, point.element_size, self.adds, gpu)

    def call(self, package, sets):
        import torch

        llama, x = package.module("ops.rms_norm.formulas").LLAMA, sets[0].x
        rows, hidden_size = x.shape
        forward = package.module("ops.rms_norm.plan").forward
        launch = forward(llama, x.dtype, x.dtype, hidden_size, rows, hidden_size, x.device, EPS, added=self.adds)
        if self.adds:

            def call(index):
                given = sets[index]
                normed, total = torch.empty_like(given.x), torch.empty_like(given.x)
                launch.call_5(given.x, given.residual, given.weight, normed, total)
                return normed, total

        else:

            def call(index):
                given = sets[index]
                out = torch.empty_like(given.x)
                launch.call_3(given.x, given.weight, out)
                return (out,)

        return call

    def given(self, package, inputs):
        *inputs_, weight = (tensor.detach() for tensor in inputs.arguments)
        return Given(inputs_[0], weight, residual=inputs_[-1])

    def unfilled(self, shape, dtype, device):
        import torch

        rows, hidden_size = shape
        x, dy = (torch.empty(rows, hidden_size, dtype=dtype, device=device) for _ in range(2))
        weight, rstd = torch.empty(hidden_size, dtype=dtype, device=device), torch.empty(rows, 1, device=device)
        return Given(x, weight, dy, rstd, dy if self.adds else None, residual=dy)

    def eager(self, package):
        llama = package.module("ops.rms_norm.formulas").LLAMA

        def rms_norm(x, weight):
            return llama.eager(x, weight, EPS)

        def add_rms_norm(x, residual, weight):
            total = residual + x
            return rms_norm(total, weight), total

        return add_rms_norm if self.adds else rms_norm


class NormBackward(Norm):
    """The gradients of RMSNorm, alone and with those of a residual add."""

    chooses = "one fused kernel or several; rows, warps and stages; columns, stages and warps of dweight's sums"
    least_rows = TRAINING_ROWS

    def candidates(self, point, default, threads):
        """Three stages: the kernel that computes dx and chains of dweight, the kernel for the chains alone, and that for sums."""
        tile, (height, leaving) = tile_of(point.case.hidden_size), threads
        input_bytes = point.least_rows * point.element_size
        least = min(
            leaving * 4 / (MOST_SUMS * input_bytes), default["rows_per_program"] if default["fused"] else height
        )
        first = [
            {"fused": False, "rows_per_program": rows, "num_warps": warps, "streamed": False}
            for rows, warps in programs(tile, 16, 1 << 14, (8, 128))
        ]
        if tile >= STREAMED_TILE:
            first += [{"fused": True, "rows_per_program": 1, "num_warps": warps, "streamed": True} for warps in (8, 16)]
        else:
            first += [
                {"fused": True, "rows_per_program": rows, "num_warps": warps, "streamed": False, "stages": stages}
                for rows, warps in programs(tile, height, FUSED_TILE, (8 if tile < 1024 else 16, 32))
                if rows >= least
                for stages in (3, 4, 5, 6)
            ]
        chains = [
            {"fused": False, "streamed": False, "chain_columns": width, "chain_stages": stages, "chain_warps": warps}
            for width, stages, warps in itertools.product((32, 64, 128, 256), (1, 3, 4), (4, 8))
            if 4 <= 4 * height * width // (32 * warps) <= 32
        ]
        sums = [
            {"sum_columns": columns, "sum_log2_steps": steps, "sum_warps": warps}
            for columns, steps, warps in itertools.product((16, 32, 64), (3, 4), (4, 8))
        ]
        # If the default fuses the chains into the kernel of dx, a separate kernel has never been faster.
        return [first, [] if default["fused"] else chains, sums]

    def _columns(self, package, point, device, rows: int):
        """ATen's reduction order of dweight's sum over `rows` rows."""
        gpu, reduction = package.plans.gpu(device), package.module("core.reduction")
        return reduction.column_reduction(rows, point.case.hidden_size, gpu.multiprocessors, gpu.threads)

    def threads(self, package, point, device):
        """Threads that share a column in ATen's sum of dweight: in a block, and in all blocks at the point's fewest rows."""
        fewest = self._columns(package, point, device, point.least_rows)
        return self._columns(package, point, device, point.case.rows).height, fewest.blocks * fewest.height

    def default(self, package, point, device):
        columns = self._columns(package, point, device, point.case.rows)
        multiprocessors = package.plans.gpu(device).multiprocessors
        dx_mode = "accumulate" if self.adds else "single"
        backward = package.module("ops.rms_norm.backward")
        return backward.default_plan(*point.case.shape, columns, multiprocessors, point.element_size, dx_mode)

    def call(self, package, sets):
        llama, backward = package.module("ops.rms_norm.formulas").LLAMA, package.module("ops.rms_norm.backward")
        first = sets[0]
        dx_mode = backward.dx_mode_of(llama, first.x.dtype, first.d_sum)
        resolved = backward.resolve(llama, first.dy, first.x, first.weight, first.rstd, True, True, dx_mode)

        def call(index):
            given = sets[index]
            return resolved(given.dy, given.x, given.weight, given.rstd, given.d_sum)

        return call

    def given(self, package, inputs):
        import torch

        *inputs_, weight = (tensor.detach() for tensor in inputs.arguments)
        x = functools.reduce(torch.add, reversed(inputs_))
        dy, d_sum = inputs.dy if isinstance(inputs.dy, tuple) else (inputs.dy, None)
        rstd = package.module("ops.rms_norm.formulas").eager_rstd(x.to(torch.float32), EPS)
        return Given(x, weight, dy, rstd, d_sum)

    def expected(self, found):
        # x and the residual have the same gradient, which the kernels return once.
        return found[OPS[self.op].outputs + OPS[self.op].inputs - 1 :]

    def results(self, found):
        # Of fp32 activations autograd adds two gradients, so they are added here.
        return [found.dx if found.dx_mean is None else found.dx + found.dx_mean, found.dweight]

    def skips(self, changes, best):
        # The fastest configuration has no separate kernel for chains.
        return "chain_columns" in changes[0] and best["fused"]


class Activation(TunedOp):
    """SiLU, the activation that ships with tuned launch configurations."""

    chooses = "elements and warps per program"
    sources = ("activation",)

    def shapes(self, hidden_sizes, ranges):
        yield ACTIVATION_SHAPE, 1, None

    def candidates(self, point, default, _):
        blocks = itertools.product(powers_of_two(256, 8192), powers_of_two(1, 16))
        return [[{"block": block, "num_warps": warps} for block, warps in blocks if 2 <= block // (32 * warps) <= 32]]

    def default(self, package, point, device):
        return package.module("ops.activation").launch_plan(self.op, point.element_size)

    def call(self, package, sets):
        import torch

        activation, x = package.module("ops.activation"), sets[0].x
        if OPS[self.op].backward:
            launch = activation._backward(activation.SILU, x.dtype, x.numel(), x.device)

            def call(index):
                dx = torch.empty_like(sets[index].dy)
                launch.call_3(sets[index].dy, sets[index].x, dx)
                return (dx,)

        else:
            launch = activation._forward(activation.SILU, x.dtype, activation.Layout.of(x, x), x.device)

            def call(index):
                out = torch.empty_like(sets[index].x)
                launch.call_2(sets[index].x, out)
                return (out,)

        return call

    def given(self, package, inputs):
        (x,) = inputs.arguments
        return Given(x.detach(), dy=inputs.dy)

    def unfilled(self, shape, dtype, device):
        import torch

        x, dy = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        return Given(x, dy=dy)

    def eager(self, package):
        import torch

        return torch.nn.functional.silu

    def expected(self, found):
        return found[1:] if OPS[self.op].backward else found


class Softmax(TunedOp):
    """Softmax, its gradient, and both of masked attention scores, where a program keeps a row in registers."""

    chooses = """\
warps per program, for any number of rows of one length, if a program keeps a row in registers: from 1025 (gradients)
or 2049 elements to about 24500 in 16 bits, and to about 12250 in fp32 and of masked scores; longer rows that fill whole
steps of ATen's threads, up to 32768 elements"""
    has_size = True

    def __init__(self, op: str):
        super().__init__(op)
        self.masked, self.backward = op.startswith("masked"), OPS[op].backward
        self.sources = ("masked_softmax" if self.masked else "softmax",)

    def shapes(self, hidden_sizes, ranges):
        for size in hidden_sizes:
            queries = SOFTMAX_ELEMENTS // (HEADS * size)
            # All heads have one mask.
            yield (1, HEADS, queries, size) if self.masked else (HEADS * queries, size), 1, None

    def covers(self, package, point):
        with package.planned({"num_warps": 4}):
            return self._kind_of_rows(package, point, "cpu").plan is not None

    def candidates(self, point, default, _):
        size = point.case.hidden_size
        return [[{"num_warps": warps} for warps in powers_of_two(1, 16) if 16 <= size // (32 * warps) <= 128]]

    def default(self, package, point, device):
        _, warps = self._kind_of_rows(package, point, device).program
        return package.module("ops.softmax").SoftmaxPlan(warps)

    def _kind_of_rows(self, package, point, device):
        import torch

        unfilled = self.unfilled(point.case.shape, getattr(torch, DTYPES[point.dtype]), "meta")
        kind = self._kind(package, unfilled, torch.device(device), self.backward)
        return kind.rows if self.masked else kind

    def _kind(self, package, given: Given, device, backward: bool):
        """The kind of the kernel with the launch configuration that the package uses now."""
        x = given.x
        rows, size = x.numel() // x.shape[-1], x.shape[-1]
        if self.masked:
            multiple, family = self._walk(package, given).multiple, package.module("ops.masked_softmax")
            long_warps = family.has_long_warps(x.dtype, device)
            kind = family.Kind.of(backward, x.dtype, size, multiple, True, 1.0, long_warps)
            return kind.planned(size, rows, device)
        kind = package.module("ops.softmax").Kind.of(backward, x.dtype, x.dtype, size, size)
        return kind.planned("softmax", x.dtype, size, rows, device)

    def _walk(self, package, given: Given):
        return package.module("ops.masked_softmax")._Walk.of(given.x.shape, given.mask.expand(given.x.shape).stride())

    def _launch(self, package, given: Given, backward: bool):
        x = given.x
        kind = self._kind(package, given, x.device, backward)
        if self.masked:
            return self._walk(package, given).bind(kind, 1.0, x.device)
        rows, size = x.numel() // x.shape[-1], x.shape[-1]
        return package.module("ops.softmax")._bind(kind, rows, size, size, x.device)

    def call(self, package, sets):
        import torch

        launch = self._launch(package, sets[0], self.backward)

        def call(index):
            given = sets[index]
            out = torch.empty_like(given.x)
            if self.masked and self.backward:
                launch.call_5(given.dy, given.x, given.statistics, out, given.mask)
            elif self.masked:
                launch.call_4(given.x, out, given.statistics, given.mask)
            elif self.backward:
                launch.call_3(given.dy, given.y, out)
            else:
                launch.call_2(given.x, out)
            return (out,)

        return call

    def given(self, package, inputs):
        import torch

        x, *mask = (tensor.detach() for tensor in inputs.arguments)
        given = Given(x, dy=inputs.dy)
        if self.masked:
            given.mask = mask[0]
            given.statistics = torch.empty(x.numel() // x.shape[-1], 2, dtype=torch.float32, device=x.device)
            self._launch(package, given, False).call_4(x, torch.empty_like(x), given.statistics, given.mask)
        elif self.backward:
            given.y = torch.softmax(x, -1)
        return given

    def unfilled(self, shape, dtype, device):
        import torch

        x, dy = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        given = Given(x, dy=dy, y=dy)
        if self.masked:
            given.mask = torch.empty(shape[0], 1, *shape[2:], dtype=dtype, device=device)
            given.statistics = torch.empty(x.numel() // shape[-1], 2, dtype=torch.float32, device=device)
        return given

    def eager(self, package):
        from ops.softmax import eager

        return eager()[self.op.removesuffix("_backward")]

    def expected(self, found):
        return found[1:] if self.backward else found


TUNED = {
    tuned.op: tuned
    for tuned in (
        Norm("rms_norm"),
        Norm("add_rms_norm"),
        NormBackward("rms_norm_backward"),
        NormBackward("add_rms_norm_backward"),
        Activation("silu"),
        Activation("silu_backward"),
        *map(Softmax, ("softmax", "softmax_backward", "masked_softmax", "masked_softmax_backward")),
    )
}
