"""Strategies and processes."""
