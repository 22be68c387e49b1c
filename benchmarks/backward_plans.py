"""Times the fused and the unfused backward kernels of RMSNorm beside each other, for what `default_plan` decides by.

    PYTHONPATH=tests python benchmarks/backward_plans.py [--output tests/golden/backward_plans.json]

A time is the least of five runs of a CUDA graph with 5 or 20 calls. Needs a GPU; takes a minute on an H200.
"""

import argparse
import datetime
import json
import os
from pathlib import Path

# Both plans return the same bits, which tests compare.
os.environ["LOSSLESS_PROOF"] = "off"

import torch
import triton
from kernels import get_local_kernel
from places import python_module
from rich.progress import track

HIDDEN_SIZES = (1536, 2304, 2560, 2880, 3072, 3584, 4096, 5120, 5376, 6144, 7168, 8192)
ROWS = (1024, 2048, 4096, 8192, 16384, 32768)
CASES = [(dtype, added, hidden_size, rows)
         for dtype, added in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False))
         for hidden_size in HIDDEN_SIZES for rows in ROWS]  # fmt: skip


def plans_of(backward, reduction, dtype, added, hidden_size, rows):
    """The fused and the unfused default plan."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    threads = torch.cuda.get_device_properties(0).max_threads_per_multi_processor
    columns = reduction.column_reduction(rows, hidden_size, multiprocessors, threads)
    mode = "accumulate" if added else "split" if dtype == torch.float32 else "single"
    found = []
    for least in (0.0, 2.0):
        backward._LEAST_USEFUL_WORK, backward._WARPS_OF_A_FULL_SM = least, 0
        found.append(backward.default_plan(rows, hidden_size, columns, multiprocessors, dtype.itemsize, mode))
    return found


def milliseconds(backward, formula, plan, dtype, added, hidden_size, rows) -> float:
    generator = torch.Generator("cuda").manual_seed(1)
    x, dy, d_sum = (torch.randn(rows, hidden_size, device="cuda", generator=generator).to(dtype) for _ in range(3))
    weight, rstd = torch.ones(hidden_size, device="cuda", dtype=dtype), torch.ones(rows, 1, device="cuda")
    backward.launch_plan = lambda *arguments: plan
    d_sum = d_sum if added else None
    call = backward.resolve(formula, dy, x, weight, rstd, True, True, backward.dx_mode_of(formula, dtype, d_sum))
    call(dy, x, weight, rstd, d_sum)
    torch.cuda.synchronize()
    graph, calls, times = torch.cuda.CUDAGraph(), 5 if rows * hidden_size > 1 << 26 else 20, []
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call(dy, x, weight, rstd, d_sum)
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return min(times[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--output", type=Path, help="a JSON file for the times")
    arguments = parser.parse_args()
    kernel = get_local_kernel(arguments.build)
    backward, formulas, reduction = (
        python_module(kernel, name) for name in ("rms_norm_backward", "variants", "reduce_config")
    )
    measured = []
    for case in track(CASES, "backward plans"):
        fused, unfused = plans_of(backward, reduction, *case)
        if not fused.fused:
            continue
        times = [milliseconds(backward, formulas.LLAMA, plan, *case) for plan in (fused, unfused)]
        dtype, added, hidden_size, rows = case
        measured.append([dtype.itemsize, added, hidden_size, rows, *(round(time, 5) for time in times)])
        print(
            f"{dtype} {'add' if added else '':3} {rows:6} x {hidden_size:5}: fused {times[0]:.4f}, not {times[1]:.4f} ms"
        )
    if arguments.output:
        arguments.output.write_text(json.dumps({
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
            "date": str(datetime.date.today()), "command": "python benchmarks/backward_plans.py",
            "columns": ["element_size", "residual", "hidden_size", "rows", "fused_ms", "unfused_ms"],
            "measured": measured,
        }, indent=1) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
