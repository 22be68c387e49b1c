"""A stranger's path: `git clone`, `make demo`, the programs of README.md, `restore`. Real parts, and no network."""

import json
import re
import shutil
import sys

import pytest
from programs import PRELUDES
from projects import ROOT, run

# A proxy that does not answer: whatever leaves this machine fails.
NO_NETWORK = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
}
# What the demo prints, in this order: tables of the original layers and of the interpreter, and the steps on a local Hub.
PARTS = ("original layers, fp", "Triton's interpreter, fp", "From a Hub on this machine")

RESTORED = """
import json

report = kernel.replacement_report(model, verbose=False)
paths = sorted({entry.path for entry in report.layers})
kernel.restore(model)
assert not [module for module in model.modules() if "forward" in vars(module)]
with torch.no_grad():
    assert torch.equal(model.eval()(tokens).logits, expected)
print(json.dumps([kernel.__file__, paths, torch.equal(logits, expected)]))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The last commit of this checkout; nothing of it is built."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("this is no git checkout, so nothing can be cloned")
    folder = tmp_path_factory.mktemp("stranger")
    done = run(["git", "clone", "--quiet", ROOT, "lossless-kernels"], folder)
    assert done.returncode == 0, done.stderr
    return folder / "lossless-kernels"


def stranger(command, folder, **environment):
    """What the command prints. This process's variables of make, Triton and this package are not a stranger's."""
    ours = ("MAKEFLAGS", "MAKELEVEL", "TRITON_INTERPRET", "LOSSLESS_PROOF", "PYTHONPATH")
    environment = {**dict.fromkeys(ours, ""), "LOSSLESS_PROOF": "on", "CUDA_VISIBLE_DEVICES": "", **environment}
    done = run(command, folder, **{"PYTHON": sys.executable, **NO_NETWORK, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("arguments", ["", "--tokens 3 --dtype fp16 --seed 7"], ids=["plain", "with ARGS"])
def test_the_demo_has_both_parts(clone, arguments):
    printed = stranger(["make", "demo", *([f"ARGS={arguments}"] if arguments else [])], clone)
    assert (clone / "build/torch-cpu/metadata.json").is_file() and not (clone / ".venv").exists()
    places = [printed.find(part) for part in PARTS]
    assert places == sorted(places) and places[0] >= 0, printed
    assert ("seed 7" in printed) == bool(arguments)
    assert not run(["git", "status", "--porcelain"], clone).stdout, "the demo leaves files that git would take"


@pytest.mark.long
@pytest.mark.parametrize("interpreted", [False, True], ids=["cpu", "interpreter"])
def test_the_programs_of_the_readme_and_restore(clone, interpreted):
    stranger([sys.executable, "scripts/build_kernel.py"], clone)
    programs = re.findall(r"^```python\n(.*?)^```$", (clone / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(programs) == 3 and "kernel.apply(model)" in programs[0] and "loss.backward()" in programs[1]
    code = "\n".join([PRELUDES["README.md"], programs[0], RESTORED, *programs[1:], RESTORED])
    environment = {"TRITON_INTERPRET": "1", "LOSSLESS_PROOF": "off"} if interpreted else {}
    printed = stranger([sys.executable, "-c", code], clone, **environment)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
    assert len(found) == 2 and all(file.startswith(f"{clone}/build/") for file, *_ in found)
    for _, paths, equal in found:
        assert paths and paths != ["original"] if interpreted else paths == ["original"] and equal
