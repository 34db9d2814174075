"""Writes docs/api.md from the routes and the request bodies: endpoints, fields, refusals.

A field's meaning is the docstring below it; `Ignored` of `decode_node.protocol.bodies.body` marks
those that change nothing, and `not_built` beside it lists names that are refused. Ends with an
error that names what lacks a description.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from prometheus_client import CollectorRegistry
from pydantic import BaseModel, SecretStr
from starlette.routing import Route

from decode_node.answer.running.aborts import OpenAnswers
from decode_node.app import node_routes
from decode_node.config import DecodeNodeSettings
from decode_node.protocol.bodies.body import IS_IGNORED
from decode_node.protocol.bodies.generation_body import GenerationBody
from decode_node.protocol.bodies.not_built import NOT_BUILT
from decode_node.protocol.chat.chat import ChatCompletionRequest
from decode_node.protocol.completions import CompletionRequest
from decode_node.protocol.decisions.decisions import DecisionRequest
from decode_node.protocol.messages.messages import CountTokensRequest, MessagesRequest
from decode_node.protocol.responses.responses import (
    CompactRequest,
    InputTokensRequest,
    ResponsesRequest,
)
from decode_node.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from decode_node.protocol.tokens.derender import DerenderChatRequest, DerenderCompletionRequest
from decode_node.protocol.tokens.generate import GenerateRequest
from decode_node.protocol.tokens.sglang import SGLangRequest
from router.app import create_app
from router.config import RouterSettings

PAGE = Path(__file__).with_name("api.md")

HEAD = """\
# HTTP API

`make docs` generates this page; [openapi.json](openapi.json) has the same for programs. Names and
meaning are OpenAI's, and vLLM's for what OpenAI does not have.

## Endpoints

A router passes everything that generates on to decode nodes, so clients see no difference.

| path | router | decode node | meaning |
|---|---|---|---|
"""

STREAMS = """
## Streams

A stream of events is never silent for longer than `--sse-keepalive-s` (default 10; 0: it may be):

| when | what the client gets |
|---|---|
| the first token comes within that time | status and headers with the first token, as ever |
| it does not | status 200 and headers after that time, and a comment, which clients skip |
| in every pause of that time, also while an answer moves to another node | a comment |

The time runs from the request's arrival, waiting in the router's queue included. What fails before
a stream has begun is an HTTP status; so are all refusals that need no waiting: a wrong body (400),
rates (429), a full queue or a wait that would be too long (503), nodes that are not there (503).
What fails later is an event with the same error object, and then the stream ends without its last
event (`[DONE]`, `message_stop`, `response.completed`). A stream that began with a comment has no
`x-tandem-prefill-node`.

Answers in one piece (`"stream": false`) are sent when they are complete ([proxies](proxies.md)).
"""

STATE = """
## Responses that are kept

A router with `--response-store` ([configuration](configuration.md)) keeps responses as OpenAI's API
does: a client sends what is new, and refers to the rest.

```python
first = client.responses.create(model="demo", input="My name is Ada.")
second = client.responses.create(model="demo", input="Who am I?", previous_response_id=first.id)
talk = client.conversations.create()
client.responses.create(model="demo", input="Hello", conversation=talk.id)
long = client.responses.create(model="demo", input="Write a book.", background=True)
long = client.responses.retrieve(long.id)  # until long.status is completed, incomplete or failed
```

- **`store`** is true unless a request says otherwise. A response is in the database before the
  client has its last byte; where it cannot be written the answer is an error, or the last event
  `response.failed`. With `"store": false` nothing is written; it may still go on from one that is.
- **History**: the decode node gets the items of all responses before, and then the request's own,
  as if the client had sent them all. `instructions` are those of the request alone.
  `item_reference` may name any item of the tenant.
- **Conversations** give their items to a response, and have its items when it is complete. One
  response at a time: another one is a 409 `conversation_locked`. Go on with `conversation`, not
  `previous_response_id`. Deleting a conversation leaves its responses, and the other way round.
