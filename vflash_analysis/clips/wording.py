"""Questions about pocket scenes, the answers a target learns to write, and how an answer is scored.

Wording and order are functions of what the clip shows: the floor chooses how a text is built and in
which order shapes are told, a shape chooses its verb, so that text alone does not tell how it goes
on. Scores compare the words of a kind (colours, directions, ...) in the order in which they stand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vflash_analysis.clips.pocket import Scene, Shape

NUMBERS = {1: "one", 2: "two", 3: "three"}
VERBS = {"circle": "rolls", "square": "slides", "triangle": "glides", "cross": "spins"}
TOWARDS = {"left": "leftwards", "right": "rightwards", "up": "upwards", "down": "downwards"}
WHEN = {1: "early", 2: "late"}

LEXICON = {  # kind of attribute -> the words that state it
    "number": set(NUMBERS.values()),
    "floor": {"dark", "grey", "pale", "brown"},
    "size": {"small", "large"},
    "colour": {"red", "green", "blue", "yellow", "purple", "orange"},
    "shape": {"circle", "square", "triangle", "cross"},
    "place": {"left", "centre", "right"},
    "direction": {*TOWARDS.values(), "still"},
    "event": {"turns", "grows", "shrinks", "vanishes", "meet", "early", "late", "unchanged"},
}
STATIC_KINDS = ("number", "floor", "size", "colour", "shape", "place")
DYNAMIC_KINDS = ("direction", "event")
ACCURACIES = {"static_accuracy": STATIC_KINDS, "dynamic_accuracy": DYNAMIC_KINDS}

QUESTIONS = {
    "VDC": ("Describe the clip in detail.",),
    "Video-MME": (
        "Which shape is the largest? Explain.",
        "Which shapes change? Explain.",
        "Which shapes move? Explain.",
    ),
    "MVBench": ("Which shapes move, where to and in which order?",),
    "MLVU": ("List all that happens in this long clip, part by part.",),
    "LVB": ("What is going on when the white star shows up, and what happens around that moment?",),
}


def question(scene: Scene) -> str:
    """The prompt for a scene; it tells nothing of what the clip shows beyond the scene's family."""
    asked = QUESTIONS[scene.family]
    return asked[scene.variant % len(asked)]


def answer(scene: Scene) -> str:
    """The text a target is trained to write for a scene's question."""
    return _ANSWERS[scene.family](scene)


def attribute_matches(text: str, reference: str) -> dict[str, tuple[int, int]]:
    """Compare a text with its reference, kind by kind.

    Returns:
        kind -> (matches, words): the k-th word of a kind in the text matches when it equals the
        k-th one of the reference; `words` is the longer of the two counts, so that missing and
        surplus statements count as wrong.
    """
    found, wanted = re.findall(r"[a-z]+", text.lower()), re.findall(r"[a-z]+", reference.lower())
    result = {}
    for kind, words in LEXICON.items():
        ours, theirs = [w for w in found if w in words], [w for w in wanted if w in words]
        matches = sum(a == b for a, b in zip(ours, theirs, strict=False))
        result[kind] = (matches, max(len(ours), len(theirs)))
    return result


def accuracy_counts(text: str, reference: str) -> dict[str, tuple[int, int]]:
    """Words that tell attributes, and words that tell motion and events, held against a reference.

    Returns:
        each name of ACCURACIES -> (right, words), both summed over its kinds as
        `attribute_matches` counts them.
    """
    matches = attribute_matches(text, reference)
    return {
        quantity: (sum(matches[k][0] for k in kinds), sum(matches[k][1] for k in kinds))
        for quantity, kinds in ACCURACIES.items()
    }


def _noun(shape: Shape) -> str:
    return f"{shape.size} {shape.colour} {shape.shape}"


def _placed(shape: Shape) -> str:
    return (
        f"{_noun(shape)} in the centre"
        if shape.place == "centre"
        else f"{_noun(shape)} on the {shape.place}"
    )


def _move(shape: Shape, move: str) -> str:
    return "stays still" if move == "still" else f"{VERBS[shape.shape]} {TOWARDS[move]}"


def _join(parts: Sequence[str], last: str = "and") -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {last} {parts[-1]}"


