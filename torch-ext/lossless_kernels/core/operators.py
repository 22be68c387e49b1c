"""Operators for torch.compile, and their calls from Inductor's code without torch's dispatcher.

An operator is opaque to Inductor, whose code calls it by `torch.ops.<namespace>.<name>.default(...)`: dispatcher and
Python kernel take 15 to 50 us of CPU time. `lower` has that code call `torch.ops.<namespace>.<name>.default.sites[...]`
instead, a function of the same arguments for each call in the code. It recognises the call that it made last by a tensor
guard, and launches. Inductor keeps code on disk for other processes; what this code calls exists wherever the operator
does. Inductor allocates the outputs of operators whose calls can write into given tensors, and reuses memory for them.
`compute_sums` has one operator of Inductor's graph compute a sum and what another operator computes of it.
"""

import ast
import functools
import inspect
import itertools
import math
import operator
import uuid
from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch

from .._ops import add_op_namespace_prefix
from .calls import Calls
from .domain import allocator, are_plain_under_modes
from .torch_internals import inductor, inductor_is_loaded, tensor_guard, writes

# The Python functions behind the operators.
DIRECT: dict[torch._ops.OpOverload, "Operator"] = {}
# An operator -> another with the same arguments and outputs behind them, which it writes; and whether that takes given
# arguments.
_INTO: dict[torch._ops.OpOverload, tuple[torch._ops.OpOverload, Callable[..., bool]]] = {}
# An operator -> the one that computes the sum of two tensors too, and the function of its other arguments.
_WITH_SUMS: dict[torch._ops.OpOverload, tuple[torch._ops.OpOverload, Callable]] = {}


class Operator:
    """The function behind an operator. Outputs may be given behind its arguments: it writes them and returns None.

    Args:
        formula: eager's operations on the operator's arguments, for calls without a kernel.
        find: `find(*arguments)` returns the function that computes all calls of this layout and these constants from
            the tensors among the arguments, in their order. Its `into`, if it has one, takes the outputs, too, and
            writes them. `find` returns None without a kernel.
        arguments: how many.

    Attributes:
        calls: its `recent` has the function that Inductor's code calls at each of its sites.
    """

    def __init__(self, formula: Callable, find: Callable, arguments: int):
        self.formula, self.find, self.arguments = formula, find, arguments
        self.calls = Calls(self._resolve)
        self.calls.recent = _Sites(self)

    def __call__(self, *arguments):
        with torch.no_grad():
            return self.call(self.entry(arguments), arguments)

    def call(self, entry: Optional[tuple], arguments: tuple) -> Any:
        if entry is None:
            return _write(arguments[self.arguments :], self.formula(*arguments[: self.arguments]))
        of_tensors, _, _, compute, _ = entry
        return compute(*of_tensors(arguments))

    def entry(self, arguments: tuple) -> Optional[tuple]:
        """What is known of such a call, see `_resolve`; None if the formula computes it."""
        positions = [number for number, each in enumerate(arguments) if isinstance(each, torch.Tensor)]
        tensors = tuple([arguments[number] for number in positions])
        # No mode sees Inductor's kernels either; torch itself has one around the first call of compiled code.
        if not all(are_plain_under_modes(each, each) for each in tensors):
            return None
        others = (
            tuple(each) if type(each) is list else each for each in arguments if not isinstance(each, torch.Tensor)
        )
        # What a guard compares beside a key's dtypes, shapes, strides and devices.
        facts = (
            *positions,
            *_firsts(tensors),
            *others,
            *[(type(each), each.requires_grad, each.is_conj()) for each in tensors],
        )
        return self.calls.find(self.formula, facts, tensors, arguments, positions)

    def _resolve(self, *given) -> Optional[tuple]:
        """`(tensors of the arguments, their other arguments, these, compute, guard)`; see `_guarded` for the guard."""
        *tensors, arguments, positions = given
        compute = self.find(*arguments[: self.arguments])
        if compute is None:
            return None
        outs = arguments[self.arguments :]
        if outs:
            compute = _into(compute, tensors[: -len(outs)], outs)
        of_tensors = _getter(positions)
        of_others = _getter([number for number in range(len(arguments)) if number not in positions])
        # A site makes the guard: inside torch's dispatcher tensors have other dispatch keys.
        return of_tensors, of_others, of_others(arguments), compute, []


def _write(outs: tuple, results) -> Any:
    """Copies the results to the outputs; returns the results if there are none."""
    if not outs:
        return results
    for out, result in zip(outs, _several(results), strict=True):
        out.copy_(result)


