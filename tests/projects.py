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


# A kernel whose import takes no time: for tests of what happens to files, whatever is in them.
SMALL = {
    "__init__.py": '"""Small."""\n\nfrom . import layers\nfrom .functions import silu\n\n__all__ = ["layers", "silu"]\n',
    "functions.py": '"""Functions."""\n\n\ndef silu(input: float) -> float:\n    return input\n',
    "layers.py": '"""Layers."""\n\n\nclass SiLU:\n    has_backward = True\n\n    def forward(self, input):\n        return input\n',
    "kernels_src/__init__.py": "",
    "plans/some.json": "{}\n",
}


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


def export(project, package=None):
    """What the scripts need of the project, without history; with the files `package` instead of its own."""
    if package is None:
        ignored = shutil.ignore_patterns("__pycache__", "_ops.py")
        shutil.copytree(ROOT / "torch-ext", project / "torch-ext", ignore=ignored)
    for path, text in (package or {}).items():
        (project / PACKAGE / path).parent.mkdir(parents=True, exist_ok=True)
        (project / PACKAGE / path).write_text(text)
    shutil.copytree(SCRIPTS, project / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("build.toml", ".gitignore", "CARD.md"):
        shutil.copy(ROOT / name, project / name)
    (project / "kernels_src").symlink_to(f"{PACKAGE}/kernels_src")
    return project


def everything(folder):
    """Path -> content of all below a folder, hidden, empty or linked."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }
