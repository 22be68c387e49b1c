#!/usr/bin/env python3
"""Time language models under torch.compile: eager, the backend alone, and the backend with our layers.

All share one set of random weights on one GPU, and take turns. `ms` is the time of a call and the wait for its result; `in a
row` is the time of one of ten calls without a wait between them. Logits of the timed code are compared with eager's bit by
bit, and the CPU time of each of our operators is measured with the arguments that the compiled model calls it with.

examples:
  compiled.py --quick                    the 67.6M model: less than four minutes on a GPU
  compiled.py                            that and a 1B model
  compiled.py --device cpu --backend aot_eager --model tiny      tries the program out

Exit status: 0; 1 if logits of our layers, compiled, differed from eager's; 2 if it could not run, or replaced nothing.
"""

import argparse
import collections
import cProfile
import json
import pstats
import statistics
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent))

from models import (
    MODELS,
    ROOT,
    bits_equal,
    environment,
    make_models,
    refuse_a_model_without_our_layers,
    synchronize,
)
from peers import BenchError, load_kernel, positive

MODELS["70m"] = {
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 256,
}
MODES = ("default", "reduce-overhead")
# Calls whose CPU time is one figure: few, so that the GPU's queue does not fill.
CALLS = 100
# Timed calls of one model before the next one's turn.
CALLS_IN_TURN = 10


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=("70m", "llama-3.2-1b"), help="(default: both)")
    parser.add_argument("--mode", choices=MODES, nargs="+", default=MODES, help="of Inductor (default: both)")
    parser.add_argument("--tokens", type=positive, default=118, metavar="N", help="of the prompt (default: 118)")
    parser.add_argument("--level", choices=("layer", "decoder"), default="decoder", help="of apply (default: decoder)")
    parser.add_argument(
        "--rounds",
        type=positive,
        default=10,
        metavar="N",
        help=f"turns of {CALLS_IN_TURN} timed calls each (default: 10)",
    )
    parser.add_argument("--quick", action="store_true", help="the 67.6M model and 3 rounds")
    parser.add_argument(
        "--profile",
        type=positive,
        metavar="N",
        help="of each compiled model, the N functions that take most CPU time, themselves, in a call under cProfile",
    )
    parser.add_argument("--device", default="cuda", help="(default: cuda; cpu tries the program out)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: inductor)")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder made by `make build`")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    options = parser.parse_args(arguments)
    if options.backend != "inductor":
        options.mode = ("default",)
    if options.quick:
        options.model, options.rounds = ("70m",), min(options.rounds, 3)
    return options


def milliseconds(run, options) -> list[float]:
    """Times of calls in a row, the synchronisation included. The first is left out: others ran before it."""
    times = []
    for _ in range(CALLS_IN_TURN + 1):
        synchronize(options)
        start = time.perf_counter()
        run()
        synchronize(options)
        times.append((time.perf_counter() - start) * 1e3)
    return times[1:]


def milliseconds_in_a_row(run, options) -> float:
    """The time of a call among calls in a row, none of which waits for the GPU."""
    synchronize(options)
    start = time.perf_counter()
    for _ in range(CALLS_IN_TURN):
        run()
    synchronize(options)
    return (time.perf_counter() - start) / CALLS_IN_TURN * 1e3


def operators_of(kernel) -> dict:
    """The package's operators and the functions that Inductor's code calls."""
    return sys.modules[f"{kernel.__name__}.core.operators"].DIRECT


def operator_times(kernel, run, options) -> dict[str, dict]:
    """By operator the number of its calls in `run`, and the CPU time of one in us."""
    calls, sites = collections.defaultdict(list), {}
    for overload in operators_of(kernel):
        sites[overload] = dict(overload.sites)
        for name, site in sites[overload].items():

            def record(*arguments, overload=overload, site=site):
                calls[overload].append((site, arguments))
                return site(*arguments)

            overload.sites[name] = record
    try:
        run()
    finally:
        for overload, original in sites.items():
            overload.sites.update(original)
    found = {}
    for overload, made in calls.items():
        times = []
        for site, arguments in made[:4]:
            synchronize(options)
            start = time.perf_counter()
            for _ in range(CALLS):
                site(*arguments)
            times.append((time.perf_counter() - start) / CALLS * 1e6)
        synchronize(options)
        found[overload._opname] = {"calls": len(made), "us": min(times)}
    return found


def functions_of(run, options) -> list[dict]:
    """The functions of Python and C with the largest CPU times in a call, those of what they call left out, in us.

    cProfile makes every call of a function longer, by a part of a microsecond.
    """
    profiler = cProfile.Profile()
    for _ in range(CALLS_IN_TURN):
        synchronize(options)
        profiler.runcall(run)
    synchronize(options)
    found = []
    for (file, line, name), (_, calls, seconds, *_) in pstats.Stats(profiler).stats.items():
        where = name if file == "~" else f"{Path(file).name}:{line} {name}"
        found.append({"function": where, "calls": calls / CALLS_IN_TURN, "us": seconds / CALLS_IN_TURN * 1e6})
    return sorted(found, key=lambda each: -each["us"])[: options.profile]


