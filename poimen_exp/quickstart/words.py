"""Closed word lists of the project logs. Each word is one token of the tiny model, so every log line has one length."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    """The words of ``text``."""
    return tuple(text.split())


SERVICES = words(
    "auth billing search login orders stock mail audit cart chat feed forms maps media menu news notes pages photo "
    "polls price quota rates relay rooms sales scan seats ship shop sync tags tasks tax team tours trips users video "
    "vote wallet web wiki yard zones"
)
THINGS = words("cache queue index table key log backup bucket cert config disk job token lock")
PLACES = words(
    "cedar flint maple birch amber coral onyx jade opal ruby slate topaz aspen elm oak pine palm fir willow iron zinc "
    "copper cobalt nickel"
)
ACTORS = words("mira otto nora ivan lena omar rosa hugo iris theo")
VERBS = (("moved", "to"), ("put", "on"), ("kept", "at"), ("sent", "to"), ("left", "on"), ("stored", "at"))
DAYS = words("monday tuesday wednesday thursday friday saturday sunday")
HOURS = words("morning noon evening night")
UNKNOWN = "unknown"
"""Answer to a question whose evidence the log does not hold."""
