#!/usr/bin/env python3
"""Publish the built kernel to the Hub: the build to branch v<version>, the card to main, each in one commit.

What is sent is built from the files of the current commit as git stores them, whatever the work tree holds; build/ must be
the same, byte for byte. It must keep what the branch already promises (interface.json: names, parameters, layers, backends,
mapping, dependencies): people load `version=1` and get whatever the branch holds. An incompatible change takes a new
`version` in build.toml, and so a new branch.

A repeated run changes nothing. A run that was interrupted at any point leaves the branch as it was or as it should be;
run it again. HF_TOKEN and HF_ENDPOINT are those of huggingface_hub.
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

# What a branch holds of ours. Anything else on it is left alone.
PUBLISHED = ("build/*", "benchmarks/benchmark*.py")
INTERFACE = "build/*/interface.json"
STEPS = 6


@dataclass
class Project:
    """What build.toml says."""

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
    """A build that may be published, and what goes with it."""

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
    """What one commit shall do to a branch."""

    branch: str
    parent: str | None  # the commit it starts from; None if the branch has to be made
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
        """A line for each file that the commit touches."""
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
            f"--repo-id: expected ORG/NAME, found {repo_id!r}; build.toml may name one under general.hub"
        )
    package = build_kernel.kernels_rust().KernelName(general["name"]).python_name
    return Project(general["name"], general["version"], repo_id, general, package)


def check_tree(root: Path, commit: str | None) -> None:
    """Raises unless there is a commit to publish and nothing that git shows as changed, which was meant to be in it."""
    if commit is None:
        raise CommandError(f"{root}: no commit to publish; --allow-dirty publishes it all the same")
    changed = []
    for command in (
        ("diff", "--name-only", "HEAD"),
        ("ls-files", "--others", "--exclude-standard", "--", "torch-ext", "benchmarks"),
    ):
        paths = build_kernel.git(root, *command)
        if paths is None:
            raise CommandError(f"git {command[0]} fails in {root}, so what is committed is not known")
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
    """Writes the files of a commit, as git stores them."""
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


def fresh_build(source: Path, unique_id: str | None, output: Path) -> dict[str, bytes]:
    """What the project in `source` builds, by its own program."""
    command = [sys.executable, source / "scripts/build_kernel.py", "--output", output]
    command += ["--unique-id", unique_id] if unique_id else []
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CommandError(f"the project does not build: {reason.removeprefix('build_kernel: error: ')}")
    return folder_files(output, "build")


def read_build(build: Path) -> dict[str, bytes]:
    """The files of a build by their path on the branch."""
    if not build.is_dir():
        raise CommandError(f"--build: {build} is no folder; `make build` makes one")
    files = folder_files(build, "build")
    for variant in sorted(build.glob("torch-*")):
        violations = check_variant(variant).violations
        if violations:
            raise CommandError(f"{variant}: {'; '.join(violations)}")
    return files


def compare_builds(build: Path, found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    """Raises unless `build` is what is going to be published: what was tried out here is what others get."""
    compare_ids(found, expected)
    for path in sorted(found.keys() | expected.keys()):
        if path not in found:
            raise CommandError(f"{build}: {path} is missing; `make build` makes it")
        if path not in expected:
            raise CommandError(f"{build}: {path} does not belong to the build; `make build` makes a clean one")
        if found[path] != expected[path]:
            raise CommandError(f"{build}: {path} is not what the project builds; run `make build`")


def folder_files(folder: Path, prefix: str) -> dict[str, bytes]:
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise CommandError(f"{folder}: {name} is a link, and links do not ship")
        if path.suffix == ".pyc":
            raise CommandError(f"{folder}: {name} is bytecode; `make build` makes a clean build")
        if path.is_file():
            files[f"{prefix}/{name}"] = path.read_bytes()
    return files


def compare_ids(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    """The usual reason for a difference, an old build, said by the ids rather than by the first file that differs."""
    for path in sorted(found.keys() & expected.keys()):
        ids = [re.search(rb'_OPS_NAME = "(\w+)"', files[path]) for files in (found, expected)]
        if not path.endswith("/_ops.py") or None in ids or ids[0][1] == ids[1][1]:
            continue
        built, wanted = (each[1].decode() for each in ids)
        if built != f"{wanted}_dirty":
            raise CommandError(f"the build is {built}, the project is at {wanted}; run `make build`")
        differing = [each for each in sorted(found.keys() | expected.keys()) if found.get(each) != expected.get(each)]
        sources = [each for each in differing if each.split("/")[-1] not in build_kernel.GENERATED]
        raise CommandError(
            f"the build is not of the commit's own files, {(sources or differing)[0]} for one; run `make build`, and if it "
            "stays so: git ignores the file, takes it for unchanged or converts its line ends in the work tree"
        )


# What the Hub holds


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """Around a call of huggingface_hub, which takes an answer apart without looking whether it has the parts."""
    try:
        yield
    except OSError:  # Among them what huggingface_hub says itself.
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CommandError(f"the Hub's answer is not understood, {what}: {type(error).__name__}: {error}") from error


def remote_branches(api: HfApi, repo_id: str) -> dict[str, str] | None:
    """Branch -> commit; None if there is no repository."""
    try:
        with understood(f"asked for the branches of {repo_id}"):
            refs = api.list_repo_refs(repo_id, repo_type="kernel")
            branches = {branch.name: branch.target_commit for branch in refs.branches}
            # Without one a branch would pass for new, and what it promises would not be looked at.
            if not all(isinstance(commit, str) and commit for commit in branches.values()):
                raise ValueError("a branch without a commit")
    except RepositoryNotFoundError:
        return None
    return branches


def remote_files(api: HfApi, repo_id: str, commit: str) -> dict[str, RepoFile]:
    """The files of a commit by path."""
    with understood(f"asked for the files of {repo_id}@{commit}"):
        listing = api.list_repo_tree(repo_id, repo_type="kernel", revision=commit, recursive=True)
        return {entry.path: entry for entry in listing if isinstance(entry, RepoFile)}


def newest_version(branches: dict[str, str]) -> int:
    return max((int(name[1:]) for name in branches if re.fullmatch(r"v\d+", name)), default=0)


def make_plan(api: HfApi, repo_id: str, branch: str, parent: str | None, wanted: dict[str, bytes], owned) -> Plan:
    """Compares what the branch holds with `wanted`; files that match `owned` and are not wanted are stale."""
    remote = {} if parent is None else remote_files(api, repo_id, parent)
    changed = {
        path: content for path, content in wanted.items() if path in remote and not same_content(content, remote[path])
    }
    added = {path: content for path, content in wanted.items() if path not in remote}
    stale = (path for path in remote if path not in wanted and any(fnmatch.fnmatch(path, each) for each in owned))
    return Plan(branch, parent, added, changed, sorted(stale), len(wanted) - len(added) - len(changed))


def plan_version(api: HfApi, release: Release, head: str | None) -> Plan:
    """What one commit shall do to the version's branch at `head`, and nowhere else: with that it has been compared."""
    project = release.project
    plan = make_plan(api, project.repo_id, project.branch, head, release.files, PUBLISHED)
    if head is not None and not plan.is_empty:
        check_compatible(api, release, head)
    return plan


