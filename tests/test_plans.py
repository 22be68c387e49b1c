"""Launch plans as data: the files that ship are valid, wrong ones are named, and a plan is chosen by what it is for."""

import dataclasses
import functools
import itertools
import json
from typing import NamedTuple

import plan_files
import pytest
import torch
from bits import assert_bits_equal
from conftest import ROOT
from places import forget_calls

FILES = sorted((ROOT / "torch-ext/lossless_kernels/plans").glob("*.json"))


@pytest.fixture
def plans(module):
    return module("plans")


@pytest.fixture
def read(kernel):
    """The checker of `scripts/plan_files.py`, with what this kernel declares."""
    return functools.partial(plan_files.read, allowed=plan_files.allowed_values(kernel))


PLAN = {
    "rows_per_program": 8,
    "num_warps": 2,
    "streamed": False,
    "prefetch": False,
    "by_lane": False,
    "programs_per_row": 1,
}
ENTRY = {
    "op": "rms_norm",
    "hidden_size": 128,
    "element_size": 2,
    "least_rows": 16,
    "most_rows": 99,
    "plan": PLAN,
    "measured": {"shape": [64, 128], "ms": 0.1, "default_ms": 0.2},
}
FOUND = {"gpu": "a", "driver": "b", "torch": "c", "triton": "d", "date": "e", "command": "f"}


@pytest.fixture
def write(plans, tmp_path, monkeypatch):
    """write(*entries, **file): a folder with these plans alone, in use until the test ends. Returns the file."""
    monkeypatch.setattr(plans, "FOLDER", tmp_path)

    def write(*entries, **changes):
        path = tmp_path / "plans.json"
        path.write_text(json.dumps({"compute_capability": 9, "found": FOUND, "plans": entries, **changes}))
        plans._entries.cache_clear()
        return path

    yield write
    plans._entries.cache_clear()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_that_ship_are_valid_and_say_how_they_were_found(kernel, plans, read, path):
    capability, found, entries = read(path)
    assert all(found.values()) and entries
    classes, gpu = plan_files.plan_classes(kernel), plans.Gpu(capability, 227 << 10)
    for entry in entries:
        at = entry.op, entry.hidden_size, entry.least_rows, entry.element_size
        assert plans.tuned(classes[entry.op], gpu, *at) == classes[entry.op](**entry.plan)


def test_there_is_a_file_for_hopper_and_no_other_gpu_takes_it(plans):
    assert FILES
    for capability, expected in ((9, True), (8, False), (10, False), (None, False)):
        gpu = plans.Gpu(capability, 227 << 10)
        assert bool(plans.plan_boundaries(gpu, "rms_norm", 4096, 2)) is expected


def test_a_plan_is_chosen_by_what_it_is_for(module, plans, write):
    other = {**PLAN, "rows_per_program": 4, "num_warps": 1}
    write(ENTRY, {**ENTRY, "least_rows": 100, "most_rows": None, "plan": other})
    rms_norm, hopper = module("rms_norm_plan"), plans.Gpu(9, 227 << 10)
    default = rms_norm.default_plan(16, 128)
    first, second = rms_norm.Plan(8, 2), rms_norm.Plan(4, 1)
    assert default not in (first, second)
    for rows, hidden_size, element_size, gpu, expected in (
        (15, 128, 2, hopper, rms_norm.default_plan(15, 128)),
        (16, 128, 2, hopper, first),
        (99, 128, 2, hopper, first),
        (100, 128, 2, hopper, second),
        (1 << 40, 128, 2, hopper, second),
        (16, 128, 4, hopper, default),
        (16, 256, 2, hopper, rms_norm.default_plan(16, 256)),
        (16, 128, 2, plans.Gpu(8, 227 << 10), default),
        (16, 128, 2, plans.UNKNOWN, default),
    ):
        assert rms_norm.launch_plan(rows, hidden_size, element_size, gpu) == expected
    assert rms_norm.rows_of_every_plan(128, 2, hopper) == (1, 2, 4, 8, 16, 100)
    assert rms_norm.rows_of_every_plan(128, 2, plans.UNKNOWN) == (1, 2, 4, 8, 16)


