"""Contexts that agents pass on and that users keep by name: descriptors, lifetimes, one portable file.

Bytes and files only. `context` is what is told of a context, `shelf` where contexts stand, `names` what a
name may be, `precision` how a context's state is made smaller, `parcel` the file that carries it.
"""
