"""The wire of Baton: generated stubs, client library, errors, servers and channels. No torch."""
