"""Conversations: what an agent sends at each turn, and playing a turn against a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .client import Client, Message
from .compare import Reply
from .texts import Agent


@dataclass
class Talk:
    """One agent's conversation; ``heard`` are the answers that later turns carry."""

    agent: Agent
    system: str
    heard: list[str] = field(default_factory=list)

    def messages(self, turn: int) -> list[Message]:
        """The request of turn ``turn``, from 0: the system prompt and all that was said before.

        The answers to earlier turns come from ``heard``, so that two servers are sent the same
        requests even where their answers differ.
        """
        said: list[Message] = [{"role": "system", "content": self.system}]
        for number in range(turn):
            said.append({"role": "user", "content": self.question(number)})
            said.append({"role": "assistant", "content": self.heard[number]})
        said.append({"role": "user", "content": self.question(turn)})
        return said

    def question(self, turn: int) -> str:
        """The agent's questions in order, from the first again when they run out."""
        questions: Sequence[str] = self.agent.questions
        return questions[turn % len(questions)]

    def play(self, turn: int, server: Client, answer_tokens: int) -> Reply:
        """Ask turn ``turn``, timed; then once more, scored. Keeps the first answer heard."""
        messages = self.messages(turn)
        answer = server.stream(messages, answer_tokens)
        scored = server.score(messages, answer_tokens)
        if len(self.heard) == turn:
            self.heard.append(answer.text)
        return Reply(f"{self.agent.name}, turn {turn + 1}", answer, scored)
