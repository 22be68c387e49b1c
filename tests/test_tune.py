"""`scripts/tune.py`: what it would measure, and a whole run with the clocks of a CPU, in Triton's interpreter."""

import dataclasses
import functools
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import plan_files
import pytest
import torch
import tune
import tuned_ops
from conftest import ROOT
from places import python_module

TUNE = ROOT / "scripts/tune.py"


def every_point(**options):
    given = {"ops": list(tune.TUNED), "hidden_sizes": tune.HIDDEN_SIZES, "rows": tune.ROWS, "dtypes": ["bf16"]}
    return list(tune.points(**{**given, **options}))


def test_points_divide_the_rows():
    found = every_point(ops=["rms_norm"], hidden_sizes=(64, 4096, 32768))
    for hidden_size in (64, 4096, 32768):
        ranges = [(p.least_rows, p.most_rows, p.case.rows) for p in found if p.case.hidden_size == hidden_size]
        assert [least for least, _, _ in ranges] == [1, 2, 16, 32, 64, 512, 2048, 8192]
        assert [most for _, most, _ in ranges] == [1, 15, 31, 63, 511, 2047, 8191, None]
        assert all(least <= rows <= (most or rows) for least, most, rows in ranges)
        assert hidden_size * ranges[-1][-1] <= tuned_ops.MOST_ELEMENTS
    decode = every_point(ops=["rms_norm"], hidden_sizes=[64], rows=[(1, 1), (2, 4)], most_rows=15)
    assert [(p.least_rows, p.most_rows, p.case.rows) for p in decode] == [(1, 1, 1), (2, 15, 4)]
    backward = every_point(ops=["rms_norm_backward"])
    assert {point.least_rows for point in backward} == {512, 2048, 8192}


def default_of(point):
    if "rms_norm_backward" in point.case.op:
        return {"fused": point.case.hidden_size <= 8192, "rows_per_program": 1, "num_warps": 4}
    return {}


def test_candidates_are_valid_plans(kernel):
    allowed, number = plan_files.allowed_values(kernel), 0
    for point in every_point():
        for stage in point.tuned.candidates(point, default_of(point), (4, 264)):
            number += len(stage)
            for changes in stage:
                for name, value in changes.items():
                    assert value in allowed[point.case.op][name], (point, name, value)
                if set(changes) == set(allowed[point.case.op]):
                    entry = {**dict(zip(plan_files._ENTRY, point.kind)), "plan": changes, "measured": None}
                    plan_files.checked_entry(str(point), entry, 9, allowed)
    assert 800 < number < 5500, "a default run is to be quick"


def test_plans_that_leave_many_sums_are_for_many_rows(kernel):
    """Of 66 blocks of 4 threads: 4.1 MiB of sums with one row a program, 2.1 MiB with the default's two."""
    default, threads = {"fused": True, "rows_per_program": 2}, (4, 264)
    rows = [(512, 4096), (8192, 16384), (32768, 32768)]
    for point in every_point(ops=["rms_norm_backward"], hidden_sizes=[4096], rows=rows):
        first, *_ = point.tuned.candidates(point, default, threads)
        least = min(fields["rows_per_program"] for fields in first if fields["fused"])
        assert least == (1 if point.least_rows == 32768 else 2)
    # Of 8 rows a program in one block the default, which is not fused, has 16.
    (point,) = every_point(ops=["rms_norm_backward"], hidden_sizes=[64], rows=[(512, 4096)])
    first, *_ = point.tuned.candidates(point, {"fused": False, "rows_per_program": 16}, (8, 8))
    assert {fields["rows_per_program"] for fields in first if fields["fused"]} == {8}


def test_only_long_rows_are_streamed(kernel):
    for point in every_point(ops=["rms_norm"], hidden_sizes=[64, 4096, 8192, 32768], rows=[(512, 4096)]):
        (first,) = point.tuned.candidates(point, {}, None)
        assert {fields["streamed"] for fields in first} == {False} | (
            {True} if point.case.hidden_size >= 8192 else set()
        )


def test_rows_are_loaded_by_lane_if_they_are_few_or_not_too_long(kernel):
    sizes, rows = [128, 1024, 8192, 16384], [(1, 4), (512, 512), (2048, 4096), (8192, 8192)]
    for point in every_point(ops=["rms_norm", "add_rms_norm"], hidden_sizes=sizes, rows=rows):
        (first,) = point.tuned.candidates(point, {}, None)
        few, hidden_size = point.least_rows == 1, point.case.hidden_size
        many = point.case.op == "rms_norm" and point.least_rows in (512, 2048) and hidden_size in (1024, 8192)
        assert {fields["by_lane"] for fields in first} == {False, hidden_size > 128 and (few or many)}, str(point)


