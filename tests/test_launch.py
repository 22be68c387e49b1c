"""What reaches the CUDA driver: by the short path what Triton's own call sends, on any machine with a C compiler.

A driver that launches nothing stands in for NVIDIA's; everything above it is real.
"""

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's own driver launches here"),
    pytest.mark.skipif(
        not Path(sysconfig.get_path("include"), "Python.h").exists(),
        reason="Triton builds its way to the driver in C, and Python's headers are not installed",
    ),
]

DRIVER = """
    import contextlib, ctypes, dataclasses, importlib, json, os, sys
    from pathlib import Path

    os.environ["LOSSLESS_PROOF"] = "off"
    driver = ctypes.CDLL(os.environ["FAKE_DRIVER"], mode=ctypes.RTLD_GLOBAL)
    import torch, triton
    from kernels import get_local_kernel
    from places import python_module
    from triton.backends.nvidia.driver import CudaDriver

    class Driver(CudaDriver):
        get_current_device = lambda self: 0
        get_current_stream = lambda self, device: stream
        get_device_capability = lambda self, device: (9, 0)
        set_current_device = lambda self, device: None

        def __init__(self):
            # What torch knows of a GPU is not asked for.
            from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

            self.utils, self.launcher_cls = CudaUtils(), CudaLauncher

    class Launch(ctypes.Structure):
        _fields_ = [
            ("function", ctypes.c_uint64), ("stream", ctypes.c_uint64), ("grid", ctypes.c_uint32 * 3),
            ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32), ("attributes", ctypes.c_uint32),
            ("parameters", ctypes.c_uint64 * 64),
        ]

    stream = 7
    triton.runtime.driver.set_active(Driver())
    torch.cuda.device = lambda index: contextlib.nullcontext()
    kernel = get_local_kernel(Path("build"))
    module = lambda name: python_module(kernel, name)
    launch, domain, proof = map(module, ("launch", "domain", "proof"))
    domain._KERNEL_DEVICE = "cpu"
    launch.current_stream = lambda device: stream
"""

LAUNCHES = """
    through_triton, found = launch.Launcher.through_triton, {}
    BITS = {"i32": 32, "fp32": 32, "i64": 64}

    def launched(call, widths):
        before = ctypes.c_int.in_dll(driver, "launches").value
        ctypes.c_int.in_dll(driver, "parameters_of_a_launch").value = len(widths)
        result = call()
        last = Launch.in_dll(driver, "last_launch")
        seen = {name: getattr(last, name) for name in ("function", "stream", "shared", "attributes")}
        seen.update(grid=list(last.grid), block=list(last.block))
        seen["parameters"] = [value & ((1 << bits) - 1) for value, bits in zip(last.parameters, widths)]
        return result, ctypes.c_int.in_dll(driver, "launches").value - before, seen

    def twice(self, blocks, tensors, scalars):
        global stream
        parameters = [p for p in self.kernel.params if not p.is_constexpr]
        pointers = len(parameters) - len(scalars)
        widths = [64] * pointers + [BITS[p.annotation_type] for p in parameters[pointers:]]
        _, times, triton_sent = launched(lambda: through_triton(self, blocks, tensors, scalars), widths)
        assert times == 1
        one = launch.Launch(self, blocks, scalars)
        short = []
        for stream in (7, 7, 8):
            values = tuple(tensor.data_ptr() for tensor in tensors)
            taken, times, sent = launched(lambda: one._enqueue(values, 0), widths)
            short.append({"taken": taken, "times": times, "sent": sent})
        stream = 7
        # What is left out is an empty tensor there and a null pointer here: neither is looked at.
        given = [True] * len(tensors) + [False] * (pointers - len(tensors)) + [True] * len(scalars)
        name = f"{self.kernel.__name__} of {len(tensors)}"
        found.setdefault(name, {"triton": triton_sent, "short": short, "given": given})
        self.launch = None

    launch.Launcher.through_triton = twice
    x, residual, dy = torch.randn(3, 64, 1024).bfloat16()
    weight = torch.randn(1024).bfloat16()
    kernel.rms_norm(x, weight, 1e-6)
    kernel.rms_norm(x.requires_grad_(), weight.requires_grad_(), 1e-6).backward(dy)
    normed, total = kernel.fused_add_rms_norm(x, residual, weight, 1e-6)
    torch.autograd.backward((normed, total), (dy, dy))
    kernel.silu(x).backward(dy)
    kernel.silu_and_mul(x, residual.requires_grad_()).backward(dy)
    with torch.no_grad():
        kernel.silu(x), kernel.silu_and_mul(x, residual), kernel.fused_add_rms_norm(x, residual, weight, 1e-6)
    q = torch.randn(2, 4, 16, 64).bfloat16().requires_grad_()
    cos, sin = torch.randn(2, 2, 16, 64).bfloat16()
    turned, _ = kernel.apply_rotary_pos_emb(q, q, cos, sin)
    turned.backward(torch.randn_like(turned))
    for size in (40, 1000):
        scores = torch.randn(3, size).bfloat16().requires_grad_()
        kernel.softmax(scores).backward(torch.randn_like(scores))
    scores, mask = torch.randn(2, 4, 16, 40).bfloat16().requires_grad_(), torch.randn(2, 1, 16, 40).bfloat16()
    kernel.masked_softmax(scores, mask, 0.5).backward(torch.randn_like(scores))
    angle, tokens = torch.randn(1, 16, 32), torch.randn(2, 16, 4, 64)
    kernel.apply_rotary_emb(tokens, tokens, torch.polar(torch.ones_like(angle), angle))
    # The kernel writes the targets that ATen takes the loss of.
    module("cross_entropy")._nll_loss = lambda logp, *rest: (logp.mean(), torch.ones(()))
    # ATen's two kernels: of a short vocabulary, and of one that takes more than a program's registers.
    for vocab in (1000, 50257):
        logits, target = torch.randn(5, vocab, dtype=torch.float32, requires_grad=True), torch.randint(vocab, (5,))
        kernel.cross_entropy(logits, target).backward()
    # Long rows are streamed if there are enough of them for all multiprocessors.
    one, plans = dataclasses.replace(module("plans").UNKNOWN, multiprocessors=1), module("plans")
    plans.gpu = lambda device: one
    x, residual, dy = torch.randn(3, 16, 32768).bfloat16()
    weight = torch.randn(32768).bfloat16().requires_grad_()
    kernel.rms_norm(x.requires_grad_(), weight, 1e-6).backward(dy)
    print(json.dumps(found))
"""

