"""Generated pocket clips: what happens in a scene, how it is drawn, and the MP4 files made of it.

A scene is one to three flat shapes on a floor, told in three phases of equal length. In each phase
a shape stays or moves in one direction; at a phase boundary it may change colour, grow, shrink or
vanish; two shapes may meet and turn back; a white star may show up for the last one or two phases.
The camera drifts and the picture is noisy, which no text mentions. Five families of scenes mirror
the five video benchmarks. Everything is drawn from one generator seeded by (split, family, index).

A scene belongs to exactly one split: the hash of its description (never of its pixels) chooses the
split, so two splits cannot share a scene, let alone a file.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import av
import numpy as np

from vflash_analysis.clips.lists import Clip
from vflash_analysis.clips.wording import answer, question
from vflash_analysis.errors import InputError
from vflash_analysis.records import sha256_of_file
from vflash_analysis.workers import PARALLEL_FROM, usable_cpus, worker_pool

FAMILIES = ("VDC", "Video-MME", "MVBench", "MLVU", "LVB")
SPLITS = {  # share of description hashes, in percent
    "target_training": range(60),
    "target_evaluation": range(60, 65),
    "drafter_training": range(65, 85),
    "drafter_validation": range(85, 90),
    "suites": range(90, 100),
}
COLOURS = {
    "red": (214, 40, 40),
    "green": (30, 150, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 215, 40),
    "purple": (140, 50, 170),
    "orange": (245, 135, 20),
}
SHAPES = ("circle", "square", "triangle", "cross")
RADII = {"small": 0.125, "large": 0.19}  # of the picture's shorter side
FLOORS = {
    "dark": (48, 48, 56),
    "grey": (122, 122, 122),
    "pale": (212, 206, 192),
    "brown": (104, 74, 52),
}
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}
N_PHASES = 3
PHASE_TRAVEL = 0.27  # of the picture's side, when a shape moves in one phase or changes its course
STEADY_TRAVEL = 0.17  # a phase's share, when a shape keeps moving through the clip
SIZES = (
    (96, 96),
    (112, 96),
    (96, 112),
    (112, 112),
    (128, 112),
    (144, 128),
)  # width, height in pixels
PLACE_BORDERS, PLACE_MARGIN = (1 / 3, 2 / 3), 0.06  # a start is never near a border of two places
RATES = (8, 10, 12, 15)  # frames a second
CLIPS_AT_ONCE = 8  # of one process
STAR_CENTRE = (0.9, 0.1)
STAR_CODE = 49
CHECKED_TIMES = (  # when shapes must be apart: evenly spaced, and just before they change their look
    *np.linspace(0, 1, 4 * N_PHASES + 1).tolist(),
    *((np.arange(1, N_PHASES + 1) - 1e-6) / N_PHASES).tolist(),
)

Points = Sequence[Sequence[float]]  # (x, y) of each shape, in 0..1


@dataclass(frozen=True)
class Event:
    """What happens to a shape at the boundary before `phase` (1 or 2): turns, grows, shrinks or
    vanishes."""

    kind: str
    phase: int
    value: str = ""


@dataclass(frozen=True)
class Shape:
    """One shape: what it looks like, where it starts, what it does in each phase.

    `x` and `y` are the start of its centre in 0..1; `travel` is how far it goes in a phase in
    which it moves.
    """

    shape: str
    colour: str
    size: str
    x: float
    y: float
    moves: tuple[str, str, str]
    travel: float
    event: Event | None = None

    @property
    def place(self) -> str:
        """Where it starts: left, centre or right third."""
        return ("left", "centre", "right")[_third(self.x)]

    def centre(self, time: float) -> tuple[float, float]:
        """Its centre at `time` in 0..1 of the clip."""
        x, y = self.x, self.y
        for phase, move in enumerate(self.moves):
            done = min(max(time * N_PHASES - phase, 0.0), 1.0) * self.travel
            x, y = x + MOVES[move][0] * done, y + MOVES[move][1] * done
        return x, y

    def look(self, phase: int) -> tuple[str, str, bool]:
        """(colour, size, visible) in a phase."""
        happened = self.event is not None and phase >= self.event.phase
        kind = self.event.kind if happened and self.event else ""
        colour = self.event.value if kind == "turns" and self.event else self.colour
        size = {"grows": "large", "shrinks": "small"}.get(kind, self.size)
        return colour, size, kind != "vanishes"


@dataclass(frozen=True)
class Scene:
    """A clip's content. `star_phase` is the phase from which a white star is seen (0: never);
    `meet` marks a meeting."""

    family: str
    floor: str
    shapes: tuple[Shape, ...]
    star_phase: int = 0
    meet: bool = False
    variant: int = 0  # which question is asked, where the family has several

    def description(self) -> str:
        """All that the texts may tell of the scene, as canonical JSON: places instead of
        coordinates."""
        told = [
            {key: value for key, value in asdict(shape).items() if key not in ("x", "y", "travel")}
            | {"place": shape.place}
            for shape in self.shapes
        ]
        return json.dumps([self.floor, told, self.star_phase, self.meet], sort_keys=True)

    def split(self) -> str:
        """The split this scene belongs to, by the hash of its description."""
        bucket = int(hashlib.sha256(self.description().encode()).hexdigest()[:8], 16) % 100
        return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def _clear(shapes: tuple[Shape, ...], meet: bool) -> bool:
    """Whether all shapes stay in the picture and, unless they are to meet, apart from each other
    and from the star."""
    for time in CHECKED_TIMES:
        phase = min(int(time * N_PHASES), N_PHASES - 1)
        discs = [
            (*shape.centre(time), RADII[shape.look(phase)[1]])
            for shape in shapes
            if shape.look(phase)[2]
        ]
        for i, (x, y, radius) in enumerate(discs):
            if not (radius <= x <= 1 - radius and radius <= y <= 1 - radius):
                return False
            if math.hypot(x - STAR_CENTRE[0], y - STAR_CENTRE[1]) < radius + 0.09:
                return False
            for other_x, other_y, other_radius in discs[:i]:
                touch = (radius + other_radius) * (0.9 if meet else 1.02)
                if math.hypot(x - other_x, y - other_y) < touch:
                    return False
    return True


def _draw_moves(
    rng: np.random.Generator, family: str, order: int
) -> tuple[tuple[str, str, str], float]:
    """The moves of one shape and its travel. `order` is the shape's turn in a scene told by
    turns."""
    directions = ("left", "right", "up", "down")
    if family in ("VDC", "Video-MME"):
        move = "still" if rng.random() < 0.3 else str(rng.choice(directions))
        return (move, move, move), STEADY_TRAVEL
    if family == "MVBench":
        move = str(rng.choice(directions))
        return tuple(move if phase == order else "still" for phase in range(N_PHASES)), PHASE_TRAVEL  # type: ignore[return-value]
    moves = [str(rng.choice((*directions, "still"))) for _ in range(N_PHASES)]
    return tuple(moves), PHASE_TRAVEL  # type: ignore[return-value]


def _draw_event(rng: np.random.Generator, family: str, colour: str, size: str) -> Event | None:
    share = {"VDC": 0.45, "Video-MME": 0.5, "MVBench": 0.15, "MLVU": 0.8, "LVB": 0.3}[family]
    if rng.random() >= share:
        return None
    kind = str(
        rng.choice(("turns", "turns", "vanishes", "grows" if size == "small" else "shrinks"))
    )
    phase = int(rng.integers(1, N_PHASES))
    value = str(rng.choice([c for c in COLOURS if c != colour])) if kind == "turns" else ""
    return Event(kind, phase, value)


def draw_scene(rng: np.random.Generator, family: str) -> Scene:
    """Draw one scene of a family; shapes differ in both colour and shape so that each can be named
    by either."""
    if family not in FAMILIES:
        raise InputError(f"clip family: found {family!r}, allowed {', '.join(FAMILIES)}")
    counts = {
        "VDC": (0.1, 0.6, 0.3),
        "Video-MME": (0, 0.65, 0.35),
        "MVBench": (0, 0.6, 0.4),
        "MLVU": (0.3, 0.7, 0),
        "LVB": (0.25, 0.75, 0),
    }
    while True:
        n = int(rng.choice((1, 2, 3), p=counts[family]))
        meet = n == 2 and family in ("VDC", "MVBench") and rng.random() < 0.2
        kinds = rng.choice(SHAPES, n, replace=False)
        colours = rng.choice(list(COLOURS), n, replace=False)
        turns = rng.permutation(N_PHASES)
        drawn = []
        for i in range(n):
            size = str(rng.choice(("small", "large"), p=(0.6, 0.4)))
            moves, travel = _draw_moves(rng, family, int(turns[i]))
            event = _draw_event(rng, family, str(colours[i]), size)
            if event is not None:  # a vanished shape does not move
                moves = tuple(
                    "still" if event.kind == "vanishes" and phase >= event.phase else move
                    for phase, move in enumerate(moves)
                )  # type: ignore[assignment]
            drawn.append(
                Shape(str(kinds[i]), str(colours[i]), size, 0.5, 0.5, moves, travel, event)
            )
        if meet:
            drawn = _make_meeting(rng, drawn)
        starts = [[(s.x, s.y) for s in drawn]] if meet else _starts(rng, n)
        placed = (_placed(drawn, points) for points in starts if _places_differ(points))
        by_place = next((shapes for shapes in placed if _clear(shapes, meet)), None)
        if by_place is None:
            continue
        return Scene(
            family=family,
            floor=str(rng.choice(list(FLOORS))),
            shapes=by_place,
            star_phase=int(rng.integers(1, N_PHASES)) if family == "LVB" else 0,
            meet=meet,
            variant=int(rng.integers(3)),
        )


def _starts(rng: np.random.Generator, n: int) -> Iterator[Points]:
    """Starting points of n shapes, tried one set after the other."""
    for _ in range(60):
        yield rng.uniform(0.12, 0.88, (n, 2)).tolist()


def _places_differ(points: Points) -> bool:
    """Whether no two of the points are in the same place, and each clearly in its own."""
    off_borders = all(
        abs(x - border) >= PLACE_MARGIN for x, _ in points for border in PLACE_BORDERS
    )
    return off_borders and len({_third(x) for x, _ in points}) == len(points)


def _placed(shapes: list[Shape], points: Points) -> tuple[Shape, ...]:
    """Shapes at their starting points, from left to right."""
    moved = [replace(s, x=x, y=y) for s, (x, y) in zip(shapes, points, strict=True)]
    return tuple(sorted(moved, key=lambda shape: shape.x))


def _third(x: float) -> int:
    """Which third of the picture, from the left."""
    return min(2, int(x * 3))


def _make_meeting(rng: np.random.Generator, shapes: list[Shape]) -> list[Shape]:
    """Let two shapes move towards each other in phase 0, touch, turn back in phase 1 and rest in
    phase 2."""
    gap = sum(RADII[shape.size] for shape in shapes)
    y = float(rng.uniform(0.3, 0.75))
    travel = PHASE_TRAVEL * 0.8
    middle = float(rng.uniform(0.42, 0.58))
    left, right = middle - gap / 2 - travel, middle + gap / 2 + travel
    met = [("right", "left", "still"), ("left", "right", "still")]
    return [
        replace(shape, x=x, y=y, moves=moves, travel=travel, event=None)
        for shape, x, moves in zip(shapes, (left, right), met, strict=True)
    ]


def scenes(split: str, family: str, seed: int = 0) -> Iterator[Scene]:
    """Yield all scenes of a split and family, without end and without a repeated description, in a
    fixed order."""
    if split not in SPLITS:
        raise InputError(f"clip split: found {split!r}, allowed {', '.join(SPLITS)}")
    rng = np.random.default_rng([seed, list(SPLITS).index(split), FAMILIES.index(family)])
    seen: set[str] = set()
    while True:
        scene = draw_scene(rng, family)
        if scene.split() == split and (description := scene.description()) not in seen:
            seen.add(description)
            yield scene


def render(
    scene: Scene, times: np.ndarray, width: int, height: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a scene.

    Args:
        times: (T,) instants in 0..1 of the clip.
        width: in pixels; with `height`, the size of the picture.
        rng: draws the floor's pattern, the camera's drift and the noise.

    Returns:
        Pictures (T, height, width, 3) uint8 RGB, and what is under each pixel (T, height, width)
        uint8: 0 the floor, `STAR_CODE` the star, else 1 + colour + 6 * (shape + 4 * size), sizes
        small 0 and large 1.
    """
    side = min(width, height)
    drift = np.clip(np.cumsum(rng.normal(0, 0.004, (len(times), 2)), axis=0), -0.02, 0.02)
    floor = np.array(FLOORS[scene.floor], np.float32) + _texture(rng, width, height)[..., None]
    pictures = np.repeat(floor[None], len(times), axis=0)
    under = np.zeros((len(times), height, width), np.uint8)
    for i, time in enumerate(times):
        phase = min(int(time * N_PHASES), N_PHASES - 1)
        drawn = []
        for shape in scene.shapes:
            colour, size, visible = shape.look(phase)
            if visible:
                x, y = shape.centre(float(time))
                code = (
                    1
                    + list(COLOURS).index(colour)
                    + 6 * (SHAPES.index(shape.shape) + 4 * (size == "large"))
                )
                drawn.append(
                    (
                        shape.shape,
                        x + drift[i, 0],
                        y + drift[i, 1],
                        RADII[size],
                        COLOURS[colour],
                        code,
                    )
                )
        if scene.star_phase and phase >= scene.star_phase:
            drawn.append(("star", *STAR_CENTRE, 0.08, (255, 255, 255), STAR_CODE))
        for name, x, y, radius, rgb, code in drawn:
            box, cover = _cover(name, x * width, y * height, radius * side, width, height)
            pictures[i][box] += cover[..., None] * (np.array(rgb, np.float32) - pictures[i][box])
            under[i][box][cover > 0.5] = code
    noise = rng.standard_normal(pictures.shape, np.float32)
    pictures += noise * rng.uniform(1, 5)
    return np.rint(pictures, out=pictures).clip(0, 255, out=pictures).astype(np.uint8), under


