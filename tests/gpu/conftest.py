"""One GPU, one rank over NCCL; without a GPU every test here is skipped. Needs torch and pytest alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="package")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    """cuda:0, in a process group of this process alone."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    found = torch.device("cuda", 0)
    torch.cuda.set_device(found)
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=found)
    yield found
    dist.destroy_process_group()
