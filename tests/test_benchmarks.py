"""`benchmarks/`: the peer suite without a GPU, and the scripts for `kernels benchmark`."""

import importlib.machinery
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import beside_eager
import cases
import pytest
import report as reporting
import torch
from cases import (
    COMPILED,
    CPU,
    CUT,
    CUTILE,
    EAGER,
    EVENTS,
    GRAPH,
    LIGER,
    NATIVE,
    NATIVE_BARE,
    OURS,
    QUACK,
    Case,
    Target,
)
from report import Report, Result

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"


def peers(*arguments, **environment):
    clean = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "LOSSLESS_PROOF")}
    clean.update(environment)
    command = [sys.executable, BENCHMARKS / "peers.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True)


def result(op, shape, peer, ms, device_ms=None, **more):
    spread = (0.99 * ms, 1.02 * ms)
    device = {} if device_ms is None else {"device_ms": device_ms, "device_quartiles_ms": (device_ms, device_ms)}
    moved = Case(op, shape).bytes("bf16") / ms / 1e6 if op in cases.OPS else None
    return Result(op, shape, "bf16", peer, 100, ms, spread, gb_per_s=moved, **device, **more)


@pytest.fixture
def report():
    """Times of an H200, ours made up."""
    forward, decode, backward = (32768, 4096), (4, 4096), (32768, 32768)
    one_row = cases.CPU_SHAPE
    return Report(
        environment={
            "gpu": "NVIDIA H200",
            "kernel": "_lossless_kernels_cuda_0000000",
            "driver": "580.159",
            "versions": {"torch": "2.11.0", "quack-kernels": None},
            "date": "2026-11-21T10:00:00+00:00",
            "command": "python benchmarks/peers.py",
        },
        dtype="bf16",
        copy_gb_per_s=4257.0,
        copy_quartiles=(4250.0, 4260.0),
        l2_bytes=60 << 20,
        missing={QUACK: "ModuleNotFoundError: No module named 'quack'"},
        results=[
            result("rms_norm", forward, EAGER, 1.64, 1.63, bit_equal=True),
            result("rms_norm", forward, OURS, 0.1290, 0.1350, bit_equal=True),
            result("rms_norm", forward, LIGER, 0.1343, 0.1330, bit_equal=False),
            result("rms_norm", (16384, 8192), OURS, 0.1290, bit_equal=True),
            Result("rms_norm", (16384, 8192), "bf16", LIGER, error="RuntimeError: no such row"),
            result("rms_norm", decode, COMPILED, 0.0060, 0.0020, bit_equal=False),
            result("rms_norm", decode, OURS, 0.0070, 0.0019, bit_equal=True),
            result("rms_norm_backward", backward, OURS, 2.3, 2.3, bit_equal=False),
            result("cpu_time_inference", one_row, OURS, 0.0071, bit_equal=True),
            result("cpu_time_inference", one_row, NATIVE_BARE, 0.0072, bit_equal=False),
            result("cpu_time_training", one_row, OURS, 0.0150, bit_equal=True),
            result("cpu_time_training", one_row, NATIVE_BARE, 0.0080, bit_equal=False),
        ],
        first_call={"empty": {"torch and CUDA": 5.0}, "full": {"torch and CUDA": 4.0}},
        failures=["rms_norm_backward 32768x32768: not bit-equal with eager"],
    )


# What is measured


def test_every_case_has_an_op_and_a_target():
    assert len(cases.CASES) == len(set(cases.CASES)) == 76
    assert all(targets for targets in cases.TARGETS.values())
    # An op without a target is timed at many shapes.
    assert {case.op for case in cases.CASES} <= set(cases.OPS)
    assert {case.op for case in cases.CASES} | set(beside_eager.MEASURED_OPS) == set(cases.OPS)
    assert {case.shape for case in cases.CASES} >= set(cases.QUICK_SHAPES)


def test_bytes_are_those_that_must_move():
    assert Case("rms_norm", (8192, 4096)).bytes("bf16") == 2 * (2 * 8192 * 4096 + 4096)
    assert Case("rms_norm_backward", (32768, 4096)).bytes("fp32") == 4 * (3 * 32768 * 4096 + 2 * 4096)
    assert Case("silu_backward", (8192, 14336)).bytes("fp16") == 2 * 3 * 8192 * 14336
    assert Case("silu_and_mul_backward", (8192, 14336)).bytes("bf16") == 2 * 5 * 8192 * 14336
    assert Case("rotary", (8, 2048, 40, 128)).bytes("bf16") == 2 * (2 * 8 * 2048 * 40 * 128 + 2 * 2048 * 128)
    assert Case("rms_norm", (4096, 32, 128)).rows == 4096 * 32


def test_selection():
    assert cases.select(["rms_norm", "silu"], [(2, 64)]) == [Case("rms_norm", (2, 64)), Case("silu", (2, 64))]
    assert cases.select(["silu"]) == [Case("silu", (8192, 14336))]
    assert cases.select(["cpu_time", "first_call"]) == []


def test_reports_need_neither_torch_nor_a_peer(run_python):
    """A file in `ops/` imports them in functions alone."""
    code = """
    import sys
    for name in ("torch", "transformers", "kernels", "liger_kernel", "quack", "cut_cross_entropy"):
        sys.modules[name] = None
    sys.path.insert(0, sys.argv[1])
    import report
    print(len(report.OPS), len(report.TARGETS))
    """
    done = run_python(code, arguments=(BENCHMARKS,))
    assert done.stdout.split() == [str(len(cases.OPS)), str(len(cases.TARGETS))]


FAMILY = """
from cases import AS_FASTEST, Op

OPS = {"twice": Op("Twice", {(8, 64): AS_FASTEST}, tensors=2)}

def eager():
    return {"twice": lambda x: x + x}

def ours(kernel):
    return {"twice": lambda x: 2 * x}

def quack():
    import quack.twice
"""


def test_a_family_is_one_file(run_python, tmp_path):
    """It comes last, whatever its name, and has functions of eager, of ours and of torch.compile, which gets eager's."""
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "benchmarks/ops/a_family.py").write_text(FAMILY)
    code = """
    import sys, types
    sys.path.insert(0, sys.argv[1])
    import cases, measure, peers, torch
    assert list(cases.OPS)[-1] == "twice" and len(cases.OPS) == 52 and cases.CASES[-1] == cases.Case("twice", (8, 64))
    assert peers.parse(["--ops", "twice"]).cases == [cases.CASES[-1]] and cases.CASES[-1].bytes("bf16") == 2 * 2 * 8 * 64
    peers.FAMILIES = {"a_family": cases.FAMILIES["a_family"]}
    cases.FAMILIES = peers.FAMILIES
    torch.compile = lambda function, dynamic: function
    loaded, missing = peers.load_peers(["eager", "torch.compile", "Liger", "quack"], None)
    print({name: list(found) for name, found in loaded.items()}, list(missing))
    (inputs,) = measure.draw(cases.CASES[-1], torch.bfloat16, torch.device("cpu"), 1)
    found = [functions["twice"](*inputs.arguments) for functions in loaded.values()]
    print(all(torch.equal(found[0], each) for each in found))
    """
    done = run_python(code, arguments=(tmp_path / "benchmarks",))
    expected = {EAGER: ["twice"], COMPILED: ["twice"], OURS: ["twice"]}
    assert done.stdout.splitlines() == [f"{expected} ['quack']", "True"]


