"""Readers of checkpoints on disk. Knows numpy and `core`; nothing about torch, devices or how models run.

Imports nothing on purpose: the server reads a tokenizer's data from here without paying for the rest.
"""
