"""A scheduler that tests step by hand."""

from __future__ import annotations

import pytest

from tests.engine.sched.factories import make_config
from tests.engine.sched.step_machine import StepMachine


@pytest.fixture
def machine() -> StepMachine:
    return StepMachine(make_config(), num_blocks=32, depth=2)
