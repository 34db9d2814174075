"""GuideLLM: a short benchmark, over chats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TOKENIZER = Path(__file__).parents[2] / "cli" / "demo_checkpoint"
REQUESTS = 6

POLL_S = "1"
"""How long GuideLLM waits for the next completion once all requests were answered. What comes
later it leaves out of its report, without a word: by default that is 0.1 s, which a busy machine
can need for one of them."""


def check(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "guidellm", "run", "--disable-console"),
                *("--backend", f"kind=openai_http,target={url},model=demo"),
                *("--profile", "kind=concurrent,streams=2"),
                *("--constraint", f"kind=max_requests,count={REQUESTS}"),
                *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
                *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
                *("--output", f"kind=json,path={report}"),
            ],
            check=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "GUIDELLM__MP_POLL_INTERVAL": POLL_S},
        )
        [benchmark] = json.loads(report.read_text())["benchmarks"]
    # Its metrics may leave requests out that it has made, by the window that it measures in.
    made = benchmark["scheduler_metrics"]["requests_made"]
    assert (made["successful"], made["errored"], made["incomplete"]) == (REQUESTS, 0, 0), made
    measured = benchmark["requests"]["successful"]
    assert measured
    for request in measured:
        assert request["output_tokens"] == 8 and request["prompt_tokens"] >= 16, request


if __name__ == "__main__":
    check(sys.argv[1])