# What a later Triton may do otherwise. All of them launch.
LATER = """
    import warnings
    from triton.backends.nvidia.driver import CudaLauncher

    class Later(CudaLauncher):
        pass

    def another_order(self, x, y, z, stream, function, *rest):
        class Reordered:
            def __init__(this, run):
                this.run = run

            def __getattr__(this, name):
                return getattr(this.run, name)

            def launch(this, *sent):
                this.run.launch(sent[3], *sent[:3], *sent[4:])

        CudaLauncher.__call__(Reordered(self), x, y, z, stream, function, *rest)

    def another_parameter(self, x, y, z, stream, function, one_more, *rest):
        CudaLauncher.__call__(self, x, y, z, stream, function, one_more, *rest)

    def init(change):
        def __init__(self, *given):
            CudaLauncher.__init__(self, *given)
            self.__dict__["launch"] = change(self.__dict__["launch"])
        return __init__

    def in_order(launch):
        return lambda stream, *sent: launch(*sent[:3], stream, *sent[3:])

    def tensors_only(launch):
        def launch_tensors(*sent):
            if not any(isinstance(each, torch.Tensor) for part in sent for each in (part if type(part) is tuple else (part,))):
                raise TypeError("expected tensors, found addresses")
            launch(*sent)
        return launch_tensors

    def fixed(self, name, value):
        if name == "launch" and name in self.__dict__:
            raise AttributeError("can't set attribute 'launch'")
        self.__dict__[name] = value

    way = sys.argv[1]
    if way == "another order":
        Later.__init__, Later.__call__ = init(in_order), another_order
    elif way == "tensors only":
        Later.__init__ = init(tensors_only)
    elif way == "fixed":
        Later.__setattr__ = fixed
    elif way == "no hooks":
        python_module(kernel, "core.triton_internals").launch_hooks = launch._enter_hooks = None
    elif way == "without names":
        Later.global_scratch_size = property(lambda self: self.__dict__["gone"], lambda self, value: None)
    if way == "without names":
        call = CudaLauncher.__call__
        def __call__(self, x, y, z, stream, function, *rest):
            class Sizes:
                global_scratch_size = 0
                __getattr__ = lambda this, name: getattr(self, name)
            call(Sizes(), x, y, z, stream, function, *rest)
        Later.__call__ = __call__
    triton.runtime.driver.active.launcher_cls = Later

    count = ctypes.c_int.in_dll(driver, "launches")
    x, launches = torch.randn(64, 1024).bfloat16(), []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with torch.no_grad():
            for function in (kernel.silu, kernel.silu, kernel.silu, kernel.gelu, kernel.gelu):
                before = count.value
                function(x)
                launches.append(count.value - before)
    messages = [str(each.message) for each in warned if "lossless-kernels" in str(each.message)]
    print(json.dumps({"launches": launches, "warnings": messages}))
"""


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = folder / "libcuda.so.1"
    command = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1", "-I"]
    subprocess.run([*command, headers, Path(__file__).with_name("fake_driver.c"), "-o", library], check=True)
    return library


