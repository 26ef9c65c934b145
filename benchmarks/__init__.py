"""Benchmarks: our step against Keras's own and against hand-written engine code."""
