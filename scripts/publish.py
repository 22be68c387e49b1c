#!/usr/bin/env python3
"""Publish the kernel to the Hub: one commit to branch v<version> with the build, one to main with the card.

The program builds the files of the current commit, as git stores them, and uploads that. build/ must be equal to it byte for
byte. Users load `version=1` and get the head of branch v1, so the new build must keep the published interface: names,
parameters, layers, backends, mapping and dependencies, as listed in interface.json. For an incompatible change raise
`version` in build.toml; it is published to a new branch.

A repeated run changes nothing. After an interrupted run each branch is at its old or at its new commit; run it again.
HF_TOKEN and HF_ENDPOINT have the meaning that huggingface_hub gives them.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# PYTHONSAFEPATH leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import build_kernel
import interface
from build_kernel import ROOT, tomllib
from command import CommandError, exit_status, hub_client, is_repo_id, requirements
from verify import check_variant, same_content

with requirements():
    import griffe
    import jinja2
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils import disable_progress_bars
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# The files of a branch that this program owns. It leaves all others unchanged.
PUBLISHED = ("build/*", "benchmarks/benchmark*.py")
INTERFACE = "build/*/interface.json"
STEPS = 6


@dataclass
class Project:
    """The contents of build.toml."""

    name: str
    version: int
    repo_id: str
    general: dict
    package: str

    @property
    def branch(self) -> str:
        return f"v{self.version}"


@dataclass
class Release:
    """A checked build, and the other files to publish."""

    project: Project
    build: Path
    files: dict[str, bytes]  # by path on the branch
    card: bytes
    source: str

    @property
    def interface(self) -> dict:
        return next(json.loads(content) for path, content in self.files.items() if fnmatch.fnmatch(path, INTERFACE))


@dataclass
class Plan:
    """The changes of one commit to a branch."""

    branch: str
    parent: str | None  # the commit it starts from; None: the branch does not exist
    added: dict[str, bytes]
    changed: dict[str, bytes]
    deleted: list[str]
    unchanged: int

    @property
    def is_empty(self) -> bool:
        return not (self.added or self.changed or self.deleted)

    def __str__(self) -> str:
        where = self.branch if self.parent else f"{self.branch} (new)"
        parts = [
            f"{len(files)} {what}"
            for what, files in (("added", self.added), ("changed", self.changed), ("deleted", self.deleted))
            if files
        ]
        return f"{where}: {', '.join(parts) or 'nothing to do'}, {self.unchanged} unchanged"

    def details(self) -> str:
        """One line for each file that the commit changes."""
        marked = (("+", self.added), ("~", self.changed), ("-", self.deleted))
        return "".join(f"\n    {mark} {path}" for mark, paths in marked for path in paths)


# The build


def read_project(root: Path, repo_id: str | None) -> Project:
    build_kernel.kernels_rust().Build.open(root)
    general = tomllib.loads((root / "build.toml").read_text(encoding="utf-8"))["general"]
    if repo_id is None:
        repo_id = general.get("hub", {}).get("repo-id")
    if repo_id is None or not is_repo_id(repo_id):
        raise CommandError(
            f"--repo-id: expected ORG/NAME, found {repo_id!r}; [general.hub] of build.toml may set the default"
        )
    package = build_kernel.kernels_rust().KernelName(general["name"]).python_name
    return Project(general["name"], general["version"], repo_id, general, package)


def check_tree(root: Path, commit: str | None) -> None:
    """Raises CommandError if there is no commit, or if tracked files, or untracked ones that would ship, differ from it."""
    if commit is None:
        raise CommandError(
            f"{root}: expected a git repository, found no commit to publish; --allow-dirty publishes the files without one"
        )
    changed = []
    for command in (
        ("diff", "--name-only", "HEAD"),
        ("ls-files", "--others", "--exclude-standard", "--", "torch-ext", "benchmarks"),
    ):
        paths = build_kernel.git(root, *command)
        if paths is None:
            raise CommandError(f"git {command[0]} fails in {root}, so the committed files are unknown")
        changed += paths.splitlines()
    if changed:
        raise CommandError(
            f"uncommitted changes: {', '.join(changed)}; commit them, or publish them with --allow-dirty"
        )


def head_commit(root: Path) -> str | None:
    if not build_kernel.is_repository(root):
        return None
    return build_kernel.git(root, "rev-parse", "--verify", "--quiet", "HEAD")


def export(root: Path, commit: str, folder: Path) -> None:
    """Writes the files of a commit into `folder`, as git stores them."""
    links = []
    for mode, path, content in build_kernel.committed(root, commit):
        if mode == "120000":
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).symlink_to(content.decode())
            links.append(folder / path)
        else:
            build_kernel.write(folder / path, content)
    for link in links:
        if not link.resolve().is_relative_to(folder.resolve()):
            raise CommandError(f"{link.relative_to(folder)}: link to {os.readlink(link)}, which is outside the commit")


def fresh_build(source: Path, commit: str | None, unique_id: str | None, output: Path) -> dict[str, bytes]:
    """The build of the project in `source`, made by its own build_kernel.py: path on the branch -> content."""
    command = [sys.executable, source / "scripts/build_kernel.py", "--output", output]
    command += ["--unique-id", unique_id, "--kernel-sha", commit] if unique_id else []
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CommandError(f"the project does not build: {reason.removeprefix('build_kernel: error: ')}")
    return folder_files(output, "build")


def read_build(build: Path) -> dict[str, bytes]:
    """The files of a build: path on the branch -> content."""
    if not build.is_dir():
        raise CommandError(f"--build: expected a folder made by `make build`, found no folder {build}")
    files = folder_files(build, "build")
    for variant in sorted(build.glob("torch-*")):
        violations = check_variant(variant).violations
        if violations:
            raise CommandError(f"{variant}: {'; '.join(violations)}")
    return files


def compare_builds(build: Path, found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    """Raises CommandError unless `build`, which was tested here, equals the build that will be published."""
    compare_ids(found, expected)
    for path in sorted(found.keys() | expected.keys()):
        if path not in found:
            raise CommandError(f"{build}: {path} is missing; run `make build`")
        if path not in expected:
            raise CommandError(f"{build}: {path} does not belong to the build; run `make build`")
        if found[path] != expected[path]:
            raise CommandError(f"{build}: {path} differs from the build of the commit; run `make build`")


def folder_files(folder: Path, prefix: str) -> dict[str, bytes]:
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise CommandError(f"{folder}: expected files, found the link {name}; links cannot be published")
        if path.suffix == ".pyc":
            raise CommandError(f"{folder}: expected no bytecode, found {name}; run `make build`")
        if path.is_file():
            files[f"{prefix}/{name}"] = path.read_bytes()
    return files


def compare_ids(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    """Raises CommandError for the most frequent difference, a build of another commit, and names both ids."""
    for path in sorted(found.keys() & expected.keys()):
        ids = [re.search(rb'_OPS_NAME = "(\w+)"', files[path]) for files in (found, expected)]
        if not path.endswith("/_ops.py") or None in ids or ids[0][1] == ids[1][1]:
            continue
        built, wanted = (each[1].decode() for each in ids)
        if built != f"{wanted}_dirty":
            raise CommandError(f"expected the build {wanted}, found {built}; run `make build`")
        differing = [each for each in sorted(found.keys() | expected.keys()) if found.get(each) != expected.get(each)]
        sources = [each for each in differing if each.split("/")[-1] not in build_kernel.GENERATED]
        raise CommandError(
            f"the build differs from the commit's own files, for example in {(sources or differing)[0]}; run `make build`. If "
            "that does not help, git ignores this file, marks it as unchanged or converts its line ends in the work tree"
        )


# The contents of the Hub


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """For calls of huggingface_hub, which does not check the form of answers: turns the resulting errors into CommandError."""
    try:
        yield
    except OSError:  # Includes the errors that huggingface_hub raises itself.
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CommandError(f"the Hub's answer is not understood, {what}: {type(error).__name__}: {error}") from error


def remote_branches(api: HfApi, repo_id: str) -> dict[str, str] | None:
    """Branch -> commit; None if the repository does not exist."""
    try:
        with understood(f"asked for the branches of {repo_id}"):
            refs = api.list_repo_refs(repo_id, repo_type="kernel")
            branches = {branch.name: branch.target_commit for branch in refs.branches}
            # A branch without a commit would count as new, and its interface would not be compared.
            if not all(isinstance(commit, str) and commit for commit in branches.values()):
                raise ValueError("a branch without a commit")
    except RepositoryNotFoundError:
        return None
    return branches


def remote_files(api: HfApi, repo_id: str, commit: str) -> dict[str, RepoFile]:
    """Path -> file, for all files of a commit."""
    with understood(f"asked for the files of {repo_id}@{commit}"):
        listing = api.list_repo_tree(repo_id, repo_type="kernel", revision=commit, recursive=True)
        return {entry.path: entry for entry in listing if isinstance(entry, RepoFile)}


def newest_version(branches: dict[str, str]) -> int:
    return max((int(name[1:]) for name in branches if re.fullmatch(r"v\d+", name)), default=0)


def make_plan(api: HfApi, repo_id: str, branch: str, parent: str | None, wanted: dict[str, bytes], owned) -> Plan:
    """The changes from the branch at `parent` to the files `wanted`. Other files that match `owned` are deleted."""
    remote = {} if parent is None else remote_files(api, repo_id, parent)
    changed = {
        path: content for path, content in wanted.items() if path in remote and not same_content(content, remote[path])
    }
    added = {path: content for path, content in wanted.items() if path not in remote}
    stale = (path for path in remote if path not in wanted and any(fnmatch.fnmatch(path, each) for each in owned))
    return Plan(branch, parent, added, changed, sorted(stale), len(wanted) - len(added) - len(changed))


def plan_version(api: HfApi, release: Release, head: str | None) -> Plan:
    """The changes to the version's branch at the commit `head`, whose interface has been compared."""
    project = release.project
    plan = make_plan(api, project.repo_id, project.branch, head, release.files, PUBLISHED)
    if head is not None and not plan.is_empty:
        check_compatible(api, release, head)
    return plan