def check_compatible(api: HfApi, release: Release, head: str) -> None:
    """Raises if a user of this version loses a name or finds another signature."""
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
            f"branch {project.branch} promises what this build breaks: {'; '.join(breaks[:10])}{more}; "
            f"raise `version` in build.toml (now {project.version}) to publish it"
        )


def compare_interfaces(published: Path, ours: dict) -> list[str]:
    try:
        return interface.breaks(json.loads(published.read_bytes()), ours)
    except (LookupError, TypeError, ValueError):
        raise CommandError(
            f"build/{published.parent.name}/interface.json on the Hub is not what a build writes"
        ) from None


# Builds of before interface.json: their source is read, never run


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
        raise CommandError(
            f"the public names cannot be read from the source: {type(error).__name__}: {error}"
        ) from error
    old, new = (dict(signatures(each)) for each in interfaces)
    # Whatever griffe forgives, an optional parameter more, say: a version has one signature.
    breaks |= {f"{path}{old[path]}: now {new[path]}" for path in old.keys() & new.keys() if old[path] != new[path]}
    return sorted(breaks)


def public_interface(package: Path) -> griffe.Object:
    """What `__all__` of a package names, read from its source."""
    interface = griffe.load(package.name, search_paths=[package.parent], allow_inspection=False, resolve_aliases=True)
    for name in set(interface.members) - set(interface.exports or ()):
        del interface.members[name]
    return interface


