"""`scripts/vendor.py`: what reaches a cache is whole and the Hub's, or nothing does; and how the commands ask a Hub.

The Hub is scripts/local_hub.py, where needed behind a server that changes its answers; the client is the real one.
"""

import contextlib
import http.client
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import command
import publish as publish_command
import pytest
import vendor
import verify
from hub import Fault, client, local_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.utils import _http
from projects import ROOT, contents, run, script
from small import FILES, REPO_ID, endpoint, publish, serve, write_lockfile, write_variant

NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "local"}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Folders of a Hub with one version, and of a cache with that."""
    folder = tmp_path_factory.mktemp("released")
    with serve(folder / "hub") as hub:
        commit = publish(hub, folder / "small")
        assert vendor.main([REPO_ID, "--version", "1", "--output", str(folder / "cache")]) == 0
    return SimpleNamespace(root=folder / "hub", cache=folder / "cache", commit=commit)


@pytest.fixture
def hub(released, tmp_path):
    with serve(shutil.copytree(released.root, tmp_path / "hub")) as hub:
        yield hub


@pytest.fixture
def cache(released, tmp_path):
    """A vendored cache, to be changed."""
    return Path(shutil.copytree(released.cache, tmp_path / "cache", symlinks=True))


@pytest.fixture
def no_waiting(monkeypatch):
    """The client waits between one attempt and the next."""
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None))


@contextlib.contextmanager
def between(hub, edit):
    """The address of a server that passes requests on, and answers with `edit(path, headers, body)`.

    `headers` is a dict; `edit` may change it, and returns the body. `seen` gets the headers of each request.
    """
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self):
            connection = http.client.HTTPConnection(urlsplit(hub.url).netloc)
            seen.append(dict(self.headers))
            length = int(self.headers.get("Content-Length") or 0)
            connection.request(self.command, self.path, self.rfile.read(length))
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            body = edit(self.path, headers, answer.read())
            if self.command != "HEAD":
                headers["content-length"] = str(len(body))
            self.send_response(answer.status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST = pass_on

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fetch(output, capsys, *arguments):
    """Exit status, what was printed, and the last line on stderr."""
    capsys.readouterr()
    status = vendor.main([*(arguments or (REPO_ID, "--version", "1")), "--output", str(output)])
    out, err = capsys.readouterr()
    return status, out, (err.splitlines() or [""])[-1]


def assert_refused(cache, tmp_path, capsys, message):
    """Neither a new cache nor one that holds the version already gets anything."""
    for output in (tmp_path / "made/for/it", cache):
        before = contents(tmp_path)
        status, out, err = fetch(output, capsys)
        assert (status, out) == (1, "")
        assert err.startswith("vendor: error: ") and message in err, err
        # A Hub writes as well: it opens its repositories.
        now = {path: each for path, each in contents(tmp_path).items() if not path.startswith("hub/")}
        assert now == {path: each for path, each in before.items() if not path.startswith("hub/")}
    assert not (tmp_path / "made").exists()
    assert not list(tmp_path.rglob(".vendor-*"))


def test_what_is_vendored(hub, released, tmp_path, capsys):
    status, out, err = fetch(tmp_path / "new", capsys)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        f"{REPO_ID}@{released.commit} (v1): 2 variants, verified against the listing of {hub.url}",
        f"To load it offline: export HF_HUB_OFFLINE=1 KERNELS_CACHE={tmp_path}/new",
    ]
    assert verify.main([REPO_ID, "--online", "--cache", str(tmp_path / "new")]) == 0


# What the Hub holds, or the network does to it

DIGEST = {"algorithm": "sha256", "files": {"layers.py": "0" * 64}}
METADATA = {"name": "small", "id": "_small_xpu_0123456", "version": 1, "license": "Apache-2.0", "python-depends": []}
METADATA = {**METADATA, "kernel-depends": [], "backend": {"type": "xpu"}, "digest": DIGEST}
DAMAGES = {
    "metadata": (CommitOperationAdd("build/torch-cuda/metadata.json", b"{"), "torch-cuda: Cannot parse metadata"),
    "digest": (CommitOperationAdd("build/torch-cuda/layers.py", b"x"), "torch-cuda: File hash mismatch for layers.py"),
    "no files": (
        CommitOperationAdd("build/torch-xpu/metadata.json", json.dumps(METADATA).encode()),
        "torch-xpu: only metadata.json is here",
    ),
    "no variant": (CommitOperationDelete("build/", is_folder=True), "no variant is here"),
}


@pytest.mark.parametrize(("operation", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_commit_reaches_no_cache(hub, cache, tmp_path, capsys, operation, message):
    client(hub).create_commit(REPO_ID, [operation], commit_message="damage", repo_type="kernel", revision="v1")
    assert_refused(cache, tmp_path, capsys, message)


# Of both variants, which share the content: whichever is asked for first.
LAYERS = ".*/layers.py"
FAULTS = {
    "500": ("GET " + LAYERS, 500, "500"),
    "404": ("GET " + LAYERS, 404, "404"),
    "reset": ("GET " + LAYERS, "reset", "reset by peer"),
    "shorten": ("GET " + LAYERS, "shorten", "Consistency check failed"),
    "tamper": ("GET " + LAYERS, "tamper", "nothing was kept: "),
    "etag of another": (
        "HEAD " + LAYERS,
        "wrong-etag",
        f"nothing was kept: {REPO_ID} blobs: {'0' * 40}: not the content",
    ),
    "etag of all": ("HEAD .*", "wrong-etag", "not the content of this commit"),
    "no refs": ("GET .*/refs", 500, "500"),
    "conflict": (".*", 409, "409"),
    "conflict in the listing": (".*/tree/", 409, "409"),
}


@pytest.mark.parametrize(("where", "what", "message"), FAULTS.values(), ids=FAULTS)
def test_a_damaged_download_reaches_no_cache(hub, cache, tmp_path, capsys, no_waiting, where, what, message):
    hub.faults.append(Fault(where, what))
    assert_refused(cache, tmp_path, capsys, message)


def json_of(change):
    return lambda headers, body: json.dumps(change(json.loads(body))).encode()


def without(*paths):
    """Leaves entries out of a listing."""
    return json_of(lambda entries: [each for each in entries if not each["path"].startswith(paths)])


def etag(value):
    def change(headers, body):
        headers["etag"] = value
        return body

    return change


def more(path):
    """A listing with an entry more, of the first file's content."""

    def change(entries):
        file = next(entry for entry in entries if entry["type"] == "file")
        return [*entries, {**file, "path": path}]

    return json_of(change)


