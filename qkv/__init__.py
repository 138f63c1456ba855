"""A paged, quantized key/value cache engine. Start at `qkv.engine.Engine`; README.md beside this file is the map.

Imports nothing of its own: importing the scheduler or a policy must not import torch.
"""

import os

# OpenMP threads that wait should spin for some ten microseconds, then sleep. A step has hundreds of short parallel loops:
# asleep at once, a decode step of one request takes 1.8 times as long; spinning on, as they do by default, it takes several
# times as long where other processes want the cores (measured, experiments/LOG.md). Read when torch loads, so it works where
# qkv is imported first; what the user set stays.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
