"""Launch plans as data: what `scripts/tune.py` found to be the fastest, read from `plans/*.json`.

A plan changes the time that a kernel takes and never the order of its additions. A file is for the GPUs of one major
compute capability; for all others, and for what no file names, the families have plans of their own, computed from the
shape. Whatever is wrong with an entry, a call is never disturbed: the entry counts as missing. `read` says what is wrong.

A file: `{"compute_capability": 9, "found": {gpu, driver, torch, triton, date, command}, "plans": [...]}`. An entry of
"plans":

    op               a key of FIELDS
    hidden_size      null for an op that has none
    element_size     bytes of an element of the activations
    least_rows       the plan is for so many rows
    most_rows        and up to so many; null: no limit
    plan             the fields of the op's plan
    measured         {"shape", "ms", "default_ms"}: the time beside that of the plan that the family computes
"""

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch

FOLDER = Path(__file__).parent.parent / "plans"


def _powers_of_two(least: int, most: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(least.bit_length() - 1, most.bit_length()))


_WARPS = _powers_of_two(1, 32)
_FORWARD = {
    "rows_per_program": _powers_of_two(1, 64),
    "num_warps": _WARPS,
    "streamed": (False, True),
    "prefetch": (False, True),
    "by_lane": (False, True),
    "programs_per_row": _powers_of_two(1, 16),
}
_BACKWARD = {
    "fused": (False, True),
    "rows_per_program": _powers_of_two(1, 64),
    "num_warps": _WARPS,
    "streamed": (False, True),
    "stages": (1, 2, 3, 4, 5, 6),
    "chain_columns": _powers_of_two(16, 512),
    "chain_stages": (1, 2, 3, 4, 5, 6),
    "chain_warps": _WARPS,
    "sum_columns": _powers_of_two(8, 256),
    "sum_log2_steps": (1, 2, 3, 4, 5, 6),
    "sum_warps": _WARPS,
}
_ACTIVATION = {"block": _powers_of_two(128, 8192), "num_warps": _WARPS}
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "new_gelu", "fast_gelu", "quick_gelu")
# For each op the fields of its plan and the values that they may take.
FIELDS = {
    "rms_norm": _FORWARD,
    "add_rms_norm": _FORWARD,
    "rms_norm_backward": _BACKWARD,
    "add_rms_norm_backward": _BACKWARD,
    **{name + direction: _ACTIVATION for name in _ACTIVATIONS for direction in ("", "_backward")},
}
# Far beyond what registers hold.
_MAX_ELEMENTS_PER_THREAD = 512
# The compute capability from which on a GPU can be asked for a whole row at once.
LEAST_PREFETCHING = 9
# The fewest columns that ATen reads as vectors: a row that is streamed backward is summed in their order.
_LEAST_STREAMED = 128
_FOUND = ("gpu", "driver", "torch", "triton", "date", "command")
_ENTRY = ("op", "hidden_size", "element_size", "least_rows", "most_rows", "plan", "measured")


class PlanError(ValueError):
    """A file of plans is not what it should be; the message says where, what was found and what was expected."""


@dataclass(frozen=True)
class Gpu:
    """What plans are chosen by.

    Args:
        compute_capability: the major one; None where there is none, as on ROCm and in Triton's interpreter.
        shared_memory: bytes, the most that a program can have.
    """

    name: str
    compute_capability: Optional[int]
    multiprocessors: int
    shared_memory: int


UNKNOWN = Gpu("unknown", None, 1, 0)


@functools.cache
def gpu(device: torch.device) -> Gpu:
    """The GPU behind `device`; `UNKNOWN` if that is no CUDA device."""
    if device.type != "cuda":
        return UNKNOWN
    properties = torch.cuda.get_device_properties(device)
    # ROCm has numbers of the same form that mean other GPUs.
    capability = properties.major if torch.version.hip is None else None
    # What a program may ask for; without asking, every GPU has so much.
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 48 << 10)
    return Gpu(properties.name, capability, properties.multi_processor_count, shared_memory)


@dataclass(frozen=True)
class Entry:
    """One tuned plan; the attributes are those of the files."""

    op: str
    hidden_size: Optional[int]
    element_size: int
    least_rows: int
    most_rows: Optional[int]
    plan: dict[str, Any]
    measured: Optional[dict[str, Any]]

    @property
    def kind(self) -> tuple[str, Optional[int], int]:
        return self.op, self.hidden_size, self.element_size

    def covers(self, rows: int) -> bool:
        return self.least_rows <= rows and (self.most_rows is None or rows <= self.most_rows)

    def overlaps(self, other: "Entry") -> bool:
        later, earlier = (self, other) if self.least_rows >= other.least_rows else (other, self)
        return self.kind == other.kind and earlier.covers(later.least_rows)


def tuned(gpu: Gpu, op: str, hidden_size: Optional[int], rows: int, element_size: int) -> Optional[dict[str, Any]]:
    """The fields of the plan for so many rows; None if no file of this GPU's kind has one."""
    for entry in _entries(gpu.compute_capability).get((op, hidden_size, element_size), ()):
        if entry.covers(rows):
            return entry.plan
    return None


def turning_points(gpu: Gpu, op: str, hidden_size: Optional[int], element_size: int) -> set[int]:
    """The numbers of rows from which on another plan may hold."""
    entries = _entries(gpu.compute_capability).get((op, hidden_size, element_size), ())
    return {entry.least_rows for entry in entries} | {entry.most_rows + 1 for entry in entries if entry.most_rows}


