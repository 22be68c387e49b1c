"""`scripts/build_kernel.py`, run as a user runs it, on copies of the project that are git repositories of their own."""

import ctypes
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import build_kernel
import pytest
from projects import PACKAGE, ROOT, SCRIPTS, SMALL, commit, contents, everything, export, git, run, script

_rust = pytest.importorskip("kernels._rust", reason="building needs kernels 0.17 or newer")


def build(project, *arguments):
    return script(project, "build_kernel", *arguments)


def built_id(project):
    """What the cpu variant's id has behind the names of package and backend."""
    return json.loads((project / "build/torch-cpu/metadata.json").read_text())["id"][len("_lossless_kernels_cpu_") :]


def built_commit(project):
    """The commit that metadata.json names, as kernel-builder writes it; None if it names none."""
    kernel = _rust.Metadata.read_from_file(project / "build/torch-cpu/metadata.json").provenance.kernel
    assert kernel is None or not kernel.dirty
    return kernel and str(kernel.commit)


def quick(project, output=None, unique_id=None):
    """A build in this process."""
    build_kernel.build(project, output or project / "build", None, unique_id, quiet=True)


@pytest.fixture
def exported(tmp_path):
    """A project with a small package, without history."""
    return export(tmp_path / "project", SMALL)


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
        if "__pycache__" not in path and path not in build_kernel.GENERATED
    }
    assert sorted(path.name for path in built.iterdir()) == ["torch-cpu", "torch-cuda", "torch-rocm"]
    for variant in built.iterdir():
        found = contents(variant)
        for name in build_kernel.GENERATED:
            del found[name]
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
    assert set(metadata.digest.files) == {path for path in contents(variant) if path != "metadata.json"}
    assert str(metadata.kernels_minver) == build_kernel.KERNELS_MINVER
    assert metadata.provenance.kernel_builder.version == "scripts/build_kernel.py"


def test_the_source_of_build_toml_is_shown(project, tmp_path):
    """build.toml is its one place: metadata.json, `kernels info` and the card take it from there."""
    config = project / "build.toml"
    source = "https://example.org/someone/lossless-kernels"
    config.write_text(config.read_text().replace("[general]\n", f'[general]\nsource = "{source}"\n'))
    done = build(project, "--backends", "cpu")
    assert done.returncode == 0, done.stderr
    assert _rust.Metadata.read_from_file(project / "build/torch-cpu/metadata.json").source == source
    done = run([Path(sys.executable).with_name("kernels"), "info", project], tmp_path)
    assert f"Source: {source}\n" in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["layers.py", "interface.json"])
def test_digest_detects_a_changed_file(built, tmp_path, name):
    variant = shutil.copytree(built / "torch-cuda", tmp_path / "torch-cuda")
    module = variant / name
    module.write_bytes(module.read_bytes()[:-1] + b" ")
    digest = _rust.Metadata.read_from_file(variant / "metadata.json").digest
    with pytest.raises(_rust.DigestValidationError, match=name):
        digest.validate(_rust.Digest.hash_variant(_rust.DigestAlgorithm.SHA256, variant))


def test_build_loads_in_a_fresh_process(built):
    """Each variant, by `kernels`, which reads its digest and its names too."""
    script = f"""
from pathlib import Path
from kernels import get_local_kernel
for folder in {[str(each) for each in sorted(built.iterdir())]!r}:
    kernel = get_local_kernel(Path(folder))
    assert all(hasattr(kernel, name) for name in kernel.__all__)
    print(kernel.__name__, kernel.__file__, kernel._ops.add_op_namespace_prefix("op"))
"""
    done = run([sys.executable, "-B", "-c", script], built)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        name, path, op = line.split()
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
    assert built_id(project) == tree and built_commit(project) == git(project, "rev-parse", "HEAD")
    with open(project / "build.toml", "a") as file:
        file.write("# changed\n")
    build(project)
    assert built_id(project) == f"{tree}_dirty" and built_commit(project) is None
    git(project, "add", "build.toml")
    build(project)
    assert built_id(project) == f"{tree}_dirty"
    git(project, "commit", "--quiet", "--message", "changed")
    build(project)
    assert built_id(project) == git(project, "rev-parse", "HEAD^{tree}")[:7] != tree
    assert built_commit(project) == git(project, "rev-parse", "HEAD")


