"""Settings of experts that move: what they take, and what they refuse by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import ParallelConfig
from engine.contracts.outputs import ExpertStats
from engine.eplb_config import EplbConfig
from engine.models.checkpoint import check_parallel, load_model_config
from engine.models.errors import CheckpointError
from engine.node.metrics.expert_metrics import expert_metrics
from engine.node.settings.engine_settings import SettingsError
from engine.node.settings.expert_settings import parse_eplb_config
from prefill_node.config import PrefillNodeSettings

EP2 = ["--enable-eplb", "--enable-expert-parallel", "--tensor-parallel-size", "2"]


def parallel_of(*flags: str) -> ParallelConfig:
    return PrefillNodeSettings.from_args("x", ["--model", "m", *flags])._parallel_config()


def test_vllms_flags_are_taken() -> None:
    assert parallel_of().eplb is None
    assert parallel_of(*EP2).eplb == EplbConfig(window_size=1000, step_interval=3000)
    text = '{"num_redundant_experts": 4, "step_interval": 50, "window_size": 9}'
    found = parallel_of(*EP2, "--eplb-config", text).eplb
    assert found == EplbConfig(num_redundant_experts=4, step_interval=50, window_size=9)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--eplb-config", "{}"], "no effect without --enable-eplb"),
        (["--enable-eplb"], "needs --enable-expert-parallel"),
        (["--enable-eplb", "--tensor-parallel-size", "2"], "needs --enable-expert-parallel"),
        (["--enable-eplb", "--enable-expert-parallel"], "--data-parallel-size above 1"),
        ([*EP2, "--pipeline-parallel-size", "2"], "not work with --pipeline-parallel-size"),
        ([*EP2, "--deterministic"], "does not go with --deterministic"),
    ],
)
def test_what_does_not_go_together_is_named(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused before a checkpoint is looked for, and `--check` says the same."""
    settings = PrefillNodeSettings.from_args("x", ["--model", "nowhere", *flags])
    with pytest.raises(SettingsError, match=message) as caught:
        settings.to_engine_config("kv_producer")
    assert settings.print_checked("kv_producer") == 2
    assert capsys.readouterr().err == f"wrong settings: {caught.value}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nine", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"policy": "other"}', "'policy' is no field of it; those that exist: window_size"),
        ('{"window_size": 0}', "window_size must be an integer of at least 1, not 0"),
        ('{"step_interval": true}', "step_interval must be an integer of at least 1"),
        ('{"num_redundant_experts": -1}', "num_redundant_experts must be an integer of at least 0"),
        ('{"log_balancedness": 1}', "log_balancedness must be true or false"),
        ('{"step_interval": 10}', "window_size is 1000, more than step_interval, 10"),
    ],
)
def test_wrong_fields_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_eplb_config(text)


@pytest.mark.parametrize(("redundant", "word"), [(1, "no equal number"), (6, "are too many")])
def test_copies_that_do_not_fit_are_refused(redundant: int, word: str, checkpoints: Path) -> None:
    """There are 4 experts and 2 ranks."""
    model = load_model_config(checkpoints / "mixtral")
    for number in (0, 2, 4, redundant):
        eplb = EplbConfig(num_redundant_experts=number)
        parallel = ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True, eplb=eplb)
        if number != redundant:
            check_parallel(model, parallel)
            continue
        with pytest.raises(CheckpointError, match=word) as caught:
            check_parallel(model, parallel)
        assert "--eplb-config" in str(caught.value)


def test_metrics_tell_how_even_ranks_are() -> None:
    assert list(expert_metrics(None, (), ())) == []
    found = {
        (sample.name, sample.labels.get("placement", "")): sample.value
        for metric in expert_metrics(ExpertStats(0.5, 0.75, 3, 20), ("engine",), ("0",))
        for sample in metric.samples
    }
    assert found == {
        ("tandem_eplb_balancedness", "observed"): 0.5,
        ("tandem_eplb_balancedness", "planned"): 0.75,
        ("tandem_eplb_rearrangements_total", ""): 3,
        ("tandem_eplb_moved_experts_total", ""): 20,
    }
