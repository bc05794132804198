"""The version, where every folder may read it."""

__version__ = "0.1.0"