@pytest.mark.parametrize("capability", [None, 7, 8, 9, 10, 12])
def test_many_rows_are_prefetched_by_default_from_compute_capability_9_on(
    module, plans, tmp_path, monkeypatch, capability
):
    """Where it paid on Hopper, in hidden sizes that no file covers too; the proofs cover the plan's first row count."""
    monkeypatch.setattr(plans, "FOLDER", tmp_path)
    plans._entries.cache_clear()
    rms_norm, gpu = module("rms_norm_plan"), plans.Gpu(capability, 227 << 10)
    for hidden_size, element_size, added in itertools.product(
        (128, 1024, 3584, 5120, 7168, 16384), (2, 4), (False, True)
    ):
        paid = element_size == 2 and 1024 <= hidden_size <= (5120 if added else 8192)
        expected = capability is not None and capability >= 9 and paid
        many, few = (rms_norm.launch_plan(rows, hidden_size, element_size, gpu, added) for rows in (8192, 8191))
        assert (many.prefetch, few.prefetch) == (expected, False), (hidden_size, element_size, added)
        assert dataclasses.replace(many, prefetch=False) == few
        if expected:
            assert rms_norm.rows_of_every_plan(hidden_size, element_size, gpu) == (1, 2, 4, 8, 16, 8192)
            assert many.ahead(hidden_size * element_size) > 0
    plans._entries.cache_clear()


def test_a_residuals_sum_has_plans_of_its_own(module, plans, write):
    write(ENTRY, {**ENTRY, "op": "add_rms_norm", "least_rows": 50, "plan": {**PLAN, "num_warps": 8}})
    rms_norm, hopper = module("rms_norm_plan"), plans.Gpu(9, 227 << 10)
    assert rms_norm.launch_plan(60, 128, 2, hopper) == rms_norm.Plan(8, 2)
    assert rms_norm.launch_plan(60, 128, 2, hopper, added=True) == rms_norm.Plan(8, 8)
    assert rms_norm.launch_plan(40, 128, 2, hopper, added=True) == rms_norm.default_plan(40, 128)
    assert {16, 50} <= set(rms_norm.rows_of_every_plan(128, 2, hopper))
    # A long row does not stay in L1 together with its residual.
    assert rms_norm.default_plan(16, 32768).streamed and not rms_norm.default_plan(16, 32768, added=True).streamed


FUSED = {
    "fused": True,
    "rows_per_program": 4,
    "num_warps": 2,
    "streamed": False,
    "stages": 4,
    "chain_columns": 32,
    "chain_stages": 2,
    "chain_warps": 8,
    "sum_columns": 16,
    "sum_log2_steps": 2,
    "sum_warps": 1,
}


def test_a_gpu_without_such_requests_prefetches_nothing(read, write):
    path = write({**ENTRY, "plan": {**PLAN, "prefetch": True}}, compute_capability=8)
    with pytest.raises(
        plan_files.PlanError, match="plan, prefetch: expected false below compute capability 9, found True"
    ):
        read(path)


def test_rows_are_loaded_by_lane_unless_they_are_streamed(read, write):
    by_lane = {**PLAN, "by_lane": True}
    for op in ("rms_norm", "add_rms_norm"):
        assert len(read(write({**ENTRY, "op": op, "plan": by_lane}))[2]) == 1
    with pytest.raises(
        plan_files.PlanError, match="plan, by_lane: expected false for rows that are streamed, found True"
    ):
        read(write({**ENTRY, "plan": {**by_lane, "streamed": True}}))


