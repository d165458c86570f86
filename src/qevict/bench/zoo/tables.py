"""The record in words and Markdown tables."""

from collections.abc import Iterable, Iterator, Sequence

from qevict.bench.statistics import Difference
from qevict.bench.zoo.compare import Contender, Scene
from qevict.bench.zoo.field import FULL, OURS
from qevict.bench.zoo.prompts import SEEN
from qevict.bench.zoo.tasks import PERPLEXITY

REFERENCE: Contender = (OURS, "20 %")
TOLD = ("retrieval", PERPLEXITY)
"""Scenes of which claims are made in words; of single tasks the tables say enough."""

_HEAD = (
    "policy",
    "bytes",
    "prompts",
    "loss (95 %)",
    "against QEvict at equal bytes",
    "against QEvict at 20 %",
    "right",
    "front",
)
_FRONT = {True: "yes", None: "not told", False: ""}

LEGEND = """\
Loss: nats per token that counts above the full cache in 16 bits, with a bootstrap 95 % interval over the prompts.
Bytes: of all storages right after the prompt, in percent of a full cache in 16 bits.
Differences are paired by prompt; a policy without a budget meets QEvict's losses interpolated over the logarithm of
bytes. Right: part of the prompts on which every token of the answer is the model's first choice, where the full cache
gets half of them. Front: nobody with as many bytes or fewer loses less on average (yes), or somebody does but is not
told apart. Intervals are not corrected for the number of comparisons, and
there is none where fewer than 4 prompts can be compared.
"""


def heading(scene: Scene) -> str:
    """What a scene is, in a line."""
    asked = "the question compressed as well" if scene.mode == SEEN else "before the question is seen"
    return f"{scene.title}, {scene.length} tokens, {asked}"


def table(scene: Scene) -> str:
    """A scene's policies, by their bytes."""
    order = sorted(scene.seen, key=lambda contender: (contender[0] != FULL, -scene.share(contender)))
    lines = [_HEAD, ("---",) * len(_HEAD), *(_line(scene, contender) for contender in order)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def claims(scene: Scene) -> Iterator[str]:
    """What may be said because an interval excludes zero."""
    for contender in scene.seen:
        for found, whom in (
            (scene.at_equal_bytes(contender) if contender[0] != OURS else None, "QEvict at equal bytes"),
            (scene.difference(contender, REFERENCE) if contender != REFERENCE else None, "QEvict at 20 %"),
        ):
            if found is not None and found.excludes_zero and contender[0] != FULL:
                order = "less" if found.mean < 0 else "more"
                yield f"{called(contender)} loses {abs(found.mean):.2f} nats {order} than {whom} ({_interval(found)})"


def markdown(found: Iterable[Scene]) -> str:
    """All tables, each under its heading; with claims where the target is about them."""
    return "\n".join([LEGEND, *map(_section, found)])


def _section(scene: Scene) -> str:
    told = "".join(f"* {claim}\n" for claim in claims(scene)) if scene.title in TOLD else ""
    return f"### {heading(scene)}\n\n{table(scene)}" + (f"\n{told}" if told else "")


def called(contender: Contender) -> str:
    """Name and budget."""
    name, budget = contender
    return name if budget is None else f"{name}, {budget}"


def _line(scene: Scene, contender: Contender) -> Sequence[str]:
    loss, score = scene.loss(contender), scene.score(contender)
    equal = None if contender[0] in {OURS, FULL} else scene.at_equal_bytes(contender)
    before = None if contender in {REFERENCE, (FULL, None)} else scene.difference(contender, REFERENCE)
    return (
        called(contender),
        f"{100 * scene.share(contender):.1f} %",
        str(len(scene.seen[contender])),
        "" if loss is None or contender[0] == FULL else _shown(loss),
        "" if equal is None else _shown(equal),
        "" if before is None else _shown(before),
        "" if score is None else f"{score:.2f}",
        _FRONT[scene.front(contender)],
    )


def _shown(found: Difference) -> str:
    return f"{found.mean:+.2f} ({_interval(found)})"


def _interval(found: Difference) -> str:
    return f"{found.low:+.2f} to {found.high:+.2f}"
