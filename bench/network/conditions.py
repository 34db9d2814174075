#!/usr/bin/env python3
"""Measures a cluster whose KV crosses a bad network: a row for each condition.

    python -m bench.network.conditions                      all rows, half a minute to a minute each
    python -m bench.network.conditions --rows clean black-hole 20mbit-6

A router, two prefill and two decode nodes, each in a network namespace, on a switch of our own
(`tests.lossy_switch`), with random weights of 16 KiB of KV a token. A row has nodes of its own, and
the condition from the first prompt on, on all paths between prefill and decode nodes unless its
name says otherwise. It has two waves of fresh long prompts (1250 tokens, 20.5 MB of KV), all at
once, and short ones (40 tokens) half a second later. What the first wave teaches serves the second.

Reported of each wave: from a request's start to its first and second token, the longest silence of
an answer, how many prompts decode nodes computed themselves, and how many each prefill node did.
The answers must be those of the first row. Needs root. Writes bench/results/NAME.json.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.arguments import parser_of
from bench.engine.models.shapes import config_json
from bench.record import write_result
from bench.serving.openai_stream import Outcome, completion
from host.child_process import ChildProcess, stop_all
from host.termination import bound
from tests.lossy_switch import Conditions, LossySwitch, opened_switch

PREFILLS = ("p0", "p1")
DECODES = ("d0", "d1")
_MODEL = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
_CONFIG = {**config_json("tiny"), **_MODEL, **_HEADS, "max_position_embeddings": 4096}
_LONG, _SHORT = 1250, 40
_NUM_TOKENS = 12
_NUM_SHORT = 4
_SHORT_AFTER_S = 0.5
_PATIENCE_S = 180.0
_READY_S = 60.0
_STOP_S = 10.0
_MBIT = 1e6 / 8
_NODE_ARGS = (
    *("--load-format", "dummy", "--device", "cpu", "--allow-plaintext"),
    *("--max-model-len", "2048", "--num-blocks", "1024", "--block-size", "16"),
    *("--log-level", "warning"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One condition. `nodes`: the prefill nodes whose paths have it."""

    conditions: Conditions
    num_long: int = 2
    nodes: Sequence[str] = PREFILLS


ROWS = {
    "clean": Row(Conditions()),
    "delay-50": Row(Conditions(delay_s=0.05)),
    "loss-2%": Row(Conditions(delay_s=0.005, loss=0.02)),
    "corruption-1%": Row(Conditions(corruption=0.01)),
    "100mbit": Row(Conditions(rate=100 * _MBIT)),
    "20mbit": Row(Conditions(rate=20 * _MBIT)),
    "20mbit-6": Row(Conditions(rate=20 * _MBIT), num_long=6),
    "black-hole": Row(Conditions(mtu=1400)),
    "one-20mbit": Row(Conditions(rate=20 * _MBIT), num_long=4, nodes=("p0",)),
}


