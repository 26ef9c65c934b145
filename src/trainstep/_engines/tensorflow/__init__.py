"""The engine for Keras on TensorFlow.

A step and the arrays of a call enter (`contract.py`); a graph leaves, which reads the variables
first and assigns them last. Only this folder imports TensorFlow. It imports no other engine, and
calls its tricks through `tricks/__init__.py`.
"""
