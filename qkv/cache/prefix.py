"""Names the content of a full block by a hash of its tokens and of the hash of the block before it.

Takes: token ids. Gives: one hash per full block. The root of the chain is a hash of all that decides what the stored bytes
mean (model, quantizer, scales, block size, salt), so two blocks with equal hashes can stand for each other.
Does not know about: block ids, pools.
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
    """hash(block) = H(hash(parent), tokens of the block); in the place of the first block's parent stands the salt's root.

    identity: what the stored bytes depend on, e.g. model fingerprint, quantizer, scale fingerprint, formats.
    algorithm: "xxh3_128" (fast and not cryptographic, which is enough because the allocator compares the tokens of a hit) or
    "sha256".
    """

    def __init__(self, algorithm: str, block_size: int, identity: Sequence[str]) -> None:
        self.block_size = block_size
        self._hash = _HASHES[algorithm]
        self._identity = "\x1f".join((*identity, str(block_size)))
        self._roots: dict[str, BlockHash] = {}

    def root(self, salt: str = "") -> BlockHash:
        """What the first block of a sequence has for its parent's hash. Requests with other salts never share blocks."""
        if salt not in self._roots:
            self._roots[salt] = self._hash(f"{self._identity}\x1f{salt}".encode())
        return self._roots[salt]

    def extend(self, chain: list[BlockHash], tokens: Sequence[int], num_blocks: int, salt: str = "") -> None:
        """Append hashes to `chain` until it covers the first num_blocks blocks of `tokens`. Hashes already in it stay."""
        B = self.block_size
        for i in range(len(chain), num_blocks):
            parent = chain[-1] if chain else self.root(salt)
            chain.append(self._hash(parent + array("q", tokens[i * B : (i + 1) * B]).tobytes()))
