"""Record what eager PyTorch computes on a CUDA GPU, for tests that run without one.

    python tests/golden/record.py [--output tests/golden]

writes one safetensors file, named after the GPU and the torch version, and compares everything
with tests/aten_model.py on the way: prints each mismatch and exits with 1 if there is any. Needs
torch 2.11 or later and safetensors. Inputs come from a hash and are not stored; the cases, with
the seeds of their inputs, are in the file's metadata, and of large outputs a sample.
"""

import argparse
import datetime
import importlib.util
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Optional

import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import aten_model
from bits import bits_equal, hashed_int64, hashed_normal

Tensors = dict[str, Tensor]

HIDDEN_SIZES = (
    64, 100, 124, 128, 132, 512, 1000, 1024, 2048, 4096, 4100, 5120, 8192, 16384, 32768,
)  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16")
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """One computation. `shape` is that of x; its last dimension is the hidden size.

    repeats: for `row_sum`, so many tensors of `shape`, each summed by itself: a wrong order shows
        in one row of three only, and the orders for few rows have few rows.
    transposed_dy: the gradient lies in memory with dimensions 1 and 2 of x exchanged.
    special: which rows of x are not random, see `special_rows`.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    weight_dtype: str = "float32"
    repeats: int = 1
    seed: int = 0
    eps: float = EPS
    transposed_dy: bool = False
    special: str = ""

    @property
    def rows(self) -> int:
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows

    @property
    def hidden_size(self) -> int:
        return self.shape[-1]


def case_from_json(fields: dict) -> Case:
    return Case(**{**fields, "shape": tuple(fields["shape"])})


def all_cases() -> list[Case]:
    """Every class of summation tree, all pairs of dtypes, and the values where rounding is odd."""
    cases: list[Case] = []

    def add(kind: str, shape: tuple[int, ...], **fields) -> None:
        details = "_".join(str(value) for value in fields.values())
        name = f"{kind}_{'x'.join(map(str, shape))}" + (f"_{details}" if details else "")
        cases.append(Case(name, kind, shape, seed=1000 + len(cases), **fields))

    # 1 to 16 rows each have a block height of their own, 16 and more share one.
    row_counts = [(rows, HIDDEN_SIZES) for rows in (1, 2, 4, 8, 16)]
    row_counts += [
        (rows, HIDDEN_SIZES[offset::4]) for offset, rows in enumerate((3, 7, 15, 17, 64, 300, 3000), start=1)
    ]
    for rows, hidden_sizes in row_counts:
        for hidden_size in hidden_sizes[:-1] if rows == 3000 else hidden_sizes:
            add("row_sum", (rows, hidden_size), repeats=max(1, 32 // rows))
    # Blocks share a row.
    for shape in ((1, 131072), (3, 150000), (4, 262144), (16, 131072), (16, 278528)):
        add("row_sum", shape, repeats=2)
    # fp32 cannot hold rows * hidden_size, and the factor of the mean is not fp32(1 / hidden_size).
    add("row_sum", (16429, 4100))

    one_block = (
        (1, 512), (2, 100), (3, 64), (4, 1024), (7, 132), (16, 4096), (31, 256), (63, 1024),
        (64, 1024), (65, 1024), (127, 100), (128, 100), (255, 4), (256, 8), (300, 2048),
        (511, 16), (512, 16), (1000, 4100), (1023, 512),
    )  # fmt: skip
    several_blocks = (
        (1024, 512), (1025, 4096), (2500, 132), (3000, 1024), (5000, 100), (8192, 16), (20000, 64),
        (40000, 8), (40000, 4), (70000, 32),
    )  # fmt: skip
    for number, shape in enumerate(one_block + several_blocks):
        add("column_sum", shape, dtype=DTYPES[number % 3])
        if shape[0] * shape[1] <= 600_000:
            add("column_sum", shape, dtype=DTYPES[(number + 1) % 3])

    for dtype in DTYPES:
        for weight_dtype in DTYPES:
            add("rms_norm", (33, 512), dtype=dtype, weight_dtype=weight_dtype)
            add("rms_norm", (1100, 128), dtype=dtype, weight_dtype=weight_dtype)
    for shape in (
        (256,), (1, 64), (2, 4096), (3, 100), (1, 7, 1024), (15, 1000), (2, 8, 2048), (17, 132),
        (64, 8192), (300, 1024), (5, 5120), (16, 4100), (2, 1500, 512),
    ):  # fmt: skip
        for dtype, weight_dtype in (
            ("bfloat16", "bfloat16"),
            ("float16", "float16"),
            ("float32", "float32"),
            ("bfloat16", "float32"),
        ):
            add("rms_norm", shape, dtype=dtype, weight_dtype=weight_dtype)
    for dtype in DTYPES:
        add("rms_norm", (2, 12, 8, 64), dtype=dtype, weight_dtype=dtype, transposed_dy=True)
        add("rms_norm", (8, 128), dtype=dtype, weight_dtype=dtype, special="extreme")
        add("rms_norm", (8, 128), dtype=dtype, weight_dtype=dtype, special="nonfinite")
    for dtype in DTYPES:
        add("silu", (4096,), dtype=dtype)
    return cases


def special_rows(x: Tensor, special: str) -> Tensor:
    """Overwrite the first rows of x: values at the ends of the range, or none that are finite."""
    if special == "extreme":
        limits = torch.finfo(x.dtype)
        x[0] = 0.0
        x[1] = -0.0
        x[2] = (x[2].float() * limits.tiny).to(x.dtype)
        x[3] = limits.max
        x[4, ::2] = -limits.max
        x[5, 1:] = 0.0
    elif special == "nonfinite":
        x[0, 5] = float("inf")
        x[1, 7] = float("-inf")
        x[2, 9] = float("nan")
        x[3] = float("nan")
    return x


def _bit_patterns(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of every magnitude, subnormals, infinities and NaNs among them."""
    bits = hashed_int64(torch.arange(count), seed)
    if dtype == torch.float32:
        return (bits >> 32).to(torch.int32).view(dtype)
    # Every 65536 / count-th pattern, at a random place of each interval.
    width = 65536 // count
    patterns = torch.arange(count) * width + (bits & (width - 1))
    return (patterns - 32768).to(torch.int16).view(dtype)


