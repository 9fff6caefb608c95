"""What is there, who gets blocks, what is kept: the block books of both tiers and every plan that moves blocks."""
