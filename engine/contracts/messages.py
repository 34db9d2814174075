"""Messages between the node server (`engine.frontend`) and the engine core process.

One tagged union for each direction, msgspec over ZeroMQ. Never pickle.
"""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.contracts.outputs import PromptLogprobs, SchedulerStats, SiblingTokens, TokenLogprobs
from engine.contracts.prefix_holder import HashChains
from engine.contracts.reports.crash_facts import EngineFacts
from engine.contracts.reports.profiles import Profile, ProfileOptions, RefusalCode
from engine.contracts.request_spec import RequestSpec
from engine.images.image_input import ImagePixels
from kv_transfer.errors import KV_TRANSFER
from kv_transfer.metadata import KVPeer, KVTransferParams, TransferStats

# To the engine core ---------------------------------------------------------------------------


class EngineCoreRequest(msgspec.Struct, tag="add", kw_only=True, omit_defaults=True):
    """A new request: its spec, and what belongs to this node alone.

    With `choice_ids`, one for each of `spec.seeds`, it is several: `request_id` names the prompt,
    and the answers are requests of their own from the start. Without, and with several seeds, the
    prompt's request has all first tokens in its output.

    `group`: the data-parallel group that is to serve it; -1: the engine chooses.
    `pixels`: of the images of `spec`, one for each digest; none where others encode them.
    """

    request_id: str
    spec: RequestSpec
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0
    kv_transfer_params: KVTransferParams | None = None
    choice_ids: tuple[str, ...] = ()
    group: int = -1
    pixels: tuple[ImagePixels, ...] = ()
    prefix_peer: str = ""
    """Names who may hold a prefix of the prompt (`engine.contracts.prefix_holder`)."""


class AbortRequests(msgspec.Struct, tag="abort"):
    request_ids: list[str]


class SupplyFirstToken(msgspec.Struct, tag="first_token"):
    """Tells a decode engine the token that the prefill node sampled, and those of further answers
    to the same prompt."""

    request_id: str
    token_id: int
    sibling_token_ids: list[int] = []
    draft_feature: bytes = b""


class SupplyCandidates(msgspec.Struct, tag="candidates"):
    """Tells a decode engine what the prefill node found for the first token of a beam search."""

    request_id: str
    candidates: TokenLogprobs


class PromptComputed(msgspec.Struct, tag="prompt_computed"):
    """Tells a decode engine that the peer of a later attempt has computed the prompt too."""

    request_id: str


class RetryRemotePrefill(msgspec.Struct, tag="retry"):
    """Makes a decode engine pull again, from another peer or with a new attempt. Only after a
    failure of the current attempt was reported, or to replace one that is in motion (which is
    aborted first)."""

    request_id: str
    kv_transfer_params: KVTransferParams


class PrefillLocally(msgspec.Struct, tag="prefill_locally"):
    """Makes a decode engine give up on remote KV and compute the prompt itself, first token or
    not."""

    request_id: str


class PrefixAnswer(msgspec.Struct, tag="prefix_answer"):
    """Answers a `PrefixAsk`: the peer holds the first `num_tokens` for the transfer that
    `kv_transfer_params` name. Without them there is nothing to pull."""

    request_id: str
    number: int
    kv_transfer_params: KVTransferParams | None = None
    num_tokens: int = 0


class OfferPrefix(msgspec.Struct, tag="offer_prefix"):
    """Asks for a prefix of the prompt with these hashes, for a peer that will pull it. Is answered
    with the `PrefixOffered` of this call."""

    call_id: int
    chains: HashChains


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Is answered with the `PrefixCacheReset` of this call."""

    call_id: int


class StartProfile(msgspec.Struct, tag="start_profile"):
    """Is answered with the `ProfileAnswer` of this call."""

    call_id: int
    options: ProfileOptions


class StopProfile(msgspec.Struct, tag="stop_profile"):
    """Is answered once all files are written."""

    call_id: int


class AddAdapter(msgspec.Struct, tag="add_adapter"):
    """Is answered by the `AdapterAnswer` of this call, once requests may use the adapter."""

    call_id: int
    digest: str
    path: str


class RemoveAdapter(msgspec.Struct, tag="remove_adapter"):
    """Is answered once no request uses the adapter any more, and it is forgotten; or at once, when
    it is added again meanwhile."""

    call_id: int
    digest: str


class SwitchRole(msgspec.Struct, tag="switch_role", kw_only=True):
    """Makes the engine that of `engine`, for which its workers have everything already. Answered by
    the `RoleSwitched` of this call. What is left of requests and transfers after `empty_within_s`
    is given up."""

    call_id: int
    engine: EngineConfig
    empty_within_s: float


class DescribeEngine(msgspec.Struct, tag="describe"):
    """Is answered by `EngineDescription`, for a crash report."""


class ShutdownEngine(msgspec.Struct, tag="shutdown"):
    pass


RequestMessage = (
    EngineCoreRequest
    | AbortRequests
    | SupplyFirstToken
    | SupplyCandidates
    | PromptComputed
    | RetryRemotePrefill
    | PrefillLocally
    | PrefixAnswer
)

ToEngineCore = (
    RequestMessage
    | OfferPrefix
    | ResetPrefixCache
    | StartProfile
    | StopProfile
    | AddAdapter
    | RemoveAdapter
    | SwitchRole
    | DescribeEngine
    | ShutdownEngine
)

# From the engine core -------------------------------------------------------------------------


class LoadProgress(msgspec.Struct, tag="progress"):
    """Tells what a starting engine is doing and how far it is, in 0..1: of the bytes that its
    slowest rank reads, where bytes are counted."""

    stage: str
    fraction: float
    total_bytes: int = 0


class EngineReady(msgspec.Struct, tag="ready", kw_only=True):
    num_blocks: int
    peer: KVPeer | None = None
    device_name: str = ""
    """The GPU's, as its driver has it; empty: none."""
    worker_pids: list[int] = []
    transfer_pids: list[int] = []
    model_hash: str = ""
    """The identity of what was loaded."""


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """Carries new tokens of one request. `finish_reason` is stop, length, abort, error or empty."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str = ""
    stop_reason: int | None = None
    """The stop token id that ended it, if one of the request's own did."""
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that were not computed; with the first output only."""
    queue_s: float = 0.0
    """Seconds from arrival until first scheduled; with the first output only."""
    num_output_tokens_before: int = 0
    """Output tokens before these, with the first output only: 1 when it follows a first token that
    a peer sampled."""
    error: str = ""
    """Says what was wrong and what to do, with finish_reason error; with abort, why only another
    node can go on."""
    prompt_logprobs: PromptLogprobs | None = None
    """A part of the prompt's log probabilities, in order and all before the first token. One that
    begins with the prompt replaces what came before: the prompt is computed again."""
    siblings: SiblingTokens | None = None
    """First tokens of further answers, of a request that draws for several."""
    draft_feature: bytes | None = None
    """Holds what a drafter reads of the last prompt token, with a prefill node's first token."""
    group: int = -1
    """The data-parallel group that was chosen for a prompt whose KV a peer pulls, before anything
    else gets it; -1: none."""


