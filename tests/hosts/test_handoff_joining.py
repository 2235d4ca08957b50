"""How messages follow a context, with templates that differ, and what is asked for when one is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from thunder_patches.handoff.context import Context, Payload, encode_ids
from thunder_patches.handoff.refusal import Refused
from thunder_patches.hosts.handoff import LONGEST_SECONDS, Order
from thunder_patches.hosts.joining import Message, Template
from thunder_patches.hosts.using import Use, Wanted
from thunder_patches.pilot.boundaries import Follower


def encode(text: str) -> list[int]:
    """One token a character, but `<end>` is one: as special tokens are."""
    found, at = [], 0
    while at < len(text):
        special = text.startswith("<end>", at)
        found.append(1 if special else ord(text[at]))
        at += 5 if special else 1
    return found


def decode(ids: Sequence[int]) -> str:
    return "".join("<end>" if i == 1 else chr(i) for i in ids)


def render(messages: Sequence[Message], prompt: bool, tools: Any) -> str:
    """Thinking is dropped where a user speaks after it."""
    text = f"[{tools}]" if tools else ""
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    for i, message in enumerate(messages):
        content = str(message["content"])
        if users and i < users[-1]:
            content = content.split("</think>")[-1]
        text += f"{message['role']}: {content}<end>\n"
    return text + ("assistant: " if prompt else "")


def template(**changes: Any) -> Template:
    made: dict[str, Any] = {
        "render": render,
        "encode": encode,
        "decode": decode,
        "follower": Follower(encode),
        "stops": frozenset({1}),
        "think_end": "</think>",
    }
    return Template(**{**made, **changes})


READ = [{"role": "system", "content": "rules"}, {"role": "user", "content": "question"}]
NEXT = [{"role": "user", "content": "more"}]


def test_up_to_the_end_of_messages() -> None:
    """What follows them is no part of it, whoever speaks next."""
    found = decode(template().upto(READ, None))
    assert "system: rules<end>\nuser: question<end>".startswith(found[:20])
    for after in (NEXT, [{"role": "assistant", "content": "yes"}]):
        assert render([*READ, *after], True, None).startswith(found)
    assert found.count("<end>") == 2


def test_a_template_that_raises() -> None:
    def strict(messages: Sequence[Message], prompt: bool, tools: Any) -> str:
        raise ValueError("roles must alternate")

    with pytest.raises(Refused, match="roles must alternate"):
        template(render=strict).upto(READ, None)


@pytest.mark.parametrize("answer", ["yes", "yes<end>", "hm</think>yes<end>"])
def test_the_tokens_after_an_answer(answer: str) -> None:
    """What ended the answer is there once, and its thinking stays."""
    handed = encode(render(READ, True, None) + answer)
    rest = template().after_answer(READ, NEXT, None, handed)
    whole = decode([*handed, *rest])
    expected = render(READ, True, None) + answer.removesuffix("<end>")
    assert whole == expected + "<end>\nuser: more<end>\nassistant: "


def test_a_template_that_leaves_the_answer_out() -> None:
    def forgetful(messages: Sequence[Message], prompt: bool, tools: Any) -> str:
        return render([m for m in messages if m["role"] != "assistant"], prompt, tools)

    with pytest.raises(Refused, match="leaves the handed answer out"):
        template(render=forgetful).after_answer(READ, NEXT, None, encode("x"))


def test_the_text_of_an_answer() -> None:
    made = template()
    assert made.answer(encode("hm</think>\n\nyes<end>")) == "hm</think>\n\nyes"
    assert made.without_thinking("hm</think>\n\nyes") == "yes"
    assert made.without_thinking("yes") == "yes"


def test_orders() -> None:
    order = Order.of({"messages": READ})
    assert (order.precision, order.ttl, order.holder, order.wait) == ("exact", 3600, "maker", True)
    assert Order.of({"messages": READ}, "base").ttl is None
    for wrong in (
        {"messages": READ, "ttl": 0},
        {"messages": READ, "ttl": LONGEST_SECONDS * 2},
        {"messages": READ, "ttl": float("nan")},
        {"messages": READ, "request": "x"},
        {"messages": READ, "holder": "/"},
        {"request": ["x"]},
        {"prompt": ["x"]},
    ):
        with pytest.raises(Refused) as caught:
            Order.of(wrong)
        assert caught.value.status == 400
    with pytest.raises(Refused):
        Order.of({"messages": READ, "precision": "int8"}, "base")


def test_what_may_follow() -> None:
    wanted = Wanted("handoff", "x", None)
    Use(wanted, NEXT).check_after(chat=True)
    Use(wanted, "text").check_after(chat=False)
    for after, chat in (("text", True), ([*NEXT, "x"], True), (None, True), (["x"], False)):
        with pytest.raises(Refused) as caught:
            Use(wanted, after).check_after(chat=chat)
        assert caught.value.status == 400


def test_the_text_in_a_contexts_place() -> None:
    """It stands before the request's own messages, after what the system says."""
    wanted = Wanted.of({"handoff": "x", "fallback_text": "story"})
    assert wanted is not None and Wanted.of({"progress": True}) is None
    use = Use(wanted, [{"role": "system", "content": "rules"}, *NEXT])
    use.refuse(Refused(410, "expired", "expired"))
    assert [m["content"] for m in use.messages()] == ["rules", "story", "more"]
    assert use.told()["handoff"]["used"] is False
    for wrong in ({"handoff": "x", "cache": "y"}, {"handoff": "x", "fallback_text": 7}):
        with pytest.raises(Refused):
            Wanted.of(wrong)
    use = Use(Wanted("handoff", "x", None), NEXT)
    with pytest.raises(Refused, match="expired"):
        use.refuse(Refused(410, "expired", "expired"))


def context(said: dict[str, Any], ids: Sequence[int], *, coded: bool) -> Context:
    return Context(
        id="0" * 48,
        named=False,
        owner="",
        model="m",
        model_name="m",
        layout="KVCache",
        block_tokens=32,
        precision="int8" if coded else "exact",
        ids=encode_ids(np.asarray(ids)),
        position=len(ids),
        said=said,
        pins=(),
        created=0.0,
        expires=None,
        payload=Payload(1, "") if coded else None,
    )


def test_a_host_that_merges_messages() -> None:
    """An exact context is met as far as the host's words go; a coded one goes on in the template's."""
    handed = encode(render(READ, False, None))
    merged = encode(render([READ[0], {"role": "user", "content": "question more"}], True, None))
    for coded, form in ((False, "conversation"), (True, "continuation")):
        use = Use(
            Wanted("handoff", "x", None), NEXT, context({"messages": READ}, handed, coded=coded)
        )
        found = use.tokenised(template(), merged, encode)
        assert use.beginning == form
        assert found == (encode(render([*READ, *NEXT], True, None)) if coded else merged)
        use.check_tokens(found)
        if coded:
            for wrong in (merged, handed, []):
                with pytest.raises(Refused) as caught:
                    use.check_tokens(wrong)
                assert caught.value.status == 422
