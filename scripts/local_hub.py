#!/usr/bin/env python3
"""A Hub for kernel repositories on the loopback interface, over bare git repositories.

It answers what `kernels` and `huggingface_hub` ask of huggingface.co to publish, list, fetch and lock kernels, and
nothing beyond: no accounts, no large-file storage. For tests, for the demo and for trying out a release offline.

    python scripts/local_hub.py                       serve until interrupted, and print the address
    python scripts/local_hub.py make publish          run a command against a Hub that ends with it

The command finds the Hub in HF_ENDPOINT. `huggingface_hub` reads that variable once, when it is imported.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional, Union
from urllib.parse import unquote

from command import requirements

with requirements():
    import uvicorn
    import yaml
    from dulwich.object_store import commit_tree_changes, tree_lookup_path
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
# Like the real Hub's, a new repository is not empty.
_FIRST_FILES = {b".gitattributes": b"*.so filter=lfs diff=lfs merge=lfs -text\n"}


class HubError(Exception):
    """What the Hub refuses: an HTTP status, and the code by which the clients tell one 404 from another."""

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
            raise HubError(400, f"{organisation}/{name} is no valid repository name")
        if path.exists():
            raise HubError(409, "You already created this kernel repo")
        path.parent.mkdir(parents=True, exist_ok=True)
        repo = Repo.init_bare(str(path), mkdir=True)
        changes = [(name, 0o100644, _stored(repo, Blob.from_string(content))) for name, content in _FIRST_FILES.items()]
        tree = commit_tree_changes(repo.object_store, _stored(repo, Tree()), changes)
        repo.refs[b"refs/heads/main"] = _commit(repo, tree, [], "initial commit")

    def open(self, organisation: str, name: str) -> Repo:
        path = self._path(organisation, name)
        if path is None or not path.is_dir():
            raise HubError(404, "Repository not found", "RepoNotFound")
        if path not in self._opened:
            self._opened[path] = Repo(str(path))
        return self._opened[path]

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
    ref = f"refs/heads/{name.removeprefix('refs/heads/')}".encode()
    if not check_ref_format(ref):
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


def _listing(repo: Repo, tree: bytes, prefix: str, recursive: bool) -> Iterator[dict]:
    for name, mode, oid in repo[tree].items():
        path = prefix + name.decode()
        if mode == 0o040000:
            yield {"type": "directory", "oid": oid.decode(), "size": 0, "path": path}
            if recursive:
                yield from _listing(repo, oid, path + "/", True)
        else:
            yield {"type": "file", "oid": oid.decode(), "size": len(repo[oid].data), "path": path}


# What the Hub answers. No handler waits for anything in the middle of its work, so requests are served one after another.


def _routes(repositories: Repositories, trusted: set) -> list[Route]:
    def opened(request: Request) -> Repo:
        return repositories.open(request.path_params["organisation"], request.path_params["name"])

    def revision(request: Request) -> str:
        return request.path_params.get("revision", "main")

    def url(request: Request, *parts: str) -> str:
        return "/".join((str(request.base_url).rstrip("/"), "kernels", *parts))

    async def create(request):
        body = await request.json()
        organisation, name = body.get("organization"), body.get("name")
        if body.get("type") != "kernel":
            raise HubError(400, f"type: only kernel repositories live here, found {body.get('type')!r}")
        if not organisation or not name:
            raise HubError(400, "expected a repository name such as organisation/name")
        answer = {"url": url(request, organisation, name), "name": f"{organisation}/{name}"}
        try:
            repositories.create(organisation, name)
        except HubError as error:
            # create_repo(exist_ok=True) reads the url from this answer too.
            return JSONResponse({"error": str(error), **answer}, error.status)
        return JSONResponse(answer)

    async def organisation(request):
        name = request.path_params["organisation"]
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
        repo = opened(request)
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
        repo = opened(request)
        ref = _branch_ref(revision(request))
        head = _resolve(repo, revision(request))
        message, changes = "", []
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "header":
                message = value["summary"]
                if value.get("parentCommit", head.decode()) != head.decode():
                    raise HubError(
                        412, f"A commit has happened since {value['parentCommit']}. Please refresh and retry"
                    )
                continue
            path = value["path"].rstrip("/")
            if not all(part not in ("", ".", "..", ".git") for part in path.split("/")):
                raise HubError(400, f"{value['path']!r} is no path of a file")
            if key == "file":
                blob = Blob.from_string(base64.b64decode(value["content"], validate=True))
                changes.append((path.encode(), 0o100644, _stored(repo, blob)))
            elif key in ("deletedFile", "deletedFolder"):
                _entry(repo, head, path)
                changes.append((path.encode(), None, None))
            else:
                raise HubError(400, f"{key}: not supported here")
        # Deletions first: a file may take the place of a deleted folder.
        changes.sort(key=lambda change: change[2] is not None)
        new = _commit(repo, commit_tree_changes(repo.object_store, repo[head].tree, changes), [head], message)
        # All objects are on disk; from here on the branch is the new one, at once.
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
        # A download that broke off asks for the rest.
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
    headers = {**(headers or {}), "X-Error-Message": str(error), **({"X-Error-Code": error.code} if error.code else {})}
    return JSONResponse({"error": str(error)}, error.status, headers=headers)


async def _answer_refusal(request: Request, error: HubError) -> Response:
    return _refusal(error)


async def _answer_malformed(request: Request, error: Exception) -> Response:
    return _refusal(HubError(400, f"malformed request: {type(error).__name__}: {error}"))


class _RawPaths:
    """Routes on the path as it was sent, so that the quoted slashes of refs%2Fheads%2Fv1 stay inside one segment."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            scope = {**scope, "path": scope["raw_path"].decode("ascii"), "root_path": ""}
        await self.app(scope, receive, send)


