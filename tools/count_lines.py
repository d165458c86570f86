"""Lines of code of each Python file in a folder, without blank lines, comments and docstrings.

``python tools/count_lines.py baselines/src/qevict_baselines`` prints the table of the guide to baselines.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> int:
    """Count the lines of a program that hold code; imports are code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spans = (range(each.start[0], each.end[0] + 1) for each in tokens if each.type not in SILENT)
    return len({line for span in spans for line in span} - _told(source))


def _told(source: str) -> set[int]:
    """Lines of statements that are a string and nothing else: docstrings, of names as well."""
    strings = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def table(folder: Path) -> str:
    """Return a row of Markdown for each file that holds code, the shortest first."""
    counts = {path.name: code_lines(path.read_text("utf-8")) for path in folder.glob("*.py")}
    rows = sorted((count, name) for name, count in counts.items() if count)
    return "".join(f"| `{name}` | {count} |\n" for count, name in rows)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])), end="")