def check_compatible(api: HfApi, release: Release, head: str) -> None:
    """Raises CommandError if the build lacks part of the published interface."""
    project = release.project
    paths = sorted(path for path in remote_files(api, project.repo_id, head) if fnmatch.fnmatch(path, "build/*/*.py"))
    if not paths:
        return
    variants = sorted({path.split("/")[1] for path in paths})
    with tempfile.TemporaryDirectory(prefix="publish-") as scratch:
        with understood(f"asked for {variants[0]} of {project.repo_id}@{head}"):
            published = api.snapshot_download(
                project.repo_id,
                repo_type="kernel",
                revision=head,
                allow_patterns=f"build/{variants[0]}/*",
                cache_dir=Path(scratch, "cache"),
            )
        variant = Path(published, "build", variants[0])
        if (variant / "interface.json").exists():
            breaks = compare_interfaces(variant / "interface.json", release.interface)
        else:
            gone = {each for each in variants if not any(path.startswith(f"build/{each}/") for path in release.files)}
            breaks = [f"{each}: removed" for each in sorted(gone)]
            breaks += compare_sources(variant, release, Path(scratch))
    if breaks:
        more = f"; and {len(breaks) - 10} more" if len(breaks) > 10 else ""
        raise CommandError(
            f"this build breaks the interface of branch {project.branch}: {'; '.join(breaks[:10])}{more}; "
            f"raise `version` in build.toml (now {project.version}) to publish it"
        )


