"""The parts of each model family beyond transformers: decoder layers, weight loading, the demo model."""
