"""Reads and checks the files of tuned launch configurations in the package's folder plans/.

A file: `{"compute_capability": 9, "found": {gpu, driver, torch, triton, date, command}, "plans": [...]}`. "found" says how
the configurations were measured. An entry of "plans":

    op               an op that a family of the package declares in TUNING
    hidden_size      elements of a row; null for an op without rows
    element_size     bytes of an element of the activations
    least_rows       the fewest rows that the launch configuration is for
    most_rows        the most; null: no limit
    plan             the fields of the launch configuration
    measured         {"shape", "ms", "default_ms"}: its time, and the time of the default; null: not measured

The package itself checks little of a file (`core/plans.py`); the tests check every file that ships.
"""

import importlib
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, Optional


def _powers_of_two(least: int, most: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(least.bit_length() - 1, most.bit_length()))


_WARPS = _powers_of_two(1, 32)
_STAGES = (1, 2, 3, 4, 5, 6)
# Field of a launch configuration -> the values it may take. All other fields are true or false.
_VALUES = {
    "rows_per_program": _powers_of_two(1, 64),
    "programs_per_row": _powers_of_two(1, 16),
    "num_warps": _WARPS,
    "stages": _STAGES,
    "chain_columns": _powers_of_two(16, 512),
    "chain_stages": _STAGES,
    "chain_warps": _WARPS,
    "sum_columns": _powers_of_two(8, 256),
    "sum_log2_steps": (1, 2, 3, 4, 5, 6),
    "sum_warps": _WARPS,
    "block": _powers_of_two(128, 8192),
}
# More than registers hold: a limit for absurd values.
_MAX_ELEMENTS_PER_THREAD = 512
# The first compute capability that prefetches a whole row with one request.
LEAST_PREFETCHING = 9
# The fewest columns that ATen reads as vectors. The streamed backward kernel has the reduction order of vectors.
_LEAST_STREAMED = 128
_FOUND = ("gpu", "driver", "torch", "triton", "date", "command")
_ENTRY = ("op", "hidden_size", "element_size", "least_rows", "most_rows", "plan", "measured")

# Op -> field of its launch configuration -> the values it may take.
Fields = dict[str, dict[str, tuple]]


class PlanError(ValueError):
    """A file is not valid; the message says where, what was expected and what was found."""


@dataclass(frozen=True)
class Entry:
    """One tuned launch configuration; the attributes are the keys of an entry."""

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

    def overlaps(self, other: "Entry") -> bool:
        later, earlier = (self, other) if self.least_rows >= other.least_rows else (other, self)
        covered = earlier.most_rows is None or later.least_rows <= earlier.most_rows
        return self.kind == other.kind and covered


def plan_classes(kernel: ModuleType) -> dict[str, type]:
    """Tuned op -> class of its launch configurations, as the families of `kernel` declare them."""
    return importlib.import_module(f"{kernel.__name__}.core.declarations").TUNING


def allowed_values(kernel: ModuleType) -> Fields:
    """The values that `read` accepts, for the ops of `kernel`."""
    return {
        op: {field.name: (False, True) if field.type is bool else _VALUES[field.name] for field in fields(plan_class)}
        for op, plan_class in plan_classes(kernel).items()
    }


