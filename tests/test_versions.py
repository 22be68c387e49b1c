"""scripts/versions.py without pip: which rows there are, and what becomes of results and of the page."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import pytest
import versions

RESULTS = """<testsuites><testsuite name="pytest">
<testcase classname="tests.test_launch" name="test_one" time="1"/>
<testcase classname="tests.test_launch" name="test_two"><skipped message="no GPU"/></testcase>
<testcase classname="tests.test_host" name="test_three[a | b]"><failure message="AssertionError: differs&#10;more">text</failure></testcase>
</testsuite></testsuites>"""


def outcome(row, **given):
    return versions.Outcome(row, "2026-11-23", ("test_launch.py",), guards=True, **given)


@pytest.fixture
def page(tmp_path, monkeypatch):
    for name in ("PAGE", "README"):
        copy = tmp_path / getattr(versions, name).name
        shutil.copy(getattr(versions, name), copy)
        monkeypatch.setattr(versions, name, copy)
    return versions.PAGE


def between(page):
    return versions.parts(page)[1]


def test_rows_are_different_and_their_tests_exist():
    assert len({*versions.ROWS}) == len(versions.ROWS)
    assert all((versions.ROOT / "tests" / name.split("::")[0]).is_file() for name in versions.TESTS)


def test_a_row_replaces_its_versions_alone():
    row = versions.Row("2.11.0", "3.6.0")
    packages = versions.packages(row)
    assert {"torch==2.11.0", "triton==3.6.0"} <= {*packages} and "ruff" not in " ".join(packages)
    names = [package.split("==")[0] for package in packages]
    assert len({*names}) == len(names) and {"pytest", "numpy", "kernels", "transformers"} <= {*names}


def test_results_are_counted(tmp_path):
    (tmp_path / "results.xml").write_text(RESULTS)
    found = outcome(versions.ROWS[0])
    versions.read_results(found, tmp_path / "results.xml")
    assert (found.passed, found.skipped, found.failed) == (
        1,
        1,
        (("test_host::test_three[a | b]", "AssertionError: differs"),),
    )


def test_the_page_keeps_other_rows_and_has_one_line_for_each(page):
    first, second = versions.ROWS[:2]
    versions.write([outcome(second, passed=5), outcome(first, passed=3)])
    versions.write([outcome(first, problem="cannot be installed: no such version", torch="2.11.0+cpu")])
    lines = [line for line in between(page) if line.startswith("|")]
    assert lines[0].startswith("| torch |") and lines[1].startswith("|---")
    table = {versions.key_of(line): line for line in lines[2:]}
    assert len(table) == len(lines[2:])
    ours = [table[(row.torch, row.triton, row.transformers, row.kernels)] for row in (first, second)]
    assert "cannot be installed" in ours[0] and ours[0].startswith("| 2.11.0+cpu |")
    assert "5 passed, 0 failed" in ours[1] and lines.index(ours[0]) < lines.index(ours[1])
    assert page.read_text().startswith("# Tested versions") and "## Policy" in page.read_text()


def test_reasons_of_failures_follow_the_table_until_the_row_is_green(page):
    first, second = versions.ROWS[:2]
    failed = (("test_host::test_three[a | b]", "differs"), ("test_host::test_four", "differs"))
    versions.write([outcome(first, failed=failed)])
    versions.write([outcome(second, failed=(("test_host::test_five", ""),))])
    (of_first, of_second) = [line for line in between(page) if line.startswith((f"- {first}: ", f"- {second}: "))]
    assert of_first == f"- {first}: differs: `test_host::test_three[a | b]`, `test_host::test_four`"
    assert of_second.endswith("no reason given: `test_host::test_five`")
    (line,) = [line for line in between(page) if versions.key_of(line)[:1] == (first.torch,)]
    assert line.count("|") == 8 and "2 failed" in line
    versions.write([outcome(first, passed=2)])
    assert not [line for line in between(page) if line.startswith(f"- {first}: ")]


def test_readme_has_the_rows_of_the_page_with_their_dates(page):
    first, second = versions.ROWS[:2]
    versions.write([outcome(second, passed=5), outcome(first, problem="cannot be installed: a | b")])
    of_page = [line for line in between(page) if line.startswith("|")]
    of_readme = between(versions.README)
    assert len(of_readme) == len(of_page)
    (line,) = [line for line in of_readme if line.startswith(f"| {second.torch} ")]
    assert line == f"| {second.torch} | {second.triton} | {second.transformers} | {second.kernels} | " + (
        "5 passed, 0 failed, 0 skipped | 2026-11-23 |"
    )


def test_readme_says_what_the_page_says():
    rows = [line for line in between(versions.PAGE) if line.startswith("|")][2:]
    assert between(versions.README) == versions.matrix(rows)


CUT = {"row": versions.ROWS[0], "tests": ("test_launch.py", "test_host.py"), "date": "2026-11-23"}


@pytest.mark.parametrize("ending", ["time", "interrupt", "crash"])
def test_a_row_that_is_cut_has_its_line(tmp_path, monkeypatch, ending):
    """pip and pytest are a program that writes a result, and then takes too long, is interrupted or crashes."""
    folder, saved = tmp_path / "row", []
    probe = {"missing": [], "optional": [], "guards": True, "torch": "2.11.0+cpu"}
    folder.mkdir()
    given = []

    def run(command, **_):
        given.append(command)
        return types.SimpleNamespace(returncode=0, stdout=json.dumps(probe), stderr="")

    def run_until(end, command, environment):
        (results,) = [each.split("=")[1] for each in command if each.startswith("--junitxml")]
        with open(results, "w") as file:
            file.write(RESULTS)
        if "tests/test_host.py" not in command:
            return 1
        if ending == "interrupt":
            raise KeyboardInterrupt
        return None if ending == "time" else -11

    monkeypatch.setattr(versions.subprocess, "run", run)
    monkeypatch.setattr(versions, "run_until", run_until)
    with pytest.raises(KeyboardInterrupt) if ending == "interrupt" else contextlib.nullcontext():
        versions.run_row(**CUT, folder=folder, save=lambda each: saved.append(versions.line(each)), minutes=5)
    assert not folder.exists()
    assert "1 passed, 1 failed, 1 skipped; `test_launch.py`; not at its end" in saved[0]
    expected = {
        "time": "2 passed, 2 failed, 2 skipped; `test_launch.py`; 5 minutes were over in test_host.py",
        "interrupt": "1 passed, 1 failed, 1 skipped; `test_launch.py`; interrupted in test_host.py",
        "crash": "2 passed, 3 failed, 2 skipped; `test_launch.py`, `test_host.py`",
    }
    assert expected[ending] in saved[-1]


def test_a_command_is_interrupted_when_its_time_is_over(tmp_path):
    code = f"""
