"""Whole models under torch.compile, on a CPU whose own arithmetic stands for the kernels: graphs, bits, operators.

`benchmarks/compiled.py` is tried out too. Inductor's arithmetic around the layers is not eager's: here graphs run by
eager's operations (`aot_eager`).
"""

import collections
import copy
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from bits import assert_bits_equal
from conftest import ROOT
from cpu_kernels import cpu_arithmetic
from kernels import Mode, get_local_kernel
from places import python_module
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_decoder_truth.py compiles on a GPU")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
# Of a decoder layer in inference, and the gradients of one.
OF_LAYER = {"rms_norm": 1, "rotary": 1, "add_rms_norm": 1, "gated_activation": 1}
OF_BACKWARD = {"rms_norm_backward": 1, "rotary_backward": 2, "add_rms_norm_backward": 1, "gated_activation_backward": 1}


@pytest.fixture
def launched(kernel, nothing_known, proof_off):
    """How often each kernel ran; verdicts, what is known of classes, and calls are those of this test alone."""
    torch._dynamo.reset()
    with cpu_arithmetic(kernel) as launched:
        yield launched
    torch._dynamo.reset()


@pytest.fixture
def models(kernel, launched, seed):
    """Eager's model, and its twin whose layers are replaced."""
    torch.manual_seed(seed)
    eager = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES, attn_implementation="eager"))
    ours = copy.deepcopy(eager)
    kernel.apply(ours, mode=Mode.TRAINING | Mode.TORCH_COMPILE, loss=False)
    return eager, ours


def tokens_of(seed, count=9):
    return torch.randint(64, (1, count), generator=torch.Generator().manual_seed(seed))


def backend(graphs):
    """`aot_eager`, which keeps the forward and the backward graphs."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=keep, bw_compiler=keep)


def ours_in(graph, kernel):
    """How often each operator stands in the graph."""
    namespace = python_module(kernel, "_ops")._OPS_NAME
    targets = (node.target for node in graph.graph.nodes if node.op == "call_function")
    return collections.Counter(
        target._opname
        for target in targets
        if isinstance(target, torch._ops.OpOverload) and target.namespace == namespace
    )


@pytest.mark.long
def test_a_model_is_one_graph_with_the_operators_of_each_layer(models, kernel, seed):
    eager, ours = (model.eval() for model in models)
    graphs = []
    compiled = torch.compile(ours, backend=backend(graphs), fullgraph=True)
    with torch.no_grad():
        expected = eager(tokens_of(seed), use_cache=False).logits
        assert_bits_equal(compiled(tokens_of(seed), use_cache=False).logits, expected)
    (graph,) = graphs
    # The last norm is by itself.
    assert ours_in(graph, kernel) == {name: 2 * count + (name == "rms_norm") for name, count in OF_LAYER.items()}


@pytest.mark.parametrize("name", ["input_layernorm", "post_attention_layernorm", "mlp"])
def test_a_function_in_the_place_of_a_module(models, seed, name):
    eager, ours = (model.eval().model.layers[0] for model in models)
    for layer in (eager, ours):
        delattr(layer, name)
        setattr(layer, name, torch.tanh)
    hidden_states, position_ids = torch.randn(1, 9, 64), torch.arange(9)[None]
    tables = models[0].model.rotary_emb(hidden_states, position_ids)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = eager(hidden_states, position_embeddings=tables)
        assert_bits_equal(compiled(hidden_states, position_embeddings=tables), expected)


def guards_of(model, seed) -> list[str]:
    """The guards of a compiled call, one a line."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.set_grad_enabled(model.training):
        compiled(tokens_of(seed), use_cache=False)
    entries = [
        entry
        for code in {type(model).forward.__code__, inspect.unwrap(type(model).forward).__code__}
        for entry in torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)
    ]
    assert len(entries) == 1
    return str(entries[0].guard_manager).splitlines()