class _Unquoted(Route):
    def matches(self, scope):
        match, child = super().matches(scope)
        if "path_params" in child:
            child["path_params"] = {key: unquote(value) for key, value in child["path_params"].items()}
        return match, child


# Faults, for tests


@dataclass
class Fault:
    """Something that goes wrong with the requests whose `"<METHOD> <path>"` matches a pattern.

    Args:
        where: regular expression, searched in method and path as sent.
        what: an HTTP status to answer with, or one of
            `reset` (the connection is reset before an answer),
            `truncate` (the body breaks off in the middle of what was announced),
            `shorten` (the body ends early and Content-Length agrees),
            `tamper` (one byte of the body is another),
            `no-etag`, `wrong-etag` (the header is missing, or is that of no file),
            `slow` (`seconds` pass before the request is served), `late` (or before the answer to a served request).
        times: how many requests it meets; all of them if not given.
        seconds: for `slow` and `late`.

    `met` counts the requests it met, `served` those among them that the Hub has carried out.
    """

    where: str
    what: Union[int, str]
    times: Optional[int] = None
    seconds: float = 30.0
    met: int = field(default=0, init=False)
    served: int = field(default=0, init=False)

    def meets(self, request: str) -> bool:
        if re.search(self.where, request) and (self.times is None or self.met < self.times):
            self.met += 1
            return True
        return False


class _Faulty:
    """Passes requests on, with the faults of a list, and keeps a record of them."""

    def __init__(self, app, faults: list, requests: list):
        self.app, self.faults, self.requests = app, faults, requests

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = f"{scope['method']} {scope['raw_path'].decode('ascii')}"
        self.requests.append(request)
        fault = next((fault for fault in self.faults if fault.meets(request)), None)
        if fault is None:
            return await self.app(scope, receive, send)
        if isinstance(fault.what, int):
            return await _refusal(HubError(fault.what, "injected fault"))(scope, receive, send)
        if fault.what == "reset":
            return _reset(send)
        if fault.what == "slow":
            await asyncio.sleep(fault.seconds)
            return await self.app(scope, receive, send)
        answer = []

        async def keep(message):
            answer.append(message)

        await self.app(scope, receive, keep)
        fault.served += 1
        await _send_spoiled(fault, answer, send)


