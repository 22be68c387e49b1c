"""What every op needs. No module here knows an op."""

import warnings

# The package, under the name by which it was loaded, and its Python module of replacing layers.
ROOT_PACKAGE = __package__.rsplit(".", 1)[0]
LAYERS_MODULE = f"{ROOT_PACKAGE}.layers"


def warn(text: str, stacklevel: int = 2) -> None:
    """Warns in the package's name; `stacklevel` counts from the caller, as that of `warnings.warn` does."""
    warnings.warn(f"lossless-kernels: {text}", RuntimeWarning, stacklevel=stacklevel + 1)
