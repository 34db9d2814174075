from tandem_pb import kv_transfer_pb2 as _kv_transfer_pb2
from tandem_pb import node_pb2 as _node_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandshakeRequest(_message.Message):
    __slots__ = ("decode",)
    DECODE_FIELD_NUMBER: _ClassVar[int]
    decode: _kv_transfer_pb2.KVPeer
    def __init__(self, decode: _Optional[_Union[_kv_transfer_pb2.KVPeer, _Mapping]] = ...) -> None: ...

class HandshakeReply(_message.Message):
    __slots__ = ("prefill", "load")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    prefill: _kv_transfer_pb2.KVPeer
    load: _node_pb2.NodeLoad
    def __init__(self, prefill: _Optional[_Union[_kv_transfer_pb2.KVPeer, _Mapping]] = ..., load: _Optional[_Union[_node_pb2.NodeLoad, _Mapping]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "transfer_id", "attempt", "expected_epoch", "prompt_token_ids", "first_token_only", "spec", "prefix_holder", "images", "reads_group")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ONLY_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HOLDER_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    READS_GROUP_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    transfer_id: str
    attempt: int
    expected_epoch: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_token_only: bool
    spec: bytes
    prefix_holder: str
    images: _containers.RepeatedCompositeFieldContainer[ImagePixels]
    reads_group: bool
    def __init__(self, request_id: _Optional[str] = ..., transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., expected_epoch: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., first_token_only: bool = ..., spec: _Optional[bytes] = ..., prefix_holder: _Optional[str] = ..., images: _Optional[_Iterable[_Union[ImagePixels, _Mapping]]] = ..., reads_group: bool = ...) -> None: ...

class ImagePixels(_message.Message):
    __slots__ = ("rows", "columns", "patches")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    rows: int
    columns: int
    patches: bytes
    def __init__(self, rows: _Optional[int] = ..., columns: _Optional[int] = ..., patches: _Optional[bytes] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("accepted", "first_token", "done", "failed", "prompt_logprobs", "load")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    first_token: FirstToken
    done: Done
    failed: Failed
    prompt_logprobs: PromptLogprobs
    load: _node_pb2.NodeLoad
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., load: _Optional[_Union[_node_pb2.NodeLoad, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: int
    def __init__(self, group: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprobs", "num_cached_tokens", "queue_s", "prefill_s", "siblings", "draft_feature")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FEATURE_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: TokenLogprobs
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    siblings: _containers.RepeatedCompositeFieldContainer[SiblingToken]
    draft_feature: bytes
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., siblings: _Optional[_Iterable[_Union[SiblingToken, _Mapping]]] = ..., draft_feature: _Optional[bytes] = ...) -> None: ...

class SiblingToken(_message.Message):
    __slots__ = ("token_id", "logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: TokenLogprobs
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs", "rank")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_position", "num_top", "token_ids", "logprobs", "ranks")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    num_top: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    def __init__(self, first_position: _Optional[int] = ..., num_top: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("kv_bytes",)
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    kv_bytes: int
    def __init__(self, kv_bytes: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("code", "message", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retryable: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: bool = ...) -> None: ...
