"""A recorded graph, cut into one part per device.

The graph of the whole batch enters; a graph for each device leaves, with the sums between them.
These files may import what the engine may.
"""
