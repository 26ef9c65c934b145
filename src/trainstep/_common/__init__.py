"""What every room uses: errors, nested structures, user code, generated code."""
