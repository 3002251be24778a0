"""`codec="auto"`: which setting the next step has, decided from what ranks have measured. No clock, no tensors.

levels      the settings, from uncompressed to the strongest 3LC
controller  the cost of a step at each setting, and the choice
"""
