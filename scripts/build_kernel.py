#!/usr/bin/env python3
"""Build the kernel without Nix: one folder (variant) for each backend, in the layout of kernel-builder's noarch kernels.

A variant is a copy of torch-ext/<package> with three generated files:

  _ops.py            the namespace of the torch ops
  interface.json     the public names, parameters and layers (scripts/interface.py imports the variant to list them)
  metadata.json      name, version, dependencies, the digest of every file, and the commit that was built

`kernels.get_local_kernel` loads the output folder, and scripts/publish.py uploads it. The same commit gives the same bytes on
every machine.
"""

import argparse
import ast
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; `kernels` depends on it there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent

# kernel-builder's _ops.py asks torch for the backend. This one names it, so that one process can load the cpu and the cuda
# variant.
OPS_PY = '''\
import torch

_OPS_NAME = "{name}"

ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    """`op_name` in the namespace of this build."""
    return f"{{_OPS_NAME}}::{{op_name}}"
'''
GENERATED = ("_ops.py", "interface.json", "metadata.json")
# Files that kernel-builder's create-pyproject writes among the sources; they are not copied.
LEFT_BEHIND = ("_ops.py", "metadata.json")
# The oldest version of kernels that a build has run with. Newer ones compare it with their own when they load the build.
KERNELS_MINVER = "0.16.2"
# Stands in metadata's provenance for the version of kernel-builder, which has no part in this build.
BUILDER = "scripts/build_kernel.py"
# Marks a scratch folder as made by this program.
MARK = "made-by-build_kernel"

