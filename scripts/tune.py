#!/usr/bin/env python3
"""Measure launch configurations of the kernels on this GPU, and write those that are faster than the defaults as JSON.

A launch configuration holds the numbers with which a kernel is launched, such as rows per program and warps. The package
computes a default for every shape; a file in its folder plans/ overrides the default on one generation of GPUs.

The results of every candidate are compared with eager's bit by bit; a candidate with other bits is discarded and reported.
Candidates of a case take turns as CUDA graphs, on inputs that rotate over more memory than the L2 cache holds. All are
measured briefly, the fastest ones again. A configuration is written if its median is below the default's by more than
--margin and by more than the spread of the default's own times. Kernels are compiled first, in parallel processes.

ops, and what their configurations choose:
{ops}

examples:
  tune.py                                        what the package ships: bf16, minutes on an H200
  tune.py --dtypes fp32 --output torch-ext/lossless_kernels/plans/hopper_fp32.json
  tune.py --ops rms_norm_backward --hidden-sizes 32768 --update     measure again after a kernel has changed
  tune.py --ops rms_norm --hidden-sizes 5120 --rows 16 512:4096 --output /tmp/plans.json
  tune.py --ops rms_norm --rows 1 2:4 16 --most-rows 63 --update    decode alone

Run `make build` afterwards: a build holds its own copy of plans/. The last lines say how to share the file.
Exit status: 0; 1 if a default configuration differed from eager in a bit or failed; 2 if it could not run.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib
import itertools
import json
import math
import multiprocessing
import os
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import plan_files  # noqa: E402
from cases import DTYPES, OPS, Case, shape_text  # noqa: E402
from peers import BenchError, driver_version, load_kernel, positive, progress_bar  # noqa: E402
from report import Result, quartiles  # noqa: E402
from tuned_ops import TRAINING_ROWS, TUNED, Fields, TunedOp  # noqa: E402

PLANS = ROOT / "torch-ext/lossless_kernels/plans"
ARCHITECTURES = {8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell_consumer"}
# Head dimensions, and the hidden sizes of models of 1B to 70B parameters and beyond.
HIDDEN_SIZES = (64, 128, 1024, 2048, 4096, 5120, 8192, 16384, 32768)
# (fewest rows, measured rows) of each range; a range ends where the next begins. Decode, short and long prompts, a batch.
ROWS = ((1, 1), (2, 4), (16, 16), (32, 32), (64, 128), (512, 1024), (2048, 4096), (8192, 32768))


@dataclass(frozen=True)
class Point:
    """A measured case, and the range of rows that its launch configuration is for.

    Attributes:
        least_rows: the first row count of the range.
        most_rows: the last one; None: no end.
    """

    case: Case
    dtype: str
    least_rows: int
    most_rows: Optional[int]

    def __str__(self):
        return f"{self.case} {self.dtype}"

    @property
    def tuned(self) -> TunedOp:
        return TUNED[self.case.op]

    @property
    def element_size(self) -> int:
        return 4 if self.dtype == "fp32" else 2

    @property
    def kind(self) -> tuple:
        """The first values of an entry of the file: op, hidden_size, element_size, least_rows, most_rows."""
        size = self.case.hidden_size if self.tuned.has_size else None
        return self.case.op, size, self.element_size, self.least_rows, self.most_rows


def points(ops, hidden_sizes, rows, dtypes, most_rows: Optional[int] = None) -> Iterator[Point]:
    """All cases to measure.

    Args:
        rows: (fewest rows, measured rows) of each range, ascending.
        most_rows: end of the last range; None: no end.
    """
    ends = [least - 1 for least, _ in rows[1:]] + [most_rows]
    ranges = [(least, most, measured) for (least, measured), most in zip(rows, ends)]
    for dtype, op in itertools.product(dtypes, ops):
        for shape, least, most in TUNED[op].shapes(hidden_sizes, ranges):
            yield Point(Case(op, shape), dtype, least, most)


# Calls of the package's kernels with a given launch configuration


class Kernels:
    """The tuned kernels of a built package."""

    def __init__(self, kernel):
        self.name = kernel.__name__
        self.plans, self.launch = self.module("core.plans"), self.module("core.launch")
        self.allowed = plan_files.allowed_values(kernel)

    def module(self, name: str):
        return importlib.import_module(f"{self.name}.{name}")

    @contextlib.contextmanager
    def planned(self, fields: Optional[Fields]):
        """Within the block the package uses this launch configuration; with None, its defaults."""
        tuned = self.plans.tuned
        self.plans.tuned = lambda plan_class, *_: fields and plan_class(**fields)
        try:
            yield
        finally:
            self.plans.tuned = tuned

    def default(self, point: Point, device) -> Fields:
        """The fields of the default launch configuration."""
        with self.planned(None):
            return dataclasses.asdict(point.tuned.default(self, point, device))

    def candidates(self, point: Point, device) -> list[list[Fields]]:
        """Candidates by stage, without those that this GPU does not support."""
        threads = point.tuned.threads(self, point, device)
        stages = point.tuned.candidates(point, self.default(point, device), threads)
        if (self.plans.gpu(device).compute_capability or 0) >= plan_files.LEAST_PREFETCHING:
            return stages
        return [[fields for fields in stage if not fields.get("prefetch")] for stage in stages]

    def call(self, point: Point, fields: Fields, sets: list) -> Callable[[int], tuple]:
        """The call with this launch configuration, a function of the index of its inputs."""
        with self.planned(fields):
            return point.tuned.call(self, sets)

    def eager(self, point: Point, inputs) -> tuple:
        """The expected results of a call."""
        import measure
        import torch

        op = OPS[point.case.op]
        with torch.set_grad_enabled(op.backward):
            return point.tuned.expected(measure.outcome(point.tuned.eager(self), inputs, op))


# Compiling


def compilations(kernels: Kernels, point: Point, device, dtype) -> Iterable:
    """The kernels that Triton must compile for the candidates of a point."""
    import torch

    sets = [point.tuned.unfilled(point.case.shape, dtype, device)]
    default = kernels.default(point, device)
    stages = kernels.candidates(point, device)
    # The kernel that adds the partial sums depends on the rows per program.
    bases = {fields["rows_per_program"]: fields for fields in stages[0] if fields.get("fused")} if stages[2:] else {}
    plans = [default, *({**default, **fields} for fields in itertools.chain(*stages[:2]))]
    plans += [
        {**default, **base, **fields} for base in (default, *bases.values()) for fields in itertools.chain(*stages[2:])
    ]
    with kernels.launch.collect_compilations() as found, torch.no_grad():
        for fields in plans:
            with contextlib.suppress(Exception):  # The error occurs again, and is reported, when it is measured.
                kernels.call(point, fields, sets)(0)
    return found


def compile_kernel(source: Path, target: tuple, specification: tuple) -> None:
    """Compiles into Triton's cache on disk, in a process without a CUDA context."""
    kernels, active = _compiler(source, target)
    name, constants, options, dtypes, scalars = specification
    kernels[name].warmup(*dtypes, *scalars, grid=(1,), **dict(constants), **options)


