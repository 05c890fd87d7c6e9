"""What the positions of a prompt are: video, the user's text, or what the template puts around them.

kinds = prompt_kinds(target, clip.prompt, input_ids)
last_instruction = last_position(kinds, INSTRUCTION)
"""

from __future__ import annotations

from torch import Tensor

from vflash_analysis.errors import InputError
from vflash_analysis.model import inputs
from vflash_analysis.model.frozen import Target

INSTRUCTION, VISUAL, TEMPLATE = range(3)
KIND_NAMES = ("instruction", "visual", "text")


def prompt_kinds(target: Target, question: str, input_ids: Tensor) -> Tensor:
    """The kind of every position of a prompt with a video.

    INSTRUCTION: the tokens that hold any character of the user's text. VISUAL: the video's tokens,
    the newline token after the last frame included. TEMPLATE: all others, which the chat template adds:
    who speaks, what ends a turn, and the head of the answer.

    Args:
        target: its tokenizer and chat template made the prompt.
        question: the user's text.
        input_ids: (P,) from `Target.build_prompt` with that text.

    Returns:
        (P,) int64 on the ids' device.

    Raises:
        InputError: the target reads no video, or the text is empty, does not follow the video as it
            stands, or does not give this prompt.
    """
    if target.preprocessing is None:
        raise InputError(
            f"{target.source}: reads no video, allowed: a target with visual tokens, whose share "
            "this measures"
        )
    text, words = inputs.prompt_text(target, question), question.strip()
    ids = inputs.turn_ids(target, text)
    place = ids.index(target.video_token_id)
    encoded = target.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans: list[tuple[int, int]] = encoded["offset_mapping"]
    begin = text.find(words, spans[place][1]) if words else -1
    if begin < 0:
        raise InputError(
            f"{target.template_file}: found the text {question[:60]!r} not after the video in the "
            "filled chat template, allowed: a text that follows it unchanged"
        )
    end = begin + len(words)
    video_tokens = int((input_ids == target.video_token_id).sum())
    if len(ids) - 1 + video_tokens != len(input_ids):
        raise InputError(
            f"prompt: found {len(input_ids)} tokens, {len(ids) - 1 + video_tokens} by its text"
        )
    kinds = input_ids.new_full((len(input_ids),), TEMPLATE)
    kinds[input_ids == target.video_token_id] = VISUAL
    for number, (first, past) in enumerate(spans):
        if first < end and past > begin:
            kinds[number if number < place else number - 1 + video_tokens] = INSTRUCTION
    return kinds


def last_position(kinds: Tensor, kind: int) -> int:
    """The last position of a kind that is there."""
    return int((kinds == kind).nonzero()[-1])
