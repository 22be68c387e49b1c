"""`scripts/publish.py` against a Hub on this machine, with the real client."""

import json
import os
import re
import shutil
import signal
import time

import httpx2
import pytest
from command import one_line
from hub import client, local_hub, publish, release_of, upload, upload_process
from huggingface_hub import CommitOperationAdd
from projects import PACKAGE, REPO_ID, ROOT, commit, contents, git, run, script


def files_on(hub, branch, folder):
    """Path -> content of a branch."""
    api = client(hub)
    api.snapshot_download(REPO_ID, repo_type="kernel", revision=branch, local_dir=folder / branch)
    return {name: content for name, content in contents(folder / branch).items() if not name.startswith(".")}


def heads(hub):
    refs = client(hub).list_repo_refs(REPO_ID, repo_type="kernel")
    return {branch.name: branch.target_commit for branch in refs.branches}


def held(hub, branch):
    """Path -> blob id of a branch's files."""
    listing = client(hub).list_repo_tree(REPO_ID, repo_type="kernel", revision=branch, recursive=True)
    return {entry.path: entry.blob_id for entry in listing if hasattr(entry, "blob_id")}


def change(project, name, old, new):
    """Replaces what the regular expression `old` matches."""
    text, count = re.subn(old, new, (project / name).read_text())
    assert count
    (project / name).write_text(text)


@pytest.fixture
def empty(tmp_path):
    with local_hub.serve(tmp_path / "empty-hub") as hub:
        yield hub


@pytest.fixture
def hub(published, tmp_path):
    """Holds version 1."""
    with published.serve(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def project(published, tmp_path):
    """The published project with its build, to be changed."""
    return published.copy_project(tmp_path / "project")


# What is sent


def test_a_dry_run_the_first_time_and_once_more(project, empty, tmp_path):
    (project / "benchmarks").mkdir()
    (project / "benchmarks/benchmark_norm.py").write_text("# times\n")
    (project / "benchmarks/notes.md").write_text("not for the Hub\n")
    commit(project)
    release = release_of(project)

    plan, card = upload(empty, release, dry_run=True)
    assert "v1 (new)" in plan and "+ build/torch-cuda/layers.py" in plan and "+ README.md" in card
    assert publish.remote_branches(client(empty), REPO_ID) is None

    plan, card = upload(empty, release)
    assert plan.endswith(f"commit {heads(empty)['v1']}") and card.endswith(f"commit {heads(empty)['main']}")
    expected = {f"build/{name}": content for name, content in contents(project / "build").items()}
    expected["benchmarks/benchmark_norm.py"] = b"# times\n"
    assert files_on(empty, "v1", tmp_path) == expected
    card = files_on(empty, "main", tmp_path)
    assert list(card) == ["README.md"]
    assert f'get_kernel("{REPO_ID}", version=1' in card["README.md"].decode()
    log = run(["git", "log", "--format=%s", "v1"], empty.repositories.root / f"{REPO_ID}.git").stdout
    assert log.splitlines()[0] == f"lossless-kernels v1, built from {git(project, 'rev-parse', 'HEAD')}"

    before, requests = heads(empty), len(empty.requests)
    assert ["nothing to do" in line for line in upload(empty, release)] == [True, True]
    assert heads(empty) == before
    assert not [request for request in empty.requests[requests:] if request.startswith("POST")]


def test_stale_files_go_in_the_same_commit(hub, project):
    api = client(hub)
    strangers = {"build/torch-cuda/old.py": b"old", "benchmarks/benchmark_old.py": b"old", "notes.txt": b"stays"}
    additions = [CommitOperationAdd(path, content) for path, content in strangers.items()]
    api.create_commit(REPO_ID, additions, commit_message="older", repo_type="kernel", revision="v1")
    change(project, f"{PACKAGE}/layers.py", "import torch\n", "import torch  # changed\n")
    commit(project)
    older = heads(hub)["v1"]
    release = release_of(project)
    upload(hub, release)
    parents = run(["git", "rev-parse", "v1^"], hub.repositories.root / f"{REPO_ID}.git").stdout.strip()
    assert parents == older
    assert set(held(hub, "v1")) == {*release.files, "notes.txt", ".gitattributes"}


def test_a_second_version_has_a_branch_of_its_own_and_the_card(hub, project, published):
    first, old_card = heads(hub), held(hub, "main")["README.md"]
    change(project, "build.toml", "version = 1", "version = 2")
    commit(project)
    release = release_of(project)
    upload(hub, release)
    assert heads(hub)["v1"] == first["v1"]
    assert {path for path in held(hub, "v2") if path.startswith("build/")} == set(release.files)
    assert held(hub, "main")["README.md"] != old_card
    # A repair of version 1 leaves the card of version 2.
    card = held(hub, "main")["README.md"]
    upload(hub, published.release)
    assert held(hub, "main")["README.md"] == card


def test_someone_else_publishes_meanwhile(hub, published, monkeypatch):
    api, release = client(hub), published.release
    plan = publish.make_plan(api, REPO_ID, "v1", heads(hub)["v1"], {**release.files, "build/new.py": b"new"}, ())
    api.create_commit(
        REPO_ID, [CommitOperationAdd("a.txt", b"")], commit_message="other", repo_type="kernel", revision="v1"
    )
    before = heads(hub)
    with pytest.raises(publish.CommandError, match="v1 was changed meanwhile"):
        publish.send(api, REPO_ID, plan, "message")
    assert heads(hub) == before


# What is refused, before anything is sent


def refused(project, *arguments):
    """The one line with which the command refuses. No Hub is there to be asked."""
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "local"}
    done = script(project, "publish", *arguments, **nowhere)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("publish: error: ")
    return done.stderr


