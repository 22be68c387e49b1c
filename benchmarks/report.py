"""Tables, verdicts and plots of measured times. Needs neither torch nor a GPU."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from cases import (
    CPU,
    CPU_OPS,
    CPU_TITLES,
    EAGER,
    EVENTS,
    FASTEST,
    GRAPH,
    OPS,
    OURS,
    ROOFLINE,
    TARGETS,
    Case,
    Target,
    shape_text,
)


@dataclass
class Result:
    """One peer in one case. Times are milliseconds of one call.

    Attributes:
        samples: how many times the median is of.
        median_ms: by CUDA-event timing; for CPU_OPS, CPU time.
        quartiles_ms: lower and upper quartile of the same samples.
        device_ms: device time in a CUDA graph, median.
        gb_per_s: the case's bytes over `median_ms`.
        roofline_fraction: memcpy roofline over `median_ms`.
        device_roofline_fraction: memcpy roofline over `device_ms`.
        bit_equal: whether all outputs and gradients have eager's bits; None: not compared.
        error: why times are missing.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    peer: str
    samples: int = 0
    median_ms: Optional[float] = None
    quartiles_ms: Optional[tuple[float, float]] = None
    device_ms: Optional[float] = None
    device_quartiles_ms: Optional[tuple[float, float]] = None
    gb_per_s: Optional[float] = None
    roofline_fraction: Optional[float] = None
    device_roofline_fraction: Optional[float] = None
    bit_equal: Optional[bool] = None
    error: Optional[str] = None

    @property
    def case(self) -> Case:
        return Case(self.op, tuple(self.shape))

    def time(self, clock: str) -> Optional[float]:
        return self.device_ms if clock == GRAPH else self.median_ms

    def quartiles(self, clock: str) -> Optional[tuple[float, float]]:
        return self.device_quartiles_ms if clock == GRAPH else self.quartiles_ms


@dataclass
class Report:
    """One run of peers.py.

    Attributes:
        environment: GPU, driver, versions, date, command.
        copy_gb_per_s: bandwidth of a device-to-device copy in this run, median.
        missing: peer -> why it is not in the run.
        first_call: state of Triton's cache -> stage of a fresh process -> seconds.
        failures: what makes the run fail, such as results without eager's bits.
    """

    environment: dict
    dtype: str
    copy_gb_per_s: float
    copy_quartiles: tuple[float, float]
    l2_bytes: int
    missing: dict[str, str] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    first_call: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def cases(self) -> list[Case]:
        return list(dict.fromkeys(result.case for result in self.results))

    @property
    def peers(self) -> list[str]:
        """In the order of the run, lossless-kernels last."""
        return sorted(dict.fromkeys(result.peer for result in self.results), key=OURS.__eq__)

    def of(self, case: Case) -> dict[str, Result]:
        return {result.peer: result for result in self.results if result.case == case}

    def roofline_ms(self, case: Case) -> float:
        """The time in which the copy of this run moves the case's bytes."""
        return case.bytes(self.dtype) / self.copy_gb_per_s / 1e6

    def save(self, path: Path) -> None:
        written = dataclasses.asdict(self)
        written["verdicts"] = [dataclasses.asdict(verdict) for verdict in verdicts(self)]
        path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Report":
        written = json.loads(path.read_text(encoding="utf-8"))
        written.pop("verdicts", None)
        results = [Result(**{**result, "shape": tuple(result["shape"])}) for result in written.pop("results")]
        return cls(results=results, **written)


