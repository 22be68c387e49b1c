"""Copies of the project that are git repositories of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
PACKAGE = "torch-ext/lossless_kernels"
REPO_ID = "lossless-kernels/lossless-kernels"


def run(command, folder, **environment):
    """Runs a command in `folder`, away from the settings of git and of the Hub that this process has."""
    # A git hook that runs the tests sets variables that point git at the real repository, and there may be another
    # one above the temporary folder.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    inherited.update(
        GIT_CEILING_DIRECTORIES=str(folder.parent),
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
        HF_HUB_OFFLINE="1",
    )
    inherited.update({key: str(value) for key, value in environment.items()})
    command = [str(part) for part in command]
    return subprocess.run(command, cwd=folder, env=inherited, capture_output=True, text=True)


def git(project, *arguments):
    done = run(["git", "-c", "user.name=test", "-c", "user.email=test@localhost", *arguments], project)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(project):
    git(project, "add", ".")
    git(project, "commit", "--quiet", "--message", "all")


def script(project, name, *arguments, **environment):
    """Runs one of the project's scripts."""
    return run([sys.executable, f"scripts/{name}.py", *arguments], project, **environment)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def export(project):
    """What the scripts need of the project, without history."""
    shutil.copytree(ROOT / "torch-ext", project / "torch-ext", ignore=shutil.ignore_patterns("__pycache__", "_ops.py"))
    shutil.copytree(SCRIPTS, project / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("build.toml", ".gitignore", "CARD.md"):
        shutil.copy(ROOT / name, project / name)
    (project / "kernels_src").symlink_to(f"{PACKAGE}/kernels_src")
    return project
