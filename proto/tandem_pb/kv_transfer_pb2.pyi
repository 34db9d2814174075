from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KVLayout(_message.Message):
    __slots__ = ("protocol_version", "model_hash", "tp_size", "groups", "num_draft_layers", "draft_hash", "stage_starts")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_HASH_FIELD_NUMBER: _ClassVar[int]
    STAGE_STARTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model_hash: str
    tp_size: int
    groups: _containers.RepeatedCompositeFieldContainer[KVGroup]
    num_draft_layers: int
    draft_hash: str
    stage_starts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, protocol_version: _Optional[int] = ..., model_hash: _Optional[str] = ..., tp_size: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KVGroup, _Mapping]]] = ..., num_draft_layers: _Optional[int] = ..., draft_hash: _Optional[str] = ..., stage_starts: _Optional[_Iterable[int]] = ...) -> None: ...

class KVGroup(_message.Message):
    __slots__ = ("layers", "planes", "block_size", "dtype", "window", "scales", "compress_ratio", "window_align", "blocks_of")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    COMPRESS_RATIO_FIELD_NUMBER: _ClassVar[int]
    WINDOW_ALIGN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_OF_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    planes: _containers.RepeatedCompositeFieldContainer[KVPlane]
    block_size: int
    dtype: str
    window: int
    scales: str
    compress_ratio: int
    window_align: int
    blocks_of: int
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., planes: _Optional[_Iterable[_Union[KVPlane, _Mapping]]] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., window: _Optional[int] = ..., scales: _Optional[str] = ..., compress_ratio: _Optional[int] = ..., window_align: _Optional[int] = ..., blocks_of: _Optional[int] = ...) -> None: ...

class KVPlane(_message.Message):
    __slots__ = ("name", "heads", "row_bytes", "replicated")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLICATED_FIELD_NUMBER: _ClassVar[int]
    name: str
    heads: int
    row_bytes: int
    replicated: bool
    def __init__(self, name: _Optional[str] = ..., heads: _Optional[int] = ..., row_bytes: _Optional[int] = ..., replicated: bool = ...) -> None: ...

class KVPeer(_message.Message):
    __slots__ = ("engine_id", "epoch", "layout", "ranks", "host_id", "transports", "groups", "names_group")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NAMES_GROUP_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    epoch: int
    layout: KVLayout
    ranks: _containers.RepeatedCompositeFieldContainer[RankEndpoints]
    host_id: str
    transports: _containers.RepeatedCompositeFieldContainer[Transport]
    groups: _containers.RepeatedCompositeFieldContainer[KVPeer]
    names_group: bool
    def __init__(self, engine_id: _Optional[str] = ..., epoch: _Optional[int] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankEndpoints, _Mapping]]] = ..., host_id: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[Transport, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[KVPeer, _Mapping]]] = ..., names_group: bool = ...) -> None: ...

class Transport(_message.Message):
    __slots__ = ("id", "data")
    ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    id: int
    data: bytes
    def __init__(self, id: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class RankEndpoints(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("transfer_id", "attempt", "epoch", "stream_index", "num_streams", "rank", "tp_size", "first_token", "num_tokens", "repeat_chunks", "transport", "first_layer", "stop_layer")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STREAM_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPEAT_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    STOP_LAYER_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    attempt: int
    epoch: int
    stream_index: int
    num_streams: int
    rank: int
    tp_size: int
    first_token: int
    num_tokens: int
    repeat_chunks: _containers.RepeatedScalarFieldContainer[int]
    transport: int
    first_layer: int
    stop_layer: int
    def __init__(self, transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., stream_index: _Optional[int] = ..., num_streams: _Optional[int] = ..., rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., repeat_chunks: _Optional[_Iterable[int]] = ..., transport: _Optional[int] = ..., first_layer: _Optional[int] = ..., stop_layer: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("transfer_id", "attempt", "epoch", "complete")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    attempt: int
    epoch: int
    complete: bool
    def __init__(self, transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., complete: bool = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: bool = ...) -> None: ...
