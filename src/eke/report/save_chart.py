"""Where the time of a save went: training against capture, writing and commit, lane by lane.

Property: every rectangle lies inside its lane, and its time inside the picture's window; a stall
is at least two pixels wide, so that a short one can be seen, and says its milliseconds in words.
"""

from __future__ import annotations

from collections.abc import Sequence

from eke.report.frame import SMALL, Box, legend, placed, tick_text, x_axis
from eke.report.saves import LANES, PHASES, Bit, SaveView
from eke.report.scales import Scale, linear_ticks
from eke.report.svg import figure, line, rect, title, words
from eke.report.text import text_width

LANE_HEIGHT, LANE_GAP = 26.0, 9.0
CLASSES = {
    "data": "g-data",
    "forward and backward": "g-compute",
    "optimizer": "g-optimizer",
    "evaluation": "g-eval",
    "decide and log": "g-other",
    "save": "g-other",
    "eager copy": "g-eager",
    "lazy copy": "g-lazy",
    "compare": "g-compare",
    "objects": "g-write",
    "write": "g-write",
    "link": "g-compare",
    "fsync": "g-fsync",
    "other ranks": "g-compare",
    "commit": "g-commit",
    "retention": "g-compare",
}
SAID = {
    "forward and backward": "forward, backward",
    "compare": "compare, link, delete old",
    "write": "write",
    "g-other": "other",
}


def milliseconds(ms: float) -> str:
    """`0.4 ms`, `12 ms`, `1,234 ms`; `12.3 s` from ten seconds on."""
    if ms >= 10_000:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.2g} ms" if ms < 10 else f"{ms:,.0f} ms"


def headline(save: SaveView) -> str:
    """A save in one line."""
    ended = "until it was committed" if save.state == "committed" else f"until it had {save.state}"
    return (
        f"Step {save.step:,}: training waited {milliseconds(save.stall_ms)} of the "
        f"{milliseconds(save.total_ms)} {ended}"
    )


def _short(save: SaveView) -> str:
    return (
        f"Step {save.step:,}: waited {milliseconds(save.stall_ms)} of {milliseconds(save.total_ms)}"
    )


def save_chart(save: SaveView, *, heading: str, width: int, name: str) -> str:
    """One save's lanes.

    Args:
        heading: such as "The worst save".
    """
    narrow = width < 500
    left = 58.0 if narrow else 74.0
    keys = _keys(save)
    key, key_height = legend(keys, 4.0, width - 4.0, 42.0)
    # Room for the words of the stalls, then the numbers of the steps, above the first lane.
    top = 42 + key_height + 40
    lanes = {lane: top + i * (LANE_HEIGHT + LANE_GAP) for i, lane in enumerate(LANES)}
    box = Box(left, top, width - 12.0, top + len(LANES) * (LANE_HEIGHT + LANE_GAP))
    x = Scale(save.begin_ms, save.end_ms, box.left, box.right)
    ticks = linear_ticks(save.begin_ms, save.end_ms, 4 if narrow else 8)
    unit, per = ("s", 1000.0) if save.total_ms >= 10_000 else ("ms", 1.0)
    shown = tick_text([t / per for t in ticks])
    out = [line(x(t), top - 4, x(t), box.bottom, "grid") for t in ticks]
    for lane, y in lanes.items():
        out.append(words(left - 8, y + 17, lane, "t", "end"))
        out.append(rect(box.left, y, box.width, LANE_HEIGHT, "g-lane"))
    ends = (x(save.total_ms), save.state)
    out += _training(save, x, lanes["training"], box, ends)
    for lane in LANES[1:]:
        for bit in save.lanes.get(lane, ()):
            out.append(_bit(bit, x, lanes[lane], LANE_HEIGHT))
    for at, text in ((0.0, "save"), (save.total_ms, save.state)):
        out.append(line(x(at), top - 4, x(at), box.bottom, "g-moment", title(text)))
    says = [headline(save) + "."]
    for lane in LANES[1:]:
        says.append(f"{lane.capitalize()} was at work for {milliseconds(save.busy_ms(lane))}.")
    return figure(
        name,
        width,
        int(box.bottom + 44),
        heading,
        " ".join(says),
        words(4, 15, heading, "strong"),
        words(4, 32, _short(save) if narrow else headline(save), "t"),
        key,
        *out,
        x_axis(box, x, ticks, lambda t: shown(t / per), width),
        words(box.right, box.bottom + 36, f"{unit} after save() was called", "t", "end"),
    )


def _keys(save: SaveView) -> list[tuple[str, str]]:
    """The legend: what is drawn, each colour once."""
    names = [bit.name for bit in save.phases if bit.name in PHASES]
    names += [bit.name for lane in LANES[1:] for bit in save.lanes.get(lane, ())]
    classes: dict[str, str] = {}
    if save.stalls:
        classes["g-stall"] = "training waits"
    for wanted in CLASSES:
        if wanted in names:
            class_ = CLASSES[wanted]
            text = SAID.get(class_) or SAID.get(wanted, wanted)
            if class_ == "g-compare":
                text = SAID["compare"]
            if class_ == "g-write":
                text = SAID["write"]
            classes.setdefault(class_, text)
    return [(f"g-key {class_}", text) for class_, text in classes.items()]


def _bit(bit: Bit, x: Scale, y: float, height: float) -> str:
    """A stretch of a lane; half a pixel wide at least, inside the window."""
    begin, end = x(bit.begin_ms), x(bit.end_ms)
    wide = max(end - begin, 0.5)
    tip = title(f"{bit.name}: {milliseconds(bit.ms)}")
    return rect(
        min(begin, x.end - wide), y, wide, height, f"g-bit {CLASSES.get(bit.name, 'g-other')}", tip
    )


def _training(save: SaveView, x: Scale, y: float, box: Box, ends: tuple[float, str]) -> list[str]:
    """The first lane: phases, the borders of steps with their numbers, and the stalls on top."""
    out = [_bit(bit, x, y, LANE_HEIGHT) for bit in save.phases]
    names = []
    for bit in save.steps:
        out.append(line(x(bit.begin_ms), y - 4, x(bit.begin_ms), y + LANE_HEIGHT, "g-border"))
        names.append(((x(bit.begin_ms) + x(bit.end_ms)) / 2, bit.name))
    longest = max((text_width(text, SMALL) for _, text in names), default=0.0)
    if names and longest + 6 > box.width / len(names):
        names = [(at, text.removeprefix("step ")) for at, text in names]
        names[0] = (names[0][0], f"step {names[0][1]}")
    for at, text in placed(names, box.left, box.right):
        out.append(words(at, y - 7, text, "tick", "middle"))
    stalls = []
    for bit in save.stalls:
        begin = x(bit.begin_ms)
        wide = max(x(bit.end_ms) - begin, 2.0)
        what = "save()" if bit.name == "save" else "barrier"
        text = f"{what} {milliseconds(bit.ms)}"
        out.append(
            rect(min(begin, x.end - wide), y - 3, wide, LANE_HEIGHT + 6, "g-stall", title(text))
        )
        stalls.append((bit.ms, begin + wide / 2, text))
    for at, text in placed([*_longest_first(stalls), ends], box.left, box.right):
        class_ = "tick" if text == ends[1] else "tick g-stall-text"
        out.append(words(at, y - 23, text, class_, "middle"))
    return out


def _longest_first(stalls: Sequence[tuple[float, float, str]]) -> list[tuple[float, str]]:
    """The labels of the longest four stalls: more would not be read."""
    return [(at, text) for _, at, text in sorted(stalls, reverse=True)[:4]]
