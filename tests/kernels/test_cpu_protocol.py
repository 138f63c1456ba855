"""Python and C++ tell each other tensors and settings by position and by number: both keep the lists, which must be the same."""

import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from qkv_kernels import cpu
from qkv_kernels.cpu import build
from qkv_kernels.cpu.frame import ACTIVATIONS
from qkv_kernels.format import KVFormat

try:
    cpu.load()
except cpu.BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

ops = torch.ops.qkv_cpu


@pytest.mark.parametrize(
    ("what", "ours"),
    [
        ("planes", cpu.PlaneTensors._fields),
        ("formats", cpu.FormatNumbers._fields),
        ("scales", cpu.SCALES),
        ("zeros", cpu.ZEROS),
    ],
)
def test_both_sides_keep_the_same_list_in_the_same_order(what: str, ours: tuple[str, ...]) -> None:
    assert tuple(ops.protocol(what)) == ours


@pytest.mark.parametrize(("numbered", "named"), [(cpu.SCALES, "scale"), (cpu.ZEROS, "zero")])
def test_every_kind_of_a_format_has_a_number(numbered: tuple[str, ...], named: str) -> None:
    assert set(numbered) == set(get_args(get_type_hints(KVFormat)[named]))


def test_activations_have_the_numbers_of_the_frame() -> None:
    theirs = ops.protocol("activations")
    assert all(name in ACTIVATIONS for name in theirs)
    assert {name: theirs[number] for name, number in ACTIVATIONS.items()} == {n: n for n in theirs} | {"swish": "silu"}


def test_both_sides_refuse_the_same_number_of_query_heads() -> None:
    assert ops.max_queries_per_kv_head() == cpu.MAX_QUERIES_PER_KV_HEAD


def test_as_many_tensors_and_numbers_as_the_operator_takes() -> None:
    q, one = torch.zeros(1, 2, 8), torch.zeros(1)
    with pytest.raises(RuntimeError, match="16 planes and 10 format numbers"):
        cpu.attend(q, q, q, [], one, one, one, one, None, [], 1.0)


@pytest.mark.parametrize("name", ["avx2", "avx512"])
def test_an_instruction_set_is_compiled_and_chosen_for_the_same_extensions(name: str) -> None:
    """The compiler's flags in build.py, and in isa.h what the sources and what the machine must have."""
    text = (Path(cpu.__file__).parent / "isa.h").read_text()
    compiled = re.search(rf"if ([^#]*)\n#define QKV_{name.upper()}\n", text)
    chosen = re.search(rf'if \(([^;]*)\)\s*return "{name}"', text)
    assert compiled is not None
    assert chosen is not None
    flags = set(build.INSTRUCTION_SETS[name]) - (set(build.INSTRUCTION_SETS["avx2"]) if name == "avx512" else set())
    wanted = {flag.removeprefix("-m") for flag in flags}
    assert {x.lower() for x in re.findall(r"__(\w+?)__", compiled[1])} == wanted
    assert set(re.findall(r'supports\("(\w+)"\)', chosen[1])) == wanted
