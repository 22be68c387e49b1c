#!/usr/bin/env python3
"""Build the kernel without Nix: one folder for each backend, as kernel-builder lays out a noarch kernel.

A folder is a copy of torch-ext/<package> with a generated `_ops.py`, which names the namespace of the ops, and a
`metadata.json` with the digest of every file. `kernels.get_local_kernel` loads it, and the Hub takes it as it is.
The same commit gives the same bytes, anywhere.
"""

import argparse
import ast
import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; `kernels` depends on it there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent

# The namespace is written out rather than found by asking torch, as kernel-builder's file does: so the cpu and the cuda
# variant can live in one process.
OPS_PY = '''\
import torch

_OPS_NAME = "{name}"

ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    """`op_name` in the namespace of this build."""
    return f"{{_OPS_NAME}}::{{op_name}}"
'''
GENERATED = ("_ops.py", "metadata.json")

# What kernel-builder looks for in its own check of the ops' names.
REGISTRATIONS = {
    "custom_op",
    "triton_op",
    "register_kernel",
    "register_fake",
    "register_vmap",
    "register_torch_dispatch",
}


class BuildError(Exception):
    """The project cannot be built; the message says where and why."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build",
        metavar="DIR",
        help="folder for the variants, replaced as a whole (default: build/ in the project)",
    )
    parser.add_argument(
        "--backends",
        metavar="LIST",
        help="comma-separated backends to build, such as cuda,cpu (default: all that build.toml names)",
    )
    parser.add_argument(
        "--unique-id",
        metavar="ID",
        help="last part of the ops' namespace (default: the first 7 digits of the commit's tree id, with _dirty "
        "appended if tracked files changed; without a commit a hash of the files, with _uncommitted appended)",
    )
    arguments = parser.parse_args()
    try:
        build(ROOT, arguments.output.absolute(), arguments.backends, arguments.unique_id)
    except (BuildError, OSError, ValueError) as error:
        # Some of the parsers explain themselves on several lines.
        print("build_kernel: error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("build_kernel: interrupted", file=sys.stderr)
        return 1
    return 0


def build(root: Path, output: Path, backends: str | None, unique_id: str | None, quiet: bool = False) -> None:
    rust = kernels_rust()
    rust.Build.open(root)
    config = tomllib.loads((root / "build.toml").read_text(encoding="utf-8"))
    if "torch-noarch" not in config or config.get("kernel"):
        raise BuildError("build.toml: only [torch-noarch] without [kernel.*] can be built without Nix and a compiler")
    general, noarch = config["general"], config["torch-noarch"]
    package = rust.KernelName(general["name"]).python_name

    files = shipped_files(root, package, noarch.get("pyext", ["py", "pyi"]))
    check_registrations(package, files)
    if unique_id is None:
        unique_id = git_id(root) or content_id(files)
    elif not f"_{unique_id}".isidentifier():
        raise BuildError(f"--unique-id: expected letters, digits and underscores, found {unique_id!r}")
    chosen = choose_backends(general["backends"], backends)
    try:
        check_replaceable(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=".build-", dir=output.parent)
    except OSError as error:
        raise BuildError(f"--output: {output} cannot be made: {error.strerror}") from None

    with temporary as scratch:
        new = Path(scratch, "new")
        for backend in chosen:
            name = f"_{package}_{backend}_{unique_id}"
            variant = new / f"torch-{backend}"
            for path, content in {**files, "_ops.py": OPS_PY.format(name=name).encode()}.items():
                write(variant / path, content)
            write_metadata(rust, variant, name, backend, general, noarch)
        with locked(output.parent):
            if output.exists():
                output.rename(Path(scratch, "old"))
            new.rename(output)

    if quiet:
        return
    count = len(files) + len(GENERATED)
    print(f"{general['name']} v{general['version']}, id {unique_id}, {count} files for each backend:")
    for backend in chosen:
        print(f"  {os.path.relpath(output)}/torch-{backend}")


def kernels_rust():
    try:
        from kernels import _rust
    except ImportError:
        raise BuildError("building needs kernels 0.17 or newer: pip install -r requirements.txt") from None
    return _rust


def shipped_files(root: Path, package: str, extensions: list[str]) -> dict[str, bytes]:
    """Path in the package -> content. Whatever would be left behind, here or by kernel-builder, is an error."""
    link = root / "kernels_src"
    if link.is_symlink() and not link.exists():
        raise BuildError(f"kernels_src: broken link to {os.readlink(link)}")

    folder = root / "torch-ext" / package
    files = {}
    for path in sorted(folder.parent.rglob("*")):
        parts = path.relative_to(folder.parent).parts
        if any(part.startswith(".") or part == "__pycache__" for part in parts) or path.suffix == ".pyc":
            continue
        where = path.relative_to(root)
        if path.is_symlink():
            target = path.resolve()
            if not (target.is_file() and target.is_relative_to(folder.resolve())):
                raise BuildError(f"{where}: link to {os.readlink(path)}, which is broken or no file of the package")
        elif path.is_dir():
            continue
        elif not path.is_file():
            raise BuildError(f"{where}: neither a file nor a folder")
        if parts[0] != package or len(parts) == 1:
            raise BuildError(f"{where}: would not ship, only torch-ext/{package} does")
        if path.suffix[1:] not in extensions:
            raise BuildError(f"{where}: would not ship, pyext in build.toml names only {', '.join(extensions)}")
        files["/".join(parts[1:])] = path.read_bytes()
    # kernel-builder's create-pyproject leaves its own in the tree.
    for name in GENERATED:
        files.pop(name, None)

    if "__init__.py" not in files:
        raise BuildError(f"torch-ext/{package}: no __init__.py")
    if any(path.split("/")[0] in (package, f"{package}.py") for path in files):
        raise BuildError(f"torch-ext/{package}/{package}: kernel-builder allows no member with the package's own name")
    return files


def check_registrations(package: str, files: dict[str, bytes]) -> None:
    """Two builds in one process must not register the same op, so every op's name comes from the generated prefix.

    As kernel-builder checks it: the first argument of a registering decorator is a call of `add_op_namespace_prefix`.
    Beyond that, no registering function may be called with a literal name anywhere.
    """
    for path, content in files.items():
        if not path.endswith(".py"):
            continue
        where = f"torch-ext/{package}/{path}"
        try:
            tree = ast.parse(content)
        except SyntaxError as error:
            raise BuildError(f"{where}:{error.lineno}: {error.msg}") from None
        decorators = {id(item) for node in ast.walk(tree) for item in getattr(node, "decorator_list", ())}
        for call in ast.walk(tree):
            if not (isinstance(call, ast.Call) and called(call) in REGISTRATIONS and call.args):
                continue
            name = call.args[0]
            prefixed = isinstance(name, ast.Call) and called(name) == "add_op_namespace_prefix"
            literal = isinstance(name, (ast.Constant, ast.JoinedStr))
            if literal or (id(call) in decorators and not prefixed):
                raise BuildError(
                    f"{where}:{call.lineno}: {called(call)} must take its name from add_op_namespace_prefix, "
                    f"found {ast.unparse(name)}"
                )


def called(call: ast.Call) -> str | None:
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def git_id(root: Path) -> str | None:
    """First 7 digits of the tree id of HEAD and whether tracked files differ from it; None without a commit."""
    tree = git(root, "rev-parse", "--verify", "--quiet", "HEAD^{tree}")
    if not tree:
        return None
    changes = git(root, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    if changes is None:
        raise BuildError(f"git status fails in {root}, so the build cannot be named")
    return tree[:7] + ("_dirty" if changes else "")


def git(root: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails or is not installed."""
    # Inside a git hook these would point at the repository of the hook.
    hook = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
    environment = {key: value for key, value in os.environ.items() if key not in hook}
    # A checkout of another user, usual in containers: git refuses it for fear of its hooks, but this file, no less
    # theirs, is running already.
    command = ["git", "-c", "safe.directory=*", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def content_id(files: dict[str, bytes]) -> str:
    # kernel-builder draws a random number here; a hash keeps the build reproducible.
    digest = hashlib.sha256()
    for path, content in files.items():
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:7] + "_uncommitted"


