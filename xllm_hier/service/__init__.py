"""The service: knows which instances there are and what their caches hold, and sends requests where they cost least."""
