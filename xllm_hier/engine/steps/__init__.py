"""What a step computes: queues, rows, drafts, and what is computed when nothing else is to be done."""
