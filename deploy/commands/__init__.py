"""The commands of `baton`, one module each; loaded only when they are run."""
