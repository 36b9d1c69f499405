"""Fleets: all clients, and the only door to them."""
