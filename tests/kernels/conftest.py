"""Kernels of the CPU share their work between threads, so their tests run with more than one."""

from collections.abc import Iterator

import pytest
import torch

THREADS = 2


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS if request.path.name.startswith("test_cpu_") else before)
    yield
    torch.set_num_threads(before)
