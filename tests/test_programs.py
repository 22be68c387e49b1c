"""The Python of README.md, CARD.md and docs/*.md runs as it stands there.

A block that begins with "# Continues the first program" goes on with the names of its document's first one; any other is
a program of its own. The Hub that they name is the one of scripts/local_hub.py. They run on a CPU.
"""

import ast
import json
import re

import pytest
from hub import local_hub, upload_build
from programs import CONTINUES
from projects import REPO_ID, ROOT

# It quotes code in pieces: tests/test_repository.py compares them with the files.
_QUOTES = ROOT / "docs/add-a-kernel.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "CARD.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {_QUOTES})]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Functions of this package and of kernels that the text names with their arguments.
CALL = re.compile(r"`(kernel\.\w+\([^`\n]*\)|get_\w+\([^`\n]+\))`")
# What cannot run here, by a word in it, and why. Its imports run, and its names are looked up.
LOOKED_UP = {
    "KernelConfig": "transformers' KernelConfig refuses a model on a CPU",
    "CUDAGraph": "a CUDA graph needs a GPU",
    "init_process_group": "torchrun starts it, on two GPUs",
}


def text_of(path):
    text = path.read_text(encoding="utf-8")
    return text.replace("{{ repo_id }}", REPO_ID).replace("{{ version }}", "1") if path.name == "CARD.md" else text


def blocks():
    """(document, line, language, text) of every block of code."""
    for path in DOCUMENTS:
        text = text_of(path)
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start(2)) + 1
            yield str(path.relative_to(ROOT)), line, match[1], match[2]


# TRL is not among the requirements: tests/test_slices.py runs this recipe where it is installed.
PROGRAMS = [
    (document, line, text)
    for document, line, language, text in blocks()
    if language == "python" and "from trl." not in text
]
# Triton reads its settings when it is imported.
ALONE = [each for each in PROGRAMS if "os.environ" in each[2]]
TOGETHER = [each for each in PROGRAMS if each not in ALONE]


def test_what_is_python_says_so():
    """A block in another fence would be left out here."""
    for document, line, language, text in blocks():
        assert language in ("", "python"), f"{document}:{line}"
        if not language:
            with pytest.raises(SyntaxError):
                ast.parse(text)
    for path in DOCUMENTS:
        assert len(re.findall(r"^\s*(```|~~~)", text_of(path), re.MULTILINE)) == 2 * len(FENCE.findall(text_of(path)))
    pages = ("how-it-works", "hub", "inference", "install", "losses", "models", "quickstart", "training")
    assert {document for document, _, _ in PROGRAMS} == {"README.md", "CARD.md", *(f"docs/{page}.md" for page in pages)}
    for word in LOOKED_UP:
        assert any(word in text for _, _, text in PROGRAMS), word


def test_programs_that_share_a_process(build, run_python, tmp_path):
    """One after another, with an empty cache, and with telemetry switched off in the way that docs/hub.md describes."""
    calls = sorted({call for path in DOCUMENTS for call in CALL.findall(text_of(path))})
    assert len(calls) > 10
    programs = [(*each, any(word in each[2] for word in LOOKED_UP)) for each in TOGETHER]
    (tmp_path / "programs.json").write_text(json.dumps([programs, calls]))
    with local_hub.serve(tmp_path / "hub") as hub:
        upload_build(hub, build)
        settings = {"CUDA_VISIBLE_DEVICES": "", "DO_NOT_TRACK": "1", "HF_HUB_USER_AGENT_ORIGIN": "unknown"}
        assert all(f"{name}={value}" in text_of(ROOT / "docs/hub.md") for name, value in [*settings.items()][1:])
        environment = {**local_hub.variables(hub), **settings, "HF_HOME": tmp_path / "home"}
        code = "import sys, programs; programs.main(sys.argv[1])"
        done = run_python(code, arguments=[tmp_path / "programs.json"], **environment)
    assert re.search(
        rf"^{len(TOGETHER)} programs, [1-9]\d* layers loaded, {len(calls)} calls$", done.stdout, re.MULTILINE
    )
    assert "LlamaRMSNorm" in done.stdout and "proofs in this process" in done.stdout


@pytest.mark.parametrize(("document", "line", "text"), ALONE, ids=[f"{each[0]}:{each[1]}" for each in ALONE])
def test_a_program_that_needs_its_own_process(build, run_python, document, line, text):
    assert not text.startswith(CONTINUES)
    done = run_python(text, CUDA_VISIBLE_DEVICES="")
    # Our layers ran, without the proof.
    assert re.search(r"^LlamaRMSNorm +5 +unproved", done.stdout, re.MULTILINE), done.stdout
