"""`scripts/verify.py`: every manipulation of a cache is refused, or the tool says what it cannot know.

The cache holds one small kernel, which `scripts/vendor.py` fetched from a Hub on this machine. `verify` runs in this
process, on a copy for each manipulation; a process of its own then loads what is left, with the real `kernels`.
"""

import builtins
import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import py_compile
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vendor
import verify
from hub import client
from kernels import _rust
from projects import ROOT, contents, export, script
from small import FILES, REPO_ID, publish, serve, write_lockfile, write_variant

OTHER = "org/other"
FOREIGN = b"import builtins; builtins.FOREIGN = True\n"
SECOND = "2" * 40
# Such a variant is for this machine alone, and so preferred.
TORCH = "torch{}{}".format(*torch.__version__.split("."))
HERE = f"cpu-{platform.machine()}-linux"


@pytest.fixture(scope="module")
def vendored(tmp_path_factory):
    """A Hub, and what is vendored from it: `cache`, `lockfile`, `commit`."""
    folder = tmp_path_factory.mktemp("vendored")
    with serve(folder / "hub") as hub:
        commit = publish(hub, folder / "small")
        lockfile = write_lockfile(folder / "kernels.lock", (REPO_ID, 1, commit))
        assert vendor.main([REPO_ID, "--version", "1", "--output", str(folder / "cache")]) == 0
        yield SimpleNamespace(hub=hub, cache=folder / "cache", lockfile=lockfile, commit=commit)


@dataclass
class Case:
    """A copy of the cache and of the lockfile, to be manipulated."""

    folder: Path
    commit: str

    cache = property(lambda self: self.folder / "cache")
    lockfile = property(lambda self: self.folder / "kernels.lock")
    repository = property(lambda self: verify.repository_folder(self.cache, REPO_ID))
    snapshot = property(lambda self: self.repository / "snapshots" / self.commit)
    variant = property(lambda self: self.snapshot / "build/torch-cpu")
    layers = property(lambda self: self.variant / "layers.py")
    listing = property(lambda self: self.repository / f"trees/{self.commit}.json")
    ref = property(lambda self: self.repository / "refs/v1")

    @property
    def outside(self):
        """A place outside of the cache."""
        (self.folder / "outside").mkdir(exist_ok=True)
        return self.folder / "outside"


def copy(vendored, folder):
    shutil.copytree(vendored.cache, folder / "cache", symlinks=True)
    shutil.copy(vendored.lockfile, folder / "kernels.lock")
    return Case(folder, vendored.commit)


# Manipulations

MANIPULATIONS = {}
# What `verify` is asked, and with what: by name, by lockfile, and each with the Hub.
WAYS = {"offline": [REPO_ID], "lockfile": ["--lockfile"], "online": [REPO_ID, "--online"]}
WAYS["both"] = [*WAYS["lockfile"], "--online"]
AGAINST = dict(zip(WAYS, (verify.CACHE, verify.LOCKED, verify.ONLINE, verify.LOCKED_ONLINE)))


@dataclass
class Manipulation:
    change: functools.partial
    effect: str
    messages: tuple
    accepted: tuple


def manipulation(title, effect, messages, accepted=(), /, **options):
    """Adds one to the matrix.

    Args:
        effect: "runs" if foreign code runs where the kernel is loaded, "loads" if loading ends otherwise than before,
            "read" if it ends as before, but reads other files, or would under other circumstances.
        messages: what `verify` says of it, or one of several, where it depends on how it is asked.
        accepted: the ways of asking that cannot know of it, or that it does not concern.
        options: for the function.
    """

    def add(function):
        said = (messages,) if isinstance(messages, str) else messages
        MANIPULATIONS[title] = Manipulation(functools.partial(function, **options), effect, said, tuple(accepted))
        return function

    return add


CONTENT = "not the content of this commit"
STRAY = "not in this commit"
PYC = "bytecode"
NO_LISTING = "not checked: no listing of this commit"
NO_COMMIT = "has no such commit"
NOT_THE_HUBS = "not the listing of the Hub"
LOCKED = "is locked to"
TAKES = "`kernels` takes it for version 1"
TWICE = "not the only one that `kernels` takes for version 1"


def replace(path, content):
    """In a cache a file is a link to content that several may share."""
    path.unlink()
    path.write_bytes(content)


def same_length(content):
    return FOREIGN + b"VALUE = 1\n" + b"#" * (len(content) - len(FOREIGN) - 11) + b"\n"


@manipulation("blob of equal length", "runs", CONTENT, edit=same_length)
@manipulation("blob longer", "runs", CONTENT, edit=lambda content: content + FOREIGN)
@manipulation("blob empty", "loads", CONTENT, edit=lambda content: b"")
@manipulation("blob truncated", "loads", CONTENT, edit=lambda content: content[:-10])
@manipulation("blob with a comment more", "read", CONTENT, edit=lambda content: content + b"#\n")
def edit_blob(case, edit):
    blob = case.layers.resolve()
    blob.write_bytes(edit(blob.read_bytes()))


@manipulation("file for a link", "runs", CONTENT, name="layers.py")
@manipulation("file for a link in a package", "runs", CONTENT, name="sub/__init__.py")
@manipulation("entry point", "runs", CONTENT, name="__init__.py")
def edit_file(case, name):
    replace(case.variant / name, (case.variant / name).read_bytes() + FOREIGN)