def _texture(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """A faint smooth pattern of the floor. Returns (height, width) float32, about -6..6."""
    ys, xs = np.mgrid[0:height, 0:width].astype(np.float32)
    angle, period, start = rng.uniform(0, np.pi), rng.uniform(14, 40), rng.uniform(0, 6)
    return 5 * np.sin(
        (xs * np.cos(angle) + ys * np.sin(angle)) * (2 * np.pi / period) + start
    ).astype(np.float32)


def _cover(
    shape: str, x: float, y: float, radius: float, width: int, height: int
) -> tuple[tuple[slice, slice], np.ndarray]:
    """How much of each pixel near (x, y) a shape covers, 0..1, with about one pixel of soft edge.

    Returns:
        The box (rows, columns) of the picture and the cover within it, float32.
    """
    reach = int(radius * 1.1) + 2
    left, right = max(int(x) - reach, 0), min(int(x) + reach + 1, width)
    top, bottom = max(int(y) - reach, 0), min(int(y) + reach + 1, height)
    dy, dx = np.ogrid[top:bottom, left:right]
    dx, dy = np.abs(dx - np.float32(x)), dy - np.float32(y)
    if shape == "circle":
        inside = radius - np.hypot(dx, dy)
    elif shape == "square":
        inside = 0.88 * radius - np.maximum(dx, np.abs(dy))
    elif shape == "triangle":  # apex up, base down
        inside = np.minimum(0.8 * radius - dy, (dy + radius * 1.05) * 0.5 - dx * 0.87)
    elif shape == "cross":
        arm, dy = 0.32 * radius, np.abs(dy)
        inside = np.maximum(np.minimum(radius - dx, arm - dy), np.minimum(radius - dy, arm - dx))
    else:  # star: four points, hollow sides
        inside = (radius**0.5 - np.sqrt(dx) - np.sqrt(np.abs(dy))) * radius**0.5
    return (slice(top, bottom), slice(left, right)), np.clip(inside + 0.5, 0, 1).astype(np.float32)


def write_mp4(
    path: Path, scene: Scene, rng: np.random.Generator, least_frames: int = 0
) -> dict[str, float]:
    """Write a scene as an H.264 MP4 of a drawn size, rate, length and quality; at a higher rate
    where that gives too few frames. Returns those facts."""
    width, height = SIZES[rng.integers(len(SIZES))]
    rate = int(rng.choice(RATES))
    longer = scene.family in ("MLVU", "LVB")
    duration_s = float(rng.uniform(5, 8) if longer else rng.uniform(2, 3.5))
    rate = max(rate, math.ceil((least_frames + 1) / duration_s))
    n_frames = round(duration_s * rate)
    pictures, _ = render(scene, (np.arange(n_frames) + 0.5) / n_frames, width, height, rng)
    crf = int(rng.integers(16, 27))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".partial.mp4")
    with av.open(str(draft), "w") as out:
        # One thread and no arithmetic of one processor's own: the same bytes on every machine.
        x264 = "threads=1:cpu-independent=1"
        options = {"crf": str(crf), "preset": "veryfast", "x264-params": x264}
        stream = out.add_stream("libx264", rate=Fraction(rate), options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for picture in pictures:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode())
    draft.replace(path)
    return {"width": width, "height": height, "fps": rate, "n_frames": n_frames, "crf": crf}


