from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FaultPoint(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAULT_POINT_UNSPECIFIED: _ClassVar[FaultPoint]
    FAULT_POINT_QUEUED: _ClassVar[FaultPoint]
    FAULT_POINT_RESERVING: _ClassVar[FaultPoint]
    FAULT_POINT_PREFILLING: _ClassVar[FaultPoint]
    FAULT_POINT_PUSHING: _ClassVar[FaultPoint]
    FAULT_POINT_PUSHED: _ClassVar[FaultPoint]
    FAULT_POINT_FIRST_STEP: _ClassVar[FaultPoint]
    FAULT_POINT_DECODING: _ClassVar[FaultPoint]
FAULT_POINT_UNSPECIFIED: FaultPoint
FAULT_POINT_QUEUED: FaultPoint
FAULT_POINT_RESERVING: FaultPoint
FAULT_POINT_PREFILLING: FaultPoint
FAULT_POINT_PUSHING: FaultPoint
FAULT_POINT_PUSHED: FaultPoint
FAULT_POINT_FIRST_STEP: FaultPoint
FAULT_POINT_DECODING: FaultPoint

class InjectRequest(_message.Message):
    __slots__ = ("hold", "kv_messages", "memory")
    HOLD_FIELD_NUMBER: _ClassVar[int]
    KV_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    hold: HoldFault
    kv_messages: KvMessageFault
    memory: MemoryFault
    def __init__(self, hold: _Optional[_Union[HoldFault, _Mapping]] = ..., kv_messages: _Optional[_Union[KvMessageFault, _Mapping]] = ..., memory: _Optional[_Union[MemoryFault, _Mapping]] = ...) -> None: ...

class HoldFault(_message.Message):
    __slots__ = ("point", "num_skipped", "max_hits", "max_hold_s")
    POINT_FIELD_NUMBER: _ClassVar[int]
    NUM_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    MAX_HITS_FIELD_NUMBER: _ClassVar[int]
    MAX_HOLD_S_FIELD_NUMBER: _ClassVar[int]
    point: FaultPoint
    num_skipped: int
    max_hits: int
    max_hold_s: float
    def __init__(self, point: _Optional[_Union[FaultPoint, str]] = ..., num_skipped: _Optional[int] = ..., max_hits: _Optional[int] = ..., max_hold_s: _Optional[float] = ...) -> None: ...

class KvMessageFault(_message.Message):
    __slots__ = ("seed", "drop", "corrupt", "duplicate", "delay", "delay_s", "bytes_per_s")
    SEED_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    DELAY_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    seed: int
    drop: float
    corrupt: float
    duplicate: float
    delay: float
    delay_s: float
    bytes_per_s: float
    def __init__(self, seed: _Optional[int] = ..., drop: _Optional[float] = ..., corrupt: _Optional[float] = ..., duplicate: _Optional[float] = ..., delay: _Optional[float] = ..., delay_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class MemoryFault(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class InjectResponse(_message.Message):
    __slots__ = ("in_place", "hit")
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    HIT_FIELD_NUMBER: _ClassVar[int]
    in_place: InPlace
    hit: Hit
    def __init__(self, in_place: _Optional[_Union[InPlace, _Mapping]] = ..., hit: _Optional[_Union[Hit, _Mapping]] = ...) -> None: ...

class InPlace(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class Hit(_message.Message):
    __slots__ = ("point", "request_id", "peer", "what")
    POINT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    point: FaultPoint
    request_id: str
    peer: str
    what: str
    def __init__(self, point: _Optional[_Union[FaultPoint, str]] = ..., request_id: _Optional[str] = ..., peer: _Optional[str] = ..., what: _Optional[str] = ...) -> None: ...
