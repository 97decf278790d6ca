"""A tokenizer with a template that has all that templates of this kind have: tools, reasoning, history rewritten."""

from pathlib import Path
from typing import Any, Final

from slackwater.api.tokens import ChatTokenizer
from slackwater.testing.tiny_model import write_tiny_tokenizer

THINKING: Final = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call so: <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last %}<think>
{{ message.reasoning_content or '' }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""
"""ChatML with reasoning and Hermes's calls; reasoning of earlier turns is left out."""

TOOLS: Final[list[Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]


def tokenizer_with(folder: Path, template: str, **formats: str) -> ChatTokenizer:
    """The tiny tokenizer with another template."""
    write_tiny_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    return ChatTokenizer(folder, **formats)
