"""Fused Triton kernels: encode and store, decode, extend. Importing this package imports neither triton nor CUDA.

spec.py      what the kernels specialise on: formats and strides, with the reasons for what they refuse
tuning.py    tile sizes, warps and stages per architecture, with the reasoning
ptx.py       how NVIDIA widens codes
_tiles.py    device functions that know formats: load, widen, place scales, encode
append.py decode.py extend.py    one kernel per op with its launcher
"""
