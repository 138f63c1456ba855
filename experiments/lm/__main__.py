"""lm-eval's own command line, with the model `qkv` added.

    python -m experiments.lm --model qkv --model_args model=smollm2,quantizer=int8 --tasks cloze --include_path conf/tasks

All else is lm-eval's: options, tasks and output. This file exists because lm-eval up to 0.4.13 imports no models of others. Its
next release reads entry points (docs/plugins.md there), and ours is in pyproject.toml: `PYTHONPATH=. lm-eval --model qkv ...`.
Exit codes: 0 done · 1 the run failed · 2 an argument is wrong · 130 interrupted.
"""

import sys

from qkv.errors import ConfigError, QkvError


def main() -> int:
    try:
        from lm_eval.__main__ import cli_evaluate

        from experiments.lm import model  # noqa: F401  registers it
    except ImportError as error:
        print(f"error: lm-eval is not installed ({error}): pip install 'lm-eval[hf]'", file=sys.stderr)
        return 2
    try:
        cli_evaluate()
    except QkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