class AnyModule(types.ModuleType):
    """A module of a library that has any function and any class with `apply`."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return types.SimpleNamespace(apply=lambda *arguments: arguments)


class AnyLibrary:
    """Finds every module of these libraries but the `missing` ones."""

    def __init__(self, *names, missing=()):
        self.names, self.missing = names, missing

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names and name not in self.missing:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return AnyModule(spec.name)

    def exec_module(self, module):
        pass


@pytest.fixture
def libraries(monkeypatch):
    """`libraries(missing)` puts such libraries in the place of the installed ones."""

    def put(*missing):
        names = ("liger_kernel", "quack", "cut_cross_entropy")
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [AnyLibrary(*names, missing=missing), *sys.meta_path])

    yield put
    for name in [name for name, module in sys.modules.items() if type(module) is AnyModule]:
        del sys.modules[name]


OTHERS = {
    NATIVE: "rms_norm",
    LIGER: "rms_norm add_rms_norm torch_rms_norm silu_and_mul layer_norm group_norm softmax dyt jsd linear_jsd cross_entropy kl_div tvd "
    "linear_cross_entropy rotary rotary_complex",
    QUACK: "rms_norm softmax cross_entropy",
    CUT: "linear_cross_entropy",
    CUTILE: "rms_norm",
}


def test_what_other_libraries_compute(libraries):
    libraries()
    assert list(cases.PEERS) == [EAGER, COMPILED, *OTHERS]
    found = {peer: cases.functions(peer) for peer in OTHERS}
    assert {peer: list(functions) for peer, functions in found.items()} == {
        peer: names.split() for peer, names in OTHERS.items()
    }
    in_place = {name for name, function in found[LIGER].items() if getattr(function, "in_place", False)}
    assert in_place == {"cross_entropy", "rotary", "rotary_complex"}


def test_a_library_without_a_family_has_the_others(kernel, libraries):
    import peers as program

    libraries("liger_kernel.ops.dyt", "cut_cross_entropy")
    loaded, missing = program.load_peers([LIGER, CUT], kernel)
    assert {*loaded} == {LIGER, OURS} and {*OTHERS[LIGER].split()} - {*loaded[LIGER]} == {"dyt"}
    assert missing == {
        "Liger's dyt": "ModuleNotFoundError: No module named 'liger_kernel.ops.dyt'",
        CUT: "ModuleNotFoundError: No module named 'cut_cross_entropy'",
    }


def test_the_sets_of_inputs_share_a_weight():
    import measure

    first, second = measure.draw(Case("add_rms_norm_backward", (3, 64)), torch.bfloat16, torch.device("cpu"), 2)
    assert first.arguments[2] is second.arguments[2] and first.arguments[2].shape == (64,)
    assert len(first.differentiable) == 3 and len(first.dy) == 2
    drawn = [tensor for inputs in (first, second) for tensor in (*inputs.arguments[:2], *inputs.dy)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))


def test_sets_of_inputs_exceed_the_l2_and_end_somewhere():
    import measure

    l2 = 60 << 20
    for case in cases.CASES:
        moved = case.bytes("bf16")
        count = measure.sets_needed(moved, l2)
        assert 1 <= count <= 64
        assert count == 64 or count * moved > 15 * l2


# Tables and verdicts


def verdict(report, op, shape, clock=EVENTS):
    return [found.text() for found in reporting.case_verdicts(report, Case(op, shape), clock)]


def test_verdicts(report):
    roofline = report.roofline_ms(Case("rms_norm", (32768, 4096)))
    # To the digits that are written here.
    assert roofline == pytest.approx(0.1261, abs=1e-4)
    assert verdict(report, "rms_norm", (32768, 4096)) == [
        "met: 0.1290 <= 0.1299 (1.03 x roofline)",
        "met: 0.1290 <= 0.1343 (fastest peer, Liger)",
    ]
    assert verdict(report, "rms_norm", (32768, 4096), GRAPH) == [
        "not met: 0.1350 > 0.1299 (1.03 x roofline)",
        "not met: 0.1350 > 0.1330 (fastest peer, Liger)",
    ]
    # A target of device time in a CUDA graph alone.
    assert verdict(report, "rms_norm", (4, 4096)) == []
    assert verdict(report, "rms_norm", (4, 4096), GRAPH) == ["met: 0.00190 <= 0.00200 (torch.compile)"]
    # The only peer failed.
    assert verdict(report, "rms_norm", (16384, 8192))[1] == "no verdict: fastest peer was not measured"
    assert verdict(report, "cpu_time_inference", (1, 4096), CPU)[0].startswith("met: ")
    assert verdict(report, "cpu_time_training", (1, 4096), CPU)[0].startswith("not met: ")


def test_a_recorded_time_stands_in_for_a_missing_peer_on_the_same_gpu(report):
    (text,) = verdict(report, "rms_norm_backward", (32768, 32768))
    assert text == "not met: 2.300 > 2.175 (0.9 x quack, recorded 2.417 in another run)"
    report.environment["gpu"] = "NVIDIA B200"
    (text,) = verdict(report, "rms_norm_backward", (32768, 32768))
    assert text == "no verdict: 0.9 x quack was not measured"


def test_a_target_beyond_the_l2_is_for_larger_cases_alone(report):
    target = Target(1.15, cases.ROOFLINE, beyond_l2=True)
    case = Case("rms_norm", (32768, 4096))
    assert reporting.judge(report, case, target, EVENTS).met
    report.l2_bytes = case.bytes("bf16")
    assert reporting.judge(report, case, target, EVENTS) is None


def test_no_targets_for_other_dtypes(report):
    report.dtype = "fp16"
    assert reporting.verdicts(report) == []


def test_numbers_have_four_digits():
    assert [reporting.number(value) for value in (0.0019, 0.126, 1.0193, 12.97, 0, 54321)] == [
        "0.00190",
        "0.1260",
        "1.019",
        "12.97",
        "0.0000",
        "54321",
    ]
    assert reporting.quartiles([4, 1, 3, 2]) == (1.75, 2.5, 3.25)


def test_markdown(report):
    text = reporting.markdown(report)
    assert "NVIDIA H200 (driver 580.159), torch 2.11.0, bf16" in text
    assert "quack-kernels" not in text
    lines = text.splitlines()
    row = next(line for line in lines if line.startswith("| 32768x4096"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # In the order of the head, ours last of the peers.
    head = next(line for line in lines if line.startswith("| shape"))
    named = dict(zip([cell.strip() for cell in head.strip("|").split("|")], cells, strict=True))
    assert named["eager"] == "1.640 ±0.025"
    assert named[OURS] == "0.1290 ±0.0019"
    assert named["of roofline"] == "97.8%"
    assert named["bits equal"] == "yes"
    assert named["targets"].count("met: ") == 2
    assert named[COMPILED] == ""
    assert any("| failed" in line for line in lines if line.startswith("| 16384x8192"))
    assert any("| NO " in line for line in lines if line.startswith("| 32768x32768"))
    assert any(line.startswith("| inference") and "7.100 ±0.10" in line for line in lines)
    assert "- targets met by CUDA-event timing: 3 of 5" in lines
    assert "- targets met by CPU time: 1 of 2" in lines
    assert f"- {OURS}: eager's bits in 5 of 6 cases" in lines
    assert "- quack is not in this run: ModuleNotFoundError: No module named 'quack'" in lines
    assert "- Liger, rms_norm 16384x8192: RuntimeError: no such row" in lines
    assert "- error: rms_norm_backward 32768x32768: not bit-equal with eager" in lines
    # Markdown counts the cells: every line of a table has those of its head.
    for before, line in zip(lines, lines[1:], strict=False):
        if before.startswith("|") and line.startswith("|"):
            assert before.count("|") == line.count("|")


def test_json_and_back(report, tmp_path):
    path = tmp_path / "peers.json"
    report.save(path)
    assert len(json.loads(path.read_text())["verdicts"]) == len(reporting.verdicts(report))
    again = Report.load(path)
    assert again.results[0].case == Case("rms_norm", (32768, 4096))
    assert reporting.markdown(again) == reporting.markdown(report)


def test_the_shipped_page_is_that_of_the_shipped_measurements(tmp_path):
    shipped = Report.load(ROOT / "docs/peers/peers.json")
    assert reporting.markdown(shipped) == (ROOT / "docs/peers/peers.md").read_text(encoding="utf-8")
    shipped.save(tmp_path / "peers.json")
    assert json.loads((tmp_path / "peers.json").read_text()) == json.loads((ROOT / "docs/peers/peers.json").read_text())
    other = Report.load(ROOT / "docs/peers/torch_2_15.json")
    assert reporting.markdown(other) == (ROOT / "docs/peers/torch_2_15.md").read_text(encoding="utf-8")
    assert len(shipped.results) == 352
    for found in shipped.results:
        fractions = (found.roofline_fraction, found.median_ms), (found.device_roofline_fraction, found.device_ms)
        for fraction, milliseconds in fractions:
            assert (fraction is None) == (milliseconds is None or found.op in cases.CPU_OPS)
            if fraction is not None:
                # To the rounding of float division.
                assert fraction == pytest.approx(shipped.roofline_ms(found.case) / milliseconds)


def test_a_plot_has_every_case_that_moves_something(report):
    few, many = (result("rms_norm", (rows, 4096), OURS, 0.04) for rows in (16, 8192))
    for added in (few, many):
        added.device_ms, added.device_quartiles_ms = 0.03, (0.02, 0.04)
    report.results += [few, many]
    found = reporting.series(report, "rms_norm")
    assert Case("rms_norm", (16, 4096)) not in found[OURS]
    assert [case.hidden_size for case in found[OURS]] == sorted(case.hidden_size for case in found[OURS])
    gigabytes = Case("rms_norm", (8192, 4096)).bytes("bf16") / 1e9
    expected = [gigabytes / ms * 1e3 for ms in (0.04, 0.03, 0.02)]  # to the rounding of float division
    assert found[OURS][Case("rms_norm", (8192, 4096))] == pytest.approx(expected)
    assert list(found)[-1] == OURS


def test_plots_from_json(report, tmp_path):
    report.save(tmp_path / "peers.json")
    done = peers("--from-json", tmp_path / "peers.json", "--plots", tmp_path / "plots", "--markdown", tmp_path / "a.md")
    # The report holds a failure.
    assert done.returncode == 1, done.stderr
    assert done.stdout == reporting.markdown(report) + "\n" == (tmp_path / "a.md").read_text() + "\n"
    written = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert written == ["host_time.png", "rms_norm.png", "rms_norm_backward.png"]
    for name in written:
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")


# The command


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--cases", "4096"], "argument --cases: expected sizes such as 8192x4096 or 4096x32x128, found '4096'"),
        (["--cases", "8192xmany"], "found '8192xmany'"),
        (["--cases", "0x4096"], "found '0x4096'"),
        (["--ops", "softmin"], "argument --ops: invalid choice: 'softmin'"),
        (["--peers", "apex"], "argument --peers: invalid choice: 'apex'"),
        (["--dtype", "fp64"], "argument --dtype: invalid choice: 'fp64'"),
        (["--rounds", "0"], "argument --rounds: expected a number from 1 on, found '0'"),
        (["--rounds", "a"], "argument --rounds: expected a number from 1 on, found 'a'"),
        (["--from-json", "/nowhere.json"], "--from-json: /nowhere.json: No such file or directory"),
        (
            ["--from-json", str(ROOT / "README.md")],
            f"--from-json: expected JSON written by peers.py, found {ROOT / 'README.md'}",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_said_in_one_line(arguments, message):
    done = peers(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr.splitlines()[-1]


def test_without_a_gpu():
    done = peers(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "expected a GPU, torch finds none" in done.stderr


def test_help():
    done = peers("--help")
    assert done.returncode == 0
    for word in (
        "--ops",
        "--cases",
        "--quick",
        "--peers",
        "--rounds",
        "--json",
        "--plots",
        "first_call",
        "Exit status",
    ):
        assert word in done.stdout


def test_files_are_looked_at_before_anything_is_printed(report, tmp_path):
    path = tmp_path / "peers.json"
    report.save(path)
    for option, given, message in (
        ("--plots", path, f"--plots: expected a folder, found the file {path}"),
        ("--markdown", tmp_path, f"--markdown: expected a file, found the folder {tmp_path}"),
    ):
        done = peers("--from-json", path, option, given)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"peers: error: {message}\n")
    for text in ("{}", "[]", '"text"'):
        path.write_text(text)
        done = peers("--from-json", path)
        message = f"peers: error: --from-json: expected JSON written by peers.py, found {path}\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize(
    "script, arguments, status, message",
    [
        (
            "first_call",
            ["/nowhere"],
            2,
            "first_call: error: BUILD: expected a folder made by `make build`, found no folder /nowhere",
        ),
        ("first_call", [BENCHMARKS], 2, "first_call: error: expected a GPU, torch finds no CUDA device"),
        (
            "benchmark_layers",
            [],
            1,
            "benchmark_layers: error: not a program; run `make build`, then `kernels benchmark .`",
        ),
    ],
)
def test_what_the_other_scripts_cannot_do(script, arguments, status, message):
    command = [sys.executable, BENCHMARKS / f"{script}.py", *arguments]
    done = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1)
    assert done.stderr.startswith(message)


def test_the_kernels_take_the_layers_whose_first_call_is_timed(interpreted):
    code = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import torch
    from kernels import get_local_kernel
    from pathlib import Path
    import first_call
    kernel = get_local_kernel(Path(sys.argv[2]))
    model = first_call.layers(kernel, "cpu")
    model(torch.randn(16, 4096).to(torch.bfloat16))
    print([(layer.layer, layer.path) for layer in kernel.replacement_report(model, verbose=False).layers])
    first_call.refuse_originals(kernel, model)
    """
    done = interpreted(code, check=False, arguments=(BENCHMARKS, ROOT / "build"), LOSSLESS_PROOF="off")
    assert done.stdout == "[('RMSNorm', 'unproved'), ('SiLU', 'unproved')]\n", done.stderr
    # Times of an original forward, or of kernels that nothing has verified, are refused.
    assert done.returncode == 2
    assert (
        "first_call: error: expected the kernels of RMSNorm, found path 'unproved': LOSSLESS_PROOF=off" in done.stderr
    )