@functools.cache
def _compiler(source: Path, target: tuple):
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Target:
        def get_current_target(self):
            return GPUTarget(*target)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    driver.set_active(Target())
    kernel = load_kernel(source)
    sources = {source for tuned in TUNED.values() for source in tuned.sources}
    modules = [importlib.import_module(f"{kernel.__name__}.kernels_src.{source}") for source in sources]
    return {name: member for module in modules for name, member in vars(module).items()}, target


def specification(compilation) -> tuple:
    """A compilation as picklable data; the other process finds the kernel by its name."""
    names = (compilation.kernel.__name__, compilation.constants, compilation.options)
    return *names, compilation.dtypes, compilation.scalars


def compile_all(found: Iterable, source: Path, jobs: int, advance: Callable[[], None]) -> None:
    """Compiles in `jobs` processes. Errors are ignored: they occur again, and are reported, when a candidate is measured."""
    from triton.runtime import driver

    target = driver.active.get_current_target()
    target = (target.backend, target.arch, target.warp_size)
    # A process with a CUDA context must not be forked.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = [pool.submit(compile_kernel, source, target, specification(each)) for each in found]
        for future in as_completed(futures):
            if isinstance(future.exception(), BrokenProcessPool):
                raise BenchError(f"--jobs: a compiling process was killed; try fewer than {jobs} if memory ran out")
            advance()


