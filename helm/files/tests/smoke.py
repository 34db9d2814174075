"""What `helm test` asks of a release. Standard library only; ends with an error at the first wrong
answer. Environment: URL, TIMEOUT_S, EXPECT_PREFILL (1: prompts must be computed by prefill nodes),
EXPECT_401 (1: requests without a key must be refused), API_KEY (one to use), CA_FILE (authority of
the router's certificate; without one it is not checked)."""

import json
import os
import ssl
import time
import urllib.error
import urllib.request

URL = os.environ["URL"]
KEY = os.environ.get("API_KEY", "").strip()
EXPECT_401 = os.environ["EXPECT_401"] == "1"
TLS = ssl.create_default_context(cafile=os.environ.get("CA_FILE"))
if "CA_FILE" not in os.environ:
    TLS.check_hostname, TLS.verify_mode = False, ssl.CERT_NONE
DEADLINE = time.monotonic() + float(os.environ["TIMEOUT_S"])
# Longer than a prompt that a decode node computes itself, and new each time: no cache has it.
PROMPT = f"Release test {time.time_ns()}. " + "Count the words of this sentence once more. " * 20


def ask(path, body=None, key=KEY, headers=()):
    """Status and text of an answer."""
    request = urllib.request.Request(
        URL + path, None if body is None else json.dumps(body).encode()
    )
    request.add_header("content-type", "application/json")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    for name, value in headers:
        request.add_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=60, context=TLS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def wait_ready():
    while True:
        status, text = ask("/ready")
        if status == 200:
            return
        if time.monotonic() > DEADLINE:
            raise SystemExit(f"the router is not ready: {status} {text}")
        time.sleep(1)


def expect(is_true, what):
    print("ok  " if is_true else "FAIL", what, flush=True)
    if not is_true:
        raise SystemExit(1)


def events(text):
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    expect(lines and lines[-1] == "[DONE]", "the stream ends with [DONE]")
    return [json.loads(line) for line in lines[:-1]]


wait_ready()
if EXPECT_401:
    status, _ = ask("/v1/models", key="not-a-key")
    expect(status == 401, f"a wrong key is refused (status {status})")
    if not KEY:
        raise SystemExit(0)
status, text = ask("/v1/models")
expect(status == 200, f"/v1/models answers 200 (it said {status})")
model = json.loads(text)["data"][0]["id"]
expect(bool(model), f"a model is served: {model}")

chat = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": PROMPT}]}
status, text = ask("/v1/chat/completions", chat)
while status == 503 and time.monotonic() < DEADLINE:
    # Nodes of another version of the model may still load.
    time.sleep(1)
    status, text = ask("/v1/chat/completions", chat)
expect(status == 200, f"a chat completion answers 200 (it said {status}: {text[:200]})")
expect(json.loads(text)["usage"]["completion_tokens"] > 0, "it has tokens")

chat.update(stream=True, stream_options={"include_usage": True})


def streamed(number):
    """The timeline of a streamed answer to a new prompt."""
    chat["messages"][0]["content"] = f"Again, {number}. " + PROMPT
    status, text = ask("/v1/chat/completions", chat, headers=[("x-tandem-timeline", "1")])
    expect(status == 200, f"a streamed one answers 200 (it said {status}: {text[:200]})")
    answer = events(text)
    expect(any(event.get("choices") for event in answer), "it has tokens, too")
    return next((event["timeline"] for event in answer if event.get("timeline")), {})


timeline = streamed(1)
if os.environ.get("EXPECT_PREFILL") == "1":
    # The router is ready with a decode node alone; prefill nodes may still load.
    number = 1
    while timeline.get("path") != "remote" and time.monotonic() < DEADLINE:
        time.sleep(1)
        number += 1
        timeline = streamed(number)
    expect(timeline.get("path") == "remote", f"a prefill node has computed a prompt: {timeline}")