def case_inputs(case: Case, rows: Optional[Tensor] = None) -> Tensors:
    """The inputs, on the CPU. With `rows`, only these rows of x (of a `row_sum`)."""
    dtype, weight_dtype = getattr(torch, case.dtype), getattr(torch, case.weight_dtype)
    if case.kind == "row_sum":
        shape = (case.repeats * case.rows, case.hidden_size)
        return {"x": hashed_normal(shape, case.seed, dtype, rows=rows)}
    if case.kind == "column_sum":
        return {"x": hashed_normal(case.shape, case.seed, dtype)}
    if case.kind == "silu":
        count = case.shape[0]
        x = _bit_patterns(count, dtype, case.seed)
        if dtype == torch.float32:
            x[: count // 2] = hashed_normal((count // 2,), case.seed, dtype, scale=4.0)
            x[-8:] = torch.tensor([0.0, -0.0, 88.0, -88.0, 90.0, -90.0, 104.0, -104.0])
        return {"x": x, "dy": hashed_normal((count,), case.seed + 1_000_000, dtype)}
    x = special_rows(hashed_normal(case.shape, case.seed, dtype, scale=1.5), case.special)
    weight = hashed_normal((case.hidden_size,), case.seed + 1_000_000, weight_dtype)
    dy_dtype = torch.promote_types(dtype, weight_dtype)
    dy_shape = list(case.shape)
    if case.transposed_dy:
        dy_shape[1], dy_shape[2] = dy_shape[2], dy_shape[1]
    dy = hashed_normal(dy_shape, case.seed + 2_000_000, dy_dtype, scale=0.5)
    if case.transposed_dy:
        dy = dy.transpose(1, 2)
    return {"x": x, "weight": weight, "dy": dy}


def llama_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`LlamaRMSNorm.forward` of transformers."""
    input_dtype = x.dtype
    hidden_states = x.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + eps)
    return weight * hidden_states.to(input_dtype)


def eager(case: Case, inputs: Tensors) -> Tensors:
    """What is recorded, complete, computed by PyTorch where the inputs are."""
    x = inputs["x"]
    if case.kind == "row_sum":
        parts: list[Tensors] = []
        for part in x.view(case.repeats, case.rows, case.hidden_size):
            mean = part.pow(2).mean(-1)
            parts.append(
                {
                    "sum": part.sum(-1),
                    "sum_of_squares": (part.float() * part.float()).sum(-1),
                    "mean": mean,
                    "rstd": torch.rsqrt(mean + case.eps),
                }
            )
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if case.kind == "column_sum":
        return {"sum": x.sum(0, dtype=torch.float32), "rounded_sum": x.sum(0)}
    if case.kind == "silu":
        leaf = x.detach().requires_grad_()
        y = torch.nn.functional.silu(leaf)
        (dx,) = torch.autograd.grad(y, leaf, inputs["dy"])
        return {"exp": torch.exp(-x.float()), "y": y.detach(), "dx": dx}
    leaf, weight = x.detach().requires_grad_(), inputs["weight"].detach().requires_grad_()
    y = llama_rms_norm(leaf, weight, case.eps)
    dx, dweight = torch.autograd.grad(y, (leaf, weight), inputs["dy"])
    rstd = torch.rsqrt(x.float().pow(2).mean(-1) + case.eps)
    return {"rstd": rstd, "y": y.detach(), "dx": dx, "dweight": dweight}


def modelled(case: Case, inputs: Tensors, recorded: Tensors, device: aten_model.Device) -> Tensors:
    """What the model says of the same inputs, given the recorded roots and exponentials."""
    x = inputs["x"]
    if case.kind == "row_sum":
        statistics = aten_model.rms_norm_statistics(x, case.eps, total_rows=case.rows, device=device)
        return {
            "sum": aten_model.row_sum(x, case.rows, device),
            "sum_of_squares": statistics.sum,
            "mean": statistics.mean,
        }
    if case.kind == "column_sum":
        sums = aten_model.column_sum(x, device)
        return {"sum": sums, "rounded_sum": sums.to(x.dtype)}
    if case.kind == "silu":

        def exp(_: Tensor) -> Tensor:
            return recorded["exp"]

        return {
            "y": aten_model.silu(x, exp),
            "dx": aten_model.silu_backward(inputs["dy"], x, exp),
        }
    weight, dy, rstd = inputs["weight"], inputs["dy"], recorded["rstd"]
    gradients = aten_model.rms_norm_backward(dy, x, weight, rstd, device)
    return {
        "y": aten_model.rms_norm_given_rstd(x, weight, rstd),
        # x is a leaf here: its gradient starts from the first term.
        "dx": gradients.dx[0] if len(gradients.dx) == 1 else gradients.dx[0] + gradients.dx[1],
        "dweight": gradients.dweight,
    }


def _evenly_spaced(count: int, total: int) -> Tensor:
    if total <= count:
        return torch.arange(total)
    return torch.arange(count) * (total - 1) // (count - 1)


def stored_rows(case: Case) -> Tensor:
    """Indices of the rows of x, seen as [-1, hidden_size], whose results are stored."""
    if case.kind == "row_sum":
        return _evenly_spaced(48, case.repeats * case.rows)
    return _evenly_spaced(8, case.rows)


def sample(case: Case, tensors: Tensors) -> Tensors:
    """The part of complete results that is stored: some rows, and of long rows some columns."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if case.kind == "row_sum":
            tensor = tensor[stored_rows(case)]
        elif case.kind == "column_sum" or name == "dweight":
            tensor = tensor[_evenly_spaced(512, case.hidden_size)]
        elif case.kind == "rms_norm" and name in ("y", "dx"):
            tensor = tensor.reshape(-1, case.hidden_size)[stored_rows(case)]
            tensor = tensor[:, _evenly_spaced(128, case.hidden_size)]
        stored[name] = tensor
    return stored


def _mismatches(label: str, model: Tensors, recorded: Tensors) -> int:
    mismatches = 0
    for name, tensor in model.items():
        if not bits_equal(tensor, recorded[name]):
            print(f"  MISMATCH {label}: {name}", flush=True)
            mismatches += 1
    return mismatches


def _check_hash(device: torch.device) -> int:
    mismatches = 0
    for name in DTYPES:
        dtype = getattr(torch, name)
        on_cpu = hashed_normal((300, 1001), 7, dtype)
        on_gpu = hashed_normal((300, 1001), 7, dtype, device=device)
        mismatches += _mismatches("inputs, GPU and CPU", {name: on_gpu.cpu()}, {name: on_cpu})
    return mismatches


# Too large to store or to repeat on a CPU: at 2 GiB, where halving begins, and beyond; and more
# outputs than the grid that ATen aims at.
LARGE_COLUMN_SUMS = (
    ("float32", 131072, 4096),
    ("float32", 131073, 4096),
    ("bfloat16", 262144, 4096),
    ("bfloat16", 262145, 4096),
    ("bfloat16", 33000, 32768),
    ("float16", 1200001, 2048),
    ("float32", 1100, 300000),
)


def _check_large(device: torch.device, properties: aten_model.Device) -> tuple[int, int]:
    checks = mismatches = 0
    for name, rows, hidden_size in LARGE_COLUMN_SUMS:
        dtype = getattr(torch, name)
        label = f"large {name} [{rows}, {hidden_size}]"
        needed = 2.5 * rows * hidden_size * dtype.itemsize + 2**30
        if torch.cuda.mem_get_info(device)[0] < needed:
            print(f"  left out, needs {needed / 2**30:.0f} GiB: {label}")
            continue
        x = hashed_normal((rows, hidden_size), rows, dtype, device=device)
        recorded = {"column sum": x.sum(0, dtype=torch.float32), "rounded": x.sum(0)}
        sums = aten_model.column_sum(x, properties)
        model = {"column sum": sums, "rounded": sums.to(dtype)}
        if dtype == torch.float32:
            recorded["row sum"] = x.sum(-1)
            model["row sum"] = aten_model.row_sum(x, device=properties)
        checks += len(model)
        mismatches += _mismatches(label, model, recorded)
        del x
        torch.cuda.empty_cache()
    return checks, mismatches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("--output", default=here, help="folder for the recorded file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.version.hip:
        sys.exit("record.py needs an NVIDIA GPU: it records what PyTorch computes there.")

    started = time.perf_counter()
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_properties(device)
    properties = aten_model.Device(gpu.multi_processor_count, gpu.max_threads_per_multi_processor)
    print(f"{gpu.name}: {properties}, torch {torch.__version__}", flush=True)

    checks = len(DTYPES)
    mismatches = _check_hash(device)
    recording: Tensors = {}
    cases = all_cases()
    kind = ""
    for case in cases:
        if case.kind != kind:
            kind = case.kind
            print(f"[{time.perf_counter() - started:5.1f} s] {kind}", flush=True)
        inputs = {name: tensor.to(device) for name, tensor in case_inputs(case).items()}
        recorded = eager(case, inputs)
        model = modelled(case, inputs, recorded, properties)
        checks += len(model)
        mismatches += _mismatches(case.name, model, recorded)
        for name, tensor in sample(case, recorded).items():
            if name != "rounded_sum":
                recording[f"{case.name}/{name}"] = tensor.cpu().contiguous()
    print(f"[{time.perf_counter() - started:5.1f} s] large tensors", flush=True)
    large_checks, large_mismatches = _check_large(device, properties)
    checks += large_checks
    mismatches += large_mismatches

    triton_version = "absent"
    if importlib.util.find_spec("triton") is not None:
        import triton

        triton_version = triton.__version__
    metadata = {
        "gpu": gpu.name,
        "sms": str(properties.sms),
        "threads_per_sm": str(properties.threads_per_sm),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton_version,
        "date": datetime.date.today().isoformat(),
        "script": "tests/golden/record.py",
        "cases": json.dumps([asdict(case) for case in cases]),
    }
    name = f"{gpu.name}-torch-{torch.__version__.split('+')[0]}".lower().replace(" ", "-")
    os.makedirs(arguments.output, exist_ok=True)
    path = os.path.join(arguments.output, f"{name}.safetensors")
    save_file(recording, path, metadata)
    seconds = time.perf_counter() - started
    print(f"{path}: {len(cases)} cases, {os.path.getsize(path) / 1e6:.2f} MB, {seconds:.1f} s")
    print(f"model against {gpu.name}: {mismatches} of {checks} tensors differ")
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
