"""The engine for Keras on PyTorch.

A step and the arrays of a call enter, by the contract; a graph leaves, which is replayed or
compiled, and whose new values are swapped into the parameters. Only this folder imports torch; it
knows no other engine, and reaches its tricks through `tricks/__init__.py`.
"""
