#!/usr/bin/env python3
"""Lets a model with random weights answer under public schemas, on one node and on clusters.

    1. the schemas that are accepted, of those in `public_schemas.json.xz`
    2. one node answers each of them, twice: new schemas, and known ones
    3. a cluster of one prefill and two decode nodes does
    4. the same while its decode nodes are killed in turn, and answers go on elsewhere
    5. all answers must be the same, token for token; documents that ended by themselves must be
       valid by another validator

    python -m bench.serving.structured
    python -m bench.serving.structured --model FOLDER --device cuda

Exit code 1 when an answer differs, or a document is invalid.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
from matplotlib import pyplot

from bench.record import RESULTS, write_result
from bench.serving.node_metrics import read_metrics
from bench.serving.public_schemas import public_schemas
from bench.serving.report import distribution_ms
from cli.cluster import DEMO_CHECKPOINT, UpSettings, cluster_specs, free_ports
from cli.supervisor import Listener, Service, ServiceState, Supervisor
from cli.up import wait_routable

_AT_ONCE = 16
_CLOSING = ('"', '"}', "}", "]", '",', '":', "},", "]}", '"]')
"""Texts whose tokens are made likely: with random weights strings would hardly ever end."""
_PYTHON_CANNOT = re.compile(r"\\\\p\{")


@dataclass(frozen=True, slots=True)
class Answer:
    """`status` 400 has no tokens; `said` is then why, and the text otherwise."""

    status: int
    said: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    first_s: float = 0.0
    """Seconds until the first event."""


class Cluster:
    """Processes on this machine. `url` answers requests."""

    def __init__(self, supervisor: Supervisor, url: str) -> None:
        self.supervisor = supervisor
        self.url = url

    @property
    def decodes(self) -> list[Service]:
        return [s for s in self.supervisor.services if s.spec.name.startswith("decode")]

    async def metrics(self, client: aiohttp.ClientSession) -> Counter[str]:
        """Returns the sum of what all decode nodes tell."""
        found: Counter[str] = Counter()
        for service in self.decodes:
            found.update(await read_metrics(client, f"{service.spec.endpoint}/metrics"))
        return found


@contextmanager
def random_model() -> Iterator[Path]:
    """Returns the demo checkpoint without its weights: nodes then draw the same random ones."""
    with tempfile.TemporaryDirectory() as name:
        for file in DEMO_CHECKPOINT.iterdir():
            if file.suffix == ".json":
                shutil.copy(file, name)
        yield Path(name)


@asynccontextmanager
async def running(args: argparse.Namespace, prefill: int, decode: int) -> AsyncIterator[Cluster]:
    (port,) = free_ports(1)
    settings = UpSettings(
        model=str(args.model), prefill=prefill, decode=decode, device=args.device, port=port
    )
    specs = cluster_specs(settings, ["--load-format", "dummy"] if args.is_random else [])
    lines: list[str] = []
    listener = Listener(on_log=lambda service, line: lines.append(f"{service.spec.name}: {line}"))
    supervisor = Supervisor(specs, listener, max_pause_s=0.5)
    try:
        await supervisor.start()
        async with asyncio.timeout(300):
            await wait_routable(specs[0].endpoint, settings)
        yield Cluster(supervisor, specs[0].endpoint)
    except BaseException:
        print("\n".join(lines[-40:]), file=sys.stderr)
        raise
    finally:
        await supervisor.stop()


def body_of(number: int, max_tokens: int, bias: dict[str, float]) -> bytes:
    """Returns the request of a schema; the prompt names it, so that no two share a prefix."""
    schema = public_schemas()[number]
    form = {"name": "answer", "schema": schema.schema}
    body = {
        "prompt": f"{number}: {schema.place[:60]}",
        "response_format": {"type": "json_schema", "json_schema": form},
        "max_tokens": max_tokens,
        "seed": number,
        "temperature": 1.0,
        "logit_bias": bias,
        "stream": True,
        "return_token_ids": True,
    }
    return json.dumps(body).encode()


async def ask(client: aiohttp.ClientSession, url: str, body: bytes) -> Answer:
    started = time.perf_counter()
    headers = {"content-type": "application/json"}
    async with client.post(f"{url}/v1/completions", data=body, headers=headers) as response:
        if response.status != 200:
            error = (await response.json())["error"]
            return Answer(response.status, error["message"])
        text, ids, reason, first_s = "", [], "", 0.0
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            first_s = first_s or time.perf_counter() - started
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                return Answer(500, chunk["error"]["message"])
            for choice in chunk["choices"]:
                text += choice["text"]
                ids += choice.get("token_ids") or []
                reason = choice["finish_reason"] or reason
        return Answer(200, text, tuple(ids), reason, first_s)


async def ask_all(client: aiohttp.ClientSession, url: str, bodies: Sequence[bytes]) -> list[Answer]:
    """Asks many at a time; whoever is told to come later does."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(body: bytes) -> Answer:
        async with room:
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    answer = await ask(client, url, body)
                    if answer.status not in (429, 503):
                        return answer
                await asyncio.sleep(0.1)

    return await asyncio.gather(*map(one, bodies))


