"""Storms against the real thing: processes that die, freeze and come back, links that are cut, strangers that call."""