def _has_all_packets(path: Path) -> bool:
    """Whether a file holds as many packets as it says: a cut file does not, nor what is no video."""
    try:
        with av.open(str(path)) as held:
            stream = held.streams.video[0]
            return 0 < stream.frames == sum(packet.size > 0 for packet in held.demux(stream))
    except (OSError, ValueError, IndexError, av.FFmpegError):
        return False


def _make_clip(
    split: str, seed: int, out_folder: Path, least_frames: int, drawn: tuple[str, int, Scene]
) -> Clip:
    """One clip of a family, by its index and scene; see `make_split`."""
    family, index, scene = drawn
    clip_id = f"{split}-{family}-{seed}-{index:04d}"
    path = out_folder / f"{clip_id}.mp4"
    if not _has_all_packets(path):
        key = [seed, list(SPLITS).index(split), FAMILIES.index(family), index]
        write_mp4(path, scene, np.random.default_rng(key), least_frames)
    return Clip(
        clip_id=clip_id,
        benchmark=family,
        split=split,
        path=str(path),
        prompt=question(scene),
        reference=answer(scene),
        facts={"sha256": sha256_of_file(path), "description": scene.description()},
    )


def make_split(
    split: str, clips_per_family: int, out_folder: Path, seed: int = 0, least_frames: int = 0
) -> list[Clip]:
    """Write the first `clips_per_family` clips of each family of a split as MP4 files and return
    their list.

    A file that has all its packets is kept: its name and pictures are functions of (seed, split,
    family, index). Many clips are made by several processes, with the same result.
    """
    make = partial(_make_clip, split, seed, Path(out_folder), least_frames)
    drawn = (
        (family, index, scene)
        for family in FAMILIES
        for index, scene in zip(range(clips_per_family), scenes(split, family, seed), strict=False)
    )
    if clips_per_family * len(FAMILIES) < PARALLEL_FROM or usable_cpus() == 1:
        return [make(one) for one in drawn]
    with worker_pool() as pool:
        return list(pool.map(make, drawn, chunksize=CLIPS_AT_ONCE))
