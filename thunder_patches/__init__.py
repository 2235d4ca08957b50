"""Thunder patches: speed for stock MLX servers, with the answers unchanged.

This file runs in every Python process of the environment (see thunder_patches.pth), so it holds
next to nothing: a finder that has `thunder_patches.boot` imported once a host is. Not even
``typing`` is imported, hence no annotations; a module of its own would double the cost.
"""

__version__ = "0.1.0"


def start():  # type: ignore[no-untyped-def]
    """Wait for the hosts, unless ``THUNDER=0``. Calling it again does nothing."""
    # As globals these two would outlive the finder and slow the interpreter's end.
    import os
    import sys

    off = os.environ.get("THUNDER", "").strip().lower() in ("0", "false", "off", "no")
    if not off and HostFinder not in sys.meta_path:
        sys.meta_path.insert(0, HostFinder)


class HostFinder:
    """Hands the modules that tell a host's server over to `thunder_patches.boot`."""

    modules = ("mlx_lm.server", "mlx_lm.models.cache", "omlx.server")

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name in cls.modules:
            try:
                from thunder_patches import boot
            except Exception:  # a torn installation: the host stays stock
                return None
            return boot.find(name, path, target)
        return None
