#!/usr/bin/env python3
"""Publish the built kernel to the Hub: the build to branch v<version>, the card to main, each in one commit.

The build must be what the current commit builds, byte for byte, load, and keep every public name and signature that its
branch already has: people load `version=1` and get whatever the branch holds. An incompatible change takes a new
`version` in build.toml, and so a new branch.

A repeated run changes nothing. A run that was interrupted at any point leaves the branch as it was or as it should be;
run it again. HF_TOKEN and HF_ENDPOINT are those of huggingface_hub.
"""

import argparse
import ast
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import build_kernel
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
STEPS = 7

LOADS_PY = """
import sys
from pathlib import Path
from kernels import get_local_kernel

for folder in sys.argv[1:]:
    kernel = get_local_kernel(Path(folder))
    missing = [name for name in kernel.__all__ if not hasattr(kernel, name)]
    if missing:
        sys.exit(f"{folder}: __all__ names {', '.join(missing)}, which it does not have")
"""


@dataclass
class Project:
    """What build.toml says."""

    name: str
    version: int
    repo_id: str
    general: dict
    package: Path

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
    package = root / "torch-ext" / build_kernel.kernels_rust().KernelName(general["name"]).python_name
    return Project(general["name"], general["version"], repo_id, general, package)


def check_tree(root: Path, allow_dirty: bool) -> str:
    """Where the build comes from. It must be a commit: with changes nobody could build again what was published."""
    commit = build_kernel.git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    if commit is None:
        if allow_dirty:
            return "no commit"
        raise CommandError(f"{root}: no commit to publish; --allow-dirty publishes it all the same")
    changed = build_kernel.git(root, "diff", "--name-only", "HEAD").splitlines()
    # These would be built or uploaded although no commit has them.
    changed += build_kernel.git(
        root, "ls-files", "--others", "--exclude-standard", "--", "torch-ext", "benchmarks"
    ).splitlines()
    if changed and not allow_dirty:
        raise CommandError(
            f"uncommitted changes: {', '.join(changed)}; commit them, or publish them with --allow-dirty"
        )
    return f"{commit}, with uncommitted changes" if changed else commit


def check_build(root: Path, build: Path) -> dict[str, bytes]:
    """The files of the build by their path on the branch, once they are known to be what this project builds."""
    if not build.is_dir():
        raise CommandError(f"--build: {build} is no folder; `make build` makes one")
    found = folder_files(build, "build")
    for variant in sorted(build.glob("torch-*")):
        violations = check_variant(variant).violations
        if violations:
            raise CommandError(f"{variant}: {'; '.join(violations)}")
    with tempfile.TemporaryDirectory(prefix="publish-") as scratch:
        fresh = Path(scratch, "build")
        try:
            build_kernel.build(root, fresh, None, None, quiet=True)
        except build_kernel.BuildError as error:
            raise CommandError(f"the project does not build: {error}") from None
        expected = folder_files(fresh, "build")
    compare_ids(found, expected)
    for path in sorted(found.keys() | expected.keys()):
        if path not in found:
            raise CommandError(f"{build}: {path} is missing; `make build` makes it")
        if path not in expected:
            raise CommandError(f"{build}: {path} does not belong to the build; `make build` makes a clean one")
        if found[path] != expected[path]:
            raise CommandError(f"{build}: {path} is not what the project builds; run `make build`")
    return found


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

    def unique_id(files):
        for path, content in files.items():
            if path.endswith("/_ops.py"):
                return content.split(b'"')[1].decode().split("_", 4)[-1]
        raise CommandError("the build holds no variant; run `make build`")

    built, wanted = unique_id(found), unique_id(expected)
    if built != wanted:
        raise CommandError(f"the build comes from {built}, the project is at {wanted}; run `make build`")


