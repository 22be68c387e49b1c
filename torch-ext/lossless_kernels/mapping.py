"""The mapping from transformers' layer names to the layers of this package. Only this module calls `kernels`."""

import contextlib
import functools
import inspect
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Optional, Union

import torch

from . import layers
from .core import proof, warn
from .core.inspection import CACHE, PAST_KEY_VALUES, functions_of, owns_nothing, without_wrappers
from .decoder import layer as decoder
from .ops import cohere_layer_norm, complex_rotary, rotary
from .ops.rms_norm.formulas import EPS_NAME, EPS_NAMES
from .ops.rms_norm.proof import variant_of
from .ops.softmax_callers import with_our_softmax

# Layer name -> class of `layers`.
LAYERS = {
    "RMSNorm": "LlamaRMSNorm",
    "RMSNormZeroCentered": "RMSNormZeroCentered",
    "RMSNormGated": "RMSNormGated",
    "SiLU": "SiLUActivation",
    "GeLU": "GELUActivation",
    "GeluTanh": "GELUTanh",
    "NewGELU": "NewGELUActivation",
    "FastGELU": "FastGELUActivation",
    "QuickGELU": "QuickGELUActivation",
    "rotary_pos_emb": "RotaryPosEmb",
    "rotary_pos_emb_vision": "RotaryPosEmbVision",
    "rotary_emb": "RotaryEmb",
    "SoftmaxTopKRouter": "SoftmaxTopKRouter",
    # No class of transformers has these names: `kernels.replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")` gives one.
    "SwiGLUMLP": "LlamaMLP",
    "LlamaMLP": "LlamaMLP",
    "GeGLUMLP": "GeGLUMLP",
    "Phi3MLP": "Phi3MLP",
    "TorchRMSNorm": "TorchRMSNorm",
    "TorchLayerNorm": "TorchLayerNorm",
    "TorchGroupNorm": "TorchGroupNorm",
    "CohereLayerNorm": "CohereLayerNorm",
}
# Names of level "decoder" alone. No class of transformers has these names before `name_layers`. Decoder layers differ in the
# order of their arguments.
_DECODERS = ("LlamaDecoderLayer", "MixtralDecoderLayer", "Qwen3VLTextDecoderLayer")
DECODER_LAYERS = {**dict(zip(_DECODERS, _DECODERS)), "LlamaRotaryEmbedding": "LlamaRotaryEmbedding"}
LEVELS = {"layer": LAYERS, "decoder": {**LAYERS, **DECODER_LAYERS}}
# Device types with builds.
_DEVICE_TYPES = ("cuda", "rocm", "cpu")
# The names of a class's children, or of its buffers if it has no children, tell which layer name it may get; those of decoder
# layers are in `decoder.CHILDREN`. The proof decides whether its forward is the layer's.
_NAMES_BY_CHILDREN = {
    frozenset(("gate_proj", "up_proj", "down_proj", "act_fn")): "SwiGLUMLP",
    frozenset(("gate_up_proj", "down_proj", "activation_fn")): "Phi3MLP",
    frozenset(("inv_freq", "original_inv_freq")): "LlamaRotaryEmbedding",
}
# The rest carries a name in transformers. Where its decorators did nothing (USE_HUB_KERNELS=0, or a version of kernels that
# transformers does not take), classes are known by these.
_NAMES_BY_ACTIVATION = {
    "SiLUActivation": "SiLU",
    "GELUActivation": "GeLU",
    "GELUTanh": "GeluTanh",
    "NewGELUActivation": "NewGELU",
    "FastGELUActivation": "FastGELU",
    "QuickGELUActivation": "QuickGELU",
}
# Classes of torch that a kernel may replace. `name_layers` leaves them alone: all models share them.
RECIPES = {
    torch.nn.SiLU: "SiLU",
    torch.nn.GELU: "GeLU",
    torch.nn.RMSNorm: "TorchRMSNorm",
    torch.nn.LayerNorm: "TorchLayerNorm",
    torch.nn.GroupNorm: "TorchGroupNorm",
}
# Functions of model files, most of which transformers gives no layer name.
_NAMES_BY_FUNCTION = {
    "apply_rotary_pos_emb": "rotary_pos_emb",
    "apply_rotary_pos_emb_vision": "rotary_pos_emb_vision",
    "apply_rotary_emb": "rotary_emb",
}
# Layer name -> what finds the formula of a function.
_FORMULA_OF_FUNCTION = {
    "rotary_pos_emb": functools.partial(rotary.formula_on_cpu, vision=False),
    "rotary_pos_emb_vision": functools.partial(rotary.formula_on_cpu, vision=True),
    "rotary_emb": complex_rotary.unsqueeze_dim_of,
}
_NAMES_BY_EPS = {eps: name for name, eps in EPS_NAMES.items() if name in LAYERS}