- **`background`** answers at once with status `queued`; the work goes on without a connection, with
  the rates and priority of its tenant. Refusals for want of room (429, 503) are tried again for 10
  minutes. With `"stream": true` any router has its events, from any one on:
  `GET /v1/responses/{id}?stream=true&starting_after=N`. `cancel` ends the work on the nodes.
- **Routers that end**: what was answered as kept is there after kill -9. A router that stops works
  on background responses for `--drain-timeout-s`; another one answers those of a router that is
  gone after `--response-lease-s`, up to three times. A stream that had begun ends as `failed`.
- **Time and room**: a response or conversation expires `--response-ttl-s` after its last use, and
  is used by every response that goes on from it. A tenant keeps at most
  `--response-store-mib-per-tenant`; then requests that would keep another are a 429
  `insufficient_quota`. Items count as sent, events compressed. History and input together may be as
  large as a request (`--max-body-bytes`).
- **Walls**: what belongs to another tenant is not found (404). Deleting a response removes its row,
  items and events; one that went on from it stays, and cannot be gone on from (400
  `previous_response_not_found`).
- **A database that does not answer** makes requests that need it a 503 `response_store_unavailable`
  before anything is computed; others do not notice. Of SQLite's disk the last 16 MiB (a quarter of
  a small one) take only what deletes and expires, so that it does not stay full.

Without `--response-store`, `previous_response_id`, `conversation` and `background` are a 400, and
the paths of what is kept a 404 `no_response_store`. Stored prompts are not
there in either case.
"""

FIELDS = """
## Fields

| what becomes of a field | |
|---|---|
| accepted | It does what its row says. |
| required | The same; a body, or the part it belongs to, is a 400 without it. |
| limited | Only the values that its row names are accepted; others are a 400. |
| ignored | It is part of the API and changes nothing here. |
| [not built](#known-but-not-built) | A 400 that names it, unless its value asks for nothing. |
| unknown | Ignored: one warning in the log for each name, and a count. |

`tandem_ignored_fields_total` counts unknown fields; `--strict-fields` makes them a 400. The same
becomes of `store: true` of responses where they are not kept, and of tools that a server would run,
where there are others.
null is the same as leaving a field out. A whole number may be written as `3.0`; text is no number.
Wrong types and values are a 400 whose `param` names the field, before anything is computed.
Sampling parameters that a request leaves out are the model's
(`--generation-config`, [configuration](configuration.md); `GET /v1/models` tells them).
"""

NOT_BUILT_HEAD = """
## Known, but not built

Other servers know these fields, and they would change the answer, so they are refused with
`unsupported_parameter` wherever they are not among the fields above. null, false, 0, and empty
values ask for nothing and are accepted, but for an empty `web_search_options`.

| field (also accepted) | instead |
|---|---|
"""

ROUTER_PATHS = {
    "/admin/nodes": "Lists the nodes that the router knows: id, address, role, state, requests.",
    "/admin/nodes/{node_id}/drain": "Takes a node, by id or address, [out of use]"
    "(operations.md#take-a-node-out-of-use): it gets no new requests. For operators alone.",
    "/admin/nodes/{node_id}/resume": "Takes it back into use. For operators alone.",
    "/v1/models": "Lists the models of all decode nodes.",
    "/v1/models/{model_id:path}": "",
    "/model_info": "",
    "/get_model_info": "",
    "/health": "",
    "/ready": "",
    "/health_generate": "",
    "/metrics": "",
    "/switch_role": "Makes a node of `tandem node` a prefill or a decode node ([roles](roles.md)). "
    "For operators alone.",
    "/status": "Shows the cluster to people.",
    "/status/{file}": "Sends what that page is made of.",
    "/status/events": "Streams what that page shows, as server-sent events.",
    "/v1/responses/{response_id}": "Tells, or deletes, a [response that is kept]"
    "(#responses-that-are-kept); with `stream=true` its events.",
    "/v1/responses/{response_id}/cancel": "Ends the work on a background response.",
    "/v1/responses/{response_id}/input_items": "Lists what a response was an answer to.",
    "/v1/conversations": "Makes a conversation.",
    "/v1/conversations/{conversation_id}": "Tells, changes or deletes a conversation.",
    "/v1/conversations/{conversation_id}/items": "Lists the items of a conversation, or adds some.",
    "/v1/conversations/{conversation_id}/items/{item_id}": "Tells or deletes one item.",
    "/v1/files": "Lists files, or keeps one: requests of a [batch](batches.md).",
    "/v1/files/{file_id}": "Tells or deletes one file.",
    "/v1/files/{file_id}/content": "Sends a file.",
    "/v1/batches": "Lists batches, or makes one.",
    "/v1/batches/{batch_id}": "Tells how far a batch is.",
    "/v1/batches/{batch_id}/cancel": "Ends the work on a batch.",
}
"""Paths that a router answers itself; an empty meaning is the decode node's."""
KEPT = "with `--response-store`"
BATCHED = "with `--batch-store`"

Titles = dict[type[BaseModel], str]

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/inference/v1/generate": GenerateRequest,
    "/generate": SGLangRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": InputTokensRequest,
    "/v1/responses/compact": CompactRequest,
    "/v1/decisions": DecisionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/chat/completions/derender": DerenderChatRequest,
    "/v1/completions/derender": DerenderCompletionRequest,
}
BODIES_OF_OTHERS = {
    "/v1/chat/completions/render": ChatCompletionRequest,
    "/v1/completions/render": CompletionRequest,
    "/v1/messages/render": MessagesRequest,
    "/v1/responses/render": ResponsesRequest,
}
NO_BODY = {
    "/abort_request",
    "/abort_requests",
    "/flush_cache",
    "/reset_prefix_cache",
    "/start_profile",
    "/stop_profile",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}


