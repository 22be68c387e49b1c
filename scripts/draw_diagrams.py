"""Draws the diagrams of the documentation as SVG: tree.svg, decoder.svg, proof.svg.

python scripts/draw_diagrams.py [--output docs/pictures]
"""

import argparse
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent

INK, LINE, SOFT = "#212529", "#868e96", "#f1f3f5"
OURS, EAGER, CALLED, WARN = "#c5f6fa", "#ffe8cc", "#e9ecef", "#ffe3e3"


class Drawing:
    """Shapes on a white sheet of `width` x `height` pixels."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def text(self, x, y, text, size=13, anchor="middle", weight="normal", color=INK):
        for number, line in enumerate(text.split("\n")):
            self.parts.append(
                f'<text x="{x:g}" y="{y + number * (size + 4):g}" font-size="{size}" text-anchor="{anchor}" '
                f'font-weight="{weight}" fill="{color}">{escape(line)}</text>'
            )

    def box(self, x, y, width, height, text="", fill=SOFT, size=13):
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" stroke="{LINE}"/>'
        )
        if text:
            lines = text.count("\n")
            self.text(x + width / 2, y + height / 2 + size * 0.36 - lines * (size + 4) / 2, text, size)

    def line(self, x1, y1, x2, y2, arrow=False):
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(
            f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{LINE}" stroke-width="1.4" fill="none"{end}/>'
        )

    def plus(self, x, y):
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="8" fill="white" stroke="{INK}"/>')
        self.text(x, y + 4.5, "+", 13)

    def svg(self) -> str:
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" font-family="system-ui, sans-serif" role="img">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                f'orient="auto"><path d="M0 0 L8 4 L0 8 Z" fill="{LINE}"/></marker></defs>',
                f'<rect width="{self.width}" height="{self.height}" fill="white"/>',
                *self.parts,
                "</svg>\n",
            )
        )


def tree() -> Drawing:
    """The order of a row sum: what a lane adds, the four accumulators, the halving tree; beside it a sum in sequence."""
    draw = Drawing(1010, 540, "Reduction order of a row of 4096 fp32 numbers, and a plain sum")
    draw.text(280, 24, "eager's order: 4096 numbers, 16 rows or more", 15, weight="bold")
    draw.text(20, 52, "the row, in groups of four", 12, "start")
    lanes = ("lane 0", "lane 1", "lane 2", "...", "lane 31")
    for column, lane in enumerate(lanes):
        for step, first in enumerate((0, 128)):
            x, y = 20 + column * 108, 62 + step * 34
            number = {"lane 0": 0, "lane 1": 4, "lane 2": 8, "lane 31": 124}.get(lane)
            label = "..." if number is None else f"{first + number} .. {first + number + 3}"
            draw.box(x, y, 96, 26, label, OURS if number is not None else "white", 12)
        x = 20 + column * 108 + 48
        draw.text(x, 146, "...", 13)
        if lane != "...":
            draw.line(x, 152, x, 168, arrow=True)
            draw.box(x - 48, 170, 96, 26, "a0 a1 a2 a3", size=12)
            draw.line(x, 196, x, 214, arrow=True)
            draw.text(x, 230, "((a0+a1)+a2)+a3", 11)
            draw.text(x, 250, lane, 12, weight="bold")
    draw.text(580, 100, "each lane takes every\n32nd group of four,\n32 groups in sequence", 12, "start")
    draw.text(580, 184, "four accumulators,\none for each position", 12, "start")
    draw.text(580, 238, "combined in sequence", 12, "start")

    # The halving tree, drawn for 8 of the 32 lanes.
    places = [60 + 60 * lane for lane in range(8)]
    y = 290
    for lane, x in enumerate(places):
        draw.box(x - 20, y, 40, 24, ("0", "1", "2", "3", "16", "17", "18", "19")[lane], OURS, 12)
    draw.text(580, 306, "32 lanes (8 of them drawn):\nthe upper half is added\nto the lower half", 12, "start")
    level, bottom = places, y + 24
    for half in (4, 2, 1):
        down = bottom + 46
        for lane in range(half):
            for x in (level[lane], level[lane + half]):
                draw.line(x, bottom if bottom == y + 24 else bottom + 8, level[lane], down - 9)
            draw.plus(level[lane], down)
        level, bottom = level[:half], down
    draw.line(level[0], bottom + 8, level[0], bottom + 30, arrow=True)
    draw.box(level[0] - 36, bottom + 32, 72, 26, "row sum", OURS, 12)
    draw.text(
        level[0] + 60,
        bottom + 42,
        "Longer rows, or fewer than 16 of them: several warps\nof a block share a row; their sums are halved alike.",
        12,
        "start",
    )

    draw.line(790, 40, 790, 520)
    draw.text(900, 24, "a plain sum", 15, weight="bold")
    draw.box(840, 62, 50, 26, "0", EAGER, 12)
    draw.line(865, 88, 865, 109)
    for number in range(5):
        y = 118 + number * 62
        draw.box(930, y - 42, 60, 26, f"x{number}", EAGER, 12)
        draw.line(930, y - 29, 872, y - 5)
        draw.plus(865, y)
        draw.line(865, y + 8, 865, y + 53, arrow=number == 4)
    draw.text(900, 440, "4096 additions in sequence:\nother last bits", 12)
    return draw


# Launches of one decoder layer, bf16, forward: (name, launches of eager, launches here, who runs it).
LAUNCHES = (
    ("RMSNorm", 8, 1),
    ("q, k, v projections", 3, 3),
    ("rotary embedding of q and k", 10, 1),
    ("attention function", None, None),
    ("output projection", 1, 1),
    ("residual add, then RMSNorm", 9, 1),
    ("gate and up projections", 2, 2),
    ("SiLU and product", 2, 1),
    ("down projection", 1, 1),
    ("residual add", 1, 1),
)


def decoder() -> Drawing:
    """Launches of a Llama decoder layer before and after."""
    draw = Drawing(900, 470, "Kernel launches of a Llama decoder layer, forward, before and after")
    draw.text(20, 28, "Kernel launches of a Llama decoder layer, forward, bf16", 15, "start", "bold")
    draw.text(260, 58, "eager", 13, "start", "bold")
    draw.text(610, 58, "lossless-kernels", 13, "start", "bold")
    for row, (name, eager, ours) in enumerate(LAUNCHES):
        y = 72 + row * 36
        draw.text(20, y + 17, name, 13, "start")
        for x, count, fill in ((260, eager, EAGER), (610, ours, OURS)):
            if count is None:
                draw.box(x, y, 214, 24, "as the model is configured", CALLED, 12)
                continue
            same = eager == ours
            for number in range(count):
                draw.box(x + number * 30, y, 24, 24, fill=CALLED if same else fill)
            draw.text(x + count * 30 + 6, y + 17, str(count), 12, "start")
    eager = sum(count or 0 for _, count, _ in LAUNCHES)
    ours = sum(count or 0 for _, _, count in LAUNCHES)
    y = 72 + len(LAUNCHES) * 36 + 8
    draw.text(20, y + 12, "without the attention function", 13, "start", "bold")
    draw.text(260, y + 12, str(eager), 13, "start", "bold")
    draw.text(610, y + 12, str(ours), 13, "start", "bold")
    return draw


def proof() -> Drawing:
    """What happens at a call of a replaced layer."""
    draw = Drawing(1000, 560, "The proof: which path a call of a replaced layer takes")
    middle, width = 330, 300

    def step(y, text, fill=SOFT, height=46):
        draw.box(middle - width / 2, y, width, height, text, fill)

    def down(y1, y2, label="yes"):
        draw.line(middle, y1, middle, y2 - 1, arrow=True)
        draw.text(middle + 10, (y1 + y2) / 2 + 4, label, 12, "start")

    def refused(y, label):
        draw.line(middle + width / 2, y, 738, y, arrow=True)
        draw.text(middle + width / 2 + 10, y - 7, label, 12, "start")

    step(20, "a call of a replaced layer")
    down(66, 96, "")
    step(96, "Does a kernel take these tensors?\n(device, dtype, shape, strides, modes)")
    refused(119, "no: the report has the reason")
    down(142, 182)
    step(182, "Is there a verdict for this forward,\nthese dtypes and this kind of kernel?")
    draw.line(middle - width / 2, 205, 100, 205)
    draw.line(100, 205, 100, 497)
    draw.line(100, 497, middle - width / 2 - 1, 497, arrow=True)
    draw.text(110, 197, "passed", 12, "start")
    refused(205, "failed before, or a graph is captured")
    down(228, 268, "none yet")
    step(268, "Formula proof: the original forward equals\na known formula, gradients included?")
    refused(291, "no: one warning")
    down(314, 354)
    step(354, "Order proof: the compiled kernel returns the\noriginal's bits, and those of its fp32 sums?")
    refused(377, "no: one warning")
    down(400, 474)
    step(474, "the kernel runs", OURS)
    draw.box(
        740,
        96,
        240,
        304,
        "the original layer runs\n\nLOSSLESS_PROOF=strict raises\nLosslessProofError instead\nwhen a proof fails",
        EAGER,
    )
    draw.text(980, 545, "Each proof runs once a process, on synthetic data, on your GPU.", 12, "end")
    return draw


DRAWINGS = {"tree.svg": tree, "decoder.svg": decoder, "proof.svg": proof}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/pictures", help="the folder of the SVG files")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (options.output / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