import pathlib, time
try:
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path({str(tmp_path / "ended")!r}).touch()
"""
    # As in the background of a shell.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert versions.run_until(time.monotonic() + 5, [sys.executable, "-c", code], {}) is None
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "ended").exists()
    assert versions.run_until(time.monotonic() + 60, [sys.executable, "-c", "exit(3)"], {}) == 3


def test_a_machines_constraints_of_pip_do_not_count(tmp_path):
    """A command of pip that a constraint would forbid, without an index."""
    (tmp_path / "constraints.txt").write_text("pytest<1")
    (tmp_path / "pip.conf").write_text(f"[global]\nconstraint = {tmp_path / 'constraints.txt'}\n")
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-index", "--no-deps", "pytest"]
    plain = {**os.environ, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    plain.pop("PIP_CONSTRAINT", None)
    assert subprocess.run(command, env=plain, capture_output=True).returncode
    assert not subprocess.run(command, env={**plain, **versions.ENVIRONMENT}, capture_output=True).returncode


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--only", "2.1"], "--only: expected some of"),
        (["--tests", "test_nowhere.py"], "--tests: expected files of tests/, found test_nowhere.py"),
        (["--only", "2.11.0", "--transformers", "5.23.0"], "--transformers: no row has 5.23.0"),
        (["--keep"], "--keep: expected with --folder"),
    ],
)
def test_wrong_arguments_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit):
        versions.main(arguments)
    assert message in capsys.readouterr().err
