"""A recorded graph cut into the part of one process."""
