"""`scripts/interface.py`: which changes of the package break what a version promises. Each is made to a copy and imported."""

import compileall
import inspect
import json
import re
import shutil
import sys
from pathlib import Path

import build_kernel
import pytest
from build_kernel import tomllib
from interface import breaks
from projects import PACKAGE, ROOT, SCRIPTS, run

INIT, LAYERS, MAPPING, ACTIVATION, TOML = "__init__.py", "layers.py", "mapping.py", "ops/activation.py", "build.toml"
NORM = "def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float)"
FORWARD = "    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:"
DECORATOR = "    @torch.jit.ignore\n"
AT_END = object()


def first(text, new):
    """Replaces the first of several."""
    return lambda content: content.replace(text, new, 1)


ELSEWHERE = """
from torch import nn

class SiLUActivation(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input): ...
"""


def moved(content):
    """A layer whose forward stands in a base class."""
    start, end = content.index("class NewGELUActivation"), content.index("class FastGELUActivation")
    body = content[start:end]
    base = body.replace("class NewGELUActivation", "class _NewGELU")
    return content[:start] + base + "class NewGELUActivation(_NewGELU):\n    pass\n\n\n" + content[end:]


def renamed_in_base(content):
    content = moved(content)
    start = content.index("class _NewGELU")
    return content[:start] + content[start:].replace("def forward(", "def forwards(", 1)