# The whole run with the clocks of a CPU, in a process whose kernels are not interpreted: they return eager's results.
CPU_RUN = """
import json, sys, time, types
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from rich.console import Console
import measure, peers

class Cpu:
    name, device, l2_bytes = "CPU", torch.device("cpu"), 1 << 12
    def synchronize(self): pass
    def release(self): pass
    def times(self, call, indices, head_start):
        found = []
        for index in indices:
            start = time.perf_counter()
            call(index)
            found.append((time.perf_counter() - start) * 1e3)
        return found
    def capture(self, call, indices):
        return lambda _: [call(index) for index in indices]

# A peer without RMSNorm, which has no part in CPU times.
sys.modules["cut_cross_entropy"] = types.SimpleNamespace(linear_cross_entropy=None)
measure._COPY_BYTES = 1 << 20
measure._CPU_CALLS_A_TURN = 2
folder = Path(sys.argv[2])
options = peers.parse(
    "--cases 3x64 2x2x128 --peers F.rms_norm Liger quack cut-cross-entropy --ops rms_norm rms_norm_backward silu silu_backward "
    "silu_and_mul silu_and_mul_backward cpu_time "
    "--rounds 3".split() + ["--json", str(folder / "peers.json"), "--markdown", str(folder / "a.md")]
    + ["--build", sys.argv[3]]
)
options.plots = None
report = peers.run(options, Cpu(), Console(stderr=True))
peers.write(report, options)

# Ours with other bits, and ours that fails.
functions = peers.functions
for name, broken in {"bits": lambda x, w: 2 * x * w, "raises": lambda x, w: 1 / 0}.items():
    ours = {"rms_norm": broken, "silu": torch.nn.functional.silu}
    peers.functions = lambda peer, *kernel, **family: ours if kernel else functions(peer, **family)
    options = peers.parse(["--cases", "3x64", "--peers", "eager", "--ops", "rms_norm", "--build", sys.argv[3]])
    options.json = None
    print(name, peers.run(options, Cpu(), Console(stderr=True)).failures, file=sys.stderr)
"""


