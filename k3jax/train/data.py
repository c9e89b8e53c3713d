"""What a run trains on and is measured on, read and checked before anything else is done."""

import dataclasses

from k3jax.config import K3Config
from k3jax.data.bytes import END_OF_DOCUMENT, MEDIA_PAD
from k3jax.data.corpus import Corpus, load_corpus
from k3jax.data.mixture import Mixture
from k3jax.data.packing import PackedRows
from k3jax.data.picture_rows import PictureRows
from k3jax.data.pictures import Digits, TextPictures, split_words
from k3jax.errors import UserError
from k3jax.train.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """A corpus, the rows to train on, and those held out."""

    corpus: Corpus
    mixture: Mixture
    held_out: PackedRows
    held_out_pictures: PictureRows | None


def read_data(config: TrainConfig, model: K3Config) -> TrainingData:
    """Load, split and pack the data of a run. Needs no device.

    Raises:
        UserError: no text, too little for one batch, a model without the byte vocabulary, shares
            that do not fit, pictures that do not fit a row.
    """
    if model.vocab_size <= END_OF_DOCUMENT:
        raise UserError(
            f"vocab_size={model.vocab_size} has no room for 256 bytes and the two document marks; "
            f"training on bytes needs at least {END_OF_DOCUMENT + 1}"
        )
    shares = config.data.shares(model.vision is not None)
    corpus = load_corpus(config.data.path, held_out_fraction=config.data.held_out_fraction)
    train = PackedRows(corpus.train, config.length, config.seed)
    if len(train) < config.batch:
        raise UserError(
            f"the corpus ({corpus.source}) has {corpus.train.num_bytes:,} bytes to train on: "
            f"{len(train)} rows of {config.length}, and one batch takes {config.batch}. Add text, "
            "or lower --length or --batch"
        )
    sources, held_out_pictures = {"text": train}, None
    if shares["pictures"] or shares["digits"]:
        try:
            pictures, held_out_pictures = _pictures(config, model, corpus, shares)
            sources |= pictures
        except UserError as error:
            if config.data.pictures is not None or config.data.digits:
                raise
            # Nobody asked for pictures: a text that has none trains alone, and says so.
            shares = {"text": 1.0}
            corpus = dataclasses.replace(corpus, notes=(*corpus.notes, f"no pictures: {error}"))
    # Held-out rows do not depend on the seed: runs with other seeds are measured alike.
    return TrainingData(
        corpus,
        Mixture(sources, shares, config.seed),
        PackedRows(corpus.held_out, config.length, 0),
        held_out_pictures,
    )


def _pictures(config: TrainConfig, model: K3Config, corpus: Corpus, shares: dict[str, float]):
    """Rows with pictures to train on, by source, and the held-out ones."""
    if model.media_placeholder_id != MEDIA_PAD:
        raise UserError(
            f"media_placeholder_id={model.media_placeholder_id} is not that of the byte "
            f"vocabulary, {MEDIA_PAD}; set --data.pictures 0 to train on text alone"
        )
    patch_size = model.vision.patch_size
    sources = {}
    if shares["digits"]:
        sources["digits"] = PictureRows(Digits(), config.length, patch_size)
        held_out = Digits(held_out=True)
    if shares["pictures"]:
        shown, unseen = split_words(corpus, config.data.held_out_fraction)
        sources["pictures"] = PictureRows(TextPictures(shown), config.length, patch_size)
        held_out = TextPictures(unseen)
    return sources, PictureRows(held_out, config.length, patch_size)
