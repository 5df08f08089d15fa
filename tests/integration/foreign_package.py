"""A package of somebody else's: one file behind each door, registered by entry point."""

from __future__ import annotations

from pathlib import Path

TASK = '''
import torch
from torch import nn

from yunlu.training.data.sources import load_tables
from yunlu.training.tasks.scoring import RegressionScorer
from yunlu.training.tasks.task import Batch, ModelPrediction, Splits, call


class Denoise:
    """Images from noisy ones."""

    metric = "rmse"

    def load(self, job):
        tables = load_tables(job.data, seed=job.train.seed)
        parts = (tables.train, tables.validation, tables.test)
        train, held_out, test = (torch.tensor(part["image"]).float().flatten(1) / 16 for part in parts)
        return Splits(train=train, validation=held_out, test=test, fingerprint=tables.fingerprint)

    def build(self, job):
        return nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 64))

    def collate(self, samples):
        pixels = torch.stack(list(samples))
        return Batch(inputs=(pixels,), targets=pixels, samples=len(pixels), items=len(pixels))

    def loss(self, model, batch):
        outputs = call(model, batch)
        return (outputs - batch.targets).square().mean(1).sum(), outputs

    def scorer(self):
        return RegressionScorer()

    def save_artifacts(self, directory):
        pass

    def restore(self, job, directory):
        pass

    def predict(self, model, inputs):
        pixels = torch.tensor(inputs).float()
        return [ModelPrediction(value=float(row.mean())) for row in model(pixels)]
'''

TRAITS = """
from yunlu.spec.task_traits import TaskTraits

DENOISE = TaskTraits(model="bottleneck", hints=(("image_size: 8", "pixels"),))
"""

SAMPLER = '''
class Halving:
    """The middle, then the middle of the upper half, and so on."""

    def __init__(self, draws, *, seed):
        self._dimensions = draws.dimensions

    def suggest(self, snapshot):
        share = 1 - 0.5 ** (len(snapshot.trials) + 1)
        return {d.name: d.low + (d.high - d.low) * share for d in self._dimensions}
'''

CODEC = '''
import torch


class Halves:
    """16-bit floats."""

    name = "halves"

    def size_bytes(self, length):
        return 2 * length

    def encode(self, values, out, *, seed):
        out.copy_(values.to(torch.bfloat16).view(torch.uint8))

    def decode(self, data, out, *, add=False):
        values = data.clone().view(torch.bfloat16).float()
        out.add_(values) if add else out.copy_(values)
'''

POLICY = '''
from yunlu.scheduler.policy.baselines import Fifo


class Politest(Fifo):
    """First come, first served, under another name."""

    name = "politest"
'''

ENTRY_POINTS = """
[yunlu.tasks]
denoise = foreign_task:Denoise
[yunlu.task_traits]
denoise = foreign_traits:DENOISE
[yunlu.samplers]
halving = foreign_sampler:Halving
[yunlu.codecs]
halves = foreign_codec:Halves
[yunlu.policies]
politest = foreign_policy:Politest
"""


def install(directory: Path) -> Path:
    """Write the package as an installer would; the directory then goes on the path."""
    sources = {
        "task": TASK,
        "traits": TRAITS,
        "sampler": SAMPLER,
        "codec": CODEC,
        "policy": POLICY,
    }
    metadata = directory / "foreign_doors-1.0.dist-info"
    metadata.mkdir(parents=True)
    for name, source in sources.items():
        (directory / f"foreign_{name}.py").write_text(source)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-doors\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return directory