def _several(results) -> tuple:
    return (results,) if isinstance(results, torch.Tensor) else results


def _into(compute: Callable, tensors: list, outs: tuple) -> Callable:
    """The function of the tensors and these outputs that writes what `compute` returns."""
    made = _several(compute(*tensors))
    are_alike = all(
        (each.dtype, each.shape, each.stride()) == (out.dtype, out.shape, out.stride())
        for each, out in zip(made, outs, strict=True)
    )
    into = getattr(compute, "into", None)
    if into is not None and are_alike:
        return into
    layouts = [(each.shape, each.stride()) for each in tensors]

    def call(*given):
        # A site may pass the memory behind a view.
        found = [each.as_strided(*layout) for each, layout in zip(given, layouts)]
        _write(given[len(layouts) :], compute(*found))

    return call


def _guarded(entry: tuple, arguments: tuple) -> Optional[tuple]:
    """The entry with its guard, which all sites share; None if this torch has no guards."""
    of_tensors, *rest, guards = entry
    if not guards:
        guards.append(_guard_of(of_tensors(arguments)))
    (same,) = guards
    return None if same is None else (of_tensors, *rest, same)


def _firsts(tensors: tuple) -> list[int]:
    """For each tensor the number of the first that is the same object."""
    return [next(number for number, other in enumerate(tensors) if other is each) for each in tensors]


def _guard_of(tensors: tuple) -> Optional[Callable]:
    """`tensor_guard` of these tensors, of which several may be one object: torch's guards refuse that."""
    firsts = _firsts(tensors)
    unique = sorted(set(firsts))
    guard = tensor_guard(*[tensors[number] for number in unique])
    if guard is None or len(unique) == len(tensors):
        return guard

    def same(*tensors):
        return _firsts(tensors) == firsts and guard(*[tensors[number] for number in unique])

    return same


def _getter(numbers: list) -> Callable[[tuple], tuple]:
    """A function that returns these items of a tuple, as a tuple."""
    if not numbers:
        return operator.itemgetter(slice(0, 0))
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return operator.itemgetter(slice(numbers[0], numbers[-1] + 1))
    return operator.itemgetter(*numbers)


class _Sites(dict):
    """By its name, the function that a site of Inductor's code calls.

    If all calls of a site have the same layouts, its name ends with a list, written out: for each argument None, or shape
    and strides of a view. The site passes the tensor behind that view.
    """

    def __init__(self, operator: Operator):
        self._operator = operator

    def __missing__(self, name: str) -> Callable:
        _, found, views = name.partition(" [")
        function = _site_of_one_call(self._operator, ast.literal_eval(f"[{views}")) if found else _site(self._operator)
        self[name] = function
        return function


def _site(operator: Operator) -> Callable:
    known = None

    def call(*arguments):
        nonlocal known
        if known is not None:
            of_tensors, of_others, others, compute, same = known
            tensors = of_tensors(arguments)
            if of_others(arguments) == others and same(*tensors):
                return compute(*tensors)
        entry = operator.entry(arguments)
        # Without guards calls are found by their key.
        known = None if entry is None else _guarded(entry, arguments)
        return operator.call(entry, arguments)

    return call


def _site_of_one_call(operator: Operator, views: list) -> Callable:
    of_tensors, compute = None, None

    def call(*arguments):
        nonlocal of_tensors, compute
        if compute is not None:
            return compute(*of_tensors(arguments))
        arguments = tuple(
            [each if view is None else each.as_strided(*view) for each, view in itertools.zip_longest(arguments, views)]
        )
        entry = operator.entry(arguments)
        if entry is not None:
            of_tensors, _, _, compute, _ = entry
        return operator.call(entry, arguments)

    return call


def always(*arguments) -> bool:
    """For `register`: Inductor allocates the outputs of all calls."""
    return True


def _overload(name: str) -> torch._ops.OpOverload:
    return functools.reduce(getattr, (*add_op_namespace_prefix(name).split("::"), "default"), torch.ops)


def _operator(name: str, function: Operator, schema: str, writes: Sequence[str] = ()):
    tags = (torch.Tag.needs_exact_strides,)
    return torch.library.custom_op(
        add_op_namespace_prefix(name), function, mutates_args=writes, schema=schema, tags=tags
    )


