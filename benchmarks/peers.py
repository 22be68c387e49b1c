#!/usr/bin/env python3
"""Time lossless-kernels beside eager, torch.compile, F.rms_norm, Liger, quack and others: one process, one GPU, the same tensors.

Each case is timed by CUDA events around single calls and as device time in a CUDA graph of many calls. Peers take turns;
inputs rotate over more memory than the L2 cache holds. The memcpy roofline of a case is the time in which a device-to-device
copy, measured in the same run, moves the bytes of the case. The outputs and gradients of lossless-kernels are compared with
eager's bit by bit. The report names each peer that is not installed or fails, and the reason.

`--ops` takes the ops of `ops/`, and
  cpu_time         CPU time of an RMSNorm module call at 1x4096, for inference and for a training forward
  first_call       seconds from import to the first results of a fresh process, with an empty and with a full Triton cache,
                   without and with the kernel's warmup
"_backward" is the backward pass alone. A function of another library that writes over its inputs is timed on its own earlier
results.

examples:
  peers.py                                           all ops: about five minutes on an H200
  peers.py --quick                                   a few cases, less than a minute
  peers.py --ops rms_norm --cases 8192x4096 4096x32x128 --dtype fp16
  peers.py --from-json results/peers.json --plots results/plots     tables and plots of an earlier run, without a GPU

Exit status: 0; 1 if lossless-kernels failed or differed from eager in a bit; 2 if it could not run.
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from types import MethodType

from cases import (
    CPU_OPS,
    CPU_SHAPE,
    DTYPES,
    EAGER,
    EPS,
    FAMILIES,
    NATIVE,
    NATIVE_BARE,
    OPS,
    OURS,
    PEERS,
    QUICK_SHAPES,
    ROOFLINE,
    Case,
    functions,
    select,
)
from report import Report, markdown, number, plot

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "kernels",
    "liger-kernel",
    "quack-kernels",
    "cut-cross-entropy",
    "nvidia-cutlass-dsl",
    "cuda-tile",
)


class BenchError(Exception):
    """The request cannot be run; the message says why and what to do."""


def load_peers(names, kernel) -> tuple[dict, dict]:
    """Returns peer -> name -> function, and why a peer, or a family of it, is missing."""
    from measure import reason

    loaded, missing = {}, {}
    for name in names:
        found, errors = {}, {}
        for family, module in FAMILIES.items():
            try:
                found |= functions(name, family=module)
            except Exception as error:
                errors[f"{name}'s {family}"] = reason(error)
        why = next(iter(errors.values()), None)
        if why and name == EAGER:
            raise BenchError(f"eager, the reference of all comparisons, does not load: {why}")
        if found:
            loaded[name] = found
        missing |= errors if found or not errors else {name: why}
    loaded[OURS] = functions(OURS, kernel)
    return loaded, missing


def load_kernel(build: Path, proof: str = "strict"):
    """The built kernel. With the strict policy a failed verification raises an error. `run` refuses cases without a kernel."""
    from kernels import get_local_kernel

    os.environ["LOSSLESS_PROOF"] = proof
    if not build.is_dir():
        raise BenchError(f"--build: expected a folder made by `make build`, found no folder {build}")
    try:
        return get_local_kernel(build.resolve())
    except (OSError, ValueError) as error:
        raise BenchError(f"--build: {build} holds no kernel for this torch: {str(error).splitlines()[0]}") from None


def module_calls(functions, kernel, device, dtype, training) -> dict:
    """Peer -> call of an RMSNorm module at 1x4096 to which the peer's forward is bound, as `kernelize` binds it."""
    import torch
    from torch.nn import functional
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = torch.randn(CPU_SHAPE, device=device, dtype=dtype, requires_grad=training)
    calls = {}
    for peer, function in functions.items():
        norm = LlamaRMSNorm(CPU_SHAPE[-1], EPS).to(device, dtype)
        if peer == OURS:
            norm.forward = MethodType(kernel.layers.LlamaRMSNorm.forward, norm)
        elif peer != EAGER:
            norm.forward = MethodType(lambda self, x, function=function: function(x, self.weight), norm)
        calls[peer] = functools.partial(norm, x)
        if peer == NATIVE:
            calls[NATIVE_BARE] = functools.partial(functional.rms_norm, x, CPU_SHAPE[-1:], norm.weight, EPS)
    return calls


# The run


