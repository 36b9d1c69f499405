"""Data: where it comes from, who holds what, and how it is packed into a fleet."""