# Measuring


@dataclass
class Measured:
    """The result of a point.

    Attributes:
        default: fields of the default launch configuration.
        best: fields of the fastest one, which may be the default.
        candidates: how many were measured.
        discarded: launch configuration -> why it was discarded.
        error: why nothing was measured.
    """

    point: Point
    default: Fields
    best: Fields
    default_ms: float = math.nan
    best_ms: float = math.nan
    candidates: int = 0
    discarded: dict[str, str] = field(default_factory=dict)
    error: Optional[str] = None

    @property
    def better(self) -> bool:
        return self.best != self.default

    def entry(self) -> dict:
        return {
            **dict(zip(("op", "hidden_size", "element_size", "least_rows", "most_rows"), self.point.kind)),
            "plan": self.best,
            "measured": {
                "shape": list(self.point.case.shape),
                "ms": round(self.best_ms, 6),
                "default_ms": round(self.default_ms, 6),
            },
        }


# Rounds in which all candidates are measured, and how many of them are measured again.
_LOOK_ROUNDS, _FINALISTS = 3, 4


def plan_text(fields: Fields) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def tune_point(kernels: Kernels, point: Point, gpu, rounds: int, margin: float) -> Measured:
    import measure
    import torch

    device, dtype = gpu.device, getattr(torch, DTYPES[point.dtype])
    default = kernels.default(point, device)
    result = Measured(point, default, default)
    moved = point.case.bytes(point.dtype)
    inputs = measure.draw(point.case, dtype, device, measure.sets_needed(moved, gpu.l2_bytes))
    expected = kernels.eager(point, inputs[0])
    sets = [point.tuned.given(kernels, each) for each in inputs]
    gpu.release()
    for changes in kernels.candidates(point, device):
        if changes and point.tuned.skips(changes, result.best):
            continue
        candidates = [{**result.best, **change} for change in changes]
        race(kernels, point, gpu, sets, expected, candidates, result, rounds, margin)
        if result.error:
            break
    return result


def dropping(call, index) -> None:
    """Calls and drops the outputs: a CUDA graph of many calls then needs the memory of one."""
    call(index)


def race(kernels, point, gpu, sets, expected, candidates, result: Measured, rounds, margin) -> None:
    """Measures candidates; stores the fastest in `result` if it beats the best so far, and the default's time."""
    import measure
    import torch

    plans = {plan_text(fields): fields for fields in (result.default, result.best, *candidates)}
    default, best = plan_text(result.default), plan_text(result.best)
    runners = {}
    for text, fields in plans.items():
        outcome = Result(point.case.op, point.case.shape, point.dtype, text)
        with torch.no_grad(), measure.blamed_on(outcome):
            call = kernels.call(point, fields, sets)
            if not measure.same_bits(point.tuned.results(call(0)), expected):
                outcome.error = "its bits differ from eager's"
            else:
                once = functools.partial(dropping, call)
                runner = measure.Runner(outcome, once, itertools.cycle(range(len(sets))))
                runner.warm_up(gpu)
                runner.capture(gpu)
                runners[text] = runner
        if outcome.error:
            result.discarded[text] = outcome.error
    result.candidates += len(plans)
    if default not in runners:
        result.error = result.discarded.pop(default)
        return
    with torch.no_grad():
        measure.in_turns(list(runners.values()), _LOOK_ROUNDS, "", lambda runner: runner.time_graph(gpu))
        times = {text: min(runner.device_times) for text, runner in runners.items() if runner.device_times}
        finalists = {default, best, *sorted(times, key=times.get)[:_FINALISTS]} & set(times)
        for text in finalists:
            runners[text].device_times.clear()
        measure.in_turns(
            [runners[text] for text in sorted(finalists)], rounds, "", lambda runner: runner.time_graph(gpu)
        )
    found = {text: quartiles(runners[text].device_times) for text in finalists if runners[text].device_times}
    low, result.default_ms, high = found[default]
    incumbent = found.get(best, found[default])
    fastest = min(found, key=lambda text: found[text][1])
    # Half of the distance between the default's quartiles, relative to its median.
    needed = max(margin, (high - low) / 2 / result.default_ms)
    if found[fastest][1] < result.default_ms * (1 - needed) and found[fastest][1] < incumbent[1] * (1 - margin / 2):
        result.best = plans[fastest]
    result.best_ms = found.get(plan_text(result.best), found[default])[1]
    runners.clear()
    gpu.release()


