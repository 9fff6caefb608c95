"""The deciding process: scheduler, block books, prefetch results; plain Python, no torch."""
