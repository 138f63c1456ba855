"""Where compiled kernels and converted models are kept between runs. Takes: the environment. Gives: a folder."""

import os
from pathlib import Path


def cache_root() -> Path:
    """$QKV_CACHE, else $XDG_CACHE_HOME/qkv, else ~/.cache/qkv."""
    if os.environ.get("QKV_CACHE"):
        return Path(os.environ["QKV_CACHE"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "qkv"
    home = os.path.expanduser("~")
    return Path("/nonexistent" if home == "~" else home) / ".cache" / "qkv"  # that is where users without a home live