def signatures(owner: griffe.Object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, parameters) of every public function and method, without annotations."""
    for name, member in owner.members.items():
        # Below the package an alias is something imported.
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
    """Everything about the build that can be checked without the Hub."""
    found = read_build(build)
    step("building what is committed")
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
        files = fresh_build(tree, unique_id, Path(scratch, "build"))
        step("comparing the build with it")
        compare_builds(build, found, files)
        files.update({f"benchmarks/{path.name}": path.read_bytes() for path in tree.glob("benchmarks/benchmark*.py")})
        release = Release(project, build, files, b"", origin)
        has_benchmark = any(path.startswith("benchmarks/") for path in files)
        release.card = render_card(tree, project, release.interface["names"], has_benchmark).encode()
    return release


def upload(
    api: HfApi, release: Release, branches: dict[str, str] | None, dry_run: bool, step: Callable[[str], None]
) -> list[str]:
    """Brings the Hub, which has `branches`, to what `release` holds; a line on each branch."""
    project, repo_id, branch = release.project, release.project.repo_id, release.project.branch

    def plans(heads: dict[str, str]) -> list[Plan]:
        # Of two versions the newer one has the card.
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
        # What is new holds something already: a branch what main did or what another publisher has sent meanwhile, a
        # repository its .gitattributes.
        heads = remote_branches(api, repo_id) or {}
        missing = {branch, "main"} - heads.keys()
        if missing:
            raise CommandError(f"{repo_id}: made, but the Hub does not list {', '.join(sorted(missing))}; run it again")
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
                f"{error.response.status_code}); organisations have to be admitted as kernel publishers first"
            ) from None
        raise


def send(api: HfApi, repo_id: str, plan: Plan, message: str) -> str:
    """One commit with all of the plan; the commit the branch is at afterwards."""
    if plan.is_empty:
        return plan.parent
    operations = [CommitOperationAdd(path, content) for path, content in {**plan.added, **plan.changed}.items()]
    operations += [CommitOperationDelete(path, is_folder=False) for path in plan.deleted]
    try:
        # Named as parent, the commit of the plan makes the Hub refuse if another publisher was faster.
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
            raise CommandError(f"{repo_id}: branch {plan.branch} was changed meanwhile; run it again") from None
        raise
    return done.oid


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build", metavar="DIR", help="(default: build/)")
    parser.add_argument("--repo-id", metavar="ORG/NAME", help="where to (default: repo-id in build.toml)")
    parser.add_argument("--dry-run", action="store_true", help="check everything, show what would change, send nothing")
    parser.add_argument(
        "--allow-dirty", action="store_true", help="publish uncommitted changes too; nobody can build that again"
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
        print(f"{release.project.repo_id} at {api.endpoint}{': what would be sent' if options.dry_run else ''}")
        for line in lines:
            print(" ", line)

    return exit_status("publish", command)


if __name__ == "__main__":
    sys.exit(main())
