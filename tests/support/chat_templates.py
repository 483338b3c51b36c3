"""Chat templates in the manner of well-known models, and a tokenizer whose tokens merge."""

import string

from transformers import PreTrainedTokenizerFast

_CALLS = """
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}"""
QWEN25 = f"""
{{%- if tools %}}
{{{{- '<|im_start|>system\\nYou may call tools.' }}}}
{{%- for tool in tools %}}{{{{- '\\n' + (tool | tojson) }}}}{{%- endfor %}}
{{{{- '<|im_end|>\\n' }}}}
{{%- endif %}}
{{%- for m in messages %}}
{{%- if m.role == 'tool' %}}
{{{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}}}
{{%- else %}}
{{{{- '<|im_start|>' + m.role + ('\\n' + m.content if m.content else '') }}}}{_CALLS}
{{%- endif %}}
{{{{- '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{%- endif %}}"""
QWEN3 = f"""
{{%- set ns = namespace(last=messages|length - 1, open=true) %}}
{{%- for m in messages[::-1] %}}
{{%- if ns.open and m.role == 'user' %}}
{{%- set ns.last = messages|length - 1 - loop.index0 %}}{{%- set ns.open = false %}}
{{%- endif %}}
{{%- endfor %}}
{{%- for m in messages %}}
{{%- if m.role == 'assistant' %}}
{{%- set thought = '' %}}
{{%- if '</think>' in m.content %}}
{{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}}
{{%- endif %}}
{{{{- '<|im_start|>assistant\\n' }}}}
{{%- if loop.index0 > ns.last and (loop.last or thought) %}}
{{{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}}}
{{%- endif %}}
{{{{- m.content.split('</think>')[-1].lstrip('\\n') }}}}{_CALLS}
{{%- else %}}
{{{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' + m.content }}}}
{{%- endif %}}
{{{{- '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{%- endif %}}"""
_HEADER = "'<|start_header_id|>' + role + '<|end_header_id|>\\n\\n'"
LLAMA3 = f"""{{{{- bos_token }}}}
{{%- for m in messages %}}
{{%- set role = 'ipython' if m.role == 'tool' else m.role %}}
{{{{- {_HEADER} }}}}
{{%- for call in m.tool_calls or [] %}}
{{{{- '{{"name": "' + call.function.name + '", "parameters": ' }}}}
{{{{- (call.function.arguments | tojson) + '}}' }}}}
{{%- else %}}
{{{{- m.content | trim }}}}
{{%- endfor %}}
{{{{- '<|eot_id|>' }}}}
{{%- endfor %}}
{{%- set role = 'assistant' %}}
{{%- if add_generation_prompt %}}{{{{- {_HEADER} }}}}{{%- endif %}}"""
MISTRAL = """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}
{%- if call.id|length != 9 %}{{- raise_exception('an id has 9 letters') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}' }}
{%- endfor %}
{{- ']' + eos_token }}
{%- elif m.role == 'assistant' %}
{{- m.content + eos_token }}
{%- else %}
{{- raise_exception('only user, assistant and tool') }}
{%- endif %}
{%- endfor %}"""
GEMMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
{{- raise_exception('System role not supported') }}
{%- endif %}
{%- for m in messages %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) }}
{{- '\\n' + (m.content | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
RAISES = "{{ raise_exception('no conversation is good enough') }}"

TEMPLATES = {
    "qwen2.5": (QWEN25, "<|im_end|>", ("<|im_start|>",)),
    "qwen3": (QWEN3, "<|im_end|>", ("<|im_start|>",)),
    "llama3": (LLAMA3, "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>")),
    "mistral": (MISTRAL, "</s>", ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]")),
    "gemma": (GEMMA, "<end_of_turn>", ("<start_of_turn>",)),
    "gemma with another end": (GEMMA, "<eos>", ("<start_of_turn>", "<end_of_turn>")),
    "raises": (RAISES, "<eos>", ()),
}
"""Template, end token, and further special tokens, by what they are like."""
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("4", "2"), (" ", "t")]


def merging(name: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer in which `hello` is one token, and five letters as well."""
    from tokenizers import Tokenizer, decoders, models

    template, end, special = TEMPLATES[name]
    words = ["<bos>", "<pad>", *string.printable, *(a + b for a, b in MERGES)]
    raw = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    raw.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<bos>",
        pad_token="<pad>",
        eos_token=end,
        additional_special_tokens=list(special),
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
