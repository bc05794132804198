"""Messages between the front process and the engine process: the only folder that knows their sockets.

Imports nothing on purpose: each process loads its own end only.
"""
