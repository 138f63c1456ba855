"""Settings shared by all tests: tiers, seeds, one thread, no network."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub: a test never needs the network
os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("GOMP_SPINCOUNT", "100")  # before torch: several workers share the cores, a waiting thread must let go
os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported: its own functions are wrapped at import

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

TIERS = {"cpu", "interpreter", "gpu", "slow"}

# Timing on a busy machine says nothing, and a run in CI must fail for what changed, not for a new random example.
settings.register_profile("qkv", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("qkv")
settings.register_profile("unshrunk", settings.get_profile("qkv"), phases=(Phase.explicit, Phase.reuse, Phase.generate))
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without a tier are `cpu`; `gpu` tests are skipped where there is none."""
    no_gpu = pytest.mark.skip(reason="needs a GPU, and torch sees none")
    for item in items:
        tiers = TIERS & {mark.name for mark in item.iter_markers()}
        if not tiers:
            item.add_marker(pytest.mark.cpu)
        if "gpu" in tiers and not torch.cuda.is_available():
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
