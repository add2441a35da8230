"""The prefill role: runs prompts and pushes their KV."""
