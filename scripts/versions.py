"""Runs CPU tests with other versions of torch, Triton, transformers and kernels, and writes what came of it to docs/compatibility.md.

A virtual environment for each row of `ROWS`, one at a time, removed afterwards. The CUDA wheels of torch that PyPI has take 6 GB
each while they are there. The package must be built (`make build`).
"""

import argparse
import datetime
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/compatibility.md"
BEGIN, END = "<!-- written by scripts/versions.py -->", "<!-- until here -->"


@dataclass(frozen=True)
class Row:
    torch: str
    triton: str
    transformers: str = "5.22.2"
    kernels: str = "0.17.2"

    def __str__(self):
        return f"torch {self.torch}, Triton {self.triton}, transformers {self.transformers}, kernels {self.kernels}"


# Each torch with the Triton that its CUDA wheel requires; another transformers or kernels in a row of its own.
ROWS = (
    Row("2.11.0", "3.6.0"),
    Row("2.12.0", "3.7.0"),
    Row("2.13.0", "3.7.1"),
    Row("2.13.0", "3.7.1", transformers="5.23.0"),
    Row("2.14.0", "3.8.0"),
    Row("2.15.0", "3.9.0"),
    Row("2.15.0", "3.9.0", transformers="5.23.0"),
)
# Launches, private names and their absence, the interpreter, recognition and fallbacks, what transformers and kernels do.
TESTS = (
    "test_launch.py",
    "test_torch_internals.py",
    "test_overrides.py",
    "test_idle_decorators.py",
    "test_softmax_kernel.py",
    "test_kernels.py",
    "test_rotary.py",
    "test_cross_entropy.py",
    "test_host.py",
    # Every layer of the demo's model is replaced.
    "test_example.py::test_on_a_cpu",
)
_ROWS_OWN = {*Row.__dataclass_fields__}
_NOT_TESTED = {"matplotlib", "rich", "ruff"}

PROBE = """
    import json, sys, warnings
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        from pathlib import Path
        from kernels import get_local_kernel
        sys.path.insert(0, "tests")
        from places import python_module
        kernel = get_local_kernel(Path("build"))
        internals = python_module(kernel, "core.torch_internals")
    print(json.dumps({
        "missing": internals.MISSING + python_module(kernel, "core.triton_internals").MISSING,
        "optional": [f"torch.{each.path}" for name, each in internals.INTERNALS.items()
                     if each.optional and internals._find(name) is each.without],
        "guards": internals.guards_tell(),
        "warnings": [str(each.message) for each in warned if "lossless-kernels" in str(each.message)],
    }))
"""


@dataclass
class Outcome:
    """What a row came to: `problem` if it could not be installed or imported."""

    row: Row
    date: str
    tests: tuple
    passed: int = 0
    failed: tuple = ()
    skipped: int = 0
    torch: str = ""
    missing: tuple = ()
    optional: tuple = ()
    guards: bool = False
    problem: Optional[str] = None