def test_a_layer_adds_few_guards(kernel, launched, seed):
    """Each costs CPU time at every call. Those that compare two objects are Python code, and the slowest.

    Torch 2.13 also compares a bound forward's module and the classes of modules.
    """
    added = {}
    for layers in (2, 5):
        config = LlamaConfig(num_hidden_layers=layers, **SIZES, attn_implementation="sdpa")
        eager = LlamaForCausalLM(config).eval()
        ours = copy.deepcopy(eager)
        kernel.apply(ours, mode=Mode.INFERENCE | Mode.TORCH_COMPILE, loss=False)
        for name, model in (("eager", eager), ("ours", ours)):
            guards = guards_of(model, seed)
            compared = [each for each in guards if "LAMBDA_GUARD" in each and " is " in each]
            added.setdefault(name, []).append((len(compared), len(guards)))
    (compared, guards), (of_eager, guards_of_eager) = (
        [(after - before) / 3 for before, after in zip(*added[name])] for name in ("ours", "eager")
    )
    print(
        f"a layer adds {guards:.0f} guards, {guards_of_eager:.0f} without kernels; {compared:.0f} comparisons of objects"
    )
    assert compared <= (of_eager if torch.__version__ < "2.13" else of_eager + 9)
    # 1.1 times as many with torch 2.11, 1.2 with 2.13 and 2.15.
    assert guards <= guards_of_eager * 1.35


def names_of_ours(kernel, guards) -> set[tuple[str, str]]:
    """The names of this package that guards check: Python module and name."""
    package = kernel.__name__.replace(".", "_dot_")
    found = re.findall(rf"source=G\['__import_{package}_dot_(\w+)'\]\.(\w+)", "\n".join(guards))
    return {(module.replace("_dot_", "."), name) for module, name in found}


def never_changes(module, name) -> bool:
    """Whether nobody gives this name another value: a function, a class, an operator or a constant."""
    if f"global {name}\n" in inspect.getsource(module):
        return False
    value = getattr(module, name)
    if isinstance(value, (FunctionType, BuiltinFunctionType, ModuleType, type, torch._ops.OpOverload)):
        return True
    return name.isupper() and is_constant(value)


def is_constant(value) -> bool:
    """Whether it is a text or number, a class or function, or a table of such with at least one entry."""
    if isinstance(value, (Mapping, tuple)):
        return bool(value) and all(map(is_constant, value.values() if isinstance(value, Mapping) else value))
    kinds = FunctionType, type, str, bool, int, float
    return isinstance(value, kinds) or getattr(type(value), "__dataclass_params__", MUTABLE).frozen


MUTABLE = SimpleNamespace(frozen=False)


@pytest.mark.parametrize("mode", [Mode.INFERENCE, Mode.TRAINING], ids=str)
def test_compiled_code_checks_no_names_of_this_package(kernel, launched, seed, mode, monkeypatch):
    """Each check takes CPU time at every call. One in a hundred may be left."""
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES, attn_implementation="sdpa"))
    model.train(mode == Mode.TRAINING)
    kernel.apply(model, mode=mode | Mode.TORCH_COMPILE, loss=False)
    guards = guards_of(model, seed)
    assert 100 * len(names_of_ours(kernel, guards)) <= len(guards)
    monkeypatch.setattr(python_module(kernel, "domain"), "drop_guards_on", lambda _: None)
    names = names_of_ours(kernel, guards_of(model, seed))
    print(f"{len(names)} names would be checked")
    assert len(names) > 50
    changing = [
        (module, name) for module, name in names if not never_changes(sys.modules[f"{kernel.__name__}.{module}"], name)
    ]
    assert not changing


def test_other_names_are_checked(kernel, launched, seed):
    """Another forward in a layer's place is found."""
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **SIZES, attn_implementation="sdpa")).eval()
    kernel.apply(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE, loss=False)
    compiled = torch.compile(model, backend="eager")
    norm = model.model.norm
    with torch.no_grad():
        before = compiled(tokens_of(seed), use_cache=False).logits
        norm.forward = MethodType(lambda self, x: torch.zeros_like(x), norm)
        after = compiled(tokens_of(seed), use_cache=False).logits
    assert before.any() and not after.any()


def test_hooks_from_before_compilation_run(kernel, launched, seed):
    """Of later ones torch's compiled code knows nothing, unless `skip_nnmodule_hook_guards` is off."""
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES, attn_implementation="sdpa")).eval()
    kernel.apply(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE, loss=False)
    compiled, tokens = torch.compile(model, backend="eager"), tokens_of(seed)
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        plain = compiled(tokens, use_cache=False).logits
        torch._dynamo.reset()
        hook = mlp.register_forward_hook(lambda module, arguments, out: out * 0)
        hooked = compiled(tokens, use_cache=False).logits
        assert (hooked != plain).any()
        assert_bits_equal(hooked, model(tokens, use_cache=False).logits)
        hook.remove()
        torch._dynamo.reset()
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            assert_bits_equal(compiled(tokens, use_cache=False).logits, plain)
            mlp.register_forward_hook(lambda module, arguments, out: out * 0)
            assert_bits_equal(compiled(tokens, use_cache=False).logits, hooked)


