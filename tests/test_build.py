"""`scripts/build_kernel.py`, run as a user runs it, on copies of the project that are git repositories of their own."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import build_kernel
import pytest
from projects import PACKAGE, ROOT, commit, contents, export, git, run, script

_rust = pytest.importorskip("kernels._rust", reason="building needs kernels 0.17 or newer")


def build(project, *arguments):
    return script(project, "build_kernel", *arguments)


def built_id(project):
    """What the cpu variant's id has behind the names of package and backend."""
    return json.loads((project / "build/torch-cpu/metadata.json").read_text())["id"][len("_lossless_kernels_cpu_") :]


@pytest.fixture
def exported(tmp_path):
    """The project without history."""
    return export(tmp_path / "project")


@pytest.fixture
def project(exported):
    git(exported, "init", "--quiet")
    commit(exported)
    return exported


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A build of the project as it lies here. Only the tampering test may change it, and takes a copy."""
    output = tmp_path_factory.mktemp("built") / "build"
    done = build(ROOT, "--output", str(output))
    assert done.returncode == 0, done.stderr
    return output


def test_ships_the_package_for_each_backend(built):
    package = ROOT / PACKAGE
    shipped = {
        path: content
        for path, content in contents(package).items()
        if "__pycache__" not in path and path not in ("_ops.py", "metadata.json")
    }
    assert sorted(path.name for path in built.iterdir()) == ["torch-cpu", "torch-cuda", "torch-rocm"]
    for variant in built.iterdir():
        found = contents(variant)
        del found["_ops.py"], found["metadata.json"]
        assert found == shipped


@pytest.mark.parametrize("backend", ["cuda", "rocm", "cpu"])
def test_metadata_is_what_kernels_reads(built, backend):
    variant = built / f"torch-{backend}"
    metadata = _rust.Metadata.read_from_file(variant / "metadata.json")
    assert str(metadata.name) == "lossless-kernels"
    assert metadata.version == 1
    assert metadata.license == "Apache-2.0"
    assert metadata.python_depends == []
    assert metadata.kernel_depends == []
    assert str(metadata.backend.backend_type) == backend
    assert f'"{metadata.id}"' in (variant / "_ops.py").read_text()
    assert re.fullmatch(rf"_lossless_kernels_{backend}_[0-9a-f]{{7}}(_dirty|_uncommitted)?", metadata.id)
    metadata.digest.validate(_rust.Digest.hash_variant(_rust.DigestAlgorithm.SHA256, variant))


def test_digest_detects_a_changed_file(built, tmp_path):
    variant = shutil.copytree(built / "torch-cuda", tmp_path / "torch-cuda")
    module = variant / "layers.py"
    module.write_bytes(module.read_bytes()[:-1] + b" ")
    digest = _rust.Metadata.read_from_file(variant / "metadata.json").digest
    with pytest.raises(_rust.DigestValidationError, match="layers.py"):
        digest.validate(_rust.Digest.hash_variant(_rust.DigestAlgorithm.SHA256, variant))


def test_build_loads_in_a_fresh_process(built):
    script = f"""
