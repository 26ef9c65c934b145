"""Speed alone."""
