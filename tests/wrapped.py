"""Models in what other libraries put around them."""

from typing import Any

import peft
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, pipeline


def with_lora(model: Any) -> Any:
    """A LoRA adapter that changes what the model says."""
    linear = [name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    targets = sorted({*linear} - {"lm_head", "router", "gate"})
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(3)
    return peft.get_peft_model(model, config).eval()


def text_pipeline(model: Any, **how: Any) -> Any:
    """What ``pipeline("text-generation")`` writes, in a language of one word per token."""
    core = Tokenizer(WordLevel({f"w{token}": token for token in range(model.config.vocab_size)}, unk_token="w2"))  # noqa: S106 - a word
    core.pre_tokenizer = WhitespaceSplit()
    pipe = pipeline("text-generation", model=model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=core))
    words = " ".join(f"w{token}" for token in range(3, 60))
    return pipe(words, max_new_tokens=8, do_sample=False, return_full_text=False, **how)[0]["generated_text"]
