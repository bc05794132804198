"""Structured answers: what a client may ask for as text (`texts`), and who follows it token by token (`guide`).

Knows nothing about tensors, scheduling or HTTP. The grammars themselves are llguidance's.
"""
