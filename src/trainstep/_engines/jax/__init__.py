"""The engine for Keras on JAX.

A step and the arrays of a call enter (`contract.py`); a compiled program leaves, which reads and
updates Keras variables. Only this folder imports JAX. It imports no other engine, and calls its
tricks through `tricks/__init__.py`.
"""
