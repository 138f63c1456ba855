"""Reads from a kernel's machine code what the compiler made of it: resources, loads, matrix and conversion instructions, loops.

Takes: Triton's compiled kernels. Gives: counts. NVIDIA code is disassembled with the tools in Triton's wheel; AMD code is text
already. Does not know about: formats, what a kernel computes.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(@!?U?P\w+ )?([A-Z0-9_.]+)([^;]*);", re.M)
_LABEL = re.compile(r"^(\.L_x_\d+):", re.M)
_AMD_INSTRUCTION = re.compile(r"^\s+([a-z]+_[a-z0-9_]+)([^;\n]*)", re.M)
_AMD_LABEL = re.compile(r"^(\.?LBB\w+):", re.M)
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_CONVERSIONS = ("I2F", "F2F", "F2I", "F2FP", "I2FP", "I2I")


@dataclass(frozen=True)
class Instruction:
    at: int  # position in the listing
    name: str
    rest: str


@dataclass(frozen=True)
class Code:
    """registers: per thread. spill_bytes and stack_bytes: per thread. shared_bytes: per program."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    instructions: list[Instruction]
    loops: list[list[Instruction]]  # bodies of the innermost loops; if any of these has a matrix instruction, only of such loops

    @property
    def load_widths(self) -> list[int]:
        """Bytes per thread of every load from global memory; asynchronous copies to shared memory are loads too."""
        return [w for i in self.instructions if (w := load_width(i.name))]

    @property
    def matrix(self) -> Counter[str]:
        return Counter(i.name for i in self.instructions if _is_matrix(i.name))


def conversions(instructions: list[Instruction]) -> int:
    """How many instructions per thread change a number's type."""
    return sum(i.name.split(".")[0] in _CONVERSIONS or i.name.startswith("v_cvt_") for i in instructions)


def read(compiled: Any, arch: str) -> Code:
    """The code of a kernel that Triton compiled for `arch`. Raises RuntimeError if the disassembler fails."""
    return _read_amd(compiled) if arch.startswith("gfx") else _read_nvidia(compiled)


def _read_nvidia(compiled: Any) -> Code:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        listing, usage = _tool("nvdisasm", "-c", str(path)), _tool("cuobjdump", "-res-usage", str(path))
    found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage))
    instructions = [Instruction(m.start(), m[3], m[4]) for m in _INSTRUCTION.finditer(listing)]
    labels = {m[1]: m.start() for m in _LABEL.finditer(listing)}
    jumps = [(labels[t[0]], i.at) for i in instructions if i.name.startswith("BRA") and (t := re.findall(r"\.L_x_\d+", i.rest))]
    spills = sum(_WIDTHS.get(i.name.split(".")[-1], 4) for i in instructions if i.name.startswith("STL"))
    return Code(
        registers=int(found["REG"]),
        spill_bytes=spills,
        stack_bytes=int(found["STACK"]),
        shared_bytes=int(compiled.metadata.shared),
        instructions=instructions,
        loops=_loops(instructions, jumps),
    )


def _read_amd(compiled: Any) -> Code:
    listing = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", listing)[0])

    body = listing[: listing.index("s_endpgm")] if "s_endpgm" in listing else listing
    instructions = [Instruction(m.start(), m[1], m[2]) for m in _AMD_INSTRUCTION.finditer(body)]
    labels = {m[1]: m.start() for m in _AMD_LABEL.finditer(body)}
    jumps = [(labels[i.rest.strip()], i.at) for i in instructions if i.name.startswith("s_cbranch") and i.rest.strip() in labels]
    return Code(
        registers=field("vgpr_count"),
        spill_bytes=4 * field("vgpr_spill_count"),
        stack_bytes=field("private_segment_fixed_size"),
        shared_bytes=int(compiled.metadata.shared),
        instructions=instructions,
        loops=_loops(instructions, jumps),
    )


def _loops(instructions: list[Instruction], jumps: list[tuple[int, int]]) -> list[list[Instruction]]:
    back = [(a, b) for a, b in jumps if a <= b]
    bodies = [
        [i for i in instructions if a <= i.at <= b]
        for a, b in back
        if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in back)
    ]
    return [body for body in bodies if any(_is_matrix(i.name) for i in body)] or bodies


def _is_matrix(name: str) -> bool:
    return name.split(".")[0] in ("HMMA", "IMMA", "QMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA") or name.startswith(
        "v_mfma"
    )


def load_width(name: str) -> int | None:
    parts = name.split(".")
    if parts[0] in ("LDG", "LDGSTS"):
        return next((_WIDTHS[p] for p in parts if p in _WIDTHS), 4)
    found = re.match(
        r"(?:global|buffer)_load_(?:lds_)?(dwordx4|dwordx3|dwordx2|dword|ushort|ubyte|sbyte|short|b128|b64|b32|u16|u8)", name
    )
    widths = {
        "dwordx4": 16,
        "dwordx3": 12,
        "dwordx2": 8,
        "dword": 4,
        "b128": 16,
        "b64": 8,
        "b32": 4,
        "ubyte": 1,
        "sbyte": 1,
        "u8": 1,
    }
    return widths.get(found[1], 2) if found else None


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([str(_tools() / name), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip()}")
    return done.stdout


@cache
def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
