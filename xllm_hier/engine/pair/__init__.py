"""Work shared with a peer: prefill and decode instances that work on one request."""
