"""Comparing tensors bit by bit, and inputs that are the same bits everywhere."""

import math
import os
from collections.abc import Sequence
from typing import Optional, Union

import torch
from torch import Tensor

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_integers(tensor: Tensor) -> Tensor:
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.detach().view(_INTEGER_OF_SIZE[tensor.element_size()])


def _differing(actual: Tensor, expected: Tensor) -> Tensor:
    """Where the bits differ, as a bool tensor. Any NaN equals any other."""
    differing = _as_integers(actual) != _as_integers(expected)
    return differing & ~(torch.isnan(actual) & torch.isnan(expected))


def bits_equal(actual: Tensor, expected: Tensor) -> bool:
    """Same shape, same dtype, same bit patterns; NaN in the same places, whatever its payload."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return not _differing(actual, expected.to(actual.device)).any().item()


def _ordered(tensor: Tensor) -> Tensor:
    """Integers whose differences count the representable numbers in between; -0 is 0."""
    bits = _as_integers(tensor).to(torch.int64)
    magnitude = bits & ((1 << (8 * tensor.element_size() - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def _hex(value: Tensor) -> str:
    digits = 2 * value.element_size()
    bits = _as_integers(value).item() & ((1 << (4 * digits)) - 1)
    return f"{value.item()!r} (0x{bits:0{digits}x})"


def assert_bits_equal(actual: Tensor, expected: Tensor, label: str = "") -> None:
    """Raise an AssertionError that says how many elements differ, where first, and how far."""
    label = f"{label}: " if label else ""
    assert actual.shape == expected.shape, f"{label}shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{label}dtype {actual.dtype} instead of {expected.dtype}"
    expected = expected.to(actual.device)
    differing = _differing(actual, expected)
    count = int(differing.sum())
    if count == 0:
        return
    first = tuple(differing.nonzero()[0].tolist())
    message = (
        f"{label}{count} of {actual.numel()} elements differ; first at {first}: "
        f"{_hex(actual[first])} instead of {_hex(expected[first])}"
    )
    if actual.dtype.is_floating_point:
        comparable = ~(torch.isnan(actual) | torch.isnan(expected))
        distance = (_ordered(actual) - _ordered(expected)).abs()
        largest = int(torch.where(comparable, distance, torch.zeros_like(distance)).max())
        message += f"; at most {largest} ulp apart"
        if not bool(comparable[differing].all()):
            message += f"; NaN on one side only {int((differing & ~comparable).sum())} times"
    raise AssertionError(message)


def same_layout(actual: Tensor, expected: Tensor) -> bool:
    """Same shape and same strides."""
    return actual.shape == expected.shape and actual.stride() == expected.stride()


def _signed(constant: int) -> int:
    """A 64-bit pattern as the int64 that has it."""
    constant &= (1 << 64) - 1
    return constant - (1 << 64) if constant >> 63 else constant


def _xor_shift(bits: Tensor, shift: int) -> Tensor:
    # torch shifts int64 arithmetically: mask the copies of the sign.
    return bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))


def hashed_int64(counter: Tensor, seed: int) -> Tensor:
    """A hash of each int64 of `counter` (SplitMix64, Steele, Lea and Flood 2014), for one seed.

    Integer arithmetic modulo 2^64 only, so the same bits on every device and torch version.
    """
    bits = (counter + _signed(seed * 0xD1342543DE82EF95)) * _signed(0x9E3779B97F4A7C15)
    bits = _xor_shift(bits, 30) * _signed(0xBF58476D1CE4E5B9)
    bits = _xor_shift(bits, 27) * _signed(0x94D049BB133111EB)
    return _xor_shift(bits, 31)


# Elements hashed at once: what a CPU's cache holds, or enough for a GPU.
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
# Four 16-bit integers have a sum of variance 4 * (2^32 - 1) / 12, and it is doubled below.
# math.sqrt is correctly rounded everywhere; a power need not be.
_STANDARD_DEVIATION = 2.0 * math.sqrt((2.0**32 - 1.0) / 3.0)


def hashed_normal(
    shape: Sequence[int],
    seed: int,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    device: Union[str, torch.device] = "cpu",
    rows: Optional[Tensor] = None,
) -> Tensor:
    """Roughly normal numbers of standard deviation `scale`, the same bits on every machine.

    Each is the centred sum of the four 16-bit parts of a hash of its index (so within 3.46
    standard deviations), which fp32 holds exactly, times one fp32 constant, rounded to `dtype`.
    With `rows`, an int64 tensor, only these rows of the tensor, seen as [-1, shape[-1]].
    """
    shape = tuple(shape)
    width = shape[-1]
    total_rows = 1
    for size in shape[:-1]:
        total_rows *= size
    if rows is None:
        out_shape = shape
        rows = torch.arange(total_rows, device=device)
    else:
        out_shape = (len(rows), width)
        rows = rows.to(device)
    out = torch.empty((len(rows), width), dtype=dtype, device=device)
    columns = torch.arange(width, device=device)
    factor = torch.tensor(scale / _STANDARD_DEVIATION, dtype=torch.float32, device=device)
    rows_at_once = max(1, _CHUNK[out.device.type] // max(1, width))
    for start in range(0, len(rows), rows_at_once):
        chunk = rows[start : start + rows_at_once]
        bits = hashed_int64(chunk[:, None] * width + columns, seed)
        total = bits & 0xFFFF
        for shift in (16, 32, 48):
            total += (bits >> shift) & 0xFFFF
        out[start : start + rows_at_once] = ((2 * total - 4 * 0xFFFF).float() * factor).to(dtype)
    return out.view(out_shape)


def fresh_seed() -> int:
    """A new seed for each run, printed; LOSSLESS_SEED repeats a run."""
    given = os.environ.get("LOSSLESS_SEED")
    seed = int(given, 0) if given else int.from_bytes(os.urandom(4), "little")
    print(f"LOSSLESS_SEED={seed}")
    return seed
