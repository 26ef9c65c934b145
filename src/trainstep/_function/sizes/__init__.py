"""Sizes that vary: patterns, buckets and the programs that serve them."""
