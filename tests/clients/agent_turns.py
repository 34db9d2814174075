"""Runs coding agents, and LiteLLM's proxy, unchanged and pinned: each one task with a real tool.

Called by `run.py`:

    python tests/clients/agent_turns.py FOLDER

`FOLDER` has their environments. The model is scripted (`scripted_node.py`): it calls the agent's
own tool, which writes a file, and says that it is done when it sees the result.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.node.http_server import listen
from tests.clients.scripted_node import MODEL, TOOL_TURN, ScriptedNode, call

AGENT_S = 180.0
"""An agent that takes longer hangs: one that takes 20 s alone took 60 where two cores had the other
checks to do as well."""
LEFT_S = 5.0
"""Processes that an agent has left behind have this long to end."""
PROXY_START_S = 240.0
"""Python compiles LiteLLM when it is first imported: a minute where two cores have other work."""
FILE, TEXT = "made.txt", "made by a tool"
COMMAND = f"echo {TEXT} > {FILE}"
DONE = "All of it is done."
KEY = "sk-of-this-test-alone-1234"
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "https_proxy": "http://127.0.0.1:9"}
"""LiteLLM asks for prices of models, which must not be waited for: that proxy is nobody."""
MIN_SHARED = 0.8
"""Share of a prompt that the one before has in common with it: of a conversation's second turn, and
of a second conversation."""

FIRST_CALLS: dict[str, list[str]] = {
    "Codex": [
        call("multi_agent_v1__close_agent", target="nobody"),
        call("exec_command", cmd=COMMAND),
    ],
    "the coder": [call("functions__exec", input=f"await tools.exec_command({{cmd: '{COMMAND}'}})")],
    "Claude": [call("Bash", command=COMMAND, description="Writes a file")],
    "the painter": [call("Read", file_path="picture.png")],
    "opencode": [call("bash", command=COMMAND, description="Writes a file")],
    "Cline": [call("run_commands", commands=[COMMAND])],
    "Copilot": [call("bash", command=COMMAND, description="Writes a file")],
    "qwen": [call("run_shell_command", command=COMMAND, is_background=False)],
    "proxy": [call("write", text=TEXT)],
}
"""Calls of the model, before and behind each result of a tool, by the name in the task."""
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
AIDER_EDIT = f"{FILE}\n```\n<<<<<<< SEARCH\n=======\n{TEXT}\n>>>>>>> REPLACE\n```\n"


def script(prompt: str) -> str:
    """Plays the model: the next call for the agent that the task names, in whose tools it is."""
    if "ask of aider" in prompt:
        return AIDER_EDIT
    made = prompt.count(TOOL_TURN)
    for agent, calls in FIRST_CALLS.items():
        if f"ask of {agent}" in prompt and made < len(calls):
            name = json.loads(calls[made].split("\n")[1])["name"]
            if f'"{name}"' in prompt:
                return f"I do it.\n{calls[made]}"
    return DONE


class Bench:
    """Has what all agents need: the folder of their environments, and the node. `url`: where they
    reach it, if another server stands before it."""

    def __init__(self, environments: Path, node: ScriptedNode, url: str = "") -> None:
        self.environments = environments
        self.agents = environments / "agents" / "node_modules"
        self.node = node
        self.url = url or node.url

    def binary(self, pattern: str) -> str | None:
        """Returns a program of the agents' environment, if it is there for this machine."""
        return next((str(path) for path in self.agents.glob(pattern)), None)

    def run(self, words: list[str], work: Path, **variables: str) -> str:
        """Runs an agent in a folder of its own, and returns what it says."""
        home = home_of(work)
        home.mkdir(exist_ok=True)
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            **variables,
        }
        done = subprocess.run(
            words,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=AGENT_S,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        return said


def home_of(work: Path) -> Path:
    """Returns the home of the agent that works in this folder, which is its own."""
    return work.parent / "home"


def end_what_is_left(home: Path) -> None:
    """Ends processes that an agent has left behind: Cline's hub, which serves its next start, lives
    in a session of its own. They are known by their home."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                process.terminate()
                left.append(process)
    _, stubborn = psutil.wait_procs(left, timeout=LEFT_S)
    for process in stubborn:
        process.kill()


def check_made(work: Path, said: str) -> None:
    assert (work / FILE).read_text().strip() == TEXT, said
    assert DONE in said, said


def codex(bench: Bench, work: Path) -> None:
    """The OpenAI Codex CLI: a tool of a namespace, and a command. `web_search` stays on."""
    program = bench.binary("@openai/codex-linux-x64/vendor/*/bin/codex")
    assert program is not None
    home = home_of(work)
    home.mkdir()
    (home / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "tandem"\n[model_providers.tandem]\n'
        f'name = "tandem"\nbase_url = "{bench.node.url}/v1"\nwire_api = "responses"\n'
    )
    words = [program, "exec", "--skip-git-repo-check"]
    words += ["--dangerously-bypass-approvals-and-sandbox", "ask of Codex"]
    check_made(work, bench.run(words, work, CODEX_HOME=str(home)))
    last = next(p for p in reversed(bench.node.prompts) if "ask of Codex" in p)
    closed, ran = last.split(TOOL_TURN)[1:]
    assert "unsupported" not in closed and "nobody" in closed.lower(), closed
    assert "exit" in ran.lower() or "chunk" in ran.lower(), ran
    (work / FILE).unlink()
    # Of its maker's newer models it sends all tools in an item, and they run what they write.
    known = subprocess.run([program, "debug", "models"], capture_output=True, check=True).stdout
    newer = next(m for m in json.loads(known)["models"] if m["use_responses_lite"])
    catalog = home / "models.json"
    catalog.write_text(json.dumps({"models": [{**newer, "slug": MODEL}]}))
    words = [*words[:-1], "-c", f"model_catalog_json={catalog}", "ask of the coder"]
    check_made(work, bench.run(words, work, CODEX_HOME=str(home)))


def claude_code(bench: Bench, work: Path) -> None:
    """Claude Code in a git repository, of which it tells the state: a command, whose result it
    sends in a second turn, and a second conversation. Most of both prompts is the first's."""
    program = bench.binary("@anthropic-ai/claude-code-linux-x64/claude")
    assert program is not None
    (work / "CLAUDE.md").write_text("Be brief.\n")
    for step in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "one"]):
        author = ("-c", "user.name=a", "-c", "user.email=a@localhost")
        subprocess.run(["git", *author, *step], cwd=work, check=True)
    words = [program, "--permission-mode", "bypassPermissions", "-p"]
    variables = {
        "ANTHROPIC_BASE_URL": bench.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }
    check_made(work, bench.run([*words, "ask of Claude"], work, **variables))
    (work / FILE).unlink()
    assert DONE in bench.run([*words, "Another task."], work, **variables)
    first, turn = [prompt for prompt in bench.node.prompts if "ask of Claude" in prompt]
    other = next(prompt for prompt in bench.node.prompts if "Another task." in prompt)
    assert TOOL_TURN in turn
    for name, prompt in (("a second turn", turn), ("a second conversation", other)):
        share = _share_of(prompt, first)
        print(f"Claude Code: {name} shares {share:.1%} of its {len(prompt)} characters")
        assert share >= MIN_SHARED, name
    _look_at_a_picture(bench, work, words, variables)