def edit_build(name, content):
    def edit(project):
        path = project / "build" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    return edit


def same_length(project):
    path = project / "build/torch-cuda/layers.py"
    path.write_bytes(path.read_bytes()[:-1] + b" ")


def rewritten(project):
    """Another file, and a digest that agrees with it."""
    variant = project / "build/torch-cuda"
    (variant / "layers.py").write_bytes((variant / "layers.py").read_bytes() + b"evil = 1\n")
    metadata = json.loads((variant / "metadata.json").read_text())
    rust = publish.build_kernel.kernels_rust()
    digest = rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant)
    metadata["digest"]["files"] = dict(sorted(digest.files.items()))
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def link(project):
    (project / "build/torch-cpu/more.py").symlink_to("layers.py")


def tracked(project):
    with open(project / "build.toml", "a") as file:
        file.write("# changed\n")


def untracked(project):
    (project / PACKAGE / "new.py").write_text("")


def next_commit(project):
    tracked(project)
    commit(project)


REFUSALS = {
    "no build": (lambda project: shutil.rmtree(project / "build"), "build is no folder"),
    "a file more": (edit_build("torch-cpu/notes.txt", b""), "torch-cpu.*notes.txt"),
    "a folder more": (edit_build("notes/notes.txt", b""), "notes/notes.txt does not belong"),
    "a variant less": (lambda project: shutil.rmtree(project / "build/torch-rocm"), "torch-rocm/.* is missing"),
    "bytecode": (edit_build("torch-cpu/__pycache__/layers.cpython-311.pyc", b""), "is bytecode"),
    "link": (link, "more.py is a link"),
    "same length": (same_length, "torch-cuda.*mismatch for layers.py"),
    "rewritten": (rewritten, "torch-cuda/layers.py is not what the project builds"),
    "metadata": (edit_build("torch-cpu/metadata.json", b"{"), "torch-cpu: Cannot parse metadata"),
    "tracked change": (tracked, "uncommitted changes: build.toml"),
    "untracked file": (untracked, "uncommitted changes: .*new.py"),
    "another commit": (next_commit, "the build comes from [0-9a-f]{7}, the project is at [0-9a-f]{7}"),
    "no git": (lambda project: shutil.rmtree(project / ".git"), "no commit to publish"),
}


@pytest.mark.parametrize(("make", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_no_clean_build_is_refused(project, make, message):
    make(project)
    with pytest.raises(publish.CommandError, match=message):
        publish.prepare(project, project / "build", None, False, lambda step: None)


def test_a_refusal_is_one_line(project):
    assert "found 'noslash'" in refused(project, "--repo-id", "noslash")
    assert "--repo-id: expected ORG/NAME, found ''" in refused(project, "--repo-id", "")
    tracked(project)
    assert "uncommitted changes: build.toml" in refused(project, "--dry-run")


def test_a_public_name_that_cannot_be_imported(project):
    change(project, f"{PACKAGE}/__init__.py", r"__all__ = \[", '__all__ = ["nowhere", ')
    commit(project)
    script(project, "build_kernel")
    with pytest.raises(publish.CommandError, match="torch-cpu: __all__ names nowhere, which it does not have"):
        publish.check_loads(project / "build")


def test_uncommitted_changes_may_be_asked_for(project, hub):
    tracked(project)
    release = release_of(project, allow_dirty=True)
    assert release.source.endswith("with uncommitted changes")
    upload(hub, release)
    assert json.loads(release.files["build/torch-cpu/metadata.json"])["id"].endswith("_dirty")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("__init__.py", r'"silu",?', "", "silu"),
        ("activation.py", r"def silu\(input", "def silu(x", r"silu\(input\): .*removed"),
        (
            "activation.py",
            r"def silu\(input: torch.Tensor",
            "def silu(input, out=None",
            r"silu\(input\): now \(input, out=None\)",
        ),
        ("mapping.py", r"version: Optional\[int\] = None", "version: int = 2", r"kernel_mapping\(version\)"),
        ("layers.py", r"class SiLUActivation\b", "class SiLU", "layers.SiLUActivation"),
        (
            "layers.py",
            r"def forward\(self, hidden_states",
            "def forward(self, x",
            r"LlamaRMSNorm.forward\(hidden_states\)",
        ),
    ],
    ids=["name", "argument", "optional argument", "default", "layer", "forward"],
)
def test_what_others_rely_on_needs_a_new_version(project, hub, name, old, new, message):
    change(project, f"{PACKAGE}/{name}", old, new)
    commit(project)
    release = release_of(project)
    before, requests = heads(hub), len(hub.requests)
    with pytest.raises(publish.CommandError, match=f"branch v1 promises.*{message}.*raise `version`"):
        upload(hub, release)
    assert heads(hub) == before
    assert not [request for request in hub.requests[requests:] if request.startswith("POST")]


