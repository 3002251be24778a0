"""`codec="auto"`: which setting the next step has, from numbers that ranks have measured. No clock, no tensors.

levels     the settings, from uncompressed to the strongest 3LC
notes      what every rank tells the others of a step
memory     all that is remembered between steps
costs      the model: bytes over rate, codec, what hides
estimates  what a step would take at each level: the model, corrected by what was measured
doubts     whether the link is still what it was
probing    how the link is measured, and what that may cost
critical   phases in which s stays 1
pilot      the decision, with hysteresis
"""
