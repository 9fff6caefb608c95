"""The block books of both tiers: hits, allocation, publishing, and every plan that moves blocks."""
