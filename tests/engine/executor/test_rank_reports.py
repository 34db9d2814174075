"""Tests what ranks say beside the results of their steps, and where it is read."""

from __future__ import annotations

import msgspec

from engine.contracts.outputs import ExpertStats, GrammarStats, ModelRunnerOutput
from engine.core.core import EngineCore
from engine.executor.ranks.rank_reports import LateKernels, RankReports
from engine.executor.uniproc_executor import UniprocExecutor
from engine.executor.worker_messages import StepDone, WorkerReply
from tests.engine.core.tiny_engine import tiny_config

NOTHING = ModelRunnerOutput(0, [], [], [])


def test_kernels_of_all_groups_count_and_the_rest_is_of_the_first() -> None:
    reports = RankReports()
    grammar = GrammarStats(num_masks=3)
    for done in (
        StepDone(NOTHING, 1.5, grammar, 0, ExpertStats(num_moved=2), 0.25, ["one(x: *bf16)"]),
        StepDone(NOTHING, 9.0, None, 1, None, -1.0, ["one(x: *bf16)", "two(y)"]),
        StepDone(NOTHING, 1.75, None, 0, None, None),
    ):
        arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(done), type=WorkerReply)
        assert isinstance(arrived, StepDone)
        reports.take(arrived)
    assert (reports.host_s, reports.ahead_s, reports.expert_stats) == (1.75, None, None)
    assert reports.grammar_stats.num_masks == 3
    assert reports.late_kernels.count == 3
    assert list(reports.late_kernels.names)[1:] == ["one(x: *bf16)", "two(y)"]


def test_names_of_the_last_kernels_are_kept() -> None:
    late = LateKernels()
    late.add(f"kernel {number}" for number in range(100))
    assert late.count == 100 and late.names[0] == "kernel 84" and late.names[-1] == "kernel 99"


def test_a_kernel_compiled_late_is_in_statistics_and_crash_reports() -> None:
    executor = UniprocExecutor(tiny_config())
    core = EngineCore(executor._worker.config, executor, lambda *progress: None)
    try:
        assert core.stats().num_kernel_compiles == 0
        assert core.facts().late_kernels == []
        executor._worker.compile_guard.late.append("rms_norm_kernel(x: *bf16:16), 4 warps")
        assert core.stats().num_kernel_compiles == core.stats().num_kernel_compiles == 1
        facts = core.facts()
        assert facts.num_late_kernels == 1
        assert facts.late_kernels == ["rms_norm_kernel(x: *bf16:16), 4 warps"]
    finally:
        core.shutdown()
        executor.shutdown()