def test_what_is_added_needs_no_new_version(project, hub):
    change(project, f"{PACKAGE}/layers.py", r"\Z", "\n\nclass Another(nn.Module): ...\n")
    # Not in __all__.
    change(project, f"{PACKAGE}/proof.py", r"def policy\(", "def policy(required")
    commit(project)
    upload(hub, release_of(project), dry_run=True)


# When the Hub fails


def test_no_hub(project):
    assert "the Hub at 127.0.0.1:9 does not answer" in refused(project)


def test_kernel_repositories_may_not_be_created(published, empty):
    empty.faults.append(local_hub.Fault("POST /api/repos/create", 403))
    with pytest.raises(publish.CommandError, match="does not let this token create a kernel repository .HTTP 403"):
        upload(empty, published.release)
    assert publish.remote_branches(client(empty), REPO_ID) is None


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("branch/v1", 500),
        ("branch/v1", "reset"),
        ("commit/v1", 500),
        ("commit/v1", 404),
        ("commit/v1", "reset"),
        ("commit/v1", "truncate"),
        ("commit/main", 500),
    ],
)
def test_a_failing_request_loses_nothing(published, empty, where, what):
    empty.faults.append(local_hub.Fault(f"POST .*{where}", what, times=1))
    with pytest.raises((httpx2.HTTPError, publish.CommandError)) as caught:
        upload(empty, published.release)
    assert "\n" not in one_line(caught.value)
    # Where only the answer was lost the commit is there, and then it is whole.
    if heads(empty).get("v1") and any(path.startswith("build/") for path in held(empty, "v1")):
        assert set(held(empty, "v1")) == {*published.release.files, ".gitattributes"}
    upload(empty, published.release)
    assert set(held(empty, "v1")) == {*published.release.files, ".gitattributes"}
    assert "README.md" in held(empty, "main")


@pytest.mark.parametrize(
    ("where", "what", "there"),
    [
        ("POST .*branch/v1", "slow", None),
        ("POST .*commit/v1", "slow", "old"),
        ("POST .*commit/v1", "late", "new"),
    ],
)
def test_killed(published, empty, tmp_path, where, what, there):
    """kill -9 while a request is under way: the branch is the old one or the new one, and the next run completes it."""
    fault = local_hub.Fault(where, what, seconds=600)
    empty.faults.append(fault)
    process = upload_process(empty, published.release, tmp_path)
    deadline = time.monotonic() + 60
    while not (fault.met and (what == "slow" or fault.served)) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    whole = {*published.release.files, ".gitattributes"}
    found = set(held(empty, "v1")) if "v1" in heads(empty) else None
    assert found == {None: None, "old": {".gitattributes"}, "new": whole}[there]
    empty.faults.clear()
    upload(empty, published.release)
    assert set(held(empty, "v1")) == whole
    assert "README.md" in held(empty, "main")


# The card


def test_card(published):
    """What kernel-builder's template engine would render, with nothing left open."""
    card = published.release.card.decode()
    assert "{{" not in card and "{%" not in card
    for name in ("LlamaRMSNorm", "SiLUActivation", "kernel_mapping", "rms_norm", "silu"):
        assert f"`{name}`" in card
    for backend in ("cuda", "rocm", "cpu"):
        assert f"`{backend}`" in card


def test_figures_of_the_card_are_those_of_the_readme():
    readme, card = (ROOT / "README.md").read_text(), (ROOT / "CARD.md").read_text()
    rows = [line for line in card.splitlines() if re.match(r"\| (baseline|only|both|all)", line)]
    assert len(rows) == 5
    for row in rows:
        assert row in readme
    assert re.search(r"NVIDIA H200.*torch 2\.11.*Triton 3\.6", card, re.DOTALL)


@pytest.mark.parametrize(
    ("name", "missing"), [("publish", "griffe"), ("vendor", "httpx2"), ("verify", "httpx2"), ("local_hub", "uvicorn")]
)
def test_a_package_that_is_not_installed(tmp_path, name, missing):
    message = f"No module named {missing!r}"
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError({message!r})")
    done = script(ROOT, name, PYTHONPATH=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{name}: error: {message}: pip install -r requirements.txt\n"


def test_help():
    for name in ("publish", "vendor", "verify", "local_hub"):
        done = script(ROOT, name, "--help")
        assert done.returncode == 0
        assert len(done.stdout.splitlines()) > 10