def test_a_run_by_the_clocks_of_a_cpu(build, run_python, tmp_path):
    done = run_python(CPU_RUN, arguments=(BENCHMARKS, tmp_path, build))
    report = Report.load(tmp_path / "peers.json")
    assert report.failures == []
    assert QUACK in report.missing or importable("quack")
    assert len(report.cases) == 12 + 2
    for found in report.results:
        if found.peer == OURS:
            assert found.bit_equal is True and found.error is None and found.median_ms > 0
        if found.peer == OURS and found.op in cases.OPS:
            assert found.device_ms > 0 and found.gb_per_s > 0 and found.samples >= 3
    # Liger needs a GPU, and says so without ending the run.
    liger = [found for found in report.results if found.peer == LIGER]
    assert liger == [] or all(found.error for found in liger if found.op in cases.OPS)
    assert NATIVE_BARE in report.of(Case("cpu_time_training", cases.CPU_SHAPE))
    assert "bits ['rms_norm 3x64: not bit-equal with eager']" in done.stderr
    assert "raises ['rms_norm 3x64: ZeroDivisionError: division by zero']" in done.stderr


def importable(name):
    import importlib.util

    return importlib.util.find_spec(name) is not None


# For `kernels benchmark`


@pytest.mark.either
def test_kernels_benchmark_finds_the_classes_and_demands_bits(build, run_python):
    pytest.importorskip("sigstore", reason="sigstore is not installed, which the command `kernels` imports")
    code = """
    import sys
    from pathlib import Path
    import torch
    from kernels.cli import benchmark as cli

    root = Path(sys.argv[1])
    scripts = cli.discover_benchmark_scripts(".", root)
    print([script.name for script in scripts])
    (script,) = scripts
    for found in cli.discover_benchmark_classes(script, root):
        results, _ = cli.run_benchmark_class(
            found, iterations=1, warmup=1, repo_id=sys.argv[2], is_local=True, revision="local"
        )
        print(found.__name__, {name: timing.verified for name, timing in results.items()})
        found.kernel = None
        wrong = found()
        wrong.device = sys.argv[3]
        wrong.setup_training()
        wrong.keep(wrong.inference(lambda x, *weight: x))
        try:
            wrong.demand(wrong.inference(lambda x, *weight: -x))
        except RuntimeError as error:
            print(error)
    """
    device, rows = ("cuda", 8192) if torch.cuda.is_available() else ("cpu", 2)
    done = run_python(code, arguments=(ROOT, build, device))
    assert f"Running RMSNorm on {device}" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "['benchmark_layers.py']"
    assert lines[1].startswith("RMSNorm {") and "False" not in lines[1] and "None" not in lines[1]
    assert lines[2] == f"RMSNorm: {rows * 4096} of {rows * 4096} elements differ from eager's"
    assert lines[3] == "SiLU {'inference': True, 'training': True}"
    assert lines[4] == f"SiLU: {rows * 14336} of {rows * 14336} elements differ from eager's"


