"""What the repository must look like for kernel-builder and for the Hub."""

import ast
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from op_families import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torch-ext/lossless_kernels"
MODULES = sorted(PACKAGE.rglob("*.py"))


def parse(path):
    # Feature versions are checked as far as the running Python knows them: `match` is refused, for one.
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=(3, 9))


def name_of(path):
    return str(path.relative_to(PACKAGE))


def test_build_toml_opens_and_has_no_compiled_kernel():
    rust = pytest.importorskip("kernels._rust", reason="only kernels 0.17 and newer read build.toml")
    build = rust.Build.open(ROOT)
    assert [str(backend) for backend in build.general.backends] == ["cuda", "rocm", "cpu"]
    assert not re.search(r"^\s*\[+\s*kernel\b", (ROOT / "build.toml").read_text(), re.MULTILINE)


def test_flake_parses():
    nix = shutil.which("nix-instantiate")
    if nix is None:
        pytest.skip("nix-instantiate is not installed, so flake.nix cannot be parsed")
    done = subprocess.run([nix, "--parse", "flake.nix"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_flake_lock_holds_every_input():
    """`nix flake metadata --offline` reads it so; an uncommitted lock would mark a build as dirty."""
    lock = json.loads((ROOT / "flake.lock").read_text(encoding="utf-8"))
    nodes = lock["nodes"]
    assert (lock["version"], nodes[lock["root"]]) == (7, {"inputs": {"kernel-builder": "kernel-builder"}})
    url = re.search(r'inputs\.kernel-builder\.url = "github:([\w-]+)/([\w-]+)"', (ROOT / "flake.nix").read_text())
    builder = nodes["kernel-builder"]
    assert builder["original"] == {"owner": url[1], "repo": url[2], "type": "github"}
    assert (builder["locked"]["owner"], builder["locked"]["repo"]) == url.groups()

    def target(reference):
        """A node's name, or a path of inputs from the root."""
        if isinstance(reference, str):
            return reference
        name = lock["root"]
        for part in reference:
            name = target(nodes[name]["inputs"][part])
        return name

    reached, queue = set(), [lock["root"]]
    while queue:
        name = queue.pop()
        if name not in reached:
            reached.add(name)
            queue += [target(reference) for reference in nodes[name].get("inputs", {}).values()]
    assert reached == {*nodes}
    for name in reached - {lock["root"]}:
        locked = nodes[name]["locked"]
        assert re.fullmatch("[0-9a-f]{40}", locked["rev"]), name
        algorithm, digest = locked["narHash"].split("-", 1)
        assert algorithm == "sha256" and len(base64.b64decode(digest, validate=True)) == 32, name


def test_what_kernel_builders_ci_runs(build, tmp_path):
    """`nix run .#ci-test` has torch, kernels and pytest alone, and may take a minute."""
    missing = ("transformers", "hypothesis", "dulwich", "starlette", "griffe", "jinja2")
    code = f"import sys\nfor name in {missing}:\n    sys.modules[name] = None\n"
    (tmp_path / "without.py").write_text(code)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    environment.update(
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        PYTHONPATH=str(tmp_path),
        LOCAL_KERNELS=f"lossless-kernels/lossless-kernels={build}",
    )
    command = [sys.executable, "-m", "pytest", ROOT / "tests", "-m", "kernels_ci", "-p", "no:cacheprovider"]
    command += ["-p", "without"]
    start = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20 and "skipped" not in done.stdout
    assert time.monotonic() - start < 60


def test_layout_is_kernel_builders():
    """Its kernel-layout-check: older versions of kernels look for a folder of the module's name inside the module."""
    assert (PACKAGE / "__init__.py").is_file()
    assert not (PACKAGE / PACKAGE.name).exists()


def torch_ops_check(folder):
    """kernel-builder's torch-ops-check, which reads every Python file below a folder."""
    command = [sys.executable, ROOT / "tests/kernel_builder/torch_ops_check.py", folder]
    return subprocess.run(command, capture_output=True, text=True)


def test_operators_are_registered_as_kernel_builder_wants(tmp_path):
    done = torch_ops_check(ROOT / "torch-ext")
    assert done.returncode == 0, done.stdout
    (tmp_path / "bad.py").write_text(
        "@torch.library.custom_op('mine::op', mutates_args=())\ndef op(x):\n    return x\n"
    )
    done = torch_ops_check(tmp_path)
    assert done.returncode == 1 and "bad.py:2 function op" in done.stdout


def test_the_build_loads_as_in_kernel_builders_check(build, tmp_path):
    """Its get-kernel-check: `get_local_kernel` of the variant that was built, in a home of its own."""
    backend = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    code = "import sys; from pathlib import Path; import kernels; kernels.get_local_kernel(Path(sys.argv[1]))"
    environment = {**os.environ, "HOME": str(tmp_path)}
    for variant in {f"torch-{backend}", "torch-cpu"}:
        command = [sys.executable, "-c", code, build / variant]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_example_of_kernel_builders_template_runs(build):
    """It stands where `kernel-builder init` puts it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, ROOT / "example.py"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "has eager's bits" in done.stdout


def test_workflows_run_what_the_project_has():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed, so the workflows cannot be read")
    workflows = {
        path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github/workflows").iterdir()
    }
    assert {*workflows} == {"build-kernel.yml", "ci.yml"}
    for found in workflows.values():
        # YAML reads the key `on` as a truth value.
        assert found["name"] and found[True] and found["permissions"] == {"contents": "read"}
        assert all(job["runs-on"] == "ubuntu-latest" and job["steps"] for job in found["jobs"].values())
    steps = workflows["ci.yml"]["jobs"]["test"]["steps"]
    (python,) = [step["with"]["python-version"] for step in steps if "python" in step.get("uses", "")]
    assert tuple(map(int, python.split("."))) >= (3, 11)
    (command,) = [step["run"] for step in steps if "run" in step]
    assert os.access(ROOT / command, os.X_OK)
    # The examples whose packages requirements.txt leaves out.
    text = "\n".join(step.get("run", "") for step in workflows["ci.yml"]["jobs"]["examples"]["steps"])
    for name in re.findall(r"[\w/.-]+\.(?:txt|py)", text):
        assert (ROOT / name).is_file(), name
    assert {*re.findall(r"-r (\S+)", text)} == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.txt")}
    for path in workflows["build-kernel.yml"][True]["push"]["paths"]:
        assert (ROOT / path.removesuffix("/**")).exists()
    (job,) = [step["with"] for step in workflows["build-kernel.yml"]["jobs"]["build"]["steps"] if "with" in step]
    assert {"token", "namespace", "script"} <= {*job}
    assert job["script"].index("set +x") < job["script"].index("HF_TOKEN")


def test_kernels_src_leads_to_the_device_code():
    link = ROOT / "kernels_src"
    assert link.is_symlink()
    assert link.resolve() == PACKAGE / "kernels_src"
    assert link.is_dir()


def test_every_kernel_is_a_familys():
    """`op_families.py` compiles them; what families share has no kernel of its own."""
    files = {path.stem for path in (PACKAGE / "kernels_src").glob("*.py")} - {
        "__init__",
        "indices",
        "primitives",
        "summation",
    }
    assert files == {name for family in FAMILIES for name in family.sources}


@pytest.mark.parametrize("name", ["pyproject.toml", "setup.py", "setup.cfg"])
def test_kernel_builder_writes_the_packaging(name):
    assert not (ROOT / name).exists()


def imports(tree):
    """(top-level name, whether inside a function) of each absolute import."""
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        else:
            continue
        for name in names:
            yield name.split(".")[0], id(node) in inside


# What may be imported by functions of these modules: it need not be installed.
IN_FUNCTIONS = {"kernels": ("mapping.py",), "transformers": ("diagnosis.py", "eager_attention.py")}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_import_only_torch_triton_and_the_standard_library(path):
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    for name, inside in imports(parse(path)):
        if name in IN_FUNCTIONS:
            only = IN_FUNCTIONS[name]
            assert path.name in only and inside, f"{name} may be imported by a function of {only} alone"
        else:
            assert name in allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_are_python_3_9(path):
    parse(path)
    # Annotations are expressions to the grammar, so `X | Y` passes it and fails when 3.9 imports the module.
    future = "from __future__ import annotations" in path.read_text(encoding="utf-8")
    for node in ast.walk(parse(path)):
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for annotation in filter(None, annotations):
            unions = [part for part in ast.walk(annotation) if isinstance(part, ast.BinOp)]
            assert future or not unions, f"{path.name}:{annotation.lineno}: {ast.unparse(annotation)} is not Python 3.9"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_have_at_most_650_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 650


# What a folder of the package may import from it, beside itself. `kernels_src` is the device code, `_ops` is generated.
WALLS = {
    "core": {"core", "_ops"},
    "ops": {"core", "ops", "kernels_src", "_ops"},
    "decoder": {"core", "ops", "decoder"},
    "kernels_src": {"kernels_src"},
}


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent != PACKAGE], ids=name_of)
def test_folders_import_only_what_stands_below_them(path):
    folder, *inside = path.relative_to(PACKAGE).with_suffix("").parts
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            package = (folder, *inside)[: -node.level]
            module = (*package, *(node.module or "").split("."))
            names = [module[0]] if package or node.module else [alias.name for alias in node.names]
            assert {*names} <= WALLS[folder], f"{path.name}:{node.lineno} imports {', '.join(names)}"


# What makes tensors in torch's default dtype, and what makes int64.
MAKE_NUMBERS = {
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "tensor",
    "zeros",
}
MAKE_INTEGERS = {"arange", "randint", "randperm"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_new_tensors_have_their_own_dtype_and_device(path):
    """A program may set others as torch's defaults, and kernels write to what they are given."""
    tree = parse(path)
    made = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) == "torch"
        and node.attr in MAKE_NUMBERS | MAKE_INTEGERS
    ]
    named = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            # `functools.partial(torch.empty, ...)` calls it with what it is given.
            function = call.args[0] if ast.unparse(call.func) == "functools.partial" else call.func
            named[function] = {each.arg for each in call.keywords}
    for node in made:
        needed = {"device"} if node.attr in MAKE_INTEGERS else {"device", "dtype"}
        missing = needed - named.get(node, set())
        assert not missing, f"{path.name}:{node.lineno}: torch.{node.attr} without {', '.join(sorted(missing))}"


