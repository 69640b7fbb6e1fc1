"""Replays traces of requests against the engine's own policies, without a model."""