# On a GPU


@pytest.mark.alone
@pytest.mark.gpu
def test_a_quick_run_on_a_gpu(build, tmp_path):
    files = ["--json", tmp_path / "a.json", "--markdown", tmp_path / "a.md", "--plots", tmp_path / "plots"]
    done = peers("--quick", "--rounds", 2, "--build", build, *files)
    assert done.returncode == 0, done.stderr
    report = Report.load(tmp_path / "a.json")
    for found in report.results:
        if found.peer == OURS:
            assert found.bit_equal is True and found.median_ms > 0
            assert found.op in cases.CPU_OPS or found.device_ms > 0
    assert "## RMSNorm backward" in (tmp_path / "a.md").read_text()


def test_a_step_is_the_loss_and_the_gradient_of_its_logits():
    import measure

    case = cases.Case("cross_entropy", (5, 40))
    assert case.bytes("bf16") == 3 * 5 * 40 * 2
    (inputs,) = measure.draw(case, torch.bfloat16, torch.device("cpu"), 1)
    logits, target = inputs.arguments
    assert logits.shape == (5, 40) and target.shape == (5,) and inputs.differentiable == (logits,)
    function, op = cases.functions(EAGER)["cross_entropy"], cases.OPS["cross_entropy"]
    loss, gradient = measure.outcome(function, inputs, op)
    assert loss.shape == () and gradient.shape == logits.shape
    call = measure.prepare(function, [inputs], op)
    for _ in range(2):  # Each call has a graph of its own.
        assert torch.equal(call(0)[0], gradient)


