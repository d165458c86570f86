"""KVzip (arXiv 2505.23416): the attention that a context receives while the model repeats it.

The context is cached. A repeat prompt and then the context's own tokens go through the model, chunk by chunk.
The best stay: of all layers (``top_over_layers``) or, as an option, of each layer (``top_flat``).
"""

from tests.baselines.slow.basics import Attention, Row, Rows, dot, softmax


def importance(queries: Attention, chunk: Attention, own: Attention, sinks: Attention) -> list[list[float]]:
    """Importance of the cached pairs of one chunk, ``[kv_head][token]``.

    Args:
        queries: ``[query_head][repeated token]``: of the repeat prompt and of the chunk's tokens that follow it.
        chunk: ``[kv_head][token]``: cached keys that the repeat is to read.
        own: ``[kv_head][repeated token]``: keys of the repeat itself; a query sees those up to its own.
        sinks: ``[kv_head][token]``: keys of the first tokens of the context, where the chunk does not begin there.
    """
    size = len(queries) // len(chunk)
    result = []
    for head, cached in enumerate(chunk):
        rows = [
            attention(query, sinks[head], cached, own[head][: at + 1])
            for group in queries[head * size : (head + 1) * size]
            for at, query in enumerate(group)
        ]
        result.append([max(column) for column in zip(*rows, strict=True)])
    return result


def attention(query: Row, sinks: Rows, cached: Rows, own: Rows) -> list[float]:
    """Attention of one query on the cached pairs; sinks and the repeat's own keys take their part of it."""
    scale = len(query) ** 0.5
    row = softmax([dot(query, key) / scale for key in (*sinks, *cached, *own)])
    return row[len(sinks) : len(sinks) + len(cached)]


def with_sinks(scores: Rows, sinks: int = 4) -> list[list[float]]:
    """The first tokens of the context get one, which no attention reaches."""
    return [[1.0 if at < sinks else score for at, score in enumerate(row)] for row in scores]
