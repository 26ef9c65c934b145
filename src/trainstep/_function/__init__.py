"""`trainstep.function`: from a call to a compiled program and back."""
