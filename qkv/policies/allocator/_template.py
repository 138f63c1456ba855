"""One line for people: how the pool is cut into blocks, and which free block is handed out."""

from dataclasses import dataclass

from qkv.policies.allocator.base import ALLOCATORS
from qkv.policies.allocator.paged import Paged
from qkv.types import BlockId


@ALLOCATORS.register("template")
@dataclass
class Template(Paged):
    """Starting point: `paged`, but the lowest free blocks first, which keeps the used part of the pool compact.

    Source: where the idea comes from; Differs: what this does otherwise. The fields are the policy's settings; for
    something that is not a kind of paging derive from BlockAllocator (see contiguous.py) instead.
    """

    def allocate(self, n: int) -> list[BlockId]:
        """n blocks with reference count 1, evicting if needed. All, or NoFreeBlocks with nothing changed."""
        self._free.sort(reverse=True)  # blocks are taken from the end
        return super().allocate(n)