def check_model(model: torch.nn.Module) -> None:
    """Raises TypeError unless `model` is a module."""
    if isinstance(model, type):
        raise TypeError(f"model: expected a torch.nn.Module, found type {model.__name__}, a class: make an instance")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")


def check_level(level: str) -> None:
    """Raises ValueError unless `level` is one of `LEVELS`."""
    if level not in tuple(LEVELS):
        raise ValueError(f"level: expected one of {', '.join(LEVELS)}, found {level!r}")


def name_layers(model: torch.nn.Module) -> dict[str, str]:
    """Gives layer names to the classes of `model` that have none and that a kernel of this package may replace.

    Calls `kernels.replace_kernel_forward_from_hub` for

    - decoder layers, MLPs and rotary embeddings: classes whose children (or buffers) have the names of those of a known
      decoder layer, `LlamaMLP`, `Phi3MLP` or `LlamaRotaryEmbedding`, and whose forward takes the same arguments;
    - norms with `weight` and `variance_epsilon` or `eps` whose forward computes a known formula (Gemma's, for example);
    - routers of experts that own one weight and whose forward calls `torch.nn.functional.softmax` before `topk`;
    - the norms and activations of transformers that have lost their names because its decorators did nothing;
    - the rotary functions `apply_rotary_pos_emb`, `apply_rotary_pos_emb_vision` and `apply_rotary_emb` of their files that compute
      a known formula.
      A module, which runs the function, takes its place in the file, as transformers' decorators do it.

    The names are the classes', in all models of the process, and replace nothing by themselves. With kernels 0.17 and later
    `kernelize` leaves a module of these classes alone if the module has a forward or a hook of its own, as accelerate gives it,
    or if its forward takes other arguments.

    Args:
        model: the module to look through.

    Returns:
        The names of the classes that got one, and the layer names.

    Raises:
        TypeError: `model` is no `torch.nn.Module`.
        ImportError: `kernels` is not installed.
    """
    check_model(model)
    named = {layer_class.__name__: name for layer_class, name in _give_names(model, "decoder").items()}
    for module in model.modules():
        for name, function in name_functions(module, keep=True).items():
            vars(module).setdefault("_kernel_funcs", {})[name] = function
            named[name] = type(function).kernel_layer_name
    return named


# A module that stands for a function in its file: the file's namespace, the function and whether it stays there.
_functions: MutableMapping[torch.nn.Module, tuple[dict, FunctionType, bool]] = weakref.WeakKeyDictionary()


def name_functions(module: torch.nn.Module, keep: bool = False) -> dict[str, torch.nn.Module]:
    """Puts modules with layer names in the places of the rotary functions that the module's forward calls.

    Returns:
        Those that stand there now, by the functions' names; without those that transformers made.
    """
    for function, layer_name in unnamed_functions(module).items():
        from kernels import use_kernel_forward_from_hub

        made = use_kernel_forward_from_hub(layer_name)(function)
        _functions[made] = function.__globals__, function, keep
        function.__globals__[function.__name__] = made
    found = {_functions[made][1].__name__: made for made in functions_called(module)}
    for made in found.values() if keep else ():
        _functions[made] = *_functions[made][:2], True
    return found


