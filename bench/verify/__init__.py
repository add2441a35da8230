"""Whether a live cluster's answers are what a mixed worker and transformers say, and whether no KV block is lost."""
