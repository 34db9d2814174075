"""The step message of an engine with data-parallel groups: one scheduler decides for all of them,
so that groups agree without asking each other."""

from __future__ import annotations

import msgspec

from engine.contracts.outputs import ModelRunnerOutput
from engine.contracts.scheduler_output import EncodingOutput, SchedulerOutput


class GroupStep(msgspec.Struct, array_like=True):
    """One step of all groups.

    Attributes:
        step_id: Grows by one; the steps inside count for themselves.
        steps: By group; None: it has nothing to compute, and takes part with its experts. A shorter
            message is one without what the last fields say.
        num_tokens: Tokens of the group that has most.
        num_decodes: Requests of the group that has most, if all groups only decode and none waits
            for layers of KV; else 0.
        num_sampled: Requests that get a token, of the group that has most: a drafter guesses what
            follows as many.
        query_len: Tokens of each row that decodes.
        num_drafts: What is drafted for each of them behind this step; None: as many as may be.
    """

    step_id: int
    steps: list[EncodingOutput | None]
    num_tokens: int
    num_decodes: int
    num_sampled: int
    query_len: int
    num_drafts: int | None = None


class GroupOutput(msgspec.Struct, array_like=True):
    """Results of a `GroupStep`, by group; those of groups that had nothing to compute are empty."""

    step_id: int
    outputs: list[ModelRunnerOutput]


Step = SchedulerOutput | GroupStep
StepResult = ModelRunnerOutput | GroupOutput
