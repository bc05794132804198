"""Component 4, the concurrent execution engine: carries out launches on one device. It obeys, it does not judge."""