def packages(row: Row) -> list[str]:
    """What pip installs: the row's versions, and the others of requirements.txt as they stand there."""
    lines = [line.split("#")[0].split(";")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    names = {line: re.split("[=<>~! ]", line)[0].lower() for line in lines if line}
    rest = [line for line, name in names.items() if name not in _ROWS_OWN | _NOT_TESTED]
    return [*(f"{name}=={version}" for name, version in asdict(row).items()), *rest]


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return lines[-1] if lines else ""


def run_row(
    row: Row, tests: tuple, folder: Path, keep: bool, date: str, pip: tuple = (), processes: int = 0
) -> Outcome:
    """Installs the row into `folder`, runs the tests there, removes it unless it is to stay."""
    outcome, python = Outcome(row, date, tests), folder / "bin/python"
    try:
        commands = [
            [sys.executable, "-m", "venv", str(folder)],
            [
                str(python),
                "-m",
                "pip",
                "install",
                "-q",
                "--no-input",
                "--disable-pip-version-check",
                *pip,
                *packages(row),
            ],
        ]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                outcome.problem = f"cannot be installed: {last_line(done.stderr)}"
                return outcome
        probe = "\n".join(line[4:] for line in PROBE.splitlines())
        done = subprocess.run([str(python), "-c", probe], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            outcome.problem = f"cannot be imported: {last_line(done.stderr)}"
            return outcome
        found = json.loads(done.stdout.splitlines()[-1])
        outcome.missing, outcome.optional = tuple(found["missing"]), tuple(found["optional"])
        outcome.guards = found["guards"]
        version = [str(python), "-c", "import torch; print(torch.__version__)"]
        outcome.torch = subprocess.run(version, capture_output=True, text=True).stdout.strip()
        results = folder / "results.xml"
        command = [str(python), "-m", "pytest", "-n", str(processes), "--tb=short", "-m", "not gpu and not gpu2"]
        command += ["-p", "no:cacheprovider", f"--junitxml={results}", *(f"tests/{name}" for name in tests)]
        done = subprocess.run(command, cwd=ROOT)
        if not results.exists():
            outcome.problem = f"pytest ended with status {done.returncode}"
            return outcome
        read_results(outcome, results)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return outcome


def read_results(outcome: Outcome, results: Path) -> None:
    """The counts and the names of failed tests from pytest's XML."""
    failed = []
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}")
        elif "skipped" in kinds:
            outcome.skipped += 1
        else:
            outcome.passed += 1
    outcome.failed = tuple(failed)


def line(outcome: Outcome) -> str:
    """The outcome as a line of the table."""
    row = outcome.row
    if outcome.problem:
        tests, names = outcome.problem, ""
    else:
        tests = f"{outcome.passed} passed, {len(outcome.failed)} failed, {outcome.skipped} skipped"
        if outcome.failed:
            shown = ", ".join(f"`{name}`" for name in outcome.failed[:4]).replace("|", r"\|")
            tests += f" ({shown}{', ...' if len(outcome.failed) > 4 else ''})"
        names = ", ".join(f"`{name}`" for name in (*outcome.missing, *outcome.optional)) or "all there"
        names += "" if outcome.guards else "; guards do not tell tensors apart"
    files = len(outcome.tests)
    cells = [outcome.torch or row.torch, row.triton, row.transformers, row.kernels, f"{tests}; {files} files", names]
    return f"| {' | '.join([*cells, outcome.date])} |".replace("\n", " ")


def key_of(text: str) -> tuple:
    """The versions that a line of the table is of."""
    torch, *others = [cell.strip() for cell in text.strip("| \n").split("|")][:4]
    return (torch.split("+")[0], *others)


def write(outcomes: list) -> None:
    """Puts the lines into the page's table, in the order of `ROWS`; those of rows that did not run now stay."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    lines = {key_of(each): each for each in table.splitlines() if each.startswith("|")}
    (head, rule), lines = list(lines.values())[:2], dict(list(lines.items())[2:])
    lines.update((key_of(line(outcome)), line(outcome)) for outcome in outcomes)
    order = [tuple(asdict(row).values()) for row in ROWS]
    kept = [lines[key] for key in order if key in lines]
    text = "\n".join([BEGIN, head, rule, *kept, END])
    PAGE.write_text(before + text + after, encoding="utf-8")


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TORCH", help="the rows of these versions of torch")
    parser.add_argument("--transformers", nargs="+", metavar="VERSION", help="of these, the rows of these transformers")
    parser.add_argument("--processes", type=int, default=0, metavar="N", help="of pytest, at a time (default: its own)")
    parser.add_argument(
        "--tests", nargs="+", metavar="FILE", default=TESTS, help="files of tests/ instead of the usual ones"
    )
    parser.add_argument("--folder", type=Path, help="where environments are made; a temporary folder if not given")
    parser.add_argument("--keep", action="store_true", help="leave the environments, in --folder")
    parser.add_argument("--find-links", metavar="DIR", help="a folder of wheels that pip takes as well")
    parser.add_argument("--dry-run", action="store_true", help="say what would be installed, and end")
    given = parser.parse_args(arguments)
    known = {row.torch for row in ROWS}
    if given.only and not known >= {*given.only}:
        parser.error(f"--only: expected some of {', '.join(sorted(known))}, found {', '.join(given.only)}")
    if given.keep and given.folder is None:
        parser.error("--keep: expected with --folder")
    missing = [name for name in given.tests if not (ROOT / "tests" / name.split("::")[0]).is_file()]
    if missing:
        parser.error(f"--tests: expected files of tests/, found {', '.join(missing)}")
    rows = [row for row in ROWS if not given.only or row.torch in given.only]
    rows = [row for row in rows if not given.transformers or row.transformers in given.transformers]
    if not rows:
        parser.error(f"--transformers: no row has {', '.join(given.transformers)}")
    if given.dry_run:
        for row in rows:
            print(row, "pip install " + " ".join(packages(row)), sep="\n    ")
        return 0
    if not list(ROOT.glob("build/torch-*/metadata.json")):
        parser.error("build/ holds no built kernel: run `make build` first")
    pip = ("--find-links", given.find_links) if given.find_links else ()
    date, outcomes = datetime.date.today().isoformat(), []
    print(f"Python {platform.python_version()}, {len(rows)} environments, {len(given.tests)} files of tests")
    with tempfile.TemporaryDirectory() as temporary:
        base = given.folder or Path(temporary)
        for row in rows:
            print(f"== {row}", flush=True)
            folder = base / f"torch-{row.torch}-transformers-{row.transformers}"
            outcomes.append(run_row(row, tuple(given.tests), folder, given.keep, date, pip, given.processes))
            print(line(outcomes[-1]), flush=True)
            write(outcomes)
    return int(any(outcome.problem or outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
