"""Policies compared over one engine: runs, what is kept of them, and what they come to."""
