"""Blocks between host and Mooncake Store."""
