"""Draws the charts of README.md and the site from recorded figures.

python benchmarks/plot_figures.py [--output docs/pictures]

peers.svg: RMSNorm of each peer in docs/peers/peers.json, speed against the share of cases whose bits differ from eager's.
models.svg: forward and training times of the 1B Llama in docs/pictures/models.json.
beside_eager.svg: each case of docs/pictures/beside_eager.json, which `beside_eager.py` wrote.
"""

import argparse
import json
import math
from pathlib import Path

from beside_eager import SPREAD

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "docs/peers/peers.json"
MODELS = ROOT / "docs/pictures/models.json"
BESIDE_EAGER = ROOT / "docs/pictures/beside_eager.json"

# In these every peer ran: forward, and backward with dx and dweight.
OPS = ("rms_norm", "rms_norm_backward")
OURS = "lossless-kernels"
# Where a label would lie on another one: its offset in points, and its alignment.
LABELS = {
    "torch.compile": ((4, 11), "right"),
    "quack": ((4, 11), "left"),
    "F.rms_norm": ((8, 11), "right"),
    "Liger": ((0, -20), "center"),
}
COLORS = {"ours": "#0b7285", "other": "#868e96", "slower": "#c92a2a", "text": "#212529", "grid": "#dee2e6"}


def points(results: list[dict]) -> dict[str, tuple[float, float, int]]:
    """For each peer: (geometric mean of eager's time / its time, share of cases whose bits differ, number of cases).

    Times are medians between two CUDA events. Raises ValueError if the peers ran different cases.
    """
    times: dict[str, dict] = {}
    for each in results:
        if each["op"] in OPS and each["error"] is None:
            case = (each["op"], tuple(each["shape"]))
            times.setdefault(each["peer"], {})[case] = (each["median_ms"], each["bit_equal"])
    cases = times["eager"].keys()
    for peer, found in times.items():
        if found.keys() != cases:
            raise ValueError(f"results: expected the {len(cases)} cases of eager, found {len(found)} of {peer}")
    return {
        peer: (
            math.exp(sum(math.log(times["eager"][case][0] / found[case][0]) for case in cases) / len(cases)),
            sum(not equal for _, equal in found.values()) / len(cases),
            len(cases),
        )
        for peer, found in times.items()
    }


def settings():
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and two runs write the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lossless-kernels", "font.size": 11})
    import matplotlib.pyplot as pyplot

    return pyplot


def save(figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None}, facecolor="white", bbox_inches="tight", dpi=120)


def plot_peers(path: Path) -> None:
    recorded = json.loads(PEERS.read_text(encoding="utf-8"))
    found = points(recorded["results"])
    environment = recorded["environment"]
    pyplot = settings()
    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    for peer, (speedup, different, _) in found.items():
        color = COLORS["ours"] if peer == OURS else COLORS["other"]
        axes.scatter(speedup, 100 * different, s=130 if peer == OURS else 80, color=color, zorder=3, clip_on=False)
        offset, alignment = LABELS.get(peer, ((0, 11), "center"))
        axes.annotate(
            f"{peer}, {speedup:.1f}x",
            (speedup, 100 * different),
            xytext=offset,
            textcoords="offset points",
            ha=alignment,
            color=COLORS["ours"] if peer == OURS else COLORS["text"],
            weight="bold" if peer == OURS else "normal",
        )
    axes.set_xlim(0, 1.25 * max(speedup for speedup, _, _ in found.values()))
    axes.set_ylim(0, 118)
    axes.set_yticks([0, 25, 50, 75, 100], [f"{share}%" for share in (0, 25, 50, 75, 100)])
    axes.set_xlabel("speed of RMSNorm, eager = 1 (right is faster)")
    axes.set_ylabel("cases whose bits\ndiffer from eager's")
    axes.grid(color=COLORS["grid"])
    axes.spines[["top", "right"]].set_visible(False)
    versions = environment["versions"]
    figure.text(
        0.02,
        -0.06,
        f"{environment['gpu']}, torch {versions['torch']}, Triton {versions['triton']}, Liger {versions['liger-kernel']}, "
        f"quack {versions['quack-kernels']}, {recorded['dtype']}, {environment['date'][:10]}.\n"
        f"Geometric mean of {found[OURS][2]} cases, forward and backward, CUDA-event timing: docs/peers/peers.md.",
        fontsize=8.5,
        color=COLORS["text"],
    )
    save(figure, path)


