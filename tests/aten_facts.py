"""Eager's CUDA arithmetic for kernels to come: each fact is held against an emulation, bit by bit.

    python tests/aten_facts.py --json facts.json              on the GPU: half a minute on an H200
    python tests/aten_facts.py --only layer_norm,group_norm   some items
    python tests/aten_facts.py --small --device cpu           shows only that every path runs

The formulas come from ATen's kernels, read from the machine code of torch 2.11. docs/log/atens_arithmetic.md has what
an H200 showed. Each item compares eager's result with the stated formula and with alternatives:

    OK            the stated formula has eager's bits in every case
    told apart    a/b: the alternative has other bits in a of b cases. 0/b: the cases do not show the difference
    DIFF          the stated formula has other bits in some cases; the alternatives that have eager's bits there follow
    INFO          nothing is compared: the item prints notes

On a CPU items may end in DIFF, because the formulas are CUDA's. The exit status is 1 if an item raised an exception.
On a GPU it is 1 too if an item ended in DIFF, or did not start for lack of time.
"""

import argparse
import itertools
import json
import math
import sys
import time
import traceback

import torch
import torch.nn.functional as F


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The module's docstring as it is, and every argument's default."""


parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
parser.add_argument("--device", default="cuda", help="where eager and the emulations run: cuda, cuda:N or cpu")
parser.add_argument("--small", action="store_true", help="a few small shapes an item; proves nothing about a GPU")
parser.add_argument("--only", default="", metavar="NAMES", help="items to run, with commas; an unknown name prints all")
parser.add_argument("--seed", type=int, default=int(time.time()), help="of the random inputs; the default is the time")
parser.add_argument("--budget", type=float, default=225.0, help="seconds after which no case starts")
parser.add_argument("--json", metavar="FILE", help="write every case with its counts of differing elements here")
args = parser.parse_args()
DEV = torch.device(args.device)
CUDA = DEV.type == "cuda"
if CUDA and not torch.cuda.is_available():
    parser.error("no CUDA device here: --small --device cpu shows only that every path runs")
START = time.time()
BF, HF, FP = torch.bfloat16, torch.float16, torch.float32
GIB2 = 2**31 - 1

if CUDA:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device=DEV)
    PROPS = torch.cuda.get_device_properties(0)
    SMS, THREADS_PER_SM = PROPS.multi_processor_count, PROPS.max_threads_per_multi_processor
else:
    SMS, THREADS_PER_SM = 132, 2048  # An H200's.

# ------------------------------------------------------------------ the device's FMA and logf

if CUDA:
    import triton
    import triton.language as tl

    @triton.jit
    def _fma1(a, b, c):
        return tl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def _mul1(a, b):
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def _fma_kernel(a_ptr, b_ptr, c_ptr, out_ptr, n, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = i < n
        a = tl.load(a_ptr + i, mask=mask, other=0.0)
        b = tl.load(b_ptr + i, mask=mask, other=0.0)
        c = tl.load(c_ptr + i, mask=mask, other=0.0)
        tl.store(out_ptr + i, _fma1(a, b, c), mask=mask)

    @triton.jit
    def _step(total, f, C: tl.constexpr, BLOCK: tl.constexpr):
        return _fma1(total, f, tl.full([BLOCK], C, tl.float32))

    @triton.jit
    def _logf_kernel(x_ptr, out_ptr, n, VARIANT: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = i < n
        x = tl.load(x_ptr + i, mask=mask, other=1.0)
        tiny = x < 1.1754943508222875e-38
        s = tl.where(tiny, _mul1(x, tl.full([BLOCK], 8388608.0, tl.float32)), x)
        offset = tl.where(tiny, tl.full([BLOCK], -23.0, tl.float32), tl.full([BLOCK], 0.0, tl.float32))
        b = s.to(tl.int32, bitcast=True)
        e = (b - 0x3F2AAAAB) & -8388608
        f = (b - e).to(tl.float32, bitcast=True) - 1.0
        t = tl.full([BLOCK], -0.130188569, tl.float32)
        t = _step(t, f, 0.140846103, BLOCK)
        t = _step(t, f, -0.121486276, BLOCK)
        t = _step(t, f, 0.139806107, BLOCK)
        t = _step(t, f, -0.166842356, BLOCK)
        t = _step(t, f, 0.200122997, BLOCK)
        t = _step(t, f, -0.249996692, BLOCK)
        t = _step(t, f, 0.333331823, BLOCK)
        t = _step(t, f, -0.5, BLOCK)
        if VARIANT == 0:
            q = _fma1(f, _mul1(f, t), f)
        elif VARIANT == 1:
            q = _fma1(_mul1(f, f), t, f)
        else:
            q = _mul1(f, _mul1(f, t)) + f
        r = _fma1(e.to(tl.float32), tl.full([BLOCK], 1.1920928955078125e-07, tl.float32), offset)
        y = _fma1(r, tl.full([BLOCK], 0.693147182, tl.float32), q)
        inf = tl.full([BLOCK], float("inf"), tl.float32)
        raw = x.to(tl.int32, bitcast=True)
        y = tl.where((raw < 0) | (raw >= 0x7F800000), _fma1(x, inf, inf), y)
        y = tl.where(x == 0.0, -inf, y)
        tl.store(out_ptr + i, y, mask=mask)


def fma_by_fp64(a, b, c):
    """fp32 a * b + c, rounded once: the product is exact in fp64, the sum is rounded there to odd."""
    a, b, c = torch.broadcast_tensors(a, b, c)
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    to_odd = (error != 0) & torch.isfinite(total) & (bits & 1 == 0)
    neighbour = torch.where((error > 0) == (total > 0), bits + 1, bits - 1)
    return torch.where(to_odd, neighbour, bits).view(torch.float64).float()


def fma(a, b, c):
    if not CUDA:
        return fma_by_fp64(a, b, c)
    a, b, c = (t.contiguous() for t in torch.broadcast_tensors(a, b, c))
    out = torch.empty_like(a)
    if out.numel():
        _fma_kernel[(triton.cdiv(out.numel(), 1024),)](a, b, c, out, out.numel(), BLOCK=1024, num_warps=4)
    return out


LOG_COEFFICIENTS = (
    -0.130188569,
    0.140846103,
    -0.121486276,
    0.139806107,
    -0.166842356,
    0.200122997,
    -0.249996692,
    0.333331823,
    -0.5,
)


def scalar(value, dtype=FP):
    return torch.tensor(value, dtype=dtype, device=DEV)


def logf(x, variant=0):
    if CUDA:
        out = torch.empty_like(x)
        _logf_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), VARIANT=variant, BLOCK=1024, num_warps=4)
        return out
    tiny = x < 2.0**-126
    s = torch.where(tiny, x * 8388608.0, x)
    offset = torch.where(tiny, -23.0, 0.0).float()
    b = s.view(torch.int32)
    e = (b - 0x3F2AAAAB) & -8388608
    f = (b - e).view(FP) - 1.0
    t = torch.full_like(f, LOG_COEFFICIENTS[0])
    for c in LOG_COEFFICIENTS[1:]:
        t = fma(t, f, scalar(c))
    q = fma(f, f * t, f) if variant == 0 else fma(f * f, t, f) if variant == 1 else f * (f * t) + f
    y = fma(fma(e.float(), scalar(2.0**-23), offset), scalar(0.693147182), q)
    raw = x.view(torch.int32)
    y = torch.where((raw < 0) | (raw >= 0x7F800000), x * math.inf + math.inf, y)
    return torch.where(x == 0, -math.inf, y)


# ------------------------------------------------------------------ bookkeeping

INTS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float64: torch.int64}


def differences(a, b):
    """How many elements have other bits (two NaN are equal); -1 where shape or dtype differ."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return -1
    if a.dtype not in INTS:
        return int((a != b).sum())
    a, b = a.contiguous(), b.contiguous()
    differ = a.view(INTS[a.dtype]) != b.view(INTS[b.dtype])
    count = int(differ.sum())
    return count if count == 0 else int((differ & ~(a.isnan() & b.isnan())).sum())


class Item:
    def __init__(self, name, limit):
        self.name, self.limit, self.start = name, limit, time.time()
        self.cases, self.notes, self.shown, self.seconds, self.cut = [], [], 0, 0.0, 0

    def late(self):
        late = time.time() - self.start > self.limit or time.time() - START > args.budget
        self.cut += late
        return late

    def note(self, text):
        self.notes.append(text)
        print(f"    {self.name}: {text}", flush=True)

    def case(self, label, actual, candidates, power=True):
        """Compares `actual` with `candidates`: name -> tensor, or function that makes it, the stated one first.

        Without `power` the alternatives are tried only where the stated one differs.
        """
        stated, found = next(iter(candidates)), {}
        for i, (name, candidate) in enumerate(candidates.items()):
            if i and found[stated] == 0 and not power:
                break
            if i and self.late():
                break
            try:
                value = candidate() if callable(candidate) else candidate
                found[name] = differences(actual, value)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                if i == 0:
                    raise
        self.cases.append({"case": label, "elements": actual.numel(), "stated": stated, "differences": found})
        if found[stated]:
            self.shown += 1
        if found[stated] and self.shown <= 8:
            same = [name for name, count in found.items() if count == 0]
            text = (
                f"    {self.name}: {label}: stated '{stated}' differs in {found[stated]} of {actual.numel()};"
                f" same bits: {same[:6] or 'none'}; all: {found}"
            )
            print(text[:700], flush=True)

    def failed(self):
        return [case for case in self.cases if case["differences"][case["stated"]] != 0]

    def line(self):
        if not self.cases:
            text = "INFO, see notes"
        elif self.failed():
            text = self._what_matches_instead()
        else:
            text = self._what_is_told_apart()
        if self.cut:
            text += " [cut short: out of time]"
        return f"{self.name}: {text} ({self.seconds:.1f} s)"

    def _what_matches_instead(self):
        failed, matches = self.failed(), {}
        for case in failed:
            for name in [name for name, count in case["differences"].items() if count == 0] or ["nothing tried"]:
                matches[name] = matches.get(name, 0) + 1
        most = sorted(matches.items(), key=lambda match: -match[1])[:8]
        there = ", ".join(f"{name} ({count})" for name, count in most)
        return f"DIFF {len(failed)} of {len(self.cases)}, there matches: {there}"

    def _what_is_told_apart(self):
        tried = {}
        for case in self.cases:
            for name, count in case["differences"].items():
                if name != case["stated"]:
                    apart, cases = tried.get(name, (0, 0))
                    tried[name] = (apart + (count != 0), cases + 1)
        weakest = sorted(tried.items(), key=lambda one: one[1][0] / one[1][1])
        told = [f"{name} {apart}/{cases}" for name, (apart, cases) in weakest]
        return f"OK {len(self.cases)} cases" + (f"; told apart: {', '.join(told)}" if told else "")


