"""One envelope for all that a request asks for.

    1. the HTTP edge of a decode node makes a `RequestSpec`, which `InputProcessor` completes
    2. `EngineCoreRequest` carries it whole to the engine core
    3. `encode_spec` puts it into the `Prefill` call; `decode_spec` reads it on the prefill node,
       whose own `InputProcessor` checks it again, because a peer's word is not believed

Nothing between the edge and the place of use names a field of it. What belongs to one node and not
to the request stays outside: ids, arrival times, traces, where the KV comes from.

Bytes of the `Prefill` call: one byte of version, then a MessagePack map from field numbers to what
differs from the defaults, the same for `sampling` inside it, and without two fields:

- the prompt travels beside it as packed varints, which are smaller;
- stop strings stay on the decode node, which matches text alone.

The version grows when the meaning of something known changes. A new field needs no new version: a
node that does not know it refuses the requests that use it, by the field's number, and serves all
others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from engine.contracts.errors import InvalidRequest, check
from engine.contracts.sampling_params import SamplingParams
from engine.images.image_input import DIGEST_BYTES, ImageSpan, position_delta

SPEC_VERSION = 1
MAX_SPEC_BYTES = 1 << 20
"""The size of a spec without its prompt. The limits of all fields together allow less than half of
it.
"""
MAX_SALT_LENGTH = 4096
MAX_CHOICES = 1024
"""Answers to one prompt."""
IDLE_PRIORITY = (1 << 31) - 1
"""The lowest: of requests that use what no other request does."""


class UnknownSpecVersion(InvalidRequest):
    """The peer runs another release, which means something else by the same names."""


class AdapterRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names an adapter of the model.

    Attributes:
        name: What the client asked for, which messages and metrics repeat.
        digest: What the adapter is: SHA-256 of its files, in hexadecimal. Everything that depends
            on the adapter goes by it; two names may have one digest.
    """

    name: str
    digest: str

    def to_dict(self) -> dict[str, str]:
        """Returns it as logs and records hold it."""
        return {"name": self.name, "digest": self.digest}


class RequestSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request as every node that works on it sees it.

    Attributes:
        prompt_token_ids: The prompt, and behind it output that the client has already.
        sampling: How tokens are chosen.
        num_resumed_tokens: This many tokens at the end of the prompt are output that another node
            has given to the client. They count as output for penalties, `min_tokens`, `max_tokens`
            and bad words.
        priority: Smaller runs first, where the scheduler looks at it. 32 bits. `IDLE_PRIORITY`: it
            uses what no other request does, and reports of load count it apart.
        cache_salt: Separates the prefix caches of tenants.
        prefix_hash: The name that routers give to the prompt's beginning; 0 for none. Nodes repeat
            it in their reports, and the engine does not use it.
        images: Those of the prompt, in order. Their pixels travel beside the spec.
        sibling_seeds: Seeds of further answers to the same prompt, which are chosen like the first
            in everything else. With them, prompt and first tokens are computed once for all.
        adapter: Whose weights are added to the model's; None: the model answers as it is.
    """

    prompt_token_ids: list[int] = msgspec.field(default_factory=list, name="1")
    sampling: SamplingParams = msgspec.field(default=SamplingParams(), name="2")
    num_resumed_tokens: int = msgspec.field(default=0, name="3")
    priority: int = msgspec.field(default=0, name="4")
    cache_salt: str = msgspec.field(default="", name="5")
    prefix_hash: int = msgspec.field(default=0, name="6")
    sibling_seeds: tuple[int, ...] = msgspec.field(default=(), name="7")
    images: tuple[ImageSpan, ...] = msgspec.field(default=(), name="8")
    adapter: AdapterRef | None = msgspec.field(default=None, name="9")

    @property
    def is_idle_class(self) -> bool:
        """Returns whether it may only use what no other request does."""
        return self.priority == IDLE_PRIORITY

    @property
    def num_own_prompt_tokens(self) -> int:
        """Returns the prompt's length without resumed output."""
        return len(self.prompt_token_ids) - self.num_resumed_tokens

    @property
    def own_prompt_token_ids(self) -> list[int]:
        """Returns the prompt without resumed output."""
        return self.prompt_token_ids[: self.num_own_prompt_tokens]

    @property
    def resumed_token_ids(self) -> list[int]:
        """Returns the output that the client has already."""
        return self.prompt_token_ids[self.num_own_prompt_tokens :]

    @property
    def needs_one_token(self) -> bool:
        """Returns whether the next token is the last, and is chosen by the node that computes the
        prompt."""
        return (
            self.sampling.beam is None and self.sampling.max_tokens == self.num_resumed_tokens + 1
        )

    def has_images_behind(self, num_tokens: int) -> bool:
        """Returns whether an image ends behind the first `num_tokens` of the prompt."""
        return bool(self.images) and num_tokens < self.images[-1].end

    def with_prompt(self, token_ids: list[int]) -> RequestSpec:
        """Returns a copy for another prompt."""
        return msgspec.structs.replace(self, prompt_token_ids=token_ids)

    def with_prefix_hash(self, prefix_hash: int) -> RequestSpec:
        """Returns a copy by whose name routers know the prompt's beginning."""
        return msgspec.structs.replace(self, prefix_hash=prefix_hash)

    def with_images(self, images: tuple[ImageSpan, ...]) -> RequestSpec:
        """Returns a copy whose prompt has `images`."""
        return msgspec.structs.replace(self, images=images)

    def with_sampling(self, **changes: object) -> RequestSpec:
        """Returns a copy with some sampling parameters replaced."""
        sampling = msgspec.structs.replace(self.sampling, **changes)
        return msgspec.structs.replace(self, sampling=sampling)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Returns the seed of each answer."""
        return (self.sampling.seed, *self.sibling_seeds)

    @property
    def num_rows(self) -> int:
        """Returns how many answers, or beams, grow at the same time."""
        beam = self.sampling.beam
        return len(self.seeds) if beam is None else beam.width

    def ranked(self, rank: int) -> RequestSpec:
        """Returns a copy that asks for answer number `rank` of a beam search, if it is one."""
        beam = self.sampling.beam
        if beam is None:
            return self
        return self.with_sampling(beam=msgspec.structs.replace(beam, rank=rank))

    def of_choice(self, index: int) -> RequestSpec:
        """Returns a copy for answer number `index` alone."""
        sampling = msgspec.structs.replace(self.sampling, seed=self.seeds[index])
        return msgspec.structs.replace(self, sampling=sampling, sibling_seeds=())

    def with_siblings(self, others: Sequence[RequestSpec]) -> RequestSpec:
        """Returns a copy that asks for `others` too, which differ in their seeds alone."""
        seeds = tuple(other.sampling.seed for other in others)
        return msgspec.structs.replace(self, sibling_seeds=seeds)

    def for_one_token(self) -> RequestSpec:
        """Returns a copy whose answers end with their next token."""
        limit = self.num_resumed_tokens + 1
        min_tokens = min(self.sampling.min_tokens, limit)
        return self.with_sampling(max_tokens=limit, min_tokens=min_tokens)

    def for_candidates(self, eos_token_ids: Collection[int]) -> RequestSpec:
        """Returns a copy of a beam search that asks for the candidates of its next token: they are
        the log probabilities of that one, and no end of the answer."""
        beam, sampling = self.sampling.beam, self.sampling
        assert beam is not None
        num_stops = len({*sampling.stop_token_ids, *eos_token_ids})
        wanted = max(beam.num_candidates(num_stops), sampling.logprobs or 0)
        spec = self.for_one_token().with_sampling(
            beam=None,
            temperature=0.0,
            min_tokens=0,
            ignore_eos=True,
            stop_token_ids=(),
            logprobs=wanted,
        )
        return msgspec.structs.replace(spec, sibling_seeds=())

    def resumed_after(self, token_ids: Sequence[int]) -> RequestSpec:
        """Returns a copy that goes on after the output `token_ids`."""
        tokens = self.own_prompt_token_ids
        tokens += token_ids
        return msgspec.structs.replace(
            self, prompt_token_ids=tokens, num_resumed_tokens=len(token_ids)
        )

    def check(self) -> None:
        """Raises `InvalidRequest` for what has nothing to do with the model."""
        count = len(self.prompt_token_ids)
        check(count > 0, "prompt", "is empty; send at least one token")
        check(0 <= self.num_resumed_tokens < count, "resume", "leaves nothing of the prompt")
        check(-(1 << 31) <= self.priority < 1 << 31, "priority", "must have 32 bits")
        check(0 <= self.prefix_hash < 1 << 64, "prefix_hash", "must have 64 bits")
        check(
            len(self.sibling_seeds) < MAX_CHOICES,
            "n",
            f"must be at most {MAX_CHOICES} for one prompt",
        )
        check(all(0 <= seed < 1 << 64 for seed in self.sibling_seeds), "seed", "must have 64 bits")
        check(
            not (self.sibling_seeds and self.num_resumed_tokens),
            "resume",
            "is of one answer at a time",
        )
        beam = self.sampling.beam
        check(beam is None or not self.num_resumed_tokens, "resume", "is of no beam search")
        check(
            beam is None or beam.rank + len(self.seeds) <= beam.width,
            "n",
            "must be at most best_of with use_beam_search",
        )
        self._check_images()
        check(
            self.adapter is None or _DIGEST.fullmatch(self.adapter.digest) is not None,
            "model",
            "names an adapter without a digest of 64 hexadecimal digits",
        )
        check(
            len(self.cache_salt) <= MAX_SALT_LENGTH,
            "cache_salt",
            f"must have at most {MAX_SALT_LENGTH} characters, with the tenant's",
        )

    def _check_images(self) -> None:
        """Raises `InvalidRequest` unless images lie in the prompt one behind the other, and no
        position is behind the prompt's end."""
        end = 0
        for image in self.images:
            check(
                len(image.digest) == DIGEST_BYTES
                and min(image.rows, image.columns) > 0
                and end <= image.offset
                and (image.offset == end > 0 if image.joins else image.time == 0)
                and min(image.time, image.first, image.beside) >= 0
                and image.first <= image.beside
                and image.end <= self.num_own_prompt_tokens,
                "images",
                "do not lie in the prompt one behind the other",
            )
            end = image.end
        check(
            position_delta(self.images) <= 0,
            "images",
            "of a video are too few for its time; send a shorter part of it, or larger frames",
        )


