"""A paged, quantized key/value cache engine. Start at `qkv.engine.Engine`; README.md beside this file is the map.

Imports nothing of its own: importing the scheduler or a policy must not import torch.
"""

import os

# OpenMP threads that wait should sleep. By default they spin, and where another process wants one of the cores a decode
# step takes several times longer; on idle cores it makes no difference (measured, experiments/LOG.md). Read when torch
# loads, so it works where qkv is imported first; a value set by the user stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
