"""Build hook: an editable install must start with the interpreter too."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

START_FILES = ("thunder_patches.pth", "thunder_patches.start")


class CustomBuildHook(BuildHookInterface[Any]):
    """Puts the start files, and nothing else, beside an editable install's path file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            build_data["force_include_editable"] = {name: name for name in START_FILES}
