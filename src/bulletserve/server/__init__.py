"""The OpenAI-compatible HTTP front: text in, token ids to the engine, text out. Imports nothing on purpose."""
