"""Models beyond transformers: decoder layers, weight loading, the demo model."""
