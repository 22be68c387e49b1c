#!/usr/bin/env python3
"""Download a published kernel completely, verify it, and store it in a cache from which it loads with HF_HUB_OFFLINE=1.

    python scripts/vendor.py ORG/NAME --version 1
    python scripts/vendor.py --lockfile kernels.lock --output kernels-cache

`get_kernel` downloads only the variant it needs and does not store which commit a version is, so the same call fails
offline. This program downloads all files of the commit. With its cache get_kernel, LayerRepository, load_kernel,
get_locked_kernel and LockedLayerRepository work without a network. The default is this machine's cache. With --output it is
another folder, which can be copied to another machine and named there in KERNELS_CACHE.

Every file is compared with the Hub's listing of the commit and with the digests in metadata.json before it enters the
cache. Other files in the commit's snapshot, such as bytecode written by Python, are removed. No code of the kernel runs. A
killed run leaves a folder `.vendor-*`, which the next run removes.
"""

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

# PYTHONSAFEPATH leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from command import CommandError, check_repo_id, exit_status, hub_client, is_commit, requirements
from verify import Finding, cache_folder, check_blobs, check_refs, check_snapshot, read_locks, repository_folder

with requirements():
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import disable_progress_bars


def resolve(api: HfApi, repo_id: str, version: int) -> str:
    """The commit that a version is now."""
    try:
        refs = api.list_repo_refs(repo_id, repo_type="kernel")
    except RepositoryNotFoundError:
        raise CommandError(f"{repo_id}: no such kernel repository at {api.endpoint}") from None
    branches = {branch.name: branch.target_commit for branch in refs.branches}
    commit = branches.get(f"v{version}")
    if commit is None:
        versions = sorted(int(name[1:]) for name in branches if re.fullmatch("v[0-9]+", name))
        there = ", ".join(map(str, versions)) or "none"
        raise CommandError(f"--version: {repo_id} has no version {version}; expected one of: {there}")
    if not is_commit(commit):
        raise CommandError(f"{api.endpoint}: branch v{version} of {repo_id}: expected a commit, found {commit!r}")
    return commit


def vendor(api: HfApi, repo_id: str, commit: str, branch: str | None, output: Path) -> None:
    """Downloads a commit into the cache `output`. If `branch` is given, the cache then resolves it to this commit."""
    made = [folder for folder in (output, *output.parents) if not folder.exists()]
    output.mkdir(parents=True, exist_ok=True)
    try:
        with staging(output) as staged:
            install(api, repo_id, commit, branch, output, staged)
    except BaseException:
        for folder in made:
            # Fails if another process has written to the folder since.
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextlib.contextmanager
def staging(output: Path) -> Iterator[Path]:
    """A temporary folder for a download inside `output`. A lock lets one process at a time use it."""
    lock = os.open(output, os.O_RDONLY)
    try:
        # The system releases the lock when the process ends, even if it is killed.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"vendor: waiting for another run that downloads into {output}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Folders of killed runs.
        for left in output.glob(".vendor-*"):
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=".vendor-", dir=output) as scratch:
            yield Path(scratch)
    finally:
        os.close(lock)


def install(api: HfApi, repo_id: str, commit: str, branch: str | None, output: Path, staged: Path) -> None:
    try:
        api.snapshot_download(repo_id, repo_type="kernel", revision=commit, cache_dir=staged)
    except RepositoryNotFoundError:
        raise CommandError(f"{repo_id}: no such kernel repository at {api.endpoint}") from None
    except RevisionNotFoundError:
        raise CommandError(f"{repo_id}: no commit {commit} at {api.endpoint}") from None
    findings = [check_blobs(staged, repo_id), *check_snapshot(staged, repo_id, commit, api)]
    wrong = complaints(findings)
    if wrong:
        raise CommandError(f"{repo_id}@{commit}: verification failed, nothing was kept: {wrong}")
    source, target = repository_folder(staged, repo_id), repository_folder(output, repo_id)
    if branch is not None:
        ref = source / "refs" / branch
        ref.parent.mkdir(exist_ok=True)
        ref.write_text(commit, encoding="utf-8")
    listing = {path.relative_to(source) for path in source.rglob("*")}
    # In this order no file ever refers to one that is not there yet.
    for part in ("blobs", "snapshots", "trees", "refs"):
        move(source / part, target / part)
    removed = remove_others(target / "snapshots" / commit, {target / path for path in listing})
    findings_there = check_snapshot(output, repo_id, commit, None)
    if branch is not None:
        findings_there += check_refs(output, repo_id, None, {branch: commit})
    wrong = complaints(findings_there)
    if wrong:
        raise CommandError(
            f"{repo_id}@{commit}: verification passed for the download from {api.endpoint}, but failed in {output}: {wrong}"
        )
    name = f"{repo_id}@{commit}{f' ({branch})' if branch else ''}"
    besides = f"; removed {removed} other files or folders" if removed else ""
    print(f"{name}: {len(findings) - 2} variants, verified against the listing of {api.endpoint}{besides}")


def complaints(findings: list[Finding]) -> str:
    """The violations and gaps of all findings in one text; empty if the commit is complete."""
    return "; ".join(
        f"{each.subject}: {text}"
        for each in findings
        for text in (*each.violations, *each.notes, each.unchecked)
        if text
    )


def remove_others(folder: Path, known: set[Path]) -> int:
    """Removes files and folders below `folder` that are not `known`. Returns how many."""
    removed = 0
    for where, below, names in os.walk(folder):
        for name in below + names:
            path = Path(where, name)
            if path not in known:
                removed += 1
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                    below.remove(name)
                else:
                    path.unlink()
    return removed


def move(source: Path, target: Path) -> None:
    """Moves the files of a tree to `target`, each atomically, replacing existing ones."""
    for folder, _, files in os.walk(source):
        there = target / Path(folder).relative_to(source)
        if there.is_symlink():
            raise CommandError(f"{there}: expected a folder, found a link to {os.readlink(there)}")
        there.mkdir(parents=True, exist_ok=True)
        for name in files:
            os.replace(Path(folder, name), there / name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo_id", nargs="?", metavar="ORG/NAME", help="kernel repository; optional with --lockfile")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--version", type=int, metavar="N", help="the version to download, at its current commit")
    which.add_argument(
        "--lockfile",
        type=Path,
        metavar="FILE",
        help="download exactly the commits that `kernels lock` wrote to FILE",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="cache to write (default: KERNELS_CACHE, or else the cache of huggingface_hub)",
    )
    options = parser.parse_args(arguments)
    if not sys.stderr.isatty():
        disable_progress_bars()

    def command():
        output = (options.output or cache_folder()).absolute()
        if output.exists() and not output.is_dir():
            raise CommandError(f"--output: expected a folder, found the file {output}")
        api = hub_client()
        if options.lockfile is not None:
            chosen = read_locks(options.lockfile, [] if options.repo_id is None else [options.repo_id])
        elif options.repo_id is None:
            raise CommandError("ORG/NAME: expected the repository that --version belongs to, found none")
        else:
            check_repo_id(options.repo_id)
            if options.version < 1:
                raise CommandError(f"--version: expected a number from 1 on, found {options.version}")
            commit = resolve(api, options.repo_id, options.version)
            chosen = [(options.repo_id, commit, f"v{options.version}")]
        for each in chosen:
            vendor(api, *each, output)
        print(f"To load it offline: export HF_HUB_OFFLINE=1 KERNELS_CACHE={output}")

    return exit_status("vendor", command)


if __name__ == "__main__":
    sys.exit(main())
