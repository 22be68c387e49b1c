"""What MkDocs does beside its own: pages that are files of the root, and one table of two."""

import itertools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

INCLUDE = re.compile(r"\A<!-- include: (\S+) -->\n")
TABLE = "<!-- model table -->"
# Files of the root that are pages of the site, and files that the site does not have.
PAGES = {name: name.lower() for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
LINK = re.compile(r"(\]\()([^)#:\s]+)([)#])")


def on_config(config):
    """The repository's address is `source` in build.toml; without it the site links no repository."""
    source = re.search(r'^source = "(https://[^"]+)"$', (ROOT / "build.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if source:
        config["repo_url"] = config["repo_name"] = source[1]
    return config


def on_page_markdown(markdown: str, page, config, files) -> str:
    """A page that begins with `<!-- include: FILE -->` has the text of that file, its links seen from docs/."""
    include = INCLUDE.match(markdown)
    if include:
        markdown = from_root((ROOT / include[1]).read_text(encoding="utf-8"))
    if TABLE in markdown:
        markdown = markdown.replace(TABLE, model_table(ROOT / "docs"))
    # A folder is a page on GitHub and none here.
    return markdown.replace("](log/)", "](log/runs.md)")


def from_root(text: str) -> str:
    """Text of a file in the root with links as a page in docs/ has them; other files of the root become code."""

    def link(match):
        target = PAGES.get(match[2], match[2].removeprefix("docs/"))
        return f"{match[1]}{target}{match[3]}"

    known = "|".join(re.escape(name) for name in PAGES)
    text = re.sub(rf"\[([^\]]+)\]\((?!docs/|https?:|#|(?:{known})[)#])[^)]*\)", r"`\1`", text)
    return LINK.sub(link, text)


def rows_of(text: str) -> list[list[str]]:
    """The cells of the first table in a text, without its head."""
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), text.splitlines())
    table = [*itertools.takewhile(lambda line: line.startswith("|"), lines)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def model_table(folder: Path) -> str:
    """One table of docs/replaced.md and docs/decoders.md."""
    lines = ["| class or function | layer name | computes | inference | training |", "|---|---|---|---|---|"]
    for layer, name, computes, inference, training in rows_of((folder / "replaced.md").read_text(encoding="utf-8")):
        lines.append(f"| {name} | {layer} | {computes} | {inference} | {training} |")
    for model, layers, attention, mlp in rows_of((folder / "decoders.md").read_text(encoding="utf-8")):
        parts = "; ".join(part for part in (attention, mlp) if part != "-")
        with_parts = f"with {parts}" if parts else "attention and MLP as they are"
        lines.append(f"| {layers}, {model} | whole decoder layer | {with_parts} | recognised | recognised |")
    return f'<div class="filtered" markdown>\n\n{chr(10).join(lines)}\n\n</div>'