@manipulation("link out of the cache", "runs", "layers.py: a link to", content=FOREIGN + b"VALUE = 1\n")
@manipulation("link out of the cache, to the same", "read", "layers.py: a link to", content=FILES["layers.py"])
def link_file_out(case, content):
    (case.outside / "layers.py").write_bytes(content)
    case.layers.unlink()
    case.layers.symlink_to(case.outside / "layers.py")


@manipulation("link to another blob", "loads", CONTENT)
def link_to_another_blob(case):
    target = os.readlink(case.variant / "__init__.py")
    case.layers.unlink()
    case.layers.symlink_to(target)


@manipulation("link to another repository", "runs", "layers.py: a link to")
def link_to_another_repository(case):
    blob = verify.repository_folder(case.cache, OTHER) / "blobs/one"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(FOREIGN + b"VALUE = 1\n")
    case.layers.unlink()
    case.layers.symlink_to(os.path.relpath(blob, case.layers.parent))


@manipulation("blob behind a link", "runs", "layers.py: a link to")
def link_blob_out(case):
    blob = case.layers.resolve()
    shutil.move(blob, case.outside / "blob")
    (case.outside / "blob").write_bytes(FOREIGN + b"VALUE = 1\n")
    blob.symlink_to(case.outside / "blob")


@manipulation("blobs behind a link", "read", ": a link to", which=lambda case: case.repository / "blobs", edit=False)
@manipulation("snapshot behind a link", "runs", "behind a link", which=lambda case: case.snapshot)
@manipulation("snapshots behind a link", "runs", "behind a link", which=lambda case: case.snapshot.parent)
@manipulation("repository behind a link", "runs", "behind a link", which=lambda case: case.repository)
@manipulation("build behind a link", "runs", "build: a link to", which=lambda case: case.snapshot / "build")
@manipulation("variant behind a link", "runs", "build/torch-cpu: a link to", which=lambda case: case.variant)
@manipulation("package behind a link", "runs", "sub: a link to", which=lambda case: case.variant / "sub")
@manipulation("listing behind a link", "read", "no listing", which=lambda case: case.listing, edit=False)
def move_out(case, which, edit=True):
    place = which(case)
    package = case.variant / "sub/__init__.py"
    if edit:
        replace(package, FOREIGN + b"VALUE = 2\n")
    # Links inside the cache are relative.
    for path in case.snapshot.rglob("*"):
        if path.is_symlink() and edit:
            replace(path, path.read_bytes())
    shutil.move(place, case.outside / "moved")
    place.symlink_to(case.outside / "moved")


# metadata.json, and the digest in it


def metadata_of(case):
    return json.loads((case.variant / "metadata.json").read_text())


def write_metadata(case, metadata):
    replace(case.variant / "metadata.json", json.dumps(metadata).encode())


@manipulation("digest too", "runs", CONTENT)
def edit_with_digest(case):
    replace(case.layers, FOREIGN + b"VALUE = 1\n")
    digest = _rust.Digest.hash_variant(_rust.DigestAlgorithm.SHA256, case.variant)
    write_metadata(case, {**metadata_of(case), "digest": {"algorithm": "sha256", "files": digest.files}})


NO_DIGEST = {"algorithm": "sha256", "files": {}}


@manipulation("metadata without digest", "read", "metadata.json: " + CONTENT, digest=None)
@manipulation("metadata with an empty digest", "read", "metadata.json: " + CONTENT, digest=NO_DIGEST)
@manipulation("metadata with another id", "loads", "metadata.json: " + CONTENT, id="torch")
@manipulation("metadata with another name", "loads", "metadata.json: " + CONTENT, name="other")
@manipulation("metadata with another version", "loads", "metadata.json: " + CONTENT, version=2)
@manipulation("metadata with a minimum", "loads", "metadata.json: " + CONTENT, **{"kernels-minver": "99.0"})
@manipulation("metadata with a package", "loads", "metadata.json: " + CONTENT, **{"python-depends": ["gone"]})
@manipulation("metadata with another backend", "loads", "metadata.json: " + CONTENT, backend={"type": "cuda"})
def edit_metadata(case, **changes):
    write_metadata(case, {**metadata_of(case), **changes})


@manipulation("metadata with a digest of another kind", "read", "metadata.json: " + CONTENT)
def edit_algorithm(case):
    digest = _rust.Digest.hash_variant(_rust.DigestAlgorithm.SHA512, case.variant)
    write_metadata(case, {**metadata_of(case), "digest": {"algorithm": "sha512", "files": digest.files}})


@manipulation("metadata with a dependency", "runs", "metadata.json: " + CONTENT)
def add_dependency(case):
    variant = verify.repository_folder(case.cache, OTHER) / "snapshots" / SECOND / "build/torch-cpu"
    write_variant(variant, {"__init__.py": FOREIGN}, name="other", id="_other_cpu_0123456")
    write_ref(verify.repository_folder(case.cache, OTHER) / "refs/v1", SECOND)
    write_metadata(case, {**metadata_of(case), "kernel-depends": [{"repo-id": OTHER, "version": 1}]})


@manipulation("metadata that is none", "loads", "metadata.json: " + CONTENT)
def break_metadata(case):
    replace(case.variant / "metadata.json", b"{")


# Files that are gone