@pytest.fixture(scope="module")
def launches(fake_driver, build, run_python, tmp_path_factory):
    cache = tmp_path_factory.mktemp("triton")
    done = run_python(
        DRIVER + LAUNCHES, FAKE_DRIVER=fake_driver, TRITON_LIBCUDA_PATH=fake_driver.parent, TRITON_CACHE_DIR=cache
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_constants_have_the_order_of_the_parameters(module):
    """In which the short path sends them, however a family lists them."""
    kernel, launcher = (
        SimpleNamespace(arg_names=["x_ptr", "rows", "A", "B"], __name__="kernel"),
        module("launch").Launcher,
    )
    assert list(launcher(kernel, {"B": 2, "A": 1}, 4, None, False, 0, ()).constants.items()) == [("A", 1), ("B", 2)]
    with pytest.raises(TypeError, match=r"kernel: expected constants .*'B'\], found \['A', 'C'\]"):
        launcher(kernel, {"A": 1, "C": 2}, 4, None, False, 0, ())


def test_kernels_that_overlap_have_launchers_of_their_own(module):
    """The launch's attribute is one of Triton's options."""
    launch, device = module("launch"), torch.device("cpu")
    kernel = type("kernel", (), {"arg_names": ["x_ptr", "rows"]})
    bound = [launch.bind(kernel, {}, 4, device, (torch.float32,), 1, 1, overlaps=each) for each in (False, True, False)]
    first, second, third = (each._launcher for each in bound)
    assert first is third and first is not second
    assert [each.overlaps for each in (first, second)] == [False, True]
    assert launch.options(4, None, False) == {"num_warps": 4, "enable_fp_fusion": False}
    assert launch.options(4, 64, True) == {**launch.options(4, None, False), "maxnreg": 64, "launch_pdl": True}


@pytest.mark.parametrize(
    "capability, driver, can", [(9, 13000, True), (9, 12020, False), (8, 13000, False), (None, 13000, False)]
)
def test_which_gpus_and_drivers_overlap_kernels(module, monkeypatch, capability, driver, can):
    launch = module("launch")
    monkeypatch.setattr(launch.plans, "gpu", lambda device: SimpleNamespace(compute_capability=capability))
    monkeypatch.setattr(launch, "driver_version", lambda: driver)
    assert launch.can_overlap(torch.device("cpu")) is can


def test_the_drivers_version(module, monkeypatch):
    """0 without a driver, or with one that does not tell."""
    launch = module("launch")

    def library(failed):
        def tell(pointer):
            pointer._obj.value = 12040
            return failed

        return lambda name: SimpleNamespace(cuDriverGetVersion=tell)

    def none(name):
        raise OSError(f"{name}: cannot open shared object file")

    for load, expected in ((library(0), 12040), (library(1), 0), (lambda name: SimpleNamespace(), 0), (none, 0)):
        monkeypatch.setattr(launch.ctypes, "CDLL", load)
        assert launch.driver_version.__wrapped__() == expected


def test_the_short_path_sends_what_triton_sends(launches):
    assert launches
    for name, found in launches.items():
        expected = found["triton"]
        for short, stream in zip(found["short"], (7, 7, 8), strict=True):
            sent = short["sent"]
            assert (short["taken"], short["times"]) == (True, 1), name
            assert sent["stream"] == stream and expected["stream"] == 7, name
            for part in ("function", "shared", "attributes", "grid", "block"):
                assert sent[part] == expected[part], (name, part)
            pairs = zip(sent["parameters"], expected["parameters"], found["given"], strict=True)
            for number, (one, another, given) in enumerate(pairs):
                assert one == (another if given else 0), (name, number)


def test_every_kernel_is_launched(launches):
    """But those that share few rows' columns among programs, and those of rotary tables, in the same way."""
    print(sorted(launches))
    assert {name.split()[0] for name in launches} == {
        "activation_forward",
        "activation_backward",
        "add_rms_norm_forward",
        "cross_entropy_forward",
        "cross_entropy_forward_short",
        "cross_entropy_backward",
        "gated_activation_forward",
        "gated_activation_backward",
        "rms_norm_forward",
        "rms_norm_backward",
        "rms_norm_backward_streamed",
        "column_sum_blocks",
        "complex_rotary",
        "masked_softmax_forward",
        "masked_softmax_backward",
        "rms_norm_sum_chains",
        "rotary",
        "softmax_forward",
        "softmax_backward",
    }


@pytest.mark.parametrize(
    "way, reason",
    [
        ("as it is", None),
        ("another order", "grid and stream do not come first"),
        ("tensors only", "expected tensors, found addresses"),
        ("fixed", "0 launches by positional arguments instead of one"),
        ("no hooks", "no knobs.runtime.launch_enter_hook with calls"),
        ("without names", "KeyError: 'gone'"),
    ],
)
def test_a_later_triton_launches_as_often_with_one_warning(fake_driver, build, run_python, tmp_path, way, reason):
    done = run_python(
        DRIVER + LATER, arguments=[way], FAKE_DRIVER=fake_driver, TRITON_LIBCUDA_PATH=fake_driver.parent,
        TRITON_CACHE_DIR=tmp_path,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["launches"] == [1] * 5
    if reason is None:
        assert not found["warnings"]
    else:
        (warning,) = found["warnings"]
        assert f"({reason})" in warning and "results are the same" in warning
