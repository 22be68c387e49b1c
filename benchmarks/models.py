#!/usr/bin/env python3
"""Time language models of known sizes, with random weights: eager, lossless-kernels, and lossless-kernels without our loss.

Both models share one set of weights on one GPU, and take turns in one process. Outputs of the timed code are compared with
eager's bit by bit.

work:
  prefill    the forward pass of a prompt, with a cache, logits of the last token; the logits of all tokens are compared
  generate   greedy decoding: a growing cache; a static cache; a static cache with CompileConfig(backend="cudagraphs"); a
             static cache in `kernel.decoding_graph`. Tokens, and logits of every step, are compared with eager's for the
             same cache, and for a static cache in a graph with those of eager without one
  training   forward and backward pass with loss and gradient checkpointing, deterministic algorithms; loss and all
             gradients are compared

examples:
  models.py                                      Llama-3.1-8B, all work: several minutes on an H200
  models.py --work generate --cache growing      one of its parts
  models.py --model llama-3.2-1b --work generate --new-tokens 128

Exit status: 0; 1 if a bit differed from eager's; 2 if it could not run.
"""

import argparse
import copy
import datetime
import functools
import gc
import importlib.metadata
import importlib.util
import json
import os
import shlex
import statistics
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers import BenchError, driver_version, load_kernel, positive, progress_bar

ROOT = Path(__file__).resolve().parent.parent
# The sizes of published models (their config.json).
MODELS = {
    "llama-3.1-8b": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-3.2-1b": {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
    },
}
WORK = ("prefill", "generate", "training")
# Settings of `generate` for each cache. transformers compiles by itself for a static cache, by Inductor.
CACHES = {
    "growing": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "static, CUDA graphs": {"cache_implementation": "static"},
    "static, decoding_graph": {"cache_implementation": "static", "disable_compile": True},
}
# Layers in training -> whether the loss is replaced, too.
LOSSES = {"ours, eager's loss": False, "ours": True}


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b", help="sizes (default: llama-3.1-8b)")
    parser.add_argument("--work", choices=WORK, nargs="+", default=WORK, help="what to time (default: all)")
    parser.add_argument(
        "--tokens", type=positive, nargs="+", default=(1, 118, 2048, 8192), metavar="N", help="of prompts for prefill"
    )
    parser.add_argument("--cache", choices=CACHES, nargs="+", default=CACHES, help="of generate (default: all)")
    parser.add_argument("--new-tokens", type=positive, default=128, metavar="N", help="to generate (default: 128)")
    parser.add_argument("--training-tokens", type=positive, default=4096, metavar="N", help="(default: 4096)")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="turns of each model (default: 5)")
    parser.add_argument("--device", default="cuda", help="(default: cuda; cpu tries the program out)")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder made by `make build`")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    return parser.parse_args(arguments)


def make_models(options):
    """Eager's model, and its twin with the same weights, whose layers will be replaced.

    `apply` replaces a rotary function for all models of its file. Eager's classes come from a file of their own.
    """
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama

    longest = max(*options.tokens, options.training_tokens, 1024)
    config = LlamaConfig(
        **MODELS[options.model], max_position_embeddings=longest, bos_token_id=None, eos_token_id=None, dtype="bfloat16"
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(options.device):
        model, twin = (
            file.LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="sdpa")
            for file in (second_copy(modeling_llama), modeling_llama)
        )
    torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            # Away from 1, where formulas with the weight elsewhere agree.
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    twin.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    for each in (model, twin):
        each.generation_config.pad_token_id = 0
    return model.eval(), twin.eval()


def second_copy(module):
    """The module, executed once more under another name."""
    name = f"{module.__name__}_copy"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, module.__file__)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def bits_equal(found, expected) -> bool:
    import torch

    as_bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    # Pieces, because a comparison has an element of its own for each of theirs.
    return len(found) == len(expected) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and all(
            torch.equal(one, other)
            for one, other in zip(
                a.detach().contiguous().view(as_bits[a.element_size()]).flatten().split(1 << 28),
                b.detach().contiguous().view(as_bits[b.element_size()]).flatten().split(1 << 28),
            )
        )
        for a, b in zip(found, expected)
    )


def synchronize(options):
    if options.device != "cpu":
        import torch

        torch.cuda.synchronize()


def timed(runs, options, repeats=1):
    """Medians in milliseconds of the functions `runs`, which take turns; a time is the mean of `repeats` calls in a row."""
    times = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            synchronize(options)
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            synchronize(options)
            times[name].append((time.perf_counter() - start) * 1e3 / repeats)
    return {name: statistics.median(each) for name, each in times.items()}


def peak_memory(run, options):
    """MiB at the peak of a call of `run`, beyond what is allocated before it."""
    if options.device == "cpu":
        return None
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    synchronize(options)
    return round((torch.cuda.max_memory_allocated() - before) / 2**20)


