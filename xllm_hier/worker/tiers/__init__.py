"""Blocks between device and host: layouts, layered copies, waits, proofs."""