def compare_interfaces(published: Path, ours: dict) -> list[str]:
    try:
        return interface.breaks(json.loads(published.read_bytes()), ours)
    except (LookupError, TypeError, ValueError):
        raise CommandError(
            f"build/{published.parent.name}/interface.json on the Hub: expected a file written by build_kernel.py"
        ) from None


# Published builds without interface.json: their source is parsed, not run


def compare_sources(published: Path, release: Release, scratch: Path) -> list[str]:
    ours = scratch / "ours"
    prefix = next(path for path in release.files if fnmatch.fnmatch(path, INTERFACE)).removesuffix("interface.json")
    for path, content in release.files.items():
        if path.startswith(prefix):
            build_kernel.write(ours / path.removeprefix(prefix), content)
    name = release.project.package
    try:
        interfaces = [
            public_interface(Path(shutil.copytree(folder, Path(scratch, which, name))))
            for which, folder in (("old", published), ("new", ours))
        ]
        breaks = {describe(each) for each in griffe.find_breaking_changes(*interfaces)}
    except (griffe.GriffeError, AttributeError, LookupError, TypeError) as error:
        raise CommandError(f"the source does not show the public names: {type(error).__name__}: {error}") from error
    old, new = (dict(signatures(each)) for each in interfaces)
    # griffe accepts some changes, such as a new optional parameter. Here signatures must be equal.
    breaks |= {f"{path}{old[path]}: now {new[path]}" for path in old.keys() & new.keys() if old[path] != new[path]}
    return sorted(breaks)


