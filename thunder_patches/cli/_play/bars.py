"""A bar chart of two runs as SVG: logarithmic time, medians with their spread, light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from .figures import Spread, seconds, times

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR = 760, 150, 180, 76, 58, 16

# Plain colours, no CSS variables: not every program that shows SVG knows those.
_STYLE = """
  text { font: 13px system-ui, sans-serif } .title { font-size: 16px; font-weight: 600 }
  .ratio { font-weight: 600 } .spread { stroke-width: 1.5 }
  .paper { fill: #ffffff } .ink { fill: #1d2433 } .soft { fill: #66708a }
  .stock { fill: #9aa5bd } .patched { fill: #2f6fde }
  .grid { stroke: #dde1ea } .spread { stroke: #1d2433 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #161a22 } .ink { fill: #e8ebf2 } .soft { fill: #9aa3b8 }
    .stock { fill: #5d6880 } .patched { fill: #6aa3ff }
    .grid { stroke: #333a4a } .spread { stroke: #e8ebf2 } }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One workload; times in seconds."""

    name: str
    stock: Spread
    patched: Spread
    ratio: Spread


def svg(title: str, note: str, bars: Sequence[Bar]) -> str:
    """The picture as text; ``bars`` must not be empty."""
    values = [v for bar in bars for one in (bar.stock, bar.patched) for v in (one.low, one.high)]
    low = math.floor(math.log10(max(min(values), 1e-4)))
    high = max(math.ceil(math.log10(max(values))), low + 1)
    height = _TOP + _ROW * len(bars) + 34

    def x(value: float) -> float:
        share = (math.log10(max(value, 10.0**low)) - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{height}" rx="8"/>',
        f'<text class="ink title" x="20" y="30">{escape(title)}</text>',
        f'<text class="soft" x="20" y="52">{escape(note)}</text>',
    ]
    for power in range(low, high + 1):
        at, bottom = x(10.0**power), _TOP + _ROW * len(bars)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 8}" y2="{bottom}"/>'
            f'<text class="soft" x="{at:.1f}" y="{bottom + 20}" text-anchor="middle">'
            f"{_tick(power)}</text>"
        )
    for number, bar in enumerate(bars):
        parts += _row(bar, _TOP + _ROW * number, x)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(bar: Bar, top: float, x: Callable[[float], float]) -> list[str]:
    middle = top + _BAR + 4
    parts = [
        f'<text class="ink" x="20" y="{middle}">{escape(bar.name)}</text>',
        f'<text class="ink ratio" x="{_WIDTH - 16}" y="{middle}" text-anchor="end">'
        f"{times(bar.ratio.median)}</text>",
    ]
    for kind, spread, y in (("stock", bar.stock, top), ("patched", bar.patched, top + _BAR + 3)):
        end, centre = x(spread.median), y + _BAR / 2
        label = f"{kind} {seconds(spread.median)}"
        parts += [
            f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{max(end - _LEFT, 1):.1f}" '
            f'height="{_BAR}" rx="2"/>',
            f'<line class="spread" x1="{x(spread.low):.1f}" x2="{x(spread.high):.1f}" '
            f'y1="{centre}" y2="{centre}"/>',
            f'<text class="soft" x="{max(end, x(spread.high)) + 6:.1f}" y="{centre + 4.5}">'
            f"{label}</text>",
        ]
    return parts


def _tick(power: int) -> str:
    return f"{10**power} s" if power >= 0 else f"{10 ** (power + 3):g} ms"
