"""Histories as clients send them, in the form that a template takes; what follows a summary."""
