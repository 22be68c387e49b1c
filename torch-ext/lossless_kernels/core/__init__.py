"""What every op needs. No module here knows an op."""

# The package, under the name by which it was loaded, and its Python module of replacing layers.
ROOT_PACKAGE = __package__.rsplit(".", 1)[0]
LAYERS_MODULE = f"{ROOT_PACKAGE}.layers"
