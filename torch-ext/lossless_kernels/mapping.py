"""The mapping from transformers' layer names to the layers of this package."""

from collections.abc import Sequence
from pathlib import Path
from typing import Optional, Union

# Layer name -> ours. transformers decorates classes with all of them but TorchRMSNorm, which is for torch.nn.RMSNorm.
LAYERS = {
    "RMSNorm": "LlamaRMSNorm",
    "RMSNormZeroCentered": "RMSNormZeroCentered",
    "RMSNormGated": "RMSNormGated",
    "TorchRMSNorm": "TorchRMSNorm",
    "SiLU": "SiLUActivation",
    "GeLU": "GELUActivation",
    "GeluTanh": "GELUTanh",
    "NewGELU": "NewGELUActivation",
    "FastGELU": "FastGELUActivation",
    "QuickGELU": "QuickGELUActivation",
}


def kernel_mapping(
    repo_id: Optional[str] = None,
    version: Optional[int] = None,
    revision: Optional[str] = None,
    local_path: Optional[Union[str, Path]] = None,
    devices: Sequence[str] = ("cuda", "rocm"),
    trust_remote_code: Union[bool, list[str]] = True,
) -> dict:
    """What `kernels.register_kernel_mapping` and `kernels.use_kernel_mapping` take, for every layer of this package.

    Without `repo_id` and `local_path` the mapping points at the build that is running: the same classes, offline.

    Args:
        repo_id: a kernel repository on the Hub, such as "lossless-kernels/lossless-kernels".
        version: the version of `repo_id` to load; 1 if neither it nor `revision` is given.
        revision: a branch, tag or commit of `repo_id`.
        local_path: a folder that holds `build/`, or a build itself.
        devices: kernels' device types to register for.
        trust_remote_code: passed on with `repo_id`; a list names the repositories to trust (kernels 0.17 and later).

    Returns:
        A dictionary layer name -> device type -> `kernels.Mode` -> repository, with INFERENCE and TRAINING, each with and
        without TORCH_COMPILE.

    Raises:
        ValueError: both `repo_id` and `local_path`, or `version` or `revision` without `repo_id`, or both of these.
        ImportError: `kernels` is not installed.
    """
    from kernels import LayerRepository, LocalLayerRepository, Mode

    if repo_id is not None and local_path is not None:
        raise ValueError(f"repo_id, local_path: expected one of them, found {repo_id!r} and {str(local_path)!r}")
    if version is not None and revision is not None:
        raise ValueError(f"version, revision: expected one of them, found {version!r} and {revision!r}")
    if repo_id is None and (version is not None or revision is not None):
        raise ValueError("repo_id: expected the repository that version or revision belongs to, found None")
    if isinstance(devices, str):
        raise ValueError(f"devices: expected a sequence of device types, found the string {devices!r}")

    def repository(layer_name):
        if repo_id is None:
            folder = Path(local_path) if local_path is not None else Path(__file__).parent
            return LocalLayerRepository(folder, layer_name=layer_name)
        which = {"revision": revision} if revision is not None else {"version": 1 if version is None else version}
        return LayerRepository(repo_id, layer_name=layer_name, trust_remote_code=trust_remote_code, **which)

    modes = (Mode.INFERENCE, Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE)
    return {
        name: {device: {mode: repository(layer) for mode in modes} for device in devices}
        for name, layer in LAYERS.items()
    }
