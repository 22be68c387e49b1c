"""Hubs for the tests: a published release, made once, and a fresh copy of it for whoever changes something."""

import contextlib
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

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
        with local_hub.serve(root, trusted=[organisation]) as hub:
            yield hub
