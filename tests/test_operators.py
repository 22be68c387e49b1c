"""The operators of torch.compile, and their calls from Inductor's code, which does not go through torch's dispatcher.

The kernels run in Triton's interpreter, with proof off, and Inductor generates code for the CPU.
"""

import functools
import importlib
import json
import math
import re
import sys
import warnings

import pytest
import torch
from bits import assert_bits_equal
from op_families import FAMILIES, timed_tensors
from places import forget_calls
from torch._inductor.utils import fresh_cache, run_and_get_code

INTERPRETED = not torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the tensors of op_families are a CPU's")


@pytest.fixture(autouse=True)
def anew(module, proof_off):
    torch._dynamo.reset()
    forget_calls(module)
    with fresh_cache():
        yield
    torch._dynamo.reset()
    forget_calls(module)


@pytest.fixture
def operators(module):
    """Name -> the overload and the function behind it."""
    return {overload._opname: (overload, function) for overload, function in module("core.operators").DIRECT.items()}


@pytest.fixture
def arguments(seed):
    """Name -> the arguments of a call."""
    torch.manual_seed(seed)
    given = timed_tensors()
    return {name: call for family in FAMILIES for name, call in family.operators(given).items()}


def tensors_of(results):
    return [results] if isinstance(results, torch.Tensor) else list(results)


def graph_of(overloads):
    """A function that calls the operators, with a tensor for each tensor among their arguments."""

    def run(calls):
        return [overload(*call) for overload, call in zip(overloads, calls)]

    return run


def test_every_operator_has_a_call(operators, arguments, module):
    namespace = module("_ops")._OPS_NAME
    registered = {
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::")
    }
    writing = {name for name in registered if name.endswith("_into")}
    assert set(operators) == set(arguments) == registered - writing
    assert {f"{each._opname}_into" for each in module("core.operators")._INTO} == writing


@pytest.mark.long
def test_inductors_code_calls_each_operator_directly(operators, arguments):
    """In one graph, forward and backward operators, and with the results of the dispatcher's calls."""
    overloads = [operators[name][0] for name in arguments]
    run = graph_of(overloads)
    with torch.no_grad():
        expected = run(arguments.values())
        found, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), list(arguments.values()))
    for name, overload, ours, theirs in zip(arguments, overloads, found, expected):
        assert f"torch.ops.{overload.namespace}.{name}.default.sites[" in code, name
        assert f"torch.ops.{overload.namespace}.{name}.default(" not in code, name
        assert len(overload.sites) == 1, name
        for one, other in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            assert_bits_equal(one, other, name)
            assert one.stride() == other.stride(), name


def python_calls(function, *arguments):
    """How many Python functions the call calls, itself included, and those that are named so."""
    names = []
    sys.setprofile(lambda frame, event, _: event == "call" and names.append(frame.f_code.co_name))
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return names


def test_a_repeated_call_is_recognised(operators, arguments, module, monkeypatch):
    """It looks nothing up, and calls few functions."""
    # The interpreter calls thousands, and the reduction order of a norm's gradient is ATen's.
    monkeypatch.setattr(module("launch").Launch, "_enqueue", lambda self, pointers, _: True)
    most = 0
    for name, call in arguments.items():
        site = operators[name][0].sites["a"]
        with torch.no_grad():
            site(*call), site(*call)
            names = python_calls(site, *call)
        assert "entry" not in names and "find" not in names, (name, names)
        # ATen's sums follow its kernel.
        if name != "dyt_backward":
            most = max(most, len(names))
    print(f"at most {most} functions")
    assert most <= 21


