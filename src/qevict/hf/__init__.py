"""The Hugging Face floor: below the benches, the only importer of transformers."""

from qevict.hf.attach import Session, attach
from qevict.hf.cache import Cache

__all__ = ["Cache", "Session", "attach"]