def choose_backends(supported: list[str], wanted: str | None) -> list[str]:
    if wanted is None:
        return supported
    names = list(dict.fromkeys(name.strip() for name in wanted.split(",")))
    for name in names:
        if name not in supported:
            raise BuildError(f"--backends: {name!r} is none of build.toml's {', '.join(supported)}")
    return names


def check_replaceable(output: Path) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise BuildError(f"--output: {output} is no folder")
    for entry in output.iterdir():
        if not (entry.name.startswith(".") or (entry / "metadata.json").is_file()):
            raise BuildError(
                f"--output: {output} is not replaced, {entry.name} in it is no variant of a kernel; remove it "
                "(`make clean` removes build/) or give another --output"
            )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Of several builds into one folder only one at a time puts its result in place. Leaves no file behind."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_metadata(rust, variant: Path, name: str, backend: str, general: dict, noarch: dict) -> None:
    def dependencies(kind: str) -> list:
        return general.get(kind, []) + general.get(backend, {}).get(kind, [])

    archs = noarch.get({"cuda": "cuda_capabilities", "rocm": "rocm_archs"}.get(backend))
    digest = rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant)
    metadata = {
        "name": general["name"],
        "id": name,
        "version": general["version"],
        "license": general["license"],
        **{key: general[key] for key in ("upstream", "source") if key in general},
        "python-depends": dependencies("python-depends"),
        "kernel-depends": dependencies("kernel-depends"),
        "backend": {"type": backend, **({"archs": archs} if archs else {})},
        "digest": {"algorithm": str(digest.algorithm), "files": dict(sorted(digest.files.items()))},
    }
    path = variant / "metadata.json"
    write(path, (json.dumps(metadata, indent=2) + "\n").encode())
    # `kernels` has a reader but no writer: let it say that what was written is what it reads.
    rust.Metadata.read_from_file(path).digest.validate(digest)


if __name__ == "__main__":
    sys.exit(main())
