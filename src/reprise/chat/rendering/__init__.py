"""Requests to tokens and boundaries."""