# Files and tables


def write(path: Path, capability: int, found: dict[str, str], entries: list[dict]) -> None:
    """Writes the file atomically, with one line for each entry, so that diffs are short."""
    lines = ",\n".join(f"    {json.dumps(entry)}" for entry in entries)
    text = (
        f'{{\n  "compute_capability": {capability},\n  "found": {json.dumps(found, indent=4)[:-1].rstrip()}\n  }},\n'
        f'  "plans": [\n{lines}\n  ]\n}}\n'
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def table(results: list[Measured]):
    from rich.table import Table

    made = Table("op", "shape", "dtype", "candidates", "default ms", "ms", "gain", "launch configuration")
    for result in results:
        case = result.point.case
        gain = f"{result.default_ms / result.best_ms - 1:.1%}" if result.better else ""
        plan = (
            ", ".join(f"{k} {v}" for k, v in result.best.items() if result.default[k] != v)
            if result.better
            else "default"
        )
        times = (f"{result.default_ms:.5f}", f"{result.best_ms:.5f}")
        if result.error:
            times, plan = ("", ""), f"failed: {result.error}"
        made.add_row(case.op, shape_text(case.shape), result.point.dtype, str(result.candidates), *times, gain, plan)
    return made


# The command


def row_range(text):
    """LEAST or LEAST:MEASURED"""
    try:
        least, _, measured = text.partition(":")
        found = int(least), int(measured or least)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"expected LEAST or LEAST:MEASURED such as 512:4096, found {text!r}")
    return found


def hidden(text):
    number = positive(text)
    if number % 4 or not 64 <= number <= 32768:
        raise argparse.ArgumentTypeError(f"expected a multiple of 4 from 64 to 32768, found {text!r}")
    return number


def rows_text(rows) -> str:
    return " ".join(f"{least}:{measured}" for least, measured in rows)


def ops_text() -> str:
    """What the launch configurations of the ops choose."""
    chosen: dict[str, list[str]] = {}
    for op, tuned in TUNED.items():
        chosen.setdefault(tuned.chooses, []).append(op)
    return "\n".join(f"  {', '.join(ops)}\n{textwrap.indent(chooses, ' ' * 21)}" for chooses, ops in chosen.items())


