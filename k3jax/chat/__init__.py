"""Chat format and tokenizer of Kimi K3, without jax: conversations to ids, output to messages.

    from k3jax import chat

    vocabulary = chat.ByteVocabulary()  # or chat.TiktokenVocabulary.from_file("tiktoken.model")
    prompt = chat.encode([{"role": "user", "content": "2+2?"}], thinking_effort="low")
    prompt.ids(vocabulary)      # ids up to the open think channel
    prompt.targets(vocabulary)  # for each id, whether training predicts it

    parser = chat.StreamParser(vocabulary, thinking=True)
    for event in parser.push(ids):  # any portions of what the model writes
        print(event.kind, event.text)
    parser.finish()
    message = parser.message()  # reasoning, content, calls; may stand among later messages

Text never becomes a control token, whatever it spells. Output is read by ids, and nothing in it is
repaired: errors are reported and every id is in an event.
"""

from k3jax.chat.arguments import Argument
from k3jax.chat.controls import CONTROL_NAMES, NUM_CONTROL
from k3jax.chat.conversation import Conversation, read_conversation
from k3jax.chat.encoder import EncodedChat, encode
from k3jax.chat.events import Event
from k3jax.chat.markup import Segment
from k3jax.chat.messages import AssistantMessage, Call, MediaItem, Turn
from k3jax.chat.parser import StreamParser, parse
from k3jax.chat.vocabulary import (
    NUM_BYTES,
    RELEASED_DIGEST,
    ByteVocabulary,
    TiktokenVocabulary,
    Vocabulary,
)

__all__ = [
    "CONTROL_NAMES",
    "NUM_BYTES",
    "NUM_CONTROL",
    "RELEASED_DIGEST",
    "Argument",
    "AssistantMessage",
    "ByteVocabulary",
    "Call",
    "Conversation",
    "EncodedChat",
    "Event",
    "MediaItem",
    "Segment",
    "StreamParser",
    "TiktokenVocabulary",
    "Turn",
    "Vocabulary",
    "encode",
    "parse",
    "read_conversation",
]