_DIGEST = re.compile("[0-9a-f]{64}")
_SAMPLING = 2
"""Number of the field `sampling`."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[int, Any]).decode


def encode_spec(spec: RequestSpec) -> bytes:
    """Returns the bytes for a `Prefill` call, without the prompt and the stop strings."""
    sampling = spec.sampling
    if sampling.stop:
        sampling = msgspec.structs.replace(sampling, stop=())
    spec = msgspec.structs.replace(spec, prompt_token_ids=[], sampling=sampling)
    fields = _numbered(msgspec.to_builtins(spec, builtin_types=(bytes,)))
    if _SAMPLING in fields:
        fields[_SAMPLING] = _numbered(fields[_SAMPLING])
    return bytes((SPEC_VERSION,)) + _encode(fields)


def decode_spec(data: bytes, prompt_token_ids: list[int]) -> RequestSpec:
    """Reads what `encode_spec` wrote. Types are right afterwards, values are unchecked.

    Raises `UnknownSpecVersion`, and `InvalidRequest` for everything else.
    """
    if len(data) > MAX_SPEC_BYTES:
        raise InvalidRequest(
            f"the request spec has {len(data)} bytes, more than {MAX_SPEC_BYTES}", "spec"
        )
    version = data[0] if data else 0
    if version != SPEC_VERSION:
        raise UnknownSpecVersion(
            f"request spec version {version} is not known here, only version {SPEC_VERSION}; "
            f"run the same release on prefill and decode nodes",
            "spec",
        )
    try:
        fields = _decode(memoryview(data)[1:])
        if isinstance(sampling := fields.get(_SAMPLING), dict):
            fields[_SAMPLING] = _named(sampling)
        spec = msgspec.convert(_named(fields), RequestSpec)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request spec cannot be read: {error}"[:300], "spec") from None
    return spec.with_prompt(prompt_token_ids)


def _numbered(fields: dict[str, Any]) -> dict[int, Any]:
    return {int(name): value for name, value in fields.items()}


def _named(fields: dict[int, Any]) -> dict[str, Any]:
    return {str(number): value for number, value in fields.items()}
