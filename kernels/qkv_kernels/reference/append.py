"""Write encoded rows and blocks into pool planes. The definition that kernels are compared with.

Does not know about: formats, requests, attention.
"""

import torch


def append(plane: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """plane[block, :, offset] = rows[t] for every row with slots[t] = block * B + offset. In place.

    plane [N, H, B, ...] of any strides, rows [T, H, ...] of the same dtype, slots [T] int64. Slot -1 is padding and
    writes nothing; nor does any slot of block 0, the null block, whose content must stay zero.
    """
    B = plane.shape[2]
    if plane.dtype.itemsize == 1:  # fp8 has no indexed writes on every device; bytes do
        plane, rows = plane.view(torch.uint8), rows.view(torch.uint8)
    real = slots >= B
    slots, rows = slots[real], rows[real]
    plane[slots // B, :, slots % B] = rows


def append_blocks(plane: torch.Tensor, blocks: torch.Tensor, ids: torch.Tensor) -> None:
    """plane[ids[n]] = blocks[n] for whole blocks. In place.

    plane [N, H, ...], blocks [n, H, ...] of the same dtype, ids [n] int64.
    """
    if plane.dtype.itemsize == 1:
        plane, blocks = plane.view(torch.uint8), blocks.contiguous().view(torch.uint8)
    plane[ids] = blocks
