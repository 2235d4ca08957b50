"""Adapters: the only code that knows a host. Loaded by the patch registry, by name."""
