"""The documentation: README's size, links, navigation, pictures and the site.

Its programs run in test_programs.py.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CARD.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *PAGES,
]
NO_LINKS = re.compile(r"```.*?```|`[^`\n]+`|<!--.*?-->", re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def name_of(path):
    return str(path.relative_to(ROOT))


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def links_of(path):
    return [match[1] for match in LINK.finditer(NO_LINKS.sub("", path.read_text(encoding="utf-8")))]


def anchors_of(path):
    """What GitHub and MkDocs make of a document's headings."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    if included := re.match(r"<!-- include: (\S+) -->", text):
        return anchors_of(ROOT / included[1])
    anchors = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = unicodedata.normalize("NFKD", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", ""))
        anchors.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return anchors


def test_readme_is_one_sitting():
    """Its tables and code are as wide as its prose, too."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    for number, line in enumerate(lines, 1):
        assert len(line) <= 120, f"README.md:{number}: {len(line)} columns"


@pytest.mark.parametrize("name", ["README.md", "docs/install.md"])
def test_installed_versions_have_run_on_a_gpu(name):
    pins = dict(re.findall(r"\b([\w-]+)==([\d.]+)", (ROOT / name).read_text(encoding="utf-8")))
    assert [*pins] == ["torch", "transformers", "kernels"]
    minor = pins["torch"].rpartition(".")[0]
    table = (DOCS / "install.md").read_text(encoding="utf-8").splitlines()
    rows = [row.split("|")[1:4] for row in table if row.startswith(("| H100", "| H200"))]
    pair = f"{pins['transformers']}, {pins['kernels']}"
    ran = {gpu.strip() for gpu, torch, pairs in rows if torch.strip().startswith(f"{minor},") and pair in pairs}
    assert ran == {"H100", "H200"}


# Logs and pages that a program writes are left out.
PROSE = [path for path in DOCUMENTS if path.parent == ROOT or path.parent == DOCS]
PROSE = [path for path in PROSE if path.name not in ("replaced.md", "decoders.md")]


@pytest.mark.parametrize("path", PROSE, ids=name_of)
def test_lines_of_prose(path):
    # Neither programs nor what scripts/versions.py writes.
    text = re.sub(r"```.*?```|<!-- written by .*?<!-- until here -->", "", path.read_text("utf-8"), flags=re.DOTALL)
    for line in text.splitlines():
        assert len(line) <= 120 or line.lstrip().startswith("|"), f"{len(line)} columns: {line}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path):
    for link in links_of(path):
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://"), link
            continue
        target, _, anchor = link.partition("#")
        found = (path.parent / target) if target else path
        assert found.resolve().is_relative_to(ROOT) and found.exists(), f"{name_of(path)}: {link}"
        if anchor:
            assert anchor in anchors_of(found), f"{name_of(path)}: {link}; there are {sorted(anchors_of(found))}"


def test_a_link_to_nothing_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for text in ("[a](b.md)", "[a](#b)", "![a](b.png)", "[a](http://example.org)"):
        (tmp_path / "page.md").write_text(f"# A\n{text}\n")
        with pytest.raises(AssertionError):
            test_links_lead_somewhere(tmp_path / "page.md")
    (tmp_path / "page.md").write_text("# A b, `c`\n[a](page.md#a-b-c) `[a](b.md)`\n")
    test_links_lead_somewhere(tmp_path / "page.md")


def test_environment_variables_are_on_their_page():
    """Those with the project's prefix, those that the diagnosis reads, and all that a program reads or sets."""
    sources = [
        path
        for name in ("torch-ext", "scripts", "tests", "examples", "benchmarks")
        for path in (ROOT / name).rglob("*.py")
    ]
    read = {name for path in sources for name in re.findall(r"\bLOSSLESS_[A-Z]+\b", path.read_text(encoding="utf-8"))}
    diagnosis = (ROOT / "torch-ext/lossless_kernels/diagnosis.py").read_text(encoding="utf-8")
    read |= {*re.findall(r'"([A-Z]+(?:_[A-Z]+)*)"', re.search(r"_VARIABLES = \(.*?\)", diagnosis)[0])}
    for path in sources:
        if path.parent.name != "tests":
            text = path.read_text(encoding="utf-8")
            read |= {*re.findall(r'environ\w*(?:\.get|\.setdefault|\.pop)?[\[(]"([A-Z_]+)"', text)}
            read |= {*re.findall(r'"([A-Z_]+)" (?:not )?in os\.environ', text)}
    assert {"LOSSLESS_SEED", "LOSSLESS_PROOF", "CC", "LOCAL_RANK", "TRANSFORMERS_VERBOSITY"} <= read
    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    missing = [name for name in sorted(read) if not re.search(rf"`{name}\b", page)]
    assert not missing, missing


def navigation(entries):
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from navigation(value) if isinstance(value, list) else [value]


def test_every_page_is_in_the_navigation():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed, so mkdocs.yml cannot be read")
    pages = list(navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert sorted(pages) == sorted(str(path.relative_to(DOCS)) for path in PAGES)


def test_every_page_can_be_reached_from_the_readme():
    """On GitHub there is no navigation."""
    seen, queue = set(), [ROOT / "README.md"]
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        targets = ((path.parent / link.partition("#")[0]).resolve() for link in links_of(path) if ":" not in link)
        queue += [target for target in targets if target.suffix == ".md"]
        queue += [page for target in targets if target.is_dir() for page in target.glob("*.md")]
    # These show a file of the root; log/ is linked as a folder.
    shown = {path for path in PAGES if path.read_text(encoding="utf-8").startswith("<!-- include: ")}
    assert {name_of(path) for path in {*PAGES} - seen - shown if path.parent.name != "log"} == set()


def test_every_public_name_is_in_the_reference():
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    source = (ROOT / "torch-ext/lossless_kernels/__init__.py").read_text(encoding="utf-8")
    names = re.findall(r'"(\w+)"', source.partition("__all__")[2])
    assert len(names) > 15
    for name in names:
        assert re.search(rf"^::: lossless_kernels\.{name}$", text, re.MULTILINE), name


def _columns(path):
    """The cells of a page's only table, its first row left out, by the names of that row."""
    rows = [
        line.strip("|").split("|") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")
    ]
    names, _, *rows = ([cell.strip() for cell in row] for row in rows)
    assert all(len(row) == len(names) for row in rows)
    return [dict(zip(names, row)) for row in rows]


SUITE = """
    cross_entropy dyt fused_add_rms_norm fused_linear_cross_entropy fused_linear_jsd fused_neighborhood_attention geglu
    group_norm jsd kl_div layer_norm llama4_rope poly_norm qwen2vl_mrope rms_norm rope softmax sparsemax swiglu
    tiled_geglu tiled_swiglu tvd
""".split()


def test_the_suite_has_22_rows_of_names_that_exist(kernel):
    rows = _columns(DOCS / "suite.md")
    assert [row["kernel of the list"] for row in rows] == SUITE and len(SUITE) == 22
    for row in rows:
        assert all(row.values()), row
        names, promise = re.findall(r"`([^`]+)`", row["name here"]), row["promise"]
        for name in names:
            assert name in kernel.__all__ or hasattr(kernel.layers, name), name
        # What has no name promises nothing, and what has one promises something.
        assert bool(names) != (row["name here"] == "none"), row
        assert bool(names) != promise.startswith(("not yet", "left to")), row
        # A function of the list's own name has its row.
        assert row["kernel of the list"] not in kernel.__all__ or row["kernel of the list"] in names, row


def test_the_repositorys_address_has_one_home():
    """`source` in build.toml; the pages say that there is none yet as long as there is none."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed, so CITATION.cff cannot be read")
    text = (ROOT / "build.toml").read_text(encoding="utf-8")
    found = re.search(r'^source = "(https://[^"]+)"$', text, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation.get("repository-code") == (found and found[1])
    for name in ("README.md", "docs/install.md"):
        page = (ROOT / name).read_text(encoding="utf-8")
        assert 'git clone "$REPOSITORY"' in page and "build.toml" in page
        assert bool(re.search(r"(?:is|\*\*not) published yet", page)) == (found is None), name


def test_how_lossless_works_in_sixty_lines():
    text = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(program.splitlines()) <= 60 and max(map(len, program.splitlines())) <= 120
    assert re.findall(r"^import .*|^from .*", program, re.MULTILINE) == ["import torch"], "it needs torch alone"


# Pictures


def test_diagrams_are_those_of_the_script(tmp_path):
    module = module_of(ROOT / "scripts/draw_diagrams.py")
    for name, draw in module.DRAWINGS.items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == draw().svg(), "run scripts/draw_diagrams.py"


def test_charts_show_the_recorded_figures(tmp_path):
    """Texts of the SVG alone: another matplotlib places them elsewhere."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed, so no chart can be drawn")
    command = [sys.executable, "benchmarks/plot_figures.py", "--output", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env={"MPLCONFIGDIR": str(tmp_path)})
    for name in ("peers.svg", "models.svg", "beside_eager.svg"):
        drawn, kept = ((folder / name).read_text() for folder in (tmp_path, DOCS / "pictures"))
        texts = re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", kept)
        assert len(texts) > 10
        assert texts == re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", drawn), "run benchmarks/plot_figures.py"


def test_figures_of_the_1b_model_are_those_of_performance():
    recorded = json.loads((DOCS / "pictures/models.json").read_text(encoding="utf-8"))
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    for bar in recorded["bars"]:
        figures = [f"{bar[key]:.2f} ms" for key in ("eager_ms", "ours_ms")] + [bar["speedup"]]
        rows = [line for line in text.splitlines() if line.startswith("| 1B") and all(each in line for each in figures)]
        assert len(rows) == 1, bar
        # The table's speedup is of times before they were rounded to 0.01 ms.
        assert abs(float(bar["speedup"].rstrip("x")) - bar["eager_ms"] / bar["ours_ms"]) < 0.01


def test_launches_of_the_diagram_are_eagers():
    """Operations of a Llama decoder layer that compute: views and the attention function aside."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            name = str(function).split(".")[1]
            if not re.search(r"view|^t$|transpose|slice|unsqueeze|attention", name):
                self.launches += 1
            return function(*arguments, **(keywords or {}))

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=1, attn_implementation="sdpa")
    layer, x = LlamaDecoderLayer(config, 0).to(torch.bfloat16), torch.randn(1, 8, 64).to(torch.bfloat16)
    tables = LlamaRotaryEmbedding(config)(x, torch.arange(8)[None])
    count = Count()
    count.launches = 0
    with torch.no_grad(), count:
        layer(x, position_embeddings=tables)
    rows = module_of(ROOT / "scripts/draw_diagrams.py").LAUNCHES
    assert count.launches == sum(eager or 0 for _, eager, _ in rows)


# The site


def test_the_table_of_models_has_every_row_of_both_pages():
    hooks = module_of(ROOT / "scripts/site_hooks.py")
    table = hooks.model_table(DOCS)
    for name in ("Qwen3RMSNorm", "apply_rotary_pos_emb, llama", "LlamaDecoderLayer, llama", "SiLUActivation"):
        assert f"| {name} |" in table
    rows = sum(len(hooks.rows_of((DOCS / name).read_text())) for name in ("replaced.md", "decoders.md"))
    assert rows > 300
    assert len(hooks.rows_of(table)) == rows
    assert all(len(row) == 5 for row in hooks.rows_of(table))


def test_counts_of_models_are_those_of_the_tables():
    hooks = module_of(ROOT / "scripts/site_hooks.py")
    classes, decoders = (hooks.rows_of((DOCS / name).read_text()) for name in ("replaced.md", "decoders.md"))
    replaced = sum(row[3:] == ["lossless", "lossless"] for row in classes)
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    assert f"{replaced} of the {len(classes)} classes and functions" in text
    assert f"recognised in {len(decoders)} model files" in " ".join(text.split())
    assert f"{replaced} of {len(classes)} classes and functions" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_of_included_files_are_seen_from_docs():
    hooks = module_of(ROOT / "scripts/site_hooks.py")
    text = "[a](docs/install.md#b) [c](CHANGELOG.md) [d](https://e.org/f) [g](#h) [build.toml](build.toml) ![i](docs/j.svg)"
    expected = "[a](install.md#b) [c](changelog.md) [d](https://e.org/f) [g](#h) `build.toml` ![i](j.svg)"
    assert hooks.from_root(text) == expected


# A page with one table of three rows, and what the field shows for some words.
FILTER = """
const source = require("fs").readFileSync(process.argv[1], "utf8");
const rows = ["Qwen3RMSNorm RMSNorm", "LlamaDecoderLayer decoder", "Qwen3DecoderLayer decoder"].map((textContent) => ({textContent}));
const box = {querySelector: () => null, querySelectorAll: () => rows, prepend: (...added) => (box.added = added)};
const element = () => ({setAttribute() {}, addEventListener(event, update) { this.update = update; }, value: ""});
const page = {querySelectorAll: () => [box], createElement: element};
new Function("document$", "document", source)({subscribe: (run) => run()}, page);
const [field, count] = box.added;
for (const words of ["", "qwen3 Decoder", "gemma"]) {
  field.value = words;
  field.update();
  console.log(count.textContent.trim(), rows.map((row) => Number(row.hidden)).join(""));
}
"""


def test_the_filter_of_the_table():
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed, so the site's script cannot run")
    done = subprocess.run([node, "-e", FILTER, DOCS / "assets/filter.js"], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["3 of 3 000", "1 of 3 110", "0 of 3 111"], done.stderr


def test_ci_builds_the_site_strictly():
    """In an environment of its own, which the tests' does not have."""
    assert re.search(r"^make test docs\b", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    assert "-m mkdocs build --strict" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_site_has_the_repositorys_address_of_build_toml(tmp_path, monkeypatch):
    hooks = module_of(ROOT / "scripts/site_hooks.py")
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    for line, expected in (("", None), ('source = "https://example.org/a/b"', "https://example.org/a/b")):
        (tmp_path / "build.toml").write_text(f"[general]\n{line}\n")
        assert hooks.on_config({"repo_url": None})["repo_url"] == expected
    assert "repo_url" not in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_versions_of_the_site_are_pinned():
    lines = (DOCS / "requirements.txt").read_text(encoding="utf-8").splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert packages and all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in packages)
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {".venv-docs/", "/site/"} <= {*ignored}


def test_citation_and_issue_templates_are_yaml():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed, so these files cannot be read")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= {*citation}
    templates = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert len(templates) == 5
    for path in templates:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert path.name == "config.yml" or {"name", "description", "body"} <= {*found}
