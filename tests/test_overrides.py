"""Operators of ATen's that other code has replaced: the proof decides, and says that eager itself differs."""

import json

import pytest

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


def test_a_setting_that_changes_sums_is_named_where_there_is_one(build, interpreted):
    (of_a_norm,) = run(interpreted, "rms_norm", PYTORCH_SUM_INNER_TREE=1)["warnings"]
    assert "eager itself has other arithmetic here: PYTORCH_SUM_INNER_TREE is set" in of_a_norm
    (of_an_activation,) = run(interpreted, "silu", PYTORCH_SUM_INNER_TREE=1)["warnings"]
    assert "elements of" in of_an_activation and "SUM" not in of_an_activation
