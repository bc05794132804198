"""Component 2: decides, never executes. Pure: no torch, no threads of its own."""