def test_no_module_has_the_name_of_a_public_function():
    """The function stands in its place once the package is imported: `from . import rms_norm` would find one or the other."""
    (names,) = [
        ast.literal_eval(node.value)
        for node in parse(PACKAGE / "__init__.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules & {*names} == {"layers"}


def test_public_names_can_be_read_without_running():
    """A reader of the source sees them: `__all__` is a list of literals, `layers` in it."""
    for node in parse(PACKAGE / "__init__.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert isinstance(node.value, ast.List)
            assert "layers" in ast.literal_eval(node.value)
            return
    pytest.fail("torch-ext/lossless_kernels/__init__.py defines no __all__")


def test_card_renders():
    jinja2 = pytest.importorskip("jinja2", reason="jinja2 is not installed, so CARD.md cannot be rendered")
    # As kernel-builder sets up its own engine.
    template = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined).from_string(
        (ROOT / "CARD.md").read_text()
    )
    card = template.render(
        repo_id="someone/something",
        version=7,
        functions=["a_function"],
        layers=["ALayer"],
        has_benchmark=True,
        upstream=None,
        source=None,
        license="apache-2.0",
    )
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    for word in ("someone/something", "version=7", "`a_function`", "`ALayer`"):
        assert word in card
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert code
    for block in code:
        ast.parse(block)


def test_the_worked_example_quotes_the_code():
    """Each block of docs/add-a-kernel.md names its file; what stands between lines of three dots is in it, word for word."""
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", (ROOT / "docs/add-a-kernel.md").read_text(), re.DOTALL)
    assert len(blocks) > 10
    for path, block in blocks:
        source = (ROOT / path).read_text()
        for piece in re.split(r"^\.\.\.\n", block, flags=re.MULTILINE):
            assert piece.strip("\n") in source, f"{path} has no\n{piece}"