def ignored(project):
    (project / ".git/info/exclude").write_text("secret.py\n")
    (project / PACKAGE / "secret.py").write_text("")


def own_entry(project):
    """The project's own .gitignore has this name in it."""
    (project / PACKAGE / "build").mkdir()
    (project / PACKAGE / "build/secret.py").write_text("")


def unseen(flag):
    def change(project):
        git(project, "update-index", flag, f"{PACKAGE}/functions.py")
        (project / PACKAGE / "functions.py").write_text(SMALL["functions.py"] + "# changed\n")

    return change


def converted(project):
    """As a clone with core.autocrlf has it."""
    git(project, "config", "core.autocrlf", "true")
    (project / ".git/index").unlink()
    shutil.rmtree(project / "torch-ext")
    git(project, "reset", "--quiet", "--hard")
    assert b"\r\n" in (project / PACKAGE / "functions.py").read_bytes()


def replaced(project):
    """git then shows another file under the same name, which no clone has."""
    name = f"{PACKAGE}/functions.py"
    old = git(project, "rev-parse", f"HEAD:{name}")
    (project / name).write_text(SMALL["functions.py"] + "# changed\n")
    git(project, "replace", old, git(project, "hash-object", "-w", name))


# Ways to a work tree that differs from its commit and of which git says nothing.
UNSEEN = {
    "ignored": ignored,
    "ignored by the project": own_entry,
    "assume-unchanged": unseen("--assume-unchanged"),
    "skip-worktree": unseen("--skip-worktree"),
    "autocrlf": converted,
    "replaced": replaced,
}


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
def test_id_of_what_git_does_not_show(project, change):
    change(project)
    if change is not replaced:
        assert git(project, "status", "--porcelain") == ""
    quick(project)
    assert built_id(project) == git(project, "rev-parse", "HEAD^{tree}")[:7] + "_dirty"


def test_id_inside_another_repository(exported):
    """Whose commit says nothing about the project, even if it holds it."""
    above = exported.parent
    git(above, "init", "--quiet")
    commit(above)
    quick(exported)
    assert built_id(exported).endswith("_uncommitted") and built_commit(exported) is None


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
    "literal name of an op": (add(f"{PACKAGE}/op.py", '@custom_op("a::b")\ndef op(): ...'), "add_op_namespace_prefix"),
    "syntax": (add(f"{PACKAGE}/broken.py", "\ndef f(:\n"), "broken.py:2"),
    "no backends": (edit("build.toml", 'backends = ["cuda", "rocm", "cpu"]', "backends = []"), "build.toml: backends"),
    "own interface": (add(f"{PACKAGE}/interface.json", "{}"), "interface.json: the build writes a file of this name"),
    "import": (add(f"{PACKAGE}/layers.py", "raise OSError('no\\nfile')"), "does not import: OSError: no file"),
    "exit": (add(f"{PACKAGE}/layers.py", "raise SystemExit(0)"), "does not import: SystemExit: 0"),
    "no __all__": (edit(f"{PACKAGE}/__init__.py", "__all__ =", "names ="), "__init__.py defines no __all__"),
    "a name too many": (edit(f"{PACKAGE}/__init__.py", '"layers",', '"layers", "gone",'), "__all__ names gone, which"),
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
    quick(project)
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
def test_literal_op_names_are_refused(registration):
    with pytest.raises(build_kernel.BuildError, match="torch-ext/package/op.py:.*add_op_namespace_prefix"):
        build_kernel.check_registrations("package", {"op.py": registration.encode()})


