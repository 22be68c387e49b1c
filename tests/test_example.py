"""The programs of examples/, run as a user runs them. What hub_round_trip.py finds is in test_hub.py."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from programs import PRELUDES

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATIONS = ["baseline", "only RMSNorm", "only SiLU", "both", "all"]


def example(*arguments, **environment):
    command = [sys.executable, ROOT / "examples/kernelize_llama.py", *map(str, arguments)]
    clean = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "LOSSLESS_PROOF")}
    clean.update(HF_HUB_OFFLINE="1", **environment)
    return subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True)


def replaced(rows):
    return [row["layers_replaced"] for row in rows]


def test_on_a_cpu(build, tmp_path):
    path = tmp_path / "results.json"
    done = example("--device", "cpu", "--build", build, "--seed", 7, "--tokens", 1, 17, "--json", path)
    assert done.returncode == 0, done.stderr
    assert "seed 7" in done.stdout
    for title in ("original layers, fp32, 1 x 17 tokens", "Triton's interpreter, fp16, 1 x 1 tokens"):
        assert title in done.stdout
    for heading in ("Max logit diff", "Bits equal", "Argmax match", "Layers replaced"):
        assert done.stdout.count(heading) == 8

    written = json.loads(path.read_text())
    assert written["failures"] == []
    assert {"torch", "triton", "transformers", "kernels", "date", "command", "device"} <= set(written["environment"])
    assert written["environment"]["torch"] == torch.__version__
    assert written["options"]["hidden_size"] == 128
    rows = written["results"]
    assert [row["configuration"] for row in rows] == 8 * CONFIGURATIONS
    assert replaced(rows) == 4 * [0, 0, 0, 0, 0] + 4 * [0, 5, 2, 7, 12]
    for row in rows:
        assert row["bits_equal"] is True
        assert row["max_logit_diff"] == 0
        assert row["argmax_match"] == f"{row['tokens']}/{row['tokens']}"


def test_json_to_stdout_is_nothing_but_json(build):
    sizes = ["--layers", 1, "--hidden-size", 64, "--intermediate-size", 96, "--heads", 2, "--batch", 3]
    done = example("--device", "cpu", "--build", build, "--dtype", "fp16", "--tokens", 2, *sizes, "--json", "-")
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    assert replaced(written["results"]) == [0, 0, 0, 0, 0, 0, 3, 1, 4, 7]
    assert {row["argmax_match"] for row in written["results"]} == {"6/6"}
    assert "Config" in done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--dtype", "bf16", "--device", "cpu"], "--dtype: bf16 needs a GPU"),
        (["--mode", "training", "--device", "cpu"], "--mode: training needs a GPU"),
        (["--graph", "--device", "cpu"], "--graph: needs a GPU and --mode inference"),
        (["--device", "abacus"], "--device: 'abacus'"),
        (["--device", "cuda:99"], "--device: 'cuda:99' is not here"),
        (["--hidden-size", "100"], "--hidden-size: expected a multiple of"),
        (
            ["--device", "cpu", "--hidden-size", "24"],
            "--hidden-size: expected a multiple of 4 from 64 to 32768, found 24",
        ),
        (["--device", "cpu", "--hidden-size", "66", "--heads", "3"], "to 32768, found 66"),
        (
            ["--hidden-size", "4096", "--heads", "2"],
            "--heads: expected at least 4: heads have at most 1024 elements, found 2",
        ),
        (["--device", "cpu", "--build", "/nowhere"], "--build: /nowhere is no folder"),
        (["--device", "cpu", "--build", "tests"], "--build: no kernel for this torch in tests"),
        (["--json", "/nowhere/results.json"], "--json: /nowhere/results.json: No such file or directory"),
        (["--tokens", "0"], "--tokens: expected a number from 1 on, found '0'"),
        (["--tokens", "a"], "--tokens: expected a number from 1 on, found 'a'"),
        (["--seed", "b"], "--seed: expected a number from 0 on, of 64 bits, found 'b'"),
        (["--model", "8b"], "--model: invalid choice: '8b'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_said_in_one_line(arguments, message):
    done = example(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr.splitlines()[-1]


def test_help():
    done = example("--help")
    assert done.returncode == 0
    for option in ("--model", "--layers", "--tokens", "--dtype", "--mode", "--json", "--seed"):
        assert option in done.stdout


@pytest.mark.parametrize(
    "name",
    [f"examples/{path.stem}" for path in sorted((ROOT / "examples").glob("*.py")) if path.stem != "common"]
    + [f"scripts/{name}" for name in ("publish", "vendor", "verify")],
)
def test_commands_start_with_a_safe_path(name):
    """Python then leaves out the folder of a script."""
    command = [sys.executable, ROOT / f"{name}.py", "--help"]
    done = subprocess.run(command, env={**os.environ, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_kernel_from_a_hub_without_telemetry(build, tmp_path):
    """kernels 0.17.2 and huggingface_hub 2.4.0 alone then send a header that their HTTP client refuses."""
    hubs = pytest.importorskip("hub", reason="publishing needs packages that are not installed")
    with hubs.local_hub.serve(tmp_path / "hub") as hub:
        hubs.upload_build(hub, build)
        environment = {**os.environ, **hubs.local_hub.variables(hub), "HF_HOME": str(tmp_path / "home")}
        environment.update(DO_NOT_TRACK="1", PYTHONSAFEPATH="1", PYTHONPATH="")
        environment.pop("HF_HUB_USER_AGENT_ORIGIN", None)
        command = [sys.executable, ROOT / "examples/kernelize_from_hub.py", hubs.REPO_ID, "--version", "1"]
        done = subprocess.run([*command, "--device", "cpu"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = map(json.loads, done.stdout.splitlines())
    assert (found["layers_replaced"], found["bits_equal"]) == (7, True)


def test_an_example_that_is_terminated_leaves_nothing(build, tmp_path):
    command = [sys.executable, ROOT / "examples/hub_round_trip.py", "--build", build]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("hub-round-trip-*/hub")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.terminate()
        output = process.communicate()[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_the_first_program_of_the_readme(build, run_python):
    """As it stands there, and the report; test_programs.py runs them all on a CPU."""
    _, program, *_ = (ROOT / "README.md").read_text().split("```python\n")
    report = "assert torch.equal(logits, expected)\nkernel.replacement_report(model)\n"
    done = run_python(PRELUDES["README.md"] + program.split("```")[0] + report)
    assert "LlamaRMSNorm" in done.stdout and "proofs in this process" in done.stdout


@pytest.mark.gpu
def test_on_a_gpu(build):
    arguments = ["--layers", 2, "--tokens", 1, 118, "--dtype", "bf16", "fp16", "--repeats", 5, "--json", "-"]
    done = example("--build", build, *arguments)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert replaced(rows) == 4 * [0, 5, 2, 7, 12]
    assert all(row["bits_equal"] and row["max_logit_diff"] == 0 for row in rows)
    assert all(row["quartiles_ms"][0] <= row["median_ms"] <= row["quartiles_ms"][1] for row in rows)
    assert [row["speedup"] for row in rows if row["configuration"] == "baseline"] == 4 * [1.0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "mode",
    (
        ["--mode", "training", "--tokens", 1024],
        ["--mode", "training", "--tokens", 1024, "--attention", "sdpa"],
        ["--mode", "inference-compile", "--backend", "aot_eager"],
        ["--graph", "--tokens", 1, 118],
    ),
    ids=str,
)
def test_other_modes_on_a_gpu(build, mode):
    done = example("--build", build, "--layers", 2, *mode, "--repeats", 5, "--json", "-")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert replaced(rows[:5]) == [0, 5, 2, 7, 12]
    assert all(row["bits_equal"] for row in rows)
    if "training" in mode:
        peaks = {row["configuration"]: row["peak_memory_bytes"] for row in rows}
        assert 0 < peaks["all"] < peaks["baseline"]