def prefill(models, options):
    """Yields the rows of each prompt."""
    import torch

    for count in options.tokens:
        tokens = torch.randint(models["eager"].config.vocab_size, (1, count), device=options.device)
        with torch.inference_mode():
            expected = models["eager"](tokens, use_cache=False).logits
            equal = bits_equal([models["ours"](tokens, use_cache=False).logits], [expected])
            del expected
            runs = {name: functools.partial(model, tokens, logits_to_keep=1) for name, model in models.items()}
            for run in runs.values():
                run(), run()
            memory = {name: peak_memory(run, options) for name, run in runs.items()}
            times = timed(runs, options, repeats=max(1, min(20, 20000 // count)))
        yield [row("prefill", f"{count} tokens", name, times, equal, memory[name]) for name in runs]


def in_graph(kernel, model, run):
    with kernel.decoding_graph(model):
        return run()


def generate(models, options, kernel):
    """Yields the rows of each cache."""
    import torch
    from transformers import CompileConfig

    graphs = CompileConfig(backend="cudagraphs" if options.device != "cpu" else "aot_eager", fullgraph=False, mode=None)
    # On a CPU transformers compiles only if it is asked to.
    graphs._compile_all_devices = True
    tokens = torch.randint(models["eager"].config.vocab_size, (1, 118), device=options.device)
    for cache in options.cache:
        settings = CACHES[cache]
        if "graphs" in cache:
            settings = {**settings, "compile_config": graphs}
        runs = {
            name: functools.partial(
                model.generate,
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                min_new_tokens=options.new_tokens,
                max_new_tokens=options.new_tokens,
                return_dict_in_generate=True,
                output_logits=True,
                **settings,
            )
            for name, model in models.items()
        }
        found = {name: run() for name, run in runs.items()}
        if cache.endswith("decoding_graph"):
            runs = {name: functools.partial(in_graph, kernel, models[name], run) for name, run in runs.items()}
            found["ours"] = runs["ours"]()
            runs["eager"]()
        equal = bits_equal(*([out.sequences, *out.logits] for out in (found["ours"], found["eager"])))
        times = timed(runs, options)
        entries = [row("generate", cache, name, times, equal) for name in runs]
        yield [{**entry, "tokens_per_second": options.new_tokens / entry["ms"] * 1e3} for entry in entries]


def training(models, options, kernel):
    """Yields the rows with eager's loss, and those with ours."""
    import torch

    torch.use_deterministic_algorithms(True)
    tokens = torch.randint(models["eager"].config.vocab_size, (1, options.training_tokens), device=options.device)

    def step(model):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
        model.zero_grad(set_to_none=True)
        return found

    for model in models.values():
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    eager, ours = models.values()
    for name, loss in LOSSES.items():
        kernel.apply(ours, loss=loss)
        runs = {"eager": functools.partial(step, eager), name: functools.partial(step, ours)}
        equal = bits_equal(step(ours), step(eager))
        memory = {each: peak_memory(run, options) for each, run in runs.items()}
        times = timed(runs, options)
        yield [row("training", f"{options.training_tokens} tokens", each, times, equal, memory[each]) for each in runs]
    torch.use_deterministic_algorithms(False)
    for model in models.values():
        model.gradient_checkpointing_disable()
        model.eval()
    kernel.apply(ours)


def row(work, size, name, times, equal, memory=None):
    return {
        "work": work,
        "size": size,
        "layers": name,
        "ms": times[name],
        "speedup": times["eager"] / times[name],
        "bits_equal": name == "eager" or equal,
        "peak_memory_mib": memory,
    }


def summary(rows) -> str:
    """One line of progress."""
    times = ", ".join(f"{each['layers']} {each['ms']:.2f} ms" for each in rows)
    return f"{datetime.datetime.now():%H:%M:%S} {rows[0]['work']}, {rows[0]['size']}: {times}"


def as_table(rows):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for header in ("Work", "Size", "Layers", "Time", "Speedup", "Tokens/s", "Peak memory", "Bits equal"):
        table.add_column(header, justify="left" if header in ("Work", "Size", "Layers") else "right")
    for each in rows:
        memory, rate = each["peak_memory_mib"], each.get("tokens_per_second")
        table.add_row(
            each["work"],
            each["size"],
            each["layers"],
            f"{each['ms']:.2f} ms",
            f"{each['speedup']:.2f}x",
            "" if rate is None else f"{rate:.1f}",
            "" if memory is None else f"{memory} MiB",
            "yes" if each["bits_equal"] else "[red]no[/red]",
        )
    return table


def environment(options):
    import torch

    on_gpu = options.device != "cpu"
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "driver": driver_version() if on_gpu else None,
        **{name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers", "kernels")},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
    }


def run(options, console):
    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        raise BenchError("expected a GPU, torch finds no CUDA device; --device cpu tries the program out")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    kernel = load_kernel(options.build)
    eager, ours = make_models(options)
    kernel.apply(ours)
    models, rows = {"eager": eager, "ours": ours}, []
    works = {
        "prefill": (functools.partial(prefill, models, options), options.tokens),
        "generate": (functools.partial(generate, models, options, kernel), options.cache),
        "training": (functools.partial(training, models, options, kernel), LOSSES),
    }
    with progress_bar(console) as progress:
        task = progress.add_task("", total=sum(len(works[work][1]) for work in options.work))
        for work in options.work:
            progress.update(task, description=work)
            first = len(rows)
            for found in works[work][0]():
                rows += found
                if options.json:
                    options.json.write_text(json.dumps({**environment(options), "results": rows}, indent=2) + "\n")
                console.print(summary(found), highlight=False)
                progress.advance(task)
            console.print(as_table(rows[first:]))
    return rows


def refuse_a_model_without_our_layers(options) -> None:
    """On a GPU, makes it an error that `apply` replaced no layer: the times of "ours" would be eager's."""
    action = "ignore" if options.device == "cpu" else "error"
    warnings.filterwarnings(action, "lossless-kernels: apply replaced no layer", RuntimeWarning)


def main(arguments=None) -> int:
    options = parse(arguments)
    try:
        from rich.console import Console

        console = Console()
        if not console.is_terminal:
            console.width = 120
        with warnings.catch_warnings():
            refuse_a_model_without_our_layers(options)
            rows = run(options, console)
    except (BenchError, ImportError, OSError, RuntimeWarning) as error:
        print(f"models: error: {error}", file=sys.stderr)
        return 2
    different = [f"{each['work']}, {each['size']}, {each['layers']}" for each in rows if not each["bits_equal"]]
    for each in different:
        print(f"models: bits differ from eager's: {each}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
