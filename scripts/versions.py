"""Runs CPU tests with other versions of torch, Triton, transformers and kernels; writes docs/compatibility.md and README's matrix.

A virtual environment for each row of `ROWS`, one at a time, removed afterwards. The CUDA wheels of torch that PyPI has take 6 GB
each while they are there. The package must be built (`make build`).

Each file of tests runs in a process of its own, and the row's line is written after each. If a row takes longer than
`--minutes`, or if the run is interrupted, the line has what ran until then and says where it ended.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable, Optional

ROOT = Path(__file__).resolve().parent.parent
PAGE, README = ROOT / "docs/compatibility.md", ROOT / "README.md"
BEGIN, END = "<!-- written by scripts/versions.py -->", "<!-- until here -->"


@dataclass(frozen=True)
class Row:
    torch: str
    triton: str
    transformers: str = "5.22.2"
    kernels: str = "0.17.2"
    numpy: Optional[str] = None  # None: as in requirements.txt.

    def __str__(self):
        return f"torch {self.torch}, Triton {self.triton}, transformers {self.transformers}, kernels {self.kernels}"


# Each torch with the Triton that its CUDA wheel requires; another transformers or kernels in a row of its own.
ROWS = (
    Row("2.11.0", "3.6.0", numpy="2.3.5"),  # Triton 3.6's interpreter takes no later numpy.
    Row("2.12.0", "3.7.0"),
    Row("2.13.0", "3.7.1"),
    Row("2.13.0", "3.7.1", transformers="5.23.0"),
    Row("2.14.0", "3.8.0"),
    Row("2.15.0", "3.9.0"),
    Row("2.15.0", "3.9.0", transformers="5.24.0"),
)
# Every file of tests/ runs in each row but these.
_NO_CPU = "every test needs a GPU"
_HUB = "scripts and the Hub's client, which every row has in the same version"
LEFT_OUT = {
    "test_benchmarks.py": "what prints and draws benchmarks, with libraries that the rows do not have",
    "test_build.py": "how files are copied into build/",
    "test_decoder_truth.py": _NO_CPU,
    "test_distributed.py": _NO_CPU,
    "test_docs.py": "the documentation's text",
    "test_interface.py": "scripts/interface.py, which compares source text",
    "test_kernels_ci.py": _NO_CPU,
    "test_local_hub.py": _HUB,
    "test_primitives.py": _NO_CPU,
    "test_publish.py": _HUB,
    "test_repository.py": "the repository's text",
    "test_stranger.py": "a clone and its demo, whose parts run in other files",
    "test_training.py": _NO_CPU,
    "test_truth.py": _NO_CPU,
    "test_vendor.py": _HUB,
    "test_verify.py": _HUB,
    "test_versions.py": "this script",
}
TESTS = tuple(sorted({path.name for path in (ROOT / "tests").glob("test_*.py")} - {*LEFT_OUT}))
# A test that takes longer has failed.
SECONDS, TIMEOUT = 900, "pytest-timeout==2.4.0"
# No machine's constraints (they may cap a row's torch), and the machine tests compile one hidden size for one GPU.
ENVIRONMENT = {"PIP_CONSTRAINT": os.devnull, "LOSSLESS_MACHINES": "one"}
_NOT_TESTED = {"matplotlib", "rich", "ruff"}

PROBE = """
    import json, sys
    from pathlib import Path
    from kernels import get_local_kernel
    sys.path.insert(0, "tests")
    from places import python_module
    kernel = get_local_kernel(Path("build"))
    internals = python_module(kernel, "core.torch_internals")
    print(json.dumps({
        "missing": internals.MISSING + python_module(kernel, "core.triton_internals").MISSING,
        "optional": [each.split(" ")[0] for each in internals.SLOWER],
        "guards": internals.guards_tell(),
        "torch": internals.torch.__version__,
    }))
