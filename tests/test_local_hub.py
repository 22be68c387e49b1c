"""`scripts/local_hub.py`: what the other tests stand on, asked by the real client and by plain HTTP."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from urllib.parse import urlsplit

import pytest
from dulwich.objects import Blob
from hub import client, local_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from projects import ROOT, SCRIPTS, run, script

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


def status(hub, path, method="GET", body=None, **headers):
    """The answer to a path exactly as written, which HTTP clients would tidy up."""
    with contextlib.closing(http.client.HTTPConnection(urlsplit(hub.url).netloc)) as connection:
        connection.request(method, path, body, headers)
        return connection.getresponse().status


def posted(hub, *lines):
    """The answer to a commit on v1; a line is (key, value)."""
    body = "\n".join(json.dumps({"key": key, "value": value}) for key, value in lines)
    return status(hub, "/api/kernels/org/name/commit/v1", "POST", body)


def added(path):
    return "file", {"path": path, "content": "", "encoding": "base64"}


def fsck(hub):
    repository = hub.repositories.root / "org/name.git"
    return subprocess.run(["git", "fsck", "--strict"], cwd=repository, capture_output=True, text=True)


@contextlib.contextmanager
def started(command, folder):
    """A process of its own group, with `folder` for its temporary files; killed at the end, and after 30 seconds."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **options) as process:

        def kill():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(30, kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            kill()


def test_a_commit_is_what_git_says_it_is(hub, api):
    head = heads(api)["v1"]
    repository = hub.repositories.root / "org/name.git"
    assert fsck(hub).returncode == 0
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
        "/kernels/org/name/resolve/v1/nul%00",
    ):
        assert status(hub, path) == 404, path
    for name in ("../evil", "..", "a/../../evil", ".hidden", "name.git", "", "a" * 200):
        body = json.dumps({"type": "kernel", "organization": "org", "name": name})
        assert status(hub, "/api/repos/create", "POST", body) == 400, name
    for path in ("../evil", "/etc/evil", ".git/config", "a//b", ""):
        assert posted(hub, added(path)) == 400, path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub", "secret"]
    assert [path.name for path in (tmp_path / "hub").rglob("*.git")] == ["name.git"]


def test_what_git_or_a_file_system_cannot_hold_is_refused(hub, api):
    """Whatever is asked, the branch stays readable for the client and for git."""
    before, there = heads(api), listing(api)
    file = "build/torch-cpu/__init__.py"
    paths = ["nul\0", "\0", "a/./b", "a/../b", "a/", "sub/.git", ".GIT/config", "git~1/config", ".git. /config"]
    paths += [".g\u200cit/config", "\ud800", "a" * 256, "a/" * 100 + "b", "/".join(["a" * 250] * 17)]
    for path in (*paths, f"{file}/below", "build"):
        assert posted(hub, added(path)) == 400, path
    assert posted(hub, added("both"), added("both/file")) == 400
    assert posted(hub, added("both/file"), added("both")) == 400
    assert posted(hub, ("header", {"summary": "a\0b"}), added("file")) == 400
    for key in ("deletedFile", "deletedFolder"):
        assert posted(hub, (key, {"path": "nul\0"})) == 400
    for branch in ("v1%2Fbelow", "nul%00", "%0A", "%E6%BC%A2", "a" * 300, "v1.lock"):
        assert status(hub, f"/api/kernels/org/name/branch/{branch}", "POST") == 404, branch
        assert status(hub, f"/api/kernels/org/name/revision/{branch}") == 404, branch
    assert (heads(api), listing(api)) == (before, there)
    # One may take the other's place.
    assert posted(hub, ("deletedFolder", {"path": "build/"}), added("build")) == 200
    assert posted(hub, ("deletedFile", {"path": "build"}), added("build/file")) == 200
    assert listing(api) == {".gitattributes", "build", "build/file"}
    assert fsck(hub).returncode == 0


def test_web_pages_are_refused(hub):
    """A browser sends requests of any page to any address, and says which page."""
    port = urlsplit(hub.url).port
    body = json.dumps({"type": "kernel", "organization": "org", "name": "name"})

    def answer(**headers):
        return status(hub, "/api/repos/create", "POST", body, **headers)

    for host in (
        f"example.com:{port}",
        "127.0.0.1",
        "localhost",
        f"localhost:{port + 1}",
        f"127.0.0.1.example.com:{port}",
    ):
        assert answer(Host=host) == 403, host
    for origin in (
        "null",
        "http://example.com",
        f"https://127.0.0.1:{port}",
        "http://localhost",
        f"http://localhost:{port + 1}",
    ):
        assert answer(Origin=origin) == 403, origin
    for site in ("cross-site", "same-site", "anything"):
        assert answer(**{"Sec-Fetch-Site": site}) == 403, site
        assert status(hub, "/api/organizations/org/overview", **{"Sec-Fetch-Site": site}) == 403, site
    assert list(hub.repositories.root.iterdir()) == []
    own = {"Host": f"LOCALHOST:{port}", "Origin": f"http://localhost:{port}", "Sec-Fetch-Site": "same-origin"}
    assert answer(**own) == 200


