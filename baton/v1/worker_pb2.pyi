from baton.v1 import request_pb2 as _request_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_MIXED: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_MIXED: Role

class Fingerprint(_message.Message):
    __slots__ = ("protocol_version", "model", "kv_dtype", "num_layers", "num_kv_heads", "head_dim")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    model: str
    kv_dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    def __init__(self, protocol_version: _Optional[int] = ..., model: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("id", "epoch", "worker", "num_cached_tokens", "num_prompt_tokens", "endpoints", "fingerprint")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    id: str
    epoch: str
    worker: str
    num_cached_tokens: int
    num_prompt_tokens: int
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    fingerprint: Fingerprint
    def __init__(self, id: _Optional[str] = ..., epoch: _Optional[str] = ..., worker: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("transport", "address")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "sampling", "cache_salt", "ticket", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _request_pb2.SamplingParams
    cache_salt: str
    ticket: Ticket
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_request_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("first_token", "pushed")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    first_token: PrefillFirstToken
    pushed: PrefillPushed
    def __init__(self, first_token: _Optional[_Union[PrefillFirstToken, _Mapping]] = ..., pushed: _Optional[_Union[PrefillPushed, _Mapping]] = ...) -> None: ...

class PrefillFirstToken(_message.Message):
    __slots__ = ("token_id", "queue_s", "prefill_s", "num_cached_tokens")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    queue_s: float
    prefill_s: float
    num_cached_tokens: int
    def __init__(self, token_id: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillPushed(_message.Message):
    __slots__ = ("kv_bytes", "transfer_s", "transfer_tail_s", "transport")
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TAIL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    kv_bytes: int
    transfer_s: float
    transfer_tail_s: float
    transport: str
    def __init__(self, kv_bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ..., transfer_tail_s: _Optional[float] = ..., transport: _Optional[str] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "sampling", "stopping", "cache_salt", "local_prefill_max_tokens", "prefill_locally", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOCALLY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _request_pb2.SamplingParams
    stopping: _request_pb2.StoppingCriteria
    cache_salt: str
    local_prefill_max_tokens: int
    prefill_locally: bool
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_request_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_request_pb2.StoppingCriteria, _Mapping]] = ..., cache_salt: _Optional[str] = ..., local_prefill_max_tokens: _Optional[int] = ..., prefill_locally: _Optional[bool] = ..., priority: _Optional[int] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("reserved", "tokens", "finished", "committed")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    reserved: DecodeReserved
    tokens: DecodeTokens
    finished: DecodeFinished
    committed: DecodeCommitted
    def __init__(self, reserved: _Optional[_Union[DecodeReserved, _Mapping]] = ..., tokens: _Optional[_Union[DecodeTokens, _Mapping]] = ..., finished: _Optional[_Union[DecodeFinished, _Mapping]] = ..., committed: _Optional[_Union[DecodeCommitted, _Mapping]] = ...) -> None: ...

class DecodeReserved(_message.Message):
    __slots__ = ("ticket", "num_cached_tokens")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    num_cached_tokens: int
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class DecodeCommitted(_message.Message):
    __slots__ = ("kv_bytes",)
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    kv_bytes: int
    def __init__(self, kv_bytes: _Optional[int] = ...) -> None: ...

class DecodeTokens(_message.Message):
    __slots__ = ("token_ids", "local_prefill")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    local_prefill: LocalPrefill
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., local_prefill: _Optional[_Union[LocalPrefill, _Mapping]] = ...) -> None: ...

class LocalPrefill(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "num_cached_tokens")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    num_cached_tokens: int
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class DecodeFinished(_message.Message):
    __slots__ = ("reason", "stop_token_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    reason: _request_pb2.FinishReason
    stop_token_id: int
    def __init__(self, reason: _Optional[_Union[_request_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class GetWorkerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerInfoResponse(_message.Message):
    __slots__ = ("worker", "epoch", "role", "fingerprint", "block_size_tokens", "num_blocks", "context_window_tokens", "vocab_size", "max_batch_sequences", "max_step_tokens", "pid")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    worker: str
    epoch: str
    role: Role
    fingerprint: Fingerprint
    block_size_tokens: int
    num_blocks: int
    context_window_tokens: int
    vocab_size: int
    max_batch_sequences: int
    max_step_tokens: int
    pid: int
    def __init__(self, worker: _Optional[str] = ..., epoch: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., block_size_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., context_window_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_batch_sequences: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class WatchStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStateResponse(_message.Message):
    __slots__ = ("epoch", "num_free_blocks", "num_running", "num_waiting", "num_reserved", "num_queued_tokens", "is_ready")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    num_free_blocks: int
    num_running: int
    num_waiting: int
    num_reserved: int
    num_queued_tokens: int
    is_ready: bool
    def __init__(self, epoch: _Optional[str] = ..., num_free_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_reserved: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., is_ready: _Optional[bool] = ...) -> None: ...

class GetLedgerRequest(_message.Message):
    __slots__ = ("drop_prefix_cache",)
    DROP_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    drop_prefix_cache: bool
    def __init__(self, drop_prefix_cache: _Optional[bool] = ...) -> None: ...

class GetLedgerResponse(_message.Message):
    __slots__ = ("total_blocks", "free_blocks", "cached_blocks", "owned_blocks", "in_flight_blocks", "num_sequences", "num_open_tickets", "stale_writes", "repaired_blocks", "quarantined_blocks", "num_prefilled_tokens")
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_TICKETS_FIELD_NUMBER: _ClassVar[int]
    STALE_WRITES_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    owned_blocks: int
    in_flight_blocks: int
    num_sequences: int
    num_open_tickets: int
    stale_writes: int
    repaired_blocks: int
    quarantined_blocks: int
    num_prefilled_tokens: int
    def __init__(self, total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., owned_blocks: _Optional[int] = ..., in_flight_blocks: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_open_tickets: _Optional[int] = ..., stale_writes: _Optional[int] = ..., repaired_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., num_prefilled_tokens: _Optional[int] = ...) -> None: ...
