"""Loading models. The rest of the project uses `load_model`, `wrap_model`, `dimensions`, `shape_of` and `fingerprint`."""

from qkv.cache.sizing import free_memory
from qkv.models.dimensions import Dimensions, dimensions
from qkv.models.fingerprint import fingerprint
from qkv.models.loader import LoadedModel, load_model, resolve, wrap_model
from qkv.models.shapes import shape_of

__all__ = [
    "Dimensions",
    "LoadedModel",
    "dimensions",
    "fingerprint",
    "free_memory",
    "load_model",
    "resolve",
    "shape_of",
    "wrap_model",
]