def _look_at_a_picture(
    bench: Bench, work: Path, words: list[str], variables: dict[str, str]
) -> None:
    """Reads an image, which the model does not see: the error names its place, so that Claude Code
    takes it out and goes on."""
    (work / "picture.png").write_bytes(PICTURE)
    said = bench.run([*words, "ask of the painter"], work, **variables)
    assert DONE in said, said
    last = next(prompt for prompt in reversed(bench.node.prompts) if "the painter" in prompt)
    assert "Image removed" in last.split(TOOL_TURN)[1], last[-2000:]


def _share_of(prompt: str, earlier: str) -> float:
    """Returns the share of a prompt that another one begins with, too."""
    pairs = zip(prompt, earlier, strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return common / len(prompt)


def opencode(bench: Bench, work: Path) -> None:
    program = bench.binary("opencode-linux-x64/bin/opencode")
    assert program is not None
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{bench.node.url}/v1", "apiKey": "none"},
        "models": {MODEL: {}},
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "model": f"tandem/{MODEL}",
        "provider": {"tandem": provider},
        "permission": {"bash": "allow"},
    }
    (work / "opencode.json").write_text(json.dumps(settings))
    offline = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}
    check_made(work, bench.run([program, "run", "ask of opencode"], work, **offline))


def qwen_code(bench: Bench, work: Path) -> None:
    words = ["node", str(bench.agents / "@qwen-code" / "qwen-code" / "cli.js"), "--yolo"]
    words += ["--auth-type", "openai", "-p", "ask of qwen"]
    variables = {
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": f"{bench.node.url}/v1",
        "OPENAI_MODEL": MODEL,
    }
    check_made(work, bench.run(words, work, **variables))


def cline(bench: Bench, work: Path) -> None:
    program = bench.binary("@cline/cli-linux-x64/bin/cline")
    assert program is not None
    model = ["--apikey", "none", "--modelid", MODEL, "--baseurl", f"{bench.node.url}/v1"]
    bench.run([program, "auth", "--provider", "openai", *model], work)
    words = [program, "--provider", "openai", "--model", MODEL]
    check_made(work, bench.run([*words, "ask of Cline"], work))


def copilot(bench: Bench, work: Path) -> None:
    """GitHub's Copilot CLI with a provider of one's own, over each of the three APIs."""
    program = bench.binary("@github/copilot-linux-x64/copilot")
    assert program is not None
    for kind, path, wire in (
        ("openai", "/v1", "completions"),
        ("openai", "/v1", "responses"),
        ("anthropic", "", "completions"),
    ):
        variables = {
            "COPILOT_OFFLINE": "true",
            "COPILOT_MODEL": MODEL,
            "COPILOT_PROVIDER_TYPE": kind,
            "COPILOT_PROVIDER_BASE_URL": f"{bench.node.url}{path}",
            "COPILOT_PROVIDER_WIRE_API": wire,
        }
        said = bench.run([program, "--allow-all-tools", "-p", "ask of Copilot"], work, **variables)
        check_made(work, said)
        (work / FILE).unlink()


