"""``python -m qevict.cli``."""

from qevict.cli import main

main()
