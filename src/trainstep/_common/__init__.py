"""Helpers that every room shares: errors, nested structures, user code, generated code.

Plain Python values, frames and source text enter. Exceptions, generated functions, file locations
and cache folders leave. This room imports no other room, and neither Keras nor an engine.
"""
