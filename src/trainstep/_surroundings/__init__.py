"""The Python around a step: what its code reads, writes and calls."""
