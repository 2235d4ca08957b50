"""Long prompts: how much to prefill at once, whether it fits at all, and signs of life meanwhile."""
