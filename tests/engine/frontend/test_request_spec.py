"""The envelope of a request arrives as it was sent, and garbage is refused by name."""

from __future__ import annotations

import typing
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.errors import InvalidRequest
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import (
    MAX_SPEC_BYTES,
    SPEC_VERSION,
    AdapterRef,
    RequestSpec,
    UnknownSpecVersion,
    decode_spec,
    encode_spec,
)
from engine.contracts.sampling_params import BeamParams, SamplingParams
from engine.images.image_input import ImageSpan
from tandem_pb import prefill_pb2

TOKENS = st.integers(0, (1 << 31) - 1)
IDS = st.lists(TOKENS, max_size=5).map(tuple)
REALS = st.floats(allow_nan=False, allow_infinity=False)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, (1 << 63) - 1),
    str: st.text(max_size=9),
    float: REALS,
    bool: st.booleans(),
    int | None: st.one_of(st.none(), TOKENS),
    list[int]: IDS.map(list),
    dict[int, float]: st.dictionaries(TOKENS, REALS, max_size=5),
    tuple[int, ...]: IDS,
    tuple[int, ...] | None: st.one_of(st.none(), IDS),
    tuple[tuple[int, ...], ...]: st.lists(IDS, max_size=3).map(tuple),
    tuple[ImageSpan, ...]: st.lists(
        st.builds(ImageSpan, TOKENS, TOKENS, TOKENS, st.binary(max_size=32)), max_size=3
    ).map(tuple),
    tuple[str, ...]: st.lists(st.text(max_size=3), max_size=3).map(tuple),
}


def any_values(kind: type[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Draws every field of `kind` with any value of its type, so that none can be forgotten."""
    return {name: VALUES[hint] for name, hint in typing.get_type_hints(kind).items()}


VALUES[bool | Literal["never"]] = st.sampled_from([False, True, "never"])
VALUES[BeamParams | None] = st.one_of(st.none(), st.builds(BeamParams, **any_values(BeamParams)))
VALUES[SamplingParams] = st.builds(SamplingParams, **any_values(SamplingParams))
VALUES[AdapterRef | None] = st.one_of(st.none(), st.builds(AdapterRef, **any_values(AdapterRef)))
SPECS = st.builds(RequestSpec, **any_values(RequestSpec))


@given(spec=SPECS)
def test_it_crosses_between_nodes_without_its_stop_strings(spec: RequestSpec) -> None:
    found = decode_spec(encode_spec(spec), spec.prompt_token_ids)
    assert found == spec.with_sampling(stop=())


@given(spec=SPECS)
def test_it_reaches_the_engine_core_whole(spec: RequestSpec) -> None:
    sent = msgspec.msgpack.encode(EngineCoreRequest(request_id="r", spec=spec))
    assert msgspec.msgpack.decode(sent, type=EngineCoreRequest).spec == spec


def test_no_number_of_a_field_is_used_twice() -> None:
    for kind in (RequestSpec, SamplingParams):
        names = kind.__struct_encode_fields__
        assert len(set(names)) == len(names)
        assert all(name.isdigit() for name in names), "a field without its number"


SEED = 0x9E3779B97F4A7C15
ORDINARY: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({}, {}, 43),
    ({"max_tokens": 4096, "temperature": 0.0}, {}, 34),
    ({"temperature": 0.7, "top_p": 0.9}, {"prefix_hash": SEED}, 52),
    ({"temperature": 0.7, "top_p": 0.9}, {"prefix_hash": SEED, "cache_salt": "f" * 32}, 86),
]


@pytest.mark.parametrize(("sampling", "fields", "limit"), ORDINARY)
def test_ordinary_requests_are_small(
    sampling: dict[str, Any], fields: dict[str, Any], limit: int
) -> None:
    """`limit` is the number of bytes that one protobuf field for each parameter takes."""
    params = SamplingParams(**{"max_tokens": 128, "seed": SEED, **sampling})
    spec = RequestSpec([1, 2, 3], params, **fields)
    assert prefill_pb2.PrefillRequest(spec=encode_spec(spec)).ByteSize() <= limit


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc0",
        b"\x91\x01",
        b"\x81\x02\xc0",
        b"\x81\x63\x01",
        b"\x81\x02\x81\x63\x01",
        b"\x81\x02\x81\xc0\x01",
        b"\x81\x04\xa1x",
        b"\x81\x04\xcb" + bytes(8),
        b"\x81\x05\xa2\xff\xfe",
        b"\x80extra",
        b"\x81\x02" * 100_000,
        b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff",
        b"\x81\x02\x81\x0d\xdd\xff\xff\xff\xff",
        b"\x81\x01\xdd\x7f\xff\xff\xff",
        bytes(MAX_SPEC_BYTES),
    ],
)
def test_garbage_is_a_typed_refusal(content: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_spec(bytes((SPEC_VERSION,)) + content, [1])
    assert caught.value.param == "spec"
    assert 10 < len(str(caught.value)) <= 300


@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_spec_or_refused(content: bytes) -> None:
    try:
        spec = decode_spec(bytes((SPEC_VERSION,)) + content, [1])
    except InvalidRequest:
        return
    assert spec.prompt_token_ids == [1]


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x02\x80", b"\xff"])
def test_another_version_is_refused_by_its_number(data: bytes) -> None:
    with pytest.raises(UnknownSpecVersion, match=f"version {data[0] if data else 0} "):
        decode_spec(data, [1])
