"""Tuned launch configurations ("plans"), which `scripts/tune.py` found to be fastest, from `plans/*.json`.

A plan changes a kernel's time, never its reduction order. A file is for the GPUs of one major compute capability.
Without an entry an op computes a default plan from the shape. A malformed file or entry counts as missing;
`scripts/plan_files.py` describes the format and names errors.
"""

import contextlib
import functools
import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Optional

import torch

from . import reduction

FOLDER = Path(__file__).parent.parent / "plans"


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that choose plans and limit concurrent programs. The interpreter has the H200's defaults.

    Args:
        compute_capability: the major number; None on ROCm and in Triton's interpreter.
        shared_memory: the largest size for a program, in bytes.
        multiprocessors: their number.
        threads: the most threads of a multiprocessor.
        build: the constants of ATen's reductions.
    """

    compute_capability: Optional[int]
    shared_memory: int
    multiprocessors: int = 132
    threads: int = 2048
    build: reduction.Build = reduction.CUDA


UNKNOWN = Gpu(None, 0)


@functools.cache
def gpu(device: torch.device) -> Gpu:
    """The GPU behind `device`; `UNKNOWN` if that is no CUDA device."""
    if device.type != "cuda":
        return UNKNOWN
    properties = torch.cuda.get_device_properties(device)
    # ROCm's numbers mean other GPUs.
    rocm = torch.version.hip is not None
    capability = None if rocm else properties.major
    build = reduction.ROCM[properties.warp_size] if rocm else reduction.CUDA
    # The opt-in maximum; every GPU has 48 KiB without opting in.
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 48 << 10)
    threads = properties.max_threads_per_multi_processor
    return Gpu(capability, shared_memory, properties.multi_processor_count, threads, build)


def tuned(plan_class: type, gpu: Gpu, op: str, hidden_size: Optional[int], rows: int, element_size: int):
    """The plan for `rows` rows, a `plan_class`; None if no file for this GPU has one with the fields of that class."""
    types = {field.name: field.type for field in fields(plan_class)}
    for covered, values in _entries(gpu.compute_capability).get((op, hidden_size, element_size), ()):
        if rows in covered and {name: type(value) for name, value in values.items()} == types:
            return plan_class(**values)
    return None


def plan_boundaries(gpu: Gpu, op: str, hidden_size: Optional[int], element_size: int) -> set[int]:
    """The numbers of rows at which another plan may begin."""
    entries = _entries(gpu.compute_capability).get((op, hidden_size, element_size), ())
    return {rows for covered, _ in entries for rows in (covered.start, covered.stop) if rows < sys.maxsize}


@functools.cache
def _entries(compute_capability: Optional[int]) -> dict[tuple, list[tuple[range, dict[str, Any]]]]:
    """The rows and fields of every plan for these GPUs, by op, hidden size and element size."""
    found: dict[tuple, list[tuple[range, dict[str, Any]]]] = {}
    malformed = OSError, ValueError, TypeError, KeyError, RecursionError
    # A package in an archive or without its data has no files.
    for path in sorted(FOLDER.glob("*.json")) if compute_capability is not None else ():
        with contextlib.suppress(*malformed):
            content = json.loads(path.read_text(encoding="utf-8"))
            for values in content["plans"] if content["compute_capability"] == compute_capability else ():
                with contextlib.suppress(*malformed):
                    kind = values["op"], values["hidden_size"], values["element_size"]
                    most = values["most_rows"]
                    covered = range(values["least_rows"], sys.maxsize if most is None else most + 1)
                    if 0 < covered.start < covered.stop:
                        found.setdefault(kind, []).append((covered, dict(values["plan"])))
    return found
