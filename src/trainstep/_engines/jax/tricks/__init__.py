"""Speed alone: each file can be deleted and the numbers stay."""
