"""The orthonormal block-diagonal Hadamard transform of rotated formats.

Only additions, subtractions and one product per element, in a fixed order: a row's result does not depend on the other
rows, to the bit. Does not know about: formats, codes.
"""

import torch


def block_size(D: int) -> int:
    """Channels rotated together: the largest power of two dividing D."""
    return D & -D


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] -> every block of `block_size(D)` channels times the Sylvester matrix / sqrt(block). Its own inverse.

    Fast Walsh-Hadamard transform: log2(block) passes over the row. Keeps the dtype, so pass float32 or wider.
    """
    n = block_size(x.shape[-1])
    step = 1
    while step < n:
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        step *= 2
    return x * n**-0.5
