"""Thunder patches: speed for stock MLX servers, with the answers unchanged."""

__version__ = "0.1.0"
