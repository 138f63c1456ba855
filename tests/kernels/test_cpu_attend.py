"""The CPU kernels give the reference's result on the same bytes, for every format, instruction set and shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.attention.cpu import CpuBackend
from qkv.layout import Codes, HeadFormat, LayerShape, Side
from qkv.policies.quantizer.none import NoneQuantizer
from qkv_kernels import cpu
from qkv_kernels.format import KVFormat
from tests.kernels.formats import FORMATS, Stored
from tests.kernels.paged import Paged, any_shape, bound, shape
from tests.kernels.test_reference_attend import LAYERS, mixed

try:
    cpu.load()
except cpu.BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

ALL = ("portable", "avx2", "avx512")
ISAS = ALL[: ALL.index(torch.ops.qkv_cpu.best_isa()) + 1]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# the best instruction set has paths of its own per dtype; the others compute in float32 whatever the dtype
PAIRS = [(ISAS[-1], d) for d in DTYPES] + [(isa, d) for isa, d in zip(ISAS[:-1], ("float32", "bfloat16"), strict=False)]
isas = pytest.mark.parametrize("isa", ISAS)


def paged(layer: LayerShape, quantizer: object, lengths: list[int], isa: str = ISAS[-1], **more: object) -> Paged:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKV_CPU_ISA", isa)
        return Paged(layer, quantizer, lengths, backend=CpuBackend(), **more)  # type: ignore[arg-type]


def check(paged: Paged, outs: list[torch.Tensor]) -> None:
    """Law 6: at most twice the error that torch makes in the same dtype on the same values, plus a rounding floor."""
    dtype = paged.dtype
    for r, out in enumerate(outs):
        want, same = (paged.expected(r, computed)[: len(out)].double() for computed in (torch.float64, dtype))
        torch_error = (same - want).abs().max()
        cap = paged.layer.softcap or 0.0  # tanh has an absolute error of one eps of float32, times the cap
        floor = (8 + 2 * cap) * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps * (dtype != torch.float32)
        error = (out.double() - want).abs().max()
        assert error <= 2 * torch_error + floor * want.abs().max().clamp(min=1), f"{error:.2e} against {torch_error:.2e} of torch"


def stored_bytes(paged: Paged) -> list[torch.Tensor]:
    """The bytes of pages, tails and sink tokens."""
    p = paged.store.planes(0)[0]
    return [t.view(torch.uint8) for t in (*p.tensors, *p.k.raw, *p.v.raw)]


@pytest.mark.parametrize(("isa", "compute"), PAIRS)
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_reference_and_stores_its_bytes(name: str, compute: str, isa: str) -> None:
    dtype = DTYPES[compute]
    quantizer, layer, lengths = Stored(FORMATS[name], FORMATS[name]), shape(H=2, G=3, Dk=64), [75, 3, 20]
    ours, reference = paged(layer, quantizer, lengths, isa, dtype=dtype), Paged(layer, quantizer, lengths, dtype=dtype)
    schedule = mixed(lengths, 33)
    check(ours, ours.run(schedule))
    reference.run(schedule)
    assert all(torch.equal(a, b) for a, b in zip(stored_bytes(ours), stored_bytes(reference), strict=True))


@pytest.mark.parametrize("names", [("int8-channel-none", "int8-token-none"), ("raw16", "int4-token_group-float")], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@isas
def test_every_kind_of_layer(layer: str, names: tuple[str, str], isa: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        spec = dict(LAYERS[layer])
        if "group" in names[1]:
            spec["Dv"] = 8 * (spec.get("Dv", 16) // 8)
        ours = paged(shape(**spec), Stored(FORMATS[names[0]], FORMATS[names[1]]), [37, 5, 90], isa, dtype=dtype)
        check(ours, ours.run(mixed([37, 5, 90], 33)))


@isas
@pytest.mark.parametrize("D", [32, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("name", ["raw16", "e4m3-head", "int8-token-none", "int4-token-code", "int3-token-float-rotated"])
def test_head_dims(name: str, D: int, isa: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ours = paged(shape(Dk=D), Stored(FORMATS[name], FORMATS[name]), [70, 9], isa, dtype=dtype)
        check(ours, ours.run(mixed([70, 9], 40)))


@isas
@pytest.mark.parametrize("zero", ["none", "code", "float"])
@pytest.mark.parametrize(
    ("bits", "group", "D"), [(4, 32, 64), (4, 32, 256), (3, 64, 128), (2, 32, 128), (2, 64, 64), (4, 64, 192)]
)
def test_groups_of_channels(bits: int, group: int, D: int, zero: str, isa: str) -> None:
    """Decoding folds the scales of groups of whole words into the weights; other groups are dequantized."""
    fmt = KVFormat(bits, torch.uint8, "token_group", zero=zero, group=group)  # type: ignore[arg-type]
    for dtype, block_size in ((torch.bfloat16, 8), (torch.float16, 100), (torch.float32, 16)):
        layer = shape(G=3, Dk=D, window=70, softcap=9.0)
        ours = paged(layer, Stored(fmt, fmt), [90, 9], isa, dtype=dtype, block_size=block_size)
        check(ours, ours.run(mixed([90, 9], 40)))


@pytest.mark.parametrize("G", range(1, 17))
def test_query_heads_per_kv_head(G: int) -> None:
    for name in ("raw16", "int8-token-none"):
        ours = paged(shape(G=G, Dk=32), Stored(FORMATS[name], FORMATS[name]), [70, 9], dtype=torch.bfloat16)
        check(ours, ours.run(mixed([70, 9], 40)))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_every_residue_of_the_length_modulo_the_block(block_size: int) -> None:
    lengths = [block_size + 1 + i for i in range(0, block_size, max(1, block_size // 16))]
    ours = paged(shape(), "int8_token", lengths, block_size=block_size)
    outs: list[list[torch.Tensor]] = [[] for _ in lengths]
    for work in ({r: n - 1 for r, n in enumerate(lengths)}, dict.fromkeys(range(len(lengths)), 1)):
        for r, out in ours.step(work).items():
            outs[r].append(out)
    check(ours, [torch.cat(o) for o in outs])


def check_any_run(data: st.DataObject, quantizer: Stored) -> None:
    """Draws a layer, a schedule, pages and an instruction set, and compares with the reference."""
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    ours = paged(
        data.draw(any_shape(8, 20, 100)),
        quantizer,
        lengths,
        data.draw(st.sampled_from(ISAS)),
        block_size=data.draw(st.sampled_from([1, 3, 8, 16, 100])),
        dtype=data.draw(st.sampled_from(list(DTYPES.values()))),
        deterministic=data.draw(st.booleans()),
        block_seed=data.draw(st.integers(0, 99)),
    )
    check(ours, ours.run(mixed(lengths, data.draw(st.integers(1, 80)))))


@given(data=st.data())
@settings(max_examples=50)
def test_any_layer_any_schedule_any_pages(data: st.DataObject) -> None:
    names = st.sampled_from(sorted(FORMATS))
    check_any_run(data, Stored(FORMATS[data.draw(names)], FORMATS[data.draw(names)]))


@pytest.mark.parametrize("name", ["raw16", "int8-channel-float"])
@isas
def test_long_contexts_are_split_into_chunks(name: str, isa: str) -> None:
    for window in (None, 600):
        ours = paged(shape(Dk=32, window=window), Stored(FORMATS[name], FORMATS[name]), [1100, 600], isa, dtype=torch.bfloat16)
        ours.run([{0: 1095, 1: 595}])
        for r, out in enumerate(ours.run([{0: 5, 1: 5}])):
            torch.testing.assert_close(out.double(), ours.expected(r)[-5:], rtol=2e-2, atol=1e-2)


def test_requests_may_share_pages() -> None:
    """The prefix is computed once, and the second request's table begins with the first one's blocks."""
    ours = paged(shape(), "int8_token", [60, 50], block_size=16)
    ours.tables[1][:2] = ours.tables[0][:2]
    ours.data[1] = tuple(torch.cat([a[:32], b[32:]]) for a, b in zip(ours.data[0], ours.data[1], strict=True))
    first = ours.run([{0: 59}])
    ours.done[1] = 32
    second = ours.run([{0: 1, 1: 18}])
    for r, out in ((0, torch.cat([first[0], second[0]])), (1, second[1])):
        torch.testing.assert_close(out.double(), ours.expected(r)[60 - len(out) if r == 0 else 32 :], rtol=1e-5, atol=1e-5)


def test_a_window_never_reads_blocks_behind_it() -> None:
    """Blocks behind the window may belong to another request by then."""
    ours = paged(shape(window=10), "none", [60])
    ours.step({0: 59})
    ours.store.poison_blocks(ours.tables[0][:6])  # positions 0 to 47; the last token sees 50 to 59
    torch.testing.assert_close(ours.step({0: 1})[0].double(), ours.expected(0)[59:], rtol=1e-5, atol=1e-5)


@isas
@pytest.mark.parametrize("name", ["raw16", "e4m3-head", "int8-channel-none", "int4-token_group-code"])
def test_deterministic_results_do_not_depend_on_the_schedule(name: str, isa: str) -> None:
    lengths, layer = [70, 9, 140], shape(**LAYERS["gqa3"])
    quantizer = Stored(FORMATS[name], FORMATS[name])
    for dtype in (torch.float32, torch.bfloat16):
        more = {"deterministic": True, "dtype": dtype}
        base = paged(layer, quantizer, lengths, isa, **more).run(mixed(lengths, 512))
        alone = [{r: n} for r, n in enumerate(lengths)]
        token_by_token = [{r: 1 for r, n in enumerate(lengths) if n > i} for i in range(max(lengths))]
        for block_size in (8, 32):
            for schedule in (alone, token_by_token, mixed(lengths, 13)):
                pages = {"block_size": block_size, "block_seed": block_size, "free_blocks": 40}
                other = paged(layer, quantizer, lengths, isa, **pages, **more)
                for got, want in zip(other.run(schedule), base, strict=True):
                    assert torch.equal(got, want)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_run_repeats_bit_for_bit_whatever_the_number_of_threads(threads: int) -> None:
    def run() -> torch.Tensor:
        ours = paged(shape(H=3, Dk=32), "int8_token", [700, 90], dtype=torch.bfloat16)
        return torch.cat(ours.run([{0: 600, 1: 50}, {0: 1, 1: 1}, {0: 99, 1: 39}]))

    before = torch.get_num_threads()
    want = run()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(run(), want)
        assert torch.equal(run(), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_kernels_use_torch_s_threads(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.ops.qkv_cpu.threads() == threads  # built without OpenMP it is one, and nothing else tells
    finally:
        torch.set_num_threads(before)


def test_head_ranges_of_different_formats_share_a_layer() -> None:
    class Mixed(NoneQuantizer):
        def formats(self, layer: int) -> list[HeadFormat]:
            return [
                HeadFormat(range(1), FORMATS["half"], FORMATS["raw32"]),
                HeadFormat(range(1, 3), FORMATS["raw32"], FORMATS["int8-token-none"]),
            ]

    ours = paged(LayerShape(index=0, H=3, Hq=6, Dk=16, Dv=16, scaling=0.25, sink_logits=True), Mixed(), [45])
    check(ours, ours.run([{0: 30}, {0: 15}]))


def test_a_custom_encode_runs_in_python_and_is_read_by_the_kernels() -> None:
    class Halved(Stored):
        encode_rule = "custom"  # type: ignore[assignment]

        def encode(self, x: torch.Tensor, side: Side, layer: int, range_index: int = 0) -> Codes:
            return super().encode(x / 2 if side == "k" else x, side, layer, range_index)

    fmt = FORMATS["int8-token-none"]
    ours, plain = (paged(shape(), kind(fmt, fmt), [45]) for kind in (Halved, Stored))
    check(ours, ours.run([{0: 30}, {0: 15}]))
    plain.run([{0: 45}])
    block = ours.tables[0][0]
    halved, whole = (p.store.planes(0)[0].k.scale for p in (ours, plain))
    assert halved is not None
    assert whole is not None
    torch.testing.assert_close(halved[block] * 2, whole[block])


@pytest.mark.parametrize("slots", [(-1, -1), (0, 5)], ids=["padding", "null block"])
def test_a_call_of_nothing_but_padding_returns_zeros_and_writes_nothing(slots: tuple[int, int]) -> None:
    from qkv.layout import AttentionMetadata

    ours = paged(shape(), "int8_token", [8])
    before = [b.clone() for b in stored_bytes(ours)]
    none, rows = torch.zeros(0, dtype=torch.int32), torch.full((2, 4, 16), torch.nan)
    start = torch.zeros(1, dtype=torch.int32)
    meta = AttentionMetadata(none.view(0, 1), none, start, torch.tensor(slots), torch.zeros(2).long(), [], [0], 0, 8)
    assert not ours.backend.attend(0, rows, rows[:, :2], rows[:, :2], meta).any()
    assert all(torch.equal(a, b) for a, b in zip(stored_bytes(ours), before, strict=True))


def test_queries_need_not_be_contiguous() -> None:
    ours = paged(shape(), "int8_token", [40])
    want = ours.run([{0: 40}])[0]
    other = paged(shape(), "int8_token", [40])
    other.data = [tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in d) for d in other.data]
    attend = other.backend.attend

    def transposed(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: object) -> torch.Tensor:
        return attend(layer, *(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)), *more)  # type: ignore[arg-type]

    other.backend.attend = transposed  # type: ignore[method-assign,assignment]
    assert torch.equal(other.run([{0: 40}])[0], want)


def test_the_operator_compiles_without_a_graph_break() -> None:
    """Writes to the pool survive functionalization, and the fake implementation knows the output."""
    quantizer = bound("int8_token", [shape()])
    assert quantizer is not None
    results = []
    for compiled in (False, True):
        ours = paged(shape(), "int8_token", [20])
        stored = ours.backend._ranges[0][0]  # type: ignore[attr-defined]
        q, k, v = ours.data[0]
        table = torch.tensor([ours.tables[0]], dtype=torch.int32)
        slots = torch.tensor([ours.tables[0][p // 8] * 8 + p % 8 for p in range(20)])

        def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stored=stored, table=table, slots=slots) -> torch.Tensor:
            start = torch.tensor([0, 20], dtype=torch.int32)
            return cpu.attend(q, k, v, stored.tensors, table, start, slots, torch.arange(20), None, stored.formats, 0.25) * 2

        run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
        results.append((run(q, k, v), [b.clone() for b in stored_bytes(ours)]))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
