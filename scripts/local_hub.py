#!/usr/bin/env python3
"""Serve a Hub for kernel repositories on 127.0.0.1, for tests, the demo and trying out a release offline.

It stores bare git repositories and implements the requests with which `kernels` and `huggingface_hub` publish, list, download
and lock kernels. It has no accounts and no large-file storage.

    python scripts/local_hub.py                       serve until interrupted, and print the settings for a shell
    python scripts/local_hub.py make publish          run a command with a Hub that ends when the command does

The command gets the address in HF_ENDPOINT. `huggingface_hub` reads that variable once, when it is imported.
"""

import argparse
import base64
import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional, Union
from urllib.parse import unquote

# PYTHONSAFEPATH leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from command import requirements
from startup import allow_no_telemetry, clean_up_when_terminated

with requirements():
    import uvicorn
    import yaml
    from dulwich.index import commit_tree, validate_path, validate_path_element_hfs, validate_path_element_ntfs
    from dulwich.object_store import iter_tree_contents, tree_lookup_path
    from dulwich.objects import Blob, Commit, Tree
    from dulwich.refs import check_ref_format
    from dulwich.repo import Repo
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

_NAME = re.compile(r"(?!.*(\.\.|--))[A-Za-z0-9]([A-Za-z0-9._-]{0,94}[A-Za-z0-9])?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_AUTHOR = b"Local Hub <hub@localhost>"
# Files of a new repository, as on the real Hub.
_FIRST_FILES = {b".gitattributes": b"*.so filter=lfs diff=lfs merge=lfs -text\n"}


class HubError(Exception):
    """A refused request: an HTTP status, and the code with which clients distinguish the kinds of 404."""

    def __init__(self, status: int, message: str, code: Optional[str] = None):
        super().__init__(message)
        self.status, self.code = status, code


# Repositories


class Repositories:
    """Bare git repositories below one folder, each `<root>/<organisation>/<name>.git`."""

    def __init__(self, root: Path):
        self.root = root
        self._opened: dict[Path, Repo] = {}

    def create(self, organisation: str, name: str) -> None:
        path = self._path(organisation, name)
        if path is None:
            raise HubError(400, f"expected a repository name such as organisation/name, found {organisation}/{name}")
        if path.exists():
            raise HubError(409, "You already created this kernel repo")
        # Created under another name first: a killed process leaves no incomplete repository under this one.
        new = path.with_name(f".{path.name}")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        with Repo.init_bare(str(new)) as repo:
            files = {each: _stored(repo, Blob.from_string(content)) for each, content in _FIRST_FILES.items()}
            tree = _changed(repo, _stored(repo, Tree()), set(), files)
            repo.refs[b"refs/heads/main"] = _commit(repo, tree, [], "initial commit")
        new.rename(path)

    def open(self, organisation: str, name: str) -> Repo:
        path = self._path(organisation, name)
        if path is None or not path.is_dir():
            raise HubError(404, "Repository not found", "RepoNotFound")
        if path not in self._opened:
            self._opened[path] = Repo(str(path))
        return self._opened[path]

    def open_to_write(self, organisation: str, name: str) -> Repo:
        """Like `open`, after removing the locks of a killed process.

        No lock is in use: only one Hub serves the folder (`serve`), and it writes in one thread.
        """
        repo = self.open(organisation, name)
        for lock in Path(repo.path).rglob("*.lock"):
            lock.unlink(missing_ok=True)
        return repo

    def _path(self, organisation: str, name: str) -> Optional[Path]:
        if _NAME.fullmatch(organisation) and _NAME.fullmatch(name) and not name.endswith(".git"):
            return self.root / organisation / f"{name}.git"
        return None


def _stored(repo: Repo, thing) -> bytes:
    repo.object_store.add_object(thing)
    return thing.id


def _commit(repo: Repo, tree: bytes, parents: list, message: str) -> bytes:
    now = int(time.time())
    commit = Commit()
    commit.tree, commit.parents, commit.message = tree, parents, message.encode()
    commit.author = commit.committer = _AUTHOR
    commit.author_time = commit.commit_time = now
    commit.author_timezone = commit.commit_timezone = 0
    return _stored(repo, commit)


def _branch_ref(name: str) -> bytes:
    branch = name.removeprefix("refs/heads/")
    ref = f"refs/heads/{branch}".encode()
    if not (_NAME.fullmatch(branch) and check_ref_format(ref)):
        raise HubError(404, f"Invalid rev id: {name}", "RevisionNotFound")
    return ref


def _resolve(repo: Repo, revision: str) -> bytes:
    """The commit of a branch or of a full hash."""
    if _COMMIT.fullmatch(revision):
        commit = revision.encode()
        if commit in repo.object_store and isinstance(repo[commit], Commit):
            return commit
    else:
        with contextlib.suppress(KeyError):
            return repo.refs[_branch_ref(revision)]
    raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")


def _entry(repo: Repo, commit: bytes, path: str) -> tuple[int, bytes]:
    """Mode and id of a file or folder."""
    tree = repo[commit].tree
    if not path:
        return 0o040000, tree
    try:
        return tree_lookup_path(repo.__getitem__, tree, path.encode())
    except (KeyError, NotADirectoryError, ValueError):
        raise HubError(404, "Entry not found", "EntryNotFound") from None


def _file_path(path: str) -> bytes:
    """The path of a file in a commit. Raises HubError for paths that git or a common file system cannot store."""

    def holds(name: bytes) -> bool:
        return len(name) <= 255 and validate_path_element_ntfs(name) and validate_path_element_hfs(name)

    encoded = path.encode()
    # Linux limits names to 255 bytes and paths to 4096. `_listing` is recursive, so folders are limited too.
    fits = len(encoded) < 4096 and encoded.count(b"/") < 100
    if b"\0" in encoded or not fits or not validate_path(encoded, holds):
        raise HubError(400, f"expected a relative path that git can store, found {path!r}")
    return encoded


def _changed(repo: Repo, tree: bytes, deleted: set[bytes], added: dict[bytes, bytes]) -> bytes:
    """The tree after removing the files and folders `deleted` and then adding the files `added`."""
    entries = iter_tree_contents(repo.object_store, tree)
    files = {
        entry.path: (entry.sha, entry.mode)
        for entry in entries
        if not any(path == entry.path or entry.path.startswith(path + b"/") for path in deleted)
    }
    files.update({path: (oid, 0o100644) for path, oid in added.items()})
    for path in files:
        for end in (match.start() for match in re.finditer(b"/", path)):
            if path[:end] in files:
                raise HubError(400, f"expected the folder {path[:end].decode()!r} for {path.decode()!r}, found a file")
    return commit_tree(repo.object_store, [(path, *entry) for path, entry in files.items()])


def _listing(repo: Repo, tree: bytes, prefix: str, recursive: bool) -> Iterator[dict]:
    for name, mode, oid in repo[tree].items():
        path = prefix + name.decode()
        if mode == 0o040000:
            yield {"type": "directory", "oid": oid.decode(), "size": 0, "path": path}
            if recursive:
                yield from _listing(repo, oid, path + "/", True)
        else:
            yield {"type": "file", "oid": oid.decode(), "size": len(repo[oid].data), "path": path}


# Requests. No handler awaits anything while it works, so requests are served one after another.


def _routes(repositories: Repositories, trusted: set) -> list[Route]:
    untrusted: set[str] = set()

    def opened(request: Request, to_write: bool = False) -> Repo:
        open_one = repositories.open_to_write if to_write else repositories.open
        return open_one(request.path_params["organisation"], request.path_params["name"])

    def revision(request: Request) -> str:
        return request.path_params.get("revision", "main")

    def url(request: Request, *parts: str) -> str:
        return "/".join((str(request.base_url).rstrip("/"), "kernels", *parts))

    async def create(request):
        body = await request.json()
        organisation, name = body.get("organization"), body.get("name")
        if body.get("type") != "kernel":
            raise HubError(400, f"type: expected 'kernel', found {body.get('type')!r}")
        if not organisation or not name:
            raise HubError(400, "expected a repository name such as organisation/name")
        answer = {"url": url(request, organisation, name), "name": f"{organisation}/{name}"}
        try:
            repositories.create(organisation, name)
        except HubError as error:
            # create_repo(exist_ok=True) also reads the url of this answer.
            return JSONResponse({"error": str(error), **answer}, error.status)
        return JSONResponse(answer)

    async def organisation(request):
        name = request.path_params["organisation"]
        if name not in trusted | untrusted and _NAME.fullmatch(name):
            # `kernels lock` ends in a traceback that does not say what to do here.
            untrusted.add(name)
            print(
                f"local_hub: {name} is no trusted publisher here, and `kernels lock` locks nothing else: start the Hub "
                f"with --trust {name}",
                file=sys.stderr,
                flush=True,
            )
        return JSONResponse({"name": name, "fullname": name, "trustedKernelPublisher": name in trusted})

    async def validate_yaml(request):
        content = (await request.json()).get("content", "")
        header = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        try:
            metadata = yaml.safe_load(header[1]) if header else None
        except yaml.YAMLError as error:
            return JSONResponse({"errors": [{"message": " ".join(str(error).split())}], "warnings": []}, 400)
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        return JSONResponse({"errors": [], "warnings": warnings})

    async def info(request):
        sha = _resolve(opened(request), revision(request)).decode()
        name = "{organisation}/{name}".format(**request.path_params)
        return JSONResponse({"id": name, "sha": sha, "author": request.path_params["organisation"], "private": False})

    async def refs(request):
        heads = opened(request).refs.as_dict(b"refs/heads")
        branches = [
            {"name": name.decode(), "ref": f"refs/heads/{name.decode()}", "targetCommit": commit.decode()}
            for name, commit in sorted(heads.items())
        ]
        return JSONResponse({"branches": branches, "tags": [], "converts": []})

    async def create_branch(request):
        body = json.loads(await request.body() or b"{}")
        repo = opened(request, to_write=True)
        start = _resolve(repo, body.get("startingPoint", "main"))
        if not repo.refs.add_if_new(_branch_ref(request.path_params["branch"]), start):
            raise HubError(409, "Reference already exists")
        return JSONResponse({})

    async def tree(request):
        repo = opened(request)
        path = request.path_params.get("path", "").rstrip("/")
        commit = _resolve(repo, revision(request))
        mode, oid = _entry(repo, commit, path)
        if mode != 0o040000:
            raise HubError(404, "Entry not found", "EntryNotFound")
        recursive = request.query_params.get("recursive", "").lower() in ("1", "true")
        return JSONResponse(list(_listing(repo, oid, f"{path}/" if path else "", recursive)))

    async def preupload(request):
        body = await request.json()
        repo = opened(request)
        commit = _resolve(repo, revision(request))
        files = []
        for file in body["files"]:
            try:
                oid = _entry(repo, commit, file["path"])[1].decode()
            except HubError:
                oid = None
            files.append({"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": oid})
        return JSONResponse({"files": files})

    async def commit(request):
        lines = [json.loads(line) for line in (await request.body()).splitlines() if line.strip()]
        repo = opened(request, to_write=True)
        ref = _branch_ref(revision(request))
        head = _resolve(repo, revision(request))
        message, deleted, added = "", set(), {}
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "header":
                message = value["summary"]
                if "\0" in message:
                    raise HubError(400, f"summary: expected text without NUL, found {message!r}")
                if value.get("parentCommit", head.decode()) != head.decode():
                    raise HubError(
                        412, f"A commit has happened since {value['parentCommit']}. Please refresh and retry"
                    )
            elif key == "file":
                content = base64.b64decode(value["content"], validate=True)
                added[_file_path(value["path"])] = _stored(repo, Blob.from_string(content))
            elif key in ("deletedFile", "deletedFolder"):
                path = value["path"].rstrip("/")
                deleted.add(_file_path(path))
                _entry(repo, head, path)
            else:
                raise HubError(400, f"key: expected header, file, deletedFile or deletedFolder, found {key!r}")
        new = _commit(repo, _changed(repo, repo[head].tree, deleted, added), [head], message)
        # All objects are on disk. The branch changes atomically.
        if not repo.refs.set_if_equals(ref, head, new):
            raise HubError(412, "A commit has happened since. Please refresh and retry")
        organisation, name = request.path_params["organisation"], request.path_params["name"]
        link = url(request, organisation, name, "commit", new.decode())
        return JSONResponse({"success": True, "commitOid": new.decode(), "commitUrl": link, "hookOutput": ""})

    async def file(request):
        repo = opened(request)
        sha = _resolve(repo, revision(request))
        headers = {"X-Repo-Commit": sha.decode()}
        try:
            mode, oid = _entry(repo, sha, request.path_params["path"])
        except HubError as error:
            return _refusal(error, headers)
        if mode == 0o040000:
            return _refusal(HubError(404, "Entry not found", "EntryNotFound"), headers)
        content = repo[oid].data
        headers.update({"ETag": f'"{oid.decode()}"', "Accept-Ranges": "bytes"})
        # Clients resume interrupted downloads.
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if not wanted:
            return Response(content, headers=headers, media_type="application/octet-stream")
        start, end = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        if start > end:
            return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{len(content)}"})
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        return Response(content[start : end + 1], 206, headers=headers, media_type="application/octet-stream")

    kernel = "/api/kernels/{organisation}/{name}"
    return [
        Route("/api/repos/create", create, methods=["POST"]),
        Route("/api/validate-yaml", validate_yaml, methods=["POST"]),
        Route("/api/organizations/{organisation}/overview", organisation),
        Route(kernel, info),
        Route(f"{kernel}/revision/{{revision}}", info),
        Route(f"{kernel}/refs", refs),
        Route(f"{kernel}/branch/{{branch}}", create_branch, methods=["POST"]),
        Route(f"{kernel}/tree/{{revision}}", tree),
        Route(f"{kernel}/tree/{{revision}}/{{path:path}}", tree),
        Route(f"{kernel}/preupload/{{revision}}", preupload, methods=["POST"]),
        Route(f"{kernel}/commit/{{revision}}", commit, methods=["POST"]),
        Route("/kernels/{organisation}/{name}/resolve/{revision}/{path:path}", file),
    ]


def _refusal(error: HubError, headers: Optional[dict] = None) -> Response:
    # Headers are limited to printable ASCII; the body is not.
    message = str(error).encode("ascii", "backslashreplace").decode()
    headers = {**(headers or {}), **({"X-Error-Message": message} if message.isprintable() else {})}
    headers.update({"X-Error-Code": error.code} if error.code else {})
    return JSONResponse({"error": str(error)}, error.status, headers=headers)


async def _answer_refusal(request: Request, error: HubError) -> Response:
    return _refusal(error)


async def _answer_failure(request: Request, error: OSError) -> Response:
    return _refusal(HubError(500, f"the Hub cannot read or write its folder: {error}"))


async def _answer_malformed(request: Request, error: Exception) -> Response:
    return _refusal(HubError(400, f"malformed request: {type(error).__name__}: {error}"))


class _OwnPages:
    """Refuses requests that a browser sends for pages of other origins, which could otherwise write to this Hub.

    Host is checked as well, because the name of a foreign page can resolve to 127.0.0.1 (DNS rebinding).
    """

    def __init__(self, app, port: int):
        names = ["127.0.0.1", "localhost"]
        hosts = [f"{name}:{port}" for name in names] + names * (port == 80)
        self.app = app
        self.expected = {
            b"host": hosts,
            b"origin": [f"http://{host}" for host in hosts],
            b"sec-fetch-site": ["same-origin", "none"],
        }

    async def __call__(self, scope, receive, send):
        found = [(name, value.decode("latin-1")) for name, value in scope["headers"] if name in self.expected]
        wrong = [each for each in found if each[1].lower() not in self.expected[each[0]]]
        if b"host" not in dict(found):
            wrong.append((b"host", ""))
        if wrong:
            name, value = wrong[0]
            expected = " or ".join(self.expected[name])
            error = HubError(403, f"{name.decode().title()}: expected {expected}, found {value!r}")
            return await _refusal(error)(scope, receive, send)
        await self.app(scope, receive, send)


class _RawPaths:
    """Routes on the raw path, so that the quoted slashes of refs%2Fheads%2Fv1 stay in one segment."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        scope = {**scope, "path": scope["raw_path"].decode("ascii"), "root_path": ""}
        await self.app(scope, receive, send)


class _Unquoted(Route):
    def matches(self, scope):
        match, child = super().matches(scope)
        if "path_params" in child:
            child["path_params"] = {key: unquote(value) for key, value in child["path_params"].items()}
        return match, child


class _Recorded:
    """Records each request and passes it on."""

    def __init__(self, app, requests: list):
        self.app, self.requests = app, requests

    async def __call__(self, scope, receive, send):
        self.requests.append(f"{scope['method']} {scope['raw_path'].decode('ascii')}")
        await self.app(scope, receive, send)


# Serving


@dataclass
class LocalHub:
    """A running Hub.

    Attributes:
        url: its address, for HF_ENDPOINT.
        repositories: its git repositories.
        requests: `"<METHOD> <path>"` of every request so far.
    """

    url: str
    repositories: Repositories
    requests: list[str]


@contextlib.contextmanager
def serve(
    root: Path, trusted: Union[list, set, tuple] = (), port: int = 0, around: Callable = lambda app: app
) -> Iterator[LocalHub]:
    """Serve the repositories below `root` on the loopback interface, in a thread, until the block ends.

    Args:
        root: folder of the repositories; made if missing.
        trusted: the organisations that are trusted kernel publishers.
        port: the port to listen on; 0: a free one.
        around: application -> the application that is served in its place.

    Raises:
        OSError: the port is taken, or another Hub serves the folder.
    """
    root.mkdir(parents=True, exist_ok=True)
    # asyncio sends small parts of an answer at once if the protocol is named; otherwise most answers wait 40 ms.
    with _held(root), socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        port = listener.getsockname()[1]
        hub = LocalHub(f"http://127.0.0.1:{port}", Repositories(root), [])
        config = uvicorn.Config(
            _Recorded(around(_OwnPages(_RawPaths(_application(hub, set(trusted))), port)), hub.requests),
            log_level="critical",
            http="h11",
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=0,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="local-hub", daemon=True)
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield hub
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Locks the folder for this Hub until the block or the process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError("another Hub serves this folder") from None
        yield
    finally:
        os.close(descriptor)


def _application(hub: LocalHub, trusted: set) -> Starlette:
    routes = [
        _Unquoted(route.path, route.endpoint, methods=route.methods) for route in _routes(hub.repositories, trusted)
    ]
    malformed = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
    handlers = {HubError: _answer_refusal, OSError: _answer_failure, **dict.fromkeys(malformed, _answer_malformed)}
    return Starlette(routes=routes, exception_handlers=handlers)


def variables(hub: LocalHub) -> dict[str, str]:
    """The environment variables with which a new process uses `hub`."""
    # A proxy would connect to 127.0.0.1 of its own machine.
    direct = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    ours = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "local", "HF_HUB_OFFLINE": "0", **direct}
    allow_no_telemetry(ours)
    return ours


def environment(hub: LocalHub) -> dict[str, str]:
    """The environment of this process with the `variables` of `hub`."""
    return {**os.environ, **variables(hub)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--root", type=Path, metavar="DIR", help="folder of the git repositories (default: a temporary folder)"
    )
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="ORG",
        help="make ORG a trusted kernel publisher, as `kernels lock` requires; may be repeated",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="command to run with the Hub; its exit status is returned (default: serve until interrupted)",
    )
    options = parser.parse_args()
    if options.root and options.root.exists() and not options.root.is_dir():
        parser.error(f"--root: expected a folder, found the file {options.root}")
    if not 0 <= options.port < 1 << 16:
        parser.error(f"--port: expected a number from 0 to 65535, found {options.port}")
    for name in options.trust:
        if not _NAME.fullmatch(name):
            parser.error(f"--trust: expected an organisation such as lossless-kernels, found {name!r}")
    clean_up_when_terminated()
    with contextlib.ExitStack() as stack:
        root = options.root or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="local-hub-")))
        try:
            hub = stack.enter_context(serve(root, options.trust, options.port))
        except OSError as error:
            print(f"local_hub: error: port {options.port}, folder {root}: {error}", file=sys.stderr)
            return 1
        if options.command:
            return run(options.command, environment(hub))
        print(introduction(hub, options.trust), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


def introduction(hub: LocalHub, trusted: list[str]) -> str:
    """Settings and explanations as lines that a shell can read."""
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables(hub).items())
    return f"""\
export {settings}
# Repositories in {hub.repositories.root}; interrupt to stop.
# `kernels lock` accepts only kernels of trusted organisations. Trusted here: {", ".join(trusted) or "none"}.
# To trust one, start again with: make hub ARGS="--trust ORG\""""


def run(command: list[str], environment: dict[str, str]) -> int:
    """Runs a command and returns its exit status. If this process is terminated, the command is too."""
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        print(f"local_hub: error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 1
    with process:
        try:
            status = process.wait()
            return status if status >= 0 else 128 - status
        except KeyboardInterrupt:  # The terminal interrupts the command as well.
            return 130
        except SystemExit:
            process.terminate()
            raise


if __name__ == "__main__":
    sys.exit(main())
