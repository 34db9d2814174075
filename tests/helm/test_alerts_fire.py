"""Tests, by Prometheus' own promtool, that alerts fire at a first burst, and only then.

The series are what the services show before and after: one that appears with its first event has
no increase, and its alert would miss exactly this burst.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from decode_node.metrics import DecodeMetrics
from engine.node.metrics.engine_metrics import EngineCollector, MeasuredEngine
from router.config import RouterSettings
from router.make_services import OuterWorld, make_services
from router.observe.metrics import RouterMetrics
from tests.engine.core.tiny_engine import tiny_config
from tests.helm.helm_engine import HelmSdk
from tests.helm.registered_metrics import measured_engine
from tests.helm.scenarios import overlay, values_of
from tests.helm.test_metric_names import rules

BURST_AT, END = 20, 60
"""They are minutes: before the burst all is quiet, and at the end each alert has had its time."""
PROMTOOL = shutil.which("promtool", path=str(Path(sys.executable).parent)) or shutil.which(
    "promtool"
)
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (make prometheus-tools; Debian: prometheus)"
)


@dataclass(frozen=True)
class Burst:
    """Holds what happens once, within a minute, and the alert that tells of it.

    Attributes:
        labels: Of the alert.
    """

    alert: str
    component: str
    happen: Callable[[Any], None]
    labels: tuple[tuple[str, str], ...] = ()


def _answers(status: int, count: int) -> Callable[[RouterMetrics], None]:
    def happen(metrics: RouterMetrics) -> None:
        metrics.requests.labels("/v1/chat/completions", status).inc(count)

    return happen


def _ejections(metrics: RouterMetrics) -> None:
    metrics.ejections.labels("decode").inc(6)


def _failed_prefills(metrics: DecodeMetrics) -> None:
    metrics._attempts.inc(10)
    metrics._failures.labels(*metrics._labels, "kv_transfer").inc(10)


def _local_prefills(metrics: DecodeMetrics) -> None:
    metrics._fallbacks.inc(10)
    metrics._decisions.labels(*metrics._labels, "decode-only").inc(10)


def _late_kernel(engine: MeasuredEngine) -> None:
    engine.stats.num_kernel_compiles += 1


BURSTS = [
    Burst("TandemErrors", "router", _answers(500, 30)),
    Burst("TandemErrors", "router", _answers(503, 30)),
    Burst("TandemManyErrors", "router", _answers(502, 30)),
    Burst("TandemEjections", "router", _ejections, (("tier", "decode"),)),
    Burst("TandemBrokenStreams", "router", lambda metrics: metrics.broken_streams.inc(2)),
    Burst("TandemDiscoveryFailing", "router", lambda metrics: metrics.discovery_failures.inc(40)),
    Burst("TandemPrefillAttemptsFail", "decode", _failed_prefills),
    Burst("TandemLocalPrefill", "decode", _local_prefills),
    Burst("TandemKernelCompiled", "engine", _late_kernel, (("pod", "p"),)),
]


def _metrics(component: str) -> tuple[Any, CollectorRegistry]:
    if component == "decode":
        decode = DecodeMetrics(tiny_config())
        return decode, decode.registry
    if component == "engine":
        engine, registry = measured_engine(), CollectorRegistry()
        registry.register(EngineCollector(engine))
        return engine, registry
    router = make_services(RouterSettings(_cli_parse_args=[]), OuterWorld()).metrics
    return router, router.registry


def _series(registry: CollectorRegistry, component: str) -> dict[str, float]:
    """Returns counters as a scrape names them, with the labels that the PodMonitors give."""
    found = {}
    given = {"namespace": "default", "release": "tandem", "component": component, "pod": "p"}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            if sample.name.endswith("_total"):
                labels = ",".join(f'{k}="{v}"' for k, v in (sample.labels | given).items())
                found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def _input_series(burst: Burst, *, happens: bool) -> Iterator[dict[str, str]]:
    """Yields each counter, scraped once a minute: as it is for `BURST_AT` minutes, and afterwards
    as the burst leaves it. What is not there before is not scraped before."""
    metrics, registry = _metrics(burst.component)
    before = _series(registry, burst.component)
    if happens:
        burst.happen(metrics)
    for name, after in _series(registry, burst.component).items():
        quiet = f"{before[name]:g}" if name in before else "_"
        values = f"{quiet}x{BURST_AT} {after:g}x{END}"
        yield {"series": name, "values": values}


def _promtool(*arguments: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _rule_file(folder: Path, found: list[dict[str, Any]]) -> str:
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "tandem", "rules": found}]}))
    return str(path)


@needs_promtool
def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    _promtool("check", "rules", _rule_file(tmp_path, rules("production")))


@needs_promtool
@pytest.mark.parametrize("happens", [True, False])
@pytest.mark.parametrize("burst", BURSTS, ids=lambda burst: burst.alert)
def test_a_first_burst_is_told_and_quiet_is_not(
    burst: Burst, happens: bool, tmp_path: Path
) -> None:
    """An alert that waits sees a burst for as long as its window remembers it."""
    (rule,) = (dict(rule) for rule in rules("production") if rule["alert"] == burst.alert)
    del rule["annotations"]
    waits = int(rule["for"].removesuffix("m"))
    labels = {**rule["labels"], **dict(burst.labels)}
    case = {
        "rule_files": [_rule_file(tmp_path, [rule])],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "1m",
                "input_series": list(_input_series(burst, happens=happens)),
                "alert_rule_test": [
                    {
                        "eval_time": f"{BURST_AT + 2 + waits}m",
                        "alertname": burst.alert,
                        "exp_alerts": [{"exp_labels": labels}] if happens else [],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(case))
    _promtool("test", "rules", str(path))


def rule_of(name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    (rule,) = (dict(rule) for rule in found if rule["alert"] == name)
    del rule["annotations"]
    return rule


def judge(
    rule: dict[str, Any], series: dict[str, str], told: list[dict[str, str]], folder: Path
) -> None:
    """Asks promtool whether after 20 minutes the alert fires with the labels `told` alone."""
    case = {
        "rule_files": [_rule_file(folder, [rule])],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": values} for name, values in series.items()
                ],
                "alert_rule_test": [
                    {
                        "eval_time": "20m",
                        "alertname": rule["alert"],
                        "exp_alerts": [{"exp_labels": {**rule["labels"], **on}} for on in told],
                    }
                ],
            }
        ],
    }
    path = folder / "case.yaml"
    path.write_text(yaml.safe_dump(case))
    _promtool("test", "rules", str(path))


def _given(component: str) -> str:
    return f'namespace="default",release="tandem",component="{component}",pod="p"'


@needs_promtool
@pytest.mark.parametrize(("tier", "fires"), [("prefill", False), ("decode", True)])
def test_a_tier_that_was_scaled_to_nothing_is_not_missed(
    tier: str, fires: bool, tmp_path: Path
) -> None:
    """Prefill may go to zero (`minReplicas` 0) and stays there while nobody asks."""
    watched = {"monitoring": {"prometheusRule": {"enabled": True}}}
    found = HelmSdk.shared().render(overlay(values_of("slo"), watched)).one("PrometheusRule")
    every = [rule for group in found["spec"]["groups"] for rule in group["rules"]]
    series = {f'tandem_router_nodes{{{_given("router")},state="ready",tier="{tier}"}}': "0x30"}
    told = [{"tier": tier}] if fires else []
    judge(rule_of("TandemNoReadyNodes", every), series, told, tmp_path)


@needs_promtool
@pytest.mark.parametrize(
    ("scraped", "blind"),
    [
        ((), ["prefill", "decode"]),
        (("decode",), ["prefill"]),
        (("decode", "prefill"), []),
        (("second-decode", "second-prefill"), []),
        (("node",), []),
    ],
)
def test_a_tier_that_nobody_scrapes_is_told(
    scraped: tuple[str, ...], blind: list[str], tmp_path: Path
) -> None:
    series = {
        f'tandem_router_nodes{{{_given("router")},state="ready",tier="{tier}"}}': "2x30"
        for tier in ("prefill", "decode")
    }
    series |= {f"tandem_engine_up{{{_given(component)}}}": "1x30" for component in scraped}
    rule = rule_of("TandemTierNotScraped", rules("production"))
    judge(rule, series, [{"tier": tier} for tier in blind], tmp_path)


@needs_promtool
@pytest.mark.parametrize(
    "alert", ["TandemErrors", "TandemManyErrors", "TandemAvailabilityBudgetFast"]
)
@pytest.mark.parametrize(("num_failed", "fires"), [(1, False), (40, True)])
def test_a_single_failure_wakes_nobody(
    alert: str, num_failed: int, fires: bool, tmp_path: Path
) -> None:
    """At night, when nothing else is asked."""
    quiet = 20 - (6 if alert == "TandemErrors" else 3)
    values = {"200": "0x40", "503": f"0x{quiet} {num_failed}x40"}
    series = {
        f'tandem_router_requests_total{{{_given("router")},status="{status}"}}': value
        for status, value in values.items()
    }
    judge(rule_of(alert, rules("production")), series, [{}] if fires else [], tmp_path)


# The error budget --------------------------------------------------------------------------------

STEP_MIN, JUDGED_MIN = 5, 30
"""Minutes between scrapes, and between judgements."""
DAY = 24 * 60
BUDGETS = [
    # (metric, component, bound)
    ("tandem_router_time_to_first_byte_seconds", "router", "5.0", "TandemFirstTokenBudget"),
    ("vllm:inter_token_latency_seconds", "decode", "0.1", "TandemTokenTimeBudget"),
]
TROUBLES = [
    # (part that is slow, for so many minutes, alerts that fire then)
    (0.04, DAY, ""),  # within the objective of 95 %
    (1.0, 90, "Fast"),
    (0.4, 6 * 60, "Fast"),
    (0.2, DAY, "Slow"),
    (0.08, 3 * DAY, "Slow"),
]


def _histogram(metric: str, component: str, bound: str, slow: float, minutes: int) -> list[Any]:
    """Returns 100 observations every `STEP_MIN`: all quick for a day, then `slow` of them not."""
    given = f'namespace="default",release="tandem",component="{component}",pod="p"'
    quiet, trouble = DAY // STEP_MIN, minutes // STEP_MIN
    quick = 100 * (1 - slow)
    bucket = f"0+100x{quiet} {100 * quiet + quick:g}+{quick:g}x{trouble}"
    everything = f"0+100x{quiet + trouble + 1}"
    return [
        {"series": f'{metric}_bucket{{{given},le="{bound}"}}', "values": bucket},
        {"series": f"{metric}_count{{{given}}}", "values": everything},
    ]


@needs_promtool
@pytest.mark.parametrize(("metric", "component", "bound", "alert"), BUDGETS)
def test_a_budget_that_burns_is_told(
    metric: str, component: str, bound: str, alert: str, tmp_path: Path
) -> None:
    """Fast alerts wake somebody, slow ones do not; the objective allows for a little slowness."""
    found = [dict(rule) for rule in rules("production") if rule["alert"].startswith(alert)]
    for rule in found:
        del rule["annotations"]
    labels = {rule["alert"]: rule["labels"] for rule in found}
    assert {name.removeprefix(alert) for name in labels} == {"Fast", "Slow"}
    file = _rule_file(tmp_path, found)
    tests = []
    for slow, minutes, fires in TROUBLES:
        # A fast one may be seen by the slow ones, too: whether it is does not matter.
        asked = ["Fast", "Slow"] if fires != "Fast" else ["Fast"]
        tests.append(
            {
                "interval": f"{STEP_MIN}m",
                "input_series": _histogram(metric, component, bound, slow, minutes),
                "alert_rule_test": [
                    {
                        "eval_time": f"{DAY + minutes}m",
                        "alertname": alert + kind,
                        "exp_alerts": [{"exp_labels": labels[alert + kind]}]
                        if kind == fires
                        else [],
                    }
                    for kind in asked
                ],
            }
        )
    case = {"rule_files": [file], "evaluation_interval": f"{JUDGED_MIN}m", "tests": tests}
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(case))
    _promtool("test", "rules", str(path))