async def kill_in_turn(cluster: Cluster, every_s: float, killed: list[str]) -> None:
    """Kills decode nodes, never one while another is down, for ever."""
    while True:
        for service in cluster.decodes:
            await asyncio.sleep(every_s)
            async with asyncio.timeout(120):
                while any(s.state is not ServiceState.READY for s in cluster.decodes):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert service.pid is not None
            os.kill(service.pid, signal.SIGKILL)
            killed.append(service.spec.name)


def faults_of(number: int, answer: Answer) -> str:
    """Returns what is wrong with a document that ended by itself, or ""."""
    schema = public_schemas()[number].schema
    if _PYTHON_CANNOT.search(json.dumps(schema)):
        return ""
    kind = jsonschema.validators.validator_for(
        schema if isinstance(schema, dict) else {}, default=jsonschema.Draft202012Validator
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            document = json.loads(answer.said)
        except ValueError as error:
            return f"no JSON: {error}"
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        return next((error.message for error in validator.iter_errors(document)), "")


def closing_bias(model: Path) -> dict[str, float]:
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return {str(vocabulary[text]): 4.0 for text in _CLOSING if text in vocabulary}


class Bench:
    """Collects the answers of each kind of cluster to the same requests."""

    def __init__(self, args: argparse.Namespace) -> None:
        bias = closing_bias(args.model)
        self.numbers = list(range(len(public_schemas())))[: args.schemas]
        self._bodies = [body_of(number, args.max_tokens, bias) for number in self.numbers]
        self._args = args
        self.answers: dict[str, list[Answer]] = {}
        self.figures: dict[str, Any] = {}

    async def one_node(self, client: aiohttp.ClientSession) -> None:
        async with running(self._args, 0, 1) as cluster:
            await ask(client, cluster.url, self._bodies[0])
            for name in ("one node", "one node, known"):
                before = await cluster.metrics(client)
                self.answers[name] = await ask_all(client, cluster.url, self._bodies)
                self.figures[name] = self._times(name, await cluster.metrics(client) - before)
            good = [
                n
                for n, a in zip(self.numbers, self.answers["one node"], strict=True)
                if a.status == 200
            ]
            self.numbers = good
            self._bodies = [self._bodies[n] for n in good]
            for name, answers in self.answers.items():
                self.answers[name] = [answers[n] for n in good]

    async def cluster(self, client: aiohttp.ClientSession) -> None:
        async with running(self._args, 1, 2) as cluster:
            await ask(client, cluster.url, self._bodies[0])
            self.answers["1P2D"] = await ask_all(client, cluster.url, self._bodies)
            self.figures["1P2D"] = self._times("1P2D", await cluster.metrics(client))
            killed: list[str] = []
            killing = asyncio.create_task(kill_in_turn(cluster, self._args.kill_every, killed))
            try:
                self.answers["killed"] = await ask_all(client, cluster.url, self._bodies)
            finally:
                killing.cancel()
                await asyncio.gather(killing, return_exceptions=True)
            router = await read_metrics(client, f"{cluster.url}/metrics")
            self.figures["killed"] = {
                "nodes_killed": len(killed),
                "answers_that_moved": router.get("tandem_router_migrations_total", 0.0),
            }

    def judge(self) -> dict[str, Any]:
        """Returns the counts that decide."""
        expected = self.answers["one node"]
        differing = {
            name: sum(
                (a.token_ids, a.finish_reason) != (e.token_ids, e.finish_reason)
                for a, e in zip(answers, expected, strict=True)
            )
            for name, answers in self.answers.items()
        }
        ended = [
            (n, a) for n, a in zip(self.numbers, expected, strict=True) if a.finish_reason == "stop"
        ]
        faults = {n: fault for n, answer in ended if (fault := faults_of(n, answer))}
        for number, fault in faults.items():
            print(f"{public_schemas()[number].place}: {fault}", file=sys.stderr)
        return {
            "schemas": min(len(public_schemas()), self._args.schemas),
            "refused_by_name": min(len(public_schemas()), self._args.schemas) - len(expected),
            "answers": len(expected),
            "failed": sum(a.status != 200 for answers in self.answers.values() for a in answers),
            "ended_by_stop": len(ended),
            "invalid_of_these": len(faults),
            "tokens": sum(len(a.token_ids) for a in expected),
            "answers_that_differ_from_one_node": differing,
        }

    def _times(self, name: str, metrics: Counter[str]) -> dict[str, Any]:
        """Returns times a token and a grammar, from what nodes counted meanwhile."""
        masks = metrics["tandem_grammar_masks_total"]
        checks = metrics["tandem_grammar_checks_total"]
        compiled = metrics["tandem_grammar_compile_seconds_count"]
        first = [a.first_s for a in self.answers[name] if a.status == 200]
        return {
            "first_event_ms": distribution_ms(first),
            "check_ms_mean": _mean_ms(metrics["tandem_grammar_check_seconds_total"], checks),
            "compile_ms_mean": _mean_ms(metrics["tandem_grammar_compile_seconds_sum"], compiled),
            "mask_us_mean": 1e3 * _mean_ms(metrics["tandem_grammar_mask_seconds_sum"], masks),
        }


def _mean_ms(seconds: float, count: float) -> float:
    return round(1e3 * seconds / count, 4) if count else 0.0


async def run(args: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(args)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        await bench.one_node(client)
        await bench.cluster(client)
    return {**bench.judge(), "times": bench.figures}


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draws when the first event came, by kind of cluster."""
    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    times = {k: v["first_event_ms"] for k, v in figures["times"].items() if "first_event_ms" in v}
    for i, part in enumerate(("p50", "p90", "p99")):
        places = [place + 0.25 * i for place in range(len(times))]
        axes.bar(places, [values[part] for values in times.values()], 0.25, label=part)
    axes.set_xticks([place + 0.25 for place in range(len(times))], list(times))
    axes.set_ylabel("ms until the first event")
    axes.set_title(f"{figures['answers']} answers under public schemas, {_AT_ONCE} at a time")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemas", type=int, default=10_000, help="the first so many")
    parser.add_argument("--max-tokens", type=int, default=150)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kill-every", type=float, default=3.0, help="seconds")
    parser.add_argument("--name", default="structured", help="name of the result file")
    args = parser.parse_args()
    args.is_random = args.model is None
    with contextlib.ExitStack() as stack:
        args.model = args.model or stack.enter_context(random_model())
        figures = asyncio.run(run(args))
    print(json.dumps(figures, indent=1))
    print(f"written: {write_result(args.name, figures).name}")
    plot(figures, RESULTS / f"{args.name}.png")
    wrong = figures["invalid_of_these"] + figures["failed"]
    return 1 if wrong + sum(figures["answers_that_differ_from_one_node"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