from pathlib import Path
from kernels import get_local_kernel
kernel = get_local_kernel(Path({str(built)!r}))
assert all(hasattr(kernel, name) for name in kernel.__all__)
print(kernel.__name__, kernel.__file__, kernel._ops.add_op_namespace_prefix("op"))
"""
    done = run([sys.executable, "-c", script], built)
    assert done.returncode == 0, done.stderr
    name, path, op = done.stdout.split()
    assert name == _rust.Metadata.read_from_file(Path(path).parent / "metadata.json").id
    assert op == f"{name}::op"


def test_one_commit_gives_one_build(project, tmp_path):
    clone = tmp_path / "elsewhere"
    git(tmp_path, "clone", "--quiet", str(project), str(clone))
    # None of these is part of the commit.
    (project / PACKAGE / "__pycache__").mkdir()
    (project / PACKAGE / "__pycache__/layers.cpython-311.pyc").write_bytes(b"bytecode")
    (project / PACKAGE / ".layers.py.swp").write_bytes(b"editor")
    (project / PACKAGE / "_ops.py").write_text("raise RuntimeError('left over')\n")
    builds = []
    for where in (project, clone, project):
        done = build(where)
        assert (done.returncode, done.stderr) == (0, "")
        builds.append(contents(where / "build"))
    assert builds[0] == builds[1] == builds[2]


def test_id_is_the_tree_of_the_commit(project):
    tree = git(project, "rev-parse", "HEAD^{tree}")[:7]
    (project / "untracked.txt").write_text("")
    build(project)
    assert built_id(project) == tree
    with open(project / "build.toml", "a") as file:
        file.write("# changed\n")
    build(project)
    assert built_id(project) == f"{tree}_dirty"
    git(project, "add", "build.toml")
    build(project)
    assert built_id(project) == f"{tree}_dirty"
    git(project, "commit", "--quiet", "--message", "changed")
    build(project)
    assert built_id(project) == git(project, "rev-parse", "HEAD^{tree}")[:7] != tree


def test_id_without_a_commit_is_a_hash_of_the_files(exported):
    build(exported)
    first = built_id(exported)
    assert re.fullmatch("[0-9a-f]{7}_uncommitted", first)
    git(exported, "init", "--quiet")
    build(exported)
    assert built_id(exported) == first
    with open(exported / PACKAGE / "layers.py", "a") as file:
        file.write("# changed\n")
    build(exported)
    assert built_id(exported) != first


def edit(name, old, new):
    def change(project):
        text = (project / name).read_text()
        assert old in text
        (project / name).write_text(text.replace(old, new))

    return change


def add(name, text=""):
    return lambda project: (project / name).write_text(text)


def link(name, target):
    def change(project):
        (project / name).unlink(missing_ok=True)
        (project / name).symlink_to(target)

    return change


FAILURES = {
    "toml": (edit("build.toml", "[general]", "[general"), "build.toml"),
    "no toml": (lambda project: (project / "build.toml").unlink(), "build.toml"),
    "unknown key": (edit("build.toml", "pyext", "py-ext"), "py-ext"),
    "kernel name": (edit("build.toml", '"lossless-kernels"', '"Lossless_Kernels"'), "Lossless_Kernels"),
    "backend": (edit("build.toml", '"rocm"', '"vulkan"'), "vulkan"),
    "compiled": (edit("build.toml", "[torch-noarch]", "[torch]"), "torch-noarch"),
    "broken link": (link(f"{PACKAGE}/plans.json", "nowhere.json"), "plans.json"),
    "link to a folder": (link(f"{PACKAGE}/more", "kernels_src"), "more"),
    "link outside": (link(f"{PACKAGE}/more.py", "../../scripts/build_kernel.py"), "more.py"),
    "broken kernels_src": (link("kernels_src", "nowhere"), "kernels_src"),
    "extension": (add(f"{PACKAGE}/notes.txt"), "notes.txt"),
    "no extension": (add(f"{PACKAGE}/NOTES"), "NOTES"),
    "outside the package": (add("torch-ext/helper.py"), "helper.py"),
    "no package": (lambda project: (project / PACKAGE / "__init__.py").unlink(), "__init__.py"),
    "syntax": (add(f"{PACKAGE}/broken.py", "\ndef f(:\n"), "broken.py:2"),
}


def assert_fails_in_one_line(project, *arguments, match):
    before = contents(project / "build")
    done = build(project, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert match in done.stderr
    assert contents(project / "build") == before
    assert not list(project.glob(".build-*"))


@pytest.mark.parametrize(("change", "match"), FAILURES.values(), ids=FAILURES)
def test_failure_is_one_line_and_leaves_the_old_build(project, change, match):
    (project / "build/torch-cpu").mkdir(parents=True)
    (project / "build/torch-cpu/metadata.json").write_text("{}")
    change(project)
    assert_fails_in_one_line(project, match=match)


@pytest.mark.parametrize(
    "registration",
    [
        '@torch.library.custom_op("mine::op", mutates_args=())\ndef op(): ...',
        '@custom_op(f"{space}::op", mutates_args=())\ndef op(): ...',
        "@torch.library.register_fake(op)\ndef fake(): ...",
        '@op.register_kernel("cuda")\ndef cuda(): ...',
        '@torch.library.triton_op(prefix("op"), mutates_args={})\ndef op(): ...',
        'def late():\n    @custom_op("mine::op", mutates_args=())\n    def op(): ...',
        'op = torch.library.custom_op("mine::op", function, mutates_args=())',
    ],
)
def test_literal_op_names_are_refused(project, registration):
    (project / PACKAGE / "op.py").write_text(registration)
    assert_fails_in_one_line(project, match="add_op_namespace_prefix")


@pytest.mark.parametrize(
    "registration",
    [
        '@torch.library.custom_op(add_op_namespace_prefix("op"), mutates_args=())\ndef op(): ...',
        '@register_kernel(_ops.add_op_namespace_prefix("op"), "cuda")\ndef cuda(): ...',
        "@op.register_fake\ndef fake(): ...",
        "@functools.lru_cache(None)\ndef plan(): ...",
    ],
)
def test_prefixed_op_names_are_accepted(project, registration):
    (project / PACKAGE / "op.py").write_text(registration)
    done = build(project)
    assert done.returncode == 0, done.stderr


def test_options(project, tmp_path):
    output = tmp_path / "new" / "out"
    done = build(project, "--output", str(output), "--backends", "cpu,cuda", "--unique-id", "abc")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in output.iterdir()) == ["torch-cpu", "torch-cuda"]
    assert _rust.Metadata.read_from_file(output / "torch-cuda/metadata.json").id == "_lossless_kernels_cuda_abc"
    assert not (project / "build").exists()
    for option in ("--output", "--backends", "--unique-id"):
        assert option in build(project, "--help").stdout
    assert_fails_in_one_line(project, "--backends", "cuda,vulkan", match="vulkan")
    assert_fails_in_one_line(project, "--unique-id", "not a name", match="not a name")


def test_output_must_not_hold_anything_else(project, tmp_path):
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years of work")
    assert_fails_in_one_line(project, "--output", str(precious), match="thesis.tex")
    assert contents(precious) == {"thesis.tex": b"years of work"}


def test_a_damaged_build_says_the_way_out(project):
    build(project)
    (project / "build/torch-rocm/metadata.json").unlink()
    assert_fails_in_one_line(project, match="remove it (`make clean` removes build/) or give another --output")


def test_output_that_cannot_be_made(project):
    assert_fails_in_one_line(project, "--output", "/proc/x", match="--output: /proc/x cannot be made: No such file")
    output = project / "build.toml"
    assert_fails_in_one_line(project, "--output", output, match=f"--output: {output} is no folder")


def test_interrupted(project, monkeypatch, capsys):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(build_kernel, "build", interrupt)
    monkeypatch.setattr(sys, "argv", ["build_kernel.py"])
    assert (build_kernel.main(), capsys.readouterr().err) == (1, "build_kernel: interrupted\n")


def test_two_builds_at_once(project):
    """Each puts a whole build in place, one after the other."""
    ids = ("one", "two", "three")
    command = [sys.executable, "scripts/build_kernel.py", "--unique-id"]
    running = [subprocess.Popen([*command, name], cwd=project, stdout=subprocess.DEVNULL) for name in ids]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert built_id(project) in ids
    for variant in (project / "build").iterdir():
        digest = _rust.Metadata.read_from_file(variant / "metadata.json").digest
        digest.validate(_rust.Digest.hash_variant(_rust.DigestAlgorithm.SHA256, variant))
    assert not list(project.glob(".build-*"))


def test_disk_full(project, tmp_path):
    """On a file system too small for a second build the first one stays."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = f"mount -t tmpfs -o size=4m none {small}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mounted], capture_output=True).returncode:
        pytest.skip("this machine lets no process mount a file system of its own")
    steps = f"""
        {mounted}
        {sys.executable} scripts/build_kernel.py --output {small}/build --unique-id first || exit 9
        find {small} -type f -exec sha256sum {{}} + | sort > before
        dd if=/dev/zero of={small}/full bs=1k 2> /dev/null
        {sys.executable} scripts/build_kernel.py --output {small}/build
        echo status $?
        rm {small}/full
        find {small} -type f -exec sha256sum {{}} + | sort > after
        ls -A {small}
        cmp before after && echo unchanged
    """
    done = run(["unshare", "-rm", "sh", "-c", steps], project)
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("build_kernel: error: ")
    assert "No space left on device" in done.stderr
    assert done.stdout.splitlines()[-3:] == ["status 1", "build", "unchanged"], done.stdout
