"""`scripts/publish.py` against a Hub on this machine, with the real client."""

import contextlib
import dataclasses
import http.server
import json
import os
import re
import shutil
import signal
import threading
import time

import build_kernel
import httpx2
import pytest
from command import one_line
from hub import Fault, Published, client, local_hub, publish, release_of, serve, upload, upload_process
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from projects import PACKAGE, REPO_ID, ROOT, SMALL, commit, contents, export, git, run, script
from test_build import UNSEEN


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


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A `hub.Published` of a small package. Nobody changes it."""
    return Published(tmp_path_factory.mktemp("published"), SMALL)


@pytest.fixture
def empty(tmp_path):
    with serve(tmp_path / "empty-hub") as hub:
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
    change(project, f"{PACKAGE}/layers.py", "class SiLU:\n", "class SiLU:  # changed\n")
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
    with pytest.raises(publish.CommandError, match="v1 was changed during this run"):
        publish.send(api, REPO_ID, plan, "message")
    assert heads(hub) == before


def without_silu(release):
    """The release of a project that has lost a public name, and differs in a file."""

    def lose(interface):
        del interface["names"]["silu"]

    return with_interface(release, lose)


def with_interface(release, edit):
    files = dict(release.files)
    for path in files:
        if path.endswith("/interface.json"):
            interface = json.loads(files[path])
            edit(interface)
            files[path] = json.dumps(interface).encode()
    return dataclasses.replace(release, files=files)


def test_the_second_of_two_publishers_who_met_no_repository(published, empty):
    """It finds the first one's version, and is compared with that."""
    api = client(empty)
    met = [publish.remote_branches(api, REPO_ID) for _ in range(2)]
    assert met == [None, None]
    publish.upload(api, published.release, met[0], False, lambda step: None)
    before = heads(empty)
    with pytest.raises(
        publish.CommandError, match="this build breaks the interface of branch v1: silu: removed; raise"
    ):
        publish.upload(api, without_silu(published.release), met[1], False, lambda step: None)
    assert heads(empty) == before
    # What breaks nothing is the next commit.
    more = dataclasses.replace(published.release, files={**published.release.files, "build/torch-cpu/new.py": b""})
    publish.upload(api, more, met[1], False, lambda step: None)
    assert "build/torch-cpu/new.py" in held(empty, "v1")


def test_two_publishers_at_once(published, empty):
    """Each has lost a name of the other's, so that one of them is published, whole, and the other one is refused."""

    def lose(interface):
        del interface["names"]["layers"]

    releases = [without_silu(published.release), with_interface(published.release, lose)]
    barrier, errors = threading.Barrier(2), [None, None]

    def send(number):
        api = client(empty)
        branches = publish.remote_branches(api, REPO_ID)
        barrier.wait()
        try:
            publish.upload(api, releases[number], branches, False, lambda step: None)
        except publish.CommandError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The card, which both send too, may be the other one's: then both are told.
    assert [error for error in errors if error and re.search("breaks the interface of branch v1|v1 was changed", error)]
    log = run(["git", "log", "--format=%s", "v1"], empty.repositories.root / f"{REPO_ID}.git").stdout.splitlines()
    assert len(log) == 2
    listing = publish.remote_files(client(empty), REPO_ID, heads(empty)["v1"])
    assert listing.keys() == {*releases[0].files, ".gitattributes"}
    same = [
        all(publish.same_content(content, listing[path]) for path, content in each.files.items()) for each in releases
    ]
    assert sorted(same) == [False, True]
    assert errors[same.index(False)]


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


def inside_another(project):
    """The project without its history, in a folder of a repository whose commit does not hold it."""
    shutil.rmtree(project / ".git")
    git(project.parent, "init", "--quiet")
    git(project.parent, "commit", "--quiet", "--allow-empty", "--message", "another project's")


def broken(project):
    (project / PACKAGE / "layers.py").write_text("nowhere\n")
    commit(project)


def link_out(project):
    (project / "benchmarks").mkdir()
    (project / "benchmarks/benchmark_x.py").symlink_to("/etc/hostname")
    commit(project)


def damaged_index(project):
    (project / ".git/index").write_bytes(b"no index")


