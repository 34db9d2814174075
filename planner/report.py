"""Says what a plan means: a table, a recommendation in sentences, JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from engine.speed.profile import SpeedProfile
from planner.evaluation import Forecast, Nodes, Objectives
from planner.kv_store import store_sentence
from planner.search import Plan
from planner.traffic.described import MAX_REQUESTS
from planner.traffic.traffic import Traffic

_WIDEST = 200
_SHORT = 0.8
"""Says which part of the time in which nodes fill up is too short a one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Holds a plan and what it was made from. `price` is of one GPU for an hour, `store_gb_per_s`
    what a KV store gives one node; 0: not given."""

    plan: Plan
    traffic: Traffic
    simulated: Traffic
    profile: SpeedProfile
    objectives: Objectives
    price: float = 0.0
    store_gb_per_s: float = 0.0
    is_example: bool = False

    def cost(self, outcome: Forecast) -> tuple[float, float]:
        """Returns the price of a million tokens of answers, and of all tokens."""
        hourly = self.price * self.profile.gpus * outcome.nodes.total
        out = 3600 * outcome.output_tokens_per_s
        both = out + 3600 * outcome.prompt_tokens_per_s
        return 1e6 * hourly / max(1.0, out), 1e6 * hourly / max(1.0, both)

    def print(self, console: Console) -> None:
        console.print(f"Traffic: {self._traffic_line()}")
        console.print(f"Speed: {self._profile_line()}", highlight=False)
        self._print_whole(self._table(), console)
        for sentence in self.sentences():
            console.print(sentence, highlight=False)

    def _print_whole(self, table: Table, console: Console) -> None:
        """A narrow terminal breaks the table's lines; rich would leave columns out."""
        width = console.width
        needed = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
        console.width = max(width, needed)
        console.print(table)
        console.width = width

    def sentences(self) -> Iterator[str]:
        yield self._recommendation()
        yield from self._short()
        yield from self._bottleneck()
        yield self._undivided()
        share = self.simulated.hit_limit()
        if store := store_sentence(self.profile, share, self.store_gb_per_s):
            yield store
        if self.is_example:
            yield (
                "These speeds are another's measurement, of random weights on one kind of "
                "GPU: run `tandem bench` on yours before you buy."
            )

    def as_json(self) -> dict[str, Any]:
        best, objectives = self.plan.best, self.objectives
        return {
            "prefill": best.nodes.prefill,
            "decode": best.nodes.decode,
            "objectives": asdict(objectives),
            "traffic": {
                "name": self.traffic.name,
                "requests": len(self.traffic.arrivals),
                "simulated": len(self.simulated.arrivals),
                "rate": self.simulated.rate,
                "mean_prompt": self.simulated.mean_prompt,
                "mean_output": self.simulated.mean_output,
                "hit_limit": self.simulated.hit_limit(),
            },
            "profile": {
                "name": self.profile.name,
                "model": self.profile.model,
                "gpu": self.profile.gpu,
                "gpus_per_node": self.profile.gpus,
                "date": self.profile.date,
                "is_example": self.is_example,
            },
            "outcomes": [self._row(label, outcome) for label, outcome in self._rows()],
            "recommendation": list(self.sentences()),
        }

    def _rows(self) -> Iterator[tuple[str, Forecast]]:
        plan = self.plan
        yield "recommended", plan.best
        for outcome in plan.around:
            yield _difference(plan.best.nodes, outcome.nodes), outcome
        yield "as many, undivided", plan.same_undivided
        fewest = plan.fewest_undivided
        if fewest is not None and fewest.nodes != plan.same_undivided.nodes:
            yield "fewest undivided that meet both", fewest

    def _row(self, label: str, outcome: Forecast) -> dict[str, Any]:
        figures = asdict(outcome)
        figures["nodes"] = {"prefill": outcome.nodes.prefill, "decode": outcome.nodes.decode}
        figures["gpus"] = outcome.nodes.total * self.profile.gpus
        figures["meets"] = outcome.meets(self.objectives)
        if self.price:
            out, both = self.cost(outcome)
            figures["cost_per_million_output_tokens"] = out
            figures["cost_per_million_tokens"] = both
        return {"label": label, **figures}

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        tail = self.objectives.tail
        heads = [
            "",
            "nodes",
            f"TTFT p50/{tail}",
            f"ITL p50/{tail}",
            "in time",
            "P/D busy",
            "cached",
        ]
        for number, head in enumerate([*heads, "1M out"] if self.price else heads):
            table.add_column(head, justify="right" if number > 1 else "left", no_wrap=True)
        for label, outcome in self._rows():
            prefill = f"{outcome.prefill_busy:.0%}" if outcome.nodes.prefill else "-"
            cells = [
                "✓" if outcome.meets(self.objectives) else "✗",
                str(outcome.nodes),
                f"{1e3 * outcome.ttft_p50_s:.0f}/{1e3 * outcome.ttft_tail_s:.0f} ms",
                f"{1e3 * outcome.itl_p50_s:.1f}/{1e3 * outcome.itl_tail_s:.1f} ms",
                f"{outcome.attained:.1%}",
                f"{prefill}/{outcome.decode_busy:.0%}",
                f"{outcome.prefill_hit:.0%}",
            ]
            if self.price:
                cells.append(f"{self.cost(outcome)[0]:.3f}")
            table.add_row(*cells, style="bold" if label == "recommended" else "")
        return table

    def _traffic_line(self) -> str:
        traffic, part = self.traffic, self.simulated
        text = (
            f"{traffic.name}: {part.rate:.2f} requests/s, {part.mean_prompt:.0f} tokens in and "
            f"{part.mean_output:.0f} out on average, at most {part.hit_limit():.0%} cached"
        )
        if len(part.arrivals) < len(traffic.arrivals):
            text += (
                f" in the busiest {part.span_s:.0f} s ({len(part.arrivals)} of "
                f"{len(traffic.arrivals)} requests), which are simulated"
            )
        return text + "."

    def _profile_line(self) -> str:
        profile = self.profile
        gpus = f"{profile.gpus} × {profile.gpu or 'GPU of an unknown kind'}"
        return f"{profile.name}, {profile.model}; a node is {gpus}; measured {profile.date}."

    def _recommendation(self) -> str:
        best, limits = self.plan.best, self.objectives
        text = (
            f"Recommended: {_counted(best.nodes.prefill, 'prefill node')} and "
            f"{_counted(best.nodes.decode, 'decode node')}: TTFT "
            f"{limits.tail} {1e3 * best.ttft_tail_s:.0f} ms (objective {1e3 * limits.ttft_s:.0f}), "
            f"ITL {limits.tail} {1e3 * best.itl_tail_s:.1f} ms (objective {1e3 * limits.itl_s:g})"
        )
        if self.price:
            text += f", {self.cost(best)[0]:.3f} per million tokens of answers"
        return text + "."

    def _bottleneck(self) -> Iterator[str]:
        best, limits = self.plan.best, self.objectives
        tier = "prefill" if best.prefill_busy >= best.decode_busy else "decode"
        yield (
            f"The {tier} tier is the bottleneck: prefill nodes compute {best.prefill_busy:.0%} of "
            f"the time, and decode nodes run {best.decode_busy:.0%} of the sequences that the ITL "
            f"objective and their KV cache allow. TTFT {limits.tail} is at "
            f"{best.ttft_tail_s / limits.ttft_s:.0%} of its objective, ITL {limits.tail} at "
            f"{best.itl_tail_s / limits.itl_s:.0%}."
        )
        for outcome in self.plan.around:
            change = _difference(best.nodes, outcome.nodes)
            verdict = "both objectives hold" if outcome.meets(limits) else "an objective fails"
            if not outcome.keeps_up:
                verdict = "prompts come faster than they are computed, so ever more will wait"
            yield (
                f"With {change}: TTFT {limits.tail} {1e3 * outcome.ttft_tail_s:.0f} ms, "
                f"ITL {limits.tail} {1e3 * outcome.itl_tail_s:.1f} ms, "
                f"{outcome.attained:.1%} in time; {verdict}."
            )

    def _short(self) -> Iterator[str]:
        """Says where too short a part of the traffic was simulated."""
        simulated = self.simulated
        settled_s = self.objectives.settled_s(simulated.mean_output)
        if simulated.goes_on and simulated.span_s < _SHORT * settled_s:
            count = min(MAX_REQUESTS, math.ceil(simulated.rate * settled_s))
            yield (
                f"{len(simulated.arrivals)} requests are {simulated.span_s:.1f} s of this traffic, "
                f"and nodes fill up in {settled_s:.0f} s: it may take more of them. Give "
                f"--requests {count}, which takes longer."
            )

    def _undivided(self) -> str:
        plan, tail = self.plan, self.objectives.tail
        total, fewest, same = plan.best.nodes.total, plan.fewest_undivided, plan.same_undivided
        text = (
            f"{_counted(total, 'undivided node')} would have a TTFT {tail} of "
            f"{1e3 * same.ttft_tail_s:.0f} ms and an ITL {tail} of {1e3 * same.itl_tail_s:.1f} ms"
        )
        if fewest is None:
            return f"{text}; no number of them up to {4 * total} meets both objectives."
        count = fewest.nodes.decode
        if count < total:
            meet = "meets" if count == 1 else "meet"
            return (
                f"{text}; {count} of them {meet} both objectives already: "
                "for this traffic do not divide (prefill.enabled: false), it takes fewer nodes."
            )
        if count == total:
            return f"{text}, which meets both objectives as well: dividing saves no node here."
        return f"{text}; it takes {count} of them to meet both."


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _difference(best: Nodes, other: Nodes) -> str:
    more = other.total > best.total
    tier = "prefill" if other.prefill != best.prefill else "decode"
    return f"one {'more' if more else 'less'} {tier} node"
