"""What every op needs. Nothing here knows an op."""

# The package that the Hub ships, under whatever name it was loaded, and the Python module of the layers that replace others.
ROOT_PACKAGE = __package__.rsplit(".", 1)[0]
LAYERS_MODULE = f"{ROOT_PACKAGE}.layers"
