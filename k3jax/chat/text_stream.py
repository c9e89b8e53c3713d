"""Text of ordinary ids one by one, where characters and ids need not begin and end together."""

import codecs

from k3jax.chat.vocabulary import Vocabulary

Piece = tuple[str, tuple[int, ...]]  # some text, and the ids that completed it


class TextStream:
    """Decodes UTF-8 across ids; bytes that form no character become U+FFFD."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[int] = []  # ids that have not completed a character
        self.is_between_characters = True  # whether the next id can be decoded by itself

    def push(self, token: int) -> Piece | None:
        """Text that `token` completes, or None."""
        self._held.append(token)
        text = self._decoder.decode(self._vocabulary.token_bytes(token))
        waits = bool(self._decoder.getstate()[0])
        if text:
            piece = (text, tuple(self._held))
            self._held = []
        else:
            piece = None
        self.is_between_characters = not waits and not self._held
        return piece

    def flush(self) -> Piece | None:
        """No text follows: what is still held, or None."""
        if self.is_between_characters:
            return None
        piece = (self._decoder.decode(b"", True), tuple(self._held))
        self._held = []
        self.is_between_characters = True
        return piece
