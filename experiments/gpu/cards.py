"""Figures from the data sheet of one GPU of every architecture, as far as they matter for reading a cache.

Takes and imports nothing. Gives: one Gpu per architecture. Does not know about: kernels.
"""

from typing import NamedTuple


class Gpu(NamedTuple):
    """One GPU. bandwidth: bytes/s. clock: Hz (boost). lanes: instructions x lanes that a processor issues per cycle. registers
    (of 32 bits), shared_bytes: of one processor. threads: the most that a processor holds. wave: lanes of one instruction."""

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
        """How many instructions of one lane can be spent on each byte read before issuing them takes longer than reading."""
        return self.lanes * self.processors * self.clock / self.bandwidth

    def programs_per_processor(self, warps: int, registers: int, shared_bytes: int) -> int:
        """How many programs fit on a processor at once, by registers (in steps of 8), shared memory (of which the system takes
        1 KiB per program) and threads."""
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
