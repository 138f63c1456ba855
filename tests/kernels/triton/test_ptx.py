"""The PTX that widens codes on NVIDIA, interpreted here over all codes: nobody needs a GPU to see that it is right."""

import re
from collections.abc import Callable

import pytest
import torch

from qkv_kernels.triton import ptx


def run(code: str, word: int) -> list[float]:
    """The four float16 values that a snippet makes of a register. Knows only the instructions that the snippets use."""
    registers = {"$2": word}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    def halves(x: int) -> torch.Tensor:
        return torch.tensor([x & 0xFFFF, x >> 16]).to(torch.uint16).view(torch.float16)

    def word_of(x: torch.Tensor) -> int:
        low, high = x.view(torch.uint16).tolist()
        return int(low | high << 16)

    def prmt(a: int, b: int, selector: int) -> int:
        bytes_ = [(x >> 8 * i) & 255 for x in (a, b) for i in range(4)]
        return sum(bytes_[(selector >> 4 * i) & 15] << 8 * i for i in range(4))

    operations: dict[str, Callable[..., int]] = {
        "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b,
        "xor.b32": lambda a, b: a ^ b,
        "shr.b32": lambda a, b: a >> b,
        "mov.b32": lambda a: a,
        "prmt.b32": prmt,
        "sub.rn.f16x2": lambda a, b: word_of(halves(a) - halves(b)),
        "cvt.rn.f16x2.e4m3x2": lambda a: word_of(
            torch.tensor([a & 255, a >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn).half()
        ),
    }
    for statement in code.strip("{ }").split(";"):
        name, _, rest = statement.strip().partition(" ")
        if not name or name == ".reg":
            continue
        if "{" in rest:  # mov.b32 {x, y}, $2: a register as two halves
            x, y = re.findall(r"\w+", rest.split("}")[0])
            registers |= {x: word & 0xFFFF, y: word >> 16}
            continue
        target, *operands = [o.strip() for o in rest.split(",")]
        registers[target] = operations[name](*map(value, operands))
    return [*halves(registers["$0"]).tolist(), *halves(registers["$1"]).tolist()]


BYTES = torch.arange(256, dtype=torch.uint8)
CASES = {
    "INT8": (ptx.INT8, BYTES.view(torch.int8).float()),
    "INT4_LOW": (ptx.INT4_LOW, (BYTES & 15).float() - 8),
    "INT4_HIGH": (ptx.INT4_HIGH, (BYTES >> 4).float() - 8),
    "INT3": (ptx.INT3, BYTES.float() - 4),
    "INT2": (ptx.INT2, BYTES.float() - 2),
    "E5M2": (ptx.E5M2, BYTES.view(torch.float8_e5m2).float()),
    "E4M3": (ptx.E4M3, BYTES.view(torch.float8_e4m3fn).float()),
    "E4M3_BITS": (ptx.E4M3_BITS, BYTES.view(torch.float8_e4m3fn).float() / 256),
}


@pytest.mark.parametrize("name", CASES)
def test_every_code_in_every_place_becomes_its_number(name: str) -> None:
    code, numbers = CASES[name]
    for i in range(256):
        places = [i, (i + 77) % 256, 255 - i, (i * 3) % 256]
        got = run(code, sum(b << 8 * k for k, b in enumerate(places)))
        want = [float(numbers[b]) for b in places]
        if name == "E4M3_BITS":  # NaN is read as a number there; it is never stored
            pairs = [(g, w) for g, w, b in zip(got, want, places, strict=True) if b & 127 != 127]
            got, want = [list(x) for x in zip(*pairs, strict=True)] if pairs else ([], [])
        assert torch.equal(torch.tensor(got).nan_to_num(9e9), torch.tensor(want).nan_to_num(9e9)), (i, got, want)
