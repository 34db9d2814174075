"""Rendezvous hashing, and what makes two requests one session."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.http.errors import BadRequest
from router.nodes.session import Rendezvous, node_hash_seed
from router.request.info import RequestInfo, SessionSource, read_request_info
from router.request.prompt_text import PromptText
from router.request.tenants import Priority, Tenant
from tests.router.factories import request


@dataclass(frozen=True)
class Place:
    name: str

    @property
    def hash_seed(self) -> int:
        return node_hash_seed(self.name)


names = st.sets(st.text(min_size=1, max_size=20), min_size=2, max_size=12).map(sorted)
keys = st.binary(min_size=1, max_size=40)


def home(key: bytes, nodes: Iterable[Place]) -> Place:
    return Rendezvous(list(nodes)).home(key)


@settings(deadline=None)
@given(names, keys, st.randoms())
def test_the_home_does_not_depend_on_the_order_of_nodes(
    names: list[str], key: bytes, rng: Any
) -> None:
    nodes = [Place(name) for name in names]
    shuffled = list(nodes)
    rng.shuffle(shuffled)
    assert home(key, nodes) == home(key, shuffled)


@settings(deadline=None)
@given(names, keys, st.data())
def test_a_node_that_leaves_moves_only_its_own_sessions(
    names: list[str], key: bytes, data: st.DataObject
) -> None:
    nodes = [Place(name) for name in names]
    leaving = data.draw(st.sampled_from(nodes))
    after = home(key, [node for node in nodes if node != leaving])
    assert after == home(key, nodes) or home(key, nodes) == leaving


@settings(deadline=None)
@given(names, keys, st.text(min_size=1))
def test_a_node_that_joins_takes_sessions_only_for_itself(
    names: list[str], key: bytes, new: str
) -> None:
    nodes = [Place(name) for name in names]
    assert home(key, {*nodes, Place(new)}) in (home(key, nodes), Place(new))


@pytest.mark.parametrize(
    ("count", "spread", "most_moved"),
    [(16, 0.1, 1.2), (1000, 0.6, 2.6)],
    ids=["all are weighed", "a window is weighed"],
)
def test_sessions_spread_evenly_and_one_node_more_takes_its_share(
    count: int, spread: float, most_moved: float
) -> None:
    nodes = [Place(f"10.0.{i >> 8}.{i & 255}:5001") for i in range(count)]
    more = [*nodes, Place("10.9.9.9:5001")]
    keys = [str(i).encode() for i in range(40_000)]
    fewer, larger = Rendezvous(nodes), Rendezvous(more)
    homes = {key: fewer.home(key) for key in keys}
    counts = Counter(homes.values())
    assert len(counts) == count
    assert max(counts.values()) < (1 + spread) * len(keys) / count
    moved = sum(larger.home(key) != homes[key] for key in keys)
    assert moved < most_moved * len(keys) / (count + 1)


def test_a_session_that_was_forgotten_has_the_same_home() -> None:
    rendezvous = Rendezvous([Place(f"n{i}") for i in range(5)])
    before = rendezvous.home(b"session")
    for i in range(20_000):
        rendezvous.home(str(i).encode())
    assert rendezvous.home(b"session") is before


def _read(body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str) -> Any:
    return read_request_info(path, "r", headers, json.dumps(body).encode())


SYSTEM = {"role": "system", "content": "You are kind."}
GENERATE = "/inference/v1/generate"
HELLO = {"role": "user", "content": "Hello"}


def test_the_header_wins_over_fields_and_these_over_the_prompt() -> None:
    body = {"model": "m", "messages": [HELLO], "prompt_cache_key": "k"}
    by_header = read_request_info(
        "/v1/chat/completions", "r", {"x-session-id": "s"}, json.dumps(body).encode()
    )
    assert (by_header.session_source, by_header.session_id) == (SessionSource.HEADER, "s")
    by_key = _read(body)
    assert (by_key.session_source, by_key.session_id) == (SessionSource.CACHE_KEY, "k")
    by_field = _read({**body, "session_id": "f"})
    assert (by_field.session_source, by_field.session_id) == (SessionSource.FIELD, "f")
    assert _read({**body, "session_id": 5}).session_source is SessionSource.CACHE_KEY
    by_prompt = _read({"model": "m", "messages": [HELLO]})
    assert (by_prompt.session_source, by_prompt.session_id) == (SessionSource.PROMPT, "")
    assert len({one.session_key for one in (by_header, by_key, by_field, by_prompt)}) == 4


@pytest.mark.parametrize("header", ["", "x" * 257, "line\nbreak", "ünï", "nul\0"])
def test_a_session_id_that_cannot_be_a_header_is_not_used(header: str) -> None:
    body = json.dumps({"messages": [HELLO]}).encode()
    info = read_request_info("/v1/chat/completions", "r", {"x-session-id": header}, body)
    assert info.session_source is SessionSource.PROMPT


def test_later_turns_of_a_conversation_are_one_session() -> None:
    first = _read({"model": "m", "messages": [SYSTEM, HELLO]})
    answer = {"role": "assistant", "content": "Hi"}
    again = {"role": "user", "content": "How are you?"}
    later = _read({"model": "m", "stream": True, "messages": [SYSTEM, HELLO, answer, again]})
    assert first.session_key == later.session_key


def test_conversations_that_share_a_system_prompt_are_different_sessions() -> None:
    other = {"role": "user", "content": "Good evening"}
    one = _read({"model": "m", "messages": [SYSTEM, HELLO]})
    two = _read({"model": "m", "messages": [SYSTEM, other]})
    assert one.session_key != two.session_key


def test_the_same_conversation_with_another_model_is_another_session() -> None:
    assert (
        _read({"model": "a", "messages": [HELLO]}).session_key
        != _read({"model": "b", "messages": [HELLO]}).session_key
    )


@pytest.mark.parametrize(
    ("long", "longer"),
    [("abc" * 2000, "abc" * 2000 + "more"), ([7] * 4000, [7] * 4000 + [8])],
    ids=["text", "token ids"],
)
def test_a_raw_prompt_that_grows_at_its_end_stays_one_session(long: Any, longer: Any) -> None:
    one = _read({"model": "m", "prompt": long}, "/v1/completions")
    two = _read({"model": "m", "prompt": longer}, "/v1/completions")
    assert one.session_key == two.session_key
    assert one.session_source is SessionSource.PROMPT


@pytest.mark.parametrize("body", [{}, {"prompt": ""}, {"messages": []}, {"messages": 3}])
def test_nothing_to_go_by_is_no_session(body: dict[str, Any]) -> None:
    info = _read(body)
    if info.session_source is SessionSource.NONE:
        assert info.session_key == b""
    else:
        assert body == {"prompt": ""}


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [([1, 2, 3], 3), ([[1, 2], [3]], 3), ([5], 1), ("x" * 398, 100), ("", 0)],
)
def test_prompt_lengths_are_guessed(prompt: Any, tokens: int) -> None:
    text = msgspec.Raw(json.dumps(prompt).encode())
    assert PromptText.of(msgspec.Raw(b""), text).num_tokens == tokens


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"max_tokens": 5}, (5, 1)),
        ("/v1/completions", {"max_tokens": 5, "max_completion_tokens": 1}, (5, 1)),
        ("/v1/completions", {"max_tokens": 5.0, "n": 3.0}, (5, 3)),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "best_of": 4}, (0, 8)),
        ("/v1/completions", {"prompt": [[1, 2], [3], [4]]}, (0, 3)),
        ("/v1/completions", {"prompt": [1, 2, 3]}, (0, 1)),
        ("/v1/completions", {"prompt": [], "n": None}, (0, 1)),
        ("/v1/chat/completions", {"max_completion_tokens": 7, "max_tokens": 5}, (7, 1)),
        ("/v1/chat/completions", {"max_completion_tokens": None, "max_tokens": 5}, (5, 1)),
        ("/v1/chat/completions", {"messages": [HELLO, HELLO], "n": 2}, (0, 2)),
        ("/v1/messages", {"max_tokens": 5, "max_completion_tokens": 1, "n": 9}, (5, 1)),
        ("/v1/responses", {"max_output_tokens": 5, "max_tokens": 1, "input": ["a"]}, (5, 1)),
        ("/v1/completions", {"max_tokens": True, "n": "x"}, (0, 1)),
        (GENERATE, {"sampling_params": {"max_tokens": 7, "n": 2}, "max_tokens": 1}, (7, 2)),
        ("/generate", {"sampling_params": {"max_new_tokens": 7, "n": 2}, "text": "a"}, (7, 2)),
        ("/generate", {"text": None, "input_ids": [[1, 2], [3]]}, (0, 2)),
        (GENERATE, {"sampling_params": ["x"], "token_ids": [1, 2]}, (0, 1)),
    ],
)
def test_longest_answers_are_those_that_a_node_gives(
    path: str, body: dict[str, Any], expected: tuple[int, int]
) -> None:
    info = _read(body, path)
    assert (info.max_tokens, info.num_answers) == expected


def test_an_adapter_of_sglangs_api_is_a_model() -> None:
    for body in ({"lora_path": "mine", "model": "m"}, {"lora_path": None, "model": "mine"}):
        assert _read({"text": "a", **body}, "/generate").asked_model == "mine"
    assert _read({"prompt": "a", "lora_path": "mine"}, "/v1/completions").asked_model == ""


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    try:
        info = read_request_info("/v1/completions", "r", {}, body)
    except BadRequest as error:
        assert error.message
    else:
        assert isinstance(json.loads(body.decode("utf-8", "replace")), dict)
        assert info.num_prompt_tokens >= 0


# Tenants, priorities, turns --------------------------------------------------------------------


def _read_as(tenant: Tenant, body: dict[str, Any], **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return read_request_info("/v1/chat/completions", "r", named, json.dumps(body).encode(), tenant)


def test_tenants_with_a_salt_share_neither_sessions_nor_prefixes() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 9000}]}
    infos = [_read_as(Tenant(salt=salt), body) for salt in (b"", b"a", b"b")]
    assert len({info.session_key for info in infos}) == 3
    assert len({info.prefix_blocks for info in infos}) == 3
    assert {len(info.prefix_blocks) for info in infos} == {2}


def test_a_salt_cannot_be_imitated_by_a_model_name() -> None:
    one = _read_as(Tenant(salt=b"ab"), {"model": "c", "messages": [HELLO]})
    two = _read_as(Tenant(salt=b"a"), {"model": "bc", "messages": [HELLO]})
    assert one.session_key != two.session_key


@pytest.mark.parametrize(
    ("best", "wanted", "given"),
    [
        (Priority.STANDARD, "", Priority.STANDARD),
        (Priority.STANDARD, "interactive", Priority.STANDARD),
        (Priority.STANDARD, "batch", Priority.BATCH),
        (Priority.INTERACTIVE, "Standard", Priority.STANDARD),
        (Priority.BATCH, "interactive", Priority.BATCH),
        (Priority.STANDARD, "first", Priority.STANDARD),
    ],
)
def test_a_request_may_only_lower_its_class(best: Priority, wanted: str, given: Priority) -> None:
    info = _read_as(Tenant(priority=best), {}, x_tandem_priority=wanted)
    assert info.priority is given


@pytest.mark.parametrize(
    ("text", "seconds"), [("1500", 1.5), ("", 0), ("-5", 0), ("1e3", 0), ("9" * 30, 0), ("２", 0)]
)
def test_a_deadline_is_whole_milliseconds(text: str, seconds: float) -> None:
    assert _read_as(Tenant(), {}, x_slo_ttft_ms=text).ttft_deadline_s == seconds


def test_a_conversation_that_went_on_is_a_later_turn() -> None:
    answer = {"role": "assistant", "content": "Hi"}
    assert not _read({"messages": [SYSTEM, HELLO]}).is_later_turn
    assert _read({"messages": [SYSTEM, HELLO, answer, HELLO]}).is_later_turn
    assert not _read({"prompt": "Hello"}).is_later_turn


def test_a_later_turn_has_the_blocks_of_the_earlier_one() -> None:
    long = {"role": "user", "content": "tell me more " * 2000}
    answer = {"role": "assistant", "content": "well " * 2000}
    first = _read({"model": "m", "messages": [SYSTEM, long]})
    later = _read({"model": "m", "messages": [SYSTEM, long, answer, HELLO]})
    count = len(first.prefix_blocks)
    assert count == 6
    assert later.prefix_blocks[:count] == first.prefix_blocks
    assert first.tokens_per_block == pytest.approx(1024, rel=0.01)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({"max_tokens": "7"}, 0),
        ({"max_tokens": -7}, 0),
        ({"max_tokens": 1 << 80}, 0),
        ({}, 0),
    ],
)
def test_the_longest_answer_is_read(body: dict[str, Any], count: int) -> None:
    assert _read(body).max_tokens == count


# Other APIs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "preamble", "prompt"),
    [("/v1/responses", "instructions", "input"), ("/v1/messages", "system", "messages")],
)
def test_other_apis_place_conversations_as_chat_does(path: str, preamble: str, prompt: str) -> None:
    opening = {"model": "m", preamble: "Be brief."}
    answer = {"role": "assistant", "content": "Hi"}
    long = {"role": "user", "content": "tell me more " * 2000}
    first = _read({**opening, prompt: [long]}, path)
    later = _read({**opening, prompt: [long, answer, HELLO]}, path)
    assert first.session_key == later.session_key
    assert (first.is_later_turn, later.is_later_turn) == (False, True)
    assert later.prefix_blocks[: len(first.prefix_blocks)] == first.prefix_blocks != ()
    changed = _read({**opening, preamble: "Be long.", prompt: [long]}, path)
    assert changed.session_key != first.session_key
    assert changed.prefix_blocks[0] != first.prefix_blocks[0]


def test_a_response_to_a_text_is_placed_as_a_completion_is() -> None:
    info = _read({"model": "m", "input": "x" * 4000, "max_output_tokens": 5}, "/v1/responses")
    assert info.session_source is SessionSource.PROMPT
    assert info.num_prompt_tokens == pytest.approx(1000, rel=0.01)
    assert info.max_tokens == 5


def test_a_question_to_the_tokenizer_is_no_prompt() -> None:
    info = _read({"model": "m", "prompt": "x" * 4000, "messages": [HELLO]}, "/tokenize")
    assert (info.generates, info.num_prompt_tokens, info.session_key) == (False, 0, b"")


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 3 << 20), st.integers(0, 1 << 18), st.integers(1, 4))
def test_a_prompt_counts_for_no_more_than_its_model_takes(
    num_tokens: int, max_model_len: int, num_prompts: int
) -> None:
    asked = request(
        num_prompt_tokens=num_tokens,
        tokens_per_block=256.0,
        num_prompts=num_prompts,
        max_tokens=1 << 30,
    )
    found = asked.bounded(max_model_len)
    if not max_model_len:
        assert found == asked, "nobody has said how long it is"
        return
    most = max_model_len * num_prompts
    assert found.num_prompt_tokens == min(num_tokens, most)
    assert found.max_tokens == max_model_len
    share = found.num_prompt_tokens / num_tokens if num_tokens else 1.0
    assert found.tokens_per_block == pytest.approx(256 * share), "as many of it are cached"


def test_each_of_several_prompts_may_be_as_long_as_the_model() -> None:
    body = json.dumps({"prompt": ["a" * 4000, "b" * 4000], "n": 3}).encode()
    found = read_request_info("/v1/completions", "r", {}, body)
    assert (found.num_prompts, found.num_answers) == (2, 6)
    assert found.bounded(600).num_prompt_tokens == 1200


def test_each_question_about_an_input_is_an_answer_of_one_token() -> None:
    body = json.dumps({"input": "a" * 4000, "questions": [{"type": "predicate"}] * 3}).encode()
    found = read_request_info("/v1/decisions", "r", {}, body)
    assert (found.num_prompts, found.num_answers, found.max_tokens) == (1, 3, 1)
    # The input is computed once, and what each question adds behind it.
    questions = json.dumps([{"type": "predicate", "instructions": "b" * 4000}] * 3)
    longer = json.dumps({"input": "a" * 4000}).replace("}", f', "questions": {questions}}}')
    told = read_request_info("/v1/decisions", "r", {}, longer.encode())
    assert 4000 < told.num_prompt_tokens < 4100 < 4100 + found.num_prompt_tokens
    assert found.prefix_blocks == completion("a" * 4000).prefix_blocks
    assert read_request_info("/v1/decisions", "r", {}, b'{"questions": 7}').num_answers == 7


@pytest.mark.parametrize(
    ("path", "field", "item"),
    [
        ("/v1/chat/completions", "messages", {}),
        ("/v1/responses", "input", {}),
        ("/v1/decisions", "questions", 1),
        ("/v1/completions", "prompt", []),
        ("/v1/completions", "n", 1),
    ],
)
def test_a_list_of_very_many_items_is_not_taken_apart(path: str, field: str, item: object) -> None:
    """It took 0.1 s for 32,768 messages, and 90 MB for a million numbers, as a body may have."""
    body = json.dumps({field: [item] * 300_000}).encode()
    tracemalloc.start()
    try:
        read_request_info(path, "r", {}, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(body)


def completion(prompt: object) -> RequestInfo:
    body = json.dumps({"prompt": prompt}).encode()
    return read_request_info("/v1/completions", "r", {}, body)


def test_each_of_several_prompts_is_known_as_it_is_alone() -> None:
    prompts = ["a" * 9000, "b" * 5000, [1, 2, 3]]
    found = completion(prompts)
    alone = [completion(prompt) for prompt in prompts]
    assert [part.prefix_blocks for part in found.parts] == [one.prefix_blocks for one in alone]
    assert [part.num_tokens for part in found.parts] == [one.num_prompt_tokens for one in alone]
    assert found.prefix_blocks == alone[0].prefix_blocks
    ones = found.by_prompt()
    assert [one.num_prompt_tokens for one in ones] == [one.num_prompt_tokens for one in alone]
    assert completion(["only"]).by_prompt() == (completion(["only"]),)


def test_many_prompts_are_as_many_parts_as_headers_have_room_for() -> None:
    many = completion([[number] * 10 for number in range(40)])
    assert len(many.parts) == 16
    assert [part.num_tokens for part in many.parts] == [30] * 8 + [20] * 8
    assert completion([[1]] * 5000).parts == (), "more than any node answers"
