"""Benches: each prints a table of ratios measured in one run, and with --json one JSON object as its last line."""
