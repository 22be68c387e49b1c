#!/usr/bin/env python3
"""Check the files of a built or downloaded kernel before it is loaded. No code of the kernel runs.

    python scripts/verify.py                              the variants in build/
    python scripts/verify.py ORG/NAME                     everything that the local cache holds of a repository
    python scripts/verify.py --lockfile kernels.lock      the cached commits that a lockfile names
    python scripts/verify.py DIR                          a variant, a build, a snapshot or a whole cache

`kernels` checks no digest when it loads a kernel. This program reports each file, folder, link and branch that differs or
does not belong, and bytecode, which Python runs in place of the source. (Python writes bytecode when it loads a kernel:
delete it.)

A build is compared with its own digests, a cache with the listings stored in it; a file that was changed together with its
digest or listing is not found, nor is a branch that was moved to another listed commit. --lockfile also checks which commit
a version is. --online compares with the Hub, and is the only check that finds a commit changed together with its listing.

Exit status: 0 if everything was checked and is right; 1 otherwise.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Optional

# PYTHONSAFEPATH leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from command import CommandError, exit_status, hub_client, is_commit, is_repo_id, one_line, requirements

with requirements():
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.hf_api import RepoFile, RepoFolder
    from kernels import _rust

ROOT = Path(__file__).resolve().parent.parent
BYTECODE = "bytecode, which Python runs in place of the source: delete it and verify again"

# What a finding was compared with.
DIGESTS = "the digests beside the files only: a file that was changed together with its digest is not found"
CACHE = (
    "the listings and branches in the cache only: a file that was changed together with its listing, and a branch that "
    "was moved to another listed commit, are not found (--online compares with the Hub, --lockfile with the locked commits)"
)
LOCKED = (
    "the lockfile and the listings in the cache: a commit that was changed together with its listing is not found "
    "(--online compares with the Hub)"
)
ONLINE = "the Hub's listings and branches"
LOCKED_ONLINE = "the lockfile and the Hub's listings"


@dataclass
class Finding:
    """The result for one subject. The check fails if there are `violations` or if `unchecked` gives a reason."""

    subject: str
    summary: str = ""
    against: str = ""
    violations: list[str] = field(default_factory=list)
    unchecked: str = ""
    notes: list[str] = field(default_factory=list)


# Files


def files_below(
    folder: Path, finding: Finding, expected: Optional[dict] = None, blobs: Sequence[Path] = ()
) -> set[str]:
    """The paths of the regular files below `folder`. Everything else becomes a violation of `finding`.

    Args:
        expected: the paths of all files that belong there; None: every regular file except bytecode.
        blobs: the folders that links may point into.
    """
    found = set()
    folders = None if expected is None else {str(parent) for path in expected for parent in PurePosixPath(path).parents}

    def stop(error):
        raise error

    for where, below, names in os.walk(folder, onerror=stop):
        for name in sorted(below + names):
            path = Path(where, name)
            shown = path.relative_to(folder).as_posix()
            is_folder = name in below
            is_known = expected is None or shown in (folders if is_folder else expected)
            violation = None
            if path.is_symlink() and not _leads_to_file(path, blobs):
                violation = f"a link to {os.readlink(path)}"
            elif not is_folder and not path.is_file():
                violation = "no regular file"
            elif not is_known or expected is None:
                if name == "__pycache__" or name.endswith((".pyc", ".pyo")):
                    violation = BYTECODE
                elif not is_known:
                    violation = "not in this commit"
            if violation is not None:
                finding.violations.append(f"{shown}: {violation}")
                if is_folder:
                    below.remove(name)
            elif not is_folder:
                found.add(shown)
    return found


def _leads_to_file(link: Path, folders: Sequence[Path]) -> bool:
    """Whether a link points to a regular file inside one of `folders`."""
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):
        return False
    return target.is_file() and any(folder in target.parents for folder in folders)


def check_variant(variant: Path) -> Finding:
    """Compares a built variant with the digest in its metadata.json. Links and bytecode are violations."""
    finding = Finding(str(variant), against=DIGESTS)
    if variant.is_symlink():
        finding.violations.append(f"a link to {os.readlink(variant)}")
    else:
        files_below(variant, finding)
        check_digest(variant, finding)
    return finding


def check_digest(variant: Path, finding: Finding) -> None:
    """Compares a variant's files with the digest in its metadata.json.

    The digest covers neither bytecode nor metadata.json nor linked folders.
    """
    if not all(path.is_file() for path in variant.rglob("*") if not path.is_dir()):
        # Reading a pipe would block. `files_below` has reported it.
        finding.unchecked = "expected files only"
        return
    try:
        metadata = _rust.Metadata.read_from_file(variant / "metadata.json")
    except (OSError, ValueError) as error:
        finding.violations.append(one_line(error))
        return
    finding.summary = f"v{metadata.version}, id {metadata.id}"
    finding.summary += "".join(f", loads {kernel.repo_id} too" for kernel in metadata.kernel_depends)
    if metadata.digest is None:
        finding.violations.append("metadata.json holds no digest")
        return
    finding.summary += f", {metadata.digest.algorithm} of {len(metadata.digest.files)} files"
    try:
        metadata.digest.validate(_rust.Digest.hash_variant(metadata.digest.algorithm, variant))
    except _rust.DigestValidationError as error:
        finding.violations += [str(violation) for violation in error.violations]
    except (OSError, RuntimeError) as error:
        finding.violations.append(one_line(error))


def variants_below(folder: Path) -> list[Path]:
    """The variants in a variant, a build or a folder of builds."""
    found = {path.parent for path in folder.rglob("metadata.json")}
    # Folders without metadata.json are included: they are damaged variants.
    found |= {path for path in folder.rglob("*") if path.parent.name == "build" and path.is_dir()}
    found |= {path for path in folder.glob("*") if folder.name == "build" and path.is_dir()}
    return sorted(found)


# Listings of a commit


def cached_listing(repository: Path, commit: str) -> Optional[dict[str, RepoFile]]:
    """The listing of a commit that `huggingface_hub` stored with the download; None without one."""
    path = repository / "trees" / f"{commit}.json"
    try:
        if os.path.lexists(path) and (
            path.resolve() != repository.resolve() / "trees" / path.name or not path.is_file()
        ):
            raise ValueError("expected a regular file")
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format_version"] != 1:
            raise ValueError(f"format_version: expected 1, found {data['format_version']!r}")
        files = {}
        for name, entry in data["files"].items():
            sha256, size = entry.get("lfs_sha256"), entry.get("lfs_size")
            lfs = None if sha256 is None else {"oid": sha256, "size": size, "pointerSize": 0}
            xet_hash = entry.get("xet_hash")
            files[name] = RepoFile(path=name, size=entry["size"], oid=entry["blob_id"], lfs=lfs, xetHash=xet_hash)
        return files
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CommandError(f"trees/{path.name}: no listing: {type(error).__name__}: {one_line(error)}") from None


def hub_listing(hub: HfApi, repo_id: str, commit: str) -> dict[str, RepoFile]:
    """The Hub's listing of a commit. Raises CommandError unless the git ids of its folders show that it is complete."""
    entries = list(hub.list_repo_tree(repo_id, repo_type="kernel", revision=commit, recursive=True))
    for entry in entries:
        if not isinstance(entry.path, str):
            raise CommandError(f"{hub.endpoint}: expected paths in the listing, found {entry.path!r}")
    torn = incomplete_folders(entries)
    if torn:
        raise CommandError(
            f"{hub.endpoint}: the listing of {', '.join(torn)} is incomplete or has executable files: its id differs"
        )
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def incomplete_folders(entries: Iterable) -> list[str]:
    """The folders whose git id differs from that of the listed entries, all taken for files that are not executable."""
    inside, ids = defaultdict(dict), {}
    for entry in entries:
        parent, _, name = entry.path.rpartition("/")
        is_folder = isinstance(entry, RepoFolder)
        if is_folder:
            ids[entry.path] = entry.tree_id
        mode, oid = (b"40000", entry.tree_id) if is_folder else (b"100644", entry.blob_id)
        # git sorts folders as if their names ended with a slash.
        raw = bytes.fromhex(oid) if is_commit(oid) else b""
        inside[parent][name.encode() + b"/" * is_folder] = b"%s %s\0%s" % (mode, name.encode(), raw)
    inside.pop("", None)  # The id of the top folder is not listed.
    contents = {path: b"".join(inside[path][name] for name in sorted(inside[path])) for path in {*ids, *inside}}
    return sorted(path for path, content in contents.items() if git_id(b"tree", content) != ids.get(path))


