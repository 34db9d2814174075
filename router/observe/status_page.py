"""Renders `/status`: what the router sees and does, as one HTML page. No script, nothing to load;
the browser asks again every two seconds. Everything that came from elsewhere is escaped."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from router.nodes.address import NodeRole
from router.nodes.node import Node
from router.nodes.registry import NodeRegistry
from router.observe.decision_log import Decision, DecisionLog

_REFRESH_S = 2
_NUMBER = re.compile(r"(≈?[\d.]+( s| s ago|%)?)?")
_NUM_DECISIONS = 30

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>tandem router</title>
<meta http-equiv="refresh" content="{refresh}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 1.5rem; color: #222; background: #fff }}
h1 {{ font-size: 1.2rem }} h2 {{ font-size: 1rem; margin-top: 1.5rem }}
table {{ border-collapse: collapse }} td, th {{ padding: .15rem .7rem; text-align: left }}
th {{ border-bottom: 1px solid #999; font-weight: 600 }}
tr:nth-child(odd) td {{ background: #f4f4f4 }}
td {{ white-space: nowrap }} div.wide {{ overflow-x: auto }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums }}
.ready {{ color: #176b1f }} .down, .ejected {{ color: #a40000 }}
.suspect, .leaving, .draining, .joining, .half_open {{ color: #8a5a00 }}
@media (prefers-color-scheme: dark) {{
body {{ color: #ddd; background: #181818 }} tr:nth-child(odd) td {{ background: #222 }}
.ready {{ color: #7ccf84 }} .down, .ejected {{ color: #ff8080 }}
.suspect, .leaving, .draining, .joining, .half_open {{ color: #e6b450 }} }}
</style></head><body>
<h1>tandem router: {state}</h1>
{sections}
</body></html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterView:
    """Holds what the page shows. `rates` are events per second by name; `totals` likewise since the
    start."""

    state: str
    registry: NodeRegistry
    decisions: DecisionLog
    rates: Mapping[str, float]
    totals: Mapping[str, float]
    tenants: Sequence[tuple[str, Mapping[str, int]]]


def render_status(view: RouterView) -> str:
    sections = [_section("Traffic", _traffic(view))]
    for role in NodeRole:
        sections.append(_section(f"{role.capitalize()} nodes", _nodes(view.registry, role)))
    sections.append(_section("Tenants", _tenants(view)))
    sections.append(_section("Recent placements", _decisions(view.decisions.recent)))
    return _PAGE.format(refresh=_REFRESH_S, state=escape(view.state), sections="\n".join(sections))


def _traffic(view: RouterView) -> str:
    rows = [
        [name, f"{view.rates.get(name, 0.0):.2f}", f"{total:.0f}"]
        for name, total in view.totals.items()
    ]
    return _table(["", "per second, last minute", "since the start"], rows)


def _nodes(registry: NodeRegistry, role: NodeRole) -> str:
    head = [
        "node", "state", "model", "running", "waiting", "waiting tokens", "ours", "KV in use",
        "prefill tokens/s", "report", "KV",
    ]  # fmt: skip
    now = registry.clock()
    nodes = sorted(registry.nodes(role), key=lambda node: str(node.address))
    return _table(head, [_node(registry, node, now) for node in nodes], state_column=1)


def _node(registry: NodeRegistry, node: Node, now: float) -> list[str]:
    report = node.report
    known = [str(node.address), registry.state(node).value]
    if report is None:
        return [*known, "", "", "", "", str(node.work.num_requests), "", "", "none yet", ""]
    return [
        *known,
        report.model_name,
        str(report.num_running_requests),
        str(report.num_waiting_requests),
        str(report.num_waiting_tokens),
        str(node.work.num_requests),
        f"{report.kv_usage:.0%}",
        f"{report.prefill_tokens_per_s:.0f}",
        f"{now - node.reported_at:.1f} s ago",
        report.fingerprint,
    ]


def _tenants(view: RouterView) -> str:
    rows = [
        [name, str(sum(counts.values())), ", ".join(f"{k}: {n}" for k, n in sorted(counts.items()))]
        for name, counts in view.tenants
    ]
    return _table(["tenant", "requests", "by status"], rows)


def _decisions(decisions: Iterable[Decision]) -> str:
    head = [
        "time (UTC)", "request", "trace", "tenant", "session by", "prefill choice", "decode",
        "prefill", "prompt", "new", "first token in", "try",
    ]  # fmt: skip
    newest = list(decisions)[::-1][:_NUM_DECISIONS]
    return _table(head, [_decision(decision) for decision in newest])


def _decision(decision: Decision) -> list[str]:
    return [
        time.strftime("%H:%M:%S", time.gmtime(decision.at)),
        decision.request_id,
        decision.trace_id,
        decision.tenant,
        decision.session,
        decision.choice,
        decision.decode,
        ", ".join(decision.prefills) or "on the decode node",
        f"≈{decision.num_prompt_tokens}",
        f"≈{decision.num_new_tokens}",
        f"≈{decision.ttft_s:.2f} s" if decision.ttft_s else "",
        str(decision.num_tried + 1),
    ]


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], state_column: int = -1) -> str:
    """Renders a table. Columns of numbers are set to the right, with their heads."""
    if not rows:
        return "<p>None.</p>"
    numbers = [all(map(_NUMBER.fullmatch, column)) for column in zip(*rows, strict=True)]
    kinds = ["n" if is_number else "" for is_number in numbers]
    names = "".join(_cell("th", *cell) for cell in zip(head, kinds, strict=True))
    lines = []
    for row in rows:
        cells = [
            _cell("td", text, text if column == state_column else kind)
            for column, (text, kind) in enumerate(zip(row, kinds, strict=True))
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    table = f"<table><thead><tr>{names}</tr></thead><tbody>\n{body}\n</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _cell(tag: str, text: str, kind: str) -> str:
    named = f' class="{escape(kind)}"' if kind else ""
    return f"<{tag}{named}>{escape(text)}</{tag}>"
