"""Encode random conversations, read them back, and feed damaged streams to the parser.

    python -m experiments.check_chat --count 200000    # under 5 minutes on one core

Each case is one conversation: what is read from its ids must be what was put in, each assistant
message must be written back to the same ids, and two streams (the message, and a damaged copy) must
give the same events in any portions and hold every id once. Ends with status 1 at a mismatch.
"""

import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Sequence

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.random_chats import RandomChat, damage, random_chat
from k3jax import chat


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """How much to check."""

    count: int = 200_000
    """Conversations."""
    seed: int = 0
    """Case n depends on seed and n only."""
    vocabulary: str | None = None
    """A tiktoken file; the byte vocabulary if there is none."""


def written(message: chat.Turn | chat.AssistantMessage) -> tuple:
    """A message in the form of `RandomChat.truth`."""
    if isinstance(message, chat.AssistantMessage):
        calls = tuple(
            (call.tool, tuple(map(tuple, call.arguments)) if call.raw is None else call.raw)
            for call in message.calls
        )
        return ("assistant", message.name, message.reasoning, message.content, calls)
    content = tuple(part if isinstance(part, str) else part.size for part in message.content)
    if message.role == "tool":
        return ("tool", message.name, message.tool, message.index, content)
    return (message.role, message.name, content)


def portions(rng: random.Random, ids: Sequence[int]) -> list[Sequence[int]]:
    """`ids` cut at random places."""
    cuts = sorted(rng.choices(range(len(ids) + 1), k=rng.randint(0, 8)))
    return [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]


def check_stream(
    rng: random.Random, vocabulary: chat.Vocabulary, ids: list[int]
) -> chat.AssistantMessage:
    """Same events in any portions, and every id in one of them."""
    thinking = rng.random() < 0.5
    whole = chat.StreamParser(vocabulary, thinking=thinking)
    events = whole.push(ids) + whole.finish()
    if [token for event in events for token in event.ids] != ids:
        raise AssertionError("ids were lost, doubled or moved")
    cut = chat.StreamParser(vocabulary, thinking=thinking)
    pieces = [event for portion in portions(rng, ids) for event in cut.push(portion)]
    if pieces + cut.finish() != events:
        raise AssertionError("the events depend on the portions")
    message = whole.message()
    said = "".join(event.text for event in events if event.kind == "response")
    if message.content != said or message != cut.message():
        raise AssertionError("the message is not what the events say")
    return message


def check_chat(rng: random.Random, vocabulary: chat.Vocabulary, case: RandomChat) -> int:
    """One conversation and its streams; returns the ids that were read.

    Raises:
        AssertionError: a mismatch.
    """
    encoded = chat.encode(case.messages, **case.options)
    ids, targets = encoded.ids_and_targets(vocabulary)
    read = chat.read_conversation(ids, vocabulary).messages
    said = [message for message in read if getattr(message, "type", None) is None]
    if [written(message) for message in said] != case.truth:
        raise AssertionError("what was read is not what was put in")
    answers = [message for message in said if isinstance(message, chat.AssistantMessage)]
    if any(message.errors or not message.complete for message in answers):
        raise AssertionError("a whole message has errors")
    options = {**case.options, "tools": None, "thinking_effort": None, "tool_choice": None}
    options["add_generation_prompt"] = False
    body = answers[-1].ids
    for form in (answers[-1], answers[-1].to_dict()):
        again = chat.encode([form], **options).ids(vocabulary)
        if tuple(again[-len(body) :]) != body:
            raise AssertionError("a message is not written back to its ids")
    if not any(call.raw is not None for message in answers for call in message.calls):
        # Of each message all but the opener of its first channel is a target.
        opener = 2 + len(vocabulary.encode("think" if case.options["thinking"] else "response"))
        expected = [token for message in answers for token in message.ids[opener:]]
        if list(itertools.compress(ids, targets)) != expected:
            raise AssertionError("the training targets are not what was said")
    check_stream(rng, vocabulary, list(body))
    broken = damage(rng, list(body), vocabulary.size)
    check_stream(rng, vocabulary, broken)
    return len(ids) + 2 * (len(body) + len(broken))


def check_case(vocabulary: chat.Vocabulary, seed: int, number: int) -> int:
    """Case `number` of `seed`; returns the ids that were read."""
    rng = random.Random(f"{seed}/{number}")
    return check_chat(rng, vocabulary, random_chat(rng))


def main(cfg: CheckConfig) -> int:
    """Run all cases; returns the process's status."""
    vocabulary = chat.ByteVocabulary()
    if cfg.vocabulary is not None:
        vocabulary = chat.TiktokenVocabulary.from_file(cfg.vocabulary, allow_other=True)
    mismatches = num_ids = 0
    start, start_used = time.perf_counter(), time.process_time()
    columns = (TextColumn("chats"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("", total=cfg.count)
        for number in range(cfg.count):
            try:
                num_ids += check_case(vocabulary, cfg.seed, number)
            except Exception as error:
                mismatches += 1
                progress.console.print(f"case {number} of seed {cfg.seed}: {error!r}", markup=False)
            if number % 500 == 499:
                progress.update(task, completed=number + 1)
        progress.update(task, completed=cfg.count)
    seconds, used = time.perf_counter() - start, time.process_time() - start_used
    print(
        f"{cfg.count} conversations, {num_ids} ids read, {mismatches} mismatches; {seconds:.0f} s, "
        f"{used:.0f} s of processor time"
    )
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(CheckConfig, description=__doc__)))
