"""Partitions a recorded graph into the part of one process.

The graph of the whole batch enters; the part of this process leaves, with the collectives between
the processes. These files may import whatever the engine may import.
"""