def quartiles(values) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile, by linear interpolation."""
    ordered = sorted(values)

    def at(part):
        place = part * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.25), at(0.5), at(0.75)


# Verdicts


@dataclass(frozen=True)
class Verdict:
    case: str
    target: str
    clock: str
    measured_ms: float
    limit_ms: Optional[float]
    met: Optional[bool]
    note: str = ""

    def text(self, scale: float = 1.0) -> str:
        """Such as `not met: 0.1349 > 0.1306 (1.03 x roofline)`."""
        if self.limit_ms is None:
            return f"no verdict: {self.target} {self.note}"
        word, sign = ("met", "<=") if self.met else ("not met", ">")
        note = f", {self.note}" if self.note else ""
        return (
            f"{word}: {number(self.measured_ms * scale)} {sign} {number(self.limit_ms * scale)} ({self.target}{note})"
        )


def judge(report: Report, case: Case, target: Target, clock: str) -> Optional[Verdict]:
    """None if the target is not for this case and clock, or lossless-kernels was not measured."""
    if target.clock not in (None, clock) or (target.beyond_l2 and case.bytes(report.dtype) <= report.l2_bytes):
        return None
    times = {peer: result.time(clock) for peer, result in report.of(case).items()}
    times = {peer: time for peer, time in times.items() if time is not None}
    ours = times.pop(OURS, None)
    if ours is None:
        return None
    of, note = None, ""
    if target.of == ROOFLINE:
        of = report.roofline_ms(case)
    elif target.of == FASTEST and times:
        note = min(times, key=times.get)
        of = times[note]
    elif target.of in times:
        of = times[target.of]
    elif target.recorded_ms is not None and "H200" in report.environment.get("gpu", ""):
        of, note = target.recorded_ms, f"recorded {number(target.recorded_ms)} in another run"
    if of is None:
        return Verdict(str(case), str(target), clock, ours, None, None, "was not measured")
    limit = of * target.factor
    return Verdict(str(case), str(target), clock, ours, limit, ours <= limit, note)


def case_verdicts(report: Report, case: Case, clock: str) -> list[Verdict]:
    if report.dtype != "bf16":
        return []
    found = (judge(report, case, target, clock) for target in TARGETS.get(case, ()))
    return [verdict for verdict in found if verdict is not None]


def verdicts(report: Report) -> list[Verdict]:
    """For each case and each of its clocks."""
    return [
        verdict
        for case in report.cases
        for clock in ((CPU,) if case.op in CPU_OPS else (EVENTS, GRAPH))
        for verdict in case_verdicts(report, case, clock)
    ]


# Markdown


def number(value: float, like: Optional[float] = None) -> str:
    """Four significant digits but at most five after the point, or as many after the point as `like` has."""
    like = abs(value if like is None else like)
    digits = min(max(3 - math.floor(math.log10(like)), 0), 5) if like else 4
    return f"{value:.{digits}f}"


def table(rows: list[list[str]]) -> str:
    """A Markdown table whose source is aligned; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows)
    return "\n".join(f"| {line} |" for line in lines)


def cell(result: Optional[Result], clock: str, scale: float = 1.0) -> str:
    """The median and half the distance between the quartiles."""
    if result is None:
        return ""
    median = result.time(clock)
    if median is None:
        return "failed" if result.error else ""
    low, high = result.quartiles(clock)
    return f"{number(median * scale)} ±{number((high - low) / 2 * scale, like=median * scale)}"


def verdict_cell(report: Report, case: Case, clock: str, scale: float = 1.0) -> str:
    return "; ".join(verdict.text(scale) for verdict in case_verdicts(report, case, clock))


def device_table(report: Report, op: str, clock: str) -> str:
    cases = [case for case in report.cases if case.op == op]
    peers = [peer for peer in report.peers if any(peer in report.of(case) for case in cases)]
    rows = [["shape", "roofline", *peers, "of roofline", "GB/s", "bits equal", "targets"]]
    for case in cases:
        results = report.of(case)
        ours = results.get(OURS)
        time = ours and ours.time(clock)
        speed = ["", ""]
        if time:
            speed = [f"{report.roofline_ms(case) / time:.1%}", f"{case.bytes(report.dtype) / time / 1e6:.0f}"]
        rows.append(
            [
                shape_text(case.shape),
                number(report.roofline_ms(case)),
                *(cell(results.get(peer), clock) for peer in peers),
                *speed,
                {True: "yes", False: "NO", None: "not compared"}[ours.bit_equal] if ours else "",
                verdict_cell(report, case, clock),
            ]
        )
    return table(rows)