"""


@dataclass
class Outcome:
    """What a row came to: `problem` if it could not be installed or imported; the files of tests that ran to their end,
    and `cut` if the row ended before the last of them."""

    row: Row
    date: str
    tests: tuple
    files: tuple = ()
    passed: int = 0
    failed: tuple = ()  # Pairs of a test's name and the reason.
    skipped: int = 0
    torch: str = ""
    missing: tuple = ()
    optional: tuple = ()
    guards: bool = False
    problem: Optional[str] = None
    cut: Optional[str] = None


def packages(row: Row) -> list[str]:
    """What pip installs: the row's versions, and the others of requirements.txt as they stand there."""
    lines = [line.split("#")[0].split(";")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    names = {line: re.split("[=<>~! ]", line)[0].lower() for line in lines if line}
    own = {name: version for name, version in asdict(row).items() if version is not None}
    rest = [line for line, name in names.items() if name not in own.keys() | _NOT_TESTED]
    return [*(f"{name}=={version}" for name, version in own.items()), *rest, TIMEOUT]


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return lines[-1] if lines else ""


def by_file(tests: tuple) -> dict[str, list]:
    """What runs of each file."""
    files: dict[str, list] = {}
    for test in tests:
        files.setdefault(test.split("::")[0], []).append(test)
    return files


def run_row(
    row: Row,
    tests: tuple,
    folder: Path,
    date: str,
    save: Callable[[Outcome], None],
    keep: bool = False,
    pip: tuple = (),
    processes: int = 0,
    minutes: float = 60,
    results: Optional[Path] = None,
) -> Outcome:
    """Installs the row into `folder`, runs the tests there, removes it unless it is to stay. `save` takes the outcome so
    far, after each file of tests and when the row is cut. The minutes are those of the tests. Files that have results in
    `results` do not run again."""
    outcome, python, doing = Outcome(row, date, tests), folder / "bin/python", "pip"
    environment = {**os.environ, **ENVIRONMENT}
    install = [str(python), "-m", "pip", "install", "-q", "--no-input", "--disable-pip-version-check", *pip]
    try:
        for command in ([sys.executable, "-m", "venv", str(folder)], [*install, *packages(row)]):
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                outcome.problem = f"cannot be installed: {last_line(done.stderr)}"
                return outcome
        probe = "\n".join(line[4:] for line in PROBE.splitlines())
        done = subprocess.run([str(python), "-c", probe], cwd=ROOT, capture_output=True, text=True, env=environment)
        if done.returncode:
            outcome.problem = f"cannot be imported: {last_line(done.stderr)}"
            return outcome
        found = json.loads(done.stdout.splitlines()[-1])
        outcome.missing, outcome.optional = tuple(found["missing"]), tuple(found["optional"])
        outcome.guards, outcome.torch = found["guards"], found["torch"]
        end = time.monotonic() + 60 * minutes
        selections = by_file(tests)
        for doing in [doing for doing in selections if results and (results / f"{doing}.xml").exists()]:
            read_results(outcome, results / f"{doing}.xml")
            outcome.files += (doing,)
            del selections[doing]
        for doing, selection in selections.items():
            written = folder / f"{doing}.xml"
            command = [str(python), "-m", "pytest", "--tb=short", "-p", "no:cacheprovider"]
            command += ["-n", str(processes), "--dist", "worksteal"]
            command += ["-m", "not gpu and not gpu2 and not long", f"--timeout={SECONDS}", f"--junitxml={written}"]
            command += [f"tests/{name}" for name in selection]
            status = run_until(end, command, environment)
            if written.exists():
                read_results(outcome, written)
            if status is None:
                outcome.cut = f"{minutes:g} minutes were over in {doing}"
                return outcome
            if status not in (0, 1):  # A crash, or nothing collected.
                outcome.failed += ((doing, f"pytest ended with status {status}"),)
            elif results:
                shutil.copy(written, results)
            outcome.files += (doing,)
            save(outcome)
    except KeyboardInterrupt:
        outcome.cut = f"interrupted in {doing}"
        raise
    finally:
        save(outcome)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return outcome


def run_until(end: float, command: list, environment: dict) -> Optional[int]:
    """The command's status; None if it still ran at `end`. It is interrupted then, so that pytest writes what it has."""

    def heed_interrupts():  # A shell's background processes ignore them, and so would pytest.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=heed_interrupts)
    try:
        return process.wait(max(0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def read_results(outcome: Outcome, results: Path) -> None:
    """Adds pytest's XML: the counts, and each failed test with the first line of its reason."""
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag: child for child in case}
        bad = kinds.get("failure", kinds.get("error"))
        if bad is not None:
            name = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
            outcome.failed += ((name, (bad.get("message") or "").strip().split("\n")[0][:160]),)
        elif "skipped" in kinds:
            outcome.skipped += 1
        else:
            outcome.passed += 1


def line(outcome: Outcome) -> str:
    """The outcome as a line of the table."""
    row = outcome.row
    if outcome.problem:
        tests, names = outcome.problem, ""
    else:
        files, whole = by_file(outcome.tests), {*outcome.tests} == {*TESTS}
        tests = f"{outcome.passed} passed, {len(outcome.failed)} failed, {outcome.skipped} skipped; "
        if len(outcome.files) < len(files):
            ran = ", ".join(f"`{name}`" for name in outcome.files) or "no file"
            if whole and len(outcome.files) > len(files) / 2:
                missing = ", ".join(f"`{name}`" for name in files if name not in outcome.files)
                ran = f"{len(outcome.files)} of {len(files)} files, without {missing}"
            tests += f"{ran}; {outcome.cut or 'not at its end'}"
        elif whole:
            tests += f"all {len(files)} files"
        else:
            tests += ", ".join(f"`{name}`" for name in outcome.tests)
        names = ", ".join(f"`{name}`" for name in (*outcome.missing, *outcome.optional)) or "all there"
        names += "" if outcome.guards else "; guards do not tell tensors apart"
    cells = [outcome.torch or row.torch, row.triton, row.transformers, row.kernels, tests, names]
    return f"| {' | '.join([*cells, outcome.date])} |".replace("\n", " ")


def failures(outcome: Outcome) -> list:
    """A line of the list below the table for each reason: the tests that failed for it."""
    reasons: dict = {}
    for name, reason in outcome.failed:
        reasons.setdefault(reason, []).append(f"`{name}`")
    return [f"- {outcome.row}: {reason or 'no reason given'}: {', '.join(names)}" for reason, names in reasons.items()]


def key_of(text: str) -> tuple:
    """The versions that a line of the table is of."""
    torch, *others = [cell.strip() for cell in text.strip("| \n").split("|")][:4]
    return (torch.split("+")[0], *others)


def write(outcomes: list) -> None:
    """Puts the lines into the page's table, in the order of `ROWS`; those of rows that did not run now stay. The reasons
    of failures follow the table, and README's matrix follows the page."""
    before, lines, after = parts(PAGE)
    head, rule, *rest = [each for each in lines if each.startswith("|")]
    table = {key_of(each): each for each in rest}
    table.update((key_of(line(outcome)), line(outcome)) for outcome in outcomes)
    order = [(row.torch, row.triton, row.transformers, row.kernels) for row in ROWS]
    kept = [table[key] for key in order if key in table]
    ran = tuple(f"- {outcome.row}: " for outcome in outcomes)
    reasons = [each for each in lines if each.startswith("- ") and not each.startswith(ran)]
    reasons += [each for outcome in outcomes for each in failures(outcome)]
    reasons = [each for row in ROWS for each in reasons if each.startswith(f"- {row}: ")]
    table_and_reasons = [head, rule, *kept, *(["", "Failures by reason:", "", *reasons] if reasons else [])]
    PAGE.write_text("\n".join([before + BEGIN, *table_and_reasons, END + after]), encoding="utf-8")
    before, _, after = parts(README)
    README.write_text("\n".join([before + BEGIN, *matrix(kept), END + after]), encoding="utf-8")


def parts(page: Path) -> tuple:
    """A page's text before the marks, the lines between them, and the text after them."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    between, after = rest.split(END)
    return before, between.strip("\n").splitlines(), after


def matrix(lines: list) -> list:
    """README's table, from the lines of the page's: versions, the tests' counts and the date."""
    cells = [[cell.strip() for cell in each.strip("|").split(" | ")] for each in lines]
    rows = [[*each[:4], each[4].split("; ")[0].split(": ")[0], each[-1]] for each in cells]
    head = ["torch", "Triton", "transformers", "kernels", "tests on a CPU", "date"]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TORCH", help="the rows of these versions of torch")
    parser.add_argument("--transformers", nargs="+", metavar="VERSION", help="of these, the rows of these transformers")
    parser.add_argument("--processes", type=int, default=0, metavar="N", help="of pytest, at a time (default: its own)")
    parser.add_argument(
        "--minutes", type=float, default=60, help="of a row's tests (default: 60); the rest is left out"
    )
    parser.add_argument(
        "--tests", nargs="+", metavar="FILE", default=TESTS, help="files of tests/ instead of all but LEFT_OUT"
    )
    parser.add_argument("--folder", type=Path, help="where environments are made; a temporary folder if not given")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="keep each file's results there; files with results do not run again",
    )
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

    def save(outcome: Outcome) -> None:
        write([outcome])

    # A run that is told to end writes its row's line, as one that is interrupted does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"Python {platform.python_version()}, {len(rows)} environments, {len(by_file(given.tests))} files of tests")
    with tempfile.TemporaryDirectory() as temporary:
        base = given.folder or Path(temporary)
        for row in rows:
            print(f"== {row}", flush=True)
            folder = base / f"torch-{row.torch}-transformers-{row.transformers}"
            tests, results = tuple(given.tests), given.results and given.results / folder.name
            if results:
                results.mkdir(parents=True, exist_ok=True)
            outcome = run_row(row, tests, folder, date, save, given.keep, pip, given.processes, given.minutes, results)
            outcomes.append(outcome)
            print(line(outcome), *failures(outcome), sep="\n", flush=True)
    return int(any(outcome.problem or outcome.failed or outcome.cut for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
