"""Opt-in: repeat what bears on the question at the prompt's very end, where models attend most.

In a long context the middle is read worst ("lost in the middle"). For each question of the user the
context before it is cut into chunks, ranked with BM25, and the best sentences are copied, in their
original order, below the question. Nothing is rewritten and nothing is left out.

The addition depends on the conversation up to that question alone. So later turns repeat it to the
letter, the prompt only ever grows, and its prefix is found in the cache again.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np

from thunder_patches.pilot.chunking import chunk, cuts
from thunder_patches.pilot.fingerprints import message_hash, message_text

Message = Mapping[str, Any]
HAN = r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{HAN}]+|[a-z0-9]+(?:['\u2019_-][a-z0-9]+)*", re.IGNORECASE)
SUFFIX = re.compile(r"(?:'s|ies|ing|ed|es|s|ly)$")
STOP_WORDS = """a an and are as at be been but by can could did do does for from had has have how i if in
into is it its me my no not of on or our please she so tell that the their them then there these they this
to was we were what when where which who why will with would you your about he his her one"""
# Pairs of characters, and characters, that ask or join rather than name anything.
STOP_PAIRS = """什么 怎么 哪个 哪里 多少 请问 是什 么是 可以 这个 那个 一个 是否 为什 我们 你们 告诉
是谁 诉我"""
STOP_CHARACTERS = (
    "的了是在有和我你他她它这那吗呢吧啊把被就也都很不要会能可以什么怎哪里个几多少请问谁为与及或一"
)
STOP = frozenset(STOP_WORDS.split())
STOP_HAN = frozenset([*STOP_PAIRS.split(), *STOP_CHARACTERS])


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes in characters."""

    least_context: int = 12_000  # shorter contexts are left alone
    chunk: int = 600
    chunks: int = 12  # best chunks that sentences are taken from
    summary: int = 1_200
    query: int = 600  # of the question, its end counts
    heading: str = "Passages from above that bear on this, copied in their order:"


@dataclass(frozen=True, slots=True)
class Reinforced:
    """``did`` says what was added to the newest question, "" for nothing."""

    messages: list[Message]
    did: str


class Reinforcer:
    """Adds passages to questions; remembers what it added, so a later turn costs one look-up each."""

    def __init__(self, settings: Settings | None = None, remembered: int = 512) -> None:
        self.settings = settings or Settings()
        self._remembered = remembered
        self._added: OrderedDict[str, str] = OrderedDict()

    def reinforce(self, messages: Sequence[Message]) -> Reinforced:
        """The messages with passages added below each user question that has a long context.

        ``messages`` is not changed. Any fault gives the original messages.
        """
        original = list(messages)
        try:
            result, newest = list(messages), ""
            link = repr(self.settings)
            long = 0
            for i, message in enumerate(messages):
                link = _digest(link + message_hash(message))
                size = len(message_text(message))
                if _is_question(message) and long + size >= self.settings.least_context:
                    newest = self._addition(link, messages[: i + 1])
                    if newest:
                        result[i] = _with_text(message, newest)
                elif message.get("role") == "user":
                    newest = ""
                long += size
            last = bool(messages) and messages[-1].get("role") == "user"
            count = newest.count("\n- ") if last else 0
            return Reinforced(result, f"{count} passages repeated at the end" if count else "")
        except Exception:  # opt-in help must never cost an answer
            return Reinforced(original, "")

    def _addition(self, link: str, messages: Sequence[Message]) -> str:
        found = self._added.get(link)
        if found is None:
            found = summary(messages, self.settings)
            self._added[link] = found
            if len(self._added) > self._remembered:
                self._added.popitem(last=False)
        self._added.move_to_end(link)
        return found


def summary(messages: Sequence[Message], settings: Settings) -> str:
    """What is added below the last message: a heading and passages, or "" where none bears on it."""
    question = message_text(messages[-1])
    query, rest = split_query(question, settings.query)
    texts = [message_text(message) for message in messages[:-1]] + [rest]
    passages = select(texts, query, settings)
    if not passages:
        return ""
    return f"\n\n{settings.heading}\n" + "\n".join(f"- {passage}" for passage in passages)


