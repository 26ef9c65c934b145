"""Judges `trainstep doctor`: scripts whose traces are known, and what has to be said about them."""
