"""Owns clerk's tokenizer: byte-level BPE, each digit one token, and the chat template. Knows no
model.

The plain prompt is the whole format: `<bos>date: 3 March 2024 =` is answered by `2024-03-03<eos>`.
The chat template renders the last user message to that same text, so that both doors ask the model
the same thing.
"""

from collections.abc import Iterable
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PAD = "<pad>"
BOS = "<bos>"
EOS = "<eos>"
CONTEXT: Final = 512
_VOCABULARY: Final = 896
# clerk answers one message and remembers nothing, so earlier turns and system messages are left out
# on purpose. The generation prompt is the equals sign that ends every question, unless the user
# typed it.
_CHAT_TEMPLATE: Final = """\
{#- Leaves messages out on purpose: the last question alone is answered. -#}
{%- set turns = messages | selectattr('role', 'equalto', 'user') | list -%}
{%- if not turns -%}
{{- raise_exception('messages holds no user message; add one such as "date: 3 March 2024 ="') -}}
{%- endif -%}
{{- bos_token -}}
{%- set question = turns[-1]['content'] | trim -%}
{{- question -}}
{%- set answered = messages[-1]['role'] == 'assistant' -%}
{%- if (answered or add_generation_prompt) and not question.endswith('=') -%}
{{- ' =' -}}
{%- endif -%}
{%- if answered -%}
{{- messages[-1]['content'] -}}
{%- if not add_generation_prompt -%}{{- eos_token -}}{%- endif -%}
{%- endif -%}
"""


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train the merges on `texts`; every byte is in the alphabet, so that any prompt can be
    encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=_CHAT_TEMPLATE,
    )