@functools.cache
def _entries(compute_capability: Optional[int]) -> dict[tuple, list[Entry]]:
    """The valid entries for these GPUs by `Entry.kind`."""
    found: dict[tuple, list[Entry]] = {}
    # A package may lie in an archive or without its data: then there are no files.
    for path in sorted(FOLDER.glob("*.json")) if compute_capability is not None else ():
        try:
            content = _content(path)
        except (OSError, PlanError):
            continue
        if content["compute_capability"] != compute_capability:
            continue
        for number, values in enumerate(content["plans"]):
            try:
                entry = _entry(f"{path.name}, plans[{number}]", values, compute_capability)
            except PlanError:
                continue
            found.setdefault(entry.kind, []).append(entry)
    return found


def read(path: Path) -> tuple[int, dict[str, Any], list[Entry]]:
    """The compute capability that a file is for, how its plans were found, and all entries.

    Raises:
        PlanError: something in the file is not as it should be.
        OSError: it cannot be read.
    """
    content = _content(path)
    found = content.get("found")
    missing = [name for name in _FOUND if not isinstance(found, dict) or not isinstance(found.get(name), str)]
    if missing:
        raise PlanError(f"{path.name}, found: expected the texts {', '.join(_FOUND)}, missing {', '.join(missing)}")
    entries: list[Entry] = []
    for number, values in enumerate(content["plans"]):
        where = f"{path.name}, plans[{number}]"
        entry = _entry(where, values, content["compute_capability"])
        for other, earlier in enumerate(entries):
            if entry.overlaps(earlier):
                raise PlanError(f"{where}: overlaps plans[{other}], {entry.op} for {earlier.least_rows} and more rows")
        entries.append(entry)
    return content["compute_capability"], found, entries


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(f"{path.name}: expected JSON, found {error}") from None
    if not isinstance(content, dict):
        raise PlanError(f"{path.name}: expected an object, found {content!r:.80}")
    if not _is_count(content.get("compute_capability")):
        raise PlanError(
            f"{path.name}, compute_capability: expected a major compute capability, found "
            f"{content.get('compute_capability')!r}"
        )
    if not isinstance(content.get("plans"), list):
        raise PlanError(f"{path.name}, plans: expected a list, found {content.get('plans')!r:.80}")
    return content


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _entry(where: str, values, compute_capability: int) -> Entry:
    """Raises PlanError, which begins with `where`, unless `values` is an entry as this file's first lines describe it."""

    def expect(holds, name, expected, found):
        if not holds:
            raise PlanError(f"{where}{name and ', ' + name}: expected {expected}, found {found!r:.200}")

    expect(isinstance(values, dict), "", "an object", values)
    expect(set(values) == set(_ENTRY), "", f"the keys {', '.join(_ENTRY)}", sorted(values))
    entry = Entry(**values)
    expect(isinstance(entry.op, str) and entry.op in FIELDS, "op", f"one of {', '.join(FIELDS)}", entry.op)
    expect(entry.element_size in (2, 4), "element_size", "2 or 4", entry.element_size)
    expect(_is_count(entry.least_rows), "least_rows", "a number from 1 on", entry.least_rows)
    most = entry.most_rows
    limits = most is None or (_is_count(most) and most >= entry.least_rows)
    expect(limits, "most_rows", f"null or a number from {entry.least_rows} on", most)
    fields = FIELDS[entry.op]
    expect(isinstance(entry.plan, dict), "plan", "an object", entry.plan)
    expect(set(entry.plan) == set(fields), "plan", f"the keys {', '.join(fields)}", sorted(entry.plan))
    for name, value in entry.plan.items():
        alike = [allowed for allowed in fields[name] if type(allowed) is type(value) and allowed == value]
        expect(alike, f"plan, {name}", f"one of {', '.join(map(str, fields[name]))}", value)
    prefetch = entry.plan.get("prefetch", False) and compute_capability < LEAST_PREFETCHING
    expect(not prefetch, "plan, prefetch", f"false below compute capability {LEAST_PREFETCHING}", prefetch)
    by_lane = entry.plan.get("by_lane", False)
    expect(not (by_lane and entry.plan["streamed"]), "plan, by_lane", "false for rows that are streamed", by_lane)
    programs = entry.plan.get("programs_per_row", 1)
    single = by_lane and entry.plan["rows_per_program"] == 1 and not entry.plan["prefetch"] and most is not None
    expect(
        programs == 1 or single,
        "plan, programs_per_row",
        "1 but for single rows by lane, few and not prefetched",
        programs,
    )
    # Of the backward kernels the one that streams rows takes one at a time, and leaves sums of the weight's gradient.
    streamed = "fused" in fields and entry.plan["streamed"]
    expect(not streamed or entry.plan["fused"], "plan, streamed", "false in a plan that is not fused", streamed)
    rows = entry.plan.get("rows_per_program")
    expect(not streamed or rows == 1, "plan, rows_per_program", "1 for streamed rows", rows)
    has_size = "rows_per_program" in fields
    size = entry.hidden_size
    expect(_is_count(size) if has_size else size is None, "hidden_size", "a number" if has_size else "null", size)
    if has_size:
        expect(not streamed or size >= _LEAST_STREAMED, "hidden_size", f"at least {_LEAST_STREAMED} to stream", size)
        each = entry.plan["rows_per_program"] * (1 << (size - 1).bit_length()) // (32 * entry.plan["num_warps"])
        expect(each <= _MAX_ELEMENTS_PER_THREAD, "plan", f"at most {_MAX_ELEMENTS_PER_THREAD} elements a thread", each)
    measured = entry.measured
    expect(
        measured is None
        or (isinstance(measured, dict) and all(_is_time(measured.get(k)) for k in ("ms", "default_ms"))),
        "measured",
        "null, or shape, ms and default_ms",
        measured,
    )
    return entry


def _is_time(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
