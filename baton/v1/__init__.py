"""Generated from proto/baton/v1 by `make proto`; never edited."""
