"""Tile sizes, warps and pipeline stages per architecture, and why.

Chosen from compiled code (Triton 3.9; `experiment=compile_kernels` shows it), not yet from timing:

decode  16 query rows: the least a matrix instruction takes; 4 to 16 of them are real. 4 warps share the keys of a tile. What does
        not grow with a tile (barriers, addresses, the softmax of rows that are padding) is halved per key by doubling it: int8 on
        sm_90 takes 4.5 instructions per element with 64 keys, 3.5 with 128; 8 warps need 4.2. So a tile is the largest that
        leaves shared memory for three programs on a processor (two where it has 100 KiB), which keeps a tile per program in
        flight: two stages are enough, a third costs shared memory and, in int8, 60 registers.
        Codes of 2 and 3 bits are spread over the channels in registers, so their tiles hold 64 and 32 keys: larger ones spilled.
extend  sm_90 and sm_100 run their own matrix instructions from 64 rows per 4 warps on, so 128 rows on 8. Before them, and on
        sm_120, the accumulators of 64 x 128 take half of the 255 registers a thread has: 64 rows on 4 warps for converted
        formats, and tiles of 32 keys for zero points of tokens and for sm_80, whose fp8 conversion needs registers too: what
        was wider spilled. Head dims above 128, or padded to a power of two,
        halve the rows or double the warps for the same reason.
append  4 rows on 2 warps: decode stores a few rows per head, and latency is all that matters there.

Does not know about: launching.
"""

import functools
from typing import NamedTuple

import torch
import triton
from triton import knobs

from qkv_kernels.triton.spec import PlaneSpec

# Triton 3.6 cannot pipeline the assembly that widens codes in the loops it makes for sm_100; 3.9 can.
_OLD_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
# Kibibytes of shared memory that one decode program may take.
_SHARED = {"sm_80": 48, "sm_89": 36, "sm_90": 75, "sm_100": 75, "sm_120": 36, "gfx942": 20}


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


def decode(arch: str, K: PlaneSpec, V: PlaneSpec) -> AttendLaunch:
    if arch == "interpreter":
        return AttendLaunch(16, 32, 4, 1)
    fewest = min(S.fmt.bits for S in (K, V))
    keys, stages = {2: 64, 3: 32}.get(fewest, 128), 2
    while keys > 16 and keys * _decode_bytes_per_key(K, V, stages) > _SHARED.get(arch, 48) * 1024:
        keys //= 2
    return AttendLaunch(16, keys, 4, stages)


def extend(arch: str, K: PlaneSpec, V: PlaneSpec) -> AttendLaunch:
    if arch == "interpreter":
        return AttendLaunch(32, 32, 4, 1)
    wide = max(K.lanes * K.streams, V.lanes * V.streams) > 128
    padded = any(S.width != S.lanes for S in (K, V))  # masks of channels take registers
    per_key = any(S.scale == "token" and S.zero != "none" for S in (K, V))  # zero points of keys: many live numbers
    if arch in ("sm_90", "sm_100"):
        converted = any(S.kind != "raw" for S in (K, V))
        stages = 1 if arch == "sm_100" and converted and _OLD_TRITON else 2
        return AttendLaunch(64 if wide else 128, 32 if per_key or wide else 64, 8, stages)
    if arch.startswith("gfx"):
        return AttendLaunch(64, 32 if K.kind == V.kind == "raw" or wide else 64, 4, 2)
    if K.kind == V.kind == "raw":
        return AttendLaunch(64 if wide or padded else 128, 32 if wide else 64, 8, 2)
    narrow = per_key or wide or K.zero != "none" or arch == "sm_80"
    return AttendLaunch(64, 32 if narrow else 64, 8 if wide or padded else 4, 2)


def _decode_bytes_per_key(K: PlaneSpec, V: PlaneSpec, stages: int) -> int:
    """Shared memory: codes in flight, V once more as the matrix unit's operand where it is converted on the way, indices."""
    codes = sum(S.lanes * S.fmt.storage.itemsize for S in (K, V))
    return (stages - 1) * codes + (0 if V.kind == "raw" else 2 * V.lanes) + 64
