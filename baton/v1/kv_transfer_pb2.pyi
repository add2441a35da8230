from baton.v1 import worker_pb2 as _worker_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushRequest(_message.Message):
    __slots__ = ("open", "commit")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    open: PushOpen
    commit: PushCommit
    def __init__(self, open: _Optional[_Union[PushOpen, _Mapping]] = ..., commit: _Optional[_Union[PushCommit, _Mapping]] = ...) -> None: ...

class PushOpen(_message.Message):
    __slots__ = ("ticket_id", "epoch", "fingerprint", "transport", "sender")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    epoch: str
    fingerprint: _worker_pb2.Fingerprint
    transport: str
    sender: str
    def __init__(self, ticket_id: _Optional[str] = ..., epoch: _Optional[str] = ..., fingerprint: _Optional[_Union[_worker_pb2.Fingerprint, _Mapping]] = ..., transport: _Optional[str] = ..., sender: _Optional[str] = ...) -> None: ...

class PushCommit(_message.Message):
    __slots__ = ("num_frames", "kv_bytes", "digest", "prompt_hash", "first_token_id")
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASH_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    num_frames: int
    kv_bytes: int
    digest: int
    prompt_hash: int
    first_token_id: int
    def __init__(self, num_frames: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., digest: _Optional[int] = ..., prompt_hash: _Optional[int] = ..., first_token_id: _Optional[int] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("opened", "committed")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    opened: PushOpened
    committed: PushCommitted
    def __init__(self, opened: _Optional[_Union[PushOpened, _Mapping]] = ..., committed: _Optional[_Union[PushCommitted, _Mapping]] = ...) -> None: ...

class PushOpened(_message.Message):
    __slots__ = ("credit_bytes",)
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    credit_bytes: int
    def __init__(self, credit_bytes: _Optional[int] = ...) -> None: ...

class PushCommitted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