def check_loads(build: Path) -> None:
    """Every variant must import, and have every name of its `__all__`. A process of its own does it."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    variants = map(str, sorted(build.glob("torch-*")))
    done = subprocess.run([sys.executable, "-c", LOADS_PY, *variants], env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CommandError(f"the build does not load: {reason}")


# What the Hub holds


def remote_branches(api: HfApi, repo_id: str) -> dict[str, str] | None:
    """Branch -> commit; None if there is no repository."""
    try:
        refs = api.list_repo_refs(repo_id, repo_type="kernel")
    except RepositoryNotFoundError:
        return None
    return {branch.name: branch.target_commit for branch in refs.branches}


def newest_version(branches: dict[str, str]) -> int:
    return max((int(name[1:]) for name in branches if re.fullmatch(r"v\d+", name)), default=0)


def make_plan(api: HfApi, repo_id: str, branch: str, parent: str | None, wanted: dict[str, bytes], owned) -> Plan:
    """Compares what the branch holds with `wanted`; files that match `owned` and are not wanted are stale."""
    remote = {}
    if parent is not None:
        listing = api.list_repo_tree(repo_id, repo_type="kernel", revision=parent, recursive=True)
        remote = {entry.path: entry for entry in listing if isinstance(entry, RepoFile)}
    changed = {
        path: content for path, content in wanted.items() if path in remote and not same_content(content, remote[path])
    }
    added = {path: content for path, content in wanted.items() if path not in remote}
    stale = (path for path in remote if path not in wanted and any(fnmatch.fnmatch(path, each) for each in owned))
    return Plan(branch, parent, added, changed, sorted(stale), len(wanted) - len(added) - len(changed))


def check_compatible(api: HfApi, project: Project, head: str, build: Path) -> None:
    """Nobody who loads this version may lose a name or find another signature. The published code is read, never run."""
    listing = api.list_repo_tree(project.repo_id, repo_type="kernel", revision=head, recursive=True)
    variant = next((entry.path.split("/")[1] for entry in listing if fnmatch.fnmatch(entry.path, "build/*/*.py")), None)
    if variant is None:
        return
    with tempfile.TemporaryDirectory(prefix="publish-") as scratch:
        published = api.snapshot_download(
            project.repo_id,
            repo_type="kernel",
            revision=head,
            allow_patterns=f"build/{variant}/*",
            cache_dir=Path(scratch, "cache"),
        )
        ours = build / variant if (build / variant).is_dir() else next(build.glob("torch-*"))
        interfaces = [
            public_interface(Path(shutil.copytree(folder, Path(scratch, name, project.package.name))))
            for name, folder in (("old", Path(published, "build", variant)), ("new", ours))
        ]
        breaks = {describe(each) for each in griffe.find_breaking_changes(*interfaces)}
        old, new = (dict(signatures(interface)) for interface in interfaces)
        # Whatever griffe forgives, an optional parameter more, say: a version has one signature.
        breaks |= {f"{name}{old[name]}: now {new[name]}" for name in old.keys() & new.keys() if old[name] != new[name]}
    if breaks:
        raise CommandError(
            f"branch {project.branch} promises what this build breaks: {'; '.join(sorted(breaks))}; "
            f"raise `version` in build.toml (now {project.version}) to publish it"
        )


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


def render_card(root: Path, project: Project, has_benchmark: bool) -> str:
    """CARD.md as kernel-builder renders it."""
    init = ast.parse((project.package / "__init__.py").read_text(encoding="utf-8"))
    public = next(
        ast.literal_eval(node.value)
        for node in init.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    layers = ast.parse((project.package / "layers.py").read_text(encoding="utf-8"))
    template = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return template.from_string((root / "CARD.md").read_text(encoding="utf-8")).render(
        repo_id=project.repo_id,
        version=project.version,
        license=project.general["license"].lower(),
        source=project.general.get("source"),
        upstream=project.general.get("upstream"),
        functions=[name for name in public if name != "layers"],
        layers=[node.name for node in layers.body if isinstance(node, ast.ClassDef)],
        has_benchmark=has_benchmark,
    )


# Publishing


def prepare(root: Path, build: Path, repo_id: str | None, allow_dirty: bool, step: Callable[[str], None]) -> Release:
    """Everything about the build that can be checked without the Hub."""
    step("comparing the build with the commit")
    project = read_project(root, repo_id)
    source = check_tree(root, allow_dirty)
    files = check_build(root, build)
    benchmarks = {f"benchmarks/{path.name}": path.read_bytes() for path in root.glob("benchmarks/benchmark*.py")}
    card = render_card(root, project, bool(benchmarks))
    return Release(project, build, {**files, **benchmarks}, card.encode(), source)


def upload(
    api: HfApi, release: Release, branches: dict[str, str] | None, dry_run: bool, step: Callable[[str], None]
) -> list[str]:
    """Brings the Hub, which has `branches`, to what `release` holds; a line on each branch."""
    project, repo_id, branch = release.project, release.project.repo_id, release.project.branch
    heads = branches or {}
    plan = make_plan(api, repo_id, branch, heads.get(branch), release.files, PUBLISHED)
    # Of two versions the newer one has the card.
    card = {} if newest_version(heads) > project.version else {"README.md": release.card}
    card_plan = make_plan(api, repo_id, "main", heads.get("main"), card, ())
    step("comparing public names and signatures")
    if plan.parent and not plan.is_empty:
        check_compatible(api, project, plan.parent, release.build)
    if dry_run:
        return [str(each) + each.details() for each in (plan, card_plan)]

    step("creating repository and branch")
    if branches is None:
        create_repository(api, repo_id)
    if plan.parent is None:
        api.create_branch(repo_id, repo_type="kernel", branch=branch, exist_ok=True)
    if plan.parent is None or card_plan.parent is None:
        # What is new holds something already: a branch what main did, a repository its .gitattributes.
        heads = remote_branches(api, repo_id)
        plan = make_plan(api, repo_id, branch, heads[branch], release.files, PUBLISHED)
        card_plan = make_plan(api, repo_id, "main", heads["main"], card, ())
    step(f"uploading {len(plan.added) + len(plan.changed)} files")
    commit = send(api, repo_id, plan, f"{project.name} v{project.version}, built from {release.source}")
    step("uploading the card")
    card_commit = send(api, repo_id, card_plan, f"Card of {project.name} v{project.version}")
    return [f"{plan}; commit {commit}", f"{card_plan}; commit {card_commit}"]


def create_repository(api: HfApi, repo_id: str) -> None:
    try:
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
        # Named as parent, the commit of the plan makes the Hub refuse if somebody else has published since.
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
            step("loading the build")
            check_loads(release.build)
            lines = upload(api, release, branches, options.dry_run, step)
        print(f"{release.project.repo_id} at {api.endpoint}{': what would be sent' if options.dry_run else ''}")
        for line in lines:
            print(" ", line)

    return exit_status("publish", command)


if __name__ == "__main__":
    sys.exit(main())