def plot_models(path: Path) -> None:
    recorded = json.loads(MODELS.read_text(encoding="utf-8"))
    bars = recorded["bars"]
    pyplot = settings()
    figure, panels = pyplot.subplots(1, len(bars), figsize=(10, 3.4))
    for axes, bar in zip(panels, bars):
        for place, (key, color) in enumerate((("eager_ms", COLORS["other"]), ("ours_ms", COLORS["ours"]))):
            axes.bar(place, bar[key], color=color, width=0.7)
            axes.annotate(f"{bar[key]:.2f}", (place, bar[key]), (0, 3), textcoords="offset points", ha="center")
        axes.set_title(f"{bar['label'].replace(', ', chr(10))}\n{bar['speedup']}", fontsize=10)
        axes.set_xticks([0, 1], ["eager", "ours"])
        axes.set_ylim(0, 1.15 * bar["eager_ms"])
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
    gpu, *rest = recorded["environment"].split(", ")
    figure.text(0.02, -0.05, f"ms. {gpu}, {', '.join(rest)}. Each panel has a scale of its own.", fontsize=8.5)
    figure.tight_layout()
    save(figure, path)


def family_of(op: str) -> str:
    """The name of a function's cases in the chart."""
    function = op.removesuffix("_backward")
    if "softmax" in function:
        return "softmax of scores" if function.startswith("masked") else "softmax"
    if function.startswith("rotary"):
        return "rotary embedding"
    if function in ("cross_entropy", "kl_div", "tvd"):
        return "losses"
    if function.endswith(("lu", "_and_mul")):
        return "activations"
    names = {"rms_norm": "RMSNorm", "add_rms_norm": "RMSNorm", "layer_norm": "LayerNorm", "group_norm": "GroupNorm"}
    names |= {"cohere_layer_norm": "Cohere's LayerNorm", "dyt": "dynamic tanh"}
    return names.get(function, function)


def plot_beside_eager(path: Path) -> None:
    recorded = json.loads(BESIDE_EAGER.read_text(encoding="utf-8"))
    families: dict[str, list[float]] = {}
    cases = [case for case in recorded["cases"] if "error" not in case and case["kernel"]]
    equal = sum(case["bit_equal"] for case in cases)
    for case in cases:
        families.setdefault(family_of(case["op"]), []).append(case["eager_ms"] / case["ours_ms"])
    order = sorted(families, key=lambda family: sorted(families[family])[len(families[family]) // 2])
    pyplot = settings()
    figure, axes = pyplot.subplots(figsize=(8, 4.6))
    for place, family in enumerate(order):
        speeds = families[family]
        # Points lie beside each other in the order of the run.
        heights = [place + 0.6 * (index * 0.618 % 1 - 0.5) for index in range(len(speeds))]
        colors = [COLORS["slower"] if speed * SPREAD < 1 else COLORS["ours"] for speed in speeds]
        # As an image: so many points would make a file of 300 KB.
        axes.scatter(speeds, heights, s=7, color=colors, alpha=0.6, linewidths=0, rasterized=True)
    axes.axvline(1, color=COLORS["text"], linewidth=0.8)
    axes.set_xscale("log")
    ticks = (0.5, 1, 2, 5, 10, 20)
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(order)), [f"{family} ({len(families[family])})" for family in order])
    axes.set_xlabel("speed, eager = 1 (right is faster)")
    axes.grid(color=COLORS["grid"], axis="x")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    every, versions = sum(families.values(), []), recorded["environment"]["versions"]
    slower = sum(speed * SPREAD < 1 for speed in every)
    figure.text(
        0.02,
        -0.05,
        f"{len(every):,} cases, {'all' if equal == len(every) else equal} with eager's bits; "
        f"red: {slower} that take more than {SPREAD - 1:.0%} longer than eager. Device time, "
        f"{recorded['environment']['gpu']},\ntorch {versions['torch']}, Triton {versions['triton']}, "
        f"{recorded['environment']['date'][:10]}: make beside-eager.",
        fontsize=8.5,
        color=COLORS["text"],
    )
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/pictures", help="the folder of the SVG files")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    plot_peers(options.output / "peers.svg")
    plot_models(options.output / "models.svg")
    plot_beside_eager(options.output / "beside_eager.svg")


if __name__ == "__main__":
    main()
