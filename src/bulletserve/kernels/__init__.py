"""The arithmetic of a step as plain functions on tensors: attention, projections, norms, rotary, sampling.

Knows nothing about models, requests or lanes. Each function has a plain float32 twin in `reference`.
"""
