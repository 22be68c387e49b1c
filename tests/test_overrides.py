"""Operators of ATen's that other code has replaced: the proof decides, and says that eager itself differs."""

import json

import pytest
import torch

OVERRIDDEN = """
    import json, sys, warnings
    from pathlib import Path
    import torch
    from kernels import get_local_kernel

    kernel, (function, *overridden) = get_local_kernel(Path("build")), sys.argv[1:]
    warnings.simplefilter("ignore")
    library = torch.library.Library("aten", "IMPL")
    arithmetic = {
        "silu": lambda x: x * torch.sigmoid(x) * (1 + 2**-20),
        "gelu": lambda x, approximate="none": x * torch.sigmoid(1.702 * x),
    }
    for name in overridden:
        library.impl(name, arithmetic[name], "CPU")
    x, weight = torch.randn(64, 1024), torch.rand(1024)

    def llama():
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    ours, eagers = {
        "silu": (lambda: kernel.silu(x), lambda: torch.nn.functional.silu(x)),
        "rms_norm": (lambda: kernel.rms_norm(x, weight, 1e-6), llama),
    }[function]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        y = ours()
    print(json.dumps({
        "equal": torch.equal(y, eagers()),
        "warnings": [str(each.message) for each in warned if "lossless-kernels" in str(each.message)],
    }))
"""


FUSED_RMS_NORM = """
    import json, sys, warnings
    from pathlib import Path
    import kernels, torch

    kernel, scale = kernels.get_local_kernel(Path("build")), 1.0 + float(sys.argv[1])
    warnings.simplefilter("ignore")

    def overriding(input, normalized_shape, weight=None, eps=None):
        rstd = torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + eps)
        return input * rstd * weight * scale, rstd

    def its_gradients(dy, input, normalized_shape, rstd, weight, output_mask):
        # ATen has none for a CPU. Their values are not looked at.
        return input * 0, input.sum(0) * 0

    library = torch.library.Library("aten", "IMPL")
    if scale != 1.0:
        library.impl("_fused_rms_norm", overriding, "CPU")
        library.impl("_fused_rms_norm_backward", its_gradients, "CPU")
    model = torch.nn.Sequential(torch.nn.RMSNorm(1024, eps=1e-6))
    torch.nn.init.uniform_(model[0].weight, 0.5, 1.5)
    x = torch.randn(64, 1024)
    original = torch.nn.functional.rms_norm(x, (1024,), model[0].weight, 1e-6)
    kernels.replace_kernel_forward_from_hub(torch.nn.RMSNorm, "TorchRMSNorm")
    with kernels.use_kernel_mapping(kernel.kernel_mapping(devices=["cpu"]), inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        y = model(x)
    (entry,) = kernel.replacement_report(model, verbose=False).layers
    print(json.dumps({
        "equal": torch.equal(y, original),
        "replaced": model[0].forward.__func__ is not torch.nn.RMSNorm.forward,
        "path": entry.path,
        "reasons": [str(reason) for reason in entry.reasons],
        "warnings": [str(each.message) for each in warned if "lossless-kernels" in str(each.message)],
    }))
"""


@pytest.mark.parametrize("overridden", [True, False], ids=["overridden", "ATen's own"])
def test_the_report_names_an_overridden_fused_rms_norm(build, interpreted, overridden):
    """The operator that torch itself overrides from 2.13 on. Without that the proof fails here as well, since ATen's
    arithmetic on a CPU is not CUDA's, and must not say that someone has replaced it."""
    done = interpreted(FUSED_RMS_NORM, arguments=(2**-20 * overridden,), LOSSLESS_PROOF="on")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"] and found["replaced"] and found["path"] != "kernel"
    (warning,) = found["warnings"]
    (reason,) = found["reasons"]
    for text in (warning, reason):
        assert ("eager itself has other arithmetic here: aten::_fused_rms_norm by " in text) == overridden, text
        assert ("elements of" in text) != overridden, text


def run(interpreted, function, *overridden, **environment):
    done = interpreted(OVERRIDDEN, arguments=(function, *overridden), LOSSLESS_PROOF="on", **environment)
    return json.loads(done.stdout.splitlines()[-1])


def test_an_operator_that_is_overridden_is_named(build, interpreted):
    found = run(interpreted, "silu", "silu")
    (warning,) = found["warnings"]
    assert found["equal"] and "keeps its original forward" in warning
    assert "eager itself has other arithmetic here: aten::silu by " in warning and "differ" not in warning


@pytest.mark.parametrize("overridden", [(), ("gelu",)], ids=["nothing", "another operator"])
def test_eagers_own_operators_are_not(build, interpreted, overridden):
    """On a CPU this proof fails by itself: the interpreter's exponential is not eager's."""
    found = run(interpreted, "silu", *overridden)
    (warning,) = found["warnings"]
    assert found["equal"] and "elements of" in warning and "other arithmetic" not in warning


@pytest.mark.parametrize(
    "place, setting, named",
    [("/torch/_native/registry.py", "1", True), ("/torch/_native/registry.py", "0", False), ("/other.py", "0", True)],
)
def test_torchs_sums_are_named_where_they_run(module, monkeypatch, place, setting, named):
    """torch 2.14 replaces the operator for every GPU, and calls ATen's unless the setting is on."""
    internals, x, scope = module("core.torch_internals"), torch.randn(4, 8), {"torch": torch}
    expected = x.sum(-1)
    monkeypatch.setenv("PYTORCH_SUM_INNER_TREE", setting)
    exec(compile("library = torch.library.Library('aten', 'IMPL')", place, "exec"), scope)
    try:
        scope["library"].impl(
            "sum.dim_IntList", lambda x, dim, keepdim=False, dtype=None: x.cumsum(dim[0])[:, -1], "CPU"
        )
        found = internals.other_arithmetic(x.device, lambda: (x.sum(-1), x * 2))
        of_a_mean = internals.other_arithmetic(x.device, lambda: x.pow(2).mean(-1))
    finally:
        scope["library"]._destroy()
    assert found == [f"aten::sum.dim_IntList by {place}:1"] * named and not of_a_mean
    assert torch.equal(x.sum(-1), expected) and not internals.other_arithmetic(x.device, lambda: x.sum(-1))


def test_a_setting_without_its_operators_is_not_named(build, interpreted):
    """Without CuTeDSL, or on a CPU, torch ignores it."""
    (of_a_norm,) = run(interpreted, "rms_norm", PYTORCH_SUM_INNER_TREE=1)["warnings"]
    assert "elements of" in of_a_norm and "other arithmetic" not in of_a_norm
