"""The 256 control tokens that follow the ordinary ones in every vocabulary, in released order."""

NUM_CONTROL = 256
RELEASED_ORDINARY = 163_584  # ordinary tokens of the released vocabulary: its first control id

BEGIN_OF_DOCUMENT = "[BOS]"  # never written by the chat encoder
END_OF_DOCUMENT = "[EOS]"  # document end in pre-training, not the stop of a chat
END_OF_MESSAGE = "<|end_of_msg|>"  # ends every message; generation stops here
OPEN = "<|open|>"
CLOSE = "<|close|>"
SEPARATOR = "<|sep|>"
MEDIA_BEGIN = "<|media_begin|>"
MEDIA_CONTENT = "<|media_content|>"
MEDIA_END = "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"  # the model puts an item's features in its place

_NAMED = {
    0: BEGIN_OF_DOCUMENT,
    1: END_OF_DOCUMENT,
    2: END_OF_MESSAGE,
    3: OPEN,
    4: CLOSE,
    5: SEPARATOR,
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: MEDIA_BEGIN,
    19: MEDIA_CONTENT,
    20: MEDIA_END,
    21: MEDIA_PAD,
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}

# A reserved token carries its absolute id in the released vocabulary, also in smaller ones.
CONTROL_NAMES: tuple[str, ...] = tuple(
    _NAMED.get(offset, f"<|reserved_token_{RELEASED_ORDINARY + offset}|>")
    for offset in range(NUM_CONTROL)
)
CONTROL_OFFSETS: dict[str, int] = {name: offset for offset, name in enumerate(CONTROL_NAMES)}
