"""What was measured, as an SVG: a bar for each contender, its spread, and which one is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from veomni_tools.profiles.profile import Contender, Profile, shown_ms
from veomni_tools.tuning.report import Outcome, shown_kernel

_WIDTH, _LEFT, _BARS, _LINE, _GAP = 860, 220, 430, 20, 14
_TAKEN, _OTHER, _SPREAD, _TEXT, _FAINT = "#2f6f9f", "#b9c6d0", "#33414c", "#1d2730", "#5d6b76"
_FONT = "font-family='system-ui, sans-serif' font-size='12'"


def picture(profile: Profile, found: Sequence[Outcome]) -> str:
    """The picture's SVG. The bars of each kind of site have a scale of their own: the slowest is the longest."""
    shown = [each for each in found if each.site.measured]
    height = 64 + sum(_height(each) for each in shown)
    where = profile.machine.processor or profile.machine.hardware
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{height}' {_FONT} fill='{_TEXT}'>",
        f"<rect width='{_WIDTH}' height='{height}' fill='white'/>",
        _text(16, 26, f"Forward and backward of {profile.job}", "font-weight='600'"),
        _text(16, 44, f"{where}, {profile.date}. Dark: what auto takes. Line: 20th to 80th percentile.", _fill(_FAINT)),
    ]
    top = 64
    for each in shown:
        parts += _group(each, top)
        top += _height(each)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _height(outcome: Outcome) -> int:
    return _LINE * (1 + len(outcome.site.measured)) + _GAP


def _group(outcome: Outcome, top: int) -> Iterator[str]:
    site = outcome.site
    longest = max(each.times.high for each in site.measured if each.times)
    count = f"{site.sites} site{'s' * (site.sites > 1)}"
    yield _text(16, top + 12, f"{site.kind}, {count}", "font-weight='600'")
    for number, each in enumerate(site.measured):
        name = shown_kernel(each, site)
        yield from _bar(each, name, top + _LINE * (number + 1), longest, each is outcome.chosen)


def _bar(contender: Contender, name: str, top: int, longest: float, taken: bool) -> Iterator[str]:
    times = contender.times
    if times is None:
        return
    scale = _BARS / longest
    width, low, high = times.median * scale, _LEFT + times.low * scale, _LEFT + times.high * scale
    yield _text(_LEFT - 8, top + 13, name, "text-anchor='end'" + (" font-weight='600'" if taken else ""))
    yield (
        f"<rect x='{_LEFT}' y='{top + 3}' width='{width:.1f}' height='13' rx='2' fill='{_TAKEN if taken else _OTHER}'/>"
    )
    yield f"<path d='M{low:.1f} {top + 9.5}H{high:.1f}' stroke='{_SPREAD}' stroke-width='1.5'/>"
    yield _text(round(high) + 8, top + 13, shown_ms(times.median), _fill(_FAINT))


def _text(x: int, y: int, words: str, style: str = "") -> str:
    return f"<text x='{x}' y='{y}' {style}>{escape(words)}</text>"


def _fill(colour: str) -> str:
    return f"fill='{colour}'"
