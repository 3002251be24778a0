"""Decoupled learners beside workers that exchange in step: goodput, stalls, deaths, and the loss."""