@pytest.mark.parametrize("op, shape", [("kl_div", (6, 40)), ("tvd", (6, 40)), ("linear_cross_entropy", (6, 8, 40))])
def test_losses_of_distributions_and_of_a_layer(kernel, module, monkeypatch, op, shape):
    """Without kernels ours is eager's."""
    import measure

    for name in ("cross_entropy", "ops.divergences"):
        monkeypatch.setattr(module(name), "runs_kernels", lambda device: False)
        module(name)._calls.clear()
    case = cases.Case(op, shape)
    (inputs,) = measure.draw(case, torch.bfloat16, torch.device("cpu"), 1)
    assert len(inputs.differentiable) == (2 if op == "linear_cross_entropy" else 1)
    moved = {"kl_div": 4 * 6 * 40, "tvd": 5 * 6 * 40, "linear_cross_entropy": 2 * 8 * (6 + 40)}
    assert case.bytes("bf16") == 2 * moved[op]
    functions = [named[op] for named in (cases.functions(EAGER), cases.functions(OURS, kernel))]
    expected, found = (measure.outcome(function, inputs, cases.OPS[op]) for function in functions)
    assert len(expected) == 1 + len(inputs.differentiable)
    assert all(map(torch.equal, found, expected))
    for name in ("cross_entropy", "ops.divergences"):
        module(name)._calls.clear()


# A shape and the elements that must move; frequencies of 8 bytes are four elements of 16 bits.
SMALL = {
    "masked_softmax": ((2, 3, 5, 7), 2 * 210 + 70),
    "masked_softmax_backward": ((2, 3, 5, 7), 3 * 210),
    "dyt": ((6, 40), 2 * 240 + 2 * 40),
    "dyt_backward": ((6, 40), 3 * 240 + 3 * 40),
    "jsd": ((6, 40), 5 * 240),
    "linear_jsd": ((6, 8, 40), 3 * 8 * 46),
    "rotary_partial": ((2, 3, 5, 16), 2 * 480 + 2 * 3 * 8),
    "rotary_partial_backward": ((2, 3, 5, 16), 2 * 480 + 2 * 3 * 8),
    "rotary_neighbours": ((2, 3, 5, 16), 2 * 480 + 2 * 3 * 16),
    "rotary_neighbours_backward": ((2, 3, 5, 16), 2 * 480 + 2 * 3 * 16),
    "rotary_chunked": ((2, 3, 5, 16), 2 * 480 + 2 * 3 * 8),
    "rotary_chunked_backward": ((2, 3, 5, 16), 2 * 480 + 2 * 3 * 8),
    "rotary_vision": ((1, 3, 5, 16), 2 * 240 + 2 * 3 * 16),
    "rotary_vision_backward": ((1, 3, 5, 16), 2 * 240 + 2 * 3 * 16),
    "rotary_complex": ((2, 3, 5, 16), 2 * 480 + 3 * 8 * 4),
    "rotary_complex_backward": ((2, 3, 5, 16), 2 * 480 + 3 * 8 * 4),
}


