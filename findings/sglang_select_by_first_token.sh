#!/usr/bin/env bash
# SGLang 0.5.23's frontend language with its own server: two of the three ways of `sgl.select` cannot choose.
#
# `select` asks the server for the log probabilities of each choice, from the token before the last of the prompt on.
# The server puts a null in front of them, since it has values of the tokens behind alone. `token_length_normalized`, the
# usual way, leaves nulls out; `greedy_token_selection` computes with them. `unconditional_likelihood_normalized` asks a
# second time, without `logprob_start_len`, which means no values of the prompt, and takes the first of them. Both end
# with an error, which `run` turns into a warning and a missing variable.
# Guessed before, from the three descriptions: that each chooses.
#
# Seen on 2026-11-30 with Python 3.11; what is needed is read out of the wheel, of which some hundred kB are fetched:
#     the server's values: [None, -0.5, -0.25]
#     token_length_normalized: blue
#     greedy_token_selection: TypeError
#     unconditional_likelihood_normalized: IndexError
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
pip=(environment/bin/python -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install numpy==2.4.0 2>errors || { cat errors; exit 1; }
"${pip[@]}" install --dry-run --ignore-installed --no-deps --report sglang.json sglang==0.5.23 2>errors \
  || { cat errors; exit 1; }
cat > run.py << 'PY'
import __future__

import ast
import io
import json
import urllib.request
import zipfile
from types import SimpleNamespace


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


url = json.load(open("sglang.json"))["install"][0]["download_info"]["url"]
wheel = zipfile.ZipFile(Remote(url))
FLAGS = __future__.annotations.compiler_flag


def part(path, kind, names, space):
    """Returns methods of a class of the wheel, without what its module imports."""
    tree = ast.parse(wheel.read(path).decode())
    (node,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind]
    node.body = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name in names]
    node.bases, node.decorator_list = [], []
    helpers = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    exec(compile(ast.Module([*helpers, node], []), path, "exec", FLAGS), space)
    return space[kind]


choices = {"__name__": "choices"}
exec(compile(wheel.read("sglang/lang/choices.py"), "choices.py", "exec"), choices)
server = part(
    "sglang/srt/managers/scheduler_components/logprob_result_processor.py",
    "SchedulerLogprobResultProcessor",
    ["_process_input_token_logprobs"],
    {},
)()
server.model_config = SimpleNamespace(vocab_size=100)
server._uses_scoring_positions = lambda request: False
frontend = part("sglang/lang/backend/runtime_endpoint.py", "RuntimeEndpoint", ["select"], {})()

TEXT = {1: "The", 2: " sky", 3: " is", 4: " blue", 5: " green"}
PROMPT = [1, 2, 3]
VALUES = {4: [-0.5, -0.25, -2.0], 5: [-0.5, -3.0, -2.0]}


def answered(ids, start):
    """Returns what the server says of a sequence, with a model's values from `start` on: of each
    next token, the sampled one last."""
    request = SimpleNamespace(
        logprob=SimpleNamespace(), origin_input_ids=ids, logprob_start_len=start
    )
    values = VALUES[ids[-1]][-(len(ids) - start) :]
    server._process_input_token_logprobs(request, values)
    found = request.logprob.input_token_logprobs_val, request.logprob.input_token_logprobs_idx
    entries = [[value, token, TEXT[token]] for value, token in zip(*found, strict=True)]
    return {"meta_info": {"input_token_logprobs": entries, "output_token_logprobs": []}}


def generate(s, data):
    if "return_logprob" not in data:
        return {"meta_info": {"prompt_tokens": len(PROMPT)}}
    start = data.get("logprob_start_len", -1)
    if start == -1:  # The server's default: no values of the prompt.
        return [{"meta_info": {"input_token_logprobs": []}} for _ in data["input_ids"]]
    return [answered([*PROMPT, 4 + i], start) for i in range(len(data["text"]))]


frontend._generate_http_request = generate
told = answered([*PROMPT, 4], 1)["meta_info"]["input_token_logprobs"]
print("the server's values:", [value for value, *_ in told])
state = SimpleNamespace(text_="The sky is")
for way in ("token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"):
    try:
        print(f"{way}: {frontend.select(state, ['blue', 'green'], 0.0, choices[way]).decision}")
    except (TypeError, IndexError) as error:
        print(f"{way}: {type(error).__name__}")
PY
environment/bin/python run.py 2>errors | tee output || { cat errors; exit 1; }
diff output - << 'TEXT'
the server's values: [None, -0.5, -0.25]
token_length_normalized: blue
greedy_token_selection: TypeError
unconditional_likelihood_normalized: IndexError
TEXT
