"""Requests replayed against the real store, planner and policies, with payloads of given sizes and no model."""
