"""What a patch and a feature are: plain data, nothing imported."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How a feature (or one patch of it) stands."""

    APPLIED = "applied"
    PENDING = "pending"
    """Decided for, not applied yet: the server or the model isn't there."""
    OFF = "off"
    HOST_ABSENT = "host_absent"
    UNKNOWN_VERSION = "unknown_version"
    UNKNOWN_FINGERPRINT = "unknown_fingerprint"
    NOT_ELIGIBLE = "not_eligible"
    HOST_HAS_IT = "host_has_it"
    CONFLICT = "conflict"
    """Another plugin had patched the target before us."""
    DISPLACED = "displaced"
    """Another plugin patched the target after us."""
    FAILED = "failed"


@dataclass(frozen=True)
class Verdict:
    """A state and, where it isn't plain, the reason for it."""

    state: State
    reason: str = ""


@dataclass(frozen=True)
class Patch:
    """One host attribute and the wrapper for it.

    A wrapper is a function ``(wrapped, instance, args, kwargs)`` as in wrapt. With `adds` the
    attribute must not exist in the host, and `wrapped` is None. An eligibility function gets the
    `thunder_patches.patching.host.Host` and returns a `Verdict` that keeps the patch out, or None.
    """

    id: str
    feature: str
    host: str
    module: str
    attribute: str
    wrapper: str
    """``package.module:function``, loaded when the patch is applied."""
    versions: str
    """Host versions, as in a requirement: ``>=0.31.3,<0.33``. A version must also be recorded."""
    eligibility: str = ""
    families: tuple[str, ...] = ()
    """Model families that it is for; empty: all."""
    adds: bool = False
    upstream: str = ""
    """The host's issue or pull request about the same."""
    remove_when: str = ""

    @property
    def target(self) -> str:
        """The key of its fingerprint: ``module:attribute``."""
        return f"{self.module}:{self.attribute}"


@dataclass(frozen=True)
class Feature:
    """What a user switches, and sees as one line of the report: all of its patches or none."""

    name: str
    summary: str
    switch: str = ""
    """Field of `Settings`; empty: only ``THUNDER=0`` turns it off."""
    requires: str = ""
    """A feature whose patches this one works through."""
    hosts: tuple[str, ...] = ("mlx_lm", "omlx")
    eligibility: str = ""
    """As a patch's; for features that have no patch of their own."""
