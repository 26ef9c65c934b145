"""The engine for Keras on PyTorch.

A step and the arrays of a call enter (`contract.py`); a graph leaves, which is replayed or
compiled, and whose new values are swapped into the parameters. Only this folder imports torch. It
imports no other engine, and calls its tricks through `tricks/__init__.py`.
"""
