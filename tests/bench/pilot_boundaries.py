"""Cost of message boundaries against the host's own tokenising, 100 messages and about 64K tokens.

Run: python -m tests.bench.pilot_boundaries
"""

from __future__ import annotations

import random
import statistics
import time
from functools import partial

import numpy as np

from tests.core.pilot_support import SAMPLE, TEMPLATES, TOOLS, Chat
from thunder_patches.pilot.boundaries import Follower


def conversation(messages: int, characters: int) -> list[dict]:
    rng = random.Random(1)
    words = " ".join(SAMPLE).split(" ")
    chat = []
    for i in range(messages):
        role = "system" if i == 0 else "user" if i % 2 else "assistant"
        text = " ".join(rng.choice(words) for _ in range(characters // 6))
        chat.append({"role": role, "content": text[:characters]})
    return chat


def seconds(function, rounds: int = 9) -> float:
    """Processor time: other work on a shared machine does not count."""
    function()
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def main() -> None:
    messages = conversation(100, 2000)
    print(
        f"{'template':<10}{'tokens':>8}{'host ms':>9}{'array ms':>9}{'%':>6}{'list ms':>9}{'%':>6}  known"
    )
    for name, template in TEMPLATES.items():
        chat = Chat(template)
        tools = TOOLS if name in ("llama3", "qwen3", "harmony", "mistral") else None

        def host(chat: Chat = chat, template: str = template, tools=tools) -> list[int]:
            return chat.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=True,
                return_dict=False,
                sep="",
            )

        tokens = host()
        array = np.asarray(tokens)
        follower = Follower(chat.encode)
        found = follower.boundaries(chat.render, messages, tools, array)
        known = sum(end is not None for end in found.ends)
        base = seconds(host, 3)
        row = f"{name:<10}{len(tokens):>8}{base * 1e3:>9.1f}"
        for given in (array, tokens):
            once = partial(follower.boundaries, chat.render, messages, tools, given)
            cost = seconds(once)
            row += f"{cost * 1e3:>9.2f}{cost / base:>6.1%}"
        print(f"{row}{known:>7}")


if __name__ == "__main__":
    main()
