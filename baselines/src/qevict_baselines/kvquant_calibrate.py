"""``python -m qevict_baselines.kvquant_calibrate``: run a model over texts and write KVQuant's calibration of it.

It needs gradients, so about four times the memory of a plain forward over one text.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from qevict.bench.models import load
from qevict.contracts.rotary import Rotary
from qevict.errors import InputError, QevictError
from qevict.hf.compat import CACHE_ARGUMENT
from qevict.hf.layers import library_layers, text_config
from qevict.hf.rotary import read_rotary
from qevict.hf.support import check_model
from qevict_baselines.kvquant_calibration import BITS, Calibration, Shown, calibrated, joined

KEPT = 2**22
"""Numbers of each layer's keys, and of its values, that are kept of all texts together."""


@attrs.frozen
class Reading:
    """How much of a model is looked at; the numbers are the paper's, except for the sinks, which it leaves open.

    Attributes:
        samples: texts.
        tokens: of each text.
        sink_tokens: first tokens of each text that have no say, as a policy keeps them in full precision.
        kept: numbers of each layer's keys, and of its values, that are kept; whole tokens, chosen at random.
        seed: of that choice.

    Raises:
        InputError: a number is too small.
    """

    samples: int = 16
    tokens: int = 2048
    sink_tokens: int = 5
    kept: int = KEPT
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        for name, least in (("samples", 1), ("sink_tokens", 0), ("tokens", self.sink_tokens + 2)):
            if getattr(self, name) < least:
                msg = f"{name} must be at least {least}, got {getattr(self, name)}"
                raise InputError(msg)


def calibrate(model: Any, texts: Sequence[Tensor], reading: Reading, bits: int, outliers: float) -> Calibration:  # noqa: ANN401 - a model of any class
    """Calibrate a model by some texts.

    Args:
        model: one that a policy can serve, in evaluation mode.
        texts: token ids, each ``[tokens]``.
        reading: what is kept of them.
        bits: of one code.
        outliers: part of the numbers that is stored apart.

    Raises:
        UnsupportedModelError: no policy can serve the model, or its keys cannot be turned back.
        InputError: no layer of the model keeps every token.
    """
    check_model(model)
    if None not in library_layers(text_config(model)):
        msg = f"no layer of {type(model).__name__} keeps every token, so there is nothing to quantize"
        raise InputError(msg)
    rotary = read_rotary(model, "quantizes keys before RoPE")
    dice, parts = torch.Generator().manual_seed(reading.seed), []
    for number, ids in enumerate(texts, start=1):
        sys.stderr.write(f"text {number} of {len(texts)}\n")
        parts.append([layer.some(_chosen(layer, reading, dice)) for layer in observe(model, rotary, ids)])
    made = {"model": str(model.config.name_or_path), "samples": len(texts), "tokens": reading.tokens}
    return calibrated([joined(layer) for layer in zip(*parts, strict=True)], bits, outliers, **made)


