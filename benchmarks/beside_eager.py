#!/usr/bin/env python3
"""Time every function beside eager's at many shapes, and name the cases in which ours takes longer.

`peers.py` has the shapes that large models have; here are those that nobody tunes for: one row and many, rows of a few elements
and of a whole vocabulary, lengths that fill no vector, images of all sizes. Each case is compared with eager bit by bit, and
both are timed as device time in a CUDA graph, in turns. First all kernels are compiled, by several processes at a time. They run
without their verification, since bits are compared here. Where no kernel takes a case, eager's function runs in both places: the
tables count such cases apart.

examples:
  beside_eager.py                                            all ops and dtypes: five minutes on an H200 with 16 CPU cores
  beside_eager.py --ops softmax layer_norm --dtypes bf16
  beside_eager.py --from-json results/beside_eager.json      the tables of an earlier run, without a GPU

Exit status: 0; 1 if bits differed from eager's, or a kernel failed; 2 if it could not run. A case that eager cannot compute, or
for which the GPU has too little memory, is listed as not measured.
"""

import argparse
import concurrent.futures.process
import itertools
import json
import multiprocessing
import os
import statistics
import sys
from pathlib import Path
from typing import Callable

from cases import DTYPES, EAGER, OPS, OURS, Case, functions, shape_text
from peers import ROOT, BenchError, environment, load_kernel, positive, progress_bar, require_gpu

PROOF = "off"
# Calls rotate over so many sets of inputs at most, which together hold so many times the L2 cache.
MAX_SETS, CACHES = 12, 3
TURN_MS = 0.5
# What a case may take longer than eager's before it is named: clocks differ by as much.
SPREAD = 1.02
# The memory that torch may keep between cases.
KEPT_BYTES = 20 << 30
# An interrupted run has left the cases before.
SAVED_EVERY = 100

# Elements of a tensor of many rows.
ELEMENTS = 1 << 24


