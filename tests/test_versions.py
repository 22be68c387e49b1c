"""scripts/versions.py without pip: which rows there are, and what becomes of results and of the page."""

import shutil

import pytest
import versions

RESULTS = """<testsuites><testsuite name="pytest">
<testcase classname="tests.test_launch" name="test_one" time="1"/>
<testcase classname="tests.test_launch" name="test_two"><skipped message="no GPU"/></testcase>
<testcase classname="tests.test_host" name="test_three[a | b]"><failure message="differs">text</failure></testcase>
</testsuite></testsuites>"""


def outcome(row, **given):
    return versions.Outcome(row, "2026-11-23", ("test_launch.py",), guards=True, **given)


@pytest.fixture
def page(tmp_path, monkeypatch):
    copy = tmp_path / "compatibility.md"
    shutil.copy(versions.PAGE, copy)
    monkeypatch.setattr(versions, "PAGE", copy)
    return copy


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
    assert (found.passed, found.skipped, found.failed) == (1, 1, ("test_host::test_three[a | b]",))


def test_the_page_keeps_other_rows_and_has_one_line_for_each(page):
    first, second = versions.ROWS[:2]
    versions.write([outcome(second, passed=5), outcome(first, passed=3)])
    versions.write([outcome(first, problem="cannot be installed: no such version", torch="2.11.0+cpu")])
    text = page.read_text()
    lines = [line for line in text.split(versions.BEGIN)[1].split(versions.END)[0].splitlines() if line.strip()]
    assert lines[0].startswith("| torch |") and lines[1].startswith("|---")
    table = {versions.key_of(line): line for line in lines[2:]}
    assert len(table) == len(lines[2:])
    ours = [table[(row.torch, row.triton, row.transformers, row.kernels)] for row in (first, second)]
    assert "cannot be installed" in ours[0] and ours[0].startswith("| 2.11.0+cpu |")
    assert "5 passed, 0 failed" in ours[1] and lines.index(ours[0]) < lines.index(ours[1])
    assert text.startswith("# Versions") and "## Policy" in text


def test_a_bar_in_a_name_does_not_break_the_table(page):
    versions.write([outcome(versions.ROWS[0], failed=("test_host::test_three[a | b]",))])
    (line,) = [line for line in page.read_text().splitlines() if "test_three" in line]
    assert line.replace(r"\|", "").count("|") == 8


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