# The functions whose op names kernel-builder checks.
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
        help="folder for the variants (default: build/ in the project). An unchanged earlier build is replaced as a whole; "
        "with any other content the build stops",
    )
    parser.add_argument(
        "--backends",
        metavar="LIST",
        help="comma-separated backends to build, such as cuda,cpu (default: all backends of build.toml)",
    )
    parser.add_argument(
        "--unique-id",
        metavar="ID",
        help="last part of the namespace of the ops (default: the first 7 digits of the commit's tree id, followed by _dirty "
        "if the files differ from the commit's; without a commit, a hash of the files followed by _uncommitted)",
    )
    parser.add_argument(
        "--kernel-sha",
        metavar="COMMIT",
        help="the commit whose files these are, for metadata.json (default: the repository's, if its files are unchanged)",
    )
    arguments = parser.parse_args()
    try:
        build(ROOT, arguments.output.absolute(), arguments.backends, arguments.unique_id, arguments.kernel_sha)
    except (BuildError, OSError, ValueError) as error:
        # Some parsers raise messages of several lines.
        print("build_kernel: error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("build_kernel: interrupted", file=sys.stderr)
        return 1
    return 0


def build(
    root: Path,
    output: Path,
    backends: str | None,
    unique_id: str | None,
    kernel_sha: str | None = None,
    quiet: bool = False,
) -> None:
    rust = kernels_rust()
    rust.Build.open(root)
    config = tomllib.loads((root / "build.toml").read_text(encoding="utf-8"))
    if "torch-noarch" not in config or config.get("kernel"):
        raise BuildError(
            "build.toml: expected [torch-noarch] and no [kernel.*], since this program has no compiler; use kernel-builder"
        )
    general, noarch = config["general"], config["torch-noarch"]
    package = rust.KernelName(general["name"]).python_name

    with replacing(output, general["name"]) as new:
        files = shipped_files(root, package, noarch.get("pyext", ["py", "pyi"]))
        check_registrations(package, files)
        if unique_id is None:
            unique_id = git_id(root, package, files) or content_id(files)
            # kernels logs a warning for each layer that it loads from a build with changes. Their id says it, too.
            if kernel_sha is None and "_" not in unique_id:
                kernel_sha = git(root, "rev-parse", "HEAD")
        elif not f"_{unique_id}".isidentifier():
            raise BuildError(f"--unique-id: expected letters, digits and underscores, found {unique_id!r}")
        variants = {backend: new / f"torch-{backend}" for backend in choose_backends(general["backends"], backends)}
        names = {backend: f"_{package}_{backend}_{unique_id}" for backend in variants}
        for backend, variant in variants.items():
            for path, content in {**files, "_ops.py": OPS_PY.format(name=names[backend]).encode()}.items():
                write(variant / path, content)
        interface = find_interface(next(iter(variants.values())), general)
        provenance = {"kernel-builder": {"version": BUILDER}}
        if kernel_sha is not None:
            provenance["kernel"] = {"commit": kernel_sha, "dirty": False}
        for backend, variant in variants.items():
            write(variant / "interface.json", interface)
            write_metadata(rust, variant, names[backend], backend, general, noarch, provenance)

    if quiet:
        return
    count = len(files) + len(GENERATED)
    print(f"{general['name']} v{general['version']}, id {unique_id}, {count} files for each backend:")
    for backend in variants:
        print(f"  {os.path.relpath(output)}/torch-{backend}")


def kernels_rust():
    try:
        from kernels import _rust
    except ImportError:
        raise BuildError("building needs kernels 0.17 or newer: pip install -r requirements.txt") from None
    return _rust


def shipped_files(root: Path, package: str, extensions: list[str]) -> dict[str, bytes]:
    """Path in the package -> content.

    Raises:
        BuildError: a file below torch-ext would not be part of the build, or kernel-builder would refuse it.
    """
    link = root / "kernels_src"
    if link.is_symlink() and not link.exists():
        raise BuildError(f"kernels_src: expected a link to a folder, found a broken link to {os.readlink(link)}")

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
                raise BuildError(f"{where}: expected a file of the package, found a link to {os.readlink(path)}")
        elif path.is_dir():
            continue
        elif not path.is_file():
            raise BuildError(f"{where}: expected a file or a folder, found neither")
        if parts[0] != package or len(parts) == 1:
            raise BuildError(f"{where}: expected a path in torch-ext/{package}; other files are not part of a build")
        if path.suffix[1:] not in extensions:
            raise BuildError(
                f"{where}: expected an extension of pyext in build.toml ({', '.join(extensions)}), found {path.suffix!r}"
            )
        files["/".join(parts[1:])] = path.read_bytes()
    for name in LEFT_BEHIND:
        files.pop(name, None)

    if "__init__.py" not in files:
        raise BuildError(f"torch-ext/{package}: expected an __init__.py, found none")
    if "interface.json" in files:
        raise BuildError(f"torch-ext/{package}/interface.json: the build writes a file of this name")
    if any(path.split("/")[0] in (package, f"{package}.py") for path in files):
        raise BuildError(f"torch-ext/{package}/{package}: kernel-builder allows no member with the package's own name")
    return files


def check_registrations(package: str, files: dict[str, bytes]) -> None:
    """Checks that every op is registered in the generated namespace, so that one process can load two builds.

    Like kernel-builder: the first argument of a registering decorator must be a call of `add_op_namespace_prefix`. In
    addition, no registering function may be called with a literal name.
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
                    f"{where}:{call.lineno}: {called(call)}: expected a name from add_op_namespace_prefix, found "
                    f"{ast.unparse(name)}"
                )


def called(call: ast.Call) -> str | None:
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def git_id(root: Path, package: str, files: dict[str, bytes]) -> str | None:
    """First 7 digits of HEAD's tree id, followed by _dirty if the work tree differs from it; None without a commit.

    Contents are compared as well, because `git status` misses converted line ends, ignored files and files marked as
    unchanged.
    """
    if not is_repository(root):
        return None
    tree = git(root, "rev-parse", "--verify", "--quiet", "HEAD^{tree}")
    if not tree:
        return None
    return tree[:7] + "_dirty" * is_dirty(root, tree, package, files)


def is_dirty(root: Path, tree: str, package: str, files: dict[str, bytes]) -> bool:
    """Whether the work tree differs from a tree or commit."""
    changes = git(root, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    if changes is None:
        raise BuildError(f"{root}: git status fails, so the build's id is unknown; --unique-id sets one")
    held = {path: content for _, path, content in committed(root, tree, f"torch-ext/{package}", "build.toml")}
    same = all(f"torch-ext/{package}/{path}" in held for path in files) and all(
        holds(root / path, content) for path, content in held.items()
    )
    return bool(changes) or not same


def is_repository(root: Path) -> bool:
    """Whether the project is a git repository of its own, rather than a folder inside another one."""
    return git(root, "rev-parse", "--show-cdup") == ""


def holds(path: Path, content: bytes) -> bool:
    if path.is_symlink():
        return os.fsencode(os.readlink(path)) == content
    return path.is_file() and path.read_bytes() == content


def committed(root: Path, tree: str, *paths: str) -> Iterator[tuple[str, str, bytes]]:
    """(mode, path, content) of the files of a commit or tree below `paths`, as git stores them."""
    listing = git(root, "ls-tree", "-r", "-z", "--full-tree", tree, "--", *paths)
    if listing is None:
        raise BuildError(f"{root}: git ls-tree fails, so the files of {tree} are unknown")
    entries = [entry.partition("\t") for entry in listing.split("\0") if entry]
    # Submodules have no content here.
    entries = [(*what.split(), path) for what, _, path in entries if what.split()[1] == "blob"]
    wanted = "".join(f"{oid}\n" for _, _, oid, _ in entries).encode()
    done = subprocess.run(
        git_command("cat-file", "--batch"), cwd=root, env=git_environment(), input=wanted, capture_output=True
    )
    answers = io.BytesIO(done.stdout)
    for mode, _, oid, path in entries:
        header = answers.readline()
        if header.split()[:2] != [oid.encode(), b"blob"]:
            reason = (done.stderr or header).decode(errors="replace").strip()
            raise BuildError(f"{root}: git cannot read {path} of {tree}: {reason}")
        yield mode, path, answers.read(int(header.split()[2]))
        answers.readline()


def git_command(*arguments: str) -> list[str]:
    # In containers the checkout often belongs to another user, and git then refuses to run. Its hooks are no added risk:
    # this file comes from the same checkout. With replacement refs an id could stand for other content.
    return ["git", "-c", "safe.directory=*", "--no-optional-locks", "--no-replace-objects", *arguments]


def git_environment() -> dict[str, str]:
    # Set inside a git hook, to the hook's repository.
    hook = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
    return {key: value for key, value in os.environ.items() if key not in hook}


def git(root: Path, *arguments: str) -> str | None:
    """The output of a git command; None if it fails or git is not installed."""
    try:
        done = subprocess.run(git_command(*arguments), cwd=root, env=git_environment(), capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def content_id(files: dict[str, bytes]) -> str:
    # kernel-builder uses a random number here. A hash keeps the build reproducible.
    digest = hashlib.sha256()
    for path, content in files.items():
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:7] + "_uncommitted"


def choose_backends(supported: list[str], wanted: str | None) -> list[str]:
    if not supported:
        raise BuildError("build.toml: backends: expected at least one backend, found none")
    if wanted is None:
        return supported
    names = list(dict.fromkeys(name.strip() for name in wanted.split(",")))
    for name in names:
        if name not in supported:
            raise BuildError(f"--backends: expected backends of build.toml ({', '.join(supported)}), found {name!r}")
    return names


# Putting a build in place


@contextlib.contextmanager
def replacing(output: Path, name: str) -> Iterator[Path]:
    """A folder to build in, which replaces `output` atomically if the block succeeds.

    `output` may be an earlier build of the kernel `name`. At every moment it is the earlier build or the new one. A killed
    run leaves a marked folder beside it, which the next run removes.
    """
    output = output.resolve()
    scratch = output.with_name(f".build-{output.name}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"--output: {output} cannot be made: {error.strerror}") from None
    with locked(output.parent):
        recover(scratch, output)
        check_replaceable(output, name)
        try:
            try:
                scratch.mkdir()
            except OSError as error:
                raise BuildError(f"--output: {output} cannot be made: {error.strerror}") from None
            write(scratch / MARK, b"Left by a build that was killed. The next one removes this folder.\n")
            yield scratch / "new"
            # Files may have been added to it during the build.
            check_replaceable(output, name)
            put_in_place(scratch / "new", output, scratch / "old")
        finally:
            recover(scratch, output)


def put_in_place(new: Path, output: Path, old: Path) -> None:
    if not output.exists():
        new.rename(output)
    elif not exchange(new, output):
        # If the program ends between these two lines, `recover` restores the old build.
        output.rename(old)
        new.rename(output)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges two folders atomically; False if the system or the file system does not support it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_cwd, rename_exchange = -100, 2
    if renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def recover(scratch: Path, output: Path) -> None:
    """Removes the scratch folder of an earlier run, after restoring `output` from it if needed."""
    if not os.path.lexists(scratch):
        return
    if scratch.is_symlink() or not scratch.is_dir() or (any(scratch.iterdir()) and not (scratch / MARK).is_file()):
        raise BuildError(f"{scratch} is in the way and was not made by a build; move it, or give another --output")
    if (scratch / "old").exists() and not output.exists():
        (scratch / "old").rename(output)
    for folder in (scratch / "new", scratch / "old"):
        if folder.exists():
            shutil.rmtree(folder)
    # The mark goes last: if this run is killed before, the next one still recognises the folder.
    (scratch / MARK).unlink(missing_ok=True)
    scratch.rmdir()


def check_replaceable(output: Path, name: str) -> None:
    """Raises BuildError unless `output` holds only unmodified variants of the kernel `name`, which can be built again."""
    if not output.exists():
        return
    if not output.is_dir():
        raise BuildError(f"--output: expected a folder, found the file {output}")
    for entry in sorted(output.iterdir()):
        for found in foreign(entry, name):
            raise BuildError(
                f"--output: {output} is not replaced: expected only unmodified builds of {name}, found "
                f"{found.relative_to(output)}; move or remove it (`make clean` removes build/), or give another --output"
            )


def foreign(variant: Path, name: str) -> Iterator[Path]:
    """Paths in a folder that differ from a build of `name`, by the digest in metadata.json. Bytecode is ignored."""
    rust = kernels_rust()
    try:
        metadata = rust.Metadata.read_from_file(variant / "metadata.json")
    except (OSError, ValueError):
        metadata = None
    if variant.is_symlink() or metadata is None or metadata.digest is None or str(metadata.name) != name:
        yield variant
        return
    listed = metadata.digest.files
    folders = {str(parent) for path in listed for parent in Path(path).parents}
    for folder, subfolders, files in os.walk(variant):
        for each in (Path(folder, each) for each in sorted(subfolders + files)):
            path = each.relative_to(variant).as_posix()
            if each.is_dir():
                known = path in folders or each.name == "__pycache__"
            else:
                is_bytecode = each.suffix == ".pyc" and each.parent.name == "__pycache__"
                known = each.is_file() and (path in listed or path == "metadata.json" or is_bytecode)
            if not known or each.is_symlink():
                yield each
    now = rust.Digest.hash_variant(metadata.digest.algorithm, variant).files
    yield from (variant / path for path, hashed in listed.items() if now.get(path, hashed) != hashed)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes builds into one folder run one after the other. Leaves no lock file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# What a build writes


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def find_interface(variant: Path, general: dict) -> bytes:
    """Content of interface.json, from build.toml and the imported variant; the same in every variant."""
    file = variant / "interface.json"
    command = [sys.executable, Path(__file__).with_name("interface.py"), variant, ",".join(general["backends"]), file]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(
            f"the package does not import: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    interface = {"backends": promised_backends(general), **json.loads(file.read_bytes())}
    return (json.dumps(interface, indent=1, sort_keys=True) + "\n").encode()


def promised_backends(general: dict) -> dict:
    """Backend -> its python-depends and kernel-depends."""
    kinds = ("python-depends", "kernel-depends")
    return {backend: {kind: dependencies(general, backend, kind) for kind in kinds} for backend in general["backends"]}


def dependencies(general: dict, backend: str, kind: str) -> list:
    return general.get(kind, []) + general.get(backend, {}).get(kind, [])


def write_metadata(rust, variant: Path, name: str, backend: str, general: dict, noarch: dict, provenance: dict) -> None:
    archs = noarch.get({"cuda": "cuda_capabilities", "rocm": "rocm_archs"}.get(backend))
    digest = rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant)
    metadata = {
        "name": general["name"],
        "id": name,
        "version": general["version"],
        "kernels-minver": KERNELS_MINVER,
        "license": general["license"],
        **{key: general[key] for key in ("upstream", "source") if key in general},
        "python-depends": dependencies(general, backend, "python-depends"),
        "kernel-depends": dependencies(general, backend, "kernel-depends"),
        "backend": {"type": backend, **({"archs": archs} if archs else {})},
        "digest": {"algorithm": str(digest.algorithm), "files": dict(sorted(digest.files.items()))},
        "provenance": provenance,
    }
    path = variant / "metadata.json"
    write(path, (json.dumps(metadata, indent=2) + "\n").encode())
    # `kernels` has a reader but no writer: check that it reads the same digest.
    rust.Metadata.read_from_file(path).digest.validate(digest)


if __name__ == "__main__":
    sys.exit(main())
