"""Algorithms: one file each, named after it."""
