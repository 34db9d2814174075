#!/usr/bin/env bash
# HELM (crfm-helm 0.5.16): its client for vLLM's completions cannot be made; the one for chats can.
#
# `VLLMClient` is how HELM asks a base model behind vLLM's API, with log probabilities. It hands its tokenizer on to a
# class that passes what it does not know to `openai.OpenAI`, which refuses it, so each run ends at its first request. The
# class below it, `OpenAILegacyCompletionsClient`, asks the same with `base_url`, `openai_model_name` and `api_key` in
# `model_deployments.yaml`. `VLLMChatClient` works; the log probability of each of its answers is 0.
# Guessed before: both work.
#
# Seen on 2026-11-30 with Python 3.11, openai 2.54.0 and HELM's own requirements:
#     VLLMClient: TypeError: OpenAI.__init__() got an unexpected keyword argument 'tokenizer'
#     OpenAILegacyCompletionsClient: 'a b' -1.5
#     VLLMChatClient: 'a b' 0
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > run.py << 'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from helm.clients.openai_client import OpenAILegacyCompletionsClient
from helm.clients.vllm_client import VLLMChatClient, VLLMClient
from helm.common.cache import BlackHoleCacheConfig
from helm.common.request import Request
from helm.tokenizers.simple_tokenizer import SimpleTokenizer

TOKENS = {"tokens": ["a ", "b"], "token_logprobs": [-1.0, -0.5], "top_logprobs": None, "text_offset": [0, 2]}


class Server(BaseHTTPRequestHandler):
    def log_message(self, *line):
        pass

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        choice = {"index": 0, "finish_reason": "stop"}
        if self.path.endswith("/chat/completions"):
            choice["message"] = {"role": "assistant", "content": "a b"}
        else:
            choice |= {"text": "a b", "logprobs": TOKENS if asked["logprobs"] is not None else None}
        data = json.dumps({"id": "c", "object": "o", "created": 1, "model": "m", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
tokenizer = SimpleTokenizer()
named = {"tokenizer": tokenizer, "tokenizer_name": "simple/tokenizer1"}
for kind, settings in (
    (VLLMClient, {**named, "vllm_model_name": "m"}),
    (OpenAILegacyCompletionsClient, {"openai_model_name": "m", "api_key": "none"}),
    (VLLMChatClient, {"vllm_model_name": "m"}),
):
    try:
        client = kind(cache_config=BlackHoleCacheConfig(), base_url=url, **settings)
        asked = Request(model="local/m", model_deployment="vllm/m", prompt="hi", max_tokens=2, temperature=0)
        result = client.make_request(asked)
        (one,) = result.completions
        print(f"{kind.__name__}: {one.text!r} {one.logprob}")
    except TypeError as error:
        print(f"{kind.__name__}: TypeError: {error}")
PY
python3 -m venv environment
environment/bin/pip install --quiet --disable-pip-version-check crfm-helm==0.5.16 openai==2.54.0 "tiktoken<1" 2> errors \
  || { cat errors; exit 1; }
environment/bin/python run.py 2> errors | grep -E "^(VLLM|OpenAI)[A-Za-z]*: " | tee output || { cat errors; exit 1; }
diff output - << 'TEXT'
VLLMClient: TypeError: OpenAI.__init__() got an unexpected keyword argument 'tokenizer'
OpenAILegacyCompletionsClient: 'a b' -1.5
VLLMChatClient: 'a b' 0
TEXT
