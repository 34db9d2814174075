"""Follows the rows of one data-parallel group, so that the size of its steps is known where all
groups are padded.

    1. a request enters a row with tokens to compute
    2. chunks compute them; the one that computes the last gets a token
    3. the row decodes, and gets one in every step, until it is asked to stop or ends
"""

from __future__ import annotations

from typing import NamedTuple

from engine.contracts.scheduler_output import SchedulerOutput


class StepSize(NamedTuple):
    """The size of one group's step.

    Attributes:
        num_decodes: Rows that decode.
        num_prompt_tokens: Tokens that are computed of prompts.
        num_sampled: Rows that get a token.
        waits_for_layers: The step reads KV while it is loaded: then its kernels are launched one by
            one, and so must be those of the other groups.
    """

    num_decodes: int = 0
    num_prompt_tokens: int = 0
    num_sampled: int = 0
    waits_for_layers: bool = False


class StepSizes:
    """Sees every step of one group, as its workers do."""

    def __init__(self) -> None:
        self._decodes: set[int] = set()
        self._left: dict[int, int] = {}
        """[row]: tokens of a request that no chunk has computed."""

    def of(self, step: SchedulerOutput | None) -> StepSize:
        """Returns the size of the next step; None: the group has none."""
        if step is None:
            return StepSize()
        for row in step.finished_rows:
            self._left.pop(row, None)
        for new in step.new_reqs:
            self._left[new.row] = new.prefill_len - new.num_computed_tokens
        self._decodes -= {*step.finished_rows, *step.decode_remove}
        self._decodes |= set(step.decode_add)
        num_sampled = len(self._decodes)
        for row, count in step.prefill_chunks:
            self._left[row] -= count
            num_sampled += self._left[row] == 0
        of_prompts = sum(count for _, count in step.prefill_chunks)
        waits = step.kv is not None and step.kv.load is not None
        return StepSize(len(self._decodes), of_prompts, num_sampled, waits)
