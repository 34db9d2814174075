"""Draws a plan as SVG: TTFT and ITL of each number of nodes, beside the objectives.

Written by hand, because a planning command should not need a plotting library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from planner.errors import PlanError
from planner.evaluation import Forecast
from planner.report import Report

_LEFT, _WIDTH, _ROW, _TOP = 190, 300, 26, 64
_GAP = 90


def write_plot(report: Report, path: Path) -> None:
    """Writes the picture. Raises `PlanError` when the file cannot be written."""
    try:
        path.write_text(draw(report), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--plot {path}: {error.strerror}") from None


def draw(report: Report) -> str:
    """Returns the picture as SVG."""
    plan, limits = report.plan, report.objectives
    outcomes = [plan.best, *plan.around, plan.same_undivided]
    if plan.fewest_undivided is not None:
        outcomes.append(plan.fewest_undivided)
    shown = list({outcome.nodes: outcome for outcome in outcomes}.values())
    height = _TOP + _ROW * len(shown) + 40
    width = _LEFT + 2 * _WIDTH + _GAP + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="15">{escape(report.simulated.name)}</text>',
    ]
    for row, outcome in enumerate(shown):
        y = _TOP + _ROW * row + 17
        weight = ' font-weight="bold"' if outcome is plan.best else ""
        parts.append(f'<text x="12" y="{y}"{weight}>{escape(str(outcome.nodes))}</text>')
    parts += _bars(
        shown, lambda o: o.ttft_tail_s, limits.ttft_s, _LEFT, f"TTFT {limits.tail}, ms", ".0f"
    )
    second = _LEFT + _WIDTH + _GAP
    parts += _bars(
        shown, lambda o: o.itl_tail_s, limits.itl_s, second, f"ITL {limits.tail}, ms", ".1f"
    )
    return "\n".join([*parts, "</svg>", ""])


def _bars(
    shown: Sequence[Forecast],
    value: Callable[[Forecast], float],
    limit: float,
    left: int,
    title: str,
    digits: str,
) -> list[str]:
    """Draws one panel; bars longer than three times the objective are cut."""
    most = min(3 * limit, max(limit * 1.2, *(value(outcome) for outcome in shown)))
    parts = [f'<text x="{left}" y="48" fill="#444">{title}</text>']
    for row, outcome in enumerate(shown):
        seconds = value(outcome)
        length = _WIDTH * min(seconds, most) / most
        y = _TOP + _ROW * row + 3
        color = "#4c78a8" if seconds <= limit else "#e45756"
        parts.append(
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{_ROW - 8}" fill="{color}"/>'
            f'<text x="{left + length + 5:.1f}" y="{y + 14}">{1e3 * seconds:{digits}}</text>'
        )
    x, bottom = left + _WIDTH * limit / most, _TOP + _ROW * len(shown) + 4
    parts.append(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{bottom}" stroke="black" '
        f'stroke-dasharray="4 3"/><text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">'
        f"objective {1e3 * limit:g}</text>"
    )
    return parts
