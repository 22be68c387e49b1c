#!/usr/bin/env python3
"""Check built, vendored or cached variants of a kernel against the digests in their metadata.json.

Nothing of a kernel is imported. `kernels` itself does not look at digests when it loads a kernel. A digest that lies
beside the files shows accidents: a broken disk, an edited file, half a copy. Whoever changes a file on purpose can
change its digest too; against that, --online compares every file with the Hub's listing of the commit.

    python scripts/verify.py                              the variants in build/
    python scripts/verify.py ORG/NAME                     all that the local cache holds of a repository
    python scripts/verify.py --lockfile kernels.lock      the cached commits that a lockfile names
    python scripts/verify.py DIR                          a variant, a build, a snapshot or a whole cache
"""

import argparse
import contextlib
import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from command import CommandError, exit_status, is_repo_id, one_line, requirements

with requirements():
    from huggingface_hub import HfApi, constants, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.hf_api import RepoFile
    from kernels import _rust

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Finding:
    """What was found about one folder: `violations` fail the check, `notes` do not."""

    subject: str
    summary: str = ""
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


# Variants


def check_variant(variant: Path) -> Finding:
    """Compares a variant's files with the digest in its metadata.json.

    What the digest does not see is looked for too: folders behind links are violations. Bytecode is a note, for Python
    itself leaves it wherever a kernel was loaded from, and so is a variant in a cache that was only asked for.
    """
    finding = Finding(str(variant))
    try:
        metadata = _rust.Metadata.read_from_file(variant / "metadata.json")
    except (OSError, ValueError) as error:
        finding.violations.append(one_line(error))
        return finding
    finding.summary = f"v{metadata.version}, id {metadata.id}"
    if metadata.digest is None:
        finding.violations.append("metadata.json holds no digest")
        return finding
    is_cached = variant.absolute().match("snapshots/*/build/*")
    if is_cached and [path.name for path in variant.iterdir()] == ["metadata.json"]:
        finding.notes.append("only metadata.json is here, as has_kernel leaves it")
        return finding
    finding.summary += f", {metadata.digest.algorithm} of {len(metadata.digest.files)} files"
    try:
        metadata.digest.validate(_rust.Digest.hash_variant(metadata.digest.algorithm, variant))
    except _rust.DigestValidationError as error:
        finding.violations += [str(violation) for violation in error.violations]
    except (OSError, RuntimeError) as error:
        finding.violations.append(one_line(error))
    bytecode = 0
    for folder, folders, files in os.walk(variant):
        for name in folders:
            if Path(folder, name).is_symlink():
                finding.violations.append(f"Link to a folder: {os.path.relpath(Path(folder, name), variant)}")
        for name in files:
            if not Path(folder, name).exists():
                finding.violations.append(f"Link to nothing: {os.path.relpath(Path(folder, name), variant)}")
        bytecode += sum(name.endswith(".pyc") for name in files)
    if bytecode:
        finding.notes.append(f"{bytecode} files of bytecode, which Python runs and no digest covers")
    return finding


def variants_below(folder: Path) -> list[Path]:
    """The variants in a variant, a build, a repository, a snapshot or a cache."""
    found = {path.parent for path in folder.rglob("metadata.json")}
    # A variant whose metadata.json is gone is a damaged one.
    found |= {path for path in folder.rglob("torch-*") if path.is_dir() and path.parent.name == "build"}
    return sorted(found)


# Cached repositories


def cache_folder() -> Path:
    """Where `kernels` keeps what it downloads."""
    return Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)


def repository_folder(cache: Path, repo_id: str) -> Path:
    return cache / f"kernels--{repo_id.replace('/', '--')}"


def check_snapshot(cache: Path, repo_id: str, commit: str, hub: Optional[HfApi]) -> list[Finding]:
    """One finding for the files of a commit in the cache, and one for each of its variants.

    The files are compared with the listing that `huggingface_hub` stored beside them, or, with `hub`, with the Hub's own.
    """
    folder = repository_folder(cache, repo_id) / "snapshots" / commit
    finding = Finding(f"{repo_id}@{commit}")
    if not folder.is_dir():
        finding.violations.append(f"not in {cache}")
        return [finding]
    if hub is not None:
        expected = hub.list_repo_tree(repo_id, repo_type="kernel", revision=commit, recursive=True)
        finding.summary = "compared with the Hub"
    else:
        expected = []
        with contextlib.suppress(CachedRepoTreeNotFoundError):
            expected = get_cached_repo_tree(repo_id, repo_type="kernel", revision=commit, cache_dir=cache)
        finding.summary = "compared with the listing in the cache" if expected else "no listing in the cache"
    compare_with_listing(folder, expected, finding)
    findings = [finding]
    for variant in variants_below(folder):
        findings.append(check_variant(variant))
        findings[-1].subject = f"{repo_id}@{commit[:7]}/{variant.relative_to(folder)}"
    return findings