def parse(arguments=None):
    description = (__doc__ or "").replace("{ops}", ops_text())
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--ops",
        nargs="+",
        choices=TUNED,
        default=list(TUNED),
        metavar="OP",
        help="ops to tune, listed above (default: all)",
    )
    what.add_argument(
        "--hidden-sizes", nargs="+", type=hidden, default=HIDDEN_SIZES, metavar="N",
        help=f"hidden sizes of norms, and row lengths of softmax (default: {' '.join(map(str, HIDDEN_SIZES))})",
    )  # fmt: skip
    what.add_argument(
        "--rows", nargs="+", type=row_range, default=ROWS, metavar="LEAST[:MEASURED]",
        help="ranges of rows: the first row count of each, and the one it is measured with; a range ends where the next begins "
        f"(default: {rows_text(ROWS)}; backward from {TRAINING_ROWS} rows on)",
    )  # fmt: skip
    what.add_argument(
        "--most-rows", type=positive, metavar="N", help="last row count of the last range (default: no end)"
    )
    what.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=["bf16"], metavar="DTYPE",
        help="bf16, fp16 or fp32; bf16 and fp16 share their configurations (default: bf16)",
    )  # fmt: skip
    how = parser.add_argument_group("how")
    how.add_argument(
        "--milliseconds", type=positive, default=40, metavar="N",
        help="GPU time for each of the fastest candidates of a case, after the first brief measurement (default: 40)",
    )  # fmt: skip
    how.add_argument(
        "--margin", type=float, default=0.01, metavar="SHARE",
        help="write a configuration only if it is faster than the default by more than this share (default: 0.01)",
    )  # fmt: skip
    how.add_argument(
        "--jobs", type=positive, default=len(os.sched_getaffinity(0)), metavar="N",
        help="compiling processes (default: the number of CPU cores)",
    )  # fmt: skip
    how.add_argument(
        "--build",
        type=Path,
        default=ROOT / "build",
        help="folder of the built kernel, made by `make build` (default: build/)",
    )
    how.add_argument(
        "--output", type=Path, metavar="PATH",
        help="JSON file to write or replace (default: the file of this GPU's generation in the package's plans/)",
    )  # fmt: skip
    how.add_argument("--update", action="store_true", help="keep the file's entries for cases that are not measured")
    options = parser.parse_args(arguments)
    options.rows = sorted(options.rows)
    if len({least for least, _ in options.rows}) < len(options.rows):
        parser.error(f"--rows: expected ranges with different first row counts, found {rows_text(options.rows)}")
    if any(measured >= later for (_, measured), (later, _) in zip(options.rows, options.rows[1:])):
        parser.error(f"--rows: expected measured row counts below the next range, found {rows_text(options.rows)}")
    if options.most_rows is not None and options.most_rows < options.rows[-1][1]:
        parser.error(
            f"--most-rows: expected at least {options.rows[-1][1]}, the last measured row count, found {options.most_rows}"
        )
    if not 0 <= options.margin < 1:
        parser.error(f"--margin: expected a share of at least 0 and below 1, such as 0.01, found {options.margin}")
    return options


def run(options, gpu, capability: int, console) -> list[Measured]:
    """Measures the requested cases and writes the file. An interrupted run writes the finished cases."""
    import measure
    import torch

    kernels = Kernels(load_kernel(options.build))
    before = earlier(kernels, options.output, capability, how(gpu)) if options.update else None
    todo = points(options.ops, options.hidden_sizes, options.rows, options.dtypes, options.most_rows)
    todo = [point for point in todo if point.tuned.covers(kernels, point)]
    results: list[Measured] = []
    with progress_bar(console) as progress:
        found: dict = {}
        for point in todo:
            found.update(compilations(kernels, point, gpu.device, getattr(torch, DTYPES[point.dtype])))
            gpu.release()
        task = progress.add_task("compiling", total=len(found))
        if not kernels.launch.INTERPRETED:
            compile_all(found, options.build, options.jobs, lambda: progress.advance(task))
        progress.remove_task(task)
        task = progress.add_task("", total=len(todo))
        rounds = max(math.ceil(options.milliseconds / measure._TURN_MS), 3)
        try:
            for point in todo:
                progress.update(task, description=str(point))
                try:
                    results.append(tune_point(kernels, point, gpu, rounds, options.margin))
                except Exception as error:
                    default = kernels.default(point, gpu.device)
                    results.append(Measured(point, default, default, error=measure.reason(error)))
                gpu.release()
                progress.advance(task)
        except KeyboardInterrupt:
            console.print("interrupted: the finished cases are written")
    found, entries = how(gpu), [result.entry() for result in results if result.better and not result.error]
    if before is not None:
        found, entries = updated(before, [result.point for result in results if not result.error], found, entries)
    write(options.output, capability, found, entries)
    plan_files.read(options.output, kernels.allowed)
    return results


def earlier(
    kernels: Kernels, path: Path, capability: int, now: dict[str, str]
) -> Optional[tuple[dict[str, str], list]]:
    """The `found` of a file and its entries; None without a file.

    Raises:
        BenchError: the file is not valid, or was measured on another GPU or with other versions than `now`.
    """
    try:
        its_capability, found, entries = plan_files.read(path, kernels.allowed)
    except FileNotFoundError:
        return None
    except plan_files.PlanError as error:
        raise BenchError(f"--update: {error}") from None
    for name in ("gpu", "torch", "triton"):
        if found[name] != now[name]:
            raise BenchError(f"--update: {path.name}: expected {name} {found[name]}, as in the file, found {now[name]}")
    if its_capability != capability:
        raise BenchError(
            f"--update: {path.name}: expected compute capability {its_capability}, as in the file, found {capability}"
        )
    return found, entries