class Undocumented(Exception):
    """A route or a field says nothing of itself. The message says which and what to do."""


DIFFERENCES = """
## What differs from vLLM

Besides endpoints and fields that are not built, a client of vLLM can notice:

- `stream_options` without `stream` ask for nothing and are accepted; vLLM refuses them.
- `max_tokens` beyond the context is cut to what the prompt leaves, as in llama.cpp and with
  SGLang's `--allow-auto-truncate`: agents ask for 32,000 tokens of any model. The answer ends with
  `length`, in /v1/messages with `model_context_window_exceeded`. vLLM refuses it, and so does
  `--strict-max-tokens`. A prompt that is too long is a 400 in vLLM's words.
- `/v1/completions` without `max_tokens` goes on as long as the context allows; vLLM and OpenAI stop
  after 16 tokens.
- `top_p` may be 0, as in OpenAI's API: the most likely token.
- What was not asked for (`prompt_logprobs`, `prompt_token_ids`, `token_ids`) is absent, not null.
- -1 for `top_logprobs` or `prompt_logprobs`, the whole vocabulary, is a 400: one answer could be
  gigabytes.
- `strict` changes nothing in `response_format`: the answer follows the schema with and without it,
  and what is not in `required` may be left out (OpenAI refuses such schemas).
- `/inference/v1/generate` names the tokens of log probabilities by `token_id`, as vLLM does since
  0.33, and by `token`, as it did before: clients of both read it. Images come as `content_parts`,
  which the nodes prepare, and a chat with images is rendered so; `features` are tensors of vLLM's
  own processors, in its own encoding, and refused. Experts and sampling masks are not there.
  `derender` wants `chat_request` or `completion_request`, and gives no stream, for which each piece
  would come with all tokens before it: `output_mode: text` has the text of one. Weights that a
  trainer makes come as adapters (`/v1/load_lora_adapter` with `load_inplace`); nothing replaces the
  model's own.
- `/abort_request` and `/abort_requests` of a router end answers at all decode nodes, and those that
  are being read, wait in it or are on their way to a node; in other routers too, which learn it
  from the nodes, a little later. Its reply comes when those at nodes have ended, or after some 2 s,
  and counts by node and, as `router`, what no node had yet. What was generated is answered, with
  the finish reason `abort` (`/v1/messages`: `max_tokens`, `/v1/responses`: `incomplete`); of a beam
  search nothing is.
- Log probabilities are the model's own (vLLM's `raw_logprobs`), whatever temperature, `top_p` and
  penalties are. A trainer that wants those of the tokens as they were drawn leaves all of these
  neutral, or computes them itself.
- `/v1/decisions` of OpenAI's API is there for every model whose chat template lets it answer
  without thinking first; vLLM has it for a few. Options get letters as labels, and beyond 26 pairs
  of letters, of which a model has some as one token. `confidence` is how likely the best label is
  among all tokens: near 0 the model would have said something else. Small models lean to the first
  label, whatever it stands for: SmolLM2-135M finds any statement true with some 0.85.
- `/generate` is SGLang's own API. A single prompt may have images (`image_data`). Streams have no
  log probabilities. Each event has all of an answer so far, so they come more seldom the longer it
  is.
- Responses are kept by the router, in a database ([above](#responses-that-are-kept)), and survive
  it; vLLM keeps them in the memory of one server.
"""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    titles = {GenerationBody: "Chats and completions"}
    titles |= {body: f"POST {path}" for path, body in BODIES.items()}
    bodies = [section(titles[body], body, _parent(body, titles), titles) for body in titles]
    return (
        HEAD
        + endpoints()
        + STREAMS
        + STATE
        + FIELDS
        + "".join(bodies)
        + NOT_BUILT_HEAD
        + not_built()
        + DIFFERENCES
    )


