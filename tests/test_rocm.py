"""What the package does with torch's build for ROCm, on a machine without an AMD GPU.

No kernel has run on one yet: these tests are transcriptions, refusals and compilations.
"""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from machines import ALL, GPUS, ROWS_MOVED, compile_all
from places import forget_calls

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's own properties and kernels are here")


@pytest.fixture
def rocm(module, monkeypatch):
    """torch as built for ROCm."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    forget_calls(module)
    yield
    forget_calls(module)


@pytest.fixture
def launched(module, monkeypatch):
    """The launchers that were asked to compile or launch."""
    found = []
    through_triton = module("launch").Launcher.through_triton
    monkeypatch.setattr(
        module("launch").Launcher,
        "through_triton",
        lambda self, *arguments: (found.append(self), through_triton(self, *arguments))[1],
    )
    return found


@pytest.mark.parametrize("wave", [64, 32])
def test_a_gpu_has_the_reductions_of_its_wave(module, monkeypatch, rocm, wave):
    plans, config = module("plans"), module("reduce_config")
    properties = SimpleNamespace(
        major=9, warp_size=wave, multi_processor_count=304, max_threads_per_multi_processor=2048
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = plans.gpu.__wrapped__(torch.device("cuda", 0))
    assert found == plans.Gpu(None, 48 << 10, 304, 2048, config.ROCM[wave])
    assert plans.tuned(module("rms_norm_plan").Plan, found, "rms_norm", 4096, 16, 2) is None, "plans are NVIDIA's"
    order = config.row_reduction(16, 16384, found.build)
    assert (order.width, order.height, order.neighbours) == (wave, 512 // wave, wave)


@pytest.mark.parametrize("wave", [64, 32])
def test_a_program_has_as_many_threads_in_wider_waves(module, monkeypatch, wave):
    plans, launch = module("plans"), module("launch")
    build = module("reduce_config").ROCM[wave]
    monkeypatch.setattr(plans, "gpu", lambda device: plans.Gpu(None, 48 << 10, 304, 2048, build))
    kernel = module("kernels_src.activation").activation_forward
    for num_warps in (1, 2, 8):
        bound = launch.bind(kernel, {}, num_warps, torch.device("cpu"), (torch.float32,), 1)
        assert bound._launcher.num_warps == max(num_warps * 32 // wave, 1)


def test_a_known_refusal_is_settled_before_anything_is_compiled(kernel, module, monkeypatch, rocm, launched):
    """Softmax and cross-entropy have CUDA's orders alone. A norm reaches its kernel: the proof decides there."""
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    x, target = torch.randn(3, 40), torch.tensor([1, 2, 3])
    assert torch.equal(kernel.softmax(x), torch.softmax(x, -1))
    expected = torch.nn.functional.cross_entropy(x, target)
    assert torch.equal(kernel.cross_entropy(x, target), expected)
    assert not launched
    kernel.rms_norm(torch.randn(3, 64), torch.randn(64), 1e-6)
    assert [launcher.kernel.__name__ for launcher in launched] == ["rms_norm_forward"]


def test_triton_launches_every_time(module, rocm):
    """It tells apart compiled kernels for storages below 2 GB and others, which the short path does not."""
    assert not module("core.triton_internals").has_short_path()


# What the compiler makes of the kernels. `make test` compiles the norms for MI300X, `make test-machines` all for five GPUs.
ARCHS = [arch for arch in GPUS if isinstance(arch, str)] if ALL else ["gfx942"]
# A quotient is rounded correctly in five FMAs and a `v_div_fmas`. That of 64-bit integers has two, beside one `v_trunc`.
FMAS_OF_A_DIVISION = 5
FMAS_OF_AN_INTEGER_DIVISION = 2
NORMS = ("rms_norm", "add_rms_norm")


@pytest.fixture(scope="module")
def compiled(build, run_python, tmp_path_factory):
    matrix = [(arch, (4096,)) for arch in ARCHS]
    return compile_all(
        run_python, tmp_path_factory, "compiled_rocm", [matrix[::2], matrix[1::2]], "" if ALL else "rms_norm"
    )


def operations(entry):
    """Operations on fp32 numbers by name, of one thread; a packed one counts twice."""
    found = Counter()
    for packed, name in re.findall(r"\bv_(pk_|dual_)?([a-z0-9]+)\w*?_f32", entry["assembly"]):
        found[name] += 2 if packed == "pk_" else 1
    return found


def fmas(entry):
    return sum(count for name, count in operations(entry).items() if re.match("fma|mac|mad|dot", name))


def divisions(entry):
    return len(re.findall(r"\bv_div_fixup_f32", entry["assembly"]))