def same_content(content: bytes, file: RepoFile) -> bool:
    """Whether the listing's id of a file is that of `content`."""
    if file.lfs is not None:
        return hashlib.sha256(content).hexdigest() == file.lfs.sha256
    return git_id(b"blob", content) == file.blob_id


def git_id(kind: bytes, content: bytes) -> str:
    """The git id of an object."""
    return hashlib.sha1(b"%s %d\0" % (kind, len(content)) + content).hexdigest()


def record(file: RepoFile) -> tuple:
    """The fields in which two listings of a file must agree."""
    return file.size, file.blob_id, file.lfs and file.lfs.sha256, file.xet_hash


# Cached repositories


def cache_folder() -> Path:
    """The download cache of `kernels`."""
    folder = os.environ.get("KERNELS_CACHE")
    if folder == "":
        raise CommandError(
            "KERNELS_CACHE: expected a folder, found an empty text, for which `kernels` takes the current folder"
        )
    return Path(folder or constants.HF_HUB_CACHE).expanduser()


def repository_folder(cache: Path, repo_id: str) -> Path:
    return cache / f"kernels--{repo_id.replace('/', '--')}"


def blob_folders(cache: Path, repo_id: str) -> tuple[Path, Path]:
    """The folders with contents of cached files: the repository's own, and the one that repositories share."""
    return repository_folder(cache.resolve(), repo_id) / "blobs", cache.resolve() / "blobs"