def commands(where: Mapping[str, str], model: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each host, and the module and flags of what runs there. `where`: addresses."""
    node = ["--model", model, "--served-model-name", "m", *_NODE_ARGS]
    for name in PREFILLS:
        yield name, ["prefill_node", "--host", where[name], "--port", "5000", *node]
    for name in DECODES:
        ports = ["--port", "8100", "--grpc-port", "9100"]
        yield name, ["decode_node", "--host", where[name], *ports, *node]
    prefills = ",".join(f"{where[name]}:5000" for name in PREFILLS)
    decodes = ",".join(f"{where[name]}:8100/9100" for name in DECODES)
    nodes = ["--prefill", prefills, "--decode", decodes]
    yield "r", ["router", "--host", where["r"], "--port", "8000", "--allow-plaintext", *nodes]


def prompt(num_tokens: int, seed: str) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 2048) for _ in range(num_tokens)]


async def ask(session: aiohttp.ClientSession, url: str, tokens: list[int]) -> Outcome:
    body = {
        "model": "m", "prompt": tokens, "max_tokens": _NUM_TOKENS, "seed": 1, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    return await completion(session, url, body, {})


async def wave(url: str, num_long: int, seed: str) -> dict[str, list[Outcome]]:
    """Returns the answers to long and to short prompts."""
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    tasks: dict[str, list[asyncio.Task[Outcome]]] = {}
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
        for kind, length, count in (("long", _LONG, num_long), ("short", _SHORT, _NUM_SHORT)):
            prompts = [prompt(length, f"{seed}-{kind}-{i}") for i in range(count)]
            tasks[kind] = [group.create_task(ask(session, url, one)) for one in prompts]
            await asyncio.sleep(_SHORT_AFTER_S)
    return {kind: [task.result() for task in found] for kind, found in tasks.items()}


def figures_of(answers: Sequence[Outcome]) -> dict[str, object]:
    whole = [answer for answer in answers if len(answer.chunks) > 1]
    firsts, seconds = ([answer.chunks[i] - answer.due for answer in whole] for i in (0, 1))
    silences = [answer.longest_silence_s for answer in whole]
    places = Counter(answer.prefill_node for answer in answers)
    return {
        "first token s p50": round(statistics.median(firsts), 2) if whole else None,
        "second token s p50": round(statistics.median(seconds), 2) if whole else None,
        "second token s max": round(max(seconds), 2) if whole else None,
        "longest silence s": round(max(silences), 2) if whole else None,
        "told as prefilled at": dict(sorted(places.items())),
        "errors": [answer.error for answer in answers if answer.error],
    }


async def measure(switch: LossySwitch, row: Row, right: dict[str, list[int]]) -> dict[str, object]:
    """Returns the figures of both waves. Adds to `right` answers that no row had before."""
    url = f"http://{switch.addresses['r']}:8000"
    await until_ready(url)
    for prefill in row.nodes:
        for decode in DECODES:
            switch.set(prefill, decode, row.conditions)
    figures: dict[str, object] = {}
    num_wrong = 0
    for number in (1, 2):
        for kind, answers in (await wave(url, row.num_long, f"wave-{number}")).items():
            figures[f"wave {number}, {kind}"] = figures_of(answers)
            for i, answer in enumerate(answers):
                name = f"{number}-{kind}-{i}"
                num_wrong += right.setdefault(name, answer.token_ids) != answer.token_ids
    return {**figures, "other answers than in the first row": num_wrong}


async def until_ready(url: str) -> None:
    """Returns once a prompt goes all the way. Raises TimeoutError."""
    async with asyncio.timeout(_READY_S), aiohttp.ClientSession() as session:
        for i in range(1000):
            answer = await ask(session, url, prompt(_SHORT, f"ready-{i}"))
            if answer.token_ids and answer.prefill_node not in ("", "local"):
                break
            await asyncio.sleep(0.5)
        # Each pair of nodes has connections, and has computed something, before it counts.
        for i in range(12):
            await ask(session, url, prompt(_LONG // 4, f"warm-{i}"))


@contextmanager
def running(switch: LossySwitch, model: str) -> Iterator[None]:
    children: list[ChildProcess] = []
    with tempfile.TemporaryFile() as log:
        try:
            for host, words in commands(switch.addresses, model):
                argv = bound([sys.executable, "-m", *words])
                with switch.on(host):
                    process = subprocess.Popen(argv, stdout=log, stderr=log)
                children.append(ChildProcess(process, host))
            yield
        except BaseException:
            log.seek(0)
            print(log.read().decode(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            stop_all(children[::-1], _STOP_S)


def main() -> None:
    parser = parser_of(__doc__, "network")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    args = parser.parse_args()
    figures: dict[str, object] = {}
    right: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(_CONFIG))
        for name in args.rows:
            with opened_switch("r", *PREFILLS, *DECODES) as switch, running(switch, model):
                figures[name] = asyncio.run(measure(switch, ROWS[name], right))
            print(json.dumps({name: figures[name]}), file=sys.stderr, flush=True)
            write_result(args.name, figures)


if __name__ == "__main__":
    main()
