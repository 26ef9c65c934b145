"""What several engines use."""
