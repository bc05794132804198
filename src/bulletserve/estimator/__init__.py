"""Component 1: how long would this step take on n SMs, beside that? Pure arithmetic, no torch."""