def _chosen(shown: Shown, reading: Reading, dice: torch.Generator) -> Tensor:
    """Tokens behind the sinks, as many as one text may keep."""
    tokens, *channels = shown.keys.shape
    most = max(1, reading.kept // (reading.samples * torch.Size(channels).numel()))
    return reading.sink_tokens + torch.randperm(tokens - reading.sink_tokens, generator=dice)[:most].sort().values


def observe(model: Any, rotary: Rotary, ids: Tensor) -> list[Shown]:  # noqa: ANN401 - a model of any class
    """Keys and values of the layers that a policy rules, and the squared derivatives of the loss by them.

    They are taken from the model's own cache, behind whatever norms a family has, and keys are turned back; so nothing
    depends on how a family names its projections.
    """
    embedded = model.get_input_embeddings()(ids.to(model.device)[None]).detach().requires_grad_()
    with torch.enable_grad():
        out = model(inputs_embeds=embedded, use_cache=True)
        loss = functional.cross_entropy(out.logits[0, :-1].float(), ids[1:].to(model.device))
    ruled = [own is None for own in library_layers(text_config(model))]
    layers = [layer for layer, own in zip(out[CACHE_ARGUMENT].layers, ruled, strict=True) if own]
    derived = torch.autograd.grad(loss, [each for layer in layers for each in (layer.keys, layer.values)])
    return [_shown(rotary, layer.keys, layer.values, *derived[2 * at : 2 * at + 2]) for at, layer in enumerate(layers)]


def _shown(rotary: Rotary, keys: Tensor, values: Tensor, by_keys: Tensor, by_values: Tensor) -> Shown:
    """By token, on the host; what is derived by rotated keys is turned back by the transpose of what turned them."""
    positions = torch.arange(keys.shape[2], device=keys.device)
    transposed = attrs.evolve(rotary, amplitude=1 / rotary.amplitude)
    found = (
        rotary.unrotate(keys.detach(), positions),
        values.detach(),
        transposed.unrotate(by_keys, positions).square(),
        by_values.float().square(),
    )
    return Shown(*(each[0].transpose(0, 1).float().cpu() for each in found))


def cut(tokenizer: Any, texts: Sequence[str], reading: Reading) -> list[Tensor]:  # noqa: ANN401 - a tokenizer of any class
    """Samples at even distances from the texts end to end, each behind the token that begins a text, if there is one.

    Raises:
        InputError: the texts are too short to give as many samples that do not overlap.
    """
    ids = [token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    lead = [token for token in tokenizer("")["input_ids"][:1] if token == tokenizer.bos_token_id]
    size = reading.tokens - len(lead)
    if len(ids) < reading.samples * size:
        msg = (
            f"the texts have {len(ids)} tokens, and {reading.samples} samples of {reading.tokens} need "
            f"{reading.samples * size}; give more --texts, or fewer --samples or --tokens"
        )
        raise InputError(msg)
    starts = [at * (len(ids) - size) // max(reading.samples - 1, 1) for at in range(reading.samples)]
    return [torch.tensor(lead + ids[start : start + size]) for start in starts]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 2 where something that was given cannot be used."""
    given = _parser().parse_args(arguments)
    try:
        reading = Reading(given.samples, given.tokens, given.sink_tokens, seed=given.seed)
        _write(given, reading)
    except (QevictError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _write(given: argparse.Namespace, reading: Reading) -> None:
    if not 0 <= given.outliers < 1:
        msg = f"--outliers is a part of all numbers, from 0 to below 1, got {given.outliers}"
        raise InputError(msg)
    if not given.out.parent.is_dir():
        msg = f"--out {given.out}: there is no folder {given.out.parent}; make it first"
        raise InputError(msg)
    texts = [*_read(given.texts)]
    model, tokenizer = load(given.model)
    longest = getattr(text_config(model), "max_position_embeddings", reading.tokens)
    if reading.tokens > longest:
        msg = f"{given.model} reads at most {longest} tokens, got --tokens {reading.tokens}"
        raise InputError(msg)
    samples = cut(tokenizer, texts, reading)
    model = model.to(given.device).eval().requires_grad_(requires_grad=False)
    made = calibrate(model, samples, reading, given.bits, given.outliers)
    attrs.evolve(made, model=str(given.model)).save(given.out)


def _read(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        try:
            yield file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            msg = f"cannot read the text {file}: {error}; give files in UTF-8"
            raise InputError(msg) from error


def _parser() -> argparse.ArgumentParser:
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m qevict_baselines.kvquant_calibrate",
        description="Write KVQuant's calibration of a model as a safetensors file.",
        formatter_class=shown,
    )
    usual = Reading()
    parser.add_argument("--model", required=True, help="'smollm2', a folder, or a hub id")
    parser.add_argument("--texts", required=True, nargs="+", type=Path, help="text files in UTF-8")
    parser.add_argument("--out", required=True, type=Path, help="the file to write")
    parser.add_argument("--bits", type=int, default=3, choices=BITS, help="of one code")
    parser.add_argument("--outliers", type=float, default=0.01, help="part of the numbers that is stored apart")
    parser.add_argument("--samples", type=int, default=usual.samples, help="texts that are read")
    parser.add_argument("--tokens", type=int, default=usual.tokens, help="of each of them")
    parser.add_argument("--sink-tokens", type=int, default=usual.sink_tokens, help="first tokens that have no say")
    parser.add_argument("--seed", type=int, default=usual.seed, help="of the choice of tokens that are kept")
    parser.add_argument("--device", default="cpu", help="where the model runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
