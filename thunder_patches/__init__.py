"""Thunder patches: speed for stock MLX servers, with the answers unchanged.

What starts it is thunder_patches.pth: in every Python process of the environment a finder of one line
waits for a host's server, and imports `thunder_patches.boot` only then. The package itself is not
imported, since finding it would cost more than all the rest; nor is that line a class, nor what it
imports with compiled before it is needed, for the same reason. Python reads the file twice in a virtual
environment; the second time changes nothing.
"""

__version__ = "0.1.0"
