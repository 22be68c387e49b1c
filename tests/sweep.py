"""Every class and function of the installed transformers that a kernel of this package may replace, compared bit for bit.

python tests/sweep.py --table docs/replaced.md       on a GPU: writes the table of docs/
python tests/sweep.py --decoders docs/decoders.md    anywhere: which decoder layers are recognised by their formula
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import itertools
import os
import re
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from bits import bits_equal
from kernels import Mode, get_local_kernel, kernelize, use_kernel_mapping
from places import python_module
from transformers.activations import ACT2FN

ROOT = Path(__file__).parent.parent
# Activations and weight.
DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
)
HIDDEN_SIZE = 256
ROWS = 48
_DECORATOR = re.compile(r"@use_kernel_forward_from_hub\(\s*\"(\w+)\"\s*\)\s*\n(?:class|def) (\w+)")
ROTARY, ROUTER = "rotary_pos_emb", "SoftmaxTopKRouter"
HEAD_DIM = 64


@dataclass(frozen=True)
class Outcome:
    """What came of one class: what its kernels compute, and why it is not replaced; empty if it is, bit for bit."""

    layer_name: str
    name: str
    module: str
    formula: str
    inference_problem: str
    training_problem: str

    @property
    def lossless(self):
        return not self.inference_problem and not self.training_problem


def classes(layer_names):
    """(layer name, class) for every class in transformers with one of these layer names.

    In place of the class of a function stands the one module that kernels has made of it.
    """
    root = Path(transformers.__file__).parent
    for path in [root / "activations.py", *sorted(root.glob("models/*/modeling_*.py"))]:
        found = [match for match in _DECORATOR.findall(path.read_text()) if match[0] in layer_names]
        if found:
            name = ".".join(("transformers", *path.relative_to(root).with_suffix("").parts))
            module = importlib.import_module(name)
            yield from ((layer, getattr(module, class_name)) for layer, class_name in found)


def routers(kernel):
    """The routers of experts that `name_layers` names: transformers gives them no layer name."""
    root, name_of_class = Path(transformers.__file__).parent, python_module(kernel, "mapping").missing_name
    for path in sorted(root.glob("models/*/modeling_*.py")):
        for class_name in re.findall(r"^class (\w+Router)\(nn\.Module\)", path.read_text(), re.MULTILINE):
            layer_class = getattr(
                importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"), class_name
            )
            with contextlib.suppress(AttributeError, KeyError, TypeError):  # Of another configuration.
                if name_of_class(router(layer_class)) == ROUTER:
                    yield layer_class


def _normal(shape, dtype, device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def name_of(layer_class):
    """The name of a class; of a function also that of its model."""
    if isinstance(layer_class, type):
        return layer_class.__name__
    (function,) = (cell.cell_contents for cell in type(layer_class).forward.__closure__)
    return f"{function.__name__}, {module_of(layer_class).split('.')[-2]}"


def module_of(layer_class):
    if isinstance(layer_class, type):
        return layer_class.__module__
    return type(layer_class).forward.__closure__[0].cell_contents.__module__


def make(layer_class, layer_name, device):
    if layer_name == ROTARY:
        vars(layer_class).pop("forward", None)
        return layer_class
    if layer_name == ROUTER:
        return router(layer_class).to(device)
    return (layer_class(HIDDEN_SIZE) if layer_name.startswith("RMSNorm") else layer_class()).to(device)


def router(layer_class):
    """A router of 16 experts, of which a token gets 4."""
    counts = dict.fromkeys(("num_experts", "num_local_experts"), 16) | {"num_experts_per_tok": 4}
    more = {"norm_topk_prob": True, "moe_router_logit_softcapping": 0.0}
    return layer_class(types.SimpleNamespace(hidden_size=HIDDEN_SIZE, **counts, **more))


def replaced(layer, kernel, device, mode):
    with use_kernel_mapping(kernel.kernel_mapping(devices=(device,)), inherit_mapping=False):
        return kernelize(layer, mode=mode, device=device)


def make_inputs(layer_name, layer, dtype, other_dtype, device, seed):
    """The inputs, and how many of them have gradients."""
    if layer_name == ROTARY:
        # As from projections: heads next to head_dim in memory.
        states = _normal((3, ROWS // 3, 6, HEAD_DIM), dtype, device, seed + 1).transpose(1, 2)
        inputs = [states[:, :4], states[:, 4:]]
        for head_dim in (HEAD_DIM, HEAD_DIM // 2):
            tables = [_normal((3, ROWS // 3, head_dim), other_dtype, device, seed + index) for index in (2, 3)]
            with contextlib.suppress(RuntimeError), torch.no_grad():
                layer(*inputs, *tables)
                return [*inputs, *tables], 2
        raise AssertionError(f"{name_of(layer)} takes no cos of {HEAD_DIM} and none of half as many")
    count = 2 if layer_name == "RMSNormGated" else 1
    shape = (3, ROWS // 3, HIDDEN_SIZE)
    return [_normal(shape, dtype, device, seed + index) for index in range(1, count + 1)], count


def _run(layer, inputs, differentiable, gradient_of, training):
    inputs = [tensor.clone().requires_grad_(training and i < differentiable) for i, tensor in enumerate(inputs)]
    with contextlib.nullcontext() if training else torch.no_grad():
        outs = layer(*inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    if not training:
        return outs
    leaves = [each for each in (*inputs[:differentiable], *layer.parameters()) if each.requires_grad]
    differentiable = [out for out in outs if out.requires_grad]
    gradients = torch.autograd.grad(differentiable, leaves, [gradient_of(out) for out in differentiable])
    return *(out.detach() for out in outs), *gradients


def compare(layer_name, layer_class, kernel, device, seed, launches) -> Outcome:
    """Runs the class with and without kernels in every pair of dtypes; `launches()` counts the launches so far."""
    problems, formulas = {False: [], True: []}, None
    two_dtypes = "RMSNorm" in layer_name or layer_name == ROTARY
    other = "cos" if layer_name == ROTARY else "weight"
    for training, (dtype, weight_dtype) in itertools.product((False, True), DTYPES if two_dtypes else DTYPES[:3]):
        layer = make(layer_class, layer_name, device)
        for parameter in layer.parameters():
            parameter.data = _normal(parameter.shape, weight_dtype, device, seed)
        inputs, differentiable = make_inputs(layer_name, layer, dtype, weight_dtype, device, seed)

        def gradient_of(out):
            return _normal(out.shape, out.dtype, device, seed + 9)

        expected = _run(layer, inputs, differentiable, gradient_of, training)
        layer = replaced(layer, kernel, device, Mode.TRAINING if training else Mode.INFERENCE)
        assert layer.forward.__func__.__module__.startswith(kernel.__name__), "the forward was not replaced"
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            # The first call proves.
            _run(layer, inputs, differentiable, gradient_of, training)
            before = launches()
            found = _run(layer, inputs, differentiable, gradient_of, training)
            (entry,) = kernel.replacement_report(layer, verbose=False).layers
        # Where everything is fp32, several formulas have the same bits: the first dtypes tell which it is.
        formulas = formulas or entry.formulas
        equal = all(bits_equal(a, b) and a.stride() == b.stride() for a, b in zip(found, expected, strict=True))
        reasons = [str(warning.message) for warning in warned if "lossless" in str(warning.message)]
        if not equal:
            reasons.append("bits differ")
        elif launches() - before < 1 + training and device != "cpu":
            reasons.append("; ".join(["no kernel ran", *entry.reasons[:1]]))
        if reasons:
            problems[training].append(f"{str(dtype)[6:]}, {other} {str(weight_dtype)[6:]}: {' '.join(reasons)}")
    if layer_name == ROTARY:
        make(layer_class, layer_name, device)
    return Outcome(
        layer_name,
        name_of(layer_class),
        module_of(layer_class),
        "; ".join(formulas),
        "; ".join(problems[False]),
        "; ".join(problems[True]),
    )


def count_launches(kernel):
    """A function that returns how many kernels have been launched."""
    launch = python_module(kernel, "launch")
    count, original = [0], launch.Launch._enqueue

    def enqueue(self, *arguments):
        count[0] += 1
        return original(self, *arguments)

    launch.Launch._enqueue = enqueue
    return lambda: count[0]


def table(outcomes) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "kernels"))
    lines = [
        "# What is replaced",
        "",
        f"Every class and function of transformers that carries a layer name of this package: {sum(o.lossless for o in outcomes)} of "
        f"{len(outcomes)} are replaced,",
        "outputs and gradients bit-equal to the original's in bf16, fp16, fp32 and with weights, or cos, of another dtype.",
        f"{torch.cuda.get_device_name()}, {versions}.",
        "`python tests/sweep.py --table docs/replaced.md` writes this file. n: the normalised fp32 values.",
        "",
        "| layer name | class or function | computes | inference | training |",
        "|---|---|---|---|---|",
    ]
    kept = []
    for o in sorted(outcomes, key=lambda o: (o.layer_name, o.name, o.module)):
        problems = (o.inference_problem, o.training_problem)
        states = ["original" if problem else "lossless" for problem in problems]
        lines.append(f"| {o.layer_name} | {o.name} | {f'`{o.formula}`' * o.lossless} | {states[0]} | {states[1]} |")
        if not o.lossless:
            kept.append(f"- {o.name}: {reason(next(filter(None, problems)))}")
    if kept:
        lines += ["", "These keep their original forward, here with what was found for the first dtypes:", "", *kept]
    return "\n".join(lines) + "\n"


def reason(problem: str) -> str:
    """Of an outcome's problem the first dtypes' own."""
    first, *_ = re.split(r"; (?=b?float\d+, )", problem)
    _, _, refusal = first.partition("keeps its original forward: ")
    return refusal.removesuffix(" no kernel ran").split(" no kernel ran;")[0] if refusal else first


# Decoder layers, which transformers gives no layer name


def decoder_layers(kernel, device) -> tuple[list[tuple], list[tuple]]:
    """Of every model file with a decoder layer that is recognised: the file, and its decoder layers, attentions and MLPs. Then
    every other decoder layer, with the reason."""
    decoder, attention, mlp, mapping, proof = (
        python_module(kernel, name) for name in ("decoder", "attention", "mlp", "mapping", "proof")
    )
    states, silu = torch.zeros(1, device=device), mlp.subject_of(ACT2FN["silu"])

    def problem(layer_class):
        """Why a decoder layer keeps its forward; empty if it does not."""
        if not any(mapping._takes_arguments_of(layer_class, name) for name in mapping._DECODERS):
            return "takes other arguments"
        if decoder.formula_of(layer_class, states) is not None:
            return ""
        verdicts, refusals = proof.verdicts_about(layer_class.forward)
        return "; ".join([*refusals, *(verdict.reason for verdict in verdicts if verdict.reason)])

    def recognised(layer_class, kind):
        name = layer_class.__name__
        if kind == "Attention":
            variant = attention.formula_of(layer_class, states)
            return "" if variant is None else f"{name}: {variant.formula}"
        return name * (mlp.activation_of(layer_class, silu, states) is not None)

    rows, kept = [], []
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if "DecoderLayer" not in path.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
        model = path.stem.removeprefix("modeling_")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Refusals.
            problems = {each: problem(each) for each in own if each.__name__.endswith("DecoderLayer")}
            found = [
                f"{each.__name__}{f': {formula.formula}' * (formula is not decoder.PRE_NORM)}"
                for each, reason in problems.items()
                if not reason
                for formula in (decoder.formula_of(each, states),)
            ]
            cells = [", ".join(found)]
            for kind in ("Attention", "MLP"):
                of_kind = (recognised(each, kind) for each in own if each.__name__.endswith(kind))
                cells.append(", ".join(filter(None, of_kind)))
        kept += [(model, each.__name__, reason) for each, reason in problems.items() if reason]
        if cells[0]:
            rows.append((model, *cells))
    return rows, kept


def decoder_table(rows, kept) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "kernels"))
    lines = [
        "# Decoder layers",
        "",
        f"The models of {versions} whose decoder layers are recognised by their formula, which",
        '`kernel.name_layers(model)` and `kernel.kernel_mapping(level="decoder")` need. Without a formula the layer is Llama\'s:',
        "`norm, attention, sum and norm, MLP, sum`. Where a cell is `-` the attention or the MLP is another one, and is called as it is.",
        "The order of the kernels' sums is proved on the GPU at hand.",
        "`python tests/sweep.py --decoders docs/decoders.md` writes this file.",
        "",
        "| model | decoder layer | attention | gated MLP |",
        "|---|---|---|---|",
        *(f"| {' | '.join(cell or '-' for cell in row)} |" for row in rows),
        "",
        "These decoder layers keep their forward:",
        "",
        "| model | decoder layer | reason |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in kept),
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table there instead of printing it")
    parser.add_argument(
        "--decoders", type=Path, metavar="FILE", help="write that of decoder layers there, and no other"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name, path in (("--table", arguments.table), ("--decoders", arguments.decoders)):
        if path and (path.is_dir() or not path.parent.is_dir()):
            parser.exit(2, f"sweep: error: {name}: expected a file in a folder that is there, found {path}\n")
    if arguments.decoders:
        # Formulas are compared in torch operations, on a CPU as well.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        arguments.decoders.write_text(
            decoder_table(*decoder_layers(get_local_kernel(ROOT / "build"), torch.device("cpu")))
        )
        return
    if not torch.cuda.is_available():
        parser.exit(2, "sweep: needs a GPU\n")
    from rich.progress import track

    kernel = get_local_kernel(ROOT / "build")
    layer_names = set(kernel.kernel_mapping())
    launches = count_launches(kernel)
    found = list(classes(layer_names))
    outcomes = [compare(*entry, kernel, "cuda", arguments.seed, launches) for entry in track(found)]
    text = table(outcomes)
    if arguments.table:
        arguments.table.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