def run(options, gpu, console) -> Report:
    """Measures the requested cases. An interrupted run returns, and saves to options.json, the finished cases."""
    import measure
    import torch

    kernel = load_kernel(options.build)
    dtype = getattr(torch, DTYPES[options.dtype])
    peers, missing = load_peers(options.peers, kernel)
    low, copy, high = measure.copy_bandwidth(gpu)
    report = Report(environment(gpu, kernel), options.dtype, copy, (low, high), gpu.l2_bytes, missing)
    console.print(f"{gpu.name}: a copy moves {copy:.0f} GB/s; missing peers: {', '.join(missing) or 'none'}")

    def device(case):
        of_case = {peer: named[case.function] for peer, named in peers.items() if case.function in named}
        with measure.counted_launches(kernel) as launches:
            results = measure.device_case(case, of_case, gpu, report, options.rounds, dtype)
            if gpu.device.type == "cuda" and not launches():
                refuse_eagers_times(results)
        return results

    def cpu(case):
        of_case = {peer: named["rms_norm"] for peer, named in peers.items() if "rms_norm" in named}
        calls = module_calls(of_case, kernel, gpu.device, dtype, training=CPU_OPS[case.op])
        return measure.cpu_case(case, calls, gpu, options.dtype, options.rounds)

    steps = {str(case): functools.partial(device, case) for case in options.cases}
    if "cpu_time" in options.ops:
        steps |= {op: functools.partial(cpu, Case(op, CPU_SHAPE)) for op in CPU_OPS}
    if "first_call" in options.ops:
        steps["first_call"] = functools.partial(first_calls, options.build, report)
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(steps))
        for name, step in steps.items():
            progress.update(task, description=name)
            results = []
            try:
                results = step()
                gpu.release()
            except KeyboardInterrupt:
                report.failures.append(f"interrupted at {name}")
                break
            except Exception as error:
                report.failures.append(f"{name}: {measure.reason(error)}")
            report.results += results
            report.failures += wrong(results)
            if options.json:
                report.save(options.json)
            console.print(summary(name, results, report), highlight=False)
            progress.advance(task)
    return report


def refuse_eagers_times(results) -> None:
    """For a case in which no kernel runs in either pass: the times of lossless-kernels are those of eager's function."""
    for result in results:
        if result.peer == OURS:
            result.error = result.error or "no kernel ran: these are the times of eager's function"


def wrong(results) -> list[str]:
    """Failures of lossless-kernels: an error, or results that differ from eager's bits or were not compared."""
    problems = []
    for result in results:
        if result.peer == OURS and result.bit_equal is not True:
            why = "not bit-equal with eager" if result.bit_equal is False else "not compared with eager"
            problems.append(f"{result.case}: {result.error or why}")
        elif result.peer == OURS and result.error:
            problems.append(f"{result.case}: {result.error}")
    return problems


def summary(name, results, report) -> str:
    """One line of progress: the times of a case, in ms."""
    times = [f"{result.peer} {number(result.median_ms)}" for result in results if result.median_ms is not None]
    if results and results[0].op in OPS:
        times.insert(0, f"{ROOFLINE} {number(report.roofline_ms(results[0].case))}")
    return f"{datetime.datetime.now():%H:%M:%S} {name}: {', '.join(times) or 'done'}"


def first_calls(build, report) -> list:
    # With the default proof policy, which users have.
    environment = {key: value for key, value in os.environ.items() if key != "LOSSLESS_PROOF"}
    command = [sys.executable, Path(__file__).with_name("first_call.py"), build]
    for name, arguments in (("{}", []), ("{}, with warmup", ["--warmup"])):
        with tempfile.TemporaryDirectory(prefix="first-call-") as cache:
            environment["TRITON_CACHE_DIR"] = cache
            for state in ("empty", "full"):
                done = subprocess.run(command + arguments, env=environment, capture_output=True, text=True, timeout=300)
                if done.returncode:
                    raise BenchError((done.stderr.strip().splitlines() or ["no message"])[-1])
                report.first_call[name.format(state)] = json.loads(done.stdout.splitlines()[-1])
    return []


def environment(gpu, kernel, program: str = __file__) -> dict:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "gpu": gpu.name,
        "driver": driver_version(),
        "versions": versions,
        "python": platform.python_version(),
        "kernel": kernel.__name__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", os.path.relpath(program, ROOT), *sys.argv[1:]]),
    }


def driver_version() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done.stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return "unknown"


def progress_bar(console):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True)


# The command


def positive(text):
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, found {text!r}")
    return number


