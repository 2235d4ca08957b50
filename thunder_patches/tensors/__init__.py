"""MLX caches as bytes, and back: layers (what a cache holds), cut (out), restore (in), identity."""