def target(commit):
    return json_of(lambda refs: {**refs, "branches": [{**each, "targetCommit": commit} for each in refs["branches"]]})


FORM = "the Hub's answer does not have the expected form"
ANSWERS = {
    "listing without a variant": (
        "/tree/",
        without("build/torch-cuda"),
        "the listing of build is incomplete",
    ),
    "listing without files of a variant": (
        "/tree/",
        without("build/torch-cuda/"),
        "the listing of build/torch-cuda is incomplete",
    ),
    "listing without a file": (
        "/tree/",
        without("build/torch-cpu/layers.py"),
        "the listing of build/torch-cpu is incomplete",
    ),
    "listing without folders": (
        "/tree/",
        json_of(lambda entries: [each for each in entries if each["type"] == "file"]),
        "the listing of build/torch-cpu, build/torch-cpu/sub, ",
    ),
    "listing with a file more": ("/tree/", more("build/torch-cpu/more.py"), "404"),
    "listing with a path": ("/tree/", more("../../../evil.py"), "Invalid filename '../../../evil.py'"),
    "listing of another form": ("/tree/", lambda headers, body: b'[{"type": "file"}]', FORM),
    "listing that is none": ("/tree/", lambda headers, body: b"{", FORM),
    "listing without names": (
        "/tree/",
        json_of(lambda entries: [{**each, "path": None} for each in entries]),
        "`None` is not a string",
    ),
    "listing without ids": (
        "/tree/",
        json_of(lambda entries: [{**each, "oid": None} for each in entries]),
        "the listing of build, ",
    ),
    "branches that are none": ("/refs", lambda headers, body: b"<html>", FORM),
    "branches of another form": ("/refs", lambda headers, body: b"[]", FORM),
    "no branches": ("/refs", lambda headers, body: b"{}", FORM),
    "branch of a path": ("/refs", target("../../evil"), "expected a commit, found '../../evil'"),
    "branch of nothing": ("/refs", target(None), "has no version 1"),
    "etag that is a path": (
        "/layers.py",
        etag('"../../../../evil"'),
        "ETag: expected the id of a file's content, found",
    ),
    "etag that is a path from the root": ("/layers.py", etag('"{outside}"'), "ETag: expected the id"),
    "etag of another file": (
        "/layers.py",
        etag(f'"{verify.git_id(b"blob", FILES["sub/__init__.py"])}"'),
        "not the content of this",
    ),
}


