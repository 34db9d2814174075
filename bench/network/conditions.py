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
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from bench.arguments import parser_of
from bench.record import write_result
from tests.lossy_switch import Conditions, LossySwitch, opened_switch

PREFILLS = ("p0", "p1")
DECODES = ("d0", "d1")
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
_LONG, _SHORT = 1250, 40
_NUM_TOKENS = 12
_NUM_SHORT = 4
_SHORT_AFTER_S = 0.5
_PATIENCE_S = 180.0
_READY_S = 60.0
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


@dataclass(slots=True)
class Answer:
    """Holds what a client saw. Times are seconds from the request's start."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    prefill_node: str = ""
    error: str = ""

    @property
    def longest_silence_s(self) -> float:
        return max(late - soon for soon, late in zip([0.0, *self.times], self.times, strict=False))


class Nodes:
    """The processes of one row."""

    def __init__(self, switch: LossySwitch, model: str, log: Path) -> None:
        self._switch = switch
        self._model = model
        self._log = log
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        where = self._switch.addresses
        for name in PREFILLS:
            self._start(name, "prefill_node", "--host", where[name], "--port", "5000", *self._node)
        for name in DECODES:
            ports = ("--port", "8100", "--grpc-port", "9100")
            self._start(name, "decode_node", "--host", where[name], *ports, *self._node)
        self._start(
            "r", "router", "--host", where["r"], "--port", "8000", "--allow-plaintext",
            "--prefill", ",".join(f"{where[name]}:5000" for name in PREFILLS),
            "--decode", ",".join(f"{where[name]}:8100/9100" for name in DECODES),
        )  # fmt: skip

    @property
    def _node(self) -> tuple[str, ...]:
        return ("--model", self._model, "--served-model-name", "m", *_NODE_ARGS)

    def _start(self, host: str, module: str, *args: str) -> None:
        with self._switch.on(host), self._log.open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *args],
                    stdout=log, stderr=log, start_new_session=True,
                )
            )  # fmt: skip

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self._processes):
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def prompt(num_tokens: int, seed: str) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 2048) for _ in range(num_tokens)]


async def ask(session: aiohttp.ClientSession, url: str, tokens: list[int], answer: Answer) -> None:
    body = {
        "model": "m", "prompt": tokens, "max_tokens": _NUM_TOKENS, "seed": 1, "stream": True,
        "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    at = time.monotonic()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer.prefill_node = response.headers.get("x-tandem-prefill-node", "")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                for choice in event.get("choices", ()):
                    new = choice.get("token_ids") or ()
                    answer.tokens += new
                    answer.times += [time.monotonic() - at] * len(new)
                if "error" in event:
                    answer.error = str(event["error"])
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = repr(error)


async def wave(url: str, num_long: int, seed: str) -> tuple[list[Answer], list[Answer]]:
    """Returns the answers to long and to short prompts."""
    long, short = [[Answer() for _ in range(count)] for count in (num_long, _NUM_SHORT)]
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
        for i, answer in enumerate(long):
            tasks.create_task(ask(session, url, prompt(_LONG, f"{seed}-long-{i}"), answer))
        await asyncio.sleep(_SHORT_AFTER_S)
        for i, answer in enumerate(short):
            tasks.create_task(ask(session, url, prompt(_SHORT, f"{seed}-short-{i}"), answer))
    return long, short


def figures_of(answers: Sequence[Answer]) -> dict[str, object]:
    whole = [answer for answer in answers if len(answer.times) > 1]
    firsts, seconds = ([answer.times[i] for answer in whole] for i in (0, 1))
    places = Counter(answer.prefill_node for answer in answers)
    return {
        "first token s p50": round(statistics.median(firsts), 2) if whole else None,
        "second token s p50": round(statistics.median(seconds), 2) if whole else None,
        "second token s max": round(max(seconds), 2) if whole else None,
        "longest silence s": round(max(a.longest_silence_s for a in whole), 2) if whole else None,
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
        long, short = await wave(url, row.num_long, f"wave-{number}")
        for kind, answers in (("long", long), ("short", short)):
            figures[f"wave {number}, {kind}"] = figures_of(answers)
            for i, answer in enumerate(answers):
                name = f"{number}-{kind}-{i}"
                num_wrong += right.setdefault(name, answer.tokens) != answer.tokens
    return {**figures, "other answers than in the first row": num_wrong}


async def until_ready(url: str) -> None:
    """Returns once a prompt goes all the way. Raises TimeoutError."""
    async with asyncio.timeout(_READY_S), aiohttp.ClientSession() as session:
        for i in range(1000):
            answer = Answer()
            await ask(session, url, prompt(_SHORT, f"ready-{i}"), answer)
            if answer.tokens and answer.prefill_node not in ("", "local"):
                break
            await asyncio.sleep(0.5)
        # Each pair of nodes has connections, and has computed something, before it counts.
        for i in range(12):
            await ask(session, url, prompt(_LONG // 4, f"warm-{i}"), Answer())


@contextmanager
def running(switch: LossySwitch, model: str) -> Iterator[None]:
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        nodes = Nodes(switch, model, Path(log.name))
        try:
            nodes.start()
            yield
        except BaseException:
            print(Path(log.name).read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            nodes.stop()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--name", default="network")
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
