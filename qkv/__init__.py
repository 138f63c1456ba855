"""A paged, quantized key/value cache engine: `from qkv import Engine, SamplingParams`. README.md beside this file is the map.

Its names are imported when they are first asked for: importing the scheduler or a policy must not import torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkv.engine import Engine as Engine
    from qkv.scales import ScaleFile as ScaleFile
    from qkv.types import RequestOutput as RequestOutput
    from qkv.types import SamplingParams as SamplingParams

_HOMES = {
    "Engine": "qkv.engine",
    "RequestOutput": "qkv.types",
    "SamplingParams": "qkv.types",
    "ScaleFile": "qkv.scales",
}
__all__ = ["Engine", "RequestOutput", "SamplingParams", "ScaleFile"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qkv' has no attribute '{name}'; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# OpenMP threads that wait should spin for some ten microseconds, then sleep. A step has hundreds of short parallel loops:
# asleep at once, a decode step of one request takes 1.8 times as long; spinning on, as they do by default, it takes several
# times as long where other processes want the cores (measured, experiments/LOG.md). Read when torch loads, so it works where
# qkv is imported first; what the user set stays.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
