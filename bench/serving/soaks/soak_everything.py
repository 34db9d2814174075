"""Asks of a cluster, and does to it, what `bench.serving.soak --everything` adds to the usual.

Requests by their number: plain ones, adapters, grammars, what repeats itself (for drafts), streams,
images, turns of conversations. Beside them an adapter comes and goes under a further name, and the
node that can be both changes its role. All answers are pure functions of the request's number.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image

from cli.switch_role import NoSwitch, SwitchSettings, switch_role
from edge.security.config import SecurityConfig
from edge.security.credentials import Credentials
from tests.engine.lora.adapter_checkpoints import AdapterShape, write_adapter

NODE_ARGS = (
    "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "8",
)  # fmt: skip
DECODE_ARGS = (
    "--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 3}),
    "--data-parallel-size", "2",
)  # fmt: skip
"""Are for nodes that always decode: one that changes its role takes neither."""
SEES = "sees"
"""The model that sees images, beside the demo checkpoint."""
_NUM_KINDS = 7
_NUM_ADAPTERS = 3
"""One more than host memory holds: they are read again and again."""
_RANK = 8
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bo", "Cy"]}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_CHURN_S = 4.0
_SWITCH_S = 40.0


def write_adapters(folder: Path, model: Path) -> None:
    """Writes adapters `g0` ... for the attention of a checkpoint."""
    for seed in range(_NUM_ADAPTERS):
        shape = AdapterShape(seed, rank=_RANK, targets=("q_proj", "v_proj"))
        write_adapter(folder / f"g{seed}", model, shape)


def request_of(number: int, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns path and body of a request whose plain form is `body`."""
    match number % _NUM_KINDS:
        case 1:
            return "/v1/completions", {**body, "model": f"g{number // _NUM_KINDS % _NUM_ADAPTERS}"}
        case 2:
            form = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
            sampling = {"temperature": 0.8, "seed": number, "response_format": form}
            return _chat("demo", f"Tell me about {number}.", max_tokens=60, **sampling)
        case 3:
            repeated = [20 + number, 30, 40, 50 + number] * 12
            return "/v1/completions", {**body, "prompt": repeated, "max_tokens": 40}
        case 4:
            return "/v1/completions", {**body, "stream": True}
        case 5:
            parts = [picture(number % 5), {"type": "text", "text": f"w{number} w7 w9"}]
            return _chat(SEES, parts, max_tokens=4 + number, temperature=0.0, ignore_eos=True)
    return "/v1/completions", body


def _chat(model: str, content: Any, **sampling: Any) -> tuple[str, dict[str, Any]]:
    message = {"role": "user", "content": content}
    return "/v1/chat/completions", {"model": model, "messages": [message], **sampling}


def is_as_asked(number: int, text: str) -> bool:
    """Returns whether an answer that has a schema is what that says; one may be cut off."""
    if number % _NUM_KINDS != 2 or not text.endswith("}"):
        return True
    return set(json.loads(text)) == {"name", "age"}


@cache
def picture(seed: int) -> dict[str, Any]:
    """Returns a part of a chat with an image of noise."""
    noise = random.Random(seed).randbytes(150 * 110 * 3)
    data = io.BytesIO()
    Image.frombytes("RGB", (150, 110), noise).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


class Operator:
    """Loads and unloads, and changes roles, while others ask.

    Attributes:
        outcomes: What became of the calls.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self._session = session
        self._url = url
        self._random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    async def load_all(self) -> None:
        """Raises `RuntimeError` where an adapter cannot be loaded."""
        for index in range(_NUM_ADAPTERS):
            status = await self._call("load", lora_name=f"g{index}", lora_path=f"g{index}")
            if status != 200:
                raise RuntimeError(f"adapter g{index} cannot be loaded: status {status}")

    async def churn_forever(self) -> None:
        """Gives one adapter's weights a second name, and takes it away."""
        while True:
            path = f"g{self._random.randrange(_NUM_ADAPTERS)}"
            await self._call("load", lora_name="other", lora_path=path, load_inplace=True)
            await asyncio.sleep(_CHURN_S)
            await self._call("unload", lora_name="other")
            await asyncio.sleep(_CHURN_S)

    async def switch_forever(self, node: str) -> None:
        """Changes the role of the node at this gRPC address, there and back."""
        credentials = Credentials(SecurityConfig())
        while True:
            for role in ("decode", "prefill"):
                await asyncio.sleep(_SWITCH_S)
                settings = SwitchSettings(
                    node=node, to=role, drain_timeout_s=20.0, wait_s=120.0, _cli_parse_args=[]
                )
                try:
                    await switch_role(settings, credentials)
                    self.outcomes[f"role {role}"] += 1
                except NoSwitch as error:
                    self.outcomes[f"no role: {str(error)[:100]}"] += 1

    async def _call(self, what: str, **body: Any) -> int:
        url = f"{self._url}/v1/{what}_lora_adapter"
        named = {"base_model_name": "demo", **body}
        async with self._session.post(url, json=named) as response:
            detail = "" if response.status == 200 else f": {(await response.text())[:160]}"
        self.outcomes[f"{what} {response.status}{detail}"] += 1
        return response.status
