"""Pictures about reading: does the model look, and what does it see?"""

from pathlib import Path

import matplotlib.pyplot as plt

RIGHT_COLOR, SWAPPED_COLOR = "#1b7837", "#b2182b"
COLUMNS = 4


def reading_curve(records: list[dict]):
    """Bits per byte of held-out words with the right and with a swapped picture, by step."""
    measured = [record for record in records if "picture_bits_per_byte" in record]
    steps = [record["step"] for record in measured]
    figure, axes = plt.subplots(figsize=(9, 4))
    for key, color, label in (
        ("swapped_picture_bits_per_byte", SWAPPED_COLOR, "picture of another word"),
        ("picture_bits_per_byte", RIGHT_COLOR, "picture of the word"),
    ):
        values = [record[key] for record in measured]
        axes.plot(steps, values, "o-", color=color, ms=4, label=label)
        axes.annotate(
            f"{values[-1]:.2f}",
            (steps[-1], values[-1]),
            xytext=(0, 6),
            textcoords="offset points",
            ha="right",
            color=color,
        )
    axes.set(
        title="Words in pictures", xlabel="step", ylabel="bits per byte of the word", ylim=(0, None)
    )
    axes.legend(loc="lower left")
    return figure


def write_pictures(folder: Path, examples) -> list[Path]:
    """Held-out pictures as files, for `k3jax generate --image`; each is named by its word."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{pair.text}.png" for pair, _ in examples]
    for path, (pair, _) in zip(paths, examples, strict=True):
        pair.image.save(path)
    return paths


def reading_examples(examples):
    """Held-out pictures, each with what the model takes it for."""
    shown = list(examples)[: 4 * COLUMNS]
    rows = -(-len(shown) // COLUMNS)
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(9, 0.9 * rows + 0.4), squeeze=False)
    figure.suptitle("Held-out pictures and the model's guesses", x=0.01, ha="left", weight="bold")
    for axes in grid.flat:
        axes.axis("off")
    for axes, (pair, guess) in zip(grid.flat, shown, strict=False):
        axes.imshow(pair.image)
        right = guess == pair.text
        # A guess may hold anything; text between dollar signs would be read as mathematics.
        title = "".join(c if c.isprintable() else "." for c in guess).replace("$", r"\$")
        axes.set_title(title, fontsize=9, color=RIGHT_COLOR if right else SWAPPED_COLOR, loc="left")
    return figure