CHANGES = {
    "another shape": lambda each: torch.cat([each, each], 1) if each.dim() == 3 else each,
    "another dtype": lambda each: each.double(),
    "other strides": lambda each: each.transpose(0, -1).contiguous().transpose(0, -1),
    "another requires_grad": lambda each: each.detach().requires_grad_(not each.requires_grad),
    "negated": lambda each: torch._neg_view(each) if not each.is_complex() else each,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "name", ["rms_norm", "gated_activation", "softmax", pytest.param("rotary", marks=pytest.mark.long)]
)
def test_a_changed_call_is_not_the_recognised_one(operators, arguments, name, change):
    """One tensor differs from the call that a site made last: the result is that of a site that has made none."""
    overload, function = operators[name]
    call = arguments[name]
    for number, each in enumerate(call):
        if not isinstance(each, torch.Tensor):
            continue
        changed = [*call]
        changed[number] = CHANGES[change](each)
        with torch.no_grad():
            overload.sites["a"](*call), overload.sites["a"](*call)
            try:
                expected = tensors_of(function.formula(*changed))
            except RuntimeError:  # Eager refuses this.
                with pytest.raises(RuntimeError):
                    overload.sites["a"](*changed)
                continue
            found = tensors_of(overload.sites["a"](*changed))
            overload.sites.clear()
            alone = tensors_of(overload.sites["a"](*changed))
        for ours, theirs, eagers in zip(found, alone, expected, strict=True):
            assert_bits_equal(ours, theirs, f"{name}, argument {number}")
            assert (ours.shape, ours.dtype, ours.stride()) == (eagers.shape, eagers.dtype, eagers.stride())
            # The interpreter's exponentials and orders of sums are not the CPU's: a few roundings, which the defaults allow.
            torch.testing.assert_close(ours, eagers)


def test_other_constants_are_another_call(operators, arguments):
    """Names of sites may meet: of two graphs, or of two builds."""
    x, weight, *_ = arguments["rms_norm"]
    site = operators["rms_norm"][0].sites["a"]
    formula = operators["rms_norm"][1].formula
    with torch.no_grad():
        for eps, variant in ((1e-6, "llama"), (0.5, "llama"), (0.5, "one_plus_weight"), (1e-6, "llama")) * 2:
            # A CPU adds in another order than the kernel: a few roundings, which the defaults allow. Another eps shows.
            torch.testing.assert_close(site(x, weight, eps, variant), formula(x, weight, eps, variant))


def test_one_tensor_for_two_arguments_is_recognised_and_told_from_two(operators, arguments):
    overload, function = operators["add_rms_norm"]
    x, residual, weight, *constants = arguments["add_rms_norm"]
    site = overload.sites["a"]
    with torch.no_grad():
        for first, second in ((x, x), (x, x), (x, residual), (x, residual), (residual, x), (x, x)):
            names = python_calls(site, first, second, weight, *constants)
            found, expected = (
                site(first, second, weight, *constants),
                function.formula(first, second, weight, *constants),
            )
            assert_bits_equal(found[1], expected[1])
            # The norm of the sum: a CPU adds in another order, a few roundings, which the defaults allow.
            torch.testing.assert_close(found[0], expected[0])
            assert "entry" in names or (first is second) == (first is x and second is x)
        # As in fp32 Cohere's LayerNorm, whose input eager sends three gradients.
        call = arguments["cohere_layer_norm"]
        site = operators["cohere_layer_norm"][0].sites["a"]
        site(*call)
        assert "entry" not in python_calls(site, *call)


def test_dynamic_shapes_need_one_graph(operators, kernel, seed):
    torch.manual_seed(seed)
    weight = torch.rand(64)

    def run(x, residual, weight):
        normed, total = kernel.fused_add_rms_norm(x, residual, weight, 1e-6)
        return kernel.silu_and_mul(normed, total), kernel.rms_norm(total, weight, 1e-5), kernel.softmax(total)

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 5, 118, 3):
            x, residual = torch.randn(2, 1, rows, 64)
            for found, expected in zip(compiled(x, residual, weight), run(x, residual, weight), strict=True):
                assert_bits_equal(found, expected, f"{rows} rows")
    for name in ("add_rms_norm", "gated_activation", "rms_norm", "softmax"):
        assert len(operators[name][0].sites) == 1, name


