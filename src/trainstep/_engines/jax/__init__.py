"""The engine for Keras on JAX.

A step and the arrays of a call enter, by the contract; a compiled program leaves, which reads and
writes Keras variables in place. Only this folder imports JAX; it knows no other engine, and reaches
its tricks through `tricks/__init__.py`.
"""
