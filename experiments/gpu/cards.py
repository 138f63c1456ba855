"""What one GPU of every architecture offers, from its data sheet, as far as reading a cache is concerned.

Imports nothing. Does not know about: kernels.
"""

from typing import NamedTuple


class Gpu(NamedTuple):
    """bandwidth: bytes/s. clock: Hz (boost). lanes: instructions x lanes that a processor issues per cycle. registers: of a
    processor, 32 bits each. shared_bytes: of a processor. threads: of a processor at most; wave: lanes of one instruction."""

    name: str
    bandwidth: float
    processors: int
    clock: float
    lanes: int
    registers: int
    shared_bytes: int
    threads: int
    wave: int = 32

    @property
    def lane_instructions_per_byte(self) -> float:
        """How many may be spent on each byte read, before issuing them takes longer than reading."""
        return self.lanes * self.processors * self.clock / self.bandwidth

    def programs_per_processor(self, warps: int, registers: int, shared_bytes: int) -> int:
        """Programs that fit at once, by registers (in steps of 8), shared memory (with 1 KiB each for the system) and threads."""
        threads = warps * self.wave
        by_registers = self.registers // (-(-registers // 8) * 8 * threads)
        return min(by_registers, self.shared_bytes // (shared_bytes + 1024), self.threads // threads)


GPUS: dict[str, Gpu] = {
    "sm_80": Gpu("A100 80GB", 2.039e12, 108, 1.41e9, 128, 65536, 164 << 10, 2048),
    "sm_89": Gpu("RTX 4090", 1.008e12, 128, 2.52e9, 128, 65536, 100 << 10, 1536),
    "sm_90": Gpu("H200", 4.8e12, 132, 1.98e9, 128, 65536, 228 << 10, 2048),
    "sm_100": Gpu("B200", 8.0e12, 148, 1.97e9, 128, 65536, 228 << 10, 2048),
    "sm_120": Gpu("RTX 5090", 1.792e12, 170, 2.41e9, 128, 65536, 100 << 10, 1536),
    "gfx942": Gpu("MI300X", 5.3e12, 304, 2.1e9, 64, 131072, 64 << 10, 2048, 64),
}
