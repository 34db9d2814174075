from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_ROLE_UNSPECIFIED: _ClassVar[NodeRole]
    NODE_ROLE_PREFILL: _ClassVar[NodeRole]
    NODE_ROLE_DECODE: _ClassVar[NodeRole]
NODE_ROLE_UNSPECIFIED: NodeRole
NODE_ROLE_PREFILL: NodeRole
NODE_ROLE_DECODE: NodeRole

class SetDrainedRequest(_message.Message):
    __slots__ = ("drained",)
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    def __init__(self, drained: bool = ...) -> None: ...

class SetDrainedAnswer(_message.Message):
    __slots__ = ("load", "changed")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    load: NodeLoad
    changed: bool
    def __init__(self, load: _Optional[_Union[NodeLoad, _Mapping]] = ..., changed: bool = ...) -> None: ...

class SwitchRoleRequest(_message.Message):
    __slots__ = ("role", "drain_timeout_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    role: NodeRole
    drain_timeout_s: float
    def __init__(self, role: _Optional[_Union[NodeRole, str]] = ..., drain_timeout_s: _Optional[float] = ...) -> None: ...

class SwitchRoleAnswer(_message.Message):
    __slots__ = ("node_id", "epoch")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "in_place", "version", "digest", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    in_place: bool
    version: int
    digest: str
    model: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., in_place: bool = ..., version: _Optional[int] = ..., digest: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class AdapterCall(_message.Message):
    __slots__ = ("name", "digest", "path", "version", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    path: str
    version: int
    model: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., path: _Optional[str] = ..., version: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "version", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    model: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("num_steps", "seconds", "with_stack", "record_shapes")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WITH_STACK_FIELD_NUMBER: _ClassVar[int]
    RECORD_SHAPES_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    seconds: float
    with_stack: bool
    record_shapes: bool
    def __init__(self, num_steps: _Optional[int] = ..., seconds: _Optional[float] = ..., with_stack: bool = ..., record_shapes: bool = ...) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Profile(_message.Message):
    __slots__ = ("name", "num_steps", "seconds", "ended_by", "traces")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_BY_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_steps: int
    seconds: float
    ended_by: str
    traces: _containers.RepeatedCompositeFieldContainer[RankTrace]
    def __init__(self, name: _Optional[str] = ..., num_steps: _Optional[int] = ..., seconds: _Optional[float] = ..., ended_by: _Optional[str] = ..., traces: _Optional[_Iterable[_Union[RankTrace, _Mapping]]] = ...) -> None: ...

class RankTrace(_message.Message):
    __slots__ = ("rank", "host", "path", "error")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    path: str
    error: str
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., path: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class AbortAnswersRequest(_message.Message):
    __slots__ = ("names", "all", "call")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    call: int
    def __init__(self, names: _Optional[_Iterable[str]] = ..., all: bool = ..., call: _Optional[int] = ...) -> None: ...

class AbortCall(_message.Message):
    __slots__ = ("call", "part", "names", "all", "age_s")
    CALL_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    call: int
    part: int
    names: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    age_s: float
    def __init__(self, call: _Optional[int] = ..., part: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., all: bool = ..., age_s: _Optional[float] = ...) -> None: ...

class AbortAnswersAnswer(_message.Message):
    __slots__ = ("num_aborted",)
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    def __init__(self, num_aborted: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("within_s",)
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    within_s: float
    def __init__(self, within_s: _Optional[float] = ...) -> None: ...

class ResetPrefixCacheAnswer(_message.Message):
    __slots__ = ("is_reset",)
    IS_RESET_FIELD_NUMBER: _ClassVar[int]
    is_reset: bool
    def __init__(self, is_reset: bool = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("interval_s", "keeps_adapters", "change_interval_s", "takes_adapter_changes")
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    KEEPS_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    TAKES_ADAPTER_CHANGES_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    keeps_adapters: bool
    change_interval_s: float
    takes_adapter_changes: bool
    def __init__(self, interval_s: _Optional[float] = ..., keeps_adapters: bool = ..., change_interval_s: _Optional[float] = ..., takes_adapter_changes: bool = ...) -> None: ...

class KVPath(_message.Message):
    __slots__ = ("prefill_node", "bytes_per_s", "backlog_bytes", "avoided_s", "num_pulls")
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    AVOIDED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PULLS_FIELD_NUMBER: _ClassVar[int]
    prefill_node: str
    bytes_per_s: float
    backlog_bytes: int
    avoided_s: float
    num_pulls: int
    def __init__(self, prefill_node: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., backlog_bytes: _Optional[int] = ..., avoided_s: _Optional[float] = ..., num_pulls: _Optional[int] = ...) -> None: ...

class GroupLoad(_message.Message):
    __slots__ = ("num_waiting_requests", "num_running_requests", "num_waiting_tokens", "num_free_blocks")
    NUM_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_waiting_requests: int
    num_running_requests: int
    num_waiting_tokens: int
    num_free_blocks: int
    def __init__(self, num_waiting_requests: _Optional[int] = ..., num_running_requests: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_free_blocks: _Optional[int] = ...) -> None: ...

class NodeLoad(_message.Message):
    __slots__ = ("node_id", "role", "epoch", "sequence", "draining", "drained", "num_waiting_requests", "num_running_requests", "num_idle_requests", "num_waiting_tokens", "num_free_blocks", "num_total_blocks", "block_size", "prefill_tokens_per_s", "slack_tokens_per_s", "seconds_since_progress", "num_transfers", "model_name", "model_aliases", "fingerprint", "recent_prefixes", "serves_prefixes", "adapters", "has_same_adapters", "adapter_changes", "adapter_calls", "abort_calls", "http_port", "max_model_len", "version", "prompt_tokens_computed", "prompt_tokens_cached", "prompt_tokens_transferred", "generation_tokens", "num_preemptions", "num_receiving", "num_held", "num_drafts", "num_accepted_per_pos", "prompt_tokens_from_host", "prompt_tokens_from_disk", "groups", "host_name", "kv_paths", "kv_bytes_per_token")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_IDLE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SLACK_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_ALIASES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RECENT_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    SERVES_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    HAS_SAME_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_CHANGES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_CALLS_FIELD_NUMBER: _ClassVar[int]
    ABORT_CALLS_FIELD_NUMBER: _ClassVar[int]
    HTTP_PORT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TRANSFERRED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVING_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_PER_POS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FROM_HOST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FROM_DISK_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    KV_PATHS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    role: NodeRole
    epoch: int
    sequence: int
    draining: bool
    drained: bool
    num_waiting_requests: int
    num_running_requests: int
    num_idle_requests: int
    num_waiting_tokens: int
    num_free_blocks: int
    num_total_blocks: int
    block_size: int
    prefill_tokens_per_s: float
    slack_tokens_per_s: float
    seconds_since_progress: float
    num_transfers: int
    model_name: str
    model_aliases: _containers.RepeatedScalarFieldContainer[str]
    fingerprint: str
    recent_prefixes: _containers.RepeatedScalarFieldContainer[int]
    serves_prefixes: bool
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    has_same_adapters: bool
    adapter_changes: _containers.RepeatedCompositeFieldContainer[Adapter]
    adapter_calls: _containers.RepeatedCompositeFieldContainer[AdapterCall]
    abort_calls: _containers.RepeatedCompositeFieldContainer[AbortCall]
    http_port: int
    max_model_len: int
    version: str
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    prompt_tokens_transferred: int
    generation_tokens: int
    num_preemptions: int
    num_receiving: int
    num_held: int
    num_drafts: int
    num_accepted_per_pos: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens_from_host: int
    prompt_tokens_from_disk: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupLoad]
    host_name: str
    kv_paths: _containers.RepeatedCompositeFieldContainer[KVPath]
    kv_bytes_per_token: float
    def __init__(self, node_id: _Optional[str] = ..., role: _Optional[_Union[NodeRole, str]] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., draining: bool = ..., drained: bool = ..., num_waiting_requests: _Optional[int] = ..., num_running_requests: _Optional[int] = ..., num_idle_requests: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., slack_tokens_per_s: _Optional[float] = ..., seconds_since_progress: _Optional[float] = ..., num_transfers: _Optional[int] = ..., model_name: _Optional[str] = ..., model_aliases: _Optional[_Iterable[str]] = ..., fingerprint: _Optional[str] = ..., recent_prefixes: _Optional[_Iterable[int]] = ..., serves_prefixes: bool = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., has_same_adapters: bool = ..., adapter_changes: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., adapter_calls: _Optional[_Iterable[_Union[AdapterCall, _Mapping]]] = ..., abort_calls: _Optional[_Iterable[_Union[AbortCall, _Mapping]]] = ..., http_port: _Optional[int] = ..., max_model_len: _Optional[int] = ..., version: _Optional[str] = ..., prompt_tokens_computed: _Optional[int] = ..., prompt_tokens_cached: _Optional[int] = ..., prompt_tokens_transferred: _Optional[int] = ..., generation_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_receiving: _Optional[int] = ..., num_held: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_accepted_per_pos: _Optional[_Iterable[int]] = ..., prompt_tokens_from_host: _Optional[int] = ..., prompt_tokens_from_disk: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupLoad, _Mapping]]] = ..., host_name: _Optional[str] = ..., kv_paths: _Optional[_Iterable[_Union[KVPath, _Mapping]]] = ..., kv_bytes_per_token: _Optional[float] = ...) -> None: ...
