"""The mapping from transformers' layer names to the layers of this package."""

import functools
import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Optional, Union

import torch

from . import layers

# Layer name -> ours.
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
    # No class of transformers carries these: `kernels.replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")` gives one.
    "SwiGLUMLP": "LlamaMLP",
    "LlamaMLP": "LlamaMLP",
    "GeGLUMLP": "GeGLUMLP",
    "TorchRMSNorm": "TorchRMSNorm",
}
# What only the mapping of level "decoder" names. No class of transformers carries these names before `name_layers`.
DECODER_LAYERS = {"LlamaDecoderLayer": "LlamaDecoderLayer", "LlamaRotaryEmbedding": "LlamaRotaryEmbedding"}
LEVELS = {"layer": LAYERS, "decoder": {**LAYERS, **DECODER_LAYERS}}
# For which there are builds.
_DEVICE_TYPES = ("cuda", "rocm", "cpu")
# By what its modules are called, or its buffers if it has none, a class is known that may get a layer name; whether it is
# one is for the proof to say.
_NAMES_BY_CHILDREN = {
    frozenset(("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")): "LlamaDecoderLayer",
    frozenset(("gate_proj", "up_proj", "down_proj", "act_fn")): "SwiGLUMLP",
    frozenset(("inv_freq", "original_inv_freq")): "LlamaRotaryEmbedding",
}


def name_layers(model: torch.nn.Module) -> dict[str, str]:
    """Gives layer names to the decoder layers, MLPs and rotary embeddings of `model`, which transformers leaves without.

    `kernels.replace_kernel_forward_from_hub` for every class whose modules (or buffers) are called as those of
    `LlamaDecoderLayer`, `LlamaMLP` or `LlamaRotaryEmbedding` are and whose forward takes the same arguments. The names are the
    classes', in all models of the process, and replace nothing by themselves. With kernels 0.17 and later `kernelize` then
    leaves a module alone that has a forward or a hook of its own, as accelerate gives it, or a class of other arguments.

    Args:
        model: the module to look through.

    Returns:
        The names of the classes that got one, and the layer names.

    Raises:
        TypeError: `model` is no `torch.nn.Module`.
        ImportError: `kernels` is not installed.
    """
    from kernels import replace_kernel_forward_from_hub

    has_conditions = "condition" in inspect.signature(replace_kernel_forward_from_hub).parameters
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    named = {}
    for module in model.modules():
        layer_class = type(module)
        children = [*module.named_children()] or [*module.named_buffers(recurse=False)]
        name = _NAMES_BY_CHILDREN.get(frozenset(name for name, _ in children))
        if name not in LEVELS["decoder"] or hasattr(layer_class, "kernel_layer_name"):
            continue
        ours = getattr(layers, LEVELS["decoder"][name])
        if _arguments(layer_class) == _arguments(ours):
            # Subclasses inherit the name, whatever their forward takes.
            conditions = {"condition": functools.partial(_is_replaceable, ours)} if has_conditions else {}
            replace_kernel_forward_from_hub(layer_class, name, **conditions)
            named[layer_class.__name__] = name
    return named


def _arguments(layer_class: type) -> list:
    return [(each.name, each.kind) for each in inspect.signature(layer_class.forward).parameters.values()]


def _is_replaceable(ours: type, module: torch.nn.Module) -> bool:
    """Whether the module's forward is its class's or one that `kernelize` bound onto it, and takes the arguments of ours."""
    bound = vars(module).get("forward")
    name = getattr(bound.__func__, "__qualname__", "") if isinstance(bound, MethodType) else ""
    if bound is not None and not name.endswith(".forward"):
        return False
    return "_hf_hook" not in vars(module) and _arguments(type(module)) == _arguments(ours)


def _warn_of_unnamed(level: str) -> None:
    """Warns if the layer names that a mapping of this level has beside those of "layer" are no class's: it would replace nothing."""
    names, classes = LEVELS[level].keys() - LAYERS.keys(), [torch.nn.Module]
    for each in classes:
        if getattr(each, "kernel_layer_name", None) in names:
            return
        classes += each.__subclasses__()
    if names:
        warnings.warn(
            f"lossless-kernels: level={level!r} has layers for {' and '.join(sorted(names))}, and no class has these layer "
            "names: decoder layers keep their forward unless name_layers(model) is called before kernelize",
            RuntimeWarning,
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
    """What `kernels.register_kernel_mapping` and `kernels.use_kernel_mapping` take, for every layer of this package.

    Without `repo_id` and `local_path` the mapping points at the build that is running: the same classes, offline.

    Args:
        repo_id: a kernel repository on the Hub, such as "lossless-kernels/lossless-kernels".
        version: the version of `repo_id` to load; 1 if neither it nor `revision` is given.
        revision: a branch, tag or commit of `repo_id`.
        local_path: a folder that holds `build/`, or a build itself.
        devices: kernels' device types to register for, or `kernels.Device`: "cuda", "rocm", and "cpu" for Triton's interpreter.
        trust_remote_code: passed on with `repo_id`; a list names the repositories to trust (kernels 0.17 and later).
        level: "layer" for norms, activations and what else stands alone; "decoder" for whole decoder layers and the
            tables of their rotary embedding too (`name_layers` first).

    Returns:
        A dictionary layer name -> device type -> `kernels.Mode` -> repository, with INFERENCE and TRAINING, each with and
        without TORCH_COMPILE.

    Raises:
        ValueError: both `repo_id` and `local_path`, or `version` or `revision` without `repo_id`, both of these, or an argument
            that is none of what is expected above.
        ImportError: `kernels` is not installed.
    """
    from kernels import LayerRepository, LocalLayerRepository, Mode

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
    if level not in tuple(LEVELS):
        raise ValueError(f"level: expected one of {', '.join(LEVELS)}, found {level!r}")
    types = devices if isinstance(devices, (tuple, list, set, frozenset)) else ()
    if not types or any(getattr(each, "type", each) not in _DEVICE_TYPES for each in types):
        raise ValueError(
            f"devices: expected a sequence of {', '.join(_DEVICE_TYPES)} or kernels' Device of these, found {devices!r}"
        )

    _warn_of_unnamed(level)

    def repository(layer_name):
        if repo_id is None:
            folder = Path(local_path) if local_path is not None else Path(__file__).parent
            return LocalLayerRepository(folder, layer_name=layer_name)
        which = {"revision": revision} if revision is not None else {"version": 1 if version is None else version}
        return LayerRepository(repo_id, layer_name=layer_name, trust_remote_code=trust_remote_code, **which)

    modes = (Mode.INFERENCE, Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE)
    return {
        name: {device: {mode: repository(layer) for mode in modes} for device in devices}
        for name, layer in LEVELS[level].items()
    }