@pytest.mark.parametrize("wrong", [{"by_lane": False}, {"rows_per_program": 2}, {"prefetch": True}], ids=str)
def test_programs_share_single_rows_by_lane(read, write, wrong):
    shared = {**PLAN, "rows_per_program": 1, "by_lane": True, "programs_per_row": 4}
    assert len(read(write({**ENTRY, "plan": shared}))[2]) == 1
    with pytest.raises(
        plan_files.PlanError, match="plan, programs_per_row: expected 1 unless by_lane is true, .* found 4"
    ):
        read(write({**ENTRY, "plan": {**shared, **wrong}}))


def test_rows_ahead_are_so_many_bytes(module):
    rms_norm = module("rms_norm_plan")
    for rows, bytes_per_row, ahead in ((1, 8 << 10, 512), (2, 8 << 10, 256), (1, 128 << 10, 32), (64, 256 << 10, 1)):
        assert rms_norm.Plan(rows, 8, prefetch=True).ahead(bytes_per_row) == ahead
        assert rms_norm.Plan(rows, 8).ahead(bytes_per_row) == 0


def test_a_fused_plan_that_does_not_fit_is_left_alone(module, plans, write):
    write({**ENTRY, "op": "rms_norm_backward", "most_rows": None, "plan": FUSED})
    backward, config, gpu = module("rms_norm_backward"), module("reduce_config"), plans.Gpu(9, 227 << 10)
    for rows, both, fits in ((16, True, False), (4096, True, True), (4096, False, False)):
        columns = config.column_reduction(rows, 128, 132, 2048) if both else None
        assert columns is None or (columns.height >= 4) is fits
        plan = backward.launch_plan(rows, 128, columns, 2, gpu)
        expected = backward.BackwardPlan(**FUSED) if fits else backward.default_plan(rows, 128, columns, 132)
        assert plan == expected


def test_a_residuals_gradient_has_plans_of_its_own(module, plans, write):
    write({**ENTRY, "op": "add_rms_norm_backward", "plan": FUSED, "most_rows": None})
    backward, config, gpu = module("rms_norm_backward"), module("reduce_config"), plans.Gpu(9, 227 << 10)
    columns = config.column_reduction(4096, 128, 132, 2048)
    for dx_mode, expected in (
        ("accumulate", backward.BackwardPlan(**FUSED)),
        ("single", backward.default_plan(4096, 128, columns, 132)),
        ("split", backward.default_plan(4096, 128, columns, 132)),
    ):
        assert backward.launch_plan(4096, 128, columns, 2, gpu, dx_mode) == expected


MEASURED = json.loads((ROOT / "tests/golden/backward_plans.json").read_text())["measured"]


def test_gradients_take_the_faster_of_two_ways(module):
    """As an H200 measured both (`benchmarks/backward_plans.py`): one kernel for both gradients, or two."""
    backward, config = module("rms_norm_backward"), module("reduce_config")
    slower = {}
    for element_size, added, hidden_size, rows, fused_ms, unfused_ms in MEASURED:
        columns = config.column_reduction(rows, hidden_size, 132, 2048)
        mode = "accumulate" if added else "single" if element_size == 2 else "split"
        plan = backward.default_plan(rows, hidden_size, columns, 132, element_size, mode)
        chosen, other = (fused_ms, unfused_ms) if plan.fused else (unfused_ms, fused_ms)
        if chosen > other:
            slower[element_size, added, hidden_size, rows] = chosen / other
    # At the edge of the rule, where both take nearly the same time.
    assert {*slower} == {(2, False, 2304, 4096), (2, True, 2304, 4096)} and max(slower.values()) < 1.08


class Device(NamedTuple):
    """A GPU by its data sheet: SMs, threads and registers of an SM, L2 in MB, bandwidth of its memory in GB/s."""

    multiprocessors: int
    threads: int
    registers: int
    l2: int
    bandwidth: int
    capability: int