def check_snapshot(
    cache: Path, repo_id: str, commit: str, hub: Optional[HfApi], against: Optional[str] = None
) -> list[Finding]:
    """One finding for the files of a commit in the cache, and one for each of its variants.

    With `hub` the files are compared with the Hub's listing, otherwise with the listing that `huggingface_hub` stored.
    """
    repository = repository_folder(cache, repo_id)
    folder = repository / "snapshots" / commit
    finding = Finding(f"{repo_id}@{commit}", against=against or (ONLINE if hub else CACHE))
    if not os.path.lexists(folder):
        finding.violations.append(f"not in {cache}")
        return [finding]
    if folder.resolve() != repository_folder(cache.resolve(), repo_id) / "snapshots" / commit:
        finding.violations.append(f"expected a folder in the cache, found {folder.resolve()} behind a link")
        return [finding]
    listing = None
    try:
        listing = cached_listing(repository, commit)
    except CommandError as error:
        finding.violations.append(str(error))
    if hub is not None:
        try:
            ours, listing = listing, hub_listing(hub, repo_id, commit)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            finding.violations.append(f"{hub.endpoint} has no such commit")
            return [finding]
        if ours is not None and {p: record(f) for p, f in ours.items()} != {p: record(f) for p, f in listing.items()}:
            finding.violations.append(f"trees/{commit}.json: not the listing of the Hub")
    found = files_below(folder, finding, listing, blob_folders(cache, repo_id))
    variants = defaultdict(set)
    for path in found:
        if path.startswith("build/") and path.count("/") > 1:
            variants[variant_of(path)].add(path)
    # `has_kernel` and `kernels lock` download nothing else of a variant.
    asked_for = {name for name, paths in variants.items() if paths == {f"{name}/metadata.json"}}
    if listing is None:
        if not finding.violations:
            finding.unchecked = "no listing of this commit in the cache; --online compares with the Hub's"
    else:
        finding.violations += [
            f"{path}: not the content of this commit"
            for path in sorted(found)
            if not same_content((folder / path).read_bytes(), listing[path])
        ]
        absent = sorted(listing.keys() - found)
        torn = [path for path in absent if variant_of(path) in variants.keys() - asked_for]
        finding.violations += [f"{path}: missing" for path in torn]
        if absent and not torn:
            finding.notes.append(
                f"{len(absent)} files are not here: the kernel loads online, not offline (scripts/vendor.py downloads all files)"
            )
        finding.summary = f"{len(found)} files"
    if not variants.keys() - asked_for and not finding.violations:
        finding.unchecked = "no variant is here, or only its metadata.json"
    findings = [finding]
    for name in sorted(variants):
        findings.append(Finding(f"{repo_id}@{commit[:7]}/{name}", against=finding.against))
        if name in asked_for:
            findings[-1].notes.append("only metadata.json is here, as after has_kernel")
        else:
            check_digest(folder / name, findings[-1])
    return findings


