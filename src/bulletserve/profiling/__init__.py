"""Measurements that feed the estimator: loads without a scheduler, a driver that keeps lanes busy with them, samples.

Importing this package imports nothing of ours.
"""