def test_training_calls_the_operators_of_both_passes_directly(operators, kernel, seed):
    """No operation of Inductor's own is in these graphs."""
    torch.manual_seed(seed)
    # fp32 would get two gradients of a norm, which Inductor adds.
    tensors = *torch.randn(2, 2, 3, 64).half().unbind(), *torch.rand(2, 64).half().unbind()
    leaves = [each.requires_grad_() for each in tensors]

    def run(x, residual, weight, other):
        normed, total = kernel.fused_add_rms_norm(x, residual, weight, 1e-6)
        return kernel.rms_norm(kernel.silu_and_mul(normed, total), other, 1e-6)

    results = []
    for function in (torch.compile(run, fullgraph=True), run):
        out = function(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for ours, eagers in zip(*results, strict=True):
        assert_bits_equal(ours, eagers)
    called = {name for name, (overload, _) in operators.items() if overload.sites}
    norms = {f"{name}{step}" for name in ("rms_norm", "add_rms_norm") for step in ("_with_rstd", "_backward")}
    assert called == {*norms, "gated_activation", "gated_activation_backward"}


def added(residual, x):
    return residual + x


# How a sum is made, and whether one operator computes it together with the norm.
SUMS = {
    "dense": (added, True),
    "one tensor twice": (lambda residual, x: x + x, True),
    "scaled": (lambda residual, x: torch.add(residual, x, alpha=2), False),
    "a number": (lambda residual, x: x + 1.5, False),
    "broadcast": (lambda residual, x: residual[:1] + x, False),
    "transposed": (lambda residual, x: residual.mT.contiguous().mT + x, False),
    "a view between": (lambda residual, x: (residual + x).view(-1, x.shape[-1]), False),
    "another dtype": (lambda residual, x: (residual.float() + x).to(x.dtype), False),
}


@pytest.mark.parametrize("case", SUMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_operator_computes_a_sum_and_its_norm(operators, kernel, seed, case, dynamic):
    sum_of, is_one = SUMS[case]
    torch.manual_seed(seed)
    # The interpreter truncates sums to bf16.
    x, residual = torch.randn(2, 3, 5, 64).half().unbind()
    weight = torch.rand(64).half()

    def run(x, residual, weight):
        total = sum_of(residual, x)
        # A use before the norm, in the order of the graph, and one behind it.
        before = total * 2
        return kernel.rms_norm(total, weight, 1e-6), before, total - 1

    with torch.no_grad():
        compiled = torch.compile(run, fullgraph=True, dynamic=dynamic)
        found, (code,) = run_and_get_code(compiled, x, residual, weight)
        shorter = [each[:, :4].contiguous() for each in (x, residual)] if dynamic else (x, residual)
        results = [(found, run(x, residual, weight)), (compiled(*shorter, weight), run(*shorter, weight))]
    for ours, eagers in results:
        # Inductor does not round a sum that it computes itself before it uses it.
        for one, other in list(zip(ours, eagers, strict=True))[: 3 if is_one else 1]:
            assert_bits_equal(one, other, case)
            assert one.stride() == other.stride()
    assert (".add_rms_norm.default.sites[" in code) is is_one
    assert (".rms_norm.default.sites[" in code) is not is_one


def test_other_nodes_are_left_alone(operators, module):
    """A number that is added, a weight that is written, and nodes of another pass, which may have no values."""
    from torch.fx.experimental.proxy_tensor import make_fx

    norm, sums = operators["rms_norm"][0], module("core.operators")._SUMS
    x, weight = torch.randn(3, 64), torch.rand(64)
    graphs = [make_fx(lambda x, w: norm(x + x.shape[0], w, 1e-6, "llama"), tracing_mode="symbolic")(x, weight).graph]

    def written(x, w):
        total = x + x
        w.copy_(x[0])
        return norm(total, w, 1e-6, "llama")

    graph = make_fx(written, tracing_mode="fake")(x, weight).graph
    (write,) = [each for each in graph.nodes if each.target is torch.ops.aten.copy_.default]
    write.replace_all_uses_with(write.args[0])  # As a write that nothing reads, of FSDP2's for example.
    graphs.append(graph)
    for number in range(4):
        graph = make_fx(lambda x, w: norm(x + x, w, 1e-6, "llama"), tracing_mode="fake")(x, weight).graph
        [*graph.nodes][number].meta.pop("val")
        graphs.append(graph)
    for graph in graphs:
        before = str(graph)
        sums.apply(graph)
        assert str(graph) == before


def test_one_operator_computes_a_sum_and_its_norm_in_training(operators, kernel, seed):
    """The gradient of the sum has both paths, as without it."""
    torch.manual_seed(seed)
    tensors = *torch.randn(2, 2, 3, 64).half().unbind(), torch.rand(64).half()
    leaves = [each.requires_grad_() for each in tensors]
    (dy, d_total) = torch.randn(2, 2, 3, 64).half().unbind()

    def run(x, residual, weight):
        total = residual + x
        return kernel.rms_norm(total, weight, 1e-6), total

    results = []
    for function in (torch.compile(run, fullgraph=True), run):
        normed, total = function(*leaves)
        results.append((normed.detach(), total.detach(), *torch.autograd.grad((normed, total), leaves, (dy, d_total))))
    for ours, eagers in zip(*results, strict=True):
        assert_bits_equal(ours, eagers)
    called = {name for name, (overload, _) in operators.items() if overload.sites}
    assert called == {"add_rms_norm_with_rstd", "rms_norm_backward"}


INDUCTORS = [
    "lowerings",
    "make_fallback",
    "V",
    "FallbackKernel",
    "ReinterpretView",
    "convert_shape_to_inductor",
    "pass_patterns",
]


@pytest.mark.parametrize("name", INDUCTORS)
def test_without_a_private_name_of_inductor(operators, arguments, module, monkeypatch, name):
    """One warning, and the dispatcher's calls, with the same results."""
    from torch._inductor import lowering

    # It could not be imported without some of the names.
    importlib.import_module("torch._inductor.fx_passes.post_grad")
    internals, overloads = module("core.torch_internals"), [overload for overload, _ in operators.values()]
    assert list(internals.INDUCTOR) == INDUCTORS
    for overload in overloads:
        lowering.lowerings.pop(overload, None)
    internals.inductor.cache_clear()
    path = internals.INDUCTOR[name].path
    *parents, last = path.split(".")
    owner = functools.reduce(getattr, parents, torch)
    try:
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            patch.delattr(owner, last)
            assert internals.inductor() is None and internals.inductor() is None
        (warning,) = [str(each.message) for each in warned if "lossless-kernels" in str(each.message)]
        assert f"torch.{path}:" in warning and "results are the same" in warning
        call = arguments["softmax"]
        with torch.no_grad():
            found, (code,) = run_and_get_code(torch.compile(lambda: operators["softmax"][0](*call), fullgraph=True))
            assert_bits_equal(found, operators["softmax"][0](*call))
        assert ".softmax.default(" in code and ".sites[" not in code
    finally:
        internals.inductor.cache_clear()
        for overload in overloads:
            lowering.lowerings.pop(overload, None)


def test_without_guards_calls_are_found_by_their_key(operators, arguments, module, monkeypatch):
    monkeypatch.setattr(module("core.operators"), "tensor_guard", lambda *_: None)
    overload, call = operators["rms_norm"][0], arguments["rms_norm"]
    with torch.no_grad():
        for _ in range(2):
            assert_bits_equal(overload.sites["a"](*call), overload(*call))
    assert "entry" in python_calls(overload.sites["a"], *call)


def test_the_first_call_of_compiled_code_runs_the_kernel(kernel, module, seed, monkeypatch):
    """torch watches it by a dispatch mode, for which an uncompiled layer would run eager's operations."""
    launched, through_triton = [], module("launch").Launcher.through_triton

    def record(self, *given):
        launched.append(self.kernel.__name__)
        through_triton(self, *given)

    monkeypatch.setattr(module("launch").Launcher, "through_triton", record)
    torch.manual_seed(seed)
    x = torch.randn(3, 64)
    with torch.no_grad():
        found = torch.compile(kernel.silu, fullgraph=True)(x)
    # The first launch tells the output's strides.
    assert launched == ["activation_forward"] * 2
    assert_bits_equal(found, kernel.silu(x))


def test_inductor_allocates_the_outputs(operators, arguments, module):
    """Of these operators: the code checks no strides behind them, and memory of an output is used again."""
    names = {each._opname for each in module("core.operators")._INTO}
    assert names == {"rms_norm", "add_rms_norm", "rotary", "activation", "gated_activation"}
    x, weight = torch.randn(3, 5, 64), torch.rand(64)
    norm, activation = operators["rms_norm"][0], operators["activation"][0]

    def run(x, weight):
        return norm(activation("silu", norm(x, weight, 1e-6, "llama")), weight, 1e-6, "llama")

    with torch.no_grad():
        found, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), x, weight)
        assert_bits_equal(found, run(x, weight))
    assert code.count(".default.sites[") == 3
    assert "'torch.ops." not in code, "an output's strides are checked"
    assert "# reuse" in code


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "rotary", "activation", "gated_activation"])
@pytest.mark.parametrize("outputs", ["alike", "other strides", "another dtype", "no kernel"])
def test_outputs_that_are_given(operators, arguments, name, outputs):
    overload, function = operators[name]
    call = [each.detach() if isinstance(each, torch.Tensor) else each for each in arguments[name]]
    if outputs == "no kernel":
        call = [each.double() if isinstance(each, torch.Tensor) else each for each in call]
    expected = tensors_of(overload(*call))
    outs = [torch.full_like(each, math.nan) for each in expected]
    if outputs == "other strides":
        outs = [each.mT.contiguous().mT for each in outs]
    if outputs == "another dtype":
        outs = [each.to(torch.float64) for each in outs]
    for _ in range(2):
        assert overload.sites["a"](*call, *outs) is None
        for out, each in zip(outs, expected, strict=True):
            assert_bits_equal(out, each.to(out.dtype))
            out.fill_(math.nan)
    overload.sites.clear()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_site_of_one_layout_gets_the_memory_of_views(operators, seed, dynamic):
    """A view takes time in each call. With dynamic shapes sites compare the tensors' layouts, and need views."""
    torch.manual_seed(seed)
    x, matrix, weight = torch.randn(3, 5, 32), torch.randn(32, 128), torch.rand(64)
    norm, product = operators["rms_norm"][0], operators["gated_activation"][0]

    def run(x, matrix, weight):
        up, gate = (x @ matrix).split(64, -1)
        return norm(product("silu", up, gate), weight, 1e-6, "llama"), norm(up, weight, 1e-6, "llama")

    with torch.no_grad():
        compiled = torch.compile(run, fullgraph=True, dynamic=dynamic)
        found, (code,) = run_and_get_code(compiled, x, matrix, weight)
        results = [(found, run(x, matrix, weight)), (compiled(-x, matrix, weight), run(-x, matrix, weight))]
        if dynamic:
            results.append((compiled(x[:, :4], matrix, weight), run(x[:, :4], matrix, weight)))
    for ours, expected in results:
        for one, other in zip(ours, expected, strict=True):
            assert_bits_equal(one, other)
    calls = re.findall(r"(\w+)\.default\.sites\['\w+( \[.*\])?'\]\((.*)\)", code)
    views = {(name, views.count("(("), arguments.count("reinterpret_tensor")) for name, views, arguments in calls}
    # Of the second norm and of the product the first is at the buffer's start; the gate is not.
    given = {("gated_activation", 0, 2), ("rms_norm", 0, 0), ("rms_norm", 0, 1)}
    assert len(calls) == 3 and views == (
        given if dynamic else {("gated_activation", 1, 1), ("rms_norm", 0, 0), ("rms_norm", 1, 0)}
    )


