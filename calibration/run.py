"""The calibration command: your data in, a scale file and a report out.

    python -m calibration.run model=smollm2 data=text data.path=documents quantizer=int8 method=absmax out=scales.safetensors
    python -m calibration.run --help

It is `experiments.run` with another default configuration (conf/calibration.yaml): same options, same errors, same record.
"""

import sys
from collections.abc import Iterable

from experiments import run


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; returns the exit code of experiments.run."""
    return run.main(arguments, "calibration")


if __name__ == "__main__":
    sys.exit(main())
