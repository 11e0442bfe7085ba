"""Layer functions: each adds its forward nodes to the graph and records the recipe of its gradient nodes.

Importing this package makes them methods of `TrainingGraph`. Notation in their docstrings: y is the output, dy the
gradient of the loss by y. All gradients are the chain rule written out; a gradient node reads the smallest set of
tensors that its formula allows.
"""

from models.layers import dense, elementwise, losses, norms, shapes, spatial
from models.tape import TrainingGraph

__all__ = ["TrainingGraph", "dense", "elementwise", "losses", "norms", "shapes", "spatial"]