def updated(before: tuple, measured: list[Point], found: dict[str, str], entries: list[dict]) -> tuple:
    """The `found` and the entries of an updated file.

    Entries whose rows overlap with a measured case are replaced; the others stay. They are ordered by op, rows and size.
    """
    its_found, its_entries = before
    ranges = [plan_files.Entry(*point.kind, plan={}, measured=None) for point in measured]
    kept = [dataclasses.asdict(entry) for entry in its_entries if not any(entry.overlaps(each) for each in ranges)]
    found = {**found, "command": f"{its_found['command']}; {found['command']}"}
    order = {op: number for number, op in enumerate(TUNED)}

    def place(entry):
        return order.get(entry["op"], len(order)), entry["least_rows"], entry["hidden_size"] or 0, entry["element_size"]

    return found, sorted([*kept, *entries], key=place)


def how(gpu) -> dict[str, str]:
    import torch
    import triton

    return {
        "gpu": gpu.name,
        "driver": driver_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", os.path.relpath(__file__, ROOT), *sys.argv[1:]]),
    }


def what_to_send(path: Path, gpu: str) -> list[str]:
    """How the user contributes the file, in lines.

    Args:
        gpu: the name of this GPU.
    """
    lines = [
        f"To share these times, send {path}: GPU, driver, torch, Triton, date, command and every time are in it.",
        "  Open an issue with the template 'Launch configurations' and attach the file, also if no case became faster.",
    ]
    capability, others = json.loads(path.read_text())["compute_capability"], set()
    for other in PLANS.glob("*.json"):
        content = json.loads(other.read_text())
        if content["compute_capability"] == capability and content["found"]["gpu"] != gpu:
            others.add(f"{other.name} ({content['found']['gpu']})")
    if others:
        lines.append(
            f"  No pull request yet: {', '.join(sorted(others))} serves this generation, and cases may differ."
        )
    else:
        lines.append(
            f"  Or open a pull request that adds it to {os.path.relpath(PLANS, ROOT)}/, after `make test-gpu`."
        )
    return lines


def tell(options, results, console, gpu: str) -> int:
    """Prints the table and what to send; returns the exit status."""
    console.print(table(results), highlight=False)
    for result in results:
        for plan, why in result.discarded.items():
            console.print(f"discarded: {result.point}, {plan}: {why}", highlight=False)
    better = sum(result.better for result in results)
    console.print(
        f"{better} of {len(results)} cases have a faster launch configuration: {options.output}", highlight=False
    )
    console.print(*what_to_send(options.output, gpu), sep="\n", highlight=False)
    failed = [result for result in results if result.error]
    for result in failed:
        print(f"tune: {result.point}: the default launch configuration: {result.error}", file=sys.stderr)
    return 1 if failed else 0


def main(arguments=None) -> int:
    options = parse(arguments)
    try:
        import measure
        import torch
        from rich.console import Console

        if not torch.cuda.is_available() or torch.version.hip is not None:
            raise BenchError("expected an NVIDIA GPU, torch finds none")
        console = Console(stderr=True)
        if not console.is_terminal:
            console.width = 200
        capability, _ = torch.cuda.get_device_capability()
        name = ARCHITECTURES.get(capability, f"compute_capability_{capability}")
        options.output = options.output or PLANS / f"{name}.json"
        with tempfile.TemporaryDirectory(prefix="tune-") as cache:
            # Hundreds of kernels, most of which are used only here.
            os.environ.setdefault("TRITON_CACHE_DIR", cache)
            results = run(options, measure.Gpu(), capability, console)
        return tell(options, results, console, torch.cuda.get_device_name())
    except (BenchError, ImportError, OSError) as error:
        print(f"tune: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
