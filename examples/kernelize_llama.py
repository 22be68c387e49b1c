#!/usr/bin/env python3
"""Replace the layers of a Llama by lossless kernels, one kind at a time, and compare: time, logits, bits.

A Llama with random weights is saved once as safetensors and loaded fresh for every row of the table. Its layers are
replaced module by module through `kernels`, as any user of transformers does it; nothing is downloaded.

Without a GPU the layers stay the original ones, which is shown first. Then the same kernels run in Triton's interpreter,
against the arithmetic of PyTorch's CUDA kernels in plain torch operations (tests/aten_model.py): about bits, not speed.

Exit status: 0 if all is as promised; 1 if bits differ, or on a GPU nothing was replaced; 2 if it could not be tried; 130 if
it was interrupted, and then --json has the rows that were finished.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import MethodType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from startup import clean_up_when_terminated

ROOT = Path(__file__).resolve().parent.parent
MODELS = {
    "tiny": {"layers": 2, "hidden_size": 128, "intermediate_size": 256, "heads": 4},
    "70m": {"layers": 4, "hidden_size": 1024, "intermediate_size": 4096, "heads": 16},
    "1b": {"layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "heads": 32},
}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MODES = ("inference", "inference-compile", "training", "training-compile")
# Table row -> what is replaced in it, by layer name: transformers' own, and those that `name_layers` gives.
CONFIGURATIONS = {
    "baseline": (),
    "only RMSNorm": ("RMSNorm",),
    "only SiLU": ("SiLU",),
    "both": ("RMSNorm", "SiLU"),
    # The decoder layers bring along the rotation of queries and keys.
    "all": ("RMSNorm", "SiLU", "SwiGLUMLP", "LlamaDecoderLayer", "LlamaRotaryEmbedding"),
}


class DemoError(Exception):
    """What was asked for cannot be run; the message says why and what to do."""


def positive(text):
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, found {text!r}")
    return number


def seed(text):
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, of 64 bits, found {text!r}")
    return number


def check_writable(path):
    """Raises DemoError unless a file can be written there; leaves it as it is."""
    existed = path.exists()
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise DemoError(f"--json: {path}: {error.strerror}") from None
    if not existed:
        path.unlink()


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--model", choices=MODELS, help="sizes to start from (default: 70m; tiny without a GPU)")
    for name in MODELS["70m"]:
        model.add_argument(f"--{name.replace('_', '-')}", type=positive, metavar="N", help="instead of the model's own")
    model.add_argument("--vocab-size", type=positive, default=256, metavar="N", help="(default: 256, bytes)")
    model.add_argument(
        "--dtype", choices=DTYPES, nargs="+", help="one or more (default: bf16; fp32 fp16 without a GPU)"
    )
    model.add_argument("--seed", type=seed, metavar="N", help="for weights and tokens (default: a new one, printed)")
    work = parser.add_argument_group("work")
    work.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        metavar="N",
        help="sequence lengths, a table each (default: 118; 17 without a GPU)",
    )
    work.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences (default: 1)")
    work.add_argument("--mode", choices=MODES, default="inference", help="kernels' Mode (default: inference)")
    work.add_argument(
        "--backend",
        choices=("inductor", "aot_eager", "eager"),
        default="inductor",
        help="of torch.compile in a compile mode (default: inductor, whose arithmetic is not eager's)",
    )
    work.add_argument(
        "--attention",
        choices=("sdpa", "eager"),
        help="transformers' attention function (default: sdpa, in training eager); with sdpa, training takes torch's "
        "deterministic algorithms, for its backward pass adds in another order each time otherwise",
    )
    work.add_argument(
        "--graph", action="store_true", help="capture every inference pass in a CUDA graph and time the graph's replays"
    )
    work.add_argument("--repeats", type=positive, default=100, metavar="N", help="timed passes (default: 100)")
    work.add_argument("--device", help="such as cuda, cuda:1 or cpu (default: cuda if there is one)")
    files = parser.add_argument_group("files")
    files.add_argument("--build", type=Path, help="folder with the built kernel (default: build/, built if missing)")
    files.add_argument("--json", metavar="PATH", help="write the results there too; - for stdout")
    return parser.parse_args(arguments)


def find_device(name):
    """The device of that name; without a name a GPU if there is one."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise DemoError(f"--device: {name!r} is no device of torch") from None
    if device.type not in ("cuda", "cpu"):
        raise DemoError(f"--device: expected cuda or cpu, found {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DemoError(f"--device: {name!r} is not here, torch sees {torch.cuda.device_count()} GPUs")
    return device


def settle(options):
    """Fills in the defaults that depend on the device, and refuses what cannot work there."""
    options.device = find_device(options.device)
    on_gpu = options.device.type == "cuda"
    options.model = options.model or ("70m" if on_gpu else "tiny")
    for name, value in MODELS[options.model].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.tokens = options.tokens or [118 if on_gpu else 17]
    options.dtype = options.dtype or (["bf16"] if on_gpu else ["fp32", "fp16"])
    options.attention = options.attention or ("eager" if options.mode.startswith("training") else "sdpa")
    if options.graph and (not on_gpu or options.mode != "inference"):
        raise DemoError(f"--graph: needs a GPU and --mode inference, found {options.device.type} and {options.mode}")
    options.seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
    if options.hidden_size % (2 * options.heads):
        raise DemoError(f"--hidden-size: expected a multiple of 2 x {options.heads} heads, found {options.hidden_size}")
    if options.hidden_size % 4 or not 64 <= options.hidden_size <= 32768:
        # The original norms would run in layers that the table calls replaced.
        raise DemoError(f"--hidden-size: expected a multiple of 4 from 64 to 32768, found {options.hidden_size}")
    if options.hidden_size > 1024 * options.heads:
        least = -(-options.hidden_size // 1024)
        raise DemoError(f"--heads: expected at least {least}: heads have at most 1024 elements, found {options.heads}")
    if not on_gpu:
        if "bf16" in options.dtype:
            raise DemoError("--dtype: bf16 needs a GPU, Triton's interpreter truncates it instead of rounding")
        if options.mode != "inference":
            raise DemoError(f"--mode: {options.mode} needs a GPU, on a CPU only inference is shown")
        # Triton reads this when it is imported, and torch alone does not import it.
        os.environ["TRITON_INTERPRET"] = "1"
    return options


def load_kernel(build):
    """The kernel, from a folder with a variant for this torch."""
    from kernels import get_local_kernel

    if build is None:
        build = ROOT / "build"
        if not build.exists():
            done = subprocess.run(
                [sys.executable, ROOT / "scripts/build_kernel.py"], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise DemoError(f"{build} is missing and cannot be built here: {done.stderr.strip()}")
    if not build.is_dir():
        raise DemoError(f"--build: {build} is no folder")
    try:
        return get_local_kernel(build.resolve())
    except (OSError, ValueError) as error:
        # On its further lines kernels lists every variant that it tried.
        reason = str(error).splitlines()[0].rstrip(":")
        raise DemoError(f"--build: no kernel for this torch in {build}: {reason}") from None


# The model


def save_model(options, dtype, folder):
    """A Llama with random weights; those of the norms lie away from 1, where different formulas would agree."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    config = LlamaConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        vocab_size=options.vocab_size,
        max_position_embeddings=max(options.tokens),
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(options.seed)
    with options.device:
        model = LlamaForCausalLM(config)
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    model.to(dtype).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def load_model(options, dtype, folder):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=options.attention)
    return model.to(options.device).train(options.mode.startswith("training"))


def layers_named(model, names):
    """The modules that `names` mean, chosen by class."""
    from transformers.activations import SiLUActivation
    from transformers.models.llama import modeling_llama as llama

    classes = {
        "RMSNorm": llama.LlamaRMSNorm,
        "SiLU": SiLUActivation,
        "SwiGLUMLP": llama.LlamaMLP,
        "LlamaDecoderLayer": llama.LlamaDecoderLayer,
        "LlamaRotaryEmbedding": llama.LlamaRotaryEmbedding,
    }
    chosen = tuple(classes[name] for name in names)
    return [module for _, module in model.named_modules() if isinstance(module, chosen)]


def kernelize(model, names, kernel, mode, device_type, registered=None):
    """Replaces the forward of the layers called `names`, module by module.

    The mapping holds the kernel's layers for the device types `registered`, `device_type` itself if not given.
    """
    if not names:
        return
    from kernels import Device, Mode, use_kernel_mapping
    from kernels.layer.layer import kernelize_layer

    try:
        from kernels import KernelizeFallback

        use_fallback = KernelizeFallback.DEFAULT
    except ImportError:  # kernels before 0.17.2
        use_fallback = True
    purpose = Mode.TRAINING if mode.startswith("training") else Mode.INFERENCE
    if mode.endswith("compile"):
        purpose |= Mode.TORCH_COMPILE
    level = "decoder" if "LlamaDecoderLayer" in names else "layer"
    # transformers gives the other layers their names, unless it does not take this version of kernels.
    if level == "decoder" or any(
        not hasattr(type(module), "kernel_layer_name") for module in layers_named(model, names)
    ):
        kernel.name_layers(model)
    mapping = kernel.kernel_mapping(devices=registered or (device_type,), level=level)
    with use_kernel_mapping(mapping, inherit_mapping=False):
        for module in layers_named(model, names):
            kernelize_layer(module, mode=purpose, device_type=Device(type=device_type), use_fallback=use_fallback)


def replaced(model, kernel):
    """How many modules have a forward that comes from the kernel."""
    return sum(
        getattr(module.forward, "__func__", module.forward).__module__.startswith(kernel.__name__)
        for module in model.modules()
    )


# A pass through the model, and what two of them have in common


def make_pass(model, options, compiled=True):
    """A function tokens -> the logits and, in training, every gradient."""
    import torch

    run = model
    if compiled and options.mode.endswith("compile"):
        run = torch.compile(model, backend=options.backend, dynamic=False)

    def inference(tokens):
        with torch.inference_mode():
            return [run(tokens, use_cache=False).logits]

    def training(tokens):
        out = run(tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return [out.logits.detach(), *gradients]

    if options.graph and compiled:
        return captured(inference)
    return training if options.mode.startswith("training") else inference


def captured(run):
    """The pass as a CUDA graph, captured when tokens of a shape first come."""
    import torch

    graphs = {}

    def capture(tokens):
        held = tokens.clone()
        for _ in range(3):  # Compiles and proves what cannot be compiled or proved during the capture.
            run(held)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run(held)
        return graph, held, outputs

    def replay(tokens):
        if tokens.shape not in graphs:
            with torch.cuda.device(tokens.device):
                graphs[tokens.shape] = capture(tokens)
        graph, held, outputs = graphs[tokens.shape]
        held.copy_(tokens)
        graph.replay()
        return outputs

    return replay


def bits(tensor):
    import torch

    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def compare(actual, expected):
    """The three columns about arithmetic."""
    logits, reference = actual[0], expected[0]
    best = (logits.argmax(-1) == reference.argmax(-1)).sum().item()
    return {
        "max_logit_diff": (logits.float() - reference.float()).abs().max().item(),
        "bits_equal": all(
            a.dtype == e.dtype and bool((bits(a) == bits(e)).all()) for a, e in zip(actual, expected, strict=True)
        ),
        "argmax_match": f"{best}/{logits[..., 0].numel()}",
    }


def timed(runs, tokens, options, progress):
    """Milliseconds of every pass and the last results, by configuration.

    Wall time around a synchronised pass: a short one waits for the host, and so does its user. The configurations take
    turns, in another order each round, so that clocks, heat and other tenants reach all of them alike.
    """
    import torch

    shuffle = random.Random(options.seed)
    times = {name: [] for name in runs}
    results = {}
    warm_up = max(3, options.repeats // 10)
    task = progress.add_task(f"{tokens.shape[-1]} tokens", total=warm_up + options.repeats)
    for turn in range(warm_up + options.repeats):
        for name in shuffle.sample(list(runs), len(runs)):
            results[name] = None
            torch.cuda.synchronize(options.device)
            start = time.perf_counter()
            results[name] = runs[name](tokens)
            torch.cuda.synchronize(options.device)
            if turn >= warm_up:
                times[name].append((time.perf_counter() - start) * 1e3)
        progress.advance(task)
    progress.remove_task(task)
    return times, results


def peak_memory(run, tokens, device):
    """Bytes that a pass takes at most beside what was there before."""
    import torch

    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run(tokens)
    return torch.cuda.max_memory_allocated(device) - before


# On a GPU


def on_gpu(options, kernel, console, rows, failures):
    """All tables; `rows` takes theirs, and `failures` what is not as promised."""
    import torch

    device_type = "rocm" if torch.version.hip else "cuda"
    bits_promised = not options.mode.endswith("compile") or options.backend != "inductor"
    # Every model and length is compiled; beyond the default limit torch would quietly stop compiling.
    torch._dynamo.config.recompile_limit = len(CONFIGURATIONS) * len(options.tokens) + 8
    if options.mode.startswith("training") and options.attention == "sdpa":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Found by debuggers, and a launch for every tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False
    for dtype in options.dtype:
        with tempfile.TemporaryDirectory(prefix="kernelize-llama-") as folder:
            parameters = save_model(options, torch_dtype(dtype), folder)
            models = {name: load_model(options, torch_dtype(dtype), folder) for name in CONFIGURATIONS}
            eager = load_model(options, torch_dtype(dtype), folder)
        for configuration, names in CONFIGURATIONS.items():
            kernelize(models[configuration], names, kernel, options.mode, device_type)
        runs = {name: make_pass(model, options) for name, model in models.items()}
        for length in options.tokens:
            tokens = draw_tokens(options, length)
            expected = make_pass(eager, options, compiled=False)(tokens)
            with progress_bar(console) as progress:
                times, results = timed(runs, tokens, options, progress)
            table = []
            for configuration, names in CONFIGURATIONS.items():
                low, median, high = quartiles(times[configuration])
                row = {
                    "dtype": dtype,
                    "tokens": length,
                    "configuration": configuration,
                    "layers": len(layers_named(models[configuration], names)),
                    "layers_replaced": replaced(models[configuration], kernel),
                    "median_ms": median,
                    "quartiles_ms": [low, high],
                    "speedup": quartiles(times["baseline"])[1] / median,
                    **compare(results[configuration], expected),
                }
                results[configuration] = None
                if options.mode.startswith("training"):
                    row["peak_memory_bytes"] = peak_memory(runs[configuration], tokens, options.device)
                where = f"{configuration}, {dtype}, {length} tokens"
                if row["layers_replaced"] != row["layers"]:
                    failures.append(f"{where}: {row['layers_replaced']} of {row['layers']} layers replaced")
                if bits_promised and not row["bits_equal"]:
                    failures.append(f"{where}: not bit-equal")
                table.append(row)
            title = f"{parameters / 1e6:.1f}M parameters, {dtype}, {options.batch} x {length} tokens, {options.mode}"
            title += f", {options.attention} attention" + ", one CUDA graph" * options.graph
            console.print(as_table(title, table))
            rows += table
    if not bits_promised:
        console.print("Compared with eager: Inductor rounds the rest of the graph in its own way, in every row.")


def quartiles(values):
    import torch

    return torch.tensor(values).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()


# Without a GPU


def on_cpu(options, kernel, console, rows, failures):
    """First that a CPU model keeps its layers, then the kernels in Triton's interpreter."""
    with tempfile.TemporaryDirectory(prefix="kernelize-llama-") as folder:
        for dtype in options.dtype:
            save_model(options, torch_dtype(dtype), Path(folder, dtype))
        for kind in ("original layers", "Triton's interpreter"):
            if kind == "original layers":
                console.print("No GPU in use. A mapping for cuda and rocm leaves a CPU model's layers as they are:")
            else:
                console.print(
                    "\nThe same kernels in Triton's interpreter against CUDA's arithmetic in plain torch operations. "
                    "A check of correctness, its times mean nothing:"
                )
                # Proof compares with eager on this device, and a CPU adds in another order than CUDA.
                os.environ["LOSSLESS_PROOF"] = "off"
            for dtype in options.dtype:
                for length in options.tokens:
                    with progress_bar(console) as progress:
                        configurations = progress.track(CONFIGURATIONS, description=f"{dtype}, {length} tokens")
                        table = [
                            cpu_row(options, kernel, kind, dtype, length, configuration, Path(folder, dtype))
                            for configuration in configurations
                        ]
                    console.print(as_table(f"{kind}, {dtype}, {options.batch} x {length} tokens", table))
                    rows += table
    for row in rows:
        wanted = row["layers"] if row["kind"] == "Triton's interpreter" else 0
        where = f"{row['kind']}, {row['configuration']}, {row['dtype']}, {row['tokens']} tokens"
        if row["layers_replaced"] != wanted:
            failures.append(f"{where}: {row['layers_replaced']} layers replaced instead of {wanted}")
        if not row["bits_equal"]:
            failures.append(f"{where}: not bit-equal")


def cpu_row(options, kernel, kind, dtype, length, configuration, folder):
    names = CONFIGURATIONS[configuration]
    model, reference = (load_model(options, torch_dtype(dtype), folder) for _ in range(2))
    if kind == "original layers":
        kernelize(model, names, kernel, options.mode, "cpu", registered=("cuda", "rocm"))
    else:
        kernelize(model, names, kernel, options.mode, "cpu")
        use_cuda_arithmetic(reference, names)
    tokens = draw_tokens(options, length)
    start = time.perf_counter()
    actual = make_pass(model, options)(tokens)
    milliseconds = (time.perf_counter() - start) * 1e3
    return {
        "kind": kind,
        "dtype": dtype,
        "tokens": length,
        "configuration": configuration,
        "layers": len(layers_named(model, names)),
        "layers_replaced": replaced(model, kernel),
        "median_ms": milliseconds,
        **compare(actual, make_pass(reference, options)(tokens)),
    }


def use_cuda_arithmetic(model, names):
    """Gives the layers called `names` the arithmetic of PyTorch's CUDA kernels."""
    import numpy
    import torch

    sys.path.insert(0, str(ROOT / "tests"))
    import aten_model

    def exp(x):
        # The interpreter's, so that both sides share the one function that a CPU rounds in another way.
        return torch.from_numpy(numpy.exp(x.numpy()))

    def rms_norm(self, hidden_states):
        return aten_model.rms_norm(hidden_states, self.weight, self.variance_epsilon)

    def silu(self, input):
        return aten_model.silu(input, exp=exp)

    for name, forward in (("RMSNorm", rms_norm), ("SiLU", silu)):
        if name in names:
            for module in layers_named(model, (name,)):
                module.forward = MethodType(forward, module)


# What both share


def torch_dtype(name):
    import torch

    return getattr(torch, DTYPES[name])


def draw_tokens(options, length):
    import torch

    generator = torch.Generator().manual_seed(options.seed)
    return torch.randint(options.vocab_size, (options.batch, length), generator=generator).to(options.device)


def progress_bar(console):
    from rich.progress import Progress

    return Progress(console=console, transient=True)


def as_table(title, rows):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("Config", no_wrap=True)
    timed_rows = "speedup" in rows[0]
    measured_rows = "peak_memory_bytes" in rows[0]
    headers = ["Time", *["Speedup"] * timed_rows, *["Peak memory"] * measured_rows]
    headers += ["Max logit diff", "Bits equal", "Argmax match", "Layers replaced"]
    for header in headers:
        table.add_column(header, justify="right", no_wrap=header == "Time")
    for row in rows:
        if timed_rows:
            low, high = row["quartiles_ms"]
            # Markup would swallow the brackets.
            cells = [f"{row['median_ms']:.2f} ms \\[{low:.2f}, {high:.2f}]", f"{row['speedup']:.2f}x"]
        else:
            cells = [f"{row['median_ms']:.0f} ms"]
        if measured_rows:
            cells.append(f"{row['peak_memory_bytes'] / 2**20:.0f} MiB")
        table.add_row(
            row["configuration"],
            *cells,
            f"{row['max_logit_diff']:g}",
            "yes" if row["bits_equal"] else "[red]no[/red]",
            row["argmax_match"],
            str(row["layers_replaced"]),
        )
    return table


def environment(options):
    import torch

    on_gpu = options.device.type == "cuda"
    versions = {"torch": str(torch.__version__)}
    for name in ("triton", "transformers", "kernels"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "device": torch.cuda.get_device_name(options.device) if on_gpu else f"CPU, {platform.machine()}",
        **versions,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", os.path.relpath(__file__, ROOT), *sys.argv[1:]]),
    }


def main():
    clean_up_when_terminated()
    options = parse()
    rows, failures, setting, interrupted = [], [], None, False
    try:
        from rich.console import Console

        console = Console(stderr=options.json == "-")
        if not console.is_terminal:
            # A file or a pipe has no width of its own, and 80 columns would wrap the table.
            console.width = 120
        # Before the minutes that the passes may take, not after.
        if options.json not in (None, "-"):
            check_writable(Path(options.json))
        settle(options)
        import transformers

        transformers.utils.logging.disable_progress_bar()
        kernel = load_kernel(options.build)
        setting = environment(options)
        console.print(
            f"{setting['device']}; "
            + ", ".join(f"{name} {setting[name]}" for name in ("torch", "triton", "transformers", "kernels"))
            + f"; seed {options.seed}",
            highlight=False,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            (on_gpu if options.device.type == "cuda" else on_cpu)(options, kernel, console, rows, failures)
        refusals = sorted({str(warning.message) for warning in caught if "lossless-kernels" in str(warning.message)})
        failures += refusals
    except (DemoError, ImportError) as error:
        print(f"kernelize_llama: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        interrupted = True
        failures.append("interrupted")
    if options.json and setting:
        written = {"environment": setting, "options": vars(options), "results": rows, "failures": failures}
        # The device and the path of the build are no JSON.
        text = json.dumps(written, indent=2, default=str)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n", encoding="utf-8")
    for failure in failures:
        print(f"kernelize_llama: {failure}", file=sys.stderr)
    return 130 if interrupted else 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