@pytest.mark.parametrize(("where", "change", "message"), ANSWERS.values(), ids=ANSWERS)
def test_a_wrong_answer_reaches_no_cache(hub, cache, tmp_path, capsys, no_waiting, where, change, message):
    def edit(path, headers, body):
        body = change(headers, body) if where in path else body
        if "etag" in headers:
            headers["etag"] = headers["etag"].replace("{outside}", f"{tmp_path}/evil")
        return body

    with between(hub, edit) as (url, _), endpoint(url):
        assert_refused(cache, tmp_path, capsys, message)
        # This asks for no file.
        assert verify.main([REPO_ID, "--online", "--cache", str(cache)]) == (0 if where == "/layers.py" else 1)


# A Hub that falls silent


@pytest.mark.parametrize("where", ["/refs", "/tree/", "HEAD .*layers.py", "GET .*layers.py"])
def test_a_silent_hub_is_not_waited_for(hub, cache, tmp_path, capsys, monkeypatch, no_waiting, where):
    monkeypatch.setattr(command, "TIMEOUT_S", 0.2)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.faults.append(Fault(where, "slow", seconds=600))
    start = time.monotonic()
    assert_refused(cache, tmp_path, capsys, "timed out")
    assert time.monotonic() - start < 60


def test_no_request_is_without_a_limit(hub, monkeypatch, no_waiting):
    """Those of publishing too."""
    monkeypatch.setattr(command, "TIMEOUT_S", 0.2)
    api = command.hub_client()
    hub.faults.append(Fault(".*", "slow", seconds=600))
    operations = [CommitOperationAdd("a.txt", b"a")]
    for ask in (
        lambda: api.list_repo_refs(REPO_ID, repo_type="kernel"),
        lambda: list(api.list_repo_tree(REPO_ID, repo_type="kernel")),
        lambda: api.repo_info(REPO_ID, repo_type="kernel"),
        lambda: api.create_repo(REPO_ID, repo_type="kernel"),
        lambda: api.create_branch(REPO_ID, repo_type="kernel", branch="v2"),
        lambda: api.create_commit(REPO_ID, operations, commit_message="x", repo_type="kernel", revision="v1"),
    ):
        with pytest.raises(command.httpx.TimeoutException):
            ask()


def test_publish_and_verify_ask_with_limits(published, hub, cache, monkeypatch, capsys, no_waiting):
    monkeypatch.setattr(command, "TIMEOUT_S", 0.2)
    hub.faults.append(Fault("/refs", "slow", seconds=600))
    monkeypatch.setattr(publish_command, "ROOT", published.project)
    monkeypatch.setattr(sys, "argv", ["publish", "--build", str(published.release.build)])
    for main, arguments in ((publish_command.main, ()), (verify.main, [[REPO_ID, "--online", "--cache", str(cache)]])):
        assert main(*arguments) == 1
        assert "does not answer: timed out" in capsys.readouterr().err


def test_publish_names_a_conflict(published, hub, monkeypatch, capsys):
    hub.faults.append(Fault("POST .*/repos/create", 409))
    monkeypatch.setattr(publish_command, "ROOT", published.project)
    monkeypatch.setattr(sys, "argv", ["publish", "--build", str(published.release.build)])
    assert publish_command.main() == 1
    err = capsys.readouterr().err
    assert (
        err.startswith("publish: error: the Hub's answer is not understood, asked to create") and err.count("\n") == 1
    )


# Addresses with a password


