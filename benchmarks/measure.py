"""Clocks, inputs and comparisons of one case, with all peers on the same tensors."""

import contextlib
import functools
import gc
import itertools
import math
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Callable, Optional, Union

import torch
from cases import CPU_OPS, EAGER, OPS, OURS, Case, Op
from report import Report, Result, quartiles

# Calls rotate over sets of inputs. All sets together hold this many times the L2 cache, so that a set has left the cache
# before its next turn.
_CACHES = 16
_MAX_SETS = 64
# GPU time of a peer's turn before the next peer's turn, and of one CUDA graph.
_TURN_MS = 2.0
_MAX_CALLS_A_TURN = 10
_MAX_CALLS_A_GRAPH = 512
# The speed of a CPU changes within seconds, so turns are short (milliseconds) and many.
_CPU_CALLS_A_TURN = 200
_CPU_TURNS_A_ROUND = 10
_COPY_BYTES = 1 << 31
_COPIES = 40
_INTEGERS = {2: torch.int16, 4: torch.int32}


class Gpu:
    """The current GPU and its clocks.

    All work goes to one stream other than the default one. A backward pass runs on its forward's stream, and the default
    stream cannot be captured into a CUDA graph.
    """

    device = torch.device("cuda")
    # Converts seconds for `torch.cuda._sleep`. A GPU with a lower clock sleeps longer.
    _CYCLES_PER_SECOND = 2e9

    def __init__(self):
        torch.cuda.set_stream(torch.cuda.Stream())
        properties = torch.cuda.get_device_properties(self.device)
        self.name = properties.name
        self.l2_bytes = properties.L2_cache_size

    def synchronize(self):
        torch.cuda.synchronize()

    def release(self):
        gc.collect()
        torch.cuda.empty_cache()

    def times(self, call: Callable[[int], object], indices: Iterable[int], head_start: float) -> list[float]:
        """CUDA-event timing: milliseconds of `call(index)` for each index.

        The GPU sleeps `head_start` seconds before each call, so that the CPU has enqueued all of the call before the first
        event. Outputs are kept to the end, so that each call writes memory of its own, as in a model.
        """
        events, outputs = [], []
        for index in indices:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(head_start * self._CYCLES_PER_SECOND))
            start.record()
            outputs.append(call(index))
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def capture(self, call: Callable[[int], object], indices: Iterable[int]) -> Callable[[int], None]:
        """Captures all these calls in one CUDA graph; returns a function that replays it."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                outputs = [call(index) for index in indices]
        except Exception as error:
            # After an invalidated capture the allocator still allocates to the graph's pool, and `empty_cache` would fail.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), graph.pool())
            # Ending an invalidated capture raises an error as well; the one in its context names the cause.
            raise error.__context__ or error from None
        del outputs
        return lambda _: graph.replay()


def copy_bandwidth(gpu) -> tuple[float, float, float]:
    """GB/s of a device-to-device copy of 2 GiB: lower quartile, median, upper quartile.

    Bytes read and bytes written both count.
    """
    source, target = (torch.empty(_COPY_BYTES // 2, dtype=torch.bfloat16, device=gpu.device) for _ in range(2))
    source.normal_()
    times = gpu.times(lambda _: target.copy_(source), range(_COPIES + 5), head_start=100e-6)[5:]
    return quartiles(2 * _COPY_BYTES / milliseconds / 1e6 for milliseconds in times)


# Inputs and outputs


@dataclass
class Inputs:
    """The tensors of one call.

    Attributes:
        arguments: of a peer's function: (x, weight), (x, residual, weight), (x,), (gate, up) or (q, k, cos, sin).
        dy: gradient of the output, or a tuple with one for each output; None for a forward op.
    """

    arguments: tuple
    dy: Union[torch.Tensor, tuple, None]

    @property
    def differentiable(self) -> tuple:
        return tuple(argument for argument in self.arguments if argument.requires_grad)

    def copy(self) -> "Inputs":
        arguments = (tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self.arguments)
        dys = tuple(dy.clone() for dy in self.dy) if isinstance(self.dy, tuple) else self.dy
        return Inputs(tuple(arguments), dys)


def sets_needed(moved: int, l2_bytes: int) -> int:
    """How many sets of inputs calls rotate over if one call moves `moved` bytes."""
    return min(max(math.ceil(_CACHES * l2_bytes / moved), 1), _MAX_SETS)


def draw(case: Case, dtype: torch.dtype, device, count: int) -> list[Inputs]:
    """Random inputs. If an op has none of its own they are rows, and all sets share the weight, as all calls of a layer do.

    Raises:
        ValueError: the op has no such shape.
    """
    op, options = OPS[case.op], {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    normal, below = functools.partial(torch.randn, dtype=dtype, **options), functools.partial(torch.randint, **options)
    if op.draw:
        return [Inputs(*op.draw(case, op, SimpleNamespace(normal=normal, below=below))) for _ in range(count)]
    # A weight of 1 would hide where a formula rounds.
    weights = [(1 + 0.5 * normal(case.hidden_size)).requires_grad_(op.backward)] if op.vectors else []

    def rows():
        inputs = [normal(case.shape).requires_grad_(op.backward) for _ in range(op.inputs)]
        dys = tuple(normal(case.shape) for _ in range(op.outputs * op.backward))
        return Inputs((*inputs, *weights), dys if len(dys) > 1 else dys[0] if dys else None)

    return [rows() for _ in range(count)]


def outcome(function, inputs: Inputs, op: Op) -> tuple:
    """The outputs and, for a backward op, the gradients."""
    if getattr(function, "in_place", False):
        inputs = inputs.copy()
    found = function(*inputs.arguments)
    outs = found if isinstance(found, tuple) else (found,)
    if not op.backward:
        return outs
    return *(out.detach() for out in outs), *torch.autograd.grad(found, inputs.differentiable, inputs.dy)


def _layout(tensor):
    # The stride of a dimension of length 1 is arbitrary.
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]
    return tensor.shape, tensor.dtype, strides


def same_bits(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> bool:
    """Whether shapes, dtypes, strides and all bits are equal."""
    return all(
        _layout(a) == _layout(e) and torch.equal(a.view(_INTEGERS[a.itemsize]), e.view(_INTEGERS[e.itemsize]))
        for a, e in zip(found, expected, strict=True)
    )


@contextlib.contextmanager
def blamed_on(result: Result, doing: str = ""):
    """Stores an error of a peer in its result, so that the other peers are still measured."""
    try:
        yield
    except Exception as error:
        result.error = doing + reason(error)


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


@contextlib.contextmanager
def counted_launches(kernel):
    """Inside, a function that returns how many kernels the package has launched."""
    launch = sys.modules[f"{kernel.__name__}.core.launch"].Launch
    launched, enqueue = [0], launch._enqueue

    def counted(self, *arguments):
        launched[0] += 1
        return enqueue(self, *arguments)

    launch._enqueue = counted
    try:
        yield lambda: launched[0]
    finally:
        launch._enqueue = enqueue


def compare(functions: dict, results: list[Result], sets: list[Inputs], op: Op) -> None:
    """Sets `bit_equal` of each result: lossless-kernels on all sets of inputs, the others on the first."""
    by_peer = {result.peer: result for result in results}
    for index, inputs in enumerate(sets):
        with blamed_on(by_peer[EAGER]):
            expected = outcome(functions[EAGER], inputs, op)
        if by_peer[EAGER].error:
            return
        for peer in functions if index == 0 else (OURS,):
            result = by_peer[peer]
            if result.error is None:
                with blamed_on(result):
                    equal = same_bits(outcome(functions[peer], inputs, op), expected)
                    result.bit_equal = equal and result.bit_equal is not False


# Device time


def prepare(function, sets: list[Inputs], op: Op) -> Callable[[int], object]:
    """The timed call, a function of the index of its inputs; for a backward op that is no step, the backward pass alone."""
    if not op.backward:
        return lambda index: function(*sets[index].arguments)
    if op.step:

        def step(index):
            inputs = sets[index]
            return torch.autograd.grad(function(*inputs.arguments), inputs.differentiable, inputs.dy)

        return step
    outputs = [function(*inputs.arguments) for inputs in sets]

    def backward(index):
        inputs = sets[index]
        return torch.autograd.grad(outputs[index], inputs.differentiable, inputs.dy, retain_graph=True)

    return backward


@dataclass
class Runner:
    """One peer in one case.

    Attributes:
        call: the timed call, by the index of its inputs.
        indices: endless; the inputs of the next calls.
        head_start: seconds in which the CPU surely enqueues a call.
        estimate: milliseconds of a call by CUDA-event timing.
        times: CUDA-event timing, ms of each call.
        device_times: device time in a CUDA graph, ms a call, one of each replay.
        turn_ms: GPU time of a turn, and of a CUDA graph.
    """

    result: Result
    call: Callable[[int], object]
    indices: Iterable[int]
    head_start: float = 0.0
    estimate: float = 0.0
    times: list[float] = field(default_factory=list)
    graph: Optional[Callable[[int], None]] = None
    calls_a_graph: int = 0
    device_times: list[float] = field(default_factory=list)
    turn_ms: float = _TURN_MS

    def next(self, count: int) -> list[int]:
        return list(itertools.islice(self.indices, count))

    def calls_in_turn(self, least: int, most: int) -> int:
        return min(max(math.ceil(self.turn_ms / max(self.estimate, 1e-4)), least), most)

    def warm_up(self, gpu) -> None:
        """Also sets `head_start` and `estimate`."""
        cpu_times = []
        for index in self.next(3):
            gpu.synchronize()
            start = time.perf_counter()
            self.call(index)
            cpu_times.append(time.perf_counter() - start)
        self.head_start = 2 * min(cpu_times) + 50e-6
        self.estimate = quartiles(gpu.times(self.call, self.next(3), self.head_start))[1]
        # The allocator reserves the memory of a turn here, not while the turn is timed.
        gpu.times(self.call, self.next(self.calls_a_turn), self.head_start)

    @property
    def calls_a_turn(self) -> int:
        return self.calls_in_turn(1, _MAX_CALLS_A_TURN)

    def time_turn(self, gpu) -> None:
        self.times += gpu.times(self.call, self.next(self.calls_a_turn), self.head_start)

    def capture(self, gpu) -> None:
        self.calls_a_graph = self.calls_in_turn(2, _MAX_CALLS_A_GRAPH)
        self.graph = gpu.capture(self.call, self.next(self.calls_a_graph))
        gpu.times(self.graph, range(2), head_start=100e-6)

    def time_graph(self, gpu) -> None:
        (milliseconds,) = gpu.times(self.graph, range(1), head_start=100e-6)
        self.device_times.append(milliseconds / self.calls_a_graph)


def in_turns(runners: list[Runner], rounds: int, doing: str, step: Callable[[Runner], None]) -> None:
    """One step of each peer a round, in another order each round: changes of clock and temperature affect all alike."""
    shuffle = random.Random(0)
    for _ in range(rounds):
        for runner in shuffle.sample(runners, len(runners)):
            if runner.result.error is None:
                with blamed_on(runner.result, doing):
                    step(runner)


def device_case(case: Case, functions: dict, gpu, report: Report, rounds: int, dtype: torch.dtype) -> list[Result]:
    """All peers in one case, by CUDA-event timing and by device time in a CUDA graph.

    Args:
        functions: peer -> function of the op's `Inputs.arguments`.
    """
    op = OPS[case.op]
    moved = case.bytes(report.dtype)
    results = [Result(case.op, case.shape, report.dtype, peer) for peer in functions]
    with torch.set_grad_enabled(op.backward):
        sets = draw(case, dtype, gpu.device, sets_needed(moved, gpu.l2_bytes))
        compare(functions, results, sets, op)
        gpu.release()
        runners = []
        for result in results:
            if result.error is None:
                with blamed_on(result):
                    call = prepare(functions[result.peer], sets, op)
                    runners.append(Runner(result, call, itertools.cycle(range(len(sets)))))
                    runners[-1].warm_up(gpu)
        in_turns(runners, rounds, "", lambda runner: runner.time_turn(gpu))
        for runner in runners:
            if runner.result.error is None:
                with blamed_on(runner.result, "in a CUDA graph: "):
                    runner.capture(gpu)
        in_turns(runners, rounds, "in a CUDA graph: ", lambda runner: runner.time_graph(gpu))
    for runner in runners:
        conclude(runner, report, moved)
    return results


def conclude(runner: Runner, report: Report, moved: int) -> None:
    """Stores medians, quartiles and fractions of the roofline in the runner's result."""
    result, roofline = runner.result, report.roofline_ms(runner.result.case)
    if runner.times:
        low, median, high = quartiles(runner.times)
        if median < 0.6 * roofline and moved > 2 * report.l2_bytes:
            result.error = (
                f"expected at least 0.6 x the roofline's {roofline:.4f} ms, found {median:.4f} ms: not all of the work was "
                "on the timed stream"
            )
            return
        result.samples = len(runner.times)
        result.median_ms, result.quartiles_ms = median, (low, high)
        result.gb_per_s, result.roofline_fraction = moved / median / 1e6, roofline / median
    if runner.device_times:
        low, median, high = quartiles(runner.device_times)
        result.device_ms, result.device_quartiles_ms = median, (low, high)
        result.device_roofline_fraction = roofline / median


