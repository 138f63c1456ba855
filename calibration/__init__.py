"""Scales from your own text: `from calibration import calibrate` in Python, `python -m calibration.run` on the command line."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calibration.python import calibrate

__all__ = ["calibrate"]


def __getattr__(name: str) -> Any:  # importing the package alone stays cheap: calibrate brings torch and transformers
    if name == "calibrate":
        from calibration.python import calibrate

        return calibrate
    raise AttributeError(f"module 'calibration' has no attribute {name!r}")
