"""A recorded graph cut into one part per device."""
