#!/usr/bin/env python3
"""Tell what keeps kernels from running on this machine, and which layers of a model would be replaced.

Prints versions, GPUs, compiler, environment and mapping; each problem with its next step; and for MODEL a line for every class
of layers: the kernel that takes it, or why none does. Needs no GPU. A model is built from its configuration, without weights.

examples:
  doctor.py                                              this machine, with the build in build/
  doctor.py meta-llama/Llama-3.2-1B                      and that model, whose config.json comes from the Hub or its cache
  doctor.py path/to/model                                a folder with config.json
  doctor.py --kernel lossless-kernels/lossless-kernels   with the published kernel

Exit status: 0 if there is no problem; 1 if there are some; 2 if it could not be told.
"""

import argparse
import os
import sys
from pathlib import Path
from types import ModuleType

# PYTHONSAFEPATH leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from command import CommandError, exit_status, is_repo_id, requirements
from startup import allow_no_telemetry

ROOT = Path(__file__).resolve().parent.parent


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a model's id on the Hub, or a folder with its config.json"
    )
    parser.add_argument(
        "--kernel",
        default=str(ROOT / "build"),
        metavar="DIR|ORG/NAME",
        help="a build, or a kernel repository on the Hub (default: build/ in the project)",
    )
    parser.add_argument("--version", type=int, metavar="N", help="the version of ORG/NAME to load (default: 1)")
    options = parser.parse_args(arguments)
    status = []
    failed = exit_status("doctor", lambda: status.append(tell(options)))
    return 2 if failed else status[0]


def tell(options: argparse.Namespace) -> int:
    """Prints the diagnosis; 1 if there are problems."""
    kernel = load(options.kernel, options.version)
    if not hasattr(kernel, "doctor"):
        raise CommandError(f"--kernel: expected a kernel with `doctor`, found {kernel.__name__}: an older version")
    with requirements():
        from rich.console import Console

    diagnosis = kernel.doctor(options.model, verbose=False)
    console = Console(highlight=False, soft_wrap=True)
    for line in str(diagnosis).splitlines():
        style = "bold red" if line.startswith("problem:") else "green" if "next: " in line else None
        console.print(line, style=style, markup=False)
    return int(bool(diagnosis.problems))


def load(name: str, version: int | None) -> ModuleType:
    """The kernel of a build, or of a repository on the Hub."""
    allow_no_telemetry()
    # Of transformers' notes on what is not installed none concerns the kernels.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with requirements():
        from kernels import get_kernel, get_local_kernel
    if Path(name).is_dir():
        if version is not None:
            raise CommandError(f"--version: expected none with a build, found {version}")
        return get_local_kernel(Path(name).resolve())
    if is_repo_id(name):
        return get_kernel(name, version=1 if version is None else version, trust_remote_code=[name])
    missing = "run `make build` first" if Path(name) == ROOT / "build" else "no such folder"
    raise CommandError(f"--kernel: expected a build or ORG/NAME, found {name}: {missing}")


if __name__ == "__main__":
    sys.exit(main())
