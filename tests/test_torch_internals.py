"""A torch that lacks a private name of today's: the package imports, says so once, and results are eager's."""

import ast
import json
import re
import shutil

import pytest
import torch
from conftest import ROOT

PACKAGE = ROOT / "torch-ext/lossless_kernels"
WITHOUT_EACH = """
    import functools, importlib.util, json, os, sys, warnings
    from pathlib import Path
    import torch, triton
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, names = Path(sys.argv[1]), json.loads(sys.argv[2])
    x, weight = torch.randn(3, 64, requires_grad=True), torch.rand(64, requires_grad=True)
    y = torch.randn(3, 64)

    def llama():
        h = x.to(torch.float32)
        return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    class Norm(torch.nn.Module):
        def forward(self, hidden_states):
            return "eager"

    class WithoutOperator:
        def __init__(self, name):
            self.name = name

        def __getattr__(self, name):
            if name == self.name:
                raise AttributeError(name)
            return getattr(aten, name)

    def missing_names(alias):
        return sys.modules[f"{alias}.core.torch_internals"].MISSING

    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    model, tokens = LlamaForCausalLM(LlamaConfig(**sizes)).eval(), torch.arange(7)[None]
    with torch.no_grad():
        logits = model(tokens).logits

    def applied(package):
        # What `apply` says of a model, and whether the model computes what it did.
        with warnings.catch_warnings(record=True) as warned, torch.no_grad():
            warnings.simplefilter("always")
            report = package.apply(model)
            equal = torch.equal(model(tokens).logits, logits)
        warned = [str(each.message) for each in warned if "lossless-kernels" in str(each.message)]
        return warned, equal, sorted({str(reason) for entry in report.layers for reason in entry.reasons})

    aten, init = torch.ops.aten, torch.nn.Module.__init__

    def missing(path):
        *parents, name = path.split(".")
        if parents == ["ops", "aten"]:
            torch.ops.aten = WithoutOperator(name)
            return lambda: setattr(torch.ops, "aten", aten)
        if parents[-1:] == ["Module()"]:
            def without(self):
                init(self)
                del self.__dict__[name]

            torch.nn.Module.__init__ = without
            return lambda: setattr(torch.nn.Module, "__init__", init)
        package, *parents = parents if parents[:1] == ["triton"] else ["torch", *parents]
        owner = functools.reduce(getattr, parents, sys.modules[package])
        value = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
        delattr(owner, name)
        return functools.partial(setattr, owner, name, value)

    found, reference = {}, None
    for number, (name, path) in enumerate({"nothing": None, **names}.items()):
        alias = f"without_{number}"
        (folder / "_ops.py").write_text(
            f"_OPS_NAME = '{alias}'\\ndef add_op_namespace_prefix(op):\\n    return '{alias}::' + op\\n"
        )
        try:
            restore = missing(path) if path else lambda: None
        except (AttributeError, TypeError) as error:
            found[name] = f"cannot be taken away: {error}"
            continue
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                spec = importlib.util.spec_from_file_location(
                    alias, folder / "__init__.py", submodule_search_locations=[str(folder)]
                )
                sys.modules[alias] = package = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(package)
        finally:
            restore()
        launched = []
        launcher = sys.modules[f"{alias}.core.launch"].Launcher
        through_triton = launcher.through_triton
        launcher.through_triton = lambda self, *given: (launched.append(self.kernel.__name__), through_triton(self, *given))
        outs = [package.rms_norm(x, weight, 1e-6), llama()]
        gradients = [torch.autograd.grad(out.sum(), (x, weight)) for out in outs]
        with torch.no_grad():
            package.silu(x), package.silu_and_mul(x, x)
        equal = torch.equal(*outs) and all(map(torch.equal, *gradients))
        # The interpreter's exponential is not eager's, and a CPU's sums have another order: kernels are compared with kernels.
        results = [outs[0], *gradients[0], *package.fused_add_rms_norm(x, y, weight, 1e-6), package.silu(x)]
        reference = reference or results
        as_ever = all(map(torch.equal, results, reference))
        warned = [str(each.message) for each in warned if "lossless-kernels" in str(each.message)]
        # What its module no longer has is read by the original alone.
        norm = torch.nn.Module.__new__(Norm)
        found[name] = {
            "forward": package.layers.LlamaRMSNorm.forward(norm, x) if missing_names(alias) else "eager",
            "launched": bool(launched), "equal": equal, "as_ever": as_ever, "guards": sys.modules[f"{alias}.core.torch_internals"].guards_tell(),
            "warnings": warned, "applied": applied(package) if missing_names(alias) else None,
        }
    print(json.dumps(found))
"""


