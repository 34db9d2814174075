"""Brings the results of data-parallel groups together, step by step."""

from __future__ import annotations

from collections import deque

from engine.contracts.group_step import GroupOutput, StepResult
from engine.contracts.outputs import ModelRunnerOutput


class GroupResults:
    """Steps end in their order, each when all `num_groups` groups have answered."""

    def __init__(self, num_groups: int) -> None:
        self._expected: deque[int] = deque()
        self._arrived = [deque[ModelRunnerOutput]() for _ in range(num_groups)]
        self._complete: list[StepResult] = []

    def expect(self, step_id: int) -> None:
        """Records a step that was handed out."""
        self._expected.append(step_id)

    def add(self, group: int, output: ModelRunnerOutput) -> bool:
        """Takes the result of one group. Returns whether a step is complete with it."""
        self._arrived[group].append(output)
        if not all(self._arrived):
            return False
        step_id = self._expected.popleft()
        outputs = [of_group.popleft() for of_group in self._arrived]
        self._complete.append(outputs[0] if len(outputs) == 1 else GroupOutput(step_id, outputs))
        return True

    def take(self) -> list[StepResult]:
        """Returns the steps that have become complete since the last call."""
        taken, self._complete = self._complete, []
        return taken