def shape(text):
    try:
        sizes = tuple(int(part) for part in text.split("x"))
    except ValueError:
        sizes = ()
    if len(sizes) < 2 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected sizes such as 8192x4096 or 4096x32x128, found {text!r}")
    return sizes


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is measured")
    ops = (*OPS, "cpu_time", "first_call")
    with_cases = [op for op in ops if op not in OPS or OPS[op].cases]
    what.add_argument(
        "--ops",
        nargs="+",
        choices=ops,
        metavar="OP",
        help=f"ops to measure (default: {', '.join(with_cases)}); those without shapes of their own take --cases: "
        + ", ".join(op for op in ops if op not in with_cases),
    )
    what.add_argument(
        "--cases", nargs="+", type=shape, metavar="SHAPE", help="shapes such as 8192x4096 instead of each op's own"
    )
    what.add_argument("--quick", action="store_true", help="few cases and rounds; first_call only if --ops names it")
    what.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        metavar="PEER",
        default=list(PEERS),
        help="peers to measure beside eager and lossless-kernels (default: all): " + ", ".join(PEERS),
    )
    what.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="dtype of activations and weights (default: bf16)"
    )
    what.add_argument(
        "--rounds",
        type=positive,
        metavar="N",
        help="turns of each peer; CPU times take ten times as many (default: 20; 5 with --quick)",
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--build",
        type=Path,
        default=ROOT / "build",
        help="folder of the built kernel, made by `make build` (default: build/)",
    )
    results = ROOT / "results"
    files.add_argument("--json", type=Path, metavar="PATH", help="measurements to write (default: results/peers.json)")
    files.add_argument("--markdown", type=Path, metavar="PATH", help="tables to write (default: results/peers.md)")
    files.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="folder of the PNGs to write (default: results/plots)"
    )
    files.add_argument(
        "--from-json",
        type=Path,
        metavar="PATH",
        help="read the JSON of an earlier run instead of measuring; then only the files named by options are written",
    )
    options = parser.parse_args(arguments)
    if options.from_json is None:
        options.json = options.json or results / "peers.json"
        options.markdown = options.markdown or results / "peers.md"
        options.plots = options.plots or results / "plots"
    options.rounds = options.rounds or (5 if options.quick else 20)
    options.ops = options.ops or [op for op in with_cases if not (options.quick and op == "first_call")]
    for op in options.ops:
        if op not in with_cases and not options.cases:
            parser.error(f"--ops: {op} has no shapes of its own: expected --cases, such as --cases 8192x4096")
    options.peers = list(dict.fromkeys([EAGER, *options.peers]))
    options.cases = select(options.ops, options.cases or None)
    if options.quick:
        options.cases = [case for case in options.cases if case.shape in QUICK_SHAPES] or options.cases
    return options


def require_gpu() -> None:
    """Raises BenchError if nothing can be measured here."""
    try:
        import torch
    except ImportError:
        raise BenchError("torch is not installed: pip install -r requirements.txt") from None
    if not torch.cuda.is_available():
        raise BenchError(
            "expected a GPU, torch finds none; --from-json reads the results of an earlier run without one"
        )


def measured(options, console) -> Report:
    require_gpu()
    import measure

    make_folders(options)
    return run(options, measure.Gpu(), console)


def recorded(options) -> Report:
    try:
        report = Report.load(options.from_json)
    except OSError as error:
        raise BenchError(f"--from-json: {options.from_json}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BenchError(f"--from-json: expected JSON written by peers.py, found {options.from_json}") from None
    make_folders(options)
    return report


def make_folders(options) -> None:
    """Checks the paths to write before the minutes of measuring."""
    for name, path in (("--json", options.json), ("--markdown", options.markdown)):
        if path and path.is_dir():
            raise BenchError(f"{name}: expected a file, found the folder {path}")
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
    if options.plots and options.plots.exists() and not options.plots.is_dir():
        raise BenchError(f"--plots: expected a folder, found the file {options.plots}")


def write(report, options) -> None:
    text = markdown(report)
    print(text)
    if options.json:
        report.save(options.json)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    if options.plots:
        try:
            plot(report, options.plots)
        except ImportError as error:
            # Not an error: plots can be drawn later, without a GPU.
            print(f"peers: no plots ({error}); with matplotlib, --from-json and --plots draw them", file=sys.stderr)


def main(arguments=None) -> int:
    options = parse(arguments)
    try:
        from rich.console import Console

        console = Console(stderr=True)
        if not console.is_terminal:
            # The default of 80 columns for files and pipes would wrap the lines.
            console.width = 200
        report = recorded(options) if options.from_json else measured(options, console)
        write(report, options)
    except (BenchError, ImportError, OSError) as error:
        print(f"peers: error: {error}", file=sys.stderr)
        return 2
    for failure in report.failures:
        print(f"peers: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
