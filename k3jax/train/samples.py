"""Text that a trained model writes."""

import jax
import numpy as np

from k3jax.data.bytes import BEGIN_OF_DOCUMENT, END_OF_DOCUMENT, decode, encode
from k3jax.data.corpus import Corpus
from k3jax.data.picture_rows import picture_ids
from k3jax.infer.generate import generate
from k3jax.media import MediaConfig, process_media
from k3jax.train.run_directory import RunDirectory

LIBRARY_PROMPTS = ("import ", "def ", "class ", '"""')
NUM_PROMPTS, PROMPT_BYTES = 4, 12


def choose_prompts(corpus: Corpus) -> tuple[str, ...]:
    """Openings for samples: those of Python, or the first words of held-out documents."""
    if corpus.is_library:
        return LIBRARY_PROMPTS
    documents = corpus.held_out
    count = min(NUM_PROMPTS, len(documents.names))
    first = (documents.document(i)[:PROMPT_BYTES].tobytes() for i in range(count))
    return tuple(raw.decode(errors="ignore") for raw in first)


def continue_prompts(
    model,
    prompts,
    *,
    pictures=(),
    num_bytes: int,
    temperature: float,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[str]:
    """What the model writes after each prompt, up to the end of a document.

    Args:
        model: a model with the byte vocabulary.
        prompts: texts, str or bytes; each begins a document.
        pictures: shown before the text of every prompt (see `k3jax.process_media`).
        num_bytes: bytes to add at most.
        temperature: see `k3jax.generate`.
        top_p: see `k3jax.generate`.
        seed: of the sampling.
    """
    media, shown = None, []
    if pictures:
        config = MediaConfig(patch_size=model.cfg.vision.patch_size)
        media = process_media(list(pictures) * len(prompts), config=config)
        shown = [picture_ids(size) for size in media.sizes[: len(pictures)]]
    ids = [np.concatenate([[BEGIN_OF_DOCUMENT], *shown, encode(prompt)]) for prompt in prompts]
    width = max(map(len, ids))
    tokens = np.zeros((len(ids), width), np.int32)
    segment_ids = np.zeros_like(tokens)
    for row, prompt in enumerate(ids):  # padded on the left
        tokens[row, width - len(prompt) :] = prompt
        segment_ids[row, width - len(prompt) :] = 1
    new = generate(
        model,
        tokens,
        segment_ids=segment_ids,
        media=media,
        max_new_tokens=num_bytes,
        temperature=temperature,
        top_p=top_p,
        key=jax.random.key(seed),
        stop_ids=(END_OF_DOCUMENT,),
    )
    texts = []
    for row in np.asarray(new):
        ends = np.flatnonzero(row == END_OF_DOCUMENT)
        texts.append(decode(row[: ends[0]] if ends.size else row))
    return texts


def write_samples(run: RunDirectory, model, prompts, num_bytes: int, seed: int) -> str:
    """Continue a few openings into samples.txt; the text."""
    texts = continue_prompts(model, prompts, num_bytes=num_bytes, temperature=0.7, seed=seed)
    blocks = [f"--- prompt {p!r}\n{p}{text}\n" for p, text in zip(prompts, texts, strict=True)]
    text = "\n".join(blocks)
    run.samples_file.write_text(text)
    return text