@manipulation("file less", "loads", "layers.py: missing", names=["layers.py"])
@manipulation("entry point less", "loads", "__init__.py: missing", names=["__init__.py"])
@manipulation("package less", "loads", "sub/__init__.py: missing", names=["sub/__init__.py"])
@manipulation("metadata less", "loads", "metadata.json: missing", names=["metadata.json"])
@manipulation("only a file left", "loads", "missing", names=["__init__.py", "layers.py", "metadata.json"])
def delete(case, names):
    for name in names:
        (case.variant / name).unlink()


@manipulation("only metadata left", "loads", "not checked: no variant is here, or only its metadata.json")
def delete_all_but_metadata(case):
    for path in case.snapshot.glob("build/*/**/*.py"):
        path.unlink()


@manipulation("blob less", "loads", "layers.py: a link to")
def delete_blob(case):
    case.layers.resolve().unlink()


@manipulation("entry point elsewhere", "runs", "small: " + STRAY)
def move_entry_point(case):
    (case.variant / "__init__.py").unlink()
    unlist(case, "__init__.py")
    add_file(case, "small/__init__.py", FOREIGN + b"VALUE = 3\n")


# Variants that `kernels` takes for better ones


@manipulation("variant for this torch", "runs", f"build/{TORCH}-cxx11-{HERE}: {STRAY}", name=f"{TORCH}-cxx11-{HERE}")
@manipulation("variant without ABI", "runs", f"build/{TORCH}-{HERE}: {STRAY}", name=f"{TORCH}-{HERE}")
@manipulation("variant for the stable ABI", "runs", STRAY, name=f"torch-stable-abi28-{HERE}")
@manipulation("variant for another machine", "read", STRAY, name=f"{TORCH}-cpu-riscv64-linux")
@manipulation("variant for all", "read", f"build/torch-universal: {STRAY}", name="torch-universal")
@manipulation("variant for tvm-ffi", "read", STRAY, name=f"tvm-ffi01-{HERE}")
@manipulation("variant without digest", "runs", STRAY, name=f"{TORCH}-{HERE}", digest=None)
def add_variant(case, name, **metadata):
    write_variant(case.snapshot / "build" / name, {"__init__.py": FOREIGN + b"VALUE = 3\n"}, **metadata)


@manipulation("variant and no listing", "runs", (NO_LISTING, STRAY))
def add_variant_and_delete_listing(case):
    add_variant(case, f"{TORCH}-{HERE}")
    case.listing.unlink()


@manipulation("variant that is empty", "loads", f"build/{TORCH}-{HERE}: {STRAY}")
def add_empty_variant(case):
    (case.snapshot / f"build/{TORCH}-{HERE}").mkdir()


@manipulation("variant behind a new link", "runs", f"build/{TORCH}-{HERE}: a link to")
def add_linked_variant(case):
    write_variant(case.outside / "variant", {"__init__.py": FOREIGN + b"VALUE = 3\n"})
    (case.snapshot / f"build/{TORCH}-{HERE}").symlink_to(case.outside / "variant")


@manipulation("variant of another name", "loads", "build/torch-universal: " + STRAY, name="torch-universal")
@manipulation("variant in capitals", "loads", "build/Torch-CPU: " + STRAY, name="Torch-CPU")
def rename_variant(case, name):
    case.variant.rename(case.variant.with_name(name))


# What Python imports before the file, or beside it


def add_file(case, name, content):
    path = case.variant / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


for _suffix in importlib.machinery.EXTENSION_SUFFIXES:
    for _stem in ("layers", "layers/__init__", "__init__"):
        manipulation(
            _stem + _suffix,
            "read" if _stem == "__init__" else "loads",
            STRAY,
            name=_stem + _suffix,
            content=b"\x7fELF",
        )(add_file)
manipulation("package in a module's place", "runs", STRAY, name="layers/__init__.py", content=FOREIGN + b"VALUE = 1")(
    add_file
)
for _name in ("more.py", ".hidden.py", "LAYERS.PY", "plan.json", "metadata.json.sigstore", "torch/__init__.py"):
    manipulation(f"file more: {_name}", "read", STRAY, name=_name, content=FOREIGN)(add_file)
manipulation("name with a line break", "read", r"x\nok  all.py: " + STRAY, name="x\nok  all.py", content=b"")(add_file)
manipulation("name that is no text", "read", r"\udcff.py: " + STRAY, name=os.fsdecode(b"\xff.py"), content=b"")(
    add_file
)


@manipulation("file in capitals", "loads", "Layers.py: " + STRAY)
def rename_file(case):
    case.layers.rename(case.layers.with_name("Layers.py"))


@manipulation("folder in a module's place", "loads", "layers: " + STRAY)
def replace_module_by_folder(case):
    case.layers.unlink()
    (case.variant / "layers").mkdir()


@manipulation("folder more", "read", "more: " + STRAY)
def add_folder(case):
    (case.variant / "more").mkdir()


@manipulation("file more in the snapshot", "read", "more.py: " + STRAY)
def add_to_snapshot(case):
    (case.snapshot / "more.py").write_bytes(FOREIGN)


@manipulation("another card", "read", "README.md: " + CONTENT)
def edit_card(case):
    replace(case.snapshot / "README.md", b"Another.\n")


@manipulation("link more", "read", "more.py: a link to", target="/etc/passwd")
@manipulation("link to nothing", "read", "more.py: a link to", target="gone.py")
@manipulation("link to itself", "read", "more.py: a link to", target="more.py")
@manipulation("link to a device", "read", "more.py: a link to", target="/dev/zero")
@manipulation("link to a folder", "read", "more.py: a link to", target="/tmp")
@manipulation("link to the variant", "read", "more.py: a link to", target=".")
def add_link(case, target):
    (case.variant / "more.py").symlink_to(target)


