"""Tests when a step's result is told: not before the device has done the step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sample.sampler import SamplerOutput
from engine.worker.async_output import AsyncOutput, ResultCopier, StepTensors


class _Event:
    """Happens when it is asked for the third time."""

    def __init__(self) -> None:
        self.num_looks = 0

    def query(self) -> bool:
        self.num_looks += 1
        return self.num_looks > 2


class _BusyDevice(ResultCopier):
    """Stands for a device whose steps are done when its event has happened."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.event = _Event()

    @property
    def waits(self) -> bool:
        return True

    def start_copy(self, found: StepTensors | None) -> tuple[StepTensors | None, _Event]:
        return (None if found is None else found.to_host()), self.event


@pytest.mark.parametrize("tokens", [[], [5, 7]], ids=["nobody sampled", "two sampled"])
def test_a_result_is_told_when_the_device_has_done_the_step(tokens: list[int]) -> None:
    device = _BusyDevice()
    sampled = SamplerOutput(torch.tensor(tokens)[:, None], None) if tokens else None
    rows = np.arange(len(tokens), dtype=np.int32)
    output = AsyncOutput(3, rows, [1] * len(tokens), sampled, [], device)
    assert not output.is_ready and device.event.num_looks == 0
    assert output.get_output().token_ids == tokens
    assert device.event.num_looks == 3


def test_on_the_cpu_nobody_waits() -> None:
    copier = ResultCopier(torch.device("cpu"))
    output = AsyncOutput(3, np.array([], np.int32), [], None, [], copier)
    assert output.is_ready and output.get_output().rows == []