def damaged_object(project):
    git(project, "status")  # So that git has no reason to look at it.
    oid = git(project, "rev-parse", f"HEAD:{PACKAGE}/functions.py")
    path = project / ".git/objects" / oid[:2] / oid[2:]
    path.chmod(0o644)
    path.write_bytes(b"")


REFUSALS = {
    "no build": (
        lambda project: shutil.rmtree(project / "build"),
        "--build: expected a folder made by `make build`, found no folder .*/build",
    ),
    "a file more": (edit_build("torch-cpu/notes.txt", b""), "torch-cpu.*notes.txt"),
    "a folder more": (edit_build("notes/notes.txt", b""), "notes/notes.txt does not belong"),
    "a variant less": (lambda project: shutil.rmtree(project / "build/torch-rocm"), "torch-rocm/.* is missing"),
    "bytecode": (
        edit_build("torch-cpu/__pycache__/layers.cpython-311.pyc", b""),
        "expected no bytecode, found torch-cpu/__pycache__",
    ),
    "link": (link, "found the link .*more.py"),
    "same length": (same_length, "torch-cuda.*mismatch for layers.py"),
    "rewritten": (rewritten, "torch-cuda/layers.py differs from the build of the commit"),
    "metadata": (edit_build("torch-cpu/metadata.json", b"{"), "torch-cpu: Cannot parse metadata"),
    "tracked change": (tracked, "uncommitted changes: build.toml"),
    "untracked file": (untracked, "uncommitted changes: .*new.py"),
    "another commit": (next_commit, "expected the build _lossless_kernels_cpu_[0-9a-f]{7}, found _lossless_kernels"),
    "no git": (lambda project: shutil.rmtree(project / ".git"), "no commit to publish"),
    "another repository": (inside_another, "no commit to publish"),
    "damaged index": (damaged_index, "git diff fails in .*, so the committed files are unknown"),
    "damaged object": (damaged_object, "git cannot read torch-ext/lossless_kernels/functions.py of [0-9a-f]{40}"),
    "does not build": (broken, "the project does not build: the package does not import: NameError: name 'nowhere'"),
    "link to elsewhere": (link_out, "benchmark_x.py: link to /etc/hostname, which is outside the commit"),
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


def test_uncommitted_changes_may_be_asked_for(project, hub):
    tracked(project)
    release = release_of(project, allow_dirty=True)
    assert release.source == f"the work tree at {git(project, 'rev-parse', 'HEAD')}"
    upload(hub, release)
    assert json.loads(release.files["build/torch-cpu/metadata.json"])["id"].endswith("_dirty")


# What is sent is the commit's, whatever the work tree holds


def assert_committed(project, hub):
    """Everything on the branch that the build does not write itself is a file of the commit it names."""
    repository = hub.repositories.root / f"{REPO_ID}.git"
    subject = run(["git", "log", "-1", "--format=%s", "v1"], repository).stdout
    named = re.fullmatch(r"lossless-kernels v1, built from ([0-9a-f]{40})\n", subject)[1]
    metadata = json.loads(run(["git", "show", "v1:build/torch-cpu/metadata.json"], repository).stdout)
    assert metadata["provenance"]["kernel"] == {"commit": named, "dirty": False}
    ours = git(project, "--no-replace-objects", "ls-tree", "-r", named).splitlines()
    blobs = {path: what.split()[2] for what, _, path in (line.partition("\t") for line in ours)}
    found = {path: blob for path, blob in held(hub, "v1").items() if path.startswith(("build/", "benchmarks/"))}
    count = 0
    for path, blob in found.items():
        if path.split("/")[-1] in build_kernel.GENERATED:
            continue
        source = re.sub(r"^build/torch-\w+", PACKAGE, path)
        assert blob == blobs.get(source), path
        content = run(["git", "cat-file", "blob", "v1:" + path], repository).stdout
        assert content == run(["git", "--no-replace-objects", "cat-file", "blob", blobs[source]], project).stdout
        count += 1
    assert count == 3 * len(SMALL) + sum(path.startswith("benchmarks/") for path in blobs)


def times(project):
    """A benchmark that the commit has, and one that it has not."""
    (project / "benchmarks").mkdir()
    (project / "benchmarks/benchmark_a.py").write_text("# times\n")
    commit(project)
    (project / ".git/info/exclude").write_text("benchmark_b.py\n")
    (project / "benchmarks/benchmark_b.py").write_text("# secret\n")


def other_card(project):
    git(project, "update-index", "--assume-unchanged", "CARD.md", "build.toml", "scripts/build_kernel.py")
    (project / "CARD.md").write_text("# secret\n")
    change(project, "build.toml", "version = 1", "version = 3")
    change(project, "scripts/build_kernel.py", "import torch\n", "import torch  # secret\n")


@pytest.mark.parametrize("differ", [*UNSEEN.values(), times, other_card], ids=[*UNSEEN, "benchmark", "card"])
def test_what_git_does_not_show_is_not_sent(published, empty, tmp_path, differ):
    project = export(tmp_path / "project", SMALL)
    git(project, "init", "--quiet")
    commit(project)
    clean = tmp_path / "clean"
    git(tmp_path, "clone", "--quiet", str(project), str(clean))
    differ(project)
    if differ is times:
        git(clean, "pull", "--quiet")
    build_kernel.build(clean, clean / "build", None, None, quiet=True)
    if differ is not times:
        build_kernel.build(project, project / "build", None, None, quiet=True)
        reasons = "the build differs from the commit's own files, |expected the build _|uncommitted changes: "
        with pytest.raises(publish.CommandError, match=reasons):
            publish.prepare(project, project / "build", REPO_ID, False, lambda step: None)
    git(project, "--no-replace-objects", "checkout", "--quiet", "--", PACKAGE)
    release = publish.prepare(project, clean / "build", REPO_ID, False, lambda step: None)
    upload(empty, release)
    assert_committed(project, empty)
    assert "build/torch-cpu/secret.py" not in release.files
    assert not [path for path, content in release.files.items() if b"secret" in content]
    assert b"secret" not in release.card


# What a version promises


def test_what_others_rely_on_needs_a_new_version(project, hub):
    change(project, f"{PACKAGE}/functions.py", r"silu\(input: float", "silu(x: float")
    change(project, f"{PACKAGE}/layers.py", "has_backward = True", "has_backward = False")
    change(project, "build.toml", ', "rocm"', "")
    commit(project)
    release = release_of(project)
    before, requests = heads(hub), len(hub.requests)
    breaks = [
        "backends.rocm: removed",
        r"layers.SiLU.has_backward: was True, is False",
        r"silu: was \(input\), is \(x\)",
    ]
    with pytest.raises(
        publish.CommandError, match=f"this build breaks the interface of branch v1: {'; '.join(breaks)}; raise `v"
    ):
        upload(hub, release)
    assert heads(hub) == before
    assert not [request for request in hub.requests[requests:] if request.startswith("POST")]


def delete_interfaces(hub):
    """The branch as it was published before there was a file of this name."""
    gone = [CommitOperationDelete(path) for path in held(hub, "v1") if path.endswith("/interface.json")]
    assert len(gone) == 3
    client(hub).create_commit(REPO_ID, gone, commit_message="older", repo_type="kernel", revision="v1")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("functions.py", r"silu\(input: float", "silu(x", r"silu\(input\): .*removed"),
        ("functions.py", r"silu\(input: float", "silu(input, out=None", r"silu\(input\): now \(input, out=None\)"),
        ("layers.py", "class SiLU", "class Silu", "layers.SiLU"),
        ("../../build.toml", ', "rocm"', "", "torch-rocm: removed"),
    ],
    ids=["argument", "optional argument", "layer", "backend"],
)
def test_what_was_published_without_an_interface_is_read(project, hub, name, old, new, message):
    delete_interfaces(hub)
    change(project, f"{PACKAGE}/{name}", old, new)
    commit(project)
    before = heads(hub)
    with pytest.raises(publish.CommandError, match=f"the interface of branch v1: .*{message}.*raise `version`"):
        upload(hub, release_of(project))
    assert heads(hub) == before


