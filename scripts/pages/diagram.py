"""Diagrams of one step of a mixer, as SVG text: rows of boxes and arrows between them. Colours come from the style sheet."""

import re
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import NamedTuple

CHAR, LINE, PAD = 7.4, 17, 12  # width of a letter, height of a line, room around a text
GAP, RISE, LOOP = 22, 34, 30  # between boxes, between rows, beside a state
Arrow = tuple[str, str]


class Box(NamedTuple):
    """A box: its text, whether it is the state, its centre, size and row."""

    text: str
    state: bool
    x: float
    y: float
    width: float
    height: float
    row: int


def diagram(name: str, rows: Sequence[Mapping[str, str]], arrows: str) -> str:
    """The SVG of rows of boxes {id: text} and of arrows "from>to". A state's id ends in `!`, and its arrow comes back.

    Raises:
        ValueError: an arrow starts or ends at no box.
    """
    boxes, width, height = _placed(rows)
    pairs = [tuple(arrow.split(">")) for arrow in arrows.split()]
    for pair in pairs:
        for end in pair:
            if end not in boxes:
                raise ValueError(
                    f"diagram of {name}: expected arrows between {', '.join(boxes)}, got {end!r}."
                )
    drawn = [_arrow(boxes[start], boxes[end], boxes.values()) for start, end in pairs]
    drawn += [_box(box) for box in boxes.values()]
    told = ", ".join(f"{_plain(boxes[a].text)} to {_plain(boxes[b].text)}" for a, b in pairs)
    return (
        f'<svg class="flow" viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img" '
        f'aria-label="{escape(f"One step of {name}: {told}")}">'
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path class="tip" d="M0,0 L8,4 L0,8 Z"/></marker></defs>{"".join(drawn)}</svg>'
    )


def _placed(rows: Sequence[Mapping[str, str]]) -> tuple[dict[str, Box], float, float]:
    """The boxes, each row centred, and the size of all."""
    sizes = [[_size(text) for text in row.values()] for row in rows]
    lengths = [sum(w for w, _ in row) + GAP * (len(row) - 1) for row in sizes]
    width = max(lengths) + 2 * LOOP + 16
    boxes, top = {}, 4.0
    for number, (row, size, length) in enumerate(zip(rows, sizes, lengths, strict=True)):
        left, tall = (width - length) / 2, max(h for _, h in size)
        for (key, text), (w, h) in zip(row.items(), size, strict=True):
            boxes[key.rstrip("!")] = Box(text, key.endswith("!"), left + w / 2, top + tall / 2, w, h, number)
            left += w + GAP
        top += tall + RISE
    return boxes, width, top - RISE + 4


def _size(text: str) -> tuple[float, float]:
    lines = text.split("|")
    return max(46.0, CHAR * max(len(_plain(line)) for line in lines) + 2 * PAD), LINE * len(lines) + PAD


def _plain(text: str) -> str:
    return re.sub(r"[_^]\{([^}]*)\}", r"\1", text).replace("_", "").replace("|", ", ")


def _arrow(start: Box, end: Box, boxes: Collection[Box]) -> str:
    """Down from one row to the next, sideways within a row, or down beside the rows between and in from the side."""
    x, y, to_x, to_y = start.x, start.y + start.height / 2, end.x, end.y - end.height / 2
    if end.row == start.row:
        side = 1 if end.x > start.x else -1
        x, to_x = start.x + side * start.width / 2, end.x - side * end.width / 2
        path = f"M{x:.0f},{start.y:.0f} H{to_x:.0f}"
    elif end.row == start.row + 1:
        bend = (to_y - y) / 2
        to_x += max(-0.3, min(0.3, (x - to_x) / 400)) * end.width
        path = f"M{x:.0f},{y:.0f} C{x:.0f},{y + bend:.0f} {to_x:.0f},{y + bend:.0f} {to_x:.0f},{to_y:.0f}"
    else:
        side = 1 if x > to_x else -1
        between = [box for box in boxes if start.row < box.row < end.row]
        lane = max(side * x, *(side * box.x + box.width / 2 + 6 + box.state * LOOP for box in between)) * side
        path = f"M{x:.0f},{y:.0f} v9 H{lane:.0f} V{end.y:.0f} H{to_x + side * end.width / 2:.0f}"
    return f'<path class="arrow" d="{path}" marker-end="url(#tip)"/>'


def _box(box: Box) -> str:
    left, top = box.x - box.width / 2, box.y - box.height / 2
    kind = "state" if box.state else "box"
    parts = [
        f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="6"/>'
    ]
    lines = box.text.split("|")
    for number, line in enumerate(lines):
        y = box.y + 4.5 + LINE * (number - (len(lines) - 1) / 2)
        parts.append(f'<text x="{box.x:.1f}" y="{y:.1f}">{_scripts(line)}</text>')
    if box.state:
        edge, reach = left + box.width, 11
        parts.append(
            f'<path class="arrow" d="M{edge:.0f},{box.y + 7:.0f} h{reach} v-14 h-{reach - 1}" marker-end="url(#tip)"/>'
        )
        parts.append(f'<text class="back" x="{edge + 4:.0f}" y="{box.y - 12:.0f}">t−1</text>')
    return "".join(parts)


def _scripts(line: str) -> str:
    """Text with a_b, a_{bc} lowered and a^{bc} raised."""
    parts = []
    for piece in re.split(r"([_^]\{[^}]*\}|_\w)", line):
        if piece[:1] in ("_", "^") and len(piece) > 1:
            shift = 4 if piece[0] == "_" else -5
            inner = escape(piece[1:].strip("{}"))
            parts.append(
                f'<tspan class="script" dy="{shift}">{inner}</tspan><tspan dy="{-shift}">\u200b</tspan>'
            )
        else:
            parts.append(escape(piece))
    return "".join(parts)
