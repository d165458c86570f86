"""The transformers model inside what other libraries have put around it."""

from typing import Any

from qevict.errors import UnsupportedModelError


def unwrap(model: Any) -> Any:
    """The model that ``torch.compile`` or PEFT has wrapped; anything else as it is.

    Weights may be adapted in any way, merged or not: attention and cache are the model's own then.

    Raises:
        UnsupportedModelError: an adapter brings tokens or attention of its own.
    """
    compiled = getattr(model, "_orig_mod", None)
    if compiled is not None:
        return unwrap(compiled)
    if not callable(getattr(model, "get_base_model", None)):
        return model
    for name, adapter in model.peft_config.items():
        if adapter.is_prompt_learning or adapter.is_adaption_prompt:
            msg = (
                f"{type(model).__name__} cannot be served: adapter {name!r} ({adapter.peft_type.value}) puts virtual "
                f"tokens into the cache or attention that no policy sees; use an adapter of weights, such as LoRA"
            )
            raise UnsupportedModelError(msg)
    return unwrap(model.get_base_model())