def variant_of(path: str) -> str:
    """build/NAME"""
    return "/".join(path.split("/")[:2])


def check_blobs(cache: Path, repo_id: str) -> Finding:
    """Compares stored contents with the ids that name them. Later downloads reuse these contents."""
    folder = repository_folder(cache, repo_id) / "blobs"
    finding = Finding(f"{repo_id} blobs")
    if not folder.is_dir():
        return finding
    found = files_below(folder, finding, blobs=blob_folders(cache, repo_id)[1:])
    # Interrupted downloads have other names, and nothing reads them.
    ids = sorted(name for name in found if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", name))
    for name in ids:
        content = (folder / name).read_bytes()
        if name != (git_id(b"blob", content) if len(name) == 40 else hashlib.sha256(content).hexdigest()):
            finding.violations.append(f"{name}: not the content of this id")
    finding.summary = f"{len(ids)} files"
    return finding


class Ref(NamedTuple):
    """A file of the cache that names the commit of a branch."""

    path: Path
    name: str
    version: Optional[int]  # the version that `kernels` reads from the name
    content: str


def cached_refs(cache: Path, repo_id: str, finding: Finding) -> Iterator[Ref]:
    # `kernels` also reads the second folder, where older versions of huggingface_hub stored kernels, and prefers it.
    for repository in (repository_folder(cache, repo_id), cache / f"models--{repo_id.replace('/', '--')}"):
        folder = repository / "refs"
        if not folder.is_dir():
            continue
        for name in sorted(files_below(folder, finding)):
            try:
                version = int(name[1:]) if name.startswith("v") and "/" not in name else None
            except ValueError:
                version = None
            if version is not None or repository.name.startswith("kernels--"):
                content = (folder / name).read_text(encoding="utf-8", errors="replace").strip()
                yield Ref(folder / name, name, version, content)


def check_refs(
    cache: Path, repo_id: str, branches: Optional[dict[str, str]], locked: Optional[dict[str, str]]
) -> list[Finding]:
    """Checks that each branch is a commit that is here, and is that of the Hub or of the lockfile if given."""
    stray = Finding(f"{repo_id} refs")
    refs = list(cached_refs(cache, repo_id, stray))
    findings = [stray] if stray.violations else []
    for ref in refs:
        if locked is not None and f"v{ref.version}" not in locked:
            continue
        finding = Finding(f"{repo_id} {ref.path.relative_to(cache)}", f"is {ref.content}")
        findings.append(finding)
        others = {each.content for each in refs if each.version == ref.version is not None}
        if not is_commit(ref.content):
            finding.violations.append(f"expected a commit, found {ref.content!r}")
        elif not (repository_folder(cache, repo_id) / "snapshots" / ref.content).is_dir():
            finding.violations.append("that commit is not here")
        if ref.version is not None and ref.name != f"v{ref.version}":
            finding.violations.append(f"`kernels` takes it for version {ref.version}")
        elif len(others) > 1:
            finding.violations.append(f"not the only one that `kernels` takes for version {ref.version}")
        branch = re.sub("^refs/(heads|tags)/", "", ref.name)
        if branches is not None and branches.get(branch) != ref.content:
            finding.violations.append(
                f"is {branches.get(branch, 'no branch')} at the Hub (scripts/vendor.py downloads it)"
            )
        if locked is not None and locked[f"v{ref.version}"] != ref.content:
            finding.violations.append(
                f"is locked to {locked[f'v{ref.version}']}: offline, get_kernel would load another commit"
            )
    return findings


def hub_branches(hub: HfApi, repo_id: str) -> dict[str, str]:
    """Branch or tag -> commit."""
    refs = hub.list_repo_refs(repo_id, repo_type="kernel")
    return {ref.name: ref.target_commit for ref in (*refs.tags, *refs.branches)}


def check_repository(cache: Path, repo_id: str, hub: Optional[HfApi]) -> list[Finding]:
    """Findings for all cached commits of a repository, its stored contents and its branches."""
    folder = repository_folder(cache, repo_id) / "snapshots"
    snapshots = sorted(path.name for path in folder.glob("*"))
    if not snapshots:
        beside = f"; to check the folder, give ./{repo_id}" if Path(repo_id).is_dir() else ""
        raise CommandError(f"{repo_id}: expected a repository in the cache {cache}, found none{beside}")
    findings = []
    for commit in snapshots:
        if is_commit(commit):
            findings += check_snapshot(cache, repo_id, commit, hub)
        else:
            findings.append(Finding(f"{repo_id}@{commit}", violations=["snapshots: expected the id of a commit"]))
    findings.append(check_blobs(cache, repo_id))
    return findings + check_refs(cache, repo_id, hub and hub_branches(hub, repo_id), None)


def check_locked(cache: Path, locks: list["Lock"], hub: Optional[HfApi]) -> list[Finding]:
    """Findings for the commits of a lockfile, their stored contents, and the branches that were locked."""
    findings = []
    for lock in locks:
        findings += check_snapshot(cache, lock.repo_id, lock.commit, hub, LOCKED_ONLINE if hub else LOCKED)
    for repo_id in dict.fromkeys(lock.repo_id for lock in locks):
        versions = {lock.branch: lock.commit for lock in locks if lock.repo_id == repo_id and lock.branch}
        findings += [check_blobs(cache, repo_id), *check_refs(cache, repo_id, None, versions)]
    return findings


# Lockfiles


class Lock(NamedTuple):
    """The entry of a lockfile for one version of a repository."""

    repo_id: str
    commit: str
    branch: Optional[str]  # None: a revision was locked instead of a version


def read_locks(path: Path, wanted: Sequence[str] = ()) -> list[Lock]:
    """All locks of a lockfile, or those of the repositories `wanted`. A repository may have several versions."""
    try:
        kernels = _rust.KernelLocks.from_json(path.read_text(encoding="utf-8")).items()
    except OSError as error:
        raise CommandError(f"--lockfile: {path}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"--lockfile: {path}: {one_line(error)}") from None
    locks = [
        Lock(
            kernel.repo_id, lock.commit, f"v{number}" if (number := getattr(kernel.version, "version", None)) else None
        )
        for kernel, lock in kernels
    ]
    if not locks:
        raise CommandError(f"--lockfile: {path}: expected locked kernels, found none")
    for lock in locks:
        if not is_repo_id(lock.repo_id):
            raise CommandError(f"--lockfile: {path}: expected a repository such as ORG/NAME, found {lock.repo_id!r}")
    there = list(dict.fromkeys(lock.repo_id for lock in locks))
    for repo_id in wanted:
        if repo_id not in there:
            raise CommandError(f"--lockfile: {path}: expected a lock of {repo_id}, found {', '.join(there)}")
    return [lock for lock in locks if lock.repo_id in (wanted or there)]


def read_lockfile(path: Path, wanted: Sequence[str] = ()) -> dict[str, tuple[str, Optional[str]]]:
    """Repository -> commit and branch that `get_locked_kernel` loads, which is the first of several versions."""
    return {lock.repo_id: (lock.commit, lock.branch) for lock in reversed(read_locks(path, wanted))}


# The command


def check(what: list[str], cache: Path, lockfile: Optional[Path], hub: Optional[HfApi]) -> list[Finding]:
    if lockfile is not None:
        return check_locked(cache, read_locks(lockfile, what), hub)
    if not what and not (ROOT / "build").is_dir():
        raise CommandError(f"expected a build in {ROOT}, found none; run `make build`")
    findings = []
    for each in what or [str(ROOT / "build")]:
        # ORG/NAME is always a repository, even if the current folder has a folder of this name.
        if is_repo_id(each):
            findings += check_repository(cache, each, hub)
        elif each and Path(each).is_dir():
            if hub is not None:
                raise CommandError(f"--online: expected a repository such as ORG/NAME, found the folder {each}")
            findings += check_folder(Path(each))
        else:
            raise CommandError(f"expected a folder or a repository such as ORG/NAME, found {each!r}")
    return findings


def check_folder(folder: Path) -> list[Finding]:
    """Findings for a folder: a variant, a build, a cache, or a part of a cache."""
    place = folder.absolute()
    for each in (place, *place.parents):
        if each.name.startswith("kernels--"):
            repo_id = each.name[len("kernels--") :].replace("--", "/", 1)
            inside = place.relative_to(each).parts
            if inside[:1] == ("snapshots",) and len(inside) > 1:
                return check_snapshot(each.parent, repo_id, inside[1], None)
            return check_repository(each.parent, repo_id, None)
    repositories = sorted(folder.glob("kernels--*"))
    if repositories:
        return [finding for each in repositories for finding in check_folder(each)]
    variants = variants_below(folder)
    if not variants:
        raise CommandError(f"{folder}: expected variants of a kernel, found no metadata.json")
    return [check_variant(each) for each in variants]


def report(findings: list[Finding]) -> int:
    """Prints the findings. Returns the exit status."""
    for finding in findings:
        label = "BAD" if finding.violations else "not checked:" if finding.unchecked else "ok "
        show(label, finding.subject, f"({finding.summary})" if finding.summary else "")
        for violation in finding.violations:
            show("     ", violation)
        if finding.unchecked:
            show("     ", f"not checked: {finding.unchecked}")
        for note in finding.notes:
            show("      note:", note)
    for against in sorted({finding.against for finding in findings} - {""}):
        show(f"Compared with {against}.")
    bad = sum(bool(finding.violations) for finding in findings)
    unchecked = sum(bool(finding.unchecked and not finding.violations) for finding in findings)
    for count, text in ((bad, "have violations"), (unchecked, "could not be checked")):
        if count:
            print(f"verify: {count} of {len(findings)} {text}", file=sys.stderr)
    return 1 if bad or unchecked else 0


def show(*words: str) -> None:
    """Prints one line. Unprintable characters are escaped: file names are untrusted and may hold line breaks."""
    text = " ".join(words).rstrip()
    print(
        "".join(
            each if each.isprintable() else each.encode("unicode_escape", "backslashreplace").decode() for each in text
        )
    )


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="folders, or repositories ORG/NAME in the cache (default: build/)")
    parser.add_argument(
        "--lockfile", type=Path, metavar="FILE", help="check exactly the commits that `kernels lock` wrote to FILE"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="cache to check (default: KERNELS_CACHE, or else the cache of huggingface_hub)",
    )
    parser.add_argument(
        "--online", action="store_true", help="compare with the listings of the Hub instead of those in the cache"
    )
    options = parser.parse_args(arguments)

    def command():
        hub = hub_client() if options.online else None
        return report(check(options.what, options.cache or cache_folder(), options.lockfile, hub))

    return exit_status("verify", command)


if __name__ == "__main__":
    sys.exit(main())