def test_registers_hold_a_row_on_amd(compiled):
    spilling = [str(entry) for entry in compiled if entry["spilled"] != 0]
    assert not spilling
    for entry in compiled:
        assert entry["shared"] <= GPUS[entry["arch"]][2], str(entry)


def test_rows_move_16_bytes_at_a_time_on_amd(compiled):
    moving = [
        entry for entry in compiled if entry["kernel"] in ROWS_MOVED and entry["constants"].get("STRIDE_UNIT") != 2
    ]
    assert {entry["arch"] for entry in moving} == set(ARCHS)
    for entry in moving:
        constants, (read, written) = entry["constants"], ROWS_MOVED[entry["kernel"]]
        if "WIDTH" not in constants:
            continue
        read += constants.get("ADD", False)
        written *= 2 if constants.get("TWO_EDGES") else 1
        accesses = constants["ROWS"] * entry.row * entry["itemsize"] // (16 * entry.threads)
        turns = constants["STAGES"] if constants.get("SUM_CHAINS") else 1
        assert accesses > 0, str(entry)
        loads = entry.count(r"(?:buffer|global)_load_(?:dwordx4|b128)")
        stores = entry.count(r"(?:buffer|global)_store_(?:dwordx4|b128)")
        assert loads >= read * accesses and stores >= written * accesses, (str(entry), loads, stores, turns)


def test_norms_on_amd_contract_nothing_and_flush_nothing(compiled):
    norms = [entry for entry in compiled if entry["kernel"].startswith(NORMS)]
    assert {entry["constants"].get("FUSED") for entry in norms} == {True, False, None}
    for entry in norms:
        constants, found = entry["constants"], operations(entry)
        of_sum = constants["ROWS"] * entry.row // entry.threads if constants.get("FUSED") else 0
        of_integers = FMAS_OF_AN_INTEGER_DIVISION * found["trunc"]
        assert fmas(entry) == FMAS_OF_A_DIVISION * divisions(entry) + of_integers + of_sum, str(entry)
        # Of integers are the number of rows of a chain and, of spread rows, their places.
        if not constants.get("SUM_CHAINS") and not constants.get("LEVELS", 1) > 1:
            assert found["rcp"] == divisions(entry) and not found["trunc"], str(entry)
        assert not found["sqrt"] and not found["exp"], str(entry)
        assert not re.search(r"_f64\b", entry["assembly"]), str(entry)


def test_kernels_on_amd_have_no_fma_but_those_written(compiled):
    """Those that the source and libdevice ask for, two of an exponential, and those of quotients."""
    for entry in compiled:
        expected = entry["written_fmas"] + 2 * entry["exponentials"] + FMAS_OF_A_DIVISION * divisions(entry)
        expected += FMAS_OF_AN_INTEGER_DIVISION * operations(entry)["trunc"]
        assert fmas(entry) == expected and not entry["relaxed"], str(entry)


def test_amd_gpus_keep_subnormals(compiled):
    """The mode in which every kernel starts, and rsqrt's own scaling: the instruction takes subnormals for zero."""
    for entry in compiled:
        assert re.findall(r"\.amdhsa_float_denorm_mode_32 (\d)", entry["assembly"]) == ["3"], str(entry)
        assert re.findall(r"\.amdhsa_float_denorm_mode_16_64 (\d)", entry["assembly"]) == ["3"], str(entry)
        assert "s_denorm_mode" not in entry["assembly"], str(entry)
        if entry["kernel"].endswith("rms_norm_forward"):
            # 2**24 and 2**12.
            assert re.search("0x4b800000", entry["assembly"]) and re.search("0x45800000", entry["assembly"]), str(entry)


def test_storages_beyond_2_gb_have_the_same_arithmetic(compiled):
    """Triton compiles another kernel for them, which is not proved by itself."""
    pairs = {}
    for entry in compiled:
        if entry["kernel"] == "rms_norm_forward":
            pairs.setdefault((entry["arch"], entry["dtype"], entry["num_warps"], str(entry)), []).append(entry)
    assert pairs
    for below, beyond in pairs.values():
        assert below["below_2_gb"] and not beyond["below_2_gb"]
        assert "buffer_load" in below["assembly"] and "global_load" in beyond["assembly"]
        arithmetic = [
            {name: count for name, count in operations(entry).items() if name in ("add", "mul", "fma", "rsq", "div")}
            for entry in (below, beyond)
        ]
        # An operation may be packed with one whose result is overwritten unread: Triton 3.9 does so.
        for name in ("add", "mul"):
            assert abs(arithmetic[0].pop(name) - arithmetic[1].pop(name)) <= 1, str(below)
        assert arithmetic[0] == arithmetic[1] and arithmetic[0], str(below)
