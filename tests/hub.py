"""Hubs for the tests, which may have faults: a published release, made once, and a fresh copy for whoever changes something."""

import asyncio
import contextlib
import pickle
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional, Union

import pytest
from projects import REPO_ID, SCRIPTS, commit, export, git

for needed in ("kernels._rust", "starlette", "uvicorn", "dulwich", "griffe", "jinja2"):
    pytest.importorskip(needed, reason=f"{needed} is not installed, which publishing and its tests need")

import build_kernel  # noqa: E402
import local_hub  # noqa: E402
import publish  # noqa: E402
from huggingface_hub import HfApi  # noqa: E402

ORGANISATION = REPO_ID.split("/")[0]


UPLOAD_PY = """
import pickle, sys
sys.path.insert(0, sys.argv[1])
import publish
from huggingface_hub import HfApi

with open(sys.argv[2], "rb") as file:
    release = pickle.load(file)
api = HfApi()
publish.upload(api, release, publish.remote_branches(api, release.project.repo_id), False, lambda step: None)
"""


def client(hub):
    return HfApi(endpoint=hub.url, token="local")


def release_of(project, repo_id=REPO_ID, allow_dirty=False):
    """Builds a project and checks the build as `publish.py` does."""
    build_kernel.build(project, project / "build", None, None, quiet=True)
    return publish.prepare(project, project / "build", repo_id, allow_dirty, lambda step: None)


def upload(hub, release, dry_run=False):
    api = client(hub)
    branches = publish.remote_branches(api, release.project.repo_id)
    return publish.upload(api, release, branches, dry_run, lambda step: None)


def upload_build(hub, build):
    """A build as version 1 and nothing around it, for tests of those who load it."""
    api, where = client(hub), {"repo_id": REPO_ID, "repo_type": "kernel"}
    api.create_repo(**where)
    api.create_branch(**where, branch="v1")
    api.upload_folder(**where, folder_path=build, path_in_repo="build", revision="v1")


def upload_process(hub, release, folder):
    """The upload in a process of its own, which a test may kill."""
    path = folder / "release.pickle"
    path.write_bytes(pickle.dumps(release))
    return subprocess.Popen([sys.executable, "-c", UPLOAD_PY, SCRIPTS, path], env=local_hub.environment(hub))


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
    """Passes requests on, with the faults of a list."""

    def __init__(self, app, faults: list):
        self.app, self.faults = app, faults

    async def __call__(self, scope, receive, send):
        request = f"{scope['method']} {scope['raw_path'].decode('ascii')}"
        fault = next((fault for fault in self.faults if fault.meets(request)), None)
        if fault is None:
            return await self.app(scope, receive, send)
        if isinstance(fault.what, int):
            return await local_hub._refusal(local_hub.HubError(fault.what, "injected fault"))(scope, receive, send)
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


@contextlib.contextmanager
def serve(root: Path, trusted=()):
    """A Hub with which something may go wrong: `faults` is a list of `Fault` that may be changed at any time."""
    faults = []
    with local_hub.serve(root, trusted, around=lambda app: _Faulty(app, faults)) as hub:
        hub.faults = faults
        yield hub


class Published:
    """A project, with its own package or another, its release, and a Hub's folder that holds it as version 1."""

    def __init__(self, folder: Path, package=None):
        self.project = export(folder / "project", package)
        git(self.project, "init", "--quiet")
        commit(self.project)
        self.release = release_of(self.project)
        self.root = folder / "hub"
        with local_hub.serve(self.root) as hub:
            upload(hub, self.release)

    def copy_project(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.project, folder, symlinks=True))

    @contextlib.contextmanager
    def serve(self, folder: Path, names=()):
        """A Hub that holds copies of it, under `names` too."""
        root = Path(shutil.copytree(self.root, folder))
        organisation, name = REPO_ID.split("/")
        for other in names:
            there = root / (f"{other}.git" if "/" in other else f"{organisation}/{other}.git")
            shutil.copytree(root / organisation / f"{name}.git", there)
        with serve(root, trusted=[organisation]) as hub:
            yield hub
