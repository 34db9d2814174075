"""The step message of an engine with data-parallel groups: one scheduler decides for all of them,
so that groups agree without asking each other."""

from __future__ import annotations

import msgspec

from engine.outputs import ModelRunnerOutput
from engine.sched.output import SchedulerOutput


class GroupStep(msgspec.Struct, array_like=True):
    """One step of all groups.

    Attributes:
        step_id: Grows by one; the steps inside count for themselves.
        steps: By group; None: it has nothing to compute, and takes part with its experts.
        num_tokens: Tokens of the group that has most.
        num_decodes: Requests of the group that has most, if all groups only decode and none waits
            for layers of KV; else 0.
    """

    step_id: int
    steps: list[SchedulerOutput | None]
    num_tokens: int
    num_decodes: int


class GroupOutput(msgspec.Struct, array_like=True):
    """Results of a `GroupStep`, by group; those of groups that had nothing to compute are empty."""

    step_id: int
    outputs: list[ModelRunnerOutput]


Step = SchedulerOutput | GroupStep
StepResult = ModelRunnerOutput | GroupOutput
