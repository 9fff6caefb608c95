"""Steps: queues, rows, drafts, and the work of steps that have nothing else to do."""