def test_programs_share_rows_as_long_as_there_are_few(kernel):
    for point in every_point(ops=["rms_norm", "add_rms_norm"], hidden_sizes=[128, 4096]):
        (first,) = point.tuned.candidates(point, {}, None)
        most = max(fields["programs_per_row"] for fields in first)
        expected = {1: 16, 4: 8, 16: 4, 32: 2}.get(point.case.rows, 1) if point.case.hidden_size == 4096 else 1
        assert most == expected, str(point)


def test_only_many_rows_are_prefetched_and_where_a_gpu_can(kernel, monkeypatch):
    kernels = tune.Kernels(kernel)
    few, many = every_point(ops=["rms_norm"], hidden_sizes=[4096], rows=[(16, 16), (512, 4096)])
    for capability, point, expected in (
        (9, few, {False}),
        (9, many, {False, True}),
        (8, many, {False}),
        (None, many, {False}),
    ):
        monkeypatch.setattr(kernels.plans, "gpu", lambda device, at=capability: kernels.plans.Gpu(at, 0))
        (first,) = kernels.candidates(point, torch.device("cpu"))
        assert {fields["prefetch"] for fields in first} == expected
        assert all(fields["rows_per_program"] <= tuned_ops.MOST_PREFETCHED for fields in first if fields["prefetch"])


def test_a_plan_that_is_written_is_one_that_the_package_reads(kernel, tmp_path):
    (point,) = every_point(ops=["rms_norm"], hidden_sizes=[128], rows=[(16, 64)])
    default = dataclasses.asdict(python_module(kernel, "rms_norm_plan").Plan(1, 4))
    best = {**default, "rows_per_program": 2, "num_warps": 8}
    measured = tune.Measured(point, default, best, default_ms=0.2, best_ms=0.1)
    found = dict.fromkeys(("gpu", "driver", "torch", "triton", "date", "command"), "text")
    for count in (0, 1):
        tune.write(tmp_path / "new/plans.json", 9, found, [measured.entry()] * count)
        capability, how, entries = plan_files.read(tmp_path / "new/plans.json", plan_files.allowed_values(kernel))
        assert (capability, how, len(entries)) == (9, found, count)
    assert entries[0].plan == best and entries[0].measured == {"shape": [65536, 128], "ms": 0.1, "default_ms": 0.2}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["plans.json"]


def test_an_update_keeps_what_was_not_measured(kernel, tmp_path):
    kernels, path = tune.Kernels(kernel), tmp_path / "plans.json"
    plan = dataclasses.asdict(python_module(kernel, "rms_norm_plan").Plan(1, 4))
    results = [
        tune.Measured(point, {}, {**plan, "num_warps": warps}, default_ms=0.2, best_ms=0.1)
        for warps, point in zip(
            (1, 2, 8), every_point(ops=["rms_norm"], hidden_sizes=[128], rows=[(16, 64), (512, 512)])
        )
    ]
    first, second = (result.entry() for result in results)
    found = dict.fromkeys(("gpu", "driver", "torch", "triton", "date", "command"), "text")
    assert tune.earlier(kernels, path, 9, found) is None, "there is no file yet"
    tune.write(path, 9, found, [first, second])
    before = tune.earlier(kernels, path, 9, found)
    again = {**second, "plan": {**plan, "num_warps": 16}}
    changed, entries = tune.updated(before, [results[1].point], {**found, "command": "more"}, [again])
    assert entries == [first, again] and changed == {**found, "command": "text; more"}
    # One whose default is the fastest now has no entry any more, nor one for some of the rows that were measured.
    assert tune.updated(before, [results[1].point], found, [])[1] == [first]
    (wide,) = every_point(ops=["rms_norm"], hidden_sizes=[128], rows=[(20, 600)])
    assert tune.updated(before, [wide], found, [])[1] == []
    with pytest.raises(tune.BenchError, match="expected compute capability 9, as in the file, found 8"):
        tune.earlier(kernels, path, 8, found)
    with pytest.raises(tune.BenchError, match="expected torch text, as in the file, found 2.0"):
        tune.earlier(kernels, path, 9, {**found, "torch": "2.0"})
    path.write_text("{}")
    with pytest.raises(tune.BenchError, match="--update: plans.json, compute_capability"):
        tune.earlier(kernels, path, 9, found)


class Cpu:
    name, device, l2_bytes = "CPU", torch.device("cpu"), 1 << 8

    def __init__(self, seconds):
        self.seconds = seconds

    def synchronize(self):
        pass

    def release(self):
        pass

    def times(self, call, indices, head_start):
        """Those of a clock that knows what it is asked to measure."""
        return [self.seconds(call, index) for index in indices]

    def capture(self, call, indices):
        return lambda _: [call(index) for index in indices]


