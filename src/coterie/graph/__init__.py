"""Collaboration graphs: projections, topologies, communities, comparison with a true graph."""
