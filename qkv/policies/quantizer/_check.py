"""Whether a quantizer's encode and decode are what its formats say, tried on a few rows before an engine serves anything.

Takes: a bound quantizer. Gives: nothing, or an error that names quantizer, layer and side. Does not know about: attention.
"""

from collections.abc import Sequence

import torch

from qkv.errors import ConfigError
from qkv.layout import SIDES, Codes, KVFormat, LayerShape, Side
from qkv.policies.quantizer._affine import AffineQuantizer
from qkv.policies.quantizer.base import Quantizer
from qkv_kernels.reference import codec

ROWS = 4
ROUNDING = 1e-3  # of the largest value: what two orders of the same arithmetic may differ by


def check_codes(quantizer: Quantizer, layers: Sequence[LayerShape], block_size: int, device: torch.device) -> None:
    """Encodes and decodes a few seeded rows of every format of every layer, if encode or decode is the quantizer's own.

    Raises ConfigError where codes do not have the shapes and dtypes that the pool has for them, where decode does not give back
    rows, and where a format is affine but decode gives other values than kernels, which read by format, will.
    """
    own = type(quantizer)
    if own.encode is AffineQuantizer.encode and own.decode is AffineQuantizer.decode:
        return
    generator = torch.Generator().manual_seed(0)
    for i, layer in enumerate(layers):
        for range_index, heads in enumerate(quantizer.formats(i)):
            for side in SIDES:
                lead = (1, block_size) if heads.of(side).unit == "block" else (ROWS,)
                x = torch.randn(*lead, len(heads.heads), layer.dim(side), generator=generator)
                try:
                    _check(quantizer, heads.of(side), x.to(device), side, i, range_index)
                except ConfigError as error:
                    where = f"quantizer {quantizer.name}, layer {layer.index}, {side.upper()}"
                    raise ConfigError(f"{where}: {error}") from None


def _check(quantizer: Quantizer, fmt: KVFormat, x: torch.Tensor, side: Side, layer: int, range_index: int) -> None:
    codes = quantizer.encode(x, side, layer, range_index)
    _check_shapes(codes, fmt, x)
    values = quantizer.decode(codes, side, layer, torch.float32, range_index)
    if values.shape != x.shape or values.dtype != torch.float32:
        raise ConfigError(
            f"decode gives {values.dtype} of shape {list(values.shape)} for {list(x.shape)} rows; it must give as many values as "
            "were encoded, in the dtype that it is asked for"
        )
    if fmt.reading == "quantizer":
        return
    read = codec.decode(*codes, fmt, torch.float32, *quantizer.statics(layer)[range_index].of(side))
    difference, largest = float((values - read).abs().max()), float(read.abs().max())
    if not difference <= ROUNDING * largest:
        raise ConfigError(
            f"decode differs by up to {difference:.3g} from what the format says, where the largest value is {largest:.3g}. "
            f"Backends read a format whose reading is '{fmt.reading}' by themselves and never call decode: correct decode, or "
            "say reading='quantizer' in the format, which the reference backend runs"
        )


def _check_shapes(codes: Codes, fmt: KVFormat, x: torch.Tensor) -> None:
    *lead, H, D = x.shape
    shape = fmt.scale_shape(lead[0], H, lead[1], D) if fmt.unit == "block" else fmt.scale_shape(1, H, lead[0], D)
    if shape is not None and fmt.scale != "block_channel":
        shape = (*lead, H, *shape[3:])
    wanted = {
        "data": ((*lead, H, fmt.packed_dim(D)), fmt.storage),
        "scale": (shape, fmt.scale_dtype),
        "zero": (shape if fmt.zero != "none" else None, fmt.scale_dtype),
    }
    for name, (size, dtype) in wanted.items():
        tensor: torch.Tensor | None = getattr(codes, name)
        found = "nothing" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
        needed = "nothing" if size is None else f"{dtype} of shape {list(size)}"
        if found != needed:
            raise ConfigError(f"encode gives {found} for {name}, where its format says {needed}")
