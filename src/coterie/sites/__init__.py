"""A site of a deployment: its data, what it allows, what it keeps, and how it answers."""
