"""The drift command: does a scale file still fit this data?

    python -m calibration.drift scales=scales.safetensors data=jsonl data.path=this_month.jsonl

It is `experiments.run` with another default configuration (conf/drift.yaml).
"""

import sys
from collections.abc import Iterable

from experiments import run


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; returns the exit code of experiments.run."""
    return run.main(arguments, "drift")


if __name__ == "__main__":
    sys.exit(main())