@pytest.mark.parametrize("variant", ["llama", "fused"])
def test_a_weight_may_begin_anywhere(operators, seed, variant):
    """`F.rms_norm` computes in another way then, with the operator's shapes."""
    torch.manual_seed(seed)
    x, matrix, aligned, shifted = torch.randn(3, 5, 32), torch.randn(32, 64), torch.rand(64), torch.rand(65)[1:]
    norm = operators["rms_norm"][0]

    def run(x, matrix, weight):
        return norm(x @ matrix, weight, 1e-6, variant)

    with torch.no_grad():
        for weights in ((shifted, shifted, aligned), (aligned, aligned, shifted)):
            torch._dynamo.reset()
            compiled = torch.compile(run, fullgraph=True)
            for weight in weights:
                assert_bits_equal(compiled(x, matrix, weight), run(x, matrix, weight))


def test_an_argument_is_computed_once(operators, seed):
    """Inductor would compute it in a kernel for each operator that takes it."""
    torch.manual_seed(seed)
    x, weights = torch.randn(3, 64), torch.rand(4, 64)
    norm = operators["rms_norm"][0]

    def run(x, weights):
        scaled = x * 2
        return [norm(scaled, weight, 1e-6, "llama") for weight in weights.unbind()]

    with torch.no_grad():
        found, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), x, weights)
        for one, other in zip(found, run(x, weights), strict=True):
            assert_bits_equal(one, other)
    (first, *others) = re.findall(r"rms_norm\.default\.sites\[.*?\]\((\w+),", code)
    assert len(others) == 3 and set(others) == {first}


