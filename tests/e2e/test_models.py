"""Two versions of a model behind one router: sessions keep theirs, and an answer whose version dies
is never ended by other weights."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

QUESTION = {"prompt": [7, 8, 9, 10], "max_tokens": 60, "ignore_eos": True, "temperature": 0.0}
SPLIT = '[aliases]\n"gpt-4o" = "demo"\n[splits.demo]\nv1 = 50\nv2 = 50\n'


def other_weights(checkpoint: Path, folder: Path) -> Path:
    """Makes a checkpoint of the same shape that says other things."""
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("o_proj.weight"))
    save_file({**tensors, name: -tensors[name]}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.e2e
async def test_an_answer_stays_with_the_weights_that_began_it(
    start_cluster: Any, complete: Any, http: Any, demo_checkpoint: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(SPLIT)
    second = other_weights(demo_checkpoint, tmp_path / "second")
    cluster = await start_cluster(
        prefill=0,
        each_decode_args=[
            ["--served-model-name", "v1"],
            ["--served-model-name", "v2", "--model", str(second)],
        ],
        router_args=["--model-rules-file", str(rules), "--resume-timeout-s", "1"],
    )
    texts = {
        name: (await complete(cluster.url, **QUESTION, model=name)).text for name in ("v1", "v2")
    }
    assert len(set(texts.values())) == 2, "the checkpoints say different things"

    sessions: dict[str, str] = {}
    for i in range(40):
        body = {**QUESTION, "model": "gpt-4o"}
        header = {"x-session-id": f"s{i}"}
        async with http.post(f"{cluster.url}/v1/completions", json=body, headers=header) as answer:
            version = answer.headers["x-tandem-model-version"]
            told = await answer.json()
        assert told["model"] == "gpt-4o"
        assert told["choices"][0]["text"] == texts[version]
        sessions.setdefault(version, f"s{i}")
        if len(sessions) == 2:
            break
    assert set(sessions) == {"v1", "v2"}

    async with http.get(f"{cluster.url}/v1/models") as answer:
        listed = {card["id"]: card for card in (await answer.json())["data"]}
    assert set(listed) == {"demo", "gpt-4o", "v1", "v2"}
    assert listed["demo"]["versions"] == {"v1": 0.5, "v2": 0.5}

    def kill(nth: int) -> None:
        if nth == 8:
            os.kill(cluster.decodes[1].pid, signal.SIGKILL)

    cut = await complete(
        cluster.url, **QUESTION, headers={"x-session-id": sessions["v2"]}, on_event=kill
    )
    assert cut.error is not None or cut.text == texts["v2"]
    assert texts["v2"].startswith(cut.text)
    other = await complete(cluster.url, **QUESTION, headers={"x-session-id": sessions["v1"]})
    assert (other.error, other.text) == (None, texts["v1"])
