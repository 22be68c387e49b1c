"""`scripts/local_hub.py`: what the other tests stand on, asked by the real client and by plain HTTP."""

import http.client
import json
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from hub import client, local_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from projects import ROOT, script

FILES = {"build/torch-cpu/__init__.py": b"one\n", "build/torch-cpu/sub/two.py": b"two\n" * 1000}


@pytest.fixture
def hub(tmp_path):
    with local_hub.serve(tmp_path / "hub", trusted=["org"]) as hub:
        yield hub


@pytest.fixture
def api(hub):
    """A client; the repository org/name holds FILES on branch v1."""
    api = client(hub)
    api.create_repo("org/name", repo_type="kernel")
    api.create_branch("org/name", repo_type="kernel", branch="v1")
    commit(api, *(CommitOperationAdd(path, content) for path, content in FILES.items()))
    return api


def commit(api, *operations, branch="v1", **options):
    return api.create_commit(
        "org/name", operations, commit_message="message", repo_type="kernel", revision=branch, **options
    )


def listing(api, revision="v1"):
    entries = api.list_repo_tree("org/name", repo_type="kernel", revision=revision, recursive=True)
    return {entry.path for entry in entries}


def heads(api):
    refs = api.list_repo_refs("org/name", repo_type="kernel")
    return {branch.name: branch.target_commit for branch in refs.branches}


def status(hub, path, method="GET", body=None):
    """The answer to a path exactly as written, which HTTP clients would tidy up."""
    connection = http.client.HTTPConnection(urlsplit(hub.url).netloc)
    connection.request(method, path, body)
    return connection.getresponse().status


def test_a_commit_is_what_git_says_it_is(hub, api):
    head = heads(api)["v1"]
    repository = hub.repositories.root / "org/name.git"
    assert subprocess.run(["git", "fsck", "--strict"], cwd=repository, capture_output=True).returncode == 0
    for path, content in FILES.items():
        shown = subprocess.run(["git", "show", f"{head}:{path}"], cwd=repository, capture_output=True)
        assert shown.stdout == content
    assert listing(api) == {".gitattributes", "build", "build/torch-cpu", "build/torch-cpu/sub", *FILES}
    assert listing(api, "main") == {".gitattributes"}


def test_changes_and_deletions_are_one_commit(api):
    commit(
        api,
        CommitOperationDelete("build/torch-cpu/", is_folder=True),
        CommitOperationAdd("build/torch-cuda/new.py", b"new"),
    )
    assert listing(api) == {".gitattributes", "build", "build/torch-cuda", "build/torch-cuda/new.py"}
    before = heads(api)
    same = commit(api, CommitOperationAdd("build/torch-cuda/new.py", b"new"))
    assert heads(api) == before == {**before, "v1": same.oid}


def test_a_commit_on_an_old_parent_is_refused(api):
    old = heads(api)["v1"]
    commit(api, CommitOperationAdd("a.txt", b"a"), parent_commit=old)
    with pytest.raises(HfHubHTTPError, match="412"):
        commit(api, CommitOperationAdd("b.txt", b"b"), parent_commit=old)
    assert "b.txt" not in listing(api)


def test_download(api, tmp_path):
    path = api.snapshot_download("org/name", repo_type="kernel", revision="refs/heads/v1", cache_dir=tmp_path / "cache")
    for name, content in FILES.items():
        assert (tmp_path / "cache" / path / name).read_bytes() == content


def test_what_is_not_there(api):
    for repo_id, revision, filename, error in (
        ("org/other", "v1", "build/torch-cpu/__init__.py", RepositoryNotFoundError),
        ("org/name", "v2", "build/torch-cpu/__init__.py", RevisionNotFoundError),
        ("org/name", "0" * 40, "build/torch-cpu/__init__.py", RevisionNotFoundError),
        ("org/name", "v1", "build/torch-cpu/three.py", EntryNotFoundError),
        ("org/name", "v1", "build/torch-cpu", EntryNotFoundError),
    ):
        with pytest.raises(error):
            api.hf_hub_download(repo_id, filename, repo_type="kernel", revision=revision)
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch("org/name", repo_type="kernel", branch="v1")
    assert api.get_organization_overview("org").trustedKernelPublisher is True
    assert api.get_organization_overview("other").trustedKernelPublisher is False


def test_paths_stay_inside_the_folder(hub, api, tmp_path):
    (tmp_path / "secret").write_text("secret")
    for path in (
        "/api/kernels/org/..%2F..%2Fsecret/refs",
        "/api/kernels/../../secret",
        "/api/kernels/..%2F..%2Fhub%2Forg/name/refs",
        "/api/kernels/org/name%00/refs",
        "/api/kernels/org/name/revision/..%2F..%2FHEAD",
        "/kernels/org/name/resolve/v1/../../../../secret",
        "/kernels/org/name/resolve/v1/..%2F..%2Fconfig",
        "/kernels/org/name/resolve/..%2F..%2Fconfig/description",
        "/kernels/org/name/resolve/v1//etc/passwd",
    ):
        assert status(hub, path) == 404, path
    for name in ("../evil", "..", "a/../../evil", ".hidden", "name.git", "", "a" * 200):
        body = json.dumps({"type": "kernel", "organization": "org", "name": name})
        assert status(hub, "/api/repos/create", "POST", body) == 400, name
    for path in ("../evil", "/etc/evil", ".git/config", "a//b", ""):
        line = json.dumps({"key": "file", "value": {"path": path, "content": "", "encoding": "base64"}})
        assert status(hub, "/api/kernels/org/name/commit/v1", "POST", line) == 400, path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub", "secret"]
    assert [path.name for path in (tmp_path / "hub").rglob("*.git")] == ["name.git"]


@pytest.mark.parametrize("body", ["", "{", "[]", '{"key": "header"}', '{"key": "file", "value": {}}', '{"key": "x"}'])
def test_malformed_requests_are_refused(hub, api, body):
    before = heads(api)
    for path in ("/api/repos/create", "/api/kernels/org/name/commit/v1", "/api/kernels/org/name/preupload/v1"):
        assert status(hub, path, "POST", body) in (200, 400), path
    if body:
        assert heads(api) == before


def test_only_the_loopback_interface_is_bound(hub):
    assert urlsplit(hub.url).hostname == "127.0.0.1"


def test_runs_a_command(tmp_path):
    code = "import os; from huggingface_hub import HfApi; HfApi().create_repo('org/name', repo_type='kernel'); exit(7)"
    done = script(ROOT, "local_hub", "--root", tmp_path / "hub", sys.executable, "-c", code)
    assert (done.returncode, done.stderr) == (7, "")
    assert (tmp_path / "hub/org/name.git").is_dir()
    done = script(ROOT, "local_hub", "--root", tmp_path / "hub", "/nowhere/command")
    assert done.returncode == 1
    assert done.stderr == "local_hub: error: /nowhere/command: No such file or directory\n"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--root", "README.md", "expected a folder, found the file README.md"),
        ("--port", "70000", "expected a number from 0 to 65535, found 70000"),
        ("--port", "-1", "expected a number from 0 to 65535, found -1"),
        ("--trust", "a/b", "expected an organisation such as lossless-kernels, found 'a/b'"),
    ],
)
def test_wrong_arguments_are_named(option, value, message):
    done = script(ROOT, "local_hub", option, value, "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"local_hub.py: error: {option}: {message}\n")


def test_a_port_that_is_taken(hub):
    done = script(ROOT, "local_hub", "--port", urlsplit(hub.url).port)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "in use" in done.stderr