def endpoints() -> str:
    node, router = node_paths(), router_paths()
    rows = []
    for path in sorted({*node, *router}, key=lambda path: (path[:4] != "/v1/", path)):
        method = ", ".join(sorted((node.get(path) or router[path])[0]))
        meaning = (node[path][1] if path in node else "") or ROUTER_PATHS.get(path, "")
        if not meaning:
            raise Undocumented(f"say in ROUTER_PATHS, or in its docstring, what {path} does")
        shown = path.replace("{model_id:path}", "{name}").replace("{name:path}", "{name}")
        marks = f"{router_mark(path, router)} | {_mark(path in node)}"
        rows.append(f"| `{method} {shown}` | {marks} | {meaning} |")
    return "\n".join(rows) + "\n"


def node_paths() -> dict[str, tuple[set[str], str]]:
    """Returns methods and meaning of each path of a decode node."""
    settings = DecodeNodeSettings(model="any", enable_tokenizer_info_endpoint=True)
    api: Any = SimpleNamespace(
        settings=settings,
        state=SimpleNamespace(answers=OpenAnswers()),
        tokenizer=None,
        reset_prefix_cache=None,
        profiles=None,
        adapters=None,
        metrics=SimpleNamespace(registry=CollectorRegistry()),
    )
    found = _paths(node_routes(api, lambda: 0))
    posts = {path for path, (how, _) in found.items() if how == {"POST"}}
    missing = sorted(posts - BODIES.keys() - BODIES_OF_OTHERS.keys() - NO_BODY)
    if missing:
        raise Undocumented(f"name the request bodies of {missing} in BODIES")
    return {path.replace("{name:path}", "{model_id:path}"): it for path, it in found.items()}


def router_paths() -> dict[str, tuple[set[str], str]]:
    store = SecretStr("sqlite:///kept")
    settings = RouterSettings(decode="127.0.0.1:1/2", response_store=store, batch_store=store)
    return _paths(create_app(settings).router.routes)


def _paths(routes: Any) -> dict[str, tuple[set[str], str]]:
    found: dict[str, tuple[set[str], str]] = {}
    for route in routes:
        if isinstance(route, Route):
            methods, _ = found.get(route.path, (set(), ""))
            methods |= set(route.methods or ()) - {"HEAD"}
            found[route.path] = methods, _first_line(route.endpoint.__doc__)
    return found


def _parent(body: type[BaseModel], titles: Titles) -> type[BaseModel] | None:
    """Returns the nearest body with a section of its own whose fields `body` has, too."""
    return next((base for base in body.__mro__[1:] if base in titles), None)


