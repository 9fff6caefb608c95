"""What each model family needs beyond transformers: decoder layers, weight loading, the demo model."""