def test_a_password_in_the_address_is_sent_and_never_shown(
    hub, cache, tmp_path, capsys, caplog, no_waiting, monkeypatch
):
    with between(hub, lambda path, headers, body: body) as (url, seen):
        with endpoint(url.replace("//", "//user:se%2Fcret@")):
            outputs = [fetch(tmp_path / "new", capsys)]
            assert outputs[0][0] == 0
            assert {each.get("Authorization", each.get("authorization")) for each in seen} == {"Basic dXNlcjpzZS9jcmV0"}
            for where, what in (("/refs", 500), ("/tree/", 500), (LAYERS, 500), ("/tree/", 409), (".*", "reset")):
                hub.faults[:] = [Fault(where, what)]
                outputs.append(fetch(tmp_path / "other", capsys))
                assert verify.main([REPO_ID, "--online", "--cache", str(cache)]) == 1 or where == LAYERS
                outputs.append(capsys.readouterr())
    with endpoint("http://user:se%2Fcret@127.0.0.1:9"):
        outputs.append(fetch(tmp_path / "other", capsys))
        assert "the Hub at 127.0.0.1:9 does not answer" in outputs[-1][2]
    for address in ("http://user:secret/@127.0.0.1:9", "user:secret@127.0.0.1", "ftp://user:secret@127.0.0.1", ""):
        with endpoint(address):
            outputs.append(fetch(tmp_path / "other", capsys))
            assert outputs[-1][2].startswith("vendor: error: ")
    text = repr(outputs) + caplog.text
    assert "cret" not in text and len(caplog.records) > 5


# What lies in the cache already


def snapshot_of(cache, released):
    return verify.repository_folder(cache, REPO_ID) / "snapshots" / released.commit


def test_what_does_not_belong_to_the_commit_is_removed(hub, released, cache, tmp_path, capsys):
    snapshot = snapshot_of(cache, released)
    (snapshot / "build/torch-cpu/__pycache__").mkdir()
    (snapshot / "build/torch-cpu/__pycache__/layers.cpython-311.pyc").write_bytes(b"")
    (snapshot / "build/torch-cpu/more.py").symlink_to("/etc/passwd")
    (snapshot / "build/torch-cpu/layers.py").resolve().write_bytes(b"")
    write_variant(snapshot / "build/torch-universal", FILES)
    other = verify.repository_folder(cache, REPO_ID) / "snapshots" / ("2" * 40)
    other.mkdir()
    status, out, err = fetch(cache, capsys)
    assert (status, err) == (0, "")
    assert "(v1): 2 variants, verified against the listing of" in out
    assert "; removed 3 other files or folders\n" in out
    assert other.is_dir() and Path("/etc/passwd").exists()
    other.rmdir()
    assert verify.main([REPO_ID, "--online", "--cache", str(cache)]) == 0


def test_a_branch_of_the_old_layout_that_leads_elsewhere(hub, cache, capsys):
    """`kernels` believes it more than the branch that is written."""
    ref = cache / "models--org--small/refs/v1"
    ref.parent.mkdir(parents=True)
    ref.write_text("2" * 40)
    status, out, err = fetch(cache, capsys)
    assert (status, out) == (1, "")
    assert f"but failed in {cache}: " in err and f"{REPO_ID} models--org--small/refs/v1: that commit is not here" in err


@pytest.mark.parametrize("name", ["snapshots", "snapshots/{}", "snapshots/{}/build", "blobs", "trees", "refs"])
def test_nothing_is_written_through_a_link(hub, released, cache, tmp_path, capsys, name):
    folder = verify.repository_folder(cache, REPO_ID) / name.format(released.commit)
    shutil.rmtree(folder)
    (tmp_path / "outside").mkdir()
    folder.symlink_to(tmp_path / "outside")
    status, out, err = fetch(cache, capsys)
    assert (status, out) == (1, "")
    assert err == f"vendor: error: {folder}: expected a folder, found a link to {tmp_path}/outside"
    assert not list((tmp_path / "outside").iterdir())


# Processes that end in the middle, and several at once


def test_what_a_killed_process_left_is_removed(hub, tmp_path, capsys):
    output = tmp_path / "new"
    hub.faults.append(Fault("GET .*layers.py", "slow", seconds=600))
    arguments = [sys.executable, ROOT / "scripts/vendor.py", REPO_ID, "--version", "1", "--output", output]
    process = subprocess.Popen(arguments, env=local_hub.environment(hub), stderr=subprocess.DEVNULL)
    while not any(fault.met for fault in hub.faults):
        assert process.poll() is None
        time.sleep(0.05)
    assert [path.name[:8] for path in output.iterdir()] == [".vendor-"]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [path.name[:8] for path in output.iterdir()] == [".vendor-"]
    hub.faults.clear()
    assert fetch(output, capsys)[0] == 0
    assert [path.name for path in output.iterdir()] == ["kernels--org--small"]


