"""Drills: a real cluster is hurt on purpose while it works, and everything that must hold is checked."""