@pytest.mark.parametrize("op", SMALL)
def test_the_other_ops(kernel, module, monkeypatch, op):
    """Without kernels ours is eager's, and torch.compile has a function of the family."""
    import measure

    names = ("ops.softmax", "ops.masked_softmax", "ops.dyt", "ops.rotary", "ops.complex_rotary")
    for name in names:
        monkeypatch.setattr(module(name), "runs_kernels", lambda device: False)
        module(name)._calls.clear()
    shape, elements = SMALL[op]
    case = cases.Case(op, shape)
    assert case.bytes("bf16") == 2 * elements
    (inputs,) = measure.draw(case, torch.bfloat16, torch.device("cpu"), 1)
    functions = [named[case.function] for named in (cases.functions(EAGER), cases.functions(OURS, kernel))]
    expected, found = (measure.outcome(function, inputs, cases.OPS[op]) for function in functions)
    assert measure.same_bits(found, expected)
    if cases.OPS[op].backward:
        count = {"dyt_backward": 4, "linear_jsd": 2, "jsd": 1, "masked_softmax_backward": 1}.get(op, 2)
        assert len(inputs.differentiable) == count
    for name in names:
        module(name)._calls.clear()


def test_every_op_has_an_eager_function_a_compiled_one_and_ours(kernel):
    for family in cases.FAMILIES.values():
        names = {Case(op, ()).function for op in family.OPS}
        for peer in ((EAGER,), (COMPILED,), (OURS, kernel)):
            assert cases.functions(*peer, family=family).keys() == names, (family.__name__, peer[0])


@pytest.mark.parametrize("op", ["group_norm", "group_norm_backward"])
def test_images_have_channels(kernel, module, monkeypatch, op):
    """Without kernels ours is eager's."""
    import measure

    family, case = module("ops.group_norm"), cases.Case(op, (2, 64, 5))
    monkeypatch.setattr(family, "runs_kernels", lambda device: False)
    family._calls.clear()
    (inputs,) = measure.draw(case, torch.bfloat16, torch.device("cpu"), 1)
    backward = op.endswith("backward")
    assert len(inputs.differentiable) == 3 * backward and case.bytes("bf16") == 2 * (2 + backward) * 640
    functions = [named["group_norm"] for named in (cases.functions(EAGER), cases.functions(OURS, kernel))]
    expected, found = (measure.outcome(function, inputs, cases.OPS[op]) for function in functions)
    assert len(expected) == 1 + 3 * backward and all(map(torch.equal, found, expected))
    with pytest.raises(ValueError, match=r"expects \[samples, channels, positions\] with a multiple of 32 channels"):
        measure.draw(cases.Case(op, (2, 33, 5)), torch.bfloat16, torch.device("cpu"), 1)
    family._calls.clear()


# Many shapes beside eager


def test_many_shapes_can_be_drawn():
    """Each op's shapes are of its kind, and no case is measured twice."""
    import measure

    found = beside_eager.selected(beside_eager.MEASURED_OPS, beside_eager.ALL)
    assert len(found) == len(set(found)) > 1950
    assert {case.op for case, _ in found} == set(beside_eager.MEASURED_OPS)
    assert {dtype for _, dtype in beside_eager.selected(["silu"], ["fp16"])} == {"fp16"}
    for op in beside_eager.MEASURED_OPS:
        smallest = min((case for case, _ in found if case.op == op), key=lambda case: case.bytes("bf16"))
        measure.draw(smallest, torch.float32, torch.device("cpu"), 1)


class Clock:
    """A GPU on which calls take as long as their functions say."""

    device, name, l2_bytes = torch.device("cpu"), "a clock", 1 << 20

    def synchronize(self):
        pass

    def times(self, call, indices, head_start):
        return [call(index) or 1.0 for index in indices]

    def capture(self, call, indices):
        indices = list(indices)
        return lambda _: len(indices) * call.milliseconds


def test_a_case_beside_eager(monkeypatch):
    import measure

    def timed(milliseconds, function):
        def call(index):
            return None

        call.milliseconds, call.function = milliseconds, function
        return call

    monkeypatch.setattr(measure, "prepare", lambda call, sets, op: call)
    monkeypatch.setattr(measure, "outcome", lambda call, inputs, op: (call.function(*inputs.arguments),))
    case, silu = Case("silu", (3, 7)), torch.nn.functional.silu
    eager, launched = timed(0.2, silu), itertools.count().__next__
    line = beside_eager.time_case(case, "fp32", {EAGER: eager, OURS: timed(0.1, silu)}, Clock(), 3, launched)
    times = {"eager_ms": 0.2, "ours_ms": 0.1}
    assert line == {"op": "silu", "shape": [3, 7], "dtype": "fp32", **times, "bit_equal": True, "kernel": True}
    nothing = beside_eager.time_case(case, "fp32", {EAGER: eager, OURS: timed(0.1, silu)}, Clock(), 3, lambda: 7)
    assert nothing == {**line, "kernel": False}
    other = beside_eager.time_case(case, "fp32", {EAGER: eager, OURS: timed(0.3, torch.sigmoid)}, Clock(), 3, launched)
    assert other["bit_equal"] is False and other["ours_ms"] == 0.3

    def fails(x):
        raise RuntimeError("no such row")

    failed = beside_eager.time_case(case, "fp32", {EAGER: eager, OURS: timed(0.3, fails)}, Clock(), 3, launched)
    assert failed["error"] == "lossless-kernels: RuntimeError: no such row" and "ours_ms" not in failed
    assert beside_eager.wrong([line, other, failed]) == [
        "silu 3x7 fp32: not bit-equal with eager",
        "silu 3x7 fp32: lossless-kernels: RuntimeError: no such row",
    ]


