"""Benchmarks of trainstep's steps against Keras's own and against hand-written engine code."""
