"""Measurements of time and memory, which no test run makes.

    pytest benchmarks --tokens 4096 --rounds 5 --write

Contestants take turns within every round of one process, and what is published are paired ratios to a baseline of the
same run: seconds of one machine on one day tell nothing. ``pytest benchmarks --help`` lists the options of these
measurements; ``pytest benchmarks/bench_decode.py`` runs one of them. ``--write`` records under ``benchmarks/results/``.
"""