def test_times_of_a_case_without_a_kernel_are_refused():
    import peers as suite

    results = [result("rms_norm", (4, 16384), peer, 1.0, bit_equal=True) for peer in (EAGER, OURS)]
    assert suite.wrong(results) == []
    suite.refuse_eagers_times(results)
    assert suite.wrong(results) == ["rms_norm 4x16384: no kernel ran: these are the times of eager's function"]


def test_launches_are_counted(kernel, module, nothing_known, proof_off):
    import measure

    enqueue = module("launch").Launch._enqueue
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with measure.counted_launches(kernel) as launches, torch.no_grad():
        kernel.rms_norm(torch.ones(2, 40, device=device), torch.ones(40, device=device), 1e-6)
        assert launches() == 0
        kernel.rms_norm(torch.ones(2, 64, device=device), torch.ones(64, device=device), 1e-6)
        assert launches() > 0
    assert module("launch").Launch._enqueue is enqueue


def test_tables_of_an_earlier_run(tmp_path, capsys):
    recorded = ROOT / "docs/pictures/beside_eager.json"
    assert beside_eager.main(["--from-json", str(recorded)]) == 0
    lines = json.loads(recorded.read_text(encoding="utf-8"))["cases"]
    ran = [line for line in lines if line["kernel"]]
    slower = [line for line in ran if line["ours_ms"] > beside_eager.SPREAD * line["eager_ms"]]
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{len(lines)} cases, {len(lines)} with eager's bits, {len(slower)} slower than eager" in printed
    assert f"{len(lines) - len(ran)} in which no kernel runs" in printed
    assert all(beside_eager.text_of(line) in printed for line in slower)
    kept = tmp_path / "folder" / "kept.json"
    run = {"environment": {"gpu": "a clock"}, "cases": [{**lines[0], "bit_equal": False}, {**lines[1]}]}
    beside_eager.save(run, kept)
    assert json.loads(kept.read_text(encoding="utf-8")) == run
    assert beside_eager.main(["--from-json", str(kept)]) == 1
    assert "not bit-equal with eager" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "No such file"),
        ("{}", "expected JSON written by beside_eager.py"),
        ('{"environment": {"gpu": ""}, "cases": [{"op": "silu", "shape": [1, 2], "dtype": "bf16"}]}', "expected JSON"),
    ],
)
def test_a_file_of_another_kind(tmp_path, capsys, text, message):
    path = tmp_path / "times.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert beside_eager.main(["--from-json", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_beside_eager_needs_a_gpu(capsys):
    assert beside_eager.main(["--ops", "silu"]) == 2
    assert "expected a GPU, torch finds none" in capsys.readouterr().err


def test_an_op_without_shapes_of_its_own_needs_some(capsys):
    import peers as suite

    with pytest.raises(SystemExit):
        suite.parse(["--ops", "gelu"])
    assert "gelu has no shapes of its own: expected --cases" in capsys.readouterr().err
    assert suite.parse(["--ops", "gelu", "--cases", "2x64"]).cases == [Case("gelu", (2, 64))]
    assert {case.op for case in suite.parse([]).cases} == {case.op for case in cases.CASES}


# models.py


def test_models_on_a_cpu(build, tmp_path):
    """Each part is told and kept as soon as it ended; bits are compared in the order that the command names."""
    path = tmp_path / "models.json"
    command = [sys.executable, BENCHMARKS / "models.py", "--device", "cpu", "--build", build, "--json", path]
    command += ["--model", "tiny", "--rounds", "1", "--tokens", "1", "8", "--new-tokens", "3", "--training-tokens", "9"]
    command += ["--work", "training", "prefill", "generate", "--cache", "growing", "static, decoding_graph"]
    clean = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "LOSSLESS_PROOF")}
    kept, told = [], []
    with subprocess.Popen([*map(str, command)], cwd=ROOT, env=clean, stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout:
            if found := re.match(r"\d\d:\d\d:\d\d (\w+), (.*): eager", line):
                told.append(found.groups())
                kept.append(path.read_text().count('"work"'))
    assert running.returncode == 0
    parts = [("training", "9 tokens")] * 2 + [("prefill", "1 tokens"), ("prefill", "8 tokens")]
    parts += [("generate", "growing"), ("generate", "static, decoding_graph")]
    rows = json.loads(path.read_text())["results"]
    assert [(each["work"], each["size"]) for each in rows] == [part for part in parts for _ in range(2)]
    assert [each["layers"] for each in rows] == ["eager", "ours, eager's loss", *["eager", "ours"] * 5]
    assert all(each["bits_equal"] for each in rows)
    assert told == parts and kept[0] < len(rows)


def test_models_with_other_bits(monkeypatch, capsys):
    import models

    rows = [models.row("prefill", "8 tokens", name, {"eager": 2.0, "ours": 1.0}, False) for name in ("eager", "ours")]
    monkeypatch.setattr(models, "run", lambda options, console: rows)
    assert models.main([]) == 1
    assert capsys.readouterr().err == "models: bits differ from eager's: prefill, 8 tokens, ours\n"