def cpu_table(report: Report) -> str:
    cases = [case for case in report.cases if case.op in CPU_OPS]
    peers = [peer for peer in report.peers if any(peer in report.of(case) for case in cases)]
    rows = [["call", *peers, "targets"]]
    for case in cases:
        results = report.of(case)
        cells = [cell(results.get(peer), CPU, scale=1e3) for peer in peers]
        rows.append([CPU_TITLES[case.op], *cells, verdict_cell(report, case, CPU, scale=1e3)])
    return table(rows)


def first_call_table(report: Report) -> str:
    # Runs with warmup have one stage more; the others have a subset in the same order.
    stages = list(max(report.first_call.values(), key=len))
    rows = [["Triton's cache", *stages]]
    for state, times in report.first_call.items():
        rows.append([state, *(f"{times[stage]:.2f}" if stage in times else "" for stage in stages)])
    return table(rows)


def bits_lines(report: Report) -> list[str]:
    """In how many of its cases each peer returned eager's bits."""
    lines = []
    for peer in report.peers:
        compared = [result.bit_equal for result in report.results if result.peer == peer]
        compared = [equal for equal in compared if equal is not None]
        if compared and peer != EAGER:
            lines.append(f"- {peer}: eager's bits in {sum(compared)} of {len(compared)} cases")
    return lines


def target_lines(report: Report) -> list[str]:
    found = verdicts(report)
    clocks = dict.fromkeys(verdict.clock for verdict in found)
    met = {clock: [verdict.met for verdict in found if verdict.clock == clock] for clock in clocks}
    return [f"- targets met by {clock}: {sum(map(bool, all_))} of {len(all_)}" for clock, all_ in met.items()]


def markdown(report: Report) -> str:
    environment = report.environment
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    parts = [
        "# lossless-kernels and its peers, side by side",
        f"{environment['gpu']} (driver {environment['driver']}), {versions}, {report.dtype}, {environment['date']}. "
        f"`{environment['command']}`",
        f"Build: `{environment['kernel']}`. docs/performance.md describes the method.",
        "\n".join(
            (
                "- A time is the median of all samples ± half of the distance between the quartiles.",
                "- *roofline* (memcpy roofline): the time in which a device-to-device copy moves the bytes of the op, each "
                f"input read once and each output written once. The copy moved {report.copy_gb_per_s:.0f} GB/s in this run "
                f"(quartiles {report.copy_quartiles[0]:.0f}, {report.copy_quartiles[1]:.0f}).",
                f"- *of roofline*: the roofline over the time of {OURS}. A copy is a measure and no limit: some kernels "
                "exceed 100%.",
                f"- *GB/s*, *bits equal* (with eager's) and *targets* are of {OURS} too. Targets are for bf16 on an H200; "
                "*1.03 x roofline* is 1.03 times the roofline's time.",
            )
        ),
    ]
    for op in dict.fromkeys(case.op for case in report.cases if case.op in OPS):
        parts += [
            f"## {OPS[op].title}",
            "CUDA-event timing of single calls, ms:",
            device_table(report, op, EVENTS),
            "Device time in a CUDA graph of many calls, ms a call:",
            device_table(report, op, GRAPH),
        ]
    if any(case.op in CPU_OPS for case in report.cases):
        parts += ["## CPU time of one RMSNorm module call at 1x4096, us", cpu_table(report)]
    if report.first_call:
        parts += ["## First call of a fresh process, s", first_call_table(report)]
    notes = target_lines(report) + bits_lines(report)
    notes += [f"- {peer} is not in this run: {reason}" for peer, reason in report.missing.items()]
    notes += [f"- {result.peer}, {result.case}: {result.error}" for result in report.results if result.error]
    notes += [f"- error: {failure}" for failure in report.failures]
    if notes:
        parts += ["## Notes", "\n".join(notes)]
    return "\n\n".join(parts) + "\n"


# Plots


# Below this size launch latency decides, not bandwidth.
LEAST_BYTES = 1 << 20


