"""Runs in every Python process of the environment, so it is next to nothing: a finder that waits
for the hosts' modules. All else is imported when one of them is. Not even ``typing`` or
``__future__`` are, hence no annotations: they would cost more than this module does.
"""


def install():  # type: ignore[no-untyped-def]
    """Wait for the hosts, unless ``THUNDER=0``. Calling it again does nothing."""
    # As globals these two would outlive the finder and slow the interpreter's end.
    import os
    import sys

    off = os.environ.get("THUNDER", "").strip().lower() in ("0", "false", "off", "no")
    if not off and HostFinder not in sys.meta_path:
        sys.meta_path.insert(0, HostFinder)


class HostFinder:
    """Hands the modules that tell a host's server over to `thunder_patches.patching.finder`."""

    modules = ("mlx_lm.server", "mlx_lm.models.cache", "omlx.server")

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name in cls.modules:
            try:
                from thunder_patches.patching import finder
            except Exception:  # a torn installation: the host stays stock
                return None
            return finder.find(name, path, target)
        return None
