"""Turns the data that a user passes into batches.

Arrays, data sets, loaders, generators and functions that return them enter. Batches
`(x, y, sample_weight)` leave, in groups that a training loop runs in one go; wrong data raises an
`ArgumentError`. This room may import `_function` and the rooms below it.
"""
