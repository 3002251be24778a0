"""Trainings of real processes with faults: killed and frozen processes, cut links, damaged input."""
