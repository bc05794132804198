"""Decoders that run a range of layers at a time. Imports nothing: the pieces are imported where used."""
