# ruff: noqa: E501, RUF001
"""A trained tokenizer and chat templates, written for the ContextPilot tests.

Each template prints ``sep`` where a message ends. It is empty in the real render; the tests set it
to a character of its own and so know the truth without the code under test.
"""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SEP = "\x00"

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{{ sep }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """{{ '<|begin_of_text|>' }}{% if messages[0].role != 'system' %}{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n<|eot_id|>' }}{% endif %}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}{% if m.role == 'system' and tools %}{{ 'Environment: ipython\n\n' }}{% for t in tools %}{{ t | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}{% endif %}{% if m.tool_calls %}{{ '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}{{ m.tool_calls[0].function.arguments | tojson }}{{ '}' }}{% else %}{{ (m.content or '') | trim }}{% endif %}{{ '<|eot_id|>' }}{{ sep }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

GEMMA = """{{ '<bos>' }}{% set ns = namespace(first='') %}{% if messages[0].role == 'system' %}{% set ns.first = messages[0].content %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}{% if loop.first and ns.first %}{{ ns.first + sep + '\n\n' }}{% endif %}{{ m.content | trim }}{{ '<end_of_turn>\n' }}{{ sep }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

QWEN3 = """{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}{{- "# Tools\n\nYou may call one or more functions.\n\n<tools>" }}{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}{{- "\n</tools>\n\nReturn <tool_call>\n{\\"name\\": ...}\n</tool_call><|im_end|>\n" }}{%- if messages[0].role == 'system' %}{{- sep }}{%- endif %}{%- else %}{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{{- sep }}{%- endif %}{%- endif %}{%- set ns = namespace(multi=true, last=messages|length - 1) %}{%- for m in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.multi and m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}{%- set ns.multi = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{{- sep }}{%- elif m.role == 'assistant' %}{%- set reasoning = '' %}{%- if m.reasoning_content is string %}{%- set reasoning = m.reasoning_content %}{%- elif '</think>' in content %}{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}{%- if loop.index0 > ns.last and (loop.last or reasoning) %}{{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}{%- for call in m.tool_calls or [] %}{%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{%- if call.function.arguments is string %}{{- call.function.arguments }}{%- else %}{{- call.function.arguments | tojson }}{%- endif %}{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{{- sep }}{%- elif m.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}{%- if not loop.last and messages[loop.index0 + 1].role == 'tool' %}{{- sep }}{%- endif %}{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{{- sep }}{%- endif %}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if thinking is defined %}{{- '<think>\n' }}{%- endif %}{%- endif %}"""

HARMONY = """{{- '<|start|>system<|message|>You are a careful assistant.\nKnowledge cutoff: 2024-06\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final.<|end|>' }}{%- set ns = namespace(tool='') %}{%- set system = messages[0].role in ['system', 'developer'] %}{%- if system or tools %}{{- '<|start|>developer<|message|>' }}{%- if system %}{{- '# Instructions\n\n' + messages[0].content }}{%- endif %}{%- if tools %}{{- '\n\n# Tools\n\n## functions\n\nnamespace functions {\n' }}{%- for t in tools %}{{- '// ' + t.function.description + '\ntype ' + t.function.name + ' = (_: any) => any;\n' }}{%- endfor %}{{- '} // namespace functions' }}{%- endif %}{{- '<|end|>' }}{%- if system %}{{- sep }}{%- endif %}{%- endif %}{%- for m in (messages[1:] if system else messages) %}{%- if m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{{- sep }}{%- elif m.role == 'assistant' %}{%- if m.tool_calls %}{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}{%- set ns.tool = m.tool_calls[0].function.name %}{{- '<|start|>assistant to=functions.' + ns.tool + '<|channel|>commentary json<|message|>' }}{{- m.tool_calls[0].function.arguments | tojson }}{{- '<|call|>' }}{{- sep }}{%- elif loop.last and not add_generation_prompt %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{{- sep }}{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{{- sep }}{%- endif %}{%- elif m.role == 'tool' %}{{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) + '<|end|>' }}{{- sep }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

MISTRAL = """{{- '<s>' }}{%- set system = messages[0].role == 'system' %}{%- if system %}{{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}{%- endif %}{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}{%- if system %}{{- sep }}{%- endif %}{%- for m in (messages[1:] if system else messages) %}{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}{{- sep }}{%- elif m.role == 'assistant' and m.tool_calls %}{{- '[TOOL_CALLS]' }}{%- for c in m.tool_calls %}{{- c.function.name + '[ARGS]' + (c.function.arguments | tojson) }}{%- endfor %}{{- '</s>' }}{{- sep }}{%- elif m.role == 'assistant' %}{{- m.content + '</s>' }}{{- sep }}{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{{- sep }}{%- endif %}{%- endfor %}"""

DEEPSEEK = """{{ '<｜begin▁of▁sentence｜>' }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{{ sep }}{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}{{ sep }}{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{{ sep }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""

PLAIN = """{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n\n' }}{{ sep }}{% elif m.role == 'user' %}{{ 'USER: ' + m.content + '\n' }}{{ sep }}{% else %}{{ 'ASSISTANT: ' + m.content + '\n' }}{{ sep }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

# Puts the system prompt into the last user turn, as old Mistral templates do.
MOVED = """{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' }}{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}{{ sep }}{% elif m.role == 'assistant' %}{{ m.content + '</s>' }}{{ sep }}{% endif %}{% endfor %}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "qwen3": QWEN3,
    "harmony": HARMONY,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "plain": PLAIN,
}

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<|start|>",
    "<|message|>",
    "<|end|>",
    "<|channel|>",
    "<|call|>",
    "<|return|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "<｜begin▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
]

SAMPLE = [
    "You are a careful coding agent. Read the file before you change it, and run the tests.\n",
    "def read(path: str) -> str:\n    with open(path) as file:\n        return file.read()\n\n\n",
    "The cache holds blocks of 256 tokens; a block is found again by its key.\n\n- one\n- two\n",
    'USER: hello\nASSISTANT: {"name": "read_file", "arguments": {"path": "src/main.py"}}\n',
    "你是一个仔细的助手。请先阅读文件，然后再修改它。缓存命中率取决于提示词的前缀。\n",
    "user assistant system tool developer analysis commentary final functions namespace type any\n",
]


@functools.cache
def tokenizer(kind: str = "bytes") -> PreTrainedTokenizerFast:
    """A small BPE tokenizer: byte level as GPT-2's, or "metaspace" as SentencePiece's."""
    model = Tokenizer(models.BPE(byte_fallback=kind == "metaspace", unk_token=None))
    if kind == "bytes":
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        extra: list[str] = []
    else:
        model.normalizer = normalizers.Replace(" ", "▁")
        alphabet = []
        extra = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=extra, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(SAMPLE * 4, trainer)
    model.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=model)


class Chat:
    """One chat template on one tokenizer: what a host has."""

    def __init__(self, template: str, kind: str = "bytes", **variables: Any) -> None:
        self.tokenizer = tokenizer(kind)
        self.template = template
        self.variables = variables
        self.renders = 0

    def render(
        self, messages: Any, add_generation_prompt: bool = True, tools: Any = None, sep: str = ""
    ) -> str:
        self.renders += 1
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=self.template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            sep=sep,
            **self.variables,
        )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def tokens(self, messages: Any, tools: Any = None) -> list[int]:
        return self.encode(self.render(messages, True, tools))

    def truth(self, messages: Any, tools: Any = None) -> list[int]:
        """Token position of each message's end, by the template's own separators and offsets."""
        text = self.render(messages, True, tools, sep=SEP)
        pieces = text.split(SEP)
        clean = "".join(pieces)
        assert clean == self.render(messages, True, tools)
        offsets = self.tokenizer(clean, add_special_tokens=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        ends, at, token = [], 0, 0
        for piece in pieces[:-1]:
            at += len(piece)
            while token < len(offsets) and offsets[token][1] <= at:
                token += 1
            ends.append(token)
        return ends


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file and return its text.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a command in the project's folder.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    },
]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
