"""What the tests share: the built kernel, seeds, fresh interpreters, and what tests marked gpu need."""

import functools
import gc
import importlib.util
import os
import random
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

# Threads of OpenMP that wait for a core spin: processes of tests that share the cores take a hundred times as long.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))

import pytest
import torch
from places import forget_all, forget_calls, python_module

# The tests' Hub is on this machine, whatever the shell says about the real one, and no proxy leads to it.
os.environ.update(HF_HUB_OFFLINE="0", NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")

from bits import fresh_seed

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"

# Settings of the caller's shell that would change what a test observes.
_OURS = ("LOSSLESS_PROOF", "TRITON_INTERPRET", "LOCAL_KERNELS", "DISABLE_KERNEL_MAPPING", "USE_HUB_KERNELS")

# What publishing and the tests' Hub need. Where a GPU's torch came without it, their tests are left out.
_MISSING = [name for name in ("httpx2", "dulwich", "griffe", "starlette") if not importlib.util.find_spec(name)]
collect_ignore = [f"test_{name}.py" for name in ("hub", "local_hub", "publish", "vendor", "verify") if _MISSING]


def _of_kernel_builder(config):
    """Whether the tests were selected as kernel-builder's CI selects them."""
    return config.getoption("markexpr") == "kernels_ci"


def _patch_language_once():
    """Patches `triton.language` once a launch. Triton's interpreter patches it again whenever one function of a kernel calls
    another. The second patch changes nothing, and takes up to a third of a test's time."""
    if not importlib.util.find_spec("triton"):
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch, nothing = interpreter._patch_lang, getattr(interpreter, "_LangPatchScope", lambda: None)

    def patch_once(function):
        languages = [each for each in function.__globals__.values() if each is tl or each is tl.core]
        patched = languages and not any(tl.core.is_builtin(each.load) for each in languages)
        return nothing() if patched else patch(function)

    interpreter._patch_lang = patch_once


def pytest_configure(config):
    if not _of_kernel_builder(config):  # Which has no transformers.
        import decorated  # noqa: F401
    # Without a GPU the kernels run in Triton's interpreter. Triton reads this when it is imported, which torch alone
    # does not do. Kernel-builder's CI has the original operations there, as users have.
    if not torch.cuda.is_available() and not _of_kernel_builder(config):
        os.environ["TRITON_INTERPRET"] = "1"
        _patch_language_once()


def pytest_ignore_collect(collection_path, config):
    """Kernel-builder's CI reads one file, since the others import what its environment does not have."""
    if not collection_path.match("test_*.py"):
        return None
    if collection_path.name == "test_kernels_ci.py":
        return None if torch.cuda.is_available() or _of_kernel_builder(config) else True
    return True if _of_kernel_builder(config) else None


def pytest_report_header():
    return f"tests of publishing and of the Hub are left out: no {', '.join(_MISSING)}" if _MISSING else ""


def pytest_runtest_setup(item):
    gpus = torch.cuda.device_count()
    for marker, needed in (("gpu", 1), ("gpu2", 2)):
        if item.get_closest_marker(marker) and gpus < needed:
            pytest.skip(f"needs {needed} CUDA device{'s' * (needed > 1)}, torch sees {gpus or 'no CUDA device'}")
    alone = item.get_closest_marker("alone")
    if (
        alone
        and gpus
        and (needed := alone.kwargs.get("gib", 0)) > (has := torch.cuda.get_device_properties(0).total_memory >> 30)
    ):
        pytest.skip(f"needs {needed} GiB of a GPU's memory, this one has {has}")


@pytest.fixture
def no_garbage_collected():
    """For tests that time single events: collecting what other tests left behind takes Python up to 0.4 s (seen once)."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def build():
    """The folder that `make build` makes."""
    folder = ROOT / "build"
    if not list(folder.glob("torch-*/metadata.json")):
        pytest.fail(f"{folder} holds no built kernel: run `make build` first", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def kernel(build):
    """The built kernel, loaded as users load it."""
    from kernels import get_local_kernel

    return get_local_kernel(build)


@pytest.fixture
def seed():
    """A new seed for each test, printed; LOSSLESS_SEED repeats a run."""
    return fresh_seed()


@pytest.fixture
def chooser(seed):
    """Random choices from that seed."""
    return random.Random(seed)


@pytest.fixture
def module(kernel):
    """The kernel's Python modules, by name."""
    return lambda name: python_module(kernel, name)


@pytest.fixture
def refusals(module, monkeypatch, recwarn):
    """Every call of the test must have run the kernels: no call and no verification was refused, nothing warned.

    A test adds to the set words of each reason that it accepts.
    """
    proof, allowed = module("proof"), set()
    monkeypatch.setattr(proof, "_refusals", weakref.WeakKeyDictionary())
    before = set(proof._verdicts)
    yield allowed
    refused = [key for key, verdict in proof._verdicts.items() if not verdict and key not in before]
    assert not refused
    assert not [reason for _, reason in proof.refusals() if not any(words in reason for words in allowed)]
    assert not [str(w.message) for w in recwarn if "lossless" in str(w.message)]


@pytest.fixture
def nothing_known(module, monkeypatch):
    """What other tests have taught the package, warnings that come once included, is not known in this test."""
    forget_all(module, monkeypatch)
    yield
    forget_calls(module)


@pytest.fixture
def proof_off(monkeypatch):
    monkeypatch.setenv("LOSSLESS_PROOF", "off")


@pytest.fixture(autouse=True)
def own_calls():
    """What a call resolves to depends on `LOSSLESS_PROOF`, which tests set: no test finds the calls of another, nor a proof that
    failed, as those of sums do in the interpreter, where eager adds in a CPU's order."""
    for name, module in list(sys.modules.items()):
        if name.endswith(".core.calls"):
            for calls in module.Calls.every:
                calls.clear()
        elif name.endswith(".core.proof"):
            for key in [key for key, verdict in module._verdicts.items() if not verdict]:
                del module._verdicts[key]


@pytest.fixture(autouse=True)
def own_functions():
    """A function that kernelize has replaced is replaced for all models of its file: after each test it is its own again."""
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            state = vars(vars(module).get("apply_rotary_pos_emb", module))
            for each in ("forward", "_before_lossless_kernels"):
                state.pop(each, None)


@pytest.fixture(autouse=True)
def own_names(monkeypatch):
    """Nor has a class of transformers, which all models share, a layer name any longer that a test has given it."""
    import kernels

    named, give = {}, kernels.replace_kernel_forward_from_hub
    names = ("kernel_layer_name", "kernel_condition")

    @functools.wraps(give)
    def record(layer_class, *arguments, **options):
        named.setdefault(layer_class, {name: vars(layer_class)[name] for name in names if name in vars(layer_class)})
        give(layer_class, *arguments, **options)

    monkeypatch.setattr(kernels, "replace_kernel_forward_from_hub", record)
    yield
    for layer_class, before in named.items():
        for name in names:
            if name in before:
                setattr(layer_class, name, before[name])
            elif name in vars(layer_class):
                delattr(layer_class, name)


def _run_python(code, check=True, arguments=(), **environment):
    clean = {key: value for key, value in os.environ.items() if key not in _OURS}
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    # Nothing here may need the network.
    clean["HF_HUB_OFFLINE"] = "1"
    clean.update({key: str(value) for key, value in environment.items()})
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True)
    if check and done.returncode:
        pytest.fail(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done


@pytest.fixture(scope="session")
def run_python():
    """run_python(code, check=True, arguments=(), **environment) -> subprocess.CompletedProcess, in a fresh Python.

    The code finds the modules of tests/; with `check` an exit status other than 0 fails the test with all it printed.
    """
    return _run_python


@pytest.fixture(scope="session")
def interpreted():
    """`run_python` with the kernels in Triton's interpreter, on CPU tensors."""
    return functools.partial(_run_python, TRITON_INTERPRET="1")


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """A `hub.Published`: the project as it lies here, committed, built and published as version 1. Nobody changes it."""
    from hub import Published

    return Published(tmp_path_factory.mktemp("published"))
