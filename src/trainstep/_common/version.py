"""The version, in a file that packaging reads without importing Keras."""

__version__ = "0.1.0"
