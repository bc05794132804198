"""Bodies that are no request of any endpoint."""

DEEP = 10_000
NO_REQUESTS = (
    b"",
    b'{"prompt": "a"',
    b'{"prompt": "a"} x',
    b"[]",
    b'"str"',
    b"null",
    b"123",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
)
