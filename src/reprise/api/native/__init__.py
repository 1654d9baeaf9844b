"""Reprise's own endpoints: what the cache holds, would find, keeps and computes ahead; health; refusals."""
