"""Loading models. `load_model`, `wrap_model`, `shape_of` and `fingerprint` are what the rest of the project uses."""

from qkv.models.fingerprint import fingerprint
from qkv.models.loader import LoadedModel, load_model, resolve, wrap_model
from qkv.models.memory import free_memory
from qkv.models.shapes import shape_of

__all__ = ["LoadedModel", "fingerprint", "free_memory", "load_model", "resolve", "shape_of", "wrap_model"]
