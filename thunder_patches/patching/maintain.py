"""For maintainers: record an installed host version in compat/.

    python -m thunder_patches.patching.maintain add [mlx_lm | omlx] [--source PyPI]
        [--fact "what to keep in mind"]

Run it with the Python of an environment that has the host. It writes the fingerprints of every
target in the catalogue and an entry in hosts.toml; review the diff, run the tests against that
version, then commit both.
"""

from __future__ import annotations

import argparse
import json
import sys

from thunder_patches.patching import catalogue, compat, fingerprints, host


def add(host_name: str, facts: list[str], source: str = "PyPI") -> str:
    """Record the host as installed here; returns what was done, in one line.

    Raises LookupError where the host is absent.
    """
    found = host.find(host_name)
    if found is None:
        raise LookupError(f"{host_name} is not installed in {sys.prefix}")
    recorded = compat.fingerprints(found.distribution, found.version) or {}
    targets: dict[str, list[str]] = {}
    for patch in catalogue.PATCHES:
        if patch.host != host_name:
            continue
        file = found.file(patch.module)
        code = fingerprints.read(file, [patch.attribute]).get(patch.attribute) if file else None
        seen = list(recorded.get(patch.target, []))
        if code is not None and code.fingerprint not in seen:
            seen.append(code.fingerprint)
        targets[patch.target] = seen
    build = {"distribution": found.distribution, "version": found.version}
    text = json.dumps({**build, "targets": dict(sorted(targets.items()))}, indent=2) + "\n"
    path = compat.file(found.distribution, found.version)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    _add_entry(found, facts, source)
    absent = [target for target, seen in targets.items() if not seen]
    note = f"; absent: {', '.join(absent)}" if absent else ""
    return f"{found.distribution} {found.version}: {len(targets) - len(absent)} targets{note}"


def _add_entry(found: host.Host, facts: list[str], source: str) -> None:
    """Append the version to hosts.toml unless it is there."""
    entries = compat.hosts()[found.name].get("versions", [])
    if any(
        (entry["distribution"], entry["version"]) == (found.distribution, found.version)
        for entry in entries
    ):
        return
    lines = "".join(f"    {json.dumps(fact, ensure_ascii=False)},\n" for fact in facts)
    with (compat.folder() / "hosts.toml").open("a", encoding="utf-8") as out:
        out.write(
            f"\n[[hosts.{found.name}.versions]]\n"
            f'distribution = "{found.distribution}"\n'
            f'version = "{found.version}"\n'
            f"source = {json.dumps(source)}\n"
            f"facts = [{chr(10) + lines if facts else ''}]\n"
        )


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m thunder_patches.patching.maintain", description=__doc__.partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add", help="record the installed host version")
    adding.add_argument("host", nargs="?", choices=sorted(compat.hosts()), default="mlx_lm")
    adding.add_argument("--source", default="PyPI", help="where the version comes from")
    adding.add_argument("--fact", action="append", default=[], help="known fact; may be repeated")
    chosen = parser.parse_args(arguments)
    try:
        print(add(chosen.host, chosen.fact, chosen.source))
    except LookupError as error:
        print(f"maintain: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
