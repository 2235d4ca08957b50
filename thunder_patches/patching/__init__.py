"""Patches as data, and the registry that decides on, applies and undoes them."""