def aider(bench: Bench, work: Path) -> None:
    """aider, whose tool is the edit that it reads in the answer."""
    words = [str(bench.environments / "aider" / "bin" / "aider"), "--model", f"openai/{MODEL}"]
    words += ["--edit-format", "diff", "--yes-always", "--no-git", "--no-check-update"]
    words += ["--no-show-model-warnings", "--no-show-release-notes", "--no-analytics"]
    words += ["--message", "ask of aider", FILE]
    variables = {"OPENAI_API_KEY": "none", "OPENAI_API_BASE": f"{bench.node.url}/v1"}
    said = bench.run(words, work, **OFFLINE, **variables)
    assert (work / FILE).read_text().strip() == TEXT, said


def litellm_proxy(bench: Bench, work: Path) -> None:
    """LiteLLM's proxy between a client and tandem: chats, messages, responses, a call."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    variables = {**OFFLINE, "LITELLM_MASTER_KEY": KEY}
    log = work / "log"
    with log.open("w") as out:
        proxy = subprocess.Popen(
            [
                *(str(bench.environments / "litellm-proxy" / "bin" / "litellm"), "--host"),
                *("127.0.0.1", "--port", str(port), "--model", f"hosted_vllm/{MODEL}"),
                *("--api_base", f"{bench.node.url}/v1", "--telemetry", "False"),
            ],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(work),
                **variables,
            },
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/health/liveliness", proxy)
        user = [{"role": "user", "content": "ask of proxy"}]
        tool = {"type": "object", "properties": {"text": {"type": "string"}}}
        chat = {
            "messages": user,
            "tools": [{"type": "function", "function": {"name": "write", "parameters": tool}}],
        }
        message = _ask(f"{url}/v1/chat/completions", chat)["choices"][0]["message"]
        made = json.loads(message["tool_calls"][0]["function"]["arguments"])
        assert made == {"text": TEXT}
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
        chat["messages"] = [*user, message, result]
        last = _ask(f"{url}/v1/chat/completions", chat)["choices"][0]["message"]
        assert last["content"] == DONE
        body = {"max_tokens": 100, "messages": user}
        body |= {"tools": [{"name": "write", "input_schema": tool}]}
        blocks = _ask(f"{url}/v1/messages", body)["content"]
        assert blocks[-1]["input"] == {"text": TEXT}
        answer = _ask(f"{url}/v1/responses", {"input": "hello"})
        assert answer["output"][0]["content"][0]["text"] == DONE
    except BaseException:
        print(log.read_text())
        raise
    finally:
        proxy.terminate()
        proxy.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    ends_at = time.monotonic() + PROXY_START_S
    while time.monotonic() < ends_at:
        assert process.poll() is None, "the proxy has ended"
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(url)


def _ask(url: str, body: dict[str, object]) -> dict[str, list]:
    request = urllib.request.Request(
        url,
        json.dumps({"model": f"hosted_vllm/{MODEL}", **body}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=AGENT_S) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None


Agent = Callable[[Bench, Path], None]
AGENTS: dict[str, tuple[Agent, str]] = {
    "qwen_code": (qwen_code, "agents/node_modules"),
    "opencode": (opencode, "agents/node_modules"),
    "litellm_proxy": (litellm_proxy, "litellm-proxy/bin"),
    "aider": (aider, "aider/bin"),
    "copilot": (copilot, "agents/node_modules"),
    "codex": (codex, "agents/node_modules"),
    "cline": (cline, "agents/node_modules"),
    "claude_code": (claude_code, "agents/node_modules"),
}
"""Agents with the folder that shows that they are installed; the longest comes first."""


def run_agent(name: str, bench: Bench, folder: Path) -> bool:
    """Runs one agent and prints how it went. One that is not here is no failure."""
    agent, needs = AGENTS[name]
    if not (bench.environments / needs).is_dir():
        print(f"skipped {name}: it could not be installed here")
        return True
    started_at = time.monotonic()
    work = folder / name / "work"
    work.mkdir(parents=True)
    try:
        agent(bench, work)
    except Exception as error:
        print(f"FAILED {name}: {error!r}")
        return False
    finally:
        end_what_is_left(home_of(work))
    print(f"passed {name}, {time.monotonic() - started_at:.1f} s")
    return True


def main() -> int:
    # Codex makes no helpers below a folder for temporary files, and says so.
    with tempfile.TemporaryDirectory() as folder, ScriptedNode(script) as node:
        bench = Bench(Path(sys.argv[1]).resolve(), node)
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda name: run_agent(name, bench, Path(folder)), AGENTS))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
