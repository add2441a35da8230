"""The wire of Baton: stubs, clients, errors, servers and channels. No torch."""

from baton.aio_client import AsyncClient, AsyncStream
from baton.answer import Chunk, GenerateOptions
from baton.client import Client, Stream
from baton.errors import BatonError

__all__ = ["AsyncClient", "AsyncStream", "BatonError", "Chunk", "Client", "GenerateOptions", "Stream"]