@pytest.mark.parametrize("name", ["TracingContext", "copy", "restore", "config"])
def test_without_a_private_name_of_dynamo(kernel, launched, seed, name, monkeypatch):
    """One warning, and the checks, with the same results."""
    internals = python_module(kernel, "core.torch_internals")
    assert {*internals.DYNAMO} == {"TracingContext", "copy", "restore", "config"}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **SIZES, attn_implementation="sdpa")).eval()
    kernel.apply(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE, loss=False)
    absent = internals.Internal("_guards.absent", "a test")
    internals._dynamo.cache_clear()
    try:
        monkeypatch.setitem(internals.DYNAMO, name, absent)
        with pytest.warns(RuntimeWarning, match="no torch._guards.absent: results are the same") as warned:
            guards = guards_of(model, seed)
        assert len([each for each in warned if "absent" in str(each.message)]) == 1
        assert names_of_ours(kernel, guards)
    finally:
        internals._dynamo.cache_clear()


def test_what_is_left_to_inductor_in_a_layer(models, kernel, seed):
    """Between the operators of a decoder layer: matrix products, attention, the second sum, and views."""
    ours, graphs = models[1].eval(), []
    layer = ours.model.layers[0]
    hidden_states, position_ids = torch.randn(1, 9, 64), torch.arange(9)[None]
    tables = ours.model.rotary_emb(hidden_states, position_ids)
    compiled = torch.compile(layer, backend=backend(graphs), fullgraph=True)
    with torch.no_grad():
        compiled(hidden_states, position_embeddings=tables)
    (graph,) = graphs
    assert ours_in(graph, kernel) == OF_LAYER
    aten = {
        node.target.overloadpacket._qualified_op_name.removeprefix("aten::")
        for node in graph.graph.nodes
        if node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "aten"
    }
    views = {
        "view",
        "_unsafe_view",
        "transpose",
        "t",
        "unsqueeze",
        "expand",
        "clone",
        "slice",
        "alias",
        "detach",
        "permute",
    }
    products, attention = {"mm", "bmm"}, {"mul", "_softmax", "_to_copy"}
    assert aten - views - products - attention == {"add"}
    sums = [node for node in graph.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert len(sums) == 1


def gradients(model, call, tokens):
    model.zero_grad(set_to_none=True)
    logits = call(tokens, use_cache=False).logits
    logits.square().mean().backward()
    return {"logits": logits.detach(), **{name: each.grad for name, each in model.named_parameters()}}


@pytest.mark.long
@pytest.mark.parametrize("checkpoints", [None, False, True], ids=("whole", "not reentrant", "reentrant"))
def test_training_is_eagers(models, kernel, launched, seed, checkpoints):
    graphs, results = [], []
    for model in models:
        model.train()
        if checkpoints is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
    eager, ours = models
    compiled = torch.compile(ours, backend=backend(graphs))
    for model, call in ((ours, compiled), (eager, eager)):
        results.append(gradients(model, call, tokens_of(seed)))
    found, expected = results
    for name, each in expected.items():
        assert_bits_equal(found[name], each, name)
    assert launched["rms_norm_backward"] and launched["rotary"] and launched["gated_activation_backward"]


@pytest.mark.long
def test_training_has_the_operators_of_both_passes(models, kernel, seed):
    ours, graphs = models[1].train(), []
    gradients(ours, torch.compile(ours, backend=backend(graphs), fullgraph=True), tokens_of(seed))
    forward, backward = graphs
    found = ours_in(backward, kernel)
    assert found == {name: 2 * count + (name == "rms_norm_backward") for name, count in OF_BACKWARD.items()}
    assert {*ours_in(forward, kernel)} == {
        "rms_norm_with_rstd", "rotary", "add_rms_norm_with_rstd", "gated_activation"
    }  # fmt: skip


@pytest.mark.long
def test_layers_compiled_one_by_one_share_their_code(models, kernel, seed):
    """Regional compilation: one graph for all layers."""
    eager, ours = (model.eval() for model in models)
    graphs = []
    one = backend(graphs)
    for layer in ours.model.layers:
        layer.compile(backend=one, fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        assert_bits_equal(ours(tokens_of(seed), use_cache=False).logits, eager(tokens_of(seed), use_cache=False).logits)
    assert [ours_in(graph, kernel) for graph in graphs] == [OF_LAYER]


def sharded_training(rank, build, folder, seed):
    """FSDP2, each layer compiled by itself."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    kernel, mesh = get_local_kernel(build), init_device_mesh("cpu", (2,))
    torch.manual_seed(seed)
    eager = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES, attn_implementation="eager")).train()
    ours, results = copy.deepcopy(eager), []
    with cpu_arithmetic(kernel) as launched:
        kernel.apply(ours, mode=Mode.TRAINING | Mode.TORCH_COMPILE, loss=False)
        for model in (eager, ours):
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=mesh)
        for layer in ours.model.layers:
            layer.compile(backend="aot_eager")
        for model in (eager, ours):
            found = gradients(model, model, tokens_of(seed + rank))
            results.append({name: getattr(each, "_local_tensor", each) for name, each in found.items()})
    expected, found = results
    for name, each in expected.items():
        assert_bits_equal(found[name], each, f"rank {rank}, {name}")
    assert launched["rms_norm_backward"] and launched["rotary"] and launched["gated_activation_backward"]
    dist.destroy_process_group()


@pytest.mark.long
def test_sharded_training_of_compiled_layers_is_eagers(build, proof_off, seed, tmp_path):
    torch.multiprocessing.spawn(sharded_training, (build, tmp_path, seed), nprocs=2)


@pytest.mark.parametrize("name", ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"])
def test_a_forward_may_be_another_modules(models, launched, seed, name):
    """Bound onto a module after `apply`: compiled code calls it too."""
    _, ours = models
    first, second = (getattr(layer, name) for layer in ours.model.layers)
    for parameter in second.parameters():
        torch.nn.init.normal_(parameter)
    first.forward = second.forward
    tokens = tokens_of(seed)
    compiled = torch.compile(ours, backend="aot_eager")
    with torch.no_grad():
        assert_bits_equal(compiled(tokens, use_cache=False).logits, ours(tokens, use_cache=False).logits)


# benchmarks/compiled.py


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compiled

    return compiled


def test_the_cpu_time_of_operators(compiled, kernel, proof_off):
    """Of those that a call runs, as often as it runs them; the functions at the sites are the old ones afterwards."""
    direct = {each._opname: each for each in compiled.operators_of(kernel)}
    for each in direct.values():
        each.sites.clear()
    x, weight = torch.randn(2, 64), torch.rand(64)

    def run():
        direct["rms_norm"].sites["a"](x, weight, 1e-6, "llama")
        direct["rms_norm"].sites["b"](x, weight, 1e-6, "llama")
        direct["softmax"].sites["a"](x, None)

    with torch.no_grad():
        run()
        before = {name: dict(each.sites) for name, each in direct.items()}
        found = compiled.operator_times(kernel, run, compiled.parse(["--device", "cpu"]))
    assert {name: each["calls"] for name, each in found.items()} == {"rms_norm": 2, "softmax": 1}
    assert all(each["us"] > 0 for each in found.values())
    assert before == {name: dict(each.sites) for name, each in direct.items()}


def test_the_functions_of_a_call(compiled):
    found = compiled.functions_of(
        lambda: [sum(range(200_000)), len("a")], compiled.parse(["--device", "cpu", "--profile", "1"])
    )
    (first,) = found
    assert "sum" in first["function"] and first["calls"] == 1 and first["us"] > 10


def test_eager_of_a_benchmark_has_functions_of_its_own(monkeypatch):
    """`apply` replaces the rotary function of the other model's file; weights are shared."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from models import make_models

    sizes = SimpleNamespace(model="tiny", tokens=(9,), training_tokens=1, device="cpu")
    eager, ours = (sys.modules[type(each).__module__] for each in make_models(sizes))
    assert eager.apply_rotary_pos_emb is not ours.apply_rotary_pos_emb
    assert ours.__name__ == "transformers.models.llama.modeling_llama"
    first, second = make_models(sizes)
    assert [*map(id, first.parameters())] == [*map(id, second.parameters())]


@pytest.mark.long
def test_the_benchmark_on_a_cpu(tmp_path, build):
    path = tmp_path / "compiled.json"
    command = [sys.executable, ROOT / "benchmarks/compiled.py", "--device", "cpu", "--backend", "aot_eager"]
    command += ["--model", "tiny", "--rounds", "1", "--tokens", "9", "--profile", "2", "--json", path]
    clean = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "LOSSLESS_PROOF")}
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["results"]
    assert [(each["layers"], each["mode"]) for each in rows] == [
        ("eager", ""),
        ("aot_eager alone", "default"),
        ("aot_eager, our layers", "default"),
    ]
    assert all(each["bits_equal"] for each in rows)
    assert all(each["graphs"] == 1 and len(each["functions"]) == 2 for each in rows[1:])