class KVTransferResult(msgspec.Struct, array_like=True):
    """Tells that a request's KV arrived or was taken (`ok`), or that its attempt failed.
    `is_called_off` says, on a prefill node, that the peer did not want it any more, which is no
    failure. `code`: of a failure, the kind of its `KVTransferError`."""

    request_id: str
    attempt: int
    ok: bool
    stats: TransferStats = TransferStats()
    reason: str = ""
    retryable: bool = True
    is_called_off: bool = False
    code: str = KV_TRANSFER


class PrefixAsk(msgspec.Struct, array_like=True):
    """Asks the node server to ask a peer how much it holds of the prompt with these hashes. Is
    answered with the `PrefixAnswer` of this number, always."""

    request_id: str
    number: int
    peer: str
    chains: HashChains


class EngineCoreOutputs(msgspec.Struct, tag="outputs", kw_only=True):
    outputs: list[EngineCoreOutput] = []
    kv_results: list[KVTransferResult] = []
    prefix_asks: list[PrefixAsk] = []
    stats: SchedulerStats | None = None
    timestamp: float = 0.0
    """The time in CLOCK_MONOTONIC seconds when the step's result was processed."""


class PrefixOffered(msgspec.Struct, tag="prefix_offered"):
    """Answers `OfferPrefix`: the data-parallel group `group` holds the first `num_tokens` under
    this transfer."""

    call_id: int
    transfer_id: str
    num_tokens: int
    group: int = 0


class PrefixCacheReset(msgspec.Struct, tag="prefix_cache_reset"):
    """Answers `ResetPrefixCache`. It is not `ok` when running requests hold blocks; try again
    later."""

    call_id: int
    ok: bool


class ProfileAnswer(msgspec.Struct, tag="profile", kw_only=True):
    """Answers one call: by the profile, or by why it was refused."""

    call_id: int
    profile: Profile | None = None
    refusal: str = ""
    code: RefusalCode = "profile_failed"


class AdapterAnswer(msgspec.Struct, tag="adapter"):
    """Answers one call; `error` says why an adapter cannot be served."""

    call_id: int
    error: str = ""


class RoleSwitched(msgspec.Struct, tag="role_switched"):
    """Answers `SwitchRole`. `ready` is the engine as it is now; None: refused, nothing changed."""

    call_id: int
    ready: EngineReady | None = None
    refusal: str = ""


class EngineDescription(msgspec.Struct, tag="description"):
    """Answers `DescribeEngine`."""

    facts: EngineFacts


class EngineDead(msgspec.Struct, tag="dead"):
    """Is the last message: the engine cannot go on. `reason` names the cause and the cure; `facts`
    are for the crash report. With them, the process waits for `ShutdownEngine` for a while, so that
    its stacks and those of its workers can be taken."""

    reason: str
    facts: EngineFacts | None = None


class PeerChanged(msgspec.Struct, tag="peer", kw_only=True):
    """Tells that the endpoints of this engine's KV have changed since `EngineReady`."""

    peer: KVPeer


EngineAnswer = PrefixOffered | PrefixCacheReset | ProfileAnswer | AdapterAnswer | RoleSwitched
"""Answers the call of its `call_id`."""

FromEngineCore = (
    LoadProgress
    | EngineReady
    | EngineCoreOutputs
    | EngineAnswer
    | EngineDescription
    | PeerChanged
    | EngineDead
)
