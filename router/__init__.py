"""The client's door: text, membership, policy, dispatch. No torch."""
