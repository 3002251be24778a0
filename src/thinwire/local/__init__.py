"""Local rounds of ranks that average: what is exchanged when, and what a rank does with the average. Sans-IO.

rounds       which fragments are due after which inner step, and which answers are to be merged
parameters   the shared parameters beside the model's own: their difference, the outer step, the merge
"""
