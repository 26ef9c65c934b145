"""Scopes that make a stateful step pure: variables, control flow, seeds, locks."""
