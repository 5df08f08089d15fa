import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from yunlu.training.models.networks import ConvGRU


@pytest.fixture
def model() -> ConvGRU:
    torch.manual_seed(0)
    return ConvGRU(6, 5, hidden=8, layers=2).eval()


def test_what_a_sample_gets_does_not_depend_on_the_padding_of_its_batch(model: ConvGRU) -> None:
    sounds = [torch.randn(length, 6) for length in (37, 5, 64, 18)]
    lengths = torch.tensor([len(sound) for sound in sounds])

    together = model(pad_sequence(sounds, batch_first=True), lengths)

    for row, sound in enumerate(sounds):
        alone = model(sound[None], lengths[row : row + 1])[0]
        assert len(alone) == int(model.output_lengths(lengths)[row])
        torch.testing.assert_close(together[row, : len(alone)], alone)


def test_what_lies_in_the_padding_does_not_matter(model: ConvGRU) -> None:
    frames, lengths = torch.randn(2, 20, 6), torch.tensor([20, 9])
    scores = model(frames, lengths)
    frames[1, 9:] = 1e3

    torch.testing.assert_close(model(frames, lengths), scores)


@pytest.mark.parametrize("length", range(1, 14))
def test_a_quarter_of_the_frames_remain(model: ConvGRU, length: int) -> None:
    scores = model(torch.randn(1, length, 6), torch.tensor([length]))

    assert scores.shape == (1, -(-length // 4), 5)
    assert int(model.output_lengths(torch.tensor(length))) == scores.shape[1]


def test_later_sound_reaches_earlier_scores(model: ConvGRU) -> None:
    """It listens in both directions: the last frame matters for the first score."""
    frames, lengths = torch.randn(1, 40, 6), torch.tensor([40])
    before = model(frames, lengths)[0, 0]
    frames[0, -1] += 1.0

    assert not torch.equal(model(frames, lengths)[0, 0], before)
