"""The frame's operators against their definitions in float64, on every instruction set this machine runs."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import gelu, silu

from qkv_kernels.cpu.build import BuildError
from qkv_kernels.cpu.frame import ACTIVATIONS, load_frame

try:
    load_frame()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

ALL = ("portable", "avx2", "avx512")
ISAS = ALL[: 1 + ALL.index(torch.ops.qkv_cpu.best_isa())]
DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 2, 5, 6, 7, 13, 97, 200)
ops = torch.ops.qkv_cpu

pytestmark = [pytest.mark.cpu, pytest.mark.parametrize("isa", ISAS), pytest.mark.parametrize("dtype", DTYPES)]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor, terms: int = 1) -> None:
    """Within the rounding of the result's dtype, and of `terms` float32 additions."""
    allowed = torch.finfo(got.dtype).eps * expected.abs() + 4e-7 * terms**0.5 * (1 + expected.abs().max())
    assert ((got.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("K", [1, 16, 33, 70, 576])
def test_linear(K: int, dtype: torch.dtype, isa: str) -> None:
    weights = [draw(n, K, dtype=dtype) for n in (1, 6, 147)]
    biases = [draw(len(w), dtype=dtype, seed=1) for w in weights]
    for T in ROWS:
        x = draw(T, K, dtype=dtype, seed=2)
        for given, alike in itertools.product((biases, []), (False, True)):
            expected = [x.double() @ w.double().T for w in weights]
            if given:
                expected = [e + b.double() for e, b in zip(expected, given, strict=True)]
            close(ops.linear(x, weights, given, alike, isa), torch.cat(expected, 1), K)


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "gelu"])
def test_gated_linear(name: str, dtype: torch.dtype, isa: str) -> None:
    K, N = 70, 133
    gate, up = draw(N, K, dtype=dtype), draw(N, K, dtype=dtype, seed=1)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": silu,
        "gelu": gelu,
        "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
    }
    function = functions[name]
    for T in ROWS:
        x = draw(T, K, dtype=dtype, seed=2)
        expected = function(x.double() @ gate.double().T) * (x.double() @ up.double().T)
        for alike in (False, True):
            close(ops.gated_linear(x, gate, up, ACTIVATIONS[name], alike, isa), expected, K)


def test_activations_of_extreme_values(dtype: torch.dtype, isa: str) -> None:
    x = torch.tensor([[0.0], [1e4], [-1e4], [90.0], [-90.0], [torch.nan]]).to(dtype)
    one = torch.ones(1, 1, dtype=dtype)
    for name in ("silu", "gelu_pytorch_tanh", "gelu"):
        got = ops.gated_linear(
            torch.cat([x, torch.ones_like(x)], 1),
            torch.cat([one, one * 0], 1),
            torch.cat([one * 0, one], 1),
            ACTIVATIONS[name],
            True,
            isa,
        )
        close(got[:5], torch.tensor([[0.0], [1e4], [0.0], [90.0], [0.0]], dtype=dtype).double())
        assert got[5].isnan()


@pytest.mark.parametrize("K", [3, 64, 100])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(K: int, offset: float, dtype: torch.dtype, isa: str) -> None:
    weight = draw(K, dtype=dtype)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)

    for T in (1, 30):
        x, residual = draw(T, K, dtype=dtype, seed=1), draw(T, K, dtype=dtype, seed=2)
        close(ops.rms_norm(x, weight, 1e-5, offset, isa), norm(x.double()), 4)
        total = residual.double() + 0.5 * x.double()
        got = ops.add_rms_norm(residual, x, 0.5, weight, 1e-5, offset, isa)
        close(residual, total)
        close(got, norm(residual.double()), 4)


