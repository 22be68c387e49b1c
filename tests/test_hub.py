"""The kernel from a Hub: fetched by version and by lockfile, vendored, offline, damaged, in two versions at once.

The Hub is scripts/local_hub.py; `kernels`, `huggingface_hub` and transformers are the real ones, over HTTP.
"""

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from command import CommandError, one_line
from hub import ORGANISATION, client, local_hub, release_of, upload
from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from kernels._rust import Digest, DigestAlgorithm
from projects import PACKAGE, REPO_ID, ROOT, commit, contents, export, run, script
from vendor import resolve, vendor
from verify import check, check_snapshot, repository_folder

NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "local"}


@pytest.fixture
def hub(published, tmp_path):
    """Holds version 1."""
    with published.serve(tmp_path / "hub") as hub:
        yield hub


def fetch(hub, output, repo_id=REPO_ID, version=1):
    api = client(hub)
    vendor(api, repo_id, resolve(api, repo_id, version), f"v{version}", output)


@pytest.fixture(scope="module")
def lockfile(published, tmp_path_factory):
    """What `kernels lock` writes, and a cache with what it locks."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO_ID}" = 1\n')
    code = "import sys; sys.argv[1:] = ['lock', '.']; from kernels.cli import main; main()"
    with published.serve(folder / "hub") as hub:
        environment = {**local_hub.environment(hub), "KERNELS_CACHE": folder / "cache"}
        done = run([sys.executable, "-c", code], folder, **environment)
        assert done.returncode == 0, done.stderr
        fetch(hub, folder / "cache")
    return folder / "kernels.lock"


@pytest.fixture
def cache(lockfile, tmp_path):
    """A vendored cache, to be changed."""
    return Path(shutil.copytree(lockfile.parent / "cache", tmp_path / "cache", symlinks=True))


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
    assert "torch-cpu compatible, preferred" in statuses["versions"][1]


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
        REPO_ID, repo_type="kernel", revision=locked, allow_patterns="build/torch-cpu/*", cache_dir=cache
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
    assert done.stdout.startswith(f"{repository_folder(cache, REPO_ID)}/snapshots/{locked}/build/torch-cpu/")


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
    "status-500": ("GET .*/torch-cpu/layers.py", 500, "HfHubHTTPError"),
    "status-404": ("GET .*/torch-cpu/layers.py", 404, "HfHubHTTPError"),
    "no-tree": ("GET .*/tree/", 500, None),
    "no-refs": ("GET .*/refs", "reset", "ReadError"),
    "reset": ("GET .*/torch-cpu/layers.py", "reset", "ReadError"),
    "truncate": ("GET .*/torch-cpu/layers.py", "truncate", None),
    "shorten": ("GET .*/torch-cpu/layers.py", "shorten", "OSError"),
    "no-etag": ("HEAD .*/torch-cpu/layers.py", "no-etag", "Error"),
    "wrong-etag": ("HEAD .*/torch-cpu/layers.py", "wrong-etag", None),
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
torch.version.xpu = "20250300"
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
            ("no-cpu", CommitOperationDelete("build/torch-cpu/", is_folder=True)),
            ("bad-metadata", CommitOperationAdd("build/torch-cpu/metadata.json", b"{")),
        ):
            client(hub).create_commit(
                f"{ORGANISATION}/{repository}", [operation], commit_message="x", repo_type="kernel", revision="v1"
            )
        for name, (where, what, _) in CLIENT_FAULTS.items():
            place = where if name == "untrusted" else where.replace(".*", f".*/{name}.*", 1)
            hub.faults.append(local_hub.Fault(place, what, times=1))
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
            (variant,) = folder.glob("snapshots/*/build/torch-cpu")
            assert contents(variant) == contents(published.release.build / "torch-cpu"), name


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


# Vendoring


def damaged(hub, operation):
    client(hub).create_commit(REPO_ID, [operation], commit_message="damage", repo_type="kernel", revision="v1")


METADATA = b"""{"name": "lossless-kernels", "id": "_lossless_kernels_xpu_0000000", "version": 1,
"license": "Apache-2.0", "python-depends": [], "kernel-depends": [], "backend": {"type": "xpu"},
"digest": {"algorithm": "sha256", "files": {"layers.py": "%s"}}}""" % (b"0" * 64)
LAYERS = "GET .*/torch-cpu/layers.py"
VENDOR_FAULTS = {
    "500": (local_hub.Fault(LAYERS, 500), "500"),
    "404": (local_hub.Fault(LAYERS, 404), "404"),
    "reset": (local_hub.Fault(LAYERS, "reset"), "reset by peer"),
    "shorten": (local_hub.Fault(LAYERS, "shorten"), "Consistency check failed"),
    "tamper": (local_hub.Fault(LAYERS, "tamper"), "damaged, nothing was kept: .*layers.py: not the content"),
    "etag of another": (local_hub.Fault("HEAD .*layers.py", "wrong-etag"), None),
    "etag of all": (local_hub.Fault("HEAD .*", "wrong-etag"), "damaged, nothing was kept: .*not the content"),
    "metadata": (("build/torch-cuda/metadata.json", b"{"), "torch-cuda: Cannot parse metadata"),
    "digest": (("build/torch-cuda/layers.py", b"x"), "torch-cuda: File hash mismatch for layers.py"),
    "no files": (("build/torch-xpu/metadata.json", METADATA), "torch-xpu: only metadata.json is here"),
    "no variant": (CommitOperationDelete("build/", is_folder=True), "no variant of a kernel"),
}


@pytest.mark.parametrize(("fault", "message"), VENDOR_FAULTS.values(), ids=VENDOR_FAULTS)
def test_a_damaged_download_reaches_no_cache(hub, cache, tmp_path, fault, message):
    before = contents(cache)
    if isinstance(fault, local_hub.Fault):
        hub.faults.append(fault)
    else:
        damaged(hub, CommitOperationAdd(*fault) if isinstance(fault, tuple) else fault)
    if message is None:
        fetch(hub, tmp_path / "new")
        assert not bad(check([REPO_ID], tmp_path / "new", None, False))
        return
    for output in (tmp_path / "new", cache):
        with pytest.raises((CommandError, OSError, httpx2.HTTPError)) as caught:
            fetch(hub, output)
        assert re.search(message, one_line(caught.value))
    assert not (tmp_path / "new").exists()
    assert contents(cache) == before


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([REPO_ID, "--version", "7"], {}, f"--version: {REPO_ID} has no version 7; it has 1"),
        ([f"{ORGANISATION}/other", "--version", "1"], {}, f"{ORGANISATION}/other: no such kernel repository"),
        ([REPO_ID, "--version", "1"], NOWHERE, "the Hub at 127.0.0.1:9 does not answer"),
        (["--version", "1"], {}, "ORG/NAME: expected the repository"),
        (["ab", "--version", "1"], NOWHERE, "ORG/NAME: expected a repository such as"),
        ([REPO_ID, "--version", "0"], NOWHERE, "--version: expected a number from 1 on, found 0"),
        ([REPO_ID, "--version", "1", "--output", "LICENSE"], NOWHERE, "--output: expected a folder, found the file"),
        (["--lockfile", "build.toml"], {}, "--lockfile: build.toml: "),
        (["--lockfile", "/nowhere"], {}, "/nowhere"),
    ],
)
def test_vendor_refuses(hub, tmp_path, arguments, environment, message):
    done = script(
        ROOT, "vendor", "--output", tmp_path / "new", *arguments, **{**local_hub.environment(hub), **environment}
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("vendor: error: ") and message in done.stderr
    assert not (tmp_path / "new").exists()


def test_vendor_into_a_read_only_folder(hub, cache, tmp_path):
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets no process mount a folder read-only")
    before = contents(cache)
    steps = (
        f"mount --bind {cache} {cache} && mount -o remount,bind,ro {cache} && "
        f"{sys.executable} scripts/vendor.py {REPO_ID} --version 1 --output {cache}"
    )
    # Not -n: it has to reach the Hub before it fails.
    done = run(["unshare", "-rm", "sh", "-c", steps], ROOT, **local_hub.environment(hub))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Read-only file system" in done.stderr
    assert contents(cache) == before


def test_two_processes_vendor_at_once(hub, lockfile, tmp_path):
    command = [sys.executable, ROOT / "scripts/vendor.py", "--lockfile", lockfile, "--output", tmp_path / "both"]
    environment = local_hub.environment(hub)
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [process.wait() for process in running] == [0, 0]
    one, other = (repository_folder(folder, REPO_ID) for folder in (tmp_path / "both", lockfile.parent / "cache"))
    assert contents(one) == contents(other)
    assert not bad(check([REPO_ID], tmp_path / "both", None, False))
    assert not list((tmp_path / "both").glob(".vendor-*"))


# Verifying


def bad(findings):
    return {finding.subject: finding.violations for finding in findings if finding.violations}


def variant_in(cache, backend="cuda"):
    (variant,) = cache.glob(f"*/snapshots/*/build/torch-{backend}")
    return variant


def test_an_untouched_cache_is_in_order(hub, cache, lockfile):
    for findings in (
        check([REPO_ID], cache, None, False),
        check([], cache, lockfile, False),
        check([str(cache)], cache, None, False),
        check([REPO_ID], cache, lockfile, False),
    ):
        assert findings and not bad(findings)
        assert not [finding for finding in findings if finding.notes]
    assert not bad(check_snapshot(cache, REPO_ID, client_head(hub), client(hub)))


def client_head(hub):
    return resolve(client(hub), REPO_ID, 1)


def replace_file(path, content):
    """In a cache a file is a link to content that several may share."""
    path.unlink()
    path.write_bytes(content)


def change_in_place(variant):
    blob = (variant / "layers.py").resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b" ")


def change_with_digest(variant):
    replace_file(variant / "layers.py", b"open('/tmp/executed', 'w')\n")
    metadata = json.loads((variant / "metadata.json").read_text())
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    metadata["digest"]["files"] = dict(sorted(digest.files.items()))
    replace_file(variant / "metadata.json", json.dumps(metadata).encode())


def link_a_folder(variant):
    (variant / "more").symlink_to("/tmp")


DAMAGES = {
    "same length": (change_in_place, "File hash mismatch for layers.py"),
    "digest too": (change_with_digest, "build/torch-cuda/layers.py: not the content of this commit"),
    "broken link": (lambda variant: (variant / "more.py").symlink_to("gone"), "Link to nothing: more.py"),
    "file less": (lambda variant: (variant / "layers.py").unlink(), "layers.py"),
    "file more": (lambda variant: (variant / "more.py").write_text(""), "Unknown file: more.py"),
    "folder behind a link": (link_a_folder, "Link to a folder: more"),
    "metadata": (lambda variant: replace_file(variant / "metadata.json", b"{"), "Cannot parse metadata"),
    "no metadata": (lambda variant: (variant / "metadata.json").unlink(), "metadata.json"),
    "no digest": (
        lambda variant: replace_file(
            variant / "metadata.json",
            json.dumps({**json.loads((variant / "metadata.json").read_text()), "digest": None}).encode(),
        ),
        "no digest",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_found_and_nothing_is_run(cache, lockfile, damage, message):
    damage(variant_in(cache))
    loaded = set(sys.modules)
    for findings in (check([REPO_ID], cache, None, False), check([], cache, lockfile, False)):
        assert message in json.dumps(bad(findings))
    assert not [name for name in set(sys.modules) - loaded if "lossless" in name]
    assert not Path("/tmp/executed").exists()


def test_who_changes_file_and_digest_and_listing_is_found_online_alone(hub, cache):
    change_with_digest(variant_in(cache))
    shutil.rmtree(repository_folder(cache, REPO_ID) / "trees")
    commit = client_head(hub)
    assert not bad(check_snapshot(cache, REPO_ID, commit, None))
    (violations,) = bad(check_snapshot(cache, REPO_ID, commit, client(hub))).values()
    assert violations == [
        f"build/torch-cuda/{name}: not the content of this commit" for name in ("layers.py", "metadata.json")
    ]


def test_a_commit_that_is_not_the_locked_one(hub, cache, lockfile, tmp_path):
    other = tmp_path / "other.lock"
    other.write_text(lockfile.read_text().replace(client_head(hub), "1" * 40))
    (finding,) = check([], cache, other, False)
    assert finding.violations == [f"not in {cache}"]


def test_what_is_enough_online_and_what_python_left_are_notes(cache, tmp_path):
    count = len(contents(variant_in(cache, "rocm")))
    shutil.rmtree(variant_in(cache, "rocm"))
    bytecode = variant_in(cache) / "__pycache__/layers.cpython-311.pyc"
    bytecode.parent.mkdir()
    bytecode.write_bytes(b"")
    asked_for = variant_in(cache, "cpu")
    metadata = (asked_for / "metadata.json").read_bytes()
    shutil.rmtree(asked_for)
    asked_for.mkdir()
    (asked_for / "metadata.json").write_bytes(metadata)
    for findings in (check([REPO_ID], cache, None, False), check([str(cache)], cache, None, False)):
        assert not bad(findings)
        notes = " ".join(note for finding in findings for note in finding.notes)
        assert "only metadata.json is here" in notes and "1 files of bytecode" in notes
    assert f"{2 * count - 1} files are not here" in " ".join(check([REPO_ID], cache, None, False)[0].notes)
    # In a build they are missing.
    build = shutil.copytree(asked_for, tmp_path / "build/torch-cpu")
    assert bad(check([str(build)], cache, None, False))


def test_verify_as_a_command(published, cache):
    verify = functools.partial(script, published.project, "verify")
    done = verify()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 3 and done.stdout.count("ok ") == 3
    change_in_place(variant_in(cache))
    done = verify(REPO_ID, KERNELS_CACHE=cache)
    assert done.returncode == 1
    assert "File hash mismatch for layers.py" in done.stdout
    assert done.stderr.count("\n") == 1
    for arguments, message in (
        (["tests/nowhere/x"], "expected a folder or a repository such as ORG/NAME, found 'tests/nowhere/x'"),
        ([""], "expected a folder or a repository such as ORG/NAME, found ''"),
        (["scripts"], "scripts: holds no variant"),
        (["build", "--online"], "--online: needs a repository"),
        (["a/b"], "a/b: nothing of it in"),
        (["--lockfile", "/nowhere"], "--lockfile: /nowhere: No such file"),
    ):
        done = verify(*arguments, KERNELS_CACHE=cache)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"verify: error: {message}"), done.stderr


def test_verify_without_a_build(tmp_path):
    done = script(export(tmp_path / "project"), "verify")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"verify: error: no build in {tmp_path}/project; `make build` makes one\n"