ITEMS = []


def item(title, limit):
    """Registers `item_NAME`: `--only NAME` runs it, for at most about `limit` seconds."""

    def register(function):
        ITEMS.append((function.__name__[len("item_") :], title, limit, function))
        return function

    return register


GEN = torch.Generator(device=DEV)


def randn(*shape, dtype=FP, scale=1.0):
    return (torch.randn(*shape, generator=GEN, device=DEV) * scale).to(dtype)


def rand(*shape, dtype=FP):
    return torch.rand(*shape, generator=GEN, device=DEV).to(dtype)


def pick(full, small):
    return small if args.small else full


def numbers(text):
    return tuple(map(int, text.split()))


def shapes_of(text):
    return tuple(tuple(map(int, shape.split("x"))) for shape in text.split())


# ------------------------------------------------------------------ Reduce.cuh


def ceil_div(a, b):
    return -(-a // b)


def floor_pow2(n):
    return 1 << (n.bit_length() - 1)


def ceil_pow2(n):
    return 1 << (n - 1).bit_length()


def block_shape(dim0, dim1, most):
    dim0, dim1 = min(floor_pow2(dim0), most), min(floor_pow2(dim1), most)
    width = min(dim0, 32)
    height = min(dim1, most // width)
    return min(dim0, most // height), height


def make_tree(width, height, inputs, per_input, outputs, per_output):
    """width, height, warps that share an output, blocks that share one."""
    if ceil_div(inputs, per_input) < min(height * 16, 256):
        return width, height, 1, 1
    values = ceil_div(inputs, per_input * height)
    grid = ceil_div(outputs, per_output)
    target = SMS * (THREADS_PER_SM // (width * height))
    ctas = 1
    if values >= 256 and grid <= target:
        ctas = max(min(ceil_div(target, grid), ceil_div(values, 16)), ceil_div(values, 256))
    return width, height, height, ctas


def halving(values, dim):
    while values.shape[dim] > 1:
        half = values.shape[dim] // 2
        values = values.narrow(dim, 0, half) + values.narrow(dim, half, half)
    return values.squeeze(dim)


def neighbours(values, dim):
    """The tree of shuffles by 1, 2, 4, ... (an older one)."""
    while values.shape[dim] > 1:
        values = values.unflatten(dim, (-1, 2))
        values = values.select(dim + 1, 0) + values.select(dim + 1, 1)
    return values.squeeze(dim)


def sequence(values, dim):
    total = torch.zeros_like(values.select(dim, 0))
    for v in values.unbind(dim):
        total = total + v
    return total


def chain(values, chains, dim):
    shape = list(values.shape)
    shape[dim] = chains
    sums = torch.zeros(shape, dtype=FP, device=values.device)
    for start in range(0, values.shape[dim], chains):
        step = values.narrow(dim, start, min(chains, values.shape[dim] - start)).float()
        sums.narrow(dim, 0, step.shape[dim]).add_(step)
    return sums


def _rows_of_one_shift(values, vec, shift, tree, lanes_tree):
    rows, n = values.shape
    width, height, warps, ctas = tree
    lanes = width * warps * ctas
    if n < 128:
        sums = chain(values, 4 * lanes, 1).view(rows, 4, lanes)
        a = sums[:, 0]
        for i in range(1, 4):
            a = a + sums[:, i]
    else:
        acc = torch.zeros(rows, lanes, vec, device=values.device)
        body = values
        if shift:
            acc[:, shift:vec, 0] += values[:, : vec - shift].float()
            body = values[:, vec - shift :]
        full = body.shape[1] // vec
        for start in range(0, full, lanes):
            k = min(lanes, full - start)
            acc[:, :k] += body[:, start * vec : (start + k) * vec].unflatten(1, (k, vec)).float()
        rest = body.shape[1] - full * vec
        if rest:
            acc[:, :rest, 0] += body[:, full * vec :].float()
        a = acc[:, :, 0]
        for i in range(1, vec):
            a = a + acc[:, :, i]
    a = a.reshape(rows, ctas, warps, width)
    a = halving(lanes_tree(a, 3), 2)
    if ctas == 1:
        return a.reshape(rows)
    a = chain(a, width * height, 1).view(rows, height, width)
    return lanes_tree(halving(a, 1), 1)


def row_sums(values, vec=4, total_rows=None, offset=0, share_blocks=True, lanes_tree=halving):
    """fp32 sums of the rows of a contiguous [rows, n] of any float dtype: Reduce.cuh, vectors of `vec`.

    `offset` is how many elements the first lies beyond a 16-byte (vec-element) boundary.
    """
    rows, n = values.shape
    total_rows = rows if total_rows is None else total_rows
    width, height = block_shape(n // vec if n >= 128 else n, total_rows, 512)
    tree = make_tree(width, height, n, width, total_rows, 1)
    if not share_blocks:
        tree = (*tree[:3], 1)
    period = vec // math.gcd(n, vec) if n >= 128 else 1
    out = torch.empty(rows, device=values.device)
    for j in range(min(period, rows)):
        out[j::period] = _rows_of_one_shift(values[j::period], vec, (offset + j * n) % vec, tree, lanes_tree)
    return out


def full_sum(values, vec=4, offset=0, element_size=None, halve=True, **kwargs):
    """fp32 sum over a contiguous 1-D tensor; over 2 GiB in halves, their sums added in order."""
    element_size = values.element_size() if element_size is None else element_size
    n = values.numel()
    if halve and 1 + (n - 1) * element_size > GIB2:
        half = n // 2
        a = full_sum(values[:half], vec, offset, element_size, **kwargs)
        # The second half is added part by part, where it is halved again.
        return _add_parts(a, values[half:], vec, offset + half, element_size, kwargs)
    return row_sums(values.view(1, -1), vec, 1, offset % vec, **kwargs).view(())


def _add_parts(total, values, vec, offset, element_size, kwargs):
    n = values.numel()
    if 1 + (n - 1) * element_size > GIB2:
        half = n // 2
        total = _add_parts(total, values[:half], vec, offset, element_size, kwargs)
        return _add_parts(total, values[half:], vec, offset + half, element_size, kwargs)
    return total + row_sums(values.view(1, -1), vec, 1, offset % vec, **kwargs).view(())


def known_rows(values):
    """Row sums inside a formula whose order is not the question: CUDA's order there, the CPU's own here."""
    return row_sums(values) if CUDA else values.sum(-1)


def known_columns(values):
    return column_sums(values) if CUDA else values.sum(0, dtype=FP)


def column_sums(values):
    """fp32 sums over the rows of a contiguous [rows, n], n a multiple of 4, below 2 GiB."""
    rows, n = values.shape
    width, height = block_shape(n // 4, rows, 128)
    width, height, warps, ctas = make_tree(width, height, rows, 1, n // 4, width)
    step = warps * ctas
    sums = chain(values, 4 * step, 0).view(4, step, n)
    sums = ((sums[0] + sums[1]) + sums[2]) + sums[3]
    sums = halving(sums.view(ctas, warps, n), 1)
    if ctas > 1:
        sums = halving(chain(sums, height, 0), 0)
    return sums.view(n)


# ------------------------------------------------------------------ softmax's orders


def block_tree(acc):
    """cuda_utils::BlockReduce: halving in each warp, then over the warps."""
    rows, threads = acc.shape
    return halving(halving(acc.view(rows, threads // 32, 32), 2), 1)


def sequential_tree(acc):
    rows, threads = acc.shape
    return sequence(sequence(acc.view(rows, threads // 32, 32), 2), 1)


def strided(acc, values, threads):
    for o in range(0, values.shape[1], threads):
        step = values[:, o : o + threads]
        acc[:, : step.shape[1]] += step
    return acc


def vectors(acc, values, threads, vec):
    for o in range(0, values.shape[1], threads * vec):
        step = values[:, o : o + threads * vec]
        step = step.unflatten(1, (-1, vec))
        for j in range(vec):
            acc[:, : step.shape[1]] += step[:, :, j]
    return acc


def loop_threads(values, threads, vec, shift):
    rows = values.shape[0]
    acc = torch.zeros(rows, threads, device=values.device)
    if shift:
        k = min(threads - shift, values.shape[1])
        acc[:, shift : shift + k] += values[:, :k]
        values = values[:, k:]
    full = values.shape[1] - values.shape[1] % (threads * vec)
    vectors(acc, values[:, :full], threads, vec)
    return strided(acc, values[:, full:], threads)


def softmax_sum(values, kind, threads=1024, vec=4, shifted=True, tree=block_tree):
    """Sums of the rows of fp32 [rows, V] in the order of a softmax kernel: warp, reg, smem or loop."""
    rows, V = values.shape
    if kind == "warp":
        lanes = min(32, ceil_pow2(V))
        return halving(strided(torch.zeros(rows, lanes, device=values.device), values, lanes), 1)
    if kind == "reg":
        return tree(strided(torch.zeros(rows, threads, device=values.device), values, threads))
    if kind == "smem":
        return tree(vectors(torch.zeros(rows, threads, device=values.device), values, threads, vec))
    period = vec // math.gcd(V, vec) if shifted else 1
    out = torch.empty(rows, device=values.device)
    for j in range(min(period, rows)):
        out[j::period] = tree(loop_threads(values[j::period], threads, vec, (j * V) % vec if shifted else 0))
    return out


def forward_kind(in_dtype, out_dtype, V):
    """The forward kernel and its vector length by row length, aligned pointers (SoftMax.cu): (kind, vec)."""
    if in_dtype == FP:
        if V <= 2048:
            return "warp", 0
        if V <= 9216:
            return "reg", 0
        return ("smem", 4) if V % 4 == 0 and V < 12256 else ("loop", 4)
    if in_dtype == out_dtype:
        if V <= 2048:
            return "warp", 0
        if V <= 9216:
            return "reg", 0
        return ("smem", 8) if V % 8 == 0 and V < 24512 else ("loop", 8)
    if V <= 1024:
        return "warp", 0
    return ("smem", 8) if V % 8 == 0 and V < 24512 else ("loop", 8)


def backward_kind(itemsize, V):
    """The backward kernel by row length (SoftMax.cu): (kind, vec, threads)."""
    if V <= 1024:
        return "warp", 0, 32
    vec = 16 // itemsize
    threads = max(32, ceil_pow2(max(1, min(V // vec, 1024) // 2)))
    if V % vec == 0 and V < (49152 - threads // 8) / itemsize:
        return "smem", vec, threads
    return "loop", vec, threads


def sum_candidates(expected, V, values, finish, threads=1024, tree=block_tree, other_tree=sequential_tree, steps=4200):
    """name -> thunk for every kind of sum that V allows; `expected` = (kind, vec) first."""
    every = [("warp", 0), ("reg", 0), ("smem", 4), ("smem", 8), ("loop", 4), ("loop", 8)]
    every.sort(key=lambda kv: kv != expected)
    found = {}

    def add(name, kind, vec, **kwargs):
        found[name] = lambda: finish(softmax_sum(values(), kind, vec=vec or 4, **kwargs))

    for kind, vec in every:
        if (kind, vec) != expected:
            if kind == "warp" and V // 32 > steps // 8 or kind == "smem" and V % vec:
                continue
            if kind in ("smem", "loop", "reg") and V < 256:
                continue
        name = kind + (str(vec) if vec else "")
        add(name, kind, vec, threads=threads, tree=tree)
        if (kind, vec) == expected:
            if kind != "warp":
                add(f"{name}, the other tree", kind, vec, threads=threads, tree=other_tree)
                for other in (128, 256, 512, 1024):
                    if other != threads and V >= other:
                        add(f"{name}, {other} threads", kind, vec, threads=other, tree=tree)
            if kind == "loop" and V % vec:
                add(f"{name}, shift 0", kind, vec, threads=threads, tree=tree, shifted=False)
    return found


# ------------------------------------------------------------------ items


@item("self_check", 10)
def item_self_check(it):
    """The tools: the emulated FMA, division, the formula of logf, and one sum whose order is known."""
    n = pick(2_000_000, 20_000)
    a, b, c = randn(n), randn(n), randn(n)
    c[: n // 4] = -(a * b)[: n // 4]
    c[n // 4 : n // 2] *= 2.0**-20
    a[n // 2 : n // 2 + n // 8] *= 2.0**-130
    c[n // 2 : n // 2 + n // 8] *= 2.0**-130
    it.case("fma: device against fp64", fma(a, b, c), {"fp64 to odd": fma_by_fp64(a, b, c), "two roundings": a * b + c})
    x = torch.exp2(randn(n) * 20)
    it.case(
        "a / b on the device is div.rn",
        a / x,
        {"fp64": (a.double() / x.double()).float(), "times reciprocal": a * (1 / x)},
    )
    close = (logf(x).double() - x.double().log()).abs() / (x.double().log().abs() + 1e-3)
    it.note(f"logf's formula against fp64 log: largest relative error {close.max().item():.2e} (fp32 ulp 1.2e-07)")
    # tests/aten_model.py has this reduction order, and golden vectors of an H200 show it.
    v = randn(64, 1024)
    it.case(
        "known ground: fp32 row sums [64, 1024]",
        v.sum(-1),
        {"vec 4": lambda: row_sums(v), "vec 8": lambda: row_sums(v, 8)},
    )


@item("logf, all positive fp32", 30)
def item_log(it):
    """torch.log of fp32 is CUDA's logf: every pattern of bits from 0 to infinity, the sign bit clear."""
    end = pick(0x7F800000 + 1, 1 << 16)
    chunk = pick(1 << 27, 1 << 14)
    starts = list(range(0, end, chunk))
    wrong = {0: 0, 1: 0, 2: 0}
    examples = []
    for start in starts:
        x = torch.arange(start, min(end, start + chunk), device=DEV, dtype=torch.int64).to(torch.int32).view(FP)
        reference = torch.log(x)
        for variant in wrong:
            if variant and wrong[0] == 0 and start != starts[min(7, len(starts) - 1)]:
                continue
            y = logf(x, variant)
            differ = y.view(torch.int32) != reference.view(torch.int32)
            count = int((differ & ~(y.isnan() & reference.isnan())).sum())
            wrong[variant] += count
            if count and variant == 0 and len(examples) < 8:
                k = int(differ.nonzero()[0])
                examples.append((hex(start + k), float(x[k]), float(reference[k]), float(y[k])))
    it.cases.append(
        {
            "case": f"{end} values",
            "elements": end,
            "stated": "fma(f, f*t, f)",
            "differences": {"fma(f, f*t, f)": wrong[0], "fma(f*f, t, f)": wrong[1], "f*(f*t) + f": wrong[2]},
        }
    )
    if wrong[0]:
        it.note(f"differ: {wrong}; first of chunks (bits, x, torch.log, formula): {examples}")
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -1.0, -1e-40], device=DEV)
    it.case("0, -0, inf, -inf, NaN, -1, -1e-40", torch.log(special), {"formula": lambda: logf(special)})


@item("cuBLAS rows by M", 40)
def item_cublas(it):
    """bf16 matmuls of the first and of the last M rows against those rows of the whole product; F.linear's calls."""
    if not CUDA:
        it.note("GPU only: small shapes, to run the path")
    for hidden, vocab in pick(((4096, 128256), (2048, 151936)), ((64, 256),)):
        whole = pick(8192, 64)
        h = randn(whole, hidden, dtype=BF)
        w = randn(vocab, hidden, dtype=BF, scale=0.02)
        d = randn(whole, vocab, dtype=BF, scale=1e-3)
        for name, left, right in ((f"h @ W.T ({hidden}, {vocab})", h, w.t()), (f"d @ W ({hidden}, {vocab})", d, w)):
            full = left @ right
            again = left @ right
            same = differences(full, again)
            table = {}
            for m in pick((1, 16, 64, 128, 256, 384, 512, 1000, 1024, 1536, 2048, 3000, 4096, 6144, 8191), (1, 16, 32)):
                first = differences(left[:m] @ right, full[:m])
                last = differences(left[whole - m :] @ right, full[whole - m :])
                table[m] = (first, last)
            equal = [m for m, (a, b) in table.items() if a == b == 0]
            unequal = {m: round(max(a, b) / (m * full.shape[1]), 6) for m, (a, b) in table.items() if a or b}
            it.note(
                f"{name}: repeated {'same bits' if same == 0 else f'{same} differ'}; "
                f"same bits as M={whole} at M in {equal}; share of elements that differ: {unequal}"
            )
            it.cases.append(
                {
                    "case": name,
                    "elements": full.numel(),
                    "stated": "repeatable",
                    "differences": {"repeatable": same},
                    "table": {str(k): v for k, v in table.items()},
                }
            )
            del full, again
        # The gradient of hidden as autograd forms it, and F.linear, are the same calls?
        if not it.late():
            rows = pick(1024, 16)
            x = h[:rows].clone().requires_grad_()
            y = F.linear(x, w)
            (dx,) = torch.autograd.grad(y, x, d[:rows])
            it.case(f"F.linear forward ({hidden}, {vocab}), M = {rows}", y.detach(), {"h @ W.t()": h[:rows] @ w.t()})
            it.case(f"F.linear's dX ({hidden}, {vocab}), M = {rows}", dx, {"d @ W": d[:rows] @ w})


def complex_formulas(a, b):
    ar, ai, br, bi = a.real.contiguous(), a.imag.contiguous(), b.real.contiguous(), b.imag.contiguous()
    ar, ai, br, bi = torch.broadcast_tensors(ar, ai, br, bi)
    re = {
        "re fma(ar,br,-(ai bi))": lambda: fma(ar, br, -(ai * bi)),
        "re fma(-ai,bi,ar br)": lambda: fma(-ai, bi, ar * br),
        "re unfused": lambda: ar * br - ai * bi,
    }
    im = {
        "im fma(ar,bi,ai br)": lambda: fma(ar, bi, ai * br),
        "im fma(ai,br,ar bi)": lambda: fma(ai, br, ar * bi),
        "im unfused": lambda: ar * bi + ai * br,
    }
    return re, im


@item("complex product", 20)
def item_complex(it):
    """A complex product (c10/util/complex.h) of a rotary embedding, and its gradient."""
    shapes = pick(
        shapes_of(
            "1x37x1x128x1 2x37x1x128x2 2x37x1x128x1 1x1x1x128x1 1x1x4x128x1 1x37x2x128x1 1x37x4x128x1 "
            "2x16x8x64x2 2x16x8x64x1 1x4096x40x128x1 1x4096x1x128x1 2x33x16x6x2 1x5x3x2x1 1x4096x8x128x1"
        ),
        ((1, 3, 1, 8, 1), (2, 3, 4, 8, 2)),
    )
    for b, s, heads, dim, fb in shapes:
        for unaligned in (False, True):
            x = randn(b, s, heads, dim, dtype=BF).float()
            if unaligned:  # heads dim transposed in memory, as q.view().transpose() might be
                x = randn(b, heads, s, dim).transpose(1, 2)
            freqs = torch.polar(torch.ones(fb, s, dim // 2, device=DEV), randn(fb, s, dim // 2) * 3)
            real = x.reshape(*x.shape[:-1], -1, 2).detach().requires_grad_()
            xc = torch.view_as_complex(real)
            out = torch.view_as_real(xc * freqs[:, :, None, :])
            g = randn(*out.shape)
            (dreal,) = torch.autograd.grad(out, real, g)
            label = f"x {[b, s, heads, dim // 2]}{' strided' if unaligned else ''} freqs {[fb, s, 1, dim // 2]}"
            re, im = complex_formulas(xc.detach(), freqs[:, :, None, :])
            it.case(label + " re", out[..., 0].detach(), re)
            it.case(label + " im", out[..., 1].detach(), im)
            gc = torch.view_as_complex(g)
            re, im = complex_formulas(gc, freqs[:, :, None, :].conj().resolve_conj())
            it.case(label + " grad re", dreal[..., 0], re)
            it.case(label + " grad im", dreal[..., 1], im)
        if it.late():
            break


def online(fused, divide=False):
    def step(x, mean, m2, c):
        d = x - mean
        if divide:
            mean = mean + d / c
        else:
            r = torch.ones_like(c) / c
            mean = fma(d, r, mean) if fused[0] else mean + d * r
        d2 = x - mean
        return mean, (fma(d, d2, m2) if fused[1] else m2 + d * d2)

    return step


def layer_norm_moments(x, fused=(True, True), mean_variant="fma(mA,nA,nB*mB)", m2_variant="fma(nB,cA*(d*d),M2A+M2B)"):
    """mean and variance of rows [R, N] as 128 threads with vectors of four find them."""
    rows, N = x.shape
    step = online(fused)
    vecs = N // 4
    mean, m2 = torch.zeros(rows, 128, device=DEV), torch.zeros(rows, 128, device=DEV)
    count = torch.zeros(128, device=DEV)
    for start in range(0, vecs, 128):
        k = min(128, vecs - start)
        chunk = x[:, start * 4 : (start + k) * 4].unflatten(1, (k, 4))
        for j in range(4):
            count[:k] += 1
            mean[:, :k], m2[:, :k] = step(
                chunk[:, :, j], mean[:, :k].clone(), m2[:, :k].clone(), count[:k].expand(rows, k)
            )

    def combine(mB, sB, cB, mA, sA, cA):
        d = mB - mA
        total = cA + cB
        coefficient = torch.where(
            total > 0, torch.ones_like(total) / torch.where(total > 0, total, torch.ones_like(total)), total
        )
        nA, nB = cA * coefficient, cB * coefficient
        nA, nB, cA_ = nA.expand_as(mA), nB.expand_as(mA), cA.expand_as(mA)
        if mean_variant == "fma(mA,nA,nB*mB)":
            m = fma(mA, nA, nB * mB)
        elif mean_variant == "fma(nB,mB,nA*mA)":
            m = fma(nB, mB, nA * mA)
        else:
            m = nA * mA + nB * mB
        if m2_variant == "fma(nB,cA*(d*d),M2A+M2B)":
            s = fma(nB, cA_ * (d * d), sA + sB)
        elif m2_variant == "fma(d*d,cA*nB,..)":
            s = fma(d * d, cA_ * nB, sA + sB)
        else:
            s = (sA + sB) + (d * d) * cA_ * nB
        empty = (total == 0).expand_as(m)
        return torch.where(empty, 0.0, m), torch.where(empty, 0.0, s), total

    mean, m2, count = mean.view(rows, 4, 32), m2.view(rows, 4, 32), count.view(4, 32)
    for width in (16, 8, 4, 2, 1):
        mean, m2, count = combine(
            mean[..., :width],
            m2[..., :width],
            count[:, :width],
            mean[..., width : 2 * width],
            m2[..., width : 2 * width],
            count[:, width : 2 * width],
        )
    mean, m2, count = mean[..., 0], m2[..., 0], count[..., 0]
    for width in (2, 1):
        mean, m2, count = combine(
            mean[:, :width],
            m2[:, :width],
            count[:width],
            mean[:, width : 2 * width],
            m2[:, width : 2 * width],
            count[width : 2 * width],
        )
    return mean[:, 0], m2[:, 0] / scalar(float(N))


@item("LayerNorm", 40)
def item_layer_norm(it):
    """native_layer_norm (layer_norm_kernel.cu): Welford in 128 threads with vectors of four elements."""
    rows, eps = pick(96, 5), 1e-5
    mean_names = ("fma(mA,nA,nB*mB)", "fma(nB,mB,nA*mA)", "unfused")
    m2_names = ("fma(nB,cA*(d*d),M2A+M2B)", "fma(d*d,cA*nB,..)", "unfused")

    def check(N, dtype):
        x = (randn(rows, N) * (0.2 + 3 * rand(rows, 1)) + randn(rows, 1)).to(dtype)
        w, b = (1 + 0.3 * randn(N)).to(dtype), randn(N).to(dtype)
        y, mean, rstd = torch.native_layer_norm(x, [N], w, b, eps)
        mean, rstd = mean.view(-1), rstd.view(-1)
        h = x.float()
        label = f"N={N} {str(dtype)[6:]}"
        if mean.dtype != FP:  # the CPU's mixed types
            mean, rstd = mean.float(), rstd.float()

        def moments(fused, mv, sv, which):
            m, v = layer_norm_moments(h, fused, mv, sv)
            return m if which == 0 else torch.rsqrt(v + scalar(eps))

        tried_mean = {"stated": lambda: moments((True, True), mean_names[0], m2_names[0], 0)}
        for f, mv in itertools.product((True, False), mean_names):
            if (f, mv) != (True, mean_names[0]):
                tried_mean[f"online {'fma' if f else 'mul,add'}, {mv}"] = lambda f=f, mv=mv: moments(
                    (f, True), mv, m2_names[0], 0
                )
        it.case(label + " mean", mean, tried_mean)
        tried = {"stated": lambda: moments((True, True), mean_names[0], m2_names[0], 1)}
        for f2, sv in itertools.product((True, False), m2_names):
            if (f2, sv) != (True, m2_names[0]):
                tried[f"online M2 {'fma' if f2 else 'mul,add'}, {sv}"] = lambda f2=f2, sv=sv: moments(
                    (True, f2), mean_names[0], sv, 1
                )
        it.case(label + " rstd", rstd, tried)

        M, S = mean[:, None], rstd[:, None]
        W, B = w.float().expand_as(h), b.float().expand_as(h)
        n = S * (h - M)
        it.case(
            label + " y, weight and bias",
            y,
            {
                "fma(w, rstd*(x-mean), b)": lambda: fma(W, n, B).to(dtype),
                "mul,add": lambda: (W * n + B).to(dtype),
                "fma(rstd*w, x-mean, b)": lambda: fma(S * W, h - M, B).to(dtype),
            },
        )
        yw = torch.native_layer_norm(x, [N], w, None, eps)[0]
        it.case(
            label + " y, weight",
            yw,
            {
                "w*(rstd*(x-mean))": lambda: (W * n).to(dtype),
                "(w*rstd)*(x-mean)": lambda: ((W * S) * (h - M)).to(dtype),
            },
        )
        yn = torch.native_layer_norm(x, [N], None, None, eps)[0]
        it.case(
            label + " y, neither",
            yn,
            {
                "rstd*(x-mean)": n.to(dtype),
                "fma(rstd, x, -(rstd*mean))": lambda: fma(S.expand_as(h), h, -(S * M).expand_as(h)).to(dtype),
            },
        )
        yb = torch.native_layer_norm(x, [N], None, b, eps)[0]
        fused, plain = fma(S.expand_as(h), h - M, B), n + B
        first = torch.arange(N, device=DEV) % 4 == 0
        it.case(
            label + " y, bias",
            yb,
            {
                "mul,add at every fourth, else fma": torch.where(first, plain, fused).to(dtype),
                "fma": fused.to(dtype),
                "mul,add": plain.to(dtype),
            },
        )

    for N in pick((64, 768, 1024, 1280, 4096, 5120), (64, 1280)):
        for dtype in (FP, BF, HF):
            check(N, dtype)
        if it.late():
            break


def group_norm_moments(x, threads, m2_fused=True, combine_fused=(True, True), divide=True):
    """mean and variance of the rows of [R, n]: Welford over `threads` lanes, then BlockReduce."""
    rows, n = x.shape
    step = online((True, m2_fused), divide)
    mean, m2, count = (
        torch.zeros(rows, threads, device=DEV),
        torch.zeros(rows, threads, device=DEV),
        torch.zeros(threads, device=DEV),
    )
    for start in range(0, n, threads):
        k = min(threads, n - start)
        count[:k] += 1
        mean[:, :k], m2[:, :k] = step(
            x[:, start : start + k], mean[:, :k].clone(), m2[:, :k].clone(), count[:k].expand(rows, k)
        )

    def combine(mA, sA, cA, mB, sB, cB):
        d = mB - mA
        total = cA + cB
        q = (cB / torch.where(total > 0, total, torch.ones_like(total))).expand_as(mA)
        cA_ = cA.expand_as(mA)
        m = fma(d, q, mA) if combine_fused[0] else mA + d * q
        product = (d * d) * cA_
        s = fma(q, product, sA + sB) if combine_fused[1] else (sA + sB) + product * q
        no_a, no_b = (cA == 0).expand_as(mA), (cB == 0).expand_as(mA)
        m, s = torch.where(no_b, mA, m), torch.where(no_b, sA, s)
        return torch.where(no_a, mB, m), torch.where(no_a, sB, s), total

    warps = threads // 32
    mean, m2, count = mean.view(rows, warps, 32), m2.view(rows, warps, 32), count.view(warps, 32)
    for w in (16, 8, 4, 2, 1):
        mean, m2, count = combine(
            mean[..., :w], m2[..., :w], count[:, :w], mean[..., w : 2 * w], m2[..., w : 2 * w], count[:, w : 2 * w]
        )
    mean, m2, count = mean[..., 0], m2[..., 0], count[..., 0]
    while mean.shape[1] > 1:
        w = mean.shape[1] // 2
        mean, m2, count = combine(mean[:, :w], m2[:, :w], count[:w], mean[:, w:], m2[:, w:], count[w:])
    return mean[:, 0], m2[:, 0] / scalar(float(n))


@item("GroupNorm", 40)
def item_group_norm(it):
    """native_group_norm (group_norm_kernel.cu): Welford in a warp or in 512 threads, then y by channel."""
    shapes = pick(
        shapes_of("2x32x64x8 2x64x256x32 2x320x1024x32 1x128x4096x32 3x48x35x3 16x32x1x8 16x2048x1x4 4x16x7x8"),
        ((2, 32, 16, 8), (3, 16, 1, 4)),
    )

    def check(N, C, HxW, G, dtype, eps, scale):
        x = (randn(N, C, HxW) * scale * (0.3 + rand(N, C, 1)) + scale * randn(N, C, 1)).to(dtype)
        w, b = (1 + 0.3 * randn(C)).to(dtype), randn(C).to(dtype)
        y, mean, rstd = torch.native_group_norm(x, w, b, N, C, HxW, G, eps)
        n = C // G * HxW
        rows = x.float().reshape(N * G, n)
        threads = 32 if n < 512 else 512
        eps_t = torch.tensor(eps, dtype=dtype, device=DEV).float()
        label = f"N,C,HxW,G={N},{C},{HxW},{G} {str(dtype)[6:]} eps={eps}"
        m, v = group_norm_moments(rows, threads)
        r = torch.rsqrt(v + eps_t)
        variants = {
            "stated": lambda: (m, v),
            "M2 mul,add": lambda: group_norm_moments(rows, threads, m2_fused=False),
            "combine mean mul,add": lambda: group_norm_moments(rows, threads, combine_fused=(False, True)),
            "combine M2 mul,add": lambda: group_norm_moments(rows, threads, combine_fused=(True, False)),
            "online by reciprocal": lambda: group_norm_moments(rows, threads, divide=False),
            "other thread count": lambda: group_norm_moments(rows, 256),
        }
        store = mean.dtype  # the dtype of x in 2.11
        it.case(label + " mean", mean.reshape(-1), {k: (lambda f=f: f()[0].to(store)) for k, f in variants.items()})
        by_rstd = {k: (lambda f=f: torch.rsqrt(f()[1] + eps_t).to(store)) for k, f in variants.items()}
        by_rstd["eps not rounded"] = lambda: torch.rsqrt(v + scalar(eps)).to(store)
        it.case(label + " rstd", rstd.reshape(-1), by_rstd)
        it.note(f"{label}: mean and rstd come as {store}") if N == 2 and HxW == 64 else None

        def per_channel(t):
            return t.view(N, G, 1).expand(N, G, C // G).reshape(N, C)

        def result(rounded, b_fused, y_fused):
            # `rounded`: mean and rstd are stored in the dtype, as torch 2.11 does. torch 2.13 stores fp32.
            mm, rr = (m.to(dtype).float(), r.to(dtype).float()) if rounded else (m, r)
            M, S = per_channel(mm), per_channel(rr)
            W, B = w.float().expand(N, C), b.float().expand(N, C)
            X = x.float()
            if HxW == 1:
                X = X[..., 0]
                t = (X - M) * S
                out = (fma(t, W, B) if y_fused else t * W + B)[..., None]
            else:
                a = S * W
                bb = fma(-a, M, B) if b_fused else B - a * M
                A, BB = a[..., None].expand_as(X), bb[..., None].expand_as(X)
                out = fma(A, X, BB) if y_fused else A * X + BB
            return out.to(dtype)

        names = {
            "2.11: mean, rstd rounded; b two roundings; y fma": (True, False, True),
            "mean, rstd fp32; b two roundings; y fma": (False, False, True),
            "rounded; b fma; y fma": (True, True, True),
            "fp32; b fma; y fma": (False, True, True),
            "rounded; b two; y mul,add": (True, False, False),
            "fp32; b two; y mul,add": (False, False, False),
            "rounded; b fma; y mul,add": (True, True, False),
        }
        it.case(label + " y", y, {k: (lambda a=a: result(*a)) for k, a in names.items()})
        bare = torch.native_group_norm(x, None, None, N, C, HxW, G, eps)[0]

        def plain(rounded):
            mm, rr = (m.to(dtype).float(), r.to(dtype).float()) if rounded else (m, r)
            return ((rows - mm[:, None]) * rr[:, None]).view(N, C, HxW).to(dtype)

        it.case(
            label + " y, no affine",
            bare,
            {"rounded (x-mean)*rstd": lambda: plain(True), "fp32 (x-mean)*rstd": lambda: plain(False)},
        )

    for N, C, HxW, G in shapes:
        for dtype in (FP, BF, HF):
            # eps such that its rounding to the dtype shows: small variances
            for eps, scale in ((1e-5, 1.0), (1e-3, 0.05)):
                check(N, C, HxW, G, dtype, eps, scale)
        if it.late():
            break


@item("F.cross_entropy under autocast, trace", 10)
def item_autocast(it):
    """Which operations run, and in which dtypes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Trace(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, arguments=(), kwargs=None):
            out = func(*arguments, **(kwargs or {}))
            flat = torch.utils._pytree.tree_leaves((arguments, kwargs))
            ins = ",".join(
                str(a.dtype)[6:]
                if isinstance(a, torch.Tensor)
                else ""
                if not isinstance(a, torch.dtype)
                else f"dtype={str(a)[6:]}"
                for a in flat
            )
            outs = ",".join(
                str(a.dtype)[6:] for a in torch.utils._pytree.tree_leaves(out) if isinstance(a, torch.Tensor)
            )
            self.seen.append(f"{str(func).replace('aten.', '')}({ins.strip(',')})->{outs}")
            return out

    target = torch.tensor([1, 2, -100, 5], device=DEV)
    with torch.autograd.set_multithreading_enabled(False):
        for name, dtype, cast in (
            ("no autocast, bf16", BF, None),
            ("autocast bf16, bf16 logits", BF, BF),
            ("autocast fp16, fp16 logits", HF, HF),
            ("autocast bf16, fp32 logits", FP, BF),
            ("no autocast, fp16", HF, None),
            ("autocast fp16, bf16 logits", BF, HF),
        ):
            logits = randn(4, 11, dtype=dtype).requires_grad_()
            with Trace() as trace:
                if cast is None:
                    loss = F.cross_entropy(logits, target)
                else:
                    with torch.autocast(DEV.type, dtype=cast):
                        loss = F.cross_entropy(logits, target)
                forward = len(trace.seen)
                loss.backward()
            it.note(
                f"{name}: loss {str(loss.dtype)[6:]}; forward {trace.seen[:forward]}; backward {trace.seen[forward:]}"
            )
        for name, function in (
            ("softmax", lambda t: F.softmax(t, -1)),
            ("log_softmax", lambda t: F.log_softmax(t, -1)),
            ("kl_div", lambda t: F.kl_div(t, t.detach().exp(), reduction="sum")),
            ("layer_norm", lambda t: F.layer_norm(t, (11,))),
        ):
            logits = randn(4, 11, dtype=BF).requires_grad_()
            with Trace() as trace, torch.autocast(DEV.type, dtype=BF):
                function(logits)
            it.note(f"autocast bf16, {name}: {trace.seen}")


@item("full sum", 45)
def item_full_sum(it):
    """Sum and mean of a whole tensor (Reduce.cuh), beyond 2 GiB too, where TensorIterator splits it."""
    v16 = 512 * 16 * SMS * 4  # where min(4 * SMs, ceil(v / 16)) changes hands
    v256 = 512 * 256 * SMS * 4  # from here ceil(v / 256) blocks
    sizes = pick(
        (
            100,
            127,
            128,
            1000,
            8192,
            512 * 255,
            512 * 255 + 4,
            512 * 256 + 4,
            1_000_003,
            v16 - 4,
            v16 + 4,
            v256,
            v256 + 4,
            4096 * 128256,
            2**29,
            2**29 + 4,
            2**29 + 1026,
            8192 * 128256,
            2**31 + 2**29 + 12,
        ),
        (100, 1000, 4099),
    )

    def check(n):
        x = rand(n) * 2 - 0.7  # a mean, so that the last bits of big partial sums count
        power = n <= 2**29 + 2000
        it.case(
            f"fp32 n={n}",
            x.sum(),
            {
                "stated": lambda: full_sum(x),
                "vec 8": lambda: full_sum(x, 8),
                **({"one block": lambda: full_sum(x, share_blocks=False)} if n < 10**7 else {}),
                "shuffles by 1, 2, 4": lambda: full_sum(x, lanes_tree=neighbours),
                **({"not halved": lambda: full_sum(x, halve=False)} if n > 2**29 else {}),
            },
            power=power,
        )
        if n <= 2**29 and n > 128:
            it.case(
                f"fp32 n={n - 1}, from the second element",
                x[1:].sum(),
                {"stated": lambda: full_sum(x[1:], offset=1), "no shift": lambda: full_sum(x[1:])},
                power=n < 10**8,
            )
            mean = x.mean()
            it.case(
                f"fp32 mean n={n}",
                mean,
                {"sum * (1/float(n))": lambda: full_sum(x) * (torch.ones((), device=DEV) / scalar(float(n)))},
                power=False,
            )

    for n in sizes:
        if it.late():
            break
        try:
            check(n)
        except torch.OutOfMemoryError:
            it.note(f"n={n}: out of memory, left out")
            torch.cuda.empty_cache()

    def check_bf16(n):
        x = (rand(n) * 2 - 0.7).to(BF)
        it.case(
            f"bf16 n={n}, sum to fp32",
            x.sum(dtype=FP),
            {
                "vec 8": lambda: full_sum(x, 8),
                "vec 4": lambda: full_sum(x, 4),
                "cast first": lambda: full_sum(x.float(), 4),
            },
            power=n < 2**29,
        )
        it.case(f"bf16 n={n}, sum", x.sum(), {"vec 8": lambda: full_sum(x, 8).to(BF)}, power=False)

    for n in pick((1000, 131072 * 4, 512 * 16 * 528 + 8, 30_000_000, 4096 * 128256, 2**30 + 8), (1000, 4104)):
        if it.late():
            break
        check_bf16(n)
    if CUDA:
        torch.cuda.empty_cache()


@item("row sums of 16 bits, and odd rows", 25)
def item_row_sums(it):
    """Sums of rows by Reduce.cuh: vectors of 16 bytes, rows that start off their boundary."""
    shapes = pick(
        shapes_of(
            "1x4096 3x1000 16x128 16x136 64x768 64x1024 256x5120 4096x4096 8x127 5x64 7x1001 33x2051 "
            "128x151936 44x151936 2x200000 100x50257 600x131072 128x128256 12x262144"
        ),
        ((3, 1000), (5, 64), (7, 1001)),
    )

    def check(rows, n, dtype):
        x = (rand(rows, n) * 2 - 0.7).to(dtype)
        vec, other = (4, 8) if dtype == FP else (8, 4)
        label = f"{rows}x{n} {str(dtype)[6:]}"
        options = {
            f"vec {vec}": lambda: row_sums(x, vec),
            f"vec {other}": lambda: row_sums(x, other),
            "vec 4 of a cast copy": lambda: row_sums(x.float(), 4),
            "one block a row": lambda: row_sums(x, vec, share_blocks=False),
            "shuffles by 1, 2, 4": lambda: row_sums(x, vec, lanes_tree=neighbours),
        }
        if dtype == FP:
            options.pop("vec 4 of a cast copy")
        it.case(label + " sum to fp32", x.sum(-1, dtype=FP), options)
        if dtype != FP:
            it.case(
                label + " sum",
                x.sum(-1),
                {
                    f"vec {vec}, rounded": lambda: row_sums(x, vec).to(dtype),
                    f"vec {other}, rounded": lambda: row_sums(x, other).to(dtype),
                },
            )
            factor = scalar(float(rows)) / scalar(float(rows * n))
            it.case(
                label + " mean to fp32",
                x.mean(-1, dtype=FP),
                {
                    f"vec {vec}, * factor": lambda: row_sums(x, vec) * factor,
                    f"vec {other}": lambda: row_sums(x, other) * factor,
                },
            )

    for rows, n in shapes:
        if it.late():
            break
        for dtype in (BF, HF, FP):
            check(rows, n, dtype)
    # tests/aten_model.py has these: a check of this file's column_sums.
    for rows, n in pick(((37, 128), (1000, 4096), (8192, 1024)), ((9, 64),)):
        x = (rand(rows, n) * 2 - 0.7).to(BF)
        it.case(f"columns {rows}x{n} bf16 to fp32", x.sum(0, dtype=FP), {"known": column_sums(x)}, power=False)


@item("softmax forward", 50)
def item_softmax(it):
    """softmax and log_softmax (SoftMax.cu, PersistentSoftmax.cuh): which kernel runs, and its reduction order."""
    plan = pick(
        (
            (
                FP,
                FP,
                numbers(
                    "1 7 100 128 1000 2048 2049 4100 9216 9217 9220 12252 12255 12256 16384 32000 50257 128256 151936"
                ),
            ),
            (BF, BF, (100, 1024, 2048, 2049, 4097, 9216, 9217, 9224, 24504, 24512, 32001, 128256)),
            (HF, FP, (512, 1024, 1025, 1032, 2048, 9216, 24504, 24512, 50257)),
        ),
        ((FP, FP, (7, 100, 2049, 9220)), (BF, BF, (100, 2049, 9217)), (HF, FP, (64, 1025))),
    )

    def check(in_dtype, out_dtype, V):
        rows = pick(48 if out_dtype == FP else min(768, 2**26 // V), 9)
        # Few large terms: s in [1, 2) for most rows, where a last bit of s shows in the quotients.
        x = (randn(rows, V) * 1.5 - 3).to(in_dtype)
        x[:, V // 3] = 9.0 + (rand(rows) * 0.5).to(in_dtype)
        x[::3] = (randn(x[::3].shape[0], V) * 3).to(in_dtype)
        if not CUDA and in_dtype == HF:
            actual, actual_log = F.softmax(x.float(), -1), F.log_softmax(x.float(), -1)
        else:
            dtype = out_dtype if out_dtype != in_dtype else None
            actual, actual_log = F.softmax(x, -1, dtype=dtype), F.log_softmax(x, -1, dtype=dtype)
        h = x.float()
        m = h.amax(-1, keepdim=True)
        e = torch.exp(h - m)
        expected = forward_kind(in_dtype, out_dtype, V)
        label = f"{str(in_dtype)[6:]}->{str(out_dtype)[6:]} V={V}"
        it.case(
            label + " softmax", actual, sum_candidates(expected, V, lambda: e, lambda s: (e / s[:, None]).to(out_dtype))
        )
        s = softmax_sum(e, expected[0], vec=expected[1] or 4)
        it.case(
            label + " log_softmax",
            actual_log,
            {
                "(x - m) - log(s)": lambda: ((h - m) - torch.log(s)[:, None]).to(out_dtype),
                "x - (m + log(s))": lambda: (h - (m + torch.log(s)[:, None])).to(out_dtype),
            },
        )

    for in_dtype, out_dtype, lengths in plan:
        for V in lengths:
            if it.late():
                break
            check(in_dtype, out_dtype, V)
    if CUDA:
        # bf16 with dtype=float32: a cast of its own, then the fp32 kernels; and an unaligned fp32 base (a view).
        for V in (9220, 1024, 4100, 50257):
            x = randn(40, V, dtype=BF, scale=2)
            it.case(
                f"bf16 with dtype=fp32 V={V}",
                F.softmax(x, -1, dtype=FP),
                {"softmax(x.float())": F.softmax(x.float(), -1)},
                power=False,
            )
        x = randn(33 * 9220 + 1, scale=2)[1:].view(33, 9220)
        e = torch.exp(x - x.amax(-1, keepdim=True))

        def unaligned(vec, kind):
            s = block_tree(loop_threads(e, 1024, 4, 1)) if kind == "loop" else softmax_sum(e, kind, vec=4)
            return e / s[:, None]

        it.case(
            "fp32 V=9220, base one element off",
            F.softmax(x, -1),
            {
                "loop, shift 1": lambda: unaligned(4, "loop"),
                "smem4": lambda: unaligned(4, "smem"),
                "reg": lambda: unaligned(4, "reg"),
            },
        )


@item("softmax and log_softmax backward", 50)
def item_softmax_backward(it):
    """The gradients of softmax and log_softmax (SoftMax.cu): kernel, reduction order, FMA."""
    plan = pick(
        (
            (
                FP,
                numbers("8 100 1000 1024 1025 1028 1031 1032 2055 2056 4096 9217 12268 12272 32000 50257 128256"),
            ),
            (BF, (100, 1024, 1025, 1032, 2049, 4096, 16384, 24536, 24544, 50257, 128256)),
        ),
        ((FP, (8, 1025, 1028)), (BF, (100, 1032))),
    )

    def check(dtype, V):
        rows = pick(40 if dtype == FP else min(512, 2**25 // V), 5)
        g, y = randn(rows, V, dtype=dtype), (randn(rows, V) * 0.5).to(dtype)
        kind, vec, threads = backward_kind(dtype.itemsize, V)
        tree, other = (sequential_tree, block_tree) if kind == "loop" else (block_tree, sequential_tree)
        label = f"{str(dtype)[6:]} V={V} ({kind}{vec or ''}, {threads} threads)"
        G, Y = g.float(), y.float()
        E = torch.exp(Y)
        actual = torch.ops.aten._log_softmax_backward_data(g, y, -1, dtype)

        def finish_log(s):
            return fma(-s[:, None], E, G).to(dtype)

        options = sum_candidates((kind, vec), V, lambda: G, finish_log, threads, tree, other)
        options["unfused"] = lambda: (G - E * softmax_sum(G, kind, threads, vec or 4, tree=tree)[:, None]).to(dtype)
        it.case("log_softmax " + label, actual, options)
        actual = torch.ops.aten._softmax_backward_data(g, y, -1, dtype)
        t = (g * y).float()

        def finish(s):
            return fma(-s[:, None], Y, t).to(dtype)

        options = sum_candidates((kind, vec), V, lambda: t, finish, threads, tree, other)
        options["unfused"] = lambda: (t - Y * softmax_sum(t, kind, threads, vec or 4, tree=tree)[:, None]).to(dtype)
        options["g*y not rounded"] = lambda: finish(softmax_sum(G * Y, kind, threads, vec or 4, tree=tree))
        it.case("softmax " + label, actual, options)

    for dtype, lengths in plan:
        for V in lengths:
            if it.late():
                break
            check(dtype, V)
    if CUDA:

        def check_half(V):
            rows = 200
            g, y = randn(rows, V), randn(rows, V) * 0.5
            kind, vec, threads = backward_kind(4, V)
            tree = sequential_tree if kind == "loop" else block_tree
            actual = torch.ops.aten._softmax_backward_data(g, y, -1, HF)
            t = g * y
            it.case(
                f"softmax fp16<-fp32 V={V} ({kind}{vec or ''})",
                actual,
                sum_candidates(
                    (kind, vec),
                    V,
                    lambda: t,
                    lambda s: fma(-s[:, None], y, t).to(HF),
                    threads,
                    tree,
                    block_tree if kind == "loop" else sequential_tree,
                ),
            )

        # fp32 gradients, dx in fp16: the vectors are those of fp32.
        for V in (1000, 1028, 4096, 9217, 50_257):
            if it.late():
                break
            check_half(V)


def orders(edges, rounding=lambda t: t):
    """Every order in which edges may be added up, one after the other (the first two commute): name -> thunk."""
    found = {}
    for order in itertools.permutations(edges):
        if len(order) > 1 and list(edges).index(order[0]) > list(edges).index(order[1]):
            continue

        def total(order=order):
            value = edges[order[0]]
            for name in order[1:]:
                value = rounding(value.float() + edges[name].float())
            return value

        found[" + ".join(order)] = total
    return found


@item("Cohere LayerNorm edges", 20)
def item_cohere(it):
    """The gradients of transformers' CohereLayerNorm: in which order autograd adds those of its input."""

    def cohere(x, w, eps=1e-5):
        dtype = x.dtype
        h = x.to(torch.float32)
        mean = h.mean(-1, keepdim=True)
        variance = (h - mean).pow(2).mean(-1, keepdim=True)
        h = (h - mean) * torch.rsqrt(variance + eps)
        return (w.to(torch.float32) * h).to(dtype)

    forms = {
        "no residual": (False, lambda x, w, k: cohere(x, w)),
        "x + norm(x)": (True, lambda x, w, k: x + cohere(x, w)),
        "norm(x) + x": (True, lambda x, w, k: cohere(x, w) + x),
        "x + k * norm(x) (a layer between)": (True, lambda x, w, k: x + k * cohere(x, w)),
    }

    def check(shape, dtype, wdtype, name, residual, form, leaf):
        base = (randn(*shape) * 1.7 + 0.3).to(dtype)
        w = (1 + 0.3 * randn(*shape[-2:] if len(shape) == 4 else shape[-1:])).to(wdtype).requires_grad_()
        k = randn(*shape, dtype=dtype)
        start = base.clone().requires_grad_()
        x = start if leaf else start * 1.0
        out = form(x, w, k)
        g = randn(*shape, dtype=out.dtype)
        dx, dw = torch.autograd.grad(out, (start, w), g)
        with torch.no_grad():
            N = shape[-1]
            gn = g if "k *" not in name else g * k
            g32 = gn.float()
            h = base.float()
            c = h - h.mean(-1, keepdim=True)
            v = c.pow(2).mean(-1, keepdim=True)
            r = torch.rsqrt(v + 1e-5)
            n = c * r
            u = g32 * w.float()
            one = torch.ones((), device=DEV) / scalar(float(N))
            un = u * r
            a = known_rows((-un).reshape(-1, N)).view(*shape[:-1], 1)
            dr = known_rows((u * c).reshape(-1, N)).view(*shape[:-1], 1)
            p = ((-0.5 * dr) * (r * r * r)) * one
            q = p * (2.0 * c)
            b = known_rows((-q).reshape(-1, N)).view(*shape[:-1], 1)
            M = ((a + b) * one).expand(shape)
            label = f"{list(shape)} x {str(dtype)[6:]}, w {str(wdtype)[6:]}, {name}, {'leaf' if leaf else 'inside'}"
            if dtype == FP:
                edges = {"res": g} if residual else {}
                edges.update(un=un, q=q, M=M)
                options = orders(edges)
                if residual:
                    options["res + ((un + q) + M)"] = lambda: g + ((un + q) + M)
            else:
                inner = orders({"un": un, "q": q, "M": M})
                if residual:
                    options = {
                        f"r(res + r({key}))": (lambda f=f: (g.float() + f().to(dtype).float()).to(dtype))
                        for key, f in inner.items()
                    }
                else:
                    options = {f"r({key})": (lambda f=f: f().to(dtype)) for key, f in inner.items()}
            it.case("dx " + label, dx, options)
            if leaf and name == "no residual":
                flat = (g32 * n).reshape(-1, w.numel())
                it.case(
                    "dw " + label,
                    dw,
                    {"column sum of g*n": lambda: known_columns(flat).view(w.shape).to(wdtype)},
                    power=False,
                )

    for shape in pick(((3, 17, 512), (2, 64, 4096), (4, 8, 16, 128)), ((2, 3, 64),)):
        for dtype, wdtype in ((FP, FP), (BF, BF), (HF, HF), (BF, FP)):
            for name, (residual, form) in forms.items():
                for leaf in (True, False):
                    check(shape, dtype, wdtype, name, residual, form, leaf)
        if it.late():
            break


@item("T5LayerNorm, two edges", 15)
def item_t5(it):
    """The gradients of transformers' T5LayerNorm: two edges into the input, each rounded to its dtype."""

    def t5(x, w, eps=1e-6):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        n = x * torch.rsqrt(variance + eps)
        if w.dtype in (HF, BF):
            n = n.to(w.dtype)
        return w * n

    def check(shape, dtype, wdtype, name):
        base = (randn(*shape) * 1.7).to(dtype)
        x = base.clone().requires_grad_()
        w = (1 + 0.3 * randn(shape[-1])).to(wdtype).requires_grad_()
        y = t5(x, w)
        out = y if name == "no residual" else x + y if name.startswith("x") else y + x
        g = randn(*shape, dtype=out.dtype)
        dx, dw = torch.autograd.grad(out, (x, w), g)
        with torch.no_grad():
            N, h = shape[-1], base.float()
            r = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
            gy = g.to(y.dtype)
            n16 = h * r if wdtype == FP else (h * r).to(wdtype)
            gn = (gy * w.detach()).to(n16.dtype).float()
            gr = known_rows((gn * h).reshape(-1, N)).view(*shape[:-1], 1)
            p = ((-0.5 * gr) * (r * r * r)) * (torch.ones((), device=DEV) / scalar(float(N)))
            e1, e2 = gn * r, p * (2.0 * h)
            edges = {} if name == "no residual" else {"res": g.to(dtype)}
            rounded = {**edges, "n": e1.to(dtype), "v": e2.to(dtype)}
            options = {f"rounded edges: {k}": f for k, f in orders(rounded, lambda t: t.to(dtype)).items()}
            for k in list(options):  # res, n, v is the order of the graph
                if k not in ("rounded edges: res + n + v", "rounded edges: n + v"):
                    options[k] = options.pop(k)
            if dtype != FP:
                one = (e1 + e2).to(dtype)
                options["Llama's: one edge, rounded once"] = one if not edges else (g.float() + one.float()).to(dtype)
            it.case(f"dx {list(shape)} x {str(dtype)[6:]} w {str(wdtype)[6:]} {name}", dx, options)
            product = (gy * n16).to(torch.promote_types(gy.dtype, n16.dtype))
            it.case(
                f"dw {list(shape)} x {str(dtype)[6:]} w {str(wdtype)[6:]} {name}",
                dw,
                {
                    "column sum of g*n, rounded": lambda: (
                        known_columns(product.reshape(-1, N)).to(product.dtype).to(wdtype)
                    )
                },
                power=False,
            )

    for shape in pick(((4, 33, 512), (2, 64, 1024), (1, 7, 4096)), ((2, 3, 64),)):
        for dtype, wdtype in ((BF, BF), (HF, HF), (FP, FP), (BF, FP), (FP, BF)):
            for name in ("no residual", "x + norm(x)", "norm(x) + x"):
                check(shape, dtype, wdtype, name)
        if it.late():
            break


@item("vision rotary's gradient", 10)
def item_vision(it):
    """apply_rotary_pos_emb_vision of transformers, and the order in which autograd adds its gradient."""

    def rotate_half(x):
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    def check(tokens, heads, dim, dtype, table):
        q = randn(tokens, heads, dim, dtype=dtype).requires_grad_()
        angle = randn(tokens, dim // 2) * 5
        cos, sin = torch.cat((angle, angle), -1).cos().to(table), torch.cat((angle, angle), -1).sin().to(table)
        c, s = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
        qf = q.float()
        out = ((qf * c) + (rotate_half(qf) * s)).to(dtype)
        g = randn(tokens, heads, dim, dtype=dtype)
        g[::5] = 0.0
        g[1::5, :, ::3] = -0.0
        (dq,) = torch.autograd.grad(out, q, g)
        with torch.no_grad():
            label = f"{[tokens, heads, dim]} {str(dtype)[6:]} tables {str(table)[6:]}"
            x = q.detach().float()
            it.case(
                "y " + label,
                out.detach(),
                {
                    "r(q*cos + rot*sin)": ((x * c) + (rotate_half(x) * s)).to(dtype),
                    "fma": lambda: fma(*torch.broadcast_tensors(x, c), rotate_half(x) * s).to(dtype),
                },
            )
            G = g.float()
            P, half = G * s, dim // 2
            zero = torch.zeros_like(P[..., :half])
            negated = torch.cat((zero, -P[..., :half]), -1)
            other = torch.cat((P[..., half:], zero), -1)
            rotated = torch.cat((P[..., half:], -P[..., :half]), -1)
            edge = G * c
            it.case(
                "dq " + label,
                dq,
                {
                    "r((pad(-first) + pad(second)) + g*cos)": ((negated + other) + edge).to(dtype),
                    "(g*cos + pad(-first)) + pad(second)": ((edge + negated) + other).to(dtype),
                    "g*cos + rotated, no +0": (edge + rotated).to(dtype),
                    "edges rounded": (edge.to(dtype).float() + (negated + other).to(dtype).float()).to(dtype),
                    "fma": lambda: fma(*torch.broadcast_tensors(G, c), rotated).to(dtype),
                },
            )

    for tokens, heads, dim in pick(((577, 16, 80), (1024, 3, 64), (33, 1, 128)), ((5, 2, 8),)):
        for dtype in (BF, HF, FP):
            for table in (FP, dtype):
                check(tokens, heads, dim, dtype, table)


@item("DyT gradients", 20)
def item_dyt(it):
    """Dynamic tanh, gamma * tanh(alpha * x) + beta: its gradients, that of the scalar alpha too."""

    def check(shape, dtype, repeat):
        x = randn(*shape, dtype=dtype, scale=1.5).requires_grad_()
        alpha = torch.tensor([0.5 + 0.1 * repeat], device=DEV).to(dtype).requires_grad_()
        gamma, beta = (
            (1 + 0.2 * randn(shape[-1])).to(dtype).requires_grad_(),
            randn(shape[-1], dtype=dtype).requires_grad_(),
        )
        y = gamma * torch.tanh(x * alpha) + beta
        g = randn(*shape, dtype=dtype)
        dx, dalpha, dgamma, dbeta = torch.autograd.grad(y, (x, alpha, gamma, beta), g)
        with torch.no_grad():
            t = torch.tanh(x * alpha)
            t1 = (g.float() * gamma.float()).to(dtype)
            if dtype == FP:
                fused = fma(-t, t, torch.ones_like(t))
                dts = {"t'*fma(-t,t,1)": t1 * fused, "unfused": t1 * (1.0 - t * t)}
            else:
                tt = (t.float() * t.float()).to(dtype)
                one = (1.0 - tt.float()).to(dtype)
                t32 = t.float()
                dts = {
                    "r(t'*r(1-r(t*t)))": (t1.float() * one.float()).to(dtype),
                    "r(t'*(1-t*t)) in fp32": (t1.float() * (1.0 - t32 * t32)).to(dtype),
                    "r(t'*fma(-t,t,1))": (t1.float() * fma(-t32, t32, torch.ones_like(t32))).to(dtype),
                }
            label = f"{list(shape)} {str(dtype)[6:]} #{repeat}"
            it.case("tanh_backward " + label, torch.ops.aten.tanh_backward(t1, t), dts)
            dt = torch.ops.aten.tanh_backward(t1, t)
            product = dt * x
            vec = 4 if dtype == FP else 8
            flat = product.reshape(-1)
            it.case(
                "dalpha " + label,
                dalpha,
                {
                    f"full sum, vec {vec}": lambda: full_sum(flat, vec).to(dtype).view(1),
                    f"full sum, vec {12 - vec}": lambda: full_sum(flat, 12 - vec).to(dtype).view(1),
                    "columns, then a row": lambda: row_sums(
                        column_sums(product.reshape(-1, shape[-1])).to(dtype).view(1, -1), vec
                    ).to(dtype),
                },
            )
            it.case(
                "the same sum to fp32 " + label,
                product.sum(dtype=FP),
                {
                    f"full sum, vec {vec}": lambda: full_sum(flat, vec),
                    f"vec {12 - vec}": lambda: full_sum(flat, 12 - vec),
                },
            )
            it.case("dx " + label, dx, {"r(dt*alpha)": (dt.float() * alpha.float()).to(dtype)}, power=False)
            rows = (g * t).reshape(-1, shape[-1])
            it.case(
                "dgamma " + label, dgamma, {"column sum of r(g*t)": lambda: known_columns(rows).to(dtype)}, power=False
            )
            it.case(
                "dbeta " + label,
                dbeta,
                {"column sum of g": lambda: known_columns(g.reshape(-1, shape[-1])).to(dtype)},
                power=False,
            )

    for shape in pick(((2, 64, 1024), (8, 512, 1024), (4096, 4096), (3, 5, 768)), ((2, 3, 64),)):
        for dtype in (FP, BF):
            for repeat in range(pick(6, 2)):
                check(shape, dtype, repeat)
        if it.late():
            break


@item("kl_div", 30)
def item_kl(it):
    """F.kl_div (ATen/native/Loss.cpp): values, reductions, gradients of input and target."""

    def check(rows, V, idt, tdt, log_target):
        i = F.log_softmax(randn(rows, V, scale=2), -1).to(idt).requires_grad_()
        t0 = F.log_softmax(randn(rows, V, scale=2), -1)
        t0 = (t0 if log_target else t0.exp()).to(tdt)
        if not log_target:
            t0[:, ::7] = 0.0
        out_dtype = torch.promote_types(idt, tdt)
        label = f"[{rows},{V}] {str(idt)[6:]},{str(tdt)[6:]} log_target={log_target}"
        vec = 4 if out_dtype == FP else 8

        def op(f, *operands):
            return f(*(o.float() for o in operands)).to(out_dtype)

        with torch.no_grad():
            if log_target:
                et = torch.exp(t0)
                point = op(torch.mul, et, op(torch.sub, t0, i))
                fused = None
            else:
                T = t0.float()
                xl = torch.where(T == 0, torch.zeros_like(T), T * torch.log(T)).to(t0.dtype)
                ti = op(torch.mul, t0, i)
                point = op(torch.sub, xl, ti)
                fused = fma(-T, i.float(), xl.float()).to(out_dtype)
                rounded_log = torch.log(T).to(t0.dtype).float()
                xl16 = torch.where(T == 0, torch.zeros_like(T), T * rounded_log).to(t0.dtype)
        none = F.kl_div(i, t0, reduction="none", log_target=log_target)
        options = {"stated": point}
        if fused is not None:
            options["fma(-t, i, xlogy)"] = fused
            options["log rounded to the dtype too"] = op(torch.sub, xl16, ti)
            it.case("xlogy " + label, torch.xlogy(t0, t0), {"r(t*logf(t))": xl, "r(t*r(logf(t)))": xl16})
        it.case("none " + label, none.detach(), options)
        flat = none.detach().reshape(-1)
        sums = {
            "sum": scalar(1.0),
            "batchmean": torch.ones((), device=DEV) / scalar(float(rows)),
            "mean": torch.ones((), device=DEV) / scalar(float(rows * V)),
        }

        def reduced(reduction, factor):
            loss = F.kl_div(i, t0, reduction=reduction, log_target=log_target)

            def total(v):
                s = full_sum(flat, v)
                if reduction == "mean":
                    return (s * factor).to(out_dtype)
                s = s.to(out_dtype)
                return s if reduction == "sum" else (s.float() * factor).to(out_dtype)

            it.case(
                f"{reduction} {label}",
                loss.detach(),
                {f"vec {vec}": lambda: total(vec), f"vec {12 - vec}": lambda: total(12 - vec)},
            )
            upstream = torch.tensor(1.37, device=DEV).to(out_dtype)
            (di,) = torch.autograd.grad(loss, i, upstream)
            with torch.no_grad():
                g = upstream if reduction == "sum" else (upstream.float() * factor).to(out_dtype)
                if log_target:
                    stated = (-op(torch.mul, g, et)).to(idt)
                    name, other = "neg(g*exp(t))", {}
                else:
                    stated = op(torch.mul, -g, t0).to(idt)
                    name, other = "(-g)*t", {}
                other["divided, not by reciprocal"] = lambda: (
                    -op(
                        torch.mul,
                        (
                            upstream.float()
                            / (
                                1
                                if reduction == "sum"
                                else scalar(float(rows if reduction == "batchmean" else rows * V))
                            )
                        ).to(out_dtype),
                        et if log_target else t0,
                    )
                ).to(idt)
                it.case(f"di {reduction} {label}", di, {name: stated, **other})

        for reduction, factor in sums.items():
            reduced(reduction, factor)
        # A target that needs a gradient.
        t = t0.clone().requires_grad_()
        g = randn(rows, V, dtype=out_dtype)
        (dt,) = torch.autograd.grad(F.kl_div(i, t, reduction="none", log_target=log_target), t, g)
        with torch.no_grad():
            if log_target:
                past = op(torch.mul, g, et).to(tdt)
                d_exp = op(torch.mul, g, op(torch.sub, t0, i)).to(tdt)
                through = (d_exp.float() * et.float()).to(tdt)
                options = {
                    "g*exp(t) + (g*(t-i))*exp(t)": (past.float() + through.float()).to(tdt),
                    "factored": (d_exp.float() * et.float() + past.float()).to(tdt),
                }
                if tdt == FP:
                    options.pop("factored")
            else:
                gt = g.to(tdt)
                m = op(torch.mul, -g, i).to(tdt)
                first = torch.xlogy(gt, t0).masked_fill((t0 == 0) & (t0 <= 0), 0.0)
                second = ((gt.float() * t0.float()).to(tdt).float() / t0.float()).to(tdt)
                options = orders({"xlogy self": first, "xlogy other": second, "mul": m}, lambda v: v.to(tdt))
            it.case(f"dt {label}", dt, options)

    for rows, V in pick(((64, 1000), (256, 32000), (63, 50257), (1024, 128256)), ((3, 40),)):
        for idt, tdt in ((FP, FP), (BF, BF), (BF, FP)):
            for log_target in (True, False):
                if it.late():
                    return
                check(rows, V, idt, tdt, log_target)
        if CUDA:
            torch.cuda.empty_cache()


@item("TRL selective_log_softmax and entropy", 45)
def item_trl(it):
    """TRL's selective_log_softmax and entropy_from_logits, with their loops over sequences and chunks."""

    def selective(logits, index):
        if logits.dtype in (torch.float32, torch.float64):
            selected = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
            lse = torch.stack([torch.logsumexp(lg, dim=-1) for lg in logits])
            return selected - lse
        rows = []
        for lg, labels in zip(logits, index):
            logps = F.log_softmax(lg, dim=-1)
            rows.append(logps.gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1))
        return torch.stack(rows)

    def entropy(logits, chunk_size=128):
        flat = logits.reshape(-1, logits.shape[-1])
        parts = []
        for chunk in flat.split(chunk_size, dim=0):
            logps = F.log_softmax(chunk, dim=-1)
            parts.append(-(torch.exp(logps) * logps).sum(-1))
        return torch.cat(parts).reshape(logits.shape[:-1])

    def check(B, L, V, dtype):
        logits = randn(B, L, V, dtype=dtype, scale=2).requires_grad_()
        index = torch.randint(0, V, (B, L), generator=GEN, device=DEV)
        logp = selective(logits, index)
        g = randn(B, L, dtype=logp.dtype)
        (dx,) = torch.autograd.grad(logp, logits, g)
        label = f"[{B},{L},{V}] {str(dtype)[6:]}"
        with torch.no_grad():
            x = logits.detach()
            onehot = torch.zeros(B, L, V, device=DEV).scatter_(-1, index.unsqueeze(-1), g.float().unsqueeze(-1))
            if dtype == FP:
                m = x.amax(-1, keepdim=True)
                e = torch.exp(x - m)

                def lse(total_rows=L, vec=4, share=True):
                    sums = torch.stack([row_sums(e[i], vec, total_rows, share_blocks=share) for i in range(B)])
                    return torch.log(sums) + m[..., 0]

                actual_lse = torch.stack([torch.logsumexp(lg, -1) for lg in x])
                it.case(
                    "sum behind logsumexp " + label,
                    torch.stack([v.clone().sum(-1) for v in e]),
                    {
                        "rows = sequence": lambda: torch.stack([row_sums(e[i]) for i in range(B)]),
                        "rows = batch": lambda: row_sums(e.view(-1, V)).view(B, L),
                        "one block a row": lambda: torch.stack([row_sums(e[i], share_blocks=False) for i in range(B)]),
                    },
                )
                it.case(
                    "logsumexp " + label,
                    actual_lse,
                    {
                        "rows = sequence": lse,
                        "rows = batch": lambda: lse(B * L),
                        "loop kernel": lambda: torch.log(softmax_sum(e.view(-1, V), "loop")).view(B, L) + m[..., 0],
                    },
                )
                selected = x.gather(-1, index.unsqueeze(-1)).squeeze(-1)
                it.case("logp " + label, logp.detach(), {"x_t - lse": lambda: selected - lse()})
                p = torch.exp(x - actual_lse[..., None])
                it.case(
                    "dx " + label,
                    dx,
                    {
                        "(-g)*exp(x - lse) + scatter": lambda: (-g)[..., None] * p + onehot,
                        "fma": lambda: fma(*torch.broadcast_tensors((-g)[..., None], p), onehot),
                    },
                )
            else:
                flat = x.view(-1, V)
                h = flat.float()
                m = h.amax(-1, keepdim=True)
                kind, vec = forward_kind(dtype, dtype, V)
                # Rows of a sequence start anew: lg is a view into the batch, its address counts.
                s = softmax_sum(torch.exp(h - m), kind, vec=vec or 4)
                picked = h.gather(-1, index.view(-1, 1))
                it.case(
                    "logp " + label,
                    logp.detach(),
                    {
                        f"r((x - m) - log(s)), {kind}{vec or ''}": lambda: (
                            ((picked - m) - torch.log(s)[:, None]).to(dtype).view(B, L)
                        )
                    },
                )
                logps = F.log_softmax(x, -1)
                p = torch.exp(logps.float())
                sums = (g.float() + 0.0)[..., None].expand_as(p)
                it.case(
                    "dx " + label,
                    dx,
                    {
                        "r(fma(-(0+g), exp(logp16), onehot))": lambda: fma(-sums, p, onehot).to(dtype),
                        "unfused": lambda: (onehot - p * sums).to(dtype),
                    },
                )
            actual = entropy(x)
            vec = 4 if dtype == FP else 8

            def emulated(vec=vec, whole=False, share=True):
                flat, parts = x.reshape(-1, V), []
                for chunk in flat.split(flat.shape[0] if whole else 128, dim=0):
                    logps = F.log_softmax(chunk, dim=-1)
                    product = torch.exp(logps) * logps
                    parts.append(-row_sums(product, vec, share_blocks=share).to(dtype))
                return torch.cat(parts).reshape(x.shape[:-1])

            it.case(
                "entropy " + label,
                actual,
                {
                    f"chunks of 128 rows, vec {vec}": emulated,
                    f"vec {12 - vec}": lambda: emulated(12 - vec),
                    "all rows at once": lambda: emulated(whole=True),
                    "one block a row": lambda: emulated(share=False),
                },
            )

    for B, L, V in pick(
        ((2, 100, 151936), (1, 1024, 151936), (2, 300, 128256), (3, 77, 50257), (2, 64, 32000), (2, 50, 1000)),
        ((2, 5, 130), (2, 3, 1025)),
    ):
        for dtype in (FP, BF):
            if it.late():
                return
            check(B, L, V, dtype)
            if CUDA:
                torch.cuda.empty_cache()


# ------------------------------------------------------------------ the run


def chosen_items():
    """The items of `--only`, all without it, each with its place in the whole list."""
    names = [name for name, *_ in ITEMS]
    wanted = [name.strip() for name in args.only.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in names]
    if unknown:
        parser.error(f"--only: no item {', '.join(unknown)}; there are {', '.join(names)}")
    return [(i, *entry) for i, entry in enumerate(ITEMS) if not wanted or entry[0] in wanted]


def describe():
    device = torch.cuda.get_device_name(DEV) if CUDA else "CPU"
    return {
        "torch": torch.__version__,
        "triton": triton.__version__ if CUDA else None,
        "python": sys.version.split()[0],
        "device": f"{device}, {SMS} SMs x {THREADS_PER_SM} threads",
        "seed": args.seed,
        "small": args.small,
    }


def main():
    items = chosen_items()
    about = describe()
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    lines, records, status = [], [], 0
    for number, name, title, limit, function in items:
        if time.time() - START > args.budget:
            lines.append(f"{title}: SKIPPED, out of time")
            status |= CUDA
            continue
        it = Item(title, limit)
        GEN.manual_seed(args.seed + number)
        error = None
        try:
            function(it)
            if CUDA:
                torch.cuda.synchronize()
        except Exception:
            error = traceback.format_exc()
            print(error, flush=True)
        it.seconds = time.time() - it.start
        line = it.line()
        if error is not None:
            line += "; ENDED BY " + error.strip().splitlines()[-1][:200]
        status |= error is not None or (CUDA and bool(it.failed()))
        lines.append(line)
        print(line, flush=True)
        records.append(
            {
                "name": name,
                "item": title,
                "line": line,
                "error": error,
                "notes": it.notes,
                "cases": it.cases,
                "seconds": it.seconds,
            }
        )
        if CUDA:
            torch.cuda.empty_cache()
        if args.json:
            with open(args.json, "w") as file:
                json.dump({**about, "items": records}, file, indent=1)
    print(f"\n=== summary ({time.time() - START:.0f} s, seed {args.seed})")
    print(*lines, sep="\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
