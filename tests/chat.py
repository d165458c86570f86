"""A tiny chat model that needs no download: random weights, and a tokenizer of bytes."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.oracle import tiny

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE, *, merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """A fast tokenizer with a token per byte and one per merge."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    core = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = template
    return tokenizer


def save_chat_model(folder: Path, template: str | None = TEMPLATE) -> str:
    """Write model and tokenizer as a Hugging Face folder; returns its name."""
    tokenizer = byte_tokenizer(template, merges=[("Ċ", "Ċ")])
    tiny(vocab_size=len(tokenizer), num_hidden_layers=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