# A torch without CUDA may lack them, and has no use for them.
OF_GPUS = ("empty_strided_cuda", "cuda_getDevice", "cuda_getCurrentRawStream")
OF_GUARDS = (
    "TensorGuards", "dispatch_tls_is_dispatch_key_excluded", "Negative", "ZeroTensor", "disable_current_modes"
)  # fmt: skip
GUARDS = """
    import json, sys, warnings
    from pathlib import Path
    import torch
    from kernels import get_local_kernel
    from places import forget_calls, python_module

    kernel, how = get_local_kernel(Path("build")), sys.argv[1]
    internals = python_module(kernel, "core.torch_internals")
    guards = internals._TensorGuards

    class Changed:
        def __init__(self, *tensors, **options):
            if how == "raises":
                raise TypeError("expected three lists")
            self.own, self.dtype = guards(*tensors, **options), tensors[0].dtype

        def check(self, *tensors):
            if how == "refuses":
                return False
            return self.own.check(*(tensor.to(self.dtype) for tensor in tensors))

    x, weight = torch.randn(3, 64), torch.rand(64)

    def results():
        with torch.no_grad():
            return [kernel.rms_norm(each, weight, 1e-6) for each in (x, x, x.half(), x.double(), x.half(), x)]

    expected = results()
    assert internals.guards_tell()
    internals._TensorGuards = Changed
    internals.guards_tell.cache_clear()
    forget_calls(lambda name: python_module(kernel, name))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = results()
    print(json.dumps({
        "tell": internals.guards_tell(),
        "equal": all(map(torch.equal, found, expected)) and [each.dtype for each in found] == [each.dtype for each in expected],
        "warnings": [str(each.message) for each in warned if "lossless-kernels" in str(each.message)],
    }))
"""