async def _send_spoiled(fault: Fault, answer: list, send) -> None:
    headers = dict(answer[0]["headers"])
    body = b"".join(message.get("body", b"") for message in answer[1:])
    half = len(body) // 2
    if fault.what == "late":
        await asyncio.sleep(fault.seconds)
    elif fault.what == "shorten":
        body = body[:half]
        headers[b"content-length"] = str(half).encode()
    elif fault.what == "tamper":
        body = body[:half] + bytes([body[half] ^ 1]) + body[half + 1 :] if body else body
    elif fault.what == "no-etag":
        headers.pop(b"etag", None)
    elif fault.what == "wrong-etag":
        headers[b"etag"] = b'"' + b"0" * 40 + b'"'
    await send({**answer[0], "headers": list(headers.items())})
    if fault.what == "truncate" and body:
        await send({"type": "http.response.body", "body": body[:half], "more_body": True})
        # Let the half be sent before the connection is cut.
        await asyncio.sleep(0.05)
        return _transport(send).close()
    await send({"type": "http.response.body", "body": body})


def _transport(send):
    # The innermost `send` is a method of uvicorn's record of this request.
    return send.__self__.transport


def _reset(send) -> None:
    transport = _transport(send)
    # With no time to linger a close is a reset, as from a machine that went down.
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    transport.abort()


# Serving


@dataclass
class LocalHub:
    """A Hub that is being served.

    Attributes:
        url: its address, for HF_ENDPOINT.
        repositories: what it holds.
        faults: what shall go wrong; may be changed at any time.
        requests: `"<METHOD> <path>"` of every request so far.
    """

    url: str
    repositories: Repositories
    faults: list[Fault]
    requests: list[str]


@contextlib.contextmanager
def serve(root: Path, trusted: Union[list, set, tuple] = (), port: int = 0) -> Iterator[LocalHub]:
    """Serve the repositories below `root` on the loopback interface, in a thread, until the block ends.

    Args:
        root: folder of the repositories; made if missing.
        trusted: the organisations that count as trusted kernel publishers.
        port: the port to listen on; by default one that is free.

    Raises:
        OSError: the port is taken.
    """
    root.mkdir(parents=True, exist_ok=True)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.close()
        raise
    hub = LocalHub(f"http://127.0.0.1:{listener.getsockname()[1]}", Repositories(root), [], [])
    routes = [
        _Unquoted(route.path, route.endpoint, methods=route.methods)
        for route in _routes(hub.repositories, set(trusted))
    ]
    malformed = dict.fromkeys((KeyError, TypeError, ValueError, AttributeError), _answer_malformed)
    app = Starlette(routes=routes, exception_handlers={HubError: _answer_refusal, **malformed})
    config = uvicorn.Config(
        _Faulty(_RawPaths(app), hub.faults, hub.requests),
        log_level="critical",
        http="h11",
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
        listener.close()


def environment(hub: LocalHub) -> dict[str, str]:
    """The variables with which a new process speaks to `hub` and to no other."""
    # A proxy would look for 127.0.0.1 on its own machine.
    direct = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return {**os.environ, **direct, "HF_ENDPOINT": hub.url, "HF_TOKEN": "local", "HF_HUB_OFFLINE": "0"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--root", type=Path, metavar="DIR", help="folder of the git repositories (default: a temporary one)"
    )
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: one that is free)")
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="ORG",
        help="organisation that counts as a trusted kernel publisher; may be repeated",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run; its exit status is the Hub's")
    options = parser.parse_args()
    if options.root and options.root.exists() and not options.root.is_dir():
        parser.error(f"--root: expected a folder, found the file {options.root}")
    if not 0 <= options.port < 1 << 16:
        parser.error(f"--port: expected a number from 0 to 65535, found {options.port}")
    for name in options.trust:
        if not _NAME.fullmatch(name):
            parser.error(f"--trust: expected an organisation such as lossless-kernels, found {name!r}")
    with contextlib.ExitStack() as stack:
        root = options.root or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="local-hub-")))
        try:
            hub = stack.enter_context(serve(root, options.trust, options.port))
        except OSError as error:
            print(f"local_hub: error: port {options.port}, folder {root}: {error}", file=sys.stderr)
            return 1
        if options.command:
            try:
                return subprocess.run(options.command, env=environment(hub)).returncode
            except OSError as error:
                print(f"local_hub: error: {options.command[0]}: {error.strerror}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:  # The command had it too, and has said what there is to say.
                return 130
        print(f"export HF_ENDPOINT={hub.url}  # repositories in {root}; interrupt to stop", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
