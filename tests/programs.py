"""Runs the Python of documents, for test_programs.py: the programs that may share a process, in one."""

import ast
import builtins
import inspect
import json
import sys

import kernels
import torch

CONTINUES = "# Continues the first program"
# What a document's first program takes for granted: it runs before that program, with the same names.
PRELUDES = {
    "README.md": """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 256}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).to(device, torch.bfloat16).eval()
tokens = torch.randint(256, (1, 118), device=device)
with torch.no_grad():
    expected = model(tokens).logits
"""
}


def look_up(tree, names, place):
    """Runs the imports of a program, and looks for its names and their attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(compile(ast.Module([node], []), place, "exec"), names)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    stored = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if node.id not in stored and node.id not in names and not hasattr(builtins, node.id):
            raise NameError(f"{place}:{node.lineno}: {node.id}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            getattr(names[node.value.id], node.attr)


def load(found):
    """How many layers a mapping names. Loads them: on a CPU nothing else asks for the layers of a GPU."""
    if isinstance(found, dict):
        return sum(load(each) for each in found.values())
    if not isinstance(found, kernels.LayerRepository):
        return 0
    assert issubclass(found.load(), torch.nn.Module)
    return 1


def bind(text, kernel):
    """Raises TypeError unless the function takes the arguments that a call such as `kernel.silu(input)` gives it."""
    call = ast.parse(text, mode="eval").body
    is_ours = isinstance(call.func, ast.Attribute)
    function = getattr(kernel, call.func.attr) if is_ours else getattr(kernels, call.func.id)
    inspect.signature(function).bind(*call.args, **{each.arg: each.value for each in call.keywords})


def main(path):
    """Runs a file of JSON: the programs as [document, line, text, whether it is only looked up], and calls."""
    with open(path, encoding="utf-8") as file:
        programs, calls = json.load(file)
    first, loaded = {}, 0
    for document, line, text, looked_up in programs:
        tree = ast.increment_lineno(ast.parse(text), line - 1)
        names = first[document] if text.startswith(CONTINUES) else {"__name__": "__main__"}
        if looked_up:
            look_up(tree, dict(names), document)
            continue
        if document in PRELUDES and document not in first:
            exec(compile(PRELUDES[document], f"prelude of {document}", "exec"), names)
        exec(compile(tree, document, "exec"), names)
        if "expected" in names and "logits" in names and document in PRELUDES and document not in first:
            assert torch.equal(names["logits"], names["expected"]), document
        first.setdefault(document, names)
        loaded += load({name: value for name, value in names.items() if name != "__builtins__"})
    kernel = next(names["kernel"] for names in first.values() if "kernel" in names)
    for call in calls:
        bind(call, kernel)
    print(f"{len(programs)} programs, {loaded} layers loaded, {len(calls)} calls")


if __name__ == "__main__":
    main(sys.argv[1])