@pytest.mark.parametrize(("D", "turned"), [(16, 16), (80, 80), (30, 20), (64, 16)])
@pytest.mark.parametrize("normed", [False, True])
def test_norm_rope(D: int, turned: int, normed: bool, dtype: torch.dtype, isa: str) -> None:
    T, Hq, H = 9, 4, 2
    qkv = draw(T, (Hq + 2 * H) * D, dtype=dtype)
    cos, sin = draw(T, turned, dtype=dtype, seed=1), draw(T, turned, dtype=dtype, seed=2)
    weights = [draw(D, dtype=dtype, seed=3), draw(D, dtype=dtype, seed=4)] if normed else [None, None]
    heads = qkv.double().view(T, -1, D)
    parts = []
    for x, w in zip(heads[:, : Hq + H].split((Hq, H), 1), weights, strict=True):
        if w is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (w.double() + 1.0)
        a, rest = x[..., :turned], x[..., turned:]
        half = torch.cat([-a[..., turned // 2 :], a[..., : turned // 2]], -1)
        parts.append(torch.cat([a * cos.double()[:, None] + half * sin.double()[:, None], rest], -1))
    expected = torch.cat([*parts, heads[:, Hq + H :]], 1).view(T, -1)
    ops.norm_rope(qkv, cos, sin, Hq, H, *weights, 1e-6, 1.0, isa)
    close(qkv, expected, 4)


def test_a_row_does_not_depend_on_its_batch_to_the_bit_where_asked(dtype: torch.dtype, isa: str) -> None:
    K, threads = 72, torch.get_num_threads()
    w, up, weight = draw(45, K, dtype=dtype), draw(45, K, dtype=dtype, seed=1), draw(K, dtype=dtype)
    x = draw(200, K, dtype=dtype, seed=2)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            ops.linear(x, [w, up], [], True, isa),
            ops.gated_linear(x, w, up, 0, True, isa),
            ops.rms_norm(x, weight, 1e-5, 0.0, isa),
        ]

    whole = run(x)
    try:
        for n, at in itertools.product((1, 4, 17, 40), (0, 3, 150)):
            torch.set_num_threads(1 + n % 2)
            for part, all_rows in zip(run(x[at : at + n].clone()), whole, strict=True):
                assert torch.equal(part, all_rows[at : at + n])
    finally:
        torch.set_num_threads(threads)


def test_no_rows_are_no_error(dtype: torch.dtype, isa: str) -> None:
    x, w = torch.empty(0, 8, dtype=dtype), draw(5, 8, dtype=dtype)
    assert ops.linear(x, [w], [], True, isa).shape == (0, 5)
    assert ops.gated_linear(x, w, w, 0, True, isa).shape == (0, 5)
    assert ops.rms_norm(x, w[0], 1e-5, 0.0, isa).shape == (0, 8)


def test_wrong_shapes_are_refused(dtype: torch.dtype, isa: str) -> None:
    x, w = draw(3, 8, dtype=dtype), draw(5, 8, dtype=dtype)
    for call, message in (
        (lambda: ops.linear(x, [w[:, :4].clone()], [], True, isa), "takes 4 inputs, x has 8"),
        (lambda: ops.linear(x, [w], [w[0]], True, isa), "bias has 8 elements"),
        (lambda: ops.linear(x.T, [w], [], True, isa), "x must be a contiguous CPU tensor"),
        (lambda: ops.linear(x, [w.double()], [], True, isa), "is Double but x is"),
        (lambda: ops.gated_linear(x, w, w[:3], 0, True, isa), "as many outputs"),
        (lambda: ops.gated_linear(x, w, w, 9, True, isa), "activation 9 is not known"),
        (lambda: ops.rms_norm(x, w[0, :5].clone(), 1e-5, 0.0, isa), "has 5 elements, x has rows of 8"),
        (lambda: ops.linear(x, [w], [], True, "mmx"), "no kernels for instruction set 'mmx'"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_fakes_have_the_shapes_of_the_operators(dtype: torch.dtype, isa: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, w, n = torch.empty(3, 8, dtype=dtype), torch.empty(5, 8, dtype=dtype), torch.empty(8, dtype=dtype)
        assert ops.linear(x, [w, w], [], True, isa).shape == (3, 10)
        assert ops.gated_linear(x, w, w, 0, True, isa).shape == (3, 5)
        assert ops.rms_norm(x, n, 1e-5, 0.0, isa).shape == (3, 8)
        assert ops.add_rms_norm(x.clone(), x, 1.0, n, 1e-5, 0.0, isa).shape == (3, 8)
