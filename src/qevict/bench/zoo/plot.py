"""Loss over bytes, as SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qevict.bench.zoo.compare import Contender, Scene
from qevict.bench.zoo.field import FULL
from qevict.bench.zoo.tables import heading
from qevict.errors import InputError

_STYLE: Any = {"svg.hashsalt": "qevict", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
"""The same record gives the same bytes, and text stays text."""

_SPAN, _TICKS = (4, 125), (5, 10, 20, 25, 50, 100)

_MARKERS = "osD^vPX*<>hp"


def file_name(scene: Scene) -> str:
    """What a scene's plot is called."""
    return "-".join(("zoo", scene.title.replace(" ", "-"), scene.length, f"{scene.mode}.svg"))


def draw(scene: Scene, path: Path) -> None:
    """Write one scene: a line for each policy with budgets, a point for each without, 95 % intervals on all.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError('plots need matplotlib, which is not installed; run: pip install "qevict[plots]"') from error
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for number, name in enumerate(dict.fromkeys(name for name, _ in scene.seen if name != FULL)):
            _add(axes, scene, name, number)
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.set(
            xscale="log", xlabel="bytes, % of a full cache in 16 bits", ylabel="nats above the full cache", xlim=_SPAN
        )
        axes.set_xticks(_TICKS, [str(tick) for tick in _TICKS])
        axes.set_xticks([], minor=True)
        axes.set_title(heading(scene), loc="left")
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _add(axes: Any, scene: Scene, name: str, number: int) -> None:
    own: Sequence[Contender] = [contender for contender in scene.seen if contender[0] == name]
    points = sorted((100 * scene.share(each), loss) for each in own if (loss := scene.loss(each)) is not None)
    means = [loss.mean for _, loss in points]
    below = [max(0.0, loss.mean - loss.low) for _, loss in points]
    above = [max(0.0, loss.high - loss.mean) for _, loss in points]
    axes.errorbar(
        [share for share, _ in points],
        means,
        yerr=[below, above],
        label=name,
        marker=_MARKERS[number % len(_MARKERS)],
        markersize=4,
        linewidth=1,
        elinewidth=0.6,
        linestyle="-" if len(points) > 1 else "none",
        color=f"C{number % 10}",
    )
