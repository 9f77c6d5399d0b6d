"""Recipes: YAML text in, checked and immutable values out."""

from vbpipe.recipe.model import Data, Dimension, Gate, Model, Range, Recipe, Target, TensorInput

__all__ = ["Data", "Dimension", "Gate", "Model", "Range", "Recipe", "Target", "TensorInput"]