def test_the_first_interface_is_published(published, hub):
    delete_interfaces(hub)
    upload(hub, published.release)
    assert {*published.release.files} <= {*held(hub, "v1")}


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"backends": {}, "names": [], "mapping": {}}', b"\xff"])
def test_an_interface_on_the_hub_that_is_none(published, hub, content):
    spoiled = [CommitOperationAdd(path, content) for path in held(hub, "v1") if path.endswith("/interface.json")]
    client(hub).create_commit(REPO_ID, spoiled, commit_message="spoiled", repo_type="kernel", revision="v1")
    with pytest.raises(
        publish.CommandError, match="torch-cpu/interface.json on the Hub: expected a file written by build_kernel.py"
    ):
        upload(hub, published.release)


def test_what_is_added_needs_no_new_version(project, hub):
    change(project, f"{PACKAGE}/layers.py", r"\Z", "\n\nclass Another: ...\n")
    # Not in __all__.
    change(project, f"{PACKAGE}/functions.py", r"\Z", "\n\ndef other(): ...\n")
    commit(project)
    upload(hub, release_of(project), dry_run=True)


# When the Hub fails


def test_no_hub(project):
    assert "the Hub at 127.0.0.1:9 does not answer" in refused(project)


def test_kernel_repositories_may_not_be_created(published, empty):
    empty.faults.append(Fault("POST /api/repos/create", 403))
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
    empty.faults.append(Fault(f"POST .*{where}", what, times=1))
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
    fault = Fault(where, what, seconds=600)
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