def compare_with_listing(folder: Path, expected: Iterable, finding: Finding) -> None:
    missing = 0
    for file in expected:
        if not isinstance(file, RepoFile):
            continue
        path = folder / file.path
        if not path.is_file():
            missing += 1
        elif not same_content(path.read_bytes(), file):
            finding.violations.append(f"{file.path}: not the content of this commit")
    if missing:
        finding.notes.append(f"{missing} files are not here: enough online, refused offline (scripts/vendor.py)")


def same_content(content: bytes, file: RepoFile) -> bool:
    """Whether the Hub's record of a file is that of `content`."""
    if file.lfs is not None:
        return hashlib.sha256(content).hexdigest() == file.lfs.sha256
    return blob_id(content) == file.blob_id


def blob_id(content: bytes) -> str:
    """The id under which git stores a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def check_repository(cache: Path, repo_id: str, hub: Optional[HfApi]) -> list[Finding]:
    """All commits of a repository in the cache, and whether its branches lead to one of them."""
    folder = repository_folder(cache, repo_id)
    snapshots = sorted(path.name for path in folder.glob("snapshots/*") if path.is_dir())
    if not snapshots:
        raise CommandError(f"{repo_id}: nothing of it in {cache}")
    findings = [finding for commit in snapshots for finding in check_snapshot(cache, repo_id, commit, hub)]
    refs = folder / "refs"
    for ref in sorted(path for path in refs.rglob("*") if path.is_file()):
        commit = ref.read_text(encoding="utf-8", errors="replace").strip()
        finding = Finding(f"{repo_id} {ref.relative_to(refs)}", f"is {commit}")
        if commit not in snapshots:
            finding.notes.append("that commit is not here")
        findings.append(finding)
    return findings


def read_lockfile(path: Path, wanted: Sequence[str] = ()) -> dict[str, tuple[str, Optional[str]]]:
    """Repository -> locked commit and, if a version was locked, the branch it was; of those `wanted`, or of all."""
    try:
        locks = _rust.KernelLocks.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"--lockfile: {path}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"--lockfile: {path}: {one_line(error)}") from None
    locked = {
        kernel.repo_id: (lock.commit, f"v{number}" if (number := getattr(kernel.version, "version", None)) else None)
        for kernel, lock in locks.items()
    }
    for repo_id in wanted:
        if repo_id not in locked:
            raise CommandError(f"--lockfile: {path} locks {', '.join(locked) or 'nothing'}, not {repo_id}")
    return {repo_id: locked[repo_id] for repo_id in wanted or locked}


# The command


def check(what: list[str], cache: Path, lockfile: Optional[Path], online: bool) -> list[Finding]:
    hub = HfApi() if online else None
    if lockfile is not None:
        locked = read_lockfile(lockfile, what)
        return [
            finding
            for repo_id, (commit, _) in locked.items()
            for finding in check_snapshot(cache, repo_id, commit, hub)
        ]
    if not what and not (ROOT / "build").is_dir():
        raise CommandError(f"no build in {ROOT}; `make build` makes one")
    findings = []
    for each in what or [str(ROOT / "build")]:
        folder = Path(each)
        if each and folder.is_dir():
            if online:
                raise CommandError(f"--online: needs a repository such as ORG/NAME, found the folder {each}")
            variants = variants_below(folder)
            if not variants:
                raise CommandError(f"{each}: holds no variant of a kernel, no metadata.json")
            findings += map(check_variant, variants)
        elif is_repo_id(each):
            findings += check_repository(cache, each, hub)
        else:
            raise CommandError(f"expected a folder or a repository such as ORG/NAME, found {each!r}")
    return findings


def report(findings: list[Finding]) -> int:
    """Prints the findings; the exit status."""
    for finding in findings:
        print(
            "BAD" if finding.violations else "ok ", finding.subject, f"({finding.summary})" if finding.summary else ""
        )
        for violation in finding.violations:
            print("     ", violation)
        for note in finding.notes:
            print("      note:", note)
    bad = sum(bool(finding.violations) for finding in findings)
    if bad:
        print(f"verify: {bad} of {len(findings)} do not hold what they should", file=sys.stderr)
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="folders, or repositories in the cache (default: build/)")
    parser.add_argument(
        "--lockfile", type=Path, metavar="FILE", help="check exactly the commits that `kernels lock` wrote to FILE"
    )
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="(default: KERNELS_CACHE, or else the cache of huggingface_hub)"
    )
    parser.add_argument(
        "--online", action="store_true", help="compare the files with the Hub's listing of their commit as well"
    )
    options = parser.parse_args()

    def command():
        return report(check(options.what, options.cache or cache_folder(), options.lockfile, options.online))

    return exit_status("verify", command)


if __name__ == "__main__":
    sys.exit(main())