@pytest.mark.parametrize(
    "registration",
    [
        '@torch.library.custom_op(add_op_namespace_prefix("op"), mutates_args=())\ndef op(): ...',
        '@register_kernel(_ops.add_op_namespace_prefix("op"), "cuda")\ndef cuda(): ...',
        "@op.register_fake\ndef fake(): ...",
        "@functools.lru_cache(None)\ndef plan(): ...",
    ],
)
def test_prefixed_op_names_are_accepted(registration):
    build_kernel.check_registrations("package", {"op.py": registration.encode()})


def test_options(project, tmp_path):
    output = tmp_path / "new" / "out"
    done = build(project, "--output", str(output), "--backends", "cpu,cuda", "--unique-id", "abc")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in output.iterdir()) == ["torch-cpu", "torch-cuda"]
    assert _rust.Metadata.read_from_file(output / "torch-cuda/metadata.json").id == "_lossless_kernels_cuda_abc"
    assert not (project / "build").exists()
    for option in ("--output", "--backends", "--unique-id", "--kernel-sha"):
        assert option in build(project, "--help").stdout
    assert_fails_in_one_line(project, "--backends", "cuda,vulkan", match="vulkan")
    assert_fails_in_one_line(project, "--unique-id", "not a name", match="not a name")
    assert_fails_in_one_line(project, "--kernel-sha", "not a commit", match="not a commit")


def put(path, content=b""):
    def change(output):
        (output / path).parent.mkdir(parents=True, exist_ok=True)
        (output / path).write_bytes(content)

    return change


def renamed(output):
    """Another kernel's build."""
    path = output / "torch-cpu/metadata.json"
    path.write_text(path.read_text().replace('"lossless-kernels"', '"other-kernels"'))


# What lies in an output folder that holds a build, and by what name it is refused.
FOREIGN = {
    "repository": (put(".git/HEAD", b"ref: refs/heads/main\n"), ".git"),
    "keys": (put(".ssh/id_ed25519", b"secret"), ".ssh"),
    "hidden file": (put(".env", b"secret"), ".env"),
    "empty folder": (lambda output: (output / "more").mkdir(), "more"),
    "file": (put("thesis.tex", b"years of work"), "thesis.tex"),
    "data with metadata": (put("data/metadata.json", b"{}"), "data"),
    "another kernel": (renamed, "torch-cpu"),
    "no metadata": (lambda output: (output / "torch-rocm/metadata.json").unlink(), "torch-rocm"),
    "link to a variant": (lambda output: (output / "torch-x").symlink_to("torch-cpu"), "torch-x"),
    "repository in a variant": (put("torch-cpu/.git/HEAD", b"ref: refs/heads/main\n"), "torch-cpu/.git"),
    "file in a variant": (put("torch-cpu/plans/mine.json", b"{}"), "torch-cpu/plans/mine.json"),
    "empty folder in a variant": (lambda output: (output / "torch-cpu/.ssh").mkdir(), "torch-cpu/.ssh"),
    "changed file": (put("torch-cpu/layers.py", b"# a better idea\n"), "torch-cpu/layers.py"),
    "link in a variant": (lambda output: (output / "torch-cpu/l.py").symlink_to("layers.py"), "torch-cpu/l.py"),
    "file called __pycache__": (put("torch-cpu/__pycache__", b"secret"), "torch-cpu/__pycache__"),
    "file beside bytecode": (put("torch-cpu/__pycache__/key", b"secret"), "torch-cpu/__pycache__/key"),
    "pipe": (lambda output: os.mkfifo(output / "torch-cpu/pipe"), "torch-cpu/pipe"),
    "bytecode alone": (put("torch-cpu/secret.pyc"), "torch-cpu/secret.pyc"),
}


