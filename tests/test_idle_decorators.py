"""transformers whose decorators do nothing, because it does not take the installed kernels: names come from `name_layers`."""

import json

import decorated
import pytest

LLAMA = """
    import json, sys, warnings
    from pathlib import Path
    import torch, transformers.utils.import_utils as import_utils

    if sys.argv[1] == "idle":
        # What transformers 5.23 says of kernels 0.17; the rest is its own.
        import_utils.is_kernels_available = lambda *_, **__: False
    import kernels, transformers
    from kernels import get_local_kernel, kernelize, Mode, use_kernel_mapping
    from transformers import LlamaConfig, LlamaForCausalLM

    kernel = get_local_kernel(Path("build"))
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    ids, found = torch.arange(8)[None], {}
    with torch.no_grad():
        expected = model(ids).logits
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if sys.argv[2] == "report":
            kernel.replacement_report(model, verbose=False)
        elif sys.argv[2] == "applied":
            kernel.apply(model)
        else:
            found["named"] = kernel.name_layers(model) if sys.argv[2] == "named" else {}
            with use_kernel_mapping(kernel.kernel_mapping(local_path="build", devices=["cpu"]), inherit_mapping=False):
                kernelize(model, mode=Mode.INFERENCE, device="cpu")
    found["warnings"] = [str(each.message) for each in warned if "lossless-kernels" in str(each.message)]
    found["replaced"] = sorted(
        type(m).__name__ for m in model.modules() if "lossless" in type(m).__name__ or "forward" in vars(m)
        and vars(m)["forward"].__func__ is not type(m).forward
    )
    with torch.no_grad():
        found["equal"] = torch.equal(model(ids).logits, expected)
    found["versions"] = [transformers.__version__, kernels.__version__]
    print(json.dumps(found))
"""


def run(interpreted, decorators, what):
    """With the proof: what kernels do not compute as eager does, in the interpreter, the original layers compute."""
    return json.loads(interpreted(LLAMA, arguments=(decorators, what), LOSSLESS_PROOF="on").stdout.splitlines()[-1])


@pytest.mark.parametrize("what", ["mapping", "report"])
def test_a_warning_names_both_versions_and_what_to_do(build, interpreted, what):
    found = run(interpreted, "idle", what)
    (warning,) = found["warnings"]
    transformers, kernels = found["versions"]
    assert f"transformers {transformers} with kernels {kernels} gives its layers no names" in warning
    assert "name_layers(model)" in warning
    assert found["equal"] and not found["replaced"]


def test_names_do_not_need_the_decorators(build, interpreted):
    found = run(interpreted, "idle", "named")
    assert not found["warnings"] and found["equal"]
    assert found["named"]["LlamaRMSNorm"] == "RMSNorm" and found["named"]["SiLUActivation"] == "SiLU"
    assert {"LlamaRMSNorm", "SiLUActivation", "LlamaMLP"} <= {*found["replaced"]}


def test_apply_does_not_need_the_decorators(build, interpreted):
    found = run(interpreted, "idle", "applied")
    assert not found["warnings"] and found["equal"]
    layers = "LlamaDecoderLayer", "LlamaMLP", "LlamaRMSNorm", "LlamaRotaryEmbedding", "SiLUActivation"
    assert found["replaced"] == sorted((*layers, "LlamaRMSNorm", "LlamaRMSNorm"))


@pytest.mark.skipif(decorated.IDLE, reason="this transformers does not take these kernels")
def test_with_the_decorators_nothing_is_said(build, interpreted):
    """In the environment at hand; that of transformers 5.23 with kernels 0.17 is one of those that are idle."""
    found = run(interpreted, "as they are", "mapping")
    assert not found["warnings"] and "LlamaRMSNorm" in found["replaced"]
