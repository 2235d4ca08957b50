"""ContextPilot: what of a prompt was reused, why not more, and how to make it more.

boundaries    where each message ends in the prompt's tokens, for any chat template
shapes        what was learned of a template, so that known kinds of messages need no rendering
fingerprints  hashes of messages, tools and system prompt: what can be compared without text
index         bounded memory of recent prompts, one small file, separate for each salt
volatile      dates, ids, counters and the like in a text
explain       where a prompt left the nearest earlier one, and why, in words
report        the ``usage.context_pilot`` field of a response
chunking      cuts in long texts: dialogue turn, paragraph, code fence, sentence
stabilize     opt-in canonical form of a request, by rules in ``rules.toml``
ushape        opt-in extractive summary at the prompt's end

One request passes through boundaries, index, explain and report, in that order. Nothing here imports
mlx or a host: token lists, message dicts and functions are handed in.
"""