# Each is one change, (file, text, its replacement) or (file, function of the content), or a list of such.
BREAKING = {
    # Names.
    "name gone": (INIT, '    "silu",\n', ""),
    "name gone from a built list": (INIT, lambda content: content.replace("[", "[*map(str, [", 1).replace('    "silu",\n', "").replace("]\n", "])]\n")),
    "name removed by code": (INIT, AT_END, '__all__.remove("silu")\n'),
    "list replaced by code": (INIT, AT_END, '__all__ = [name for name in __all__ if "gelu" not in name]\n'),
    "a tuple without one": (INIT, AT_END, '__all__ = tuple(set(__all__) - {"rms_norm"})\n'),
    "layers gone": (INIT, '    "layers",\n', ""),
    "name rebound to a constant": (INIT, AT_END, "silu = None\n"),
    "name rebound to a class": (INIT, AT_END, "silu = type('silu', (), {'__init__': lambda self, input: None})\n"),
    "function wrapped": (INIT, AT_END, "_silu = silu\nsilu = lambda x: _silu(x)\n"),
    "function bound by code": (INIT, AT_END, "import functools\nsilu = functools.partial(silu, approximate=1)\n"),
    # Parameters.
    "parameter renamed": (ACTIVATION, "def silu(input:", "def silu(x:"),
    "parameter gone": (INIT, AT_END, "from .ops.activation import gelu as _gelu\ndef gelu(input): return _gelu(input)\n"),
    "parameter needed": (ACTIVATION, "def silu(input: torch.Tensor", "def silu(input: torch.Tensor, out"),
    "parameter added": (ACTIVATION, "def silu(input: torch.Tensor", "def silu(input: torch.Tensor, out=None"),
    "parameters swapped": ("ops/rms_norm/function.py", NORM, "def rms_norm(weight, hidden_states, eps)"),
    "by name alone": ("ops/rms_norm/function.py", NORM, "def rms_norm(hidden_states, weight, *, eps)"),
    "by position alone": ("ops/rms_norm/function.py", NORM, "def rms_norm(hidden_states, weight, eps, /)"),
    "default changed": (MAPPING, 'level: str = "layer"', 'level: str = "decoder"'),
    "default computed": (MAPPING, 'devices: Sequence = ("cuda", "rocm")', "devices: Sequence = _DEVICE_TYPES[:1]"),
    "default gone": (MAPPING, "def name_layers(model: torch.nn.Module)", "def name_layers(model=None)"),
    "decorated": (ACTIVATION, AT_END, "_silu = silu\ndef silu(*arguments): return _silu(*arguments)\n"),
    # Layers.
    "layer renamed": (LAYERS, lambda content: content.replace("SiLUActivation", "SiLU")),
    "layer deleted": (LAYERS, AT_END, "del GeGLUMLP\n"),
    "layer deleted by code": (LAYERS, AT_END, 'globals().pop("GeGLUMLP")\n'),
    "layer left out": (LAYERS, AT_END, '__all__ = ["LlamaRMSNorm"]\n'),
    "layer is no module": (LAYERS, "class GELUTanh(_Layer):", "class GELUTanh:"),
    "layer with a constructor": (LAYERS, first(DECORATOR, "    def __init__(self, n): ...\n" + DECORATOR)),
    "no gradients": (LAYERS, first(DECORATOR, "    has_backward = False\n" + DECORATOR)),
    "not to be compiled": (LAYERS, first(DECORATOR, "    can_torch_compile = False\n" + DECORATOR)),
    "set by code": (LAYERS, AT_END, "SiLUActivation.has_backward = False\n"),
    "set for all": (LAYERS, AT_END, "for _each in (LlamaMLP, GeGLUMLP): _each.can_torch_compile = False\n"),
    "class variable gone": (LAYERS, first("    can_torch_compile = True\n", "")),
    "in a base class alone": (LAYERS, lambda content: moved(content).replace("_NewGELU)", "nn.Module)")),
    "forward renamed": (LAYERS, first("def forward(self, hidden_states", "def forwards(self, hidden_states")),
    "forward renamed in a base class": (LAYERS, renamed_in_base),
    "forward's parameter renamed": (LAYERS, first(FORWARD, "    def forward(self, x, hidden_states=None):")),
    "forward is static": (LAYERS, first(FORWARD, "    @staticmethod\n" + FORWARD)),
    "forward is a property": (LAYERS, AT_END, "LlamaMLP.forward = property(lambda self: None)\n"),
    "forward replaced by code": (LAYERS, AT_END, "LlamaMLP.forward = lambda self, y: y\n"),
    # The error that users catch.
    "error no longer a RuntimeError": ("core/proof.py", "class LosslessProofError(RuntimeError)", "class LosslessProofError(Exception)"),
    # The mapping.
    "entry lost": (MAPPING, '    "SiLU": "SiLUActivation",\n', ""),
    "entry to another layer": (MAPPING, '"SwiGLUMLP": "LlamaMLP"', '"SwiGLUMLP": "GeGLUMLP"'),
    "entry lost by code": (MAPPING, AT_END, 'del LEVELS["layer"]["GeLU"]\n'),
    "entry of a level lost": (MAPPING, ', "LlamaRotaryEmbedding": "LlamaRotaryEmbedding"}', "}"),
    "level lost": (MAPPING, ', "decoder": {**LAYERS, **DECODER_LAYERS}}', "}"),
    "mode lost": (MAPPING, ", Mode.TRAINING | Mode.TORCH_COMPILE)", ")"),
    "device lost": (MAPPING, "mode in modes} for device in devices}", 'mode in modes} for device in devices if device != "rocm"}'),
    # What must be installed, and where it runs.
    "backend dropped": (TOML, '["cuda", "rocm", "cpu"]', '["cuda", "cpu"]'),
    "python dependency": (TOML, "edition = 5\n", 'edition = 5\npython-depends = ["einops"]\n'),
    "python dependency of a backend": (TOML, AT_END, '\n[general.cuda]\npython-depends = ["nvidia-cutlass-dsl"]\n'),
}  # fmt: skip
COMPATIBLE = {
    "nothing": [],
    "annotation": (ACTIVATION, "def silu(input: torch.Tensor)", 'def silu(input: "torch.FloatTensor")'),
    "annotations gone": ("ops/rms_norm/function.py", NORM, "def rms_norm(hidden_states, weight, eps)"),
    "annotation of what is returned": (LAYERS, first(FORWARD, FORWARD.replace("torch.Tensor:", "object:"))),
    "postponed annotations": (ACTIVATION, lambda content: content.replace("import", "from __future__ import annotations\nimport", 1)),
    "default written in another way": (MAPPING, '("cuda", "rocm"),', "_DEVICE_TYPES[:2],"),
    "more can be compiled": (LAYERS, AT_END, "LlamaMLP.can_torch_compile = True\n"),
    "docstring": (LAYERS, "Replaces transformers' `QuickGELUActivation`.", "Replaces it."),
    "name added": (INIT, "__all__ = [", 'added = 1\n\n__all__ = [\n    "added",'),
    "name added by code": (INIT, AT_END, 'added = 1\n__all__.append("added")\n'),
    "names in another order": (INIT, AT_END, "__all__ = sorted(__all__, reverse=True)\n"),
    "names in a set": (INIT, AT_END, "__all__ = {*__all__}\n"),
    "layer added": (LAYERS, AT_END, "\n\nclass Another(nn.Module):\n    def forward(self, x): ...\n"),
    "layer from elsewhere": [("elsewhere.py", AT_END, ELSEWHERE), (LAYERS, AT_END, "from .elsewhere import SiLUActivation\n")],
    "helper added": (LAYERS, AT_END, "\n\ndef helper(required): ...\n"),
    "forward in a base class": (LAYERS, moved),
    "private name": (LAYERS, AT_END, "_private = 1\n"),
    "what is not public": ("core/proof.py", AT_END, "\n\ndef added(required): ...\n"),
    "entry added": (MAPPING, "LAYERS = {\n", 'LAYERS = {\n    "Added": "LlamaRMSNorm",\n'),
    "level added": (MAPPING, 'LEVELS = {"layer": LAYERS,', 'LEVELS = {"none": {}, "layer": LAYERS,'),
    "backend added": (TOML, '["cuda", "rocm", "cpu"]', '["cuda", "rocm", "cpu", "xpu"]'),
}  # fmt: skip
DESCRIBE_PY = """
import json, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import interface

found = {}
for folder in sys.argv[2:]:
    try:
        found[Path(folder).name] = interface.describe(interface.load(Path(folder)), ["cuda", "rocm", "cpu"])
    except Exception as error:
        found[Path(folder).name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def edit(folder, file, *change):
    path = folder / file
    before = path.read_text() if path.exists() else ""
    if callable(change[0]):
        after = change[0](before)
    elif change[0] is AT_END:
        after = before + change[1]
    else:
        assert change[0] in before, change[0]
        after = before.replace(*change)
    assert after != before
    path.write_text(after)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


@pytest.fixture(scope="module")
def interfaces(tmp_path_factory):
    """Name of a change -> interface. One process imports them all."""
    root = tmp_path_factory.mktemp("changed")
    base = shutil.copytree(ROOT / PACKAGE, root / "base", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(base, quiet=1)
    backends = {}
    for number, (name, change) in enumerate({**BREAKING, **COMPATIBLE}.items()):
        folder = Path(shutil.copytree(base, root / name))
        shutil.copy(ROOT / TOML, folder)
        # As in every build, the name is another one.
        (folder / "_ops.py").write_text(build_kernel.OPS_PY.format(name=f"_lossless_kernels_cpu_{number}"))
        for each in [change] if isinstance(change, tuple) else change:
            edit(folder, *each)
        backends[name] = build_kernel.promised_backends(tomllib.loads((folder / TOML).read_text())["general"])
    done = run([sys.executable, "-B", "-c", DESCRIBE_PY, SCRIPTS, *(root / name for name in backends)], root)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not {name: each for name, each in found.items() if isinstance(each, str)}
    return {name: {"backends": backends[name], **found[name]} for name in backends}


@pytest.mark.parametrize("name", BREAKING)
def test_breaks(interfaces, name):
    assert breaks(interfaces["nothing"], interfaces[name])


@pytest.mark.parametrize("name", COMPATIBLE)
def test_is_compatible(interfaces, name):
    assert breaks(interfaces["nothing"], interfaces[name]) == []


def test_what_is_said(interfaces):
    base = interfaces["nothing"]
    assert breaks(base, interfaces["no gradients"]) == ["layers.LlamaRMSNorm.has_backward: was True, is False"]
    assert breaks(base, interfaces["level lost"]) == ["mapping.decoder: removed"]
    assert breaks(base, interfaces["parameter renamed"]) == ["silu: was (input), is (x)"]
    assert breaks(base, interfaces["python dependency of a backend"]) == [
        "backends.cuda.python-depends: nvidia-cutlass-dsl is new"
    ]
    moved, renamed = interfaces["forward in a base class"], interfaces["forward renamed in a base class"]
    assert breaks(moved, renamed) == ["layers.NewGELUActivation.forward: removed"]
    # The way back: what was missing may come, what had to be installed may go.
    for name in (
        "no gradients",
        "level lost",
        "python dependency",
        "backend dropped",
        "error no longer a RuntimeError",
    ):
        assert breaks(interfaces[name], base) == [], name


def test_the_same_everywhere(interfaces, tmp_path):
    """No annotations, no addresses, no folders; and Triton, its interpreter and hash seeds have no say."""
    base = interfaces["nothing"]
    text = json.dumps(base)
    assert not re.search(r"0x[0-9a-f]{6}|torch\.Tensor|Optional|->|_lossless_kernels_cpu|/tmp", text)
    assert interfaces["names in a set"] == base
    variant = Path(shutil.copytree(ROOT / PACKAGE, tmp_path / "variant", ignore=shutil.ignore_patterns("__pycache__")))
    (variant / "_ops.py").write_text(build_kernel.OPS_PY.format(name="_lossless_kernels_cuda_other"))
    (tmp_path / "triton.py").write_text("raise ImportError('not here')\n")
    environment = {"PYTHONPATH": tmp_path, "PYTHONHASHSEED": 7, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    file = tmp_path / "interface.json"
    done = run(
        [sys.executable, "-B", SCRIPTS / "interface.py", variant, "cuda,rocm,cpu", file], tmp_path, **environment
    )
    assert done.returncode == 0, done.stderr
    assert {"backends": base["backends"], **json.loads(file.read_bytes())} == base


def test_what_is_not_written_as_it_is(tmp_path):
    """Values whose words are not the same everywhere, and classes of kinds that the package has not."""
    (tmp_path / "_ops.py").write_text('_OPS_NAME = "odd"\n')
    (tmp_path / "__init__.py").write_text(ODD)
    code = "import sys, json; sys.path.insert(0, sys.argv[1]); import interface; from pathlib import Path\n"
    code += "print(json.dumps(interface.describe(interface.load(Path(sys.argv[2])), [])['names']))"
    done = run([sys.executable, "-B", "-c", code, SCRIPTS, tmp_path], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "Color": {"class": ["enum.Enum"], "__init__": "inherited", "RED": "Color.RED"},
        "Point": {
            "class": [],
            "__init__": "(self, x, y=0.5)",
            "y": "0.5",
            "where": "property",
            "make": "classmethod(cls, n)",
        },
        "basename": "basename",
        "function": "(a, /, b=object, *, c=dict('k': tuple(1, None)), d=set('x', 'y'), e=<lambda>, f=Color.RED)",
        "json": "json",
        "part": "(*, b=1)",
        "value": "2.5",
    }


ODD = """
import enum, functools, json
from dataclasses import dataclass
from os.path import basename

class Color(enum.Enum):
    RED = 1

@dataclass
class Point:
    x: float
    y: float = 0.5
    where = property(lambda self: self.x)

    @classmethod
    def make(cls, n: int): ...

def function(a, /, b=object(), *, c={"k": (1, None)}, d={"y", "x"}, e=lambda: 0, f=Color.RED): ...

part = functools.partial(lambda a, b: a, 1, b=1)
value = 2.5
__all__ = ["Color", "Point", "basename", "function", "json", "part", "value"]
"""


def test_public_functions_are_annotated(kernel, build):
    """Type checkers read the annotations because the build ships py.typed."""
    assert (build / "torch-cpu/py.typed").is_file()
    for name in kernel.__all__:
        value = getattr(kernel, name)
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            found = [signature.return_annotation, *(each.annotation for each in signature.parameters.values())]
            assert inspect.Parameter.empty not in found, f"{name}{signature}"
