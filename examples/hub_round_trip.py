#!/usr/bin/env python3
"""Publish the built kernel to a Hub on this machine, and use it from there: by version, by lockfile, and offline.

Every step is the command that a user would run, in a process of its own. The Hub (scripts/local_hub.py) speaks to the
real `kernels` and `huggingface_hub` over HTTP; nothing leaves the machine, and nothing stays behind.

Exit status: 0 if every step did what it says, or a package is missing for them (which is said; what `make demo` shows
before needs none of these); 1 if not; 130 if it was interrupted.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# PYTHONSAFEPATH leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernelize_llama as llama
from startup import clean_up_when_terminated

ROOT = llama.ROOT
REPO_ID = "lossless-kernels/lossless-kernels"
STEPS = 5


class StepError(Exception):
    """A step failed; the message says which, and how."""


class Steps:
    """Runs one command after another and keeps a row for the table of each."""

    def __init__(self, environment, progress):
        self.environment, self.progress = environment, progress
        self.task = progress.add_task("", total=STEPS)
        self.rows = []

    def run(self, name, command, result=lambda output: output.strip(), **environment):
        self.progress.update(self.task, description=name)
        start = time.perf_counter()
        done = subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise StepError(f"{name}: exit status {done.returncode}: {(done.stderr or done.stdout).strip()}")
        row = {"step": name, "result": result(done.stdout), "seconds": time.perf_counter() - start}
        self.rows.append(row)
        self.progress.advance(self.task)
        return row


def round_trip(build, device, scratch, progress):
    """The rows of the table."""
    import local_hub

    python, scripts, project = sys.executable, ROOT / "scripts", scratch / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO_ID}" = 1\n')
    lockfile = project / "kernels.lock"
    llama = [python, ROOT / "examples/kernelize_from_hub.py", REPO_ID, *(["--device", device] if device else [])]
    both = ["--version", 1, "--lockfile", lockfile]
    kernels = [python, "-c", "from kernels.cli import main; main()"]
    with local_hub.serve(scratch / "hub", trusted=[REPO_ID.split("/")[0]]) as hub:
        # Settings and caches of this machine would change what a step shows.
        ours = (
            "KERNELS_CACHE",
            "LOCAL_KERNELS",
            "HF_HUB_CACHE",
            "TRITON_INTERPRET",
            "LOSSLESS_PROOF",
            "PYTHONSAFEPATH",
        )
        environment = {key: value for key, value in local_hub.environment(hub).items() if key not in ours}
        # What a step leaves when it is ended goes with the rest.
        steps = Steps({**environment, "HF_HOME": str(scratch / "home"), "TMPDIR": str(scratch)}, progress)
        steps.run(
            "publish version 1",
            # What is shown is the build as it lies here, committed or not.
            [python, scripts / "publish.py", "--build", build, "--repo-id", REPO_ID, "--allow-dirty"],
            lambda output: f"commit {re.search('v1.*commit ([0-9a-f]{7})', output)[1]}",
        )
        steps.run("kernels lock", [*kernels, "lock", project], lambda _: f"commit {locked_commit(lockfile)[:7]}")
        empty = {"HF_HOME": str(scratch / "empty")}
        steps.run("empty cache: by version, by lockfile", [*llama, *both], describe, **empty)
        cache = scratch / "vendored"
        steps.run(
            "vendor it whole",
            [python, scripts / "vendor.py", REPO_ID, "--lockfile", lockfile, "--output", cache],
            lambda output: f"{re.search('[0-9]+ variants, verified', output)[0]}",
        )
        online = len(hub.requests)
    # The Hub is gone.
    offline = {"HF_HUB_OFFLINE": "1", "KERNELS_CACHE": str(cache), "HF_HOME": str(scratch / "other")}
    steps.run("Hub stopped: by version, by lockfile", [*llama, *both], describe, **offline)
    return steps.rows, online


def locked_commit(lockfile):
    return json.loads(lockfile.read_text())[0]["lock"]["commit"]


def describe(output):
    """What kernelize_from_hub.py found."""
    found = [json.loads(line) for line in output.splitlines()]
    counts = " and ".join(f"{each['layers_replaced']} of {each['layers']}" for each in found)
    return f"{counts} layers replaced, logits {'' if all(each['bits_equal'] for each in found) else 'NOT '}bit-equal"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder with the built kernel (build/)")
    parser.add_argument("--device", help="such as cuda, cuda:1 or cpu (default: cuda if there is one)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON on stdout instead of a table")
    options = parser.parse_args()
    clean_up_when_terminated()
    try:
        import dulwich  # noqa: F401
        import griffe  # noqa: F401
        import httpx2  # noqa: F401
        import jinja2  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
        import yaml  # noqa: F401
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.progress import Progress
        from rich.table import Table
    except ImportError as error:
        print(f"hub_round_trip: left out, {error.name} is missing: pip install -r requirements.txt", file=sys.stderr)
        return 0
    console = Console(stderr=options.json)
    if not console.is_terminal:
        console.width = 120
    try:
        if options.device:
            llama.find_device(options.device)
        with tempfile.TemporaryDirectory(prefix="hub-round-trip-") as scratch:
            with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
                rows, requests = round_trip(options.build.absolute(), options.device, Path(scratch), progress)
    except (StepError, llama.DemoError, OSError) as error:
        print(f"hub_round_trip: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hub_round_trip: interrupted", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps({"steps": rows, "requests": requests}, indent=2))
        return 0
    title = f"From a Hub on this machine ({requests} requests), every step a process of its own"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for header in ("Step", "Result"):
        table.add_column(header, no_wrap=True)
    table.add_column("Time", justify="right")
    for row in rows:
        table.add_row(row["step"], row["result"], f"{row['seconds']:.1f} s")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
