"""Drafters with weights: heads and models that guess the next tokens of a model."""
