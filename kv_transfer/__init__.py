"""Moving KV between two workers: layout, plan, landing zones, transports. Knows no models."""