def attributes():
    """`(name, path, optional)` of each entry of `ATTRIBUTES`."""
    for node in ast.parse((PACKAGE / "core/torch_internals.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ATTRIBUTES":
            for name, entry in zip(node.value.keys, node.value.values):
                yield ast.literal_eval(name), ast.literal_eval(entry.args[0]), False


def internals():
    """`(name, path, optional)` of each private name that is looked up, and of each attribute."""
    for node in ast.walk(ast.parse((PACKAGE / "core/torch_internals.py").read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_private":
            path = ast.literal_eval(node.args[0])
            yield path.split(".")[-1].lstrip("_"), path, "optional" in [each.arg for each in node.keywords]
    yield from attributes()


# Without them the device code cannot be imported. `knobs.runtime.interpret` cannot be taken away.
TRITON = (
    "triton.jit",
    "triton.language.constexpr",
    "triton.language.int32",
    "triton.language.int64",
    "triton.language.float32",
)


@pytest.fixture(scope="module")
def without(tmp_path_factory, run_python):
    folder = tmp_path_factory.mktemp("without") / "package"
    shutil.copytree(PACKAGE, folder)
    names = {name: path for name, path, _ in internals()} | {path: path for path in TRITON}
    done = run_python(
        WITHOUT_EACH, arguments=[folder, json.dumps(names)], LOSSLESS_PROOF="off", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_with_all_of_them_kernels_run(without):
    assert without["nothing"]["launched"] and not without["nothing"]["warnings"]


@pytest.mark.parametrize(
    "name, path, optional", [*internals()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_without_a_private_name(without, name, path, optional):
    found = without[name]
    if isinstance(found, str):  # A CPU's torch has no CUDA to lose; what a type in C has cannot be taken from it.
        assert name in (*OF_GPUS, "apply", "is_zero", "version", "make_wrapper_subclass"), found
        return
    assert found["forward"] == "eager"
    assert found["launched"] == optional and found["as_ever" if optional else "equal"]
    if name in OF_GPUS and not torch.version.cuda:
        assert not found["warnings"]
        return
    (warning,) = found["warnings"]
    assert f"torch.{path}" in warning
    assert ("results are the same" if optional else "all layers keep their original forward") in warning
    assert found["guards"] == (name not in OF_GUARDS)
    if not optional:
        (warning,), equal, reasons = found["applied"]
        (reason,) = reasons
        assert equal and reason.startswith(f"torch {torch.__version__} has no torch.{path}")
        assert warning.startswith(
            f"lossless-kernels: apply replaced no layer of LlamaForCausalLM: {reason}. Next: install"
        )


@pytest.mark.parametrize("path", TRITON)
def test_without_a_name_of_triton(without, path):
    found = without[path]
    assert found["equal"] and not found["launched"]
    assert len(found["warnings"]) == 1 and path in found["warnings"][0]


@pytest.mark.parametrize(
    "how, reason",
    [
        ("raises", "TypeError: expected three lists"),
        ("refuses", "they do not recognise an equal layout"),
        ("takes any dtype", "they do not distinguish dtypes"),
    ],
)
def test_guards_that_do_not_tell_are_reported_once(build, interpreted, how, reason):
    done = interpreted(GUARDS, arguments=(how,), LOSSLESS_PROOF="off")
    found = json.loads(done.stdout.splitlines()[-1])
    (warning,) = found["warnings"]
    assert not found["tell"] and found["equal"]
    assert f"({reason})" in warning and "results are the same" in warning


HIDDEN_KEYS = """
    import json, sys, warnings
    from pathlib import Path
    import torch
    from kernels import get_local_kernel
    from places import python_module

    kernel = get_local_kernel(Path("build").absolute())
    internals = python_module(kernel, "core.torch_internals")
    found = {}

    @torch.library.custom_op("tests::first_call", mutates_args=())
    def first_call(x: torch.Tensor) -> torch.Tensor:
        found["hidden"] = internals.tensor_guard(x) is None
        return x.clone()

    first_call.register_fake(torch.empty_like)
    x = torch.randn(3)
    with warnings.catch_warnings(record=True) as warned, torch.no_grad():
        warnings.simplefilter("always")
        torch.compile(lambda x: first_call(x) + 1, backend="aot_eager")(x)
        with torch._subclasses.fake_tensor.FakeTensorMode():
            found["in a mode"] = internals.guards_tell()
        torch.func.grad(lambda x: (internals.tensor_guard(x), x.sum())[1])(x)
        guard = internals.tensor_guard(x)
        found["then"] = guard(torch.ones(3)) and not guard(torch._neg_view(x))
    found["warnings"] = [str(each.message) for each in warned if "lossless-kernels" in str(each.message)]
    print(json.dumps(found))
"""


def test_guards_are_not_judged_where_keys_are_hidden(build, interpreted):
    """While an operator of a compiled model runs, a guard does not see that a tensor is a negative view."""
    found = json.loads(interpreted(HIDDEN_KEYS).stdout.splitlines()[-1])
    assert found == {"hidden": True, "in a mode": True, "then": True, "warnings": []}


# Private names of other libraries, which are not always there: the package asks whether a module or a config has them.
OTHERS = {
    "accelerate": {"_hf_hook", "_old_forward"},
    "kernels": {"_kernel_funcs", "_KERNEL_MAPPING"},
    "transformers": {"_use_kernels", "_loss_function", "_attn_implementation", "_from_config", "_VERSION"},
}


def own_names(tree):
    """The private names that a file defines; a text that it names is an attribute of its own."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ):
            yield node.value.value


def private_names(tree):
    """`(line, name)` of each private name that is read as an attribute, imported, or a text by itself."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            names = node.value.split(".")
        for name in names:
            if re.fullmatch("_[a-zA-Z][a-zA-Z0-9_]*", name):
                yield node.lineno, name


def test_private_names_of_torch_stand_in_one_file():
    """Every private name of the package is its own, another library's, or an attribute in `torch_internals.ATTRIBUTES`."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    own = {name for tree in trees.values() for name in own_names(tree) if name[:1] == "_"}
    declared = {path.split(".")[-1] for _, path, _ in attributes()}
    # `_current_level` is a module's variable, which changes. The build writes `_ops`.
    allowed = {*declared, *set().union(*OTHERS.values()), "_current_level", "_ops"}
    # `_apply` is a variable of several modules, and never read from an object.
    both = {name for name in own & {*declared, *dir(torch.nn.Module()), *dir(torch.Tensor)} if name[1] != "_"}
    assert both <= {"_apply"}, f"also private names of torch: {both}"
    unknown = [
        f"{path.name}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in private_names(tree)
        if path.name != "torch_internals.py" and name not in own | allowed
    ]
    assert not unknown, unknown
    used = {
        name for path, tree in trees.items() for _, name in private_names(tree) if path.name != "torch_internals.py"
    }
    assert declared - used <= {"_compiled_call_impl"} and set().union(*OTHERS.values()) <= used
