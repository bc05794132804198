"""The concurrent execution engine on an NVIDIA GPU: two lanes, two streams, one copy of weights and cache."""
