"""Counter-causal surprise (arXiv 2607.27600): what the tokens after it predict well can go."""

from tests.baselines.slow.basics import Row, top


def kept(logits: Row, frozen: int, recent: int, size: int) -> list[int]:
    """``logits[token]``: of the true token, from what follows it. The frozen first tokens do not count in ``size``."""
    end = len(logits) - recent
    surprising = top([-logit for logit in logits[frozen:end]], size - recent)
    return [*range(frozen), *(frozen + at for at in surprising), *range(end, len(logits))]