# fmt: off
GPUS = {
    "T4": Device(40, 1024, 65536, 4, 320, 7), "A100": Device(108, 2048, 65536, 40, 2039, 8),
    "A10": Device(72, 1536, 65536, 6, 600, 8), "L4": Device(58, 1536, 65536, 48, 300, 8),
    "L40S": Device(142, 1536, 65536, 96, 864, 8), "RTX 3090": Device(82, 1536, 65536, 6, 936, 8),
    "RTX 4090": Device(128, 1536, 65536, 72, 1008, 8), "H100 PCIe": Device(114, 2048, 65536, 50, 2039, 9),
    "H100": Device(132, 2048, 65536, 50, 3350, 9), "H20": Device(78, 2048, 65536, 60, 4000, 9),
    "B200": Device(148, 2048, 65536, 126, 8000, 10), "RTX 5090": Device(170, 1536, 65536, 96, 1792, 12),
}
# fmt: on


@pytest.mark.parametrize("name", GPUS)
def test_a_fused_program_that_fills_an_sm_does_useful_work(module, name):
    """docs/log/other_gpus.md has the table of those below 0.62, with the reasons."""
    backward, config, gpu = module("rms_norm_backward"), module("reduce_config"), GPUS[name]
    kinds = set()
    for (element_size, mode), rows, hidden_size in itertools.product(
        ((2, "single"), (2, "accumulate"), (4, "split"), (4, "accumulate")),
        (2048, 4096, 8192, 16384, 32768),
        range(1024, 16385, 256),
    ):
        columns = config.column_reduction(rows, hidden_size, gpu.multiprocessors, gpu.threads)
        plan = backward.default_plan(rows, hidden_size, columns, gpu.multiprocessors, element_size, mode)
        if not plan.fused:
            continue
        programs = columns.blocks * columns.height // plan.rows_per_program
        order = config.row_reduction(rows, hidden_size)
        tile = order.columns << order.log2_steps
        filled = hidden_size / tile
        work = programs / (-(-programs // gpu.multiprocessors) * gpu.multiprocessors)
        work *= filled if element_size == 2 else min(2 * filled, 1)
        where = element_size, mode, rows, hidden_size
        # A thread takes at most 255 registers.
        in_an_sm = gpu.registers // (plan.num_warps * 32 * 255)
        assert in_an_sm >= 1, where
        kinds.add(in_an_sm)
        if in_an_sm == 1:
            assert work >= 0.6, where
        elif work < 0.6:
            # Several programs share an SM: one of them does not keep the others waiting.
            assert hidden_size <= 2048, where
    assert kinds == {1, 2, 4}


def test_what_is_prefetched_covers_the_latency_and_stays_in_the_l2(module):
    """A paper model: bytes under way, which must be bandwidth times latency, and the L2 that keeps them until they are read."""
    plan_file, plans = module("rms_norm_plan"), module("plans")
    latency, of_an_sm = 0.8e-6, 48 << 10  # Of a loaded memory; the least that a default plan's programs load at once.
    for name, gpu in GPUS.items():
        of_gpu = plans.Gpu(gpu.capability, 99 << 10, gpu.multiprocessors, gpu.threads)
        plan = plan_file.default_plan(8192, 4096, 2, False, of_gpu)
        assert plan.prefetch is (gpu.capability >= 9), name
        if plan.prefetch:
            ahead = plan.ahead(2 * 4096) * plan.rows_per_program * 2 * 4096
            assert ahead + of_an_sm * gpu.multiprocessors >= gpu.bandwidth * 1e9 * latency, name
            # An H200 evicts a part of 8 MB before it is read, from an L2 of 60 MB.
            assert ahead < gpu.l2 * 1e6 * 8 / 60, name


def test_no_more_rows_are_on_their_way_than_fit(module, plans):
    backward, order = module("rms_norm_backward"), module("reduce_config").row_reduction(4096, 4096)
    plan = backward.BackwardPlan(True, 2, 8, stages=4)
    # 32 KiB a stage, and some to exchange sums.
    for shared_memory, stages in ((227 << 10, 4), (99 << 10, 3), (64 << 10, 2), (48 << 10, 1), (0, 1)):
        gpu = plans.Gpu(9, shared_memory)
        assert backward._fitting(plan, order, [2, 2], gpu) == dataclasses.replace(plan, stages=stages)
        for other in (dataclasses.replace(plan, fused=False), dataclasses.replace(plan, streamed=True)):
            assert backward._fitting(other, order, [2, 2], gpu) == other


@pytest.mark.parametrize(
    "change, named",
    [
        ({"op": "rms_nrom"}, r"plans\[1\], op: expected one of .*rms_norm, .* found 'rms_nrom'"),
        (
            {"plan": {**PLAN, "rows_per_program": 3}},
            "plan, rows_per_program: expected one of 1, 2, .* found 3",
        ),
        ({"plan": {**PLAN, "rows_per_program": True}}, "plan, rows_per_program: .* found True"),
        (
            {"plan": {"rows_per_program": 1}},
            "plan: expected the keys rows_per_program, num_warps, streamed, prefetch, by_lane, programs_per_row, found",
        ),
        (
            {"plan": {**PLAN, "rows_per_program": 64, "num_warps": 1}, "hidden_size": 4096},
            "at most 512 elements a thread",
        ),
        (
            {"op": "rms_norm_backward", "plan": {**FUSED, "fused": False, "streamed": True}},
            "plan, streamed: expected false in a plan that is not fused, found True",
        ),
        (
            {"op": "rms_norm_backward", "plan": {**FUSED, "rows_per_program": 4, "streamed": True}},
            "plan, rows_per_program: expected 1 for streamed rows, found 4",
        ),
        (
            {
                "op": "rms_norm_backward",
                "hidden_size": 64,
                "plan": {**FUSED, "rows_per_program": 1, "streamed": True},
            },
            "hidden_size: expected at least 128 to stream, found 64",
        ),
        ({"plan": 1}, "plan: expected an object, found 1"),
        ({"hidden_size": None}, "hidden_size: expected a number, found None"),
        ({"op": "silu", "plan": {"block": 1024, "num_warps": 4}}, "hidden_size: expected null, found 128"),
        ({"element_size": 3}, "element_size: expected 2 or 4, found 3"),
        ({"least_rows": 0}, "least_rows: expected a number from 1 on, found 0"),
        ({"most_rows": 15}, "most_rows: expected null or a number from 100 on, found 15"),
        ({"measured": {"ms": 0}}, "measured: expected null, or shape, ms and default_ms"),
        ({"comment": ""}, "expected the keys op, .* found"),
        (
            {"least_rows": 99, "most_rows": None},
            r"plans\[1\]: expected rows of no other entry, found an overlap with plans\[0\]",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_entries_are_named_and_disturb_no_other(module, plans, read, write, change, named):
    path = write(ENTRY, {**ENTRY, "least_rows": 100, "most_rows": None, **change})
    with pytest.raises(plan_files.PlanError, match=named):
        read(path)
    plan_class = module("rms_norm_plan").Plan
    hopper = plans.Gpu(9, 227 << 10)
    assert plans.tuned(plan_class, hopper, "rms_norm", 128, 16, 2) == plan_class(**PLAN)


@pytest.mark.parametrize(
    "change",
    [
        {"plan": 1},
        {"plan": {**PLAN, "rows_per_program": "8"}},
        {"plan": {**PLAN, "rows_per_program": True}},
        {"plan": {**PLAN, "num_warps": 2.0}},
        {"plan": {**PLAN, "stages": 3}},
        {"plan": {"rows_per_program": 8, "num_warps": 2}},
        {"op": ["rms_norm"]},
        {"hidden_size": "128"},
        {"element_size": None},
        {"least_rows": "16"},
        {"least_rows": 0},
        {"least_rows": 100},
        {"most_rows": 15.5},
        "rms_norm",
        None,
    ],
    ids=str,
)
def test_what_is_malformed_counts_as_missing(module, plans, write, change):
    """An entry, and in any other file whatever it holds."""
    rms_norm, hopper = module("rms_norm_plan"), plans.Gpu(9, 227 << 10)
    write({**ENTRY, **change} if isinstance(change, dict) else change)
    assert rms_norm.launch_plan(16, 128, 2, hopper) == rms_norm.default_plan(16, 128)
    assert min(rms_norm.rows_of_every_plan(128, 2, hopper)) == 1
    path = write({**ENTRY, **change} if isinstance(change, dict) else change, ENTRY)
    for name, text in (
        ("list", json.dumps([change])),
        ("one", "9"),
        ("nothing", ""),
        ("bytes", b"\xff"),
        ("deep", "[" * 100_000),
        ("keys", "{}"),
        ("number", '{"compute_capability": 9, "plans": 9}'),
    ):
        path.with_name(f"{name}.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    path.with_name("folder.json").mkdir()
    assert rms_norm.launch_plan(16, 128, 2, hopper) == rms_norm.Plan(8, 2)


@pytest.mark.parametrize(
    "change, named",
    [
        (
            {"compute_capability": "9"},
            "compute_capability: expected the major number of a compute capability, found '9'",
        ),
        ({"found": {"gpu": "a"}}, "found: expected the texts gpu, .* found no driver, torch, triton, date, command"),
        ({"plans": {}}, "plans: expected a list, found {}"),
    ],
)
def test_wrong_files_are_named(read, write, change, named):
    with pytest.raises(plan_files.PlanError, match=named):
        read(write(ENTRY, **change))


def test_a_file_that_is_no_json_is_named_and_disturbs_no_call(module, plans, read, write):
    path = write(ENTRY)
    path.write_text('{"plans": [')
    plans._entries.cache_clear()
    hopper = plans.Gpu(9, 227 << 10)
    assert plans.tuned(module("rms_norm_plan").Plan, hopper, "rms_norm", 128, 16, 2) is None
    with pytest.raises(plan_files.PlanError, match=r"plans\.json: expected JSON, found"):
        read(path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter takes the CPU's tensors")
def test_tuned_plans_have_the_bits_of_the_default_ones(kernel, module, plans, write, monkeypatch, seed):
    """A GPU that plans are tuned for, in the interpreter."""
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(300, 128, generator=generator).half() for _ in range(2))
    weight = torch.randn(128, generator=generator).half()

    def results():
        forget_calls(module)
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = kernel.rms_norm(*inputs, 1e-5)
        activated = kernel.silu(inputs[0])
        gradients = torch.autograd.grad((out, activated), inputs, (dy, dy))
        return out.detach(), activated.detach(), *gradients

    write()
    expected = results()
    launchers = []
    through_triton = module("launch").Launcher.through_triton
    monkeypatch.setattr(
        module("launch").Launcher,
        "through_triton",
        lambda self, *arguments: (launchers.append(self), through_triton(self, *arguments))[1],
    )
    monkeypatch.setattr(plans, "gpu", lambda device: plans.Gpu(9, 227 << 10))
    everywhere = {**ENTRY, "least_rows": 1, "most_rows": None}
    for fused in (True, False):
        write(
            everywhere,
            {**everywhere, "op": "rms_norm_backward", "plan": {**FUSED, "fused": fused}},
            *(
                {**everywhere, "op": op, "hidden_size": None, "plan": {"block": 512, "num_warps": 8}}
                for op in ("silu", "silu_backward")
            ),
        )
        launchers.clear()
        for what, found, default in zip(("output", "silu", "dx", "dweight"), results(), expected):
            assert_bits_equal(found, default, f"{what}, fused {fused}")
        used = {
            (one.kernel.__name__, one.num_warps, one.constants.get("ROWS"), one.constants.get("BLOCK"))
            for one in launchers
        }
        assert {("rms_norm_forward", 2, 8, None), ("rms_norm_backward", 2, 4, None)} < used
        assert {("activation_forward", 8, None, 512), ("activation_backward", 8, None, 512)} < used
        assert ("rms_norm_sum_chains" in {one.kernel.__name__ for one in launchers}) is not fused


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter takes the CPU's tensors")
def test_softmax_has_tuned_warps_where_a_program_keeps_a_row(kernel, module, plans, write, monkeypatch, seed):
    """Each of the four ops has a plan of its own, for rows of one length. The keys of verdicts hold the plan."""
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    generator = torch.Generator().manual_seed(seed)
    scores, dy = (torch.randn(1, 2, 3, 4096, generator=generator) for _ in range(2))
    mask = torch.randn(1, 1, 3, 4096, generator=generator)
    launched = []
    through_triton = module("launch").Launcher.through_triton
    monkeypatch.setattr(
        module("launch").Launcher,
        "through_triton",
        lambda self, *given: (launched.append((self.kernel.__name__, self.num_warps)), through_triton(self, *given))[1],
    )

    keys, is_proved = [], module("proof").kernel_is_proved
    monkeypatch.setattr(
        module("proof"), "kernel_is_proved", lambda key, *given: keys.append(key) or is_proved(key, *given)
    )

    def results(size):
        forget_calls(module)
        x, masked = (scores[..., :size].contiguous().requires_grad_() for _ in range(2))
        outs = kernel.softmax(x), kernel.masked_softmax(masked, mask[..., :size].contiguous(), 0.5)
        given = dy[..., :size].contiguous()
        return [*(out.detach() for out in outs), *torch.autograd.grad(outs, (x, masked), (given, given))]

    monkeypatch.setattr(plans, "gpu", lambda device: plans.Gpu(9, 227 << 10))
    ops = ("softmax", "softmax_backward", "masked_softmax", "masked_softmax_backward")
    write()
    expected = {size: results(size) for size in (4096, 4092, 1000)}
    default = {*launched}
    entry = {**ENTRY, "hidden_size": 4096, "element_size": 4, "least_rows": 1, "most_rows": None}
    write(*({**entry, "op": op, "plan": {"num_warps": 1 << number}} for number, op in enumerate(ops)))
    used, warps_in_keys = {}, {}
    for size, before in expected.items():
        launched.clear()
        keys.clear()
        for found, one in zip(results(size), before, strict=True):
            assert_bits_equal(found, one)
        used[size] = {*launched}
        kinds = [getattr(kind, "rows", kind) for _, kind, _ in keys]
        warps_in_keys[size] = [kind.plan.num_warps for kind in kinds if kind.plan is not None]
    assert used[4096] == {
        ("softmax_forward_of_block", 1),
        ("softmax_backward_of_block", 2),
        ("masked_softmax_forward_of_block", 4),
        ("masked_softmax_backward_of_block", 8),
    }
    assert sorted({*warps_in_keys[4096]}) == [1, 2, 4, 8] and not warps_in_keys[4092] + warps_in_keys[1000]
    assert used[4092] | used[1000] <= default


@pytest.mark.parametrize("op", ["softmax", "masked_softmax_backward"])
def test_softmax_has_no_more_elements_a_thread_than_registers_hold(read, write, op):
    entry = {**ENTRY, "op": op, "hidden_size": 32768, "plan": {"num_warps": 1}}
    with pytest.raises(plan_files.PlanError, match="at most 512 elements a thread, found 1024"):
        read(write(entry))


@pytest.mark.parametrize("of_gradient", [False, True])
def test_a_proof_of_softmax_takes_the_same_rows_with_any_plan(module, of_gradient):
    softmax, masked = module("ops.softmax"), module("ops.masked_softmax")
    plan = softmax.SoftmaxPlan(4)
    kind = softmax.Kind.of(of_gradient, torch.bfloat16, torch.bfloat16, 4096, 4096)
    assert softmax._sizes(dataclasses.replace(kind, plan=plan)) == softmax._sizes(kind)
    of_mask = masked.Kind.of(of_gradient, torch.bfloat16, 4096, 4096, True, 0.5)
    planned = dataclasses.replace(of_mask, rows=dataclasses.replace(of_mask.rows, plan=plan))
    assert masked._sizes(planned) == masked._sizes(of_mask)
