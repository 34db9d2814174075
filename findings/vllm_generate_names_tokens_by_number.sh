#!/usr/bin/env bash
# vLLM 0.33.0, renderers 0.1.12 (verifiers, prime-rl), TRL 1.16.0: trainers cannot read the log probabilities of
# `/inference/v1/generate`.
#
# Both read the name of each token in `logprobs.content`: renderers wants `"token": "token_id:7"` and TRL takes the number
# from behind that colon. vLLM 0.33 has `"token_id": 7` there and no `token` (its `GenerateLogProbsContent`), so every
# rollout of verifiers' TrainClient ends with a MalformedGenerateResponseError, and every one of TRL with images with a
# KeyError, behind a whole answer that has been computed. Guessed before: that clients read what the newest vLLM writes,
# as both packages name this path as vLLM's. A server that writes both names is read by all.
#
# Seen on 2026-11-29 with Python 3.11; vLLM's class is read out of its wheel, of which 60 kB are fetched:
#     fields of vLLM's entries: logprob, rank, token_id, top_logprobs
#     renderers: MalformedGenerateResponseError: Engine response choice.logprobs.content[0].token must be 'token_id:7'.
#     TRL: KeyError: 'token'
#     renderers, with both names: [-0.5]
#     TRL, with both names: ([[[-0.5]]], [[[7]]])
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
pip=(environment/bin/python -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install renderers==0.1.12 httpx 2>errors || { cat errors; exit 1; }
"${pip[@]}" download --no-deps --dest wheels trl==1.16.0 2>errors || { cat errors; exit 1; }
"${pip[@]}" install --dry-run --ignore-installed --no-deps --report vllm.json vllm==0.33.0 2>errors || { cat errors; exit 1; }
cat > run.py << 'PY'
import ast
import glob
import io
import json
import math
import urllib.request
import zipfile

from pydantic import BaseModel

from renderers.client import _parse_completion_logprobs

FOLDER = "vllm/entrypoints/scale_out/token_in_token_out"


class Remote(io.RawIOBase):
    """A file at a URL, of which only what is read is fetched."""

    def __init__(self, url):
        self.url, self.at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as answer:
            self.size = int(answer.headers["content-length"])

    def seekable(self):
        return True

    def tell(self):
        return self.at

    def seek(self, offset, whence=0):
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def read(self, count=-1):
        count = min(count if count >= 0 else self.size, self.size - self.at)
        if count <= 0:
            return b""
        span = {"Range": f"bytes={self.at}-{self.at + count - 1}"}
        with urllib.request.urlopen(urllib.request.Request(self.url, headers=span)) as answer:
            assert answer.status == 206, "the index sends no parts of files"
            data = answer.read()
        self.at += count
        return data


def tried(title, ask):
    try:
        print(f"{title}: {ask()}")
    except Exception as error:
        print(f"{title}: {type(error).__name__}: {error}")


url = json.load(open("vllm.json"))["install"][0]["download_info"]["url"]
with zipfile.ZipFile(Remote(url)) as wheel:
    source = wheel.read(f"{FOLDER}/protocol.py").decode()
space = {"BaseModel": BaseModel}
for node in ast.parse(source).body:
    if isinstance(node, ast.ClassDef) and node.name in ("GenerateLogProb", "GenerateLogProbsContent"):
        exec(compile(ast.Module([node], []), FOLDER, "exec"), space)
(name,) = glob.glob("wheels/trl-*.whl")
with zipfile.ZipFile(name) as wheel:
    tree = ast.parse(wheel.read("trl/generation/vllm_client.py").decode())
(node,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "parse_logprobs"]
trl = {"math": math}
exec(compile(ast.Module([node], []), name, "exec"), trl)

entry = space["GenerateLogProbsContent"](token_id=7, logprob=-0.5, rank=1).model_dump()
print("fields of vLLM's entries:", ", ".join(sorted(entry)))
for end, content in (("", entry), (", with both names", {**entry, "token": "token_id:7"})):
    logprobs = {"content": [content]}
    tried(f"renderers{end}", lambda: _parse_completion_logprobs({"logprobs": logprobs}, [7]))
    tried(f"TRL{end}", lambda: trl["parse_logprobs"]([logprobs]))
PY
environment/bin/python run.py 2>errors | tee output || { cat errors; exit 1; }
diff output - << 'TEXT'
fields of vLLM's entries: logprob, rank, token_id, top_logprobs
renderers: MalformedGenerateResponseError: Engine response choice.logprobs.content[0].token must be 'token_id:7'.
TRL: KeyError: 'token'
renderers, with both names: [-0.5]
TRL, with both names: ([[[-0.5]]], [[[7]]])
TEXT
