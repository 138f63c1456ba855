"""Replace this by one line for readers: how the pool is cut into blocks, and which free block is handed out."""

from dataclasses import dataclass

from qkv.policies.allocator.base import ALLOCATORS
from qkv.policies.allocator.paged import Paged
from qkv.types import BlockId


@ALLOCATORS.register("template")
@dataclass
class Template(Paged):
    """A starting point: like `paged`, but it hands out the lowest free blocks first, which keeps the used blocks together.

    Source: where the idea comes from; Differs: what this policy does otherwise. The dataclass fields are the policy's settings.
    A policy that is not a kind of paging derives from BlockAllocator instead (see contiguous.py).
    """

    def allocate(self, n: int) -> list[BlockId]:
        """Return n blocks with reference count 1; evict for them if needed. NoFreeBlocks, with nothing changed, if there are
        not n."""
        self._free.sort(reverse=True)  # blocks are taken from the end
        return super().allocate(n)
