"""A paged, quantized key/value cache engine. Start at `qkv.engine.Engine`; README.md beside this file is the map.

Empty on purpose: importing the scheduler or a policy must not import torch.
"""