def public_interface(package: Path) -> griffe.Object:
    """The names of a package's `__all__`, read from its source."""
    interface = griffe.load(package.name, search_paths=[package.parent], allow_inspection=False, resolve_aliases=True)
    for name in set(interface.members) - set(interface.exports or ()):
        del interface.members[name]
    return interface


def signatures(owner: griffe.Object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, parameters) of every public function and method, without annotations."""
    for name, member in owner.members.items():
        # Below the package, aliases are imports.
        if name.startswith("_") or (prefix and member.is_alias):
            continue
        if member.is_function:
            defaults = ((each, "" if each.default is None else f"={each.default}") for each in member.parameters)
            yield prefix + name, f"({', '.join(f'{each.name}{default}' for each, default in defaults)})"
        elif member.is_module or member.is_class:
            yield from signatures(member, f"{prefix}{name}.")


def describe(breakage: griffe.Breakage) -> str:
    name = breakage.obj.path.split(".", 1)[1]
    parameter = next(
        (each for each in (breakage.old_value, breakage.new_value) if isinstance(each, griffe.Parameter)), None
    )
    return f"{name}{f'({parameter.name})' if parameter else ''}: {breakage.kind.value.lower()}"


# The card


def render_card(root: Path, project: Project, names: dict, has_benchmark: bool) -> str:
    """CARD.md as kernel-builder renders it."""
    template = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return template.from_string((root / "CARD.md").read_text(encoding="utf-8")).render(
        repo_id=project.repo_id,
        version=project.version,
        license=project.general["license"].lower(),
        source=project.general.get("source"),
        upstream=project.general.get("upstream"),
        functions=[name for name in names if name != "layers"],
        layers=list(names.get("layers", ())),
        has_benchmark=has_benchmark,
    )


# Publishing


def prepare(root: Path, build: Path, repo_id: str | None, allow_dirty: bool, step: Callable[[str], None]) -> Release:
    """Checks the build as far as that needs no Hub, and returns the release."""
    found = read_build(build)
    step("building the commit")
    with tempfile.TemporaryDirectory(prefix="publish-") as scratch:
        tree, origin, unique_id = root, head_commit(root), None
        if allow_dirty:
            origin = f"the work tree at {origin}" if origin else "no commit"
        else:
            check_tree(root, origin)
            tree = Path(scratch, "commit")
            try:
                export(root, origin, tree)
            except build_kernel.BuildError as error:
                raise CommandError(str(error)) from None
            unique_id = build_kernel.git(root, "rev-parse", f"{origin}^{{tree}}")[:7]
        project = read_project(tree, repo_id)
        files = fresh_build(tree, origin, unique_id, Path(scratch, "build"))
        step("comparing both builds")
        compare_builds(build, found, files)
        files.update({f"benchmarks/{path.name}": path.read_bytes() for path in tree.glob("benchmarks/benchmark*.py")})
        release = Release(project, build, files, b"", origin)
        has_benchmark = any(path.startswith("benchmarks/") for path in files)
        release.card = render_card(tree, project, release.interface["names"], has_benchmark).encode()
    return release


def upload(
    api: HfApi, release: Release, branches: dict[str, str] | None, dry_run: bool, step: Callable[[str], None]
) -> list[str]:
    """Uploads `release` to the Hub, which has `branches`. Returns one line for each branch."""
    project, repo_id, branch = release.project, release.project.repo_id, release.project.branch

    def plans(heads: dict[str, str]) -> list[Plan]:
        # The newest version provides the card.
        card = {} if newest_version(heads) > project.version else {"README.md": release.card}
        return [
            plan_version(api, release, heads.get(branch)),
            make_plan(api, repo_id, "main", heads.get("main"), card, ()),
        ]

    step("comparing public names and signatures")
    plan, card_plan = plans(branches or {})
    if dry_run:
        return [str(each) + each.details() for each in (plan, card_plan)]

    step("creating repository and branch")
    if branches is None:
        create_repository(api, repo_id)
    if plan.parent is None:
        with understood(f"asked to make branch {branch} of {repo_id}"):
            api.create_branch(repo_id, repo_type="kernel", branch=branch, exist_ok=True)
    if plan.parent is None or card_plan.parent is None:
        # A new repository holds .gitattributes, and a new branch starts at main or already has another publisher's files.
        heads = remote_branches(api, repo_id) or {}
        missing = {branch, "main"} - heads.keys()
        if missing:
            raise CommandError(
                f"{repo_id}: created, but the Hub does not list {', '.join(sorted(missing))}; run it again"
            )
        plan, card_plan = plans(heads)
    step(f"uploading {len(plan.added) + len(plan.changed)} files")
    commit = send(api, repo_id, plan, f"{project.name} v{project.version}, built from {release.source}")
    step("uploading the card")
    card_commit = send(api, repo_id, card_plan, f"Card of {project.name} v{project.version}")
    return [f"{plan}; commit {commit}", f"{card_plan}; commit {card_commit}"]


def create_repository(api: HfApi, repo_id: str) -> None:
    try:
        with understood(f"asked to create {repo_id}"):
            api.create_repo(repo_id, repo_type="kernel", exist_ok=True)
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403):
            raise CommandError(
                f"{repo_id}: the Hub does not let this token create a kernel repository (HTTP "
                f"{error.response.status_code}); the Hub must first admit the organisation as a kernel publisher"
            ) from None
        raise


def send(api: HfApi, repo_id: str, plan: Plan, message: str) -> str:
    """Commits the plan. Returns the commit that the branch is at afterwards."""
    if plan.is_empty:
        return plan.parent
    operations = [CommitOperationAdd(path, content) for path, content in {**plan.added, **plan.changed}.items()]
    operations += [CommitOperationDelete(path, is_folder=False) for path in plan.deleted]
    try:
        # With parent_commit the Hub refuses if another publisher has committed since.
        with understood(f"asked to commit to {plan.branch} of {repo_id}"):
            done = api.create_commit(
                repo_id,
                operations,
                commit_message=message,
                repo_type="kernel",
                revision=plan.branch,
                parent_commit=plan.parent,
            )
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code == 412:
            raise CommandError(f"{repo_id}: branch {plan.branch} was changed during this run; run it again") from None
        raise
    return done.oid


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--build",
        type=Path,
        default=ROOT / "build",
        metavar="DIR",
        help="folder made by `make build` (default: build/)",
    )
    parser.add_argument(
        "--repo-id", metavar="ORG/NAME", help="kernel repository to publish to (default: repo-id in build.toml)"
    )
    parser.add_argument("--dry-run", action="store_true", help="run all checks and show the changes, but send nothing")
    parser.add_argument(
        "--allow-dirty", action="store_true", help="publish uncommitted changes too; no commit reproduces such a build"
    )
    options = parser.parse_args()
    disable_progress_bars()

    def command():
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=STEPS)

            def step(description):
                progress.update(task, description=description, advance=1)

            release = prepare(ROOT, options.build.absolute(), options.repo_id, options.allow_dirty, step)
            api = hub_client()
            step("asking the Hub")
            branches = remote_branches(api, release.project.repo_id)
            lines = upload(api, release, branches, options.dry_run, step)
        print(f"{release.project.repo_id} at {api.endpoint}{': dry run, nothing was sent' if options.dry_run else ''}")
        for line in lines:
            print(" ", line)

    return exit_status("publish", command)


if __name__ == "__main__":
    sys.exit(main())