@manipulation("pipe", "read", "more.py: no regular file", name="more.py")
@manipulation("pipe for a module", "loads", "layers.py: no regular file", name="layers.py")
def add_pipe(case, name):
    (case.variant / name).unlink(missing_ok=True)
    os.mkfifo(case.variant / name)


# Bytecode

UNCHECKED, CHECKED, BY_TIME = (
    py_compile.PycInvalidationMode.UNCHECKED_HASH,
    py_compile.PycInvalidationMode.CHECKED_HASH,
    py_compile.PycInvalidationMode.TIMESTAMP,
)


def compile_foreign(case, value=b"VALUE = 1\n", mode=UNCHECKED, source=None):
    """Bytecode of foreign code, which says that it belongs to `source`."""
    code, compiled = case.outside / "code.py", case.outside / "code.pyc"
    code.write_bytes(FOREIGN + value)
    py_compile.compile(str(code), cfile=str(compiled), invalidation_mode=mode)
    content = bytearray(compiled.read_bytes())
    if mode is CHECKED:
        content[8:16] = importlib.util.source_hash(source.read_bytes())
    elif mode is BY_TIME:
        at = source.stat()
        content[8:16] = int(at.st_mtime).to_bytes(4, "little") + at.st_size.to_bytes(4, "little")
    return bytes(content)


@manipulation("bytecode, unchecked", "runs", "__pycache__: " + PYC, mode=UNCHECKED)
@manipulation("bytecode, checked by hash", "runs", "__pycache__: " + PYC, mode=CHECKED)
@manipulation("bytecode, checked by time", "runs", "__pycache__: " + PYC, mode=BY_TIME)
@manipulation("bytecode of the entry point", "runs", "__pycache__: " + PYC, stem="__init__", value=b"VALUE = 3\n")
@manipulation("bytecode in a package", "runs", "sub/__pycache__: " + PYC, stem="sub/__init__", value=b"VALUE = 2\n")
@manipulation("bytecode of python -O", "read", "__pycache__: " + PYC, level=".opt-1")
@manipulation("bytecode of another Python", "read", "__pycache__: " + PYC, tag="cpython-399")
def add_bytecode(case, mode=UNCHECKED, stem="layers", value=b"VALUE = 1\n", tag=sys.implementation.cache_tag, level=""):
    source = case.variant / f"{stem}.py"
    cache = source.parent / "__pycache__"
    cache.mkdir()
    (cache / f"{source.stem}.{tag}{level}.pyc").write_bytes(compile_foreign(case, value, mode, source))


@manipulation("bytecode behind a link", "runs", "__pycache__: a link to")
def link_bytecode(case):
    add_bytecode(case)
    shutil.move(case.variant / "__pycache__", case.outside / "cached")
    (case.variant / "__pycache__").symlink_to(case.outside / "cached")


@manipulation("bytecode as a package", "runs", f"layers: {STRAY}", name="layers/__init__.pyc")
@manipulation("bytecode beside the source", "read", "layers.pyc: " + PYC, name="layers.pyc")
@manipulation("bytecode of old", "read", "layers.pyo: " + PYC, name="layers.pyo")
@manipulation("bytecode for the source", "runs", "layers.pyc: " + PYC, name="layers.pyc", without="layers.py")
@manipulation(
    "bytecode for a package",
    "runs",
    ("sub: " + STRAY, "sub/__init__.pyc: " + PYC),
    name="sub/__init__.pyc",
    without="sub/__init__.py",
)
def add_pyc(case, name, without=None):
    add_file(case, name, compile_foreign(case, b"VALUE = 1\n"))
    if without is not None:
        (case.variant / without).unlink()
        unlist(case, without)


# Branches, and other snapshots


