"""CPU time of a forward and of a backward call of each op and operator, for two builds that take turns. Needs no GPU.

    PYTHONPATH=tests python benchmarks/cpu_time.py build other/build

Launches do nothing: a time covers the call from its tensors to the driver, with the allocation of its outputs, and without
autograd's engine, which calls the backward function. A figure is the least of many rounds. Run it on an idle machine.
"""

import argparse
import contextlib
import functools
import os
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Callable

# Set before Triton is imported. Its interpreter accepts CPU tensors.
os.environ.update(TRITON_INTERPRET="1", LOSSLESS_PROOF="off")

import torch
from kernels import get_local_kernel
from op_families import FAMILIES, timed_tensors
from places import python_module

# Few, so that a round fits between the disturbances of a machine with other work.
CALLS = 300


def calls(kernel: ModuleType, given: SimpleNamespace) -> dict[str, Callable]:
    """Name -> call without arguments, of every family that the build has."""
    found = {}
    for family in FAMILIES:
        with contextlib.suppress(ModuleNotFoundError):
            found |= family.timed(functools.partial(python_module, kernel), given)
    with contextlib.suppress(ModuleNotFoundError):
        direct = {each._opname: each for each in python_module(kernel, "core.operators").DIRECT}
        for name, arguments in (each for family in FAMILIES for each in family.operators(given).items()):
            if name in ("layer_norm_backward", "group_norm_backward"):  # ATen computes them, here on the CPU.
                continue
            found[f"{name}, in Inductor's code"] = functools.partial(direct[name].sites["timed"], *arguments)
    launched = []
    # A launch ends where the driver would be called.
    launch = python_module(kernel, "launch").Launch
    launch._enqueue = lambda self, *_: launched.append(self) or True
    for name, call in found.items():
        call()  # A first call may launch kernels and still be left to the original.
        launched.clear()
        call()
        if not launched:
            raise SystemExit(f"cpu_time: {name}: the original computes it")
    launch._enqueue = lambda self, pointers, _: True
    return found


def microseconds(call: Callable) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs=2, type=Path, metavar="BUILD", help="two folders made by `make build`")
    parser.add_argument("--rounds", type=int, default=45, help=f"rounds of {CALLS} calls (default: %(default)s)")
    options = parser.parse_args()
    kernels = [get_local_kernel(build.resolve()) for build in options.builds]
    for kernel in kernels:
        # The interpreter's cos and sin are not CUDA's, and rotary tables are refused there.
        python_module(kernel, "launch").INTERPRETED = False
    torch.set_grad_enabled(False)
    given = timed_tensors()
    each = [calls(kernel, given) for kernel in kernels]
    print(
        f"torch {torch.__version__}; us a call, least of {options.rounds} rounds, {options.builds[0]} and {options.builds[1]}"
    )
    for name in each[1]:
        if name not in each[0]:
            print(
                f"{name:46}         {min(microseconds(each[1][name]) for _ in range(options.rounds)):7.2f}", flush=True
            )
            continue
        found = [[microseconds(of[name]) for of in each] for _ in range(options.rounds)]
        first, second = (min(times) for times in zip(*found))
        print(f"{name:46} {first:7.2f} {second:7.2f}  {second - first:+.2f}", flush=True)


if __name__ == "__main__":
    main()
