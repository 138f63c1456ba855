"""`python -m qkv_kernels.cpu`: build the kernels ahead of time."""

import sys

from qkv_kernels.cpu.build import BuildError, library

try:
    print(library())
except BuildError as failure:
    sys.exit(f"qkv: {failure}")