def test_locks_of_a_killed_process_are_taken_over(hub, api):
    repository = hub.repositories.root / "org/name.git"
    blob = Blob.from_string(b"content").id.decode()
    (repository / "objects" / blob[:2]).mkdir(exist_ok=True)
    locked = (f"objects/{blob[:2]}/{blob[2:]}", "refs/heads/v1", "refs/heads/v2", "packed-refs")
    for name in locked:
        (repository / f"{name}.lock").write_bytes(b"half")
    commit(api, CommitOperationAdd("a.txt", b"content"))
    assert "a.txt" in listing(api)
    (repository / "refs/heads/v2.lock").write_bytes(b"half")
    api.create_branch("org/name", repo_type="kernel", branch="v2")
    assert list(repository.rglob("*.lock")) == []
    assert fsck(hub).returncode == 0


def test_a_folder_that_cannot_be_written_is_named(hub, api):
    (hub.repositories.root / "org/name.git/refs/heads/v1.lock").mkdir()
    with pytest.raises(HfHubHTTPError, match=r"cannot read or write its folder: .*v1\.lock"):
        commit(api, CommitOperationAdd("a.txt", b"content"))


def test_a_repository_is_created_whole_or_not_at_all(tmp_path):
    code = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(SCRIPTS)!r})
import local_hub
local_hub._commit = lambda *arguments: os._exit(9)
local_hub.Repositories(Path("hub")).create("org", "name")
"""
    assert run([sys.executable, "-c", code], tmp_path).returncode == 9
    with local_hub.serve(tmp_path / "hub") as hub:
        api = client(hub)
        api.create_repo("org/name", repo_type="kernel")
        assert set(heads(api)) == {"main"}
        assert [path.name for path in (hub.repositories.root / "org").iterdir()] == ["name.git"]


def test_one_hub_serves_a_folder(hub):
    with pytest.raises(OSError, match="another Hub serves this folder"), local_hub.serve(hub.repositories.root):
        pass


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


def test_make_hub_says_what_to_do_and_leaves_nothing(tmp_path):
    """What it prints is for a shell. Make and the Hub both have the SIGTERM, and the Hub then that of make, too."""
    command = ["make", "-s", "hub", f"PYTHON={sys.executable}", "ARGS=--trust org --trust other"]
    with started(command, tmp_path) as hub:
        lines = [hub.stdout.readline() for _ in range(4)]
        assert "`kernels lock`" in lines[2] and lines[2].endswith("Trusted here: org, other.\n")
        assert "--trust ORG" in lines[3]
        assert len(list(tmp_path.glob("local-hub-*"))) == 1
        code = "from huggingface_hub import HfApi; print(HfApi().create_repo('org/name', repo_type='kernel'))"
        shell = ["sh", "-c", f'{"".join(lines)} exec "$0" -c "$1"', sys.executable, code]
        proxy = {"HTTP_PROXY": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1", "HF_TOKEN": ""}
        done = run(shell, tmp_path, **proxy)
        assert done.stdout.endswith("/kernels/org/name\n"), done.stderr
        os.killpg(hub.pid, signal.SIGTERM)
        hub.communicate()
        assert hub.returncode
    assert list(tmp_path.iterdir()) == []


def test_nobody_is_trusted_unless_asked(hub):
    assert "Trusted here: none." in local_hub.introduction(hub, [])


def test_a_command_ends_with_its_hub(tmp_path):
    code = "import signal, time; signal.signal(15, lambda *_: exit(print('told'))); print('runs', flush=True); time.sleep(60)"
    with started([sys.executable, SCRIPTS / "local_hub.py", sys.executable, "-c", code], tmp_path) as process:
        assert process.stdout.readline() == "runs\n"
        process.terminate()
        output, errors = process.communicate()
        assert (process.returncode, output, errors) == (128 + signal.SIGTERM, "told\n", "")
    assert list(tmp_path.iterdir()) == []


def test_telemetry_may_be_off_and_the_path_safe(hub, api):
    """kernels 0.17.2 and huggingface_hub 2.4.0 alone send a header that their HTTP client refuses."""
    code = "import sys; sys.argv[1:] = ['versions', 'org/name']; from kernels.cli import main; main()"
    environment = {**local_hub.environment(hub), "DO_NOT_TRACK": "1"}
    done = run([sys.executable, "-c", code], ROOT, **environment)
    assert done.returncode == 0, done.stderr
    assert "1" in done.stdout
    assert script(ROOT, "local_hub", "--help", PYTHONSAFEPATH=1).returncode == 0


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