def section(
    title: str, body: type[BaseModel], parent: type[BaseModel] | None, titles: Titles
) -> str:
    """Returns a body's own fields, and those of its parts behind them, in one table."""
    leave_out = set(parent.model_fields) if parent else set()
    text = f"\n### {title}\n\n{_whole(body)}"
    if parent:
        text += f" Besides, it has the fields of {_link(titles[parent])}."
    lines = rows(body, leave_out)
    for part in parts(body, leave_out, titles):
        meaning = _whole(part).replace("|", "\\|")
        lines += [f"| **{part.__name__}** | | | {meaning} |", *rows(part, set())]
    head = ["| field | type | | meaning |", "|---|---|---|---|"] if lines else []
    return text + "\n\n" + "".join(f"{line}\n" for line in [*head, *lines])


def _link(title: str) -> str:
    anchor = "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
    return f"[{title}](#{anchor})"


def rows(body: type[BaseModel], leave_out: set[str]) -> list[str]:
    """Returns a row for each field; fields that are alike share one, and all that are ignored."""
    schema = body.model_json_schema()["properties"]
    alike: dict[tuple[str, str, str], list[str]] = {}
    ignored: dict[str, list[str]] = {}
    for name, field in body.model_fields.items():
        if name in leave_out:
            continue
        shown = field.alias or name
        if not field.description:
            raise Undocumented(
                f"{body.__name__}.{name} has no description: write a docstring below the field"
            )
        meaning = " ".join(field.description.split()).replace("|", "\\|")
        fate = "limited" if meaning.startswith("Only ") else "accepted"
        fate = "required" if field.is_required() else fate
        if IS_IGNORED in field.metadata:
            ignored.setdefault(meaning, []).append(f"`{shown}`")
        else:
            alike.setdefault((type_of(schema[shown]), fate, meaning), []).append(f"`{shown}`")
    found = [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in alike.items()]
    if ignored:
        names = ", ".join(name for names in ignored.values() for name in names)
        reasons = [f"{', '.join(names)}: {why}" for why, names in ignored.items()]
        reasons = list(ignored) if len(ignored) == 1 else reasons
        found.append(f"| {names} | any | ignored | {' '.join(reasons)} |")
    return found


def parts(body: type[BaseModel], leave_out: set[str], titles: Titles) -> Iterator[type[BaseModel]]:
    """Yields the types of parts of a body without a section of their own, each once, in the order
    of the fields."""
    seen: set[type[BaseModel]] = set(titles)

    def below(annotation: Any) -> Iterator[type[BaseModel]]:
        if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
            if annotation not in seen:
                seen.add(annotation)
                yield annotation
                for field in annotation.model_fields.values():
                    yield from below(field.annotation)
        else:
            for argument in get_args(annotation):
                yield from below(argument)

    for name, field in body.model_fields.items():
        if name not in leave_out:
            yield from below(field.annotation)


def type_of(schema: dict[str, Any]) -> str:
    """Returns a JSON type as people say it; null goes without saying."""
    variants = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    return " or ".join(dict.fromkeys(_type_of(one) for one in variants))


def _type_of(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " / ".join(f"`{value}`" for value in values)
    if schema.get("type") == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def not_built() -> str:
    """Returns a row for each advice, with the fields that get it and the values that ask for
    nothing."""
    fields: dict[str, list[str]] = {}
    for name, it in NOT_BUILT.items():
        neutral = ", ".join(f"`{value}`" for value in dict.fromkeys(map(str, it.neutral)))
        fields.setdefault(it.advice, []).append(f"`{name}`" + (f" ({neutral})" if neutral else ""))
    return "".join(f"| {', '.join(names)} | {advice} |\n" for advice, names in fields.items())


def _whole(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


def _first_line(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


def router_mark(path: str, router: Collection[str]) -> str:
    if path.startswith(("/v1/files", "/v1/batches")):
        return BATCHED
    is_kept = path.startswith(("/v1/responses/{", "/v1/conversations"))
    return KEPT if is_kept else _mark(path in router)


def _mark(there: bool) -> str:
    return "yes" if there else ""


if __name__ == "__main__":
    main()
