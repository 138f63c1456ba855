"""The identity of a full block: a hash chain over its tokens and everything before it.

The chain's root holds all that decides what the stored bytes mean (model, quantizer, scales, block size, salt), so that
two blocks with equal hashes hold interchangeable content. Does not know about: blocks, pools.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence

import xxhash

from qkv.types import BlockHash

_HASHES: dict[str, Callable[[bytes], bytes]] = {
    "xxh3_128": lambda data: xxhash.xxh3_128_digest(data),
    "sha256": lambda data: hashlib.sha256(data).digest(),
}


class PrefixHasher:
    """hash(block) = H(hash(parent), tokens of the block); hash(parent of the first) = root of the salt.

    identity: what the stored bytes depend on, e.g. model fingerprint, quantizer, scale fingerprint, formats.
    algorithm: "xxh3_128" (fast, not cryptographic: the allocator compares tokens on a hit) or "sha256".
    """

    def __init__(self, algorithm: str, block_size: int, identity: Sequence[str]) -> None:
        self.block_size = block_size
        self._hash = _HASHES[algorithm]
        self._identity = "\x1f".join((*identity, str(block_size)))
        self._roots: dict[str, BlockHash] = {}

    def root(self, salt: str = "") -> BlockHash:
        if salt not in self._roots:
            self._roots[salt] = self._hash(f"{self._identity}\x1f{salt}".encode())
        return self._roots[salt]

    def extend(self, chain: list[BlockHash], tokens: Sequence[int], num_blocks: int, salt: str = "") -> None:
        """Append hashes until the chain covers the first num_blocks blocks of tokens. Only new blocks are hashed."""
        B = self.block_size
        for i in range(len(chain), num_blocks):
            parent = chain[-1] if chain else self.root(salt)
            chain.append(self._hash(parent + array("q", tokens[i * B : (i + 1) * B]).tobytes()))
