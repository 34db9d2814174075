from tandem_pb import kv_transfer_pb2 as _kv_transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OfferRequest(_message.Message):
    __slots__ = ("asker", "chains")
    ASKER_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    asker: _kv_transfer_pb2.KVPeer
    chains: _containers.RepeatedCompositeFieldContainer[HashChain]
    def __init__(self, asker: _Optional[_Union[_kv_transfer_pb2.KVPeer, _Mapping]] = ..., chains: _Optional[_Iterable[_Union[HashChain, _Mapping]]] = ...) -> None: ...

class HashChain(_message.Message):
    __slots__ = ("block_size", "hashes")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_size: _Optional[int] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("holder", "transfer_id", "num_tokens")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    holder: _kv_transfer_pb2.KVPeer
    transfer_id: str
    num_tokens: int
    def __init__(self, holder: _Optional[_Union[_kv_transfer_pb2.KVPeer, _Mapping]] = ..., transfer_id: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...
