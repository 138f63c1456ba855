"""The CPU kernels on formats that keep raw rows: whole blocks with a scale per channel, recent blocks, first tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.layout import Codes, Side
from qkv_kernels import cpu
from tests.kernels.formats import FORMATS, KEEPERS, Stored
from tests.kernels.paged import Paged, shape
from tests.kernels.test_reference_attend import LAYERS, mixed

try:
    cpu.load()
except cpu.BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

from tests.kernels.test_cpu_attend import DTYPES, PAIRS, check, check_any_run, isas, paged, stored_bytes

KIVI = ("int4-block-float", "int4-token_group-float-tail0-sinks0")
PROTECTED = ("int4-token-float-rotated-tail1-sinks3", "e4m3-head-tail1-sinks2")


def stored_as(names: tuple[str, str]) -> Stored:
    return Stored(*(KEEPERS.get(name) or FORMATS[name] for name in names))


@pytest.mark.parametrize(("isa", "compute"), PAIRS)
@pytest.mark.parametrize("name", KEEPERS)
def test_equals_the_reference_and_stores_its_bytes(name: str, compute: str, isa: str) -> None:
    """The bytes of pages, tails and sink tokens are compared, too."""
    dtype = DTYPES[compute]
    quantizer, layer, lengths = stored_as((name, name)), shape(H=2, G=3, Dk=64), [75, 3, 20]
    ours, reference = paged(layer, quantizer, lengths, isa, dtype=dtype), Paged(layer, quantizer, lengths, dtype=dtype)
    schedule = mixed(lengths, 33)
    check(ours, ours.run(schedule))
    reference.run(schedule)
    assert all(torch.equal(a, b) for a, b in zip(stored_bytes(ours), stored_bytes(reference), strict=True))


@pytest.mark.parametrize("names", [KIVI, PROTECTED, ("raw16", PROTECTED[1]), (KIVI[0], "int8-channel-none-sinks5")], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@isas
def test_every_kind_of_layer(layer: str, names: tuple[str, str], isa: str) -> None:
    spec = dict(LAYERS[layer])
    spec["Dv"] = 8 * (spec.get("Dv", 16) // 8)
    for dtype in (torch.float32, torch.bfloat16):
        ours = paged(shape(**spec), stored_as(names), [37, 5, 90], isa, dtype=dtype)
        check(ours, ours.run(mixed([37, 5, 90], 33)))


@isas
@pytest.mark.parametrize("D", [32, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("name", ["int4-block-float", "int3-block-float", "int2-block-float"])
def test_head_dims(name: str, D: int, isa: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ours = paged(shape(Dk=D), stored_as((name, KIVI[1])), [70, 9], isa, dtype=dtype)
        check(ours, ours.run(mixed([70, 9], 40)))


@pytest.mark.parametrize("G", range(1, 17))
def test_query_heads_per_kv_head(G: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ours = paged(shape(G=G, Dk=64), stored_as(KIVI), [70, 9], dtype=dtype)
        check(ours, ours.run(mixed([70, 9], 40)))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("names", [KIVI, PROTECTED], ids=str)
def test_every_residue_of_the_length_and_of_a_chunk_modulo_the_block(names: tuple[str, str], block_size: int) -> None:
    step = max(1, block_size // 16)
    lengths = [block_size + 1 + i for i in range(0, block_size, step)]
    ours = paged(shape(), stored_as(names), lengths, block_size=block_size)
    outs: list[list[torch.Tensor]] = [[] for _ in lengths]
    chunks = {r: 1 + r * step for r in range(len(lengths))}
    for work in (chunks, {r: n - 1 - chunks[r] for r, n in enumerate(lengths)}, dict.fromkeys(range(len(lengths)), 1)):
        for r, out in ours.step(work).items():
            outs[r].append(out)
    check(ours, [torch.cat(o) for o in outs])


@pytest.mark.parametrize("block_size", [4, 6, 8, 32, 100])
@pytest.mark.parametrize("name", ["int4-block-float", "int3-block-float", "int4-block-code-tail2", "int8-block-none-wide"])
def test_scales_of_blocks_are_folded_into_the_query(name: str, block_size: int) -> None:
    """This happens where a block holds whole vectors of keys."""
    for D, dtype in ((64, torch.bfloat16), (128, torch.float16), (192, torch.bfloat16)):
        ours = paged(shape(G=5, Dk=D, window=150), stored_as((name, name)), [180, 9], dtype=dtype, block_size=block_size)
        check(ours, ours.run(mixed([180, 9], 90)))


@given(data=st.data())
@settings(max_examples=40)
def test_any_pair_of_formats_any_schedule_any_pages(data: st.DataObject) -> None:
    """K and V need not keep the same rows raw."""
    names = [data.draw(st.sampled_from(sorted(KEEPERS))), data.draw(st.sampled_from(sorted(KEEPERS | FORMATS)))]
    k, v = data.draw(st.permutations(names))
    check_any_run(data, stored_as((k, v)))


@isas
@pytest.mark.parametrize("name", ["int4-block-float", "int3-token_group-float-tail2-sinks4", "int4-token-float-rotated-sinks4"])
def test_deterministic_results_do_not_depend_on_the_schedule(name: str, isa: str) -> None:
    lengths, layer = [70, 9, 540], shape(**LAYERS["gqa3"])
    for dtype in (torch.float32, torch.bfloat16):
        outs = []
        for seed, schedule in enumerate((mixed(lengths, 512), [{r: n} for r, n in enumerate(lengths)], mixed(lengths, 13))):
            outs.append(
                paged(layer, stored_as((name, name)), lengths, isa, deterministic=True, dtype=dtype, block_seed=seed).run(
                    schedule
                )
            )
        assert all(torch.equal(a, b) for other in outs[1:] for a, b in zip(outs[0], other, strict=True))


def test_a_custom_encode_runs_in_python_on_whole_blocks_too() -> None:
    class Halved(Stored):
        encode_rule = "custom"  # type: ignore[assignment]

        def encode(self, x: torch.Tensor, side: Side, layer: int, range_index: int = 0) -> Codes:
            return super().encode(x / 2 if side == "k" else x, side, layer, range_index)

    for name in ("int4-block-float", "int8-token-none-tail3-sinks0", "int4-token-float-rotated-sinks4"):
        ours, plain = (paged(shape(), kind(KEEPERS[name], KEEPERS[name]), [45]) for kind in (Halved, Stored))
        check(ours, ours.run([{0: 30}, {0: 15}]))
        plain.run([{0: 45}])
        block = ours.tables[0][0]
        halved, whole = (p.store.planes(0)[0].k.scale for p in (ours, plain))
        assert halved is not None
        assert whole is not None
        torch.testing.assert_close(halved[block] * 2, whole[block])


def test_formats_that_keep_raw_rows_need_slots_for_them() -> None:
    ours = paged(shape(), stored_as(KIVI), [8])
    heads = ours.backend._ranges[0][0]  # type: ignore[attr-defined]
    q, k, v = ours.data[0]
    one = torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="tail_slots"):
        cpu.attend(q, k, v, heads.tensors, one, torch.tensor([0, 8]).int(), *(torch.arange(8),) * 2, None, heads.formats, 0.25)
