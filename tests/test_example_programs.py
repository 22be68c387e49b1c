"""The examples that generate and train, run as a user runs them, on tiny models. The others are in test_example.py."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("generate", "train_trainer", "train_trl", "train_fsdp2", "peft_lora")
# Program -> the package that requirements.txt leaves out, and the file that has it.
EXTRAS = {"train_trl": ("trl", "requirements-trl.txt"), "peft_lora": ("peft", "requirements-peft.txt")}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SMALL = ("--steps", 2, "--batch", 1)


def run(name, *arguments, launcher=(sys.executable,), stdin="", **environment):
    ours = ("TRITON_INTERPRET", "LOSSLESS_PROOF", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    clean = {key: value for key, value in os.environ.items() if key not in ours}
    clean.update({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment})
    command = [*launcher, *([ROOT / f"examples/{name}.py"] if name else []), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, input=stdin)


def output_of(*arguments, **options):
    """What a run prints that ends with exit status 0 and warns of nothing in this package."""
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lossless-kernels:" not in done.stderr, done.stderr
    return done.stdout


def require(name):
    """Skips where a package is missing that requirements.txt leaves out."""
    package, file = EXTRAS.get(name, (None, None))
    if package and not importlib.util.find_spec(package):
        pytest.skip(f"needs {package}: pip install -r examples/{file}")


def check_training(output, steps, layers):
    """The claims of a program that trains: `layers` with kernels, every loss and weight with the same bits."""
    rows = re.findall(r"^ *(\d+) +(\d+\.\d{9}) +(\d+\.\d{9})  (yes|no)$", output, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == list(range(1, steps + 1)), output
    assert all(before == after and equal == "yes" for _, before, after, equal in rows), output
    assert len({before for _, before, *_ in rows}) == steps, "the loss stays the same: nothing was trained"
    assert f"Loss curves bit-equal: yes ({steps} of {steps} steps)" in output
    assert re.search(r"^Trained weights bit-equal: yes \(([1-9]\d*) of \1\)$", output, re.MULTILINE)
    assert re.search(rf"\b{layers} layers run kernels", output), output


ANSWER = re.compile(r"^tokens equal: (yes|no); logits bit-equal: (\d+) of (\d+) steps$", re.MULTILINE)


def test_a_chat(build):
    arguments = ("--device", "cpu", "--build", build, "--new-tokens", 3, "--static-cache")
    output = output_of("generate", *arguments, stdin="Hi\nAnd you?\n\n")
    assert output.startswith("CPU: the original layers run in both runs, because the kernels need a GPU.\n")
    assert ANSWER.findall(output) == 2 * [("yes", "3", "3")]
    assert len(re.findall(r"^original layers: 3 tokens, \d+\.\d tokens/s$", output, re.MULTILINE)) == 2
    assert len(re.findall(r"^with kernels: +3 tokens, \d+\.\d tokens/s \(0 layers", output, re.MULTILINE)) == 2
    assert len(re.findall(r"^(?:you: )?answer: '.+'$", output, re.MULTILINE)) == 2


def test_a_prompt_in_the_interpreter(build):
    arguments = ("--device", "cpu", "--build", build, "--prompt", "Hi", "--new-tokens", 2, "--report")
    output = output_of("generate", *arguments, TRITON_INTERPRET="1", LOSSLESS_PROOF="off")
    assert output.startswith("CPU, Triton's interpreter: the kernels add in a GPU's reduction order.")
    # All but the rotary embedding, whose tables are a GPU's own: 2 decoder layers, 2 rotations, 2 MLPs, 2 activations, 5 norms.
    assert re.search(r"\((1[0-9]) layers run kernels\)", output), output
    assert re.search(r"^LlamaDecoderLayer +2 +kernel", output, re.MULTILINE)
    furthest = float(re.search(r"^largest difference of the first logits: (\S+)$", output, re.MULTILINE)[1])
    # Other orders of additions: the kernels ran.
    assert 0 < furthest < 1e-5


def test_training_by_trainer(build):
    output = output_of("train_trainer", "--device", "cpu", "--build", build, *SMALL, "--length", 16)
    check_training(output, steps=2, layers=0)


def test_training_by_trl(build):
    require("train_trl")
    check_training(output_of("train_trl", "--device", "cpu", "--build", build, *SMALL), steps=2, layers=0)


@pytest.mark.long
def test_training_by_fsdp2(build):
    arguments = ("--device", "cpu", "--build", build, *SMALL, "--length", 16)
    output = output_of("train_fsdp2", *arguments, launcher=TORCHRUN)
    assert output.startswith("2 processes. CPU")
    check_training(output, steps=2, layers=0)
    assert "Equal as promised in every process: yes" in output


def test_training_a_lora_adapter(build):
    require("peft_lora")
    output = output_of("peft_lora", "--device", "cpu", "--build", build, *SMALL, "--length", 16)
    check_training(output, steps=2, layers=0)
    assert "Logits after restore bit-equal: yes" in output


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_says_what_happens_on_a_gpu(name):
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    assert "n a CPU" in printed and "NVIDIA H200" in printed
    for option in ("--model", "--hub", "--build", "--device", "--dtype", "--seed", "default: "):
        assert option in done.stdout


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("generate", ["--build", "/nowhere"], "--build: /nowhere is no folder"),
        ("generate", ["--new-tokens", "0"], "--new-tokens: expected a number from 1 on, found '0'"),
        ("train_trainer", ["--device", "tpu"], "--device: invalid choice: 'tpu'"),
        ("train_fsdp2", [], "expected to be started by torchrun, one process for each GPU: torchrun --standalone"),
    ],
)
def test_errors_take_one_line(build, name, arguments, message):
    done = run(name, "--device", "cpu", *(["--build", build] if "--build" not in arguments else []), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_package_is_named_with_its_requirements(name):
    package, file = EXTRAS[name]
    path = str(ROOT / f"examples/{name}.py")
    code = f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = ['x']; runpy.run_path({path!r}, run_name='__main__')"
    done = run(None, "-c", code)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert package in line and line.endswith(f"pip install -r examples/{file}")
    assert re.search(rf"^{package}==\d", (ROOT / "examples" / file).read_text(), re.MULTILINE)


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import common

    return common


def test_a_difference_is_found(common, capsys):
    options = SimpleNamespace(device=torch.device("cpu"))
    weight = torch.arange(4.0)
    same = ([1.5, 1.25], {"w": weight})
    assert common.compare_training(options, same, ([1.5, 1.25], {"w": weight.clone()})) == 0
    for losses, changed in (
        ([1.5, 1.2500001], weight),
        ([1.5, 1.25], torch.nextafter(weight, weight + 1)),
        ([1.5, 1.25], -weight.abs() * 0),
        ([1.5, 1.25], weight.double()),
    ):
        capsys.readouterr()
        assert common.compare_training(options, same, (losses, {"w": changed})) == 1
        assert ": no (" in capsys.readouterr().out
    assert common.same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not common.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


@pytest.mark.parametrize("name", ["train_trainer", "train_trl"])
def test_several_gpus_in_one_process_are_refused(common, monkeypatch, name):
    assert "one_gpu(options)" in (ROOT / f"examples/{name}.py").read_text()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    options = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(common.DemoError, match="found 2 GPUs.*set CUDA_VISIBLE_DEVICES=0"):
        common.one_gpu(options)
    monkeypatch.setenv("WORLD_SIZE", "2")
    common.one_gpu(options)


def test_a_gpu_without_kernels_at_work_is_an_error(common, kernel):
    model = torch.nn.Linear(2, 2)
    assert common.count_kernels(kernel, model, SimpleNamespace(device=torch.device("cpu"))) == 0
    with pytest.raises(common.DemoError, match="^no layer runs a kernel\n"):
        common.count_kernels(kernel, model, SimpleNamespace(device=torch.device("cuda")))


def test_a_model_or_a_kernel_that_is_missing(common, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    options = common.parser_of("").parse_args(["--model", "/nowhere", "--hub", "org/nowhere", "--device", "cpu"])
    common.settle(options)
    with pytest.raises(common.DemoError, match="^--model /nowhere: .+"):
        common.make_model(options)
    with pytest.raises(common.DemoError, match="^--hub org/nowhere: .+"):
        common.load_kernel(options)


def test_a_kernel_from_a_hub(build, tmp_path):
    hubs = pytest.importorskip("hub", reason="publishing needs packages that are not installed")
    with hubs.local_hub.serve(tmp_path / "hub") as hub:
        hubs.upload_build(hub, build)
        environment = {**hubs.local_hub.variables(hub), "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        arguments = ("--device", "cpu", "--hub", hubs.REPO_ID, "--prompt", "Hi", "--new-tokens", 2)
        output = output_of("generate", *arguments, DO_NOT_TRACK="1", **environment)
    assert ANSWER.findall(output) == [("yes", "2", "2")]


# How many layers run kernels on a GPU: at least one, or the program ends with an error.
SOME = r"[1-9]\d*"


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [[], ["--static-cache"], ["--graph"]], ids=["dynamic", "static", "graph"])
def test_a_prompt_on_a_gpu(build, arguments):
    output = output_of("generate", "--build", build, "--prompt", "Hi", *arguments, CUDA_VISIBLE_DEVICES="0")
    ((tokens, equal, steps),) = ANSWER.findall(output)
    assert tokens == "yes" and equal == steps
    assert re.search(rf"\({SOME} layers run kernels\)", output), output


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["train_trainer", "train_trl", "peft_lora"])
def test_training_on_a_gpu(build, name):
    require(name)
    check_training(output_of(name, "--build", build, CUDA_VISIBLE_DEVICES="0"), steps=10, layers=SOME)


@pytest.mark.gpu2
def test_training_by_fsdp2_on_two_gpus(build):
    output = output_of("train_fsdp2", "--build", build, launcher=TORCHRUN)
    check_training(output, steps=10, layers=SOME)
    assert "Equal as promised in every process: yes" in output
