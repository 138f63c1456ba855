"""Kernels compile for GPUs that are not here, to machine code as it should be: no spills, wide loads, matrix units."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu.cards import GPUS
from experiments.studies import compile_kernels
from qkv.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def compiled(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Kernel rows of a run in a process of its own: this one has Triton's interpreter in the compiler's place."""
    pytest.importorskip("triton", reason="triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, "-m", "experiments.run", "experiment=compile_kernels", f"hydra.run.dir={folder}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [row["kernel"] for row in json.loads((folder / "record.json").read_text())["rows"]]


def test_decode_of_quantized_pages_is_wide_and_stays_in_registers(tmp_path: Path) -> None:
    rows = compiled(tmp_path, "ops=[decode]", "formats=[int8,int4]", "archs=[sm_90]")
    assert [(r["op"], r["format"]) for r in rows] == [(op, f) for f in ("int8", "int4") for op in ("decode", "reduce")]
    for row in rows[::2]:
        assert (row["spill_bytes"], row["load_bytes_min"], row["wrong"]) == (0, 16, "")
        assert sum(row["mma_instructions"].values()) > 0
        assert row["conversions_per_element"] < 0.1  # bytes are placed, not converted
        assert row["headroom"] > 1  # reading takes longer than issuing


JUDGED = """
import dataclasses, json, sys
from collections import Counter
from experiments.gpu import machine_code
from experiments.studies import compile_kernels as check

def wrong(launch, **changes):
    code = machine_code.read(launch.compile(check._target("sm_90")), "sm_90")
    return check._row("decode", "int8", "sm_90", 64, 16, launch, dataclasses.replace(code, **changes))["wrong"]

good = check.CompileKernels()._launches("decode", "int8", "sm_90", 64, 16)[0]
few_registers = good._replace(options=good.options | {"maxnreg": 48})
K = good.constants["K"]
rows_68_bytes_apart = dataclasses.replace(K, codes=(*K.codes[:2], 68))
narrow = good._replace(constants=good.constants | {"K": rows_68_bytes_apart})
print(json.dumps([wrong(good), wrong(few_registers), wrong(narrow), wrong(good, instructions=[])]))
"""


def test_a_spill_a_narrow_load_and_a_missing_matrix_instruction_are_found(tmp_path: Path) -> None:
    """The kernels are compiled to be bad, with a quarter of the registers and over rows that are not aligned."""
    pytest.importorskip("triton", reason="triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", JUDGED], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    good, spill, narrow, scalar = json.loads(done.stdout)
    assert good == ""
    assert spill.startswith("spills ")
    assert narrow == "loads codes 4 bytes at a time, not 8"
    assert scalar == "no matrix instruction"


@pytest.mark.slow
@pytest.mark.parametrize("arch", GPUS)
def test_every_op_on_every_architecture(tmp_path: Path, arch: str) -> None:
    rows = compiled(tmp_path, f"archs=[{arch}]", "formats=[all]")
    assert {r["op"] for r in rows} == {"append", "decode", "reduce", "extend"}
    assert {r["format"] for r in rows} == set(compile_kernels.COMPILED)


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 80, 256])
def test_other_head_dims(tmp_path: Path, D: int) -> None:
    formats = "[bf16,fp8_e4m3,int8,int4_token]"
    compiled(
        tmp_path, "archs=[sm_80,sm_90]", f"head_dims=[{D}]", f"formats={formats}", "block_sizes=[8,64]", "ops=[decode,extend]"
    )


def test_settings_are_checked() -> None:
    for settings, message in (
        ({"archs": ["sm_91"]}, "archs: unknown 'sm_91'; did you mean 'sm_90'"),
        ({"ops": ["decod"]}, "ops: unknown 'decod'; did you mean 'decode'"),
        ({"formats": ["int9"]}, "formats: unknown 'int9'"),
        ({"group": 17}, "group"),
        ({"dtype": "float64"}, "dtype"),
    ):
        with pytest.raises(ConfigError, match=message):
            compile_kernels.CompileKernels(**settings)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        compile_kernels.CompileKernels().run(None)  # type: ignore[arg-type]


def test_narrowest_load_is_that_of_codes_not_of_scales() -> None:
    def loop(*names: str) -> list[compile_kernels.machine_code.Instruction]:
        return [compile_kernels.machine_code.Instruction(i, name, "") for i, name in enumerate(names)]

    fast = loop("LDGSTS.E.BYPASS.128", "LDGSTS.E.BYPASS.128", "LDG.E.U16", "LDG.E", "FADD")
    assert compile_kernels._narrowest(fast, 2 * 16 * 32, threads=32) == 16
    assert compile_kernels._narrowest(fast, 2 * 16 * 32 + 1, threads=32) == 4
    assert compile_kernels._narrowest(loop("FADD"), 16, threads=32) == 0
