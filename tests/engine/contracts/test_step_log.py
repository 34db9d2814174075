"""The page of the last steps: what a reader in another place sees, and when."""

from __future__ import annotations

import time

from engine.contracts.steps.step_log import NUM_STEPS, StepLog


def test_the_last_steps_are_read_from_the_same_page() -> None:
    log = StepLog.create("steps")
    reader = StepLog.attach(log.handle)
    assert reader.steps() == []
    now = time.monotonic()
    for step_id in range(NUM_STEPS + 3):
        log.issued(step_id, now - 2.0, 1 + step_id, 10 + step_id, step_id % 2, 3)
        if step_id != NUM_STEPS + 2:
            log.retired(step_id, now - 1.5)
            log.worked(step_id, 0.25)
    steps = reader.steps()
    assert [step.step_id for step in steps] == list(range(3, NUM_STEPS + 3))
    last, before = steps[-1], steps[-2]
    assert last == (NUM_STEPS + 2, now - 2.0, 0.0, 0.0, NUM_STEPS + 3, NUM_STEPS + 12, 0, 3)
    assert (before.ended_at, before.worker_host_s) == (now - 1.5, 0.25)
    assert {step.prompt_tokens for step in steps} == {0, 1}
    assert reader.steps(since=now) == []
    reader.close()
    log.close()
