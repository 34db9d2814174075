#!/usr/bin/env bash
# AReaL 1.0.4 with SGLang 0.5.23: a teacher's log probabilities cannot be read, of any sequence.
#
# To score a sequence AReaL's SGLang backend asks `/generate` for `logprob_start_len`, one token before the part that it
# wants, and turns every value that comes back into a number, before it takes the last ones. SGLang puts a null in front,
# for the token at that place, whatever it is: it has values of the tokens behind alone. So each score ends with a
# TypeError, behind a prefill that was paid for.
# Guessed before, from AReaL's code: that SGLang has a value of the first token, too, unless it is the sequence's first.
#
# Seen on 2026-11-29 with Python 3.11; both functions are read out of their wheels, of which some hundred kB are fetched:
#     asked: logprob_start_len 2 of [11, 12, 13, 14, 15], for 2 tokens
#     SGLang's values: [None, -0.5, -0.25]
#     AReaL: TypeError: float() argument must be a string or a real number, not 'NoneType'
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
pip=(environment/bin/python -m pip --quiet --disable-pip-version-check)
for name in areal==1.0.4 sglang==0.5.23; do
  "${pip[@]}" install --dry-run --ignore-installed --no-deps --report "${name%%=*}.json" "$name" 2>errors \
    || { cat errors; exit 1; }
done
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


def methods(package, path, kind, *names):
    """Returns methods of a class of a wheel, without what its module imports."""
    url = json.load(open(f"{package}.json"))["install"][0]["download_info"]["url"]
    with zipfile.ZipFile(Remote(url)) as wheel:
        tree = ast.parse(wheel.read(path).decode())
    (node,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind]
    node.body = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name in names]
    node.bases, node.decorator_list = [], []
    space = {"HttpRequest": SimpleNamespace}
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module([node], []), path, "exec", flags), space)
    return space[kind]


areal = methods(
    "areal",
    "areal/engine/sglang_remote.py",
    "SGLangBackend",
    "build_score_request",
    "parse_score_response",
)()
sglang = methods(
    "sglang",
    "sglang/srt/managers/scheduler_components/logprob_result_processor.py",
    "SchedulerLogprobResultProcessor",
    "_process_input_token_logprobs",
)()
sglang.model_config = SimpleNamespace(vocab_size=100)
sglang._uses_scoring_positions = lambda request: False

sequence, wanted = [11, 12, 13, 14, 15], 2
payload = areal.build_score_request(sequence, wanted, False, 0).payload
start = payload["logprob_start_len"]
print(f"asked: logprob_start_len {start} of {sequence}, for {wanted} tokens")
# What the model gives from there on: of each next token, the sampled one last.
request = SimpleNamespace(
    logprob=SimpleNamespace(), origin_input_ids=sequence, logprob_start_len=start
)
sglang._process_input_token_logprobs(request, [-0.5, -0.25, -2.0])
values, ids = request.logprob.input_token_logprobs_val, request.logprob.input_token_logprobs_idx
print(f"SGLang's values: {values}")
entries = [[value, token, None] for value, token in zip(values, ids, strict=True)]
try:
    answer = {"meta_info": {"input_token_logprobs": entries}}
    print(f"AReaL: {areal.parse_score_response(answer, wanted)}")
except TypeError as error:
    print(f"AReaL: TypeError: {error}")
PY
environment/bin/python run.py 2>errors | tee output || { cat errors; exit 1; }
diff output - << 'TEXT'
asked: logprob_start_len 2 of [11, 12, 13, 14, 15], for 2 tokens
SGLang's values: [None, -0.5, -0.25]
AReaL: TypeError: float() argument must be a string or a real number, not 'NoneType'
TEXT
