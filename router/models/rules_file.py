"""Keeps the model rules as their file has them.

1. read       at the start; a file that cannot be used stops it
2. watched    the file has changed, or a link on the way to it (a mounted ConfigMap changes so):
              read again
-  broken     it cannot be used: the rules stay as they were, which the log and a metric say until
              it can
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edge.file_version import version_if_there
from router.errors import ConfigurationError
from router.models.model_rules import ModelRules, read_rules

logger = logging.getLogger(__name__)

_CHECK_S = 1.0


class RulesFile(Collector):
    """Has the `rules` that hold. `version` grows with every change. Collects its own metrics."""

    def __init__(self, file: Path | None = None) -> None:
        """Reads the file; raises `ConfigurationError` if it is wrong."""
        self._file = file
        self._seen = version_if_there(self._file)
        self.rules = self._read()
        self.version = 0
        self.num_applied = 0
        self.num_refused = 0
        self.is_broken = False

    def reload(self) -> bool:
        """Reads the file again if it has changed. Returns whether other rules hold now."""
        seen = version_if_there(self._file)
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            rules = self._read()
        except ConfigurationError as error:
            logger.error("%s; the rules stay as they were", error)
            self.is_broken = True
            self.num_refused += 1
            return False
        self.is_broken = False
        self.num_applied += 1
        if rules == self.rules:
            return False
        self.rules = rules
        self.version += 1
        logger.info("model rules have changed: %s", describe(rules))
        return True

    async def watch(self) -> None:
        """Runs until cancelled."""
        while self._file is not None:
            await asyncio.sleep(_CHECK_S)
            self.reload()

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "tandem_router_model_rules_broken",
            "1 while the file of model rules cannot be used, and older rules hold",
            int(self.is_broken),
        )
        reads = CounterMetricFamily(
            "tandem_router_model_rules_reads",
            "Changes of the file of model rules, by whether they could be used",
            labels=["outcome"],
        )
        reads.add_metric(["applied"], self.num_applied)
        reads.add_metric(["refused"], self.num_refused)
        yield reads
        weights = GaugeMetricFamily(
            "tandem_router_model_weight",
            "Share of a model's sessions that a version gets, by the rules that hold",
            labels=["model", "version"],
        )
        for name, split in self.rules.splits.items():
            total = sum(weight for _, weight in split)
            for version, weight in split:
                weights.add_metric([name, version], weight / total)
        yield weights

    def _read(self) -> ModelRules:
        if self._file is None:
            return ModelRules()
        try:
            return read_rules(self._file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the model rules cannot be read: {error}") from None


def describe(rules: ModelRules) -> str:
    """Returns the rules as one line of a log."""
    aliases = [f"{name}={target}" for name, target in rules.aliases.items()]
    splits = [
        f"{name}=" + "+".join(f"{version}:{weight:g}" for version, weight in split)
        for name, split in rules.splits.items()
    ]
    return ", ".join([*aliases, *splits]) or "none"