def register(
    name: str, find: Callable, fake: Optional[Callable] = None, into: Optional[Callable[..., bool]] = None
) -> Callable:
    """Decorates the formula of an operator, from whose annotations torch takes the schema; the others: see `Operator`.

    Args:
        fake: the results' shapes, strides and dtypes; by default the formula.
        into: whether Inductor allocates the outputs of a call with these arguments; such calls have `into`.
    """

    def registered(formula):
        schema = torch.library.infer_schema(formula, mutates_args=())
        function = Operator(formula, find, len(inspect.signature(formula).parameters))
        made = _operator(name, function, schema)
        overload = _overload(name)
        overload.sites = function.calls.recent
        DIRECT[overload] = function

        def traced(*arguments):
            # Before Inductor reads a graph, torch has called this for each operator of it.
            lower()
            return (fake or formula)(*arguments)

        made.register_fake(traced)
        if into is not None:
            given, _, results = schema.rpartition(" -> ")
            outs = [f"out{number}" for number in range(results.count("Tensor"))]
            written = ", ".join(f"Tensor({each}!) {each}" for each in outs)
            made = _operator(f"{name}_into", function, f"{given[:-1]}, {written}) -> ()", outs)
            made.register_fake(lambda *_: None)
            _INTO[overload] = _overload(f"{name}_into"), into
        # TorchDynamo has ten guards for what `custom_op` makes, and two for this.
        return overload

    return registered


def compute_sums(name: str, of_sum: str, others: Callable) -> None:
    """Has Inductor replace the operator `name`, called with a sum, by `of_sum`, called with the two tensors that are added.

    Its results are those of `name`, and the sum behind the first.

    Args:
        others: the other arguments of `of_sum`, given those of `name`; None where that cannot stand for it.
    """
    _WITH_SUMS[_overload(name)] = _overload(of_sum), others


class _Sums:
    """A pass of Inductor over its graph, for `compute_sums`."""

    def apply(self, graph) -> None:
        graph = getattr(graph, "graph", graph)
        for node in [each for each in graph.nodes if each.target in _WITH_SUMS]:
            of_sum, others = _WITH_SUMS[node.target]
            total, *given = node.args
            if "val" in node.meta and _adds_equals(total) and _are_inputs(given):
                given = others(*given)
                if given is not None:
                    _replace(graph, node, total, of_sum, (*total.args, *given))


def _adds_equals(total) -> bool:
    """Whether the node adds two dense tensors of one shape, dtype and device."""
    if total.target is not torch.ops.aten.add.Tensor or total.kwargs:
        return False
    if not _are_tensors(total, *total.args):
        return False
    first, second = (each.meta["val"] for each in total.args)
    if (first.dtype, first.device, first.dim()) != (second.dtype, second.device, second.dim()):
        return False
    return _are_known_as_equal(first.shape, second.shape) and _is_dense(first) and _is_dense(second)


def _are_tensors(*nodes) -> bool:
    """Whether these are nodes of tensors. Another pass may leave nodes without values, and a sum's term may be a number."""
    return all(isinstance(each, torch.fx.Node) and isinstance(each.meta.get("val"), torch.Tensor) for each in nodes)


def _is_dense(tensor) -> bool:
    expected = [math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.dim())]
    return _are_known_as_equal(tensor.stride(), expected)