def _cap(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _change(shape: Shape) -> str:
    assert shape.event is not None
    return f"{shape.event.kind} {shape.event.value}".strip()


def _changes(scene: Scene, ordered: Sequence[Shape], pattern: str) -> list[str]:
    """One sentence for each shape that changes; `pattern` has {name}, {change} and {when}."""
    return [
        _cap(pattern.format(name=f"the {s.shape}", change=_change(s), when=WHEN[s.event.phase]))
        for s in ordered
        if s.event is not None
    ]


def _left_at_end(scene: Scene, ordered: Sequence[Shape]) -> str:
    """The shapes still seen at the end, with their final looks."""
    left = []
    for shape in ordered:
        colour, size, visible = shape.look(2)
        if visible:
            left.append(f"a {size} {colour} {shape.shape}")
    return _join(left) if left else "nothing"


def _told(scene: Scene) -> list[Shape]:
    """The order in which shapes are told: from the left; from the right on a pale floor; large ones
    first on a brown one."""
    shapes = list(scene.shapes)
    if scene.floor == "pale":
        return shapes[::-1]
    if scene.floor == "brown":
        return sorted(shapes, key=lambda shape: shape.size == "small")
    return shapes


def _meeting(scene: Scene) -> str:
    first, second = _told(scene)
    return f"the {first.shape} and the {second.shape} move towards each other, meet early and turn back"


def _describe(scene: Scene) -> str:
    told, n = _told(scene), len(scene.shapes)
    count = f"{NUMBERS[n]} shape{'s' if n > 1 else ''}"
    end = _left_at_end(scene, told)
    moves = [f"the {s.shape} {_move(s, s.moves[0])}" for s in told]
    if scene.floor == "dark":
        if scene.meet:
            body = [
                f"There are a {_join([_placed(s) for s in told], 'and a')}.",
                f"{_cap(_meeting(scene))}.",
            ]
        else:
            body = [f"A {_placed(s)} {_move(s, s.moves[0])}." for s in told]
        body += _changes(scene, told, "{when} in the clip {name} {change}.")
        return " ".join(
            [
                f"On a dark floor there {'are' if n > 1 else 'is'} {count}.",
                *body,
                f"In the end {end} can be seen.",
            ]
        )
    if scene.floor == "grey":
        body = (
            [f"{_cap(_meeting(scene))}."]
            if scene.meet
            else [f"{_cap(move)} all the time." for move in moves]
        )
        body += _changes(scene, told, "{name} {change} {when} in the clip.")
        nouns = _join([f"a {_placed(s)}" for s in told])
        return " ".join(
            [
                f"The clip shows {count} on a grey floor: {nouns}.",
                *body,
                f"At its end we see {end}.",
            ]
        )
    if scene.floor == "pale":
        body = [f"{_cap(_meeting(scene))}."] if scene.meet else [f"{_cap(_join(moves))}."]
        body += _changes(scene, told, "{when} on, {name} {change}.")
        nouns = " Next comes a ".join(f"{_placed(s)}." for s in told)
        return " ".join(
            [
                f"From right to left, first comes a {nouns}",
                *body,
                f"The pale floor ends with {end}, of {count}.",
            ]
        )
    body = [
        f"A {_placed(s)} is on a brown floor." if i == 0 else f"A {_placed(s)} is there too."
        for i, s in enumerate(told)
    ]
    body += (
        [f"{_cap(_meeting(scene))}."] if scene.meet else [f"All along, {_join(moves, 'while')}."]
    )
    body += _changes(scene, told, "{name} {change}, and that is {when}.")
    return " ".join([*body, f"So of {count} what stays is {end}."])


def _explain(scene: Scene) -> str:
    return (_explain_largest, _explain_changes, _explain_moves)[scene.variant % 3](scene)


def _explain_largest(scene: Scene) -> str:
    told = _told(scene)
    large = [s for s in told if s.size == "large"]
    moves = _join([f"the {s.shape} {_move(s, s.moves[0])}" for s in told], "while")
    if len(large) != 1:
        nouns = _join([f"a {_placed(s)}" for s in told])
        return f"No shape on the {scene.floor} floor is the largest alone, because there are {nouns}. {_cap(moves)}."
    others = _join([f"the {_placed(s)}" for s in told if s is not large[0]])
    verdict = f"the {_placed(large[0])} is the largest"
    if scene.floor in ("dark", "grey"):
        return f"On the {scene.floor} floor {verdict}, because it is larger than {others}. {_cap(moves)}."
    return f"{_cap(moves)}. {_cap(verdict)} on the {scene.floor} floor, because {others} can not reach its size."


def _explain_changes(scene: Scene) -> str:
    told = _told(scene)
    sentences = []
    for s in told:
        if s.event is None:
            sentences.append(f"The {_placed(s)} stays unchanged and {_move(s, s.moves[0])}.")
        elif scene.floor in ("dark", "pale"):
            sentences.append(
                f"The {_placed(s)} {_change(s)} {WHEN[s.event.phase]}, after it {_move(s, s.moves[0])}."
            )
        else:
            sentences.append(
                f"{_cap(WHEN[s.event.phase])} the {_placed(s)} {_change(s)}, and it {_move(s, s.moves[0])}."
            )
    names = [f"the {s.shape}" for s in told if s.event is not None]
    verdict = (
        f"{_join(names)} {'change' if len(names) > 1 else 'changes'}"
        if names
        else "no shape changes"
    )
    if scene.floor in ("dark", "grey"):
        return " ".join([f"On the {scene.floor} floor {verdict}.", *sentences])
    return " ".join([*sentences, f"So {verdict} on the {scene.floor} floor."])


def _explain_moves(scene: Scene) -> str:
    told = _told(scene)
    moving = [s for s in told if s.moves[0] != "still"]
    resting = [s for s in told if s.moves[0] == "still"]
    sentences = [f"The {_placed(s)} {_move(s, s.moves[0])}." for s in moving + resting]
    verdict = (
        f"{NUMBERS[len(moving)]} of {NUMBERS[len(told)]} shapes move"
        if moving
        else "no shape moves"
    )
    sentences += _changes(scene, told, "{name} {change} {when}.")
    if scene.floor in ("dark", "grey"):
        return " ".join([f"On the {scene.floor} floor {verdict}.", *sentences])
    return " ".join([*sentences, f"So {verdict} on the {scene.floor} floor."])


def _order(scene: Scene) -> str:
    if scene.meet:
        first, second = _told(scene)
        nouns = f"the {_placed(first)} and the {_placed(second)}"
        return f"On the {scene.floor} floor two shapes move at the same time: {nouns}. {_cap(_meeting(scene))}."
    movers = sorted((s for s in scene.shapes if set(s.moves) != {"still"}), key=_turn)
    resting = [s for s in scene.shapes if set(s.moves) == {"still"}]
    moves = {s.shape: _move(s, s.moves[_turn(s)]) for s in movers}
    names = [f"the {s.shape}" for s in movers]
    if not movers:
        body = [f"No shape moves on the {scene.floor} floor."]
    elif scene.floor == "dark":
        words = ("First on the dark floor", "Then", "Last")
        body = [f"{words[i]} the {_placed(s)} {moves[s.shape]}." for i, s in enumerate(movers)]
        body += [f"So {' moves before '.join(names)}."] if len(names) > 1 else []
    elif scene.floor == "grey":
        body = [
            f"Number {NUMBERS[i + 1]} on the grey floor is the {_placed(s)}, which {moves[s.shape]}."
            for i, s in enumerate(movers)
        ]
    elif scene.floor == "pale":
        body = [f"The order on the pale floor is {', '.join(names)}."]
        body += [f"The {_placed(s)} {moves[s.shape]}." for s in movers[::-1]]
    else:
        body = [f"A brown floor: {_join([f'the {_noun(s)}' for s in movers])} move in turn."]
        body += [f"Starting from the {s.place}, the {s.shape} {moves[s.shape]}." for s in movers]
    body += [f"The {_placed(s)} stays still." for s in resting]
    return " ".join(body + _changes(scene, _told(scene), "{name} {change} {when}."))


def _turn(shape: Shape) -> int:
    return next(phase for phase, move in enumerate(shape.moves) if move != "still")


def _clause(shape: Shape, phase: int, name: str) -> str:
    """What one shape does in one phase: its change at the phase's start, then its move."""
    if not shape.look(phase)[2]:
        assert shape.event is not None
        return f"{name} vanishes" if shape.event.phase == phase else f"{name} is gone"
    if shape.event is not None and shape.event.phase == phase:
        return f"{name} {_change(shape)} and {_move(shape, shape.moves[phase])}"
    return f"{name} {_move(shape, shape.moves[phase])}"


def _phase(scene: Scene, phase: int, first_told: bool) -> str:
    names = {s.shape: f"the {_placed(s)}" if first_told else f"the {s.shape}" for s in scene.shapes}
    return _join([_clause(s, phase, names[s.shape]) for s in _told(scene)], "while")


def _list_events(scene: Scene) -> str:
    if scene.floor == "dark":
        return (
            f"On a dark floor, {_phase(scene, 0, True)}. Then {_phase(scene, 1, False)}. "
            f"At last {_phase(scene, 2, False)}. In the end {_left_at_end(scene, _told(scene))} can be seen."
        )
    if scene.floor == "grey":
        return (
            f"Part one on the grey floor: {_phase(scene, 0, True)}. Part two: {_phase(scene, 1, False)}. "
            f"Part three: {_phase(scene, 2, False)}."
        )
    if scene.floor == "pale":
        sentences = []
        for s in _told(scene):
            parts = [_clause(s, phase, "").strip() for phase in range(3)]
            sentences.append(
                f"The {_placed(s)} {parts[0]}, next it {parts[1]}, and finally it {parts[2]}."
            )
        return " ".join([*sentences, "The pale floor shows no more."])
    return (
        f"The brown floor ends with this: {_phase(scene, 2, True)}. Before that, {_phase(scene, 1, False)}. "
        f"It all begins when {_phase(scene, 0, False)}."
    )


def _around_star(scene: Scene) -> str:
    at = scene.star_phase
    when = WHEN[at]
    before = _phase(scene, at - 1, scene.floor in ("grey", "brown"))
    now = _phase(scene, at, scene.floor in ("dark", "pale"))
    after = f"Afterwards {_phase(scene, 2, False)}." if at == 1 else "Afterwards the clip is over."
    if scene.floor == "dark":
        return f"The star shows up {when} above the dark floor. At that moment {now}. Just before, {before}. {after}"
    if scene.floor == "grey":
        return f"On the grey floor {before} until the star shows up, which is {when}. From then on {now}. {after}"
    if scene.floor == "pale":
        return f"When the star shows up, {now}. It is {when} on the pale floor, and shortly before it {before}. {after}"
    return (
        f"A brown floor is seen first, where {before}. The star is {when}; with it {now}. {after}"
    )


_ANSWERS = {
    "VDC": _describe,
    "Video-MME": _explain,
    "MVBench": _order,
    "MLVU": _list_events,
    "LVB": _around_star,
}