def test_one_fetches_while_another_waits(hub, released, tmp_path, capsys):
    output = tmp_path / "both"
    arguments = [REPO_ID, "--version", "1", "--output", str(output)]
    command = [sys.executable, ROOT / "scripts/vendor.py", *arguments]
    running = [
        subprocess.Popen(command, env=local_hub.environment(hub), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    assert [(process.communicate()[1], process.returncode)[1] for process in running] == [0, 0]
    assert contents(output) == contents(released.cache)
    assert verify.main([REPO_ID, "--cache", str(output)]) == 0
    with vendor.staging(output) as staged:
        done = []
        thread = threading.Thread(target=lambda: done.append(vendor.main(arguments)))
        thread.start()
        time.sleep(0.5)
        assert not done and staged.is_dir()
    thread.join()
    assert done == [0]
    assert f"vendor: waiting for another run that downloads into {output}\n" in capsys.readouterr().err


def test_a_read_only_folder(hub, cache, tmp_path):
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets no process mount a folder read-only")
    before = contents(cache)
    steps = (
        f"mount --bind {cache} {cache} && mount -o remount,bind,ro {cache} && "
        f"{sys.executable} scripts/vendor.py {REPO_ID} --version 1 --output {cache}"
    )
    # Not -n: it has to reach the Hub before it fails.
    done = run(["unshare", "-rm", "sh", "-c", steps], ROOT, **local_hub.environment(hub))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Read-only file system" in done.stderr
    assert contents(cache) == before


# Lockfiles, and arguments


def test_all_versions_of_a_lockfile(hub, released, tmp_path, capsys):
    second = publish(hub, tmp_path / "two", {**FILES, "layers.py": b"VALUE = 4\n"}, branch="v2")
    lockfile = write_lockfile(tmp_path / "lock", (REPO_ID, 1, released.commit), (REPO_ID, 2, second))
    locks = verify.read_locks(lockfile)
    assert (
        locks == [(REPO_ID, released.commit, "v1"), (REPO_ID, second, "v2")] == verify.read_locks(lockfile, [REPO_ID])
    )
    assert verify.read_lockfile(lockfile) == {REPO_ID: (released.commit, "v1")}
    status, out, err = fetch(tmp_path / "new", capsys, "--lockfile", str(lockfile))
    assert (status, out.count("2 variants, verified")) == (0, 2)
    arguments = ["--lockfile", str(lockfile), "--cache", str(tmp_path / "new")]
    assert verify.main(arguments) == 0
    (layers,) = (tmp_path / "new").glob(f"*/snapshots/{second}/build/torch-cpu/layers.py")
    layers.resolve().write_bytes(b"VALUE = 5\n")
    assert verify.main(arguments) == 1


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([REPO_ID, "--version", "7"], {}, f"--version: {REPO_ID} has no version 7; expected one of: 1"),
        (["org/other", "--version", "1"], {}, "org/other: no such kernel repository"),
        ([REPO_ID, "--version", "1"], NOWHERE, "the Hub at 127.0.0.1:9 does not answer"),
        (["--version", "1"], {}, "ORG/NAME: expected the repository"),
        (["ab", "--version", "1"], NOWHERE, "ORG/NAME: expected a repository such as"),
        ([REPO_ID, "--version", "0"], NOWHERE, "--version: expected a number from 1 on, found 0"),
        ([REPO_ID, "--version", "1", "--output", "LICENSE"], NOWHERE, "--output: expected a folder, found the file"),
        (["--lockfile", "build.toml"], {}, "--lockfile: build.toml: "),
        (["--lockfile", "/nowhere"], {}, "/nowhere"),
        (["--lockfile", "/dev/null"], {}, "--lockfile: /dev/null: "),
    ],
)
def test_what_cannot_be_fetched_is_said_in_one_line(
    hub, tmp_path, monkeypatch, capsys, arguments, environment, message
):
    monkeypatch.chdir(ROOT)
    with endpoint(environment.get("HF_ENDPOINT", hub.url)):
        assert vendor.main(["--output", str(tmp_path / "new"), *arguments]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("vendor: error: ") and message in err
    assert not (tmp_path / "new").exists()


def test_as_a_command(hub, tmp_path):
    done = script(ROOT, "vendor", REPO_ID, "--version", "1", "--output", tmp_path / "new", **local_hub.environment(hub))
    assert (done.returncode, done.stderr) == (0, "")
    done = script(ROOT, "vendor", REPO_ID, "--version", "1", "--output", tmp_path / "other", **NOWHERE)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("vendor: error: the Hub at 127.0.0.1:9 does not answer")
    assert os.listdir(tmp_path / "new") == ["kernels--org--small"] and not (tmp_path / "other").exists()