def series(report: Report, op: str) -> dict[str, dict[Case, tuple[float, float, float]]]:
    """Peer -> case -> GB/s by device time in a CUDA graph: lower quartile, median, upper quartile.

    Cases are ordered by hidden size, then by rows.
    """
    cases = [case for case in report.cases if case.op == op and case.bytes(report.dtype) >= LEAST_BYTES]
    found = {}
    for case in sorted(cases, key=lambda case: (case.hidden_size, case.rows, case.shape)):
        gigabytes = case.bytes(report.dtype) / 1e9
        for peer, result in report.of(case).items():
            if result.device_ms:
                low, high = result.device_quartiles_ms
                found.setdefault(peer, {})[case] = tuple(gigabytes / ms * 1e3 for ms in (high, result.device_ms, low))
    return {peer: found[peer] for peer in report.peers if peer in found}


def plot(report: Report, folder: Path) -> list[Path]:
    """Writes PNGs and returns their paths. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    # Each peer has the same colour in all plots.
    palette = plt.get_cmap("tab10").colors
    colours = {peer: palette[index % len(palette)] for index, peer in enumerate(report.peers)} | {OURS: "black"}
    where = f"{report.environment['gpu']}, {report.dtype}, {report.environment['date'][:10]}"
    paths = []

    def save(figure, axes, name):
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(folder / name, dpi=150, bbox_inches="tight")
        plt.close(figure)
        paths.append(folder / name)

    def bars(axes, groups, values):
        """A group of bars for each of `groups`; values: peer -> group -> (low, median, high)."""
        width = 0.8 / len(values)
        for place, (peer, found) in enumerate(values.items()):
            lefts = [groups.index(group) + (place - (len(values) - 1) / 2) * width for group in found]
            lows, medians, highs = zip(*found.values())
            spreads = [[m - low for low, m in zip(lows, medians)], [high - m for m, high in zip(medians, highs)]]
            drawn = axes.bar(lefts, medians, width, color=colours[peer], label=peer)
            axes.errorbar(lefts, medians, spreads, fmt="none", ecolor="grey", elinewidth=0.8)
            yield peer, drawn

    for op in OPS:
        found = series(report, op)
        if not found:
            continue
        measured = list(dict.fromkeys(case for speeds in found.values() for case in speeds))
        measured.sort(key=lambda case: (case.hidden_size, case.rows, case.shape))
        figure, axes = plt.subplots(figsize=(max(5, 2 + 0.9 * len(measured)), 4.5))
        list(bars(axes, measured, found))
        axes.axhline(report.copy_gb_per_s, color="grey", linestyle="--", linewidth=1, label="memcpy")
        labels = [f"{shape_text(case.shape[:-1])}\nx {case.hidden_size}" for case in measured]
        axes.set_xticks(range(len(measured)), labels, fontsize=8)
        axes.set_xlabel(OPS[op].axes)
        axes.set_ylabel("GB/s, device time in a CUDA graph")
        axes.set_title(f"{OPS[op].title}\n{where}", fontsize=10)
        save(figure, axes, f"{op}.png")

    cpu_cases = [case for case in report.cases if case.op in CPU_OPS]
    times = {}
    for case in cpu_cases:
        for peer, result in report.of(case).items():
            if result.median_ms:
                low, high = result.quartiles_ms
                times.setdefault(peer, {})[case] = tuple(ms * 1e3 for ms in (low, result.median_ms, high))
    if times:
        figure, axes = plt.subplots(figsize=(8, 4.5))
        for _, drawn in bars(axes, cpu_cases, {peer: times[peer] for peer in report.peers if peer in times}):
            axes.bar_label(drawn, fmt="%.1f", fontsize=7, padding=2)
        axes.set_xticks(range(len(cpu_cases)), [CPU_TITLES[case.op] for case in cpu_cases])
        axes.set_ylabel("us a call, error bars from quartile to quartile")
        axes.set_title(f"CPU time of one RMSNorm call, {shape_text(cpu_cases[0].shape)}\n{where}", fontsize=10)
        save(figure, axes, "host_time.png")
    return paths
