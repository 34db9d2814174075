"""Shows how `tandem up` goes: progress while nodes load, a table of endpoints, deaths and
restarts, and the errors of running services."""

from __future__ import annotations

import json
import re

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cli.local_cluster.supervisor import Listener, Service, ServiceState

_ERROR_LINE = re.compile(r"\d{4}-\d\d-\d\d \S+ (ERROR|CRITICAL) ")
"""Begins a line of `TextFormatter`."""


class ClusterDisplay:
    """Life cycle: `start` (bars) → `show_endpoints` (bars end, table) → log lines."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self.console = console
        self._verbose = verbose
        self._progress = Progress(
            TextColumn("{task.fields[service]:<12}"),
            BarColumn(bar_width=30),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._bars: dict[str, TaskID] = {}
        self._loading = True

    def listener(self) -> Listener:
        return Listener(on_state=self.on_state, on_progress=self.on_progress, on_log=self.on_log)

    def start(self, services: list[Service]) -> None:
        for service in services:
            self._bars[service.spec.name] = self._progress.add_task(
                "starting", total=1.0, service=service.spec.name
            )
        self._progress.start()

    def end_loading(self) -> None:
        self._loading = False
        self._progress.stop()

    def show_endpoints(self, services: list[Service]) -> None:
        self.end_loading()
        table = Table("service", "endpoint", "pid", "KV cache")
        for service in services:
            tokens = service.ready_info.get("kv_cache_tokens")
            room = f"{tokens:,} tokens" if tokens is not None else ""
            table.add_row(service.spec.name, service.spec.endpoint, str(service.pid), room)
        self.console.print(table)

    def on_progress(self, service: Service, stage: str, fraction: float) -> None:
        if self._loading:
            self._progress.update(
                self._bars[service.spec.name], completed=fraction, description=stage
            )

    def on_state(self, service: Service) -> None:
        if self._loading:
            finished = service.state is ServiceState.READY
            self._progress.update(
                self._bars[service.spec.name],
                completed=1.0 if finished else None,
                description=service.state.value,
            )
        elif service.state is not ServiceState.STOPPED:
            self.console.print(f"[bold]{service.spec.name}[/] is {_state(service)}")

    def on_log(self, service: Service, line: str) -> None:
        is_late = not self._loading and is_error(line)
        if self._verbose or is_late or service.state is ServiceState.RESTARTING:
            text = Text.assemble((service.spec.name, "dim"), " ", line)
            self.console.print(text, highlight=False, soft_wrap=True)


def is_error(line: str) -> bool:
    """Says whether a line of a log, of either format, tells of an error."""
    if not line.startswith("{"):
        return _ERROR_LINE.match(line) is not None
    try:
        fields = json.loads(line)
    except ValueError:
        return False
    return isinstance(fields, dict) and fields.get("level") in ("error", "critical")


def _state(service: Service) -> str:
    """Returns how a service is; one that changes between prefill and decode, also which it is."""
    role = str(service.ready_info.get("role", ""))
    if service.state is not ServiceState.READY or service.spec.name.startswith(role):
        return service.state.value
    return f"ready as a {role} node"
