"""A kernel of three small files for tests of what is around a kernel: Hubs that hold it, and variants of other code."""

import contextlib
import json

import hub as hubs
import huggingface_hub
import pytest
from hub import client
from huggingface_hub import CommitOperationAdd, constants
from huggingface_hub.utils import _http
from kernels import _rust
from projects import contents

REPO_ID = "org/small"
FILES = {
    "__init__.py": b"from . import layers, sub\n\nVALUE = layers.VALUE + sub.VALUE\n",
    "layers.py": b"# The layers, such as they are: long enough for other code of this length.\nVALUE = 1\n",
    "sub/__init__.py": b"VALUE = 2\n",
}
CARD = "---\nlicense: apache-2.0\n---\nA kernel.\n"


def write_variant(folder, files, backend="cpu", **more):
    """A variant with a digest of its own; `more` goes to its metadata.json."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    digest = _rust.Digest.hash_variant(_rust.DigestAlgorithm.SHA256, folder)
    metadata = {
        "name": "small",
        "id": f"_small_{backend}_0123456",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digest.files},
    }
    (folder / "metadata.json").write_text(json.dumps({**metadata, **more}))


def publish(hub, folder, files=FILES, repo_id=REPO_ID, branch="v1"):
    """Two variants and a card in one commit, which it returns; `folder` becomes what it holds."""
    for backend in ("cpu", "cuda"):
        write_variant(folder / f"build/torch-{backend}", files, backend)
    (folder / "README.md").write_text(CARD)
    api = client(hub)
    api.create_repo(repo_id, repo_type="kernel", exist_ok=True)
    api.create_branch(repo_id, repo_type="kernel", branch=branch, exist_ok=True)
    operations = [CommitOperationAdd(path, content) for path, content in contents(folder).items()]
    return api.create_commit(repo_id, operations, commit_message="one", repo_type="kernel", revision=branch).oid


def write_lockfile(path, *locks):
    """A lockfile of (repository, version, commit)."""
    text = [{"dependency": {"repo-id": name, "version": n}, "lock": {"commit": commit}} for name, n, commit in locks]
    path.write_text(json.dumps(text))
    return path


@contextlib.contextmanager
def endpoint(url):
    """Commands that run in this process find the Hub there. `huggingface_hub` reads HF_ENDPOINT when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        yield
    huggingface_hub.set_client_factory(_http.default_client_factory)


@contextlib.contextmanager
def serve(folder):
    """A Hub at which commands of this process arrive."""
    with hubs.serve(folder, trusted=["org"]) as hub, endpoint(hub.url):
        yield hub