def split_query(question: str, longest: int) -> tuple[str, str]:
    """(what is asked, the text it is asked about) of one message: a long message's end asks."""
    if len(question) <= longest:
        return question, ""
    start = len(question) - longest
    places = [cut.at for cut in cuts(question) if cut.at >= start]
    # The last paragraph, or what of it fits.
    at = next((cut for cut in places if cut >= len(question.rstrip()) - longest), start)
    blank = question.rstrip().rfind("\n\n")
    if blank >= at:
        at = blank + 2
    return question[at:], question[:at]


def select(texts: Sequence[str], query: str, settings: Settings) -> list[str]:
    """The sentences of ``texts`` that bear most on ``query``, in their order."""
    terms = tokenize(query)
    if not terms:
        return []
    pieces = [
        text[part.start : part.end].strip()
        for text in texts
        for part in chunk(text, settings.chunk)
        if text[part.start : part.end].strip()
    ]
    best = _best(pieces, terms, settings.chunks)
    sentences = [sentence for piece in best for sentence in _sentences(pieces[piece])]
    # Sentences are ranked among each other, weighted by the rank of the chunk that they stand in.
    weights = np.asarray([1.0 - 0.3 * rank / len(best) for rank in _ranks(best, pieces, terms)])
    owner = [n for n, piece in enumerate(best) for _ in _sentences(pieces[piece])]
    scores = _scores(sentences, terms) * weights[owner]
    chosen: list[int] = []
    room = settings.summary
    for i in sorted(range(len(sentences)), key=lambda i: (-scores[i], i)):
        if scores[i] <= 0 or len(sentences[i]) > room:
            continue
        if any(sentences[i] == sentences[j] for j in chosen):
            continue
        chosen.append(i)
        room -= len(sentences[i])
        if len(chosen) >= settings.chunks:
            break
    return [sentences[i] for i in sorted(chosen)]


def _best(pieces: list[str], terms: list[str], count: int) -> list[int]:
    scores = _scores(pieces, terms)
    ranked = sorted(range(len(pieces)), key=lambda i: (-scores[i], i))
    return sorted(i for i in ranked[:count] if scores[i] > 0)


def _ranks(best: list[int], pieces: list[str], terms: list[str]) -> list[int]:
    scores = _scores([pieces[i] for i in best], terms)
    order = sorted(range(len(best)), key=lambda n: (-scores[n], n))
    ranks = [0] * len(best)
    for rank, n in enumerate(order):
        ranks[n] = rank
    return ranks


def _scores(pieces: list[str], terms: list[str]) -> np.ndarray:
    """BM25 of each piece against the terms, [len(pieces)] float32."""
    import bm25s  # slow to import, and only needed with this feature

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets DEBUG: not in the host's log
    words = [tokenize(piece) for piece in pieces]
    known = set(terms)
    if not any(known.intersection(piece) for piece in words):
        return np.zeros(len(pieces), dtype=np.float32)
    vocabulary = {term: n for n, term in enumerate(sorted({w for piece in words for w in piece}))}
    ids = [[vocabulary[w] for w in piece] for piece in words]
    index = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    index.index((ids, vocabulary), show_progress=False)
    asked = [vocabulary[term] for term in dict.fromkeys(terms) if term in vocabulary]
    return np.asarray(index.get_scores_from_ids(asked), dtype=np.float32)


def tokenize(text: str) -> list[str]:
    """Terms for BM25: English words in lower case with their endings cut; Chinese in characters
    and pairs of them. They need no dictionary and find a word wherever it stands in a run: pairs are
    telling, single characters find a word in another form."""
    terms: list[str] = []
    for match in WORD.finditer(text):
        word = match.group()
        if "\u3400" <= word[0] <= "\u9fff" or "\uf900" <= word[0] <= "\ufaff":
            pairs = [word[i : i + 2] for i in range(len(word) - 1)]
            terms += [term for term in (*pairs, *word) if term not in STOP_HAN]
            continue
        word = word.lower().replace("\u2019", "'")
        if word in STOP:
            continue
        terms.append(SUFFIX.sub("", word).rstrip("e") if len(word) > 3 else word)
    return terms


def _sentences(text: str) -> list[str]:
    places = [0, *(cut.at for cut in cuts(text)), len(text)]
    found = [text[a:b].strip() for a, b in pairwise(places)]
    return [" ".join(sentence.split()) for sentence in found if sentence]


def _is_question(message: Message) -> bool:
    return message.get("role") == "user" and bool(message_text(message).strip())


def _with_text(message: Message, addition: str) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + addition}
    assert isinstance(content, list)
    return {**message, "content": [*content, {"type": "text", "text": addition}]}


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
