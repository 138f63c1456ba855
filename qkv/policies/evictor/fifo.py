"""First in, first out: the block published first goes first, however often it was used."""

from dataclasses import dataclass

from qkv.policies.evictor.base import EVICTORS, BlockMeta, PriorityEvictor


@EVICTORS.register("fifo")
@dataclass
class FIFO(PriorityEvictor):
    """The baseline that every policy that looks at use should beat."""

    def priority(self, meta: BlockMeta) -> int:
        return meta.born_step