def _are_known_as_equal(numbers, others) -> bool:
    """Whether numbers, among them symbolic ones, are equal without another guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # Takes a second.

    return all(statically_known_true(each == other) for each, other in zip(numbers, others))


def _are_inputs(arguments) -> bool:
    """Whether the tensors among them are dense inputs of the graph that nothing writes to: at the sum they are the same."""
    nodes = [each for each in arguments if isinstance(each, torch.fx.Node)]
    if any(writes(user.target) for each in nodes for user in each.users):
        return False
    return _are_tensors(*nodes) and all(each.op == "placeholder" and _is_dense(each.meta["val"]) for each in nodes)


def _replace(graph, node, total, of_sum, arguments) -> None:
    """Puts the operator `of_sum` in the place of the sum `total` and of `node`."""
    is_one = isinstance(node.meta["val"], torch.Tensor)
    out, *rest = (node.meta["val"],) if is_one else node.meta["val"]
    results = out, total.meta["val"], *rest
    with graph.inserting_after(total):
        made = graph.call_function(of_sum, arguments)
    values = tuple([each.meta["val"] if isinstance(each, torch.fx.Node) else each for each in arguments])
    # Inductor gives the operator these strides.
    made.meta.update(val=results, eager_input_vals=(values, {}))
    with graph.inserting_after(made):
        found = [graph.call_function(operator.getitem, (made, number)) for number in range(len(results))]
    for each, value in zip(found, results):
        each.meta["val"] = value
    if is_one:
        node.replace_all_uses_with(found[0])
    else:
        for user in list(node.users):
            number = user.args[1]
            user.replace_all_uses_with(found[number + (number > 0)])
            graph.erase_node(user)
    graph.erase_node(node)
    total.replace_all_uses_with(found[1])
    graph.erase_node(total)


_SUMS = _Sums()


def differentiate(made: Callable, gradients: Callable) -> None:
    """Gives an operator `made(name, *tensors)` the gradients `gradients(name, dy, *tensors)`: one, or a tuple."""

    def setup_context(ctx, inputs, output):
        ctx.name, *tensors = inputs
        ctx.save_for_backward(*tensors)

    def backward(ctx, dy):
        found = gradients(ctx.name, dy, *ctx.saved_tensors)
        return (None, found) if isinstance(found, torch.Tensor) else (None, *found)

    torch.library.register_autograd(made, backward, setup_context=setup_context)


def lower() -> None:
    """Has Inductor generate calls of the sites, once Inductor is loaded. Its import takes seconds."""
    if not inductor_is_loaded():
        return
    private = inductor()
    if private is None:
        return
    if _SUMS not in private.pass_patterns:
        private.pass_patterns.append(_SUMS)
    for overload in DIRECT:
        if overload not in private.lowerings:
            private.make_fallback(overload)
            if overload in _INTO:
                private.make_fallback(_INTO[overload][0])
            private.lowerings[overload] = functools.partial(_lowered, private, overload, private.lowerings[overload])


def _lowered(private, overload, original: Callable, *arguments, **named):
    graph = private.V.graph
    if graph.cpp_wrapper:  # Its code is C++.
        return original(*arguments, **named)
    _keep(graph, arguments)
    before, called, site, node = len(graph.operations), overload, uuid.uuid4().hex, graph.current_node
    into, takes = _INTO.get(overload, (None, None))
    if into is not None and not named and "val" in node.meta and takes(*arguments):
        called, values = into, _several(node.meta["val"])
        nodes = [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, torch.fx.Node)]
        given = [each.meta.get("val") for each in nodes]
        # Hooks of saved tensors may change what a backward pass gets.
        if not graph.is_backward and _have_one_layout([*given, *values]):
            arguments, views = _memory_of(private, arguments)
            site = f"{site} {views}"
        outputs = [_allocated(private, each) for each in values]
        private.lowerings[called](*arguments, *outputs)
        outputs = outputs[0] if len(outputs) == 1 else outputs
    else:
        outputs = original(*arguments, **named)
    for node in graph.operations[before:]:
        if type(node) is private.FallbackKernel and node.op_overload is called:
            node.python_kernel_name = f"torch.ops.{overload}.sites[{site!r}]"
    return outputs


def _have_one_layout(values) -> bool:
    """Whether all are tensors whose sizes and strides are numbers, not symbols."""
    return all(
        isinstance(each, torch.Tensor) and all(type(size) is int for size in (*each.shape, *each.stride()))
        for each in values
    )


def _memory_of(private, arguments) -> tuple[list, list]:
    """The arguments, with buffers in the place of views that begin where the buffer begins; and these views, for `_Sites`.

    Making a view takes time in each call.
    """
    memory, views = [], []
    for each in arguments:
        view = getattr(each, "data", None)
        if type(view) is private.ReinterpretView and view.layout.offset == 0 and view.dtype == view.data.dtype:
            memory.append(view.data)
            views.append(tuple([tuple(map(int, sizes)) for sizes in (view.layout.size, view.layout.stride)]))
        else:
            memory.append(each)
            views.append(None)
    return memory, views


def _keep(graph, arguments) -> None:
    """Has Inductor compute each argument once. By itself it computes a sum or a product for every operator that takes it."""
    for node, argument in zip(graph.current_node.args, arguments):
        if isinstance(node, torch.fx.Node) and node.op == "call_function":
            if not any(writes(user.target) for user in node.users):
                graph.env[node] = argument


def _allocated(private, value: torch.Tensor):
    """A new buffer like the tensor."""
    shape, strides = (private.convert_shape_to_inductor(each) for each in (value.shape, value.stride()))
    empty = private.lowerings[torch.ops.aten.empty_strided.default]
    return empty(shape, strides, dtype=value.dtype, device=value.device)


def without_none(results, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results with empty tensors for None: an operator returns tensors only."""
    return tuple(like.new_empty(0) if each is None else each for each in results)


def of_tensors(compute: Callable, like: torch.Tensor) -> Callable:
    """`compute` with empty tensors for None among its results."""
    empty = allocator((0,), (1,), like.dtype, like.device)

    def call(*tensors):
        return tuple([empty() if each is None else each for each in compute(*tensors)])

    return call