def few(make, *given):
    """Of each stage's candidates the first, and the first of one warp and of two."""
    for stage in make(*given):
        warps = [fields.get("num_warps", fields.get("sum_warps")) for fields in stage]
        yield stage[:1] + [stage[warps.index(count)] for count in (1, 2) if count in warps]


@pytest.mark.parametrize(
    "op, of_16_bits, of_fp32",
    [
        ("softmax", {4096, 5120, 8192, 16384, 32768}, {4096, 5120, 8192, 16384, 32768}),
        ("softmax_backward", {2048, 4096, 5120, 8192, 16384, 32768}, {2048, 4096, 5120, 8192, 16384, 32768}),
        ("masked_softmax", {4096, 5120, 8192, 16384, 32768}, {4096, 5120, 8192, 16384, 32768}),
        ("masked_softmax_backward", {2048, 4096, 5120, 8192, 16384, 32768}, {2048, 4096, 5120, 8192, 16384, 32768}),
    ],
)
def test_softmax_is_tuned_where_a_program_keeps_a_row(kernel, op, of_16_bits, of_fp32):
    kernels = tune.Kernels(kernel)
    for dtype, expected in (("bf16", of_16_bits), ("fp32", of_fp32)):
        found = [point for point in every_point(ops=[op], dtypes=[dtype]) if point.tuned.covers(kernels, point)]
        assert {point.case.hidden_size for point in found} == expected
        assert all(point.tuned.candidates(point, {}, None)[0] for point in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter takes the CPU's tensors")
@pytest.mark.parametrize("op", ["softmax", "softmax_backward", "masked_softmax", "masked_softmax_backward"])
def test_candidates_of_softmax_return_the_defaults_bits(kernel, monkeypatch, op):
    import measure

    kernels = tune.Kernels(kernel)
    monkeypatch.setattr(tuned_ops, "HEADS", 4)
    monkeypatch.setattr(tuned_ops, "SOFTMAX_ELEMENTS", 3 * 4 * 4096)
    launched = []
    launcher = python_module(kernel, "launch").Launcher
    through_triton = launcher.through_triton
    monkeypatch.setattr(
        launcher,
        "through_triton",
        lambda self, *given: (launched.append(self.num_warps), through_triton(self, *given))[1],
    )
    (point,) = every_point(ops=[op], hidden_sizes=[4096], dtypes=["fp32"])
    assert (point.case.rows, point.kind) == (12, (op, 4096, 4, 1, None))
    sets = [point.tuned.given(kernels, each) for each in measure.draw(point.case, torch.float32, "cpu", 2)]
    default = kernels.default(point, torch.device("cpu"))
    expected = [kernels.call(point, default, sets)(index) for index in range(2)]
    (candidates,) = kernels.candidates(point, torch.device("cpu"))
    assert default in candidates and len(candidates) == 4
    for fields in candidates:
        launched.clear()
        call = kernels.call(point, fields, sets)
        assert all(measure.same_bits(call(index), expected[index]) for index in range(2))
        assert launched == [fields["num_warps"]] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter takes the CPU's tensors")
def test_a_run_by_the_clocks_of_a_cpu(kernel, build, monkeypatch, tmp_path):
    """A launch is as long as its warps are many, and eager's bits are those of the default plan."""
    import measure
    from rich.console import Console

    launched = []
    launch = python_module(kernel, "launch")
    through_triton = launch.Launcher.through_triton

    def record(self, *arguments):
        if not launch.is_collecting():
            launched.append(self.num_warps)
        return through_triton(self, *arguments)

    def seconds(call, index):
        launched.clear()
        call(index)
        return 1.0 * sum(launched) / len(launched)

    monkeypatch.setattr(launch.Launcher, "through_triton", record)
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    monkeypatch.setattr(tune, "load_kernel", lambda build: kernel)
    monkeypatch.setattr(tuned_ops, "ACTIVATION_SHAPE", (4, 1024))
    monkeypatch.setattr(tuned_ops, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(tune, "_FINALISTS", 1)
    monkeypatch.setattr(tune, "_LOOK_ROUNDS", 1)
    for tuned in tune.TUNED.values():
        monkeypatch.setattr(tuned, "candidates", functools.partial(few, tuned.candidates))
    monkeypatch.setattr(measure, "_TURN_MS", 1.0)

    def eager(self, point, inputs):
        call = self.call(point, self.default(point, Cpu.device), [point.tuned.given(self, inputs)])
        return tuple(point.tuned.results(call(0)))

    monkeypatch.setattr(tune.Kernels, "eager", eager)
    same_bits = measure.same_bits
    # Two warps have other bits in the forward pass.
    monkeypatch.setattr(
        measure,
        "same_bits",
        lambda found, expected: (len(found), launched[-1]) != (1, 2) and same_bits(found, expected),
    )
    output = tmp_path / "plans.json"
    options = tune.parse(
        ["--hidden-sizes", "128", "--rows", "4", "--dtypes", "fp16", "--output", str(output), "--milliseconds", "1"]
    )
    results = tune.run(options, Cpu(seconds), 9, Console(stderr=True, width=200))
    assert [str(result.point.case) for result in results] == [
        "rms_norm 4x128",
        "add_rms_norm 4x128",
        "rms_norm_backward 4x128",
        "add_rms_norm_backward 4x128",
        "silu 4x1024",
        "silu_backward 4x1024",
    ]
    assert not [result.error for result in results if result.error]
    forward, of_sum, backward, added, *activations = results
    assert forward.discarded and all("num_warps 2" in plan for plan in forward.discarded)
    assert forward.best == forward.default == of_sum.best, "it has one warp already"
    for result in activations:
        assert result.best["num_warps"] == 1 < result.default["num_warps"] and result.best_ms < result.default_ms
    assert backward.best["sum_warps"] == added.best["sum_warps"] == 4
    _, _, entries = plan_files.read(output, plan_files.allowed_values(kernel))
    assert {entry.op for entry in entries} >= {"silu", "silu_backward"} and "rms_norm" not in {e.op for e in entries}
    with open(tmp_path / "table", "w") as table:
        assert tune.tell(options, results, Console(file=table, width=200), "a CPU") == 0
    told = (tmp_path / "table").read_text()
    assert f"send {output}: GPU, driver, torch, Triton, date, command and every time" in told


def test_the_tuner_says_what_to_send(tmp_path):
    """A pull request of the first file for a generation, an issue beside another GPU's file."""
    path = tmp_path / "plans.json"
    for capability, gpu, expected in (
        (8, "NVIDIA A100", "Or open a pull request that adds it to torch-ext/lossless_kernels/plans/"),
        (9, "NVIDIA H100", "No pull request yet: hopper.json (NVIDIA H200) serves this generation"),
        (9, "NVIDIA H200", "Or open a pull request"),
    ):
        path.write_text(json.dumps({"compute_capability": capability}))
        first, template, last = tune.what_to_send(path, gpu)
        assert str(path) in first and expected in last, (capability, gpu)
        (named,) = re.findall("template '(.*?)'", template)
        templates = [each.read_text() for each in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")]
        assert any(text.startswith(f"name: {named}\n") for text in templates)


def test_other_processes_compile_what_is_asked_for(kernel, module, build, monkeypatch, tmp_path):
    """For sm_90 and without a GPU; each kernel becomes files in Triton's cache."""
    from triton.runtime import driver

    launch = module("launch")
    target = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: target), raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    points = every_point(ops=["rms_norm", "silu"], hidden_sizes=[128], rows=[(1, 4)])
    found = {}
    for point in points:
        found.update(tune.compilations(tune.Kernels(kernel), point, Cpu.device, torch.bfloat16))
    some = [compilation for compilation in found if compilation.num_warps == 4]
    assert len(found) > len(some) >= 2 and all(isinstance(each, launch.Compilation) for each in some)
    advanced = []
    tune.compile_all(some, build, 2, lambda: advanced.append(1))
    assert len(advanced) == len(some) == len(list(tmp_path.glob("*/*.cubin")))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--rows", "0"], "argument --rows: expected LEAST or LEAST:MEASURED such as 512:4096, found '0'"),
        (["--rows", "16:8"], "found '16:8'"),
        (
            ["--rows", "16:900", "512"],
            "--rows: expected measured row counts below the next range, found 16:900 512:512",
        ),
        (["--rows", "16", "16"], "--rows: expected ranges with different first row counts, found 16:16 16:16"),
        (["--hidden-sizes", "66"], "expected a multiple of 4 from 64 to 32768, found '66'"),
        (["--margin", "2"], "--margin: expected a share of at least 0 and below 1, such as 0.01, found 2.0"),
    ],
)
def test_wrong_arguments_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        tune.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")
def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, TUNE], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "tune: error: expected an NVIDIA GPU, torch finds none\n"


@pytest.mark.alone
@pytest.mark.gpu
def test_a_quick_run_on_a_gpu(build, tmp_path):
    output = tmp_path / "plans.json"
    arguments = ["--hidden-sizes", "128", "4096", "--rows", "512:4096", "--milliseconds", "10", "--output", output]
    done = subprocess.run([sys.executable, TUNE, *map(str, arguments)], capture_output=True, text=True)
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    assert json.loads(output.read_text())["compute_capability"] == torch.cuda.get_device_capability()[0]
    assert "its bits differ from eager's" not in done.stderr
