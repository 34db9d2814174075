"""A field of a request is named where it comes in, in its envelope and where it is used.

Whatever lies between carries the envelope whole; a new sampling parameter costs three edits.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("decode_node", "prefill_node", "engine", "kv_transfer", "cli")
EDGE = "decode_node/protocol/"
ENVELOPE = "engine/contracts/sampling_params.py"
SAMPLER = "engine/sample"
"""One place of use, whatever its files."""
WARM_UP = "engine/worker/dummy_steps.py"
"""Asks for everything that the sampler can do."""
CALIBRATION = "engine/calibration/__main__.py"
"""Asks for texts of its own, which no client sees."""
SPEED = "engine/speed/offline_engine.py"
"""Asks for random tokens of its own, to time them."""

SEVERAL_USES = {
    "temperature": {
        "decode_node/observe/request_spans.py",  # a trace tells it
        "engine/contracts/request_spec.py",  # of a beam
        "engine/sample",
    },
    "top_p": {"decode_node/observe/request_spans.py", "engine/sample"},
    "max_tokens": {
        "decode_node/disagg/proxy.py",  # room for the answer
        "decode_node/serving/ask_limits.py",  # the size of an answer
        "decode_node/serving/prepare_choices.py",  # for the request's record
        "engine/frontend/input_processor.py",  # what is left of the context
        "engine/frontend/output_processor.py",  # the first token may be the last
        "engine/contracts/request_spec.py",  # one token
        "engine/sched/request_limits.py",
        "prefill_node/service.py",
    },
    "min_tokens": {
        "engine/frontend/output_processor.py",  # stop strings
        "engine/sample",
        "engine/contracts/request_spec.py",  # one token
        "engine/sched/choices/beams.py",
        "engine/sched/request_limits.py",  # stop tokens
    },
    "stop": {"engine/frontend/output_processor.py", "engine/contracts/request_spec.py"},
    "stop_token_ids": {
        "engine/frontend/output_processor.py",  # the first token may be the last
        "engine/sample",  # before min_tokens
        "engine/contracts/request_spec.py",  # a beam goes on behind them
        "engine/sched/choices/beams.py",
        "engine/sched/request_limits.py",
        "engine/sched/rows/row.py",
    },
    "ignore_eos": {
        "engine/frontend/output_processor.py",
        "engine/contracts/request_spec.py",  # a beam goes on behind an end
        "engine/sched/choices/beams.py",
        "engine/sched/request_limits.py",
        "engine/sched/rows/row.py",
    },
    "seed": {
        "decode_node/serving/prepare_choices.py",
        "decode_node/serving/respond.py",  # a journal begins with it
        "engine/contracts/request_spec.py",  # of each answer
        "engine/sample",
    },
    "grammar": {
        "decode_node/serving/prepare_choices.py",  # made when the prompt is known: may it think?
        "engine/sample",
        "engine/sched/request_limits.py",  # a complete document ends
    },
    "logprobs": {
        "decode_node/disagg/prefill_events.py",  # a peer gives as many
        "decode_node/serving/ask_limits.py",  # the size of an answer
        "engine/contracts/request_spec.py",  # candidates of a beam
        "engine/sample",
        "engine/sched/choices/beams.py",
    },
    "beam": {
        "decode_node/disagg/remote_prefill.py",  # candidates instead of a first token
        "engine/frontend/input_processor.py",  # a prefill node is asked for candidates
        "engine/contracts/request_spec.py",
        "engine/sched/choices/beams.py",
    },
    "prompt_logprobs": {
        "decode_node/answer/answer.py",  # an answer that echoes waits for them
        "decode_node/disagg/prefill_events.py",  # a peer gives as many
        "decode_node/disagg/proxy.py",  # nothing of the prompt comes from a cache
        "decode_node/serving/ask_limits.py",  # the size of an answer
        "decode_node/serving/prepare_choices.py",  # a client that has them is resumed without
        "engine/contracts/request.py",
        "engine/explain/kernel_keys.py",  # a warm-up step whose tokens all have logits
        "engine/sample",
    },
}
"""Places that decide something by a field, besides the sampler. Nobody is here who only hands a
field on."""


def _is_sampling(node: ast.expr) -> bool:
    """Returns whether an expression is called as sampling parameters are."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.strip("_") in ("sampling", "params", "sampling_params")


def _makes_sampling(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    of_sampling = bool(call.args) and _is_sampling(call.args[0])
    return name in ("SamplingParams", "with_sampling") or (name == "replace" and of_sampling)


def _named(source: str) -> Iterator[str]:
    if not re.search("[sS]ampling|params", source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and _is_sampling(node.value):
            yield node.attr
        elif isinstance(node, ast.Call) and _makes_sampling(node):
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)


@cache
def users_of_fields() -> dict[str, frozenset[str]]:
    """Field to the places that name it, but for its edge, its envelope and the warm-up."""
    found = defaultdict(set)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            place = SAMPLER if name.startswith(SAMPLER + "/") else name
            if not name.startswith(EDGE) and name not in (ENVELOPE, WARM_UP, CALIBRATION, SPEED):
                for field in _named(path.read_text(encoding="utf-8")):
                    found[field].add(place)
    return {field: frozenset(names) for field, names in found.items()}


@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_a_sampling_field_is_named_at_its_edge_in_its_envelope_and_where_it_is_used(
    field: str,
) -> None:
    users = users_of_fields().get(field, frozenset())
    if field in SEVERAL_USES:
        assert users == SEVERAL_USES[field], f"{field}: see SEVERAL_USES"
    else:
        assert len(users) == 1, f"{field} is named in {sorted(users)}; carry the spec whole"


def test_the_envelope_is_made_in_one_place() -> None:
    makers = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if RequestSpec.__name__ in (source := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == RequestSpec.__name__
    }
    assert makers == {"decode_node/serving/prepare_choices.py", CALIBRATION, SPEED}
