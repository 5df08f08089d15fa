"""Synthetic data sets: ``synthetic:NAME``, the same on every machine, no download."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from yunlu.core.errors import DataError, did_you_mean
from yunlu.training.data.table import DataTable

Generator = Callable[[int], DataTable | Path]
"""Takes a seed; returns the table, or the file or folder it wrote (below ``Settings.cache``)."""

GENERATORS: dict[str, Generator] = {}
SYNTHETIC_SEED = 20250101
"""Fixed: a synthetic data set does not depend on the job's seed."""

# Module of each name; imported on demand, since some generators need more packages.
_MODULES = {
    "films": __name__,
    "reviews": "yunlu.training.data.synthetic_text",
    "dates": "yunlu.training.data.synthetic_text",
    "python-docs": "yunlu.training.data.synthetic_text",
    "spoken-words": "yunlu.training.data.synthetic_speech",
    "spoken-digits": "yunlu.training.data.synthetic_speech",
}


def generator_of(name: str) -> Callable[[Generator], Generator]:
    """Register a generator under ``synthetic:NAME``."""

    def register(generator: Generator) -> Generator:
        GENERATORS[name] = generator
        return generator

    return register


def generate(name: str) -> DataTable | Path:
    """Generate the data set of that name."""
    if name not in GENERATORS and name in _MODULES:
        importlib.import_module(_MODULES[name])
    if name not in GENERATORS:
        raise DataError(
            f"There is no synthetic data set named {name!r}",
            hint=did_you_mean(name, _MODULES.keys() | GENERATORS.keys()),
        )
    return GENERATORS[name](SYNTHETIC_SEED)


@generator_of("films")
def generate_ratings(seed: int) -> DataTable:
    """Film ratings from 1 to 5 by users with latent tastes.

    A rating is the sum of a mean, a user bias, an item bias, the agreement of five-dimensional user
    tastes and film traits (the largest part), and noise of 0.4 stars. Popularity is uneven: some
    films are rated by many.
    """
    users, items, ratings, taste_dims = 400, 240, 16_000, 5
    rng = np.random.default_rng(seed)
    taste, trait = rng.normal(size=(users, taste_dims)), rng.normal(size=(items, taste_dims))
    mood, quality = rng.normal(0, 0.3, users), rng.normal(0, 0.4, items)
    fame = rng.dirichlet(np.full(items, 2.0))
    # A user rates a film once: the top of (log popularity + Gumbel noise) samples without replacement.
    keys = np.log(fame)[None, :] + rng.gumbel(size=(users, items))
    pairs = np.sort(np.argpartition(-keys, ratings // users, axis=1)[:, : ratings // users])
    user, item = np.repeat(np.arange(users), ratings // users), pairs.reshape(-1)
    agreement = (taste[user] * trait[item]).sum(axis=1) / np.sqrt(taste_dims)
    stars = 3.2 + mood[user] + quality[item] + 0.9 * agreement + rng.normal(0, 0.4, len(user))
    order = rng.permutation(len(user))
    rating = np.clip(np.round(stars * 2) / 2, 1, 5).astype(np.float32)
    return DataTable(
        {
            "user": [f"u{number:03d}" for number in user[order].tolist()],
            "item": [f"film-{number:03d}" for number in item[order].tolist()],
            "rating": rating[order],
        }
    )