def unnamed_functions(module: torch.nn.Module) -> dict[FunctionType, str]:
    """The functions that the module's forward calls by a global name and that `name_functions` would name: their layer names."""
    forward = without_wrappers(class_forward(module))
    if not isinstance(forward, FunctionType):
        return {}
    named = {name: forward.__globals__.get(name) for name in _NAMES_BY_FUNCTION.keys() & {*forward.__code__.co_names}}
    return {
        function: _NAMES_BY_FUNCTION[name]
        for name, function in named.items()
        if isinstance(function, FunctionType)
        and function.__name__ == name
        and _is_rotary(function, _NAMES_BY_FUNCTION[name], forward.__globals__)
    }


def class_forward(module: torch.nn.Module) -> Optional[Callable]:
    """The forward of the module's class; None for a traced or scripted module, whose class has none."""
    return None if isinstance(module, torch.jit.ScriptModule) else type(module).forward


def functions_called(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules in the places of functions, made by `name_functions`, that the module's forward calls."""
    forward = without_wrappers(class_forward(module))
    if not _functions or not isinstance(forward, FunctionType):
        return []
    named = (forward.__globals__.get(name) for name in _NAMES_BY_FUNCTION.keys() & {*forward.__code__.co_names})
    return [function for function in named if isinstance(function, torch.nn.Module) and function in _functions]


def put_function_back(module: torch.nn.Module) -> None:
    """Undoes `name_functions`, unless `name_layers` asked for it."""
    namespace, function, keep = _functions.get(module, ({}, None, True))
    if not keep and namespace.get(function.__name__) is module:
        namespace[function.__name__] = function
        del _functions[module]


def _is_rotary(function: FunctionType, name: str, namespace: dict) -> bool:
    """Whether a function of this file takes the arguments of the layer with this name, and computes a formula of it."""
    if function.__globals__ is not namespace or hasattr(function, "__wrapped__"):
        return False
    ours = getattr(layers, LAYERS[name])
    given, taken = (list(inspect.signature(each).parameters.values()) for each in (function, ours.forward))
    alike = [(each.name, each.kind, each.default) for each in given] == [
        (each.name, each.kind, each.default) for each in taken[1:]
    ]
    if not alike or not owns_nothing(function):
        return False
    return bool(_quietly(_FORMULA_OF_FUNCTION[name], function))


def _give_names(model: torch.nn.Module, level: str) -> dict[type, str]:
    """Gives the layer names of a level to the classes of the model's modules; returns what it gave."""
    from kernels import replace_kernel_forward_from_hub

    has_conditions = "condition" in inspect.signature(replace_kernel_forward_from_hub).parameters
    named = {}
    for module in model.modules():
        layer_class = type(module)
        name = None if layer_class in named else missing_name(module)
        if name in LEVELS[level] and (level == "decoder" or name not in _NAMES_BY_CHILDREN.values()):
            # Subclasses inherit the name, whatever their forward takes.
            ours = getattr(layers, LEVELS[level][name])
            conditions = {"condition": functools.partial(_is_replaceable, ours)} if has_conditions else {}
            replace_kernel_forward_from_hub(layer_class, name, **conditions)
            named[layer_class] = name
    return named


def missing_name(module: torch.nn.Module) -> Optional[str]:
    """The layer name that the module's class may get; None if it has one, or if no layer of this package is like it."""
    layer_class = type(module)
    if hasattr(layer_class, "kernel_layer_name") or class_forward(module) is None:
        return None
    children = [*module.named_children()] or [*module.named_buffers(recurse=False)]
    children = frozenset(name for name, _ in children)
    if layer_class.__module__ == "transformers.activations":
        names = (_NAMES_BY_ACTIVATION.get(layer_class.__name__),)
    elif children in decoder.CHILDREN:
        names = _DECODERS
    else:
        names = (_NAMES_BY_CHILDREN.get(children) or _name_by_weight(module),)
    known = (name for name in names if name in LEVELS["decoder"])
    return next((name for name in known if _takes_arguments_of(layer_class, LEVELS["decoder"][name])), None)


def _takes_arguments_of(layer_class, ours: str) -> bool:
    return _arguments(layer_class) == _arguments(getattr(layers, ours))


def _name_by_weight(module) -> Optional[str]:
    """The layer name of a norm or router of a known formula, which has a weight and nothing else."""
    layer_class, state = type(module), vars(module)
    weight = state["_parameters"].get("weight")
    others = len(state["_parameters"]) > 1 or state["_buffers"] or state["_modules"]
    if weight is None or weight.dim() > 2 or others or layer_class.__module__.startswith("torch."):
        return None
    if weight.dim() == 2:  # Of heads or experts.
        if _is_router(layer_class):
            return "SoftmaxTopKRouter"
        return "CohereLayerNorm" if _is_coheres(layer_class, state) else None
    if "gate" in inspect.signature(layer_class.forward).parameters:
        return "RMSNormGated" if EPS_NAME in state and isinstance(state.get("activation"), str) else None
    eps_name = next((name for name in _NAMES_BY_EPS if isinstance(state.get(name), float)), None)
    if eps_name and has_known_formula(layer_class, eps_name):
        return _NAMES_BY_EPS[eps_name]
    return "CohereLayerNorm" if _is_coheres(layer_class, state) else None


def _is_router(layer_class: type) -> bool:
    """Whether the class's forward takes the k largest of a softmax that a kernel may compute."""
    forward = layer_class.forward
    # Names are in the order of their first use.
    code = getattr(forward, "__code__", None)
    names = [each for each in getattr(code, "co_names", ()) if each in ("softmax", "topk")]
    return names == ["softmax", "topk"] and with_our_softmax(forward) is not forward


def _is_coheres(layer_class: type, state: dict) -> bool:
    """Whether the class computes the formula of `CohereLayerNorm`."""
    if not isinstance(state.get(EPS_NAME), float) or functions_of(layer_class) is None:
        return False
    case = torch.bfloat16, torch.bfloat16, torch.device("cpu")
    return bool(_quietly(cohere_layer_norm.computes_formula, layer_class, *case))


def has_known_formula(layer_class: type, eps_name: str) -> bool:
    """Whether the class computes a formula of RMSNorm, of which `eps_name` holds eps, in operations that a kernel has."""
    if functions_of(layer_class) is None:
        return False
    variant = _quietly(variant_of, layer_class, eps_name, torch.bfloat16, torch.bfloat16, torch.device("cpu"))
    # `F.rms_norm` is replaced by the layer for torch.nn.RMSNorm alone.
    return bool(variant) and not variant.fused


def _quietly(prove: Callable, *arguments) -> Any:
    """The result of a formula proof, None if it raises: not to replace a layer that has no name is no news."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            return prove(*arguments)
        except proof.LosslessProofError:
            return None


def _arguments(layer_class: type) -> list:
    """The names and kinds of the forward's arguments; `CACHE` by its old name, since a decoder layer of ours takes either."""
    old = {CACHE: PAST_KEY_VALUES}
    given = inspect.signature(layer_class.forward).parameters.values()
    return [(old.get(each.name, each.name), each.kind) for each in given]


def is_replaceable(module: torch.nn.Module, forward: Optional[Callable]) -> bool:
    """Whether `kernelize` may replace this forward of the module's own: none, its class's, or one that `kernelize` bound.

    A package of kernels has `layers`. A forward that wraps another one, or is another module's, is somebody's own.
    """
    if not isinstance(forward, MethodType) or forward.__self__ is not module:
        return forward is None
    function = forward.__func__
    package = sys.modules.get((getattr(function, "__module__", None) or "").split(".")[0])
    bound = getattr(function, "__qualname__", "").endswith(".forward") and hasattr(package, "layers")
    return function is class_forward(module) or (bound and not hasattr(function, "__wrapped__"))


def _is_replaceable(ours: type, module: torch.nn.Module) -> bool:
    """Whether `kernelize` may replace the module's forward by that of `ours`: it takes the same arguments and has no hook."""
    state = vars(module)
    alike = _arguments(type(module)) == _arguments(ours)
    return is_replaceable(module, state.get("forward")) and "_hf_hook" not in state and alike


def _is_named(names) -> bool:
    """Whether a class of modules has one of these layer names."""
    classes = [torch.nn.Module]
    for each in classes:
        if getattr(each, "kernel_layer_name", None) in names:
            return True
        classes += each.__subclasses__()
    return False


def idle_decorators() -> Optional[str]:
    """Why `kernelize` would replace nothing in models of transformers, and what to do; None if it may, or transformers is not loaded.

    What the decorator of transformers does to a class is tried out.
    """
    hub = sys.modules.get("transformers.integrations.hub_kernels")
    decorator = getattr(hub, "use_kernel_forward_from_hub", None)
    if decorator is None or _is_named(LAYERS.keys()):
        return None
    tried = decorator("RMSNorm")(type("Tried", (torch.nn.Module,), {}))
    if hasattr(tried, "kernel_layer_name"):
        return None
    versions = [
        f"{name} {getattr(sys.modules.get(name), '__version__', '')}".strip() for name in ("transformers", "kernels")
    ]
    bounds = [getattr(hub, f"KERNELS_{which}_VERSION", None) for which in ("MIN", "MAX")]
    wanted = f" (it takes kernels from {bounds[0]} on, below {bounds[1]})" if all(bounds) else ""
    return (
        f"{' with '.join(versions)} gives its layers no names{wanted}, and kernelize replaces nothing: install a kernels that "
        "transformers takes, or call name_layers(model) before kernelize"
    )


def _warn_of_unnamed(level: str) -> None:
    """Warns if a mapping of this level would replace nothing, or nothing of what it has beside the layers of "layer"."""
    reason = idle_decorators()
    if reason is not None:
        warn(reason, stacklevel=3)
    names = LEVELS[level].keys() - LAYERS.keys()
    if names and not _is_named(names):
        warn(
            f"level={level!r} has layers for {' and '.join(sorted(names))}, and no class has these layer "
            "names: decoder layers keep their forward unless name_layers(model) is called before kernelize",
            stacklevel=3,
        )


def kernel_mapping(
    repo_id: Optional[str] = None,
    version: Optional[int] = None,
    revision: Optional[str] = None,
    local_path: Optional[Union[str, Path]] = None,
    devices: Sequence = ("cuda", "rocm"),
    trust_remote_code: Union[bool, list[str]] = True,
    level: str = "layer",
) -> dict:
    """The argument of `kernels.register_kernel_mapping` and `kernels.use_kernel_mapping` for every layer of this package.

    Without `repo_id` and `local_path` the mapping points at the running build: the same classes, offline.

    Args:
        repo_id: a kernel repository on the Hub, such as "lossless-kernels/lossless-kernels".
        version: the version of `repo_id` to load; 1 if neither `version` nor `revision` is given.
        revision: a branch, tag or commit of `repo_id`.
        local_path: a folder that holds `build/`, or a build itself.
        devices: kernels' device types, or `kernels.Device`: "cuda", "rocm", and "cpu" for Triton's interpreter.
        trust_remote_code: passed on with `repo_id`; a list names the repositories to trust (kernels 0.17 and later).
        level: "layer" for norms, activations, gated MLPs, routers and rotary functions; "decoder" for whole decoder layers and
            their rotary embedding's tables too (call `name_layers` first; a RuntimeWarning says if no class has their names).
            `apply(level="layer")` gives gated MLPs no names, and so leaves them.

    Returns:
        A dictionary layer name -> device type -> `kernels.Mode` -> repository, with INFERENCE and TRAINING, each with and
        without TORCH_COMPILE.

    Raises:
        ValueError: both `repo_id` and `local_path`, or `version` or `revision` without `repo_id`, or both of these, or an argument
            that is none of the expected ones above.
        ImportError: `kernels` is not installed.
    """
    from kernels import LayerRepository

    if repo_id is not None and local_path is not None:
        raise ValueError(f"repo_id, local_path: expected one of them, found {repo_id!r} and {str(local_path)!r}")
    if version is not None and revision is not None:
        raise ValueError(f"version, revision: expected one of them, found {version!r} and {revision!r}")
    if repo_id is None and (version is not None or revision is not None):
        raise ValueError("repo_id: expected the repository that version or revision belongs to, found None")
    if repo_id is not None and (not isinstance(repo_id, str) or repo_id.count("/") != 1):
        raise ValueError(f"repo_id: expected ORG/NAME, found {repo_id!r}")
    if version is not None and (type(version) is not int or version < 1):
        raise ValueError(f"version: expected a number from 1 on, found {version!r}")
    if local_path is not None and not Path(local_path).is_dir():
        raise ValueError(f"local_path: expected a folder, found {str(local_path)!r}")
    check_level(level)
    types = devices if isinstance(devices, (tuple, list, set, frozenset)) else ()
    if not types or any(getattr(each, "type", each) not in _DEVICE_TYPES for each in types):
        raise ValueError(
            f"devices: expected a sequence of {', '.join(_DEVICE_TYPES)} or kernels' Device of these, found {devices!r}"
        )

    _warn_of_unnamed(level)
    if repo_id is None:
        return _mapping(level, devices, local_path)
    which = {"revision": revision} if revision is not None else {"version": 1 if version is None else version}
    repository = functools.partial(LayerRepository, repo_id, trust_remote_code=trust_remote_code, **which)
    return _mapping(level, devices, repository=repository)


def _mapping(level, devices, local_path=None, repository=None) -> dict:
    from kernels import LocalLayerRepository, Mode

    if repository is None:
        folder = Path(__file__).parent if local_path is None else Path(local_path)
        repository = functools.partial(LocalLayerRepository, folder)
    modes = (Mode.INFERENCE, Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE)
    return {
        name: {device: {mode: repository(layer_name=layer) for mode in modes} for device in devices}
        for name, layer in LEVELS[level].items()
    }


def mode_for(model: torch.nn.Module, mode: Optional[Any]) -> Any:
    """The `kernels.Mode` to kernelize `model` for: `mode`, or by default that of `model.training`. Raises if it is none."""
    from kernels import Mode

    if mode is None:
        return Mode.TRAINING if model.training else Mode.INFERENCE
    expected = "kernels.Mode.INFERENCE or TRAINING, with or without TORCH_COMPILE"
    if not isinstance(mode, Mode):
        raise TypeError(f"mode: expected {expected}, found {mode!r}")
    if not any(each in mode for each in (Mode.INFERENCE, Mode.TRAINING)):
        raise ValueError(f"mode: expected {expected}, found {mode}")
    return mode


def is_training(mode: Any) -> bool:
    """Whether this `kernels.Mode` is one of training."""
    return bool(mode & type(mode).TRAINING)


def kernelize(model: torch.nn.Module, functions: list, mode: Any, level: str, device_type: str) -> None:
    """`kernels.kernelize` of a model, and of functions that it calls, under the mapping of the running build.

    Classes have the layer names of `name_layers` while it lasts. At level "layer" decoder layers, MLPs and rotary embeddings are
    not named. Layers without a kernel in the mapping are not logged.
    """
    import kernels

    with contextlib.ExitStack() as stack:
        stack.enter_context(_names(model, level))
        stack.enter_context(_without_log_of_unmapped_layers())
        stack.enter_context(kernels.use_kernel_mapping(_mapping(level, (device_type,)), inherit_mapping=False))
        for each in (model, *functions):
            kernels.kernelize(each, mode=mode, device=device_type)


def mapped_names() -> list[str]:
    """The layer names in the mapping that `kernels` has registered in this process: without `inherit_mapping=False` it is used."""
    try:
        from kernels.layer.globals import _KERNEL_MAPPING
    except ImportError:  # Another version keeps it elsewhere.
        return []
    return sorted(_KERNEL_MAPPING.get())


@contextlib.contextmanager
def _names(model, level) -> Iterator[None]:
    names = ("kernel_layer_name", "kernel_condition")
    before = {
        type(module): {name: vars(type(module))[name] for name in names if name in vars(type(module))}
        for module in model.modules()
    }
    named = _give_names(model, level)
    try:
        yield
    finally:
        for layer_class in named:
            for name in names:
                if name in before[layer_class]:
                    setattr(layer_class, name, before[layer_class][name])
                elif name in vars(layer_class):
                    delattr(layer_class, name)


@contextlib.contextmanager
def _without_log_of_unmapped_layers() -> Iterator[None]:
    logger = logging.getLogger("kernels.layer.layer")

    def keeps(record) -> bool:
        return "No kernel mapping found" not in str(record.msg)

    logger.addFilter(keeps)
    try:
        yield
    finally:
        logger.removeFilter(keeps)
