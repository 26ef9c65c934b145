"""Partitions a recorded graph into one part per device.

The graph of the whole batch enters; a graph for each device leaves, with the sums between them.
These files may import whatever the engine may import.
"""
