#!/usr/bin/env python3
"""Replace the layers of a Llama by kernels from a Hub, by version or by lockfile, and compare the logits bit for bit.

With HF_HUB_OFFLINE=1 the kernel comes from the cache (KERNELS_CACHE, or that of huggingface_hub) alone. As in
kernelize_llama.py, without a GPU the kernels run in Triton's interpreter, against a model of CUDA's arithmetic.

Exit status: 0 if every layer was replaced and all logits are equal; 1 if not; 2 if it could not be tried.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

# PYTHONSAFEPATH leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernelize_llama as llama
from startup import allow_no_telemetry, clean_up_when_terminated

NAMES = ("RMSNorm", "SiLU")


def from_version(repo_id, version, devices):
    """The kernel and its mapping, by version."""
    from kernels import get_kernel

    try:
        kernel = get_kernel(repo_id, version=version, trust_remote_code=[repo_id])
    except ValueError as error:
        about = f"--version {version}: " if "not found, available versions" in str(error) else ""
        raise llama.DemoError(f"{about}{error}") from error
    return kernel, kernel.kernel_mapping(repo_id=repo_id, version=version, trust_remote_code=[repo_id], devices=devices)


def from_lockfile(repo_id, lockfile, devices):
    """The kernel and its mapping, at the commit that `kernels lock` wrote down."""
    from kernels import LockedLayerRepository, get_locked_kernel, load_kernel
    from verify import read_lockfile

    commit, _ = read_lockfile(lockfile, [repo_id])[repo_id]
    kernel = get_locked_kernel(repo_id, lockfile=lockfile, trust_remote_code=[repo_id])
    if commit not in kernel.__file__:
        raise llama.DemoError(f"--lockfile: locks commit {commit}, but {kernel.__file__} was loaded")
    if os.environ.get("HF_HUB_OFFLINE") == "1" and load_kernel(repo_id, lockfile=lockfile) is not kernel:
        raise llama.DemoError("load_kernel and get_locked_kernel loaded two kernels")

    def layer(name):
        return LockedLayerRepository(repo_id, lockfile=lockfile, layer_name=name, trust_remote_code=[repo_id])

    layers = {"RMSNorm": layer("LlamaRMSNorm"), "SiLU": layer("SiLUActivation")}
    return kernel, {name: dict.fromkeys(devices, repository) for name, repository in layers.items()}


def compare(repo_id, version, lockfile, device):
    """One result for each way of naming the kernel."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options = llama.settle(llama.parse(["--seed", "1", *(["--device", device] if device else [])]))
    on_gpu = options.device.type == "cuda"
    dtype = llama.torch_dtype(options.dtype[0])
    device_type = ("rocm" if torch.version.hip else "cuda") if on_gpu else "cpu"
    if not on_gpu:
        # Proof compares with eager on this device, and a CPU adds in another order than CUDA.
        os.environ["LOSSLESS_PROOF"] = "off"
    ways = [("version", from_version, version), ("lockfile", from_lockfile, lockfile)]
    found = {name: way(repo_id, which, (device_type,)) for name, way, which in ways if which is not None}
    tokens = llama.draw_tokens(options, options.tokens[0])
    with tempfile.TemporaryDirectory(prefix="kernelize-from-hub-") as folder:
        llama.save_model(options, dtype, folder)
        reference = llama.load_model(options, dtype, folder)
        if not on_gpu:
            llama.use_cuda_arithmetic(reference, NAMES)
        expected = llama.make_pass(reference, options)(tokens)
        return [
            {"by": name, **replace(*kernel_and_mapping, folder, options, dtype, tokens, expected)}
            for name, kernel_and_mapping in found.items()
        ]


def replace(kernel, mapping, folder, options, dtype, tokens, expected):
    from kernels import Mode, kernelize, register_kernel_mapping, replace_kernel_forward_from_hub

    register_kernel_mapping(mapping, inherit_mapping=False)
    model = llama.load_model(options, dtype, folder)
    for name in NAMES:
        for layer_class in {*map(type, llama.layers_named(model, (name,)))}:
            # transformers has done so, unless it does not take this version of kernels.
            if not hasattr(layer_class, "kernel_layer_name"):
                replace_kernel_forward_from_hub(layer_class, name)
    kernelize(model, mode=Mode.INFERENCE)
    return {
        "kernel": kernel.__name__,
        "path": kernel.__file__,
        "layers": len(llama.layers_named(model, NAMES)),
        "layers_replaced": llama.replaced(model, kernel),
        **llama.compare(llama.make_pass(model, options)(tokens), expected),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo_id", metavar="ORG/NAME")
    parser.add_argument("--version", type=int, metavar="N", help="load it by the published version")
    parser.add_argument("--lockfile", type=Path, metavar="FILE", help="load it by what `kernels lock` wrote")
    parser.add_argument("--device", help="such as cuda, cuda:1 or cpu (default: cuda if there is one)")
    options = parser.parse_args()
    if options.version is None and options.lockfile is None:
        parser.error("expected --version, --lockfile or both")
    clean_up_when_terminated()
    allow_no_telemetry()
    from command import check_repo_id, one_line

    try:
        check_repo_id(options.repo_id)
        with warnings.catch_warnings():
            # A refused layer is bit-equal too, but it is not what is shown here.
            warnings.filterwarnings("error", message="lossless-kernels")
            results = compare(options.repo_id, options.version, options.lockfile, options.device)
    except Exception as error:
        # Whatever the Hub, the cache or the proof have to say.
        print(f"kernelize_from_hub: error: {one_line(error)}", file=sys.stderr)
        return 2
    for result in results:
        print(json.dumps(result))
    as_promised = all(each["bits_equal"] and each["layers"] == each["layers_replaced"] > 0 for each in results)
    return 0 if as_promised else 1


if __name__ == "__main__":
    sys.exit(main())