def compiled(model, mode, options):
    """A function of the tokens that returns logits."""
    import torch

    named = {} if mode == "default" else {"mode": mode}
    function = torch.compile(model, backend=options.backend, **named)

    def call(tokens):
        torch.compiler.cudagraph_mark_step_begin()
        return function(tokens, use_cache=False).logits

    return call


def measure(name, kernel, options, rows):
    import torch
    from kernels import Mode
    from torch._dynamo.utils import counters

    sizes = SimpleNamespace(model=name, tokens=(options.tokens,), training_tokens=1, device=options.device)
    eager, ours = make_models(sizes)
    kernel.apply(ours, mode=Mode.INFERENCE | Mode.TORCH_COMPILE, level=options.level)
    tokens = torch.randint(eager.config.vocab_size, (1, options.tokens), device=options.device)
    torch._dynamo.reset()
    with torch.inference_mode():
        expected = eager(tokens, use_cache=False).logits.clone()
        runs = [({"model": name, "layers": "eager", "mode": ""}, lambda: eager(tokens, use_cache=False).logits)]
        for mode in options.mode:
            for layers, model in ((f"{options.backend} alone", eager), (f"{options.backend}, our layers", ours)):
                counters.clear()
                call = compiled(model, mode, options)
                start = time.perf_counter()
                for _ in range(3):  # A CUDA graph is recorded in the second call.
                    call(tokens)
                row = {"model": name, "layers": layers, "mode": mode, "graphs": counters["stats"]["unique_graphs"]}
                row["seconds_compiling"] = time.perf_counter() - start
                runs.append((row, lambda call=call: call(tokens)))
        times, in_a_row = collections.defaultdict(list), collections.defaultdict(list)
        for turn in range(options.rounds):
            for number, (_, run) in list(enumerate(runs))[:: -1 if turn % 2 else 1]:
                times[number] += milliseconds(run, options)
                in_a_row[number].append(milliseconds_in_a_row(run, options))
        for number, (row, run) in enumerate(runs):
            row["ms"], row["ms_in_a_row"] = statistics.median(times[number]), statistics.median(in_a_row[number])
            row["bits_equal"] = bits_equal([run()], [expected])
            if row["layers"].endswith("our layers") and row["mode"] == "default":
                row["operators"] = operator_times(kernel, run, options)
            if options.profile and row["mode"]:
                row["functions"] = functions_of(run, options)
            rows.append(row)


def as_text(rows) -> str:
    lines = [f"{'Model':14}{'Layers':22}{'Mode':17}{'ms':>9}{'in a row':>10}  {'graphs':>6}  bits of eager"]
    for each in rows:
        lines.append(
            f"{each['model']:14}{each['layers']:22}{each['mode']:17}{each['ms']:9.3f}{each['ms_in_a_row']:10.3f}  {each.get('graphs', ''):>6}  "
            f"{'yes' if each['bits_equal'] else 'no'}"
        )
    for each in rows:
        for operator, found in each.get("operators", {}).items():
            lines.append(
                f"{each['model']:14}{operator:30}{found['calls']:4} calls{found['us']:8.2f} us of CPU time each"
            )
    for each in rows:
        for found in each.get("functions", ()):
            lines.append(
                f"{each['model']:14}{each['layers']:22}{each['mode']:17}{found['us']:9.1f} us"
                f"{found['calls']:7.1f} calls  {found['function'][:100]}"
            )
    return "\n".join(lines)


def main(arguments=None) -> int:
    options = parse(arguments)
    rows: list = []
    try:
        import torch

        if options.device != "cpu" and not torch.cuda.is_available():
            raise BenchError("expected a GPU, torch finds no CUDA device; --device cpu tries the program out")
        kernel = load_kernel(options.build)
        try:
            with warnings.catch_warnings():
                refuse_a_model_without_our_layers(options)
                for name in options.model:
                    measure(name, kernel, options, rows)
        finally:
            if options.json:
                options.json.write_text(json.dumps({**environment(options), "results": rows}, indent=2) + "\n")
            print(as_text(rows))
    except (BenchError, ImportError, OSError, RuntimeWarning) as error:
        print(f"compiled: error: {error}", file=sys.stderr)
        return 2
    different = [each for each in rows if each["layers"].endswith("our layers") and not each["bits_equal"]]
    for each in different:
        print(f"compiled: logits differ from eager's: {each['model']}, {each['mode']}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
