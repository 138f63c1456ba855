"""How much memory a device has free.

Takes: a device. Gives: bytes.
Does not know about: who wants them.
"""

import os
from pathlib import Path

import torch


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now: of the GPU, or of main memory within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # counts reclaimable page cache as free, which sysconf does not
        free = next(int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    try:  # cgroup v2: a container may have less than the machine
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return free if limit == "max" else min(free, int(limit) - used)
    except OSError:
        return free