def many(sizes):
    """As many rows of each size as make ELEMENTS."""
    return [(ELEMENTS // size, size) for size in sizes]


def few(sizes):
    return [(rows, size) for size in sizes for rows in (1, 17, 300)]


# fmt: off
HIDDEN_SIZES = (
    64, 80, 96, 100, 128, 160, 192, 256, 320, 384, 512, 576, 640, 768, 896, 960, 1000, 1024, 1152, 1280, 1536, 1792, 2048, 2304,
    2560, 2880, 3072, 3584, 4096, 5120, 5376, 6144, 7168, 8192, 9216, 11008, 12288, 14336, 16384, 18432, 20480, 24576, 28672,
    32768,
)
COMMON_SIZES = (128, 768, 1024, 2048, 4096, 5120, 8192, 16384)
# Experts of a router, keys of attention, tokens of images with a class token, vocabularies.
SOFTMAX_SIZES = (
    16, 40, 64, 77, 100, 118, 128, 160, 197, 200, 256, 300, 384, 500, 512, 577, 640, 768, 1000, 1024, 1025, 1500, 2000, 2048,
    2049, 3000, 3072, 4000, 4096, 4097, 5000, 6144, 8000, 8192, 8193, 9216, 9217, 10000, 12000, 12288, 16384, 20000, 20480, 24000,
    24576, 30522, 32000, 32768, 40000, 49152, 50257, 50304, 65536, 100352, 128256, 151936, 256000, 262144,
)
FEW_ROWS = [(rows, size) for size in (128, 1024, 4096, 8192, 32000, 50257, 128256, 151936) for rows in (1, 4, 32)]
# Batch, heads, queries and keys: decoding, prompts, BERT, images, Whisper.
SCORES = (
    *((1, 32, 1, keys) for keys in (128, 1000, 4096, 8192, 32768)),
    (1, 32, 118, 118), (8, 12, 128, 128), (8, 12, 197, 197), (8, 12, 512, 512), (1, 32, 577, 577), (1, 32, 1024, 1024),
    (1, 16, 1500, 1500), (1, 32, 2047, 2047), (1, 16, 2048, 2048), (1, 8, 3000, 3000), (1, 8, 4097, 4097), (1, 4, 6000, 6000),
    (1, 2, 512, 10000), (1, 4, 512, 16384), (1, 4, 512, 20000), (1, 4, 512, 32768), (1, 4, 256, 65536),
)
LOGITS = (
    *((4096, size) for size in (
        1000, 10000, 30522, 32000, 32003, 49152, 50257, 50265, 100352, 128256, 151936, 262144)),
    (256, 32000), (118, 128256), (32, 151936), (16384, 100), (65536, 64), (8192, 512),
)
DISTRIBUTIONS = (*((1024, size) for size in (1000, 32000, 50257, 128256)), (4096, 1000), (64, 151936))
ACTIVATIONS = ((1, 11008), (7, 14336), (300, 11008), (4096, 11008), (1024, 14335), (999, 1001), (16, 624999))
# Samples, channels and positions, in 32 groups.
IMAGES = (
    (2, 320, 4096), (2, 640, 1024), (2, 1280, 256), (2, 1280, 64), (1, 512, 16384), (1, 128, 262144), (1, 256, 65536),
    (16, 64, 3136), (32, 256, 196), (2, 320, 4000), (8, 96, 999), (64, 96, 999), (128, 512, 49), (2, 960, 4096), (64, 32, 1024),
    (1, 32, 1 << 20), (4096, 64, 4), (16, 320, 4096), (16, 1280, 256), (64, 1024, 196), (64, 256, 3136),
)
HEADS = [(*rest, size) for size in (32, 64, 80, 96, 112, 128, 192, 256) for rest in ((1, 1, 40), (2, 118, 40), (1, 4096, 20))]
# fmt: on
SOME_HEADS = [shape for shape in HEADS if shape[-1] in (64, 80, 128) and shape[1] != 118]
ALL, SOME, SHORT = tuple(DTYPES), ("bf16", "fp32"), ("bf16", "fp16")


def both(*names):
    """The forward and the backward pass."""
    return [name + suffix for name in names for suffix in ("", "_backward")]


# Ops, dtypes and shapes.
MEASURED = (
    (both("softmax"), ALL, [*many(SOFTMAX_SIZES), *FEW_ROWS]),
    (["softmax_fp32"], SHORT, many(SOFTMAX_SIZES)),
    (both("masked_softmax"), ALL, SCORES),
    (both("layer_norm"), ALL, [*many(HIDDEN_SIZES), *few(COMMON_SIZES)]),
    (both("rms_norm"), SOME, many(HIDDEN_SIZES)),
    (["torch_rms_norm_backward"], SOME, [*many(COMMON_SIZES), *few(COMMON_SIZES)]),
    (both("rms_norm", "add_rms_norm"), ("bf16",), few(COMMON_SIZES)),
    (both("cohere_layer_norm"), SOME, many((128, 1024, 4096, 5000, 8192, 12288))),
    (both("dyt"), SOME, [*many((64, 192, 384, 768, 1000, 1024, 1280, 2048, 4096, 5120, 8192)), *few((768, 4096))]),
    (both("group_norm"), ALL, IMAGES),
    (
        both("silu", "gelu", "new_gelu", "fast_gelu", "quick_gelu", "silu_and_mul", "gelu_tanh_and_mul"),
        ALL,
        ACTIVATIONS,
    ),
    (["cross_entropy"], SOME, LOGITS),
    (["kl_div", "tvd"], SOME, DISTRIBUTIONS),
    (both("rotary"), SOME, HEADS),
    (both(*(f"rotary_{name}" for name in ("partial", "neighbours", "chunked", "complex", "vision"))), SOME, SOME_HEADS),
)


def selected(ops, dtypes) -> list[tuple[Case, str]]:
    """Each case and its dtype, once."""
    found = (
        (Case(op, shape), dtype)
        for names, of_ops, shapes in MEASURED
        for op, dtype, shape in itertools.product(names, of_ops, shapes)
        if op in ops and dtype in dtypes
    )
    return list(dict.fromkeys(found))


MEASURED_OPS = tuple(op for op in OPS if any(op in names for names, *_ in MEASURED))


# The run


def _of_process(build: Path) -> None:
    global _ours
    _ours = functions(OURS, load_kernel(build, PROOF))


def _compile(case: Case, dtype: str) -> None:
    """Calls ours once, which compiles its kernels into Triton's cache. What fails here is told when it is measured."""
    import measure
    import torch

    try:
        op = OPS[case.op]
        with torch.set_grad_enabled(op.backward):
            inputs = measure.draw(case, getattr(torch, DTYPES[dtype]), torch.device("cuda"), 1)[0]
            measure.outcome(_ours[case.function], inputs, op)
        torch.cuda.synchronize()
    except Exception:
        pass
    finally:
        if torch.cuda.memory_reserved() > KEPT_BYTES // 16:
            torch.cuda.empty_cache()


def compile_all(found, build: Path, processes: int, console) -> None:
    workers = concurrent.futures.ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_of_process, initargs=(build,)
    )
    try:
        with progress_bar(console) as progress:
            task = progress.add_task("compiling", total=len(found))
            for done in concurrent.futures.as_completed(workers.submit(_compile, *each) for each in found):
                done.result()
                progress.advance(task)
    except concurrent.futures.process.BrokenProcessPool:
        raise BenchError(
            "a process that compiles ended early, most likely for want of memory: take fewer --processes"
        ) from None
    finally:
        workers.shutdown(cancel_futures=True)


def time_case(case: Case, dtype: str, peers: dict, gpu, rounds: int, launches: Callable[[], int]) -> dict:
    """The case's times in ms, whether the bits are equal, and whether a kernel ran in either pass; or why it was not measured."""
    import measure
    import torch
    from report import Result

    op = OPS[case.op]
    line = {"op": case.op, "shape": list(case.shape), "dtype": dtype}
    count = min(-(-CACHES * gpu.l2_bytes // case.bytes(dtype)), MAX_SETS)
    results = [Result(case.op, case.shape, dtype, peer) for peer in peers]
    with torch.set_grad_enabled(op.backward):
        sets = measure.draw(case, getattr(torch, DTYPES[dtype]), gpu.device, count)
        before = launches()
        measure.compare(peers, results, sets[:1], op)
        ran = launches() > before
        runners = []
        for result in results:
            with measure.blamed_on(result):
                call = measure.prepare(peers[result.peer], sets, op)
                runners.append(measure.Runner(result, call, itertools.cycle(range(count)), turn_ms=TURN_MS))
                runners[-1].warm_up(gpu)
                runners[-1].capture(gpu)
        measure.in_turns(runners, rounds, "", lambda runner: runner.time_graph(gpu))
    for result in results:
        if result.error:
            return {**line, "error": f"{result.peer}: {result.error}"}
    times = {runner.result.peer: statistics.median(runner.device_times) for runner in runners}
    equal = next(result.bit_equal for result in results if result.peer == OURS)
    return {
        **line,
        "eager_ms": round(times[EAGER], 5),
        "ours_ms": round(times[OURS], 5),
        "bit_equal": equal,
        "kernel": ran,
    }


def run(options, console) -> dict:
    require_gpu()
    import measure
    import torch

    if options.json.is_dir():
        raise BenchError(f"--json: expected a file, found the folder {options.json}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    kernel, found = load_kernel(options.build, PROOF), selected(options.ops, options.dtypes)
    if options.processes > 1:
        compile_all(found, options.build, options.processes, console)
    gpu = measure.Gpu()
    named = {EAGER: functions(EAGER), OURS: functions(OURS, kernel)}
    run = {"environment": environment(gpu, kernel, __file__), "cases": []}
    with progress_bar(console) as progress, measure.counted_launches(kernel) as launches:
        task = progress.add_task("", total=len(found))
        for case, dtype in found:
            progress.update(task, description=f"{case} {dtype}")
            peers = {peer: each[case.function] for peer, each in named.items()}
            try:
                run["cases"].append(time_case(case, dtype, peers, gpu, options.rounds, launches))
            except Exception as error:
                # What draws the inputs failed, most likely for want of memory.
                where = {"op": case.op, "shape": list(case.shape), "dtype": dtype}
                run["cases"].append({**where, "error": measure.reason(error)})
            if torch.cuda.memory_reserved() > KEPT_BYTES:
                gpu.release()
            if len(run["cases"]) % SAVED_EVERY == 0:
                save(run, options.json)
            progress.advance(task)
    save(run, options.json)
    return run


# The tables


def text_of(line) -> str:
    return f"{line['op']} {shape_text(line['shape'])} {line['dtype']}"


def wrong(cases) -> list[str]:
    """Failures of lossless-kernels."""
    differ = [f"{text_of(line)}: not bit-equal with eager" for line in cases if line.get("bit_equal") is False]
    return differ + [f"{text_of(line)}: {line['error']}" for line in cases if line.get("error", "").startswith(OURS)]


def print_tables(run, console) -> None:
    from rich.table import Table

    measured = [line for line in run["cases"] if "error" not in line]
    timed = [line for line in measured if line["kernel"]]
    of_op = {op: [line for line in timed if line["op"] == op] for op in OPS}
    table = Table("op", "cases", "slower than eager", "slowest", "median", "fastest", title="Speed, eager = 1")
    for op, lines in of_op.items():
        speeds = sorted(line["eager_ms"] / line["ours_ms"] for line in lines)
        if speeds:
            slower = sum(speed * SPREAD < 1 for speed in speeds)
            quantiles = speeds[0], statistics.median(speeds), speeds[-1]
            table.add_row(op, str(len(speeds)), str(slower or ""), *(f"{speed:.2f}x" for speed in quantiles))
    console.print(table)
    slower = [line for line in timed if line["ours_ms"] > SPREAD * line["eager_ms"]]
    if slower:
        table = Table(
            "case", "ours, ms", "eager, ms", "times eager's", title=f"Slower than eager by more than {SPREAD - 1:.0%}"
        )
        for line in sorted(slower, key=lambda line: line["eager_ms"] / line["ours_ms"]):
            times = line["ours_ms"], line["eager_ms"]
            table.add_row(text_of(line), *(f"{each:.4f}" for each in times), f"{times[0] / times[1]:.2f}")
        console.print(table)
    equal, not_measured = sum(line["bit_equal"] for line in measured), len(run["cases"]) - len(measured)
    without = len(measured) - len(timed)
    console.print(
        f"{run['environment']['gpu']}: {len(measured)} cases, {equal} with eager's bits, {len(slower)} slower than eager"
        + (f"; {without} in which no kernel runs" if without else "")
        + (f"; {not_measured} not measured" if not_measured else "")
    )
    for line in run["cases"]:
        if "error" in line:
            console.print(f"not measured: {text_of(line)}: {line['error']}", highlight=False)


# The command


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ops",
        nargs="+",
        choices=MEASURED_OPS,
        metavar="OP",
        default=MEASURED_OPS,
        help=f"ops to measure (default: all): {', '.join(MEASURED_OPS)}",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=ALL, help="dtypes to measure (default: all)")
    parser.add_argument("--rounds", type=positive, metavar="N", default=5, help="turns of each (default: 5)")
    parser.add_argument(
        "--processes",
        type=positive,
        metavar="N",
        default=min(len(os.sched_getaffinity(0)), 16),
        help="processes that compile; each holds half a GB of the GPU's memory and the tensors of a case, up to 15 GB "
        "(default: one a CPU core, at most 16)",
    )
    parser.add_argument(
        "--build",
        type=Path,
        default=ROOT / "build",
        help="folder of the built kernel, made by `make build` (default: build/)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        default=ROOT / "results/beside_eager.json",
        help="times to write (default: results/beside_eager.json)",
    )
    parser.add_argument(
        "--from-json", type=Path, metavar="PATH", help="print the tables of an earlier run instead of measuring"
    )
    return parser.parse_args(arguments)


def recorded(path: Path) -> dict:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        run["environment"]["gpu"], [text_of(line) for line in run["cases"]]
        if all(
            "error" in line or {"eager_ms", "ours_ms", "bit_equal", "kernel"} <= line.keys() for line in run["cases"]
        ):
            return run
        raise ValueError
    except OSError as error:
        raise BenchError(f"--from-json: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise BenchError(f"--from-json: expected JSON written by beside_eager.py, found {path}") from None


def save(run, path: Path) -> None:
    """One case a line."""
    lines = ",\n".join(json.dumps(line) for line in run["cases"])
    text = f'{{"environment": {json.dumps(run["environment"])},\n"cases": [\n{lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main(arguments=None) -> int:
    options = parse(arguments)
    try:
        from rich.console import Console

        consoles = Console(), Console(stderr=True)
        for console in consoles:
            if not console.is_terminal:
                console.width = 200
        if options.from_json:
            run_ = recorded(options.from_json)
        else:
            run_ = run(options, consoles[1])
        print_tables(run_, consoles[0])
    except (BenchError, ImportError, OSError) as error:
        print(f"beside_eager: error: {error}", file=sys.stderr)
        return 2
    failures = wrong(run_["cases"])
    for failure in failures:
        print(f"beside_eager: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
