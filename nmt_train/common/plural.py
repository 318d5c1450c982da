"""Numbers with nouns, for logs and messages."""

from __future__ import annotations


def counted(number: float, noun: str, several: str = "") -> str:
    """`1 epoch`, `2.4 epochs` or `1,840 updates`; several: the plural of the noun if it is not the noun with an s."""
    return f"{number:,.15g} {noun if number == 1 else several or noun + 's'}"