def test_only_an_earlier_build_is_replaced(exported, tmp_path):
    quick(exported, tmp_path / "built", "old")
    for name, (change, found) in FOREIGN.items():
        output = Path(shutil.copytree(tmp_path / "built", tmp_path / name))
        change(output)
        before = everything(output)
        with pytest.raises(build_kernel.BuildError) as caught:
            quick(exported, output, "new")
        assert f"{output} is not replaced: expected only unmodified builds of lossless-kernels, found {found};" in str(
            caught.value
        ), name
        assert everything(output) == before, name
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".build")]


def test_a_folder_with_a_repository_in_one_line(project, tmp_path):
    home = tmp_path / "home"
    put(".git/HEAD", b"ref: refs/heads/main\n")(home)
    put(".ssh/id_ed25519", b"secret")(home)
    put("data/metadata.json", b"{}")(home)
    before = everything(home)
    assert_fails_in_one_line(
        project,
        "--output",
        str(home),
        match=f"{home} is not replaced: expected only unmodified builds of lossless-kernels, found .git",
    )
    assert everything(home) == before


def test_what_appears_during_the_build_is_kept(exported, monkeypatch):
    output = exported / "build"
    quick(exported, unique_id="old")
    find_interface = build_kernel.find_interface

    def meanwhile(*arguments):
        put("thesis.tex", b"years of work")(output)
        return find_interface(*arguments)

    monkeypatch.setattr(build_kernel, "find_interface", meanwhile)
    with pytest.raises(build_kernel.BuildError, match="thesis.tex"):
        quick(exported, unique_id="new")
    assert (output / "thesis.tex").read_bytes() == b"years of work"
    assert built_id(exported) == "old"


def test_an_earlier_build_is_replaced(exported, tmp_path):
    """With bytecode and without some of its files, behind a link, and an empty folder too."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (exported / "build").symlink_to(elsewhere)
    for unique_id in ("one", "two"):
        quick(exported, unique_id=unique_id)
        assert built_id(exported) == unique_id
        assert os.readlink(exported / "build") == str(elsewhere)
        put("torch-cpu/__pycache__/layers.cpython-311.pyc")(elsewhere)
        (elsewhere / "torch-cpu/functions.py").unlink()


def test_a_damaged_build_says_the_way_out(project):
    quick(project)
    (project / "build/torch-rocm/metadata.json").unlink()
    assert_fails_in_one_line(project, match="remove it (`make clean` removes build/), or give another --output")


def test_output_that_cannot_be_made(project):
    assert_fails_in_one_line(project, "--output", "/proc/x", match="--output: /proc/x cannot be made: No such file")
    output = project / "build.toml"
    assert_fails_in_one_line(project, "--output", output, match=f"--output: expected a folder, found the file {output}")


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


# Failing and being killed while a build is put in place


@pytest.fixture
def old(exported):
    """A project with a build, of which nothing may be lost."""
    quick(exported, unique_id="old")
    return exported


def fails(number, error):
    """Instead of os.rename: the call of this number fails."""
    rename, calls = os.rename, []

    def count(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise error
        return rename(*arguments)

    return count


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["EIO", "SIGINT"]
)
@pytest.mark.parametrize("step", ["exchange", 1, 2])
def test_failing_to_put_a_build_in_place(old, monkeypatch, step, error):
    before = everything(old / "build")

    def refuse(*arguments):
        raise error

    if step == "exchange":
        monkeypatch.setattr(build_kernel, "exchange", refuse)
    else:
        monkeypatch.setattr(build_kernel, "exchange", lambda *arguments: False)
        monkeypatch.setattr(os, "rename", fails(step, error))
    with pytest.raises(type(error)):
        quick(old, unique_id="new")
    assert everything(old / "build") == before
    assert not list(old.glob(".build*"))
    monkeypatch.undo()
    quick(old, unique_id="new")
    assert built_id(old) == "new"


def test_exchange(tmp_path, monkeypatch):
    one, other = tmp_path / "one", tmp_path / "other"
    put("a")(one), put("b")(other)
    assert build_kernel.exchange(one, other)
    assert (everything(one), everything(other)) == ({"b": b""}, {"a": b""})
    with pytest.raises(FileNotFoundError):
        build_kernel.exchange(one, tmp_path / "nowhere")

    class Library:
        """A C library, or the file system below, that cannot do it."""

        def __init__(self, *arguments, **options):
            ctypes.set_errno(errno.EINVAL)

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert not build_kernel.exchange(one, other)
    Library.renameat2 = lambda self, *arguments: -1
    assert not build_kernel.exchange(one, other)


KILLED_PY = """
import json, os, shutil, signal, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import build_kernel

