"""The decode role: reserves KV blocks, receives KV, generates."""