def test_an_argument_that_is_written_later(operators, seed):
    torch.manual_seed(seed)
    x, weight = torch.randn(3, 64), torch.rand(64)
    norm = operators["rms_norm"][0]

    def run(x, weight):
        scaled = x * 2
        first = norm(scaled, weight, 1e-6, "llama")
        scaled.add_(1)
        x.copy_(scaled)
        return first, norm(scaled, weight, 1e-6, "llama"), scaled

    with torch.no_grad():
        results = []
        for function in (torch.compile(run, fullgraph=True), run):
            given = x.clone()
            results.append((*function(given, weight), given))
    for one, other in zip(*results, strict=True):
        assert_bits_equal(one, other)


FROM_CACHE = """
    import json, sys
    from pathlib import Path
    import torch
    from kernels import get_local_kernel
    from places import python_module
    from torch._dynamo.utils import counters

    kernel = get_local_kernel(Path("build"))

    def run(x, weight):
        return kernel.silu(kernel.rms_norm(x, weight, 1e-6))

    compiled = torch.compile(run, fullgraph=True)
    torch.manual_seed(0)
    x, weight = torch.randn(3, 64), torch.rand(64)
    with torch.no_grad():
        equal = torch.equal(compiled(x, weight), run(x, weight)) and torch.equal(compiled(x, weight), run(x, weight))
    sites = {each._opname: len(each.sites) for each in python_module(kernel, "core.operators").DIRECT if each.sites}
    print(json.dumps({"equal": equal, "sites": sites, "hits": counters["inductor"]["fxgraph_cache_hit"]}))
"""


@pytest.mark.long
def test_inductors_code_from_its_cache_in_another_process(build, interpreted, tmp_path):
    found = []
    for _ in range(2):
        done = interpreted(FROM_CACHE, LOSSLESS_PROOF="off", TORCHINDUCTOR_CACHE_DIR=tmp_path)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    sites = {"rms_norm": 1, "activation": 1}
    assert found == [{"equal": True, "sites": sites, "hits": hits} for hits in (0, 1)]
