"""`codec="auto"`: which setting the next step has, from numbers that ranks have measured. No clock, no tensors.

levels   the settings, from uncompressed to the strongest 3LC
notes    what every rank tells the others of a step
costs    what a step would take at each level
pilot    the decision: a model corrected by what was measured, with hysteresis
"""
