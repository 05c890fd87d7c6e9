"""Instructions for a language model: every request of a list about every thing of another.

They stand in for clips where the target reads no video: a `Clip` without a file, its prompt the
instruction. Training and held-out instructions share the requests and no thing.
"""

from vflash_analysis.clips.lists import Clip
from vflash_analysis.errors import InputError

BENCHMARK = "instructions"
REQUESTS = (
    "What is {} used for?",
    "Describe {} to a child.",
    "Name three facts about {}.",
    "Write a short story that begins beside {}.",
    "What should I know before I buy {}?",
    "List the parts of {}.",
    "Who would need {}, and why?",
    "How is {} made?",
    "Compare {} with what people used before it.",
    "Write two sentences of advertising for {}.",
    "What can go wrong with {}?",
    "How do I take care of {}?",
)
_TRAINING = (
    "bicycle, kettle, telescope, piano, ladder, compass, sewing machine, rowing boat, clay pot, "
    "camera, wool blanket, bread oven, water filter, rain barrel, bookshelf, garden hose, hammer, "
    "microscope, wheelbarrow, candle, greenhouse, backpack, wall clock, fishing net, solar panel, "
    "washing machine, skateboard, chess board, fountain pen, kite, canoe, wood stove, lawn mower, "
    "mirror, radio, suitcase, hammock, coffee grinder, paint brush, toolbox, desk lamp, drum, "
    "thermometer, bird house, raincoat, sailing boat, weather vane, frying pan, mailbox, guitar, "
    "pocket knife, snow shovel, carpet, fireplace, windmill, tractor, bee hive, wheelchair, "
    "calculator, rope bridge"
)
_HELD_OUT = (  # settings were tried out on texts about other things, listed nowhere here
    "harp, stapler, globe, stroller, hourglass, zip line, seesaw, sprinkler, harmonica, blender, "
    "playpen, smoke detector, spirit level, glider, chopping block, bunk bed, cash register, "
    "freezer, torch, snowmobile, harbour crane, lighthouse, corkscrew, dishwasher, letter opener, "
    "metronome, nutcracker, parking meter, pencil sharpener, pulley, rolling pin, saddle, "
    "school bus, shoe rack, spinning wheel, toaster, turntable, towel rack, wetsuit, xylophone"
)
THINGS = {
    split: tuple(f"a {name}" for name in names.split(", "))
    for split, names in (("training", _TRAINING), ("held_out", _HELD_OUT))
}


def instructions(split: str, count: int) -> list[Clip]:
    """The first instructions of a split: things in turn, each asked about in another way.

    Args:
        split: "training" or "held_out".
        count: how many.

    Raises:
        InputError: more than there are, or another split.
    """
    if split not in THINGS:
        raise InputError(f"split: found {split!r}, allowed: {', '.join(THINGS)}")
    things = THINGS[split]
    most = len(things) * len(REQUESTS)
    if not 1 <= count <= most:
        raise InputError(f"{split} instructions: found {count}, allowed: 1 to {most}")
    clips = []
    for number in range(count):
        turn, place = divmod(number, len(things))
        request = REQUESTS[(place + turn) % len(REQUESTS)]
        prompt = request.format(things[place])
        clips.append(Clip(f"{split}-{number:03d}", BENCHMARK, split, "", prompt))
    return clips