def write_ref(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def add_snapshot(case, commit=SECOND, listed=True):
    """A commit that the Hub does not have, in itself consistent if it is listed."""
    folder = case.repository / "snapshots" / commit
    write_variant(folder / "build/torch-cpu", {"__init__.py": FOREIGN + b"VALUE = 3\n"})
    if listed:
        files = {
            path: {"size": len(content), "blob_id": verify.git_id(b"blob", content)}
            for path, content in contents(folder).items()
        }
        path = case.repository / f"trees/{commit}.json"
        path.write_text(json.dumps({"format_version": 1, "files": files}))


@manipulation("branch moved", "runs", (LOCKED, NO_COMMIT), ["offline"])
def move_branch(case):
    add_snapshot(case)
    write_ref(case.ref, SECOND)


@manipulation("branch moved to what is not listed", "runs", (NO_LISTING, LOCKED, NO_COMMIT))
def move_branch_to_unlisted(case):
    add_snapshot(case, listed=False)
    write_ref(case.ref, SECOND)


@manipulation("branch of the old layout", "runs", TWICE)
def add_old_branch(case):
    add_snapshot(case)
    write_ref(case.cache / "models--org--small/refs/v1", SECOND)


@manipulation("branch of the old layout alone", "runs", (LOCKED, NO_COMMIT), ["offline"])
def add_old_branch_alone(case):
    add_old_branch(case)
    case.ref.unlink()


@manipulation("branch of almost the name", "runs", TAKES, name="v01", alone=True)
@manipulation("branch of a sign", "runs", TAKES, name="v+1", alone=True)
@manipulation("branch of another script", "runs", TAKES, name="v\u0661", alone=True)
@manipulation("branch of another version", "runs", NO_COMMIT, ["offline", "lockfile", "both"], name="v2")
@manipulation("branch of no version", "runs", NO_COMMIT, ["offline", "lockfile", "both"], name="main")
def add_branch(case, name, alone=False):
    add_snapshot(case)
    if alone:
        case.ref.unlink()
    write_ref(case.repository / "refs" / name, SECOND)


@manipulation("branch to nowhere", "loads", "that commit is not here", content="1" * 40)
@manipulation("branch without commit", "loads", "expected a commit, found ''", content="")
@manipulation("branch to a path", "loads", "expected a commit, found '../../x'", content="../../x")
@manipulation("branch to bytes", "loads", "expected a commit, found", content="\x1b[2J")
def edit_branch(case, content):
    write_ref(case.ref, content)


@manipulation("branch in capitals", "loads", "expected a commit")
def capitalize_branch(case):
    write_ref(case.ref, case.commit.upper().replace("0", "A"))


@manipulation("branch to a branch", "runs", "expected a commit, found 'main'")
def chain_branches(case):
    add_branch(case, "main")
    write_ref(case.ref, "main")


@manipulation("branch to a name", "runs", "expected a commit, found 'evil'")
def branch_to_a_name(case):
    add_snapshot(case, "evil", listed=False)
    write_ref(case.ref, "evil")
    write_ref(case.repository / "refs/evil", "evil")


@manipulation("branch out of the cache", "runs", "expected a commit, found 'x'")
def branch_out_of_the_cache(case):
    write_variant(case.outside / "build/torch-cpu", {"__init__.py": FOREIGN + b"VALUE = 3\n"})
    write_ref(case.ref, "x")
    write_ref(case.repository / "refs/x", str(case.outside))


@manipulation("branch behind a link", "runs", "v1: a link to")
def link_branch(case):
    add_snapshot(case)
    write_ref(case.outside / "ref", SECOND)
    case.ref.unlink()
    case.ref.symlink_to(case.outside / "ref")


# Listings and blobs


@manipulation("no listing", "read", NO_LISTING, ["online", "both"])
def delete_listing(case):
    case.listing.unlink()


@manipulation("listing that is none", "read", "no listing", content="{")
@manipulation("listing of another format", "read", "no listing", content='{"format_version": 2, "files": {}}')
@manipulation("listing of another form", "loads", "no listing", content="[]")
@manipulation("listing of nothing", "read", (STRAY, NOT_THE_HUBS), content='{"format_version": 1, "files": {}}')
@manipulation("listing that is deep", "loads", "no listing", content="[" * 100_000)
def edit_listing(case, content):
    case.listing.write_text(content)


@manipulation("listing that is a pipe", "loads", "no listing")
def pipe_for_listing(case):
    case.listing.unlink()
    os.mkfifo(case.listing)


def change_listing(case, change):
    data = json.loads(case.listing.read_text())
    change(data["files"])
    case.listing.write_text(json.dumps(data))


def unlist(case, name):
    """Offline nothing loads from a snapshot that is not whole."""
    change_listing(case, lambda files: files.pop(f"build/torch-cpu/{name}"))


@manipulation("listing with a file less", "read", (f"build/torch-cpu/layers.py: {STRAY}", NOT_THE_HUBS))
def shorten_listing(case):
    unlist(case, "layers.py")


@manipulation("listing with a variant less", "loads", NOT_THE_HUBS, ["offline", "lockfile"])
def drop_variant(case):
    shutil.rmtree(case.variant)
    change_listing(case, lambda files: [files.pop(path) for path in list(files) if path.startswith("build/torch-cpu/")])


@manipulation("listing with another place", "read", NOT_THE_HUBS, ["offline", "lockfile"])
def relocate_in_listing(case):
    change_listing(case, lambda files: files["build/torch-cpu/layers.py"].update(xet_hash="0" * 64))


@manipulation("commit made anew", "runs", CONTENT, ["offline", "lockfile"])
def remake(case):
    """All that the cache says of itself fits: content, name of the content, digest, listing."""
    edit_with_digest(case)
    for name in ("layers.py", "metadata.json"):
        path = case.variant / name
        content = path.read_bytes()
        blob = case.repository / "blobs" / verify.git_id(b"blob", content)
        blob.write_bytes(content)
        path.unlink()
        path.symlink_to(os.path.relpath(blob, path.parent))
        entry = {"size": len(content), "blob_id": blob.name}
        change_listing(case, lambda files, name=name, entry=entry: files.update({f"build/torch-cpu/{name}": entry}))


@manipulation(
    "blob for the next commit", "read", "not the content of this id", name=verify.git_id(b"blob", b"VALUE = 4\n")
)
@manipulation("large blob for the next commit", "read", "not the content of this id", name="0" * 64)
def add_blob(case, name):
    (case.repository / "blobs" / name).write_bytes(FOREIGN)


# Lockfiles

BY_NAME = ("offline", "online")


def edit_lockfile(case, change):
    case.lockfile.write_text(json.dumps(change(json.loads(case.lockfile.read_text()))))


@manipulation("lockfile with another commit", "loads", "not in ", BY_NAME, commit="1" * 40)
@manipulation("lockfile with half a commit", "loads", "kernels.lock", BY_NAME, commit="1" * 20)
def lock_another_commit(case, commit):
    edit_lockfile(case, lambda locks: [{**locks[0], "lock": {"commit": commit}}])


@manipulation("lockfile with a second version", "runs", ("build/torch-cpu/layers.py: " + CONTENT, NO_COMMIT))
def lock_two_versions(case):
    """The second is the damaged one."""
    second = case.repository / "snapshots" / SECOND
    shutil.copytree(case.snapshot, second, symlinks=True)
    shutil.copy(case.listing, case.listing.with_stem(SECOND))
    replace(second / "build/torch-cpu/layers.py", FOREIGN + b"VALUE = 1\n")
    write_ref(case.repository / "refs/v2", SECOND)
    version = {"dependency": {"repo-id": REPO_ID, "version": 2}, "lock": {"commit": SECOND}}
    edit_lockfile(case, lambda locks: [*locks, version])


@manipulation("lockfile with a commit made up", "runs", NO_COMMIT, ["offline", "lockfile"])
def lock_a_commit_made_up(case):
    add_snapshot(case)
    write_ref(case.ref, SECOND)
    lock_another_commit(case, SECOND)


@manipulation("lockfile of nothing", "loads", "expected locked kernels, found none", BY_NAME, change=lambda locks: [])
@manipulation("lockfile twice", "loads", "duplicate", BY_NAME, change=lambda locks: locks * 2)
@manipulation("lockfile of another form", "loads", "kernels.lock", BY_NAME, change=lambda locks: {})
@manipulation(
    "lockfile of no repository",
    "loads",
    "expected a repository such as ORG/NAME, found '../small'",
    BY_NAME,
    change=lambda locks: [{**locks[0], "dependency": {"repo-id": "../small", "version": 1}}],
)
def change_lockfile(case, change):
    edit_lockfile(case, change)


# The matrix


def ask(case, way, capsys):
    """Exit status and all that was printed."""
    arguments = [str(case.lockfile) if part == "--lockfile" else part for part in WAYS[way]]
    if "--lockfile" in WAYS[way]:
        arguments.insert(0, "--lockfile")
    capsys.readouterr()
    status = verify.main(["--cache", str(case.cache), *arguments])
    return status, "".join(capsys.readouterr())


def foreign():
    """Whether foreign code has run in this process."""
    return hasattr(builtins, "FOREIGN")


@pytest.mark.parametrize("name", MANIPULATIONS)
def test_every_manipulation_is_refused_before_anything_runs(vendored, tmp_path, capsys, name):
    manipulation = MANIPULATIONS[name]
    case = copy(vendored, tmp_path)
    manipulation.change(case)
    before, loaded = state(case.folder), set(sys.modules)
    for way in WAYS:
        status, output = ask(case, way, capsys)
        if way in manipulation.accepted:
            assert status == 0, (way, output)
            # Where it cannot know, it says so.
            assert f"Compared with {AGAINST[way]}." in output
        else:
            assert status == 1, (way, output)
            assert any(message in output for message in manipulation.messages), (way, output)
            assert not [line for line in output.splitlines() if line.startswith("ok  all")]
    assert not foreign()
    assert not [module for module in set(sys.modules) - loaded if "small" in module or "other" in module]
    assert state(case.folder) == before


def state(folder):
    """What lies below a folder."""

    def look(path):
        if path.is_symlink():
            return os.readlink(path)
        return path.read_bytes() if path.is_file() else path.is_dir()

    return {str(path.relative_to(folder)): look(path) for path in folder.rglob("*")}


def test_what_the_matrix_is_made_of():
    """Most of it is refused without the Hub, and what is not is named here."""
    assert len(MANIPULATIONS) >= 60
    assert {name for name, each in MANIPULATIONS.items() if "offline" in each.accepted} == {
        "branch moved",
        "branch of another version",
        "branch of no version",
        "branch of the old layout alone",
        "commit made anew",
        "listing with a variant less",
        "listing with another place",
        *(name for name, each in MANIPULATIONS.items() if "lockfile" in name and each.accepted),
    }
    only_online = {name for name, each in MANIPULATIONS.items() if {"offline", "lockfile"} <= {*each.accepted}}
    assert only_online == {
        "branch of another version",
        "branch of no version",
        "commit made anew",
        "listing with a variant less",
        "listing with another place",
        "lockfile with a commit made up",
    }
    assert not [name for name, each in MANIPULATIONS.items() if len(each.accepted) == len(WAYS)]


LOADER = """
import builtins, json, os, signal, sys
from pathlib import Path

sys.dont_write_bytecode = True
import torch
from kernels import get_kernel, get_loaded_kernels, importer, load_kernel, resolver

folders, repo_id = json.load(sys.stdin), sys.argv[1]


def attempts(folder):
    os.environ["KERNELS_CACHE"] = resolver.CACHE_DIR = f"{folder}/cache"
    for load in (
        lambda: get_kernel(repo_id, version=1),
        lambda: get_kernel(repo_id, version=2),
        lambda: get_kernel(repo_id, revision="main"),
        lambda: load_kernel(repo_id, lockfile=Path(folder, "kernels.lock")),
    ):
        try:
            kernel = load()
            loaded = get_loaded_kernels()[-1].metadata
            outcome = [kernel.__name__, kernel.__file__.replace(folder, ""), kernel.VALUE]
            outcome += [str(loaded.name), str(loaded.backend), loaded.version]
        except BaseException as error:
            outcome = [type(error).__name__]
        yield [vars(builtins).pop("FOREIGN", False), *outcome]
        # The next one shall load as if it were the first.
        importer._loaded_kernels.clear()
        for name in [name for name in sys.modules if name.startswith("_small")]:
            del sys.modules[name]


for folder in folders:
    read, write = os.pipe()
    if not os.fork():
        # Whoever opens a pipe waits.
        signal.setitimer(signal.ITIMER_REAL, 3)
        sys.stderr = open(os.devnull, "w")
        os.write(write, json.dumps(list(attempts(folder))).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        print(pipe.read() or "[[false, \\"killed\\"]]")
    os.wait()
"""


def test_every_manipulation_changes_what_kernels_loads(vendored, tmp_path):
    """The matrix is of things that matter: without `verify` most of them run foreign code."""
    cases = {name: copy(vendored, tmp_path / str(at)) for at, name in enumerate(["", *MANIPULATIONS])}
    untouched = cases.pop("")
    same = state(untouched.folder)
    for name, case in cases.items():
        MANIPULATIONS[name].change(case)
        assert state(case.folder) != same, name
    folders = [str(case.folder) for case in (untouched, *cases.values())]
    done = subprocess.run(
        [sys.executable, "-c", LOADER, REPO_ID],
        input=json.dumps(folders),
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    expected, *outcomes = map(json.loads, done.stdout.splitlines())
    assert [attempt[3:4] for attempt in expected] == [[3], [], [], [3]], done.stderr
    effects = {}
    for name, outcome in zip(cases, outcomes, strict=True):
        runs = any(attempt[0] for attempt in outcome)
        effects[name] = "runs" if runs else "read" if outcome == expected else "loads"
    assert {name: each for name, each in effects.items() if each != MANIPULATIONS[name].effect} == {}


# What is in order


def test_an_untouched_cache_is_in_order(vendored, tmp_path, capsys):
    case = copy(vendored, tmp_path)
    for way in WAYS:
        status, output = ask(case, way, capsys)
        assert (status, "note" in output) == (0, False)
        assert output.splitlines()[-1] == f"Compared with {AGAINST[way]}."
    for folder in (case.cache, case.repository, case.snapshot, case.variant, case.repository / "refs"):
        assert verify.main([str(folder)]) == 0
        assert capsys.readouterr().out.endswith(f"Compared with {verify.CACHE}.\n")
    # Seen as a part of the cache, not as a build that has a digest.
    add_variant(case, f"{TORCH}-{HERE}")
    for folder in (case.cache, case.repository, case.snapshot, case.variant):
        assert verify.main([str(folder)]) == 1


def test_what_is_enough_online_is_a_note(vendored, tmp_path, capsys):
    case = copy(vendored, tmp_path)
    other = case.variant.with_name("torch-cuda")
    for path in other.rglob("*.py"):
        path.unlink()
    for way in WAYS:
        status, output = ask(case, way, capsys)
        assert status == 0
        assert "note: only metadata.json is here, as after has_kernel" in output
    shutil.rmtree(other)
    for way in WAYS:
        status, output = ask(case, way, capsys)
        assert status == 0
        assert (
            "note: 4 files are not here: the kernel loads online, not offline (scripts/vendor.py downloads all files)"
            in output
        )
    # In a build they are missing.
    assert verify.check_variant(shutil.copytree(case.variant, tmp_path / "build/torch-cpu")).violations == []
    (tmp_path / "build/torch-cpu/layers.py").unlink()
    assert "layers.py" in verify.check_variant(tmp_path / "build/torch-cpu").violations[0]


def test_a_large_file_is_known_by_its_sha256(vendored, tmp_path, capsys):
    """What git has of it is a pointer."""
    case = copy(vendored, tmp_path)
    entry = {"blob_id": "0" * 40, "lfs_sha256": hashlib.sha256(FILES["layers.py"]).hexdigest(), "lfs_size": 1}
    change_listing(case, lambda files: files["build/torch-cpu/layers.py"].update(entry))
    assert ask(case, "offline", capsys)[0] == 0
    edit_file(case, "layers.py")
    assert ask(case, "offline", capsys)[0] == 1


def test_a_repository_is_not_the_folder_of_its_name(vendored, tmp_path, monkeypatch, capsys):
    case = copy(vendored, tmp_path)
    write_variant(tmp_path / REPO_ID / "build/torch-cpu", FILES)
    monkeypatch.chdir(tmp_path)
    assert verify.main([f"./{REPO_ID}"]) == 0
    assert f"Compared with {verify.DIGESTS}." in capsys.readouterr().out
    edit_file(case, "layers.py")
    assert ask(case, "offline", capsys)[0] == 1
    shutil.rmtree(case.cache)
    status, output = ask(case, "offline", capsys)
    assert status == 1
    assert output == (
        f"verify: error: {REPO_ID}: expected a repository in the cache {case.cache}, found none; "
        f"to check the folder, give ./{REPO_ID}\n"
    )


def test_the_branch_of_the_cache_is_that_of_the_hub(tmp_path, capsys):
    """And what lies ready for the next commit is taken from the cache, by the real client."""
    with serve(tmp_path / "hub") as hub:
        case = Case(tmp_path, publish(hub, tmp_path / "one"))
        arguments = [REPO_ID, "--version", "1", "--output", str(case.cache)]
        assert vendor.main(arguments) == 0
        assert [ask(case, way, capsys)[0] for way in ("offline", "online")] == [0, 0]
        add_blob(case, verify.git_id(b"blob", b"VALUE = 4\n"))
        assert ask(case, "offline", capsys)[0] == 1
        second = publish(hub, tmp_path / "two", {**FILES, "layers.py": b"VALUE = 4\n"})
        fetched = client(hub).snapshot_download(REPO_ID, repo_type="kernel", revision=second, cache_dir=case.cache)
        assert Path(fetched, "build/torch-cpu/layers.py").read_bytes() == FOREIGN
        shutil.rmtree(case.cache)

        assert vendor.main(arguments) == 0
        write_ref(case.ref, case.commit)
        write_lockfile(case.lockfile, (REPO_ID, 1, case.commit))
        status, output = ask(case, "online", capsys)
        assert status == 1
        assert f"is {second} at the Hub (scripts/vendor.py downloads it)" in output
        assert vendor.main(arguments) == 0
        assert ask(case, "online", capsys)[0] == 0
        # The lockfile says otherwise.
        status, output = ask(case, "both", capsys)
        assert (status, f"is locked to {case.commit}" in output) == (1, True)


def test_a_branch_that_was_moved_is_refused_by_the_lockfile_and_the_hub(vendored, tmp_path, capsys):
    """Offline and by name nothing else says which commit it is, and the output says so."""
    case = copy(vendored, tmp_path)
    move_branch(case)
    status, output = ask(case, "offline", capsys)
    assert (status, "a branch that was moved to another listed commit, are not found" in output) == (0, True)
    for way, message in (("lockfile", f"is locked to {case.commit}"), ("online", NO_COMMIT), ("both", LOCKED)):
        status, output = ask(case, way, capsys)
        assert (status, message in output) == (1, True), way
        assert "a branch that was moved" not in output, way


def test_an_incomplete_listing_is_told_by_the_ids_of_its_folders(vendored):
    entries = list(client(vendored.hub).list_repo_tree(REPO_ID, repo_type="kernel", revision="v1", recursive=True))
    assert len(entries) > 10
    assert verify.incomplete_folders(entries) == []
    for at, entry in enumerate(entries):
        if "/" in entry.path:
            assert verify.incomplete_folders(entries[:at] + entries[at + 1 :]), entry.path


# Builds


@pytest.mark.parametrize("name", ["link to the variant", "link more", "link to nothing", "pipe", "bytecode, unchecked"])
def test_a_build_holds_regular_files_alone(tmp_path, name):
    """`publish.py` asks for this too."""
    case = Case(tmp_path, "0" * 40)
    write_variant(case.variant, FILES)
    build = shutil.move(case.snapshot / "build", tmp_path / "build")
    (case.snapshot / "build").symlink_to(build)
    assert verify.check_variant(build / "torch-cpu").violations == []
    MANIPULATIONS[name].change(case)
    violation = verify.check_variant(build / "torch-cpu").violations[0]
    assert any(message in violation for message in MANIPULATIONS[name].messages)


def test_what_a_variant_loads_besides_is_said(tmp_path):
    """It is another repository's, and fails nothing."""
    write_variant(tmp_path / "torch-cpu", FILES, **{"kernel-depends": [{"repo-id": OTHER, "version": 1}]})
    finding = verify.check_variant(tmp_path / "torch-cpu")
    assert (finding.violations, finding.notes, f"loads {OTHER} too" in finding.summary) == ([], [], True)


def test_a_folder_beside_the_variants_of_a_build(tmp_path, capsys):
    write_variant(tmp_path / "build/torch-cpu", FILES)
    assert verify.main([str(tmp_path / "build")]) == 0
    (tmp_path / "build" / f"{TORCH}-{HERE}").mkdir()
    for folder in (tmp_path, tmp_path / "build"):
        assert verify.main([str(folder)]) == 1
        assert f"BAD {tmp_path}/build/{TORCH}-{HERE}" in capsys.readouterr().out


# The command


def test_as_a_command(published, vendored, tmp_path):
    verify = functools.partial(script, published.project, "verify")
    done = verify()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 4 and done.stdout.count("ok ") == 3
    case = copy(vendored, tmp_path)
    edit_file(case, "layers.py")
    done = verify(REPO_ID, KERNELS_CACHE=case.cache)
    assert done.returncode == 1
    assert CONTENT in done.stdout
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tests/nowhere/x"], "expected a folder or a repository such as ORG/NAME, found 'tests/nowhere/x'"),
        ([""], "expected a folder or a repository such as ORG/NAME, found ''"),
        (["scripts"], "scripts: expected variants of a kernel"),
        (["scripts", "--online"], "--online: expected a repository"),
        (["a/b"], "a/b: expected a repository in the cache"),
        (["--lockfile", "/nowhere"], "--lockfile: /nowhere: No such file"),
    ],
)
def test_what_cannot_be_checked_is_said_in_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    assert verify.main(arguments) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"verify: error: {message}")


def test_an_empty_name_of_the_cache_is_an_error(monkeypatch, capsys):
    """`kernels` takes it for the current folder, and huggingface_hub's own cache is another."""
    monkeypatch.setenv("KERNELS_CACHE", "")
    assert verify.main([REPO_ID]) == 1
    assert capsys.readouterr().err.startswith("verify: error: KERNELS_CACHE: expected a folder")


def test_without_a_build(tmp_path):
    done = script(export(tmp_path / "project"), "verify")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"verify: error: expected a build in {tmp_path}/project, found none; run `make build`\n"
