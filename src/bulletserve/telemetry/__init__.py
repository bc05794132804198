"""What happened, in numbers: definitions of latency, metrics, reports."""
