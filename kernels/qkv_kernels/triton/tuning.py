"""Tile sizes, warps and pipeline stages per architecture.

Does not know about: formats beyond bytes per row, launching.
"""

import functools
from typing import NamedTuple

import torch
from triton import knobs

from qkv_kernels.triton.spec import Side


class AppendLaunch(NamedTuple):
    rows: int
    warps: int


class AttendLaunch(NamedTuple):
    """rows: query rows of a tile at least. keys: keys of a tile."""

    rows: int
    keys: int
    warps: int
    stages: int


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when triton was imported)."""
    return bool(knobs.runtime.interpret)


@functools.cache
def arch(device: torch.device) -> str:
    """sm_90, gfx942 ..., or "interpreter"."""
    if interpreted():
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName.split(":")[0])
    return f"sm_{properties.major}{properties.minor}"


@functools.cache
def processors(device: torch.device) -> int:
    return 4 if interpreted() else int(torch.cuda.get_device_properties(device).multi_processor_count)


def append(arch: str, T: int) -> AppendLaunch:
    return AppendLaunch(rows=16 if arch == "interpreter" else 4, warps=2)


def decode(arch: str, K: Side, V: Side) -> AttendLaunch:
    if arch == "interpreter":
        return AttendLaunch(16, 32, 4, 1)
    return AttendLaunch(16, 64, 4, 3)


def extend(arch: str, K: Side, V: Side) -> AttendLaunch:
    if arch == "interpreter":
        return AttendLaunch(32, 32, 4, 1)
    return AttendLaunch(128, 64, 8, 2)