def read(path: Path, allowed: Fields) -> tuple[int, dict[str, Any], list[Entry]]:
    """Reads a file: its compute capability, its "found" and its entries.

    Args:
        allowed: the `allowed_values` of the kernel.

    Raises:
        PlanError: the file is not valid.
        OSError: the file cannot be read.
    """
    content = _content(path)
    found = content.get("found")
    missing = [name for name in _FOUND if not isinstance(found, dict) or not isinstance(found.get(name), str)]
    if missing:
        raise PlanError(f"{path.name}, found: expected the texts {', '.join(_FOUND)}, found no {', '.join(missing)}")
    entries: list[Entry] = []
    for number, values in enumerate(content["plans"]):
        where = f"{path.name}, plans[{number}]"
        entry = checked_entry(where, values, content["compute_capability"], allowed)
        for other, earlier in enumerate(entries):
            if entry.overlaps(earlier):
                raise PlanError(
                    f"{where}: expected rows of no other entry, found an overlap with plans[{other}], {entry.op} from "
                    f"{earlier.least_rows} rows on"
                )
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
            f"{path.name}, compute_capability: expected the major number of a compute capability, found "
            f"{content.get('compute_capability')!r}"
        )
    if not isinstance(content.get("plans"), list):
        raise PlanError(f"{path.name}, plans: expected a list, found {content.get('plans')!r:.80}")
    return content


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def checked_entry(where: str, values, compute_capability: int, allowed: Fields) -> Entry:
    """Returns `values` as an Entry. Raises PlanError, whose message begins with `where`, if it is not a valid one."""

    def expect(holds, name, expected, found):
        if not holds:
            raise PlanError(f"{where}{name and ', ' + name}: expected {expected}, found {found!r:.200}")

    expect(isinstance(values, dict), "", "an object", values)
    expect(set(values) == set(_ENTRY), "", f"the keys {', '.join(_ENTRY)}", sorted(values))
    entry = Entry(**values)
    expect(isinstance(entry.op, str) and entry.op in allowed, "op", f"one of {', '.join(allowed)}", entry.op)
    expect(entry.element_size in (2, 4), "element_size", "2 or 4", entry.element_size)
    expect(_is_count(entry.least_rows), "least_rows", "a number from 1 on", entry.least_rows)
    most = entry.most_rows
    limits = most is None or (_is_count(most) and most >= entry.least_rows)
    expect(limits, "most_rows", f"null or a number from {entry.least_rows} on", most)
    values_of = allowed[entry.op]
    expect(isinstance(entry.plan, dict), "plan", "an object", entry.plan)
    expect(set(entry.plan) == set(values_of), "plan", f"the keys {', '.join(values_of)}", sorted(entry.plan))
    for name, value in entry.plan.items():
        alike = [each for each in values_of[name] if type(each) is type(value) and each == value]
        expect(alike, f"plan, {name}", f"one of {', '.join(map(str, values_of[name]))}", value)
    prefetch = entry.plan.get("prefetch", False) and compute_capability < LEAST_PREFETCHING
    expect(not prefetch, "plan, prefetch", f"false below compute capability {LEAST_PREFETCHING}", prefetch)
    by_lane = entry.plan.get("by_lane", False)
    expect(not (by_lane and entry.plan["streamed"]), "plan, by_lane", "false for rows that are streamed", by_lane)
    programs = entry.plan.get("programs_per_row", 1)
    single = by_lane and entry.plan["rows_per_program"] == 1 and not entry.plan["prefetch"] and most is not None
    expect(
        programs == 1 or single,
        "plan, programs_per_row",
        "1 unless by_lane is true, rows_per_program 1, prefetch false and most_rows a number",
        programs,
    )
    # The streamed backward kernel reads one row at a time and is fused with the sums of dweight.
    streamed = "fused" in values_of and entry.plan["streamed"]
    expect(not streamed or entry.plan["fused"], "plan, streamed", "false in a plan that is not fused", streamed)
    rows = entry.plan.get("rows_per_program")
    expect(not streamed or rows == 1, "plan, rows_per_program", "1 for streamed rows", rows)
    has_size = "block" not in values_of
    size = entry.hidden_size
    expect(_is_count(size) if has_size else size is None, "hidden_size", "a number" if has_size else "null", size)
    if has_size:
        expect(not streamed or size >= _LEAST_STREAMED, "hidden_size", f"at least {_LEAST_STREAMED} to stream", size)
        each = entry.plan.get("rows_per_program", 1) * (1 << (size - 1).bit_length()) // (32 * entry.plan["num_warps"])
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
