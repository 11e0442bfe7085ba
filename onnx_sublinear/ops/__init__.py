"""Facts about operators: what an op means for sizes, views, in-place kernels, randomness, state and cost.

Each module holds one kind of fact as a table with one row an op.
"""