# CPU time


def cpu_case(case: Case, calls: dict, gpu, dtype_name: str, rounds: int) -> list[Result]:
    """CPU time of one call of each peer: calls are repeated without waiting for the GPU.

    Args:
        calls: peer -> function without arguments that returns the output.
    """
    results = {peer: Result(case.op, case.shape, dtype_name, peer) for peer in calls}
    times = {peer: [] for peer in calls}

    def turn(peer):
        call = calls[peer]
        gpu.synchronize()
        start = time.perf_counter()
        for _ in range(_CPU_CALLS_A_TURN):
            call()
        times[peer].append((time.perf_counter() - start) * 1e3 / _CPU_CALLS_A_TURN)

    shuffle = random.Random(0)
    with torch.set_grad_enabled(CPU_OPS[case.op]):
        expected = (calls[EAGER]().detach(),)
        for peer, result in results.items():
            with blamed_on(result):
                result.bit_equal = same_bits((calls[peer]().detach(),), expected)
                turn(peer)
        times = {peer: [] for peer, result in results.items() if result.error is None}
        gc.collect()
        gc.disable()
        try:
            for _ in range(rounds * _CPU_TURNS_A_ROUND):
                for peer in shuffle.sample(list(times), len(times)):
                    turn(peer)
        finally:
            gc.enable()
    for peer, found in times.items():
        low, median, high = quartiles(found)
        results[peer].samples = len(found)
        results[peer].median_ms, results[peer].quartiles_ms = median, (low, high)
    return list(results.values())
