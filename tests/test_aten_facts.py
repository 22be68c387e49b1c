"""tests/aten_facts.py compares eager with emulations on a GPU. Here: every path of it runs, on small CPU tensors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "aten_facts.py"


def facts(*arguments):
    command = [sys.executable, SCRIPT, "--device", "cpu", *map(str, arguments)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=one_thread, capture_output=True, text=True, timeout=60)


def items():
    """Names and titles from the source: importing the script would read pytest's arguments."""
    return dict(re.findall(r'^@item\("(.+?)", \d+\)\ndef item_(\w+)\(it\):$', SCRIPT.read_text(), re.M))


def test_every_item_runs(tmp_path):
    found = tmp_path / "facts.json"
    done = facts("--small", "--json", found)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.split("=== summary")[1].splitlines()[1:]
    titles = items()
    assert len(titles) == SCRIPT.read_text().count("\n@item(") == len(summary)
    for title, line in zip(titles, summary):
        assert re.match(rf"{re.escape(title)}: (OK \d+ cases|DIFF \d+ of \d+|INFO)", line), line
    records = json.loads(found.read_text())["items"]
    assert [record["name"] for record in records] == list(titles.values())
    for record in records:
        assert record["error"] is None
        assert record["cases"] or record["notes"], record["item"]


def test_an_unknown_item_is_an_error():
    done = facts("--small", "--only", "kl,layernorm")
    assert done.returncode == 2
    assert "no item layernorm; there are self_check, " in done.stderr
    assert "layer_norm" in done.stderr
    assert done.stdout == ""
