#!/usr/bin/env python3
"""Fetch a published kernel whole and verified, so that it loads with HF_HUB_OFFLINE=1.

`get_kernel` fetches the one variant it needs and does not remember which commit a version was: offline the same call then
fails. This fetches all files of the version into a cache from which get_kernel, LayerRepository, load_kernel,
get_locked_kernel and LockedLayerRepository work without a network. Without --output that is the cache of this machine;
with it a folder to carry elsewhere, to be named there in KERNELS_CACHE.

Nothing reaches the cache before every file has been compared with the Hub's listing of the commit and with the digests
in metadata.json. Nothing of the kernel is run.

    python scripts/vendor.py ORG/NAME --version 1
    python scripts/vendor.py --lockfile kernels.lock --output kernels-cache
"""

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

from command import CommandError, check_repo_id, exit_status, requirements
from verify import cache_folder, check_snapshot, read_lockfile, repository_folder

with requirements():
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import disable_progress_bars


def resolve(api: HfApi, repo_id: str, version: int) -> str:
    """The commit of a version."""
    try:
        refs = api.list_repo_refs(repo_id, repo_type="kernel")
    except RepositoryNotFoundError:
        raise CommandError(f"{repo_id}: no such kernel repository at {api.endpoint}") from None
    branches = {branch.name: branch.target_commit for branch in refs.branches}
    if f"v{version}" not in branches:
        versions = sorted(int(name[1:]) for name in branches if name[:1] == "v" and name[1:].isdigit())
        there = ", ".join(map(str, versions)) or "none"
        raise CommandError(f"--version: {repo_id} has no version {version}; it has {there}")
    return branches[f"v{version}"]


def vendor(api: HfApi, repo_id: str, commit: str, branch: str | None, output: Path) -> None:
    """Fetches a commit into the cache `output`; `branch` then leads to it."""
    made = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    try:
        install(api, repo_id, commit, branch, output)
    except BaseException:
        if made:
            # Fails if another process has put its own there meanwhile.
            with contextlib.suppress(OSError):
                output.rmdir()
        raise


def install(api: HfApi, repo_id: str, commit: str, branch: str | None, output: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".vendor-", dir=output) as scratch:
        staged = Path(scratch)
        try:
            api.snapshot_download(repo_id, repo_type="kernel", revision=commit, cache_dir=staged)
        except RepositoryNotFoundError:
            raise CommandError(f"{repo_id}: no such kernel repository at {api.endpoint}") from None
        except RevisionNotFoundError:
            raise CommandError(f"{repo_id}: no commit {commit} at {api.endpoint}") from None
        findings = check_snapshot(staged, repo_id, commit, api)
        wrong = [f"{each.subject}: {text}" for each in findings for text in each.violations + each.notes]
        if len(findings) == 1:
            wrong.append("no variant of a kernel in it")
        if wrong:
            raise CommandError(f"{repo_id}@{commit} is damaged, nothing was kept: {'; '.join(wrong)}")
        source, target = repository_folder(staged, repo_id), repository_folder(output, repo_id)
        if branch is not None:
            ref = source / "refs" / branch
            ref.parent.mkdir(exist_ok=True)
            ref.write_text(commit, encoding="utf-8")
        # In this order what is there never leads to what is not yet.
        for part in ("blobs", "snapshots", "trees", "refs"):
            move(source / part, target / part)
    print(f"{repo_id}@{commit}{f' ({branch})' if branch else ''}: {len(findings) - 1} variants, verified")


def move(source: Path, target: Path) -> None:
    """Moves a tree into place file by file, each at once, over what is there."""
    for folder, _, files in os.walk(source):
        there = target / Path(folder).relative_to(source)
        there.mkdir(parents=True, exist_ok=True)
        for name in files:
            os.replace(Path(folder, name), there / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo_id", nargs="?", metavar="ORG/NAME", help="needed unless a lockfile is given")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--version", type=int, metavar="N", help="the version to fetch, whatever commit that is now")
    which.add_argument(
        "--lockfile",
        type=Path,
        metavar="FILE",
        help="fetch the commits that `kernels lock` wrote to FILE, and no others",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="(default: KERNELS_CACHE, or else the cache of huggingface_hub)"
    )
    options = parser.parse_args()
    if not sys.stderr.isatty():
        disable_progress_bars()

    def command():
        output = (options.output or cache_folder()).absolute()
        if output.exists() and not output.is_dir():
            raise CommandError(f"--output: expected a folder, found the file {output}")
        api = HfApi()
        if options.lockfile is not None:
            locked = read_lockfile(options.lockfile, [] if options.repo_id is None else [options.repo_id])
            chosen = [(repo_id, *lock) for repo_id, lock in locked.items()]
        elif options.repo_id is None:
            raise CommandError("ORG/NAME: expected the repository that --version belongs to")
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
