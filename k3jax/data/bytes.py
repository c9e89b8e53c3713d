"""The byte vocabulary for training data: `k3jax.chat.ByteVocabulary` with numpy in and out.

Ids 0-255 are bytes, 256-511 the control ids in the released order. Only the control ids that
pre-training needs are named here.
"""

import numpy as np

from k3jax.chat import controls
from k3jax.chat.controls import NUM_CONTROL
from k3jax.chat.vocabulary import NUM_BYTES, ByteVocabulary

VOCABULARY = NUM_BYTES + NUM_CONTROL
BEGIN_OF_DOCUMENT = ByteVocabulary().control_id(controls.BEGIN_OF_DOCUMENT)
END_OF_DOCUMENT = ByteVocabulary().control_id(controls.END_OF_DOCUMENT)
MEDIA_BEGIN = ByteVocabulary().control_id(controls.MEDIA_BEGIN)
MEDIA_CONTENT = ByteVocabulary().control_id(controls.MEDIA_CONTENT)
MEDIA_PAD = ByteVocabulary().control_id(controls.MEDIA_PAD)
MEDIA_END = ByteVocabulary().control_id(controls.MEDIA_END)


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
