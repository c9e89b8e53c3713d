"""The text of a run, read and checked before anything else is done."""

import dataclasses

from k3jax.config import K3Config
from k3jax.data.bytes import END_OF_DOCUMENT
from k3jax.data.corpus import Corpus, load_corpus
from k3jax.data.packing import PackedRows
from k3jax.errors import UserError
from k3jax.train.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """A corpus and its rows."""

    corpus: Corpus
    train: PackedRows
    held_out: PackedRows


def read_data(config: TrainConfig, model: K3Config) -> TrainingData:
    """Load, split and pack the text of a run. Needs no device.

    Raises:
        UserError: no text, too little for one batch, or a model without the byte vocabulary.
    """
    if model.vocab_size <= END_OF_DOCUMENT:
        raise UserError(
            f"vocab_size={model.vocab_size} has no room for 256 bytes and the two document marks; "
            f"training on bytes needs at least {END_OF_DOCUMENT + 1}"
        )
    corpus = load_corpus(config.data.path, held_out_fraction=config.data.held_out_fraction)
    train = PackedRows(corpus.train, config.length, config.seed)
    if len(train) < config.batch:
        raise UserError(
            f"the corpus ({corpus.source}) has {corpus.train.num_bytes:,} bytes to train on: "
            f"{len(train)} rows of {config.length}, and one batch takes {config.batch}. Add text, "
            "or lower --length or --batch"
        )
    # Held-out rows do not depend on the seed: runs with other seeds are measured alike.
    return TrainingData(corpus, train, PackedRows(corpus.held_out, config.length, 0))
