"""Requests without tokens: lengths, arrivals, traces."""