# What every request of a release may be answered with, though it has nothing of what was asked for.
ANSWERS = [(status, body) for status in (200, 409) for body in (b"<html>", b"[1]", b"{}", b"null")]


@contextlib.contextmanager
def answering(hub, request, status, body):
    """The address of a server that answers the requests that match with this, and all others as `hub` does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {"Content-Type": "application/json"}
            if re.search(request, f"{self.command} {self.path}"):
                code, content = status, body
            else:
                passed = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                answer = httpx2.request(self.command, hub.url + self.path, content=sent, headers=passed)
                code, content = answer.status_code, answer.content
                headers.update({name: value for name, value in answer.headers.items() if name.startswith("x-")})
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    "request_",
    ["GET .*/refs", "POST .*repos/create", "POST .*branch/v1", "GET .*/tree/", "POST .*preupload", "POST .*/commit/v1"],
)
def test_answers_that_make_no_sense(published, tmp_path, request_):
    """With success or as a conflict: one line that says so, or what was asked for is done."""
    for number, (status, body) in enumerate(ANSWERS):
        with local_hub.serve(tmp_path / str(number)) as hub, answering(hub, request_, status, body) as url:
            api = HfApi(endpoint=url, token="local")
            try:
                branches = publish.remote_branches(api, REPO_ID)
                publish.upload(api, published.release, branches, False, lambda step: None)
            except (publish.CommandError, OSError, httpx2.HTTPError) as error:
                assert "\n" not in one_line(error) and len(one_line(error)) > 20, (status, body)
                if (request_, status) == ("POST .*branch/v1", 200):
                    # The branch that is said to be made is not: nothing is sent that has been compared with nothing.
                    assert "the Hub does not list v1" in one_line(error)
            else:
                assert set(held(hub, "v1")) == {*published.release.files, ".gitattributes"}, (status, body)


def test_a_branch_without_a_commit(published, hub):
    body = {"branches": [{"name": "v1", "ref": "refs/heads/v1", "targetCommit": None}], "tags": [], "converts": []}
    with answering(hub, "GET .*/refs", 200, json.dumps(body).encode()) as url:
        with pytest.raises(publish.CommandError, match="not understood, asked for the branches.*without a commit"):
            publish.remote_branches(HfApi(endpoint=url, token="local"), REPO_ID)


# The card


def test_card(build):
    """What kernel-builder's template engine would render, with nothing left open."""
    names = json.loads((build / "torch-cpu/interface.json").read_bytes())["names"]
    card = publish.render_card(ROOT, publish.read_project(ROOT, None), names, True)
    assert "{{" not in card and "{%" not in card
    for name in ("LlamaRMSNorm", "SiLUActivation", "kernel_mapping", "rms_norm", "silu"):
        assert f"`{name}`" in card
    for backend in ("cuda", "rocm", "cpu"):
        assert f"`{backend}`" in card


def test_figures_of_the_card_are_those_of_the_readme():
    readme, card = (ROOT / "README.md").read_text(), (ROOT / "CARD.md").read_text()
    rows = [line for line in card.splitlines() if re.match(r"\| (prefill|`generate`|training)", line)]
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
