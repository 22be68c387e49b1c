"""The kernel from a Hub: fetched by version and by lockfile, offline, damaged, in two versions at once.

The Hub is scripts/local_hub.py; `kernels`, `huggingface_hub` and transformers are the real ones, over HTTP.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub import ORGANISATION, Fault, client, local_hub, release_of, upload
from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from projects import PACKAGE, REPO_ID, ROOT, commit, contents, run, script
from verify import main as verify
from verify import repository_folder

# What kernels takes for this torch, whether there is a GPU or not.
VARIANT = f"torch-{'cuda' if torch.version.cuda else 'rocm' if torch.version.hip else 'cpu'}"

NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "local"}


@pytest.fixture
def hub(published, tmp_path):
    """Holds version 1."""
    with published.serve(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture(scope="module")
def lockfile(published, tmp_path_factory):
    """What `kernels lock` writes, and, in `cache`, what it fetches for that."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO_ID}" = 1\n')
    code = "import sys; sys.argv[1:] = ['lock', '.']; from kernels.cli import main; main()"
    with published.serve(folder / "hub") as hub:
        environment = {**local_hub.environment(hub), "KERNELS_CACHE": folder / "cache"}
        done = run([sys.executable, "-c", code], folder, **environment)
        assert done.returncode == 0, done.stderr
    return folder / "kernels.lock"