project, fallback = Path(sys.argv[2]), sys.argv[3] == "fallback"
build, spare = project / "build", project / "spare"
exchange = build_kernel.exchange
interface = (build / "torch-cpu/interface.json").read_bytes()
digest = build_kernel.kernels_rust().Digest


def attempt(kill_at):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    steps = 0

    def step():
        nonlocal steps
        steps += 1
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event, arguments):
        if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            step()
        elif event == "open" and arguments[1] and "w" in str(arguments[1]):
            step()

    def exchanged(*arguments):
        step()
        done = False if fallback else exchange(*arguments)
        step()
        return done

    sys.addaudithook(watch)
    build_kernel.exchange = exchanged
    build_kernel.find_interface = lambda *arguments: interface
    build_kernel.build(project, build, "cpu", "new", quiet=True)
    os._exit(0)


def state():
    # "old", "new", or None where there is no build; a part of one is an error.
    if not build.exists():
        return None
    (variant,) = build.iterdir()
    metadata = build_kernel.kernels_rust().Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(digest.hash_variant(metadata.digest.algorithm, variant))
    return metadata.id.rsplit("_", 1)[1]


def leftovers():
    return [path.name for path in project.iterdir() if path.name.startswith(".build")]


def fail(*arguments):
    raise build_kernel.BuildError("injected")


shutil.copytree(build, spare)
seen, kill_at, status = [], 0, None
while status != 0:
    kill_at += 1
    shutil.rmtree(build)
    shutil.copytree(spare, build)
    status = attempt(kill_at)
    found = state()
    seen.append([found, bool(leftovers())])
    # The next run, and even one that fails, loses nothing and leaves nothing.
    build_kernel.find_interface = fail
    try:
        build_kernel.build(project, build, "cpu", "other", quiet=True)
        raise AssertionError("expected a failure")
    except build_kernel.BuildError as error:
        assert str(error) == "injected", error
    build_kernel.find_interface = lambda *arguments: interface
    assert state() == (found or "old"), (kill_at, found, state())
    assert not leftovers(), (kill_at, leftovers())
print(json.dumps(seen))
"""


@pytest.mark.parametrize("way", ["exchange", "fallback"])
def test_killed_at_each_step(exported, way):
    """kill -9 before every change of the file system: the build is the old one or the new one, or one run away from it."""
    build_kernel.build(exported, exported / "build", "cpu", "old", quiet=True)
    done = run([sys.executable, "-c", KILLED_PY, SCRIPTS, exported, way], exported)
    assert done.returncode == 0, done.stderr
    *killed, last = json.loads(done.stdout)
    assert last == ["new", False]
    assert len(killed) > 30 and sum(left for _, left in killed) > 30
    found = [state for state, _ in killed]
    assert {"old", "new"} <= set(found)
    # Without an exchange there is a moment between two renames.
    assert found.count(None) == (1 if way == "fallback" else 0)
    assert found == sorted(found, key=["old", None, "new"].index)


def test_a_folder_that_no_build_left_is_kept(old):
    put(".build-build/thesis.tex", b"years of work")(old)
    before = everything(old)
    with pytest.raises(build_kernel.BuildError, match=r"\.build-build is in the way and was not made by a build"):
        quick(old)
    assert everything(old) == before


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
