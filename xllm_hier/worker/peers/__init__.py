"""Blocks between this device and that of a peer instance."""
