"""Every request reserves one contiguous region for the longest allowed length up front: the baseline that paging beats."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from qkv.errors import ConfigError
from qkv.policies.allocator.base import ALLOCATORS, BlockAllocator, NoFreeBlocks
from qkv.policies.evictor.base import Evictor
from qkv.types import BlockHash, BlockId
from qkv.validate import require


@ALLOCATORS.register("contiguous")
@dataclass
class Contiguous(BlockAllocator):
    """Regions of max_len tokens (None: the engine's max_model_len). Nothing is shared, and nothing is cached.

    Source: what engines before PagedAttention did (FasterTransformer, static caches). block_size only sets the size of the
    pages that kernels walk; the pages of a region are consecutive.
    """

    grows: ClassVar[bool] = False
    block_size: int = 16
    max_len: int | None = None
    _region: int = field(default=0, init=False, repr=False)  # blocks per region
    _regions: list[BlockId] = field(default_factory=list, init=False, repr=False)  # first blocks of free regions

    def __post_init__(self) -> None:
        power_of_two = self.block_size & (self.block_size - 1) == 0
        require(4 <= self.block_size <= 256 and power_of_two, "block_size", self.block_size, "4, 8, 16, 32, 64, 128 or 256")
        require(self.max_len is None or self.max_len >= 1, "max_len", self.max_len, "at least 1, or null")

    def bind(self, num_blocks: int, evictor: Evictor, max_blocks_per_request: int) -> None:
        super().bind(num_blocks, evictor, max_blocks_per_request)
        self._region = -(-self.max_len // self.block_size) if self.max_len else max_blocks_per_request
        count = (num_blocks - 1) // self._region
        if not count:
            raise ConfigError(
                f"allocator.contiguous: a region of {self._region} blocks ({self._region * self.block_size} tokens) does not "
                f"fit a pool of {num_blocks - 1} usable blocks; lower allocator.max_len or scheduler.max_model_len, or enlarge "
                "the pool"
            )
        self._reserved = num_blocks - count * self._region
        self._regions = [1 + i * self._region for i in reversed(range(count))]

    def blocks_for(self, num_tokens: int) -> int:
        return self._region

    def max_tokens(self) -> int:
        return self._region * self.block_size

    @property
    def num_free(self) -> int:
        return len(self._regions) * self._region

    @property
    def num_cached(self) -> int:
        return 0

    @property
    def num_reserved(self) -> int:
        return self._reserved

    def allocate(self, n: int) -> list[BlockId]:
        if n == 0:
            return []
        if n != self._region or not self._regions:
            raise NoFreeBlocks(f"{n} blocks were asked for; {len(self._regions)} regions of {self._region} blocks are free")
        first = self._regions.pop()
        blocks = list(range(first, first + self._region))
        for block in blocks:
            self.refs[block] = 1
        return blocks

    def acquire(self, blocks: Sequence[BlockId]) -> None:
        assert not blocks, "the contiguous allocator shares nothing"

    def release(self, blocks: Sequence[BlockId]) -> None:
        if blocks:
            for block in blocks:
                self.refs[block] = 0
            self._regions.append(min(blocks))

    def publish(self, block: BlockId, block_hash: BlockHash, parent: BlockId, tokens: tuple[int, ...], depth: int) -> bool:
        return False

    def match(self, chain: Sequence[BlockHash], tokens: Sequence[int]) -> list[BlockId]:
        return []

    def reset_cache(self) -> None:
        pass
