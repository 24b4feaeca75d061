"""How long processes wait for each other, and what is said of one that is gone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import distributed

from veomni_core.errors import HostError
from veomni_trainer.run.run_job import naming_lost_processes
from veomni_trainer.setup.processes import set_process_timeout


@pytest.fixture
def group() -> Iterator[distributed.ProcessGroup]:
    """A group beside the first one, as those of a device mesh."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.new_group([0])
    distributed.destroy_process_group()


def test_every_group_gets_the_jobs_timeout(group: distributed.ProcessGroup) -> None:
    set_process_timeout(7)
    for each in (group, distributed.group.WORLD):
        assert each is not None
        assert each._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]: Connection reset by peer"),
        distributed.DistBackendError("NCCL communicator was aborted on rank 0"),
    ],
)
def test_what_torch_says_of_a_lost_process_becomes_one_sentence(error: RuntimeError) -> None:
    with pytest.raises(HostError, match="another process of this job ended") as caught, naming_lost_processes(7):
        raise error
    assert "did not answer for 7 s (train.timeout)" in str(caught.value) and str(error) in str(caught.value)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), naming_lost_processes(7):
        raise RuntimeError("shapes differ")
