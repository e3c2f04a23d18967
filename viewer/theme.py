"""Colours and looks, spelled once for Streamlit, charts and the step ledger.

Blue and orange part positive from negative advantages (readable with every colour blindness); both are mid-tones that
hold on the light and on the dark background. Grey is for what is not known.
"""

from pathlib import Path
from typing import Any

POSITIVE = "#2f80d0"
NEGATIVE = "#e07b26"
UNKNOWN = "#8b93a1"
ACCENT = "#7c5cd6"
"""Marks what wants attention: a selected step, terms of opposite signs."""

STREAMLIT_OPTIONS: dict[str, Any] = {
    "theme.light.primaryColor": "#2a6fb8",
    "theme.dark.primaryColor": "#5aa0e6",
    "theme.baseFontSize": 14,
    "theme.headingFontSizes": ["1.75rem", "1.35rem", "1.1rem"],
    "theme.metricValueFontSize": "1.5rem",
    "theme.codeFontSize": "0.8rem",
    "theme.light.codeTextColor": "#2f2d2b",
    "theme.dark.codeTextColor": "#edebe8",
}
"""Options of Streamlit that set the theme."""

_NAMED = {"positive": POSITIVE, "negative": NEGATIVE, "unknown": UNKNOWN, "accent": ACCENT}
_COLOURS = " ".join(f"--trajlake-{name}: {colour};" for name, colour in _NAMED.items())
VARIABLES = f":root {{ {_COLOURS} }}"
"""The colours as variables of a style sheet."""
STYLE = f"<style>{VARIABLES}\n{Path(__file__).with_name('style.css').read_text()}</style>"
"""What no option sets (`style.css`)."""

STATUS_COLOURS = {"completed": "green", "succeeded": "green", "truncated": "orange", "started": "blue"}
"""Badge colours of episode and job states; others are red."""