def python(code, *arguments, folder=ROOT, **environment):
    done = run([sys.executable, "-c", code, *arguments], folder, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# The whole way


def test_round_trip(tmp_path):
    """Built, published, fetched by a fresh process with an empty cache, locked, vendored, and used without the Hub."""
    # Publishing compares a build with the project, and the one of `make build` may be older.
    done = script(ROOT, "build_kernel", "--output", tmp_path / "build")
    assert done.returncode == 0, done.stderr
    done = run([sys.executable, "examples/hub_round_trip.py", "--build", tmp_path / "build", "--json"], ROOT)
    assert done.returncode == 0, done.stderr
    results = [row["result"] for row in json.loads(done.stdout)["steps"]]
    assert results[0] == results[1]
    replaced = "7 of 7 and 7 of 7 layers replaced, logits bit-equal"
    assert results[2:] == [replaced, "3 variants, verified", replaced]


COMMANDS = """
import contextlib, io, json, sys
from kernels.cli import main

statuses = {}
for command in json.loads(sys.argv[1]):
    sys.argv[1:] = command
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            main()
        status = 0
    except SystemExit as error:
        status = error.code
    statuses[command[0]] = [status or 0, output.getvalue()]
print(json.dumps(statuses))
"""
BENCHMARK = """
import torch
from kernels import Benchmark


class Silu(Benchmark):
    def setup(self):
        self.x = torch.randn(4, 64)
        self.out = torch.empty(4, 64)

    def benchmark_silu(self):
        self.out.copy_(self.kernel.silu(self.x))

    def verify_silu(self):
        return torch.nn.functional.silu(self.x)
"""


def test_commands_of_kernels(hub, lockfile, published, tmp_path):
    project = published.copy_project(tmp_path / "project")
    (project / "benchmarks").mkdir()
    (project / "benchmarks/benchmark_silu.py").write_text(BENCHMARK)
    shutil.copy(lockfile, project / "kernels.lock")
    commands = [
        ["info", REPO_ID],
        ["versions", REPO_ID],
        ["download", "."],
        ["benchmark", "./", "--iterations", "2", "--warmup", "1"],
    ]
    environment = {**local_hub.environment(hub), "HF_HOME": tmp_path / "home"}
    statuses = json.loads(python(COMMANDS, json.dumps(commands), folder=project, **environment).splitlines()[-1])
    assert {name: status for name, (status, _) in statuses.items()} == dict.fromkeys(statuses, 0), statuses
    assert "Backends: cpu, cuda, rocm" in statuses["info"][1]
    assert f"{VARIANT} compatible, preferred" in statuses["versions"][1]


@pytest.mark.parametrize("trust", [False, True], ids=["plain", "--trust"])
def test_kernels_lock_on_a_hub_of_your_own(published, tmp_path, trust):
    """A plain Hub trusts no organisation: `kernels lock` ends in a traceback, and the Hub says what to do."""
    shutil.copytree(published.root, tmp_path / "hub")
    (tmp_path / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO_ID}" = 1\n')
    options = ["--root", tmp_path / "hub", *(["--trust", ORGANISATION] if trust else [])]
    command = [Path(sys.executable).with_name("kernels"), "lock", tmp_path]
    done = script(ROOT, "local_hub", *options, *command, KERNELS_CACHE=tmp_path / "cache", HF_HUB_OFFLINE="1")
    hint = f"local_hub: {ORGANISATION} is no trusted publisher here"
    assert (done.returncode == 0, hint in done.stderr) == (trust, not trust), done.stderr
    assert (tmp_path / "kernels.lock").exists() == trust
    if trust:
        (locked,) = json.loads((tmp_path / "kernels.lock").read_text())
        assert len(locked["lock"]["commit"]) == 40
        assert "Traceback" not in done.stderr
    else:
        assert "is not from a trusted publisher" in done.stderr and f"with --trust {ORGANISATION}\n" in done.stderr
        page = " ".join((ROOT / "docs/hub.md").read_text().split())
        assert "it ends in a traceback (`is not from a trusted publisher`)" in page and "`--trust ORG`" in page


def test_what_is_locked_is_not_checked_before_it_is_here(lockfile, capsys):
    for what in ([REPO_ID], ["--lockfile", str(lockfile)]):
        assert verify([*what, "--cache", str(lockfile.parent / "cache")]) == 1
        out, err = capsys.readouterr()
        assert out.count("not checked: no variant is here, or only its metadata.json") == 1
        assert out.count("note: only metadata.json is here") == 3
        assert err == f"verify: 1 of {out.count(REPO_ID)} could not be checked\n"


ENTRY_POINTS = """
import sys
from pathlib import Path
from kernels import LayerRepository, LockedLayerRepository, Mode, get_kernel, get_locked_kernel, has_kernel, load_kernel

repo_id, lockfile, commit = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
kernel = get_kernel(repo_id, version=1)
assert get_kernel(repo_id, revision=commit) is kernel
assert load_kernel(repo_id, lockfile=lockfile) is get_locked_kernel(repo_id, lockfile=lockfile) is kernel
layers = [
    LayerRepository(repo_id, layer_name="LlamaRMSNorm", version=1),
    LockedLayerRepository(repo_id, layer_name="LlamaRMSNorm", lockfile=lockfile),
    kernel.kernel_mapping(repo_id=repo_id)["RMSNorm"]["cuda"][Mode.TRAINING],
]
assert {layer.load() for layer in layers} == {kernel.layers.LlamaRMSNorm}
print(kernel.__file__)
"""


def isolated(*steps):
    """A shell without any network, not even to itself, in which `steps` may mount."""
    probe = subprocess.run(["unshare", "-rmn", "true"], capture_output=True)
    if probe.returncode:
        pytest.skip("this machine lets no process cut its own network")
    return ["unshare", "-rmn", "sh", "-ec", "\n".join(steps)]


def test_every_entry_point_without_a_network(hub, lockfile, tmp_path):
    """After the README's `hf download`, from a read-only cache that held the one variant that `get_kernel` fetches."""
    cache = tmp_path / "cache"
    locked = json.loads(lockfile.read_text())[0]["lock"]["commit"]
    client(hub).snapshot_download(
        REPO_ID, repo_type="kernel", revision=locked, allow_patterns=f"build/{VARIANT}/*", cache_dir=cache
    )
    (tmp_path / "entry_points.py").write_text(ENTRY_POINTS)
    load = f"{sys.executable} {tmp_path}/entry_points.py {REPO_ID} {lockfile} {locked}"
    environment = {"HF_HUB_CACHE": cache, "HF_HOME": tmp_path / "home"}
    arguments = ["download", REPO_ID, "--repo-type", "kernel", "--revision", "v1"]
    hf = [sys.executable, "-m", "huggingface_hub.cli.hf", *arguments]
    assert run(hf, tmp_path, **local_hub.environment(hub), **environment).returncode == 0
    read_only = (f"mount --bind {cache} {cache}", f"mount -o remount,bind,ro {cache}")
    done = run(isolated(*read_only, f"touch {cache}/x 2> /dev/null && exit 9", load), tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{repository_folder(cache, REPO_ID)}/snapshots/{locked}/build/{VARIANT}/")


# Two versions, and one version twice

VERSIONS = """
import json, os, sys
from pathlib import Path
import torch
from bits import assert_bits_equal
from kernels import Mode, get_kernel, get_loaded_kernels, get_local_kernel, kernelize
from test_users import assert_replaced, draw_tokens, llama, logits, only

os.environ["LOSSLESS_PROOF"] = "off"
repo_id, build, copy = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
kernels = [get_kernel(repo_id, version=version, trust_remote_code=[repo_id]) for version in (1, 2)]
first, second = kernels
assert [hasattr(kernel, "added_in_version_2") for kernel in kernels] == [False, True]
models = [llama(1), llama(1)]
for version, (model, kernel) in enumerate(zip(models, kernels), 1):
    with only(kernel.kernel_mapping(repo_id=repo_id, version=version, devices=("cpu",))):
        kernelize(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE)
# Each has its own, whatever was loaded after it.
for model, kernel in zip(models, kernels):
    assert_replaced(model, kernel)
tokens = draw_tokens(1, 17)
assert_bits_equal(logits(models[0], tokens), logits(models[1], tokens))
assert first.__name__ != second.__name__

# The same build from three places: its two folders here, and the Hub.
here, there = get_local_kernel(build), get_local_kernel(copy)
assert here.__name__ == there.__name__ == first.__name__
assert len(get_loaded_kernels()) == 4
x, weight = torch.randn(3, 64), torch.rand(64)
for kernel in (*kernels, here, there):
    assert_bits_equal(kernel.silu(x), first.silu(x))
    assert_bits_equal(kernel.rms_norm(x, weight, 1e-6), first.rms_norm(x, weight, 1e-6))
# What torch.compile calls: each version has operators of its own, and all of them.
registered = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
first_ops, second_ops = ({op for space, op in registered if space == kernel.__name__} for kernel in kernels)
assert first_ops == second_ops and len(first_ops) > 1
model = llama(1)
with only(there.kernel_mapping(devices=("cpu",))):
    kernelize(model, mode=Mode.INFERENCE)
assert_replaced(model, first)
assert_bits_equal(logits(model, tokens), logits(models[0], tokens))
for model, kernel in zip(models, kernels):
    assert_replaced(model, kernel)
"""


@pytest.mark.long
def test_two_versions_and_one_twice_in_a_process(hub, published, interpreted, tmp_path):
    project = published.copy_project(tmp_path / "project")
    for name, old, new in (
        ("build.toml", "version = 1", "version = 2"),
        (f"{PACKAGE}/__init__.py", "\n__all__ = [", '\nadded_in_version_2 = True\n\n__all__ = ["added_in_version_2", '),
    ):
        text = (project / name).read_text()
        assert old in text
        (project / name).write_text(text.replace(old, new))
    commit(project)
    upload(hub, release_of(project))
    copy = shutil.copytree(published.release.build, tmp_path / "copy")
    environment = {**local_hub.environment(hub), "HF_HOME": tmp_path / "home"}
    interpreted(VERSIONS, arguments=[REPO_ID, published.release.build, copy], **environment)


# What goes wrong while `kernels` fetches

# Repository -> where the fault is, which, and what the user gets to see; None if the client gets over it.
CLIENT_FAULTS = {
    "status-500": (f"GET .*/{VARIANT}/layers.py", 500, "HfHubHTTPError"),
    "status-404": (f"GET .*/{VARIANT}/layers.py", 404, "HfHubHTTPError"),
    "no-tree": ("GET .*/tree/", 500, None),
    "no-refs": ("GET .*/refs", "reset", "ReadError"),
    "reset": (f"GET .*/{VARIANT}/layers.py", "reset", "ReadError"),
    "truncate": (f"GET .*/{VARIANT}/layers.py", "truncate", None),
    "shorten": (f"GET .*/{VARIANT}/layers.py", "shorten", "OSError"),
    "no-etag": (f"HEAD .*/{VARIANT}/layers.py", "no-etag", "Error"),
    "wrong-etag": (f"HEAD .*/{VARIANT}/layers.py", "wrong-etag", None),
    "untrusted": ("GET .*/overview", 500, "ValueError"),
}
FETCH = """
import json, sys
import torch
from kernels import get_kernel, has_kernel, install_kernel

results = {}


def attempt(what, function, *arguments, **options):
    try:
        function(*arguments, **options)
        results[what] = None
    except Exception as error:
        results[what] = [" ".join(each.__name__ for each in type(error).__mro__), str(error)]


organisation = sys.argv[1]
for name in sys.argv[2:]:
    # Nothing is imported: what matters is what lies in the cache.
    trust = name != "untrusted"
    for turn in ("first", "second"):
        attempt(f"{name} {turn}", install_kernel, f"{organisation}/{name}", version=1, trust_remote_code=trust)
repo_id = f"{organisation}/truncate"
attempt("version", get_kernel, repo_id, version=7)
attempt("organisation", get_kernel, "strangers/kernel", version=1)
attempt("variant", get_kernel, f"{organisation}/no-cpu", version=1)
attempt("metadata", get_kernel, f"{organisation}/bad-metadata", version=1)
# A torch for CUDA too, as if it were one for another GPU.
torch.version.cuda, torch.version.xpu = None, "20250300"
attempt("xpu", get_kernel, repo_id, version=1)
results["has xpu"] = has_kernel(repo_id, version=1)
torch.backends.mps.is_available = lambda: True
attempt("mps", get_kernel, repo_id, version=1)
print(json.dumps(results))
"""


def test_faults_while_kernels_fetches(published, tmp_path):
    """One error each, of a kind that says what it is; the second attempt finds nothing half-written in its way."""
    names = [*CLIENT_FAULTS, "no-cpu", "bad-metadata", "strangers/kernel"]
    with published.serve(tmp_path / "hub", names) as hub:
        for repository, operation in (
            ("no-cpu", CommitOperationDelete(f"build/{VARIANT}/", is_folder=True)),
            ("bad-metadata", CommitOperationAdd(f"build/{VARIANT}/metadata.json", b"{")),
        ):
            client(hub).create_commit(
                f"{ORGANISATION}/{repository}", [operation], commit_message="x", repo_type="kernel", revision="v1"
            )
        for name, (where, what, _) in CLIENT_FAULTS.items():
            place = where if name == "untrusted" else where.replace(".*", f".*/{name}.*", 1)
            hub.faults.append(Fault(place, what, times=1))
        environment = {**local_hub.environment(hub), "KERNELS_CACHE": tmp_path / "cache"}
        output = python(FETCH, ORGANISATION, *CLIENT_FAULTS, **environment)
        results = json.loads(output.splitlines()[-1])
        assert [fault.met for fault in hub.faults] == [1] * len(hub.faults)
        for name, (_, _, expected) in CLIENT_FAULTS.items():
            first = results[f"{name} first"]
            assert (first is None) == (expected is None), (name, first)
            assert expected is None or expected in first[0], (name, first)
            assert results[f"{name} second"] is None, (name, results)
        for what, kind, message in (
            ("version", "ValueError", "Version 7 not found, available versions: 1"),
            ("organisation", "ValueError", "'strangers/kernel' is not from a trusted publisher"),
            ("variant", "FileNotFoundError", "Cannot find a build variant"),
            ("metadata", "ValueError", "Cannot parse metadata"),
            ("xpu", "FileNotFoundError", "Cannot find a build variant"),
            ("mps", "FileNotFoundError", "Cannot find a build variant"),
        ):
            assert kind in results[what][0] and message in results[what][1], results[what]
        assert results["has xpu"] is False
        # Whatever happened on the way, what came to lie in the cache is the build.
        for name in CLIENT_FAULTS:
            folder = repository_folder(tmp_path / "cache", f"{ORGANISATION}/{name}")
            (variant,) = folder.glob(f"snapshots/*/build/{VARIANT}")
            assert contents(variant) == contents(published.release.build / VARIANT), name


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([REPO_ID, "--version", "1"], NOWHERE, "the Hub at 127.0.0.1:9 does not answer: "),
        ([REPO_ID, "--version", "7"], {}, "--version 7: Version 7 not found, available versions: 1"),
        ([REPO_ID, "--lockfile", "nope.lock"], {}, "--lockfile: nope.lock: No such file or directory"),
        (["ab", "--version", "1"], {}, f"ORG/NAME: expected a repository such as {REPO_ID}, found 'ab'"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(hub, tmp_path, arguments, environment, message):
    command = [sys.executable, "examples/kernelize_from_hub.py", *arguments, "--device", "cpu"]
    done = run(command, ROOT, **{**local_hub.environment(hub), **environment, "HF_HOME": tmp_path})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(f"kernelize_from_hub: error: {message}")


@pytest.mark.parametrize("device", ["foo", "cuda:99"])
def test_the_round_trip_looks_at_the_device_first(device):
    done = run([sys.executable, "examples/hub_round_trip.py", "--device", device, "--build", "/nowhere"], ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"hub_round_trip: error: --device: {device!r} is ")
