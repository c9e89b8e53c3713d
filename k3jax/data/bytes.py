"""The byte vocabulary: ids 0-255 are bytes, 256-511 the control ids in the released order.

Control id `256 + i` stands where the released vocabulary has `163584 + i`. Only the two that
pre-training needs are named here.
"""

import numpy as np

NUM_BYTES = 256
BEGIN_OF_DOCUMENT = 256  # released [BOS], 163584
END_OF_DOCUMENT = 257  # released [EOS], 163585: document end in pre-training, not the chat stop
MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD = range(274, 278)  # released 163602 ... 163605
NUM_CONTROL = 256
VOCABULARY = NUM_BYTES + NUM_CONTROL


def encode(text: str | bytes) -> np.ndarray:
    """Bytes of `text` (UTF-8) as int32 ids [T], without control ids."""
    raw = text.encode() if isinstance(text, str) else text
    return np.frombuffer(raw, np.uint8).astype(np.int32)


def decode(ids) -> str:
    """Text of `ids` [T]; control ids are shown as `<256>`, invalid UTF-8 as U+FFFD."""
    pieces, run = [], bytearray()
    for token in np.asarray(ids).reshape(-1).tolist():
        if 0 <= token < NUM_BYTES:
            run.append(token)
            continue
        pieces.append(run.decode(errors="replace"))
        pieces.append(f"<{token}>")
        run = bytearray()
    pieces.append(run.decode(errors="replace"))
    return "".join(pieces)
