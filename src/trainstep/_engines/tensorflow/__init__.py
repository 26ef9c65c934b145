"""The engine for Keras on TensorFlow.

A step and the arrays of a call enter, by the contract; a graph leaves, which reads the variables
first and assigns them last. Only this folder imports TensorFlow; it knows no other engine, and
reaches its tricks through `tricks/__init__.py`.
"""
