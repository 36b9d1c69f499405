"""Coterie: personal models that find out, while training, whom to learn from."""
