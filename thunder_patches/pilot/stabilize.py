"""Opt-in: bring a request into a form that stays the same from turn to turn, before it is tokenised.

Tools and JSON keys get one order, lists of text parts become one string, and what changes in the
system prompt from request to request (dates, ids, billing headers) is moved to its end or dropped,
by rules in ``rules.toml`` that a user can read, test and add to. User messages are never touched.
Stabilising twice changes nothing more.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thunder_patches.pilot.fingerprints import SYSTEM_ROLES

BUILT_IN = Path(__file__).with_name("rules.toml")
ROUNDS = 4  # taking one text out may bring another to a line's start
LONGEST = 262_144  # characters of a system prompt that are looked through
# Keys of a tool that come first, in this order; the others follow by name.
FIRST = ("type", "function", "name", "description", "parameters", "input_schema", "properties")
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """See ``rules.toml`` for what the fields mean."""

    name: str
    why: str
    pattern: re.Pattern[str]
    action: str
    leave: str = ""
    tests: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    rules: tuple[Rule, ...]
    heading: str = "Values of this request:"
    tools: bool = True
    tool_arguments: bool = True
    content: bool = True
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stabilized:
    """The request in stable form. ``did`` says in words what was done; empty: nothing."""

    messages: list[Message]
    tools: Any
    did: tuple[str, ...] = field(default=())


def load_rules(*paths: Path) -> Rules:
    """The package's rules and then the user's, from ``rules.toml`` files that may be missing.

    What is wrong in a user's file is named in ``problems``; the rest of it still counts.
    """
    rules: dict[str, Rule] = {}
    off: set[str] = set()
    settings: dict[str, Any] = {}
    problems: list[str] = []
    for path in (BUILT_IN, *paths):
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            problems.append(f"{path.name}: {error}")
            continue
        canonical = data.get("canonical", {})
        for name, value in canonical.items() if isinstance(canonical, dict) else ():
            if name in ("tools", "tool_arguments", "content") and isinstance(value, bool):
                settings[name] = value
            else:
                problems.append(f"{path.name}: canonical.{name} = {value!r} is not known")
        if isinstance(data.get("heading"), str) and data["heading"].strip():
            settings["heading"] = data["heading"].strip()
        for key in ("disable", "enable"):
            for name in _names(data, key):
                if name not in rules:
                    problems.append(f"{path.name}: {key} names {name!r}, which is no rule")
                elif key == "enable":
                    off.discard(name)
                else:
                    off.add(name)
        entries = data.get("rule", [])
        for number, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
            try:
                rule = _rule(entry)
                rules[rule.name] = rule
                if entry.get("off") is True:
                    off.add(rule.name)
            except (KeyError, TypeError, ValueError, re.error) as error:
                problems.append(f"{path.name}: rule {number}: {error}")
    used = tuple(rule for name, rule in rules.items() if name not in off)
    return Rules(used, problems=tuple(problems), **settings)


def check_rules(rules: Rules) -> list[str]:
    """Run the tests that the rules carry; what failed, in words."""
    failed = []
    for rule in rules.rules:
        for before, after in rule.tests:
            body, moved, _ = _apply(before, (rule,))
            found = body + _tail(rules, [], moved)
            if found != after:
                failed.append(f"{rule.name}: {before!r} gives {found!r}, expected {after!r}")
    return failed


def hint(before: str, now: str, rules: Rules) -> tuple[str, ...]:
    """Names of the rules that would make two system prompts agree, but for values moved to their
    ends; () where they would still differ, or agree already."""
    if before == now:
        return ()
    old, _, used_before = _apply(_split_tail(before, rules.heading)[0], rules.rules)
    new, _, used_now = _apply(_split_tail(now, rules.heading)[0], rules.rules)
    return tuple(dict.fromkeys(used_before + used_now)) if old == new else ()


def stabilize(messages: Sequence[Message], tools: Any, rules: Rules) -> Stabilized:
    """Bring a request into stable form. Neither ``messages`` nor ``tools`` is changed.

    A fault in a rule costs that rule's effect, never the request.
    """
    did: list[str] = []
    result: list[Message] = list(messages)
    if rules.content:
        _join_parts(result, did)
    if rules.tool_arguments:
        _order_arguments(result, did)
    _clean_system(result, rules, did)
    if rules.tools and isinstance(tools, list) and tools:
        normal = [_ordered_tool(tool) for tool in tools]
        ordered = sorted(normal, key=_tool_key)
        if [_json(tool) for tool in ordered] != [_json(tool) for tool in normal]:
            did.append("tools put in the order of their names")
        if sorted(map(_json, ordered)) != sorted(map(_json, tools)):
            did.append("keys of tools put in one order")
        tools = ordered
    return Stabilized(result, tools, tuple(did))


# --- system prompt


def _clean_system(messages: list[Message], rules: Rules, did: list[str]) -> None:
    leading = 0
    while leading < len(messages) and messages[leading].get("role") in SYSTEM_ROLES:
        leading += 1
    places = [i for i in range(leading) if isinstance(messages[i].get("content"), str)]
    if not places:
        return
    moved: list[str] = []
    kept: list[str] = []
    names: dict[str, int] = {}
    bodies: dict[int, str] = {}
    for i in places:
        body, tail = _split_tail(messages[i]["content"], rules.heading)
        if len(body) > LONGEST:
            return
        bodies[i], found, used = _apply(body, rules.rules)
        kept += tail
        moved += found
        for name in used:
            names[name] = names.get(name, 0) + 1
    if not names and (not kept or len(places) == 1):
        return
    last = places[-1]
    bodies[last] += _tail(rules, kept, moved)
    for i, body in bodies.items():
        if body != messages[i]["content"]:
            messages[i] = {**messages[i], "content": body}
    actions = {rule.name: rule.action for rule in rules.rules}
    for name in names:
        if actions[name] == "drop":
            did.append(f"{name} dropped from the system prompt")
        else:
            did.append(f"{name} moved to the end of the system prompt")


def _apply(body: str, rules: Sequence[Rule]) -> tuple[str, list[str], list[str]]:
    """The text without what the rules take out, the moved texts, and the names of rules used."""
    moved: list[str] = []
    used: list[str] = []
    for _ in range(ROUNDS):
        before = body
        for rule in rules:
            found = [m for m in rule.pattern.finditer(body) if m.group().strip()]
            if not found:
                continue
            used.append(rule.name)
            pieces, cursor = [], 0
            for match in found:
                pieces += [body[cursor : match.start()], rule.leave]
                cursor = match.end()
                if rule.action == "move":
                    moved.append(match.group().strip())
            body = "".join(pieces) + body[cursor:]
        if body == before:
            break
    return body, moved, used


def _split_tail(text: str, heading: str) -> tuple[str, list[str]]:
    """The prompt and the values that an earlier pass moved to its end."""
    body, found, tail = text.rpartition(f"\n\n{heading}\n")
    return (body, tail.split("\n")) if found else (text, [])


def _tail(rules: Rules, kept: Sequence[str], moved: Sequence[str]) -> str:
    values = [*kept, *moved]
    return f"\n\n{rules.heading}\n" + "\n".join(values) if values else ""


# --- canonical order


def _join_parts(messages: list[Message], did: list[str]) -> None:
    joined = 0
    for i, message in enumerate(messages):
        content = message.get("content")
        if message.get("role") == "user" or not isinstance(content, list) or not content:
            continue
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if all(isinstance(text, str) for text in texts):
            messages[i] = {**message, "content": "".join(texts)}  # type: ignore[arg-type]
            joined += 1
    if joined:
        did.append(f"content of {joined} message{'s' * (joined > 1)} joined to one string")


def _order_arguments(messages: list[Message], did: list[str]) -> None:
    changed = 0
    for i, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or message.get("role") == "user":
            continue
        ordered = [_ordered_call(call) for call in calls]
        if any(_json(a) != _json(b) for a, b in zip(ordered, calls, strict=True)):
            messages[i] = {**message, "tool_calls": ordered}
            changed += 1
    if changed:
        did.append(f"tool arguments of {changed} message{'s' * (changed > 1)} put in key order")


def _ordered_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _ordered_call(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, Mapping):
        return {**call, "arguments": _sorted(arguments)}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
            ordered = _sorted(parsed)
        except (ValueError, RecursionError):
            return call  # a model wrote it, and it is no JSON
        # Text whose keys are in order already is left as the model wrote it.
        if isinstance(parsed, dict) and _json(parsed) != _json(ordered):
            return {**call, "arguments": json.dumps(ordered, ensure_ascii=False)}
    return call


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return value


def _ordered_tool(value: Any) -> Any:
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda k: (FIRST.index(k) if k in FIRST else len(FIRST), str(k)))
        ordered = {key: _ordered_tool(value[key]) for key in keys}
        required = ordered.get("required")
        if isinstance(ordered.get("properties"), dict):
            # Names of properties are no keywords: they go by name alone.
            ordered["properties"] = {
                k: ordered["properties"][k] for k in sorted(ordered["properties"])
            }
            if isinstance(required, list) and all(isinstance(item, str) for item in required):
                ordered["required"] = sorted(required)
        return ordered
    if isinstance(value, list):
        return [_ordered_tool(item) for item in value]
    return value


def _tool_key(tool: Any) -> tuple[str, str]:
    return _tool_name(tool), _json(tool)


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _names(data: dict[str, Any], key: str) -> list[str]:
    value = data.get(key, [])
    return [str(name) for name in value] if isinstance(value, list) else [str(value)]


def _rule(entry: Any) -> Rule:
    if not isinstance(entry, dict):
        raise TypeError(f"expected a table, found {entry!r}")
    for name in ("name", "pattern", "action"):
        if not isinstance(entry.get(name), str) or not entry[name].strip():
            raise ValueError(f"{name} is missing or no text")
    if entry["action"] not in ("move", "drop"):
        raise ValueError(f'action must be "move" or "drop", found {entry["action"]!r}')
    pattern = re.compile(entry["pattern"], re.MULTILINE | re.IGNORECASE)
    if pattern.search(""):
        raise ValueError("the pattern matches nothing at all")
    leave = str(entry.get("leave", ""))
    if pattern.search(leave):
        raise ValueError("the pattern matches what it leaves behind")
    tests = tuple((str(t["before"]), str(t["after"])) for t in entry.get("test", ()))
    return Rule(entry["name"], str(entry.get("why", "")), pattern, entry["action"], leave, tests)
